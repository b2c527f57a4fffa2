"""The published JSON Schema is what the records are: real lines validate, planted bad ones do not, and the reader agrees."""

import copy
import dataclasses
import inspect
import json
import typing
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings

from parity.unit.synthetic_run import cut_off, synthetic_run, wild_run
from parity.unit.test_records import HEADER, records, verdict
from probes.core.records import (
    ADDED,
    READS,
    SCHEMA,
    TYPES,
    Divergence,
    Header,
    Kernel,
    RecordError,
    Summary,
    Verdict,
    from_line,
    read_run,
    summarise,
    to_line,
)
from reports import schema
from reports.__main__ import main

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "run-1.jsonl"
VALID = {version: jsonschema.Draft202012Validator(schema.line_schema(version)) for version in READS}
KERNEL = json.loads(to_line(Kernel("topk", "topk_radix", "sm_90a", "0123", 4)))
VERDICT = json.loads(to_line(verdict()))


def wrong(line, version=SCHEMA):
    return [error.message for error in VALID[version].iter_errors(json.loads(line) if isinstance(line, str) else line)]


@pytest.mark.parametrize("version", READS)
def test_the_published_file_is_what_the_records_give(version):
    assert schema.stored(version).read_text(encoding="utf-8") == schema.schema_text(version), "python -m reports --schema N > its file"
    jsonschema.Draft202012Validator.check_schema(json.loads(schema.schema_text(version)))


def test_every_version_that_is_read_is_published_and_no_other():
    assert sorted(path.name for path in schema.STORED.iterdir()) == sorted(schema.stored(version).name for version in READS)


@pytest.mark.parametrize("version", READS)
def test_the_command_prints_it(version, capsys):
    assert main(["--schema", str(version)]) == 0
    assert capsys.readouterr().out == schema.schema_text(version)


def test_the_command_prints_the_newest_by_default_and_refuses_others(capsys):
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["$id"].endswith(f":{SCHEMA}")
    assert main(["--schema", "7"]) == 2
    assert capsys.readouterr().err == "error: --schema 7: expected 1 or 2\n"


def test_a_stored_run_of_version_1_validates_and_is_read():
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    assert len(lines) > 50
    assert {json.loads(line)["type"] for line in lines} == set(TYPES)
    assert [message for line in lines for message in wrong(line, 1)] == []
    run = read_run(GOLDEN)
    assert len(run) == len(lines)
    head, last = run[0], run[-1]
    assert isinstance(head, Header)
    assert isinstance(last, Summary)
    assert head.schema == SCHEMA
    assert (head.reds, head.waivers, head.redacted) == ({}, [], False)
    assert last.total == sum(isinstance(record, Verdict) for record in run)
    assert last == summarise(run, last.seconds)


def test_a_run_of_version_1_written_again_is_one_of_this_version():
    for record in read_run(GOLDEN):
        assert wrong(to_line(record)) == []
        assert wrong(to_line(record), 1) != [] or record.type not in ADDED[2]


def test_fields_of_version_2_do_not_belong_in_a_file_of_version_1(tmp_path):
    head, *_, last = GOLDEN.read_text(encoding="utf-8").splitlines()
    path = tmp_path / "run.jsonl"
    path.write_text(head + "\n" + to_line(verdict()) + "\n" + last + "\n")
    with pytest.raises(RecordError, match=r"run\.jsonl:2: verdict: unknown fields \['waiver'\]"):
        read_run(path)
    assert wrong(to_line(verdict()), 1) != []


@given(records)
@settings(deadline=None, max_examples=60)
def test_whatever_a_record_holds_its_line_validates(record):
    assert wrong(to_line(record)) == []


@pytest.mark.parametrize("run", [synthetic_run(seed=1), cut_off(synthetic_run(seed=5)), wild_run()], ids=["failed", "cut off", "wild"])
def test_lines_of_a_whole_run_validate(run):
    for record in run[:: max(1, len(run) // 200)]:
        assert wrong(to_line(record)) == []


def damaged():
    """One change each that no reader may take."""
    yield "another type", {**KERNEL, "type": "kernal"}
    yield "no type", {k: v for k, v in KERNEL.items() if k != "type"}
    yield "an unknown field", {**KERNEL, "colour": "red"}
    yield "a missing field", {k: v for k, v in KERNEL.items() if k != "launches"}
    yield "text for a count", {**KERNEL, "launches": "4"}
    yield "a flag for a count", {**KERNEL, "launches": True}
    yield "a fraction for a count", {**KERNEL, "launches": 4.5}
    yield "null for a text", {**KERNEL, "source": None}
    yield "an unknown state", {**VERDICT, "state": "passed"}
    yield "a word for a number", {**VERDICT, "value": "NaN"}
    yield "a flag for a number", {**VERDICT, "value": False}
    yield "a list of texts for one of numbers", {**VERDICT, "where": ["0"]}
    yield "a waiver that is a text", {**VERDICT, "waiver": "known"}
    yield "an unknown verdict", {**json.loads(to_line(summarise([verdict()]))), "verdict": "ok"}
    yield "half a divergence", {**json.loads(to_line(summarise([verdict()]))), "first_divergence": {"layer": 0}}
    yield "reds without a list", {**json.loads(to_line(HEADER)), "reds": {"values": "B060"}}
    yield "a later version", {**json.loads(to_line(HEADER)), "schema": SCHEMA + 1}
    yield "no object", [1, 2]


@pytest.mark.parametrize(("line"), [pytest.param(line, id=name) for name, line in damaged()])
def test_a_bad_line_fails_both_the_schema_and_the_reader(line):
    assert wrong(line) != []
    with pytest.raises(RecordError):
        from_line(json.dumps(line))


def test_every_field_of_every_record_is_held_to_its_type():
    """Each field in turn holds an object of no record's shape; only free-form values may."""
    foreign = {"no": {"such": "thing"}}
    for name, definition in schema.line_schema()["$defs"].items():
        if name in TYPES:
            sample = json.loads(to_line(next(r for r in [HEADER, *synthetic_run(seed=1)] if r.type == name)))
            free = {f for f, hint in typing.get_type_hints(TYPES[name]).items() if "dict[str, typing.Any]" in str(hint) and "list" not in str(hint)}
            for field in definition["properties"]:
                changed = {**copy.deepcopy(sample), field: foreign}
                assert (wrong(changed) == []) == (field in free), (name, field)


def test_a_field_added_without_a_new_version_is_noticed():
    """The fields of version 1 and what was added since are all fields there are."""
    first = json.loads(schema.stored(1).read_text(encoding="utf-8"))["$defs"]
    for name, cls in [*TYPES.items(), ("divergence", Divergence)]:
        since = {one for added in ADDED.values() for one in added.get(name, ())}
        assert {f.name for f in dataclasses.fields(cls)} == set(first[name]["properties"]) - {"type"} | since


def test_the_schema_says_what_fields_mean():
    definitions = schema.line_schema()["$defs"]
    for name, cls in TYPES.items():
        assert definitions[name]["description"] == inspect.getdoc(cls)
        assert len(definitions[name]["description"]) > 40
