"""Experts of one layer: the router, by hash or by score, the routed experts (FP4) and the shared one (FP8).

The twin of reference/moe.py; the experts of a layer are one tensor, and only chosen ones are read.
Tests: parity/unit/test_production.py, and the single operations in parity/test_operations_dense.py.
"""

from __future__ import annotations

from torch import Tensor

from production import ops
from production.launch import Device
from production.ops import at_once
from production.weights import ExpertWeights, GateWeights, LayerWeights, Linear8, SharedExpertWeights
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

    def matrices(self) -> tuple[Linear8, Linear8, Linear8]:
        return self.w.w1, self.w.w2, self.w.w3

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
        if step.variants.at_once:
            return self.at_once(x, step)
        experts = self.gate(x, step)
        ops.act_quant(self.dev, x, buf.x_q)
        self.experts(buf.x_q, experts, step.call, step.variants.experts)
        self.shared_experts(buf.x_q, step.call.shared, buf.shared, step.variants.linear)
        ops.moe_combine(self.dev, buf.down, experts, buf.shared, buf.routed, buf.y)
        step.emit("ffn.routed", buf.routed)
        step.emit("ffn.shared_experts", buf.shared)
        step.emit("ffn.out", buf.y)
        return buf.y

    def at_once(self, x: Tensor, step: Step) -> Tensor:
        """The same with the same bits and points: the router beside the input's rounding and the shared expert, the shared expert beside
        the routed ones, swiglu with the rounding behind it.
        """
        dev, c, buf, own, call = self.dev, self.gate.config, step.call.flat, step.call.shared, step.call
        w, g, (w1, w2, w3) = self.experts.w, self.gate.w, ((m.weight, m.scale) for m in self.shared_experts.matrices())
        normalise, linear = c.scoring_func != "softmax", step.variants.linear
        if step.decode:
            at_once.project_router(dev, x, buf.x_q, g.weight, buf.gate_logits)
            at_once.project_shared(
                dev, buf.x_q, (w1, own.gate), (w3, own.up), buf.gate_logits, c.scoring_func, buf.scores, g.bias, g.tid2eid, buf.tokens, buf.position,
                buf.experts, buf.weights, normalise, c.routed_scaling_factor,
            )  # fmt: skip
        else:
            ops.linear_bf16(dev, x, g.weight, buf.gate_logits, variant=linear)
            at_once.quant_rows(dev, x, buf.x_q)
            ops.gate_scores(dev, buf.gate_logits, c.scoring_func, buf.scores)
            ops.gate_choose(dev, buf.scores, g.bias, g.tid2eid, buf.tokens, buf.position, buf.experts)
            ops.gate_weights(dev, buf.scores, buf.experts, buf.weights, normalise, c.routed_scaling_factor)
            ops.linear_fp8(dev, buf.x_q, *w1, own.gate, variant=linear)
            ops.linear_fp8(dev, buf.x_q, *w3, own.up, variant=linear)
        for point, value in (("gate", buf.scores), ("experts", buf.experts)):
            step.emit(f"ffn.{point}", value)
        given = step.choices.get(f"{step.at}.ffn.experts", buf.experts)
        if given is not buf.experts:
            ops.gate_weights(dev, buf.scores, given, buf.weights, normalise, c.routed_scaling_factor)
        step.emit("ffn.weights", buf.weights)
        gate, up, h_q = (t.flatten(0, 1) for t in (buf.gate, buf.up, buf.h_q))
        ops.experts_up(dev, buf.x_q, given, w.w1, w.s1, w.w3, w.s3, call.flat.gate, call.flat.up, step.variants.experts, call.scratch)
        at_once.swiglu_quant(dev, gate, up, buf.weights.flatten(), h_q, own.gate, own.up, own.h_q, self.experts.limit)
        if step.decode:
            at_once.project_down(dev, buf.h_q, given, w.w2, w.s2, buf.down, own.h_q, (w2, buf.shared))
        else:
            ops.experts_down(dev, buf.h_q, given, w.w2, w.s2, buf.down, step.variants.experts, call.scratch)
            ops.linear_fp8(dev, own.h_q, *w2, buf.shared, variant=linear)
        at_once.combine_rows(dev, buf.down, given, buf.shared, buf.routed, buf.y)
        for point, value in (("routed", buf.routed), ("shared_experts", buf.shared), ("out", buf.y)):
            step.emit(f"ffn.{point}", value)
        return buf.y
