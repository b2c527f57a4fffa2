"""Single-operation checks of what production assembles itself: the shared expert, and the whole expert half of a layer.

A kernel can be right and be called wrongly (no limit, another branch's limit, a weight too many), and on a checkpoint's
text the SwiGLU clamp may never engage. So the model's own classes run here, on a small random checkpoint and on inputs that
reach past the limit on both sides, against reference/moe.py under production's policy.

    pytest parity/test_operations_blocks.py -k shared_expert
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity.unit.worlds import write_checkpoint
from production import ops
from production.model import POLICY
from production.moe import MoE
from production.variants import plan_of
from production.weights import load_weights
from production.workspace import SharedBuffers, Step, Workspace
from reference.checkpoint import Checkpoint
from reference.formats import Policy
from reference.linear import Decoded
from reference.moe import MoE as ReferenceMoE
from reference.ops import Sums
from reference.points import Taps, points_of_model

ORDERS = (1, 2, 3)
BF16 = torch.bfloat16
LOUD = 16.0  # of normed inputs 1: gate and up then reach past a limit of 10 in about every fourth element
HASH_LAYER, SCORE_LAYER = 0, 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Callable[..., Checkpoint]:
    """A small random checkpoint with these config values; the first layer routes by hash, the second by score."""
    made: dict[str, Checkpoint] = {}

    def make(**overrides: Any) -> Checkpoint:
        key = repr(sorted(overrides.items()))
        if key not in made:
            directory: Path = write_checkpoint(tmp_path_factory.mktemp("world") / "checkpoint", seed=5, num_hidden_layers=2, compress_ratios=[0, 0], **overrides)
            made[key] = Checkpoint(directory)
        return made[key]

    return make


def reference_moe(checkpoint: Checkpoint, layer: int, order: int = 0) -> ReferenceMoE:
    taps = Taps(points_of_model(checkpoint.config))
    return ReferenceMoE(checkpoint, layer, Policy.parse(POLICY), Sums(order), Decoded(), taps)


def production_moe(checkpoint: Checkpoint, layer: int, device: Any) -> MoE:
    weights, _ = load_weights(checkpoint, device.torch_device)
    return MoE(device, checkpoint.config, weights.layers[layer])


def assert_the_clamp_engages(expert: Any, x: Tensor, limit: float) -> None:
    """gate above the limit and far below it, up beyond it on both sides: else the comparison says nothing."""
    gate, up = expert.w1(x), expert.w3(x)
    for name, share in (("gate above", gate > limit), ("gate below", gate < -limit), ("up above", up > limit), ("up below", up < -limit)):
        assert share.float().mean() > 0.02, f"{name} the limit {limit}: {share.float().mean():.3f} of the elements"


# 1 = decode (thin linears), 13 and 129 = tiles and their tails.
@pytest.mark.parametrize("rows", [1, 13, 129], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("limit", [10.0, 2.5], ids=lambda limit: f"limit {limit:g}")
def test_shared_expert_is_clamped(limit, rows, checkpoint, device, hostile, judge):
    world = checkpoint(swiglu_limit=limit)
    config = world.config
    shared = production_moe(world, SCORE_LAYER, device).shared_experts
    x = hostile.bf16((rows, config.hidden_size), seed=1, scale=LOUD)
    x_q, out = hostile.poisoned((rows, config.hidden_size), BF16), hostile.poisoned((rows, config.hidden_size), BF16)
    ops.act_quant(device, x, x_q)
    shared(x_q, SharedBuffers.allocate(rows, config.moe_intermediate_size, device.torch_device), out)

    def compute(order: int) -> Tensor:
        return reference_moe(world, SCORE_LAYER, order).shared_experts(x.cpu().float())

    judge("shared_experts", f"limit {limit:g}, {rows} rows", out, reference=lambda: compute(0),
          twins=[lambda order=order: compute(order) for order in ORDERS])  # fmt: skip
    assert_the_clamp_engages(reference_moe(world, SCORE_LAYER).shared_experts, x.cpu().float(), limit)


def run_moe(moe: MoE, world: Checkpoint, layer: int, x: Tensor, tokens: Tensor, lengths: list[int], device: Any) -> dict[str, Tensor]:
    """The expert half alone, as the model calls it: x [b, s, D] bf16, tokens [b, s] -> points of it, [b, s, ...]."""
    b, s, D = x.shape
    config = world.config
    call = Workspace(config, (layer,), b, s, 64, device.torch_device).at(s)
    start = torch.zeros(b, dtype=torch.int32, device=device.torch_device)
    count = torch.tensor(lengths, dtype=torch.int32, device=device.torch_device)
    call.flat.tokens.copy_(tokens.flatten())
    ops.token_positions(device, start, count, call.flat.position, call.flat.row)
    taps = Taps(points_of_model(config))
    seen: dict[str, Tensor] = {}
    plan = plan_of(None, device)
    variants = plan.decode if s == 1 else plan.prefill
    step = Step(device=device, call=call, b=b, s=s, start=start, count=count, decode=s == 1, variants=variants, entries=0, at=f"layers.{layer}", taps=taps, choices={})
    names = [f"layers.{layer}.ffn.{name}" for name in ("experts", "weights", "routed", "out")]
    with taps.observe(names, lambda point, value: seen.__setitem__(point.rsplit(".", 1)[1], value.detach().cpu().clone())):
        moe(x.reshape(b * s, D), step)
    return seen


@pytest.mark.parametrize("lengths", [[1, 1, 1], [17, 40, 0]], ids=["decode", "prefill with pads"])
@pytest.mark.parametrize("routing_layer", [HASH_LAYER, SCORE_LAYER], ids=["by hash", "by score"])
@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_moe_routes_and_clamps(scoring, routing_layer, lengths, checkpoint, device, hostile, judge):
    layer, world = routing_layer, checkpoint(scoring_func=scoring, swiglu_limit=10.0)
    config = world.config
    b, s = len(lengths), max(lengths)
    x = hostile.bf16((b, s, config.hidden_size), seed=2, scale=LOUD, packed=True)
    tokens = torch.randint(config.vocab_size, (b, s), generator=torch.Generator().manual_seed(3))
    seen = run_moe(production_moe(world, layer, device), world, layer, x, tokens, lengths, device)
    real = torch.arange(s) < torch.tensor(lengths)[:, None]

    # The reference takes production's experts, so that a near-tie does not decide; the choice is judged by itself.
    experts = seen["experts"].long()
    given = {f"layers.{layer}.ffn.experts": torch.where(real[..., None], experts, 0)}

    @cache
    def compute(order: int) -> tuple[Tensor, Tensor, Tensor]:
        moe = reference_moe(world, layer, order)
        outputs: dict[str, Tensor] = {}
        with moe.taps.observe([f"layers.{layer}.ffn.{n}" for n in ("weights", "routed", "out")], outputs.__setitem__):
            moe(x.cpu().float(), tokens, given)
        return tuple(outputs[f"layers.{layer}.ffn.{n}"][real] for n in ("weights", "routed", "out"))  # type: ignore[return-value]

    case = f"{scoring}, {'hash' if layer == HASH_LAYER else 'score'}, lengths {lengths}"
    for index, (name, operation) in enumerate((("weights", "gate_weights"), ("routed", "moe"), ("out", "moe"))):
        judge(operation, f"{case}: {name}", seen[name][real], reference=lambda index=index: compute(0)[index],
              twins=[lambda order=order, index=index: compute(order)[index] for order in ORDERS])  # fmt: skip
    gate = reference_moe(world, layer).gate
    judge("gate_choose", case, experts[real], exact=True, reference=lambda: gate.choose(gate.scores(x.cpu().float()), tokens)[real])
    loud = reference_moe(world, layer)
    assert_the_clamp_engages(loud.experts[int(experts[real][0, 0])], x.cpu().float(), config.swiglu_limit)
