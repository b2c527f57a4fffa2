"""Typed wrappers of the indexer's kernels: Hadamard and e2m1 of queries, scores of all keys. The best of them: production/ops/topk.py.

    indexer_score(device, q, weights, keys, scales, position, row, score, ratio=4)

Each wrapper checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the
caller, nothing is allocated, and outputs never alias inputs. A kernel that cannot run raises KernelError: nothing falls
back to torch. T = b * s flat tokens, position [T] i32 (-1 = pad, whose outputs stay untouched), row [T] i32 = batch row.
Positions, lengths and index lists are read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Tests: pytest parity/test_operations_attention.py.
"""

from __future__ import annotations

from torch import Tensor

from production.launch import Argument, Device
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import shape as _shape
from production.ops.layout import KEY_BLOCK
from production.ops.layout import key_width as _key_width
from production.ops.layout import rows as _rows
from production.ops.layout import tokens as _tokens


def hadamard_e2m1(dev: Device, x: Tensor, out: Tensor, variant: str | None = None) -> None:
    """out = e2m1(bf16(x H / sqrt(di))), one scale per 32, as values. x, out [R, di] bf16 (rs).

    Variants: naive, butterfly (sums in another order).
    """
    R, di = x.shape
    _key_width("hadamard_e2m1", "x", di)
    _shape("hadamard_e2m1", "out", out, R, di)
    kernel = {"naive": "hadamard_e2m1_naive", "butterfly": "hadamard_e2m1"}[_choose("hadamard_e2m1", variant, "butterfly", ("naive", "butterfly"))]
    if R:
        strides = (*_rows("hadamard_e2m1", "x", x), *_rows("hadamard_e2m1", "out", out))
        dev.launch("hadamard_quant", kernel, (R,), (32,), (x, out, di, *strides, di**-0.5), 4 * di)


def indexer_score(
    dev: Device, q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, position: Tensor, row: Tensor, score: Tensor, ratio: int,
    variant: str | None = None,
) -> None:  # fmt: skip
    """score[t,e] = sum_h weights[t,h] relu(q[t,h] . key_e), -inf for e >= (position + 1) // ratio.

    q [T, hi, di] bf16 (rs); weights [T, hi] f32 (rs); keys [b, capacity, di/2] u8; scales [b, capacity, di/32] u8; score [T, E] f32 (rs).
    Variants: naive, entries, mma.
    """
    T, hi, di = q.shape
    E, (b, capacity) = score.shape[1], keys.shape[:2]
    _key_width("indexer_score", "q", di)
    _tokens("indexer_score", T, position, row)
    _shape("indexer_score", "weights", weights, T, hi)
    _shape("indexer_score", "keys", keys, b, capacity, di // 2)
    _shape("indexer_score", "scales", scales, b, capacity, di // KEY_BLOCK)
    _shape("indexer_score", "score", score, T, E)
    which = _choose("indexer_score", variant, "entries", ("naive", "entries", "mma"))
    strides = (
        *_rows("indexer_score", "q", q), *_rows("indexer_score", "weights", weights), *_rows("indexer_score", "keys", keys, 2),
        *_rows("indexer_score", "scales", scales, 2), *_rows("indexer_score", "score", score),
    )  # fmt: skip
    entries, block, shared = {"naive": (64, 64, 0), "entries": (32, 128, 4 * (32 * (di + 4) + hi * di)), "mma": (64, 128, 2 * 80 * (di + 8))}[which]
    if T and E:
        args: tuple[Argument, ...] = (q, weights, keys, scales, position, row, score, hi, di, E, capacity, ratio, *strides)
        dev.launch("indexer", f"indexer_score_{which}", (T, _ceil(E, entries)), (block,), args, shared)
