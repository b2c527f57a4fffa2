"""What was measured, as charts, maps and tables: drift, |X|, Sinkhorn, visible keys, recall, choices, logits and text, memory.

    context = instruments.sections(run.measurements, run.header)      # goes into page/page.html

Selects and lays out; places are made in charts.py, numbers in parity/measure.py and its neighbours. What was not measured gives
an empty list or table, and its section says so. Tests: parity/unit/test_report_instruments.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from probes.core.records import Header, Measurement
from reports import charts, names, words
from reports.charts import PRODUCTION, REFERENCE, Chart, KeyMap, Limit, Line

TABLE_ROWS = 500  # of a measurement; the run file has the rest
LINE, TEXT = 156, 30  # characters of a table's line in a window of 1280, and of a column of text
PHASES = ("prefill", "decode")
KINDS = ("window", "csa", "hca", "logits")
RECALL_REQUIRED = 0.997
# Measurements that a section below shows; every other one stands under "other measurements".
SHOWN = {
    "drift", "drift steps", "drift layer", "residual", "residual growth", "sinkhorn", "visible", "visible query", "attention mass", "sink merge", "logits",
    "logits steps", "greedy", "recall", "choices", "self_parity", "observer",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; left_out rows are only in the run file; the first `lead` columns say what a row is about."""

    columns: list[str]
    rows: list[list[str]]
    left_out: int = 0
    lead: int = 0

    @property
    def parts(self) -> list[tuple[list[int], list[int]]]:
        """Places of columns that stand beside each other, the leading ones in front of every part: nothing lies beside the frame."""
        widths = [_characters(title, [row[i] for row in self.rows]) for i, title in enumerate(self.columns)]
        lead = list(range(self.lead))
        free = LINE - sum(widths[: self.lead])
        parts: list[list[int]] = [[]]
        for i in range(self.lead, len(self.columns)):
            if parts[-1] and sum(widths[j] for j in parts[-1]) + widths[i] > free:
                parts.append([])
            parts[-1].append(i)
        return [(lead, part) for part in parts]


def _characters(title: str, cells: list[str]) -> int:
    """Room that a column takes, in characters: words of its title break, numbers do not, texts take several lines."""
    return max([len(word) for word in title.split()] + [min(len(cell), TEXT) for cell in cells] + [3]) + 3


@dataclass(frozen=True)
class Greedy:
    """One greedy continuation of both models. Parts: before the first token that differs, that token, the rest."""

    title: str
    reference: list[str]
    production: list[str]
    differs: bool
    facts: list[tuple[str, str]]


@dataclass(frozen=True)
class Query:
    """One query's keys: the map, the same in words, and how its choice in the list reads."""

    label: str
    same: str
    different: bool
    drawing: KeyMap
    table: Table


@dataclass(frozen=True)
class Fold:
    """Errors by position modulo 4 and 128, of one kind of layer."""

    kind: str
    four: Chart | None
    many: Chart | None


def sections(measurements: list[Measurement], header: Header) -> dict[str, Any]:
    """Everything that the sections named above draw."""
    found = Found(measurements)
    return {
        "drift": found.table("drift", without=("phase",)), "drift_charts": drift_charts(found), "drift_folds": drift_folds(found), "drift_first": drift_first(found),
        "residual": found.table("residual", without=("point",)), "residual_charts": residual_charts(found),
        "growth": found.table("residual growth", without=("point",)), "growth_charts": growth_charts(found), "unhealthy": unhealthy(found),
        "sinkhorn": found.table("sinkhorn", without=("point",)), "sinkhorn_charts": sinkhorn_charts(found),
        "visible": found.table("visible", without=("point",)), "queries": queries(found), "undrawn": sum(not drawable(m.values) for m in found.of("visible query")),
        "mass": found.table("attention mass", without=("point",)), "sink_merge": found.table("sink merge"),
        "recall": found.table("recall", without=("point", "score_typical", "noise_typical")), "recall_charts": recall_charts(found), "recall_nothing": recall_nothing(found),
        "choices": found.table("choices", without=("point", *(f"{c}_{k}_isolated" for c in ("entries", "experts") for k in ("largest_margin", "noise")))),
        "logits": found.table("logits", without=("point",)), "logits_charts": logits_charts(found), "flips": flips(found), "greedy": greedy_of(found),
        "self_parity": found.table("self_parity", without=("point",)), "observer": found.table("observer"),
        "memory": memory_table(found), "memory_more": [(names.title(n), names.note(n), found.table(n)) for n in found.names if n.startswith("memory.")],
        "others": [(names.title(n), names.note(n), found.table(n)) for n in found.names if n not in SHOWN and not n.startswith("memory.")][:40],
    }  # fmt: skip


class Found:
    """The measurements of a run by name, in its order."""

    def __init__(self, measurements: list[Measurement]) -> None:
        self.by_name: dict[str, list[Measurement]] = {}
        for one in measurements:
            self.by_name.setdefault(one.name, []).append(one)
        self.names = list(self.by_name)

    def of(self, name: str, phase: str | None = None) -> list[Measurement]:
        return [m for m in self.by_name.get(name, []) if phase is None or m.phase == phase]

    def table(self, name: str, without: tuple[str, ...] = ()) -> Table:
        """Every measurement of a name, whatever keys its values have."""
        found = self.of(name)
        fixed = [f for f in ("layer", "phase", "step", "point") if f not in without and any(getattr(m, f) is not None for m in found)]
        keys = [k for k in dict.fromkeys(k for m in found for k in m.values) if k not in without]
        rows = [
            [words.number(getattr(m, f)) for f in fixed] + [words.cut(words.anything(m.values.get(k)), 400) for k in keys] for m in found[:TABLE_ROWS]
        ]
        named = bool(keys) and all(isinstance(m.values.get(keys[0]), str) for m in found)  # a site, a set, a part: it says what the row is about
        return Table(fixed + [names.column(name, key) for key in keys], rows, len(found) - len(rows), len(fixed) + named)

    def largest(self, name: str, key: str, phase: str, at: Callable[[Measurement], int | None], **where: Any) -> dict[int, float]:
        """Largest value of a key by `at`; a NaN stays. where: values that a measurement must have."""
        out: dict[int, float] = {}
        for m in self.of(name, phase):
            x, value = at(m), words.as_number(m.values.get(key))
            if x is None or value is None or any(m.values.get(k) != v for k, v in where.items()):
                continue
            if x not in out or not value <= out[x]:
                out[x] = value
        return out


def _layer(m: Measurement) -> int | None:
    return m.layer


def _numbers(values: Any) -> dict[int, float | None]:
    """A recorded list as {index: number}; None where it holds none."""
    return {i: words.as_number(v) for i, v in enumerate(values)} if isinstance(values, list) else {}


def _made(found: list[Chart | None]) -> list[Chart]:
    return [chart for chart in found if chart is not None]


# ---- drift ----


def _kinds(found: Found) -> dict[str, dict[str, Any]]:
    by_kind = {str(m.values.get("layers")): m.values for m in found.of("drift steps")}
    return {kind: by_kind[kind] for kind in KINDS if kind in by_kind}


def drift_first(found: Found) -> tuple[int, str] | None:
    """(step, words) of the first decode step at which a row is over its limit."""
    firsts = []
    for kind, values in _kinds(found).items():
        first = values.get("first_over")
        if isinstance(first, dict) and isinstance(first.get("step"), int):
            where = f"layer {first['layer']} ({kind})" if first.get("layer") is not None else kind
            firsts.append((first["step"], f"{where}: {words.number(first.get('error'))}, limit {words.number(first.get('limit'))}"))
    return min(firsts, key=lambda one: one[0]) if firsts else None


def drift_charts(found: Found) -> list[Chart]:
    """Worst and median row per decode step, a line per kind of layer; and per layer over all steps."""
    kinds, first = _kinds(found), drift_first(found)
    limits = [Limit(limit, kind) for kind, values in kinds.items() if (limit := words.as_number(values.get("limit"))) is not None]
    looks = {kind: i for i, kind in enumerate(KINDS)}
    red = (first[0], f"✗ first over its limit: step {first[0]}") if first else None

    def lines(key: str) -> list[Line]:
        return [Line(kind, _numbers(values.get(key)), looks[kind]) for kind, values in kinds.items()]

    unit = "relative L2 of a row"
    made = [
        charts.line_chart("Worst row at each decode step, free-running", lines("worst"), "step", unit, limits=limits, first_red=red, x_label="decode step"),
        charts.line_chart("Median row at each decode step, free-running", lines("median"), "step", unit, x_label="decode step"),
    ]
    by_layer = found.of("drift layer")
    sides = [("worst row", "worst", 1), ("median row", "median", 0), ("limit", "limit", 5)]
    over = [m.layer for m in by_layer if m.values.get("first_over") is not None and m.layer is not None]
    layered = [Line(name, {m.layer: words.as_number(m.values.get(key)) for m in by_layer if m.layer is not None}, look) for name, key, look in sides]
    made.append(charts.line_chart("Streams after each layer over all decode steps, free-running", layered, "layer", unit, first_red=(over[0], f"✗ first layer over: {over[0]}") if over else None))
    return _made(made)


def drift_folds(found: Found) -> list[Fold]:
    """Medians by position modulo 4 (CSA groups) and 128 (HCA groups, the window)."""
    out = []
    for kind, values in _kinds(found).items():
        what = "logits" if kind == "logits" else f"{kind} layers"
        four, many = (list(_numbers(values.get(f"mod{n}_median")).values()) for n in (4, 128))
        out.append(Fold(
            kind, charts.bar_chart(f"{what}, by position modulo 4", four, "residue", "median relative L2", width=430),
            charts.bar_chart(f"{what}, by position modulo 128", many, "residue", "median relative L2", width=880),
        ))  # fmt: skip
    return [fold for fold in out if fold.four or fold.many]


# ---- |X| ----

SIDES = (("reference", REFERENCE), ("production", PRODUCTION))


def residual_charts(found: Found) -> list[Chart]:
    """|X| of both models per layer in each phase, and per decode step at the deepest layer."""
    made = []
    for phase in PHASES:
        lines = [Line(side, found.largest("residual", f"{side}_absmax", phase, _layer), look, big=side == "reference") for side, look in SIDES]
        made.append(charts.line_chart(f"largest |X| after each layer, {phase}", lines, "layer", "largest |X|"))
    deepest = max((m.layer for m in found.of("residual") if m.layer is not None and m.step is not None), default=None)
    if deepest is not None:
        lines = [
            Line(f"{side}, {what}", found.largest("residual", f"{side}_{key}", "decode", lambda m: m.step if m.layer == deepest else None), look + 2 * shift, big=side == "reference")
            for shift, (what, key) in enumerate((("largest", "absmax"), ("RMS", "rms"))) for side, look in SIDES
        ]  # fmt: skip
        if len(lines[0].values) > 2:
            made.append(charts.line_chart(f"|X| at each decode step, layer {deepest}", lines, "step", "|X|", x_label="decode step"))
    return _made(made)


def growth_charts(found: Found) -> list[Chart]:
    """What made |X| grow over each half: comb, post * y and what neither explains, both models."""
    parts = (("comb", "from_comb"), ("post · y", "from_post"), ("remainder", "remainder"))
    labels = {2 * m.layer + half: f"{m.layer}{'af'[half]}" for m in found.of("residual growth") if m.layer is not None for half in (0, 1)}

    def half_of(m: Measurement) -> int | None:
        return None if m.layer is None else 2 * m.layer + (m.values.get("half") == "hc_ffn")

    made = []
    for phase in PHASES:
        lines = [
            Line(f"{part}, {side}", found.largest("residual growth", f"{key}_{side}", phase, half_of), 2 * i + look, big=side == "reference")
            for i, (part, key) in enumerate(parts) for side, look in SIDES
        ]  # fmt: skip
        title = f"parts of |X| over |X| before the half, {phase}, isolated"
        made.append(charts.line_chart(title, lines, "half", "share of |X| before", x_labels=labels, x_label="layer and half: a attention, f FFN"))
    return _made(made)


def unhealthy(found: Found) -> list[str]:
    """Layers whose size ratio was called suspicious when it was measured."""
    return [f"layer {m.layer}, {m.phase}: ratio {words.number(m.values.get('ratio'))}" for m in found.of("residual") if m.values.get("health") == "suspicious"]


# ---- Sinkhorn ----


def sinkhorn_charts(found: Found) -> list[Chart]:
    """Sums of comb off 1, its distance from the reference's matrix, and how fast the iteration gets there."""
    made = []
    for axis in ("row", "column"):
        for phase in PHASES:
            lines = [
                Line(f"{site}, {side}", found.largest("sinkhorn", f"{axis}_deviation{suffix}", phase, _layer, site=site), 2 * i + look, big=side == "reference")
                for i, site in enumerate(("hc_attn", "hc_ffn")) for (side, look), suffix in zip(SIDES, ("_reference", ""), strict=True)
            ]  # fmt: skip
            made.append(charts.line_chart(f"comb, largest {axis} sum off 1, {phase}", lines, "layer", "|sum − 1|"))
    distance, residual = [], []
    for i, (site, phase) in enumerate((s, p) for s in ("hc_attn", "hc_ffn") for p in PHASES):
        distance.append(Line(f"{site}, {phase}", found.largest("sinkhorn", "matrix_distance", phase, _layer, site=site), i))
        worst: dict[int, float | None] = {}
        for m in found.of("sinkhorn", phase):
            for step, value in _numbers(m.values.get("residual_per_iteration")).items():
                known = worst.get(step + 1)
                if m.values.get("site") == site and value is not None and (known is None or not value <= known):
                    worst[step + 1] = value
        residual.append(Line(f"{site}, {phase}", worst, i))
    made.append(charts.line_chart("comb, largest distance of a matrix from the reference's", distance, "layer", "Frobenius norm"))
    made.append(charts.line_chart("reference's Sinkhorn: largest deviation after each iteration, worst layer", residual, "iteration", "|sum − 1|"))
    return _made(made)


# ---- visible keys ----


def _ranges(values: Any) -> str:
    """[[0, 3], [7, 7]] as `0-3, 7`."""
    if not isinstance(values, list) or not values:
        return "none"
    return words.cut(", ".join(f"{a}-{b}" if a != b else str(a) for a, b in values), 1500)


PARTS = [f"{part}_{side}" for part in ("window", "entries") for side in ("reference", "production", "missing", "extra", "twice")]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


def drawable(values: dict[str, Any]) -> bool:
    """A query's record is complete: whole numbers, and lists of ascending ranges that leave a map of a sensible size."""
    if not all(_whole(values.get(key)) for key in ("position", "ratio", "complete", "different")):
        return False
    for ranges in (values.get(key) for key in PARTS):
        if not isinstance(ranges, list) or len(ranges) > 4096:
            return False
        if not all(isinstance(r, list) and len(r) == 2 and _whole(r[0]) and _whole(r[1]) and r[0] <= r[1] for r in ranges):
            return False
    return all(isinstance(values.get(f"{part}_keys"), dict) for part in ("window", "entries"))


def queries(found: Found) -> list[Query]:
    """The chosen queries, those with differences first; incomplete records are left out (undrawn)."""
    out = []
    for m in found.of("visible query"):
        v = m.values
        if not drawable(v):
            continue
        where = f"{m.phase} step {m.step}" if m.step is not None else str(m.phase)
        count = v["different"]
        same = "same keys in both models" if count == 0 else f"✗ {words.plural(count, 'key')} in one model only"
        label = f"layer {m.layer} ({v.get('kind')}), {where}, row {v.get('row')}, position {v.get('position')}: {v.get('chosen')}"
        rows = [["window positions", *(_ranges(v.get(f"window_{side}")) for side in ("reference", "production", "missing", "extra", "twice"))]]
        if v.get("ratio") or v.get("entries_reference") or v.get("entries_production"):
            noun = f"compressed entries {'selected' if v.get('topk') else 'read'} (of {words.number(v.get('complete'))} complete, {words.number(v.get('ratio'))} tokens each)"
            rows.append([noun, *(_ranges(v.get(f"entries_{side}")) for side in ("reference", "production", "missing", "extra", "twice"))])
        table = Table(["keys", "reference", "production", "missing in production", "extra in production", "twice in production"], rows)
        out.append(Query(label, same, count != 0, charts.key_map(label, v), table))
    return sorted(out, key=lambda one: not one.different)


# ---- recall ----


def _nothing_discarded(m: Measurement) -> bool:
    """Every query took all that there was: no choice was made, so there is no recall to draw. Its record holds a NaN."""
    return m.values.get("discarding") == 0


def _compared(m: Measurement) -> int | None:
    return None if _nothing_discarded(m) else m.layer


def recall_nothing(found: Found) -> list[str]:
    """Phases and key sets in which no query had to leave an entry out, in words."""
    out = []
    for phase in PHASES:
        layers = [m for m in found.of("recall", phase) if m.layer is not None]
        none = sorted({m.layer for m in layers if _nothing_discarded(m) and m.layer is not None})
        if none:
            out.append(f"{phase}, {'all judged layers' if len(none) == len({m.layer for m in layers}) else ('layer ' if len(none) == 1 else 'layers ') + words.runs(none)}")
    return out + [str(m.values.get("set")) for m in found.of("recall") if m.layer is None and _nothing_discarded(m)]


def recall_charts(found: Found) -> list[Chart]:
    """Worst query's recall against both oracles: over the run per layer, and on key sets."""
    made = []
    limit = [Limit(RECALL_REQUIRED, "at least", below=True)]
    for phase in PHASES:
        sides = (("same formats, isolated", "worst", "the run, isolated"), ("same formats, free-running", "worst", "the run, free"), ("exact oracle, free-running", "exact_worst", "the run, free"))
        lines = [Line(name, found.largest("recall", key, phase, _compared, set=which), i, big=i == 0) for i, (name, key, which) in enumerate(sides)]
        made.append(charts.line_chart(f"recall of the worst query over the run, {phase}", lines, "layer", "recall", log=False, limits=limit))
    sets = [m for m in found.of("recall") if m.layer is None and not _nothing_discarded(m)]
    labels = {i: str(i + 1) for i in range(len(sets))}
    lines = [Line(name, {i: words.as_number(m.values.get(key)) for i, m in enumerate(sets)}, look, big=look == 0) for look, (name, key) in enumerate((("same formats", "worst"), ("exact oracle", "exact_worst")))]
    said = [f"{i + 1} {m.values.get('set')}{', ' + str(m.values['source']) if m.values.get('source') else ''} ({words.number(m.values.get('keys'))} keys)" for i, m in enumerate(sets)]
    chart = charts.line_chart("recall of the worst query on key sets", lines, "set", "recall", log=False, limits=limit, x_labels=labels, x_label="key set", joined=False, notes=said)
    return _made([*made, chart])


# ---- logits and text ----


def logits_charts(found: Found) -> list[Chart]:
    """Per decode step: largest difference of a logit and KL, steps with another most likely token marked."""
    made = []
    for m in found.of("logits steps"):
        v = m.values
        rows, top = v.get("rows"), _numbers(v.get("same_top1"))
        flipped = [i for i, n in top.items() if n is not None and isinstance(rows, int) and n < rows]
        for title, key, unit in (("largest difference of a logit", "largest_error", "logit"), ("KL divergence from the reference's next token", "kl", "nats")):
            values = _numbers(v.get(key))
            lines = [Line("worst row", values, PRODUCTION), Line("step with another most likely token", {i: values.get(i) for i in flipped}, 3, big=True)]
            made.append(charts.line_chart(f"{title}, at each decode step, free-running", lines, "step", unit, x_label="decode step"))
    return _made(made)


def flips(found: Found) -> Table:
    """Steps at which the most likely token is another one."""
    rows, counted = [], 0
    for m in found.of("logits steps"):
        counted += m.values["flips"] if _whole(m.values.get("flips")) else 0
        listed = m.values.get("first_flips")
        for one in [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []:
            rows.append([words.number(one.get("step")), words.number(one.get("row")), *(_quoted(one.get(f"{side}_text")) for side in ("reference", "production")), words.number(one.get("margin")), words.number(one.get("logit_error"))])
    return Table(["step", "row", "reference", "production", "the reference's margin", "largest logit error there"], rows, max(0, counted - len(rows)))


def _quoted(text: Any) -> str:
    return words.DASH if text is None else f"“{words.cut(str(text), 80)}”"


def greedy_of(found: Found) -> list[Greedy]:
    """Texts side by side, in the order of the records."""
    texts = ("reference_text", "production_text", "reference_text_parts", "production_text_parts")
    out = []
    for m in found.of("greedy"):
        facts = [(k.replace("_", " "), words.cut(_known(v), 400)) for k, v in m.values.items() if k not in (*texts, "row") and v is not None]
        title = f"batch row {words.number(m.values['row'])}" if "row" in m.values else ""
        sides = []
        for side in ("reference", "production"):
            parts = m.values.get(f"{side}_text_parts")
            known = isinstance(parts, list) and len(parts) == 3
            sides.append([words.cut(str(part), 20_000) for part in (parts if known and parts is not None else (m.values.get(f"{side}_text", "not recorded"), "", ""))])
        differs = m.values.get("first_difference") is not None
        out.append(Greedy(title, sides[0], sides[1], differs, facts))
    return out[:20]


def _known(value: Any) -> str:
    """A value in words; what a dictionary does not know is left out."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {words.anything(one)}" for key, one in value.items() if one is not None)
    return words.anything(value)


# ---- memory ----

NOT_RECORDED = "not recorded"


def _of(values: dict[str, Any], key: str) -> str:
    return words.number(values[key]) if values.get(key) is not None else NOT_RECORDED


def memory_table(found: Found) -> Table:
    """What is kept, by the closed formula of the formats, as measured, and as a wrong width would have it."""
    rows: list[list[str]] = []
    for m in found.of("memory.footprint"):
        v = m.values
        off = words.share(words.as_number(v["off_share"])) if v.get("off_share") is not None else NOT_RECORDED
        wrong = f"{_of(v, 'wrong_width_gb')} ({v.get('wrong_width')})"
        rows.append([f"all layers, {v.get('of')}: GB at {words.number(v.get('tokens'))} tokens", _of(v, "formula_gb"), _of(v, "kv_gb"), off, wrong, _of(v, "bf16_gb")])
    for m in found.of("memory.reported"):
        v = m.values
        rows.append([f"all layers, {v.get('of')}: bytes a token, as production reports them", _of(v, "per_token_said"), _of(v, "per_token_held"), _of(v, "off_bytes"), words.DASH, words.DASH])
    for m in found.of("memory.rate"):
        v, of = m.values, f"{m.values.get('kind')} layer, {m.values.get('of')}"
        rows.append([f"{of}: bytes a token", _of(v, "formula_per_token"), _of(v, "bytes_per_token"), _of(v, "off_the_line"), _of(v, "wrong_width_per_token"), _of(v, "bf16_per_token")])
        rows.append([f"{of}: constant, bytes", _of(v, "formula_constant"), _of(v, "constant_bytes"), _of(v, "off_the_line"), words.DASH, words.DASH])
    widths: dict[tuple[str, ...], list[int]] = {}
    for m in found.of("memory.widths"):
        v = m.values
        wrong = f"{words.number(v['wrong_width'])} (a key for each indexer head)" if v.get("wrong_width") is not None else words.DASH
        row = (str(v.get("name")), _of(v, "wanted"), _of(v, "held"), _of(v, "off_bytes"), wrong, _of(v, "bf16"))
        widths.setdefault(row, []).append(m.layer if m.layer is not None else -1)
    for (name, *numbers), layers in widths.items():
        rows.append([f"{name}, bytes a row (layers {words.runs(sorted(layers))})", *numbers])
    return Table(["what", "closed formula", "measured", "off (bytes, or share)", "a wrong width would give", "in BF16"], rows[:TABLE_ROWS], max(0, len(rows) - TABLE_ROWS))
