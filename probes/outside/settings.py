"""What somebody else's code changes of torch for the whole process: theirs while their code runs, the audit's otherwise.

    settings = Settings()
    with settings.theirs():             # what it sets in here is kept for its next call, and undone behind it
        model = factory(...)
    settings.notes()                    # ["torch settings of its own, in its own calls only: default dtype torch.bfloat16 (here torch.float32)"]

A serving engine sets the default dtype or the matmul precision when it is imported or built; a kernel library puts its own function
where torch.nn.functional has one. Left alone, either would change the reference that it is compared with. Flush of denormals cannot
be read back from torch and is not among them; nor is what was replaced before the audit began, or inside a function of torch.
Tests: parity/unit/test_settings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Getter = Callable[[], Any]
Setter = Callable[[Any], Any]


def _set_device(device: torch.device) -> None:
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)


def _set_deterministic(mode: int) -> None:
    torch.set_deterministic_debug_mode(mode)


def _attribute(of: Any, name: str) -> tuple[Getter, Setter]:
    return lambda: getattr(of, name), lambda value: setattr(of, name, value)


# What `fp32_precision` is an attribute of, a parent before its children: one that is not set reads as its parent.
PRECISIONS = {
    "": ("generic", "all"), ".cudnn": ("cuda", "all"), ".cuda.matmul": ("cuda", "matmul"), ".cudnn.conv": ("cuda", "conv"), ".cudnn.rnn": ("cuda", "rnn"),
    ".mkldnn": ("mkldnn", "all"), ".mkldnn.matmul": ("mkldnn", "matmul"), ".mkldnn.conv": ("mkldnn", "conv"), ".mkldnn.rnn": ("mkldnn", "rnn"),
}  # fmt: skip


def _precision(backend: str, op: str) -> tuple[Getter, Setter]:
    """Not by the attribute: torch.backends.mkldnn.fp32_precision = x sets torch.backends.fp32_precision."""
    return lambda: torch._C._get_fp32_precision_getter(backend, op), lambda value: torch._C._set_fp32_precision_setter(backend, op, value)


# In the order in which they are set: the older names of a precision change the newer ones.
SETTINGS: dict[str, tuple[Getter, Setter]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_device),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, _set_deterministic),
    "cudnn TF32": _attribute(torch.backends.cudnn, "allow_tf32"),
    "reduced precision sums of BF16": _attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "reduced precision sums of FP16": _attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    **({f"torch.backends{name}.fp32_precision": _precision(*of) for name, of in PRECISIONS.items()} if hasattr(torch._C, "_get_fp32_precision_getter") else {}),
}

# Where torch keeps what it computes with; the reference, the twins and the comparisons call nothing of torch that is elsewhere.
SPACES: dict[str, Any] = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor, "torch.linalg": torch.linalg}
ABSENT: Any = object()
TOLD = 8  # functions that a note names
Functions = dict[tuple[str, str], Any]


def _read(name: str) -> Any:
    """ABSENT where torch refuses to say: old and new names of one setting were mixed."""
    try:
        return SETTINGS[name][0]()
    except (RuntimeError, AttributeError):
        return ABSENT


def _now() -> dict[str, Any]:
    return {name: value for name in SETTINGS if (value := _read(name)) is not ABSENT}


def _put(values: dict[str, Any]) -> None:
    """Set what differs; read one by one, as one may change another."""
    for name, value in values.items():
        if _read(name) != value:
            SETTINGS[name][1](value)


def _functions() -> dict[str, dict[str, Any]]:
    return {name: dict(vars(space)) for name, space in SPACES.items()}


def _replaced(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Functions:
    """What another function stands for; a new name counts where it hides one of a base class."""
    found: Functions = {}
    for space, had in before.items():
        has = after[space]
        found |= {(space, name): has.get(name, ABSENT) for name, value in had.items() if has.get(name, ABSENT) is not value and callable(value)}
        if len(has) > len(had) and isinstance(SPACES[space], type):
            hidden = {name for base in SPACES[space].__mro__[1:] for name in vars(base)}
            found |= {(space, name): value for name, value in has.items() if name not in had and name in hidden}
    return found


def _place(functions: Functions) -> None:
    for (space, name), value in functions.items():
        if value is not ABSENT:
            setattr(SPACES[space], name, value)
        elif name in vars(SPACES[space]):
            delattr(SPACES[space], name)


class Settings:
    """What one foreign model changed, where it differs from the audit's.

    changed    name of a setting -> its value
    replaced   (where, name) of a function of torch -> what stands there; ABSENT: nothing
    """

    def __init__(self) -> None:
        self.changed: dict[str, Any] = {}
        self.replaced: Functions = {}
        self._ours: dict[str, Any] = {}
        self._depth = 0

    @contextmanager
    def theirs(self) -> Iterator[None]:
        """Its settings inside, the audit's behind; what it changes inside is kept. May be entered within itself."""
        if self._depth:
            yield
            return
        ours, functions = _now(), _functions()
        if self.changed:
            _put(ours | self.changed)
        _place(self.replaced)
        self._depth = 1
        try:
            yield
        finally:
            self._depth = 0
            try:
                theirs = _now()
                self.changed = {name: value for name, value in theirs.items() if name in ours and value != ours[name]}
                self._ours = ours
                if theirs != ours:
                    _put(ours)
            finally:  # behind the settings: the default dtype has a class of its own in torch.Storage
                self.replaced = _replaced(functions, _functions())
                _place({(space, name): functions[space].get(name, ABSENT) for space, name in self.replaced})

    def notes(self) -> list[str]:
        """One line for people of settings, one of functions; none where nothing was changed."""
        told = ", ".join(f"{name} {value} (here {self._ours[name]})" for name, value in self.changed.items())
        names = [f"{space}.{name}" for space, name in self.replaced]
        lines = [f"torch settings of its own, in its own calls only: {told}"] if told else []
        if names:
            lines.append(f"functions of torch that it replaces, in its own calls only: {', '.join(names[:TOLD])}{f' and {len(names) - TOLD} more' if len(names) > TOLD else ''}")
        return lines
