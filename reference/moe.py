"""Experts of one layer: the router, by hash or by score, the routed experts and the shared one.

An expert's weights are decoded when a token reaches it; an expert that no token reaches costs nothing.
Tests: parity/unit/test_reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference import ops
from reference.checkpoint import Checkpoint
from reference.formats import Policy
from reference.linear import Decoded, Linear
from reference.ops import Sums
from reference.points import Taps


class Gate:
    """Which experts a token takes. The first `num_hash_layers` layers read them from a table, the others score them.

    The bias takes part in the choice only; weights are the unbiased scores in every layer.
    """

    def __init__(self, checkpoint: Checkpoint, layer: int, policy: Policy, sums: Sums, decoded: Decoded) -> None:
        self.config, self.policy, self.sums = checkpoint.config, policy, sums
        self.name = f"layers.{layer}.ffn.gate"
        self.weight = Linear(checkpoint, self.name, Policy(frozenset()), sums, decoded)  # FP32 throughout
        self.tid2eid = self.bias = None
        if self.config.is_hash(layer):
            self.tid2eid = checkpoint.raw(f"{self.name}.tid2eid")  # [vocab, k] int64
        else:
            self.bias = checkpoint.raw(f"{self.name}.bias")

    def scores(self, x: Tensor) -> Tensor:
        """x [b, s, D] -> unbiased scores [b, s, experts]."""
        return ops.gate_scores(self.weight(x), self.config.scoring_func, self.sums, self.policy.gate)

    def choose(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Expert ids [b, s, k], ascending."""
        if self.tid2eid is not None:
            return self.tid2eid[tokens].sort(-1).values
        assert self.bias is not None
        return ops.gate_choose(scores, self.bias, self.config.num_experts_per_tok)

    def weights(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Weights of the given experts, in their order."""
        normalise = self.config.scoring_func != "softmax"
        return ops.gate_weights(scores, experts, normalise, self.config.routed_scaling_factor, self.sums, self.policy.gate)


class Expert:
    """w2( silu(min(w1 x, L)) * clamp(w3 x, -L, L) * weight ).

    clamped   values the limit has changed so far: text may never reach it
    """

    def __init__(self, checkpoint: Checkpoint, name: str, policy: Policy, sums: Sums, decoded: Decoded) -> None:
        self.limit, self.policy, self.clamped = checkpoint.config.swiglu_limit, policy, 0
        self.w1 = Linear(checkpoint, f"{name}.w1", policy, sums, decoded)
        self.w2 = Linear(checkpoint, f"{name}.w2", policy, sums, decoded)
        self.w3 = Linear(checkpoint, f"{name}.w3", policy, sums, decoded)

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x [..., D], weight [...] or None for the shared expert -> [..., D]."""
        gate, up = self.w1(x), self.w3(x)
        self.clamped += int((gate > self.limit).sum() + (up.abs() > self.limit).sum())
        hidden = ops.swiglu(gate, up, self.limit, self.policy.hidden)
        if weight is not None:
            hidden = hidden * weight[..., None]
        return self.w2(self.policy.bf16(hidden))


class MoE:
    """Sum of the chosen experts, plus the shared one."""

    def __init__(self, checkpoint: Checkpoint, layer: int, policy: Policy, sums: Sums, decoded: Decoded, taps: Taps) -> None:
        self.name, self.policy, self.sums, self.taps = f"layers.{layer}.ffn", policy, sums, taps
        self.gate = Gate(checkpoint, layer, policy, sums, decoded)
        self.experts = [
            Expert(checkpoint, f"{self.name}.experts.{e}", policy, sums, decoded) for e in range(checkpoint.config.n_routed_experts)
        ]
        self.shared_experts = Expert(checkpoint, f"{self.name}.shared_experts", policy, sums, decoded)

    def __call__(self, x: Tensor, tokens: Tensor, choices: Mapping[str, Tensor]) -> Tensor:
        """x [b, s, D] normed input, tokens [b, s] -> y [b, s, D]."""
        emit = self.taps.emit
        scores = self.gate.scores(x)
        own = self.gate.choose(scores, tokens)
        experts = choices.get(f"{self.name}.experts", own)  # [b, s, k]
        weights = self.gate.weights(scores, experts)
        parts = torch.zeros(*experts.shape, x.shape[-1])  # [b, s, k, D], one row per token and chosen expert
        for expert in experts.unique().tolist():
            b, s, k = (experts == expert).nonzero(as_tuple=True)
            parts[b, s, k] = self.experts[expert](x[b, s], weights[b, s, k])
        routed = self.sums.sum(parts, 2)
        shared = self.shared_experts(x)
        y = self.policy.bf16(routed + shared)
        emit(f"{self.name}.gate", scores)
        emit(f"{self.name}.experts", own)
        emit(f"{self.name}.weights", weights)
        emit(f"{self.name}.routed", routed)
        emit(f"{self.name}.shared_experts", shared)
        emit(f"{self.name}.out", y)
        return y
