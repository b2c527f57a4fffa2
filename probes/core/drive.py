"""Run one model over prompts and decode steps with a recorder attached.

Decode is fed the text's own next tokens; where a text has ended, the most likely token of the model that runs first, so
that two models always see the same tokens. Models are passed in. Tests: parity/unit/test_drive.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from probes.core.inputs import Prompt, batch_of, forced_tokens
from probes.core.recorder import Recorder
from probes.core.trace import DECODE, PREFILL, Trace
from reference.config import InputError, ModelConfig
from reference.points import Taps

SELECTED, EXPERTS = "attn.selected", "ffn.experts"


class Model(Protocol):
    """What both models offer."""

    @property
    def taps(self) -> Taps: ...
    @property
    def config(self) -> ModelConfig: ...
    def new_state(self, batch: int, max_context: int | None = None) -> Any: ...
    def prefill(
        self, tokens: Tensor, state: Any, lengths: Tensor | None = None, choices: Mapping[str, Tensor] | None = None
    ) -> Tensor: ...
    def decode(self, tokens: Tensor, state: Any, choices: Mapping[str, Tensor] | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Run:
    """One model's run. tokens [b, steps]: what decode was fed."""

    trace: Trace
    tokens: Tensor


@contextmanager
def decoding(model: Any, how: str) -> Iterator[None]:
    """Inside, a model decodes "eager", launch by launch, or "replay", from captured graphs. Raises InputError where it has none."""
    kept = getattr(model, "decoding", None)
    if kept is None:
        raise InputError("this model has no graphs")
    model.decoding = how
    try:
        yield
    finally:
        model.decoding = kept


def run_model(
    model: Model,
    prompts: Sequence[Prompt],
    points: Iterable[str] | None,
    steps: int,
    max_context: int | None = None,
    tokens: Tensor | None = None,
    replay: Trace | None = None,
    phases: Sequence[str] | None = None,
    description: Mapping[str, Any] | None = None,
) -> Run:
    """One prefill and `steps` decode steps.

    tokens   [b, steps] to feed instead of the prompts' continuations
    replay   another model's trace: its selected entries and experts are used instead of own choices
    phases   recorded phases; None for both
    """
    batch, lengths = batch_of(prompts)
    state = model.new_state(len(prompts), max_context)
    feed = forced_tokens(prompts, steps) if tokens is None else tokens
    if tuple(feed.shape) != (len(prompts), steps):
        raise InputError(f"tokens: expected [{len(prompts)}, {steps}], got {list(feed.shape)}")
    feed = feed.clone()
    positions = torch.arange(batch.shape[1]).expand(batch.shape)
    with Recorder(model, points, phases=phases, description=description) as trace:
        trace.begin(PREFILL, None, positions, positions < lengths[:, None], batch)
        logits = model.prefill(batch, state, lengths, choices=_choices(model, replay, PREFILL, None, positions))
        last = logits[torch.arange(len(prompts), device=logits.device), (lengths - 1).to(logits.device)]
        for step in range(steps):
            own = feed[:, step] < 0
            if bool(own.any()):
                feed[own, step] = last.argmax(-1).cpu()[own]
            at = (lengths + step)[:, None]
            trace.begin(DECODE, step, at, None, feed[:, step : step + 1])
            last = model.decode(feed[:, step], state, choices=_choices(model, replay, DECODE, step, at))
    return Run(trace, feed)


def choice_points(points: Iterable[str]) -> tuple[str, ...]:
    """The points among these whose values are choices that another model can replay."""
    return tuple(point for point in points if point.endswith((SELECTED, EXPERTS)))


def _choices(model: Model, replay: Trace | None, phase: str, step: int | None, positions: Tensor) -> dict[str, Tensor] | None:
    """Recorded choices, with what no model could use made harmless: an entry to "none", an expert to 0."""
    if replay is None:
        return None
    out = {}
    for point in choice_points(model.taps.points):
        value = replay.get(point, phase, step).clone()
        if point.endswith(SELECTED):
            value[(value < 0) | (value >= ((positions + 1) // 4)[..., None])] = -1
        else:
            value[(value < 0) | (value >= model.config.n_routed_experts)] = 0
        out[point] = value
    return out
