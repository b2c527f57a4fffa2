"""C++ signatures of kernels, and the conversion of Python arguments by them: one for the CPU and one for the GPU launcher.

    signatures(texts)["rms_norm"] -> (Parameter("x", "bf16", POINTER_TO_CONST), ..., Parameter("eps", "f32", BY_VALUE))

The declarations are read as text, so that the GPU side needs no C++ compiler; on the CPU the compiled table of the
module says the same (parity/unit/test_launch.py compares the two). Not a C++ parser: kernels are written as
`extern "C" __global__ void name(`, with the plain types of TYPES or an alias (`using`, `typedef`) of one.
Tests: parity/unit/test_launch.py.
"""

from __future__ import annotations

import difflib
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# The values are repeated in kernels/cpu/cuda_on_cpu.h (ParameterKind).
BY_VALUE, POINTER, POINTER_TO_CONST = 0, 1, 2

TYPES = {
    "float": "f32", "double": "f64", "__nv_bfloat16": "bf16", "__half": "f16", "bool": "b8",
    "__nv_fp8_e4m3": "e4m3", "__nv_fp8_e8m0": "e8m0",
    "char": "i8", "signed char": "i8", "int8_t": "i8", "unsigned char": "u8", "uint8_t": "u8",
    "short": "i16", "int16_t": "i16", "unsigned short": "u16", "uint16_t": "u16",
    "int": "i32", "int32_t": "i32", "unsigned": "u32", "unsigned int": "u32", "uint32_t": "u32",
    "long": "i64", "long long": "i64", "int64_t": "i64",
    "unsigned long": "u64", "unsigned long long": "u64", "size_t": "u64", "uint64_t": "u64",
}  # fmt: skip

# Tensors that a pointer takes. Bytes are bytes: packed e2m1 is int8 or uint8 in checkpoints, e4m3 and e8m0 are often uint8.
_BYTES = frozenset({torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu})
DTYPES: Mapping[str, frozenset[torch.dtype]] = {
    "f32": frozenset({torch.float32}), "f64": frozenset({torch.float64}), "bf16": frozenset({torch.bfloat16}),
    "f16": frozenset({torch.float16}), "b8": frozenset({torch.bool}),
    "u8": _BYTES, "e4m3": frozenset({torch.float8_e4m3fn, torch.uint8}), "e8m0": frozenset({torch.float8_e8m0fnu, torch.uint8}),
    "i8": frozenset({torch.int8, torch.uint8}), "i16": frozenset({torch.int16}), "u16": frozenset({torch.uint16}),
    "i32": frozenset({torch.int32}), "u32": frozenset({torch.uint32, torch.int32}),
    "i64": frozenset({torch.int64}), "u64": frozenset({torch.uint64, torch.int64}),
}  # fmt: skip

# struct codes of values, each padded to a slot of eight bytes.
_SLOTS = {
    "f32": "f4x", "f64": "d", "b8": "?7x", "i8": "b7x", "u8": "B7x", "i16": "h6x", "u16": "H6x",
    "i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q",
}  # fmt: skip
_RANGES = {f"{sign}{bits}": (0 if sign == "u" else -(2 ** (bits - 1)), 2 ** (bits if sign == "u" else bits - 1) - 1)
           for sign in "iu" for bits in (8, 16, 32, 64)}  # fmt: skip


class KernelError(RuntimeError):
    """A kernel that does not build, was called wrongly, or did something wrong. Nothing stands in for it."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. type is a value of TYPES: of the value, or of what the pointer points to."""

    name: str
    type: str
    kind: int

    @property
    def is_pointer(self) -> bool:
        return self.kind != BY_VALUE


# ---- reading declarations ----

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ARCHS = re.compile(r"^//[ \t]*archs[ \t]+(sm_\w+(?:[ \t]+sm_\w+)*)[ \t]*$", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BOUNDS = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
_KERNEL = re.compile(rf"(?P<template>template\s*<[^;{{}}]*>\s*)?(?P<c>extern\s+\"C\"\s+)?(?:static\s+)?__global__\s+{_BOUNDS}"
                     rf"void\s+{_BOUNDS}(?P<name>\w+)\s*\((?P<parameters>[^{{;]*?)\)\s*[{{;]")  # fmt: skip
_ALIAS = re.compile(r"\busing\s+(\w+)\s*=\s*([\w\s:]+?)\s*;|\btypedef\s+([\w\s]+?)\s+(\w+)\s*;")


def include_closure(source: Path, folders: Sequence[Path]) -> dict[str, str]:
    """Texts of a kernel file and of every project header it includes, by the name it is included under.

    The closure is what a build depends on: its content names the build, wherever the files lie.
    """
    texts: dict[str, str] = {}

    def read(path: Path, name: str) -> None:
        texts[name] = text = path.read_text(encoding="utf-8")
        for included in _INCLUDE.findall(text):
            found = next((f / included for f in (path.parent, *folders) if (f / included).is_file()), None)
            if found is not None and included not in texts:
                read(found, included)

    read(source, source.name)
    return texts


def _split(parameters: str) -> list[str]:
    return [p for p in (part.strip() for part in parameters.split(",")) if p and p != "void"]


def _parameter(text: str, kernel: str, aliases: Mapping[str, str]) -> Parameter:
    words = re.sub(r"__restrict__|__grid_constant__|\brestrict\b", " ", text)
    match = re.fullmatch(r"([\w\s:]+?)\s*((?:\*\s*(?:const\s*)?)*)\s*(\w+)", words.strip())
    if match is None:
        raise KernelError(f"{kernel}: parameter `{text}` is not read; write a plain type, an optional * and a name")
    base, stars, name = match[1], match[2].count("*"), match[3]
    constant = bool(re.search(r"\bconst\b", base))
    base = " ".join(re.sub(r"\bconst\b|\bstd::", " ", base).split())
    for _ in range(8):  # an alias of an alias
        if base in TYPES or base not in aliases:
            break
        base = " ".join(aliases[base].split())
    if base not in TYPES or stars > 1:
        raise KernelError(
            f"{kernel}: parameter `{text}` has type {base + '*' * stars}; known: {', '.join(TYPES)}, and pointers to these"
        )
    return Parameter(name, TYPES[base], BY_VALUE if not stars else POINTER_TO_CONST if constant else POINTER)


def architectures(text: str) -> tuple[str, ...]:
    """What a kernel file is for, by the line `// archs    sm_90a` of its header; empty: every GPU, and the CPU."""
    found = _ARCHS.search(text)
    return tuple(found[1].split()) if found else ()


def check_architecture(source: str, text: str, *archs: str) -> None:
    """KernelError when a kernel file is for none of these architectures."""
    made_for = architectures(text)
    if made_for and not set(archs) & set(made_for):
        raise KernelError(f"{source} runs on {', '.join(made_for)} only, this is {archs[0]}")


def kernel_names(text: str) -> list[str]:
    """Names of the kernels that a file offers: `extern "C" __global__ void name(`, templates apart."""
    return list(dict.fromkeys(m["name"] for m in _KERNEL.finditer(_COMMENT.sub(" ", text)) if m["c"] and not m["template"]))


def signatures(texts: Mapping[str, str]) -> dict[str, tuple[Parameter, ...]]:
    """Parameters of every kernel of a file. texts: its include closure, the file itself first."""
    aliases: dict[str, str] = {}
    for text in texts.values():
        for using, meant, typedef_meant, typedef in _ALIAS.findall(_COMMENT.sub(" ", text)):
            aliases[using or typedef] = meant or typedef_meant
    source = _COMMENT.sub(" ", next(iter(texts.values())))
    return {
        m["name"]: tuple(_parameter(p, m["name"], aliases) for p in _split(m["parameters"]))
        for m in _KERNEL.finditer(source)
        if m["c"] and not m["template"]
    }


def near(name: str, known: Iterable[str]) -> str:
    """What to say after an unknown name: near matches first, else everything there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or [n for n in names if name in n or n in name]
    return f"near: {', '.join(close)}" if close else f"there are: {', '.join(names) or 'none'}"


# ---- converting arguments ----


@dataclass
class Converter:
    """Checks and converts the arguments of one kernel for one kind of device ("cpu" or "cuda")."""

    kernel: str
    parameters: tuple[Parameter, ...]
    device_type: str
    device_index: int = -1  # Tensor.get_device() of a right tensor: -1 on the CPU
    packer: struct.Struct = field(init=False)
    _plan: list[tuple[bool, frozenset[torch.dtype]]] = field(init=False)
    _scratch: bytearray = field(init=False)

    def __post_init__(self) -> None:
        for p in self.parameters:
            if (p.is_pointer and p.type not in DTYPES) or (not p.is_pointer and p.type not in _SLOTS):
                raise KernelError(
                    f"{self.kernel}: parameter '{p.name}' has a type that no argument fits; known: {', '.join(TYPES)}"
                )
        self.packer = struct.Struct("=" + "".join("Q" if p.is_pointer else _SLOTS[p.type] for p in self.parameters))
        self._scratch = bytearray(max(8, self.packer.size))
        self._plan = [(p.is_pointer, DTYPES.get(p.type, frozenset())) for p in self.parameters]

    def values(self, args: Sequence[Any]) -> list[Any]:
        """Pointers as integers, the rest as given; numbers are range-checked when they are packed."""
        if len(args) != len(self._plan):
            raise KernelError(f"{self.kernel}: {len(args)} arguments for {len(self._plan)} parameters "
                              f"({', '.join(p.name for p in self.parameters)})")  # fmt: skip
        values: list[Any] = []
        on_cpu = self.device_index < 0
        for (is_pointer, dtypes), arg in zip(self._plan, args, strict=True):
            if not is_pointer:
                if not isinstance(arg, int | float):
                    self._refuse(len(values), arg)
                values.append(arg)
            elif arg is None:
                values.append(0)
            else:
                if (
                    not isinstance(arg, Tensor)
                    or arg.dtype not in dtypes
                    or not (arg.is_cpu if on_cpu else arg.get_device() == self.device_index)
                    or not (arg.is_contiguous() or arg.dim() == 0 or arg.size(-1) <= 1 or arg.stride(-1) == 1)
                ):
                    self._refuse(len(values), arg)
                values.append(arg.data_ptr())
        return values

    def pack_into(self, buffer: Any, offset: int, args: Sequence[Any]) -> None:
        """Writes one slot of eight bytes an argument."""
        values = self.values(args)
        try:
            self.packer.pack_into(buffer, offset, *values)
        except (struct.error, OverflowError):
            self.check_numbers(args)
            raise

    def check(self, args: Sequence[Any]) -> None:
        """Raises for arguments that pack_into would refuse."""
        self.pack_into(self._scratch, 0, args)

    def check_numbers(self, args: Sequence[Any]) -> None:
        """Raises for a number that its parameter cannot hold."""
        for index, (p, arg) in enumerate(zip(self.parameters, args, strict=True)):
            if p.is_pointer:
                continue
            if p.type in _RANGES:
                low, high = _RANGES[p.type]
                if not isinstance(arg, int) or not low <= arg <= high:
                    self._refuse(index, arg)
            elif p.type == "f32" and abs(float(arg)) > 3.4028235677973366e38 and abs(float(arg)) != float("inf"):
                self._refuse(index, arg)

    def _refuse(self, index: int, arg: Any) -> None:
        p = self.parameters[index]
        where = f"{self.kernel}: argument '{p.name}'"
        if not p.is_pointer:
            low, high = _RANGES.get(p.type, (None, None))
            limits = f" from {low} to {high}" if low is not None else ""
            given = f"a tensor of shape {list(arg.shape)}" if isinstance(arg, Tensor) else f"{arg!r}"
            raise KernelError(f"{where} is {given}, the kernel takes a number of type {p.type}{limits}")
        if not isinstance(arg, Tensor):
            raise KernelError(f"{where} is {arg!r}, the kernel takes a tensor or None")
        dtypes = DTYPES[p.type]
        if arg.dtype not in dtypes:
            wanted = " or ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
            raise KernelError(f"{where} is {str(arg.dtype).removeprefix('torch.')}, the kernel takes {wanted}")
        wanted = "cpu" if self.device_index < 0 else f"{self.device_type}:{self.device_index}"
        if str(arg.device) != wanted:
            raise KernelError(f"{where} is on {arg.device}, the kernel runs on {wanted}")
        raise KernelError(f"{where} has shape {list(arg.shape)} and strides {list(arg.stride())}; "
                          "elements of the last dimension must be neighbours")  # fmt: skip
