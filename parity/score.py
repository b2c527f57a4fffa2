"""What the audit said of planted faults, judged against what each fault expects, and summed to a score.

Detected: the run's verdict is fail by at least one gate that is no crash (a crash counts where the fault's data says so).
Right: the component, the kind of the layer and the phase of the first divergence are among the accepted ones. A run that did
not end is not run, and never detected. The score of the last whole sweep is kept beside the reference cache, with the hash of
the code it measured; every later report shows it.

    judge(fault, read_run(path), seconds) -> Outcome; Score.of(outcomes, clean, seconds).sentence; standing()

Nothing is run here: python -m parity.sweep does. Tests: parity/unit/test_sweep.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from parity.cache import cache_folder
from parity.planted import Fault
from probes.core.records import Divergence, Header, Record, RecordError, State, Summary, Verdict, read_run, verdicts
from probes.core.wording import plural
from reference.config import InputError

SCHEMA = 1
REDS = Path(__file__).with_name("faults") / "reds.json"  # gate -> ids of planted faults that turned it red: python -m parity.sweep --reds SWEEP_DIR
ROOT = Path(__file__).resolve().parents[1]
# What a score depends on: the model, the audit, and the faults.
CODE = ("reference/*.py", "production/**/*.py", "kernels/**/*.cu", "kernels/**/*.cuh", "kernels/**/*.h", "kernels/**/*.cpp", "probes/**/*.py", "parity/*.py", "parity/faults/*.toml")
DETECTED, UNDETECTED, NOT_RUN = "detected", "undetected", "not run"
NO_SWEEP = "no sweep has run on this machine: make faults"
# Shares that a sweep has to reach, of all its faults.
LEAST = {"detected": 1.0, "component": 0.95, "layer_kind": 0.90, "phase": 0.90}


# ---- one fault ----


@dataclass(frozen=True)
class Outcome:
    """One fault and what the audit said of it.

    state        detected, undetected or not run; gate  the failed gate at the first divergence, else the first that failed
    named        the component the audit names; exact  it is the catalogue's own
    right        component, layer_kind, phase: accepted by the fault's data; wrong  what is not, in words, empty when all is
    """

    id: str
    title: str
    component: str
    state: str
    gate: str = ""
    named: str = ""
    exact: bool = False
    point: str = ""
    layer: int | None = None
    layer_kind: str = ""
    phase: str = ""
    step: int | None = None
    seconds: float = 0.0
    right: dict[str, bool] = field(default_factory=lambda: dict.fromkeys(("component", "layer_kind", "phase"), False))
    wrong: str = ""


def not_run(fault: Fault, reason: str, seconds: float) -> Outcome:
    """A run that timed out, was refused or left no summary."""
    return Outcome(fault.id, fault.title, fault.component, NOT_RUN, seconds=seconds, wrong=reason)


def is_crash(verdict: Verdict) -> bool:
    """Production stopped, or an error that is no assertion ended a test: nothing was compared."""
    if verdict.gate in ("run", "collection") or "production stopped" in verdict.reason:
        return True
    if verdict.gate == "load" and verdict.rows == 0:
        return True
    return verdict.metric == "assertions of the test" and not verdict.reason.startswith(("AssertionError", "Failed"))


def judge(fault: Fault, records: Sequence[Record], seconds: float = 0.0) -> Outcome:
    """What a run with this fault planted says of it."""
    header, summary = records[0], records[-1]
    if not isinstance(header, Header) or not isinstance(summary, Summary):
        return not_run(fault, "the run was cut off: no summary", seconds)
    if header.inject != fault.id:
        return not_run(fault, f"the run is of {header.inject or 'no fault'}", seconds)
    failed = [r for r in records if isinstance(r, Verdict) and r.state is State.FAIL]
    counted = [v for v in failed if fault.crash or not is_crash(v)]
    if summary.verdict != "fail" or not counted:
        why = f"crash only: {failed[0].reason}" if failed else f"verdict {summary.verdict}" + "".join(f": {reason}" for reason in summary.reasons[:1])
        return Outcome(fault.id, fault.title, fault.component, UNDETECTED, seconds=seconds, wrong=why[:300])
    first = summary.first_divergence
    if first is None:
        return Outcome(fault.id, fault.title, fault.component, DETECTED, counted[0].gate, seconds=seconds, wrong="no first divergence is named")
    kinds = header.model.get("kinds", [])
    kind = kinds[first.layer] if first.layer is not None and first.layer < len(kinds) else ""
    right, wrong = _compare(fault, first, kind)
    return Outcome(
        fault.id, fault.title, fault.component, DETECTED, _gate_at(first, counted), first.component, first.component == fault.component,
        first.point, first.layer, kind, first.phase or "", first.step, seconds, right, "; ".join(wrong),
    )  # fmt: skip


def _compare(fault: Fault, first: Divergence, kind: str) -> tuple[dict[str, bool], list[str]]:
    expect, wrong = fault.expect, []
    components, kinds, phase = expect.get("components", [fault.component]), expect.get("layer_kinds"), expect.get("phase", "any")
    right = {"component": first.component in components, "layer_kind": kinds is None or kind in kinds, "phase": phase == "any" or first.phase == phase}
    if not right["component"]:
        wrong.append(f"component {first.component or 'none'}, expected {' or '.join(components)}")
    if not right["layer_kind"]:
        wrong.append(f"layer kind {kind or 'none'}, expected {' or '.join(kinds or [])}")
    if not right["phase"]:
        wrong.append(f"phase {first.phase or 'none'}, expected {phase}")
    return right, wrong


def _gate_at(first: Divergence, failed: list[Verdict]) -> str:
    at = [v for v in failed if v.point == first.point and v.phase == first.phase]
    return (at or failed)[0].gate


# ---- all of them ----


@dataclass(frozen=True)
class Clean:
    """A run without a fault, on the prompts of some of them. Green: its verdict is pass."""

    prompts: tuple[str, ...]
    verdict: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def green(self) -> bool:
        return self.verdict == "pass"


def judge_clean(prompts: tuple[str, ...], records: Sequence[Record], seconds: float = 0.0) -> Clean:
    """What a run without a fault says."""
    summary = records[-1]
    if not isinstance(summary, Summary):
        return Clean(prompts, NOT_RUN, "the run was cut off: no summary", seconds)
    failed = next((f"{r.gate} at {r.point}: {r.reason}" for r in records if isinstance(r, Verdict) and r.state is State.FAIL), "")
    return Clean(prompts, summary.verdict, "" if summary.verdict == "pass" else (failed or "".join(summary.reasons[:1]))[:300], seconds)


@dataclass(frozen=True)
class Score:
    """Counts over a sweep; every share is of all faults, also of those that were not detected or not run."""

    faults: int
    detected: int
    component: int
    exact: int
    layer_kind: int
    phase: int
    not_run: int
    clean: int
    clean_red: int
    seconds: float

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], clean: Iterable[Clean], seconds: float) -> Score:
        every, runs = list(outcomes), list(clean)
        found = [o for o in every if o.state == DETECTED]
        right = {name: sum(o.right[name] for o in found) for name in ("component", "layer_kind", "phase")}
        return cls(
            len(every), len(found), right["component"], sum(o.exact for o in found), right["layer_kind"], right["phase"],
            sum(o.state == NOT_RUN for o in every), len(runs), sum(not run.green for run in runs), seconds,
        )  # fmt: skip

    def share(self, count: int) -> float:
        """Of all faults; nothing planted is no success."""
        return count / self.faults if self.faults else 0.0

    @property
    def ok(self) -> bool:
        return self.clean_red == 0 and self.clean > 0 and all(self.share(getattr(self, name)) >= least for name, least in LEAST.items())

    @property
    def sentence(self) -> str:
        """The last line of a sweep."""
        missing = f" ({self.not_run} not run)" if self.not_run else ""
        parts = [f"{words} {getattr(self, name)} ({self.percent(name)})" for name, words in (("component", "component"), ("layer_kind", "layer kind"), ("phase", "phase"))]
        took = f"{self.seconds / 60:.0f} min" if self.seconds >= 90 else f"{self.seconds:.0f} s"
        return f"score: {self.detected} of {self.faults} detected{missing}, {', '.join(parts)}, {self.clean_red} of {self.clean} clean runs red, {took}"

    def percent(self, name: str) -> str:
        """One digit, and never rounded up to 100."""
        share = self.share(getattr(self, name))
        return f"{100 * share if share == 1 else min(100 * share, 99.9):.1f} %"


# ---- which faults turn a gate red ----


def reds_of(folder: Path) -> tuple[dict[str, list[str]], int]:
    """From the runs of a sweep's folder: gate -> ids of the faults that turned it red by rows it compared; and how many runs were read.

    Only runs of a planted fault count, by what their own header says was planted. A run that was cut off counts for what it had judged.
    Raises InputError where the folder holds none, or a run that cannot be read.
    """
    found: dict[str, set[str]] = {}
    runs = 0
    for path in sorted(folder.glob("*/run.jsonl")):
        try:
            records = read_run(path)
        except RecordError as error:
            if not path.read_bytes().count(b"\n"):
                continue  # just begun: not even its header is whole
            raise InputError(f"{path}: no readable run: {error}") from None
        header = records[0]
        if not isinstance(header, Header) or not header.inject:
            continue
        runs += 1
        for gate in {v.gate for v in verdicts(records) if v.state is State.FAIL and v.rows > 0 and not is_crash(v)}:
            found.setdefault(gate, set()).add(header.inject)
    if not runs:
        raise InputError(f"{folder}: no run of a planted fault; expected the folder of a sweep, with FAULT/run.jsonl")
    return {gate: sorted(ids) for gate, ids in sorted(found.items())}, runs


def write_reds(folder: Path, path: Path | None = None) -> str:
    """Write the file of reds from a sweep's folder, and say what it holds. Raises InputError or OSError."""
    reds, runs = reds_of(folder)
    (REDS if path is None else path).write_text(json.dumps(reds, indent=1) + "\n", encoding="utf-8")
    faults = {one for ids in reds.values() for one in ids}
    return f"reds: {plural(len(reds), 'gate')} turned red by {plural(len(faults), 'fault')}, from {plural(runs, 'run')}: {REDS if path is None else path}"


def known_reds(path: Path | None = None) -> dict[str, list[str]]:
    """Gate -> ids of planted faults, for a run's header; empty where no sweep has been stored. A file that says something else is an error."""
    path = REDS if path is None else path
    try:
        reds = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path}: {error}; next: python -m parity.sweep --reds SWEEP_DIR") from None
    if not isinstance(reds, dict) or not all(isinstance(ids, list) and ids and all(isinstance(one, str) for one in ids) for ids in reds.values()):
        raise InputError(f"{path}: expected gate -> list of fault ids; next: python -m parity.sweep --reds SWEEP_DIR")
    return reds


# ---- the score of this machine ----


def score_file() -> Path:
    """Beside the folder of the reference cache."""
    return cache_folder().parent / "faults-score.json"


def code_hash(root: Path = ROOT) -> str:
    """sha256 over the source files of CODE."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(root.glob(pattern)):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def keep(score: Score, date: str, code: str, path: Path | None = None) -> bool:
    """Write the score of a whole sweep, whole or not at all; False where the folder cannot be written."""
    path, temporary = score_file() if path is None else path, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, "date": date, "code": code, "score": asdict(score)}, file, indent=1)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


def standing(path: Path | None = None, code: str | None = None) -> str:
    """What a report says of the last whole sweep on this machine. A file that is no score counts as none."""
    try:
        kept: dict[str, Any] = json.loads((score_file() if path is None else path).read_text(encoding="utf-8"))
        if kept["schema"] != SCHEMA:
            return NO_SWEEP
        score, date, measured = Score(**kept["score"]), str(kept["date"]), str(kept["code"])
        said = f"{score.detected} of {score.faults} detected, component {score.percent('component')}"
    except (OSError, ValueError, KeyError, TypeError):
        return NO_SWEEP
    red = f", {score.clean_red} of {score.clean} clean runs red" if score.clean_red else ""
    same = "same code" if measured == (code_hash() if code is None else code) else "measured on other code"
    return f"{said}{red} (sweep of {date}, {same})"
