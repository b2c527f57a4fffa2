"""Rows, the unit of every judgement: relative errors of rows, which rows are there, and choices made harmless for replay.

    error, norm = row_errors(got, want, row_dims=1)     # [b, s, ...] fp64

torch and the vocabulary only: a probe, the audit and a replayed operation measure alike. Tests: parity/unit/test_audit.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.points import PointSpec


def row_errors(got: Tensor, want: Tensor, row_dims: int, least: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Relative L2 error and |norm ratio - 1| of every row; both [b, s, ...] fp64.

    least  [b, s, ...] the smallest size a row is measured by: None is its own, whatever it is.

    A row that is all NaN in `want` is absent: NaN in both results if it is absent in `got` too, else inf.
    A zero row must be zero. NaN in `got` gives NaN, which passes no limit.
    """
    got, want = got.double().flatten(got.dim() - row_dims), want.double().flatten(want.dim() - row_dims)
    difference, size = (got - want).norm(dim=-1), want.norm(dim=-1)
    got_size = got.norm(dim=-1)
    if least is not None:
        got_size, size = got_size + (least - size).clamp_min(0), torch.maximum(size, least)
    zero = size == 0
    safe = torch.where(zero, torch.ones_like(size), size)
    error = torch.where(zero, torch.where(got_size == 0, 0.0, torch.inf), difference / safe)
    ratio = torch.where(zero, torch.where(got_size == 0, 0.0, torch.inf), (got_size / safe - 1).abs())
    absent = want.isnan().all(-1)
    one_sided = absent & ~got.isnan().all(-1)
    error = torch.where(one_sided, torch.inf, error)
    return error, torch.where(one_sided, torch.inf, ratio)


def score_unit(want: Tensor) -> float:
    """Typical size of one score: the median over queries of the root mean square of their finite scores [b, s, e]; 0: none."""
    seen = want.isfinite()
    count = seen.sum(-1)
    size = (want.double().masked_fill(~seen, 0.0).square().sum(-1) / count.clamp_min(1)).sqrt()
    return float(size[count > 0].median()) if bool((count > 0).any()) else 0.0


def least_size(unit: float, seen: Tensor) -> Tensor:
    """[b, s] size of a row of typical scores. Scores compete with each other: a query whose few scores happen to be near
    zero is measured by what scores are, not by its own."""
    return unit * seen.sum(-1).double().sqrt()


def absent_rows(want: Tensor, row_dims: int) -> Tensor:
    """True where `want` has no row (a sparse point at a query that completes no group)."""
    return want.flatten(want.dim() - row_dims).isnan().all(-1)


def rows_of(spec: PointSpec, mode: str, dims: int) -> int:
    """Trailing axes that make one judged row of a tensor with `dims` axes: the point's own in isolated runs (a head, say);
    everything of a token in free runs, where single heads are at the mercy of what earlier layers hand down."""
    return dims - 2 if mode == "free" else spec.row_dims


def replayable(choice: Tensor, limit: Tensor, fill: range | None) -> Tensor:
    """A choice [b, s, k] that the reference can replay, ascending: what is out of range or there twice is dropped.

    limit  first index out of range, broadcast to [b, s, k]; fill  None: dropped ones become -1 (none); else the smallest
    unused index, since an expert slot cannot be empty. The fault itself is judged on the untouched choice.
    """
    choice = choice.sort(-1).values
    twice = torch.zeros_like(choice, dtype=torch.bool)
    twice[..., 1:] = choice[..., 1:] == choice[..., :-1]
    bad = (choice < 0) | (choice >= limit) | twice
    if fill is None:
        return choice.masked_fill(bad, torch.iinfo(torch.int64).max).sort(-1).values.masked_fill_(_sorted_last(bad), -1)
    for b, s in bad.any(-1).nonzero().tolist():
        kept = choice[b, s][~bad[b, s]].tolist()
        free = [i for i in fill if i not in kept]
        choice[b, s] = torch.tensor(sorted(kept + free[: choice.shape[-1] - len(kept)]))
    return choice


def _sorted_last(bad: Tensor) -> Tensor:
    """Where the `bad` ones stand after sorting them to the end."""
    kept = (~bad).sum(-1, keepdim=True)
    return torch.arange(bad.shape[-1]).expand(bad.shape) >= kept
