"""Measurements of one value: mixing matrices, residual streams, visible keys. Numbers and places, no opinion.

    sinkhorn_measurement(comb, pre, post)            comb [b, s, n, n], pre and post [b, s, n]
    sinkhorn_trail(start, iters, eps)                the same matrix after every half step; nearest_step says which one was used
    residual_measurement(X, before, ...)             X [b, s, n, D]
    visible_measurement(visible, positions, ...)     visible [b, s, W + entries]

`valid` [b, s] leaves out pads. Every result is a plain dict (JSON once non-finite numbers are strings). Used by the probes
and by parity. Tests: parity/unit/test_measure.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CONVERGED = 1e-6  # both sums of a doubly stochastic matrix are this close to 1
RATIOS = (4, 128)  # what layers compress by
FAULTS = ("pad", "ratio", "edge", "future", "unfinished", "stale", "hole", "duplicate")


def _rows(value: Tensor, valid: Tensor | None) -> Tensor:
    """[queries, ...] fp64 of the valid queries."""
    flat = value.detach().cpu().double().flatten(0, 1)
    return flat if valid is None else flat[valid.cpu().bool().flatten()]


def _query(number: int, value: Tensor, valid: Tensor | None) -> list[int]:
    """[b, s] of the number-th valid query."""
    if valid is not None:
        number = int(valid.cpu().bool().flatten().nonzero()[number, 0])
    return [number // value.shape[1], number % value.shape[1]]


# ---- mixing matrices ----


def sinkhorn_measurement(
    comb: Tensor,
    pre: Tensor | None = None,
    post: Tensor | None = None,
    valid: Tensor | None = None,
    iterations: int = 0,
    history: int = 0,
) -> dict[str, Any]:
    """How doubly stochastic comb is, and the ranges of pre and post.

    column_deviation, row_deviation   largest |sum - 1| over queries; columns (axis -2) were normalised last
    row_deviation_mean                of the largest one of each query
    spectral_norm                     largest; 1 for a doubly stochastic matrix
    asymmetry                         |comb - comb^T| / |comb| over all queries together: what a transpose would change
    more_iterations                   further row-and-column normalisations (fp64, no eps) until both sums are within 1e-6 of 1,
                                      worst query; None: not within `iterations`, see residual_after. Only when iterations > 0
    residuals                         largest deviation after each of the first `history` further normalisations
    """
    matrix = _rows(comb, valid)
    out: dict[str, Any] = {"queries": len(matrix)}
    if len(matrix) == 0:
        return out
    rows, columns = (matrix.sum(-1) - 1).abs().amax(-1), (matrix.sum(-2) - 1).abs().amax(-1)
    finite = matrix.isfinite().all()
    out |= {
        "column_deviation": float(columns.max()),
        "row_deviation": float(rows.max()),
        "row_deviation_mean": float(rows.mean()),
        "row_deviation_at": _query(int(rows.argmax()), comb, valid),
        "comb_min": float(matrix.min()),
        "comb_max": float(matrix.max()),
        "spectral_norm": float(torch.linalg.matrix_norm(matrix, 2).max()) if finite else math.nan,
        "asymmetry": float((matrix - matrix.mT).norm() / matrix.norm()),
    }
    for name, value in (("pre", pre), ("post", post)):
        if value is not None:
            chosen = _rows(value, valid)
            out |= {f"{name}_min": float(chosen.min()), f"{name}_max": float(chosen.max())}
    if iterations and finite:
        out["more_iterations"], out["residual_after"] = sinkhorn_iterations(matrix, iterations)
    if history and finite:
        out["residuals"] = sinkhorn_history(matrix, history)
    return out


def _normalise(matrix: Tensor) -> Tensor:
    """Rows, then columns, in one further Sinkhorn iteration; zero sums stay zero."""
    for axis in (-1, -2):
        total = matrix.sum(axis, keepdim=True)
        matrix = matrix / torch.where(total == 0, torch.ones_like(total), total)
    return matrix


def _deviation(matrix: Tensor) -> Tensor:
    """[queries]: the larger deviation of the two sums from 1."""
    return torch.maximum((matrix.sum(-1) - 1).abs().amax(-1), (matrix.sum(-2) - 1).abs().amax(-1))


def sinkhorn_iterations(matrix: Tensor, most: int) -> tuple[int | None, float]:
    """Iterations from here until every query is within CONVERGED, None when `most` do not do it; and what is left then."""
    matrix = matrix.flatten(0, -3).double()
    for done in range(most + 1):
        deviation = _deviation(matrix)
        left = deviation > CONVERGED
        if not bool(left.any()):
            return done, float(deviation.max()) if len(deviation) else 0.0
        if done == most:
            return None, float(deviation.max())
        matrix = _normalise(matrix[left])
    raise AssertionError("the loop returns")


def sinkhorn_history(matrix: Tensor, count: int) -> list[float]:
    """Largest deviation as observed, and after each of `count` further iterations."""
    matrix = matrix.flatten(0, -3).double()
    out = [float(_deviation(matrix).max())]
    for _ in range(count):
        matrix = _normalise(matrix)
        out.append(float(_deviation(matrix).max()))
    return out


def sinkhorn_trail(start: Tensor, iters: int, eps: float) -> list[tuple[str, Tensor]]:
    """Every half step of the model's own Sinkhorn: start [..., n, n] is softmax + eps, before any normalisation.

    -> ("1 columns", comb), ("2 rows", ..), ("2 columns", ..) .. up to `iters`; each sum is divided by (sum + eps)
    """
    comb = start / (start.sum(-2, keepdim=True) + eps)
    trail = [("1 columns", comb)]
    for iteration in range(2, iters + 1):
        for axis, name in ((-1, "rows"), (-2, "columns")):
            comb = comb / (comb.sum(axis, keepdim=True) + eps)
            trail.append((f"{iteration} {name}", comb))
    return trail


def sinkhorn_residuals(trail: Sequence[tuple[str, Tensor]]) -> list[float]:
    """Largest deviation of a row or column sum from 1 after each whole iteration."""
    return [float(_deviation(comb.double().flatten(0, -3)).max()) for name, comb in trail if name.endswith("columns")]


def nearest_step(comb: Tensor, trail: Sequence[tuple[str, Tensor]], due: str = "") -> tuple[str, float]:
    """The half step whose matrices comb [..., n, n] is nearest to over all queries together, and that relative distance.

    due   the half step that should be it: named where another one is less than twice as near (converged matrices)
    """
    want = comb.double()
    size = want.norm()
    distances = {name: float(((step.double() - want).norm() / size).nan_to_num(math.inf)) for name, step in trail}
    best = min(distances, key=lambda name: distances[name])
    if due in distances and distances[due] <= 2 * distances[best] + CONVERGED:
        best = due
    return best, distances[best]


def matrix_distance(got: Tensor, want: Tensor, valid: Tensor | None = None) -> dict[str, Any]:
    """Distance of two comb [b, s, n, n] as matrices, which sums cannot see.

    distance     largest Frobenius norm of the difference over queries, at `at`
    relative     |got - want| / |want| over all queries together
    transposed   the same for got transposed: smaller than `relative` means that axes are exchanged
    """
    g, w = _rows(got, valid), _rows(want, valid)
    if len(w) == 0:
        return {"queries": 0}
    each = torch.linalg.matrix_norm(g - w)
    return {
        "queries": len(w),
        "distance": float(each.max()),
        "at": _query(int(each.nan_to_num(math.inf).argmax()), want, valid),
        "relative": float((g - w).norm() / w.norm()),
        "transposed": float((g.mT - w).norm() / w.norm()),
    }


# ---- residual streams ----


def _rms(value: Tensor) -> float:
    return float(value.square().mean().sqrt()) if value.numel() else math.nan


def residual_measurement(
    X: Tensor,
    before: Tensor | None = None,
    comb: Tensor | None = None,
    pre: Tensor | None = None,
    post: Tensor | None = None,
    y: Tensor | None = None,
    valid: Tensor | None = None,
) -> dict[str, Any]:
    """Size of the residual streams X [b, s, n, D] after a half, and what made it.

    absmax, rms, at    over all valid queries; at = [b, s, stream, channel] of the largest
    stream_rms         per stream
    growth             rms over that of `before` (the streams the half started from); growth_max  worst query
    from_comb          rms of sum_i comb[i, j] before[i], over rms of before
    from_post          rms of post[j] * y, over rms of before
    into_block         rms of sum_i pre[i] before[i], over rms of before
    comb_norm          largest spectral norm of comb; comb_bound  largest share of it that a query's |comb part| uses, at most 1
    remainder          X - post * y must be the comb part: largest |X - post * y - comb part| over |X| of a query
    """
    x = _rows(X, valid)  # [queries, n, D]
    out: dict[str, Any] = {"queries": len(x)}
    if len(x) == 0:
        return out
    flat = int(x.abs().nan_to_num(math.inf).argmax())
    query, inner = divmod(flat, x.shape[1] * x.shape[2])
    out |= {
        "absmax": float(x.abs().max()),
        "rms": _rms(x),
        "at": [*_query(query, X, valid), *divmod(inner, x.shape[2])],
        "stream_rms": [_rms(x[:, j]) for j in range(x.shape[1])],
    }
    if before is None:
        return out
    old = _rows(before, valid)
    size = _rms(old)
    over = (lambda value: value / size) if size else (lambda value: math.inf if value else math.nan)
    each, each_old = x.flatten(1).norm(dim=1), old.flatten(1).norm(dim=1)
    out |= {"growth": over(_rms(x)), "growth_max": float((each / each_old).max())}
    mixed = added = None
    if comb is not None:
        matrix = _rows(comb, valid)
        mixed = torch.einsum("qij,qid->qjd", matrix, old)
        out["from_comb"] = over(_rms(mixed))
        norms = torch.linalg.matrix_norm(matrix, 2) if matrix.isfinite().all() else torch.full((len(matrix),), math.nan)
        out["comb_norm"] = float(norms.max())
        out["comb_bound"] = float((mixed.flatten(1).norm(dim=1) / (norms * each_old)).max())
    if post is not None and y is not None:
        added = _rows(post, valid)[:, :, None] * _rows(y, valid)[:, None, :]
        out["from_post"] = over(_rms(added))
    if mixed is not None and added is not None:
        out["remainder"] = float(((x - added - mixed).flatten(1).norm(dim=1) / each).max())
    if pre is not None:
        out["into_block"] = over(_rms(torch.einsum("qi,qid->qd", _rows(pre, valid), old)))
    return out


# ---- visible keys ----


def visible_measurement(
    visible: Tensor,
    positions: Tensor,
    window: int,
    ratio: int,
    valid: Tensor | None = None,
    index_topk: int | None = None,
    lengths: Tensor | None = None,
    ratios: Sequence[int] = (),
) -> dict[str, Any]:
    """Check the keys that each query read against the rule of the query's own position, without another model.

    visible      [b, s, W + entries], -1 = none; positions [b, s]; ratio 0: no entries may be seen
    index_topk   of a CSA layer: that many entries, all when fewer are complete; None: every complete entry
    lengths      [b] tokens of each row when this call is a right-padded prefill: positions from there on are pads
    ratios       of other layer kinds (RATIOS): a set that fits the rule of one of these instead is `ratio`

    Per class, queries (how many), first ([b, s] and position of the first), keys (the first one's, at most 8) and tokens
    (the ranges that those keys stand for). A query may be in several classes, the first that fits explains its window part
    and its entry part:
    pad          a key where the row holds padding, or an unused place of the list read as a key (one number fills it up)
    ratio        entries 0 .. n - 1 as another ratio counts them; any entry in a layer without a ratio
    edge         an unbroken run of window positions with the wrong first or last one; no window key at all
    future       a window position, or an entry that starts, after the query
    unfinished   an entry whose group is not complete at the query
    stale        a window position that has left the window: what the slot held before
    hole         a window position or (where all are seen) a complete entry that is missing; CSA: fewer entries than it must have
    duplicate    a key read twice; CSA: more entries than index_topk
    """
    visible, p = visible.detach().cpu().long(), positions.detach().cpu().long()
    chosen = torch.ones(p.shape, dtype=torch.bool) if valid is None else valid.cpu().bool()
    near, far = visible[..., :window], visible[..., window:]
    at = p[..., None]
    used_near, used_far = near >= 0, far >= 0
    complete = (p + 1) // ratio if ratio else torch.zeros_like(p)
    must_far = complete if index_topk is None else complete.clamp(max=index_topk)
    begins = far * ratio if ratio else torch.full_like(far, torch.iinfo(torch.int64).max)
    nothing = torch.zeros_like(chosen)

    # Explanations of the whole window part or the whole entry part come first.
    padded = visible < -1
    if lengths is not None:
        ends = lengths.cpu().long()[:, None, None]
        padded[..., :window] |= near >= ends
        if ratio:
            padded[..., window:] |= used_far & (begins >= ends)
    surplus, repeats = used_far.sum(-1) - must_far, _repeated(far)
    ordered = far.sort(dim=-1).values
    one_number = repeats.any(-1) & (_distinct(torch.where(_first_column_off(repeats), ordered, -1)) == 1)
    fills = one_number & (surplus > 0) & used_far.all(-1)
    padded[..., window:] |= (fills & (far.shape[-1] > 0))[..., None] & used_far & (far == _mode_of(ordered, repeats)[..., None])
    pad_near, pad_far = padded[..., :window].any(-1), padded[..., window:].any(-1)
    seen = used_far.sum(-1)
    prefix = (seen > 0) & ~repeats.any(-1) & (far.amax(-1) == seen - 1) if far.shape[-1] else nothing
    other = nothing
    for m in ratios:
        if m != ratio:
            other = other | (seen == ((p + 1) // m if index_topk is None else ((p + 1) // m).clamp(max=index_topk)))
    wrong_ratio = (prefix & other & (seen != must_far) & ~pad_far) if ratio else used_far.any(-1) & ~pad_far
    first, last = torch.where(used_near, near, torch.iinfo(torch.int64).max).amin(-1), near.amax(-1)
    run = (used_near.sum(-1) == last - first + 1) & ~_repeated(near).any(-1) & (last <= p)
    no_window = ~used_near.any(-1)
    edge = (run & ((first != (p - window + 1).clamp(min=0)) | (last != p)) | no_window) & ~pad_near
    near_open, far_open = ~(pad_near | edge)[..., None], ~(pad_far | wrong_ratio)[..., None]

    future = torch.cat([used_near & (near > at) & near_open, used_far & (begins > at) & far_open], -1)
    unfinished = used_far & (far >= complete[..., None]) & (begins <= at) & far_open
    stale_key = used_near & (near < at - window + 1)
    stale = stale_key & near_open
    right_near = _distinct(torch.where((near <= at) & ~stale_key, near, -1))
    right_far = _distinct(torch.where(far < complete[..., None], far, -1))
    holes = (torch.minimum(p + 1, torch.full_like(p, window)) - right_near, must_far - right_far)
    found = {
        "pad": pad_near | pad_far,
        "ratio": wrong_ratio,
        "edge": edge,
        "future": future.any(-1),
        "unfinished": unfinished.any(-1),
        "stale": stale.any(-1),
        "hole": (holes[0] > 0) & near_open[..., 0] | (holes[1] > 0) & far_open[..., 0],
        "duplicate": _repeated(near).any(-1) & ~pad_near
        | repeats.any(-1) & ~pad_far
        | (surplus > 0) & ~unfinished.any(-1) & ~future.any(-1) & far_open[..., 0],
    }
    blank = torch.zeros_like(near, dtype=torch.bool)
    keys = {
        "pad": padded,
        "ratio": torch.cat([blank, used_far], -1),
        "edge": torch.cat([used_near, torch.zeros_like(used_far)], -1),
        "future": future,
        "unfinished": torch.cat([blank, unfinished], -1),
        "stale": torch.cat([stale, torch.zeros_like(used_far)], -1),
    }
    out: dict[str, Any] = {"queries": int(chosen.sum()), "keys": int(((visible >= 0) & chosen[..., None]).sum())}
    for name in FAULTS:
        wrong = found[name] & chosen
        out[name] = {"queries": int(wrong.sum())}
        if bool(wrong.any()):
            b, s = (int(i) for i in wrong.nonzero()[int(wrong.nonzero()[:, 1].argmin())])
            out[name] |= {"first": [b, s], "position": int(p[b, s])}
            if name in keys:
                row, mask = visible[b, s], keys[name][b, s]
                out[name]["keys"] = row[mask][:8].tolist()
                tokens = ranges_of(row[:window][mask[:window]].tolist()), ranges_of(row[window:][mask[window:]].tolist(), ratio or 1)
                out[name]["tokens"] = [list(r) for part in tokens for r in part][:8]
    out["wrong"] = int((torch.stack([found[name] for name in FAULTS]).any(0) & chosen).sum())
    return out


def _first_column_off(repeats: Tensor) -> Tensor:
    """Marks over sorted columns 1.. as marks over all columns."""
    return torch.nn.functional.pad(repeats, (1, 0), value=False)


def _mode_of(ordered: Tensor, repeats: Tensor) -> Tensor:
    """The number that is repeated, -2 where none is. ordered [..., k] sorted."""
    if ordered.shape[-1] == 0:
        return torch.full(ordered.shape[:-1], -2, dtype=torch.int64)
    return torch.where(_first_column_off(repeats), ordered, -2).amax(-1)


def _distinct(value: Tensor) -> Tensor:
    """How many different indices the last axis holds."""
    return (value >= 0).sum(-1) - _repeated(value).sum(-1)


def _repeated(value: Tensor) -> Tensor:
    """bool, over the sorted last axis: True where an index repeats the one before it."""
    ordered = value.sort(dim=-1).values
    return (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)


def ranges_of(indices: Sequence[int], ratio: int = 1) -> list[tuple[int, int]]:
    """Inclusive token ranges that indices cover; entry e of a ratio m covers tokens e m .. e m + m - 1."""
    out: list[tuple[int, int]] = []
    for index in sorted({int(i) for i in indices if int(i) >= 0}):
        first, last = index * ratio, index * ratio + ratio - 1
        if out and out[-1][1] == first - 1:
            out[-1] = (out[-1][0], last)
        else:
            out.append((first, last))
    return out


def visible_ranges(row: Tensor, window: int, ratio: int) -> dict[str, list[tuple[int, int]]]:
    """What one query read, as token ranges: {"window": ..., "entries": tokens the compressed entries stand for}."""
    keys = [int(k) for k in row.tolist()]
    return {"window": ranges_of(keys[:window]), "entries": ranges_of(keys[window:], ratio) if ratio else []}


def ranges_text(ranges: Sequence[tuple[int, int]], most: int = 6) -> str:
    """`0-3 8-11 … (9 ranges)`; `-` when empty."""
    if not ranges:
        return "-"
    shown = " ".join(f"{a}-{b}" if a != b else str(a) for a, b in ranges[:most])
    return shown if len(ranges) <= most else f"{shown} … ({len(ranges)} ranges)"
