"""What the state of the real Flash and Pro models takes at 1,048,576 tokens, all layers, on one card.

    python -m bench.memory                       # --preset flash|pro --max-context N --chunk N

Production's own cache, backup and workspace are allocated on the card, one after the other, and the allocator is read before
and after. Without a card the exact bytes of the same tensors are counted and nothing is allocated. Judged: the cache against the
closed formula (1 %), the cache and the whole state against the promise (15 GB a row).
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import Bench, text_table
from bench.synthetic import preset
from probes.core import memory
from production.cache import Backup, KVCache, entry_capacity
from production.model import State
from production.workspace import SCORE_BYTES, Workspace, score_queries
from reference.config import ModelConfig

PROMISE_BYTES = 15e9
FORMULA_LIMIT = 0.01


@dataclass(frozen=True)
class Part:
    """Bytes of one part of a state. reserved: what the allocator took from the card for it; tensors: exact bytes of its tensors."""

    name: str
    allocated: int
    reserved: int
    tensors: int


class _Scale:
    """Weighs what is made: by the allocator on a card, by the tensors elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[Part] = []
        self.held: list[Any] = []

    def _now(self) -> tuple[int, int]:
        if self.device.type != "cuda":
            return 0, 0
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)

    def add(self, name: str, made: Any, without: Any = ()) -> Part:
        """made: a function without arguments."""
        before = self._now()
        thing = made()
        after = self._now()
        tensors = memory.held_bytes(thing, [*without, *self.held])
        part = Part(name, after[0] - before[0], after[1] - before[1], tensors) if after[0] else Part(name, tensors, tensors, tensors)
        self.held.append(thing)
        self.parts.append(part)
        return part


def weigh(config: ModelConfig, tokens: int, chunk: int, device: torch.device) -> list[Part]:
    """Cache, backup, workspace, and then a whole State made by its own constructor, which must weigh the same and more."""
    where = device if device.type == "cuda" else torch.device("meta")
    parts = _parts(config, tokens, chunk, where)
    _forget(where)
    whole = _Scale(where)
    parts.append(whole.add("state", lambda: memory.empty_state(State, config, tokens, chunk, where)))
    del whole
    _forget(where)
    return parts


def _parts(config: ModelConfig, tokens: int, chunk: int, where: torch.device) -> list[Part]:
    scale, layers = _Scale(where), range(config.num_hidden_layers)
    scale.add("cache", lambda: KVCache(config, len(layers), 1, tokens, chunk, where))
    scale.add("backup", lambda: Backup(scale.held[0]))
    scale.add("workspace", lambda: Workspace(config, layers, 1, chunk, tokens, where))
    return scale.parts


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(bench: Bench, name: str, tokens: int, chunk: int) -> None:
    config = preset(name)
    parts = weigh(config, tokens, chunk, bench.torch_device)
    cache, whole = parts[0], parts[-1]
    ways = {way: memory.expected_total(config, tokens, chunk, way) for way in ("published", "bf16", "wrong width")}
    entry, key = memory.record_bytes(config.head_dim, config.qk_rope_head_dim), memory.key_bytes(config)
    kinds = [config.kind(layer) for layer in range(config.num_hidden_layers)]
    entries = kinds.count("csa") * (tokens // 4) * (entry + key) + kinds.count("hca") * (tokens // 128) * entry
    scores = 4 * score_queries(1, chunk, tokens) * entry_capacity(4, tokens)
    shape = f"{config.num_hidden_layers} layers, {tokens:,} tokens, chunk {chunk}"
    table = [[p.name, f"{p.allocated / 1e9:.3f}", f"{p.reserved / 1e9:.3f}", f"{p.tensors / 1e9:.3f}"] for p in parts]
    how = "the device's allocator" if bench.torch_device.type == "cuda" else "exact bytes of tensors, nothing allocated"
    print(f"\n{name}: {shape}; {how}\n" + text_table(["part", "allocated GB", "reserved GB", "tensors GB"], table))
    print(
        f"formula {ways['published'] / 1e9:.3f} GB; entries and keys alone ({entry} + {key} bytes) {entries / 1e9:.3f} GB; in BF16 {ways['bf16'] / 1e9:.3f} GB; "
        f"keys taken to be heads x dim wide {ways['wrong width'] / 1e9:.1f} GB; indexer scores {scores / 1e9:.3f} GB of the workspace, "
        f"those of a whole chunk would be {4e-9 * chunk * (tokens // 4):.3f} GB"
    )
    bench.judge("cache against formula", name, shape, lambda: (abs(cache.allocated / ways["published"] - 1), FORMULA_LIMIT))
    bench.judge("cache against promise, GB", name, shape, lambda: (cache.allocated / 1e9, PROMISE_BYTES / 1e9))
    bench.judge("indexer scores held at once, GB", name, shape, lambda: (scores / 1e9, SCORE_BYTES / 1e9))
    bench.judge("whole state against promise, GB", name, shape, lambda: (whole.allocated / 1e9, PROMISE_BYTES / 1e9))
    for part in parts:
        bench.record(f"{part.name}, allocated", name, shape, part.allocated / 1e9, "GB")
    bench.note(**{
        f"{name}, chunk {chunk}": {
            "tokens": tokens, "scores": scores, **{p.name: {"allocated": p.allocated, "reserved": p.reserved, "tensors": p.tensors} for p in parts},
            "formula": ways["published"], "entries_and_keys": entries, "bf16": ways["bf16"], "wrong_width": ways["wrong width"],
        }
    })  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--preset", choices=("flash", "pro"), action="append", help="repeat for both (default: both)")
        parser.add_argument("--max-context", metavar="N", type=int, default=memory.MILLION, help="tokens a row (default: 1048576)")
        parser.add_argument("--chunk", metavar="N", type=int, action="append", help="prefill chunk; repeat for more (default: 512 and 4096)")

    bench = Bench("memory", argv, options, timed=False)
    for name in bench.args.preset or ("flash", "pro"):
        for chunk in bench.args.chunk or (512, 4096):
            with bench.section(f"{name}, chunk {chunk}"):
                measure(bench, name, bench.args.max_context, chunk)
    bench.finish()


if __name__ == "__main__":
    main()
