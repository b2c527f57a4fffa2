"""python -m reports RUN.jsonl [--out DIR]: draws report.html and junit.xml from a run file, beside it by default.

Exit 0: drawn (whatever the verdict; only parity/ judges). Exit 2: the file is no run, or the directory cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from probes.core.records import RecordError, read_run
from reports.render import render_run


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m reports",
        description="Draw report.html and junit.xml from the records of a run.",
        epilog="example: python -m reports reports/runs/2025-01-31-1a2b3c4/run.jsonl --out report-copy",
    )
    parser.add_argument("run", type=Path, metavar="RUN.jsonl", help="records of a run, as pytest parity/ writes them")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: beside RUN.jsonl)")
    options = parser.parse_args(arguments)
    try:
        report = render_run(read_run(options.run), options.out or options.run.parent)
    except (RecordError, UnicodeDecodeError, RecursionError) as error:
        print(f"error: {options.run} is no readable run: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename or options.run}", file=sys.stderr)
        return 2
    print(f"report: {report}")
    print(f"junit: {report.with_name('junit.xml')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
