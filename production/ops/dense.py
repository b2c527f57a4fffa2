"""Typed wrappers of the kernels that work on one token at a time: norms, rotation, linears, router, experts.

    linear_fp8(device, x, weight, scale, out)        # thin for at most THIN_TOKENS tokens, else mma tiles

Each wrapper checks what the kernel relies on, picks a variant by the number of tokens (or takes `variant`) and launches
it; `device.ran` records what really ran. Outputs belong to the caller, nothing is allocated, and outputs and scratch share no
memory with inputs or with each other, but where a docstring says so. A kernel that cannot run raises KernelError: nothing falls back to torch. T = flat tokens of a call, R = rows, position [T] i32 is -1 for pads,
whose outputs stay untouched or are anything. "(rs)": dim 0 may have any stride.
Not here: whatever reads the KV cache (indexer.py, sparse_attn.py). Tests: pytest parity/test_operations_dense.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from production.launch import Argument, Device, KernelError
from production.ops.arguments import apart as _apart
from production.ops.arguments import ceil_div as _ceil
from production.ops.arguments import choose as _choose
from production.ops.arguments import need as _need
from production.ops.arguments import packed as _packed
from production.ops.arguments import same_place as _same_place
from production.ops.arguments import shape as _shape

THIN_TOKENS = 8  # up to here a token is cheaper alone than in a tile of 64
GROUP_NORM_DIM, WARP_NORM_DIM = 256, 2048  # eight lanes a row up to here, a warp up to here, then a block
SCORING = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}  # as in gate.cu
TILE = 64  # as in linear.cuh
THIN_BLOCK_ROWS = 32
STREAM_WARPS, STREAM_TOKENS, STREAM_GRAIN = 8, 8, 256  # as in stream.cuh
TILES_ROWS, TILES_DEPTH, TILES_ENOUGH = 128, 64, 132  # as in tiles.cuh; blocks that leave no multiprocessor idle
WGMMA_THREADS = 256
ORDER_WARPS, ORDER_EXPERTS = 32, 1024  # as in experts_tiles.cu
STREAM_FEW_ROWS = 2048  # up to here a warp takes 8 rows of w, so that all multiprocessors have some
STREAM_WANTED, EXPERTS_STREAM_WANTED = 2048, 512  # warps: 16 on each of 132 multiprocessors; of one expert


# ---- positions and embedding ----


def token_positions(dev: Device, start: Tensor, count: Tensor, position: Tensor, row: Tensor) -> None:
    """position[row*s + i] = start[row] + i for i < count[row], else -1; row[...] = batch row.

    start, count  [b] i32, tokens taken before this call and valid tokens of it; position, row  [b * s] i32
    """
    b, tokens = start.shape[0], position.shape[0]
    _need(b > 0 and tokens % b == 0, "token_positions", f"{tokens} positions for {b} rows")
    _shape("token_positions", "count", count, b)
    _shape("token_positions", "row", row, tokens)
    _packed("token_positions", start=start, count=count, position=position, row=row)
    _apart("token_positions", {"position": position, "row": row}, {"start": start, "count": count})
    if tokens:
        dev.launch("positions", "token_positions", (_ceil(tokens, 128),), (128,), (start, count, position, row, b, tokens // b))


def advance(dev: Device, start: Tensor, count: Tensor) -> None:
    """start += count, both [b] i32, on the device; start in place."""
    _shape("advance", "count", count, start.shape[0])
    _packed("advance", start=start, count=count)
    _apart("advance", {"start": start}, {"count": count})
    dev.launch("positions", "advance_length", (_ceil(start.shape[0], 128),), (128,), (start, count, start.shape[0]))


def embed(dev: Device, tokens: Tensor, weight: Tensor, position: Tensor, X: Tensor, variant: str | None = None) -> None:
    """X[t,i,:] = weight[tokens[t],:] for every stream i.

    tokens [T] i64; weight [vocab, D] bf16; position [T] i32; X [T, n, D] bf16. Variants: naive, rows (default where D % 8 == 0).
    """
    T, n, D = X.shape
    _shape("embed", "tokens", tokens, T)
    _shape("embed", "position", position, T)
    _shape("embed", "weight", weight, weight.shape[0], D)
    _packed("embed", tokens=tokens, weight=weight, position=position, X=X)
    _apart("embed", {"X": X}, {"tokens": tokens, "weight": weight, "position": position})
    fits = D % 8 == 0 and weight.data_ptr() % 16 == 0 and X.data_ptr() % 16 == 0
    which = _choose("embed", variant, "rows" if fits else "naive", ("naive", "rows"))
    _need(fits or which == "naive", "embed", f"rows: D {D} is no multiple of 8, or memory not of 16 bytes")
    args = (tokens, weight, position, X, n, D)
    if T and which == "rows":
        dev.launch("embed", "embed_rows", (T, _ceil(D, 1024)), (128,), args)
    elif T:
        dev.launch("embed", "embed_tokens", (T,), (128,), args)


# ---- norm, rotation, rounding ----


def rms_norm(dev: Device, x: Tensor, weight: Tensor | None, out: Tensor, eps: float, variant: str | None = None) -> None:
    """out = x * rsqrt(mean(x^2) + eps) * weight. x, out [R, dim] bf16 (rs), out may be x itself; weight [dim] f32 or None = 1.

    Variants: naive, group, warp, block.
    """
    R, dim = x.shape
    _shape("rms_norm", "out", out, R, dim)
    if weight is not None:
        _shape("rms_norm", "weight", weight, dim)
    _apart("rms_norm", {"out": out}, {"x": None if _same_place(out, x) else x, "weight": weight})
    default = "group" if dim <= GROUP_NORM_DIM else "warp" if dim <= WARP_NORM_DIM else "block"
    which = _choose("rms_norm", variant, default, ("naive", "group", "warp", "block"))
    if not R:
        return
    strides = (x.stride(0), out.stride(0), eps)
    if which == "block":
        dev.launch("rms_norm", "rms_norm_block", (R,), (256,), (x, weight, out, dim, *strides))
    else:
        rows, threads = {"naive": (64, 64), "group": (16, 128), "warp": (4, 128)}[which]
        dev.launch("rms_norm", f"rms_norm_{which}", (_ceil(R, rows),), (threads,), (x, weight, out, R, dim, *strides))


def rope(dev: Device, x: Tensor, position: Tensor, inv_freq: Tensor, inverse: bool = False) -> None:
    """Rotate the last r dims of x, in place, adjacent pairs, by position * inv_freq (inverse: back).

    x [T, heads, dim] bf16, dims 0 and 1 of any stride, each element in a place of its own; position [T] i32; inv_freq [r/2] f32
    """
    T, heads, dim = x.shape
    half = inv_freq.shape[0]
    _shape("rope", "position", position, T)
    _need(2 * half <= dim, "rope", f"{half} pairs do not fit in {dim} dims")
    _packed("rope", position=position, inv_freq=inv_freq)
    _apart("rope", {"x": x}, {"position": position, "inv_freq": inv_freq})
    if T:
        args = (x, position, inv_freq, heads, dim, half, x.stride(0), x.stride(1), -1.0 if inverse else 1.0)
        dev.launch("rope", "rope_pairs", (T, _ceil(heads, 8)), (32,), args)


def act_quant(dev: Device, x: Tensor, out: Tensor, block: int = 128, variant: str | None = None) -> None:
    """out = x rounded to e4m3, one power-of-two scale per `block` along the row (the last one may be shorter).

    x [R, dim] bf16 (rs); out [R, dim] bf16, the rounded values, exact in bf16. Variants: naive, group, rows (the same bits; rows: by
    at_once.quant_rows, blocks of 128 of rows of 16-byte pieces).
    """
    R, dim = x.shape
    _shape("act_quant", "out", out, R, dim)
    _need(block > 0, "act_quant", f"block {block}")
    _packed("act_quant", out=out)
    _apart("act_quant", {"out": out}, {"x": x})
    which = _choose("act_quant", variant, "group", ("naive", "group", "rows"))
    if which == "rows":
        _need(block == 128 and dim % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0, "act_quant", f"rows: x {list(x.shape)}, block {block}: blocks of 128, rows of 16-byte pieces are needed")
        if R:
            dev.launch("rows_quant", "quant_rows", (_ceil(R * _ceil(dim, 256), STREAM_WARPS),), (STREAM_WARPS * 32,), (x, out, R, dim, x.stride(0)))
    elif R:
        grid = _ceil(R * _ceil(dim, block), 128 if which == "naive" else 16)
        dev.launch("act_quant", f"act_quant_{which}", (grid,), (128,), (x, out, R, dim, x.stride(0), block))


# ---- linears ----

LINEAR_VARIANTS = ("naive", "thin", "mma")
STREAM_VARIANTS = ("stream", "stream8", "stream16")  # the same bits; stream picks rows of a warp by shape
EXPERTS_STREAM_VARIANTS = ("stream", "stream16", "stream32")
EXPERTS_TILES_VARIANTS = ("tiles", "tiles128", "tiles256", "wgmma", "wgmma128")


TILES_VARIANTS = ("tiles", "tiles128", "tiles256", "wgmma", "wgmma128", "wgmma256")  # of a kind the same bits


def _tiles(operation: str, variant: str, K: int, of_groups: bool, x: Tensor, T: int, N: int, groups: int) -> tuple[str, int]:
    """The kernel's suffix and its width, by shape: of tiles and wgmma the size that fills the card. wgmma needs K % 128 == 0, tiles
    K % 64 == 0, both groups of whole halves of a tile; a shape that does not fit goes to the next of wgmma, tiles, mma.
    """
    fits = {"wgmma": K % (2 * TILES_DEPTH) == 0 and of_groups, "tiles": K % TILES_DEPTH == 0 and of_groups}
    if variant in fits:
        kind = next((kind for kind in ("wgmma", "tiles")[variant == "tiles" :] if fits[kind]), "mma")
        rows, columns = (256, TILES_ROWS) if kind == "wgmma" else (TILES_ROWS, 256)
        variant = kind if kind == "mma" else f"{kind}256" if _ceil(T, rows) * _ceil(N, columns) * groups >= TILES_ENOUGH else f"{kind}128"
    if variant == "mma":
        return variant, TILE
    kind, width = variant[:5], int(variant[5:])
    _need(fits[kind], operation, f"x {list(x.shape)} does not fit {variant}: K must be a multiple of {TILES_DEPTH * (1 + (kind == 'wgmma'))}, outputs of a group of 64")
    _need(x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0, operation, f"{variant}: rows of x do not start at multiples of 16 bytes")
    return variant, width


def _tiles_shared(kind: str, width: int, slab_bytes: int) -> int:
    """Bytes of dynamic shared memory, as Stage in tiles.cuh and Layout in wgmma_tiles.cuh. slab_bytes: of a row of w in 32 columns."""
    if kind == "tiles":
        return (3 if slab_bytes == 64 and width == 128 else 4) * 2 * (TILES_ROWS * 64 + width * slab_bytes + 128)
    stage = width * 128 + {64: 16, 32: 9, 16: 5}[slab_bytes] * 1024
    stages = {64: 3 + (width == 256), 32: 4 + (width == 256), 16: 4}[slab_bytes]
    return stages * stage + width * 8 + (stages * 512 if slab_bytes == 16 else 0)


def stream_slices(rows: int, row_bytes: int, wanted: int) -> int:
    """Parts of a row of w that warps share, by shape alone: until `wanted` warps have work for 16 rows, or a part is 256 bytes."""
    slices = 1
    while slices < STREAM_WARPS and _ceil(rows, 16) * slices < wanted and row_bytes >= 2 * slices * STREAM_GRAIN:
        slices *= 2
    return slices


def _slices(operation: str, slices: int | None) -> None:
    """The warps of a block share rows of w among `slices` of them: as many as divide the block."""
    _need(slices in (None, 1, 2, 4, 8), operation, f"{slices} slices, expected 1, 2, 4, 8 or None, by shape")


def _stream(variant: str, rows: int) -> tuple[str, int]:
    """Kernel's suffix and rows of a warp."""
    if variant == "stream":
        variant = "stream8" if rows <= STREAM_FEW_ROWS else "stream16"
    return variant, int(variant.removeprefix("stream"))


def _linear_grid(variant: str, T: int, N: int, last: int) -> tuple[int, int, int]:
    if variant == "mma":
        return _ceil(T, TILE), _ceil(N, TILE), last
    return T, _ceil(N, THIN_BLOCK_ROWS if variant == "thin" else 128), last


def _launch_tiles(
    dev: Device, operation: str, which: str, width: int, T: int, N: int, groups: int, args: Sequence[Argument], slab_bytes: int
) -> None:
    """tiles: 128 rows of x times `width` rows of w a block; wgmma: `width` rows of x times 128 of w."""
    kind = which[:5]
    rows, columns, block = (TILES_ROWS, width, width) if kind == "tiles" else (width, TILES_ROWS, WGMMA_THREADS)
    grid = (_ceil(T, rows), _ceil(N, columns), groups)
    dev.launch(f"linear_{kind}", f"{operation}_{which}", grid, (block,), args, _tiles_shared(kind, width, slab_bytes))


def linear_fp8(
    dev: Device, x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, groups: int = 1, variant: str | None = None,
    slices: int | None = None,
) -> None:  # fmt: skip
    """out[t, g*N' + n] = sum_k x[t, g*K' + k] weight[g*N' + n, k] for each group g.

    x [T, groups*K'] bf16 (rs); weight [groups*N', K'] e4m3 codes as u8; scale [ceil(groups*N'/128), ceil(K'/128)] e8m0
    as u8; out [T, groups*N'] bf16. Variants: naive, thin, mma, stream (stream8, stream16; slices: 1, 2, 4, 8,
    None: by shape), tiles (tiles128, tiles256), wgmma (wgmma128, wgmma256; sm_90a).
    """
    (T, width), (rows, K) = x.shape, weight.shape
    _need(width == groups * K and rows % groups == 0, "linear_fp8", f"x {list(x.shape)} with {groups} groups of weight {list(weight.shape)}")
    _shape("linear_fp8", "scale", scale, _ceil(rows, 128), _ceil(K, 128))
    _shape("linear_fp8", "out", out, T, rows)
    _packed("linear_fp8", weight=weight, scale=scale, out=out)
    _apart("linear_fp8", {"out": out}, {"x": x, "weight": weight, "scale": scale})
    which = _choose("linear_fp8", variant, "thin" if T <= THIN_TOKENS else "mma", (*LINEAR_VARIANTS, *STREAM_VARIANTS, *TILES_VARIANTS))
    _slices("linear_fp8", slices)
    N = rows // groups
    if which in TILES_VARIANTS:
        which, width = _tiles("linear_fp8", which, K, groups == 1 or N % 64 == 0, x, T, N, groups)
    if T and which in STREAM_VARIANTS:
        kernel, width = _stream(which, rows)
        slices = slices or stream_slices(rows, K, STREAM_WANTED)
        grid = (_ceil(T, STREAM_TOKENS), _ceil(N, width * STREAM_WARPS // slices), groups)
        args = (x, weight, scale, out, T, N, K, x.stride(0), slices)
        dev.launch("linear_stream", f"linear_fp8_{kernel}", grid, (STREAM_WARPS * 32,), args)
    elif T and which in TILES_VARIANTS:
        _launch_tiles(dev, "linear_fp8", which, width, T, N, groups, (x, weight, scale, out, T, N, K, x.stride(0)), 32)
    elif T:
        grid = _linear_grid(which, T, N, groups)
        dev.launch("linear_fp8", f"linear_fp8_{which}", grid, (128,), (x, weight, scale, out, T, N, K, x.stride(0)))


def linear_bf16(
    dev: Device, x: Tensor, weight: Tensor, out: Tensor, scale: float = 1.0, round_bf16: bool = False, variant: str | None = None,
    slices: int | None = None,
) -> None:  # fmt: skip
    """out = scale * x weight^T; round_bf16: the product is rounded to bf16 before the scale.

    x [T, K] bf16 (rs); weight [N, K] bf16; out [T, N] f32 or bf16. Variants: naive, thin, mma, stream, tiles, wgmma (as linear_fp8).
    """
    (T, K), N = x.shape, weight.shape[0]
    _shape("linear_bf16", "weight", weight, N, K)
    _shape("linear_bf16", "out", out, T, N)
    _packed("linear_bf16", weight=weight, out=out)
    _apart("linear_bf16", {"out": out}, {"x": x, "weight": weight})
    which = _choose("linear_bf16", variant, "thin" if T <= THIN_TOKENS else "mma", (*LINEAR_VARIANTS, *STREAM_VARIANTS, *TILES_VARIANTS))
    _slices("linear_bf16", slices)
    if which in TILES_VARIANTS:
        which, width = _tiles("linear_bf16", which, K, True, x, T, N, 1)
    outputs = (out, None) if out.element_size() == 4 else (None, out)
    args = (x, weight, *outputs, T, N, K, x.stride(0), scale, int(round_bf16))
    if T and which in STREAM_VARIANTS:
        kernel, width = _stream(which, N)
        slices = slices or stream_slices(N, 2 * K, STREAM_WANTED)
        grid = (_ceil(T, STREAM_TOKENS), _ceil(N, width * STREAM_WARPS // slices))
        dev.launch("linear_stream", f"linear_bf16_{kernel}", grid, (STREAM_WARPS * 32,), (*args, slices))
    elif T and which in TILES_VARIANTS:
        _launch_tiles(dev, "linear_bf16", which, width, T, N, 1, args, 64)
    elif T:
        dev.launch("linear_bf16", f"linear_bf16_{which}", _linear_grid(which, T, N, 1), (128,), args)


# ---- router ----


def gate_scores(dev: Device, logits: Tensor, scoring: str, scores: Tensor) -> None:
    """scores = sqrt(softplus(logits)), sigmoid(logits) or softmax(logits); both [T, E] f32."""
    T, E = logits.shape
    _need(scoring in SCORING, "gate_scores", f"scoring {scoring!r}; it knows {', '.join(SCORING)}")
    _shape("gate_scores", "scores", scores, T, E)
    _packed("gate_scores", logits=logits, scores=scores)
    _apart("gate_scores", {"scores": scores}, {"logits": logits})
    if T:
        dev.launch("gate", "gate_scores", (T,), (32,), (logits, scores, E, SCORING[scoring]))


def gate_choose(
    dev: Device,
    scores: Tensor,
    bias: Tensor | None,
    tid2eid: Tensor | None,
    tokens: Tensor,
    position: Tensor,
    experts: Tensor,
    variant: str | None = None,
) -> None:
    """experts[t] = the k best of scores + bias, or tid2eid[tokens[t]]; ascending, -1 for pads; ties: lower expert first.

    scores [T, E] f32; bias [E] f32; tid2eid [vocab, k] i32; tokens [T] i64; position [T] i32; experts [T, k] i32.
    Variants: naive, warp (the same bits).
    """
    (T, E), k = scores.shape, experts.shape[1]
    _shape("gate_choose", "experts", experts, T, k)
    _shape("gate_choose", "tokens", tokens, T)
    _shape("gate_choose", "position", position, T)
    _need(k <= E, "gate_choose", f"{k} experts of {E}")
    if bias is not None:
        _shape("gate_choose", "bias", bias, E)
    if tid2eid is not None:
        _shape("gate_choose", "tid2eid", tid2eid, tid2eid.shape[0], k)
    _packed("gate_choose", scores=scores, bias=bias, tid2eid=tid2eid, tokens=tokens, position=position, experts=experts)
    _apart("gate_choose", {"experts": experts}, {"scores": scores, "bias": bias, "tid2eid": tid2eid, "tokens": tokens, "position": position})
    which = _choose("gate_choose", variant, "warp", ("naive", "warp"))
    if not T:
        return
    head = (scores, bias, tid2eid, tokens, position, experts)
    if which == "warp":
        dev.launch("gate", "gate_choose", (T,), (32,), (*head, E, k))
    else:
        dev.launch("gate", "gate_choose_naive", (_ceil(T, 32),), (32,), (*head, T, E, k))


def gate_weights(dev: Device, scores: Tensor, experts: Tensor, weights: Tensor, normalise: bool, route_scale: float) -> None:
    """weights[t,j] = scores[t, experts[t,j]] (over their sum if normalise) * route_scale; 0 where there is no expert.

    scores [T, E] f32, without bias; experts [T, k] i32; weights [T, k] f32
    """
    (T, E), k = scores.shape, experts.shape[1]
    _shape("gate_weights", "experts", experts, T, k)
    _shape("gate_weights", "weights", weights, T, k)
    _packed("gate_weights", scores=scores, experts=experts, weights=weights)
    _apart("gate_weights", {"weights": weights}, {"scores": scores, "experts": experts})
    if T:
        args = (scores, experts, weights, T, E, k, int(normalise), route_scale)
        dev.launch("gate", "gate_weights", (_ceil(T, 128),), (128,), args)


# ---- experts ----


def experts_scratch(T: int, k: int, E: int) -> int:
    """i32 elements of the scratch that the variants mma and tiles of experts_up and experts_down need."""
    return 2 * (E + 1) + T * k


def _experts(
    dev: Device, operation: str, x: Tensor, experts: Tensor, k_per_row: int, weights: tuple[tuple[Tensor, Tensor, Tensor], ...],
    variant: str | None, scratch: Tensor | None, slices: int | None,
) -> None:  # fmt: skip
    """Launch one or two FP4 linears of the chosen experts. weights: (w [E, N, K/2], scale [E, N, K/32], out [T, k, N])."""
    (T, k), K = experts.shape, x.shape[1]
    E, N = weights[0][0].shape[:2]
    slots = T * k
    _need(K % 32 == 0, operation, f"width {K} is no multiple of 32")
    _packed(operation, experts=experts, scratch=scratch)
    for w, scale, out in weights:
        _shape(operation, "weight", w, E, N, K // 2)
        _shape(operation, "scale", scale, E, N, K // 32)
        _shape(operation, "out", out, T, k, N)
        _packed(operation, weight=w, scale=scale, out=out)
    _slices(operation, slices)
    (w, scale, out), (second_w, second_scale, second_out) = weights[0], weights[1] if len(weights) == 2 else (None, None, None)
    _apart(
        operation, {"out": out, "the second out": second_out, "scratch": scratch},
        {"x": x, "experts": experts, "weight": w, "scale": scale, "the second weight": second_w, "the second scale": second_scale},
    )  # fmt: skip
    which = _choose(operation, variant, "thin" if T <= THIN_TOKENS else "mma", (*LINEAR_VARIANTS, *EXPERTS_STREAM_VARIANTS, *EXPERTS_TILES_VARIANTS))
    if which in EXPERTS_TILES_VARIANTS:
        which, width = _tiles(operation, which, K, E <= ORDER_EXPERTS, x, slots, N, len(weights))
        if which == "wgmma256":  # an expert has few slots: there is wgmma128 only
            which, width = "wgmma128", 128
    if not slots:
        return
    matrices, sizes = (w, scale, out, second_w, second_scale, second_out), (k_per_row, N, K, x.stride(0))
    if which in EXPERTS_STREAM_VARIANTS:
        kernel = "stream32" if which == "stream" else which
        slices = slices or stream_slices(N, K // 2, EXPERTS_STREAM_WANTED)
        grid = (_ceil(N, int(kernel.removeprefix("stream")) * STREAM_WARPS // slices), slots, len(weights))
        dev.launch("experts_stream", f"experts_{kernel}", grid, (STREAM_WARPS * 32,), (x, experts, *matrices, slots, *sizes, slices))
        return
    if which in ("naive", "thin"):
        grid = _linear_grid(which, slots, N, len(weights))
        dev.launch("experts", f"experts_{which}", grid, (128,), (x, experts, *matrices, *sizes))
        return
    if scratch is None:
        raise KernelError(f"{operation}: {T} tokens run in tiles, which need scratch: i32 of experts_scratch(T, k, E) elements")
    _need(scratch.numel() >= experts_scratch(T, k, E), operation, f"scratch of {scratch.numel()}, expected at least {experts_scratch(T, k, E)}")
    if which in TILES_VARIANTS:
        kind = which[:5]
        dev.launch("experts_tiles", "experts_order", (1,), (ORDER_WARPS * 32,), (experts, scratch, slots, E), 4 * (ORDER_WARPS + 1) * E)
        grid = (_ceil(N, width), slots // TILES_ROWS + min(E, slots), len(weights))
        block = width if kind == "tiles" else WGMMA_THREADS
        dev.launch(f"experts_{kind}", f"experts_{which}", grid, (block,), (x, scratch, *matrices, E, *sizes), _tiles_shared(kind, width, 16))
        return
    dev.launch("experts", "experts_plan", (1,), (256,), (experts, scratch, slots, E))
    grid = (slots // TILE + min(E, slots), _ceil(N, TILE), len(weights))
    dev.launch("experts", "experts_mma", grid, (128,), (x, scratch, *matrices, E, *sizes))


def experts_up(
    dev: Device, x: Tensor, experts: Tensor, w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, gate: Tensor, up: Tensor,
    variant: str | None = None, scratch: Tensor | None = None, slices: int | None = None,
) -> None:  # fmt: skip
    """gate = w1 x, up = w3 x for each chosen expert; FP4 weights stay packed.

    x [T, D] bf16 (rs); experts [T, k] i32, -1 = none, untouched; w1, w3 [E, I, D/2] u8; s1, s3 [E, I, D/32] e8m0 as u8;
    gate, up [T, k, I] bf16; scratch i32, packed, for mma and tiles. Variants: naive, thin, mma, stream (stream16, stream32; slices as of linear_fp8),
    tiles (tiles128, tiles256), wgmma (wgmma128; sm_90a).
    """
    _shape("experts_up", "x", x, experts.shape[0], x.shape[1])
    _experts(dev, "experts_up", x, experts, experts.shape[1], ((w1, s1, gate), (w3, s3, up)), variant, scratch, slices)


def experts_down(
    dev: Device, h: Tensor, experts: Tensor, w2: Tensor, s2: Tensor, out: Tensor, variant: str | None = None,
    scratch: Tensor | None = None, slices: int | None = None,
) -> None:  # fmt: skip
    """out = w2 h for each chosen expert.

    h [T, k, I] bf16; experts [T, k] i32, -1 = none, untouched; w2 [E, D, I/2] u8; s2 [E, D, I/32] e8m0 as u8;
    out [T, k, D] bf16; scratch i32, packed, for mma, tiles and wgmma. Variants: naive, thin, mma, stream, tiles, wgmma (as experts_up).
    """
    T, k = experts.shape
    _shape("experts_down", "h", h, T, k, h.shape[2])
    _packed("experts_down", h=h)
    _experts(dev, "experts_down", h.view(T * k, h.shape[2]), experts, 1, ((w2, s2, out),), variant, scratch, slices)


def swiglu(dev: Device, gate: Tensor, up: Tensor, weight: Tensor | None, out: Tensor, limit: float) -> None:
    """out = silu(min(gate, limit)) * clamp(up, -limit, limit) * weight. gate, up, out [R, I] bf16; weight [R] f32 or None = 1."""
    R, width = gate.shape
    _shape("swiglu", "up", up, R, width)
    _shape("swiglu", "out", out, R, width)
    if weight is not None:
        _shape("swiglu", "weight", weight, R)
    _packed("swiglu", gate=gate, up=up, weight=weight, out=out)
    _apart("swiglu", {"out": out}, {"gate": gate, "up": up, "weight": weight})
    if R:
        args = (gate, up, weight, out, R * width, width, limit)
        dev.launch("swiglu", "swiglu_clamped", (_ceil(R * width, 1024),), (128,), args)


def moe_combine(dev: Device, down: Tensor, experts: Tensor, shared: Tensor, routed: Tensor, out: Tensor) -> None:
    """routed = sum of down over the row's experts, ascending; out = bf16(routed + shared). Rows without experts stay untouched.

    down [T, k, D] bf16; experts [T, k] i32; shared [T, D] bf16; routed [T, D] f32; out [T, D] bf16
    """
    T, k, D = down.shape
    _shape("moe_combine", "experts", experts, T, k)
    for name, tensor in (("shared", shared), ("routed", routed), ("out", out)):
        _shape("moe_combine", name, tensor, T, D)
    _packed("moe_combine", down=down, experts=experts, shared=shared, routed=routed, out=out)
    _apart("moe_combine", {"routed": routed, "out": out}, {"down": down, "experts": experts, "shared": shared})
    if T:
        threads = min(128, _ceil(D, 256) * 32)  # eight elements each
        dev.launch("moe_combine", "moe_combine", (T, _ceil(D, 8 * threads)), (threads,), (down, experts, shared, routed, out, k, D))
