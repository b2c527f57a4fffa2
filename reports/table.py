"""Records as tidy tables for plotting: one row an observation, one column a variable, in CSV or Parquet.

    python -m reports RUN.jsonl --table OUT.csv [--of verdicts|numbers|measurements|coverage|kernels]

verdicts, coverage, kernels: a row a record; lists and dictionaries are JSON text. numbers: a row each number of each gate.
measurements: a row each value, lists spread over `index`; a value that is a number stands in `value`, any other in `text`.

NaN and inf survive; None is told from them: in CSV a missing cell is empty and the others read nan, inf, -inf
(pandas.read_csv(..., dtype=str, keep_default_na=False) keeps the difference, its float columns do not); in Parquet None is null and
NaN a float. Empty text and None are both empty cells in CSV. Parquet needs pyarrow: pip install "dsv4-parity[parquet]".
Tests: parity/unit/test_table.py.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.core.records import Coverage, Kernel, Measurement, Record, Verdict, hints_of, to_wire
from reports import words

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".parquet")
Columns = dict[str, type]  # name -> float, int, bool or str; every one may hold None
PLACE: Columns = {"layer": int, "phase": str, "mode": str, "point": str, "step_first": int, "step_last": int}


class TableError(ValueError):
    """What cannot be written as asked, in one line."""


# ---- rows ----


def _columns(cls: type) -> Columns:
    """Fields of a record; what is neither number nor flag becomes text."""
    kinds: Columns = {}
    for name, hint in hints_of(cls).items():
        kind: Any = next((one for one in typing.get_args(hint) if one is not type(None)), hint) if isinstance(hint, types.UnionType) else hint
        kinds[name] = kind if kind in (float, int, bool) else str
    return kinds


def _text(value: Any) -> str | None:
    """Text as it is, anything else as strict JSON; what no UTF-8 file may hold is escaped."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(to_wire(value), allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _fields(record: Record) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _number(value: Any) -> float | None:
    """As words.as_number; an integer too large for a float is none."""
    try:
        return words.as_number(value)
    except OverflowError:
        return None


def _numbers(verdict: Verdict) -> Iterator[dict[str, Any]]:
    for one in verdict.numbers or [{"number": verdict.metric, "smallest_limit": verdict.value, "limit": verdict.limit, "spent": verdict.spent}]:
        values = {key: _number(one.get(key)) for key in ("smallest_limit", "limit", "spent")}
        yield {"gate": verdict.gate, "state": verdict.state, "test_id": verdict.test_id, **{key: getattr(verdict, key) for key in PLACE}, "number": one.get("number"), **values}


def _values(measurement: Measurement) -> Iterator[dict[str, Any]]:
    place = {key: getattr(measurement, key) for key in ("name", "layer", "phase", "step", "point")}
    for key, value in measurement.values.items():
        for index, one in enumerate(value) if isinstance(value, list) and value else [(None, value)]:
            number = _number(one)
            yield {**place, "key": key, "index": index, "value": number, "text": None if number is not None else one}


def _rows(records: list[Record], cls: type, of: Callable[[Any], Iterator[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for record in records if isinstance(record, cls) for row in of(record)]


NUMBERS: Columns = {"gate": str, **PLACE, "state": str, "number": str, "smallest_limit": float, "limit": float, "spent": float, "test_id": str}
VALUES: Columns = {"name": str, "layer": int, "phase": str, "step": int, "point": str, "key": str, "index": int, "value": float, "text": str}
TABLES: dict[str, tuple[type, Columns, Callable[[Any], Iterator[dict[str, Any]]]]] = {
    "verdicts": (Verdict, _columns(Verdict), lambda record: iter([_fields(record)])),
    "numbers": (Verdict, NUMBERS, _numbers),
    "measurements": (Measurement, VALUES, _values),
    "coverage": (Coverage, _columns(Coverage), lambda record: iter([_fields(record)])),
    "kernels": (Kernel, _columns(Kernel), lambda record: iter([_fields(record)])),
}


def columns(records: list[Record], of: str) -> dict[str, list[Any]]:
    """The table by column: Python values, None where there is none."""
    cls, kinds, rows_of = TABLES[of]
    rows = _rows(records, cls, rows_of)
    return {name: [_text(row[name]) if kind is str else row[name] for row in rows] for name, kind in kinds.items()}


def frame(records: list[Record], of: str) -> pandas.DataFrame:
    """A DataFrame to plot from: nullable integers and flags, floats in which None and NaN are one."""
    import pandas

    dtypes: dict[type, Any] = {float: "float64", int: "Int64", bool: "boolean", str: "object"}
    kinds = TABLES[of][1]
    return pandas.DataFrame({name: pandas.Series(values, dtype=dtypes[kinds[name]]) for name, values in columns(records, of).items()})


# ---- files ----


def _cell(value: Any, kind: type) -> str:
    if value is None:
        return ""
    if kind is float:
        return repr(float(value)) if math.isfinite(value) else str(to_wire(float(value)))
    return str(value)


def csv_bytes(records: list[Record], of: str) -> bytes:
    """CSV in UTF-8, floats in full."""
    import pandas

    kinds = TABLES[of][1]
    cells = {name: pandas.Series([_cell(value, kinds[name]) for value in values], dtype="object") for name, values in columns(records, of).items()}
    return str(pandas.DataFrame(cells).to_csv(index=False, lineterminator="\n")).encode("utf-8")


def parquet_bytes(records: list[Record], of: str) -> bytes:
    """Parquet with typed columns. Raises TableError without pyarrow, or for an integer that no column holds."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TableError('Parquet needs pyarrow, which is not installed: pip install "dsv4-parity[parquet]", or write .csv') from None
    arrow = {float: pyarrow.float64(), int: pyarrow.int64(), bool: pyarrow.bool_(), str: pyarrow.string()}
    kinds = TABLES[of][1]
    try:
        table = pyarrow.table({name: pyarrow.array(values, type=arrow[kinds[name]]) for name, values in columns(records, of).items()})
    except (OverflowError, pyarrow.ArrowInvalid) as error:
        raise TableError(f"{of} do not fit in Parquet: {error}; write .csv") from None
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out)
    return out.getvalue()


def write_table(records: list[Record], of: str, path: Path) -> int:
    """Write the table to path, whose suffix picks the format; returns the rows. Raises TableError or OSError."""
    if path.suffix not in SUFFIXES:
        raise TableError(f"--table {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    content = (parquet_bytes if path.suffix == ".parquet" else csv_bytes)(records, of)
    path.write_bytes(content)
    return len(next(iter(columns(records, of).values())))
