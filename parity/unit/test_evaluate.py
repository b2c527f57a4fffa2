"""Verdicts from values: every way a comparison could pass without comparing, and every way a choice may differ."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parity import evaluate
from parity.audit import Floor
from parity.gates import Gate
from parity.selection import Case
from probes.core.records import State, Verdict
from reference.points import SCORES, VALUES, PointSpec

GATE = Gate(1e-3, 1e-2, 1e-4, "test")
SPEC = PointSpec("p", "[b, s, d]", VALUES, 1, "component", "")
SPARSE = PointSpec("p", "[b, s, d]", VALUES, 1, "component", "", True)
SCORE = PointSpec("p", "[b, s, e]", SCORES, 1, "component", "")
BASE = Verdict("p", "layers.0.p", "isolated", State.NOT_RUN, "worst row")
NAN, INF = math.nan, math.inf


def floor_of(error=1e-4, rows=100):
    floor = Floor(error=error, norm=error, rows=rows)
    return floor


def judge(got, want, spec=SPEC, floor=None, valid=None, mode="isolated"):
    valid = torch.ones(want.shape[:2], dtype=torch.bool) if valid is None else valid
    return evaluate.judge_values(BASE, spec, GATE, mode, got, want, valid, floor or floor_of())


def rows(s=40, d=16, seed=0):
    return torch.randn(1, s, d, generator=torch.Generator().manual_seed(seed))


def test_equal_values_pass_and_say_how_many_rows():
    verdict = judge(rows(), rows())
    assert verdict.state is State.PASS
    assert verdict.rows == 40


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t[0, 7].mul_(1.01), lambda t: t[0, 39].neg_(), lambda t: t[0, 3, 5].fill_(NAN), lambda t: t[0, 3, 5].fill_(INF),
        lambda t: t.zero_(), lambda t: t.copy_(t.flip(-1)),
    ],
    ids=["one row scaled", "last row negated", "a NaN", "an infinity", "all zero", "channels permuted"],
)  # fmt: skip
def test_a_spoiled_row_fails(spoil):
    got = rows()
    spoil(got)
    verdict = judge(got, rows())
    assert verdict.state is State.FAIL
    assert verdict.reason


@pytest.mark.parametrize(("factor", "tightest"), [(1 + 9e-5, "typical row"), (1.0, "worst row")], ids=["every row", "no row"])
def test_every_number_of_a_pass_is_told_with_the_smallest_limit_it_needs(factor, tightest):
    verdict = judge(rows() * factor, rows(), floor=floor_of(0.0))
    assert verdict.state is State.PASS
    assert verdict.numbers[0]["number"].startswith(tightest)
    assert verdict.numbers[0]["spent"] == verdict.spent
    assert {n["number"] for n in verdict.numbers} == {"worst row rel-L2", "norm ratio off 1 by", "typical row rel-L2"}
    for number in verdict.numbers:
        assert number["smallest_limit"] == pytest.approx(number["spent"] * number["limit"])


def test_the_first_bad_row_is_named():
    got = rows()
    got[0, 7] *= 1.1
    got[0, 30] *= 1.5
    verdict = judge(got, rows())
    assert verdict.details["first"] == [0, 7]
    assert verdict.where == [0, 30]


def test_a_small_error_in_every_row_fails_the_typical_row():
    verdict = judge(rows() * (1 + 8e-4), rows(), floor=floor_of(1e-4))
    assert verdict.state is State.FAIL
    assert "typical" in verdict.reason


def test_pads_are_not_judged():
    got = rows()
    got[0, 20:] = NAN
    valid = torch.arange(40)[None] < 20
    assert judge(got, rows(), valid=valid).state is State.PASS


@pytest.mark.parametrize(("floor", "valid"), [(Floor(), None), (None, torch.zeros(1, 40, dtype=torch.bool))], ids=["no floor", "no valid row"])
def test_nothing_to_judge_by_or_to_judge_is_not_run(floor, valid):
    assert judge(rows(), rows(), floor=floor, valid=valid).state is State.NOT_RUN


def test_another_shape_fails():
    assert judge(rows(d=8), rows()).state is State.FAIL


@pytest.mark.parametrize("extra", [True, False], ids=["an entry too many", "an entry missing"])
def test_sparse_entries_must_stand_at_the_same_queries(extra):
    want = torch.full((1, 8, 4), NAN)
    want[0, 3] = want[0, 7] = 1.0
    got = want.clone()
    got[0, 5 if extra else 7] = 1.0 if extra else NAN
    assert judge(want.clone(), want, SPARSE).state is State.PASS
    assert judge(got, want, SPARSE).state is State.FAIL


def test_no_entry_due_and_none_written_passes_as_that():
    nothing = torch.full((1, 3, 4), NAN)
    verdict = judge(nothing, nothing.clone(), SPARSE)
    assert verdict.state is State.PASS
    assert "no entry is due" in verdict.metric
    got = nothing.clone()
    got[0, 1] = 0.0
    assert judge(got, nothing, SPARSE).state is State.FAIL


def test_a_score_where_none_is_allowed_fails():
    want = torch.tensor([[[1.0, 2.0, -INF]]])
    got = torch.tensor([[[1.0, 2.0, 0.5]]])
    assert judge(want.clone(), want, SCORE).state is State.PASS
    assert judge(got, want, SCORE).state is State.FAIL
    assert judge(want[..., :2].clone(), want, SCORE).state is State.PASS  # narrower, the rest not visible


def test_before_the_first_entry_there_is_no_score_and_that_is_compared():
    nothing = torch.zeros(1, 3, 0)
    verdict = judge(nothing, nothing.clone(), SCORE)
    assert verdict.state is State.PASS
    assert verdict.rows == 3
    assert judge(torch.ones(1, 3, 1), nothing, SCORE).state is State.FAIL  # a score for an entry that is not there


# ---- choices ----

SCORES_ROW = torch.tensor([[[0.9, 0.8, 0.5, 0.499, 0.1, -INF]]], dtype=torch.float64)


def choice(got, want=(0, 1, 2), noise=0.001, due=3, own=None):
    valid = torch.tensor([[True]])
    no_audit: Any = None
    by = None if own is None else torch.tensor([[list(own)]])
    return evaluate.judge_choice(no_audit, BASE, torch.tensor([[list(got)]]), torch.tensor([[list(want)]]), SCORES_ROW, valid, noise, "entries", torch.tensor([[due]]), by)


def test_a_choice_that_productions_own_scores_make_is_no_error_of_the_choice():
    verdict = choice((0, 1, 4), own=(0.9, 0.8, 0.5, 0.3, 0.6, -INF))
    assert verdict.state is State.PASS
    assert (verdict.near_ties, verdict.details["by_own_scores"]) == (1, 1)
    assert (verdict.value, verdict.limit) == (0.0, 0.002)
    assert verdict.details["largest_gap_by_own_scores"] == pytest.approx(0.4)  # what the gate of its scores answers for


@pytest.mark.parametrize(
    ("got", "own"),
    [
        ((0, 1, 4), (0.9, 0.8, 0.5, 0.499, 0.1, -INF)), ((0, 1, 4), (0.9, 0.8, NAN, 0.4, 0.6, -INF)), ((0, 1, 5), (0.9, 0.8, 0.5, 0.4, 0.1, 0.7)),
        ((0, 1), (0.9, 0.8, 0.1, 0.1, 0.1, -INF)), ((0, 0, 1), (0.9, 0.8, 0.1, 0.1, 0.1, -INF)),
    ],
    ids=["its scores say otherwise", "a score is NaN", "not allowed", "one too few", "twice"],
)  # fmt: skip
def test_own_scores_excuse_nothing_else(got, own):
    assert choice(got, own=own).state is State.FAIL


def test_the_same_set_in_another_order_passes():
    assert choice((2, 0, 1)).state is State.PASS


def test_a_difference_within_the_noise_is_a_counted_near_tie():
    verdict = choice((0, 1, 3))
    assert verdict.state is State.PASS
    assert verdict.near_ties == 1


@pytest.mark.parametrize(
    ("got", "noise"),
    [((0, 1, 3), 0.0001), ((0, 1, 4), 0.001), ((0, 1, 5), 0.001), ((0, 1, 7), 0.001), ((0, 1, 1), 0.001), ((0, 1, -1), 0.001), ((-1, -1, -1), 9.0), ((0, 1, 3), NAN)],
    ids=["beyond the noise", "a much worse one", "not visible", "out of range", "twice", "one missing", "nothing chosen", "noise unknown"],
)
def test_a_wrong_choice_fails(got, noise):
    assert choice(got, noise=noise).state is State.FAIL


# ---- visible keys ----


def visible(got, want, window=4):
    audit: Any = SimpleNamespace(config=SimpleNamespace(sliding_window=window))
    valid = torch.ones(1, len(got), dtype=torch.bool)
    case = Case("decode", "layers.0.attn.visible", "isolated", 0, (0, 0))
    return evaluate.judge_visible(audit, case, BASE, torch.tensor([got]), torch.tensor([want]), valid)


WANT = [[4, 5, 6, 7, 0, 1, -1]]


@pytest.mark.parametrize("got", [[[7, 6, 5, 4, 1, 0, -1]], [[4, 5, 6, 7, -1, 0, 1]], [[4, 5, 6, 7, 0, 1]]], ids=["order", "gap", "width"])
def test_the_same_keys_pass_however_they_are_listed(got):
    assert visible(got, WANT).state is State.PASS


@pytest.mark.parametrize(
    ("got", "component"),
    [
        ([[-1, 5, 6, 7, 0, 1, -1]], "SWA ring"), ([[5, 6, 7, 8, 0, 1, -1]], "SWA ring"), ([[4, 5, 6, 6, 0, 1, -1]], "SWA ring"),
        ([[4, 5, 6, 7, 0, -1, -1]], ""), ([[4, 5, 6, 7, 0, 1, 2]], ""), ([[4, 5, 6, 7, 0, 1, 1]], ""),
    ],
    ids=["window key missing", "window moved", "window key twice", "entry missing", "unfinished entry", "entry twice"],
)  # fmt: skip
def test_other_keys_fail_and_name_the_source(got, component):
    verdict = visible(got, WANT)
    assert verdict.state is State.FAIL
    assert verdict.component == component
    assert verdict.details["first"] == [0, 0]


# ---- which part ----


def part(spoil):
    want = rows(s=6, d=16)
    got = want.clone()
    spoil(got)
    verdict = judge(got, want)
    assert verdict.state is State.FAIL
    return evaluate._which_part(replace(verdict, component="KV quant", point="layers.0.attn.kv"), got, want, torch.ones(1, 6, dtype=torch.bool), 4)


@pytest.mark.parametrize(
    ("spoil", "component"),
    [(lambda t: t[..., -4:].neg_(), "rope"), (lambda t: t[..., :-4].neg_(), "KV quant"), (lambda t: t.neg_(), "KV quant"), (lambda t: t[0, 2].fill_(NAN), "SWA ring"), (lambda t: t[0, 2].zero_(), "SWA ring")],
    ids=["rotary dims alone", "plain dims alone", "all dims", "a key that is not there", "a slot that nobody wrote"],
)
def test_a_wrong_key_names_the_part_that_made_it(spoil, component):
    assert part(spoil)[0] == component
