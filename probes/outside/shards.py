"""Tensors of several ranks, put together from what each says of its part. Nothing is guessed: a part that is missing is a gap.

    {"kind": "replicated"}                  every rank holds all of it (also: no description): checked bit by bit
    {"kind": "column"}                      parts of the last axis, one behind the other
    {"kind": "head"}                        parts of the axis before the last
    {"kind": "row"}                         parts of the first axis (flat tokens of sequence parallelism)
    {"kind": "concat", "dim": 1}            parts of that axis
    {"kind": "sum"}                         partial sums: added in fp64, then cast to the stored dtype, or to "dtype"
    {"kind": "expert", "experts": [0, 1]}   partial outputs of these experts: as sum. With "dim": that axis counts these experts

`dim` may stand with column, row and head too. A part is number `rank` of `size`, unless `index` and `count` say otherwise: ranks
that name the same index are copies of one part, and are checked against each other like replicated ones. "of": how many experts
there are. What describes no part (another field, an index that is no number) is a gap too. A difference between copies is a Finding;
the value of the lowest rank goes on. Tests: parity/unit/test_shards.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probes.core.trace_files import SHARD_DIMS, Part, Raw, RawPass, shard_problem
from reference.config import InputError


@dataclass(frozen=True)
class Finding:
    """Two ranks that should hold the same bits and do not.

    elements    how many differ, of count;  where  the first one;  got, want  its value on `rank` and on `other`
    """

    point: str
    phase: str
    step: int | None
    rank: int
    other: int
    elements: int
    count: int
    where: tuple[int, ...]
    got: float
    want: float

    @property
    def words(self) -> str:
        at = self.phase + ("" if self.step is None else f" step {self.step}")
        if not self.count:
            return f"{self.point} in {at}: ranks {self.other} and {self.rank} hold copies of different shapes or dtypes"
        return f"{self.point} in {at}: {self.elements} of {self.count} elements differ between ranks {self.other} and {self.rank}, first at {list(self.where)}: {self.want:.6g} and {self.got:.6g}"


@dataclass
class Checked:
    """What was compared between ranks. copies  (phase, step, point) -> pairs of copies that were compared bit by bit."""

    findings: list[Finding] = field(default_factory=list)
    copies: dict[tuple[str, int | None, str], int] = field(default_factory=dict)


class IncompleteError(ValueError):
    """A tensor cannot be put together."""


def put_together(ranks: Sequence[Raw], root: Path) -> tuple[Raw, Checked]:
    """One folder's worth of whole tensors from those of several ranks; what is incomplete is `refused` there, with the reason.

    Raises InputError where the ranks are no ranks of one run: sizes, tokens or passes contradict each other.
    """
    sizes = sorted({raw.size for raw in ranks})
    if len(sizes) > 1 or len({raw.rank for raw in ranks}) < len(ranks):
        raise InputError(f"{root}: ranks {[raw.rank for raw in ranks]} of {sizes}: expected ranks of one run")
    ranks = sorted(ranks, key=lambda raw: raw.rank)
    checked, first = Checked(), ranks[0]
    policies = {_plain_policy(raw): raw.rank for raw in reversed(ranks) if raw.description.get("policy") is not None}
    if len(policies) > 1:
        said = ", ".join(f"rank {rank} {policy}" for policy, rank in sorted(policies.items(), key=lambda one: one[1]))
        raise InputError(f"{root}: its ranks declare different policies: {said}; next: the same capture.describe(policy=[...]) on every rank")
    who = {raw.rank: f"rank {raw.rank}: " if sizes[0] > 1 else "" for raw in ranks}
    out = replace(
        first, root=root, passes=[], rank=0, size=1, points=tuple(dict.fromkeys(point for raw in ranks for point in raw.points)),
        description={name: value for raw in reversed(ranks) for name, value in raw.description.items()},
        trouble=tuple(f"{who[raw.rank]}{said}" for raw in ranks for said in raw.trouble),
        stopped="; ".join(f"{who[raw.rank]}{raw.stopped}" for raw in ranks if raw.stopped),
    )  # fmt: skip
    by_key: dict[tuple[str, int | None, int], dict[int, RawPass]] = {}
    for raw in ranks:
        for one in raw.passes:
            by_key.setdefault(one.key, {})[raw.rank] = one
    for held in by_key.values():
        out.passes.append(_whole_pass(held, sizes[0], checked, root))
    return out, checked


def _plain_policy(raw: Raw) -> str:
    policy = raw.description["policy"]
    return ",".join(sorted({str(name) for name in policy})) if isinstance(policy, list) else str(policy)


def _whole_pass(held: Mapping[int, RawPass], size: int, checked: Checked, root: Path) -> RawPass:
    lowest = held[min(held)]
    whole = RawPass(lowest.phase, lowest.step, lowest.chunk)
    for name in ("tokens", "positions", "lengths", "valid"):
        said = {rank: getattr(one, name) for rank, one in held.items() if getattr(one, name) is not None}
        for rank, value in said.items():
            if value != said[min(said)]:
                raise InputError(f"{root}: {lowest.words}: ranks {min(said)} and {rank} were fed different {name}; next: a folder for each data-parallel group")
        setattr(whole, name, said[min(said)] if said else None)
    for point in dict.fromkeys(point for one in held.values() for point in one.parts):
        shown = {rank: one.parts[point] for rank, one in sorted(held.items()) if point in one.parts}
        try:
            counts = {rank: len(parts) for rank, parts in shown.items()}
            if len(set(counts.values())) > 1:
                raise IncompleteError(f"shown {', '.join(f'{n} times by rank {rank}' for rank, n in counts.items())}")
            whole.parts[point] = [
                Part(combine(point, {rank: parts[i] for rank, parts in shown.items()}, size, whole, checked)) for i in range(next(iter(counts.values())))
            ]
        except IncompleteError as error:
            whole.parts.pop(point, None)
            whole.refused[point] = str(error)
    for rank, one in held.items():
        for point, why in one.refused.items():
            whole.parts.pop(point, None)
            whole.refused[point] = f"rank {rank}: {why}" if size > 1 else why
        for point, why in one.unseen.items():
            if point not in whole.parts and point not in whole.refused:
                whole.unseen.setdefault(point, f"rank {rank}: {why}" if size > 1 else why)
    return whole


def combine(point: str, parts: Mapping[int, Part], size: int, where: RawPass, checked: Checked) -> Tensor:
    """The whole of one tensor. Raises IncompleteError."""
    for rank, part in parts.items():
        wrong = shard_problem(part.shard or {}) or (f"{str(part.value.dtype).removeprefix('torch.')}, expected real numbers" if part.value.is_complex() else "")
        if wrong:
            raise IncompleteError(f"rank {rank}: {wrong}" if size > 1 else wrong)
    kinds = {str((part.shard or {}).get("kind", "replicated")) for part in parts.values()}
    if len(kinds) > 1:
        raise IncompleteError(f"its ranks describe it as {' and '.join(sorted(kinds))}, expected one kind")
    kind = kinds.pop()
    if kind == "replicated":
        return _copies(point, {rank: part.value for rank, part in parts.items()}, where, checked)
    shards = {rank: dict(part.shard or {}) for rank, part in parts.items()}
    if kind == "expert" and any("dim" in shard for shard in shards.values()):
        return _placed(point, parts, shards, where, checked)
    values = _by_index(point, parts, shards, size, where, checked)
    if kind in SHARD_DIMS:
        dim = _same(shards, "dim", SHARD_DIMS[kind])
        if not isinstance(dim, int):
            raise IncompleteError(f"shard of kind {kind} names no dim")
        try:
            return torch.cat(values, dim)
        except (RuntimeError, IndexError) as error:
            raise IncompleteError(f"its parts do not fit: {[list(value.shape) for value in values]} along {dim}: {str(error).splitlines()[0][:120]}") from None
    if kind == "expert":
        _complete_experts(shards)
    return _summed(values, _same(shards, "dtype", None))


def _same(shards: Mapping[int, Mapping[str, Any]], name: str, default: Any) -> Any:
    said = {str(shard.get(name, default)): shard.get(name, default) for shard in shards.values()}
    if len(said) > 1:
        raise IncompleteError(f"its ranks say {name} {' and '.join(said)}")
    return next(iter(said.values()))


def _by_index(point: str, parts: Mapping[int, Part], shards: Mapping[int, Mapping[str, Any]], size: int, where: RawPass, checked: Checked) -> list[Tensor]:
    """One value per index; copies of the same index are checked."""
    count = _same(shards, "count", size)
    by: dict[int, dict[int, Tensor]] = {}
    for rank, part in parts.items():
        by.setdefault(int(shards[rank].get("index", rank)), {})[rank] = part.value
    missing = [index for index in range(count) if index not in by]
    if missing or set(by) - set(range(count)):
        extra = sorted(set(by) - set(range(count)))
        raise IncompleteError(f"part {', '.join(map(str, missing))} of {count} is on no rank of this trace" if missing else f"part {extra[0]} of {count}")
    return [_copies(point, by[index], where, checked) for index in range(count)]


def _copies(point: str, values: Mapping[int, Tensor], where: RawPass, checked: Checked) -> Tensor:
    """The value of the lowest rank; every other is held against it bit by bit."""
    first = min(values)
    want = values[first]
    for rank, got in values.items():
        if rank == first:
            continue
        name = (where.phase, where.step, point)
        checked.copies[name] = checked.copies.get(name, 0) + 1
        if got.shape != want.shape or got.dtype != want.dtype:
            checked.findings.append(Finding(point, where.phase, where.step, rank, first, 0, 0, (), float("nan"), float("nan")))
        elif (differ := _differ(got, want)).any():
            at = tuple(int(i) for i in differ.nonzero()[0])
            checked.findings.append(Finding(point, where.phase, where.step, rank, first, int(differ.sum()), differ.numel(), at, float(got[at]), float(want[at])))
    return want


def _differ(got: Tensor, want: Tensor) -> Tensor:
    """True where the bytes of an element differ: NaN equals the same NaN, 0 is not -0."""
    a, b = (x.contiguous().reshape(-1, 1).view(torch.uint8).reshape(x.numel(), -1) for x in (got, want))
    return (a != b).any(1).reshape(want.shape)


def _summed(values: Sequence[Tensor], dtype: str | None) -> Tensor:
    if len({value.shape for value in values}) > 1:
        raise IncompleteError(f"partial sums of shapes {[list(value.shape) for value in values]}")
    into = values[0].dtype if dtype is None else getattr(torch, dtype, None)
    if not isinstance(into, torch.dtype):
        raise IncompleteError(f"dtype {dtype!r} is none of torch's")
    total = values[0].double()
    for value in values[1:]:
        total = total + value.double()
    return total.to(into)


def _complete_experts(shards: Mapping[int, Mapping[str, Any]]) -> None:
    """Every expert on one index, where ranks say which they hold."""
    named = [list(shard["experts"]) for _, shard in sorted({int(shard.get("index", rank)): shard for rank, shard in shards.items()}.items()) if "experts" in shard]
    if not named:
        return
    if any("experts" not in shard for shard in shards.values()):
        raise IncompleteError(f"rank {next(rank for rank, shard in shards.items() if 'experts' not in shard)} does not say which experts it sums")
    every = [expert for experts in named for expert in experts]
    twice = sorted({expert for expert in every if every.count(expert) > 1})
    missing = sorted(set(range(int(_same(shards, "of", max(every, default=-1) + 1)))) - set(every))
    if twice or missing:
        raise IncompleteError(f"experts {twice} are summed twice" if twice else f"experts {missing} are on no rank of this trace")


def _placed(point: str, parts: Mapping[int, Part], shards: Mapping[int, Mapping[str, Any]], where: RawPass, checked: Checked) -> Tensor:
    """An axis that counts experts, each from the ranks that hold it."""
    dim = _same(shards, "dim", None)
    held: dict[int, dict[int, Tensor]] = {}
    for rank, part in parts.items():
        experts = [int(expert) for expert in shards[rank].get("experts", ())]
        if not isinstance(dim, int) or not -part.value.dim() <= dim < part.value.dim() or part.value.shape[dim] != len(experts):
            raise IncompleteError(f"rank {rank} holds {list(part.value.shape)} and names {len(experts)} experts along {dim}")
        for i, expert in enumerate(experts):
            held.setdefault(expert, {})[rank] = part.value.select(dim, i)
    missing = sorted(set(range(int(_same(shards, "of", max(held, default=-1) + 1)))) - set(held))
    if missing or not held:
        raise IncompleteError(f"experts {missing} are on no rank of this trace")
    return torch.stack([_copies(point, held[expert], where, checked) for expert in sorted(held)], dim)
