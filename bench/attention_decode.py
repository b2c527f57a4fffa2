"""Decode attention of Flash (64 heads) and Pro (128): window and a list of entries (CSA), or all entries of a million tokens (HCA).

    python -m bench.attention_decode --out DIR        # about 30 s on the card
    python -m bench.attention_decode --device cpu     # checks only, small shapes, Hopper's instructions emulated

Each output is compared with FP64 torch; blocks of 16, 32 and 64 heads, one launch or two, and a row alone or with others must give
the same bits. A variant's name says heads of a block, splits, parts of p, and `one launch` where the last block merges.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness import Bench
from production import ops
from production.launch import open_device
from production.ops.sparse_attn import FLASH_BLOCK_US, FLASH_TILE_US, SMS, WGMMA, flash_heads

D, R, WINDOW, SLOTS, LIMIT, LIMIT_P_BF16 = 512, 64, 128, 640, 4e-3, 8e-3  # p in bf16: also the largest p of wgmma is off by up to 2^-9
LAUNCH_US, MERGE_US = 2.0, 2.5  # predicted: of the launches, of merging
PAIR_US, START_US, ITEM_US = {"wgmma": 7.7, "wgmma_p_bf16": 6.8}, 4.5, 2.5  # of wgmma: two tiles, measured in prefill; predicted: the first keys, an item besides
MERGED_TB_S = 3.5  # predicted: how fast what splits leave is written and read
HEADS, LISTED = {"Flash": 64, "Pro": 128}, {"Flash": 512, "Pro": 1024}
CSA_CAPACITY, HCA_CAPACITY, HCA_ENTRIES = 16_384, 8192, 7813
PUBLIC_US = {
    ("Flash", "CSA"): {1: 17.1, 8: 20.0, 64: 51.4}, ("Flash", "HCA"): {1: 45.4, 8: 52.6, 64: 224.0},
    ("Pro", "CSA"): {1: 16.6, 8: 23.7, 64: 55.7}, ("Pro", "HCA"): {1: 35.4, 8: 58.6, 64: 312.0},
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How a case runs: variant, heads of a block, splits (None: what the wrapper and splits_for choose), one launch or two."""

    variant: str = "flash"
    heads: int | None = None
    splits: int | None = None
    merged: bool = False


# Besides what a model takes of flash and wgmma: batch 1 wants many splits, batch 64 few. Of Flash and Pro; flash again of Flash only.
WAYS: dict[tuple[str, int], Sequence[Way]] = {
    ("CSA", 1): [*(Way("wgmma", splits=n) for n in (2, 3, 10)), Way("flash", 16, 10)],
    ("CSA", 8): [*(Way("wgmma", splits=n) for n in (1, 2, 3)), Way("wgmma_p_bf16")],
    ("CSA", 64): [*(Way("wgmma", splits=n) for n in (1, 2, 3)), Way("wgmma_p_bf16", splits=1), Way("wgmma_p_bf16"), Way("flash", 64, 2)],
    ("HCA", 1): [*(Way("wgmma", splits=n) for n in (8, 21, 32, 63)), Way("wgmma_p_bf16"), Way("flash", 16, 16)],
    ("HCA", 8): [*(Way("wgmma", splits=n) for n in (8, 32)), Way("wgmma_p_bf16"), Way("flash", 64, 16)],
    ("HCA", 64): [*(Way("wgmma", splits=n) for n in (2, 4, 8, 32)), *(Way("wgmma_p_bf16", splits=n) for n in (4, 16))],
}


class World:
    """Caches of b rows with random entries as stored, one query a row, and what FP64 makes of them.

    capacity, entries   of a row: allocated, and complete at its position | listed   entries chosen per query, None: all
    """

    def __init__(self, bench: Bench, b: int, h: int, capacity: int, entries: int, ratio: int, listed: int | None, seed: int, T: int | None = None) -> None:
        where = bench.torch_device
        self.bench, self.b, self.h, self.ratio, self.T = bench, b, h, ratio, T or b
        rng = torch.Generator(where).manual_seed(seed)
        self.ring, self.entries = self.stored(rng, b, SLOTS), self.stored(rng, b, capacity)
        last = entries * ratio - 1
        self.position = (last - torch.arange(self.T, device=where) % ratio * (0 if listed is None else 1)).to(torch.int32)
        self.row = (torch.arange(self.T, device=where) % b).to(torch.int32)
        self.ring_position = torch.full((b, SLOTS), -1, dtype=torch.int32, device=where)
        for p in range(max(0, last + 1 - SLOTS), last + 1):
            self.ring_position[:, p % SLOTS] = p
        self.selected = None
        if listed is not None:
            seen = (int(self.position.min()) + 1) // ratio
            chosen = [torch.randperm(seen, generator=rng, device=where)[:listed].sort().values for _ in range(min(self.T, 64))]
            self.selected = torch.stack([chosen[t % len(chosen)] for t in range(self.T)]).to(torch.int32)
        self.keys = WINDOW + (entries if listed is None else listed)
        self.columns = capacity if listed is None else listed
        self.q = torch.randn(self.T, h, D, generator=rng, device=where)
        self.q[:, ::5] *= 4  # heads that look at few keys
        self.q = self.q.bfloat16()
        self.sink = 2 * torch.randn(h, generator=rng, device=where)
        self.out, self.alone = torch.empty_like(self.q), torch.empty_like(self.q[:1])
        self.judged = sorted({0, self.T // 2, self.T - 1})
        self.want = torch.stack([self.expected(t) for t in self.judged])
        self.bits: dict[tuple[str, int], Tensor] = {}

    @staticmethod
    def stored(rng: torch.Generator, b: int, n: int) -> Tensor:
        """[b, n, 584] u8: e4m3 codes with a scale per 64, rotary dims in bf16, a padding byte of 1. The first 64 codes are mostly subnormal
        under the largest scale that is decoded the quick way.
        """
        where, plain = rng.device, D - R
        out = torch.full((b, n, ops.entry_bytes(D, R)), 1, dtype=torch.uint8, device=where)
        for row in range(b):  # in fp32 a row at a time
            codes = torch.randn(n, plain, generator=rng, device=where)
            codes[:, :64] *= 0.01
            codes[:, 64:] *= 60
            out[row, :, :plain] = codes.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            out[row, :, plain : plain + 2 * R] = torch.randn(n, R, generator=rng, device=where).bfloat16().view(torch.uint8)
            out[row, :, D + R : D + R + plain // 64] = torch.randint(120, 123, (n, plain // 64), generator=rng, device=where).to(torch.uint8)
            out[row, :, D + R] = 134
        return out

    @staticmethod
    def values(stored: Tensor) -> Tensor:
        """[n, 584] u8 -> [n, 512] f64."""
        plain = D - R
        scale = torch.exp2(stored[:, D + R : D + R + plain // 64].double() - 127)
        codes = stored[:, :plain].contiguous().view(torch.float8_e4m3fn).double() * scale.repeat_interleave(64, 1)
        return torch.cat((codes, stored[:, plain : plain + 2 * R].contiguous().view(torch.bfloat16).double()), 1)

    def expected(self, t: int) -> Tensor:
        """[h, D] f64."""
        p, row = int(self.position[t]), int(self.row[t])
        ring = self.ring[row, torch.arange(p - WINDOW + 1, p + 1, device=self.ring.device) % SLOTS]
        chosen = torch.arange((p + 1) // self.ratio, device=ring.device) if self.selected is None else self.selected[t].long()
        keys = self.values(torch.cat((ring, self.entries[row, chosen])))
        score, sink = self.q[t].double() @ keys.T * D**-0.5, self.sink.double()
        largest = torch.maximum(score.amax(1), sink)
        p_of = torch.exp(score - largest[:, None])
        return p_of @ keys / (p_of.sum(1) + torch.exp(sink - largest))[:, None]

    def case(self, way: Way, kernel: str, shape: str, public_us: float | None, decode: bool = True) -> None:
        """One row; the first of a variant and a number of splits keeps its bits, others must give the same."""
        bench, max_keys = self.bench, WINDOW + self.columns
        splits = (ops.splits_for(max_keys, way.variant) if decode else 1) if way.splits is None else way.splits
        flash = way.variant.startswith("flash")
        heads = (way.heads or flash_heads(D, self.T, self.h, splits, max_keys)) if flash else 64 if way.variant in WGMMA else 16
        shown = f"{way.variant} h{heads} s{splits}{' one launch' if way.merged else ''}{' (shipped)' if way.heads is way.splits is None else ''}"
        if not bench.wants(kernel, shown, shape):
            return
        where, scratch = bench.torch_device, (None, None)
        if splits > 1:
            sizes = ((self.T, splits, self.h, D), (self.T, splits, self.h, 2))
            scratch = tuple(torch.full(size, torch.nan, device=where) for size in sizes)  # type: ignore[assignment]
        done = torch.zeros(ops.merge_counters(self.T, self.h), dtype=torch.int32, device=where) if way.merged else None
        given = (done, heads) if flash else ()

        def run() -> None:
            ops.sparse_attn(
                bench.device, self.q, self.ring, self.ring_position, self.entries, self.selected, self.position, self.row, self.sink, self.out,
                WINDOW, self.ratio, splits, *scratch, None, way.variant, *given,
            )  # fmt: skip

        def check() -> tuple[float, float]:
            self.out.fill_(torch.nan)
            run()
            got = self.out[self.judged].double()
            error = float(((got - self.want).norm(dim=-1) / self.want.norm(dim=-1)).max())
            first = self.bits.setdefault((way.variant, splits), self.out.clone())
            same = torch.equal(first.view(torch.int16), self.out.view(torch.int16)) and (done is None or not bool(done.any()))
            if self.T > 1 and not flash:  # the last row again, alone
                part_o, part_ml = (None if x is None else x[:1] for x in scratch)
                ops.sparse_attn(
                    bench.device, self.q[-1:], self.ring, self.ring_position, self.entries, None if self.selected is None else self.selected[-1:],
                    self.position[-1:], self.row[-1:], self.sink, self.alone, WINDOW, self.ratio, splits, part_o, part_ml, None, way.variant,
                )  # fmt: skip
                same = same and torch.equal(self.alone.view(torch.int16), self.out[-1:].view(torch.int16))
            return (error if same and bool(self.out.isfinite().all()) else float("inf")), LIMIT_P_BF16 if way.variant == "wgmma_p_bf16" else LIMIT

        bench.case(
            kernel, shown, shape, run, check, bytes=self.b * self.keys * self.ring.shape[-1] + 4 * self.T * self.h * D, flops=4.0 * self.T * self.h * self.keys * D,
            public_us=public_us, predicted_us=self.predicted(heads, splits, way.variant) if flash or way.variant in WGMMA else None,
        )  # fmt: skip

    def predicted(self, heads: int, splits: int, variant: str) -> float:
        """Rounds of blocks, each a start and tiles one after the other, and what splits leave, written and read once."""
        left = 4.0 * self.T * min(splits, -(-self.keys // 64)) * self.h * D * (splits > 1)
        merging = (MERGE_US + left / MERGED_TB_S * 1e-6) if splits > 1 else 0.0
        rounds = -(-self.T * splits * -(-self.h // heads) // SMS)
        if variant in WGMMA:
            return LAUNCH_US + START_US + rounds * (ITEM_US + max(1, -(-self.keys // splits // 128)) * PAIR_US[variant]) + merging
        us = FLASH_TILE_US[heads] * (0.8 if variant == "flash_p_bf16" else 1)
        return LAUNCH_US + rounds * (FLASH_BLOCK_US + max(1, -(-self.keys // splits // 64)) * us) + merging


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="batch sizes (default: 1 8 64)")


def main() -> None:
    bench = Bench("attention_decode", options=options)
    small = bench.small
    if small and not bench.args.checked:
        bench.device = open_device("cpu", emulate="sm_90a")

    def world(model: str, source: str, b: int, T: int | None = None) -> World:
        h, listed = HEADS[model], LISTED[model] if source == "CSA" else None
        capacity, ratio = (CSA_CAPACITY, 4) if source == "CSA" else (HCA_CAPACITY, 128)
        entries = capacity if source == "CSA" else HCA_ENTRIES
        if small:
            h, listed, capacity, entries, T = 24, None if listed is None else 150, 260, 250, None if T is None else 5
        return World(bench, min(b, 3) if small else b, h, capacity, entries, ratio, listed, seed=b + len(model), T=T)

    def shape_of(model: str, source: str, b: int) -> str:
        return f"{model} {source} 128+{LISTED[model] if source == 'CSA' else HCA_ENTRIES}, b {b}"

    for b in bench.args.batch:
        for model in HEADS:
            for source in ("CSA", "HCA"):
                shape = shape_of(model, source, b)
                if not any(bench.wants("decode attention", way.variant, shape) for way in (Way(), Way("wgmma"), *WAYS[source, b])):
                    continue
                with bench.section(shape):
                    here = world(model, source, b)
                    ways = [way for way in WAYS[source, b] if model == "Flash" or way.variant in WGMMA]
                    for way in (Way(), Way("wgmma"), *((Way("wgmma", splits=2), Way("wgmma_p_bf16")) if small else ways)):
                        here.case(way, "decode attention", shape, PUBLIC_US[model, source][b])
                    del here
    with bench.section("short context"):  # nearly all splits of the capacity are empty
        for b in bench.args.batch:
            shape = f"Flash HCA 128+31 of {HCA_CAPACITY}, b {b}"
            if bench.wants("decode attention", "flash", shape) or bench.wants("decode attention", "wgmma", shape):
                here = World(bench, 2 if small else b, 24 if small else 64, 500 if small else HCA_CAPACITY, 31, 128, None, seed=b)
                for way in (Way(), Way("wgmma")):
                    here.case(way, "decode attention", shape, None)
                del here
    bench.finish()


if __name__ == "__main__":
    main()
