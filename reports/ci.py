"""python -m reports.ci RUN.jsonl [--summary FILE.md] [--annotations] [--title TEXT]: a run for the pages of a CI system.

    python -m reports.ci run.jsonl --summary "$GITHUB_STEP_SUMMARY" --annotations    # as .github/workflows/audit.yml does
    python -m reports.ci run.jsonl                                                   # the summary, on the terminal

The summary is appended, as GitHub wants it. Exit 0: written (whatever the verdict; only parity/ judges). Exit 2: no readable run,
or the file cannot be written. Tests: parity/unit/test_ci.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from probes.core.pipe import piped
from probes.core.records import RecordError, read_run
from reports.annotations import Annotation, annotate
from reports.compare import run_file
from reports.render import split
from reports.summary import job_summary


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m reports.ci", description="Write the job summary and the annotations of a run for GitHub Actions.",
        epilog='example: python -m reports.ci reports/runs/audit/run.jsonl --summary "$GITHUB_STEP_SUMMARY" --annotations',
    )  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN.jsonl", help="records of a run, as pytest parity/ writes them, or its folder")
    parser.add_argument("--summary", type=Path, metavar="FILE.md", help="append the summary to this file (default: print it, unless --annotations)")
    parser.add_argument("--annotations", action="store_true", help="print at most ten ::error and ::warning commands")
    parser.add_argument("--title", default="", metavar="TEXT", help="which job of several this is, for the summary's heading")
    options = parser.parse_args(arguments)

    def refuse(problem: str) -> int:
        if options.annotations:
            print(Annotation("error", "no audit", problem).command)
        print(f"error: {problem}", file=sys.stderr)
        return 2

    try:
        run = split(read_run(run_file(options.run)))
        page = job_summary(run, options.title)
        commands = [one.command for one in annotate(run)]
    except (RecordError, UnicodeDecodeError, RecursionError) as error:
        return refuse(f"{options.run} is no readable run: {error}")
    except OSError as error:
        return refuse(f"{error.filename or options.run}: {error.strerror or error}; next: the audit's own output says why it wrote none")
    if options.summary is not None:
        try:
            with options.summary.open("a", encoding="utf-8") as file:
                file.write(page)
        except OSError as error:
            return refuse(f"{error.filename or options.summary}: {error.strerror or error}")
    if options.annotations:
        for command in commands:
            print(command)
    elif options.summary is None:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
