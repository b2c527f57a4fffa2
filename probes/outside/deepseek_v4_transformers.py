"""The `deepseek_v4` model of Hugging Face transformers on a published checkpoint, with its own cache, as an outside production.

    pytest parity/ --production transformers
    model = load("checkpoints/tiny-dsv4", dtype="fp32")         # or "bf16"

Weights are the checkpoint's own, decoded (FP8 and FP4 to the asked dtype). The model is transformers' code as installed; only its
submodules and its attention function are looked at, through hooks that are borrowed for a call. Its indexer scores unrotated
vectors: they are shown after the Hadamard rotation that the points mean, which changes no score.

Its cache has one length: rows of a batch must be equally long. Needs the extra `transformers`.
Tests: parity/unit/test_outside_transformers.py, parity/unit/test_transformers.py (residuals, without the audit).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probes.outside.protocol import Call, Outside, Rows, first_output, wrap
from reference import ops
from reference.checkpoint import Checkpoint
from reference.config import InputError, ModelConfig
from reference.formats import Policy, decode_fp4_weight, decode_fp8_weight
from reference.points import Taps

PADS, MOST_PADDED = 9, 64  # of the measurement of left padding; a multiple of 4 would keep the compressors' groups
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# ---- the checkpoint's tensors in the words of transformers ----

MODEL_NAMES = (("embed.", "model.embed_tokens."), ("head.", "lm_head."), ("norm.", "model.norm."), ("hc_head_", "model.hc_head.hc_"))
LAYER_NAMES = (
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn.q_norm.", "self_attn.q_a_norm."),
    ("attn.kv_norm.", "self_attn.kv_norm."),
    ("attn.wq_a.", "self_attn.q_a_proj."),
    ("attn.wq_b.", "self_attn.q_b_proj."),
    ("attn.wkv.", "self_attn.kv_proj."),
    ("attn.wo_a.", "self_attn.o_a_proj."),
    ("attn.wo_b.", "self_attn.o_b_proj."),
    ("attn.indexer.wq_b.", "self_attn.compressor.indexer.q_b_proj."),
    ("attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."),
    ("attn.indexer.compressor.", "self_attn.compressor.indexer."),
    ("attn.compressor.", "self_attn.compressor."),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn.gate.", "mlp.gate."),
    ("ffn.shared_experts.w1.", "mlp.shared_experts.gate_proj."),
    ("ffn.shared_experts.w2.", "mlp.shared_experts.down_proj."),
    ("ffn.shared_experts.w3.", "mlp.shared_experts.up_proj."),
    ("attn_norm.", "input_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("hc_attn_", "attn_hc."),
    ("hc_ffn_", "ffn_hc."),
)
COMPRESSOR_NAMES = (("wkv.", "kv_proj."), ("wgate.", "gate_proj."), ("norm.", "kv_norm."), ("ape", "position_bias"))


def their_name(name: str) -> str:
    """A checkpoint tensor's name in the words of transformers."""
    for ours, theirs in MODEL_NAMES:
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    _, layer, rest = name.split(".", 2)
    for ours, theirs in LAYER_NAMES:
        if rest.startswith(ours):
            tail = rest.removeprefix(ours)
            if ours.endswith("compressor."):
                tail = next((t + tail.removeprefix(o) for o, t in COMPRESSOR_NAMES if tail.startswith(o)), tail)
            return f"model.layers.{layer}.{theirs}{tail}"
    return name


def _weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Every tensor of the loaded layers, decoded to FP32, by transformers' name; experts stacked as it holds them."""
    found: dict[str, Tensor] = {}
    for name, spec in checkpoint.specs.items():
        if name.endswith(".scale"):
            continue
        tensor = checkpoint.raw(name)
        if spec.dtype in ("F8_E4M3", "I8"):
            decode = decode_fp8_weight if spec.dtype == "F8_E4M3" else decode_fp4_weight
            tensor = decode(tensor, checkpoint.raw(name.removesuffix("weight") + "scale"))
        found[name] = tensor if spec.dtype == "I64" else tensor.float()
    for layer in checkpoint.layers:
        at = f"layers.{layer}.ffn.experts"
        experts = [[found.pop(f"{at}.{e}.w{i}.weight") for i in (1, 2, 3)] for e in range(checkpoint.config.n_routed_experts)]
        into = f"model.layers.{layer}.mlp.experts"
        found[f"{into}.gate_up_proj"] = torch.stack([torch.cat((w1, w3)) for w1, _, w3 in experts])
        found[f"{into}.down_proj"] = torch.stack([w2 for _, w2, _ in experts])
    return {name if name.startswith("model.") else their_name(name): tensor for name, tensor in found.items()}


# ---- where each point is seen ----


def _input(call: Call) -> Tensor:
    found = call.args[0]
    assert isinstance(found, Tensor)
    return found


def _of_output(index: int) -> Callable[[Call], Tensor]:
    def read(call: Call) -> Tensor:
        found = call.output[index]
        assert isinstance(found, Tensor)
        return found

    return read


def points_of(config: ModelConfig, raw: dict[str, Tensor]) -> Rows:
    """The table: point -> module, and what of its call is the point. `raw` keeps index queries as the model has them."""
    c = config

    def index_q(call: Call) -> Tensor:
        raw[f"layers.{call.layer}.attn.indexer.q"] = call.args[0].detach().clone()
        return ops.hadamard(call.args[0].float())

    def heads(call: Call) -> Tensor:  # what o_a_proj gets is grouped heads
        return _input(call).reshape(*call.positions.shape, c.num_attention_heads, c.head_dim)

    def entry(ratio: int, of: Callable[[Call], Tensor]) -> Callable[[Call], Tensor]:
        """The running list of entries as rows at the queries that complete them."""

        def read(call: Call) -> Tensor:
            entries = of(call)  # [b, e, d]
            done = (call.positions + 1) % ratio == 0
            number = torch.where(done, (call.positions + 1) // ratio - 1, 0)
            rows = torch.full((*call.positions.shape, entries.shape[-1]), torch.nan)
            if entries.shape[1]:
                picked = entries.float().gather(1, number.clamp_max(entries.shape[1] - 1)[..., None].expand(-1, -1, entries.shape[-1]))
                rows = torch.where(done[..., None] & (number < entries.shape[1])[..., None], picked, rows)
            return rows

        return read

    def score(call: Call) -> Tensor:
        complete = (call.positions + 1) // 4
        return first_output(call).masked_fill(torch.arange(call.output.shape[-1]) >= complete[..., None], -torch.inf)

    def chosen(call: Call) -> Tensor:
        found = first_output(call)
        return torch.where(found < 0, torch.iinfo(found.dtype).max, found).sort(-1).values.masked_fill((found < 0).sort(-1).values, -1)

    def scores_of(call: Call) -> Tensor:  # its router gives logits, weights, ids; the point is the score
        return call.module.score_fn(_of_output(0)(call)).reshape(*call.positions.shape, -1)  # type: ignore[no-any-return]

    def experts(call: Call) -> Tensor:
        return call.output[2].sort(-1).values.reshape(*call.positions.shape, -1)  # type: ignore[no-any-return]

    def weights(call: Call) -> Tensor:
        order = call.output[2].sort(-1).indices
        return call.output[1].gather(-1, order).reshape(*call.positions.shape, -1)  # type: ignore[no-any-return]

    at = "model.layers.{layer}"
    indexer = f"{at}.self_attn.compressor.indexer"
    rows: dict[str, str | tuple[str, Callable[[Call], Tensor | None]]] = {"embed": "model.embed_tokens"}
    layer: dict[str, str | tuple[str, Callable[[Call], Tensor | None]]] = {
        "hc_attn.post": (f"{at}.attn_hc", _of_output(0)),
        "hc_attn.comb": (f"{at}.attn_hc", _of_output(1)),
        "hc_attn.a": (f"{at}.attn_hc", _of_output(2)),
        "attn.norm": f"{at}.input_layernorm",
        "attn.q_norm": f"{at}.self_attn.q_a_norm",
        "attn.indexer.q": (f"{indexer}.scorer", index_q),
        "attn.indexer.weights": (f"{indexer}.scorer.weights_proj", lambda call: first_output(call).float() * (c.index_head_dim * c.index_n_heads) ** -0.5),
        "attn.indexer.compressor": (f"{indexer}.scorer", entry(4, lambda call: ops.hadamard(call.args[1].float()))),
        "attn.indexer.score": (f"{indexer}.scorer", score),
        "attn.selected": (indexer, chosen),
        "attn.o": (f"{at}.self_attn.o_a_proj", heads),
        "attn.wo_a": (f"{at}.self_attn.o_a_proj", lambda call: first_output(call).flatten(2)),
        "attn.out": f"{at}.self_attn.o_b_proj",
        "hc_attn.X": (f"{at}.ffn_hc", _input),
        "hc_ffn.post": (f"{at}.ffn_hc", _of_output(0)),
        "hc_ffn.comb": (f"{at}.ffn_hc", _of_output(1)),
        "hc_ffn.a": (f"{at}.ffn_hc", _of_output(2)),
        "ffn.norm": f"{at}.post_attention_layernorm",
        "ffn.gate": (f"{at}.mlp.gate", scores_of),
        "ffn.experts": (f"{at}.mlp.gate", experts),
        "ffn.weights": (f"{at}.mlp.gate", weights),
        "ffn.routed": (f"{at}.mlp.experts", lambda call: first_output(call).reshape(*call.positions.shape, -1)),
        "ffn.shared_experts": f"{at}.mlp.shared_experts",
        "ffn.out": f"{at}.mlp",
        "hc_ffn.X": at,
    }
    rows |= {"layers.{layer}." + name: where for name, where in layer.items()}
    compressors = {4: "CSA", 128: "HCA"}
    for n in range(c.num_hidden_layers):
        if c.ratio(n) in compressors:
            rows[f"layers.{n}.attn.compressor"] = (f"model.layers.{n}.self_attn.compressor", entry(c.ratio(n), lambda call: call.output[0][:, 0]))
        for name in ("q", "kv", "visible", "core"):
            rows[f"layers.{n}.attn.{name}"] = ""  # seen at the attention function
    return rows | {"hc_head": "model.hc_head", "norm": "model.norm"}


# ---- the model ----


class TransformersDeepseekV4:
    """transformers' model behind the protocol of probes/outside/protocol.py.

    root      the module; config  ours, of the same checkpoint
    raw       index queries of the last call as the model has them: what is shown of them is rotated
    """

    def __init__(self, root: Any, config: ModelConfig, version: str, dtype: str) -> None:
        self.root, self.config, self.dtype = root, config, dtype
        self.name = f"transformers {version} deepseek_v4, {dtype}"
        self.policy = Policy.parse("exact" if dtype == "fp32" else "eager.bf16").points
        layers = len(root.model.layers)
        indexed = any(config.ratio(n) == 4 for n in range(layers))
        loaded = {f"layers.{n}" for n in range(layers)} | {"layers.{layer}"}
        self.raw: dict[str, Tensor] = {}
        self.points = {
            point: where for point, where in points_of(config, self.raw).items()
            if (not point.startswith("layers.") or ".".join(point.split(".")[:2]) in loaded) and (indexed or (not point.endswith(".attn.selected") and ".indexer." not in point))
        }  # fmt: skip
        self.notes = [
            "its cache has one length: rows of a batch must be equally long",
            "its indexer scores vectors without the Hadamard rotation: they are shown rotated, which changes no score",
        ]

    def measured(self, tokens: Tensor) -> dict[str, dict[str, Any]]:
        """What batches of unequal rows would cost; tokens [b, s] of the run."""
        row = tokens[0, :MOST_PADDED].tolist()
        return {"outside.left_padding": {"tokens": len(row), "pads": PADS, "largest_logit_difference": left_padding(self.root, row, PADS)}}

    def new_state(self, batch: int, max_context: int | None) -> dict[str, Any]:
        from transformers import DynamicCache

        return {"cache": DynamicCache(config=self.root.config), "batch": batch, "max_context": max_context, "tokens": 0}

    def prefill(self, tokens: Tensor, state: dict[str, Any]) -> Tensor:
        limit = state["max_context"]
        if limit is not None and state["tokens"] + tokens.shape[1] > limit:
            raise InputError(f"{state['tokens']} tokens held and {tokens.shape[1]} more exceed max_context {limit}; raise --max-context")
        state["tokens"] += tokens.shape[1]
        return self.root(input_ids=tokens, cache=state["cache"], use_cache=True).logits  # type: ignore[no-any-return]

    def decode(self, tokens: Tensor, state: dict[str, Any]) -> Tensor:
        return self.prefill(tokens[:, None], state)[:, 0]

    @contextmanager
    def borrowed(self, taps: Taps, positions: Tensor) -> Iterator[None]:
        """Look at its attention function for one call: queries, new key, which keys the mask lets through, output."""
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

        if not any(taps.wants(point) for point in taps.points):
            yield
            return
        W, plain = self.config.sliding_window, theirs.eager_attention_forward

        def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Any]:
            out, weights = plain(module, query, key, value, mask, **kwargs)
            n, s = module.layer_idx, query.shape[2]
            at = f"layers.{n}.attn"
            taps.emit(f"{at}.q", query.transpose(1, 2))
            taps.emit(f"{at}.core", out)
            last = int(positions[0, -1])
            ratio = self.config.ratio(n)
            entries = (last + 1) // ratio if ratio else 0
            window = key.shape[2] - entries  # keys before the compressed ones, up to the last query's own
            taps.emit(f"{at}.kv", key[:, 0, window - s : window])
            if taps.wants(f"{at}.visible"):
                seen = torch.ones(query.shape[0], s, key.shape[2], dtype=torch.bool) if mask is None else (mask[:, 0] == 0).expand(query.shape[0], -1, -1)
                taps.emit(f"{at}.visible", torch.cat((_listed(seen[..., :window], last - window + 1, W), _listed(seen[..., window:], 0, 0)), -1))
            return out, weights

        theirs.eager_attention_forward = attention  # NOTE: a name of its own would get another mask
        try:
            yield
        finally:
            theirs.eager_attention_forward = plain


def _listed(seen: Tensor, first: int, width: int) -> Tensor:
    """Numbers of the true columns [b, s, c], counted from `first`, ascending, -1 behind them; at least `width` columns."""
    none = torch.iinfo(torch.int64).max
    numbers = torch.where(seen, first + torch.arange(seen.shape[-1]), none).sort(-1).values
    most = max(int(seen.sum(-1).max()) if seen.numel() else 0, width)
    numbers = numbers.masked_fill(numbers == none, -1)
    return torch.nn.functional.pad(numbers, (0, max(0, most - numbers.shape[-1])), value=-1)[..., :most]


def _narrow(root: Any, dtype: torch.dtype) -> None:
    """Parameters to the asked dtype, but for those that its own loading keeps in FP32. Buffers (rotary frequencies) stay FP32."""
    kept = set(root._keep_in_fp32_modules_strict)
    for name, parameter in root.named_parameters():
        if not kept & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def load(checkpoint_dir: str | Path, layers: Sequence[int] | None = None, max_context: int | None = None, device: str = "cpu", dtype: str = "fp32") -> Outside:
    """Read the checkpoint into transformers' model. Raises InputError where it is not installed or does not take the checkpoint."""
    try:
        import transformers
    except ImportError:
        raise InputError("--production transformers: transformers is not installed; next: pip install 'transformers>=5'") from None
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r}: expected {' or '.join(DTYPES)}")
    directory = Path(checkpoint_dir)
    checkpoint = Checkpoint(directory, layers)
    count = len(checkpoint.layers)
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in ("quantization_config", "expert_dtype", "dtype", "torch_dtype"):
        values.pop(name, None)
    values |= {"num_hidden_layers": count, "compress_ratios": values["compress_ratios"][:count]}
    config = transformers.DeepseekV4Config.from_dict(values)
    config._attn_implementation = config._experts_implementation = "eager"
    root = transformers.DeepseekV4ForCausalLM(config).float().eval()
    _narrow(root, DTYPES[dtype])
    missing, unexpected = root.load_state_dict(_weights(checkpoint), strict=False)
    if missing or unexpected:
        raise InputError(f"--production transformers: tensors that it does not take: {sorted([*missing, *unexpected])[:5]}")
    return wrap(TransformersDeepseekV4(root, checkpoint.config, transformers.__version__, dtype), checkpoint.layers)


def left_padding(root: Any, tokens: Sequence[int], pads: int) -> float:
    """The largest difference of a row's logits alone and left-padded by `pads` tokens behind an attention mask, positions its own.

    A batch of unequal rows would have to be padded so; a model that it changes takes rows of one length only.
    """
    count = len(tokens)
    alone = torch.tensor([list(tokens)])
    padded = torch.nn.functional.pad(alone, (pads, 0))
    mask = (torch.arange(pads + count) >= pads).long()[None]
    positions = (torch.arange(pads + count) - pads).clamp_min(0)[None]
    with torch.no_grad():
        want = root(input_ids=alone, use_cache=False).logits
        got = root(input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, pads:]
    return float((got - want).abs().max())
