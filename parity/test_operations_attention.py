"""Single-operation checks: the kernels around attention, each alone, on hostile inputs.

Memory that nobody owns is NaN (ring slots never written, entries that are not complete, gaps between rows), outputs are
poisoned, positions stand at the edges (3/4/5, 127/128/129, 255/256/257, 1,048,575), and every mechanism engages. Production
runs before its reference. Exact where the result is a choice, a copy or one rounding; floors are reordered sums elsewhere.

    pytest parity/test_operations_attention.py -k counts_the_sink_once
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from production import ops
from production.launch import KernelError
from production.ops.topk import THREADS, list_numbers
from reference import formats
from reference import ops as ref
from reference.ops import Sums

BF16, F32, F64, I32, U8 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8
ORDERS = (1, 2, 3)
NAN, INF = float("nan"), float("inf")
EDGES = [0, 1, 3, 4, 5, 126, 127, 128, 129, 255, 256, 257]
LAST = 1_048_575  # the last position of the longest context


def rounded_twins(compute: Callable[[Sums], Tensor]) -> list[Callable[[], Tensor]]:
    """The computation with its sums in each order, rounded to bf16 as production rounds."""
    return [lambda order=order: compute(Sums(order)).bfloat16().float() for order in ORDERS]  # type: ignore[misc]


def exact_twins(compute: Callable[[Sums], Tensor]) -> list[Callable[[], Tensor]]:
    """The computation with its sums in each order, fp32 all the way."""
    return [lambda order=order: compute(Sums(order)) for order in ORDERS]  # type: ignore[misc]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_type(dtype: torch.dtype, *tensors: Tensor) -> tuple[Any, ...]:
    """On the CPU and of one type, for a reference."""
    return tuple(t.cpu().to(dtype) for t in tensors)


def ints(values: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=I32)


# ---- storage: an entry is d - r e4m3 codes, r bf16, a scale per 64 codes, zeros up to a multiple of 8 ----


def stored_entry(x: Tensor, r: int) -> Tensor:
    """x [..., d] bf16 -> the bytes of its entries, by the text of the format."""
    plain = x[..., : x.shape[-1] - r].float().unflatten(-1, (-1, 64))
    scale = formats.power_of_two_scale(plain.abs().amax(-1, keepdim=True), 448.0, 1e-4)
    codes = (plain / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(U8).flatten(-2)
    exponent = (torch.frexp(scale[..., 0])[1] + 126).to(U8)  # frexp: scale = 0.5 * 2^e
    rotated = x[..., x.shape[-1] - r :].contiguous().view(U8)
    parts = torch.cat((codes, rotated, exponent), -1)
    return torch.nn.functional.pad(parts, (0, -parts.shape[-1] % 8))


def entry_values(x: Tensor, r: int) -> Tensor:
    """What an entry reads as: the first d - r dims rounded to e4m3, the rest as they were."""
    d = x.shape[-1]
    return torch.cat((formats.round_e4m3_blocks(x[..., : d - r].float(), 64), x[..., d - r :].float()), -1)


def awkward_rows(rows: int, width: int, block: int, largest: float, seed: int) -> Tensor:
    """bf16 rows whose blocks sit on every edge of a quantiser: exact powers of two, one step above, ties, tiny, zero, huge."""
    x = torch.randn(rows, width, generator=generator(seed))
    x = x * torch.exp2(torch.randint(-20, 20, (rows, width // block), generator=generator(seed + 1)).float()).repeat_interleave(block, -1)
    blocks = x.view(-1, block)
    for i, amax in enumerate([largest, largest * 2**-7, largest * 2**9, largest * 1.0079, largest * 0.9961, 1e-5, 0.0, 3e38]):
        if i < len(blocks):
            blocks[i] = blocks[i] / blocks[i].abs().max() * amax
            blocks[i, i] = -amax if i % 2 else amax
    if len(blocks) > 8:  # every tie of the grid: midpoints of neighbours times one power of two
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] if largest == 6 else [0.0009765625, 17.0, 18.0, 19.0, 232.0, 248.0, 432.0, 448.0])
        blocks[8] = (ties * torch.tensor([1.0, -1.0]).repeat(4)).repeat(block // 8) * 0.5
    return x.bfloat16()


@pytest.mark.parametrize(("d", "r"), [(128, 64), (512, 64), (70, 6)], ids=["d=128", "d=512", "d=70-r=6"])
def test_store_window_writes_one_slot_per_token(d, r, device, hostile, judge):
    b, s, slots, gap = 5, 5, 8, 8
    size = ops.entry_bytes(d, r)
    assert (d, size) != (512, 584) or size == 584
    kv = hostile.strided(awkward_rows(b * s, d, 64, 448.0, 1) if (d - r) % 64 == 0 and d % 64 == 0 else torch.randn(b * s, d, generator=generator(1)).bfloat16())
    far = [1999, 2000, 2001, -1, 4094, 9999, 10_000, -1, 65_534, 65_537, 99_999, 100_000, 131_070, 131_073, 524_290]
    position = hostile.packed(ints([126, 127, 128, 129, -1, LAST - 4, LAST - 3, LAST - 2, LAST - 1, LAST, *far]))
    row = hostile.packed(torch.arange(b, dtype=I32).repeat_interleave(s))
    taken = [(t // s, p % slots) for t, p in enumerate(position.tolist()) if p >= 0]
    assert len(set(taken)) == len(taken), "two tokens in one slot: who comes last is not defined"
    memory = hostile.poisoned((b, slots, size + gap), U8)
    ring_position = hostile.poisoned((b, slots), I32)
    ops.store_window(device, kv, position, row, memory[..., :size], ring_position)

    want, want_position = torch.full((b, slots, size + gap), 255, dtype=U8), torch.full((b, slots), -1, dtype=I32)
    for token, p in enumerate(position.tolist()):
        if p >= 0:
            want[row[token], p % slots, :size] = stored_entry(kv[token].cpu(), r)
            want_position[row[token], p % slots] = p
    judge("store_window", f"d={d} r={r}: every byte", memory, exact=True, reference=lambda: want)
    judge("store_window", f"d={d} r={r}: positions", ring_position, exact=True, reference=lambda: want_position)
    hostile.check_guards()


def test_store_window_refuses_two_tokens_in_one_slot(device, hostile):
    ring = hostile.poisoned((1, 4, ops.entry_bytes(128, 64)), U8)
    with pytest.raises(KernelError, match="share a slot"):
        ops.store_window(device, hostile.bf16((5, 128), seed=2), ints([0, 1, 2, 3, 4]), ints([0] * 5), ring, hostile.poisoned((1, 4), I32))


@pytest.mark.parametrize("d", [128, 512], ids=["d=128", "d=512"])
def test_store_entries_writes_listed_entries_only(d, device, hostile, judge):
    b, E, capacity, r = 5, 4, 9, 64
    size = ops.entry_bytes(d, r)
    rows = hostile.strided(awkward_rows(b * E, d, 64, 448.0, 3).view(b, E, d))
    entry = hostile.packed(ints([[0, 1, -1, 8], [-1, -1, 3, -1], [2, 7, 0, -1], [-1] * 4, [5, -1, -1, 6]]))
    cache = hostile.poisoned((b, capacity, size), U8)
    ops.store_entries(device, rows, entry, cache)

    want = torch.full((b, capacity, size), 255, dtype=U8)
    for i in range(b):
        for j in range(E):
            if entry[i, j] >= 0:
                want[i, entry[i, j]] = stored_entry(rows[i, j].cpu(), r)
    judge("store_entries", f"d={d}: every byte", cache, exact=True, reference=lambda: want)
    hostile.check_guards()


def test_store_entries_of_nan_and_infinity_read_as_nan(device, hostile, judge):
    d, r = 128, 64
    rows = torch.randn(1, 2, d, generator=generator(4)).bfloat16()
    rows[0, 0, 5], rows[0, 1, 60] = NAN, -INF
    cache = hostile.poisoned((1, 2, ops.entry_bytes(d, r)), U8)
    ops.store_entries(device, hostile.packed(rows), hostile.packed(ints([[0, 1]])), cache)
    judge("store_entries", "scale of a block that is not finite", cache[0, :, d + r], exact=True, reference=lambda: torch.full((2,), 255, dtype=U8))


# ---- Hadamard and e2m1 ----


def on_grid(rows: int, n: int, seed: int) -> Tensor:
    """bf16 rows of which every sum of n terms is exact in fp32, so that the order of the sums does not show."""
    x = torch.randint(-128, 129, (rows, n), generator=generator(seed)) * torch.exp2(torch.randint(-8, 9, (rows, 1), generator=generator(seed + 1)).float())
    x[::5] = torch.where(torch.rand(n, generator=generator(seed + 2)) < 0.9, 0.0, x[::5])  # few terms: many equal outputs, ties
    x[3::7] = 0.0
    return x.bfloat16()


def hadamard_values(x: Tensor) -> Tensor:
    """bf16 -> Hadamard by the definition, bf16, e2m1."""
    n = x.shape[-1]
    sign = torch.tensor([[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(n)] for i in range(n)])
    return formats.round_e2m1_blocks(formats.round_bf16((x.float() @ sign) * n**-0.5), 32)


def key_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values on the e2m1 grid -> packed codes, low nibble first, and scale bytes; by a search over all sixteen codes."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    n = x.shape[-1]
    sign = torch.tensor([[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(n)] for i in range(n)])
    turned = formats.round_bf16((x.float() @ sign) * n**-0.5).unflatten(-1, (-1, 32))
    scale = formats.power_of_two_scale(turned.abs().amax(-1, keepdim=True), 6.0, 6 * 2.0**-126)
    rounded = formats.round_e2m1(turned / scale)
    same = (rounded[..., None] == values) & (torch.signbit(turned)[..., None] == torch.signbit(values))
    code = same.int().argmax(-1).flatten(-2)
    return (code[..., 0::2] | code[..., 1::2] << 4).to(U8), (torch.frexp(scale[..., 0])[1] + 126).to(U8)


@pytest.mark.parametrize("variant", ["naive", "butterfly"])
@pytest.mark.parametrize("di", [32, 64, 128, 256])
def test_hadamard_e2m1_rounds_to_bf16_and_then_to_e2m1(di, variant, device, hostile, judge):
    x = hostile.strided(on_grid(41, di, di))
    out = hostile.poisoned((41, di), BF16)
    ops.hadamard_e2m1(device, x, out, variant=variant)
    judge("hadamard_e2m1", f"{variant}, di={di}", out, exact=True, reference=lambda: hadamard_values(x.cpu()))
    hostile.check_guards()


def test_hadamard_e2m1_meets_every_tie_and_exact_powers(device, hostile, judge):
    """di = 64 has an exact root, and a row with one number spreads it: every output is +-that number / 8, with a chosen sign."""
    levels = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 5.9375, 6.03125])
    turned = torch.zeros(len(levels), 64)
    turned[:, 0], turned[:, 1], turned[:, 33] = levels, -levels, 6.0  # the first block has its own maximum, the second 6
    turned[:8, 2] = 6.0
    sign = torch.tensor([[-1.0 if (i & j).bit_count() % 2 else 1.0 for j in range(64)] for i in range(64)])
    x = (turned @ sign / 8).bfloat16()
    out = hostile.poisoned(x.shape, BF16)
    ops.hadamard_e2m1(device, hostile.strided(x), out)
    judge("hadamard_e2m1", "ties and powers of two", out, exact=True, reference=lambda: hadamard_values(x))
    assert (out[:8, 2] == 6).all(), "the ties were not met at scale 1"


@pytest.mark.parametrize("di", [32, 128], ids=["di=32", "di=128"])
def test_store_index_keys_packs_the_low_nibble_first(di, device, hostile, judge):
    b, E, capacity = 5, 5, 7
    rows = hostile.strided(on_grid(b * E, di, 5).view(b, E, di))
    entry = hostile.packed(ints([[0, 1, -1, 6, 2], [-1, 5, -1, -1, 4], [3, -1, 0, 5, 1], [-1] * 5, [6, -1, -1, 2, -1]]))
    keys, scales = hostile.poisoned((b, capacity, di // 2), U8), hostile.poisoned((b, capacity, di // 32), U8)
    ops.store_index_keys(device, rows, entry, keys, scales)

    want_keys, want_scales = torch.full(keys.shape, 255, dtype=U8), torch.full(scales.shape, 255, dtype=U8)
    for i in range(b):
        for j in range(E):
            if entry[i, j] >= 0:
                want_keys[i, entry[i, j]], want_scales[i, entry[i, j]] = key_bytes(rows[i, j].cpu())
    judge("store_index_keys", f"di={di}: codes", keys, exact=True, reference=lambda: want_keys)
    judge("store_index_keys", f"di={di}: scales", scales, exact=True, reference=lambda: want_scales)
    hostile.check_guards()


# ---- compressors ----


class Pooling:
    """One compressor's inputs for whole rows of tokens, its state in NaN memory, and what has been pooled so far."""

    def __init__(self, hostile, ratio: int, width: int, tokens: int, b: int, seed: int, first: list[int] | None = None) -> None:
        self.hostile, self.ratio, self.width, self.b = hostile, ratio, width, b
        self.overlap = ratio == 4
        self.row_width, self.slots = width * (1 + self.overlap), ratio * (1 + self.overlap)
        self.kv = torch.randn(b, tokens, self.row_width, generator=generator(seed))
        self.gate = 3 * torch.randn(b, tokens, self.row_width, generator=generator(seed + 1))
        self.ape = torch.randn(ratio, self.row_width, generator=generator(seed + 2))
        self.state_kv, self.state_gate = (hostile.poisoned((b, self.slots, self.row_width), F32) for _ in range(2))
        self.base = first or [0] * b  # position of column 0 of each row, a multiple of the ratio
        self.length = [0] * b
        self.pooled: list[dict[int, Tensor]] = [{} for _ in range(b)]

    def inputs(self, counts: list[int], s: int) -> tuple[Tensor, Tensor]:
        """kv and gate [b, s, c*d'], pads NaN, rows apart."""
        both = []
        for whole in (self.kv, self.gate):
            x = torch.full((self.b, s, self.row_width), NAN)
            for i, n in enumerate(counts):
                x[i, :n] = whole[i, self.length[i] : self.length[i] + n]
            both.append(self.hostile.strided(x))
        return both[0], both[1]

    def run(self, device, counts: list[int], decode: bool = False) -> tuple[Tensor, Tensor]:
        """One call, entries collected; then every state row that nobody may read any more becomes NaN."""
        s = max(max(counts), 1)
        E = 1 if decode else s // self.ratio + 2
        kv, gate = self.inputs(counts, s)
        start = self.hostile.packed(ints([base + n for base, n in zip(self.base, self.length, strict=True)]))
        count = self.hostile.packed(ints(counts))
        pooled = self.hostile.poisoned((self.b, E, self.width), BF16)
        entry, entry_position = self.hostile.poisoned((self.b, E), I32).fill_(-7), self.hostile.poisoned((self.b, E), I32).fill_(-7)
        state = (self.hostile.packed(self.ape), self.state_kv, self.state_gate, start, count, pooled, entry, entry_position, self.ratio)
        if decode:
            ops.compressor_step(device, kv[:, 0], gate[:, 0], *state)
        else:
            ops.compressor_prefill(device, kv, gate, *state)
        for i, n in enumerate(counts):
            self.length[i] += n
            for j, e in enumerate(entry[i].tolist()):
                if e >= 0:
                    self.pooled[i][e] = pooled[i, j].cpu()
                else:
                    assert pooled[i, j].isnan().all(), "an entry that was not completed was written"
        needed = self.needed()
        for state_tensor in (self.state_kv, self.state_gate):
            state_tensor[~needed] = NAN
        return entry.cpu(), entry_position.cpu()

    def needed(self) -> Tensor:
        """[b, R] bool: slots of tokens that a later entry pools."""
        needed = torch.zeros(self.b, self.slots, dtype=torch.bool)
        for i, n in enumerate(self.length):
            for t in range(max(0, (n // self.ratio - self.overlap) * self.ratio), n):
                needed[i, (self.base[i] + t) % self.slots] = True
        return needed

    def expected(self, i: int, e: int, sums: Sums, dtype: torch.dtype = F32) -> Tensor:
        """Entry e of row i from all its tokens: [d']."""
        gate = self.gate + self.ape[torch.arange(self.gate.shape[1]) % self.ratio]
        own = slice(e * self.ratio, (e + 1) * self.ratio)
        kv, gates = self.kv[i, own, -self.width :], gate[i, own, -self.width :]
        if self.overlap and (self.base[i] or e):
            assert e > 0, "a row that starts late needs its previous group"
            before = slice((e - 1) * self.ratio, e * self.ratio)
            kv, gates = torch.cat((self.kv[i, before, : self.width], kv)), torch.cat((gate[i, before, : self.width], gates))
        return ref.pool(kv.to(dtype), gates.to(dtype), sums)

    def judge(self, judge, case: str) -> None:
        """Every complete entry was pooled once, and is right; the state is what the next call needs, bit for bit."""
        where = [(i, e) for i, n in enumerate(self.length) for e in range(n // self.ratio)]
        assert [sorted(row) for row in self.pooled] == [[self.base[i] // self.ratio + e for e in range(n // self.ratio)] for i, n in enumerate(self.length)]
        if where:
            got = torch.stack([self.pooled[i][self.base[i] // self.ratio + e] for i, e in where])
            judge("compressor", case, got, reference=lambda: torch.stack([self.expected(i, e, Sums(), F64) for i, e in where]),
                  twins=rounded_twins(lambda sums: torch.stack([self.expected(i, e, sums) for i, e in where])))  # fmt: skip
        kv, gate = torch.full(self.state_kv.shape, NAN), torch.full(self.state_kv.shape, NAN)
        for i, n in enumerate(self.length):
            for t in range(max(0, (n // self.ratio - self.overlap) * self.ratio), n):
                kv[i, (self.base[i] + t) % self.slots] = self.kv[i, t]
                gate[i, (self.base[i] + t) % self.slots] = self.gate[i, t] + self.ape[t % self.ratio]
        judge("compressor", f"{case}: kept kv", self.state_kv, exact=True, reference=lambda: kv)
        judge("compressor", f"{case}: kept gate", self.state_gate, exact=True, reference=lambda: gate)


# Chunks per batch row and call: one shot at every residue; borders inside a group, one-token chunks, rows that rest.
CSA_CHUNKS = {
    "one shot": [[13, 4, 3, 17, 8]],
    "borders inside groups": [[3, 1, 5, 2, 7], [2, 6, 0, 3, 1], [1, 1, 9, 0, 5], [6, 2, 1, 8, 3], [4, 0, 4, 1, 2]],
    "uneven, with rests": [[0, 7, 2, 0, 4], [5, 0, 2, 0, 1], [0, 1, 2, 6, 0], [9, 12, 2, 1, 8], [1, 1, 2, 4, 0]],
}
HCA_CHUNKS = {
    "one shot": [[257, 128, 130, 5]],
    "borders inside groups": [[127, 1, 128, 9], [1, 126, 0, 118], [1, 1, 5, 1], [130, 129, 3, 2], [0, 2, 120, 128]],
}


@pytest.mark.parametrize("chunks", CSA_CHUNKS.values(), ids=CSA_CHUNKS)
@pytest.mark.parametrize("width", [128, 96, 70], ids=lambda v: f"width={v}")
def test_compressor_of_csa_pools_eight_slots(width, chunks, device, hostile, judge):
    world = Pooling(hostile, 4, width, 40, len(chunks[0]), seed=width)
    for i, counts in enumerate(chunks):
        world.run(device, counts)
        world.judge(judge, f"width {width}, after call {i + 1}")
    hostile.check_guards()


@pytest.mark.parametrize("chunks", HCA_CHUNKS.values(), ids=HCA_CHUNKS)
def test_compressor_of_hca_pools_its_own_tokens(chunks, device, hostile, judge):
    world = Pooling(hostile, 128, 128, 400, len(chunks[0]), seed=7)
    for counts in chunks:
        world.run(device, counts)
    world.judge(judge, f"{len(chunks)} calls")
    hostile.check_guards()


@pytest.mark.parametrize("first_chunk", [[0, 0], [1, 2], [3, 4], [5, 7]], ids=lambda v: f"after {v[0]} and {v[1]} tokens")
def test_compressor_step_goes_on_from_any_prefill(first_chunk, device, hostile, judge):
    """Decode from every residue mod 4 crosses two borders; one row rests now and then. The bits are those of one prefill."""
    first_chunk = [*first_chunk, 6, 3, first_chunk[0]]  # of five rows
    b = len(first_chunk)
    world, whole = (Pooling(hostile, 4, 128, 24, b, seed=9) for _ in range(2))
    world.run(device, first_chunk)
    for step in range(12):
        moves = [1, int(step % 3 != 1), 1, int(step % 5 != 2), int(step % 2 == 0)]
        entry, entry_position = world.run(device, moves, decode=True)
        due = [n // 4 - 1 if n % 4 == 0 and moved else -1 for n, moved in zip(world.length, moves, strict=True)]
        judge("compressor", "which entry a step completes", entry[:, 0], exact=True, reference=lambda due=due: ints(due))
        judge("compressor", "where it is rotated", entry_position[:, 0], exact=True, reference=lambda due=due: ints([4 * e if e >= 0 else -1 for e in due]))
        world.judge(judge, f"step {step}")
    whole.run(device, world.length)
    rows = [(i, e) for i in range(b) for e in sorted(whole.pooled[i])]
    judge("compressor", "decode = prefill", torch.stack([world.pooled[i][e] for i, e in rows]), exact=True,
          reference=lambda: torch.stack([whole.pooled[i][e] for i, e in rows]))  # fmt: skip
    hostile.check_guards()


def test_compressor_step_of_hca_crosses_its_border(device, hostile, judge):
    world = Pooling(hostile, 128, 96, 260, 4, seed=11)
    world.run(device, [126, 255, 127, 0])
    for _ in range(3):
        world.run(device, [1, 1, 1, 1], decode=True)
    world.judge(judge, "border at 128 and at 256")
    hostile.check_guards()


@pytest.mark.parametrize("ratio", [4, 128], ids=lambda v: f"ratio={v}")
def test_compressor_pools_gates_that_overflow_an_exponential(ratio, device, hostile, judge):
    """Whole rows of gates moved by +200 and -200, where exp is infinite and zero: a softmax does not depend on it. By both kernels."""
    offsets = (200.0, -200.0)
    for way in ("prefill", "steps"):
        world = Pooling(hostile, ratio, 96, 3 * ratio, len(offsets), seed=13)
        world.gate += torch.tensor(offsets)[:, None, None]
        world.run(device, [2 * ratio + 1] * 2 if way == "prefill" else [ratio - 1] * 2)
        for _ in range(ratio + 2 if way == "steps" else 0):
            world.run(device, [1] * 2, decode=True)
        pooled = torch.stack([row[e] for row in world.pooled for e in sorted(row)])
        judge("compressor", f"{way}, ratio {ratio}: finite", pooled.isfinite(), exact=True, reference=lambda pooled=pooled: torch.ones(pooled.shape, dtype=torch.bool))
        world.judge(judge, f"{way}, ratio {ratio}, gates moved by {offsets}")
    hostile.check_guards()


def test_compressor_at_the_end_of_the_longest_context(device, hostile, judge):
    """Tokens up to 1,048,575; the previous group is kept from the first call, which is not judged on entry 0."""
    world = Pooling(hostile, 4, 64, 16, 1, seed=12, first=[LAST + 1 - 16])
    world.state_kv.fill_(0), world.state_gate.fill_(0)  # the group before column 0
    world.run(device, [7])
    world.run(device, [8])
    world.run(device, [1], decode=True)
    entries = [LAST // 4 - 2 + i for i in range(3)]
    judge("compressor", "entries 262141 to 262143", torch.stack([world.pooled[0][e] for e in entries]),
          reference=lambda: torch.stack([world.expected(0, e, Sums(), F64) for e in (1, 2, 3)]),
          twins=rounded_twins(lambda sums: torch.stack([world.expected(0, e, sums) for e in (1, 2, 3)])))  # fmt: skip


# ---- indexer ----


@pytest.mark.parametrize("variant", ["naive", "entries", "mma"])
# 8 x 128 is the tiny checkpoint, 64 x 128 the published one; 5 heads leave a tile unfilled, 20 fill one and a bit.
@pytest.mark.parametrize(("hi", "di"), [(8, 128), (64, 128), (5, 32), (20, 64)], ids=str)
def test_indexer_score_looks_at_complete_entries_only(hi, di, variant, device, hostile, judge):
    b, capacity, E, ratio = 5, 70, 75, 4
    position = ints([*EDGES, -1, 279, 3, 2, 40, 276, 33, 100])
    T = len(position)
    row = ints([t % b for t in range(T)])
    values = hadamard_values(on_grid(b * capacity, di, 21)).view(b, capacity, di)
    keys, scales = key_bytes(on_grid(b * capacity, di, 21).view(b, capacity, di))
    last = [max(((int(p) + 1) // ratio for p, i in zip(position, row, strict=True) if i == which and p >= 0)) for which in range(b)]
    for which in range(b):
        keys[which, last[which] :], scales[which, last[which] :] = 255, 255  # not complete for anybody: NaN
    q = hostile.strided(formats.round_e2m1_blocks(torch.randn(T, hi, di, generator=generator(22)), 32).bfloat16())
    weights = hostile.f32((T, hi), seed=23)
    score = hostile.poisoned((T, E), F32)
    ops.indexer_score(device, q, weights, hostile.strided(keys), hostile.strided(scales), hostile.packed(position), hostile.packed(row),
                      score, ratio, variant=variant)  # fmt: skip

    complete = (position + 1) // ratio
    seen = torch.arange(E) < torch.minimum(complete, torch.tensor(capacity))[:, None]
    real = position >= 0

    def compute(sums: Sums, dtype: torch.dtype = F32) -> Tensor:
        per_row = [
            ref.indexer_score(q[t : t + 1, None].cpu().to(dtype), values[row[t]][None].to(dtype).nan_to_num(), weights[t : t + 1, None].cpu().to(dtype), complete[t : t + 1, None], sums)[0, 0]
            for t in range(T)
        ]
        padded = torch.nn.functional.pad(torch.stack(per_row), (0, E - capacity), value=-INF)
        return padded.masked_fill(~seen, 0.0)[real]

    case = f"{variant}, {hi} heads of {di}"
    got = score.cpu()
    judge("indexer_score", f"{case}: who is seen", torch.isneginf(got[real]), exact=True, reference=lambda: ~seen[real])
    judge("indexer_score", case, got.masked_fill(~seen, 0.0)[real], reference=lambda: compute(Sums(), F64), twins=exact_twins(compute))
    assert got[~real].isnan().all(), "a pad's scores were written"
    hostile.check_guards()


def brute_topk(score: list[float], seen: int, k: int) -> list[int]:
    best = sorted(range(seen), key=lambda e: (-score[e], e))[:k]
    return sorted(best) + [-1] * (k - len(best))


def scores_of(kind: str, T: int, E: int) -> Tensor:
    x = torch.randn(T, E, generator=generator(31))
    if kind == "ties":
        return (x * 2).round() / 2 + 0.0
    if kind == "all equal":
        return torch.full((T, E), -0.25)
    if kind == "clustered":  # neighbours in the last bit: no eight-bit bucket tells them apart
        return (torch.full((T, E), 0x3F800000, dtype=I32) + torch.randint(0, 40, (T, E), generator=generator(32), dtype=I32)).view(F32)
    if kind == "zeros of both signs":
        zeros = torch.where(torch.rand(T, E, generator=generator(33)) < 0.5, 0.0, -0.0)
        return torch.where(x.abs() > 1.5, x.sign(), zeros)  # a sum would lose the sign of -0
    if kind == "infinities":
        return torch.where(x > 0.6, -INF, torch.where(x < -1.8, INF, x))
    if kind == "ascending":
        return torch.arange(E).float().expand(T, E) - 17
    return x


@pytest.mark.parametrize("variant", ["naive", "radix", "stream"])
@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "clustered", "zeros of both signs", "infinities", "ascending"])
def test_topk_is_the_exact_set(kind, variant, device, hostile, judge):
    """seen = (p + 1) // 4 goes from 0 over k - 1, k, k + 1 to all; what lies beyond is NaN. k = 1, the tiny 32, and a prime."""
    E, ratio = 300, 4
    for k in (1, 32, 101):
        counts = [0, 1, k - 1, k, k + 1, 64, 257, E]
        position = ints([ratio * n - 1 + i % ratio if n else i % 3 for i, n in enumerate(counts)] + [-1])
        seen = ((position + 1) // ratio).clamp_max(E)
        score = scores_of(kind, len(position), E)
        score[torch.arange(E) >= seen[:, None]] = NAN
        selected = hostile.poisoned((len(position), k), I32).fill_(-7)
        ops.topk(device, hostile.strided(score), hostile.packed(position), selected, ratio, variant=variant)
        judge("topk", f"{variant}, {kind}, k={k}", selected[:-1], exact=True,
              reference=lambda score=score, seen=seen, k=k: ints([brute_topk(score[t].tolist(), int(seen[t]), k) for t in range(len(seen) - 1)]))  # fmt: skip
        assert (selected[-1] == -7).all(), "a pad's row was written"
    hostile.check_guards()


@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "clustered", "zeros of both signs", "infinities", "ascending"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_topk_of_rows_in_parts(parts, kind, device, hostile, judge):
    """Rows of up to four tiles, at every offset from 16 bytes, seen up to borders of tiles and parts; lists hold anything, counters
    are left zero, and a second call finds them so."""
    E, ratio = 32_771, 4
    for k in (32, 512, 1024):
        counts = [k, k + 1, 8191, 8193, 16_385, E - 1, E]
        position = ints([ratio * n - 1 + i % ratio for i, n in enumerate(counts)])
        seen = ((position + 1) // ratio).clamp_max(E)
        score = scores_of(kind, len(position), E)
        score[torch.arange(E) >= seen[:, None]] = NAN
        rows = hostile.strided(score)
        counters, scratch = torch.zeros(len(counts), dtype=I32, device=rows.device), hostile.poisoned((len(counts) * parts * list_numbers(k),), I32).fill_(0x7F000000)
        selected = hostile.poisoned((2, len(counts), k), I32).fill_(-7)
        for call in selected:
            ops.topk(device, rows, hostile.packed(position), call, ratio, "stream", counters, scratch, parts)

        def expected(score=score, seen=seen, k=k) -> Tensor:
            best = [(row[:n] + 0.0).sort(descending=True, stable=True).indices[:k].sort().values for row, n in zip(score, seen.tolist(), strict=True)]
            return torch.stack([torch.stack(best).to(I32)] * 2)

        judge("topk", f"{parts} parts, {kind}, k={k}", selected, exact=True, reference=expected)
        assert not counters.any(), "a counter was left behind"
    hostile.check_guards()


@pytest.mark.parametrize("parts", [1, 4])
def test_topk_of_rows_unlike_their_samples(parts, device, hostile, judge):
    """A long row's bound is guessed from the quads of 16 bytes taken here. 24 large entries are all in such quads, k = 32: the guess
    is above the k-th. In the second row they are where a guess never looks, so it is far below; the third rises to its end."""
    E, k = 32_771, 32
    score = torch.randn(3, E, generator=generator(37)).clamp_(max=3)
    score[2] = torch.arange(E).float()
    rows = hostile.strided(score)
    lead = rows.data_ptr() // 4 % 4
    sampled = [1 + i * ((lead + E) // 4 - 1) // THREADS for i in range(0, THREADS, THREADS // 6)][:6]
    high = torch.cat([torch.arange(4 * q, 4 * q + 4) for q in sampled]) - lead
    score[0, high] = torch.linspace(5, 9, 24)
    score[1, high + 4] = torch.linspace(5, 9, 24)
    rows.copy_(score)
    counters, scratch = torch.zeros(3, dtype=I32, device=rows.device), hostile.poisoned((3 * parts * list_numbers(k),), I32).fill_(0x7F000000)
    selected = hostile.poisoned((2, 3, k), I32).fill_(-7)
    for call in selected:
        ops.topk(device, rows, hostile.packed(ints([4 * E - 1] * 3)), call, 4, "stream", counters, scratch, parts)
    judge("topk", f"{parts} parts, unlike its samples", selected, exact=True,
          reference=lambda: torch.stack([torch.stack([row.sort(descending=True, stable=True).indices[:k].sort().values for row in score]).to(I32)] * 2))  # fmt: skip
    assert not counters.any(), "a counter was left behind"
    hostile.check_guards()


@pytest.mark.parametrize("variant", ["radix", "stream"])
def test_topk_takes_nan_as_the_largest(variant, device, hostile, judge):
    E, k = 9000, 512
    score = torch.randn(3, E, generator=generator(36))
    score[0, ::5], score[1], score[2, 8000:8600] = NAN, NAN, NAN
    selected = hostile.poisoned((3, k), I32)
    counters, scratch = torch.zeros(3, dtype=I32, device=selected.device), hostile.poisoned((3 * 2 * list_numbers(k),), I32)
    ops.topk(device, hostile.strided(score), hostile.packed(ints([4 * E - 1] * 3)), selected, 4, variant, counters, scratch, 2)
    judge("topk", f"{variant}: NaN", selected, exact=True, reference=lambda: torch.stack([row.sort(descending=True, stable=True).indices[:k].sort().values for row in score]).to(I32))


@pytest.mark.parametrize("variant", ["radix", "stream"])
def test_topk_of_a_million_tokens(variant, device, hostile, judge):
    """262,144 entries, published k = 1024, at the last position and one group earlier; half the scores are tied."""
    E, k = 262_144, 1024
    position = ints([LAST, LAST - 1])
    score = torch.randn(2, E, generator=generator(34))
    score = torch.where(torch.rand(2, E, generator=generator(35)) < 0.5, (score * 4).round() / 4, score)
    score[1, -1] = NAN  # not complete there
    selected = hostile.poisoned((2, k), I32)
    counters, scratch = torch.zeros(2, dtype=I32, device=selected.device), hostile.poisoned((ops.topk_scratch(k, E),), I32)
    ops.topk(device, hostile.strided(score), hostile.packed(position), selected, 4, variant, counters, scratch)

    def expected() -> Tensor:
        rows = [ref.top_entries(score[t, : E - t], k) for t in range(2)]
        return torch.stack(rows).to(I32)

    judge("topk", f"{variant}: E=262144 k=1024" if variant != "radix" else "E=262144 k=1024", selected, exact=True, reference=expected)
    hostile.check_guards()


# ---- attention ----


class Keys:
    """Two KV sources: a ring that holds the last positions of each row, and compressed entries; NaN where nothing was stored.

    position [T] -1 = pad, row [T]; lengths: tokens that each row's ring has taken. Values are made by the text of the format.
    """

    def __init__(self, *, d: int, r: int, h: int, window: int, slots: int, ratio: int, position: list[int], row: list[int], lengths: list[int], seed: int = 41, capacity: int | None = None, listed: int | None = None) -> None:  # fmt: skip
        self.d, self.r, self.h, self.window, self.ratio = d, r, h, window, ratio
        b = len(lengths)
        self.position, self.row = ints(position), ints(row)
        self.T = len(position)
        size = ops.entry_bytes(d, r)
        g = generator(seed)
        self.q = torch.randn(self.T, h, d, generator=g).bfloat16()
        self.sink = torch.randn(h, generator=g)
        self.values: dict[tuple[int, int], Tensor] = {}  # (batch row, position)
        ring, ring_position = torch.full((b, slots, size), 255, dtype=U8), torch.full((b, slots), -1, dtype=I32)
        for i, n in enumerate(lengths):
            held = range(max(0, n - slots), n)
            kv = torch.randn(len(held), d, generator=g).bfloat16()
            for p, code, value in zip(held, stored_entry(kv, r), entry_values(kv, r), strict=True):
                ring[i, p % slots], ring_position[i, p % slots] = code, p
                self.values[i, p] = value
        self.ring, self.ring_position = ring, ring_position
        self.entries = self.selected = None
        self.results: dict[tuple[int, torch.dtype, bool], Tensor] = {}
        self.entry_values: dict[tuple[int, int], Tensor] = {}
        if ratio:
            complete = [n // ratio for n in lengths]
            self.capacity = capacity or max(complete) + 3
            offset = [max(0, n - self.capacity) for n in complete]  # of a long row only the last entries are made
            assert not any(offset) or listed, "all entries are seen, so all must be made"
            entries = torch.full((b, self.capacity, size), 255, dtype=U8)
            for i, n in enumerate(complete):
                rows = torch.randn(min(n, self.capacity), d, generator=g).bfloat16()
                entries[i, : len(rows)] = stored_entry(rows, r)
                for e, value in enumerate(entry_values(rows, r)):
                    self.entry_values[i, e] = value
            self.entries = entries
            if listed:
                self.selected = torch.full((self.T, listed), -1, dtype=I32)
                for t in range(self.T):
                    n = min((position[t] + 1) // ratio, self.capacity) if position[t] >= 0 else 0
                    chosen = torch.randperm(n, generator=g)[:listed].sort().values
                    self.selected[t, : len(chosen)] = chosen
        self.columns = window + (0 if not ratio else listed or self.capacity)

    def visible(self, t: int) -> tuple[list[int], list[int]]:
        """The rule, in two lines: window positions oldest first; entries whose group is complete at p, by list or all."""
        p = int(self.position[t])
        listed = range(self.capacity if self.ratio else 0) if self.selected is None else self.selected[t].tolist()
        return list(range(max(0, p - self.window + 1), p + 1)), [e if 0 <= e < (p + 1) // self.ratio else -1 for e in listed]

    def visible_rows(self) -> Tensor:
        rows: list[list[int]] = []
        for t in range(self.T):
            window, entries = self.visible(t)
            rows.append(window + [-1] * (self.window - len(window)) + entries)
        return ints(rows)

    def expected(self, sums: Sums, dtype: torch.dtype = F32, p_bf16: bool = False) -> Tensor:
        """[real tokens, h, d], computed once: nobody changes keys, queries or sinks after the first call. p_bf16: the rounding point p.bf16."""
        if (sums.order, dtype, p_bf16) in self.results:
            return self.results[sums.order, dtype, p_bf16]
        round_p = (lambda p: formats.round_bf16(p).to(dtype)) if p_bf16 else (lambda p: p)
        rows = []
        for t in range(self.T):
            if self.position[t] >= 0:
                i = int(self.row[t])
                window, entries = self.visible(t)
                kv = torch.stack([self.values[i, p] for p in window] + [self.entry_values[i, e] for e in entries if e >= 0])
                valid = torch.ones(1, 1, len(kv), dtype=torch.bool)
                rows.append(ref.sparse_attention(self.q[t].to(dtype)[None, None], kv.to(dtype)[None, None], valid, self.sink.to(dtype), sums, round_p)[0, 0])
        self.results[sums.order, dtype, p_bf16] = torch.stack(rows)
        return self.results[sums.order, dtype, p_bf16]

    def run(self, device, hostile, *, splits: int = 1, variant: str | None = None, only: slice = slice(None), merged: bool = False, heads: int | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """out of the real tokens (of those in `only`), and visible; everything that is a pad must stay untouched.

        merged: splits are merged by the last block of the one launch; heads: of a block; both of flash only.
        """
        real = self.position[only] >= 0
        T = len(real)
        out = hostile.poisoned((T, self.h, self.d), BF16)
        visible = hostile.poisoned((T, self.columns), I32).fill_(-7)
        scratch = (None, None)
        if splits > 1:
            scratch = (hostile.poisoned((T, splits, self.h, self.d), F32), hostile.poisoned((T, splits, self.h, 2), F32))
        packed, strided = hostile.packed, hostile.strided
        done = torch.zeros(ops.merge_counters(T, self.h), dtype=I32, device=out.device) if merged else None
        entries, selected = (None if x is None else strided(x) for x in (self.entries, None if self.selected is None else self.selected[only]))
        ops.sparse_attn(device, strided(self.q[only]), strided(self.ring), strided(self.ring_position), entries, selected, packed(self.position[only]),
                        packed(self.row[only]), packed(self.sink), out, self.window, self.ratio, splits, *scratch, visible, variant, done, heads)  # fmt: skip
        assert done is None or not done.any(), "a counter was left behind"
        assert out.cpu()[~real].isnan().all(), "a pad's output was written"
        assert (visible.cpu()[~real] == -7).all(), "a pad's keys were written"
        hostile.check_guards()
        return out.cpu()[real], visible.cpu()[real]

    def judge(self, device, hostile, judge, case: str, **way: Any) -> None:
        out, visible = self.run(device, hostile, **way)
        rounds = str(way.get("variant")).endswith("p_bf16")
        judge("sparse_attn", f"{case}: keys seen", visible, exact=True, reference=lambda: self.visible_rows()[self.position >= 0])
        judge("sparse_attn", case, out, reference=lambda: self.expected(Sums(), F64, rounds), twins=rounded_twins(lambda sums: self.expected(sums, F32, rounds)))


WAYS: dict[str, dict[str, Any]] = {
    "naive": {"variant": "naive"},
    "one kernel": {"variant": "tile"},
    "2 splits": {"variant": "tile", "splits": 2},
    "7 splits": {"variant": "tile", "splits": 7},
    "mma": {"variant": "mma"},
    "mma, 7 splits": {"variant": "mma", "splits": 7},
    "flash": {"variant": "flash"},
    "flash, 2 splits": {"variant": "flash", "splits": 2},
    "flash, 7 splits": {"variant": "flash", "splits": 7},
    "flash, 7 splits, one launch": {"variant": "flash", "splits": 7, "merged": True},
    "flash, p in bf16": {"variant": "flash_p_bf16"},
    "flash, p in bf16, 7 splits": {"variant": "flash_p_bf16", "splits": 7},
}
SHAPES = {
    "tiny": {"d": 128, "r": 64, "h": 8},
    "published width": {"d": 512, "r": 64, "h": 3},
    "17 heads, d=70": {"d": 70, "r": 6, "h": 17},
}
BUILT = [(shape, way) for shape in SHAPES for way in WAYS if SHAPES[shape]["d"] != 70 or "flash" not in way]


@functools.cache
def edge_keys(source: str, shape: str) -> Keys:
    ratio, listed = {"window only": (0, None), "CSA list": (4, 24), "HCA all": (128, None)}[source]
    position = [*EDGES, -1, 0, 4, 128, 5, 199, 130]
    row = [0] * (len(EDGES) + 1) + [1] * 3 + [2, 3, 4]
    return Keys(window=128, slots=272, ratio=ratio, listed=listed, position=position, row=row, lengths=[258, 129, 6, 200, 131], **SHAPES[shape])


@pytest.mark.parametrize(("shape", "way"), BUILT)
@pytest.mark.parametrize("source", ["window only", "CSA list", "HCA all"])
def test_sparse_attn_at_the_edges(source, shape, way, device, hostile, judge):
    """Positions around 4, 128 and 256 and a pad, five rows of unequal length, window 128 in a ring of 272 slots."""
    edge_keys(source, shape).judge(device, hostile, judge, f"{source}, {shape}, {way}", **WAYS[way])


@functools.cache
def last_keys() -> Keys:
    return Keys(d=128, r=64, h=4, window=128, slots=136, ratio=4, listed=40, capacity=64,
                position=[LAST, LAST - 8, LAST - 3], row=[0, 0, 0], lengths=[LAST + 1])  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_sparse_attn_at_the_end_of_the_longest_context(way, device, hostile, judge):
    """Ring of 136 slots after a million tokens: it has wrapped thousands of times."""
    last_keys().judge(device, hostile, judge, f"positions {LAST - 8} to {LAST}, {way}", **WAYS[way])


@functools.cache
def keys_with_holes() -> Keys:
    keys = Keys(d=128, r=64, h=8, window=16, slots=300, ratio=4, listed=130, capacity=80, position=[250, 251, 20, 40], row=[0, 0, 0, 0], lengths=[256])
    assert keys.selected is not None
    keys.selected.fill_(-1)
    keys.selected[0, 5::7], keys.selected[0, 40:80] = ints(list(range(18))), -1
    keys.selected[1, 1:130:3] = ints(list(range(43)))
    keys.selected[2, 0:8] = ints([-1, 0, 4, 5, -1, 6, 62, 3])  # 5, 6 and 62 are not complete at 20
    return keys


@pytest.mark.parametrize("way", WAYS)
def test_sparse_attn_skips_holes_in_the_list(way, device, hostile, judge):
    """-1 in the middle and at the start, a whole tile of them, and entries that are not complete at p."""
    keys_with_holes().judge(device, hostile, judge, f"holes, {way}", **WAYS[way])


SINKS = [-10.0, 10.0, -1e4, 1e4, -INF, INF]


@functools.cache
def keys_for_sinks() -> Keys:
    """448 window keys fill seven splits of 64; the short rows leave splits empty. Scores are large enough to meet the sink."""
    keys = Keys(d=128, r=64, h=len(SINKS) + 1, window=448, slots=512, ratio=0, position=[511, 130, 63, 0], row=[0] * 4, lengths=[512])
    keys.q = (keys.q.float() * 4).bfloat16()
    keys.sink = torch.tensor([*SINKS, 0.5])
    return keys


def judge_sink(splits: int, sink: float, device, hostile, judge, variant: str | None = None, merged: bool = False) -> None:
    """A sink per head, one of them judged here; +inf and 1e4 leave nothing, -inf and -1e4 take nothing."""
    keys, head = keys_for_sinks(), SINKS.index(sink)
    out = keys.run(device, hostile, splits=splits, variant=variant, merged=merged)[0][:, head]
    case = f"splits={splits} sink={sink:g}{f' {variant}' if variant else ''}{', one launch' if merged else ''}"
    if sink in (INF, 1e4):
        judge("sparse_attn", f"{case}: nothing is left", out, exact=True, reference=lambda: torch.zeros(4, 128))
    else:
        judge("sparse_attn", case, out, reference=lambda: keys.expected(Sums(), F64)[:, head], twins=rounded_twins(lambda sums: keys.expected(sums)[:, head]))


EVERY_SINK = pytest.mark.parametrize(("splits", "sink"), [(s, x) for s in (1, 2, 7) for x in SINKS], ids=lambda v: f"splits={v}" if isinstance(v, int) else f"sink={v:g}")


@EVERY_SINK
def test_sparse_attn_counts_the_sink_once(splits, sink, device, hostile, judge):
    judge_sink(splits, sink, device, hostile, judge)


@pytest.mark.parametrize("merged", [False, True], ids=["two launches", "one launch"])
@EVERY_SINK
def test_sparse_attn_flash_counts_the_sink_once(splits, sink, merged, device, hostile, judge):
    judge_sink(splits, sink, device, hostile, judge, "flash", merged)


@functools.cache
def towering_keys(d: int, run: int, runs: int, where: int, level: float, others: float) -> Keys:
    """`runs` runs of `run` keys whose scores lie about `level` in one run and about `others` elsewhere; for heads 3 to 5 with signs turned.

    Of each three heads the sink lies with the lower scores, 130 above all of them, 130 below all of them.
    """
    keys = Keys(d=d, r=64, h=6, window=run * runs, slots=run * runs, ratio=0, position=[run * runs - 1], row=[0], lengths=[run * runs])
    keys.q = torch.zeros_like(keys.q)
    keys.q[:, :3, d - 64 :], keys.q[:, 3:, d - 64 :] = 1.0, -1.0
    for p in range(run * runs):
        height = level if p // run == where else others
        rotated = (torch.full((64,), height * d**0.5 / 64) + keys.values[0, p][d - 64 :] * 0.05).bfloat16()
        keys.ring[0, p, d - 64 : d + 64] = rotated.view(U8)
        keys.values[0, p][d - 64 :] = rotated.float()
    low, high = sorted((level, others))
    keys.sink = torch.tensor([low, high + 130, low - 130, -high, -low + 130, -high - 130])
    return keys


WHERE = {"first": 0, "middle": 3, "last": 6}


def judge_towering(device, hostile, judge, case: str, d: int, run: int, where: int, **way: Any) -> None:
    rounds, seen, drowned = str(way.get("variant")).endswith("p_bf16"), [0, 2, 3, 5], [1, 4]
    for level, others in ((130.0, 0.0), (0.0, -130.0)):
        keys = towering_keys(d, run, 7, where, level, others)
        out = keys.run(device, hostile, **way)[0]

        def expected(sums: Sums, dtype: torch.dtype = F32, keys: Keys = keys) -> Tensor:
            return keys.expected(sums, dtype, rounds)[:, seen]

        judge("sparse_attn", f"{case}, scores {level:g} and {others:g}", out[:, seen], reference=functools.partial(expected, Sums(), F64), twins=rounded_twins(expected))
        judge("sparse_attn", f"{case}, scores {level:g} and {others:g}: the sink leaves nothing", out[:, drowned], exact=True, reference=lambda: torch.zeros(1, 2, d))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("way", WAYS)
def test_sparse_attn_of_a_split_that_towers_over_the_others(way, where, device, hostile, judge):
    """The largest scores lie 130 above the rest, beyond what an exponential holds, in any of seven splits; or 130 below; or the sink does."""
    judge_towering(device, hostile, judge, f"{where} of 7 runs, {way}", 128, 64, WHERE[where], **WAYS[way])


def test_sparse_attn_weights_sum_to_one_less_the_sink(device, hostile, judge):
    """Every key is the same vector: the output is that vector times 1 - the sink's share."""
    keys = Keys(d=128, r=64, h=6, window=128, slots=128, ratio=0, position=[127], row=[0], lengths=[128])
    keys.ring[0, :] = keys.ring[0, :1].clone()
    keys.sink = torch.tensor([-INF, -5.0, 0.0, 3.0, 4.85, 8.0])

    def share(dtype: torch.dtype) -> Tensor:
        value = keys.values[0, 0].to(dtype)
        score = (keys.q[0].to(dtype) @ value) * 128**-0.5
        return (1 / (1 + torch.exp(keys.sink.to(dtype) - score) / 128))[:, None] * value

    for splits in (1, 2):
        out, _ = keys.run(device, hostile, splits=splits)
        judge("sparse_attn", f"one vector, splits={splits}", out[0], reference=lambda: share(F64), twins=[lambda: share(F32).bfloat16()])


def test_sparse_attn_shows_a_stale_slot(device, hostile, judge):
    """visible holds what the slot says it is, not what it should be."""
    keys = Keys(d=128, r=64, h=2, window=8, slots=16, ratio=0, position=[20], row=[0], lengths=[21])
    keys.ring_position[0, 15 % 16] = 15 - 16
    for splits in (1, 2):
        _, visible = keys.run(device, hostile, splits=splits)
        judge("sparse_attn", f"stale slot, splits={splits}", visible[0], exact=True, reference=lambda: ints([13, 14, -1, 16, 17, 18, 19, 20]))


@pytest.mark.parametrize("variant", [None, "flash"], ids=["default", "flash"])
def test_sparse_attn_of_a_token_does_not_depend_on_the_others(variant, device, hostile, judge):
    keys = Keys(d=128, r=64, h=8, window=128, slots=272, ratio=4, listed=32, position=[257, 4, 130, 200, 31], row=[0] * 5, lengths=[258])
    for splits in (1, 3):
        together, _ = keys.run(device, hostile, splits=splits, variant=variant)
        alone = [keys.run(device, hostile, splits=splits, variant=variant, only=slice(t, t + 1))[0] for t in range(5)]
        judge("sparse_attn", f"alone = in a batch, splits={splits}{', flash' if variant else ''}", together, exact=True, reference=lambda alone=alone: torch.cat(alone))


@functools.cache
def keys_of_72_heads() -> Keys:
    return Keys(d=512, r=64, h=72, window=128, slots=272, ratio=4, listed=100, position=[257, -1, 100, 128], row=[0, 0, 0, 1], lengths=[258, 129])


@pytest.mark.parametrize("variant", ["flash", "flash_p_bf16"])
@pytest.mark.parametrize("splits", [1, 3], ids=lambda v: f"splits={v}")
def test_sparse_attn_flash_does_not_depend_on_who_shares_a_block(splits, variant, device, hostile, judge):
    """72 heads in blocks of 64, 32 and 16: the last block is partly empty. Merged by a second launch or by the last block."""
    keys = keys_of_72_heads()
    case = f"72 heads, splits={splits}, {variant}"
    out, _ = keys.run(device, hostile, splits=splits, variant=variant, heads=64)
    keys.judge(device, hostile, judge, case, splits=splits, variant=variant, heads=64)
    for heads, merged in ((32, False), (16, False), (64, True), (32, True), (16, True)):
        other, _ = keys.run(device, hostile, splits=splits, variant=variant, heads=heads, merged=merged)
        judge("sparse_attn", f"{case}: blocks of {heads}{', one launch' if merged else ''}", other, exact=True, reference=lambda: out)


def test_sparse_attn_flash_can_be_launched_again(device, hostile, judge):
    """Counters of the one launch are back at zero: the second run gives the bits of the first."""
    keys = Keys(d=128, r=64, h=40, window=128, slots=272, ratio=4, listed=130, position=[257, 257, 5], row=[0] * 3, lengths=[258])
    runs = [keys.run(device, hostile, splits=5, variant="flash", merged=True)[0] for _ in range(3)]
    judge("sparse_attn", "flash, launched again", torch.stack(runs), exact=True, reference=lambda: runs[0].expand(3, *runs[0].shape))


@pytest.mark.parametrize("splits", [1, 2], ids=lambda v: f"splits={v}")
@pytest.mark.parametrize("d", [128, 512], ids=lambda v: f"d={v}")
def test_sparse_attn_flash_reads_every_code_at_every_scale(d, splits, device, hostile, judge):
    """One visible key a token and no sink: the output is the key, also where a scale is 2^-127, or, in the last two keys, so large
    that the quick way ends.
    """
    codes = torch.arange(256).roll(3)
    codes[(codes & 0x7F) == 0x7F] = 0
    small, all_scales = [0, 1, 60, 120, 134, 127, 3], [0, 1, 60, 120, 134, 135, 200, 246]
    blocks = (d - 64) // 64
    keys = Keys(d=d, r=64, h=16, window=1, slots=8, ratio=0, position=[0, 1, 2, 3], row=[0] * 4, lengths=[4])
    keys.q = torch.zeros_like(keys.q)
    keys.sink = torch.full((16,), -INF)
    want = torch.zeros(4, d - 64)
    for t in range(4):
        scales = small if t < 2 else all_scales
        scale = torch.tensor([scales[(2 * t + i) % len(scales)] for i in range(blocks)])
        code = codes.roll(-64 * t).repeat(2)[: d - 64]
        keys.ring[0, t, : d - 64], keys.ring[0, t, d + 64 : d + 64 + blocks] = code.to(U8), scale.to(U8)
        want[t] = (formats.decode_e4m3(code.to(U8)) * torch.exp2(scale.double() - 127).repeat_interleave(64)).bfloat16().float()
    out, _ = keys.run(device, hostile, splits=splits, variant="flash")
    judge("sparse_attn", f"flash, every code, d={d}, splits={splits}", out[..., : d - 64], exact=True, reference=lambda: want[:, None].expand(-1, 16, -1))


@pytest.mark.parametrize("d", [128, 512], ids=lambda v: f"d={v}")
def test_sparse_attn_flash_keeps_what_bf16_would_round_off_p(d, device, hostile, judge):
    """Two opposite keys of nearly equal weight: the output is their difference, from a 200th to a 3rd of either."""
    keys = Keys(d=d, r=64, h=9, window=2, slots=8, ratio=0, position=[1], row=[0], lengths=[2])
    keys.ring[0, 1] = keys.ring[0, 0]
    keys.ring[0, 1, : d - 64] ^= 0x80  # signs of e4m3 codes, and of bf16 in little-endian bytes
    keys.ring[0, 1, d - 63 : d + 64 : 2] ^= 0x80
    keys.values[0, 1] = -keys.values[0, 0]
    length = keys.values[0, 0].norm()
    keys.q[0] = (keys.values[0, 0] / length**2 * d**0.5 * torch.linspace(0.005, 0.35, 9)[:, None]).bfloat16()  # scores +- 0.005 to 0.35
    keys.sink = torch.full((9,), -INF)
    keys.judge(device, hostile, judge, f"opposite keys, d={d}, flash", variant="flash")


def test_sparse_attn_flash_takes_a_code_of_nan_for_nan(device, hostile, judge):
    """Also under a small scale, and for one of 448 codes; a key that is not visible may be NaN."""
    keys = Keys(d=512, r=64, h=3, window=1, slots=8, ratio=0, position=[0, 1, 2], row=[0] * 3, lengths=[4])
    keys.ring[0, 0, 447], keys.ring[0, 2, 512 + 64 + 6] = 0xFF, 255
    out, _ = keys.run(device, hostile, variant="flash")
    judge("sparse_attn", "flash, codes of NaN", out.isnan().int(), exact=True, reference=lambda: ints([1, 0, 1])[:, None, None].expand(3, 3, 512))


@pytest.mark.parametrize(("keys", "splits"), [(1, 1), (128, 1), (129, 2), (640, 5), (1152, 9), (8320, 32), (10**6, 32)])
def test_sparse_attn_flash_splits_from_129_keys_on(keys, splits, judge):
    judge("sparse_attn", f"splits for {keys} keys, flash", ints([ops.splits_for(keys, "flash")]), exact=True, reference=lambda: ints([splits]))


@pytest.mark.parametrize(("keys", "splits"), [(1, 1), (64, 1), (65, 2), (128, 2), (160, 3), (4096, 64), (10_000, 64)])
def test_sparse_attn_splits_from_65_keys_on(keys, splits, judge):
    judge("sparse_attn", f"splits for {keys} keys", ints([ops.splits_for(keys)]), exact=True, reference=lambda: ints([splits]))


# ---- hyper-connections ----

# Iterations, hc_eps, norm_eps: the published ones; large ones, so that each eps shows where it is added; softmax and columns only.
EPSILONS = pytest.mark.parametrize(("iters", "hc_eps", "norm_eps"), [(20, 1e-6, 1e-6), (3, 0.03, 0.5), (1, 1e-6, 1e-6)], ids=lambda v: f"{v:g}")
# 4 streams as published; 2, 3 and 8 because hc_mult is a config key; widths that break runs of eight.
STREAMS = pytest.mark.parametrize(("n", "D"), [(4, 256), (2, 161), (3, 100), (8, 96)], ids=str)


def mixing_world(hostile, T: int, n: int, D: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, fn, base, scale with logits wide enough that comb is far from uniform and from symmetric."""
    X = hostile.bf16((T, n, D), seed=51, scale=2.0)
    fn = hostile.f32((rows, n * D), seed=52, scale=1.5 * (n * D) ** -0.5, packed=True)
    base, scale = hostile.f32((rows,), seed=53, packed=True), hostile.f32((3 if rows > n else 1,), seed=54, lo=0.5, hi=1.5, packed=True)
    return X, fn, base, scale


@pytest.mark.parametrize("variant", ["naive", "block"])
@EPSILONS
@STREAMS
def test_hc_pre_normalises_columns_last(n, D, iters, hc_eps, norm_eps, variant, device, hostile, judge):
    T = 33
    X, fn, base, scale = mixing_world(hostile, T, n, D, (2 + n) * n)
    pre, post, comb = hostile.poisoned((T, n), F32), hostile.poisoned((T, n), F32), hostile.poisoned((T, n, n), F32)
    a = hostile.poisoned((T, D), BF16)
    ops.hc_pre(device, X, fn, base, scale, pre, post, comb, a, iters, hc_eps, norm_eps, variant=variant)

    @functools.cache
    def every(sums: Sums, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, weight, b, c = as_type(dtype, X, fn, base, scale)
        return ref.hc_pre(x, weight, b, c, iters, hc_eps, norm_eps, sums)

    def compute(which: int, sums: Sums, dtype: torch.dtype = F32) -> Tensor:
        return every(sums, dtype)[which]

    case = f"{variant}, {n} x {D}, {iters} iterations, eps {hc_eps:g}"
    for which, name, got, row_dims in ((1, "pre", pre, 1), (2, "post", post, 1), (3, "comb", comb, 2)):
        judge("hc_pre", f"{name}: {case}", got, row_dims=row_dims, reference=lambda which=which: compute(which, Sums(), F64),
              twins=exact_twins(functools.partial(compute, which)))  # fmt: skip
    judge("hc_a", case, a, reference=lambda: compute(0, Sums(), F64), twins=rounded_twins(lambda sums: compute(0, sums)))
    if n > 2 and hc_eps < 1e-3:  # two streams that are doubly stochastic are symmetric
        assert (comb - comb.transpose(1, 2)).norm() / comb.norm() > 0.1, "comb is symmetric here: a transpose would not show"
    for got, low, high in ((pre, 0, 1 + hc_eps), (post, 0, 2), (comb, 0, 2)):
        assert (got >= low).all(), "below its range"
        assert (got <= high).all(), "above its range"
    hostile.check_guards()


@pytest.mark.parametrize("variant", ["naive", "block"])
@STREAMS
def test_hc_pre_mixes_logits_that_overflow_an_exponential(n, D, variant, device, hostile, judge):
    """A line of comb's logits moved by +200, the next by -200, where exp is infinite and zero: a softmax does not depend on it."""
    T = 33
    X, fn, base, scale = mixing_world(hostile, T, n, D, (2 + n) * n)
    for line, offset in enumerate((200.0, -200.0)):
        base[(2 + line) * n : (3 + line) * n] += offset
    pre, post, comb = hostile.poisoned((T, n), F32), hostile.poisoned((T, n), F32), hostile.poisoned((T, n, n), F32)
    a = hostile.poisoned((T, D), BF16)
    ops.hc_pre(device, X, fn, base, scale, pre, post, comb, a, 20, 1e-6, 1e-6, variant=variant)

    def compute(sums: Sums, dtype: torch.dtype = F32) -> Tensor:
        x, weight, b, c = as_type(dtype, X, fn, base, scale)
        return ref.hc_pre(x, weight, b, c, 20, 1e-6, 1e-6, sums)[3]

    case = f"{variant}, {n} x {D}, lines moved by +200 and -200"
    judge("hc_pre", f"finite: {case}", comb.isfinite(), exact=True, reference=lambda: torch.ones(comb.shape, dtype=torch.bool))
    judge("hc_pre", f"comb: {case}", comb, row_dims=2, reference=lambda: compute(Sums(), F64), twins=exact_twins(compute))
    hostile.check_guards()


def rows_apart(hostile, tensor: Tensor) -> Tensor:
    """The tensor's rows 16 bytes further apart than they are long, in memory full of NaN."""
    memory = hostile.packed(torch.full((len(tensor), tensor[0].numel() + 8), NAN).to(tensor.dtype))
    rows = memory[:, : tensor[0].numel()]
    rows.copy_(tensor.flatten(1))
    apart: Tensor = rows.unflatten(1, tensor.shape[1:]) if tensor.dim() > 2 else rows
    return apart


AT_ONCE = pytest.mark.parametrize("way", ["split, one launch", "split", "mma, 4 warps", "mma, 8 warps"])


class Mixing:
    """A half put back, the next one's mixing and its norm: inputs of T tokens of four streams of D, and one call of hc_pre or hc_head."""

    def __init__(self, hostile, T: int, D: int, rows: int = 24) -> None:
        n = 4
        self.hostile, self.T, self.D, self.rows = hostile, T, D, rows
        X, self.fn, self.base, self.scale = mixing_world(hostile, T, n, D, rows)
        self.streams, self.y = rows_apart(hostile, X), rows_apart(hostile, hostile.bf16((T, D), seed=61))
        self.old_post, self.old_comb = hostile.f32((T, n), seed=62, lo=0.0, hi=2.0, packed=True), hostile.f32((T, n, n), seed=63, lo=0.0, hi=1.0, packed=True)
        self.weight = hostile.f32((D,), seed=64, packed=True)
        self.counters = torch.zeros(T, dtype=I32, device=X.device)

    def run(self, device, way: str, tokens: slice, iters: int = 20, hc_eps: float = 1e-6, norm_eps: float = 1e-6, before: bool = True) -> dict[str, Tensor]:
        streams, y, hostile = self.streams[tokens], self.y[tokens], self.hostile
        T, n, D = streams.shape
        variant = way.split(",")[0]
        out = {"X": hostile.poisoned((T, n, D), BF16) if before else streams, "a": hostile.poisoned((T, D), BF16), "normed": hostile.poisoned((T, D), BF16)}
        post, comb = (hostile.poisoned(t[tokens].shape, F32) for t in (self.old_post, self.old_comb))
        if before:
            post.copy_(self.old_post[tokens])
            comb.copy_(self.old_comb[tokens])
        common: dict[str, Any] = {
            "variant": variant, "sums": hostile.poisoned((ops.mix_scratch(T, D, variant),), F32), "counters": self.counters, "norm": (self.weight, out["normed"]),
            "before": (y, streams) if before else None, "last_block_tokens": T if "one launch" in way else 0, "warps": 4 if "4" in way else 8,
        }  # fmt: skip
        if self.rows == n:
            ops.hc_head(device, out["X"], self.fn, self.base, self.scale, out["a"], hc_eps, norm_eps, mixing=(post, comb) if before else None, **common)
        else:
            out |= {"pre": hostile.poisoned((T, n), F32), "post": post, "comb": comb}
            ops.hc_pre(device, out["X"], self.fn, self.base, self.scale, out["pre"], post, comb, out["a"], iters, hc_eps, norm_eps, **common)
        assert not self.counters.any(), "a counter was left behind"
        return out

    def judge(self, judge, case: str, out: dict[str, Tensor], iters: int = 20, hc_eps: float = 1e-6, norm_eps: float = 1e-6, before: bool = True) -> None:
        """Each output from what lies before it: X from the old half, the mixing and a from X as it was written, the norm from a."""
        if before:

            def put_back(sums: Sums, dtype: torch.dtype = F32) -> Tensor:
                y, streams, post, comb = as_type(dtype, self.y, self.streams, self.old_post, self.old_comb)
                return ref.hc_post(y, streams, post, comb, sums)

            judge("hc_post", f"X: {case}", out["X"], row_dims=2, reference=lambda: put_back(Sums(), F64), twins=rounded_twins(put_back))

        @functools.cache
        def mixed(sums: Sums, dtype: torch.dtype = F32) -> tuple[Tensor, ...]:
            x, weight, b, c = as_type(dtype, out["X"], self.fn, self.base, self.scale)
            return (ref.hc_head(x, weight, b, c, hc_eps, norm_eps, sums),) if self.rows == 4 else ref.hc_pre(x, weight, b, c, iters, hc_eps, norm_eps, sums)

        def part(which: int, sums: Sums, dtype: torch.dtype = F32) -> Tensor:
            return mixed(sums, dtype)[which]

        for which, name, row_dims in ((1, "pre", 1), (2, "post", 1), (3, "comb", 2)):
            if name in out:
                judge("hc_pre", f"{name}: {case}", out[name], row_dims=row_dims, reference=functools.partial(part, which, Sums(), F64),
                      twins=exact_twins(functools.partial(part, which)))  # fmt: skip
        judge("hc_a", case, out["a"], reference=lambda: mixed(Sums(), F64)[0], twins=rounded_twins(lambda sums: mixed(sums)[0]))

        def norm(sums: Sums, dtype: torch.dtype = F32) -> Tensor:
            a, weight = as_type(dtype, out["a"], self.weight)
            return ref.rms_norm(a, weight, norm_eps, sums)

        judge("rms_norm", f"after mixing, {case}", out["normed"], reference=lambda: norm(Sums(), F64), twins=rounded_twins(norm))
        self.hostile.check_guards()


@AT_ONCE
@EPSILONS
def test_hc_pre_at_once_puts_a_half_back_mixes_and_norms(iters, hc_eps, norm_eps, way, device, hostile, judge):
    """65 tokens end inside a tile of 16 and behind a block of 64; three blocks of columns, or one for `mma`."""
    world = Mixing(hostile, 65 if way.startswith("mma") else 19, 256 if way.startswith("mma") else 192)
    out = world.run(device, way, slice(None), iters, hc_eps, norm_eps)
    world.judge(judge, f"{way}, {iters} iterations, eps {hc_eps:g}", out, iters, hc_eps, norm_eps)
    assert (out["comb"] - out["comb"].transpose(1, 2)).norm() / out["comb"].norm() > 0.1, "comb is symmetric here: a transpose would not show"


@AT_ONCE
@pytest.mark.parametrize("D", [512, 4352], ids=lambda v: f"D={v}")
def test_hc_pre_at_once_of_streams_as_they_are(D, way, device, hostile, judge):
    """No half before; more columns than one block of the narrow kernel holds."""
    world = Mixing(hostile, 3, D)
    world.judge(judge, f"{way}, streams as they are, D={D}", world.run(device, way, slice(None), before=False), before=False)


@AT_ONCE
@pytest.mark.parametrize("before", [True, False], ids=["a half before", "streams as they are"])
def test_hc_head_at_once(before, way, device, hostile, judge):
    world = Mixing(hostile, 5, 256, rows=4)
    world.judge(judge, f"head, {way}, {'a half before' if before else 'streams as they are'}", world.run(device, way, slice(None), before=before), before=before)


@AT_ONCE
def test_hc_pre_at_once_mixes_logits_that_overflow_an_exponential(way, device, hostile, judge):
    world = Mixing(hostile, 9, 256)
    for line, offset in enumerate((200.0, -200.0)):
        world.base[(2 + line) * 4 : (3 + line) * 4] += offset
    out = world.run(device, way, slice(None))
    judge("hc_pre", f"finite: {way}, lines moved by +200 and -200", out["comb"].isfinite(), exact=True, reference=lambda: torch.ones(out["comb"].shape, dtype=torch.bool))
    world.judge(judge, f"{way}, lines moved by +200 and -200", out)


def test_hc_pre_at_once_gives_a_token_the_same_bits_however_it_is_run(device, hostile, judge):
    """Of a phase: alone, in calls of 7, in one of 150; in one launch or two; by blocks of four or eight warps."""
    world = Mixing(hostile, 150, 256)
    for ways in (("split", "split, one launch"), ("mma, 8 warps", "mma, 4 warps")):
        whole = world.run(device, ways[0], slice(None))
        for way in ways:
            for step in (7, 150):
                parts = [world.run(device, way, slice(t, t + step)) for t in range(0, 150, step)]
                for name, operation in (("X", "hc_post"), ("pre", "hc_pre"), ("post", "hc_pre"), ("comb", "hc_pre"), ("a", "hc_a"), ("normed", "rms_norm")):
                    judge(operation, f"{way}, calls of {step} = one {ways[0]}: {name}", torch.cat([part[name] for part in parts]), exact=True, reference=lambda name=name, whole=whole: whole[name])
        alone = world.run(device, ways[1], slice(77, 78))
        for name, operation in (("X", "hc_post"), ("comb", "hc_pre"), ("a", "hc_a"), ("normed", "rms_norm")):
            judge(operation, f"{ways[1]}, alone: {name}", alone[name], exact=True, reference=lambda name=name, whole=whole: whole[name][77:78])


def test_hc_post_by_columns_gives_the_bits_of_a_block_per_token(device, hostile, judge):
    world = Mixing(hostile, 7, 1160)
    by_block, by_columns = hostile.poisoned((7, 4, 1160), BF16), hostile.poisoned((7, 4, 1160), BF16)
    ops.hc_post(device, world.y, world.streams, world.old_post, world.old_comb, by_block)
    ops.hc_post(device, world.y, world.streams, world.old_post, world.old_comb, by_columns, variant="columns")
    judge("hc_post", "columns", by_columns, exact=True, reference=lambda: by_block)
    hostile.check_guards()


def test_hc_at_once_refuses_shapes_that_it_is_not_built_for(device, hostile):
    world = Mixing(hostile, 2, 96)
    with pytest.raises(KernelError, match="multiples of 64; the variant block takes any"):
        world.run(device, "split", slice(None))
    world = Mixing(hostile, 2, 256)
    world.streams = hostile.packed(torch.zeros(2, 4 * 256 + 1).bfloat16())[:, 1:].unflatten(1, (4, 256))
    with pytest.raises(KernelError, match="rows of streams do not begin at multiples of 16 bytes"):
        world.run(device, "mma, 8 warps", slice(None))


@STREAMS
def test_hc_post_sums_over_the_first_axis_of_comb(n, D, device, hostile, judge):
    """comb is random, neither symmetric nor doubly stochastic: summing over its other axis is far beyond the limit."""
    T = 29
    X, y = hostile.bf16((T, n, D), seed=55), hostile.bf16((T, D), seed=56)
    post, comb = hostile.f32((T, n), seed=57, lo=0.0, hi=2.0, packed=True), hostile.f32((T, n, n), seed=58, lo=0.0, hi=1.0, packed=True)
    out = hostile.poisoned((T, n, D), BF16)
    ops.hc_post(device, y, X, post, comb, out)

    def compute(sums: Sums, dtype: torch.dtype = F32) -> Tensor:
        out_of_block, x, weight, mixing = as_type(dtype, y, X, post, comb)
        return ref.hc_post(out_of_block, x, weight, mixing, sums)

    judge("hc_post", f"{n} x {D}", out, row_dims=2, reference=lambda: compute(Sums(), F64), twins=rounded_twins(compute))
    wrong = ref.hc_post(y.cpu().float(), X.cpu().float(), post.cpu(), comb.cpu().transpose(1, 2))
    assert (wrong - compute(Sums())).norm() / wrong.norm() > 0.1, "a transpose would not show"
    hostile.check_guards()


@STREAMS
def test_hc_head_mixes_by_pre_alone(n, D, device, hostile, judge):
    T = 17
    X, fn, base, scale = mixing_world(hostile, T, n, D, n)
    a = hostile.poisoned((T, D), BF16)
    ops.hc_head(device, X, fn, base, scale, a, 0.03, 0.5)

    def compute(sums: Sums, dtype: torch.dtype = F32) -> Tensor:
        x, weight, b, c = as_type(dtype, X, fn, base, scale)
        return ref.hc_head(x, weight, b, c, 0.03, 0.5, sums)

    judge("hc_head", f"{n} x {D}", a, reference=lambda: compute(Sums(), F64), twins=rounded_twins(compute))
    hostile.check_guards()


def test_hc_pre_of_a_token_does_not_depend_on_the_others(device, hostile, judge):
    X, fn, base, scale = mixing_world(hostile, 6, 4, 256, 24)
    results = []
    for tokens in (X, X[3:4]):
        T = len(tokens)
        pre, post = hostile.poisoned((T, 4), F32), hostile.poisoned((T, 4), F32)
        comb, a = hostile.poisoned((T, 4, 4), F32), hostile.poisoned((T, 256), BF16)
        ops.hc_pre(device, tokens, fn, base, scale, pre, post, comb, a, 20, 1e-6, 1e-6)
        results.append((pre, post, comb, a))
    for name, together, alone in zip(("pre", "post", "comb", "a"), *results, strict=True):
        judge("hc_pre", f"alone = in a batch: {name}", together[3:4], exact=True, reference=lambda alone=alone: alone)


@pytest.mark.parametrize("T", [1100, 2049])
def test_hc_gives_the_same_bits_in_a_large_call(T, device, hostile, judge):
    """No number of tokens switches to other arithmetic: one large call equals calls of 100."""
    n, D = 4, 24
    X, fn, base, scale = mixing_world(hostile, T, n, D, (2 + n) * n)
    y = hostile.bf16((T, D), seed=59)

    def run(tokens: slice) -> tuple[Tensor, ...]:
        x = X[tokens]
        count = len(x)
        pre, post, comb = hostile.poisoned((count, n), F32), hostile.poisoned((count, n), F32), hostile.poisoned((count, n, n), F32)
        a, head, out = hostile.poisoned((count, D), BF16), hostile.poisoned((count, D), BF16), hostile.poisoned((count, n, D), BF16)
        ops.hc_pre(device, x, fn, base, scale, pre, post, comb, a, 3, 1e-6, 1e-6)
        ops.hc_post(device, y[tokens], x, post, comb, out)
        ops.hc_head(device, x, hostile.packed(fn[:n]), hostile.packed(base[:n]), hostile.packed(scale[:1]), head, 1e-6, 1e-6)
        return pre, post, comb, a, out, head

    whole = run(slice(T))
    parts = [torch.cat(part) for part in zip(*(run(slice(t, t + 100)) for t in range(0, T, 100)), strict=True)]
    operations = ("hc_pre", "hc_pre", "hc_pre", "hc_a", "hc_post", "hc_head")
    for operation, name, got, want in zip(operations, ("pre", "post", "comb", "a", "X", "head"), whole, parts, strict=True):
        judge(operation, f"{T} tokens = calls of 100: {name}", got, exact=True, reference=lambda want=want: want)


# A sum hides the small codes behind the large ones: one key, or one dimension of it, at a time.


@pytest.mark.parametrize("way", [way for way in WAYS if "flash" not in way])
def test_sparse_attn_reads_every_code(way, device, hostile, judge):
    """One visible key and no sink: the output is the key. Its bytes are all 254 finite e4m3 codes, zeros and subnormals among them."""
    d, r = 256 + 64, 64
    keys = Keys(d=d, r=r, h=16, window=1, slots=8, ratio=0, position=[3], row=[0], lengths=[4])
    codes = torch.arange(256)
    codes[[0x7F, 0xFF]] = 0
    keys.ring[0, 3, :256] = codes.to(U8)
    keys.ring[0, 3, d + r : d + r + 4] = torch.tensor([127, 120, 130, 127], dtype=U8)
    keys.sink = torch.full((16,), -INF)
    out, _ = keys.run(device, hostile, **WAYS[way])
    scale = torch.tensor([1.0, 2.0**-7, 8.0, 1.0]).repeat_interleave(64)
    judge("sparse_attn", f"every code, {way}", out[0, :, :256], exact=True,
          reference=lambda: (formats.decode_e4m3(codes.to(U8)) * scale).expand(16, -1))  # fmt: skip


@pytest.mark.parametrize("variant", ["naive", "entries", "mma"])
def test_indexer_score_reads_every_code(variant, device, hostile, judge):
    """One dimension of one query head at a time, with both signs: the score is that dimension of the key."""
    di, E = 32, 16
    keys = torch.zeros(1, E, di // 2, dtype=U8)
    keys[0, :, 0], keys[0, :, 9] = torch.arange(16).to(U8), (torch.arange(16) << 4).to(U8)  # dimensions 0 and 19
    scales = torch.tensor([127, 118], dtype=U8).repeat(E // 2)[None, :, None].contiguous()
    q = torch.zeros(4, 1, di)
    for t, (column, sign) in enumerate([(0, 1.0), (0, -1.0), (19, 1.0), (19, -1.0)]):
        q[t, 0, column] = sign
    score = hostile.poisoned((4, E), F32)
    ops.indexer_score(device, hostile.strided(q.bfloat16()), hostile.f32((4, 1), seed=24, lo=1.0, hi=1.0), hostile.strided(keys), hostile.strided(scales),
                      hostile.packed(ints([63] * 4)), hostile.packed(ints([0] * 4)), score, 4, variant=variant)  # fmt: skip
    value = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]) * torch.tensor([1.0, 2.0**-9]).repeat(8)
    judge("indexer_score", f"every code, {variant}", score, exact=True, reference=lambda: torch.stack([value.relu(), (-value).relu()] * 2))
