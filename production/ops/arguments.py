"""Checks of what a wrapper is given, one line each; shared by all wrappers. Tests: parity/unit/test_dense_kernels.py."""

from __future__ import annotations

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


def choose(operation: str, variant: str | None, default: str, known: tuple[str, ...]) -> str:
    if variant is None:
        return default
    need(variant in known, operation, f"no variant {variant!r}; it has {', '.join(known)}")
    return variant
