"""One model against itself: the same text run in every way that must not matter.

    runs = SelfParity(model, text); runs.way("chunked").differences

The anchor is one prefill of the whole text with every tap recorded. Ways whose kernels are the same must give the same bits:
`WAYS` lists them by phase. Decode runs other kernels, sums in another order and is only near: `decoded`, `decoded_alone` and
`stored` hand its rows over beside prefill's for somebody else to judge. A model is passed in; any with the interface
of reference.model will do. Nothing here has an opinion. Tests: parity/unit/test_selfparity.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from probes.core.drive import decoding
from probes.core.queries import (
    Difference,
    Log,
    Rows,
    Snapshots,
    Stored,
    as_stored,
    differences,
    parts_of,
    row_of,
    stack,
    state_differences,
    stored_parts,
    together,
)
from probes.core.wording import plural
from reference.config import InputError, ModelConfig
from reference.points import points_of_model

TEXT = 264  # tokens of the whole run: past the second window, the second group of 128, and a few further groups of 4
SPLITS = (3, 4, 5, 127, 128, 129, 255, 256, 257)  # one before, at and one after the first groups of 4 and 128 and the window
# The chunked run stops at each split and where a continuation or a decode run starts or ends: its state is read there.
STOPS = tuple(sorted({*SPLITS, 8, 9, 60, 68, 124, 132, 252, 260}))
SMALL_CHUNK = 61  # tokens that every other run puts through the layers at once: a ring smaller than the text, so it wraps
# (start, tokens) of one further call of 1 to 5 tokens. 127 + 5 ends two groups of 4 and one of 128.
CONTINUED = (
    (3, 2), (3, 5), (4, 4), (5, 3), (124, 3), (124, 4), (124, 5), (127, 1), (127, 2), (127, 5), (128, 4), (129, 3),
    (252, 3), (252, 4), (252, 5), (255, 2), (255, 5), (256, 4), (257, 3),
)  # fmt: skip
# Starts of the rows of batches whose steps are replayed from a graph: across ends of groups of 4 and 128, none and one token before.
REPLAYED = {1: (252,), 3: (3, 124, 252), 8: (0, 3, 8, 60, 124, 127, 132, 252)}
REPLAYED_STEPS = 5
CONTINUED_ALONE = ((3, 5), (127, 5), (255, 5))  # these also without any other row
DECODED, STEPS = (0, 60, 124, 252), 8  # starts of the rows of one decode batch; from 60 a group of 128 stays open
# (first token, tokens) of rows prefilled together; the second is another text than the rest, one is empty.
RAGGED = ((0, 9), (40, 14), (0, 5), (0, 0), (0, 4), (0, 3))
PERMUTED = (4, 1, 0, 3, 5, 2)


# ---- a way ----


@dataclass(frozen=True)
class Way:
    """One way to run the text, compared with another.

    phase, name, said   said is one line for people
    queries             compared; states  rows of states compared
    differences         per point and part of the state, in dataflow order
    skipped             what did not fit into the context, e.g. "split at 256"
    seconds             of the two runs, where their cost was the question: {"with taps": ..., "without": ...}
    graph               facts of the captured graph, where there was one
    """

    phase: str
    name: str
    said: str
    queries: int
    states: int
    differences: list[Difference]
    skipped: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    graph: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Difference | None:
        """The first difference in dataflow order."""
        return next((d for d in self.differences if d.different or d.missing), None)


WAYS = {
    "prefill": ("repeated", "observed", "chunked", "continued", "batched", "reused"),
    "decode": ("repeated", "observed", "batched", "reused"),
}
SAID = {
    ("prefill", "repeated"): "the same ragged batch twice",
    ("prefill", "observed"): "one shot, every tap recorded = one shot without taps",
    ("prefill", "chunked"): "one shot = one call per stretch between all splits, small chunks, small ring",
    ("prefill", "continued"): "one shot = one further call of 1 to 5 tokens across group and window borders",
    ("prefill", "batched"): "row alone = row in a ragged batch, in two row orders",
    ("prefill", "reused"): "fresh memory = memory that another text has used",
    ("decode", "repeated"): "the same steps twice",
    ("decode", "observed"): "steps with every tap recorded = steps without taps",
    ("decode", "batched"): "row alone = row in a batch at other positions, in another row order",
    ("decode", "reused"): "fresh memory = memory that another text has used",
}  # fmt: skip


class SelfParity:
    """Runs of one text through one model, each made when it is first asked for.

    text         [T] token ids; TEXT of them make every way possible, fewer leave out what does not fit
    max_context  of the states; None: the one that the model was loaded with
    steps        decoded from each of DECODED's starts
    """

    def __init__(self, model: Any, text: Tensor, max_context: int | None = None, steps: int = STEPS) -> None:
        if text.dim() != 1 or len(text) < 2:
            raise InputError(f"self-parity needs at least 2 tokens of text, got {list(text.shape)}")
        self.model, self.text, self.T = model, text.long(), len(text)
        self.config: ModelConfig = model.config
        self.layers: tuple[int, ...] = tuple(model.layers)
        self.points = points_of_model(self.config, self.layers)
        self.max_context, self.steps = max_context, steps
        self.whole_log = Log(self.points)
        self.stops = [n for n in STOPS if n < self.T]
        self._ways: dict[tuple[str, str], Way] = {}

    # ---- calls ----

    def _state(self, batch: int, snapshots: Snapshots | None = None, chunk: int | None = SMALL_CHUNK) -> Any:
        with _chunk_of(self.model, chunk):
            state = self.model.new_state(batch, self.max_context)
        self._load(state, snapshots)
        return state

    def _load(self, state: Any, snapshots: Snapshots | None) -> None:
        for layer, snapshot in (snapshots or {}).items():
            state.import_layer(layer, snapshot)

    def _export(self, state: Any) -> Snapshots:
        return {layer: {part: value.clone() for part, value in state.export_layer(layer).items()} for layer in self.layers}

    def _prefill(self, state: Any, start: Sequence[int], count: Sequence[int], log: Log | None, first: Sequence[int] | None = None) -> Tensor:
        """count[b] tokens of the text from first[b] (None: start[b], where the row stands) -> logits [b, s, vocab]."""
        b, s = len(start), max(*count, 1)
        tokens = torch.zeros(b, s, dtype=torch.int64)
        for row, (begin, n) in enumerate(zip(start if first is None else first, count, strict=True)):
            tokens[row, :n] = self.text[begin : begin + n]
        column = torch.arange(s)
        position, valid = torch.tensor(start)[:, None] + column, column < torch.tensor(count)[:, None]
        lengths = torch.tensor(count)
        if log is None:
            logits = self.model.prefill(tokens, state, lengths)
        else:
            with log.call(self.model, position, valid):
                logits = self.model.prefill(tokens, state, lengths)
        shown: Tensor = logits.detach().float().cpu()
        return shown

    def _decode(self, state: Any, start: Sequence[int], steps: int, log: Log | None, replay: bool = False) -> Tensor:
        """`steps` steps from positions start[b] -> logits [b, steps, vocab]. replay: the whole run's choices are used."""
        logits = []
        for step in range(steps):
            position = torch.tensor(start) + step
            call = partial(self.model.decode, self.text[position], state, choices=self._choices(position, self.layers) if replay else None)
            if log is None:
                logits.append(call().detach().float().cpu())
                continue
            with log.call(self.model, position[:, None], torch.ones(len(start), 1, dtype=torch.bool)):
                logits.append(call().detach().float().cpu())
        return torch.stack(logits, 1)

    def _choices(self, position: Tensor, layers: Sequence[int]) -> dict[str, Tensor]:
        """The whole run's entries and experts at these positions, [b, 1, k]; one that no model could use is left out."""
        given = {}
        for point in [p for layer in layers for p in self.points if p.startswith(f"layers.{layer}.")]:
            entries = point.endswith("attn.selected")
            if not entries and not point.endswith("ffn.experts"):
                continue
            chosen = self.whole.values[point][0, position].sort(-1).values
            limit = (position[:, None] + 1) // 4 if entries else torch.tensor(self.config.n_routed_experts)
            twice = (chosen[:, 1:] == chosen[:, :-1]) & (chosen[:, 1:] >= 0)
            if not bool(((chosen >= limit) | (chosen < (-1 if entries else 0))).any() | twice.any()):
                given[point] = chosen[:, None]
        return given

    # ---- the runs ----

    @cached_property
    def _anchor(self) -> tuple[Rows, Snapshots, float]:
        state = self._state(1, chunk=None)
        began = time.perf_counter()
        self._prefill(state, [0], [self.T], self.whole_log)
        spent = time.perf_counter() - began
        return self.whole_log.rows(), self._export(state), spent

    @property
    def whole(self) -> Rows:
        """The anchor: one prefill of the whole text, every tap recorded."""
        return self._anchor[0]

    @property
    def whole_state(self) -> Snapshots:
        """The state after it."""
        return self._anchor[1]

    @cached_property
    def chunks(self) -> tuple[Rows, dict[int, Snapshots]]:
        """The text in one call per stretch between two stops, on a state with a small ring; and the state at each stop."""
        log, state = Log(self.points), self._state(1)
        at = {0: self._export(state)}
        for begin, end in zip([0, *self.stops], [*self.stops, self.T], strict=True):
            self._prefill(state, [begin], [end - begin], log)
            at[end] = self._export(state)
        return log.rows(), at

    def _fitting(self, wanted: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(start, n) for start, n in wanted if start + n <= self.T]

    def way(self, phase: str, name: str) -> Way:
        """One of WAYS, run once."""
        if (phase, name) not in self._ways:
            run: Callable[[], Way] = getattr(self, f"_{phase}_{name}")
            self._ways[phase, name] = run()
        return self._ways[phase, name]

    def _made(self, phase: str, name: str, got: Rows, want: Rows, states: Sequence[tuple[Snapshots, Snapshots]] = (), **more: Any) -> Way:
        found = differences(got, want, self.points, self.config)
        rows = 0
        for have, due in states:
            parts = state_differences(have, due)
            found += parts
            rows += sum(d.rows for d in parts)
        found.sort(key=lambda d: self._order(d.what))
        return Way(phase, name, SAID[phase, name], len(want.position), rows, found, **more)

    def _order(self, what: str) -> tuple[int, int]:
        """Place in dataflow: a part of the state comes after the point that fills it."""
        if ".state." not in what:
            return self.points.index(what), 0
        layer, part = what.split(".")[1], what.split(".state.")[1]
        point = "attn.kv" if part in ("kv", "length") else "attn.indexer.compressor" if part.startswith("indexer") else "attn.compressor"
        return self.points.index(f"layers.{layer}.{point}"), 1

    def _missing(self, wanted: Sequence[tuple[int, int]], what: str) -> list[str]:
        return [f"{what} {start} + {n}" for start, n in wanted if start + n > self.T]

    # ---- ways of prefill ----

    def _prefill_observed(self) -> Way:
        whole, state = self.whole, self._state(1, chunk=None)
        began = time.perf_counter()
        logits = self._prefill(state, [0], [self.T], None)
        seconds = {"with taps": self._anchor[2], "without taps": time.perf_counter() - began}
        bare = Rows({"logits": logits}, whole.position, whole.row)
        only = Rows({"logits": whole.values["logits"]}, whole.position, whole.row)
        return self._made("prefill", "observed", bare, only, [(self._export(state), self.whole_state)], seconds=seconds)

    def _prefill_chunked(self) -> Way:
        rows, at = self.chunks
        states = [(at[self.T], self.whole_state)]
        states += [(parts_of(at[n], due), due) for n in self.stops for due in [as_stored(self.whole, n, self.config, self.layers)]]
        return self._made("prefill", "chunked", rows, self.whole, states, skipped=[f"split at {n}" for n in SPLITS if n >= self.T])

    def split(self, at: int) -> Way:
        """One shot = the tokens before `at` in one call and all the rest in another."""
        if not 0 < at < self.T:
            raise InputError(f"split at {at}: the text has {self.T} tokens")
        log, state = Log(self.points), self._state(1, chunk=None)
        self._prefill(state, [0], [at], log)
        self._prefill(state, [at], [self.T - at], log)
        found = differences(log.rows(), self.whole, self.points, self.config)
        parts = state_differences(self._export(state), self.whole_state)
        found = sorted([*found, *parts], key=lambda d: self._order(d.what))
        return Way("prefill", f"split at {at}", f"one shot = {at} tokens, then the other {self.T - at}", self.T, sum(d.rows for d in parts), found)

    def _prefill_continued(self) -> Way:
        _, at = self.chunks
        pairs = [(m, n) for m, n in self._fitting(CONTINUED) if m in at and m + n in at]
        runs = [pairs] + [[pair] for pair in self._fitting(CONTINUED_ALONE)]
        rows, states = [], []
        for one in [run for run in runs if run]:
            log, state = Log(self.points), self._state(len(one), stack([at[m] for m, _ in one]))
            self._prefill(state, [m for m, _ in one], [n for _, n in one], log)
            rows.append(log.rows())
            states.append((self._export(state), stack([at[m + n] for m, n in one])))
        if not rows:  # a text of one or two groups: continue after the first token
            log, state = Log(self.points), self._state(1)
            self._prefill(state, [0], [1], None)
            self._prefill(state, [1], [self.T - 1], log)
            rows.append(log.rows())
            states.append((self._export(state), self.whole_state))
        got = together(rows)
        return self._made("prefill", "continued", got, self._whole_at(got), states, skipped=self._missing(CONTINUED, "call at"))

    def _whole_at(self, got: Rows) -> Rows:
        """The anchor's rows at the positions of `got`."""
        want = self.whole.at(got.position)
        return Rows(want.values, got.position, got.row)

    def _ragged(self, order: Sequence[int]) -> tuple[dict[int, Rows], dict[int, Snapshots]]:
        """Rows of RAGGED (those that fit) prefilled together in this order; what each showed, and its state."""
        log, state = Log(self.points), self._state(len(order))
        spans = [RAGGED[i] for i in order]
        self._prefill(state, [0] * len(spans), [n for _, n in spans], log, first=[begin for begin, _ in spans])
        rows, snapshots = log.rows(), self._export(state)
        return {i: rows.of_row(b) for b, i in enumerate(order)}, {i: row_of(snapshots, b) for b, i in enumerate(order)}

    @cached_property
    def _ragged_rows(self) -> list[int]:
        return [i for i, (begin, n) in enumerate(RAGGED) if begin + n <= self.T]

    @cached_property
    def _ragged_once(self) -> tuple[dict[int, Rows], dict[int, Snapshots]]:
        return self._ragged(self._ragged_rows)

    def _prefill_repeated(self) -> Way:
        (rows, states), (again, states_again) = self._ragged_once, self._ragged(self._ragged_rows)
        order = self._ragged_rows
        pair = (stack([states_again[i] for i in order]), stack([states[i] for i in order]))
        return self._made("prefill", "repeated", together([again[i] for i in order]), together([rows[i] for i in order]), [pair])

    def _prefill_batched(self) -> Way:
        at = {**self.chunks[1]}
        want: dict[int, Rows] = {}
        due: dict[int, Snapshots] = {}
        for i in self._ragged_rows:
            begin, n = RAGGED[i]
            if begin == 0 and n in at:
                want[i], due[i] = self.whole.at(torch.arange(n)), at[n]
            elif n:
                log, state = Log(self.points), self._state(1)
                self._prefill(state, [0], [n], log, first=[begin])
                want[i], due[i] = log.rows(), self._export(state)
        got, wanted, states = [], [], []
        permuted = self._ragged([i for i in PERMUTED if i in self._ragged_rows])
        for rows, snapshots in (self._ragged_once, permuted):
            got += [rows[i] for i in want]
            wanted += [want[i] for i in want]
            states += [(snapshots[i], due[i]) for i in want]
        return self._made("prefill", "batched", together(got), together(wanted), states)

    def _used(self, batch: int) -> Any:
        """A state whose buffers and caches another text has filled."""
        state = self._state(batch)
        n = min(36, self.T)
        self._prefill(state, [0] * batch, [n] * batch, None, first=[self.T - n] * batch)
        self._decode_anything(state, batch)
        return state

    def _decode_anything(self, state: Any, batch: int) -> None:
        self.model.decode(self.text[-1:].expand(batch).clone(), state)

    def _prefill_reused(self) -> Way:
        _, at = self.chunks
        rows, states, skipped, state = [], [], [], self._used(1)
        for start, n in ((0, 5), (3, 5), (124, 5)):
            if start not in at or start + n not in at:
                skipped.append(f"call at {start} + {n}")
                continue
            log = Log(self.points)
            self._load(state, at[start])
            self._prefill(state, [start], [n], log)
            rows.append(log.rows())
            states.append((self._export(state), at[start + n]))
        if not rows:
            log = Log(self.points)
            self._load(state, at[0])
            self._prefill(state, [0], [self.T], log)
            rows, states = [log.rows()], [(self._export(state), self.whole_state)]
        got = together(rows)
        return self._made("prefill", "reused", got, self._whole_at(got), states, skipped=skipped)

    # ---- ways of decode ----

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(start, steps) of the decode runs that fit; a short text is decoded from its first token to its last."""
        return self._fitting([(start, self.steps) for start in DECODED]) or [(0, self.T)]

    def _alone(self, log: bool) -> tuple[list[Rows], list[Tensor], list[Snapshots], float]:
        """Each span by itself, on the model's own choices: rows (with a log), logits, state at the end, seconds."""
        _, at = self.chunks
        rows, logits, states, spent = [], [], [], 0.0
        for start, steps in self.spans:
            kept, state = Log(self.points), self._state(1, at[start])
            began = time.perf_counter()
            logits.append(self._decode(state, [start], steps, kept if log else None))
            spent += time.perf_counter() - began
            states.append(self._export(state))
            if log:
                rows.append(kept.rows())
        return rows, logits, states, spent

    @cached_property
    def _alone_observed(self) -> tuple[list[Rows], list[Tensor], list[Snapshots], float]:
        return self._alone(True)

    def _decode_repeated(self) -> Way:
        rows, _, states, _ = self._alone_observed
        span = self.spans[-1]
        log, state = Log(self.points), self._state(1, self.chunks[1][span[0]])
        self._decode(state, [span[0]], span[1], log)
        return self._made("decode", "repeated", log.rows(), rows[-1], [(self._export(state), states[-1])])

    def _decode_observed(self) -> Way:
        rows, _, states, spent = self._alone_observed
        _, logits, bare_states, bare = self._alone(False)
        got = together([Rows({"logits": value}, one.position, one.row) for value, one in zip(logits, rows, strict=True)])
        want = together([Rows({"logits": one.values["logits"]}, one.position, one.row) for one in rows])
        seconds = {"with taps": spent, "without taps": bare}
        return self._made("decode", "observed", got, want, list(zip(bare_states, states, strict=True)), seconds=seconds)

    def _decode_batched(self) -> Way:
        rows, _, states, _ = self._alone_observed
        _, at = self.chunks
        order = list(range(len(self.spans)))[::-1]
        steps = self.spans[0][1]
        log, state = Log(self.points), self._state(len(order), stack([at[self.spans[i][0]] for i in order]))
        self._decode(state, [self.spans[i][0] for i in order], steps, log)
        seen, snapshots = log.rows(), self._export(state)
        got = together([seen.of_row(b) for b in range(len(order))])
        pairs = [(row_of(snapshots, b), states[i]) for b, i in enumerate(order)]
        return self._made("decode", "batched", got, together([rows[i] for i in order]), pairs)

    def replayed(self, batch: int) -> Way:
        """Steps of rows of unequal lengths replayed from one captured graph, beside the same steps launched one by one.

        The batch of 3 is given prefill's choices, which a graph takes from buffers; the others choose for themselves.
        """
        wanted = [(start, REPLAYED_STEPS) for start in REPLAYED[batch]]
        at = self.chunks[1]
        spans = [span for span in self._fitting(wanted) if span[0] in at] or [(0, min(self.T, REPLAYED_STEPS))]
        starts, steps = [start for start, _ in spans], spans[0][1]
        rows, states = {}, {}
        facts: dict[str, Any] = {}
        for how in ("eager", "replay"):
            log, state = Log(self.points), self._state(len(starts), stack([at[start] for start in starts]))
            with decoding(self.model, how):
                self._decode(state, starts, steps, log, replay=batch == 3)  # its choices come from outside
            rows[how], states[how] = log.rows(), self._export(state)
            facts = next((graph.facts() for graph in state.graphs.values()), {})
        said = f"steps of {plural(len(starts), 'row')} replayed from a captured graph = the same steps launched one by one"
        found = differences(rows["replay"], rows["eager"], self.points, self.config)
        parts = state_differences(states["replay"], states["eager"])
        found = sorted([*found, *parts], key=lambda d: self._order(d.what))
        skipped = [f"row at {start}" for start, _ in wanted if start not in starts]
        return Way("decode", f"replayed, batch {batch}", said, len(rows["eager"].position), sum(d.rows for d in parts), found, skipped, graph=facts)

    def _decode_reused(self) -> Way:
        rows, _, states, _ = self._alone_observed
        state, log = self._used(1), Log(self.points)
        start, steps = self.spans[min(1, len(self.spans) - 1)]
        self._load(state, self.chunks[1][start])
        self._decode(state, [start], steps, log)
        number = min(1, len(self.spans) - 1)
        return self._made("decode", "reused", log.rows(), rows[number], [(self._export(state), states[number])])

    # ---- decode beside prefill: near, not equal ----

    @cached_property
    def _decoded(self) -> tuple[Rows, Snapshots]:
        _, at = self.chunks
        steps = self.spans[0][1]
        starts = [start for start, _ in self.spans]
        log, state = Log(self.points), self._state(len(starts), stack([at[start] for start in starts]))
        self._decode(state, starts, steps, log, replay=True)
        return log.rows(), self._export(state)

    def decoded(self) -> tuple[Rows, Rows]:
        """Token by token with prefill's choices replayed, and prefill's rows of the same positions."""
        rows = self._decoded[0]
        return rows, self._whole_at(rows)

    def decoded_alone(self, layer: int) -> tuple[Rows, Rows]:
        """The same of one layer alone, on the streams that prefill handed it: what differs arises in this layer."""
        rows = self._alone_in(layer)[0]
        return rows, self._whole_at(rows)

    def _alone_in(self, layer: int) -> tuple[Rows, Snapshots]:
        kept: dict[int, tuple[Rows, Snapshots]] = self.__dict__.setdefault("_layers_alone", {})
        if layer not in kept:
            kept[layer] = self._decode_layer(layer)
        return kept[layer]

    def _decode_layer(self, layer: int) -> tuple[Rows, Snapshots]:
        _, at = self.chunks
        starts, steps = [start for start, _ in self.spans], self.spans[0][1]
        points = [point for point in self.points if point.startswith(f"layers.{layer}.")]
        log, state = Log(points), self._state(len(starts))
        state.import_layer(layer, stack([at[start] for start in starts])[layer])
        for step in range(steps):
            position = torch.tensor(starts) + step
            if layer == self.layers[0]:
                X = self.whole.values["embed"][0, position][:, None, None].repeat(1, 1, self.config.hc_mult, 1)
            else:
                X = self.whole.values[f"layers.{layer - 1}.hc_ffn.X"][0, position][:, None]
            with log.call(self.model, position[:, None], torch.ones(len(starts), 1, dtype=torch.bool)):
                choices = self._choices(position, (layer,))
                self.model.run_layer(layer, X, self.text[position][:, None], state, None, choices=choices, decode=True)
        return log.rows(), {layer: {part: value.clone() for part, value in state.export_layer(layer).items()}}

    def stored(self, layer: int, alone: bool) -> list[Stored]:
        """The state after the decode steps beside the state after a prefill of as many tokens, rows of it one by one."""
        got = (self._alone_in(layer)[1] if alone else self._decoded[1])[layer]
        steps, at = self.spans[0][1], self.chunks[1]
        ends = [start + steps for start, _ in self.spans]
        want = stack([at[end] if end in at else self._prefilled(end) for end in ends])[layer]
        return stored_parts(got, want, torch.tensor([start for start, _ in self.spans]), self.config, layer)

    def _prefilled(self, length: int) -> Snapshots:
        state = self._state(1)
        self._prefill(state, [0], [length], None)
        return self._export(state)


@contextmanager
def _chunk_of(model: Any, chunk: int | None) -> Iterator[None]:
    """States made inside have room for `chunk` tokens at once, where the model has such a number."""
    kept = getattr(model, "prefill_chunk", None)
    if chunk is None or kept is None:
        yield
        return
    model.prefill_chunk = min(chunk, kept)
    try:
        yield
    finally:
        model.prefill_chunk = kept


def text_of(rows: Sequence[Sequence[int]], most: int = TEXT) -> Tensor:
    """`most` tokens of the given ids; a shorter text goes round."""
    ids = [token for row in rows for token in row]
    if not ids:
        raise InputError("self-parity needs some text")
    return torch.tensor((ids * (most // len(ids) + 1))[:most])


def table_of(ways: Sequence[Way]) -> list[Mapping[str, Any]]:
    """One line a way, for tables."""
    lines: list[Mapping[str, Any]] = []
    for way in ways:
        first = way.first
        worst = max((d.worst for d in way.differences), default=math.nan)
        lines.append(
            {
                "phase": way.phase, "way": way.name, "comparison": way.said, "queries": way.queries, "points": sum(".state." not in d.what for d in way.differences),
                "state_rows": way.states, "bit_equal": first is None and bool(way.differences), "worst_row": worst, "first_difference": None if first is None else first.what,
                "position": None if first is None else first.position, "skipped": "; ".join(way.skipped),
            }
        )  # fmt: skip
    return lines
