"""records -> at most ten workflow commands of GitHub Actions, which show on a pull request's files: the first divergence first.

    ::error file=kernels/rope.cu,line=1,title=first divergence%3A layer 2 attn.q::...

A failure that a waiver accepts is a warning; a cut-off run, a gate that was not run and a tap that did not fire are errors, because
they fail the job too. Failures of one point are one line. Pure function of the records; a pass has none.
`python -m reports.ci --annotations` prints them. Tests: parity/unit/test_ci.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from probes.core.records import State
from reports import heat, words
from reports.render import Place, Run, behind_first, divergence_words, outcome_of
from reports.summary import BIDI

MOST = 10  # GitHub shows ten errors and ten warnings of a step, and drops the rest in silence
ELSEWHERE = "dsv4-parity"  # fact of the environment of a run in another repository, which has none of these files
# component, in the words of the fault catalogue -> where a reader starts: the kernel of it, or the file that assembles it
FILES = {
    "attention core": "kernels/sparse_attn.cu",
    "attention projections": "kernels/projections.cu",
    "batching": "production/model.py",
    "checkpoint loading": "production/weights.py",
    "compressor": "kernels/compressor.cu",
    "experts quant": "kernels/experts.cu",
    "graph capture": "production/graph.py",
    "head": "kernels/heads.cu",
    "indexer": "kernels/indexer.cu",
    "KV quant": "kernels/kv_store.cu",
    "memory": "production/cache.py",
    "mHC": "kernels/hyper_connection.cu",
    "MoE router": "kernels/gate.cu",
    "norm": "kernels/rms_norm.cu",
    "rope": "kernels/rope.cu",
    "sink": "kernels/sparse_attn.cu",
    "SWA ring": "production/cache.py",
    "visibility mask": "kernels/sparse_attn.cu",
}


@dataclass(frozen=True)
class Annotation:
    """One line on a file. level is error or warning; file is empty where none is known."""

    level: str
    title: str
    message: str
    file: str = ""

    @property
    def command(self) -> str:
        """The workflow command, in one line whatever the texts hold."""
        properties = {"file": self.file, "line": "1" if self.file else "", "title": self.title}
        shown = ",".join(f"{name}={_property(words.cut(value, 200))}" for name, value in properties.items() if value)
        return f"::{self.level} {shown}::{_data(words.cut(self.message, 1000))}"


def _data(text: str) -> str:
    """As the runner reads the text behind `::`."""
    return BIDI.sub("\ufffd", words.printable(text)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """As the runner reads the value of a property."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def annotate(run: Run) -> list[Annotation]:
    """At most MOST; where there are more, the last says how many are left out."""
    found = list(_all(run))
    if len(found) <= MOST:
        return found
    left_out = found[MOST - 1 :]
    level = "error" if any(one.level == "error" for one in left_out) else "warning"
    return [*found[: MOST - 1], Annotation(level, f"{words.plural(len(left_out), 'more finding')}", f"{words.plural(len(left_out), 'more finding')} in the job summary and in report.html")]


def _all(run: Run) -> Iterable[Annotation]:
    outcome, first = outcome_of(run), divergence_words(run)
    if outcome.verdict == "incomplete":
        yield Annotation("error", "the audit is incomplete", " ".join([outcome.sentence, *outcome.reasons[:5]]))
    if first is not None:
        message = "; ".join(filter(None, [first.where, first.origin, f"component {first.component}", first.over, first.checked, first.first.because]))
        replay = f"\nreplay it alone: {first.first.replay}" if first.first.replay else ""
        level = "warning" if first.index in run.waived else "error"
        yield Annotation(level, f"first divergence: {first.where}", message + replay, _file(run, first.first.component))
    yield from _failures(run, first)
    if outcome.verdict == "fail":  # otherwise the first line has said so
        unjudged: dict[str, int] = {}
        for v in run.verdicts:
            if v.state is State.NOT_RUN:
                unjudged[v.reason or "no reason given"] = unjudged.get(v.reason or "no reason given", 0) + 1
        for reason, count in unjudged.items():
            yield Annotation("error", f"not judged: {words.plural(count, 'gate')}", reason)
        missing = [c for c in run.coverage if c.observed < c.expected]
        if missing:
            c = missing[0]
            yield Annotation("error", f"coverage is missing: {words.plural(len(missing), 'tap')}", f"the first: {c.phase} {c.point} ({c.mode}) fired {c.observed} of {c.expected}")


RELATED = {"behind": ", behind the first divergence", "same": ", of the first divergence's component"}


def _failures(run: Run, first: Place | None) -> Iterable[Annotation]:
    """One a point and phase, counted gates before waived ones, in the run's order; the worst gate speaks for the others.

    Where all of them are behind the first divergence, or of its component, the title says so; what is behind it points at no file.
    """
    skip, behind = None if first is None else first.index, behind_first(run, first)
    groups: dict[tuple[bool, str, str | None], list[int]] = {}
    for i, v in enumerate(run.verdicts):
        if v.state is State.FAIL and i != skip:
            name = v.point.split("[")[0] if v.mode == "operation" else heat.short_name(v.point, v.layer)
            groups.setdefault((i in run.waived, name, v.phase), []).append(i)
    for (waived, name, phase), places in sorted(groups.items(), key=lambda group: group[0][0]):
        index = max(places, key=lambda i: heat.badness(run.verdicts[i]))
        worst, found = run.verdicts[index], {behind.of(i)[0] for i in places}
        kind = "" if "" in found else "behind" if "behind" in found else "same"
        step = words.first_step(worst) if phase == "decode" else None
        step = worst.worst_step if step is None else step
        at = words.when(phase, step, worst)
        number = f"{worst.metric} {words.number(worst.value)}, limit {words.number(worst.limit)}"
        message = "; ".join(filter(None, [f"{worst.point} ({worst.mode}{', ' + at if at else ''})", number, words.over(worst, step), worst.reason, behind.of(index)[1]]))
        title = " ".join(filter(None, [name, phase])) + f": {words.plural(len(places), 'gate')} " + ("failed, waived" if waived else "failed") + RELATED.get(kind, "")
        yield Annotation("warning" if waived else "error", title, f"{message}\nagain: {words.command(worst.test_id, run.header.command)}", "" if kind == "behind" else _file(run, worst.component))


def _file(run: Run, component: str) -> str:
    return "" if ELSEWHERE in run.header.environment else FILES.get(component, "")
