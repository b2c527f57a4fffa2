"""Settings of torch that somebody else's code changes for the whole process: theirs while their code runs, the audit's otherwise.

    settings = Settings()
    with settings.theirs():             # what it sets in here is kept for its next call, and undone behind it
        model = factory(...)
    settings.notes()                    # ["torch settings of its own, in its own calls only: default dtype torch.bfloat16 (here torch.float32)"]

A serving engine sets the default dtype or the matmul precision when it is imported or built. Left alone, that would change the
reference that it is compared with. Flush of denormals cannot be read back from torch and is not among them.
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
}


def _now() -> dict[str, Any]:
    return {name: get() for name, (get, _) in SETTINGS.items()}


def _put(values: dict[str, Any], held: dict[str, Any]) -> None:
    """Set what differs from what is held now."""
    for name, value in values.items():
        if value != held[name]:
            SETTINGS[name][1](value)


class Settings:
    """What one foreign model changed: name -> its value, where it differs from the audit's."""

    def __init__(self) -> None:
        self.changed: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}
        self._depth = 0

    @contextmanager
    def theirs(self) -> Iterator[None]:
        """Its settings inside, the audit's behind; what it changes inside is kept. May be entered within itself."""
        if self._depth:
            yield
            return
        ours = _now()
        _put(ours | self.changed, ours)
        self._depth = 1
        try:
            yield
        finally:
            self._depth = 0
            theirs = _now()
            self.changed = {name: value for name, value in theirs.items() if value != ours[name]}
            self._ours = ours
            _put(ours, theirs)

    def notes(self) -> list[str]:
        """One line for people, none where nothing was changed."""
        told = ", ".join(f"{name} {value} (here {self._ours[name]})" for name, value in self.changed.items())
        return [f"torch settings of its own, in its own calls only: {told}"] if told else []
