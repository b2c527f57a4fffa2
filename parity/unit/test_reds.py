"""Which planted faults turn which gate red: only what runs of a sweep say, and only red by rows that were compared."""

import dataclasses
import json

import pytest

from parity import score
from parity.planted import FAULTS, read_faults
from parity.sweep import main
from parity.unit.test_records import HEADER, verdict
from probes.core.records import Ledger, State, to_line
from reference.config import InputError


def red(gate, **facts):
    return dataclasses.replace(verdict(State.FAIL, **{"rows": 8, **facts}), gate=gate)


def store(folder, fault, *records):
    (folder / (fault or "_clean1")).mkdir(parents=True)
    path = folder / (fault or "_clean1") / "run.jsonl"
    with Ledger(path) as ledger:
        for record in (dataclasses.replace(HEADER, inject=fault), *records):
            ledger.write(record)
    return path


def test_gates_are_listed_with_the_faults_that_turn_them_red(tmp_path):
    store(tmp_path, "B060", red("values"), red("values"), red("sets"), verdict(rows=9))
    store(tmp_path, "B001", red("values"))
    assert score.reds_of(tmp_path) == ({"sets": ["B060"], "values": ["B001", "B060"]}, 2)


def test_what_compared_nothing_or_has_no_fault_does_not_count(tmp_path):
    store(tmp_path, "B060", red("values", rows=0), red("run"), red("load", rows=0), verdict(rows=3), red("kept"))
    store(tmp_path, None, red("values"))
    assert score.reds_of(tmp_path) == ({"kept": ["B060"]}, 1)


def test_the_header_says_what_was_planted_not_the_folder(tmp_path):
    store(tmp_path, "B060", red("values")).parent.rename(tmp_path / "B999")
    assert score.reds_of(tmp_path)[0] == {"values": ["B060"]}


def test_a_run_that_was_cut_off_counts_for_what_it_judged_and_one_just_begun_for_nothing(tmp_path):
    path = store(tmp_path, "B060", red("values"), red("sets"))
    path.write_bytes(path.read_bytes()[:-30])
    (tmp_path / "B001").mkdir()
    (tmp_path / "B001" / "run.jsonl").write_text(to_line(HEADER)[:50])
    assert score.reds_of(tmp_path) == ({"values": ["B060"]}, 1)


def test_a_folder_without_a_planted_fault_is_bad_input(tmp_path, capsys):
    store(tmp_path, None, red("values"))
    assert main(["--reds", str(tmp_path)]) == 2
    assert "no run of a planted fault" in capsys.readouterr().err


def test_a_broken_run_is_bad_input_and_the_file_stays(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(score, "REDS", tmp_path / "reds.json")
    path = store(tmp_path, "B060", red("values"))
    path.write_text(path.read_text() + "{\n")
    assert main(["--reds", str(tmp_path)]) == 2
    assert "B060/run.jsonl" in capsys.readouterr().err
    assert not score.REDS.exists()


def test_the_command_writes_what_a_header_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(score, "REDS", tmp_path / "reds.json")
    assert score.known_reds() == {}
    store(tmp_path, "B060", red("values"))
    assert main(["--reds", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"reds: 1 gate turned red by 1 fault, from 1 run: {tmp_path / 'reds.json'}\n"
    assert score.known_reds() == {"values": ["B060"]}


@pytest.mark.parametrize("content", ["{", "[]", '{"values": "B060"}', '{"values": []}', '{"values": [1]}'])
def test_a_file_that_says_something_else_is_refused(tmp_path, content):
    (tmp_path / "reds.json").write_text(content)
    with pytest.raises(InputError):
        score.known_reds(tmp_path / "reds.json")


def test_the_stored_file_names_faults_that_exist():
    reds = score.known_reds()
    if score.REDS.exists():
        assert reds
    assert {one for ids in reds.values() for one in ids} <= set(read_faults(FAULTS))
    assert json.dumps(reds) == json.dumps({gate: sorted(ids) for gate, ids in sorted(reds.items())})
