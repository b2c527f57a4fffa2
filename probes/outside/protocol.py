"""What somebody else's production looks like to the audit, and how little of it is needed.

    pytest parity/ --production package.module:factory

    factory(checkpoint_dir, layers=range(0, 4), max_context=8192, device="cpu") -> model

    model.prefill(tokens, state)        tokens [b, s] int64 -> logits [b, s, vocab], every row of the same length
    model.decode(tokens, state)         tokens [b] int64 -> logits [b, vocab]
    model.new_state(batch, max_context) -> state        whatever a batch carries between calls
    model.points                        point name -> where it is seen (below); what is not listed is told as not covered
    model.root                          optional: the torch module whose submodules `points` names (default: the model itself)
    model.policy                        optional: where it rounds, names of reference/formats.py (default: nowhere)
    model.ragged                        optional: True where prefill takes `lengths` [b] as a third argument
    model.raw                           optional: point -> tensor of the last call before `read` converted it (index queries)
    model.measured(tokens)              optional: name of a measurement -> its values, once at the end of a run
    model.name, model.notes             optional: for people

A value of `points` is the dotted name of a submodule, whose output is the point; or a pair of that name and a function
`read(call)` that takes the tensor out of a `Call`. `{layer}` in a point or in a name stands for every layer. A model without
submodules calls `model.show(point, tensor)`, which the audit puts there, wherever it has a value to show: once a call, whole, in the
axes of reference/points.py. What is shown in other axes, as other numbers or twice is refused with the reason, and the rest is judged.

Nothing has to be imported from this project. Hooks are borrowed for the length of a call and returned; so are settings of torch that
a factory changes (default dtype, matmul precision, threads ...): they hold in its own calls only, and the header names them.
Tests: parity/unit/test_examples.py; an example in docs/examples.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probes.outside import shapes
from probes.outside.settings import Settings
from reference.config import InputError, ModelConfig
from reference.formats import POINTS, Policy
from reference.points import Taps, spec_of


@dataclass(frozen=True)
class Call:
    """One call of a submodule, as a row of `points` reads it.

    module                 the submodule; args, kwargs, output as it got and gave them
    layer                  number of the layer in the module's name, None outside of layers
    positions              [b, s] int64, absolute position of each query of the running prefill or decode call
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    layer: int | None
    positions: Tensor


Read = Callable[[Call], Tensor | None]
Rows = Mapping[str, "str | tuple[str, Read]"]


def first_output(call: Call) -> Tensor:
    """The output, or the first of several."""
    found = call.output[0] if isinstance(call.output, tuple | list) else call.output
    assert isinstance(found, Tensor)
    return found


def load_factory(name: str, option: str = "--production") -> Callable[..., Any]:
    """`package.module:factory`, found from the current directory too. Raises InputError."""
    module, colon, attribute = name.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z_][\w.]*", module) or not re.fullmatch(r"[A-Za-z_][\w.]*", attribute):
        raise InputError(f"{option} {name}: expected {'transformers or ' if option == '--production' else ''}package.module:factory")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"{option} {name}: {module} cannot be imported: {error}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"{option} {name}: {module} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{option} {name}: {attribute} is no function")
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Row:
    """One point of one layer: where it is seen."""

    point: str
    module: str
    layer: int | None
    read: Read


class Outside:
    """A foreign model in the words of the audit: taps, policy, prefill, decode. Made by `wrap`.

    model     what the factory returned
    taps      fires the points that `model.points` names, for loaded layers
    policy    rounding points that it declares
    ragged    rows of a batch may differ in length
    settings  of torch, that hold while its own code runs (probes/outside/settings.py)
    config    of the DeepSeek-V4 that it is: what it shows must have these sizes; None: it is another model, and may show anything
    refused   point -> why what the last call showed of it cannot be used: what observers were given of it is not to be read
    """

    def __init__(self, model: Any, points: Rows, layers: Sequence[int], name: str, policy: frozenset[str], ragged: bool, notes: Sequence[str], any_name: bool = False, settings: Settings | None = None) -> None:
        self.model, self.layers, self.name, self.policy, self.ragged = model, tuple(layers), name, policy, ragged
        self.settings = settings or Settings()
        self._notes = tuple(notes)
        self.root: Any = getattr(model, "root", model)
        self._rows = _expanded(points, self.layers, self.root, any_name)
        self.taps = Taps(tuple(row.point for row in self._rows))
        self.config: ModelConfig | None = None
        self.refused: dict[str, str] = {}
        self._queries: tuple[int, int] = (0, 0)
        self._shown: set[str] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """For people: what the model says of itself, and settings of torch that it changed."""
        return (*self._notes, *self.settings.notes())

    @property
    def raw(self) -> Mapping[str, Tensor]:
        """What the model had in hand where a point shows a conversion of it; of the last call."""
        return getattr(self.model, "raw", {})

    def check_rows(self, lengths: Sequence[int]) -> None:
        """Raises InputError on rows of other lengths than one where the model has no `ragged`."""
        if len(set(lengths)) > 1 and not self.ragged:
            raise InputError(f"{self.name}: rows of {', '.join(map(str, lengths))} tokens: it takes rows of one length only, as its cache has one length; next: prompts of equal lengths, FILE:START:END")

    def measured(self, tokens: Tensor) -> dict[str, dict[str, Any]]:
        """What the model says of itself beside its points: measurements by name."""
        measure = getattr(self.model, "measured", None)
        if measure is None:
            return {}
        with self.settings.theirs():
            return measure(tokens)  # type: ignore[no-any-return]

    def new_state(self, batch: int = 1, max_context: int | None = None) -> _Held:
        """An empty state of the model, and how many tokens each row holds."""
        with self.settings.theirs():
            inner = self.model.new_state(batch, max_context)
        return _Held(inner, torch.zeros(batch, dtype=torch.int64, device="cpu"))

    def prefill(self, tokens: Tensor, state: _Held, lengths: Tensor | None = None) -> Tensor:
        """tokens [b, s] -> logits [b, s, vocab]. Rows of other lengths than s only where the model takes `lengths`."""
        count = torch.full((tokens.shape[0],), tokens.shape[1]) if lengths is None else torch.as_tensor(lengths)
        self.check_rows(count.tolist())
        with self._observed(state.length[:, None] + torch.arange(tokens.shape[1])):
            logits = self.model.prefill(tokens, state.inner, count) if self.ragged else self.model.prefill(tokens, state.inner)
        state.length = state.length + count
        return self._logits(logits, tokens.shape)

    def decode(self, tokens: Tensor, state: _Held) -> Tensor:
        """tokens [b] -> logits [b, vocab]."""
        with self._observed(state.length[:, None]):
            logits = self.model.decode(tokens, state.inner)
        state.length = state.length + 1
        return self._logits(logits, tokens.shape)

    def _logits(self, logits: Any, shape: torch.Size) -> Tensor:
        """What prefill ([b, s] tokens) or decode ([b]) returned, checked and shown."""
        if not isinstance(logits, Tensor) or logits.dim() != len(shape) + 1 or logits.shape[:-1] != shape:
            got = f"{list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"{self.name}: {'prefill' if len(shape) == 2 else 'decode'}: logits: got {got}, expected [{', '.join(map(str, shape))}, vocab]")
        if any(row.point == "logits" and not row.module for row in self._rows):  # else its own row of the table shows them
            self._show("logits", logits if len(shape) == 2 else logits[:, None])
        return logits

    def _show(self, point: str, value: Any) -> None:
        """Hand a value to the observers, once a call and in the axes of its point; what is not is refused."""
        if not self.taps.wants(point):
            return
        if self.config is None:
            self.taps.emit(point, value)
            return
        if point in self._shown:
            why = "shown twice in one call"
        elif not isinstance(value, Tensor):
            why = f"shown as {type(value).__name__}, expected a tensor"
        else:
            why = shapes.wrong(self.config, point, value, *self._queries)
        self._shown.add(point)
        if why:
            self.refused.setdefault(point, why)
        else:
            self.taps.emit(point, value)

    @contextmanager
    def _observed(self, positions: Tensor) -> Iterator[None]:
        """Hooks on the modules of wanted points, for one call."""
        self._queries, self._shown, self.refused = (int(positions.shape[0]), int(positions.shape[1])), set(), {}
        wanted = [row for row in self._rows if self.taps.wants(row.point) and row.module]
        by_module: dict[str, list[_Row]] = {}
        for row in wanted:
            by_module.setdefault(row.module, []).append(row)
        with self.settings.theirs(), torch.no_grad(), ExitStack() as stack:
            for name, rows in by_module.items():

                def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, rows: list[_Row] = rows) -> None:
                    for row in rows:
                        shown = row.read(Call(module, args, kwargs, output, row.layer, positions))
                        if shown is not None:
                            self._show(row.point, shown)

                handle = self.root.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            borrowed = getattr(self.model, "borrowed", None)
            if borrowed is not None:
                stack.enter_context(borrowed(_Checked(self), positions))
            if any(not row.module and row.point != "logits" for row in self._rows):
                stack.enter_context(_shown_by_hand(self.model, self._show))
            yield


@dataclass
class _Held:
    """A state of the foreign model, and tokens per row [b]."""

    inner: Any
    length: Tensor


class _Checked:
    """Taps whose values are checked on their way."""

    def __init__(self, outside: Outside) -> None:
        self.points, self.wants, self.emit = outside.taps.points, outside.taps.wants, outside._show


@contextmanager
def _shown_by_hand(model: Any, show: Callable[[str, Any], None]) -> Iterator[None]:
    """`model.show(point, tensor)` reaches the taps for the length of a call."""
    had = "show" in vars(model)
    before = vars(model).get("show")
    model.show = show
    try:
        yield
    finally:
        if had:
            model.show = before
        else:
            del model.show


def _expanded(points: Rows, layers: Sequence[int], root: Any, any_name: bool = False) -> list[_Row]:
    """Every row of `points` for every loaded layer that has the module. Raises InputError on what is no point or no module."""
    rows: list[_Row] = []
    modules = dict(root.named_modules()) if isinstance(root, nn.Module) else {}
    for point, where in points.items():
        module, read = where if isinstance(where, tuple) else (where, first_output)
        found = 0
        for layer in layers if "{layer}" in point else [None]:
            name, at = (text if layer is None else text.replace("{layer}", str(layer)) for text in (point, module))
            if not any_name:
                spec_of(name)
            if at and at not in modules:
                continue
            rows.append(_Row(name, at, layer, read))
            found += 1
        if not found and layers:
            raise InputError(f"points: {point!r}: the model has no module {module!r}")
    if "logits" not in points:
        rows.append(_Row("logits", "", None, first_output))
    return rows


def wrap(model: Any, layers: Sequence[int], any_name: bool = False, settings: Settings | None = None) -> Outside:
    """Check what a factory returned, and put it into the words of the audit. Raises InputError with what is missing.

    any_name   names that are no points of DeepSeek-V4 are taken too (parity/generic.py)
    settings   in which its factory ran
    """
    name = str(getattr(model, "name", type(model).__name__))
    for method in ("prefill", "decode", "new_state"):
        if not callable(getattr(model, method, None)):
            raise InputError(f"{name}: it has no {method}(); see probes/outside/protocol.py for the four names that are needed")
    points = getattr(model, "points", None)
    if not isinstance(points, Mapping):
        raise InputError(f"{name}: points is {type(points).__name__}, expected a mapping from point names to module names")
    policy = Policy.parse(getattr(model, "policy", frozenset())).points
    assert policy <= POINTS
    return Outside(model, points, layers, name, policy, bool(getattr(model, "ragged", False)), list(getattr(model, "notes", ())), any_name, settings)


def accepts(factory: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that a factory takes."""
    parameters = inspect.signature(factory).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}
