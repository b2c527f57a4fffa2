"""bench/sanitizer.py without a card: what counts as clean and as found, with a stand-in for the tool; what runs, on the CPU device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import sanitizer
from bench.sanitizer import ERRORS, Job, jobs, judge, run

ROOT = Path(__file__).resolve().parents[2]
RAN = 'ran {"rms_norm.rms_norm_warp": 3, "topk.topk_radix": 1}\n'
CLEAN = "========= COMPUTE-SANITIZER\n" + RAN + "========= ERROR SUMMARY: 0 errors\n"
RACE = "========= Error: Race reported between Write access at 0x90 and Read access\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
WARNED = RAN + "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"


@pytest.mark.parametrize(
    ("text", "code", "planted", "state"),
    [
        (CLEAN, 0, False, "clean"),
        (CLEAN.replace(RAN, ""), 0, False, "failed"),  # nothing of ours ran
        (CLEAN.replace("========= ERROR SUMMARY: 0 errors\n", ""), 0, False, "failed"),  # the tool said nothing
        (CLEAN, 1, False, "failed"),
        (RAN + RACE, ERRORS, False, "errors"),
        (WARNED, 0, False, "errors"),
        (CLEAN, None, False, "timeout"),
        (RACE, ERRORS, True, "found"),
        (CLEAN, 0, True, "not found"),
        ("Traceback: no module\n", 1, True, "not found"),
    ],
)
def test_only_a_tool_that_ran_over_our_kernels_and_found_nothing_is_clean(text, code, planted, state):
    job = Job("racecheck", "x", [], planted=planted)
    judge(job, text, code)
    assert job.state == state
    assert job.ok == (state in ("clean", "found"))


def test_every_tool_sees_a_planted_mistake_and_both_plans():
    found = jobs()
    for tool in sanitizer.TOOLS:
        assert [j for j in found if j.tool == tool and j.planted], tool
        whole = [j for j in found if j.tool == tool and not j.planted]
        assert {j.what for j in whole if "operations" not in j.what} == {"model, portable", "model, fast"}
        parts = [j.arguments for j in whole if "operations" in j.what]
        rest = next(a for a in parts if "--only" not in a)
        assert rest[0] == "operations"
        assert [a[1:] for a in parts if a is not rest] == [["--only", text] for text in rest[2::2]], "what one leaves out another runs"
    planted = (ROOT / "parity" / "unit" / "cpu_device" / "kernels" / "planted_bugs.cu").read_text()
    assert all(f"void {kernel}(" in planted for _, kernel in sanitizer.PLANTED)


TOOL = """#!{python}
import sys, time
if "--help" in sys.argv:
    print("--padding --print-limit"); sys.exit()
if "memcheck" in sys.argv:
    assert sys.argv[sys.argv.index("--padding") + 1] == "512"
assert "--launch-timeout" not in sys.argv
if "race_on_reuse" in sys.argv:
    time.sleep(60)
bad = "planted" in sys.argv
print('ran {{"a.b": 2}}')
print(f"========= ERROR SUMMARY: {{int(bad)}} errors")
sys.exit({errors} if bad else 0)
"""


def test_a_run_judges_every_process_and_ends_what_hangs(tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable, errors=ERRORS))
    tool.chmod(0o755)
    found = jobs()
    run(found, str(tool), 8.0, tmp_path / "log")
    states = {(j.tool, j.what): j.state for j in found}
    assert states.pop(("racecheck", "race_on_reuse")) == "timeout"
    assert {state for (_, what), state in states.items() if what in {kernel for _, kernel in sanitizer.PLANTED}} == {"found"}
    assert {state for (_, what), state in states.items() if what.startswith(("model", "operations"))} == {"clean"}
    assert (tmp_path / "log").read_text().count("#### ") == len(found)


def bench_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench.sanitizer_run", "--device", "cpu", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_what_runs_under_the_tool_finishes_on_the_checked_cpu_device_and_counts_launches():
    done = bench_run("operations", "--only", "hc_", "--only", "gate_choose")
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("ran {")
    assert "hc_pre" in last
    assert "gate_choose" in last


@pytest.mark.parametrize("kernel", [kernel for _, kernel in sanitizer.PLANTED])
def test_a_planted_mistake_is_one(kernel):
    done = bench_run("planted", "--kernel", kernel)
    assert done.returncode != 0
    assert "KernelError" in done.stderr
