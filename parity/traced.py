"""The audit of a trace: production's values as another process captured them, any part of the points in any part of the passes.

As parity/outside.py, but that a point may be there in some passes only. Decode steps are judged in runs of steps that are all there,
or all not (`as_held`); a test of steps that are not raises NotExposedError: not covered, never a pass. A layer alone needs its input at
every pass from the prompt on, as its state is made of them; behind the first pass without, that layer has no isolated side. A gate over
the whole of decode judges the first steps that have what it needs. Copies that ranks hold are judged by parity/test_ranks.py.
Tests: parity/unit/test_trace_door.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parity.outside import OutsideAudit, input_point
from parity.selection import Case
from probes.core.inputs import Prompt
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
        self.refused = {key: why for key, why in self.production.unusable.items() if key[2] in self.free_points and key[0] in self.plan.phases}
        self.alone_passes = {n: self._leading(input_point(n)) for n in self.alone}
        self.alone = tuple(n for n in self.alone if self.alone_passes[n])
        self.isolated_points = tuple(p for p in self.isolated_points if layer_of(p) is None or layer_of(p) in self.alone)

    def _leading(self, point: str) -> int:
        for number, key in enumerate(self.order):
            if not self.production.holds(point, *key):
                return number
        return len(self.order)

    def lacks(self, point: str, phase: str, step: int | None) -> str | None:
        return None if self.production.holds(point, phase, step) else self.production.unusable.get((phase, step, point), "")

    def exposes(self, point: str, phase: str = "", steps: tuple[int, int] | None = None) -> bool:
        return super().exposes(point) and (not phase or all(self.production.holds(point, *key) for key in self._asked(phase, steps)))

    def as_held(self, cases: Sequence[Case]) -> list[Case]:
        """Decode cases cut where the trace begins or ceases to hold what they need."""
        found = []
        for case in cases:
            first = None if case.steps is None else case.steps[0]
            for step in () if case.steps is None else range(case.steps[0] + 1, case.steps[1] + 1):
                assert first is not None
                if self._can_judge(case, step) != self._can_judge(case, first):
                    found.append(replace(case, steps=(first, step - 1)))
                    first = step
            found.append(case if case.steps is None or first is None else replace(case, steps=(first, case.steps[1])))
        return found

    def _can_judge(self, case: Case, step: int) -> bool:
        there = self.production.holds(case.point, "decode", step)
        if case.mode == "isolated" and case.layer is not None:
            return there and step + 1 < self.alone_passes.get(case.layer, 0)
        return there and (case.mode != "isolated" or self.production.holds(self.last, "decode", step))

    def shown_in(self, phase: str) -> list[frozenset[str]]:
        return [frozenset(point for point in self.free_points if self.production.holds(point, *key)) for key in self.order if key[0] == phase]


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
