"""Queries and states of several runs side by side: what each showed, and where two of them are not the same bits.

    log = Log(points)
    with log.call(model, position, valid): model.prefill(...)
    differences(log.rows(), other.rows(), points, config)

Runs differ in how they cut and batch a text, so values are kept query by query, with the position each stands at.
Tests: parity/unit/test_selfparity.py.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probes.core.compare import compare_scores, compare_values
from probes.core.trace import copy_of, grow_last, join
from reference.config import ModelConfig
from reference.points import INDICES, SCORES, spec_of

Snapshot = dict[str, Tensor]
Snapshots = dict[int, Snapshot]


# ---- what a run showed ----


@dataclass(frozen=True)
class Rows:
    """Values of N queries. values  point -> [1, N, ...]; position, row [N]: where each query stands."""

    values: dict[str, Tensor]
    position: Tensor
    row: Tensor

    def of_row(self, row: int) -> Rows:
        """The queries of one batch row, in order of position."""
        return self.pick((self.row == row).nonzero()[:, 0])

    def at(self, position: Tensor) -> Rows:
        """The queries at these positions, of a run over one whole text."""
        return self.pick(position)

    def pick(self, index: Tensor) -> Rows:
        return Rows({point: value[:, index] for point, value in self.values.items()}, self.position[index], self.row[index])


def together(parts: Sequence[Rows]) -> Rows:
    """The queries of several runs, one after the other; batch rows are numbered by part."""
    points = [point for point in parts[0].values if all(point in part.values for part in parts)]
    values = {point: join(point, [part.values[point] for part in parts]) for point in points}
    row = torch.cat([torch.full_like(part.row, number) for number, part in enumerate(parts)])
    return Rows(values, torch.cat([part.position for part in parts]), row)


class Log:
    """Copies what taps show over several calls. bytes and seconds by point: what the copies took."""

    def __init__(self, points: Sequence[str]) -> None:
        self.points = tuple(points)
        self.bytes: Counter[str] = Counter()
        self.seconds: dict[str, float] = dict.fromkeys(self.points, 0.0)
        self._calls: list[tuple[Tensor, Tensor, dict[str, list[Tensor]]]] = []

    @contextmanager
    def call(self, model: Any, position: Tensor, valid: Tensor) -> Iterator[None]:
        """Record one call over queries at these positions [b, s]; only valid ones are kept."""
        shown: dict[str, list[Tensor]] = {}

        def take(point: str, value: Tensor) -> None:
            began = time.perf_counter()
            kept = copy_of(point, value)
            shown.setdefault(point, []).append(kept)
            self.seconds[point] += time.perf_counter() - began
            self.bytes[point] += kept.nbytes

        with model.taps.observe(self.points, take):
            yield
        self._calls.append((position, valid, shown))

    def rows(self) -> Rows:
        """Everything shown in every call, query by query."""
        values = {}
        for point in self.points:
            parts = [join(point, shown[point])[valid][None] for _, valid, shown in self._calls if point in shown]
            if len(parts) == len(self._calls) and parts:
                values[point] = join(point, parts)
        position = torch.cat([p[valid] for p, valid, _ in self._calls])
        row = torch.cat([torch.arange(len(p))[:, None].expand(p.shape)[valid] for p, valid, _ in self._calls])
        return Rows(values, position, row)


# ---- differences ----


@dataclass(frozen=True)
class Difference:
    """One point or part of the state, compared bit by bit.

    what       full point name, or `layers.N.state.PART`
    rows       compared; different  how many of them are not equal; missing  it was not shown on one side
    worst      relative L2 of the worst row, inf for a set or a mask that differs
    position   of the first different query (a state: of its batch row's length), batch_row likewise
    got, want  the first different element
    """

    what: str
    layer: int | None
    rows: int
    different: int = 0
    worst: float = 0.0
    position: int | None = None
    batch_row: int | None = None
    got: float | None = None
    want: float | None = None
    missing: bool = False
    window: bool = False  # of attn.visible: the window's positions differ, not (only) the entries


def _same(got: Tensor, want: Tensor) -> Tensor:
    return (got == want) | (got.isnan() & want.isnan()) if got.is_floating_point() else got == want


def differences(got: Rows, want: Rows, points: Sequence[str], config: ModelConfig) -> list[Difference]:
    """Every point that `want` has, in the given order. Both hold the same queries in the same order."""
    assert torch.equal(got.position, want.position), "rows of other queries"
    found = []
    for point in points:
        if point not in want.values:
            continue
        spec, layer = spec_of(point), int(point.split(".")[1]) if point.startswith("layers.") else None
        if point not in got.values:
            found.append(Difference(point, layer, 0, missing=True))
            continue
        g, w = got.values[point], want.values[point]
        if spec.kind in (INDICES, SCORES):
            width, fill = max(g.shape[-1], w.shape[-1]), -1.0 if spec.kind == INDICES else -math.inf
            g, w = grow_last(g, width, fill), grow_last(w, width, fill)
        same = _same(g, w)
        different = ~same[0].flatten(1).all(1)  # [N]
        if not bool(different.any()):
            found.append(Difference(point, layer, len(different)))
            continue
        at = int(different.nonzero()[0, 0])
        element = tuple(int(i) for i in (~same[0, at]).nonzero()[0])
        worst = math.inf
        if spec.kind != INDICES:
            compared = compare_scores(g, w) if spec.kind == SCORES else compare_values(g, w, spec.row_dims, sparse=spec.sparse)
            worst = compared.error if compared.rows else math.inf
        window = spec.name == "attn.visible" and not bool(same[0, at, : config.sliding_window].all())
        found.append(
            Difference(
                point, layer, len(different), int(different.sum()), worst, int(want.position[at]), int(want.row[at]),
                float(g[0, at][element]), float(w[0, at][element]), window=window,
            )
        )  # fmt: skip
    return found


def state_differences(got: Snapshots, want: Snapshots, parts: Sequence[str] | None = None) -> list[Difference]:
    """Every part of two states of the same rows; None: all parts but the length, which must agree anyway."""
    found = []
    for layer, snapshot in want.items():
        for part in [name for name in snapshot if parts is None or name in parts]:
            g, w = got[layer][part], snapshot[part]
            if part.endswith("entries"):
                g, w = _same_entries(g, w)
            name = f"layers.{layer}.state.{part}"
            same = _same(g, w)
            if g.numel() == 0:
                continue
            rows = same.flatten(2).all(-1) if same.dim() > 2 else same  # [b, rows]
            if bool(same.all()):
                found.append(Difference(name, layer, rows.numel()))
                continue
            element = tuple(int(i) for i in (~same).nonzero()[0])
            worst = math.inf
            if w.dim() > 2:
                gap, size = (g - w).double().flatten(2).norm(dim=-1), w.double().flatten(2).norm(dim=-1)
                worst = float((gap / size)[~rows].nan_to_num(math.inf, math.inf).max())
            found.append(
                Difference(
                    name, layer, rows.numel(), int((~rows).sum()), worst, int(snapshot["length"][element[0]]), element[0],
                    float(g[element]), float(w[element]),
                )
            )  # fmt: skip
    return found


def _same_entries(*entries: Tensor) -> list[Tensor]:
    """[b, e, d] of several snapshots with the same e: NaN rows where there is no entry."""
    most = max(value.shape[1] for value in entries)
    return [torch.nn.functional.pad(value, (0, 0, 0, most - value.shape[1]), value=math.nan) for value in entries]


def stack(snapshots: Sequence[Snapshots]) -> Snapshots:
    """Snapshots of single rows as one of a batch."""
    out: Snapshots = {}
    for layer, first in snapshots[0].items():
        out[layer] = {}
        for part in first:
            values = [one[layer][part] for one in snapshots]
            out[layer][part] = torch.cat(_same_entries(*values) if part.endswith("entries") else values)
    return out


def row_of(snapshots: Snapshots, row: int) -> Snapshots:
    """One row of a batch."""
    return {layer: {part: value[row : row + 1] for part, value in parts.items()} for layer, parts in snapshots.items()}


def as_stored(whole: Rows, length: int, config: ModelConfig, layers: Sequence[int]) -> Snapshots:
    """What a state of `length` tokens must hold, from the rows that were shown when they were written. Open groups apart."""
    W, out = config.sliding_window, {}
    for layer in layers:
        at, ratio = f"layers.{layer}.attn", config.ratio(layer)
        position = torch.arange(length - W, length)
        kv = whole.values[f"{at}.kv"][:, position.clamp(min=0)].masked_fill((position < 0)[None, :, None], math.nan)
        out[layer] = {"length": torch.tensor([length]), "kv": kv}
        if ratio:
            last = (torch.arange(length // ratio) + 1) * ratio - 1
            out[layer]["compressor.entries"] = whole.values[f"{at}.compressor"][:, last]
            if f"{at}.indexer.compressor" in whole.values:
                out[layer]["indexer.compressor.entries"] = whole.values[f"{at}.indexer.compressor"][:, last]
    return out


def parts_of(snapshots: Snapshots, like: Snapshots) -> Snapshots:
    return {layer: {part: snapshots[layer][part] for part in parts} for layer, parts in like.items()}


# ---- rows a run wrote, and rows it did not ----


@dataclass(frozen=True)
class Stored:
    """One part of a layer's state, row by row.

    old        rows that no step wrote: how many, and how many of them are not what they were before
    got, want  [1, N, width] rows that the steps wrote
    first_old  batch row and index of the first old row that changed
    at         [N, 2] batch row and index of the written rows
    """

    part: str
    old: int
    changed: int
    got: Tensor
    want: Tensor
    first_old: tuple[int, int] | None = None
    at: Tensor | None = None


def stored_parts(got: Snapshot, want: Snapshot, start: Tensor, config: ModelConfig, layer: int) -> list[Stored]:
    """Parts of two states after `length` tokens, the rows written from position start[b] on apart from the older ones."""
    length, ratio, out = want["length"], config.ratio(layer), []
    for part in want:
        if part == "length":
            continue
        g, w = got[part], want[part]
        if part.endswith("entries"):
            g, w = _same_entries(g, w)
            index = torch.arange(g.shape[1])
            new = index >= (start // ratio)[:, None]
        elif part == "kv":
            index = length[:, None] - config.sliding_window + torch.arange(g.shape[1])
            new = index >= start[:, None]
        else:
            slots = g.shape[1]
            index = length[:, None] - 1 - (length[:, None] - 1 - torch.arange(slots)) % slots
            new = index >= start[:, None]
        present = ~(w.isnan().all(-1) & g.isnan().all(-1))
        old = present & ~new
        changed = old & ~_same(g, w).all(-1)
        first = tuple(int(i) for i in changed.nonzero()[0]) if bool(changed.any()) else None
        take = present & new
        out.append(Stored(part, int(old.sum()), int(changed.sum()), g[take][None], w[take][None], None if first is None else (first[0], first[1]), take.nonzero()))
    return out


def left_parts(got: Snapshot, want: Snapshot, start: Tensor, config: ModelConfig, layer: int) -> dict[str, Stored | str]:
    """Every part of a layer's state after a call beside the reference's; start [b] is its length before.

    The length itself is one written row of one number. A part that cannot be compared is the reason why.
    """
    out: dict[str, Stored | str] = {}
    for part, due in want.items():
        have = got.get(part)
        free = 1 if part.endswith("entries") else None  # how many entries are shown may differ
        if have is None:
            out[part] = "production's state does not export it"
        elif have.dim() != due.dim() or any(h != d for axis, (h, d) in enumerate(zip(have.shape, due.shape, strict=True)) if axis != free):
            out[part] = f"production exports shape {list(have.shape)}, the reference {list(due.shape)}"
    fit = {part: value for part, value in want.items() if part not in out}
    for stored in stored_parts(got, {"length": want["length"], **fit}, start, config, layer):
        out[stored.part] = stored
    if "length" in fit:
        at = torch.stack((torch.arange(len(start)), torch.zeros(len(start), dtype=torch.int64)), 1)
        out["length"] = Stored("length", 0, 0, got["length"].double()[None, :, None], want["length"].double()[None, :, None], None, at)
    return out


# ---- what observing costs ----


def observer_costs(log: Log) -> list[dict[str, Any]]:
    """Per kind of point: values copied, bytes and seconds of the copies, layers summed; the dearest first."""
    kinds: dict[str, dict[str, Any]] = {}
    for point in log.points:
        one = kinds.setdefault(spec_of(point).name, {"point": spec_of(point).name, "taps": 0, "bytes": 0, "seconds": 0.0})
        one["taps"] += 1
        one["bytes"] += log.bytes[point]
        one["seconds"] += log.seconds[point]
    return sorted(kinds.values(), key=lambda one: -one["bytes"])
