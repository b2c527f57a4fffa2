"""One changed line of sparse_attention.cu at a time: each must be noticed.   pytest parity/unit/cpu_device/test_mutations.py

Plain build: a wrong result, a result that depends on the schedule, or an error. Checked build: an error. The table
says which build must notice, and for the checked build what it must say.
"""

import functools
from typing import Any

import pytest
import torch

from parity.unit.cpu_device import kernel_cases
from production.cpu_device import Module, build_all
from production.signatures import KernelError

SOURCE = (kernel_cases.KERNELS / "sparse_attention.cu").read_text()
BARRIER = "    __syncthreads();\n"
CASE = kernel_cases.attention([100, 47, 5], window=48, topk=20, compressed=30, splits=2, seed=3)
SCHEDULES: list[dict[str, Any]] = [{"order": "forward"}, {"order": "reverse"}, {"order": "random", "seed": 1}]


def without_barrier(number):
    parts = SOURCE.split(BARRIER)
    assert len(parts) == 5
    return BARRIER.join(parts[: number + 1]) + BARRIER.join(parts[number + 1 :])


def replaced(old, new):
    assert SOURCE.count(old) >= 1, old
    return SOURCE.replace(old, new)


RACE, UNWRITTEN, BOUNDS = "shared-memory race", "no thread of this block has written", "out-of-bounds"
# name: (source, does the plain build notice, what the checked build says or None)
MUTATIONS: dict[str, tuple[str, bool, str | None]] = {
    "no barrier after the kv load": (without_barrier(0), True, UNWRITTEN),
    "no barrier after the scores": (without_barrier(1), True, UNWRITTEN),
    "no barrier after the softmax": (without_barrier(2), True, RACE),
    "no barrier at the end of the loop": (without_barrier(3), True, RACE),
    "no wait for the copies": (
        replaced("    cp_async_commit();\n    cp_async_wait<0>();\n    __sync", "    cp_async_commit();\n    __sync"),
        True,
        UNWRITTEN,
    ),
    "no syncwarp before the maximum is updated": (replaced("      __syncwarp();", "      "), False, RACE),
    "ring slot off by one": (
        replaced("(p - in_window + 1 + entry) % window", "(p - in_window + entry) % window"),
        True,
        BOUNDS,
    ),
    "unlisted entries are visible": (replaced("entry < in_window || listed", "entry < total"), True, None),
    "list not offset by the window": (replaced("topk + entry - in_window);", "topk + entry);"), True, BOUNDS),
    "second half of B at the wrong k": (
        replaced("lane / 8 % 2 * 8);\n      mma", "lane / 8 % 2 * 4);\n      mma"),
        True,
        "not 16-byte aligned",
    ),
    "accumulator rows swapped": (
        replaced("acc[n][1] *= upper;\n      acc[n][2] *= lower;", "acc[n][1] *= lower;\n      acc[n][2] *= upper;"),
        True,
        None,
    ),
    "sink missing in the denominator": (
        replaced("float denominator = __expf(sink[h] - largest);", "float denominator = 0.f;"),
        True,
        None,
    ),
    "last tiles of a split dropped": (
        replaced("min(tiles, first_tile + per_split)", "min(tiles, first_tile + tiles / splits)"),
        True,
        None,
    ),
    "values not transposed": (replaced("ldmatrix_x2_trans(b, kv_tile", "ldmatrix_x2(b, kv_tile"), True, None),
    "a warp skips a barrier": (
        replaced("    const float upper", "    if (warp != 3) __syncthreads();\n    const float upper"),
        True,
        "barrier divergence",
    ),
    "full mask in half a warp": (
        replaced(
            "      float largest = v;\n",
            "      float largest = v;\n      if (lane < 16) "
            "largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 8));\n",
        ),
        True,
        "divergent warp",
    ),
    "shared memory 32 bytes short": (SOURCE, False, BOUNDS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every mutation in a folder of its own, built side by side."""
    root = tmp_path_factory.mktemp("mutations")
    for number, source in enumerate([SOURCE, *(source for source, _, _ in MUTATIONS.values())]):
        (root / str(number)).mkdir()
        (root / str(number) / "sparse_attention.cu").write_text(source)
    for checked in (False, True):
        build_all([root / str(n) / "sparse_attention.cu" for n in range(len(MUTATIONS) + 1)], checked=checked)
    return root


def build(folder, number, checked):
    return Module(folder / str(number) / "sparse_attention.cu", checked=checked)


def run(module, bytes_missing=0, **options):
    def launch(name, grid, block, args, shared_bytes):
        module.kernel(name)(grid, block, args, shared_bytes and shared_bytes - bytes_missing, workers=1, **options)

    return kernel_cases.run(CASE, launch)["out"]


@functools.cache
def reference():
    return CASE.reference(CASE.inputs, torch.float64)["out"]


def plain_build_notices(module, bytes_missing):
    try:
        results = [run(module, bytes_missing, **schedule) for schedule in SCHEDULES]
    except KernelError:
        return True
    wrong = not kernel_cases.relative_error(results[0], reference()) <= CASE.tolerance
    return wrong or any(not torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_noticed(name, folder):
    source, plain_notices, checked_says = MUTATIONS[name]
    number = 1 + list(MUTATIONS).index(name)
    bytes_missing = 32 if name == "shared memory 32 bytes short" else 0
    assert source != SOURCE or bytes_missing
    assert plain_build_notices(build(folder, number, checked=False), bytes_missing) == plain_notices
    if checked_says is None:  # a plain wrong value: the checked build has nothing to add
        run(build(folder, number, checked=True), bytes_missing)
        return
    with pytest.raises(KernelError, match=checked_says):
        run(build(folder, number, checked=True), bytes_missing)


def test_unchanged_kernel_is_clean(folder):
    assert not plain_build_notices(build(folder, 0, checked=False), 0)
    run(build(folder, 0, checked=True))
