"""Each example kernel against PyTorch, in both builds and under three schedules.   pytest parity/unit/cpu_device/test_kernels.py"""

import functools
from typing import Any

import pytest
import torch

from parity.unit.cpu_device import kernel_cases
from production.cpu_device import Module, build_all

CASES = kernel_cases.small_cases()
SCHEDULES: dict[str, dict[str, Any]] = {"forward": {"order": "forward"}, "reverse": {"order": "reverse"},
                                        "random": {"order": "random", "seed": 7}}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _built():
    for checked in (False, True):
        build_all(sorted(kernel_cases.KERNELS.glob("*.cu")), checked=checked)


@functools.cache
def module(source, checked):
    return Module(kernel_cases.KERNELS / source, checked=checked)


def run(case, checked=False, **options):
    kernels = module(case.source, checked)
    return kernel_cases.run(case, lambda name, *launch: kernels.kernel(name)(*launch, **options))


def same_bits(a, b):
    return all(torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)) for name in a)


@pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_pytorch(case, checked):
    outputs = run(case, checked)
    reference = case.reference(case.inputs, torch.float64)
    assert case.results
    for name in case.results:
        assert kernel_cases.relative_error(outputs[name], reference[name]) <= case.tolerance, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_schedule_and_build_do_not_change_a_bit(case):
    first = run(case, workers=1)
    for name, schedule in SCHEDULES.items():
        assert same_bits(first, run(case, workers=2, **schedule)), name
    assert same_bits(first, run(case, checked=True)), "checked build"


@pytest.mark.parametrize("case", [c for c in CASES if "tile" in c.name or "gemm" in c.name], ids=lambda case: case.name)
def test_fast_tiles_give_the_bits_of_the_mma_loop(case):
    assert same_bits(run(case), run(case, fast_tiles=True))
    assert same_bits(run(case), run(case, checked=True, fast_tiles=True))


def test_both_attention_variants_agree():
    by_hand, whole_tiles = (kernel_cases.attention([500, 127, 3], splits=4, whole_tiles=w) for w in (False, True))
    assert same_bits(run(by_hand), run(whole_tiles))


@pytest.mark.parametrize("mma_sum", ["double_sum", "tensor_core"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if "attention" in c.name or "gemm" in c.name or "mma" in c.name], ids=lambda case: case.name
)
def test_every_rounding_of_the_tensor_core_is_within_tolerance(case, mma_sum):
    outputs = run(case, mma_sum=mma_sum)
    reference = case.reference(case.inputs, torch.float64)
    for name in case.results:
        assert kernel_cases.relative_error(outputs[name], reference[name]) <= case.tolerance, name


def test_templates_of_two_modules_keep_apart():
    """rms_norm.cu has a shared array in a template; a merged symbol would make the second module use the first one's."""
    case = kernel_cases.rms_norm(rows=4, dim=64)
    plain, checked = run(case), run(case, checked=True)
    assert same_bits(plain, checked)
    assert same_bits(plain, run(case))
