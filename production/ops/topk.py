"""Typed wrapper of top-k: the best entries of each query by score, exactly.

    topk(device, score, position, selected, ratio=4)

It checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the caller,
nothing is allocated, and outputs share no memory with inputs or with each other. A kernel that cannot run raises KernelError: nothing falls back to torch. position [T] i32 (-1 = pad, whose
row stays untouched) is read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Tests: pytest parity/test_operations_attention.py -k topk.
"""

from __future__ import annotations

from torch import Tensor

from production.launch import Device
from production.ops.arguments import apart as _apart
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import shape as _shape
from production.ops.layout import rows as _rows
from production.ops.layout import tokens as _tokens

SPARE, MOST_PARTS, BINS, HELD, THREADS = 512, 32, 2048, 16, 512  # as in kernels/topk.cu
BLOCKS = 264  # two on each multiprocessor of an H200: rows share these, from 133 rows on each gets one


def topk_parts(T: int, E: int) -> int:
    """Blocks that share a row of up to E entries in a call of T rows. The result does not depend on it."""
    return max(1, min(MOST_PARTS, _ceil(E, HELD * THREADS), BLOCKS // max(T, 1)))


def list_numbers(k: int) -> int:
    """i32 numbers of scratch that each part of a row needs."""
    return 4 + 2 * 4 * _ceil(2 * k + SPARE, 4)


def topk_scratch(k: int, E: int) -> int:
    """i32 numbers that any number of rows of up to E entries may need with `topk_parts`; 0: one block a row is always enough."""
    return 0 if topk_parts(1, E) == 1 else max(T * topk_parts(T, E) for T in range(1, BLOCKS // 2 + 1)) * list_numbers(k)


def topk(
    dev: Device, score: Tensor, position: Tensor, selected: Tensor, ratio: int, variant: str | None = None, counters: Tensor | None = None,
    scratch: Tensor | None = None, parts: int | None = None,
) -> None:  # fmt: skip
    """selected[t] = the k best of the (position + 1) // ratio visible entries, ascending, then -1; ties: lower entry first.

    score [T, E] f32 (rs); selected [T, k] i32 (rs). Variants: naive, radix, stream (the same result).
    stream reads a row once, by `parts` blocks (None: `topk_parts`). parts > 1 needs `counters`, i32,
    T or more of them, zero before and after, and `scratch`, i32, 16-byte aligned, of any content.
    """
    T, E = score.shape
    k = selected.shape[1]
    _tokens("topk", T, position)
    _shape("topk", "selected", selected, T, k)
    _apart("topk", {"selected": selected, "counters": counters, "scratch": scratch}, {"score": score, "position": position})
    which = _choose("topk", variant, "radix", ("naive", "radix", "stream"))
    strides = (*_rows("topk", "score", score), *_rows("topk", "selected", selected))
    if not T or not k:
        return
    if which == "naive":
        dev.launch("topk", "topk_naive", (_ceil(T, 32),), (32,), (score, position, selected, T, E, k, ratio, *strides))
    elif which == "radix":
        dev.launch("topk", "topk_radix", (T,), (256,), (score, position, selected, E, k, ratio, *strides))
    else:
        parts = topk_parts(T, E) if parts is None else parts
        room = max(4096, k + 2048)
        shared = 4 * (BINS + 2 * (room + HELD * THREADS))
        _need(shared <= 227 * 1024 - 4096, "topk", f"{which}: k = {k} needs {shared} bytes of shared memory; use radix")
        _need(1 <= parts <= MOST_PARTS, "topk", f"{which}: {parts} parts, expected 1 to {MOST_PARTS}")
        if parts > 1:
            held, needed = (0 if t is None else t.numel() for t in (counters, scratch)), (T, T * parts * list_numbers(k))
            for name, tensor, has, needs in zip(("counters", "scratch"), (counters, scratch), held, needed, strict=True):
                _need(has >= needs, "topk", f"{which}: {name} has {has} numbers, {T} rows in {parts} parts need {needs}")
                _packed("topk", **{name: tensor})
            _need(scratch is not None and scratch.data_ptr() % 16 == 0, "topk", "scratch is not 16-byte aligned")
        dev.launch("topk", "topk_stream", (T * parts,), (THREADS,),
                   (score, position, selected, counters, scratch, E, k, ratio, parts, room, *strides), shared)  # fmt: skip
