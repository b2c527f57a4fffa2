"""The device that production runs on: builds a kernel file at its first use, launches its kernels, counts what ran.

    device = open_device("cpu")                                       # or "cuda"
    device.launch("rms_norm", "rms_norm", (rows,), (128,), (x, x.stride(0), weight, out, ...))

"cpu" builds kernels/*.cu with g++ and runs them on CPU tensors (production/cpu_device.py); "cuda" compiles the same files
with NVRTC (production/cubins.py), loads the cubins through CuPy and launches them on torch's current stream. A kernel that
cannot run raises KernelError; nothing stands in for it.

    with device.capture() as graph:                                   # records launches, runs none of them
        device.launch(...)
    graph.replay()                                                    # runs them all, with the arguments of the capture

On "cuda" that is a CUDA graph; "cpu" keeps every launch with its arguments as they were converted, so that a number that a
capture froze shows without a GPU too. Tests: parity/unit/test_launch.py, parity/unit/test_graph.py.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from production import cpu_device, cubins
from production.signatures import (
    Converter,
    KernelError,
    Parameter,
    architectures,
    check_architecture,
    include_closure,
    near,
    signatures,
)
from reference.config import InputError

__all__ = ["CpuDevice", "CudaDevice", "Device", "Graph", "KernelError", "Launch", "LaunchObserver", "open_device"]

Argument = Tensor | int | float | None
EMULATED = ("sm_90a",)  # architectures whose own instructions the CPU device can emulate


@dataclass(frozen=True)
class Launch:
    """One launch as an observer sees it: what was asked of the device, and the kernel's parameters."""

    source: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Argument, ...]
    shared_bytes: int
    parameters: tuple[Parameter, ...]


class LaunchObserver(Protocol):
    """Sees every launch, before its kernel runs and after it has finished; the tensors are live."""

    def before(self, launch: Launch) -> None: ...

    def after(self, launch: Launch) -> None: ...


class Graph(ABC):
    """Launches that were captured, in order. Pointers and numbers are those of the capture; what pointers point at is read anew.

    counts      launches by (source, kernel); host_steps  pieces of torch work between them
    replays     how often it has run
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.counts: dict[tuple[str, str], int] = {}
        self.host_steps = self.replays = 0

    @property
    def launches(self) -> int:
        """Kernel launches in one replay."""
        return sum(self.counts.values())

    def replay(self) -> None:
        """Run everything once. On "cuda" it is queued on torch's current stream."""
        self.device.check_replay()
        self._replay()
        self.replays += 1
        for key, count in self.counts.items():
            self.device.count(key, count)

    @abstractmethod
    def _replay(self) -> None: ...


class Device(ABC):
    """Where kernels run. One file name and one kernel name choose the code, the C++ signature converts the arguments.

    name          "cpu" or "cuda"
    torch_device  where tensors must live
    arch          "cpu-x86_64", "cpu-aarch64", "sm_90a", ...
    archs         architectures whose kernel files run here: the own one, and one that is emulated
    kernels_dir   folder of the .cu files: the project's, or any copy of it
    """

    name: str
    torch_device: torch.device
    arch: str

    def __init__(self, kernels_dir: Path | None) -> None:
        self.kernels_dir = Path(kernels_dir or cpu_device.KERNELS).resolve()
        if not self.kernels_dir.is_dir():
            raise InputError(f"kernels directory {self.kernels_dir} does not exist")
        self._launches: dict[tuple[str, str], int] = {}
        self._builds: dict[str, str] = {}
        self._observer: LaunchObserver | None = None
        self._graph: Graph | None = None  # the capture that is open

    @property
    def ran(self) -> list[tuple[str, str, str, str, int]]:
        """(source, kernel, arch, build hash, launches) of everything that really ran, replays included."""
        return [(s, k, self.arch, self._builds[s], n) for (s, k), n in sorted(self._launches.items())]

    def source_path(self, source: str) -> Path:
        """The .cu file of a source name. KernelError with near names when there is none."""
        path = self.kernels_dir / f"{source}.cu"
        if not path.is_file():
            raise KernelError(f"no kernel file '{source}.cu' in {self.kernels_dir}; {near(source, self.sources())}")
        return path

    def sources(self) -> list[str]:
        """Every source name of the kernels directory."""
        return sorted(p.stem for p in self.kernels_dir.glob("*.cu"))

    @property
    def archs(self) -> tuple[str, ...]:
        return (self.arch,)

    def own_source_path(self, source: str) -> Path:
        """The .cu file of a source name that is to run here. KernelError when it is for other architectures."""
        path = self.source_path(source)
        check_architecture(source, path.read_text(encoding="utf-8"), *self.archs)
        return path

    def own_paths(self, sources: Sequence[str] | None) -> list[Path]:
        """The .cu files of these sources, None: of all that run here."""
        if sources is not None:
            return [self.own_source_path(s) for s in sources]
        paths = [self.source_path(s) for s in self.sources()]
        return [p for p in paths if set(self.archs) & set(architectures(p.read_text(encoding="utf-8")) or self.archs)]

    def launch(
        self, source: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Launches one kernel.

        grid, block   one to three sizes
        args          in the order of the C++ parameters: tensors for pointers (None is a null pointer), numbers for values.
                      A tensor's dtype must be the pointer's (bytes may be uint8, int8 or float8), its last dimension
                      contiguous; other strides are arguments of their own
        shared_bytes  dynamic shared memory, at most 227 KiB
        """
        key = (source, kernel)
        if self._graph is not None:
            self._capture_launch(self._graph, source, kernel, grid, block, args, shared_bytes)
            self._graph.counts[key] = self._graph.counts.get(key, 0) + 1
            return
        if self._observer is None:
            self._launch(source, kernel, grid, block, args, shared_bytes)
        else:
            launch = Launch(source, kernel, grid, block, tuple(args), shared_bytes, self.parameters(source, kernel))
            self._observer.before(launch)
            self._launch(source, kernel, grid, block, args, shared_bytes)
            self.synchronize()
            self._observer.after(launch)
        self.count(key, 1)

    def count(self, key: tuple[str, str], launches: int) -> None:
        """Note that a kernel, (source, kernel), ran."""
        self._launches[key] = self._launches.get(key, 0) + launches

    def host_step(self, work: Callable[[], object]) -> None:
        """Torch work between launches: run now, or with every replay when a capture is open.

        What it makes must end up in a tensor that outlives it: the result is dropped. For "cuda" it neither waits nor reads back.
        """
        if self._graph is None:
            work()
        else:
            self._capture_host_step(self._graph, work)
            self._graph.host_steps += 1

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record the launches and host steps inside instead of running them. KernelError when there was no launch.

        Launch everything once before, so that nothing is built or loaded inside. Tensors made inside belong to the graph.
        """
        if self._graph is not None:
            raise RuntimeError("a capture is open already")
        if self._observer is not None:
            raise RuntimeError("the device is watched: launches of a graph cannot be watched one by one")
        with _no_collection(), self._capturing() as graph:
            self._graph = graph
            try:
                yield graph
            finally:
                self._graph = None
        if not graph.launches:
            raise KernelError("the captured graph is empty: nothing was launched inside the capture")

    def check_replay(self) -> None:
        """Raises RuntimeError where a graph cannot be replayed now."""
        if self._graph is not None:
            raise RuntimeError("a capture is open: a replay inside it would run at once and not be recorded")
        if self._observer is not None:
            raise RuntimeError("the device is watched: launches of a graph cannot be watched one by one")

    @contextmanager
    def watched(self, observer: LaunchObserver) -> Iterator[None]:
        """Shows every launch inside to one observer, synchronised; not inside a graph capture."""
        if self._observer is not None:
            raise RuntimeError("the device is watched already")
        if self._graph is not None:
            raise RuntimeError("a capture is open: its launches do not run")
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    @abstractmethod
    def parameters(self, source: str, kernel: str) -> tuple[Parameter, ...]:
        """A kernel's C++ parameters. Builds the file at first use."""

    @abstractmethod
    def _launch(
        self, source: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared_bytes: int,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def _capturing(self) -> AbstractContextManager[Graph]: ...

    @abstractmethod
    def _capture_launch(
        self, graph: Any, source: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared_bytes: int,
    ) -> None: ...  # fmt: skip

    @abstractmethod
    def _capture_host_step(self, graph: Any, work: Callable[[], object]) -> None: ...

    @abstractmethod
    def prebuild(self, sources: Sequence[str] | None = None) -> None:
        """Builds files side by side, None: all of the directory that are for this device. What is in the cache costs nothing."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until every launch has finished; errors of the device surface here."""


class CpuGraph(Graph):
    """Baked launches and closures, run one after another."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.steps: list[Callable[[], object]] = []

    def _replay(self) -> None:
        for step in self.steps:
            step()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside: an older graph that is freed during a capture invalidates it (CUDA forbids the call)."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CpuDevice(Device):
    """Kernels built with g++, run on CPU tensors; a launch has finished when it returns."""

    def __init__(
        self, kernels_dir: Path | None, *, checked: bool, mma_sum: str, fast_tiles: bool, order: str, emulate: str | None
    ) -> None:
        super().__init__(kernels_dir)
        if emulate not in (None, *EMULATED):
            raise InputError(f"emulate {emulate!r}: there is {', '.join(EMULATED)}")
        self.emulated = emulate
        self.name, self.torch_device = "cpu", torch.device("cpu")
        self.arch = f"cpu-{cpu_device.MACHINE}"
        self.checked = checked
        checks = cpu_device.ALL_CHECKS if checked else cpu_device.FILL_SHARED
        try:
            self._options = cpu_device.options(order=order, checks=checks, mma_sum=mma_sum, fast_tiles=fast_tiles)
        except KernelError as error:
            raise InputError(str(error)) from None
        cpu_device.compiler()
        cpu_device.cuda_include_paths()
        self._modules: dict[str, cpu_device.Module] = {}
        self._kernels: dict[tuple[str, str], cpu_device.Kernel] = {}

    @property
    def archs(self) -> tuple[str, ...]:
        return (self.arch, *((self.emulated,) if self.emulated else ()))

    def module(self, source: str) -> cpu_device.Module:
        """A file, built and loaded."""
        if source not in self._modules:
            path = self.own_source_path(source)
            if self.checked and architectures(path.read_text(encoding="utf-8")):
                raise KernelError(f"{source}: the checked build knows no mbarrier; emulated kernels run in the plain one")
            module = cpu_device.Module(path, checked=self.checked)
            self._modules[source], self._builds[source] = module, module.build
        return self._modules[source]

    def _launch(
        self, source: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared_bytes: int,
    ) -> None:  # fmt: skip
        self._found(source, kernel).launch(grid, block, args, shared_bytes, self._options)

    @contextmanager
    def _capturing(self) -> Iterator[Graph]:
        yield CpuGraph(self)

    def _capture_launch(
        self, graph: CpuGraph, source: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared_bytes: int,
    ) -> None:  # fmt: skip
        graph.steps.append(self._found(source, kernel).baked(grid, block, args, shared_bytes, self._options))

    def _capture_host_step(self, graph: CpuGraph, work: Callable[[], object]) -> None:
        graph.steps.append(work)

    def _found(self, source: str, kernel: str) -> cpu_device.Kernel:
        found = self._kernels.get((source, kernel))
        if found is None:
            found = self._kernels[source, kernel] = self.module(source).kernel(kernel)
        return found

    def parameters(self, source: str, kernel: str) -> tuple[Parameter, ...]:
        return self._found(source, kernel).parameters

    def prebuild(self, sources: Sequence[str] | None = None) -> None:
        paths = self.own_paths(sources)
        if self.checked:
            paths = [p for p in paths if not architectures(p.read_text(encoding="utf-8"))]
        cpu_device.build_all(paths, checked=self.checked)

    def synchronize(self) -> None:
        pass


class CudaGraph(Graph):
    """A CUDA graph with memory of its own; the tensors of captured launches are kept."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.graph = torch.cuda.CUDAGraph()
        self.kept: list[object] = []

    def _replay(self) -> None:
        self.graph.replay()


class CudaDevice(Device):
    """Cubins made by NVRTC, loaded by CuPy, launched with torch's memory on torch's current stream.

    A capture is torch's, on a stream of its own: launch once before, so that nothing is loaded during it.
    """

    def __init__(self, kernels_dir: Path | None) -> None:
        super().__init__(kernels_dir)
        reason = cuda_missing()
        if reason:
            raise KernelError(f"no CUDA device to run kernels on: {reason}")
        import cupy

        self._cupy, self._driver_launch = cupy, importlib.import_module("cupy_backends.cuda.api.driver").launchKernel
        index = torch.cuda.current_device()
        self.name, self.torch_device = "cuda", torch.device("cuda", index)
        self.arch = cubins.arch_of(*torch.cuda.get_device_capability(index))
        self._index = index
        self._modules: dict[str, Any] = {}
        self._signatures: dict[str, dict[str, Any]] = {}
        self._kernels: dict[tuple[str, str], _CudaKernel] = {}

    def _kernel(self, source: str, kernel: str) -> _CudaKernel:
        if source not in self._modules:
            path = self.own_source_path(source)
            cubin = cubins.build(path, self.arch)
            self._signatures[source] = dict(signatures(include_closure(path, [cpu_device.KERNELS])))
            with self._cupy.cuda.Device(self._index):
                self._modules[source] = self._cupy.RawModule(path=str(cubin.path))
            self._builds[source] = cubin.build
        known = self._signatures[source]
        if kernel not in known:
            raise KernelError(f"{source}.cu has no kernel '{kernel}'; {near(kernel, known)}")
        converter = Converter(kernel, known[kernel], "cuda", self._index)
        with self._cupy.cuda.Device(self._index):
            return _CudaKernel(self._modules[source].get_function(kernel), converter, self._driver_launch)

    def _launch(
        self, source: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared_bytes: int,
    ) -> None:  # fmt: skip
        # The raw handle of torch's current stream, asked anew: on a stream of its own a launch would miss a capture silently.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        self._found(source, kernel).launch(grid, block, args, shared_bytes, stream)

    @contextmanager
    def _capturing(self) -> Iterator[Graph]:
        graph = CudaGraph(self)
        with torch.cuda.device(self._index), torch.cuda.graph(graph.graph, stream=torch.cuda.Stream(self._index)):
            yield graph

    def _capture_launch(
        self, graph: CudaGraph, source: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument],
        shared_bytes: int,
    ) -> None:  # fmt: skip
        self._launch(source, kernel, grid, block, args, shared_bytes)
        graph.kept.append(tuple(arg for arg in args if isinstance(arg, Tensor)))

    def _capture_host_step(self, graph: CudaGraph, work: Callable[[], object]) -> None:
        work()
        graph.kept.append(work)

    def _found(self, source: str, kernel: str) -> _CudaKernel:
        found = self._kernels.get((source, kernel))
        if found is None:
            found = self._kernels[source, kernel] = self._kernel(source, kernel)
        return found

    def parameters(self, source: str, kernel: str) -> tuple[Parameter, ...]:
        return self._found(source, kernel).converter.parameters

    def prebuild(self, sources: Sequence[str] | None = None) -> None:
        cubins.build_all(self.own_paths(sources), [self.arch])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)


class _CudaKernel:
    """One function of a cubin, and the memory its arguments are packed into: a slot of eight bytes each, and where each slot is.

    The driver copies the arguments at the launch, so that one memory serves all. Built with the device current.
    """

    DEFAULT_SHARED_BYTES = 48 * 1024

    def __init__(self, function: Any, converter: Converter, driver_launch: Callable[..., None]) -> None:
        self.function, self.converter, self._driver_launch = function, converter, driver_launch
        self.name = converter.kernel
        self._shared_limit = self.DEFAULT_SHARED_BYTES - int(function.shared_size_bytes)  # static and dynamic share what needs no leave
        self._handle = int(function.kernel.ptr)
        count = len(converter.parameters)
        self._slots = ctypes.create_string_buffer(8 * max(1, count))
        first = ctypes.addressof(self._slots)
        self._places = (ctypes.c_void_p * max(1, count))(*(first + 8 * i for i in range(count)))
        self._parameters = ctypes.addressof(self._places)

    def launch(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Argument], shared_bytes: int, stream: int) -> None:
        dims = cpu_device.check_launch(self.name, grid, block, shared_bytes)
        self.converter.pack_into(self._slots, 0, args)
        if shared_bytes > self._shared_limit:
            self.function.max_dynamic_shared_size_bytes = self._shared_limit = shared_bytes
        self._driver_launch(self._handle, *dims, shared_bytes, stream, self._parameters, 0)


def cuda_missing() -> str | None:
    """Why no kernel can run on a GPU here, or None."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this torch is built without CUDA)"
        return f"torch sees no CUDA device{built}"
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        return f"CuPy is not installed ({error}); pip install cupy-cuda13x"
    return cubins.nvrtc_missing()


def open_device(
    name: str,
    checked: bool = False,
    mma_sum: str = "fma_chain",
    fast_tiles: bool = True,
    order: str = "forward",
    kernels_dir: Path | None = None,
    emulate: str | None = None,
) -> Device:
    """The device of that name, "cpu" or "cuda". The other options exist on the CPU only.

    checked     the build that reports out-of-bounds accesses, races, unwritten shared memory and divergent barriers
    mma_sum     'fma_chain', 'double_sum', or 'tensor_core': an H200 bit for bit
    fast_tiles  whole-tile products in one step, the bits of 'fma_chain'
    order       'forward', 'reverse' or 'random': who runs first; the bits must not depend on it
    kernels_dir a copy of kernels/, e.g. with a planted fault
    emulate     'sm_90a': kernel files for this architecture run too, their instructions emulated (kernels/cpu/hopper_on_cpu.h)
    """
    if name == "cpu":
        return CpuDevice(kernels_dir, checked=checked, mma_sum=mma_sum, fast_tiles=fast_tiles, order=order, emulate=emulate)
    if name == "cuda":
        if checked or mma_sum != "fma_chain" or order != "forward" or emulate:
            raise InputError("checked, mma_sum, order and emulate are options of the CPU device; the GPU has compute-sanitizer")
        return CudaDevice(kernels_dir)
    raise InputError(f"device {name!r} is not known; there are: cpu, cuda")
