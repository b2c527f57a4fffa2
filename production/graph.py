"""Decode captured in a graph once and replayed at any length: on a GPU one launch a step, on the CPU device the same audit.

    graph = model.capture(state, points=("layers.0.attn.q", "logits"))
    graph.decode(tokens)                                  # same checks, same bits as model.decode(tokens, state)

A capture freezes pointers and numbers, so whatever depends on the length is read on the device. While it is captured, host
code sees a state of `at` tokens (0): a length or a size that it froze is wrong at every other length, and shows. The launches
of the warm-up before it carry no token (count 0), so neither changes the state.

Taps of a captured step copy into buffers that were allocated before. A graph with taps is an audit: its buffers and logits are
poisoned before every replay, and after it a point is shown to the model's observers only where no poison is left. One that did
not fire is therefore not shown. A graph without taps allocates and poisons nothing.

With `model.decoding = "replay"` every decode step and every `run_layer(decode=True)` goes through graphs that are captured
when they are first needed and kept in the state. Tests: parity/unit/test_graph.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from production.door import Choices
from production.launch import KernelError
from reference.config import InputError
from reference.points import Taps

if TYPE_CHECKING:
    from production.model import State, Transformer

EAGER, REPLAY = "eager", "replay"
DECODING = (EAGER, REPLAY)

# Bits that no kernel writes: quiet NaNs with a payload, and an index beyond every list.
_POISON = {torch.float32: (torch.int32, 0x7FE5A5A5), torch.bfloat16: (torch.int16, 0x7FE5), torch.int32: (torch.int32, 0x7FA5A5A5)}


def poison(tensor: Tensor) -> None:
    """Fill with what no kernel writes."""
    bits, value = _POISON[tensor.dtype]
    tensor.view(bits).fill_(value)


def poisoned(tensor: Tensor) -> bool:
    """True when poison is left anywhere."""
    bits, value = _POISON[tensor.dtype]
    return bool((tensor.view(bits) == value).any())


class DecodeGraph:
    """One decode step of a state, of all layers or of one, captured. Made by `Transformer.capture`.

    points, choices   taps that it holds; names of choices that it takes from outside
    graph             of the device: launches, host steps, replays
    captured_at       tokens that host code saw during the capture; replayed_at  least and most of the rows so far, None before
    elsewhere         replays at which no row had as many tokens as at the capture
    """

    def __init__(
        self, model: Transformer, state: State, points: Sequence[str] = (), choices: Sequence[str] = (), layer: int | None = None, at: int = 0
    ) -> None:
        self.model, self.state, self.layer = model, state, layer
        self.points, self.choices = tuple(points), tuple(choices)
        self.captured_at, self.elsewhere = at, 0
        self.replayed_at: tuple[int, int] | None = None
        where = model.device.torch_device
        self.layers = range(len(model.layers)) if layer is None else range(layer, layer + 1)
        self.call = state.workspace.at(1)
        self.given = {name: self._static(name) for name in self.choices}
        self.logits = torch.empty(state.batch, model.config.vocab_size if layer is None else 0, dtype=torch.float32, device=where)
        self.slots: dict[str, Tensor] = {}
        self.taps = Taps(model.taps.points)  # its own: the model's observers see the buffers, after a replay
        count = state.ones if layer is None else state.count[layer]
        with _seen_at(state, at):
            with self.taps.observe(self.points, self._size):
                count.zero_()
                self._enqueue(count)
            count.fill_(1)
            self._kept = ExitStack()
            self._kept.enter_context(self.taps.observe(self.points, self._keep))
            with model.device.capture() as self.graph:
                self._enqueue(count)

    def decode(self, tokens: Tensor, choices: Choices | None = None, out: Tensor | None = None) -> Tensor:
        """As `Transformer.decode`: tokens [b] int64 -> logits [b, vocab] f32. An error leaves the state untouched."""
        if self.layer is not None:
            raise InputError(f"this graph holds layer {self.layer} alone: run_layer")
        return self.replay(*self.model.checked_step(tokens, self.state, choices, out))

    def run_layer(self, X: Tensor, tokens: Tensor, lengths: Tensor | Sequence[int] | None = None, choices: Choices | None = None) -> Tensor:
        """As `Transformer.run_layer` with decode=True: X [b, 1, n, D] -> [b, 1, n, D] f32."""
        if self.layer is None:
            raise InputError("this graph holds all layers: decode")
        return self.replay_layer(X, tokens, *self.model.checked_layer(self.layer, X, tokens, self.state, lengths, choices, True))

    def facts(self) -> dict[str, Any]:
        """For reports."""
        return {
            "of": "decode" if self.layer is None else f"layer {self.layer}", "batch": self.state.batch, "captured_at": self.captured_at,
            "replayed_at": self.replayed_at, "replays": self.graph.replays, "elsewhere": self.elsewhere, "launches": self.graph.launches,
            "host_steps": self.graph.host_steps, "taps": len(self.points), "given_choices": len(self.choices),
        }  # fmt: skip

    # ---- after the door ----

    def replay(self, columns: Tensor, counts: list[int], given: Choices, out: Tensor) -> Tensor:
        """One step, once its input is in order. columns [b, 1]."""
        self.call.flat.tokens.copy_(columns[:, 0])
        self._replay(counts, given)
        out.copy_(self.logits)
        return out

    def replay_layer(self, X: Tensor, tokens: Tensor, counts: list[int], given: Choices) -> Tensor:
        """One step of one layer, once its input is in order."""
        streams = self.call.flat.X.view(self.state.batch, 1, *X.shape[2:])
        self.call.flat.tokens.copy_(tokens[:, 0])
        streams.copy_(X)
        self.state.count[self.layers.start].copy_(torch.tensor(counts, dtype=torch.int32))
        with self.state.backup.kept_on_error(self.layers):
            self._replay(counts, given)
        return streams.float()

    def _replay(self, counts: list[int], given: Choices) -> None:
        self._take(given)
        if self.slots:
            poison(self.logits)
            for slot in self.slots.values():
                poison(slot)
        lengths = self.state.cache.mirror[self.layers.start]
        self.graph.replay()
        least, most = self.replayed_at or (lengths[0], lengths[0])
        self.replayed_at = min(least, *lengths), max(most, *lengths)
        self.elsewhere += self.captured_at not in lengths
        self._show(counts)
        self.state.cache.advanced(self.layers, counts)

    def _show(self, counts: list[int]) -> None:
        """Hand the buffers that were filled to the model's observers."""
        for point, slot in self.slots.items():
            if self.model.taps.wants(point) and not poisoned(slot):
                if point.endswith("attn.indexer.score"):  # of the captured capacity, as many columns as there are entries
                    slot = slot[..., : self.state.cache.entry_count(int(point.split(".")[1]), counts)]
                self.model.taps.emit(point, slot)

    # ---- capture ----

    def _enqueue(self, count: Tensor) -> None:
        if self.layer is None:
            self.model.enqueue(self.state, self.call, count, None, self.given, True, self.logits[:, None], self.taps)
        else:
            self.model.enqueue_layer(self.layer, self.state, self.call, count, None, self.given, True, self.taps)

    def _size(self, point: str, value: Tensor) -> None:
        self.slots[point] = torch.empty(value.shape, dtype=value.dtype, device=value.device)

    def _keep(self, point: str, value: Tensor) -> None:
        slot = self.slots[point]
        if slot.shape != value.shape:
            raise KernelError(f"tap {point}: {list(value.shape)} in the capture, {list(slot.shape)} in the step before it")
        slot.copy_(value)

    def _static(self, name: str) -> Tensor:
        flat = self.call.flat
        return torch.full_like(flat.experts if name.endswith("ffn.experts") else flat.selected, -1)

    def _take(self, given: Choices) -> None:
        """Choices [b, 1, k] i32, ascending with -1 last, into their buffers."""
        if set(given) != set(self.choices):
            odd = sorted(set(given) ^ set(self.choices))
            raise InputError(f"choices: {odd[0]!r} is given or captured, not both; the graph takes {len(self.choices)} choices")
        for name, static in self.given.items():
            value, width = given[name][:, 0], static.shape[1]
            if value.shape[1] > width and bool((value[:, width:] >= 0).any()):
                raise InputError(f"choices: {name}: more than the {width} entries that a captured step has room for")
            static.fill_(-1)
            static[:, : value.shape[1]].copy_(value[:, :width])


@contextmanager
def _seen_at(state: State, length: int) -> Iterator[None]:
    """Inside, every layer of the state says that it holds `length` tokens a row."""
    cache = state.cache
    mirror, lengths = cache.mirror, cache.lengths.clone()
    cache.mirror = [[length] * state.batch for _ in mirror]
    cache.lengths.fill_(length)
    try:
        yield
    finally:
        cache.mirror = mirror
        cache.lengths.copy_(lengths)
        state.ones.fill_(1)
