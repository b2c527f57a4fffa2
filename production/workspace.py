"""Every buffer a forward pass writes, allocated once per state and viewed by the number of tokens of a call.

Not state: nothing here survives a call; a value is valid until the next layer overwrites it. Names are those of the
points they end up as. `Workspace.at(s)` gives the buffers for s tokens a row; the views for decode are kept, so a decode
step makes no tensor of its own.

Tests: parity/unit/test_production.py (zero allocations in decode).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from production import ops
from production.cache import entry_capacity
from production.launch import Device
from production.variants import Variants
from reference.config import ModelConfig
from reference.points import Taps

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
COUNTERS = 256
SCORE_BYTES = 1 << 30  # of index scores at once: a million tokens are 1024 queries of 262,144 entries
SCORE_TILE = 64  # queries that a block of the tiled kernels scores together


@dataclass(frozen=True)
class PoolBuffers:
    """What one compressor writes in a call; E = s // ratio + 1.

    kv, gate         [T, c*d'] f32, projections
    pooled, rows     [b, E, d'] bf16, before and after the norm (then rotated in place)
    entry            [b, E] i32, entry number, -1 = none
    entry_position   [b, E] i32, position of its rotation, entry * ratio, -1 = none
    """

    kv: Tensor
    gate: Tensor
    pooled: Tensor
    rows: Tensor
    entry: Tensor
    entry_position: Tensor


@dataclass(frozen=True)
class SharedBuffers:
    """gate, up, h, h_q [T, I] bf16: the shared expert's halves, silu(gate) * up, and that as a linear's input."""

    gate: Tensor
    up: Tensor
    h: Tensor
    h_q: Tensor

    @classmethod
    def allocate(cls, tokens: int, width: int, device: torch.device) -> SharedBuffers:
        return cls(*(torch.zeros(tokens, width, dtype=BF16, device=device) for _ in fields(cls)))


@dataclass(frozen=True)
class Buffers:
    """Views of T = b * s tokens. `x_q`, `qr_q`, `wo_a_q`, `h_q` are e4m3-rounded values in bf16, inputs of linears.

    tokens [T] i64 | position, row [T] i32, position -1 = pad
    X, X_half            [T, n, D] bf16, streams before and after, and between the halves of a layer
    pre, post            [T, n] f32 | comb [T, n, n] f32
    a, x, x_q, y         [T, D] bf16: block input, its norm, that rounded, block output
    qr_raw, qr, qr_q     [T, q_lora_rank] bf16
    q_raw, q, o          [T, h, d] bf16
    kv_raw, kv           [T, d] bf16
    wo_a, wo_a_q         [T, o_groups*o_lora_rank] bf16
    index_q_raw, index_q [T, index_n_heads, index_head_dim] bf16 | index_weights [T, index_n_heads] f32
    selected             [T, K] i32
    gate_logits, scores  [T, E] f32 | experts [T, k] i32 | weights [T, k] f32
    gate, up, h, h_q     [T, k, I] bf16 | down [T, k, D] bf16
    shared               [T, D] bf16 | routed [T, D] f32
    """

    tokens: Tensor
    position: Tensor
    row: Tensor
    X: Tensor
    X_half: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor
    a: Tensor
    x: Tensor
    x_q: Tensor
    y: Tensor
    qr_raw: Tensor
    qr: Tensor
    qr_q: Tensor
    q_raw: Tensor
    q: Tensor
    o: Tensor
    kv_raw: Tensor
    kv: Tensor
    wo_a: Tensor
    wo_a_q: Tensor
    index_q_raw: Tensor
    index_q: Tensor
    index_weights: Tensor
    selected: Tensor
    gate_logits: Tensor
    scores: Tensor
    experts: Tensor
    weights: Tensor
    gate: Tensor
    up: Tensor
    h: Tensor
    h_q: Tensor
    down: Tensor
    shared: Tensor
    routed: Tensor


def buffer_shapes(c: ModelConfig, max_context: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and per-token shape of each field of Buffers."""
    D, n, h, d, k, I = c.hidden_size, c.hc_mult, c.num_attention_heads, c.head_dim, c.num_experts_per_tok, c.moe_intermediate_size  # noqa: E741
    groups, index = c.o_groups * c.o_lora_rank, (c.index_n_heads, c.index_head_dim)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tokens": (torch.int64, ()),
        "position": (I32, ()),
        "row": (I32, ()),
        "pre": (F32, (n,)),
        "post": (F32, (n,)),
        "comb": (F32, (n, n)),
        "index_weights": (F32, (c.index_n_heads,)),
        "selected": (I32, (min(c.index_topk, entry_capacity(4, max_context)),)),
        "gate_logits": (F32, (c.n_routed_experts,)),
        "scores": (F32, (c.n_routed_experts,)),
        "experts": (I32, (k,)),
        "weights": (F32, (k,)),
        "down": (BF16, (k, D)),
        "shared": (BF16, (D,)),
        "routed": (F32, (D,)),
    }
    shapes |= {name: (BF16, (n, D)) for name in ("X", "X_half")}
    shapes |= {name: (BF16, (D,)) for name in ("a", "x", "x_q", "y")}
    shapes |= {name: (BF16, (c.q_lora_rank,)) for name in ("qr_raw", "qr", "qr_q")}
    shapes |= {name: (BF16, (h, d)) for name in ("q_raw", "q", "o")}
    shapes |= {name: (BF16, (d,)) for name in ("kv_raw", "kv")}
    shapes |= {name: (BF16, (groups,)) for name in ("wo_a", "wo_a_q")}
    shapes |= {name: (BF16, index) for name in ("index_q_raw", "index_q")}
    shapes |= {name: (BF16, (k, I)) for name in ("gate", "up", "h", "h_q")}
    return shapes


def score_queries(batch: int, tokens: int, max_context: int) -> int:
    """Queries of a call whose index scores are held at once: those of a decode step always, of a prefill as SCORE_BYTES allows."""
    return min(tokens, max(batch, SCORE_BYTES // (4 * entry_capacity(4, max_context))))


@dataclass(frozen=True)
class Half:
    """Output y [T, D] of half a block that is not put back yet: X [T, n, D] from `streams`; show: what observers see of it then."""

    y: Tensor
    streams: Tensor
    X: Tensor
    show: Callable[[], None]


class Call:
    """The buffers of one call shape: `b` rows of `s` tokens.

    flat     Buffers viewed at T = b * s
    pool     PoolBuffers by "compressor.4", "compressor.128", "indexer.compressor", those the model has
    shared   SharedBuffers viewed at T
    half     that the next mixing of the streams puts back, None: the streams are complete
    scratch  of the experts | prepared  of indexer_score | lists  of topk | sums  of hc_pre and hc_head
    counters of blocks that finish a row together; zero between kernels: the last block of a row resets its counter
    """

    def __init__(self, owner: Workspace, s: int) -> None:
        self.s, self.T = s, owner.batch * s
        self.flat = Buffers(**{name: tensor[: self.T] for name, tensor in owner.tensors.items()})
        self.shared = SharedBuffers(*(getattr(owner.shared, f.name)[: self.T] for f in fields(SharedBuffers)))
        self.pool = {name: owner.pool_at(name, s) for name in owner.pools}
        self.scratch, self.lists, self.sums, self.counters = owner.scratch, owner.lists, owner.sums, owner.counters
        self.half: Half | None = None
        self._score, self.prepared = owner.score, owner.prepared

    def score(self, queries: int, entries: int) -> Tensor:
        """Indexer scores [queries, entries] f32."""
        return self._score[: queries * entries].view(queries, entries)

    def score_slices(self, entries: int) -> list[slice]:
        """The call's queries, in as few equal parts as let a part's scores of `entries` entries be held together."""
        room = self._score.numel() // entries
        if room >= self.T:
            return [slice(0, self.T)]
        tile = SCORE_TILE if room >= SCORE_TILE else 1
        parts = -(-self.T // (room // tile * tile))
        queries = -(-self.T // (parts * tile)) * tile
        return [slice(first, min(self.T, first + queries)) for first in range(0, self.T, queries)]


class Workspace:
    """Owns the memory behind `Call`: `batch` rows of at most `chunk` tokens."""

    def __init__(self, config: ModelConfig, layers: Sequence[int], batch: int, chunk: int, max_context: int, device: torch.device) -> None:
        c = self.config = config
        self.batch, self.chunk = batch, chunk
        T = batch * chunk

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tensors = {name: make(dtype, T, *shape) for name, (dtype, shape) in buffer_shapes(c, max_context).items()}
        self.shared = SharedBuffers.allocate(T, c.moe_intermediate_size, device)
        self.scratch = make(I32, max(1, ops.experts_scratch(T, c.num_experts_per_tok, c.n_routed_experts)))
        self.counters = make(I32, COUNTERS)
        D = c.hidden_size
        self.sums = make(F32, max(ops.mix_scratch(T, D, "mma"), ops.mix_scratch(batch, D, "split")))
        kinds = {c.ratio(layer) for layer in layers}
        self.score = make(F32, score_queries(batch, T, max_context) * entry_capacity(4, max_context) if 4 in kinds else 0)
        self.prepared = make(torch.uint8, ops.indexer_scratch(T, c.index_n_heads) if 4 in kinds else 0)
        self.lists = make(I32, ops.topk_scratch(min(c.index_topk, entry_capacity(4, max_context)), entry_capacity(4, max_context)) if 4 in kinds else 0)
        # name -> (ratio, width d')
        self.pools: dict[str, tuple[int, int]] = {f"compressor.{m}": (m, c.head_dim) for m in (4, 128) if m in kinds}
        if 4 in kinds:
            self.pools["indexer.compressor"] = (4, c.index_head_dim)
        self._pool_memory = {
            name: PoolBuffers(
                kv=make(F32, T * c.overlap(ratio) * width),
                gate=make(F32, T * c.overlap(ratio) * width),
                pooled=make(BF16, batch * (chunk // ratio + 1) * width),
                rows=make(BF16, batch * (chunk // ratio + 1) * width),
                entry=make(I32, batch * (chunk // ratio + 1)),
                entry_position=make(I32, batch * (chunk // ratio + 1)),
            )
            for name, (ratio, width) in self.pools.items()
        }
        self._decode = Call(self, 1)

    def pool_at(self, name: str, s: int) -> PoolBuffers:
        (ratio, width), memory = self.pools[name], self._pool_memory[name]
        b, features = self.batch, self.config.overlap(ratio) * width
        E = s // ratio + 1
        return PoolBuffers(
            kv=memory.kv[: b * s * features].view(b, s, features),
            gate=memory.gate[: b * s * features].view(b, s, features),
            pooled=memory.pooled[: b * E * width].view(b, E, width),
            rows=memory.rows[: b * E * width].view(b, E, width),
            entry=memory.entry[: b * E].view(b, E),
            entry_position=memory.entry_position[: b * E].view(b, E),
        )

    def at(self, s: int) -> Call:
        """The buffers for s tokens a row; those of decode (s = 1) are made once."""
        return self._decode if s == 1 else Call(self, s)

    def nbytes(self) -> int:
        """Bytes of all buffers."""
        owned = [*self.tensors.values(), self.scratch, self.score, self.prepared, self.lists, self.sums, self.counters]
        owned += [getattr(self.shared, f.name) for f in fields(SharedBuffers)]
        owned += [getattr(pool, f.name) for pool in self._pool_memory.values() for f in fields(PoolBuffers)]
        return sum(tensor.numel() * tensor.element_size() for tensor in owned)


@dataclass(frozen=True)
class Step:
    """What a call of one layer works on: b rows of s tokens, T = b * s.

    device    where it runs
    call      buffers of this shape
    start     [b] i32, tokens the layer held before | count [b] i32, tokens of this call (device)
    decode    True: the single-token kernels
    variants  of the phase's kernels: a token's result does not depend on how many come with it
    entries   complete entries after this call, largest of the rows (host, for sizes); in a graph all that there can be
    at        "layers.N", the prefix of its points
    choices   given choices by full point name, [T, k] i32 with -1 for pads
    """

    device: Device
    call: Call
    b: int
    s: int
    start: Tensor
    count: Tensor
    decode: bool
    variants: Variants
    entries: int
    at: str
    taps: Taps
    choices: Mapping[str, Tensor]

    def wants(self, point: str) -> bool:
        return self.taps.wants(f"{self.at}.{point}")

    def emit(self, point: str, value: Tensor) -> None:
        """Show a buffer [T, ...] as [b, s, ...]."""
        self.show(point, partial(value.view, self.b, self.s, *value.shape[1:]))

    def show(self, point: str, make: Callable[[], Tensor]) -> None:
        """Show what `make` returns, [b, s, ...], if somebody listens. It is called when the step runs, in a graph at every replay."""
        if self.wants(point):
            self.device.host_step(lambda: self.taps.emit(f"{self.at}.{point}", make()))

    def completed(self, ratio: int) -> Tensor:
        """[b, s]: the entry each query completes, -1 where it completes none (for taps)."""
        position = self.call.flat.position.view(self.b, self.s)
        return ((position + 1) // ratio - 1).masked_fill((position < 0) | ((position + 1) % ratio != 0), -1)
