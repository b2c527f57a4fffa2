"""Typed wrappers of the kernels. `dense` and `hyper_connection` work on one token at a time; `storage` writes the KV cache,
`indexer`, `topk` and `sparse_attn` read it.

    from production import ops
    ops.rms_norm(device, x, weight, out, eps=1e-6)

Shapes, layouts and variants are in the docstring of each wrapper. Tests: pytest parity/ -k operations.
"""

from production.ops.dense import (
    act_quant,
    advance,
    embed,
    experts_down,
    experts_scratch,
    experts_up,
    gate_choose,
    gate_scores,
    gate_weights,
    linear_bf16,
    linear_fp8,
    moe_combine,
    rms_norm,
    rope,
    swiglu,
    token_positions,
)
from production.ops.hyper_connection import hc_head, hc_post, hc_pre, mix_scratch
from production.ops.indexer import hadamard_e2m1, indexer_score, indexer_scratch
from production.ops.layout import entry_bytes
from production.ops.sparse_attn import merge_counters, merges_in_launch, sparse_attn, splits_for
from production.ops.storage import compressor_prefill, compressor_step, store_entries, store_index_keys, store_window
from production.ops.topk import topk, topk_scratch

__all__ = [
    "act_quant",
    "advance",
    "compressor_prefill",
    "compressor_step",
    "embed",
    "entry_bytes",
    "experts_down",
    "experts_scratch",
    "experts_up",
    "gate_choose",
    "gate_scores",
    "gate_weights",
    "hadamard_e2m1",
    "hc_head",
    "hc_post",
    "hc_pre",
    "indexer_score",
    "indexer_scratch",
    "linear_bf16",
    "linear_fp8",
    "merge_counters",
    "merges_in_launch",
    "mix_scratch",
    "moe_combine",
    "rms_norm",
    "rope",
    "sparse_attn",
    "splits_for",
    "store_entries",
    "store_index_keys",
    "store_window",
    "swiglu",
    "token_positions",
    "topk",
    "topk_scratch",
]
