"""Top-k of 262,144 scores (a million tokens): one to 64 rows in decode, 4096 in prefill, and scores made to be awkward.

    python -m bench.topk --out DIR                # about 25 s on the card
    python -m bench.topk --device cpu             # checks only, 20,000 scores

Each result is compared entry by entry with the exact set by torch (ties: lower entry first). Public times: docs in bench/RESULTS.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness import Bench
from production import ops
from production.ops.topk import list_numbers, topk_parts

RATIO = 4
PUBLIC_US = {512: {1: 37.0, 8: 35.0, 64: 36.0}, 1024: {1: 31.0, 8: 31.0, 64: 32.0}}  # top-512 of f32, top-1024 of bf16
PREDICTED_US = {1: 15.5, 8: 17.0, 64: 28.0, 4096: 1200.0}


def misleading(x: Tensor) -> Tensor:
    """About half of k large scores, all in quads from which a row's bound is guessed: fewer than k reach it, rows are walked again."""
    quads = 1 + torch.arange(0, 1024, 16, device=x.device) * (x.shape[1] // 4 - 1) // 1024
    x.clamp_(max=3)[:, (4 * quads[:, None] + torch.arange(4, device=x.device)).flatten()] += 10
    return x


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "ties": lambda x: (x * 4).round_().div_(4),
    "all equal": lambda x: x.fill_(-0.25),
    "ascending": lambda x: x.copy_(torch.arange(x.shape[1], device=x.device).float()),
    "clustered": lambda x: x.copy_((x.abs().clamp_(max=4) * 16).to(torch.int32).add_(0x3F800000).view(torch.float32)),
    "half seen": lambda x: x,
    "misleading": misleading,
}


def expected(score: Tensor, seen: int, k: int) -> Tensor:
    """[T, k] i32, ascending: above the k-th value, and the first of those equal to it."""
    found = []
    for part in score[:, :seen].split(128):
        kth = part.topk(k).values[:, -1:]
        above, equal = part > kth, part == kth
        chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)))
        found.append(chosen.nonzero()[:, 1].view(len(part), k).to(torch.int32))
    return torch.cat(found)


def main() -> None:
    bench = Bench("topk")
    where = bench.torch_device
    E = 20_000 if bench.small else 262_144
    seed = torch.Generator(where).manual_seed(5)
    counters = torch.zeros(256, dtype=torch.int32, device=where)
    largest = torch.empty((8 if bench.small else 4096) * E, dtype=torch.float32, device=where)

    def cases(T: int, k: int, kind: str, variants: list[tuple[str, int | None]], public: float | None, predicted: float | None) -> None:
        score = largest[: T * E].view(T, E).normal_(generator=seed)
        if kind != "random":
            KINDS[kind](score)
        seen = E // 2 if kind == "half seen" else E
        score[:, seen:] = torch.nan
        position = torch.full((T,), RATIO * seen - 1, dtype=torch.int32, device=where)
        selected = torch.empty(T, k, dtype=torch.int32, device=where)
        want = expected(score, seen, k)
        shape = f"{T} rows, {E:,} scores, k {k}" + ("" if kind == "random" else f", {kind}")
        for variant, parts in variants:
            given = topk_parts(T, E) if parts is None else parts
            numbers = T * given * list_numbers(k)
            scratch = torch.full((numbers,), -1, dtype=torch.int32, device=where)

            def run(variant: str = variant, given: int = given, scratch: Tensor = scratch) -> None:
                ops.topk(bench.device, score, position, selected, RATIO, variant, counters, scratch, given if variant.startswith("stream") else None)

            def check(run: Callable[[], None] = run) -> tuple[float, float]:
                selected.fill_(-7)
                run()
                return float((selected != want).sum() + counters.count_nonzero()), 0.0

            name = f"{variant} x {given}" if variant.startswith("stream") else variant
            bench.case("topk", name, shape, run, check, bytes=T * (4 * seen + 4 * k), public_us=public, predicted_us=predicted)

    with bench.section("few rows"):
        for k in (512, 1024):
            for T in (1, 8, 64):
                rows = min(T, 4) if bench.small else T
                more: dict[int, list[tuple[str, int | None]]] = {1: [("stream", 8)], 8: [("stream", 8)], 64: [("stream", 2)]}
                cases(rows, k, "random", [("stream", None), *more[T]], PUBLIC_US[k][T], PREDICTED_US[T])
        cases(1, 512, "random", [("radix", None)], PUBLIC_US[512][1], None)
    with bench.section("awkward"):
        for kind in KINDS:
            cases(2 if bench.small else 64, 512, kind, [("stream", None)], None, None)
            cases(1, 512, kind, [("stream", None)], None, None)
    with bench.section("prefill"):
        for k in (512, 1024):
            cases(8 if bench.small else 4096, k, "random", [("stream", 1)], None, PREDICTED_US[4096])
        cases(8 if bench.small else 4096, 512, "ascending", [("stream", 1)], None, None)
    bench.finish()


if __name__ == "__main__":
    main()
