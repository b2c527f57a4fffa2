"""The dense kernels keep their bits under every schedule and in the checked build; their wrappers refuse what does not fit.

Values are judged in parity/test_operations_dense.py; here the same launches must be free of out-of-bounds accesses, races and
unwritten shared memory, and independent of which thread runs first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from probes.core.inputs import Hostile
from production.launch import KernelError, open_device
from production.ops import dense as ops

BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
MMA = ("linear_fp8 mma", "linear_bf16 mma", "experts_up mma", "experts_down mma")


def every_kernel(device: Any) -> dict[str, Tensor]:
    """Each kernel and variant once, at sizes that leave tails everywhere: name -> output, pads and unowned elements NaN or -1."""
    hostile, results = Hostile(seed=9), {}
    T, n, D, width, N, E, k = 67, 2, 96, 160, 70, 5, 2
    rng = torch.Generator().manual_seed(9)

    def out(name: str, shape: tuple[int, ...], dtype: torch.dtype = BF16) -> Tensor:
        results[name] = hostile.poisoned(shape, dtype)
        return results[name]

    def codes(*shape: int) -> Tensor:
        return hostile.packed(torch.randint(0, 127, shape, generator=rng).to(U8))

    def scales(*shape: int) -> Tensor:
        return hostile.packed(torch.randint(120, 130, shape, generator=rng).to(U8))

    start, count = hostile.packed(torch.tensor([1000], dtype=I32)), hostile.packed(torch.tensor([T - 3], dtype=I32))
    position = out("token_positions", (T,), I32)
    ops.token_positions(device, start, count, position, out("token_positions row", (T,), I32))
    ops.advance(device, start, count)
    results["advance"] = start
    tokens = hostile.packed(torch.randint(0, 33, (T,), generator=rng))
    ops.embed(device, tokens, hostile.bf16((33, D), 1, packed=True), position, out("embed", (T, n, D)))

    x = hostile.bf16((T, D), 2)
    for variant in ("naive", "group", "warp", "block"):
        ops.rms_norm(device, x, hostile.f32((D,), 3), out(f"rms_norm {variant}", (T, D)), 1e-6, variant)
    ops.rms_norm(device, hostile.bf16((5, 101), 4), None, out("rms_norm odd", (5, 101)), 1e-6)
    for variant in ("naive", "group"):
        ops.act_quant(device, x, out(f"act_quant {variant}", (T, D)), 64, variant)
    heads = hostile.bf16((T, 3, 40), 5)
    ops.rope(device, heads, position, hostile.f32((16,), 6, lo=0.0, hi=1.0))
    results["rope"] = heads

    scratch = hostile.poisoned((ops.experts_scratch(T, k, E),), I32)
    logits, scores, experts = hostile.f32((T, E), 7, packed=True), out("gate_scores", (T, E), F32), out("gate_choose warp", (T, k), I32)
    for scoring in ("sigmoid", "softmax", "sqrtsoftplus"):
        ops.gate_scores(device, logits, scoring, scores)
    for variant in ("naive", "warp"):
        ops.gate_choose(device, scores, hostile.f32((E,), 8), None, tokens, position, out(f"gate_choose {variant}", (T, k), I32), variant)
    experts = results["gate_choose warp"]
    ops.gate_weights(device, scores, experts, out("gate_weights", (T, k), F32), True, 1.5)

    fp8, fp8_scale = codes(2 * N, D // 2), scales(2, 1)
    bf16 = hostile.bf16((N, D), 10, packed=True)
    w1, w3, w2 = ((codes(E, a, b // 2), scales(E, a, b // 32)) for a, b in ((width, D), (width, D), (D, width)))
    for variant in (*ops.LINEAR_VARIANTS, "stream"):
        ops.linear_fp8(device, x, fp8, fp8_scale, out(f"linear_fp8 {variant}", (T, 2 * N)), 2, variant)
        ops.linear_bf16(device, x, bf16, out(f"linear_bf16 {variant}", (T, N), F32), 0.5, True, variant)
        gate, up = out(f"experts_up {variant}", (T, k, width)), out(f"experts_up w3 {variant}", (T, k, width))
        ops.experts_up(device, x, experts, *w1, *w3, gate, up, variant, scratch)
        h = hostile.bf16((T, k, width), 11, packed=True)
        ops.experts_down(device, h, experts, *w2, out(f"experts_down {variant}", (T, k, D)), variant, scratch)
    wide, codes_wide, scales_wide = hostile.packed(hostile.bf16((9, 640), 14).cpu()), codes(24, 640), scales(1, 5)  # whole chunks, and some left
    ops.linear_fp8(device, wide, codes_wide, scales_wide, out("linear_fp8 stream, whole", (9, 24)), 1, "stream", slices=2)
    ops.linear_bf16(device, wide, hostile.bf16((24, 640), 15, packed=True), out("linear_bf16 stream, whole", (9, 24)), variant="stream16", slices=2)
    tall = hostile.packed(hostile.bf16((140, 128), 16).cpu())
    for variant in ("tiles128", "tiles256"):
        ops.linear_fp8(device, tall, codes(70, 128), scales(1, 1), out(f"linear_fp8 {variant}", (140, 70)), 1, variant)
        ops.linear_bf16(device, tall, hostile.bf16((70, 128), 17, packed=True), out(f"linear_bf16 {variant}", (140, 70), F32), variant=variant)
        w2 = codes(E, 40, 64), scales(E, 40, 4)
        ops.experts_down(device, tall[: T * k].view(T, k, 128), experts, *w2, out(f"experts_down {variant}", (T, k, 40)), variant, scratch)
    w1 = codes(E, 40, 320), scales(E, 40, 20)
    few = hostile.packed(experts.cpu()[:9].clone())
    gate_whole, up_whole = (out(f"experts_up stream, whole {i}", (9, k, 40)) for i in (0, 1))
    ops.experts_up(device, wide, few, *w1, *w1, gate_whole, up_whole, "stream", slices=2)
    ops.swiglu(device, gate.flatten(0, 1), up.flatten(0, 1), hostile.f32((T * k,), 12), out("swiglu", (T * k, width)), 10.0)
    ops.moe_combine(device, results["experts_down thin"], experts, hostile.bf16((T, D), 13, packed=True), out("routed", (T, D), F32), out("moe_combine", (T, D)))
    hostile.check_guards()
    return results


@cache
def plain() -> dict[str, Tensor]:
    return every_kernel(open_device("cpu"))


@pytest.mark.parametrize(
    "options",
    [{"order": "reverse"}, {"order": "random"}, {"checked": True}, {"fast_tiles": False}],
    ids=["last thread first", "random threads", "checked build", "tiles by single mma"],
)
def test_every_dense_kernel_keeps_its_bits(options):
    got, want = every_kernel(open_device("cpu", **options)), plain()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name].view(U8), value.view(U8)), name


def test_only_tiles_depend_on_how_mma_rounds():
    got, want = every_kernel(open_device("cpu", mma_sum="tensor_core")), plain()
    for name, value in want.items():
        if not name.startswith(("linear", "experts")) or not any(word in name for word in ("mma", "stream", "tiles")):
            if name not in ("swiglu",):  # of the last variant's gate and up, which are products by mma
                assert torch.equal(got[name].view(U8), value.view(U8)), name
        else:
            torch.testing.assert_close(got[name], value, rtol=2**-7, atol=1e-3 * float(value.nan_to_num().abs().max()), equal_nan=True)


def test_every_variant_ran_and_is_recorded():
    device = open_device("cpu")
    every_kernel(device)
    ran = {(source, kernel) for source, kernel, *_ in device.ran}
    for source in ("linear_fp8", "linear_bf16", "experts"):
        assert {(source, f"{source}_{variant}") for variant in ops.LINEAR_VARIANTS} <= ran
    assert ("experts", "experts_plan") in ran
    assert {("linear_stream", "linear_fp8_stream8"), ("linear_stream", "linear_bf16_stream16"), ("experts_stream", "experts_stream32")} <= ran
    assert {("linear_tiles", "linear_fp8_tiles128"), ("linear_tiles", "linear_bf16_tiles256"), ("experts_tiles", "experts_order"), ("experts_tiles", "experts_tiles128")} <= ran


@pytest.mark.parametrize(("tokens", "variant"), [(1, "thin"), (8, "thin"), (9, "mma")])
def test_few_tokens_run_thin_and_many_in_tiles(tokens, variant):
    device = open_device("cpu")
    x, weight, out = torch.ones(tokens, 32, dtype=BF16), torch.ones(8, 32, dtype=BF16), torch.empty(tokens, 8)
    ops.linear_bf16(device, x, weight, out)
    assert [kernel for _, kernel, *_ in device.ran] == [f"linear_bf16_{variant}"]
    assert (out == 32).all()


def test_no_tokens_launch_nothing():
    device = open_device("cpu")
    ops.rms_norm(device, torch.empty(0, 32, dtype=BF16), None, torch.empty(0, 32, dtype=BF16), 1e-6)
    ops.linear_bf16(device, torch.empty(0, 32, dtype=BF16), torch.ones(8, 32, dtype=BF16), torch.empty(0, 8))
    assert device.ran == []


def test_wrappers_say_what_does_not_fit():
    device = open_device("cpu")
    x, out = torch.ones(9, 64, dtype=BF16), torch.empty(9, 8, dtype=BF16)
    weight, scale = torch.zeros(8, 64, dtype=U8), torch.zeros(1, 1, dtype=U8)
    with pytest.raises(KernelError, match=r"linear_fp8: no variant 'warp'; it has naive, thin, mma"):
        ops.linear_fp8(device, x, weight, scale, out, variant="warp")
    with pytest.raises(KernelError, match=r"linear_fp8: scale is \[2, 1\], expected \[1, 1\]"):
        ops.linear_fp8(device, x, weight, torch.zeros(2, 1, dtype=U8), out)
    with pytest.raises(KernelError, match="expected contiguous"):
        ops.linear_fp8(device, x, weight.t().contiguous().t(), scale, out)
    experts = torch.zeros(9, 1, dtype=I32)
    w2, s2, down = torch.zeros(2, 8, 32, dtype=U8), torch.zeros(2, 8, 2, dtype=U8), torch.empty(9, 1, 8, dtype=BF16)
    with pytest.raises(KernelError, match="need scratch"):
        ops.experts_down(device, x[:, None].contiguous(), experts, w2, s2, down)
    with pytest.raises(KernelError, match="width 48 is no multiple of 32"):
        ops.experts_down(device, torch.ones(9, 1, 48, dtype=BF16), experts, w2, s2, down)
    with pytest.raises(KernelError, match="scoring 'relu'; it knows sqrtsoftplus, sigmoid, softmax"):
        ops.gate_scores(device, torch.zeros(1, 8), "relu", torch.zeros(1, 8))
    assert device.ran == []
