"""Attention of one layer: the two compressors, the indexer that chooses among compressed entries, attention itself.

The twin of reference/attention.py: same classes, same order, every step a kernel. State is in place: a layer's cache
(production/cache.py) takes the tokens of the call, the results are buffers of the call (production/workspace.py).

Axes: reference/points.py. Tests: parity/unit/test_production.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from production import ops
from production.cache import CompressorState, LayerCache
from production.launch import Device
from production.ops import at_once
from production.weights import AttentionWeights, CompressorWeights, IndexerWeights, Linear8, inv_freq
from production.workspace import PoolBuffers, Step
from reference.config import InputError, ModelConfig

if TYPE_CHECKING:
    from production.model import State


def linear_fp8(dev: Device, x: Tensor, w: Linear8, out: Tensor, step: Step, groups: int = 1) -> None:
    """out [T, N] bf16 = x [T, K] times an FP8 matrix, in the variant of the phase."""
    ops.linear_fp8(dev, x, w.weight, w.scale, out, groups=groups, variant=step.variants.linear)


class _Compressor:
    """Projections and pooling, common to the two compressors of dsv4.md section 1.3."""

    def __init__(self, dev: Device, config: ModelConfig, weights: CompressorWeights, ratio: int, freq: Tensor) -> None:
        self.dev, self.config, self.weights, self.ratio, self.freq = dev, config, weights, ratio, freq

    def pool(self, x: Tensor, buf: PoolBuffers, kv: Tensor, gate: Tensor, step: Step) -> None:
        """x [T, D] bf16, state rows kv, gate -> buf.rows [b, E, d'], pooled and normed, not yet rotated; buf.entry."""
        dev, w = self.dev, self.weights
        ops.linear_bf16(dev, x, w.wkv, buf.kv.view(len(x), -1), variant=step.variants.linear)
        ops.linear_bf16(dev, x, w.wgate, buf.gate.view(len(x), -1), variant=step.variants.linear)
        if step.decode:
            ops.compressor_step(
                dev, buf.kv[:, 0], buf.gate[:, 0], w.ape, kv, gate, step.start, step.count,
                buf.pooled, buf.entry, buf.entry_position, self.ratio,
            )  # fmt: skip
        else:
            ops.compressor_prefill(
                dev, buf.kv, buf.gate, w.ape, kv, gate, step.start, step.count,
                buf.pooled, buf.entry, buf.entry_position, self.ratio,
            )  # fmt: skip
        ops.rms_norm(dev, buf.pooled.flatten(0, 1), w.norm, buf.rows.flatten(0, 1), self.config.rms_norm_eps)

    def products(self, buf: PoolBuffers) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The two projections with their outputs [T, c*d'], for a launch that has others too."""
        return (self.weights.wkv, buf.kv.flatten(0, 1)), (self.weights.wgate, buf.gate.flatten(0, 1))

    def step(self, buf: PoolBuffers, state: CompressorState, cache: Tensor | tuple[Tensor, Tensor]) -> at_once.Pooling:
        """What follows the projections of one token a row, for such a launch."""
        return at_once.Pooling(
            buf.kv, buf.gate, self.weights.ape, state.kv, state.gate, self.weights.norm, buf.pooled, buf.rows, buf.entry, buf.entry_position,
            self.ratio, cache,
        )  # fmt: skip


class MainCompressor(_Compressor):
    """Compressed entries of a layer: pooled, normed, rotated at entry * ratio, stored e4m3 | bf16 rotary dims."""

    def __call__(self, x: Tensor, cache: LayerCache, step: Step) -> None:
        assert cache.entries is not None
        assert cache.state is not None
        buf = step.call.pool[f"compressor.{self.ratio}"]
        self.pool(x, buf, cache.state.kv, cache.state.gate, step)
        ops.rope(self.dev, buf.rows.flatten(0, 1)[:, None], buf.entry_position.flatten(), self.freq)
        ops.store_entries(self.dev, buf.rows, buf.entry, cache.entries)

    def pooling(self, buf: PoolBuffers, cache: LayerCache) -> at_once.Pooling:
        assert cache.entries is not None
        assert cache.state is not None
        return self.step(buf, cache.state, cache.entries)


class IndexerKeyCompressor(_Compressor):
    """The indexer's keys, ONE of index_head_dim per entry: pooled, normed, rotated, Hadamard, stored e2m1."""

    def __call__(self, x: Tensor, cache: LayerCache, step: Step) -> None:
        assert cache.keys is not None
        assert cache.scales is not None
        assert cache.index_state is not None
        keys = step.call.pool["indexer.compressor"]
        self.pool(x, keys, cache.index_state.kv, cache.index_state.gate, step)
        ops.rope(self.dev, keys.rows.flatten(0, 1)[:, None], keys.entry_position.flatten(), self.freq)
        ops.store_index_keys(self.dev, keys.rows, keys.entry, cache.keys, cache.scales)

    def pooling(self, buf: PoolBuffers, cache: LayerCache) -> at_once.Pooling:
        assert cache.keys is not None
        assert cache.scales is not None
        assert cache.index_state is not None
        return self.step(buf, cache.index_state, (cache.keys, cache.scales))


class Indexer:
    """Lightning indexer of a CSA layer: scores every complete entry, keeps the best index_topk.

    key_width   width of one stored key, as its compressor's tensors have it
    """

    def __init__(self, dev: Device, config: ModelConfig, weights: IndexerWeights, freq: Tensor) -> None:
        self.dev, self.config, self.weights, self.freq = dev, config, weights, freq
        self.compressor = IndexerKeyCompressor(dev, config, weights.compressor, 4, freq)
        self.key_width = weights.compressor.norm.shape[0]
        self.weight_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5

    def check_widths(self, cache: LayerCache, pool: PoolBuffers) -> None:
        """Buffers of a new state hold keys of `key_width`. Raises InputError."""
        assert cache.keys is not None
        assert cache.scales is not None
        held = {"keys": 2 * cache.keys.shape[-1], "scales": 32 * cache.scales.shape[-1], "rows": pool.rows.shape[-1]}
        for name, width in held.items():
            if width != self.key_width:
                raise InputError(f"indexer {name}: buffer for keys of {width}, the compressor makes keys of {self.key_width}")

    def __call__(self, x: Tensor, qr_q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """x [T, D], qr_q [T, q_lora_rank] -> selected [T, K] i32, ascending, -1 = none."""
        dev, buf = self.dev, step.call.flat
        linear_fp8(dev, qr_q, self.weights.wq_b, buf.index_q_raw.flatten(1), step)
        ops.rope(dev, buf.index_q_raw, buf.position, self.freq)
        ops.hadamard_e2m1(dev, buf.index_q_raw.flatten(0, 1), buf.index_q.flatten(0, 1))
        step.emit("attn.indexer.q", buf.index_q)
        self.weigh(x, step)
        step.emit("attn.indexer.weights", buf.index_weights)
        self.compressor(x, cache, step)
        return self.choose(cache, step)

    def weigh(self, x: Tensor, step: Step) -> None:
        """x [T, D] -> buf.index_weights [T, index_n_heads] f32, what each head's scores count."""
        ops.linear_bf16(
            self.dev, x, self.weights.weights_proj, step.call.flat.index_weights, scale=self.weight_scale, round_bf16=True, variant=step.variants.linear
        )  # fmt: skip

    def choose(self, cache: LayerCache, step: Step) -> Tensor:
        """Scores of every complete entry, and the best of them; of as many queries at a time as scores are held at once."""
        dev, buf = self.dev, step.call.flat
        assert cache.keys is not None
        assert cache.scales is not None
        entries, T = max(1, step.entries), step.call.T
        slices = step.call.score_slices(entries)
        whole: Tensor | None = None  # [T, E], where the scores of all queries are held at once
        if len(slices) == 1:
            whole = step.call.score(T, entries)
        elif step.wants("attn.indexer.score"):
            whole = torch.empty(T, entries, dtype=torch.float32, device=dev.torch_device)
        for queries in slices:
            score = step.call.score(queries.stop - queries.start, entries) if whole is None else whole[queries]
            position, index_q, weights = buf.position[queries], buf.index_q[queries], buf.index_weights[queries]
            ops.indexer_score(
                dev, index_q, weights, cache.keys, cache.scales, position, buf.row[queries], score, ratio=4,
                variant=step.variants.indexer_score, scratch=step.call.prepared,
            )  # fmt: skip
            if whole is not None and queries.stop == T:
                step.emit("attn.indexer.score", whole if step.entries else whole[:, :0])
            ops.topk(
                dev, score, position, buf.selected[queries], ratio=4, variant=step.variants.topk, counters=step.call.counters, scratch=step.call.lists
            )  # fmt: skip
        step.emit("attn.selected", buf.selected)
        return buf.selected


class Attention:
    """One KV head (K = V), window keys from the ring and compressed entries in place, a sink per head."""

    def __init__(self, dev: Device, config: ModelConfig, layer: int, weights: AttentionWeights) -> None:
        self.dev, self.config, self.layer, self.weights, self.ratio = dev, config, layer, weights, config.ratio(layer)
        self.freq = inv_freq(config, layer).to(dev.torch_device)  # [r/2] f32
        self.compressor = None
        if weights.compressor is not None:
            self.compressor = MainCompressor(dev, config, weights.compressor, self.ratio, self.freq)
        self.indexer = None if weights.indexer is None else Indexer(dev, config, weights.indexer, self.freq)

    def __call__(self, x: Tensor, state: State, step: Step) -> Tensor:
        """x [T, D] bf16, normed -> y [T, D] bf16; the layer's cache takes the tokens."""
        dev, c, w, buf = self.dev, self.config, self.weights, step.call.flat
        cache, quant = state.cache.layers[self.layer], "rows" if step.variants.at_once else None
        selected = (self.at_once if step.variants.at_once else self.one_by_one)(x, state, step)

        self.core(cache, selected, state, step)
        step.emit("attn.core", buf.o)
        ops.rope(dev, buf.o, buf.position, self.freq, inverse=True)  # V carries the rotation
        step.emit("attn.o", buf.o)
        linear_fp8(dev, buf.o.flatten(1), w.wo_a, buf.wo_a, step, groups=c.o_groups)
        step.emit("attn.wo_a", buf.wo_a)
        ops.act_quant(dev, buf.wo_a, buf.wo_a_q, variant=quant)
        linear_fp8(dev, buf.wo_a_q, w.wo_b, buf.y, step)
        step.emit("attn.out", buf.y)
        return buf.y

    def one_by_one(self, x: Tensor, state: State, step: Step) -> Tensor | None:
        """buf.q and what the layer's cache keeps of the tokens -> the entries that attention reads, None: all. A launch an operation."""
        dev, c, w, buf = self.dev, self.config, self.weights, step.call.flat
        layer, cache = self.layer, state.cache.layers[self.layer]
        eps = c.rms_norm_eps
        ops.act_quant(dev, x, buf.x_q)
        linear_fp8(dev, buf.x_q, w.wq_a, buf.qr_raw, step)
        ops.rms_norm(dev, buf.qr_raw, w.q_norm, buf.qr, eps)
        step.emit("attn.q_norm", buf.qr)
        ops.act_quant(dev, buf.qr, buf.qr_q)
        linear_fp8(dev, buf.qr_q, w.wq_b, buf.q_raw.flatten(1), step)
        ops.rms_norm(dev, buf.q_raw.flatten(0, 1), None, buf.q.flatten(0, 1), eps)  # per head, no weight
        ops.rope(dev, buf.q, buf.position, self.freq)
        step.emit("attn.q", buf.q)

        linear_fp8(dev, buf.x_q, w.wkv, buf.kv_raw, step)
        ops.rms_norm(dev, buf.kv_raw, w.kv_norm, buf.kv, eps)
        ops.rope(dev, buf.kv[:, None], buf.position, self.freq)
        ops.store_window(dev, buf.kv, buf.position, buf.row, cache.ring, cache.ring_position)
        step.show("attn.kv", lambda: state.cache.read_window(layer, buf.position.view(step.b, step.s)))

        selected = None
        if self.compressor is not None:
            self.compressor(x, cache, step)
            step.show("attn.compressor", lambda: state.cache.read_entries(layer, step.completed(self.ratio)))
        if self.indexer is not None:
            selected = self.indexer(x, buf.qr_q, cache, step)
            step.show("attn.indexer.compressor", lambda: state.cache.read_index_keys(layer, step.completed(self.ratio)))
            selected = step.choices.get(f"{step.at}.attn.selected", selected)
        return selected

    def at_once(self, x: Tensor, state: State, step: Step) -> Tensor | None:
        """The same with the same bits and points: what reads the same rows shares a launch, and what follows it."""
        dev, c, w, buf, layer = self.dev, self.config, self.weights, step.call.flat, self.layer
        cache, main, indexer = state.cache.layers[layer], self.compressor, self.indexer
        pools = step.call.pool
        at_once.quant_rows(dev, x, buf.x_q)
        wq_a, wkv, wq_b = ((m.weight, m.scale) for m in (w.wq_a, w.wkv, w.wq_b))
        poolings: list[at_once.Pooling] = []
        if step.decode:
            if main is not None:
                poolings.append(main.pooling(pools[f"compressor.{self.ratio}"], cache))
            if indexer is not None:
                poolings.append(indexer.compressor.pooling(pools["indexer.compressor"], cache))
            at_once.project_hidden(
                dev, x, buf.x_q, (wq_a, buf.qr_raw), (wkv, buf.kv_raw), None if main is None else main.products(pools[f"compressor.{self.ratio}"]),
                None if indexer is None else indexer.compressor.products(pools["indexer.compressor"]),
                None if indexer is None else (indexer.weights.weights_proj, buf.index_weights, indexer.weight_scale),
            )  # fmt: skip
        else:
            linear_fp8(dev, buf.x_q, w.wq_a, buf.qr_raw, step)
            linear_fp8(dev, buf.x_q, w.wkv, buf.kv_raw, step)
        at_once.latents(
            dev, buf.qr_raw, w.q_norm, buf.qr, buf.qr_q, buf.kv_raw, w.kv_norm, buf.kv, buf.position, buf.row, cache.ring, cache.ring_position,
            self.freq, c.rms_norm_eps, step.start, step.count, *poolings,
        )  # fmt: skip
        if step.decode:
            index = None if indexer is None else ((indexer.weights.wq_b.weight, indexer.weights.wq_b.scale), buf.index_q_raw.flatten(1))
            at_once.project_latents(dev, buf.qr_q, (wq_b, buf.q_raw.flatten(1)), index)
        else:
            linear_fp8(dev, buf.qr_q, w.wq_b, buf.q_raw.flatten(1), step)
            if main is not None:
                main(x, cache, step)
            if indexer is not None:
                linear_fp8(dev, buf.qr_q, indexer.weights.wq_b, buf.index_q_raw.flatten(1), step)
                indexer.weigh(x, step)
                indexer.compressor(x, cache, step)
        raw, index_q = (None, None) if indexer is None else (buf.index_q_raw, buf.index_q)
        at_once.query_heads(dev, buf.q_raw, buf.q, raw, index_q, buf.position, self.freq, c.rms_norm_eps)

        for point, value in (("q_norm", buf.qr), ("q", buf.q)):
            step.emit(f"attn.{point}", value)
        step.show("attn.kv", lambda: state.cache.read_window(layer, buf.position.view(step.b, step.s)))
        if main is not None:
            step.show("attn.compressor", lambda: state.cache.read_entries(layer, step.completed(self.ratio)))
        if indexer is None:
            return None
        for point, value in (("q", buf.index_q), ("weights", buf.index_weights)):
            step.emit(f"attn.indexer.{point}", value)
        selected = indexer.choose(cache, step)
        step.show("attn.indexer.compressor", lambda: state.cache.read_index_keys(layer, step.completed(self.ratio)))
        return step.choices.get(f"{step.at}.attn.selected", selected)

    def core(self, cache: LayerCache, selected: Tensor | None, state: State, step: Step) -> None:
        """q, the ring and the entries -> buf.o, not yet rotated back."""
        dev, c, buf = self.dev, self.config, step.call.flat
        visible = None
        if step.wants("attn.visible"):
            entries = 0 if cache.entries is None else cache.entries.shape[1] if selected is None else selected.shape[1]
            visible = torch.empty(step.call.T, c.sliding_window + entries, dtype=torch.int32, device=dev.torch_device)
            dev.host_step(partial(visible.fill_, -1))
        if step.decode:
            ops.sparse_attn(
                dev, buf.q, cache.ring, cache.ring_position, cache.entries, selected, buf.position, buf.row,
                self.weights.attn_sink, buf.o, window=c.sliding_window, ratio=self.ratio,
                splits=state.splits[self.ratio], part_o=state.part_o[self.ratio], part_ml=state.part_ml[self.ratio],
                visible=visible, variant=step.variants.sparse_attn, done=state.merges,
            )  # fmt: skip
        else:
            ops.sparse_attn(
                dev, buf.q, cache.ring, cache.ring_position, cache.entries, selected, buf.position, buf.row,
                self.weights.attn_sink, buf.o, window=c.sliding_window, ratio=self.ratio, visible=visible,
                variant=step.variants.sparse_attn,
            )  # fmt: skip
        if visible is not None:
            step.emit("attn.visible", visible)
