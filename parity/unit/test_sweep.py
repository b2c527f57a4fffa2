"""The sweep over planted faults: its judgement from invented runs, its score, its last line and exit codes, its processes.

The audits are stand-ins: small programs that write the run file of an audit. A real one: test_planted.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parity import score, sweep
from parity.planted import FAULTS, Fault, read_faults
from parity.score import NO_SWEEP, Clean, Outcome, Score
from parity.unit.synthetic_run import HOSTILE, header
from probes.core.records import Divergence, Record, State, Verdict, from_line, summarise, to_line
from reports.render import report_html
from reports.sweep import main as draw
from reports.sweep import sweep_html

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["window", "window", "csa", "hca", "csa", "hca", "csa", "hca"]
EXPECT = {"components": ["SWA ring", "visibility mask"], "layer_kinds": ["window", "csa"], "phase": "decode"}
FAULT = Fault("B060", "decode sees 127 of 128 keys", (), EXPECT, "SWA ring")
FIRST = Divergence(0, "layers.0.attn.visible", "decode", 3, True, "visibility mask")
GATE = Verdict("attn.visible", "layers.0.attn.visible", "isolated", State.FAIL, "differing", layer=0, phase="decode", step_first=1, rows=250, reason="keys differ")
PASSED = dataclasses.replace(GATE, point="layers.0.attn.kv", state=State.PASS, reason="")
CRASH = Verdict("run", "run", "model", State.FAIL, "production finished", phase="decode", reason="stopped in decode step 3: KernelError: no")


def run_of(*verdicts: Verdict, first: Divergence | None = FIRST, inject: str | None = "B060", whole: bool = True) -> list[Record]:
    """The records of an audit with a fault planted."""
    records: list[Record] = [header(inject=inject, model={"kinds": KINDS}), *verdicts]
    return [*records, summarise(records, 1.0, first)] if whole else records


# ---- one fault ----


def test_a_fault_that_is_named_as_its_data_accepts_is_right():
    outcome = score.judge(FAULT, run_of(PASSED, CRASH, GATE), 12.0)
    assert (outcome.state, outcome.gate, outcome.named, outcome.layer_kind, outcome.phase, outcome.step) == ("detected", "attn.visible", "visibility mask", "window", "decode", 3)
    assert outcome.right == {"component": True, "layer_kind": True, "phase": True}
    assert (outcome.wrong, outcome.exact, outcome.seconds) == ("", False, 12.0)
    assert score.judge(FAULT, run_of(GATE, first=dataclasses.replace(FIRST, component="SWA ring"))).exact


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"component": "rope"}, "component rope, expected SWA ring or visibility mask"),
        ({"component": ""}, "component none, expected"),
        ({"layer": 3}, "layer kind hca, expected window or csa"),
        ({"layer": None}, "layer kind none, expected"),
        ({"phase": "prefill"}, "phase prefill, expected decode"),
        ({"phase": None}, "phase none, expected decode"),
    ],
)
def test_what_is_named_wrongly_is_said_and_still_detected(change, said):
    outcome = score.judge(FAULT, run_of(GATE, first=dataclasses.replace(FIRST, **change)))
    assert outcome.state == "detected"
    assert said in outcome.wrong
    assert sum(outcome.right.values()) == 2


def test_a_fault_that_needs_no_layer_may_be_named_without_one():
    fault = dataclasses.replace(FAULT, expect={"components": ["memory"], "phase": "any"})
    outcome = score.judge(fault, run_of(GATE, first=Divergence(None, "memory.rate", None, None, True, "memory")))
    assert (outcome.wrong, outcome.layer_kind, outcome.phase) == ("", "", "")


@pytest.mark.parametrize(
    ("records", "state", "said"),
    [
        (run_of(PASSED, first=None), "undetected", "verdict pass"),
        (run_of(PASSED, dataclasses.replace(PASSED, state=State.NOT_RUN, reason="tap"), first=None), "undetected", "verdict incomplete: tap"),
        (run_of(PASSED, CRASH), "undetected", "crash only: stopped in decode step 3"),
        (run_of(PASSED, dataclasses.replace(GATE, reason="production stopped: KernelError: no")), "undetected", "crash only"),
        (run_of(PASSED, dataclasses.replace(GATE, metric="assertions of the test", reason="TypeError: no")), "undetected", "crash only"),
        (run_of(PASSED, dataclasses.replace(GATE, gate="collection", reason="ImportError")), "undetected", "crash only"),
        (run_of(GATE, whole=False), "not run", "cut off"),
        (run_of(GATE, inject=None), "not run", "the run is of no fault"),
        (run_of(GATE, inject="B001"), "not run", "the run is of B001"),
        (run_of(dataclasses.replace(GATE, metric="assertions of the test", reason="AssertionError: no")), "detected", ""),
        (run_of(GATE, first=None), "detected", "no first divergence is named"),
    ],
    ids=["pass", "incomplete", "crash", "stopped while judging", "error in a test", "not importable", "cut off", "no fault", "other fault", "assertion", "nothing named"],
)
def test_only_a_gate_that_compared_something_detects(records, state, said):
    outcome = score.judge(FAULT, records)
    assert outcome.state == state
    assert said in outcome.wrong
    assert sum(outcome.right.values()) == (3 if not said else 0)


def test_a_crash_counts_where_the_fault_says_so():
    outcome = score.judge(dataclasses.replace(FAULT, crash=True), run_of(PASSED, CRASH))
    assert (outcome.state, outcome.gate) == ("detected", "run")


def test_a_clean_run_is_green_when_its_verdict_is_pass():
    assert score.judge_clean((), run_of(PASSED, first=None, inject=None)).green
    red = score.judge_clean((), run_of(PASSED, GATE, inject=None))
    assert not red.green
    assert "attn.visible at layers.0.attn.visible" in red.reason
    assert not score.judge_clean((), run_of(PASSED, whole=False, inject=None)).green


# ---- the score ----


def outcome(number: int, state: str = "detected", component: bool = True, kind: bool = True, phase: bool = True) -> Outcome:
    right = {"component": component, "layer_kind": kind, "phase": phase}
    return Outcome(f"B{number:03}", HOSTILE, "sink", state, right=right, exact=component, wrong="" if all(right.values()) and state == "detected" else "phase none")


GREEN = [Clean((), "pass"), Clean(("a.txt", "b.txt"), "pass")]


def test_the_last_line_is_the_score():
    outcomes = [outcome(n, component=n > 2, kind=n > 1, phase=n > 0) for n in range(108)]
    made = Score.of(outcomes, GREEN, 24 * 60)
    assert made.sentence == "score: 108 of 108 detected, component 105 (97.2 %), layer kind 106 (98.1 %), phase 107 (99.1 %), 0 of 2 clean runs red, 24 min"
    assert made.ok


@pytest.mark.parametrize(
    ("outcomes", "clean", "ok"),
    [
        ([outcome(n) for n in range(20)], GREEN, True),
        ([outcome(n, component=n > 0) for n in range(20)], GREEN, True),
        ([outcome(n, component=n > 1) for n in range(20)], GREEN, False),
        ([outcome(n, kind=n > 1) for n in range(20)], GREEN, True),
        ([outcome(n, kind=n > 2) for n in range(20)], GREEN, False),
        ([outcome(n, phase=n > 2) for n in range(20)], GREEN, False),
        ([outcome(n, "undetected" if n == 7 else "detected") for n in range(200)], GREEN, False),
        ([outcome(n, "not run" if n == 7 else "detected") for n in range(200)], GREEN, False),
        ([outcome(n) for n in range(20)], [*GREEN, Clean((), "incomplete")], False),
        ([outcome(n) for n in range(20)], [], False),
        ([], GREEN, False),
    ],
)
def test_a_sweep_is_fine_only_when_all_its_shares_are(outcomes, clean, ok):
    assert Score.of(outcomes, clean, 1.0).ok is ok


def test_what_is_not_run_is_neither_detected_nor_named_and_is_said():
    made = Score.of([outcome(1), outcome(2, "not run")], [Clean((), "fail")], 30)
    assert made.sentence == "score: 1 of 2 detected (1 not run), component 1 (50.0 %), layer kind 1 (50.0 %), phase 1 (50.0 %), 1 of 1 clean runs red, 30 s"


def test_a_share_is_never_rounded_up_to_all():
    assert Score.of([outcome(n, component=n > 0) for n in range(3000)], GREEN, 1).percent("component") == "99.9 %"


def test_the_kept_score_says_whether_it_is_of_this_code(tmp_path):
    path, made = tmp_path / "cache" / "faults-score.json", Score.of([outcome(n, component=n > 2) for n in range(108)], GREEN, 9)
    assert score.standing(path, "a") == NO_SWEEP
    assert score.keep(made, "2025-01-31", "a", path)
    assert score.standing(path, "a") == "108 of 108 detected, component 97.2 % (sweep of 2025-01-31, same code)"
    assert score.standing(path, "b") == "108 of 108 detected, component 97.2 % (sweep of 2025-01-31, measured on other code)"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    score.keep(Score.of([outcome(1)], [Clean((), "fail")], 9), "2025-01-31", "a", path)
    assert "1 of 1 clean runs red" in score.standing(path, "a")
    for broken in ("", "[]", "{}", '{"schema": 1, "date": "x", "code": "a", "score": {"faults": 1}}', '{"schema": 99}'):
        path.write_text(broken)
        assert score.standing(path, "a") == NO_SWEEP
    assert not score.keep(made, "2025-01-31", "a", path / "below" / "a file")


def test_the_code_hash_sees_production_kernels_the_audit_and_the_faults(tmp_path):
    names = ("production/ops/a.py", "kernels/a.cu", "parity/gates.py", "parity/faults/sink.toml", "reference/ops.py", "probes/core/records.py")
    seen = {score.code_hash(tmp_path)}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        seen.add(score.code_hash(tmp_path))
    assert len(seen) == 1 + len(names)
    assert score.code_hash() == score.code_hash()


# ---- the command line, on stand-ins of the audit ----

STAND_IN = """
import pathlib, shutil, sys, time
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--report") + 1])
name = words[words.index("--inject") + 1] if "--inject" in words else "clean"
source = pathlib.Path({source!r})
(source / "seen").open("a").write(" ".join(words) + chr(10))
if (source / (name + ".sleep")).exists():
    time.sleep(60)
if (source / (name + ".jsonl")).exists():
    shutil.copy(source / (name + ".jsonl"), folder / "run.jsonl")
    sys.exit(0 if name == "clean" else 1)
print("ERROR: bad input")
sys.exit(4)
"""
EDIT = "[[fault.edit]]\nfile = 'production/model.py'\nfind = 'DEFAULT_MAX_CONTEXT = 8192'\nreplace = 'DEFAULT_MAX_CONTEXT = 4096'\n"


class Stage:
    """A list of faults, and the runs that stand-ins of the audit leave behind."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.report, self.list = folder, folder / "out", folder / "list.toml"
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.text = 'component = "SWA ring"\n'
        self.leave("clean", run_of(PASSED, first=None, inject=None))
        program = folder / "stand_in.py"
        program.write_text(STAND_IN.format(source=str(self.runs)))
        monkeypatch.setenv("DSV4_PARITY_CACHE", str(folder / "cache"))
        monkeypatch.setattr(sweep.Run, "command", _command_through(program))

    def leave(self, name: str, records: list[Record]) -> None:
        (self.runs / f"{name}.jsonl").write_text("".join(to_line(r) + "\n" for r in records))

    def fault(self, name: str, records: list[Record] | None, extra: str = "") -> None:
        self.text += f"[[fault]]\nid = '{name}'\ntitle = 't'\nexpect = {json.dumps(EXPECT).replace(': ', ' = ')}\n{extra}{EDIT}"
        self.list.write_text(self.text)
        if records is not None:
            self.leave(name, [header(inject=name, model={"kinds": KINDS}), *records[1:]])

    def __call__(self, *arguments: str) -> int:
        return sweep.main(["--faults", str(self.list), "--report", str(self.report), *arguments])

    def seen(self) -> list[str]:
        return (self.runs / "seen").read_text().splitlines()


def _command_through(program: Path):
    whole = sweep.Run.command

    def command(self: sweep.Run) -> list[str]:
        return [sys.executable, str(program), *whole(self)[3:]]

    return command


@pytest.fixture
def stage(tmp_path, monkeypatch):
    return Stage(tmp_path, monkeypatch)


def test_a_sweep_runs_clean_first_then_every_fault_and_ends_with_its_score(stage, capsys):
    stage.fault("F1", run_of(GATE))
    stage.fault("F2", run_of(GATE), "prompts = ['a.txt', 'b.txt']\n")
    assert stage() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("score: 2 of 2 detected, component 2 (100.0 %), layer kind 2 (100.0 %), phase 2 (100.0 %), 0 of 2 clean runs red, ")
    assert lines[-2].startswith("report: ")
    assert sum("right" in line for line in lines) == 3, "the table's head and two rows"
    clean, faults = stage.seen()[:2], stage.seen()[2:]
    assert all("--profile faults" in line and "--inject" not in line and "--faults" not in line for line in clean)
    assert sorted("--prompt a.txt --prompt b.txt" in line for line in clean) == [False, True]
    assert {("F2" in line, "--prompt a.txt --prompt b.txt" in line) for line in faults} == {(False, False), (True, True)}
    assert all(f"--faults {stage.list}" in line for line in faults)
    made = json.loads((stage.report / "sweep.json").read_text())
    assert made["score"]["sentence"] == lines[-1]
    assert {o["id"]: o["state"] for o in made["outcomes"]} == {"F1": "detected", "F2": "detected"}
    assert (stage.report / "sweep.csv").read_text().count("\n") == 3
    assert (stage.report / "F1" / "pytest.log").exists()
    assert not (stage.report / "F1" / "tmp").exists()
    assert "F2" in (stage.report / "sweep.html").read_text()
    assert not score.score_file().exists(), "only a sweep over the project's own list is kept"


@pytest.mark.parametrize(
    ("records", "said"),
    [(run_of(PASSED, first=None), "undetected"), (run_of(CRASH), "crash only"), (None, "pytest ended with 4: ERROR: bad input"), (run_of(GATE, whole=False), "cut off")],
    ids=["undetected", "crash", "refused", "cut off"],
)
def test_a_fault_that_is_not_detected_ends_in_1(stage, capsys, records, said):
    stage.fault("F1", records)
    assert stage("--jobs", "1") == 1
    out = capsys.readouterr().out
    assert said in out
    assert out.splitlines()[-1].startswith("score: 0 of 1 detected")


def test_a_red_clean_run_ends_in_1(stage, capsys):
    stage.fault("F1", run_of(GATE))
    stage.leave("clean", run_of(GATE, inject=None))
    assert stage() == 1
    assert "1 of 1 clean runs red" in capsys.readouterr().out.splitlines()[-1]


def test_a_run_past_its_time_is_not_run(stage, tmp_path):
    stage.fault("F1", run_of(GATE))
    (stage.runs / "F1.sleep").touch()
    (run,) = sweep.in_turn([sweep.Run(read_faults(stage.list)["F1"], (), tmp_path / "one")], 1, timeout=0.5)
    assert (run.outcome().state, run.outcome().wrong) == ("not run", "stopped after 0 s")
    assert run.code is not None, "the process has ended"


def test_what_still_runs_is_ended_with_the_sweep(stage, tmp_path):
    stage.fault("F1", run_of(GATE))
    stage.fault("F2", run_of(GATE))
    (stage.runs / "F1.sleep").touch()
    faults = read_faults(stage.list)
    runs = [sweep.Run(faults[name], (), tmp_path / name) for name in ("F1", "F2")]
    turns = sweep.in_turn(runs, 2)
    assert next(turns).fault is faults["F2"]
    turns.close()
    assert runs[0].code is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_told_stop_writes_what_was_judged(stage, number):
    """Through a process of its own: signals reach the main thread only."""
    stage.fault("F1", run_of(GATE))
    stage.fault("F2", run_of(GATE))
    (stage.runs / "F2.sleep").touch()
    program = stage.folder / "sweeping.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom parity import sweep\nwhole = sweep.Run.command\n"
        f"sweep.Run.command = lambda self: [sys.executable, {str(stage.folder / 'stand_in.py')!r}, *whole(self)[3:]]\n"
        f"sys.exit(sweep.main(['--faults', {str(stage.list)!r}, '--report', {str(stage.report)!r}]))\n"
    )
    process = subprocess.Popen([sys.executable, str(program)], cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("F1"):
        assert process.poll() is None
    until = time.monotonic() + 20
    while not any("--inject F2" in line for line in stage.seen()) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; what was judged is in" in err
    made = json.loads((stage.report / "sweep.json").read_text())
    assert [o["id"] for o in made["outcomes"]] == ["F1"]
    assert 'data-verdict="incomplete"' in (stage.report / "sweep.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "F9"), "--only F9: no such fault; nearest is 'F1'"),
        (("--component", "sinks"), "--component sinks: expected one of SWA ring"),
        (("--jobs", "0"), "--jobs 0"),
        (("--jobs", "two"), "--jobs two"),
        (("--only", ","), "no fault is left"),
        (("--faults", "nothing.toml"), "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(stage, capsys, arguments, said):
    stage.fault("F1", run_of(GATE))
    assert stage(*arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not stage.report.exists()


def test_a_stale_fault_and_a_folder_that_cannot_be_written_are_bad_input(stage, capsys):
    stage.fault("F1", run_of(GATE))
    stage.list.write_text(stage.text.replace("8192", "8191"))
    assert stage() == 2
    assert "F1 is stale" in capsys.readouterr().err
    stage.list.write_text(stage.text)
    stage.report.write_text("a file")
    assert stage() == 2
    assert "--report" in capsys.readouterr().err


def test_an_unknown_option_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        sweep.main(["--all"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_projects_own_list_is_what_a_sweep_takes():
    assert [fault.id for fault in sweep.chosen(FAULTS, "B060, B060,B001", None)] == ["B060", "B001"]
    rings = sweep.chosen(FAULTS, None, "SWA ring")
    assert {fault.component for fault in rings} == {"SWA ring"}
    assert len(rings) >= 4


# ---- the page ----


def page_of(*outcomes: Outcome, faults: int | None = None) -> str:
    made = Score.of(outcomes, GREEN, 60)
    return sweep_html(
        {
            "started": "2025-01-31", "faults": len(outcomes) if faults is None else faults, "score": {**dataclasses.asdict(made), "ok": made.ok, "sentence": made.sentence},
            "clean": [{**dataclasses.asdict(one), "green": one.green} for one in GREEN], "outcomes": [dataclasses.asdict(one) for one in outcomes],
        }
    )  # fmt: skip


def test_the_page_shows_every_fault_and_escapes_its_text():
    html = page_of(*[outcome(n, phase=n > 0) for n in range(20)])
    assert html.count("data-fault=") == 20
    assert 'data-verdict="pass"' in html
    assert "<img" not in html
    assert "19 (95.0 %)" in html
    assert html.index('data-fault="B000"') < html.index('data-fault="B001"')
    assert 'data-verdict="fail"' in page_of(outcome(1, "undetected"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"outcomes": 3}', '{"outcomes": [], "score": {}, "faults": 0}'])
def test_a_file_that_is_no_sweep_is_one_line_and_exit_2(content, tmp_path, capsys):
    (tmp_path / "sweep.json").write_text(content)
    assert draw([str(tmp_path / "sweep.json")]) == 2
    assert draw([str(tmp_path / "nothing.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_report_shows_the_score_of_the_last_sweep_and_older_runs_are_read():
    said = "108 of 108 detected, component 97.2 % (sweep of 2025-01-31, same code)"
    records = run_of(PASSED, first=None, inject=None)
    older = json.loads(to_line(records[0]))
    assert older.pop("fault_score") == ""
    assert from_line(json.dumps(older)) == records[0]
    assert '<dt>fault score</dt><dd class="gone">not recorded</dd>' in report_html(records)
    html = report_html([header(fault_score=said), *records[1:]])
    assert f"<dt>fault score</dt><dd>{said}</dd>" in html
    assert html.index(said) < html.index('id="map"'), "on the first screen"
