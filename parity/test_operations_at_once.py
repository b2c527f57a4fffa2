"""Kernels that do several operations in one launch: every output has the bits of the operations they stand for, on hostile inputs.

What the single operations do is judged in test_operations_dense.py and test_operations_attention.py.

    pytest parity/test_operations_at_once.py -k latents
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from production import ops
from production.launch import KernelError
from production.ops import at_once
from production.ops.layout import entry_bytes
from reference import ops as ref

BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
EPS = 1e-6
TOKENS = pytest.mark.parametrize("T", [1, 3, 9])


@pytest.fixture(autouse=True)
def nothing_is_written_beside_an_output(hostile):
    yield
    hostile.check_guards()


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Equal in every bit; NaN poison included."""
    assert torch.equal(got.cpu().contiguous().view(U8), want.cpu().contiguous().view(U8)), what


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bf16(hostile, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
    made: Tensor = hostile.bf16(shape, seed=seed, scale=scale, packed=True)
    return made


def fp8(hostile, N: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    code = torch.randint(0, 254, (N, K), generator=generator(seed)).to(U8)
    return hostile.packed(code + (code >= 0x7F).to(U8)), hostile.packed(torch.randint(118, 128, (-(-N // 128), -(-K // 128)), generator=generator(seed + 1)).to(U8))


def fp4(hostile, E: int, N: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    packed = torch.randint(0, 256, (E, N, K // 2), generator=generator(seed)).to(U8)
    return hostile.packed(packed), hostile.packed(torch.randint(118, 128, (E, N, K // 32), generator=generator(seed + 1)).to(U8))


def positions(T: int, hostile) -> Tensor:
    """A pad in every five."""
    position = torch.tensor([1_048_575, 0, 127, -1, 4096], dtype=I32).repeat(2)[:T]
    packed: Tensor = hostile.packed(position)
    return packed


class Twice:
    """Outputs by name, once for each way."""

    def __init__(self, hostile) -> None:
        self.hostile = hostile
        self.single: dict[str, Tensor] = {}
        self.once: dict[str, Tensor] = {}

    def out(self, name: str, *shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
        self.single[name], self.once[name] = (self.hostile.poisoned(shape, dtype) for _ in range(2))
        return self.single[name], self.once[name]

    def agree(self) -> None:
        for name, want in self.single.items():
            same(self.once[name], want, name)


# ---- rows ----


def rows_of_all_sizes(rows: int, dim: int, seed: int) -> Tensor:
    """Zeros, infinities, NaN and maxima at 448 * 2^n among them."""
    x = torch.randn(rows, dim, generator=generator(seed)) * torch.exp2(torch.randint(-30, 30, (rows, 1), generator=generator(seed + 1)).float())
    x[0] = 0
    x[1 % rows, dim // 2] = torch.inf
    x[2 % rows, 3] = torch.nan
    x[3 % rows, ::64] = 448.0 * 2.0**5
    return x.bfloat16()


@pytest.mark.parametrize("dim", [8, 96, 128, 136, 256, 520, 4096], ids=lambda dim: f"dim {dim}")
@pytest.mark.parametrize("rows", [1, 5, 37])
def test_quant_rows_is_act_quant(rows, dim, device, hostile):
    x, both = hostile.packed(rows_of_all_sizes(rows, dim, 1)), Twice(hostile)
    single, once = both.out("x_q", rows, dim)
    ops.act_quant(device, x, single)
    at_once.quant_rows(device, x, once)
    both.agree()


@pytest.mark.parametrize(("T", "k", "width"), [(1, 2, 128), (3, 6, 96), (9, 1, 520), (2, 3, 2048)])
def test_swiglu_quant_is_swiglu_then_act_quant(T, k, width, device, hostile):
    gate, up = (hostile.packed((torch.randn(T * k, width, generator=generator(s)) * 12).bfloat16()) for s in (1, 2))
    s_gate, s_up = (hostile.packed((torch.randn(T, width, generator=generator(s)) * 12).bfloat16()) for s in (3, 4))
    gate[0, 1], s_up[0, 2] = torch.nan, torch.inf
    weight, both = hostile.f32((T * k,), seed=5, packed=True), Twice(hostile)
    (h_q, h_q_once), (s_q, s_q_once) = both.out("h_q", T * k, width), both.out("shared h_q", T, width)
    h, s = hostile.poisoned((T * k, width), BF16), hostile.poisoned((T, width), BF16)
    ops.swiglu(device, gate, up, weight, h, 10.0)
    ops.act_quant(device, h, h_q)
    ops.swiglu(device, s_gate, s_up, None, s, 10.0)
    ops.act_quant(device, s, s_q)
    at_once.swiglu_quant(device, gate, up, weight, h_q_once, s_gate, s_up, s_q_once, 10.0)
    both.agree()


@pytest.mark.parametrize(("T", "k", "D"), [(1, 6, 256), (7, 2, 104), (3, 1, 4096)])
def test_combine_rows_is_moe_combine(T, k, D, device, hostile):
    experts = torch.stack([torch.randperm(9, generator=generator(t))[:k].sort().values for t in range(T)]).to(I32)
    experts[T // 2] = -1  # a pad
    experts[T - 1, 0] = -1  # a choice that is not there
    down, shared, both = bf16(hostile, T, k, D, seed=1), bf16(hostile, T, D, seed=2), Twice(hostile)
    routed, y = both.out("routed", T, D, dtype=F32), both.out("y", T, D)
    given = hostile.packed(experts)
    ops.moe_combine(device, down, given, shared, routed[0], y[0])
    at_once.combine_rows(device, down, given, shared, routed[1], y[1])
    both.agree()


# ---- products ----

# D, q_lora, d, rows of the compressors, index heads: as the small checkpoint; widths of whole chunks and of none; one row in a tile.
HIDDEN = pytest.mark.parametrize(("D", "q_lora", "d", "c_rows", "i_rows", "hi"), [(256, 128, 128, 256, 256, 8), (200, 72, 40, 80, 24, 3), (1024, 264, 64, 64, 136, 1)])


@TOKENS
@HIDDEN
@pytest.mark.parametrize("kind", ["window", "hca", "csa"])
def test_project_hidden_is_its_products(kind, D, q_lora, d, c_rows, i_rows, hi, T, device, hostile):
    x, x_q, both = bf16(hostile, T, D, seed=1), bf16(hostile, T, D, seed=2), Twice(hostile)
    wq_a, wkv = fp8(hostile, q_lora, D, 3), fp8(hostile, d, D, 5)
    w = [bf16(hostile, n, D, seed=7 + i) for i, n in enumerate((c_rows, c_rows, i_rows, i_rows, hi))]
    qr, kv = both.out("qr_raw", T, q_lora), both.out("kv_raw", T, d)
    outs = [both.out(f"{i}", T, len(m), dtype=F32) for i, m in enumerate(w[: {"window": 0, "hca": 2, "csa": 5}[kind]])]
    ops.linear_fp8(device, x_q, *wq_a, qr[0], variant="stream")
    ops.linear_fp8(device, x_q, *wkv, kv[0], variant="stream")
    for i, (single, _) in enumerate(outs):
        ops.linear_bf16(device, x, w[i], single, scale=0.3 if i == 4 else 1.0, round_bf16=i == 4, variant="stream")
    pairs: list[Any] = [(w[i], once) for i, (_, once) in enumerate(outs)]
    at_once.project_hidden(
        device, x, x_q, (wq_a, qr[1]), (wkv, kv[1]), tuple(pairs[:2]) or None, tuple(pairs[2:4]) or None, (*pairs[4], 0.3) if len(pairs) == 5 else None
    )  # fmt: skip
    both.agree()


@TOKENS
@pytest.mark.parametrize(("q_lora", "rows", "i_rows"), [(128, 1024, 1024), (72, 40, 0), (264, 200, 24)])
def test_project_latents_is_its_products(q_lora, rows, i_rows, T, device, hostile):
    qr_q, both = bf16(hostile, T, q_lora, seed=1), Twice(hostile)
    wq_b, index = fp8(hostile, rows, q_lora, 2), fp8(hostile, max(i_rows, 1), q_lora, 4)
    q = both.out("q_raw", T, rows)
    ops.linear_fp8(device, qr_q, *wq_b, q[0], variant="stream")
    second = None
    if i_rows:
        i_q = both.out("index_q_raw", T, i_rows)
        ops.linear_fp8(device, qr_q, *index, i_q[0], variant="stream")
        second = (index, i_q[1])
    at_once.project_latents(device, qr_q, (wq_b, q[1]), second)
    both.agree()


@TOKENS
@pytest.mark.parametrize(("D", "E"), [(256, 8), (200, 37), (4096, 24)])
def test_project_router_is_a_product_and_a_rounding(D, E, T, device, hostile):
    x, gate, both = hostile.packed(rows_of_all_sizes(T, D, 3)), bf16(hostile, E, D, seed=2), Twice(hostile)
    logits, x_q = both.out("logits", T, E, dtype=F32), both.out("x_q", T, D)
    ops.linear_bf16(device, x, gate, logits[0], variant="stream")
    ops.act_quant(device, x, x_q[0])
    at_once.project_router(device, x, x_q[1], gate, logits[1])
    both.agree()


@TOKENS
@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize(("E", "k", "width", "by"), [(8, 2, 128, "bias"), (37, 6, 40, "hash"), (384, 8, 264, "bias"), (6, 6, 16, "scores")])
@pytest.mark.parametrize("D", [256])
def test_project_shared_is_its_products_and_the_router(D, E, k, width, by, scoring, T, device, hostile):
    vocab, both = 53, Twice(hostile)
    x_q, w1, w3 = bf16(hostile, T, D, seed=1), fp8(hostile, width, D, 2), fp8(hostile, width, D, 4)
    logits = torch.randn(T, E, generator=generator(6)) * 3
    logits[:, : E // 2] = logits[:, :1]  # ties
    logits[0, -1] = torch.nan
    given = hostile.packed(logits)
    bias = hostile.f32((E,), seed=7, packed=True) if by == "bias" else None
    table = hostile.packed(torch.stack([torch.randperm(E, generator=generator(v))[:k] for v in range(vocab)]).to(I32)) if by == "hash" else None
    tokens, position = hostile.packed(torch.randint(vocab, (T,), generator=generator(8))), positions(T, hostile)
    gate, up = both.out("gate", T, width), both.out("up", T, width)
    scores, experts, weights = both.out("scores", T, E, dtype=F32), both.out("experts", T, k, dtype=I32), both.out("weights", T, k, dtype=F32)
    ops.linear_fp8(device, x_q, *w1, gate[0], variant="stream")
    ops.linear_fp8(device, x_q, *w3, up[0], variant="stream")
    ops.gate_scores(device, given, scoring, scores[0])
    ops.gate_choose(device, scores[0], bias, table, tokens, position, experts[0])
    ops.gate_weights(device, scores[0], experts[0], weights[0], scoring != "softmax", 1.5)
    at_once.project_shared(
        device, x_q, (w1, gate[1]), (w3, up[1]), given, scoring, scores[1], bias, table, tokens, position, experts[1], weights[1], scoring != "softmax", 1.5
    )  # fmt: skip
    both.agree()


@TOKENS
@pytest.mark.parametrize(("E", "k", "width", "D"), [(8, 2, 128, 256), (5, 3, 96, 72), (4, 4, 320, 136)])
def test_project_down_is_both_products(E, k, width, D, T, device, hostile):
    experts = torch.stack([torch.randperm(E, generator=generator(t))[:k].sort().values for t in range(T)]).to(I32)
    experts[T // 2 if T > 1 else 0, 0] = -1
    given, h_q, both = hostile.packed(experts), bf16(hostile, T, k, width, seed=1), Twice(hostile)
    w2, shared, s_q = fp4(hostile, E, D, width, 2), fp8(hostile, D, width, 4), bf16(hostile, T, width, seed=6)
    down, out = both.out("down", T, k, D), both.out("shared", T, D)
    ops.experts_down(device, h_q, given, *w2, down[0], variant="stream")
    ops.linear_fp8(device, s_q, *shared, out[0], variant="stream")
    at_once.project_down(device, h_q, given, *w2, down[1], s_q, (shared, out[1]))
    both.agree()


# ---- what follows the projections ----


def pooling(hostile, b: int, width: int, ratio: int, seed: int) -> dict[str, Tensor]:
    """Tensors of a compressor with a state in the middle of things."""
    features, slots = (2 * width, 8) if ratio == 4 else (width, ratio)
    made = {
        name: hostile.f32(shape, seed=seed + i, packed=True)
        for i, (name, shape) in enumerate(
            {"kv": (b, 1, features), "gate": (b, 1, features), "ape": (ratio, features), "state_kv": (b, slots, features), "state_gate": (b, slots, features), "norm": (width,)}.items()
        )
    }
    return made | {name: hostile.poisoned((b, 1, width), BF16) for name in ("pooled", "rows")} | {name: hostile.poisoned((b, 1), I32) for name in ("entry", "entry_position")}


@pytest.mark.parametrize("ratio", [0, 4, 128], ids=["window", "csa", "hca"])
@pytest.mark.parametrize(("q_lora", "d", "r", "di"), [(128, 128, 64, 128), (1024, 512, 64, 128), (264, 192, 64, 64)])
@pytest.mark.parametrize("start", [[0], [3, 127, 6, 255, 4], [131]], ids=["first token", "groups completed and not", "one row"])
def test_latents_are_norms_rotations_stores_and_compressors(start, q_lora, d, r, di, ratio, device, hostile):
    b, slots, capacity = len(start), 136, 128
    count = [1] * b
    if b > 1:
        count[-1] = 0  # a row that rests
    position = hostile.packed(torch.tensor([s if n else -1 for s, n in zip(start, count, strict=True)], dtype=I32))
    starts, counts, row = (hostile.packed(torch.tensor(v, dtype=I32)) for v in (start, count, list(range(b))))
    qr_raw, kv_raw = hostile.packed(rows_of_all_sizes(b, q_lora, 1)), bf16(hostile, b, d, seed=2)
    q_norm, kv_norm = hostile.f32((q_lora,), seed=3, packed=True), hostile.f32((d,), seed=4, packed=True)
    inv_freq = hostile.packed(ref.yarn_frequencies(r, 160_000.0, 16.0, 65_536, 32.0, 1.0))
    size, both = entry_bytes(d, r), Twice(hostile)
    qr, qr_q, kv = both.out("qr", b, q_lora), both.out("qr_q", b, q_lora), both.out("kv", b, d)
    ring, ring_position = both.out("ring", b, slots, size, dtype=U8), both.out("ring_position", b, slots, dtype=I32)
    entries, keys, scales = both.out("entries", b, capacity, size, dtype=U8), both.out("keys", b, capacity, di // 2, dtype=U8), both.out("scales", b, capacity, di // 32, dtype=U8)

    def compressors(at: int) -> tuple[dict[str, Tensor] | None, dict[str, Tensor] | None]:
        main = pooling(hostile, b, d, ratio, 10) if ratio else None
        index = pooling(hostile, b, di, 4, 20) if ratio == 4 else None
        for kind, made in (("main", main), ("index", index)):
            for name in ("state_kv", "state_gate", "pooled", "rows", "entry", "entry_position") if made else ():
                (both.single, both.once)[at][f"{kind} {name}"] = made[name]  # type: ignore[index]
        return main, index

    main, index = compressors(0)
    ops.rms_norm(device, qr_raw, q_norm, qr[0], EPS)
    ops.act_quant(device, qr[0], qr_q[0])
    ops.rms_norm(device, kv_raw, kv_norm, kv[0], EPS)
    ops.rope(device, kv[0][:, None], position, inv_freq)
    ops.store_window(device, kv[0], position, row, ring[0], ring_position[0])
    for made, m in ((main, ratio), (index, 4)):
        if made:
            ops.compressor_step(
                device, made["kv"][:, 0], made["gate"][:, 0], made["ape"], made["state_kv"], made["state_gate"], starts, counts,
                made["pooled"], made["entry"], made["entry_position"], m,
            )  # fmt: skip
            ops.rms_norm(device, made["pooled"].flatten(0, 1), made["norm"], made["rows"].flatten(0, 1), EPS)
            ops.rope(device, made["rows"].flatten(0, 1)[:, None], made["entry_position"].flatten(), inv_freq)
    if main:
        ops.store_entries(device, main["rows"], main["entry"], entries[0])
    if index:
        ops.store_index_keys(device, index["rows"], index["entry"], keys[0], scales[0])

    main, index = compressors(1)
    at_once.latents(
        device, qr_raw, q_norm, qr[1], qr_q[1], kv_raw, kv_norm, kv[1], position, row, ring[1], ring_position[1], inv_freq, EPS, starts, counts,
        at_once.Pooling(**main, ratio=ratio, cache=entries[1]) if main else None,
        at_once.Pooling(**index, ratio=4, cache=(keys[1], scales[1])) if index else None,
    )  # fmt: skip
    done = (torch.tensor(start) + 1) % max(ratio, 1) == 0
    for kind, m in (("main", ratio), ("index", 4)):  # rows that no entry came to: the single operations norm what lies there
        for way in (both.single, both.once):
            if f"{kind} rows" in way:
                complete = ((torch.tensor(start) + 1) % m == 0) & (torch.tensor(count) > 0)
                way[f"{kind} rows"] = way[f"{kind} rows"].cpu().float().masked_fill(~complete[:, None, None], 0.0)
    both.agree()
    assert ratio == 0 or b == 1 or bool(done.any()), "no group was completed"


@TOKENS
@pytest.mark.parametrize(("h", "d", "r", "hi", "di"), [(8, 128, 64, 8, 128), (3, 512, 64, 0, 0), (5, 192, 64, 6, 64), (1, 320, 32, 11, 32)])
def test_query_heads_are_norms_rotations_and_hadamard(h, d, r, hi, di, T, device, hostile):
    position, inv_freq, both = positions(T, hostile), hostile.packed(ref.rope_frequencies(min(r, di or r), 10_000.0)), Twice(hostile)
    q_raw, q = bf16(hostile, T, h, d, seed=1), both.out("q", T, h, d)
    ops.rms_norm(device, q_raw.flatten(0, 1), None, q[0].flatten(0, 1), EPS)
    ops.rope(device, q[0], position, inv_freq)
    if hi:
        raw = both.out("index_q_raw", T, hi, di)
        for way in raw:
            way.copy_(torch.randn(T, hi, di, generator=generator(2)))
        index_q = both.out("index_q", T, hi, di)
        ops.rope(device, raw[0], position, inv_freq)
        ops.hadamard_e2m1(device, raw[0].flatten(0, 1), index_q[0].flatten(0, 1))
        at_once.query_heads(device, q_raw, q[1], raw[1], index_q[1], position, inv_freq, EPS)
    else:
        at_once.query_heads(device, q_raw, q[1], None, None, position, inv_freq, EPS)
    both.agree()


def test_wrappers_say_what_does_not_fit(device):
    x = torch.zeros(2, 12, dtype=BF16, device=device.torch_device)
    with pytest.raises(KernelError, match="rows of 16-byte pieces"):
        at_once.quant_rows(device, x, torch.empty_like(x))
    assert at_once.fits_at_once(4096, 1024, 512, 128, 2048, 256, 6)
    assert at_once.fits_at_once(7168, 1536, 512, 128, 3072, 384, 6)
    assert not at_once.fits_at_once(4096, 4096, 512, 128, 2048, 256, 6)
