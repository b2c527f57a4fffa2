"""bench/sanitizer.py without a card: what counts as clean and as found, with a stand-in for the tool; what runs, on the CPU device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import sanitizer
from bench.sanitizer import ERRORS, FALSE_REPORT, HANDOFFS, NOT_FOLLOWED, NOT_JUDGED, TOOLS, Job, jobs, judge, run, settle
from production.launch import open_device
from production.signatures import kernel_names

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


def race(*kernels: str, displayed: int | None = None, errors: int | None = None) -> str:
    """A report as of compute-sanitizer 2025: one race a kernel."""
    told = "".join(
        f"========= Error: Race reported between Read access at {k}+0x14850\n=========     and Write access at {k}+0x1d040 [672 hazards]\n========= \n"
        for k in kernels
    )
    return f"{RAN}{told}========= RACECHECK SUMMARY: {len(kernels) if displayed is None else displayed} hazards displayed ({len(kernels) if errors is None else errors} errors, 0 warnings)\n"


def shown(**states: str) -> list[Job]:
    return [Job("racecheck", kernel, [], expected=state, state=states.get(kernel, state)) for kernel, state in HANDOFFS.items()]


WGMMA = ("sparse_attn_wgmma", "sparse_attn_wgmma_split_p_bf16")


@pytest.mark.parametrize(
    ("text", "tool", "code", "state"),
    [
        (race(*WGMMA), "racecheck", ERRORS, NOT_JUDGED),
        (race(*WGMMA, "sparse_attn_combine"), "racecheck", ERRORS, "errors"),
        (race("flash_512_h16_p1"), "racecheck", ERRORS, "errors"),
        (race(*WGMMA, errors=95), "racecheck", ERRORS, "errors"),  # whose the other 93 are is not known
        (race(*WGMMA, displayed=3, errors=3), "racecheck", ERRORS, "errors"),  # one that is not understood
        (race(*WGMMA), "racecheck", 1, "errors"),
        (race(*WGMMA).replace(RAN, ""), "racecheck", ERRORS, "errors"),
        (race(*WGMMA).replace("and Write access at sparse_attn_wgmma+", "and Write access at topk_radix+"), "racecheck", ERRORS, "errors"),
        (race(*WGMMA), "synccheck", ERRORS, "errors"),
        (RAN + "========= Invalid __shared__ read at sparse_attn_wgmma+0x10\n========= ERROR SUMMARY: 1 error\n", "memcheck", ERRORS, "errors"),
    ],
)
def test_races_are_not_judged_in_kernels_that_racecheck_does_not_follow_and_nowhere_else(text, tool, code, state):
    job = Job(tool, "operations, sparse_attn", [])
    judge(job, text, code)
    assert job.state == state
    assert bool(job.reason) == job.ok == (state == NOT_JUDGED)


def test_what_is_not_judged_is_an_error_where_the_run_does_not_show_why():
    def settled(before: list[Job]) -> Job:
        job = Job("racecheck", "x", [])
        judge(job, race(*WGMMA), ERRORS)
        settle([*before, job])
        return job

    assert settled(shown()).ok
    assert not settled([]).ok, "nothing shown"
    assert not settled(shown()[:-1]).ok
    assert not settled(shown(**{FALSE_REPORT: "clean"})).ok, "a tool that follows the hand-over must be believed"
    assert not settled(shown(handoff_nobody_waits="not found")).ok, "a tool that finds no race must not be believed"
    job = settled(shown(handoff_every_lane_arrives="errors"))
    assert job.state == "errors"
    assert "judged" in job.reason


def test_names_that_are_not_judged_begin_kernels_of_one_file_that_hands_over_by_one_lane():
    sources = {path.name: path.read_text() for path in sorted((ROOT / "kernels").glob("*.cu"))}
    for name in NOT_FOLLOWED:
        files = [source for source, text in sources.items() if any(kernel.startswith(name) for kernel in kernel_names(text))]
        assert files == [f"{name}.cu"]
        assert "mbarrier_arrive_warp(" in sources[files[0]]
    assert [source for source, text in sources.items() if "mbarrier_arrive_warp(" in text] == [f"{name}.cu" for name in NOT_FOLLOWED]


@pytest.mark.parametrize("kernel", [kernel for kernel in HANDOFFS if kernel != "handoff_nobody_waits"])
def test_a_handover_that_racecheck_must_tell_apart_is_right(kernel):
    device = open_device("cpu", kernels_dir=ROOT / "parity" / "unit" / "cpu_device" / "kernels", emulate="sm_90a")
    y = torch.full((64,), -1.0)
    device.launch("planted_handoffs", kernel, (1,), (64,), (y,), 1024)
    assert y[32:].tolist() == list(range(31, -1, -1))


def test_every_tool_sees_a_planted_mistake_and_both_plans():
    found = jobs()
    assert {j.what: j.expected for j in found if j.expected} == HANDOFFS
    found = [j for j in found if not j.expected]
    for tool in TOOLS:
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
if "racecheck" in sys.argv:
    assert int(sys.argv[sys.argv.index("--print-limit") + 1]) >= 1000
if "race_on_reuse" in sys.argv:
    time.sleep(60)
bad = "planted" in sys.argv and "handoff_every_lane_arrives" not in sys.argv
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
    assert {what: state for (_, what), state in states.items() if what in HANDOFFS} == HANDOFFS
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
