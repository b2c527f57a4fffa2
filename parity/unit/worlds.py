"""Small random checkpoints in the published layout, for unit tests that want another config than the bundled one.

    path = write_checkpoint(tmp_path / "world", seed=3, hidden_size=160, hc_mult=2, compress_ratios=[4, 0, 128, 4])

Weights are random but sized so that every mechanism carries signal: residual streams stay near 1, routers and
indexers spread their scores, sinks and `ape` matter. Nothing is imported from a model: the packing is done here.
`prompt(n, vocab)` gives token ids that repeat like text does. Used by the unit tests of both models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from reference.checkpoint import E4M3, E8M0, FP4, I64, TensorSpec, expected_tensors
from reference.config import ModelConfig

PROMPTS = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4" / "prompts"

# Every kind of layer once and CSA twice, widths that are no multiple of 128, an index_topk that discards early.
SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "head_dim": 96,
    "hidden_act": "silu",
    "hidden_size": 96,
    "index_head_dim": 64,
    "index_n_heads": 3,
    "index_topk": 7,
    "max_position_embeddings": 65536,
    "moe_intermediate_size": 64,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_hash_layers": 1,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "o_groups": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 16,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 128,
    "compress_ratios": [0, 4, 128, 4],
}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def config_dict(**overrides: Any) -> dict[str, Any]:
    """A complete `config.json` as a dict. `rope_scaling` given as a dict is merged key by key."""
    values = json.loads(json.dumps(SMALL))
    for key, value in overrides.items():
        values[key] = values[key] | value if isinstance(value, dict) and key in values else value
    return values  # type: ignore[no-any-return]


def prompt(length: int, vocab_size: int, start: int = 0) -> list[int]:
    """`length` token ids: bytes of the bundled text from `start` on, folded into the vocabulary."""
    text = (PROMPTS / "medium.txt").read_bytes()
    return [text[(start + i) % len(text)] % vocab_size for i in range(length)]


def _pack_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [out, in] -> e4m3 codes and one e8m0 byte per 128 x 128 block (power of two, rounded up)."""
    out, into = values.shape
    rows, cols = -(-out // 128), -(-into // 128)
    codes = torch.empty(out, into, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, cols, dtype=torch.uint8)
    for i in range(rows):
        for j in range(cols):
            block = values[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            exponent = int(torch.ceil(torch.log2(block.abs().max() / 448)))
            scale[i, j] = exponent + 127
            codes[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] = (block / 2.0**exponent).to(torch.float8_e4m3fn)
    return codes, scale


def _pack_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [out, in] -> two e2m1 codes per byte (low nibble = even index) and one e8m0 byte per 32 along in."""
    out, into = values.shape
    blocks = values.view(out, into // 32, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / 6))
    scaled = (blocks / torch.exp2(exponent)[..., None]).view(out, into)
    code = (scaled.abs()[..., None] - torch.tensor(E2M1_VALUES)).abs().argmin(-1) + 8 * (scaled < 0)
    packed = code[:, 0::2] + 16 * code[:, 1::2]
    return packed.to(torch.uint8).view(torch.int8), (exponent + 127).to(torch.uint8)


def _random(name: str, spec: TensorSpec, config: ModelConfig, rng: torch.Generator) -> Tensor:
    """Values of one unpacked tensor: the spread is chosen by what the tensor does."""
    normal = torch.randn(spec.shape, generator=rng)
    last = name.rsplit(".", 1)[-1]
    if last == "attn_sink":
        return normal
    if last == "ape":
        return 0.5 * normal
    if last == "bias":
        return 0.1 * normal
    if last.endswith("_scale"):
        return 1 + 0.2 * normal
    if last.endswith("_base"):
        return 0.5 * normal
    if name.endswith("norm.weight"):
        return 1 + 0.2 * normal
    if name == "embed.weight":
        return normal
    spread: float = (1.5 if name.endswith("gate.weight") else 1.0) * float(spec.shape[-1]) ** -0.5
    return normal * spread


def tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a checkpoint with this config, as stored, by name without prefix."""
    rng = torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    specs = expected_tensors(config)
    for name, spec in specs.items():
        if spec.dtype == E8M0:
            continue  # written with its weight
        if spec.dtype == I64:
            choice = torch.rand(config.vocab_size, config.n_routed_experts, generator=rng)
            stored[name] = choice.argsort(-1)[:, : config.num_experts_per_tok].contiguous()
        elif spec.dtype in (E4M3, FP4):
            into = spec.shape[1] * (2 if spec.dtype == FP4 else 1)
            values = torch.randn(spec.shape[0], into, generator=rng) / into**0.5
            values *= torch.exp2(torch.randint(-2, 3, (spec.shape[0], 1), generator=rng).float() / 2)  # rows differ in size
            pack = _pack_fp8 if spec.dtype == E4M3 else _pack_fp4
            stored[name], scale = pack(values)
            stored[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
        else:
            values = _random(name, spec, config, rng)
            stored[name] = values.bfloat16() if spec.dtype == "BF16" else values
    assert set(stored) == set(specs)
    return stored


def write_checkpoint(
    directory: str | Path,
    seed: int = 0,
    *,
    prefix: str = "",
    shards: int = 2,
    extra: dict[str, Tensor] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint and return its directory.

    prefix   put before every tensor name, e.g. "model."
    shards   files; 1 writes `model.safetensors` without an index
    extra    more tensors to store, by full name, e.g. {"mtp.0.norm.weight": ...}
    others   keys of `config.json`, over `SMALL`; a None value removes the key
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in config_dict(**config_overrides).items() if value is not None}
    config = ModelConfig.from_dict(values)
    stored = {prefix + name: tensor.contiguous() for name, tensor in tensors(config, seed).items()} | (extra or {})
    (directory / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    if shards == 1:
        save_file(stored, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: stored[name] for i, name in enumerate(stored) if i * shards // len(stored) == shard}
        save_file(held, directory / file)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return directory
