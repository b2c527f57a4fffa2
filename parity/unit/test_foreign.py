"""Factories that raise, call sys.exit or skip, at load, in prefill and in decode: a recorded crash of production, exit 1, never a pytest error."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from docs.examples import small_engine
from parity.audit import Audit
from parity.foreign import LEFT_OUT, raised_at, told
from parity.unit.test_generic import Llama, plain, pytest_parity
from parity.unit.test_session import ROOT, Shell, last_lines
from probes.core.records import State

HERE = "parity.unit.test_foreign"
SMALL = ("--layers", "0", "--steps", "2", "--prompt", "medium.txt:0:20")
SECRET = "PIN of Erika: 4711, ids [49, 640, 12]"


def leave(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "skip":
        pytest.skip("not on this machine")
    if how == "end":
        pytest.exit("enough", returncode=0)
    raise RuntimeError(SECRET)


def engine(checkpoint_dir: Path, layers: range, how: str, when: str) -> small_engine.Adapter:
    if when == "load":
        leave(how)
    model: small_engine.Adapter = small_engine.open_engine(checkpoint_dir, layers)
    setattr(model, when, lambda *_: leave(how))
    return model


def factory(how: str, when: str):
    return lambda checkpoint_dir, layers: engine(checkpoint_dir, layers, how, when)


load_exit, load_skip = factory("exit", "load"), factory("skip", "load")
prefill_end, decode_exit, decode_skip, decode_raise = factory("end", "prefill"), factory("exit", "decode"), factory("skip", "decode"), factory("raise", "decode")
new_state_exit, measured_exit = factory("exit", "new_state"), factory("exit", "measured")


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("load_exit", "--production: SystemExit: 3"), ("load_skip", "--production: Skipped: not on this machine"), ("prefill_end", "stopped in prefill, free: Exit: enough"),
        ("decode_exit", "stopped in decode step 0, free: SystemExit: 3"), ("decode_skip", "stopped in decode step 0, free: Skipped: not on this machine"),
        ("new_state_exit", "stopped in prefill, new_state: SystemExit: 3"), ("measured_exit", "stopped in decode, measured: SystemExit: 3"),
    ],
)  # fmt: skip
def test_whatever_ends_production_is_its_crash(shell, name, said):
    code, out, err = shell("parity/test_layers.py", "--production", f"{HERE}:{name}", *SMALL, "-q")
    assert code == 1, out + err
    assert last_lines(out)[0].startswith("fail")
    _, verdicts, summary = shell.records()
    crashes = [v for v in verdicts if v.gate == "run" and v.state is State.FAIL]
    assert said in crashes[0].reason
    assert "raised at test_foreign.py:" in crashes[0].reason
    assert said in out  # -q tells it
    if summary.first_divergence is not None:
        assert summary.first_divergence.component == ""
        assert "because: stopped in" in out


@pytest.mark.parametrize("how", ["exit", "skip", "raise"])
def test_the_other_door_tells_it_the_same_way(tmp_path, how):
    done, records = pytest_parity(tmp_path, "plain", "--production", f"{HERE}:llama_{how}", "-q")
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert done.returncode == 1, done.stdout + done.stderr
    assert records[-1]["verdict"] == "fail"
    said = {"exit": "SystemExit: 3", "skip": "Skipped: not on this machine", "raise": f"RuntimeError: {SECRET}"}[how]
    assert f"stopped in load, --production {HERE}:llama_{how}: {said} (raised at test_foreign.py:" in json.dumps(records)


def test_a_reference_that_stops_is_named_and_nothing_passes(tmp_path):
    done, _ = pytest_parity(tmp_path, "plain", "--reference", f"{HERE}:llama_exit")
    assert done.returncode == 4
    assert f"--reference {HERE}:llama_exit: its factory raised SystemExit: 3 (test_foreign.py:" in done.stderr
    done, records = pytest_parity(tmp_path, "plain", "--reference", f"{HERE}:late_skip")
    assert done.returncode == 1
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert "the reference stopped in decode step 0, free: Skipped: not on this machine" in json.dumps(records)
    assert not any(r["type"] == "verdict" and r["state"] == "pass" and r["phase"] == "decode" for r in records)


def llama_exit() -> Llama:
    leave("exit")
    return plain()


def llama_skip() -> Llama:
    leave("skip")
    return plain()


def llama_raise() -> Llama:
    leave("raise")
    return plain()


def late_skip() -> Llama:
    model = plain()
    model.decode = lambda *_: leave("skip")  # type: ignore[method-assign,assignment]
    return model


def test_ctrl_c_is_nobodys_crash():
    def interrupt() -> None:
        raise KeyboardInterrupt

    stand_in = SimpleNamespace(crash=None, redact=False)
    with pytest.raises(KeyboardInterrupt):
        Audit._guard(stand_in, "decode", 0, "free", interrupt)  # type: ignore[arg-type]


def test_what_is_told_of_an_exception():
    with pytest.raises(RuntimeError) as caught:
        leave("raise")
    assert told(caught.value) == f"RuntimeError: {SECRET}"
    assert told(caught.value, redact=True) == f"RuntimeError: {LEFT_OUT}"
    assert raised_at(caught.value).endswith(" in leave")
    assert told(SystemExit()) == "SystemExit"
    assert raised_at(ValueError("x")) == ""


# ---- --redact ----


def talks(checkpoint_dir: Path, layers: range) -> small_engine.Adapter:
    """It prints, warns and raises the prompt, in decode."""
    model: small_engine.Adapter = small_engine.open_engine(checkpoint_dir, layers)

    def decode(tokens: object, state: object) -> None:
        print(SECRET)
        print(SECRET, file=sys.stderr)
        warnings.warn(SECRET, stacklevel=1)
        try:
            leave("raise")
        except RuntimeError as error:
            raise Oops(SECRET) from error

    setattr(model, "decode", decode)  # noqa: B010
    return model


class Oops(Exception):  # noqa: N818
    pass


load_raise = factory("raise", "load")


@pytest.mark.parametrize(("name", "kind"), [("talks", "Oops"), ("load_raise", "RuntimeError")])
@pytest.mark.parametrize("verbosity", ["-v", "-q"])
def test_a_short_message_of_a_foreign_exception_is_left_out_everywhere(shell, name, kind, verbosity):
    code, out, err = shell("parity/test_layers.py", "--production", f"{HERE}:{name}", *SMALL, "--redact", verbosity, "-rA")
    assert code == 1, out + err
    shown = {path.name: path.read_text() for path in shell.report.iterdir()} | {"out": out, "err": err}
    assert {"run.jsonl", "report.html", "junit.xml"} <= set(shown)
    assert [(file, word) for file, text in shown.items() for word in ("Erika", ": 4711", "[49, 640", "49, 640") if word in text] == []
    _, verdicts, _ = shell.records()
    (crash, *_) = [v for v in verdicts if v.gate == "run" and v.state is State.FAIL]
    assert f"{kind}: {LEFT_OUT} (raised at test_foreign.py:" in crash.reason
    assert LEFT_OUT in out


def test_what_production_prints_is_never_let_through(shell):
    code, _, err = shell("parity/", *SMALL, "--redact", "-s")
    assert code == 4
    assert "--redact with -s" in err


def test_names_of_logits_files_and_traces_are_hidden(tmp_path):
    model = small_engine.open_engine(ROOT / "checkpoints" / "tiny-dsv4", [0])
    tokens = list(range(300, 320))
    logits = model.prefill(torch.tensor([tokens]), model.new_state(1, 64))[0].log_softmax(-1)
    rows = [{int(i): round(float(row[i]), 6) for i in row.topk(20).indices} for row in logits]
    (tmp_path / "patients.jsonl").write_text(json.dumps({"tokens": tokens, "prompt": 18, "logprobs": rows}))
    shell = Shell(tmp_path)
    recorded = subprocess.run(
        [sys.executable, "-m", "probes.record", "--model", "production", "--prompt", "short.txt:0:20", "--layers", "0", "--steps", "1", "--out", str(tmp_path / "ward")], cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert recorded.returncode == 0, recorded.stderr
    for option, name, files in (("--logits", "patients", ["parity/test_logprobs.py"]), ("--trace", "ward", ["parity/test_logits.py"])):
        path = tmp_path / ("patients.jsonl" if name == "patients" else name)
        code, out, err = shell(*files, option, str(path), "--layers", "0", "--redact")
        assert code in (0, 1), out + err
        for file in ("run.jsonl", "report.html", "junit.xml"):
            assert name not in (shell.report / file).read_text(), file
        assert name not in out + err
        header, _, _ = shell.records()
        assert header.production == {"--logits": "logits of (redacted)", "--trace": "trace (redacted)"}[option]
        assert f"{option} '(redacted)'" in header.command
