"""Discrete choices of both models: experts and selected entries that differ, their score margins, and what they cost.

Four runs over the same tokens: production on its own choices; the reference on production's, on its own; production on the
reference's (the other way round). A difference is a near-tie within twice the score noise, which a reordered-sum twin of the
reference on production's choices measures. The share of the squared error at a layer's output that goes away once choices are
replayed is the share of the different sets.

    python -m probes.routing --prompt medium.txt:0:250 --layers 2-4 --steps 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probes.core.choices import choice_difference, error_shares, relative_error
from probes.core.cli import Answer, Ask, CannotMeasureError, Table, answer, ask_of, probe_parser, say
from probes.core.drive import choice_points, run_model
from probes.core.trace import Trace, grow_last
from probes.pair import load_production, load_reference
from reference.points import points_of_model

DESCRIPTION = "Experts and selected entries that differ between the models: margins, near-ties, and their share of the error."
EXAMPLE = "python -m probes.routing --prompt medium.txt:0:250 --layers 2-4 --steps 8"
CHOICES = (("entries", "attn.selected", "attn.indexer.score"), ("experts", "ffn.experts", "ffn.gate"))


def main(argv: Sequence[str] | None = None) -> int:
    return answer("routing", probe_parser("routing", DESCRIPTION, EXAMPLE), argv, _measure)


@dataclass(frozen=True)
class Runs:
    """Traces: production and the reference, each on the choices that its name ends in; router biases by layer."""

    ask: Ask
    production_own: Trace
    reference_production: Trace
    reference_own: Trace
    production_reference: Trace
    twin_production: Trace
    bias: dict[int, Tensor]

    def value(self, who: str, point: str, phase: str) -> Tensor:
        trace: Trace = getattr(self, who)
        try:
            return trace.get(point, phase) if phase == "prefill" else trace.stack(point)
        except KeyError as error:
            raise CannotMeasureError(f"{who}: {error.args[0]}") from None

    def valid(self, phase: str) -> Tensor | None:
        return self.production_own.passes["prefill", None].valid if phase == "prefill" else None


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    runs = _run(ask)
    found = [_choice(runs, layer, phase, *choice) for phase in ask.phases for layer in ask.layers for choice in CHOICES if _has(runs, layer, choice[1])]
    errors = [_error(runs, layer, phase) for phase in ask.phases for layer in ask.layers]
    notes = [
        "margin: the reference's score gap of the worst exchange; near-tie: within 2 x noise; hash: experts come from a table, and no difference is near",
        "own: production against the reference on its own choices; replayed: against the reference on production's; other way: production on the",
        "reference's choices against the reference on its own; share: part of the squared error that is gone with the choices replayed",
    ]
    return Answer([_choice_table(found), _error_table(errors)], {**ask.facts(), "choices": found, "errors": errors}, notes)


def _run(ask: Ask) -> Runs:
    made = load_production(ask)
    meant = load_reference(ask, made.policy)
    choices = choice_points(points_of_model(ask.config, tuple(made.layers)))
    scores = [f"layers.{n}.{score}" for n in ask.layers for _, point, score in CHOICES if f"layers.{n}.{point}" in choices]
    points = [*choices, *(f"layers.{n}.hc_ffn.X" for n in ask.layers), *scores]
    first = run_model(made, ask.prompts, points, ask.steps, ask.max_context)
    say("production ran on its own choices")

    def again(model: Any, replay: Trace | None) -> Trace:
        return run_model(model, ask.prompts, points, ask.steps, ask.max_context, first.tokens, replay).trace

    own = again(meant, None)
    say("reference ran on its own choices")
    return Runs(
        ask, first.trace, again(meant, first.trace), own, again(made, own), again(meant.twin(1), first.trace),
        {n: meant.router_bias(n) for n in ask.layers},
    )  # fmt: skip


def _has(runs: Runs, layer: int, point: str) -> bool:
    return f"layers.{layer}.{point}" in runs.production_own.points


def _noise(runs: Runs, point: str, phase: str) -> float:
    """Worst score error of the twin over valid queries, where the reference looks."""
    got, want = runs.value("twin_production", point, phase), runs.value("reference_production", point, phase)
    width = max(got.shape[-1], want.shape[-1], 1)
    got, want = grow_last(got, width, -torch.inf), grow_last(want, width, -torch.inf)
    seen = want.isfinite() & got.isfinite()
    valid = runs.valid(phase)
    if valid is not None:
        seen &= valid[..., None]
    return float((got - want)[seen].abs().max()) if bool(seen.any()) else 0.0


def _choice(runs: Runs, layer: int, phase: str, name: str, point: str, score_point: str) -> dict[str, Any]:
    hashed = name == "experts" and runs.ask.config.is_hash(layer)
    got, want = (runs.value(who, f"layers.{layer}.{point}", phase) for who in ("production_own", "reference_production"))
    scores, noise = None, 0.0
    if not hashed:
        scores = runs.value("reference_production", f"layers.{layer}.{score_point}", phase)
        noise = _noise(runs, f"layers.{layer}.{score_point}", phase)
        if name == "experts":
            scores = scores + runs.bias[layer]
    found = choice_difference(got, want, scores, noise, runs.valid(phase))
    return {"layer": layer, "phase": phase, "choice": name, "hash": hashed, **found}


def _error(runs: Runs, layer: int, phase: str) -> dict[str, Any]:
    point, valid = f"layers.{layer}.hc_ffn.X", runs.valid(phase)
    got, own, replayed, other = (
        runs.value(who, point, phase) for who in ("production_own", "reference_own", "reference_production", "production_reference")
    )
    return {"layer": layer, "phase": phase, **error_shares(got, own, replayed, valid), "error_other_way": relative_error(other, own, valid)}


def _choice_table(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "choices: production free-running against the reference on production's earlier choices",
        ["layer", "phase", "choice", "queries", "differ", "exchanged", "near-ties", "beyond", "largest margin", "noise", "first beyond"],
    )
    for one in found:
        name = one["choice"] + (" (hash)" if one["hash"] else "")
        first = "-" if one["first_beyond"] is None else ",".join(map(str, one["first_beyond"]))
        table.add(
            one["layer"], one["phase"], name, one["queries"], one["differing"], one["exchanged"], one["near_ties"], one["beyond"],
            one["largest_margin"], one["noise"], first,
        )  # fmt: skip
    return table


def _error_table(errors: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "error of the residual streams after the layer, relative L2 over all queries",
        ["layer", "phase", "own choices", "replayed", "share of the choices", "other way"],
    )
    for one in errors:
        table.add(one["layer"], one["phase"], one["error_own"], one["error_replayed"], f"{100 * one['choice_share']:.0f} %", one["error_other_way"])
    return table


if __name__ == "__main__":
    sys.exit(main())
