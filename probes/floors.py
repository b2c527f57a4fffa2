"""Noise floors on several prompts, with their spread, and how much of each limit production spent.

One audit of the points per prompt (`pytest parity/test_layers.py parity/test_logits.py`, in a process of its own, with the
reference's cache), or the run.jsonl of audits that are there already; then one table. A floor that differs much between prompts
leaves a limit that means little: the spread says how far a limit may be trusted on another text. Tests: parity/unit/test_floors.py.

    python -m probes.floors --prompt short.txt --prompt medium.txt:0:250 --layers 0-3 --steps 12
    python -m probes.floors reports/runs/A/run.jsonl reports/runs/B/run.jsonl
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probes.core.cli import Answer, CannotMeasureError, Table, answer, ask_of, number, probe_parser, say
from probes.core.records import Header, Record, RecordError, State, Verdict, read_run
from production.launch import cuda_missing
from reference.config import InputError
from reference.points import LAYER_POINTS, MODEL_POINTS

DESCRIPTION = "Noise floor of every point on several prompts: spread, limits, smallest passing limits, share of the limits spent."
EXAMPLE = "python -m probes.floors --prompt short.txt --prompt medium.txt:0:250 --layers 0-3 --steps 12"
ROOT = Path(__file__).resolve().parents[1]
AUDITED = ("parity/test_layers.py", "parity/test_logits.py")
CHAINS = ("isolated", "free")
ORDER = [spec.name for spec in (*LAYER_POINTS, *MODEL_POINTS)]


@dataclass
class Seen:
    """One point, chain and layer in one run, over phases and groups of steps.

    floor   the run's noise floor; limit, smallest  of the first number (worst row, or score gap), where it spent most
    spent   most of any number's limit; number  that number
    """

    floor: float = math.nan
    limit: float = math.nan
    smallest: float = math.nan
    share: float = -1.0
    spent: float = -1.0
    number: str = ""


@dataclass
class Spread:
    """A point and chain over all runs: floor per run (its largest layer), and the tightest cell of all."""

    point: str
    chain: str
    floors: list[float] = field(default_factory=list)
    tight: Seen = field(default_factory=Seen)
    at: tuple[int, int | None] = (0, None)

    @property
    def row(self) -> dict[str, Any]:
        floors = [floor for floor in self.floors if not math.isnan(floor)]
        lowest, middle, highest = (min(floors), statistics.median(floors), max(floors)) if floors else (math.nan,) * 3
        return {
            "point": self.point, "chain": self.chain, "floors": self.floors, "floor_min": lowest, "floor_median": middle, "floor_max": highest,
            "limit": self.tight.limit, "smallest_passing_limit": self.tight.smallest, "spent_of_it": self.tight.share, "run": self.at[0], "layer": self.at[1],
            "spent": self.tight.spent, "spent_by": self.tight.number,
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("floors", DESCRIPTION, EXAMPLE)
    parser.add_argument("runs", metavar="RUN.jsonl", nargs="*", help="runs of the audit to read instead of running it on prompts")
    return answer("floors", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    runs = [_read(Path(path)) for path in args.runs] if args.runs else _audit(args)
    labels = [", ".join(header.prompts) for header, _ in runs]
    seen = [cells(records) for _, records in runs]
    if not any(seen):
        raise CannotMeasureError("no comparison with a noise floor was judged in any run")
    found = spreads(seen)
    columns = [*(f"floor {i + 1}" for i in range(len(runs))), "min", "median", "max", "limit", "smallest passing", "spent", "of run", "layer", "most spent of any number"]
    tables = []
    for chain in CHAINS:
        table = Table(f"{chain}: floor per run, its spread; limit and smallest passing limit where most of it was spent", ["point", *columns])
        for row in (one.row for one in found if one.chain == chain):
            most = f"{_percent(row['spent'])} {row['spent_by']}"
            table.add(row["point"], *map(number, row["floors"]), *(number(row[key]) for key in ("floor_min", "floor_median", "floor_max", "limit", "smallest_passing_limit")),
                      _percent(row["spent_of_it"]), row["run"] + 1, "-" if row["layer"] is None else row["layer"], most)  # fmt: skip
        tables.append(table)
    failed = [sum(v.state is not State.PASS for v in _verdicts(records)) for _, records in runs]
    notes = [f"run {i + 1}: {label}" + (f"; {count} comparisons did not pass" if count else "") for i, (label, count) in enumerate(zip(labels, failed, strict=True))]
    return Answer(tables, {"runs": labels, "not_passed": failed, "points": [one.row for one in found]}, notes)


def _percent(share: float) -> str:
    return "-" if share < 0 else f"{100 * share:.0f} %"


# ---- from records ----


def _verdicts(records: Iterable[Record]) -> list[Verdict]:
    """Comparisons of points with a floor; what was not run has none."""
    return [v for v in records if isinstance(v, Verdict) and v.mode in CHAINS and v.gate in ORDER and v.floor is not None and v.rows > 0]


def cells(records: Iterable[Record]) -> dict[tuple[str, str, int | None], Seen]:
    """(point, chain, layer) -> what one run says of it."""
    found: dict[tuple[str, str, int | None], Seen] = {}
    for v in _verdicts(records):
        if not v.numbers or v.floor is None:
            continue
        seen = found.setdefault((v.gate, v.mode, v.layer), Seen(floor=v.floor))
        first = next((n for n in v.numbers if n["number"] == v.metric), v.numbers[0])
        if first["spent"] > seen.share or math.isnan(first["spent"]):
            seen.share, seen.limit, seen.smallest = first["spent"], first["limit"], first["smallest_limit"]
        if v.numbers[0]["spent"] > seen.spent or math.isnan(v.numbers[0]["spent"]):
            seen.spent, seen.number = v.numbers[0]["spent"], v.numbers[0]["number"]
    return found


def spreads(runs: Sequence[dict[tuple[str, str, int | None], Seen]]) -> list[Spread]:
    """Every point and chain that any run judged, in dataflow order. A run without it has NaN for a floor."""
    keys = dict.fromkeys((point, chain) for run in runs for point, chain, _ in run)
    out = []
    for point, chain in sorted(keys, key=lambda key: (CHAINS.index(key[1]), ORDER.index(key[0]))):
        one = Spread(point, chain)
        for i, run in enumerate(runs):
            of_point = {layer: seen for (p, c, layer), seen in run.items() if (p, c) == (point, chain)}
            one.floors.append(max((seen.floor for seen in of_point.values()), default=math.nan))
            for layer, seen in of_point.items():
                if seen.share > one.tight.share:
                    one.at = (i, layer)
                    one.tight.limit, one.tight.smallest, one.tight.share = seen.limit, seen.smallest, seen.share
                if seen.spent > one.tight.spent:
                    one.tight.spent, one.tight.number = seen.spent, seen.number
        out.append(one)
    return out


# ---- runs ----


def _read(path: Path) -> tuple[Header, list[Record]]:
    try:
        records = read_run(path)
    except (RecordError, OSError) as error:
        raise InputError(str(error) if isinstance(error, RecordError) else f"{path}: {error.strerror}") from None
    assert isinstance(records[0], Header)
    return records[0], records


def _audit(args: argparse.Namespace) -> list[tuple[Header, list[Record]]]:
    ask = ask_of(args)  # bad input is told before anything runs
    if args.device == "cuda" and (missing := cuda_missing()):
        raise CannotMeasureError(missing)
    runs = []
    with tempfile.TemporaryDirectory(prefix="floors-") as folder:
        for i, prompt in enumerate(ask.prompts):
            report = Path(folder) / str(i)
            command = [
                sys.executable, "-m", "pytest", *AUDITED, "-q", "--checkpoint", str(Path(args.checkpoint).absolute()), "--prompt", _absolute(prompt.label, args.checkpoint),
                "--phase", args.phase, "--steps", str(ask.steps), "--layers", ",".join(map(str, ask.layers)), "--device", args.device,
                "--max-context", str(ask.max_context), "--report", str(report),
            ]  # fmt: skip
            say(f"{prompt.label}: {len(prompt.ids)} tokens, {ask.steps} decode steps")
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if not (report / "run.jsonl").is_file():
                lines = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
                raise CannotMeasureError(f"{prompt.label}: the audit ended with {done.returncode}: {lines[-1]}")
            runs.append(_read(report / "run.jsonl"))
    return runs


def _absolute(label: str, checkpoint: str) -> str:
    """A prompt's name as another working directory finds it."""
    name = label.split(":")[0]
    there = Path(name).name == name and (Path(checkpoint) / "prompts" / name).is_file()
    return label if there or not Path(name).is_file() else str(Path(name).absolute()) + label[len(name) :]


if __name__ == "__main__":
    sys.exit(main())
