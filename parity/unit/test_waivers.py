"""Waivers: what a file may say, what one accepts, and an audit of a planted deviation with and without."""

import datetime
import math
from dataclasses import replace
from pathlib import Path

import pytest

from parity import terminal
from parity.attribution import first_divergence
from parity.unit.test_session import SMALL, Shell, check_refused, last_lines
from parity.waivers import KNOWN, MAX_DAYS, glob, read_waivers, unwaived, waived_before
from probes.core.records import Coverage, State, Verdict, summarise
from reference.config import InputError, ModelConfig
from reference.points import places_of_model

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
CONFIG = ModelConfig.from_dir(CHECKPOINT)
TODAY = datetime.date(2026, 3, 1)
ENTRY = {"gate": "attn.core", "point": "layers.*.attn.core", "reason": "split-k in bf16", "by": "kernel team", "until": TODAY}
RED = Verdict("attn.core", "layers.2.attn.core", "free", State.FAIL, "worst row rel-L2", layer=2, phase="decode", value=0.1, limit=0.04, spent=2.5, rows=9, test_id="a")
GREEN = replace(RED, state=State.PASS, value=0.01, spent=0.25, test_id="b")


def toml(**entry):
    """A file's text; None leaves a key out."""
    shown = {k: v.isoformat() if isinstance(v, datetime.date) else repr(v).replace("'", "\"").replace("True", "true") for k, v in entry.items() if v is not None}
    return "[[waiver]]\n" + "".join(f"{key} = {value}\n" for key, value in shown.items())


def waivers_of(tmp_path, *entries, today=TODAY):
    path = tmp_path / "waivers.toml"
    path.write_text("\n".join(toml(**{**ENTRY, **entry}) for entry in entries))
    return read_waivers(path, CONFIG, today)


# ---- the file ----

REFUSED = {
    "no reason": ({"reason": None}, "reason is missing"), "empty reason": ({"reason": "  "}, "reason is"), "nobody": ({"by": None}, "by is missing"),
    "no end": ({"until": None}, "until is missing"), "end in quotes": ({"until": "2026-03-01"}, "without quotes"),
    "far end": ({"until": TODAY + datetime.timedelta(MAX_DAYS + 1)}, f"more than {MAX_DAYS} days ahead"),
    "unknown gate": ({"gate": "attn.cores"}, "nearest is 'attn.core'"), "every gate": ({"gate": "*"}, "no gate that can be waived"),
    "a crash": ({"gate": "run", "point": "run"}, "cannot be accepted"), "everything": ({"point": "*"}, "matches everything"),
    "every point": ({"point": "layers.*"}, "matches everything"), "a layer": ({"point": "layers.2"}, "matches everything"), "dots": ({"point": "*.*.?"}, "matches everything"),
    "nearly every point": ({"point": "*a*"}, "of the model's"),
    "another gate's point": ({"point": "layers.*.attn.q"}, "matches no point of gate attn.core"), "no such layer": ({"point": "layers.99.attn.core"}, "matches no point"),
    "phase": ({"phase": "both"}, "prefill, decode"), "mode": ({"mode": "chain"}, "isolated"), "layers": ({"layers": "3-1"}, "runs backwards"),
    "unknown key": ({"expires": "x"}, "unknown key 'expires'"), "at_most": ({"at_most": 0.5}, "above 1"), "no number": ({"at_most": True}, "above 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_entry_is_refused_by_file_and_number(name, tmp_path):
    entry, words = REFUSED[name]
    with pytest.raises(InputError) as refused:
        waivers_of(tmp_path, {}, entry)
    assert words in str(refused.value)
    assert "waivers.toml: waiver 2: " in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "waiver = 3", "[[waiver", 'title = "x"\n' + toml(**ENTRY)])
def test_a_file_that_is_no_list_of_waivers_is_refused(text, tmp_path):
    (tmp_path / "w.toml").write_text(text)
    with pytest.raises(InputError, match=r"w\.toml"):
        read_waivers(tmp_path / "w.toml", CONFIG, TODAY)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"none\.toml: cannot be read"):
        read_waivers(tmp_path / "none.toml", CONFIG)


def test_the_last_day_allowed_is_allowed(tmp_path):
    (one,) = waivers_of(tmp_path, {"until": TODAY + datetime.timedelta(MAX_DAYS)}).all
    assert one.terms()["until"] == "2026-08-28"


def test_brackets_of_an_operations_name_are_no_character_class():
    assert glob("linear_fp8[*, prime]").fullmatch("linear_fp8[7 rows, prime]")
    assert not glob("linear_fp8[*, prime]").fullmatch("linear_fp8,")
    assert not glob("attn.q").fullmatch("attnxq")


def test_gates_that_can_be_waived_are_those_that_judge_numbers():
    assert {"attn.core", "state.kv", "device.attn.core", "operation.linear_fp8", "self.replayed", "memory.slope", "recall", "greedy"} <= KNOWN
    assert not {"run", "collection", "*"} & KNOWN


# ---- what one accepts ----


@pytest.mark.parametrize("entry", [{}, {"phase": "decode", "layers": "1-3", "mode": "free", "at_most": 2.5}, {"point": "layers.?.attn.core"}])
def test_a_matching_failure_is_accepted_and_counted(entry, tmp_path):
    waivers = waivers_of(tmp_path, entry)
    verdict = waivers.judge(RED)
    assert verdict.state is State.FAIL
    assert verdict.waiver == {"reason": "split-k in bf16", "until": "2026-03-01", "by": "kernel team"}
    assert waivers.judge(GREEN) == GREEN
    summary = summarise([verdict, GREEN])
    assert (summary.verdict, summary.failed, summary.waived) == ("pass", 1, 1)
    assert terminal.verdict_line(summary, len(waivers.used)) == "verdict: pass with 1 waiver (1 failed gate accepted)"
    assert waivers.lines()[0].endswith("accepts 1 failed gate until 2026-03-01 (kernel team: split-k in bf16)")


NOT_ACCEPTED = {
    "another phase": ({"phase": "prefill"}, {}, "unused"), "another layer": ({"layers": "3"}, {}, "unused"), "another mode": ({"mode": "isolated"}, {}, "unused"),
    "another gate": ({}, {"gate": "core.witness"}, "unused"), "grown": ({"at_most": 2.4}, {}, "beyond at_most = 2.4"),
    "grown in another number": ({"at_most": 3}, {"numbers": [{"number": "norm", "smallest_limit": 1.0, "limit": 0.1, "spent": 10.0}]}, "beyond at_most"),
    "expired": ({"until": TODAY - datetime.timedelta(1)}, {}, "expired on 2026-02-28: 1 failed gate not accepted"),
    "NaN": ({}, {"value": math.nan}, "no number"), "infinite": ({}, {"value": math.inf}, "no number"),
    "NaN in another number": ({}, {"numbers": [{"number": "norm", "smallest_limit": math.nan, "limit": 0.1, "spent": math.nan}]}, "no number"),
    "nothing compared": ({}, {"rows": 0}, "no number"), "a test that broke": ({}, {"value": None, "rows": 0}, "no number"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ACCEPTED)
def test_what_is_not_accepted_fails_the_run_and_the_waiver_says_why(name, tmp_path):
    entry, change, words = NOT_ACCEPTED[name]
    waivers = waivers_of(tmp_path, entry)
    verdict = waivers.judge(replace(RED, **change))  # type: ignore[arg-type]
    assert verdict.waiver is None
    assert summarise([verdict, GREEN]).verdict == "fail"
    assert words in waivers.lines()[0]
    assert waivers.facts()[0].values["accepted"] == 0


def test_what_was_not_run_and_a_missing_tap_stay_incomplete(tmp_path):
    waivers = waivers_of(tmp_path, {})
    absent = waivers.judge(replace(RED, state=State.NOT_RUN, reason="tap never fired"))
    assert absent.waiver is None
    waived = waivers.judge(RED)
    assert summarise([waived, GREEN, absent]).verdict == "incomplete"
    assert summarise([waived, GREEN, Coverage("decode", 2, "layers.2.attn.o", "free", 4, 3)]).verdict == "incomplete"
    assert summarise([waived]).verdict == "incomplete"  # nothing passed


def test_a_waiver_of_gates_that_pass_is_called_unused(tmp_path):
    waivers = waivers_of(tmp_path, {})
    waivers.judge(GREEN)
    assert waivers.lines()[0].endswith("unused: its 1 gate passed")


def test_the_first_divergence_is_the_first_that_is_not_waived(tmp_path):
    waivers = waivers_of(tmp_path, {})
    later = replace(RED, gate="attn.out", point="layers.2.attn.out", component="attention core")
    records = [waivers.judge(v) for v in (later, RED, replace(RED, phase="prefill"), replace(RED, layer=4, point="layers.4.attn.core"))]
    points = places_of_model(CONFIG)
    first = first_divergence(unwaived(records), points)
    assert first is not None
    assert first.point == "layers.2.attn.out"
    assert waived_before(records, points) == 2
    assert first_divergence(unwaived(records[1:]), points) is None
    assert waived_before(records[1:], points) == 0


# ---- an audit ----

# The tap shows another value than the kernel wrote: attn.core is red by half, and nothing else.
FAULT = ("production/attention.py", '        step.emit("attn.core", buf.o)\n', '        step.emit("attn.core", buf.o * 1.5)\n')


def planted(tmp_path, *options, **entry):
    shell = Shell(tmp_path)
    (tmp_path / "w.toml").write_text(toml(**{**ENTRY, "until": datetime.datetime.now(datetime.UTC).date(), **entry}))
    chosen = () if "--profile" in options else ("--profile", "full")
    return shell, shell("parity/test_layers.py", *SMALL, "--phase", "prefill", *shell.fault(*FAULT), *chosen, "--waivers", str(tmp_path / "w.toml"), "-k", "attn.core or attn.norm", *options)


def test_a_waived_deviation_is_accepted_by_the_audit(tmp_path):
    shell, (code, out, err) = planted(tmp_path)
    header, verdicts, summary = shell.records()
    assert (code, err) == (0, ""), out
    assert (summary.failed, summary.waived, summary.passed, summary.first_divergence) == (2, 2, 2, None)
    assert last_lines(out)[0].startswith("incomplete with 1 waiver (2 failed gates accepted; only 4 tests were selected")
    assert "waiver: attn.core at layers.*.attn.core: accepts 2 failed gates until" in out
    assert "2 xfailed" in out
    assert "first divergence" not in out
    assert header.waivers[0]["by"] == "kernel team"
    assert {v.point for v in verdicts if v.waiver} == {"layers.0.attn.core"}


def test_an_expired_waiver_accepts_nothing(tmp_path):
    shell, (code, out, _) = planted(tmp_path, until=datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(1))
    assert code == 1
    assert last_lines(out)[0] == "fail"
    assert "expired on" in out
    _, _, summary = shell.records()
    assert (summary.failed, summary.waived) == (2, 0)
    assert summary.first_divergence is not None


@pytest.mark.parametrize("name", ["everything", "the fault profile"])
def test_a_waiver_that_would_accept_anything_is_refused_before_anything_runs(name, tmp_path):
    shell, answer = planted(tmp_path, point="*") if name == "everything" else planted(tmp_path, "--profile", "faults")
    check_refused(shell, answer, "matches everything" if name == "everything" else "--profile full")
