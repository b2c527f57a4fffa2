"""Checks of what a wrapper is given, one line each; shared by all wrappers. Tests: parity/unit/test_dense_kernels.py."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from operator import gt

from torch import Tensor

from production.launch import KernelError


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def need(ok: bool, operation: str, message: str) -> None:
    if not ok:
        raise KernelError(f"{operation}: {message}")


def shape(operation: str, name: str, tensor: Tensor, *expected: int) -> None:
    if tuple(tensor.shape) != expected:
        raise KernelError(f"{operation}: {name} is {list(tensor.shape)}, expected {list(expected)}")


def packed(operation: str, **tensors: Tensor | None) -> None:
    """Tensors that a kernel walks without strides."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise KernelError(f"{operation}: {name} {list(tensor.shape)} has strides {list(tensor.stride())}, expected contiguous")


def apart(operation: str, outputs: Mapping[str, Tensor | None], inputs: Mapping[str, Tensor | None]) -> None:
    """Outputs, scratch and counters among them, share no memory with an input, with each other, or within themselves.

    By addresses alone: on the host 0.15 to 0.25 us a tensor. Rows that lie in the gaps between another's rows are apart from it.
    """
    starts: list[int] = []
    ends: list[int] = []
    for tensor in outputs.values():
        if tensor is not None:
            if not tensor.is_contiguous():
                return _apart_with_gaps(operation, outputs, inputs)
            start = tensor.data_ptr()
            starts.append(start)
            ends.append(start + tensor.nbytes)
    count = len(starts)
    if count > 1:
        starts.sort()
        ends.sort()
        if any(map(gt, ends, starts[1:])):
            return _apart_with_gaps(operation, outputs, inputs)
    for tensor in inputs.values():
        if tensor is not None:
            start = tensor.data_ptr()
            after = bisect_right(starts, start)  # the first output that begins behind
            if (after and ends[after - 1] > start) or (after < count and (starts[after] < start + tensor.nbytes or not tensor.is_contiguous())):
                return _apart_with_gaps(operation, outputs, inputs)
    return None


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether element by element they are the same memory, as an operation in place wants it."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _apart_with_gaps(operation: str, outputs: Mapping[str, Tensor | None], inputs: Mapping[str, Tensor | None]) -> None:
    """`apart` by the extent of each dimension, where the quick way cannot tell."""
    written = [(name, tensor) for name, tensor in outputs.items() if tensor is not None and tensor.numel()]
    read = [(name, tensor) for name, tensor in inputs.items() if tensor is not None and tensor.numel()]
    for name, tensor in written:
        reached = 1
        for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
            if stride < reached:
                raise KernelError(f"{operation}: elements of {name} {list(tensor.shape)} with strides {list(tensor.stride())} share memory; an output needs a place for each")
            reached += (size - 1) * stride
    for i, (name, tensor) in enumerate(written):
        for other, its in (*written[i + 1 :], *read):
            if _meet(tensor, its):
                raise KernelError(
                    f"{operation}: {name} {list(tensor.shape)} and {other} {list(its.shape)} share memory, {other} begins {its.data_ptr() - tensor.data_ptr()} bytes after {name}; "
                    f"give {name} memory of its own"
                )


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte; those that lie in the gaps between the other's rows do not."""
    (start, extent, step, row), (its_start, its_extent, its_step, its_row) = _extents(a), _extents(b)
    if start >= its_start + its_extent or its_start >= start + extent:
        return False
    for period in (step, its_step):
        if period:
            length, its_length = row if step == period else extent, its_row if its_step == period else its_extent
            after = (its_start - start) % period
            if length <= after and after + its_length <= period:
                return False
    return True


def _extents(tensor: Tensor) -> tuple[int, int, int, int]:
    """First byte; bytes from it to the last; bytes from row to row of the outermost dimension, 0 where there is one; bytes of a row."""
    size = tensor.element_size()
    dims = sorted(((s * size, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1), reverse=True)
    extent = size + sum((n - 1) * step for step, n in dims)
    step, rows = dims[0] if dims else (0, 1)
    return tensor.data_ptr(), extent, step, extent - (rows - 1) * step


def choose(operation: str, variant: str | None, default: str, known: tuple[str, ...]) -> str:
    if variant is None:
        return default
    need(variant in known, operation, f"no variant {variant!r}; it has {', '.join(known)}")
    return variant
