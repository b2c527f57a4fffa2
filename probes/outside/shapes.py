"""What a point's tensor looks like in a given model: axes with their sizes, and whether numbers are whole. For both doors that show points.

    wrong(config, "layers.0.attn.q", value, batch=1, queries=20)     # "" or "shown as [1, 8, 20, 128], expected [1, 20, 8, 128]"

Sizes come from the legends of reference/points.py. The last axis of sets and scores may have any width. Tests: parity/unit/test_shapes.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.config import ModelConfig
from reference.points import INDICES, SCORES, spec_of

NAMED = {"D": "hidden_size", "n": "hc_mult", "h": "num_attention_heads", "d": "head_dim", "vocab": "vocab_size"}


def expected(config: ModelConfig, point: str, batch: int, queries: int) -> list[int | None]:
    """The sizes of a point's axes; None: any."""
    spec = spec_of(point)
    axes = [axis.strip() for axis in spec.shape[1:].split("]")[0].split(",")]
    sizes: list[int | None] = [batch, queries, *(_size(config, axis) for axis in axes[2:-1])]
    return [*sizes, None if spec.kind in (INDICES, SCORES) else _size(config, axes[-1])]


def _size(config: ModelConfig, axis: str) -> int:
    size = 1
    for factor in axis.split(" * "):
        size *= int(getattr(config, NAMED.get(factor, factor)))
    return size


def as_words(sizes: list[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"


def wrong(config: ModelConfig, point: str, value: Tensor, batch: int, queries: int) -> str:
    """Why a shown tensor is not this point; empty where it is."""
    want = expected(config, point, batch, queries)
    if value.dim() != len(want) or any(due is not None and size != due for size, due in zip(value.shape, want, strict=True)):
        return f"shown as {list(value.shape)}, expected {as_words(want)}"
    indices = spec_of(point).kind == INDICES
    fits = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool if indices else value.is_floating_point()
    return "" if fits else f"shown in {str(value.dtype).removeprefix('torch.')}, expected {'whole' if indices else 'real'} numbers"
