"""sweep.json -> sweep.html: what the audit said of every planted fault, and the score.

    python -m reports.sweep SWEEP.json [--out DIR]

The looks are those of report.html; text from the file is escaped by the template. Lays out, judges nothing.
Exit 0: drawn, 2: no readable sweep. Tests: parity/unit/test_sweep.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jinja2

from probes.core.pipe import piped
from reports import words
from reports.render import PAGE

SWEEP_TEMPLATE = Path(__file__).with_name("sweep.html")


def sweep_html(sweep: dict[str, Any]) -> str:
    """The page. Raises KeyError, TypeError or jinja2.UndefinedError where the sweep lacks something."""
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    outcomes = sweep["outcomes"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome["component"], []).append(outcome)
    components = [
        (name, len(found), sum(o["state"] == "detected" for o in found), *(sum(o["right"][key] for o in found) for key in ("component", "layer_kind", "phase")))
        for name, found in groups.items()
    ]
    wrong_first = sorted(outcomes, key=lambda o: (not o["wrong"], o["state"] == "detected"))
    verdict = "pass" if sweep["score"]["ok"] else "fail"
    if len(outcomes) < sweep["faults"]:
        verdict = "incomplete"
    html = environment.from_string(SWEEP_TEMPLATE.read_text(encoding="utf-8")).render(
        style=style, words=words, sweep=sweep, score=sweep["score"], components=components, outcomes=wrong_first, verdict=verdict
    )
    return words.printable(html)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m reports.sweep", description="Draw sweep.html from a sweep over the planted faults.",
        epilog="example: python -m reports.sweep reports/runs/2025-01-31T120000-faults/sweep.json",
    )  # fmt: skip
    parser.add_argument("sweep", type=Path, metavar="SWEEP.json", help="as python -m parity.sweep writes it")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: beside SWEEP.json)")
    options = parser.parse_args(arguments)
    page = (options.out or options.sweep.parent) / "sweep.html"
    try:
        html = sweep_html(json.loads(options.sweep.read_text(encoding="utf-8")))
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_bytes(html.encode("utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, jinja2.UndefinedError) as error:
        print(f"error: {options.sweep} is no readable sweep: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename or options.sweep}", file=sys.stderr)
        return 2
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
