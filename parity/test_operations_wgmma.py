"""Single-operation checks of attention on Hopper's tensor cores, in the ways of test_operations_attention.py.

On a card the kernel's own instructions run; on the CPU they are emulated (kernels/cpu/README.md): index arithmetic, masks,
pipeline and sums are judged there, fences and the hardware's reading of a descriptor are not.

    pytest parity/test_operations_wgmma.py -k edges
"""

from __future__ import annotations

import functools

import pytest
import torch

from parity.test_operations_attention import (
    EDGES,
    F64,
    INF,
    LAST,
    SINKS,
    U8,
    WHERE,
    Keys,
    ints,
    judge_towering,
    rounded_twins,
)
from production import ops
from production.launch import KernelError, open_device
from reference import formats
from reference.ops import Sums

VARIANTS = pytest.mark.parametrize("variant", ["wgmma", "wgmma_p_bf16"])
WAYS = pytest.mark.parametrize(("variant", "splits"), [("wgmma", 1), ("wgmma_p_bf16", 1), ("wgmma", 2), ("wgmma_p_bf16", 7)])  # 1: prefill
SOURCES = {"window only": (0, None), "CSA list": (4, 150), "HCA all": (128, None), "every second token": (2, None)}


@functools.cache
def edge_keys(source: str, h: int) -> Keys:
    ratio, listed = SOURCES[source]
    position = [*EDGES, -1, 0, 4, 128, 5, 199, 130]
    row = [0] * (len(EDGES) + 1) + [1] * 3 + [2, 3, 4]
    return Keys(d=512, r=64, h=h, window=128, slots=272, ratio=ratio, listed=listed, position=position, row=row, lengths=[258, 129, 6, 200, 131])


@WAYS
@pytest.mark.parametrize("h", [3, 64, 70], ids=lambda h: f"{h} heads")
@pytest.mark.parametrize("source", SOURCES)
def test_sparse_attn_wgmma_at_the_edges(source, h, variant, splits, device, hostile, judge):
    """Positions around 4, 128 and 256 and a pad; from 1 to 257 keys, so that tiles are full, partly filled and empty."""
    edge_keys(source, h).judge(device, hostile, judge, f"{source}, {h} heads, {variant}, {splits} splits", variant=variant, splits=splits)


@WAYS
@pytest.mark.parametrize("window", [1, 63, 64, 65, 128, 129, 192, 257])
def test_sparse_attn_wgmma_of_any_number_of_tiles(window, variant, splits, device, hostile, judge):
    """One item with an even number of tiles after one with an odd number, and the other way round; three blocks, seven tokens."""
    keys = Keys(d=512, r=64, h=5, window=window, slots=300, ratio=0, position=[290, 0, 64, 291, -1, 127, 128], row=[0] * 7, lengths=[292])
    keys.judge(device, hostile, judge, f"window {window}, {variant}, {splits} splits", variant=variant, splits=splits)


@WAYS
def test_sparse_attn_wgmma_at_the_end_of_the_longest_context(variant, splits, device, hostile, judge):
    keys = Keys(d=512, r=64, h=4, window=128, slots=136, ratio=4, listed=40, capacity=64, position=[LAST, LAST - 8, LAST - 3], row=[0] * 3, lengths=[LAST + 1])
    keys.judge(device, hostile, judge, f"positions {LAST - 8} to {LAST}, {variant}, {splits} splits", variant=variant, splits=splits)


@WAYS
def test_sparse_attn_wgmma_skips_holes_in_the_list(variant, splits, device, hostile, judge):
    """-1 in the middle and at the start, a whole tile and a whole split of them, an empty list, entries that are not complete at p."""
    keys = Keys(d=512, r=64, h=8, window=16, slots=300, ratio=4, listed=400, capacity=80, position=[250, 251, 20, 40], row=[0] * 4, lengths=[256])
    assert keys.selected is not None
    keys.selected.fill_(-1)
    keys.selected[0, 5:200:11], keys.selected[0, 48:112] = ints(list(range(18))), -1
    keys.selected[1, 1:130:3] = ints(list(range(43)))
    keys.selected[1, 390:400] = ints(list(range(43, 53)))  # and none in between
    keys.selected[2, 0:8] = ints([-1, 0, 4, 5, -1, 6, 62, 3])  # 5, 6 and 62 are not complete at 20
    keys.judge(device, hostile, judge, f"holes, {variant}, {splits} splits", variant=variant, splits=splits)


@functools.cache
def keys_for_sinks() -> Keys:
    keys = Keys(d=512, r=64, h=len(SINKS) + 1, window=448, slots=512, ratio=0, position=[511, 130, 63, 0], row=[0] * 4, lengths=[512])
    keys.q = (keys.q.float() * 4).bfloat16()
    keys.sink = torch.tensor([*SINKS, 0.5])
    return keys


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sink", SINKS, ids=lambda x: f"sink={x:g}")
def test_sparse_attn_wgmma_counts_the_sink_once(sink, splits, device, hostile, judge):
    keys, head = keys_for_sinks(), SINKS.index(sink)
    out = keys.run(device, hostile, variant="wgmma", splits=splits)[0][:, head]
    if sink in (INF, 1e4):
        judge("sparse_attn", f"wgmma, {splits} splits, sink={sink:g}: nothing is left", out, exact=True, reference=lambda: torch.zeros(4, 512))
    else:
        judge("sparse_attn", f"wgmma, {splits} splits, sink={sink:g}", out, reference=lambda: keys.expected(Sums(), F64)[:, head], twins=rounded_twins(lambda sums: keys.expected(sums)[:, head]))


@WAYS
def test_sparse_attn_wgmma_follows_a_maximum_that_moves(variant, splits, device, hostile, judge):
    """Scores that rise by some 12 powers of two from tile to tile, fall, and rise inside a pair: both warpgroups rescale, p too."""
    keys = Keys(d=512, r=64, h=64, window=512, slots=512, ratio=0, position=[511, 255], row=[0, 0], lengths=[512])
    keys.q = torch.zeros_like(keys.q)
    keys.q[..., 448:] = torch.linspace(0.5, 1.5, 64)[None, :, None].bfloat16()
    length = torch.tensor([0.0, 10.0, 20.0, 60.0, 50.0, 51.0, 100.0, 101.0])  # of a tile's keys along the queries, times log 2 about 1
    for p in range(512):
        rotated = (torch.full((64,), length[p // 64].item() * 512**0.5 / 64 * 0.9) + keys.values[0, p][448:] * 0.05).bfloat16()
        keys.ring[0, p, 448:576] = rotated.view(U8)
        keys.values[0, p][448:] = rotated.float()
    keys.judge(device, hostile, judge, f"a moving maximum, {variant}, {splits} splits", variant=variant, splits=splits)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("variant", "splits"), [("wgmma", 1), ("wgmma", 7), ("wgmma_p_bf16", 7)])
def test_sparse_attn_wgmma_of_a_split_that_towers_over_the_others(variant, splits, where, device, hostile, judge):
    """As of the other variants: 130 above or below the rest in any of seven splits of a pair of tiles, or the sink is."""
    judge_towering(device, hostile, judge, f"{where} of 7 runs, {variant}, {splits} splits", 512, 128, WHERE[where], variant=variant, splits=splits)


def test_sparse_attn_wgmma_reads_every_code_at_every_scale(device, hostile, judge):
    """One visible key a token and no sink: the output is the key, also where a scale is 2^-127 or so large that the quick way ends."""
    d = 512
    codes = torch.arange(256).roll(3)
    codes[(codes & 0x7F) == 0x7F] = 0
    small, all_scales = [0, 1, 60, 120, 63, 64, 3], [0, 1, 60, 120, 134, 191, 192, 246]
    keys = Keys(d=d, r=64, h=16, window=1, slots=8, ratio=0, position=[0, 1, 2, 3], row=[0] * 4, lengths=[4])
    keys.q = torch.zeros_like(keys.q)
    keys.sink = torch.full((16,), -INF)
    want = torch.zeros(4, d - 64)
    for t in range(4):
        scales = small if t < 2 else all_scales
        scale = torch.tensor([scales[(2 * t + i) % len(scales)] for i in range(7)])
        code = codes.roll(-64 * t).repeat(2)[: d - 64]
        keys.ring[0, t, : d - 64], keys.ring[0, t, d + 64 : d + 71] = code.to(U8), scale.to(U8)
        want[t] = (formats.decode_e4m3(code.to(U8)) * torch.exp2(scale.double() - 127).repeat_interleave(64)).bfloat16().float()
    out, _ = keys.run(device, hostile, variant="wgmma")
    judge("sparse_attn", "wgmma, every code", out[..., : d - 64], exact=True, reference=lambda: want[:, None].expand(-1, 16, -1))


def test_sparse_attn_wgmma_keeps_what_bf16_would_round_off_p(device, hostile, judge):
    """Two opposite keys of nearly equal weight: the output is their difference, from a 200th to a 3rd of either."""
    d = 512
    keys = Keys(d=d, r=64, h=9, window=2, slots=8, ratio=0, position=[1], row=[0], lengths=[2])
    keys.ring[0, 1] = keys.ring[0, 0]
    keys.ring[0, 1, : d - 64] ^= 0x80  # signs of e4m3 codes, and of bf16 in little-endian bytes
    keys.ring[0, 1, d - 63 : d + 64 : 2] ^= 0x80
    keys.values[0, 1] = -keys.values[0, 0]
    length = keys.values[0, 0].norm()
    keys.q[0] = (keys.values[0, 0] / length**2 * d**0.5 * torch.linspace(0.005, 0.35, 9)[:, None]).bfloat16()  # scores +- 0.005 to 0.35
    keys.sink = torch.full((9,), -INF)
    keys.judge(device, hostile, judge, "opposite keys, wgmma", variant="wgmma")


def test_sparse_attn_wgmma_takes_a_code_of_nan_for_nan(device, hostile):
    """Also under a small scale, and for one of 448 codes; a key that is not visible may be NaN."""
    keys = Keys(d=512, r=64, h=3, window=1, slots=8, ratio=0, position=[0, 1, 2], row=[0] * 3, lengths=[4])
    keys.ring[0, 0, 447], keys.ring[0, 2, 512 + 64 + 6] = 0xFF, 255
    out, _ = keys.run(device, hostile, variant="wgmma")
    assert out[0, :, 447].isnan().all()
    assert out[2, :, 384:448].isnan().all()
    assert out[1].isfinite().all(), "a NaN of another key came through"


@WAYS
def test_sparse_attn_wgmma_of_a_token_does_not_depend_on_the_others(variant, splits, device, hostile, judge):
    """Alone, and as the second or third item of a block that has others before it."""
    keys = Keys(d=512, r=64, h=66, window=128, slots=272, ratio=4, listed=200, position=[257, 4, 130, 200, 31, -1, 256], row=[0] * 7, lengths=[258])
    together, seen = keys.run(device, hostile, variant=variant, splits=splits)
    alone = [keys.run(device, hostile, variant=variant, splits=splits, only=slice(t, t + 1))[0] for t in range(7)]
    judge("sparse_attn", f"alone = in a batch, {variant}, {splits} splits", together, exact=True, reference=lambda: torch.cat(alone))
    again, seen_again = keys.run(device, hostile, variant=variant, splits=splits)
    judge("sparse_attn", f"again, {variant}, {splits} splits", again, exact=True, reference=lambda: together)
    assert torch.equal(seen, seen_again)


@pytest.mark.parametrize("splits", [1, 2])
def test_sparse_attn_wgmma_takes_queries_and_outputs_at_any_address(splits, device, hostile, judge):
    """Rows an odd number of elements apart, from an odd element on: no 16-byte access fits."""
    keys = Keys(d=512, r=64, h=3, window=170, slots=180, ratio=0, position=[175, 10, 179], row=[0] * 3, lengths=[180])
    aligned, _ = keys.run(device, hostile, variant="wgmma", splits=splits)

    def from_an_odd_element(memory):
        return memory[1:].view(3, 1601)[:, :1536].unflatten(1, (3, 512))

    memory = hostile.poisoned((3 * 1601 + 1,), torch.bfloat16)
    outputs, queries = from_an_odd_element(memory), from_an_odd_element(torch.full_like(memory, float("nan")))
    queries.copy_(keys.q)
    part_o, part_ml = (hostile.poisoned((3, splits, 3, n), torch.float32) if splits > 1 else None for n in (512, 2))
    ops.sparse_attn(device, queries, hostile.strided(keys.ring), hostile.strided(keys.ring_position), None, None, hostile.packed(keys.position), hostile.packed(keys.row),
                    hostile.packed(keys.sink), outputs, 170, 0, splits, part_o, part_ml, variant="wgmma")  # fmt: skip
    judge("sparse_attn", f"wgmma, {splits} splits, odd addresses", outputs.cpu(), exact=True, reference=lambda: aligned)
    assert memory[1:].view(3, 1601)[:, 1536:].isnan().all(), "written between the rows"
    hostile.check_guards()


def test_sparse_attn_wgmma_refuses_what_it_is_not_built_for(device, hostile):
    keys = Keys(d=128, r=64, h=4, window=4, slots=8, ratio=0, position=[3], row=[0], lengths=[4])
    with pytest.raises(KernelError, match="wgmma is built for d = 512 and r = 64"):
        keys.run(device, hostile, variant="wgmma")
    wide = Keys(d=512, r=64, h=4, window=4, slots=8, ratio=0, position=[3], row=[0], lengths=[4])
    with pytest.raises(KernelError, match="65 splits, wgmma takes at most 64"):
        wide.run(device, hostile, variant="wgmma", splits=65)
    if device.name == "cpu":
        with pytest.raises(KernelError, match="sparse_attn_wgmma runs on sm_90a only, this is cpu-"):
            wide.run(open_device("cpu"), hostile, variant="wgmma")


@VARIANTS
def test_sparse_attn_wgmma_does_not_depend_on_how_many_splits_are_empty(variant, device, hostile, judge):
    """Where one of the splits has all keys, the bits are those of one split: a short context in a large capacity."""
    keys = Keys(d=512, r=64, h=66, window=128, slots=272, ratio=0, position=[127, 4, 260, 200], row=[0] * 4, lengths=[261])
    alone, _ = keys.run(device, hostile, variant=variant)
    split, _ = keys.run(device, hostile, variant=variant, splits=16)
    judge("sparse_attn", f"one split of 16, {variant}", split, exact=True, reference=lambda: alone)


@pytest.mark.parametrize(("keys", "splits"), [(1, 1), (128, 1), (129, 2), (640, 5), (1152, 9), (8320, 16), (10**6, 16)])
def test_sparse_attn_wgmma_splits_from_129_keys_on(keys, splits, judge):
    judge("sparse_attn", f"splits for {keys} keys, wgmma", ints([ops.splits_for(keys, "wgmma")]), exact=True, reference=lambda: ints([splits]))
