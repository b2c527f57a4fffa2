"""What the sink does: its share of attention per head, and whether split keys count it once.

Part one runs attention alone on random keys, whole and cut into 2 and 7 splits, and compares it with one softmax over all
keys, with a merge of segments, and with the mistake of a sink in every segment; sinks of +-1e4 and +-inf too. Part two
(unless --alone) runs both models and takes the share from production's own queries and stored keys.

    python -m probes.sink --prompt short.txt:0:60 --layers 0-3 --steps 4
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probes.core.attention import PARTS, attend, merge_distances, stored_keys, weight_sum
from probes.core.cli import Answer, Table, answer, ask_of, probe_parser
from probes.pair import Pair, run_pair
from production import ops
from production.cache import encode_entries
from production.launch import Device, open_device
from reference.config import ModelConfig

DESCRIPTION = "Share of attention on the sink per head, sink counted once under key splits, extreme sinks."
EXAMPLE = "python -m probes.sink --prompt medium.txt:0:250 --layers 0-3 --steps 8"
SPLITS = (1, 2, 7)
EXTREMES = (-math.inf, -1e4, 1e4, math.inf)
SIZES = {"head_dim": 128, "qk_rope_head_dim": 64, "sliding_window": 448}


class _Sizes:
    """The two widths that packing a key needs."""

    head_dim, qk_rope_head_dim = SIZES["head_dim"], SIZES["qk_rope_head_dim"]


class SinkWorld:
    """Random window keys, as stored, and one query at the end of a full window per head and sink.

    q [t, h, d], keys [n, d] as decoded, sink [h]
    """

    def __init__(self, sinks: Sequence[float] = (-2.0, 0.0, 2.0, 5.0, 8.0), seed: int = 11) -> None:
        d, window = SIZES["head_dim"], SIZES["sliding_window"]
        generator = torch.Generator().manual_seed(seed)
        self.sink = torch.tensor(sinks, dtype=torch.float32)
        self.q = (2 * torch.randn(3, len(sinks), d, generator=generator)).bfloat16()
        rows = torch.randn(window, d, generator=generator).bfloat16().float()
        config: ModelConfig = _Sizes  # type: ignore[assignment]
        self.packed = encode_entries(rows, config)
        from production.cache import decode_entries

        self.keys = decode_entries(self.packed, config)

    def run(self, device: Device, splits: int, variant: str | None = None) -> Tensor:
        """Production's kernel on a full window, [t, h, d] fp32 on the CPU; variant None: its own choice."""
        where, window = device.torch_device, SIZES["sliding_window"]
        T, h, d = self.q.shape
        ring, q = self.packed[None].to(where), self.q.to(where)
        ring_position = torch.arange(window, dtype=torch.int32, device=where)[None]
        position, row = (torch.full((T,), n, dtype=torch.int32, device=where) for n in (window - 1, 0))
        out = torch.full((T, h, d), math.nan, dtype=torch.bfloat16, device=where)
        part_o, part_ml = (torch.full((T, splits, h, n), math.nan, device=where) for n in (d, 2))
        ops.sparse_attn(
            device, q, ring, ring_position, None, None, position, row, self.sink.to(where), out, window, 0, splits, part_o, part_ml, variant=variant
        )
        return out.float().cpu()


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("sink", DESCRIPTION, EXAMPLE)
    parser.add_argument("--alone", action="store_true", help="only the operation on random keys, no model")
    return answer("sink", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    device = open_device(ask.device)
    merges, extremes = operation(device)
    tables = [_merge_table(merges), _extreme_table(extremes)]
    values: dict[str, Any] = {"merge": merges, "extremes": extremes}
    if args.alone:
        return Answer(tables, {"device": ask.device, **values})
    names = ("attn.q", "attn.kv", "attn.visible", "attn.core")
    points = [f"layers.{n}.{name}" for n in ask.layers for name in names]
    points += [f"layers.{n}.attn.compressor" for n in ask.layers if ask.config.ratio(n)]
    pair = run_pair(ask, points)
    sinks = {n: _sink_of(ask.checkpoint, n, ask.layers_run) for n in ask.layers}
    found = [share_of(pair, n, phase, sinks[n]) for phase in ask.phases for n in ask.layers]
    return Answer([*tables, _share_table(found)], {**pair.facts(), **values, "layers_found": found})


def _sink_of(checkpoint: str, layer: int, layers: range | None) -> Tensor:
    from reference.checkpoint import Checkpoint

    return Checkpoint(checkpoint, layers).raw(f"layers.{layer}.attn.attn_sink")


def operation(device: Device) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Merges and extreme sinks of the kernel alone."""
    world, merges, extremes = SinkWorld(), [], []
    for splits in SPLITS:
        merges.append({"splits": splits, **merge_distances(world.run(device, splits), world.q, world.keys, world.sink, splits)})
    wild = SinkWorld(sinks=EXTREMES)
    for splits in SPLITS:
        out = wild.run(device, splits)
        for h, sink in enumerate(EXTREMES):
            row = out[:, h]
            extremes.append({"splits": splits, "sink": sink, "finite": bool(row.isfinite().all()), "largest": float(row.abs().max())})
    return merges, extremes


def share_of(pair: Pair, layer: int, phase: str, sink: Tensor) -> dict[str, Any]:
    """Where production's attention goes per head, from its own queries and stored keys; what its weights sum to."""
    c, who = pair.ask.config, "production"
    name, ratio = f"layers.{layer}.attn", c.ratio(layer)
    phases = ("prefill",) if phase == "prefill" else ("prefill", "decode")

    def position(part: str) -> Tensor:
        at, valid = pair.positions(part), pair.valid(part)
        return at if valid is None else torch.where(valid, at, -1)

    def joined(point: str) -> Tensor:
        return torch.cat([pair.value(who, f"{name}.{point}", part) for part in phases], 1)

    at = torch.cat([position(part) for part in phases], 1)
    keys = stored_keys(joined("kv"), at, joined("compressor") if ratio else None, ratio, int(at.max()) + 1)
    here = position(phase)
    found = attend(pair.value(who, f"{name}.q", phase), pair.value(who, f"{name}.visible", phase), here, keys, sink, c.sliding_window, ratio)
    share, valid = found.mass["sink"], here >= 0
    core = pair.value(who, f"{name}.core", phase)
    off = (weight_sum(core, found.out, share) - weight_sum(found.out.bfloat16(), found.out, share)).abs()[valid]
    out: dict[str, Any] = {"layer": layer, "kind": c.kind(layer), "phase": phase, "unstored": int(found.unstored[valid].sum())}
    out |= {part: [float(x) for x in found.mass[part][valid].mean(0)] for part in PARTS}
    return out | {"sink_min": float(share[valid].min()), "sink_max": float(share[valid].max()), "sum_off": float(off.max())}


def _merge_table(merges: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "attention alone, worst row rel-L2: one softmax over all keys against segments",
        ["splits", "production to global", "to a sink per segment", "FP32 merge to global", "sink per segment to global", "production uses"],
    )
    for one in merges:
        table.add(
            one["splits"], one["production_to_global"], one["production_to_sink_per_segment"], one["merge_to_global_fp32"],
            one["sink_per_segment_to_global"], one["production_uses"],
        )  # fmt: skip
    return table


def _extreme_table(extremes: Sequence[dict[str, Any]]) -> Table:
    table = Table("extreme sinks", ["splits", "sink", "finite", "largest |output|"])
    for one in extremes:
        table.add(one["splits"], one["sink"], "yes" if one["finite"] else "NO", one["largest"])
    return table


def _share_table(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "share of attention, mean over queries (least and most over heads); off = sum of the weights against 1 - sink share",
        ["layer", "kind", "phase", "sink", "most of a query", "window", "entries", "raw copies", "pooled copies", "off"],
    )
    for one in found:
        cells = [f"{min(one[part]):.3f}-{max(one[part]):.3f}" for part in ("sink", "window", "entries", "raw", "pooled")]
        table.add(one["layer"], one["kind"], one["phase"], cells[0], one["sink_max"], *cells[1:], one["sum_off"])
    return table


if __name__ == "__main__":
    sys.exit(main())
