"""Layouts that several wrappers rely on: strides, flat tokens, stored entries and indexer keys. Tests: parity/unit/test_attention_kernels.py."""

from __future__ import annotations

from torch import Tensor

from production.launch import KernelError
from production.ops.arguments import ceil_div, need, packed, shape

SCALE_BLOCK, KEY_BLOCK = 64, 32  # e4m3 and e2m1 codes per scale, as in entry.cuh


def rows(operation: str, name: str, tensor: Tensor, outer: int = 1) -> tuple[int, ...]:
    """Strides of the first `outer` dims; the dims after them must lie without gaps."""
    expected = 1
    for dim in range(tensor.dim() - 1, outer - 1, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            raise KernelError(
                f"{operation}: {name} {list(tensor.shape)} has strides {list(tensor.stride())}, only the first {outer} may have gaps"
            )
        expected *= tensor.shape[dim]
    return tuple(tensor.stride()[:outer])


def tokens(operation: str, T: int, position: Tensor, row: Tensor | None = None) -> None:
    shape(operation, "position", position, T)
    if row is not None:
        shape(operation, "row", row, T)
    packed(operation, position=position, row=row)


def entry_bytes(d: int, r: int) -> int:
    """Bytes of one stored key = value: (d - r) e4m3 codes, r bf16, (d - r) / 64 scales, up to a multiple of 8. 584 at 512, 64."""
    need(d > r >= 0 and (d - r) % SCALE_BLOCK == 0 and r % 2 == 0, "entry_bytes", f"d = {d}, r = {r}: d - r must be a multiple of 64, r even")
    return ceil_div(d + r + (d - r) // SCALE_BLOCK, 8) * 8


def rotary_dims(operation: str, d: int, size: int) -> int:
    """r of an entry of `size` bytes that holds d dims: the one for which entry_bytes(d, r) is `size`."""
    for r in range(d % SCALE_BLOCK, d, SCALE_BLOCK):
        if r % 2 == 0 and entry_bytes(d, r) == size:
            return r
    raise KernelError(f"{operation}: entries of {size} bytes hold no {d} dims in any split into e4m3 and rotary dims")


def entry_strides(operation: str, name: str, cache: Tensor) -> tuple[int, int]:
    row, entry = rows(operation, name, cache, 2)
    need(row % 8 == 0 and entry % 8 == 0, operation, f"{name} has strides {row}, {entry} bytes, expected multiples of 8")
    return row, entry


def key_width(operation: str, name: str, di: int) -> None:
    need(di >= KEY_BLOCK and di & (di - 1) == 0, operation, f"{name} is {di} wide, expected a power of two >= {KEY_BLOCK}")
