"""Each listed fault, planted in a copy, turns the audit red where `expect` says, through the real command line.

Profiles are as short as the fault allows: the layers up to the faulty one and a few decode steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parity.planted import read_faults

ROOT = Path(__file__).resolve().parents[2]
FAULTS = read_faults()
# Steps reach the first boundary that the fault needs; single operations are picked by name.
PROFILES: dict[str, list[str]] = {
    "B001": ["--phase", "decode", "--layers", "2", "--steps", "3", "-k", "test_point or test_production_runs"],
    "B060": ["--phase", "decode", "--layers", "0", "--steps", "2", "-k", "test_point or test_production_runs"],
    "B073": ["--phase", "prefill", "--layers", "2", "-k", "test_point or test_production_runs"],
    "B086": ["--phase", "decode", "--layers", "0", "--steps", "2", "-k", "test_point or test_production_runs or counts_the_sink_once"],
    "B090": ["--phase", "prefill", "--layers", "0", "-k", "test_point or test_production_runs"],
    "B118": ["--phase", "prefill", "--layers", "0", "-k", "shared_expert or test_production_runs"],
}


def audit(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run `pytest parity/` and give its exit code and records."""
    command = [sys.executable, "-m", "pytest", "parity/", "--report", str(tmp_path / "report"), "-q", "--tb=no", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    run = tmp_path / "report" / "run.jsonl"
    assert run.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, [json.loads(line) for line in run.read_text().splitlines()]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.id)
def test_a_planted_fault_is_found_where_it_is(fault, tmp_path):
    code, records = audit(tmp_path, "--inject", fault.id, *PROFILES[fault.id])
    summary, expect = records[-1], fault.expect
    first = summary["first_divergence"]
    assert code == 1
    assert summary["verdict"] == "fail"
    assert first["component"] in expect["components"]
    assert first["phase"] == expect.get("phase")
    assert first["layer"] == expect.get("layer")
    if "points" in expect:
        assert first["point"].removeprefix(f"layers.{expect['layer']}.") in expect["points"]
    failed = {r["gate"] for r in records if r["type"] == "verdict" and r["state"] == "fail"}
    operations = {gate.removeprefix("operation.") for gate in failed if gate.startswith("operation.")}
    if fault.id in ("B086", "B118"):  # seen by an operation judged alone, too
        assert operations & set(expect["operations"])


def test_without_a_fault_the_same_profiles_are_green(tmp_path):
    code, records = audit(tmp_path, "--phase", "both", "--layers", "0-2", "--steps", "3", "-k", "test_point or test_production_runs")
    assert code == 0
    assert records[-1]["failed"] == 0
    assert records[-1]["passed"] > 400
