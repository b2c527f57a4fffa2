"""The model's configuration, read from `config.json` and checked at the door.

Every key that changes the arithmetic is required; a value this project does not implement is an error that names
the key; keys nobody knows are listed in `ModelConfig.unknown_keys`, never silently dropped.

    python -c "from reference.config import ModelConfig; print(ModelConfig.from_dir('checkpoints/tiny-dsv4'))"

Tests: parity/unit/test_config.py.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """What the user gave cannot be used. One line: what, where, expected against got.

    Command lines turn it into exit code 2 (pytest: its usage error 4); it never shows a traceback.
    """

    def __str__(self) -> str:
        """One line whatever a file's name holds: line breaks and control characters are escaped."""
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in super().__str__())


@dataclass(frozen=True)
class ModelConfig:
    """Facts of one DeepSeek-V4 checkpoint; the names are those of `config.json`.

    hidden_size                D, width of one residual stream
    num_hidden_layers          layers, MTP layers not counted
    vocab_size                 rows of `embed` and `head`
    num_attention_heads        h, query heads; there is one KV head, K = V
    head_dim                   d, width of q, kv and compressed entries; the last r dims carry the rotation
    qk_rope_head_dim           r
    q_lora_rank, o_lora_rank   widths of the low-rank query and of one output group
    o_groups                   output groups; heads of a group are contiguous
    sliding_window             keys of the window, the query's own included, tokens
    compress_ratios            per layer: 0 window only, 4 CSA, 128 HCA; tokens per compressed entry
    index_n_heads, index_head_dim, index_topk    lightning indexer of CSA layers
    n_routed_experts, num_experts_per_tok, moe_intermediate_size, routed_scaling_factor, scoring_func
    num_hash_layers            the first layers take experts from `gate.tid2eid`
    swiglu_limit               L, clamp of gate (above) and up (both sides)
    hc_mult, hc_sinkhorn_iters, hc_eps           n residual streams and the Sinkhorn normalisation of comb
    rope_theta                 window-only layers; no scaling
    compress_rope_theta        layers with a ratio, with the YaRN values rope_factor, rope_original_max,
                               rope_beta_fast, rope_beta_slow
    max_position_embeddings    tokens; no position at or past it
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    scoring_func: str
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_factor: float
    rope_original_max: int
    rope_beta_fast: float
    rope_beta_slow: float
    max_position_embeddings: int
    unknown_keys: tuple[str, ...] = ()

    # ---- what follows from the facts ----

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry of a layer: 0, 4 or 128."""
        return self.compress_ratios[layer]

    def kind(self, layer: int) -> str:
        """"window", "csa" or "hca"."""
        return {0: "window", 4: "csa", 128: "hca"}[self.compress_ratios[layer]]

    def is_hash(self, layer: int) -> bool:
        """True when the layer's experts come from `gate.tid2eid[token]`."""
        return layer < self.num_hash_layers

    @staticmethod
    def overlap(ratio: int) -> int:
        """Feature halves of a compressor: 2 where groups overlap (ratio 4), else 1."""
        return 2 if ratio == 4 else 1

    # ---- reading ----

    @classmethod
    def from_dir(cls, checkpoint_dir: str | Path) -> ModelConfig:
        """Read `config.json` of a checkpoint directory. Raises InputError."""
        directory = Path(checkpoint_dir)
        if not os.path.isdir(directory):  # False also for a name that no file can have
            raise InputError(f"{directory}: no such directory; expected a checkpoint directory with config.json")
        path = directory / "config.json"
        if not path.is_file():
            raise InputError(f"{directory}: no config.json; this is not a checkpoint directory")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError, RecursionError) as error:
            raise InputError(f"{path}: broken JSON: {error}") from None
        if not isinstance(values, dict):
            raise InputError(f"{path}: expected a JSON object, got {type(values).__name__}")
        return cls.from_dict(values, where=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config") -> ModelConfig:
        """Check and convert the keys of a `config.json`. Raises InputError that names the key."""
        return _Reader(values, where).config()


# Keys with one supported value: (key, accepted values, required).
FIXED: tuple[tuple[str, tuple[Any, ...], bool], ...] = (
    ("model_type", ("deepseek_v4",), True),
    ("hidden_act", ("silu",), True),
    ("num_key_value_heads", (1,), True),
    ("n_shared_experts", (1,), True),
    ("attention_bias", (False,), False),
    ("tie_word_embeddings", (False,), False),
    ("norm_topk_prob", (True,), False),
    ("topk_method", ("noaux_tc",), False),
    ("expert_dtype", ("fp4",), False),
)
QUANTIZATION: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("quant_method", ("fp8",)),
    ("fmt", ("e4m3",)),
    ("scale_fmt", ("ue8m0",)),
    ("weight_block_size", ([128, 128],)),
    ("activation_scheme", ("dynamic",)),
)
# Known, and without effect on inference.
INFORMATIONAL = frozenset(
    ["architectures", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "torch_dtype", "dtype", "use_cache", "num_nextn_predict_layers", "transformers_version", "auto_map", "_name_or_path"]
)
POSITIVE_INTS = ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "hc_mult", "hc_sinkhorn_iters", "max_position_embeddings"]
POSITIVE_FLOATS = ["routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta"]
ROPE_SCALING = {
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_max",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
}
SCORING_FUNCS = ("sqrtsoftplus", "sigmoid", "softmax")


class _Reader:
    """Takes keys out of a config one by one, so that what is left over is unknown."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.used: set[str] = set()

    def fail(self, key: str, message: str) -> InputError:
        return InputError(f"{self.where}: {key}: {message}")

    def take(self, key: str) -> Any:
        if key not in self.values:
            near = difflib.get_close_matches(key, self.values, n=1)
            raise self.fail(key, "missing" + (f"; is it {near[0]!r}?" if near else ""))
        self.used.add(key)
        return self.values[key]

    def number(self, key: str, value: Any, integer: bool, least: float) -> Any:
        ok = isinstance(value, int | float) and not isinstance(value, bool) and least <= value < 2**53
        if not ok or (integer and value != int(value)):
            kind = "an integer" if integer else "a number"
            raise self.fail(key, f"expected {kind} >= {least:g}, got {value!r}")
        return int(value) if integer else float(value)

    def config(self) -> ModelConfig:
        facts: dict[str, Any] = {}
        for key, accepted, required in FIXED:
            if not required and key not in self.values:
                continue
            value = self.take(key)
            if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted):
                raise self.fail(key, f"unsupported value {value!r}; supported: {', '.join(map(repr, accepted))}")
        for key in POSITIVE_INTS:
            facts[key] = self.number(key, self.take(key), True, 1)
        for key in POSITIVE_FLOATS:
            facts[key] = self.number(key, self.take(key), False, 1e-30)
        facts["num_hash_layers"] = self.number("num_hash_layers", self.take("num_hash_layers"), True, 0)
        facts["scoring_func"] = self.take("scoring_func")
        if facts["scoring_func"] not in SCORING_FUNCS:
            raise self.fail("scoring_func", f"unsupported value {facts['scoring_func']!r}; supported: {SCORING_FUNCS}")
        facts |= self.rope_scaling()
        facts["compress_ratios"] = self.compress_ratios(facts["num_hidden_layers"])
        self.quantization()
        self.relations(facts)
        unknown = sorted(set(self.values) - self.used - INFORMATIONAL)
        return ModelConfig(**facts, unknown_keys=tuple(map(str, unknown)))

    def rope_scaling(self) -> dict[str, Any]:
        scaling = self.take("rope_scaling")
        if not isinstance(scaling, dict):
            raise self.fail("rope_scaling", f"expected an object, got {scaling!r}")
        kind = scaling.get("type", scaling.get("rope_type"))
        if kind != "yarn":
            raise self.fail("rope_scaling.type", f"unsupported value {kind!r}; supported: 'yarn'")
        facts = {}
        for key, name in ROPE_SCALING.items():
            if key not in scaling:
                raise self.fail(f"rope_scaling.{key}", "missing")
            integer = key.startswith("original")
            facts[name] = self.number(f"rope_scaling.{key}", scaling[key], integer, 1 if integer else 1e-9)
        return facts

    def compress_ratios(self, layers: int) -> tuple[int, ...]:
        ratios = self.take("compress_ratios")
        if not isinstance(ratios, list) or len(ratios) < layers:
            got = f"{len(ratios)} entries" if isinstance(ratios, list) else repr(ratios)
            raise self.fail("compress_ratios", f"expected a list of at least num_hidden_layers = {layers}, got {got}")
        for layer, ratio in enumerate(ratios):
            if isinstance(ratio, bool) or ratio not in (0, 4, 128):
                raise self.fail(f"compress_ratios[{layer}]", f"unsupported value {ratio!r}; supported: 0, 4, 128")
        return tuple(int(ratio) for ratio in ratios[:layers])  # entries beyond belong to MTP layers

    def quantization(self) -> None:
        quantization = self.take("quantization_config")
        if not isinstance(quantization, dict):
            raise self.fail("quantization_config", f"expected an object, got {quantization!r}")
        for key, accepted in QUANTIZATION:
            if key not in quantization:
                raise self.fail(f"quantization_config.{key}", "missing")
            if quantization[key] not in accepted:
                raise self.fail(
                    f"quantization_config.{key}", f"unsupported value {quantization[key]!r}; supported: {accepted[0]!r}"
                )

    def relations(self, f: dict[str, Any]) -> None:
        d, r, index = f["head_dim"], f["qk_rope_head_dim"], f["index_head_dim"]
        rules = [
            (r % 2 == 0, "qk_rope_head_dim", f"expected an even number, got {r}"),
            (d > r and (d - r) % 64 == 0, "head_dim", f"head_dim - qk_rope_head_dim must be a multiple of 64, got {d} - {r}"),
            (index & (index - 1) == 0 and index >= max(r, 32), "index_head_dim", f"expected a power of two >= {max(r, 32)}, got {index}"),
            (f["num_attention_heads"] % f["o_groups"] == 0, "o_groups", f"{f['o_groups']} does not divide num_attention_heads = {f['num_attention_heads']}"),
            (f["num_experts_per_tok"] <= f["n_routed_experts"], "num_experts_per_tok", f"{f['num_experts_per_tok']} of n_routed_experts = {f['n_routed_experts']}"),
            (f["hidden_size"] % 32 == 0, "hidden_size", f"expected a multiple of 32 (FP4 scale block), got {f['hidden_size']}"),
            (f["moe_intermediate_size"] % 32 == 0, "moe_intermediate_size", f"expected a multiple of 32 (FP4 scale block), got {f['moe_intermediate_size']}"),
        ]
        for ok, key, message in rules:
            if not ok:
                raise self.fail(key, message)
