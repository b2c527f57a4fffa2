"""The device: arguments, limits, what ran, builds, and errors that say what to do.   pytest parity/unit/test_launch.py"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parity.unit.cpu_device import kernel_cases
from production import cpu_device, launch, ops
from production.launch import CpuDevice, KernelError, open_device
from production.signatures import Converter, Parameter, include_closure, kernel_names, signatures
from reference.config import InputError

ROOT = Path(__file__).resolve().parents[2]
PROBES = kernel_cases.KERNELS
ALL_SOURCES = [*sorted(cpu_device.KERNELS.glob("*.cu")), *sorted(PROBES.glob("*.cu"))]


@pytest.fixture(scope="module")
def device():
    return open_device("cpu", kernels_dir=PROBES)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """An empty cache, but for the runtime, which takes the longest to build."""
    runtime = cpu_device.build_runtime()
    cache = tmp_path / "cache"
    (cache / "cpu").mkdir(parents=True)
    shutil.copy(runtime, cache / "cpu")
    monkeypatch.setenv("DSV4_PARITY_CACHE", str(cache))
    return cache


# ---- arguments ----


def scalars(device, *args):
    out = torch.full((8,), float("nan"), dtype=torch.float64)
    device.launch("launch_probe", "scalars", (1,), (1,), (out, *args))
    return out.tolist()


def test_every_kind_of_number_arrives(device):
    given = (-(2**31), 2**32 - 1, -(2**62), 2**63, 0.1, 0.1, True, -7)
    assert scalars(device, *given) == [*given[:4], torch.tensor(0.1).item(), 0.1, 1, -7]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 2**31, "'i' is 2147483648, the kernel takes a number of type i32 from -2147483648 to 2147483647"),
        (0, 1.5, "'i' is 1.5, the kernel takes a number of type i32"),
        (1, -1, "'u' is -1, the kernel takes a number of type u32 from 0"),
        (2, 2**63, "'l' is 9223372036854775808"),
        (4, 1e39, "'f' is 1e[+]39, the kernel takes a number of type f32"),
        (7, 40000, "'s' is 40000, the kernel takes a number of type i16 from -32768 to 32767"),
        (0, torch.ones(1, dtype=torch.int32), "'i' is a tensor of shape .1., the kernel takes a number"),
        (0, None, "'i' is None, the kernel takes a number"),
    ],
)
def test_a_number_that_does_not_fit_is_refused(device, place, value, message):
    args = [0, 0, 0, 0, 0.0, 0.0, False, 0]
    args[place] = value
    with pytest.raises(KernelError, match=message):
        scalars(device, *args)


def test_infinities_and_nan_are_numbers(device):
    out = scalars(device, 0, 0, 0, 0, float("inf"), float("nan"), False, 0)
    assert out[4] == float("inf")
    assert out[5] != out[5]


def test_none_is_a_null_pointer_and_bytes_are_bytes(device):
    out = torch.zeros(1, dtype=torch.int32)
    device.launch("launch_probe", "null_pointers", (1,), (32,), (None, None, None, None, out))
    assert out.item() == 0b1111
    u8 = torch.zeros(4, dtype=torch.uint8)
    for e4m3, e8m0, codes in [
        (u8, u8, u8),
        (u8.view(torch.float8_e4m3fn), u8.view(torch.float8_e8m0fnu), u8.view(torch.float8_e4m3fn)),
        (u8, u8, u8.view(torch.int8)),
    ]:
        device.launch("launch_probe", "null_pointers", (1,), (32,), (torch.zeros(1).bfloat16(), codes, e4m3, e8m0, out))
        assert out.item() == 0


X = torch.zeros(4, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.float(), "'x' is float32, the kernel takes bfloat16"),
        (X.T, r"'x' has shape \[8, 4\] and strides \[1, 8\]; elements of the last dimension must be neighbours"),
        (X[:, ::2], "must be neighbours"),
        (X.to("meta"), "'x' is on meta, the kernel runs on cpu"),
        (3, "'x' is 3, the kernel takes a tensor or None"),
        ([1.0], "takes a tensor or None"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(device, x, message):
    with pytest.raises(KernelError, match=message):
        device.launch("launch_probe", "null_pointers", (1,), (32,), (x, None, None, None, torch.zeros(1, dtype=torch.int32)))


def test_strided_rows_are_taken(device):
    out = torch.zeros(1, dtype=torch.int32)
    for x in (X[:, :4], X[::2], X[:, None].expand(4, 3, 8), X[:, :1].expand(4, 1), X[0, 0]):
        device.launch("launch_probe", "null_pointers", (1,), (32,), (x, None, None, None, out))
        assert out.item() == 0b1110


def test_too_few_arguments_name_the_parameters(device):
    with pytest.raises(KernelError, match=r"null_pointers: 1 arguments for 5 parameters \(x, codes, e4m3, e8m0, out\)"):
        device.launch("launch_probe", "null_pointers", (1,), (32,), (None,))


# ---- limits ----


@pytest.mark.parametrize(
    ("grid", "block", "shared", "message"),
    [
        ((0,), (32,), 0, "sizes start at 1"),
        ((1,), (1025,), 0, "at most 1024 threads"),
        ((1,), (1, 1, 65), 0, "at most"),
        ((1, 65536), (32,), 0, "larger than"),
        ((1,), (128,), 227 * 1024 + 1, "at most 232448"),
        ((1,), (128,), -1, "-1 bytes"),
    ],
)
def test_a_launch_that_no_gpu_takes_is_refused(device, grid, block, shared, message):
    x = torch.ones(4)
    with pytest.raises(KernelError, match=message):
        device.launch("launch_probe", "through_shared", grid, block, (x, x.clone(), 4), shared)


@pytest.mark.parametrize("count", [1, 12 * 1024, 227 * 256])
def test_dynamic_shared_memory_up_to_the_limit(device, count):
    x, y = torch.randn(count), torch.full((count,), float("nan"))
    device.launch("launch_probe", "through_shared", (1,), (128,), (x, y, count), 4 * count)
    assert torch.equal(x, y)


# ---- what ran, and names that do not exist ----


def test_the_record_counts_launches_that_ran_and_no_others():
    device = open_device("cpu", kernels_dir=PROBES)
    assert device.ran == []
    out = torch.zeros(1, dtype=torch.int32)
    for _ in range(3):
        device.launch("launch_probe", "null_pointers", (1,), (32,), (None, None, None, None, out))
    with pytest.raises(KernelError):
        device.launch("launch_probe", "null_pointers", (1,), (32,), (None,))
    ((source, kernel, arch, build, launches),) = device.ran
    assert (source, kernel, launches) == ("launch_probe", "null_pointers", 3)
    assert arch == device.arch
    assert arch.startswith("cpu-")
    assert re.fullmatch("[0-9a-f]{16}", build)


def test_unknown_names_list_the_near_ones(device):
    with pytest.raises(KernelError, match=r"no kernel file 'rmsnorm.cu' in .*; near: rms_norm"):
        device.launch("rmsnorm", "rms_norm_bf16", (1,), (32,), ())
    with pytest.raises(KernelError, match=r"rms_norm.cu has no kernel 'rms_norm'; near: rms_norm_bf16"):
        device.launch("rms_norm", "rms_norm", (1,), (32,), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "tpu"}, "device 'tpu' is not known; there are: cpu, cuda"),
        ({"name": "cpu", "order": "sideways"}, "'sideways' is not known; there are: forward, random, reverse"),
        ({"name": "cpu", "mma_sum": "tensor_cores"}, "near: tensor_core"),
        ({"name": "cpu", "kernels_dir": Path("/nonexistent")}, "kernels directory /nonexistent does not exist"),
        ({"name": "cuda", "checked": True}, "options of the CPU device"),
        ({"name": "cuda", "emulate": "sm_90a"}, "options of the CPU device"),
        ({"name": "cpu", "emulate": "sm_100a"}, "emulate 'sm_100a': there is sm_90a"),
    ],
)
def test_bad_options_are_input_errors(options, message):
    with pytest.raises(InputError, match=message):
        open_device(**options)


@pytest.mark.skipif(launch.cuda_missing() is None, reason="there is a GPU")
def test_a_missing_gpu_is_an_error_that_says_why():
    with pytest.raises(KernelError, match=r"no CUDA device to run kernels on: (torch sees no CUDA device|CuPy|NVRTC)"):
        open_device("cuda")


# ---- signatures ----


@pytest.mark.parametrize("path", ALL_SOURCES, ids=lambda path: path.stem)
def test_the_text_and_the_compiled_table_agree(path):
    """The GPU launcher converts by the text alone."""
    declared = signatures(include_closure(path, [cpu_device.KERNELS]))
    module = cpu_device.Module(path)
    assert list(declared) == module.kernel_names
    for name, parameters in declared.items():
        assert module.kernel(name).parameters == parameters


def test_declarations_are_read_through_comments_bounds_and_aliases():
    text = """
    using half_word = unsigned short; typedef half_word word;
    /* extern "C" __global__ void not_this(int a) { */  // extern "C" __global__ void nor_this(int a) {
    template <int N> __global__ void no_template(float *x) {}
    __global__ void not_exported(float *x) {}
    extern "C" __global__ void __launch_bounds__(128, 2) one(const float *__restrict__ x,  // a, comma
                                                             word *const y, unsigned long long n) {
    }
    extern "C" __global__ __launch_bounds__(32)
    void two() {}
    """
    assert signatures({"a.cu": text}) == {
        "one": (Parameter("x", "f32", 2), Parameter("y", "u16", 1), Parameter("n", "u64", 0)),
        "two": (),
    }
    assert kernel_names(text) == ["one", "two"]


@pytest.mark.parametrize("parameter", ["float4 *x", "const void *x", "float **x", "Params p", "float &x"])
def test_a_type_that_no_argument_fits_is_an_error(parameter):
    with pytest.raises(KernelError, match=r"k: parameter `.*` (has type|is not read)"):
        signatures({"a.cu": f'extern "C" __global__ void k({parameter}) {{}}'})


# ---- builds ----


def test_a_missing_compiler_names_the_package(monkeypatch, fresh_cache, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match=r"g\+\+ is not installed.*apt install g\+\+"):
        open_device("cpu", kernels_dir=PROBES)


def test_missing_headers_name_the_wheels(monkeypatch):
    monkeypatch.setattr(cpu_device, "TOOLKIT", Path("/nonexistent"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("DSV4_PARITY_CUDA_INCLUDE", raising=False)
    with pytest.raises(KernelError, match="pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"):
        open_device("cpu")


def test_a_cache_that_cannot_be_written_names_the_variable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSV4_PARITY_CACHE", str(tmp_path / "file"))
    with pytest.raises(KernelError, match=r"builds cannot be kept in .*file .*set DSV4_PARITY_CACHE"):
        cpu_device.Module(PROBES / "launch_probe.cu")


def one_kernel(folder, body):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "half.cu").write_text(
        f'#include "mma.cuh"\nextern "C" __global__ void half_of(const float *x, float *y) {{\n{body}\n}}\n'
    )
    return folder


HALVE = "  y[threadIdx.x] = x[threadIdx.x] * 0.5f;"


def halved(folder, **options):
    device = open_device("cpu", kernels_dir=folder, **options)
    x, y = torch.arange(32.0), torch.empty(32)
    device.launch("half", "half_of", (1,), (32,), (x, y))
    return y, device


def test_a_file_that_does_not_compile_says_where(tmp_path):
    folder = one_kernel(tmp_path, "  y[0] = undeclared_name;")
    with pytest.raises(KernelError, match=r"half.cu does not build with g\+\+: .*half.cu:3:10: error: .undeclared_name."):
        halved(folder)


def test_a_build_is_named_by_content_alone(tmp_path, fresh_cache):
    y, device = halved(one_kernel(tmp_path / "a", HALVE))
    copy_y, copy = halved(one_kernel(tmp_path / "b" / "c", HALVE))
    changed_y, changed = halved(one_kernel(tmp_path / "d", HALVE.replace("0.5", "0.25")))
    assert torch.equal(y, copy_y)
    assert torch.equal(changed_y, y / 2)
    assert device.ran == copy.ran
    assert device.ran[0][3] != changed.ran[0][3]
    assert len(list((fresh_cache / "cpu").glob("half-*.so"))) == 2


def test_a_changed_header_of_a_copy_is_used(tmp_path, fresh_cache):
    """A fault is planted in a copy of kernels/: its own headers go first, its runtime may be missing."""
    folder = one_kernel(tmp_path / "copy", "  y[threadIdx.x] = factor() * x[threadIdx.x];")
    text = (folder / "half.cu").read_text()
    (folder / "half.cu").write_text(text.replace('"mma.cuh"', '"factor.cuh"'))
    (folder / "factor.cuh").write_text('#include "common.cuh"\n__device__ inline float factor() { return round_bf16(3.f); }\n')
    assert halved(folder)[0].tolist() == [3.0 * i for i in range(32)]
    shutil.copy(cpu_device.KERNELS / "common.cuh", folder)
    shutil.copy(cpu_device.KERNELS / "mma.cuh", folder)
    changed = (folder / "common.cuh").read_text().replace("return __bfloat162float(__float2bfloat16(v));", "return v + 1.f;")
    (folder / "common.cuh").write_text(changed)
    assert halved(folder)[0].tolist() == [4.0 * i for i in range(32)]
    shutil.copytree(cpu_device.KERNELS / "cpu", folder / "cpu")
    header = folder / "cpu" / "cuda_on_cpu.h"
    header.write_text(header.read_text() + "\n// changed\n")
    before = len(list((fresh_cache / "cpu").glob("libcuda_on_cpu-*.so")))
    assert halved(folder)[0].tolist() == [4.0 * i for i in range(32)]
    assert len(list((fresh_cache / "cpu").glob("libcuda_on_cpu-*.so"))) == before + 1


def test_the_checked_build_of_a_copy_names_its_own_lines(tmp_path):
    folder = one_kernel(tmp_path, "\n  y[threadIdx.x + 1] = x[threadIdx.x];")
    with pytest.raises(
        KernelError, match=r"out-of-bounds write .* argument 'y' \(128 bytes\) at offset 128, at half.cu:4 .*thread \(31,0,0\)"
    ):
        halved(folder, checked=True)


BUILD = """
import sys; from pathlib import Path
from production.cpu_device import Module
print(Module(Path(sys.argv[1]) / "half.cu").path)
"""


def start_build(folder, **environment):
    return subprocess.Popen([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env={**os.environ, **environment}, start_new_session=True)  # fmt: skip


def test_processes_that_build_the_same_file_share_one_build(tmp_path, fresh_cache):
    folder = one_kernel(tmp_path / "k", HALVE)
    builds = [start_build(folder) for _ in range(3)]
    paths = {build.communicate(timeout=60)[0].strip() for build in builds}
    assert [build.returncode for build in builds] == [0, 0, 0]
    assert len(paths) == 1
    assert len(list((fresh_cache / "cpu").iterdir())) == 2
    assert not list((fresh_cache / "scratch").glob("build-*"))


def test_a_killed_build_leaves_nothing_half_written(tmp_path, fresh_cache):
    """The compiler here writes half a file and hangs."""
    folder = one_kernel(tmp_path / "k", HALVE)
    slow = tmp_path / "bin"
    slow.mkdir()
    marker = tmp_path / "started"
    script = f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho half > "$2"\ntouch {marker}\nexec sleep 60\n'
    (slow / "g++").write_text(script)
    (slow / "g++").chmod(0o755)
    build = start_build(folder, PATH=f"{slow}{os.pathsep}{os.environ['PATH']}")
    for _ in range(600):
        if marker.exists():
            break
        time.sleep(0.05)
    assert marker.exists()
    os.killpg(build.pid, signal.SIGKILL)  # the build and its compiler: both ours
    build.communicate(timeout=10)
    assert [path.name for path in (fresh_cache / "cpu").iterdir()] == [cpu_device.build_runtime().name]
    assert torch.equal(halved(folder)[0], torch.arange(32.0) / 2)


def test_prebuild_builds_every_file_and_launches_find_them_built(tmp_path, fresh_cache, monkeypatch):
    folder = one_kernel(tmp_path / "k", HALVE)
    (folder / "third.cu").write_text((folder / "half.cu").read_text().replace("half_of", "third_of"))
    device = open_device("cpu", kernels_dir=folder)
    device.prebuild()
    assert len(list((fresh_cache / "cpu").glob("*-*.so"))) == 3
    monkeypatch.setattr(cpu_device, "_run_compiler", lambda *_: pytest.fail("compiled again"))
    assert torch.equal(halved(folder)[0], torch.arange(32.0) / 2)


def test_a_file_for_another_architecture_is_neither_built_nor_run(tmp_path, fresh_cache):
    folder = one_kernel(tmp_path / "k", HALVE)
    (folder / "hopper.cu").write_text("// hopper.cu\n//\n// archs    sm_90a\n" + (folder / "half.cu").read_text().replace("half_of", "wgmma_of"))
    device = open_device("cpu", kernels_dir=folder)
    device.prebuild()
    assert len(list((fresh_cache / "cpu").glob("*-*.so"))) == 2  # the runtime and the other file
    with pytest.raises(KernelError, match=f"^hopper runs on sm_90a only, this is {device.arch}$"):
        device.launch("hopper", "wgmma_of", (1,), (32,), (torch.zeros(32), torch.zeros(32)))
    emulating, out = open_device("cpu", kernels_dir=folder, emulate="sm_90a"), torch.zeros(32)
    emulating.launch("hopper", "wgmma_of", (1,), (32,), (torch.arange(32.0), out))
    assert torch.equal(out, torch.arange(32.0) / 2)
    with pytest.raises(KernelError, match="the checked build knows no mbarrier"):
        open_device("cpu", kernels_dir=folder, emulate="sm_90a", checked=True).launch("hopper", "wgmma_of", (1,), (32,), (out, out))


# ---- schedules and cost ----


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
def test_options_of_the_device_reach_the_kernels(order, checked):
    device = open_device("cpu", kernels_dir=PROBES, order=order, checked=checked, mma_sum="double_sum", fast_tiles=False)
    assert isinstance(device, CpuDevice)
    case = kernel_cases.gemm(m=13, n=64, k=64)
    actual = kernel_cases.run(case, lambda name, *rest: device.launch("gemm", name, *rest))["y"]
    assert kernel_cases.relative_error(actual, case.reference(case.inputs, torch.float64)["y"]) <= case.tolerance
    values = torch.full((64,), -7.0)
    if checked:
        with pytest.raises(KernelError, match="no thread of this block has written"):
            device.launch("planted_bugs", "race_across_warps", (1,), (64,), (values,))
        return
    device.launch("planted_bugs", "race_across_warps", (1,), (64,), (values,))
    ran_early = values.isnan()  # they read what the other half had not written yet
    first_half = torch.arange(64) < 32
    assert torch.equal(ran_early, first_half) == (order == "forward")
    assert torch.equal(ran_early, ~first_half) == (order == "reverse")


def test_a_launch_costs_less_than_sixty_microseconds(device):
    """About 240 launches make a decode step. One block of one warp, twelve arguments; the best of twenty batches."""
    args = (X, torch.zeros(8), X.clone(), *(torch.zeros(8, dtype=torch.int32),) * 2, None, 1, 2, 3, 4, 5.0, 6.0)
    costs = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            device.launch("launch_probe", "empty", (1,), (32,), args)
        costs.append((time.perf_counter() - start) / 100 * 1e6)
    print(f"a launch: {min(costs):.1f} us, median {sorted(costs)[10]:.1f} us")
    assert min(costs) < 60


# ---- the GPU side ----


_INTEGERS = {"i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}


class _Driver:
    """Stands for the driver: reads every argument where the launch says it lies, as the GPU would."""

    ptr = 77

    def __init__(self, parameters: tuple[Parameter, ...]) -> None:
        self.parameters = parameters
        self.seen: list[tuple[Any, ...]] = []
        self.max_dynamic_shared_size_bytes = 0
        self.shared_size_bytes = 0
        self.kernel = self

    def launch(self, handle, gx, gy, gz, bx, by, bz, shared, stream, places, extra) -> None:
        pointers = (ctypes.c_void_p * len(self.parameters)).from_address(places)
        codes = ["Q" if p.is_pointer else {"f32": "f", "f64": "d", "b8": "?"}.get(p.type) or _INTEGERS[p.type] for p in self.parameters]
        values = [struct.unpack(f"={code}", ctypes.string_at(at or 0, struct.calcsize(f"={code}")))[0] for code, at in zip(codes, pointers, strict=True)]
        self.seen.append((handle, (gx, gy, gz), (bx, by, bz), shared, stream, extra, values))


def test_arguments_lie_where_the_driver_is_told_in_slots_of_their_own():
    parameters = signatures(include_closure(PROBES / "launch_probe.cu", [cpu_device.KERNELS]))["scalars"]
    driver = _Driver(parameters)
    kernel = launch._CudaKernel(driver, Converter("scalars", parameters, "cpu"), driver.launch)
    out, given = torch.zeros(8, dtype=torch.float64), (-(2**31), 2**32 - 1, -(2**62), 2**63, 0.1, 0.1, True, -7)
    kernel.launch((3,), (64, 2), (out, *given), 50_000, 5)
    kernel.launch((1, 2, 3), (1,), (None, *(7,) * 4, 1.5, 2.5, False, 7), 0, 0)
    want = [out.data_ptr(), *given[:4], ctypes.c_float(0.1).value, 0.1, True, -7]
    assert driver.seen[0] == (77, (3, 1, 1), (64, 2, 1), 50_000, 5, 0, want)
    assert driver.seen[1] == (77, (1, 2, 3), (1, 1, 1), 0, 0, 0, [0, 7, 7, 7, 7, 1.5, 2.5, False, 7])
    assert driver.max_dynamic_shared_size_bytes == 50_000
    with pytest.raises(KernelError, match="'i' is 2147483648"):
        kernel.launch((1,), (1,), (out, 2**31, *given[1:]), 0, 0)
    with pytest.raises(KernelError, match="at most 1024 threads"):
        kernel.launch((1,), (2048,), (out, *given), 0, 0)
    assert len(driver.seen) == 2


def test_leave_for_more_shared_memory_counts_what_the_kernel_has_of_its_own():
    """The driver refuses 45,000 dynamic bytes beside 9,000 static ones unless they were asked for, though each alone is below 48 KiB."""
    parameters = signatures(include_closure(PROBES / "launch_probe.cu", [cpu_device.KERNELS]))["scalars"]
    driver = _Driver(parameters)
    driver.shared_size_bytes = 9_000
    kernel = launch._CudaKernel(driver, Converter("scalars", parameters, "cpu"), driver.launch)
    arguments = (None, *(7,) * 4, 1.5, 2.5, False, 7)
    kernel.launch((1,), (1,), arguments, 40_000, 0)
    assert driver.max_dynamic_shared_size_bytes == 0
    kernel.launch((1,), (1,), arguments, 45_000, 0)
    assert driver.max_dynamic_shared_size_bytes == 45_000


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(launch.cuda_missing() is not None, reason=f"not run: {launch.cuda_missing()}")]


@pytest.fixture(scope="module")
def gpu():
    return open_device("cuda", kernels_dir=PROBES)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=on_gpu)])
def test_gpu_takes_the_same_arguments(gpu, mark):
    given = (-(2**31), 2**32 - 1, -(2**62), 2**63, 0.1, 0.1, True, -7)
    out = torch.full((8,), float("nan"), dtype=torch.float64, device="cuda")
    gpu.launch("launch_probe", "scalars", (1,), (1,), (out, *given))
    assert out.tolist() == [*given[:4], torch.tensor(0.1).item(), 0.1, 1, -7]
    nulls = torch.zeros(1, dtype=torch.int32, device="cuda")
    gpu.launch("launch_probe", "null_pointers", (1,), (32,), (None, None, None, None, nulls))
    assert nulls.item() == 0b1111
    for bad, message in ((2**31, "'i' is 2147483648"), (1.5, "'i' is 1.5")):
        with pytest.raises(KernelError, match=message):
            gpu.launch("launch_probe", "scalars", (1,), (1,), (out, bad, *given[1:]))
    with pytest.raises(KernelError, match="'out' is on cpu, the kernel runs on cuda:0"):
        gpu.launch("launch_probe", "scalars", (1,), (1,), (out.cpu(), *given))
    with pytest.raises(KernelError, match="near: scalars"):
        gpu.launch("launch_probe", "scalar", (1,), (1,), ())
    assert [(kernel, arch, launches) for _, kernel, arch, _, launches in gpu.ran] == [
        ("null_pointers", gpu.arch, 1), ("scalars", gpu.arch, 1)]  # fmt: skip


@pytest.mark.parametrize("count", [pytest.param(n, marks=on_gpu) for n in (12 * 1024, 13 * 1024, 227 * 256)])
def test_gpu_dynamic_shared_memory_beyond_48_kib(gpu, count):
    x, y = torch.randn(count, device="cuda"), torch.full((count,), float("nan"), device="cuda")
    gpu.launch("launch_probe", "through_shared", (1,), (128,), (x, y, count), 4 * count)
    assert torch.equal(x, y)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=on_gpu)])
def test_gpu_launches_go_to_the_current_stream_and_into_graphs(gpu, mark):
    x, y = torch.ones(128, device="cuda"), torch.zeros(128, device="cuda")
    args = ("launch_probe", "through_shared", (1,), (128,), (x, y, 128), 512)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # on the default stream the kernel would not wait for this
        x.fill_(2.0)
        gpu.launch(*args)
    side.synchronize()
    assert torch.equal(y, torch.full_like(y, 2.0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.launch(*args)
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, torch.full_like(y, value))


@pytest.mark.parametrize("mark", [pytest.param(None, marks=on_gpu)])
def test_gpu_launch_cost(gpu, mark):
    x = torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda")
    p = torch.zeros(8, dtype=torch.int32, device="cuda")
    args = (x, torch.zeros(8, device="cuda"), x.clone(), p, p, None, 1, 2, 3, 4, 5.0, 6.0)
    costs = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            gpu.launch("launch_probe", "empty", (1,), (32,), args)
        costs.append((time.perf_counter() - start) / 100 * 1e6)
    torch.cuda.synchronize()
    print(f"a launch on the GPU: {min(costs):.1f} us host time")
    assert min(costs) < 60


def test_nothing_is_collected_while_a_graph_is_captured():
    """A graph freed during the capture of another invalidates it on a GPU."""
    device = open_device("cpu")
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    assert gc.isenabled()
    with device.capture():
        assert not gc.isenabled()
        ops.rms_norm(device, x, None, torch.empty_like(x), 1e-6)
    assert gc.isenabled()
