"""Words for counts, and for when a red gate starts and how far over its limit it gets; for every room from the probes on.

Standard library only. Tests: parity/unit/test_records.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from probes.core.records import Divergence, State, Verdict, accepted


def plural(count: int, noun: str, many: str = "") -> str:
    """`1 gate`, `2 gates`; many: where an s does not do."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"


def coverage_words(coverage: str) -> str:
    """`partial coverage: 37 of 41 points shown`, `logits only`; empty: all of it, or this project's own production."""
    head, colon, rest = coverage.partition(": ")
    return "" if coverage in ("", "full") else f"{head} coverage{colon}{rest}" if colon else coverage


def named(names: Sequence[str], shown: int = 3) -> str:
    """All of a few names; of many the first, and how many more."""
    return ", ".join(names) if len(names) <= shown + 1 else f"{', '.join(names[:shown])} and {len(names) - shown} more"


# ---- a number beside its limit ----


def share(spent: float) -> str:
    """A finite share of a limit: 0.37 is `37 %`, 41.8 is `42×`. It never rounds onto the limit."""
    percent = 100.0 * spent
    if percent >= 1000:
        return f"{spent:.0f}×" if spent < 1000 else ">999×"
    if 0 < percent < 0.1:
        return "<0.1 %"
    if round(percent) == 100 and percent != 100:
        for digits in (1, 2, 3):
            if float(f"{percent:.{digits}f}") != 100:
                return f"{percent:.{digits}f} %"
        return ">100 %" if percent > 100 else "<100 %"
    return f"{percent:.1f} %" if 0 < percent < 1 else f"{percent:.0f} %"


def beyond(value: float, limit: float, digits: int = 3) -> str:
    """`0.01021 > 0.0102`: a number over its limit, both with as many digits as tell them apart."""
    for more in range(digits, 18):
        shown, bound = f"{value:.{more}g}", f"{limit:.{more}g}"
        if shown != bound:
            return f"{shown} > {bound}"
    return f"{value!r} > {limit!r}"


# ---- a red gate: since when, and how far over its limit ----


def times(spent: float | None) -> str:
    """How far over its limit, as a clause."""
    if spent is None:
        return "over its limit"
    if math.isnan(spent):
        return "not a number where the limit wants one"
    if math.isinf(spent):
        return "infinitely far over its limit (any difference is too much)"
    return f"{spent:.3g} times its limit"


def first_step(verdict: Verdict) -> int | None:
    """The decode step at which a red gate is first over its limit; None: a prefill, or the record does not say."""
    step = verdict.details.get("first_step")
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    return verdict.step_first if verdict.step_first == verdict.step_last else None


def later(verdict: Verdict | None, step: int | None) -> int | None:
    """The step of the gate's number, where that is another one than `step`: its worst row is not its first wrong row."""
    worst = None if verdict is None else verdict.worst_step
    return None if step is None or worst == step else worst


def when(phase: str | None, step: int | None, verdict: Verdict | None = None) -> str:
    """`decode step 1`, or `from decode step 1` where the gate's worst row lies at another step."""
    if phase is None or step is None:
        return phase or ""
    return ("" if later(verdict, step) is None else "from ") + f"{phase} step {step}"


def at_step(text: str, verdict: Verdict, step: int | None) -> str:
    """`28.6 times its limit at step 9`: a gate's number with its step, where `step` is not that."""
    worst = later(verdict, step)
    return text if worst is None else f"{text} at step {worst}"


def over(verdict: Verdict, step: int | None) -> str:
    """How far over its limit, and at which step that is where it is not `step`."""
    return at_step(times(verdict.spent), verdict, step)


def gate_of(first: Divergence, verdicts: Iterable[Verdict]) -> int | None:
    """Which verdict the first divergence stands for: a red one of its place, best one that is first wrong at its step."""
    best: tuple[int, int] | None = None
    for index, v in enumerate(verdicts):
        if v.state is State.FAIL and (v.point, v.phase, v.layer) == (first.point, first.phase, first.layer):
            covers = first.step is None or (v.step_first or 0) <= first.step <= (first.step if v.step_last is None else v.step_last)
            free = v.mode == "free" and first.local is True  # local is told of a gate on the right input
            rank = (8 * accepted(v) + 4 * (first.step != first_step(v)) + 2 * (not covers) + free, index)
            best = rank if best is None else min(best, rank)
    return None if best is None else best[1]


# ---- passes closest to their limit ----


def closest(verdicts: Iterable[Verdict], shown: int = 10) -> list[tuple[int, int]]:
    """Passes that spent most of their limit, one of each point and one of each operation: (place, how many more of it passed).

    Points of the model come first, with room for as many operations judged alone as 2 in 5: their cases are also of variants that
    this run's production does not use. The first one is what a headline names. What held a limit of 0 spent nothing.
    """
    groups: dict[tuple[bool, str], list[tuple[float, int]]] = {}
    for index, v in enumerate(verdicts):
        if v.state is State.PASS and v.spent:
            alone = v.mode == "operation"
            name = v.point.split("[")[0] if alone else v.point.removeprefix(f"layers.{v.layer}.")
            groups.setdefault((alone, name), []).append((math.inf if math.isnan(v.spent) else v.spent, -index))
    ranked = [sorted(((*max(found), len(found) - 1) for (one, _), found in groups.items() if one is alone), reverse=True) for alone in (False, True)]
    room = max(min(2 * shown // 5, len(ranked[1])), shown - len(ranked[0]))
    return [(-index, more) for _, index, more in [*ranked[0][: shown - min(room, len(ranked[1]))], *ranked[1][:room]]]
