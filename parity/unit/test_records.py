"""Records: what is written comes back, the sums of a run add up, and a run of nothing is never a pass."""

import dataclasses
import json
import math
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from probes.core.records import (
    NEVER_WAIVED,
    SCHEMA,
    TYPES,
    VERDICTS,
    Coverage,
    Divergence,
    Header,
    Kernel,
    Ledger,
    Measurement,
    Record,
    RecordError,
    State,
    Summary,
    Verdict,
    contradictions,
    from_line,
    hints_of,
    read_run,
    summarise,
    to_line,
    to_wire,
    unjudged,
    verdicts,
)
from probes.core.wording import plural

NAN, INF = math.nan, math.inf
HEADER = Header(
    started="2026-01-02T03:04:05", command="pytest parity/", commit="abc", dirty=False, environment={"torch": "2"}, checkpoint="c",
    checkpoint_hash="0", model={}, device="cpu", policy=["bf16"], phases=["prefill"], layers=[0], layers_run=[0],
    prompts=["medium.txt:0:250"], tokens=[250], steps=0, max_context=8192,
)  # fmt: skip


def verdict(state=State.PASS, **facts):
    return Verdict(gate="g", point="layers.0.attn.q", mode="free", state=state, metric="worst_row_rel_l2", **facts)


def same(a, b):
    """Equal, NaN included."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


# ---- one line ----

floats = st.one_of(st.floats(), st.sampled_from([NAN, INF, -INF, -0.0, 5e-324, sys.float_info.max]))
text = st.text(max_size=20)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), text),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3),
)


def of(hint):
    """Values of a field's type, whatever the record: a field that is added is tested without a word here."""
    scalars = {str: text, int: st.integers(), bool: st.booleans(), float: floats, type(None): st.none(), Any: json_values, State: st.sampled_from(State)}
    if hint in scalars:
        return scalars[hint]
    if hint is Divergence:
        return built(Divergence)
    if isinstance(hint, types.UnionType):
        return st.one_of(*map(of, typing.get_args(hint)))
    inner = of(typing.get_args(hint)[-1])
    return st.lists(inner, max_size=3) if typing.get_origin(hint) is list else st.dictionaries(text, inner, max_size=3)


def built(cls):
    return st.builds(cls, **{name: FIXED[cls, name] if (cls, name) in FIXED else of(hint) for name, hint in hints_of(cls).items()})


FIXED = {(Verdict, "state"): st.sampled_from(State), (Header, "schema"): st.just(SCHEMA), (Summary, "verdict"): st.sampled_from(VERDICTS)}
records = st.sampled_from(list(TYPES.values())).flatmap(built)


def test_every_type_is_drawn_with_every_field():
    assert set(TYPES.values()) == set(typing.get_args(Record))
    for cls in TYPES.values():
        assert set(hints_of(cls)) == {f.name for f in dataclasses.fields(cls)}


@given(records)
@example(verdict(value=NAN, limit=INF, got=-INF, want=-0.0))
@example(verdict(reason="\udcff, a byte of a file name that is no text"))
@example(verdict(reason="line\nbreak \u2028 \x00 </script>"))
@settings(deadline=None)
def test_a_record_survives_its_line(record):
    line = to_line(record)
    assert "\n" not in line
    back = from_line(line)
    assert type(back) is type(record)
    assert same(dataclasses.asdict(back), dataclasses.asdict(record))


@given(records)
@settings(deadline=None)
def test_a_line_is_strict_json(record):
    def forbidden(constant):
        raise AssertionError(constant)

    assert json.loads(to_line(record), parse_constant=forbidden)["type"] == record.type


@given(st.recursive(floats | text, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3)))
@settings(deadline=None)
def test_free_form_values_come_back_with_their_wire_words(value):
    """NaN and inf inside details travel as words, which a reader takes for numbers; everything else comes back as it was."""
    record = from_line(to_line(verdict(details={"deep": value})))
    assert isinstance(record, Verdict)
    back = record.details["deep"]
    assert back == to_wire(value)
    assert to_wire(back) == back
    assert type(back) is type(value) or back in ("nan", "inf", "-inf")


def test_non_finite_numbers_are_strings_on_the_wire():
    values = json.loads(to_line(verdict(value=NAN, limit=INF, got=-INF, details={"deep": [NAN]})))
    assert (values["value"], values["limit"], values["got"], values["details"]) == ("nan", "inf", "-inf", {"deep": ["nan"]})


def test_a_text_that_reads_like_a_number_stays_text():
    assert from_line(to_line(verdict(reason="nan"))) == verdict(reason="nan")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not a JSON line"),
        ("{", "not a JSON line"),
        ("[]", "unknown record type"),
        ("7", "unknown record type"),
        ('{"type": "verdct"}', "unknown record type 'verdct'"),
        ('{"type": []}', "unknown record type"),
        ('{"type": "verdict"}', "missing"),
        ('{"type": "measurement", "name": "x", "values": {"a": NaN}}', "strict JSON"),
        ('{"type": "measurement", "name": "x", "valuez": {}}', "unknown fields ['valuez']"),
        ('{"type": "kernel", "source": "a", "kernel": "b", "arch": "c", "build": "d"}', "launches"),
        (to_line(verdict()).replace('"pass"', '"passed"'), "passed"),
        (to_line(HEADER).replace('"schema": 2', '"schema": 3'), "schema 3; this version reads 1 and 2"),
        (to_line(HEADER).replace('"schema": 2', '"schema": true'), "schema True"),
        (to_line(HEADER).replace(', "schema": 2', ""), "schema None"),
        (to_line(HEADER).replace('"schema": 2', '"schema": 1'), "unknown fields ['baseline', 'production', 'redacted', 'reds', 'waivers']"),
        (to_line(HEADER).replace('"reds": {}', '"reds": {"g": ["B1", 2]}'), "reds"),
        (to_line(summarise([verdict()])).replace('"verdict": "pass"', '"verdict": "passed"'), "expected pass, fail, incomplete"),
        (
            to_line(summarise([verdict()], divergence=Divergence(0, "p", None, None, None, "c"))).replace('"component"', '"x"'),
            "x",
        ),
    ],
)
def test_what_is_no_record_is_refused(line, message):
    with pytest.raises(RecordError) as caught:
        from_line(line)
    assert message in str(caught.value)


# ---- the arithmetic of a run ----


def seen(expected=1, observed=1):
    return Coverage("prefill", 0, "layers.0.attn.q", "free", expected, observed)


@given(st.lists(st.sampled_from(State)), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
@settings(deadline=None)
def test_counts_add_up_and_only_a_complete_run_passes(states, cells):
    run = [*(verdict(s, near_ties=1) for s in states), *(seen(*c) for c in cells)]
    s = summarise(run)
    assert (s.passed, s.failed, s.not_run) == tuple(states.count(x) for x in (State.PASS, State.FAIL, State.NOT_RUN))
    assert s.total == s.passed + s.failed + s.not_run == s.near_ties
    missing = any(observed < expected for expected, observed in cells)
    clean = s.passed > 0 and not s.failed and not s.not_run and not missing
    assert (s.verdict == "pass") == clean
    assert (s.verdict == "fail") == (s.failed > 0)


def test_an_empty_run_is_incomplete():
    s = summarise([])
    assert (s.verdict, s.total) == ("incomplete", 0)
    assert "nothing was compared" in s.reasons


def test_a_tap_that_never_fired_is_not_a_pass():
    s = summarise([verdict(), seen(expected=1, observed=0)])
    assert (s.verdict, s.coverage_missing) == ("incomplete", 1)
    assert "fired 0 of 1" in s.reasons[0]


def test_what_did_not_run_says_why_and_is_not_a_pass():
    s = summarise([verdict(), verdict(State.NOT_RUN, reason="no device"), verdict(State.NOT_RUN, reason="no device")])
    assert (s.verdict, s.not_run, s.reasons) == ("incomplete", 2, ["no device"])


def test_a_failure_outweighs_everything():
    assert summarise([verdict(), verdict(State.FAIL), verdict(State.NOT_RUN), seen(1, 0)]).verdict == "fail"


WAIVER = {"reason": "one ulp in a tie", "until": "2026-06-30", "by": "kim"}


def waived(**facts):
    return verdict(State.FAIL, waiver=WAIVER, **facts)


def test_a_waived_failure_stays_a_failure_and_is_counted_beside_it():
    s = summarise([HEADER, verdict(), waived()])
    assert (s.verdict, s.passed, s.failed, s.waived, s.total) == ("pass", 1, 1, 1, 2)
    assert summarise([HEADER, verdict(), waived(), verdict(State.FAIL)]).verdict == "fail"


@pytest.mark.parametrize("beside", [[], [verdict(), verdict(State.NOT_RUN)], [verdict(), seen(1, 0)]])
def test_a_waiver_accepts_a_failure_and_nothing_else(beside):
    s = summarise([HEADER, waived(), *beside])
    assert (s.verdict, s.waived) == ("incomplete", 1)


@pytest.mark.parametrize(
    "waiver",
    [
        {}, {**WAIVER, "reason": " "}, {**WAIVER, "by": ""}, {**WAIVER, "until": "2026-01-01"}, {**WAIVER, "until": "soon"}, {**WAIVER, "until": None},
        {"reason": "r", "until": "2026-06-30"},
    ],
)  # fmt: skip
def test_a_waiver_without_reason_name_or_valid_date_counts_for_nothing(waiver):
    s = summarise([HEADER, verdict(), verdict(State.FAIL, waiver=waiver)])
    assert (s.verdict, s.failed, s.waived) == ("fail", 1, 0)


def test_a_waiver_holds_through_its_last_day():
    assert summarise([HEADER, verdict(), verdict(State.FAIL, waiver={**WAIVER, "until": HEADER.started[:10]})]).verdict == "pass"


@pytest.mark.parametrize("gate", NEVER_WAIVED)
def test_what_was_not_compared_cannot_be_waived(gate):
    s = summarise([HEADER, verdict(), dataclasses.replace(waived(), gate=gate)])
    assert (s.verdict, s.waived) == ("fail", 0)


def test_a_waiver_on_what_passes_or_did_not_run_counts_nothing():
    s = summarise([HEADER, verdict(waiver=WAIVER), verdict(State.NOT_RUN, waiver=WAIVER)])
    assert (s.verdict, s.waived) == ("incomplete", 0)


# ---- files ----


def write(path, *records):
    with Ledger(path) as ledger:
        for record in records:
            ledger.write(record)
    return path


def test_a_run_is_read_back(tmp_path):
    run = [HEADER, verdict(), Measurement("residual", values={"rms": 1.0}), summarise([verdict()])]
    assert read_run(write(tmp_path / "run.jsonl", *run)) == run
    assert list(verdicts(run)) == [run[1]]


def test_every_record_is_on_disk_before_the_next(tmp_path):
    with Ledger(tmp_path / "run.jsonl") as ledger:
        ledger.write(HEADER)
        assert read_run(tmp_path / "run.jsonl") == [HEADER]


def test_a_run_file_is_never_overwritten_nor_written_after_its_end(tmp_path):
    path = write(tmp_path / "run.jsonl", HEADER)
    with pytest.raises(FileExistsError):
        Ledger(path)
    ledger = Ledger(tmp_path / "other.jsonl")
    ledger.close()
    ledger.close()
    with pytest.raises(RecordError, match="closed"):
        ledger.write(HEADER)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_cut_off_last_line_is_dropped(tmp_path, cut):
    path = write(tmp_path / "run.jsonl", HEADER, verdict())
    path.write_bytes(path.read_bytes()[: -1 - cut])
    assert read_run(path) == [HEADER]


SMALL = [HEADER, verdict(value=NAN, reason="ü"), verdict(State.FAIL, value=2.0, limit=1.0), Measurement("residual", values={"rms": "inf"}), Kernel("topk", "radix", "cpu", "0", 1)]


def test_a_cut_off_record_behind_the_summary_is_no_finished_run(tmp_path):
    whole = write(tmp_path / "run.jsonl", *SMALL, summarise(SMALL))
    whole.write_bytes(whole.read_bytes() + b'{"type": "verd')
    with pytest.raises(RecordError, match="a cut-off record behind the summary"):
        read_run(whole)


WAIVED = {"reason": "known", "until": "2026-03-01", "by": "somebody"}
JUDGED = {"rows": 4, "value": 0.5, "limit": 1.0, "spent": 0.5}
RED = {"rows": 4, "value": 5.0, "limit": 1.0, "spent": 5.0, "waiver": WAIVED}
UNBELIEVABLE: dict[str, tuple[State, dict[str, Any], str]] = {
    "over its limit": (State.PASS, {**JUDGED, "value": 5.0}, "its value is 5.0, its limit 1.0"), "NaN": (State.PASS, {**JUDGED, "value": NAN}, "its value is NaN"),
    "no value": (State.PASS, {**JUDGED, "value": None}, "its value is not there"), "no limit's worth": (State.PASS, {**JUDGED, "limit": NAN}, "its limit NaN"),
    "spent": (State.PASS, {**JUDGED, "spent": 1.01}, "share of its limit is 1.01"), "NaN spent": (State.PASS, {**JUDGED, "spent": NAN}, "share of its limit is NaN"),
    "no rows": (State.PASS, {**JUDGED, "rows": 0}, "nothing was compared"),
    "another number": (State.PASS, {**JUDGED, "numbers": [{"number": "norm", "smallest_limit": 2.0, "limit": 1.0, "spent": 2.0}]}, "its norm is 2.0, its limit 1.0"),
    "another number is NaN": (State.PASS, {**JUDGED, "numbers": [{"number": "norm", "smallest_limit": "nan", "limit": 1.0, "spent": "nan"}]}, "its norm is NaN"),
    "a pass waived": (State.PASS, {**JUDGED, "waiver": WAIVED}, "waived, and no failure"), "not run waived": (State.NOT_RUN, {"waiver": WAIVED}, "waived, and no failure"),
    "NaN waived": (State.FAIL, {**RED, "value": NAN}, "waived, and what failed is no number"), "nothing waived": (State.FAIL, {**RED, "rows": 0}, "waived, and what failed is no number"),
    "waived for ever": (State.FAIL, {**RED, "waiver": {**WAIVED, "until": "2999-01-01"}}, "waived until 2999-01-01, more than 180 days"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNBELIEVABLE)
def test_a_verdict_that_contradicts_itself_is_named_with_the_reason(name):
    state, facts, said = UNBELIEVABLE[name]
    (found,) = contradictions([HEADER, verdict(state, **facts)])
    assert found.startswith("layers.0.attn.q (free): ")
    assert said in found


BELIEVABLE: dict[str, tuple[State, dict[str, Any]]] = {
    "judged": (State.PASS, JUDGED), "on its limit": (State.PASS, {**JUDGED, "value": 1.0, "spent": 1.0}), "assertions of a test": (State.PASS, {"rows": 1}), "red": (State.FAIL, {**RED, "waiver": None}),
    "a test that broke": (State.FAIL, {}), "NaN": (State.FAIL, {**RED, "value": NAN, "waiver": None}), "waived": (State.FAIL, RED), "not run": (State.NOT_RUN, {}),
    "a waiver that had run out": (State.FAIL, {**RED, "value": NAN, "waiver": {**WAIVED, "until": "2025-12-31"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", BELIEVABLE)
def test_a_verdict_that_an_audit_writes_is_believed(name):
    state, facts = BELIEVABLE[name]
    assert contradictions([HEADER, verdict(state, **facts)]) == []


@pytest.mark.parametrize(("mode", "steps", "expected", "found"), [("free", (0, 3), 4, 0), ("free", (0, 2), 4, 1), ("isolated", (0, 3), 4, 1), ("free", (None, None), 4, 0)])
def test_a_tap_that_no_gate_judged_at_every_step_is_found(mode, steps, expected, found):
    judged = verdict(phase="decode", step_first=steps[0], step_last=steps[1])
    assert len(unjudged([Coverage("decode", 0, "layers.0.attn.q", mode, expected, expected)], [judged])) == found


def test_a_file_cut_at_any_byte_is_its_whole_records_and_never_a_finished_run(tmp_path):
    whole = write(tmp_path / "whole.jsonl", *SMALL, summarise(SMALL)).read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "run.jsonl"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        if not complete:
            with pytest.raises(RecordError, match="no header"):
                read_run(path)
            continue
        found = read_run(path)
        assert len(found) == complete
        assert [to_line(r) for r in found] == whole.decode().splitlines()[:complete]
        assert isinstance(found[-1], Summary) == (cut >= ends[-1])


def test_a_line_cut_inside_a_character_is_dropped(tmp_path):
    path = write(tmp_path / "run.jsonl", HEADER)
    path.write_bytes(path.read_bytes() + b'{"type": "verdict", "reason": "\xc3')
    assert read_run(path) == [HEADER]


def test_a_broken_line_in_the_middle_has_its_number(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(to_line(HEADER) + "\n{\n" + to_line(verdict()) + "\n")
    with pytest.raises(RecordError, match=r"run\.jsonl:2:"):
        read_run(path)


def test_a_broken_but_finished_last_line_is_an_error(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(to_line(HEADER) + "\n{\n")
    with pytest.raises(RecordError, match=":2:"):
        read_run(path)


@pytest.mark.parametrize("content", ["", "\n\n", to_line(verdict()) + "\n"])
def test_a_run_without_a_header_is_no_run(tmp_path, content):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(RecordError, match="no header"):
        read_run(path)


def test_one_is_singular():
    assert [plural(n, "gate") for n in (0, 1, 2)] == ["0 gates", "1 gate", "2 gates"]
    assert plural(1, "test was", "tests were") == "1 test was"


def test_bytes_that_are_no_text_are_no_run(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(to_line(HEADER).encode() + b"\n\xff\xfe\n" + to_line(verdict()).encode() + b"\n")
    with pytest.raises(RecordError):
        read_run(path)


def test_records_import_nothing_but_the_standard_library():
    import ast

    import probes.core.records as module

    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    roots = {str(n.module).split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    roots |= {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert roots <= set(sys.stdlib_module_names)
