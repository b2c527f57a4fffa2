"""Numbers for the report, taken from one audit run: residual growth, Sinkhorn, visible keys, attention mass, logits, greedy
text, drift.

No opinion: what passes is decided in gates.py. Tests: parity/unit/test_measure.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from parity import witness
from parity.audit import Audit
from parity.evaluate import whole_phase
from parity.gates import GATES
from probes.core.attention import PARTS
from probes.core.drift import drift_measurement
from probes.core.measure import (
    FAULTS,
    matrix_distance,
    nearest_step,
    ranges_text,
    residual_measurement,
    sinkhorn_measurement,
    sinkhorn_residuals,
    sinkhorn_trail,
    visible_ranges,
)
from probes.core.records import Measurement
from probes.core.rows import row_errors, rows_of
from probes.core.text import degeneration, logits_measurement
from reference.points import spec_of

MOST_ITERATIONS = 1000  # further Sinkhorn iterations tried to find how many reach 1e-6
# Classes of points whose error is followed over the steps.
DRIFTING = ("attn.kv", "attn.compressor", "attn.core", "attn.out", "ffn.out", "hc_ffn.X")


def measurements(audit: Audit) -> list[Measurement]:
    """Everything that the recorded passes allow; a phase that never ran gives nothing."""
    found: list[Measurement] = []
    for phase in audit.plan.phases:
        if phase not in audit.done:
            continue
        for layer in audit.plan.layers:
            found += residual(audit, layer, phase)
            for half in ("hc_attn", "hc_ffn"):
                found += growth(audit, layer, phase, half)
                found += sinkhorn(audit, layer, phase, half)
            found += visible(audit, layer, phase)
            found += mass(audit, layer, phase)
        found += logits(audit, phase)
        if phase == "decode":
            found += residual_steps(audit)
            found += drift(audit)
    found += greedy(audit)
    for phase, seconds in audit.seconds.items():
        found.append(Measurement("seconds", phase=phase, values={"seconds": seconds}))
    return found


def residual(audit: Audit, layer: int, phase: str) -> list[Measurement]:
    """Largest and RMS |X| after a layer, over the phase, both models on their own chains; per stream; health by the ratio."""
    point = f"layers.{layer}.hc_ffn.X"
    values: dict[str, Any] = {}
    streams: dict[str, list[float]] = {}
    for who in ("reference", "production"):
        X = whole_phase(audit, who, point, phase)
        if X is None:
            return []
        values[f"{who}_absmax"] = float(X.abs().max())
        values[f"{who}_rms"] = float(X.double().square().mean().sqrt())
        streams[who] = X.double().square().mean((0, 2)).sqrt().tolist()
    values["ratio"] = values["production_rms"] / values["reference_rms"] if values["reference_rms"] else math.nan
    ratios = [got / want if want else math.nan for got, want in zip(streams["production"], streams["reference"], strict=True)]
    values["stream_ratio"] = ratios
    gate, floor = GATES["residual"], audit.floor("free", point)
    limit = gate.k("free") * floor.error + gate.eps("free")
    values["health"] = "healthy" if all(abs(ratio - 1) <= limit for ratio in (*ratios, values["ratio"])) else "suspicious"
    return [Measurement("residual", layer=layer, phase=phase, point=point, values=values)]


def residual_steps(audit: Audit) -> list[Measurement]:
    """|X| after the deepest judged layer at decode steps, at most 40 of them: is growth over steps at fixed depth flat?"""
    layer, steps = max(audit.plan.layers), audit.plan.steps
    point = f"layers.{layer}.hc_ffn.X"
    got, want = (whole_phase(audit, who, point, "decode") for who in ("production", "reference"))
    if got is None or want is None:
        return []
    sides = {name: x.double().unflatten(0, (audit.batch, steps)) for name, x in (("production", got), ("reference", want))}
    found = []
    for step in sorted({round(i * (steps - 1) / max(1, min(steps, 40) - 1)) for i in range(min(steps, 40))}):
        values: dict[str, Any] = {}
        for name in ("reference", "production"):
            X = sides[name][:, step]
            values |= {f"{name}_absmax": float(X.abs().max()), f"{name}_rms": float(X.square().mean().sqrt())}
        values["ratio"] = values["production_rms"] / values["reference_rms"] if values["reference_rms"] else math.nan
        found.append(Measurement("residual", layer=layer, phase="decode", step=step, point=point, values=values))
    return found


def growth(audit: Audit, layer: int, phase: str, half: str) -> list[Measurement]:
    """What made the streams grow over one half: comb, pre and post * y, both models on the reference's own input."""
    values: dict[str, Any] = {"half": half}
    for who, name in (("isolated", "production"), ("reference", "reference")):
        if not _all_fired(audit, who, phase, [f"layers.{layer}.{half}.{part}" for part in ("X", "pre", "post", "comb")]):
            return []
        parts = witness.mixing_parts(audit, who, layer, half, phase)
        valid = audit.valid_over(phase, _steps(audit, phase))
        found = residual_measurement(parts["X"], parts["before"], parts["comb"], parts["pre"], parts["post"], parts["y"], valid)
        values |= {f"{key}_{name}": found.get(key) for key in ("growth", "growth_max", "from_comb", "from_post", "into_block", "comb_norm", "comb_bound", "remainder")}
    return [Measurement("residual growth", layer=layer, phase=phase, point=f"layers.{layer}.{half}.X", values=values)]


def _steps(audit: Audit, phase: str) -> tuple[int, int] | None:
    return None if phase == "prefill" else (0, audit.plan.steps - 1)


def _all_fired(audit: Audit, who: str, phase: str, points: list[str]) -> bool:
    expected = 1 if phase == "prefill" else audit.plan.steps
    return all(audit.fired(who, point, phase, _steps(audit, phase)) >= expected for point in points)


def sinkhorn(audit: Audit, layer: int, phase: str, half: str) -> list[Measurement]:
    """Sums, norm and distance of comb at one site; production isolated against the reference."""
    found = {}
    for name in ("comb", "pre", "post"):
        for who in ("isolated", "reference"):
            value = whole_phase(audit, who, f"layers.{layer}.{half}.{name}", phase)
            if value is None:
                return []
            found[name, who] = value
    comb, want = found["comb", "isolated"][None], found["comb", "reference"][None]  # [1, queries, n, n]
    values = sinkhorn_measurement(comb, found["pre", "isolated"][None], found["post", "isolated"][None], iterations=MOST_ITERATIONS)
    distance = {f"matrix_{name}": value for name, value in matrix_distance(comb, want).items()}
    c, valid = audit.config, audit.valid_over(phase, _steps(audit, phase))
    before = witness.streams_before(audit, "reference", layer, half, phase)[valid][None]
    trail = sinkhorn_trail(witness.sinkhorn_start(audit, before, layer, half), c.hc_sinkhorn_iters, c.hc_eps)
    more = values.get("more_iterations")
    values |= {
        "iterations": c.hc_sinkhorn_iters, "iterations_for_1e-6": None if more is None else c.hc_sinkhorn_iters + more,
        "residual_per_iteration": sinkhorn_residuals(trail), "nearest_step": nearest_step(comb, trail, f"{c.hc_sinkhorn_iters} columns")[0],
    }  # fmt: skip
    worst = values.get("row_deviation_at")
    if worst is not None:
        b, s = (int(i) for i in valid.nonzero()[worst[1]])
        values["row_deviation_at"] = [b, s]
        values["row_deviation_position"] = int(audit.positions(phase, _steps(audit, phase))[b, s])
    return [Measurement("sinkhorn", layer=layer, phase=phase, point=f"layers.{layer}.{half}.comb", values={"site": half, **values, **distance})]


def visible(audit: Audit, layer: int, phase: str) -> list[Measurement]:
    """Queries whose set of keys differs, and one of them spelled out."""
    point = f"layers.{layer}.attn.visible"
    got, want = (whole_phase(audit, who, point, phase) for who in ("isolated", "reference"))
    if got is None or want is None:
        return []
    W = audit.config.sliding_window
    differing, example = 0, None
    for row, (g, w) in enumerate(zip(got, want, strict=True)):
        sets = [[set(x[x >= 0].tolist()) for x in (side[:W], side[W:])] for side in (g, w)]
        if sets[0] != sets[1]:
            differing += 1
            if example is None:
                example = {
                    "query": row,
                    "window_missing": sorted(sets[1][0] - sets[0][0])[:32], "window_extra": sorted(sets[0][0] - sets[1][0])[:32],
                    "entries_missing": sorted(sets[1][1] - sets[0][1])[:32], "entries_extra": sorted(sets[0][1] - sets[1][1])[:32],
                }  # fmt: skip
    last = want[-1]
    values: dict[str, Any] = {
        "queries": int(want.shape[0]), "different": differing,
        "last_query_window_keys": int((last[:W] >= 0).sum()), "last_query_entries": int((last[W:] >= 0).sum()),
    }  # fmt: skip
    if example is not None:
        values["example"] = example
    ranges = visible_ranges(last, W, audit.config.ratio(layer))
    values |= {"last_query_window": ranges_text(ranges["window"]), "last_query_entries_stand_for": ranges_text(ranges["entries"])}
    if _all_fired(audit, "production", phase, [point]):
        rule = witness.visible_rule(audit, "production", layer, phase)
        values["against_rule"] = {name: rule[name] for name in FAULTS if rule[name]["queries"]} or "every key is due, none is missing"
    return [Measurement("visible", layer=layer, phase=phase, point=point, values=values)]


def mass(audit: Audit, layer: int, phase: str) -> list[Measurement]:
    """Shares of attention on window, entries, raw and pooled copies of the same tokens, and the sink; both on one input."""
    names = [f"layers.{layer}.attn.{name}" for name in ("q", "kv", "visible", *(["compressor"] if audit.config.ratio(layer) else []))]
    if not all(_all_fired(audit, who, part, names) for who in ("isolated", "reference") for part in ("prefill", phase)):
        return []
    got, want = (witness.masses(audit, who, layer, phase) for who in ("isolated", "reference"))
    valid = audit.valid_over(phase, _steps(audit, phase))
    values: dict[str, Any] = {}
    for part in PARTS:
        values |= {
            f"{part}_reference": float(want[part][valid].mean()), f"{part}_production": float(got[part][valid].mean()),
            f"{part}_difference": float((got[part] - want[part])[valid].abs().max()),
        }  # fmt: skip
    values["sink_per_head"] = want["sink"][valid].mean(0).tolist()
    return [Measurement("attention mass", layer=layer, phase=phase, point=f"layers.{layer}.attn.core", values=values)]


def logits(audit: Audit, phase: str) -> list[Measurement]:
    """KL from the reference's distribution, agreement of the most likely tokens with margins, worst position."""
    got, want = (whole_phase(audit, who, "logits", phase) for who in ("production", "reference"))
    if got is None or want is None:
        return []
    values = logits_measurement(got, want)
    b, s = (int(i) for i in audit.valid_over(phase, _steps(audit, phase)).nonzero()[values["kl_worst_row"]])
    values["kl_worst_position"] = int(audit.positions(phase, _steps(audit, phase))[b, s])
    return [Measurement("logits", phase=phase, point="logits", values=values)]


def drift(audit: Audit) -> list[Measurement]:
    """Row errors over decode steps and over the position modulo 4 and 128, by class of point: worst layer of each kind."""
    found = []
    position = audit.positions("decode", _steps(audit, "decode"))
    for who, mode in (("isolated", "isolated"), ("production", "free")):
        for kind in ("window", "csa", "hca"):
            layers = [layer for layer in audit.plan.layers if audit.config.kind(layer) == kind]
            for name in DRIFTING:
                errors = _row_errors(audit, who, mode, [f"layers.{layer}.{name}" for layer in layers])
                if errors is not None:
                    values = {"class": name, "layers": kind, "mode": mode, **drift_measurement(errors, position)}
                    found.append(Measurement("drift", phase="decode", values=values))
    errors = _row_errors(audit, "production", "free", ["logits"])
    if errors is not None:
        found.append(Measurement("drift", phase="decode", values={"class": "logits", "layers": "", "mode": "free", **drift_measurement(errors, position)}))
    return found


def _row_errors(audit: Audit, who: str, mode: str, points: list[str]) -> Tensor | None:
    """Worst row error of a query over several points [b, steps]; NaN: no row. None: no such point, or it never fired."""
    steps, worst = _steps(audit, "decode"), None
    for point in points:
        if point not in audit.reference.taps.points or not all(_all_fired(audit, side, "decode", [point]) for side in (who, "reference")):
            continue
        got, want = (audit.values(side, point, "decode", steps) for side in (who, "reference"))
        if got.shape != want.shape:
            continue
        error, _ = row_errors(got, want, rows_of(spec_of(point), mode, want.dim()))
        error = error.flatten(2).nan_to_num(-1.0, posinf=math.inf).amax(-1) if error.dim() > 2 else error.nan_to_num(-1.0, posinf=math.inf)
        worst = error if worst is None else worst.maximum(error)
    return None if worst is None else worst.masked_fill(worst < 0, math.nan)


def greedy(audit: Audit) -> list[Measurement]:
    """Both continuations as text, when a test asked for them."""
    result = audit.finished_greedy
    if result is None:
        return []
    decode = _decoder(audit)
    return [
        Measurement(
            "greedy", phase="decode",
            values={
                "row": b, "tokens": result.tokens, "reference_text": decode(result.reference[b]), "production_text": decode(result.production[b]),
                "first_difference": result.first_difference[b], "margin": result.margin[b], "logit_error": result.logit_error[b],
                "reference_degeneration": degeneration(result.reference[b]), "production_degeneration": degeneration(result.production[b]),
            },
        )
        for b in range(len(result.reference))
    ]  # fmt: skip


def _decoder(audit: Audit) -> Any:
    path = Path(audit.plan.checkpoint_dir) / "tokenizer.json"
    if not path.is_file():
        return lambda ids: json.dumps(ids)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
