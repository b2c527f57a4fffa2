"""Typed wrapper of attention over its two sources, the window ring and compressed entries.

    sparse_attn(device, q, ring, ring_position, entries, selected, position, row, sink, out, window=128, ratio=4)

Each wrapper checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the
caller, nothing is allocated, and outputs share no memory with inputs or with each other. A kernel that cannot run raises KernelError: nothing falls
back to torch. T = b * s flat tokens, position [T] i32 (-1 = pad, whose outputs stay untouched), row [T] i32 = batch row.
Positions, lengths and index lists are read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Tests: pytest parity/test_operations_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from production.launch import Device, KernelError
from production.ops.arguments import apart as _apart
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import shape as _shape
from production.ops.layout import entry_bytes as _entry_bytes
from production.ops.layout import entry_strides as _entry_strides
from production.ops.layout import rotary_dims as _rotary_dims
from production.ops.layout import rows as _rows
from production.ops.layout import tokens as _tokens

SPLIT_KEYS, MAX_SPLITS = 64, 64  # keys of the smallest split; beyond 64 splits each takes more keys
TILE_KEYS, HEADS_PER_BLOCK, MMA_HEADS = 32, 8, 16  # sparse_attn.cu: keys decoded at a time, heads that share them

# sparse_attn_decode.cu: parts of p by variant, heads that a block can have by head_dim, keys of a tile
FLASH = {"flash": 2, "flash_p_bf16": 1}
FLASH_HEADS = {512: (64, 32, 16), 128: (16,)}
FLASH_ROTARY, FLASH_TILE = 64, 64
FLASH_ONE_LAUNCH = False
FLASH_SPLIT_KEYS, FLASH_MAX_SPLITS = 128, 32
FLASH_TILE_US, FLASH_BLOCK_US, SMS = {64: 6.1, 32: 4.3, 16: 2.8}, 6.0, 132  # measured on an H200, to choose a block's heads; moves no bit

# sparse_attn_wgmma.cu: parts of p by variant, heads of a block, bytes of shared memory
WGMMA = {"wgmma": 2, "wgmma_p_bf16": 1}
WGMMA_SPLIT_KEYS, WGMMA_MAX_SPLITS = 128, 16  # a pair of tiles; a split leaves 128 KB, worth about two tiles where many rows share the card
WGMMA_DIM, WGMMA_ROTARY, WGMMA_HEADS, WGMMA_SHARED = 512, 64, 64, 231_584


def splits_for(max_keys: int, variant: str | None = None) -> int:
    """Splits of a decode step that sees at most max_keys keys: 1 up to 64 keys, then one per 64, at most 64; flash: per 128, at most 32;
    wgmma: per 128, at most 16. Capacity alone decides, never the batch: a row gives the same bits alone and with others.
    """
    keys, most = (FLASH_SPLIT_KEYS, FLASH_MAX_SPLITS) if variant in FLASH else (WGMMA_SPLIT_KEYS, WGMMA_MAX_SPLITS) if variant in WGMMA else (SPLIT_KEYS, MAX_SPLITS)
    return max(1, min(most, _ceil(max_keys, keys)))


def flash_fits(d: int, r: int) -> bool:
    """Whether flash is built for heads of d dims, r of them rotary."""
    return d in FLASH_HEADS and r == FLASH_ROTARY


def wgmma_fits(d: int, r: int) -> bool:
    """Whether the wgmma kernel, for Hopper, is built for heads of d dims, r of them rotary."""
    return (d, r) == (WGMMA_DIM, WGMMA_ROTARY)


def merges_in_launch(variant: str | None) -> bool:
    """Whether decode gives this variant counters, so that one launch attends and merges: FLASH_ONE_LAUNCH, whichever measures faster."""
    return FLASH_ONE_LAUNCH and variant in FLASH


def merge_counters(T: int, h: int) -> int:
    """Elements of `done` for T tokens of h heads."""
    return T * _ceil(h, min(FLASH_HEADS[512]))


def flash_heads(d: int, T: int, h: int, splits: int, max_keys: int) -> int:
    """Heads of a block, the choice that should end first: fewer heads fill the card, more heads decode a key less often."""
    tiles = max(1, _ceil(_ceil(max_keys, splits), FLASH_TILE))

    def us(heads: int) -> float:
        return _ceil(T * splits * _ceil(h, heads), SMS) * (FLASH_BLOCK_US + tiles * FLASH_TILE_US[heads])

    return min(FLASH_HEADS[d], key=us)


def flash_shared(d: int, heads: int, parts: int) -> int:
    """Bytes of shared memory of a block: Shape::SHARED of sparse_attn_flash.cuh."""
    row, columns = 2 * (d + 8), FLASH_TILE + 8
    values = (heads + FLASH_TILE) * row + parts * heads * columns * 2 + 2 * heads * columns * 4
    return values + FLASH_TILE * (_entry_bytes(d, FLASH_ROTARY) + 8) + 8 * heads + 32


def sparse_attn(
    dev: Device, q: Tensor, ring: Tensor, ring_position: Tensor, entries: Tensor | None, selected: Tensor | None, position: Tensor,
    row: Tensor, sink: Tensor, out: Tensor, window: int, ratio: int, splits: int = 1, part_o: Tensor | None = None,
    part_ml: Tensor | None = None, visible: Tensor | None = None, variant: str | None = None, done: Tensor | None = None,
    heads_per_block: int | None = None,
) -> None:  # fmt: skip
    """out = softmax(d^-0.5 q k) v over window and compressed keys, k = v, with exp(sink) in the denominator only.

    q, out [T, h, d] bf16 (rs); ring [b, slots, EB] u8; ring_position [b, slots] i32; entries [b, capacity, EB] u8 or None (ratio 0);
    selected [T, K] i32 (rs) or None: every entry e < (position + 1) // ratio; sink [h] f32.
    splits = 1: one kernel. More: part_o [T, splits, h, d], part_ml [T, splits, h, 2] f32 are scratch, at least 64 keys a split.
    visible [T, window + K] i32 (rs; K = capacity without a list): ring_position of the slots read, oldest first, then
    entry numbers read; -1 = none. Variants: naive, tile, mma (16 heads on the tensor cores; default from 16 heads on),
    flash (d 128 or 512, r 64), flash_p_bf16 (the same, p rounded to bf16). Of the last two: done [merge_counters(T, h)] i32,
    zero before and after: splits are merged in the same launch, not by a second one; heads_per_block: None chooses by shape.
    wgmma, wgmma_p_bf16 (sm_90a, d 512, r 64): 64 heads of a query at a time on Hopper's tensor cores, at least 128 keys a split;
    """
    T, h, d = q.shape
    b, slots, size = ring.shape
    name = "sparse_attn"
    _tokens(name, T, position, row)
    r = _rotary_dims(name, d, size)
    _shape(name, "ring_position", ring_position, b, slots)
    _shape(name, "sink", sink, h)
    _shape(name, "out", out, T, h, d)
    _packed(name, sink=sink)
    _need(window > 0, name, f"window {window}")
    _need(splits > 0, name, f"{splits} splits")
    _need((entries is None) == (ratio == 0), name, f"ratio {ratio} {'without' if entries is None else 'with'} compressed entries")
    _need(selected is None or entries is not None, name, "a list of entries without entries")
    capacity = entries.shape[1] if entries is not None else 0
    listed = selected.shape[1] if selected is not None else 0
    entry_strides = (0, 0)
    if entries is not None:
        _shape(name, "entries", entries, b, capacity, size)
        entry_strides = _entry_strides(name, "entries", entries)
    if selected is not None:
        _shape(name, "selected", selected, T, listed)
    if visible is not None:
        _shape(name, "visible", visible, T, window + (capacity if selected is None else listed))
    _apart(
        name, {"out": out, "part_o": part_o, "part_ml": part_ml, "visible": visible, "done": done},
        {"q": q, "ring": ring, "ring_position": ring_position, "entries": entries, "selected": selected, "position": position, "row": row, "sink": sink},
    )  # fmt: skip
    which = _choose(name, variant, "mma" if h >= MMA_HEADS else "tile", ("naive", "tile", "mma", *FLASH, *WGMMA))
    _need(which in FLASH or (done is None and heads_per_block is None), name, f"done and heads_per_block are for {', '.join(FLASH)}, not {which}")
    if which in FLASH:
        _need(flash_fits(d, r), name, f"{which} is built for d in {list(FLASH_HEADS)} and r = {FLASH_ROTARY}, not d = {d}, r = {r}")
    if which in WGMMA:
        _need(wgmma_fits(d, r), name, f"{which} is built for d = {WGMMA_DIM} and r = {WGMMA_ROTARY}, not d = {d}, r = {r}")
    if which in FLASH or which in WGMMA:
        _need(splits <= MAX_SPLITS, name, f"{splits} splits, {which} takes at most {MAX_SPLITS}")
        _need((ring.data_ptr() | (0 if entries is None else entries.data_ptr())) % 8 == 0, name, "ring and entries begin at multiples of 8 bytes")
    if not T:
        return

    where = (
        *_rows(name, "q", q), *_entry_strides(name, "ring", ring), *_rows(name, "ring_position", ring_position), *entry_strides,
        *(_rows(name, "selected", selected) if selected is not None else (0,)),
    )  # fmt: skip
    seen = _rows(name, "visible", visible) if visible is not None else (0,)
    keys = (q, ring, ring_position, entries, selected, position, row)
    sizes = (h, d, r, slots, window, listed, capacity, ratio, d**-0.5)
    (out_stride,) = _rows(name, "out", out)
    if which == "naive":
        dev.launch(name, "sparse_attn_naive", (T, h), (32,), (*keys, sink, out, visible, *sizes, *where, out_stride, *seen), 8 * d)
        return
    if splits > 1:
        if part_o is None or part_ml is None:
            raise KernelError(f"{name}: {splits} splits need part_o and part_ml")
        _shape(name, "part_o", part_o, T, splits, h, d)
        _shape(name, "part_ml", part_ml, T, splits, h, 2)
        _packed(name, part_o=part_o, part_ml=part_ml, done=done)
        wide = which in FLASH or which in WGMMA
        _need(not wide or (part_o.data_ptr() | part_ml.data_ptr()) % 16 == 0, name, "part_o and part_ml begin at multiples of 16 bytes")
        _need(done is None or done.numel() >= merge_counters(T, h), name, f"done has {0 if done is None else done.numel()} elements, expected {merge_counters(T, h)}")
    count = listed if selected is not None else -1
    merging = (part_o, part_ml, sink, position, out, h, d, splits, window, count, capacity, ratio, out_stride)  # of flash and wgmma
    if which in FLASH:
        heads = heads_per_block or flash_heads(d, T, h, splits, window + (listed if selected is not None else capacity))
        _need(heads in FLASH_HEADS[d], name, f"{which} with {heads} heads a block, at d = {d} there are {list(FLASH_HEADS[d])}")
        counters = done if splits > 1 else None
        args = (*keys, sink, out, part_o, part_ml, counters, visible, h, slots, window, listed, capacity, ratio, d**-0.5, *where, out_stride, *seen)
        dev.launch("sparse_attn_decode", f"flash_{d}_h{heads}_p{FLASH[which]}", (T, _ceil(h, heads), splits), (256,), args, flash_shared(d, heads, FLASH[which]))
        if splits > 1 and done is None:
            dev.launch("sparse_attn_decode", "sparse_attn_combine", (T, h), (d // 4,), merging)
        return
    if which in WGMMA:
        blocks_at_once = torch.cuda.get_device_properties(dev.torch_device).multi_processor_count if dev.torch_device.type == "cuda" else 3
        args = (*keys, sink, out, visible, *sizes, *where, out_stride, *seen, T)
        rounds = "" if WGMMA[which] == 2 else "_p_bf16"
        grid = (min(blocks_at_once, T * _ceil(h, WGMMA_HEADS) * splits),)
        if splits == 1:
            dev.launch("sparse_attn_wgmma", f"sparse_attn_{which}", grid, (384,), args, WGMMA_SHARED)
            return
        dev.launch("sparse_attn_wgmma", f"sparse_attn_wgmma_split{rounds}", grid, (384,), (*args, splits, part_o, part_ml), WGMMA_SHARED)
        dev.launch("sparse_attn_wgmma", "sparse_attn_combine", (T, h), (d // 4,), merging)
        return
    group = MMA_HEADS if which == "mma" else min(h, HEADS_PER_BLOCK)
    width = _ceil(d, 16) * 16
    shared = 4 * (group * (width + 4) + TILE_KEYS * group + 3 * group + TILE_KEYS)  # sums, scores, maxima, who is a key
    if which == "mma":
        shared += 2 * ((TILE_KEYS + group) * (width + 8) + 3 * group * (TILE_KEYS + 8))  # keys, queries, three parts of p
    else:
        shared += 4 * (TILE_KEYS + group) * (width + 4)
    blocks = (T, _ceil(h, group))
    if splits == 1:
        args = (*keys, sink, out, visible, *sizes, *where, out_stride, *seen, group)
        dev.launch(name, f"sparse_attn_{which}", blocks, (128,), args, shared)
        return
    dev.launch(name, f"sparse_attn_split_{which}", (*blocks, splits), (128,), (*keys, part_o, part_ml, visible, *sizes, *where, *seen, group), shared)
    block = 32 if d <= 256 else 64 if d <= 512 else 128
    dev.launch(name, "sparse_attn_combine", (T, h), (block,), (part_o, part_ml, sink, position, out, h, d, splits, out_stride))
