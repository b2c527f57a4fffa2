"""records -> report.html and junit.xml. A pure function of the records of one run; it selects and lays out, nothing else.

    python -m reports RUN.jsonl [--out DIR]

One self-contained file: no network, no torch, opens from file://, readable without scripting. Text from a record is escaped by
the template, and the page's own policy forbids every other script and every load. Tests: parity/unit/test_reports.py.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    contradictions,
)
from reports import compare, heat, instruments, junit, words
from reports.behind import Behind

PAGE = Path(__file__).with_name("page")  # page.html, its style and script, macros, and one file a section
ROWS_BYTES = 900_000  # of the gates table as written, for readers without scripting; it is the only part that grows without bound
PACKED_BYTES = 2_750_000  # of the rows behind it, compressed, that the page's script unpacks
DEFINITIONS = 1000  # gates with their k, eps and reason
TABLE_ROWS = 500  # of a measurement; the run file has the rest
OUT_OF_SCOPE = (
    "multi-token prediction (MTP): its weights are listed and ignored",
    "prefix reuse between requests",
    "paged KV memory",
    "several GPUs",
    "prefill in a captured graph",
    "NVFP4 exports of the checkpoint",
)
NOT_RECORDED = "not recorded"
# file in page/sections -> what the page's own list of contents calls it, in the order of reading: where, why, everything
SECTIONS = {
    "failures": "failures", "map": "heat map", "closest": "closest", "trend": "trend", "unchecked": "not checked",
    "drift": "drift", "residual": "|X|", "sinkhorn": "Sinkhorn", "visible": "visible keys", "recall": "recall", "choices": "choices", "logits": "logits",
    "memory": "memory", "self": "self", "operations": "operations", "others": "other",
    "gates": "gates", "coverage": "coverage", "mechanisms": "mechanisms", "kernels": "kernels", "again": "reproduce", "glossary": "glossary",
}  # fmt: skip
# Instruments and lists of a section: where somebody else's production has nothing in any of them, the section is left out.
FILLED_BY = {
    "drift": ("drift_charts", "drift"), "residual": ("residual_charts", "growth_charts", "residual", "growth"), "sinkhorn": ("sinkhorn_charts", "sinkhorn"),
    "visible": ("queries", "undrawn", "visible", "mass", "sink_merge"), "recall": ("recall",), "choices": ("choices",), "logits": ("logits", "logits_charts", "flips", "greedy"),
    "memory": ("memory", "memory_more"), "self": ("self_parity", "observer"), "operations": ("operations",), "mechanisms": ("mechanisms",), "kernels": ("kernels",),
}  # fmt: skip


# ---- the run as a whole ----


@dataclass(frozen=True)
class Run:
    """The records of one run, by type. waived  places of the failures that a waiver accepts on the day of the run; against  what contradicts its last line."""

    header: Header
    verdicts: list[Verdict]
    measurements: list[Measurement]
    coverage: list[Coverage]
    kernels: list[Kernel]
    mechanisms: list[Mechanism]
    summary: Summary | None
    waived: frozenset[int] = frozenset()
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """verdict is pass, fail or incomplete, by the summary where its sums hold; sentence is the reason in words."""

    verdict: str
    sentence: str
    reasons: list[str]
    waived: int = 0
    covered: str = ""

    @property
    def word(self) -> str:
        """The verdict as the page shows it: with a waiver it is never a plain pass."""
        return self.verdict + (f" with {words.plural(self.waived, 'waiver')}" if self.waived else "")

    @property
    def claim(self) -> str:
        """The verdict and how much of somebody else's production it is about."""
        return self.verdict + (f", {self.covered}" if self.covered else "")


def split(records: list[Record]) -> Run:
    """Sort records by type. The header comes first; only a summary on the last line counts."""
    if not records or not isinstance(records[0], Header):
        raise RecordError("a run starts with its header")
    verdicts = [r for r in records if isinstance(r, Verdict)]
    return Run(
        header=records[0],
        verdicts=verdicts,
        waived=frozenset(i for i, v in enumerate(verdicts) if accepted(v, records[0].started[:10])),
        measurements=[r for r in records if isinstance(r, Measurement)],
        coverage=[r for r in records if isinstance(r, Coverage)],
        kernels=[r for r in records if isinstance(r, Kernel)],
        mechanisms=[r for r in records if isinstance(r, Mechanism)],
        summary=records[-1] if isinstance(records[-1], Summary) else None,
        against=tuple(contradictions(records)),
    )


def counts_of(run: Run) -> dict[State, int]:
    """Verdicts per state, counted here and not taken from the summary."""
    return {state: sum(v.state is state for v in run.verdicts) for state in State}


def outcome_of(run: Run) -> Outcome:
    """The verdict in words. A cut-off run, or a summary that the records contradict, is incomplete whatever it claims."""
    counts, summary = counts_of(run), run.summary
    total, waived = len(run.verdicts), len(run.waived)
    more = [f"and {words.plural(len(run.against) - 20, 'contradiction')} more"] if len(run.against) > 20 else []
    against = [*(words.cut(said, 400) for said in run.against[:20]), *more]
    if summary is None:
        seen = f"{words.plural(total, 'gate')} had been judged, {counts[State.FAIL]} of them failed"
        return Outcome("incomplete", f"the run was cut off: its file has no last line. {seen}.", against, waived)
    if against:
        return Outcome("incomplete", "the run's last line contradicts its records, so neither is believed.", against, waived)
    counted = (counts[State.PASS], counts[State.FAIL], counts[State.NOT_RUN])
    missing = sum(c.observed < c.expected for c in run.coverage)
    if summary.verdict == "fail":
        judged = total - counted[2]
        sentence = f"{counted[1]} of {words.plural(judged, 'judged gate')} failed" + (f", {waived} of them waived" if waived else "")
        sentence += f"; {words.plural(counted[2], 'gate was', 'gates were')} not run." if counted[2] else "."
    elif summary.verdict == "pass":
        whole = "what production does not show was not judged" if words.coverage_words(summary.coverage) else "nothing that was asked for was left out"
        sentence = f"all {words.plural(total, 'gate')} passed, and {whole}."
        if waived:
            sentence = f"{counted[0]} of {words.plural(total, 'gate')} passed, {words.plural(waived, 'known failure is', 'known failures are')} waived, and {whole}."
    else:
        parts = []
        if counted[2]:
            parts.append(f"{words.plural(counted[2], 'gate was', 'gates were')} not run")
        if missing:
            parts.append(f"{words.plural(missing, 'tap')} did not fire as often as expected")
        if not counted[0]:
            parts.append("nothing was compared" if total == 0 else "nothing passed")
        sentence = (f"{words.plural(waived, 'known failure is', 'known failures are')} waived, but " if waived else "nothing failed, but ") + (", ".join(parts) or "not everything was looked at") + "."
    return Outcome(summary.verdict, sentence, summary.reasons, waived, words.coverage_words(summary.coverage))


def answer_of(run: Run, outcome: Outcome) -> str:
    """Can I ship: the verdict as advice, and how far it reaches."""
    if run.header.inject:
        return "No answer about the model: a fault was planted, to test the audit."
    if outcome.verdict == "fail":
        return "Do not ship."
    if outcome.verdict == "incomplete":
        return "Not decided: a run that left out what was asked for is no pass."
    where = "; it ran on the CPU device, so audit it with --device cuda before it goes on a card" if run.header.device == "cpu" and not run.header.production else ""
    if outcome.waived:
        return f"Ship only if you accept what is waived, none of it later than {max(str((run.verdicts[i].waiver or {}).get('until')) for i in run.waived)}{where}."
    left_out = not_asked(run.header)
    if left_out:
        return f"Not decided for the whole model: {words.listed([part for part, _ in left_out])} {'were' if len(left_out) > 1 or left_out[0][0].startswith('layers') else 'was'} not asked for. Nothing that was checked stands against shipping{where}."
    return f"Nothing that was checked stands against shipping{where}."


def not_asked(header: Header) -> list[tuple[str, str]]:
    """Parts of the model that the selection left out: (what, what came of it). Layers that later ones need are run all the same."""
    out = [(phase, "not asked for") for phase in heat.PHASES if phase not in header.phases]
    total, kinds = header.model.get("layers"), header.model.get("kinds")
    every = set(range(total)) if isinstance(total, int) and not isinstance(total, bool) else set()
    for layers, said in ((set(header.layers_run) - set(header.layers), "run, because later layers need them, but not judged"), (every - set(header.layers_run) - set(header.layers), "not asked for, not run")):
        if layers:
            whole = [kind for kind in dict.fromkeys(kinds) if {i for i, one in enumerate(kinds) if one == kind} <= layers] if isinstance(kinds, list) and len(kinds) == total else []
            among = f"; every {words.listed([words.anything(kind) for kind in whole])} layer among them" if whole and len(whole) < len(set(kinds or ())) else ""
            out.append((f"{'layer' if len(layers) == 1 else 'layers'} {words.runs(sorted(layers))}", said + among))
    return out


@dataclass(frozen=True)
class Place:
    """The first divergence in words; index is its verdict's place in the run, where it has one."""

    first: Divergence
    where: str
    origin: str
    component: str
    over: str
    checked: str
    index: int | None


def divergence_words(run: Run) -> Place | None:
    """Where it starts, whether it starts there, what it is, and how far it is over its limit."""
    first = run.summary.first_divergence if run.summary else None
    if first is None:
        return None
    index = words.gate_of(first, run.verdicts)
    match = None if index is None else run.verdicts[index]
    place = [f"layer {first.layer}" if first.layer is not None else "no layer", heat.short_name(first.point, first.layer)]
    if first.phase:
        place.append(words.when(first.phase, first.step, match))
    origin = {True: "local: its inputs agree", False: "inherited: its inputs already differ", None: "local or inherited: cannot be told"}
    over = words.over(match, first.step) if match else ""
    if match is not None and index in run.waived:
        over += f" ({waiver_words(run, match)})"
    checked = f"first of {first.checked} checked, {first.unobserved} unobserved before it" if first.checked or first.unobserved else ""
    return Place(first, ", ".join(place), origin[first.local], first.component or "component unknown", over, checked, index)


def behind_first(run: Run, place: Place | None) -> Behind:
    """What the other failures have to do with the first divergence."""
    return Behind(run.verdicts, None if place is None else place.first, None if place is None or place.index is None else run.verdicts[place.index])


def waiver_words(run: Run, v: Verdict) -> str:
    """A verdict's waiver, and whether it counts."""
    if v.waiver is None:
        return ""
    until, reason, by = (words.cut(str(v.waiver.get(key) or NOT_RECORDED), 400) for key in ("until", "reason", "by"))
    counts = accepted(v, run.header.started[:10])
    return f"waived until {until} by {by}: {reason}" if counts else f"a waiver until {until} by {by} does not count (run out, or not whole): {reason}"


# ---- tables ----


Definition = tuple[str, str, str, str]  # gate, k, eps, why


@dataclass(frozen=True)
class Gate:
    """A verdict as a row of text; index is its place in the run.

    state    pass, fail, waived or not run; waiver  its waiver in words
    number   the number that spent most of its limit; numbers  the smallest limit it would pass, its limit, the share, floor,
             norm ratio and cosine of the worst row; others  the gate's further numbers, likewise; bar  the share for drawing
    test     the test's id where the page says once how it is run; command  the whole command
    first    of a red gate, the decode step at which it was first over its limit; more  passes of the same point that it stands for
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
    waiver: str
    command: str
    test: str
    details: str
    bar: str
    definition: Definition
    first: str = ""
    more: int = 0


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
    norm = words.number(v.norm_ratio) + (f" (±{words.number(v.norm_ratio_limit)})" if v.norm_ratio_limit is not None and not v.numbers else "")
    tightest, *others = v.numbers or [{"number": v.metric, "smallest_limit": v.value, "limit": v.limit, "spent": v.spent}]
    number, limit = (words.number(tightest.get(key)) for key in ("smallest_limit", "limit"))
    waived = index in run.waived
    return Gate(
        index=index, verdict=v, number=str(tightest.get("number")), state={State.PASS: "pass", State.FAIL: "waived" if waived else "fail", State.NOT_RUN: "not run"}[v.state],
        where=", ".join(part for part in (worst, element, origin) if part),
        numbers=[number, limit, words.share(v.spent), words.number(v.floor), norm, words.number(v.cosine)],
        others="; ".join(words.number_of(other) for other in others), bar=words.bar(v.spent),
        element=element, note=words.cut(v.reason), waiver=waiver_words(run, v), command=words.cut(words.command(v.test_id, run.header.command)),
        test=shlex.quote(v.test_id) if v.test_id and not words.is_command(v.test_id) and len(v.test_id) < 1000 else "",
        details=words.cut(words.anything(v.details), 600) if v.details else "", definition=definition_of(v),
        first="" if v.state is not State.FAIL or v.phase != "decode" or words.first_step(v) is None else str(words.first_step(v)),
    )  # fmt: skip


def definition_of(v: Verdict) -> Definition:
    return v.gate, words.number(v.k), words.number(v.eps), v.why


@dataclass(frozen=True)
class GateKind:
    """A row of the tolerance table as this run used it: verdicts per state, the worst of them, and the planted faults that a sweep saw turn it red."""

    definition: Definition
    states: dict[State, int]
    worst: int
    reds: str


def gate_kinds(run: Run) -> list[GateKind]:
    """Every row of the tolerance table that this run used, in run order."""
    groups: dict[Definition, list[int]] = {}
    for i, v in enumerate(run.verdicts):
        groups.setdefault(definition_of(v), []).append(i)
    kinds = []
    for definition, found in groups.items():
        states = {state: sum(run.verdicts[i].state is state for i in found) for state in State}
        worst = max(found, key=lambda i: heat.badness(run.verdicts[i], i in run.waived))
        reds = run.header.reds.get(definition[0], [])
        kinds.append(GateKind(definition, states, worst, ", ".join(reds) or ("none seen" if run.header.reds else NOT_RECORDED)))
    return kinds


@dataclass(frozen=True)
class GateRows:
    """The gates table as markup. written  rows in the page; packed  the others, deflated in base64; places  indices of the written rows."""

    written: list[str]
    packed: str
    packed_rows: int
    left_out: int
    places: frozenset[int]


def gate_rows(run: Run, draw: Callable[[Gate], str], wanted: set[int]) -> GateRows:
    """Every row, the worst first. What is written holds what is not a pass, then the wanted (cells of the map), then the worst passes; the rest is packed.

    draw   a row as one tr; only when even the packed rows are too many are the best-behaved passes left to the run file
    """
    order = sorted(range(len(run.verdicts)), key=lambda i: heat.badness(run.verdicts[i], i in run.waived), reverse=True)
    lines = {i: words.printable(draw(gate_row(run, i))).replace("\n", " ") for i in order}
    budget, places = ROWS_BYTES, set()
    for i in sorted(order, key=lambda i: (run.verdicts[i].state is State.PASS, i not in wanted)):
        budget -= len(lines[i].encode())
        if budget < 0:
            break
        places.add(i)
    behind = [lines[i] for i in order if i not in places]
    rows = len(behind)
    while True:
        packed = base64.b64encode(zlib.compress("\n".join(behind[:rows]).encode(), 9)).decode() if rows else ""
        if len(packed) <= PACKED_BYTES:
            break
        rows = min(rows - 1, int(0.97 * rows * PACKED_BYTES / len(packed)))
    return GateRows([lines[i] for i in order if i in places], packed, rows, len(behind) - rows, frozenset(places))


def operations_table(run: Run) -> list[tuple[str, str, dict[State, int], Gate]]:
    """Operations judged alone: name, gate, cases per state, and the worst case."""
    groups: dict[tuple[str, str], list[tuple[int, Verdict]]] = {}
    for i, v in enumerate(run.verdicts):
        if v.mode == "operation":
            groups.setdefault((v.point.split("[")[0], v.gate), []).append((i, v))
    out = []
    for (name, gate), cases in groups.items():
        worst, _ = max(cases, key=lambda pair: heat.badness(pair[1], pair[0] in run.waived))
        out.append((name, gate, {s: sum(v.state is s for _, v in cases) for s in State}, gate_row(run, worst)))
    return out


def origin_table(run: Run, layers: list[int]) -> list[tuple[int, list[heat.Cell]]]:
    """Per layer and phase: the worst isolated point (local error) beside the worst free-running one (local plus inherited)."""
    groups: dict[tuple[int | None, str | None, str], list[tuple[int, Verdict]]] = {}
    for pair in enumerate(run.verdicts):
        groups.setdefault((pair[1].layer, pair[1].phase, pair[1].mode), []).append(pair)
    rows = []
    for layer in layers:
        cells = []
        for phase in heat.PHASES:
            for mode in ("isolated", "free"):
                found = groups.get((layer, phase, mode), [])
                if not found:
                    cells.append(heat.Cell(words.DASH, "none"))
                    continue
                index, worst = max(found, key=lambda pair: heat.badness(pair[1], pair[0] in run.waived))
                waived = index in run.waived
                sign = {State.PASS: "", State.FAIL: "◇ " if waived else "✗ ", State.NOT_RUN: "not run "}[worst.state]
                css = {State.PASS: "plain", State.FAIL: "waived" if waived else "fail", State.NOT_RUN: "notrun"}[worst.state]
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
    header = run.header
    out = [f"{part}: {said}" for part, said in not_asked(header)]
    if run.kernels and all(k.arch.startswith("cpu") for k in run.kernels):
        out.append("a GPU: the kernels ran on the CPU device, which shows their arithmetic, not their behaviour or speed on a card")
    if header.production:
        out += not_shown(run)
    elif header.decode != "replay" and "decode" in header.phases:
        out.append("decode from a captured graph against the reference: it ran launch by launch, and replayed steps stand beside launched ones only; --decode replay")
    if not run.kernels and not header.production:
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


def not_shown(run: Run) -> list[str]:
    """Kinds of points that somebody else's production does not show, with the tests that would have judged them."""
    kinds: dict[tuple[str, str, str], tuple[set[int], int]] = {}
    for m in run.measurements:
        if m.name == "not covered":
            name = (m.point or "logits").removeprefix(f"layers.{m.layer}.")
            key = name, words.anything(m.values.get("where") or ""), words.anything(m.values.get("why") or "")
            layers, tests = kinds.get(key, (set(), 0))
            kinds[key] = (layers | ({m.layer} if m.layer is not None else set()), tests + int(words.as_number(m.values.get("tests")) or 0))
    shown = []
    for (name, passes, why), (layers, tests) in [(key, found) for key, found in kinds.items() if found[1] or key[2]][:100]:
        at = f" in {'layer' if len(layers) == 1 else 'layers'} {words.runs(sorted(layers))}" if layers else ""
        at += f", {passes}" if passes else ""
        said = f"{words.cut(name, 200)}{at}: {words.cut(why, 300)}: not judged" if why else f"production does not show {words.cut(name, 200)}{at}"
        shown.append(f"{said}: {words.plural(tests, 'test')} not covered")
    unasked = [words.cut(name, 60) for (name, _, why), (_, tests) in kinds.items() if not tests and not why]  # of a server's logits nothing else was ever asked
    if unasked:
        few = f"{', '.join(unasked[:3])} and {len(unasked) - 3} other kinds of points" if len(unasked) > 4 else ", ".join(unasked)
        shown.append(f"production does not show {few}, and no test asked for them")
    return [*shown, "operations, states, memory and loading of this production: only the values that it shows are judged"]


def otherwise(run: Run) -> list[str]:
    """What somebody else's production rounds or leaves out unlike the published model, as measured."""
    return [words.cut(words.anything(m.values["otherwise"]), 400) for m in run.measurements if m.name == "policy" and m.values.get("otherwise")]


@dataclass(frozen=True)
class Facts:
    """Groups of (name, value) for the first screen; a fact that the records lack is said to be missing."""

    coverage: list[tuple[str, str]]
    code: list[tuple[str, str]]
    machine: list[tuple[str, str]]


def kernels_words(run: Run) -> str:
    """What really ran, per architecture."""
    parts = []
    for arch in dict.fromkeys(k.arch for k in run.kernels):
        ran = [k for k in run.kernels if k.arch == arch]
        parts.append(f"{words.plural(len({(k.source, k.kernel) for k in ran}), 'kernel')} in {words.plural(len({k.build for k in ran}), 'build')} for {arch}")
    return words.listed(parts) or NOT_RECORDED


def first_facts(run: Run) -> Facts:
    """What was asked and seen, which code, which machine."""
    header, facts = run.header, run.header.environment
    absent = no_gpu(header)

    def fact(*keys: str, other: str = NOT_RECORDED) -> str:
        found = [f"{key if key in ('driver', 'python') else ''} {words.anything(facts[key])}".strip() for key in keys if facts.get(key) not in (None, "")]
        return words.cut(", ".join(found), 200) if found else other

    seen = sum(c.observed >= c.expected for c in run.coverage)
    asked = f"{words.listed(header.phases) or 'no phase'}, layers {words.runs(header.layers)} of {words.anything(header.model.get('layers', NOT_RECORDED))}"
    if "decode" in header.phases:
        asked += f", {words.plural(header.steps, 'decode step')}"
    prompts = [f"{prompt}" + (f" ({words.plural(header.tokens[i], 'token')})" if i < len(header.tokens) else "") for i, prompt in enumerate(header.prompts)]
    not_run = sum(v.state is State.NOT_RUN for v in run.verdicts)
    decode = {"replay": "replayed from captured graphs", "eager": "launched kernel by kernel"}.get(header.decode, header.decode)
    dirty = "with uncommitted changes" if header.dirty else "no uncommitted changes"
    return Facts(
        coverage=[
            ("asked", asked),
            ("seen", f"{seen} of {words.plural(len(run.coverage), 'tap')} fired as often as expected" if run.coverage else f"taps: {NOT_RECORDED}"),
            ("not run", words.plural(not_run, "gate") if not_run else "nothing"),
            ("prompts", words.cut(", ".join(prompts), 400) or NOT_RECORDED),
        ],
        code=[
            *([("production", words.cut(header.production, 200))] if header.production else []),
            ("commit", f"{header.commit}, {dirty}" if header.commit else NOT_RECORDED),
            ("reference", other_reference(run)) if other_reference(run) else ("checkpoint", f"{words.cut(header.checkpoint, 200)} {header.checkpoint_hash or f'hash {NOT_RECORDED}'}"),
            *([] if header.production else [("kernels", kernels_words(run)), ("variants", f"{header.variants or NOT_RECORDED}; decode {decode}")]),
            ("rounding", words.cut(", ".join(header.policy), 400) or "no rounding point declared"),
            *([] if header.production else [("fault score", words.cut(header.fault_score, 400) or NOT_RECORDED)]),  # of this project's own production
        ],
        machine=[
            ("GPU", fact("gpu", "capability", other=absent.get("gpu", NOT_RECORDED))),
            ("CUDA", fact("cuda", "driver", other=absent.get("cuda", NOT_RECORDED))),
            ("torch", fact("torch", "python")),
            ("compiler", fact("compiler")),
            ("platform", fact("platform")),
            ("started", f"{header.started or NOT_RECORDED}" + (f", {words.number(round(run.summary.seconds) if words.finite(run.summary.seconds) else run.summary.seconds)} s" if run.summary else "")),
        ],
    )  # fmt: skip


def facts_of(values: dict[str, Any]) -> list[tuple[str, str]]:
    """A free-form dictionary of the header as lines."""
    return [(key.replace("_", " "), words.cut(words.anything(value), 1000)) for key, value in values.items()]


def environment_of(header: Header) -> dict[str, Any]:
    """Facts of the machine, with the words for a GPU that a run on the CPU did not use."""
    given = {name: absent for name, absent in no_gpu(header).items() if header.environment.get(name) in (None, "") and name in header.environment}
    return {**header.environment, **given}


def no_gpu(header: Header) -> dict[str, str]:
    """What stands in the place of a GPU and of CUDA where a run on the CPU has none."""
    if header.device != "cpu":
        return {}
    return {"gpu": "none: production ran on the CPU" if header.production else "none: the kernels ran on the CPU device", "cuda": "not used"}


# ---- the page ----


def report_html(records: list[Record], baseline: list[Record] | None = None) -> str:
    """The whole page; with a baseline, what differs from it too."""
    script = "\n" + (PAGE / "script.js").read_text(encoding="utf-8") + (PAGE / "charts.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(PAGE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    run = split(records)
    counts, outcome = counts_of(run), outcome_of(run)
    blocks, model_rows = heat.heat_map(run.verdicts, run.coverage, run.header.layers, run.waived)
    failures = [gate_row(run, i) for i, v in enumerate(run.verdicts) if v.state is State.FAIL]
    divergence = divergence_words(run)
    failures.sort(key=lambda row: (divergence is None or row.index != divergence.index, row.state == "waived"))  # the first divergence on top, the waived last, each in run order
    kinds = gate_kinds(run)
    numbered = {kind.definition: n for n, kind in enumerate(kinds[:DEFINITIONS])}
    macros = environment.get_template("macros.html").make_module({"words": words, "numbered": numbered})
    shown = [row.groups for block in [*blocks] for row in block.rows] + [row.groups for row in model_rows]
    rows = gate_rows(run, lambda gate: str(macros.gate_line(gate)), {cell.target for groups in shown for group in groups for cell in group if cell.target is not None})  # type: ignore[attr-defined]
    missing = [c for c in run.coverage if c.observed < c.expected]
    context = dict(
        style=(PAGE / "style.css").read_text(encoding="utf-8") + (PAGE / "charts.css").read_text(encoding="utf-8"), script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        words=words, run=run, header=run.header, summary=run.summary, outcome=outcome, trend=None if baseline is None else compare.compare(baseline, records),
        answer=answer_of(run, outcome), other_reference=other_reference(run), facts=first_facts(run), not_recorded=NOT_RECORDED,
        passed=counts[State.PASS], failed=counts[State.FAIL], not_run=counts[State.NOT_RUN],
        near_ties=sum(v.near_ties for v in run.verdicts),
        divergence=divergence, failures=failures[:20], failures_left_out=max(0, len(failures) - 20),
        blocks=blocks, model_rows=model_rows, phases=heat.PHASES,
        origins=origin_table(run, sorted({layer for b in blocks for layer in b.layers})),
        coverage=coverage_rows(run), missing=missing[:300], missing_left_out=max(0, len(missing) - 300),
        **instruments.sections(run.measurements, run.header),
        operations=operations_table(run), rows=rows, kinds=kinds[:DEFINITIONS], kinds_left_out=max(0, len(kinds) - DEFINITIONS), numbered=numbered,
        modes=sorted({v.mode for v in run.verdicts}), gate_layers=sorted({v.layer for v in run.verdicts if v.layer is not None}), options=words.options(run.header.command),
        closest=[replace(gate_row(run, i), more=more) for i, more in words.closest(run.verdicts)],
        unchecked=not_checked(run), otherwise=otherwise(run), out_of_scope=OUT_OF_SCOPE,
        environment=facts_of(environment_of(run.header)), model=facts_of(run.header.model),
    )  # fmt: skip
    empty = [name for name in FILLED_BY if is_empty(name, context | {"mechanisms": run.mechanisms, "kernels": run.kernels})] if run.header.production else []
    if empty:
        context["unchecked"] = [*context["unchecked"], f"left out of this page, as nothing of this production is in it: {', '.join(SECTIONS[name] for name in empty)}"]
    sections = [(name, title, environment.get_template(f"sections/{name}.html").render(context)) for name, title in SECTIONS.items() if name not in empty]
    return words.printable(environment.get_template("page.html").render(context, sections=[section for section in sections if section[2].strip()]))


def is_empty(name: str, context: dict[str, Any]) -> bool:
    """Whether no instrument of a section has anything to draw."""
    return not any(getattr(context[key], "rows", context[key]) for key in FILLED_BY[name])


def other_reference(run: Run) -> str:
    """The model that stands for the reference, where it is another one."""
    return next((words.cut(words.anything(m.values["reference"]), 120) for m in run.measurements if m.name == "not applicable" and m.values.get("reference")), "")


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


def render_run(records: list[Record], out_dir: Path, baseline: list[Record] | None = None) -> Path:
    """Write report.html and junit.xml into out_dir, made if missing; returns the path of the page.

    Both are made in memory first, so that bad records leave no file. Raises RecordError or OSError.
    """
    run = split(records)
    outcome = outcome_of(run)
    page = report_html(records, baseline).encode("utf-8")
    cases = junit.junit_xml(run.header, run.verdicts, run.summary, outcome.verdict, " ".join([outcome.sentence, *outcome.reasons]))
    out_dir.mkdir(parents=True, exist_ok=True)
    _replace(out_dir / "junit.xml", cases)
    _replace(out_dir / "report.html", page)
    return out_dir / "report.html"
