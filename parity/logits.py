"""The audit of anything with logits: what a server said of its next tokens, held against the reference on the same tokens.

    pytest parity/ --logits answers.jsonl --policy published

The reference and its three twins take the same prompt and the same tokens after it, each on its own choices of experts and entries:
nobody knows the server's. Errors of a row are measured on the ids that were given, as a share of how far both distributions lie from
the uniform one: 0 is the same, an unrelated row is near 1. A row whose experts flip lies at 0.1, in the server as in the twins.
Everything else is not covered. Judged by parity/test_logprobs.py. Tests: parity/unit/test_logits_door.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parity import gates
from parity.evaluate import flip_margin, with_step
from parity.gates import GATES, K_FREE
from parity.outside import NotExposedError, OutsideAudit
from parity.selection import Case
from probes.core.records import Measurement, State, Verdict
from probes.core.wording import plural
from probes.outside.logits import Given, Rounding, Row, rounding_of, steps_of
from reference.points import Taps

TOP = 20  # of a whole vocabulary, the ids that offset and top set are judged on
GRIDS = 8  # of the same step, each shifted: the most that rounding did to a median on any of them is what it may do
SURE = 100.0  # given probabilities sum to one while the reference leaves this many times what rounding costs to other tokens


class Answers:
    """Stands in the audit for production: tokens and rows of a file, one sequence a batch row."""

    continues = False

    def __init__(self, given: Sequence[Given], name: str, policy: frozenset[str]) -> None:
        self.given, self.name, self.policy = tuple(given), name, policy
        self.taps = Taps(("logits",))
        self.rounding = rounding_of(torch.cat([row.numbers for one in given for row in one.rows.values()]))
        rows = sum(len(one.rows) for one in given)
        self.notes = [
            f"{plural(len(given), 'sequence')}, {plural(rows, 'row')}, numbers written with {self.rounding.words}",
            "experts and entries that the server chose are not known: the reference and its twins choose for themselves",
        ]

    def new_state(self, batch: int, max_context: int) -> dict[str, int]:
        return {"step": 0}

    def prefill(self, tokens: Tensor, state: dict[str, int], lengths: Tensor | None = None) -> None:
        self.taps.emit("logits", torch.tensor([[[float(at in one.rows)] for at in range(tokens.shape[1])] for one in self.given]))

    def decode(self, tokens: Tensor, state: dict[str, int]) -> None:
        step, state["step"] = state["step"], state["step"] + 1
        self.taps.emit("logits", torch.tensor([[[float(len(one.prompt) + step in one.rows)]] for one in self.given]))

    def decode_tokens(self, step: int) -> list[int]:
        """The sequence's own next tokens; a shorter one goes on with its last, and nothing is judged there."""
        return [(one.completion or one.prompt)[min(step, len(one.completion) - 1)] for one in self.given]


@dataclass(frozen=True)
class Seen:
    """One row beside the reference's: batch row b, column s of the phase's values (a decode step's number), the next token if it is known.

    want   [k] log-probabilities of the reference at row.ids; left: the largest at any other id, and which (minus infinity: none)
    unit   how far both lie from the uniform distribution, RMS in nats
    twins  [3, k] of the twins
    """

    b: int
    s: int
    row: Row
    following: int | None
    want: Tensor
    twins: Tensor
    left: float
    left_id: int
    uniform: float

    @property
    def unit(self) -> float:
        return self._rms(self.row.logprobs - self.uniform) + self._rms(self.want - self.uniform)

    @staticmethod
    def _rms(x: Tensor) -> float:
        return float(x[x.isfinite()].square().mean().sqrt()) if bool(x.isfinite().any()) else 0.0

    def error(self, got: Tensor, least: float) -> float:
        """Of log-probabilities [k]: RMS of the difference over `unit`, which is at least `least`."""
        return float((got - self.want).square().mean().sqrt()) / max(self.unit, least, 1e-12)

    def slope(self, got: Tensor) -> float:
        """Of got against the reference's, over the ids; NaN where there is one id."""
        x, y = self.want - self.want.mean(), got - got.mean()
        return float((x * y).sum() / (x * x).sum()) if len(x) > 1 and float((x * x).sum()) > 0 else math.nan

    def offset(self, got: Tensor) -> float:
        """Mean of got - want over the likeliest ids, nats."""
        return float((got - self.want)[:TOP].mean())

    def top(self) -> Tensor | None:
        """Indices into row.ids of those that the server calls its likeliest; None where only the token itself is given."""
        if self.row.full:
            return torch.arange(min(TOP, len(self.row.ids)))
        index = torch.arange(len(self.row.ids))
        if self.following is not None:  # the token that was taken may stand below the likeliest ones
            index = index[self.row.ids != self.following]
        return index if len(index) else None


@dataclass
class LogitsAudit(OutsideAudit):
    """See the module's docstring. seen: what was given, beside the reference's, by phase."""

    seen: dict[tuple[str, int | None], list[Seen]] = field(default_factory=dict)
    asked_points: tuple[str, ...] = ()
    _twins: list[list[Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked_points = self.free_points
        self.free_points = self.reference_points = self.production_points = ("logits",)
        self.isolated_points = ()
        self.rounding: Rounding = self.production.rounding

    def _given(self, phase: str, step: int | None) -> list[tuple[int, int, Row, int | None]]:
        """(b, s, row, the token after it) of a pass."""
        found = []
        for b, one in enumerate(self.production.given):
            first = 0 if phase == "prefill" else len(one.prompt) + (step or 0)
            last = len(one.prompt) if phase == "prefill" else first + 1
            tokens = one.tokens
            found += [(b, at - first, one.rows[at], tokens[at + 1] if at + 1 < len(tokens) else None) for at in range(first, last) if at in one.rows]
        return found

    def _add_floor(self, mode: str, number: int, twin: Any, one: Any, points: tuple[str, ...], floors: Any) -> None:
        """As the audit's; a twin's log-probabilities at the given ids are kept."""
        if mode == "free":
            logits = self.get("twin", "logits", one.phase, one.step)
            self._twins.append([_at(logits[b, s], row.ids) for b, s, row, _ in self._given(one.phase, one.step)])
        super()._add_floor(mode, number, twin, one, points, floors)

    def _noise(self, one: Any, found: Any) -> None:
        """The twins, then every given row beside what they and the reference say."""
        self._twins = []
        super()._noise(one, found)
        logits = self.get("reference", "logits", one.phase, one.step)
        rows = []
        for n, (b, s, row, following) in enumerate(self._given(one.phase, one.step)):
            want = logits[b, s].double().log_softmax(-1)
            rest = want.clone()
            rest[row.ids] = -math.inf
            left = int(rest.argmax())
            rows.append(Seen(b, s, row, following, want[row.ids], torch.stack([twin[n] for twin in self._twins]), float(rest[left]), left, -math.log(len(want))))
        self.seen[one.phase, one.step] = rows

    def rows(self, phase: str, steps: tuple[int, int] | None = None) -> list[Seen]:
        """Given rows of the prefill, or of these decode steps (None: all); s counts from the first step."""
        self.ensure(phase)
        if phase == "prefill":
            return self.seen.get((phase, None), [])
        first, last = steps or (0, self.plan.steps - 1)
        return [replace(one, s=step - first) for step in range(first, last + 1) for one in self.seen.get((phase, step), [])]

    def uncovered(self) -> tuple[str, ...]:
        return tuple(point for point in self.asked_points if point != "logits")

    def rows_shown(self, phase: str) -> tuple[int, int]:
        """Rows of a phase that were given, and that a server could have given: what comes after a sequence's last token is seldom one."""
        given = self.production.given
        most = self.plan.steps if self.plan.steps < steps_of(given) else None  # fewer steps were asked for than the file has
        have = could = 0
        for one in given:
            last = len(one.tokens) - (max(one.rows) < len(one.tokens) - 1)
            first, end = (0, min(len(one.prompt), last)) if phase == "prefill" else (len(one.prompt), last if most is None else min(last, len(one.prompt) + most))
            have += sum(first <= at < end for at in one.rows)
            could += max(0, end - first)
        return have, could

    def rows_missing(self, absent: Sequence[str] = ()) -> str:
        """`; prefill not shown; 1 of 8 decode rows`; empty where every row is there. absent: phases asked for, of which the file holds nothing."""
        said = []
        for phase in (*self.plan.phases, *absent):
            have, could = self.rows_shown(phase)
            if not have:
                said.append(f"; {phase} not shown")
            elif have < could:
                said.append(f"; {have} of {could} {phase} rows")
        return "".join(said)

    def share_shown(self, phase: str) -> float:
        """Of the asked points times the rows of a phase, how many were given: logits are one point."""
        have, could = self.rows_shown(phase)
        return have / max(could, 1) / max(len(self.asked_points), 1)

    def measurements(self) -> list[Measurement]:
        """How far the given rows are from the reference, without an opinion."""
        found = []
        for phase in self.plan.phases:
            rows = self.rows(phase)
            if rows and phase in self.done:
                least = _least(rows)
                errors = sorted(one.error(one.row.logprobs, least) for one in rows)
                cost = max(_cost(self, one, least) for one in rows)
                found.append(Measurement("logprobs", phase=phase, point="logits", values={
                    "rows": len(rows), "whole_vocabulary": sum(one.row.full for one in rows), "ids": sum(len(one.row.ids) for one in rows), "worst": errors[-1],
                    "typical": errors[len(errors) // 2], "written": self.rounding.words, "rounding_costs": cost,
                }))  # fmt: skip
        return found


def _at(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.double().log_softmax(-1)[ids]


def _least(rows: Sequence[Seen]) -> float:
    """No row is measured by less than the typical one."""
    units = sorted(one.unit for one in rows)
    return units[len(units) // 2]


def _cost(audit: LogitsAudit, one: Seen, least: float) -> float:
    """What the rounding of the given numbers may add to a row's error."""
    half = audit.rounding.half_step(one.row.numbers[one.row.numbers.isfinite()])
    return float(half.square().mean().sqrt()) / max(one.unit, least, 1e-12) if len(half) else 0.0


def _median(values: Sequence[float]) -> float:
    known = sorted(value for value in values if not math.isnan(value))
    return known[len(known) // 2] if known else math.nan


# ---- gates ----


def _base(gate: str, metric: str, phase: str, case: Case | None = None) -> Verdict:
    first, last = (case.steps if case is not None else None) or (None, None)
    return Verdict(gate, "logits", "free", State.NOT_RUN, metric, phase=phase, step_first=first, step_last=last, component="head", why=GATES[gate].why if gate in GATES else "")


def judge_rows(audit: LogitsAudit, case: Case) -> Verdict:
    """Worst and typical row of log-probabilities. A token that the server calls impossible is one the reference must call so too: none."""
    rows = audit.rows(case.phase, case.steps)
    base = _base("logprobs", "worst row, share of its distance from the uniform distribution", case.phase, case)
    if not rows:
        raise NotExposedError(f"log-probabilities of {case.phase}" + (f" steps {case.steps[0]} to {case.steps[1]}" if case.steps else ""))
    gate, least = GATES["logprobs"], _least(rows)
    impossible = [one for one in rows if not bool(one.row.logprobs.isfinite().all())]
    if impossible:
        one = impossible[0]
        ids = one.row.ids[~one.row.logprobs.isfinite()].tolist()
        reason = f"{plural(len(impossible), 'row calls', 'rows call')} tokens impossible, the first {ids[:8]}{' ..' if len(ids) > 8 else ''} at {[one.b, one.s]}: finite masks differ"
        return with_step(replace(base, state=State.FAIL, reason=reason, value=math.inf, spent=math.inf, rows=len(rows), where=[one.b, one.s]), case)
    errors = [one.error(one.row.logprobs, least) for one in rows]
    twins = [[one.error(one.twins[number], least) for one in rows] for number in range(len(rows[0].twins))]
    cost = max(_cost(audit, one, least) for one in rows)
    worst = max(range(len(rows)), key=errors.__getitem__)
    parts = [("worst row", errors[worst], gates.judge(errors[worst], max(map(max, twins)), gate.free + cost, K_FREE, len(rows), "worst row"))]
    if len(rows) >= gates.TYPICAL_ROWS:
        typical = _median(errors)
        parts.append(("typical (median) row", typical, gates.judge(typical, max(map(_median, twins)), gate.typical + cost, K_FREE, len(rows), "typical (median) row")))
    decisive = next((p for _, _, p in parts if p.state is State.FAIL), parts[0][2])
    one, limit = rows[worst], parts[0][2].limit
    over = [at for at, error in enumerate(errors) if not error <= limit] or [worst]
    element = int((one.row.logprobs - one.want).abs().argmax())
    return with_step(replace(
        base, state=decisive.state, reason=decisive.reason, value=errors[worst], limit=limit, spent=max(p.spent for _, _, p in parts), floor=max(map(max, twins)), k=K_FREE,
        eps=gate.free + cost, rows=len(rows), where=[one.b, one.s], element=[one.b, one.s, int(one.row.ids[element])], got=float(one.row.logprobs[element]), want=float(one.want[element]),
        numbers=gates.numbers_of(*parts), details={"first": [rows[over[0]].b, rows[over[0]].s], "rows_over": sum(not error <= limit for error in errors), "written": audit.rounding.words, "rounding_costs": cost},
    ), case)  # fmt: skip


def judge_spread(audit: LogitsAudit, phase: str, gate: str) -> Verdict:
    """One number of all rows: `logprobs.scale`, 1 but for a temperature; `logprobs.offset`, 0 but for another normaliser. Medians: a flipped row moves none."""
    rows = audit.rows(phase)
    measure: Callable[[Seen, Tensor], float] = (lambda one, got: one.slope(got) - 1) if gate == "logprobs.scale" else (lambda one, got: one.offset(got))
    what = {"logprobs.scale": "slope against the reference's log-probabilities, off 1 by", "logprobs.offset": "mean difference from the reference's log-probabilities, nats"}[gate]
    rows = [one for one in rows if bool(one.row.logprobs.isfinite().all()) and (gate != "logprobs.scale" or len(one.row.ids) > 1)]
    if not rows:
        raise NotExposedError(f"log-probabilities of {'two tokens of a row' if gate == 'logprobs.scale' else 'a row'} in {phase}")
    value = _median([measure(one, one.row.logprobs) for one in rows])
    floor = max(abs(_median([measure(one, one.twins[number]) for one in rows])) for number in range(len(rows[0].twins)))
    cost = max(abs(_median([measure(one, audit.rounding.rounded(one.want, at / GRIDS)) for one in rows])) for at in range(GRIDS))
    eps = GATES[gate].free + cost
    if cost > GATES[gate].free:
        reason = f"numbers are written with {audit.rounding.words}: on the reference's own values that alone is worth {cost:.2g}, more than the {GATES[gate].free:g} that is asked; next: answers with more digits, or more of them"
        return replace(_base(gate, what, phase), reason=reason, rows=len(rows), details={"signed": value, "rounding_costs": cost})
    judged = gates.judge(abs(value), floor, eps, K_FREE, len(rows), what)
    because = ""
    if judged.state is State.FAIL and _explains(rows, 1 + value if gate == "logprobs.scale" else 1.0):
        if gate == "logprobs.offset":
            because = f"probabilities are {math.exp(value):.3g} times the reference's: the softmax ran over another vocabulary, or again after a filter"
        elif value > -1:
            because = f"a temperature of {1 / (1 + value):.3g} would do that"
    return replace(
        _base(gate, what, phase), state=judged.state, reason="; ".join(filter(None, [judged.reason, because])), value=abs(value), limit=judged.limit, spent=judged.spent, floor=floor, k=K_FREE, eps=eps,
        rows=len(rows), details={"signed": value, "because": because, "rounding_costs": cost},
    )  # fmt: skip


def _explains(rows: Sequence[Seen], slope: float) -> bool:
    """Whether the reference's log-probabilities times `slope`, and an offset of each row's own, leave at most half of what is off in the typical
    row, and of what is there at all: a row of another token has no slope worth a name."""
    shares = []
    for one in rows:
        if len(one.row.ids) > 1:
            got = one.row.logprobs
            off = got - slope * one.want
            after, before, there = (float(x.square().mean().sqrt()) for x in (off - off.mean(), got - one.want, got - got.mean()))
            shares.append(after / max(min(before, there), 1e-12))
    return bool(shares) and _median(shares) <= 0.5


def judge_sums(audit: LogitsAudit, phase: str) -> Verdict:
    """A whole vocabulary's probabilities sum to 1, those of a part of it to less by what the reference leaves to the others."""
    rows = audit.rows(phase)
    if not rows:
        raise NotExposedError(f"log-probabilities of {phase}")
    wrong = []
    for one in rows:
        total = float(one.row.logprobs.exp().sum())
        cost = 2 * float((audit.rounding.half_step(one.row.numbers) * one.row.logprobs.exp()).nan_to_num(0.0).sum()) + 1e-5
        left = 1.0 - float(one.want.exp().sum())  # the reference's, to ids that were not given
        if total > 1 + cost or (one.row.full and total < 1 - cost) or (not one.row.full and total >= 1 - cost and left > SURE * cost):
            wrong.append((one, total, left))
    judged = gates.judge_exact(len(wrong), len(rows), "rows sum to what they cannot")
    base = _base("logprobs.sum", "rows whose probabilities sum wrong", phase)
    where, reason, because = [], judged.reason, ""
    if wrong:
        one, total, left = wrong[0]
        where = [one.b, one.s]
        because = f"at {where} {plural(len(one.row.ids), 'token')} sum to {total:.6g}, the reference gives {1 - left:.6g} to them: another vocabulary was normalised over"
        reason += f"; {because}"
    return replace(base, state=judged.state, reason=reason, value=float(len(wrong)), limit=0.0, spent=judged.spent, rows=len(rows), where=where, why="probabilities sum to 1", details={"because": because})


def judge_likeliest(audit: LogitsAudit, phase: str) -> Verdict:
    """The likeliest token of every row that tells it: a flip is allowed within the margin of `evaluate.judge_flips`."""
    rows = [one for one in audit.rows(phase) if one.top() is not None]
    if not rows:
        raise NotExposedError(f"likeliest tokens of {phase}")
    margin = _margin(audit)
    flips, beyond = 0, []
    for one in rows:
        best = float(max(float(one.want.max()), one.left))
        gap = best - float(one.want[0])  # row.ids fall
        flips += gap > 0
        if not gap <= margin:
            beyond.append((one, gap))
    judged = gates.judge_exact(len(beyond), len(rows), "rows flip beyond the margin")
    return replace(
        _base("logits.top1", "flips beyond the margin", phase), state=judged.state, reason=judged.reason + (f"; first at {[beyond[0][0].b, beyond[0][0].s]}, margin {beyond[0][1]:.3g} > {margin:.3g}" if beyond else ""),
        value=float(len(beyond)), limit=0.0, spent=judged.spent, rows=len(rows), near_ties=flips - len(beyond), why="a flip needs an error of half the margin on both tokens",
        where=[beyond[0][0].b, beyond[0][0].s] if beyond else [], details={"flips": flips, "allowed_margin": margin, "largest_margin": max((gap for _, gap in beyond), default=0.0)},
    )  # fmt: skip


def judge_top_sets(audit: LogitsAudit, phase: str) -> Verdict:
    """The set of likeliest tokens: nothing left out is likelier by the reference than what was taken, by more than the margin."""
    rows = [one for one in audit.rows(phase) if (index := one.top()) is not None and len(index) > 1]
    if not rows:
        raise NotExposedError(f"likeliest tokens of {phase}, more than one of a row")
    margin = _margin(audit)
    near, beyond = 0, []
    for one in rows:
        index = one.top()
        assert index is not None
        inside = torch.zeros(len(one.row.ids), dtype=torch.bool)
        inside[index] = True
        others = one.want[~inside]
        out, out_id = one.left, one.left_id
        if one.row.full and len(others) and float(others.max()) > out:
            out, out_id = float(others.max()), int(one.row.ids[~inside][others.argmax()])
        gap = out - float(one.want[inside].min())
        near += 0 < gap <= margin
        if not gap <= margin:
            beyond.append((one, out_id, gap))
    judged = gates.judge_exact(len(beyond), len(rows), "rows list other likeliest tokens")
    return replace(
        _base("logits.topk", "sets beyond the margin", phase), state=judged.state, value=float(len(beyond)), limit=0.0, spent=judged.spent, rows=len(rows), near_ties=near,
        reason=judged.reason + (f"; at {[beyond[0][0].b, beyond[0][0].s]} token {beyond[0][1]} is left out, by {beyond[0][2]:.3g} > {margin:.3g} nats" if beyond else ""),
        why="a set may differ only by tokens within the margin of a flip", where=[beyond[0][0].b, beyond[0][0].s] if beyond else [], details={"allowed_margin": margin},
    )  # fmt: skip


def _margin(audit: LogitsAudit) -> float:
    floor = audit.floor("free", "logits")
    cost = float(audit.rounding.half_step(torch.cat([row.numbers for one in audit.production.given for row in one.rows.values()])).max())
    return flip_margin(floor) + 2 * cost


JUDGES: Mapping[str, Callable[[LogitsAudit, str], Verdict]] = {
    "scale": lambda audit, phase: judge_spread(audit, phase, "logprobs.scale"),
    "offset": lambda audit, phase: judge_spread(audit, phase, "logprobs.offset"),
    "sum": judge_sums,
    "likeliest": judge_likeliest,
    "top": judge_top_sets,
}
