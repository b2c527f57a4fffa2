"""What a call leaves in a layer's state, judged where it is written and not where it is read later.

    judge_state(audit, StateCase("decode", 2, "compressor.entries", (1, 32)), test_id)

Production's isolated layers get the reference's state before every pass (parity/audit.py); after it the state must be the
reference's too. Rows that the pass had no business with keep their bits; rows that it wrote are within the limit of the point
that shows them, open rows of a compressor within `state.open` on the floor of attn.norm; the length is exact.
`judge_part` also judges production beside itself (parity/self_parity.py). Tests: parity/unit/test_stored.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from parity import gates
from parity.audit import Audit, Floor
from parity.evaluate import CLEARLY, judge_values
from parity.gates import GATES, Gate
from parity.selection import StateCase
from probes.core.queries import Stored
from probes.core.records import State, Verdict
from probes.core.rows import row_errors
from probes.core.trace import PassKey
from reference.points import STATE_POINTS, VALUES, PointSpec

OPEN = (".kv", ".gate")  # of a compressor: rows of a group that is not finished


def component_of_part(part: str) -> str:
    """The part of the stack that keeps a part of the state."""
    return {"length": "batching", "kv": "SWA ring"}.get(part, "compressor")


def row_of_table(part: str) -> tuple[Gate, str]:
    """The row of the tolerance table for written rows of a part, and the layer's point that its floor comes from."""
    if part != "kv" and part.endswith(OPEN):
        return GATES["state.open"], "attn.norm"
    point = STATE_POINTS[part]
    return GATES[point], point


def judge_part(base: Verdict, part: Stored, mode: str, floor: Floor, passes: Sequence[PassKey] | None = None) -> list[Verdict]:
    """Verdicts on the old rows that changed (none, if none did) and on the written rows (none, if there are none).

    where  [batch row, index] in the part; written rows: details.first [0, n], n counted over `part.at`
    """
    found = []
    base = replace(base, component=component_of_part(part.part))
    if part.changed:
        first = list(part.first_old or ())
        because = f"{part.changed} of {part.old} rows that no step wrote have changed, first [row, index] {first}"
        found.append(replace(base, state=State.FAIL, value=math.inf, limit=0.0, spent=math.inf, rows=part.old, where=first, reason=because, details={**base.details, "because": because}))
    if part.got.shape[1] and part.part == "length":
        found.append(_judge_length(base, part))
    elif part.got.shape[1]:
        gate, _ = row_of_table(part.part)
        spec = PointSpec(base.point, "", VALUES, 1, base.component, "")
        verdict = judge_values(base, spec, gate, mode, part.got, part.want, torch.ones(part.got.shape[:2], dtype=torch.bool), floor, passes)
        if len(verdict.where) > 1:
            where = part.at[verdict.where[1]].tolist() if part.at is not None else verdict.where[1:]
            verdict = replace(verdict, where=where, element=[*where, *verdict.element[2:]], details={**base.details, **verdict.details, "worst": verdict.where})
        if verdict.state is State.FAIL:
            verdict = _with_cause(verdict, part)
        found.append(verdict)
    return found


def _judge_length(base: Verdict, part: Stored) -> Verdict:
    differs = (part.got != part.want)[0, :, 0]
    judgement = gates.judge_exact(int(differs.sum()), len(differs), "lengths are not the number of tokens taken")
    verdict = replace(base, metric="lengths that differ", state=judgement.state, reason=judgement.reason, value=float(differs.sum()), limit=0.0, spent=judgement.spent, rows=len(differs), why="a length is a count: exact")
    if not differs.any():
        return verdict
    n = int(differs.nonzero()[0, 0])
    got, want = float(part.got[0, n, 0]), float(part.want[0, n, 0])
    return replace(
        verdict, where=part.at[n].tolist() if part.at is not None else [n], got=got, want=want,
        reason=f"{judgement.reason}: {got:.0f}, {want:.0f} due", details={**base.details, "first": [0, n], "worst": [0, n]},
    )  # fmt: skip


def _with_cause(verdict: Verdict, part: Stored) -> Verdict:
    """What wrong written rows point to: a window key that is off by roundings to their encoder, one of another token to the ring."""
    lost = int((part.got.isnan().all(-1) & ~part.want.isnan().all(-1)).sum())
    extra = int((~part.got.isnan().all(-1) & part.want.isnan().all(-1)).sum())
    component, because = verdict.component, "written rows are wrong, older rows are what they were" if not part.changed else "written rows are wrong, older rows have changed, too"
    if lost or extra:
        because = " and ".join(filter(None, [f"{lost} rows cannot be read back" if lost else "", f"{extra} rows stand where none is due" if extra else ""]))
    elif part.part == "kv":
        near = verdict.value is not None and verdict.value <= gates.MAX_LIMIT
        component = "KV quant" if near and not part.changed else component
        because = f"written keys are off by {verdict.value:.2g} at most, and in their slots" if near else "written keys are no roundings of those due: another token's, or nobody's"
    return replace(verdict, component=component, details={**verdict.details, "because": because})


# ---- isolated layers, pass by pass ----


def judge_state(audit: Audit, case: StateCase, test_id: str) -> Verdict:
    """One part of one layer over the passes of a case. The first pass that is wrong decides, its old rows before its new ones."""
    audit.ensure(case.phase)
    return _judged(audit, case, test_id)


def _judged(audit: Audit, case: StateCase, test_id: str) -> Verdict:
    """What has been recorded so far."""
    first, last = case.steps or ((0, 0) if case.phase == "decode" else (None, None))
    name = f"state.{case.part}"
    base = Verdict(
        name, f"layers.{case.layer}.{name}", "isolated", State.NOT_RUN, "worst stored row rel-L2", layer=case.layer, phase=case.phase, step_first=first, step_last=last,
        component=component_of_part(case.part), local=True, test_id=test_id, details={"left_by": "prefill"} if case.steps is None else {},
    )  # fmt: skip
    passes: list[PassKey] = [("prefill", None)] if case.steps is None else [("decode", step) for step in range(case.steps[0], case.steps[1] + 1)]
    if audit.stopped:  # a run that ended early is judged as far as it went
        passes = [key for key in passes if (case.layer, *key) in audit.stored] or passes
    seen = [audit.stored.get((case.layer, *key), {}).get(case.part) for key in passes]
    parts = [part for part in seen if isinstance(part, Stored)]
    if len(parts) < len(passes):
        reason = next((part for part in seen if isinstance(part, str)), f"compared after {len(parts)} of {len(passes)} passes")
        if audit.crash is not None:
            reason = f"production stopped in {audit.crash.phase}: {audit.crash.message}"
        return replace(base, reason=audit.stopped or reason)
    floor = audit.floor("isolated", f"layers.{case.layer}.{row_of_table(case.part)[1]}") if case.part != "length" else Floor()
    old = sum(part.old for part in parts)
    found = [_with_pass(verdict, parts, first) for verdict in judge_part(base, joined(parts), "isolated", floor, passes)]
    counts = {"old_rows": old, "written_rows": sum(part.got.shape[1] for part in parts)}
    failed = [verdict for verdict in found if verdict.state is State.FAIL]
    if failed:
        chosen = min(failed, key=lambda verdict: verdict.details.get("first_step", 0))  # the first of equals: old rows
    elif found:
        chosen = found[-1]
    else:
        said = "rows that no pass wrote kept their bits" if old else "no row is due and none was written"
        chosen = replace(base, metric=said, state=State.PASS, value=0.0, limit=0.0, spent=0.0, rows=old or audit.batch * len(passes), why="a row that nobody writes is what it was: exact")
    rows = chosen.rows + (old if found and chosen.state is State.PASS else 0)
    return replace(chosen, rows=rows, details={**chosen.details, **counts})


def any_red(audit: Audit, phase: str, step: int | None) -> bool:
    """Is a part of some layer's state clearly wrong after this pass (as in evaluate.any_red)? For runs that end where something is red."""
    for layer in audit.plan.layers:
        for name, part in audit.stored.get((layer, phase, step), {}).items():
            if isinstance(part, Stored) and _suspect(part):
                case = StateCase("decode" if phase == "decode" or audit.plan.steps else phase, layer, name, None if step is None else (step, step))
                verdict = _judged(audit, case, "")
                if verdict.state is State.FAIL and not (verdict.spent or math.inf) <= CLEARLY:
                    return True
    return False


def _suspect(part: Stored) -> bool:
    """Not within the smallest limit that written rows of this part can have."""
    if part.part == "length":
        return bool((part.got != part.want).any())
    error, _ = row_errors(part.got, part.want, 1)
    return part.changed > 0 or not bool((error <= row_of_table(part.part)[0].typical_eps("isolated")).all())


def joined(parts: Sequence[Stored]) -> Stored:
    """The same part after several passes as one: rows one after the other, in the order of the passes."""
    if len(parts) == 1:
        return parts[0]
    at = [part.at for part in parts if part.at is not None]
    return Stored(
        parts[0].part, sum(part.old for part in parts), sum(part.changed for part in parts),
        torch.cat([part.got for part in parts], 1), torch.cat([part.want for part in parts], 1),
        next((part.first_old for part in parts if part.first_old is not None), None), torch.cat(at) if len(at) == len(parts) else None,
    )  # fmt: skip


def _with_pass(verdict: Verdict, parts: Sequence[Stored], first: int | None) -> Verdict:
    """Say after which decode step the worst row lies, and after which the gate was first over its limit."""
    details = dict(verdict.details)
    worst, over = details.pop("worst", None), details.get("first")
    if first is None:
        return replace(verdict, details=details)
    ends = torch.tensor([part.got.shape[1] for part in parts]).cumsum(0)

    def step(row: list[int]) -> int:
        return first + int(torch.searchsorted(ends, row[1], right=True))

    if over is not None:
        details["first_step"] = step(over)
    elif verdict.state is State.FAIL and parts:  # old rows
        details["first_step"] = first + next((n for n, part in enumerate(parts) if part.changed), 0)
    return replace(verdict, worst_step=step(worst) if worst else details.get("first_step"), details=details)
