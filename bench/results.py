"""Puts the numbers of benchmark runs into bench/RESULTS.md, newest first.

    python -m bench.results OUT/indexer_decode.json OUT/attention.json

One section a card and commit; a table a file. What was learnt is written by hand below it. Tests: parity/unit/test_bench.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.harness import Row, shown
from bench.timing import Ceilings
from probes.core.records import to_wire

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
LEFT_OUT = ("registers @ build", "launches", "warm us")  # a table for reading; the JSON file has everything


def markdown(content: dict[str, Any]) -> str:
    """Heading, versions, ceilings, table, what was not right."""
    facts = content["facts"]
    lines = [f"## {facts['date']}, {facts['card']}: {content['bench']}", ""]
    lines.append(", ".join(f"{name} {facts[name]}" for name in ("driver", "torch", "cupy", "nvrtc", "commit", "tree")) + ".")
    if content["ceilings"] is not None:
        lines.append(f"Ceilings of this run: {Ceilings(**content['ceilings']).line()}.")
    known = {f.name: str(f.type) for f in fields(Row)}
    rows = [Row(**{name: _plain(value) if "float" in known[name] else value for name, value in row.items() if name in known}) for row in content["rows"]]
    columns = [c for c in shown(rows) if c.title not in LEFT_OUT]
    lines += ["", "| " + " | ".join(c.title for c in columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(c.cell(row).replace("|", "/") for c in columns) + " |" for row in rows]
    bad = [f"* {row.kernel} {row.variant} {row.shape}: {row.state}, {row.message.splitlines()[0] if row.message else ''}" for row in rows if row.state != "ok"]
    lines += ["", *bad, *([""] if bad else [])]
    more = {name: value for name, value in facts.items() if name not in ("card", "arch", "date", "driver", "torch", "cupy", "nvrtc", "commit", "tree")}
    if more:
        lines += ["Also: " + ", ".join(f"{name} {json.dumps(to_wire(value))}" for name, value in more.items()) + ".", ""]
    return "\n".join(lines)


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
