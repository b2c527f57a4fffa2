"""What the state of a run costs: widths seen in the first calls, bytes per token and layer kind, a million tokens, steps.

Bytes are those of tensors that can be reached from a state (on a GPU the allocator's); closed formulas stand beside them.
Presets need no weights: their footprint is measured on production's own classes, without memory elsewhere than on a GPU.

    python -m probes.memory --steps 200
    python -m probes.memory --preset pro --max-context 1048576
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import production
from probes.core import memory
from probes.core.cli import DEFAULT_CHECKPOINT, Answer, Table, answer, bare_parser, count, parse_layers, positive
from production import cache
from production.engine import count_allocations
from production.launch import cuda_missing
from production.model import State
from reference.config import InputError, ModelConfig

DESCRIPTION = "Observed widths, bytes per token and layer kind, footprint at a length, allocations and growth over decode steps."
EXAMPLE = "python -m probes.memory --preset pro --max-context 1048576"
PRESETS = Path(__file__).resolve().parents[1] / "checkpoints" / "presets"
CHUNK = 512  # production's default prefill chunk


def main(argv: Sequence[str] | None = None) -> int:
    parser = bare_parser("memory", DESCRIPTION, EXAMPLE)
    parser.add_argument("--preset", choices=("flash", "pro"), action="append", help="a published configuration, sized without weights; repeat (default: both)")
    parser.add_argument("--max-context", metavar="N", type=positive, default=memory.MILLION, help="tokens of the footprint (default: 1048576)")
    parser.add_argument("--checkpoint", metavar="DIR", default=str(DEFAULT_CHECKPOINT), help="what is loaded and run (default: the bundled one)")
    parser.add_argument("--layers", metavar="LIST", help="layers whose widths are observed, e.g. 0-3,7 (default: all)")
    parser.add_argument("--steps", metavar="N", type=count, default=1000, help="decode steps of one layer, of all on a GPU; 0: none (default: 1000)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where production's kernels run (default: cpu)")
    return answer("memory", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    config = ModelConfig.from_dir(args.checkpoint)
    layers = parse_layers(args.layers, config.num_hidden_layers)
    presets = {name: ModelConfig.from_dir(PRESETS / name) for name in args.preset or ("flash", "pro")}
    least = memory.lengths_for(config, CHUNK, 0)[0]
    for name, preset in presets.items():
        if not least <= args.max_context <= preset.max_position_embeddings:
            raise InputError(f"--max-context {args.max_context}: expected {least} to {preset.max_position_embeddings} for {name}")
    if args.device == "cuda" and (missing := cuda_missing()):
        raise RuntimeError(missing)
    device = torch.device(args.device)
    model = production.load(args.checkpoint, device=args.device, layers=range(max(layers) + 1))
    widths = {layer: memory.observed_widths(model, layer) for layer in layers}
    rates = [_rate(config, "checkpoint", kind, memory.lengths_for(config, CHUNK, 8192), device) for kind in memory.KINDS]
    footprints = []
    for name, preset in presets.items():
        lengths = sorted({least * 2, least * 8, args.max_context // 128 * 128 or least, least * 32})
        rates += [_rate(preset, name, kind, lengths, torch.device("meta")) for kind in memory.KINDS]
        footprints.append(_footprint(preset, name, args.max_context, device))
    tables = [_widths_table(widths), _rates_table(rates), _footprint_table(footprints)]
    values: dict[str, Any] = {
        "checkpoint": args.checkpoint, "device": args.device, "max_context": args.max_context,
        "widths": [{"layer": layer, **asdict(part), "disagreements": part.disagreements()} for layer, parts in widths.items() for part in parts],
        "rates": rates, "footprints": footprints,
    }  # fmt: skip
    if args.steps:
        slope = _slope(model, layers, args.steps)
        values["slope"] = slope
        tables.append(_slope_table(slope))
    notes = [f"prefill chunk {CHUNK}; wrong width: BF16 with indexer keys taken to be heads * dim wide; buffers: what a call works in, not kept per token"]
    return Answer(tables, values, notes)


def _rate(config: ModelConfig, of: str, kind: str, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    line, sizes = memory.kind_line(State, config, kind, lengths, CHUNK, device)
    cost = memory.expected(config, kind, CHUNK)
    return {
        "of": of, "kind": kind, "lengths": list(lengths), "bytes": sizes, "constant_bytes": line.constant, "bytes_per_token": line.per_token,
        "off_the_line": line.off, "formula_constant": cost.constant, "formula_per_token": cost.per_token,
        "bf16_per_token": memory.expected(config, kind, CHUNK, "bf16").per_token,
    }  # fmt: skip


def _footprint(config: ModelConfig, of: str, tokens: int, device: torch.device) -> dict[str, Any]:
    measured = memory.footprint(State, config, tokens, CHUNK, device)
    ways = {way: memory.expected_total(config, tokens, CHUNK, way) for way in ("published", "bf16", "wrong width")}
    said = sum(cache.formula(config, 1, tokens, CHUNK).values())
    return {
        "of": of, "tokens": tokens, "kv_bytes": measured.cache, "measured_by": measured.how, "production_says": said, "formula_bytes": ways["published"],
        "buffer_bytes": measured.buffers, "bf16_bytes": ways["bf16"], "wrong_width_bytes": ways["wrong width"],
    }  # fmt: skip


def _slope(model: Any, layers: Sequence[int], steps: int) -> dict[str, Any]:
    by_kind = {model.config.kind(layer): layer for layer in reversed(layers)}
    layer = next(by_kind[kind] for kind in ("csa", "hca", "window") if kind in by_kind)
    capacity = steps + 256
    whole = model.device.torch_device.type == "cuda"
    run = memory.resized(model, capacity) if whole else memory.one_layer(model, layer, capacity)
    seen = memory.decode_slope(run, steps, count_allocations)
    return {"of": f"{len(model.layers)} layers" if whole else f"layer {layer}", **asdict(seen), "spread": seen.spread}


def _widths_table(widths: dict[int, list[memory.Part]]) -> Table:
    table = Table("widths in the first calls: values handed to the store, bytes written, bytes kept", ["layer", "part", "values", "by weights", "written", "kept", "format"])
    for layer, parts in widths.items():
        for part in parts:
            table.add(layer, part.name, part.values, part.weights, part.written, part.held, part.wanted)
    return table


def _rates_table(rates: Sequence[dict[str, Any]]) -> Table:
    table = Table("bytes of one layer = constant + rate * tokens (measured | closed formula)", ["of", "kind", "lengths", "constant", "formula", "B/token", "formula", "bf16"])
    for one in rates:
        table.add(one["of"], one["kind"], len(one["lengths"]), f"{one['constant_bytes']:.0f}", f"{one['formula_constant']:.0f}", one["bytes_per_token"], one["formula_per_token"], one["bf16_per_token"])
    return table


def _footprint_table(footprints: Sequence[dict[str, Any]]) -> Table:
    table = Table("KV bytes of one row, GB", ["of", "tokens", "measured", "formula", "production says", "bf16", "wrong width", "buffers", "measured by"])
    for one in footprints:
        cells = [f"{one[key] / 1e9:.3f}" for key in ("kv_bytes", "formula_bytes", "production_says", "bf16_bytes", "wrong_width_bytes", "buffer_bytes")]
        table.add(one["of"], one["tokens"], *cells, one["measured_by"])
    return table


def _slope_table(slope: dict[str, Any]) -> Table:
    table = Table(f"{slope['steps']} decode steps of {slope['of']}", ["allocations", "state grew", "process' tensors grew", "sampled", "samples", "spread, MB"])
    table.add(slope["allocations"], slope["state_growth"], slope["live_growth"], slope["source"], len(slope["samples"]), slope["spread"] / 1e6)
    return table


if __name__ == "__main__":
    sys.exit(main())
