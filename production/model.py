"""DeepSeek-V4 on this project's CUDA kernels; scrolls side by side with the reference.

Every number is made by a kernel in kernels/; torch owns the memory and moves tokens in. What differs from one row or
token to the next (positions, lengths, counts) lies on the device; the host keeps a mirror for validation and sizes.
A kernel that cannot run raises: nothing falls back. Values are rounded at the points of `POLICY`, nowhere else.

    import torch, production
    model = production.load("checkpoints/tiny-dsv4")
    state = model.new_state(batch=1)
    model.prefill(torch.tensor([[5, 9, 7]]), state)   # [1, 3, vocab]
    model.decode(torch.tensor([3]), state)            # [1, vocab]

Prefill longer than `prefill_chunk` is cut into chunks, each through all layers. A decode step allocates nothing; it can be
captured in a graph and replayed (production/graph.py).
Tests: parity/unit/test_production.py; the audit itself: pytest parity/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from production import ops
from production.attention import Attention
from production.cache import Backup, KVCache, cost
from production.door import Choices, checked_choices, checked_tokens
from production.graph import DECODING, EAGER, REPLAY, DecodeGraph
from production.launch import Device, open_device
from production.moe import MoE
from production.variants import Plan, fitted, plan_of, with_p_bf16
from production.weights import HyperWeights, LayerWeights, LoadAudit, ModelWeights, load_weights
from production.workspace import Call, Half, Step, Workspace
from reference.checkpoint import Checkpoint
from reference.config import InputError, ModelConfig
from reference.points import Taps, points_of_model

# The rounding points of this model (dsv4.md section 3): the published set.
POLICY = frozenset({"kv.e4m3", "compressor.e4m3", "indexer.q.e2m1", "indexer.compressor.e2m1", "linear_in.e4m3", "bf16"})

DEFAULT_MAX_CONTEXT = 8192


class HyperConnection:
    """The mixing around one half of a block (mHC): n residual streams in, one input out, and back.

    Fused variants put the half before back, mix, and norm the input (`norm`, its weight) in the launches of `pre`; `post` only notes
    the half in the call, for the next `pre`, for `put_back`, or for the head.
    """

    def __init__(self, dev: Device, config: ModelConfig, half: str, weights: HyperWeights, norm: Tensor) -> None:
        self.dev, self.config, self.name, self.w, self.norm = dev, config, f"hc_{half}", weights, norm

    def pre(self, X: Tensor, step: Step) -> Tensor:
        """X [T, n, D] -> the block's input a [T, D]; pre, post and comb stay in the buffers for `post`."""
        c, w, buf = self.config, self.w, step.call.flat
        before, step.call.half = step.call.half, None
        assert before is None or before.X is X
        ops.hc_pre(
            self.dev, X, w.fn, w.base, w.scale, buf.pre, buf.post, buf.comb, buf.a,
            c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, variant=step.variants.hyper_connection,
            sums=step.call.sums, counters=step.call.counters, norm=(self.norm, buf.x) if step.variants.mixes_at_once else None,
            before=None if before is None else (before.y, before.streams),
        )  # fmt: skip
        if before is not None:
            before.show()
        step.emit(f"{self.name}.pre", buf.pre)
        step.emit(f"{self.name}.post", buf.post)
        step.emit(f"{self.name}.comb", buf.comb)
        step.emit(f"{self.name}.a", buf.a)
        return buf.a

    def post(self, y: Tensor, X: Tensor, out: Tensor, step: Step) -> None:
        """The block's output y [T, D] put back: out [T, n, D], not X itself."""
        if step.variants.mixes_at_once:
            step.call.half = Half(y, X, out, lambda: step.emit(f"{self.name}.X", out))
            return
        ops.hc_post(self.dev, y, X, step.call.flat.post, step.call.flat.comb, out)
        step.emit(f"{self.name}.X", out)


def put_back(dev: Device, call: Call) -> None:
    """The half that no `pre` has put back."""
    half, call.half = call.half, None
    if half is not None:
        ops.hc_post(dev, half.y, half.streams, call.flat.post, call.flat.comb, half.X, variant="columns")
        half.show()


class Block:
    """One layer: attention half, then expert half, each between hc_pre and hc_post."""

    def __init__(self, dev: Device, config: ModelConfig, layer: int, weights: LayerWeights) -> None:
        self.dev, self.config, self.layer, self.w = dev, config, layer, weights
        self.hc_attn = HyperConnection(dev, config, "attn", weights.hc_attn, weights.attn_norm)
        self.attn = Attention(dev, config, layer, weights.attn)
        self.hc_ffn = HyperConnection(dev, config, "ffn", weights.hc_ffn, weights.ffn_norm)
        self.ffn = MoE(dev, config, weights)

    def norm(self, a: Tensor, weight: Tensor, point: str, step: Step) -> Tensor:
        x = step.call.flat.x
        if not step.variants.mixes_at_once:  # else `pre` has made it
            ops.rms_norm(self.dev, a, weight, x, self.config.rms_norm_eps)
        step.emit(point, x)
        return x

    def __call__(self, state: State, step: Step) -> None:
        """buf.X [T, n, D] -> buf.X after the layer, or a half noted that makes it; the layer's cache takes the tokens."""
        buf = step.call.flat
        a = self.hc_attn.pre(buf.X, step)
        y = self.attn(self.norm(a, self.w.attn_norm, "attn.norm", step), state, step)
        self.hc_attn.post(y, buf.X, buf.X_half, step)
        a = self.hc_ffn.pre(buf.X_half, step)
        y = self.ffn(self.norm(a, self.w.ffn_norm, "ffn.norm", step), step)
        self.hc_ffn.post(y, buf.X_half, buf.X, step)


class State:
    """What a run carries from call to call (the cache), and the memory it works in. Made by `Transformer.new_state`.

    splits   key splits of decode attention by ratio, fixed by capacity, so that a row's result does not depend on others
    merges   counters of blocks that merge splits themselves, zero between steps; None: a kernel of its own merges
    count    [layers, b] i32, tokens of the current call; `ones` the same for decode
    graphs   captured decode steps, by (layer or None, taps, given choices)
    """

    def __init__(self, model: Transformer, batch: int, max_context: int) -> None:
        c, device = model.config, model.device.torch_device
        self.model, self.batch, self.max_context = model, batch, max_context
        chunk = min(model.prefill_chunk, max_context)
        self.cache = KVCache(c, len(model.layers), batch, max_context, chunk, device)
        self.backup = Backup(self.cache)
        self.workspace = Workspace(c, model.layers, batch, chunk, max_context, device)
        for block, cache in zip(model.blocks, self.cache.layers, strict=True):
            if block.attn.indexer is not None:
                block.attn.indexer.check_widths(cache, self.workspace.at(1).pool["indexer.compressor"])
        self.count = torch.zeros(len(model.layers), batch, dtype=torch.int32, device=device)
        self.ones = torch.ones(len(model.layers), batch, dtype=torch.int32, device=device)
        self.graphs: dict[tuple[int | None, tuple[str, ...], tuple[str, ...]], DecodeGraph] = {}
        variant, h = model.plan.decode.sparse_attn, c.num_attention_heads
        self.merges = torch.zeros(ops.merge_counters(batch, h), dtype=torch.int32, device=device) if ops.merges_in_launch(variant) else None
        self.splits: dict[int, int] = {}
        self.part_o: dict[int, Tensor] = {}
        self.part_ml: dict[int, Tensor] = {}
        for cache in self.cache.layers:
            entries = 0 if cache.entries is None else cache.entries.shape[1]
            visible = c.sliding_window + (min(c.index_topk, entries) if cache.keys is not None else entries)
            splits = self.splits[cache.ratio] = ops.splits_for(visible, variant)
            heads = (batch, splits, h)
            if cache.ratio not in self.part_o:
                self.part_o[cache.ratio] = torch.zeros(*heads, c.head_dim, dtype=torch.float32, device=device)
                self.part_ml[cache.ratio] = torch.zeros(*heads, 2, dtype=torch.float32, device=device)

    @property
    def length(self) -> Tensor:
        """Tokens taken, [b] int64 on the CPU."""
        return torch.tensor(self.cache.mirror[0], dtype=torch.int64)

    def export_layer(self, layer: int) -> dict[str, Tensor]:
        """A layer's state by the names of reference.points.STATE_LEGEND."""
        self._check(layer)
        return self.cache.export_layer(layer)

    def import_layer(self, layer: int, snapshot: Mapping[str, Tensor]) -> None:
        """Replace a layer's state, its length included."""
        self._check(layer)
        self.cache.import_layer(layer, snapshot)

    def _check(self, layer: int) -> None:
        if layer not in self.model.layers:
            raise InputError(f"layer {layer}: the state holds layers 0-{len(self.model.layers) - 1}")


class Transformer:
    """The model. Interface as the reference's; `kernels()` says what really ran.

    config, layers, taps    as everywhere
    policy                  its rounding points
    device                  where kernels run
    plan                    which variant of each kernel a phase runs
    decoding                "eager": a decode step is launched kernel by kernel; "replay": from graphs kept in the state
    audit                   where each tensor of the checkpoint went
    """

    policy = POLICY  # and p.bf16 where the plan rounds there

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        audit: LoadAudit,
        device: Device,
        max_context: int,
        prefill_chunk: int,
        plan: Plan,
        decoding: str = EAGER,
    ) -> None:
        self.config, self.weights, self.audit, self.device = config, weights, audit, device
        self.max_context, self.prefill_chunk, self.plan, self.decoding = max_context, prefill_chunk, fitted(plan, config), decoding
        if self.plan.p_bf16:
            self.policy = POLICY | {"p.bf16"}
        self.layers = tuple(range(len(weights.layers)))
        self.taps = Taps(points_of_model(config, self.layers))
        self.blocks = [Block(device, config, layer, weights.layers[layer]) for layer in self.layers]

    # ---- interface ----

    def new_state(self, batch: int = 1, max_context: int | None = None) -> State:
        """An empty state with all its memory. max_context: None takes load's value; more than that is an error."""
        context = self.max_context if max_context is None else max_context
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise InputError(f"batch: expected an integer >= 1, got {batch!r}")
        if isinstance(context, bool) or not isinstance(context, int) or not 1 <= context <= self.max_context:
            raise InputError(f"max_context={context!r}: expected 1 to {self.max_context}, what the model was loaded with (--max-context)")
        return State(self, batch, context)

    def prefill(
        self, tokens: Tensor, state: State, lengths: Tensor | Sequence[int] | None = None, choices: Choices | None = None, logits: str = "all"
    ) -> Tensor:
        """tokens [b, s] int64, right-padded; lengths [b] valid ones of this call -> logits, NaN where there is no token.

        logits   "all": [b, s, vocab] f32, every token's; "last": [b, vocab] f32, those of each row's last valid token, the same
                 bits. NOTE: a million tokens of "all" are 542 GB at the published vocabulary; "last" takes none of it.
        Each row goes on at its own position. An error leaves the state untouched.
        """
        c, layers = self.config, range(len(self.layers))
        self._check_state(state)
        counts = checked_tokens(c, tokens, state.batch, lengths)
        b, s = tokens.shape
        if logits not in ("all", "last"):
            raise InputError(f"logits={logits!r}: expected 'all' or 'last'")
        last = logits == "last"
        if last and self.taps.wants("logits"):
            raise InputError("logits='last': the point 'logits' is observed, which takes every token's; use logits='all'")
        state.cache.check_level()
        state.cache.check_room(layers, counts)
        given = checked_choices(c, choices, state.cache, counts, s, self.layers)
        out = torch.empty((b, c.vocab_size) if last else (b, s, c.vocab_size), dtype=torch.float32, device=self.device.torch_device)
        if last:
            out.fill_(torch.nan)  # a row without a token has no last one
        with state.backup.kept_on_error(layers):
            for c0 in range(0, s, state.workspace.chunk):
                c1 = min(s, c0 + state.workspace.chunk)
                part = [min(max(n - c0, 0), c1 - c0) for n in counts]
                ends = [c0 < n <= c1 for n in counts]
                self._forward(tokens[:, c0:c1], state, part, _chunk_of(given, c0, c1), False, out if last else out[:, c0:c1], ends if last else None)
        return out

    def decode(self, tokens: Tensor, state: State, choices: Choices | None = None, out: Tensor | None = None) -> Tensor:
        """tokens [b] int64, one for every row -> logits [b, vocab] f32, into `out` when given: then nothing is allocated."""
        columns, counts, given, out = self.checked_step(tokens, state, choices, out)
        if self.decoding == REPLAY:
            return self._graph(state, None, given).replay(columns, counts, given, out)
        self._forward(columns, state, counts, _chunk_of(given, 0, 1), True, out[:, None])
        return out

    def capture(self, state: State, points: Sequence[str] = (), choices: Sequence[str] = (), layer: int | None = None, at: int = 0) -> DecodeGraph:
        """A decode step of this state, of all layers or of one, captured in a graph; the state is left as it was.

        points, choices   taps that it holds, and names of choices that it will be given
        at                tokens a row that host code sees during the capture, less than max_context; it is replayed at any length
        """
        self._check_state(state)
        if layer is not None and layer not in self.layers:
            raise InputError(f"layer {layer}: this model runs layers {self.layers[0]} to {self.layers[-1]}")
        if isinstance(at, bool) or not isinstance(at, int) or not 0 <= at < state.max_context:
            raise InputError(f"at={at!r}: expected 0 to {state.max_context - 1}, tokens that a row can hold before a step; raise --max-context for more")
        return DecodeGraph(self, state, points, choices, layer, at)

    def run_layer(
        self,
        layer: int,
        X: Tensor,
        tokens: Tensor,
        state: State,
        lengths: Tensor | Sequence[int] | None = None,
        choices: Choices | None = None,
        decode: bool = False,
    ) -> Tensor:
        """One layer alone on given streams X [b, s, n, D] -> [b, s, n, D] f32; only this layer's state goes on."""
        counts, given = self.checked_layer(layer, X, tokens, state, lengths, choices, decode)
        if decode and self.decoding == REPLAY:
            return self._graph(state, layer, given).replay_layer(X, tokens, counts, given)
        b, s = tokens.shape
        result = torch.empty(b, s, *X.shape[2:], dtype=torch.float32, device=self.device.torch_device)
        with state.backup.kept_on_error(range(layer, layer + 1)):
            for c0 in range(0, s, state.workspace.chunk):
                c1 = min(s, c0 + state.workspace.chunk)
                part = [min(max(n - c0, 0), c1 - c0) for n in counts]
                call, count = state.workspace.at(c1 - c0), state.count[layer]
                call.flat.tokens.view(b, -1).copy_(tokens[:, c0:c1])
                call.flat.X.view(b, c1 - c0, *X.shape[2:]).copy_(X[:, c0:c1])
                count.copy_(torch.tensor(part, dtype=torch.int32))
                self.enqueue_layer(layer, state, call, count, part, _chunk_of(given, c0, c1), decode, self.taps)
                result[:, c0:c1].copy_(call.flat.X.view(b, c1 - c0, *X.shape[2:]))
                state.cache.advanced(range(layer, layer + 1), part)
        return result

    def kernels(self) -> list[tuple[str, str, str, str, int]]:
        """What really ran: (source, kernel, arch, build hash, launches)."""
        return list(self.device.ran)

    def describe(self) -> str:
        """One line: layers, weights, device, capacity and its cost, roundings."""
        constant, per_token = cost(self.config, self.prefill_chunk, len(self.layers))
        return (
            f"production: {len(self.layers)} layers, {len(self.audit.records)} tensors, {self.audit.device_bytes / 1e6:.1f} MB "
            f"of weights on {self.device.name} ({self.device.arch}), max context {self.max_context} at {constant / 1e6:.2f} MB and "
            f"{per_token:.1f} B a token, prefill chunk {self.prefill_chunk}, {self.plan.name} variants, decode {self.decoding}, rounds at {', '.join(sorted(self.policy))}"
        )

    # ---- the door ----

    def _check_state(self, state: State) -> None:
        if not isinstance(state, State) or state.model is not self:
            raise InputError("state: made by another model; use this model's new_state")

    def checked_step(
        self, tokens: Tensor, state: State, choices: Choices | None, out: Tensor | None
    ) -> tuple[Tensor, list[int], dict[str, Tensor], Tensor]:
        """What a decode step is given, in order: tokens [b, 1], counts, choices, and where its logits go. Raises InputError."""
        if not isinstance(tokens, Tensor) or tokens.dim() != 1:
            raise InputError(f"tokens: expected shape [b], got {list(getattr(tokens, 'shape', []))}")
        columns = tokens[:, None]
        self._check_state(state)
        counts = checked_tokens(self.config, columns, state.batch, None)
        state.cache.check_level()
        state.cache.check_room(range(len(self.layers)), counts)
        given = checked_choices(self.config, choices, state.cache, counts, 1, self.layers)
        shape, where = (state.batch, self.config.vocab_size), self.device.torch_device
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=where)
        elif out.shape != shape or out.dtype != torch.float32 or out.device.type != where.type or not out.is_contiguous():
            raise InputError(f"out: expected contiguous {list(shape)} float32 on {where}, got {list(out.shape)} {out.dtype} on {out.device}")
        return columns, counts, given, out

    def checked_layer(
        self, layer: int, X: Tensor, tokens: Tensor, state: State, lengths: Tensor | Sequence[int] | None, choices: Choices | None, decode: bool
    ) -> tuple[list[int], dict[str, Tensor]]:
        """What one layer is given, in order: tokens per row, choices. Raises InputError."""
        if layer not in self.layers:
            raise InputError(f"layer {layer}: this model runs layers {self.layers[0]} to {self.layers[-1]}")
        c = self.config
        self._check_state(state)
        counts = checked_tokens(c, tokens, state.batch, lengths)
        b, s = tokens.shape
        if tuple(X.shape) != (b, s, c.hc_mult, c.hidden_size) or not X.is_floating_point():
            raise InputError(f"X: expected floating point {[b, s, c.hc_mult, c.hidden_size]}, got {X.dtype} {list(X.shape)}")
        if decode and s != 1:
            raise InputError(f"decode takes one token a row, got {s}")
        state.cache.check_room(range(layer, layer + 1), counts)
        return counts, checked_choices(c, choices, state.cache, counts, s, (layer,))

    def _graph(self, state: State, layer: int | None, given: Choices) -> DecodeGraph:
        """The state's graph with the taps that are wanted now and these choices, captured when there is none."""
        points = tuple(filter(self.taps.wants, self.taps.points)) if self.taps.observers else ()
        key = (layer, points, tuple(given))
        if key not in state.graphs:
            state.graphs[key] = self.capture(state, points, tuple(given), layer)
        return state.graphs[key]

    # ---- one chunk through all layers ----

    def _forward(
        self, tokens: Tensor, state: State, counts: list[int], choices: Choices, decode: bool, logits: Tensor, ends: list[bool] | None = None
    ) -> None:
        """tokens [b, s] -> logits [b, s, vocab] (a view), written in place; the state goes on.

        ends   not None: logits [b, vocab], of the last token of rows that end here
        """
        b, s = tokens.shape
        call = state.workspace.at(s)
        buf, count = call.flat, state.ones if decode else state.count
        buf.tokens.view(b, s).copy_(tokens)
        if not decode:
            count.copy_(torch.tensor(counts, dtype=torch.int32))
        self.enqueue(state, call, count, counts, choices, decode, logits, self.taps, ends)
        state.cache.advanced(range(len(self.layers)), counts)

    def enqueue(
        self,
        state: State,
        call: Call,
        count: Tensor,
        counts: list[int] | None,
        choices: Choices,
        decode: bool,
        logits: Tensor,
        taps: Taps,
        ends: list[bool] | None = None,
    ) -> None:
        """Everything that the device does with the tokens of a call. counts: None in a graph, which follows `count` [layers, b]."""
        dev, c, cache = self.device, self.config, state.cache
        b, s, buf = state.batch, call.s, call.flat

        def show(point: str, value: Tensor) -> None:
            if taps.wants(point):
                dev.host_step(lambda: taps.emit(point, value))

        ops.token_positions(dev, cache.lengths[0], count[0], buf.position, buf.row)
        ops.embed(dev, buf.tokens, self.weights.embed, buf.position, buf.X)
        show("embed", buf.X.view(b, s, c.hc_mult, -1)[:, :, 0])
        call.half = None
        for layer in self.layers:
            self._run_block(layer, state, call, count[layer], counts, choices, decode, taps)
        w = self.weights.hc_head
        variants = self.plan.decode if decode else self.plan.prefill
        if variants.mixes_at_once:
            half, call.half = call.half, None
            ops.hc_head(
                dev, buf.X, w.fn, w.base, w.scale, buf.a, c.hc_eps, c.rms_norm_eps, variants.hyper_connection, call.sums, call.counters,
                norm=(self.weights.norm, buf.x), before=None if half is None else (half.y, half.streams),
                mixing=None if half is None else (buf.post, buf.comb),
            )  # fmt: skip
            if half is not None:
                half.show()
        else:
            ops.hc_head(dev, buf.X, w.fn, w.base, w.scale, buf.a, c.hc_eps, c.rms_norm_eps)
            ops.rms_norm(dev, buf.a, self.weights.norm, buf.x, c.rms_norm_eps)
        show("hc_head", buf.a.view(b, s, -1))
        show("norm", buf.x.view(b, s, -1))
        if decode:
            ops.linear_bf16(dev, buf.x, self.weights.head, logits[:, 0], variant=self.plan.decode.linear)
        elif ends is None:
            for row, n in enumerate(counts or ()):
                logits[row, n:].fill_(torch.nan)
                if n:
                    ops.linear_bf16(dev, buf.x[row * s : row * s + n], self.weights.head, logits[row, :n], variant=self.plan.prefill.linear)
        else:
            for row, n in enumerate(counts or ()):
                last = row * s + n - 1
                if ends[row]:
                    ops.linear_bf16(dev, buf.x[last : last + 1], self.weights.head, logits[row : row + 1], variant=self.plan.prefill.linear)
        if ends is None:
            show("logits", logits)
        ops.advance(dev, cache.lengths.view(-1), count.view(-1))

    def enqueue_layer(
        self, layer: int, state: State, call: Call, count: Tensor, counts: list[int] | None, choices: Choices, decode: bool, taps: Taps
    ) -> None:
        """The same of one layer, on the streams in call.flat.X; count [b]."""
        length = state.cache.layers[layer].length
        ops.token_positions(self.device, length, count, call.flat.position, call.flat.row)
        call.half = None
        self._run_block(layer, state, call, count, counts, choices, decode, taps)
        put_back(self.device, call)
        ops.advance(self.device, length, count)

    def _run_block(
        self, layer: int, state: State, call: Call, count: Tensor, counts: list[int] | None, choices: Choices, decode: bool, taps: Taps
    ) -> None:
        step = Step(
            device=self.device,
            call=call,
            b=state.batch,
            s=call.s,
            start=state.cache.layers[layer].length,
            count=count,
            decode=decode,
            variants=self.plan.decode if decode else self.plan.prefill,
            entries=state.cache.entry_count(layer, counts),
            at=f"layers.{layer}",
            taps=taps,
            choices=choices,
        )
        self.blocks[layer](state, step)


def _chunk_of(given: Choices, c0: int, c1: int) -> dict[str, Tensor]:
    """Columns c0 to c1 of given choices, as [T, k]; k is 0 where no entry exists yet."""
    return {name: value[:, c0:c1].flatten(0, 1).contiguous() for name, value in given.items()}


def load(
    checkpoint_dir: str | Path,
    device: str = "cpu",
    max_context: int | None = None,
    layers: range | Sequence[int] | None = None,
    prefill_chunk: int = 512,
    kernels_dir: str | Path | None = None,
    checked: bool = False,
    mma_sum: str = "fma_chain",
    variants: str | None = None,
    decoding: str = EAGER,
    p_bf16: bool = False,
    **device_options: Any,
) -> Transformer:
    """Read a checkpoint, put its packed weights on the device and build the model.

    layers          None, or a prefix range(0, n): embed, those layers, hc_head, norm, head
    max_context     tokens a row may hold (--max-context); None: 8192, or what the model allows when that is less
    prefill_chunk   tokens of a row that go through the layers at once
    variants        plan of kernel variants: "portable", "fast", None: fast on sm_90a, else portable (production/variants.py)
    decoding        "eager", or "replay": decode steps from captured graphs (production/graph.py)
    p_bf16          True: softmax weights are rounded to bf16 before they weigh the values, one more rounding point; fast variants only
    kernels_dir, checked, mma_sum, ...   of production.launch.open_device
    """
    checkpoint = Checkpoint(checkpoint_dir, layers)
    limit = checkpoint.config.max_position_embeddings
    if max_context is None:
        max_context = min(DEFAULT_MAX_CONTEXT, limit)
    if isinstance(max_context, bool) or not isinstance(max_context, int) or not 1 <= max_context <= limit:
        raise InputError(f"--max-context {max_context!r}: expected 1 to max_position_embeddings = {limit}")
    if isinstance(prefill_chunk, bool) or not isinstance(prefill_chunk, int) or prefill_chunk < 1:
        raise InputError(f"prefill_chunk={prefill_chunk!r}: expected an integer >= 1")
    if decoding not in DECODING:
        raise InputError(f"decoding={decoding!r}: expected {' or '.join(DECODING)}")
    opened = open_device(device, checked=checked, mma_sum=mma_sum, kernels_dir=None if kernels_dir is None else Path(kernels_dir), **device_options)
    weights, audit = load_weights(checkpoint, opened.torch_device)
    plan = fitted(plan_of(variants, opened), checkpoint.config)
    return Transformer(checkpoint.config, weights, audit, opened, max_context, prefill_chunk, with_p_bf16(plan) if p_bf16 else plan, decoding)
