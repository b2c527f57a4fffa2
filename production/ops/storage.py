"""Typed wrappers of the kernels that write the KV cache: window ring, entries, indexer keys, and the compressors' pooling.

    store_window(device, kv, position, row, ring, ring_position)

Each wrapper checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the
caller, nothing is allocated, and outputs, the cache among them, share no memory with inputs or with each other. A kernel that cannot run raises KernelError: nothing falls
back to torch. T = b * s flat tokens, position [T] i32 (-1 = pad, whose outputs stay untouched), row [T] i32 = batch row.
Positions, lengths and index lists are read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Tests: pytest parity/test_operations_attention.py.
"""

from __future__ import annotations

from torch import Tensor

from production.launch import Argument, Device
from production.ops.arguments import apart as _apart
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import shape as _shape
from production.ops.layout import KEY_BLOCK
from production.ops.layout import entry_strides as _entry_strides
from production.ops.layout import key_width as _key_width
from production.ops.layout import rotary_dims as _rotary_dims
from production.ops.layout import rows as _rows
from production.ops.layout import tokens as _tokens

POOL_CHANNELS = 64  # compressor.cu: a thread per channel


def store_window(dev: Device, kv: Tensor, position: Tensor, row: Tensor, ring: Tensor, ring_position: Tensor) -> None:
    """Store each token in its row's ring at slot position % slots, and its position beside it.

    kv [T, d] bf16 (rs), normalised and rotated; ring [b, slots, EB] u8; ring_position [b, slots] i32. At most `slots` tokens a row.
    """
    T, d = kv.shape
    b, slots, size = ring.shape
    _tokens("store_window", T, position, row)
    _shape("store_window", "ring_position", ring_position, b, slots)
    _need(b * slots >= T, "store_window", f"{T} tokens in {b} rows of {slots} slots: two would share a slot")
    _apart("store_window", {"ring": ring, "ring_position": ring_position}, {"kv": kv, "position": position, "row": row})
    r = _rotary_dims("store_window", d, size)
    strides = (*_rows("store_window", "kv", kv), *_entry_strides("store_window", "ring", ring), *_rows("store_window", "ring_position", ring_position))
    if T:
        dev.launch("kv_store", "store_window", (T,), (32,), (kv, position, row, ring, ring_position, d, r, slots, *strides))


def store_entries(dev: Device, rows: Tensor, entry: Tensor, cache: Tensor) -> None:
    """Store rows[i, j] as entry entry[i, j] of row i; -1 is skipped. rows [b, E, d] bf16; entry [b, E] i32; cache [b, capacity, EB] u8."""
    b, E, d = rows.shape
    _shape("store_entries", "entry", entry, b, E)
    _shape("store_entries", "cache", cache, b, *cache.shape[1:])
    _packed("store_entries", entry=entry)
    _apart("store_entries", {"cache": cache}, {"rows": rows, "entry": entry})
    r = _rotary_dims("store_entries", d, cache.shape[2])
    strides = (*_rows("store_entries", "rows", rows, 2), *_entry_strides("store_entries", "cache", cache))
    if b * E:
        dev.launch("kv_store", "store_entries", (E, b), (32,), (rows, entry, cache, d, r, E, cache.shape[1], *strides))


def store_index_keys(dev: Device, rows: Tensor, entry: Tensor, keys: Tensor, scales: Tensor) -> None:
    """The same for indexer keys: Hadamard, bf16, e2m1. rows [b, E, di] bf16; keys [b, capacity, di/2] u8; scales [b, capacity, di/32] u8."""
    b, E, di = rows.shape
    _key_width("store_index_keys", "rows", di)
    capacity = keys.shape[1]
    _shape("store_index_keys", "entry", entry, b, E)
    _shape("store_index_keys", "keys", keys, b, capacity, di // 2)
    _shape("store_index_keys", "scales", scales, b, capacity, di // KEY_BLOCK)
    _packed("store_index_keys", entry=entry)
    _apart("store_index_keys", {"keys": keys, "scales": scales}, {"rows": rows, "entry": entry})
    strides = (
        *_rows("store_index_keys", "rows", rows, 2), *_rows("store_index_keys", "keys", keys, 2), *_rows("store_index_keys", "scales", scales, 2),
    )  # fmt: skip
    if b * E:
        args = (rows, entry, keys, scales, di, E, capacity, *strides, di**-0.5)
        dev.launch("kv_store", "store_index_keys", (E, b), (32,), args, 4 * di)


# ---- compressor ----


def _pooling(
    operation: str, width: int, ratio: int, kv: Tensor, gate: Tensor, ape: Tensor, state_kv: Tensor, state_gate: Tensor, start: Tensor, count: Tensor,
    pooled: Tensor, entry: Tensor, entry_position: Tensor,
) -> tuple[int, int]:  # fmt: skip
    """Checks what both forms share; returns overlap (0 or 1) and R, the rows of state."""
    b, E, out = pooled.shape
    _need(width in (out, 2 * out), operation, f"features of {width} for pooled entries of {out}, expected {out} or {2 * out}")
    overlap = width // out - 1
    slots = ratio * (1 + overlap)
    _shape(operation, "ape", ape, ratio, width)
    _shape(operation, "state_kv", state_kv, b, slots, width)
    _shape(operation, "state_gate", state_gate, b, slots, width)
    _shape(operation, "start", start, b)
    _shape(operation, "count", count, b)
    _shape(operation, "entry", entry, b, E)
    _shape(operation, "entry_position", entry_position, b, E)
    _packed(operation, ape=ape, state_kv=state_kv, state_gate=state_gate, start=start, count=count, pooled=pooled, entry=entry, entry_position=entry_position)
    _apart(
        operation, {"pooled": pooled, "entry": entry, "entry_position": entry_position, "state_kv": state_kv, "state_gate": state_gate},
        {"kv": kv, "gate": gate, "ape": ape, "start": start, "count": count},
    )  # fmt: skip
    return overlap, slots


def compressor_prefill(
    dev: Device, kv: Tensor, gate: Tensor, ape: Tensor, state_kv: Tensor, state_gate: Tensor, start: Tensor, count: Tensor,
    pooled: Tensor, entry: Tensor, entry_position: Tensor, ratio: int,
) -> None:  # fmt: skip
    """Pool every group that this call completes, then keep the rows that later entries need.

    kv, gate [b, s, c*d'] f32, equal strides; ape [ratio, c*d'] f32; state_kv, state_gate [b, R, c*d'] f32, in place, gate with ape added,
    R = 2 * ratio where groups overlap (c = 2), else ratio; start, count [b] i32; pooled [b, E, d'] bf16 with E >= s // ratio + 1;
    entry, entry_position [b, E] i32, -1 where nothing was completed (pooled stays untouched there)
    """
    b, s, width = kv.shape
    E, out = pooled.shape[1:]
    overlap, slots = _pooling("compressor_prefill", width, ratio, kv, gate, ape, state_kv, state_gate, start, count, pooled, entry, entry_position)
    _shape("compressor_prefill", "gate", gate, b, s, width)
    _need(s // ratio < E, "compressor_prefill", f"{E} entries for calls of {s} tokens, expected at least {s // ratio + 1}")
    strides = _rows("compressor_prefill", "kv", kv, 2)
    _need(_rows("compressor_prefill", "gate", gate, 2) == strides, "compressor_prefill", "kv and gate have different strides")
    if not b:
        return
    args: tuple[Argument, ...] = (kv, gate, ape, state_kv, state_gate, start, count)
    pool = (pooled, entry, entry_position, E, out, ratio, overlap)
    dev.launch("compressor", "compressor_pool", (E, b, _ceil(out, POOL_CHANNELS)), (POOL_CHANNELS,), (*args, *pool, *strides))
    if s:
        keep = (width, ratio, overlap)
        dev.launch("compressor", "compressor_keep", (slots, b, _ceil(width, POOL_CHANNELS)), (POOL_CHANNELS,), (*args, *keep, *strides))


def compressor_step(
    dev: Device, kv: Tensor, gate: Tensor, ape: Tensor, state_kv: Tensor, state_gate: Tensor, start: Tensor, count: Tensor,
    pooled: Tensor, entry: Tensor, entry_position: Tensor, ratio: int,
) -> None:  # fmt: skip
    """Keep one token a row (count 0: none), and pool where it is its group's last.

    kv, gate [b, c*d'] f32 (rs), equal strides; pooled [b, 1, d'] bf16; entry, entry_position [b, 1] i32; the rest as in prefill
    """
    b, width = kv.shape
    out = pooled.shape[2]
    overlap, _ = _pooling("compressor_step", width, ratio, kv, gate, ape, state_kv, state_gate, start, count, pooled, entry, entry_position)
    _shape("compressor_step", "pooled", pooled, b, 1, out)
    _shape("compressor_step", "gate", gate, b, width)
    (stride,) = _rows("compressor_step", "kv", kv)
    _need(_rows("compressor_step", "gate", gate) == (stride,), "compressor_step", "kv and gate have different strides")
    if b:
        args = (kv, gate, ape, state_kv, state_gate, start, count, pooled, entry, entry_position, out, ratio, overlap, stride)
        dev.launch("compressor", "compressor_step", (1, b, _ceil(out, POOL_CHANNELS)), (POOL_CHANNELS,), args)
