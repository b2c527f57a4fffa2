"""The JSON Schema (draft 2020-12) of one line of run.jsonl, made from the record dataclasses; reports/schema/ holds it published.

    python -m reports --schema [N] > run.schema.json

Every version that `probes/core/records.py` reads has a file: run-<N>.schema.json. What a version promises: a file is written with
every field of it and no other, and a change of any field is a new version. Version 1 grew while it was current, so that only its
fields without a default are required. Tests: parity/unit/test_schema.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

from probes.core.records import ADDED, READS, SCHEMA, TYPES, VERDICTS, Divergence, State, hints_of

STORED = Path(__file__).with_name("schema")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
NON_FINITE = ["nan", "inf", "-inf"]
CHOICES = {("summary", "verdict"): list(VERDICTS), ("verdict", "state"): [state.value for state in State]}


def stored(version: int = SCHEMA) -> Path:
    """The published file of a version."""
    return STORED / f"run-{version}.schema.json"


def schema_text(version: int = SCHEMA) -> str:
    """The schema as it is published."""
    return json.dumps(line_schema(version), indent=1) + "\n"


def line_schema(version: int = SCHEMA) -> dict[str, Any]:
    """Schema of one line of a file of that version."""
    if version not in READS:
        raise ValueError(f"schema {version}: expected {' or '.join(map(str, READS))}")
    records = {name: _record(name, cls, version) for name, cls in TYPES.items()}
    return {
        "$schema": DIALECT, "$id": f"urn:dsv4-parity:run:{version}", "title": f"One line of run.jsonl, version {version}",
        "description": "Strict JSON, one record a line: the header first, the summary last; a file without a summary is a run that was cut off. "
        "A number that is not finite is one of the strings nan, inf, -inf, in free-form values too.",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in records],
        "$defs": {**records, "divergence": _record("", Divergence, version), "float": {"anyOf": [{"type": "number"}, {"enum": NON_FINITE}]}},
    }  # fmt: skip


def _record(name: str, cls: type, version: int) -> dict[str, Any]:
    """An object with exactly the fields of a record."""
    later = {one for number, added in ADDED.items() if number > version for one in added.get(name, ())}
    fields = [f for f in dataclasses.fields(cls) if f.name not in later]
    required = [f.name for f in fields if version > 1 or not _has_default(f) or f.name == "schema"]
    properties = {f.name: _field(name, f.name, hints_of(cls)[f.name]) for f in fields}
    if name == "header":
        properties["schema"] = {"const": version}
    if name:
        properties, required = {"type": {"const": name}, **properties}, ["type", *required]
    says = {"description": inspect.getdoc(cls)} if version == SCHEMA else {}  # an older version's file stays as it was published
    return {**says, "type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _field(record: str, name: str, hint: Any) -> dict[str, Any]:
    return {"enum": CHOICES[record, name]} if (record, name) in CHOICES else _type(hint)


_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}, float: {"$ref": "#/$defs/float"},
    type(None): {"type": "null"}, Divergence: {"$ref": "#/$defs/divergence"}, Any: {},
}  # fmt: skip


def _type(hint: Any) -> dict[str, Any]:
    """Schema of a field's type. Raises TypeError for one that the reader does not know either."""
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return {"anyOf": [_type(one) for one in arguments]}
    if origin is list:
        return {"type": "array", "items": _type(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1])}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [one.value for one in hint]}
    raise TypeError(f"{hint}: no JSON Schema for this type")
