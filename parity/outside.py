"""The audit of somebody else's production: a model that shows some points and has no layer that can be run alone.

What runs differs from parity/audit.py in one thing. There an isolated layer is production's on the reference's input; here it is
the reference's on production's own input (`alone`): layer n gets what production's layer n - 1 put out, at every pass from the
prompt on, so its state is what those inputs make it. What differs then started in that layer, whether the model is at hand or only
its trace. A layer whose input production does not show has no isolated side.

A gate that needs a point which production does not show raises NotExposedError: the test is told as not covered, never as a pass.
Tests: parity/unit/test_outside_transformers.py, parity/unit/test_examples.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parity.audit import KEPT, Audit, Floor, ReferencePass
from parity.selection import HEAD_POINTS
from probes.core.measure import ranges_of
from probes.core.rows import rows_of
from probes.core.trace import PassKey
from reference.points import INDICES, layer_of, spec_of


class NotExposedError(LookupError):
    """A gate asked for a point that this production does not show, or that it shows so that nobody can use it.

    keys     passes that it was asked for and is not there; empty: it is nowhere
    why      it was there, and cannot be used: the reason
    leading  how many of the asked decode steps, from the first one on, have it
    """

    def __init__(self, point: str, keys: Sequence[PassKey] = (), why: str = "", leading: int = 0) -> None:
        super().__init__(f"{point}: {why}: not judged" if why else f"production does not show {point}" + (f" in {where_of(keys)}" if keys else ""))
        self.point, self.keys, self.why, self.leading = point, tuple(keys), why, leading


def input_point(layer: int) -> str:
    """The point that holds a layer's input."""
    return "embed" if layer == 0 else f"layers.{layer - 1}.hc_ffn.X"


@dataclass(repr=False)
class OutsideAudit(Audit):
    """An audit whose production is an adapter (probes/outside/protocol.py): free-running values, and what it does not show.

    exposed      points that production can show
    alone        judged layers whose input it shows, each run by the reference on that input
    last         point that the head reads; the head is run on it too, where production shows it
    refused      (phase, step, point) -> why what production showed there cannot be used
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
        self.order: list[PassKey] = [("prefill", None), *(("decode", step) for step in range(self.plan.steps))]
        self.refused: dict[tuple[str, int | None, str], str] = {}
        self._without: dict[int, PassKey] = {}  # layers whose input was missing, and where first: their state cannot be made from there on
        self._alone_before: dict[int, dict[str, Tensor]] = {}
        self._lenient = False

    # ---- what runs ----

    @contextmanager
    def _record(self, who: str, model: Any, points: tuple[str, ...], phase: str, step: int | None) -> Iterator[None]:
        """As the audit's; what production showed and nobody can use is taken out again."""
        try:
            with super()._record(who, model, points, phase, step):
                yield
        finally:
            if who == "production":
                for point, why in getattr(model, "refused", {}).items():
                    self.refused[phase, step, point] = why
                    self.passes[who, phase, step].passes[phase, step].chunks.pop(point, None)

    def _choices(self, phase: str, step: int | None) -> dict[str, Tensor]:
        with self.lenient():
            return super()._choices(phase, step)

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
        for layer in self.alone:
            if not shown.fired(input_point(layer), one.phase, one.step):
                self._without.setdefault(layer, (one.phase, one.step))
        with self._record("alone", self.reference, self.isolated_points, one.phase, one.step):
            for layer in self.alone:
                if layer not in self._without:
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
                if layer not in self._without:
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

    def exposes(self, point: str, phase: str = "", steps: tuple[int, int] | None = None) -> bool:
        return point in self.exposed and not (phase and any((*key, point) in self.refused for key in self._asked(phase, steps)))

    @contextmanager
    def lenient(self) -> Iterator[None]:
        """Points that production does not show count as not fired: for measurements, which leave them out."""
        before, self._lenient = self._lenient, True
        try:
            yield
        finally:
            self._lenient = before

    def _asked(self, phase: str, steps: tuple[int, int] | None) -> list[PassKey]:
        return [("prefill", None)] if phase == "prefill" or steps is None else [("decode", step) for step in range(steps[0], steps[1] + 1)]

    def lacks(self, point: str, phase: str, step: int | None) -> str | None:
        """Why a pass holds nothing usable of a point that production can show: the reason, or empty. None: it is there, or nobody knows yet."""
        return self.refused.get((phase, step, point))

    def _check_there(self, point: str, asked: Sequence[PassKey], through: bool = False) -> None:
        """Raises NotExposedError where one of the asked passes lacks a point; through: or any pass before them."""
        last = self.order.index(asked[-1])
        looked = self.order[: last + 1] if through else asked
        missing = [(key, why) for key in looked if (why := self.lacks(point, *key)) is not None]
        if missing:
            first, keys = missing[0][0], [key for key, _ in missing] if point in self.exposed else []
            raise NotExposedError(point, keys, next((why for _, why in missing if why), ""), asked.index(first) if first in asked else 0)

    def fired(self, who: str, point: str, phase: str, steps: tuple[int, int] | None) -> int:
        """As the audit's; a point that cannot be had raises NotExposedError."""
        theirs = who in ("production", "isolated")
        shown = not theirs or point in self.exposed
        asked = self._asked(phase, steps)
        if not self._lenient:
            if theirs:
                self._check_there(point, asked)
            if who in ("alone", "isolated"):
                layer = layer_of(point)
                if layer is None:
                    self._check_there(self.last, asked)  # the head has no state: it needs the input of the asked passes only
                else:
                    self._check_there(input_point(layer), asked, through=True)
        if who in ("alone", "isolated"):
            layer = layer_of(point)
            if layer is not None and layer not in self.alone:
                point, shown = input_point(layer), False
            elif layer is None and point not in self.isolated_points:
                point, shown = self.last, False
        if not shown and not self._lenient:
            raise NotExposedError(point)
        return super().fired(who, point, phase, steps) if shown else 0

    @contextmanager
    def narrowed(self, steps: int) -> Iterator[None]:
        """The audit of the first decode steps only: for gates over a whole phase, whose later steps lack what they need."""
        self.ensure("decode")
        plan, memo = self.plan, self.memo
        self.plan, self.memo = replace(plan, steps=steps), memo.setdefault(("narrowed", steps), {})
        try:
            yield
        finally:
            self.plan, self.memo = plan, memo

    def greedy(self) -> Any:
        """Both models continue greedily; a trace cannot."""
        if not getattr(self.production, "continues", True) and not self._lenient:
            raise NotExposedError("a continuation of its own")
        return super().greedy()

    def coverage_points(self) -> list[tuple[str, str, int | None, str, str]]:
        """What production shows of what was asked for, where every pass of the phase can be used."""
        cells = []
        for phase in self.plan.phases:
            cells += [(phase, point, layer_of(point), "free", "production") for point in self.free_points if point in self.exposed]
            cells += [(phase, point, layer_of(point), "isolated", "isolated") for point in self.isolated_points if point in self.exposed]
        return [cell for cell in cells if self._whole(*cell)]

    def _whole(self, phase: str, point: str, layer: int | None, mode: str, who: str) -> bool:
        try:
            self.fired(who, point, phase, (0, self.plan.steps - 1))
        except NotExposedError:
            return False
        return True

    def shown_in(self, phase: str) -> list[frozenset[str]]:
        """Per pass of a phase, which points of the judged layers and the model production showed and can be used; of one that was not run, what it declares."""
        found = []
        for key in self.order:
            if key[0] == phase:
                trace = self.passes.get(("production", *key))
                declared = frozenset() if trace is not None or self.crash is not None or self.stopped else self.exposed
                found.append(frozenset(point for point in self.free_points if point in declared or (trace is not None and trace.fired(point, *key))))
        return found


def where_of(keys: Sequence[PassKey]) -> str:
    """Passes in words: `prefill and decode steps 2-3, 7`."""
    steps = [step for _, step in keys if step is not None]
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges_of(steps))
    return " and ".join([*(["prefill"] if any(step is None for _, step in keys) else []), *([f"decode {'step' if len(steps) == 1 else 'steps'} {said}"] if steps else [])])
