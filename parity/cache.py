"""Passes of the reference and its twins, kept on disk, so that a second run of the same audit does not pay for them again.

One file per pass (a prefill or a decode step). Its key is a hash over everything that the values depend on: checkpoint,
policy, layers and points, code, torch and threads, and all tokens and replayed choices from the start up to this pass. What
production does differently changes its choices, hence the key: then the pass is computed. A file that is cut off, altered or
of another schema is ignored and written anew; the oldest files go when the folder grows past its limit.

    cache = ReferenceCache(cache_folder(), {"checkpoint": "8f14e45f..."}); cache.load(key); cache.save(key, Entry({...}, {...}))

Nothing is judged here. Tests: parity/unit/test_reference_cache.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from probes.core.recorder import Recorder
from probes.core.trace import Trace
from reference.checkpoint import Checkpoint

SCHEMA = 1
LIMIT_BYTES = 2 << 30
ROOT = Path(__file__).resolve().parents[1]
# What the cached values are made by.
CODE = ("reference/*.py", "parity/audit.py", "parity/cache.py", "probes/core/rows.py", "probes/core/trace.py", "probes/core/recorder.py")
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64, "i64": torch.int64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def cache_folder() -> Path:
    """DSV4_PARITY_CACHE or ~/.cache/dsv4-parity, and `reference` below it."""
    return Path(os.environ.get("DSV4_PARITY_CACHE") or Path.home() / ".cache" / "dsv4-parity") / "reference"


def code_hash() -> str:
    """sha256 over the source files of CODE."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(f"{path.relative_to(ROOT)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def checkpoint_facts(directory: str | Path, layers: range) -> dict[str, Any]:
    """Which weights: the content hash; where that only samples large shards, their sizes and times too."""
    checkpoint = Checkpoint(directory, layers)
    found = checkpoint.hash()
    facts: dict[str, Any] = {"hash": found}
    if found.startswith("sampled-"):
        facts["shards"] = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(Path(directory).glob("*.safetensors"))]
    return facts


def machine_facts() -> dict[str, Any]:
    """What decides the order of torch's sums."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability()}


def digest_of(*parts: Any) -> str:
    """sha256 over strings, JSON values, tensors and mappings of them; shapes and types count."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            value = part.detach().cpu().contiguous()
            digest.update(f"tensor {value.dtype} {list(value.shape)}\0".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, Mapping):
            digest.update(f"mapping {len(part)}\0".encode())
            for name in sorted(part):
                digest.update(f"{name}\0{digest_of(part[name])}".encode())
        else:
            digest.update(f"json {json.dumps(part, sort_keys=True)}\0".encode())
    return digest.hexdigest()


# ---- entries ----


@dataclass
class Entry:
    """Named tensors (fp32, fp64, int64) and plain facts."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


@dataclass
class ReferenceCache:
    """A folder of entries.

    facts   of the checkpoint, the machine, the code: part of every key
    found, computed, ignored   entries used, entries that were missing, files that were no good
    """

    directory: Path
    facts: dict[str, Any] = field(default_factory=dict)
    limit_bytes: int = LIMIT_BYTES
    found: int = 0
    computed: int = 0
    ignored: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    trouble: str = ""
    _held: int | None = None

    def start(self, *facts: Any) -> str:
        """The key from which a chain of passes starts."""
        return digest_of("start", SCHEMA, self.facts, *facts)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key[:40]}.safetensors"

    def holds(self, key: str) -> bool:
        """A file of this key is there; whether it is whole, load tells."""
        return self._path(key).is_file()

    def load(self, key: str) -> Entry | None:
        """The entry of a key; None when there is none, or none that is whole."""
        path = self._path(key)
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                meta = file.metadata() or {}
                blobs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
            if meta.get("key") != key or meta.get("schema") != str(SCHEMA) or meta.get("digest") != _digest(meta.get("index", ""), blobs):
                raise ValueError("not what was written")
            entry = _unpack(json.loads(meta["index"]), blobs)
        except FileNotFoundError:
            self.computed += 1
            return None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError):
            self.ignored += 1
            self.computed += 1
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self.found += 1
        self.bytes_read += sum(blob.numel() * blob.element_size() for blob in blobs.values())
        with contextlib.suppress(OSError):
            os.utime(path)
        return entry

    def save(self, key: str, entry: Entry) -> None:
        """Keep an entry; whole or not at all. A folder that cannot be written is noted and costs nothing but time."""
        if self.trouble:
            return
        index, blobs = _pack(entry)
        temporary = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self.directory)
            os.close(handle)
            save_file(blobs, temporary, metadata={"key": key, "schema": str(SCHEMA), "index": index, "digest": _digest(index, blobs)})
            size = os.path.getsize(temporary)
            os.replace(temporary, self._path(key))
        except (OSError, SafetensorError) as error:
            self.trouble = f"{self.directory} cannot be written: {error}"
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return
        self.bytes_written += size
        self._bound(size)

    def _bound(self, added: int) -> None:
        """Remove the oldest entries once the folder holds more than its limit."""
        self._held = sum(size for _, size, _ in self._files()) if self._held is None else self._held + added
        if self._held <= self.limit_bytes:
            return
        files = sorted(self._files())
        self._held = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._held <= 0.9 * self.limit_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                self._held -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.directory.glob("*.safetensors"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        return found


def _pack(entry: Entry) -> tuple[str, dict[str, Tensor]]:
    """All tensors of a type behind each other: a pass has thousands of small ones."""
    listed: list[tuple[str, str, list[int]]] = []
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in entry.tensors.items():
        kind = _NAMES[tensor.dtype]
        listed.append((name, kind, list(tensor.shape)))
        parts.setdefault(kind, []).append(tensor.detach().reshape(-1))
    index = json.dumps({"tensors": listed, "facts": entry.facts})
    return index, {kind: torch.cat(values).contiguous() for kind, values in parts.items()}


def _unpack(index: Mapping[str, Any], blobs: Mapping[str, Tensor]) -> Entry:
    at = dict.fromkeys(blobs, 0)
    tensors = {}
    for name, kind, shape in index["tensors"]:
        count = 1
        for size in shape:
            count *= size
        tensors[name] = blobs[kind][at[kind] : at[kind] + count].reshape(shape)
        at[kind] += count
    if any(at[kind] != blob.numel() for kind, blob in blobs.items()):
        raise ValueError("sizes do not add up")
    return Entry(tensors, index["facts"])


def _digest(index: str, blobs: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(index.encode())
    for name in sorted(blobs):
        digest.update(name.encode())
        digest.update(blobs[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ---- a further chain of the reference ----


def values_of(trace: Trace, phase: str, step: int | None) -> dict[str, Tensor]:
    """What a pass showed, as tensors of an entry."""
    return {f"value|{point}": trace.get(point, phase, step) for point in trace.passes[phase, step].chunks}


def trace_of(entry: Entry, points: Sequence[str], phase: str, step: int | None) -> Trace:
    """The trace of one pass that an entry holds."""
    trace = Trace(points)
    trace.begin(phase, step)
    trace.passes[phase, step].chunks |= {name.removeprefix("value|"): [value] for name, value in entry.tensors.items() if name.startswith("value|")}
    return trace


class Chain:
    """The reference on its own choices, pass by pass, each from the cache or computed; without a cache always computed.

    make    gives the model, and is called only when a pass has to be computed
    start   the key to start from; points  what is recorded; layers  whose state after the prefill is kept
    """

    def __init__(self, cache: ReferenceCache | None, start: str, make: Callable[[], Any], points: Sequence[str], batch: int, max_context: int, layers: Sequence[int] = ()) -> None:
        self.cache, self.make, self.points, self.layers = cache, make, tuple(points), tuple(layers)
        self.batch, self.max_context = batch, max_context
        self.after_prefill: dict[int, dict[str, Tensor]] = {}
        self._key = digest_of(start, "chain", list(points), list(layers))
        self._passes: list[tuple[str, Tensor, Tensor | None]] = []
        self._computed = 0
        self._model: Any = None
        self._state: Any = None

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Trace:
        return self._pass("prefill", None, tokens, lengths)

    def decode(self, tokens: Tensor, step: int) -> Trace:
        """tokens [b]."""
        return self._pass("decode", step, tokens, None)

    def _pass(self, phase: str, step: int | None, tokens: Tensor, lengths: Tensor | None) -> Trace:
        self._passes.append((phase, tokens, lengths))
        self._key = digest_of(self._key, phase, tokens, {} if lengths is None else {"lengths": lengths})
        entry = self.cache.load(self._key) if self.cache is not None else None
        if entry is not None:
            if phase == "prefill":
                self.after_prefill = {n: {k.split("|", 2)[2]: v for k, v in entry.tensors.items() if k.startswith(f"after|{n}|")} for n in self.layers}
            return trace_of(entry, self.points, phase, step)
        if self._model is None:
            self._model = self.make()
            self._state = self._model.new_state(self.batch, self.max_context)
        for earlier in self._passes[self._computed : -1]:
            self._run(*earlier)
        with Recorder(self._model, self.points) as trace:
            trace.begin(phase, step)
            self._run(phase, tokens, lengths)
        self._computed = len(self._passes)
        if phase == "prefill":
            self.after_prefill = {n: self._state.export_layer(n) for n in self.layers}
        if self.cache is not None:
            states = {f"after|{n}|{part}": value for n, snapshot in self.after_prefill.items() for part, value in snapshot.items()} if phase == "prefill" else {}
            self.cache.save(self._key, Entry({**values_of(trace, phase, step), **states}, {}))
        return trace

    def _run(self, phase: str, tokens: Tensor, lengths: Tensor | None) -> None:
        if phase == "prefill":
            self._model.prefill(tokens, self._state, lengths)
        else:
            self._model.decode(tokens, self._state)


# ---- noise floors ----


def pack_floor(name: str, floor: Any, entry: Entry) -> None:
    """A floor of one pass into an entry: its numbers as facts, its rows as tensors."""
    numbers: dict[str, float | int] = {}
    for one in fields(floor):
        value = getattr(floor, one.name)
        if isinstance(value, int | float):
            numbers[one.name] = value
            continue
        for twin, by_pass in value.items():
            for (phase, step), rows in by_pass.items():
                entry.tensors[f"floor|{name}|{one.name}|{twin}|{phase}|{'' if step is None else step}"] = rows
    entry.facts.setdefault("floors", {})[name] = numbers


def unpack_floors(entry: Entry, make: Any) -> dict[str, Any]:
    """The floors of an entry, by the names they were packed under. make() gives an empty one."""
    floors: dict[str, Any] = {}
    for name, numbers in entry.facts.get("floors", {}).items():
        floors[name] = make()
        for key, value in numbers.items():
            setattr(floors[name], key, value)
    for key, rows in entry.tensors.items():
        if key.startswith("floor|"):
            _, name, part, twin, phase, step = key.split("|")
            getattr(floors[name], part).setdefault(int(twin), {})[phase, int(step) if step else None] = rows
    return floors


# ---- states: what a pass changed ----


def pack_change(name: str, old: Tensor, new: Tensor, entry: Entry) -> None:
    """`new` as its difference to `old`: rows [b, column] that changed, after a shift by one column where that is less."""
    if old.dim() != 3 or new.dim() != 3 or old.shape[0] != new.shape[0] or old.shape[2] != new.shape[2]:
        entry.tensors[f"{name}|whole"] = new
        return
    best: tuple[int, Tensor, Tensor] | None = None
    for shift in (0, 1):
        changed = (_bits(_base(old, new.shape[1], shift)) != _bits(new)).any(-1).nonzero()
        if best is None or len(changed) < len(best[1]):
            best = (shift, changed, new[changed[:, 0], changed[:, 1]])
    assert best is not None
    shift, where, rows = best
    entry.tensors[f"{name}|where"], entry.tensors[f"{name}|rows"] = where, rows
    entry.tensors[f"{name}|form"] = torch.tensor([new.shape[1], shift])


def unpack_change(name: str, old: Tensor, entry: Entry) -> Tensor:
    """The opposite of `pack_change`."""
    whole = entry.tensors.get(f"{name}|whole")
    if whole is not None:
        return whole
    columns, shift = entry.tensors[f"{name}|form"].tolist()
    new = _base(old, columns, shift).clone()
    where = entry.tensors[f"{name}|where"]
    new[where[:, 0], where[:, 1]] = entry.tensors[f"{name}|rows"]
    return new


def _base(old: Tensor, columns: int, shift: int) -> Tensor:
    kept = old[:, shift : shift + columns]
    return torch.nn.functional.pad(kept, (0, 0, 0, columns - kept.shape[1]), value=torch.nan)


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int32) if value.dtype == torch.float32 else value


def pack_states(before: Mapping[int, Mapping[str, Tensor]], after: Mapping[int, Mapping[str, Tensor]], entry: Entry) -> None:
    """What a pass did to the states of layers, by the names of STATE_LEGEND."""
    for layer, snapshot in after.items():
        for part, value in snapshot.items():
            pack_change(f"state|{layer}|{part}", before[layer][part], value, entry)


def unpack_states(before: Mapping[int, Mapping[str, Tensor]], entry: Entry) -> dict[int, dict[str, Tensor]]:
    """The states after a pass."""
    return {
        layer: {part: unpack_change(f"state|{layer}|{part}", value, entry) for part, value in snapshot.items()}
        for layer, snapshot in before.items()
    }

