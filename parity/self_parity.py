"""Production alone, run in every way that must not matter: from its runs (probes/core/selfparity.py) to verdicts.

Ways with the same kernels must be equal bit by bit. Decode sums in another order than prefill, so it is judged like any
production against another: `k * floor + eps`, floor from the audit's twins, prefill's choices replayed. Isolated: one layer on
the streams that prefill handed it. Free: the whole chain. Tests: parity/unit/test_selfparity.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parity import gates
from parity.attribution import REPLAYED
from parity.audit import Audit, Floor
from parity.evaluate import judge_values
from parity.gates import GATES
from parity.stored import component_of_part, judge_part, row_of_table
from probes.core.compare import differing, selection_margin
from probes.core.queries import Difference, Rows, Stored, observer_costs
from probes.core.records import Measurement, State, Verdict
from probes.core.rows import score_unit
from probes.core.selfparity import SAID, WAYS, SelfParity, Way, table_of, text_of
from probes.core.trace import grow_last
from probes.core.wording import plural
from reference.points import INDICES, LAYER_POINTS, SCORES, spec_of

MAX_CONTEXT = 1024  # of the states: batches of rows need memory for it
# What is judged of a layer in the free-running chain; isolated: every point.
FREE_POINTS = ("attn.kv", "attn.compressor", "attn.indexer.compressor", "attn.out", "hc_ffn.X")
MODEL_POINTS = ("hc_head", "norm", "logits")
# The audit's own text may end before a layer finishes its first entry, where the longer text here has some: then the floor of
# what is normed, rotated and rounded likewise in every run, and for scores that of the queries that they are made of.
INSTEAD = {"attn.compressor": "attn.kv", "attn.indexer.compressor": "attn.indexer.q", "attn.indexer.score": "attn.indexer.q"}
EQUAL = "the same kernels on the same numbers give the same bits"


def floor_of(audit: Audit, mode: str, layer: int | None, name: str) -> tuple[Floor, str]:
    """The noise floor of a point (`attn.kv`, or of the model), or of another point of its kind where it has none; said for a limit's `why`."""
    at = "" if layer is None else f"layers.{layer}."
    floor = audit.floor(mode, at + name)
    if floor.rows or name not in INSTEAD:
        return floor, ""
    return replace(audit.floor(mode, at + INSTEAD[name]), unit=0.0), f"; floor of {INSTEAD[name]}: the audit's text shows no {name} in this layer"


# ---- what is asked ----


@dataclass(frozen=True)
class SelfCase:
    """One comparison. kind  way (name says which; equal bits) | decode | seen | stored (decode beside prefill)."""

    phase: str
    kind: str
    name: str = ""
    layer: int | None = None
    mode: str = "isolated"

    @property
    def id(self) -> str:
        if self.kind == "way":
            return f"{self.phase}-{self.name or self.kind}"
        layer = "logits" if self.layer is None else f"L{self.layer}"
        return f"{self.phase}-{self.kind}-{layer}" + ("" if self.kind == "seen" else f"-{self.mode}")

    @property
    def said(self) -> str:
        """For people."""
        chain = "this layer alone" if self.mode == "isolated" else "whole chain"
        return {
            "decode": f"one shot = token by token, {'logits' if self.layer is None else chain}",
            "seen": "one position in prefill = in decode: keys and choices",
            "stored": f"state of a prefill = state of a prefill and steps, {chain}",
        }.get(self.kind) or SAID[self.phase, self.name]


def cases(phases: Sequence[str], layers: Sequence[int]) -> list[SelfCase]:
    """Every comparison that the asked phases and layers mean."""
    found = [SelfCase(phase, "way", name) for phase in phases for name in WAYS[phase]]
    if "decode" in phases:
        for layer in layers:
            found += [SelfCase("decode", kind, "", layer, mode) for kind in ("decode", "stored") for mode in ("isolated", "free")]
            found.append(SelfCase("decode", "seen", "", layer))
        found.append(SelfCase("decode", "decode", "", None, "free"))
    return found


def judge(audit: Audit, runs: SelfParity, case: SelfCase) -> Verdict:
    """The verdict of one comparison."""
    if case.kind == "way":
        return judge_way(audit, runs, case.phase, case.name)
    if case.kind == "decode":
        return judge_decode(audit, runs, case.layer, case.mode)
    assert case.layer is not None
    return judge_seen(audit, runs, case.layer) if case.kind == "seen" else judge_stored(audit, runs, case.layer, case.mode)


def measurements_of(runs: SelfParity, case: SelfCase, verdict: Verdict) -> list[Measurement]:
    """The comparison's line of the report's table; for the observed ones also what observing costs."""
    if case.kind == "way" and verdict.details:
        return way_measurement(runs, case.phase, case.name)
    return [verdict_measurement(verdict, case.said)]


def runs_of(audit: Audit) -> SelfParity:
    """Production on the audit's own text, a short one repeated; nothing is run yet. The same runs for everybody who asks."""
    if "self parity" not in audit.memo:
        plan = audit.plan
        context = min(plan.max_context, MAX_CONTEXT)
        text = text_of([ids for row in zip(plan.rows, plan.continuation, strict=True) for ids in row])
        audit.memo["self parity"] = SelfParity(audit.production, text[:context], context)
    runs: SelfParity = audit.memo["self parity"]
    return runs


def _judged(audit: Audit, base: Verdict, floors: bool, judge: Callable[[], Verdict]) -> Verdict:
    """A production that stopped before is not run; one that stops here fails."""
    if floors:
        audit.ensure(base.phase or "prefill")
    if audit.crash is not None:
        return replace(base, reason=f"production stopped in {audit.crash.phase}: {audit.crash.message}")
    try:
        return judge()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return replace(base, state=State.FAIL, reason=f"production stopped: {type(error).__name__}: {lines[0][:300]}")


# ---- equal bits ----


def component_of(difference: Difference) -> str:
    """The part of the stack that made the first different value."""
    if ".state." in difference.what:
        return component_of_part(difference.what.split(".state.", 1)[1])
    spec = spec_of(difference.what)
    # A window key that cannot be read back is NaN: its slot holds another token.
    unread = spec.name == "attn.kv" and any(value is not None and math.isnan(value) for value in (difference.got, difference.want))
    return "SWA ring" if difference.window or unread else spec.component


def judge_way(audit: Audit, runs: SelfParity, phase: str, name: str) -> Verdict:
    """One way against another: every point, logits and stored row bit by bit."""
    base = Verdict(f"self.{name}", f"self.{name}", "model", State.NOT_RUN, "rows whose bits differ", phase=phase, why=EQUAL)
    return _judged(audit, base, False, lambda: verdict_of(base, runs.way(phase, name)))


def judge_replayed(audit: Audit, runs: SelfParity, batch: int) -> tuple[Verdict, Way | None]:
    """Steps replayed from a captured graph against the same steps launched one by one: every point, logits and stored row bit by bit."""
    base = Verdict(REPLAYED, f"{REPLAYED}[batch {batch}]", "model", State.NOT_RUN, "rows whose bits differ", phase="decode", component="graph capture", why=EQUAL)
    ways: list[Way] = []

    def judge() -> Verdict:
        ways.append(way := runs.replayed(batch))
        verdict = verdict_of(base, way)
        at = way.graph.get("captured_at")
        if verdict.state is State.PASS and not way.graph.get("elsewhere"):
            return replace(verdict, state=State.NOT_RUN, reason=f"the graph was replayed at its captured length {at} only")
        return replace(verdict, component="graph capture", details={**verdict.details, "graph": way.graph})

    verdict = _judged(audit, base, False, judge)
    return verdict, ways[0] if ways else None


def verdict_of(base: Verdict, way: Way) -> Verdict:
    """The verdict on a way: the first difference in dataflow order is named."""
    rows = sum(d.rows for d in way.differences)
    different = sum(d.different for d in way.differences)
    missing = [d.what for d in way.differences if d.missing]
    details: dict[str, Any] = {"comparison": way.said, "queries": way.queries, "state_rows": way.states}
    if way.skipped:
        details["not_exercised"] = way.skipped[:24]
    judgement = gates.judge_exact(different, rows if way.queries else 0, f"rows differ: {way.said}")
    first = next((d for d in way.differences if d.different), None)
    if first is None:
        if missing and judgement.state is State.PASS:
            return replace(base, reason=f"tap {missing[0]} did not fire in both runs", details=details)
        return replace(base, state=judgement.state, reason=judgement.reason, value=0.0, limit=0.0, spent=judgement.spent, rows=rows, details=details)
    details["different"] = dict([(d.what, d.different) for d in way.differences if d.different][:24])
    where = [first.batch_row or 0, first.position or 0]
    reason = (
        f"{judgement.reason}; first {first.what} at row {where[0]}, position {where[1]}: {first.got:.6g} against {first.want:.6g}, "
        f"{first.different} of {first.rows} rows, worst row off by {first.worst:.3g}"
    )
    return replace(
        base, state=State.FAIL, reason=reason, point=first.what, layer=first.layer, component=component_of(first), value=float(different), limit=0.0, spent=math.inf,
        where=where, got=first.got, want=first.want, rows=rows, details=details,
    )  # fmt: skip


# ---- decode beside prefill ----


def _valid(rows: Rows) -> Tensor:
    return torch.ones(1, len(rows.position), dtype=torch.bool)


def _worst_of(base: Verdict, found: Sequence[Verdict], rows: Rows) -> Verdict:
    """One verdict for many points: the first that fails, else the first not run, else the one nearest to its limit."""
    if not found:
        return replace(base, reason="nothing was compared")
    chosen = next((v for v in found if v.state is State.FAIL), next((v for v in found if v.state is State.NOT_RUN), None))
    if chosen is None:
        chosen = max(found, key=lambda v: v.spent if v.spent is not None and not math.isnan(v.spent) else 0.0)
    where = [int(rows.row[chosen.where[1]]), int(rows.position[chosen.where[1]])] if len(chosen.where) > 1 and chosen.where[1] < len(rows.row) else chosen.where
    details = {"worst_point": chosen.point, "points": len(found), "bit_equal": all(v.value == 0.0 for v in found), "failed": [v.point for v in found if v.state is State.FAIL][:24], "median": chosen.details.get("median")}
    reason = f"{chosen.point} at row {where[0]}, position {where[1]}: {chosen.reason}" if chosen.state is State.FAIL and len(where) > 1 else chosen.reason
    return replace(chosen, gate=base.gate, mode="model", where=where, details={**base.details, **details}, reason=reason, local=base.local)


def judge_decode(audit: Audit, runs: SelfParity, layer: int | None, mode: str) -> Verdict:
    """Token by token against one shot: a layer alone (isolated), a layer in the chain (free), or what the chain ends in (layer None)."""
    point = f"layers.{layer}.hc_ffn.X" if layer is not None else "logits"
    base = Verdict("self.decode", point, "model", State.NOT_RUN, "worst row rel-L2, decode against prefill", layer=layer, phase="decode", component=spec_of(point).component, local=mode == "isolated" or None, details={"chain": mode})

    def judge() -> Verdict:
        assert layer is not None or mode == "free"
        got, want = runs.decoded_alone(layer) if mode == "isolated" and layer is not None else runs.decoded()
        names = [f"layers.{layer}.{s.name}" for s in LAYER_POINTS if s.kind != INDICES and (mode == "isolated" or s.name in FREE_POINTS)] if layer is not None else list(MODEL_POINTS)
        return _worst_of(base, [_judge_point(audit, base, name, mode, got, want) for name in names if name in runs.points], got)

    return _judged(audit, base, True, judge)


def _judge_point(audit: Audit, base: Verdict, name: str, mode: str, got: Rows, want: Rows) -> Verdict:
    spec = spec_of(name)
    one = replace(base, point=name, component=spec.component, metric="worst row rel-L2, decode against prefill")
    if name not in got.values or name not in want.values:
        return replace(one, reason=f"tap {name} did not fire at every step")
    g, w = got.values[name], want.values[name]
    if spec.kind == SCORES:  # before the first entry there is nothing to score: both must say so
        g, w = (grow_last(value, max(1, value.shape[-1]), -math.inf) for value in (g, w))
    floor, instead = floor_of(audit, mode, base.layer, spec.name)
    if instead and spec.kind == SCORES:
        floor.unit = score_unit(w)
    verdict = judge_values(one, spec, GATES[spec.name], mode, g, w, _valid(got), floor)
    return replace(verdict, why=verdict.why + instead)


def judge_seen(audit: Audit, runs: SelfParity, layer: int) -> Verdict:
    """Decode and prefill of one position see the same keys, choose the same entries and experts up to near-ties."""
    point = f"layers.{layer}.attn.visible"
    base = Verdict("self.visible", point, "model", State.NOT_RUN, "queries that see or choose otherwise", layer=layer, phase="decode", component="visibility mask", local=True, why="which keys a query sees is exact; a choice may differ where prefill's scores are closer than twice what their gate lets them be off")

    def judge() -> Verdict:
        got, want = runs.decoded_alone(layer)
        if any(point not in rows.values for rows in (got, want)):
            return replace(base, reason=f"tap {point} did not fire at every step")
        W, wrong, near, queries = audit.config.sliding_window, [], 0, len(got.position)
        for name, part, component in (("window positions", slice(0, W), "SWA ring"), ("compressed entries", slice(W, None), "visibility mask")):
            differs = differing(got.values[point][..., part], want.values[point][..., part])[0]
            wrong.append((point, name, differs, component))
        for end, scores, noise in _choice_scores(audit, runs, layer, want):
            at = f"layers.{layer}.{end}"
            differs = differing(got.values[at], want.values[at])[0]
            margin = selection_margin(got.values[at], want.values[at], scores)[0]
            beyond = differs & ~(margin <= 2 * noise)
            near += int((differs & ~beyond).sum())
            wrong.append((at, "choices beyond a near-tie", beyond, spec_of(at).component))
        different = sum(int(mask.sum()) for _, _, mask, _ in wrong)
        judgement = gates.judge_exact(different, queries * len(wrong), "sets differ between decode and prefill of one position")
        first = next(((at, name, mask, component) for at, name, mask, component in wrong if bool(mask.any())), None)
        if first is None:
            return replace(base, state=judgement.state, reason=judgement.reason, value=0.0, limit=0.0, spent=judgement.spent, rows=queries * len(wrong), near_ties=near)
        at, name, mask, component = first
        index = int(mask.nonzero()[0, 0])
        have, due = ({int(i) for i in rows.values[at][0, index] if i >= 0} for rows in (got, want))
        reason = f"{judgement.reason}; first {at}, {name}, at row {int(got.row[index])}, position {int(got.position[index])}: decode lacks {sorted(due - have)[:8]}, has also {sorted(have - due)[:8]}"
        return replace(
            base, state=State.FAIL, reason=reason, point=at, component=component, value=float(different), limit=0.0, spent=math.inf,
            rows=queries * len(wrong), near_ties=near, where=[int(got.row[index]), int(got.position[index])],
        )  # fmt: skip

    return _judged(audit, base, True, judge)


def _choice_scores(audit: Audit, runs: SelfParity, layer: int, want: Rows) -> list[tuple[str, Tensor, float]]:
    """(point, what prefill chose by, how far it may be off) of the layer's choices; a hash table has no scores to err."""
    found = []
    score = f"layers.{layer}.attn.indexer.score"
    if score in runs.points:
        scores = want.values[score]
        found.append(("attn.selected", grow_last(scores, max(1, scores.shape[-1]), -math.inf), _noise(audit, score, score_unit(scores))))
    gate = f"layers.{layer}.ffn.gate"
    scores = want.values[gate].double()
    noise = 0.0 if audit.config.is_hash(layer) else _noise(audit, gate, float(scores.abs().median()))
    found.append(("ffn.experts", scores + audit.reference.router_bias(layer).double(), noise))
    return found


def _noise(audit: Audit, point: str, typical: float) -> float:
    """How far a score may be off by its own gate: twins that agree bit for bit are no witness of 0. typical  the size of one score."""
    gate, floor = GATES[spec_of(point).name], audit.floor("isolated", point)
    return gate.k("isolated") * floor.absolute + gate.eps("isolated") * typical


# ---- what is stored ----


def judge_stored(audit: Audit, runs: SelfParity, layer: int, mode: str) -> Verdict:
    """The state after decode steps against the state after a prefill of as many tokens.

    Rows that no step wrote are what they were, bit by bit; rows that the steps wrote are near.
    """
    base = Verdict("self.stored", f"layers.{layer}.state", "model", State.NOT_RUN, "worst stored row rel-L2, decode against prefill", layer=layer, phase="decode", component="KV quant", local=mode == "isolated" or None, details={"chain": mode})
    return _judged(audit, base, True, lambda: verdict_of_stored(audit, base, runs.stored(layer, alone=mode == "isolated"), layer, mode))


def verdict_of_stored(audit: Audit, base: Verdict, parts: Sequence[Stored], layer: int, mode: str) -> Verdict:
    old, found = sum(part.old for part in parts), []
    for part in parts:
        one = replace(base, point=f"layers.{layer}.state.{part.part}")
        floor, instead = floor_of(audit, mode, layer, row_of_table(part.part)[1])
        judged = judge_part(one, part, mode, floor)[:1]  # where old rows have changed, the written ones say no more
        found += [replace(verdict, why=verdict.why + instead) for verdict in judged]
    if not found:
        return replace(base, reason="no step stored anything")
    nowhere = Rows({}, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    chosen = _worst_of(base, found, nowhere)
    return replace(chosen, rows=chosen.rows + old, details={**chosen.details, "old_rows": old, "written_rows": sum(part.got.shape[1] for part in parts)})


# ---- for the report ----


def way_measurement(runs: SelfParity, phase: str, name: str) -> list[Measurement]:
    """The table line of a way; for the observed ones also what observing costs."""
    way = runs.way(phase, name)
    line = dict(table_of([way])[0])
    values = {
        "comparison": line["comparison"], "compared": f"{plural(line['points'], 'point')} of {plural(line['queries'], 'query', 'queries')}, {plural(line['state_rows'], 'stored row')}, bit by bit",
        "bit_equal": line["bit_equal"], "nearest_to_its_limit": "", "worst_row": line["worst_row"], "floor": 0.0, "limit": 0.0, "first_difference": line["first_difference"], "not_exercised": line["skipped"],
    }  # fmt: skip
    found = [Measurement("self_parity", phase=phase, values=values)]
    if way.seconds:
        total = {"point": "all together", "taps": len(runs.points), "seconds_with_taps": way.seconds["with taps"], "seconds_without": way.seconds["without taps"]}
        if phase == "prefill":
            log = runs.whole_log
            total |= {"bytes": sum(log.bytes.values()), "copy_seconds": sum(log.seconds.values())}
        found.append(Measurement("observer", phase=phase, values=total))
        if phase == "prefill":
            found += [Measurement("observer", phase=phase, values={"point": c["point"], "taps": c["taps"], "bytes": c["bytes"], "copy_seconds": c["seconds"]}) for c in observer_costs(runs.whole_log)]
    return found


def verdict_measurement(verdict: Verdict, comparison: str) -> Measurement:
    """The table line of a judged comparison."""
    values = {
        "comparison": comparison, "compared": f"{verdict.rows} rows, {verdict.metric}", "bit_equal": bool(verdict.details.get("bit_equal", verdict.value == 0.0)) and verdict.state is State.PASS, "nearest_to_its_limit": verdict.point,
        "worst_row": verdict.value, "floor": verdict.floor, "limit": verdict.limit, "first_difference": verdict.point if verdict.state is State.FAIL else None, "not_exercised": verdict.reason if verdict.state is State.NOT_RUN else "",
    }  # fmt: skip
    return Measurement("self_parity", layer=verdict.layer, phase=verdict.phase, values=values)
