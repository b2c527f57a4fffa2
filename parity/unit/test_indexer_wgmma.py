"""Index scores by wgmma, emulated (kernels/cpu/hopper_on_cpu.h): fragments, swizzle and loops, the bits of the integer mma. A card's own answer: bench/indexer.py."""

from __future__ import annotations

import shutil

import pytest
import torch

from parity.test_operations_indexer import World, ints
from probes.core.inputs import Hostile
from production.cpu_device import KERNELS
from production.launch import open_device

VARIANTS = ["wgmma", "wgmma_16", "wgmma_tiles"]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """A CPU device whose copy of the kernels lets the Hopper file be built here."""
    folder = tmp_path_factory.mktemp("kernels") / "kernels"
    shutil.copytree(KERNELS, folder)
    source = folder / "indexer_wgmma.cu"
    text = source.read_text()
    assert "// archs    sm_90a\n" in text
    source.write_text(text.replace("// archs    sm_90a\n", ""))
    return open_device("cpu", kernels_dir=folder)


def world_of(T: int, hi: int, capacity: int) -> World:
    """Keys and queries that fit, some that go the wide way, pads, two rows."""
    world = World(T=T, hi=hi, b=2, capacity=capacity, seed=hi + T)
    world.key_scales[:] = 127 - torch.randint(0, 3, world.key_scales.shape, generator=torch.Generator().manual_seed(1))
    world.key_scales[:, 5, 2], world.key_scales[1, 33, 0], world.key_scales[0, 40] = 100, 120, 255
    world.row = ints([t * 2 // T for t in range(T)])
    world.position = torch.randint(0, 4 * capacity + 8, (T,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    world.position[0], world.position[T // 2] = 4 * capacity + 3, -1
    world.q_scales[T - 1, hi // 2, 1] -= 9
    return world


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("T", "hi", "capacity", "E"), [(5, 64, 70, 75), (67, 20, 530, 600), (3, 17, 3200, 3200)], ids=str)
def test_scores_are_those_of_the_integer_mma(T, hi, capacity, E, variant, emulated):
    hostile = Hostile()
    world = world_of(T, hi, capacity)
    got, want = (world.run(emulated, hostile, v, E) for v in (variant, "int8"))
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    assert emulated.ran[-1][0] == "indexer_wgmma" or any(source == "indexer_wgmma" for source, *_ in emulated.ran)


@pytest.mark.parametrize("variant", ["wgmma", "wgmma_tiles"])
def test_every_dim_is_read_where_it_lies(variant, emulated):
    """One dimension of one query at a time, in the last of 17 heads: the score is that dimension of the key."""
    world = World(T=128, hi=17, b=1, capacity=40, seed=3)
    world.weights[:] = 1.0
    world.q_codes[:] = 0
    for t in range(128):
        world.q_codes[t, 16, t] = 2
    assert torch.equal(world.run(emulated, Hostile(), variant, 40).double(), world.expected(40))
