"""Recall of a top-k selection: which entries were chosen, against the ones that an oracle's scores call the best.

    case = make_case("real", material, entries=16384, k=1024, queries=4, seed=0)
    stored = same_format(case, inv_freq)
    scores = oracle(case, inv_freq, stored)           # the same formats, sums in fp64; with None nothing is rounded
    recall(selected, scores, k, score_noise(case, stored, scores))

A key set is real keys resampled with jitter (plain resampling would make exact ties), or one made to hurt. Two oracles: the
same formats with fp64 sums, and nothing rounded at all. Differences within the measured score noise are near-ties, apart.
No model is named here. Tests: parity/unit/test_recall.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from reference.formats import round_bf16, round_e2m1_blocks

RATIO = 4  # tokens of an entry in the layers that have an indexer
JITTER = 0.25  # of a key's root mean square: far more than a step of its format
BLOCK = 16_384  # entries scored at a time
INF = math.inf
EPS = 2.0**-24  # of one rounding to FP32


# ---- what is scored ----


@dataclass(frozen=True)
class Material:
    """Queries and keys of one layer, neither rotated nor rounded.

    q [m, hi, di], weights [m, hi], keys [n, di], fp32; source  where they come from, for people
    """

    q: Tensor
    weights: Tensor
    keys: Tensor
    source: str


@dataclass(frozen=True)
class Case:
    """One key set and its queries.

    q [T, hi, di], weights [T, hi], keys [E, di]  fp32, before rotation and rounding
    position [T]      of the queries: entries e < (position + 1) // 4 are complete
    q_angle [T], key_angle [E]   positions they are rotated at: 0 where a rotation would spoil exact ties
    """

    kind: str
    source: str
    q: Tensor
    weights: Tensor
    keys: Tensor
    position: Tensor
    q_angle: Tensor
    key_angle: Tensor
    k: int

    @property
    def complete(self) -> Tensor:
        """[T] entries that a query may see."""
        return ((self.position + 1) // RATIO).clamp_max(len(self.keys))

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.source}, {len(self.keys)} keys, k={self.k}"


def random_material(heads: int, dim: int, seed: int, rows: int = 64) -> Material:
    """Normal values, for a model without an indexer layer and for other head counts than a checkpoint has."""
    generator = torch.Generator().manual_seed(seed)
    q, weights = torch.randn(rows, heads, dim, generator=generator), torch.randn(rows, heads, generator=generator)
    return Material(q, weights * float(dim * heads) ** -0.5, torch.randn(rows, dim, generator=generator), f"random {heads} x {dim}")


def material_of(
    q: Tensor, weights: Tensor, keys: Tensor, position: Tensor, valid: Tensor | None, inv_freq: Tensor, source: str
) -> Material:
    """From what a model without rounding showed: `attn.indexer.q`, `.weights`, `.compressor` of a prefill.

    q [b, s, hi, di] and keys [b, s, di] (NaN where no group ended) are rotated and Hadamard-transformed; both are taken back.
    """
    use = torch.ones(position.shape, dtype=torch.bool) if valid is None else valid
    ended = use & ~keys.isnan().any(-1)
    back_q = rotate(hadamard(q[use].double()), position[use], inv_freq, inverse=True)
    back_keys = rotate(hadamard(keys[ended].double()), position[ended] // RATIO * RATIO, inv_freq, inverse=True)
    return Material(back_q.float(), weights[use].float(), back_keys.float(), source)


# Key sets made to hurt. Each takes base keys [E, di] (resampled with jitter) and a generator.
def _clustered(base: Tensor, generator: torch.Generator) -> Tensor:
    """Copies of one key, a few dims of each nudged: scores stand close together, many are tied."""
    nudged = torch.rand(base.shape, generator=generator) < 4 / base.shape[1]
    return torch.where(nudged, base[:1] * (1 + 0.5 * torch.randn(base.shape, generator=generator)), base[:1])


def _ties(base: Tensor, generator: torch.Generator) -> Tensor:
    """Plain resampling of few keys: every score stands there hundreds of times."""
    return base[torch.randint(0, 37, (len(base),), generator=generator) % len(base)]


def _giant(base: Tensor, generator: torch.Generator) -> Tensor:
    """One key ten thousand times as long as the others: a scale shared between keys would drown them."""
    keys = base.clone()
    keys[len(base) // 3] *= 1e4
    return keys


def _equal(base: Tensor, generator: torch.Generator) -> Tensor:
    return base[:1].expand_as(base).clone()


def _descending(base: Tensor, generator: torch.Generator) -> Tensor:
    """Runs of one direction, each shrinking to a fiftieth: what is left to sort is already sorted, the wrong way."""
    run = min(1000, len(base))
    size: Tensor = 1 - 0.98 * (torch.arange(len(base)) % run) / run
    keys: Tensor = base[:1] * size[:, None]
    return keys


def _zero(base: Tensor, generator: torch.Generator) -> Tensor:
    """Nine keys of ten are zero or too small for the format: their scores are exactly 0, others are negative."""
    kept = torch.rand(len(base), generator=generator) < 0.1
    tiny = torch.where(torch.rand(len(base), generator=generator) < 0.5, 0.0, 1e-38)
    size: Tensor = torch.where(kept, 1.0, tiny)
    return base * size[:, None]


ADVERSARIAL: dict[str, tuple[bool, Callable[[Tensor, torch.Generator], Tensor]]] = {
    "clustered": (False, _clustered),
    "ties": (False, _ties),
    "one giant key": (True, _giant),
    "all equal": (False, _equal),
    "descending runs": (False, _descending),
    "zero keys": (True, _zero),
}
KINDS = ("real", *ADVERSARIAL)


def make_case(kind: str, material: Material, entries: int, k: int, queries: int, seed: int = 0) -> Case:
    """A key set of `entries` keys. Queries stand alternately at its end and inside it, where later keys must not be seen."""
    generator = torch.Generator().manual_seed(seed)
    base = material.keys[torch.randint(0, len(material.keys), (entries,), generator=generator)].float()
    size = base.square().mean(-1, keepdim=True).sqrt()
    base = base + JITTER * size * torch.randn(base.shape, generator=generator)
    rotated, make = (True, None) if kind == "real" else ADVERSARIAL[kind]
    keys = base if make is None else make(base, generator)
    at = torch.linspace(len(material.q) - 1, len(material.q) // 2, queries).round().long()  # of the later half of the text
    inside = (entries * 5 // 8) * RATIO + 1
    position = torch.tensor([entries * RATIO - 1 if t % 2 == 0 else inside for t in range(queries)])
    entry = torch.arange(entries) * RATIO
    return Case(
        kind, material.source, material.q[at].float(), material.weights[at].float(), keys, position,
        position if rotated else torch.zeros_like(position), entry if rotated else torch.zeros_like(entry), k,
    )  # fmt: skip


# ---- oracles ----


def hadamard(x: Tensor) -> Tensor:
    """x H / sqrt(n) over the last axis, H[i, j] = (-1)^popcount(i & j); its own inverse."""
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"{n} columns, expected a power of two")
    rows, apart = x.reshape(-1, n), 1
    while apart < n:
        a, b = rows.view(-1, n // (2 * apart), 2, apart).unbind(2)
        rows, apart = torch.stack((a + b, a - b), 2).view(-1, n), 2 * apart
    scaled: Tensor = rows * float(n) ** -0.5
    return scaled.view(x.shape)


def rotate(x: Tensor, position: Tensor, inv_freq: Tensor, inverse: bool = False) -> Tensor:
    """The last 2 * len(inv_freq) dims of x [rows, ..., di] turned by position [rows] * inv_freq, adjacent pairs; fp32 angles."""
    angle = position.float()[:, None] * inv_freq.float()
    cos, sin = (f(angle.double()).to(x.dtype).view(len(x), *[1] * (x.dim() - 2), angle.shape[1]) for f in (torch.cos, torch.sin))
    if inverse:
        sin = -sin
    still, turned = x[..., : -2 * angle.shape[1]], x[..., -2 * angle.shape[1] :]
    a, b = turned[..., 0::2], turned[..., 1::2]
    return torch.cat((still, torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)), -1)


def _rounded(x: Tensor, angle: Tensor, inv_freq: Tensor) -> Tensor:
    """What the model rounds of queries or keys: bf16, rotation, bf16, Hadamard, bf16, e2m1 per 32; fp32."""
    parts = []
    for some, at in zip(x.split(BLOCK), angle.split(BLOCK), strict=True):
        turned = round_bf16(rotate(round_bf16(some), at, inv_freq))
        parts.append(round_e2m1_blocks(round_bf16(hadamard(turned.double()).float())))
    return torch.cat(parts)


def same_format(case: Case, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """q and keys as stored, fp32. Weights stay FP32, as the score kernel takes them: on the bf16 grid most sums would be exact."""
    return _rounded(case.q, case.q_angle, inv_freq), _rounded(case.keys, case.key_angle, inv_freq)


def either_way(x: Tensor, angle: Tensor, inv_freq: Tensor, meant: Tensor, made: Tensor) -> Tensor:
    """`meant` (what _rounded makes of x), with those values of `made` instead that FP32 sums may as well come to.

    A rounding is the last of a chain: an ulp of a cosine moves a bf16 value that lies at a tie, and that one an e2m1 value. What
    the rotation and the Hadamard sums may be off by in FP32 is carried through; a value beyond its two ends stays as it was meant.
    """
    found = meant.clone()
    for rows in (made != meant).flatten(1).any(1).nonzero()[:, 0].split(BLOCK):
        low, high = _either_end(x[rows], angle[rows], inv_freq)
        excused = (made[rows] >= low) & (made[rows] <= high)
        found[rows] = torch.where(excused, made[rows], meant[rows])
    return found


def _either_end(x: Tensor, angle: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value that _rounded may come to where it is computed in FP32."""
    some = round_bf16(x).double()
    turned, size = rotate(some, angle, inv_freq), some.abs()
    r = 2 * len(inv_freq)
    both = (size[..., -r::2] + size[..., -r + 1 :: 2]).repeat_interleave(2, -1)  # |a| + |b| of every pair
    slack = torch.zeros_like(size)
    slack[..., -r:] = 8 * EPS * both  # cosf and sinf within 2 ulp, products and their sum rounded
    low, high = (round_bf16((turned + sign * slack).float()).double() for sign in (-1, 1))
    nearest = round_bf16(turned.float()).double()
    n = x.shape[-1]
    # Any of the bf16 steps, and FP32 sums of n terms in whatever order.
    slack = ((high - low).sum(-1, keepdim=True) + (math.log2(n) + 1) * EPS * nearest.abs().sum(-1, keepdim=True)) * n**-0.5
    sums = hadamard(nearest)
    ends = [round_e2m1_blocks(round_bf16(torch.copysign((sums.abs() + sign * slack).clamp_min(0), sums).float())) for sign in (-1, 1)]
    return torch.minimum(*ends), torch.maximum(*ends)


def _scores(q: Tensor, weights: Tensor, keys: Iterable[Tensor], halves: bool = False) -> Tensor:
    """sum_h weights[t, h] relu(q[t, h] . key[e]) -> [T, E], in q's type; halves: dims in two parts and heads backwards."""
    half = q.shape[-1] // 2
    parts = []
    for some in keys:
        some = some.to(q.dtype)
        if halves:
            dots = q[..., half:] @ some[:, half:].T + q[..., :half] @ some[:, :half].T
            parts.append((weights[..., None] * dots.relu()).flip(1).sum(1))
        else:
            parts.append(torch.einsum("th,the->te", weights, (q @ some.T).relu()))
    return torch.cat(parts, 1)


def oracle(case: Case, inv_freq: Tensor, stored: tuple[Tensor, Tensor] | None) -> Tensor:
    """Scores [T, E] fp64, -inf where not complete: of the formats in `stored` (same_format), or with None nothing rounded at
    all, then without the Hadamard step, which cancels."""
    if stored is not None:
        found = _scores(stored[0].double(), case.weights.double(), stored[1].split(BLOCK))
    else:
        blocks = zip(case.keys.split(BLOCK), case.key_angle.split(BLOCK), strict=True)
        q = rotate(case.q.double(), case.q_angle, inv_freq)
        found = _scores(q, case.weights.double(), (rotate(some.double(), at, inv_freq) for some, at in blocks))
    return _hidden(found, case.complete)


def score_noise(case: Case, stored: tuple[Tensor, Tensor], scores: Tensor) -> Tensor:
    """[T, E] fp64: how far FP32 sums in two orders are from the same-format `scores`, in proportion to |q| |key|.

    The proportion is the worst one of the query, so that one giant key excuses nothing about the others.
    """
    q, keys = stored
    size = torch.einsum("th,th->t", case.weights.abs(), q.norm(dim=-1))[:, None].double() * keys.norm(dim=-1).double()
    share = torch.zeros(len(q), 1, dtype=torch.float64)
    seen = scores.isfinite() & (size > 0)
    for halves in (False, True):
        off = (_scores(q, case.weights, keys.split(BLOCK), halves).double() - scores).abs() / size
        share = torch.maximum(share, off.masked_fill(~seen, 0.0).amax(1, keepdim=True))
    noise: Tensor = share * size
    return noise


def _hidden(scores: Tensor, complete: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(scores.shape[1]) >= complete[:, None], -INF)


# ---- recall ----


def best(scores: Tensor, k: int) -> Tensor:
    """bool [T, E]: the k best finite scores of each row, ties to the lower entry."""
    out = torch.zeros(scores.shape, dtype=torch.bool)
    visible = scores > -INF
    due = visible.sum(1).clamp_max(k)
    for t in range(len(scores)):
        n = int(due[t])
        if n:
            least = scores[t].topk(n).values[-1]
            out[t] = scores[t] > least
            tied = ((scores[t] == least) & visible[t]).nonzero()[:, 0]
            out[t, tied[: n - int(out[t].sum())]] = True
    return out


@dataclass(frozen=True)
class Recall:
    """Recall of a selection over queries; the shares are over queries that discard entries, the only ones that can be wrong
    by choice. A query that must take everything is right or counted in `incomplete`.

    queries      that have a complete entry; discarding  more of them than k
    mean, p1, worst   share of the oracle's entries that were chosen; worst_query  its number
    judged_mean, judged_worst   the same, an entry exchanged within the score noise counting as chosen
    near_ties, beyond   exchanged or missing entries within and beyond the noise; largest_gap  score gap of the worst exchange
    not_allowed  chosen entries that are not complete, do not exist or stand there twice
    incomplete   queries that had to take every complete entry and did not
    mass_lost, mass_lost_mean   softmax(score) mass of the oracle's choice less that of the choice: worst and mean
    """

    queries: int = 0
    discarding: int = 0
    mean: float = math.nan
    p1: float = math.nan
    worst: float = math.nan
    worst_query: int = -1
    judged_mean: float = math.nan
    judged_worst: float = math.nan
    near_ties: int = 0
    beyond: int = 0
    largest_gap: float = 0.0
    not_allowed: int = 0
    incomplete: int = 0
    mass_lost: float = 0.0
    mass_lost_mean: float = 0.0

    @property
    def lost(self) -> float:
        """What a gate judges: 1 - the worst row's recall, near-ties chosen. 1 where a choice is not allowed or not complete."""
        if self.not_allowed or self.incomplete:
            return 1.0
        return 1 - self.judged_worst if self.discarding else 0.0

    def values(self) -> dict[str, Any]:
        """For a record."""
        return asdict(self)


def recall(selected: Tensor, scores: Tensor, k: int, noise: Tensor | float) -> Recall:
    """selected [T, K] int, -1 = none; scores [T, E] fp64, the oracle's, -inf where a query may not look.

    noise   of a score: a number, or one per score. An exchange within the noise of both scores is a near-tie.
    """
    selected, scores = selected.detach().cpu().long(), scores.double()
    T, E = scores.shape
    visible = scores > -INF
    seen = visible.sum(1)
    due = seen.clamp_max(k)
    inside = (selected >= 0) & (selected < E)
    count = torch.zeros(T, E + 1, dtype=torch.int64).scatter_add_(1, torch.where(inside, selected, E), inside.long())[:, :E]
    got, want = (count > 0) & visible, best(scores, k)
    not_allowed = int((selected >= E).sum() + (selected < -1).sum() + ((count > 0) & ~visible).sum() + (count - 1).clamp_min(0).sum())
    hits = (got & want).sum(1)
    spread = torch.as_tensor(noise, dtype=torch.float64).expand(T, E)
    near, gap_max = torch.zeros(T, dtype=torch.int64), 0.0
    for t in (hits < due).nonzero()[:, 0].tolist():
        missing, extra = (want[t] & ~got[t]).nonzero()[:, 0], (got[t] & ~want[t]).nonzero()[:, 0]
        missing, extra = (x[scores[t, x].argsort(descending=True)][: len(missing)] for x in (missing, extra))
        gap = torch.full((len(missing),), INF, dtype=torch.float64)
        pairs = len(extra)
        gap[:pairs] = scores[t, missing[:pairs]] - scores[t, extra]
        allowed = torch.zeros_like(gap)
        allowed[:pairs] = spread[t, missing[:pairs]] + spread[t, extra]
        near[t] = (gap <= allowed).sum()
        gap_max = max(gap_max, float(gap.max()))
    choosing, asked = seen > k, seen > 0
    mass = torch.softmax(scores.masked_fill(~visible, -INF), 1).masked_fill(~visible, 0.0)
    lost = ((mass * want).sum(1) - (mass * got).sum(1))[choosing]
    out: dict[str, Any] = {
        "queries": int(asked.sum()), "discarding": int(choosing.sum()), "near_ties": int(near.sum()),
        "beyond": int((due - hits - near)[asked].sum()), "largest_gap": gap_max, "not_allowed": not_allowed,
        "incomplete": int(((hits < due) & asked & ~choosing).sum()),
    }  # fmt: skip
    if not choosing.any():
        return Recall(**out)
    share, judged = hits[choosing] / due[choosing].double(), (hits + near)[choosing] / due[choosing].double()
    return Recall(
        **out, mean=float(share.mean()), p1=float(share.quantile(0.01)), worst=float(share.min()),
        worst_query=int(choosing.nonzero()[int(share.argmin()), 0]), judged_mean=float(judged.mean()), judged_worst=float(judged.min()),
        mass_lost=float(lost.max()), mass_lost_mean=float(lost.mean()),
    )  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """What production made of a case: selected [T, k] int, its own scores [T, E] fp32, -inf where it did not look; and what it
    scored: q [T, hi, di] and keys [E, di] as it rounded and stored them, fp32 values."""

    selected: Tensor
    scores: Tensor
    q: Tensor
    keys: Tensor


def measure_case(case: Case, inv_freq: Tensor, made: Selection) -> tuple[Recall, Recall, dict[str, Any]]:
    """Recall against the same-format oracle and against the exact one, and facts.

    either_way           values of q and keys that production rounded the other way at a tie, as FP32 sums may: the same-format
                         oracle scores production's there. One of q would move all scores of its query
    rounded_otherwise    those that no tie excuses: the oracle scores what is meant
    noise, score_error   largest noise; worst |production's score - the same-format oracle's|
    score_typical        median over entries, worst query, of that error over the query's largest score; noise_typical  the same
                         of the FP32 sums
    own_topk_wrong       entries by which the selection differs from the best of production's own scores
    tied                 neighbours of equal score in the oracle's order
    """
    meant = same_format(case, inv_freq)
    stored = (
        either_way(case.q, case.q_angle, inv_freq, meant[0], made.q), either_way(case.keys, case.key_angle, inv_freq, meant[1], made.keys)
    )  # fmt: skip
    scores = oracle(case, inv_freq, stored)
    noise = score_noise(case, stored, scores)
    same = recall(made.selected, scores, case.k, noise)
    exact = recall(made.selected, oracle(case, inv_freq, None), case.k, 0.0)
    own = _hidden(made.scores.cpu().double(), case.complete)
    visible = scores.isfinite()
    off = (own - scores).abs().masked_fill(~visible, 0.0).nan_to_num(INF)
    chosen = best(own.nan_to_num(-INF, INF, -INF), case.k)
    size = scores.masked_fill(~visible, 0.0).abs().amax(1, keepdim=True).clamp_min(1e-30)
    typical = [float((x / size).masked_fill(~visible, math.nan).nanmedian(1).values.max()) for x in (off, noise)]
    inside = made.selected.cpu().long().clamp(-1, scores.shape[1] - 1)
    got = torch.zeros(len(own), scores.shape[1] + 1, dtype=torch.bool).scatter_(1, inside + 1, True)[:, 1:]
    facts = {
        "either_way": sum(int((a != b).sum()) for a, b in zip(stored, meant, strict=True)),
        "rounded_otherwise": sum(int((a != b).sum()) for a, b in zip(stored, (made.q, made.keys), strict=True)),
        "noise": float(noise.masked_fill(~visible, 0.0).max()), "score_error": float(off.max()), "score_typical": typical[0], "noise_typical": typical[1],
        "own_topk_wrong": int((chosen & ~got).sum()), "tied": int((_hidden(scores, case.complete).sort(1).values.diff(dim=1) == 0).sum()),
    }  # fmt: skip
    return same, exact, facts
