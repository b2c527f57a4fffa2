"""Typed wrappers of the hyper-connections (mHC): streams mixed into a block's input, its output mixed back.

    hc_post(device, y, X, post, comb, out)

Each wrapper checks what the kernel relies on and launches it; `device.ran` records what really ran. Outputs belong to the
caller, nothing is allocated, and outputs never alias inputs. A kernel that cannot run raises KernelError: nothing falls
back to torch. T = b * s flat tokens, position [T] i32 (-1 = pad, whose outputs stay untouched), row [T] i32 = batch row.
Positions, lengths and index lists are read on the device. "(rs)": dim 0 may have any stride, the rest is contiguous.
Tests: pytest parity/test_operations_attention.py.
"""

from __future__ import annotations

from torch import Tensor

from production.launch import Device
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import shape as _shape
from production.ops.layout import rows as _rows


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
