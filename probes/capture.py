"""Capture what a running engine computes, as a trace that `pytest parity/ --trace DIR` audits. One file: copy it into any server.

    DSV4_CAPTURE=/tmp/trace python -m my_engine ...           # nothing set: every call here returns at once

    import capture
    capture.describe(engine="my engine 1.2", policy=["bf16"])                # once, any plain JSON
    capture.module(layer.attn.wo_b, {"layers.0.attn.out": None})             # hooks: None = the output, or a function of it
    capture.begin("prefill", tokens=ids, positions=positions)                # a pass; decode counts its steps from 0
    capture.show("layers.0.attn.q", q, shard={"kind": "head"})               # anywhere in between
    capture.end()                                                            # begin() of the next pass ends this one too

    DSV4_CAPTURE          directory, new or empty; unset: off
    DSV4_CAPTURE_POINTS   names or patterns with commas, e.g. layers.0.*,logits (default: all)
    DSV4_CAPTURE_STEPS    prefill, numbers and ranges with commas, e.g. prefill,0-3 (default: all); tokens are kept of every pass
    DSV4_CAPTURE_BYTES    budget, e.g. 500M or 4G (default: 4G): what would pass it ends the capture, and the manifest says so
    DSV4_CAPTURE_RANK     of a tensor-parallel server: rank/size, e.g. 1/4 (default: torch.distributed's, where it is initialised)

Nothing here raises into the engine: what goes wrong is one line on stderr and `trouble` in the manifest. Needs torch and
safetensors. The format, shards and CUDA graphs: docs/trace.md. Tests: parity/unit/test_capture.py.
"""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SCHEMA, KIND = 2, "dsv4-trace"
PREFILL, DECODE = "prefill", "decode"
DEFAULT_BYTES = 4 << 30
POISON = {True: 0xFF, False: 0xA5}  # bytes that a graph's buffer holds until a replay writes it: NaN in every float format
SHARDS = ("replicated", "column", "row", "head", "sum", "expert", "concat")
Shard = Mapping[str, Any]
Read = Callable[[Any], Tensor | None]


# ---- what an engine calls: each returns at once while nothing captures ----


def begin(phase: str, step: int | None = None, tokens: Any = None, positions: Any = None, lengths: Any = None, valid: Any = None) -> None:
    """Open a pass, and close the one before. phase "prefill" (again: its next chunk) or "decode" with a step from 0.

    tokens     token ids: [b, s], or flat [t]: rows one behind the other as `lengths` says (decode: one token a row; else one row)
    positions  absolute position of each token, in the shape of tokens (default: counted from what each row had)
    lengths    [b] tokens of each row, of flat tokens; valid  [b, s] False for pads of [b, s] tokens
    """
    if _session is not None:
        _session.guarded(_session.begin, phase, step, tokens, positions, lengths, valid)


def show(point: str, tensor: Any, shard: Shard | None = None) -> None:
    """Take a copy of a value into the open pass: its first axes are those of the pass's tokens. Shown again: further tokens.

    shard  which part this rank holds, e.g. {"kind": "column"}; kinds and options in docs/trace.md (default: all of it)
    """
    if _session is not None:
        if torch.compiler.is_compiling():
            _traced(tensor, point, "" if shard is None else ";".join([f"{name}={shard[name]}" for name in shard]))
        else:
            _session.guarded(_session.show, point, tensor, shard)


def end() -> None:
    """Close the open pass and write its file."""
    if _session is not None:
        _session.guarded(_session.end)


def describe(**facts: Any) -> None:
    """Facts for the manifest: engine, model, policy (names of reference/formats.py), layers (numbers that the model runs)."""
    if _session is not None:
        _session.guarded(_session.describe, facts)


def module(root: Any, points: Mapping[str, Read | tuple[Read | None, Shard | None] | None]) -> Callable[[], None]:
    """Show what `root` (a torch module) puts out, at every call. points  name -> None for the output (the first of several),
    a function of the output, or a pair of that and a shard. Returns a function that takes the hook off again.
    """
    if _session is None:
        return _nothing
    return _session.hook(root, points)


def capturing() -> bool:
    """Whether anything is captured: to spare an engine a value that it makes only for show."""
    return _session is not None and not _session.stopped


def start(directory: str | Path, points: str = "*", steps: str = "", budget: str | int = DEFAULT_BYTES, rank: str = "") -> bool:
    """Begin to capture without environment variables. False, and one line on stderr, where that cannot be."""
    global _session
    stop()
    try:
        _session = _Session(Path(directory), points, steps, budget, rank)
    except (OSError, ValueError) as error:
        print(f"capture: off: {error}", file=sys.stderr, flush=True)
        return False
    return True


def stop() -> None:
    """Close the open pass; nothing is captured from here on."""
    global _session
    if _session is not None:
        _session.guarded(_session.end)
        _session = None


# ---- the session ----


class _Buffer:
    """Where a CUDA graph writes a value at every replay."""

    def __init__(self, value: Tensor, shard: Shard | None) -> None:
        self.kept = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        self.shard = shard
        self.raw = self.kept.view(torch.uint8) if self.kept.dim() and self.kept.numel() else None
        self.byte = POISON[value.is_floating_point()]

    def poison(self) -> None:
        if self.raw is not None:
            self.raw.fill_(self.byte)

    def written(self) -> bool:
        return self.raw is not None and bool((self.raw != self.byte).any())


class _Session:
    """One capture: the open pass, graph buffers, and the manifest."""

    def __init__(self, directory: Path, points: str, steps: str, budget: str | int, rank: str) -> None:
        self.directory, self.patterns = directory, [part.strip() for part in points.split(",") if part.strip()]
        self.prefill, self.steps = _steps(steps)
        self.budget, self.spent = _bytes(budget), 0
        self.given_rank = rank
        self.rank, self.size = _rank(rank)
        self.home: Path | None = None  # known at the first pass: by then torch.distributed is initialised
        self.lock = threading.RLock()
        self.wanted: dict[str, bool] = {}
        self.buffers: dict[str, list[_Buffer]] = {}
        self.facts: dict[str, Any] = {}
        self.passes: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self.held: dict[str, Tensor] = {}
        self.stopped = ""
        self.trouble: list[str] = []
        self.outside = 0
        if directory.exists() and (not directory.is_dir() or any(not path.name.startswith("rank-") for path in directory.iterdir())):
            raise ValueError(f"{directory}: exists and is not empty; next: give DSV4_CAPTURE a new directory")
        directory.mkdir(parents=True, exist_ok=True)
        atexit.register(self.guarded, self.end)

    def _settle(self) -> None:
        """The folder that this rank writes to."""
        self.rank, self.size = _rank(self.given_rank)
        home = self.directory / f"rank-{self.rank}" if self.size > 1 else self.directory
        if home.exists() and any(home.iterdir()):
            self.stopped = f"{home} is not empty; next: give DSV4_CAPTURE a new directory"
            raise ValueError(self.stopped)
        home.mkdir(parents=True, exist_ok=True)
        self.home = home

    def guarded(self, call: Callable[..., None], *args: Any) -> None:
        """Run under the lock. What goes wrong is told once and written down; the engine goes on."""
        with self.lock:
            try:
                call(*args)
            except Exception as error:
                said = f"{getattr(call, '__name__', 'call')}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                if said not in self.trouble and len(self.trouble) < 20:
                    self.trouble.append(said)
                    print(f"capture: {said}", file=sys.stderr, flush=True)
                    with contextlib.suppress(OSError):
                        self._manifest()

    def describe(self, facts: Mapping[str, Any]) -> None:
        json.dumps(facts, allow_nan=False)
        self.facts.update(facts)
        self._manifest()

    def hook(self, root: Any, points: Mapping[str, Any]) -> Callable[[], None]:
        rows = [(point, *(what if isinstance(what, tuple) else (what, None))) for point, what in points.items()]

        def shown(_: Any, __: Any, output: Any) -> None:
            for point, read, shard in rows:
                value = read(output) if read is not None else output[0] if isinstance(output, tuple | list) else output
                if value is not None:
                    show(point, value, shard)

        handle = root.register_forward_hook(shown)
        return lambda: handle.remove()

    # ---- passes ----

    def begin(self, phase: str, step: int | None, tokens: Any, positions: Any, lengths: Any, valid: Any) -> None:
        self.end()
        if phase not in (PREFILL, DECODE) or (phase == DECODE) != (step is not None) or (step is not None and step < 0):
            raise ValueError(f"phase {phase!r}, step {step!r}: expected 'prefill', or 'decode' with a step from 0")
        if self.stopped:
            return
        if self.home is None:
            self._settle()
        again = [one for one in self.passes if (one["phase"], one["step"]) == (phase, step)]
        if again and phase == DECODE:
            raise ValueError(f"decode step {step} was captured already: one request (or one batch) a trace; steps go on counting from 0")
        number = len(self.passes)
        self.open = {
            "phase": phase, "step": step, "chunk": len(again), "file": f"{number:04d}-{phase}" + ("" if step is None else f"-{step}") + (f"-chunk{len(again)}" if again else "") + ".safetensors",
            "tokens": _listed(tokens), "positions": _listed(positions), "lengths": _listed(lengths), "valid": _listed(valid), "tensors": {}, "unseen": {},
        }  # fmt: skip
        self.held = {}
        for buffers in self.buffers.values():
            for buffer in buffers:
                buffer.poison()

    def _is_asked(self) -> bool:
        assert self.open is not None
        return self.prefill if self.open["phase"] == PREFILL else self.steps is None or any(a <= self.open["step"] <= b for a, b in self.steps)

    def show(self, point: str, tensor: Any, shard: Shard | None) -> None:
        if self.stopped or not self._wants(point):
            return
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{point}: {type(tensor).__name__} is no tensor")
        if shard is not None and shard.get("kind") not in SHARDS:
            raise ValueError(f"{point}: shard {dict(shard)!r}: expected a kind of {', '.join(SHARDS)}")
        if in_graph(tensor):
            buffer = _Buffer(tensor, shard)  # from the graph's own pool, and kept: no later replay may use its memory
            buffer.kept.copy_(tensor.detach())
            self.buffers.setdefault(point, []).append(buffer)
            return
        if self.open is None:
            self.outside += 1  # warm-up, or a call that nobody announced
        elif self._is_asked():
            self._take(point, tensor.detach(), shard)

    def _wants(self, point: str) -> bool:
        known = self.wanted.get(point)
        if known is None:
            known = self.wanted[point] = any(fnmatch.fnmatchcase(point, pattern) for pattern in self.patterns)
        return known

    def _unseen(self, point: str, why: str) -> None:
        if self.open is not None:
            self.open["unseen"][point] = why

    def _take(self, point: str, value: Tensor, shard: Shard | None, graph: bool = False) -> None:
        assert self.open is not None
        size = value.numel() * value.element_size()
        if self.spent + size > self.budget:
            where = self.open["phase"] + ("" if self.open["step"] is None else f" step {self.open['step']}")
            self.stopped = f"byte budget: {self.spent} of {self.budget} bytes are taken, {point} of {where} needs {size} more"
            print(f"capture: stopped: {self.stopped}", file=sys.stderr, flush=True)
            return
        self.spent += size
        parts = sum(entry["point"] == point for entry in self.open["tensors"].values())
        key = f"{point}#{parts}" if parts else point
        self.held[key] = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        self.open["tensors"][key] = {
            "point": point, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "shard": None if shard is None else dict(shard),
        } | ({"graph": True} if graph else {})  # fmt: skip

    def end(self) -> None:
        one = self.open
        if one is None:
            return
        if self._is_asked():
            for point, buffers in self.buffers.items():
                if not self.stopped and any(e["point"] == point for e in one["tensors"].values()):
                    continue  # shown outside of the graph
                found = [buffer for buffer in buffers if buffer.written()]
                if not found:
                    one["unseen"].setdefault(point, "captured in a CUDA graph that was not replayed in this pass")
                for buffer in found[:1]:
                    if not self.stopped:
                        self._take(point, _cut(buffer.kept, one), buffer.shard, graph=True)
                if len(found) > 1:
                    one["unseen"][point] = f"{len(found)} CUDA graphs were replayed in this pass: the first is kept"
        assert self.home is not None
        path = self.home / one["file"]
        save_file(self.held, path.with_suffix(".part"))
        path.with_suffix(".part").chmod(0o644)
        os.replace(path.with_suffix(".part"), path)
        one["bytes"] = path.stat().st_size
        self.passes.append(one)
        self.open, self.held = None, {}
        self._manifest()

    def _manifest(self) -> None:
        """Written beside and put in place: a server that dies leaves the passes that were closed."""
        if self.home is None:
            return
        text = json.dumps(
            {
                "kind": KIND, "schema": SCHEMA, "description": self.facts, "rank": self.rank, "size": self.size, "passes": self.passes,
                "stopped": self.stopped, "trouble": self.trouble, "outside": self.outside, "bytes": self.spent,
            },
            allow_nan=False, ensure_ascii=False,
        )  # fmt: skip
        part = self.home / "manifest.part"
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, self.home / "manifest.json")


def in_graph(tensor: Tensor) -> bool:
    """Whether the current stream records a CUDA graph: nothing can be read then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _cut(value: Tensor, one: Mapping[str, Any]) -> Tensor:
    """A graph for more tokens than the pass has holds pads behind them."""
    tokens = one["tokens"]
    if not tokens:
        return value
    width = len(tokens[0]) if isinstance(tokens[0], list) else 1
    return value[: len(tokens) if width == 1 or value.shape[1:2] == (width,) else len(tokens) * width]


def _listed(value: Any) -> Any:
    """Plain lists of a tensor, an array or a list; at most [b, s]."""
    if value is None:
        return None
    given = torch.as_tensor(value)
    if given.dim() not in (1, 2):
        raise ValueError(f"tokens, positions, lengths and valid are [b, s] or flat, got {list(given.shape)}")
    return given.detach().cpu().tolist()


def _steps(text: str) -> tuple[bool, Sequence[tuple[int, int]] | None]:
    """Whether prefill is asked for, and ranges of decode steps (None: all)."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        return True, None
    ranges = []
    for part in parts:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if part != PREFILL and found is None:
            raise ValueError(f"DSV4_CAPTURE_STEPS={text}: {part!r}: expected prefill, a number or a range, e.g. prefill,0-3")
        if found is not None:
            ranges.append((int(found[1]), int(found[2] or found[1])))
    return PREFILL in parts, ranges


def _bytes(given: str | int) -> int:
    found = re.fullmatch(r"(\d+)([KMGT]?)i?B?", str(given).strip())
    if found is None:
        raise ValueError(f"DSV4_CAPTURE_BYTES={given}: expected a number with K, M or G, e.g. 500M")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


def _rank(given: str) -> tuple[int, int]:
    if given:
        found = re.fullmatch(r"(\d+)/(\d+)", given)
        if found is None or int(found[1]) >= int(found[2]):
            raise ValueError(f"DSV4_CAPTURE_RANK={given}: expected rank/size, e.g. 1/4")
        return int(found[1]), int(found[2])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _nothing() -> None:
    """What `module` returns while nothing captures."""


_session: _Session | None = None


def _show_compiled(tensor: Tensor, point: str, shard: str) -> None:
    """`show` as an operator that a compiled graph calls. It changes nothing: that it says so keeps it from being left out."""
    if _session is not None:
        _session.guarded(_session.show, point, tensor, _parsed(shard))


def _parsed(shard: str) -> Shard | None:
    """What `show` wrote for the operator: name=value;..."""
    if not shard:
        return None
    pairs = [part.split("=", 1) for part in shard.split(";")]
    return {name: value if name == "kind" else json.loads(value) for name, value in pairs}


_traced = torch.library.custom_op("dsv4_capture::show", _show_compiled, mutates_args=("tensor",))
_traced.register_fake(lambda tensor, point, shard: None)

if os.environ.get("DSV4_CAPTURE"):
    start(
        os.environ["DSV4_CAPTURE"], os.environ.get("DSV4_CAPTURE_POINTS", "*"), os.environ.get("DSV4_CAPTURE_STEPS", ""),
        os.environ.get("DSV4_CAPTURE_BYTES", str(DEFAULT_BYTES)), os.environ.get("DSV4_CAPTURE_RANK", ""),
    )  # fmt: skip
