"""The reference's operations against plain formulas in FP64, with inputs that engage every mechanism."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import ops
from reference.config import InputError
from reference.ops import Sums

ORDERS = [0, 1, 2, 3]


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- sums ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 9, 11, 13, 100, 257])
def test_every_order_adds_every_term_once(order: int, size: int) -> None:
    sums = Sums(order)
    x, y = normal(3, size, seed=1), normal(5, size, seed=2)
    whole = torch.arange(size).double() ** 2
    assert float(sums.sum(whole, 0)) == float(whole.sum())  # integers: exact in any order
    torch.testing.assert_close(sums.sum(x.double(), 1, keepdim=True), x.double().sum(1, keepdim=True))
    torch.testing.assert_close(sums.linear(x.double(), y.double()), x.double() @ y.double().T)
    torch.testing.assert_close(sums.einsum("bk,ck->bc", x.double(), y.double()), x.double() @ y.double().T)
    torch.testing.assert_close(sums.softmax(x.double(), -1), x.double().softmax(-1))


def test_orders_really_differ() -> None:
    x = normal(64, 1000, seed=3)
    results = [Sums(order).sum(x, 1) for order in ORDERS]
    short = [Sums(order).sum(x[:, :4].contiguous(), 1) for order in ORDERS]
    for a in range(4):
        for b in range(a):
            assert not torch.equal(results[a], results[b]), (a, b)
    assert len({tuple(s.tolist()) for s in short}) >= 3
    with pytest.raises(InputError, match="sum_order"):
        Sums(4)


# ---- norm, rotation, Hadamard ----


def test_rms_norm_with_and_without_weight() -> None:
    x, w = normal(5, 96, scale=3), normal(96, seed=1)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(ops.rms_norm(x, None, 1e-6).double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-6).double(), expected * w, rtol=1e-6, atol=1e-6)


def test_rope_is_the_complex_rotation_of_adjacent_pairs() -> None:
    x, position = normal(2, 3, 4, 96), torch.tensor([[0, 1, 2], [500, 70000, 3]])
    cos, sin = ops.rope_angles(position, ops.rope_frequencies(32, 10000.0))
    turned = ops.rope(x, cos[:, :, None], sin[:, :, None])
    assert torch.equal(turned[..., :64], x[..., :64])
    pairs = torch.view_as_complex(x[..., 64:].unflatten(-1, (16, 2)).double())
    expected = pairs * torch.complex(cos.double(), sin.double())[:, :, None]
    torch.testing.assert_close(turned[..., 64:].double(), torch.view_as_real(expected).flatten(-2), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ops.rope(turned, cos[:, :, None], sin[:, :, None], inverse=True), x, rtol=1e-5, atol=1e-5)


def test_rotary_frequencies_are_fp32_and_yarn_has_its_published_ramp() -> None:
    plain = ops.rope_frequencies(64, 160000.0)
    yarn = ops.yarn_frequencies(64, 160000.0, 16, 65536, 32, 1)
    assert plain.dtype == yarn.dtype == torch.float32
    for i in range(32):
        assert float(plain[i]) == pytest.approx(160000.0 ** (-2 * i / 64), rel=1e-6)
        ramp = min(max((i - 15) / (25 - 15), 0), 1)
        assert float(yarn[i]) == pytest.approx(float(plain[i]) * (ramp / 16 + 1 - ramp), rel=1e-6)
    cos, _ = ops.rope_angles(torch.tensor([1000003]), plain)
    assert torch.equal(cos[0], (torch.tensor(1000003.0) * plain).cos())


def test_yarn_with_equal_ends_is_a_step() -> None:
    yarn = ops.yarn_frequencies(32, 10000.0, 4, 64, 100, 10.3)  # both ends are 0
    assert bool(yarn.isfinite().all())
    assert float(yarn[0]) == 1.0
    torch.testing.assert_close(yarn[1:], ops.rope_frequencies(32, 10000.0)[1:] / 4)


@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_hadamard_signs_and_orthogonality(n: int) -> None:
    H = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / math.sqrt(n)
    x = normal(7, n)
    torch.testing.assert_close(ops.hadamard(x), x @ H, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ops.hadamard(ops.hadamard(x)), x, rtol=1e-5, atol=1e-6)


# ---- hyper-connections ----


@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("iters", [1, 2, 20])
def test_hc_pre_and_post_against_loops(n: int, iters: int) -> None:
    D, eps = 24, 1e-6
    X, fn = normal(6, n, D, scale=2), normal((2 + n) * n, n * D, seed=1, scale=1 / math.sqrt(n * D))
    base, scale, y = normal((2 + n) * n, seed=2), torch.tensor([0.7, 1.3, 2.0]), normal(6, D, seed=3)
    a, pre, post, comb = ops.hc_pre(X, fn, base, scale, iters, eps, 1e-6)
    mixed = ops.hc_post(y, X, post, comb)
    for t in range(6):
        flat = X[t].flatten().double()
        m = fn.double() @ flat / (flat.square().mean() + 1e-6).sqrt()
        pre_t = torch.sigmoid(m[:n] * 0.7 + base[:n]) + eps
        post_t = 2 * torch.sigmoid(m[n : 2 * n] * 1.3 + base[n : 2 * n])
        c = ((m[2 * n :] * 2.0 + base[2 * n :]).view(n, n)).softmax(-1) + eps
        c = c / (c.sum(0, keepdim=True) + eps)
        for _ in range(iters - 1):
            c = c / (c.sum(1, keepdim=True) + eps)
            c = c / (c.sum(0, keepdim=True) + eps)
        torch.testing.assert_close(pre[t].double(), pre_t, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(post[t].double(), post_t, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(comb[t].double(), c, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a[t].double(), sum(pre_t[i] * X[t, i].double() for i in range(n)), rtol=1e-5, atol=1e-5)
        for j in range(n):
            expected = post_t[j] * y[t].double() + sum(c[i, j] * X[t, i].double() for i in range(n))  # source first
            torch.testing.assert_close(mixed[t, j].double(), expected, rtol=1e-5, atol=1e-5)
    if iters == 20:  # after one iteration a column of small sum S is off by eps / S
        assert float((comb.sum(-2) - 1).abs().max()) <= 3e-6  # columns come last
    assert bool((comb >= 0).all())
    assert bool(((pre > 0) & (pre < 1 + 2 * eps)).all())


# ---- pooling, indexer, top-k ----


def test_pool_ignores_slots_with_a_gate_of_minus_infinity() -> None:
    kv, gate = normal(2, 8, 16), normal(2, 8, 16, seed=1, scale=3)
    gate[:, :4] = -torch.inf
    expected = (gate[:, 4:].softmax(1) * kv[:, 4:]).sum(1)
    for order in ORDERS:
        torch.testing.assert_close(ops.pool(kv, gate, Sums(order)), expected, rtol=1e-5, atol=1e-6)


def test_indexer_score_is_causal_and_clips_each_head() -> None:
    q, keys, weights = normal(2, 3, 4, 32), normal(2, 9, 32, seed=1), normal(2, 3, 4, seed=2)
    complete = torch.tensor([[0, 1, 9], [2, 3, 4]])
    score = ops.indexer_score(q, keys, weights, complete)
    for b, s, e in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(9)).tolist():
        dots = [max(float(q[b, s, h] @ keys[b, e]), 0) for h in range(4)]
        expected = sum(float(weights[b, s, h]) * dots[h] for h in range(4))
        if e >= complete[b, s]:
            assert score[b, s, e] == -torch.inf
        else:
            assert float(score[b, s, e]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -2.0, 3.5, -math.inf]), min_size=0, max_size=12), st.integers(1, 14))
@settings(max_examples=200, deadline=None)
def test_top_entries_breaks_ties_towards_the_lower_entry(scores: list[float], k: int) -> None:
    got = ops.top_entries(torch.tensor([scores]), k)[0].tolist()
    visible = [e for e, score in enumerate(scores) if score > -math.inf]
    chosen = sorted(sorted(visible, key=lambda e: (-scores[e], e))[:k])
    assert got == chosen + [-1] * (min(k, len(scores)) - len(chosen))


# ---- attention ----


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sink", [-math.inf, -1e4, -10.0, 0.0, 10.0, 1e4, math.inf])
def test_sparse_attention_counts_the_sink_once_and_stays_finite(order: int, sink: float) -> None:
    q, keys = normal(1, 2, 3, 96), normal(1, 2, 11, 96, seed=1)
    valid = torch.ones(1, 2, 11, dtype=torch.bool)
    valid[0, 1, 2:] = False
    keys[0, 1, 5] = torch.nan  # not valid: must not be touched
    got = ops.sparse_attention(q, keys, valid, torch.tensor([sink, 0.3, -1.0]), Sums(order))
    assert bool(got.isfinite().all())
    for s, count in ((0, 11), (1, 2)):
        score = (q[0, s].double() @ keys[0, s, :count].double().T) / math.sqrt(96)
        for h, logit in enumerate((sink, 0.3, -1.0)):
            p = torch.cat((score[h], torch.tensor([logit], dtype=torch.float64)))
            p = torch.zeros(count) if logit == math.inf else p.softmax(0)[:count]
            torch.testing.assert_close(got[0, s, h].double(), p.double() @ keys[0, s, :count].double(), rtol=1e-5, atol=1e-6)


def test_rounded_softmax_weights_keep_the_exact_denominator() -> None:
    q, keys, valid = normal(1, 1, 2, 32), normal(1, 1, 5, 32, seed=1), torch.ones(1, 1, 5, dtype=torch.bool)
    got = ops.sparse_attention(q, keys, valid, torch.zeros(2), round_p=lambda p: torch.full_like(p, 0.5))
    score = torch.einsum("bshd,bsvd->bshv", q, keys) / math.sqrt(32)
    largest = score.amax(-1).clamp_min(0)
    denominator = (score - largest[..., None]).exp().sum(-1) + (-largest).exp()
    torch.testing.assert_close(got, 0.5 * keys.sum(2, keepdim=True) / denominator[..., None], rtol=1e-5, atol=1e-6)


# ---- experts ----


def test_swiglu_clamps_gate_above_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([-30.0, 2.0, 11.0, 50.0]), torch.tensor([12.0, -12.0, 3.0, -0.5])
    silu = [g / (1 + math.exp(-g)) for g in (-30.0, 2.0, 10.0, 10.0)]
    expected = [silu[0] * 10, silu[1] * -10, silu[2] * 3, silu[3] * -0.5]
    torch.testing.assert_close(ops.swiglu(gate, up, 10.0), torch.tensor(expected))


def test_router_scores_choice_and_weights() -> None:
    logits = torch.tensor([[-30.0, -1.0, 0.0, 2.0, 30.0]])
    softplus = [math.log1p(math.exp(x)) if x < 20 else x for x in logits[0].tolist()]
    torch.testing.assert_close(ops.gate_scores(logits, "sqrtsoftplus"), torch.tensor([[math.sqrt(x) for x in softplus]]))
    torch.testing.assert_close(ops.gate_scores(logits, "sigmoid"), torch.sigmoid(logits))
    torch.testing.assert_close(ops.gate_scores(logits, "softmax"), logits.softmax(-1))
    scores = torch.tensor([[0.5, 0.5, 0.1, 0.4]])
    assert ops.gate_choose(scores, torch.zeros(4), 1).tolist() == [[0]]  # ties: the lower id
    bias = torch.tensor([0.0, -1.0, 1.0, 0.0])
    experts = ops.gate_choose(scores, bias, 2)
    assert experts.tolist() == [[0, 2]]
    torch.testing.assert_close(ops.gate_weights(scores, experts, True, 1.5), torch.tensor([[1.5 * 5 / 6, 1.5 / 6]]))  # no bias
    torch.testing.assert_close(ops.gate_weights(scores, experts, False, 2.5), torch.tensor([[1.25, 0.25]]))
