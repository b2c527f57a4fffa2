"""What to judge: `--layers 0-3,7` and `--phase` as cases, step groups and test ids. No tensors here.

    layer_cases(config, parse_layers("0-3,7", 8), ("prefill",), steps=0)

Tests: parity/unit/test_selection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probes.core.cli import parse_layers
from reference.config import ModelConfig
from reference.points import points_of_layer, spec_of, state_parts

__all__ = ["CHAIN_MODES", "DEVICE_MODE", "Case", "StateCase", "layer_cases", "model_cases", "parse_layers", "parse_phases", "state_cases", "state_phase", "step_groups"]

PHASES = ("prefill", "decode")
MODES = ("isolated", "free")
DEVICE_MODE = "device"  # the isolated run against the same kernels on another device
CHAIN_MODES = ("isolated", DEVICE_MODE, "free")  # modes whose gates have a place in the dataflow, in this order at one point
GROUP_STEPS = 32  # decode steps judged by one test; the first step is a group of its own


def parse_phases(text: str) -> tuple[str, ...]:
    """`prefill`, `decode` or `both`."""
    return PHASES if text == "both" else (text,)


def step_groups(steps: int) -> tuple[tuple[int, int], ...]:
    """First and last decode step of every judged group: step 0 alone, then GROUP_STEPS at a time."""
    if steps < 1:
        return ()
    groups = [(0, 0)]
    for first in range(1, steps, GROUP_STEPS):
        groups.append((first, min(first + GROUP_STEPS, steps) - 1))
    return tuple(groups)


@dataclass(frozen=True)
class Case:
    """One judged cell: a point (a layer's, or the model's own) in one phase and mode; decode: one step group."""

    phase: str
    point: str
    mode: str
    layer: int | None = None
    steps: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        name = self.point.split(".", 2)[2] if self.layer is not None else self.point
        where = f"L{self.layer}-{name}" if self.layer is not None else name
        steps = "" if self.steps is None else f"-steps{self.steps[0]}to{self.steps[1]}"
        return f"{self.phase}-{where}-{self.mode}{steps}"


def layer_cases(config: ModelConfig, layers: Sequence[int], phases: Sequence[str], steps: int) -> list[Case]:
    """Every point of every layer, phase and mode, in dataflow order."""
    cases = []
    for phase in phases:
        for layer in layers:
            for point in points_of_layer(config, layer):
                for mode in MODES:
                    cases += [Case(phase, point, mode, layer, group) for group in _groups(phase, steps)]
    return cases


HEAD_POINTS = ("hc_head", "norm", "logits")


def model_cases(phases: Sequence[str], steps: int, alone: bool = False) -> list[Case]:
    """The model's own points, in the free-running chain; alone: those of the head also behind production's own last layer (parity/outside.py)."""
    cases = []
    for phase in phases:
        for name in ("embed", *HEAD_POINTS):
            modes = ("isolated", "free") if alone and name in HEAD_POINTS else ("free",)
            cases += [Case(phase, spec_of(name).name, mode, None, g) for mode in modes for g in _groups(phase, steps)]
    return cases


@dataclass(frozen=True)
class StateCase:
    """One part of a layer's state, as the passes of one step group left it; steps None: as the prefill left it.

    phase   the phase that reads it: what a prefill leaves matters to decode
    """

    phase: str
    layer: int
    part: str
    steps: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        left = f"-steps{self.steps[0]}to{self.steps[1]}" if self.steps is not None else "-prefilled" if self.phase == "decode" else ""
        return f"{self.phase}-L{self.layer}-{self.part}{left}"


def state_phase(phases: Sequence[str], steps: int) -> str | None:
    """The phase under which stored state is judged: decode where steps read it, else prefill, else none."""
    return "decode" if "decode" in phases and steps > 0 else "prefill" if "prefill" in phases else None


def state_cases(config: ModelConfig, layers: Sequence[int], phases: Sequence[str], steps: int) -> list[StateCase]:
    """Every part of every layer's state, after the prefill and after every group of steps."""
    phase = state_phase(phases, steps)
    if phase is None:
        return []
    groups = (None, *step_groups(steps)) if phase == "decode" else (None,)
    return [StateCase(phase, layer, part, group) for layer in layers for part in state_parts(config, layer) for group in groups]


def _groups(phase: str, steps: int) -> tuple[tuple[int, int] | None, ...]:
    return (None,) if phase == "prefill" else step_groups(steps)
