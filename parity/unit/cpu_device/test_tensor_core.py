"""mma_sum='tensor_core' and the exact scalar operations against bits recorded on an H200.   pytest parity/unit/cpu_device/test_tensor_core.py

h200.npz holds inputs and outputs of mma_probe and scalar_probe, compiled for sm_90a with -fmad=false -ftz=false.
Cases were drawn by kernel_cases.mma_probe and kernel_cases.scalar_probe.
"""

import numpy as np
import pytest
import torch

from parity.unit.cpu_device import kernel_cases
from production.cpu_device import Module

RECORDED = np.load(kernel_cases.HERE / "h200.npz")


def bits(tensor):
    return tensor.view(torch.int32)


def recorded(name):
    return torch.from_numpy(RECORDED[name])


@pytest.mark.parametrize("kind", kernel_cases.MMA_KINDS)
def test_mma_rounds_like_an_h200(kind):
    inputs = {
        "a": recorded(f"{kind}/a").view(torch.bfloat16),
        "b": recorded(f"{kind}/b").view(torch.bfloat16),
        "c": recorded(f"{kind}/c"),
    }
    case = kernel_cases.mma_probe(len(inputs["a"]), kind)
    module = Module(kernel_cases.KERNELS / case.source)
    outputs = kernel_cases.run(case, lambda name, *launch: module.kernel(name)(*launch, mma_sum="tensor_core"), inputs)
    assert torch.equal(bits(outputs["d"]), bits(recorded(f"{kind}/d")))


@pytest.mark.parametrize("mma_sum", ["fma_chain", "double_sum"])
def test_the_other_sums_differ_from_an_h200(mma_sum):
    """Or the test above would prove little."""
    case = kernel_cases.mma_probe(len(RECORDED["spread/a"]), "spread")
    case.inputs = {
        "a": recorded("spread/a").view(torch.bfloat16),
        "b": recorded("spread/b").view(torch.bfloat16),
        "c": recorded("spread/c"),
    }
    module = Module(kernel_cases.KERNELS / case.source)
    outputs = kernel_cases.run(case, lambda name, *launch: module.kernel(name)(*launch, mma_sum=mma_sum))
    assert (bits(outputs["d"]) != bits(recorded("spread/d"))).double().mean() > 0.3


def test_exact_scalar_operations_agree_with_an_h200():
    inputs = {name: recorded(f"scalar/{name}") for name in ("x", "y", "z")}
    case = kernel_cases.scalar_probe(len(inputs["x"]))
    module = Module(kernel_cases.KERNELS / case.source)
    outputs = kernel_cases.run(case, lambda name, *launch: module.kernel(name)(*launch), inputs)["out"]
    wrong = [
        name
        for row, name in enumerate(kernel_cases.SCALAR_ROWS[: kernel_cases.EXACT_SCALAR_ROWS])
        if not torch.equal(bits(outputs[row].clone()), bits(recorded("scalar/out")[row].clone()))
    ]
    assert not wrong
