"""Tidy tables hold every number of a run: NaN, inf and nothing stay three things, and text stays text."""

import csv
import io
import json
import math
import sys
from pathlib import Path

import pandas
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.unit.synthetic_run import synthetic_run, wild_run
from parity.unit.test_records import HEADER, INF, NAN, verdict
from parity.unit.test_records import records as any_record
from probes.core.records import Coverage, Kernel, Ledger, Measurement, Verdict, read_run, summarise
from reports import table
from reports.__main__ import main

RUN = [
    HEADER,
    verdict(value=NAN, limit=INF, got=-INF, want=None, layer=2, rows=250, local=True, details={"deep": [NAN, {"é": "ü\n,"}]}, where=[0, 3]),
    verdict(
        value=0.1, limit=0.2, phase="decode", step_first=0, step_last=15,
        numbers=[{"number": "worst row", "smallest_limit": 0.1, "limit": 0.2, "spent": 0.5}, {"number": "norm", "smallest_limit": "nan", "limit": "inf", "spent": None}],
    ),
    Measurement("drift", layer=1, values={"mod4": [0.5, "inf", "nan", 2], "text": "nan or so", "none": None, "flag": True, "empty": [], "count": 3}),
    Coverage("prefill", 0, "layers.0.attn.q", "free", 1, 0),
    Kernel("topk", "topk_radix", "sm_90a", "0123", 4),
]  # fmt: skip
RUN.append(summarise(RUN))


def read_csv(records, of):
    return list(csv.DictReader(io.StringIO(table.csv_bytes(records, of).decode("utf-8"), newline="")))


def read_parquet(records, of):
    return pyarrow.parquet.read_table(io.BytesIO(table.parquet_bytes(records, of))).to_pylist()


def test_csv_keeps_nan_inf_and_nothing_apart():
    row = read_csv(RUN, "verdicts")[0]
    assert [row[key] for key in ("value", "limit", "got", "want", "layer", "local", "phase")] == ["nan", "inf", "-inf", "", "2", "True", ""]
    assert json.loads(row["details"]) == {"deep": ["nan", {"é": "ü\n,"}]}
    assert json.loads(row["where"]) == [0, 3]


def test_parquet_keeps_nan_inf_and_nothing_apart():
    row = read_parquet(RUN, "verdicts")[0]
    assert math.isnan(row["value"])
    assert (row["limit"], row["got"], row["want"], row["layer"], row["local"], row["phase"]) == (INF, -INF, None, 2, True, None)


def test_pandas_reads_the_csv_back_as_numbers(tmp_path):
    path = tmp_path / "v.csv"
    table.write_table(RUN, "verdicts", path)
    frame = pandas.read_csv(path)
    assert math.isnan(frame["value"][0])
    assert frame["value"][1] == 0.1
    assert (frame["limit"][0], frame["got"][0]) == (INF, -INF)
    kept = pandas.read_csv(path, dtype=str, keep_default_na=False)
    assert (kept["value"][0], kept["want"][0]) == ("nan", "")  # as the docstring says


def test_the_published_snippet_shows_numbers_and_no_gaps(tmp_path, monkeypatch):
    root = Path(__file__).resolve().parents[2]
    snippet = (root / "docs" / "records.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    table.write_table(read_run(root / "parity" / "golden" / "run-1.jsonl"), "numbers", tmp_path / "numbers.csv")
    monkeypatch.chdir(tmp_path)
    setup, _, shown = snippet.strip().rpartition("\n")
    names: dict[str, object] = {}
    exec(setup, names)
    found = eval(shown, names)
    assert len(found) > 1
    assert not found.isna().any()


def test_every_number_of_a_gate_has_a_row():
    rows = read_csv(RUN, "numbers")
    assert [(r["number"], r["smallest_limit"], r["limit"], r["spent"]) for r in rows] == [
        ("worst_row_rel_l2", "nan", "inf", ""), ("worst row", "0.1", "0.2", "0.5"), ("norm", "nan", "inf", ""),
    ]  # fmt: skip
    assert [(r["phase"], r["step_first"], r["step_last"]) for r in rows] == [("", "", ""), ("decode", "0", "15"), ("decode", "0", "15")]


def test_measurements_are_long():
    rows = [(r["key"], r["index"], r["value"], r["text"]) for r in read_csv(RUN, "measurements")]
    assert rows == [
        ("mod4", "0", "0.5", ""), ("mod4", "1", "inf", ""), ("mod4", "2", "nan", ""), ("mod4", "3", "2.0", ""), ("text", "", "", "nan or so"), ("none", "", "", ""),
        ("flag", "", "", "true"), ("empty", "", "", "[]"), ("count", "", "3.0", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("of", table.TABLES)
@pytest.mark.parametrize("run", [synthetic_run(seed=1), wild_run()], ids=["failed", "wild"])
def test_the_table_counts_what_the_run_holds(run, of):
    kinds = {"verdicts": Verdict, "numbers": Verdict, "measurements": Measurement, "coverage": Coverage, "kernels": Kernel}
    found = [r for r in run if isinstance(r, kinds[of])]
    expected = {"numbers": lambda v: max(1, len(v.numbers)), "measurements": lambda m: sum(len(x) if isinstance(x, list) and x else 1 for x in m.values.values())}
    count = sum(expected.get(of, lambda _: 1)(r) for r in found)
    assert count > 0
    assert len(read_csv(run, of)) == len(read_parquet(run, of)) == len(table.frame(run, of)) == count


@given(st.lists(any_record, max_size=4))
@settings(deadline=None, max_examples=60)
def test_whatever_a_run_holds_the_csv_has_its_shape(found):
    for of, (_, columns, _rows) in table.TABLES.items():
        rows = read_csv(found, of)
        assert all(None not in row and set(row) == set(columns) for row in rows)


@given(st.floats())
@settings(deadline=None)
def test_a_float_survives_both_formats(value):
    run = [HEADER, verdict(value=value)]
    for back in (float(read_csv(run, "verdicts")[0]["value"]), read_parquet(run, "verdicts")[0]["value"]):
        assert repr(back) == repr(value)


def test_a_frame_to_plot_from_has_types():
    frame = table.frame(RUN, "verdicts")
    assert [str(frame[c].dtype) for c in ("value", "layer", "local")] == ["float64", "Int64", "boolean"]


# ---- the command ----


@pytest.fixture
def run_file(tmp_path):
    with Ledger(tmp_path / "run.jsonl") as ledger:
        for record in RUN:
            ledger.write(record)
    return tmp_path / "run.jsonl"


def test_the_command_writes_both_formats(run_file, tmp_path, capsys):
    assert main([str(run_file), "--table", str(tmp_path / "v.csv")]) == 0
    assert main([str(run_file), "--table", str(tmp_path / "n.parquet"), "--of", "numbers"]) == 0
    assert capsys.readouterr().out == f"table: {tmp_path / 'v.csv'} (2 rows of verdicts)\ntable: {tmp_path / 'n.parquet'} (3 rows of numbers)\n"
    assert pyarrow.parquet.read_table(tmp_path / "n.parquet").num_rows == 3
    assert not (tmp_path / "report.html").exists()


def test_parquet_without_pyarrow_is_one_line_and_writes_nothing(run_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main([str(run_file), "--table", str(tmp_path / "v.parquet")]) == 2
    assert capsys.readouterr().err == 'error: Parquet needs pyarrow, which is not installed: pip install "dsv4-parity[parquet]", or write .csv\n'
    assert not (tmp_path / "v.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "v.xlsx"], "expected a name that ends in .csv or .parquet"),
        (["--table", "no/such/folder/v.csv"], "No such file or directory"),
        (["--table", "v.csv", "--out", "x"], "--out does not go with --table"),
        (["--of", "verdicts"], "--of does not go with"),
    ],
)
def test_what_cannot_be_written_is_one_line(run_file, arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main([str(run_file), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_an_integer_that_parquet_cannot_hold_is_said(capsys, tmp_path):
    with pytest.raises(table.TableError, match="do not fit in Parquet"):
        table.parquet_bytes([HEADER, verdict(rows=10**30)], "verdicts")
    assert read_csv([HEADER, verdict(rows=10**30)], "verdicts")[0]["rows"] == str(10**30)
