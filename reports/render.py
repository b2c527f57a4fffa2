"""records -> report.html and junit.xml. A pure function of the records of one run; it selects and lays out, nothing else.

    python -m reports RUN.jsonl [--out DIR]

One self-contained file: no network, no torch, opens from file://, readable without scripting. Text from a record is escaped by
the template, and the page's own policy forbids every other script and every load. Tests: parity/unit/test_reports.py.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from probes.core.records import (
    Coverage,
    Divergence,
    Header,
    Kernel,
    Measurement,
    Mechanism,
    Record,
    RecordError,
    State,
    Summary,
    Verdict,
    accepted,
    ruling,
)
from reports import charts, heat, junit, names, words

PAGE = Path(__file__).with_name("page")  # page.html, its style and script, macros, and one file a section
GATE_ROWS_BYTES = 2_500_000  # the gates table is the only part that grows without bound
TABLE_ROWS = 500  # of a measurement; the run file has the rest
OUT_OF_SCOPE = (
    "multi-token prediction (MTP): its weights are listed and ignored",
    "prefix reuse between requests",
    "paged KV memory",
    "several GPUs",
    "prefill in a captured graph",
    "NVFP4 exports of the checkpoint",
)


# ---- the run as a whole ----


@dataclass(frozen=True)
class Run:
    """The records of one run, by type."""

    header: Header
    verdicts: list[Verdict]
    measurements: list[Measurement]
    coverage: list[Coverage]
    kernels: list[Kernel]
    mechanisms: list[Mechanism]
    summary: Summary | None


@dataclass(frozen=True)
class Outcome:
    """verdict is pass, fail or incomplete, by the summary where its sums hold; sentence is the reason in words."""

    verdict: str
    sentence: str
    reasons: list[str]


def split(records: list[Record]) -> Run:
    """Sort records by type. The header comes first; only a summary on the last line counts."""
    if not records or not isinstance(records[0], Header):
        raise RecordError("a run starts with its header")
    return Run(
        header=records[0],
        verdicts=[r for r in records if isinstance(r, Verdict)],
        measurements=[r for r in records if isinstance(r, Measurement)],
        coverage=[r for r in records if isinstance(r, Coverage)],
        kernels=[r for r in records if isinstance(r, Kernel)],
        mechanisms=[r for r in records if isinstance(r, Mechanism)],
        summary=records[-1] if isinstance(records[-1], Summary) else None,
    )


def counts_of(run: Run) -> dict[State, int]:
    """Verdicts per state, counted here and not taken from the summary."""
    return {state: sum(v.state is state for v in run.verdicts) for state in State}


def waived_of(run: Run) -> int:
    """Failures that a waiver accepts on the day of the run."""
    return sum(accepted(v, run.header.started[:10]) for v in run.verdicts)


def outcome_of(run: Run) -> Outcome:
    """The verdict in words. A cut-off run, or a summary that the records contradict, is incomplete whatever it claims."""
    counts, summary = counts_of(run), run.summary
    total, waived = len(run.verdicts), waived_of(run)
    if summary is None:
        seen = f"{words.plural(total, 'gate')} had been judged, {counts[State.FAIL]} of them failed"
        return Outcome("incomplete", f"the run was cut off: its file has no last line. {seen}.", [])
    claimed = (summary.passed, summary.failed, summary.not_run, summary.total, summary.waived)
    counted = (counts[State.PASS], counts[State.FAIL], counts[State.NOT_RUN], total, waived)
    missing = sum(c.observed < c.expected for c in run.coverage)
    ruled = ruling(counted[0], counted[1], waived, counted[2], missing)
    if claimed != counted or summary.verdict not in (ruled, "incomplete") or (summary.verdict == "incomplete" and ruled == "fail"):
        numbers = "passed {}, failed {}, not run {}, total {}, waived {}"
        return Outcome(
            "incomplete",
            "the run's last line contradicts its records, so neither is believed.",
            [f"last line: {summary.verdict}, {numbers.format(*claimed)}", f"records: {numbers.format(*counted)}, {words.plural(missing, 'tap')} missing"],
        )
    if summary.verdict == "fail":
        judged = total - counted[2]
        sentence = f"{counted[1]} of {words.plural(judged, 'judged gate')} failed" + (f", {waived} of them waived" if waived else "")
        sentence += f"; {words.plural(counted[2], 'gate was', 'gates were')} not run." if counted[2] else "."
    elif summary.verdict == "pass":
        sentence = f"all {words.plural(total, 'gate')} passed, and nothing that was asked for was left out."
        if waived:
            sentence = f"{counted[0]} of {words.plural(total, 'gate')} passed, {words.plural(waived, 'known failure is', 'known failures are')} waived, and nothing that was asked for was left out."
    else:
        parts = []
        if counted[2]:
            parts.append(f"{words.plural(counted[2], 'gate was', 'gates were')} not run")
        if missing:
            parts.append(f"{words.plural(missing, 'tap')} did not fire as often as expected")
        if not counted[0]:
            parts.append("nothing was compared" if total == 0 else "nothing passed")
        sentence = (f"{words.plural(waived, 'known failure is', 'known failures are')} waived, but " if waived else "nothing failed, but ") + (", ".join(parts) or "not everything was looked at") + "."
    return Outcome(summary.verdict, sentence, summary.reasons)


def divergence_words(run: Run) -> tuple[Divergence, str, int | None] | None:
    """The first divergence as a sentence, with the index of its verdict."""
    first = run.summary.first_divergence if run.summary else None
    if first is None:
        return None
    match = next(
        (
            (i, v)
            for i, v in enumerate(run.verdicts)
            if v.state is State.FAIL and v.point == first.point and v.phase == first.phase and v.layer == first.layer
            and (first.step is None or first.step == v.worst_step or (v.step_first or 0) <= first.step <= (v.step_last if v.step_last is not None else first.step))
        ),
        None,
    )  # fmt: skip
    place = [f"layer {first.layer}" if first.layer is not None else "no layer", heat.short_name(first.point, first.layer)]
    if first.phase:
        place.append(first.phase + (f" step {first.step}" if first.step is not None else ""))
    origin = {True: "local: its inputs agree", False: "inherited: its inputs already differ", None: "local or inherited: cannot be told"}
    sentence = f"{', '.join(place)} ({first.component or 'component unknown'}); {origin[first.local]}"
    if match:
        sentence += f"; {words.times(match[1].spent)}"
    if first.checked or first.unobserved:
        sentence += f"; first of {first.checked} checked, {first.unobserved} unobserved before it"
    return first, sentence, match[0] if match else None


# ---- tables ----


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; left_out rows are only in the run file."""

    columns: list[str]
    rows: list[list[str]]
    left_out: int = 0


def measured(run: Run, name: str, without: tuple[str, ...] = ()) -> Table:
    """Every measurement of a name, whatever keys its values have."""
    found = [m for m in run.measurements if m.name == name]
    fixed = [f for f in ("layer", "phase", "step", "point") if f not in without and any(getattr(m, f) is not None for m in found)]
    keys = [k for k in dict.fromkeys(k for m in found for k in m.values) if k not in without]
    rows = [
        [words.number(getattr(m, f)) for f in fixed] + [words.cut(words.anything(m.values.get(k)), 400) for k in keys] for m in found[:TABLE_ROWS]
    ]
    return Table(fixed + [names.column(name, key) for key in keys], rows, len(found) - len(rows))


def _largest(run: Run, name: str, key: str, phase: str, site: str | None = None, layer: int | None = None) -> dict[int, float]:
    """Largest value of a key per layer (or, with a layer given, per step); a NaN stays."""
    out: dict[int, float] = {}
    for m in run.measurements:
        at = m.layer if layer is None else m.step
        if m.name != name or m.phase != phase or at is None or (layer is not None and m.layer != layer):
            continue
        value = words.as_number(m.values.get(key))
        if value is None or (site is not None and m.values.get("site") != site):
            continue
        if at not in out or not value <= out[at]:
            out[at] = value
    return out


def residual_charts(run: Run) -> list[charts.Chart]:
    """|X| of both models per layer in each phase, and per decode step at the deepest layer."""
    sides = [("reference", "ref", "reference_absmax"), ("production", "prod", "production_absmax")]
    made = []
    for phase in heat.PHASES:
        lines = [(side, css, _largest(run, "residual", key, phase)) for side, css, key in sides]
        made.append(charts.line_chart(f"largest |X| per layer, {phase}", lines))
    deepest = max((m.layer for m in run.measurements if m.name == "residual" and m.layer is not None), default=None)
    if deepest is not None:
        lines = [(side, css, _largest(run, "residual", key, "decode", layer=deepest)) for side, css, key in sides]
        if len(lines[0][2]) > 2:
            made.append(charts.line_chart(f"largest |X| per decode step, layer {deepest}", lines, "step"))
    return [chart for chart in made if chart]


def sinkhorn_charts(run: Run) -> list[charts.Chart]:
    """Largest deviation of comb's columns from sum 1, per half of the layer."""
    made = []
    for phase in heat.PHASES:
        lines = [(site, css, _largest(run, "sinkhorn", "column_deviation", phase, site)) for site, css in (("hc_attn", "ref"), ("hc_ffn", "prod"))]
        made.append(charts.line_chart(f"comb, largest column deviation, {phase}", lines))
    return [chart for chart in made if chart]


@dataclass(frozen=True)
class Greedy:
    """One greedy continuation of both models."""

    title: str
    reference: str
    production: str
    facts: list[tuple[str, str]]


def greedy_of(run: Run) -> list[Greedy]:
    """Texts side by side, in the order of the records."""
    texts = ("reference_text", "production_text")
    out = []
    for m in run.measurements:
        if m.name == "greedy":
            facts = [(k.replace("_", " "), words.cut(words.anything(v), 400)) for k, v in m.values.items() if k not in (*texts, "row")]
            title = f"batch row {words.number(m.values['row'])}" if "row" in m.values else ""
            reference, production = (words.cut(str(m.values.get(k, "not recorded")), 20_000) for k in texts)
            out.append(Greedy(title, reference, production, facts))
    return out[:20]


@dataclass(frozen=True)
class Gate:
    """A verdict as a row of text; index is its place in the run.

    number   the number that spent most of its limit; numbers  the smallest limit it would pass, its limit, the share, floor,
             norm ratio and cosine of the worst row; others  the gate's further numbers, likewise
    """

    index: int
    verdict: Verdict
    state: str
    where: str
    number: str
    numbers: list[str]
    others: str
    element: str
    note: str
    command: str
    details: str


def gate_row(run: Run, index: int) -> Gate:
    """Everything a verdict says, in words."""
    v = run.verdicts[index]
    element = ""
    if v.got is not None or v.want is not None:
        at = f"{v.element} " if v.element else ""
        element = f"{at}got {words.number(v.got)} want {words.number(v.want)}"
    worst = f"worst row {v.where}" if v.where else ""
    if v.worst_step is not None:
        worst += (", " if worst else "") + f"step {v.worst_step}"
    origin = {True: "local", False: "inherited", None: ""}[v.local]
    norm = words.number(v.norm_ratio) + (f" (±{words.number(v.norm_ratio_limit)})" if v.norm_ratio_limit is not None else "")
    tightest, *others = v.numbers or [{"number": v.metric, "smallest_limit": v.value, "limit": v.limit, "spent": v.spent}]
    number, limit = (words.number(tightest.get(key)) for key in ("smallest_limit", "limit"))
    return Gate(
        index=index, verdict=v, number=str(tightest.get("number")), state={State.PASS: "pass", State.FAIL: "fail", State.NOT_RUN: "not run"}[v.state],
        where=", ".join(part for part in (worst, element, origin) if part),
        numbers=[number, limit, words.share(v.spent), words.number(v.floor), norm, words.number(v.cosine)],
        others="; ".join(words.number_of(other) for other in others),
        element=element, note=words.cut(v.reason), command=words.cut(words.command(v.test_id, run.header.command)),
        details=words.cut(words.anything(v.details), 600) if v.details else "",
    )  # fmt: skip


def gate_rows(run: Run) -> tuple[list[Gate], int]:
    """Rows in run order. Past the size budget the best-behaved passes are left out first; returns how many are."""
    rows = [gate_row(run, i) for i in range(len(run.verdicts))]
    budget, kept = GATE_ROWS_BYTES, set()
    for row in sorted(rows, key=lambda row: heat.badness(row.verdict), reverse=True):
        v = row.verdict
        text = (v.point, v.gate, row.number, row.others, v.why, row.note, row.command, row.where, row.details, *row.numbers)
        budget -= 620 + sum(len(t.encode("utf-8", "replace")) for t in text)
        if budget < 0:
            break
        kept.add(row.index)
    return [row for row in rows if row.index in kept], len(rows) - len(kept)


def tolerance_table(verdicts: list[Verdict]) -> Table:
    """The rows of the tolerance table that this run used, each with its reason."""
    rows = dict.fromkeys((v.gate, words.number(v.k), words.number(v.eps), v.why) for v in verdicts)
    listed = [list(row) for row in rows][:TABLE_ROWS]
    return Table(["gate", "k", "eps", "why this limit"], listed, len(rows) - len(listed))


def operations_table(run: Run) -> list[tuple[str, str, dict[State, int], Gate]]:
    """Operations judged alone: name, gate, cases per state, and the worst case."""
    groups: dict[tuple[str, str], list[tuple[int, Verdict]]] = {}
    for i, v in enumerate(run.verdicts):
        if v.mode == "operation":
            groups.setdefault((v.point.split("[")[0], v.gate), []).append((i, v))
    out = []
    for (name, gate), cases in groups.items():
        worst, _ = max(cases, key=lambda pair: heat.badness(pair[1]))
        out.append((name, gate, {s: sum(v.state is s for _, v in cases) for s in State}, gate_row(run, worst)))
    return out


def origin_table(run: Run, layers: list[int]) -> list[tuple[int, list[heat.Cell]]]:
    """Per layer and phase: the worst isolated point (local error) beside the worst free-running one (local plus inherited)."""
    rows = []
    for layer in layers:
        cells = []
        for phase in heat.PHASES:
            for mode in ("isolated", "free"):
                found = [(i, v) for i, v in enumerate(run.verdicts) if (v.layer, v.phase, v.mode) == (layer, phase, mode)]
                if not found:
                    cells.append(heat.Cell(words.DASH, "none"))
                    continue
                index, worst = max(found, key=lambda pair: heat.badness(pair[1]))
                sign = {State.PASS: "", State.FAIL: "✗ ", State.NOT_RUN: "not run "}[worst.state]
                css = {State.PASS: "plain", State.FAIL: "fail", State.NOT_RUN: "notrun"}[worst.state]
                cells.append(heat.Cell(f"{sign}{words.share(worst.spent)} {heat.short_name(worst.point, layer)}", css, worst.gate, index))
        rows.append((layer, cells))
    return rows


# ---- what was asked, what was seen, what was not ----


@dataclass(frozen=True)
class CoverageRow:
    """Taps of one phase and mode."""

    phase: str
    mode: str
    asked: int
    seen: int
    missing: int


def coverage_rows(run: Run) -> list[CoverageRow]:
    """Asked against observed; an asked phase without a single tap is a row of zeros. Empty: the run recorded no coverage."""
    groups: dict[tuple[str, str], list[Coverage]] = {}
    for c in run.coverage:
        groups.setdefault((c.phase, c.mode), []).append(c)
    rows = []
    for (phase, mode), cells in groups.items():
        missing = sum(c.observed < c.expected for c in cells)
        rows.append(CoverageRow(phase, mode, len(cells), len(cells) - missing, missing))
    absent = [phase for phase in run.header.phases if run.coverage and not any(c.phase == phase for c in run.coverage)]
    return rows + [CoverageRow(phase, "any", 0, 0, 0) for phase in absent]


def not_checked(run: Run) -> list[str]:
    """What this run says nothing about, from its own records."""
    header, out = run.header, []
    for phase in heat.PHASES:
        if phase not in header.phases:
            out.append(f"{phase}: not asked for")
    unjudged = sorted(set(header.layers_run) - set(header.layers))
    if unjudged:
        out.append(f"layers {words.runs(unjudged)}: run, because later layers need them, but not judged")
    if run.kernels and all(k.arch.startswith("cpu") for k in run.kernels):
        out.append("a GPU: the kernels ran on the CPU device, which shows their arithmetic, not their behaviour or speed on a card")
    if header.decode != "replay" and "decode" in header.phases:
        out.append("decode from a captured graph against the reference: it ran launch by launch, and replayed steps stand beside launched ones only; --decode replay")
    if not run.kernels:
        out.append("kernels: this run recorded none, so it cannot say which code ran")
    reasons: dict[str, int] = {}
    for v in run.verdicts:
        if v.state is State.NOT_RUN:
            reasons[v.reason or "no reason given"] = reasons.get(v.reason or "no reason given", 0) + 1
    out += [f"{words.plural(n, 'gate')} not run: {words.cut(reason)}" for reason, n in list(reasons.items())[:100]]
    out += [
        f"mechanism not exercised: {m.name}" + (f" (judged by {m.covered_by})" if m.covered_by else " (no check of this run reaches it)")
        for m in run.mechanisms
        if m.count == 0
    ]
    return out


def facts_of(values: dict[str, Any]) -> list[tuple[str, str]]:
    """A free-form dictionary of the header as lines."""
    return [(key.replace("_", " "), words.cut(words.anything(value), 1000)) for key, value in values.items()]


# ---- the page ----


def report_html(records: list[Record]) -> str:
    """The whole page."""
    script = "\n" + (PAGE / "script.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    run = split(records)
    counts, outcome = counts_of(run), outcome_of(run)
    blocks, model_rows = heat.heat_map(run.verdicts, run.coverage, run.header.layers)
    gates, gates_left_out = gate_rows(run)
    failures = [gate_row(run, i) for i, v in enumerate(run.verdicts) if v.state is State.FAIL]
    divergence = divergence_words(run)
    if divergence and divergence[2] is not None:
        failures.sort(key=lambda row: row.index != divergence[2])  # the first divergence on top, the rest in run order
    passing = sorted(((i, v) for i, v in enumerate(run.verdicts) if v.state is State.PASS and v.spent is not None), key=lambda p: heat.badness(p[1]))
    missing = [c for c in run.coverage if c.observed < c.expected]
    known = {"residual", "residual growth", "sinkhorn", "visible", "attention mass", "sink merge", "logits", "drift", "greedy", "recall", "choices", "self_parity", "observer"}
    others = [name for name in dict.fromkeys(m.name for m in run.measurements) if name not in known]
    html = environment.get_template("page.html").render(
        style=(PAGE / "style.css").read_text(encoding="utf-8"), script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        words=words, run=run, header=run.header, summary=run.summary, outcome=outcome,
        passed=counts[State.PASS], failed=counts[State.FAIL], not_run=counts[State.NOT_RUN],
        near_ties=sum(v.near_ties for v in run.verdicts),
        divergence=divergence, failures=failures[:20], failures_left_out=max(0, len(failures) - 20),
        blocks=blocks, model_rows=model_rows, phases=heat.PHASES,
        origins=origin_table(run, sorted({layer for b in blocks for layer in b.layers})),
        coverage=coverage_rows(run), missing=missing[:300], missing_left_out=max(0, len(missing) - 300),
        residual=measured(run, "residual", without=("point",)), residual_charts=residual_charts(run),
        growth=measured(run, "residual growth", without=("point",)), mass=measured(run, "attention mass", without=("point",)),
        sink_merge=measured(run, "sink merge"), drift=measured(run, "drift", without=("phase",)),
        sinkhorn=measured(run, "sinkhorn", without=("point",)), sinkhorn_charts=sinkhorn_charts(run),
        visible=measured(run, "visible", without=("point",)), logits=measured(run, "logits", without=("point",)), greedy=greedy_of(run),
        recall=measured(run, "recall", without=("point", "score_typical", "noise_typical")),
        choices=measured(run, "choices", without=("point", *(f"{c}_{k}_isolated" for c in ("entries", "experts") for k in ("largest_margin", "noise")))),
        self_parity=measured(run, "self_parity", without=("point",)), observer=measured(run, "observer"),
        others=[(names.title(name), names.note(name), measured(run, name)) for name in others[:40]],
        operations=operations_table(run), gates=gates, gates_left_out=gates_left_out,
        closest=[gate_row(run, i) for i, _ in reversed(passing[-10:])],
        tolerances=tolerance_table(run.verdicts), unchecked=not_checked(run), out_of_scope=OUT_OF_SCOPE,
        environment=facts_of(run.header.environment), model=facts_of(run.header.model),
    )  # fmt: skip
    return words.printable(html)


def _replace(path: Path, content: bytes) -> None:
    """Write beside the target and move over it: a reader sees the old file or the new one, never a part."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def render_run(records: list[Record], out_dir: Path) -> Path:
    """Write report.html and junit.xml into out_dir, made if missing; returns the path of the page.

    Both are made in memory first, so that bad records leave no file. Raises RecordError or OSError.
    """
    run = split(records)
    outcome = outcome_of(run)
    page = report_html(records).encode("utf-8")
    cases = junit.junit_xml(run.header, run.verdicts, run.summary, outcome.verdict, " ".join([outcome.sentence, *outcome.reasons]))
    out_dir.mkdir(parents=True, exist_ok=True)
    _replace(out_dir / "junit.xml", cases)
    _replace(out_dir / "report.html", page)
    return out_dir / "report.html"
