"""python -m reports RUN.jsonl [--out DIR] [--baseline RUN]: draws report.html and junit.xml from a run file, beside it by default.

    python -m reports --compare A.jsonl B.jsonl [--html DIR]        what differs, as a table; the report of B with it
    python -m reports RUN.jsonl --table OUT.csv|OUT.parquet [--of verdicts|numbers|measurements|coverage|kernels]
    python -m reports --schema [N]                                  the JSON Schema of a line of run.jsonl

A run is named by its file or its folder. A run that was cut off is drawn too, and says so.
Exit 0: done (whatever the verdict; only parity/ judges). Exit 2: no readable run, or what cannot be written, in one line. 141: `| head` left.
Tests: parity/unit/test_reports.py, test_trend.py, test_table.py, test_schema.py, test_partial.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from probes.core.pipe import piped
from probes.core.records import READS, SCHEMA, Record, RecordError, read_run
from reports import compare, schema, table, words
from reports.render import render_run


class UsageError(ValueError):
    """Bad input, in one line."""


class _Parser(argparse.ArgumentParser):
    """Usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(
        prog="python -m reports",
        description="Draw report.html and junit.xml from the records of a run; compare two runs; write tables.",
        epilog="examples: python -m reports reports/runs/2025-01-31-1a2b3c4/run.jsonl --out report-copy\n"
        "          python -m reports --compare old/run.jsonl new/run.jsonl\n\nexit codes: 0 done, 2 bad input",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, nargs="?", metavar="RUN.jsonl", help="records of a run, as pytest parity/ writes them, or its folder")
    made.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: beside RUN.jsonl)")
    made.add_argument("--baseline", type=Path, metavar="RUN", help="an earlier run: the report says what became better or worse")
    made.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="print what differs in run B from run A")
    made.add_argument("--html", type=Path, metavar="DIR", help="with --compare: write B's report with the comparison in it")
    made.add_argument("--table", type=Path, metavar="OUT.csv|OUT.parquet", help="write the records as a tidy table instead")
    made.add_argument("--of", choices=list(table.TABLES), metavar="|".join(table.TABLES), help="which records (default: verdicts)")
    made.add_argument("--schema", nargs="?", const=str(SCHEMA), metavar="N", help=f"print the JSON Schema of version N (default: {SCHEMA})")
    return made


# What goes with what: every other option beside one of these is a mistake.
GOES_WITH = {"schema": (), "compare": ("html",), "table": ("run", "of"), "run": ("out", "baseline")}


def _task(options: argparse.Namespace) -> str:
    """schema, compare, table or run. Raises UsageError for what does not go together."""
    given = [name for name, value in vars(options).items() if value is not None]
    task = next((name for name in GOES_WITH if name in given), None)
    if task is None:
        raise UsageError("expected RUN.jsonl, --compare A B or --schema; see python -m reports --help")
    for name in given:
        if name != task and name not in GOES_WITH[task]:
            shown = [str(options.run) if one == "run" else f"--{one}" for one in (name, task)]
            raise UsageError(f"{shown[0]} does not go with {shown[1]}; see python -m reports --help")
    if task == "table" and options.run is None:
        raise UsageError("--table: expected RUN.jsonl too")
    return task


def read(given: Path) -> list[Record]:
    """The records of a run file, or of a run's folder. Raises UsageError."""
    path = compare.run_file(given)
    try:
        return read_run(path)
    except (RecordError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no readable run: {error}") from None
    except OSError as error:
        raise UsageError(f"{error.strerror or error}: {error.filename or path}") from None


def draw(records: list[Record], folder: Path, baseline: list[Record] | None = None) -> None:
    """Write the report and say where it is."""
    report = render_run(records, folder, baseline)
    print(f"report: {report}")
    print(f"junit: {report.with_name('junit.xml')}")


def perform(options: argparse.Namespace) -> None:
    """What was asked for. Raises UsageError, RecordError, TableError or OSError."""
    task = _task(options)
    if task == "schema":
        if options.schema not in map(str, READS):
            raise UsageError(f"--schema {options.schema}: expected {' or '.join(map(str, READS))}")
        print(schema.schema_text(int(options.schema)), end="")
    elif task == "compare":
        old, new = options.compare
        before, after = read(old), read(new)
        print(compare.text(compare.compare(before, after), (str(old), str(new))), end="")
        if options.html is not None:
            draw(after, options.html, before)
    elif task == "table":
        of = options.of or "verdicts"
        rows = table.write_table(read(options.run), of, options.table)
        print(f"table: {options.table} ({words.plural(rows, 'row')} of {of})")
    else:
        draw(read(options.run), options.out or compare.run_file(options.run).parent, None if options.baseline is None else read(options.baseline))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        perform(options)
    except BrokenPipeError:
        raise
    except (UsageError, RecordError, table.TableError, UnicodeDecodeError, RecursionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename or options.run}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(piped(main))
