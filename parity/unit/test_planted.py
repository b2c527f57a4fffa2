"""One planted fault of each component turns the audit red where `expect` says, through the real command line.

Profiles are as short as the fault allows: the layers up to the faulty one and a few decode steps. All faults, with what the
whole audit names: make faults.
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
RUNS = "test_production_runs"
POINTS = ["-k", f"test_point or {RUNS}"]
# Steps reach the first boundary that the fault needs; single operations are picked by name.
PROFILES: dict[str, list[str]] = {
    "B001": ["--phase", "decode", "--layers", "2", "--steps", "3", *POINTS],
    "B024": ["--phase", "prefill", "--layers", "2", "--prompt", "medium.txt:0:60", "-k", "test_point and indexer.score"],
    "B050": ["--phase", "prefill", "--layers", "2", "--prompt", "medium.txt:0:60", "-k", "test_point and attn."],
    "B060": ["--phase", "decode", "--layers", "0", "--steps", "2", *POINTS],
    "B073": ["--phase", "prefill", "--layers", "2", *POINTS],
    "B086": ["--phase", "decode", "--layers", "0", "--steps", "2", "-k", f"test_point or {RUNS} or counts_the_sink_once or weights_sum_to_one"],
    "B090": ["--phase", "prefill", "--layers", "0", *POINTS],
    "B108": ["--phase", "prefill", "--layers", "2", "--prompt", "medium.txt:0:60", "-k", "test_point and ffn."],
    "B118": ["--phase", "prefill", "--layers", "0", "-k", f"shared_expert or {RUNS}"],
    "B148b": ["--phase", "prefill", "--layers", "0", "--prompt", "medium.txt:0:60", "-k", "test_point and attn."],
    "B162": ["--phase", "prefill", "--layers", "0", "--prompt", "medium.txt:0:60", "-k", f"test_point or {RUNS}"],
    "B175": ["--phase", "prefill", "--layers", "0", "--prompt", "medium.txt:0:20", "-k", "reported_bytes"],
    "B181": ["--phase", "prefill", "--layers", "0", "--prompt", "medium.txt:0:60", *POINTS],
    "N003": ["--phase", "prefill", "--layers", "0", "--prompt", "medium.txt:0:40", "--prompt", "short.txt:0:30", "-k", f"test_model_point or {RUNS}"],
}


def audit(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run `pytest parity/` and give its exit code and records."""
    command = [sys.executable, "-m", "pytest", "parity/", "--report", str(tmp_path / "report"), "-q", "--tb=no", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    run = tmp_path / "report" / "run.jsonl"
    assert run.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, [json.loads(line) for line in run.read_text().splitlines()]


@pytest.mark.parametrize("fault_id", PROFILES)
def test_a_planted_fault_is_found_where_it_is(fault_id, tmp_path):
    code, records = audit(tmp_path, "--inject", fault_id, *PROFILES[fault_id])
    summary, expect = records[-1], FAULTS[fault_id].expect
    first = summary["first_divergence"]
    assert code == 1
    assert summary["verdict"] == "fail"
    assert first["component"] in expect["components"]
    assert expect["phase"] in ("any", first["phase"])
    if "layer_kinds" in expect:
        assert records[0]["model"]["kinds"][first["layer"]] in expect["layer_kinds"]
        assert first["point"].removeprefix(f"layers.{first['layer']}.") in expect["points"]
    failed = {r["gate"] for r in records if r["type"] == "verdict" and r["state"] == "fail"}
    operations = {gate.removeprefix("operation.") for gate in failed if gate.startswith("operation.")}
    if fault_id in ("B086", "B118"):  # seen by an operation judged alone, too
        assert operations & set(expect["operations"])


def test_every_component_has_its_profile():
    assert {FAULTS[fault_id].component for fault_id in PROFILES} == {fault.component for fault in FAULTS.values()}


def test_without_a_fault_the_same_profiles_are_green(tmp_path):
    code, records = audit(tmp_path, "--phase", "both", "--layers", "0-2", "--steps", "3", "-k", f"test_point or {RUNS}")
    assert code == 0
    assert records[-1]["failed"] == 0
    assert records[-1]["passed"] > 400
