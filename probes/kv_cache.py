"""Somebody's KV cache, entry by entry, against what the reference stores after the same tokens: most decode faults sit there.

The directory holds cache.json (token ids, page tables, strides) and cache.safetensors (the bytes): docs/trace.md. Each differing
entry is named with its page, slot and position, and what it holds instead. Numbers only; limits are made by `pytest parity/`.

    python -m probes.kv_cache their-cache --checkpoint checkpoints/tiny-dsv4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import reference
from probes.core.cli import DEFAULT_CHECKPOINT, Answer, CannotMeasureError, Table, answer, bare_parser
from probes.core.recorder import Recorder
from probes.outside.kvcache import ENTRIES, INDEXER, WINDOW, Found, Pool, compare, read_cache
from reference import ops
from reference.config import InputError, ModelConfig

DESCRIPTION = "Compare a described KV cache with the reference's entries after the same tokens."
EXAMPLE = "python -m probes.kv_cache their-cache --checkpoint checkpoints/tiny-dsv4"
POINTS = {WINDOW: "attn.kv", ENTRIES: "attn.compressor", INDEXER: "attn.indexer.compressor"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = bare_parser("kv_cache", DESCRIPTION, EXAMPLE)
    parser.add_argument("cache", metavar="DIR", help="directory with cache.json and cache.safetensors")
    parser.add_argument("--checkpoint", metavar="DIR", default=str(DEFAULT_CHECKPOINT), help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--above", metavar="X", type=float, default=0.1, help="an entry is told as different above this relative error (default: 0.1)")
    return answer("kv_cache", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    if not 0 < args.above < 1:
        raise InputError(f"--above {args.above}: expected a number between 0 and 1")
    config = ModelConfig.from_dir(args.checkpoint)
    cache = read_cache(args.cache, config)
    lengths = [len(row) for row in cache.tokens]
    stored = stored_by_reference(args.checkpoint, cache.tokens, cache.pools, cache.policy)
    found = [_compare(pool, stored[pool.layer, pool.store], lengths, config, args.above) for pool in cache.pools]
    if not sum(one.entries for one in found):
        raise CannotMeasureError(f"{args.cache}: after {max(lengths)} tokens its stores should hold no entry yet")
    values: dict[str, Any] = {
        "cache": str(args.cache), "checkpoint": str(args.checkpoint), "engine": cache.engine, "tokens": lengths, "above": args.above,
        "differ": sum(len(one.wrong) for one in found), "stores": [_values(one) for one in found],
    }  # fmt: skip
    return Answer([_table(found), _groups(found)], values)


def stored_by_reference(checkpoint: str, tokens: list[list[int]], pools: Sequence[Pool], policy: Any) -> dict[tuple[int, str], list[Tensor]]:
    """(layer, store) -> per row every entry [n, d] since the first token, as the reference stores it."""
    layers = range(max(pool.layer for pool in pools) + 1)
    width = max(map(len, tokens))
    model = reference.load(checkpoint, policy=policy if isinstance(policy, str) else tuple(policy), max_context=width, layers=layers)
    ids = torch.zeros(len(tokens), width, dtype=torch.int64)
    for b, row in enumerate(tokens):
        ids[b, : len(row)] = torch.tensor(row)
    points = sorted({f"layers.{pool.layer}.{POINTS[pool.store]}" for pool in pools})
    with Recorder(model, points) as trace:
        trace.begin("prefill")
        model.prefill(ids, model.new_state(len(tokens), width), torch.tensor([len(row) for row in tokens]))
    out = {}
    for pool in pools:
        shown = trace.get(f"layers.{pool.layer}.{POINTS[pool.store]}", "prefill")
        ratio = 1 if pool.store == WINDOW else model.config.ratio(pool.layer)
        out[pool.layer, pool.store] = [shown[b, ratio - 1 : len(row) : ratio] for b, row in enumerate(tokens)]
    return out


def _compare(pool: Pool, want: list[Tensor], lengths: Sequence[int], config: ModelConfig, above: float) -> Found:
    ratio = 1 if pool.store == WINDOW else config.ratio(pool.layer)
    numbers = [range(max(0, n - config.sliding_window), n) if pool.store == WINDOW else range(n // ratio) for n in lengths]
    return compare(pool, want, numbers, lambda n: (n + 1) * ratio - 1, lambda n: n * ratio, turning(config, pool), above, max(lengths))


def turning(config: ModelConfig, pool: Pool) -> Callable[[Tensor, Tensor], Tensor]:
    """(values [n, d], positions [n]) -> the values as if they stood that much later; indexer keys before their Hadamard."""
    r = config.qk_rope_head_dim
    if config.ratio(pool.layer):
        frequencies = ops.yarn_frequencies(r, config.compress_rope_theta, config.rope_factor, config.rope_original_max, config.rope_beta_fast, config.rope_beta_slow)
    else:
        frequencies = ops.rope_frequencies(r, config.rope_theta)

    def turn(values: Tensor, by: Tensor) -> Tensor:
        cos, sin = ops.rope_angles(by, frequencies)
        if not pool.format.index:
            return ops.rope(values, cos, sin)
        return ops.hadamard(ops.rope(ops.hadamard(values), cos, sin))

    return turn


def _at(place: Any) -> str:
    return "-" if place is None else f"page {place.page} slot {place.slot}"


def _values(one: Found) -> dict[str, Any]:
    error, row, number, place = one.worst
    wrong = [
        {"row": w.row, "entry": w.number, "position": w.position, "page": w.place.page if w.place else None, "slot": w.place.slot if w.place else None, "error": w.error, "what": w.what, "words": w.words, "shift": w.shift}
        for w in one.wrong[:100]
    ]  # fmt: skip
    worst = {"error": error, "row": row, "entry": number, "page": place.page if place else None, "slot": place.slot if place else None}
    return {"layer": one.layer, "store": one.store, "entries": one.entries, "worst": worst, "differ": len(one.wrong), "wrong": wrong}


def _table(found: Sequence[Found]) -> Table:
    table = Table("entries against the reference's", ["layer", "store", "entries", "median", "worst", "row", "entry", "where", "differ"])
    for one in found:
        error, row, number, place = one.worst
        median = float(torch.tensor(one.errors).median()) if one.errors else float("nan")
        table.add(one.layer, one.store, one.entries, median, error, row, number, _at(place), len(one.wrong))
    return table


def _groups(found: Sequence[Found]) -> Table:
    """What the differing entries hold, those of one kind and distance together, the first of each named."""
    table = Table("what differing entries hold", ["layer", "store", "what", "entries", "shift", "first", "position", "where", "it says"])
    for one in found:
        groups: dict[tuple[str, int | None], list[Any]] = {}
        for wrong in one.wrong:
            groups.setdefault((wrong.what, wrong.shift), []).append(wrong)
        for (what, shift), members in groups.items():
            first = members[0]
            table.add(one.layer, one.store, what, len(members), "-" if shift is None else shift, f"row {first.row} entry {first.number}", first.position, _at(first.place), first.words)
    return table


if __name__ == "__main__":
    sys.exit(main())
