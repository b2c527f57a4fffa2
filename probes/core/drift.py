"""Does an error grow? Row errors over decode steps, and over the position modulo the compression ratios.

    drift_measurement(errors, position)     errors [b, steps, ...] of one point, position [b, steps]

Tests: parity/unit/test_drift.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

MODULI = (4, 128)
LEAST_STEPS = 6


def slope(values: Tensor) -> float:
    """Least-squares slope per step of a series; 0 for fewer than two points."""
    n = len(values)
    if n < 2:
        return 0.0
    x = torch.arange(n, dtype=torch.float64)
    x = x - x.mean()
    return float((x * values.double()).sum() / x.square().sum())


def drift_measurement(errors: Tensor, position: Tensor) -> dict[str, Any]:
    """Errors [b, steps, ...] (NaN: no row) at position [b, steps].

    first, last         median error of the first and last third of the steps; growth  last over first
    slope               of log10(error) per 100 steps, over steps with an error
    worst, worst_step   largest error and its step
    mod4                median error by position modulo 4; mod128_worst  the residue modulo 128 with the largest median, that
                        median over the median of all steps (mod128_ratio)
    """
    per_step = errors.double().flatten(2) if errors.dim() > 2 else errors.double()[..., None]
    row = per_step.nan_to_num(-1.0, posinf=math.inf).amax(-1)  # [b, steps], -1 where no row
    there = row >= 0
    out: dict[str, Any] = {"steps": int(there.any(0).sum())}
    if not bool(there.any()):
        return out
    steps = [float(row[:, s][there[:, s]].median()) for s in range(row.shape[1]) if there[:, s].any()]
    series = torch.tensor(steps, dtype=torch.float64)
    third = max(1, len(series) // 3)
    out |= {"first": float(series[:third].median()), "last": float(series[-third:].median())}
    out["growth"] = out["last"] / out["first"] if out["first"] > 0 else (1.0 if out["last"] == 0 else math.inf)
    positive = series[(series > 0) & series.isfinite()]
    if len(positive) >= LEAST_STEPS:
        out["slope"] = 100 * slope(positive.log10())
    flat = int(row.amax(0).argmax())
    out |= {"worst": float(row.max()), "worst_step": flat}
    whole = float(row[there].median())
    for modulus in MODULI:
        medians = {}
        for residue in range(modulus):
            at = there & (position % modulus == residue)
            if bool(at.any()):
                medians[residue] = float(row[at].median())
        if modulus == 4:
            out["mod4"] = [medians.get(residue) for residue in range(4)]
        else:
            worst = max(medians, key=lambda residue: medians[residue])
            out |= {"mod128_worst": worst, "mod128_ratio": medians[worst] / whole if whole > 0 else (1.0 if medians[worst] == 0 else math.inf)}
    return out
