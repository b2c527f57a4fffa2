"""The price of the formats beside the noise and beside production's error: four runs of one prompt, free-running.

    exact       the reference without any rounding, on its own choices
    reference   the same under production's policy, on its own choices: its distance to exact is what the formats cost
    twins       the reference with reordered sums: the noise floor
    production  against the reference that replays its choices

Measured, never judged: a format's price is a decision, and no limit of this project hangs on it. Prefill only.
Tests: parity/unit/test_choices.py.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import Tensor

import reference
from parity.audit import Audit
from parity.choices import Exchanged
from probes.core.records import Measurement
from probes.core.rows import row_errors


def measure(exchanged: Exchanged, layer: int) -> Measurement | None:
    """One layer's streams. None: production or a tap is missing."""
    audit, point = exchanged.audit, f"layers.{layer}.hc_ffn.X"
    exchanged.ensure("prefill")
    own = exchanged.value("own", point, "prefill")
    if own is None or not all(audit.fired(who, point, "prefill", None) for who in ("production", "reference")):
        return None
    exact, valid, floor = _exact(audit).get(point, "prefill"), audit.prefill_valid, audit.floor("free", point)
    values: dict[str, Any] = {}
    values |= _distance("formats", own, exact, valid, floor.unit)
    values |= {"noise_typical": floor.typical([("prefill", None)]), "noise_worst": floor.error}
    values |= _distance("production", audit.values("production", point, "prefill"), audit.values("reference", point, "prefill"), valid, floor.unit)
    values |= _distance("production_to_exact", audit.values("production", point, "prefill"), exact, valid, floor.unit)
    return Measurement("ladder", layer=layer, phase="prefill", point=point, values=values)


def _exact(audit: Audit) -> Any:
    """Trace of the exact chain's streams, one prefill of all layers that run."""
    if "exact streams" not in audit.memo:

        def make() -> Any:
            with contextlib.redirect_stderr(io.StringIO()):
                return reference.load(audit.plan.checkpoint_dir, policy="exact", layers=range(len(audit.layers_run)), max_context=audit.plan.max_context)

        points = [f"layers.{layer}.hc_ffn.X" for layer in audit.plan.layers]
        audit.memo["exact streams"] = audit.chain("exact streams", points, make).prefill(audit.tokens, audit.lengths)
    return audit.memo["exact streams"]


def _distance(name: str, got: Tensor, want: Tensor, valid: Tensor, unit: float) -> dict[str, float]:
    """Median and worst row rel-L2 over whole tokens, measured like free-running rows."""
    least = torch.full(valid.shape, unit, dtype=torch.float64) if unit else None
    error = row_errors(got, want, want.dim() - 2, least)[0][valid].nan_to_num(torch.inf)
    return {f"{name}_typical": float(error.median()), f"{name}_worst": float(error.max())}
