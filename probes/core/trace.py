"""A trace: what the taps of one model showed, pass by pass, in memory and on disk.

A pass is one prefill or one decode step, keyed by (phase, step). On disk a trace is a directory: `manifest.json` with the
schema, the points and their legends, positions, valid masks, token ids and the model's description, and one safetensors
file per pass. Nothing is decoded or judged here; nothing but safetensors is read. Written is format 2; 1 is read too.

    trace = Trace.load("trace-reference"); trace.get("layers.2.attn.q", "prefill")

Tests: parity/unit/test_trace.py.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from probes.core.trace_files import (
    KIND,
    SCHEMA,
    Raw,
    assemble,
    is_point,
    read_directory,
    read_manifest,
    read_tensors,
    whole_numbers,
)
from reference.config import InputError
from reference.points import INDICES, SCORES, VALUES, spec_of

FIRST_SCHEMA = 1
PREFILL, DECODE = "prefill", "decode"
CALL = "call"  # the pass that takes what is shown before the first `begin`
PHASES = (PREFILL, DECODE, CALL)
PADS = {SCORES: float("-inf"), INDICES: -1.0}  # how the last axis grows when widths differ

PassKey = tuple[str, int | None]


@dataclass
class Pass:
    """One prefill (step None) or one decode step (0-based).

    positions  [b, s] int64, absolute position of each query; None when nobody said
    valid      [b, s] bool, False for pads; None: every query is valid
    tokens     [b, s] int64; None when nobody said
    chunks     per point, what was shown, in order of s; `Trace.get` joins them
    """

    phase: str
    step: int | None
    positions: Tensor | None = None
    valid: Tensor | None = None
    tokens: Tensor | None = None
    chunks: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def key(self) -> PassKey:
        return (self.phase, self.step)


def kind_of(name: str) -> str:
    """How a name is compared; what is no point holds plain values."""
    return spec_of(name).kind if is_point(name) else VALUES


def copy_of(point: str, value: Tensor) -> Tensor:
    """A packed CPU copy of a shown value: fp32, int64 for indices; NaN and infinities stay."""
    if value.dim() < 2:
        raise RuntimeError(f"{point}: shown with shape {list(value.shape)}; every point starts with [b, s]")
    dtype = torch.int64 if kind_of(point) == INDICES else torch.float32
    return torch.empty(value.shape, dtype=dtype).copy_(value.detach())


def join(point: str, parts: Sequence[Tensor]) -> Tensor:
    """Parts of one point along s. SCORES and INDICES may differ in their last axis: it grows at its end (-inf, -1)."""
    if len(parts) == 1:
        return parts[0]
    pad = PADS.get(kind_of(point))
    if pad is not None:
        width = max(part.shape[-1] for part in parts)
        parts = [grow_last(part, width, pad) for part in parts]
    shapes = {(part.shape[0], *part.shape[2:]) for part in parts}
    if len(shapes) > 1:
        raise RuntimeError(f"{point}: its parts differ in shape beyond s: {[list(part.shape) for part in parts[:4]]}")
    return torch.cat(list(parts), dim=1)


def grow_last(value: Tensor, width: int, fill: float) -> Tensor:
    """`value` with its last axis padded at the end to `width`."""
    missing = width - value.shape[-1]
    return value if missing <= 0 else torch.nn.functional.pad(value, (0, missing), value=fill)


class Trace:
    """What was recorded. A recorder fills it; `get`, `stack` and `fired` read it; `save` and `load` keep it.

    points       names that were asked for; other  names in it that are no points: kept, compared by probes.diff only
    gaps         (phase, step, name) -> why a saved value cannot be used: read from disk only; unseen  those of them that were never there
    dtypes       (phase, step, name) -> as stored, where that is known
    description  facts of the model and the run, plain JSON
    passes       (phase, step) -> Pass, in order of recording
    """

    def __init__(self, points: Iterable[str], description: Mapping[str, Any] | None = None) -> None:
        self.points = tuple(dict.fromkeys(points))
        for point in self.points:
            spec_of(point)
        self.other: tuple[str, ...] = ()
        self.gaps: dict[tuple[str, int | None, str], str] = {}
        self.unseen: set[tuple[str, int | None, str]] = set()
        self.dtypes: dict[tuple[str, int | None, str], str] = {}
        self.description: dict[str, Any] = dict(description or {})
        self.passes: dict[PassKey, Pass] = {}
        self._current: Pass | None = None
        self._stacks: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}

    # ---- recording ----

    def begin(
        self,
        phase: str,
        step: int | None = None,
        positions: Tensor | None = None,
        valid: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        """Open a pass: everything shown from now on belongs to it. phase "prefill", or "decode" with a 0-based step."""
        if phase not in PHASES:
            raise InputError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
        if (phase == DECODE) != (step is not None) or (step is not None and step < 0):
            raise InputError(f"phase {phase!r} with step {step!r}: decode steps count from 0, a prefill has none")
        if (phase, step) in self.passes:
            raise RuntimeError(f"pass {phase} {step} is recorded already; a trace holds each pass once")
        self._current = Pass(
            phase, step, _plain(positions, torch.int64), _plain(valid, torch.bool), _plain(tokens, torch.int64)
        )  # fmt: skip
        self.passes[phase, step] = self._current

    @property
    def current(self) -> PassKey:
        """The open pass; (CALL, None) before the first `begin`."""
        return (CALL, None) if self._current is None else self._current.key

    def add(self, point: str, value: Tensor) -> None:
        """Take a copy of a shown value into the open pass."""
        if self._current is None:
            self.begin(CALL)
        assert self._current is not None
        self._stacks.clear()
        self._current.chunks.setdefault(point, []).append(copy_of(point, value))

    # ---- reading ----

    def fired(self, point: str, phase: str = PREFILL, step: int | None = None) -> bool:
        """True when the point was shown at least once in that pass."""
        found = self.passes.get((phase, step))
        return found is not None and bool(found.chunks.get(point))

    def get(self, point: str, phase: str | None = None, step: int | None = None) -> Tensor:
        """The value of a point in one pass, chunks joined: [b, s, ...] fp32, int64 for indices.

        Without a phase the trace must hold the point in exactly one pass. Raises KeyError when it was not recorded.
        """
        if phase is None:
            holders = [p for p in self.passes.values() if point in p.chunks]
            if len(holders) != 1:
                raise KeyError(f"{point} was shown in {len(holders)} passes; name the phase and step")
            found = holders[0]
        else:
            maybe = self.passes.get((phase, step))
            if maybe is None or not maybe.chunks.get(point):
                raise KeyError(f"{point} was not shown in {phase}" + ("" if step is None else f" step {step}"))
            found = maybe
        parts = found.chunks[point]
        if len(parts) > 1:
            found.chunks[point] = parts = [join(point, parts)]
        value = parts[0]
        for name, mask in (("positions", found.positions), ("valid", found.valid), ("tokens", found.tokens)):
            if mask is not None and tuple(mask.shape) != tuple(value.shape[:2]):
                raise RuntimeError(
                    f"{point} in {found.key}: shown for {list(value.shape[:2])} queries, {name} say {list(mask.shape)}"
                )
        return value

    def steps(self, phase: str = DECODE) -> tuple[int, ...]:
        """Recorded steps of a phase, ascending."""
        return tuple(sorted(step for p, step in self.passes if p == phase and step is not None))

    def stack(self, point: str, phase: str = DECODE, steps: Sequence[int] | None = None) -> Tensor:
        """The value of a point over decode steps, joined along s: [b, steps, ...]. Raises KeyError on a missing step."""
        chosen = self.steps(phase) if steps is None else tuple(steps)
        key = (point, phase, chosen)
        if key not in self._stacks:
            if not chosen:
                raise KeyError(f"{point}: no steps of {phase} recorded")
            self._stacks[key] = join(point, [self.get(point, phase, step) for step in chosen])
        return self._stacks[key]

    def stacked_positions(self, steps: Sequence[int] | None = None) -> Tensor:
        """Positions over decode steps: [b, steps] int64."""
        return self._stack_of("positions", steps)

    def stacked_valid(self, steps: Sequence[int] | None = None) -> Tensor | None:
        """Valid mask over decode steps: [b, steps] bool, None when no step carries one."""
        chosen = self.steps() if steps is None else tuple(steps)
        return None if all(self.passes[DECODE, step].valid is None for step in chosen) else self._stack_of("valid", steps)

    def _stack_of(self, name: str, steps: Sequence[int] | None) -> Tensor:
        chosen = self.steps() if steps is None else tuple(steps)
        parts = [getattr(self.passes[DECODE, step], name) for step in chosen]
        if not parts or any(part is None for part in parts):
            raise KeyError(f"not every decode step carries {name}")
        return torch.cat(parts, dim=1)

    def keys(self) -> tuple[tuple[str, int | None, str], ...]:
        """(phase, step, point) of everything that was shown."""
        return tuple((p.phase, p.step, point) for p in self.passes.values() for point in p.chunks)

    def trim(self) -> None:
        """Drop the pads behind the longest row of each pass, where every row has its pads at its end."""
        for one in self.passes.values():
            if one.valid is None:
                continue
            lengths, width = one.valid.sum(1), one.valid.shape[1]
            most = int(lengths.max()) if len(lengths) else 0
            if not most or bool((one.valid != (torch.arange(width)[None, :] < lengths[:, None])).any()):
                continue
            if most < width:
                one.chunks = {name: [join(name, parts)[:, :most]] for name, parts in one.chunks.items()}
                one.tokens, one.positions = (None if fact is None else fact[:, :most] for fact in (one.tokens, one.positions))
            one.valid = None if bool((lengths == most).all()) else one.valid[:, :most]
            self._stacks.clear()

    # ---- disk ----

    def save(self, directory: str | Path) -> Path:
        """Write the trace as a new directory; whole or not at all. Raises InputError when it cannot be written."""
        target = Path(directory)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"{target}: exists and is not empty; give a new directory for the trace")
        tensors = [{point: self.get(point, *p.key) for point in p.chunks} for p in self.passes.values()]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        except OSError as error:
            raise InputError(f"{target}: cannot be written: {error.strerror}") from None
        try:
            listed = []
            for number, (one, held) in enumerate(zip(self.passes.values(), tensors, strict=True)):
                name = f"{number:04d}-{one.phase}" + ("" if one.step is None else f"-{one.step}") + ".safetensors"
                save_file({point: value.contiguous() for point, value in held.items()}, building / name)
                listed.append(_pass_entry(one, name, held))
            manifest = {
                "kind": KIND,
                "schema": SCHEMA,
                "description": self.description,
                "rank": 0,
                "size": 1,
                "points": {point: _point_entry(point) for point in self.points},
                "passes": listed,
            }
            text = json.dumps(manifest, indent=1, allow_nan=False, ensure_ascii=False)
            (building / "manifest.json").write_text(text + "\n", encoding="utf-8")
            building.chmod(0o755)
            os.replace(building, target)
        except OSError as error:
            raise InputError(f"{target}: cannot be written: {error.strerror}") from None
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return target

    @classmethod
    def load(cls, directory: str | Path) -> Trace:
        """Read a saved trace, strictly. Raises InputError: no trace, another schema, a missing or broken part."""
        root = Path(directory)
        path = root / "manifest.json"
        if not path.is_file() and any(root.glob("rank-*/manifest.json")):
            raise InputError(f"{root}: a trace of several ranks; next: probes.outside.trace.open_trace puts it together")
        manifest = read_manifest(root)
        if manifest.get("schema") == SCHEMA:
            return cls.of(read_directory(root, manifest))
        if manifest.get("schema") != FIRST_SCHEMA:
            raise InputError(f"{path}: schema {manifest.get('schema')!r}; this version reads {FIRST_SCHEMA} and {SCHEMA}")
        try:
            trace = cls(manifest["points"], manifest["description"])
            for entry in manifest["passes"]:
                trace._load_pass(root, entry)
        except InputError as error:
            raise InputError(f"{path}: {error}" if str(root) not in str(error) else str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise InputError(f"{path}: broken manifest: {type(error).__name__}: {str(error).splitlines()[0]}") from None
        trace._current = None
        return trace

    @classmethod
    def of(cls, raw: Raw) -> Trace:
        """A trace of what a folder (or folders that were put together) holds. Raises InputError."""
        path = raw.root / "manifest.json"
        names = dict.fromkeys([*raw.points, *(name for one in raw.passes for name in one.parts)])
        trace = cls([name for name in names if is_point(name)], raw.description)
        trace.other = tuple(name for name in names if not is_point(name))
        try:
            for one in assemble(raw):
                trace.begin(one.phase, one.step, one.positions, one.valid, one.tokens)
                for name, value in one.values.items():
                    trace.passes[one.phase, one.step].chunks[name] = [value]
                    trace.dtypes[one.phase, one.step, name] = one.dtypes[name]
                    trace.get(name, one.phase, one.step)  # positions, valid and tokens agree with it
                trace.gaps |= {(one.phase, one.step, name): why for name, why in one.gaps.items()}
                trace.unseen |= {(one.phase, one.step, name) for name in one.unseen}
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{path}: broken manifest: {type(error).__name__}: {str(error).splitlines()[0]}") from None
        trace._current = None
        return trace

    def _load_pass(self, root: Path, entry: Mapping[str, Any]) -> None:
        name = entry["file"]
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{root / 'manifest.json'}: {name!r} is no .safetensors file of this directory")
        path = root / name
        self.begin(
            entry["phase"],
            entry["step"],
            _from_list(entry["positions"], torch.int64),
            _from_list(entry["valid"], torch.bool),
            _from_list(entry["tokens"], torch.int64),
        )
        found = self.passes[entry["phase"], entry["step"]]
        listed = entry["tensors"]
        held = read_tensors(path, listed)
        for point in held:
            if point not in self.points:
                raise InputError(f"{path}: {point!r} is not among the manifest's points")
        for point, shape in listed.items():
            value = held[point]
            dtype = torch.int64 if spec_of(point).kind == INDICES else torch.float32
            if list(value.shape) != shape or value.dtype != dtype:
                raise InputError(f"{path}: {point}: {value.dtype} {list(value.shape)}, expected {dtype} {shape}")
            found.chunks[point] = [value]
            self.get(point, *found.key)  # positions, valid and tokens agree with it


def _plain(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A copy of [b, s] facts about a pass."""
    if value is None:
        return None
    if value.dim() != 2:
        raise RuntimeError(f"positions, valid and tokens are [b, s], got shape {list(value.shape)}")
    return value.detach().to("cpu", dtype, copy=True)


def _from_list(value: Any, dtype: torch.dtype) -> Tensor | None:
    if value is not None and dtype == torch.int64:
        whole_numbers("tokens or positions", value)
    return None if value is None else torch.tensor(value, dtype=dtype)


def _point_entry(point: str) -> dict[str, Any]:
    spec = spec_of(point)
    return {"shape": spec.shape, "kind": spec.kind, "sparse": spec.sparse, "meaning": spec.meaning}


def _pass_entry(one: Pass, file: str, held: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "phase": one.phase,
        "step": one.step,
        "file": file,
        "positions": None if one.positions is None else one.positions.tolist(),
        "valid": None if one.valid is None else one.valid.tolist(),
        "tokens": None if one.tokens is None else one.tokens.tolist(),
        "tensors": {
            point: {"point": point, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "shard": None}
            for point, value in held.items()
        },
    }
