"""Does the error grow while decoding? Row errors over decode steps and over the position modulo 4 and 128.

The free-running chain with production's choices replayed: by class of point, the worst layer of each kind, and every layer.

    python -m probes.drift --prompt short.txt:0:60 --steps 24
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probes.core.cli import Answer, Table, answer, ask_of, number, probe_parser
from probes.core.drift import drift_measurement
from probes.core.rows import row_errors, rows_of
from probes.pair import Pair, run_pair
from reference.config import InputError
from reference.points import spec_of

DESCRIPTION = "Drift of the error over decode steps and over the position modulo the compression ratios."
EXAMPLE = "python -m probes.drift --prompt medium.txt:0:250 --layers 0-3 --steps 64"
CLASSES = ("attn.kv", "attn.compressor", "attn.core", "attn.out", "ffn.out", "hc_ffn.X")


def main(argv: Sequence[str] | None = None) -> int:
    return answer("drift", probe_parser("drift", DESCRIPTION, EXAMPLE, steps=24), argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    if "decode" not in ask.phases or ask.steps < 2:
        raise InputError("drift needs --phase decode or both, and at least 2 steps")
    config = ask.config
    points = [f"layers.{n}.{name}" for n in ask.layers for name in CLASSES if config.ratio(n) or name != "attn.compressor"]
    pair = run_pair(ask, [*points, "logits"])
    position = pair.positions("decode")
    errors = {point: _errors(pair, point) for point in (*points, "logits")}
    found = []
    for name in CLASSES:
        for kind in dict.fromkeys(config.kind(n) for n in ask.layers):
            here = [errors[f"layers.{n}.{name}"] for n in ask.layers if config.kind(n) == kind and f"layers.{n}.{name}" in errors]
            if here:
                found.append({"class": name, "layers": kind, **drift_measurement(torch.stack(here).nan_to_num(-1.0).amax(0), position)})
    found.append({"class": "logits", "layers": "", **drift_measurement(errors["logits"], position)})
    each = {point: drift_measurement(value, position) for point, value in errors.items()}
    return Answer([_table(found)], {**pair.facts(), "classes": found, "points": each})


def _errors(pair: Pair, point: str) -> Tensor:
    """Row errors of the free-running chain [b, steps], a whole token a row."""
    got, want = (pair.value(who, point, "decode") for who in ("production", "reference"))
    error, _ = row_errors(got, want, rows_of(spec_of(point), "free", want.dim()))
    return error.masked_fill(error.isnan() & ~want.flatten(2).isnan().all(-1), math.inf)


def _table(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "row error over decode steps: median of the first and last third; slope = log10 per 100 steps; ratio over the median of all",
        ["point", "layers", "steps", "first", "last", "growth", "slope", "worst", "at step", "position mod 4: 0", "1", "2", "3", "worst mod 128", "ratio"],
    )
    for one in found:
        if not one["steps"]:
            continue
        cells = [number(value) for value in one["mod4"]]
        table.add(
            one["class"], one["layers"], one["steps"], one["first"], one["last"], one["growth"], number(one.get("slope")), one["worst"], one["worst_step"],
            *cells, one["mod128_worst"], one["mod128_ratio"],
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
