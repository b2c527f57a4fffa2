"""Models of real width with random weights, made on the device in the published formats: no file is read or written.

    model = flash_model(open_device("cuda"), ratios=(0, 4, 128, 4), max_context=1 << 20, variants="fast")
    model = synthetic_model(tiny_config, open_device("cpu"), max_context=400)

Codes and scales are random but sane: no NaN, rows and blocks differ in size, every linear keeps the size of what it gets, so
activations stay of order 1 through the layers. It says nothing of text: tokens are noise to it. Tests: parity/unit/test_bench.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from production.launch import Device
from production.model import Transformer
from production.variants import plan_of
from production.weights import (
    AttentionWeights,
    CompressorWeights,
    ExpertWeights,
    GateWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    Linear8,
    LoadAudit,
    ModelWeights,
    SharedExpertWeights,
)
from reference.config import ModelConfig

PRESETS = Path(__file__).resolve().parents[1] / "checkpoints" / "presets"
CODE_SIZE = 64.0  # root mean square of an e4m3 code's value: seven times that is still below 448
E2M1_SIZE = math.sqrt(sum(v * v for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)) / 8)
MOST_BYTES = 1 << 28  # random bytes made at a time


def preset(name: str, ratios: Sequence[int] | None = None, **overrides: Any) -> ModelConfig:
    """"flash" or "pro" as published; with `ratios` so many layers of those kinds; overrides: fields of ModelConfig."""
    config = ModelConfig.from_dir(PRESETS / name)
    if ratios is not None:
        overrides = {"num_hidden_layers": len(ratios), "compress_ratios": tuple(ratios), "num_hash_layers": 1} | overrides
    return dataclasses.replace(config, **overrides)


class _Maker:
    """Random tensors on one device, from one seed."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        self.config, self.device = config, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, size: float = 1.0, middle: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * size + middle

    def matrix(self, out: int, into: int, size: float = 1.0) -> Tensor:
        """bf16, keeps the size of its input times `size`."""
        drawn = torch.randn(out, into, generator=self.generator, device=self.device, dtype=torch.bfloat16)
        return drawn.mul_(size * into**-0.5)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """[low, high), u8."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=torch.uint8)

    def scale(self, into: int, code: float, *shape: int) -> Tensor:
        """e8m0 bytes that make codes of root mean square `code` a matrix that keeps the size of its input; within a factor of 2."""
        middle = 127 + round(math.log2(into**-0.5 / code))
        return self.integers(middle - 1, middle + 2, *shape)

    def linear8(self, out: int, into: int) -> Linear8:
        codes = torch.randn(out, into, generator=self.generator, device=self.device, dtype=torch.bfloat16).mul_(CODE_SIZE).clamp_(-448, 448)
        return Linear8(codes.to(torch.float8_e4m3fn).view(torch.uint8), self.scale(into, CODE_SIZE, -(-out // 128), -(-into // 128)))

    def linear4(self, experts: int, out: int, into: int) -> tuple[Tensor, Tensor]:
        """Packed e2m1 pairs [experts, out, into / 2] and scales [experts, out, into / 32]; a matrix at a time, few bytes more."""
        codes = torch.empty(experts, out, into // 2, dtype=torch.uint8, device=self.device)
        for some in codes.view(-1).split(MOST_BYTES):
            some.random_(0, 256, generator=self.generator)
        return codes, self.scale(into, E2M1_SIZE, experts, out, into // 32)

    # ---- parts of a model, as production/weights.py names them ----

    def hyper(self, rows: int, scales: int) -> HyperWeights:
        c = self.config
        width = c.hc_mult * c.hidden_size
        return HyperWeights(self.normal(rows, width, size=width**-0.5), self.normal(rows, size=0.5), self.normal(scales, size=0.2, middle=1.0))

    def norm(self, width: int) -> Tensor:
        return self.normal(width, size=0.2, middle=1.0)

    def compressor(self, ratio: int, width: int) -> CompressorWeights:
        c = self.config
        features = c.overlap(ratio) * width
        return CompressorWeights(self.matrix(features, c.hidden_size), self.matrix(features, c.hidden_size), self.norm(width), self.normal(ratio, features, size=0.5))

    def indexer(self) -> IndexerWeights:
        c = self.config
        return IndexerWeights(
            self.linear8(c.index_n_heads * c.index_head_dim, c.q_lora_rank), self.matrix(c.index_n_heads, c.hidden_size), self.compressor(4, c.index_head_dim)
        )  # fmt: skip

    def attention(self, ratio: int) -> AttentionWeights:
        c = self.config
        D, h, d, groups = c.hidden_size, c.num_attention_heads, c.head_dim, c.o_groups * c.o_lora_rank
        return AttentionWeights(
            wq_a=self.linear8(c.q_lora_rank, D), q_norm=self.norm(c.q_lora_rank), wq_b=self.linear8(h * d, c.q_lora_rank),
            wkv=self.linear8(d, D), kv_norm=self.norm(d), attn_sink=self.normal(h),
            wo_a=self.linear8(groups, h * d // c.o_groups), wo_b=self.linear8(D, groups),
            compressor=self.compressor(ratio, d) if ratio else None, indexer=self.indexer() if ratio == 4 else None,
        )  # fmt: skip

    def gate(self, hashed: bool) -> GateWeights:
        c = self.config
        table = None
        if hashed:
            first = torch.randint(0, c.n_routed_experts, (c.vocab_size, 1), generator=self.generator, device=self.device, dtype=torch.int32)
            table = ((first + torch.arange(c.num_experts_per_tok, device=self.device, dtype=torch.int32)) % c.n_routed_experts).contiguous()
        return GateWeights(self.matrix(c.n_routed_experts, c.hidden_size, 1.5), None if hashed else self.normal(c.n_routed_experts, size=0.1), table)

    def experts(self) -> ExpertWeights:
        c = self.config
        E, I, D = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size  # noqa: E741
        (w1, s1), (w2, s2), (w3, s3) = self.linear4(E, I, D), self.linear4(E, D, I), self.linear4(E, I, D)
        return ExpertWeights(w1, s1, w2, s2, w3, s3)

    def layer(self, layer: int) -> LayerWeights:
        c, (D, I), n = self.config, (self.config.hidden_size, self.config.moe_intermediate_size), self.config.hc_mult  # noqa: E741
        return LayerWeights(
            hc_attn=self.hyper((2 + n) * n, 3), attn_norm=self.norm(D), attn=self.attention(c.ratio(layer)),
            hc_ffn=self.hyper((2 + n) * n, 3), ffn_norm=self.norm(D), gate=self.gate(c.is_hash(layer)), experts=self.experts(),
            shared_experts=SharedExpertWeights(self.linear8(I, D), self.linear8(D, I), self.linear8(I, D)),
        )  # fmt: skip

    def model(self) -> ModelWeights:
        c = self.config
        embed = torch.randn(c.vocab_size, c.hidden_size, generator=self.generator, device=self.device, dtype=torch.bfloat16)
        layers = tuple(self.layer(layer) for layer in range(c.num_hidden_layers))
        return ModelWeights(embed, layers, self.hyper(c.hc_mult, 1), self.norm(c.hidden_size), self.matrix(c.vocab_size, c.hidden_size))


def synthetic_weights(config: ModelConfig, device: torch.device, seed: int = 0) -> ModelWeights:
    """Random packed weights of every layer of a configuration, on the device."""
    return _Maker(config, device, seed).model()


def synthetic_model(
    config: ModelConfig, device: Device, max_context: int = 8192, prefill_chunk: int = 512, variants: str | None = None, seed: int = 0
) -> Transformer:
    """The production model on random weights; arguments as those of production.load."""
    weights = synthetic_weights(config, device.torch_device, seed)
    return Transformer(config, weights, LoadAudit(), device, max_context, prefill_chunk, plan_of(variants, device))


def flash_model(device: Device, ratios: Sequence[int] = (0, 4, 128, 4), **options: Any) -> Transformer:
    """Layers of Flash's width, 3.4 GB each, embed and head 2.1 GB; options as synthetic_model."""
    return synthetic_model(preset("flash", ratios), device, **options)


def pro_model(device: Device, ratios: Sequence[int] = (128, 4, 128, 4), **options: Any) -> Transformer:
    """Layers of Pro's width, 13.8 GB each, embed and head 3.7 GB; options as synthetic_model."""
    return synthetic_model(preset("pro", ratios), device, **options)
