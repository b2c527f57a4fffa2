"""Floors of several runs: spread and tightest cell from records, and one real run over two prompts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from parity.unit.synthetic_run import header
from probes import floors
from probes.core.records import Ledger, State, Verdict

ROOT = Path(__file__).resolve().parents[2]


def compared(layer, floor, smallest, limit=1.0, mode="isolated", norm=0.0, state=State.PASS, gate="attn.q", rows=5, phase="prefill"):
    numbers = [{"number": "worst row rel-L2", "smallest_limit": smallest, "limit": limit, "spent": smallest / limit}]
    numbers.append({"number": "norm ratio off 1 by", "smallest_limit": norm, "limit": 0.5, "spent": norm / 0.5})
    numbers.sort(key=lambda n: -n["spent"])
    return Verdict(gate, f"layers.{layer}.{gate}", mode, state, "worst row rel-L2", layer=layer, phase=phase, value=smallest, limit=limit, floor=floor, rows=rows, numbers=numbers)


def rows_of(*runs):
    return {(s.point, s.chain): s.row for s in floors.spreads([floors.cells(run) for run in runs])}


def test_the_spread_is_over_runs_and_the_floor_of_a_run_is_its_largest_layer():
    row = rows_of([compared(0, 0.1, 0.2), compared(1, 0.3, 0.1)], [compared(0, 0.2, 0.9), compared(0, 0.2, 0.4, phase="decode")], [compared(0, 0.6, 0.1)])["attn.q", "isolated"]
    assert row["floors"] == [0.3, 0.2, 0.6]
    assert (row["floor_min"], row["floor_median"], row["floor_max"]) == (0.2, 0.3, 0.6)
    assert (row["smallest_passing_limit"], row["spent_of_it"], row["run"], row["layer"]) == (0.9, 0.9, 1, 0)


def test_the_number_that_spent_most_is_named():
    row = rows_of([compared(0, 0.1, 0.2, norm=0.4), compared(1, 0.1, 0.3)])["attn.q", "isolated"]
    assert (row["smallest_passing_limit"], row["spent_of_it"]) == (0.3, 0.3)
    assert (row["spent"], row["spent_by"]) == (0.8, "norm ratio off 1 by")


def test_a_run_without_the_point_has_no_floor_and_does_not_widen_the_spread():
    row = rows_of([compared(0, 0.1, 0.2)], [compared(0, 0.4, 0.2, gate="attn.kv")])["attn.q", "isolated"]
    assert math.isnan(row["floors"][1])
    assert (row["floor_min"], row["floor_max"]) == (0.1, 0.1)


@pytest.mark.parametrize("changes", [{"rows": 0}, {"mode": "operation"}, {"gate": "swiglu"}], ids=["nothing compared", "an operation", "no point"])
def test_what_is_no_comparison_of_a_point_is_left_out(changes):
    assert floors.cells([compared(0, 0.1, 0.2, **changes)]) == {}


def test_chains_stay_apart_and_points_stand_in_dataflow_order():
    found = [(s.chain, s.point) for s in floors.spreads([floors.cells([compared(0, 0.1, 0.2, gate=g, mode=m) for g in ("ffn.out", "attn.q") for m in ("free", "isolated")])])]
    assert found == [("isolated", "attn.q"), ("isolated", "ffn.out"), ("free", "attn.q"), ("free", "ffn.out")]


def written(path, *verdicts):
    with Ledger(path) as ledger:
        for record in (header(), *verdicts):
            ledger.write(record)
    return str(path)


def test_runs_that_are_there_are_read_and_what_did_not_pass_is_counted(tmp_path, capsys):
    paths = [written(tmp_path / f"{i}.jsonl", compared(0, 0.1, 0.2), compared(1, 0.1, 2.0, state=State.FAIL)) for i in range(2)]
    assert floors.main(paths) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["not_passed"] == [1, 1]
    assert values["points"][0]["spent_of_it"] == 2.0


def test_nothing_judged_is_not_measured_and_a_broken_file_is_one_line(tmp_path, capsys):
    assert floors.main([written(tmp_path / "a.jsonl")]) == 3
    (tmp_path / "b.jsonl").write_text("{}\n")
    capsys.readouterr()
    assert floors.main([str(tmp_path / "b.jsonl")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert floors.main([str(tmp_path / "none.jsonl")]) == 2


@pytest.mark.slow
def test_two_prompts_are_audited_one_after_the_other():
    command = [sys.executable, "-m", "probes.floors", "--prompt", "medium.txt:0:30", "--prompt", "short.txt:0:20", "--layers", "0-1", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["runs"] == ["medium.txt:0:30", "short.txt:0:20"]
    found = {(row["point"], row["chain"]): row for row in values["points"]}
    for chain in floors.CHAINS:
        row = found["attn.core", chain]
        assert len(row["floors"]) == 2
        assert 0 < row["floor_min"] <= row["floor_max"] < row["limit"]
        assert 0 <= row["smallest_passing_limit"] <= row["limit"]
