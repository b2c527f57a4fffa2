"""pytest parity/ --baseline RUN, run as a user runs it: bad files are refused before anything is written, the trend stands above the verdict."""

import shutil

import pytest

from parity.unit.test_session import Shell, check_refused, last_lines
from parity.unit.test_session import shell as shell
from probes.core.records import read_run, to_line

NARROW = ("parity/test_layers.py", "--layers", "0", "--steps", "2", "--prompt", "medium.txt:0:12", "-k", "hc_ffn.X")

BAD = {
    "missing": (None, "No such file or directory; expected a run.jsonl that pytest parity/ wrote, or its folder"),
    "empty": ("", "the first line is no header"),
    "another file": ('{"a": 1}\n{"a": 2}\n', ":1: unknown record type None"),
    "a later schema": ('{"type": "header", "schema": 9}\n{}\n', ":1: schema 9; this version reads 1 and 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_baseline_is_one_line_and_nothing_is_written(name, shell: Shell, tmp_path):
    content, words = BAD[name]
    path = tmp_path / "old.jsonl"
    if content is not None:
        path.write_text(content)
    check_refused(shell, shell("parity/", "--baseline", str(path)), words)


def test_a_run_beside_the_same_run_has_no_difference_and_beside_another_prompt_is_not_comparable(shell: Shell, tmp_path):
    assert shell(*NARROW)[0] == 0
    kept = shutil.copytree(shell.report, tmp_path / "old")
    code, out, err = shell(*NARROW, "--baseline", str(shell.report))  # its own folder: read before it is written anew
    assert (code, err) == (0, "")
    assert last_lines(out)[0].startswith("incomplete (only ")
    trend = [line for line in out.splitlines() if line.startswith("trend: ")]
    header, verdicts, _ = shell.records()
    assert len(trend) == 1
    assert trend[0].startswith(f"trend: no difference; {len(verdicts)} gates and ")
    assert header.baseline == str(shell.report)
    assert trend[0].removeprefix("trend: ") in (shell.report / "report.html").read_text(encoding="utf-8")

    records = read_run(kept / "run.jsonl")
    other = to_line(records[0]).replace("medium.txt:0:12", "medium.txt:5:17")
    (kept / "run.jsonl").write_text("\n".join([other, *map(to_line, records[1:]), ""]))
    code, out, _ = shell(*NARROW, "--baseline", str(kept / "run.jsonl"))
    assert code == 0
    assert "trend: not comparable, for other prompts (medium.txt:5:17 → medium.txt:0:12): no gate was compared" in out
