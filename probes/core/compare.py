"""Comparison of what two models showed: numbers and places, no opinion.

Finite masks first, then the worst row's relative L2, the global one, norm ratios, cosine and the worst element with both
values. Every `error` is inf where something does not match in kind, and NaN where nothing was compared, so that
`error <= limit` is False in both cases. Pads of the last axis are the caller's business only where widths must agree.

Tests: parity/unit/test_compare.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from probes.core.trace import grow_last
from reference.points import INDICES, SCORES, VALUES, spec_of

BLOCK_ELEMENTS = 1 << 23  # fp64 copies are made for this many elements at a time
NO_INDEX = torch.iinfo(torch.int64).max
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Comparison:
    """Two tensors of real numbers, row by row.

    rows            rows compared: valid, and with something in them; 0 is never a pass
    error           worst row's |got - want| / |want|; inf: a mismatch in kind; NaN: nothing was compared
    where           [b, s, ...] of that row
    rel_l2          the same over all compared rows together
    norm_ratio      |got| / |want| of the row that is furthest from 1 in its logarithm, at norm_ratio_where;
                    norm_ratio_min and norm_ratio_max over rows
    cosine          smallest of a row, at cosine_where; shown, never judged
    max_abs         largest |got - want|, at `element` (full coordinate), where the values were got and want
    finite_equal    both are finite in the same places and equal (infinities) elsewhere; no NaN where rows count
    finite_where    coordinate of the first mismatch
    got_only, want_only        elements finite on one side only
    missing_rows, extra_rows   of a sparse point: rows only `want` has, rows only `got` has
    problem         why nothing could be compared, e.g. shapes that differ
    """

    rows: int = 0
    elements: int = 0
    error: float = NAN
    where: tuple[int, ...] = ()
    rel_l2: float = NAN
    norm_ratio: float = NAN
    norm_ratio_where: tuple[int, ...] = ()
    norm_ratio_min: float = NAN
    norm_ratio_max: float = NAN
    cosine: float = NAN
    cosine_where: tuple[int, ...] = ()
    max_abs: float = NAN
    element: tuple[int, ...] = ()
    got: float = NAN
    want: float = NAN
    finite_equal: bool = True
    finite_where: tuple[int, ...] = ()
    got_only: int = 0
    want_only: int = 0
    missing_rows: int = 0
    extra_rows: int = 0
    problem: str = ""

    @property
    def norm_error(self) -> float:
        """|log(norm ratio)| of the worst row; inf on a mismatch in kind, NaN when nothing was compared."""
        if self.error == INF and not math.isfinite(self.norm_ratio):
            return INF
        if self.norm_ratio == 0.0:
            return INF
        return abs(math.log(self.norm_ratio)) if not math.isnan(self.norm_ratio) else NAN


@dataclass
class _Rows:
    """Accumulated over blocks of rows; all [rows] fp64 or bool."""

    difference: list[Tensor] = field(default_factory=list)  # |got - want|
    got: list[Tensor] = field(default_factory=list)  # |got|
    want: list[Tensor] = field(default_factory=list)  # |want|
    dot: list[Tensor] = field(default_factory=list)
    worst: list[Tensor] = field(default_factory=list)  # largest |got - want| of the row
    column: list[Tensor] = field(default_factory=list)  # and where in the row
    bad: list[Tensor] = field(default_factory=list)  # first column where finite masks or infinities differ, -1
    empty: list[Tensor] = field(default_factory=list)  # both sides hold the same infinities only
    missing: list[Tensor] = field(default_factory=list)  # sparse: only want has the row
    extra: list[Tensor] = field(default_factory=list)
    got_only: int = 0
    want_only: int = 0


def _measure(got: Tensor, want: Tensor, sparse: bool) -> tuple[dict[str, Tensor], int, int]:
    """Row numbers of two [rows, width] tensors."""
    rows = _Rows()
    width = max(got.shape[1], 1)
    block = max(BLOCK_ELEMENTS // width, 1)
    for start in range(0, got.shape[0], block):
        _measure_block(got[start : start + block].double(), want[start : start + block].double(), sparse, rows)
    names = ("difference", "got", "want", "dot", "worst", "column", "bad", "empty", "missing", "extra")
    return {name: torch.cat(getattr(rows, name)) for name in names}, rows.got_only, rows.want_only


def _measure_block(g: Tensor, w: Tensor, sparse: bool, rows: _Rows) -> None:
    none = torch.zeros(g.shape[0], dtype=torch.bool)
    missing = extra = absent = none
    if sparse:
        no_got, no_want = torch.isnan(g).all(1), torch.isnan(w).all(1)
        missing, extra, absent = no_got & ~no_want, no_want & ~no_got, no_got & no_want
    delta = g - w  # NaN or inf wherever a side is not finite
    finite = torch.isfinite(delta)
    bad = torch.full((g.shape[0],), -1, dtype=torch.int64)
    empty = absent
    if not bool(finite.all()):  # the common case pays for none of this
        finite_g, finite_w = torch.isfinite(g), torch.isfinite(w)
        differ = (finite_g != finite_w) | (~finite_g & ~finite_w & (g != w))  # NaN != NaN counts as a difference
        differ[absent | missing | extra] = False
        bad = torch.where(differ.any(1), differ.to(torch.uint8).argmax(1), bad)
        rows.got_only += int((finite_g & ~finite_w)[~(absent | extra)].sum())
        rows.want_only += int((finite_w & ~finite_g)[~(absent | missing)].sum())
        both = finite_g & finite_w
        delta, g, w = (torch.where(both, x, 0.0) for x in (delta, g, w))
        empty = absent | ((~finite_g & ~finite_w).all(1) & (bad < 0) & ~missing & ~extra)
    if g.shape[1] == 0:
        empty = ~none
    worst, column = delta.abs().max(1) if g.shape[1] else (torch.zeros(g.shape[0], dtype=g.dtype), bad)
    rows.difference.append(torch.linalg.vector_norm(delta, dim=1))
    rows.got.append(torch.linalg.vector_norm(g, dim=1))
    rows.want.append(torch.linalg.vector_norm(w, dim=1))
    rows.dot.append((g * w).sum(1))
    rows.worst.append(worst)
    rows.column.append(column)
    for name, value in (("bad", bad), ("empty", empty), ("missing", missing), ("extra", extra)):
        getattr(rows, name).append(value)


def _ratios(m: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(relative error, norm ratio, cosine) per row. Two zero rows agree; one zero row does not."""
    got, want, difference = m["got"], m["want"], m["difference"]
    zero = want == 0
    error = torch.where(zero, torch.where(difference == 0, 0.0, INF), difference / want.masked_fill(zero, 1.0))
    ratio = torch.where(zero, torch.where(got == 0, 1.0, INF), got / want.masked_fill(zero, 1.0))
    norms = got * want
    cosine = torch.where(norms == 0, ((got == 0) & zero).double(), m["dot"] / norms.masked_fill(norms == 0, 1.0))
    broken = (m["bad"] >= 0) | m["missing"] | m["extra"]
    return error.masked_fill(broken, INF), ratio.masked_fill(m["missing"] | m["extra"], NAN), cosine


def _rows_of(value: Tensor, row_dims: int) -> tuple[Tensor, tuple[int, ...]]:
    """[rows, width] and the shape of the row axes."""
    axes = tuple(value.shape[: value.dim() - row_dims])
    width = math.prod(value.shape[value.dim() - row_dims :])
    return value.reshape(math.prod(axes), width), axes


def _chosen(axes: tuple[int, ...], valid: Tensor | None) -> Tensor | None:
    """Flat numbers of the rows whose query is valid; None for all."""
    if valid is None:
        return None
    if tuple(valid.shape) != axes[:2]:
        raise ValueError(f"valid has shape {list(valid.shape)}, the values start with {list(axes[:2])}")
    per_query = math.prod(axes[2:])
    return valid.cpu().bool().reshape(-1).repeat_interleave(per_query).nonzero()[:, 0]


def _at(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Coordinate of a flat number."""
    out: list[int] = []
    for size in reversed(shape):
        out.append(flat % size)
        flat //= size
    return tuple(reversed(out))


def compare_values(got: Tensor, want: Tensor, row_dims: int, valid: Tensor | None = None, sparse: bool = False) -> Comparison:
    """Compare [b, s, ...] tensors whose last `row_dims` axes make one row.

    valid   [b, s] bool: rows of other queries are not looked at (they may hold anything)
    sparse  rows of `want` that are all NaN are no rows; `got` must have none there either, and the reverse
    """
    if got.shape != want.shape:
        return Comparison(error=INF, problem=f"shape {list(got.shape)} against {list(want.shape)}")
    if want.dim() < 2 + row_dims:
        raise ValueError(f"shape {list(want.shape)} has no [b, s] before {row_dims} row axes")
    flat_got, axes = _rows_of(got.detach().cpu(), row_dims)
    flat_want, _ = _rows_of(want.detach().cpu(), row_dims)
    chosen = _chosen(axes, valid)
    if chosen is not None:
        flat_got, flat_want = flat_got[chosen], flat_want[chosen]
    if flat_want.numel() == 0:
        return Comparison()
    m, got_only, want_only = _measure(flat_got, flat_want, sparse)
    error, ratio, cosine = _ratios(m)
    counted = ~m["empty"]
    rows = int(counted.sum())
    if rows == 0:
        return Comparison()

    def row(number: Tensor) -> int:
        return int(number) if chosen is None else int(chosen[int(number)])

    inner = tuple(want.shape[want.dim() - row_dims :])
    worst = error.masked_fill(~counted, -1.0).argmax()
    real = counted & ~m["missing"] & ~m["extra"]  # rows that both sides have
    out: dict[str, object] = {}
    if bool(real.any()):
        shift = ratio.log().abs().masked_fill(~real, -1.0).argmax()
        lowest = cosine.masked_fill(~real, 2.0).argmin()
        far = m["worst"].masked_fill(~real, -1.0).argmax()
        column = int(m["column"][far])
        norm = float(torch.linalg.vector_norm(m["want"][real]))
        difference = float(torch.linalg.vector_norm(m["difference"][real]))
        out = {
            "rel_l2": difference / norm if norm else (0.0 if difference == 0 else INF),
            "norm_ratio": float(ratio[shift]),
            "norm_ratio_where": _at(row(shift), axes),
            "norm_ratio_min": float(ratio[real].min()),
            "norm_ratio_max": float(ratio[real].max()),
            "cosine": float(cosine[lowest]),
            "cosine_where": _at(row(lowest), axes),
            "max_abs": float(m["worst"][far]),
            "element": (*_at(row(far), axes), *_at(column, inner)),
            "got": float(flat_got[far, column]),
            "want": float(flat_want[far, column]),
        }
    bad = m["bad"]
    first_bad = (bad >= 0).nonzero()
    if len(first_bad):
        number = first_bad[0, 0]
        at = (*_at(row(number), axes), *_at(int(bad[number]), inner))
        column = int(bad[number])
        # The mismatch is the element to look at: its values say more than the largest finite difference.
        out |= {"finite_equal": False, "finite_where": at, "element": at, "max_abs": INF}
        out |= {"got": float(flat_got[number, column]), "want": float(flat_want[number, column])}
        out |= {"rel_l2": INF}
    return Comparison(
        rows=rows,
        elements=rows * flat_want.shape[1],
        error=float(error[worst]),
        where=_at(row(worst), axes),
        got_only=got_only,
        want_only=want_only,
        missing_rows=int(m["missing"].sum()),
        extra_rows=int(m["extra"].sum()),
        **out,  # type: ignore[arg-type]
    )


def compare_scores(got: Tensor, want: Tensor, valid: Tensor | None = None) -> Comparison:
    """Compare [b, s, e] scores: widths may differ, what one side does not have counts as -inf."""
    width = max(got.shape[-1], want.shape[-1])
    return compare_values(grow_last(got, width, -INF), grow_last(want, width, -INF), 1, valid)


def compare_point(point: str, got: Tensor, want: Tensor, valid: Tensor | None = None) -> Comparison | SetComparison:
    """Compare two values of a point the way its kind asks for."""
    spec = spec_of(point)
    if spec.kind == VALUES:
        return compare_values(got, want, spec.row_dims, valid, spec.sparse)
    if spec.kind == SCORES:
        return compare_scores(got, want, valid)
    assert spec.kind == INDICES
    return compare_sets(got, want, valid)


# ---- sets of indices ----


@dataclass(frozen=True)
class SetComparison:
    """Two sets of indices per query; -1 is no index, order does not matter.

    rows        valid queries where at least one side has an index; 0 is never a pass
    empty       valid queries where neither side has one
    different   queries whose sets differ, or where `got` holds an index twice
    missing     indices only `want` has; extra  only `got` has; duplicates  repetitions in `got`
    where       [b, s] of the first different query, got_set and want_set its sets (got with its repetitions)
    """

    rows: int = 0
    empty: int = 0
    different: int = 0
    missing: int = 0
    extra: int = 0
    duplicates: int = 0
    where: tuple[int, ...] = ()
    got_set: tuple[int, ...] = ()
    want_set: tuple[int, ...] = ()
    problem: str = ""

    @property
    def error(self) -> float:
        """Share of queries that differ; inf when they could not be compared, NaN when nothing was."""
        if self.problem:
            return INF
        return self.different / self.rows if self.rows else NAN


@dataclass(frozen=True)
class _Sets:
    """[queries] numbers of two sorted index lists."""

    missing: Tensor
    extra: Tensor
    duplicates: Tensor
    size: Tensor  # indices on both sides together

    @property
    def different(self) -> Tensor:
        return (self.missing + self.extra + self.duplicates) > 0


def _sorted(value: Tensor) -> Tensor:
    """Rows ascending, no index (-1) last; repetitions stay."""
    value = value.detach().cpu().long()
    return torch.where(value < 0, NO_INDEX, value).sort(dim=-1).values


def _lacks(have: Tensor, other: Tensor) -> Tensor:
    """bool like `have`: True where a distinct index of `have` is not in `other`. Both sorted."""
    distinct = have != NO_INDEX
    distinct[:, 1:] &= have[:, 1:] != have[:, :-1]
    if other.shape[1] == 0:
        return distinct
    at = torch.searchsorted(other, have).clamp_(max=other.shape[1] - 1)
    return distinct & (other.gather(1, at) != have)


def _sets(got: Tensor, want: Tensor) -> _Sets:
    used = got != NO_INDEX
    repeated = (used[:, 1:] & (got[:, 1:] == got[:, :-1])).sum(1)
    if torch.equal(got, want):  # the common case
        missing = extra = torch.zeros_like(repeated)
    else:
        missing, extra = _lacks(want, got).sum(1), _lacks(got, want).sum(1)
    return _Sets(missing, extra, repeated, used.sum(1) + (want != NO_INDEX).sum(1))


def _flat_sets(got: Tensor, want: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted rows of the valid queries, and their flat numbers."""
    axes = tuple(want.shape[:2])
    chosen = _chosen(axes, valid)
    if chosen is None:
        chosen = torch.arange(math.prod(axes))
    rows = [_sorted(x.reshape(math.prod(axes), x.shape[-1])[chosen.to(x.device)]) for x in (got, want)]
    return rows[0], rows[1], chosen


def _shape_problem(got: Tensor, want: Tensor) -> str:
    if got.dim() != 3 or want.dim() != 3 or got.shape[:2] != want.shape[:2]:
        return f"shape {list(got.shape)} against {list(want.shape)}"
    return ""


def compare_sets(got: Tensor, want: Tensor, valid: Tensor | None = None) -> SetComparison:
    """Compare [b, s, k] indices as exact sets per query; the widths k may differ."""
    if problem := _shape_problem(got, want):
        return SetComparison(problem=problem)
    g, w, chosen = _flat_sets(got, want, valid)
    if len(chosen) == 0:
        return SetComparison()
    sets = _sets(g, w)
    rows = int((sets.size > 0).sum())
    where: tuple[int, ...] = ()
    got_set: tuple[int, ...] = ()
    want_set: tuple[int, ...] = ()
    if bool(sets.different.any()):
        at = int(sets.different.to(torch.uint8).argmax())
        where, got_set, want_set = _at(int(chosen[at]), tuple(want.shape[:2])), _members(g[at]), _members(w[at])
    return SetComparison(
        rows=rows,
        empty=len(chosen) - rows,
        different=int(sets.different.sum()),
        missing=int(sets.missing.sum()),
        extra=int(sets.extra.sum()),
        duplicates=int(sets.duplicates.sum()),
        where=where,
        got_set=got_set,
        want_set=want_set,
    )


def compare_visible(got: Tensor, want: Tensor, window: int, valid: Tensor | None = None) -> tuple[SetComparison, SetComparison]:
    """(window positions, compressed entries) of `attn.visible`: its first `window` columns are positions."""
    if got.shape[-1] < window or want.shape[-1] < window:
        problem = SetComparison(problem=f"{got.shape[-1]} and {want.shape[-1]} columns, fewer than the window's {window}")
        return problem, problem
    return (
        compare_sets(got[..., :window], want[..., :window], valid),
        compare_sets(got[..., window:], want[..., window:], valid),
    )


def differing(got: Tensor, want: Tensor, valid: Tensor | None = None) -> Tensor:
    """[b, s] bool: the query's sets differ or `got` repeats an index; False for pads."""
    if problem := _shape_problem(got, want):
        raise ValueError(problem)
    g, w, chosen = _flat_sets(got, want, valid)
    out = torch.zeros(math.prod(want.shape[:2]), dtype=torch.bool)
    if len(chosen):
        out[chosen] = _sets(g, w).different
    return out.reshape(want.shape[:2])


def selection_margin(got: Tensor, want: Tensor, scores: Tensor, valid: Tensor | None = None) -> Tensor:
    """[b, s] fp64: how far the reference's scores are from allowing the other choice; 0 where the choices are equal.

    The gap between the best entry that `want` has and `got` left out, and the worst that `got` took in its place; its size
    counts, so scores that did not decide (a negative gap) excuse nothing. inf where no exchange explains the difference: a
    repeated index, sets of different size, an index without a finite score.
    scores  [b, s, e]: what the reference chose by, -inf where it may not look
    """
    if problem := _shape_problem(got, want):
        raise ValueError(problem)
    g, w, chosen = _flat_sets(got, want, valid)
    out = torch.zeros(math.prod(want.shape[:2]), dtype=torch.float64)
    if len(chosen) == 0:
        return out.reshape(want.shape[:2])
    sets = _sets(g, w)
    number = sets.different.nonzero()[:, 0]
    if len(number):
        g, w = g[number], w[number]
        score = scores.detach().cpu().reshape(out.shape[0], scores.shape[-1])[chosen[number]].double()
        best_left_out = _extreme(score, w, _lacks(w, g), largest=True)
        worst_taken = _extreme(score, g, _lacks(g, w), largest=False)
        gap = best_left_out - worst_taken
        exchange = (sets.missing == sets.extra)[number] & (sets.duplicates[number] == 0) & torch.isfinite(gap)
        out[chosen[number]] = torch.where(exchange, gap.abs(), INF)
    return out.reshape(want.shape[:2])


def _extreme(score: Tensor, indices: Tensor, chosen: Tensor, largest: bool) -> Tensor:
    """Largest or smallest score of the chosen indices per row; an index beyond the scores or without one counts as -inf."""
    absent = -INF if largest else INF
    if score.shape[1] == 0:
        return torch.full((len(score),), NAN, dtype=score.dtype)
    inside = indices < score.shape[1]
    value = score.gather(1, indices.clamp(max=score.shape[1] - 1))
    value = torch.where(inside & ~torch.isnan(value), value, -INF)
    value = value.masked_fill(~chosen, absent)
    return value.max(1).values if largest else value.min(1).values


def _members(row: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in row if int(i) != NO_INDEX)


# ---- names ----


@dataclass(frozen=True)
class KeyComparison:
    """Names on both sides, and on one side only."""

    both: tuple[str, ...]
    got_only: tuple[str, ...]
    want_only: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True when both sides have the same names, and at least one."""
        return bool(self.both) and not self.got_only and not self.want_only


def compare_keys(got: Iterable[str], want: Iterable[str]) -> KeyComparison:
    """Compare names both ways; the order is that of `want`, then of `got`."""
    got, want = list(dict.fromkeys(got)), list(dict.fromkeys(want))
    got_set, want_set = set(got), set(want)
    return KeyComparison(
        both=tuple(n for n in want if n in got_set),
        got_only=tuple(n for n in got if n not in want_set),
        want_only=tuple(n for n in want if n not in got_set),
    )
