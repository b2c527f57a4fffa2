"""What a call may be given: tokens, lengths, replayed choices. Everything is checked here before anything is written.

    counts = checked_tokens(config, tokens, batch=2, lengths=None)

Tests: parity/unit/test_production.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from production.cache import KVCache
from reference.config import InputError, ModelConfig

Choices = Mapping[str, Tensor]
NONE = 2**31 - 1  # sorts behind every id


def checked_tokens(config: ModelConfig, tokens: Tensor, batch: int, lengths: Tensor | Sequence[int] | None) -> list[int]:
    """Valid tokens per row, once tokens [b, s] and lengths [b] are in order. Pads may be anything."""
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[1] < 1:
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"tokens: expected int64 [b, s] with s >= 1, got {got}")
    b, s = tokens.shape
    if b != batch:
        raise InputError(f"tokens: {b} rows, the state has {batch}")
    counts = [s] * b
    if lengths is not None:
        try:
            given = torch.as_tensor(lengths)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"lengths: expected {b} integers, got {lengths!r}") from None
        if tuple(given.shape) != (b,) or given.is_floating_point() or given.dtype == torch.bool:
            raise InputError(f"lengths: expected {b} integers, got {given.dtype} {list(given.shape)}")
        counts = [int(n) for n in given.tolist()]
        if not all(0 <= n <= s for n in counts):
            raise InputError(f"lengths: expected 0 .. {s}, got {counts}")
    for row, (ids, n) in enumerate(zip(tokens.tolist(), counts, strict=True)):
        valid = ids if n == s else ids[:n]
        if n and not (min(valid) >= 0 and max(valid) < config.vocab_size):  # NOTE: of lists: a tensor made here would be an allocation of decode
            column = next(at for at, token in enumerate(valid) if not 0 <= token < config.vocab_size)
            raise InputError(f"tokens[{row}, {column}] = {ids[column]}: token ids run from 0 to {config.vocab_size - 1}")
    return counts


def checked_choices(
    config: ModelConfig, choices: Choices | None, cache: KVCache, counts: list[int], s: int, layers: Sequence[int]
) -> dict[str, Tensor]:
    """The given choices of these layers, [b, s, k] i32 on the cache's device, ascending, -1 = none or pad.

    `layers.N.attn.selected` (CSA): complete entries of the query, any number. `layers.N.ffn.experts`: k experts,
    distinct in layers that score them.
    """
    given: dict[str, Tensor] = {}
    if not choices:
        return given
    valid = torch.arange(s) < torch.tensor(counts)[:, None]  # [b, s]
    for name, value in choices.items():
        layer = _layer_of_choice(config, name, len(cache.layers))
        if layer not in layers:
            continue
        experts = name.endswith("ffn.experts")
        if not isinstance(value, Tensor) or value.dim() != 3 or value.is_floating_point() or value.dtype == torch.bool:
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"choices: {name}: expected integers [{len(counts)}, {s}, k], got {got}")
        if tuple(value.shape) != (len(counts), s, config.num_experts_per_tok if experts else value.shape[-1]):
            raise InputError(f"choices: {name}: expected [{len(counts)}, {s}, k], got {list(value.shape)}")
        ids = torch.where(valid[..., None], value.cpu().long(), -1)
        position = torch.tensor(cache.mirror[layer])[:, None] + torch.arange(s)  # [b, s]
        limit = torch.full_like(position, config.n_routed_experts) if experts else (position + 1) // 4
        least = torch.where(valid, 0, -1) if experts else torch.full_like(position, -1)
        if bool((((ids >= limit[..., None]) & (ids >= 0)) | (ids < least[..., None])).any()):
            raise InputError(f"choices: {name}: an id is out of range")
        ids = torch.where(ids < 0, NONE, ids).sort(-1).values
        twice = bool(((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != NONE)).any())
        if twice and not (experts and config.is_hash(layer)):  # a table may name an expert twice
            raise InputError(f"choices: {name}: an id is given twice for one query")
        given[name] = torch.where(ids == NONE, -1, ids).to(cache.device, torch.int32)
    return given


def _layer_of_choice(config: ModelConfig, name: str, layers: int) -> int:
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "layers" and parts[1].isdigit() and int(parts[1]) < layers:
        layer = int(parts[1])
        if parts[2] == "ffn.experts" or (parts[2] == "attn.selected" and config.ratio(layer) == 4):
            return layer
    raise InputError(f"choices: {name!r} is no choice of this model: layers.N.ffn.experts, and layers.N.attn.selected of CSA layers")
