"""Compiles every kernel file for the GPU, on any machine: NVRTC needs neither a GPU nor a driver.

    python -m production.cubins                       # every kernels/*.cu for sm_90a and sm_100a
    python -m production.cubins --arch sm_90a rms_norm

A file may name its architectures in its header, `// archs    sm_90a`: it is compiled for these, and the table says so.
Prints registers, spills and shared memory of every kernel, exit 0 if all compiled, else 1. Cubins are kept by content
beside the CPU builds (production/cpu_device.py); on a GPU production/launch.py loads the same ones.
Tests: parity/unit/test_cubins.py.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from production import cpu_device
from production.signatures import KernelError, architectures, check_architecture, include_closure, kernel_names, near

ARCHS = ("sm_90a", "sm_100a")
# The last but one: without it an older NVRTC 13.0 takes a generic lambda for a host function.
FLAGS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "--device-as-default-execution-space",
         "--ptxas-options=-v")  # fmt: skip


@dataclass(frozen=True)
class Usage:
    """What ptxas says of one kernel. spill: stores plus loads; stack: local memory a thread; shared: static."""

    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Cubin:
    """One compiled file. build names its content: file, includes, flags, architecture, compiler version."""

    source: str
    arch: str
    build: str
    path: Path
    usage: tuple[Usage, ...]
    cached: bool


def arch_of(major: int, minor: int) -> str:
    """The architecture to compile for: with the features of exactly that chip where there are some (sm_90a)."""
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


# ---- NVRTC ----


class _Nvrtc:
    """The library, by ctypes."""

    def __init__(self) -> None:
        path = _nvrtc_path()
        for builtins in sorted(path.parent.glob("libnvrtc-builtins.so*")):  # first and global, else NVRTC fails with error 7
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"
        self.path = path

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise KernelError(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")

    def _text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def compile(self, name: str, text: str, options: Sequence[str]) -> tuple[bytes, str]:
        """(cubin, log). KernelError with the log when it does not compile."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
            failed = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._text("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if failed:
                first = next((line for line in log.splitlines() if "error" in line), "no message")
                raise KernelError(f"{name} does not build with NVRTC: {first}\n{log[-4000:]}")
            return self._text("CUBIN", program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_path() -> Path:
    """libnvrtc of the PyPI wheel, or of a toolkit."""
    folders: list[Path] = []
    wheels = importlib.util.find_spec("nvidia")
    for root in (wheels.submodule_search_locations or []) if wheels else []:
        folders += [*sorted(Path(root).glob("cu*/lib"), reverse=True), Path(root) / "cuda_nvrtc" / "lib"]
    if "CUDA_HOME" in os.environ:
        folders.append(Path(os.environ["CUDA_HOME"]) / "lib64")
    folders.append(cpu_device.TOOLKIT / "lib64")
    for folder in folders:
        found = [p for p in sorted(folder.glob("libnvrtc.so*"), reverse=True) if "alt" not in p.name]
        if found:
            return found[0]
    raise KernelError("NVRTC is not installed, cubins are compiled with it: pip install nvidia-cuda-nvrtc==13.0.88")


_library: _Nvrtc | None = None
_library_lock = threading.Lock()


def nvrtc() -> _Nvrtc:
    """The loaded library; KernelError when there is none."""
    global _library
    with _library_lock:
        if _library is None:
            _library = _Nvrtc()
        return _library


def nvrtc_missing() -> str | None:
    """Why nothing can be compiled for a GPU here, or None."""
    try:
        nvrtc()
        cpu_device.cuda_include_paths()
    except (KernelError, OSError) as error:
        return str(error)
    return None


# ---- building ----

_FUNCTION = re.compile(r"Compiling entry function '(\w+)'|Function properties for (\w+)")


def _number(pattern: str, text: str) -> int:
    return sum(int(n) for n in re.findall(pattern, text))


def usage_of(log: str) -> tuple[Usage, ...]:
    """Registers, spills, stack and shared memory of each kernel in a ptxas log."""
    found: dict[str, str] = {}
    name = ""
    for line in log.splitlines():
        entry = re.search(r"Compiling entry function '(\w+)'", line)
        if entry:
            name = entry[1]
        found[name] = found.get(name, "") + line + "\n"
    return tuple(
        Usage(
            kernel,
            _number(r"Used (\d+) registers", text),
            _number(r"(\d+) bytes spill (?:stores|loads)", text),
            _number(r"(\d+) bytes stack frame", text),
            _number(r"(\d+) bytes smem", text),
        )
        for kernel, text in found.items()
        if kernel
    )


def build(source: Path, arch: str) -> Cubin:
    """The cubin of a file, from the cache or compiled now. KernelError when the file is not for this architecture."""
    source = Path(source).resolve()
    library = nvrtc()
    texts = include_closure(source, [cpu_device.KERNELS])
    text = texts[source.name]
    check_architecture(source.stem, text, arch)
    key = cpu_device.digest(texts, FLAGS, arch, library.version)
    path = cpu_device.cache_folder() / "cubin" / f"{source.stem}-{arch}-{key}.cubin"
    notes = path.with_suffix(".json")
    compiled = False
    with cpu_device.building(path) as scratch:
        if scratch is not None:
            compiled = True
            includes = [source.parent, cpu_device.KERNELS, *cpu_device.cuda_include_paths()]
            cubin, log = library.compile(source.name, text, [f"-arch={arch}", *FLAGS, *(f"-I{p}" for p in includes)])
            usage = usage_of(log)
            missing = sorted(set(kernel_names(text)) - {u.kernel for u in usage})
            if missing:
                raise KernelError(f"{source.name} for {arch}: not in the cubin: {', '.join(missing)}")
            for made, content in ((notes, json.dumps([asdict(u) for u in usage]).encode()), (path, cubin)):
                (scratch / made.name).write_bytes(content)
                os.replace(scratch / made.name, made)  # the cubin last: it stands for both
    kept = tuple(Usage(**u) for u in json.loads(notes.read_text()))
    return Cubin(source.stem, arch, key, path, kept, not compiled)


def is_for(source: Path, arch: str) -> bool:
    """Whether a file is for this architecture: it names it, or names none."""
    return arch in (architectures(source.read_text(encoding="utf-8")) or (arch,))


def build_all(sources: Sequence[Path], archs: Sequence[str] = ARCHS) -> list[Cubin | KernelError]:
    """Every file for every architecture it is for, one a core; in place of a cubin the error of a file that does not compile."""

    def attempt(job: tuple[Path, str]) -> Cubin | KernelError:
        try:
            return build(*job)
        except KernelError as error:
            return error

    with ThreadPoolExecutor(cpu_device.cores()) as pool:
        return list(pool.map(attempt, [(source, arch) for source in sources for arch in archs if is_for(source, arch)]))


# ---- command line ----


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m production.cubins", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compiles kernels for the GPU and prints what they use. No GPU needed.",
        epilog="example:  python -m production.cubins --arch sm_90a rms_norm\n\nexit 0: all compiled, 1: something did not, 2: bad input",
    )  # fmt: skip
    parser.add_argument("source", nargs="*", help="kernel files by name, e.g. rms_norm (default: all)")
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), help=f"architectures (default: {' '.join(ARCHS)})")
    parser.add_argument("--kernels", type=Path, default=cpu_device.KERNELS, help="folder of the .cu files")
    given = parser.parse_args(arguments)
    known = {p.stem: p for p in sorted(given.kernels.glob("*.cu"))}
    for name in given.source:
        if name.removesuffix(".cu") not in known:
            parser.error(f"no kernel file '{name}' in {given.kernels}; {near(name, known)}")
    for arch in given.arch:
        if not re.fullmatch(r"sm_\d+[af]?", arch):
            parser.error(f"architecture '{arch}' is not like sm_90a")
    chosen = [known[n.removesuffix(".cu")] for n in given.source] or list(known.values())
    reason = nvrtc_missing()
    if reason or not chosen:
        print(reason or f"no .cu files in {given.kernels}", file=sys.stderr)
        return 1
    results = build_all(chosen, given.arch)
    print(f"{'file':18s} {'arch':8s} {'kernel':32s} {'registers':>9s} {'spill B':>8s} {'stack B':>8s} {'shared B':>8s}")
    failed = [r for r in results if isinstance(r, KernelError)]
    for cubin in (r for r in results if isinstance(r, Cubin)):
        for u in cubin.usage:
            print(f"{cubin.source:18s} {cubin.arch:8s} {u.kernel:32s} {u.registers:9d} {u.spill_bytes:8d} {u.stack_bytes:8d} "
                  f"{u.shared_bytes:8d}")  # fmt: skip
    for source, arch in ((s, a) for s in chosen for a in given.arch if not is_for(s, a)):
        print(f"{source.stem:18s} {arch:8s} not compiled: for {', '.join(architectures(source.read_text(encoding='utf-8')))} only")
    print(f"{len(results) - len(failed)} of {len(results)} cubins compiled, NVRTC {nvrtc().version}")
    for error in failed:
        print(f"\n{error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
