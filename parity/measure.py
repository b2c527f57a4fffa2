"""Numbers for the report, taken from one audit run: residual growth, Sinkhorn, visible keys, attention mass, logits, greedy
text, drift; and step by step, query by query, what the report draws.

No opinion: what passes is decided in gates.py. Tests: parity/unit/test_measure.py.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity import gates, witness
from parity.audit import Audit
from parity.evaluate import whole_phase
from probes.core.attention import PARTS
from probes.core.drift import drift_measurement, middle, short, step_series, worst
from probes.core.measure import (
    FAULTS,
    matrix_distance,
    nearest_step,
    ranges_of,
    ranges_text,
    residual_measurement,
    sinkhorn_measurement,
    sinkhorn_residuals,
    sinkhorn_trail,
    visible_ranges,
)
from probes.core.records import Measurement, State
from probes.core.rows import absent_rows, row_errors, rows_of
from probes.core.text import degeneration, logits_measurement
from probes.core.trace import grow_last
from reference.points import spec_of

MOST_FLIPS = 20  # of the most likely token, spelled out; all are counted
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
        found += visible_queries(audit, phase)
        found += logits(audit, phase)
        if phase == "decode":
            found += residual_steps(audit)
            found += drift(audit)
            found += drift_steps(audit)
            found += logits_steps(audit)
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
    gate, floor = audit.gate("residual"), audit.floor("free", point)
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
    values |= {f"{axis}_deviation_reference": float((want.double().sum(dim) - 1).abs().max()) for axis, dim in (("column", -2), ("row", -1))}
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


MOST_FURTHER_LAYERS = 2  # beside the first of each kind: layers where a query sees other keys
MOST_RANGES = 512


def visible_queries(audit: Audit, phase: str) -> list[Measurement]:
    """A few queries of the first judged layer of each kind, key by key: what both models read, on the reference's own input."""
    kinds: dict[str, int] = {}
    for layer in audit.plan.layers:
        kinds.setdefault(audit.config.kind(layer), layer)
    found, further = [], 0
    for layer in audit.plan.layers:
        first = layer in kinds.values()
        if not first and further >= MOST_FURTHER_LAYERS:
            continue
        pair = _seen_pair(audit, "isolated", f"layers.{layer}.attn.visible", phase)
        if pair is None:
            continue
        (got, want), steps = pair
        differing = differing_keys(got, want, audit.config.sliding_window).masked_fill(~audit.valid_over(phase, steps), 0)
        if not first and not bool(differing.any()):
            continue
        further += not first
        for (b, s), why in chosen_queries(audit, layer, phase, steps, differing).items():
            values = {"chosen": ", ".join(why), "row": b, **keys_of_query(audit, layer, got[b, s], want[b, s], int(audit.positions(phase, steps)[b, s]))}
            found.append(Measurement("visible query", layer=layer, phase=phase, step=s if phase == "decode" else None, point=f"layers.{layer}.attn.visible", values=values))
    return found


def _seen_pair(audit: Audit, who: str, point: str, phase: str) -> tuple[tuple[Tensor, Tensor], tuple[int, int] | None] | None:
    """(got, want) over a phase, decode up to the last step that both models reached, and those steps. None: the tap never fired."""
    if phase == "prefill":
        if not all(audit.fired(side, point, phase, None) for side in (who, "reference")):
            return None
        return (audit.values(who, point, phase), audit.values("reference", point, phase)), None
    last = -1
    while last + 1 < audit.plan.steps and all(audit.fired(side, point, phase, (last + 1, last + 1)) for side in (who, "reference")):
        last += 1
    if last < 0:
        return None
    return (audit.values(who, point, phase, (0, last)), audit.values("reference", point, phase, (0, last))), (0, last)


def differing_keys(got: Tensor, want: Tensor, window: int) -> Tensor:
    """[b, s]: keys that only one of two [b, s, W + entries] reads, or reads twice."""
    total = torch.zeros(want.shape[:2], dtype=torch.int64)
    for g, w in ((got[..., :window], want[..., :window]), (got[..., window:], want[..., window:])):
        width = max(g.shape[-1], w.shape[-1])
        g, w = (grow_last(x, width, -1).sort(-1).values for x in (g, w))
        for b, s in (g != w).any(-1).nonzero().tolist():
            have, due = Counter(g[b, s][g[b, s] >= 0].tolist()), Counter(w[b, s][w[b, s] >= 0].tolist())
            total[b, s] += (have - due).total() + (due - have).total()
    return total


def chosen_queries(audit: Audit, layer: int, phase: str, steps: tuple[int, int] | None, differing: Tensor) -> dict[tuple[int, int], list[str]]:
    """(row, query) -> why it is shown: the ends of the phase, the edges of window and groups, and the worst one."""
    position, valid, W = audit.positions(phase, steps), audit.valid_over(phase, steps), audit.config.sliding_window
    group = max(audit.config.ratio(n) for n in range(audit.config.num_hidden_layers))
    chosen: dict[tuple[int, int], list[str]] = {}

    def choose(why: str, mask: Tensor) -> None:
        at = (mask & valid).nonzero()
        if len(at):
            b, s = at[int(at[:, 1].argmin())].tolist()
            chosen.setdefault((b, s), []).append(why)

    if phase == "prefill":
        choose("first query that lost a key to the window", position == W)
        choose("last prompt token", position == audit.lengths[:, None] - 1)
    else:
        choose("first decode step", position == audit.lengths[:, None])
        choose("first decode step that lost a key to the window", position == W)
        if group:
            choose(f"first decode step that completes a group of {group} tokens", (position + 1) % group == 0)
        choose("last decode step", position == audit.lengths[:, None] + (steps or (0, 0))[1])
    if bool(differing.any()):
        choose(f"most keys differ ({int(differing.max())})", differing == differing.max())
    else:
        pair = _seen_pair(audit, "isolated", f"layers.{layer}.attn.core", phase)
        if pair is not None and pair[1] == steps:
            error, _ = row_errors(*pair[0], pair[0][1].dim() - 2)
            error = torch.where(error.isnan(), torch.inf, error).masked_fill(~valid, -1.0)
            if float(error.max()) > 0:
                choose("largest error of attn.core, same keys", error == error.max())
    return chosen


def keys_of_query(audit: Audit, layer: int, got: Tensor, want: Tensor, position: int) -> dict[str, Any]:
    """One query's keys [W + entries] of both models as inclusive ranges: window positions, and numbers of compressed entries.

    complete  entries whose group is complete at the query; topk  most that a CSA query reads; different  keys of one model alone
    """
    c, W = audit.config, audit.config.sliding_window
    ratio = c.ratio(layer)
    values: dict[str, Any] = {
        "kind": c.kind(layer), "position": position, "window": W, "ratio": ratio, "complete": (position + 1) // ratio if ratio else 0,
        "topk": c.index_topk if c.kind(layer) == "csa" else None,
    }  # fmt: skip
    different = 0
    for part, cut in (("window", slice(0, W)), ("entries", slice(W, None))):
        have, due = (Counter(int(k) for k in side[cut].tolist() if k >= 0) for side in (got, want))
        lists = {
            "reference": list(due), "production": list(have), "missing": list(set(due) - set(have)), "extra": list(set(have) - set(due)),
            "twice": [k for k, n in have.items() if n > 1],
        }  # fmt: skip
        for name, keys in lists.items():
            ranges = ranges_of(keys)
            values[f"{part}_{name}"] = [list(r) for r in ranges[:MOST_RANGES]]
            if len(ranges) > MOST_RANGES:
                values[f"{part}_{name}_ranges_left_out"] = len(ranges) - MOST_RANGES
        values[f"{part}_keys"] = {"reference": due.total(), "production": have.total()}
        different += (have - due).total() + (due - have).total()
    return {**values, "different": different}


def mass(audit: Audit, layer: int, phase: str) -> list[Measurement]:
    """Shares of attention on window, entries, raw and pooled copies of the same tokens, and the sink; both on one input."""
    names = [f"layers.{layer}.attn.{name}" for name in ("q", "kv", "visible", *(["compressor"] if audit.config.ratio(layer) else []))]
    if not all(_all_fired(audit, who, part, names) for who in ("isolated", "reference") for part in ("prefill", phase)):
        return []
    got, want = (witness.masses(audit, who, layer, phase) for who in ("isolated", audit.reference_of("isolated")))
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


def logits_steps(audit: Audit) -> list[Measurement]:
    """Every decode step: largest difference of a logit, KL from the reference, rows whose most likely token is the same; flips in words."""
    pair = _seen_pair(audit, "production", "logits", "decode")
    if pair is None:
        return []
    got, want = (x.double() for x in pair[0])  # [b, steps, vocab]
    p, q = torch.log_softmax(want, -1), torch.log_softmax(got, -1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)  # below 0 by rounding alone; NaN stays
    error = (got - want).abs().amax(-1)
    error = torch.where(got.isnan().any(-1), math.nan, error)
    best, other = want.argmax(-1), got.argmax(-1)
    flipped = (best != other) | got.isnan().any(-1)
    flips, decode = [], _decoder(audit) if bool(flipped.any()) else None
    for s, b in flipped.T.nonzero().tolist()[:MOST_FLIPS]:
        assert decode is not None
        broken = bool(got[b, s].isnan().any())
        flips.append({
            "step": s, "row": b, "reference_text": decode([int(best[b, s])]), "production_text": "NaN in the logits" if broken else decode([int(other[b, s])]),
            "margin": short(float(want[b, s, best[b, s]] - want[b, s, other[b, s]])), "logit_error": float(error[b, s]),
        })  # fmt: skip
    steps = range(got.shape[1])
    values = {
        "steps": len(steps), "rows": got.shape[0], "largest_error": [worst(error[:, s]) for s in steps], "kl": [worst(kl[:, s]) for s in steps],
        "same_top1": [int((~flipped[:, s]).sum()) for s in steps], "flips": int(flipped.sum()), "first_flips": flips,
    }  # fmt: skip
    return [Measurement("logits steps", phase="decode", point="logits", values=values)]


def drift_steps(audit: Audit) -> list[Measurement]:
    """Row errors of the free-running streams after each layer, and of the logits, at every decode step, beside their gates' limits."""
    found, by_kind = [], {kind: [n for n in audit.plan.layers if audit.config.kind(n) == kind] for kind in ("window", "csa", "hca")}
    each: dict[str, tuple[Tensor, float | None]] = {}
    for point in [*(f"layers.{layer}.hc_ffn.X" for layer in audit.plan.layers), "logits"]:
        pair = _seen_pair(audit, "production", point, "decode")
        if pair is not None and pair[0][0].shape == pair[0][1].shape:
            each[point] = _free_errors(audit, point, *pair[0]), _limit_of(audit, point)
    for layer in audit.plan.layers:
        point = f"layers.{layer}.hc_ffn.X"
        if point in each:
            errors, limit = each[point]
            one = step_series(errors[None], _positions(audit, errors), [limit])
            ranked = torch.where(errors.isnan(), torch.inf, errors).amax(0)
            values = {
                "layers": audit.config.kind(layer), "steps": one["steps"], "median": middle(errors), "worst": worst(errors), "worst_step": int(ranked.argmax()),
                "limit": one.get("limit"), "first_over": (one.get("first_over") or {}).get("step"),
            }  # fmt: skip
            found.append(Measurement("drift layer", layer=layer, phase="decode", point=point, values=values))
    for kind, points in [*((kind, [f"layers.{n}.hc_ffn.X" for n in layers]) for kind, layers in by_kind.items()), ("logits", ["logits"])]:
        points = [point for point in points if point in each]
        if points:
            steps = min(each[point][0].shape[1] for point in points)
            errors = torch.stack([each[point][0][:, :steps] for point in points])
            one = step_series(errors, _positions(audit, errors[0]), [each[point][1] for point in points])
            if kind != "logits":
                judged = [int(point.split(".")[1]) for point in points]
                one["worst_in"] = [judged[i] for i in one["worst_in"]]
                if one.get("first_over"):
                    one["first_over"] |= {"layer": judged[one["first_over"]["layer"]]}
            else:
                del one["worst_in"]
                if one.get("first_over"):
                    del one["first_over"]["layer"]
            found.append(Measurement("drift steps", phase="decode", point="logits" if kind == "logits" else "hc_ffn.X", values={"layers": kind, "mode": "free", **one}))
    return found


def _positions(audit: Audit, errors: Tensor) -> Tensor:
    """[b, steps] positions of errors [b, steps] that begin at the first decode step."""
    return audit.positions("decode", (0, errors.shape[1] - 1))


def _free_errors(audit: Audit, point: str, got: Tensor, want: Tensor) -> Tensor:
    """Row errors [b, steps] of the free-running chain, measured as its gate measures them."""
    unit = audit.floor("free", point).unit
    least = torch.full(want.shape[:2], unit, dtype=torch.float64) if unit else None
    return row_errors(got, want, rows_of(spec_of(point), "free", want.dim()), least)[0]


def _limit_of(audit: Audit, point: str) -> float | None:
    """What the gate of a free-running point allows its worst row; None: it cannot judge."""
    gate, floor = audit.gate(spec_of(point).name), audit.floor("free", point)
    judged = gates.judge(0.0, floor.error if floor.rows else math.nan, gate.eps("free"), gate.k("free"))
    return judged.limit if judged.state is State.PASS else None


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
        dims = rows_of(spec_of(point), mode, want.dim())
        error, _ = row_errors(got, want, dims)
        error = error.masked_fill(error.isnan() & ~absent_rows(want, dims), math.inf)  # not a number is no missing row
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
                "reference_text_parts": text_parts(decode, result.reference[b], result.first_difference[b]),
                "production_text_parts": text_parts(decode, result.production[b], result.first_difference[b]),
                "reference_degeneration": degeneration(result.reference[b]), "production_degeneration": degeneration(result.production[b]),
            },
        )
        for b in range(len(result.reference))
    ]  # fmt: skip


def text_parts(decode: Any, tokens: list[int], first: int | None) -> list[str]:
    """A continuation in three: before the first token that differs, that token, and the rest; both empty where none does."""
    if first is None:
        return [decode(tokens), "", ""]
    return [decode(tokens[:first]), decode(tokens[first : first + 1]), decode(tokens[first + 1 :])]


def _decoder(audit: Audit) -> Any:
    path = Path(audit.plan.checkpoint_dir) / "tokenizer.json"
    if not path.is_file():
        return lambda ids: json.dumps(ids)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
