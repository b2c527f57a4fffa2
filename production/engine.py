"""Running the model over tokens: a greedy loop, a hash of logits, and the counter that proves what a step allocates.

    with count_allocations() as counted:
        model.decode(tokens, state, out=logits)
    assert counted.count == 0

Tests: parity/unit/test_production.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from production.model import State, Transformer


@dataclass
class Allocations:
    """What happened inside `count_allocations`.

    count, bytes   tensors with new storage that torch operations returned
    operations     the operation of each
    device_count   allocations of the CUDA allocator, its own temporaries included; 0 without CUDA
    """

    count: int = 0
    bytes: int = 0
    operations: list[str] = field(default_factory=list)
    device_count: int = 0


class _Counter(TorchDispatchMode):  # torch's class has no annotations
    """Counts outputs whose storage none of the operation's inputs owns: views and in-place results are free."""

    def __init__(self, counted: Allocations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs or {}))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in known:
                self.counted.count += 1
                self.counted.bytes += storage.nbytes()
                self.counted.operations.append(str(func))
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@contextmanager
def count_allocations() -> Iterator[Allocations]:
    """Count the tensors that are allocated inside, and on CUDA the allocator's own count."""
    counted = Allocations()
    before = _device_allocations()
    with _Counter(counted):
        yield counted
    counted.device_count = _device_allocations() - before


def _device_allocations() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))


def greedy(model: Transformer, state: State, logits: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Continue from logits [b, vocab] of the last tokens: yields (tokens [b] int64, the logits that follow) step by step.

    Both are the loop's own buffers, overwritten at the next step.
    """
    tokens = torch.empty(state.batch, dtype=torch.int64, device=logits.device)
    following = logits.clone()
    for _ in range(steps):
        torch.argmax(following, dim=-1, out=tokens)
        model.decode(tokens, state, out=following)
        yield tokens, following


def logits_hash(logits: Tensor) -> str:
    """sha256 of the logits' bytes, 16 hex digits: equal hashes are equal bits."""
    return hashlib.sha256(logits.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
