"""The tolerance table, and the only place where a number becomes pass or fail.

Every limit is `k * floor + eps`. The floor is measured in the run: the worst row of three own-policy PyTorch twins,
whose sums are reordered, against the reference under the same policy and on the same inputs. `eps` is what three twins
may happen not to show: a rounding that falls the other way (a bf16 step is 2^-8 of an element, an e4m3 step 2^-4, an e2m1
step up to 2^-1), as it reaches that point. No limit is above MAX_LIMIT (a gate of 1.0 would pass zeros): a larger one is
cut to it, and where the twins alone come near that, the gate refuses to judge.

Three numbers must hold: the worst row, the worst norm ratio, and the typical (median) row against the twins' median over
the same queries. Roundings that fall the
other way are rare, so the typical row of an isolated layer is at 1e-3 or below, and a fault that touches every row a
little shows there first. No other file holds a tolerance; changing a row is a commit of its own, with margins before
and after. Measured margins: docs/gates.md. Tests: parity/unit/test_gates.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from probes.core import wording
from probes.core.records import State, Verdict

MAX_LIMIT = 0.3
K_ISOLATED = 3.0
K_FREE = 2.0  # the free-running floor holds what layers hand down, so production lies nearer to it
HEADROOM = 1.25  # a cut limit must still be this far above the floor
TYPICAL_ROWS = 24  # fewer rows have no typical one


@dataclass(frozen=True)
class Gate:
    """One row of the table.

    isolated, free    absolute part of the worst-row and norm-ratio limits: on the reference's own input and state; in
                      the free-running chain, where inputs already differ
    typical           absolute part of the median-row limit, isolated; 0.7 of `free` in the free-running chain, where
                      half of the rows may hold a flipped rounding in one model and none in the twins
    why               which roundings they cover
    """

    isolated: float
    free: float
    typical: float
    why: str

    def eps(self, mode: str) -> float:
        return self.free if mode == "free" else self.isolated

    def typical_eps(self, mode: str) -> float:
        return 0.7 * self.free if mode == "free" else self.typical

    @staticmethod
    def k(mode: str) -> float:
        return K_FREE if mode == "free" else K_ISOLATED


FP32 = "FP32 sums in another order"
BF16 = "a bf16 step of a large element"
FLIPPED = "a bf16 step of a large element, of streams that took e4m3 steps in the attention half"
E4M3 = "an e4m3 step of one element in a row of tens of them"
KEY = E4M3 + "; of a key that most later queries read"
E4M3_ALONE = "an e4m3 step (2^-4 to 2^-3) of the one element that carries the row: expert activations are that sparse"
E2M1 = "e2m1 steps of one or two of index_head_dim elements"

# One row per point (names of reference/points.py), then the derived gates.
HANDED_DOWN = 1.2e-1  # free-running: one such expert step of a layer before
GATES: dict[str, Gate] = {
    "embed": Gate(0.0, 0.0, 0.0, "a copied row: exact"),
    **{f"hc_attn.{name}": Gate(1e-5, HANDED_DOWN, 1e-5, FP32) for name in ("pre", "post", "comb")},
    **{f"hc_ffn.{name}": Gate(2.5e-2, HANDED_DOWN, 2e-3, FP32 + ", of streams that took bf16 steps in the attention half, as large as hc_attn.X; on their own streams: hc.weights") for name in ("pre", "post", "comb")},
    "hc_attn.a": Gate(4e-3, HANDED_DOWN, 1e-3, BF16),
    "hc_attn.X": Gate(2e-2, HANDED_DOWN, 4e-3, FLIPPED),
    "attn.norm": Gate(4e-3, HANDED_DOWN, 1e-3, BF16),
    "attn.q_norm": Gate(2.5e-2, HANDED_DOWN, 1e-3, E4M3),
    "attn.q": Gate(4e-2, HANDED_DOWN, 1e-3, E4M3),
    "attn.kv": Gate(4e-2, HANDED_DOWN, 1e-3, E4M3),
    "attn.compressor": Gate(4e-2, HANDED_DOWN, 1e-3, E4M3),
    "attn.indexer.q": Gate(1.8e-1, 1.8e-1, 2e-3, E2M1),
    "attn.indexer.weights": Gate(8e-3, HANDED_DOWN, 1e-3, BF16),
    "attn.indexer.compressor": Gate(1.8e-1, 1.8e-1, 2e-3, E2M1),
    "attn.indexer.score": Gate(5e-2, HANDED_DOWN, 4e-3, E2M1 + ", in one head"),
    "attn.core": Gate(4e-2, HANDED_DOWN, 3e-3, KEY),
    "attn.o": Gate(4e-2, HANDED_DOWN, 3e-3, KEY),
    "attn.wo_a": Gate(4e-2, HANDED_DOWN, 4e-3, KEY),
    "attn.out": Gate(5e-2, HANDED_DOWN, 6e-3, KEY),
    "hc_ffn.a": Gate(2e-2, HANDED_DOWN, 4e-3, FLIPPED),
    "ffn.norm": Gate(2e-2, HANDED_DOWN, 4e-3, FLIPPED),
    "ffn.gate": Gate(1e-2, HANDED_DOWN, 2e-3, FLIPPED),
    "ffn.weights": Gate(1e-2, HANDED_DOWN, 2e-3, FLIPPED),
    "ffn.routed": Gate(1.2e-1, 1.2e-1, 6e-3, E4M3_ALONE),
    "ffn.shared_experts": Gate(1.2e-1, 1.2e-1, 6e-3, E4M3_ALONE),
    "ffn.out": Gate(1.2e-1, 1.2e-1, 6e-3, E4M3_ALONE),
    "hc_ffn.X": Gate(8e-2, HANDED_DOWN, 5e-3, E4M3_ALONE),
    "hc_head": Gate(4e-3, HANDED_DOWN, 1e-3, BF16),
    "norm": Gate(4e-3, HANDED_DOWN, 1e-3, BF16),
    "logits": Gate(4e-3, HANDED_DOWN, 1e-3, BF16),
    # A server's log-probabilities: rows as a share of their distance from the uniform distribution, slope and offset (nats) of all rows.
    # A model behind --reference: any point of it, in the chain.
    "generic": Gate(1e-4, 1e-4, 1e-4, FP32 + ", through every layer before"),
    "generic.narrow": Gate(3e-2, 3e-2, 3e-2, BF16 + ", through every layer before"),
    "logprobs": Gate(6e-2, 6e-2, 4e-3, "an expert or an entry that flips in the server and in none of the twins"),
    "logprobs.scale": Gate(1e-2, 1e-2, 1e-2, "the chance slope of a few rows"),
    "logprobs.offset": Gate(2e-2, 2e-2, 2e-2, "the chance mean of a few rows"),
    "mhc.sums": Gate(1e-5, 1e-5, 1e-5, "columns are sums of n FP32 numbers normalised last; rows have the limit of comb"),
    "recall": Gate(3e-3, 3e-3, 3e-3, "requirement M1: recall@k of at least 99.7 % against the oracle of the same formats"),
    "residual": Gate(4e-3, HANDED_DOWN, 1e-3, BF16),
    "state.open": Gate(4e-3, HANDED_DOWN, 1e-3, BF16 + " of the layer's normed input, through one linear; floor of attn.norm"),
    "core.witness": Gate(8e-3, 8e-3, 2e-4, "the same keys in FP64, rounded alike: " + BF16 + " that falls the other way"),
    "sink.sum": Gate(5e-3, 5e-3, 2e-4, "the same keys in FP64, rounded alike: " + BF16 + " that falls the other way"),
    "attn.mass": Gate(1e-2, 1e-2, 1e-3, "an e4m3 step of one element of q or of a key, as a share of the softmax"),
    "hc.sums": Gate(4e-3, 4e-3, 2e-4, "the same parts in FP64, rounded alike: " + BF16 + " that falls the other way"),
    "hc.weights": Gate(1e-5, 1e-5, 1e-5, FP32),
    "sinkhorn.iterations": Gate(1e-5, 1e-5, 1e-5, FP32),
    "residual.slope": Gate(4e-3, 2e-2, 1e-3, "the chance slope of a ratio whose steps scatter by the typical row"),
}


# ---- a policy that rounds less than the published one ----

# Every epsilon above is what a rounding may do that three twins happen not to show. A model that has no such rounding has no such
# excuse: its rows are cut to these caps. Measured on transformers' deepseek_v4 in FP32 and BF16: docs/gates.md.
UNROUNDED = Gate(2e-5, 2e-4, 5e-6, FP32)
BF16_ONLY = Gate(1.5e-2, 3e-2, 6e-3, BF16 + "; nothing is rounded to e4m3 or e2m1")


def gate_of(name: str, policy: Collection[str]) -> Gate:
    """The row of the table for a production that rounds at these points (names of reference/formats.py): cut where it rounds less."""
    gate = GATES[name]
    if name == "recall" or any(point.endswith((".e4m3", ".e2m1")) for point in policy):
        return gate
    cap = BF16_ONLY if policy else UNROUNDED
    cut = Gate(min(gate.isolated, cap.isolated), min(gate.free, cap.free), min(gate.typical, cap.typical), gate.why)
    return gate if cut == gate else replace(cut, why=cap.why)


K_DEVICE = 2.0


@dataclass(frozen=True)
class DeviceGate:
    """One row for the same kernel on two devices, on the same input: limits of the worst and the typical row beside K_DEVICE x floor.

    typical     where the keys that the pass stored are equal in every bit, or come later; `typical_of_device` has the other case
    differing   largest share of elements that may differ in a bit, over 24 tokens or more. None: measured, not judged: behind the
                quantised inputs of further linears the share grows with the width of the model
    """

    worst: float
    typical: float
    differing: float | None
    why: str


# Same kernels, same order of sums. Measured with every expf, log1pf, sinf, cosf and rsqrtf moved by up to 2 units in the last place
# (parity/unit/test_device_witness.py): fp32 7e-7; one bf16 or e4m3 rounding that falls the other way makes the worst row, so its
# limit is the reference's without the part that three twins add. The typical row was 0 everywhere, unless a stored key had flipped
# that most later queries read: then it was at most 80 % of the reference's limit, and that one holds from the scores on.
ULPS = "expf, log1pf and rsqrtf of two devices differ by 1 to 3 units in the last place, times logits of about 10"
FLIP = "one rounding that such a unit tips: "
DEVICE: dict[str, DeviceGate] = {
    **{f"hc_attn.{name}": DeviceGate(5e-6, 1e-6, None, ULPS) for name in ("pre", "post", "comb")},
    "hc_attn.a": DeviceGate(4e-3, 5e-5, 2e-3, FLIP + BF16),
    "attn.norm": DeviceGate(4e-3, 5e-5, 2e-3, FLIP + BF16),
    "attn.q_norm": DeviceGate(2.5e-2, 5e-5, 5e-2, FLIP + E4M3),
    "attn.q": DeviceGate(4e-2, 5e-5, 5e-2, FLIP + E4M3),
    "attn.kv": DeviceGate(4e-2, 5e-5, 5e-2, FLIP + E4M3),
    "attn.compressor": DeviceGate(4e-2, 5e-5, 5e-2, FLIP + E4M3),
    "attn.indexer.q": DeviceGate(1.8e-1, 5e-5, 1e-2, FLIP + E2M1),
    "attn.indexer.weights": DeviceGate(8e-3, 5e-5, 2e-2, FLIP + BF16),
    "attn.indexer.compressor": DeviceGate(1.8e-1, 5e-5, 1e-2, FLIP + E2M1),
    "attn.indexer.score": DeviceGate(5e-2, 1e-4, None, FLIP + E2M1 + ", in one head"),
    "attn.core": DeviceGate(4e-2, 1e-4, 8e-2, FLIP + KEY),
    "attn.o": DeviceGate(4e-2, 1e-4, 8e-2, FLIP + KEY),
    "attn.wo_a": DeviceGate(4e-2, 4e-4, None, FLIP + KEY),
    "attn.out": DeviceGate(5e-2, 6e-4, None, FLIP + KEY),
    "hc_attn.X": DeviceGate(2e-2, 4e-4, None, FLIP + FLIPPED),
    **{f"hc_ffn.{name}": DeviceGate(2.5e-2, 5e-6, None, FLIP + FLIPPED) for name in ("pre", "post", "comb")},
    "hc_ffn.a": DeviceGate(2e-2, 4e-4, None, FLIP + FLIPPED),
    "ffn.norm": DeviceGate(2e-2, 4e-4, None, FLIP + FLIPPED),
    "ffn.gate": DeviceGate(1e-2, 2e-4, None, FLIP + FLIPPED),
    "ffn.weights": DeviceGate(1e-2, 2e-4, None, FLIP + FLIPPED),
    "ffn.routed": DeviceGate(1.2e-1, 6e-4, None, FLIP + E4M3_ALONE),
    "ffn.shared_experts": DeviceGate(1.2e-1, 6e-4, None, FLIP + E4M3_ALONE),
    "ffn.out": DeviceGate(1.2e-1, 6e-4, None, FLIP + E4M3_ALONE),
    "hc_ffn.X": DeviceGate(8e-2, 5e-4, None, FLIP + E4M3_ALONE),
}


BEHIND_KEYS = tuple(DEVICE)[tuple(DEVICE).index("attn.indexer.score") :]


def typical_of_device(name: str, keys_equal: bool) -> float:
    """Absolute part of the typical row's limit: the reference's own where a point comes from stored keys of which some differ."""
    return DEVICE[name].typical if keys_equal or name not in BEHIND_KEYS else GATES[name].typical


@dataclass(frozen=True)
class Operation:
    """One row for a kernel judged alone: its tolerance, and the part of the stack it is."""

    gate: Gate
    component: str


def _operation(eps: float, why: str, component: str) -> Operation:
    return Operation(Gate(eps, eps, eps, why), component)


OPERATIONS: dict[str, Operation] = {
    "token_positions": _operation(0.0, "integers", "batching"),
    "embed": _operation(0.0, "a copy", "checkpoint loading"),
    "rms_norm": _operation(4e-3, BF16, "norm"),
    "rope": _operation(4e-3, BF16, "rope"),
    "rope_frequencies": _operation(0.0, "the same FP32 arithmetic", "rope"),
    "act_quant": _operation(0.0, "a rounding", "experts quant"),
    "linear_fp8": _operation(4e-3, BF16, "attention projections"),
    "linear_bf16": _operation(4e-3, BF16, "attention projections"),
    "linear_fp32": _operation(1e-5, FP32, "MoE router"),  # linear_bf16 with an fp32 output: router, compressor, head
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
class Bound:
    """One row for a number that is judged without a noise floor: value <= limit."""

    limit: float
    component: str
    why: str


MEGABYTE = 1e6
BOUNDS: dict[str, Bound] = {
    "load": Bound(0.0, "checkpoint loading", "a parameter is what the checkpoint stores, bit for bit, once"),
    "widths": Bound(0.0, "indexer", "a buffer is as wide as what its first call wrote"),
    "memory.rate": Bound(0.0, "memory", "bytes are integers: every length lies on the line of the closed formula"),
    "memory.footprint": Bound(0.01, "memory", "the closed formula of the published formats, within 1 %"),
    "memory.promise": Bound(15e9, "memory", "a context of 1,048,576 tokens in 15 GB"),
    "memory.reported": Bound(0.0, "memory", "what production says of its own size is what it holds"),
    "memory.allocations": Bound(0.0, "memory", "everything is allocated once, by new_state"),
    "memory.growth": Bound(0.0, "memory", "a state keeps the same bytes at every step"),
    "memory.slope": Bound(50 * MEGABYTE, "memory", "what the process holds, sampled every 10 steps, moves by other things too"),
    "policy.declared": Bound(0.0, "model", "a value that was rounded to a format is on its grid"),
    "policy.undeclared": Bound(0.5, "model", "a value that was not is on it by chance only: 2^-16 of random FP32 values on the bf16 grid, 1/16 of bf16 values on the e4m3 grid"),
    "memory.capacity": Bound(0.0, "memory", "a full state takes its last token, refuses one more by name and keeps what it holds"),
}


@dataclass(frozen=True)
class Judgement:
    """What a gate says of one number: the arithmetic is here and nowhere else."""

    state: State
    limit: float
    spent: float
    reason: str = ""


def judge(value: float, floor: float, eps: float, k: float = K_ISOLATED, rows: int = 1, what: str = "worst row rel-L2") -> Judgement:
    """Pass if value <= k * floor + eps. NaN fails; no rows, no floor, or a floor too near MAX_LIMIT is not run."""
    limit = k * floor + eps
    if rows < 1:
        return Judgement(State.NOT_RUN, limit, math.nan, "nothing was compared")
    if not math.isfinite(limit):
        return Judgement(State.NOT_RUN, limit, math.nan, "no noise floor: the twins gave no finite error")
    limit = min(limit, MAX_LIMIT)
    if limit < HEADROOM * floor:
        return Judgement(State.NOT_RUN, limit, math.nan, f"the noise floor {floor:.3g} is too near the largest allowed limit {MAX_LIMIT} to judge")
    spent = value / limit if limit > 0 else (0.0 if value == 0 else math.inf)
    if value <= limit:
        return Judgement(State.PASS, limit, spent)
    return Judgement(State.FAIL, limit, spent, f"{what} {wording.beyond(value, limit)} ({k:g} x floor {floor:.2g} + {eps:.2g})" + (f", {wording.share(spent)} of limit" if math.isfinite(spent) else ""))


def numbers_of(*judged: tuple[str, float, Judgement]) -> list[dict[str, Any]]:
    """(number, value, judgement) as a verdict's `numbers`: the smallest limit that each would pass, the tightest first."""
    listed = [{"number": name, "smallest_limit": value, "limit": one.limit, "spent": one.spent} for name, value, one in judged]
    return sorted(listed, key=lambda n: math.inf if math.isnan(n["spent"]) else n["spent"], reverse=True)


def with_numbers(verdict: Verdict) -> Verdict:
    """A judged verdict of one number has it in `numbers` too; one that was not run has none."""
    if verdict.state is State.NOT_RUN:
        return replace(verdict, numbers=[])
    if verdict.numbers or verdict.value is None or verdict.limit is None:
        return verdict
    spent = verdict.spent if verdict.spent is not None else math.nan
    return replace(verdict, numbers=numbers_of((verdict.metric, verdict.value, Judgement(verdict.state, verdict.limit, spent))))


def judge_exact(different: int, compared: int, what: str) -> Judgement:
    """Pass if nothing differs; nothing compared is not run."""
    if compared < 1:
        return Judgement(State.NOT_RUN, 0.0, 0.0, "nothing was compared")
    if different == 0:
        return Judgement(State.PASS, 0.0, 0.0)
    return Judgement(State.FAIL, 0.0, math.inf, f"{different} of {compared} {what}")


def judge_bound(name: str, value: float, compared: int, what: str) -> Judgement:
    """Pass if value <= the limit of a row of BOUNDS. NaN fails; nothing compared is not run."""
    limit = BOUNDS[name].limit
    if compared < 1:
        return Judgement(State.NOT_RUN, limit, math.nan, "nothing was compared")
    spent = value / limit if limit > 0 else (0.0 if value == 0 else math.inf)
    if value <= limit:
        return Judgement(State.PASS, limit, spent)
    return Judgement(State.FAIL, limit, spent, f"{what}: {wording.beyond(value, limit, 6)}")
