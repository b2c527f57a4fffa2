"""Both models over the same tokens, for probes that look at them side by side. Not a probe itself.

Production runs first; the reference rounds at the points production declares and, unless told otherwise, uses
production's selected entries and experts, so that what differs is arithmetic and not one flipped choice.
Tests: parity/unit/test_probes.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import production
import reference
from probes.core.cli import Ask, CannotMeasureError, say
from probes.core.drive import Run, choice_points, run_model
from probes.core.trace import Trace
from reference.points import points_of_model


@dataclass(frozen=True)
class Pair:
    """Traces of both models over one run, phase by phase. layers_run  all layers that ran."""

    ask: Ask
    policy: tuple[str, ...]
    layers_run: tuple[int, ...]
    production: Trace
    reference: Trace

    def steps(self) -> tuple[int, ...]:
        return self.production.steps()

    def value(self, who: str, point: str, phase: str) -> Any:
        """A point over a phase: the prefill's [b, s, ...], or all decode steps along s. Exit code 3 when it never fired."""
        trace: Trace = getattr(self, who)
        try:
            return trace.get(point, phase) if phase == "prefill" else trace.stack(point)
        except KeyError as error:
            raise CannotMeasureError(f"{who}: {error.args[0]}") from None

    def valid(self, phase: str) -> Any:
        """[b, s] of `value`'s queries; None: all of them."""
        return self.production.passes["prefill", None].valid if phase == "prefill" else None

    def positions(self, phase: str) -> Any:
        """[b, s] absolute positions of `value`'s queries."""
        return self.production.passes["prefill", None].positions if phase == "prefill" else self.production.stacked_positions()

    def facts(self) -> dict[str, Any]:
        return {**self.ask.facts(), "policy": list(self.policy)}


def load_production(ask: Ask) -> Any:
    """Production as asked. Raises InputError, or RuntimeError when a kernel cannot run here."""
    return production.load(ask.checkpoint, device=ask.device, max_context=ask.max_context, layers=ask.layers_run, variants=ask.variants, decoding=ask.decode)


def load_reference(ask: Ask, policy: Any) -> Any:
    """The reference under a policy."""
    return reference.load(ask.checkpoint, policy=policy, max_context=ask.max_context, layers=ask.layers_run)


def run_pair(ask: Ask, points: Sequence[str], replay: bool = True) -> Pair:
    """Run both models and record `points` of both."""
    made = load_production(ask)
    meant = load_reference(ask, made.policy)
    choices = choice_points(points_of_model(ask.config, tuple(made.layers))) if replay else ()
    ran = _timed("production", lambda: run_model(made, ask.prompts, (*points, *choices), ask.steps, ask.max_context))
    wanted = _timed(
        "reference",
        lambda: run_model(meant, ask.prompts, points, ask.steps, ask.max_context, ran.tokens, ran.trace if replay else None),
    )
    return Pair(ask, tuple(sorted(made.policy)), tuple(made.layers), ran.trace, wanted.trace)


def _timed(who: str, call: Any) -> Run:
    started = time.perf_counter()
    run: Run = call()
    say(f"{who}: prefill and {run.tokens.shape[1]} decode steps in {time.perf_counter() - started:.1f} s")
    return run
