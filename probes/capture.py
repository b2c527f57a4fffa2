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

Nothing here raises into the engine: what goes wrong is one line on stderr and `trouble` in the manifest. stop() takes every hook
off. The process that began the first pass writes, a fork of it does nothing. Needs torch and safetensors. The format, shards and
CUDA graphs: docs/trace.md. Tests: parity/unit/test_capture.py.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import fnmatch
import json
import operator
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
NUMBERS = ("index", "count", "dim", "of")  # of a shard's description, beside kind, dtype and experts
NO_TENSOR = "no tensor: "  # how a compiled graph says that it was shown something else
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
            if isinstance(tensor, Tensor):
                _traced(_kept, tensor, str(point), "" if shard is None else ";".join([f"{name}={shard[name]}" for name in shard]) if isinstance(shard, dict) else str(shard))
            else:
                _traced(_kept, _NOTHING, str(point), f"{NO_TENSOR}{type(tensor).__name__} is none")
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
    a function of the output, or a pair of that and a shard. Returns a function that takes the hook off again; so does stop().
    """
    taken: list[Callable[[], None]] = []
    if _session is not None:
        _session.guarded(_session.hook, root, points, taken)
    return taken[0] if taken else _nothing


def capturing() -> bool:
    """Whether anything is captured: to spare an engine a value that it makes only for show."""
    return _session is not None and not _session.stopped and _session.is_own()


def start(directory: str | Path, points: str | None = "*", steps: str | None = "", budget: str | int | None = DEFAULT_BYTES, rank: str | None = "") -> bool:
    """Begin to capture without environment variables. False, and one line on stderr, where that cannot be."""
    global _session
    stop()
    try:
        _session = _Session(Path(directory), "*" if points is None else points, steps or "", DEFAULT_BYTES if budget is None else budget, rank or "")
    except Exception as error:  # whatever a setting is, the engine goes on
        _say(f"off: {error}")
        return False
    return True


def stop() -> None:
    """Close the open pass and take the hooks off; nothing is captured from here on."""
    global _session
    if _session is not None:
        _session.guarded(_session.end)
        _session.unhook()
        atexit.unregister(_session.finish)
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
        self.owner: int | None = None  # the process that began a pass
        self.hooks: list[Any] = []
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
        atexit.register(self.finish)

    def finish(self) -> None:
        """When the process ends."""
        self.guarded(self.end)

    def is_own(self) -> bool:
        """False in a fork of the process that captures. A server that forks its workers before the first pass captures in them."""
        return self.owner is None or self.owner == os.getpid()

    def _settle(self) -> None:
        """The folder that this rank writes to: claimed by its manifest, since two workers may have forked off with one setting."""
        self.rank, self.size = _rank(self.given_rank)
        home = self.directory / f"rank-{self.rank}" if self.size > 1 else self.directory
        if home.exists() and any(home.iterdir()):
            self.stopped = f"{home} is not empty; next: give DSV4_CAPTURE a new directory"
            raise ValueError(self.stopped)
        home.mkdir(parents=True, exist_ok=True)
        try:
            (home / "manifest.json").touch(exist_ok=False)
        except FileExistsError:
            self.stopped = f"{home} is another process's; next: one rank a process (DSV4_CAPTURE_RANK), or a directory for each"
            raise ValueError(self.stopped) from None
        self.home, self.owner = home, os.getpid()
        self._manifest()

    def guarded(self, call: Callable[..., None], *args: Any) -> None:
        """Run under the lock. What goes wrong is told once and written down; the engine goes on. Nothing runs in a fork."""
        if not self.is_own():
            return
        with self.lock:
            try:
                call(*args)
            except Exception as error:
                self.tell(getattr(call, "__name__", "call"), error)

    def tell(self, what: str, error: Exception) -> None:
        """One line on stderr, and in the manifest."""
        said = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if said not in self.trouble and len(self.trouble) < 20:
            self.trouble.append(said)
            _say(said)
            with contextlib.suppress(Exception):
                self._manifest()

    def describe(self, facts: Mapping[str, Any]) -> None:
        self.facts.update(json.loads(json.dumps(facts, allow_nan=False)))  # a copy: what is plain now stays so
        self._manifest()

    def hook(self, root: Any, points: Mapping[str, Any], taken: list[Callable[[], None]]) -> None:
        rows = [(point, *(what if isinstance(what, tuple) else (what, None))) for point, what in points.items()]
        rows = [(point, read, shard) for point, read, shard in rows if self._wants(point)]
        if not rows:
            return

        def shown(_: Any, __: Any, output: Any) -> None:
            if _session is None:
                return  # a copy of the module, made while it was hooked
            for point, read, shard in rows:
                try:
                    value = read(output) if read is not None else output[0] if isinstance(output, tuple | list) else output
                except Exception as error:
                    if torch.compiler.is_compiling():
                        _traced(_kept, _NOTHING, point, f"{NO_TENSOR}its function raised {type(error).__name__}")
                    else:
                        _session.guarded(_session.missed, point, error)
                    continue
                if value is not None:
                    show(point, value, shard)

        handle = root.register_forward_hook(shown)
        self.hooks.append(handle)
        taken.append(lambda: handle.remove())

    def unhook(self) -> None:
        for handle in self.hooks:
            handle.remove()
        self.hooks = []

    def missed(self, point: str, error: Exception) -> None:
        """A point that could not be shown: this pass says so, no value stands for it."""
        if not self.stopped and self._wants(point):
            if self.open is not None and self._is_asked():
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                self.open["refused"][str(point)] = kind + " ".join(str(error).split())[:200]
            self.tell(f"show: {point}", error)

    # ---- passes ----

    def begin(self, phase: str, step: int | None, tokens: Any, positions: Any, lengths: Any, valid: Any) -> None:
        self.end()
        step = None if step is None else operator.index(step)
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
            "tokens": _listed(tokens), "positions": _listed(positions), "lengths": _listed(lengths), "valid": _listed(valid, truth=True), "tensors": {}, "unseen": {}, "refused": {},
        }  # fmt: skip
        self.held = {}
        for buffers in self.buffers.values():
            for buffer in buffers:
                buffer.poison()

    def _is_asked(self) -> bool:
        assert self.open is not None
        return self.prefill if self.open["phase"] == PREFILL else self.steps is None or any(a <= self.open["step"] <= b for a, b in self.steps)

    def show(self, point: str, tensor: Any, shard: Any) -> None:
        if self.stopped or not self._wants(point):
            return
        try:
            self._show(point, tensor, shard)
        except Exception as error:
            self.missed(point, error)

    def _show(self, point: str, tensor: Any, shard: Any) -> None:
        if isinstance(shard, str) and shard.startswith(NO_TENSOR):
            raise ValueError(shard)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{NO_TENSOR}{type(tensor).__name__} is none")
        if tensor.is_complex():
            raise ValueError(f"{tensor.dtype}, expected real numbers; next: show view_as_real of it under a name of its own")
        shard = _described(shard)
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

    def _take(self, point: str, value: Tensor, shard: Shard | None, graph: bool = False) -> None:
        assert self.open is not None
        size = value.numel() * value.element_size()
        if self.spent + size > self.budget:
            where = self.open["phase"] + ("" if self.open["step"] is None else f" step {self.open['step']}")
            self.stopped = f"byte budget: {self.spent} of {self.budget} bytes are taken, {point} of {where} needs {size} more"
            _say(f"stopped: {self.stopped}")
            self.unhook()
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
        try:
            self._end(one)
        finally:
            self.open, self.held = None, {}  # what could not be written is told, and the next pass is another

    def _end(self, one: dict[str, Any]) -> None:
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


def _say(line: str) -> None:
    with contextlib.suppress(Exception):  # a server may have closed stderr
        print(f"capture: {line}", file=sys.stderr, flush=True)


def _described(shard: Any) -> dict[str, Any] | None:
    """A shard's description as the manifest keeps it: plain numbers, text and lists. From a compiled graph: name=value;..."""
    if shard is None or shard == "":
        return None
    given = dict(part.split("=", 1) for part in shard.split(";")) if isinstance(shard, str) and "=" in shard else shard
    if not isinstance(given, Mapping) or given.get("kind") not in SHARDS:
        raise ValueError(f"shard {shard!r}: expected a dictionary with a kind of {', '.join(SHARDS)}")
    out: dict[str, Any] = {}
    for name, value in given.items():
        try:
            if name == "kind":
                out[name] = value
            elif name == "dtype":
                out[name] = str(value).removeprefix("torch.")
            elif name in NUMBERS:
                out[name] = operator.index(ast.literal_eval(value) if isinstance(value, str) else value)
            elif name == "experts":
                experts = _experts(value) if isinstance(value, str) else value
                out[name] = [operator.index(expert) for expert in (sorted(experts) if isinstance(experts, set | frozenset) else experts)]
            else:
                raise ValueError("unknown")
        except (TypeError, ValueError, SyntaxError):
            raise ValueError(f"shard {shard!r}: {name} {value!r}: expected whole numbers ({', '.join(NUMBERS)}), a list of them (experts) or text (dtype)") from None
    return out


def _experts(text: str) -> Any:
    """A list, tuple, set or range as a compiled graph wrote it."""
    found = re.fullmatch(r"range\((\d+), (\d+)(?:, (\d+))?\)", text)
    return range(int(found[1]), int(found[2]), int(found[3] or 1)) if found else ast.literal_eval(text)


def _listed(value: Any, truth: bool = False) -> Any:
    """Plain lists of a tensor, an array or a list of whole numbers (truth: of booleans); at most [b, s]."""
    if value is None:
        return None
    given = torch.as_tensor(value)
    if given.dim() not in (1, 2):
        raise ValueError(f"tokens, positions, lengths and valid are [b, s] or flat, got {list(given.shape)}")
    if given.numel() and (given.is_floating_point() or given.is_complex() or (given.dtype == torch.bool) != truth):
        if not truth or given.is_floating_point() or given.is_complex() or not bool(((given == 0) | (given == 1)).all()):
            raise ValueError(f"{given.dtype}: tokens, positions and lengths are whole numbers, valid is true or false")
        given = given.bool()
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


def _show_compiled(kept: Tensor, tensor: Tensor, point: str, shard: str) -> None:
    """`show` as an operator that a compiled graph calls. That it says to change `kept`, an input of every graph, keeps it there."""
    if _session is not None:
        _session.guarded(_session.show, point, tensor, shard)


def _renew() -> None:
    """In a fork: another thread may have held the lock."""
    if _session is not None:
        _session.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

_kept, _NOTHING = torch.zeros(()), torch.zeros(())
_traced = torch.library.custom_op("dsv4_capture::show", _show_compiled, mutates_args=("kept",))
_traced.register_fake(lambda kept, tensor, point, shard: None)

if os.environ.get("DSV4_CAPTURE"):
    start(
        os.environ["DSV4_CAPTURE"], os.environ.get("DSV4_CAPTURE_POINTS", "*"), os.environ.get("DSV4_CAPTURE_STEPS", ""),
        os.environ.get("DSV4_CAPTURE_BYTES", str(DEFAULT_BYTES)), os.environ.get("DSV4_CAPTURE_RANK", ""),
    )  # fmt: skip
