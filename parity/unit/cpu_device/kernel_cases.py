"""What to run and what must come out: inputs, launches and PyTorch references of the example kernels beside this file.

A case knows nothing of a device. run(case, launch) makes fresh outputs and calls
launch(kernel_name, grid, block, args, shared_bytes) for each step; args are tensors and numbers in parameter order.
The examples test the CPU device; the project's own kernels have their tests in parity/test_operations_*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "kernels"

HEAD_DIM = 512  # of sparse_attention.cu
ATTENTION_SHARED_BYTES = (32 + 16) * (HEAD_DIM + 8) * 2


Tensors = dict[str, Tensor]
Launch = Callable[[str, tuple[int, ...], tuple[int, ...], list[Any], int], None]


@dataclass
class Step:
    """One launch. args: names of tensors, or numbers."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: list[Any]
    shared_bytes: int = 0


@dataclass
class Case:
    """Kernels of one file, run in order.

    name           printed as the test's id; source  file in kernels/
    output_shapes  name -> (shape, dtype) of all outputs and scratch tensors
    reference      (inputs, dtype) -> {output name: tensor of that dtype}
    tolerance      largest absolute error / largest absolute reference value
    results        names of the outputs that the reference gives
    """

    name: str
    source: str
    inputs: Tensors
    output_shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    steps: list[Step]
    reference: Callable[[Tensors, torch.dtype], Tensors]
    tolerance: float
    results: list[str] = field(default_factory=list)


def new_outputs(case: Case, device: str = "cpu") -> Tensors:
    """NaN everywhere (-1 for integers), so that an unwritten element shows."""
    return {
        name: torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=device)
        for name, (shape, dtype) in case.output_shapes.items()
    }


def run(case: Case, launch: Launch, inputs: Tensors | None = None, device: str = "cpu") -> Tensors:
    """All outputs of a case, from fresh memory."""
    tensors = {**(inputs or case.inputs), **new_outputs(case, device)}
    for step in case.steps:
        args = [tensors[a] if isinstance(a, str) else a for a in step.args]
        launch(step.kernel, step.grid, step.block, args, step.shared_bytes)
    return {name: tensors[name] for name in case.output_shapes}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value; NaN where anything is NaN."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).abs().max() / expected.abs().max()).item()


# ---- RMSNorm ----


def rms_norm(rows: int = 64, dim: int = 1024, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    inputs = {"x": torch.randn(rows, dim, generator=g).bfloat16(), "w": torch.randn(dim, generator=g)}

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        x, w = i["x"].to(dtype), i["w"].to(dtype)
        return {"y": x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w}

    return Case(
        f"rms_norm-{rows}x{dim}",
        "rms_norm.cu",
        inputs,
        {"y": ((rows, dim), torch.bfloat16)},
        [Step("rms_norm_bf16", (rows,), (128,), ["x", "w", "y", dim, 1e-6])],
        reference,
        4e-3,
        ["y"],
    )


# ---- hyper-connection split ----


def sinkhorn(tokens: int = 61, iterations: int = 20, eps: float = 1e-6, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    inputs = {
        "mixes": torch.randn(tokens, 24, generator=g),
        "scale": torch.rand(3, generator=g),
        "base": torch.randn(24, generator=g),
    }

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        mixes, scale, base = i["mixes"].to(dtype), i["scale"].to(dtype), i["base"].to(dtype)
        comb = torch.softmax((mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4), -1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return {
            "pre": torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + eps,
            "post": 2 * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8]),
            "comb": comb,
        }

    shapes = {
        "pre": ((tokens, 4), torch.float32),
        "post": ((tokens, 4), torch.float32),
        "comb": ((tokens, 4, 4), torch.float32),
    }
    step = Step(
        "hc_split_sinkhorn",
        ((tokens + 7) // 8,),
        (128,),
        ["mixes", "scale", "base", "pre", "post", "comb", tokens, iterations, eps],
    )
    return Case(f"sinkhorn-{tokens}", "sinkhorn.cu", inputs, shapes, [step], reference, 1e-6, ["pre", "post", "comb"])


# ---- fp4 index score ----

FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def index_score(tokens: int = 5, entries: int = 37, lowest_scale: int = 120, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    inputs = {
        "q": torch.randn(tokens, 64, 128, generator=g).bfloat16(),
        "k4": torch.randint(0, 256, (entries, 64), generator=g, dtype=torch.uint8),
        "k_scale": torch.randint(lowest_scale, 131, (entries, 4), generator=g, dtype=torch.uint8),
        "w": torch.randn(tokens, 64, generator=g),
    }

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        lut = FP4_VALUES.to(i["q"].device, dtype)
        k = torch.stack([lut[(i["k4"] & 15).long()], lut[(i["k4"] >> 4).long()]], -1).reshape(entries, 128)
        k = k * torch.exp2(i["k_scale"].to(dtype) - 127).repeat_interleave(32, 1)
        return {"score": (torch.relu(i["q"].to(dtype) @ k.T) * i["w"].to(dtype)[..., None]).sum(1)}

    step = Step("index_score_fp4", ((entries + 15) // 16, tokens), (64,), ["q", "k4", "k_scale", "w", "score", entries])
    return Case(
        f"index_score-{tokens}x{entries}-scale{lowest_scale}",
        "index_score.cu",
        inputs,
        {"score": ((tokens, entries), torch.float32)},
        [step],
        reference,
        1e-6,
        ["score"],
    )


# ---- GEMM ----


def gemm(m: int = 64, n: int = 512, k: int = 512, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    inputs = {"x": torch.randn(m, k, generator=g).bfloat16(), "w": torch.randn(n, k, generator=g).bfloat16()}

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        return {"y": i["x"].to(dtype) @ i["w"].to(dtype).T}

    step = Step("gemm_bf16", (n // 64, (m + 63) // 64), (128,), ["x", "w", "y", m, n, k])
    return Case(f"gemm-{m}x{n}x{k}", "gemm.cu", inputs, {"y": ((m, n), torch.bfloat16)}, [step], reference, 4e-3, ["y"])


# ---- sparse attention ----


def attention(
    positions: Sequence[int], heads: int = 16, window: int = 128, topk: int = 128, compressed: int = 200, splits: int = 1,
    whole_tiles: bool = False, seed: int = 0,
) -> Case:  # fmt: skip
    """Positions beyond the window wrap the ring; about 1 in (compressed + 1) of the index list is -1, and the first is."""
    g = torch.Generator().manual_seed(seed)
    tokens = len(positions)
    inputs = {
        "q": torch.randn(tokens, heads, HEAD_DIM, generator=g).bfloat16(),
        "ring": torch.randn(window, HEAD_DIM, generator=g).bfloat16(),
        "comp": torch.randn(compressed, HEAD_DIM, generator=g).bfloat16(),
        "idx": torch.randint(-1, compressed, (tokens, topk), generator=g, dtype=torch.int32),
        "pos": torch.tensor(positions, dtype=torch.int32),
        "sink": torch.randn(heads, generator=g),
    }
    inputs["idx"][:, 0] = -1

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        kv = torch.cat([i["ring"], i["comp"]]).to(dtype)
        out = torch.empty(tokens, heads, HEAD_DIM, dtype=dtype, device=kv.device)
        for t, p in enumerate(i["pos"].tolist()):
            in_window = min(p + 1, window)
            rows = [(p - in_window + 1 + e) % window for e in range(in_window)]
            rows += [window + j for j in i["idx"][t].tolist() if j >= 0]
            k = kv[rows]
            scores = i["q"][t].to(dtype) @ k.T * HEAD_DIM**-0.5
            sink = i["sink"].to(dtype)
            largest = torch.maximum(scores.max(-1).values, sink)
            weights = torch.exp(scores - largest[:, None])
            out[t] = weights @ k / (weights.sum(-1) + torch.exp(sink - largest))[:, None]
        return {"out": out}

    shapes = {
        "part_o": ((tokens, splits, heads, HEAD_DIM), torch.float32),
        "part_ml": ((tokens, splits, heads, 2), torch.float32),
        "out": ((tokens, heads, HEAD_DIM), torch.bfloat16),
    }
    split = Step(
        "sparse_attn_split_tile" if whole_tiles else "sparse_attn_split",
        (tokens, heads // 16, splits),
        (128,),
        ["q", "ring", "comp", "idx", "pos", "part_o", "part_ml", heads, window, topk, splits, HEAD_DIM**-0.5],
        ATTENTION_SHARED_BYTES,
    )
    combine = Step("sparse_attn_combine", (tokens, heads), (128,), ["part_o", "part_ml", "sink", "out", heads, splits])
    name = f"attention{'_tile' if whole_tiles else ''}-{tokens}tokens-{heads}heads-window{window}-top{topk}-{splits}splits"
    return Case(name, "sparse_attention.cu", inputs, shapes, [split, combine], reference, 5e-3, ["out"])


# ---- single instructions ----

MMA_KINDS = ["integers", "random", "spread", "cancel", "sparse", "tiny", "huge", "special"]


def mma_probe(cases: int = 64, kind: str = "random", seed: int = 0) -> Case:
    """Operands of one mma, chosen to show how it rounds.

    integers  every sum is exact                       random  like activations
    spread    terms of very different size             cancel  c is near minus the sum of the products
    sparse    half of the factors 0, others far apart  tiny    denormal operands and results
    huge      sums near and beyond the largest fp32    special infinities, NaNs, zeros of both signs
    """
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(cases, 16, 16, generator=g), torch.randn(cases, 8, 16, generator=g)
    c = torch.randn(cases, 16, 8, generator=g) * 4

    def scaled(x: Tensor, low: int, high: int) -> Tensor:
        return x * torch.exp2(torch.randint(low, high, x.shape, generator=g).float())

    def holes(x: Tensor, values: list[float], share: float) -> Tensor:
        chosen = torch.tensor(values)[torch.randint(0, len(values), x.shape, generator=g)]
        return torch.where(torch.rand(x.shape, generator=g) < share, chosen, x)

    if kind == "integers":
        a, b, c = ((x * 20).round() for x in (a, b, c))
    if kind == "spread":
        a, b, c = (scaled(x, -8, 9) for x in (a, b, c))
    if kind == "cancel":
        c = -(a.bfloat16().double() @ b.bfloat16().double().transpose(1, 2)).float() * (1 + c * 2**-18)
    if kind == "sparse":
        a, b, c = (holes(scaled(x, -40, 41), [0.0, -0.0], 0.5) for x in (a, b, c))
    if kind == "tiny":
        a, b, c = scaled(a, -130, -60), scaled(b, -75, -5), scaled(c, -151, -120)
    if kind == "huge":
        a, b, c = scaled(a, 55, 65), scaled(b, 55, 63), scaled(c, 120, 126)
    if kind == "special":
        a, b, c = (holes(x, [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3e38], 0.03) for x in (a, b, c))
    inputs = {"a": a.bfloat16(), "b": b.bfloat16(), "c": c}

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        return {"d": i["a"].to(dtype) @ i["b"].to(dtype).transpose(1, 2) + i["c"].to(dtype)}

    return Case(
        f"mma_probe-{kind}",
        "warp_probe.cu",
        inputs,
        {"d": ((cases, 16, 8), torch.float32)},
        [Step("mma_probe", (cases,), (32,), ["a", "b", "c", "d"])],
        reference,
        1e-6,
        ["d"],
    )


def ldmatrix_probe() -> Case:
    values = torch.randperm(65536, generator=torch.Generator().manual_seed(0))[:256].to(torch.int32)

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        v = i["values"].view(4, 8, 8).to(torch.int64)  # matrix, row, column

        def pair(m: Tensor) -> Tensor:  # lane l: row l / 4, columns 2 (l % 4)..
            return (m[:, 0::2] | m[:, 1::2] << 16).reshape(32)

        rows = [pair(v[m]) for m in (0, 1, 2, 3, 0, 1)] + [pair(v[m].T) for m in (0, 1, 0, 1, 2, 3)]
        packed = torch.stack(rows)
        return {"registers": torch.where(packed >= 2**31, packed - 2**32, packed)}

    return Case(
        "ldmatrix_probe",
        "warp_probe.cu",
        {"values": values},
        {"registers": ((12, 32), torch.int32)},
        [Step("ldmatrix_probe", (1,), (32,), ["values", "registers"])],
        reference,
        0.0,
        ["registers"],
    )


def integer_mma_probe(cases: int = 64, seed: int = 0) -> Case:
    """Bytes of all sizes and signs; the last cases hold the largest sums, and one that wraps at 32 bits."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(-128, 128, (cases, rows, 32), generator=g, dtype=torch.int8) for rows in (16, 8))
    c = torch.randint(-(2**20), 2**20, (cases, 16, 8), generator=g, dtype=torch.int32)
    a[-2:], b[-2:] = -128, -128
    c[-1] = 2**31 - 1

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        total = i["a"].long() @ i["b"].long().transpose(1, 2) + i["c"].long()
        return {"d": (total + 2**31) % 2**32 - 2**31}

    shapes = {"d": ((cases, 16, 8), torch.int32)}
    step = Step("integer_mma_probe", (cases,), (32,), ["a", "b", "c", "d"])
    return Case("integer_mma_probe", "warp_probe.cu", {"a": a, "b": b, "c": c}, shapes, [step], reference, 0.0, ["d"])


def integer_score_probe(n: int = 4000, seed: int = 0) -> Case:
    """Selectors of all sixteen nibbles; sums on both sides of 0 up to 2^22 - 1."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (n, 3), generator=g).to(torch.int32)
    sums = torch.randint(-(2**22) + 1, 2**22, (n,), generator=g).to(torch.int32)
    sums[:8] = torch.tensor([0, 1, -1, 2, -2, 2**22 - 1, 1 - 2**22, 144 * 64 * 128])

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        low, high, selector = (i["words"][:, k].long() % 2**32 for k in range(3))
        both, result = [low >> 8 * k & 255 for k in range(4)] + [high >> 8 * k & 255 for k in range(4)], torch.zeros_like(low)
        for k in range(4):
            nibble = selector >> 4 * k & 15
            byte = torch.stack(both, 1).gather(1, (nibble & 7)[:, None])[:, 0]
            result |= torch.where(nibble >= 8, (byte >> 7) * 255, byte) << 8 * k
        return {"selected": torch.where(result >= 2**31, result - 2**32, result), "positive": i["sums"].clamp_min(0).to(dtype) * 2.0**-22}

    shapes = {"selected": ((n,), torch.int32), "positive": ((n,), torch.float32)}
    step = Step("integer_score_probe", ((n + 127) // 128,), (128,), ["words", "sums", "selected", "positive", n])
    return Case("integer_score_probe", "warp_probe.cu", {"words": words, "sums": sums}, shapes, [step], reference, 0.0, ["selected", "positive"])


SCALAR_ROWS = [
    "fmaf",
    "a * b + c",
    "a / b",
    "sqrtf",
    "denormal product",
    "to bf16",
    "to e4m3",
    "to e2m1",
    "to e8m0",
    "__float2int_rn",
    "expf",
    "__expf",
    "logf",
    "rsqrtf",
    "exp2f",
    "tanhf",
]
EXACT_SCALAR_ROWS = 10  # the first ones: the CPU and the GPU must agree in every bit


def scalar_probe(n: int = 20000, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    inputs = {name: torch.randn(n, generator=g) * 8 for name in ("x", "y", "z")}

    def reference(i: Tensors, dtype: torch.dtype) -> Tensors:
        x, y, z = (i[name].to(dtype) for name in ("x", "y", "z"))
        return {"exact_math": torch.stack([x * y + z, x / y])}

    shapes = {"out": ((len(SCALAR_ROWS), n), torch.float32)}
    return Case(
        "scalar_probe",
        "scalar_probe.cu",
        inputs,
        shapes,
        [Step("scalar_probe", ((n + 127) // 128,), (128,), ["x", "y", "z", "out", n])],
        reference,
        1e-6,
    )


def small_cases() -> list[Case]:
    """Grid rationale: positions inside, at and beyond the window; ragged lists and tails; an empty split; two head blocks."""
    return [
        rms_norm(),
        rms_norm(rows=3, dim=8),
        sinkhorn(),
        sinkhorn(tokens=1),
        index_score(),
        index_score(tokens=1, entries=16, lowest_scale=0),
        gemm(m=64, n=128, k=512),
        gemm(m=13, n=64, k=2048),
        attention([500, 127, 3], splits=4),
        attention([0, 15, 16, 40], heads=32, window=16, topk=7, compressed=9, splits=2),
        attention([0, 300], topk=1, compressed=5, splits=8),
        attention([500, 127, 3], splits=4, whole_tiles=True),
        mma_probe(cases=4, kind="integers"),
        mma_probe(cases=4),
        ldmatrix_probe(),
        integer_mma_probe(cases=4),
        integer_score_probe(n=300),
    ]
