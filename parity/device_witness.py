"""A third witness: the same kernels on the CPU device, beside a GPU's.

The audit's isolated layers run once more, on the CPU device, on the very same input, state and replayed choices: the prefill
and the first STEPS decode steps. The plan of kernel variants is the GPU's, weights and code are the same, and mma there is an
H200's bit for bit (`mma_sum="tensor_core"`), so only expf, logf, rsqrtf and the like may differ, by 1 to 3 units in the last
place. What differs by more is the compiler, the memory or a race on the card; what agrees, and still is not the reference's,
is the kernel's own arithmetic (parity/attribution.py says so).

    audit.beside = Beside.load(checkpoint_dir, audit.production, max_context, layers)     # before audit.ensure
    judge(audit, case, test_id)                                                           # case.mode "device"

Where the GPU runs a kernel that the CPU device does not, sums may stand in another order: from that point of the layer on the
limits are those of the reference, and the verdict and the report name the kernels. Limits: gates.DEVICE.
Tests: parity/unit/test_device_witness.py.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity import gates, selection
from parity.audit import Audit, ReferencePass, launches_of
from parity.evaluate import judge_choice, judge_values, judge_visible, with_step
from parity.gates import DEVICE, GATES, K_DEVICE, Gate, typical_of_device
from parity.selection import DEVICE_MODE, Case
from probes.core.recorder import Recorder
from probes.core.records import Coverage, Measurement, State, Verdict
from probes.core.rows import absent_rows, least_size, row_errors
from probes.core.trace import PassKey, grow_last
from reference.config import ModelConfig
from reference.points import INDICES, LAYER_POINTS, SCORES, PointSpec, layer_of, points_of_layer, spec_of

WHO = "device"  # the name of its passes in Audit.passes
STEPS = 8  # decode steps that are compared; a prompt of 250 tokens crosses 256 in them
Name = tuple[str, str]  # source, kernel


@dataclass
class Beside:
    """Production on another device, and what it ran.

    model     None: it could not be loaded; problem says why, also where it stopped later
    made      phase -> point -> kernels that it launched since the point before, over all judged layers
    there     phase -> kernels that the audited production launched in the same passes; empty: its launches are not counted
    """

    model: Any
    problem: str = ""
    seconds: dict[str, float] = field(default_factory=lambda: {"prefill": 0.0, "decode": 0.0})
    made: dict[str, dict[str, set[Name]]] = field(default_factory=dict)
    there: dict[str, set[Name]] = field(default_factory=dict)
    _state: Any = None

    @classmethod
    def load(cls, checkpoint_dir: Path | str, beside: Any, max_context: int, layers: range, **options: Any) -> Beside:
        """The same plan on the CPU device; options as those of production.load. Never raises: a witness that is missing is told."""
        import production

        try:
            plan = {"variants": beside.plan.name, "p_bf16": beside.plan.p_bf16}
            how = {"device": "cpu", "mma_sum": "tensor_core", "fast_tiles": False, "prefill_chunk": beside.prefill_chunk} | plan | options
            return cls(production.load(checkpoint_dir, max_context=max_context, layers=layers, **how))
        except Exception as error:
            return cls(None, _words("the CPU device was not loaded", error))

    def run(self, audit: Audit, one: ReferencePass, before: Mapping[int, Mapping[str, Tensor]], there: Counter[Name]) -> None:
        """The layers of one pass. before  their state; there  what the audited production has just launched for the same."""
        if self.model is None or self.problem or (one.step or 0) >= STEPS:
            return
        began = time.perf_counter()
        self.there.setdefault(one.phase, set()).update(there)
        try:
            self._layers(audit, one, before)
        except Exception as error:
            self.problem = _words(f"the CPU device stopped in {one.phase}" + ("" if one.step is None else f" step {one.step}"), error)
        self.seconds[one.phase] += time.perf_counter() - began
        if one.phase == "prefill":
            audit.say(f"prefill: the same layers on the CPU device: {self.seconds['prefill']:.1f} s" + (f"; {self.problem}" if self.problem else ""))

    def _layers(self, audit: Audit, one: ReferencePass, before: Mapping[int, Mapping[str, Tensor]]) -> None:
        if self._state is None:
            self._state = self.model.new_state(audit.batch, audit.plan.max_context)
        made, seen = self.made.setdefault(one.phase, {}), launches_of(self.model)

        def shown(point: str, _: Tensor) -> None:
            nonlocal seen
            now = launches_of(self.model)
            made.setdefault(point, set()).update(now - seen)
            seen = now

        with Recorder(self.model, audit.isolated_points) as trace, self.model.taps.observe(audit.isolated_points, shown):
            trace.begin(one.phase, one.step)
            for layer in audit.plan.layers:
                self._state.import_layer(layer, before[layer])
                X = audit.layer_input(layer, one.phase, one.step)
                self.model.run_layer(layer, X, one.tokens, self._state, one.lengths, choices=one.choices_of(layer), decode=one.phase == "decode")
        audit.passes[WHO, one.phase, one.step] = trace  # only a whole pass is there

    def others(self, audit: Audit, phase: str, point: str) -> list[str]:
        """Kernels behind a point of a layer, or before it in the layer, that the audited production did not run."""
        layer = layer_of(point)
        assert layer is not None
        there = self.there.get(phase) or set(launches_of(audit.production))
        points = points_of_layer(audit.config, layer)
        made = [self.made.get(phase, {}).get(p, set()) for p in points[: points.index(point) + 1]]
        return sorted(f"{source}.{kernel}" for source, kernel in set().union(*made) - there)


def _words(what: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{what}: {type(error).__name__}: {lines[0][:300]}"


# ---- what is asked ----


def steps_of(steps: int) -> int:
    return min(steps, STEPS)


def cases(config: ModelConfig, layers: Sequence[int], phases: Sequence[str], steps: int) -> list[Case]:
    """Every point of every judged layer, in prefill and over the first decode steps."""
    found = selection.layer_cases(config, layers, phases, steps_of(steps))
    return [replace(case, mode=DEVICE_MODE) for case in found if case.mode == "isolated"]


def coverage(audit: Audit) -> list[Coverage]:
    """Cells of the witness; nothing where it was not asked for."""
    if audit.beside is None:
        return []
    found = []
    for phase in audit.plan.phases:
        span = _span(audit, phase)
        expected = 1 if span is None else span[1] + 1
        for point in audit.isolated_points:
            observed = audit.fired(WHO, point, phase, span)
            due = observed if audit.stopped and observed < expected else expected  # as for the other modes: an early end asked for no more
            if due:
                found.append(Coverage(phase, layer_of(point), point, DEVICE_MODE, due, observed))
    return found


def _span(audit: Audit, phase: str) -> tuple[int, int] | None:
    return None if phase == "prefill" else (0, steps_of(audit.plan.steps) - 1)


# ---- judging ----


def judge(audit: Audit, case: Case, test_id: str) -> Verdict:
    """One point: the isolated layer of production against the same layer on the CPU device."""
    spec = spec_of(case.point)
    first, last = case.steps or (None, None)
    base = Verdict(
        f"device.{spec.name}", case.point, DEVICE_MODE, State.NOT_RUN, "worst row rel-L2 to the CPU device", layer=case.layer, phase=case.phase, step_first=first, step_last=last,
        component=spec.component, local=True, test_id=test_id,
    )  # fmt: skip
    beside: Beside | None = audit.beside
    if beside is None:
        return replace(base, reason="production runs on the CPU device itself: there is no other to compare with")
    audit.ensure(case.phase)
    if case.steps is not None:
        case = replace(case, steps=audit.reached(WHO, case.point, case.steps))
    expected = 1 if case.steps is None else case.steps[1] - case.steps[0] + 1
    for side in ("isolated", WHO):
        fired = audit.fired(side, case.point, case.phase, case.steps)
        if fired < expected:
            reason = f"production stopped in {audit.crash.phase}: {audit.crash.message}" if audit.crash is not None else beside.problem
            return replace(base, reason=audit.stopped or reason or f"tap fired {fired} of {expected} times in {side}")
    others = beside.others(audit, case.phase, case.point)
    got, want = (audit.values(who, case.point, case.phase, case.steps) for who in ("isolated", WHO))
    valid = audit.valid_over(case.phase, case.steps)
    verdict = _judge_choices(audit, case, base, got, want, valid) if spec.kind == INDICES else _judge_values(audit, case, base, spec, got, want, valid, bool(others))
    if others:
        said = f"the GPU does not run {', '.join(others)}: sums may stand in another order, and the limits are the reference's"
        verdict = replace(verdict, why=f"{verdict.why}; {said}", details={**verdict.details, "kernels_not_on_the_gpu": others})
    return with_step(verdict, case)


def _judge_values(audit: Audit, case: Case, base: Verdict, spec: PointSpec, got: Tensor, want: Tensor, valid: Tensor, others: bool) -> Verdict:
    """Worst and typical row as everywhere, on the floor of the reference's twins; and the share of elements that differ in a bit."""
    row, keys_equal = DEVICE[spec.name], _keys_equal(audit, case)
    gate = GATES[spec.name] if others else Gate(row.worst, row.worst, typical_of_device(spec.name, keys_equal), row.why)
    passes: list[PassKey] = [("prefill", None)] if case.steps is None else [("decode", step) for step in range(case.steps[0], case.steps[1] + 1)]
    floor = audit.floor("isolated", case.point)
    verdict = judge_values(base, spec, gate, "isolated", got, want, valid, floor, passes, k=None if others else K_DEVICE)
    share, tokens = differing(spec, got, want, valid)
    details = {**verdict.details, "equal_bits": 1.0 - share, "tokens": tokens, "stored_keys_equal": keys_equal}
    verdict = replace(verdict, details=details)
    if others or row.differing is None or tokens < gates.TYPICAL_ROWS or verdict.state is State.NOT_RUN:
        return verdict
    judged = gates.judge(share, 0.0, row.differing, 1.0, tokens, "share of elements that differ in a bit")
    numbers = [*verdict.numbers, *gates.numbers_of(("elements that differ in a bit", share, judged))]
    numbers.sort(key=lambda n: math.inf if math.isnan(n["spent"]) else n["spent"], reverse=True)
    if judged.state is State.FAIL and verdict.state is State.PASS:
        verdict = replace(verdict, state=State.FAIL, reason=judged.reason)
    spent = max(verdict.spent or 0.0, judged.spent)
    return replace(verdict, numbers=numbers, spent=spent)


KEYS = ("attn.kv", "attn.compressor", "attn.indexer.compressor")  # what a pass stores for later queries, too


def _keys_equal(audit: Audit, case: Case) -> bool:
    """Whether the keys that these passes stored in this layer are equal in every bit; older ones are, as both got the same state."""
    assert case.layer is not None
    points = [f"layers.{case.layer}.{name}" for name in KEYS if f"layers.{case.layer}.{name}" in audit.isolated_points]
    name = ("device keys", case.layer, case.phase, case.steps)
    if name not in audit.memo:
        sides = [[audit.values(who, p, case.phase, case.steps) for who in ("isolated", WHO)] for p in points]
        audit.memo[name] = all(differing(spec_of(p), got, want, audit.valid_over(case.phase, case.steps))[0] == 0.0 for p, (got, want) in zip(points, sides, strict=True))
    return bool(audit.memo[name])


def differing(spec: PointSpec, got: Tensor, want: Tensor, valid: Tensor) -> tuple[float, int]:
    """Share of the elements of real tokens that are not equal in every bit, and how many tokens have elements. NaN equals NaN."""
    if spec.kind == SCORES:
        width = max(got.shape[-1], want.shape[-1])
        got, want = grow_last(got, width, -math.inf), grow_last(want, width, -math.inf)
    if got.shape != want.shape:
        return 1.0, int(valid.sum())
    there = ~(want.isneginf() & got.isneginf()) if spec.kind == SCORES else ~(want.isnan() & got.isnan())
    there &= valid.reshape(*valid.shape, *[1] * (want.dim() - 2))
    if spec.kind != SCORES:
        there &= ~(absent_rows(want, spec.row_dims) & absent_rows(got, spec.row_dims)).reshape(*want.shape[: want.dim() - spec.row_dims], *[1] * spec.row_dims)
    unequal = (got.float().contiguous().view(torch.int32) != want.float().contiguous().view(torch.int32)) & there
    count = int(there.sum())
    return (float(unequal.sum()) / count if count else 0.0), int(there.flatten(2).any(-1).sum())


def _judge_choices(audit: Audit, case: Case, base: Verdict, got: Tensor, want: Tensor, valid: Tensor) -> Verdict:
    """Sets, against the CPU device's: exact for the keys seen and for hashed experts, else up to near-ties of its own scores."""
    name = spec_of(case.point).name
    if name == "attn.visible":
        return judge_visible(audit, case, base, got, want, valid)
    assert case.layer is not None
    if name == "attn.selected":
        point = case.point.replace("selected", "indexer.score")
        scores, own = (audit.values(who, point, case.phase, case.steps).double() for who in (WHO, "isolated"))
        if scores.shape[-1] == 0:
            scores = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        due = scores.isfinite().sum(-1).clamp(max=audit.config.index_topk)
        what = "entries"
    else:
        point, what = case.point.replace("experts", "gate"), "experts"
        scores, own = (audit.values(who, point, case.phase, case.steps).double() for who in (WHO, "isolated"))
        if audit.config.is_hash(case.layer):
            scores = torch.full_like(scores, -math.inf).scatter_(-1, want.clamp_min(0), 0.0)  # the table is the law: nothing else is allowed
        else:
            scores, own = (x + audit.reference.router_bias(case.layer).double() for x in (scores, own))
        due = torch.full(valid.shape, audit.config.num_experts_per_tok)
    hashed = what == "experts" and audit.config.is_hash(case.layer)
    noise = 0.0 if hashed else audit.floor("isolated", point).absolute
    verdict = judge_choice(audit, base, got, want, scores, valid, noise, what, due, None if hashed else own)
    return replace(verdict, why="a choice may differ only where the CPU device's scores are closer than twice the twins' worst score error, or where the GPU's own scores, which have a gate of their own, say so")


# ---- for the report ----


def measurements(audit: Audit) -> list[Measurement]:
    """Per phase: what ran on both sides, and per kind of point the worst and the typical row and the share of equal elements."""
    beside: Beside | None = audit.beside
    if beside is None:
        return []
    found = [Measurement("device.kernels", phase=phase, values=_kernels(audit, beside, phase)) for phase in audit.plan.phases]
    for phase in audit.plan.phases:
        span = _span(audit, phase)
        expected = 1 if span is None else span[1] + 1
        for spec in LAYER_POINTS:
            points = [p for p in audit.isolated_points if spec_of(p).name == spec.name and all(audit.fired(w, p, phase, span) == expected for w in ("isolated", WHO))]
            if points:
                found.append(Measurement("device.points", phase=phase, values={"of": spec.name, **_compared(audit, spec, points, phase, span)}))
    return found


def _kernels(audit: Audit, beside: Beside, phase: str) -> dict[str, Any]:
    here: set[Name] = set().union(*beside.made.get(phase, {}).values())
    there = beside.there.get(phase) or set()
    names = [[f"{source}.{kernel}" for source, kernel in sorted(side)] for side in (there - here, here - there if there else set())]
    first = next((spec.name for spec in LAYER_POINTS for p in audit.isolated_points if spec_of(p).name == spec.name and beside.others(audit, phase, p)), "")
    model = beside.model
    return {
        "plan": audit.production.plan.name if hasattr(audit.production, "plan") else "", "plan_beside": model.plan.name if model is not None else "", "kernels": len(here),
        "only_gpu": ", ".join(names[0]), "only_cpu": ", ".join(names[1]), "other_from": first, "steps": 0 if phase == "prefill" else steps_of(audit.plan.steps),
        "seconds": round(beside.seconds[phase], 1), "problem": beside.problem,
    }  # fmt: skip


def _compared(audit: Audit, spec: PointSpec, points: Sequence[str], phase: str, span: tuple[int, int] | None) -> dict[str, Any]:
    worst, typical, layer, equal, total = 0.0, 0.0, None, 0.0, 0
    for point in points:
        got, want = (audit.values(who, point, phase, span) for who in ("isolated", WHO))
        valid = audit.valid_over(phase, span)
        if spec.kind == INDICES:
            width = max(got.shape[-1], want.shape[-1])
            same = (grow_last(got, width, -1).sort(-1).values == grow_last(want, width, -1).sort(-1).values).all(-1)
            error, share, count = (~same)[valid].double(), 1.0 - float(same[valid].double().mean()), int(valid.sum())
        else:
            rows = _errors(audit, spec, point, got, want, valid)
            share, count = differing(spec, got, want, valid)
            error = rows
        if not len(error):
            continue
        if float(error.max()) > worst:
            worst, layer = float(error.max()), layer_of(point)
        typical, equal, total = max(typical, float(error.median())), equal + (1.0 - share) * count, total + count
    return {"worst_row": worst, "in_layer": layer, "typical_row": typical, "equal_bits": equal / total if total else math.nan, "tokens": total}


def _errors(audit: Audit, spec: PointSpec, point: str, got: Tensor, want: Tensor, valid: Tensor) -> Tensor:
    """Row errors of real tokens, flat; scores are compared where the CPU device looks."""
    least = None
    if spec.kind == SCORES:
        width = max(got.shape[-1], want.shape[-1])
        got, want = grow_last(got, width, -math.inf), grow_last(want, width, -math.inf)
        seen = want.isfinite()
        least = least_size(audit.floor("isolated", point).unit, seen)
        got, want = got.masked_fill(~seen, 0.0), want.masked_fill(~seen, 0.0)
    if got.shape != want.shape:
        return torch.full((1,), math.inf, dtype=torch.float64)
    error, _ = row_errors(got, want, spec.row_dims, least)
    use = valid.reshape(*valid.shape, *[1] * (error.dim() - 2)).expand(error.shape) & ~(absent_rows(want, spec.row_dims) & absent_rows(got, spec.row_dims))
    return error[use].nan_to_num(math.inf)
