"""What a model holds after loading, decoded from the kernels' layout and compared with the raw checkpoint.

Held values are decoded here with tables written out from the formats' text, stored ones by reference/formats.py, so that one
wrong table cannot agree with itself. Parameters are taken from where the kernels take them, the blocks, not from a list that
the loader keeps. Models are passed in; no opinion (parity/load.py judges).

    compare(layer_parameters(model.blocks[2], 2), Checkpoint(directory)).differences

Tests: parity/unit/test_load.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from probes.core.memory import tensors_within
from reference import formats
from reference.checkpoint import BF16, E4M3, E8M0, F32, FP4, I64, Checkpoint

FP8_LINEAR, FP4_LINEAR, PLAIN = "fp8", "fp4", "plain"


@dataclass(frozen=True)
class Parameter:
    """One parameter as production holds it.

    names    its tensors in the checkpoint: a linear's weight and scale, else one
    held     production's tensors, in that order; layout  "fp8", "fp4" linear, or "plain"
    """

    names: tuple[str, ...]
    held: tuple[Tensor, ...]
    layout: str

    @property
    def name(self) -> str:
        return self.names[0]


# ---- where production keeps what ----


def _linear(name: str, held: Any) -> Parameter:
    return Parameter((f"{name}.weight", f"{name}.scale"), (held.weight, held.scale), FP8_LINEAR)


def _plain(name: str, held: Tensor) -> Parameter:
    return Parameter((name,), (held,), PLAIN)


def _hyper(name: str, held: Any) -> list[Parameter]:
    return [_plain(f"{name}_{part}", getattr(held, part)) for part in ("fn", "base", "scale")]


def _compressor(name: str, held: Any) -> list[Parameter]:
    return [_plain(f"{name}.{part}.weight", getattr(held, part)) for part in ("wkv", "wgate", "norm")] + [_plain(f"{name}.ape", held.ape)]


def layer_parameters(block: Any, layer: int) -> Iterator[Parameter]:
    """Every parameter of a block, in dataflow order."""
    at, attention, ffn = f"layers.{layer}", block.attn, block.ffn
    yield from _hyper(f"{at}.hc_attn", block.hc_attn.w)
    yield _plain(f"{at}.attn_norm.weight", block.w.attn_norm)
    yield _linear(f"{at}.attn.wq_a", attention.weights.wq_a)
    yield _plain(f"{at}.attn.q_norm.weight", attention.weights.q_norm)
    yield _linear(f"{at}.attn.wq_b", attention.weights.wq_b)
    yield _linear(f"{at}.attn.wkv", attention.weights.wkv)
    yield _plain(f"{at}.attn.kv_norm.weight", attention.weights.kv_norm)
    if attention.compressor is not None:
        yield from _compressor(f"{at}.attn.compressor", attention.compressor.weights)
    if attention.indexer is not None:
        yield _linear(f"{at}.attn.indexer.wq_b", attention.indexer.weights.wq_b)
        yield _plain(f"{at}.attn.indexer.weights_proj.weight", attention.indexer.weights.weights_proj)
        yield from _compressor(f"{at}.attn.indexer.compressor", attention.indexer.compressor.weights)
    yield _plain(f"{at}.attn.attn_sink", attention.weights.attn_sink)
    yield _linear(f"{at}.attn.wo_a", attention.weights.wo_a)
    yield _linear(f"{at}.attn.wo_b", attention.weights.wo_b)
    yield from _hyper(f"{at}.hc_ffn", block.hc_ffn.w)
    yield _plain(f"{at}.ffn_norm.weight", block.w.ffn_norm)
    gate, experts, shared = ffn.gate.w, ffn.experts.w, ffn.shared_experts.w
    yield _plain(f"{at}.ffn.gate.weight", gate.weight)
    for part in ("bias", "tid2eid"):
        if getattr(gate, part) is not None:
            yield _plain(f"{at}.ffn.gate.{part}", getattr(gate, part))
    for expert in range(len(experts.w1)):
        for matrix, weight, scale in (("w1", experts.w1, experts.s1), ("w2", experts.w2, experts.s2), ("w3", experts.w3, experts.s3)):
            name = f"{at}.ffn.experts.{expert}.{matrix}"
            yield Parameter((f"{name}.weight", f"{name}.scale"), (weight[expert], scale[expert]), FP4_LINEAR)
    for matrix in ("w1", "w2", "w3"):
        yield _linear(f"{at}.ffn.shared_experts.{matrix}", getattr(shared, matrix))


def model_parameters(model: Any) -> list[Parameter]:
    """What belongs to no layer."""
    w = model.weights
    return [_plain("embed.weight", w.embed), *_hyper("hc_head", w.hc_head), _plain("norm.weight", w.norm), _plain("head.weight", w.head)]


# ---- decoding the kernels' layout, by the text of the formats ----


def _e4m3_values() -> list[float]:
    values = []
    for code in range(256):
        exponent, fraction = code >> 3 & 15, code & 7
        size = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
        values.append(float("nan") if code & 127 == 127 else -size if code & 128 else size)
    return values


E4M3_VALUES = torch.tensor(_e4m3_values())
E2M1_PAIRS = torch.tensor([[s * v for s in (1.0, -1.0) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)][code] for code in range(16)])
E8M0_VALUES = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float64).float()


def decode_held(parameter: Parameter) -> Tensor:
    """Values of a parameter as kernels read them, fp32 or integers, on the CPU."""
    held = [tensor.cpu() for tensor in parameter.held]
    if parameter.layout == PLAIN:
        return held[0].float() if held[0].is_floating_point() else held[0].long()
    codes, scale = held[0].int(), E8M0_VALUES[held[1].int()]
    if parameter.layout == FP8_LINEAR:
        N, K = codes.shape
        block_row, block_column = torch.arange(N) // 128, torch.arange(K) // 128
        return E4M3_VALUES[codes] * scale[block_row][:, block_column]
    values = torch.empty(codes.shape[0], codes.shape[1] * 2)
    values[:, 0::2], values[:, 1::2] = E2M1_PAIRS[codes % 16], E2M1_PAIRS[codes // 16]
    return values * scale[:, torch.arange(values.shape[1]) // 32]


def decode_stored(checkpoint: Checkpoint, names: Sequence[str]) -> Tensor:
    """Values of the same parameter straight from the checkpoint."""
    raw = [checkpoint.raw(name) for name in names]
    dtype = checkpoint.specs[names[0]].dtype
    if dtype == E4M3:
        return formats.decode_fp8_weight(raw[0], raw[1])
    if dtype == FP4:
        return formats.decode_fp4_weight(raw[0], raw[1])
    return raw[0].long() if dtype == I64 else raw[0].float()


def held_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """What the kernels read: packed codes as bytes, matrices in bf16, vectors and fp32 tensors in fp32, ids in int32."""
    spec = checkpoint.specs[name]
    vector = spec.dtype == BF16 and len(spec.shape) == 1
    return {E4M3: torch.uint8, E8M0: torch.uint8, FP4: torch.uint8, BF16: torch.float32 if vector else torch.bfloat16, F32: torch.float32, I64: torch.int32}[spec.dtype]


# ---- comparing ----


@dataclass(frozen=True)
class Difference:
    """One parameter that is not what the checkpoint stores: what, and the first element where values differ."""

    name: str
    what: str
    element: list[int]
    got: float | None = None
    want: float | None = None


@dataclass
class Comparison:
    """Of a set of parameters: what differs, and facts of all. Checksums are CRC-32 of the decoded values, in order."""

    tensors: int = 0
    size_bytes: int = 0
    least_scale: float = float("inf")
    largest_scale: float = 0.0
    largest_value: float = 0.0
    held_checksum: int = 0
    stored_checksum: int = 0
    differences: list[Difference] = field(default_factory=list)


def compare(parameters: Iterable[Parameter], checkpoint: Checkpoint) -> Comparison:
    """Every parameter against the checkpoint: dtype, shape, values bit for bit."""
    found = Comparison()
    for parameter in parameters:
        missing = [name for name in parameter.names if name not in checkpoint.specs]
        if missing:
            found.differences.append(Difference(parameter.name, f"the checkpoint has no {missing[0]}", []))
            continue
        wrong = [(n, t.dtype, held_dtype(checkpoint, n)) for n, t in zip(parameter.names, parameter.held, strict=True) if t.dtype != held_dtype(checkpoint, n)]
        if wrong:
            name, got_dtype, want_dtype = wrong[0]
            found.differences.append(Difference(name, f"held as {got_dtype}, kernels read {want_dtype}".replace("torch.", ""), []))
            continue
        want, got = decode_stored(checkpoint, parameter.names), decode_held(parameter)
        found.tensors += len(parameter.names)
        found.size_bytes += sum(t.numel() * t.element_size() for t in parameter.held)
        if parameter.layout != PLAIN:
            scale = parameter.held[1].cpu()
            found.least_scale = min(found.least_scale, float(E8M0_VALUES[int(scale.min())]))
            found.largest_scale = max(found.largest_scale, float(E8M0_VALUES[int(scale.max())]))
        if got.shape != want.shape:
            found.differences.append(Difference(parameter.name, f"shape {list(got.shape)}, stored {list(want.shape)}", []))
            continue
        found.held_checksum, found.stored_checksum = (zlib.crc32(v.contiguous().numpy().tobytes(), c) for v, c in ((got, found.held_checksum), (want, found.stored_checksum)))
        found.largest_value = max(found.largest_value, float(got.abs().max()))
        differ = got != want
        if bool(differ.any()):
            where = differ.nonzero()[0].tolist()
            at = tuple(where)
            found.differences.append(Difference(parameter.name, f"{int(differ.sum())} of {got.numel()} values differ", where, float(got[at]), float(want[at])))
    return found


# ---- books ----


def all_parameters(model: Any) -> list[Parameter]:
    """Every parameter of a model, layers first to last, then what belongs to none."""
    return [*(p for layer in model.layers for p in layer_parameters(model.blocks[layer], layer)), *model_parameters(model)]


def books(model: Any, checkpoint: Checkpoint) -> tuple[int, list[str]]:
    """Tensors filled, and what is not exactly once: by the blocks and by the loader's own list; memory that two share; strays."""
    parameters = all_parameters(model)
    filled = [name for parameter in parameters for name in parameter.names]
    booked = [record.name for record in model.audit.records]
    wrong: list[str] = []
    for who, names in (("production's blocks", filled), ("the loader's list", booked)):
        wrong += [f"{name}: not in {who}" for name in sorted(set(checkpoint.specs) - set(names))]
        wrong += [f"{name}: in {who}, not in the checkpoint" for name in sorted(set(names) - set(checkpoint.specs))]
        ordered = sorted(names)
        wrong += [f"{a}: twice in {who}" for a, b in pairwise(ordered) if a == b]
    held = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), n) for p in parameters for n, t in zip(p.names, p.held, strict=True))
    wrong += [f"{b[2]}: lies in the memory of {a[2]}" for a, b in pairwise(held) if b[0] < a[1]]
    known = {t.untyped_storage().data_ptr() for p in parameters for t in p.held}
    strays = [t for t in tensors_within(model.weights) if t.untyped_storage().data_ptr() not in known]
    return len(filled), wrong + [f"a tensor {list(t.shape)} of production's weights that no block uses" for t in strays]
