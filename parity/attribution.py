"""Where it starts, and what it points at: from a run's verdicts to one line.

    first_divergence(records, points)    the failed gate that comes first, with its cause class

Where. In the models' chain the order is phase, decode step, dataflow, isolated before free. Only where the whole chain is
green a gate that has no place in it is named: a parameter, a single operation, production against itself, memory.

Why. A point is made by several operations. What else is red tells which of them: the parameters as they were loaded, a state
that does not come back, the operations that make the point, judged alone, in the order in which they run. Cause classes are
the components of the fault catalogue; `because` holds the evidence.

Pure functions of records; no tensors. Tests: parity/unit/test_attribution.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parity import selection
from parity.gates import OPERATIONS
from probes.core.records import Divergence, Record, State, Verdict
from reference.points import spec_of, state_order

WHOLE_PHASE = 1 << 30  # stands for the step of a gate that judges all of decode at once

# The operations (rows of gates.OPERATIONS) that make a point out of the points before it, as they run.
_PROJECTED = ("act_quant", "linear_fp8")
_ROTATED = ("token_positions", "rope_frequencies", "rope")
MADE_BY: dict[str, tuple[str, ...]] = {
    "embed": ("token_positions", "embed"),
    **{f"hc_{half}.{name}": ("hc_pre",) for half in ("attn", "ffn") for name in ("pre", "post", "comb")},
    **{f"hc_{half}.a": ("hc_a",) for half in ("attn", "ffn")},
    **{f"hc_{half}.X": ("hc_post",) for half in ("attn", "ffn")},
    "attn.norm": ("rms_norm",),
    "attn.q_norm": (*_PROJECTED, "rms_norm"),
    "attn.q": (*_PROJECTED, "rms_norm", *_ROTATED),
    "attn.kv": (*_PROJECTED, "rms_norm", *_ROTATED, "store_window"),
    "attn.compressor": ("linear_fp32", "compressor", "rms_norm", "rope_frequencies", "rope", "store_entries"),
    "attn.indexer.q": ("linear_fp8", *_ROTATED, "hadamard_e2m1"),
    "attn.indexer.weights": ("linear_bf16",),
    "attn.indexer.compressor": ("linear_fp32", "compressor", "rms_norm", "rope_frequencies", "rope", "store_index_keys"),
    "attn.indexer.score": ("token_positions", "indexer_score"),
    "attn.selected": ("topk",),
    "attn.visible": ("token_positions", "sparse_attn"),
    "attn.core": ("sparse_attn",),
    "attn.o": _ROTATED,
    "attn.wo_a": ("linear_fp8",),
    "attn.out": _PROJECTED,
    "ffn.norm": ("rms_norm",),
    "ffn.gate": ("linear_fp32", "gate_scores"),
    "ffn.experts": ("gate_choose",),
    "ffn.weights": ("gate_weights",),
    "ffn.routed": ("act_quant", "experts_up", "swiglu", "experts_down", "moe_combine"),
    "ffn.shared_experts": (*_PROJECTED, "swiglu", "shared_experts"),
    "ffn.out": ("moe_combine",),
    "hc_head": ("hc_head",),
    "norm": ("rms_norm",),
    "logits": ("linear_bf16",),
}
# These serve several parts of the stack: red, they say that the point's own part is wrong.
SHARED = frozenset({"linear_bf16", "linear_fp32", "sparse_attn"})
# The catalogue files index keys with the indexer, not with the KV cache.
FILED = {"store_index_keys": "indexer"}
# Formats that two rooms share: both red is one cause, filed under the catalogue's component for it.
FORMATS = (
    (("act_quant", "store_window"), "KV quant", "the e4m3 encoder"),
    (("hadamard_e2m1", "store_index_keys"), "experts quant", "the e2m1 encoder"),
    (("linear_fp8", "sparse_attn"), "experts quant", "the e4m3 decoder"),
)
# Where only rotary dims are off: what turns them, then what stores them.
TURNS = ("token_positions", "rope_frequencies", "rope", "store_window", "store_entries")
# Whole runs of a small model, judged alone: they see what operations did together, after the operations themselves.
COMPOSED = ("load", "restore", "stored", "chunking", "checked", "rope", "memory")
# Judged by what must follow from production's own values at the point: wrong there, whatever came in.
WITNESSED = ("core.witness", "sink.sum", "visible.rule")
COPIES = "ranks.copies"  # two ranks hold other bits of one tensor: nothing else that is red at that point says more
SAID_OF_LOGITS = ("logprobs.scale", "logprobs.sum", "logprobs.offset")  # gates that know what was done to all rows alike; the likeliest first
SETUP = "setup of the tests"  # the point of a failure of pytest or of a plugin: nothing was compared that could diverge
IN_COMPANY = "alone = in a batch"  # in the point of a check that runs a token with others and alone
REPLAYED = "self.replayed"  # the gate of steps replayed from a graph beside the same steps launched one by one
ONLY_REPLAYED = "right launch by launch, wrong when replayed from the graph"
# Where a fault of one batch row shows that no operation alone shows: whose row is read.
ROWS_MIXED = ("embed", "attn.visible", "attn.core", "logits")

Key = tuple[int, int, int, int]


# ---- where ----


def step_of(verdict: Verdict) -> int | None:
    """The first decode step at which a gate is over its limit; None: a prefill, or it judges the whole phase at once."""
    step = verdict.details.get("first_step")
    if step is not None:
        return int(step)
    return verdict.step_first if verdict.step_first == verdict.step_last else None


def place(verdict: Verdict, order: dict[str, int]) -> Key | None:
    """Where a gate stands in the chain: phase, step, dataflow, mode. None: nowhere. order  point -> its place in the dataflow."""
    if verdict.mode not in selection.CHAIN_MODES or verdict.phase is None or verdict.point not in order:
        return None
    step = step_of(verdict)
    if verdict.phase == "prefill" or verdict.details.get("left_by") == "prefill":
        when = -1  # what the prefill handed over precedes the first step
    else:
        when = WHOLE_PHASE if step is None else step
    return (selection.PHASES.index(verdict.phase), when, order[verdict.point], selection.CHAIN_MODES.index(verdict.mode))


def first_divergence(records: Sequence[Record], points: Sequence[str], loaded: bool = True) -> Divergence | None:
    """The failed gate that comes first, and its cause class.

    points  every point of the run in dataflow order, stored state after the point that writes it
    loaded  False: production never ran, and nothing was compared that could diverge
    """
    order = {point: i for i, point in enumerate(points)}
    verdicts = [record for record in records if isinstance(record, Verdict)]
    failed = _from_their_first_step([v for v in verdicts if v.state is State.FAIL], verdicts)
    placed = [(key, v) for v in failed if (key := place(v, order)) is not None]
    if placed:
        key, first = min(placed, key=lambda entry: entry[0])
        if first.gate == COPIES:
            local = True if first.details.get("agrees") else None
        else:
            local = True if first.mode in ("isolated", selection.DEVICE_MODE) or first.gate in WITNESSED else _local(verdicts, first, points)
        step = key[1] if 0 <= key[1] < WHOLE_PHASE else 0 if first.details.get("left_by") == "prefill" and first.phase == "decode" else None
        component, because = cause(first, failed)
        leads, beside, its = said_by_the_policy(first, failed, order)
        component = its or component
        because = "; ".join(filter(None, [leads, because, beside, said_by_the_other_device(first, verdicts)]))
        return Divergence(first.layer, first.point, first.phase, step, local, component, because=because)
    others = [v for v in failed if place(v, order) is None and v.point != SETUP]
    if others and loaded:
        first = min(others, key=lambda v: _rank(v, order))
        component, because = cause(first, failed)
        return Divergence(first.layer, first.point, first.phase, first.step_first, first.local, component, because=because)
    return None


OTHERWISE_THERE = "the same kernel gives other numbers on the GPU than on the CPU device: the compiler, the order of memory accesses, a race, or a branch for one of them"
SAME_THERE = "the CPU device gives the GPU's numbers: it is in the kernel's own arithmetic, its weights or its arguments"


WRONG_POLICY = "the declared policy is not what it does: "
DECLARED_POLICY = "declared policy"  # the component, where a rounding of the whole model is declared wrongly


def said_by_the_policy(first: Verdict, failed: Sequence[Verdict], order: dict[str, int]) -> tuple[str, str, str]:
    """Declared roundings that are not done, and others that are: (what stands first, what stands beside, the component or empty).

    They stand first where one of them is off throughout and shows at or before the first divergence: the reference rounds where
    production does not, and whatever comes behind differs by it. Off at some points only, it is one more thing to know.
    """
    red = [v for v in failed if v.gate == "policy" and v.details.get("because")]
    said = "; ".join(v.details["because"] for v in sorted(red, key=lambda v: v.component != "model"))
    leading = [v for v in red if v.details.get("throughout") and any(order[point] <= order[first.point] for point in order if _name_of(point) in v.details.get("points", ()))]
    if not leading:
        return "", said and f"the policy: {said}", ""
    whole = any(v.component == "model" for v in leading)
    return WRONG_POLICY + said, "", DECLARED_POLICY if whole else leading[0].component


def said_by_the_other_device(first: Verdict, verdicts: Sequence[Verdict]) -> str:
    """What the same layer on the CPU device says of a layer's first divergence; empty where it did not run there."""
    if first.layer is None or first.mode not in ("isolated", selection.DEVICE_MODE):
        return ""
    step = step_of(first)
    there = [
        v for v in verdicts
        if v.mode == selection.DEVICE_MODE and (v.point, v.phase) == (first.point, first.phase)
        and (first.phase == "prefill" or (step is not None and (v.step_first or 0) <= step <= (v.step_last or 0)))
    ]  # fmt: skip
    if any(v.state is State.FAIL for v in there):
        return OTHERWISE_THERE
    return SAME_THERE if any(v.state is State.PASS for v in there) else ""


def _from_their_first_step(failed: list[Verdict], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """A typical row needs many: decode step 0, judged by itself, has too few for it. Where only the typical row of the steps behind it
    is red and step 0 is over that limit as well, it starts there."""
    alone = {(v.point, v.mode, v.gate): v for v in verdicts if v.phase == "decode" and (v.step_first, v.step_last) == (0, 0)}

    def begins(verdict: Verdict) -> Verdict:
        before, limit = alone.get((verdict.point, verdict.mode, verdict.gate)), verdict.details.get("median_limit")
        within = verdict.value is not None and verdict.limit is not None and verdict.value <= verdict.limit
        if verdict.phase != "decode" or verdict.step_first != 1 or before is None or before.value is None or limit is None or not within:
            return verdict
        return replace(verdict, details={**verdict.details, "first_step": 0}) if before.value > limit else verdict

    return [begins(verdict) for verdict in failed]


def _local(verdicts: Sequence[Verdict], first: Verdict, points: Sequence[str]) -> bool | None:
    """Whether a red gate of the chain starts where it is. Green on the right input: no. Where nothing was run on that input: only if
    the point before it is green, or there is none; else it cannot be told."""
    where = (first.point, first.phase, first.step_first)
    if any(v.state is State.PASS and v.mode == "isolated" and (v.point, v.phase, v.step_first) == where for v in verdicts):
        return False
    if any(v.mode == "isolated" and (v.point, v.phase) == where[:2] and v.state is not State.NOT_RUN for v in verdicts):
        return True
    at = list(points).index(first.point)
    if at == 0:
        return True
    before = (points[at - 1], first.phase, first.step_first)
    return True if any(v.state is State.PASS and v.mode == "free" and (v.point, v.phase, v.step_first) == before for v in verdicts) else None


def _rank(verdict: Verdict, order: dict[str, int]) -> tuple[int, int, int]:
    """Outside of the chain: parameters, operations as they run in a model, production against itself, whole small models, memory."""
    kind, _, name = verdict.gate.partition(".")
    if kind == "load":
        return (0, 0, 0)
    if kind == "operation" and name in OPERATIONS:
        return (1, list(OPERATIONS).index(name), 0)
    if kind == "operation" and name in COMPOSED:
        return (2, COMPOSED.index(name), 0)
    if kind == "self":
        return (3, selection.PHASES.index(verdict.phase) if verdict.phase in selection.PHASES else 0, order.get(verdict.point, len(order)))
    if kind in ("memory", "widths"):
        return (5, 0, 0)
    return (4, 0, 0)


# ---- why ----


def cause(first: Verdict, failed: Sequence[Verdict]) -> tuple[str, str]:
    """The cause class of the first failed gate and the evidence for it, from everything else that failed."""
    own = first.component
    copies = next((v for v in failed if v.gate == COPIES and (v.point, v.phase) == (first.point, first.phase)), None)
    if copies is not None:
        return own, copies.details.get("because", "")
    graph = next((v for v in failed if v.gate == REPLAYED), None)
    if graph is not None and first.phase == "decode":
        return "graph capture", f"{ONLY_REPLAYED}: {graph.reason}"
    parameters = [v for v in failed if v.gate == "load" and _feeds(v, first)]
    if parameters:
        v = parameters[0]
        return v.component or own, f"{v.point.removeprefix('load.')} is not what the checkpoint stores"
    red = {v.gate.removeprefix("operation."): v for v in reversed(failed) if v.gate.startswith("operation.")}
    company = next((v for v in failed if v.gate == "operation.sparse_attn" and IN_COMPANY in v.point), None)
    if company is not None:
        red["sparse_attn"] = company  # of its red checks the one that tells most
    part = first.point.partition(".state.")[2]
    if part and part != "length" and "restore" in red and f".{part}" in red["restore"].reason:
        return red["restore"].component or own, f"a state that is exported and imported does not come back: {red['restore'].reason}"
    if first.gate.startswith("operation."):
        return _of_operation(first.gate.removeprefix("operation."), own, red)
    name = _name_of(first.point)
    if name is None:
        return own, first.details.get("because", "")
    made_by = [op for op in MADE_BY.get(name, ()) if op in red]
    if "sparse_attn" in made_by and _in_company(red):
        return "batching", "operation sparse_attn alone: a token alone differs from the same token in a batch"
    # The gate itself saw what kind of difference it is, and not only what it is not.
    explained = own != spec_of(first.point).component and not first.details.get("by_exclusion", False)
    if not explained and _only_later_rows(first) and name in ROWS_MIXED:
        return "batching", "only batch rows after the first differ"
    if explained:
        made_by = [op for op in made_by if own == "rope" and op in TURNS]
    if made_by:
        return _of_operation(made_by[0], own, red)
    if name == "logits":
        logits = [v for gate in SAID_OF_LOGITS for v in failed if v.gate == gate and v.details.get("because")]
        same = [v for v in logits if v.phase == first.phase] or logits
        if same:
            return own, f"{same[0].details['because']} ({same[0].gate})"
    if name == "attn.indexer.compressor":
        return "indexer", "the layer's own entries are right, so it is no part that both compressors share"
    return own, first.details.get("because") or (first.reason if first.gate in WITNESSED else "")


def operations_behind(point: str) -> frozenset[str]:
    """Operations that can be why a point, or a part of a state, is wrong: those that make it, and others with the same format."""
    after = state_order(point)
    name = _name_of(point if after is None else after)
    made_by = set(MADE_BY.get(name or "", ()))
    for pair, _, _ in FORMATS:
        if made_by & set(pair):
            made_by |= set(pair)
    return frozenset(made_by)


def _in_company(red: dict[str, Verdict]) -> bool:
    """Attention of a token depends on the others of its call: judged alone against itself, bit for bit."""
    return "sparse_attn" in red and IN_COMPANY in red["sparse_attn"].point


def _of_operation(op: str, own: str, red: dict[str, Verdict]) -> tuple[str, str]:
    for pair, component, said in FORMATS:
        if op in pair and all(one in red for one in pair):
            if pair[0] == "act_quant" and "linear_fp8" in red:  # what reads weights is wrong, too: no encoder, but the scales
                return "experts quant", "operations act_quant, store_window and linear_fp8 alone are red: their scales"
            return component, f"{said}: operations {' and '.join(pair)} alone are red"
    if op == "sparse_attn" and own == OPERATIONS[op].component and ("batching" in red or _in_company(red)):
        return "batching", f"operation {op} alone is red, and a row alone differs from the same row in a batch"
    if op in OPERATIONS:
        component = own if op in SHARED else FILED.get(op, OPERATIONS[op].component)
        return component, f"operation {op} alone is red"
    return own, red[op].reason if op in red else ""


def _name_of(point: str) -> str | None:
    """`attn.q` of `layers.2.attn.q`; None for what is no point."""
    try:
        return spec_of(point).name
    except ValueError:
        return None


def _feeds(parameters: Verdict, first: Verdict) -> bool:
    """A wrong parameter of the same layer, or of the model itself where the point is the model's."""
    if first.gate == "load":
        return parameters is first
    return parameters.layer == first.layer and "[" not in parameters.point


def _only_later_rows(verdict: Verdict) -> bool:
    rows: list[int] = verdict.details.get("batch_rows", [])
    return bool(rows) and 0 not in rows

