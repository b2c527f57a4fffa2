"""From recorded values to verdicts: one function per kind of gate. Limits come from gates.py, values from audit.py.

Tests: parity/unit/test_evaluate.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity import gates
from parity.audit import Audit, Floor
from parity.gates import Gate
from parity.selection import Case, layer_cases
from probes.core.records import State, Verdict
from probes.core.rows import absent_rows, least_size, row_errors, rows_of
from probes.core.trace import PassKey, grow_last
from probes.core.wording import beyond as beyond_limit
from probes.core.wording import plural
from reference.points import INDICES, SCORES, PointSpec, spec_of


def judge_case(audit: Audit, case: Case, test_id: str) -> Verdict:
    """Judge one cell. What did not run, or whose tap did not fire, is not run."""
    audit.ensure(case.phase)
    known: Verdict | None = audit.memo.get(("case", case))
    if known is not None:
        return replace(known, test_id=test_id)
    return _judged_case(audit, case, test_id)


def _judged_case(audit: Audit, case: Case, test_id: str) -> Verdict:
    """Judge what has been recorded so far."""
    spec = spec_of(case.point)
    base = _base(case, spec, test_id)
    who = "isolated" if case.mode == "isolated" else "production"
    if case.steps is not None:
        case = replace(case, steps=audit.reached(who, case.point, case.steps))
    expected = 1 if case.steps is None else case.steps[1] - case.steps[0] + 1
    other = audit.reference_of(case.mode)
    for side in (who, other):
        fired = audit.fired(side, case.point, case.phase, case.steps)
        if fired < expected:
            reason = f"tap {case.point} fired {fired} of {expected} times in {side}"
            if audit.crash is not None:
                reason = f"production stopped in {audit.crash.phase}: {audit.crash.message}"
            return replace(base, state=State.NOT_RUN, reason=audit.stopped or reason)
    got = audit.values(who, case.point, case.phase, case.steps)
    want = audit.values(other, case.point, case.phase, case.steps)
    valid = audit.valid_over(case.phase, case.steps)
    if spec.name == "attn.selected":
        return with_step(_judge_selected(audit, case, base, got, want, valid), case)
    if spec.name == "ffn.experts":
        return with_step(_judge_experts(audit, case, base, got, want, valid), case)
    if spec.kind == INDICES:
        return with_step(judge_visible(audit, case, base, got, want, valid), case)
    passes: list[PassKey] = [("prefill", None)] if case.steps is None else [("decode", step) for step in range(case.steps[0], case.steps[1] + 1)]
    floor = audit.floor(case.mode, case.point)
    verdict = judge_values(base, spec, audit.gate(spec.name), case.mode, got, want, valid, floor, passes)
    if verdict.state is State.FAIL and spec.name in ROTATED:
        component, because = _which_part(verdict, got, want, valid, audit.config.qk_rope_head_dim)
        verdict = replace(verdict, component=component, details={**verdict.details, "because": because})
    return with_step(verdict, case)


def any_red(audit: Audit, phase: str, step: int | None, alone: bool) -> bool:
    """A point of the judged layers is clearly over its limit in this pass (decode: in the steps up to this one).

    alone   layers on the reference's input only
    Later passes may still widen a limit a little, so what is only just over it does not count. If True, prefill's verdicts stand.
    """
    steps = 0 if step is None else step + 1
    found, verdicts = False, {}
    for case in layer_cases(audit.config, audit.plan.layers, (phase,), 1 if steps else 0):
        if case.mode == "free" and alone:
            continue
        if steps:
            case = replace(case, steps=(0, steps - 1))
        verdict = verdicts["case", case] = _judged_case(audit, case, "")
        found = found or (verdict.state is State.FAIL and (verdict.spent is None or not verdict.spent <= CLEARLY))
        if found and steps:
            return True
    if found:
        audit.memo |= verdicts
    return found


CLEARLY = 1.5  # times the limit


ROTATED = ("attn.q", "attn.kv", "attn.compressor")  # their last dims carry the rotation


def _which_part(verdict: Verdict, got: Tensor, want: Tensor, valid: Tensor, r: int) -> tuple[str, str]:
    """What a wrong q, kv or entry points to: keys that are not there to the ring, wrong rotary dims alone to the rotation.

    got, want [b, s, .., d], the last r dims carry the rotation; valid [b, s].
    """
    got, want = got[valid].double(), want[valid].double()
    nothing = got.isnan().all(-1) | (got == 0).all(-1) & ~(want == 0).all(-1)  # a quantiser leaves no row of exact zeros
    missing = nothing & ~want.isnan().all(-1)
    lost = int(missing.sum())
    stands = ~want.isnan().all(-1) & ~missing
    garbled = bool(stands.any()) and not bool((row_errors(got[stands][None], want[stands][None], 1)[0] <= (verdict.limit or 0.0)).all())
    if lost and not garbled:  # where other rows are garbled too, records are misread
        if verdict.point.endswith("attn.kv"):
            return "SWA ring", f"{plural(lost, 'key')} cannot be read back: the slots hold other tokens, or nothing"
        return verdict.component, f"{plural(lost, 'row')} missing"
    there = ~want.isnan().all(-1)
    got, want = got[there], want[there]
    plain, rotated = (float(row_errors(g[None], w[None], 1)[0].nan_to_num(math.inf).max()) for g, w in ((got[..., :-r], want[..., :-r]), (got[..., -r:], want[..., -r:])))
    limit = verdict.limit or 0.0
    if (verdict.value or 0.0) <= limit:  # no row alone is over it: what is typical of the rows is
        limit = verdict.details.get("median_limit") or limit
    if plain <= limit < rotated:
        return "rope", f"only the rotary dims are off, worst row {rotated:.2g}; the others are within {plain:.2g}"
    return verdict.component, ""


def _base(case: Case, spec: PointSpec, test_id: str) -> Verdict:
    first, last = case.steps or (None, None)
    return Verdict(
        gate=spec.name, point=case.point, mode=case.mode, state=State.NOT_RUN, metric="worst row rel-L2", layer=case.layer, phase=case.phase,
        step_first=first, step_last=last, component=spec.component, local=True if case.mode == "isolated" else None, test_id=test_id,
    )  # fmt: skip


def with_step(verdict: Verdict, case: Case) -> Verdict:
    """Say at which decode step the worst row lies, and at which the gate was first over its limit."""
    if case.steps is None or len(verdict.where) < 2:
        return verdict
    details = dict(verdict.details)
    if "first" in details:
        details["first_step"] = case.steps[0] + details["first"][1]
    return replace(verdict, worst_step=case.steps[0] + verdict.where[1], details=details)


# ---- real numbers ----


def judge_values(
    base: Verdict, spec: PointSpec, gate: Gate, mode: str, got: Tensor, want: Tensor, valid: Tensor, floor: Floor,
    passes: Sequence[PassKey] | None = None, k: float | None = None,
) -> Verdict:  # fmt: skip
    """Finite masks first, then the worst row by relative L2 and by norm ratio; both must hold.

    got, want [b, s, ...]; valid [b, s]; passes: what they were recorded in, None for everything; k: None takes the mode's. SCORES are compared where the reference looks; -inf must stand at the same places.
    """
    masks_differ, first_mask, least = 0, None, None
    if spec.kind == SCORES:
        width = max(got.shape[-1], want.shape[-1])
        got, want = grow_last(got, width, -math.inf), grow_last(want, width, -math.inf)
    if got.shape != want.shape:
        return replace(base, state=State.FAIL, reason=f"shape {list(got.shape)}, the reference has {list(want.shape)}")
    use = valid.reshape(*valid.shape, *[1] * (got.dim() - 2)).expand(got.shape)
    differ = (got.isfinite() != want.isfinite()) & use
    masks_differ = int(differ.sum())
    if masks_differ:
        first_mask = differ.nonzero()[0].tolist()
    if spec.kind == SCORES:
        seen = want.isfinite() & use
        least = least_size(floor.unit, seen)
        got, want = got.masked_fill(~seen, 0.0), want.masked_fill(~seen, 0.0)
    elif mode == "free" and floor.unit:
        least = torch.full(valid.shape, floor.unit, dtype=torch.float64)
    dims = rows_of(spec, mode, want.dim())
    error, norm = row_errors(got, want, dims, least)
    rows = valid.reshape(*valid.shape, *[1] * (error.dim() - 2)).expand(error.shape) & ~(absent_rows(want, dims) & absent_rows(got, dims))
    count = int(rows.sum())
    nothing_due = spec.sparse or (spec.kind == SCORES and want.shape[-1] == 0)
    if count == 0 and nothing_due and not masks_differ and valid.any():
        # No group ended here and production wrote (or scored) none: the masks are what was compared.
        return replace(base, state=State.PASS, metric="no entry is due and none was written", value=0.0, limit=0.0, spent=0.0, rows=int(valid.sum()), why=gate.why)
    eps, k = gate.eps(mode), gate.k(mode) if k is None else k
    value, where = _worst(error, rows)
    typical = floor.typical(passes)
    noise = (floor.error, floor.norm, typical) if floor.rows else (math.nan, math.nan, math.nan)
    worst_row = gates.judge(value, noise[0], eps, k, count)
    off_norm = _worst(norm, rows)[0]
    norm_ratio = gates.judge(off_norm, noise[1], eps, k, count, what="norm ratio off 1 by")
    parts = [worst_row, norm_ratio]
    numbers = [("worst row rel-L2", value, worst_row), ("norm ratio off 1 by", off_norm, norm_ratio)]
    median = None
    if count >= gates.TYPICAL_ROWS:
        median = float(error[rows].nan_to_num(math.inf).median())
        parts.append(gates.judge(median, noise[2], gate.typical_eps(mode), k, count, what="typical (median) row rel-L2"))
        numbers.append(("typical row rel-L2", median, parts[-1]))
    details: dict[str, Any] = {"median": median, "median_floor": typical, "median_limit": parts[-1].limit if median is not None else None}
    decisive = next((p for p in parts if p.state is State.FAIL), next((p for p in parts if p.state is State.NOT_RUN), worst_row))
    state, reason = decisive.state, decisive.reason
    spent = max(p.spent if not math.isnan(p.spent) else 0.0 for p in parts) if state is State.PASS else decisive.spent
    if masks_differ:
        state, reason, spent = State.FAIL, f"finite masks differ in {plural(masks_differ, 'element')}, first at {first_mask}", math.inf
    if state is State.FAIL:
        over = rows & (~(error <= worst_row.limit) | ~(norm <= norm_ratio.limit))
        if masks_differ:
            over |= differ.flatten(error.dim()).any(-1) if differ.dim() > error.dim() else differ
        if not over.any():  # only the typical row is off: it starts where rows are above its limit
            over = rows & ~(error <= parts[-1].limit)
        firsts = over.nonzero()
        details["first"] = firsts[firsts[:, 1].argmin()].tolist()
        details |= _batch_rows(over)
    worst = tuple(where)
    g, w = got[worst].double().flatten(), want[worst].double().flatten()
    gap = (g - w).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    element = int(gap.argmax())
    inner = torch.unravel_index(torch.tensor(element), want[worst].shape)
    keep = rows.reshape(-1)
    flat_got, flat_want = got.double().reshape(rows.numel(), -1)[keep], want.double().reshape(rows.numel(), -1)[keep]
    return replace(
        base, state=state, reason=reason, value=value, limit=worst_row.limit, spent=spent, floor=floor.error, k=k, eps=eps, why=gate.why,
        where=where, element=[*where, *[int(i) for i in inner]], got=float(g[element]), want=float(w[element]),
        norm_ratio=float(g.norm() / w.norm()) if w.norm() > 0 else None, norm_ratio_limit=norm_ratio.limit,
        cosine=float(torch.dot(g, w) / (g.norm() * w.norm())) if g.norm() * w.norm() > 0 else None,
        rel_l2=float((flat_got - flat_want).norm() / flat_want.norm()) if flat_want.norm() > 0 else None, rows=count, numbers=gates.numbers_of(*numbers), details=details,
    )  # fmt: skip


def _batch_rows(over: Tensor) -> dict[str, list[int]]:
    """Which rows of a batch [b, ...] hold a wrong value; nothing to say of a batch of one."""
    return {"batch_rows": over.flatten(1).any(-1).nonzero().flatten().tolist()} if len(over) > 1 else {}


def _worst(error: Tensor, rows: Tensor) -> tuple[float, list[int]]:
    """The largest error among the rows and its coordinate; NaN counts as the largest."""
    ranked = torch.where(rows, torch.where(error.isnan(), torch.inf, error), -1.0)
    index = int(ranked.argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(index), error.shape)]
    return float(error[tuple(where)]), where


# ---- choices ----


def _as_mask(entries: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Index sets [b, s, k] as masks [b, s, width], and how many indices are out of range or duplicates [b, s]."""
    inside = (entries >= 0) & (entries < width)
    count = torch.zeros(*entries.shape[:-1], width + 1, dtype=torch.int64)
    count.scatter_add_(-1, entries.clamp(0, width).where(inside, torch.full_like(entries, width)), torch.ones_like(entries))
    bad = ((entries >= 0) & ~inside).sum(-1) + (count[..., :width] > 1).sum(-1)
    return count[..., :width] > 0, bad


def judge_choice(
    audit: Audit, base: Verdict, got: Tensor, want: Tensor, scores: Tensor, valid: Tensor, noise: float, what: str, due: Tensor,
    own: Tensor | None = None,
) -> Verdict:  # fmt: skip
    """Sets equal, or every difference a near-tie: the reference's score gap is below twice the twins' worst score error, or it is
    no larger than production's own error on these very scores: its own scores, which have a gate of their own, say what it chose.

    scores [b, s, e] are the reference's, -inf where a choice is not allowed; own: production's; due [b, s] is how many must be chosen.
    """
    width = scores.shape[-1]
    got_mask, got_bad = _as_mask(got, width)
    want_mask, _ = _as_mask(want, width)
    got_bad = got_bad + (got_mask & scores.isneginf()).sum(-1)
    short = got_mask.sum(-1) != due
    left_out, taken = want_mask & ~got_mask, got_mask & ~want_mask
    differs = (left_out | taken).any(-1) & valid
    gap = scores.masked_fill(~left_out, -math.inf).amax(-1) - scores.masked_fill(~taken, math.inf).amin(-1)
    gap = torch.where(left_out.any(-1) & taken.any(-1), gap, torch.where((left_out | taken).any(-1), torch.inf, 0.0))
    limit = 2 * noise
    follows = torch.zeros_like(differs)
    if own is not None:
        own = grow_last(own, width, -math.inf)[..., :width].double()
        follows = own.masked_fill(~taken, math.inf).amin(-1) >= own.masked_fill(~left_out, -math.inf).amax(-1)
        follows &= left_out.any(-1) & taken.any(-1) & gap.isfinite()
    wrong = valid & ((got_bad > 0) | short | ~((gap <= limit) | follows) & differs)
    near = differs & ~wrong
    compared = int(valid.sum())
    excused = differs & ~wrong & ~(gap <= limit)  # by production's own scores: the gate of the scores answers for the gap
    counted = differs & ~excused
    value = float(gap[counted].max()) if counted.any() else 0.0
    details: dict[str, Any] = {
        "differing_queries": int(differs.sum()), "noise": noise, "by_own_scores": int(excused.sum()),
        "largest_gap_by_own_scores": float(gap[excused].max()) if excused.any() else 0.0,
    }  # fmt: skip
    where: list[int] = []
    state, reason = (State.PASS, "") if compared else (State.NOT_RUN, "nothing was compared")
    if wrong.any():
        firsts = wrong.nonzero()
        where = firsts[firsts[:, 1].argmin()].tolist()
        details |= {"first": where, **_batch_rows(wrong)}
        b, s = where
        taken_here, left_here = taken[b, s].nonzero().flatten().tolist()[:8], left_out[b, s].nonzero().flatten().tolist()[:8]
        state = State.FAIL
        reason = f"{int(wrong.sum())} of {compared} queries chose other {what}; at {where}: took {taken_here}, left out {left_here}, score gap {beyond_limit(float(gap[b, s]), limit)} (2 x twins' worst score error)"
        if int(got_bad[b, s]):
            reason += f"; {int(got_bad[b, s])} not allowed or twice"
    return replace(
        base, metric="score gap of differing choices", state=state, reason=reason, value=value, limit=limit, spent=value / limit if limit > 0 else (0.0 if value == 0 else math.inf),
        floor=noise, k=2.0, eps=0.0, why="a choice may differ only where the reference's scores are closer than twice the twins' worst score error, or than production's own error on them",
        where=where, rows=compared, near_ties=int(near.sum()), details=details,
    )  # fmt: skip


def _judge_selected(audit: Audit, case: Case, base: Verdict, got: Tensor, want: Tensor, valid: Tensor) -> Verdict:
    score_point = case.point.replace("selected", "indexer.score")
    scores = audit.values(audit.reference_of(case.mode), score_point, case.phase, case.steps)
    if scores.shape[-1] == 0:
        scores = torch.full((*scores.shape[:-1], 1), -math.inf)
    noise = audit.floor(case.mode, score_point).absolute
    due = scores.isfinite().sum(-1).clamp(max=audit.config.index_topk)
    return judge_choice(audit, base, got, want, scores.double(), valid, noise, "entries", due, _own_scores(audit, case, score_point))


def _own_scores(audit: Audit, case: Case, point: str) -> Tensor | None:
    """What production chose by; None where its tap did not fire at every step."""
    who = "isolated" if case.mode == "isolated" else "production"
    expected = 1 if case.steps is None else case.steps[1] - case.steps[0] + 1
    if not audit.exposes(point, case.phase, case.steps):
        return None
    return audit.values(who, point, case.phase, case.steps) if audit.fired(who, point, case.phase, case.steps) == expected else None


def _judge_experts(audit: Audit, case: Case, base: Verdict, got: Tensor, want: Tensor, valid: Tensor) -> Verdict:
    layer = case.layer
    assert layer is not None
    gate_point = case.point.replace("experts", "gate")
    scores = audit.values(audit.reference_of(case.mode), gate_point, case.phase, case.steps).double()
    due = torch.full(valid.shape, audit.config.num_experts_per_tok)
    if audit.config.is_hash(layer):
        wanted, _ = _as_mask(want, scores.shape[-1])
        scores = torch.where(wanted, 0.0, -math.inf)  # the table is the law: nothing else is allowed
        due = wanted.sum(-1)
        return judge_choice(audit, base, got, want, scores.double(), valid, 0.0, "experts", due)
    bias, own = audit.reference.router_bias(layer).double(), _own_scores(audit, case, gate_point)
    own = None if own is None else own.double() + bias
    return judge_choice(audit, base, got, want, scores + bias, valid, audit.floor(case.mode, gate_point).absolute, "experts", due, own)


def judge_visible(audit: Audit, case: Case, base: Verdict, got: Tensor, want: Tensor, valid: Tensor) -> Verdict:
    """Window positions and compressed entries that attention read, as exact sets, duplicates included."""
    W = audit.config.sliding_window
    parts = []
    for name, g, w in (("window positions", got[..., :W], want[..., :W]), ("compressed entries", got[..., W:], want[..., W:])):
        width = max(g.shape[-1], w.shape[-1])
        g, w = (grow_last(x, width, -1).sort(-1).values for x in (g, w))
        parts.append((name, g, w, (g != w).any(-1) & valid))
    differs = parts[0][3] | parts[1][3]
    compared = int(valid.sum())
    judgement = gates.judge_exact(int(differs.sum()), compared, "queries see other keys")
    details: dict[str, Any] = {"differing_queries": int(differs.sum())}
    where: list[int] = []
    reason, component = judgement.reason, base.component
    if differs.any():
        firsts = differs.nonzero()
        where = firsts[firsts[:, 1].argmin()].tolist()
        details |= {"first": where, **_batch_rows(differs)}
        b, s = where
        for name, g, w, part in parts:
            if part[b, s]:
                have, due = g[b, s][g[b, s] >= 0].tolist(), w[b, s][w[b, s] >= 0].tolist()
                extra, missing = sorted(set(have) - set(due)), sorted(set(due) - set(have))
                twice = sorted({x for x in have if have.count(x) > 1})
                reason += f"; at {where} {name}: missing {missing[:8]}, extra {extra[:8]}" + (f", twice {twice[:8]}" if twice else "")
                details[name] = {"missing": missing[:64], "extra": extra[:64], "twice": twice[:64]}
        # A prefill reads the window by rule; a step reads what the ring still holds.
        component = "SWA ring" if parts[0][3][b, s] and case.phase == "decode" else base.component
    return replace(
        base, metric="queries whose key set differs", state=judgement.state, reason=reason, value=float(differs.sum()), limit=0.0,
        spent=judgement.spent, why="which keys a query sees is exact", where=where, rows=compared, component=component, details=details,
    )  # fmt: skip


# ---- stream mixing ----


def judge_mhc(audit: Audit, layer: int, phase: str, half: str) -> Verdict:
    """Sums and ranges of one site over the whole phase, from the isolated run (inputs are the reference's own)."""
    point = f"layers.{layer}.{half}.comb"
    base = Verdict("mhc.sums", point, "isolated", State.NOT_RUN, "deviation of the sums of comb from the reference's", layer=layer, phase=phase, component="mHC", local=True, why=audit.gate("mhc.sums").why)
    values = {}
    for name in ("pre", "post", "comb"):
        for who in ("isolated", audit.reference_of("isolated")):
            collected = whole_phase(audit, who, f"layers.{layer}.{half}.{name}", phase)
            if collected is None:
                return replace(base, reason=_why_missing(audit, f"layers.{layer}.{half}.{name}"))
            values[name, "isolated" if who == "isolated" else "reference"] = collected
    comb, want = values["comb", "isolated"], values["comb", "reference"]
    outside = sum(int((~((v > 0) & (v <= top))).sum()) for v, top in ((values["pre", "isolated"], 1 + 2 * audit.config.hc_eps), (values["post", "isolated"], 2.0)))
    outside += int((~(comb >= 0)).sum())
    # The last step normalises columns: they are 1 whatever the streams. Rows are as far from 1 as the reference's, up to comb's own limit.
    columns = float((comb.sum(-2) - 1).abs().max())
    rows = float((comb.sum(-1) - want.sum(-1)).abs().max())
    gate, matrix, n = audit.gate("mhc.sums"), audit.gate(f"{half}.comb"), audit.config.hc_mult
    floor = audit.floor("isolated", point)
    due = float((want.sum(-2) - 1).abs().max())
    column_check = gates.judge(columns, due, gate.eps("isolated"), 1.0, comb.shape[0], "columns of comb off 1 by")
    row_check = gates.judge(rows, floor.absolute * n if floor.rows else math.nan, matrix.eps("isolated") * n, gate.k("isolated"), comb.shape[0], "row sums of comb off the reference's by")
    decisive = next((c for c in (column_check, row_check) if c.state is not State.PASS), max(column_check, row_check, key=lambda c: c.spent))
    state, reason = decisive.state, decisive.reason
    if outside:
        state, reason = State.FAIL, f"{outside} values out of range: pre in (0, 1 + eps], post in (0, 2], comb >= 0"
    value = columns if decisive is column_check else rows
    return replace(
        base, state=state, reason=reason, value=value, limit=decisive.limit, spent=decisive.spent, floor=due if decisive is column_check else floor.absolute * n,
        k=1.0 if decisive is column_check else gate.k("isolated"), eps=gate.eps("isolated") if decisive is column_check else matrix.eps("isolated") * n, rows=comb.shape[0],
        details={"columns": columns, "columns_reference": due, "rows": rows, "row_deviation": float((comb.sum(-1) - 1).abs().max())},
    )  # fmt: skip


def whole_phase(audit: Audit, who: str, point: str, phase: str) -> Tensor | None:
    """Valid rows of a point over a whole phase, [rows, ...]; None where a tap is missing."""
    audit.ensure(phase)
    steps = None if phase == "prefill" else (0, audit.plan.steps - 1)
    if audit.fired(who, point, phase, steps) < (1 if steps is None else audit.plan.steps):
        return None
    return audit.values(who, point, phase, steps)[audit.valid_over(phase, steps)]


def _why_missing(audit: Audit, point: str) -> str:
    if audit.crash is not None:
        return f"production stopped in {audit.crash.phase}: {audit.crash.message}"
    return audit.stopped or f"tap {point} did not fire in every pass"


# ---- residual ----


def judge_residual(audit: Audit, layer: int, phase: str) -> Verdict:
    """Ratio of production's |X| to the reference's after a layer, free-running: largest and RMS, worst stream."""
    point = f"layers.{layer}.hc_ffn.X"
    gate = audit.gate("residual")
    base = Verdict("residual", point, "free", State.NOT_RUN, "|X| ratio to the reference, off 1 by", layer=layer, phase=phase, component="mHC", why=gate.why)
    got, want = (whole_phase(audit, who, point, phase) for who in ("production", "reference"))
    if got is None or want is None:
        return replace(base, reason=_why_missing(audit, point))
    off = 0.0
    details = {}
    g, w = got.double(), want.double()  # [rows, n, D]
    for name, ratio in (("absmax", g.abs().amax((0, 2)) / w.abs().amax((0, 2))), ("rms", (g.square().mean((0, 2)) / w.square().mean((0, 2))).sqrt())):
        details[name] = ratio.tolist()
        off = max(off, float((ratio - 1).abs().nan_to_num(math.inf).max()))
    floor = audit.floor("free", point)
    judgement = gates.judge(off, floor.error if floor.rows else math.nan, gate.eps("free"), gate.k("free"), got.shape[0], "|X| ratio off 1 by")
    return replace(
        base, state=judgement.state, reason=judgement.reason, value=off, limit=judgement.limit, spent=judgement.spent, floor=floor.error, k=gate.k("free"),
        eps=gate.eps("free"), rows=got.shape[0], details=details,
    )  # fmt: skip


# ---- logits ----


def judge_flips(audit: Audit, phase: str) -> Verdict:
    """Most likely tokens: a flip is allowed where the reference's margin is below twice k x the twins' worst logit error.

    NOTE: production's own error is no measure here: whatever it is, a flip's margin is never above twice that.
    """
    base = Verdict("logits.top1", "logits", "free", State.NOT_RUN, "flips beyond the margin", phase=phase, component="head", why="a flip needs an error of half the margin on both tokens")
    got, want = (whole_phase(audit, who, "logits", phase) for who in ("production", "reference"))
    if got is None or want is None:
        return replace(base, reason=_why_missing(audit, "logits"))
    got_top, want_top = got.argmax(-1), want.argmax(-1)
    flipped = got_top != want_top
    row = torch.arange(got.shape[0])
    margin = want[row, want_top] - want[row, got_top]
    floor = audit.floor("free", "logits")
    beyond = (flipped & ~(margin <= flip_margin(floor))) | got.isnan().any(-1)
    judgement = gates.judge_exact(int(beyond.sum()), got.shape[0] if floor.rows else 0, "rows flip beyond the margin")
    widest = f"; largest margin {beyond_limit(float(margin[beyond].max()), flip_margin(floor))} (twice k {gates.K_FREE:g} x floor {floor.absolute:.2g})" if beyond.any() else ""
    return replace(
        base, state=judgement.state, reason=judgement.reason + widest, value=float(beyond.sum()), limit=0.0, spent=judgement.spent, rows=got.shape[0], floor=floor.absolute,
        near_ties=int((flipped & ~beyond).sum()),
        details={
            "flips": int(flipped.sum()), "agreement": float((~flipped).float().mean()), "allowed_margin": flip_margin(floor),
            "largest_margin": float(margin[flipped].max()) if flipped.any() else 0.0, "largest_error": float((got - want).abs().max()),
        },
    )  # fmt: skip


def flip_margin(floor: Floor) -> float:
    """The largest margin between two tokens that noise can turn round: the limit of the logit error, on both of them."""
    return 2 * gates.K_FREE * floor.absolute


def judge_greedy(audit: Audit) -> Verdict:
    """Both models continue greedily; the first differing token must be a near-tie of the reference."""
    base = Verdict("greedy", "logits", "free", State.NOT_RUN, "continuations that part beyond the margin", phase="decode", component="head", why="the first difference must lie within twice k x the twins' worst logit error")
    audit.ensure("prefill")
    if audit.crash is not None:
        return replace(base, reason=f"production stopped in {audit.crash.phase}: {audit.crash.message}")
    result = audit.greedy()
    if result is None:
        assert audit.crash is not None
        return replace(base, state=State.FAIL, reason=f"production stopped: {audit.crash.message}")
    floor = audit.floor("free", "logits")
    beyond = [b for b, first in enumerate(result.first_difference) if first is not None and not (result.margin[b] or 0.0) <= flip_margin(floor)]
    judgement = gates.judge_exact(len(beyond), len(result.reference) if result.tokens and floor.rows else 0, "rows part beyond the margin")
    near = sum(first is not None for first in result.first_difference) - len(beyond)
    return replace(
        base, state=judgement.state, reason=judgement.reason, value=float(len(beyond)), limit=0.0, spent=judgement.spent, rows=len(result.reference), near_ties=near,
        details={"first_difference": result.first_difference, "margin": result.margin, "allowed_margin": flip_margin(floor), "logit_error": result.logit_error, "tokens": result.tokens},
    )  # fmt: skip
