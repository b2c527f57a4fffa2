"""The arithmetic of a gate, and the ways a comparison passes without comparing."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parity import gates
from parity.gates import GATES, MAX_LIMIT, OPERATIONS
from probes.core.records import State, Verdict
from reference.points import INDICES, LAYER_POINTS, MODEL_POINTS


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.011])
def test_nan_inf_and_too_large_fail(value):
    assert gates.judge(value, floor=0.003, eps=0.001).state is State.FAIL


@given(st.floats(min_value=1e-9, max_value=0.15), st.floats(min_value=1 + 1e-15, max_value=1e6))
@example(0.0102, 1 + 1e-9)
@example(0.0102, math.inf)
def test_a_reason_never_rounds_a_red_value_onto_its_limit(limit, over):
    value = max(math.nextafter(limit, math.inf), limit * over)
    for found in (gates.judge(value, floor=0.0, eps=limit), gates.judge_bound("memory.footprint", 0.01 * (value / limit) if value / limit > 1 else math.nextafter(0.01, 1), 1, "bytes")):
        ((shown, bound),) = re.findall(r"(\S+) > (\S+)", found.reason)
        assert found.state is State.FAIL
        assert float(shown) > float(bound)
        assert ", 100 % of limit" not in found.reason
        assert "inf %" not in found.reason
        assert "nan %" not in found.reason


def test_equal_to_the_limit_passes():
    assert gates.judge(0.01, floor=0.003, eps=0.001).state is State.PASS


@pytest.mark.parametrize(
    ("floor", "eps", "rows"), [(0.001, 0.001, 0), (math.nan, 0.001, 5), (0.25, 0.0, 5)], ids=["no rows", "no floor", "floor near the largest allowed limit"]
)
def test_what_cannot_be_judged_is_not_run_even_at_zero_error(floor, eps, rows):
    assert gates.judge(0.0, floor, eps, rows=rows).state is State.NOT_RUN


def test_no_limit_is_above_the_largest_allowed():
    assert gates.judge(0.0, floor=0.2, eps=0.1).limit == MAX_LIMIT
    assert gates.judge(0.31, floor=0.2, eps=0.1).state is State.FAIL


@given(st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(0, 1e-3))
def test_a_limit_below_the_smallest_passing_one_is_red(value, floor, eps):
    """The number that spent most stands first; with its smallest limit the gate is green, just below it red."""
    (tight, loose) = gates.numbers_of(("half of it", value / 2, gates.judge(value / 2, floor, eps)), ("it", value, gates.judge(value, floor, eps)))
    assert tight["spent"] >= loose["spent"]
    assert gates.judge(value, 0.0, tight["smallest_limit"] if tight["number"] == "it" else value).state is State.PASS
    assert value == 0 or gates.judge(value, 0.0, math.nextafter(value, 0)).state is State.FAIL


def test_nan_spends_more_than_anything():
    found = gates.numbers_of(("a", 0.5, gates.judge(0.5, 0.0, 0.1)), ("b", math.nan, gates.judge(math.nan, 0.0, 0.1)))
    assert [n["number"] for n in found] == ["b", "a"]


def test_a_verdict_of_one_number_carries_it_and_one_that_was_not_run_none():
    verdict = Verdict("g", "p", "model", State.PASS, "things", value=1.0, limit=4.0, spent=0.25, rows=3)
    assert gates.with_numbers(verdict).numbers == [{"number": "things", "smallest_limit": 1.0, "limit": 4.0, "spent": 0.25}]
    assert gates.with_numbers(replace(gates.with_numbers(verdict), state=State.NOT_RUN)).numbers == []
    assert gates.with_numbers(replace(verdict, value=None)).numbers == []


def test_comparing_nothing_exactly_is_not_run():
    assert gates.judge_exact(0, 0, "things").state is State.NOT_RUN
    assert gates.judge_exact(0, 3, "things").state is State.PASS
    assert gates.judge_exact(1, 3, "things").state is State.FAIL


def test_every_point_with_values_has_a_row_with_a_reason():
    for spec in (*LAYER_POINTS, *MODEL_POINTS):
        if spec.kind != INDICES:
            assert GATES[spec.name].why


@pytest.mark.parametrize("row", [*GATES.values(), *[operation.gate for operation in OPERATIONS.values()]])
def test_no_row_alone_reaches_the_largest_limit(row):
    assert 0 <= row.isolated <= row.free < MAX_LIMIT * 2 / 3
    assert row.typical <= row.isolated
    assert row.why


def test_a_production_that_rounds_less_has_no_excuse_for_flips() -> None:
    for name, gate in gates.GATES.items():
        assert gates.gate_of(name, {"bf16", "kv.e4m3"}) is gate
        plain, narrow = gates.gate_of(name, ()), gates.gate_of(name, {"bf16"})
        if name != "recall":  # a share of entries, no error of values
            assert max(plain.isolated, plain.typical) <= 2e-5, name
            assert plain.free <= 2e-4, name
            assert narrow.isolated <= 1.5e-2, name
        assert plain.isolated <= narrow.isolated <= gate.isolated, name
    flipped, five_percent = gates.gate_of("ffn.out", ()), 0.05
    floor = 3e-6
    assert gates.judge(five_percent, floor, flipped.free, flipped.k("free")).state is State.FAIL
    assert gates.judge(five_percent, floor, gates.GATES["ffn.out"].free, flipped.k("free")).state is State.PASS
    assert gates.judge(3e-6, floor, flipped.isolated).state is State.PASS


def test_logits_of_attention_in_bf16_have_their_own_witness() -> None:
    assert gates.gate_of("core.witness", {"bf16", "score.bf16"}) == gates.GATES["core.witness"]  # the witness rounds scores itself
    assert gates.gate_of("core.witness", {"bf16"}) == gates.GATES["core.witness"]
