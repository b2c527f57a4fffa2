"""Geometry of the report's inline SVG: where points, ticks and labels go. No numbers are made here, only places for them.

`line_chart` returns plain coordinates; page/macros.html draws them, so that every string passes its escaping.
Tests: parity/unit/test_reports.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WIDTH, HEIGHT = 620, 250
LEFT, RIGHT, TOP, BOTTOM = 68, 14, 14, 34


@dataclass(frozen=True)
class Mark:
    """One value: its place, and the words that a pointer shows."""

    x: float
    y: float
    words: str


@dataclass(frozen=True)
class Series:
    """One line. pieces are runs of finite neighbours: a gap where a value is missing or not finite."""

    name: str
    css: str
    marks: list[Mark] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Chart:
    """Everything that page/macros.html draws. not_finite names the values that have no place on an axis."""

    title: str
    series: list[Series]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    not_finite: list[str]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def _decades(low: float, high: float) -> tuple[float, float, list[tuple[float, str]]]:
    """Log10 bounds around [low, high], and ticks at 1, 2, 5 of every decade (decades only where they are many)."""
    lo, hi = math.log10(low), math.log10(high)
    middle, half = (lo + hi) / 2, max((hi - lo) / 2 * 1.12, 0.15)  # never so narrow that noise looks like growth
    lo, hi = middle - half, middle + half
    decades = range(math.floor(lo), math.ceil(hi) + 1)
    stride = max(1, math.ceil(len(decades) / 7))
    if hi - lo > 2.5:
        ticks = [(float(d), f"1e{d}" if abs(d) > 3 else f"{10.0**d:g}") for d in decades if d % stride == 0]
    elif hi - lo < 0.35:  # no 1, 2 or 5 need lie in so narrow a range
        ticks = [(t, f"{10**t:.3g}") for t in (middle - half / 2, middle, middle + half / 2)]
    else:
        ticks = [(math.log10(m * 10.0**d), f"{m * 10.0**d:g}") for d in decades for m in (1, 2, 5)]
    return lo, hi, [(t, text) for t, text in ticks if lo <= t <= hi]


def line_chart(title: str, lines: list[tuple[str, str, dict[int, float]]], x_name: str = "layer") -> Chart | None:
    """Lines over whole-numbered x on a logarithmic y axis; None when no value has a place on it.

    lines   (name, css class, {x: value}); values that are not finite or not positive are named, not drawn
    """
    drawn = [v for _, _, values in lines for v in values.values() if math.isfinite(v) and v > 0]
    xs = sorted({x for _, _, values in lines for x in values})
    if not drawn or not xs:
        return None
    lo, hi, y_ticks = _decades(min(drawn), max(drawn))
    across = max(xs[-1] - xs[0], 1)

    def px(x: int) -> float:
        return round(LEFT + 16 + (WIDTH - LEFT - RIGHT - 32) * ((x - xs[0]) / across if xs[-1] > xs[0] else 0.5), 1)

    def py(log_y: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (hi - log_y) / (hi - lo), 1)

    series: list[Series] = []
    not_finite: list[str] = []
    for name, css, values in lines:
        marks: list[Mark] = []
        pieces: list[list[str]] = [[]]
        for x in xs:
            value = values.get(x)
            if value is None or not math.isfinite(value) or value <= 0:
                pieces.append([])
                if value is not None:
                    shown = "NaN" if math.isnan(value) else f"{value:g}"
                    not_finite.append(f"{name}, {x_name} {x}: {shown}")
                continue
            mark = Mark(px(x), py(math.log10(value)), f"{name}, {x_name} {x}: {value:.4g}")
            marks.append(mark)
            pieces[-1].append(f"{mark.x},{mark.y}")
        series.append(Series(name, css, marks, [" ".join(p) for p in pieces if len(p) > 1]))
    stride = max(1, math.ceil(len(xs) / 16))
    x_ticks = [(px(x), str(x)) for i, x in enumerate(xs) if i % stride == 0]
    return Chart(title, series, x_ticks, [(py(t), text) for t, text in y_ticks], not_finite)
