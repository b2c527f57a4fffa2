"""Plain softmax attention over the keys a model says it read: a third witness beside both models, and where the mass went.

    keys = stored_keys(...)                     what was stored, by position and by entry number
    attend(q, visible, position, keys, sink)    FP64 softmax over those keys, the sink in the denominator once

Everything comes from recorded values (attn.q, attn.kv, attn.compressor, attn.visible); no model is named here and no code is
shared with either. Axes: reference/points.py. Tests: parity/unit/test_attention_witness.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ELEMENTS = 1 << 22  # scores made at a time
PARTS = ("window", "entries", "raw", "pooled", "sink")


@dataclass(frozen=True)
class Keys:
    """What a run stored. NaN: nobody stored it.

    window   [b, positions, d], by absolute position
    entries  [b, entries, d], by entry number
    """

    window: Tensor
    entries: Tensor


@dataclass(frozen=True)
class Attended:
    """Plain attention of every query.

    out        [b, s, h, d], before the inverse rotation
    mass       part -> [b, s, h] share of the softmax: `window` and `entries` keys, `sink`; of these, `raw`: window tokens
               that an entry of the same query stands for too; `pooled`: those entries
    unstored   [b, s] keys a query read that nobody stored
    """

    out: Tensor
    mass: dict[str, Tensor]
    unstored: Tensor


def stored_keys(kv: Tensor, position: Tensor, compressor: Tensor | None, ratio: int, size: int) -> Keys:
    """Tables from shown rows: kv [b, s, d] at position [b, s], -1 = no token; compressor [b, s, d] at the completing query."""
    window = _scatter(kv, position, size)
    if compressor is None or not ratio:
        return Keys(window, window[:, :0])
    completes = (position >= 0) & ((position + 1) % ratio == 0)
    return Keys(window, _scatter(compressor, torch.where(completes, (position + 1) // ratio - 1, -1), size // ratio + 1))


def _scatter(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """rows [b, s, d] to index [b, s] of a NaN table [b, size, d]; -1 is left out."""
    table = torch.full((rows.shape[0], size + 1, rows.shape[-1]), torch.nan, dtype=rows.dtype)
    where = torch.where(index < 0, size, index)
    return table.scatter(1, where[..., None].expand(rows.shape), rows)[:, :size]


def attend(
    q: Tensor,
    visible: Tensor,
    position: Tensor,
    keys: Keys,
    sink: Tensor,
    window: int,
    ratio: int,
    own: Keys | None = None,
    dtype: torch.dtype = torch.float64,
    round_score: Callable[[Tensor], Tensor] | None = None,
    round_weight: Callable[[Tensor], Tensor] | None = None,
) -> Attended:
    """softmax(d^-0.5 q k) v over the visible keys, k = v, with exp(sink) in the denominator only. A key read twice counts twice.

    q [b, s, h, d], visible [b, s, W + entries] (-1 = none), position [b, s], sink [h]
    own   tables that replace the query's own position and the entry that it completes: a step run on a transplanted state.
          Then only the masses are made, `out` is empty
    round_score, round_weight   how a model rounds q . k and the score, and the weights that it weighs keys with; masses are of unrounded weights
    """
    table = torch.cat((keys.window, keys.entries), 1)  # [b, n, d]: positions, then entries
    absent = table.isnan().any(-1)  # [b, n]
    table = table.masked_fill(absent[..., None], 0.0).to(dtype)
    step = max(1, ELEMENTS // (table.shape[0] * table.shape[1] * q.shape[2]))
    parts = []
    for t in range(0, q.shape[1], step):
        here = slice(t, t + step)
        mine = None if own is None else _own_rows(own, position[:, here], ratio)
        parts.append(
            _attend(q[:, here], visible[:, here], position[:, here], table, absent, keys.window.shape[1], sink, window, ratio, mine, round_score, round_weight)
        )
    mass = {name: torch.cat([part.mass[name] for part in parts], 1) for name in PARTS}
    return Attended(torch.cat([p.out for p in parts], 1), mass, torch.cat([p.unstored for p in parts], 1))


def _own_rows(own: Keys, position: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """A query's own window row and the entry that it completes [b, s, d]; NaN: none."""
    rows = [_pick(own.window, position)]
    entry = torch.where((position >= 0) & ((position + 1) % ratio == 0), (position + 1) // ratio - 1, -1) if ratio else position
    rows.append(_pick(own.entries, entry) if ratio else torch.full_like(rows[0], torch.nan))
    return rows[0], rows[1]


def _pick(table: Tensor, index: Tensor) -> Tensor:
    """Rows [b, s, d] of table [b, n, d]; NaN where the index [b, s] is none of the table."""
    inside = (index >= 0) & (index < table.shape[1])
    at = index.masked_fill(~inside, 0)[..., None].expand(-1, -1, table.shape[-1])
    return table.gather(1, at).masked_fill(~inside[..., None], torch.nan)


def _attend(
    q: Tensor, visible: Tensor, position: Tensor, table: Tensor, absent: Tensor, positions: int, sink: Tensor, window: int, ratio: int,
    own: tuple[Tensor, Tensor] | None, round_score: Callable[[Tensor], Tensor] | None = None, round_weight: Callable[[Tensor], Tensor] | None = None,
) -> Attended:  # fmt: skip
    dtype, size = table.dtype, table.shape[1]
    near, lost_near = _counts(visible[..., :window], positions)
    far, lost_far = _counts(visible[..., window:], size - positions)
    count = torch.cat((near, far), -1)  # [b, s, n]: how often each key is read
    score = torch.einsum("bshd,bnd->bshn", q.to(dtype), table)
    unstored = (count > 0) & absent[:, None]
    if own is not None:
        completed = torch.where((position + 1) % ratio == 0, (position + 1) // ratio - 1, -1) if ratio else torch.full_like(position, -1)
        for row, index, first in ((own[0], position, 0), (own[1], completed, positions)):
            there = (index >= 0) & (index + first < size)
            at = (index + first).masked_fill(~there, 0)[..., None]
            value = (q.to(dtype) * row[:, :, None].to(dtype)).sum(-1)  # [b, s, h]
            column = at[:, :, None].expand(-1, -1, q.shape[2], -1)
            score.scatter_(-1, column, torch.where(there[:, :, None], value, score.gather(-1, column)[..., 0])[..., None])
            missing = torch.where(there[..., None], row.isnan().any(-1, keepdim=True), unstored.gather(-1, at))
            unstored = unstored.scatter(-1, at, missing & (count.gather(-1, at) > 0))
    count = count.masked_fill(unstored, 0.0)
    if round_score is not None:
        score = round_score(round_score(score) * q.shape[-1] ** -0.5)
    else:
        score = score * q.shape[-1] ** -0.5
    score = score.masked_fill(count[:, :, None] == 0, -torch.inf)
    logit = sink.to(dtype).expand(score.shape[:-1])  # the sink is one more logit
    largest = torch.maximum(score.amax(-1), logit)
    p = torch.where(score == largest[..., None], 1.0, torch.exp(score - largest[..., None])) * count[:, :, None].to(dtype)
    alone = torch.where(logit == largest, 1.0, torch.exp(logit - largest))
    total = p.sum(-1) + alone
    p = p / total[..., None]
    raw, pooled = _overlap(near > 0, far > 0, ratio)
    mass = {
        "window": p[..., :positions].sum(-1),
        "entries": p[..., positions:].sum(-1),
        "raw": (p[..., :positions] * raw[:, :, None]).sum(-1),
        "pooled": (p[..., positions:] * pooled[:, :, None]).sum(-1),
        "sink": alone / total,
    }
    out = torch.einsum("bshn,bnd->bshd", p if round_weight is None else round_weight(p), table) if own is None else q[:, :, :, :0]
    return Attended(out, mass, unstored.sum(-1) + lost_near + lost_far)


def _counts(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """How often each number 0 .. size - 1 stands in index [b, s, k]: [b, s, size]; and how many are in no table [b, s]."""
    used = index != -1
    inside = (index >= 0) & (index < size)
    held = torch.zeros(*index.shape[:-1], size + 1)
    held.scatter_add_(-1, torch.where(inside, index, size), torch.ones(index.shape))
    return held[..., :size], (used & ~inside).sum(-1)


def _overlap(near: Tensor, far: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Read positions [b, s, positions] whose entry is read too, and read entries of which a position is read too."""
    if not ratio or not far.shape[-1]:
        return torch.zeros_like(near), torch.zeros_like(far)
    group = (torch.arange(near.shape[-1]) // ratio).clamp(max=far.shape[-1])
    padded = torch.nn.functional.pad(far, (0, 1), value=False)
    windowed = torch.zeros(padded.shape).index_add(-1, group, near.float())[..., :-1] > 0
    return near & padded[..., group], far & windowed


def weight_sum(core: Tensor, plain: Tensor, sink_share: Tensor) -> Tensor:
    """[b, s, h]: what the weights behind `core` sum to, from its length along plain attention.

    core, plain [b, s, h, d]; plain and sink_share from `attend`: their own sum is 1 - sink_share.
    """
    core, plain = core.double(), plain.double()
    along, size = (core * plain).sum(-1), plain.square().sum(-1)
    scale = torch.where(size > 0, along / size.clamp(min=torch.finfo(torch.float64).tiny), torch.nan)
    return scale * (1 - sink_share.double())


# ---- one softmax, or one per segment ----


def combine_segments(q: Tensor, keys: Tensor, sink: Tensor, segments: int, per_segment: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    """Attention over keys [n, d] cut into equal segments, each its own softmax, merged by their sums: q [t, h, d] -> [t, h, d].

    per_segment   the sink counted in every segment (wrong: it is one logit); else once, by the merge
    """
    kv = keys.to(dtype)
    score = torch.einsum("thd,nd->thn", q.to(dtype), kv) * q.shape[-1] ** -0.5
    logit = sink.to(dtype).expand(score.shape[:-1])
    parts, values = score.tensor_split(segments, -1), kv.tensor_split(segments, 0)
    largest = torch.stack([part.amax(-1) for part in parts])  # [segments, t, h]
    sums = torch.stack([torch.exp(part - m[..., None]).sum(-1) for part, m in zip(parts, largest, strict=True)])
    outs = torch.stack([torch.einsum("thn,nd->thd", torch.exp(p - m[..., None]), v) for p, m, v in zip(parts, largest, values, strict=True)])
    top = torch.maximum(largest.amax(0), logit)
    share = torch.where(largest == top, 1.0, torch.exp(largest - top))
    own = torch.where(logit == top, 1.0, torch.exp(logit - top)) * (segments if per_segment else 1)
    return (outs * share[..., None]).sum(0) / ((sums * share).sum(0) + own)[..., None]


def merge_distances(got: Tensor, q: Tensor, keys: Tensor, sink: Tensor, segments: int) -> dict[str, Any]:
    """Worst row rel-L2 between one softmax, a merge of `segments`, a sink per segment, and what was observed [t, h, d]."""
    whole = combine_segments(q, keys, sink, 1)
    ways = {
        "production_to_global": (got.double(), whole),
        "production_to_sink_per_segment": (got.double(), combine_segments(q, keys, sink, segments, True)),
        "merge_to_global_fp32": (combine_segments(q, keys, sink, segments, dtype=torch.float32).double(), whole),
        "sink_per_segment_to_global": (combine_segments(q, keys, sink, segments, True), whole),
    }
    out: dict[str, Any] = {name: float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) for name, (a, b) in ways.items()}
    nearer = out["production_to_global"] <= out["production_to_sink_per_segment"]
    once = "one softmax" if segments == 1 else "per segment, merged, the sink once"
    out["production_uses"] = once if nearer else "the sink once per segment"
    return out
