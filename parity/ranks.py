"""Copies of one tensor on several ranks hold the same bits: judged on what a trace of several ranks brings.

`pytest parity/ --trace DIR` runs it through parity/test_ranks.py. A phase without any copy is not covered.
Tests: parity/unit/test_shards.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from parity.gates import judge_exact
from parity.outside import NotExposedError
from probes.core.records import State, Verdict
from probes.core.wording import plural
from probes.outside.shards import Finding
from probes.outside.trace import Opened
from reference.config import InputError
from reference.points import LAYER_POINTS, MODEL_POINTS, layer_of, spec_of


def judge_copies(opened: Opened, phase: str) -> Verdict:
    """One verdict for all replicated tensors and copied parts of a phase, at the first point that differs."""
    copies = {key: n for key, n in opened.checked.copies.items() if key[0] == phase}
    if not copies:
        raise NotExposedError(f"a tensor that two ranks hold, in {phase}")
    found = [finding for finding in opened.checked.findings if finding.phase == phase]
    judgement = judge_exact(len(found), sum(copies.values()), "copies differ")
    verdict = Verdict(
        "ranks.copies", "ranks.copies", "model", judgement.state, "copies that differ", phase=phase, value=float(len(found)), limit=0.0,
        spent=judgement.spent, rows=sum(copies.values()), reason=judgement.reason, why="ranks that hold the same tensor hold the same bits",
    )  # fmt: skip
    if judgement.state is State.PASS or not found:
        return verdict
    found.sort(key=lambda finding: (-1 if finding.step is None else finding.step, _place(finding.point)))
    first = found[0]
    try:
        component = spec_of(first.point).component
    except InputError:
        component = ""
    points = list(dict.fromkeys(finding.point for finding in found))
    return Verdict(
        "ranks.copies", first.point, "free", judgement.state, "copies that differ", layer=layer_of(first.point) if component else None, phase=phase,
        step_first=first.step, step_last=first.step, component=component, value=float(len(found)), limit=0.0, spent=judgement.spent, rows=sum(copies.values()),
        where=list(first.where), element=list(first.where), got=first.got if first.count else None, want=first.want if first.count else None,
        reason=f"{first.words}; {plural(len(points), 'point')} in all", why=verdict.why, details=_because(first, set(points), copies),
    )  # fmt: skip


def _place(point: str) -> tuple[int, int, str]:
    """Where a name stands in the dataflow: its layer, its place there; names that are no points come last."""
    layer, names = layer_of(point), [spec.name for spec in LAYER_POINTS]
    if layer is not None:
        name = point.split(".", 2)[2]
        return (layer, names.index(name) if name in names else len(names), name)
    return (-1 if point == "embed" else 1 << 30, [*(spec.name for spec in MODEL_POINTS), point].index(point), point)


def _because(first: Finding, wrong: set[str], copies: Mapping[tuple[str, int | None, str], int]) -> dict[str, str]:
    """The two ranks and their values in one line; `agrees`: the last point before it that ranks hold alike in that pass."""
    before = [point for _, step, point in copies if step == first.step and point not in wrong and _place(point) < _place(first.point)]
    agrees = max(before, key=_place, default="")
    said = f"rank {first.other} and rank {first.rank} hold different copies of {first.point}: "
    if first.count:
        said += f"{first.elements} of {first.count} elements differ, first at {list(first.where)}: {first.want:.6g} on rank {first.other}, {first.got:.6g} on rank {first.rank}"
    else:
        said += "other shapes or dtypes"
    return {"because": said + (f"; copies before it agree, the last of {agrees}" if agrees else "; no copy of an earlier point was compared"), "agrees": agrees}
