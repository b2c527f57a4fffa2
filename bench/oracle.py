"""Plain FP64 attention and index scores over a state's own cache, in torch on its device: witnesses at lengths that the
reference cannot reach.

    seen = Seen(model, layers, columns=[0, 17])
    with model.taps.observe(seen.points, seen.take): model.prefill(...)
    seen.attention_error(state, layer, start), seen.recall(state, layer, start)

Queries are those that the model showed; keys are read from its packed cache, which later tokens only append to. Taps are
positions of one chunk. Tests: parity/unit/test_bench.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from probes.core.recall import Recall, recall
from production.cache import KVCache
from production.model import Transformer

KEYS_AT_ONCE = 8192
SCORE_NOISE = 2.0**-20  # of sum_h |w_h| |q_h| |key|: FP32 sums of 128 products and 64 heads, in any order


class Seen:
    """What attention of some queries read and made, layer by layer.

    points    to observe
    columns   of the chunk: which queries are kept
    """

    def __init__(self, model: Transformer, layers: Sequence[int], columns: Sequence[int], visible: bool = False) -> None:
        self.config, self.columns = model.config, list(columns)
        self.values: dict[str, Tensor] = {}
        self.points: list[str] = []
        for layer in layers:
            names = ["q", "core", *(["visible"] if visible else [])]
            if model.config.ratio(layer) == 4:
                names += ["indexer.q", "indexer.weights", "selected"]
            self.points += [f"layers.{layer}.attn.{name}" for name in names]

    def take(self, point: str, value: Tensor) -> None:
        """An observer: keeps the columns of row 0."""
        self.values[point] = value[0, self.columns].clone()

    def get(self, layer: int, name: str) -> Tensor:
        """[queries, ...]. KeyError when the point was not shown."""
        return self.values[f"layers.{layer}.attn.{name}"]

    def visible_counts(self, layer: int) -> list[tuple[int, int]]:
        """Keys that each query read: (of the window, compressed)."""
        seen, window = self.get(layer, "visible") >= 0, self.config.sliding_window
        return [(int(row[:window].sum()), int(row[window:].sum())) for row in seen]

    def due_counts(self, layer: int, start: int) -> list[tuple[int, int]]:
        """Keys that each query must read, by rule; start: position of column 0."""
        c, ratio = self.config, self.config.ratio(layer)
        found = []
        for column in self.columns:
            complete = (start + column + 1) // ratio if ratio else 0
            found.append((min(start + column + 1, c.sliding_window), min(complete, c.index_topk) if ratio == 4 else complete))
        return found

    def attention_error(self, cache: KVCache, sink: Tensor, layer: int, start: int) -> float:
        """Worst |core - plain| / |plain| of any query and head, plain rounded to bf16 as core is; NaN where a key was not stored."""
        c, q, core = self.config, self.get(layer, "q").double(), self.get(layer, "core").double()
        worst = 0.0
        for at, column in enumerate(self.columns):
            position, device = start + column, q.device
            window = torch.arange(max(0, position + 1 - c.sliding_window), position + 1, device=device)
            keys = [cache.read_window(layer, window[None])[0]]
            if c.ratio(layer) == 4:
                chosen = self.get(layer, "selected")[at]
                keys.append(cache.read_entries(layer, chosen[chosen >= 0][None])[0])
            elif c.ratio(layer):
                keys.append(cache.read_entries(layer, torch.arange((position + 1) // c.ratio(layer), device=device)[None])[0])
            k = torch.cat(keys).double()
            logits = q[at] @ k.T * c.head_dim**-0.5  # [h, keys]
            weights = torch.cat((logits, sink.double()[:, None]), 1).softmax(1)[:, :-1]
            plain = (weights @ k).bfloat16().double()
            error = ((core[at] - plain).norm(dim=-1) / plain.norm(dim=-1)).max()
            worst = max(worst, float(error)) if not bool(error.isnan()) else float("nan")
            if worst != worst:
                break
        return worst

    def recall(self, cache: KVCache, layer: int, start: int) -> Recall:
        """The selection against the best of FP64 scores of the same stored keys; entries within the noise of FP32 sums are near-ties."""
        q, weights, selected = (self.get(layer, name) for name in ("indexer.q", "indexer.weights", "selected"))
        complete = torch.tensor([(start + column + 1) // 4 for column in self.columns], device=q.device)
        entries, wide = int(complete.max()), weights.double()
        size = (wide.abs() * q.double().norm(dim=-1)).sum(1)  # [T]
        scores, noise = [], []
        for first in range(0, entries, KEYS_AT_ONCE):
            numbers = torch.arange(first, min(entries, first + KEYS_AT_ONCE), device=q.device)
            keys = cache.read_index_keys(layer, numbers[None])[0].double()
            scores.append(torch.einsum("th,the->te", wide, (q.double() @ keys.T).relu()).masked_fill(numbers >= complete[:, None], -torch.inf))
            noise.append(SCORE_NOISE * size[:, None] * keys.norm(dim=-1))
        return recall(selected, torch.cat(scores, 1).cpu(), selected.shape[1], torch.cat(noise, 1).cpu())
