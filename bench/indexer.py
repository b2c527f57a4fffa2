"""Indexer scores over FP4 keys: decode over 262,144 keys, prefill of 4096 queries against 64K, 256K and 1M tokens.

    python -m bench.indexer --out DIR                      # on the card; --only decode, --only prefill, --only wgmma
    python -m bench.indexer --device cpu                   # checks only

64 heads of 128, as in Flash and Pro. Every score is checked against FP64 sums of the formats' values (prefill: of 32 queries),
and that nothing else is written; prefill's bits against decode's. Public: DeepGEMM's kernels over FP8 keys (68 against 132 B a key).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from bench.harness import Bench
from production import ops

HEADS, DI = 64, 128
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
LIMIT = 1e-5  # of a row's relative L2 error: parity/gates.py, indexer_score
DECODE_PUBLIC = {1: 12.9, 8: 72.0, 64: 540.0}  # us, by batch
PREFILL_PUBLIC = {16_384: 988.0, 65_536: 3872.0, 262_144: 17516.0}  # us, by keys
DECODE_PREDICTED = {"int8": {1: 8.5, 8: 47.0, 64: 350.0}, "wgmma": {1: 13.0, 8: 60.0, 64: 430.0}, "wgmma_16": {1: 12.0, 8: 52.0, 64: 370.0}}
PREFILL_PREDICTED = {"int8_tiles": 16.5, "int8_tiles_8": 17.5, "wgmma_tiles": 17.0}  # ms for 2^30 scores


class World:
    """Random codes and scales: keys [b, E], queries at the given positions; row t of a query's batch."""

    def __init__(self, bench: Bench, position: Tensor, row: Tensor, b: int, E: int, hi: int, spread: int, seed: int) -> None:
        where, T = bench.torch_device, len(position)
        g = torch.Generator(device=where).manual_seed(seed)
        self.device, self.E = bench.device, E
        self.table = torch.tensor(CODES, dtype=torch.float64, device=where)
        self.q_codes = torch.randint(16, (T, hi, DI), generator=g, device=where)
        self.q_scales = torch.randint(124 - spread, 127, (T, hi, 4), generator=g, device=where)
        self.q = self.numbers(self.q_codes, self.q_scales).bfloat16()
        self.weights = torch.randn(T, hi, generator=g, device=where)
        self.keys = torch.randint(256, (b, E, DI // 2), generator=g, device=where, dtype=torch.int32).to(torch.uint8)
        self.scales = torch.randint(124 - spread, 127, (b, E, 4), generator=g, device=where, dtype=torch.int32).to(torch.uint8)
        self.position, self.row = position.to(where, torch.int32), row.to(where, torch.int32)
        self.score = torch.full((T, E), torch.nan, device=where)
        self.scratch = torch.zeros(ops.indexer_scratch(T, hi), dtype=torch.uint8, device=where)

    def numbers(self, codes: Tensor, scales: Tensor) -> Tensor:
        values: Tensor = self.table[codes].unflatten(-1, (4, 32)) * torch.exp2(scales.double() - 127)[..., None]
        return values.flatten(-2)

    def run(self, variant: str) -> None:
        ops.indexer_score(self.device, self.q, self.weights, self.keys, self.scales, self.position, self.row, self.score, 4, variant=variant, scratch=self.scratch)

    def key_numbers(self, row: int) -> Tensor:
        packed = self.keys[row].long()
        return self.numbers(torch.stack((packed & 15, packed >> 4), -1).flatten(-2), self.scales[row].long())

    def error(self, variant: str, tokens: Sequence[int]) -> float:
        """Worst relative L2 error of a row over the given tokens, NaN when an entry was not written or wrongly so."""
        self.score.fill_(torch.nan)
        self.run(variant)
        complete = ((self.position + 1) // 4).clamp_max(self.E)
        entry, keys, row = torch.arange(self.E, device=self.score.device), torch.empty(0), -1
        wrong = sum(int(((entry >= complete[t : t + 64, None]) != self.score[t : t + 64].isneginf()).sum()) + int(self.score[t : t + 64].isnan().sum()) for t in range(0, len(self.q), 64))
        if wrong:
            return float("nan")
        worst = 0.0
        for t in tokens:
            if int(self.row[t]) != row:
                row = int(self.row[t])
                keys = self.key_numbers(row)
            n = int(complete[t])
            want = ((self.q[t].double() @ keys[:n].T).relu() * self.weights[t].double()[:, None]).sum(0)
            worst = max(worst, float((self.score[t, :n].double() - want).norm() / want.norm()))
        return worst

    def differ(self, variant: str, tokens: Sequence[int]) -> float:
        """Entries in which `variant` and decode of the same tokens alone differ."""
        self.run(variant)
        which = torch.tensor(list(tokens), device=self.score.device)
        alone = torch.full((len(which), self.E), torch.nan, device=self.score.device)
        ops.indexer_score(self.device, self.q[which], self.weights[which], self.keys, self.scales, self.position[which], self.row[which], alone, 4, variant="int8")
        return float((alone.view(torch.int32) != self.score[which].view(torch.int32)).sum())


def within(value: Callable[..., float], limit: float, *args: object) -> tuple[float, float]:
    return value(*args), limit


def runnable(bench: Bench, variants: Iterable[str], hi: int = HEADS) -> list[str]:
    """Those that this device, and this number of heads, can run."""
    return [v for v in variants if "wgmma" not in v or (bench.device.arch == "sm_90a" and hi > 16)]


def decode(bench: Bench, b: int, E: int) -> None:
    shape = f"decode b {b}, {E:,} keys"
    variants = [v for v in runnable(bench, DECODE_PREDICTED) if bench.wants("indexer_score", v, shape)]
    if not variants:
        return
    world = World(bench, torch.full((b,), 4 * E - 1), torch.arange(b), b, E, HEADS, spread=0, seed=b)
    for v in variants:
        bench.case(
            kernel="indexer_score", variant=v, shape=shape, run=partial(world.run, v), check=partial(within, world.error, LIMIT, v, range(b)), bytes=68.0 * b * E,
            flops=2.0 * HEADS * DI * b * E, unit="fp8", public_us=DECODE_PUBLIC.get(b), predicted_us=DECODE_PREDICTED[v].get(b),
        )  # fmt: skip


def prefill(bench: Bench, T: int, E: int) -> None:
    shape = f"prefill {T} queries, {E:,} keys"
    variants = [v for v in runnable(bench, PREFILL_PREDICTED) if bench.wants("indexer_score", v, shape)]
    if not variants:
        return
    world = World(bench, torch.arange(4 * E - T, 4 * E), torch.zeros(T), 1, E, HEADS, spread=0, seed=E)
    some = sorted({0, T - 1, *range(0, T, max(1, T // 30))})
    flops = 2.0 * HEADS * DI * float(((world.position.double() + 1) // 4).sum())
    for v in variants:
        bench.case(
            kernel="indexer_score", variant=v, shape=shape, run=partial(world.run, v), check=partial(within, world.error, LIMIT, v, some), bytes=68.0 * E + 4.0 * T * E + 2.0 * T * HEADS * DI,
            flops=flops, unit="fp8", public_us=PREFILL_PUBLIC.get(E), predicted_us=PREFILL_PREDICTED[v] * 1e3 * T * E / 2**30,
        )  # fmt: skip
        bench.judge("indexer_score", v, f"{shape}: differs from decode", partial(within, world.differ, 0.0, v, some[:8]))


def main() -> None:
    bench = Bench("indexer")
    bench.device.prebuild(["indexer_int8", *runnable(bench, ["indexer_wgmma"])])
    # Scales far apart, a row that changes within a chunk, pads and any length, on every variant.
    for hi in (8, 64):
        with bench.section(f"hostile, {hi} heads"):
            T, E = (9, 130) if bench.small else (150, 3000)
            world = World(bench, torch.arange(T) * (4 * E // T) + 3, torch.arange(T) // (T // 2 + 1), 2, E, hi, spread=40, seed=3)
            for v in runnable(bench, (*DECODE_PREDICTED, *PREFILL_PREDICTED), hi):
                bench.judge("indexer_score", v, f"{hi} heads, scales apart by up to 42 binades", partial(within, world.error, LIMIT, v, range(T)))
    for b in (1, 2) if bench.small else DECODE_PUBLIC:
        with bench.section(f"decode {b}"):
            decode(bench, b, 70 if bench.small else 262_144)
    for E in (70,) if bench.small else PREFILL_PUBLIC:
        with bench.section(f"prefill {E}"):
            prefill(bench, 33 if bench.small else 4096, E)
        if not bench.small:
            torch.cuda.empty_cache()
    bench.finish()


if __name__ == "__main__":
    main()
