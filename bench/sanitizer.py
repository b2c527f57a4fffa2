"""compute-sanitizer over this project's kernels: memcheck, racecheck and synccheck must be clean, planted mistakes must be found.

    python -m bench.sanitizer --out DIR            # all side by side, a table, DIR/sanitizer.json and DIR/sanitizer.log

What runs is bench/sanitizer_run.py: the bundled checkpoint's first four layers in both plans, eagerly, and every operation and
variant at Flash's sizes. torch's caching allocator is off, so that each tensor is an allocation whose end the tool knows; views of
one buffer are not told apart here, but by the CPU device's checked build. initcheck is told and not judged: torch's own kernels
copy buffers that are filled in part. Exit 0: everything planted was found and everything else is clean; 1: not so; 3: no GPU or
no compute-sanitizer.

Races that racecheck reports in kernels of NOT_FOLLOWED alone are told, not judged, and only if the same run shows the reason: it
must report a hand-over of planted_handoffs.cu that is right (FALSE_REPORT), and tell two more apart. memcheck and synccheck judge
these kernels, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
APART = ("sparse_attn", "linear_", "experts_")  # tests of operations with many launches
ERRORS = 9  # exit code of the tool when it found something
# Mistakes of parity/unit/cpu_device/kernels/planted_bugs.cu, and the tool that must find each.
PLANTED = (
    ("memcheck", "write_past_tensor"), ("memcheck", "read_before_tensor"), ("memcheck", "past_dynamic_shared"),
    ("racecheck", "race_across_warps"), ("racecheck", "race_on_reuse"), ("synccheck", "barrier_in_branch"),
)  # fmt: skip
# Of planted_handoffs.cu, for sm_90a: by every lane's arrival, clean; without a wait, found; by one lane's arrival, right and yet reported.
HANDOFFS = {"handoff_every_lane_arrives": "clean", "handoff_nobody_waits": "found", "handoff_one_lane_arrives": "found"}
FALSE_REPORT = "handoff_one_lane_arrives"
# Kernels, by how their names begin, whose races are not judged. Of sparse_attn_wgmma, by its machine code on an H200: all reported
# pairs are a store of one warpgroup to AT_STATE or AT_SUMS and the load of it by the other, behind mbarrier_arrive_warp and
# mbarrier_wait of LARGEST_READY, P_READY + 1 or SUMS_READY; counts are multiples of 7 because 8 lanes of a warp store, and of lane 0,
# which arrives, nothing is reported, nor of AT_SEEN and AT_WORK, which lane 0 alone stores. Each is stored again after a wait behind the load:
#   state[0]  read by 1, P_READY + 1, next pair written by 0      state[1]  read by 0, P_READY, next pair written by 1
#   sums      two items apart, with SUMS_READY of the item between
NOT_FOLLOWED = {
    "sparse_attn_wgmma": "racecheck takes an mbarrier's arrival for its own thread's alone: stores of other lanes before the warp's __syncwarp and the arrival of lane 0 count as unordered",
}
# Given where this version knows them; calls of torch that fail on purpose are no errors of ours.
HELPFUL = (("--padding", "512"), ("--launch-timeout", "120"), ("--print-limit", "20"), ("--report-api-errors", "no"))
MEMCHECK_ONLY = ("--padding", "--report-api-errors")


NOT_JUDGED = "not judged"


@dataclass
class Job:
    """One process. state: clean, errors, found, not found, failed (it ended otherwise), timeout; not judged: races of NOT_FOLLOWED alone."""

    tool: str
    what: str
    arguments: list[str]
    planted: bool = False
    judged: bool = True
    expected: str = ""  # of HANDOFFS: its state
    reason: str = ""  # why it is not judged
    state: str = "not run"
    errors: int | None = None
    exit_code: int | None = None
    launches: int = 0
    seconds: float = 0.0
    first: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.state == (self.expected or ("found" if self.planted else "clean")) or not self.judged or self.state == NOT_JUDGED


def jobs() -> list[Job]:
    found = [Job(tool, kernel, ["planted", "--kernel", kernel], planted=True) for tool, kernel in PLANTED]
    found += [Job("racecheck", kernel, ["planted", "--kernel", kernel], expected=state) for kernel, state in HANDOFFS.items()]
    for tool in TOOLS:
        found += [Job(tool, f"model, {plan}", ["model", "--variants", plan]) for plan in ("portable", "fast")]
        parts = APART if tool == "racecheck" else ()  # one process would take minutes
        found += [Job(tool, f"operations, {text}", ["operations", "--only", text]) for text in parts]
        found.append(Job(tool, "operations" + ", others" * bool(parts), ["operations", *(word for text in parts for word in ("--but", text))]))
    found.append(Job("initcheck", "model, fast", ["model", "--variants", "fast"], judged=False))
    return found


SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
RACE = re.compile(r"^=+ +(?:\w+: )?Race reported between .*(?:\n=+ +and .*)*", re.MULTILINE)


def only_not_followed(text: str) -> str:
    """Why none of a process's races is judged: all are told, and each lies in kernels of NOT_FOLLOWED. "" if not so."""
    counts = [[int(number) for number in match.groups()[1:]] for match in SUMMARY.finditer(text) if match[2]]
    if len(counts) != 1 or counts[0][0] != sum(counts[0][1:]):
        return ""  # more were found than are displayed
    races = [re.findall(r"access at (\w+)\+0x", race) for race in RACE.findall(text)]
    if len(races) != counts[0][0] or not all(len(kernels) >= 2 for kernels in races):
        return ""
    whose = {next((name for name in NOT_FOLLOWED if kernel.startswith(name)), "") for kernels in races for kernel in kernels}
    return "" if "" in whose or not whose else "; ".join(f"{name}: {NOT_FOLLOWED[name]}" for name in sorted(whose))


def judge(job: Job, text: str, exit_code: int | None) -> None:
    """State, errors and launches from what the process printed."""
    job.exit_code = exit_code
    counts = [int(number) for match in SUMMARY.finditer(text) for number in match.groups() if number]
    job.errors = max(counts) if counts else None
    ran = re.findall(r"^ran (\{.*\})$", text, re.MULTILINE)
    job.launches = sum(json.loads(ran[-1]).values()) if ran else 0
    job.first = [line.strip("= \n") for line in text.splitlines() if line.startswith("=========") and "COMPUTE-SANITIZER" not in line][:6]
    if exit_code is None:
        job.state = "timeout"
    elif job.planted or job.expected == "found":
        job.state = "found" if job.errors and exit_code else "not found"
    elif job.errors == 0 and exit_code == 0 and job.launches:
        job.state = "clean"
    else:
        job.state = "errors" if job.errors else "failed"
        if job.state == "errors" and job.tool == "racecheck" and not job.expected and exit_code == ERRORS and job.launches:
            job.reason = only_not_followed(text)
            job.state = NOT_JUDGED if job.reason else "errors"


def settle(done: list[Job]) -> None:
    """Races of NOT_FOLLOWED stay errors where this run has not shown that the tool reports what is right and tells the rest apart."""
    shown = {job.what: job.ok for job in done if job.what in HANDOFFS}
    for job in done:
        if job.state == NOT_JUDGED and not (len(shown) == len(HANDOFFS) and all(shown.values())):
            job.state, job.reason = "errors", f"{FALSE_REPORT} and its like did not come out as expected in this run: judged"


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next((str(p) for p in [Path("/usr/local/cuda/bin/compute-sanitizer")] if p.exists()), None)


def extras(tool: str) -> dict[str, list[str]]:
    """Options by check: those of HELPFUL that this version's help names. Races are told all: which kernels they are of decides."""
    text = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=60).stdout
    known = [(name, value) for name, value in HELPFUL if name in text]
    given = {check: [word for name, value in known if name not in MEMCHECK_ONLY or check == "memcheck" for word in (name, value)] for check in (*TOOLS, "initcheck")}
    if "--print-limit" in given["racecheck"]:
        given["racecheck"][given["racecheck"].index("--print-limit") + 1] = "100000"
    return given


def run(all_jobs: list[Job], tool: str, seconds: float, log: Path) -> None:
    """Every job at once, each with one thread of torch; what runs longer than `seconds` is ended."""
    options = extras(tool)
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, job in enumerate(all_jobs):
            command = [tool, "--tool", job.tool, "--error-exitcode", str(ERRORS), *options[job.tool], sys.executable, "-m", "bench.sanitizer_run", *job.arguments]
            output = Path(folder) / f"{number}.log"
            with output.open("w") as file:
                running.append((job, output, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)))
        left = list(running)
        while left and time.perf_counter() - began < seconds:
            time.sleep(0.2)
            for one in [one for one in left if one[2].poll() is not None]:
                one[0].seconds = time.perf_counter() - began
                left.remove(one)
        for job, _, process in left:
            process.kill()
            process.wait()
            job.seconds = time.perf_counter() - began
        unfinished = {id(process) for _, _, process in left}
        with log.open("w") as file:
            for job, output, process in running:
                text = output.read_text(errors="replace")
                judge(job, text, None if id(process) in unfinished else process.returncode)
                file.write(f"#### {job.tool}, {job.what}: {job.state}, exit {job.exit_code}\n{text if len(text) < 20_000 else text[:12_000] + ' ... ' + text[-6_000:]}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sanitizer")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path(os.environ.get("OUT", ROOT / "reports" / "runs" / "bench")), help="where sanitizer.json and sanitizer.log go (default: $OUT)")
    parser.add_argument("--seconds", type=float, metavar="N", default=100.0, help="processes that run longer are ended (default: 100)")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="jobs whose 'tool what' holds this text")
    args = parser.parse_args()
    tool = sanitizer()
    from production.launch import cuda_missing, open_device

    missing = cuda_missing() or (None if tool else "compute-sanitizer is not on the PATH, nor in /usr/local/cuda/bin")
    if missing or tool is None:
        print(f"not run: {missing}")
        sys.exit(3)
    began = time.perf_counter()
    open_device("cuda").prebuild()  # once, and not under a tool
    chosen = [job for job in jobs() if not args.only or any(text in f"{job.tool} {job.what}" for text in args.only)]
    if any(job.tool == "racecheck" and not job.planted for job in chosen):
        chosen = [job for job in jobs() if job.what in HANDOFFS] + [job for job in chosen if job.what not in HANDOFFS]
    args.out.mkdir(parents=True, exist_ok=True)
    run(chosen, tool, args.seconds, args.out / "sanitizer.log")
    settle(chosen)
    from bench.harness import text_table

    rows = [[job.tool, job.what, "" if job.errors is None else str(job.errors), "-" if job.exit_code is None else str(job.exit_code), str(job.launches), f"{job.seconds:.0f}", job.state + ("" if job.judged else " (not judged)")] for job in chosen]
    print(text_table(("tool", "what", "errors", "exit", "launches", "s", "state"), rows))
    for job in chosen:
        if job.reason:
            print(f"{job.tool}, {job.what}: {job.state}: {job.reason}")
        if not job.ok or (job.errors and not job.planted):
            print(f"{job.tool}, {job.what}: " + " | ".join(job.first)[:600])
    content = {"tool": tool, "seconds": time.perf_counter() - began, "jobs": [asdict(job) for job in chosen]}
    (args.out / "sanitizer.json").write_text(json.dumps(content, indent=1) + "\n")
    bad = [job for job in chosen if not job.ok]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} as expected, {content['seconds']:.0f} s, {args.out / 'sanitizer.log'}", flush=True)
    sys.exit(1 if bad or not chosen else 0)


if __name__ == "__main__":
    main()
