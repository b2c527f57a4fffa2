"""The CPU device: builds unmodified CUDA C++ kernels with g++ and launches them on CPU tensors.

    module = Module(Path("kernels/rms_norm.cu"))                  # or Module(..., checked=True)
    module.kernel("rms_norm")((rows,), (128,), (x, w, y, ...))    # grid, block, arguments

For correctness, in tests and in CI; not for speed. The plain build is fast. The checked build also reports out-of-bounds
accesses, shared-memory races, reads of shared memory that nobody wrote, and undefined behaviour, each with file, line
and thread. Every error is a KernelError. Needs g++ with binutils (x86-64 or aarch64) and NVIDIA's CUDA headers; no
GPU, no driver, no nvcc. Design and limits: kernels/cpu/README.md. Tests: pytest parity/unit/cpu_device.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from production.signatures import (
    BY_VALUE,
    Converter,
    KernelError,
    Parameter,
    include_closure,
    kernel_names,
    near,
    signatures,
)

KERNELS = Path(__file__).resolve().parents[1] / "kernels"

# The values of these are repeated in kernels/cpu/runtime/runtime.h.
CHECK_BOUNDS, CHECK_RACES, CHECK_UNWRITTEN, FILL_SHARED = 1, 2, 4, 8
ALL_CHECKS = CHECK_BOUNDS | CHECK_RACES | CHECK_UNWRITTEN | FILL_SHARED
ORDERS = {"forward": 0, "reverse": 1, "random": 2}
MMA_SUMS = {"fma_chain": 0, "double_sum": 1, "tensor_core": 2}

MACHINE = platform.machine()
MAX_DYNAMIC_SHARED_BYTES = 227 * 1024
MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)

TOOLKIT = Path("/usr/local/cuda")
HEADER_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")


def _target_flags() -> list[str]:
    """Vector instructions where this processor has them: the same bits without, only slower."""
    with suppress(OSError):
        known = Path("/proc/cpuinfo").read_text()
        if MACHINE == "x86_64" and re.search(r"\bavx2\b", known) and re.search(r"\bfma\b", known):
            return ["-march=x86-64-v3"]
    return []


COMMON_FLAGS = [
    "-std=c++17", "-fPIC", "-fno-strict-aliasing", "-fwrapv",
    "-ffp-contract=off",      # a * b + c stays two roundings, as with NVRTC's -fmad=false
    "-fno-extern-tls-init",   # or g++ calls an initialiser before every use of a shared array
    "-fno-gnu-unique",        # or two modules would share the shared arrays of a template they both instantiate
    "-Wno-unknown-pragmas", "-Wno-attributes",
    *_target_flags(),
]  # fmt: skip
PLAIN_FLAGS = ["-O3"]
CHECKED_FLAGS = [
    "-O1", "-g",
    "-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0",  # only the calls; runtime/checker.cpp gets them
    "-fsanitize=bounds,alignment,shift,null", "-fsanitize-undefined-trap-on-error",
]  # fmt: skip


# ---- structs of the runtime ----


class _Options(ctypes.Structure):
    _fields_ = [("workers", ctypes.c_int), ("order", ctypes.c_int), ("checks", ctypes.c_int), ("strict", ctypes.c_int),
                ("mma_sum", ctypes.c_int), ("fast_tiles", ctypes.c_int), ("seed", ctypes.c_ulonglong)]  # fmt: skip


class _AddressRange(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_size_t), ("end", ctypes.c_size_t), ("name", ctypes.c_char_p)]


class _Parameter(ctypes.Structure):
    _fields_ = [("type", ctypes.c_char_p), ("size", ctypes.c_int), ("kind", ctypes.c_int)]


class _KernelInfo(ctypes.Structure):
    _fields_ = [("thunk", ctypes.c_void_p), ("parameters", ctypes.POINTER(_Parameter)), ("parameter_count", ctypes.c_int),
                ("thread_locals", ctypes.c_void_p), ("dynamic_shared", ctypes.c_void_p)]  # fmt: skip


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def options(
    *,
    workers: int | None = None,
    order: str = "forward",
    seed: int = 0,
    checks: int = FILL_SHARED,
    strict: bool = True,
    mma_sum: str = "fma_chain",
    fast_tiles: bool = False,
) -> _Options:
    """How a launch runs.

    workers     OS threads; blocks are spread over them. None: one a core
    order       'forward', 'reverse' or 'random' by seed: who runs first. A correct kernel gives the same bits in all
    checks      a sum of the CHECK_ constants; only the checked build can do more than FILL_SHARED
    strict      refuse what hardware happens to allow: one meeting reached from two source lines, exited lanes in a mask
    mma_sum     how mma rounds: 'fma_chain' (fast), 'double_sum', or 'tensor_core': an H200 bit for bit, 3 to 4 times slower
    fast_tiles  warp_tile_mma as one step: the bits of 'fma_chain', 2 to 3 times faster
    """
    for given, known in ((order, ORDERS), (mma_sum, MMA_SUMS)):
        if given not in known:
            raise KernelError(f"'{given}' is not known; {near(given, known)}")
    return _Options(workers or cores(), ORDERS[order], checks, int(strict), MMA_SUMS[mma_sum], int(fast_tiles), seed)


# ---- finding what a build needs ----


def cache_folder() -> Path:
    """Where builds are kept, by content: DSV4_PARITY_CACHE, or ~/.cache/dsv4-parity."""
    return Path(os.environ.get("DSV4_PARITY_CACHE") or Path.home() / ".cache" / "dsv4-parity")


def cuda_include_paths() -> list[Path]:
    """Folders that hold cuda_bf16.h: those of DSV4_PARITY_CUDA_INCLUDE, the PyPI wheels, CUDA_HOME, or /usr/local/cuda."""
    candidates = [[Path(p) for p in os.environ.get("DSV4_PARITY_CUDA_INCLUDE", "").split(os.pathsep) if p]]
    wheels = importlib.util.find_spec("nvidia")
    for root in (wheels.submodule_search_locations or []) if wheels else []:
        candidates += [[include] for include in sorted(Path(root).glob("cu*/include"), reverse=True)]
    if "CUDA_HOME" in os.environ:
        candidates.append([Path(os.environ["CUDA_HOME"]) / "include"])
    candidates.append([TOOLKIT / "include"])
    for folders in candidates:
        if any((f / "cuda_bf16.h").exists() for f in folders) and any((f / "crt").is_dir() for f in folders):
            return folders + [f / "cccl" for f in folders if (f / "cccl").is_dir()]
    raise KernelError(f"no CUDA headers found: pip install {' '.join(HEADER_WHEELS)} (each 13.0.*), "
                      "or set DSV4_PARITY_CUDA_INCLUDE to a toolkit's include folder")  # fmt: skip


def _tool(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise KernelError(f"{name} is not installed; kernels on the CPU are built with it: apt install {package}")
    return path


def compiler() -> str:
    """Path of g++."""
    return _tool("g++", "g++")


def compiler_identity() -> str:
    """Changes when the compiler does. Its name and file facts, which are cheaper than asking it for its version."""
    path = Path(compiler()).resolve()
    facts = path.stat()
    return f"{path} {facts.st_size} {facts.st_mtime_ns}"


def digest(*parts: object) -> str:
    """Name of a build: 16 hex digits over everything that it is made of."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextmanager
def building(output: Path) -> Iterator[Path | None]:
    """Yields a scratch folder to build in, or None when output exists. One process at a time builds a given output.

    What is built appears under its name at once and whole, by `os.replace` from the scratch folder, which lies on the
    same disk. A killed build leaves only a scratch folder, swept an hour later.
    """
    if output.exists():
        yield None
        return
    import fcntl

    scratch_root = cache_folder() / "scratch"
    lock_path = scratch_root / f"{output.name}.lock"
    try:
        scratch_root.mkdir(parents=True, exist_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        opened = lock_path.open("w")
    except OSError as error:
        raise KernelError(f"builds cannot be kept in {cache_folder()} ({error.strerror}); set DSV4_PARITY_CACHE to a folder that "
                          "can be written") from None  # fmt: skip
    with opened as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if this process dies
        if output.exists():  # another process was faster
            yield None
            return
        for left in scratch_root.glob("build-*"):
            with suppress(FileNotFoundError):  # another process sweeps too
                if time.time() - left.stat().st_mtime > 3600:
                    shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=scratch_root) as scratch:
            yield Path(scratch)
        lock_path.unlink(missing_ok=True)  # whoever opens a new one finds the output


def _run_compiler(command: Sequence[str], what: str, text: str | None = None) -> None:
    result = subprocess.run(command, capture_output=True, text=True, input=text)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if re.search(r"\b(error|fatal)\b", line)]
        raise KernelError(f"{what} does not build with g++: {errors[0] if errors else 'no message'}\n{result.stderr[-4000:]}")


# ---- building ----


def runtime_folder(kernels_dir: Path) -> Path:
    """kernels/cpu of that copy of the kernels, or the project's own where the copy has none."""
    own = kernels_dir / "cpu"
    return own if (own / "cuda_on_cpu.h").is_file() else KERNELS / "cpu"


def build_runtime(kernels_dir: Path = KERNELS) -> Path:
    """The scheduler and checker, one shared library for all kernels.

    It must not be linked into a kernel's module: filling that module's thread-locals would overwrite the runtime's.
    """
    folder = runtime_folder(kernels_dir)
    files = [folder / "cuda_on_cpu.h", *sorted((folder / "runtime").glob("*.h")), *sorted((folder / "runtime").glob("*.cpp"))]
    sources = [str(f) for f in files if f.suffix == ".cpp"]
    includes = cuda_include_paths()
    flags = [*COMMON_FLAGS, "-O3", "-shared"]
    key = digest([(f.name, f.read_text(encoding="utf-8")) for f in files], flags, list(map(str, includes)), compiler_identity())
    output = cache_folder() / "cpu" / f"libcuda_on_cpu-{key}.so"
    with building(output) as scratch:
        if scratch is not None:
            made = scratch / output.name
            _run_compiler([compiler(), *flags, f"-I{folder}", *(f"-isystem{p}" for p in includes), *sources, "-lpthread",
                           f"-Wl,-soname,{output.name}", "-o", str(made)], "the CPU device's runtime")  # fmt: skip
            os.replace(made, output)
    return output


_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\w+\s*\)\s+)?([\w: ]+?)\s+(\w+)\s*\[\s*\]\s*;")  # fmt: skip


def _translation_unit(source: Path, text: str, exports: Sequence[tuple[str, str]]) -> str:
    """What g++ compiles: the header, the kernel file as it is, and a table of its kernels."""
    lines = ['#include "cuda_on_cpu.h"',
             "static thread_local char cuemu_anchor;",
             "static void *cuemu_thread_locals() { return &cuemu_anchor; }"]  # fmt: skip
    dynamic = {name: element for element, name in _DYNAMIC_SHARED.findall(text)}
    if len(dynamic) > 1:
        raise KernelError(f"{source.name}: more than one name for dynamic shared memory: {', '.join(dynamic)}")
    for name, element in dynamic.items():
        # extern "C": the declaration inside an extern "C" kernel has C linkage too.
        size = f"{MAX_DYNAMIC_SHARED_BYTES} / sizeof({element})"
        lines += [f'extern "C" {{ alignas(1024) thread_local {element} {name}[{size}]; }}',
                  f"static void *cuemu_dynamic_shared() {{ return {name}; }}"]  # fmt: skip
    lines.append(f'#include "{source.name}"')
    lines += [f"CUEMU_EXPORT({name}, cuemu_thread_locals, {'cuemu_dynamic_shared' if dynamic else 'nullptr'}, {expression})"
              for name, expression in exports]  # fmt: skip
    return "\n".join(lines) + "\n"


class Module:
    """One .cu file, built and loaded. kernel(name) gives one of its kernels.

    instances   [(name, C++ expression)] for a file of kernel templates, e.g. [("sum_64", "sum<64>")]; given these,
                only these are exported
    build       names the build: content of the file and of its includes, flags, compiler
    """

    def __init__(self, source: Path, *, checked: bool = False, instances: Sequence[tuple[str, str]] = ()) -> None:
        source = Path(source).resolve()
        self.source, self.checked = source, checked
        texts = include_closure(source, [KERNELS])
        text = texts[source.name]
        self.kernel_names = [name for name, _ in instances] or kernel_names(text)
        if not self.kernel_names:
            raise KernelError(
                f'{source}: no `extern "C" __global__ void name(`; the loader looks for that text, not through macros'
            )
        self.declared = {} if instances else signatures(texts)
        unit = _translation_unit(source, text, list(instances) or [(name, name) for name in self.kernel_names])
        runtime = build_runtime(source.parent)
        self.build, self.path = self._build(source, unit, texts, runtime, checked)
        self.runtime = ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(self.path))
        self.guard_addresses = self._guard_variables() if checked else []
        self.lock = threading.Lock()
        self._kernels: dict[str, Kernel] = {}

    @staticmethod
    def _build(source: Path, unit: str, texts: dict[str, str], runtime: Path, checked: bool) -> tuple[str, Path]:
        flags = [*COMMON_FLAGS, *(CHECKED_FLAGS if checked else PLAIN_FLAGS)]
        includes = cuda_include_paths()
        key = digest(unit, texts, flags, runtime.name, list(map(str, includes)), compiler_identity())
        output = cache_folder() / "cpu" / f"{source.stem}-{'checked-' if checked else ''}{key}.so"
        with building(output) as scratch:
            if scratch is not None:
                folders = [source.parent, KERNELS, runtime_folder(source.parent)]
                # Files are named relative to their folder, so that a build does not depend on where the folder lies.
                paths = [f"-ffile-prefix-map={folder}/=" for folder in folders]
                paths += [f"-I{folder}" for folder in folders] + [f"-isystem{p}" for p in includes]
                obj, made = scratch / "kernels.o", scratch / output.name
                _run_compiler([compiler(), *flags, *paths, "-x", "c++", "-c", "-o", str(obj), "-"], source.name, unit)
                # Linked without -fsanitize=thread, so that libtsan stays out.
                _run_compiler(
                    [compiler(), "-shared", str(obj), str(runtime), "-Wl,-rpath,$ORIGIN", "-o", str(made)], source.name
                )
                os.replace(made, output)
        return key, output

    def _guard_variables(self) -> list[int]:
        """g++ guards static arrays of classes (bf16 too) by a variable beside them, which no kernel writes."""
        command = [_tool("nm", "binutils"), str(self.path)]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [int(line.split()[0], 16) for line in symbols if " _ZGV" in line]

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            if name not in self.kernel_names:
                raise KernelError(f"{self.source.name} has no kernel '{name}'; {near(name, self.kernel_names)}")
            self._kernels[name] = Kernel(self, name)
        return self._kernels[name]

    def source_lines(self, message: str) -> str:
        """Replaces {pc 0x...} by file:line, innermost first where functions were inlined."""

        def location(match: re.Match[str]) -> str:
            command = [_tool("addr2line", "binutils"), "-e", str(self.path), "-i", hex(int(match[1], 16) - 1)]
            frames = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
            known = [os.path.basename(re.sub(r" \(discriminator.*", "", frame)) for frame in frames if "??" not in frame]
            return " < ".join(known) or match[0]

        return re.sub(r"\{pc (0x[0-9a-f]+)\}", location, message)


def build_all(sources: Sequence[Path], *, checked: bool = False) -> None:
    """Builds several files side by side, one a core; what is in the cache costs nothing."""
    if not sources:
        return
    build_runtime(sources[0].parent)
    with ThreadPoolExecutor(cores()) as pool:
        jobs = [pool.submit(Module, source, checked=checked) for source in sources]
    for job in jobs:
        job.result()


# ---- launching ----


def check_launch(kernel: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int) -> tuple[int, ...]:
    """(grid, block) as six numbers, refused where a GPU would refuse them."""
    dims = (*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block)))
    if len(dims) != 6 or min(dims) < 1 or dims[3] * dims[4] * dims[5] > MAX_THREADS or dims[5] > 64:
        raise KernelError(f"{kernel}: grid {grid}, block {block}: sizes start at 1, a block has at most {MAX_THREADS} threads")
    if dims[0] > MAX_GRID[0] or dims[1] > MAX_GRID[1] or dims[2] > MAX_GRID[2]:
        raise KernelError(f"{kernel}: grid {grid} is larger than {MAX_GRID}")
    if not 0 <= shared_bytes <= MAX_DYNAMIC_SHARED_BYTES:
        raise KernelError(f"{kernel}: {shared_bytes} bytes of dynamic shared memory, at most {MAX_DYNAMIC_SHARED_BYTES}")
    return dims


class Kernel:
    """One kernel of a module. parameters come from the compiled C++ signature."""

    def __init__(self, module: Module, name: str) -> None:
        self.module, self.name = module, name
        self.info = _KernelInfo.in_dll(module.library, f"cuemu_kernel_{name}")
        table = self.info.parameters[: self.info.parameter_count]
        declared = module.declared.get(name, ())
        names = [p.name for p in declared] if len(declared) == len(table) else [f"arg{i}" for i in range(len(table))]
        self.parameters = tuple(Parameter(n, p.type.decode(), p.kind) for n, p in zip(names, table, strict=True))
        if any(p.kind == BY_VALUE and p.size > 8 for p in table):
            raise KernelError(f"{name}: a struct by value; parameters are numbers and pointers")
        self.converter = Converter(name, self.parameters, "cpu")
        self._values_offset = 24 + 8 * len(self.parameters)
        self._memory = self._argument_memory()
        self._error = ctypes.create_string_buffer(4096)
        launch = module.runtime.cuemu_launch
        launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int,
                           ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]  # fmt: skip
        self._launch = launch
        self._info_address = ctypes.addressof(self.info)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_bytes: int = 0, **how: Any
    ) -> None:
        """Runs to completion. how: the keywords of options(); checks defaults to all that the build can do."""
        how.setdefault("checks", ALL_CHECKS if self.module.checked else FILL_SHARED)
        self.launch(grid, block, args, shared_bytes, options(**how))

    def launch(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_bytes: int, how: _Options
    ) -> None:
        """Runs to completion, args: tensors (or None) for pointers, numbers for the rest."""
        dims = check_launch(self.name, grid, block, shared_bytes)
        with self.module.lock:  # the memory of the arguments is the kernel's
            self._run(self._filled(self._memory, dims, args), self._ranges(self._memory, args), shared_bytes, how)

    def baked(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_bytes: int, how: _Options
    ) -> Callable[[], None]:
        """The launch with its arguments as they are now, pointers and numbers, to be run later and again; it keeps the tensors."""
        dims, kept = check_launch(self.name, grid, block, shared_bytes), tuple(args)
        memory = self._filled(self._argument_memory(), dims, kept)
        ranges = self._ranges(memory, kept)

        def run(_: Any = kept) -> None:
            with self.module.lock:
                self._run(memory, ranges, shared_bytes, how)

        return run

    def _argument_memory(self) -> ctypes.Array[ctypes.c_char]:
        """One block, so that one range covers it: six dimensions, pointers to the values, the values."""
        count = len(self.parameters)
        memory = ctypes.create_string_buffer(self._values_offset + 8 * max(count, 1))
        values = ctypes.addressof(memory) + self._values_offset
        struct.pack_into(f"={count}Q", memory, 24, *(values + 8 * i for i in range(count)))
        return memory

    def _filled(self, memory: ctypes.Array[ctypes.c_char], dims: tuple[int, ...], args: Sequence[Any]) -> ctypes.Array[ctypes.c_char]:
        struct.pack_into("=6I", memory, 0, *dims)
        self.converter.pack_into(memory, self._values_offset, args)
        return memory

    def _run(self, memory: ctypes.Array[ctypes.c_char], ranges: Any, shared_bytes: int, how: _Options) -> None:
        address = ctypes.addressof(memory)
        failed = self._launch(
            self._info_address, address + 24, address, shared_bytes, ranges, len(ranges) if ranges else 0,
            ctypes.addressof(how), self._error, 4096,
        )  # fmt: skip
        if failed:
            raise KernelError(f"{self.name}: {self.module.source_lines(self._error.value.decode(errors='replace'))}")

    def _ranges(self, memory: ctypes.Array[ctypes.c_char], args: Sequence[Any]) -> Any:
        """The memory that the kernel may touch: each tensor's own view, the arguments, and g++'s guard variables. None: unchecked."""
        if not self.module.checked:
            return None
        address = ctypes.addressof(memory)
        ranges = [_AddressRange(address + 24, address + len(memory), b"launch arguments")]
        for p, arg in zip(self.parameters, args, strict=True):
            if isinstance(arg, Tensor):
                last = sum((n - 1) * stride for n, stride in zip(arg.shape, arg.stride(), strict=True))
                span = (last + 1) * arg.element_size() if arg.numel() else 0
                ranges.append(_AddressRange(arg.data_ptr(), arg.data_ptr() + span, p.name.encode()))
        ranges += [_AddressRange(guard, guard + 8, None) for guard in self.module.guard_addresses]
        return (_AddressRange * len(ranges))(*ranges)
