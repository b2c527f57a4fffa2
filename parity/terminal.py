"""What an audit says on a terminal: one live line while it runs, what is red as it turns red, a short table at the end.

    pytest parity/         # a terminal: a line with time left; a log: plain lines now and then; -v: pytest's own lines
    pytest parity/ -q      # waivers, first divergence, verdict, report; -qq: verdict and report

NO_COLOR, TERM=dumb and pytest's --color are honoured. pytest's dots are left out, and of many failures it spells out the first
few: the report has all. `closing` is a pure function of records. Tests: parity/unit/test_terminal.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from parity import pace, selection
from probes.core import wording
from probes.core.records import Record, State, Summary, Verdict, accepted
from probes.core.wording import at_step, closest, first_step, named, plural, when

SPELLED_OUT = 10  # failures that are told in full, by this module and by pytest
EVERY_SECONDS = 30.0  # of plain lines, unless a tenth of the tests takes longer
REDRAW_SECONDS = 0.1
ENOUGH = 20  # tests before the rest is said to take so and so long


# ---- the closing table ----

KINDS = {
    "isolated": "layers alone", "free": "layers in the chain", selection.DEVICE_MODE: "layers, other device", "state": "stored state", "model": "whole model",
    "self": "equal to itself", "operation": "operations", "load": "parameters", "memory": "memory", "recall": "recall", "run": "run",
}  # fmt: skip


def kind_of(verdict: Verdict) -> str:
    """The kind of gate, in the words of the table."""
    word = verdict.gate.split(".")[0]
    word = {"widths": "memory", "collection": "run", "choices": "model", "sink": "operation" if verdict.phase is None else verdict.mode}.get(word, word)
    if word not in ("run", "self", "state", "load", "memory", "recall", "operation"):
        word = "model" if verdict.layer is None or verdict.mode not in KINDS else verdict.mode
    return KINDS[word]


@dataclass
class Row:
    """Gates of one phase and kind. nearest  share of its limit, and the gate that spent it, of those that do not count as failed."""

    phase: str
    kind: str
    judged: int = 0
    failed: int = 0
    waived: int = 0
    not_run: int = 0
    nearest: float = -1.0
    point: str = ""


def rows_of(records: Iterable[Record]) -> list[Row]:
    """One row per phase and kind of gate that the run has."""
    rows: dict[tuple[str, str], Row] = {}
    for v in records:
        if not isinstance(v, Verdict):
            continue
        phase, kind = v.phase or "-", kind_of(v)
        row = rows.setdefault((phase, kind), Row(phase, kind))
        row.not_run += v.state is State.NOT_RUN
        row.judged += v.state is not State.NOT_RUN
        row.waived += accepted(v)
        row.failed += v.state is State.FAIL and not accepted(v)
        if v.state is State.PASS and v.spent is not None and v.spent > row.nearest:
            row.nearest, row.point = v.spent, v.point
    kinds, phases = list(KINDS.values()), (*selection.PHASES, "-")
    return sorted(rows.values(), key=lambda r: (phases.index(r.phase) if r.phase in phases else len(phases), kinds.index(r.kind)))


def table(records: Iterable[Record], width: int = 100) -> list[str]:
    """Phase x kind of gate, in aligned plain text. A column of waivers only where there is one."""
    rows = rows_of(records)
    if not rows:
        return []
    waived = any(row.waived for row in rows)
    lines = [["phase", "gates", "judged", "failed", *(["waived"] if waived else []), "not run", "closest to its limit"]]
    for r in rows:
        nearest = "-" if r.nearest < 0 else "exact" if r.nearest == 0 else f"{share(r.nearest)}  {r.point}"
        lines.append([r.phase, r.kind, str(r.judged), str(r.failed), *([str(r.waived)] if waived else []), str(r.not_run), nearest])
    last = len(lines[0]) - 1
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shown = ["  ".join(cell.ljust(w) if i in (0, 1, last) else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))).rstrip() for line in lines]
    return [line if len(line) <= width else line[: max(width - 3, 1)] + "..." for line in shown]


def nearest(records: Iterable[Record]) -> list[str]:
    """Of a run where nothing diverges: the pass that spent most, the one that the report's first screen names."""
    judged = [r for r in records if isinstance(r, Verdict)]
    return [f"closest to its limit{' in the model' * (v.mode != 'operation')}: {' '.join(filter(None, [v.point, v.phase, steps(v)]))}, {v.mode}, {share(v.spent)}" for v in (judged[i] for i, _ in closest(judged)[:1]) if v.spent is not None]


def steps(verdict: Verdict) -> str:
    """The decode steps that a gate covers."""
    first, last = verdict.step_first, verdict.step_last
    return "" if first is None else f"step {first}" if last in (None, first) else f"steps {first}-{last}"


def share(spent: float) -> str:
    """Of a limit: never rounded onto it."""
    if not math.isfinite(spent):
        return str(spent)
    if spent >= 1.5:
        return f"{spent:.3g} x"
    percent = 100 * spent
    return "<1 %" if percent < 1 else f"{math.floor(percent)} %" if percent < 100 else wording.share(spent)


def verdict_line(summary: Summary, waivers: int = 0) -> str:
    """The verdict in words, how much was covered where that is not all, what was accepted, and why it is incomplete or what a pass did not exercise."""
    notes = [summary.coverage] if summary.coverage != "full" else []
    notes += [f"{plural(summary.waived, 'failed gate')} accepted"] if summary.waived else []
    if summary.verdict != "fail" and summary.reasons:
        notes.append(" ".join(_few(summary.reasons[0]).split()))
    return f"verdict: {summary.verdict}" + (f" with {plural(waivers, 'waiver')}" if waivers else "") + (f" ({'; '.join(notes)})" if notes else "")


def _few(reason: str) -> str:
    """A reason in one line: of many mechanisms how many there are and the first few; the records and the report have all."""
    head, colon, rest = reason.partition(": ")
    names = rest.split("; ")
    return reason if not head.startswith("not exercised") or len(names) <= 4 else f"{head}{colon}{len(names)} mechanisms, {named(names)}"


COLOURS = {"pass": {"green": True}, "fail": {"red": True}, "incomplete": {"yellow": True}}


def coloured(lines: Sequence[str], verdict: str, writer: Any) -> list[str]:
    """The verdict's line in its colour, where the terminal has colours and nobody asked for none."""
    return [writer.markup(line, bold=True, **COLOURS[verdict]) if line.startswith("verdict: ") else line for line in lines]


def closing(records: Sequence[Record], cause: Sequence[str], first: Sequence[str], waivers: Sequence[str], verdict: str, report: str, verbosity: int, width: int = 100) -> list[str]:
    """The last lines of a run. -q leaves the table out, -qq everything but verdict and report."""
    lines = []
    if verbosity >= 0:
        lines += ["", *table(records, width), "", *([] if first or cause else nearest(records))]
    if verbosity >= -1:
        lines += [*cause, *first, *waivers]
    return [*lines, verdict, f"report: {report}"]


# ---- while it runs ----


def left(seconds: float) -> str:
    """Time as people say it."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 100 else f"{round(whole / 60)} min" if whole < 6000 else f"{whole / 3600:.1f} h"


class Progress:
    """A pytest plugin: progress instead of dots. Level 0; other levels of -v and -q leave pytest's output alone or say nothing."""

    def __init__(self, config: pytest.Config, verbosity: int) -> None:
        self.config, self.verbosity = config, verbosity
        self.reporter: Any = None
        self.capture: Any = None
        self.live = False
        self.total = self.done = self.red = 0
        self.stage = ""
        self.drawn = self.over = False
        self.drawn_at = self.told_at = self.began = time.perf_counter()
        self.told_done = 0
        self.size = (pace.TOKENS, pace.STEPS, pace.LAYERS)
        self.pace: pace.Pace | None = None
        self.spent: dict[str, float] = {}

    def begin(self) -> None:
        """Once pytest's own terminal is there."""
        self.reporter, self.capture = (self.config.pluginmanager.getplugin(name) for name in ("terminalreporter", "capturemanager"))
        if self.reporter is not None and self.verbosity <= 0:
            self.live = self.verbosity == 0 and bool(self.reporter.isatty) and os.environ.get("TERM", "") not in ("", "dumb")
            self.reporter.showfspath = False
            self.reporter._show_progress_info = False  # no "[ 15%]" behind dots that are not there

    def width(self) -> int:
        """Columns of the terminal; of a log, as wide as the table is."""
        return shutil.get_terminal_size().columns if self.reporter is not None and self.reporter.isatty else 200

    # lines

    def line(self, text: str, **markup: bool) -> None:
        """A line above the live one; it reaches the terminal also while pytest captures."""
        if self.reporter is None or self.verbosity < 0:
            return
        with self._uncaptured():
            self.clear()
            self.reporter.ensure_newline()
            self.reporter.write_line(f"  {text}", flush=True, **markup)
        self._draw()

    def say(self, text: str) -> None:
        """Where a long stage stands: the live line's, or a line of its own."""
        if not self.live:
            self.line(text)
            return
        self.stage = text
        self._draw()

    def turned_red(self, verdict: Verdict, waived: bool) -> None:
        """A gate that failed, as it fails; the first few."""
        self.red += not waived
        if waived or self.red > SPELLED_OUT + 1:
            return
        if self.red == SPELLED_OUT + 1:
            self.line("further red gates are in the report", red=True)
            return
        first = first_step(verdict) if verdict.phase == "decode" else None
        step = verdict.worst_step if first is None else first
        over = at_step(f"{share(verdict.spent)} of its limit", verdict, step) if verdict.spent is not None and math.isfinite(verdict.spent) else verdict.reason
        self.line(f"red: {verdict.point}  {when(verdict.phase, step, verdict) or 'single operation'}  {verdict.mode}  {' '.join(over.split())[:160]}", red=True)

    def status(self) -> str:
        """Tests judged, red, time left, and what a long one is doing."""
        words = [f"{self.done} of {self.total} gates' tests" if self.total else "starting", *([f"{self.red} red"] if self.red else []), f"{left(time.perf_counter() - self.began)}"]
        if self.pace is not None and ENOUGH <= self.done < self.total and not self.stage:
            words.append(f"about {left(self.pace.left())} left")
        return ", ".join(words) + (f" | {self.stage}" if self.stage else "")

    @contextlib.contextmanager
    def _uncaptured(self) -> Generator[None]:
        with self.capture.global_and_fixture_disabled() if self.capture is not None else contextlib.nullcontext():
            yield

    def _draw(self) -> None:
        if not self.live or self.reporter is None or self.done >= self.total > 0:
            return
        self.drawn_at = time.perf_counter()
        text = self.status()[: shutil.get_terminal_size().columns - 1]
        with self._uncaptured():
            self.reporter.write("\r\x1b[2K" + text, flush=True)
        self.drawn = True

    def clear(self) -> None:
        """The live line is gone: somebody else writes next."""
        if self.drawn and self.reporter is not None:
            with self._uncaptured():
                self.reporter.write("\r\x1b[2K", flush=True)
            self.reporter._tw._current_line = ""  # the cursor is at the start: ensure_newline has nothing to do
            self.drawn = False

    # hooks

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Generator[None, Any, Any]:
        """Counted as pytest counts, without a letter."""
        status = yield
        return status if self.verbosity > 0 or self.over else (status[0], "", "")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)
        self.pace = pace.Pace(session.items, *self.size)
        self.began = self.told_at = time.perf_counter()

    def pytest_runtest_logstart(self) -> None:
        if self.config.getoption("capture") == "no":
            self.clear()  # what a test prints starts at the left

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.done += 1
        if self.pace is not None:
            self.pace.took(nodeid, self.spent.pop(nodeid, 0.0))
        self.stage = ""
        if self.verbosity != 0:
            return
        now = time.perf_counter()
        if self.live and (now - self.drawn_at > REDRAW_SECONDS or not self.drawn):
            self._draw()
        tenth = self.done - self.told_done >= self.total / 10
        if not self.live and (self.done == self.total or (tenth and now - self.told_at > EVERY_SECONDS / 6) or now - self.told_at > EVERY_SECONDS):
            self.told_at, self.told_done = now, self.done
            self.line(self.status())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.spent[report.nodeid] = self.spent.get(report.nodeid, 0.0) + report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.clear()
        self.live, self.over = False, True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None]:
        """pytest spells out the first few failures of each kind; its counts stay."""
        if self.verbosity > 0:
            return (yield)
        whole = {name: terminalreporter.stats.get(name, []) for name in ("failed", "error", "xfailed")}
        for name, reports in whole.items():
            if len(reports) > SPELLED_OUT:
                terminalreporter.stats[name] = reports[:SPELLED_OUT]
        try:
            return (yield)
        finally:
            for name, reports in whole.items():
                if len(reports) > SPELLED_OUT:
                    terminalreporter.stats[name] = reports
            more = sum(max(0, len(reports) - SPELLED_OUT) for reports in whole.values())
            if more and self.verbosity == 0:
                terminalreporter.write_line(f"and {more} more; all of them are in the report")


def quiet(config: pytest.Config) -> int:
    """The level that -v and -q ask of an audit. With -q pytest itself keeps silent: the verdict is what was asked for."""
    verbosity = int(config.getoption("verbose"))
    if verbosity < 0 and not config.getoption("collectonly"):
        config.option.verbose = min(verbosity, -2)  # without its last line
        config.option.no_summary = True
    return verbosity
