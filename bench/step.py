"""One decode step of a few layers of real width from a captured graph: its time against the sum of floors, and what each kernel takes.

    python -m bench.step --device cuda                   # Flash: window, CSA, HCA, CSA and the head; batch 1 and 8
    python -m bench.step --contexts 1048576 --batches 1 --variants portable

The state is not computed: every layer's cache is filled with random valid bytes. Judged: captured logits have the bits of a step
that is launched kernel by kernel, and are finite. Floor: bytes that the step must read at the copy rate of the same run.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.harness import Bench, text_table
from bench.million import SMALL
from bench.synthetic import preset, synthetic_model
from production.model import State, Transformer
from reference.config import ModelConfig

STEPS = 24  # that are timed, replayed one after the other
SEED = 3
# What a kernel does, by the beginning of its name; the first that fits. Floors go by the same words.
PARTS = {
    "project_hidden": "projections of the hidden state", "project_latents": "projections of the latent query", "linear_fp8": "output projections",
    "linear_bf16": "head", "project_router": "router", "project_shared": "shared w1 w3", "experts_": "experts w1 w3", "project_down": "w2 of all experts",
    "indexer": "index scores", "score": "index scores", "prepare": "index scores", "topk": "top-k", "sparse_attn": "attention", "flash": "attention",
    "merge": "attention", "hc_": "mixing of streams", "mix": "mixing of streams", "project": "mixing of streams",
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    bench = Bench("step", argv, _options)
    args = bench.args
    contexts = [int(n) for n in (args.contexts or ("640" if bench.small else "8192,131072,1048576")).split(",")]
    ratios = tuple(int(ratio) for ratio in args.ratios.split(","))
    config = preset(args.width, ratios, **(SMALL if bench.small else {}))
    began = time.perf_counter()
    if not bench.small:
        bench.device.prebuild()
    model = synthetic_model(config, bench.device, max(contexts), 64 if bench.small else 512, args.variants)
    bench.device.synchronize()
    print(f"{model.describe()}; made in {time.perf_counter() - began:.1f} s", flush=True)
    bench.note(width=args.width, ratios=list(ratios), variants=model.plan.name)
    for batch in (int(b) for b in args.batches.split(",")):
        with bench.section(f"batch {batch}"):
            Steps(bench, model, batch, args.profile).run(contexts)
    bench.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", choices=("flash", "pro"), default="flash", help="whose layers (default: flash)")
    parser.add_argument("--ratios", metavar="LIST", default="0,4,128,4", help="0 window, 4 CSA, 128 HCA (default: 0,4,128,4)")
    parser.add_argument("--contexts", metavar="LIST", help="tokens held before the step (default: 8192,131072,1048576; 640 on the CPU)")
    parser.add_argument("--batches", metavar="LIST", default="1,8", help="rows (default: 1,8)")
    parser.add_argument("--variants", choices=("portable", "fast"), help="plan of kernel variants (default: the device's own)")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="leave out what each kernel takes")


# ---- a state that nobody computed ----


def random_entries(entries: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Fills [b, n, entry_bytes] u8 with codes that are no NaN, rotary dims of order 1 and scales around 2^-7."""
    d, r = config.head_dim, config.qk_rope_head_dim
    plain, scales = d - r, (d - r) // 64
    for part in (part for row in entries for part in row.split(1 << 18)):
        part.zero_()
        codes = torch.randint(0, 256, (len(part), plain), generator=generator, device=part.device, dtype=torch.uint8)
        part[:, :plain] = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)
        rotary = torch.randn(len(part), r, generator=generator, device=part.device).bfloat16()
        part[:, plain : plain + 2 * r] = rotary.view(torch.uint8)
        part[:, plain + 2 * r : plain + 2 * r + scales] = torch.randint(118, 122, (len(part), scales), generator=generator, device=part.device, dtype=torch.uint8)


def fill(state: State, length: int) -> None:
    """Every row of every layer holds `length` tokens of random bytes, the same for the same length."""
    cache, config, where = state.cache, state.model.config, state.model.device.torch_device
    generator = torch.Generator(where).manual_seed(SEED)
    for layer in cache.layers:
        random_entries(layer.ring, config, generator)
        slots = layer.ring.shape[1]
        held = torch.arange(max(0, length - slots), length, device=where)
        layer.ring_position.fill_(-1)
        layer.ring_position[:, held % slots] = held.to(torch.int32)
        if layer.entries is not None:
            random_entries(layer.entries[:, : length // layer.ratio], config, generator)
        if layer.keys is not None and layer.scales is not None:
            layer.keys.random_(0, 256, generator=generator)
            layer.scales.random_(121, 124, generator=generator)  # within two binades a key, as keys of the small model are: wider ones are scored by blocks
        for kept in (layer.state, layer.index_state):
            if kept is not None:
                kept.kv.normal_(generator=generator)
                kept.gate.normal_(generator=generator)
    cache.lengths.fill_(length)
    cache.mirror[:] = [[length] * state.batch for _ in cache.mirror]


# ---- floors ----


@dataclass(frozen=True)
class Floor:
    part: str
    size: float  # bytes


def floors(c: ModelConfig, batch: int, length: int) -> list[Floor]:
    """Bytes that a step must read, by part: every weight once, of experts those that a random choice takes, every visible key."""
    D, h, d, I, E, k = c.hidden_size, c.num_attention_heads, c.head_dim, c.moe_intermediate_size, c.n_routed_experts, c.num_experts_per_tok  # noqa: E741
    groups, entry = c.o_groups * c.o_lora_rank, d + c.qk_rope_head_dim + 8
    chosen = E * (1 - (1 - k / E) ** batch)
    found: dict[str, float] = {}

    def add(part: str, size: float) -> None:
        found[part] = found.get(part, 0.0) + size

    for layer in range(c.num_hidden_layers):
        ratio = c.ratio(layer)
        add("projections of the hidden state", D * (c.q_lora_rank + d))
        add("projections of the latent query", h * d * c.q_lora_rank)
        add("output projections", groups * h * d / c.o_groups + D * groups)
        keys = float(min(length, c.sliding_window))
        if ratio:
            add("projections of the hidden state", 4 * D * c.overlap(ratio) * d)
            keys += min(c.index_topk, length // ratio) if ratio == 4 else length // ratio
        if ratio == 4:
            hi, di = c.index_n_heads, c.index_head_dim
            add("projections of the hidden state", D * (8 * di + 2 * hi))
            add("projections of the latent query", hi * di * c.q_lora_rank)
            add("index scores", batch * length / 4 * (di / 2 + di / 32))
            add("top-k", batch * length)
        add("attention", batch * keys * entry)
        add("mixing of streams", 2 * 4 * (2 + c.hc_mult) * c.hc_mult * c.hc_mult * D)
        add("router", 2 * E * D)
        add("experts w1 w3", chosen * 2 * D * I * (1 / 2 + 1 / 32))
        add("shared w1 w3", 2 * D * I)
        add("w2 of all experts", chosen * D * I * (1 / 2 + 1 / 32) + D * I)
    add("mixing of streams", 4 * c.hc_mult * c.hc_mult * D)
    add("head", 2 * c.vocab_size * D)
    return [Floor(part, size) for part, size in found.items()]


def part_of(kernel: str) -> str:
    return next((part for name, part in PARTS.items() if kernel.startswith(name)), "norms, rotations, stores, sums")


# ---- steps ----


class Steps:
    """Steps of one batch at several lengths, from one captured graph."""

    def __init__(self, bench: Bench, model: Transformer, batch: int, profile: bool) -> None:
        self.bench, self.model, self.batch, self.profile = bench, model, batch, profile and not bench.small
        self.state = model.new_state(batch)
        where = bench.torch_device
        self.tokens = torch.randint(0, model.config.vocab_size, (batch,), generator=torch.Generator().manual_seed(SEED))
        self.logits = torch.empty(batch, model.config.vocab_size, device=where)

    def run(self, contexts: list[int]) -> None:
        self.graph = self.model.capture(self.state)
        kernels = sorted(((count, kernel) for (_, kernel), count in self.graph.graph.counts.items()), reverse=True)
        print(f"\nbatch {self.batch}: {self.graph.graph.launches} launches a step, {self.graph.graph.launches / len(self.model.layers):.1f} a layer with the head's: "
              + ", ".join(f"{count} {kernel}" for count, kernel in kernels), flush=True)  # fmt: skip
        self.bench.note(**{f"launches of batch {self.batch}": [[kernel, count] for count, kernel in kernels]})
        for context in contexts:
            length = context - (STEPS + 16)
            us = None if self.bench.small else self.time(length)
            name = f"{len(self.model.layers)} layers and head, batch {self.batch}, {context:,} tokens"
            rate = self.bench.ceilings.copy_gbs if self.bench.ceilings is not None else None
            parts = floors(self.model.config, self.batch, length)
            floor = sum(f.size for f in parts) / rate * 1e-3 if rate else None
            self.bench.judge("decode step", self.model.plan.name, name, partial(self.check, length), us=us, floor_us=floor,
                             share=floor / us if floor and us else None, launches=self.graph.graph.launches, bytes=sum(f.size for f in parts))  # fmt: skip
            if self.profile and rate:
                self.show(length, name, parts, rate)

    def check(self, length: int) -> tuple[float, float]:
        """Logits that differ between an eager and a captured step of the same state; NaN where one is not finite."""
        seen = []
        for step in (partial(self.model.decode, self.tokens, self.state), partial(self.graph.decode, self.tokens)):
            fill(self.state, length)
            self.logits.fill_(torch.nan)
            step(out=self.logits)
            seen.append(self.logits.clone())
        different = float((seen[0].view(torch.int32) != seen[1].view(torch.int32)).sum())
        return different if bool(seen[0].isfinite().all()) else float("nan"), 0.0

    def replays(self, count: int) -> None:
        """Bare replays: the host's note of the lengths stays, the device's goes on."""
        for _ in range(count):
            self.graph.graph.replay()

    def time(self, length: int) -> float:
        """us of a replay, STEPS of them one after the other; the median of three."""
        taken: list[float] = []
        for _ in range(3):
            fill(self.state, length)
            self.replays(4)
            self.bench.device.synchronize()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            self.replays(STEPS)
            ended.record()
            ended.synchronize()
            taken.append(1e3 * began.elapsed_time(ended) / STEPS)
        fill(self.state, length)
        self.bench.device.synchronize()
        wall = time.perf_counter()
        for _ in range(8):
            self.graph.decode(self.tokens, out=self.logits)
        self.bench.device.synchronize()
        wall = 1e6 * (time.perf_counter() - wall) / 8
        print(f"  replays {', '.join(f'{us:.1f}' for us in taken)} us; the whole call with its checks {wall:.1f} us", flush=True)
        return sorted(taken)[1]

    def show(self, length: int, name: str, parts: list[Floor], rate: float) -> None:
        """Time of each part and each kernel beside its floor, by CUPTI."""
        fill(self.state, length)
        self.replays(2)
        self.bench.device.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self.replays(8)
            self.bench.device.synchronize()
        rows = sorted(((e.self_device_time_total / 8, e.count / 8, e.key) for e in found.key_averages() if e.self_device_time_total), reverse=True)
        spent: dict[str, float] = {}
        for us, _, kernel in rows:
            spent[part_of(kernel)] = spent.get(part_of(kernel), 0.0) + us
        least = {f.part: f.size / rate * 1e-3 for f in parts}
        lines = [[part, f"{us:.1f}", f"{least.get(part, 0.0):.1f}", f"{us / least[part]:.2f}" if least.get(part) else "-"] for part, us in sorted(spent.items(), key=lambda item: -item[1])]
        total = sum(spent.values())
        print(f"\n{name}: {total:.1f} us in kernels, floors {sum(least.values()):.1f} us\n" + text_table(["part", "us", "floor us", "x floor"], lines), flush=True)
        each = [[kernel[:60], f"{count:.0f}", f"{us:.1f}", f"{us / count:.2f}"] for us, count, kernel in rows]
        print(text_table(["kernel", "launches", "us", "us each"], each) + "\n", flush=True)
        self.bench.note(**{f"kernels at {name}": [[kernel, count, us] for us, count, kernel in rows], f"parts at {name}": spent})


if __name__ == "__main__":
    main()
