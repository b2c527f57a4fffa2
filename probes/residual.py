"""Growth of the residual streams |X| per layer, half and step in both models, and what made it: comb, or post * y.

comb's spectral norm bounds what it may add (used: share of that bound); what is left of X after post * y and the comb part
(remainder) is rounding, or a fault of the mixing.

python -m probes.residual --prompt short.txt:0:60 --steps 16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probes.core.cli import Answer, Table, answer, ask_of, number, probe_parser
from probes.core.drift import slope
from probes.core.measure import residual_measurement
from probes.pair import Pair, run_pair

DESCRIPTION = "Max and RMS of the residual streams per layer, half and step, production beside the reference."
EXAMPLE = "python -m probes.residual --prompt short.txt:0:60 --layers 0-7 --steps 16"
HALVES = ("attn", "ffn")
WHO = ("production", "reference")


def main(argv: Sequence[str] | None = None) -> int:
    return answer("residual", probe_parser("residual", DESCRIPTION, EXAMPLE), argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    sites = [(n, half) for n in ask.layers for half in HALVES]
    points = ["embed"]
    for n, half in sites:
        points += [f"layers.{n}.hc_{half}.{part}" for part in ("pre", "post", "comb", "X")] + [f"layers.{n}.{half}.out"]
        points += [_before(n, half)]
    pair = run_pair(ask, list(dict.fromkeys(points)))
    found = [_site(pair, n, half, phase) for phase in ask.phases for n, half in sites]
    tables = [_sizes(found), _origin(found)]
    if pair.steps():
        tables.append(_over_steps(pair, found))
    return Answer(tables, {**pair.facts(), "sites": found})


def _before(layer: int, half: str) -> str:
    """The point that shows the streams a half starts from."""
    if half == "ffn":
        return f"layers.{layer}.hc_attn.X"
    return f"layers.{layer - 1}.hc_ffn.X" if layer else "embed"


def _streams(pair: Pair, who: str, point: str, phase: str) -> Tensor:
    value: Tensor = pair.value(who, point, phase)
    return value[:, :, None, :].expand(-1, -1, pair.ask.config.hc_mult, -1) if point == "embed" else value


def _site(pair: Pair, layer: int, half: str, phase: str) -> dict[str, Any]:
    out: dict[str, Any] = {"layer": layer, "half": half, "phase": phase}
    at = f"layers.{layer}.hc_{half}"
    for who in WHO:
        X = pair.value(who, f"{at}.X", phase)
        pre, post, comb = (pair.value(who, f"{at}.{part}", phase) for part in ("pre", "post", "comb"))
        y = pair.value(who, f"layers.{layer}.{half}.out", phase)
        out[who] = residual_measurement(
            X, _streams(pair, who, _before(layer, half), phase), comb, pre, post, y, pair.valid(phase)
        )
        if phase == "decode":
            out[who]["rms_per_step"] = [residual_measurement(X[:, i : i + 1])["rms"] for i in range(X.shape[1])]
    if phase == "decode":
        steps = [torch.tensor(out[who]["rms_per_step"], dtype=torch.float64) for who in WHO]
        out["drift"] = slope((steps[0] / steps[1]).log()) * (len(steps[0]) - 1)
    out["ratio"] = out["production"]["rms"] / out["reference"]["rms"] if out["reference"]["rms"] else float("nan")
    return out


def _sizes(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "|X| after each half; at = batch row, query or step, stream, channel",
        ["layer", "half", "phase", "max", "at", "ref max", "rms", "ref rms", "rms ratio", "rms per stream (production)"],
    )
    for one in found:
        p, r = one["production"], one["reference"]
        table.add(
            one["layer"], one["half"], one["phase"], p["absmax"], ",".join(map(str, p["at"])), r["absmax"], p["rms"], r["rms"],
            one["ratio"], " ".join(map(number, p["stream_rms"])),
        )  # fmt: skip
    return table


def _origin(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "growth over the half and what made it, over the rms it started from (production | reference)",
        ["layer", "half", "phase", "growth", "ref", "worst query", "comb X", "ref", "post y", "ref", "pre X", "ref", "comb norm", "used", "remainder"],
    )
    for one in found:
        p, r = one["production"], one["reference"]
        table.add(
            one["layer"], one["half"], one["phase"], p["growth"], r["growth"], p["growth_max"],
            p["from_comb"], r["from_comb"], p["from_post"], r["from_post"], p["into_block"], r["into_block"], p["comb_norm"], p["comb_bound"], p["remainder"],
        )  # fmt: skip
    return table


def _over_steps(pair: Pair, found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "rms of X over decode steps; drift = slope of log(production / reference) over all of them",
        ["layer", "half", "model", "first", "least", "most", "last", "drift"],
    )
    for one in found:
        if one["phase"] == "decode":
            for who in WHO:
                steps = one[who]["rms_per_step"]
                drift = one["drift"] if who == "production" else "-"
                table.add(one["layer"], one["half"], who, steps[0], min(steps), max(steps), steps[-1], drift)
    return table


if __name__ == "__main__":
    sys.exit(main())
