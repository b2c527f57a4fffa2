"""Discrete choices of one audit: which queries chose otherwise, and what is left when the choice is exchanged.

The audit's reference replays production's choices. Two further runs tell what a different choice is worth: the reference on its
own choices, and production on the reference's (the other way round). Prefill: one more prefill of each. Decode: the first
steps, production from the reference's own state. Tests: parity/unit/test_choices.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.audit import Audit
from parity.evaluate import judge_values
from parity.gates import GATES
from probes.core.choices import choice_difference, error_shares, relative_error
from probes.core.recorder import Recorder
from probes.core.records import Measurement, State, Verdict
from probes.core.trace import PassKey, Trace, join
from reference.points import spec_of

MOST_STEPS = 16  # decode steps of the two further runs


class Exchanged:
    """The two further runs, each phase run when it is first asked for.

    problem   why production gave nothing, in one line; empty when it ran
    """

    def __init__(self, audit: Audit) -> None:
        self.audit = audit
        self.problem = ""
        self.own: dict[PassKey, Trace] = {}
        self.replayed: dict[PassKey, Trace] = {}
        self._chain: Any = None
        outputs = [f"layers.{layer}.hc_ffn.X" for layer in audit.plan.layers]
        self.points = (*outputs, *audit.choice_points)

    def steps(self) -> int:
        return min(self.audit.plan.steps, MOST_STEPS)

    def ensure(self, phase: str) -> None:
        """Run what is missing for this phase; the audit's own runs come first."""
        self.audit.ensure(phase)
        if self.audit.crash is not None or self.problem:
            return
        if ("prefill", None) not in self.own:
            self._own_prefill()
        if phase == "prefill" and ("prefill", None) not in self.replayed:
            self._replayed_prefill()
        if phase == "decode" and ("decode", 0) not in self.own:
            self._decode()

    def _own_prefill(self) -> None:
        audit = self.audit
        self._chain = audit.chain("own choices", self.points, layers=audit.layers_run)
        self.own["prefill", None] = self._chain.prefill(audit.tokens, audit.lengths)

    def _replayed_prefill(self) -> None:
        audit = self.audit
        state = audit.production.new_state(audit.batch, audit.plan.max_context)
        with Recorder(audit.production, self.points) as trace:
            trace.begin("prefill", None)
            try:
                audit.production.prefill(audit.tokens, state, audit.lengths, choices=self._choices("prefill", None))
            except Exception as error:
                self._stopped(error)
                return
        self.replayed["prefill", None] = trace

    def _decode(self) -> None:
        audit = self.audit
        state = audit.production.new_state(audit.batch, audit.plan.max_context)
        try:
            for layer, snapshot in self._chain.after_prefill.items():
                state.import_layer(layer, snapshot)
        except Exception as error:
            self._stopped(error)
            return
        for step in range(self.steps()):
            token = torch.tensor(audit.decode_tokens[step])
            self.own["decode", step] = self._chain.decode(token, step)
            with Recorder(audit.production, self.points) as trace:
                trace.begin("decode", step)
                try:
                    audit.production.decode(token, state, choices=self._choices("decode", step))
                except Exception as error:
                    self._stopped(error)
                    return
            self.replayed["decode", step] = trace

    def _choices(self, phase: str, step: int | None) -> dict[str, Tensor]:
        return {point: self.own[phase, step].get(point, phase, step) for point in self.audit.choice_points}

    def _stopped(self, error: Exception) -> None:
        self.problem = f"production stopped: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"

    def value(self, who: str, point: str, phase: str) -> Tensor | None:
        """A point of `own` or `replayed` over the phase, decode steps along s; None where it is not complete."""
        passes: dict[PassKey, Trace] = getattr(self, who)
        keys: list[PassKey] = [("prefill", None)] if phase == "prefill" else [("decode", s) for s in range(self.steps())]
        if not keys or not all(key in passes and passes[key].fired(point, *key) for key in keys):
            return None
        return join(point, [passes[key].get(point, *key) for key in keys])

    def span(self, phase: str) -> tuple[int, int] | None:
        """First and last step of the values."""
        return None if phase == "prefill" else (0, self.steps() - 1)


def _of_choice(audit: Audit, point: str, score_point: str, phase: str) -> dict[str, Any] | None:
    """One choice over the whole phase: free-running, and on the reference's own input (`_isolated`)."""
    span = None if phase == "prefill" else (0, audit.plan.steps - 1)
    expected = 1 if span is None else audit.plan.steps
    layer = int(point.split(".")[1])
    hashed = point.endswith("experts") and audit.config.is_hash(layer)
    sides = ("production", "isolated", "reference")
    if any(audit.fired(who, point, phase, span) < expected for who in sides) or audit.fired("reference", score_point, phase, span) < expected:
        return None
    want, valid = audit.values("reference", point, phase, span), audit.valid_over(phase, span)
    scores = None if hashed else audit.values("reference", score_point, phase, span)
    if scores is not None and point.endswith("experts"):
        scores = scores + audit.reference.router_bias(layer)
    out: dict[str, Any] = {}
    for who, mode, suffix in (("production", "free", ""), ("isolated", "isolated", "_isolated")):
        noise = 0.0 if hashed else audit.floor(mode, score_point).absolute
        found = choice_difference(audit.values(who, point, phase, span), want, scores, noise, valid)
        out |= {key + suffix: found[key] for key in ("differing", "near_ties", "largest_margin", "noise")}
        out["queries"] = found["queries"]
    return out


def measure(exchanged: Exchanged, layer: int, phase: str) -> Measurement | None:
    """Flips and margins of one layer's choices, and the share of the error at its output that goes away with them."""
    audit = exchanged.audit
    exchanged.ensure(phase)
    at = f"layers.{layer}"
    values: dict[str, Any] = {}
    for name, point, score in (("entries", "attn.selected", "attn.indexer.score"), ("experts", "ffn.experts", "ffn.gate")):
        if f"{at}.{point}" in audit.choice_points:
            found = _of_choice(audit, f"{at}.{point}", f"{at}.{score}", phase)
            if found is None:
                return None
            values |= {f"{name}_{key}": value for key, value in found.items()}
    output, span = f"{at}.hc_ffn.X", exchanged.span(phase)
    own, other = exchanged.value("own", output, phase), exchanged.value("replayed", output, phase)
    if own is None:
        return None
    valid = audit.valid_over(phase, span)
    values |= error_shares(audit.values("production", output, phase, span), own, audit.values("reference", output, phase, span), valid)
    values["error_other_way"] = math.nan if other is None else relative_error(other, own, valid)
    values["output_queries"] = int(valid.sum())
    return Measurement("choices", layer=layer, phase=phase, point=output, values=values)


def judge_exchanged(exchanged: Exchanged, layer: int, phase: str) -> Verdict:
    """Production on the reference's choices against the reference on them: what remains is arithmetic, within the free limit."""
    audit, point, gate = exchanged.audit, f"layers.{layer}.hc_ffn.X", GATES["hc_ffn.X"]
    exchanged.ensure(phase)
    span = exchanged.span(phase)
    base = Verdict(
        "choices.exchanged", point, "model", State.NOT_RUN, "worst row rel-L2", layer=layer, phase=phase, component=spec_of(point).component,
        step_first=None if span is None else span[0], step_last=None if span is None else span[1],
        why="as hc_ffn.X in the free-running chain, the other way round: production takes the reference's choices",
    )  # fmt: skip
    if audit.crash is not None:
        return replace(base, reason=f"production stopped in {audit.crash.phase}: {audit.crash.message}")
    if exchanged.problem:
        return replace(base, state=State.FAIL, reason=exchanged.problem)
    got, want = exchanged.value("replayed", point, phase), exchanged.value("own", point, phase)
    if got is None or want is None:
        return replace(base, reason=f"tap {point} did not fire in every pass")
    passes: list[PassKey] = [("prefill", None)] if span is None else [("decode", step) for step in range(exchanged.steps())]
    verdict = judge_values(base, spec_of(point), gate, "free", got, want, audit.valid_over(phase, span), audit.floor("free", point), passes)
    return replace(verdict, why=base.why)
