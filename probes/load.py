"""What production holds after loading a checkpoint: each tensor, its dtype, scale range, and whether its bits are the stored ones.

    python -m probes.load --layers 0-3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import production
from probes.core import loading
from probes.core.cli import DEFAULT_CHECKPOINT, Answer, Table, answer, bare_parser, number, parse_layers
from production.launch import cuda_missing
from reference.checkpoint import Checkpoint
from reference.config import ModelConfig

DESCRIPTION = "Every tensor of a loaded checkpoint against its raw bytes, decoded in two ways; tensors filled, consumed, ignored."
EXAMPLE = "python -m probes.load --layers 0-3"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bare_parser("load", DESCRIPTION, EXAMPLE)
    parser.add_argument("--checkpoint", metavar="DIR", default=str(DEFAULT_CHECKPOINT), help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--layers", metavar="LIST", help="layers to show, e.g. 0-3,7 (default: all); all up to the highest are loaded")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where production's weights lie (default: cpu)")
    return answer("load", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    config = ModelConfig.from_dir(args.checkpoint)
    layers = parse_layers(args.layers, config.num_hidden_layers)
    if args.device == "cuda" and (missing := cuda_missing()):
        raise RuntimeError(missing)
    loaded = range(max(layers) + 1)
    model = production.load(args.checkpoint, device=args.device, layers=loaded)
    checkpoint = Checkpoint(args.checkpoint, loaded)
    found = {f"layers.{layer}": loading.compare(loading.layer_parameters(model.blocks[layer], layer), checkpoint) for layer in layers}
    found["model"] = loading.compare(loading.model_parameters(model), checkpoint)
    filled, wrong = loading.books(model, checkpoint)
    table = Table("held | stored, decoded apart", ["of", "tensors", "MB", "scales", "largest value", "checksum held", "stored", "different"])
    differing = Table("parameters that differ", ["name", "what", "first at", "got", "want"])
    for name, one in found.items():
        scales = f"{number(one.least_scale)} .. {number(one.largest_scale)}" if one.largest_scale else "-"
        table.add(name, one.tensors, one.size_bytes / 1e6, scales, one.largest_value, f"{one.held_checksum:08x}", f"{one.stored_checksum:08x}", len(one.differences))
        for difference in one.differences:
            differing.add(difference.name, difference.what, difference.element or "-", number(difference.got), number(difference.want))
    notes = [f"{filled} tensors filled, {len(checkpoint.specs)} in the checkpoint's loaded part, {len(checkpoint.ignored)} mtp tensors ignored", *wrong[:20]]
    values: dict[str, Any] = {
        "checkpoint": args.checkpoint, "device": args.device, "layers": list(layers), "filled": filled, "in_checkpoint": len(checkpoint.specs),
        "ignored": list(checkpoint.ignored), "books": wrong, "of": {name: asdict(one) for name, one in found.items()},
    }  # fmt: skip
    return Answer([table, differing] if differing.rows else [table], values, notes)


if __name__ == "__main__":
    sys.exit(main())
