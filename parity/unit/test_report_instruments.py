"""Charts, key maps and tables of the report: places against hand arithmetic, what has no place is named, nothing measured is said.

And the measurements behind them, on a small invented audit, against values computed here from the same tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parity import gates, measure
from parity.audit import Floor
from parity.unit.synthetic_run import header
from probes.core.records import Header, Measurement, Record, Summary, from_line, to_line
from reports import charts, instruments
from reports.charts import BOTTOM, HEIGHT, LEFT, RIGHT, SHELF, TOP, WIDTH, Chart, Limit, Line, bar_chart, key_map, line_chart
from reports.render import report_html

NAN, INF = math.nan, math.inf


def lines_of(values: dict[int, float | None], name: str = "production") -> list[Line]:
    return [Line(name, values, 1)]


def made(values: dict[int, float | None], **options: Any) -> Chart:
    chart = line_chart("a title", lines_of(values), "step", "unit", **options)
    assert chart is not None
    return chart


def points_of(chart: Chart) -> list[tuple[float, float]]:
    """Every point of every line."""
    return [(float(x), float(y)) for s in chart.series for piece in s.pieces for x, y in (p.split(",") for p in piece.split())]


def page_of(*measurements: Record, head: Header | None = None) -> str:
    records: list[Record] = [head or header(), *measurements, Summary("incomplete", 0, 0, 0, None, 0, reasons=["nothing was compared"])]
    return report_html(records)


def section_of(html: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', html, re.S)
    assert found, name
    return found[0]


# ---- lines ----


def test_points_stand_where_their_logarithm_says():
    chart = made({0: 1e-4, 5: 1e-3, 10: 1e-2})
    top, bottom = TOP, HEIGHT - BOTTOM
    middle = (top + bottom) / 2
    reach = (bottom - top) / 2 / 1.12
    assert points_of(chart) == [  # type: ignore[comparison-overlap]
        (LEFT + 14, pytest.approx(middle + reach, abs=0.1)), ((LEFT + WIDTH - RIGHT) / 2, pytest.approx(middle, abs=0.1)), (WIDTH - RIGHT - 14, pytest.approx(middle - reach, abs=0.1)),
    ]  # fmt: skip


def test_points_of_a_linear_axis_stand_where_their_value_says():
    chart = made({2: 0.6, 4: 1.0}, log=False)
    (_, low), (_, high) = points_of(chart)
    half = dict((text, y) for y, text in chart.y_ticks)
    assert (half["0.6"], half["1"]) == (low, high)
    assert low > high, "larger is higher"


@given(st.dictionaries(st.integers(0, 200), st.floats(1e-12, 1e12), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_points_keep_the_order_of_their_values_and_stay_inside(values):
    chart = made(dict(values))
    where = {x: y for (x, y) in points_of(chart)}
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in where.items())
    assert all(TOP <= y <= HEIGHT - BOTTOM for y, _ in chart.y_ticks)
    if len(values) > 1:
        by_x = [y for _, y in sorted(where.items())]
        ordered = [values[x] for x in sorted(values)]
        assert all((a - b) * (c - d) <= 0 for a, b, c, d in zip(by_x, by_x[1:], ordered, ordered[1:], strict=False))


def test_a_tick_stands_at_the_value_it_names():
    chart = made({0: 0.001, 1: 0.01, 2: 0.1, 3: 1000.0})
    ticks = {text: y for y, text in chart.y_ticks}
    assert ticks["0.01"] == points_of(chart)[1][1]


@pytest.mark.parametrize(("value", "word"), [(NAN, "NaN"), (INF, "inf"), (-INF, "-inf"), (-1.0, "negative"), (1.7e308, "too large")])
def test_what_has_no_place_is_named_and_never_drawn(value, word):
    chart = made({0: 1e-3, 1: 2e-3, 2: value, 3: value, 4: value, 5: 1e-3, 6: 0.0, 7: 1e-3})
    assert chart.not_finite == [f"production, steps 2-4: {word}"]
    assert len(chart.series[0].pieces) == 2, "a gap where the values are missing"
    assert len(points_of(chart)) == 5
    zero = next(y for y, text in chart.y_ticks if text == "0")
    assert zero > HEIGHT - BOTTOM - SHELF
    assert [y for _, y in points_of(chart)].count(zero) == 1, "only the zero stands at zero"
    assert chart.series[0].crosses.count("M") == 6, "three crosses of two strokes"
    shown = [row[1] for row in chart.rows]
    assert (word in shown[2] or word in ("negative", "too large"))
    assert shown[2] != "0"


def test_a_missing_value_is_a_gap_and_a_dash_in_the_table():
    chart = line_chart("t", [Line("a", {0: 1.0, 1: None, 2: 1.0}, 0), Line("b", {0: 2.0, 1: 2.0, 2: 2.0}, 1)], "step")
    assert chart is not None
    assert chart.rows[1] == ["1", "–", "2"]
    assert chart.not_finite == []
    assert chart.series[0].pieces == [], "two lonely points"
    assert chart.series[0].marks.count("a3.1") == 4, "are still marked, two arcs each"
    assert "a " not in chart.hits[1][2]


@pytest.mark.parametrize(("low", "high"), [(3.26, 4.61), (1.0, 1.0), (0.9, 1.1), (2.1e-7, 2.2e-7), (5.1, 9.9), (1.0, 30.0), (1e-9, 1e9), (0.2, 0.5)])
def test_ticks_of_a_logarithmic_axis_are_round(low, high):
    lo, hi, ticks = charts.decades(low, high)
    assert len(ticks) >= 2
    assert all(lo <= t <= hi for t, _ in ticks)
    assert all(float(text) == pytest.approx(10**t) and re.fullmatch(r"[0.]*[125]0*(e-?\d+)?", text) for t, text in ticks), ticks
    assert 10**lo <= low <= high <= 10**hi
    assert hi - lo < math.log10(high / low) * 1.12 + 0.8, "stretched by no more than two round numbers"


def test_recall_is_drawn_where_something_was_left_out_and_a_nan_there_stays_red():
    found = instruments.Found([Measurement("recall", n, "prefill", None, "p", {"set": "the run, isolated", "discarding": 9 * n, "worst": NAN}) for n in (0, 1)])
    (chart,) = instruments.recall_charts(found)
    assert chart.not_finite == ["same formats, isolated, layer 1: NaN"]
    assert instruments.recall_nothing(found) == ["prefill, layer 0"]


def test_a_wide_table_stands_in_parts_that_hold_every_column_once_and_its_leading_ones_in_each():
    table = instruments.Table(["layer", "site", *(f"value number {n}" for n in range(40))], [["1", "hc_attn", *["0.000123"] * 40]], lead=2)
    assert len(table.parts) > 2
    assert all(lead == [0, 1] for lead, _ in table.parts)
    assert [i for _, part in table.parts for i in part] == list(range(2, 42))
    assert instruments.Table(["a", "b"], [["1", "2"]]).parts == [([], [0, 1])]
    assert instruments.Table([], []).parts == [([], [])]


def test_nothing_to_draw_is_no_picture():
    assert line_chart("t", [], "layer") is None
    assert line_chart("t", lines_of({}), "layer") is None
    assert line_chart("t", lines_of({0: None, 1: None}), "layer") is None
    assert bar_chart("t", [None, None], "residue", "u") is None
    assert bar_chart("t", [], "residue", "u") is None


def test_only_unplaceable_values_are_still_said():
    chart = made({0: NAN, 1: INF})
    assert chart.not_finite == ["production, step 0: NaN", "production, step 1: inf"]
    assert points_of(chart) == []


@pytest.mark.parametrize("layers", [1, 2, 8, 61, 400])
def test_ticks_never_crowd(layers):
    chart = made({n: 0.01 * (n + 1) for n in range(layers)})
    xs = [x for x, _ in chart.x_ticks]
    assert 1 <= len(xs) <= 15
    assert all(b - a > 25 for a, b in itertools.pairwise(xs))
    assert len(chart.rows) == layers
    marks = chart.series[0].marks.count("M")
    assert marks == layers if layers <= charts.MOST_MARKS else 2 <= marks <= charts.MOST_MARKS + 1


def test_a_limit_is_inside_the_picture_and_near_ones_share_their_words():
    chart = line_chart("t", lines_of({0: 1e-3, 1: 1e-3}), "step", "u", limits=[Limit(0.2, "csa"), Limit(0.21, "hca"), Limit(1e-4, "logits")])
    assert chart is not None
    assert [rule.text for rule in chart.limits if rule.text] == ["limits: csa 0.2, hca 0.21", "limit: logits 0.0001"]
    assert all(TOP <= rule.at <= HEIGHT - BOTTOM for rule in chart.limits)
    assert len({rule.at for rule in chart.limits}) == 3


def test_the_first_red_step_is_marked_where_it_is():
    chart = made({n: 0.1 for n in range(11)}, first_red=(5, "✗ first"))
    assert chart.first_red is not None
    assert chart.first_red.at == (LEFT + WIDTH - RIGHT) / 2
    assert made({0: 1.0}, first_red=(7, "✗ elsewhere")).first_red is None


@pytest.mark.parametrize("look", range(len(charts.LOOKS)))
def test_every_look_has_a_mark_of_its_own(look):
    shapes = {re.sub(r"[\d. -]+", "", charts.mark(n, 10, 10)) + charts.mark(n, 10, 10) for n in range(len(charts.LOOKS))}
    assert len(shapes) == len(charts.LOOKS)
    assert charts.mark(look, 10, 10) != charts.mark(look, 10, 10, big=True) or charts.LOOKS[look] == "cross"


@example([5e-324], False)
@given(st.lists(st.one_of(st.none(), st.floats()), max_size=130), st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_value_breaks_a_chart(values, log):
    for chart in (line_chart("t", lines_of(dict(enumerate(values))), "step", "u", log=log), bar_chart("t", values, "residue", "u")):
        if chart is None:
            assert all(v is None for v in values)
            continue
        text = json.dumps(dataclasses.asdict(chart))
        places = json.dumps([chart.x_ticks, [y for y, _ in chart.y_ticks], chart.bars, [s.pieces for s in chart.series], [h[:2] for h in chart.hits]])
        assert not re.search(r"nan|inf", places, re.I), text[:300]


# ---- bars ----


def test_bars_are_as_tall_as_their_values():
    chart = bar_chart("t", [1.0, 2.0, 0.0, None, NAN], "residue", "u")
    assert chart is not None
    heights = [h for _, _, _, h in chart.bars]
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert heights[2] < 1, "zero is drawn as zero"
    assert len(chart.bars) == 3, "neither the missing one nor NaN"
    assert chart.not_finite == ["median, residue 4: NaN"]
    assert chart.notes == ["no step at residue 3"]
    assert [row[1] for row in chart.rows] == ["1", "2", "0", "no step", "NaN"]
    assert all(y + h == pytest.approx(chart.bottom) for _, y, _, h in chart.bars)


# ---- key maps ----


def query(**changes: Any) -> dict[str, Any]:
    """A CSA query at position 40 with a window of 8 and entries of 4 tokens."""
    values: dict[str, Any] = {
        "chosen": "last prompt token", "row": 0, "kind": "csa", "position": 40, "window": 8, "ratio": 4, "complete": 10, "topk": 3,
        **{f"{part}_{side}": [] for part in ("window", "entries") for side in ("reference", "production", "missing", "extra", "twice")},
        "window_reference": [[33, 40]], "window_production": [[33, 40]], "entries_reference": [[0, 1], [7, 7]], "entries_production": [[0, 1], [7, 7]],
        "window_keys": {"reference": 8, "production": 8}, "entries_keys": {"reference": 3, "production": 3}, "different": 0,
    }  # fmt: skip
    return values | changes


def blocks(path: str) -> list[tuple[float, float]]:
    """(left, width) of every block of a path."""
    return [(float(x), float(w)) for x, w in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", path)]


def test_keys_stand_at_their_tokens():
    drawn = key_map("q", query())
    scale = (charts.MAP_WIDTH - charts.MAP_LEFT - RIGHT) / 41
    assert [lane.name for lane in drawn.lanes] == ["reference: window", "reference: selected", "production: window", "production: selected"]
    (window,) = blocks(drawn.lanes[0].path)
    assert window[0] == pytest.approx(charts.MAP_LEFT + 33 * scale, abs=0.1)
    assert window[1] == pytest.approx(8 * scale, abs=0.1)
    starts = [x for x, _ in blocks(drawn.lanes[1].path)]
    assert starts == [pytest.approx(charts.MAP_LEFT + 4 * e * scale, abs=0.1) for e in (0, 1, 7)]
    assert [lane.note for lane in drawn.lanes] == ["8", "3 of 10", "8", "3 of 10"]
    (outline,) = blocks(drawn.lanes[1].outline)
    assert outline[0] == charts.MAP_LEFT
    assert outline[1] == pytest.approx(40 * scale, abs=0.1), "ten entries of four tokens are complete"
    assert drawn.signs == []


def test_differences_have_a_sign_and_words_at_their_place():
    drawn = key_map("q", query(entries_missing=[[7, 7]], entries_extra=[[5, 6]], window_missing=[[33, 33]], window_twice=[[40, 40]], different=5))
    scale = (charts.MAP_WIDTH - charts.MAP_LEFT - RIGHT) / 41
    assert [(sign, said) for _, _, sign, said in drawn.signs] == [
        ("−", "missing in production: position 33"), ("2", "twice in production: position 40"), ("−", "missing in production: entry 7"), ("+", "extra in production: entry 5-6"),
    ]  # fmt: skip
    assert drawn.signs[2][0] == pytest.approx(charts.MAP_LEFT + 30 * scale, abs=0.1)
    html = section_of(page_of(Measurement("visible query", 2, "prefill", None, None, query(entries_missing=[[7, 7]], different=1))), "visible")
    assert "✗ 1 key in one model only" in html
    assert "missing in production: entry 7" in html


def test_a_key_from_the_future_is_inside_the_map():
    drawn = key_map("q", query(window_production=[[33, 60]], window_extra=[[41, 60]]))
    left, wide = blocks(drawn.lanes[2].path)[0]
    assert left + wide <= charts.MAP_WIDTH - RIGHT + 0.2
    assert drawn.query_x < charts.MAP_WIDTH - RIGHT - 100


def test_a_long_context_is_one_short_path():
    drawn = key_map("q", query(position=1 << 20, complete=1 << 18, window_reference=[[(1 << 20) - 127, 1 << 20]], entries_reference=[[i, i] for i in range(0, 4096, 2)]))
    assert len(drawn.lanes[1].path) < 20_000
    assert blocks(drawn.lanes[0].path)[0][1] >= 1.5, "a window of a million tokens is still seen"


def test_every_query_is_on_the_page_and_in_the_list_those_that_differ_first():
    found = [Measurement("visible query", layer, phase, None, None, query(different=int(layer == 3))) for phase in ("prefill", "decode") for layer in (1, 2, 3)]
    html = section_of(page_of(*found), "visible")
    labels = re.findall(r"<option[^>]*>([^<]*)", html)
    assert len(labels) == 6 == html.count('<details class="query-of"')
    assert [label.startswith("✗ layer 3") for label in labels] == [True, True, False, False, False, False]
    assert html.count(" open>") == 1, "without scripting the first one is open, the others a click away"


# ---- nothing measured ----


@pytest.mark.parametrize(("name", "said"), [
    ("drift", "Not measured step by step"), ("residual", "was not measured in this run"), ("sinkhorn", "Not measured in this run"), ("visible", "No query was recorded key by key"),
    ("recall", "No judged layer has an indexer"), ("logits", "Logits were not measured step by step"), ("memory", "Not measured in this run"),
])  # fmt: skip
def test_nothing_measured_is_said_and_no_empty_picture_drawn(name, said):
    section = section_of(page_of(), name)
    assert said in section
    assert "<svg" not in section


def test_values_of_another_shape_never_break_the_page():
    odd: list[Any] = ["x", None, [], {}, -1, 1e308, "nan", [[1, 0]], [[0, 10**9]], True, [None, "inf", {"a": 1}]]
    keys = {
        "visible query": ["position", "ratio", "window_reference", "entries_missing", "window_keys", "different", "topk"],
        "drift steps": ["median", "worst", "limit", "first_over", "mod4_median", "mod128_median", "layers"], "drift layer": ["median", "worst", "limit", "first_over"],
        "logits steps": ["largest_error", "kl", "same_top1", "first_flips", "flips", "rows"], "greedy": ["reference_text_parts", "first_difference", "reference_text"],
        "residual": ["reference_absmax", "health", "ratio"], "sinkhorn": ["row_deviation", "residual_per_iteration", "site"], "residual growth": ["half", "from_comb_production"],
        "recall": ["worst", "exact_worst", "set", "keys"], "memory.rate": ["formula_per_token", "kind"], "memory.widths": ["wanted", "wrong_width", "name"], "memory.footprint": ["off_share", "kv_gb"],
    }  # fmt: skip
    rng = random.Random(3)
    found = []
    for name, listed in keys.items():
        base = query() if name == "visible query" else {}
        for value in odd:
            found += [Measurement(name, rng.choice([None, 2]), "decode", rng.choice([None, 3]), None, {**base, key: value, "site": "hc_attn"}) for key in listed]
    html = page_of(*[from_line(to_line(m)) for m in found])
    assert "could not be drawn: the record is incomplete" in html


# ---- what the sections say ----


def step_values(kind: str, steps: int = 128, **changes: Any) -> dict[str, Any]:
    rng = random.Random(kind)
    series = [float(f"{10 ** rng.uniform(-4, -2):.4g}") for _ in range(steps)]
    return {
        "layers": kind, "mode": "free", "steps": steps, "median": series, "worst": [2 * v for v in series], "worst_in": [2] * steps, "limit": 0.1, "first_over": None,
        "mod4_median": series[:4], "mod4_worst": series[:4], "mod128_median": series[:128], "mod128_worst": series[:128], **changes,
    }  # fmt: skip


def test_the_first_step_over_a_limit_is_said_and_marked():
    late = Measurement("drift steps", None, "decode", None, None, step_values("csa", first_over={"step": 30, "layer": 4, "error": "nan", "limit": 0.1}))
    early = Measurement("drift steps", None, "decode", None, None, step_values("hca", first_over={"step": 12, "layer": 3, "error": 0.5, "limit": 0.1}))
    html = section_of(page_of(late, early), "drift")
    assert "First row over its limit: decode step 12</strong>, layer 3 (hca): 0.5, limit 0.1" in html
    assert "✗ first over its limit: step 12" in html
    assert "first over" not in section_of(page_of(Measurement("drift steps", None, "decode", None, None, step_values("csa"))), "drift")


def test_every_chart_has_title_axes_unit_and_its_numbers_as_a_table():
    html = page_of(Measurement("drift steps", None, "decode", None, None, step_values("csa")), Measurement("residual", 0, "prefill", None, None, {"reference_absmax": 3.0, "production_absmax": 3.1}))
    figures = re.findall(r'<figure class="plot">.*?</figure>', html, re.S)
    assert len(figures) == 5, "worst, median, modulo 4, modulo 128, |X|"
    for figure in figures:
        assert re.search(r"<figcaption>\w", figure)
        assert len(re.findall(r'class="axis-name"[^>]*>[^<]+<', figure)) == 2
        assert 'role="img" aria-label="' in figure
        assert "<summary>the same as a table</summary>" in figure
        assert figure.count("<tr>") > 1


def test_texts_part_at_a_marked_token():
    values = {
        "row": 0, "reference_text": "a b c", "production_text": "a x c", "first_difference": 1, "reference_text_parts": ["a ", "b", " c"], "production_text_parts": ["a ", "<x>", " c"],
    }  # fmt: skip
    html = section_of(page_of(Measurement("greedy", None, "decode", None, None, values)), "logits")
    assert '<pre>a <mark title="first token that differs">b</mark> c</pre>' in html
    assert "&lt;x&gt;</mark> c</pre>" in html
    old = {key: value for key, value in values.items() if "parts" not in key}
    assert "did not record the first differing token" in page_of(Measurement("greedy", None, "decode", None, None, old))
    same = {**old, "first_difference": None}
    assert "The same tokens in both models" in page_of(Measurement("greedy", None, "decode", None, None, same))


def test_the_memory_table_holds_formula_measured_and_wrong_width():
    rate = {"of": "pro", "kind": "csa", "formula_per_token": 163.0, "bytes_per_token": 170.0, "off_the_line": 7.0, "wrong_width_per_token": 4352.0, "bf16_per_token": 320.0, "formula_constant": 1.0, "constant_bytes": 1.0}
    old = {"name": "indexer key", "wanted": 64, "held": 64}
    table = instruments.memory_table(instruments.Found([Measurement("memory.rate", values=rate), Measurement("memory.widths", layer=2, values=old), Measurement("memory.widths", layer=4, values=old)]))
    assert ["csa layer, pro: bytes a token", "163", "170", "7", "4352", "320"] in table.rows
    assert ["indexer key, bytes a row (layers 2, 4)", "64", "64", "not recorded", "–", "not recorded"] in table.rows
    assert sum("indexer key" in row[0] for row in table.rows) == 1


def test_sixty_one_layers_and_128_steps_stay_small():
    found = [Measurement("drift steps", None, "decode", None, None, step_values(kind)) for kind in instruments.KINDS]
    for layer in range(61):
        found.append(Measurement("drift layer", layer, "decode", None, None, {"median": 1e-3, "worst": 1e-2, "limit": 0.1, "first_over": None}))
        for phase in ("prefill", "decode"):
            found.append(Measurement("residual", layer, phase, None, None, {"reference_absmax": 3.0 + layer, "production_absmax": 3.0 + layer}))
            found += [Measurement("residual growth", layer, phase, None, None, {"half": half, **{f"{k}_{s}": 0.5 for k in ("from_comb", "from_post", "remainder") for s in ("reference", "production")}}) for half in ("hc_attn", "hc_ffn")]
            found += [Measurement("sinkhorn", layer, phase, None, None, {"site": s, "row_deviation": 1e-3, "column_deviation": 1e-6, "matrix_distance": 1e-4, "residual_per_iteration": [0.1] * 20}) for s in ("hc_attn", "hc_ffn")]
    scattered = [[3 * i, 3 * i] for i in range(340)]
    found += [Measurement("visible query", n, "decode", n, None, query(position=8000, complete=2000, entries_reference=scattered, entries_production=scattered)) for n in range(25)]
    found.append(Measurement("logits steps", None, "decode", None, None, {"steps": 128, "rows": 1, "largest_error": [0.1] * 128, "kl": [1e-3] * 128, "same_top1": [1] * 128, "flips": 0, "first_flips": []}))
    assert sum(len(to_line(m)) for m in found if m.name.startswith(("drift", "visible query", "logits steps"))) < 350_000
    assert len(page_of(*found, head=header(61))) < 1_600_000


# ---- the measurements ----

STEPS, LENGTHS = 6, (6, 9)  # decode positions 6..11 and 9..14: a window of 4, groups of 4 and 8
RATIOS = {0: 0, 1: 4, 2: 8}
KINDS = {0: "window", 1: "csa", 2: "hca"}


class World:
    """An invented audit: what parity/measure.py asks of one, with values that a test can spoil."""

    def __init__(self, steps: int = STEPS) -> None:
        generator = torch.Generator().manual_seed(5)
        self.plan = SimpleNamespace(layers=(0, 1, 2), steps=STEPS, phases=("prefill", "decode"), checkpoint_dir="/nowhere")
        self.config = SimpleNamespace(kind=KINDS.__getitem__, ratio=RATIOS.__getitem__, sliding_window=4, index_topk=2, num_hidden_layers=3)
        self.lengths = torch.tensor(LENGTHS)
        self.recorded = steps
        self.held: dict[tuple[str, str, str], torch.Tensor] = {}
        for layer in range(3):
            for phase, width in (("prefill", max(LENGTHS)), ("decode", STEPS)):
                want = torch.randn(2, width, 3, 8, generator=generator)
                for who in ("production", "isolated"):
                    self.held[who, f"layers.{layer}.hc_ffn.X", phase] = want + 1e-3 * (layer + 1) * torch.randn(want.shape, generator=generator)
                self.held["reference", f"layers.{layer}.hc_ffn.X", phase] = want
                keys = torch.stack([torch.stack([self.keys(layer, int(p)) for p in row]) for row in self.positions(phase, (0, STEPS - 1) if phase == "decode" else None)])
                for who in ("production", "isolated", "reference"):
                    self.held[who, f"layers.{layer}.attn.visible", phase] = keys.clone()
                    self.held[who, f"layers.{layer}.attn.core", phase] = torch.ones(2, width, 2, 4)
        want = torch.randn(2, STEPS, 16, generator=generator)
        self.held |= {("reference", "logits", "decode"): want, ("production", "logits", "decode"): want + 0.01 * torch.randn(want.shape, generator=generator)}
        self.floors: dict[str, Floor] = {}

    def keys(self, layer: int, position: int) -> torch.Tensor:
        """By rule: the last four positions, then the newest two (CSA) or all complete entries."""
        near = [p for p in range(position + 1) if p > position - 4]
        ratio = RATIOS[layer]
        far = list(range((position + 1) // ratio)) if ratio else []
        far = far[-2:] if layer == 1 else far
        return torch.tensor(near + [-1] * (4 - len(near)) + far + [-1] * (4 - len(far)))

    def positions(self, phase: str, steps: tuple[int, int] | None) -> torch.Tensor:
        if phase == "prefill" or steps is None:
            return torch.arange(max(LENGTHS))[None].expand(2, -1)
        return self.lengths[:, None] + torch.arange(steps[0], steps[1] + 1)[None]

    def valid_over(self, phase: str, steps: tuple[int, int] | None) -> torch.Tensor:
        if phase == "prefill" or steps is None:
            return torch.arange(max(LENGTHS))[None] < self.lengths[:, None]
        return torch.ones(2, steps[1] - steps[0] + 1, dtype=torch.bool)

    def gate(self, name: str) -> gates.Gate:
        return gates.GATES[name]

    def fired(self, who: str, point: str, phase: str, steps: tuple[int, int] | None) -> int:
        if (who, point, phase) not in self.held:
            return 0
        return 1 if steps is None else sum(s < self.recorded for s in range(steps[0], steps[1] + 1))

    def values(self, who: str, point: str, phase: str, steps: tuple[int, int] | None = None) -> torch.Tensor:
        held = self.held[who, point, phase]
        return held if steps is None else held[:, steps[0] : steps[1] + 1]

    def floor(self, mode: str, point: str) -> Floor:
        return self.floors.get(point, Floor(error=0.01, rows=10))


def audit(**options: Any) -> Any:
    return World(**options)


def named(found: list[Measurement], name: str) -> dict[str, dict[str, Any]]:
    return {str(m.values["layers"]): m.values for m in found if m.name == name}


def row_error(world: World, point: str, b: int, s: int) -> float:
    """Relative L2 of one row, with Python's own arithmetic."""
    got, want = (world.held[who, point, "decode"][b, s].flatten().tolist() for who in ("production", "reference"))
    return math.sqrt(sum((g - w) ** 2 for g, w in zip(got, want, strict=True))) / math.sqrt(sum(w * w for w in want))


def test_errors_per_step_and_residue_are_those_of_the_rows():
    world = audit()
    found = measure.drift_steps(world)
    series = named(found, "drift steps")
    assert set(series) == {"window", "csa", "hca", "logits"}
    point = "layers.2.hc_ffn.X"
    each = {(b, s): row_error(world, point, b, s) for b in range(2) for s in range(STEPS)}
    assert series["hca"]["worst"] == pytest.approx([max(each[0, s], each[1, s]) for s in range(STEPS)], rel=1e-3)
    assert series["hca"]["median"] == pytest.approx([statistics.median_low([each[0, s], each[1, s]]) for s in range(STEPS)], rel=1e-3)
    for residue in range(4):
        there = [error for (b, s), error in each.items() if (LENGTHS[b] + s) % 4 == residue]
        assert series["hca"]["mod4_median"][residue] == pytest.approx(statistics.median_low(there), rel=1e-3)
        assert series["hca"]["mod4_steps"][residue] == len(there)
    assert [r for r, v in enumerate(series["hca"]["mod128_median"]) if v is not None] == list(range(6, 15))
    layers = {m.layer: m.values for m in found if m.name == "drift layer"}
    assert layers[2]["worst"] == pytest.approx(max(each.values()), rel=1e-3)
    assert layers[2]["worst_step"] == max(each, key=lambda at: each[at])[1]
    assert layers[2]["limit"] == pytest.approx(gates.K_FREE * 0.01 + gates.GATES["hc_ffn.X"].free, rel=1e-3)


def test_the_first_row_over_its_limit_is_found_with_layer_and_step():
    world = audit()
    world.held["production", "layers.1.hc_ffn.X", "decode"][1, 3] *= 2
    values = named(measure.drift_steps(world), "drift steps")
    assert (values["csa"]["first_over"]["step"], values["csa"]["first_over"]["layer"]) == (3, 1)
    assert values["csa"]["first_over"]["error"] == pytest.approx(1.0, abs=0.02)
    assert values["hca"]["first_over"] is None
    assert values["csa"]["worst_in"][3] == 1


def test_not_a_number_is_over_every_limit_and_no_missing_row():
    world = audit()
    world.held["production", "layers.0.hc_ffn.X", "decode"][0, 2, 0, 0] = NAN
    found = measure.drift_steps(world)
    values = named(found, "drift steps")["window"]
    assert math.isnan(values["worst"][2])
    assert values["first_over"]["step"] == 2
    assert not any(math.isnan(v) for i, v in enumerate(values["worst"]) if i != 2)
    assert math.isnan(next(m for m in found if m.name == "drift layer" and m.layer == 0).values["worst"])
    page = page_of(*[from_line(to_line(m)) for m in found])
    assert "window, step 2: NaN" in page


def test_without_a_floor_there_is_no_limit_to_be_over():
    world = audit()
    world.floors["layers.0.hc_ffn.X"] = Floor()
    values = named(measure.drift_steps(world), "drift steps")["window"]
    assert "limit" not in values
    assert "first_over" not in values


def test_a_run_that_stopped_shows_the_steps_it_has():
    world = audit(steps=2)
    assert {values["steps"] for values in named(measure.drift_steps(world), "drift steps").values()} == {2}
    assert measure.logits_steps(world)[0].values["steps"] == 2
    assert {m.step for m in measure.visible_queries(world, "decode")} <= {0, 1}
    gone = audit(steps=0)
    assert measure.drift_steps(gone) == measure.logits_steps(gone) == measure.visible_queries(gone, "decode") == []


def test_logits_per_step_are_those_of_the_rows():
    world = audit()
    got, want = world.held["production", "logits", "decode"], world.held["reference", "logits", "decode"]
    got[1, 4] = want[1, 4]
    got[1, 4, int(want[1, 4].argmin())] = 9.0
    (one,) = measure.logits_steps(world)
    v = one.values
    assert v["same_top1"] == [2, 2, 2, 2, 1, 2]
    assert (v["flips"], v["first_flips"][0]["step"], v["first_flips"][0]["row"]) == (1, 4, 1)
    assert v["first_flips"][0]["margin"] == pytest.approx(float(want[1, 4].max() - want[1, 4].min()), rel=1e-3)
    for s in range(STEPS):
        assert v["largest_error"][s] == pytest.approx(max(float((got[b, s] - want[b, s]).abs().max()) for b in range(2)), rel=1e-3)
        each = []
        for b in range(2):
            p, q = ([math.exp(x) for x in side[b, s].tolist()] for side in (want, got))
            p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
            each.append(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))
        assert v["kl"][s] == pytest.approx(max(each), rel=2e-3, abs=1e-7)


def test_nan_in_the_logits_is_a_flip_and_stays_nan():
    world = audit()
    world.held["production", "logits", "decode"][0, 1, 3] = NAN
    v = measure.logits_steps(world)[0].values
    assert v["same_top1"][1] == 1
    assert math.isnan(v["largest_error"][1])
    assert math.isnan(v["kl"][1])
    assert v["first_flips"][0]["production_text"] == "NaN in the logits"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_chosen_queries_hold_both_models_keys(phase):
    world = audit()
    found = measure.visible_queries(world, phase)
    assert {m.layer for m in found} == {0, 1, 2}
    reasons = " ".join(m.values["chosen"] for m in found)
    asked = ("first query that lost a key to the window", "last prompt token") if phase == "prefill" else ("first decode step", "completes a group of 8 tokens", "last decode step")
    assert all(why in reasons for why in asked)
    for m in found:
        v, near = m.values, world.keys(m.layer, m.values["position"])
        assert instruments.drawable(json.loads(json.dumps(v)))
        assert sum(b - a + 1 for a, b in v["window_reference"]) == int((near[:4] >= 0).sum()) == v["window_keys"]["production"]
        assert [k for a, b in v["entries_production"] for k in range(a, b + 1)] == near[4:][near[4:] >= 0].tolist()
        assert v["different"] == 0
    if phase == "decode":
        assert next(m.values["position"] for m in found if "completes a group" in m.values["chosen"]) == 7
    else:
        assert next(m.values["position"] for m in found if "lost a key" in m.values["chosen"]) == 4


def test_the_query_whose_keys_differ_most_is_shown_with_what_differs():
    world = audit()
    spoiled = world.held["isolated", "layers.1.attn.visible", "decode"]
    spoiled[0, 2, 0] = 3  # position 8: 5 is out, 3 is in
    spoiled[1, 4] = spoiled[1, 4].roll(2)  # two window keys cross over to the entries
    v = next(m.values for m in measure.visible_queries(world, "decode") if m.layer == 1 and "most keys differ" in m.values["chosen"])
    got, want = spoiled[1, 4], world.held["reference", "layers.1.attn.visible", "decode"][1, 4]
    due, have = ({int(k) for k in side[:4] if k >= 0} for side in (want, got))
    assert (v["row"], v["position"]) == (1, LENGTHS[1] + 4)
    assert {k for a, b in v["window_missing"] for k in range(a, b + 1)} == due - have
    assert {k for a, b in v["window_extra"] for k in range(a, b + 1)} == have - due
    assert v["different"] > 2


def test_a_key_read_twice_is_named():
    world = audit()
    spoiled = world.held["isolated", "layers.0.attn.visible", "decode"]
    spoiled[0, 3, 0] = spoiled[0, 3, 1]
    v = next(m.values for m in measure.visible_queries(world, "decode") if m.layer == 0 and m.values["different"])
    assert v["window_twice"] == [[int(spoiled[0, 3, 1])] * 2]
    assert v["window_missing"] == [[LENGTHS[0] + 3 - 3] * 2]
    assert v["different"] == 2


def test_a_further_layer_is_shown_where_keys_differ():
    world = audit()
    world.config.kind = lambda layer: "window"
    assert {m.layer for m in measure.visible_queries(world, "decode")} == {0}
    world.held["isolated", "layers.2.attn.visible", "decode"][0, 0, 0] = 0
    assert {m.layer for m in measure.visible_queries(world, "decode")} == {0, 2}


def test_a_continuation_parts_at_its_first_difference():
    assert measure.text_parts(str, [1, 2, 3], 1) == ["[1]", "[2]", "[3]"]
    assert measure.text_parts(str, [1, 2], None) == ["[1, 2]", "", ""]
