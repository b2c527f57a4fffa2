"""Typed wrappers of the hyper-connections (mHC): streams mixed into a block's input, its output mixed back.

    hc_post(device, y, X, post, comb, out)

Each wrapper checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the
caller, nothing is allocated, and outputs share no memory with inputs or with each other. A kernel that cannot run raises KernelError: nothing falls
back to torch. T = b * s flat tokens, position [T] i32 (-1 = pad, whose outputs stay untouched), row [T] i32 = batch row.
Positions, lengths and index lists are read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Tests: pytest parity/test_operations_attention.py.
"""

from __future__ import annotations

from torch import Tensor

from production.launch import Argument, Device
from production.ops.arguments import apart as _apart
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import shape as _shape
from production.ops.layout import rows as _rows

SLOT, SPLIT_STRIP, MMA_STRIP = 28, 64, 256  # as in kernels/hyper_connection_split.cu: numbers of a part, columns of a part
AT_ONCE, LAST_BLOCK_TOKENS = 8, 2  # tokens of a block of hc_sums; calls of so many finish in one launch

AT_ONCE_VARIANTS = ("split", "mma")
PROCESSORS = 132  # of an H200
LEAST_EPS = 1e-9  # the kernels take reciprocals of products of two sums

Norm = tuple[Tensor, Tensor]
Half = tuple[Tensor, Tensor]


def mixing_fits(n: int, D: int, hc_eps: float) -> bool:
    """Whether `split` and `mma` take n streams of D."""
    return n == 4 and D % MMA_STRIP == 0 and D <= 8192 and hc_eps >= LEAST_EPS


def mix_scratch(T: int, D: int, variant: str) -> int:
    """fp32 numbers that `split` or `mma` needs for T tokens of width D."""
    return T * SLOT * _ceil(D, SPLIT_STRIP if variant == "split" else MMA_STRIP)


def hc_pre(
    dev: Device, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, pre: Tensor, post: Tensor, comb: Tensor, a: Tensor, iters: int,
    hc_eps: float, norm_eps: float, variant: str | None = None, sums: Tensor | None = None, counters: Tensor | None = None,
    norm: Norm | None = None, before: Half | None = None, last_block_tokens: int = LAST_BLOCK_TOKENS, warps: int | None = None,
) -> None:  # fmt: skip
    """The weights of a block's n residual streams, and its input a = sum_i pre[i] X[i].

    X [T, n, D] bf16 (rs); fn [(2+n)n, nD], base [(2+n)n], scale [3] f32; pre, post [T, n], comb [T, n, n] f32, first axis = source;
    a [T, D] bf16. comb: softmax, then `iters` column normalisations with iters - 1 row normalisations between them.
    Variants: naive, block; for n = 4 and D up to 8192 split (few tokens; D a multiple of 64) and mma (many; of 256). These two need
    `sums`, f32, packed, `mix_scratch` numbers of any content; split of up to `last_block_tokens` tokens takes one launch and needs `counters`,
    i32, packed, a zero for each token, left zero. They take on
      norm    (weight [D] f32, out [T, D] bf16): out = a rsqrt(mean(a^2) + norm_eps) weight
      before  (y [T, D], streams [T, n, D] bf16, (rs)): X is written first, as hc_post does with the half before's post and comb, which
              lie where this half's go; X is then contiguous and not `streams`
    The result does not depend on last_block_tokens, nor on `warps` (of mma: 4 or 8; None: as many as leave a block for each processor).
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
    y, streams = before or (None, None)
    _apart(
        "hc_pre", {"pre": pre, "post": post, "comb": comb, "a": a, "the norm's output": norm and norm[1], "sums": sums, "counters": counters, "X": X if before else None},
        {"X": None if before else X, "fn": fn, "base": base, "scale": scale, "the norm's weight": norm and norm[0], "y": y, "streams": streams},
    )  # fmt: skip
    _need(iters >= 1, "hc_pre", f"{iters} Sinkhorn iterations, expected at least 1")
    which = _choose("hc_pre", variant, "block", ("naive", "block", "split", "mma"))
    if which in ("split", "mma"):
        outputs = (pre, post, comb, a)
        _mix(dev, "hc_pre", which, X, fn, base, scale, outputs, rows, iters, hc_eps, norm_eps, sums, counters, norm, before, last_block_tokens, warps)
        return
    _need(norm is None and before is None, "hc_pre", f"{which} takes neither norm nor before: these are launches of their own")
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
    dev: Device, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor, a: Tensor, hc_eps: float, norm_eps: float, variant: str | None = None,
    sums: Tensor | None = None, counters: Tensor | None = None, norm: Norm | None = None, before: Half | None = None,
    mixing: tuple[Tensor, Tensor] | None = None, last_block_tokens: int = LAST_BLOCK_TOKENS, warps: int | None = None,
) -> None:  # fmt: skip
    """a = sum_i pre[i] X[i] before the final norm. X [T, n, D] bf16 (rs); fn [n, nD], base [n], scale [1] f32; a [T, D] bf16.

    Variants: block, split, mma; the latter as of hc_pre. mixing: (post [T, n], comb [T, n, n]) of the half `before`.
    """
    T, n, D = X.shape
    _shape("hc_head", "fn", fn, n, n * D)
    _shape("hc_head", "base", base, n)
    _shape("hc_head", "scale", scale, 1)
    _shape("hc_head", "a", a, T, D)
    _packed("hc_head", fn=fn, base=base, scale=scale, a=a)
    y, streams = before or (None, None)
    _apart(
        "hc_head",
        {"a": a, "the norm's output": norm and norm[1], "sums": sums, "counters": counters, "X": X if before else None,
         "post": mixing and mixing[0], "comb": mixing and mixing[1]},  # which its kernels could write
        {"X": None if before else X, "fn": fn, "base": base, "scale": scale, "the norm's weight": norm and norm[0], "y": y, "streams": streams},
    )  # fmt: skip
    which = _choose("hc_head", variant, "block", ("block", "split", "mma"))
    if which in ("split", "mma"):
        _need((before is None) == (mixing is None), "hc_head", "before and mixing go together")
        post, comb = mixing or (None, None)
        if post is not None and comb is not None:
            _shape("hc_head", "post", post, T, n)
            _shape("hc_head", "comb", comb, T, n, n)
            _packed("hc_head", post=post, comb=comb)
        _mix(dev, "hc_head", which, X, fn, base, scale, (None, post, comb, a), n, 1, hc_eps, norm_eps, sums, counters, norm, before, last_block_tokens, warps)
        return
    _need(norm is None and before is None, "hc_head", f"{which} takes neither norm nor before: these are launches of their own")
    (stride,) = _rows("hc_head", "X", X)
    if T:
        args = (X, fn, base, scale, a, n, D, stride, hc_eps, norm_eps)
        dev.launch("hyper_connection", "hc_head", (T,), (128,), args, 4 * (2 * n + 1))


def _vectors(operation: str, **tensors: Tensor) -> None:
    """Rows that are read 16 bytes at a time."""
    for name, tensor in tensors.items():
        stride = tensor.stride(0) * tensor.element_size() if tensor.dim() > 1 and tensor.shape[0] > 1 else 0
        _need(tensor.data_ptr() % 16 == 0 and stride % 16 == 0, operation, f"rows of {name} do not begin at multiples of 16 bytes")


def _mix(
    dev: Device, operation: str, which: str, X: Tensor, fn: Tensor, base: Tensor, scale: Tensor,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor], rows: int, iters: int, hc_eps: float, norm_eps: float,
    sums: Tensor | None, counters: Tensor | None, norm: Norm | None, before: Half | None, last_block_tokens: int, warps: int | None,
) -> None:  # fmt: skip
    """The kernels of hyper_connection_split.cu: one launch, or the sums of all parts and then the rest."""
    (T, n, D), (_, post, comb, a) = X.shape, outputs
    name = f"{operation} {which}"
    strip = SPLIT_STRIP if which == "split" else MMA_STRIP
    _need(n == 4 and D <= 8192 and D % strip == 0, name, f"{n} streams of {D}, it takes 4 of up to 8192 in multiples of {strip}; the variant block takes any")
    _need(hc_eps >= LEAST_EPS, name, f"hc_eps {hc_eps}, expected {LEAST_EPS} or more")
    _need(1 <= T <= 65535 * AT_ONCE or not T, name, f"{T} tokens")
    held = 0 if sums is None else sums.numel()
    _packed(name, sums=sums, counters=counters)
    _need(held >= mix_scratch(T, D, which), name, f"sums has {held} numbers, {T} tokens need {mix_scratch(T, D, which)}")
    weight, normed = norm or (None, None)
    if weight is not None and normed is not None:
        _shape(name, "the norm's weight", weight, D)
        _shape(name, "the norm's output", normed, T, D)
        _packed(name, weight=weight, normed=normed)
        _vectors(name, weight=weight, normed=normed)
    x_stride = _rows(name, "X", X)[0] if T > 1 else n * D
    _vectors(name, X=X, fn=fn, a=a)
    put_back: tuple[Argument, ...] = ()
    strides: tuple[int, ...] = (x_stride,)
    if before is not None:
        y, streams = before
        _shape(name, "y", y, T, D)
        _shape(name, "streams", streams, T, n, D)
        _packed(name, X=X)
        assert post is not None
        assert comb is not None
        _vectors(name, y=y, streams=streams, post=post, comb=comb)
        put_back = (y, streams)
        strides = (_rows(name, "y", y)[0], _rows(name, "streams", streams)[0], x_stride)
    if not T:
        return
    source, wide, parts = "hyper_connection_split", 4096 if D <= 4096 else 8192, D // strip
    kind = "post_" if before is not None else ""
    if which == "split" and last_block_tokens >= T:
        has = 0 if counters is None else counters.numel()
        _need(has >= T, name, f"counters has {has} numbers for {T} tokens")
        args = (*put_back, X, fn, base, scale, *outputs, weight, normed, sums, counters, rows, D, iters, *strides, hc_eps, norm_eps)
        dev.launch(source, f"hc_{kind}split_{wide}", (parts, T), (288,), args)
        return
    mixed = (*put_back, post, comb, X) if before is not None else (X,)
    if which == "split":
        dev.launch(source, f"hc_{kind}sums", (parts, _ceil(T, AT_ONCE)), (288,), (*mixed, fn, sums, T, AT_ONCE, rows, D, *strides))
    else:
        if warps is None:
            warps = 8 if parts * _ceil(T, 128) >= PROCESSORS else 4
        _need(warps in (4, 8), name, f"{warps} warps, expected 4 or 8")
        shared = 512 * warps * (8 + 2 * (before is not None)) + 12288
        dev.launch(source, f"hc_{kind}project_{warps}", (parts, _ceil(T, 16 * warps)), (32 * warps,), (*mixed, fn, sums, T, rows, D, *strides), shared)
    args = (X, base, scale, *outputs, weight, normed, sums, parts, rows, D, iters, x_stride, hc_eps, norm_eps)
    dev.launch(source, f"hc_finish_{wide}", (T,), (288,), args)


def hc_post(dev: Device, y: Tensor, X: Tensor, post: Tensor, comb: Tensor, out: Tensor, variant: str | None = None) -> None:
    """out[t,j] = post[t,j] y[t] + sum_i comb[t,i,j] X[t,i]: the first axis of comb is the source.

    y [T, D], X [T, n, D] bf16 (rs); post [T, n], comb [T, n, n] f32; out [T, n, D] bf16, not X
    Variants: block; columns (n = 4, D a multiple of 8; the same bits).
    """
    T, n, D = X.shape
    _shape("hc_post", "y", y, T, D)
    _shape("hc_post", "post", post, T, n)
    _shape("hc_post", "comb", comb, T, n, n)
    _shape("hc_post", "out", out, T, n, D)
    _packed("hc_post", post=post, comb=comb, out=out)
    _apart("hc_post", {"out": out}, {"y": y, "X": X, "post": post, "comb": comb})  # every output stream reads every input stream
    which = _choose("hc_post", variant, "block", ("block", "columns"))
    block = 32 if D <= 256 else 64 if D <= 512 else 128
    strides = (*_rows("hc_post", "y", y), *_rows("hc_post", "X", X))
    if which == "columns":
        _need(n == 4 and D % 8 == 0, "hc_post columns", f"{n} streams of {D}, it takes 4 in multiples of 8; the variant block takes any")
        _vectors("hc_post columns", y=y, X=X, out=out, post=post, comb=comb)
        if T:
            dev.launch("hyper_connection_split", "hc_post_columns", (T, _ceil(D, 1024)), (128,), (y, X, post, comb, out, D, *strides))
    elif T:
        dev.launch("hyper_connection", "hc_post", (T,), (block,), (y, X, post, comb, out, n, D, *strides))
