"""Plain attention over recorded keys, against attention computed key by key in a loop."""

from __future__ import annotations

import math

import pytest
import torch

from probes.core.attention import Keys, attend, combine_segments, merge_distances, stored_keys, weight_sum

W, RATIO, H, D = 6, 4, 2, 8
SINK = torch.tensor([0.3, -1.0])


def world(steps=23, seed=0):
    """q, kv and entries of a run over positions 0 .. steps - 1, and what each query may read."""
    g = torch.Generator().manual_seed(seed)
    q, kv = torch.randn(1, steps, H, D, generator=g), torch.randn(1, steps, D, generator=g)
    rows = torch.full((1, steps, D), math.nan)
    rows[:, RATIO - 1 :: RATIO] = torch.randn(1, len(range(RATIO - 1, steps, RATIO)), D, generator=g)
    visible = torch.full((1, steps, W + steps // RATIO), -1)
    for p in range(steps):
        near = list(range(max(0, p - W + 1), p + 1))
        visible[0, p, : len(near)] = torch.tensor(near)
        count = (p + 1) // RATIO
        visible[0, p, W : W + count] = torch.arange(count)
    position = torch.arange(steps)[None]
    return q, visible, position, stored_keys(kv, position, rows, RATIO, steps)


def by_hand(q, visible, keys, sink):
    """Softmax in a loop over keys: out [s, h, d] and weights of each key."""
    out, all_weights = [], []
    for p in range(q.shape[1]):
        rows = [keys.window[0, i] for i in visible[0, p, :W].tolist() if i >= 0] + [keys.entries[0, e] for e in visible[0, p, W:].tolist() if e >= 0]
        kv = torch.stack(rows).double()
        e = torch.exp(q[0, p].double() @ kv.T * D**-0.5)
        weights = e / (e.sum(-1, keepdim=True) + torch.exp(sink.double())[:, None])
        out.append(weights @ kv)
        all_weights.append(weights)
    return torch.stack(out), all_weights


def test_it_is_softmax_with_one_more_logit():
    q, visible, position, keys = world()
    found = attend(q, visible, position, keys, SINK, W, RATIO)
    want, weights = by_hand(q, visible, keys, SINK)
    assert torch.allclose(found.out[0], want, atol=1e-12)
    assert int(found.unstored.sum()) == 0
    total = found.mass["window"] + found.mass["entries"] + found.mass["sink"]
    assert torch.allclose(total, torch.ones_like(total))
    p = 13  # window 8..13, entries 0..2: tokens 8..11 are there twice
    assert torch.allclose(found.mass["raw"][0, p], weights[p][:, :4].sum(-1))
    assert torch.allclose(found.mass["pooled"][0, p], weights[p][:, W + 2])


def test_a_key_read_twice_counts_twice():
    q, visible, position, keys = world()
    twice = visible.clone()
    twice[0, 13, W + 4] = 0  # entry 0 once more: padding of a list read as a key (B057)
    once, more = (attend(q, v, position, keys, SINK, W, RATIO).mass["entries"][0, 13] for v in (visible, twice))
    assert (more > once).all()


def test_a_key_that_nobody_stored_is_counted_and_left_out():
    q, visible, position, keys = world()
    visible = visible.clone()
    visible[0, 5, W + 1] = 17
    found = attend(q, visible, position, keys, SINK, W, RATIO)
    assert found.unstored[0].nonzero().flatten().tolist() == [5]
    assert found.out.isfinite().all()


def test_own_keys_replace_only_the_querys_own():
    q, visible, position, keys = world()
    own = Keys(keys.window * 2, keys.entries * 2)
    plain = attend(q, visible, position, keys, SINK, W, RATIO).mass
    mixed = attend(q, visible, position, keys, SINK, W, RATIO, own).mass
    for p in (12, 15):  # 15 completes entry 3
        table = Keys(keys.window.clone(), keys.entries.clone())
        table.window[0, p] *= 2
        if (p + 1) % RATIO == 0:
            table.entries[0, (p + 1) // RATIO - 1] *= 2
        want = attend(q[:, p : p + 1], visible[:, p : p + 1], position[:, p : p + 1], table, SINK, W, RATIO).mass
        for part in plain:
            assert torch.allclose(mixed[part][:, p], want[part][:, 0], atol=1e-12)
    assert not torch.allclose(mixed["window"], plain["window"])


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4, math.inf])
def test_extreme_sinks_leave_numbers(sink):
    q, visible, position, keys = world()
    found = attend(q, visible, position, keys, torch.full((H,), sink), W, RATIO)
    assert found.out.isfinite().all()
    assert torch.allclose(found.mass["sink"], torch.full_like(found.mass["sink"], float(sink > 0)))


def test_pads_are_not_stored():
    keys = stored_keys(torch.ones(1, 3, 2), torch.tensor([[0, 1, -1]]), None, 0, 4)
    assert keys.window[0, :2].eq(1).all()
    assert keys.window[0, 2:].isnan().all()


def test_the_sum_of_weights_is_read_off_the_output():
    q, visible, position, keys = world()
    found = attend(q, visible, position, keys, SINK, W, RATIO)
    share = found.mass["sink"]
    assert torch.allclose(weight_sum(found.out, found.out, share), 1 - share)
    assert torch.allclose(weight_sum(0.9 * found.out, found.out, share), 0.9 * (1 - share))


@pytest.mark.parametrize("segments", [1, 2, 7])
def test_segments_merge_to_one_softmax_and_a_sink_per_segment_does_not(segments):
    g = torch.Generator().manual_seed(1)
    q, kv, sink = torch.randn(3, 2, D, generator=g), torch.randn(30, D, generator=g), torch.tensor([1.0, 4.0])
    whole = combine_segments(q, kv, sink, 1)
    assert torch.allclose(combine_segments(q, kv, sink, segments), whole, atol=1e-12)
    distance = merge_distances(whole.float(), q, kv, sink, segments)
    assert distance["production_to_global"] < 1e-6
    if segments > 1:
        wrong = combine_segments(q, kv, sink, segments, True)
        assert merge_distances(wrong.float(), q, kv, sink, segments)["production_uses"] == "the sink once per segment"  # B086
