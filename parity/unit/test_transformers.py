"""The reference against the `transformers` implementation of DeepSeek-V4, in FP32, layer by layer.

A development test: another implementation, another prompt than the golden file's, and other configs, read by the adapter's own
loader (probes/outside/deepseek_v4_transformers.py). It is skipped only where `transformers` is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from parity.unit import worlds
from probes.outside import deepseek_v4_transformers as adapter

pytest.importorskip("transformers", reason="transformers is not installed (extra: transformers)")
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
    residuals, logits = other_values(adapter.load(directory).root, tokens)
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
