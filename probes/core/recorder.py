"""`with Recorder(model, points) as trace:` copies what the taps of a model show, and always lets go.

Works on any object that has `taps` (reference.points.Taps). Values are copied at the tap, so what the model does to its
buffers later does not reach the trace. Taps fire after a replayed graph with what it
copied inside, or not at all (production/graph.py).

    with Recorder(model, ["layers.2.attn.selected"]) as trace:
        trace.begin("prefill")
        model.prefill(tokens, state)
    trace.get("layers.2.attn.selected", "prefill")

Tests: parity/unit/test_recorder.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor

from probes.core.trace import PHASES, Trace
from reference.config import InputError
from reference.points import Taps


class Tapped(Protocol):
    """A model, as far as a recorder needs it."""

    @property
    def taps(self) -> Taps: ...


class Recorder:
    """Borrows the taps of a model for the length of a `with` block.

    points       full names; None records everything the model can show; an unknown name is an InputError
    phases       record only these phases, everything when None; passes of other phases are opened but stay empty
    steps        of decode, record only these steps
    description  facts that go into the trace's manifest

    What is shown before the first `trace.begin` lands in one pass of phase "call".
    """

    def __init__(
        self,
        model: Tapped,
        points: Iterable[str] | None = None,
        phases: Collection[str] | None = None,
        steps: Collection[int] | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(points, str):
            raise InputError(f"points: expected a list of names, got the string {points!r}")
        for phase in phases or ():
            if phase not in PHASES:
                raise InputError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
        self.model = model
        self.points = tuple(model.taps.points if points is None else dict.fromkeys(points))
        self.phases, self.steps = phases, steps
        self.description = description
        self.trace: Trace | None = None
        self._borrowed = ExitStack()

    def __enter__(self) -> Trace:
        if self.trace is not None:
            raise RuntimeError("a Recorder is used once; make a new one for the next run")
        with ExitStack() as stack:  # lets go again when attaching fails
            stack.enter_context(self.model.taps.observe(self.points, self._observe))
            self._borrowed = stack.pop_all()
        self.trace = Trace(self.points, self.description)
        return self.trace

    def __exit__(self, *_: object) -> None:
        self._borrowed.close()

    def _observe(self, point: str, value: Tensor) -> None:
        assert self.trace is not None
        phase, step = self.trace.current
        if self.phases is not None and phase not in self.phases:
            return
        if self.steps is not None and step is not None and step not in self.steps:
            return
        self.trace.add(point, value)
