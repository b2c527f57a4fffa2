"""The audit of a trace: production's values as another process captured them, any part of the points in any part of the passes.

As parity/outside.py, but that a point may be there in some passes only. A test whose passes it does not hold, all of them, raises
NotExposedError: not covered, never a pass. A layer alone needs its input at every pass from the prompt on, as its state is made of
them; behind the first pass without, that layer has no isolated side. Copies that ranks hold are judged by parity/test_ranks.py.
Tests: parity/unit/test_trace_door.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.audit import ReferencePass
from parity.outside import NotExposedError, OutsideAudit, input_point
from probes.core.inputs import Prompt
from probes.core.trace import PassKey
from probes.outside.trace import Opened, Player, open_trace, tokens_of
from reference.config import InputError, ModelConfig
from reference.points import layer_of


@dataclass
class TraceAudit(OutsideAudit):
    """An audit whose production is a Player.

    alone_passes   per layer, how many passes from the prompt on hold its input
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.order: list[PassKey] = [("prefill", None), *(("decode", step) for step in range(self.plan.steps))]
        self.alone_passes = {n: self._leading(input_point(n)) for n in self.alone}
        self.alone = tuple(n for n in self.alone if self.alone_passes[n])
        self.isolated_points = tuple(p for p in self.isolated_points if layer_of(p) is None or layer_of(p) in self.alone)

    def _leading(self, point: str) -> int:
        for number, key in enumerate(self.order):
            if not self.production.holds(point, *key):
                return number
        return len(self.order)

    def _run_alone(self, model: Any, state: Any, layer: int, one: ReferencePass) -> None:
        if self.order.index((one.phase, one.step)) < self.alone_passes[layer]:
            super()._run_alone(model, state, layer, one)

    def _choices(self, phase: str, step: int | None) -> dict[str, Tensor]:
        with self.lenient():
            return super()._choices(phase, step)

    def _asked(self, phase: str, steps: tuple[int, int] | None) -> list[PassKey]:
        return [("prefill", None)] if phase == "prefill" or steps is None else [("decode", step) for step in range(steps[0], steps[1] + 1)]

    def fired(self, who: str, point: str, phase: str, steps: tuple[int, int] | None) -> int:
        """As an outside audit's; a point that is missing in one of the asked passes raises NotExposedError."""
        if not self._lenient:
            asked = self._asked(phase, steps)
            if who in ("production", "isolated") and point in self.exposed and not all(self.production.holds(point, *key) for key in asked):
                raise NotExposedError(point)
            layer = layer_of(point)
            if who in ("alone", "isolated") and layer in self.alone_passes and self.order.index(asked[-1]) >= self.alone_passes[layer]:
                raise NotExposedError(input_point(layer))
            if who in ("alone", "isolated") and layer is None and not all(self.production.holds(self.last, *key) for key in asked):
                raise NotExposedError(self.last)  # the head has no state: it needs the input of the asked passes only
        return super().fired(who, point, phase, steps)

    def coverage_points(self) -> list[tuple[str, str, int | None, str, str]]:
        """Cells whose every pass is there."""
        cells = []
        for phase, point, layer, mode, who in super().coverage_points():
            keys = [key for key in self.order if key[0] == phase]
            there = all(self.production.holds(point, *key) for key in keys)
            if layer is None:
                alone = all(self.production.holds(self.last, *key) for key in keys)
            else:
                alone = self.order.index(keys[-1]) < self.alone_passes.get(layer, 0)
            if there and (mode == "free" or alone):
                cells.append((phase, point, layer, mode, who))
        return cells

    def uncovered(self) -> tuple[str, ...]:
        """Points that the trace does not hold in every pass."""
        return tuple(point for point in self.free_points if not all(self.production.holds(point, *key) for key in self.order if key[0] in self.plan.phases))


@dataclass(frozen=True)
class Traced:
    """What a trace says of the run: it brings its prompts and steps along."""

    opened: Opened
    prompts: list[Prompt]
    steps: int

    def player(self, config: ModelConfig, layers: range) -> Player:
        return Player(self.opened, config, layers)


def read_traced(directory: Path, config: ModelConfig, given: list[Prompt], steps: int | None) -> Traced:
    """Open a trace. given, steps  what the command line says too: it must be the same. Raises InputError."""
    opened = open_trace(directory)
    rows, tokens = tokens_of(opened, config.vocab_size)
    if given and [prompt.ids for prompt in given] != rows:
        first = next((b for b, (a, row) in enumerate(zip((p.ids for p in given), rows, strict=False)) if a != row), min(len(given), len(rows)))
        raise InputError(f"--prompt with --trace: row {first} differs from the trace's; it brings its prompt along; next: leave --prompt out")
    if steps is not None and steps != len(tokens):
        raise InputError(f"--steps {steps} with --trace: the trace holds {len(tokens)}; next: leave --steps out")
    said = opened.trace.description.get("prompts")
    labels = [str(label) for label in said] if isinstance(said, list) and len(said) == len(rows) else [f"{opened.root.name} row {b}" for b in range(len(rows))]
    continuation = torch.tensor(tokens).T.tolist() if tokens else [[] for _ in rows]
    return Traced(opened, [Prompt(label, ids, tuple(after)) for label, ids, after in zip(labels, rows, continuation, strict=True)], len(tokens))
