"""Measurements of mixing matrices, residual streams and visible keys, against small worlds and brute force."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from probes.core.measure import (
    FAULTS,
    matrix_distance,
    nearest_step,
    ranges_of,
    ranges_text,
    residual_measurement,
    sinkhorn_history,
    sinkhorn_iterations,
    sinkhorn_measurement,
    sinkhorn_residuals,
    sinkhorn_trail,
    visible_measurement,
    visible_ranges,
)

NAN = math.nan

# ---- mixing matrices ----


def test_a_permutation_is_doubly_stochastic_but_not_symmetric():
    comb = torch.eye(4)[[1, 2, 3, 0]].expand(2, 3, 4, 4)
    m = sinkhorn_measurement(comb, iterations=5)
    assert m["queries"] == 6
    assert (m["row_deviation"], m["column_deviation"], m["more_iterations"]) == (0, 0, 0)
    assert m["spectral_norm"] == pytest.approx(1)
    assert m["asymmetry"] > 1


def test_rows_that_are_off_are_found_where_they_are():
    comb = torch.full((2, 3, 2, 2), 0.5)
    comb[1, 2] = torch.tensor([[0.7, 0.6], [0.3, 0.4]])  # columns sum to 1, rows to 1.3 and 0.7
    m = sinkhorn_measurement(comb, torch.full((2, 3, 2), 0.25), torch.full((2, 3, 2), 1.5))
    assert m["row_deviation"] == pytest.approx(0.3)
    assert m["row_deviation_at"] == [1, 2]
    assert m["column_deviation"] == pytest.approx(0, abs=1e-6)
    assert (m["pre_min"], m["post_max"]) == (0.25, 1.5)


def test_pads_are_left_out():
    comb = torch.full((1, 3, 2, 2), 0.5)
    comb[0, 1] = NAN
    valid = torch.tensor([[True, False, True]])
    assert sinkhorn_measurement(comb, valid=valid)["row_deviation"] == 0
    assert sinkhorn_measurement(comb, valid=torch.zeros(1, 3, dtype=torch.bool)) == {"queries": 0}
    assert math.isnan(sinkhorn_measurement(comb, iterations=3)["row_deviation"])


def test_further_iterations_converge_and_are_counted():
    generator = torch.Generator().manual_seed(0)
    comb = torch.rand(1, 50, 4, 4, generator=generator) + 0.05
    needed, left = sinkhorn_iterations(comb, 200)
    assert needed is not None
    assert 1 < needed < 60
    assert left <= 1e-6
    assert sinkhorn_iterations(comb, needed - 1)[0] is None
    history = sinkhorn_history(comb, needed)
    assert len(history) == needed + 1
    assert history[-1] <= 1e-6 < history[-2]


def test_a_matrix_that_never_converges_says_so():
    comb = torch.tensor([[1.0, 1.0], [0.0, 1e-3]]).expand(1, 1, 2, 2)  # a triangle tends to the identity, slowly
    needed, left = sinkhorn_iterations(comb, 50)
    assert needed is None
    assert left > 1e-6


def test_the_distance_sees_a_transpose_where_sums_do_not():
    generator = torch.Generator().manual_seed(1)
    comb = torch.rand(1, 20, 3, 3, generator=generator)
    for _ in range(200):
        comb = comb / comb.sum(-1, keepdim=True)
        comb = comb / comb.sum(-2, keepdim=True)
    turned = sinkhorn_measurement(comb.mT)
    assert turned["row_deviation"] < 1e-5
    d = matrix_distance(comb.mT, comb)
    assert d["relative"] > 0.1
    assert d["transposed"] == 0
    assert matrix_distance(comb, comb)["distance"] == 0


def test_the_trail_is_the_models_own_sinkhorn():
    start = torch.rand(1, 30, 4, 4, generator=torch.Generator().manual_seed(3)) + 0.02
    trail = sinkhorn_trail(start, 5, 1e-6)
    assert [name for name, _ in trail] == ["1 columns", "2 rows", "2 columns", "3 rows", "3 columns", "4 rows", "4 columns", "5 rows", "5 columns"]
    residuals = sinkhorn_residuals(trail)
    assert len(residuals) == 5
    assert residuals == sorted(residuals, reverse=True)
    assert nearest_step(trail[-1][1], trail, "5 columns") == ("5 columns", 0.0)
    assert nearest_step(trail[-3][1], trail, "5 columns")[0] == "4 columns"  # an iteration fewer (B096)
    assert nearest_step(trail[-2][1], trail, "5 columns")[0] == "5 rows"  # ends on rows (B096)


def test_converged_matrices_count_as_the_step_that_is_due():
    same = torch.full((1, 3, 2, 2), 0.5)
    trail = sinkhorn_trail(same, 4, 0.0)
    assert nearest_step(same, trail, "4 columns")[0] == "4 columns"


# ---- residual streams ----


def test_the_largest_element_has_its_coordinate():
    X = torch.ones(2, 3, 4, 5)
    X[1, 2, 3, 1] = -9
    m = residual_measurement(X)
    assert (m["absmax"], m["at"]) == (9, [1, 2, 3, 1])
    assert m["stream_rms"][0] == 1
    assert m["stream_rms"][3] > 1


def test_growth_is_split_into_what_made_it():
    generator = torch.Generator().manual_seed(2)
    before = torch.randn(1, 5, 2, 8, generator=generator)
    comb = torch.eye(2).expand(1, 5, 2, 2)
    y, post, pre = torch.randn(1, 5, 8, generator=generator), torch.full((1, 5, 2), 2.0), torch.full((1, 5, 2), 0.5)
    X = before + 2 * y[:, :, None]
    m = residual_measurement(X, before, comb, pre, post, y)
    size = before.square().mean().sqrt()
    assert m["from_comb"] == pytest.approx(1)
    assert m["from_post"] == pytest.approx(float(2 * y.square().mean().sqrt() / size))
    assert m["growth"] == pytest.approx(float(X.square().mean().sqrt() / size))
    assert m["into_block"] == pytest.approx(float((before.sum(2) / 2).square().mean().sqrt() / size))


def test_parts_add_up_and_the_comb_part_stays_within_its_norm():
    generator = torch.Generator().manual_seed(4)
    before, y = torch.randn(1, 6, 3, 8, generator=generator), torch.randn(1, 6, 8, generator=generator)
    comb, post = torch.rand(1, 6, 3, 3, generator=generator), torch.rand(1, 6, 3, generator=generator)
    X = post[..., None] * y[:, :, None] + torch.einsum("bsij,bsid->bsjd", comb, before)
    m = residual_measurement(X, before, comb, None, post, y)
    assert m["remainder"] < 1e-6
    assert 0 < m["comb_bound"] <= 1
    turned = residual_measurement(X, before, comb.mT, None, post, y)  # B090
    assert turned["remainder"] > 0.1


def test_the_first_axis_of_comb_is_the_source():
    before = torch.tensor([[[[1.0], [0.0]]]])
    comb = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])  # stream 0 goes to stream 1
    assert residual_measurement(before, before, comb)["from_comb"] == pytest.approx(1)
    assert residual_measurement(before, before, comb.mT)["from_comb"] == 0


def test_nothing_measured_is_said():
    X = torch.ones(1, 2, 3, 4)
    assert residual_measurement(X, valid=torch.zeros(1, 2, dtype=torch.bool)) == {"queries": 0}


# ---- visible keys ----


def right_keys(p, window, ratio, topk=None):
    """Five lines that say who is visible: (positions, entries)."""
    near = [q for q in range(p + 1) if q > p - window]
    far = [e for e in range(p + 1) if ratio and all(t <= p for t in range(e * ratio, e * ratio + ratio))]
    return near, far[-topk:] if topk else far


def table(rows, window, width):
    """visible [1, s, window + width]"""
    return torch.tensor([[near + [-1] * (window - len(near)) + far + [-1] * (width - len(far)) for near, far in rows]])


@pytest.mark.parametrize(("ratio", "topk"), [(0, None), (4, 3), (8, None)])
def test_the_right_keys_have_no_fault(ratio, topk):
    window, positions = 6, list(range(30))
    rows = [right_keys(p, window, ratio, topk) for p in positions]
    m = visible_measurement(table(rows, window, 12), torch.tensor([positions]), window, ratio, index_topk=topk)
    assert m["wrong"] == 0
    assert m["queries"] == 30
    assert m["keys"] == sum(len(near) + len(far) for near, far in rows)


@given(
    p=st.integers(0, 40),
    window=st.integers(1, 9),
    ratio=st.sampled_from([0, 2, 4, 8]),
    change=st.sampled_from(["drop near", "drop far", "add near", "add far", "repeat near", "repeat far", "none"]),
    pick=st.integers(0, 50),
)
@settings(max_examples=300, deadline=None)
def test_every_change_of_the_right_set_is_a_fault(p, window, ratio, change, pick):
    near, far = right_keys(p, window, ratio)
    before = (list(near), list(far))
    kind, _, side = change.partition(" ")
    keys = near if side == "near" else far
    if kind == "drop" and keys:
        keys.pop(pick % len(keys))
    elif kind == "add":
        keys.append(pick)
    elif kind == "repeat" and keys:
        keys.append(keys[pick % len(keys)])
    assume(len(near) <= window)
    changed = sorted(near) != before[0] or sorted(far) != before[1]
    assert (measured(near, far, p, window, ratio)["wrong"] > 0) == changed


def measured(near, far, p, window, ratio, topk=None):
    return visible_measurement(table([(near, far)], window, 60), torch.tensor([[p]]), window, ratio, index_topk=topk)


@pytest.mark.parametrize(
    ("near", "far", "fault", "keys"),
    [
        ([8, 9, 10], [0, 1], "edge", [8, 9, 10]),  # a window of one key fewer (B060)
        ([5, 6, 7, 8], [0, 1], "edge", [5, 6, 7, 8]),  # ends before the query (B054)
        ([], [0, 1], "edge", None),
        ([7, 8, 9, 11], [0, 1], "future", [11]),
        ([7, 8, 9, 10], [0, 1, 3], "future", [3]),
        ([7, 8, 9, 10], [0, 1, 2], "unfinished", [2]),
        ([6, 8, 9, 10], [0, 1], "stale", [6]),
        ([7, 8, 10], [0, 1], "hole", None),
        ([7, 8, 9, 10], [1], "hole", None),
        ([7, 8, 9, 10], [0, 1, 1], "duplicate", None),
        ([7, 8, 10, 10], [0, 1], "duplicate", None),
    ],
)
def test_faults_have_their_class(near, far, fault, keys):
    m = measured(near, far, p=10, window=4, ratio=4)
    assert m[fault]["queries"] == 1
    assert (m[fault]["first"], m[fault]["position"]) == ([0, 0], 10)
    if keys:
        assert m[fault]["keys"] == keys


def test_an_indexer_must_choose_as_many_as_it_may():
    near = [7, 8, 9, 10]
    assert measured(near, [0, 1], 10, 4, 2, topk=3)["hole"]["queries"] == 1
    assert measured(near, [0, 1, 4], 10, 4, 2, topk=3)["wrong"] == 0
    assert measured(near, [0, 1, 2, 3], 10, 4, 2, topk=3)["duplicate"]["queries"] == 1


@pytest.mark.parametrize(
    ("far", "width", "ratio", "fault"),
    [
        ([0, 1, 0, 0, 0, 0], 6, 4, "pad"),  # padding of the list read as entry 0 (B057)
        ([0, 0], 2, 128, "pad"),
        ([-2], 1, 4, "pad"),  # a sentinel plus an offset (B052)
        ([0, 1, 2], 3, 128, "ratio"),  # counts entries as a ratio-4 layer does
        ([0], 1, 0, "ratio"),  # a window-only layer has none
    ],
)
def test_padding_and_another_ratio_have_their_class(far, width, ratio, fault):
    p, window = 13, 4
    visible = torch.tensor([[[*range(p - 3, p + 1), *far, *[-1] * (width - len(far))]]])
    m = visible_measurement(visible, torch.tensor([[p]]), window, ratio, ratios=(4, 128))
    assert m[fault]["queries"] == 1
    assert m["wrong"] == 1
    assert m["unfinished"]["queries"] == m["future"]["queries"] == 0


def test_a_key_among_the_padding_of_a_batch_is_a_pad():
    visible, positions = torch.tensor([[[2, 3], [3, 4]], [[0, 1], [1, 2]]]), torch.tensor([[3, 4], [1, 2]])
    m = visible_measurement(visible, positions, 2, 0, torch.tensor([[True, True], [True, True]]), lengths=torch.tensor([5, 2]))
    assert m["pad"] == {"queries": 1, "first": [1, 1], "position": 2, "keys": [2], "tokens": [[2, 2]]}


def test_keys_are_shown_as_the_tokens_they_stand_for():
    m = measured([7, 8, 9, 10], [0, 1, 2], p=10, window=4, ratio=4)
    assert m["unfinished"]["tokens"] == [[8, 11]]


def test_pads_may_see_anything():
    m = visible_measurement(table([([9], []), ([0], [])], 1, 1), torch.tensor([[0, 0]]), 1, 0, torch.tensor([[False, True]]))
    assert m["wrong"] == 0
    assert m["queries"] == 1
    assert set(FAULTS) < set(m)


def test_entries_are_shown_as_the_tokens_they_stand_for():
    assert ranges_of([3, 1, 2, 7, -1]) == [(1, 3), (7, 7)]
    assert ranges_of([0, 1, 3], 4) == [(0, 7), (12, 15)]
    row = torch.tensor([5, 6, -1, 0, 2, -1])
    assert visible_ranges(row, 3, 4) == {"window": [(5, 6)], "entries": [(0, 3), (8, 11)]}
    assert ranges_text([(0, 3), (8, 8)]) == "0-3 8"
    assert ranges_text([]) == "-"
    assert ranges_text([(i, i) for i in range(0, 20, 2)], 2) == "0 2 … (10 ranges)"
