"""Recall of production's selection in one audit: over the run itself, and on long and adversarial key sets.

The same-format oracle (reference, FP32 or FP64 sums) is judged, at 99.7 % of every query's entries, near-ties counting as
chosen; the exact oracle (nothing rounded) is reported: what is lost against it is the price of the format. Queries that have no
more entries than they may choose lose nothing: where the run has no others, the gate is not exercised and gives no verdict.
Measuring: probes/core/recall.py, probes/recall.py. Tests: parity/unit/test_recall.py.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import reference
from parity import gates
from parity.audit import Audit
from parity.gates import GATES, OPERATIONS
from probes.core.recall import Case, Material, Recall, make_case, material_of, measure_case, random_material, recall
from probes.core.records import Measurement, State, Verdict
from probes.core.trace import Trace
from probes.recall import SIDES, csa_layers, queries, select
from production.launch import Device
from production.weights import inv_freq
from reference.points import spec_of

FREE_EXACT = ("prefill",)  # phases in which the reference without rounding is run


def judge(base: Verdict, found: Recall, rows: int) -> Verdict:
    """The gate: no query may lose more than 0.3 % of its entries beyond near-ties, nor take one that it may not."""
    gate = GATES["recall"]
    judgement = gates.judge(found.lost, 0.0, gate.isolated, k=0.0, rows=rows, what="share of entries lost by the worst query")
    reason = judgement.reason
    if found.not_allowed or found.incomplete:
        reason = f"{found.not_allowed} entries chosen that are not complete, do not exist or stand twice; {found.incomplete} queries left out complete ones"
    return replace(
        base, state=judgement.state, reason=reason, value=found.lost, limit=judgement.limit, spent=judgement.spent, floor=0.0, k=0.0,
        eps=gate.isolated, rows=rows, near_ties=found.near_ties, why=gate.why, details=found.values(),
    )  # fmt: skip


def _values(kind: str, same: Recall, exact: Recall | None, **facts: Any) -> dict[str, Any]:
    """One line of the report's table: the same-format oracle, then the exact one."""
    shown = ("mean", "p1", "worst", "mass_lost")
    values: dict[str, Any] = {"set": kind, **facts, "queries": same.queries, "discarding": same.discarding}
    values |= {name: getattr(same, name) for name in shown}
    values |= {"near_ties": same.near_ties, "beyond": same.beyond, "not_allowed": same.not_allowed}
    return values | {f"exact_{name}": None if exact is None else getattr(exact, name) for name in shown}


# ---- over the run ----


class ExactRun:
    """One prefill by the reference without any rounding, on its own choices: the exact oracle, and material for key sets."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self.layers = csa_layers(audit.config, audit.plan.layers)
        self._trace: Trace | None = None

    def trace(self) -> Trace:
        """Its indexer's points, in prefill."""
        if self._trace is None:
            audit, plan = self.audit, self.audit.plan

            def make() -> Any:
                with contextlib.redirect_stderr(io.StringIO()):
                    return reference.load(plan.checkpoint_dir, policy="exact", layers=range(max(self.layers) + 1), max_context=plan.max_context)

            points = [f"layers.{layer}.attn.{name}" for layer in self.layers for name in (*SIDES, "indexer.score")]
            self._trace = audit.chain(f"exact, layers up to {max(self.layers)}", points, make).prefill(audit.tokens, audit.lengths)
        return self._trace

    def material(self) -> list[tuple[Material, Tensor]]:
        """Queries and keys of every judged CSA layer with its rotary frequencies; random ones where the run has none."""
        audit, found = self.audit, []
        for layer in self.layers:
            q, weights, keys = (self.trace().get(f"layers.{layer}.attn.{name}", "prefill") for name in SIDES)
            if not keys[audit.prefill_valid].isnan().all():
                freq, position = inv_freq(audit.config, layer), audit.positions("prefill", None)
                found.append((material_of(q, weights, keys, position, audit.prefill_valid, freq, f"layer {layer}"), freq))
        if not found:
            c = audit.config
            with_ratio = [n for n in range(c.num_hidden_layers) if c.ratio(n)]
            found = [(random_material(c.index_n_heads, c.index_head_dim, seed=0), inv_freq(c, (with_ratio or [0])[0]))]
        return found


@dataclass(frozen=True)
class RunRecall:
    """Recall over one layer and phase. isolated: on the reference's own input; free: production's own chain."""

    isolated: Recall
    free: Recall
    exact: Recall | None
    rows: int


def near_tie_noise(audit: Audit, mode: str, point: str) -> float:
    """How far a score may be off by its own gate: entries whose scores are closer are near-ties. What a row may be off by is a
    share of its size, so per score a share of the typical one; twins that agree bit for bit are no witness of 0."""
    gate, floor = GATES[spec_of(point).name], audit.floor(mode, point)
    return gate.k(mode) * floor.absolute + gate.eps(mode) * floor.unit


def over_the_run(audit: Audit, exact: ExactRun, layer: int, phase: str) -> RunRecall | None:
    """Entries that production chose (CSA), or that attention read (HCA: every complete one is due). None: a tap is missing."""
    audit.ensure(phase)
    span = None if phase == "prefill" else (0, audit.plan.steps - 1)
    expected = 1 if span is None else audit.plan.steps
    chooses = audit.config.kind(layer) == "csa"
    at = f"layers.{layer}.attn"
    point, score = (f"{at}.selected", f"{at}.indexer.score") if chooses else (f"{at}.visible", f"{at}.visible")
    if any(audit.fired(who, name, phase, span) < expected for who, name in (("isolated", point), ("production", point), ("reference", score))):
        return None
    valid, position = audit.valid_over(phase, span), audit.positions(phase, span)
    isolated, free = audit.values("isolated", point, phase, span), audit.values("production", point, phase, span)
    if not chooses:
        W, ratio = audit.config.sliding_window, audit.config.ratio(layer)
        complete = (position + 1) // ratio
        columns = torch.arange(max(1, int(complete.max())))
        due = torch.zeros(*position.shape, len(columns)).masked_fill(columns >= complete[..., None], -torch.inf)
        found = [recall(*queries(side[..., W:], due, valid), len(columns), 0.0) for side in (isolated, free)]
        return RunRecall(found[0], found[1], None, int(valid.sum()))
    k, want = audit.config.index_topk, audit.values("reference", score, phase, span)
    same = [
        recall(*queries(side, want, valid), k, near_tie_noise(audit, mode, score)) for side, mode in ((isolated, "isolated"), (free, "free"))
    ]
    no_format = None
    if phase in FREE_EXACT:
        no_format = recall(*queries(free, exact.trace().get(score, phase), valid), k, 0.0)
    return RunRecall(same[0], same[1], no_format, int(valid.sum()))


def judge_run(audit: Audit, exact: ExactRun, layer: int, phase: str) -> tuple[Verdict | None, list[Measurement]]:
    """Recall of one layer over one phase, on the reference's own input: the indexer's own loss.

    No verdict where nothing was lost and nothing could be: no query of a CSA layer had more entries than it may choose, no query of
    an HCA layer had one. What a query may never choose is red all the same.
    """
    name = "selected" if audit.config.kind(layer) == "csa" else "visible"
    point = f"layers.{layer}.attn.{name}"
    base = Verdict("recall", point, "model", State.NOT_RUN, "1 - recall@k, worst query", layer=layer, phase=phase, component="indexer" if name == "selected" else "visibility mask", local=True)
    found = over_the_run(audit, exact, layer, phase)
    if found is None:
        crash = audit.crash
        return replace(base, reason=f"production stopped in {crash.phase}: {crash.message}" if crash is not None else f"tap {point} did not fire in every pass"), []
    chooses = name == "selected"
    counted = found.isolated.discarding if chooses else found.isolated.queries
    if not found.isolated.discarding:
        base = replace(base, metric="every complete entry is due")
    lost = found.isolated.lost > 0
    verdict = judge(base, found.isolated, found.rows if lost else counted) if counted or lost else None
    if not chooses:
        return verdict, []
    verdict = verdict and replace(verdict, details={**verdict.details, "noise": near_tie_noise(audit, "isolated", f"layers.{layer}.attn.indexer.score")})
    k = audit.config.index_topk
    return verdict, [
        Measurement("recall", layer=layer, phase=phase, point=point, values=_values("the run, isolated", found.isolated, None, keys=None, k=k)),
        Measurement("recall", layer=layer, phase=phase, point=point, values=_values("the run, free", found.free, found.exact, keys=None, k=k)),
    ]


# ---- on key sets ----


def judge_set(device: Device, case: Case, frequencies: Tensor, test_id: str = "") -> tuple[list[Verdict], Measurement]:
    """Production's kernels on one key set: the recall of the selection, and the typical error of the scores behind it."""
    base = Verdict("recall", f"recall[{case.name}]", "operation", State.NOT_RUN, "1 - recall@k, worst query", component="indexer", local=True, test_id=test_id)
    made = select(device, case, frequencies)
    same, exact, facts = measure_case(case, frequencies, made)
    values = _values(case.kind, same, exact, source=case.source, keys=len(case.keys), k=case.k) | facts
    row = OPERATIONS["indexer_score"].gate
    value, floor, eps = facts["score_typical"], facts["noise_typical"], row.isolated
    judgement = gates.judge(value, floor, eps, rows=len(case.q), what="typical (median) score error")
    scores = replace(
        base, gate="recall.score", point=f"recall.score[{case.name}]", metric="median score error over the largest score", state=judgement.state, reason=judgement.reason,
        value=value, limit=judgement.limit, spent=judgement.spent, floor=floor, k=row.k("isolated"), eps=eps, rows=len(case.q), why=row.why,
    )  # fmt: skip
    return [judge(base, same, len(case.q)), scores], Measurement("recall", point="recall", values=values)


def case_of(kind: str, material: Material, device: str, small: tuple[int, int, int]) -> Case:
    """small: (keys, k, queries) on the CPU; a GPU takes 262,144 keys, k = 1024 and 4 queries of every set."""
    keys, k, count = (262_144, 1024, 4) if device == "cuda" else small
    return make_case(kind, material, keys, k, count)
