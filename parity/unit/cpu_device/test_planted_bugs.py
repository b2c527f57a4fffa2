"""Every kernel of planted_bugs.cu holds one mistake.   pytest parity/unit/cpu_device/test_planted_bugs.py

The checked build must name each; the second pattern is what the plain build says, None where it cannot know.
"""

import functools

import pytest
import torch

from parity.unit.cpu_device import kernel_cases
from production.cpu_device import CHECK_RACES, Module
from production.signatures import KernelError

UNDEFINED = "undefined behaviour trapped at planted_bugs.cu:"
ILLEGAL = "illegal memory access"
UNWRITTEN = "read of shared memory that no thread of this block has written"


def y():
    return torch.full((64,), float("nan"))


def x():
    return torch.arange(256.0)


def middle():
    return torch.zeros(66)[1:65]  # a view inside a larger allocation: an overrun stays inside the allocation


# name: (arguments, checked build says, plain build says)
BUGS = {
    "barrier_in_branch": (lambda: (y(),), "barrier divergence", "barrier divergence"),
    "barrier_never_complete": (lambda: (y(),), "deadlock: 16 thread.s. wait in __syncwarp mask 0xffffffff", "deadlock"),
    "shuffle_in_branch": (lambda: (y(),), "names lanes 0x55555555 that have exited", "names lanes 0x55555555"),
    "shuffle_outside_mask": (lambda: (y(),), "does not name the calling lane 16", "does not name the calling lane 16"),
    "shuffle_with_exited_lane": (lambda: (y(),), "names lanes 0x00000080 that have exited", "names lanes 0x00000080"),
    "mma_in_half_a_warp": (lambda: (y(),), "mma.sync at .* names lanes 0xffff0000", "mma.sync at .* names lanes 0xffff0000"),
    "copy_without_wait": (lambda: (x(), y()), UNWRITTEN, None),
    "race_across_warps": (lambda: (y(),), UNWRITTEN, None),
    "race_in_a_warp": (lambda: (y(),), UNWRITTEN, None),
    "race_on_reuse": (lambda: (y(),), "shared-memory race .read after write.", None),
    "read_of_unwritten": (lambda: (y(),), UNWRITTEN, None),
    "write_past_tensor": (lambda: (middle(), 64), "out-of-bounds write .* argument 'y' .256 bytes. at offset 256", None),
    "read_before_tensor": (lambda: (x()[1:], y()), "out-of-bounds read .* argument 'x' .* at offset -4", None),
    "atomic_past_tensor": (lambda: (torch.zeros(64, dtype=torch.int32)[:63],), "argument 'counters' .* offset 252", None),
    "past_dynamic_shared": (lambda: (y(),), "out-of-bounds write of 4 bytes at dynamic shared memory . 256", None),
    "past_static_shared": (lambda: (y(), 1), UNDEFINED, None),
    "null_pointer": (lambda: (y(), None), UNDEFINED, ILLEGAL),
    "misaligned_vector": (lambda: (x(), y()), UNDEFINED, None),
    "shift_too_far": (lambda: (torch.zeros(64, dtype=torch.int32), 20), UNDEFINED, None),
    "stack_overflow": (lambda: (y(), 100), ILLEGAL, ILLEGAL),
    "failed_assert": (lambda: (y(), 40), "device assert .* failed at .*planted_bugs.cu", "device assert"),
}
DYNAMIC_SHARED_BYTES = {"past_dynamic_shared": 256}


@functools.cache
def module(checked):
    return Module(kernel_cases.KERNELS / "planted_bugs.cu", checked=checked)


def launch(name, checked, **options):
    module(checked).kernel(name)((1,), (64,), BUGS[name][0](), DYNAMIC_SHARED_BYTES.get(name, 0), workers=1, **options)


def assert_still_works(checked):
    values = y()
    module(checked).kernel("correct")((1,), (64,), (values,))
    assert torch.equal(values, torch.arange(63.0, -1, -1))


@pytest.mark.parametrize("name", BUGS)
def test_checked_build_names_the_bug(name):
    with pytest.raises(KernelError, match=BUGS[name][1]):
        launch(name, checked=True)
    assert_still_works(checked=True)


@pytest.mark.parametrize("name", [name for name in BUGS if BUGS[name][2]])
def test_plain_build_reports_what_it_can(name):
    with pytest.raises(KernelError, match=BUGS[name][2]):
        launch(name, checked=False)
    assert_still_works(checked=False)


@pytest.mark.parametrize("name", ["race_across_warps", "race_in_a_warp", "race_on_reuse"])
def test_race_check_alone_names_the_race(name):
    """With all checks on, the first two are reported as reads of unwritten memory before the race is complete."""
    with pytest.raises(KernelError, match=r"shared-memory race .* thread .* at planted_bugs.cu:.* no barrier between"):
        launch(name, checked=True, checks=CHECK_RACES)


def test_every_kernel_has_an_expectation():
    assert set(module(False).kernel_names) == set(BUGS) | {"correct", "atomic_sums"}


@pytest.mark.parametrize("name", ["race_across_warps", "race_in_a_warp"])
def test_a_race_shows_as_dependence_on_the_schedule(name):
    results = []
    for order, seed in (("forward", 0), ("reverse", 0), ("random", 1)):
        values = torch.full((64,), -7.0)
        module(False).kernel(name)((1,), (64,), (values,), workers=1, order=order, seed=seed)
        results.append(torch.nan_to_num(values, 999.0))
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_forgotten_wait_leaves_nan_in_the_plain_build():
    values = torch.zeros(64)
    module(False).kernel("copy_without_wait")((1,), (64,), (x(), values))
    assert values.isnan().any()
