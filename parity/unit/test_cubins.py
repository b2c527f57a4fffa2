"""Every kernel compiles for the GPU, on any machine.   pytest parity/unit/test_cubins.py -s"""

from __future__ import annotations

import pytest

from parity.unit.cpu_device import kernel_cases
from production import cpu_device, cubins
from production.signatures import KernelError, kernel_names

# Bytes of spilled registers a kernel may have; more means a launch shape or an unrolling that does not fit.
SPILL_LIMIT_BYTES = 64
SOURCES = sorted(cpu_device.KERNELS.glob("*.cu"))


def test_there_are_kernels():
    assert SOURCES


@pytest.fixture(scope="module", autouse=True)
def _side_by_side():
    cubins.build_all(SOURCES)


@pytest.mark.parametrize(("path", "arch"), [(p, a) for p in SOURCES for a in cubins.ARCHS if cubins.is_for(p, a)], ids=lambda v: v if isinstance(v, str) else v.stem)
def test_compiles_without_spilling(path, arch):
    cubin = cubins.build(path, arch)
    assert cubin.path.read_bytes()[:4] == b"\x7fELF"
    assert {u.kernel for u in cubin.usage} == set(kernel_names(path.read_text()))
    for u in cubin.usage:
        print(f"{path.stem} {arch} {u.kernel}: {u.registers} registers, {u.spill_bytes} spill bytes of {SPILL_LIMIT_BYTES}")
        assert 0 < u.registers <= 255
        assert u.spill_bytes <= SPILL_LIMIT_BYTES, u.kernel


def test_usage_is_read_from_the_log():
    """planted_bugs.cu has a kernel that spills on purpose, with 4 KB of stack."""
    usage = {u.kernel: u for u in cubins.build(kernel_cases.KERNELS / "planted_bugs.cu", "sm_90a").usage}
    assert usage["stack_overflow"].stack_bytes > 4000
    assert usage["stack_overflow"].spill_bytes > 0
    assert usage["correct"].shared_bytes == 256
    assert usage["correct"].spill_bytes == 0


def test_cubins_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_PARITY_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "one.cu"
    source.write_text('#include "common.cuh"\nextern "C" __global__ void one(float *x) { x[0] = e4m3_round(x[0]); }\n')
    first, second = cubins.build(source, "sm_90a"), cubins.build(source, "sm_90a")
    assert (first.cached, second.cached) == (False, True)
    assert first.usage == second.usage
    source.write_text(source.read_text().replace("x[0] = ", "x[1] = "))
    assert cubins.build(source, "sm_90a").build != first.build
    assert cubins.build(source, "sm_100a").build != cubins.build(source, "sm_90a").build


def broken(folder):
    (folder / "broken.cu").write_text('extern "C" __global__ void broken(float *x) { x[0] = no_such_name; }\n')
    return folder


def test_a_file_that_does_not_compile_says_where(tmp_path):
    with pytest.raises(KernelError, match=r"broken.cu does not build with NVRTC: broken.cu\(1\): error.*no_such_name"):
        cubins.build(broken(tmp_path) / "broken.cu", "sm_90a")


def test_the_command_prints_a_table_and_says_how_it_went(tmp_path, capsys):
    assert cubins.main(["--arch", "sm_90a", "--kernels", str(kernel_cases.KERNELS), "rms_norm", "planted_bugs"]) == 0
    out = capsys.readouterr().out
    assert "rms_norm_bf16" in out
    assert "2 of 2 cubins compiled" in out
    assert cubins.main(["--arch", "sm_90a", "--kernels", str(broken(tmp_path))]) == 1
    assert "no_such_name" in capsys.readouterr().err
    assert cubins.main(["--kernels", str(tmp_path / "nowhere")]) == 1
    for bad in (["--kernels", str(tmp_path), "broke"], ["--arch", "90"]):
        with pytest.raises(SystemExit) as ended:
            cubins.main(bad)
        assert ended.value.code == 2
    assert "near: broken" in capsys.readouterr().err


def test_a_file_is_compiled_for_the_architectures_that_it_names(tmp_path, capsys):
    (tmp_path / "mine.cu").write_text('// mine.cu\n//\n// archs    sm_90a\nextern "C" __global__ void mine(float *x) { x[0] = 1.f; }\n')
    (tmp_path / "any.cu").write_text('extern "C" __global__ void any(float *x) { x[0] = 1.f; }\n')
    assert cubins.main(["--kernels", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "mine               sm_100a  not compiled: for sm_90a only" in said
    assert "3 of 3 cubins compiled" in said
    with pytest.raises(KernelError, match=r"^mine runs on sm_90a only, this is sm_100a$"):
        cubins.build(tmp_path / "mine.cu", "sm_100a")


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")])
def test_the_chips_own_architecture_is_chosen(capability, arch):
    assert cubins.arch_of(*capability) == arch
