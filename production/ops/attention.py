"""Typed wrappers of the kernels around attention: KV storage, compressors, indexer, top-k, attention, hyper-connections.

    sparse_attn(device, q, ring, ring_position, entries, selected, position, row, sink, out, window=128, ratio=4)

Each wrapper checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the
caller, nothing is allocated, and outputs never alias inputs. A kernel that cannot run raises KernelError: nothing falls
back to torch. T = b * s flat tokens, position [T] i32 (-1 = pad, whose outputs stay untouched), row [T] i32 = batch row.
Positions, lengths and index lists are read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Not here: norms, rotation, linears, experts (dense.py). Tests: pytest parity/test_operations_attention.py.
"""

from __future__ import annotations

from torch import Tensor

from production.launch import Argument, Device, KernelError
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import shape as _shape

SCALE_BLOCK, KEY_BLOCK = 64, 32  # e4m3 and e2m1 codes per scale, as in entry.cuh
SPLIT_KEYS, MAX_SPLITS = 64, 64  # keys of the smallest split; beyond 64 splits each takes more keys
TILE_KEYS, HEADS_PER_BLOCK, MMA_HEADS = 32, 8, 16  # sparse_attn.cu: keys decoded at a time, heads that share them
POOL_CHANNELS = 64  # compressor.cu: a thread per channel


def _rows(operation: str, name: str, tensor: Tensor, outer: int = 1) -> tuple[int, ...]:
    """Strides of the first `outer` dims; the dims after them must lie without gaps."""
    expected = 1
    for dim in range(tensor.dim() - 1, outer - 1, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            raise KernelError(
                f"{operation}: {name} {list(tensor.shape)} has strides {list(tensor.stride())}, only the first {outer} may have gaps"
            )
        expected *= tensor.shape[dim]
    return tuple(tensor.stride()[:outer])


def _tokens(operation: str, T: int, position: Tensor, row: Tensor | None = None) -> None:
    _shape(operation, "position", position, T)
    if row is not None:
        _shape(operation, "row", row, T)
    _packed(operation, position=position, row=row)


# ---- storage ----


def entry_bytes(d: int, r: int) -> int:
    """Bytes of one stored key = value: (d - r) e4m3 codes, r bf16, (d - r) / 64 scales, up to a multiple of 8. 584 at 512, 64."""
    _need(d > r >= 0 and (d - r) % SCALE_BLOCK == 0 and r % 2 == 0, "entry_bytes", f"d = {d}, r = {r}: d - r must be a multiple of 64, r even")
    return _ceil(d + r + (d - r) // SCALE_BLOCK, 8) * 8


def _rotary_dims(operation: str, d: int, size: int) -> int:
    """r of an entry of `size` bytes that holds d dims: the one for which entry_bytes(d, r) is `size`."""
    for r in range(d % SCALE_BLOCK, d, SCALE_BLOCK):
        if r % 2 == 0 and entry_bytes(d, r) == size:
            return r
    raise KernelError(f"{operation}: entries of {size} bytes hold no {d} dims in any split into e4m3 and rotary dims")


def _entry_strides(operation: str, name: str, cache: Tensor) -> tuple[int, int]:
    row, entry = _rows(operation, name, cache, 2)
    _need(row % 8 == 0 and entry % 8 == 0, operation, f"{name} has strides {row}, {entry} bytes, expected multiples of 8")
    return row, entry


def _key_width(operation: str, name: str, di: int) -> None:
    _need(di >= KEY_BLOCK and di & (di - 1) == 0, operation, f"{name} is {di} wide, expected a power of two >= {KEY_BLOCK}")


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


def store_window(dev: Device, kv: Tensor, position: Tensor, row: Tensor, ring: Tensor, ring_position: Tensor) -> None:
    """Store each token in its row's ring at slot position % slots, and its position beside it.

    kv [T, d] bf16 (rs), normalised and rotated; ring [b, slots, EB] u8; ring_position [b, slots] i32. At most `slots` tokens a row.
    """
    T, d = kv.shape
    b, slots, size = ring.shape
    _tokens("store_window", T, position, row)
    _shape("store_window", "ring_position", ring_position, b, slots)
    _need(b * slots >= T, "store_window", f"{T} tokens in {b} rows of {slots} slots: two would share a slot")
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
    strides = (
        *_rows("store_index_keys", "rows", rows, 2), *_rows("store_index_keys", "keys", keys, 2), *_rows("store_index_keys", "scales", scales, 2),
    )  # fmt: skip
    if b * E:
        args = (rows, entry, keys, scales, di, E, capacity, *strides, di**-0.5)
        dev.launch("kv_store", "store_index_keys", (E, b), (32,), args, 4 * di)


# ---- compressor ----


def _pooling(
    operation: str, width: int, ratio: int, ape: Tensor, state_kv: Tensor, state_gate: Tensor, start: Tensor, count: Tensor,
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
    return overlap, slots


def compressor_prefill(
    dev: Device, kv: Tensor, gate: Tensor, ape: Tensor, state_kv: Tensor, state_gate: Tensor, start: Tensor, count: Tensor,
    pooled: Tensor, entry: Tensor, entry_position: Tensor, ratio: int,
) -> None:  # fmt: skip
    """Pool every group that this call completes, then keep the rows that later entries need.

    kv, gate [b, s, c*d'] f32, equal strides; ape [ratio, c*d'] f32; state_kv, state_gate [b, R, c*d'] f32, gate with ape added,
    R = 2 * ratio where groups overlap (c = 2), else ratio; start, count [b] i32; pooled [b, E, d'] bf16 with E >= s // ratio + 1;
    entry, entry_position [b, E] i32, -1 where nothing was completed (pooled stays untouched there)
    """
    b, s, width = kv.shape
    E, out = pooled.shape[1:]
    overlap, slots = _pooling("compressor_prefill", width, ratio, ape, state_kv, state_gate, start, count, pooled, entry, entry_position)
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
    overlap, _ = _pooling("compressor_step", width, ratio, ape, state_kv, state_gate, start, count, pooled, entry, entry_position)
    _shape("compressor_step", "pooled", pooled, b, 1, out)
    _shape("compressor_step", "gate", gate, b, width)
    (stride,) = _rows("compressor_step", "kv", kv)
    _need(_rows("compressor_step", "gate", gate) == (stride,), "compressor_step", "kv and gate have different strides")
    if b:
        args = (kv, gate, ape, state_kv, state_gate, start, count, pooled, entry, entry_position, out, ratio, overlap, stride)
        dev.launch("compressor", "compressor_step", (1, b, _ceil(out, POOL_CHANNELS)), (POOL_CHANNELS,), args)


# ---- indexer ----


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


def topk(dev: Device, score: Tensor, position: Tensor, selected: Tensor, ratio: int, variant: str | None = None) -> None:
    """selected[t] = the k best of the (position + 1) // ratio visible entries, ascending, then -1; ties: lower entry first.

    score [T, E] f32 (rs); selected [T, k] i32 (rs). Variants: naive, radix (the same result).
    """
    T, E = score.shape
    k = selected.shape[1]
    _tokens("topk", T, position)
    _shape("topk", "selected", selected, T, k)
    which = _choose("topk", variant, "radix", ("naive", "radix"))
    strides = (*_rows("topk", "score", score), *_rows("topk", "selected", selected))
    if not T or not k:
        return
    if which == "naive":
        dev.launch("topk", "topk_naive", (_ceil(T, 32),), (32,), (score, position, selected, T, E, k, ratio, *strides))
    else:
        dev.launch("topk", "topk_radix", (T,), (256,), (score, position, selected, E, k, ratio, *strides))


# ---- attention ----


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


# ---- hyper-connections ----


def hc_pre(
    dev: Device, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, pre: Tensor, post: Tensor, comb: Tensor, a: Tensor, iters: int,
    hc_eps: float, norm_eps: float, variant: str | None = None,
) -> None:  # fmt: skip
    """The weights of a block's n residual streams, and its input a = sum_i pre[i] X[i].

    X [T, n, D] bf16 (rs); fn [(2+n)n, nD], base [(2+n)n], scale [3] f32; pre, post [T, n], comb [T, n, n] f32, first axis = source;
    a [T, D] bf16. comb: softmax, then `iters` column normalisations with iters - 1 row normalisations between them.
    Variants: naive, block.
    """
    T, n, D = X.shape
    rows = (2 + n) * n
    _shape("hc_pre", "fn", fn, rows, n * D)
    _shape("hc_pre", "base", base, rows)
    _shape("hc_pre", "scale", scale, 3)
    _shape("hc_pre", "pre", pre, T, n)
    _shape("hc_pre", "post", post, T, n)
    _shape("hc_pre", "comb", comb, T, n, n)
    _shape("hc_pre", "a", a, T, D)
    _packed("hc_pre", fn=fn, base=base, scale=scale, pre=pre, post=post, comb=comb, a=a)
    _need(iters >= 1, "hc_pre", f"{iters} Sinkhorn iterations, expected at least 1")
    which = _choose("hc_pre", variant, "block", ("naive", "block"))
    (stride,) = _rows("hc_pre", "X", X)
    if not T:
        return
    tensors = (X, fn, base, scale, pre, post, comb, a)
    if which == "naive":
        dev.launch("hyper_connection", "hc_pre_naive", (_ceil(T, 32),), (32,), (*tensors, T, n, D, iters, stride, hc_eps, norm_eps))
    else:
        args = (*tensors, n, D, iters, stride, hc_eps, norm_eps)
        dev.launch("hyper_connection", "hc_pre", (T,), (128,), args, 4 * (rows + 1 + n * n))


def hc_head(
    dev: Device, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, a: Tensor, hc_eps: float, norm_eps: float,
) -> None:  # fmt: skip
    """a = sum_i pre[i] X[i] before the final norm. X [T, n, D] bf16 (rs); fn [n, nD], base [n], scale [1] f32; a [T, D] bf16."""
    T, n, D = X.shape
    _shape("hc_head", "fn", fn, n, n * D)
    _shape("hc_head", "base", base, n)
    _shape("hc_head", "scale", scale, 1)
    _shape("hc_head", "a", a, T, D)
    _packed("hc_head", fn=fn, base=base, scale=scale, a=a)
    (stride,) = _rows("hc_head", "X", X)
    if T:
        args = (X, fn, base, scale, a, n, D, stride, hc_eps, norm_eps)
        dev.launch("hyper_connection", "hc_head", (T,), (128,), args, 4 * (2 * n + 1))


def hc_post(dev: Device, y: Tensor, X: Tensor, post: Tensor, comb: Tensor, out: Tensor) -> None:
    """out[t,j] = post[t,j] y[t] + sum_i comb[t,i,j] X[t,i]: the first axis of comb is the source.

    y [T, D], X [T, n, D] bf16 (rs); post [T, n], comb [T, n, n] f32; out [T, n, D] bf16, not X
    """
    T, n, D = X.shape
    _shape("hc_post", "y", y, T, D)
    _shape("hc_post", "post", post, T, n)
    _shape("hc_post", "comb", comb, T, n, n)
    _shape("hc_post", "out", out, T, n, D)
    _packed("hc_post", post=post, comb=comb, out=out)
    _need(out.data_ptr() != X.data_ptr() or not T, "hc_post", "out is X: every output stream reads every input stream")
    block = 32 if D <= 256 else 64 if D <= 512 else 128
    if T:
        strides = (*_rows("hc_post", "y", y), *_rows("hc_post", "X", X))
        dev.launch("hyper_connection", "hc_post", (T,), (block,), (y, X, post, comb, out, n, D, *strides))
