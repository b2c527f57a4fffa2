"""The arithmetic of a gate, and the ways a comparison passes without comparing."""

from __future__ import annotations

import math

import pytest

from parity import gates
from parity.gates import GATES, MAX_LIMIT, OPERATIONS
from probes.core.records import State
from reference.points import INDICES, LAYER_POINTS, MODEL_POINTS


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.011])
def test_nan_inf_and_too_large_fail(value):
    assert gates.judge(value, floor=0.003, eps=0.001).state is State.FAIL


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
    assert 0 <= row.isolated <= row.free < MAX_LIMIT / 2
    assert row.typical <= row.isolated
    assert row.why
