"""Raw checkpoint -> what the kernels read, on the device.

Packed weights stay packed (FP8 codes, FP4 nibbles, e8m0 exponent bytes): the kernels decode them as they multiply. Only
small vectors change type here (BF16 norm weights to FP32, `tid2eid` to int32). The experts of a layer become one tensor
`[E, ...]` per matrix. Nothing is shared with the reference but config, raw checkpoint and point names.

Every tensor is consumed exactly once; `LoadAudit` lists where each went, and a load that leaves one unread fails.

    python -c "from production.weights import load_weights; print(load_weights('checkpoints/tiny-dsv4')[1].table())"

Tests: parity/unit/test_production.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reference.checkpoint import Checkpoint
from reference.config import InputError, ModelConfig


@dataclass(frozen=True)
class Linear8:
    """An FP8 matrix.

    weight  [N, K] u8, e4m3 codes
    scale   [ceil(N/128), ceil(K/128)] u8, e8m0, 1 per 128 x 128 block (multiply)
    """

    weight: Tensor
    scale: Tensor


@dataclass(frozen=True)
class HyperWeights:
    """Hyper-connection parameters of one site.

    fn     [(2+n)*n, n*D] f32 (hc_head: [n, n*D])
    base   [(2+n)*n] f32 (hc_head: [n])
    scale  [3] f32: pre, post, comb (hc_head: [1])
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """wkv, wgate [c*d', D] bf16 | norm [d'] f32 | ape [m, c*d'] f32."""

    wkv: Tensor
    wgate: Tensor
    norm: Tensor
    ape: Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b FP8 [index_n_heads*index_head_dim, q_lora_rank] | weights_proj [index_n_heads, D] bf16 | its key compressor."""

    wq_b: Linear8
    weights_proj: Tensor
    compressor: CompressorWeights


@dataclass(frozen=True)
class AttentionWeights:
    """Projections FP8 | q_norm, kv_norm f32 | attn_sink [h] f32 | compressor and indexer where the layer has them."""

    wq_a: Linear8
    q_norm: Tensor
    wq_b: Linear8
    wkv: Linear8
    kv_norm: Tensor
    attn_sink: Tensor
    wo_a: Linear8
    wo_b: Linear8
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class GateWeights:
    """weight [E, D] bf16 | bias [E] f32 (score routing) or tid2eid [vocab, k] i32 (hash routing), the other is None."""

    weight: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None


@dataclass(frozen=True)
class ExpertWeights:
    """All routed experts of a layer, FP4, low nibble = even column.

    w1, w3  [E, I, D/2] u8 with scales s1, s3 [E, I, D/32] u8 e8m0, 1 per 32 along D
    w2      [E, D, I/2] u8 with scale s2 [E, D, I/32]
    """

    w1: Tensor
    s1: Tensor
    w2: Tensor
    s2: Tensor
    w3: Tensor
    s3: Tensor


@dataclass(frozen=True)
class SharedExpertWeights:
    """w1, w3 FP8 [I, D], w2 FP8 [D, I]."""

    w1: Linear8
    w2: Linear8
    w3: Linear8


@dataclass(frozen=True)
class LayerWeights:
    """One block: norms f32 [D], hyper-connections, attention, router and experts."""

    hc_attn: HyperWeights
    attn_norm: Tensor
    attn: AttentionWeights
    hc_ffn: HyperWeights
    ffn_norm: Tensor
    gate: GateWeights
    experts: ExpertWeights
    shared_experts: SharedExpertWeights


@dataclass(frozen=True)
class ModelWeights:
    """embed, head [vocab, D] bf16 | norm [D] f32 | layers | hc_head."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    hc_head: HyperWeights
    norm: Tensor
    head: Tensor


@dataclass(frozen=True)
class LoadRecord:
    """One consumed tensor: its name, how it was stored, what it became on the device, bytes there."""

    name: str
    stored: str
    became: str
    device_bytes: int


class LoadAudit:
    """What a load consumed, in order; fails on a tensor taken twice and on tensors left over."""

    def __init__(self) -> None:
        self.records: list[LoadRecord] = []
        self._seen: set[str] = set()

    def add(self, name: str, stored: str, tensor: Tensor) -> None:
        if name in self._seen:
            raise InputError(f"{name}: consumed twice while loading")
        self._seen.add(name)
        self.records.append(LoadRecord(name, stored, _legend(tensor), tensor.numel() * tensor.element_size()))

    def finish(self, checkpoint: Checkpoint) -> None:
        """Every needed tensor was consumed once. Raises InputError that names the first one left over."""
        unread = checkpoint.unread()
        if unread or self._seen != set(checkpoint.specs):
            first = unread[0] if unread else sorted(set(checkpoint.specs) ^ self._seen)[0]
            raise InputError(f"{checkpoint.directory}: {len(unread)} tensor{'s' * (len(unread) != 1)} left unread by production, first {first!r}")

    @property
    def device_bytes(self) -> int:
        return sum(record.device_bytes for record in self.records)

    def table(self) -> str:
        """One line a tensor, for people."""
        width = max((len(record.name) for record in self.records), default=0)
        return "\n".join(f"{r.name:{width}}  {r.stored} -> {r.became}" for r in self.records)


def _legend(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class _Loader:
    """Takes tensors out of the checkpoint by name and puts them where the kernels read them."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.config: ModelConfig = checkpoint.config
        self.audit = LoadAudit()

    def take(self, name: str, dtype: torch.dtype | None = None, view: torch.dtype | None = None) -> Tensor:
        """A tensor of its own on the device; `dtype` converts values, `view` reinterprets bytes."""
        raw = self.checkpoint.raw(name)
        tensor = raw if view is None else raw.view(view)
        tensor = tensor.to(self.device, dtype or tensor.dtype).contiguous()
        self.audit.add(name, _legend(raw), tensor)
        return tensor

    def f32(self, name: str) -> Tensor:
        tensor = self.take(name, dtype=torch.float32)
        return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()  # kernels read 16 bytes; a file's view begins anywhere

    def linear8(self, name: str) -> Linear8:
        return Linear8(self.take(f"{name}.weight", view=torch.uint8), self.take(f"{name}.scale"))

    def hyper(self, name: str) -> HyperWeights:
        return HyperWeights(self.f32(f"{name}_fn"), self.f32(f"{name}_base"), self.f32(f"{name}_scale"))

    def compressor(self, name: str) -> CompressorWeights:
        return CompressorWeights(
            wkv=self.take(f"{name}.wkv.weight"),
            wgate=self.take(f"{name}.wgate.weight"),
            norm=self.f32(f"{name}.norm.weight"),
            ape=self.f32(f"{name}.ape"),
        )

    def indexer(self, name: str) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self.linear8(f"{name}.wq_b"),
            weights_proj=self.take(f"{name}.weights_proj.weight"),
            compressor=self.compressor(f"{name}.compressor"),
        )

    def attention(self, name: str, ratio: int) -> AttentionWeights:
        return AttentionWeights(
            wq_a=self.linear8(f"{name}.wq_a"),
            q_norm=self.f32(f"{name}.q_norm.weight"),
            wq_b=self.linear8(f"{name}.wq_b"),
            wkv=self.linear8(f"{name}.wkv"),
            kv_norm=self.f32(f"{name}.kv_norm.weight"),
            attn_sink=self.f32(f"{name}.attn_sink"),
            wo_a=self.linear8(f"{name}.wo_a"),
            wo_b=self.linear8(f"{name}.wo_b"),
            compressor=self.compressor(f"{name}.compressor") if ratio else None,
            indexer=self.indexer(f"{name}.indexer") if ratio == 4 else None,
        )

    def gate(self, name: str, hashed: bool) -> GateWeights:
        return GateWeights(
            weight=self.take(f"{name}.weight"),
            bias=None if hashed else self.f32(f"{name}.bias"),
            tid2eid=self.take(f"{name}.tid2eid", dtype=torch.int32) if hashed else None,
        )

    def stacked(self, name: str, matrix: str, part: str) -> Tensor:
        """`[E, ...]` u8: one slot per expert, copied as stored."""
        stack: Tensor | None = None
        for expert in range(self.config.n_routed_experts):
            raw = self.checkpoint.raw(f"{name}.{expert}.{matrix}.{part}")
            if stack is None:
                stack = torch.empty((self.config.n_routed_experts, *raw.shape), dtype=torch.uint8, device=self.device)
            stack[expert].copy_(raw)
            self.audit.add(f"{name}.{expert}.{matrix}.{part}", _legend(raw), stack[expert])
        assert stack is not None
        return stack

    def experts(self, name: str) -> ExpertWeights:
        return ExpertWeights(
            w1=self.stacked(name, "w1", "weight"),
            s1=self.stacked(name, "w1", "scale"),
            w2=self.stacked(name, "w2", "weight"),
            s2=self.stacked(name, "w2", "scale"),
            w3=self.stacked(name, "w3", "weight"),
            s3=self.stacked(name, "w3", "scale"),
        )

    def shared_experts(self, name: str) -> SharedExpertWeights:
        return SharedExpertWeights(self.linear8(f"{name}.w1"), self.linear8(f"{name}.w2"), self.linear8(f"{name}.w3"))

    def layer(self, layer: int) -> LayerWeights:
        at = f"layers.{layer}"
        return LayerWeights(
            hc_attn=self.hyper(f"{at}.hc_attn"),
            attn_norm=self.f32(f"{at}.attn_norm.weight"),
            attn=self.attention(f"{at}.attn", self.config.ratio(layer)),
            hc_ffn=self.hyper(f"{at}.hc_ffn"),
            ffn_norm=self.f32(f"{at}.ffn_norm.weight"),
            gate=self.gate(f"{at}.ffn.gate", self.config.is_hash(layer)),
            experts=self.experts(f"{at}.ffn.experts"),
            shared_experts=self.shared_experts(f"{at}.ffn.shared_experts"),
        )

    def model(self) -> ModelWeights:
        return ModelWeights(
            embed=self.take("embed.weight"),
            layers=tuple(self.layer(layer) for layer in self.checkpoint.layers),
            hc_head=self.hyper("hc_head"),
            norm=self.f32("norm.weight"),
            head=self.take("head.weight"),
        )


def load_weights(
    checkpoint: Checkpoint | str | Path, device: torch.device | str = "cpu", layers: range | None = None
) -> tuple[ModelWeights, LoadAudit]:
    """Weights of `embed`, the layers, `hc_head`, `norm` and `head` on the device, and where each tensor went."""
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint, layers)
    loader = _Loader(opened, torch.device(device))
    weights = loader.model()
    loader.audit.finish(opened)
    return weights, loader.audit


def inv_freq(config: ModelConfig, layer: int) -> Tensor:
    """Rotary frequencies of a layer, [r/2] f32 on the CPU (dsv4.md section 1.2).

    Window-only layers: rope_theta, unscaled. Layers with a ratio: compress_rope_theta with the YaRN ramp, for q, window
    kv, compressed kv and indexer alike; no amplitude factor.
    """
    c, r = config, config.qk_rope_head_dim
    theta = c.compress_rope_theta if c.ratio(layer) else c.rope_theta
    freq = 1.0 / theta ** (torch.arange(0, r, 2, dtype=torch.float32) / r)
    if not c.ratio(layer):
        return freq

    def turning_dim(rotations: float) -> float:
        return r * math.log(c.rope_original_max / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = float(max(math.floor(turning_dim(c.rope_beta_fast)), 0))
    high = float(min(math.ceil(turning_dim(c.rope_beta_slow)), r - 1))
    if low == high:
        high += 0.001
    ramp = ((torch.arange(r // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return freq / c.rope_factor * ramp + freq * (1 - ramp)
