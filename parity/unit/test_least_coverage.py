"""How much of what was asked a foreign production shows: in the verdict's line, and with --least-coverage in the exit code."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from parity.outsider import Outsider
from parity.unit.test_generic import Llama, pytest_parity
from parity.unit.test_session import ROOT, Shell, last_lines

ENGINE = ("--production", "docs.examples.small_engine:open_engine", "--layers", "0", "--steps", "1", "--prompt", "medium.txt:0:20")


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


def audit_that_shows(*shown: str) -> Any:
    points = ("embed", "layers.0.attn.q", "norm", "logits")
    return SimpleNamespace(free_points=points, plan=SimpleNamespace(phases=("prefill", "decode")), exposes=lambda point: point in shown, uncovered=lambda: [p for p in points if p not in shown])


@pytest.mark.parametrize(
    ("shown", "absent", "words", "percent"),
    [
        (("embed", "layers.0.attn.q", "norm", "logits"), (), "full", 100), (("embed", "norm", "logits"), (), "partial: 3 of 4 points shown", 75),
        (("logits",), (), "partial: 1 of 4 points shown; only logits", 25), ((), (), "partial: 0 of 4 points shown; prefill not shown; decode not shown", 0),
    ],
)  # fmt: skip
def test_the_count_and_what_is_not_shown_at_all(shown, absent, words, percent):
    door = Outsider("x", None)
    assert door.words(audit_that_shows(*shown), absent) == words
    assert door.percent(audit_that_shows(*shown), absent) == percent


def test_a_phase_that_a_file_holds_nothing_of_is_named_and_counts():
    audit = audit_that_shows("embed", "layers.0.attn.q", "norm", "logits")
    audit.plan.phases = ("prefill",)
    assert Outsider("x", None).words(audit, ("decode",)) == "partial: 4 of 4 points shown; decode not shown"
    assert Outsider("x", None).percent(audit, ("decode",)) == 50
    assert Outsider("x", None, coverage="logits only").words(audit, ("decode",)) == "logits only; decode not shown"


@pytest.mark.parametrize(("least", "code"), [("90", 0), ("91", 1)])
def test_below_the_least_coverage_the_verdict_is_incomplete_and_the_exit_code_1(shell, least, code):
    ended, out, err = shell("parity/test_logits.py", *ENGINE, "--least-coverage", least)
    assert ended == code, out + err
    verdict = last_lines(out)[0]
    assert verdict.startswith("incomplete (partial: 27 of 30 points shown; ")
    assert ("90 % of the asked points are shown, --least-coverage asks for 91 %" in verdict) is bool(code)
    assert shell.records()[2].verdict == "incomplete"


def test_a_trace_of_the_prefill_alone_says_so_and_is_half(shell, tmp_path):
    words = ["--model", "production", "--prompt", "short.txt:0:20", "--layers", "0", "--steps", "0", "--out", str(tmp_path / "t")]
    assert subprocess.run([sys.executable, "-m", "probes.record", *words], cwd=ROOT, capture_output=True, text=True).returncode == 0
    code, out, _ = shell("parity/test_logits.py", "--trace", str(tmp_path / "t"), "--layers", "0", "--least-coverage", "51")
    assert code == 1, out
    assert "30 of 30 points shown; decode not shown; 50 % of the asked points are shown, --least-coverage asks for 51 %" in last_lines(out)[0]
    code, out, _ = shell("parity/test_logits.py", "--trace", str(tmp_path / "t"), "--layers", "0", "--phase", "prefill", "--least-coverage", "100")
    assert code == 0, out
    assert "decode not shown" not in last_lines(out)[0]


def test_the_generic_part_has_it_too(tmp_path):
    done, records = pytest_parity(tmp_path, "few", "--production", "parity.unit.test_least_coverage:few", "--least-coverage", "90")
    assert done.returncode == 1
    assert records[-1]["verdict"] == "incomplete"
    assert "86.6 % of the asked points are shown, --least-coverage asks for 90 %" in done.stdout


def few() -> Any:
    """Of the reference's 15 points it shows 13."""
    model = Llama()
    model.points = {name: where for name, where in Llama.points.items() if name not in ("final_norm", "embed")}
    return model


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--least-coverage", "50"), "--least-coverage: it needs one of --production, --trace, --logits"), ((*ENGINE, "--least-coverage", "101"), "--least-coverage 101: expected a whole number of percent, at most 100"),
        ((*ENGINE, "--least-coverage", "5.5"), "--least-coverage 5.5: expected a whole number"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(shell, given, said):
    code, _, err = shell("parity/", *given)
    assert code == 4
    assert said in err
