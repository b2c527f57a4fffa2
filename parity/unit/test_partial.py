"""A run that ended anywhere is drawn, compared and put in tables, and says that it was cut off. Killing one: test_session.py."""

import json

import pytest

from parity.unit.test_records import HEADER, verdict
from probes.core.records import Coverage, Kernel, Ledger, Measurement, State, summarise
from reports.__main__ import main

BODY = [
    HEADER, verdict(value=0.1, limit=0.2, spent=0.5, rows=3), verdict(State.FAIL, value=2.0, limit=1.0, spent=2.0, rows=3), verdict(State.NOT_RUN, reason="no device"),
    Measurement("residual", layer=0, phase="prefill", values={"reference_absmax": 1.0}), Coverage("prefill", 0, "layers.0.attn.q", "free", 1, 1), Kernel("topk", "radix", "cpu", "0", 1),
]  # fmt: skip


def stored(folder):
    with Ledger(folder / "whole.jsonl") as ledger:
        for record in [*BODY, summarise(BODY)]:
            ledger.write(record)
    return (folder / "whole.jsonl").read_bytes()


def cuts():
    """Before, at and after the end of every line, and in its middle: (lines that are whole, bytes from the end of the last of them)."""
    return [(lines, beyond) for lines in range(1, len(BODY) + 1) for beyond in (-1, 0, 1, 40)]


@pytest.mark.parametrize(("lines", "beyond"), cuts())
def test_a_run_cut_anywhere_is_drawn_and_says_so(lines, beyond, tmp_path, capsys):
    whole = stored(tmp_path)
    end = sum(len(line) + 1 for line in whole.split(b"\n")[:lines])
    path = tmp_path / "run.jsonl"
    path.write_bytes(whole[: end + beyond])
    assert main([str(path)]) == 0
    assert capsys.readouterr().err == ""
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    judged = sum(record.type == "verdict" for record in BODY[:lines])
    failed = sum(record.type == "verdict" and record.state is State.FAIL for record in BODY[:lines])
    assert "the run was cut off: its file has no last line" in page
    assert f"{judged} gate{'' if judged == 1 else 's'} had been judged, {failed} of them failed" in page
    assert 'data-verdict="pass"' not in page
    junit = (tmp_path / "junit.xml").read_text(encoding="utf-8")
    assert "cut off" in junit


def test_the_whole_file_does_not_say_so(tmp_path):
    stored(tmp_path)
    assert main([str(tmp_path / "whole.jsonl")]) == 0
    assert "the run was cut off" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_cut_run_is_put_in_a_table_and_compared(tmp_path, capsys):
    whole = stored(tmp_path)
    path = tmp_path / "run.jsonl"
    path.write_bytes(whole[:-50])
    assert main([str(path), "--table", str(tmp_path / "v.csv")]) == 0
    assert main(["--compare", str(tmp_path / "whole.jsonl"), str(path)]) == 0
    out = capsys.readouterr().out
    assert "3 rows of verdicts" in out
    assert "this run was cut off" in out
    assert "verdict cut off" in out


def test_a_run_cut_inside_its_header_holds_nothing_to_draw(tmp_path, capsys):
    whole = stored(tmp_path)
    path = tmp_path / "run.jsonl"
    for cut in (0, 1, len(whole.split(b"\n")[0]) - 1):
        path.write_bytes(whole[:cut])
        assert main([str(path)]) == 2
        assert capsys.readouterr().err == f"error: {path} is no readable run: {path}: the first line is no header\n"
    assert not (tmp_path / "report.html").exists()


def test_a_summary_that_is_not_the_last_line_does_not_end_a_run(tmp_path):
    whole = stored(tmp_path).split(b"\n")
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n".join([whole[0], whole[-2], *whole[1:3], b""]))
    assert json.loads(whole[-2])["type"] == "summary"
    assert main([str(path)]) == 0
    assert "the run was cut off" in (tmp_path / "report.html").read_text(encoding="utf-8")
