"""Prefill attention, 4096 queries: Flash (64 heads) and Pro (128), with a list of entries (CSA) or with all entries of a million tokens (HCA).

    python -m bench.attention_prefill --out DIR        # about 40 s on the card, of which compiling takes half
    python -m bench.attention_prefill --device cpu     # checks only, small shapes, Hopper's instructions emulated

Three parts, each says where a fault begins. `instruction`: the smallest products and moves of kernels/hopper.cuh alone. `stage`: the
kernel on keys that show one of its stages: one key (decoding, sums, store), unit vectors by panel (the output is the softmax),
queries of zero (the output is the mean), tile borders, lists with holes. Then the shapes, checked against FP64 and timed; a token
alone must give the bits that it gives among 4096. --only instruction | stage | Flash | Pro | 64K ... --profile: at which barriers the
two multiplying warpgroups and the loading one wait, in cycles of a pair of tiles (bench/kernels/attention_profile.cu).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.harness import Bench
from production import ops
from production.launch import Device, open_device
from production.ops.sparse_attn import WGMMA_SHARED

D, R, WINDOW, QUERIES, LIMIT = 512, 64, 128, 4096, 4e-3
PLAIN = D - R
SIZE = ops.entry_bytes(D, R)
HEADS, LISTED = {"Flash": 64, "Pro": 128}, {"Flash": 512, "Pro": 1024}
CONTEXTS = {"CSA 64K": (4, 65_536), "CSA 1M": (4, 1_048_576), "HCA 1M": (128, 1_000_064)}  # ratio, tokens at the end of the call
PUBLIC_US = {("Flash", "CSA 64K"): 685.0, ("Flash", "CSA 1M"): 811.0, ("Flash", "HCA 1M"): 6399.0, ("Pro", "CSA 64K"): 2210.0, ("Pro", "CSA 1M"): 2388.0, ("Pro", "HCA 1M"): 13898.0}
VARIANTS = {"wgmma": (6700, 1500), "wgmma_p_bf16": (5600, 1500)}  # predicted cycles of a pair of tiles, and of an item besides
STAGED = ("wgmma", "wgmma_p_bf16")  # the others share all but the loader
MHZ, SMS = 1650.0, 132


# ---- keys, and what FP64 makes of them ----


def random_entries(rng: torch.Generator, n: int) -> Tensor:
    """[n, 584] u8: e4m3 codes with a scale per 64, rotary dims in bf16, a padding byte that nobody may use. Values of about 1."""
    where = rng.device
    out = torch.full((n, SIZE), 0x55, dtype=torch.uint8, device=where)
    for begin in range(0, n, 1 << 16):
        part = out[begin : begin + (1 << 16)]
        codes = torch.randn(len(part), PLAIN, generator=rng, device=where) * 60
        codes[:, :64] *= 0.01  # mostly subnormal
        part[:, :PLAIN] = codes.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        part[:, PLAIN : PLAIN + 2 * R] = torch.randn(len(part), R, generator=rng, device=where).bfloat16().view(torch.uint8)
        part[:, D + R : D + R + PLAIN // 64] = torch.randint(120, 123, (len(part), PLAIN // 64), generator=rng, device=where).to(torch.uint8)
        part[:, D + R] = 127
    return out


def unit_entries(n: int, panel: int, where: torch.device) -> Tensor:
    """Entry i is 1 at dim 64 panel + i % 64, and zero elsewhere."""
    out = torch.zeros(n, SIZE, dtype=torch.uint8, device=where)
    out[:, D + R : D + R + PLAIN // 64] = 127
    i = torch.arange(n, device=where)
    if panel < PLAIN // 64:
        out[i, 64 * panel + i % 64] = 0x38
    else:
        out[i, PLAIN + 2 * (i % 64) + 1] = 0x3F
        out[i, PLAIN + 2 * (i % 64)] = 0x80
    return out


def values(stored: Tensor) -> Tensor:
    """[n, 584] u8 -> [n, 512] f64."""
    scale = torch.exp2(stored[:, D + R : D + R + PLAIN // 64].double() - 127)
    codes = stored[:, :PLAIN].contiguous().view(torch.float8_e4m3fn).double() * scale.repeat_interleave(64, 1)
    return torch.cat((codes, stored[:, PLAIN : PLAIN + 2 * R].contiguous().view(torch.bfloat16).double()), 1)


class World:
    """One row of tokens with a ring and entries; queries at `position`."""

    def __init__(self, bench: Bench, q: Tensor, position: Tensor, ring: Tensor, window: int, ratio: int = 0, entries: Tensor | None = None, selected: Tensor | None = None, seed: int = 1) -> None:
        where = bench.torch_device
        self.bench, self.q, self.position, self.ring, self.window, self.ratio, self.entries, self.selected = bench, q, position, ring[None], window, ratio, None, selected
        if entries is not None:
            self.entries = entries[None]
        self.T, self.h = q.shape[:2]
        self.row = torch.zeros(self.T, dtype=torch.int32, device=where)
        self.ring_position = torch.zeros(1, len(ring), dtype=torch.int32, device=where)
        self.sink = 2 * torch.randn(self.h, generator=torch.Generator(where).manual_seed(seed), device=where)
        self.out = torch.empty_like(q)

    def keys(self, t: int) -> Tensor:
        """[n, 584] of one query, by the rule."""
        p = int(self.position[t])
        kept = self.ring[0, torch.arange(max(0, p - self.window + 1), p + 1, device=self.ring.device) % self.ring.shape[1]]
        if self.entries is None:
            return kept
        seen = min((p + 1) // self.ratio, self.entries.shape[1])
        chosen = torch.arange(seen, device=kept.device) if self.selected is None else self.selected[t].long()
        return torch.cat((kept, self.entries[0, chosen[(chosen >= 0) & (chosen < seen)]]))

    def expected(self, t: int) -> Tensor:
        """[h, D] f64."""
        keys, sink = values(self.keys(t)), self.sink.double()
        score = self.q[t].double() @ keys.T * D**-0.5
        largest = torch.maximum(score.amax(1), sink)
        p = torch.exp(score - largest[:, None])
        return p @ keys / (p.sum(1) + torch.exp(sink - largest))[:, None]

    def run(self, variant: str | None, some: slice = slice(None), out: Tensor | None = None) -> None:
        ops.sparse_attn(
            self.bench.device, self.q[some], self.ring, self.ring_position, self.entries, None if self.selected is None else self.selected[some],
            self.position[some], self.row[some], self.sink, self.out if out is None else out, self.window, self.ratio, variant=variant,
        )  # fmt: skip

    def error(self, variant: str | None, judged: list[int], want: Tensor) -> float:
        """Worst row of the judged tokens; infinite when a row was not written, a pad was, or a token alone has other bits."""
        self.out.fill_(torch.nan)
        self.run(variant)
        real = self.position >= 0
        if not bool(self.out[real].isfinite().all()) or not bool(self.out[~real].isnan().all()):
            return float("inf")
        for t in judged if variant in VARIANTS else []:
            alone = torch.full_like(self.out[t : t + 1], torch.nan)
            self.run(variant, slice(t, t + 1), alone)
            if not torch.equal(alone[0].view(torch.int16), self.out[t].view(torch.int16)):
                print(f"    token {t} alone differs from token {t} among {self.T}", flush=True)
                return float("inf")
        got = self.out[judged].double()
        return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


# ---- instructions ----


def instructions(bench: Bench, checks: Device) -> None:
    """Each alone, against torch. The other reading of a descriptor is tried where the expected one is wrong."""
    where = checks.torch_device
    rng = torch.Generator(where).manual_seed(7)
    a, b = (torch.randn(64, n, generator=rng, device=where).bfloat16() for n in (64, 256))
    shared = 6 * 64 * 128

    def product(kernel: str, other: Tensor, want: Tensor, *more: int) -> float:
        d = torch.full(want.shape, torch.nan, device=where)
        checks.launch("hopper_check", kernel, (1,), (128,), (a, other, d, *more), shared)
        return float((d.double() - want).norm() / want.norm())

    square = b[:, :64].contiguous()
    k_major, mn_major = a.double() @ square.double().T, a.double() @ b.double()
    bench.judge("instruction", "wgmma", "64 x 64 x 64, both K-major", lambda: (product("check_k_major", square, k_major), 1e-6))
    for registers in (0, 1):
        shape = f"64 x 256 x 64, B MN-major, A in {'registers' if registers else 'shared memory'}"
        row = bench.judge("instruction", "wgmma", shape, lambda r=registers: (product("check_mn_major", b, mn_major, 8192, 1024, r), 1e-6))  # type: ignore[misc]
        if row is not None and row.state != "ok" and not bench.lost:
            print(f"    leading and stride exchanged: error {product('check_mn_major', b, mn_major, 1024, 8192, registers):.3g}", flush=True)

    def stmatrix() -> tuple[float, float]:
        given = torch.randn(64, 16, generator=rng, device=where).bfloat16()
        out = torch.full_like(given, torch.nan)
        checks.launch("hopper_check", "check_stmatrix", (1,), (128,), (given, out), shared)
        return float((out != given).sum()), 0.0

    def decode() -> tuple[float, float]:
        out = torch.empty(256, 256, dtype=torch.bfloat16, device=where)
        checks.launch("hopper_check", "check_decode", (1,), (128,), (out,), shared)
        codes = torch.arange(256, dtype=torch.uint8, device=where).view(torch.float8_e4m3fn).double()
        scale = torch.exp2(torch.arange(256, device=where).double() - 127)
        scale[255] = torch.nan
        want = (codes[:, None] * scale).float().bfloat16()
        same = (out == want) | (out.isnan() & want.isnan())
        return float((~same).sum()), 0.0

    def pipeline() -> tuple[float, float]:
        rounds, out = 1000, torch.full((128,), torch.nan, device=where)
        checks.launch("hopper_check", "check_pipeline", (1,), (256,), (out, rounds), shared)
        want = rounds * (rounds - 1) / 2 + rounds * torch.arange(128, device=where)
        return float((out - want).abs().max()), 0.0

    bench.judge("instruction", "stmatrix", "64 x 16 through fragments", stmatrix)
    bench.judge("instruction", "e4m3 times e8m0 in bf16", "all 65,536 pairs, wrong ones", decode)
    bench.judge("instruction", "mbarrier and setmaxnreg", "1000 rounds between two warpgroups", pipeline)


# ---- stages ----


def stages(bench: Bench, variant: str) -> None:
    where = bench.torch_device
    rng = torch.Generator(where).manual_seed(11)

    def normal(T: int, h: int) -> Tensor:
        return torch.randn(T, h, D, generator=rng, device=where).bfloat16()

    def positions(*p: int) -> Tensor:
        return torch.tensor(p, dtype=torch.int32, device=where)

    def stage(shape: str, make: Callable[[], World]) -> None:
        if not bench.wants("stage", variant, shape):
            return

        def check() -> tuple[float, float]:
            world = make()
            judged = [t for t in range(world.T) if world.position[t] >= 0]
            judged = judged[:3] + judged[-3:] if len(judged) > 6 else judged
            return world.error(variant, judged, torch.stack([world.expected(t) for t in judged])), 3 * LIMIT if variant.endswith("p_bf16") else LIMIT

        bench.judge("stage", variant, shape, check)

    def window(n: int, h: int = 64, q: Tensor | None = None, stored: Tensor | None = None) -> World:
        return World(bench, normal(1, h) if q is None else q, positions(n - 1), random_entries(rng, n) if stored is None else stored, n)

    stage("one key", lambda: window(1))
    for panel in range(8):
        stage(f"unit vectors of panel {panel}", lambda panel=panel: window(64, stored=unit_entries(64, panel, where)))  # type: ignore[misc]
    for first, second in ((0, 1), (2, 6), (7, 3)):
        stage(f"unit vectors, tiles of panels {first} and {second}", lambda f=first, s=second: window(128, stored=torch.cat((unit_entries(64, f, where), unit_entries(64, s, where)))))  # type: ignore[misc]
    stage("queries of zero, 200 keys", lambda: window(200, q=torch.zeros(1, 64, D, dtype=torch.bfloat16, device=where)))
    for n in (63, 64, 65, 128, 129, 257):
        stage(f"{n} keys", lambda n=n: window(n))  # type: ignore[misc]
    stage("3 heads", lambda: window(70, h=3))
    stage("70 heads", lambda: window(70, h=70))

    def many() -> World:  # several items a block, pads between, an odd number of tokens, contexts from one key on
        T = 11 if bench.small else 3 * SMS + 7
        position = torch.arange(T, dtype=torch.int32, device=where)
        position[5::7] = -1
        listed = torch.randint(-1, T // 4 + 1, (T, 100), generator=rng, device=where).to(torch.int32)
        listed[3] = -1
        return World(bench, normal(T, 64), position, random_entries(rng, T + 1), 50, 4, random_entries(rng, T // 4 + 1), listed)

    stage("several tokens a block, pads, lists with holes", many)

    def rising() -> World:  # the maximum moves by many powers of two between tiles and inside a pair
        stored = random_entries(rng, 512)
        steps = torch.tensor([0.0, 10.0, 20.0, 60.0, 50.0, 51.0, 100.0, 101.0], device=where).repeat_interleave(64)
        rotated = (steps[:, None] * D**0.5 / 64 * 0.9 + 0.05 * torch.randn(512, R, generator=rng, device=where)).bfloat16()
        stored[:, PLAIN : PLAIN + 2 * R] = rotated.view(torch.uint8)
        q = torch.zeros(1, 64, D, device=where)
        q[..., PLAIN:] = torch.linspace(0.5, 1.5, 64, device=where)[:, None]
        return window(512, q=q.bfloat16(), stored=stored)

    stage("a maximum that moves", rising)


# ---- who waits for whom ----

PLACES = (*(f"full {s}{h}" for s in "01" for h in "LR"), *(f"free {s}{h}" for s in "01" for h in "LR"), "p of 0", "p of 1", "maximum", "queries", "queries free", "sums",
          "products", "one product", "fence")  # fmt: skip
ROLES, COUNTED_BLOCKS, WARPS = ("multiplies 0", "multiplies 1", "loads"), 8, 4


def profile(bench: Bench, checks: Device, world: World, variant: str, title: str, keys: float) -> None:
    """Cycles a warp spends on a pair of tiles, and of these at each place; what a fence takes. One line a role."""
    where = bench.torch_device
    entries, selected = world.entries, world.selected
    assert entries is not None
    args = (
        world.q, world.ring, world.ring_position, entries, selected, world.position, world.row, world.sink, world.out, None, world.h, D, R, world.ring.shape[1],
        world.window, 0 if selected is None else selected.shape[1], entries.shape[1], world.ratio, D**-0.5, world.q.stride(0), *world.ring.stride()[:2],
        world.ring_position.stride(0), *entries.stride()[:2], 0 if selected is None else selected.stride(0), world.out.stride(0), 0, world.T,
    )  # fmt: skip
    blocks = min(3 if bench.small else SMS, world.T * -(-world.h // 64))
    spent = torch.zeros(len(ROLES), len(PLACES) + 3, dtype=torch.int64, device=where)
    for _ in range(2):  # the first warms up
        checks.launch("attention_profile", "profile_take", (1,), (spent.numel(),), (spent,))
        checks.launch("attention_profile", f"profile_{variant}", (blocks,), (384,), args, WGMMA_SHARED)
    checks.launch("attention_profile", "profile_take", (1,), (spent.numel(),), (spent,))
    checks.synchronize()
    pairs = world.T * -(-world.h // 64) / blocks * -(-int(keys) // 128) * COUNTED_BLOCKS * WARPS
    for role, row in zip(ROLES, spent.double().cpu(), strict=True):
        whole, fences = max(1.0, float(row[17])), float(row[18])
        parts = ", ".join(f"{name} {value / whole:.0%}" for name, value in zip(PLACES, row[:17].tolist(), strict=True) if value > 0.005 * whole)
        print(f"    {variant} | {title} | {role}: {whole / pairs:,.0f} cycles a pair; waits: {parts}; a fence {row[16] / max(1.0, fences):,.0f} cycles", flush=True)
    bench.note(**{f"profile {variant} {title}": spent.tolist()})


# ---- shapes ----


def shape_world(bench: Bench, model: str, name: str) -> World:
    """The last 4096 tokens of a context; on the CPU a small one of the same kind."""
    where, h, listed = bench.torch_device, HEADS[model], LISTED[model]
    ratio, context = CONTEXTS[name]
    T = QUERIES
    if bench.small:
        h, T, listed, context = h + 6, 5, 150, 2000 if ratio == 4 else 40_000
    rng = torch.Generator(where).manual_seed(h + ratio)
    slots = WINDOW + T
    position = torch.arange(context - T, context, dtype=torch.int32, device=where)
    entries = random_entries(rng, context // ratio)
    selected = None
    if name.startswith("CSA"):  # one entry of each of as many equal parts of what is seen: distinct, ascending, anywhere
        seen = (position.double() + 1) // ratio
        u = torch.arange(listed, device=where) + torch.rand(T, listed, generator=rng, device=where).double()
        selected = (u * (seen[:, None] / listed)).long().clamp_(max=len(entries) - 1).to(torch.int32)
    q = torch.randn(T, h, D, generator=rng, device=where)
    q[:, ::5] *= 4  # heads that look at few keys
    return World(bench, q.bfloat16(), position, random_entries(rng, slots), WINDOW, ratio, entries, selected)


def shape(bench: Bench, checks: Device, model: str, name: str) -> None:
    listed = LISTED[model] if name.startswith("CSA") else CONTEXTS[name][1] // 128
    title = f"{model} {name}, 128+{listed}, 4096 queries"
    variants = [*VARIANTS, "flash", *(["mma"] if (model, name) == ("Flash", "CSA 64K") else [])]
    if not any(bench.wants("prefill attention", v, title) for v in variants):
        return
    world = shape_world(bench, model, name)
    judged = sorted({0, world.T // 2, world.T - 1})
    want = torch.stack([world.expected(t) for t in judged])
    keys = sum(len(world.keys(t)) for t in judged) / len(judged)
    flops = 4.0 * world.T * world.h * keys * D
    for variant in variants:
        cycles = VARIANTS.get(variant)
        predicted = None
        if cycles and not bench.small:
            items = -(-world.T * -(-world.h // 64) // SMS)
            predicted = items * (-(-int(keys) // 128) * cycles[0] + cycles[1]) / MHZ
        bench.case(
            "prefill attention", variant, title, lambda v=variant: world.run(v),  # type: ignore[misc]
            lambda v=variant: (world.error(v, judged, want), 3 * LIMIT if v.endswith("p_bf16") else LIMIT),  # type: ignore[misc]
            bytes=4.0 * world.T * world.h * D, flops=flops, public_us=PUBLIC_US[model, name], predicted_us=predicted,
        )  # fmt: skip
        if bench.args.profile and variant in VARIANTS and model == "Flash":
            profile(bench, checks, world, variant, title, keys)


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--profile", action="store_true", help="on the card: where warps of the Flash shapes wait (compiles four kernels more)")

    bench = Bench("attention_prefill", options=options)
    kernels = Path(__file__).resolve().parent / "kernels"
    emulate = "sm_90a" if bench.small else None
    checks = open_device(bench.device.name, kernels_dir=kernels, emulate=emulate)
    if bench.small:
        bench.device = open_device("cpu", emulate=emulate)
    if bench.wants("instruction"):
        with bench.section("instruction"):
            instructions(bench, checks)
    for variant in STAGED:
        with bench.section(f"stage {variant}"):
            stages(bench, variant)
    for model in HEADS:
        for name in CONTEXTS:
            with bench.section(f"{model} {name}"):
                shape(bench, checks, model, name)
    bench.finish()


if __name__ == "__main__":
    main()
