"""Format 2 of a trace on disk, as probes/capture.py and `Trace.save` write it: read strictly, put together, made a `Trace`.

`read_directory` gives what one folder holds, as stored; `assemble` puts chunks, flat tokens and repeated shows into the axes
[b, s, ...] of the points. What a pass lists but cannot be used is a gap with its reason, never a value. Folders of several
ranks are put together before that (probes/outside/shards.py). The format: docs/trace.md. Tests: parity/unit/test_trace_format.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from probes.core.wording import plural
from reference.config import InputError
from reference.points import INDICES, SCORES, spec_of

SCHEMA = 2
KIND = "dsv4-trace"
PHASES = ("prefill", "decode", "call")
SHARD_DIMS = {"column": -1, "head": -2, "row": 0, "concat": None}  # which axis a kind of shard is a part of
SHARD_KINDS = ("replicated", *SHARD_DIMS, "sum", "expert")
SHARD_FIELDS = {"index": 0, "count": 1, "of": 1, "dim": None}  # whole numbers of a description, and the least

PassKey = tuple[str, int | None]


@dataclass(frozen=True)
class Part:
    """One shown tensor, as stored, and which part of the whole it is (None: all of it)."""

    value: Tensor
    shard: Mapping[str, Any] | None = None


@dataclass
class RawPass:
    """One pass of one folder. tokens, positions, valid: [b, s] or flat [t] as given; lengths [b] of flat tokens.

    parts    per name, what was shown, in order; unseen  name -> why nothing was
    refused  name -> why what was shown could not be kept
    """

    phase: str
    step: int | None
    chunk: int = 0
    tokens: Any = None
    positions: Any = None
    lengths: Any = None
    valid: Any = None
    parts: dict[str, list[Part]] = field(default_factory=dict)
    unseen: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int | None, int]:
        return (self.phase, self.step, self.chunk)

    @property
    def words(self) -> str:
        return self.phase + ("" if self.step is None else f" step {self.step}") + (f" chunk {self.chunk}" if self.chunk else "")


@dataclass
class Raw:
    """One folder. rank of size ranks; stopped  why it took no more; trouble  what went wrong while it was captured."""

    root: Path
    description: dict[str, Any]
    passes: list[RawPass]
    points: tuple[str, ...] = ()
    rank: int = 0
    size: int = 1
    stopped: str = ""
    trouble: tuple[str, ...] = ()


def shard_problem(shard: Mapping[str, Any]) -> str:
    """What is wrong in a shard's description, in a line; "" where nothing is."""
    kind = shard.get("kind", "replicated")
    if not isinstance(kind, str) or kind not in SHARD_KINDS:
        return f"shard kind {kind!r}, expected one of {', '.join(SHARD_KINDS)}"
    extra = {"expert": {"dim", "experts", "of", "dtype"}, "sum": {"dtype"}, "replicated": set()}.get(kind, {"dim"})
    unknown = sorted(set(shard) - {"kind", "index", "count"} - extra)
    if unknown:
        return f"shard of kind {kind} says {', '.join(map(str, unknown))}, expected {', '.join(sorted({'index', 'count'} | extra))}"
    for name, least in SHARD_FIELDS.items():
        value = shard.get(name, least or 0)
        if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
            return f"shard of kind {kind}: {name} {value!r}, expected a whole number" + ("" if least is None else f" from {least}")
    if "index" in shard and "count" in shard and shard["index"] >= shard["count"]:
        return f"shard of kind {kind}: index {shard['index']} of {shard['count']}, expected 0 to {shard['count'] - 1}"
    dtype = shard.get("dtype", "float32")
    if not isinstance(dtype, str) or not isinstance(found := getattr(torch, dtype, None), torch.dtype) or not found.is_floating_point:
        return f"shard of kind {kind}: dtype {dtype!r}, expected a floating-point dtype of torch, e.g. 'float32'"
    experts = shard.get("experts", [])
    if not isinstance(experts, list | tuple) or any(not isinstance(e, int) or isinstance(e, bool) or not 0 <= e < shard.get("of", 1 << 31) for e in experts) or len(set(experts)) < len(experts):
        return f"shard of kind {kind}: experts {experts!r}, expected different whole numbers from 0" + (f" to {shard['of'] - 1}" if "of" in shard else "")
    return ""


def whole_numbers(name: str, value: Any) -> Any:
    """Token ids, positions or lengths of a manifest as they are. Raises InputError for 475.7, which a cast would make 475."""
    for one in (item for row in value for item in (row if isinstance(row, list) else [row])):
        if not isinstance(one, int) or isinstance(one, bool):
            raise InputError(f"{name}: {one!r}, expected whole numbers")
    return value


def is_point(name: str) -> bool:
    """Whether a name is one of reference/points.py."""
    try:
        spec_of(name)
    except InputError:
        return False
    return True


def dims_of(point: str) -> int:
    """How many axes a point has: its legend is [b, s, ...]."""
    return spec_of(point).shape.split("]")[0].count(",") + 1


def read_manifest(root: Path) -> dict[str, Any]:
    """The manifest of a folder, any schema. Raises InputError."""
    path = root / "manifest.json"
    if not path.is_file():
        raise InputError(f"{root}: no manifest.json; this is not a saved trace")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: broken JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise InputError(f"{path}: expected a manifest of kind {KIND!r}")
    return manifest


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not strict JSON")


def read_directory(root: Path, manifest: Mapping[str, Any]) -> Raw:
    """What a folder of schema 2 holds. Raises InputError: a missing, truncated or unlisted part, one line that says which."""
    path = root / "manifest.json"
    try:
        raw = Raw(
            root, dict(manifest["description"]), [], tuple(manifest.get("points", {})), int(manifest.get("rank", 0)), int(manifest.get("size", 1)),
            str(manifest.get("stopped", "")), tuple(manifest.get("trouble", ())),
        )  # fmt: skip
        for entry in manifest["passes"]:
            raw.passes.append(_read_pass(root, entry))
            if len({one.key for one in raw.passes}) < len(raw.passes):
                raise InputError(f"{path}: {raw.passes[-1].words} is listed already; a trace holds each pass once")
    except InputError as error:
        raise InputError(f"{path}: {error}" if str(root) not in str(error) else str(error)) from None
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        said = str(error).splitlines() or [""]
        raise InputError(f"{path}: broken manifest: {type(error).__name__}: {said[0]}") from None
    return raw


def read_tensors(path: Path, listed: Collection[str]) -> dict[str, Tensor]:
    """A file's tensors by name: those that are listed and no others. Raises InputError."""
    if not path.is_file():
        raise InputError(f"{path}: missing; the manifest lists it")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: truncated or broken: {str(error).splitlines()[0]}") from None
    for key in (*listed, *held):
        if key not in held:
            raise InputError(f"{path}: tensor {key!r} is missing; the manifest lists it")
        if key not in listed:
            raise InputError(f"{path}: holds {key!r}, which the manifest does not list")
    return held


def _read_pass(root: Path, entry: Mapping[str, Any]) -> RawPass:
    name = entry["file"]
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        raise InputError(f"{root / 'manifest.json'}: {name!r} is no .safetensors file of this directory")
    path = root / name
    phase, step = entry["phase"], entry["step"]
    if phase not in PHASES:
        raise InputError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
    if (phase == "decode") != isinstance(step, int) or isinstance(step, bool) or (isinstance(step, int) and step < 0):
        raise InputError(f"phase {phase!r} with step {step!r}: decode steps count from 0, a prefill has none")
    facts = {name: entry.get(name) for name in ("tokens", "positions", "lengths", "valid")}
    for name, value in facts.items():
        if value is not None:
            shape = torch.tensor(value).shape  # ragged lists raise
            if name != "valid":
                whole_numbers(f"{name} of {phase}" + ("" if step is None else f" step {step}"), value)
            elif not bool(((given := torch.tensor(value)) == 0).logical_or(given == 1).all()):
                raise InputError(f"valid of {phase}: expected true or false")
            if len(shape) not in (1, 2):
                raise InputError(f"{name} of {phase} are [b, s] or flat, got {list(shape)}")
    one = RawPass(phase, step, int(entry.get("chunk", 0)), facts["tokens"], facts["positions"], facts["lengths"], facts["valid"], unseen=dict(entry.get("unseen", {})), refused=dict(entry.get("refused", {})))
    listed = entry["tensors"]
    held = read_tensors(path, listed)
    for key, said in listed.items():
        value, dtype = held[key], str(held[key].dtype).removeprefix("torch.")
        if list(value.shape) != said["shape"] or dtype != said["dtype"]:
            raise InputError(f"{path}: {key}: {dtype} {list(value.shape)}, expected {said['dtype']} {said['shape']}")
        shard = said.get("shard")
        if shard is not None and not isinstance(shard, dict):
            raise InputError(f"{path}: {key}: shard {shard!r} is no description")
        one.parts.setdefault(said.get("point", key), []).append(Part(value, shard))
    return one


# ---- axes ----


@dataclass
class Layout:
    """How the tokens of one chunk lie: rows of `width`, or flat. lengths [b]."""

    lengths: list[int]
    width: int
    flat: bool

    @property
    def count(self) -> int:
        return sum(self.lengths) if self.flat else len(self.lengths) * self.width

    def rows(self, value: Tensor, dims: int | None = None) -> list[Tensor] | None:
        """Per batch row, its tokens [n, ...]; None where the value has other tokens.

        dims  of the point's legend, [b, s, ...]: one axis less is flat. None: what the tokens are, if it fits
        """
        b = len(self.lengths)
        batched = value.dim() >= 2 and tuple(value.shape[:2]) == (b, self.width) and (not self.flat or len(set(self.lengths)) == 1)
        flat = value.dim() >= 1 and value.shape[0] == self.count
        if dims is not None:
            batched, flat = batched and value.dim() == dims, flat and value.dim() == dims - 1
        elif batched and flat:
            batched = not self.flat or value.dim() >= 3
        if batched:
            return [value[i, : self.lengths[i]] for i in range(b)]
        if flat:
            return list(value.split(self.lengths)) if self.flat else [part[:n] for part, n in zip(value.split(self.width), self.lengths, strict=True)]
        return None


def layout_of(one: RawPass, values: Sequence[Tensor] = ()) -> Layout | None:
    """How a pass lays its tokens out, by its tokens (else positions, else its first value); None where nobody knows."""
    given = one.tokens if one.tokens is not None else one.positions
    if given is None:
        shown = next((value for value in values if value.dim() >= 2), None)
        return None if shown is None else Layout([int(shown.shape[1])] * int(shown.shape[0]), int(shown.shape[1]), False)
    shape = tuple(torch.tensor(given).shape)
    if len(shape) == 2:
        valid = None if one.valid is None else torch.tensor(one.valid, dtype=torch.bool)
        if valid is not None and tuple(valid.shape) != shape:
            raise InputError(f"{one.words}: valid {list(valid.shape)}, tokens {list(shape)}")
        lengths = [shape[1]] * shape[0] if valid is None else [int(n) for n in valid.sum(1)]
        return Layout(lengths, shape[1], False)
    if one.lengths is not None:
        lengths = [int(n) for n in one.lengths]
        if sum(lengths) != shape[0] or min(lengths, default=0) < 0:
            raise InputError(f"{one.words}: lengths {lengths} of {shape[0]} tokens")
        return Layout(lengths, max(lengths, default=0), True)
    return Layout([1] * shape[0], 1, True) if one.phase == "decode" else Layout([shape[0]], shape[0], True)


@dataclass
class Assembled:
    """One pass in the axes of the points: values [b, s, ...], facts [b, s], and what could not be used; `unseen` of that was never there."""

    phase: str
    step: int | None
    tokens: Tensor | None
    positions: Tensor | None
    valid: Tensor | None
    values: dict[str, Tensor]
    dtypes: dict[str, str]
    gaps: dict[str, str]
    unseen: frozenset[str] = frozenset()


def assemble(raw: Raw) -> list[Assembled]:
    """The passes of a folder, chunks of a prefill joined row by row. Raises InputError where their facts contradict each other."""
    groups: dict[PassKey, list[RawPass]] = {}
    for one in raw.passes:
        groups.setdefault((one.phase, one.step), []).append(one)
    return [_assembled(raw, key, sorted(chunks, key=lambda one: one.chunk)) for key, chunks in groups.items()]


def _assembled(raw: Raw, key: PassKey, chunks: list[RawPass]) -> Assembled:
    names = list(dict.fromkeys(name for one in chunks for name in one.parts))
    layouts = []
    for one in chunks:
        found = layout_of(one, [part.value for parts in one.parts.values() for part in parts])
        if found is None:
            return Assembled(*key, None, None, None, {}, {}, {name: "neither tokens nor positions are given" for name in names} | _unseen(chunks), frozenset(_unseen(chunks)))
        layouts.append(found)
    if len({len(layout.lengths) for layout in layouts}) > 1:
        raise InputError(f"{chunks[0].words}: its chunks have {' and '.join(str(len(layout.lengths)) for layout in layouts)} rows")
    lengths = [sum(row) for row in zip(*(layout.lengths for layout in layouts), strict=True)]
    out = Assembled(*key, None, None, None, {}, {}, _unseen(chunks) | {name: why for one in chunks for name, why in one.refused.items()})
    out.unseen = frozenset(_unseen(chunks)) - {name for one in chunks for name in one.refused}
    for fact, dtype in (("tokens", torch.int64), ("positions", torch.int64)):
        given = [getattr(one, fact) for one in chunks]
        if all(value is not None for value in given):
            facts = [torch.tensor(value, dtype=dtype) for value in given]
            if _as_is(facts, layouts):
                setattr(out, fact, facts[0])
                continue
            rows = [layout.rows(value, None if value.dim() == 1 else 2) for layout, value in zip(layouts, facts, strict=True)]
            if any(row is None for row in rows):
                raise InputError(f"{chunks[0].words}: {fact} {list(facts[0].shape)} do not fit its tokens")
            setattr(out, fact, _padded([row for row in rows if row is not None], 0))
    masks = [torch.tensor(one.valid, dtype=torch.bool) for one in chunks if one.valid is not None]
    if _as_is(masks, layouts):
        out.valid = masks[0]
    elif any(bool((mask != (mask.long().cumsum(1) == torch.arange(1, mask.shape[1] + 1))).any()) for mask in masks):
        raise InputError(f"{chunks[0].words}: pads before or between the tokens of a chunk; next: pads at the end of a row, or flat tokens with lengths")
    elif masks or len(set(lengths)) > 1:
        out.valid = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    for name in names:
        if name in out.gaps:
            continue
        value = _value(name, chunks, layouts)
        if isinstance(value, str):
            out.gaps[name] = value
        else:
            out.values[name], out.dtypes[name] = value
    return out


def _as_is(values: Sequence[Tensor], layouts: Sequence[Layout]) -> bool:
    """One chunk whose value has its [b, s] already: pads stay what they are."""
    return len(values) == len(layouts) == 1 and not layouts[0].flat and values[0].dim() >= 2 and tuple(values[0].shape[:2]) == (len(layouts[0].lengths), layouts[0].width)


def _unseen(chunks: Sequence[RawPass]) -> dict[str, str]:
    return {name: why for one in chunks for name, why in one.unseen.items() if name not in one.parts}


def _value(name: str, chunks: Sequence[RawPass], layouts: Sequence[Layout]) -> tuple[Tensor, str] | str:
    """A point over the chunks of a pass, [b, s, ...] fp32 or int64, and the dtype as stored; or why there is none."""
    kind, dims = (spec_of(name).kind, dims_of(name)) if is_point(name) else ("", None)
    rows: list[list[Tensor]] = []
    dtypes: set[torch.dtype] = set()
    for one, layout in zip(chunks, layouts, strict=True):
        if name not in one.parts:
            return f"shown in {sum(name in each.parts for each in chunks)} of {len(chunks)} chunks"
        values = [part.value for part in one.parts[name]]
        wrong = next((said for part in one.parts[name] if (said := shard_problem(part.shard or {}))), "")
        if wrong or any(value.is_complex() for value in values):
            return wrong or f"{str(values[0].dtype).removeprefix('torch.')}, expected real numbers"
        dtypes |= {value.dtype for value in values}
        plain = [_plain(value, kind) for value in values]
        if any(value is None for value in plain):
            return f"shown in {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}, expected whole numbers"
        if len(values) == 1 and dims in (None, values[0].dim()) and _as_is([value for value in plain if value is not None], layouts):
            assert plain[0] is not None
            return plain[0], str(values[0].dtype).removeprefix("torch.")
        found = _joined([value for value in plain if value is not None], layout, kind, dims)
        if found is None:
            if len(values) > 1 and all(layout.rows(value, dims) is not None for value in values):
                return f"shown {'twice' if len(values) == 2 else f'{len(values)} times'} in one pass, each time whole"
            shapes = " and ".join(str(list(value.shape)) for value in values[:3])
            return f"shown as {shapes} for {plural(layout.count, 'token')} in {plural(len(layout.lengths), 'row')}"
        rows.append(found)
    fill = -1 if kind == INDICES else float("nan") if rows[0][0].is_floating_point() else 0
    width = {part.shape[1:] for row in rows for part in row}
    if len(width) > 1:
        if kind not in (SCORES, INDICES):
            return f"its chunks differ in shape: {', '.join(str(list(shape)) for shape in sorted(width))}"
        most, pad = max(shape[-1] for shape in width), -1 if kind == INDICES else float("-inf")
        rows = [[torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=pad) for part in row] for row in rows]
    return _padded(rows, fill), ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))


def _plain(value: Tensor, kind: str) -> Tensor | None:
    """fp32, or int64 for whole numbers; None: a set of indices that are none."""
    if value.is_floating_point():
        return None if kind == INDICES else value.float()
    return value.long() if kind in (INDICES, "") and value.dtype != torch.bool else value.float()


def _joined(values: Sequence[Tensor], layout: Layout, kind: str, dims: int | None) -> list[Tensor] | None:
    """Per row the tokens of a value that was shown in one or more parts; None where they are not the pass's tokens."""
    if len(values) == 1:
        return layout.rows(values[0], dims)
    pad = {SCORES: float("-inf"), INDICES: -1}.get(kind)
    if pad is not None:
        most = max(value.shape[-1] for value in values)
        values = [torch.nn.functional.pad(value, (0, most - value.shape[-1]), value=pad) for value in values]
    flat = dims is not None and all(value.dim() < dims for value in values)  # their second axis counts no tokens
    for axis in (0,) if flat else (1, 0):
        if all(value.dim() > axis for value in values):
            shapes = {(*value.shape[:axis], *value.shape[axis + 1 :]) for value in values}
            if len(shapes) == 1:
                found = layout.rows(torch.cat(list(values), axis), dims)
                if found is not None:
                    return found
    return None


def _padded(chunks: Sequence[Sequence[Tensor]], fill: float) -> Tensor:
    """[b, s, ...] of rows that may differ in length. chunks  per chunk, per row [n, ...]."""
    rows = [torch.cat(list(parts)) for parts in zip(*chunks, strict=True)]
    width = max(len(row) for row in rows)
    if all(len(row) == width for row in rows):
        return torch.stack(rows)
    out = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), fill)
    for b, row in enumerate(rows):
        out[b, : len(row)] = row
    return out
