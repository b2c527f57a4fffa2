"""The layer x point heat map: which verdict a cell shows. Rows stand in dataflow order. Selection, no arithmetic.

A cell shows the worst of the isolated and the free-running verdict. A failure hides everything, then a tap that did not fire,
then a gate that was not run, then a cell nobody judged: a pass is shown only where nothing else is.
Tests: parity/unit/test_reports.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from probes.core.records import Coverage, State, Verdict
from reference.points import LAYER_ROWS
from reports import words

PHASES = ("prefill", "decode")
BLOCK = 8  # layers side by side; deeper models continue below, so that the page neither scrolls sideways nor shrinks


@dataclass(frozen=True)
class Cell:
    """What a cell says. css names its look, words.share its number; target is a verdict's index in the gates table."""

    text: str
    css: str
    title: str = ""
    target: int | None = None


@dataclass(frozen=True)
class Row:
    """One point across layers (prefill, decode), or across phases for a point of the whole model."""

    name: str
    groups: list[list[Cell]]


@dataclass(frozen=True)
class Block:
    """Some layers side by side, once per phase."""

    layers: list[int]
    rows: list[Row]


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


def badness(verdict: Verdict) -> tuple[int, float]:
    """Sorts verdicts from good to bad: by state, then by share of the limit, NaN last."""
    rank = {State.PASS: 0, State.NOT_RUN: 1, State.FAIL: 2}[verdict.state]
    spent = verdict.spent
    return rank, -1.0 if spent is None else math.inf if math.isnan(spent) else spent


def _line(verdict: Verdict) -> str:
    state = {State.PASS: "pass", State.FAIL: "FAIL", State.NOT_RUN: "not run"}[verdict.state]
    covered = words.steps(verdict.step_first, verdict.step_last)
    return f"{verdict.mode}{' ' + covered if covered else ''}: {state} {words.share(verdict.spent)}"


def _cell(found: _Found | None) -> Cell:
    if found is None:
        return Cell("·", "none", "no such point here, or not asked for")
    worst = max(found.verdicts, key=lambda pair: badness(pair[1]), default=None)
    missing = [c for c in found.coverage if c.observed < c.expected]
    lines = [_line(v) for _, v in sorted(found.verdicts, key=lambda pair: badness(pair[1]), reverse=True)[:2]]
    lines += [f"{c.mode}: tap fired {c.observed} of {c.expected}" for c in missing[:2]]
    title = "; ".join(lines)
    if worst is not None and worst[1].state is State.FAIL:
        spent = worst[1].spent
        shown = ">100%" if spent is not None and 1 < spent < 1.005 else words.share(spent).replace(" %", "%")
        return Cell(f"✗ {shown}", "fail", title, worst[0])
    if missing:
        return Cell("missing", "missing", title, worst[0] if worst else None)
    if worst is None:
        return Cell("no gate", "missing", "the tap fired, nothing judged it")
    if worst[1].state is State.NOT_RUN:
        return Cell("not run", "notrun", title, worst[0])
    spent = worst[1].spent
    if spent is None:
        return Cell("ok", "h0", title, worst[0])
    bucket = min(9, max(0, int(10 * spent))) if math.isfinite(spent) else 9
    return Cell(words.share(spent).replace(" %", "%"), f"h{bucket}", title, worst[0])


def heat_map(verdicts: list[Verdict], coverage: list[Coverage], layers: list[int]) -> tuple[list[Block], list[Row]]:
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
    blocks = []
    for start in range(0, len(every_layer), BLOCK):
        part = every_layer[start : start + BLOCK]
        rows = [Row(name, [[_cell(found.get((phase, layer, name))) for layer in part] for phase in PHASES]) for name in layer_names]
        blocks.append(Block(part, rows))
    model_rows = [Row(name, [[_cell(found.get((phase, None, name))) for phase in PHASES]]) for name in model_names]
    return blocks, model_rows
