"""What a different choice costs: margins and shares by hand, and both probes on a small random checkpoint."""

from __future__ import annotations

import json
import math

import pytest
import torch

import production
import reference
from parity import choices, ladder
from parity.audit import Audit, Plan
from parity.unit.worlds import prompt, write_checkpoint
from probes import recall as recall_probe
from probes import routing
from probes.core.choices import choice_difference, error_shares
from probes.core.records import State

SCORES = torch.tensor([[[0.9, 0.8, 0.5, 0.499], [0.1, 0.4, 0.3, 0.2], [1.0, 0.0, 0.0, 0.0]]])
WANT = torch.tensor([[[0, 1], [1, 2], [0, 1]]])


def test_equal_sets_have_no_margin():
    found = choice_difference(WANT.flip(-1), WANT, SCORES, 0.0)
    assert (found["queries"], found["differing"], found["largest_margin"], found["first_beyond"]) == (3, 0, 0.0, None)


def test_a_difference_is_a_near_tie_within_twice_the_noise():
    got = torch.tensor([[[0, 2], [1, 3], [0, 1]]])
    found = choice_difference(got, WANT, SCORES, 0.06)
    assert (found["differing"], found["exchanged"], found["near_ties"], found["beyond"]) == (2, 2, 1, 1)
    assert found["largest_margin"] == pytest.approx(0.3)
    assert found["first_beyond"] == [0, 0]


def test_pads_are_not_counted():
    valid = torch.tensor([[True, True, False]])
    assert choice_difference(torch.tensor([[[0, 1], [1, 2], [2, 3]]]), WANT, SCORES, 0.0, valid)["differing"] == 0


@pytest.mark.parametrize("got", [[[0, 0], [1, 2], [0, 1]], [[0, -1], [1, 2], [0, 1]]], ids=["twice", "one missing"])
def test_no_margin_explains_a_broken_choice(got):
    found = choice_difference(torch.tensor([got]), WANT, SCORES, 9.0)
    assert found["beyond"] == 1
    assert math.isinf(found["largest_margin"])


def test_nothing_is_near_where_a_table_decides():
    assert choice_difference(torch.tensor([[[0, 2], [1, 2], [0, 1]]]), WANT, None, 9.0)["beyond"] == 1


def test_the_share_is_the_squared_error_that_goes_away():
    got = torch.ones(1, 4, 2, 3)
    own, replayed = got * 1.25, got / 0.85
    found = error_shares(got, own, replayed)
    assert found["error_own"] == pytest.approx(0.2)
    assert found["error_replayed"] == pytest.approx(0.15)
    assert found["choice_share"] == pytest.approx(1 - 0.5625)
    assert error_shares(got, replayed, own)["choice_share"] == 0  # a replay that does not help
    assert error_shares(got, got, got)["choice_share"] == 0


# ---- in an audit, on a small world ----


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Window, CSA, HCA and CSA layer; index_topk 7 discards from 32 tokens on."""
    return write_checkpoint(tmp_path_factory.mktemp("choices") / "world", seed=11)


@pytest.fixture(scope="module")
def exchanged(world):
    made = production.load(world, max_context=128)
    meant = reference.load(world, policy=made.policy, max_context=128)
    rows = [tuple(prompt(60, 128)), tuple(prompt(47, 128, start=300))]
    text = [tuple(prompt(9, 128, start=60)), tuple(prompt(9, 128, start=347))]
    plan = Plan(rows, text, ("prefill", "decode"), (0, 1, 2, 3), 5, 128, str(world), 4)
    return choices.Exchanged(Audit(meant, made, [meant.twin(1), meant.twin(2)], plan, say=lambda _: None))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_production_agrees_on_the_references_choices(layer, phase, exchanged):
    verdict = choices.judge_exchanged(exchanged, layer, phase)
    assert verdict.state is State.PASS, verdict.reason
    assert verdict.rows == (107 if phase == "prefill" else 10)
    measured = choices.measure(exchanged, layer, phase)
    assert measured is not None
    values = measured.values
    assert values["output_queries"] == verdict.rows
    assert ("entries_queries" in values) == (layer in (1, 3))
    assert 0 <= values["choice_share"] <= 1
    assert values["experts_near_ties"] <= values["experts_differing"] <= values["experts_queries"]
    if layer == 0:  # hash-routed
        assert values["experts_differing"] == 0


def test_formats_cost_more_than_noise_and_production_errs_like_noise(exchanged):
    measured = ladder.measure(exchanged, 3)
    assert measured is not None
    values = measured.values
    assert values["noise_worst"] > 0
    assert values["noise_typical"] < values["formats_typical"] <= values["formats_worst"]
    assert values["production_typical"] < values["formats_typical"]
    audit = exchanged.audit
    with pytest.MonkeyPatch.context() as patch:
        plain = audit.values
        patch.setattr(audit, "values", lambda who, *rest: plain(who, *rest) * (1.5 if who == "production" else 1.0))
        spoiled = ladder.measure(exchanged, 3)
    assert spoiled is not None
    wrong = spoiled.values
    assert wrong["production_typical"] > 0.4
    assert wrong["formats_typical"] == values["formats_typical"]


def test_a_wrong_layer_output_is_red(exchanged):
    """Every stream of one query scaled: as a wrong mixing matrix would do."""
    exchanged.ensure("prefill")
    trace = exchanged.replayed["prefill", None]
    kept = trace.get("layers.2.hc_ffn.X", "prefill").clone()
    try:
        trace.get("layers.2.hc_ffn.X", "prefill")[1, 20] *= 1.4
        assert choices.judge_exchanged(exchanged, 2, "prefill").state is State.FAIL
    finally:
        trace.get("layers.2.hc_ffn.X", "prefill").copy_(kept)


def test_production_that_stops_fails_and_says_so(exchanged):
    broken = choices.Exchanged(exchanged.audit)
    broken.problem = "production stopped: KernelError: no"
    verdict = choices.judge_exchanged(broken, 1, "prefill")
    assert verdict.state is State.FAIL
    assert "KernelError" in verdict.reason


# ---- the probes ----


def last_line(capsys):
    *table, line = capsys.readouterr().out.rstrip("\n").split("\n")
    return json.loads(line), "\n".join(table)


@pytest.fixture(scope="module")
def prompts(world):
    (world / "prompts").mkdir()
    (world / "prompts" / "ids.json").write_text(json.dumps(prompt(70, 128)))
    return ["--checkpoint", str(world), "--prompt", "ids.json:0:60", "--steps", "2"]


@pytest.mark.parametrize("probe", [routing, recall_probe], ids=["routing", "recall"])
def test_help_has_an_example(probe, capsys):
    with pytest.raises(SystemExit) as stop:
        probe.main(["--help"])
    assert stop.value.code == 0
    assert f"example:\n  python -m {probe.__name__} " in capsys.readouterr().out


def test_routing_measures_every_layer_and_phase(prompts, capsys):
    assert routing.main([*prompts, "--layers", "0-1"]) == 0
    values, table = last_line(capsys)
    assert [(one["layer"], one["phase"], one["choice"]) for one in values["choices"]] == [
        (0, "prefill", "experts"), (1, "prefill", "entries"), (1, "prefill", "experts"),
        (0, "decode", "experts"), (1, "decode", "entries"), (1, "decode", "experts"),
    ]  # fmt: skip
    assert all(one["queries"] > 0 for one in values["choices"])
    assert all(0 <= one["error_other_way"] < 0.3 for one in values["errors"])
    assert "share of the choices" in table


def test_recall_measures_the_run_and_key_sets(prompts, capsys):
    assert recall_probe.main([*prompts, "--keys", "500", "--k", "40", "--layers", "0-1"]) == 0
    values, table = last_line(capsys)
    assert [(one["layer"], one["phase"]) for one in values["run"]] == [(1, "prefill"), (1, "decode")]
    assert values["run"][0]["same_format"]["discarding"] > 0
    assert len(values["sets"]) == 7
    assert all(one["same_format"]["judged_worst"] == 1 for one in values["sets"])
    assert "one giant key" in table


def test_recall_without_an_indexer_layer_uses_random_keys(prompts, capsys):
    assert recall_probe.main([*prompts, "--keys", "200", "--k", "16", "--layers", "0", "--kinds", "real,ties"]) == 0
    values, _ = last_line(capsys)
    assert values["run"] == []
    assert {one["source"] for one in values["sets"]} == {"random 3 x 64"}


@pytest.mark.parametrize("given", [["--kinds", "odd"], ["--keys", "300000"], ["--keys", "0"], ["--k", "-1"]], ids=str)
def test_bad_input_is_one_line_and_exit_2(given, prompts, capsys):
    try:
        code: object = recall_probe.main([*prompts, *given])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
