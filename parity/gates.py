"""The tolerance table, and the only place where a number becomes pass or fail.

Every limit is `k * floor + eps`. The floor is measured in the run: the worst row of three own-policy PyTorch twins,
whose sums are reordered, against the reference under the same policy and on the same inputs. `eps` is what a twin may
happen not to show: one rounding that falls the other way (a bf16 step is 2^-8 of an element, an e4m3 step 2^-4, an e2m1
step up to 2^-1), as it reaches that point. A limit above MAX_LIMIT is refused: a gate of 1.0 would pass zeros.

No other file holds a tolerance. Changing a row is a commit of its own, with the margins before and after.
Tests: parity/unit/test_gates.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from probes.core.records import State

MAX_LIMIT = 0.3
K = 3.0


@dataclass(frozen=True)
class Gate:
    """One row of the table.

    eps_isolated   absolute part of the worst-row limit when input and state are the reference's own
    eps_free       the same in the free-running chain, where inputs already differ by their own rounding
    why            which roundings the two cover
    k              factor on the measured floor
    """

    eps_isolated: float
    eps_free: float
    why: str
    k: float = K

    def eps(self, mode: str) -> float:
        return self.eps_free if mode == "free" else self.eps_isolated


FP32 = "FP32 sums in another order"
BF16 = "a bf16 step of a large element"
E4M3 = "an e4m3 step (2^-4) of a large element, in a row of tens of them"
E2M1 = "an e2m1 step (up to 2^-1) of one of index_head_dim elements"
INHERITED = ", and what the layers before hand down"


def _gate(isolated: float, free: float, why: str) -> Gate:
    return Gate(isolated, free, why)


# One row per point (names of reference/points.py), then the derived gates.
GATES: dict[str, Gate] = {
    "embed": _gate(0.0, 0.0, "a copied row: exact"),
    **{
        f"hc_{half}.{name}": gate
        for half in ("attn", "ffn")
        for name, gate in {
            "pre": _gate(1e-5, 5e-3, FP32),
            "post": _gate(1e-5, 5e-3, FP32),
            "comb": _gate(1e-5, 5e-3, FP32),
            "a": _gate(4e-3, 1e-2, BF16),
            "X": _gate(4e-3, 1e-2, BF16),
        }.items()
    },
    "attn.norm": _gate(4e-3, 1e-2, BF16),
    "attn.q_norm": _gate(8e-3, 2e-2, E4M3),
    "attn.q": _gate(8e-3, 2e-2, E4M3),
    "attn.kv": _gate(1.5e-2, 3e-2, E4M3),
    "attn.compressor": _gate(1.5e-2, 3e-2, E4M3),
    "attn.indexer.q": _gate(5e-2, 8e-2, E2M1),
    "attn.indexer.weights": _gate(4e-3, 1e-2, BF16),
    "attn.indexer.compressor": _gate(5e-2, 8e-2, E2M1),
    "attn.indexer.score": _gate(2e-2, 4e-2, E2M1),
    "attn.core": _gate(8e-3, 2e-2, E4M3),
    "attn.o": _gate(8e-3, 2e-2, E4M3),
    "attn.wo_a": _gate(8e-3, 2e-2, E4M3),
    "attn.out": _gate(1e-2, 2e-2, E4M3),
    "ffn.norm": _gate(4e-3, 1e-2, BF16),
    "ffn.gate": _gate(4e-3, 1e-2, BF16),
    "ffn.weights": _gate(4e-3, 1e-2, BF16),
    "ffn.routed": _gate(1e-2, 2e-2, E4M3),
    "ffn.shared_experts": _gate(1e-2, 2e-2, E4M3),
    "ffn.out": _gate(1e-2, 2e-2, E4M3),
    "hc_head": _gate(4e-3, 1e-2, BF16),
    "norm": _gate(4e-3, 1e-2, BF16),
    "logits": _gate(4e-3, 1e-2, BF16),
    "mhc.sums": _gate(1e-5, 1e-5, "sums of n FP32 numbers near 1"),
    "residual": _gate(4e-3, 1e-2, BF16),
}


@dataclass(frozen=True)
class Operation:
    """One row for a kernel judged alone: its tolerance, and the part of the stack it is."""

    gate: Gate
    component: str


def _operation(eps: float, why: str, component: str) -> Operation:
    return Operation(Gate(eps, eps, why), component)


OPERATIONS: dict[str, Operation] = {
    "token_positions": _operation(0.0, "integers", "batching"),
    "embed": _operation(0.0, "a copy", "checkpoint loading"),
    "rms_norm": _operation(4e-3, BF16, "norm"),
    "rope": _operation(4e-3, BF16, "rope"),
    "act_quant": _operation(0.0, "a rounding", "experts quant"),
    "linear_fp8": _operation(4e-3, BF16, "attention projections"),
    "linear_bf16": _operation(4e-3, BF16, "attention projections"),
    "gate_scores": _operation(1e-5, FP32, "MoE router"),
    "gate_choose": _operation(0.0, "a choice", "MoE router"),
    "gate_weights": _operation(1e-5, FP32, "MoE router"),
    "experts_up": _operation(4e-3, BF16, "experts quant"),
    "experts_down": _operation(4e-3, BF16, "experts quant"),
    "swiglu": _operation(4e-3, BF16, "experts quant"),
    "moe_combine": _operation(4e-3, BF16, "experts quant"),
    "shared_experts": _operation(1e-2, E4M3, "experts quant"),
    "moe": _operation(1e-2, E4M3, "experts quant"),
    "hadamard_e2m1": _operation(0.0, "a rounding", "indexer"),
    "store_window": _operation(0.0, "a rounding and a copy", "KV quant"),
    "store_entries": _operation(0.0, "a rounding and a copy", "KV quant"),
    "store_index_keys": _operation(0.0, "a rounding and a copy", "KV quant"),
    "compressor": _operation(4e-3, BF16, "compressor"),
    "indexer_score": _operation(1e-5, FP32, "indexer"),
    "topk": _operation(0.0, "a choice", "indexer"),
    "sparse_attn": _operation(4e-3, BF16, "attention core"),
    "hc_pre": _operation(1e-5, FP32, "mHC"),
    "hc_a": _operation(4e-3, BF16, "mHC"),
    "hc_post": _operation(4e-3, BF16, "mHC"),
    "hc_head": _operation(4e-3, BF16, "mHC"),
}


@dataclass(frozen=True)
class Judgement:
    """What a gate says of one number: the arithmetic is here and nowhere else."""

    state: State
    limit: float
    spent: float
    reason: str = ""


def judge(value: float, floor: float, eps: float, k: float = K, rows: int = 1, what: str = "worst row rel-L2") -> Judgement:
    """Pass if value <= k * floor + eps. NaN fails; no rows, no floor or a limit above MAX_LIMIT is not run."""
    limit = k * floor + eps
    spent = value / limit if limit > 0 else (0.0 if value == 0 else math.inf)
    if rows < 1:
        return Judgement(State.NOT_RUN, limit, spent, "nothing was compared")
    if not math.isfinite(limit):
        return Judgement(State.NOT_RUN, limit, spent, "no noise floor: the twins gave no finite error")
    if limit > MAX_LIMIT:
        return Judgement(State.NOT_RUN, limit, spent, f"limit {limit:.3g} is above {MAX_LIMIT}: the noise floor {floor:.3g} is too high to judge")
    if value <= limit:
        return Judgement(State.PASS, limit, spent)
    return Judgement(State.FAIL, limit, spent, f"{what} {value:.3g} > {limit:.3g} ({k:g} x floor {floor:.2g} + {eps:.2g}), {100 * spent:.0f} % of limit")


def judge_exact(different: int, compared: int, what: str) -> Judgement:
    """Pass if nothing differs; nothing compared is not run."""
    if compared < 1:
        return Judgement(State.NOT_RUN, 0.0, 0.0, "nothing was compared")
    if different == 0:
        return Judgement(State.PASS, 0.0, 0.0)
    return Judgement(State.FAIL, 0.0, math.inf, f"{different} of {compared} {what}")
