"""The terminal: the closing table and verdict as functions of records, progress live and in a log, -q, colours, long lists of failures."""

import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from parity import terminal
from parity.terminal import Progress, closing, kind_of, rows_of, share, table, verdict_line
from parity.unit.test_session import ROOT, SMALL, Shell
from probes.core.records import Divergence, State, Summary, Verdict
from probes.core.wording import closest

GREEN = Verdict("attn.q", "layers.2.attn.q", "isolated", State.PASS, "worst row", layer=2, phase="decode", value=0.01, limit=0.04, spent=0.25, rows=9)
RED = replace(GREEN, gate="attn.core", point="layers.2.attn.core", mode="free", state=State.FAIL, spent=3.0, value=0.12, worst_step=7)
NOT_RUN = replace(GREEN, state=State.NOT_RUN, spent=None, reason="no device")
WAIVED = replace(RED, waiver={"reason": "known", "until": "2999-01-01", "by": "x"})


# ---- records in, lines out ----


def test_the_table_counts_every_verdict_once_by_phase_and_kind():
    records = [GREEN, replace(GREEN, spent=0.75, point="layers.3.attn.q"), NOT_RUN, RED, WAIVED, replace(GREEN, gate="operation.rope", mode="operation", layer=None, phase=None, point="rope[7]", spent=0.0)]
    alone, chain, operations = rows_of(records)
    assert (alone.kind, alone.judged, alone.failed, alone.waived, alone.not_run, alone.nearest, alone.point) == ("layers alone", 2, 0, 0, 1, 0.75, "layers.3.attn.q")
    assert (chain.kind, chain.judged, chain.failed, chain.waived, chain.nearest) == ("layers in the chain", 2, 1, 1, -1.0)
    assert (operations.phase, operations.kind, operations.judged) == ("-", "operations", 1)
    lines = table(records)
    assert lines[0].split() == ["phase", "gates", "judged", "failed", "waived", "not", "run", "closest", "to", "its", "limit"]
    assert lines[1].split() == ["decode", "layers", "alone", "2", "0", "0", "1", "75", "%", "layers.3.attn.q"]
    assert lines[3].endswith("exact")
    assert "waived" not in table([GREEN, RED])[0]
    assert table([]) == []


def test_a_table_is_no_wider_than_its_terminal():
    wide = table([replace(GREEN, point="layers.2." + "x" * 200)], width=80)
    assert max(map(len, wide)) == 80
    assert wide[1].endswith("...")


@pytest.mark.parametrize(("change", "kind"), [
    ({"gate": "run"}, "run"), ({"gate": "collection"}, "run"), ({"gate": "state.kv"}, "stored state"), ({"gate": "self.replayed", "mode": "model"}, "equal to itself"),
    ({"gate": "device.attn.q", "mode": "device"}, "layers, other device"), ({"gate": "logits.top1", "layer": None, "mode": "free"}, "whole model"),
    ({"gate": "widths", "mode": "operation"}, "memory"), ({"gate": "sink.merge", "mode": "operation", "phase": None, "layer": None}, "operations"),
])  # fmt: skip
def test_every_gate_has_a_kind(change, kind):
    assert kind_of(replace(GREEN, **change)) == kind


@pytest.mark.parametrize(("spent", "text"), [(0.004, "<1 %"), (0.999, "99 %"), (1.0, "100 %"), (1.004, "100.4 %"), (3.14159, "3.14 x"), (float("inf"), "inf"), (float("nan"), "nan")])
def test_a_share_is_never_rounded_onto_the_limit(spent, text):
    assert share(spent) == text


def summary(verdict="pass", **more):
    return Summary(verdict, 3, more.get("waived", 0), 0, None, 3, **more)


def test_the_verdicts_line_says_what_was_accepted_and_why_it_is_incomplete():
    assert verdict_line(summary()) == "verdict: pass"
    assert verdict_line(summary(waived=12), 2) == "verdict: pass with 2 waivers (12 failed gates accepted)"
    assert verdict_line(summary("incomplete", reasons=["no device", "more"])) == "verdict: incomplete (no device)"
    assert verdict_line(summary("fail", reasons=["no device"])) == "verdict: fail"
    names = "not exercised, and reached by no check of this run: "
    assert verdict_line(summary(reasons=[names + "a; b"])) == f"verdict: pass ({names}a; b)"
    assert verdict_line(summary(reasons=[names + "; ".join("abcdefghijklm")])) == f"verdict: pass ({names}13 mechanisms, a, b, c and 10 more)"


@pytest.mark.parametrize("verbosity", [0, -1, -2])
def test_the_reports_path_is_the_last_line_at_every_level(verbosity):
    lines = closing([GREEN], ["cause"], ["first divergence: x"], ["waiver: y"], "verdict: pass", "out/report.html", verbosity)
    assert lines[-2:] == ["verdict: pass", "report: out/report.html"]
    assert any("layers alone" in line for line in lines) == (verbosity == 0)
    assert ("first divergence: x" in lines) == ("waiver: y" in lines) == (verbosity >= -1)


class Writer:
    """What the live line and plain lines are written to."""

    isatty, showfspath, _show_progress_info = False, True, "progress"

    def __init__(self, tty):
        self.isatty, self.written, self._tw = tty, "", self
        self._current_line = ""

    def ensure_newline(self):
        pass

    def write(self, text, flush=False, **_):
        self.written += text

    def write_line(self, text, flush=False, **_):
        self.written += text + "\n"


class Config:
    """As much of pytest.Config as progress reads."""

    def __init__(self, tty):
        self.reporter, self.pluginmanager = Writer(tty), self

    def getplugin(self, name):
        return self.reporter if name == "terminalreporter" else None

    def getoption(self, name):
        return "fd"


def begun(tty, monkeypatch, term="xterm", verbosity=0, total=400):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "60")
    progress = Progress(Config(tty), verbosity)  # type: ignore[arg-type]
    progress.begin()
    progress.total = total
    return progress


@pytest.mark.parametrize(("tty", "term", "live"), [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)])
def test_a_live_line_only_where_a_terminal_can_draw_one(tty, term, live, monkeypatch):
    progress = begun(tty, monkeypatch, term)
    progress.say("decode: step 1 of 130, 1 s, about 129 s for the other steps, and much more than fits into a line of sixty columns")
    written = progress.reporter.written
    assert written.startswith("\r\x1b[2K") == live
    assert ("\n" in written) == (not live)
    assert not live or len(written.removeprefix("\r\x1b[2K")) == 59


def test_a_log_gets_few_lines_with_time_left(monkeypatch):
    progress = begun(False, monkeypatch)
    clock = [1000.0]
    monkeypatch.setattr("parity.terminal.time.perf_counter", lambda: clock[0])
    items = [SimpleNamespace(nodeid=f"parity/test_x.py::test_x[{n}]") for n in range(400)]
    progress.pytest_collection_finish(SimpleNamespace(items=items))
    for item in items:
        clock[0] += 0.1
        progress.pytest_runtest_logreport(SimpleNamespace(nodeid=item.nodeid, duration=0.1))
        progress.pytest_runtest_logfinish(item.nodeid)
    lines = progress.reporter.written.strip().splitlines()
    assert 4 <= len(lines) <= 10
    assert re.fullmatch(r"  \d+ of 400 gates' tests, \d+ s, about \d+ s left", "  " + lines[0].strip())
    assert lines[-1].strip() == "400 of 400 gates' tests, 40 s"


def test_a_red_line_names_the_first_wrong_step_and_that_of_its_number(monkeypatch):
    progress = begun(False, monkeypatch)
    progress.turned_red(replace(RED, step_first=1, step_last=23, worst_step=9, details={"first_step": 1}), False)
    progress.turned_red(replace(RED, step_first=1, step_last=23, worst_step=1, details={"first_step": 1}), False)
    assert [line.strip() for line in progress.reporter.written.strip().splitlines()] == [
        "red: layers.2.attn.core  from decode step 1  free  3 x of its limit at step 9",
        "red: layers.2.attn.core  decode step 1  free  3 x of its limit",
    ]


def test_the_pass_closest_to_its_limit_is_the_one_of_the_reports_first_screen():
    case = replace(GREEN, mode="operation", gate="operation.rope", phase=None, layer=None, spent=0.9)
    cases = [replace(case, point=f"rope[{i}]", spent=0.9 - i / 100) for i in range(20)]
    points = [replace(GREEN, layer=i, point=f"layers.{i}.attn.q", spent=0.5 + i / 100) for i in range(5)]
    run = [*cases, *points, replace(GREEN, spent=0.0)]
    assert closest(run) == [(24, 4), (0, 19)]
    assert [line for line in closing(run, [], [], [], "verdict: pass", "r", 0) if line.startswith("closest")] == ["closest to its limit in the model: layers.4.attn.q decode, isolated, 54 %"]
    assert not [line for line in closing(run, [], ["first divergence: x"], [], "verdict: fail", "r", 0) if line.startswith("closest")]
    many = [replace(GREEN, layer=0, point=f"layers.0.p{i}", spent=0.5) for i in range(30)] + [replace(case, point=f"op{i}[x]") for i in range(30)]
    assert [many[i].mode == "operation" for i, _ in closest(many)] == [False] * 6 + [True] * 4
    assert [len(closest(part)) for part in (many[:30], many[30:], [])] == [10, 10, 0]


def test_red_gates_are_told_as_they_fail_the_first_few(monkeypatch):
    progress = begun(False, monkeypatch)
    progress.turned_red(WAIVED, True)
    assert progress.reporter.written == ""
    for _ in range(50):
        progress.turned_red(RED, False)
    lines = progress.reporter.written.strip().splitlines()
    assert lines[0].strip() == "red: layers.2.attn.core  decode step 7  free  3 x of its limit"
    assert len(lines) == terminal.SPELLED_OUT + 1
    assert "in the report" in lines[-1]
    assert "50 red" in progress.status()


@pytest.mark.parametrize("verbosity", [-1, -2])
def test_quiet_runs_say_nothing_on_the_way(verbosity, monkeypatch):
    progress = begun(True, monkeypatch, verbosity=verbosity)
    progress.say("prefill")
    progress.turned_red(RED, False)
    progress.pytest_runtest_logfinish("parity/test_x.py::test_x")
    assert progress.reporter.written == ""


# ---- as typed ----

SELECTED = ("parity/test_layers.py", *SMALL, "--phase", "prefill", "-k", "attn.core or attn.norm")


def test_a_log_has_no_dots_no_colours_and_ends_with_the_path(tmp_path):
    code, out, err = Shell(tmp_path)(*SELECTED)
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "\r" not in out
    assert not re.search(r"^parity/test_layers\.py", out, re.MULTILINE)
    assert "4 of 4 gates' tests" in out
    assert "4 passed" in out
    assert re.search(r"^prefill  layers alone +2 +0 +0 ", out, re.MULTILINE)
    assert out.rstrip().splitlines()[-1].startswith("report: ")


@pytest.mark.parametrize(("quiet", "lines"), [("-q", ["first divergence: ", "no repro: ", "verdict: fail", "report: "]), ("-qq", ["verdict: fail", "report: "])])
def test_q_prints_the_verdict_and_nothing_of_pytest(quiet, lines, tmp_path):
    from parity.unit.test_waivers import FAULT

    shell = Shell(tmp_path)
    code, out, _ = shell(*SELECTED, quiet, *shell.fault(*FAULT), "--profile", "full")
    assert code == 1
    shown = out.strip().splitlines()
    assert [start for start in lines if any(line.startswith(start) for line in shown)] == lines, out
    assert all(line.startswith((*lines, "because: ")) for line in shown), out
    assert shown[-1].startswith("report: ")


def test_many_failures_are_spelled_out_ten_times_and_counted(tmp_path):
    shell = Shell(tmp_path)
    fault = shell.fault("production/model.py", "a = self.hc_ffn.pre(buf.X_half, step)", "a = self.hc_ffn.pre(buf.X, step)")
    code, out, _ = shell("parity/test_layers.py", *SMALL, *fault, "--profile", "full", "-k", "test_point and hc_ffn")
    failed = shell.records()[2].failed
    assert code == 1
    assert failed > 2 * terminal.SPELLED_OUT
    assert out.count("  again: pytest") == terminal.SPELLED_OUT
    assert len(re.findall(r"^FAILED ", out, re.MULTILINE)) == terminal.SPELLED_OUT
    assert f"and {failed - terminal.SPELLED_OUT} more; all of them are in the report" in out
    assert f"{failed} failed" in out


def on_a_terminal(directory, **environment):
    """What a run writes to a pseudo-terminal."""
    shell = Shell(directory)
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "pytest", *SELECTED, "--report", str(shell.report)]
    process = subprocess.Popen(command, cwd=ROOT, env=shell.environment | {"TERM": "xterm", "COLUMNS": "100"} | environment, stdout=writer, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    os.close(writer)
    shown = b""
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(reader)
    assert process.wait(60) == 0, shown
    return shown.decode()


def test_a_terminal_has_one_live_line_and_a_coloured_verdict(tmp_path):
    shown = on_a_terminal(tmp_path)
    assert "\r\x1b[2K" in shown
    assert "gates' tests" in shown
    assert re.search(r"\x1b\[[0-9;]*m\x1b\[[0-9;]*mverdict: |\x1b\[[0-9;]+mverdict: ", shown)
    drawn = [line for line in shown.split("\r\n") if "\x1b[2K" in line]
    assert all(line.split("\x1b[2K")[-1] == "" or line is drawn[-1] or not line.split("\x1b[2K")[-1].startswith("0 of") for line in drawn)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_and_a_dumb_terminal_are_honoured(name, value, tmp_path):
    shown = on_a_terminal(tmp_path, **{name: value})
    assert not re.search(r"\x1b\[[0-9;]*m", shown)
    assert ("\x1b[2K" in shown) == (name == "NO_COLOR")


def test_pytests_own_junit_still_lists_every_test(tmp_path):
    shell = Shell(tmp_path)
    shell(*SELECTED, f"--junitxml={tmp_path / 'own.xml'}")
    assert (tmp_path / "own.xml").read_text().count("<testcase ") == 4


def test_v_keeps_pytests_own_lines(tmp_path):
    _, out, _ = Shell(tmp_path)(*SELECTED, "-v")
    assert len(re.findall(r"^parity/test_layers\.py::test_point\[.*PASSED", out, re.MULTILINE)) == 4


def test_a_divergence_is_told_with_the_waived_ones_before_it():
    from parity.session import divergence_lines

    first = Divergence(2, "layers.2.attn.out", "decode", 3, True, "attention core", because="2 failed gates before it are waived", no_repro="none")
    assert divergence_lines(first)[1] == "because: 2 failed gates before it are waived"
