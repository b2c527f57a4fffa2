"""How much of what was asked a foreign production shows: in the verdict's line, and with --least-coverage in the exit code."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from parity.outsider import Outsider, over_and_not_judged
from parity.session import measured_or_told
from parity.unit.test_generic import Llama, pytest_parity
from parity.unit.test_session import ROOT, Shell, last_lines
from probes.core.records import Measurement, State, Verdict, summarise

ENGINE = ("--production", "docs.examples.small_engine:open_engine", "--layers", "0", "--steps", "1", "--prompt", "medium.txt:0:20")


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


POINTS = ("embed", "layers.0.attn.q", "norm", "logits")


def audit_that_shows(prefill: tuple[str, ...], *decode: tuple[str, ...]) -> Any:
    """What each pass showed."""
    passes = {"prefill": [frozenset(prefill)], "decode": [frozenset(step) for step in decode]}
    return SimpleNamespace(free_points=POINTS, plan=SimpleNamespace(phases=("prefill", "decode") if decode else ("prefill",)), shown_in=passes.__getitem__)


ALL, TWO = POINTS, ("embed", "logits")


@pytest.mark.parametrize(
    ("passes", "absent", "words", "percent"),
    [
        ((ALL, ALL, ALL), (), "full", 100),
        ((ALL[1:], ALL[1:], ALL[1:]), (), "partial: 3 of 4 points shown", 75),
        ((("logits",),) * 3, (), "partial: 1 of 4 points shown; only logits", 25),
        (((), (), ()), (), "partial: 0 of 4 points shown; prefill not shown; decode not shown", 0),
        ((ALL,), ("decode",), "partial: 4 of 4 points in prefill; decode not shown", 50),
        ((ALL, (), ()), (), "partial: 4 of 4 points in prefill; decode not shown", 50),
        (((), TWO, TWO), (), "partial: 2 of 4 points in 2 decode steps; prefill not shown", 25),
        ((ALL, ALL, (), ()), (), "partial: 4 of 4 points in prefill; 4 of 4 in 1 of 3 decode steps", 100 * (1 + 1 / 3) / 2),
        ((TWO, ALL, TWO, ()), (), "partial: 2 of 4 points in prefill; 2 to 4 of 4 in 2 of 3 decode steps", 50),
        ((TWO, ("norm",), ("norm",)), (), "partial: 2 of 4 points in prefill; 1 of 4 in 2 decode steps", 37.5),
    ],
)  # fmt: skip
def test_points_are_counted_in_the_passes_that_showed_them(passes, absent, words, percent):
    """The percentage is of points times passes, each phase alike."""
    door = Outsider("x", None)
    assert door.words(audit_that_shows(*passes), absent) == words
    assert door.percent(audit_that_shows(*passes), absent) == pytest.approx(percent)


def test_a_phase_that_a_file_holds_nothing_of_is_named_beside_logits_only():
    assert Outsider("x", None, coverage="logits only").words(audit_that_shows(ALL), ("decode",)) == "logits only; decode not shown"


def drift(name: str, point: str, first_over: Any) -> Measurement:
    return Measurement(name, phase="decode", point=point, values={"limit": 2e-4, "first_over": first_over})


def of(point: str, state: State, steps: tuple[int, int]) -> Verdict:
    return Verdict("hc_ffn.X", point, "free", state, "worst row rel-L2", phase="decode", step_first=steps[0], step_last=steps[1], rows=1)


X = "layers.0.hc_ffn.X"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([drift("drift layer", X, 1), of(X, State.PASS, (0, 0))], [f"{X} is over its limit of 0.0002 in decode step 1, and no gate judged it there"]),
        ([drift("drift steps", "logits", {"step": 2, "error": 0.1, "limit": 2e-4})], ["logits is over its limit of 0.0002 in decode step 2, and no gate judged it there"]),
        ([drift("drift layer", X, 1), of(X, State.FAIL, (1, 3))], []),
        ([drift("drift layer", X, 1), of("layers.1.hc_ffn.X", State.FAIL, (1, 3))], [f"{X} is over its limit of 0.0002 in decode step 1, and no gate judged it there"]),
        ([drift("drift layer", X, None), of(X, State.PASS, (0, 0))], []),
    ],
    ids=["not judged at that step", "logits", "its gate is red", "another gate is red", "within the limit"],
)  # fmt: skip
def test_a_drift_over_its_limit_needs_a_red_gate(records, said):
    assert over_and_not_judged(records) == said


def stopped() -> list[Any]:
    raise IndexError("too many indices for tensor of dimension 3")


def test_a_measurement_that_stops_is_told_and_costs_a_pass():
    (told,) = measured_or_told(SimpleNamespace(redactor=None), stopped)  # type: ignore[arg-type]
    assert isinstance(told, Verdict)
    assert told.state is State.NOT_RUN
    assert told.reason.startswith("a measurement stopped: IndexError: too many indices for tensor of dimension 3 (raised at test_least_coverage.py:")
    assert summarise([of(X, State.PASS, (0, 0)), told]).verdict == "incomplete"
    (hidden,) = measured_or_told(SimpleNamespace(redactor=object()), stopped)  # type: ignore[arg-type]
    assert "indices" not in hidden.reason  # type: ignore[union-attr]


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
    assert "30 of 30 points in prefill; decode not shown; 50 % of the asked points are shown, --least-coverage asks for 51 %" in last_lines(out)[0]
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
