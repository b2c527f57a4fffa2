"""Where production first leaves the reference: every point isolated and free-running, in dataflow order, against twin noise.

    python -m probes.first_divergence --prompt short.txt:0:60 --steps 4 --layers 0-3

Isolated: a layer of production on the reference's own input and state, transplanted before every pass; what differs there was
made there (local). Free: production's own chain; what differs only there was handed down (inherited). Noise: the reference
with its sums in other orders, in the same two ways. Production's experts and entries are replayed on the reference's side.

Named is the first place whose worst row is above k x noise + one rounding step of the point's format. That is an order and a
ratio; the limits that decide are in the audit (parity/gates.py). Tests: parity/unit/test_first_divergence.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from probes.core.cli import Answer, CannotMeasureError, Table, answer, ask_of, count, probe_parser, say
from probes.core.drive import choice_points
from probes.core.inputs import batch_of, forced_tokens
from probes.core.recorder import Recorder
from probes.core.rows import absent_rows, least_size, replayable, row_errors, rows_of, score_unit
from probes.core.trace import Trace, grow_last
from probes.pair import load_production, load_reference
from reference.config import ModelConfig
from reference.points import INDICES, SCORES, layer_of, points_of_layer, points_of_model, spec_of

DESCRIPTION = "The first point, in dataflow order, that is further from the reference than the noise of reordered sums."
EXAMPLE = "python -m probes.first_divergence --prompt short.txt:0:60 --layers 0-3 --steps 4"
MODES = ("isolated", "free")
ORDERS = (1, 2, 3)
# One rounding that falls the other way, as a share of a row: where one expert activation carries the row; an e2m1 code; else.
CARRIED = ("ffn.routed", "ffn.shared_experts", "ffn.out", "hc_ffn.X")
CODES = ("attn.indexer.q", "attn.indexer.compressor")
STEP_CARRIED, STEP_CODE, STEP, STEP_HANDED_DOWN = 8e-2, 1e-1, 1e-2, 1e-1


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("first_divergence", DESCRIPTION, EXAMPLE)
    parser.add_argument("--k", metavar="K", type=_factor, default=3.0, help="how many times the noise counts as a difference (default: 3)")
    parser.add_argument("--most", metavar="N", type=count, default=12, help="places listed (default: 12)")
    return answer("first_divergence", parser, argv, _measure)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


@dataclass
class Place:
    """One point in one pass and mode. error: worst row rel-L2, or queries with another set; noise: the twins' over the run."""

    phase: str
    step: int | None
    point: str
    mode: str
    error: float
    where: list[int]
    rows: int
    noise: float = 0.0
    near_ties: int = 0

    def step_size(self) -> float:
        name = spec_of(self.point).name
        if spec_of(self.point).kind == INDICES:
            return 0.0
        if self.mode == "free":
            return STEP_HANDED_DOWN
        return STEP_CARRIED if name in CARRIED else STEP_CODE if name in CODES else STEP

    def level(self, k: float) -> float:
        return k * self.noise + self.step_size()

    def over(self, k: float) -> bool:
        return not self.error <= self.level(k)

    def facts(self, k: float) -> dict[str, Any]:
        level = self.level(k)
        return {
            "phase": self.phase, "step": self.step, "layer": layer_of(self.point), "point": self.point, "mode": self.mode, "component": spec_of(self.point).component,
            "error": self.error, "noise": self.noise, "level": level, "ratio": self.error / level if level > 0 else (math.inf if self.error else 0.0), "where": self.where, "rows": self.rows,
        }  # fmt: skip


@dataclass
class Passes:
    """Both models and the twins, pass by pass; only numbers are kept."""

    ask: Any
    made: Any
    meant: Any
    twins: list[Any]
    places: list[Place] = field(default_factory=list)
    noise: dict[tuple[str, str], float] = field(default_factory=dict)
    absolute: dict[tuple[str, str], float] = field(default_factory=dict)  # worst element error of the twins' scores
    unit: dict[str, float] = field(default_factory=dict)  # typical size of a score over the prompt

    def __post_init__(self) -> None:
        self.config: ModelConfig = self.meant.config
        self.layers_run = tuple(self.made.layers)
        self.judged = tuple(p for layer in self.ask.layers for p in points_of_layer(self.config, layer))
        self.choice_points = choice_points(points_of_model(self.config, self.layers_run))
        inputs = ("embed", *(f"layers.{n}.hc_ffn.X" for n in self.layers_run))
        self.reference_points = tuple(dict.fromkeys((*self.judged, *inputs, *self.choice_points)))
        self.batch = len(self.ask.prompts)

    def run(self) -> None:
        tokens, lengths = batch_of(self.ask.prompts)
        models = {"production": self.made, "alone": self.made, "reference": self.meant}
        models |= {f"twin{i} {mode}": twin for i, twin in enumerate(self.twins) for mode in MODES}
        self.states = {name: model.new_state(self.batch, self.ask.max_context) for name, model in models.items()}
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        valid = positions < lengths[:, None]
        feed = forced_tokens(self.ask.prompts, self.ask.steps).clone()
        say(f"prefill of {int(lengths.sum())} tokens, isolated and free, with {len(self.twins)} twins")
        last = self._pass("prefill", None, tokens, lengths, positions, valid)
        last = last[torch.arange(self.batch), lengths - 1]
        for step in range(self.ask.steps):
            own = feed[:, step] < 0
            feed[own, step] = last.argmax(-1)[own]
            last = self._pass("decode", step, feed[:, step : step + 1], None, (lengths + step)[:, None], torch.ones(self.batch, 1, dtype=torch.bool))[:, 0]
        for place in self.places:
            if spec_of(place.point).kind != INDICES:
                place.noise = self.noise.get((place.mode, place.point), math.nan)

    def _pass(self, phase: str, step: int | None, tokens: Tensor, lengths: Tensor | None, positions: Tensor, valid: Tensor) -> Tensor:
        """One prefill or decode step of everything; the reference's logits [b, s, vocab]."""

        def whole(model: Any, name: str, choices: dict[str, Tensor] | None) -> Tensor:
            state = self.states[name]
            out = model.prefill(tokens, state, lengths, choices=choices) if phase == "prefill" else model.decode(tokens[:, 0], state, choices=choices)[:, None]
            logits: Tensor = out
            return logits

        free = self._record(self.made, (*self.judged, *self.choice_points), lambda: whole(self.made, "production", None))
        choices = {}
        for point in self.choice_points:
            limit = (positions[..., None] + 1) // 4 if point.endswith("selected") else torch.tensor(self.config.n_routed_experts)
            choices[point] = replayable(free.get(point).clone(), limit, None if point.endswith("selected") else range(self.config.n_routed_experts))
        before = {n: self.states["reference"].export_layer(n) for n in self.ask.layers}
        logits: list[Tensor] = []
        want = self._record(self.meant, self.reference_points, lambda: logits.append(whole(self.meant, "reference", choices)))

        def alone(model: Any, name: str) -> Trace:
            def run() -> None:
                for layer in self.ask.layers:
                    self.states[name].import_layer(layer, before[layer])
                    X = want.get(f"layers.{layer - 1}.hc_ffn.X") if layer else want.get("embed")[:, :, None].repeat(1, 1, self.config.hc_mult, 1)
                    own = {point: choice for point, choice in choices.items() if layer_of(point) == layer}
                    model.run_layer(layer, X, tokens, self.states[name], lengths, choices=own, decode=phase == "decode")

            return self._record(model, self.judged, run)

        got = {"isolated": alone(self.made, "alone"), "free": free}
        for number, twin in enumerate(self.twins):
            self._add_noise("isolated", alone(twin, f"twin{number} isolated"), want, valid)
            name = f"twin{number} free"
            self._add_noise("free", self._record(twin, self.judged, lambda twin=twin, name=name: whole(twin, name, choices)), want, valid)
        for point in self.judged:
            for mode in MODES:
                self.places.append(self._place(phase, step, point, mode, got[mode], want, valid))
        return logits[0]

    def _record(self, model: Any, points: Sequence[str], call: Any) -> Trace:
        with Recorder(model, dict.fromkeys(points)) as trace:
            call()
        return trace

    def _add_noise(self, mode: str, got: Trace, want: Trace, valid: Tensor) -> None:
        for point in self.judged:
            if spec_of(point).kind != INDICES:
                error, _, _ = worst_row(point, mode, got.get(point), want.get(point), valid, self._unit(point, want, valid))
                self.noise[mode, point] = max(self.noise.get((mode, point), 0.0), error)
                if point.endswith((".indexer.score", ".ffn.gate")):
                    g, w = _same_width(point, got.get(point), want.get(point))
                    gap = (g - w).abs()[valid]
                    self.absolute[mode, point] = max(self.absolute.get((mode, point), 0.0), float(gap[gap.isfinite()].max()) if gap.isfinite().any() else 0.0)

    def _place(self, phase: str, step: int | None, point: str, mode: str, got: Trace, want: Trace, valid: Tensor) -> Place:
        for who, trace in (("production", got), ("the reference", want)):
            if not trace.fired(point, "call"):
                raise CannotMeasureError(f"{point} was not shown by {who} in {phase}" + ("" if step is None else f" step {step}"))
        if spec_of(point).kind != INDICES:
            return Place(phase, step, point, mode, *worst_row(point, mode, got.get(point), want.get(point), valid, self._unit(point, want, valid)))
        scores = self._scores(point, want)
        noise = self.absolute.get((mode, point.replace("selected", "indexer.score").replace("experts", "gate")), 0.0)
        different, near = other_sets(got.get(point), want.get(point), valid, scores, 2 * noise)
        where = different.nonzero()[0].tolist() if different.any() else []
        return Place(phase, step, point, mode, float(different.sum()), where, int(valid.sum()), near_ties=near)

    def _unit(self, point: str, want: Trace, valid: Tensor) -> float:
        """Typical size of one score, from the first pass that has one; a row of scores is not measured by less."""
        if spec_of(point).kind == SCORES and not self.unit.get(point):
            self.unit[point] = score_unit(want.get(point).masked_fill(~valid[..., None], -math.inf))
        return self.unit.get(point, 0.0)

    def _scores(self, point: str, want: Trace) -> Tensor | None:
        """What a choice was made by, in the reference; None where a set is exact."""
        layer = layer_of(point)
        assert layer is not None
        if point.endswith("selected"):
            return want.get(point.replace("selected", "indexer.score"))
        if point.endswith("experts") and not self.config.is_hash(layer):
            bias: Tensor = self.meant.router_bias(layer)
            return want.get(point.replace("experts", "gate")) + bias
        return None


# ---- measuring ----


def _same_width(point: str, got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    if spec_of(point).kind != SCORES:
        return got, want
    width = max(got.shape[-1], want.shape[-1])
    return grow_last(got, width, -math.inf), grow_last(want, width, -math.inf)


def worst_row(point: str, mode: str, got: Tensor, want: Tensor, valid: Tensor, unit: float = 0.0) -> tuple[float, list[int], int]:
    """Relative L2 of the worst row, where it is, and how many rows there are. Another shape or finite mask is infinitely far."""
    spec = spec_of(point)
    got, want = _same_width(point, got, want)
    if got.shape != want.shape:
        return math.inf, [], int(valid.sum())
    use = valid.reshape(*valid.shape, *[1] * (got.dim() - 2)).expand(got.shape)
    masks = (got.isfinite() != want.isfinite()) & use
    if masks.any():
        return math.inf, masks.nonzero()[0].tolist(), int(valid.sum())
    least = None
    if spec.kind == SCORES:
        seen = want.isfinite() & use
        least = least_size(unit, seen)
        got, want = got.masked_fill(~seen, 0.0), want.masked_fill(~seen, 0.0)
    dims = rows_of(spec, mode, want.dim())
    error, _ = row_errors(got, want, dims, least)
    rows = valid.reshape(*valid.shape, *[1] * (error.dim() - 2)).expand(error.shape) & ~absent_rows(want, dims)
    if not rows.any():
        return 0.0, [], 0
    ranked = torch.where(rows, error.nan_to_num(math.inf), -1.0)
    where = [int(i) for i in torch.unravel_index(ranked.argmax(), error.shape)]
    return float(ranked.max()), where, int(rows.sum())


def other_sets(got: Tensor, want: Tensor, valid: Tensor, scores: Tensor | None, tie: float) -> tuple[Tensor, int]:
    """Queries [b, s] that chose another set by more than a tie of the reference's scores, and how many were ties."""
    width = max(got.shape[-1], want.shape[-1])
    g, w = (grow_last(value.long(), width, -1).sort(-1).values for value in (got, want))
    different = (g != w).any(-1) & valid
    near = torch.zeros_like(different)
    for b, s in different.nonzero().tolist() if scores is not None else ():
        assert scores is not None
        row = scores[b, s]
        have, due = set(g[b, s].tolist()) - {-1}, set(w[b, s].tolist()) - {-1}
        if len(have) != len(due) or len(have) != int((g[b, s] >= 0).sum()) or any(not 0 <= i < len(row) for i in have | due):
            continue
        gap = max(float(row[i]) for i in due - have) - min(float(row[i]) for i in have - due)
        near[b, s] = gap <= tie
    return different & ~near, int(near.sum())


# ---- answer ----


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    made = load_production(ask)
    meant = load_reference(ask, made.policy)
    passes = Passes(ask, made, meant, [meant.twin(order) for order in ORDERS])
    with torch.no_grad():
        passes.run()
    asked = [p for p in passes.places if p.phase in ask.phases]
    over = [place for place in asked if place.over(args.k)]
    first = next((place for place in over if place.mode == "isolated"), None)
    first_free = next((place for place in over if place.mode == "free"), None)
    skipped = len(points_of_model(passes.config, passes.layers_run)) - len(passes.judged) - 4
    values = {
        **ask.facts(), "policy": sorted(made.policy), "k": args.k, "first_local": None if first is None else first.facts(args.k), "first_free": None if first_free is None else first_free.facts(args.k),
        "checked_before": None if first is None else asked.index(first), "points_not_looked_at": skipped, "checked": len(asked), "over_count": len(over),
        "over": [place.facts(args.k) for place in over[: args.most]], "near_ties": sum(p.near_ties for p in asked), "layers": _layers(asked, ask.layers, args.k),
    }  # fmt: skip
    level, unseen = f"{args.k:g} x noise + one rounding step", f"{skipped} points of layers not looked at"
    if first is None:
        notes = [f"no layer alone is above {level} at any of its points; {len(asked)} places checked, {unseen}"]
    else:
        notes = [f"starts at: {_where(first)}; its input and state agree; first of {asked.index(first) + 1} checked, {unseen}"]
    if first_free is not None:
        notes.append(f"shows in production's own chain at: {_where(first_free)}" + ("" if first is not None else "; every layer alone agrees there: handed down through inputs, state or choices"))
    notes.append("no opinion: what passes is decided by pytest parity/")
    return Answer([_first_table(over[: args.most], args.k, len(over)), _layer_table(values["layers"])], values, notes)


def _where(place: Place) -> str:
    return f"{place.point}, {place.phase}" + (f" step {place.step}" if place.step is not None else "") + f" ({spec_of(place.point).component})"


def _layers(asked: Sequence[Place], layers: Sequence[int], k: float) -> list[dict[str, Any]]:
    """Per layer and phase: the place that spends most of its level, isolated and free; the layer's own and final error."""
    found = []
    for phase in dict.fromkeys(p.phase for p in asked):
        for layer in layers:
            row: dict[str, Any] = {"phase": phase, "layer": layer}
            for mode in MODES:
                here = [p for p in asked if p.phase == phase and p.mode == mode and layer_of(p.point) == layer]
                worst = max(here, key=lambda p: p.facts(k)["ratio"])
                out = max((p for p in here if p.point.endswith("hc_ffn.X")), key=lambda p: p.error)
                row[mode] = {"point": worst.point.split(".", 2)[2], "step": worst.step, "error": worst.error, "ratio": worst.facts(k)["ratio"], "output_error": out.error, "output_noise": out.noise}
            found.append(row)
    return found


def _first_table(over: Sequence[Place], k: float, total: int) -> Table:
    table = Table(f"{len(over)} of {total} places above {k:g} x noise + one rounding step, in order", ["point", "phase", "step", "mode", "error", "noise", "level", "ratio", "at", "rows"])
    for place in over:
        f = place.facts(k)
        table.add(place.point, place.phase, "-" if place.step is None else place.step, place.mode, place.error, place.noise, f["level"], f["ratio"], ",".join(map(str, place.where)) or "-", place.rows)
    return table


def _layer_table(layers: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "per layer: error of its output X local (isolated) and with what was handed down (free), noise, and the point that spends most of its level",
        ["layer", "phase", "local", "noise", "free", "noise", "most, isolated", "ratio", "most, free", "ratio"],
    )
    for row in layers:
        i, f = row["isolated"], row["free"]
        table.add(row["layer"], row["phase"], i["output_error"], i["output_noise"], f["output_error"], f["output_noise"], i["point"], i["ratio"], f["point"], f["ratio"])
    return table


if __name__ == "__main__":
    sys.exit(main())
