"""Geometry of the report's inline SVG: where points, bars, keys, ticks and labels go. No numbers are made here, only places for them.

    line_chart(title, [Line(name, {x: value})], ...)    values over a whole-numbered x; log or linear y
    bar_chart(title, values, ...)                       one bar per x, from 0
    key_map(values)                                     which keys one query read, in both models

Everything returns plain coordinates and strings; page/charts.html draws them, so that every string passes its escaping. A value
that is NaN, infinite or (on a log axis) negative has no place: it stands as a cross on a shelf of its own and is named in words.
Zero has a shelf too where the axis is logarithmic. Tests: parity/unit/test_report_instruments.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reports import words

WIDTH, HEIGHT = 620, 264
LEFT, RIGHT, TOP, BOTTOM = 74, 14, 16, 44
SHELF = 20  # room above or below the axis for what has no place on it
MOST_MARKS = 14  # marks of one line; what lies between is on the line, in the readout and in the table
LARGEST = 1e300  # larger ones have no place: differences of such numbers overflow
LOOKS = ("circle", "square", "triangle", "diamond", "cross", "bar")
REFERENCE, PRODUCTION = 0, 1  # looks of the two models, everywhere


@dataclass(frozen=True)
class Line:
    """One line to draw. look  colour, dash and mark, an index; big  its marks are larger, to be seen under another's."""

    name: str
    values: Mapping[int, float | None]
    look: int
    big: bool = False


@dataclass(frozen=True)
class Limit:
    """A horizontal line that values must stay below (or above)."""

    value: float
    name: str
    below: bool = False  # its words stand below the line: values have to be above it


@dataclass(frozen=True)
class Series:
    """A line in coordinates. pieces are runs of neighbours with a place; marks is one path; sample is the legend's."""

    name: str
    look: int
    pieces: list[str]
    marks: str
    sample: str
    crosses: str = ""


@dataclass(frozen=True)
class Rule:
    """A straight line across the chart with its words."""

    at: float
    text: str
    text_at: float
    anchor: str = "end"
    level: float = 0.0


@dataclass(frozen=True)
class Chart:
    """Everything that page/charts.html draws. not_finite names what has no place on the axis; table is the text alternative."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    not_finite: list[str]
    hits: list[tuple[float, float, str]]
    columns: list[str]
    rows: list[list[str]]
    limits: list[Rule] = field(default_factory=list)
    first_red: Rule | None = None
    bars: list[tuple[float, float, float, float]] = field(default_factory=list)
    crosses: str = ""
    notes: list[str] = field(default_factory=list)
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM

    @property
    def label(self) -> str:
        """What a screen reader says in place of the drawing."""
        return f"{self.title}; {self.y_label} over {self.x_label}; the table below holds the numbers"


def mark(look: int, x: float, y: float, big: bool = False) -> str:
    """A path of one mark around (x, y)."""
    r = 4.6 if big else 3.1
    kind = LOOKS[look % len(LOOKS)]
    if kind == "circle":
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r:.1f} 0a{r} {r} 0 1 0 {-2 * r:.1f} 0"
    if kind == "square":
        return f"M{x - r:.1f} {y - r:.1f}h{2 * r:.1f}v{2 * r:.1f}h{-2 * r:.1f}z"
    if kind == "triangle":
        return f"M{x:.1f} {y - 1.2 * r:.1f}l{1.2 * r:.1f} {2.1 * r:.1f}h{-2.4 * r:.1f}z"
    if kind == "diamond":
        return f"M{x:.1f} {y - 1.4 * r:.1f}l{1.3 * r:.1f} {1.4 * r:.1f}l{-1.3 * r:.1f} {1.4 * r:.1f}l{-1.3 * r:.1f} {-1.4 * r:.1f}z"
    if kind == "cross":
        return f"M{x - r:.1f} {y - .8:.1f}h{2 * r:.1f}v1.6h{-2 * r:.1f}zM{x - .8:.1f} {y - r:.1f}h1.6v{2 * r:.1f}h-1.6z"
    return f"M{x - 1.3:.1f} {y - 1.3 * r:.1f}h2.6v{2.6 * r:.1f}h-2.6z"


def saltire(x: float, y: float) -> str:
    """The cross of a value without a place."""
    return f"M{x - 3.2:.1f} {y - 3.2:.1f}l6.4 6.4M{x - 3.2:.1f} {y + 3.2:.1f}l6.4 -6.4"


def has_place(value: float, log: bool) -> bool:
    """Can the value stand on an axis? Zero can, on a shelf of its own where the axis is logarithmic."""
    return math.isfinite(value) and abs(value) <= LARGEST and (value >= 0 or not log)


def decades(low: float, high: float) -> tuple[float, float, list[tuple[float, str]]]:
    """Log10 bounds around [low, high], and ticks at 1, 2, 5 of every decade (decades only where they are many); at least two of them."""
    lo, hi = math.log10(low), math.log10(high)
    middle, half = (lo + hi) / 2, max((hi - lo) / 2 * 1.12, 0.15)  # never so narrow that noise looks like growth
    lo, hi = middle - half, middle + half
    round_ones = [(math.log10(m) + d, power(d, m)) for d in range(math.floor(lo) - 1, math.ceil(hi) + 1) for m in (1, 2, 5)]
    inside = [t for t, _ in round_ones if lo <= t <= hi]
    if len(inside) < 2:  # so narrow that the axis is stretched to the next round number, or to one at either end
        below, above = max(t for t, _ in round_ones if t < lo), min(t for t, _ in round_ones if t > hi)
        lo, hi = (below if not inside or lo - below <= above - hi else lo), (above if not inside or above - hi < lo - below else hi)
    found = range(math.floor(lo), math.ceil(hi) + 1)
    stride = max(1, math.ceil(len(found) / 7))
    ticks = [(float(d), power(d)) for d in found if d % stride == 0] if hi - lo > 2.5 else round_ones
    return lo, hi, [(t, text) for t, text in ticks if lo <= t <= hi]


def power(d: int, m: int = 1) -> str:
    """m times ten to the d as a label."""
    return f"{m}e{d}" if abs(d) > 3 else f"{m * 10.0**d:g}"


def even_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from low to high, at most `most` + 1."""
    rough = (high - low) / most
    if not rough > 1e-300:
        return [low]
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def name_ranges(x_name: str, at: Sequence[int], labels: Mapping[int, str] | None = None) -> str:
    """`step 4`, `steps 5-24, 30`."""
    shown = ", ".join(labels[x] for x in at) if labels else words.runs(list(at))
    return f"{x_name}{'s' if len(at) > 1 and not x_name.endswith('s') else ''} {shown}"


def _placeless(name: str, values: Mapping[int, float | None], x_name: str, log: bool, labels: Mapping[int, str] | None) -> list[str]:
    """`production, steps 5-24: NaN` per kind of value that has no place."""
    groups: dict[str, list[int]] = {}
    for x in sorted(values):
        value = values[x]
        if value is not None and not has_place(value, log):
            what = "too large" if abs(value) > LARGEST and math.isfinite(value) else "negative"
            groups.setdefault(what if math.isfinite(value) else words.number(value), []).append(x)
    return [f"{name}, {name_ranges(x_name, at, labels)}: {what}" for what, at in groups.items()]


def limit_rules(limits: Sequence[Limit], places: Sequence[float]) -> list[Rule]:
    """A line per limit; words of limits that lie near each other stand in one text above the topmost of them."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    out: list[Rule] = []
    group: list[int] = []
    for n, i in enumerate(order):
        group.append(i)
        if n + 1 < len(order) and places[order[n + 1]] - places[i] < 15:
            continue
        text = ("limit: " if len(group) == 1 else "limits: ") + ", ".join(f"{limits[j].name} {words.number(limits[j].value)}" for j in sorted(group))
        out += [Rule(places[j], text if j == group[0] else "", places[group[-1]] + 12 if limits[group[0]].below else max(places[group[0]] - 4, TOP - 2)) for j in group]
        group = []
    return out


def line_chart(
    title: str, lines: Sequence[Line], x_name: str = "layer", y_label: str = "", *, log: bool = True, limits: Sequence[Limit] = (),
    first_red: tuple[int, str] | None = None, x_labels: Mapping[int, str] | None = None, x_label: str = "", joined: bool = True, notes: Sequence[str] = (),
) -> Chart | None:  # fmt: skip
    """Lines over whole-numbered x; None when there is no value at all, finite or not: an empty picture says nothing.

    x_labels   what stands under the axis instead of x;  first_red  (x, words) of the first value over its limit
    joined     False: marks alone, where x is no order;  notes  what a reader needs beside the labels
    """
    lines = [line for line in lines if any(v is not None for v in line.values.values())]
    xs = sorted({x for line in lines for x, v in line.values.items() if v is not None})
    if not xs:
        return None
    known = [v for line in lines for v in line.values.values() if v is not None]
    seen = [limit for limit in limits if has_place(limit.value, log) and (limit.value > 0 or not log)]
    inside = [v for v in known if has_place(v, log) and (v > 0 or not log)] + [limit.value for limit in seen]
    zeros, lost = log and any(v == 0 for v in known), not all(has_place(v, log) for v in known)
    top, bottom = TOP + (SHELF if lost else 0), HEIGHT - BOTTOM - (SHELF if zeros else 0)
    ticks: list[tuple[float, str]]
    if not inside:
        lo, hi, ticks = 0.0, 1.0, []
    elif log:
        lo, hi, ticks = decades(min(inside), max(inside))
    else:
        lo, hi = min(inside), max(inside)
        room = (hi - lo or abs(hi) or 1.0) * 0.06 or 1.0  # of the smallest numbers there is no part
        lo, hi = lo - room, hi + room
        ticks = [(t, f"{t:g}") for t in even_ticks(lo, hi)]
    across = max(xs[-1] - xs[0], 1)
    inner = WIDTH - LEFT - RIGHT - 28

    def px(x: int) -> float:
        return round(LEFT + 14 + inner * ((x - xs[0]) / across if xs[-1] > xs[0] else 0.5), 1)

    def level(on_axis: float) -> float:
        return round(top + (bottom - top) * (hi - on_axis) / (hi - lo), 1)

    def py(value: float) -> float:
        return level(math.log10(value) if log else value)

    def place(value: float | None) -> float | None:
        if value is None or not has_place(value, log):
            return None
        return HEIGHT - BOTTOM - 7.0 if log and value == 0 else py(value)

    series, not_finite = [], []
    stride = max(1, math.ceil(len(xs) / MOST_MARKS))
    for n, line in enumerate(lines):
        pieces: list[list[str]] = [[]]
        marks, crosses = [], []
        for i, x in enumerate(xs):
            value = line.values.get(x)
            y = place(value)
            if y is None:
                pieces.append([])
                if value is not None:
                    crosses.append(saltire(px(x), TOP + 5))
                continue
            alone = place(line.values.get(xs[i - 1])) is None if i else True
            alone = alone and (i + 1 == len(xs) or place(line.values.get(xs[i + 1])) is None)
            if alone or not joined or (i + n * max(1, stride // max(len(lines), 1))) % stride == 0:
                marks.append(mark(line.look, px(x), y, line.big))
            pieces[-1].append(f"{px(x)},{y}")
        not_finite += _placeless(line.name, line.values, x_name, log, x_labels)
        series.append(Series(line.name, line.look, [" ".join(p) for p in pieces if len(p) > 1 and joined], "".join(marks), mark(line.look, 17, 6, line.big), "".join(crosses)))
    y_ticks = [(level(t), text) for t, text in ticks]
    y_ticks += [(HEIGHT - BOTTOM - 7.0, "0")] if zeros else []
    y_ticks += [(TOP + 5.0, "NaN, inf")] if lost else []
    tick_stride = max(1, math.ceil(len(xs) / 14))
    names = dict(x_labels or {x: str(x) for x in xs})
    x_ticks = [(px(x), names.get(x, str(x))) for i, x in enumerate(xs) if i % tick_stride == 0]
    rules = limit_rules(seen, [py(limit.value) for limit in seen])
    red = None
    if first_red is not None and first_red[0] in xs:
        at = px(first_red[0])
        red = Rule(at, first_red[1], at + (6 if at < WIDTH / 2 else -6), "start" if at < WIDTH / 2 else "end", TOP - 5.0)
    wide = [names.get(x, str(x)) for x in xs]
    return Chart(
        title, x_label or x_name, y_label, series, x_ticks, y_ticks, not_finite, _hits(xs, wide, px, lines, x_name),
        [x_name, *(line.name for line in lines)], [[name, *(words.number(line.values.get(x)) for line in lines)] for x, name in zip(xs, wide, strict=True)], rules, red, notes=list(notes),
    )  # fmt: skip


def _hits(xs: list[int], names: list[str], px: Callable[[int], float], lines: Sequence[Line], x_name: str) -> list[tuple[float, float, str]]:
    """(left, width, words) of an invisible column per x: what a pointer reads there."""
    out = []
    for i, x in enumerate(xs):
        before = (px(xs[i - 1]) + px(x)) / 2 if i else px(x) - 14
        after = (px(x) + px(xs[i + 1])) / 2 if i + 1 < len(xs) else px(x) + 14
        said = [f"{line.name} {words.number(line.values[x])}" for line in lines if line.values.get(x) is not None]
        out.append((round(before, 1), round(after - before, 1), f"{x_name} {names[i]}: " + ", ".join(said)))
    return out


def bar_chart(title: str, values: Sequence[float | None], x_name: str, y_label: str, *, width: int = WIDTH, height: int = 190, said: str = "median") -> Chart | None:
    """A bar per position 0 .. n - 1 from 0 on a linear axis. None: no position has a value."""
    known = {i: v for i, v in enumerate(values) if v is not None}
    if not known:
        return None
    placed = [v for v in known.values() if has_place(v, True)]
    lost = len(placed) < len(known)
    left, right, bottom, top = 62, width - 8, height - 38, 14 + (SHELF if lost else 0)
    hi = max(placed, default=0.0)
    full = (bottom - top) / 1.06
    room = (right - left - 8) / len(values)
    bars, crosses = [], []
    for i, v in known.items():
        x = left + 4 + i * room
        if has_place(v, True):
            tall = round(v / hi * full, 1) if hi > 0 else 0.0
            bars.append((round(x + room * 0.12, 1), round(bottom - max(tall, 0.8), 1), round(room * 0.76, 1), max(tall, 0.8)))
        else:
            crosses.append(saltire(x + room / 2, 19))
    ticks = [(round(bottom - (t / hi * full if hi > 0 else 0.0), 1), f"{t:g}" if t == 0 or t >= 1e-3 else f"{t:.2g}".replace("e-0", "e-")) for t in even_ticks(0.0, hi * 1.06, 3)]
    ticks += [(19.0, "NaN, inf")] if lost else []
    stride = max(1, math.ceil(len(values) / 16))
    hits = [(round(left + 4 + i * room, 1), round(room, 1), f"{x_name} {i}: {words.number(v) if v is not None else 'no step'}") for i, v in enumerate(values)]
    absent = [i for i, v in enumerate(values) if v is None]
    not_finite = _placeless(said, known, x_name, True, None)
    return Chart(
        title, x_name, y_label, [], [(round(left + 4 + (i + 0.5) * room, 1), str(i)) for i in range(0, len(values), stride)], ticks, not_finite, hits,
        [x_name, said], [[str(i), words.number(v) if v is not None else "no step"] for i, v in enumerate(values)], bars=bars, crosses="".join(crosses),
        notes=[f"no step at {name_ranges(x_name, absent)}"] if absent else [], width=width, height=height, left=left, right=right, top=14, bottom=bottom,
    )  # fmt: skip


# ---- which keys a query read ----

LANE, GAP = 17, 9
MAP_WIDTH, MAP_LEFT, MAP_TOP = 940, 206, 18


@dataclass(frozen=True)
class Lane:
    """One row of the map: a model's window or entries. path  filled blocks; outline  entries that exist at all."""

    y: float
    name: str
    css: str
    path: str
    outline: str
    note: str


@dataclass(frozen=True)
class KeyMap:
    """Positions of one query's keys in both models, and a lane of signs where they differ."""

    title: str
    lanes: list[Lane]
    signs: list[tuple[float, float, str, str]]  # x, y, sign, words
    x_ticks: list[tuple[float, str]]
    query_x: float
    width: int
    height: int
    bottom: float
    left: int = MAP_LEFT
    top: int = MAP_TOP


def key_map(title: str, values: Mapping[str, Any]) -> KeyMap:
    """Token positions from 0 to the query run to the right; a window key is one token wide, an entry as wide as its group."""
    position, ratio = int(values["position"]), int(values["ratio"])
    parts: dict[str, list[list[int]]] = {key: values.get(key) or [] for key in (f"{part}_{side}" for part in ("window", "entries") for side in ("reference", "production", "missing", "extra", "twice"))}
    last = max([position, *(r[1] for key, ranges in parts.items() for r in ranges if key.startswith("window")), *(r[1] * ratio + ratio - 1 for key, ranges in parts.items() for r in ranges if key.startswith("entries"))])
    inner = MAP_WIDTH - MAP_LEFT - RIGHT
    scale = inner / (last + 1)

    def px(token: int) -> float:
        return MAP_LEFT + token * scale

    def blocks(ranges: list[list[int]], y: float, each: int, tall: float = LANE) -> str:
        """One path over all blocks; blocks nearer than a third of a pixel are one."""
        out: list[tuple[float, float]] = []
        for first, end in ranges:
            for a, b in [(i, i) for i in range(first, end + 1)] if each > 1 and each * scale > 5 else [(first, end)]:
                x, x2 = px(a * each), px((b + 1) * each)
                x2 = max(x2 - (1.0 if each * scale > 5 and each > 1 else 0.0), x + 1.5)
                if out and x - out[-1][1] < 0.33:
                    out[-1] = (out[-1][0], x2)
                else:
                    out.append((x, x2))
        return "".join(f"M{x:.1f} {y:.1f}h{x2 - x:.1f}v{tall}h{x - x2:.1f}z" for x, x2 in out)

    lanes: list[Lane] = []
    y = float(MAP_TOP)
    chosen = "selected" if values.get("topk") else "read"
    for side in ("reference", "production"):
        for part, each in (("window", 1), ("entries", ratio)):
            if part == "entries" and not ratio and not parts["entries_reference"] and not parts["entries_production"]:
                continue
            counts = values.get(f"{part}_keys", {})
            count = words.number(counts.get(side))
            complete = int(values.get("complete") or 0)
            note = count if part == "window" else f"{count} of {complete}"
            outline = f"M{MAP_LEFT} {y:.1f}h{max(complete * ratio * scale, 1):.1f}v{LANE}h{-max(complete * ratio * scale, 1):.1f}z" if part == "entries" and complete else ""
            name = f"{side}: {'window' if part == 'window' else chosen}"
            lanes.append(Lane(y, name, f"{part} {side}", blocks(parts[f"{part}_{side}"], y, max(each, 1)), outline, note))
            y += LANE + 3
        y += GAP
    signs = []
    for part, each in (("window", 1), ("entries", max(ratio, 1))):
        for kind, sign in (("missing", "−"), ("extra", "+"), ("twice", "2")):
            for first, end in parts[f"{part}_{kind}"][:40]:
                noun = "position" if part == "window" else "entry"
                signs.append((round((px(first * each) + px((end + 1) * each)) / 2, 1), y + LANE - 4, sign, f"{kind} in production: {noun} {first}{f'-{end}' if end > first else ''}"))
    bottom = y + (LANE + 2 if signs else 0)
    ticks = [(round(px(int(t)) + scale / 2, 1), str(int(t))) for t in even_ticks(0, last, 6) if float(t).is_integer()]
    return KeyMap(title, lanes, signs, ticks, round(px(position) + scale / 2, 1), MAP_WIDTH, int(bottom) + 38, bottom)
