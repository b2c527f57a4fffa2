"""Every probe as typed: 0 with help, 2 and one line for bad input, 3 and one line where it cannot measure; never a traceback.

A new probe is found by its file and has to be in the tables below. `pytest parity/`: test_session.py; reports: test_reports.py.
"""

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROBES = sorted(path.stem for path in (ROOT / "probes").glob("*.py") if 'if __name__ == "__main__"' in path.read_text())
# What a probe needs beside the options that are wrong.
GIVEN = {"record": ("--model", "production", "--out", "OUT")}
BAD_PATH = {"diff": ("/no/such/a", "/no/such/b"), "kv_cache": ("/no/such/cache",), "replay": ("/no/such.safetensors",)}
NO_CHECKPOINT = ("doctor",)  # looks at the machine only
NO_DEVICE_OPTION = ("diff", "kv_cache")
NEEDS_A_FILE = ("replay",)  # the file is read before a device is opened


def call(probe, capsys, *arguments):
    """Exit code, lines on stderr, stdout."""
    try:
        code = importlib.import_module(f"probes.{probe}").main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    return code, said.err.strip().splitlines(), said.out


def given(probe, tmp_path):
    return tuple(str(tmp_path / "out") if word == "OUT" else word for word in GIVEN.get(probe, ()))


def test_the_tables_name_probes_that_exist():
    assert len(PROBES) >= 17
    assert {*GIVEN, *BAD_PATH, *NO_CHECKPOINT, *NO_DEVICE_OPTION, *NEEDS_A_FILE} <= set(PROBES)


@pytest.mark.parametrize("probe", PROBES)
def test_help_tells_the_exit_codes(probe, capsys):
    code, _, out = call(probe, capsys, "--help")
    assert code == 0
    assert "exit codes: 0 measured, 2 bad input, 3 could not measure" in out


@pytest.mark.parametrize("probe", PROBES)
def test_an_unknown_option_is_2_and_one_line(probe, capsys):
    code, (line,), _ = call(probe, capsys, "--no-such-option")
    assert code == 2
    assert line.startswith(f"python -m probes.{probe}: ")
    assert line.endswith("--help")


@pytest.mark.parametrize("probe", [p for p in PROBES if p not in NO_CHECKPOINT])
def test_a_path_that_is_not_there_is_2_and_named(probe, capsys, tmp_path):
    code, (line,), out = call(probe, capsys, *given(probe, tmp_path), *BAD_PATH.get(probe, ("--checkpoint", "/no/such")))
    assert (code, out) == (2, "")
    assert "/no/such" in line


@pytest.mark.parametrize("probe", [p for p in PROBES if p not in (*NO_CHECKPOINT, *BAD_PATH, "memory", "load")])
def test_a_prompt_that_is_not_there_is_2_and_named(probe, capsys, tmp_path):
    code, (line,), _ = call(probe, capsys, *given(probe, tmp_path), "--prompt", "nonesuch.txt")
    assert code == 2
    assert "nonesuch.txt" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
@pytest.mark.parametrize("probe", [p for p in PROBES if p not in (*NO_DEVICE_OPTION, *NEEDS_A_FILE)])
def test_without_the_device_it_is_3_one_line_and_json_that_says_so(probe, capsys, tmp_path):
    code, (line,), out = call(probe, capsys, *given(probe, tmp_path), "--device", "cuda")
    assert code == 3
    assert line.startswith(f"python -m probes.{probe}: could not measure: ")
    assert json.loads(out.strip().splitlines()[-1])["measured"] is False
