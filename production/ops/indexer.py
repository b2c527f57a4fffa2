"""Typed wrappers of the indexer's kernels: Hadamard and e2m1 of queries, scores of all keys. The best of them: production/ops/topk.py.

    indexer_score(device, q, weights, keys, scales, position, row, score, ratio=4)

Each wrapper checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the
caller, nothing is allocated, and outputs share no memory with inputs or with each other. A kernel that cannot run raises KernelError: nothing falls
back to torch. T = b * s flat tokens, position [T] i32 (-1 = pad, whose outputs stay untouched), row [T] i32 = batch row.
Positions, lengths and index lists are read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Tests: pytest parity/test_operations_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from production.launch import Argument, Device, KernelError
from production.ops.arguments import apart as _apart
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
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
    _apart("hadamard_e2m1", {"out": out}, {"x": x})
    kernel = {"naive": "hadamard_e2m1_naive", "butterfly": "hadamard_e2m1"}[_choose("hadamard_e2m1", variant, "butterfly", ("naive", "butterfly"))]
    if R:
        strides = (*_rows("hadamard_e2m1", "x", x), *_rows("hadamard_e2m1", "out", out))
        dev.launch("hadamard_quant", kernel, (R,), (32,), (x, out, di, *strides, di**-0.5), 4 * di)


# A prepared query of `heads` heads, as in kernels/indexer.cuh: codes, two weights and four scales a head, flags.
PREPARED_HEADS = (16, 64)
FAST_DIM = 128
TILE_WARPS = {"int8_tiles": 12, "int8_tiles_8": 8}
WGMMA_ROWS = {"wgmma": 3, "wgmma_16": 4}  # warpgroups of a block
WGMMA_TILES = {"wgmma_tiles": (3, 384)}  # warpgroups, keys
WGMMA_TILES_SHARED, WGMMA_STAGES = 3 * 8 * (64 * 132 + 16), 6  # TILES_SHARED, ROW_STAGES


def prepared_heads(hi: int) -> int | None:
    """Heads that the int8 variants pad hi to; None: more than they take."""
    return next((heads for heads in PREPARED_HEADS if hi <= heads), None)


def indexer_scratch(T: int, hi: int) -> int:
    """Bytes of scratch that the variants with `tiles` need for T queries; 0 where they do not take so many heads."""
    heads = prepared_heads(hi)
    return 0 if heads is None else T * (heads * (FAST_DIM + 24) + 16)


def rows_splits(T: int, processors: int = 132) -> int:
    """Blocks a query of `int8`: as few as leave few of a card's processors idle. Scores do not depend on it."""
    if 4 * processors <= T:
        return 1
    idle = {n: -(T * n) % processors / (-(-(T * n) // processors) * processors) for n in range(max(1, processors // T), max(1, processors // T) + 8)}
    return min(idle, key=lambda n: (idle[n] > 0.05, idle[n] if idle[n] > 0.05 else 0.0, n))


def indexer_score(
    dev: Device, q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, position: Tensor, row: Tensor, score: Tensor, ratio: int,
    variant: str | None = None, scratch: Tensor | None = None,
) -> None:  # fmt: skip
    """score[t,e] = sum_h weights[t,h] relu(q[t,h] . key_e), -inf for e >= (position + 1) // ratio.

    q [T, hi, di] bf16 (rs); weights [T, hi] f32 (rs); keys [b, capacity, di/2] u8; scales [b, capacity, di/32] u8; score [T, E] f32 (rs).
    Variants: naive, entries, mma; for di = 128 and at most 64 heads int8 (few queries) and int8_tiles, int8_tiles_8 (many); on sm_90a
    and for 17 heads and more also wgmma, wgmma_16, wgmma_tiles. The latter six give the same bits; their q must be e2m1 values
    times a power of two per 32, as hadamard_e2m1 writes them: others make a token's scores NaN.
    scratch: u8 of `indexer_scratch(T, hi)` bytes for those with tiles.
    """
    T, hi, di = q.shape
    E, (b, capacity) = score.shape[1], keys.shape[:2]
    _key_width("indexer_score", "q", di)
    _tokens("indexer_score", T, position, row)
    _shape("indexer_score", "weights", weights, T, hi)
    _shape("indexer_score", "keys", keys, b, capacity, di // 2)
    _shape("indexer_score", "scales", scales, b, capacity, di // KEY_BLOCK)
    _shape("indexer_score", "score", score, T, E)
    _apart(
        "indexer_score", {"score": score, "scratch": scratch},
        {"q": q, "weights": weights, "keys": keys, "scales": scales, "position": position, "row": row},
    )  # fmt: skip
    which = _choose("indexer_score", variant, "entries", ("naive", "entries", "mma", "int8", *TILE_WARPS, *WGMMA_ROWS, *WGMMA_TILES))
    q_stride, weights_stride = _rows("indexer_score", "q", q)[0], _rows("indexer_score", "weights", weights)[0]
    keys_strides, scales_strides = _rows("indexer_score", "keys", keys, 2), _rows("indexer_score", "scales", scales, 2)
    score_stride = _rows("indexer_score", "score", score)[0]
    if which not in ("naive", "entries", "mma"):
        heads = _int8_heads(which, q, keys, scales, q_stride, keys_strides, scales_strides)
        if T and E:
            _int8(dev, which, heads, q, weights, keys, scales, position, row, score, ratio, scratch, q_stride, weights_stride, keys_strides[0], scales_strides[0], score_stride)
        return
    entries, block, shared = {"naive": (64, 64, 0), "entries": (32, 128, 4 * (32 * (di + 4) + hi * di)), "mma": (64, 128, 2 * 80 * (di + 8))}[which]
    if T and E:
        strides = (q_stride, weights_stride, *keys_strides, *scales_strides, score_stride)
        args: tuple[Argument, ...] = (q, weights, keys, scales, position, row, score, hi, di, E, capacity, ratio, *strides)
        dev.launch("indexer", f"indexer_score_{which}", (T, _ceil(E, entries)), (block,), args, shared)


def _int8_heads(
    which: str, q: Tensor, keys: Tensor, scales: Tensor, q_stride: int, keys_strides: tuple[int, ...], scales_strides: tuple[int, ...]
) -> int:  # fmt: skip
    """Heads that the kernels pad to; KernelError where they do not take these shapes or this layout."""
    operation, (_, hi, di), entries = f"indexer_score {which}", q.shape, keys.shape[1]
    heads = prepared_heads(hi)
    if di != FAST_DIM or heads is None:
        raise KernelError(f"{operation}: {hi} heads of {di}, it takes up to {PREPARED_HEADS[-1]} heads of {FAST_DIM}; the variant entries takes any")
    if entries > 1:
        _need(keys_strides[1] == di // 2 and scales_strides[1] == di // KEY_BLOCK, operation, f"entries {keys_strides[1]} and {scales_strides[1]} bytes apart, expected no gaps")
    _need(heads == PREPARED_HEADS[-1] or "wgmma" not in which, operation, f"{hi} heads, it takes {PREPARED_HEADS[0] + 1} to {PREPARED_HEADS[-1]}; int8 takes fewer")
    aligned = q.data_ptr() % 16 == keys.data_ptr() % 16 == scales.data_ptr() % 4 == 0 and q_stride % 8 == keys_strides[0] % 16 == scales_strides[0] % 4 == 0
    _need(aligned, operation, "rows of q and keys must begin at multiples of 16 bytes, of scales at multiples of 4")
    return heads


def _int8(
    dev: Device, which: str, heads: int, q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor, position: Tensor, row: Tensor, score: Tensor, ratio: int,
    scratch: Tensor | None, q_stride: int, weights_stride: int, keys_stride: int, scales_stride: int, score_stride: int,
) -> None:  # fmt: skip
    (T, hi, _), E, capacity = q.shape, score.shape[1], keys.shape[1]
    wgmma = "wgmma" in which
    source = "indexer_wgmma" if wgmma else "indexer_int8"
    if "tiles" not in which:
        rows: tuple[Argument, ...] = (q, weights, keys, scales, position, row, score, hi, E, capacity, ratio, q_stride, weights_stride, keys_stride, scales_stride, score_stride)
        warps = 4 * WGMMA_ROWS[which] if wgmma else 12
        kernel, shared = (f"indexer_rows_wgmma_{warps // 4}", 10_240 + warps * WGMMA_STAGES * 32 * 64) if wgmma else (f"indexer_score_int8_{heads}", warps * 4 * 32 * 64)
        dev.launch(source, kernel, (T, min(rows_splits(T), _ceil(E, warps * 32))), (32 * warps,), rows, shared)
        return
    size = indexer_scratch(T, hi)
    if scratch is None or scratch.dtype != torch.uint8 or scratch.numel() < size:
        raise KernelError(f"indexer_score {which}: scratch of {0 if scratch is None else scratch.numel()} u8, {T} queries of {hi} heads need {size}")
    _packed("indexer_score", scratch=scratch)
    _need(scratch.data_ptr() % 16 == 0, "indexer_score", "scratch must begin at a multiple of 16 bytes")
    prepare = "indexer_prepare_wgmma" if wgmma else f"indexer_prepare_{heads}"
    dev.launch(source, prepare, (T,), (256,), (q, weights, position, scratch, hi, q_stride, weights_stride))
    tiles: tuple[Argument, ...] = (scratch, keys, scales, position, row, score, T, E, capacity, ratio, keys_stride, scales_stride, score_stride)
    if wgmma:
        groups, tile_keys = WGMMA_TILES[which]
        kernel, threads, shared = "indexer_tiles_wgmma", 128 * groups, WGMMA_TILES_SHARED
    else:
        warps = 4 if heads == PREPARED_HEADS[0] else TILE_WARPS[which]
        kernel, threads, shared, tile_keys = f"indexer_tiles_{heads}_{warps}", 32 * warps, 4 * (heads * (FAST_DIM + 4) + 16), 64 * warps
    dev.launch(source, kernel, (_ceil(E, tile_keys), _ceil(T, 64)), (threads,), tiles, shared)
