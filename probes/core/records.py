"""Records: the only product of a run. Strict JSONL, one frozen dataclass a line; text and HTML are made from them.

The first line is the header, the last the summary. Non-finite numbers travel as the strings "nan", "inf" and "-inf".
`contradictions` says whether a run's last line is borne out by its records. Standard library only: a report renders on a machine
without torch. Tests: parity/unit/test_records.py.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TextIO

SCHEMA = 2  # what this version writes; docs and the published JSON Schema tell what a version promises
READS = (1, 2)  # an older file is read as this schema: a field it does not know has its default
ADDED = {2: {"header": ("reds", "redacted", "waivers", "baseline", "production"), "verdict": ("waiver",), "summary": ("waived", "coverage")}}


class RecordError(ValueError):
    """A line that is no record of this schema, or a run whose sums do not add up."""


class State(enum.StrEnum):
    """The three outcomes of a gate. Nothing else counts as a pass."""

    PASS = "pass"
    FAIL = "fail"
    NOT_RUN = "not_run"


@dataclass(frozen=True)
class Header:
    """Who, what, where: everything needed to run it again.

    environment     facts read on this machine: python, torch, numpy, platform, cpu, cores, compiler, gpu, cuda, driver, cupy
    checkpoint      directory as given; checkpoint_hash says which bytes
    model           config facts for the report: layers by kind, widths, ratios
    layers          judged layers; layers_run  all layers up to the highest
    prompts         one label per batch row, e.g. medium.txt:0:250; tokens  [count per row]
    policy          rounding points production declares
    command         what was typed; seed  of every random choice
    decode          eager: launched kernel by kernel; replay: from captured graphs; variants  plan of the kernels' variants
    fault_score     what the last sweep over planted faults said on this machine, in words
    reds            gate -> ids of planted faults that a sweep saw turn it red
    redacted        the prompt's text is left out and token ids are hashed
    waivers         every waiver that was given, used or not; baseline  the run file that this one is compared with, as given
    production      whose model, trace or logits were audited; empty: this project's production
    """

    type: ClassVar[str] = "header"
    started: str
    command: str
    commit: str
    dirty: bool
    environment: dict[str, Any]
    checkpoint: str
    checkpoint_hash: str
    model: dict[str, Any]
    device: str
    policy: list[str]
    phases: list[str]
    layers: list[int]
    layers_run: list[int]
    prompts: list[str]
    tokens: list[int]
    steps: int
    max_context: int
    seed: int = 0
    decode: str = "eager"
    variants: str = ""
    inject: str | None = None
    notes: list[str] = field(default_factory=list)
    fault_score: str = ""
    reds: dict[str, list[str]] = field(default_factory=dict)
    redacted: bool = False
    waivers: list[dict[str, Any]] = field(default_factory=list)
    baseline: str = ""
    production: str = ""
    schema: int = SCHEMA


@dataclass(frozen=True)
class Verdict:
    """One gate judged once.

    gate        row of the tolerance table; point  full point name, or the operation's name
    mode        isolated | free | operation | model
    phase       prefill | decode | None for operations; step_first..step_last  decode steps covered, 0-based
    state       pass | fail | not_run, with reason when it is not a pass
    metric      what value and limit measure; spent = value / limit
    floor       worst row of the reordered-sum twins; limit = k * floor + eps; why  where the row of the table comes from
    numbers     every number of the gate beside its limit, the one that spent most first: {number, smallest_limit, limit, spent};
                with a limit below smallest_limit the gate would be red
    where       [b, s or step, ...] of the worst row; element  coordinate of the worst element with got and want
    rows        rows compared: 0 is never a pass
    near_ties   differing choices within the score noise, counted and not failed
    component   part of the stack, in the words of the fault catalogue
    local       the inputs agreed: the error starts here (isolated runs); None where it cannot be told
    test_id     runs this gate again
    waiver      a failure that is known and accepted: {reason, until, by}; the state stays fail, `accepted` says whether it counts
    """

    type: ClassVar[str] = "verdict"
    gate: str
    point: str
    mode: str
    state: State
    metric: str
    layer: int | None = None
    phase: str | None = None
    step_first: int | None = None
    step_last: int | None = None
    worst_step: int | None = None
    value: float | None = None
    limit: float | None = None
    spent: float | None = None
    floor: float | None = None
    k: float | None = None
    eps: float | None = None
    why: str = ""
    reason: str = ""
    where: list[int] = field(default_factory=list)
    element: list[int] = field(default_factory=list)
    got: float | None = None
    want: float | None = None
    norm_ratio: float | None = None
    norm_ratio_limit: float | None = None
    cosine: float | None = None
    rel_l2: float | None = None
    rows: int = 0
    near_ties: int = 0
    component: str = ""
    local: bool | None = None
    test_id: str = ""
    numbers: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    waiver: dict[str, Any] | None = None


@dataclass(frozen=True)
class Measurement:
    """Numbers without an opinion, e.g. name "residual" or "sinkhorn", one line per layer, phase and step group."""

    type: ClassVar[str] = "measurement"
    name: str
    layer: int | None = None
    phase: str | None = None
    step: int | None = None
    point: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Coverage:
    """One asked cell of the grid phase x layer x point: how often its tap was expected and how often it fired."""

    type: ClassVar[str] = "coverage"
    phase: str
    layer: int | None
    point: str
    mode: str
    expected: int
    observed: int


@dataclass(frozen=True)
class Kernel:
    """A kernel that really ran: file, function (its variant), architecture, build hash and launches."""

    type: ClassVar[str] = "kernel"
    source: str
    kernel: str
    arch: str
    build: str
    launches: int


@dataclass(frozen=True)
class Mechanism:
    """Something the model can do, and how often this run made it happen. 0 is listed as not exercised."""

    type: ClassVar[str] = "mechanism"
    name: str
    count: int
    meaning: str
    covered_by: str = ""


@dataclass(frozen=True)
class Divergence:
    """The first point, in dataflow order, that is over its limit.

    component    its cause class, in the words of the fault catalogue; because  the evidence for it
    checked      gates that were judged up to it, in dataflow order: those that passed, and itself
    unobserved   places before it where no gate passed
    repro        file beside the run that holds this one operation; replay  the command that runs it; no_repro  why there is none
    """

    layer: int | None
    point: str
    phase: str | None
    step: int | None
    local: bool | None
    component: str
    checked: int = 0
    unobserved: int = 0
    repro: str | None = None
    replay: str | None = None
    no_repro: str = ""
    because: str = ""


@dataclass(frozen=True)
class Summary:
    """Last line of a run. verdict is "pass" only when every failure is waived, something passed and nothing asked was left out.

    failed   every failed verdict, waived ones too; waived  those of them that a waiver accepts
    coverage what production showed of the asked points: full, partial (with how many), or logits only; the list is measurement "not covered"
    """

    type: ClassVar[str] = "summary"
    verdict: str
    passed: int
    failed: int
    not_run: int
    first_divergence: Divergence | None
    total: int
    coverage_missing: int = 0
    near_ties: int = 0
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0
    waived: int = 0
    coverage: str = "full"


Record = Header | Verdict | Measurement | Coverage | Kernel | Mechanism | Summary
TYPES: dict[str, type] = {c.type: c for c in (Header, Verdict, Measurement, Coverage, Kernel, Mechanism, Summary)}
VERDICTS = ("pass", "fail", "incomplete")


# ---- one line ----


def to_wire(value: Any) -> Any:
    """The value with non-finite numbers as strings and tuples as lists: what strict JSON can carry."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): to_wire(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_wire(v) for v in value]
    return value


def to_line(record: Record) -> str:
    """One strict JSON line in ASCII, without a line break."""
    return json.dumps({"type": record.type, **to_wire(dataclasses.asdict(record))}, allow_nan=False)


_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _reject_constant(name: str) -> Any:
    raise RecordError(f"{name} is not strict JSON; non-finite numbers are strings")


def _fits(value: Any, hint: Any) -> bool:
    """A value read from JSON fits a field's type: an int passes for a float, a bool for neither."""
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    origin = typing.get_origin(hint) or hint
    if origin is dict:
        inner = typing.get_args(hint)[1]
        return isinstance(value, dict) and all(_fits(v, inner) for v in value.values())
    if origin is list:
        return isinstance(value, list) and all(_fits(v, typing.get_args(hint)[0]) for v in value)
    if isinstance(value, bool) and hint in (int, float):
        return False
    return isinstance(value, int | float) if hint is float else isinstance(value, origin)


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Type of every field of a record, in order; `type` is no field."""
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _check_types(kind: str, values: dict[str, Any], cls: type) -> None:
    for name, hint in hints_of(cls).items():
        if name in values and not _fits(values[name], hint):
            raise RecordError(f"{kind}: {name} is {values[name]!r:.60}, expected {getattr(hint, '__name__', hint)}")


def from_line(line: str, schema: int = SCHEMA) -> Record:
    """The record of a line of a file of that schema; a header's own schema counts. Raises RecordError with what is wrong."""
    try:
        values = json.loads(line, parse_constant=_reject_constant)
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a JSON line: {error}") from None
    kind = values.pop("type", None) if isinstance(values, dict) else None
    cls = TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RecordError(f"unknown record type {kind!r}; known: {', '.join(TYPES)}")
    if cls is Header:
        if type(values.get("schema")) is not int or values["schema"] not in READS:
            raise RecordError(f"schema {values.get('schema')!r}; this version reads {' and '.join(map(str, READS))}")
        schema, values["schema"] = values["schema"], SCHEMA
    fields = hints_of(cls)
    later = {name for number, added in ADDED.items() if number > schema for name in added.get(str(kind), ())}
    unknown = sorted(set(values) - set(fields) | set(values) & later)
    if unknown:
        raise RecordError(f"{kind}: unknown fields {unknown}")
    for name, hint in fields.items():
        if isinstance(values.get(name), str) and values[name] in _NON_FINITE and (hint is float or float in typing.get_args(hint)):
            values[name] = _NON_FINITE[values[name]]
    try:
        if cls is Verdict and "state" in values:
            values["state"] = State(values["state"])
        if cls is Summary and isinstance(values.get("first_divergence"), dict):
            _check_types("first_divergence", values["first_divergence"], Divergence)
            values["first_divergence"] = Divergence(**values["first_divergence"])
        _check_types(str(kind), values, cls)
        if cls is Summary and values.get("verdict", VERDICTS[0]) not in VERDICTS:
            raise RecordError(f"summary: verdict is {values['verdict']!r:.60}, expected {', '.join(VERDICTS)}")
        return cls(**values)  # type: ignore[no-any-return]
    except RecordError:
        raise
    except (TypeError, ValueError) as error:
        raise RecordError(f"{kind}: {error}") from None


# ---- a run ----

NEVER_WAIVED = ("run", "collection")  # production stopped, tests that cannot be imported: nothing was compared
WAIVER_DAYS = 180  # a waiver ends, and is asked for again


def accepted(verdict: Verdict, day: str = "") -> bool:
    """A failure whose waiver counts: it gives reason, name and end date, and has not run out on `day` (ISO; empty: not asked)."""
    waiver = verdict.waiver
    if waiver is None or verdict.state is not State.FAIL or verdict.gate in NEVER_WAIVED:
        return False
    if not all(isinstance(waiver.get(key), str) and waiver[key].strip() for key in ("reason", "until", "by")):
        return False
    try:
        until = datetime.date.fromisoformat(waiver["until"])
        return not day or datetime.date.fromisoformat(day) <= until
    except ValueError:
        return False


def ruling(passed: int, failed: int, waived: int, not_run: int, missing: int) -> str:
    """pass, fail or incomplete, from the counts alone; waived are among the failed."""
    if failed > waived:
        return "fail"
    return "pass" if passed and not not_run and not missing else "incomplete"


def summarise(records: Iterable[Record], seconds: float = 0.0, divergence: Divergence | None = None) -> Summary:
    """The arithmetic of a run: every verdict counted once, a missing tap or an empty run is never a pass."""
    counts = dict.fromkeys(State, 0)
    near_ties = missing = waived = 0
    day = ""
    reasons: list[str] = []
    for record in records:
        if isinstance(record, Header):
            day = record.started[:10]
        elif isinstance(record, Verdict):
            counts[record.state] += 1
            waived += accepted(record, day)
            near_ties += record.near_ties
            if record.state is State.NOT_RUN and record.reason and record.reason not in reasons:
                reasons.append(record.reason)
        elif isinstance(record, Coverage) and record.observed < record.expected:
            missing += 1
            reasons.append(f"{record.phase} {record.point} ({record.mode}): fired {record.observed} of {record.expected}")
    total = sum(counts.values())
    if total == 0:
        reasons.append("nothing was compared")
    return Summary(
        verdict=ruling(counts[State.PASS], counts[State.FAIL], waived, counts[State.NOT_RUN], missing), waived=waived, passed=counts[State.PASS], failed=counts[State.FAIL], not_run=counts[State.NOT_RUN], total=total,
        first_divergence=divergence, coverage_missing=missing, near_ties=near_ties, reasons=reasons[:50], seconds=seconds,
    )  # fmt: skip


def _within(value: float | None, limit: float | None) -> bool:
    """A number is no more than its limit; NaN never is. Without a limit nothing is said."""
    return limit is None or (value is not None and value <= limit)


def _said(value: Any) -> str:
    return "not there" if value is None else str(to_wire(value)).replace("nan", "NaN")


def contradiction(verdict: Verdict, day: str = "") -> str:
    """What a verdict says against itself; empty where it can be believed. day  of the run, ISO: a waiver is for so many days at most.

    A pass has compared something and every number of it is within its limit. A failure that a waiver accepts is a finite number over its
    limit: a crash, NaN or an empty comparison is nothing that could be accepted.
    """
    if verdict.waiver is not None and verdict.state is not State.FAIL:
        return "waived, and no failure"
    if verdict.state is State.PASS:
        if verdict.rows < 1:
            return "passed, and nothing was compared"
        if not _within(verdict.value, verdict.limit):
            return f"passed, and its value is {_said(verdict.value)}, its limit {_said(verdict.limit)}"
        if verdict.spent is not None and not verdict.spent <= 1:
            return f"passed, and its share of its limit is {_said(verdict.spent)}"
        for one in verdict.numbers:
            value, limit = (_NON_FINITE.get(n, n) if isinstance(n, str) else n for n in (one.get("smallest_limit"), one.get("limit")))
            if not isinstance(value, int | float) or not isinstance(limit, int | float) or not value <= limit:
                return f"passed, and its {one.get('number', 'number')} is {_said(value)}, its limit {_said(limit)}"
    if accepted(verdict, day):
        if verdict.rows < 1 or verdict.value is None or not math.isfinite(verdict.value):
            return "waived, and what failed is no number over its limit: nothing was compared, or no number came out"
        until = str((verdict.waiver or {}).get("until"))
        if day and (datetime.date.fromisoformat(until) - datetime.date.fromisoformat(day)).days > WAIVER_DAYS:
            return f"waived until {until}, more than {WAIVER_DAYS} days after the run"
    return ""


def _judged(records: Iterable[Verdict]) -> dict[tuple[str | None, str, str], set[int | None]]:
    """The cells of phase, point and mode that have a verdict, and which decode steps those cover; None: all of them."""
    cells: dict[tuple[str | None, str, str], set[int | None]] = {}
    for v in records:
        if v.phase == "decode" and v.details.get("left_by") == "prefill":
            continue  # what the prefill handed over
        last = v.step_first if v.step_last is None else v.step_last
        steps: Iterable[int | None] = (None,) if v.step_first is None or last is None else range(v.step_first, min(last, v.step_first + MOST_STEPS) + 1)
        cells.setdefault((v.phase, v.point, v.mode), set()).update(steps)
    return cells


MOST_STEPS = 1 << 20  # of one verdict, in a file of anybody's


def unjudged(cells: Iterable[Coverage], judged: Iterable[Verdict], every_step: bool = True) -> list[Coverage]:
    """Cells of the coverage table that no gate judged, or not at every step: their taps fired, and nobody looked."""
    of = _judged(judged)

    def seen(cell: Coverage) -> bool:
        steps = of.get((cell.phase, cell.point, cell.mode), set())
        return None in steps or (bool(steps) and (cell.phase != "decode" or not every_step or len(steps) >= cell.expected))

    return [cell for cell in cells if not seen(cell)]


def _left_out(header: Header, judged: list[Verdict], cells: list[Coverage], told: bool) -> list[str]:
    """What the header asks for and a run that passed says nothing about. told  the run lists gates that somebody else's production has no values for."""
    against = [f"{phase} is asked for, and no gate judged it" for phase in header.phases if not told and not any(v.phase == phase for v in judged)]
    if not cells:
        against.append("no tap is in its coverage")
    if not header.production:  # of somebody else's it is known what is shown: `coverage` says how much
        against += [f"{phase} is asked for, and none of its taps is in the coverage" for phase in header.phases if cells and not any(c.phase == phase for c in cells)]
        for seen, said in (({v.layer for v in judged}, "no gate judged it"), ({c.layer for c in cells}, "none of its taps is in the coverage")):
            against += [f"layer {layer} is asked for, and {said}" for layer in header.layers if layer not in seen and (cells or "gate" in said)]
        steps = max((c.expected for c in cells if c.phase == "decode"), default=header.steps)
        if steps != header.steps:
            against.append(f"{header.steps} decode steps are asked for, and {steps} are in the coverage")
    if not told:
        against += [f"{c.phase} {c.point} ({c.mode}) is in the coverage, and no gate judged all of it" for c in unjudged(cells, judged, every_step=not header.production)]
    return against


def contradictions(records: list[Record]) -> list[str]:
    """Why a run's last line cannot be believed, one line each; empty where its records bear it out.

    The one check of a verdict after it was written: the audit asks it before it says pass, and so do the report and CI. A run without a
    last line is cut off, which is another matter; only what its verdicts say of themselves is told.
    """
    header = next((r for r in records if isinstance(r, Header)), None)
    summary = records[-1] if records and isinstance(records[-1], Summary) else None
    judged, cells = list(verdicts(records)), [r for r in records if isinstance(r, Coverage)]
    day = "" if header is None else header.started[:10]
    against: list[str] = []
    if summary is not None:
        counted = summarise(records)
        numbers = "passed {0.passed}, failed {0.failed}, not run {0.not_run}, total {0.total}, waived {0.waived}, near-ties {0.near_ties}, taps missing {0.coverage_missing}"
        claimed, found = numbers.format(summary), numbers.format(counted)
        doubt = summary.verdict not in (counted.verdict, "incomplete") or (summary.verdict == "incomplete" and counted.verdict == "fail")
        if claimed != found or doubt:
            against += [f"last line: {summary.verdict}, {claimed}", f"records: {counted.verdict}, {found}"]
        if summary.verdict == "pass" and summary.first_divergence is not None:
            against.append(f"last line: pass, with a first divergence at {summary.first_divergence.point}")
        if summary.verdict == "pass" and header is not None:
            told = bool(header.production) and any(isinstance(r, Measurement) and r.name == "not covered" and r.values.get("tests") for r in records)
            against += _left_out(header, judged, cells, told)
    for kind, what in ((Header, "headers, expected one, on the first line"), (Summary, "summaries, expected one, on the last line")):
        many = sum(isinstance(r, kind) for r in records)
        if many > 1 or (kind is Summary and many and summary is None):
            against.append(f"{many} {what}")
    against += [f"{v.point} ({', '.join(filter(None, [v.phase, v.mode]))}): {said}" for v in judged if (said := contradiction(v, day))]
    return against


class Ledger:
    """Writes a run, one flushed line a record, so that a killed run leaves a readable file.

    with Ledger(path) as ledger: ledger.write(header); ledger.write(verdict); ledger.close_with(summary)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._file: TextIO | None = path.open("x", encoding="utf-8")

    def write(self, record: Record) -> None:
        if self._file is None:
            raise RecordError(f"{self.path} is closed")
        self._file.write(to_line(record) + "\n")
        self._file.flush()
        self.records.append(record)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_run(path: Path) -> list[Record]:
    """Every record of a run file; a cut-off last line is dropped. Raises RecordError with the line's number.

    A file of an older schema in READS is read as this one. Nothing is ever written behind the summary: a cut-off record there is no end of
    a killed run.
    """
    records: list[Record] = []
    schema = SCHEMA
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8")
            records.append(from_line(text, schema))
            if len(records) == 1 and isinstance(records[0], Header):
                schema = json.loads(text)["schema"]
        except (RecordError, UnicodeDecodeError) as error:
            if number == len(lines):  # no line break after it: the run was killed while writing
                if records and isinstance(records[-1], Summary):
                    raise RecordError(f"{path}:{number}: a cut-off record behind the summary, which is the last line of a run") from None
                break
            raise RecordError(f"{path}:{number}: {error}") from None
    if not records or not isinstance(records[0], Header):
        raise RecordError(f"{path}: the first line is no header")
    return records


def verdicts(records: Iterable[Record]) -> Iterator[Verdict]:
    """The verdicts among the records."""
    return (record for record in records if isinstance(record, Verdict))
