"""Planted faults: data, not code. A fault is an exact-once find/replace on a source file, applied to a copy.

A list is a TOML file, or a folder of them (the project's own: parity/faults/, one per component):

    component = "SWA ring"                # of all faults of this file
    catalogue = ["B059", "B060"]          # ids of the public catalogue under this component: planted here, or left out
    [[fault]]
    id = "B060"
    title = "decode sees 127 of 128 keys"
    note = "..."                          # optional: how it differs from the catalogue's entry
    prompts = ["a.txt:0:250", "b.txt:0:130"]    # optional: it shows in these only, one batch row each
    crash = true                          # optional: an error is how it shows, and counts
    decode = "replay"                     # optional: it shows in a captured graph only; variants = "fast" likewise
    [[fault.edit]]
    file = "production/model.py"          # below production/ or kernels/
    find = "..."                          # must stand there exactly once
    replace = "..."
    [fault.expect]                        # optional: what a right report names
    components = ["SWA ring"]             # any of these
    layer_kinds = ["window", "csa"]       # a layer of any of these; absent: no layer needs to be named
    phase = "decode"                      # "prefill" | "decode" | "any"
    points = ["attn.visible"]             # and operations = [..]: for people
    [[left_out]]
    id = "B059"
    reason = "why it cannot be planted here"

`pytest parity/ --inject B060 [--faults FILE]` runs the audit on the mutated copy, so production itself carries no test
switches, and a stale fault (text not found, or found twice) is an error. All of them: python -m parity.sweep.
Tests: parity/unit/test_faults.py, parity/unit/test_planted.py.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from reference.config import InputError

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "parity" / "faults"
ROOMS = ("production", "kernels")
LAYER_KINDS = ("window", "csa", "hca")
PHASES = ("prefill", "decode", "any")
RUN_AS = {"decode": ("eager", "replay"), "variants": ("portable", "fast")}  # how production runs, where a fault says so


@dataclass(frozen=True)
class Edit:
    """Replace `find`, which stands exactly once in `file` (relative to the project), by `replace`."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True)
class Fault:
    """One fault: its edits, and what a right report names (see the module's docstring)."""

    id: str
    title: str
    edits: tuple[Edit, ...]
    expect: dict[str, Any] = field(default_factory=dict)
    component: str = ""
    prompts: tuple[str, ...] = ()
    crash: bool = False
    note: str = ""
    decode: str = ""
    variants: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of a run without the fault that runs the same code."""
        given = (("--decode", self.decode), ("--variants", self.variants))
        return tuple(word for option, value in given if value for word in (option, value))


@dataclass(frozen=True)
class FaultList:
    """What a list holds: faults by id, the catalogue's ids with their component, and ids left out with the reason."""

    faults: dict[str, Fault]
    catalogue: dict[str, str]
    left_out: dict[str, str]


def read_faults(path: Path = FAULTS) -> dict[str, Fault]:
    """The faults of a list, a file or a folder, by id. Raises InputError with file and fault."""
    return read_list(path).faults


def read_list(path: Path = FAULTS) -> FaultList:
    """A list, a file or a folder. Raises InputError with file and fault."""
    files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: no .toml file in this folder")
    whole = FaultList({}, {}, {})
    for file in files:
        one = _read_file(file)
        for part in ("faults", "catalogue", "left_out"):
            twice = sorted(set(getattr(whole, part)) & set(getattr(one, part)))
            if twice:
                raise InputError(f"{file}: {part}: {twice[0]} stands in another file too")
            getattr(whole, part).update(getattr(one, part))
    return whole


def _read_file(path: Path) -> FaultList:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: broken TOML: {error}") from None
    entries, component = values.get("fault"), values.get("component", "")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: no [[fault]] entries")
    if not isinstance(component, str) or not _strings(values.get("catalogue", [])):
        raise InputError(f"{path}: component is a string, catalogue a list of strings")
    faults: dict[str, Fault] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}: fault {entry.get('id', number) if isinstance(entry, dict) else number}"
        fault = _fault(entry, where, component)
        if fault.id in faults:
            raise InputError(f"{where}: the id stands twice")
        faults[fault.id] = fault
    left_out: dict[str, str] = {}
    for entry in values.get("left_out", []):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) and entry[key] for key in ("id", "reason")):
            raise InputError(f"{path}: a [[left_out]] needs the strings id and reason")
        left_out[entry["id"]] = entry["reason"]
    return FaultList(faults, dict.fromkeys(values.get("catalogue", []), component), left_out)


def _fault(entry: Any, where: str, component: str) -> Fault:
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str) or not isinstance(entry.get("edit"), list) or not entry["edit"]:
        raise InputError(f"{where}: needs an id and at least one [[fault.edit]]")
    if entry["id"].strip("._-") == "" or not entry["id"].replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise InputError(f"{where}: an id has letters, digits, '.', '_' and '-' only")
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
    prompts, expect = entry.get("prompts", []), entry.get("expect", {})
    if not _strings(prompts) or not isinstance(entry.get("crash", False), bool):
        raise InputError(f"{where}: prompts is a list of strings, crash is true or false")
    for name, allowed in RUN_AS.items():
        if entry.get(name, "") not in ("", *allowed):
            raise InputError(f"{where}: {name} {entry[name]!r}, expected {' or '.join(allowed)}")
    return Fault(
        entry["id"], str(entry.get("title", "")), tuple(edits), _expect(expect, where), component,
        tuple(prompts), entry.get("crash", False), str(entry.get("note", "")), entry.get("decode", ""), entry.get("variants", ""),
    )  # fmt: skip


def _expect(expect: Any, where: str) -> dict[str, Any]:
    if not isinstance(expect, dict):
        raise InputError(f"{where}: expect is a table")
    for name in ("components", "layer_kinds", "points", "operations"):
        if not _strings(expect.get(name, [])):
            raise InputError(f"{where}: expect.{name} is a list of strings")
    strange = sorted(set(expect.get("layer_kinds", [])) - set(LAYER_KINDS))
    if strange:
        raise InputError(f"{where}: expect.layer_kinds: {strange[0]!r}, expected {', '.join(LAYER_KINDS)}")
    if expect.get("phase", "any") not in PHASES:
        raise InputError(f"{where}: expect.phase {expect['phase']!r}, expected {', '.join(PHASES)}")
    return dict(expect)


def _strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) and value for value in values)


def find_fault(fault_id: str, path: Path | None = None) -> Fault:
    """One fault of a list; None: of the project's own. Raises InputError with the nearest id."""
    where = FAULTS if path is None else path
    faults = read_faults(where)
    if fault_id not in faults:
        near = difflib.get_close_matches(fault_id, faults, n=1) or sorted(faults)[:1]
        shown = where.relative_to(ROOT) if ROOT in where.parents else where
        raise InputError(f"{shown}: no fault {fault_id!r}; nearest is {near[0]!r}, {len(faults)} known")
    return faults[fault_id]


HELD = ".held"  # in a copy: locked for as long as the process that made it lives
SETTLED_SECONDS = 30.0  # a younger copy may still be on its way to its lock
_held: list[IO[str]] = []


def sweep_stale() -> list[Path]:
    """Remove copies in the temporary directory that killed processes left; those whose process lives are locked, and stay."""
    removed = []
    for lock in Path(tempfile.gettempdir()).glob(f"fault-*/{HELD}"):
        with contextlib.suppress(OSError):  # somebody else's, locked, or gone by now
            if time.time() - lock.stat().st_mtime < SETTLED_SECONDS:
                continue
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed.append(lock.parent)
    return removed


def plant(fault: Fault, root: Path = ROOT) -> Path:
    """A copy of production/ and kernels/ with the fault in it. The caller removes the returned directory; a later run, if killed."""
    sweep_stale()
    copy = Path(tempfile.mkdtemp(prefix=f"fault-{fault.id}-"))
    try:
        lock = (copy / HELD).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held.append(lock)  # closed, and so let go, when the process ends
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
