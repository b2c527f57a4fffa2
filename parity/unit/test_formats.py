"""Number formats: every code, every tie, exact powers of two, and rounding that changes nothing the second time.

Oracles are `ml_dtypes` (all codes and roundings) and rational arithmetic (scales); nothing is compared with itself.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import formats
from reference.config import InputError
from reference.formats import Policy

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed (development dependency)")

FINITE_E4M3 = [code for code in range(256) if code & 0x7F != 0x7F]


def float32(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values, dtype=np.float32))


# ---- decoding ----


def test_all_256_e4m3_codes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(formats.decode_e4m3(torch.from_numpy(codes)).numpy(), expected)


def test_all_256_e8m0_codes() -> None:
    codes = np.arange(256, dtype=np.uint8)
    value = formats.decode_e8m0(torch.from_numpy(codes))
    for code in range(255):
        assert Fraction(float(value[code])) == Fraction(2) ** (code - 127)
    assert bool(value[255].isnan())


def test_all_16_e2m1_codes_in_both_nibbles() -> None:
    expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    packed = torch.arange(256, dtype=torch.uint8)
    value = formats.decode_e2m1(packed[:, None])  # [256, 2]
    np.testing.assert_array_equal(value[:, 0].numpy(), expected[np.arange(256) % 16])  # low nibble first
    np.testing.assert_array_equal(value[:, 1].numpy(), expected[np.arange(256) // 16])


def test_fp8_weight_uses_each_block_scale_once() -> None:
    codes = torch.full((130, 257), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1.0
    scale = torch.tensor([[127, 128, 120], [126, 130, 127]], dtype=torch.uint8)
    weight = formats.decode_fp8_weight(codes, scale)
    for row, column, power in [(0, 0, 0), (127, 127, 0), (0, 128, 1), (127, 256, -7), (128, 0, -1), (129, 255, 3), (129, 256, 0)]:
        assert float(weight[row, column]) == 2.0**power


def test_fp4_weight_uses_each_row_and_block_scale() -> None:
    packed = torch.full((2, 32), 0x52, dtype=torch.uint8)  # low nibble 2 -> 1.0, high nibble 5 -> 3.0
    weight = formats.decode_fp4_weight(packed, torch.tensor([[127, 128], [0, 254]], dtype=torch.uint8))
    assert weight.shape == (2, 64)
    assert weight[0, :2].tolist() == [1.0, 3.0]
    assert weight[0, 32:34].tolist() == [2.0, 6.0]
    assert weight[1, :2].tolist() == [2.0**-127, 3 * 2.0**-127]
    assert float(weight[1, 32]) == 2.0**127


# ---- rounding values ----


def test_e4m3_values_stay_and_midpoints_go_to_the_even_code() -> None:
    codes = np.array([c for c in range(0x7F)], dtype=np.uint8)  # 0 .. 448, ascending
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert torch.equal(formats.round_e4m3(float32(values)), float32(values))
    middle = (values[:-1] + values[1:]) / 2  # exact in fp32
    even = np.where(codes[:-1] % 2 == 0, values[:-1], values[1:])
    for sign in (1, -1):
        assert torch.equal(formats.round_e4m3(float32(sign * middle)), float32(sign * even))
        assert torch.equal(formats.round_e4m3(float32(sign * np.nextafter(middle, np.float32(0)))), float32(sign * values[:-1]))
        assert torch.equal(formats.round_e4m3(float32(sign * np.nextafter(middle, np.float32(1e9)))), float32(sign * values[1:]))
    assert formats.round_e4m3(float32([449, 1e30, -464])).tolist() == [448, 448, -448]


def test_e2m1_values_stay_and_midpoints_go_to_the_even_code() -> None:
    values = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert tuple(values) == formats.E2M1_VALUES
    middle = (values[:-1] + values[1:]) / 2
    even = values[[0, 2, 2, 4, 4, 6, 6]]
    for sign in (1, -1):
        assert torch.equal(formats.round_e2m1(float32(sign * values)), float32(sign * values))
        assert torch.equal(formats.round_e2m1(float32(sign * middle)), float32(sign * even))
        assert torch.equal(formats.round_e2m1(float32(sign * np.nextafter(middle, np.float32(0)))), float32(sign * values[:-1]))
        assert torch.equal(formats.round_e2m1(float32(sign * np.nextafter(middle, np.float32(9)))), float32(sign * values[1:]))
    assert formats.round_e2m1(float32([6.5, 1e30, -7])).tolist() == [6, 6, -6]


@given(st.floats(-500, 500, width=32))
@settings(max_examples=300, deadline=None)
def test_rounding_agrees_with_ml_dtypes(x: float) -> None:
    clipped = np.clip(np.float32(x), -448, 448)
    assert float(formats.round_e4m3(float32(x))) == float(clipped.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    clipped = np.clip(np.float32(x), -6, 6)
    assert float(formats.round_e2m1(float32(x))) == float(clipped.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


# ---- scales ----

KINDS = {
    "e4m3": (formats.E4M3_MAX, formats.E4M3_LEAST_AMAX, formats.round_e4m3_blocks, 64),
    "e2m1": (formats.E2M1_MAX, formats.E2M1_LEAST_AMAX, formats.round_e2m1_blocks, 32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scale_is_exact_at_powers_of_two_and_next_to_them(kind: str) -> None:
    largest, least = KINDS[kind][:2]
    for power in range(-21 if kind == "e4m3" else -125, 118):
        amax = np.float32(largest * 2.0**power)
        below, above = np.nextafter(amax, np.float32(0)), np.nextafter(amax, np.float32(np.inf))
        scale = formats.power_of_two_scale(float32([below, amax, above]), largest, least)
        assert scale.tolist() == [2.0**power, 2.0**power, 2.0 ** (power + 1)]


@given(st.floats(0, 2.0**127, width=32))
@example(0.0)
@example(float(np.float32(1e-4)))
@settings(max_examples=200, deadline=None)
def test_scale_is_the_smallest_power_of_two_that_fits(amax: float) -> None:
    for largest, least, _, _ in KINDS.values():
        scale = Fraction(float(formats.power_of_two_scale(float32(amax), largest, least)))
        wanted = max(Fraction(amax), Fraction(float(np.float32(least))))
        assert scale * int(largest) >= wanted > scale / 2 * int(largest)


def test_a_block_that_is_not_finite_stays_not_finite() -> None:
    for bad in (torch.nan, torch.inf):
        for _, _, rounded, block in KINDS.values():
            x = torch.ones(1, 2 * block)
            x[0, 3] = bad
            assert bool(rounded(x, block)[0, :block].isnan().all())
            assert bool((rounded(x, block)[0, block:] == 1).all())


# ---- rounding blocks ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 64, 96, 448, 512])  # 448 + 64 is the published head_dim: seven blocks of 64
@given(seed=st.integers(0, 2**31), spread=st.floats(0, 30))
@settings(max_examples=12, deadline=None)
def test_blocks_against_plain_arithmetic_and_twice(kind: str, width: int, seed: int, spread: float) -> None:
    largest, least, rounded, block = KINDS[kind]
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, width)) * np.exp2(rng.uniform(-spread, spread / 3, (3, width)))).astype(np.float32)
    dtype = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float4_e2m1fn
    expected = np.empty_like(x)
    for start in range(0, width, block):
        part = x[:, start : start + block]
        amax = np.maximum(np.abs(part).max(-1, keepdims=True), np.float32(least)).astype(np.float64)
        scale = np.exp2(np.ceil(np.log2(amax / largest)))
        expected[:, start : start + block] = np.clip(part / scale, -largest, largest).astype(dtype).astype(np.float64) * scale
    got = rounded(torch.from_numpy(x), block)
    np.testing.assert_array_equal(got.numpy(), expected)
    assert torch.equal(rounded(got, block), got)  # a rounded block is its own rounding


def test_an_odd_last_block_has_its_own_scale() -> None:
    x = torch.cat((torch.full((1, 128), 300.0), torch.full((1, 32), 0.3)), -1)
    got = formats.round_e4m3_blocks(x, 128)
    assert got[0, 0] == 288.0  # 300 at scale 1, spacing 32: nearest even of 288 and 320
    assert got[0, 128] == formats.round_e4m3(torch.tensor(0.3 * 1024)) / 1024  # 0.3 / 448 -> scale 2^-10


def test_zero_blocks_stay_zero() -> None:
    for _, _, rounded, block in KINDS.values():
        assert torch.equal(rounded(torch.zeros(2, block), block), torch.zeros(2, block))


# ---- policies ----


def test_named_policies_and_sets_of_points() -> None:
    assert Policy.parse("exact").points == frozenset()
    assert Policy.parse("storage").points == {"kv.e4m3", "compressor.e4m3", "indexer.q.e2m1", "indexer.compressor.e2m1"}
    assert Policy.parse("published").points == Policy.parse("storage").points | {"linear_in.e4m3", "bf16"}
    assert Policy.parse(["bf16", "p.bf16"]).points == {"bf16", "p.bf16"}
    assert Policy.parse("bf16").points == {"bf16"}
    for unknown in ("fp16", ["bf16", "kv.e4m"], {"published"}):
        with pytest.raises(InputError, match="unknown rounding point"):
            Policy.parse(unknown)


def test_each_point_rounds_its_own_place_only() -> None:
    x = torch.randn(4, 192, generator=torch.Generator().manual_seed(1)) * 3
    places = {
        "kv.e4m3": lambda p: p.kv(x, 64),
        "compressor.e4m3": lambda p: p.compressed(x, 64),
        "indexer.q.e2m1": lambda p: p.index_q(x),
        "indexer.compressor.e2m1": lambda p: p.index_key(x),
        "linear_in.e4m3": lambda p: p.linear_in(x),
        "bf16": lambda p: p.bf16(x),
        "p.bf16": lambda p: p.p(x),
        "softmax.bf16": lambda p: p.weight(x) if p.weight is not None else x,
        "score.bf16": lambda p: p.score(x),
        "rope.bf16": lambda p: p.angle(x),
        "q_factor.bf16": lambda p: p.q_factor(x),
        "pool.bf16": lambda p: p.pool(x),
        "post.bf16": lambda p: p.post(x),
        "comb.bf16": lambda p: p.comb(x),
        "gate.bf16": lambda p: p.gate(x),
        "hidden.bf16": lambda p: p.hidden(x),
        "logits.bf16": lambda p: p.logits(x),
    }
    assert set(places) == formats.POINTS
    for point in formats.POINTS:
        for place, call in places.items():
            assert torch.equal(call(Policy.parse([point])), x) == (place != point)
    stored = Policy.parse("storage").kv(x, 64)
    assert torch.equal(stored[:, 128:], x[:, 128:])  # rotary dims are not rounded at all
    assert not torch.equal(stored[:, :128], x[:, :128])


def test_each_point_has_its_own_block() -> None:
    # The golden file cannot tell a KV block of 32 or 128 from 64: power-of-two scales matter to e4m3 only near its
    # smallest values. One large value per block of 128, 64 or 32 and a tiny one beside it can.
    x = torch.full((1, 512), 1e-6)
    x[0, ::128] = 1000.0
    everything = Policy.parse("published")
    for place, block, rounded in (
        (lambda v: everything.kv(v, 64), 64, formats.round_e4m3_blocks),
        (lambda v: everything.compressed(v, 64), 64, formats.round_e4m3_blocks),
        (everything.linear_in, 128, formats.round_e4m3_blocks),
        (everything.index_q, 32, formats.round_e2m1_blocks),
        (everything.index_key, 32, formats.round_e2m1_blocks),
    ):
        got = place(x)[0, :448]
        survivors = (got != 0) & (torch.arange(448) % 128 != 0)
        assert survivors.tolist() == [i % 128 >= block for i in range(448)], block
        assert torch.equal(got[:384], rounded(x[:, :384], block)[0])
