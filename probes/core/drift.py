"""Does an error grow? Row errors over decode steps, and over the position modulo the compression ratios.

    drift_measurement(errors, position)     errors [b, steps, ...] of one point, position [b, steps]
    step_series(errors, position, limits)   errors [layers, b, steps], every step of it: what a chart draws

Tests: parity/unit/test_drift.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


# ---- every step, for a chart ----


def short(value: float) -> float:
    """Four significant digits: what a chart can show, and a run file should carry 130 times."""
    return float(f"{value:.4g}")


def middle(values: Tensor) -> float | None:
    """Lower median; what is not a number ranks above everything, so that it cannot hide. None: no value."""
    if values.numel() == 0:
        return None
    ranked = torch.where(values.isnan(), torch.inf, values.double()).flatten().sort().values
    found = float(ranked[(len(ranked) - 1) // 2])
    return math.nan if math.isinf(found) and bool(values.isnan().any()) else short(found)


def worst(values: Tensor) -> float | None:
    """The largest; NaN where one is not a number. None: no value."""
    if values.numel() == 0:
        return None
    return math.nan if bool(values.isnan().any()) else short(float(values.max()))


def step_series(errors: Tensor, position: Tensor, limits: Sequence[float | None] = ()) -> dict[str, Any]:
    """Row errors [layers, b, steps] at position [b, steps]; a row whose error is not a number is NaN and stays so.

    median, worst       of each step, over layers and rows; worst_in  index of the layer that has the worst, per step
    mod4_.., mod128_..  the same by position modulo 4 and 128, one value per residue, None where no step has it; _steps  how many have
    limit               smallest of `limits` (one a layer, None: no limit); first_over  {step, layer: index, error, limit} of the
                        first row that is not within its layer's limit, None: every row is; absent where no layer has a limit
    """
    steps = errors.shape[2]
    ranked = torch.where(errors.isnan(), torch.inf, errors.double())
    out: dict[str, Any] = {
        "steps": steps, "median": [middle(errors[:, :, s]) for s in range(steps)], "worst": [worst(errors[:, :, s]) for s in range(steps)],
        "worst_in": [int(ranked[:, :, s].amax(1).argmax()) for s in range(steps)],
    }  # fmt: skip
    for modulus in MODULI:
        at = [position % modulus == residue for residue in range(modulus)]
        out[f"mod{modulus}_median"] = [middle(errors[:, here]) for here in at]
        out[f"mod{modulus}_worst"] = [worst(errors[:, here]) for here in at]
        out[f"mod{modulus}_steps"] = [int(here.sum()) for here in at]
    known = [limit for limit in limits if limit is not None]
    if known:
        out["limit"] = short(min(known))
        bound = torch.tensor([math.inf if limit is None else limit for limit in limits], dtype=torch.float64)[:, None, None]
        over = (~(errors <= bound)).any(1)  # [layers, steps]: NaN is not within a limit
        over &= torch.tensor([limit is not None for limit in limits])[:, None]
        first = next((s for s in range(steps) if bool(over[:, s].any())), None)
        out["first_over"] = None
        if first is not None:
            layer = int(over[:, first].int().argmax())
            out["first_over"] = {"step": first, "layer": layer, "error": worst(errors[layer, :, first]), "limit": short(float(bound[layer]))}
    return out
