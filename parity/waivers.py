"""Waivers: known deviations that are accepted with a reason, a name and an end date. Data beside the audit, never a default.

    pytest parity/ --waivers waivers.toml

    [[waiver]]
    gate = "attn.core"                 # a row of the tolerance table, in full
    point = "layers.*.attn.core"       # * any characters, ? one; more than "layers.*" and wildcards
    phase = "decode"                   # optional, with layers = "4-6" and mode = "free": absent is any
    at_most = 3.0                      # optional: times its limit; a deviation that grows beyond it fails again
    reason = "split-k sums in bf16 until kernel 12 lands"
    by = "a name that can be asked"
    until = 2026-12-31                 # last day, UTC, at most 180 days ahead

A failed gate that a waiver matches stays a failure in the records and does not count against the verdict. What is no number
beyond its limit is never accepted: a crash, a test that broke, NaN, a gate that was not run, a tap that did not fire. A waiver
that has run out, matched nothing, or was not enough is named. Tests: parity/unit/test_waivers.py.
"""

from __future__ import annotations

import datetime
import difflib
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from parity import selection
from parity.attribution import COMPOSED, place
from parity.gates import BOUNDS, DEVICE, GATES, OPERATIONS
from probes.core.records import NEVER_WAIVED, WAIVER_DAYS, Measurement, State, Verdict
from probes.core.wording import plural
from reference.config import InputError, ModelConfig
from reference.points import LAYER_ROWS, MODEL_POINTS, layer_of, places_of_model

MAX_DAYS = WAIVER_DAYS
KEYS = ("gate", "point", "phase", "layers", "mode", "at_most", "reason", "by", "until")
NEEDED = ("gate", "point", "reason", "by", "until")
MODES = (*selection.CHAIN_MODES, "operation", "model")
POINTS = frozenset((*LAYER_ROWS, *(spec.name for spec in MODEL_POINTS)))  # gates that stand at their own point
SETS = ("attn.selected", "attn.visible", "ffn.experts")
WAYS = ("batched", "chunked", "continued", "decode", "observed", "repeated", "replayed", "reused", "stored", "visible")
OTHERS = ("operation.batching", "choices.exchanged", "greedy", "greedy.degeneration", "logits.top1", "logits.top5", "logits.top10", "recall.score", "sink.extreme", "sink.merge", "visible.rule")
KNOWN = frozenset((
    *POINTS, *GATES, *BOUNDS, *OTHERS, *(f"device.{name}" for name in (*DEVICE, *SETS)), *(f"operation.{name}" for name in (*OPERATIONS, *COMPOSED)),
    *(f"self.{name}" for name in WAYS),
)) - set(NEVER_WAIVED)  # fmt: skip


@dataclass
class Waiver:
    """One entry of a file, and what it met in this run.

    accepted   failed gates it accepts; too_far  failed gates beyond at_most; no_number  failures that no waiver accepts
    late       failed gates it would have accepted before it ran out; passed  gates it matches that need no waiver
    """

    gate: str
    point: str
    reason: str
    by: str
    until: datetime.date
    phase: str | None = None
    layers: tuple[int, ...] | None = None
    mode: str | None = None
    at_most: float | None = None
    accepted: int = 0
    too_far: int = 0
    no_number: int = 0
    late: int = 0
    passed: int = 0

    @cached_property
    def _point(self) -> re.Pattern[str]:
        return glob(self.point)

    def matches(self, verdict: Verdict) -> bool:
        """Gate, point and whatever else it names are the verdict's."""
        return (
            verdict.gate == self.gate and self._point.fullmatch(verdict.point) is not None and self.phase in (None, verdict.phase)
            and (self.layers is None or verdict.layer in self.layers) and self.mode in (None, verdict.mode)
        )  # fmt: skip

    def terms(self) -> dict[str, Any]:
        """What was written, for the header."""
        given = {"gate": self.gate, "point": self.point, "phase": self.phase, "layers": self.layers, "mode": self.mode, "at_most": self.at_most}
        return {**{k: v for k, v in given.items() if v is not None}, "reason": self.reason, "by": self.by, "until": self.until.isoformat()}

    def name(self) -> str:
        """gate at point, decode, layers 4-6, free."""
        more = [self.phase, None if self.layers is None else f"layers {', '.join(map(str, self.layers))}", self.mode]
        return f"{self.gate} at {self.point}" + "".join(f", {word}" for word in more if word)


@dataclass
class Waivers:
    """The waivers of a run. today  decides which have run out, once for the whole run."""

    all: list[Waiver] = field(default_factory=list)
    today: datetime.date = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date())

    def expired(self, waiver: Waiver) -> bool:
        return self.today > waiver.until

    def judge(self, verdict: Verdict) -> Verdict:
        """The verdict, with the waiver that accepts it."""
        if verdict.state is State.NOT_RUN:
            return verdict
        for waiver in (w for w in self.all if w.matches(verdict)):
            if verdict.state is State.PASS:
                waiver.passed += 1
            elif not deviates(verdict):
                waiver.no_number += 1
            elif self.expired(waiver):
                waiver.late += 1
            elif waiver.at_most is not None and not (verdict.spent is not None and most_spent(verdict) <= waiver.at_most):
                waiver.too_far += 1
            else:
                waiver.accepted += 1
                return replace(verdict, waiver={"reason": waiver.reason, "until": waiver.until.isoformat(), "by": waiver.by})
        return verdict

    @property
    def used(self) -> list[Waiver]:
        return [w for w in self.all if w.accepted]

    def standing(self, waiver: Waiver) -> str:
        """What became of a waiver, in words."""
        parts = [f"accepts {plural(waiver.accepted, 'failed gate')}"] if waiver.accepted else []
        if self.expired(waiver):
            parts.append(f"expired on {waiver.until.isoformat()}" + (f": {plural(waiver.late, 'failed gate')} not accepted" if waiver.late else ""))
        if waiver.too_far:
            parts.append(f"{plural(waiver.too_far, 'failed gate')} beyond at_most = {waiver.at_most:g}")
        if waiver.no_number:
            parts.append(f"{plural(waiver.no_number, 'failure')} no waiver accepts: nothing was compared, or no number came out")
        if not parts:
            parts.append("unused: " + (f"its {plural(waiver.passed, 'gate')} passed" if waiver.passed else "matched no gate of this run"))
        return "; ".join(parts)

    def lines(self) -> list[str]:
        """One line a waiver, for the terminal."""
        return [f"waiver: {w.name()}: {self.standing(w)}" + (f" until {w.until.isoformat()} ({w.by}: {w.reason})" if w.accepted else "") for w in self.all]

    def facts(self) -> list[Measurement]:
        """One measurement a waiver: what it says and what it met."""
        met = ("accepted", "late", "too_far", "no_number", "passed")
        return [Measurement("waiver", values={**w.terms(), "standing": self.standing(w), **{name: getattr(w, name) for name in met}}) for w in self.all]


def deviates(verdict: Verdict) -> bool:
    """A failure that is a number over its limit: rows were compared, every number of the gate came out, production ran."""
    numbers = [verdict.value, *(one.get("smallest_limit") for one in verdict.numbers)]
    return verdict.state is State.FAIL and verdict.gate not in NEVER_WAIVED and verdict.rows > 0 and all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)


def most_spent(verdict: Verdict) -> float:
    """The largest share of its limit that any number of a gate spent."""
    return max([s for s in (verdict.spent, *(one.get("spent") for one in verdict.numbers)) if s is not None], default=math.inf)


def glob(text: str) -> re.Pattern[str]:
    """* any run of characters, ? one character, everything else itself: operations have brackets in their names."""
    return re.compile("".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in text), re.DOTALL)


# ---- the file ----


def read_waivers(path: Path, config: ModelConfig, today: datetime.date | None = None) -> Waivers:
    """A file's waivers, all checked. Raises InputError with file and entry."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--waivers {path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--waivers {path}: broken TOML: {error}") from None
    entries = values.get("waiver")
    if not isinstance(entries, list) or set(values) != {"waiver"}:
        raise InputError(f"--waivers {path}: expected [[waiver]] entries and nothing else")
    waivers = Waivers() if today is None else Waivers(today=today)
    for number, entry in enumerate(entries, 1):
        waivers.all.append(_waiver(entry, f"--waivers {path}: waiver {number}", config, waivers.today))
    return waivers


def _waiver(entry: Any, where: str, config: ModelConfig, today: datetime.date) -> Waiver:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected a table")
    if strange := sorted(set(entry) - set(KEYS)):
        raise InputError(f"{where}: unknown key {strange[0]!r}; known: {', '.join(KEYS)}")
    if missing := [key for key in NEEDED if key not in entry]:
        raise InputError(f"{where}: {missing[0]} is missing; a waiver needs {', '.join(NEEDED)}")
    for key in ("gate", "point", "reason", "by", "phase", "layers", "mode"):
        if key in entry and (not isinstance(entry[key], str) or not entry[key].strip()):
            raise InputError(f"{where}: {key} is {entry[key]!r}, expected text")
    gate, point, until, at_most = entry["gate"], entry["point"], entry["until"], entry.get("at_most")
    if gate not in KNOWN:
        near = difflib.get_close_matches(gate, KNOWN, n=1)
        never = "; what it judges cannot be accepted" if gate in NEVER_WAIVED else f"; nearest is {near[0]!r}" if near else ""
        raise InputError(f"{where}: gate {gate!r} is no gate that can be waived{never}")
    if not re.sub(r"[*?.]", "", point.removeprefix("layers.")) or re.fullmatch(r"layers\.[\d*?.]*", point):
        raise InputError(f"{where}: point {point!r} matches everything of a layer; name the point, e.g. layers.*.attn.core")
    places = places_of_model(config)
    matched = sum(glob(point).fullmatch(place) is not None for place in places)
    if 2 * matched > len(places):
        raise InputError(f"{where}: point {point!r} matches {matched} of the model's {len(places)} points; name the point, e.g. layers.*.attn.core")
    _check_point(where, gate, point, config)
    for key, allowed in (("phase", selection.PHASES), ("mode", MODES)):
        if entry.get(key, allowed[0]) not in allowed:
            raise InputError(f"{where}: {key} {entry[key]!r}, expected {', '.join(allowed)}")
    layers = None
    if "layers" in entry:
        try:
            layers = selection.parse_layers(entry["layers"], config.num_hidden_layers)
        except InputError as error:
            raise InputError(f"{where}: layers: {str(error).removeprefix('--layers ')}") from None
    if type(until) is not datetime.date:  # a datetime is a date too
        raise InputError(f"{where}: until is {until!s}, expected a date such as {today.isoformat()}, without quotes")
    if (until - today).days > MAX_DAYS:
        raise InputError(f"{where}: until {until.isoformat()} is more than {MAX_DAYS} days ahead; a waiver ends and is asked for again")
    if at_most is not None and (isinstance(at_most, bool) or not isinstance(at_most, int | float) or not (1 < at_most < math.inf)):
        raise InputError(f"{where}: at_most is {at_most!r}, expected a number above 1: times the gate's limit")
    return Waiver(gate, point, entry["reason"].strip(), entry["by"].strip(), until, entry.get("phase"), layers, entry.get("mode"), None if at_most is None else float(at_most))


def _check_point(where: str, gate: str, point: str, config: ModelConfig) -> None:
    """A gate that stands at a point of its own name is looked up in this checkpoint."""
    name = gate.removeprefix("device.")
    if name not in POINTS:
        return
    own = [place for place in places_of_model(config) if (place.split(".", 2)[2] if layer_of(place) is not None else place) == name]
    if not any(glob(point).fullmatch(place) for place in own):
        shown = f"its points are {own[0]} to {own[-1]}" if len(own) > 1 else f"its point is {own[0]}" if own else "this checkpoint has no such point"
        raise InputError(f"{where}: point {point!r} matches no point of gate {gate}; {shown}")


def unwaived(records: Sequence[Any]) -> list[Any]:
    """The records without failures that are accepted: what the first divergence is looked for in."""
    return [r for r in records if not (isinstance(r, Verdict) and r.waiver is not None)]


def waived_before(records: Sequence[Any], points: Sequence[str]) -> int:
    """Accepted failures that stand before the first one that is not, in the order of the models' chain. points  in dataflow order."""
    order = {point: i for i, point in enumerate(points)}
    placed = [(key, v) for v in records if isinstance(v, Verdict) and v.state is State.FAIL and (key := place(v, order)) is not None]
    first = min((key for key, v in placed if v.waiver is None), default=None)
    return sum(first is not None and v.waiver is not None and key < first for key, v in placed)
