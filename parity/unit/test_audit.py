"""Rows, noise floors and replayable choices of the audit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parity.audit import Floor, component_of_crash
from probes.core.rows import absent_rows, replayable, row_errors
from reference.points import SCORES, VALUES

NAN, INF = math.nan, math.inf


def test_row_error_and_norm_ratio_of_a_scaled_row():
    want = torch.ones(1, 2, 4)
    got = torch.stack((want[:, 0], 1.5 * want[:, 1]), 1)
    error, norm = row_errors(got, want, 1)
    assert error.tolist() == [[0.0, 0.5]]
    assert norm.tolist() == [[0.0, 0.5]]


def test_a_sign_flip_keeps_the_norm_and_not_the_error():
    want = torch.ones(1, 1, 8)
    error, norm = row_errors(-want, want, 1)
    assert error.item() == 2.0
    assert norm.item() == 0.0


def test_a_zero_row_must_be_zero():
    want = torch.zeros(1, 2, 4)
    got = want.clone()
    got[0, 1, 0] = 1e-9
    assert row_errors(got, want, 1)[0].tolist() == [[0.0, INF]]


def test_nan_in_got_is_not_small():
    want = torch.ones(1, 1, 4)
    got = want.clone()
    got[..., 2] = NAN
    assert row_errors(got, want, 1)[0].isnan().all()


def test_an_entry_written_where_none_is_due_is_infinitely_wrong():
    want = torch.full((1, 2, 4), NAN)
    got = want.clone()
    got[0, 1] = 1.0
    error, _ = row_errors(got, want, 1)
    assert error[0, 1] == INF
    assert absent_rows(want, 1).all()


def test_floor_is_the_worst_twin_row_and_forgets_pads():
    want = torch.ones(1, 3, 4)
    got = want.clone()
    got[0, 1] *= 1.25
    got[0, 2] = 100.0  # a pad
    floor = Floor()
    floor.add(got, want, VALUES, 1, torch.tensor([[True, True, False]]))
    assert floor.error == 0.25
    assert floor.rows == 2
    assert floor.absolute == 0.25


def test_floor_of_scores_ignores_what_may_not_be_seen():
    want = torch.tensor([[[1.0, -INF, -INF]]])
    got = torch.tensor([[[1.5, -INF]]])
    floor = Floor()
    floor.add(got, want, SCORES, 1, torch.tensor([[True]]))
    assert floor.error == 0.5
    assert floor.absolute == 0.5


def test_a_row_of_scores_near_zero_is_measured_by_what_scores_are():
    want = torch.tensor([[[1.0, 1.0], [1e-6, 1e-6]]])
    got = want.clone()
    got[0, 1] = 2e-6
    floor = Floor(unit=1.0)
    floor.add(got, want, SCORES, 1, torch.ones(1, 2, dtype=torch.bool))
    assert floor.error == pytest.approx(1e-6)
    alone = Floor()
    alone.add(got, want, SCORES, 1, torch.ones(1, 2, dtype=torch.bool))
    assert alone.error == pytest.approx(1.0)


def test_first_scores_near_zero_are_measured_by_what_later_ones_are():
    """A prompt of three tokens has no score; the first step has one, by chance near zero."""
    valid, found = torch.tensor([[True]]), Floor()
    for step, (size, unit) in enumerate([(0.02, 0.02), (1.0, 0.51), (1.5, 1.0)]):
        want = torch.full((1, 1, step + 1), size)
        floor = Floor(unit=unit)
        floor.add(want + 0.01, want, SCORES, 1, valid, 0, ("decode", step))
        found.merge(floor)
    assert found.unit == 1.0
    assert found.error == pytest.approx(0.01)
    assert found.norm == pytest.approx(0.01)
    assert torch.cat(list(found.errors[0].values())).tolist() == pytest.approx([0.01, 0.01, 0.01 / 1.5])


def test_a_floor_measured_anew_is_what_it_would_have_been():
    generator = torch.Generator().manual_seed(1)
    want = torch.randn(2, 7, 5, generator=generator).masked_fill(torch.arange(5) > torch.arange(7)[:, None] - 2, -INF)
    got, valid = want + 0.1 * torch.randn(2, 7, 5, generator=generator), torch.arange(7) < torch.tensor([[7], [4]])
    early, late = Floor(unit=0.1), Floor(unit=0.9)
    for floor in (early, late):
        floor.add(got, want, SCORES, 1, valid)
    assert early.error > late.error
    early.measure_by(0.9)
    assert torch.allclose(early.errors[0]["prefill", None], late.errors[0]["prefill", None])
    assert early.error == pytest.approx(late.error)
    assert early.norm == pytest.approx(late.norm)


def test_typical_row_is_of_the_asked_passes_only():
    floor = Floor()
    want, valid = torch.ones(1, 1, 4), torch.tensor([[True]])
    for step, factor in enumerate((1.0, 1.5, 2.0)):
        floor.add(factor * want, want, VALUES, 1, valid, twin=0, key=("decode", step))
    assert floor.typical([("decode", 2)]) == 1.0
    assert floor.typical() == 0.5


def test_a_floor_without_rows_is_no_floor():
    assert Floor().rows == 0


@given(st.lists(st.integers(-3, 12), min_size=1, max_size=8), st.integers(0, 10))
def test_replayable_entries_are_allowed_unique_ascending_with_none_last(values, limit):
    out = replayable(torch.tensor([[values]]), torch.tensor(limit), None)[0, 0].tolist()
    kept = [v for v in out if v >= 0]
    assert kept == sorted({v for v in values if 0 <= v < limit})
    assert out == kept + [-1] * (len(values) - len(kept))


@given(st.lists(st.integers(-3, 12), min_size=3, max_size=3))
def test_replayable_experts_fill_every_slot_once(values):
    out = replayable(torch.tensor([[values]]), torch.tensor(8), range(8))[0, 0].tolist()
    assert len(set(out)) == 3
    assert out == sorted(out)
    assert {v for v in values if 0 <= v < 8} <= set(out)


@pytest.mark.parametrize(
    ("message", "component"),
    [("indexer keys: buffer for keys of 1024, the compressor makes keys of 128", "indexer"), ("hc_pre: block 3 reads past X", "mHC"), ("out of memory", "")],
)
def test_a_crash_is_filed_by_what_its_message_names(message, component):
    assert component_of_crash(ValueError(message)) == component


def test_a_crash_without_a_name_is_filed_by_where_it_came_from():
    from production import weights

    nothing: Any = None
    with pytest.raises((AttributeError, TypeError)) as caught:
        weights.load_weights(nothing, nothing)
    assert component_of_crash(caught.value) == "checkpoint loading"
