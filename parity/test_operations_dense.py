"""Single-operation checks: the kernels that work on one token at a time, each alone, on hostile inputs.

Inputs are views inside NaN memory, outputs are poisoned, sizes are no multiple of a tile, and every mechanism is made to
engage (clamps, ties, powers of two, pads, experts nobody chose). Production runs before its reference. Floors are twins:
the reference with reordered sums, rounded like production. `exact=True` where the result is a copy, a choice or one rounding.

    pytest parity/test_operations_dense.py -k swiglu
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from production.ops import dense as ops
from reference import formats
from reference import ops as ref
from reference.ops import Sums

BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
ORDERS = (1, 2, 3)
EPS = 1e-6
# 1 = decode, 13 = tail of a tile, 129 = two tiles and one row.
ROWS = pytest.mark.parametrize("rows", [1, 13, 129], ids=lambda rows: f"{rows} rows")
VARIANTS = pytest.mark.parametrize("variant", ["naive", "thin", "mma", "stream"])


@pytest.fixture(autouse=True)
def nothing_is_written_beside_an_output(hostile):
    yield
    hostile.check_guards()


def rounded_twins(compute: Callable[[Sums], Tensor]) -> list[Callable[[], Tensor]]:
    """The computation with its sums in each order, rounded to bf16 as production rounds."""
    return [lambda order=order: compute(Sums(order)).bfloat16().float() for order in ORDERS]  # type: ignore[misc]


def exact_twins(compute: Callable[[Sums], Tensor]) -> list[Callable[[], Tensor]]:
    """The computation with its sums in each order, fp32 all the way."""
    return [lambda order=order: compute(Sums(order)) for order in ORDERS]  # type: ignore[misc]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def positions_with_pads(rows: int) -> Tensor:
    """[rows] i32: far positions, the last one a context of 1,048,576 has, and a pad in every seven."""
    position = torch.tensor([0, 1, 127, 128, 4095, 65_536, 1_048_575], dtype=I32).repeat(rows // 7 + 1)[:rows] - torch.arange(rows, dtype=I32) // 7
    return torch.where(torch.arange(rows) % 7 == 3, -1, position.clamp_min(0)).to(I32)


# ---- positions and embedding: copies ----


@pytest.mark.parametrize(
    ("start", "count", "s"),
    [([0], [1], 1), ([5, 0, 1_048_000, 1999, 65_535], [3, 0, 575, 4, 2], 575), ([7, 130, 2000, 99_999, 0], [1, 0, 1, 1, 1], 1)],
    ids=["first token", "uneven prompts and an empty row", "a row that rests"],
)
def test_positions_count_on_per_row(start, count, s, device, hostile, judge):
    b = len(start)
    starts, counts = (hostile.packed(torch.tensor(v, dtype=I32)) for v in (start, count))
    position, row = hostile.poisoned((b * s,), I32), hostile.poisoned((b * s,), I32)
    ops.token_positions(device, starts, counts, position, row)
    ops.advance(device, starts, counts)
    judge("token_positions", "position", position, exact=True,
          reference=lambda: torch.tensor([start[r] + i if i < count[r] else -1 for r in range(b) for i in range(s)], dtype=I32))  # fmt: skip
    judge("token_positions", "row", row, exact=True, reference=lambda: torch.arange(b, dtype=I32).repeat_interleave(s))
    judge("token_positions", "advance", starts, exact=True, reference=lambda: torch.tensor(start, dtype=I32) + torch.tensor(count, dtype=I32))


@ROWS
@pytest.mark.parametrize(("n", "D", "variant"), [(4, 96, "naive"), (4, 96, "rows"), (1, 1032, "rows"), (2, 161, "naive")], ids=["4 streams", "4 streams by rows", "1 stream over blocks", "2 streams of odd width"])
def test_embed_copies_the_row_into_every_stream(rows, n, D, variant, device, hostile, judge):
    vocab = 37
    weight = hostile.bf16((vocab, D), seed=1, packed=True)
    tokens = hostile.packed(torch.randint(vocab, (rows,), generator=generator(2)))
    tokens[-1] = vocab - 1
    position = hostile.packed(positions_with_pads(rows))
    X = hostile.poisoned((rows, n, D), BF16)
    ops.embed(device, tokens, weight, position, X, variant)
    real = position.cpu() >= 0
    judge("embed", f"{rows} rows, {n} x {D}", X.cpu()[real], exact=True,
          reference=lambda: weight.cpu()[tokens.cpu()[real]][:, None].expand(-1, n, -1))  # fmt: skip
    assert X.cpu()[~real].isnan().all(), "a pad's rows were written"


# ---- norm, rotation, rounding ----


@ROWS
@pytest.mark.parametrize("variant", ["naive", "group", "warp", "block"])
# 96 and 512 as in checkpoints, 100 and 161 break 16-byte loads, 2304 takes several rounds of a block.
@pytest.mark.parametrize("dim", [96, 100, 161, 512, 2304], ids=lambda dim: f"dim {dim}")
def test_rms_norm(rows, dim, variant, device, hostile, judge):
    x, weight = hostile.bf16((rows, dim), seed=3), hostile.f32((dim,), seed=4)
    out = hostile.poisoned((rows, dim), BF16)
    ops.rms_norm(device, x, weight, out, EPS, variant=variant)
    compute = lambda sums: ref.rms_norm(x.cpu().float(), weight.cpu(), EPS, sums)  # noqa: E731
    judge("rms_norm", f"{variant}, {rows} x {dim}", out, reference=lambda: compute(Sums()), twins=rounded_twins(compute))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4], ids=["below eps", "near one", "large"])
def test_rms_norm_of_heads_has_no_weight_and_works_in_place(scale, device, hostile, judge):
    x = hostile.bf16((39, 128), seed=5, scale=scale)
    before = x.cpu().float()
    ops.rms_norm(device, x, None, x, EPS)
    compute = lambda sums: ref.rms_norm(before, None, EPS, sums)  # noqa: E731
    judge("rms_norm", f"in place, scale {scale:g}", x, reference=lambda: compute(Sums()), twins=rounded_twins(compute))


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize(("heads", "dim", "r"), [(1, 96, 32), (9, 128, 64), (3, 130, 66)], ids=["1 head", "9 heads", "odd widths"])
def test_rope_turns_adjacent_pairs_at_any_position(heads, dim, r, inverse, device, hostile, judge):
    rows = 29
    x, position = hostile.bf16((rows, heads, dim), seed=6), hostile.packed(positions_with_pads(rows))
    inv_freq = hostile.packed(ref.yarn_frequencies(r, 160_000.0, 16.0, 65_536, 32.0, 1.0))
    before = x.cpu().float()
    ops.rope(device, x, position, inv_freq, inverse)
    real = position.cpu() >= 0

    def compute() -> Tensor:
        cos, sin = ref.rope_angles(position.cpu(), inv_freq.cpu())
        return ref.rope(before, cos[:, None], sin[:, None], inverse)[real]

    case = f"{heads} x {dim}, r {r}, {'back' if inverse else 'forward'}"
    after = x.cpu().float()
    judge("rope", case, after[real], reference=compute, twins=[lambda: compute().bfloat16().float()])
    judge("rope", f"{case}: the other dims", after[..., :-r], exact=True, reference=lambda: before[..., :-r])
    judge("rope", f"{case}: pads", after[~real], exact=True, reference=lambda: before[~real])


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "back"])
def test_rope_does_not_round_its_angles(inverse, device, hostile, judge):
    """The first of each pair is a cos - b sin with b chosen so that it cancels: what is left shows any rounding of cos or sin."""
    rows, heads, r = 29, 3, 64
    position = hostile.packed(1 + 36_157 * torch.arange(rows, dtype=I32))
    inv_freq = hostile.packed(ref.rope_frequencies(r, 10_000.0))
    cos, sin = (t[:, None] for t in ref.rope_angles(position.cpu(), inv_freq.cpu()))
    sin = -sin if inverse else sin
    usable = (cos.abs() > 0.05) & (sin.abs() > 0.05)
    first = hostile.f32((rows, heads, r // 2), seed=7, lo=1.0, hi=2.0).cpu().bfloat16().float() * usable
    second = torch.where(usable, first * cos / torch.where(usable, sin, 1.0), 0.0)
    x = hostile.strided(torch.stack((first, second), -1).flatten(-2).bfloat16())
    before = x.cpu().float()
    ops.rope(device, x, position, inv_freq, inverse)

    def compute() -> Tensor:
        first_of_pair: Tensor = before[..., 0::2] * cos - before[..., 1::2] * sin
        return first_of_pair

    judge("rope", f"cancelling pairs, {'back' if inverse else 'forward'}", x.cpu().float()[..., 0::2], reference=compute,
          twins=[lambda: compute().bfloat16().float()])  # fmt: skip


def awkward_for_e4m3(rows: int, dim: int, seed: int) -> Tensor:
    """bf16 rows whose block maxima sit at, just above and just below 448 * 2^n, at the floor 1e-4, and at zero."""
    x = torch.randn(rows, dim, generator=generator(seed)).clamp(-3, 3)
    size = torch.exp2(torch.randint(-40, 40, (rows, 1), generator=generator(seed + 1)).float())
    x = x / 4 * size * 448  # |x| < 448 * size
    kind = torch.arange(rows) % 6
    peak = torch.tensor([1.75, 1.75 + 2**-7, 1.75 - 2**-7, -1.75, -1.75 - 2**-7, 0.0])[kind]  # the bf16 neighbours of 448
    x[:, 5::32] = peak[:, None] * 256 * size  # one in every block of 32 or more
    x[kind == 5] *= (torch.arange(rows)[kind == 5] % 4 > 1)[:, None]  # some rows of zeros
    x[:, 7::32] = size * 448 / 2**15  # subnormal codes and ties between them
    x[:, 9::32] = size * 448 / 2**17 * 1.5
    x[:, 11::32] = -0.0
    return x.bfloat16()


@ROWS
@pytest.mark.parametrize("variant", ["naive", "group"])
@pytest.mark.parametrize(
    ("dim", "block"), [(96, 128), (160, 128), (512, 128), (130, 64), (256, 32)],
    ids=["96 by 128", "160 by 128", "512 by 128", "130 by 64", "256 by 32"],
)  # fmt: skip
def test_act_quant_rounds_once_with_exact_scales(rows, dim, block, variant, device, hostile, judge):
    x = hostile.strided(awkward_for_e4m3(rows, dim, seed=8))
    out = hostile.poisoned((rows, dim), BF16)
    ops.act_quant(device, x, out, block, variant=variant)
    judge("act_quant", f"{variant}, {rows} x {dim}, block {block}", out.cpu().float(), exact=True,
          reference=lambda: formats.round_e4m3_blocks(x.cpu().float(), block))  # fmt: skip


def test_act_quant_keeps_every_e4m3_value_at_every_scale(device, hostile, judge):
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=U8)
    values = formats.decode_e4m3(codes)  # 254 values; 448 in each block fixes the scale
    x = torch.stack([torch.cat((values[:127], values[-127:], torch.tensor([448.0, -448.0]))) * 2.0**n for n in range(-20, 100)])
    x = torch.cat((x[:, :127], x[:, 254:255], x[:, 127:254], x[:, 255:]), 1).bfloat16()  # a 448 in both blocks of 128
    out = hostile.poisoned(tuple(x.shape), BF16)
    ops.act_quant(device, hostile.strided(x), out)
    judge("act_quant", "fixed points", out, exact=True, reference=lambda: x)


def test_act_quant_shows_infinities_and_nan(device, hostile, judge):
    x = torch.ones(3, 256).bfloat16()
    x[0, 3], x[1, 200], x[2, 130] = torch.inf, torch.nan, -torch.inf
    out = hostile.poisoned((3, 256), BF16)
    out.zero_()
    ops.act_quant(device, hostile.strided(x), out)
    judge("act_quant", "not finite", out.cpu().isnan(), exact=True,
          reference=lambda: formats.round_e4m3_blocks(x.float(), 128).isnan())  # fmt: skip
    assert out.cpu().isnan().sum() == 3 * 128


# ---- linears ----

# (N, K): K below, between and above the 128 of a scale block, N no multiple of a tile of 64, of 16 or of 4.
SIZES = pytest.mark.parametrize(
    ("K", "N"), [(96, 64), (160, 100), (256, 203), (512, 66), (131, 37)], ids=["96 to 64", "160 to 100", "256 to 203", "512 to 66", "131 to 37"]
)


def fp8_weight(hostile, rows: int, K: int, seed: int, exponents: tuple[int, int] = (118, 131)) -> tuple[Tensor, Tensor]:
    """Every e4m3 code but NaN, subnormals among them, and scales of a wide range."""
    code = torch.randint(0, 254, (rows, K), generator=generator(seed)).to(U8)
    code = code + (code >= 0x7F).to(U8)  # skips 0x7f; 0xff is beyond the range
    scale = torch.randint(*exponents, (-(-rows // 128), -(-K // 128)), generator=generator(seed + 1)).to(U8)
    return hostile.packed(code), hostile.packed(scale)


@VARIANTS
@ROWS
@SIZES
def test_linear_fp8(K, N, rows, variant, device, hostile, judge):
    x = hostile.bf16((rows, K), seed=10)
    weight, scale = fp8_weight(hostile, N, K, seed=11)
    out = hostile.poisoned((rows, N), BF16)
    ops.linear_fp8(device, x, weight, scale, out, variant=variant)
    compute = lambda sums: sums.linear(x.cpu().float(), formats.decode_fp8_weight(weight.cpu(), scale.cpu()))  # noqa: E731
    judge("linear_fp8", f"{variant}, {rows} x {K} -> {N}", out, reference=lambda: compute(Sums()), twins=rounded_twins(compute))


@VARIANTS
# 96 and 77 rows a group: groups begin inside a scale block of 128 rows, and a block begins at an odd row of a group.
@pytest.mark.parametrize(
    ("groups", "N", "K"), [(2, 128, 256), (3, 96, 160), (3, 77, 136)],
    ids=["groups of whole blocks", "groups across blocks", "groups of odd size"],
)  # fmt: skip
def test_linear_fp8_keeps_output_groups_apart(groups, N, K, variant, device, hostile, judge):
    rows = 13
    x = hostile.bf16((rows, groups * K), seed=12)
    weight, scale = fp8_weight(hostile, groups * N, K, seed=13)
    out = hostile.poisoned((rows, groups * N), BF16)
    ops.linear_fp8(device, x, weight, scale, out, groups=groups, variant=variant)

    def compute(sums: Sums) -> Tensor:
        w = formats.decode_fp8_weight(weight.cpu(), scale.cpu()).view(groups, N, K)
        return torch.cat([sums.linear(x.cpu().float()[:, g * K : (g + 1) * K], w[g]) for g in range(groups)], -1)

    judge("linear_fp8", f"{variant}, {groups} groups", out, reference=lambda: compute(Sums()), twins=rounded_twins(compute))


@VARIANTS
# 0 is a denormal, 1 to 3 leave bf16's exact range for subnormal codes, 134 is 128.0, 240 is near the end of fp32.
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 127, 134, 240], ids=lambda e: f"scale 2^{e - 127}")
def test_linear_fp8_weights_are_exact_at_any_scale(exponent, variant, device, hostile, judge):
    rows, N, K = 13, 40, 200
    x = hostile.bf16((rows, K), seed=14, scale=2.0 ** max(-110, min(110, 127 - exponent)))
    weight, scale = fp8_weight(hostile, N, K, seed=15, exponents=(exponent, exponent + 1))
    weight[:, 0::2] &= 0x87  # subnormal codes in every second column
    out = hostile.poisoned((rows, N), BF16)
    ops.linear_fp8(device, x, weight, scale, out, variant=variant)
    compute = lambda sums: sums.linear(x.cpu().double(), formats.decode_fp8_weight(weight.cpu(), scale.cpu()).double())  # noqa: E731
    judge("linear_fp8", f"{variant}, scale byte {exponent}", out, reference=lambda: compute(Sums()), twins=rounded_twins(compute))


@VARIANTS
@ROWS
@SIZES
def test_linear_bf16(K, N, rows, variant, device, hostile, judge):
    x, weight = hostile.bf16((rows, K), seed=16), hostile.bf16((N, K), seed=17, packed=True)
    compute = lambda sums: sums.linear(x.cpu().float(), weight.cpu().float())  # noqa: E731
    case = f"{variant}, {rows} x {K} -> {N}"
    out = hostile.poisoned((rows, N), F32)
    ops.linear_bf16(device, x, weight, out, variant=variant)
    judge("linear_fp32", f"{case} f32", out, reference=lambda: compute(Sums()), twins=exact_twins(compute))
    half = hostile.poisoned((rows, N), BF16)
    ops.linear_bf16(device, x, weight, half, variant=variant)
    judge("linear_bf16", f"{case} bf16", half, exact=True, reference=lambda: out.cpu().bfloat16())


@VARIANTS
def test_linear_bf16_rounds_before_it_scales(variant, device, hostile, judge):
    x, weight = hostile.bf16((13, 160), seed=18), hostile.bf16((24, 160), seed=19, packed=True)
    plain, out = hostile.poisoned((13, 24), F32), hostile.poisoned((13, 24), F32)
    factor = 128**-0.5 * 3**-0.5
    ops.linear_bf16(device, x, weight, plain, variant=variant)
    ops.linear_bf16(device, x, weight, out, scale=factor, round_bf16=True, variant=variant)
    judge("linear_bf16", f"{variant}, rounded first", out, exact=True,
          reference=lambda: plain.cpu().bfloat16().float() * torch.tensor(factor, dtype=F32))  # fmt: skip


@VARIANTS
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_linear_gives_a_token_the_same_bits_in_any_company(kind, variant, device, hostile, judge):
    rows, N, K = 70, 72, 160
    x = hostile.bf16((rows, K), seed=20)
    linear: Callable[..., None] = ops.linear_fp8 if kind == "fp8" else ops.linear_bf16
    weights = fp8_weight(hostile, N, K, seed=21) if kind == "fp8" else (hostile.bf16((N, K), seed=21, packed=True),)
    order = torch.randperm(rows, generator=generator(22))
    out, shuffled, alone = (hostile.poisoned((n, N), BF16) for n in (rows, rows, 1))
    linear(device, x, *weights, out, variant=variant)
    linear(device, hostile.strided(x.cpu()[order]), *weights, shuffled, variant=variant)
    linear(device, x[rows - 1 :], *weights, alone, variant=variant)
    judge(f"linear_{kind}", f"{variant}, shuffled rows", shuffled, exact=True, reference=lambda: out.cpu()[order])
    judge(f"linear_{kind}", f"{variant}, one row alone", alone, exact=True, reference=lambda: out.cpu()[rows - 1 :])


def shifted(hostile, x: Tensor) -> Tensor:
    """The same rows at addresses that are no multiple of 16 bytes."""
    moved: Tensor = hostile.strided(torch.nn.functional.pad(x.cpu(), (1, 0)))[:, 1:]
    return moved


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
# 1024 is whole steps of two 128-byte parts of four slices, 1088 and 1216 leave chunks; 64 and 40 rows of w, in whole tiles and not.
@pytest.mark.parametrize(("K", "N"), [(1024, 64), (1088, 40), (1216, 24)])
def test_linear_stream_has_the_same_bits_for_any_alignment_and_rows_of_a_warp(K, N, kind, device, hostile, judge):
    rows = 11
    x = hostile.packed(hostile.bf16((rows, K), seed=24).cpu())
    linear: Callable[..., None] = ops.linear_fp8 if kind == "fp8" else ops.linear_bf16
    weights = fp8_weight(hostile, N, K, seed=25) if kind == "fp8" else (hostile.bf16((N, K), seed=25, packed=True),)
    for slices in (1, 2, 8):
        results = []
        for variant, given in (("stream8", x), ("stream16", x), ("stream16", shifted(hostile, x))):
            results.append(hostile.poisoned((rows, N), BF16))
            linear(device, given, *weights, results[-1], variant=variant, slices=slices)
        compute = lambda sums: sums.linear(x.cpu().float(), formats.decode_fp8_weight(*(w.cpu() for w in weights)) if kind == "fp8" else weights[0].cpu().float())  # noqa: E731
        judge(f"linear_{kind}", f"{K} -> {N} in {slices} slices", results[0], reference=lambda compute=compute: compute(Sums()), twins=rounded_twins(compute))
        for what, got in zip(("16 rows a warp", "not aligned"), results[1:], strict=True):
            judge(f"linear_{kind}", f"{K} -> {N} in {slices} slices, {what}", got, exact=True, reference=lambda results=results: results[0])


TILES = pytest.mark.parametrize("variant", ["tiles128", "tiles256", "wgmma128", "wgmma256"])


def hopper(variant: str, device) -> None:
    """Skips wgmma on another GPU than Hopper; the CPU device emulates it."""
    if variant.startswith("wgmma") and device.name == "cuda" and device.arch != "sm_90a":
        pytest.skip("wgmma is on sm_90a only")


def tile_cases(names: str, *shapes: tuple[int, ...], variants: tuple[str, ...] = ("tiles128", "tiles256", "wgmma128", "wgmma256")) -> pytest.MarkDecorator:
    """Every variant with every shape, K first, that it takes: wgmma wants K in multiples of 128."""
    return pytest.mark.parametrize(f"variant,{names}", [(v, *shape) for v in variants for shape in shapes if shape[0] % 128 == 0 or v.startswith("tiles")])


def apart(hostile, x: Tensor) -> Tensor:
    """The same rows, apart in NaN memory at multiples of 16 bytes, as tiles need them."""
    rows, width = x.shape
    memory = hostile.strided(torch.cat((x.cpu(), torch.full((rows, 24 - width % 8), torch.nan, dtype=x.dtype)), 1))
    held = torch.full((rows, width - width % 8 + 24), torch.nan, dtype=x.dtype, device=memory.device)
    held[:, :width] = memory[:, :width]
    return held[:, :width]


# K of 1 to 10 steps of 64, across scale blocks; N below a tile, across tiles and odd; groups that begin in the middle of a scale block.
@tile_cases("K,N,groups", (64, 40, 1), (192, 201, 1), (576, 300, 1), (640, 300, 1), (192, 64, 3), (128, 192, 2))
@pytest.mark.parametrize("rows", [1, 129, 300])
def test_linear_fp8_tiles(K, N, groups, rows, variant, device, hostile, judge):
    hopper(variant, device)
    x = apart(hostile, hostile.bf16((rows, groups * K), seed=26))
    weight, scale = fp8_weight(hostile, groups * N, K, seed=27)
    out = hostile.poisoned((rows, groups * N), BF16)
    ops.linear_fp8(device, x, weight, scale, out, groups=groups, variant=variant)

    def compute(sums: Sums) -> Tensor:
        w = formats.decode_fp8_weight(weight.cpu(), scale.cpu()).view(groups, N, K)
        return torch.cat([sums.linear(x.cpu().float()[:, g * K : (g + 1) * K], w[g]) for g in range(groups)], -1)

    judge("linear_fp8", f"{variant}, {rows} x {K} -> {groups} x {N}", out, reference=lambda: compute(Sums()), twins=rounded_twins(compute))


@tile_cases("K,N", (64, 40), (192, 201), (576, 300), (640, 300))
@pytest.mark.parametrize("rows", [1, 129, 300])
def test_linear_bf16_tiles(K, N, rows, variant, device, hostile, judge):
    hopper(variant, device)
    x, weight = apart(hostile, hostile.bf16((rows, K), seed=28)), hostile.bf16((N, K), seed=29, packed=True)
    out, half, scaled = hostile.poisoned((rows, N), F32), hostile.poisoned((rows, N), BF16), hostile.poisoned((rows, N), F32)
    ops.linear_bf16(device, x, weight, out, variant=variant)
    ops.linear_bf16(device, x, weight, half, variant=variant)
    ops.linear_bf16(device, x, weight, scaled, scale=0.3, round_bf16=True, variant=variant)
    compute = lambda sums: sums.linear(x.cpu().float(), weight.cpu().float())  # noqa: E731
    case = f"{variant}, {rows} x {K} -> {N}"
    judge("linear_fp32", f"{case} f32", out, reference=lambda: compute(Sums()), twins=exact_twins(compute))
    judge("linear_bf16", f"{case} bf16", half, exact=True, reference=lambda: out.cpu().bfloat16())
    judge("linear_bf16", f"{case} rounded first", scaled, exact=True, reference=lambda: out.cpu().bfloat16().float() * torch.tensor(0.3, dtype=F32))


@TILES
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 127, 134, 240], ids=lambda e: f"scale 2^{e - 127}")
def test_linear_fp8_tiles_are_exact_at_any_scale(exponent, variant, device, hostile, judge):
    hopper(variant, device)
    rows, N, K = 13, 40, 256
    x = apart(hostile, hostile.bf16((rows, K), seed=14, scale=2.0 ** max(-110, min(110, 127 - exponent))))
    weight, scale = fp8_weight(hostile, N, K, seed=15, exponents=(exponent, exponent + 12))
    weight[:, 0::2] &= 0x87  # subnormal codes in every second column
    out = hostile.poisoned((rows, N), BF16)
    ops.linear_fp8(device, x, weight, scale, out, variant=variant)
    compute = lambda sums: sums.linear(x.cpu().double(), formats.decode_fp8_weight(weight.cpu(), scale.cpu()).double())  # noqa: E731
    judge("linear_fp8", f"{variant}, scale byte {exponent}", out, reference=lambda: compute(Sums()), twins=rounded_twins(compute))


@TILES
def test_linear_fp8_tiles_read_every_code(variant, device, hostile, judge):
    """Both NaN codes among them, in the second of two scale blocks."""
    N, K = 256, 256
    hopper(variant, device)
    for column in (0, 5, 190):
        weight = torch.zeros(N, K, dtype=U8)
        weight[:, column] = torch.arange(N).to(U8)
        scale = torch.tensor([[127, 126], [124, 130]], dtype=U8)
        x = torch.zeros(9, K)
        x[:, column] = 1.0
        out = hostile.poisoned((9, N), BF16)
        ops.linear_fp8(device, apart(hostile, x.bfloat16()), hostile.packed(weight), hostile.packed(scale), out, variant=variant)
        judge("linear_fp8", f"{variant}: every code, column {column}", out, exact=True,
              reference=lambda weight=weight, scale=scale, column=column: formats.decode_fp8_weight(weight, scale)[:, column].expand(9, -1))  # fmt: skip


@pytest.mark.parametrize("tiles", ["tiles", "wgmma"])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_linear_tiles_give_a_token_the_same_bits_in_any_company_and_tile(kind, tiles, device, hostile, judge):
    hopper(tiles, device)
    rows, N, K = 141, 264, 256
    x = apart(hostile, hostile.bf16((rows, K), seed=20))
    linear: Callable[..., None] = ops.linear_fp8 if kind == "fp8" else ops.linear_bf16
    weights = fp8_weight(hostile, N, K, seed=21) if kind == "fp8" else (hostile.bf16((N, K), seed=21, packed=True),)
    order = torch.randperm(rows, generator=generator(22))
    out, wide, shuffled, alone = (hostile.poisoned((n, N), BF16) for n in (rows, rows, rows, 1))
    linear(device, x, *weights, out, variant=f"{tiles}128")
    linear(device, x, *weights, wide, variant=f"{tiles}256")
    linear(device, apart(hostile, x.cpu()[order]), *weights, shuffled, variant=f"{tiles}128")
    linear(device, x[rows - 1 :], *weights, alone, variant=tiles)
    judge(f"linear_{kind}", f"{tiles}256 as {tiles}128", wide, exact=True, reference=lambda: out.cpu())
    judge(f"linear_{kind}", f"{tiles}, shuffled rows", shuffled, exact=True, reference=lambda: out.cpu()[order])
    judge(f"linear_{kind}", f"{tiles}, one row alone", alone, exact=True, reference=lambda: out.cpu()[rows - 1 :])


# ---- router ----


@ROWS
@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("E", [8, 37, 384], ids=lambda E: f"{E} experts")
def test_gate_scores(rows, scoring, E, device, hostile, judge):
    logits = hostile.f32((rows, E), seed=30, scale=3.0, packed=True)
    logits[0, :6] = torch.tensor([0.0, 20.5, -20.5, 95.0, -60.0, 1e-6])  # past the ends of exp, and around 20
    logits[1:2] -= 25.0  # a row where exp is all there is
    scores = hostile.poisoned((rows, E), F32)
    ops.gate_scores(device, logits, scoring, scores)
    x = logits.cpu()
    twins = exact_twins(lambda sums: ref.gate_scores(x, scoring, sums))
    judge("gate_scores", f"{scoring}, {rows} x {E}", scores, reference=lambda: ref.gate_scores(x.double(), scoring), twins=twins)


def tied_scores(rows: int, E: int) -> Tensor:
    """Scores on a coarse grid, so that nearly every choice has ties; the first row is all one value."""
    scores = torch.randint(1, 5, (rows, E), generator=generator(31)).float() / 4
    scores[0] = 0.5
    return scores


@ROWS
@pytest.mark.parametrize("variant", ["naive", "warp"])
@pytest.mark.parametrize("biased", [True, False], ids=["with bias", "without bias"])
@pytest.mark.parametrize(("E", "k"), [(8, 2), (6, 6), (37, 3), (384, 8)], ids=["2 of 8", "6 of 6", "3 of 37", "8 of 384"])
def test_gate_chooses_the_lower_expert_of_a_tie(rows, E, k, biased, variant, device, hostile, judge):
    scores = hostile.packed(tied_scores(rows, E))
    bias = hostile.packed(torch.randint(-4, 5, (E,), generator=generator(32)).float() / 4) if biased else None
    position, tokens = hostile.packed(positions_with_pads(rows)), hostile.packed(torch.zeros(rows, dtype=torch.int64))
    experts = hostile.poisoned((rows, k), I32)
    ops.gate_choose(device, scores, bias, None, tokens, position, experts, variant=variant)

    def choose() -> Tensor:
        chosen = ref.gate_choose(scores.cpu(), torch.zeros(E) if bias is None else bias.cpu(), k)
        return chosen.masked_fill(position.cpu()[:, None] < 0, -1).to(I32)

    judge("gate_choose", f"{variant}, {rows} x {E}, k {k}", experts, exact=True, reference=choose)


@ROWS
@pytest.mark.parametrize("variant", ["naive", "warp"])
def test_gate_takes_hashed_experts_from_the_token(rows, variant, device, hostile, judge):
    vocab, E, k = 53, 384, 6  # ids past 256 do not survive bf16
    table = torch.stack([torch.randperm(E, generator=generator(33 + v))[:k] for v in range(vocab)]).to(I32)
    tokens = torch.randint(vocab, (rows,), generator=generator(34))
    tokens[-1] = vocab - 1
    position = hostile.packed(positions_with_pads(rows))
    experts = hostile.poisoned((rows, k), I32)
    scores = hostile.f32((rows, E), seed=35, packed=True)  # not what decides here
    ops.gate_choose(device, scores, None, hostile.packed(table), hostile.packed(tokens), position, experts, variant=variant)
    judge("gate_choose", f"hash, {variant}, {rows} rows", experts, exact=True,
          reference=lambda: table[tokens].sort(-1).values.masked_fill(position.cpu()[:, None] < 0, -1))  # fmt: skip


@ROWS
@pytest.mark.parametrize("normalise", [True, False], ids=["over their sum", "as they are"])
def test_gate_weights_come_from_the_scores_without_bias(rows, normalise, device, hostile, judge):
    E, k = 37, 6
    scores = hostile.f32((rows, E), seed=36, lo=0.01, hi=3.0, packed=True)
    chosen = torch.stack([torch.randperm(E, generator=generator(37 + t))[:k].sort().values for t in range(rows)])
    pad = positions_with_pads(rows) < 0
    weights = hostile.poisoned((rows, k), F32)
    ops.gate_weights(device, scores, hostile.packed(chosen.masked_fill(pad[:, None], -1).to(I32)), weights, normalise, 1.5)
    compute = lambda sums, s: ref.gate_weights(s, chosen, normalise, 1.5, sums)[~pad]  # noqa: E731
    judge("gate_weights", f"{rows} rows, {'normalised' if normalise else 'plain'}", weights.cpu()[~pad],
          reference=lambda: compute(Sums(), scores.cpu().double()), twins=exact_twins(lambda sums: compute(sums, scores.cpu())))  # fmt: skip
    judge("gate_weights", f"{rows} rows: no expert weighs 0", torch.cat((weights.cpu()[pad].flatten(), torch.zeros(1))), exact=True,
          reference=lambda: torch.zeros(int(pad.sum()) * k + 1))  # fmt: skip


# ---- experts ----


def fp4_weight(hostile, E: int, N: int, K: int, seed: int, exponents: tuple[int, int] = (120, 130)) -> tuple[Tensor, Tensor]:
    """All 256 pairs of codes, and scales that differ from block to block."""
    packed = torch.randint(0, 256, (E, N, K // 2), generator=generator(seed)).to(U8)
    scale = torch.randint(*exponents, (E, N, K // 32), generator=generator(seed + 1)).to(U8)
    return hostile.packed(packed), hostile.packed(scale)


def lopsided_experts(rows: int, E: int, k: int) -> Tensor:
    """[rows, k] ascending: expert 0 in every row (more than a tile of it), expert 1 in none, pads have none."""
    experts = torch.stack([torch.cat((torch.zeros(1, dtype=torch.int64), 2 + torch.randperm(E - 2, generator=generator(40 + t))[: k - 1])) for t in range(rows)])
    return experts.sort(-1).values.masked_fill(positions_with_pads(rows)[:, None] < 0, -1).to(I32)


def expert_linear(x: Tensor, weight: Tensor, scale: Tensor, experts: Tensor, sums: Sums) -> Tensor:
    """x [T, k, K] -> [T, k, N], NaN where there is no expert."""
    out = torch.full((*experts.shape, weight.shape[1]), torch.nan)
    for e in range(weight.shape[0]):
        at = experts == e
        if at.any():
            out[at] = sums.linear(x[at], formats.decode_fp4_weight(weight[e], scale[e]))
    return out


# (D, I): multiples of 32 that are no multiples of 64 or of 128.
WIDTHS = pytest.mark.parametrize(("D", "width"), [(96, 64), (256, 160), (160, 96)], ids=["96 and 64", "256 and 160", "160 and 96"])


@VARIANTS
@ROWS
@WIDTHS
def test_experts_up(D, width, rows, variant, device, hostile, judge):
    E, k = 7, 3
    experts = lopsided_experts(rows, E, k)
    x = hostile.bf16((rows, D), seed=41)
    w1, w3 = fp4_weight(hostile, E, width, D, seed=42), fp4_weight(hostile, E, width, D, seed=44)
    gate, up = hostile.poisoned((rows, k, width), BF16), hostile.poisoned((rows, k, width), BF16)
    scratch = hostile.poisoned((ops.experts_scratch(rows, k, E),), I32)
    ops.experts_up(device, x, hostile.packed(experts), *w1, *w3, gate, up, variant=variant, scratch=scratch)
    real, rows_of_slots = experts >= 0, x.cpu().float()[:, None].expand(-1, k, -1)
    for name, got, (w, s) in (("w1", gate, w1), ("w3", up, w3)):
        compute = lambda sums, w=w, s=s: expert_linear(rows_of_slots, w.cpu(), s.cpu(), experts, sums)[real]  # noqa: E731
        judge("experts_up", f"{name}, {variant}, {rows} x {D} -> {width}", got.cpu()[real],
              reference=lambda compute=compute: compute(Sums()), twins=rounded_twins(compute))  # fmt: skip
        assert got.cpu()[~real].isnan().all(), "a slot without an expert was written"


@VARIANTS
@ROWS
@WIDTHS
def test_experts_down(D, width, rows, variant, device, hostile, judge):
    E, k = 7, 3
    experts = lopsided_experts(rows, E, k)
    h = hostile.bf16((rows, k, width), seed=46, packed=True)
    w2 = fp4_weight(hostile, E, D, width, seed=47)
    out = hostile.poisoned((rows, k, D), BF16)
    scratch = hostile.poisoned((ops.experts_scratch(rows, k, E),), I32)
    ops.experts_down(device, h, hostile.packed(experts), *w2, out, variant=variant, scratch=scratch)
    real = experts >= 0
    compute = lambda sums: expert_linear(h.cpu().float(), w2[0].cpu(), w2[1].cpu(), experts, sums)[real]  # noqa: E731
    judge("experts_down", f"{variant}, {rows} x {width} -> {D}", out.cpu()[real], reference=lambda: compute(Sums()), twins=rounded_twins(compute))
    assert out.cpu()[~real].isnan().all(), "a slot without an expert was written"


@VARIANTS
# 0 is a denormal scale, 134 is 128.0, 252 the largest whose weights are finite.
@pytest.mark.parametrize("exponent", [0, 1, 127, 134, 252], ids=lambda e: f"scale 2^{e - 127}")
def test_experts_weights_are_exact_at_any_scale(exponent, variant, device, hostile, judge):
    rows, E, k, D, width = 13, 4, 2, 96, 40
    experts = lopsided_experts(rows, E, k)
    x = hostile.bf16((rows, D), seed=48, scale=2.0 ** max(-120, min(120, 127 - exponent)))
    w1 = fp4_weight(hostile, E, width, D, seed=49, exponents=(exponent, exponent + 1))
    gate, up = hostile.poisoned((rows, k, width), BF16), hostile.poisoned((rows, k, width), BF16)
    scratch = hostile.poisoned((ops.experts_scratch(rows, k, E),), I32)
    ops.experts_up(device, x, hostile.packed(experts), *w1, *w1, gate, up, variant=variant, scratch=scratch)
    real, rows_of_slots = experts >= 0, x.cpu().float()[:, None].expand(-1, k, -1)
    compute = lambda sums: expert_linear(rows_of_slots, w1[0].cpu(), w1[1].cpu(), experts, sums)[real]  # noqa: E731
    judge("experts_up", f"{variant}, scale byte {exponent}", gate.cpu()[real], reference=lambda: compute(Sums()), twins=rounded_twins(compute))
    judge("experts_up", f"{variant}, scale byte {exponent}: same weights, same bits", up.cpu()[real], exact=True, reference=lambda: gate.cpu()[real])


@VARIANTS
def test_experts_give_a_token_the_same_bits_in_any_company(variant, device, hostile, judge):
    rows, E, k, D, width = 70, 5, 2, 96, 72
    experts, x = lopsided_experts(rows, E, k), hostile.bf16((rows, D), seed=50)
    w1, w3 = fp4_weight(hostile, E, width, D, seed=51), fp4_weight(hostile, E, width, D, seed=53)
    scratch = hostile.poisoned((ops.experts_scratch(rows, k, E),), I32)
    results = []
    order = torch.randperm(rows, generator=generator(54))
    for tokens in (torch.arange(rows), order, torch.arange(rows - 1, rows)):
        gate, up = (hostile.poisoned((len(tokens), k, width), BF16) for _ in range(2))
        ops.experts_up(device, hostile.strided(x.cpu()[tokens]), hostile.packed(experts[tokens]), *w1, *w3, gate, up, variant=variant, scratch=scratch)
        results.append(gate.cpu().nan_to_num(7.0))
    judge("experts_up", f"{variant}, shuffled rows", results[1], exact=True, reference=lambda: results[0][order])
    judge("experts_up", f"{variant}, one row alone", results[2], exact=True, reference=lambda: results[0][rows - 1 :])


@pytest.mark.parametrize("exponents", [(120, 130), (126, 253)], ids=["scales as in weights", "scales beyond 2"])
@pytest.mark.parametrize(("K", "N"), [(1024, 64), (1152, 40)])
def test_experts_stream_has_the_same_bits_for_any_alignment_and_rows_of_a_warp(K, N, exponents, device, hostile, judge):
    rows, E, k = 21, 4, 2
    experts, x = lopsided_experts(rows, E, k), hostile.packed(hostile.bf16((rows, K), seed=55, scale=2.0 ** (127 - sum(exponents) // 2)).cpu())
    w1, w3 = fp4_weight(hostile, E, N, K, seed=56, exponents=exponents), fp4_weight(hostile, E, N, K, seed=58, exponents=exponents)
    real = experts >= 0
    for slices in (1, 4):
        results = []
        for variant, given in (("stream32", x), ("stream16", x), ("stream32", shifted(hostile, x))):
            gate, up = (hostile.poisoned((rows, k, N), BF16) for _ in range(2))
            ops.experts_up(device, given, hostile.packed(experts), *w1, *w3, gate, up, variant=variant, slices=slices)
            results.append(torch.stack((gate.cpu()[real], up.cpu()[real])))
        for at, w in enumerate((w1, w3)):
            compute = lambda sums, w=w: expert_linear(x.cpu().float()[:, None].expand(-1, k, -1), w[0].cpu(), w[1].cpu(), experts, sums)[real]  # noqa: E731
            judge("experts_up", f"{K} -> {N} in {slices} slices", results[0][at], reference=lambda compute=compute: compute(Sums()), twins=rounded_twins(compute))
        for what, got in zip(("16 rows a warp", "not aligned"), results[1:], strict=True):
            judge("experts_up", f"{K} -> {N} in {slices} slices, {what}", got, exact=True, reference=lambda results=results: results[0])


@pytest.mark.parametrize("exponents", [(120, 130), (0, 3), (248, 253)], ids=["scales as in weights", "smallest scales", "largest scales"])
@tile_cases("K,N,rows", (64, 40, 1), (192, 129, 300), (320, 264, 33), (384, 136, 300), (128, 40, 1), variants=("tiles128", "tiles256", "wgmma128"))
def test_experts_tiles(rows, K, N, exponents, variant, device, hostile, judge):
    hopper(variant, device)
    E, k = 7, 3
    experts = lopsided_experts(rows, E, k)
    x = apart(hostile, hostile.bf16((rows, K), seed=41, scale=2.0 ** max(-120, min(120, 127 - exponents[0]))))
    w1, w3, w2 = (fp4_weight(hostile, E, N, K, seed=seed, exponents=exponents) for seed in (42, 44, 46))
    gate, up, down = (hostile.poisoned((rows, k, N), BF16) for _ in range(3))
    h = hostile.packed(x.cpu()[:, None].expand(-1, k, -1).flip(0).contiguous())
    scratch = hostile.poisoned((ops.experts_scratch(rows, k, E),), I32)
    ops.experts_up(device, x, hostile.packed(experts), *w1, *w3, gate, up, variant=variant, scratch=scratch)
    ops.experts_down(device, h, hostile.packed(experts), *w2, down, variant=variant, scratch=scratch)
    real, of_rows = experts >= 0, x.cpu().float()[:, None].expand(-1, k, -1)
    for name, operation, got, given, (w, s) in (("w1", "experts_up", gate, of_rows, w1), ("w3", "experts_up", up, of_rows, w3), ("w2", "experts_down", down, h.cpu().float(), w2)):
        compute = lambda sums, given=given, w=w, s=s: expert_linear(given, w.cpu(), s.cpu(), experts, sums)[real]  # noqa: E731
        judge(operation, f"{name}, {variant}, {rows} x {K} -> {N}", got.cpu()[real],
              reference=lambda compute=compute: compute(Sums()), twins=rounded_twins(compute))  # fmt: skip
        assert got.cpu()[~real].isnan().all(), "a slot without an expert was written"


@pytest.mark.parametrize("tiles", ["tiles", "wgmma"])
def test_experts_tiles_give_a_token_the_same_bits_in_any_company_and_tile(tiles, device, hostile, judge):
    hopper(tiles, device)
    rows, E, k, K, N = 150, 5, 2, 128, 136
    experts, x = lopsided_experts(rows, E, k), hostile.bf16((rows, K), seed=50)
    w1, w3 = fp4_weight(hostile, E, N, K, seed=51), fp4_weight(hostile, E, N, K, seed=53)
    scratch = hostile.poisoned((ops.experts_scratch(rows, k, E),), I32)
    results = []
    order = torch.randperm(rows, generator=generator(54))
    for tokens, variant in ((torch.arange(rows), "128"), (torch.arange(rows), "256" if tiles == "tiles" else ""), (order, "128"), (torch.arange(rows - 1, rows), "")):
        gate, up = (hostile.poisoned((len(tokens), k, N), BF16) for _ in range(2))
        ops.experts_up(device, apart(hostile, x.cpu()[tokens]), hostile.packed(experts[tokens]), *w1, *w3, gate, up, variant=tiles + variant, scratch=scratch)
        results.append(gate.cpu().nan_to_num(7.0))
    judge("experts_up", f"{tiles}256 as {tiles}128", results[1], exact=True, reference=lambda: results[0])
    judge("experts_up", f"{tiles}, shuffled rows", results[2], exact=True, reference=lambda: results[0][order])
    judge("experts_up", f"{tiles}, one row alone", results[3], exact=True, reference=lambda: results[0][rows - 1 :])


@pytest.mark.parametrize(("rows", "E", "k"), [(1, 3, 1), (700, 37, 3), (1500, 384, 6)])
def test_experts_order_lists_slots_by_expert(rows, E, k, device, hostile, judge):
    experts = torch.stack([torch.randperm(E, generator=generator(90 + t))[:k].sort().values for t in range(rows)]).masked_fill(positions_with_pads(rows)[:, None] < 0, -1).to(I32)
    slots, scratch = rows * k, hostile.poisoned((ops.experts_scratch(rows, k, E),), I32)
    device.launch("experts_tiles", "experts_order", (1,), (1024,), (hostile.packed(experts), scratch, slots, E), 4 * 33 * E)
    flat, plan = experts.flatten(), scratch.cpu()
    counts = torch.tensor([int((flat == e).sum()) for e in range(E)])
    starts = lambda n: torch.cat((torch.zeros(1, dtype=torch.int64), n.cumsum(0)))  # noqa: E731
    wanted = torch.cat([starts(-(-counts // 128)), starts(counts), *((flat == e).nonzero()[:, 0] for e in range(E))])
    judge("experts_up", f"tiles and slots by expert, {rows} x {k} of {E}", plan[: len(wanted)].long(), exact=True, reference=lambda: wanted)


LIMIT = 10.0


def past_the_limits(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """gate and up on all sides of +-10: gates far below -10, which stay, and at the limit itself."""
    gate = torch.randn(rows, width, generator=generator(60)) * 12
    up = torch.randn(rows, width, generator=generator(61)) * 12
    edges = torch.tensor([-200.0, -30.0, -10.0, 0.0, 9.9375, 10.0, 10.0625, 200.0])
    gate[:, :8], up[:, 8:16], up[:, :8] = edges, edges, 3.0
    return gate.bfloat16(), up.bfloat16()


@ROWS
@pytest.mark.parametrize("branch", ["routed", "shared"])
def test_swiglu_clamps(branch, rows, device, hostile, judge):
    width = 96
    gate, up = past_the_limits(rows, width)
    weight = hostile.f32((rows,), seed=62, lo=0.1, hi=1.5) if branch == "routed" else None
    out = hostile.poisoned((rows, width), BF16)
    ops.swiglu(device, hostile.packed(gate), hostile.packed(up), weight, out, LIMIT)
    compute = lambda dtype: ref.swiglu(gate.to(dtype), up.to(dtype), LIMIT) * (1.0 if weight is None else weight.cpu().to(dtype)[:, None])  # noqa: E731
    judge("swiglu", f"{branch}, {rows} rows", out, reference=lambda: compute(torch.float64), twins=[lambda: compute(F32).bfloat16().float()])
    assert (gate > LIMIT).any(), "the gate's clamp never engaged"
    assert (up > LIMIT).any(), "up's upper clamp never engaged"
    assert (up < -LIMIT).any(), "up's lower clamp never engaged"


def test_swiglu_does_not_clamp_below_the_limit_nor_hide_nan(device, hostile, judge):
    gate, up = (torch.linspace(-12, 9.9, 96).bfloat16()[None].repeat(2, 1) for _ in range(2))
    up = up.clamp(-9.9, 9.9)
    gate[1, 5], up[1, 7] = torch.nan, torch.nan
    clamped, free = hostile.poisoned((2, 96), BF16), hostile.poisoned((2, 96), BF16)
    ops.swiglu(device, hostile.packed(gate), hostile.packed(up), None, clamped, LIMIT)
    ops.swiglu(device, hostile.packed(gate), hostile.packed(up), None, free, 1e30)
    judge("swiglu", "within the limits", clamped[:1], exact=True, reference=lambda: free.cpu()[:1])
    judge("swiglu", "NaN stays", clamped.cpu().isnan(), exact=True, reference=lambda: (gate.isnan() | up.isnan()))


@ROWS
@pytest.mark.parametrize(("k", "D"), [(1, 96), (6, 161)], ids=["1 expert", "6 experts"])
def test_moe_combine_adds_experts_in_order_and_the_shared_one_last(k, D, rows, device, hostile, judge):
    E = 9
    experts = lopsided_experts(rows, E, k)
    down, shared = hostile.bf16((rows, k, D), seed=70, packed=True), hostile.bf16((rows, D), seed=71, packed=True)
    routed, out = hostile.poisoned((rows, D), F32), hostile.poisoned((rows, D), BF16)
    ops.moe_combine(device, down, hostile.packed(experts), shared, routed, out)
    real = experts[:, 0] >= 0

    def in_order() -> Tensor:
        total = torch.zeros(rows, D)
        for j in range(k):
            total = total + down.cpu().float()[:, j]
        return total[real]

    judge("moe_combine", f"routed, {k} x {D}, {rows} rows", routed.cpu()[real], exact=True, reference=in_order)
    judge("moe_combine", f"out, {k} x {D}, {rows} rows", out.cpu()[real], exact=True,
          reference=lambda: (in_order() + shared.cpu().float()[real]).bfloat16())  # fmt: skip
    assert routed.cpu()[~real].isnan().all(), "a pad's row was written"


def test_no_number_of_rows_switches_to_other_arithmetic(device, hostile, judge):
    """One call of 1100 rows equals calls of 100, bit for bit, for every operation without a variant of its own for it."""
    rows, dim, E, k = 1100, 64, 8, 2
    x, up = hostile.bf16((rows, dim), seed=80, packed=True, scale=8.0), hostile.bf16((rows, dim), seed=81, packed=True, scale=8.0)
    norm, weight8 = hostile.f32((dim,), seed=82), fp8_weight(hostile, 24, dim, seed=83)
    weight16, logits = hostile.bf16((24, dim), seed=84, packed=True), hostile.f32((rows, E), seed=85, packed=True)
    bias, inv_freq = hostile.f32((E,), seed=86, packed=True), hostile.packed(ref.rope_frequencies(32, 10_000.0))
    position, tokens = hostile.packed(positions_with_pads(rows).abs()), hostile.packed(torch.zeros(rows, dtype=torch.int64))
    route = hostile.f32((rows,), seed=87, packed=True)

    def run(part: slice) -> dict[str, Tensor]:
        n = len(x[part])
        out = {name: hostile.poisoned((n, dim), BF16) for name in ("rms_norm", "act_quant", "swiglu")}
        ops.rms_norm(device, x[part], norm, out["rms_norm"], EPS)
        ops.act_quant(device, x[part], out["act_quant"])
        ops.swiglu(device, x[part], up[part], route[part], out["swiglu"], LIMIT)
        out["rope"] = hostile.packed(x[part].cpu()[:, None].clone())
        ops.rope(device, out["rope"], position[part], inv_freq)
        out["linear_fp8"], out["linear_fp32"] = hostile.poisoned((n, 24), BF16), hostile.poisoned((n, 24), F32)
        ops.linear_fp8(device, x[part], *weight8, out["linear_fp8"], variant="mma")
        ops.linear_bf16(device, x[part], weight16, out["linear_fp32"], variant="mma")
        scores, experts, weights_of = hostile.poisoned((n, E), F32), hostile.poisoned((n, k), I32), hostile.poisoned((n, k), F32)
        ops.gate_scores(device, logits[part], "sqrtsoftplus", scores)
        ops.gate_choose(device, scores, bias, None, tokens[part], position[part], experts)
        ops.gate_weights(device, scores, experts, weights_of, True, 1.5)
        return out | {"gate_scores": scores, "gate_choose": experts, "gate_weights": weights_of}

    whole, parts = run(slice(rows)), [run(slice(t, t + 100)) for t in range(0, rows, 100)]
    for name, got in whole.items():
        judge(name, f"{rows} rows = calls of 100", got, exact=True, reference=lambda name=name: torch.cat([p[name] for p in parts]))


# A sum hides the small codes behind the large ones: one weight at a time, the output is that weight.


@VARIANTS
def test_linear_fp8_reads_every_code(variant, device, hostile, judge):
    """All 256 codes, zeros, subnormals and both NaN among them; each is a whole output, and exact in bf16."""
    N, K = 256, 16
    for column in (0, 5):
        weight = torch.zeros(N, K, dtype=U8)
        weight[:, column] = torch.arange(N).to(U8)
        scale = torch.tensor([[127], [124]], dtype=U8)
        x = torch.zeros(9, K)
        x[:, column] = 1.0
        out = hostile.poisoned((9, N), BF16)
        ops.linear_fp8(device, hostile.strided(x.bfloat16()), hostile.packed(weight), hostile.packed(scale), out, variant=variant)
        judge("linear_fp8", f"{variant}: every code, column {column}", out, exact=True,
              reference=lambda weight=weight, scale=scale, column=column: formats.decode_fp8_weight(weight, scale)[:, column].expand(9, -1))  # fmt: skip


@VARIANTS
def test_experts_read_every_code(variant, device, hostile, judge):
    """All 16 codes in the low and in the high nibble, at three scales."""
    E, N, K, rows = 2, 16, 64, 9
    for column in (0, 33):
        weight = torch.zeros(E, N, K // 2, dtype=U8)
        weight[..., column // 2] = (torch.arange(16) << 4 * (column % 2)).to(U8)
        scale = torch.tensor([127, 120], dtype=U8)[:, None, None].expand(E, N, K // 32).contiguous()
        x = torch.zeros(rows, K)
        x[:, column] = 1.0
        experts = (torch.arange(rows)[:, None] % E).to(I32)
        gate, up = hostile.poisoned((rows, 1, N), BF16), hostile.poisoned((rows, 1, N), BF16)
        scratch = hostile.poisoned((ops.experts_scratch(rows, 1, E),), I32)
        w, s = hostile.packed(weight), hostile.packed(scale)
        ops.experts_up(device, hostile.strided(x.bfloat16()), hostile.packed(experts), w, s, w, s, gate, up, variant=variant, scratch=scratch)
        want = torch.stack([formats.decode_fp4_weight(weight[e], scale[e])[:, column] for e in range(E)])[experts[:, 0].long()][:, None]
        for name, got in (("gate", gate), ("up", up)):
            judge("experts_up", f"{variant}: every code, column {column}, {name}", got, exact=True, reference=lambda want=want: want)
