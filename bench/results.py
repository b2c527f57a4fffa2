"""Puts the numbers of benchmark runs into bench/RESULTS.md, newest first.

    python -m bench.results OUT/indexer_decode.json OUT/attention.json

A section a file: what was met and missed, a line a kernel and shape with the fastest variant that was right and the others beside it,
rates, checks, everything that was not right. What was learnt is written by hand below it. Tests: parity/unit/test_bench.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.harness import Row, number, ratio
from bench.timing import Ceilings
from probes.core.records import to_wire

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
VERSIONS = ("driver", "torch", "cupy", "nvrtc", "commit", "tree")
FACTS = ("card", "arch", "date", *VERSIONS)
MISSED = 1.25  # of a prediction
TOGETHER = 6  # checks of one kernel that get lines of their own
SAME = 4  # lines from which a column of equal cells is said once, above the table
UNSTEADY = 0.1
LONG = 12  # values of a fact; longer ones stay in the JSON file
Table = list[tuple[str, list[str]]]  # columns: title, cells


def markdown(content: dict[str, Any]) -> str:
    """Heading, versions, ceilings, summary, tables, what was not right."""
    facts = content["facts"]
    known = {f.name: str(f.type) for f in fields(Row)}
    rows = [Row(**{name: _plain(value) if "float" in known[name] else value for name, value in row.items() if name in known}) for row in content["rows"]]
    timed = [row for row in rows if row.state == "ok" and row.us is not None]
    shapes = _grouped(timed, lambda row: (row.kernel, row.shape))
    best = [min(group, key=lambda row: row.us or 0.0) for group in shapes]
    lines = [f"## {facts['date']}, {facts['card']}: {content['bench']}", ""]
    lines.append(", ".join(f"{name} {str(facts[name])[:10] if name == 'commit' else facts[name]}" for name in VERSIONS) + ".")
    if content["ceilings"] is not None:
        lines.append(f"Ceilings of this run: {Ceilings(**content['ceilings']).line()}.")
    lines += [_summary(rows, best), ""]
    for table in (_times(shapes, best), _rates([row for row in rows if row.value is not None]), _checks([r for r in rows if r.us is None and r.value is None and r.state == "ok"])):
        lines += _lines(table)
    bad = [f"* {row.kernel} {row.variant} {row.shape}: **{row.state}**{': ' + row.message.splitlines()[0] if row.message else ''}" for row in rows if row.state != "ok"]
    bad += [f"* {error.splitlines()[-1]}" for error in content.get("errors", ()) if error.strip()]
    lines += [*bad, *([""] if bad else [])]
    for name, value in facts.items():
        if name.startswith("profile of "):
            lines += [f"{name[0].upper()}{name[1:]}, us (launches): " + ", ".join(f"{kernel} {us:,.0f} ({count})" for kernel, count, us in value[:LONG]) + ".", ""]
    more = {name: value for name, value in facts.items() if name not in FACTS and not name.startswith("profile of ") and _short(value)}
    if more:
        lines += ["Also: " + ", ".join(f"{name} {json.dumps(to_wire(round(value, 3) if isinstance(value, float) else value))}" for name, value in more.items()) + ".", ""]
    return "\n".join(lines)


def _short(value: Any) -> bool:
    """Whether a fact is for reading; nested and long ones stay in the JSON file."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(inner) <= LONG and not any(isinstance(one, dict) or (isinstance(one, list) and isinstance(value, list)) for one in inner)


def _summary(rows: Sequence[Row], best: Sequence[Row]) -> str:
    words = [f"{sum(row.state == 'ok' for row in rows)} of {len(rows)} cases ok."]
    public = [row.us / row.public_us for row in best if row.us and row.public_us]
    if public:
        words.append(f"Public time met or beaten in {sum(x <= 1 for x in public)} of {len(public)} shapes, at worst {max(public):.2f} of it.")
    expected = [row.us / row.predicted_us for row in best if row.us and row.predicted_us]
    if expected:
        words.append(f"Predicted time held within {100 * (MISSED - 1):.0f} % in {sum(x <= MISSED for x in expected)} of {len(expected)} shapes, at worst {max(expected):.2f} of it.")
    if public or expected:
        words.append("Bold: missed, or the two measurements differ by more than 10 %.")
    return " ".join(words)


def _times(shapes: Sequence[Sequence[Row]], best: Sequence[Row]) -> Table:
    """A line a kernel and shape: the fastest variant, and the others with their times; in brackets predictions of their own."""

    def others(group: Sequence[Row], first: Row) -> str:
        rest = sorted((row for row in group if row is not first), key=lambda row: row.us or 0.0)
        return ", ".join(f"{r.variant} {number(r.us)}" + (f" ({number(r.predicted_us)})" if r.predicted_us not in (None, first.predicted_us) else "") for r in rest) or "-"

    return [
        ("kernel", _once(row.kernel for row in best)),
        ("shape", [row.shape for row in best]),
        ("fastest", [row.variant for row in best]),
        ("us", [number(row.us) for row in best]),
        ("+-%", [_bold("-" if row.spread is None else f"{100 * row.spread:.1f}", (row.spread or 0.0) > UNSTEADY) for row in best]),
        ("x floor", [ratio(row.us, row.floor_us) for row in best]),
        ("% ceiling", ["-" if row.share is None else f"{100 * row.share:.1f}" for row in best]),
        ("public us", [number(row.public_us) for row in best]),
        ("x public", [_bold(ratio(row.us, row.public_us), (row.us or 0.0) > (row.public_us or float("inf"))) for row in best]),
        ("predicted us", [number(row.predicted_us) for row in best]),
        ("x predicted", [_bold(ratio(row.us, row.predicted_us), (row.us or 0.0) > MISSED * (row.predicted_us or float("inf"))) for row in best]),
        ("error / limit", ["not checked" if row.error is None else _error(row) for row in best]),
        ("others, us", [others(group, first) for group, first in zip(shapes, best, strict=True)]),
    ]


def _rates(rows: Sequence[Row]) -> Table:
    return [
        ("measured", [row.kernel for row in rows]),
        ("variant", [row.variant for row in rows]),
        ("shape", [row.shape for row in rows]),
        ("value", [f"{number(row.value)} {row.of}".rstrip() for row in rows]),
        ("predicted", [number(row.predicted) for row in rows]),
        ("x predicted", [ratio(row.value, row.predicted) for row in rows]),
    ]


def _checks(rows: Sequence[Row]) -> Table:
    """Those that were right; what was not stands below. Many of one kernel share a line."""
    groups = [part for group in _grouped(rows, lambda row: (row.kernel,)) for part in ([group] if len(group) > TOGETHER else [[row] for row in group])]

    def several(values: Sequence[str]) -> str:
        kinds = list(dict.fromkeys(values))
        return ", ".join(kinds) if len(kinds) <= 3 else f"{len(kinds)} of them"

    worst = [max(group, key=lambda row: (row.error or 0.0) / row.limit if row.limit else (row.error or 0.0)) for group in groups]
    return [
        ("checked and right", [group[0].kernel for group in groups]),
        ("variants", [several([row.variant for row in group]) for group in groups]),
        ("shapes", [several([row.shape for row in group]) for group in groups]),
        ("worst error / limit", [_error(row) for row in worst]),
    ]


def _lines(table: Table) -> list[str]:
    """Without the columns that say nothing; nothing without rows."""
    kept = [(title, cells) for title, cells in table if any(cell not in ("-", "") for cell in cells)]
    if not kept:
        return []
    same = [(title, cells) for title, cells in kept[1:] if len(cells) >= SAME and len(set(cells)) == 1]
    kept = [column for column in kept if column not in same]
    rows = zip(*(cells for _, cells in kept), strict=True)
    above = [f"All of these: {', '.join(f'{title} {cells[0]}' for title, cells in same)}.", ""] if same else []
    return [*above, "| " + " | ".join(title for title, _ in kept) + " |", "|" + "---|" * len(kept), *("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows), ""]


def _grouped(rows: Sequence[Row], key: Callable[[Row], tuple[str, ...]]) -> list[list[Row]]:
    """By key, groups of one kernel together, in order of appearance."""
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: kernels.index(row.kernel)):
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _once(names: Any) -> list[str]:
    cells: list[str] = []
    last = ""
    for name in names:
        cells.append("" if name == last else name)
        last = name
    return cells


def _error(row: Row) -> str:
    return f"{number(row.error, 3)} / {number(row.limit, 3)}"


def _bold(cell: str, when: bool) -> str:
    return f"**{cell}**" if when else cell


def _plain(value: Any) -> Any:
    """A number that JSON carried as a word."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def insert(text: str, section: str) -> str:
    """The section above the first one there is."""
    at = text.find("\n## ")
    return f"{text.rstrip()}\n\n{section}" if at < 0 else f"{text[: at + 1]}{section}\n{text[at + 1 :]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.results", description="Appends benchmark JSON files to bench/RESULTS.md.")
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--into", metavar="FILE", type=Path, default=RESULTS, help="default: bench/RESULTS.md")
    args = parser.parse_args(argv)
    for path in args.files:
        section = markdown(json.loads(path.read_text(encoding="utf-8")))
        args.into.write_text(insert(args.into.read_text(encoding="utf-8"), section), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
