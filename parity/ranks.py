"""Copies of one tensor on several ranks hold the same bits: judged on what a trace of several ranks brings.

`pytest parity/ --trace DIR` runs it through parity/test_ranks.py. A phase without any copy is not covered.
Tests: parity/unit/test_shards.py.
"""

from __future__ import annotations

from parity.gates import judge_exact
from parity.outside import NotExposedError
from probes.core.records import State, Verdict
from probes.core.wording import plural
from probes.outside.trace import Opened
from reference.config import InputError
from reference.points import layer_of, spec_of


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
        reason=f"{first.words}; {plural(len(points), 'point')} in all", why=verdict.why,
    )  # fmt: skip
