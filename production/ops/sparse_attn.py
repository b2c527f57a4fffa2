"""Typed wrapper of attention over its two sources, the window ring and compressed entries.

    sparse_attn(device, q, ring, ring_position, entries, selected, position, row, sink, out, window=128, ratio=4)

Each wrapper checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the
caller, nothing is allocated, and outputs never alias inputs. A kernel that cannot run raises KernelError: nothing falls
back to torch. T = b * s flat tokens, position [T] i32 (-1 = pad, whose outputs stay untouched), row [T] i32 = batch row.
Positions, lengths and index lists are read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Tests: pytest parity/test_operations_attention.py.
"""

from __future__ import annotations

from torch import Tensor

from production.launch import Device, KernelError
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import shape as _shape
from production.ops.layout import entry_strides as _entry_strides
from production.ops.layout import rotary_dims as _rotary_dims
from production.ops.layout import rows as _rows
from production.ops.layout import tokens as _tokens

SPLIT_KEYS, MAX_SPLITS = 64, 64  # keys of the smallest split; beyond 64 splits each takes more keys
TILE_KEYS, HEADS_PER_BLOCK, MMA_HEADS = 32, 8, 16  # sparse_attn.cu: keys decoded at a time, heads that share them


def splits_for(max_keys: int) -> int:
    """Splits of a decode step that sees at most max_keys keys: 1 up to 64 keys, then one per 64, at most 64."""
    return max(1, min(MAX_SPLITS, _ceil(max_keys, SPLIT_KEYS)))


def sparse_attn(
    dev: Device, q: Tensor, ring: Tensor, ring_position: Tensor, entries: Tensor | None, selected: Tensor | None, position: Tensor,
    row: Tensor, sink: Tensor, out: Tensor, window: int, ratio: int, splits: int = 1, part_o: Tensor | None = None,
    part_ml: Tensor | None = None, visible: Tensor | None = None, variant: str | None = None,
) -> None:  # fmt: skip
    """out = softmax(d^-0.5 q k) v over window and compressed keys, k = v, with exp(sink) in the denominator only.

    q, out [T, h, d] bf16 (rs); ring [b, slots, EB] u8; ring_position [b, slots] i32; entries [b, capacity, EB] u8 or None (ratio 0);
    selected [T, K] i32 (rs) or None: every entry e < (position + 1) // ratio; sink [h] f32.
    splits = 1: one kernel. More: part_o [T, splits, h, d], part_ml [T, splits, h, 2] f32 are scratch, at least 64 keys a split.
    visible [T, window + K] i32 (rs; K = capacity without a list): ring_position of the slots read, oldest first, then
    entry numbers read; -1 = none. Variants: naive, tile, mma (16 heads on the tensor cores; default from 16 heads on).
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
    which = _choose(name, variant, "mma" if h >= MMA_HEADS else "tile", ("naive", "tile", "mma"))
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
    if part_o is None or part_ml is None:
        raise KernelError(f"{name}: {splits} splits need part_o and part_ml")
    _shape(name, "part_o", part_o, T, splits, h, d)
    _shape(name, "part_ml", part_ml, T, splits, h, 2)
    _packed(name, part_o=part_o, part_ml=part_ml)
    dev.launch(name, f"sparse_attn_split_{which}", (*blocks, splits), (128,), (*keys, part_o, part_ml, visible, *sizes, *where, *seen, group), shared)
    block = 32 if d <= 256 else 64 if d <= 512 else 128
    dev.launch(name, "sparse_attn_combine", (T, h), (block,), (part_o, part_ml, sink, position, out, h, d, splits, out_stride))
