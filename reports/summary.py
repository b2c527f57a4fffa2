"""records -> the summary of a CI job in GitHub-flavoured Markdown: what the report's first screen says, in tables.

Pure function of the records. Text of a record is escaped, so that no name or reason becomes markup or ends a table's cell, and
the whole stays far below the 1 MiB that a step may write. `python -m reports.ci --summary FILE`. Tests: parity/unit/test_ci.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from probes.core.records import State
from reports import words
from reports.render import (
    Run,
    answer_of,
    behind_first,
    counts_of,
    divergence_words,
    environment_of,
    gate_row,
    not_checked,
    outcome_of,
    waiver_words,
)

ROWS = 20  # of each table
CELL = 300  # characters
SIGNS = {"pass": "✅", "fail": "❌", "incomplete": "⚠️"}


BIDI = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # would turn round the text behind it
BREAKS = re.compile(r"@|(?<=:)//|(?<=[Ww])\.|(?<=\bGH)-")  # mentions, addresses and issues that GitHub would link
SIGN = re.compile(r"[&<>\\`*_\[\]!|~$#]|^[-+=]|^\d+(?=[.)](?: |$))")


def line(value: str, limit: int = CELL) -> str:
    """A record's text, cut and in one line."""
    return BIDI.sub("\ufffd", " ".join(words.printable(words.cut(value, limit)).split()))


def text(value: str, limit: int = CELL) -> str:
    """A record's text as plain text: no markup, no link, no mention, no list, no end of a cell."""
    escaped = SIGN.sub(lambda sign: "".join(f"&#{ord(c)};" for c in sign[0]), line(value, limit))
    return BREAKS.sub(lambda sign: f"<!-- -->{sign[0]}<!-- -->", escaped)


def block(value: str, limit: int = 4000) -> list[str]:
    """A command to copy, in a fence longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", value)), default=0))
    return [f"{fence}sh", line(value, limit), fence, ""]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """A table of cells that are Markdown already; the rows behind ROWS are counted."""
    aligned = set(right)
    lines = ["| " + " | ".join(columns) + " |", "|" + "|".join("--:" if i in aligned else ":--" for i in range(len(columns))) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows[:ROWS]]
    return [*lines, "", *([f"… and {words.plural(len(rows) - ROWS, 'more row')} in report.html", ""] if len(rows) > ROWS else [])]


def job_summary(run: Run, title: str = "") -> str:
    """The whole page. title  which job of several it is."""
    outcome, header = outcome_of(run), run.header
    counts, missing = counts_of(run), sum(c.observed < c.expected for c in run.coverage)
    lines = [f"## {SIGNS.get(outcome.verdict, '⚠️')} DeepSeek-V4 parity{f', {text(title)}' if title else ''}: {text(outcome.word)}", "", f"{text(outcome.sentence, 1000)} **{text(answer_of(run, outcome), 1000)}**", ""]
    if header.inject:
        lines += [f"**A fault was planted on purpose: {text(header.inject)}.** This run tests the audit, not the model.", ""]
    lines += _first(run)
    if outcome.reasons:
        lines += [*(f"* {text(reason)}" for reason in outcome.reasons[:5]), *([f"* and {words.plural(len(outcome.reasons) - 5, 'more reason')}"] if len(outcome.reasons) > 5 else []), ""]
    total = [str(counts[State.PASS]), str(counts[State.FAIL]), str(len(run.waived)), str(counts[State.NOT_RUN]), str(len(run.verdicts))]
    lines += ["### Gates", "", *table(["judged", "passed", "failed", "of them waived", "not run", "total"], [*_kinds(run), ["**all**", *(f"**{n}**" for n in total)]], range(1, 6))]
    if run.coverage:
        lines += [f"Taps: {len(run.coverage) - missing} of {len(run.coverage)} fired as often as expected.", ""]
    lines += _failures(run) + _waivers(run) + _closest(run)
    lines += ["### What was not checked", "", *(f"* {text(line)}" for line in not_checked(run)[:ROWS]), ""]
    lines += _facts(run)
    lines += [f"### Run it again{' at commit ' + text(header.commit) if header.commit else ''}", "", *block(header.command)]
    return "\n".join(lines) + "\n"


def _first(run: Run) -> list[str]:
    first = divergence_words(run)
    if first is None:
        return []
    said = "; ".join(text(part) for part in (first.origin, f"component {first.component}", first.over, first.checked) if part)
    lines = [f"**First divergence: {text(first.where)}**; {said}", ""]
    if first.first.because:
        lines += [f"Because: {text(first.first.because, 1000)}", ""]
    if first.first.replay:
        lines += ["That one operation, without the model:", "", *block(first.first.replay)]
    elif first.first.no_repro:
        lines += [f"No repro of it: {text(first.first.no_repro)}", ""]
    return lines


def _kinds(run: Run) -> list[list[str]]:
    """Counts of each phase and mode; what has no phase is an operation alone, or the whole model."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, v in enumerate(run.verdicts):
        groups.setdefault((v.phase or "no phase", v.mode), []).append(i)
    rows = []
    for (phase, mode), places in groups.items():
        states = [run.verdicts[i].state for i in places]
        waived = sum(i in run.waived for i in places)
        rows.append([text(f"{phase}, {mode}"), *(str(n) for n in (states.count(State.PASS), states.count(State.FAIL), waived, states.count(State.NOT_RUN), len(places)))])
    return rows[: ROWS - 1]


def _row(run: Run, index: int) -> list[str]:
    gate = gate_row(run, index)
    v = gate.verdict
    at = " ".join(filter(None, [v.phase, words.steps(v.step_first, v.step_last)])) or words.DASH
    return [text(v.point), text(v.mode), text(at), text(gate.number), text(gate.numbers[0]), text(gate.numbers[1]), text(gate.numbers[2])]


COLUMNS = ["point", "mode", "phase", "number", "smallest passing limit", "limit", "spent"]


def _failures(run: Run) -> list[str]:
    """In the run's order, which is that of the data flow; a waived one is in the table of waivers."""
    failed = [i for i, v in enumerate(run.verdicts) if v.state is State.FAIL and i not in run.waived]
    if not failed:
        return []
    first = divergence_words(run)
    behind = behind_first(run, first)
    said = ["the first divergence" if first is not None and i == first.index else behind.of(i)[1] or words.DASH for i in failed[:ROWS]]
    rows = [[*_row(run, i), text(run.verdicts[i].component), text(relation), text(run.verdicts[i].reason, 160)] for i, relation in zip(failed, said, strict=False)]
    more = [f"… and {words.plural(len(failed) - ROWS, 'more failure')} in report.html", ""] if len(failed) > ROWS else []
    return ["### Failures", "", *table([*COLUMNS, "component", "to the first divergence", "reason"], rows, (4, 5, 6)), *more]


def _waivers(run: Run) -> list[str]:
    given = [i for i, v in enumerate(run.verdicts) if v.waiver is not None]
    if not given and not run.header.waivers:
        return []
    rows = [[text(run.verdicts[i].point), text(run.verdicts[i].phase or words.DASH), text(words.share(run.verdicts[i].spent)), text(waiver_words(run, run.verdicts[i]))] for i in given[:ROWS]]
    more = [f"… and {words.plural(len(given) - ROWS, 'more failure')} with a waiver in report.html", ""] if len(given) > ROWS else []
    told = f"{words.plural(len(run.waived), 'failure is', 'failures are')} accepted."
    terms = [f"* given: {text(words.anything(waiver))}" for waiver in run.header.waivers[:ROWS]]
    return ["### Waivers", "", told, "", *terms, *([""] if terms else []), *(table(["point", "phase", "spent", "waiver"], rows, (2,)) if rows else []), *more]


def _closest(run: Run) -> list[str]:
    """Passes that spent most, each point and operation once."""
    passed = words.closest(run.verdicts, 5)
    rows = [[point + (f" and {more} more of it" if more else ""), *rest] for (point, *rest), more in ((_row(run, i), more) for i, more in passed)]
    return ["### Passes closest to their limit", "", *table(COLUMNS, rows, (4, 5, 6))] if passed else []


def _facts(run: Run) -> list[str]:
    h = run.header
    facts = {
        "commit": (h.commit or "none") + (", with uncommitted changes" if h.dirty else ""), "checkpoint": f"{h.checkpoint}, {h.checkpoint_hash}", "device": h.device,
        "decode": h.decode, "variants": h.variants or words.DASH, "policy": ", ".join(h.policy) or words.DASH, "phases": ", ".join(h.phases), "layers": words.runs(h.layers),
        "prompts": ", ".join(f"{name} ({count} tokens)" for name, count in zip(h.prompts, h.tokens, strict=False)), "steps": str(h.steps),
        "found of planted faults": h.fault_score or words.DASH, **{name: words.anything(value) for name, value in environment_of(h).items()},
    }  # fmt: skip
    rows = [[text(name), text(value)] for name, value in facts.items()]
    seconds = run.summary.seconds if run.summary else 0.0
    return ["<details><summary>Environment</summary>", "", *table(["what", "value"], rows[:ROWS]), *([f"{seconds:.0f} seconds.", ""] if seconds else []), "</details>", ""]
