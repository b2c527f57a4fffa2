"""Single-operation checks: index scores on the integer tensor cores, decode and prefill, on what integers make hard.

Scales far apart within a key and within a query, scales at both ends of e8m0 and NaN, the largest sums there are, every dim and
code alone; runs and chunks that wrap, rows that change within a chunk. The expected scores are FP64 sums of the formats' values.

    pytest parity/test_operations_indexer.py -k apart
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from production import ops
from production.launch import KernelError
from reference import formats

BF16, F32, F64, I32, U8 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8
DI, LAST, INF = 128, 1_048_575, float("inf")
VARIANTS = pytest.mark.parametrize("variant", ["int8", "int8_tiles", "int8_tiles_8"])
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ints(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=I32)


def random_codes(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(16, shape, generator=generator(seed))


def packed_codes(codes: Tensor) -> Tensor:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(U8)


def values_of(codes: Tensor, scales: Tensor, dtype: torch.dtype = F64) -> Tensor:
    """codes [..., 128] and scale bytes [..., 4] as numbers; byte 255 is NaN."""
    size = torch.exp2(scales.double() - 127).masked_fill(scales == 255, torch.nan)
    values: Tensor = CODES.double()[codes].unflatten(-1, (-1, 32)) * size[..., None]
    return values.flatten(-2).to(dtype)


class World:
    """Queries and keys by code and scale byte. position, row [T]; everything starts as one scale, 127."""

    def __init__(self, T: int, hi: int, b: int, capacity: int, seed: int) -> None:
        self.q_codes, self.q_scales = random_codes((T, hi, DI), seed), torch.full((T, hi, 4), 127)
        self.key_codes, self.key_scales = random_codes((b, capacity, DI), seed + 1), torch.full((b, capacity, 4), 127)
        self.weights = torch.randn(T, hi, generator=generator(seed + 2))
        self.position, self.row = ints([4 * capacity + 3] * T), ints([t % b for t in range(T)])

    @property
    def q(self) -> Tensor:
        return values_of(self.q_codes, self.q_scales).to(BF16)

    def run(self, device: Any, hostile: Any, variant: str, E: int, only: slice = slice(None)) -> Tensor:
        q = self.q[only]
        score = hostile.poisoned((len(q), E), F32)
        scratch = hostile.poisoned((ops.indexer_scratch(len(q), q.shape[1]),), U8) if "tiles" in variant else None
        ops.indexer_score(
            device, hostile.strided(q), hostile.strided(self.weights[only]), hostile.strided(packed_codes(self.key_codes)), hostile.strided(self.key_scales.to(U8)),
            hostile.packed(self.position[only]), hostile.packed(self.row[only]), score, 4, variant=variant, scratch=scratch,
        )  # fmt: skip
        hostile.check_guards()
        written: Tensor = score.cpu()
        return written

    def seen(self, E: int) -> Tensor:
        complete = ((self.position + 1) // 4).clamp_max(self.key_codes.shape[1])
        return torch.arange(E) < complete[:, None]

    def expected(self, E: int, dtype: torch.dtype = F64, backwards: bool = False) -> Tensor:
        """Scores, 0 where none is due. backwards: the heads in the other order."""
        dots = torch.einsum("thd,ted->the", values_of(self.q_codes, self.q_scales), values_of(self.key_codes, self.key_scales)[self.row]).relu()
        products = self.weights[..., None].to(dtype) * dots.to(dtype)
        score = (products.flip(1) if backwards else products).cumsum(1)[:, -1]  # one after the other
        full = torch.nn.functional.pad(score, (0, max(0, E - score.shape[1])))[:, :E]
        return full.masked_fill(~self.seen(E), 0.0)

    def judge(self, judge: Any, case: str, got: Tensor, E: int) -> None:
        seen, due = self.seen(E), self.expected(E)
        judge("indexer_score", f"{case}: who is seen", torch.isneginf(got), exact=True, reference=lambda: ~seen)
        judge("indexer_score", f"{case}: NaN", got.isnan(), exact=True, reference=due.isnan)
        # Each entry is a row: one giant key hides nothing of the others.
        number = seen & ~due.isnan() & (due != 0)
        judge("indexer_score", case, got[number][:, None], reference=lambda: due[number][:, None],
              twins=[lambda back=back: self.expected(E, F32, back)[number][:, None] for back in (False, True)])  # fmt: skip


@VARIANTS
@pytest.mark.parametrize("hi", [1, 5, 16, 20, 64])
def test_scores_of_blocks_with_one_scale(hi, variant, device, hostile, judge):
    world = World(T=3, hi=hi, b=2, capacity=70, seed=hi)
    world.key_scales[:] = torch.randint(100, 160, (2, 70, 1), generator=generator(5))
    world.q_scales[:] = torch.randint(110, 140, (3, hi, 1), generator=generator(6))
    world.weights = world.weights.abs()
    world.judge(judge, f"{variant}, {hi} heads", world.run(device, hostile, variant, 75), 75)


@VARIANTS
def test_scores_where_scales_of_a_key_lie_apart(variant, device, hostile, judge):
    """None to 3 binades fit one common scale, 4 and more do not: neighbours, the two halves of 32 keys and whole runs of either kind."""
    world = World(T=2, hi=5, b=1, capacity=200, seed=20)
    world.weights = world.weights.abs()
    world.key_scales[0, :, :] = 127 - torch.randint(0, 4, (200, 4), generator=generator(21))
    for e, apart in [(3, 4), (17, 5), (40, 12), (41, 30), (80, 60)]:
        world.key_scales[0, e, e % 4] -= apart
    world.key_scales[0, 96:128] = torch.randint(60, 190, (32, 4), generator=generator(22))
    world.key_scales[0, 150:170] = torch.randint(1, 254, (20, 4), generator=generator(23)).clamp(40, 210)
    world.judge(judge, f"{variant}, scales of keys apart", world.run(device, hostile, variant, 200), 200)


@VARIANTS
def test_scores_where_scales_of_a_query_lie_apart(variant, device, hostile, judge):
    """One head of one query is enough for its token to go another way; the others' scores are judged beside it."""
    world = World(T=6, hi=20, b=1, capacity=70, seed=30)
    world.weights = world.weights.abs()
    world.q_scales[:5] = 127 - torch.randint(0, 4, (5, 20, 4), generator=generator(31))
    world.q_scales[1, 7, 2] -= 4
    world.q_scales[2, 19, 0] -= 40
    world.q_scales[3, 4] = torch.tensor([20, 20, 21, 22])
    world.q_scales[5] = torch.randint(60, 200, (20, 4), generator=generator(32))
    world.key_scales[0] = 127 - torch.randint(0, 6, (70, 4), generator=generator(33))
    world.judge(judge, f"{variant}, scales of queries apart", world.run(device, hostile, variant, 70), 70)


@VARIANTS
@pytest.mark.parametrize(("query", "ends"), [(190, [0, 1, 2, 29, 66, 67]), (180, [1, 0, 2, 3, 30]), (66, [199, 200, 201, 240, 188, 187]), (70, [240, 30, 127])], ids=str)
def test_scores_of_scales_at_the_ends_and_nan(query, ends, variant, device, hostile, judge):
    """Scale bytes near both ends of e8m0, in one block and in all, against queries that bring the products back; a NaN stays with its key."""
    world = World(T=2, hi=8, b=1, capacity=70, seed=40)
    world.weights = world.weights.abs()
    world.key_scales[0] = ends[0]
    for i, byte in enumerate(ends):
        world.key_scales[0, 3 * i] = byte
        world.key_scales[0, 3 * i + 1, i % 4] = byte
    world.key_scales[0, 33, 2] = 255
    world.key_scales[0, 60] = 255
    world.q_scales[:] = query
    world.judge(judge, f"{variant}, ends of e8m0 {ends}", world.run(device, hostile, variant, 70), 70)


@VARIANTS
def test_scores_of_zero_blocks(variant, device, hostile, judge):
    """A block of zeros has the smallest scale there is: it goes the wide way and changes nothing. Keys and heads of zeros score 0."""
    world = World(T=2, hi=8, b=1, capacity=40, seed=45)
    world.weights = world.weights.abs()
    world.key_codes[0, 5, :32], world.key_scales[0, 5, 0] = 8, 1
    world.key_codes[0, 6], world.key_scales[0, 6] = 0, 1
    world.q_codes[0, 2, 64:96], world.q_codes[1] = 0, 8
    got = world.run(device, hostile, variant, 40)
    world.judge(judge, f"{variant}, zero blocks", got, 40)
    zero = torch.zeros(2, 40)
    judge("indexer_score", f"{variant}, zero keys and queries", torch.stack((got[:, 6], got[1, :2])), exact=True, reference=lambda: zero[:, :2])


@VARIANTS
def test_the_largest_sums_stay_exact(variant, device, hostile, judge):
    """128 products of 6 and 6, shifted by three binades on both sides: 1,179,648, the largest integer sum there is, and its negative."""
    world = World(T=2, hi=1, b=1, capacity=40, seed=50)
    world.weights[:] = 1.0
    world.q_codes[:] = 7
    world.q_codes[1, :, ::2] = 15
    world.key_codes[0, :] = 7
    world.key_codes[0, 20:, :] = 15
    world.key_codes[0, 30:, ::2] = 7
    world.key_scales[0] = torch.tensor([127, 127, 127, 124])
    world.key_codes[0, :, 96:] = torch.where(torch.arange(32) < 1, 1, 0)  # 0.5 at the smallest scale: the last bit counts
    world.q_scales[:] = torch.tensor([127, 127, 127, 124])
    got = world.run(device, hostile, variant, 40)
    judge("indexer_score", f"{variant}, largest sums", got, exact=True, reference=lambda: world.expected(40).float())
    world.key_scales[0], world.q_scales[:] = 127, 127
    world.key_codes[0, :, 96:] = world.key_codes[0, :, :32]
    got = world.run(device, hostile, variant, 40)
    judge("indexer_score", f"{variant}, the largest sum", got, exact=True, reference=lambda: world.expected(40).float())


@pytest.mark.parametrize("variant", ["int8", "int8_tiles"])
def test_every_dim_and_code_is_read_where_it_lies(variant, device, hostile, judge):
    """One dimension of one query at a time, both signs: the score is that dimension of the key, whatever the order of the sums."""
    world = World(T=2 * DI, hi=1, b=1, capacity=48, seed=60)
    world.weights[:] = 1.0
    world.q_codes[:] = 0
    for t in range(2 * DI):
        world.q_codes[t, 0, t // 2] = 2 + 8 * (t % 2)
    world.key_scales[0] = 127 - torch.arange(48)[:, None] % 3 - torch.arange(4) % 2
    got = world.run(device, hostile, variant, 48)
    judge("indexer_score", f"{variant}, every dim", got, exact=True, reference=lambda: world.expected(48).float())


@VARIANTS
def test_long_rows_and_chunks_wrap(variant, device, hostile, judge):
    """2,400 keys: several runs a warp, several tiles; 135 queries: chunks of 64 and a rest, rows that change, pads, any length."""
    world = World(T=135, hi=2, b=5, capacity=2390, seed=70)
    world.weights = world.weights.abs()
    world.row = ints([0] * 40 + [1] * 40 + [2] * 20 + [4] * 15 + [3] * 20)
    world.position = torch.randint(0, 4 * 2395, (135,), generator=generator(71), dtype=I32)
    world.position[[1, 41]] = ints([2, 3])
    world.position[[5, 64, 134]] = -1
    world.key_scales[:] = 127 - torch.randint(0, 3, world.key_scales.shape, generator=generator(72))
    world.key_scales[:, 1500:1504, 1] = 100
    got, real = world.run(device, hostile, variant, 2400), world.position >= 0
    assert got[~real].isnan().all(), "a pad's scores were written"
    for name in ("q_codes", "q_scales", "weights", "position", "row"):
        setattr(world, name, getattr(world, name)[real])
    world.judge(judge, f"{variant}, 135 queries over 2400 entries", got[real], 2400)


def test_scores_do_not_depend_on_the_kernel_or_on_the_other_tokens(device, hostile, judge):
    """Decode of one token, of several (another number of blocks a token), and prefill: the same bits, wide keys among them."""
    world = World(T=70, hi=8, b=2, capacity=800, seed=80)
    world.key_scales[:] = 127 - torch.randint(0, 3, world.key_scales.shape, generator=generator(81))
    world.key_scales[:, 100:120] = torch.randint(60, 190, (2, 20, 4), generator=generator(82))
    world.q_scales[66, 3, 1] -= 9
    assert ops.indexer.rows_splits(1) != ops.indexer.rows_splits(70)
    together = world.run(device, hostile, "int8", 800)
    alone = torch.cat([world.run(device, hostile, "int8", 800, slice(t, t + 1)) for t in (0, 13, 66)])
    judge("indexer_score", "int8: alone = in a batch", together[[0, 13, 66]], exact=True, reference=lambda: alone)
    for variant in ("int8_tiles", "int8_tiles_8"):
        judge("indexer_score", f"{variant} = int8", world.run(device, hostile, variant, 800), exact=True, reference=lambda: together)
    late = world.run(device, hostile, "int8_tiles", 800, slice(61, 70))
    judge("indexer_score", "int8_tiles: a chunk that begins elsewhere", late, exact=True, reference=lambda: together[61:])


@VARIANTS
def test_a_query_off_the_grid_shows(variant, device, hostile):
    """A value that is no e2m1 number times a power of two, an infinity or a NaN makes its token's scores NaN, and no other's."""
    world = World(T=5, hi=3, b=1, capacity=40, seed=90)
    q = world.q
    q[1, 2, 70], q[2, 0, 3], q[3, 1, 127] = 1.2734375, INF, float("nan")
    score = hostile.poisoned((5, 40), F32)
    ops.indexer_score(device, hostile.strided(q), hostile.strided(world.weights), hostile.strided(packed_codes(world.key_codes)), hostile.strided(world.key_scales.to(U8)),
                      hostile.packed(world.position), hostile.packed(world.row), score, 4, variant=variant, scratch=hostile.poisoned((ops.indexer_scratch(5, 3),), U8))  # fmt: skip
    assert score.isnan().all(1).tolist() == [False, True, True, True, False]
    assert score[[0, 4]].isfinite().all()


@pytest.mark.parametrize("variant", ["int8", "int8_tiles"])
def test_scores_of_262144_entries_at_the_last_position(variant, device, hostile, judge):
    E = (LAST + 1) // 4
    world = World(T=2, hi=2, b=1, capacity=E, seed=100)
    world.weights = world.weights.abs()
    world.position, world.row = ints([LAST, LAST - 4]), ints([0, 0])
    world.key_scales[0] = 127 - torch.randint(0, 3, (E, 4), generator=generator(101))
    world.judge(judge, f"{variant}, 262144 entries", world.run(device, hostile, variant, E), E)


def test_what_the_integer_kernels_do_not_take_is_refused(device, hostile):
    def run(hi: int = 4, di: int = 128, variant: str = "int8", keys: Tensor | None = None, scratch: int | None = None, shift: int = 0) -> None:
        where = device.torch_device  # views are made there: a copy would close their gaps
        codes = torch.zeros(1, 16, di // 2, dtype=U8, device=where) if keys is None else keys
        q = torch.zeros(hi * di + 8, dtype=BF16, device=where)[shift : shift + hi * di].view(1, hi, di)
        ops.indexer_score(device, hostile.packed(q) if not shift else q, hostile.packed(torch.ones(1, hi)), codes, hostile.packed(torch.full((1, 16, di // 32), 127, dtype=U8)),
                          hostile.packed(ints([63])), hostile.packed(ints([0])), hostile.poisoned((1, 16), F32), 4, variant=variant,
                          scratch=None if scratch is None else torch.zeros(scratch, dtype=U8, device=device.torch_device))  # fmt: skip

    with pytest.raises(KernelError, match="4 heads of 64, it takes up to 64 heads of 128"):
        run(di=64)
    with pytest.raises(KernelError, match="65 heads of 128"):
        run(hi=65)
    with pytest.raises(KernelError, match="expected no gaps"):
        run(keys=torch.zeros(1, 16, 80, dtype=U8, device=device.torch_device)[:, :, :64])
    with pytest.raises(KernelError, match="multiples of 16 bytes"):
        run(shift=1)
    with pytest.raises(KernelError, match="scratch of 0 u8, 1 queries of 4 heads need 2448"):
        run(variant="int8_tiles")
    with pytest.raises(KernelError, match="scratch of 2447 u8"):
        run(variant="int8_tiles", scratch=2447)
    run(variant="int8_tiles", scratch=2448)


def test_formats_of_this_file_are_the_projects() -> None:
    codes, scales = random_codes((3, DI), 7), torch.randint(1, 254, (3, 4), generator=generator(8))
    assert torch.equal(values_of(codes, scales, F32), formats.decode_fp4_weight(packed_codes(codes), scales.to(U8)))
