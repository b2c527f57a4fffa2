"""The model's operations as pure functions: norms, rotation, pooling, indexer, attention, mHC, routing.

FP32 in, FP32 out (FP64 works too); no rounding but the optional one of softmax weights, no state, nothing in place.
`Sums` decides in which order a sum is evaluated: 0 is plain torch, 1..3 are the reordered twins whose distance from 0
is what the order of an FP32 sum is worth. Axes: b s h d r k n D as in reference/points.py.

Tests: parity/unit/test_reference.py; each kernel is judged against the function of its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.config import InputError

# ---- sums, in one of four orders ----

PARTS = {1: 4, 2: 5, 3: 6}  # what a longer sum is cut into, by order


@dataclass(frozen=True)
class Sums:
    """How sums and contractions are evaluated.

    order   0: by torch. 1: quarters, added from the last to the first. 2: fifths, added in a seeded permutation.
            3: sixths, added pairwise. Up to 8 terms every part is one term.
    """

    order: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or self.order not in (0, 1, 2, 3):
            raise InputError(f"sum_order={self.order!r}: expected 0, 1, 2 or 3")

    def sizes(self, size: int) -> list[int]:
        """Lengths of the parts that `size` terms are cut into."""
        parts = size if size <= 8 else PARTS[self.order]
        return [size * (i + 1) // parts - size * i // parts for i in range(parts)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Add the partial sums in the twin's order."""
        if self.order == 3:
            while len(parts) > 1:
                pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
                parts = [*pairs, *parts[len(pairs) * 2 :]]
            return parts[0]
        order = list(range(len(parts)))[::-1]
        if self.order == 2:
            order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(len(parts))).tolist()
        total = parts[order[0]]
        for i in order[1:]:
            total = total + parts[i]
        return total

    def sum(self, x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        """Sum over one axis."""
        size = x.shape[dim]
        if self.order == 0 or size < 2:
            return x.sum(dim, keepdim=keepdim)
        if size <= 8:
            total = self.join(x.unbind(dim))
            return total.unsqueeze(dim) if keepdim else total
        return self.join([part.sum(dim, keepdim=keepdim) for part in x.split(self.sizes(size), dim)])

    def einsum(self, equation: str, a: Tensor, b: Tensor) -> Tensor:
        """torch.einsum of two operands with exactly one contracted letter."""
        inputs, out = equation.split("->")
        letters_a, letters_b = inputs.split(",")
        (letter,) = (set(letters_a) & set(letters_b)) - set(out)
        axis_a, axis_b = letters_a.index(letter), letters_b.index(letter)
        if self.order == 0 or a.shape[axis_a] < 2:
            return torch.einsum(equation, a, b)
        sizes = self.sizes(a.shape[axis_a])
        parts = zip(a.split(sizes, axis_a), b.split(sizes, axis_b), strict=True)
        return self.join([torch.einsum(equation, x, y) for x, y in parts])

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in], weight [out, in] -> [..., out]."""
        if self.order == 0 or x.shape[-1] < 2:
            return torch.nn.functional.linear(x, weight)
        sizes = self.sizes(x.shape[-1])
        parts = zip(x.split(sizes, -1), weight.split(sizes, -1), strict=True)
        return self.join([torch.nn.functional.linear(a, w) for a, w in parts])

    def softmax(self, x: Tensor, dim: int) -> Tensor:
        """Softmax over one axis; at least one element of every row must be finite."""
        p = torch.exp(x - x.amax(dim, keepdim=True))
        return p / self.sum(p, dim, keepdim=True)


PLAIN = Sums()

# ---- norms and rotation ----


Rounding = Callable[[Tensor], Tensor]


def unrounded(x: Tensor) -> Tensor:
    """The rounding of a value that a policy does not round."""
    return x


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, sums: Sums = PLAIN, round_factor: Rounding = unrounded) -> Tensor:
    """weight * x * rsqrt(mean(x^2) + eps) over the last axis; weight None is 1. `round_factor` acts on the rsqrt."""
    y = x * round_factor(torch.rsqrt(sums.sum(x * x, -1, keepdim=True) / x.shape[-1] + eps))
    return y if weight is None else weight * y


def rope_frequencies(rotary_dims: int, theta: float) -> Tensor:
    """inv_freq[i] = theta^(-2i/r), i < r/2; fp32."""
    exponent = torch.arange(0, rotary_dims, 2, dtype=torch.float32) / rotary_dims
    inv_freq: Tensor = 1.0 / theta**exponent
    return inv_freq


def yarn_frequencies(
    rotary_dims: int, theta: float, factor: float, original_max: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """YaRN: low frequencies divided by `factor`, high ones kept, a ramp between. No amplitude factor; fp32 [r/2]."""

    def dim(rotations: float) -> float:  # the dimension that turns `rotations` times within the original context
        return rotary_dims * math.log(original_max / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = float(max(math.floor(dim(beta_fast)), 0))
    high = float(min(math.ceil(dim(beta_slow)), rotary_dims - 1))
    if low == high:
        high += 0.001
    inv_freq = rope_frequencies(rotary_dims, theta)
    ramp = ((torch.arange(rotary_dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp)


def rope_angles(position: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, all in fp32: position [...] int -> two of [..., r/2]."""
    angle = position.float()[..., None] * inv_freq
    return angle.cos(), angle.sin()


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate adjacent pairs of the LAST r dims of x by the angle, or back.

    x         [..., d]    the first d - r dims pass through
    cos, sin  [..., r/2]  broadcast against x's other axes
    """
    r = 2 * cos.shape[-1]
    sin = -sin if inverse else sin
    x0, x1 = x[..., -r::2], x[..., -r + 1 :: 2]  # [..., r/2]
    turned = torch.stack((x0 * cos - x1 * sin, x0 * sin + x1 * cos), -1).flatten(-2)
    return torch.cat((x[..., :-r], turned), -1)


def hadamard(x: Tensor, sums: Sums = PLAIN) -> Tensor:
    """x times H / sqrt(n) over the last axis, H[i, j] = (-1)^popcount(i & j), n a power of two."""
    n = x.shape[-1]
    H = torch.ones(1, 1, dtype=x.dtype)
    while H.shape[0] < n:
        H = torch.cat((torch.cat((H, H), 1), torch.cat((H, -H), 1)), 0)
    scale: float = n**-0.5
    return sums.linear(x, H) * scale  # H is symmetric


# ---- manifold-constrained hyper-connections ----


def sinkhorn(logits: Tensor, iters: int, eps: float, sums: Sums = PLAIN) -> Tensor:
    """Logits [..., n, n] -> mixing matrix: softmax over the last axis, then columns and rows normalised in turn.

    The columns (axis -2) come first and last: they end within rounding of 1, the rows only as near as `iters` brings them.
    """
    comb = sums.softmax(logits, -1) + eps
    comb = comb / (sums.sum(comb, -2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (sums.sum(comb, -1, keepdim=True) + eps)
        comb = comb / (sums.sum(comb, -2, keepdim=True) + eps)
    return comb


def hc_mix(X: Tensor, fn: Tensor, norm_eps: float, sums: Sums = PLAIN) -> Tensor:
    """fn @ flat * rsqrt(mean(flat^2) + eps): X [..., n, D], fn [m, n*D] -> [..., m]."""
    flat = X.flatten(-2)
    return sums.linear(flat, fn) * torch.rsqrt(sums.sum(flat * flat, -1, keepdim=True) / flat.shape[-1] + norm_eps)


def hc_pre(
    X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, hc_eps: float, norm_eps: float, sums: Sums = PLAIN
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The block's input and the three mixings of its residual streams.

    X [..., n, D], fn [(2+n)*n, n*D], base [(2+n)*n], scale [3]
    -> a [..., D], pre [..., n] in (0, 1 + eps), post [..., n] in (0, 2), comb [..., n, n] with columns summing to 1
    """
    n = X.shape[-2]
    m = hc_mix(X, fn, norm_eps, sums)
    pre = torch.sigmoid(m[..., :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(m[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = sinkhorn((m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), iters, hc_eps, sums)
    return sums.sum(pre[..., None] * X, -2), pre, post, comb


def hc_post(
    y: Tensor, X: Tensor, post: Tensor, comb: Tensor, sums: Sums = PLAIN, round_post: Rounding = unrounded, round_comb: Rounding = unrounded
) -> Tensor:
    """X'[j] = post[j] * y + sum_i comb[i, j] * X[i]. NOTE: the first axis of comb is the source.

    `round_post`, `round_comb` act on the weights and on their terms of the sum.
    """
    mixed = sums.sum(round_comb(comb)[..., None] * X[..., :, None, :], -3)  # [..., i, j, D] summed over i
    return round_post(round_post(post)[..., None] * y[..., None, :]) + round_comb(mixed)


def hc_head(
    X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, norm_eps: float, sums: Sums = PLAIN
) -> Tensor:
    """Streams mixed by pre weights only: X [..., n, D], fn [n, n*D], base [n], scale [1] -> [..., D]."""
    pre = torch.sigmoid(hc_mix(X, fn, norm_eps, sums) * scale[0] + base) + hc_eps
    return sums.sum(pre[..., None] * X, -2)


# ---- compressed entries and the indexer ----


def complete_entries(position: Tensor, ratio: int) -> Tensor:
    """How many compressed entries a query at `position` may see: those whose group is complete, its own included."""
    return (position + 1) // ratio


def pool(kv: Tensor, gate: Tensor, sums: Sums = PLAIN, round_p: Rounding = unrounded) -> Tensor:
    """sum_t softmax_t(gate) * kv per channel: kv, gate [..., t, d'] -> [..., d']. A gate of -inf takes no part.

    `round_p` acts on the softmax weights and on the terms of the sum.
    """
    return sums.sum(round_p(round_p(sums.softmax(gate, -2)) * kv), -2)


def indexer_score(q: Tensor, keys: Tensor, weights: Tensor, complete: Tensor, sums: Sums = PLAIN) -> Tensor:
    """sum_h weights[h] * relu(q[h] . key_e), -inf where e >= complete.

    q [b, s, h, d], keys [b, e, d] or [b, s, e, d], weights [b, s, h], complete [b, s] int -> [b, s, e]
    """
    dots = sums.einsum("bshd,bed->bshe" if keys.dim() == 3 else "bshd,bsed->bshe", q, keys)
    score = sums.sum(weights[..., None] * dots.relu(), 2)
    entry = torch.arange(keys.shape[-2])
    return score.masked_fill(entry >= complete[..., None], -torch.inf)


def top_entries(score: Tensor, k: int) -> Tensor:
    """The k best entries of each query, ascending, -1 last; ties: the lower entry first. [..., e] -> [..., min(k, e)]."""
    best, entry = score.sort(dim=-1, descending=True, stable=True)
    entry = entry[..., :k].masked_fill(best[..., :k] == -torch.inf, score.shape[-1])
    entry = entry.sort(-1).values
    return entry.masked_fill(entry == score.shape[-1], -1)


# ---- attention ----


def sparse_attention(
    q: Tensor,
    keys: Tensor,
    valid: Tensor,
    sink: Tensor,
    sums: Sums = PLAIN,
    round_p: Rounding = unrounded,
    round_score: Rounding = unrounded,
    round_weight: Rounding | None = None,
) -> Tensor:
    """Softmax attention of each query over its own keys, which are its values too; one more logit in the denominator.

    q [b, s, h, d], keys [b, s, v, d], valid [b, s, v] bool, sink [h] -> [b, s, h, d]; scale d^-0.5
    Every query needs a valid key. sink -inf is a plain softmax, +inf gives 0. `round_p` acts on exp(score - max), `round_score` on
    q . k and on the score, `round_weight` on the weights, which are divided before they weigh the values.
    """
    keys = keys.masked_fill(~valid[..., None], 0.0)
    score = round_score(round_score(sums.einsum("bshd,bsvd->bshv", q, keys)) * q.shape[-1] ** -0.5)
    score = score.masked_fill(~valid[:, :, None], -torch.inf)
    largest = score.amax(-1)  # [b, s, h]
    largest = torch.where(sink == torch.inf, largest, torch.maximum(largest, sink))
    p = torch.exp(score - largest[..., None])
    denominator = sums.sum(p, -1) + torch.exp(sink - largest)
    if round_weight is not None:
        return sums.einsum("bshv,bsvd->bshd", round_weight(p / denominator[..., None]), keys)
    return sums.einsum("bshv,bsvd->bshd", round_p(p), keys) / denominator[..., None]


# ---- experts ----


def swiglu(gate: Tensor, up: Tensor, limit: float, round_hidden: Rounding = unrounded) -> Tensor:
    """silu(min(gate, L)) * clamp(up, -L, L). `round_hidden` acts on silu and on the product."""
    return round_hidden(round_hidden(torch.nn.functional.silu(gate.clamp_max(limit))) * up.clamp(-limit, limit))


def gate_scores(logits: Tensor, scoring: str, sums: Sums = PLAIN, round_gate: Rounding = unrounded) -> Tensor:
    """Router logits [..., experts] -> scores; scoring "sqrtsoftplus", "sigmoid" or "softmax". `round_gate` acts on every step."""
    logits = round_gate(logits)
    if scoring == "softmax":
        return round_gate(sums.softmax(logits, -1))
    return round_gate(torch.sigmoid(logits) if scoring == "sigmoid" else round_gate(torch.nn.functional.softplus(logits)).sqrt())


def gate_choose(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """The k experts of the largest scores + bias, ids ascending; ties: the lower id first."""
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(-1).values


def gate_weights(
    scores: Tensor, experts: Tensor, normalise: bool, route_scale: float, sums: Sums = PLAIN, round_gate: Rounding = unrounded
) -> Tensor:
    """Unbiased scores of the chosen experts, divided by their sum (not for softmax), times the route scale."""
    weights = scores.gather(-1, experts)
    if normalise:
        weights = round_gate(weights / round_gate(sums.sum(weights, -1, keepdim=True)))
    return round_gate(weights * route_scale)
