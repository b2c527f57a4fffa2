"""One module: its table, limits, atomics, templates, forks.   pytest parity/unit/cpu_device/test_module.py"""

import os

import pytest
import torch

from parity.unit.cpu_device import kernel_cases
from production.cpu_device import Module
from production.signatures import POINTER, POINTER_TO_CONST, KernelError, Parameter


@pytest.fixture(scope="module")
def bugs():
    return Module(kernel_cases.KERNELS / "planted_bugs.cu")


@pytest.fixture(scope="module")
def norm():
    return Module(kernel_cases.KERNELS / "rms_norm.cu")


def test_parameter_table_comes_from_the_signature(norm):
    expected = (Parameter("x", "bf16", POINTER_TO_CONST), Parameter("w", "f32", POINTER_TO_CONST),
                Parameter("y", "bf16", POINTER), Parameter("dim", "i32", 0), Parameter("eps", "f32", 0))  # fmt: skip
    assert norm.kernel("rms_norm_bf16").parameters == expected


@pytest.mark.parametrize(
    ("grid", "block", "args", "message"),
    [
        ((1,), (64,), lambda: (torch.zeros(64, dtype=torch.float64),), "'y' is float64, the kernel takes float32"),
        ((1,), (64,), lambda: (), "0 arguments for 1 parameters"),
        ((0,), (64,), lambda: (torch.zeros(64),), "sizes start at 1"),
        ((1,), (2048,), lambda: (torch.zeros(64),), "at most 1024 threads"),
        ((1, 65536), (64,), lambda: (torch.zeros(64),), "is larger than"),
    ],
)
def test_wrong_launch_is_refused(bugs, grid, block, args, message):
    with pytest.raises(KernelError, match=message):
        bugs.kernel("correct")(grid, block, args())


def test_too_much_shared_memory_is_refused(bugs):
    with pytest.raises(KernelError, match="at most 232448"):
        bugs.kernel("correct")((1,), (64,), (torch.zeros(64),), shared_bytes=232449)


def test_unknown_kernel_lists_the_known_ones(norm):
    with pytest.raises(KernelError, match="no kernel 'rms'; near: rms_norm_bf16"):
        norm.kernel("rms")


def test_error_in_one_block_of_many_comes_back(bugs):
    for _ in range(3):
        with pytest.raises(KernelError, match="device assert"):
            bugs.kernel("failed_assert")((40,), (64,), (torch.zeros(64), 40), workers=2)


def test_atomics_across_blocks(bugs):
    counters, total = torch.zeros(3, dtype=torch.int32), torch.zeros(1)
    bugs.kernel("atomic_sums")((100,), (64,), (counters, total), workers=4)
    assert counters[:2].tolist() == [6400, 63]
    assert counters[2] > 0
    assert total.item() == 6400


def test_template_instances(tmp_path):
    source = tmp_path / "scaled.cu"
    source.write_text(
        "template <int N> __global__ void scaled(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x] * N; }\n"
    )
    module = Module(source, instances=[("scaled_3", "scaled<3>"), ("scaled_5", "scaled<5>")])
    x, y = torch.arange(32.0), torch.empty(32)
    module.kernel("scaled_5")((1,), (32,), (x, y))
    assert torch.equal(y, 5 * x)


def test_child_process_can_launch(norm):
    """After a fork; torch's own OpenMP pool would hang there, so the child only launches."""
    case = kernel_cases.rms_norm()
    parent = kernel_cases.run(case, lambda name, *launch: norm.kernel(name)(*launch, workers=2))["y"].clone()
    expected = bytes(parent.view(torch.uint8).numpy())
    outputs = kernel_cases.new_outputs(case)["y"]
    child = os.fork()
    if child == 0:
        step = case.steps[0]
        args = [{**case.inputs, "y": outputs}[a] if isinstance(a, str) else a for a in step.args]
        norm.kernel("rms_norm_bf16")(step.grid, step.block, args, workers=2)
        os._exit(0 if bytes(outputs.view(torch.uint8).numpy()) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
