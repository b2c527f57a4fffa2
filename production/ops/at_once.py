"""Typed wrappers of the kernels that do several operations in one launch, for decode and where memory traffic decides.

    project_hidden(device, x, x_q, (wq_a, qr_raw), (wkv, kv_raw))        # both products, one launch
    latents(device, Latents(...), [Pooling(...), ...])

Each gives the bits of the wrappers it stands for, which its docstring names, and fits the widths that `fits_at_once` says. T = flat
tokens of a call, position [T] i32 is -1 for pads. Outputs share no memory with inputs or with each other. A kernel that cannot run raises KernelError: nothing falls back. Tests:
pytest parity/test_operations_at_once.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from production.launch import Argument, Device
from production.ops.arguments import apart as _apart
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import shape as _shape
from production.ops.dense import (
    EXPERTS_STREAM_WANTED,
    SCORING,
    STREAM_TOKENS,
    STREAM_WANTED,
    STREAM_WARPS,
    act_quant,
    stream_slices,
)
from production.ops.layout import KEY_BLOCK
from production.ops.layout import entry_strides as _entry_strides
from production.ops.layout import rotary_dims as _rotary_dims
from production.ops.layout import rows as _rows
from production.ops.layout import tokens as _tokens

MOST_NORM_DIM, MOST_KEY_DIMS = 2048, 256  # as in rows.cuh and latents.cu
MOST_EXPERTS, MOST_CHOSEN = 1024, 32  # as in router.cuh
ROW_TOKENS = 4  # as in latents.cu
BLOCK = STREAM_WARPS * 32

NO_PRODUCT = (None, None)
Weight = tuple[Tensor, Tensor]  # FP8: codes [N, K] u8 and scale [ceil(N / 128), ceil(K / 128)] u8


def fits_at_once(hidden: int, q_lora: int, head_dim: int, index_dim: int, width: int, experts: int, chosen: int) -> bool:
    """Whether the kernels here take these widths: rows of 16-byte pieces, one warp a norm, the router's lists in shared memory."""
    eight = all(n % 8 == 0 for n in (hidden, q_lora, head_dim, width))
    return eight and width % 32 == 0 and max(q_lora, head_dim) <= MOST_NORM_DIM and index_dim <= MOST_KEY_DIMS and experts <= MOST_EXPERTS and chosen <= MOST_CHOSEN


# ---- rows ----


def quant_rows(dev: Device, x: Tensor, out: Tensor) -> None:
    """act_quant in its variant `rows`."""
    act_quant(dev, x, out, variant="rows")


def swiglu_quant(
    dev: Device, gate: Tensor, up: Tensor, weight: Tensor, h_q: Tensor, shared_gate: Tensor, shared_up: Tensor, shared_h_q: Tensor, limit: float
) -> None:  # fmt: skip
    """swiglu, then act_quant, of the routed experts with their weights and of the shared one without. [R, I] and [T, I] bf16; weight [R] f32."""
    (R, width), T = gate.shape, shared_gate.shape[0]
    for name, tensor in (("up", up), ("h_q", h_q)):
        _shape("swiglu_quant", name, tensor, R, width)
    for name, tensor in (("shared_gate", shared_gate), ("shared_up", shared_up), ("shared_h_q", shared_h_q)):
        _shape("swiglu_quant", name, tensor, T, width)
    _shape("swiglu_quant", "weight", weight, R)
    _packed("swiglu_quant", gate=gate, up=up, weight=weight, h_q=h_q, shared_gate=shared_gate, shared_up=shared_up, shared_h_q=shared_h_q)
    _apart(
        "swiglu_quant", {"h_q": h_q, "shared_h_q": shared_h_q}, {"gate": gate, "up": up, "weight": weight, "shared_gate": shared_gate, "shared_up": shared_up}
    )  # fmt: skip
    _need(width % 8 == 0, "swiglu_quant", f"width {width} is no multiple of 8")
    if R + T:
        args = (gate, up, weight, h_q, R, shared_gate, shared_up, shared_h_q, T, width, limit)
        dev.launch("rows_quant", "swiglu_quant", (_ceil((R + T) * _ceil(width, 256), STREAM_WARPS),), (BLOCK,), args)


def combine_rows(dev: Device, down: Tensor, experts: Tensor, shared: Tensor, routed: Tensor, out: Tensor) -> None:
    """moe_combine, D % 8 == 0."""
    T, k, D = down.shape
    _shape("combine_rows", "experts", experts, T, k)
    for name, tensor in (("shared", shared), ("routed", routed), ("out", out)):
        _shape("combine_rows", name, tensor, T, D)
    _packed("combine_rows", down=down, experts=experts, shared=shared, routed=routed, out=out)
    _apart("combine_rows", {"routed": routed, "out": out}, {"down": down, "experts": experts, "shared": shared})
    _need(D % 8 == 0, "combine_rows", f"D {D} is no multiple of 8")
    if T:
        dev.launch("rows_quant", "combine_rows", (T, _ceil(D, 1024)), (128,), (down, experts, shared, routed, out, k, D))


# ---- products ----


def _fp8(operation: str, T: int, K: int, weight: Weight, out: Tensor) -> tuple[int, int]:
    """Checks an FP8 product; rows of the matrix and slices of one."""
    codes, scale = weight
    N = codes.shape[0]
    _shape(operation, "weight", codes, N, K)
    _shape(operation, "scale", scale, _ceil(N, 128), _ceil(K, 128))
    _shape(operation, "out", out, T, N)
    _packed(operation, weight=codes, scale=scale, out=out)
    return N, stream_slices(N, K, STREAM_WANTED)


def _bf16(operation: str, T: int, K: int, weight: Tensor, out: Tensor) -> tuple[int, int]:
    N = weight.shape[0]
    _shape(operation, "weight", weight, N, K)
    _shape(operation, "out", out, T, N)
    _packed(operation, weight=weight, out=out)
    return N, stream_slices(N, 2 * K, STREAM_WANTED)


def _blocks(rows_of_a_warp: int, *matrices: tuple[int, int]) -> int:
    return sum(_ceil(N, 8 * rows_of_a_warp * STREAM_WARPS // slices) for N, slices in matrices)


def project_hidden(
    dev: Device, x: Tensor, x_q: Tensor, wq_a: tuple[Weight, Tensor], wkv: tuple[Weight, Tensor],
    compressor: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    index_compressor: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    weights_proj: tuple[Tensor, Tensor, float] | None = None,
) -> None:  # fmt: skip
    """linear_fp8 of x_q by wq_a and wkv, linear_bf16 of x by the compressors' wkv and wgate and, scaled and rounded first, weights_proj.

    x, x_q [T, D] bf16. Each matrix with its output: FP8 to bf16, bf16 to f32; compressors ((wkv, kv), (wgate, gate)) or None
    """
    T, D = x.shape
    _shape("project_hidden", "x_q", x_q, T, D)
    _packed("project_hidden", x=x, x_q=x_q)
    fp8 = [_fp8("project_hidden", T, D, *given) for given in (wq_a, wkv)]
    args: list[Argument] = [x, x_q, T, D]
    for (weight, out), (N, slices) in zip((wq_a, wkv), fp8, strict=True):
        args += [*weight, out, N, slices]
    bf16: list[tuple[int, int]] = []
    for pair in (compressor, index_compressor):
        if pair is None:
            args += [None, None, None, None, 0, 1]
            continue
        sizes = [_bf16("project_hidden", T, D, *given) for given in pair]
        _need(sizes[0] == sizes[1], "project_hidden", "wkv and wgate of a compressor have different rows")
        bf16 += sizes
        args += [*pair[0], *pair[1], *sizes[0]]
    if weights_proj is None:
        args += [None, None, 0, 1, 1.0]
    else:
        bf16.append(_bf16("project_hidden", T, D, *weights_proj[:2]))
        args += [*weights_proj[:2], *bf16[-1], weights_proj[2]]
    (main_kv, main_gate), (index_kv, index_gate) = (pair or (NO_PRODUCT, NO_PRODUCT) for pair in (compressor, index_compressor))
    _apart(
        "project_hidden",
        {"qr_raw": wq_a[1], "kv_raw": wkv[1], "kv of the compressor": main_kv[1], "gate of the compressor": main_gate[1], "kv of the indexer's": index_kv[1],
         "gate of the indexer's": index_gate[1], "index_weights": weights_proj and weights_proj[1]},
        {"x": x, "x_q": x_q, "wq_a": wq_a[0][0], "scale of wq_a": wq_a[0][1], "wkv": wkv[0][0], "scale of wkv": wkv[0][1], "wkv of the compressor": main_kv[0],
         "wgate of the compressor": main_gate[0], "wkv of the indexer's": index_kv[0], "wgate of the indexer's": index_gate[0],
         "weights_proj": weights_proj and weights_proj[0]},
    )  # fmt: skip
    if T:
        dev.launch("projections", "project_hidden", (_ceil(T, STREAM_TOKENS), _blocks(1, *fp8, *bf16)), (BLOCK,), args)


def project_latents(dev: Device, qr_q: Tensor, wq_b: tuple[Weight, Tensor], index_wq_b: tuple[Weight, Tensor] | None = None) -> None:
    """linear_fp8 of qr_q [T, q_lora] bf16 by wq_b and the indexer's wq_b, each with its output."""
    T, K = qr_q.shape
    _packed("project_latents", qr_q=qr_q)
    sizes = [_fp8("project_latents", T, K, *given) for given in (wq_b, index_wq_b) if given is not None]
    args: list[Argument] = [qr_q, T, K, *wq_b[0], wq_b[1], *sizes[0]]
    args += [None, None, None, 0, 1] if index_wq_b is None else [*index_wq_b[0], index_wq_b[1], *sizes[1]]
    (index_codes, index_scale), index_out = index_wq_b or (NO_PRODUCT, None)
    _apart(
        "project_latents", {"q_raw": wq_b[1], "index_q_raw": index_out},
        {"qr_q": qr_q, "wq_b": wq_b[0][0], "scale of wq_b": wq_b[0][1], "the indexer's wq_b": index_codes, "scale of the indexer's wq_b": index_scale},
    )  # fmt: skip
    if T:
        dev.launch("projections", "project_latents", (_ceil(T, STREAM_TOKENS), _blocks(2, *sizes)), (BLOCK,), args)


def project_router(dev: Device, x: Tensor, x_q: Tensor, gate: Tensor, logits: Tensor) -> None:
    """linear_bf16 of x [T, D] by the gate -> logits [T, E] f32, and act_quant of x -> x_q."""
    T, D = x.shape
    _shape("project_router", "x_q", x_q, T, D)
    _packed("project_router", x=x, x_q=x_q)
    _need(D % 8 == 0, "project_router", f"D {D} is no multiple of 8")
    size = _bf16("project_router", T, D, gate, logits)
    _apart("project_router", {"x_q": x_q, "logits": logits}, {"x": x, "gate": gate})
    if T:
        dev.launch("projections", "project_router", (_ceil(T, STREAM_TOKENS), _blocks(1, size) + T), (BLOCK,), (x, x_q, T, D, gate, logits, *size))


def project_shared(
    dev: Device, x_q: Tensor, w1: tuple[Weight, Tensor], w3: tuple[Weight, Tensor], logits: Tensor, scoring: str, scores: Tensor,
    bias: Tensor | None, tid2eid: Tensor | None, tokens: Tensor, position: Tensor, experts: Tensor, weights: Tensor,
    normalise: bool, route_scale: float,
) -> None:  # fmt: skip
    """linear_fp8 of x_q [T, D] by w1 and w3 of the shared expert; gate_scores, gate_choose and gate_weights of the logits."""
    (T, D), E, k = x_q.shape, logits.shape[1], experts.shape[1]
    sizes = [_fp8("project_shared", T, D, *given) for given in (w1, w3)]
    _need(sizes[0] == sizes[1], "project_shared", "w1 and w3 have different rows")
    _need(scoring in SCORING and k <= E <= MOST_EXPERTS and k <= MOST_CHOSEN, "project_shared", f"{k} of {E} experts by {scoring!r}")
    for name, tensor, expected in (
        ("logits", logits, (T, E)), ("scores", scores, (T, E)), ("tokens", tokens, (T,)), ("position", position, (T,)),
        ("experts", experts, (T, k)), ("weights", weights, (T, k)),
    ):  # fmt: skip
        _shape("project_shared", name, tensor, *expected)
    if bias is not None:
        _shape("project_shared", "bias", bias, E)
    if tid2eid is not None:
        _shape("project_shared", "tid2eid", tid2eid, tid2eid.shape[0], k)
    _packed(
        "project_shared", x_q=x_q, logits=logits, scores=scores, bias=bias, tid2eid=tid2eid, tokens=tokens, position=position,
        experts=experts, weights=weights,
    )  # fmt: skip
    _apart(
        "project_shared", {"gate": w1[1], "up": w3[1], "scores": scores, "experts": experts, "weights": weights},
        {"x_q": x_q, "w1": w1[0][0], "scale of w1": w1[0][1], "w3": w3[0][0], "scale of w3": w3[0][1], "logits": logits, "bias": bias, "tid2eid": tid2eid,
         "tokens": tokens, "position": position},
    )  # fmt: skip
    if T:
        args = (
            x_q, T, D, *w1[0], w1[1], *w3[0], w3[1], *sizes[0], logits, scores, bias, tid2eid, tokens, position, experts, weights,
            E, k, SCORING[scoring], int(normalise), route_scale,
        )  # fmt: skip
        dev.launch("projections", "project_shared", (_ceil(T, STREAM_TOKENS), 1 + _blocks(2, *sizes)), (BLOCK,), args)


def project_down(
    dev: Device, h_q: Tensor, experts: Tensor, w2: Tensor, s2: Tensor, down: Tensor, shared_h_q: Tensor, shared_w2: tuple[Weight, Tensor]
) -> None:  # fmt: skip
    """experts_down of h_q [T, k, I] -> down [T, k, D], and linear_fp8 of shared_h_q [T, I] by the shared w2."""
    (T, k, width), (E, D) = h_q.shape, w2.shape[:2]
    _shape("project_down", "experts", experts, T, k)
    _shape("project_down", "w2", w2, E, D, width // 2)
    _shape("project_down", "s2", s2, E, D, width // 32)
    _shape("project_down", "down", down, T, k, D)
    _shape("project_down", "shared_h_q", shared_h_q, T, width)
    _need(width % 32 == 0, "project_down", f"width {width} is no multiple of 32")
    _packed("project_down", h_q=h_q, experts=experts, w2=w2, s2=s2, down=down, shared_h_q=shared_h_q)
    size = _fp8("project_down", T, width, *shared_w2)
    _need(size[0] == D, "project_down", f"the shared expert makes rows of {size[0]}, the others of {D}")
    _apart(
        "project_down", {"down": down, "shared": shared_w2[1]},
        {"h_q": h_q, "experts": experts, "w2": w2, "s2": s2, "shared_h_q": shared_h_q, "the shared w2": shared_w2[0][0], "scale of the shared w2": shared_w2[0][1]},
    )  # fmt: skip
    slices = stream_slices(D, width // 2, EXPERTS_STREAM_WANTED)
    if T:
        grid = _blocks(2, size) * _ceil(T, STREAM_TOKENS) + _blocks(4, (D, slices)) * T * k
        args = (h_q, experts, T * k, width, w2, s2, down, D, slices, shared_h_q, *shared_w2[0], shared_w2[1], T, size[1])
        dev.launch("projections", "project_down", (grid,), (BLOCK,), args)


# ---- what follows the projections ----


@dataclass(frozen=True)
class Pooling:
    """One step of a compressor, [b] rows of one token: as compressor_step, rms_norm, rope and a store take it.

    kv, gate [b, 1, c*d'] f32 | ape [m, c*d'] | state_kv, state_gate [b, R, c*d'] f32 | norm [d'] f32 | pooled, rows [b, 1, d'] bf16
    entry, entry_position [b, 1] i32
    cache   entries [b, capacity, entry_bytes] u8, or (keys [b, capacity, di/2], scales [b, capacity, di/32]) u8
    """

    kv: Tensor
    gate: Tensor
    ape: Tensor
    state_kv: Tensor
    state_gate: Tensor
    norm: Tensor
    pooled: Tensor
    rows: Tensor
    entry: Tensor
    entry_position: Tensor
    ratio: int
    cache: Tensor | tuple[Tensor, Tensor]

    def add_to(self, name: str, outputs: dict[str, Tensor | None], inputs: dict[str, Tensor | None]) -> None:
        """What a step writes, the state and the cache among it, and what it reads."""
        cache, scales = (self.cache, None) if isinstance(self.cache, Tensor) else self.cache
        outputs |= {
            f"{name}: pooled": self.pooled, f"{name}: rows": self.rows, f"{name}: entry": self.entry, f"{name}: entry_position": self.entry_position,
            f"{name}: state_kv": self.state_kv, f"{name}: state_gate": self.state_gate, f"{name}: cache": cache, f"{name}: scales": scales,
        }  # fmt: skip
        inputs |= {f"{name}: kv": self.kv, f"{name}: gate": self.gate, f"{name}: ape": self.ape, f"{name}: norm": self.norm}

    def arguments(self, operation: str, b: int) -> tuple[list[Argument], int]:
        """Checked; what both kinds share, and whether groups overlap."""
        width, features = self.pooled.shape[2], self.kv.shape[2]
        overlap = features // width - 1
        slots = self.ratio * (1 + overlap)
        for name, tensor, expected in (
            ("kv", self.kv, (b, 1, features)), ("gate", self.gate, (b, 1, features)), ("ape", self.ape, (self.ratio, features)),
            ("state_kv", self.state_kv, (b, slots, features)), ("state_gate", self.state_gate, (b, slots, features)), ("norm", self.norm, (width,)),
            ("pooled", self.pooled, (b, 1, width)), ("rows", self.rows, (b, 1, width)), ("entry", self.entry, (b, 1)),
            ("entry_position", self.entry_position, (b, 1)),
        ):  # fmt: skip
            _shape(operation, name, tensor, *expected)
            _packed(operation, **{name: tensor})
        _need(overlap in (0, 1) and features == (1 + overlap) * width and width % 8 == 0 and width <= MOST_NORM_DIM, operation, f"features of {features} for entries of {width}")
        return [
            self.kv, self.gate, self.ape, self.norm, self.state_kv, self.state_gate, self.pooled, self.rows, self.entry, self.entry_position,
        ], overlap  # fmt: skip


def latents(
    dev: Device, qr_raw: Tensor, q_norm: Tensor, qr: Tensor, qr_q: Tensor, kv_raw: Tensor, kv_norm: Tensor, kv: Tensor, position: Tensor,
    row: Tensor, ring: Tensor, ring_position: Tensor, inv_freq: Tensor, eps: float, start: Tensor, count: Tensor,
    compressor: Pooling | None = None, index_compressor: Pooling | None = None,
) -> None:  # fmt: skip
    """rms_norm and act_quant of the query; rms_norm, rope and store_window of kv; a step of the compressors, each with its store.

    qr_raw, qr, qr_q [T, q_lora] bf16; kv_raw, kv [T, d] bf16; ring [b, slots, EB] u8; start, count [b] i32; compressors for T = b only
    """
    (T, q_lora), d = qr_raw.shape, kv_raw.shape[1]
    (b, slots, size), half_r = ring.shape, inv_freq.shape[0]
    operation = "latents"
    for name, tensor, width in (("qr", qr, q_lora), ("qr_q", qr_q, q_lora), ("kv_raw", kv_raw, d), ("kv", kv, d)):
        _shape(operation, name, tensor, T, width)
    for name, tensor, expected in (("q_norm", q_norm, (q_lora,)), ("kv_norm", kv_norm, (d,)), ("ring_position", ring_position, (b, slots)), ("start", start, (b,)), ("count", count, (b,))):
        _shape(operation, name, tensor, *expected)
    _tokens(operation, T, position, row)
    _packed(operation, qr_raw=qr_raw, q_norm=q_norm, qr=qr, qr_q=qr_q, kv_raw=kv_raw, kv_norm=kv_norm, kv=kv, inv_freq=inv_freq, start=start, count=count)
    _need(q_lora % 8 == 0 and d % 8 == 0 and max(q_lora, d) <= MOST_NORM_DIM, operation, f"rows of {q_lora} and {d}")
    _need(b * slots >= T, operation, f"{T} tokens in {b} rows of {slots} slots: two would share a slot")
    outputs: dict[str, Tensor | None] = {"qr": qr, "qr_q": qr_q, "kv": kv, "ring": ring, "ring_position": ring_position}
    inputs: dict[str, Tensor | None] = {
        "qr_raw": qr_raw, "q_norm": q_norm, "kv_raw": kv_raw, "kv_norm": kv_norm, "position": position, "row": row, "inv_freq": inv_freq, "start": start, "count": count
    }  # fmt: skip
    for name, pooling in (("compressor", compressor), ("index_compressor", index_compressor)):
        if pooling is not None:
            pooling.add_to(name, outputs, inputs)
    _apart(operation, outputs, inputs)
    _need(_rotary_dims(operation, d, size) == 2 * half_r, operation, f"{half_r} pairs, the ring's entries have {_rotary_dims(operation, d, size)} rotary dims")
    args: list[Argument] = [
        qr_raw, q_norm, qr, qr_q, q_lora, kv_raw, kv_norm, kv, position, row, ring, ring_position, d, slots,
        *_entry_strides(operation, "ring", ring), *_rows(operation, "ring_position", ring_position), inv_freq, half_r, T, eps, start, count, b,
    ]  # fmt: skip
    roles = 1
    if compressor is None:
        args += [None] * 10 + [1, 0, None, 0, 0, 0]
    else:
        given, overlap = compressor.arguments(operation, b)
        assert isinstance(compressor.cache, Tensor)
        _shape(operation, "entries", compressor.cache, b, compressor.cache.shape[1], size)
        _need(b == T and compressor.pooled.shape[2] == d, operation, "a compressor takes one token a row, entries as wide as kv")
        args += [*given, compressor.ratio, overlap, compressor.cache, compressor.cache.shape[1], *_entry_strides(operation, "entries", compressor.cache)]
        roles = 2
    if index_compressor is None:
        args += [None] * 10 + [32, None, None, 0, 0, 0, 0, 0, 1.0]
    else:
        given, overlap = index_compressor.arguments(operation, b)
        assert isinstance(index_compressor.cache, tuple)
        (keys, scales), di = index_compressor.cache, index_compressor.pooled.shape[2]
        capacity = keys.shape[1]
        _shape(operation, "keys", keys, b, capacity, di // 2)
        _shape(operation, "scales", scales, b, capacity, di // KEY_BLOCK)
        _need(roles == 2 and (overlap, index_compressor.ratio) == (1, 4) and di <= MOST_KEY_DIMS, operation, f"an indexer's keys of {di} beside a layer's entries")
        args += [*given, di, keys, scales, capacity, *_rows(operation, "keys", keys, 2), *_rows(operation, "scales", scales, 2), di**-0.5]
        roles = 3
    if T:
        dev.launch("latents", "latents", (max(_ceil(T, ROW_TOKENS), b if roles > 1 else 0), roles), (BLOCK,), args)


def query_heads(
    dev: Device, q_raw: Tensor, q: Tensor, index_q_raw: Tensor | None, index_q: Tensor | None, position: Tensor, inv_freq: Tensor, eps: float
) -> None:  # fmt: skip
    """rms_norm without weight and rope of every head; rope (in place) and hadamard_e2m1 of the indexer's.

    q_raw, q [T, h, d] bf16; index_q_raw, index_q [T, hi, di] bf16 or None; position [T] i32; inv_freq [r/2] f32
    """
    T, h, d = q_raw.shape
    _shape("query_heads", "q", q, T, h, d)
    hi, di = (0, 0) if index_q_raw is None else index_q_raw.shape[1:]
    if index_q_raw is not None and index_q is not None:
        _shape("query_heads", "index_q", index_q, T, hi, di)
        _need(di >= KEY_BLOCK and di & (di - 1) == 0, "query_heads", f"indexer queries of {di}: expected a power of two of at least {KEY_BLOCK}")
    _tokens("query_heads", T, position)
    _packed("query_heads", q_raw=q_raw, q=q, index_q_raw=index_q_raw, index_q=index_q, inv_freq=inv_freq)
    _apart("query_heads", {"q": q, "index_q": index_q, "index_q_raw": index_q_raw}, {"q_raw": q_raw, "position": position, "inv_freq": inv_freq})
    _need(d % 8 == 0 and d <= MOST_NORM_DIM, "query_heads", f"heads of {d}")
    if T:
        args = (q_raw, q, index_q_raw, index_q, position, inv_freq, h, d, hi, di, inv_freq.shape[0], eps, di**-0.5 if di else 1.0)
        dev.launch("heads", "query_heads", (T, _ceil(h + hi, STREAM_WARPS)), (BLOCK,), args, 4 * STREAM_WARPS * di)
