"""kernels/common.cuh against torch's own formats and a brute force.   pytest parity/unit/cpu_device/test_common.py"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from parity.unit.cpu_device import kernel_cases
from production.cpu_device import Module

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checked"])
def probe(request):
    return Module(kernel_cases.KERNELS / "common_probe.cu", checked=request.param)


def encoded(probe, x):
    e4m3, e2m1 = torch.empty(len(x), dtype=torch.uint8), torch.empty(len(x), dtype=torch.uint8)
    probe.kernel("encode_values")(((len(x) + 127) // 128,), (128,), (x, e4m3, e2m1, len(x)))
    return e4m3, e2m1


def decoded(probe):
    e4m3, e8m0, e2m1 = torch.empty(256), torch.empty(256), torch.empty(16)
    probe.kernel("decode_codes")((1,), (256,), (e4m3, e8m0, e2m1))
    return e4m3, e8m0, e2m1


def test_every_code_decodes(probe):
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3, e8m0, e2m1 = decoded(probe)
    assert torch.equal(e4m3.nan_to_num(777), codes.view(torch.float8_e4m3fn).float().nan_to_num(777))
    assert torch.equal(torch.signbit(e4m3), codes >= 128)
    assert torch.equal(e8m0[:255], torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(-127, 128)).float())
    assert e8m0[255].isnan()
    assert e2m1.tolist() == [*E2M1, *(-v for v in E2M1)]


def test_words_hold_the_low_code_first(probe):
    e4m3, _, e2m1 = decoded(probe)
    words4, words8 = (
        torch.arange(256, dtype=torch.uint8).view(torch.int32),
        torch.tensor([0x76543210, -0x01234568], dtype=torch.int32),
    )
    four, eight = torch.empty(256), torch.empty(16)
    probe.kernel("decode_words")((1,), (1,), (words4, words8, four, eight, 2))
    assert torch.equal(four.nan_to_num(777), e4m3.nan_to_num(777))
    assert torch.equal(eight, e2m1)


def test_every_e4m3_value_tie_and_neighbour_encodes_like_torch(probe):
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([449.0, 464.0, 1e9, float("inf")])])
    points = torch.cat([points, points.nextafter(torch.tensor(-1.0)), points.nextafter(torch.tensor(1e10))])
    x = torch.cat([points, -points, torch.randn(4000, generator=torch.Generator().manual_seed(1)) * 100])
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encoded(probe, x)[0], expected)
    assert encoded(probe, torch.tensor([float("nan")]))[0].view(torch.float8_e4m3fn).float().isnan().all()


def test_every_e2m1_value_tie_and_neighbour_encodes_to_the_nearest(probe):
    values = torch.tensor(E2M1)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([6.5, 100.0, float("inf")])])
    points = torch.cat([points, points.nextafter(torch.tensor(-1.0)).abs(), points.nextafter(torch.tensor(1e10))])
    x = torch.cat([points, -points, torch.randn(4000, generator=torch.Generator().manual_seed(2)) * 3])

    def nearest(value):  # ties to the even code
        magnitude = min(abs(value), 6.0)
        return min(range(8), key=lambda code: (abs(Fraction(E2M1[code]) - Fraction(magnitude)), code % 2))

    expected = [nearest(v) | (8 if torch.signbit(torch.tensor(v)) else 0) for v in x.tolist()]
    assert encoded(probe, x)[1].tolist() == expected


def test_scales_are_the_smallest_power_of_two_and_exact_at_powers(probe):
    mantissas = torch.tensor([448.0, 6.0, 1.0, 1.75, 1.5, 1.3, 1.999])
    amax = (mantissas[:, None] * torch.exp2(torch.arange(-20, 20).float())).flatten()
    amax = torch.cat([amax, amax.nextafter(torch.tensor(0.0)), amax.nextafter(torch.tensor(1e30)), torch.tensor([0.0, 1e-30])])
    count = len(amax)
    e4m3, e2m1, inverse = torch.empty(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8), torch.empty(count)
    probe.kernel("scales_of")(((count + 127) // 128,), (128,), (amax, e4m3, e2m1, inverse, count))
    floors = {448: torch.tensor(1e-4).item(), 6: 6 * 2.0**-126}
    for largest, bytes_ in ((448, e4m3), (6, e2m1)):
        for a, byte in zip(amax.tolist(), bytes_.tolist(), strict=True):
            scale, value = Fraction(2) ** (byte - 127), Fraction(max(a, floors[largest]))
            assert value <= largest * scale, (a, byte)
            assert value > largest * scale / 2, (a, byte)
    assert torch.equal(inverse, torch.exp2(127 - e4m3.float()))


def test_reductions_reach_every_thread_in_a_fixed_order(probe):
    x = torch.randn(96, generator=torch.Generator().manual_seed(3))
    out = torch.full((4, 96), float("nan"))
    probe.kernel("reduce")((1,), (96,), (x, out))

    def butterfly(v):
        while len(v) > 1:
            v = v[: len(v) // 2] + v[len(v) // 2 :]
        return v[0]

    total = torch.zeros(())
    for warp in x.view(3, 32):
        total = total + butterfly(warp)
    expected = [total.expand(96), x.max().expand(96), -total.expand(96)]
    assert torch.equal(out[:3], torch.stack(expected))
    assert torch.equal(out[3], torch.stack([butterfly(group) for group in x.view(12, 8)]).repeat_interleave(8))


def test_sixteen_byte_loads_keep_every_bit(probe):
    x = torch.arange(-32768, 32768, 64, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[: len(x) // 8 * 8]
    y = torch.zeros_like(x)
    probe.kernel("copy_8")((1,), (len(x) // 8,), (x, y))
    assert torch.equal(torch.where(x.isnan(), 0, x), torch.where(y.isnan(), 0, y))
    assert torch.equal(x.isnan(), y.isnan())
