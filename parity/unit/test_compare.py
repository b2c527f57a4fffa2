"""Comparison: what the numbers are, and every way a comparison could pass without comparing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.core.compare import (
    compare_keys,
    compare_point,
    compare_scores,
    compare_sets,
    compare_values,
    compare_visible,
    differing,
    selection_margin,
)

NAN, INF = math.nan, math.inf
LIMIT = 0.3  # the loosest that a gate may have


def rows(*values):
    """[1, s, width]"""
    return torch.tensor([list(values)])


# ---- the numbers ----


def test_the_worst_row_decides_not_the_average():
    want = torch.ones(2, 50, 8)
    got = want.clone()
    got[1, 17] *= 1.25
    c = compare_values(got, want, 1)
    assert c.rows == 100
    assert c.where == (1, 17)
    assert c.error == pytest.approx(0.25)
    assert c.rel_l2 == pytest.approx(0.025)
    assert c.norm_ratio == c.norm_ratio_max == pytest.approx(1.25)
    assert (c.norm_ratio_where, c.norm_ratio_min) == ((1, 17), 1.0)
    assert c.cosine == pytest.approx(1.0)


def test_a_shrunk_row_is_as_far_from_one_as_a_grown_one():
    c = compare_values(rows([2.0, 0], [0.25, 0]), rows([1.0, 0], [1.0, 0]), 1)
    assert (c.norm_ratio, c.norm_ratio_where) == (0.25, (0, 1))
    assert c.norm_error == pytest.approx(math.log(4))


def test_the_worst_element_has_its_full_coordinate_and_both_values():
    want = torch.zeros(2, 3, 4, 5) + 1
    got = want.clone()
    got[1, 2, 3, 4] = -3
    c = compare_values(got, want, 2)
    assert (c.element, c.got, c.want, c.max_abs) == ((1, 2, 3, 4), -3.0, 1.0, 4.0)
    assert c.where == (1, 2)
    assert compare_values(got, want, 1).where == (1, 2, 3)


def test_cosine_names_the_row_that_turned():
    c = compare_values(rows([1.0, 0], [0.0, 1]), rows([1.0, 0], [1.0, 0]), 1)
    assert (c.cosine, c.cosine_where, c.norm_ratio) == (0.0, (0, 1), 1.0)


def test_pads_are_not_looked_at():
    want, got = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    got[0, 2], want[1, 1] = NAN, INF
    valid = torch.ones(2, 3, dtype=torch.bool)
    valid[0, 2] = valid[1, 1] = False
    c = compare_values(got, want, 1, valid)
    assert (c.rows, c.error, c.finite_equal) == (4, 0.0, True)
    got[1, 2, 0] = 2  # coordinates stay those of the whole tensor
    assert compare_values(got, want, 1, valid).where == (1, 2)
    assert compare_values(got, want, 1, valid).element == (1, 2, 0)


def test_blocks_give_the_same_numbers(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    want = torch.randn(3, 7, 5, generator=generator)
    got = want + 0.01 * torch.randn(3, 7, 5, generator=generator)
    whole = compare_values(got, want, 1)
    monkeypatch.setattr("probes.core.compare.BLOCK_ELEMENTS", 11)
    assert compare_values(got, want, 1) == whole


@given(scale=st.floats(1e-30, 1e30), factor=st.floats(0.5, 2))
@settings(max_examples=50, deadline=None)
def test_neither_tiny_nor_huge_rows_lose_their_error(scale, factor):
    want = torch.full((1, 1, 64), scale)
    got = want * factor
    expected = float((got.double() / want.double() - 1).abs().max())
    assert compare_values(got, want, 1).error == pytest.approx(expected, rel=1e-9)


# ---- passing without comparing ----


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["got", "want"])
def test_one_bad_number_on_one_side_fails_any_limit(bad, side):
    got, want = torch.ones(1, 4, 3), torch.ones(1, 4, 3)
    (got if side == "got" else want)[0, 2, 1] = bad
    c = compare_values(got, want, 1)
    assert not c.error <= LIMIT
    assert c.error > LIMIT  # inf, so that a max over metrics keeps it
    assert not c.finite_equal
    assert c.finite_where == c.element == (0, 2, 1)
    assert (c.got_only, c.want_only) == ((0, 1) if side == "got" else (1, 0))


def test_nan_on_both_sides_is_no_agreement():
    nothing = torch.full((1, 2, 3), NAN)
    c = compare_values(nothing, nothing, 1)
    assert c.error == INF
    assert not c.finite_equal


def test_infinities_agree_only_with_their_own_sign():
    got, want = rows([1.0, INF]), rows([1.0, -INF])
    assert compare_values(got, want, 1).error == INF
    assert compare_values(want, want, 1).error == 0.0


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_compared_is_not_zero_error(shape):
    c = compare_values(torch.zeros(shape), torch.zeros(shape), 1)
    assert c.rows == 0
    assert math.isnan(c.error)
    assert not c.error <= LIMIT


def test_no_valid_query_is_nothing_compared():
    c = compare_values(torch.ones(1, 2, 3), torch.ones(1, 2, 3), 1, torch.zeros(1, 2, dtype=torch.bool))
    assert c.rows == 0
    assert not c.error <= LIMIT


def test_another_shape_is_a_problem_not_a_broadcast():
    c = compare_values(torch.ones(1, 1, 3), torch.ones(1, 2, 3), 1)
    assert c.error == INF
    assert c.rows == 0
    assert "[1, 1, 3] against [1, 2, 3]" in c.problem


def test_zeros_for_an_answer_are_an_error_of_one():
    c = compare_values(torch.zeros(1, 2, 3), torch.ones(1, 2, 3), 1)
    assert c.error == 1.0
    assert (c.norm_ratio, c.norm_error, c.cosine) == (0.0, INF, 0.0)


def test_a_zero_row_must_be_zero():
    assert compare_values(rows([0.0, 0]), rows([0.0, 0]), 1).error == 0.0
    c = compare_values(rows([1e-30, 0]), rows([0.0, 0]), 1)
    assert c.error == INF
    assert c.norm_error == INF


def test_a_wrong_valid_mask_is_refused():
    with pytest.raises(ValueError, match="valid"):
        compare_values(torch.ones(1, 2, 3), torch.ones(1, 2, 3), 1, torch.ones(2, 1, dtype=torch.bool))


# ---- sparse points ----


def sparse(*carry):
    """[1, s, 2]: rows of ones where `carry`, NaN elsewhere"""
    return torch.tensor([[[1.0, 1.0] if c else [NAN, NAN] for c in carry]])


def test_a_sparse_point_compares_only_its_rows():
    c = compare_values(sparse(0, 1, 0, 1), sparse(0, 1, 0, 1), 1, sparse=True)
    assert (c.rows, c.error, c.finite_equal, c.missing_rows, c.extra_rows) == (2, 0.0, True, 0, 0)


def test_a_missing_and_an_extra_row_are_errors_with_their_place():
    c = compare_values(sparse(0, 0, 1), sparse(0, 1, 1), 1, sparse=True)
    assert (c.error, c.where, c.missing_rows, c.extra_rows) == (INF, (0, 1), 1, 0)
    c = compare_values(sparse(1, 1, 1), sparse(0, 1, 1), 1, sparse=True)
    assert (c.error, c.where, c.missing_rows, c.extra_rows) == (INF, (0, 0), 0, 1)


def test_all_rows_missing_is_not_nothing_compared():
    c = compare_values(sparse(0, 0), sparse(1, 1), 1, sparse=True)
    assert (c.rows, c.missing_rows, c.error, c.norm_error) == (2, 2, INF, INF)


def test_no_row_on_either_side_is_nothing_compared():
    c = compare_values(sparse(0, 0), sparse(0, 0), 1, sparse=True)
    assert c.rows == 0
    assert not c.error <= LIMIT


def test_half_a_row_of_nan_is_no_absent_row():
    got = sparse(1, 1)
    got[0, 1, 0] = NAN
    c = compare_values(got, sparse(1, 1), 1, sparse=True)
    assert (c.error, c.finite_where, c.missing_rows) == (INF, (0, 1, 0), 0)


# ---- scores ----


def test_scores_may_differ_in_width_where_nothing_is_visible():
    c = compare_scores(rows([1.0, -INF, -INF]), rows([1.0]))
    assert (c.rows, c.error) == (1, 0.0)
    assert compare_scores(rows([1.0, 2.0]), rows([1.0])).error == INF


def test_rows_that_see_nothing_are_not_counted_as_compared():
    c = compare_scores(rows([-INF, -INF], [1.0, -INF]), rows([-INF, -INF], [1.0, -INF]))
    assert c.rows == 1
    blind = rows([-INF, -INF])
    assert compare_scores(blind, blind).rows == 0


def test_a_score_where_none_may_be_seen_is_a_mismatch():
    c = compare_scores(rows([1.0, 0.5]), rows([1.0, -INF]))
    assert (c.error, c.finite_where, c.got_only) == (INF, (0, 0, 1), 1)


# ---- sets ----


def brute(got, want):
    """Missing, extra, duplicates of one query, the slow way."""
    g, w = [i for i in got if i >= 0], [i for i in want if i >= 0]
    return len(set(w) - set(g)), len(set(g) - set(w)), len(g) - len(set(g))


queries = st.lists(st.tuples(*[st.lists(st.integers(-1, 6), min_size=5, max_size=5)] * 2), min_size=1, max_size=6)


@given(queries)
@settings(max_examples=200, deadline=None)
def test_sets_agree_with_counting_by_hand(pairs):
    got, want = (torch.tensor([[pair[side] for pair in pairs]]) for side in (0, 1))
    counts = [brute(*pair) for pair in pairs]
    c = compare_sets(got, want)
    assert (c.missing, c.extra, c.duplicates) == tuple(sum(n[i] for n in counts) for i in range(3))
    assert c.different == sum(any(n) for n in counts)
    assert c.rows + c.empty == len(pairs)
    assert differing(got, want)[0].tolist() == [any(n) for n in counts]
    if c.different:
        first = next(i for i, n in enumerate(counts) if any(n))
        assert c.where == (0, first)
        assert set(c.want_set) == {i for i in pairs[first][1] if i >= 0}


def test_order_and_width_do_not_matter():
    c = compare_sets(torch.tensor([[[5, 2, -1, -1]]]), torch.tensor([[[2, 5]]]))
    assert (c.rows, c.different, c.error) == (1, 0, 0.0)


def test_empty_sets_compare_nothing():
    none = torch.full((1, 3, 2), -1)
    assert compare_sets(none, none).rows == 0
    assert not compare_sets(none, none).error <= LIMIT
    assert compare_sets(none, none).empty == 3
    assert not compare_sets(none[:, :, :0], none[:, :, :0]).error <= LIMIT
    c = compare_sets(none, torch.tensor([[[1, -1], [-1, -1], [-1, -1]]]))
    assert (c.rows, c.missing, c.different) == (1, 1, 1)


def test_a_repeated_index_is_a_difference():
    c = compare_sets(torch.tensor([[[3, 3]]]), torch.tensor([[[3, -1]]]))
    assert (c.different, c.duplicates, c.missing, c.extra) == (1, 1, 0, 0)
    assert c.got_set == (3, 3)


def test_pads_hold_any_indices():
    got, want = torch.tensor([[[1], [9]]]), torch.tensor([[[1], [2]]])
    assert compare_sets(got, want, torch.tensor([[True, False]])).different == 0


def test_sets_of_other_queries_are_a_problem():
    c = compare_sets(torch.zeros(1, 2, 3), torch.zeros(1, 3, 3))
    assert c.problem
    assert c.error == INF


def test_visible_keeps_positions_and_entries_apart():
    got, want = torch.tensor([[[0, 1, 0]]]), torch.tensor([[[0, -1, 0, 1]]])  # window 2: same numbers, other meaning
    window, entries = compare_visible(got, want, 2)
    assert (window.extra, window.missing) == (1, 0)
    assert (entries.extra, entries.missing) == (0, 1)
    assert compare_visible(got, want, 9)[0].error == INF


# ---- how close a choice was ----


def test_the_margin_of_an_exchange_is_the_gap_of_the_scores():
    scores = torch.tensor([[[5.0, 3.0, 2.9, -INF]]])
    margin = selection_margin(torch.tensor([[[0, 2]]]), torch.tensor([[[0, 1]]]), scores)
    assert margin[0, 0] == pytest.approx(0.1, abs=1e-6)
    assert selection_margin(torch.tensor([[[1, 0]]]), torch.tensor([[[0, 1]]]), scores)[0, 0] == 0


def test_the_worst_exchange_counts():
    scores = torch.tensor([[[5.0, 4.0, 3.0, 1.0]]])
    assert selection_margin(torch.tensor([[[2, 3]]]), torch.tensor([[[0, 1]]]), scores)[0, 0] == 4


@pytest.mark.parametrize(
    "got",
    [[0, -1], [0, 0], [0, 3], [0, 7], [-1, -1]],
    ids=["one too few", "twice the same", "one nobody may see", "one beyond the end", "none"],
)
def test_no_score_excuses(got):
    scores = torch.tensor([[[5.0, 3.0, 2.9, -INF]]])
    assert selection_margin(torch.tensor([[got]]), torch.tensor([[[0, 1]]]), scores)[0, 0] == INF


def test_a_choice_that_scores_did_not_make_is_not_excused_by_them():
    scores = torch.tensor([[[1.0, 9.0]]])  # the reference chose 0 by another rule
    assert selection_margin(torch.tensor([[[1]]]), torch.tensor([[[0]]]), scores)[0, 0] == 8


def test_nan_scores_excuse_nothing():
    scores = torch.full((1, 1, 3), NAN)
    assert selection_margin(torch.tensor([[[1]]]), torch.tensor([[[0]]]), scores)[0, 0] == INF


def test_margins_of_pads_are_zero_and_places_are_kept():
    got, want = torch.tensor([[[1], [1], [0]]]), torch.tensor([[[0], [0], [0]]])
    scores = torch.tensor([[[3.0, 1.0]] * 3])
    margin = selection_margin(got, want, scores, torch.tensor([[False, True, True]]))
    assert margin.tolist() == [[0, 2, 0]]


# ---- names, kinds ----


def test_names_are_compared_both_ways():
    c = compare_keys(["a", "b"], ["b", "c"])
    assert (c.both, c.got_only, c.want_only, c.equal) == (("b",), ("a",), ("c",), False)
    assert compare_keys("ab", "ba").equal
    assert not compare_keys([], []).equal  # nothing on both sides is no agreement


def test_a_point_is_compared_by_its_kind():
    both = torch.tensor([[[2, 1]]])
    assert compare_point("layers.2.attn.selected", both, both.flip(-1)).error == 0
    assert compare_point("layers.2.attn.indexer.score", rows([1.0, -INF]), rows([1.0])).rows == 1
    assert compare_point("layers.2.attn.compressor", sparse(0, 1), sparse(0, 1)).rows == 1
    assert compare_point("layers.2.hc_attn.comb", torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 4)).rows == 1
