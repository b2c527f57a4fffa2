"""A saved trace in the place of a production: `pytest parity/ --trace DIR` audits what another process, machine or engine captured.

    opened = open_trace("trace")            # format 1 or 2, one folder or rank-0, rank-1, ...
    player = Player(opened, config, layers) # taps, policy, prefill, decode, as probes/outside/protocol.py has them

The trace brings its own tokens: of the prompt, and of every decode step up to the last one. It may hold any part of the points, in
any part of the passes; `shown` says which, and what is missing is told as not covered. Nothing is computed here.
Tests: parity/unit/test_trace_format.py, parity/unit/test_trace_door.py.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probes.core.trace import DECODE, PREFILL, Pass, Trace
from probes.core.trace_files import SCHEMA, is_point, read_directory, read_manifest
from probes.core.wording import plural
from probes.outside import shapes
from probes.outside.shards import Checked, put_together
from reference.config import InputError, ModelConfig
from reference.formats import Policy
from reference.points import LAYER_POINTS, MODEL_POINTS, Taps, layer_of

HOW = 'next: capture.begin("prefill", tokens=...) and capture.begin("decode", step, tokens=...), or "tokens" of the pass in manifest.json'


@dataclass
class Opened:
    """A trace that was read. checked  what its ranks' copies showed; ranks  those found, of size; notes  for people."""

    root: Path
    trace: Trace
    checked: Checked = field(default_factory=Checked)
    ranks: tuple[int, ...] = (0,)
    size: int = 1
    notes: tuple[str, ...] = ()


def open_trace(directory: str | Path) -> Opened:
    """Read a trace of either format; folders of ranks are put together. Raises InputError, one line."""
    root = Path(directory)
    if not root.is_dir():
        raise InputError(f"{root}: no such directory; expected a trace that probes/capture.py or probes.record wrote")
    folders = sorted(path.parent for path in root.glob("rank-*/manifest.json"))
    if not folders and not (root / "manifest.json").is_file() and (root / "cache.json").is_file():
        raise InputError(f"{root}: it holds a KV cache (cache.json) and no trace; next: python -m probes.kv_cache {root}")
    if not folders:
        manifest = read_manifest(root)
        if manifest.get("schema") != SCHEMA:
            trace = Trace.load(root)
        else:
            raw = read_directory(root, manifest)
            if raw.size > 1:
                raise InputError(f"{root}: rank {raw.rank} of {raw.size} alone; expected the directory that holds every rank-N")
            trace = Trace.of(put_together([raw], root)[0])  # also of one: a part of something, or a sum, says so
        trace.trim()
        return Opened(root, trace, notes=tuple(_told(str(manifest.get("stopped", "")), manifest.get("trouble", ())) + _names(trace)))
    raws = []
    for folder in folders:
        manifest = read_manifest(folder)
        if manifest.get("schema") != SCHEMA:
            raise InputError(f"{folder}: schema {manifest.get('schema')!r}; ranks are of schema {SCHEMA}")
        raws.append(read_directory(folder, manifest))
        if folder.name != f"rank-{raws[-1].rank}":
            raise InputError(f"{folder}: its manifest says rank {raws[-1].rank}")
    whole, checked = put_together(raws, root)
    trace = Trace.of(whole)
    trace.trim()
    ranks, size = tuple(sorted(raw.rank for raw in raws)), raws[0].size
    absent = [str(rank) for rank in range(size) if rank not in ranks]
    notes = [f"rank {', '.join(absent)} of {size} is missing: what it holds a part of is not covered"] if absent else []
    return Opened(root, trace, checked, ranks, size, tuple(notes + _told(whole.stopped, whole.trouble) + _names(trace)))


def _told(stopped: str, trouble: Sequence[str]) -> list[str]:
    return ([f"the capture stopped: {stopped}"] if stopped else []) + [f"the capture says: {said}" for said in trouble[:5]]


def _names(trace: Trace) -> list[str]:
    """Names that are no points."""
    if not trace.other:
        return []
    few = ", ".join(trace.other[:4]) + (", ..." if len(trace.other) > 4 else "")
    return [f"{plural(len(trace.other), 'name is no point', 'names are no points')} and not compared: {few}"]


def _misspelt(trace: Trace, found: frozenset[str]) -> dict[tuple[str, int | None, str], str]:
    """Names that are no points and all but one that the trace does not hold."""
    wrong = {}
    for name in trace.other:
        layer = layer_of(name) if re.match(r"layers\.\d+\.", name) else None
        known = [spec.name for spec in MODEL_POINTS] if layer is None else [f"layers.{layer}.{spec.name}" for spec in LAYER_POINTS]
        near = difflib.get_close_matches(name, [point for point in known if point not in found], n=1, cutoff=0.9)
        for key, one in trace.passes.items():
            if near and name in one.chunks:
                wrong[(*key, near[0])] = f"shown as {name}, which is no point"
    return wrong


def _unusable_notes(unusable: Mapping[tuple[str, int | None, str], str], most: int = 8) -> list[str]:
    """One line a point."""
    first: dict[str, str] = {}
    for (phase, step, name), why in unusable.items():
        first.setdefault(name, f"not usable: {name} in {phase}" + ("" if step is None else f" step {step}") + f": {why}")
    passes = Counter(name for _, _, name in unusable)
    lines = [said + (f"; and in {plural(passes[name] - 1, 'further pass', 'further passes')}" if passes[name] > 1 else "") for name, said in first.items()]
    return lines[:most] + ([f"and {plural(len(lines) - most, 'more point')} that cannot be used"] if len(lines) > most else [])


@dataclass
class Held:
    """How far a trace was played: decode steps so far."""

    step: int = 0


class Player:
    """The trace as a production. A point that a pass does not hold is not emitted there.

    prompts    token ids of each row's prompt; steps  decode steps that it holds tokens of; prefill comes first
    shown      (phase, step) -> points of the judged layers and the model that this pass holds, whole
    unusable   (phase, step, point) -> why what it holds of a point there cannot be used
    """

    continues = False

    def __init__(self, opened: Opened, config: ModelConfig, layers: Sequence[int]) -> None:
        self.opened, self.trace, self.layers = opened, opened.trace, tuple(layers)
        said = self.trace.description
        self.name = f"trace {opened.root.name}" + (f" of {said['engine']}" if said.get("engine") else f" of {said['model']}" if said.get("model") else "")
        declared = said.get("policy")
        self.policy: frozenset[str] = Policy.parse(tuple(declared) if isinstance(declared, list) else declared if declared is not None else frozenset()).points
        self.notes = [*opened.notes, *([] if declared is not None else ["it declares no policy: judged as exact; next: capture.describe(policy=[...])"])]
        _check_layers(opened)
        self.prompts, self.tokens = tokens_of(opened, config.vocab_size)
        self.steps = len(self.tokens)
        own = self._runs_whole_model(config)
        every = [name for name in self.trace.points if (layer_of(name) in self.layers if layer_of(name) is not None else own or name == "embed")]
        self.unusable = {key: why for key, why in self.trace.gaps.items() if key not in self.trace.unseen and is_point(key[2])}
        for (phase, step, name), why in list(self.unusable.items()):
            size = self._size(phase, step)
            if why.startswith("shown as ") and size is not None:
                self.unusable[phase, step, name] = f"{why}, expected {shapes.as_words(shapes.expected(config, name, *size))}"
        for (phase, step), one in self.trace.passes.items():
            for name in [name for name in every if name in one.chunks]:
                value = self.trace.get(name, phase, step)
                why = shapes.wrong(config, name, value, int(value.shape[0]), int(value.shape[1]))
                if why:
                    self.unusable[phase, step, name] = why
        self.shown: dict[tuple[str, int | None], frozenset[str]] = {
            key: frozenset(name for name in every if name in one.chunks and (*key, name) not in self.unusable) for key, one in self.trace.passes.items()
        }
        found = frozenset().union(*self.shown.values())
        self.taps = Taps(tuple(name for name in every if name in found))
        self.unusable |= _misspelt(self.trace, found)
        self.notes += _unusable_notes(self.unusable)
        if not found:
            raise InputError(f"{opened.root}: it holds no point of layers {self.layers[0]} to {self.layers[-1]}; names of points: reference/points.py" + (f"; it holds {', '.join(self.trace.other[:3])}" if self.trace.other else ""))

    def _size(self, phase: str, step: int | None) -> tuple[int, int] | None:
        """Rows and queries of a pass, where it says them."""
        one = self.trace.passes.get((phase, step))
        facts = None if one is None else one.tokens if one.tokens is not None else one.positions
        return None if facts is None else (int(facts.shape[0]), int(facts.shape[1]))

    def _runs_whole_model(self, config: ModelConfig) -> bool:
        """Whether what it shows behind the layers follows the layers that the reference runs."""
        said = self.trace.description.get("layers")
        count = len(said) if isinstance(said, list) else int(said) if isinstance(said, int) else config.num_hidden_layers
        if count == len(self.layers):
            return True
        behind = [name for name in ("hc_head", "norm", "logits") if name in self.trace.points]
        if behind:
            self.notes.append(f"{', '.join(behind)} are not compared: its model has {plural(count, 'layer')}, here {len(self.layers)} are run")
        return False

    def holds(self, point: str, phase: str, step: int | None) -> bool:
        return point in self.shown.get((phase, step), ())

    def new_state(self, batch: int = 1, max_context: int | None = None) -> Held:
        return Held()

    def prefill(self, tokens: Tensor, state: Held, lengths: Tensor | None = None) -> None:
        self._show(PREFILL, None)

    def decode(self, tokens: Tensor, state: Held) -> None:
        self._show(DECODE, state.step)
        state.step += 1

    def decode_tokens(self, step: int) -> list[int]:
        """What it was given at a step, one id a row."""
        return self.tokens[step]

    def _show(self, phase: str, step: int | None) -> None:
        for name in self.taps.points:
            if self.holds(name, phase, step) and self.taps.wants(name):
                self.taps.emit(name, self.trace.get(name, phase, step))


def _check_layers(opened: Opened) -> None:
    """The layers that the description names are those that the tensors are of, or more. Raises InputError."""
    said = opened.trace.description.get("layers")
    held = sorted({layer for name in opened.trace.points if (layer := layer_of(name)) is not None})
    if isinstance(said, list) and set(held) - set(said):
        raise InputError(f"{opened.root}: its manifest says layers {said}, and it holds tensors of layers {held}; next: capture.describe(layers=[...]) with every layer that the model runs")


def tokens_of(opened: Opened, vocab: int) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """The prompts, and the tokens of every decode step. Raises InputError where they are not given, or do not follow each other."""
    trace, root = opened.trace, opened.root
    found = trace.passes.get((PREFILL, None))
    if found is None or found.tokens is None:
        raise InputError(f"{root}: {'no prefill is listed' if found is None else 'prefill has no token ids'}: the reference needs the prompt's tokens; {HOW}")
    mask = torch.ones_like(found.tokens, dtype=torch.bool) if found.valid is None else found.valid
    lengths = mask.sum(1)
    if bool((mask != (torch.arange(mask.shape[1])[None, :] < lengths[:, None])).any()):
        raise InputError(f"{root}: prefill has pads before or between tokens; next: pads at the end of a row, or flat tokens with lengths")
    prompts = [tuple(row[:n].tolist()) for row, n in zip(found.tokens, lengths, strict=True)]
    _check_positions(root, found, torch.arange(mask.shape[1])[None, :].expand(mask.shape), mask)
    steps = trace.steps()
    if steps != tuple(range(len(steps))):
        absent = next(step for step in range(len(steps)) if step not in steps)
        raise InputError(f"{root}: decode step {absent} is missing, and step {steps[-1]} is there: the reference needs the tokens of every step; {HOW}")
    rows = []
    for step in steps:
        one = trace.passes[DECODE, step]
        if one.tokens is None or tuple(one.tokens.shape) != (len(prompts), 1):
            got = "no token ids" if one.tokens is None else f"tokens {list(one.tokens.shape)}"
            raise InputError(f"{root}: decode step {step} has {got}, expected one of each of {plural(len(prompts), 'row')}; {HOW}")
        _check_positions(root, one, (lengths + step)[:, None], torch.ones_like(one.tokens, dtype=torch.bool))
        rows.append(one.tokens[:, 0].tolist())
    for token in (token for row in [*prompts, *rows] for token in row):
        if not 0 <= token < vocab:
            raise InputError(f"{root}: token id {token} is out of range 0..{vocab - 1} of the checkpoint")
    return prompts, rows


def _check_positions(root: Path, one: Pass, want: Tensor, mask: Tensor) -> None:
    if one.positions is None or torch.equal(one.positions[mask], want[mask]):
        return
    b, s = (int(i) for i in ((one.positions != want) & mask).nonzero()[0])
    at = one.phase + ("" if one.step is None else f" step {one.step}")
    hint = "; next: capture with prefix caching off" if one.phase == PREFILL and int(one.positions[b, 0]) > 0 else ""
    raise InputError(f"{root}: {at} row {b}: token {s} stands at position {int(one.positions[b, s])}, expected {int(want[b, s])}{hint}")


def facts_of(opened: Opened) -> dict[str, Any]:
    """What a report says of a trace."""
    dtypes = sorted(set(opened.trace.dtypes.values()))
    return {"trace": str(opened.root), "ranks": len(opened.ranks), "of": opened.size, "passes": len(opened.trace.passes), "dtypes": dtypes, **{key: opened.trace.description.get(key) for key in ("engine", "model")}}
