"""Numbers for the report, taken from one audit run: residual growth, Sinkhorn, visible keys, logits, greedy text.

No opinion: what passes is decided in gates.py. Tests: parity/unit/test_measure.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from parity.audit import Audit
from parity.evaluate import whole_phase
from probes.core.measure import matrix_distance, sinkhorn_measurement
from probes.core.records import Measurement

MOST_ITERATIONS = 200  # further Sinkhorn iterations tried to find how many reach 1e-6


def measurements(audit: Audit) -> list[Measurement]:
    """Everything that the recorded passes allow; a phase that never ran gives nothing."""
    found: list[Measurement] = []
    for phase in audit.plan.phases:
        if phase not in audit.done:
            continue
        for layer in audit.plan.layers:
            found += residual(audit, layer, phase)
            for half in ("hc_attn", "hc_ffn"):
                found += sinkhorn(audit, layer, phase, half)
            found += visible(audit, layer, phase)
        found += logits(audit, phase)
    found += greedy(audit)
    for phase, seconds in audit.seconds.items():
        found.append(Measurement("seconds", phase=phase, values={"seconds": seconds}))
    return found


def residual(audit: Audit, layer: int, phase: str) -> list[Measurement]:
    """Largest and RMS |X| after a layer, over the phase, both models on their own chains."""
    point = f"layers.{layer}.hc_ffn.X"
    values: dict[str, Any] = {}
    for who in ("reference", "production"):
        X = whole_phase(audit, who, point, phase)
        if X is None:
            return []
        values[f"{who}_absmax"] = float(X.abs().max())
        values[f"{who}_rms"] = float(X.double().square().mean().sqrt())
    values["ratio"] = values["production_rms"] / values["reference_rms"] if values["reference_rms"] else math.nan
    return [Measurement("residual", layer=layer, phase=phase, point=point, values=values)]


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
    return [Measurement("visible", layer=layer, phase=phase, point=point, values=values)]


def logits(audit: Audit, phase: str) -> list[Measurement]:
    """KL from the reference's distribution, agreement of the most likely token, worst row."""
    got, want = (whole_phase(audit, who, "logits", phase) for who in ("production", "reference"))
    if got is None or want is None:
        return []
    p, q = torch.log_softmax(want.double(), -1), torch.log_softmax(got.double(), -1)
    kl = (p.exp() * (p - q)).sum(-1)
    agree = got.argmax(-1) == want.argmax(-1)
    values = {
        "rows": int(kl.shape[0]), "kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "kl_worst_row": int(kl.argmax()),
        "top1_agreement": float(agree.double().mean()), "flips": int((~agree).sum()), "largest_error": float((got - want).abs().max()),
    }  # fmt: skip
    return [Measurement("logits", phase=phase, point="logits", values=values)]


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
