"""The vocabulary: every place where a model shows a value, under one name in both models, gates and report.

Axes, and nothing else, are called
    b batch row | s query of this call | p absolute position | h heads | d head_dim | r rotary dims | D hidden size
    n residual streams | e compressed entry | k index_topk | W sliding_window

A model owns one `Taps` and calls `emit(point, value)` as it goes; a recorder attaches to it and is always let go.
Nothing here computes. Tests: parity/unit/test_points.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reference.config import InputError, ModelConfig

if TYPE_CHECKING:  # reports read the order of the points on machines without torch
    from torch import Tensor

# How a value is compared.
VALUES = "values"  # real numbers; the last `row_dims` axes make one row
SCORES = "scores"  # real numbers, -inf where a query may not look
INDICES = "indices"  # a set per query, padded with -1


@dataclass(frozen=True)
class PointSpec:
    """One kind of point.

    name        what follows `layers.N.` (or the whole name for the model's own points)
    shape       legend of the emitted tensor; every point starts with [b, s]
    kind        VALUES, SCORES or INDICES
    row_dims    trailing axes that make one judged row
    component   the part of the stack that computes it, in the words of the fault catalogue
    sparse      True: only the query that completes a group carries a row, the others are NaN
    meaning     one line
    """

    name: str
    shape: str
    kind: str
    row_dims: int
    component: str
    meaning: str
    sparse: bool = False
    layer_kinds: tuple[str, ...] = ("window", "csa", "hca")


def _half(half: str) -> list[PointSpec]:
    at = f"hc_{half}"
    return [
        PointSpec(f"{at}.pre", "[b, s, n] fp32", VALUES, 1, "mHC", "weights that mix the streams into the block's input, in (0, 1 + eps)"),
        PointSpec(f"{at}.post", "[b, s, n] fp32", VALUES, 1, "mHC", "weights of the block's output per stream, in (0, 2)"),
        PointSpec(f"{at}.comb", "[b, s, n, n] fp32", VALUES, 2, "mHC", "stream mixing matrix, first axis is the source, columns sum to 1"),
        PointSpec(f"{at}.a", "[b, s, D]", VALUES, 1, "mHC", "the block's input: sum_i pre[i] X[i]"),
    ]


def _x(half: str) -> PointSpec:
    return PointSpec(f"hc_{half}.X", "[b, s, n, D]", VALUES, 2, "mHC", f"residual streams after the layer's {half} half")


CSA, COMPRESSED = ("csa",), ("csa", "hca")
# In dataflow order: the first divergence is looked for in this order.
LAYER_POINTS: tuple[PointSpec, ...] = (
    *_half("attn"),
    PointSpec("attn.norm", "[b, s, D]", VALUES, 1, "norm", "attn_norm of a"),
    PointSpec("attn.q_norm", "[b, s, q_lora_rank]", VALUES, 1, "attention projections", "latent query qr: q_norm(wq_a x)"),
    PointSpec("attn.q", "[b, s, h, d]", VALUES, 1, "attention projections", "queries after their norm and rotation"),
    PointSpec("attn.kv", "[b, s, d]", VALUES, 1, "KV quant", "window key = value after norm, rotation and storage rounding"),
    PointSpec("attn.compressor", "[b, s, d]", VALUES, 1, "compressor", "compressed entry at the query that completes its group, as stored", True, COMPRESSED),
    PointSpec("attn.indexer.q", "[b, s, index_n_heads, index_head_dim]", VALUES, 1, "indexer", "indexer queries after rotation, Hadamard and rounding", False, CSA),
    PointSpec("attn.indexer.weights", "[b, s, index_n_heads] fp32", VALUES, 1, "indexer", "head weights, both scale factors included", False, CSA),
    PointSpec("attn.indexer.compressor", "[b, s, index_head_dim]", VALUES, 1, "compressor", "indexer key at the query that completes its group, as stored", True, CSA),
    PointSpec("attn.indexer.score", "[b, s, e] fp32, -inf where not visible", SCORES, 1, "indexer", "score of every complete entry", False, CSA),
    PointSpec("attn.selected", "[b, s, k] int, ascending, -1 = none", INDICES, 1, "indexer", "compressed entries the indexer chose", False, CSA),
    PointSpec("attn.visible", "[b, s, W + entries] int, -1 = none", INDICES, 1, "visibility mask", "keys attention really read: the first W columns are token positions, the rest compressed entries"),
    PointSpec("attn.core", "[b, s, h, d]", VALUES, 1, "attention core", "softmax(q k) v with the sink, before the inverse rotation"),
    PointSpec("attn.o", "[b, s, h, d]", VALUES, 1, "rope", "attention output after the inverse rotation"),
    PointSpec("attn.wo_a", "[b, s, o_groups * o_lora_rank]", VALUES, 1, "attention projections", "grouped low-rank output"),
    PointSpec("attn.out", "[b, s, D]", VALUES, 1, "attention projections", "output of the attention half, y"),
    _x("attn"),
    *_half("ffn"),
    PointSpec("ffn.norm", "[b, s, D]", VALUES, 1, "norm", "ffn_norm of a"),
    PointSpec("ffn.gate", "[b, s, n_routed_experts] fp32", VALUES, 1, "MoE router", "unbiased scores of all experts"),
    PointSpec("ffn.experts", "[b, s, num_experts_per_tok] int, ascending", INDICES, 1, "MoE router", "chosen experts"),
    PointSpec("ffn.weights", "[b, s, num_experts_per_tok] fp32", VALUES, 1, "MoE router", "weights of `ffn.experts`, in its order"),
    PointSpec("ffn.routed", "[b, s, D] fp32", VALUES, 1, "experts quant", "sum of the routed experts"),
    PointSpec("ffn.shared_experts", "[b, s, D]", VALUES, 1, "experts quant", "shared expert"),
    PointSpec("ffn.out", "[b, s, D]", VALUES, 1, "experts quant", "output of the ffn half, y"),
    _x("ffn"),
)
MODEL_POINTS: tuple[PointSpec, ...] = (
    PointSpec("embed", "[b, s, D]", VALUES, 1, "checkpoint loading", "embedding row of the token"),
    PointSpec("hc_head", "[b, s, D]", VALUES, 1, "mHC", "streams mixed for the head (pre weights only)"),
    PointSpec("norm", "[b, s, D]", VALUES, 1, "norm", "final norm"),
    PointSpec("logits", "[b, s, vocab] fp32", VALUES, 1, "head", "next-token logits"),
)
_BY_NAME = {spec.name: spec for spec in (*LAYER_POINTS, *MODEL_POINTS)}

# A layer's state, as both models export and import it (`state.export_layer(n)`, `state.import_layer(n, snapshot)`).
# Tensors are fp32 on the CPU, as stored (rounded); rows nobody may read are NaN. ratio m, slots R = 2 m (m = 4) or m.
STATE_LEGEND = {
    "length": "[b] int64, tokens this layer has taken",
    "kv": "[b, W, d], column j is position length - W + j; NaN where that is negative",
    "compressor.entries": "[b, e, d], entries 0 .. length // m - 1, NaN beyond",
    "compressor.kv": "[b, R, c * d'], row p % R of tokens that a later entry still needs",
    "compressor.gate": "[b, R, c * d'], the same rows of gate + ape",
    "indexer.compressor.entries": "[b, e, index_head_dim], after Hadamard and rounding",
    "indexer.compressor.kv": "[b, 8, 2 * index_head_dim]",
    "indexer.compressor.gate": "[b, 8, 2 * index_head_dim]",
}
# The point that each part of the state follows in the dataflow; parts behind one point in this order. What a call leaves of a
# part is called `layers.N.state.PART` and comes after that point of the same call. What a prefill leaves is read by later
# calls only: it comes before everything of decode step 0.
STATE_POINTS = {
    "length": "attn.kv",
    "kv": "attn.kv",
    "compressor.entries": "attn.compressor",
    "compressor.kv": "attn.compressor",
    "compressor.gate": "attn.compressor",
    "indexer.compressor.entries": "attn.indexer.compressor",
    "indexer.compressor.kv": "attn.indexer.compressor",
    "indexer.compressor.gate": "attn.indexer.compressor",
}
# Every row a layer has in tables: its points, the parts of its state each behind the point it follows.
LAYER_ROWS: tuple[str, ...] = tuple(
    name for spec in LAYER_POINTS for name in (spec.name, *(f"state.{part}" for part, after in STATE_POINTS.items() if after == spec.name))
)


def spec_of(point: str) -> PointSpec:
    """The kind of a full point name (`layers.2.attn.q`, `logits`). Raises InputError with the nearest name."""
    parts = point.split(".", 2)
    if parts[0] == "layers" and len(parts) == 3 and parts[1].isdigit():
        spec = _BY_NAME.get(parts[2])
        if spec is not None and spec in LAYER_POINTS:
            return spec
    elif point in _BY_NAME and _BY_NAME[point] in MODEL_POINTS:
        return _BY_NAME[point]
    every = [f"layers.{parts[1]}.{s.name}" if parts[0] == "layers" and len(parts) > 1 else s.name for s in _BY_NAME.values()]
    near = difflib.get_close_matches(point, every, n=1)
    raise InputError(f"unknown point {point!r}" + (f"; nearest is {near[0]!r}" if near else ""))


def layer_of(point: str) -> int | None:
    """The layer number in a point's name, None for the model's own points."""
    return int(point.split(".")[1]) if point.startswith("layers.") else None


def points_of_layer(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Full names of the points a layer has, in dataflow order."""
    kind = config.kind(layer)
    return tuple(f"layers.{layer}.{spec.name}" for spec in LAYER_POINTS if kind in spec.layer_kinds)


def state_parts(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The parts of a layer's state, in the order of STATE_POINTS."""
    points = points_of_layer(config, layer)
    return tuple(part for part, after in STATE_POINTS.items() if f"layers.{layer}.{after}" in points)


def places_of_layer(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """A layer's points and the parts of its state (`layers.N.state.PART`), each behind the point that writes it."""
    points, parts = points_of_layer(config, layer), state_parts(config, layer)
    return tuple(
        place for point in points for place in (point, *(f"layers.{layer}.state.{p}" for p in parts if f"layers.{layer}.{STATE_POINTS[p]}" == point))
    )


def state_order(point: str) -> str | None:
    """The point that `layers.N.state.PART` follows in the dataflow (`layers.N.attn.kv`); None: no part of a state."""
    head, _, part = point.partition(".state.")
    return f"{head}.{STATE_POINTS[part]}" if part in STATE_POINTS else None


def points_of_model(config: ModelConfig, layers: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """Every point of the given layers (None: all) and of the model itself, in dataflow order."""
    names = ["embed"]
    for layer in range(config.num_hidden_layers) if layers is None else layers:
        names += points_of_layer(config, layer)
    return (*names, "hc_head", "norm", "logits")


def places_of_model(config: ModelConfig, layers: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """`points_of_model` with the parts of every layer's state, each behind the point that writes it."""
    names = ["embed"]
    for layer in range(config.num_hidden_layers) if layers is None else layers:
        names += places_of_layer(config, layer)
    return (*names, "hc_head", "norm", "logits")


Observer = Callable[[str, "Tensor"], None]


class Taps:
    """Where a model shows its values. Observers get the live tensor and copy what they keep.

    points   the names this model can emit
    """

    def __init__(self, points: tuple[str, ...]) -> None:
        self.points = points
        self._observers: list[tuple[frozenset[str], Observer]] = []
        self._wanted: frozenset[str] = frozenset()

    def wants(self, point: str) -> bool:
        """True when somebody listens: a model asks before it makes a value only for show."""
        return point in self._wanted

    def emit(self, point: str, value: Tensor) -> None:
        """Show a value. In chunks of a longer prefill the same point is emitted once a chunk, in order of s."""
        if point in self._wanted:
            for points, observer in self._observers:
                if point in points:
                    observer(point, value)

    @contextmanager
    def observe(self, points: tuple[str, ...] | list[str], observer: Observer) -> Iterator[None]:
        """Attach an observer for these points and always detach it. Raises InputError on an unknown point."""
        for point in points:
            if point not in self.points:
                spec_of(point)  # a name that exists nowhere gets its nearest match
                raise InputError(f"point {point!r} is not in this model: it has {len(self.points)} points, layer kinds differ")
        entry = (frozenset(points), observer)
        self._observers.append(entry)
        self._refresh()
        try:
            yield
        finally:
            self._observers = [e for e in self._observers if e is not entry]
            self._refresh()

    @property
    def observers(self) -> int:
        """How many observers are attached: 0 outside of every recording."""
        return len(self._observers)

    def _refresh(self) -> None:
        self._wanted = frozenset().union(*(points for points, _ in self._observers))
