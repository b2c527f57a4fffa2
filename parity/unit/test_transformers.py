"""The reference against the `transformers` implementation of DeepSeek-V4, in FP32, layer by layer.

A development test: another implementation, another prompt than the golden file's, and other configs. It is skipped only
where `transformers` is not installed; it is no dependency of the audit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from parity.unit import worlds
from reference.checkpoint import Checkpoint
from reference.formats import decode_fp4_weight, decode_fp8_weight

transformers = pytest.importorskip("transformers", reason="transformers is not installed (development dependency)")
tokenizers = pytest.importorskip("tokenizers")

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
# FP32 noise of two implementations, per row: relative L2 of the residual streams. Measured: 4e-7 to 3e-6.
ROW_LIMIT = 2e-5

# index_n_heads 16: with few heads every relu of an entry can be 0, and `transformers` breaks such exact ties otherwise.
# Grid rationale: the bundled checkpoint; streams, widths and scores it does not have; orders of ratios that start compressed.
WORLDS: dict[str, dict[str, Any]] = {
    "narrow": {},
    "sigmoid": {"scoring_func": "sigmoid", "hidden_size": 160, "hc_mult": 3, "compress_ratios": [4, 0, 128, 4], "o_groups": 1},
    "pro-like": {"compress_ratios": [128, 128, 4, 128], "hc_sinkhorn_iters": 1, "num_hash_layers": 3, "sliding_window": 5},
}
NAMES = [
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
    ("attn.kv_norm.weight", "self_attn.kv_norm.weight"),
    ("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
    ("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
    ("attn.wkv.weight", "self_attn.kv_proj.weight"),
    ("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
    ("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
    ("attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
    ("attn.indexer.weights_proj.weight", "self_attn.compressor.indexer.scorer.weights_proj.weight"),
    ("attn.indexer.compressor.", "self_attn.compressor.indexer."),
    ("attn.compressor.", "self_attn.compressor."),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.gate.", "mlp.gate."),
    ("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"),
    ("ffn.shared_experts.w2", "mlp.shared_experts.down_proj"),
    ("ffn.shared_experts.w3", "mlp.shared_experts.up_proj"),
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
]
COMPRESSOR_NAMES = [("wkv.", "kv_proj."), ("wgate.", "gate_proj."), ("norm.", "kv_norm."), ("ape", "position_bias")]


def other_name(name: str) -> str:
    """A checkpoint's tensor name in the words of `transformers`."""
    for ours, theirs in (("embed.", "model.embed_tokens."), ("head.", "lm_head."), ("norm.", "model.norm."), ("hc_head_", "model.hc_head.hc_")):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    _, layer, rest = name.split(".", 2)
    for ours, theirs in NAMES:
        if rest.startswith(ours):
            rest = theirs + rest.removeprefix(ours)
            break
    if ".compressor." in name:
        for ours, theirs in COMPRESSOR_NAMES:
            head, _, tail = rest.rpartition("compressor.indexer." if "compressor.indexer." in rest else "compressor.")
            if tail.startswith(ours):
                middle = rest[len(head) : len(rest) - len(tail)]
                rest = head + middle + theirs + tail.removeprefix(ours)
                break
    return f"model.layers.{layer}.{rest}"


def other_model(directory: Path):
    """The checkpoint, decoded to FP32, in the `transformers` model."""
    checkpoint = Checkpoint(directory)
    weights: dict[str, Tensor] = {}
    for name, spec in checkpoint.specs.items():
        if name.endswith(".scale"):
            continue
        tensor = checkpoint.raw(name)
        if spec.dtype in ("F8_E4M3", "I8"):
            decode = decode_fp8_weight if spec.dtype == "F8_E4M3" else decode_fp4_weight
            tensor = decode(tensor, checkpoint.raw(name.removesuffix("weight") + "scale"))
        weights[name] = tensor if spec.dtype == "I64" else tensor.float()
    for layer in checkpoint.layers:
        expert = f"layers.{layer}.ffn.experts"
        taken = [[weights.pop(f"{expert}.{e}.w{i}.weight") for i in (1, 2, 3)] for e in range(checkpoint.config.n_routed_experts)]
        weights[f"{expert}.gate_up"] = torch.stack([torch.cat((w1, w3)) for w1, _, w3 in taken])
        weights[f"{expert}.down"] = torch.stack([w2 for _, w2, _ in taken])
    renamed = {}
    for name, tensor in weights.items():
        if name.endswith((".gate_up", ".down")):
            renamed[f"model.layers.{name.split('.')[1]}.mlp.experts.{name.rsplit('.', 1)[1]}_proj"] = tensor
        else:
            renamed[other_name(name)] = tensor
    values = json.loads((directory / "config.json").read_text())
    values.pop("quantization_config")
    ratios = values["compress_ratios"][: values["num_hidden_layers"]]
    config = transformers.DeepseekV4Config.from_dict(values | {"compress_ratios": ratios, "torch_dtype": "float32"})
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.DeepseekV4ForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    return model


def other_values(model, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
    """Residual streams after every layer [b, s, n, D], and the logits."""
    residuals: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: residuals.append(out.clone())) for layer in model.model.layers]
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return residuals, logits


def row_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Relative L2 of each token's row [b, s]."""
    error: Tensor = (ours - theirs).flatten(2).norm(dim=-1) / theirs.flatten(2).norm(dim=-1)
    return error


def compare(directory: Path, tokens: Tensor) -> None:
    residuals, logits = other_values(other_model(directory), tokens)
    model = reference.load(directory, policy="exact")
    seen: dict[str, Tensor] = {}
    points = tuple(f"layers.{n}.hc_ffn.X" for n in model.layers)
    with model.taps.observe(points, lambda point, value: seen.update({point: value.clone()})):
        ours = model.prefill(tokens, model.new_state(batch=tokens.shape[0]))
    worst = [float(row_error(seen[point], theirs).max()) for point, theirs in zip(points, residuals, strict=True)]
    print("worst row by layer: " + " ".join(f"{error:.1e}" for error in worst), f"logits {float((ours - logits).abs().max()):.1e}")
    assert max(worst) <= ROW_LIMIT
    assert float(row_error(ours, logits).max()) <= ROW_LIMIT


def test_every_residual_of_the_bundled_checkpoint() -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ids = [tokenizer.encode((TINY / "prompts" / f"{name}.txt").read_text()).ids for name in ("long", "medium")]
    compare(TINY, torch.tensor([ids[0][40:340], ids[1][300:600]]))


@pytest.mark.parametrize("name", WORLDS)
def test_every_residual_of_other_configs(name: str, tmp_path: Path) -> None:
    directory = worlds.write_checkpoint(tmp_path, seed=11, index_n_heads=16, **WORLDS[name])
    compare(directory, torch.tensor([worlds.prompt(270, 128), worlds.prompt(270, 128, start=5000)]))
