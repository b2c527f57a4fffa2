"""What the doctor says of this machine, and of one that lacks something.   pytest parity/unit/test_doctor.py"""

from __future__ import annotations

import json

import pytest

from probes import doctor
from production import cpu_device, cubins
from production.launch import KernelError, cuda_missing

GPU = cuda_missing() is None


def run(capsys, *args):
    code = doctor.main(args)
    lines = capsys.readouterr().out.strip().splitlines()
    return code, lines, json.loads(lines[-1])


def finding(values, name):
    return next(f for f in values["findings"] if f["name"] == name)


def test_a_kernel_is_built_and_run_and_not_taken_from_the_cache(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_PARITY_CACHE", str(tmp_path))
    code, lines, values = run(capsys, "--device", "cpu")
    assert code == 0
    assert values["measured"] is True
    assert values["runs"] == ["cpu"]
    assert values["not_run"] == []
    assert finding(values, "kernel on the CPU")["found"].startswith("right, cpu-")
    assert finding(values, "kernel, checked build")["found"].startswith("right, cpu-")
    assert "registers" in finding(values, "kernel for sm_100a")["found"]
    assert "nothing is missing" in lines
    assert not list(tmp_path.glob("*/doctor_*.so")) + list(tmp_path.glob("*/doctor_*.cubin"))


def test_a_missing_compiler_is_named_with_its_package_and_what_will_be_not_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, lines, values = run(capsys, "--device", "cpu")
    assert code == 3
    assert values["measured"] is False
    assert "apt install g++" in finding(values, "g++")["missing"]
    assert any(line.startswith("not run here: --device cpu, for want of: g++") for line in lines)
    assert values["not_run"] == ["--device cpu", "checked build of the CPU device"]


def test_missing_headers_and_nvrtc_are_named(capsys, monkeypatch):
    def no_headers():
        raise KernelError("no CUDA headers found: pip install nvidia-cuda-runtime")

    def no_nvrtc():
        raise KernelError("NVRTC is not installed")

    monkeypatch.setattr(cpu_device, "cuda_include_paths", no_headers)
    monkeypatch.setattr(cubins, "nvrtc", no_nvrtc)
    code, _, values = run(capsys)
    assert code == 0
    assert values["runs"] == []
    assert values["not_run"] == ["--device cpu", "cubin compile check", "--device cuda", "checked build of the CPU device"]
    assert "pip install" in finding(values, "CUDA headers")["missing"]


@pytest.mark.skipif(GPU, reason="this machine has a GPU")
def test_without_a_gpu_the_gpu_is_not_run_and_the_reason_stands_there(capsys):
    code, lines, values = run(capsys)
    assert code == 0
    assert values["runs"] == ["cpu"]
    assert values["not_run"] == ["--device cuda"]
    assert any(line.startswith("not run here: --device cuda, for want of: ") for line in lines)
    code, _, values = run(capsys, "--device", "cuda")
    assert (code, values["measured"]) == (3, False)


@pytest.mark.parametrize(
    ("args", "code", "said"), [(["--help"], 0, "example:"), (["--device", "tpu"], 2, "invalid choice: 'tpu'")]
)
def test_help_has_an_example_and_bad_input_is_one_line(capsys, args, code, said):
    with pytest.raises(SystemExit) as ended:
        doctor.main(args)
    assert ended.value.code == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert code == 0 or len(captured.err.strip().splitlines()) == 1
