"""Attention of one layer: window keys, compressed entries, the indexer that chooses among them, and the state between calls.

State is a value: every call takes a `LayerState` and returns a new one, so that a call that fails has changed nothing.
A call takes s tokens per row, right-padded: row b goes on at position `length[b]` and counts `lengths[b]` of them.
Pads come after a row's tokens, so no valid query sees them, and they are left out of the state.

Axes: reference/points.py. Tests: parity/unit/test_reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import ops
from reference.checkpoint import Checkpoint
from reference.config import InputError, ModelConfig
from reference.formats import Policy
from reference.linear import Decoded, Linear
from reference.ops import Sums
from reference.points import Taps

GATHER_BYTES = 64 << 20  # keys gathered at a time: queries are taken in slices of this size


# ---- what decode carries forward ----


@dataclass(frozen=True)
class CompressorState:
    """What one compressor carries.

    entries    [b, e, d']      entry number e of a row at index e; zero past the row's last complete group
    kv, gate   [b, R, c * d']  the last R = c * m tokens (gate with ape added), column j at position length - R + j
    """

    entries: Tensor
    kv: Tensor
    gate: Tensor


@dataclass(frozen=True)
class LayerState:
    """What one layer carries from call to call.

    length      [b] int64, tokens taken
    kv          [b, W, d], column j is position length - W + j as stored; zero where that is negative
    compressor  layers with a ratio, else None
    indexer     state of the indexer's key compressor: CSA layers, else None
    """

    length: Tensor
    kv: Tensor
    compressor: CompressorState | None
    indexer: CompressorState | None

    @classmethod
    def empty(cls, config: ModelConfig, layer: int, batch: int) -> LayerState:
        ratio = config.ratio(layer)

        def compressor(width: int) -> CompressorState:
            overlap = config.overlap(ratio)
            rows = torch.zeros(batch, overlap * ratio, overlap * width)
            return CompressorState(torch.zeros(batch, 0, width), rows, rows)

        return cls(
            torch.zeros(batch, dtype=torch.int64),
            torch.zeros(batch, config.sliding_window, config.head_dim),
            compressor(config.head_dim) if ratio else None,
            compressor(config.index_head_dim) if ratio == 4 else None,
        )


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [b, e, f], index [b, ...] into e -> [b, ..., f]."""
    flat = index.flatten(1)[..., None].expand(-1, -1, rows.shape[-1])
    return rows.gather(1, flat).view(*index.shape, rows.shape[-1])


def last_rows(old: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
    """The last R rows of old [b, R, f] followed by the first lengths[b] rows of new [b, s, f]."""
    return take(torch.cat((old, new), 1), lengths[:, None] + torch.arange(old.shape[1]))


# ---- compressors ----


class Compressor:
    """Pools every `ratio` tokens into one entry; where groups overlap (ratio 4) with the group before.

    `wkv`, `wgate`: D -> c * d' in FP32; ape [m, c * d'] is added to the gate; then norm and rotation at e * m.
    A subclass says how an entry is stored. c = 2: the first d' features serve the next group, the last d' their own.
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str, ratio: int, width: int, inv_freq: Tensor, policy: Policy, sums: Sums, decoded: Decoded
    ) -> None:
        config = checkpoint.config
        self.ratio, self.width, self.overlap = ratio, width, config.overlap(ratio)
        self.rotary_dims, self.eps = config.qk_rope_head_dim, config.rms_norm_eps
        self.policy, self.sums, self.inv_freq = policy, sums, inv_freq
        exact = Policy(frozenset())  # kv and gate stay FP32
        self.wkv = Linear(checkpoint, f"{name}.wkv", exact, sums, decoded)
        self.wgate = Linear(checkpoint, f"{name}.wgate", exact, sums, decoded)
        self.norm = checkpoint.raw(f"{name}.norm.weight").float()
        self.ape = checkpoint.raw(f"{name}.ape")

    def store(self, entry: Tensor) -> Tensor:
        """The storage rounding of a rotated entry [..., d']."""
        raise NotImplementedError

    def __call__(self, x: Tensor, state: CompressorState, length: Tensor, lengths: Tensor) -> CompressorState:
        """x [b, s, D] -> the state after these tokens, every group that they complete among its entries."""
        m, width = self.ratio, self.width
        position = length[:, None] + torch.arange(x.shape[1])
        kv, gate = self.policy.pool(self.wkv(x)), self.policy.pool(self.wgate(x)) + self.ape[position % m]  # [b, s, c d']
        kept = state.kv.shape[1]
        first, last = length // m, (length + lengths) // m  # this call completes entries first .. last - 1
        groups = int((last - first).max())
        entries = state.entries
        if groups > 0:
            entry = first[:, None] + torch.arange(groups)  # [b, g]
            slot = (entry * m)[..., None] + torch.arange(m - self.overlap * m, m)  # [b, g, c m] positions
            column = (slot - length[:, None, None] + kept).clamp_max(kept + x.shape[1] - 1)
            kv_slots = take(torch.cat((state.kv, kv), 1), column)  # [b, g, c m, c d']
            gate_slots = take(torch.cat((state.gate, gate), 1), column)
            if self.overlap == 2:  # the previous group's first half, the own group's second half
                kv_slots = torch.cat((kv_slots[:, :, :m, :width], kv_slots[:, :, m:, width:]), 2)
                gate_slots = torch.cat((gate_slots[:, :, :m, :width], gate_slots[:, :, m:, width:]), 2)
            before_start = slot[..., None] < 0  # entry 0 has no previous group
            pooled = ops.pool(kv_slots.masked_fill(before_start, 0), gate_slots.masked_fill(before_start, -torch.inf), self.sums, self.policy.pool)
            normed = self.policy.bf16(ops.rms_norm(self.policy.bf16(pooled), self.norm, self.eps, self.sums))
            cos, sin = (self.policy.angle(x) for x in ops.rope_angles(entry * m, self.inv_freq))
            stored = self.store(self.policy.bf16(ops.rope(normed, cos, sin)))  # [b, g, d']
            new = torch.zeros(x.shape[0], max(int(last.max()) - entries.shape[1], 0), width)
            row, group = (entry < last[:, None]).nonzero(as_tuple=True)
            entries = torch.cat((entries, new), 1).index_put((row, entry[row, group]), stored[row, group])
        return CompressorState(entries, last_rows(state.kv, kv, lengths), last_rows(state.gate, gate, lengths))

    def completed(self, state: CompressorState, position: Tensor) -> Tensor:
        """For show: the entry at the query that completes its group, NaN at the others. position [b, s] -> [b, s, d']."""
        entry = (position + 1) // self.ratio - 1
        completes = ((position + 1) % self.ratio == 0) & (entry < state.entries.shape[1])
        if not bool(completes.any()):
            return torch.full((*position.shape, self.width), torch.nan)
        rows = take(state.entries, torch.where(completes, entry, 0))
        return rows.masked_fill(~completes[..., None], torch.nan)


class MainCompressor(Compressor):
    """Entries that attention reads: e4m3 on all but the rotary dims."""

    def store(self, entry: Tensor) -> Tensor:
        return self.policy.compressed(entry, self.rotary_dims)


class IndexerKeyCompressor(Compressor):
    """Keys that the indexer scores: Hadamard, then e2m1.

    H / sqrt(n) is orthogonal and applied to queries and keys under every policy, so that points and state mean the same.
    """

    def store(self, entry: Tensor) -> Tensor:
        return self.policy.index_key(self.policy.bf16(ops.hadamard(entry, self.sums)))


# ---- indexer ----


class Indexer:
    """Scores every complete entry with a few cheap heads and keeps the `index_topk` best (CSA layers)."""

    def __init__(
        self, checkpoint: Checkpoint, name: str, inv_freq: Tensor, policy: Policy, sums: Sums, decoded: Decoded, taps: Taps
    ) -> None:
        c = checkpoint.config
        self.name, self.config, self.policy, self.sums, self.taps = name, c, policy, sums, taps
        self.wq_b = Linear(checkpoint, f"{name}.wq_b", policy, sums, decoded)
        self.weights_proj = Linear(checkpoint, f"{name}.weights_proj", policy, sums, decoded, round_input=False)
        self.compressor = IndexerKeyCompressor(
            checkpoint, f"{name}.compressor", 4, c.index_head_dim, inv_freq, policy, sums, decoded
        )
        self.ratio = self.compressor.ratio

    def __call__(
        self, x: Tensor, qr: Tensor, position: Tensor, cos: Tensor, sin: Tensor, state: CompressorState, lengths: Tensor
    ) -> tuple[Tensor, CompressorState]:
        """x [b, s, D], qr [b, s, q_lora], position [b, s] -> selected [b, s, k] ascending with -1 last, new state."""
        c, policy = self.config, self.policy
        state = self.compressor(x, state, position[:, 0], lengths)
        q = self.wq_b(qr).unflatten(-1, (c.index_n_heads, c.index_head_dim))  # [b, s, hi, di]
        q = policy.bf16(ops.rope(q, cos[:, :, None], sin[:, :, None]))
        q = policy.index_q(policy.bf16(ops.hadamard(q, self.sums)))
        weights = self.weights_proj(x) * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)  # [b, s, hi]
        complete = ops.complete_entries(position, self.ratio)
        seen = state.entries.shape[1]
        step = max(1, GATHER_BYTES // (4 * x.shape[0] * c.index_n_heads * max(seen, 1)))
        score = torch.cat(
            [
                ops.indexer_score(q[:, t : t + step], state.entries, weights[:, t : t + step], complete[:, t : t + step], self.sums)
                for t in range(0, x.shape[1], step)
            ],
            1,
        )  # [b, s, e]
        self.taps.emit(f"{self.name}.q", q)
        self.taps.emit(f"{self.name}.weights", weights)
        if self.taps.wants(f"{self.name}.compressor"):
            self.taps.emit(f"{self.name}.compressor", self.compressor.completed(state, position))
        self.taps.emit(f"{self.name}.score", score)
        return ops.top_entries(score, c.index_topk), state


# ---- attention ----


class Attention:
    """One KV head that is key and value; window and compressed keys under one softmax with a sink per head."""

    def __init__(self, checkpoint: Checkpoint, layer: int, policy: Policy, sums: Sums, decoded: Decoded, taps: Taps) -> None:
        c = checkpoint.config
        self.name, self.config, self.policy, self.sums, self.taps = f"layers.{layer}.attn", c, policy, sums, taps
        self.ratio = c.ratio(layer)
        if self.ratio:
            self.inv_freq = ops.yarn_frequencies(
                c.qk_rope_head_dim, c.compress_rope_theta, c.rope_factor, c.rope_original_max, c.rope_beta_fast, c.rope_beta_slow
            )
        else:
            self.inv_freq = ops.rope_frequencies(c.qk_rope_head_dim, c.rope_theta)
        self.wq_a = Linear(checkpoint, f"{self.name}.wq_a", policy, sums, decoded)
        self.q_norm = checkpoint.raw(f"{self.name}.q_norm.weight").float()
        self.wq_b = Linear(checkpoint, f"{self.name}.wq_b", policy, sums, decoded)
        self.wkv = Linear(checkpoint, f"{self.name}.wkv", policy, sums, decoded)
        self.kv_norm = checkpoint.raw(f"{self.name}.kv_norm.weight").float()
        self.wo_a = Linear(checkpoint, f"{self.name}.wo_a", policy, sums, decoded, round_input=False)
        self.wo_b = Linear(checkpoint, f"{self.name}.wo_b", policy, sums, decoded)
        self.attn_sink = checkpoint.raw(f"{self.name}.attn_sink")
        self.compressor = self.indexer = None
        if self.ratio:
            self.compressor = MainCompressor(
                checkpoint, f"{self.name}.compressor", self.ratio, c.head_dim, self.inv_freq, policy, sums, decoded
            )
        if self.ratio == 4:
            self.indexer = Indexer(checkpoint, f"{self.name}.indexer", self.inv_freq, policy, sums, decoded, taps)

    def __call__(
        self, x: Tensor, state: LayerState, lengths: Tensor, choices: Mapping[str, Tensor]
    ) -> tuple[Tensor, LayerState]:
        """x [b, s, D] normed input -> y [b, s, D] and the state after the call."""
        c, policy, sums, emit = self.config, self.policy, self.sums, self.taps.emit
        position = state.length[:, None] + torch.arange(x.shape[1])  # [b, s]
        cos, sin = (policy.angle(x) for x in ops.rope_angles(position, self.inv_freq))  # [b, s, r/2]

        qr = policy.bf16(ops.rms_norm(self.wq_a(x), self.q_norm, c.rms_norm_eps, sums))
        q = self.wq_b(qr).unflatten(-1, (c.num_attention_heads, c.head_dim))  # [b, s, h, d]
        q = policy.bf16(ops.rms_norm(q, None, c.rms_norm_eps, sums, policy.q_factor))
        q = policy.bf16(ops.rope(q, cos[:, :, None], sin[:, :, None]))
        kv = policy.bf16(ops.rms_norm(self.wkv(x), self.kv_norm, c.rms_norm_eps, sums))
        kv = policy.kv(policy.bf16(ops.rope(kv, cos, sin)), c.qk_rope_head_dim)  # [b, s, d]
        emit(f"{self.name}.q_norm", qr)
        emit(f"{self.name}.q", q)
        emit(f"{self.name}.kv", kv)

        compressor_state, indexer_state = state.compressor, state.indexer
        entries, chosen = torch.zeros(x.shape[0], 0, c.head_dim), torch.zeros(*position.shape, 0, dtype=torch.int64)
        if self.compressor is not None and compressor_state is not None:
            compressor_state = self.compressor(x, compressor_state, state.length, lengths)
            if self.taps.wants(f"{self.name}.compressor"):
                emit(f"{self.name}.compressor", self.compressor.completed(compressor_state, position))
            entries = compressor_state.entries
            if self.indexer is not None and indexer_state is not None:
                chosen, indexer_state = self.indexer(x, qr, position, cos, sin, indexer_state, lengths)
                emit(f"{self.name}.selected", chosen)
                chosen = choices.get(f"{self.name}.selected", chosen)
            else:  # every complete entry
                every = torch.arange(entries.shape[1]).expand(*position.shape, -1)
                chosen = every.masked_fill(every >= ops.complete_entries(position, self.ratio)[..., None], -1)

        if entries.shape[1] == 0:
            chosen = chosen[..., :0]  # given choices have their own width; there is nothing to choose yet
        core = self.core(q, torch.cat((state.kv, kv), 1), entries, chosen, position)
        o = policy.bf16(ops.rope(core, cos[:, :, None], sin[:, :, None], inverse=True))
        emit(f"{self.name}.core", core)
        emit(f"{self.name}.o", o)

        groups = o.flatten(-2).unflatten(-1, (c.o_groups, -1))  # [b, s, g, h d / g]
        wo_a = self.wo_a.weight().unflatten(0, (c.o_groups, c.o_lora_rank))  # rows are group-major
        low = policy.bf16(sums.einsum("bsgi,goi->bsgo", groups, wo_a)).flatten(-2)
        y: Tensor = self.wo_b(low)
        emit(f"{self.name}.wo_a", low)
        emit(f"{self.name}.out", y)
        return y, LayerState(state.length + lengths, last_rows(state.kv, kv, lengths), compressor_state, indexer_state)

    def core(self, q: Tensor, kv: Tensor, entries: Tensor, chosen: Tensor, position: Tensor) -> Tensor:
        """Attention before the inverse rotation.

        q [b, s, h, d], kv [b, W + s, d] with column W + t at query t's own position, entries [b, e, d],
        chosen [b, s, k] entry numbers or -1, position [b, s] -> [b, s, h, d]
        """
        W = self.config.sliding_window
        windows = kv.unfold(1, W, 1)[:, 1:].transpose(2, 3)  # [b, s, W, d]: query t sees columns t + 1 .. t + W
        column = position[..., None] - W + 1 + torch.arange(W)  # [b, s, W] positions
        valid = torch.cat((column >= 0, chosen >= 0), -1)  # [b, s, W + k]
        if self.taps.wants(f"{self.name}.visible"):
            tokens = torch.where(column >= 0, column, torch.iinfo(torch.int64).max).sort(-1).values
            tokens = torch.where(tokens > position[..., None], -1, tokens)
            self.taps.emit(f"{self.name}.visible", torch.cat((tokens, chosen), -1))
        step = max(1, GATHER_BYTES // (4 * q.shape[0] * valid.shape[-1] * q.shape[-1]))
        parts = []
        for t in range(0, q.shape[1], step):
            here = slice(t, t + step)
            keys = windows[:, here]
            if chosen.shape[-1]:
                keys = torch.cat((keys, take(entries, chosen[:, here].clamp_min(0))), 2)
            parts.append(ops.sparse_attention(q[:, here], keys, valid[:, here], self.attn_sink, self.sums, self.policy.p, self.policy.score, self.policy.weight))
        return self.policy.bf16(torch.cat(parts, 1))


# ---- the state in the words of both models (reference.points.STATE_LEGEND) ----


def _slots(rows: Tensor, length: Tensor, ratio: int) -> Tensor:
    """Rows in position order -> row p % R, NaN where no later entry needs it."""
    kept = rows.shape[1]
    position = length[:, None] - kept + torch.arange(kept)  # [b, R]
    slot = torch.full_like(rows, torch.nan)
    row, column = _needed(position, length, ratio, kept).nonzero(as_tuple=True)
    return slot.index_put((row, position[row, column] % kept), rows[row, column])


def _needed(position: Tensor, length: Tensor, ratio: int, kept: int) -> Tensor:
    """Tokens that a later entry still reads: the unfinished group's, and where groups overlap those of the group before."""
    oldest = length // ratio * ratio - (kept - ratio)
    return (position >= oldest[:, None]) & (position >= 0)


def export_state(state: LayerState, config: ModelConfig, layer: int) -> dict[str, Tensor]:
    """A layer's state under the names of `STATE_LEGEND`."""
    position = state.length[:, None] - config.sliding_window + torch.arange(config.sliding_window)
    snapshot = {"length": state.length.clone(), "kv": state.kv.masked_fill(position[..., None] < 0, torch.nan)}
    for name, part in (("compressor", state.compressor), ("indexer.compressor", state.indexer)):
        if part is not None:
            ratio = config.ratio(layer)
            beyond = torch.arange(part.entries.shape[1]) >= (state.length // ratio)[:, None]
            snapshot[f"{name}.entries"] = part.entries.masked_fill(beyond[..., None], torch.nan)
            snapshot[f"{name}.kv"] = _slots(part.kv, state.length, ratio)
            snapshot[f"{name}.gate"] = _slots(part.gate, state.length, ratio)
    return snapshot


def import_state(snapshot: Mapping[str, Tensor], config: ModelConfig, layer: int, batch: int) -> LayerState:
    """The opposite of `export_state`. Raises InputError on a name or shape that does not belong to the layer."""
    empty = LayerState.empty(config, layer, batch)
    ratio, where = config.ratio(layer), f"state of layer {layer}"
    parts = {"compressor": empty.compressor, "indexer.compressor": empty.indexer}
    expected = {"length": empty.length.shape, "kv": empty.kv.shape}
    for name, part in parts.items():
        if part is not None:
            expected |= {f"{name}.entries": part.entries.shape, f"{name}.kv": part.kv.shape, f"{name}.gate": part.gate.shape}
    if set(snapshot) != set(expected):
        raise InputError(f"{where}: got {sorted(snapshot)}, expected {sorted(expected)}")
    length = snapshot["length"].to("cpu", torch.int64)
    for name, shape in expected.items():
        got = tuple(snapshot[name].shape)
        wanted = (batch, got[1] if len(got) == 3 else 0, shape[2]) if name.endswith("entries") else tuple(shape)
        if got != wanted:
            raise InputError(f"{where}: {name}: shape {list(got)}, expected {list(wanted)}")
    if bool((length < 0).any()) or bool((length > config.max_position_embeddings).any()):
        raise InputError(f"{where}: length {length.tolist()}, expected 0 .. {config.max_position_embeddings}")

    def clean(name: str, live: Tensor) -> Tensor:
        return torch.where(live[..., None], snapshot[name].to("cpu", torch.float32), 0.0)

    def compressor(name: str, part: CompressorState) -> CompressorState:
        complete, kept = length // ratio, part.kv.shape[1]
        held = snapshot[f"{name}.entries"].shape[1]
        if held < int(complete.max()):
            raise InputError(f"{where}: {name}.entries: {held} entries, expected {int(complete.max())}")
        position = length[:, None] - kept + torch.arange(kept)
        needed = _needed(position, length, ratio, kept)
        rows = {}
        for field in ("kv", "gate"):
            in_order = take(snapshot[f"{name}.{field}"].to("cpu", torch.float32), position % kept)
            rows[field] = torch.where(needed[..., None], in_order, 0.0)
        live = torch.arange(held) < complete[:, None]
        return CompressorState(clean(f"{name}.entries", live)[:, : int(complete.max())], rows["kv"], rows["gate"])

    position = length[:, None] - config.sliding_window + torch.arange(config.sliding_window)
    return LayerState(
        length,
        clean("kv", position >= 0),
        compressor("compressor", empty.compressor) if empty.compressor is not None else None,
        compressor("indexer.compressor", empty.indexer) if empty.indexer is not None else None,
    )
