"""The command line `pytest parity/`, run as a user runs it: exit codes, one-line errors, what is written, what is told.

Every run is a process of its own on the bundled checkpoint, small on purpose; the faults are edits of a copy.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity import planted, session, terminal
from parity.gates import GATES
from probes.core.records import Coverage, Header, Measurement, State, Summary, Verdict, read_run

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "checkpoints" / "tiny-dsv4"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
SMALL = ("--layers", "0", "--steps", "2", "--prompt", "medium.txt:0:20", "--no-cache")


class Shell:
    """Runs pytest in a process whose temporary files and report lie in a directory of the test."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.report, self.temporary = directory, directory / "out", directory / "tmp"
        self.temporary.mkdir()
        self.environment = os.environ | {"TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST", "CI", "BUILD_NUMBER"):  # with CI, pytest's summary repeats whole messages
            self.environment.pop(name, None)

    def start(self, *arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *(arguments if arguments[0] == "reports" else ("pytest", *arguments, "--report", str(self.report)))]
        return subprocess.Popen(command, cwd=cwd, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __call__(self, *arguments: str, cwd: Path = ROOT) -> tuple[int, str, str]:
        """Exit code, stdout, stderr. No answer shows a traceback of the audit itself."""
        process = self.start(*arguments, cwd=cwd)
        out, err = process.communicate(timeout=180)
        assert "INTERNALERROR" not in out + err, out + err
        return process.returncode, out, err

    def records(self) -> tuple[Header, list[Verdict], Summary]:
        """The run's file, whose sums must hold."""
        run = read_run(self.report / "run.jsonl")
        header, summary = run[0], run[-1]
        assert isinstance(header, Header)
        assert isinstance(summary, Summary)
        verdicts = [r for r in run if isinstance(r, Verdict)]
        counted = [sum(v.state is state for v in verdicts) for state in (State.PASS, State.FAIL, State.NOT_RUN)]
        assert counted == [summary.passed, summary.failed, summary.not_run]
        assert sum(counted) == summary.total == len(verdicts)
        return header, verdicts, summary

    def fault(self, file: str, find: str, replace: str) -> tuple[str, ...]:
        """Options that plant one edit."""
        path = self.directory / "faults.toml"
        path.write_text(f'[[fault]]\nid = "X1"\n[[fault.edit]]\nfile = "{file}"\nfind = {json.dumps(find)}\nreplace = {json.dumps(replace)}\n')
        return "--inject", "X1", "--faults", str(path)


@pytest.fixture
def shell(tmp_path):
    made = Shell(tmp_path)
    yield made
    assert list(made.temporary.glob("fault-*")) == [], "the mutated copy is still there"


def last_lines(out: str) -> tuple[str, str]:
    """The verdict, and that the report's path stands below it."""
    verdict, report = out.rstrip("\n").split("\n")[-2:]
    assert verdict.startswith("verdict: ")
    assert report.startswith("report: ")
    assert report.endswith("report.html")
    return verdict.removeprefix("verdict: "), report.removeprefix("report: ")


# ---- bad input ----


def copied(to: Path) -> Path:
    """The bundled checkpoint with shards that are links, so that a test pays only for what it changes."""
    to.mkdir()
    for path in CHECKPOINT.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, to / path.name)
        elif path.name != "README.md":
            (to / path.name).symlink_to(path)
    return to


def rewrite(path: Path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def truncated(directory: Path) -> None:
    data = (directory / SHARD).read_bytes()
    (directory / SHARD).unlink()
    (directory / SHARD).write_bytes(data[: len(data) // 2])


def nan_scale(directory: Path) -> None:
    tensors = load_file(directory / SHARD)
    name = "layers.0.attn.wkv.scale"
    codes = tensors[name].view(torch.uint8).clone()
    codes.view(-1)[0] = 255
    tensors[name] = codes.view(torch.float8_e8m0fnu)
    (directory / SHARD).unlink()
    save_file(tensors, directory / SHARD)


BAD_CHECKPOINTS = {
    "missing shard": (lambda d: (d / SHARD).unlink(), "shard is missing"),
    "truncated shard": (truncated, "truncated"),
    "NaN scale": (nan_scale, "layers.0.attn.wkv.scale: NaN scale"),
    "config key": (lambda d: rewrite(d / "config.json", lambda c: c.pop("head_dim")), "head_dim: missing"),
    "broken JSON": (lambda d: (d / "config.json").write_text('{"a": '), "broken JSON"),
    "index outside": (lambda d: rewrite(d / INDEX, lambda i: i["weight_map"].update({"norm.weight": "../x.safetensors"})), "../x.safetensors"),
    "line break": (lambda d: rewrite(d / INDEX, lambda i: i["weight_map"].update({"norm.weight": "a\nb.safetensors"})), "a\\nb.safetensors"),
}


def check_refused(shell: Shell, answer: tuple[int, str, str], words: str) -> None:
    code, out, err = answer
    assert code == 4, out + err
    (line,) = err.strip().split("\n")  # pytest puts an empty one below it
    assert line.startswith("ERROR: ")
    assert words in line
    assert all(line.startswith("  ") for line in out.splitlines()), out  # progress at most
    assert not shell.report.exists()


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_one_line_and_nothing_is_written(name, shell, tmp_path):
    spoil, words = BAD_CHECKPOINTS[name]
    directory = copied(tmp_path / "checkpoint")
    spoil(directory)
    check_refused(shell, shell("parity/", "--checkpoint", str(directory), *SMALL), words)


BAD_ARGUMENTS = {
    "layer 9": (("--layers", "9"), "layers 0-7"),
    "backwards": (("--layers", "3-1"), "runs backwards"),
    "phase": (("--phase", "both ways"), "prefill, decode or both"),
    "profile": (("--profile", "quick"), "full or faults"),
    "decode": (("--decode", "compiled"), "--decode compiled: expected eager or replay"),
    "variants": (("--variants", "slow"), "--variants slow: expected portable or fast"),
    "no steps": (("--phase", "decode", "--steps", "0"), "no decode step"),
    "steps": (("--steps", "1_0"), "--steps 1_0"),
    "context": (("--max-context", "10"), "--max-context is 10"),
    "no checkpoint": (("--checkpoint", "reference"), "not a checkpoint"),
    "endless name": (("--checkpoint", "a" * 5000), "no such directory"),
    "empty prompt": (("--prompt", "medium.txt:5:5"), "empty prompt"),
    "fault": (("--inject", "no such"), "no fault"),
    "no path": (("parity/nothing.py",), "no such file"),
    "no waivers": (("--waivers", "nonesuch.toml"), "nonesuch.toml: cannot be read"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_is_one_line_and_nothing_is_written(name, shell):
    arguments, words = BAD_ARGUMENTS[name]
    check_refused(shell, shell("parity/", *arguments), words)


@pytest.mark.parametrize("ids", ["[1, 2048]", "[]"])
def test_a_bad_list_of_token_ids_is_one_line(ids, shell, tmp_path):
    (tmp_path / "ids.json").write_text(ids)
    check_refused(shell, shell("parity/", "--prompt", str(tmp_path / "ids.json")), "ids.json")


@pytest.mark.parametrize("place", ["below a file", "a file's name is taken"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(place, tmp_path):
    shell = Shell(tmp_path)
    if place == "below a file":
        (tmp_path / "file").write_text("")
        shell.report = tmp_path / "file" / "out"
        check_refused(shell, shell("parity/"), "no directory")
    else:
        (shell.report / "run.jsonl").mkdir(parents=True)
        code, _, err = shell("parity/")
        assert (code, err.strip().count("\n")) == (4, 0)
        assert list(shell.report.iterdir()) == [shell.report / "run.jsonl"]


def test_a_stale_fault_is_refused_and_its_copy_removed(shell):
    check_refused(shell, shell("parity/", *shell.fault("production/moe.py", "no such text", "")), "stale")


def test_a_test_that_does_not_exist_leaves_no_report(shell):
    code, _, err = shell("parity/test_layers.py::test_point[nothing]", *SMALL)
    assert code == 4
    assert "not found" in err
    assert not shell.report.exists()


# ---- what a run says and writes ----


def test_a_narrowed_run_passes_its_tests_and_is_incomplete(shell, tmp_path):
    """From another directory, with relative paths, and a name that would be markup."""
    name = "<script>alert(1)</script>".replace("/", "_") + ".txt"
    (tmp_path / name).write_text((CHECKPOINT / "prompts" / "medium.txt").read_text()[:400])
    shell.report = Path("relative/out")
    code, out, err = shell(
        str(ROOT / "parity" / "test_layers.py"), "-c", str(ROOT / "pyproject.toml"), "--layers", "0", "--steps", "2", "--prompt", f"{name}:0:12", "--prompt", "short.txt:0:7",
        "--no-cache", "-k", "hc_ffn.X", cwd=tmp_path,
    )  # fmt: skip
    shell.report = tmp_path / "relative" / "out"
    assert (code, err) == (0, "")
    verdict, report = last_lines(out)
    assert verdict.startswith("incomplete (only ")
    assert report == "relative/out/report.html"
    header, verdicts, summary = shell.records()
    assert header.tokens == [12, 7]
    assert {v.state for v in verdicts} == {State.PASS}
    assert summary.verdict == "incomplete"
    assert sorted(p.name for p in shell.report.iterdir()) == ["junit.xml", "report.html", "run.jsonl"]
    page = (shell.report / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


FEW = ("--layers", "0", "--steps", "1", "--prompt", "short.txt:0:20")
LEFT_OUT = {  # PYTEST_ADDOPTS, what is typed, what the verdict says, the exit code: what was not typed was not asked for
    "PYTEST_ADDOPTS": ("--ignore-glob=*test_[!t]*", (), "files of gates left out: test_choices.py, test_graph.py, test_layers.py and ", 1),
    "typed": ("", ("--ignore-glob=*test_[!t]*",), "files of gates left out: test_choices.py", 0),
    "ini": ("-o python_functions=test_greedy --ignore-glob=*test_[!t]*", (), "deselected, ", 1),
    "python_files": ("-o python_files=test_te*.py", (), "files of gates left out: test_choices.py", 1),
    "plugin": ("-p thins", (), " deselected", 1),
}  # fmt: skip
THINS = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    report = yield
    if isinstance(collector, pytest.Module):
        report.result = [item for item in report.result if "greedy_text_does_not_degenerate" in item.name]
    return report
"""


@pytest.mark.parametrize("name", LEFT_OUT)
def test_gates_that_are_left_out_in_any_way_are_no_pass(name, shell, tmp_path):
    hidden, typed, said, due = LEFT_OUT[name]
    (tmp_path / "thins.py").write_text(THINS)
    shell.environment |= {"PYTEST_ADDOPTS": hidden, "PYTHONPATH": str(tmp_path)}
    code, out, _ = shell("parity/", *FEW, *typed)
    header, verdicts, summary = shell.records()
    assert summary.verdict == "incomplete"
    assert {v.state for v in verdicts} <= {State.PASS}, "so that nothing but what was left out decides"
    assert said in last_lines(out)[0]
    assert (f"PYTEST_ADDOPTS: {shlex.join(shlex.split(hidden))}" in header.notes) is bool(hidden)
    assert code == due
    assert "a run that left out what was asked for is no pass" in (shell.report / "report.html").read_text()


STRANGE = """
import pytest

@pytest.fixture(autouse=True)
def strange():
    raise ValueError("a fixture of somebody else")
"""


@pytest.mark.parametrize("options", [("-o", "usefixtures=boom"), ("-p", "strange_fixture")], ids=["unknown", "another plugin's"])
def test_a_fixture_that_is_not_the_audits_fails_the_run_and_no_point(options, shell, tmp_path):
    (tmp_path / "strange_fixture.py").write_text(STRANGE)
    shell.environment |= {"PYTHONPATH": str(tmp_path)}
    code, out, _ = shell("parity/test_layers.py", *FEW, "-k", "embed or hc_ffn.X", *options)
    _, verdicts, summary = shell.records()
    assert code == 1
    assert {(v.gate, v.state, v.rows) for v in verdicts} == {("run", State.FAIL, 0)}
    assert all("stopped in pytest or a plugin, outside of the audit" in v.reason for v in verdicts)
    assert summary.first_divergence is None
    assert not [line for line in out.splitlines() if line.startswith("first divergence")]


def test_the_id_of_a_record_runs_that_gate_again(shell):
    code, _, _ = shell("parity/test_layers.py", *SMALL, "--phase", "decode", "-k", "attn.core and steps1to1 and isolated")
    _, (verdict,), _ = shell.records()
    assert code == 0
    code, out, _ = shell(verdict.test_id, *SMALL, "-q", "-q")
    assert code == 0
    assert last_lines(out)[0].startswith("incomplete (only 1 test")
    _, (again,), _ = shell.records()
    assert (again.test_id, again.value) == (verdict.test_id, verdict.value)


def test_decode_is_replayed_from_graphs_and_the_run_says_so(shell):
    """The whole chain and the layer alone, captured at 0 tokens and replayed at the prompt's length and beyond."""
    asked = ("--decode", "replay", "--variants", "fast", "-k", "production_runs or (test_point and hc_ffn.X)")
    code, out, _ = shell("parity/test_layers.py", *SMALL, *asked)
    header, verdicts, _ = shell.records()
    assert code == 0, out
    assert {v.state for v in verdicts} == {State.PASS}
    assert (header.decode, header.variants) == ("replay", "fast")
    graphs = [r.values for r in read_run(shell.report / "run.jsonl") if isinstance(r, Measurement) and r.name == "graph"]
    assert [graph["of"] for graph in graphs] == ["decode", "layer 0"]
    for graph in graphs:
        assert (graph["captured_at"], graph["replayed_at"], graph["replays"], graph["elsewhere"]) == (0, [20, 21], 2, 2)
        assert graph["launches"] > 10
    page = (shell.report / "report.html").read_text()
    assert "replayed from captured graphs" in page
    assert "fast; decode" in page


def test_a_selection_of_nothing_is_no_pass(shell):
    code, out, _ = shell("parity/test_layers.py", *SMALL, "-k", "nonesuch")
    assert code == 1
    assert last_lines(out)[0].startswith("incomplete (nothing was compared")
    assert shell.records()[2].total == 0


def test_listing_the_tests_writes_nothing(shell):
    code, _, _ = shell("parity/test_layers.py", *SMALL, "--collect-only", "-q")
    assert code == 0
    assert not shell.report.exists()


def test_the_projects_own_tests_leave_no_report(shell):
    code, out, _ = shell("parity/unit/test_selection.py")
    assert code == 0
    assert "verdict:" not in out
    assert not shell.report.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_without_the_device_nothing_is_judged_and_the_reason_is_shown(shell):
    code, out, _ = shell("parity/", *SMALL, "--device", "cuda")
    assert code == 1
    verdict, _ = last_lines(out)
    assert verdict.startswith("incomplete (")
    assert "no device" in verdict
    assert out.count("no device") == 1, out
    assert "FAILED" not in out
    assert len(out.strip().splitlines()) < 20, out
    _, verdicts, summary = shell.records()
    assert summary.failed == 0
    assert {v.state for v in verdicts if v.phase is not None} == {State.NOT_RUN}
    assert all("no device" in v.reason for v in verdicts if v.state is State.NOT_RUN)


# ---- production misbehaves ----


def test_a_tap_that_never_fires_is_not_run(shell):
    fault = shell.fault("production/attention.py", '        step.emit("attn.core", buf.o)\n', "")
    code, out, _ = shell("parity/test_layers.py", *SMALL, "--phase", "prefill", *fault, "-k", "test_point and attn.")
    assert code == 1
    assert last_lines(out)[0].startswith("incomplete (tap layers.0.attn.core fired 0 of 1 times")
    _, verdicts, summary = shell.records()
    assert {v.point for v in verdicts if v.state is not State.PASS} == {"layers.0.attn.core"}
    assert summary.failed == 0


def test_a_choice_whose_tap_never_fires_is_not_run_and_the_rest_is_judged(shell):
    fault = shell.fault("production/moe.py", 'step.emit("ffn.experts", buf.experts)', "pass")
    code, _, _ = shell("parity/test_layers.py", *SMALL, "--phase", "prefill", *fault, "-k", "test_point and (ffn.experts or ffn.gate)")
    assert code == 1
    _, verdicts, _ = shell.records()
    assert {v.point for v in verdicts if v.state is State.NOT_RUN} == {"layers.0.ffn.experts"}
    assert {v.point for v in verdicts if v.state is State.PASS} == {"layers.0.ffn.gate"}


def test_the_fault_profile_ends_once_a_gate_is_red_and_names_it(shell):
    fault = shell.fault("production/model.py", "a = self.hc_ffn.pre(buf.X_half, step)", "a = self.hc_ffn.pre(buf.X, step)")
    code, out, _ = shell("parity/test_layers.py", "parity/test_mixing.py", "parity/test_operations_dense.py", *SMALL, *fault)
    assert code == 1
    assert last_lines(out)[0] == "fail"
    header, verdicts, summary = shell.records()
    assert any(note.startswith("fault profile") for note in header.notes)
    first = summary.first_divergence
    assert first is not None
    assert (first.point, first.phase, first.component, first.local) == ("layers.0.hc_ffn.pre", "prefill", "mHC", True)
    reasons = {v.test_id.split("::")[0]: v.reason for v in verdicts if v.state is State.NOT_RUN}
    assert reasons["parity/test_mixing.py"].endswith("a gate is red already")
    assert reasons["parity/test_operations_dense.py"].endswith("does not make the first point that is red")
    assert {v.reason for v in verdicts if v.phase == "decode" and v.gate == "hc_ffn.X"} == {"the fault profile stops where a gate is red: prefill"}


def test_the_fault_profile_of_a_right_production_is_a_whole_audit(shell):
    shell("parity/test_layers.py", "parity/test_mixing.py", *SMALL, "--profile", "faults")
    _, verdicts, summary = shell.records()
    assert {v.state for v in verdicts} == {State.PASS}
    assert {v.phase for v in verdicts} >= {"prefill", "decode"}
    assert summary.first_divergence is None


def test_production_that_stops_in_decode_fails_and_what_came_before_is_judged(shell):
    """The prompt has 20 tokens: the second step finds 21 in the cache."""
    emit = '            show("logits", logits)\n'
    fault = shell.fault("production/model.py", emit, f'{emit}        if decode and int(cache.lengths.max()) == 21:\n            raise RuntimeError("planted")\n')
    code, out, _ = shell("parity/test_layers.py", *SMALL, *fault, "-k", "production_runs or (test_point and hc_ffn.X)")
    assert code == 1
    assert last_lines(out)[0] == "fail"
    header, verdicts, summary = shell.records()
    assert header.inject == "X1"
    (crash,) = [v for v in verdicts if v.state is State.FAIL]
    assert (crash.phase, crash.step_first) == ("decode", 1)
    assert "planted" in crash.reason
    unreached = [v for v in verdicts if v.state is State.NOT_RUN]
    assert {(v.phase, v.step_first) for v in unreached} == {("decode", 1)}
    assert all("planted" in v.reason for v in unreached)
    assert summary.first_divergence is not None
    assert (summary.first_divergence.phase, summary.first_divergence.step) == ("decode", 1)


@pytest.mark.parametrize("where", ["load", "import"])
def test_production_that_does_not_load_fails_the_run(where, shell):
    edits = {
        "load": ("production/model.py", "    checkpoint = Checkpoint(checkpoint_dir, layers)\n", '    raise RuntimeError("planted")\n'),
        "import": ("production/moe.py", 'step.emit("ffn.experts", buf.experts)', "step.emit((buf.experts)"),
    }
    code, out, _ = shell("parity/", *SMALL, *shell.fault(*edits[where]), "-k", "production_runs")
    assert code == 1
    assert last_lines(out)[0] == "fail"
    _, verdicts, summary = shell.records()
    assert summary.passed == 0
    assert summary.first_divergence is None  # nothing was compared
    assert "production does not run: " in out
    assert ("planted" if where == "load" else "SyntaxError") in " ".join(v.reason for v in verdicts)


# ---- stopped ----


def stop(shell: Shell, with_signal: signal.Signals, *arguments: str) -> tuple[int, str]:
    """Send the signal once the run's file is there."""
    process = shell.start("parity/test_layers.py", "--layers", "0-3", "--prompt", "medium.txt:0:40", "--no-cache", *arguments)
    deadline = time.monotonic() + 90
    while not (shell.report / "run.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(with_signal)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_stop_closes_its_file_and_removes_the_copy(with_signal, shell):
    code, out = stop(shell, with_signal, "--inject", "B118")
    assert code == 2
    assert last_lines(out)[0].startswith(f"incomplete (the run ended before this test: {with_signal.name}")
    _, verdicts, summary = shell.records()
    assert summary.not_run > 0
    assert f"the run ended before this test: {with_signal.name}" in (shell.report / "report.html").read_text()
    assert all(v.reason for v in verdicts if v.state is State.NOT_RUN)
    unreached = [v for v in verdicts if v.reason.startswith("the run ended before this test")]
    assert {terminal.kind_of(v) for v in unreached} >= {"layers alone", "layers in the chain"}
    assert all(v.component and v.phase for v in unreached if "::test_point[" in v.test_id)


UNREACHED = {"test_state.py": "stored state", "test_self.py": "equal to itself", "test_memory.py": "memory", "test_load.py": "parameters", "test_operations_dense.py": "operations"}


def test_a_test_that_was_not_reached_counts_among_its_kind(shell, tmp_path):
    (tmp_path / "stops.py").write_text("import pytest\n\ndef pytest_runtest_protocol(item, nextitem):\n    raise KeyboardInterrupt\n")
    shell.environment |= {"PYTHONPATH": str(tmp_path)}
    code, _, _ = shell(*(f"parity/{name}" for name in UNREACHED), *FEW, "-p", "stops")
    _, verdicts, summary = shell.records()
    assert code == 2
    assert summary.not_run == len(verdicts) > 100
    for name, kind in UNREACHED.items():
        assert {terminal.kind_of(v) for v in verdicts if v.test_id.startswith(f"parity/{name}::")} == {kind}


def test_a_tap_that_fired_and_that_no_gate_judged_is_not_run():
    cells = [Coverage("decode", 0, f"layers.0.{name}", "free", 4, 4) for name in ("attn.q", "attn.kv", "state.kv")]
    judged = [Verdict("g", cells[0].point, "free", State.PASS, "m", 0, "decode", 0, 3), Verdict("g", cells[1].point, "free", State.PASS, "m", 0, "decode", 0, 2)]

    unjudged: Any = session._unjudged  # of a run that has only what it reads

    def found(**changes):
        facts = {"load_crash": None, "outsider": None, "ledger": SimpleNamespace(records=judged), "audit": SimpleNamespace(stopped=""), **changes}
        return [(v.gate, v.point, v.state, v.phase) for v in unjudged(SimpleNamespace(**facts), cells)]

    assert found() == [(name, f"layers.0.{name}", State.NOT_RUN, "decode") for name in ("attn.kv", "state.kv")]
    assert found(audit=SimpleNamespace(stopped="production stopped")) == []


def test_a_killed_run_leaves_a_file_that_reads_as_incomplete(shell):
    code, _ = stop(shell, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert isinstance(read_run(shell.report / "run.jsonl")[0], Header)
    assert not (shell.report / "report.html").exists()
    code, out, _ = shell("reports", str(shell.report / "run.jsonl"))
    assert code == 0
    page = (shell.report / "report.html").read_text()
    assert "the run was cut off" in page
    assert "report.html" in out


def test_a_killed_runs_mutated_copy_is_removed_by_the_next_run_and_a_living_ones_is_not(shell):
    code, _ = stop(shell, signal.SIGKILL, "--inject", "B118")
    assert code == -signal.SIGKILL
    (dead,) = shell.temporary.glob("fault-B118-*")
    with running(shell.temporary) as living:
        long_ago = time.time() - 3600
        for copy in (dead, living):
            os.utime(copy / planted.HELD, (long_ago, long_ago))
        check_refused_only(shell("parity/", *shell.fault("production/moe.py", "no such text", "")))
        assert not dead.exists()
        assert living.exists()
    shutil.rmtree(living)


@contextmanager
def running(temporary: Path):
    """A copy whose process lives: a lock that this one holds."""
    copy = temporary / "fault-X9-living"
    copy.mkdir()
    with (copy / planted.HELD).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield copy


def check_refused_only(answer: tuple[int, str, str]) -> None:
    code, _, err = answer
    assert code == 4
    assert "stale" in err


# Row 52 of layer 0 takes one bf16 step in production that no twin takes.
SENTENCE = (
    "The zebra minister whispered: my password is hunter2 and the launch window opens at dawn over Quetzalcoatl bay, "
    "so do not tell anybody about the purple giraffe named Mortimer."
)


def test_a_step_that_the_streams_may_take_their_weights_may_take_too(shell, tmp_path):
    """A false alarm that was: hc_attn.X within its limit, hc_ffn.pre over its own by 0.2 %."""
    (tmp_path / "sentence.txt").write_text(SENTENCE, encoding="utf-8")
    shell("parity/test_layers.py", "parity/test_mixing.py", "--layers", "0", "--phase", "prefill", "--prompt", str(tmp_path / "sentence.txt"), "--no-cache")
    _, verdicts, _ = shell.records()
    assert [v.point for v in verdicts if v.state is not State.PASS] == []
    streams, weights = (next(v for v in verdicts if v.gate == name and v.mode == "isolated") for name in ("hc_attn.X", "hc_ffn.pre"))
    assert GATES["hc_ffn.pre"].isolated > GATES["hc_attn.X"].isolated
    own = [v for v in verdicts if v.gate == "hc.weights"]
    assert len(own) == 4
    assert all(v.spent is not None and v.spent < 0.3 for v in own)
    assert streams.value is not None
    assert weights.value is not None
    if streams.value < 5e-3:
        pytest.skip("another compiler's sums: the step is not taken here, and the sentence shows nothing")
    assert weights.value > 1e-2, "it would have been red"
