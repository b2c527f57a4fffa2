"""Planted faults: data, not code. A fault is an exact-once find/replace on a source file, applied to a copy.

A list is a TOML file:

    [[fault]]
    id = "B060"
    title = "decode sees 127 of 128 keys"
    [[fault.edit]]
    file = "production/model.py"          # below production/ or kernels/
    find = "..."                          # must stand there exactly once
    replace = "..."
    [fault.expect]                        # optional: what a right report may name
    phase = "decode"                      # "prefill" | "decode" | "any"; absent for a single-operation check
    layer = 0                             # layer of the first divergence; absent: none
    points = ["attn.visible"]             # accepted points or operations
    components = ["SWA ring"]

`pytest parity/ --inject B060 [--faults FILE]` runs the audit on the mutated copy, so production itself carries no test
switches, and a stale fault (text not found, or found twice) is an error. Tests: parity/unit/test_faults.py.
"""

from __future__ import annotations

import difflib
import shutil
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.config import InputError

ROOT = Path(__file__).resolve().parents[1]
OPEN_LIST = ROOT / "parity" / "faults.toml"
MORE_LIST = ROOT / "parity" / "faults_more.toml"
ROOMS = ("production", "kernels")


@dataclass(frozen=True)
class Edit:
    """Replace `find`, which stands exactly once in `file` (relative to the project), by `replace`."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True)
class Fault:
    """One fault: its edits, and what a right report may name (see the module's docstring)."""

    id: str
    title: str
    edits: tuple[Edit, ...]
    expect: dict[str, Any] = field(default_factory=dict)


def read_faults(path: Path = OPEN_LIST) -> dict[str, Fault]:
    """The faults of a list by id. Raises InputError with file and fault."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: broken TOML: {error}") from None
    entries = values.get("fault")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: no [[fault]] entries")
    faults: dict[str, Fault] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}: fault {entry.get('id', number) if isinstance(entry, dict) else number}"
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str) or not entry.get("edit"):
            raise InputError(f"{where}: needs an id and at least one [[fault.edit]]")
        edits = []
        for edit in entry["edit"]:
            if not isinstance(edit, dict) or not all(isinstance(edit.get(key), str) for key in ("file", "find", "replace")):
                raise InputError(f"{where}: an edit needs the strings file, find and replace")
            parts = Path(edit["file"]).parts
            if not parts or parts[0] not in ROOMS or ".." in parts:
                raise InputError(f"{where}: {edit['file']!r} does not lie below {' or '.join(ROOMS)}")
            if not edit["find"] or edit["find"] == edit["replace"]:
                raise InputError(f"{where}: an edit of {edit['file']} changes nothing")
            edits.append(Edit(edit["file"], edit["find"], edit["replace"]))
        if entry["id"] in faults:
            raise InputError(f"{where}: the id stands twice")
        faults[entry["id"]] = Fault(entry["id"], str(entry.get("title", "")), tuple(edits), dict(entry.get("expect", {})))
    return faults


def find_fault(fault_id: str, path: Path | None = None) -> Fault:
    """One fault of a list; None: of the project's own two lists. Raises InputError with the nearest id."""
    faults = read_faults(path) if path is not None else {**read_faults(OPEN_LIST), **read_faults(MORE_LIST)}
    if fault_id not in faults:
        near = difflib.get_close_matches(fault_id, faults, n=1) or sorted(faults)[:1]
        where = path if path is not None else f"{OPEN_LIST.name} and {MORE_LIST.name}"
        raise InputError(f"{where}: no fault {fault_id!r}; nearest is {near[0]!r}, {len(faults)} known")
    return faults[fault_id]


def plant(fault: Fault, root: Path = ROOT) -> Path:
    """A copy of production/ and kernels/ with the fault in it. The caller removes the returned directory."""
    copy = Path(tempfile.mkdtemp(prefix=f"fault-{fault.id}-"))
    try:
        for room in ROOMS:
            shutil.copytree(root / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in fault.edits:
            path = copy / edit.file
            if not path.is_file():
                raise InputError(f"fault {fault.id} is stale: no file {edit.file}")
            text = path.read_text(encoding="utf-8")
            found = text.count(edit.find)
            if found != 1:
                raise InputError(f"fault {fault.id} is stale: its text stands {found} times in {edit.file}, expected once: {edit.find.strip()[:80]!r}")
            path.write_text(text.replace(edit.find, edit.replace), encoding="utf-8")
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return copy


def import_from(copy: Path) -> None:
    """Make `import production` take the copy. Must happen before production is imported."""
    loaded = [name for name in sys.modules if name == "production" or name.startswith("production.")]
    if loaded:
        raise RuntimeError(f"production is imported already ({loaded[0]}); a fault cannot be planted any more")
    sys.path.insert(0, str(copy))
