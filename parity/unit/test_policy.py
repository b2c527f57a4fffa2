"""Where a production rounds, told from its values: right for every named policy, red where a declaration is too wide or too narrow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reference
from parity import policy
from parity.audit import Plan
from parity.outside import NotExposedError, OutsideAudit
from probes.core.inputs import read_prompt
from probes.core.records import State
from reference import ops
from reference.formats import NAMED, POINTS, round_bf16, round_e4m3_blocks

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
LAYERS = range(3)


def audit_of(rounds: str, shown: tuple[str, ...] | None = None) -> OutsideAudit:
    """The reference under a policy stands for production; shown: kinds of points it shows, None: all."""
    production = reference.load(TINY, policy=rounds, layers=LAYERS, max_context=128)
    if shown is not None:
        production.taps.points = tuple(point for point in production.taps.points if point.endswith(shown))
    prompt = read_prompt("medium.txt:0:60", TINY, production.config.vocab_size)
    plan = Plan([prompt.ids], [prompt.continuation], ("prefill",), tuple(LAYERS), 0, 128)
    return OutsideAudit(reference.load(TINY, policy=rounds, layers=LAYERS, max_context=128), production, [], plan, say=lambda line: None)


@pytest.mark.parametrize("rounds", NAMED)
def test_every_named_policy_is_seen_as_declared(rounds: str) -> None:
    audit = audit_of(rounds)
    for name in policy.SEEN:
        verdict = policy.judge_policy(audit, name)
        assert verdict.state is State.PASS, (name, verdict.reason)
    for m in policy.measurements(audit):
        if m.values["rounding"] in policy.SEEN:
            assert m.values["rounds"] is (m.values["rounding"] in NAMED[rounds]), m
    published = [m.values["otherwise"] for m in policy.measurements(audit) if m.values["otherwise"]]
    assert (published == []) is (rounds == "published")


def test_a_rounding_that_is_declared_and_not_done_is_red_and_the_other_way_round() -> None:
    exact, stored = audit_of("exact"), audit_of("storage")
    for name in ("kv.e4m3", "compressor.e4m3", "indexer.q.e2m1", "indexer.compressor.e2m1"):
        exact.production.policy, stored.production.policy = frozenset({name}), NAMED["storage"] - {name}
        for audit, words in ((exact, "declared, and 0 of"), (stored, "not declared, and")):
            verdict = policy.judge_policy(audit, name)
            assert verdict.state is State.FAIL
            assert words in verdict.reason
    exact.production.policy = frozenset({"bf16"})
    verdict = policy.judge_policy(exact, "bf16")
    assert verdict.state is State.FAIL
    worst = min(verdict.details["shares"], key=lambda point: verdict.details["shares"][point][0] / verdict.details["shares"][point][1])
    on, values = verdict.details["shares"][worst]
    assert verdict.details["because"] == f"bf16 is declared and {on} of {values} values lie on its grid ({worst})"
    assert verdict.details["throughout"]
    assert verdict.value is not None
    assert verdict.value > 0.99


def test_one_value_off_a_declared_grid_is_red() -> None:
    audit = audit_of("storage")
    audit.ensure("prefill")
    shown = audit.passes["production", "prefill", None].passes["prefill", None].chunks["layers.0.attn.kv"]
    shown[0] = shown[0].clone()
    shown[0][0, 3, 5] *= 1.001
    verdict = policy.judge_policy(audit, "kv.e4m3")
    assert verdict.state is State.FAIL
    assert not verdict.details["throughout"], "one value says nothing of the declaration"


def test_a_point_that_is_not_shown_is_not_covered_and_not_passed() -> None:
    audit = audit_of("exact", shown=("hc_ffn.X", "embed", "logits"))
    with pytest.raises(NotExposedError):
        policy.judge_policy(audit, "kv.e4m3")
    assert policy.judge_policy(audit, "bf16").state is State.PASS


def test_the_hadamard_rotation_is_told_from_what_the_model_had_in_hand() -> None:
    audit = audit_of("exact")
    for name in policy.SEEN:
        policy.judge_policy(audit, name)
    point = "layers.2.attn.indexer.q"
    (found,) = policy.hadamard(audit)
    assert found.values["rounds"] is True
    assert found.values["otherwise"] == ""
    audit.production.raw = {point: ops.hadamard(audit.get("production", point, "prefill"))}
    (found,) = policy.hadamard(audit)
    assert found.values["rounds"] is False
    assert "does not rotate" in found.values["otherwise"]


def test_grids_are_told_apart_and_zeros_and_rows_that_are_not_there_do_not_count() -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    assert policy.on_grid(x, round_bf16)[0] < 8
    assert policy.on_grid(round_bf16(x), round_bf16) == (64 * 128, 64 * 128)
    on, values = policy.on_grid(round_bf16(x), lambda v: round_e4m3_blocks(v, 64))
    assert 0.03 < on / values < 0.12  # 1/16
    x[:, 0], x[5] = 0.0, torch.nan
    assert policy.on_grid(x, round_bf16)[1] == 63 * 127


def test_every_rounding_point_has_its_place() -> None:
    assert policy.SEEN.keys() | policy.UNSEEN.keys() == POINTS
    assert not policy.SEEN.keys() & policy.UNSEEN.keys()
