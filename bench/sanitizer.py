"""compute-sanitizer over this project's kernels: memcheck, racecheck and synccheck must be clean, planted mistakes must be found.

    python -m bench.sanitizer --out DIR            # all side by side, a table, DIR/sanitizer.json and DIR/sanitizer.log

What runs is bench/sanitizer_run.py: the bundled checkpoint's first four layers in both plans, eagerly, and every operation and
variant at Flash's sizes. torch's caching allocator is off, so that each tensor is an allocation whose end the tool knows; views of
one buffer are not told apart here, but by the CPU device's checked build. initcheck is told and not judged: torch's own kernels
copy buffers that are filled in part. Exit 0: everything planted was found and everything else is clean; 1: not so; 3: no GPU or
no compute-sanitizer.
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
# Given where this version knows them; calls of torch that fail on purpose are no errors of ours.
HELPFUL = (("--padding", "512"), ("--launch-timeout", "120"), ("--print-limit", "20"), ("--report-api-errors", "no"))
MEMCHECK_ONLY = ("--padding", "--report-api-errors")


@dataclass
class Job:
    """One process. state: clean, errors, found, not found, failed (it ended otherwise), timeout."""

    tool: str
    what: str
    arguments: list[str]
    planted: bool = False
    judged: bool = True
    state: str = "not run"
    errors: int | None = None
    exit_code: int | None = None
    launches: int = 0
    seconds: float = 0.0
    first: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.state == ("found" if self.planted else "clean") or not self.judged


def jobs() -> list[Job]:
    found = [Job(tool, kernel, ["planted", "--kernel", kernel], planted=True) for tool, kernel in PLANTED]
    for tool in TOOLS:
        found += [Job(tool, f"model, {plan}", ["model", "--variants", plan]) for plan in ("portable", "fast")]
        parts = APART if tool == "racecheck" else ()  # one process would take minutes
        found += [Job(tool, f"operations, {text}", ["operations", "--only", text]) for text in parts]
        found.append(Job(tool, "operations" + ", others" * bool(parts), ["operations", *(word for text in parts for word in ("--but", text))]))
    found.append(Job("initcheck", "model, fast", ["model", "--variants", "fast"], judged=False))
    return found


SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed")


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
    elif job.planted:
        job.state = "found" if job.errors and exit_code else "not found"
    elif job.errors == 0 and exit_code == 0 and job.launches:
        job.state = "clean"
    else:
        job.state = "errors" if job.errors else "failed"


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or next((str(p) for p in [Path("/usr/local/cuda/bin/compute-sanitizer")] if p.exists()), None)


def extras(tool: str) -> dict[str, list[str]]:
    """Options by check: those of HELPFUL that this version's help names."""
    text = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=60).stdout
    known = [(name, value) for name, value in HELPFUL if name in text]
    return {check: [word for name, value in known if name not in MEMCHECK_ONLY or check == "memcheck" for word in (name, value)] for check in (*TOOLS, "initcheck")}


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
    args.out.mkdir(parents=True, exist_ok=True)
    run(chosen, tool, args.seconds, args.out / "sanitizer.log")
    from bench.harness import text_table

    rows = [[job.tool, job.what, "" if job.errors is None else str(job.errors), "-" if job.exit_code is None else str(job.exit_code), str(job.launches), f"{job.seconds:.0f}", job.state + ("" if job.judged else " (not judged)")] for job in chosen]
    print(text_table(("tool", "what", "errors", "exit", "launches", "s", "state"), rows))
    for job in chosen:
        if not job.ok or (job.errors and not job.planted):
            print(f"{job.tool}, {job.what}: " + " | ".join(job.first)[:600])
    content = {"tool": tool, "seconds": time.perf_counter() - began, "jobs": [asdict(job) for job in chosen]}
    (args.out / "sanitizer.json").write_text(json.dumps(content, indent=1) + "\n")
    bad = [job for job in chosen if not job.ok]
    print(f"{len(chosen) - len(bad)} of {len(chosen)} as expected, {content['seconds']:.0f} s, {args.out / 'sanitizer.log'}", flush=True)
    sys.exit(1 if bad or not chosen else 0)


if __name__ == "__main__":
    main()
