"""Self-parity: healthy production is equal to itself, and each kind of planted fault turns the comparison red that it should.

Faults are the project's own lists, those that lie in kernels alone: the world is small and is loaded with a mutated copy.
"""

from __future__ import annotations

import math
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import production
from parity import self_parity
from parity.audit import Crash, Floor
from parity.planted import plant, read_faults
from parity.self_parity import SelfCase, cases, judge, verdict_of, verdict_of_stored
from parity.unit.worlds import prompt, write_checkpoint
from probes.core.queries import (
    Difference,
    Log,
    Rows,
    as_stored,
    differences,
    observer_costs,
    stack,
    state_differences,
    stored_parts,
    together,
)
from probes.core.records import State, Verdict
from probes.core.selfparity import SAID, WAYS, SelfParity, Way, table_of, text_of
from reference.config import InputError
from reference.points import Taps

TOKENS = 70  # the first splits, windows of 16 and groups of 4; decode from 0 and from 60
FAULTS = read_faults()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("self") / "world", seed=5, num_hidden_layers=3, compress_ratios=[0, 4, 128])


@pytest.fixture(scope="module")
def model(checkpoint):
    return production.load(checkpoint, max_context=400)


@pytest.fixture(scope="module")
def healthy(model):
    return SelfParity(model, torch.tensor(prompt(TOKENS, 128)), 300)


def audit_of(runs: SelfParity, error: float = 1e-3, crash: Crash | None = None, seen: list[str] | None = None):
    """Stands for an audit whose twins were off by `error` everywhere."""
    floor = Floor(error=error, norm=error, absolute=error, rows=100)
    reference = SimpleNamespace(router_bias=lambda layer: torch.zeros(runs.config.n_routed_experts))
    phases = [] if seen is None else seen
    return SimpleNamespace(crash=crash, floor=lambda mode, point: floor, ensure=phases.append, config=runs.config, reference=reference)


# ---- healthy ----


@pytest.mark.parametrize("phase", WAYS)
def test_every_way_gives_the_same_bits(phase, healthy):
    for name in WAYS[phase]:
        way = healthy.way(phase, name)
        assert way.first is None, (name, way.first)
        assert way.queries > 0
        assert way.states > 0
        verdict = judge(audit_of(healthy), healthy, SelfCase(phase, "way", name))
        assert verdict.state is State.PASS
        assert verdict.rows > 20 * way.queries or name == "observed", "every point was compared"
    assert healthy.model.taps.observers == 0
    assert healthy.model.prefill_chunk == 512, "the chunk was lent"


def test_each_split_gives_the_same_bits(healthy):
    for at in (3, 4, 5, 68):
        way = healthy.split(at)
        assert way.first is None
        assert way.queries == TOKENS
    with pytest.raises(InputError, match="split at 70"):
        healthy.split(TOKENS)


def test_decode_is_near_prefill(healthy):
    audit = audit_of(healthy)
    for case in cases(("decode",), healthy.layers):
        if case.kind == "way":
            continue
        verdict = judge(audit, healthy, case)
        assert verdict.state is State.PASS, (case.id, verdict.reason)
        assert verdict.rows > 0
        assert verdict.mode == "model"


@pytest.mark.parametrize("mode", ["isolated", "free"])
@pytest.mark.parametrize("layer", [1, 2])
def test_where_the_audits_text_finishes_no_entry_a_floor_of_the_same_kind_is_taken(layer, mode, model):
    """132 tokens here, so that the HCA layer finishes one too; the audit's text had none in any layer."""
    runs = SelfParity(model, torch.tensor(prompt(132, 128)), 140)
    plain = audit_of(runs)

    def floor(_mode, point):
        if point.endswith(("attn.compressor", "indexer.compressor", "indexer.score")):
            return Floor()
        return plain.floor(_mode, point)

    audit: Any = SimpleNamespace(**{**vars(plain), "floor": floor})
    judged = [judge(audit, runs, SelfCase("decode", kind, "", layer, mode)) for kind in ("decode", "stored")]
    assert [verdict.state for verdict in judged] == [State.PASS, State.PASS], [verdict.reason for verdict in judged]
    parts = runs.stored(layer, alone=mode == "isolated")
    stored = next(part for part in parts if part.part == "compressor.entries")
    assert stored.got.shape[1] > 0
    verdict = verdict_of_stored(audit, Verdict("self.stored", "", "model", State.NOT_RUN, "", layer=layer), [stored], layer, mode)
    assert "floor of attn.kv: the audit's text shows no attn.compressor in this layer" in verdict.why
    assert verdict.floor == pytest.approx(1e-3)
    assert judge(audit, runs, SelfCase("decode", "seen", "", layer)).state is State.PASS


def test_what_does_not_fit_is_said(healthy):
    way = healthy.way("prefill", "chunked")
    assert way.skipped == [f"split at {n}" for n in (127, 128, 129, 255, 256, 257)]
    verdict = judge(audit_of(healthy), healthy, SelfCase("prefill", "way", "chunked"))
    assert "split at 256" in verdict.details["not_exercised"]
    assert "split at 256" in table_of([way])[0]["skipped"]


@pytest.mark.parametrize("tokens", [2, 3, 5, 9])
def test_short_texts_are_compared_too(tokens, model):
    runs = SelfParity(model, torch.tensor(prompt(tokens, 128)), 20)
    for phase, names in WAYS.items():
        for name in names:
            way = runs.way(phase, name)
            assert way.first is None
            assert way.queries > 0 or name in ("batched", "repeated")
    assert all(judge(audit_of(runs), runs, case).state is State.PASS for case in cases(("decode",), runs.layers) if case.kind != "way")


def test_a_long_text_is_cut_and_a_short_one_goes_round():
    assert text_of([[1, 2], [3]], 5).tolist() == [1, 2, 3, 1, 2]
    assert text_of([list(range(9))], 4).tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError):
        text_of([[]])
    with pytest.raises(InputError):
        SelfParity(SimpleNamespace(config=None, layers=()), torch.tensor([1]))


def test_observing_costs_are_counted(healthy):
    assert healthy.whole.position.tolist() == list(range(TOKENS))
    costs = {line["point"]: line for line in observer_costs(healthy.whole_log)}
    c = healthy.config
    assert costs["hc_ffn.X"]["bytes"] == 4 * 3 * TOKENS * c.hc_mult * c.hidden_size
    assert costs["logits"]["bytes"] == 4 * TOKENS * c.vocab_size
    assert all(line["seconds"] > 0 for line in costs.values())
    assert set(healthy.way("prefill", "observed").seconds) == {"with taps", "without taps"}


# ---- planted ----

# fault -> the case that must be red, and the components it may name
PLANTED = {
    "B001": (SelfCase("decode", "decode", "", 1, "isolated"), {"compressor"}),
    "B003": (SelfCase("decode", "stored", "", 1, "isolated"), {"compressor"}),
    "B011": (SelfCase("prefill", "way", "chunked"), {"compressor"}),
    "B051": (SelfCase("prefill", "way", "chunked"), {"visibility mask", "indexer", "compressor", "attention core"}),
    "B081": (SelfCase("decode", "way", "batched"), {"rope", "compressor", "batching"}),
    "B185": (SelfCase("prefill", "way", "reused"), {"indexer"}),
    "B194": (SelfCase("prefill", "way", "continued"), {"batching", "attention projections", "rope", "KV quant", "mHC"}),
}


@pytest.mark.parametrize("fault_id", PLANTED)
def test_a_planted_fault_is_red(fault_id, checkpoint, healthy):
    fault = FAULTS[fault_id]
    assert all(edit.file.startswith("kernels/") for edit in fault.edits)
    case, components = PLANTED[fault_id]
    copy = plant(fault)
    try:
        # B051 counts for layers that choose no entries: their first one ends at 128.
        mutated = production.load(checkpoint, max_context=400, kernels_dir=copy / "kernels")
        tokens = 140 if fault_id == "B051" else TOKENS
        runs = SelfParity(mutated, torch.tensor(prompt(tokens, 128)), 300)
        verdict = judge(audit_of(runs), runs, case)
    finally:
        shutil.rmtree(copy)
    assert verdict.state is State.FAIL
    assert verdict.component in components, verdict
    assert verdict.phase == case.phase
    assert "first" in verdict.reason or "row" in verdict.reason
    assert judge(audit_of(healthy), healthy, case).state is State.PASS


# ---- verdicts ----


def rows(position, **values):
    """Rows of a few queries; names with two underscores stand for points of layer 0."""
    named = {name.replace("__", "."): value[None] for name, value in values.items()}
    return Rows(named, torch.tensor(position), torch.zeros(len(position), dtype=torch.int64))


POINTS = ("embed", "logits")
CONFIG: Any = SimpleNamespace(sliding_window=2, ratio=lambda layer: 4)


def test_one_different_bit_is_found_and_named():
    want = rows([4, 5, 6], embed=torch.ones(3, 4), logits=torch.ones(3, 4))
    got = rows([4, 5, 6], embed=torch.ones(3, 4), logits=torch.ones(3, 4))
    got.values["logits"][0, 1, 2] = 1 + 2**-20
    embed, logits = differences(got, want, POINTS, CONFIG)
    assert (embed.different, embed.rows, logits.different, logits.position) == (0, 3, 1, 5)
    assert 0 < logits.worst < 1e-6
    verdict = verdict_of(Verdict("self.x", "self.x", "model", State.NOT_RUN, "rows"), Way("prefill", "x", "x", 3, 0, [embed, logits]))
    assert (verdict.state, verdict.point, verdict.component, verdict.value) == (State.FAIL, "logits", "head", 1.0)


def test_nan_equals_nan_but_nothing_else():
    nan = torch.tensor([[math.nan, 1.0]])
    assert differences(rows([0], embed=nan), rows([0], embed=nan.clone()), POINTS, CONFIG)[0].different == 0
    assert differences(rows([0], embed=nan), rows([0], embed=torch.ones(1, 2)), POINTS, CONFIG)[0].worst == math.inf


def test_nothing_compared_and_silent_taps_are_not_run():
    base = Verdict("self.x", "self.x", "model", State.NOT_RUN, "rows")
    assert verdict_of(base, Way("prefill", "x", "x", 0, 0, [])).state is State.NOT_RUN
    silent = differences(rows([0], embed=torch.ones(1, 2)), rows([0], embed=torch.ones(1, 2), logits=torch.ones(1, 2)), POINTS, CONFIG)
    assert silent[1].missing
    verdict = verdict_of(base, Way("prefill", "x", "x", 1, 0, silent))
    assert verdict.state is State.NOT_RUN
    assert "logits" in verdict.reason


def test_widths_that_grow_hold_nothing():
    visible = "layers.0.attn.visible"
    narrow, wide = torch.tensor([[3, 4, 0]]), torch.tensor([[3, 4, 0, -1, -1]])
    got, want = (Rows({visible: value[None]}, torch.tensor([4]), torch.tensor([0])) for value in (narrow, wide))
    assert differences(got, want, (visible,), CONFIG)[0].different == 0
    wide[0, 0] = 2
    found = differences(got, Rows({visible: wide[None]}, torch.tensor([4]), torch.tensor([0])), (visible,), CONFIG)[0]
    assert found.window
    assert self_parity.component_of(found) == "SWA ring"
    unread = Difference("layers.0.attn.kv", 0, 1, 1, math.inf, 0, 0, math.nan, 1.0)
    assert self_parity.component_of(unread) == "SWA ring", "the slot holds another token"
    assert self_parity.component_of(Difference("layers.0.attn.kv", 0, 1, 1, 0.1, 0, 0, 2.0, 1.0)) == "KV quant"


def test_a_state_that_differs_is_named_by_part_and_row():
    one = {0: {"length": torch.tensor([3, 5]), "kv": torch.zeros(2, 2, 4), "compressor.entries": torch.ones(2, 1, 4)}}
    other = {0: {part: value.clone() for part, value in one[0].items()}}
    other[0]["compressor.entries"] = torch.cat((other[0]["compressor.entries"], torch.full((2, 2, 4), math.nan)), 1)
    assert all(d.different == 0 for d in state_differences(other, one))
    other[0]["kv"][1, 0, 2] = 1.0
    first = next(d for d in state_differences(other, one) if d.different)
    assert (first.what, first.batch_row, first.position, first.different) == ("layers.0.state.kv", 1, 5, 1)
    assert self_parity.component_of(first) == "SWA ring"
    assert self_parity.component_of(Difference("layers.0.state.compressor.kv", 0, 1)) == "compressor"


def test_an_old_row_that_changed_fails_and_new_ones_have_a_limit():
    """kv of 6 tokens, window 4, decode from 4: columns 0 and 1 are old."""
    config: Any = SimpleNamespace(sliding_window=4, ratio=lambda layer: 0)
    want = {"length": torch.tensor([6]), "kv": torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(1))}
    got = {"length": torch.tensor([6]), "kv": want["kv"].clone()}
    base = Verdict("self.stored", "layers.0.state", "model", State.NOT_RUN, "rows", layer=0)
    audit: Any = SimpleNamespace(floor=lambda mode, point: Floor(error=1e-3, norm=1e-3, rows=9))

    def verdict():
        return verdict_of_stored(audit, base, stored_parts(got, want, torch.tensor([4]), config, 0), 0, "isolated")

    assert (verdict().state, verdict().details["old_rows"], verdict().details["written_rows"]) == (State.PASS, 2, 2)
    got["kv"][0, 2] *= 1.002
    assert verdict().state is State.PASS
    got["kv"][0, 2] *= 1.1
    assert verdict().state is State.FAIL
    got["kv"] = want["kv"].clone()
    got["kv"][0, 1, 3] *= 1 + 2**-20
    assert verdict().state is State.FAIL
    assert "no step wrote" in verdict().reason


def test_what_a_state_must_hold_comes_from_what_was_shown(healthy):
    due = as_stored(healthy.whole, 9, healthy.config, healthy.layers)
    assert due[1]["compressor.entries"].shape[1] == 2
    assert due[0]["kv"][0, :7].isnan().all(), "nine tokens do not fill a window of sixteen"
    assert torch.equal(due[0]["kv"][0, -1], healthy.whole.values["layers.0.attn.kv"][0, 8])


def test_rows_of_batches_are_stacked_and_picked():
    parts = [rows([0, 1], embed=torch.arange(2.0)[:, None]), rows([5], embed=torch.tensor([[7.0]]))]
    joined = together(parts)
    assert joined.row.tolist() == [0, 0, 1]
    assert joined.of_row(1).values["embed"].tolist() == [[[7.0]]]
    short, long = ({0: {"compressor.entries": torch.ones(1, e, 2)}} for e in (1, 3))
    assert stack([short, long])[0]["compressor.entries"].isnan().sum() == 4


def test_a_log_lets_go_and_keeps_valid_queries_only():
    model = SimpleNamespace(taps=Taps(POINTS))
    log = Log(POINTS)
    with pytest.raises(ValueError, match="broken"), log.call(model, torch.tensor([[0]]), torch.tensor([[True]])):
        raise ValueError("broken")
    assert model.taps.observers == 0
    with log.call(model, torch.tensor([[3, 4], [0, 1]]), torch.tensor([[True, True], [True, False]])):
        model.taps.emit("embed", torch.arange(4.0).reshape(2, 2, 1))
    seen = log.rows()
    assert (seen.position.tolist(), seen.row.tolist(), seen.values["embed"].flatten().tolist()) == ([3, 4, 0], [0, 0, 1], [0.0, 1.0, 2.0])
    assert "logits" not in seen.values


def test_cases_follow_the_command_line():
    prefill = cases(("prefill",), (0, 2))
    assert {case.phase for case in prefill} == {"prefill"}
    both = cases(("prefill", "decode"), (0, 2))
    assert {case.layer for case in both if case.kind == "seen"} == {0, 2}
    assert len({case.id for case in both}) == len(both)
    assert all(case.said for case in both)
    assert set(SAID) == {(phase, name) for phase, names in WAYS.items() for name in names}


def test_a_production_that_stops_fails_here_and_is_not_run_after_a_crash(healthy):
    case = SelfCase("prefill", "way", "repeated")
    crashed = judge(audit_of(healthy, crash=Crash("decode", 3, "free", "KernelError: x")), healthy, case)
    assert crashed.state is State.NOT_RUN
    assert "KernelError" in crashed.reason

    class Stops(SelfParity):
        def way(self, phase, name):
            raise RuntimeError("launch failed")

    stopped = judge(audit_of(healthy), Stops(healthy.model, healthy.text, 300), case)
    assert stopped.state is State.FAIL
    assert "launch failed" in stopped.reason


def test_floors_are_asked_for_only_where_a_limit_needs_them(healthy):
    seen: list[str] = []
    judge(audit_of(healthy, seen=seen), healthy, SelfCase("prefill", "way", "repeated"))
    assert seen == []
    judge(audit_of(healthy, seen=seen), healthy, SelfCase("decode", "decode", "", 1, "isolated"))
    assert seen == ["decode"]


# ---- the probe ----


def test_the_probe_prints_tables_and_one_json_line(checkpoint, capsys):
    import json

    from probes import determinism

    (checkpoint / "prompts").mkdir(exist_ok=True)
    (checkpoint / "prompts" / "ids.json").write_text(json.dumps(prompt(30, 128)))
    asked = ["--checkpoint", str(checkpoint), "--prompt", "ids.json", "--max-context", "200", "--tokens", "20", "--twins", "1", "--each-split", "--layers", "1"]
    assert determinism.main(asked) == 0
    *table, line = capsys.readouterr().out.rstrip("\n").split("\n")
    values = json.loads(line)
    assert values["measured"]
    assert {way["way"] for way in values["ways"]} == {*WAYS["prefill"], *WAYS["decode"], *(f"replayed, batch {batch}" for batch in (1, 3, 8)), "split at 3", "split at 4", "split at 5"}
    assert all(way["bit_equal"] for way in values["ways"])
    assert {one["point"] for one in values["decode"]} >= {"attn.visible", "attn.selected", "hc_ffn.X", "logits"}
    assert all(one["floor"] is not None for one in values["decode"] if "worst_row" in one)
    assert all(one["changed"] == 0 for one in values["stored"])
    assert sum("captured at 0 tokens, replayed at 0 to 4" in text for text in table) >= 1
    assert determinism.main([*asked, "--tokens", "201"]) == 2
    with pytest.raises(SystemExit) as stop:
        determinism.main(["--help"])
    assert stop.value.code == 0
