"""The audit of somebody else's production: a model that shows some points and has no layer that can be run alone.

What runs differs from parity/audit.py in one thing. There an isolated layer is production's on the reference's input; here it is
the reference's on production's own input (`alone`): layer n gets what production's layer n - 1 put out, at every pass from the
prompt on, so its state is what those inputs make it. What differs then started in that layer, whether the model is at hand or only
its trace. A layer whose input production does not show has no isolated side.

A gate that needs a point which production does not show raises NotExposedError: the test is told as not covered, never as a pass.
Tests: parity/unit/test_outside_transformers.py, parity/unit/test_examples.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.audit import KEPT, Audit, Floor, ReferencePass
from parity.selection import HEAD_POINTS
from probes.core.rows import rows_of
from reference.points import INDICES, layer_of, spec_of


class NotExposedError(LookupError):
    """A gate asked for a point that this production does not show."""

    def __init__(self, point: str) -> None:
        super().__init__(f"production does not show {point}")
        self.point = point


def input_point(layer: int) -> str:
    """The point that holds a layer's input."""
    return "embed" if layer == 0 else f"layers.{layer - 1}.hc_ffn.X"


@dataclass(repr=False)
class OutsideAudit(Audit):
    """An audit whose production is an adapter (probes/outside/protocol.py): free-running values, and what it does not show.

    exposed      points that production can show
    alone        judged layers whose input it shows, each run by the reference on that input
    last         point that the head reads; the head is run on it too, where production shows it
    """

    alone_words = "each layer of the reference on production's input"
    shows_store = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exposed = frozenset(self.production.taps.points)
        self.alone = tuple(n for n in self.plan.layers if input_point(n) in self.exposed)
        inputs = [input_point(n) for n in self.alone]
        self.production_points = tuple(dict.fromkeys(p for p in (*self.production_points, *inputs) if p in self.exposed))
        self.choice_points = tuple(p for p in self.choice_points if p in self.exposed)
        self.last = input_point(max(self.layers_run) + 1)
        head = HEAD_POINTS if self.last in self.exposed else ()
        self.production_points = tuple(dict.fromkeys([*self.production_points, *([self.last] if head else [])]))
        self.isolated_points = (*(p for p in self.isolated_points if layer_of(p) in self.alone), *head)
        self._alone_before: dict[int, dict[str, Tensor]] = {}
        self._lenient = False

    # ---- what runs ----

    def layer_input(self, layer: int, phase: str, step: int | None) -> Tensor:
        """Production's own input of a layer, [b, s, n, D]; nothing said of pads."""
        shown = self.get("production", input_point(layer), phase, step)
        return shown[:, :, None].expand(-1, -1, self.config.hc_mult, -1) if layer == 0 else shown

    def _isolated(self, one: ReferencePass) -> bool:
        """The reference's layers, each on production's own input; what production showed is its isolated side too."""
        shown = self.passes["production", one.phase, one.step]
        self.passes["isolated", one.phase, one.step] = shown
        state = self.states.setdefault("alone", self.reference.new_state(self.batch, self.plan.max_context))
        self._alone_before = {n: state.export_layer(n) for n in self.alone}
        with self._record("alone", self.reference, self.isolated_points, one.phase, one.step):
            for layer in self.alone:
                if shown.fired(input_point(layer), one.phase, one.step):
                    self._run_alone(self.reference, state, layer, one)
            self._run_head_alone(self.reference, one)
        return True

    def _run_head_alone(self, model: Any, one: ReferencePass) -> None:
        if "logits" in self.isolated_points and self.passes["production", one.phase, one.step].fired(self.last, one.phase, one.step):
            X = self.get("production", self.last, one.phase, one.step)
            if X.shape[:2] == one.tokens.shape:
                model.run_head(X, one.lengths)

    def _run_alone(self, model: Any, state: Any, layer: int, one: ReferencePass) -> None:
        X = self.layer_input(layer, one.phase, one.step)
        if X.shape[:2] == one.tokens.shape:  # else the gates of the points say so
            model.run_layer(layer, X, one.tokens, state, one.lengths, choices=one.choices_of(layer), decode=one.phase == "decode")

    def _twin(self, number: int, twin: Any, one: ReferencePass, before: dict[int, dict[str, Tensor]], floors: dict[tuple[str, str], Floor]) -> None:
        """One pass of one twin, free and alone, taken into the floors."""
        with self._record("twin", twin, self.free_points, one.phase, one.step):
            self._advance(twin, f"twin{number}", one)
        self._add_floor("free", number, twin, one, self.free_points, floors)
        state = self.states.setdefault(f"twin{number} alone", twin.new_state(self.batch, self.plan.max_context))
        with self._record("twin", twin, self.isolated_points, one.phase, one.step):
            for layer in self.alone:
                if self.passes["production", one.phase, one.step].fired(input_point(layer), one.phase, one.step):
                    state.import_layer(layer, self._alone_before[layer])
                    self._run_alone(twin, state, layer, one)
            self._run_head_alone(twin, one)
        self._add_floor("isolated", number, twin, one, self.isolated_points, floors)

    def _want(self, mode: str, point: str, phase: str, step: int | None) -> Tensor:
        return self.get(self.reference_of(mode), point, phase, step)

    def _add_floor(self, mode: str, number: int, twin: Any, one: ReferencePass, points: tuple[str, ...], floors: dict[tuple[str, str], Floor]) -> None:
        """As the audit's, against the reference of this mode."""
        phase, step = one.phase, one.step
        trace = self.passes.pop(("twin", phase, step))
        for point in points:
            spec = spec_of(point)
            if spec.kind != INDICES and trace.fired(point, phase, step):
                want, got = self._want(mode, point, phase, step), trace.get(point, phase, step)
                if mode == "isolated" and point.endswith(KEPT):
                    self.twin_values[number, point, phase, step] = got
                floor = floors.setdefault((mode, point), self._new_floor(mode, point))
                floor.add(got, want, spec.kind, rows_of(spec, mode, want.dim()), self.valid(phase), number, (phase, step))

    def _compare_left(self, one: ReferencePass, before: dict[int, dict[str, Tensor]]) -> None:
        """There is no state to compare: production's is its own."""

    def _next_tokens(self, step: int) -> Tensor:
        """The tokens that production was given where it brings them along (a trace); else as ever."""
        given = getattr(self.production, "decode_tokens", None)
        return super()._next_tokens(step) if given is None else torch.as_tensor(given(step), dtype=torch.int64)

    # ---- what the tests read ----

    def reference_of(self, mode: str) -> str:
        return "alone" if mode == "isolated" else "reference"

    def keys_of(self, who: str) -> str:
        """Production reads its own; the reference's side those of its layers alone."""
        return "production" if who == "isolated" else "alone"

    def exposes(self, point: str) -> bool:
        return point in self.exposed

    @contextmanager
    def lenient(self) -> Iterator[None]:
        """Points that production does not show count as not fired: for measurements, which leave them out."""
        before, self._lenient = self._lenient, True
        try:
            yield
        finally:
            self._lenient = before

    def fired(self, who: str, point: str, phase: str, steps: tuple[int, int] | None) -> int:
        """As the audit's; a point that cannot be had raises NotExposedError."""
        shown = who not in ("production", "isolated") or point in self.exposed
        if who in ("alone", "isolated"):
            layer = layer_of(point)
            if layer is not None and layer not in self.alone:
                point, shown = input_point(layer), False
            elif layer is None and point not in self.isolated_points:
                point, shown = self.last, False
        if not shown and not self._lenient:
            raise NotExposedError(point)
        return super().fired(who, point, phase, steps) if shown else 0

    def greedy(self) -> Any:
        """Both models continue greedily; a trace cannot."""
        if not getattr(self.production, "continues", True) and not self._lenient:
            raise NotExposedError("a continuation of its own")
        return super().greedy()

    def coverage_points(self) -> list[tuple[str, str, int | None, str, str]]:
        """What production shows of what was asked for."""
        cells = []
        for phase in self.plan.phases:
            cells += [(phase, point, layer_of(point), "free", "production") for point in self.free_points if point in self.exposed]
            cells += [(phase, point, layer_of(point), "isolated", "isolated") for point in self.isolated_points if point in self.exposed]
        return cells

    def uncovered(self) -> tuple[str, ...]:
        """Points of the judged layers and of the model that production does not show, in dataflow order."""
        return tuple(point for point in self.free_points if point not in self.exposed)
