"""The layer x point heat map: which verdict a cell shows. Rows stand in dataflow order. Selection, no arithmetic.

A cell shows the worst of its verdicts, whatever their mode. A failure hides everything, then a tap that did not fire, then a
gate that was not run, then a failure that is waived: a pass is shown only where nothing else is.
Tests: parity/unit/test_reports.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from probes.core.records import Coverage, State, Verdict
from reference.points import LAYER_ROWS
from reports import words

PHASES = ("prefill", "decode")
BLOCK = 8  # layers side by side; deeper models continue below, so that the page neither scrolls sideways nor shrinks


@dataclass(frozen=True)
class Cell:
    """What a cell says. css names its look, words.share its number; target is a verdict's index in the gates table; id is the same in every run."""

    text: str
    css: str
    title: str = ""
    target: int | None = None
    id: str = ""


@dataclass(frozen=True)
class Row:
    """One point across layers (prefill, decode), or across phases for a point of the whole model."""

    name: str
    groups: list[list[Cell]]


@dataclass(frozen=True)
class Block:
    """Some layers side by side, once per phase. worst  its worst cell in words; calm  every cell of it passed or has no point."""

    layers: list[int]
    rows: list[Row]
    worst: str = ""
    calm: bool = True


@dataclass
class _Found:
    verdicts: list[tuple[int, Verdict]] = field(default_factory=list)
    coverage: list[Coverage] = field(default_factory=list)


Key = tuple[str | None, int | None, str]  # phase, layer, point without its layer


def short_name(point: str, layer: int | None) -> str:
    """A point's name within its layer."""
    return point.removeprefix(f"layers.{layer}.") if layer is not None else point


def merge_orders(sequences: Iterable[list[str]]) -> list[str]:
    """One order that keeps what each sequence says: a new name goes behind its left neighbour."""
    order: list[str] = []
    for sequence in sequences:
        at = 0
        for name in sequence:
            if name in order:
                at = order.index(name) + 1
            else:
                order.insert(at, name)
                at += 1
    return order


def badness(verdict: Verdict, waived: bool = False) -> tuple[int, float]:
    """Sorts verdicts from good to bad: by state, then by share of the limit, NaN last."""
    rank = 1 if waived else {State.PASS: 0, State.NOT_RUN: 2, State.FAIL: 3}[verdict.state]
    spent = verdict.spent
    return rank, -1.0 if spent is None else math.inf if math.isnan(spent) else spent


def cell_id(phase: str | None, layer: int | None, name: str) -> str:
    """The address of a cell within the page."""
    place = "model" if layer is None else f"L{layer}"
    return "cell-" + re.sub(r"[^A-Za-z0-9._-]", "_", f"{phase}-{place}-{name}")


def _line(verdict: Verdict, waived: bool) -> str:
    state = {State.PASS: "pass", State.FAIL: "waived" if waived else "FAIL", State.NOT_RUN: "not run"}[verdict.state]
    covered = words.steps(verdict.step_first, verdict.step_last)
    return f"{verdict.mode}{' ' + covered if covered else ''}: {state} {words.share(verdict.spent)}"


def _cell(found: _Found | None, waived: frozenset[int] = frozenset(), at: str = "") -> Cell:
    if found is None:
        return Cell("·", "none", id=at)
    ordered = sorted(found.verdicts, key=lambda pair: badness(pair[1], pair[0] in waived), reverse=True)
    missing = [c for c in found.coverage if c.observed < c.expected]
    lines = [_line(v, i in waived) for i, v in ordered[:2]] + [f"{c.mode}: tap fired {c.observed} of {c.expected}" for c in missing[:2]]
    title = "; ".join(lines)
    if not ordered:
        return Cell("missing", "missing", title, id=at) if missing else Cell("no gate", "missing", "the tap fired, nothing judged it", id=at)
    index, worst = ordered[0]
    spent = worst.spent
    over = ">100%" if spent is not None and 1 < spent < 1.005 else words.share(spent).replace(" %", "%")
    if worst.state is State.FAIL and index not in waived:
        return Cell(f"✗ {over}", "fail", title, index, at)
    if missing:
        return Cell("missing", "missing", title, index, at)
    if worst.state is State.NOT_RUN:
        return Cell("not run", "notrun", title, index, at)
    if worst.state is State.FAIL:
        return Cell(f"◇ {over}", "waived", title, index, at)
    if spent is None:
        return Cell("ok", "h0", title, index, at)
    bucket = int(10 * min(max(spent, 0.0), 0.9)) if math.isfinite(spent) else 9
    return Cell(words.share(spent).replace(" %", "%"), f"h{bucket}", title, index, at)


def _worst_of(verdicts: list[Verdict], waived: frozenset[int], layers: list[int]) -> str:
    """The worst verdict among some layers, in words."""
    found = [(i, v) for i, v in enumerate(verdicts) if v.layer in layers and v.mode != "operation" and v.phase in PHASES]
    if not found:
        return "nothing judged"
    index, worst = max(found, key=lambda pair: badness(pair[1], pair[0] in waived))
    state = {State.PASS: "worst", State.FAIL: "◇ waived" if index in waived else "✗ failed", State.NOT_RUN: "○ not run"}[worst.state]
    return f"{state}: {words.share(worst.spent)} layer {worst.layer} {short_name(worst.point, worst.layer)}, {worst.phase}"


def heat_map(verdicts: list[Verdict], coverage: list[Coverage], layers: list[int], waived: frozenset[int] = frozenset()) -> tuple[list[Block], list[Row]]:
    """Blocks of layers, and the rows of the whole model's points (one group with a cell per phase)."""
    found: dict[Key, _Found] = {}
    orders: dict[tuple[object, ...], list[str]] = {}

    def entry(phase: str | None, layer: int | None, point: str, source: tuple[object, ...]) -> _Found:
        name = short_name(point, layer)
        orders.setdefault((*source, layer is None, phase, layer), []).append(name)
        return found.setdefault((phase, layer, name), _Found())

    for one in coverage:
        entry(one.phase, one.layer, one.point, ("coverage", one.mode)).coverage.append(one)
    for index, verdict in enumerate(verdicts):
        if verdict.mode != "operation" and verdict.phase in PHASES:
            entry(verdict.phase, verdict.layer, verdict.point, ("verdict", verdict.mode)).verdicts.append((index, verdict))

    every_layer = sorted({layer for _, layer, _ in found if layer is not None} | set(layers))
    seen = {name for _, layer, name in found if layer is not None}
    known = [name for name in LAYER_ROWS if name in seen]
    layer_names = merge_orders([known, *(list(dict.fromkeys(names)) for key, names in orders.items() if key[2] is False)])
    model_names = merge_orders(list(dict.fromkeys(names)) for key, names in orders.items() if key[2] is True)
    seen_ids: dict[str, int] = {}

    def cell(phase: str, layer: int | None, name: str) -> Cell:
        at = cell_id(phase, layer, name)
        seen_ids[at] = seen_ids.get(at, 0) + 1
        return _cell(found.get((phase, layer, name)), waived, at if seen_ids[at] == 1 else f"{at}.{seen_ids[at]}")

    blocks = []
    for start in range(0, len(every_layer), BLOCK):
        part = every_layer[start : start + BLOCK]
        rows = [Row(name, [[cell(phase, layer, name) for layer in part] for phase in PHASES]) for name in layer_names]
        calm = all(c.css not in ("fail", "missing", "notrun", "waived") for row in rows for group in row.groups for c in group)
        blocks.append(Block(part, rows, _worst_of(verdicts, waived, part), calm))
    model_rows = [Row(name, [[cell(phase, None, name) for phase in PHASES]]) for name in model_names]
    return blocks, model_rows
