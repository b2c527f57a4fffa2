"""The strength of "it starts here": what passed before it, and what nobody looked at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity import isolation, selection
from parity.isolation import strength
from parity.session import divergence_lines
from parity.unit.worlds import config_dict
from probes.core.records import Divergence, State, Summary, Verdict, from_line, summarise, to_line
from reference.config import ModelConfig
from reference.points import points_of_layer, state_parts

CONFIG = ModelConfig.from_dict(config_dict())
STEPS = 40  # groups 0, 1-32, 33-39
# The audit is a stand-in here, and every answer is there.
strengthened: Any = isolation.strengthened
failed_verdict: Any = isolation.failed_verdict
with_repro: Any = isolation.with_repro
read: Any = from_line


def audit_of(layers_run=(0, 1)):
    return SimpleNamespace(config=CONFIG, layers_run=layers_run, plan=SimpleNamespace(steps=STEPS))


def verdicts(layers, phases, failed=None, not_run=()):
    """Every gate of these layers passes, but for one case's id and those whose tap never fired."""
    out = []
    for case in selection.layer_cases(CONFIG, layers, phases, STEPS) + selection.model_cases(phases, STEPS):
        state = State.FAIL if case.id == failed else State.NOT_RUN if case.point in not_run else State.PASS
        first, last = case.steps or (None, None)
        details = {"first_step": first + 1} if state is State.FAIL and first else {}
        out.append(Verdict("g", case.point, case.mode, state, "m", case.layer, case.phase, first, last, details=details, test_id=case.id))
    for state_case in selection.state_cases(CONFIG, layers, phases, STEPS):
        first, last = state_case.steps or (0, 0)
        out.append(Verdict("s", f"layers.{state_case.layer}.state.{state_case.part}", "isolated", State.PASS, "m", state_case.layer, "decode", first, last, test_id=state_case.id))
    return out


def claim(point, phase, step=None, layer=0, local=True):
    return Divergence(layer, point, phase, step, local, "component")


def test_the_first_gate_of_all_has_nothing_before_it_but_the_embedding():
    found = strengthened(claim("layers.0.hc_attn.pre", "prefill"), verdicts((0, 1), ("prefill", "decode"), "prefill-L0-hc_attn.pre-isolated"), audit_of())
    assert (found.checked, found.unobserved) == (2, 0)


def test_a_later_layer_counts_both_modes_of_every_point_before_it():
    before = 2 * len(points_of_layer(CONFIG, 0)) + 2 * points_of_layer(CONFIG, 1).index("layers.1.attn.q") + 1
    found = strengthened(claim("layers.1.attn.q", "prefill", layer=1), verdicts((0, 1), ("prefill", "decode"), "prefill-L1-attn.q-isolated"), audit_of())
    assert (found.checked, found.unobserved) == (before + 1, 0)


def test_a_layer_that_was_not_judged_is_unobserved():
    found = strengthened(claim("layers.1.attn.q", "prefill", layer=1), verdicts((1,), ("prefill",), "prefill-L1-attn.q-isolated"), audit_of())
    assert found.unobserved == 2 * len(points_of_layer(CONFIG, 0))
    assert found.checked == 2 * points_of_layer(CONFIG, 1).index("layers.1.attn.q") + 1 + 1


def test_a_phase_that_was_not_asked_for_is_unobserved():
    both = strengthened(claim("layers.0.attn.q", "decode", 0), verdicts((0, 1), ("prefill", "decode"), "decode-L0-attn.q-isolated-steps0to0"), audit_of())
    alone = strengthened(claim("layers.0.attn.q", "decode", 0), verdicts((0, 1), ("decode",), "decode-L0-attn.q-isolated-steps0to0"), audit_of())
    prefill = 2 * sum(len(points_of_layer(CONFIG, layer)) for layer in (0, 1)) + 4
    assert (both.unobserved, alone.unobserved) == (0, prefill)
    assert both.checked == alone.checked + prefill


def test_a_tap_that_did_not_fire_is_unobserved():
    records = verdicts((0, 1), ("prefill",), "prefill-L0-attn.q-isolated", not_run=("layers.0.attn.norm",))
    found = strengthened(claim("layers.0.attn.q", "prefill"), records, audit_of())
    assert found.unobserved == 2


def test_a_later_group_of_steps_comes_after_all_of_an_earlier_one():
    records = verdicts((0, 1), ("prefill", "decode"), "decode-L0-attn.q-free-steps1to32")
    found = strengthened(claim("layers.0.attn.q", "decode", 2, local=False), records, audit_of())
    whole = 2 * sum(len(points_of_layer(CONFIG, layer)) for layer in (0, 1)) + 4
    states = sum(len(state_parts(CONFIG, layer)) for layer in (0, 1))  # judged in decode, isolated
    assert found.checked == 2 * whole + states + 2 * points_of_layer(CONFIG, 0).index("layers.0.attn.q") + 2 + 1  # its own isolated gate passed
    assert found.unobserved == 0


def test_isolated_stands_before_free_at_one_place():
    two = [Verdict("g", "layers.0.attn.q", mode, State.FAIL, "m", 0, "prefill") for mode in ("free", "isolated")]
    assert failed_verdict(claim("layers.0.attn.q", "prefill"), two).mode == "isolated"


def test_an_operation_alone_has_no_place_in_the_dataflow():
    alone = Divergence(None, "swiglu[x]", None, None, True, "experts quant")
    assert strengthened(alone, [], audit_of()) == alone
    assert with_repro(alone, [], audit_of(), None) == alone
    assert strengthened(None, [], audit_of()) is None
    assert strength(alone) == ""


def test_a_gate_of_decode_as_a_whole_names_no_step_and_the_repro_says_so():
    whole = Verdict("self.visible", "layers.0.attn.visible", "model", State.FAIL, "m", 0, "decode", test_id="parity/test_self.py::test_x[L0]")
    found = with_repro(claim("layers.0.attn.visible", "decode"), [whole], audit_of(), Path("nowhere"))
    assert (found.repro, found.replay) == (None, None)
    assert found.no_repro == "self.visible judges the steps of decode together and names none that could be run alone; next: run parity/test_self.py::test_x[L0] with the options of this run"


def test_the_claim_in_words_and_on_the_wire():
    found = Divergence(2, "layers.2.attn.q", "decode", 7, True, "rope", 612, 4, "repro.safetensors", "python -m probes.replay r")
    assert strength(found) == "first of 612 checked, 4 unobserved before it"
    assert divergence_lines(found) == [
        "first divergence: layers.2.attn.q, decode step 7, rope, local, first of 612 checked, 4 unobserved before it",
        "replay it alone: python -m probes.replay r",
    ]
    summary = summarise([], 0.0, found)
    assert from_line(to_line(summary)) == summary


def test_a_summary_without_the_new_fields_is_still_read():
    line = to_line(Summary("fail", 1, 1, 0, Divergence(0, "p", "prefill", None, True, "c"), 2))
    for name in ('"checked": 0, ', '"unobserved": 0, ', '"repro": null, ', '"replay": null, '):
        assert name in line
        line = line.replace(name, "")
    assert read(line).first_divergence.checked == 0


@pytest.mark.parametrize("reason", ["more than 512 MiB"])
def test_why_there_is_no_repro_is_said(reason):
    assert divergence_lines(Divergence(0, "p", "prefill", None, None, "c", no_repro=reason))[-1] == f"no repro: {reason}"
