"""What a call leaves in the state: every way in which a part can be wrong turns it red, with its cause and its step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import production
import reference
from parity import stored
from parity.audit import TWIN_ORDERS, Audit, Floor, Plan
from parity.selection import StateCase, state_cases, state_phase
from parity.unit.worlds import prompt, write_checkpoint
from probes.core.queries import left_parts
from probes.core.records import State
from production.model import POLICY
from reference.points import LAYER_ROWS, STATE_LEGEND, STATE_POINTS, places_of_layer, points_of_layer, state_order

W, RATIO, SLOTS, DIM, TOKENS = 6, 4, 8, 16, 40
CONFIG: Any = SimpleNamespace(sliding_window=W, ratio=lambda layer: RATIO)
ROWS = {part: torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(i)) for i, part in enumerate(STATE_POINTS)}
PREFILLED = 13  # positions 8 to 12 are open; entries 0 to 2


def state_of(length):
    """The state of a CSA layer after `length` tokens, by the words of STATE_LEGEND."""
    out = {"length": torch.tensor([length])}
    for part, rows in ROWS.items():
        if part == "kv":
            out[part] = torch.stack([rows[p] if p >= 0 else torch.full((DIM,), math.nan) for p in range(length - W, length)])[None]
        elif part.endswith("entries"):
            out[part] = rows[None, : length // RATIO].clone()
        elif part != "length":  # open rows
            out[part] = torch.full((1, SLOTS, DIM), math.nan)
            for p in range(max(0, length // RATIO * RATIO - RATIO), length):
                out[part][0, p % SLOTS] = rows[p]
    return out


def judged(part, plant=None, at=1, steps=(0, 2)):
    """A part over the steps after PREFILLED tokens; `plant(state)` spoils a copy of production's after step `at` (steps None: the prefill)."""
    kept = {}
    for step in [None] if steps is None else range(steps[0], steps[1] + 1):
        before = 0 if step is None else PREFILLED + step
        want = state_of(PREFILLED if step is None else before + 1)
        got = {name: value.clone() for name, value in want.items()}
        if plant is not None and step == (None if steps is None else at):
            plant(got)
        kept[2, "prefill" if step is None else "decode", step] = left_parts(got, want, torch.tensor([before]), CONFIG, 2)
    plan = SimpleNamespace(layers=(2,), steps=8)
    audit: Any = SimpleNamespace(
        ensure=lambda phase: None, crash=None, stopped="", stored=kept, batch=1, plan=plan, floor=lambda mode, point: Floor(error=1e-3, norm=1e-3, rows=9)
    )
    verdict = stored.judge_state(audit, StateCase("decode", 2, part, steps), "id")
    red = [step for _, phase, step in kept if stored.any_red(audit, phase, step)]
    if verdict.state is State.FAIL:
        assert red[0] == (None if steps is None else verdict.details["first_step"])
    elif plant is None:
        assert not red
    return verdict


@pytest.mark.parametrize("part", STATE_POINTS)
def test_a_right_state_is_green_and_was_compared(part):
    for steps in (None, (0, 0), (0, 2), (1, 7)):
        verdict = judged(part, steps=steps)
        assert verdict.state is State.PASS, verdict.reason
        assert verdict.rows > 0
        assert (verdict.gate, verdict.point, verdict.mode, verdict.phase) == (f"state.{part}", f"layers.2.state.{part}", "isolated", "decode")
        assert verdict.details.get("left_by") == ("prefill" if steps is None else None)


def changed(part, row):
    return lambda state: state[part][0, row, 3].mul_(1 + 2**-18)


# Length 15 after step 1: slots 0 to 6 hold positions 8 to 14, the new one in 6; slot 7 is free. Column 0 of kv is position 9.
@pytest.mark.parametrize(
    ("part", "row", "component"),
    [("kv", 0, "SWA ring"), ("kv", 4, "SWA ring"), ("compressor.entries", 0, "compressor"), ("compressor.entries", 2, "compressor")]
    + [(f"{at}compressor.{name}", 1, "compressor") for at in ("", "indexer.") for name in ("kv", "gate")]
    + [("indexer.compressor.entries", 1, "compressor")],
)
def test_an_old_row_that_changed_by_a_bit_is_red_with_its_index_and_step(part, row, component):
    verdict = judged(part, changed(part, row))
    assert (verdict.state, verdict.component, verdict.where) == (State.FAIL, component, [0, row])
    assert verdict.details["first_step"] == verdict.worst_step == 1
    assert "no step wrote" in verdict.reason
    assert verdict.details["because"] in verdict.reason


@pytest.mark.parametrize(
    ("part", "at", "row", "component"),
    [("kv", 1, W - 1, "KV quant"), ("compressor.entries", 2, 3, "compressor"), ("indexer.compressor.entries", 2, 3, "compressor")]
    + [(f"{at}compressor.{name}", 1, 6, "compressor") for at in ("", "indexer.") for name in ("kv", "gate")],
)
def test_a_new_row_has_a_limit(part, at, row, component):
    assert judged(part, lambda state: state[part][0, row].mul_(1.0005), at).state is State.PASS
    verdict = judged(part, lambda state: state[part][0, row].mul_(1.29), at)
    assert (verdict.state, verdict.component, verdict.where) == (State.FAIL, component, [0, row])
    assert verdict.element[:2] == [0, row]
    assert (verdict.worst_step, verdict.details["first_step"]) == (at, at)
    assert verdict.value == pytest.approx(0.29)


@pytest.mark.parametrize(
    ("part", "at", "row"),
    [("kv", 1, W - 1), ("compressor.entries", 2, 3), ("compressor.kv", 1, 6), ("compressor.gate", 1, 6), ("indexer.compressor.entries", 2, 3), ("indexer.compressor.gate", 1, 6)],
)
def test_a_row_that_is_not_a_number_is_red(part, at, row):
    verdict = judged(part, lambda state: state[part][0, row].fill_(math.nan), at)
    assert (verdict.state, verdict.details["first_step"]) == (State.FAIL, at)
    assert "cannot be read back" in verdict.details["because"]
    assert verdict.component == stored.component_of_part(part)
    assert judged(part, lambda state: state[part][0, row, 5].fill_(math.nan), at).state is State.FAIL


def test_a_window_key_of_another_token_is_the_rings():
    verdict = judged("kv", lambda state: state["kv"][0, -1].copy_(ROWS["kv"][3]))
    assert (verdict.state, verdict.component) == (State.FAIL, "SWA ring")
    assert "another token's" in verdict.details["because"]


@pytest.mark.parametrize("part", ["compressor.kv", "indexer.compressor.gate"])
def test_an_open_row_in_another_slot_is_red_where_it_went_and_where_it_is_missing(part):
    def move(state):
        state[part][0, 2] = state[part][0, 6]
        state[part][0, 6] = 0.0

    verdict = judged(part, move)
    assert (verdict.state, verdict.where, verdict.component) == (State.FAIL, [0, 2], "compressor")


def test_an_entry_that_is_not_due_is_red():
    verdict = judged("compressor.entries", lambda state: state.update({"compressor.entries": ROWS["compressor.entries"][None, :4].clone()}))
    assert verdict.state is State.FAIL
    assert "where none is due" in verdict.details["because"]


def test_a_length_is_exact():
    verdict = judged("length", lambda state: state["length"].add_(1))
    assert (verdict.state, verdict.component, verdict.got, verdict.want) == (State.FAIL, "batching", 16.0, 15.0)
    assert verdict.details["first_step"] == 1


def test_what_the_prefill_left_counts_for_the_first_step():
    verdict = judged("compressor.kv", lambda state: state["compressor.kv"][0, 4].fill_(0.0), steps=None)
    assert (verdict.state, verdict.phase, verdict.step_first, verdict.details["first_step"], verdict.details["left_by"]) == (State.FAIL, "decode", 0, 0, "prefill")


def test_the_first_wrong_step_decides_whichever_rows_it_spoiled():
    def plant(state):
        if int(state["length"]) == PREFILLED + 4:
            changed("kv", 0)(state)

    kept = judged("kv", plant, at=3, steps=(0, 7))
    assert (kept.details["first_step"], kept.value) == (3, math.inf)

    def both(state):
        changed("kv", 0)(state)
        state["kv"][0, -1] *= 1.25

    assert judged("kv", both).value == math.inf, "old rows before new ones"


def test_a_part_that_is_not_exported_or_of_another_shape_is_not_run():
    assert "does not export" in judged("compressor.gate", lambda state: state.pop("compressor.gate")).reason
    verdict = judged("kv", lambda state: state.update(kv=state["kv"][:, 1:]))
    assert (verdict.state, verdict.reason) == (State.NOT_RUN, f"production exports shape [1, {W - 1}, {DIM}], the reference [1, {W}, {DIM}]")
    assert judged("length", lambda state: state.pop("kv")).state is State.PASS


# ---- which parts, under which names ----


def test_every_part_of_the_state_has_a_place_in_the_dataflow():
    assert set(STATE_POINTS) == set(STATE_LEGEND)
    assert set(STATE_POINTS.values()) <= set(LAYER_ROWS)
    assert LAYER_ROWS.index("attn.kv") < LAYER_ROWS.index("state.length") < LAYER_ROWS.index("state.kv") < LAYER_ROWS.index("attn.compressor")
    assert state_order("layers.3.state.indexer.compressor.gate") == "layers.3.attn.indexer.compressor"
    assert state_order("layers.3.attn.kv") is None


def test_ids_name_layer_part_and_steps():
    assert StateCase("decode", 2, "compressor.entries", (1, 32)).id == "decode-L2-compressor.entries-steps1to32"
    assert StateCase("decode", 2, "kv").id == "decode-L2-kv-prefilled"
    assert StateCase("prefill", 2, "kv").id == "prefill-L2-kv"


@pytest.mark.parametrize(
    ("phases", "steps", "phase"), [(("prefill", "decode"), 3, "decode"), (("decode",), 3, "decode"), (("prefill",), 3, "prefill"), (("prefill", "decode"), 0, "prefill"), (("decode",), 0, None)]
)
def test_what_a_prefill_leaves_is_judged_where_it_is_read(phases, steps, phase):
    assert state_phase(phases, steps) == phase


# ---- the real production ----

STEPS, LENGTHS = 5, (31, 22)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("stored") / "world", seed=7, hc_mult=3, hc_sinkhorn_iters=6)


def run(checkpoint, plant=None, layers=(0, 1, 2)):
    """A small audit of two rows; `plant(audit)` changes it before it runs."""
    model = reference.load(checkpoint, policy=POLICY, max_context=64)
    rows, more = ([tuple(prompt(n, 128, 17 * i + start)) for i, (n, start) in enumerate(zip(counts, starts, strict=True))] for counts, starts in ((LENGTHS, (0, 0)), ((STEPS, STEPS), LENGTHS)))
    plan = Plan(rows, more, ("prefill", "decode"), layers, STEPS, 64, str(checkpoint))
    audit = Audit(model, production.load(checkpoint, max_context=64), [model.twin(order) for order in TWIN_ORDERS], plan, say=lambda line: None)
    if plant is not None:
        plant(audit)
    audit.ensure("decode")
    return audit


def verdicts(audit):
    cases = state_cases(audit.config, audit.plan.layers, audit.plan.phases, STEPS)
    return {case.id: stored.judge_state(audit, case, case.id) for case in cases}


def exporting(audit, change):
    """Production's exports pass through `change(layer, snapshot)`."""
    opened = audit.production.new_state

    def new_state(*args):
        state = opened(*args)
        export = state.export_layer
        state.export_layer = lambda layer: change(layer, export(layer))
        return state

    audit.production.new_state = new_state


def test_a_right_production_is_green_in_every_part_and_counted(checkpoint):
    audit = run(checkpoint)
    for name, verdict in verdicts(audit).items():
        assert verdict.state is State.PASS, f"{name}: {verdict.reason}"
        assert verdict.rows > 0
    cells = [cell for cell in audit.coverage_points() if cell[4] == "state"]
    assert {(phase, audit.fired(who, point, phase, (0, STEPS - 1))) for phase, point, _, _, who in cells} == {("decode", STEPS)}
    assert {point for _, point, _, _, _ in cells} == {p for n in (0, 1, 2) for p in set(places_of_layer(audit.config, n)) - set(points_of_layer(audit.config, n))}


def test_a_state_that_cannot_be_exported_is_not_run_and_the_run_goes_on(checkpoint):
    def refuse(layer, snapshot):
        raise ZeroDivisionError("no such export")

    audit = run(checkpoint, lambda audit: exporting(audit, refuse), layers=(0,))
    assert audit.crash is None
    for verdict in verdicts(audit).values():
        assert verdict.state is State.NOT_RUN
        assert "ZeroDivisionError: no such export" in verdict.reason
    assert audit.fired("state", "layers.0.state.kv", "decode", (0, STEPS - 1)) == 0


def test_a_wrong_entry_of_one_batch_row_is_named_after_the_step_that_wrote_it(checkpoint):
    seen = {"calls": 0}

    def spoil(layer, snapshot):
        seen["calls"] += 1
        if seen["calls"] > 3:  # the prefill and steps 0 and 1 are right
            snapshot["compressor.entries"][1, 0] *= 1 + 2**-10
        return snapshot

    found = verdicts(run(checkpoint, lambda audit: exporting(audit, spoil), layers=(1,)))
    red = {name: verdict for name, verdict in found.items() if verdict.state is State.FAIL}
    assert list(red) == ["decode-L1-compressor.entries-steps1to4"]
    verdict = red["decode-L1-compressor.entries-steps1to4"]
    assert (verdict.where, verdict.details["first_step"], verdict.local, verdict.component) == ([1, 0], 2, True, "compressor")
