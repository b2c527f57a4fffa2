"""Experts of one layer: the router, by hash or by score, the routed experts (FP4) and the shared one (FP8).

The twin of reference/moe.py; the experts of a layer are one tensor, and only chosen ones are read.
Tests: parity/unit/test_production.py, and the single operations in parity/test_operations_dense.py.
"""

from __future__ import annotations

from torch import Tensor

from production import ops
from production.launch import Device
from production.weights import ExpertWeights, GateWeights, LayerWeights, SharedExpertWeights
from production.workspace import Call, SharedBuffers, Step
from reference.config import ModelConfig


class Gate:
    """Scores of all experts; experts by `tid2eid[token]` or by the best biased scores; weights from the unbiased."""

    def __init__(self, dev: Device, config: ModelConfig, weights: GateWeights) -> None:
        self.dev, self.config, self.w = dev, config, weights

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [T, D] -> experts [T, k] i32 ascending, -1 for pads; buf.weights [T, k] f32."""
        dev, c, buf = self.dev, self.config, step.call.flat
        ops.linear_bf16(dev, x, self.w.weight, buf.gate_logits, variant=step.variants.linear)
        ops.gate_scores(dev, buf.gate_logits, c.scoring_func, buf.scores)
        step.emit("ffn.gate", buf.scores)
        ops.gate_choose(dev, buf.scores, self.w.bias, self.w.tid2eid, buf.tokens, buf.position, buf.experts)
        step.emit("ffn.experts", buf.experts)
        experts = step.choices.get(f"{step.at}.ffn.experts", buf.experts)
        ops.gate_weights(dev, buf.scores, experts, buf.weights, c.scoring_func != "softmax", c.routed_scaling_factor)
        step.emit("ffn.weights", buf.weights)
        return experts


class Expert:
    """The routed experts of a layer, FP4: down(silu(min(gate, L)) * clamp(up) * weight) for each chosen one."""

    def __init__(self, dev: Device, weights: ExpertWeights, limit: float) -> None:
        self.dev, self.w, self.limit = dev, weights, limit

    def __call__(self, x_q: Tensor, experts: Tensor, call: Call, variant: str | None = None) -> None:
        """x_q [T, D], experts [T, k] -> buf.down [T, k, D] bf16."""
        dev, w, buf = self.dev, self.w, call.flat
        ops.experts_up(dev, x_q, experts, w.w1, w.s1, w.w3, w.s3, buf.gate, buf.up, variant, call.scratch)
        ops.swiglu(dev, buf.gate.flatten(0, 1), buf.up.flatten(0, 1), buf.weights.flatten(), buf.h.flatten(0, 1), self.limit)
        ops.act_quant(dev, buf.h.flatten(0, 1), buf.h_q.flatten(0, 1))
        ops.experts_down(dev, buf.h_q, experts, w.w2, w.s2, buf.down, variant, call.scratch)


class SharedExpert:
    """The expert every token takes, FP8; the same clamp, weight 1."""

    def __init__(self, dev: Device, weights: SharedExpertWeights, limit: float) -> None:
        self.dev, self.w, self.limit = dev, weights, limit

    def __call__(self, x_q: Tensor, buf: SharedBuffers, out: Tensor, variant: str | None = None) -> None:
        """x_q [T, D] e4m3-rounded bf16 -> out [T, D] bf16."""
        dev, w = self.dev, self.w
        ops.linear_fp8(dev, x_q, w.w1.weight, w.w1.scale, buf.gate, variant=variant)
        ops.linear_fp8(dev, x_q, w.w3.weight, w.w3.scale, buf.up, variant=variant)
        ops.swiglu(dev, buf.gate, buf.up, None, buf.h, limit=self.limit)
        ops.act_quant(dev, buf.h, buf.h_q)
        ops.linear_fp8(dev, buf.h_q, w.w2.weight, w.w2.scale, out, variant=variant)


class MoE:
    """Sum of the chosen routed experts and the shared one."""

    def __init__(self, dev: Device, config: ModelConfig, weights: LayerWeights) -> None:
        self.dev = dev
        self.gate = Gate(dev, config, weights.gate)
        self.experts = Expert(dev, weights.experts, config.swiglu_limit)
        self.shared_experts = SharedExpert(dev, weights.shared_experts, config.swiglu_limit)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [T, D] bf16, normed -> y [T, D] bf16."""
        buf = step.call.flat
        experts = self.gate(x, step)
        ops.act_quant(self.dev, x, buf.x_q)
        self.experts(buf.x_q, experts, step.call, step.variants.experts)
        self.shared_experts(buf.x_q, step.call.shared, buf.shared, step.variants.linear)
        ops.moe_combine(self.dev, buf.down, experts, buf.shared, buf.routed, buf.y)
        step.emit("ffn.routed", buf.routed)
        step.emit("ffn.shared_experts", buf.shared)
        step.emit("ffn.out", buf.y)
        return buf.y
