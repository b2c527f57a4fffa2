"""Writes a repro of the first divergence: that one operation, with its inputs, in one file (probes/core/repro.py).

Nothing is kept while an audit runs. After a failure the layer is run again, twice: the first time only addresses are noted,
which gives the launches that made the point's value out of points that agree; the second time the memory of those launches is
copied. The reference's state before the pass comes from running that one layer of the reference over its recorded inputs.

    capture(audit, divergence, verdict, report_dir / "repro.safetensors")

Replay: python -m probes.replay FILE. Tests: parity/unit/test_repro.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.attribution import ONLY_REPLAYED
from parity.audit import Audit
from probes.core.drive import decoding
from probes.core.records import Divergence, Verdict, to_wire
from probes.core.repro import ALIGN, Repro, Step, View, bytes_of, compare, extent
from probes.core.trace import PADS, grow_last
from reference.points import layer_of, points_of_layer, spec_of, state_order

LIMIT_BYTES = 512 << 20
# Points that are read back from the cache, and the parts of a layer's cache that hold them.
STORED = {
    "attn.kv": ("window", ("ring", "ring_position")),
    "attn.compressor": ("entries", ("entries",)),
    "attn.indexer.compressor": ("index_keys", ("keys", "scales")),
}
Range = tuple[int, int]


class NoReproError(RuntimeError):
    """Why there is none: in words for the report."""


@dataclass
class Place:
    """One run of one layer: what production was given, and what the reference says of the point.

    before  the layer's state before the call; c0  first column of the pass that this call takes (prefill chunks)
    """

    layer: int
    X: Tensor
    tokens: Tensor
    lengths: Tensor | None
    choices: dict[str, Tensor]
    before: dict[str, Tensor]
    decode: bool
    c0: int = 0


def capture(audit: Audit, divergence: Divergence, verdict: Verdict, path: Path, command: str = "") -> Path:
    """Write the file for a first divergence at a layer's point. Raises NoReproError."""
    layer, point, phase = divergence.layer, divergence.point, divergence.phase
    if layer is None or phase is None or layer_of(point) != layer:
        raise NoReproError("the first divergence is no layer's point")
    if state_order(point) is not None:
        raise NoReproError(f"{point} is what the layer leaves in its state: no launch shows it")
    if divergence.phase == "decode" and divergence.step is None:
        raise NoReproError(f"{verdict.gate} judges the steps of decode together and names none that could be run alone; next: run {verdict.test_id} with the options of this run")
    if not hasattr(audit.production, "device"):
        raise NoReproError("production has no device that could be watched")
    if divergence.because.startswith(ONLY_REPLAYED):
        raise NoReproError("launched by itself the operation is right: only the captured graph is wrong")
    with decoding(audit.production, "eager"):
        return _captured(audit, divergence, verdict, path, command, layer)


def _captured(audit: Audit, divergence: Divergence, verdict: Verdict, path: Path, command: str, layer: int) -> Path:
    """Launched one by one; steps that were replayed from a graph have the same bits, or are no repro."""
    point, phase = divergence.point, divergence.phase
    assert phase is not None
    place = _place(audit, verdict, layer, phase, divergence.step)
    agreeing = frozenset(_points_before(audit, layer, point))
    state = audit.production.new_state(audit.batch, audit.plan.max_context)
    seen = _Addresses(audit, state, layer)
    with seen.watching():
        _run(audit, state, place)
    recorder = _Copies(audit, frozenset(seen.chosen(point, agreeing)), point)
    with recorder.watching():
        _run(audit, state, place)
    return recorder.repro(audit, state, place, divergence, verdict, command).save(path)


def _points_before(audit: Audit, layer: int, point: str) -> tuple[str, ...]:
    points = points_of_layer(audit.config, layer)
    return points[: points.index(point)]


# ---- what the layer was given ----


def _place(audit: Audit, verdict: Verdict, layer: int, phase: str, step: int | None) -> Place:
    number = 0 if phase == "prefill" else 1 + int(step or 0)
    one = audit.history[number]
    chunk = getattr(audit.production, "prefill_chunk", one.tokens.shape[1])
    first = verdict.details.get("first", verdict.where)
    c0 = int(first[1]) // chunk * chunk if phase == "prefill" and len(first) > 1 else 0
    c1 = min(c0 + chunk, one.tokens.shape[1])
    if verdict.mode == "isolated":
        X, choices = audit.layer_input(layer, phase, step), one.choices_of(layer)
        before = _reference_state(audit, layer, number)
    else:
        X, before = _production_chain(audit, layer, number)
        choices = {}

    def part(a: int, b: int, before: dict[str, Tensor]) -> Place:
        lengths = None if one.lengths is None else (one.lengths - a).clamp(0, b - a)
        return Place(layer, X[:, a:b], one.tokens[:, a:b], lengths, {k: v[:, a:b] for k, v in choices.items()}, before, phase == "decode", a)

    if c0:  # chunks of a longer prefill: production's own state after those before this one
        state = audit.production.new_state(audit.batch, audit.plan.max_context)
        _run(audit, state, part(0, c0, before))
        before = state.export_layer(layer)
    return part(c0, c1, before)


def _reference_state(audit: Audit, layer: int, number: int) -> dict[str, Tensor]:
    """The reference's state of a layer before a pass: a layer's state depends on that layer's inputs only."""
    state = audit.reference.new_state(audit.batch, audit.plan.max_context)
    for one in audit.history[:number]:
        X = audit.layer_input(layer, one.phase, one.step)
        audit.reference.run_layer(layer, X, one.tokens, state, one.lengths, choices=one.choices_of(layer), decode=one.phase == "decode")
    exported: dict[str, Tensor] = state.export_layer(layer)
    return exported


def _production_chain(audit: Audit, layer: int, number: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The layer's input in production's own chain, and its state before the pass: production run again from the start."""
    model, point = audit.production, "embed" if layer == 0 else f"layers.{layer - 1}.hc_ffn.X"
    state, shown, before = model.new_state(audit.batch, audit.plan.max_context), [], {}
    with model.taps.observe((point,), lambda _, value: shown.append(value.float().cpu().clone())):
        for one in audit.history[: number + 1]:
            shown.clear()
            before = state.export_layer(layer)
            if one.phase == "prefill":
                model.prefill(one.tokens, state, one.lengths)
            else:
                model.decode(one.tokens[:, 0], state)
    X = torch.cat(shown, 1)
    return (X[:, :, None].expand(-1, -1, audit.config.hc_mult, -1) if layer == 0 else X), before


def _run(audit: Audit, state: Any, place: Place) -> None:
    state.import_layer(place.layer, place.before)
    audit.production.run_layer(place.layer, place.X, place.tokens, state, place.lengths, choices=place.choices or None, decode=place.decode)


# ---- which launches ----


def _overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _short(point: str) -> str:
    return point.split(".", 2)[2]


def _stored_parts(state: Any, layer: int, point: str) -> list[Tensor]:
    """Tensors of the cache behind a point that is read back from it."""
    if _short(point) not in STORED:
        return []
    cache = state.cache.layers[layer]
    return [getattr(cache, name) for name in STORED[_short(point)][1]]


class _Watcher:
    """Observes launches and every point of one layer."""

    def __init__(self, audit: Audit, points: tuple[str, ...]) -> None:
        self.model, self.points, self.launches = audit.production, points, 0

    def watching(self) -> Any:
        from contextlib import ExitStack

        stack = ExitStack()
        stack.enter_context(self.model.device.watched(self))
        stack.enter_context(self.model.taps.observe(self.points, self.shown))
        return stack

    def before(self, launch: Any) -> None:
        pass

    def after(self, launch: Any) -> None:
        pass

    def shown(self, point: str, value: Tensor) -> None:
        pass


@dataclass
class _Event:
    """A launch (number, what it reads and writes) or a tap (point, the memory it shows)."""

    number: int = -1
    point: str = ""
    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)


class _Addresses(_Watcher):
    """First run: who reads and writes where. Tensors are held, so that no address is used twice."""

    def __init__(self, audit: Audit, state: Any, layer: int) -> None:
        super().__init__(audit, points_of_layer(audit.config, layer))
        self.state, self.layer = state, layer
        self.events: list[_Event] = []
        self.held: list[Any] = []

    def after(self, launch: Any) -> None:
        event = _Event(number=self.launches)
        for parameter, arg in zip(launch.parameters, launch.args, strict=True):
            if isinstance(arg, Tensor) and arg.numel():
                event.reads.append(extent(arg))
                if parameter.kind == 1:  # a pointer to memory that is not const
                    event.writes.append(extent(arg))
        self.events.append(event)
        self.held.append(launch.args)
        self.launches += 1

    def shown(self, point: str, value: Tensor) -> None:
        shown = [extent(value)]
        if not any(_overlap(shown[0], write) for event in self.events for write in event.writes):
            shown = [extent(part) for part in _stored_parts(self.state, self.layer, point)]
        self.events.append(_Event(point=point, reads=shown))
        self.held.append(value)

    def chosen(self, target: str, agreeing: frozenset[str]) -> list[int]:
        """Numbers of the launches that made the target's value, back to memory that an agreeing point has shown."""
        at = next((i for i, event in enumerate(self.events) if event.point == target), None)
        if at is None:
            raise NoReproError(f"{target} was not shown when the layer ran again")
        needed = list(self.events[at].reads)
        chosen: list[int] = []
        half = f"layers.{self.layer}.hc_attn.X"  # the second half of a layer uses some buffers of the first again
        for event in reversed(self.events[:at]):
            if event.point == half and half in agreeing:
                break
            if event.point in agreeing:
                needed = [r for r in needed if not any(s[0] <= r[0] and r[1] <= s[1] for s in event.reads)]
            elif event.number >= 0 and any(_overlap(w, r) for w in event.writes for r in needed):
                chosen.append(event.number)
                needed += [r for r in event.reads if r not in needed]
        if not chosen:
            raise NoReproError(f"no launch wrote what {target} shows")
        return sorted(chosen)


# ---- their memory ----


@dataclass
class _Seen:
    """A chosen launch with its arguments' extents."""

    launch: Any
    ranges: list[Range | None]


class _Copies(_Watcher):
    """Second run: the memory of the chosen launches, before and after."""

    def __init__(self, audit: Audit, chosen: frozenset[int], point: str) -> None:
        super().__init__(audit, points_of_layer(audit.config, int(point.split(".")[1])))
        self.chosen, self.point = chosen, point
        self.steps: list[_Seen] = []
        self.tensors: dict[str, Tensor] = {}
        self.known: dict[Range, Tensor] = {}
        self.size = 0
        self.value: Tensor | None = None
        self.value_at: Tensor | None = None

    def before(self, launch: Any) -> None:
        if self.launches not in self.chosen:
            return
        ranges: list[Range | None] = []
        for k, arg in enumerate(launch.args):
            if not isinstance(arg, Tensor) or not arg.numel():
                ranges.append(None)
                continue
            where = extent(arg)
            ranges.append(where)
            raw = bytes_of(arg)
            held = self.known.get(where)
            if held is None or not torch.equal(held, raw):
                self._keep(f"set|{len(self.steps)}|{k}", raw)
                self._knows(where, raw)
        self.steps.append(_Seen(launch, ranges))

    def after(self, launch: Any) -> None:
        if self.launches in self.chosen:
            step = self.steps[-1]
            for k, (parameter, arg) in enumerate(zip(launch.parameters, launch.args, strict=True)):
                where = step.ranges[k]
                if where is None or parameter.kind != 1:
                    continue
                raw = bytes_of(arg)
                self._keep(f"after|{len(self.steps) - 1}|{k}", raw)
                self._knows(where, raw)
        self.launches += 1

    def shown(self, point: str, value: Tensor) -> None:
        if point == self.point and self.value is None:
            self.value_at = value
            self.value = value.detach().to("cpu", torch.float32 if value.is_floating_point() else torch.int64).clone()

    def _keep(self, name: str, raw: Tensor) -> None:
        self.size += raw.numel()
        if self.size > LIMIT_BYTES:
            raise NoReproError(f"the operation's memory is more than {LIMIT_BYTES >> 20} MiB")
        self.tensors[name] = raw

    def _knows(self, where: Range, raw: Tensor) -> None:
        """What the replay's memory holds there; other views of that memory are no longer known."""
        self.known = {r: held for r, held in self.known.items() if not _overlap(r, where)}
        self.known[where] = raw

    # ---- the file ----

    def repro(self, audit: Audit, state: Any, place: Place, divergence: Divergence, verdict: Verdict, command: str) -> Repro:
        if self.value is None or self.value_at is None:
            raise NoReproError(f"{self.point} was not shown when the layer ran again")
        regions = _merged([r for step in self.steps for r in step.ranges if r is not None])

        def view(tensor: Tensor) -> View | None:
            first, end = extent(tensor)
            for number, (start, stop) in enumerate(regions):
                if start <= first and end <= stop:
                    return View(number, first - start + start % ALIGN, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
            return None

        phase, step = divergence.phase, divergence.step
        assert phase is not None
        s = place.tokens.shape[1]
        who = "isolated" if verdict.mode == "isolated" else "production"
        recorded = audit.get(who, self.point, phase, step)[:, place.c0 : place.c0 + s]
        want = audit.get("reference", self.point, phase, step)[:, place.c0 : place.c0 + s]
        direct = view(self.value_at)
        if direct is not None:
            value: dict[str, Any] = {"how": "direct", "views": {"value": direct}}
        elif _short(self.point) in STORED:
            how, names = STORED[_short(self.point)]
            views = {name: view(part) for name, part in zip(names, _stored_parts(state, place.layer, self.point), strict=True)}
            value = {"how": how, "views": {name: one for name, one in views.items() if one is not None}}
            if len(value["views"]) < len(names):
                raise NoReproError(f"the memory behind {self.point} is not an argument of its launches")
        else:
            raise NoReproError(f"{self.point} shows memory that none of its launches has as an argument")
        valid = audit.valid(phase)[:, place.c0 : place.c0 + s]
        positions = audit.positions(phase, None if phase == "prefill" else (int(step or 0),) * 2)[:, place.c0 : place.c0 + s]
        notes = []
        if not _same(self.point, self.value, recorded, valid):
            notes.append("the layer run again did not give the run's value: the fault needs what earlier passes left in memory")
        builds = {(source, kernel): build for source, kernel, _, build, _ in audit.production.device.ran}
        device = audit.production.device
        tensors = {**self.tensors, "got": self.value, "want": want, "valid": valid, "positions": positions}
        layer, more = _layer_part(audit, place, self.point, self.size)
        if not layer:
            notes.append("the layer's weights are too large to be in the file: today's kernels can be run on the recorded launches only")
        unit = audit.floor(verdict.mode, self.point).unit
        facts = to_wire({
            "point": self.point, "phase": phase, "step": step, "layer": place.layer, "mode": verdict.mode, "component": divergence.component, "first_column": place.c0,
            "gate": {k: v for k, v in dataclasses.asdict(verdict).items() if k not in ("point", "phase", "layer", "mode", "component", "details")},
            "median_limit": verdict.details.get("median_limit"), "unit": unit, "recorded": compare(self.point, verdict.mode, self.value, want, valid, unit), "policy": sorted(audit.production.policy),
            "device": device.name, "arch": device.arch, "checkpoint": audit.plan.checkpoint_dir, "ratio": audit.config.ratio(place.layer), "command": command, "notes": notes,
            "config": dataclasses.asdict(audit.config),
        })  # fmt: skip
        return Repro(facts, [b - a for a, b in regions], [self._step(one, view, builds) for one in self.steps], value, self._sources(), layer, tensors | more)

    def _step(self, seen: _Seen, view: Any, builds: Mapping[tuple[str, str], str]) -> Step:
        launch = seen.launch
        args: list[View | int | float | None] = []
        for arg in launch.args:
            if isinstance(arg, Tensor) and not arg.numel():
                args.append(View(0, 0, str(arg.dtype).removeprefix("torch."), tuple(arg.shape), tuple(arg.stride())))
            else:
                args.append(view(arg) if isinstance(arg, Tensor) else arg)
        return Step(
            launch.source, launch.kernel, tuple(launch.grid), tuple(launch.block), launch.shared_bytes, builds.get((launch.source, launch.kernel), ""),
            tuple(p.name for p in launch.parameters), tuple(args), tuple(k for k, p in enumerate(launch.parameters) if p.kind == 1 and isinstance(launch.args[k], Tensor)),
        )  # fmt: skip

    def _sources(self) -> dict[str, str]:
        """Texts of the kernel files as they ran, the mutated copy's where a fault is planted."""
        from production.signatures import include_closure

        texts: dict[str, str] = {}
        for source in sorted({step.launch.source for step in self.steps}):
            path = self.model.device.source_path(source)
            texts |= include_closure(path, [path.parent])
        return texts


def _merged(ranges: list[Range]) -> list[Range]:
    """Overlapping ranges as one."""
    merged: list[Range] = []
    for first, end in sorted(set(ranges)):
        if merged and first < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _same(point: str, a: Tensor, b: Tensor, valid: Tensor) -> bool:
    """Equal where a query is; scores and sets of other chunks may be wider."""
    pad = PADS.get(spec_of(point).kind)
    if pad is not None:
        width = max(a.shape[-1], b.shape[-1])
        a, b = grow_last(a, width, pad), grow_last(b, width, pad)
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan()))[valid].all())


# ---- the layer, for running today's code ----


def weights_of(layer: Any) -> dict[str, Tensor]:
    """Tensors of nested dataclasses by dotted name."""
    found: dict[str, Tensor] = {}
    for one in dataclasses.fields(layer):
        value = getattr(layer, one.name)
        if isinstance(value, Tensor):
            found[one.name] = value
        elif dataclasses.is_dataclass(value):
            found |= {f"{one.name}.{name}": tensor for name, tensor in weights_of(value).items()}
    return found


def _layer_part(audit: Audit, place: Place, point: str, spent: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Input, state, choices and weights of the layer; the experts only where the point lies behind them."""
    weights = getattr(audit.production, "weights", None)
    if weights is None:
        return {}, {}
    points = points_of_layer(audit.config, place.layer)
    experts = points.index(point) > points.index(f"layers.{place.layer}.ffn.weights")
    named = weights_of(weights.layers[place.layer])
    held = {name: w for name, w in named.items() if experts or not name.startswith(("experts.", "shared_experts."))}
    tensors = {"layer|X": place.X.float().cpu(), "layer|tokens": place.tokens, **{f"state|{k}": v for k, v in place.before.items()}}
    if place.lengths is not None:
        tensors["layer|lengths"] = place.lengths
    tensors |= {f"choice|{_short(k)}": v for k, v in place.choices.items()}
    tensors |= {f"weight|{name}": w.detach().cpu() for name, w in held.items()}
    if spent + sum(t.numel() * t.element_size() for t in tensors.values()) > LIMIT_BYTES:
        return {}, {}
    facts = {
        "layer": place.layer, "decode": place.decode, "batch": audit.batch, "max_context": audit.plan.max_context, "prefill_chunk": audit.production.prefill_chunk, "variants": audit.production.plan.name,
        "is_hash": audit.config.is_hash(place.layer), "weights": {name: [str(w.dtype).removeprefix("torch."), list(w.shape)] for name, w in named.items()},
    }  # fmt: skip
    return facts, tensors
