"""What this machine can run, and what will be not run because of what it lacks.

    python -m probes.doctor
    python -m probes.doctor --device cuda

Looks at compiler, headers, NVRTC, torch, CuPy, driver and card, then proves it: a kernel of three lines is built and run in
each build of the CPU device, compiled for sm_90a and sm_100a, and run on the card. Nothing is taken from the cache and no
checkpoint is needed. Exit 0 when the machine was examined, 3 when --device names one that cannot run a kernel.
Tests: parity/unit/test_doctor.py.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from probes.core.cli import COULD_NOT_MEASURE, MEASURED, Answer, Table, bare_parser, json_line, say, show
from probes.core.pipe import piped
from production import cpu_device, cubins
from production.launch import KernelError, cuda_missing, open_device

DESCRIPTION = "What this machine can run, and what will be not run because of what it lacks."
EXAMPLE = "python -m probes.doctor --device cpu"

CPU, CHECKED, CUBINS, GPU = "--device cpu", "checked build of the CPU device", "cubin compile check", "--device cuda"
PACKAGES = {
    "numpy": "anything", "safetensors": "anything", "pytest": "make audit, make test", "hypothesis": "make test",
    "pandas": "the HTML report", "matplotlib": "the HTML report", "jinja2": "the HTML report", "rich": "tables on a terminal",
    "tokenizers": "--prompt FILE.txt",
}  # fmt: skip
KERNEL = """#include "mma.cuh"
extern "C" __global__ void %s(const __nv_bfloat16 *x, float *y, int n) {
  __shared__ float s[32];
  s[threadIdx.x] = __bfloat162float(x[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x < n) y[threadIdx.x] = s[n - 1 - threadIdx.x];
}
"""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. found: its version or a measured value; missing: why not, and the remedy; not_run: what lacks then."""

    name: str
    found: str | None
    missing: str = ""
    not_run: tuple[str, ...] = ()


def look(name: str, how: Callable[[], str], *not_run: str) -> Finding:
    """The finding of one look; any failure is a finding too."""
    try:
        return Finding(name, how())
    except (RuntimeError, OSError, ImportError, ValueError, subprocess.SubprocessError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Finding(name, None, reason, not_run)


# ---- looks ----


def first_line(*command: str) -> str:
    """First line that a program prints."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0].strip()
    except FileNotFoundError:
        raise KernelError(f"{command[0]} is not installed") from None


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise KernelError(f"not installed: pip install {name}") from None


def _headers() -> str:
    folders = cpu_device.cuda_include_paths()
    for folder in folders:
        if (folder / "cuda.h").is_file():
            found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (folder / "cuda.h").read_text(errors="replace"))
            if found:
                version = int(found[1])
                return f"CUDA {version // 1000}.{version % 1000 // 10}"
    return "CUDA, version not stated"


def _nvrtc() -> str:
    return cubins.nvrtc().version


def _driver() -> str:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise KernelError("no NVIDIA driver (libcuda.so.1)") from None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        raise KernelError("the NVIDIA driver does not answer")
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _card() -> str:
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else f"; this torch ({torch.__version__}) is built without CUDA"
        raise KernelError(f"torch sees no CUDA device{built}")
    facts = torch.cuda.get_device_properties(0)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, {cubins.arch_of(facts.major, facts.minor)}"


def _cache() -> str:
    folder = cpu_device.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    return "writable"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _cpu() -> str:
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    return f"{model[1] if model else platform.machine()}, {cpu_device.cores()} cores, {_memory_gib():.0f} GiB"


# ---- proofs: a kernel that no cache has seen ----


def _kernel_folder(folder: str) -> str:
    """Writes the kernel under a name of its own, so that it is really built; the name."""
    name = f"doctor_{os.getpid()}_{time.time_ns()}"
    (Path(folder) / f"{name}.cu").write_text(KERNEL % name)
    return name


def _run(device_name: str, checked: bool = False) -> str:
    with tempfile.TemporaryDirectory() as folder:
        name = _kernel_folder(folder)
        device = open_device(device_name, checked=checked, kernels_dir=Path(folder))
        x = torch.arange(32, device=device.torch_device).bfloat16()
        y = torch.full((32,), float("nan"), device=device.torch_device)
        start = time.perf_counter()
        device.launch(name, name, (1,), (32,), (x, y, 32))
        device.synchronize()
        built = time.perf_counter() - start
        if not torch.equal(y, x.float().flip(0)):
            raise KernelError("the kernel ran and its result is wrong")
        device.launch(name, name, (1,), (32,), (x, y, 32))
        device.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            device.launch(name, name, (1,), (32,), (x, y, 32))
        each = (time.perf_counter() - start) / 200 * 1e6
        for kept in (cpu_device.cache_folder() / "cpu", cpu_device.cache_folder() / "cubin"):
            for path in kept.glob(f"{name}*"):
                path.unlink()
        return f"right, {device.arch}, built in {built:.1f} s, {each:.0f} us a launch"


def _compile(arch: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        name = _kernel_folder(folder)
        start = time.perf_counter()
        cubin = cubins.build(Path(folder) / f"{name}.cu", arch)
        seconds = time.perf_counter() - start
        cubin.path.unlink()
        cubin.path.with_suffix(".json").unlink()
        return f"built in {seconds:.1f} s, {cubin.usage[0].registers} registers"


def _gpu() -> str:
    reason = cuda_missing()
    if reason:
        raise KernelError(reason)
    return _run("cuda")


def examine(devices: Sequence[str]) -> list[Finding]:
    """Every finding, cheap ones first."""
    found = [
        look("cpu", _cpu),
        look("python", platform.python_version),
        look("torch", lambda: f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"),
        *(look(name, partial(_package, name), lacks) for name, lacks in PACKAGES.items()),
        look("cache", _cache, CPU, CUBINS, GPU),
        look("CUDA headers", _headers, CPU, CUBINS, GPU),
        look("NVRTC", _nvrtc, CUBINS, GPU),
    ]
    if "cpu" in devices:
        found += [
            look("g++", lambda: first_line(cpu_device.compiler(), "--version"), CPU),
            look("nm, addr2line", lambda: first_line("addr2line", "--version"), CHECKED),
        ]
    if "cuda" in devices:
        found += [
            look("driver", _driver, GPU),
            look("card", _card, GPU),
            look("CuPy", lambda: _package("cupy-cuda13x"), GPU),
        ]
    found += [look(f"kernel for {arch}", partial(_compile, arch), CUBINS) for arch in cubins.ARCHS]
    if "cpu" in devices:
        found += [
            look("kernel on the CPU", lambda: _run("cpu"), CPU),
            look("kernel, checked build", lambda: _run("cpu", checked=True), CHECKED),
        ]
    if "cuda" in devices:
        found.append(look("kernel on the GPU", _gpu, GPU))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = bare_parser("doctor", DESCRIPTION, EXAMPLE)
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "both"), default="both", help="which device to look at (default: both)"
    )
    args = parser.parse_args(argv)
    found = examine(("cpu", "cuda") if args.device == "both" else (args.device,))
    works = {f.name for f in found if f.found is not None}
    runs = [name for name, proof in (("cpu", "kernel on the CPU"), ("cuda", "kernel on the GPU")) if proof in works]
    not_run = list(dict.fromkeys(what for f in found for what in f.not_run))
    table = Table("this machine", ["what", "found"])
    for f in found:
        table.add(f.name, f.found if f.found is not None else f"MISSING: {f.missing}")
    notes = [f"not run here: {what}, for want of: {', '.join(f.name for f in found if what in f.not_run)}" for what in not_run]
    measured = args.device == "both" or bool(runs)
    values = {"runs": runs, "not_run": not_run, "findings": [asdict(f) for f in found], "cores": cpu_device.cores()}
    show(Answer([table], values, notes or ["nothing is missing"]), sys.stdout)
    print(json_line({"probe": "doctor", "measured": measured, **values}))
    if not measured:
        say(f"{parser.prog}: could not measure: --device {args.device} runs no kernel here; missing: {', '.join(f.name for f in found if f.found is None)}")
    return MEASURED if measured else COULD_NOT_MEASURE


if __name__ == "__main__":
    sys.exit(piped(main))
