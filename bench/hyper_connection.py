"""mHC: mixing of the streams, a half put back, and both with the norm, one token to 4096, for Flash (4096) and Pro (7168).

    python -m bench.hyper_connection --out DIR        # about 30 s on the card
    python -m bench.hyper_connection --device cpu     # checks only, width 512

"pre" and "post" are what public kernels do; "post + pre + norm" is what the fast plan launches between two halves of a block. The
error is the largest of all outputs, each over its own limit: 5e-6 for pre, post and comb, one bf16 step for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench
from production import ops
from reference import ops as ref

N, ITERS, EPS = 4, 20, 1e-6
EXACT, ROUNDED = 5e-6, 4e-3
PRE_US = {4096: {1: 8.7, 64: 10.5, 4096: 120.0}, 7168: {1: 10.7, 64: 12.4, 4096: 195.0}}
POST_US = {4096: {1: 3.1, 4096: 86.0}, 7168: {1: 4.0, 4096: 141.0}}
# Times expected before the first run: pre, post, post + pre + norm.
PREDICTED = {
    4096: {1: (6.5, 2.5, 7.0), 8: (7.5, 3.0, 8.0), 64: (8.5, 4.0, 9.5), 512: (17.0, 12.0, 22.0), 4096: (85.0, 78.0, 130.0)},
    7168: {1: (7.5, 2.5, 8.0), 8: (8.5, 3.0, 9.0), 64: (10.0, 5.0, 12.0), 512: (26.0, 18.0, 36.0), 4096: (150.0, 135.0, 225.0)},
}  # fmt: skip


def distance(got: Tensor, want: Tensor) -> float:
    """Worst row's rel-L2."""
    g, w = got.double().flatten(1), want.double().flatten(1)
    return float(((g - w).norm(dim=1) / w.norm(dim=1)).max())


class World:
    """Inputs of T tokens of width D, outputs, and what the outputs should be, in FP64."""

    def __init__(self, bench: Bench, T: int, D: int) -> None:
        self.bench, self.T, self.D, where = bench, T, D, bench.torch_device
        seed = torch.Generator(where).manual_seed(7)

        def normal(*shape: int, size: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=seed, device=where) * size

        self.streams, self.y = normal(T, N, D, size=2.0).bfloat16(), normal(T, D).bfloat16()
        self.fn, self.base, self.scale = normal(24, N * D, size=1.5 * (N * D) ** -0.5), normal(24), 0.5 + torch.rand(3, generator=seed, device=where)
        self.weight = normal(D)
        self.old_post, self.old_comb = 2 * torch.rand(T, N, generator=seed, device=where), torch.rand(T, N, N, generator=seed, device=where)
        self.variant = ""
        self.X, self.a, self.normed = torch.empty_like(self.streams), torch.empty_like(self.y), torch.empty_like(self.y)
        self.pre, self.post, self.comb = torch.empty_like(self.old_post), self.old_post.clone(), self.old_comb.clone()
        self.counters = torch.zeros(256, dtype=torch.int32, device=where)
        self.exact: dict[str, float] = {}  # of pre, post and comb, by variant
        self.sums = torch.full((max(ops.mix_scratch(T, D, v) for v in ("split", "mma")),), torch.nan, device=where)

    def mix(self, X: Tensor, variant: str, **options: Any) -> None:
        self.variant = variant
        ops.hc_pre(
            self.bench.device, X, self.fn, self.base, self.scale, self.pre, self.post, self.comb, self.a, ITERS, EPS, EPS, variant=variant,
            sums=self.sums, counters=self.counters, **options,
        )  # fmt: skip

    def check(self, run: Callable[[], object], before: bool, mixes: bool) -> tuple[float, float]:
        """Runs on poisoned outputs; each is judged from what lies before it."""
        outputs = (self.X, self.a, self.normed, self.pre) if mixes else (self.X,)
        for out in outputs:
            out.fill_(torch.nan)
        if before or not mixes:
            self.post.copy_(self.old_post)
            self.comb.copy_(self.old_comb)
        run()
        worst = 0.0
        for t in range(0, self.T, 256):
            part = slice(t, t + 256)
            old = (self.y[part].double(), self.streams[part].double(), self.old_post[part].double(), self.old_comb[part].double())
            if before or not mixes:
                worst = max(worst, distance(self.X[part], ref.hc_post(*old)) / ROUNDED)
            if mixes:
                x = (self.X if before else self.streams)[part].double()
                a, pre, post, comb = ref.hc_pre(x, self.fn.double(), self.base.double(), self.scale.double(), ITERS, EPS, EPS)
                exact = max(distance(got[part], want) for got, want in ((self.pre, pre), (self.post, post), (self.comb, comb)))
                self.exact[self.variant] = max(exact, self.exact.get(self.variant, 0.0))
                worst = max(worst, exact / EXACT)
                worst = max(worst, distance(self.a[part], a) / ROUNDED)
            if before:
                worst = max(worst, distance(self.normed[part], ref.rms_norm(self.a[part].double(), self.weight.double(), EPS)) / ROUNDED)
        written = outputs if before or not mixes else (self.a, self.pre)
        if any(bool(out.isnan().any()) for out in written) or bool(self.counters.any()):
            return float("nan"), 1.0
        return worst, 1.0


def ways(T: int) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, variant, options) of the mixing that are worth a look for T tokens."""
    one = ("split, one launch", "split", {"last_block_tokens": T})
    two = ("split, two launches", "split", {"last_block_tokens": 0})
    many = [(f"mma, {warps} warps", "mma", {"warps": warps}) for warps in (4, 8)]
    if T <= 8:
        return [one, two]
    return [two, many[0]] if T <= 64 else many


def main() -> None:
    bench = Bench("hyper_connection")
    for D in (512,) if bench.small else (4096, 7168):
        for T in (1, 8, 70) if bench.small else (1, 8, 64, 512, 4096):
            with bench.section(f"{T} tokens of {D}"):
                cases(bench, World(bench, T, D))
    bench.finish()


def cases(bench: Bench, w: World) -> None:
    T, D = w.T, w.D
    predicted = PREDICTED.get(D, {}).get(T, (None, None, None))
    public_pre, public_post = PRE_US.get(D, {}).get(T), POST_US.get(D, {}).get(T)
    both = None if public_pre is None or public_post is None else public_pre + public_post
    weights, stream, row, shape = 4 * 24 * N * D, 2 * T * N * D, 2 * T * D, f"{T} tokens, D {D}"
    for variant in ("columns", "block") if T in (1, 4096) else ("columns",):
        run = partial(ops.hc_post, bench.device, w.y, w.streams, w.post, w.comb, w.X, variant)
        bench.case("post", variant, shape, run, partial(w.check, run, False, False), bytes=2 * stream + row, public_us=public_post,
                   predicted_us=predicted[1] if variant == "columns" else None)  # fmt: skip
    for name, variant, options in [*ways(T), *([("block", "block", {})] if T == 1 else [])]:
        run = partial(w.mix, w.streams, variant, **options)
        bench.case("pre", name, shape, run, partial(w.check, run, False, True), bytes=weights + stream + row, public_us=public_pre,
                   predicted_us=predicted[0] if variant != "block" else None)  # fmt: skip
        if variant != "block":
            run = partial(w.mix, w.X, variant, norm=(w.weight, w.normed), before=(w.y, w.streams), **options)
            bench.case("post + pre + norm", name, shape, run, partial(w.check, run, True, True), bytes=weights + 2 * stream + 3 * row, public_us=both,
                       predicted_us=predicted[2])  # fmt: skip
        bench.note(**{f"fp32 error, {variant}": max(w.exact.pop(variant, 0.0), bench.facts.get(f"fp32 error, {variant}", 0.0))})


if __name__ == "__main__":
    main()
