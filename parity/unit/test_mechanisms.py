"""What a run exercised is counted from what it showed, and a cover is a check that this run judged."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import production
import reference
from parity.audit import Audit, Plan
from parity.mechanisms import COVERS, Cover, applies, mechanisms, unexercised
from parity.unit.test_session import Shell
from parity.unit.worlds import prompt, write_checkpoint
from probes.core.records import Mechanism, State, Verdict, read_run
from production.model import POLICY

STEPS, LENGTHS = 5, (31, 22)


def check(point, state=State.PASS, rows=1):
    return Verdict("operation", point, "operation", state, "different elements", rows=rows)


# ---- counts ----


@pytest.fixture(scope="module")
def audit(tmp_path_factory):
    """Window, CSA and HCA layer, a window of 16, an indexer that discards from entry 8 on; rows of 31 and 22 tokens."""
    torch.set_num_threads(1)
    world = write_checkpoint(tmp_path_factory.mktemp("mechanisms") / "world", seed=7, hc_mult=3, hc_sinkhorn_iters=6)
    model = reference.load(world, policy=POLICY, max_context=64)
    rows = [tuple(prompt(n, 128, 17 * i)) for i, n in enumerate(LENGTHS)]
    made = Audit(model, production.load(world, max_context=64), [model.twin(1)], Plan(rows, [(), ()], ("prefill", "decode"), (0, 1, 2), STEPS, 64), say=lambda _: None)
    made.ensure("decode")
    return made


def counts_of(audit, records=()):
    return {m.name: m.count for m in mechanisms(audit, records)}


def test_counts_are_what_brute_force_finds(audit):
    found, W = counts_of(audit), audit.config.sliding_window
    prefill = [p for n in LENGTHS for p in range(n)]
    decode = [(n, p) for n in LENGTHS for p in range(n, n + STEPS)]
    assert [audit.config.kind(layer) for layer in audit.plan.layers] == ["window", "csa", "hca"]
    assert found["window wraps, prefill"] == sum(p >= W for p in prefill)
    assert found["window wraps, decode"] == sum(p >= W for _, p in decode)
    for kind, ratio in (("CSA", 4), ("HCA", 128)):
        assert found[f"{kind} entry finished in prefill"] == sum((p + 1) % ratio == 0 for p in prefill)
        assert found[f"{kind} entry finished in decode"] == sum((p + 1) % ratio == 0 for _, p in decode)
        carried = [p for n, p in decode if (p + 1) % ratio == 0 and p + 1 - ratio < n]
        assert found[f"open {kind} group carried into decode"] == len(carried)
    discards = {phase: sum((p + 1) // 4 > audit.config.index_topk for p in asked) for phase, asked in (("prefill", prefill), ("decode", [p for _, p in decode]))}
    assert discards == {phase: found[f"indexer discards entries, {phase}"] for phase in discards}
    assert min(discards.values()) >= 0 < sum(discards.values())
    assert found["keys split in decode"] == 0  # never more than 16 + 8 keys
    assert found["batch rows of unequal length"] == 1
    assert found.get("hash-routed layers", 0) + found.get("score-routed layers", 0) == 3


def test_counts_follow_what_was_shown_and_not_the_positions(audit, monkeypatch):
    """Production that never writes an entry exercised none, whatever the lengths promise."""
    values = audit.values

    def silent(who, point, phase, steps=None):
        value = values(who, point, phase, steps)
        return torch.full_like(value, torch.nan) if point.endswith("attn.compressor") else value

    monkeypatch.setattr(audit, "values", silent)
    found = counts_of(audit)
    assert [count for name, count in found.items() if "CSA" in name] == [0, 0, 0]


def test_a_tap_that_never_fired_exercised_nothing(audit, monkeypatch):
    monkeypatch.setattr(audit, "fired", lambda *_: 0)
    found = counts_of(audit)
    assert {name for name, count in found.items() if count} <= {"batch rows of unequal length", "SwiGLU clamp"}


def test_near_ties_are_those_of_the_verdicts(audit):
    verdict = Verdict("attn.selected", "layers.1.attn.selected", "free", State.PASS, "score gap", rows=3, near_ties=2)
    assert counts_of(audit, [verdict, verdict])["near-ties"] == 4


def test_small_blocks_in_the_cache_are_counted(audit, monkeypatch):
    before, values = counts_of(audit)["extreme scales"], audit.values

    def small(who, point, phase, steps=None):
        value = values(who, point, phase, steps)
        return value * 1e-9 if point == "layers.0.attn.kv" and phase == "decode" else value

    monkeypatch.setattr(audit, "values", small)
    assert counts_of(audit)["extreme scales"] - before == len(LENGTHS) * STEPS * len(range(0, audit.config.head_dim - audit.config.qk_rope_head_dim, 64))


# ---- covers ----


def test_a_name_that_no_record_carries_is_no_cover(audit):
    found = {m.name: m for m in mechanisms(audit, [])}
    routing = {"hash-routed layers", "score-routed layers"}
    assert found.keys() - routing == COVERS.keys() - routing
    assert found.keys() & routing == {"hash-routed layers" if audit.config.is_hash(layer) else "score-routed layers" for layer in audit.plan.layers}
    assert all(not m.covered_by for m in found.values())
    (line,) = unexercised(list(found.values()))
    assert "SwiGLU clamp" in line
    assert "window wraps" not in line  # this run did that


@pytest.mark.parametrize(
    ("verdict", "covers"),
    [(check("swiglu[routed, 13 rows]"), True), (check("swiglu[routed, 13 rows]", State.FAIL), True), (check("swiglu[routed, 13 rows]", State.NOT_RUN, 0), False),
     (check("swiglu[routed, 13 rows]", rows=0), False), (check("swiglu[within the limits]"), False), (check("swiglu"), False), (check("layers.0.ffn.routed"), False)],
    ids=["passed", "failed", "not run", "no rows", "another case", "no case", "a point"],
)  # fmt: skip
def test_a_cover_is_a_judged_check_whose_inputs_reach_it(verdict, covers, audit):
    clamp = next(m for m in mechanisms(audit, [verdict]) if m.name == "SwiGLU clamp")
    assert clamp.covered_by == ("swiglu (routed: 1 check)" if covers else "")
    assert bool(unexercised([clamp])) is not covers


def test_what_the_judged_layers_do_not_have_is_not_listed(audit, monkeypatch):
    window, csa = (dataclasses.replace(audit.plan, layers=layers) for layers in ((0,), (1,)))
    monkeypatch.setattr(audit, "plan", window)
    left_out = COVERS.keys() - counts_of(audit).keys()
    assert {name for name in COVERS if "CSA" in name or "HCA" in name or "indexer" in name} <= left_out
    assert left_out & {"hash-routed layers", "score-routed layers"} == {"score-routed layers" if audit.config.is_hash(0) else "hash-routed layers"}
    assert "window wraps, decode" not in left_out
    monkeypatch.setattr(audit, "plan", csa)
    assert {name for name in COVERS if "HCA" in name} <= COVERS.keys() - counts_of(audit).keys()
    assert {"indexer discards entries, prefill", "indexer discards entries, decode"} <= counts_of(audit).keys()
    assert not applies("keys split in decode", {("window", True)}, launches=False), "somebody else's production does not say what it launched"
    assert applies("keys split in decode", {("window", True)})


def test_what_was_exercised_needs_no_cover():
    assert unexercised([Mechanism("a", 1, ""), Mechanism("b", 0, "", "some check")]) == []
    assert unexercised([Mechanism("a", 0, ""), Mechanism("b", 0, "")]) == ["not exercised, and reached by no check of this run: a; b"]


def test_cases_are_found_inside_the_brackets_only():
    assert Cover("moe", "hash").fits("moe[sigmoid, hash, lengths [1, 1, 1]: out]")
    assert not Cover("moe", "hash").fits("moe_combine[hash]")
    assert not Cover("moe").fits("moe")


@pytest.mark.slow
def test_every_cover_names_checks_that_the_audit_runs(tmp_path):
    """A prompt of twelve tokens exercises little; the operations of the same run cover every mechanism, with every name."""
    shell = Shell(tmp_path)
    files = [f"parity/test_operations_{name}.py" for name in ("attention", "blocks", "dense", "whole", "long_context")]
    code, out, _ = shell(*files, "parity/test_recall.py", "--layers", "0-3", "--phase", "prefill", "--prompt", "short.txt:0:12", "-k", "not decode_step and not checkpoints", "-q")
    assert code == 0, out
    records = read_run(shell.report / "run.jsonl")
    verdicts = [record for record in records if isinstance(record, Verdict)]
    assert {v.gate for v in verdicts if not v.numbers} <= {"operation.store_window_refuses_two_tokens_in_one_slot", "operation.hc_at_once_refuses_shapes_that_it_is_not_built_for"}  # no number, an error
    missing = [(name, cover) for name, covers in COVERS.items() for cover in covers if not cover.judged(verdicts)]
    assert not missing
    found = [record for record in records if isinstance(record, Mechanism)]
    assert {m.name for m in found} == COVERS.keys()
    assert all(m.covered_by for m in found)
