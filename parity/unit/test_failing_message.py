"""What a red gate says in the terminal: whatever numbers a gate leaves out, the reason and the command are there."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch

from parity import evaluate
from parity.audit import Floor
from parity.conftest import describe, waived
from parity.terminal import Progress
from probes.core.records import State, Verdict

FULL: dict[str, Any] = {
    "layer": 1, "phase": "decode", "step_first": 0, "step_last": 3, "worst_step": 2, "value": 0.5, "limit": 0.01, "spent": 50.0, "floor": 0.001, "k": 4.0, "eps": 0.006,
    "got": 1.5, "want": 1.0, "norm_ratio": 1.5, "norm_ratio_limit": 0.01, "cosine": 0.9, "rel_l2": 0.5, "local": True,
}  # fmt: skip
OPTIONAL = sorted(FULL)
PARTS = [("got", "want"), ("floor",), ("limit",), ("k",), ("eps",), ("phase",), ("worst_step",), ("value", "spent")]
WITHOUT = [tuple(itertools.chain(*left_out)) for n in range(len(PARTS) + 1) for left_out in itertools.combinations(PARTS, n)]


def red(without: tuple[str, ...] = (), **more: Any) -> Verdict:
    given = FULL | dict.fromkeys(without)
    return Verdict("g", "layers.1.attn.q", "free", State.FAIL, "m", **given, why="because", reason="27 of 40 rows flip", where=[0, 7], element=[0, 7, 3], component="attn.q", test_id="parity/test_x.py::test_y", **more)


def test_every_field_that_a_gate_may_leave_out_is_left_out_here() -> None:
    hints = get_type_hints(Verdict)
    assert {field.name for field in dataclasses.fields(Verdict) if type(None) in getattr(hints[field.name], "__args__", ())} - {"waiver"} == set(FULL)


@pytest.mark.parametrize("without", [*WITHOUT, tuple(OPTIONAL)], ids=lambda names: "+".join(names) or "nothing")
def test_a_red_gate_says_why_and_how_to_run_it_again_whatever_it_leaves_out(without: tuple[str, ...]) -> None:
    lines = describe(red(without), " --layers 0-1").splitlines()
    assert lines[0].startswith("layers.1.attn.q   ")
    assert lines[1] == "  27 of 40 rows flip"
    assert lines[-1] == "  again: pytest 'parity/test_x.py::test_y' --layers 0-1"
    assert "None" not in "\n".join(lines)
    assert ("  worst row [0, 7], worst element [0, 7, 3]: got 1.5, want 1" in lines) is ("got" not in without)
    told = [line for line in lines if line.startswith("  limit")]
    formula = not {"floor", "k", "eps"} & set(without)
    assert told == ([] if "limit" in without else ["  limit 0.01 = 4 x floor 0.001 + 0.006   (because)"] if formula else ["  limit 0.01   (because)"])


@pytest.mark.parametrize("without", [(), ("spent",), tuple(OPTIONAL)], ids=["nothing", "spent", "all"])
def test_its_line_while_the_audit_runs_and_a_waived_one_say_why(without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    progress = Progress(SimpleNamespace(), 0)  # type: ignore[arg-type]
    monkeypatch.setattr(progress, "line", lambda text, **markup: said.append(text))
    progress.turned_red(red(without), False)
    assert ("50 x of its limit" if not without else "27 of 40 rows flip") in said[0]
    assert "27 of 40 rows flip" in waived(red(without, waiver={"until": "2999-01-01", "by": "x", "reason": "known"}))


def test_flips_beyond_the_margin_say_how_many_and_how_wide() -> None:
    want = torch.zeros(1, 40, 8)
    want[..., 2] = 3.0
    got = want.clone()
    got[:, 13:] = want[:, 13:].roll(1, -1)
    seen = SimpleNamespace(
        ensure=lambda phase: None, plan=SimpleNamespace(steps=0), crash=None, stopped="", fired=lambda *a: 1, valid_over=lambda *a: torch.ones(1, 40, dtype=torch.bool),
        values=lambda who, *a: got if who == "production" else want, floor=lambda *a: Floor(rows=40, absolute=0.01),
    )  # fmt: skip
    text = describe(evaluate.judge_flips(seen, "prefill"))  # type: ignore[arg-type]
    assert "27 of 40 rows flip beyond the margin; largest margin 3 > 0.04 (twice k 2 x floor 0.01)" in text
    assert "again: pytest" in text


def test_the_first_wrong_step_and_the_step_of_the_worst_row_are_both_named():
    later = dataclasses.replace(red(), phase="decode", step_first=1, step_last=23, worst_step=9, details={"first_step": 1})
    lines = describe(later).splitlines()
    assert "   from decode step 1   " in lines[0]
    assert lines[1].endswith(" at step 9")
