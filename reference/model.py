"""The whole model: embedding, blocks with hyper-connections, head; prefill, decode, one layer alone.

    model = reference.load("checkpoints/tiny-dsv4", policy="storage")
    state = model.new_state(batch=2)
    logits = model.prefill(tokens, state, lengths)   # [b, s, vocab]; call again to go on
    logits = model.decode(next_tokens, state)        # [b, vocab]

Everything is FP32 on the CPU and rounds only at the points of the policy (reference/formats.py). A call checks its
arguments first and puts new layer states in place last, so that an error leaves the state as it was.
Tests: parity/unit/test_reference.py, parity/unit/test_transformers.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from reference import ops
from reference.attention import Attention, LayerState, export_state, import_state
from reference.checkpoint import E4M3, FP4, Checkpoint
from reference.config import InputError, ModelConfig
from reference.formats import Policy
from reference.linear import DECODED_BYTES, Decoded, Linear
from reference.moe import MoE
from reference.ops import Sums
from reference.points import Taps, points_of_model

DEFAULT_MAX_CONTEXT = 8192
Choices = Mapping[str, Tensor]
NONE = torch.iinfo(torch.int64).max  # sorts behind every id


class State:
    """What a batch of sequences carries between calls. Changed in place, and only by a call that succeeds.

    batch        rows
    max_context  tokens a row can take
    layers       layer number -> LayerState
    """

    def __init__(self, config: ModelConfig, layers: Sequence[int], batch: int, max_context: int) -> None:
        self.config, self.batch, self.max_context = config, batch, max_context
        self.layers = {layer: LayerState.empty(config, layer, batch) for layer in layers}

    @property
    def length(self) -> Tensor:
        """[b] int64, tokens taken by the first layer (by every layer, unless layers were run or imported alone)."""
        return self.layers[0].length.clone()

    def export_layer(self, layer: int) -> dict[str, Tensor]:
        """One layer's state in the words of `reference.points.STATE_LEGEND`; fp32 copies."""
        self._check(layer)
        return export_state(self.layers[layer], self.config, layer)

    def import_layer(self, layer: int, snapshot: Mapping[str, Tensor]) -> None:
        """Replace one layer's state, its length included, by an exported one. Raises InputError."""
        self._check(layer)
        state = import_state(snapshot, self.config, layer, self.batch)
        if int(state.length.max()) > self.max_context:
            raise InputError(
                f"state of layer {layer}: {int(state.length.max())} tokens, more than max_context {self.max_context}; raise --max-context"
            )
        self.layers[layer] = state

    def _check(self, layer: int) -> None:
        if layer not in self.layers:
            raise InputError(f"layer {layer}: the state holds layers 0-{len(self.layers) - 1}")


class HyperConnection:
    """The mixing around one half of a block (mHC): n residual streams in, one input out, and back."""

    def __init__(self, checkpoint: Checkpoint, layer: int, half: str, policy: Policy, sums: Sums, taps: Taps) -> None:
        self.config, self.policy, self.sums, self.taps = checkpoint.config, policy, sums, taps
        self.name = f"layers.{layer}.hc_{half}"
        self.fn, self.base, self.scale = (checkpoint.raw(f"{self.name}_{part}") for part in ("fn", "base", "scale"))

    def pre(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """X [b, s, n, D] -> the block's input a [b, s, D], post [b, s, n], comb [b, s, n, n]."""
        c = self.config
        a, pre, post, comb = ops.hc_pre(
            X, self.fn, self.base, self.scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, self.sums
        )
        a = self.policy.bf16(a)
        for name, value in (("pre", pre), ("post", post), ("comb", comb), ("a", a)):
            self.taps.emit(f"{self.name}.{name}", value)
        return a, post, comb

    def post(self, y: Tensor, X: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """The block's output y [b, s, D] put back: new residual streams [b, s, n, D]."""
        X = self.policy.bf16(ops.hc_post(y, X, post, comb, self.sums, self.policy.post, self.policy.comb))
        self.taps.emit(f"{self.name}.X", X)
        return X


class Block:
    """One layer: attention half, then expert half, each between hc_pre and hc_post."""

    def __init__(self, checkpoint: Checkpoint, layer: int, policy: Policy, sums: Sums, decoded: Decoded, taps: Taps) -> None:
        self.name, self.policy, self.sums, self.taps = f"layers.{layer}", policy, sums, taps
        self.eps = checkpoint.config.rms_norm_eps
        self.hc_attn = HyperConnection(checkpoint, layer, "attn", policy, sums, taps)
        self.attn_norm = checkpoint.raw(f"{self.name}.attn_norm.weight").float()
        self.attn = Attention(checkpoint, layer, policy, sums, decoded, taps)
        self.hc_ffn = HyperConnection(checkpoint, layer, "ffn", policy, sums, taps)
        self.ffn_norm = checkpoint.raw(f"{self.name}.ffn_norm.weight").float()
        self.ffn = MoE(checkpoint, layer, policy, sums, decoded, taps)

    def norm(self, a: Tensor, weight: Tensor, point: str) -> Tensor:
        normed = self.policy.bf16(ops.rms_norm(a, weight, self.eps, self.sums))
        self.taps.emit(f"{self.name}.{point}", normed)
        return normed

    def __call__(
        self, X: Tensor, tokens: Tensor, state: LayerState, lengths: Tensor, choices: Choices
    ) -> tuple[Tensor, LayerState]:
        """X [b, s, n, D] -> X after the layer, and the layer's state after the call."""
        a, post, comb = self.hc_attn.pre(X)
        y, state = self.attn(self.norm(a, self.attn_norm, "attn.norm"), state, lengths, choices)
        X = self.hc_attn.post(y, X, post, comb)
        a, post, comb = self.hc_ffn.pre(X)
        y = self.ffn(self.norm(a, self.ffn_norm, "ffn.norm"), tokens, choices)
        return self.hc_ffn.post(y, X, post, comb), state


class Transformer:
    """The loaded model.

    config   ModelConfig
    layers   the layers that are loaded, a prefix 0 .. n-1
    taps     where recorders attach
    policy   the rounding points in force
    """

    def __init__(self, checkpoint: Checkpoint, policy: Policy, sums: Sums, max_context: int) -> None:
        c = self.config = checkpoint.config
        self.layers, self.policy, self.max_context = checkpoint.layers, policy.points, max_context
        self.taps = Taps(points_of_model(c, self.layers))
        self._checkpoint, self._policy, self._sums = checkpoint, policy, sums
        decoded = Decoded()
        self.embed = checkpoint.raw("embed.weight")  # [vocab, D] bf16
        self.blocks = [Block(checkpoint, layer, policy, sums, decoded, self.taps) for layer in self.layers]
        self.hc_head_fn, self.hc_head_base, self.hc_head_scale = (checkpoint.raw(f"hc_head_{p}") for p in ("fn", "base", "scale"))
        self.norm = checkpoint.raw("norm.weight").float()
        self.head = Linear(checkpoint, "head", Policy(frozenset()), sums, decoded)  # FP32
        if checkpoint.unread():
            raise RuntimeError(f"{len(checkpoint.unread())} tensors were never read, first {checkpoint.unread()[0]!r}")

    def describe(self) -> str:
        """One line for people."""
        policy = ", ".join(sorted(self.policy)) or "no rounding"
        return f"reference (PyTorch, FP32, sum order {self._sums.order}; {policy}) of {self._checkpoint.describe()}"

    def twin(self, sum_order: int) -> Transformer:
        """The same model and policy with its sums in another order: what it differs by is the noise floor."""
        return Transformer(Checkpoint(self._checkpoint.directory, self.layers), self._policy, Sums(sum_order), self.max_context)

    @property
    def clamped(self) -> int:
        """gate and up values that `swiglu_limit` has changed in all calls so far."""
        return sum(e.clamped for block in self.blocks for e in [*block.ffn.experts, block.ffn.shared_experts])

    def router_bias(self, layer: int) -> Tensor:
        """[n_routed_experts], added to the scores for the choice only; zero in hash-routed layers."""
        bias = self.blocks[layer].ffn.gate.bias
        return torch.zeros(self.config.n_routed_experts) if bias is None else bias

    def new_state(self, batch: int = 1, max_context: int | None = None) -> State:
        """An empty state. `max_context` None takes load's value; more than that is an InputError."""
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise InputError(f"batch={batch!r}: expected an integer >= 1")
        limit = self.max_context
        if max_context is not None:
            if isinstance(max_context, bool) or not isinstance(max_context, int) or not 1 <= max_context <= limit:
                raise InputError(f"max_context={max_context!r}: expected 1 .. {limit}, the value the model was loaded with (--max-context)")
            limit = max_context
        return State(self.config, self.layers, batch, limit)

    def prefill(
        self, tokens: Tensor, state: State, lengths: Tensor | Sequence[int] | None = None, choices: Choices | None = None
    ) -> Tensor:
        """Take `lengths[b]` tokens of each right-padded row and go on from the row's own position.

        tokens [b, s] int64 -> logits [b, s, vocab] fp32, NaN at pads. `choices` replays given indices: point name
        `layers.N.attn.selected` or `layers.N.ffn.experts` -> [b, s, k]; weights still come from the model's own scores.
        """
        lengths = self._check_call(tokens, state, lengths, self.layers)
        valid = torch.arange(tokens.shape[1]) < lengths[:, None]  # [b, s]
        tokens = torch.where(valid, tokens, 0)
        given = self._check_choices(choices, valid, state)
        x = self._policy.bf16(self.embed[tokens].float())  # [b, s, D]
        self.taps.emit("embed", x)
        X = x[:, :, None].expand(-1, -1, self.config.hc_mult, -1)  # [b, s, n, D]
        after = {}
        for layer, block in zip(self.layers, self.blocks, strict=True):
            X, after[layer] = block(X, tokens, state.layers[layer], lengths, given)
        logits = self._head(X).masked_fill(~valid[..., None], torch.nan)
        self.taps.emit("logits", logits)
        state.layers = after
        return logits

    def decode(self, tokens: Tensor, state: State, choices: Choices | None = None) -> Tensor:
        """One token per row: tokens [b] int64 -> logits [b, vocab]."""
        if not isinstance(tokens, Tensor) or tokens.dim() != 1:
            raise InputError(f"tokens: expected shape [b], got {list(getattr(tokens, 'shape', []))}")
        return self.prefill(tokens[:, None], state, None, choices)[:, 0]

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
        """One layer alone on given residual streams X [b, s, n, D]; advances only that layer's own state."""
        if layer not in self.layers:
            raise InputError(f"layer {layer}: the model has layers 0-{len(self.layers) - 1}")
        lengths = self._check_call(tokens, state, lengths, (layer,))
        expected = (*tokens.shape, self.config.hc_mult, self.config.hidden_size)
        if tuple(X.shape) != expected or not X.is_floating_point():
            raise InputError(f"X: expected floating point {list(expected)}, got {X.dtype} {list(X.shape)}")
        if decode and tokens.shape[1] != 1:
            raise InputError(f"tokens: a decode step takes one token per row, got {tokens.shape[1]}")
        valid = torch.arange(tokens.shape[1]) < lengths[:, None]
        given = self._check_choices(choices, valid, state)
        X = X.to("cpu", torch.float32).masked_fill(~valid[..., None, None], 0)
        X, after = self.blocks[layer](X, torch.where(valid, tokens, 0), state.layers[layer], lengths, given)
        state.layers[layer] = after
        return X

    def run_head(self, X: Tensor, lengths: Tensor | Sequence[int] | None = None) -> Tensor:
        """The head alone on given residual streams after the last layer: X [b, s, n, D] -> logits [b, s, vocab] fp32, NaN at pads."""
        count = torch.full((X.shape[0],), X.shape[1]) if lengths is None else torch.as_tensor(lengths)
        valid = torch.arange(X.shape[1]) < count[:, None]
        logits = self._head(X.to("cpu", torch.float32).masked_fill(~valid[..., None, None], 0)).masked_fill(~valid[..., None], torch.nan)
        self.taps.emit("logits", logits)
        return logits

    def _head(self, X: Tensor) -> Tensor:
        """hc_head, norm, head: X [b, s, n, D] -> logits [b, s, vocab]."""
        c, policy, sums = self.config, self._policy, self._sums
        a = policy.bf16(ops.hc_head(X, self.hc_head_fn, self.hc_head_base, self.hc_head_scale, c.hc_eps, c.rms_norm_eps, sums))
        x = policy.bf16(ops.rms_norm(a, self.norm, c.rms_norm_eps, sums))
        self.taps.emit("hc_head", a)
        self.taps.emit("norm", x)
        return policy.logits(self.head(x))

    # ---- the door ----

    def _check_call(
        self, tokens: Tensor, state: State, lengths: Tensor | Sequence[int] | None, layers: Iterable[int]
    ) -> Tensor:
        """Validate a call for the given layers and return `lengths` [b] int64. Raises InputError."""
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2 or tokens.shape[1] < 1:
            got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InputError(f"tokens: expected int64 [b, s] with s >= 1, got {got}")
        if not isinstance(state, State) or state.config != self.config or tuple(state.layers) != self.layers:
            raise InputError("state: made by another model; use this model's new_state")
        b, s = tokens.shape
        if b != state.batch:
            raise InputError(f"tokens: {b} rows, the state has {state.batch}")
        if lengths is None:
            lengths = torch.full((b,), s)
        else:
            try:
                lengths = torch.as_tensor(lengths)
            except (TypeError, ValueError, RuntimeError):
                raise InputError(f"lengths: expected {b} integers, got {lengths!r}") from None
            if lengths.shape != (b,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
                raise InputError(f"lengths: expected {b} integers, got {lengths.dtype} {list(lengths.shape)}")
            lengths = lengths.to("cpu", torch.int64)
            if bool(((lengths < 0) | (lengths > s)).any()):
                raise InputError(f"lengths: expected 0 .. {s}, got {lengths.tolist()}")
        wrong = ((tokens < 0) | (tokens >= self.config.vocab_size)) & (torch.arange(s) < lengths[:, None])
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise InputError(
                f"tokens[{row}, {column}]: id {int(tokens[row, column])} out of range, the vocabulary has {self.config.vocab_size}"
            )
        held = [state.layers[layer].length for layer in layers]
        if any(not torch.equal(length, held[0]) for length in held):
            raise InputError("state: its layers stand at different positions (run or imported alone); a whole call needs them equal")
        total = held[0] + lengths
        if int(total.max()) > state.max_context:
            row = int(total.argmax())
            raise InputError(
                f"row {row}: {int(held[0][row])} tokens held and {int(lengths[row])} more exceed max_context {state.max_context}; "
                "raise --max-context"
            )
        return lengths

    def _check_choices(self, choices: Choices | None, valid: Tensor, state: State) -> dict[str, Tensor]:
        """Choices in the form the layers use them: int64, ascending, pads harmless. Raises InputError."""
        given = {}
        for point, choice in (choices or {}).items():
            kinds = {f"layers.{n}.ffn.experts": n for n in self.layers}
            kinds |= {f"layers.{n}.attn.selected": n for n in self.layers if self.config.kind(n) == "csa"}
            if point not in kinds:
                raise InputError(f"choices: {point!r} is not a choice of this model; choices are attn.selected and ffn.experts of its layers")
            integers = isinstance(choice, Tensor) and not choice.is_floating_point() and choice.dtype != torch.bool
            if not integers or choice.dim() != 3 or choice.shape[:2] != valid.shape:
                got = f"{choice.dtype} {list(choice.shape)}" if isinstance(choice, Tensor) else type(choice).__name__
                raise InputError(f"choices: {point}: expected integers {[*valid.shape, 'k']}, got {got}")
            choice = choice.to("cpu", torch.int64)
            if point.endswith("experts"):
                k, limit = self.config.num_experts_per_tok, torch.tensor(self.config.n_routed_experts)
                if choice.shape[2] != k:
                    raise InputError(f"choices: {point}: {choice.shape[2]} experts per token, expected {k}")
                choice = torch.where(valid[..., None], choice, torch.arange(k)).sort(-1).values
            else:
                position = state.layers[kinds[point]].length[:, None] + torch.arange(valid.shape[1])
                limit = ops.complete_entries(position, 4)[..., None]
                choice = choice.masked_fill(~valid[..., None], -1)
                choice = torch.where(choice == -1, NONE, choice).sort(-1).values
            twice = torch.zeros_like(choice, dtype=torch.bool)
            if not (point.endswith("experts") and self.config.is_hash(kinds[point])):  # a table may name an expert twice
                twice[..., 1:] = choice[..., 1:] == choice[..., :-1]
            wrong = (choice != NONE) & (twice | (choice < 0) | (choice >= limit))
            choice = choice.masked_fill(choice == NONE, -1)
            if bool(wrong.any()):
                b, s, i = wrong.nonzero()[0].tolist()
                here = int(limit.expand(choice.shape)[b, s, i])
                raise InputError(f"choices: {point}[{b}, {s}]: {int(choice[b, s, i])} is out of 0 .. {here - 1} or given twice")
            given[point] = choice
        return given


def memory_estimate(checkpoint: Checkpoint) -> tuple[int, int]:
    """(weights, working): bytes that stay after loading, and the most that decoding adds while a call runs."""
    elements = {
        name: spec.nbytes * {E4M3: 1, FP4: 2, "BF16": 0.5}.get(spec.dtype, 0)
        for name, spec in checkpoint.specs.items()
        if name.endswith("weight") and len(spec.shape) == 2 and name != "embed.weight"
    }
    kept = min(DECODED_BYTES, int(4 * sum(elements.values())))
    # Decoding holds codes, scales and the result at once, each four bytes an element; BF16 needs the result alone.
    working = max(4 * n * (1 if checkpoint.specs[name].dtype == "BF16" else 3) for name, n in elements.items())
    return checkpoint.packed_bytes() + kept, int(working)


def load(
    checkpoint_dir: str | Path,
    policy: str | Iterable[str] = "exact",
    layers: range | Sequence[int] | None = None,
    max_context: int | None = None,
    sum_order: int = 0,
) -> Transformer:
    """Open a checkpoint and load `embed`, a prefix of layers (None: all), `hc_head`, `norm` and `head`.

    policy       "exact", "storage", "published", or a set of rounding points (reference/formats.py)
    max_context  tokens a row can take; None is 8192, or what the model allows when that is less
    sum_order    0 plain; 1..3 the twins of the same policy whose sums run in another order (reference/ops.py)

    Prints the memory estimate to stderr before it loads. Raises InputError.
    """
    rounding, sums = Policy.parse(policy), Sums(sum_order)
    checkpoint = Checkpoint(checkpoint_dir, layers)
    positions = checkpoint.config.max_position_embeddings
    if max_context is None:
        max_context = min(DEFAULT_MAX_CONTEXT, positions)
    if isinstance(max_context, bool) or not isinstance(max_context, int) or not 1 <= max_context <= positions:
        raise InputError(f"max_context={max_context!r}: expected 1 .. {positions} (max_position_embeddings); see --max-context")
    weights, working = memory_estimate(checkpoint)
    print(
        f"reference: {len(checkpoint.layers)} layers of {checkpoint.directory}: about {weights / 2**30:.2f} GiB of weights, "
        f"{working / 2**30:.2f} GiB more while decoding them, activations and state apart",
        file=sys.stderr,
    )
    return Transformer(checkpoint, rounding, sums, max_context)
