"""Plant every fault, one audit each, and say what the audit made of it: detected, and named by component, layer kind, phase.

    python -m parity.sweep                                  (make faults)
    python -m parity.sweep --only B060,B090 --jobs 1
    python -m parity.sweep --component "SWA ring" --faults my-faults/
    python -m parity.sweep --reds SWEEP_DIR                 (plants nothing: parity/faults/reds.json from a sweep that ran)

First the same profile without a fault, which must be green and fills the reference cache: once on the default prompt, once on
each other set of prompts and options that a fault asks for. Then `pytest parity/ --inject ID` per fault, each in a folder of its own. Writes
sweep.json, sweep.csv and sweep.html; judged by parity/score.py, drawn by reports/sweep.py.
Exit 0: every fault detected, component right in 95 %, layer kind and phase in 90 %, runs without a fault green. 1: not so.
2: bad input, in one line, before anything runs. 130: stopped. Tests: parity/unit/test_sweep.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from parity import score
from parity.planted import FAULTS, Fault, plant, read_faults
from parity.score import Clean, Outcome, Score
from probes.core.records import RecordError, read_run
from reference.config import InputError

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "reports" / "runs"
TIMEOUT = 600.0  # seconds of one run
GRACE = 20.0  # seconds to close the ledger after being told to stop
POLL = 0.2
OK, SHORT, BAD_INPUT, STOPPED = 0, 1, 2, 130
LOG = "pytest.log"


# ---- one run ----


@dataclass
class Run:
    """One `pytest parity/` in a process group of its own. fault None: without one; options go with a fault only, `alike` without one."""

    fault: Fault | None
    prompts: tuple[str, ...]
    folder: Path
    options: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    started: float = 0.0
    seconds: float = 0.0
    code: int | None = None
    trouble: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    def command(self) -> list[str]:
        words = [sys.executable, "-m", "pytest", "parity/", "--profile", "faults", "--report", str(self.folder), "-q", "--tb=short"]
        for prompt in self.prompts:
            words += ["--prompt", prompt]
        return words + (["--inject", self.fault.id, *self.options] if self.fault is not None else list(self.alike))

    @property
    def temporary(self) -> Path:
        """Where the run's copy of production lies, removed with it."""
        return self.folder / "tmp"

    def start(self) -> None:
        self.temporary.mkdir(parents=True, exist_ok=True)
        (self.folder / "run.jsonl").unlink(missing_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        self._log = (self.folder / LOG).open("wb")
        self.started = time.perf_counter()
        self._process = subprocess.Popen(self.command(), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True)

    def done(self, timeout: float = TIMEOUT) -> bool:
        """True once it has ended, by itself or because its time was up."""
        assert self._process is not None
        self.code = self._process.poll()
        self.seconds = time.perf_counter() - self.started
        if self.code is None and self.seconds > timeout:
            self.trouble = f"stopped after {timeout:.0f} s"
            stop([self])
        if self.code is None and not self.trouble:
            return False
        self.close()
        return True

    def signal(self, number: int) -> None:
        """To the whole group, so that compilers end too."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def ended(self, patience: float) -> bool:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(max(0.0, patience))
        return self.code is not None

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
        shutil.rmtree(self.temporary, ignore_errors=True)

    def why(self) -> str:
        """Why there is nothing to judge; empty when there is."""
        if self.trouble:
            return self.trouble
        if self.code in (0, 1):
            return ""
        lines = [line.strip() for line in (self.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
        return f"pytest ended with {self.code}: {said[:200]}"

    def outcome(self) -> Outcome:
        """Judged; a run that did not end is not run."""
        assert self.fault is not None
        reason = self.why()
        if not reason:
            try:
                return score.judge(self.fault, read_run(self.folder / "run.jsonl"), self.seconds)
            except (OSError, RecordError) as error:
                reason = f"no readable run: {error}"
        return score.not_run(self.fault, reason, self.seconds)

    def clean(self) -> Clean:
        reason = self.why()
        if not reason:
            try:
                return score.judge_clean((*self.prompts, *self.alike), read_run(self.folder / "run.jsonl"), self.seconds)
            except (OSError, RecordError) as error:
                reason = f"no readable run: {error}"
        return Clean((*self.prompts, *self.alike), score.NOT_RUN, reason, self.seconds)


def stop(runs: Sequence[Run]) -> None:
    """Ask all to end, which closes their ledgers; after a while end them."""
    for run in runs:
        run.signal(signal.SIGTERM)
    until = time.monotonic() + GRACE
    for run in runs:
        run.ended(until - time.monotonic())
        run.signal(signal.SIGKILL)  # itself, or what it had started
        run.ended(GRACE)
        run.close()


def in_turn(runs: Sequence[Run], jobs: int, timeout: float = TIMEOUT) -> Generator[Run]:
    """Start them in order, `jobs` at a time; yield each as it ends. Whatever ends this early ends what still runs."""
    waiting = list(runs)
    running: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running.append(run)
                run.start()
            time.sleep(POLL)
            for run in [run for run in running if run.done(timeout)]:
                running.remove(run)
                yield run
    finally:
        stop(running)


# ---- the sweep ----


COLUMNS = (("fault", 6), ("component", 18), ("state", 12), ("red gate", 26), ("named", 21), ("first point", 28), ("phase", 12), ("time", 6))


@dataclass
class Sweep:
    """What is asked for, and what came out."""

    faults: list[Fault]
    folder: Path
    jobs: int
    options: tuple[str, ...] = ()
    whole: bool = False  # of the project's own list: its score is kept
    timeout: float = TIMEOUT
    outcomes: list[Outcome] = field(default_factory=list)
    clean: list[Clean] = field(default_factory=list)
    started: str = ""
    seconds: float = 0.0
    _begun: float = 0.0

    def run(self) -> Score:
        """All runs, then the files. What was judged before an interruption is written too."""
        self._begun, code = time.perf_counter(), score.code_hash()
        self.started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        total = len(self.faults)
        try:
            self._clean_runs()
            print("".join(name.ljust(width) for name, width in COLUMNS) + "right?", flush=True)
            runs = [Run(fault, fault.prompts, self.folder / fault.id, self.options) for fault in self.faults]
            with contextlib.closing(in_turn(runs, self.jobs, self.timeout)) as ended:
                for run in ended:
                    self.outcomes.append(run.outcome())
                    print(f"{row_of(self.outcomes[-1])}   {len(self.outcomes)}/{total}, {self._left(total)}", flush=True)
        finally:
            self.seconds = time.perf_counter() - self._begun
            self.write()
        if self.whole and score.code_hash() == code:
            kept = score.keep(self.score, self.started[:10], code)
            print("the next reports show this score" if kept else f"{score.score_file()} cannot be written: no report shows this score")
        elif self.whole:
            print("the code changed while the sweep ran: no report shows this score")
        return self.score

    def _clean_runs(self) -> None:
        sets = dict.fromkeys([((), ()), *((fault.prompts, fault.options) for fault in self.faults)])
        runs = [Run(None, prompts, self.folder / f"_clean{number}", alike=alike) for number, (prompts, alike) in enumerate(sets, 1)]
        with contextlib.closing(in_turn(runs, self.jobs, self.timeout)) as ended:
            for run in ended:
                self.clean.append(one := run.clean())
                print(f"without a fault, {' and '.join(one.prompts) or 'default prompt'}: {one.verdict}{': ' + one.reason if one.reason else ''}, {one.seconds:.0f} s", flush=True)

    @property
    def score(self) -> Score:
        return Score.of(self.outcomes, self.clean, self.seconds)

    def _left(self, total: int) -> str:
        mean = sum(o.seconds for o in self.outcomes) / len(self.outcomes)
        left = mean * (total - len(self.outcomes)) / self.jobs
        return f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"

    def write(self) -> None:
        """sweep.json, sweep.csv, sweep.html."""
        import pandas

        values = {
            "type": "sweep", "schema": score.SCHEMA, "started": self.started, "seconds": self.seconds, "faults": len(self.faults),
            "score": {**asdict(self.score), "ok": self.score.ok, "sentence": self.score.sentence},
            "clean": [{**asdict(one), "green": one.green} for one in self.clean], "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }  # fmt: skip
        path = self.folder / "sweep.json"
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        rows = [{**{k: v for k, v in asdict(o).items() if k != "right"}, **{f"right_{k}": v for k, v in o.right.items()}} for o in self.outcomes]
        pandas.DataFrame(rows).to_csv(self.folder / "sweep.csv", index=False)
        # Reports import what they draw, never the other way round: so in a process of its own.
        drawn = subprocess.run([sys.executable, "-m", "reports.sweep", str(path)], cwd=ROOT, capture_output=True, text=True, start_new_session=True)
        if drawn.returncode:
            print(f"sweep.html was not drawn: {(drawn.stderr.strip().splitlines() or ['no reason given'])[-1]}", file=sys.stderr)


def row_of(o: Outcome) -> str:
    """One line of the table."""
    phase = o.phase + (f" {o.step}" if o.step is not None else "")
    cells = (o.id, o.component, o.state, o.gate, o.named, o.point, phase, f"{o.seconds:.0f} s")
    return "".join((text if len(text) < width else text[: width - 2] + "…").ljust(width) for text, (_, width) in zip(cells, COLUMNS, strict=True)) + (o.wrong or "right")


# ---- command line ----


class _Parser(argparse.ArgumentParser):
    """Usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="python -m parity.sweep", description="Plant every fault, one audit each, and judge what the audit says of it.",
        epilog="example: python -m parity.sweep --only B060,B090 --jobs 1\n\nexit codes: 0 all as it should be, 1 not so, 2 bad input, 130 stopped",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--faults", metavar="FILE|DIR", type=Path, help="list, or folder of lists, instead of parity/faults/")
    made.add_argument("--only", metavar="ID,ID", help="these faults (may be one)")
    made.add_argument("--component", metavar="NAME", help="faults of one component, e.g. 'SWA ring'")
    made.add_argument("--jobs", metavar="N", default="2", help="audits at a time (default: 2)")
    made.add_argument("--report", metavar="DIR", type=Path, help="where everything goes (default: reports/runs/<date>-faults)")
    made.add_argument("--reds", metavar="SWEEP_DIR", type=Path, help="plant nothing: write parity/faults/reds.json, which faults turned which gate red, from a sweep that ran")
    return made


def chosen(path: Path, only: str | None, component: str | None) -> list[Fault]:
    """The faults asked for, each of which still applies. Raises InputError."""
    every = read_faults(path)
    faults = list(every.values())
    if only is not None:
        ids = [name.strip() for name in only.split(",") if name.strip()]
        for name in ids:
            if name not in every:
                near = difflib.get_close_matches(name, every, n=1) or sorted(every)[:1]
                raise InputError(f"--only {name}: no such fault; nearest is {near[0]!r}, {len(every)} known")
        faults = [every[name] for name in dict.fromkeys(ids)]
    if component is not None:
        known = sorted({fault.component for fault in every.values() if fault.component})
        if component not in known:
            raise InputError(f"--component {component}: expected one of {', '.join(known) or 'none: the list names no component'}")
        faults = [fault for fault in faults if fault.component == component]
    if not faults:
        raise InputError("no fault is left to plant")
    for fault in faults:
        shutil.rmtree(plant(fault))
    return faults


def folder_of(given: Path | None) -> Path:
    """A folder that can be written. Raises InputError."""
    if given is None:
        given = RUNS / f"{datetime.datetime.now().strftime('%Y-%m-%dT%H%M%S')}-faults"
    folder = Path(os.path.abspath(given))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"--report {given}: {error.strerror}") from None
    return folder


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    asked: Any = parser().parse_args(arguments)
    try:
        if asked.reds is not None:
            print(score.write_reds(asked.reds))
            return OK
        if not asked.jobs.isascii() or not asked.jobs.isdigit() or not 1 <= int(asked.jobs) <= 64:
            raise InputError(f"--jobs {asked.jobs}: expected a whole number from 1 to 64")
        faults = chosen(asked.faults or FAULTS, asked.only, asked.component)
        folder = folder_of(asked.report)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    options = ("--faults", str(asked.faults.resolve())) if asked.faults is not None else ()
    whole = asked.faults is None and asked.only is None and asked.component is None
    sweep = Sweep(faults, folder, int(asked.jobs), options, whole)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = sweep.run()
    except KeyboardInterrupt:
        print(f"stopped; what was judged is in {folder}", file=sys.stderr)
        return STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"report: {os.path.relpath(folder / 'sweep.html')}")
    print(result.sentence)
    return OK if result.ok else SHORT


if __name__ == "__main__":
    sys.exit(main())
