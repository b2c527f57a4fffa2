"""Two runs side by side: what became red or green, which budgets crept, which tolerances, kernels and machines are others.

    python -m reports --compare A.jsonl B.jsonl [--html DIR]     a table; A is the baseline
    python -m reports B.jsonl --baseline A.jsonl                 the same inside B's report, section "trend"

A gate is the same in both where gate, point, mode, phase, layer and steps are (several of one name: by test, then in order), a
number where its name is too. Runs of another checkpoint, prompt, length, layers or device are not comparable: their gates are not
compared, and that is what is said. A pure function of records; nothing here judges a run. Tests: parity/unit/test_trend.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from probes.core.records import Header, Kernel, Measurement, Record, State, Summary, Verdict, accepted, to_wire, verdicts
from reports import words
from reports.words import plural

CREPT_TIMES, CREPT_SHARE, CREPT_BY = 2.0, 0.10, 0.1  # a budget crept: more than twice as much and above 10 % of its limit, or +10 points
# What has to be alike for numbers to mean the same thing; the rest of the header may differ and is listed.
ALIKE = {
    "checkpoint_hash": "checkpoint bytes", "prompts": "prompts", "tokens": "prompt tokens", "steps": "decode steps", "layers": "layers judged",
    "phases": "phases", "device": "device", "seed": "seed",
}  # fmt: skip
LISTED = {"production": "production", "commit": "commit", "dirty": "uncommitted changes", "variants": "kernel variants", "decode": "decode", "policy": "rounding points", "max_context": "max context", "inject": "planted fault", "checkpoint": "checkpoint folder", "redacted": "redacted"}
WORTH = {  # measurements that people follow, by name: keys; the time always, the others where they moved by more than 1 %
    "seconds": ("seconds",), "logits": ("kl_mean", "kl_max", "top1_agreement"), "recall": ("mean", "worst"),
    "memory.footprint": ("kv_gb", "buffers_gb"), "memory.rate": ("bytes_per_token", "constant_bytes"), "memory.slope": ("last_mb", "state_growth_bytes", "live_growth_bytes", "host_growth_bytes"),
}  # fmt: skip
MOVED = 0.01
CUT_OFF = "cut off"
WIDTH = 160  # of a table in a file or a pipe
SHOWN = 12  # rows of a group in the terminal; the page shows more
R = TypeVar("R")


# ---- what came out ----


@dataclass(frozen=True)
class Change:
    """A gate, or one number of it, in both runs; before or after is None where the run has no such gate. index: its place in the newer run.

    one_of   which of several gates with the same place and name it is: what their test's ids do not share, else its number among them
    """

    before: Verdict | None
    after: Verdict | None
    number: str = ""
    was: str = ""
    now: str = ""
    index: int | None = None
    weight: float = 0.0
    one_of: str = ""

    @property
    def verdict(self) -> Verdict:
        """The newer one that exists."""
        one = self.after if self.after is not None else self.before
        assert one is not None
        return one

    @property
    def place(self) -> str:
        """Point, mode, phase and steps in words; of several gates of one name, which."""
        v = self.verdict
        return ", ".join(filter(None, [v.point, v.mode, v.phase or "", words.steps(v.step_first, v.step_last), self.one_of]))


@dataclass(frozen=True)
class Fact:
    """Something that differs, in words."""

    name: str
    was: str
    now: str
    note: str = ""


@dataclass
class Comparison:
    """Everything that two runs' records say of each other. red .. better: gates; tolerances .. measured: facts."""

    baseline: Header
    newer: Header
    ended: tuple[str, str]  # verdict of the last line, or cut off
    obstacles: list[Fact] = field(default_factory=list)
    gates: int = 0
    numbers: int = 0
    red: list[Change] = field(default_factory=list)
    mended: list[Change] = field(default_factory=list)
    still_red: list[Change] = field(default_factory=list)
    unjudged: list[Change] = field(default_factory=list)
    judged: list[Change] = field(default_factory=list)
    gone: list[Change] = field(default_factory=list)
    added: list[Change] = field(default_factory=list)
    crept: list[Change] = field(default_factory=list)
    better: list[Change] = field(default_factory=list)
    waivers: list[Change] = field(default_factory=list)
    tolerances: list[Fact] = field(default_factory=list)
    kernels: list[Fact] = field(default_factory=list)
    surroundings: list[Fact] = field(default_factory=list)
    measured: list[Fact] = field(default_factory=list)

    @property
    def groups(self) -> list[tuple[str, str, list[Change]]]:
        """Gates by what happened to them: id, heading, changes; what is worst first."""
        return [
            ("red", "new red", self.red), ("unjudged", "no longer judged", self.unjudged), ("gone", "gone: only in the baseline", self.gone),
            ("crept", "budgets that crept", self.crept), ("still-red", "red in both", self.still_red), ("waivers", "waiver changed", self.waivers),
            ("mended", "mended", self.mended), ("judged", "newly judged", self.judged), ("added", "new: only in this run", self.added), ("better", "budgets that recovered", self.better),
        ]  # fmt: skip

    @property
    def facts(self) -> list[tuple[str, str, list[Fact]]]:
        return [("tolerances", "tolerances that changed", self.tolerances), ("kernels", "kernels that changed", self.kernels), ("surroundings", "run and machine", self.surroundings), ("measured", "measured", self.measured)]

    @property
    def comparable(self) -> bool:
        return not self.obstacles

    @property
    def sentence(self) -> str:
        """The comparison in one line."""
        if self.obstacles:
            return f"not comparable, for other {', '.join(f'{o.name} ({o.was} → {o.now})' for o in self.obstacles)}: no gate was compared"
        if not self.gates:
            return "nothing was compared: no gate was judged in both runs" + self._rest()
        cut = [name for name, end in zip(("the baseline", "this run"), self.ended, strict=True) if end == CUT_OFF]
        compared = f"{self.gates:,} gate{'s' * (self.gates != 1)} and {self.numbers:,} number{'s' * (self.numbers != 1)} compared" + (f"; {' and '.join(cut)} was cut off" if cut else "")
        counts = [(self.red, "new red"), (self.mended, "mended"), (self.still_red, "red in both"), (self.unjudged, "no longer judged"), (self.gone, "gone"), (self.judged, "newly judged"), (self.added, "new"), (self.waivers, "with another waiver")]
        said = [f"{len(found):,} {name}" for found, name in counts if found]
        said += [plural(len(self.crept), "budget") + " crept"] if self.crept else []
        said += [plural(len(self.better), "budget") + " recovered"] if self.better else []
        said += [plural(len(self.tolerances), "tolerance") + " changed"] if self.tolerances else []
        said += [plural(len(self.kernels), "kernel") + " changed"] if self.kernels else []
        return (", ".join(said) if said else "no difference") + f"; {compared}"

    def _rest(self) -> str:
        alone = [f"{len(found):,} {name}" for found, name in ((self.unjudged, "no longer judged"), (self.gone, "gone"), (self.judged, "newly judged"), (self.added, "new")) if found]
        return f" ({', '.join(alone)})" if alone else ""


# ---- comparing ----


def compare(before: list[Record], after: list[Record]) -> Comparison:
    """The newer run against its baseline. Both start with their header, as read_run gives them."""
    old, new = before[0], after[0]
    assert isinstance(old, Header)
    assert isinstance(new, Header)
    out = Comparison(old, new, (_verdict_of(before), _verdict_of(after)))
    same_part = old.layers_run == new.layers_run  # of the checkpoint: the hash is of the layers that were read
    out.obstacles = _header_facts(old, new, {name: title for name, title in ALIKE.items() if same_part or name != "checkpoint_hash"})
    out.surroundings = _header_facts(old, new, LISTED) + _environment(old, new)
    matched = _pairs(verdicts(before), verdicts(after), _gate_key, _test_id)
    pairs = list(matched)
    _tolerances(out, [(a, b) for a, b in pairs if a is not None and b is not None])
    out.kernels = _kernels(before, after)
    if out.comparable:
        places = {id(v): i for i, v in enumerate(verdicts(after))}
        for a, b in pairs:
            _gate(out, a, b, places.get(id(b)))
        for changes in (out.red, out.crept, out.better, out.still_red):
            changes.sort(key=lambda change: -change.weight)
        for _, _, changes in out.groups:
            changes[:] = _told_apart(changes)
        out.measured = _measured(before, after)
    return out


def _told_apart(changes: list[Change]) -> list[Change]:
    """The changes; those of the same gate, place and number say which of them they are."""
    alike: dict[Hashable, list[int]] = {}
    for i, change in enumerate(changes):
        alike.setdefault((change.verdict.gate, change.place, change.number), []).append(i)
    out = list(changes)
    for places in alike.values():
        ids = [changes[i].verdict.test_id.partition("::")[2] or changes[i].verdict.test_id for i in places]
        for n, (i, name) in enumerate(zip(places, ids, strict=True), 1):
            if len(places) > 1:
                out[i] = replace(changes[i], one_of=words.cut(name, 120) if ids.count(name) == 1 and name else f"number {n} of {len(places)}")
    return out


def _verdict_of(records: list[Record]) -> str:
    last = records[-1]
    return last.verdict if isinstance(last, Summary) else CUT_OFF


def _header_facts(old: Header, new: Header, names: dict[str, str]) -> list[Fact]:
    return [Fact(title, _said(getattr(old, name)), _said(getattr(new, name))) for name, title in names.items() if to_wire(getattr(old, name)) != to_wire(getattr(new, name))]


def _said(value: Any) -> str:
    if value in (None, "", []):
        return "none"
    if isinstance(value, list):
        value = words.runs(value) if all(type(one) is int for one in value) and value == sorted(set(value)) else ", ".join(map(words.anything, value))
    return words.cut(words.anything(value), 200)


def _environment(old: Header, new: Header) -> list[Fact]:
    keys = dict.fromkeys([*old.environment, *new.environment])
    return [Fact(key, _said(old.environment.get(key)), _said(new.environment.get(key))) for key in keys if to_wire(old.environment.get(key)) != to_wire(new.environment.get(key))]  # as written: NaN is NaN


def _gate_key(v: Verdict) -> Hashable:
    return v.gate, v.point, v.mode, v.phase, v.layer, v.step_first, v.step_last


def _test_id(v: Verdict) -> Hashable:
    return v.test_id


def _pairs(before: Iterable[R], after: Iterable[R], key: Callable[[R], Hashable], finer: Callable[[R], Hashable] = lambda _: None) -> Iterable[tuple[R | None, R | None]]:
    """Records matched by key; where several share one, those of one `finer` key first, in order, then the rest in order."""
    sides: list[dict[Hashable, list[R]]] = [{}, {}]
    for side, records in zip(sides, (before, after), strict=True):
        for record in records:
            side.setdefault(key(record), []).append(record)
    for one in dict.fromkeys([*sides[1], *sides[0]]):
        old, new = list(sides[0].get(one, ())), list(sides[1].get(one, ()))
        left: list[R] = []
        for record in new:
            match = next((i for i, other in enumerate(old) if finer(other) == finer(record)), None)
            if match is None:
                left.append(record)
            else:
                yield old.pop(match), record
        for i in range(max(len(old), len(left))):
            yield old[i] if i < len(old) else None, left[i] if i < len(left) else None


def _gate(out: Comparison, a: Verdict | None, b: Verdict | None, index: int | None) -> None:
    """Sort one gate into the groups."""
    if a is None or b is None:
        (out.added if a is None else out.gone).append(Change(a, b, was=_state(a), now=_state(b), index=index))
        return
    change = Change(a, b, was=_state(a), now=_state(b), index=index, weight=_finite(b.spent))
    if to_wire(a.waiver) != to_wire(b.waiver):
        out.waivers.append(Change(a, b, was=_said(a.waiver), now=_said(b.waiver), index=index))
    ran = (a.state is not State.NOT_RUN, b.state is not State.NOT_RUN)
    if ran == (False, False):
        return
    if ran == (True, False):
        out.unjudged.append(change)
    elif ran == (False, True):
        out.judged.append(change)
        if b.state is State.FAIL:
            out.red.append(change)
    else:
        out.gates += 1
        red = (a.state is State.FAIL, b.state is State.FAIL)
        group = {(False, True): out.red, (True, False): out.mended, (True, True): out.still_red}.get(red)
        if group is not None:
            group.append(change)
        _budgets(out, a, b, index)


def _state(v: Verdict | None) -> str:
    """State, and what it spent."""
    if v is None:
        return words.DASH
    if v.state is State.NOT_RUN:
        return "not run" + (f": {words.cut(v.reason, 120)}" if v.reason else "")
    return f"{v.state.value}" + (f" {words.share(v.spent)}" if v.spent is not None else "") + (" (waived)" if accepted(v) else "")


def _finite(value: float | None) -> float:
    """For sorting: what is no number is worst."""
    return 0.0 if value is None else math.inf if math.isnan(value) else value


def numbers_of(v: Verdict) -> dict[tuple[str, int], dict[str, Any]]:
    """Every number of a gate by its name; a name that comes twice is counted."""
    out: dict[tuple[str, int], dict[str, Any]] = {}
    for one in v.numbers or [{"number": v.metric, "smallest_limit": v.value, "limit": v.limit, "spent": v.spent}]:
        name = str(one.get("number"))
        out[name, sum(other == name for other, _ in out)] = one
    return out


def crept(before: float, after: float) -> bool:
    """A share of a limit that grew by more than noise does; a NaN that was a number did."""
    if math.isnan(after) or math.isnan(before):
        return math.isnan(after) and not math.isnan(before)
    return (after > CREPT_TIMES * before and after > CREPT_SHARE) or after - before > CREPT_BY


def _budgets(out: Comparison, a: Verdict, b: Verdict, index: int | None) -> None:
    """What each number spent of its limit, in both runs."""
    old = numbers_of(a)
    for key, one in numbers_of(b).items():
        other = old.get(key)
        shares = [words.as_number(side.get("spent")) if side is not None else None for side in (other, one)]
        if other is None or shares[0] is None or shares[1] is None:
            continue
        out.numbers += 1
        for group, first, second in ((out.crept, shares[0], shares[1]), (out.better, shares[1], shares[0])):
            if crept(first, second):
                group.append(Change(a, b, key[0], _budget(other), _budget(one), index, _finite(second) - (0.0 if math.isnan(first) else first if math.isfinite(first) else 0.0)))


def _budget(one: dict[str, Any]) -> str:
    return f"{words.share(words.as_number(one.get('spent')))} ({words.number(one.get('smallest_limit'))} of {words.number(one.get('limit'))})"


def _tolerances(out: Comparison, pairs: list[tuple[Verdict, Verdict]]) -> None:
    """Rows of the tolerance table that are others, and limits that are others although the floor and the row are the same."""
    found: dict[tuple[str, str, str, str], int] = {}
    for a, b in pairs:
        if State.NOT_RUN in (a.state, b.state):
            continue
        row = [(v.k, v.eps, v.why) for v in (a, b)]
        if not _alike(row[0][:2], row[1][:2]) or row[0][2] != row[1][2]:
            said = [f"k {words.number(k)}, eps {words.number(eps)}" + (f": {why}" if row[0][2] != row[1][2] else "") for k, eps, why in row]
            key = (b.gate, said[0], said[1], _direction(row[0][:2], row[1][:2]))
            found[key] = found.get(key, 0) + 1
        elif _alike((a.floor,), (b.floor,)):
            old = numbers_of(a)
            for name, one in numbers_of(b).items():
                limits = [words.as_number(side.get("limit")) if side else None for side in (old.get(name), one)]
                if name in old and not _alike(limits[:1], limits[1:]) and _floor_of(a, name[0]) == _floor_of(b, name[0]):
                    key = (f"{b.gate}: {name[0]}", f"limit {words.number(limits[0])}", f"limit {words.number(limits[1])}", _direction(limits[:1], limits[1:]))
                    found[key] = found.get(key, 0) + 1
    out.tolerances = [Fact(gate, was, now, ", ".join(filter(None, [note, plural(count, "gate")]))) for (gate, was, now, note), count in found.items()]


def _floor_of(v: Verdict, number: str) -> Any:
    """The floor that a further number's limit stands on, where its details name one; the worst row's otherwise."""
    return v.details.get("median_floor", v.floor) if number.startswith("typical") else v.floor


def _alike(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Equal, NaN included."""
    return all(x == y or (x is not None and y is not None and math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


def _direction(a: Iterable[float | None], b: Iterable[float | None]) -> str:
    moves = {y > x for x, y in zip(a, b, strict=True) if x is not None and y is not None and x != y}
    return "" if len(moves) != 1 else "looser" if True in moves else "tighter"


def _kernels(before: list[Record], after: list[Record]) -> list[Fact]:
    """Kernels by source, variant and architecture: those that came, went, or were built from other code."""
    sides: list[dict[tuple[str, str, str], dict[str, int]]] = [{}, {}]
    for side, records in zip(sides, (before, after), strict=True):
        for k in records:
            if isinstance(k, Kernel):
                builds = side.setdefault((k.source, k.kernel, k.arch), {})
                builds[k.build] = builds.get(k.build, 0) + k.launches
    out = []
    if bool(sides[0]) != bool(sides[1]):
        counts = ["none recorded" if not side else plural(len(side), "kernel") for side in sides]
        return [Fact("all", counts[0], counts[1])]
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        old, new = sides[0].get(key), sides[1].get(key)
        if old is None or new is None or set(old) != set(new):
            said = [words.DASH if one is None else f"build {', '.join(sorted(one))}" for one in (old, new)]
            out.append(Fact(f"{key[0]}, {key[1]} on {key[2]}", said[0], said[1],"new" if old is None else "no longer run" if new is None else "another build"))
    return out


def _measured(before: list[Record], after: list[Record]) -> list[Fact]:
    """Times, and what moved of the measurements that people follow."""
    out = []
    ends = [records[-1] for records in (before, after)]
    if isinstance(ends[0], Summary) and isinstance(ends[1], Summary):
        out.append(_moved("the whole run, seconds", ends[0].seconds, ends[1].seconds))

    def key(m: Measurement) -> Hashable:
        return m.name, m.layer, m.phase, m.step, m.point, *(str(m.values.get(k)) for k in ("of", "set", "name", "kind", "keys", "k"))

    old, new = ([r for r in records if isinstance(r, Measurement) and r.name in WORTH] for records in (before, after))
    for a, b in _pairs(old, new, key):
        if a is None or b is None:
            continue
        for name in WORTH[b.name]:
            was, now = words.as_number(a.values.get(name)), words.as_number(b.values.get(name))
            if was is None or now is None or (b.name != "seconds" and not _differs(was, now)):
                continue
            where = [b.name, name.replace("_", " ") if name != b.name else "", str(b.values.get("of") or b.values.get("set") or ""), f"layer {b.layer}" if b.layer is not None else "", b.phase or "", f"step {b.step}" if b.step is not None else ""]
            out.append(_moved(", ".join(filter(None, where)), was, now))
    return out


def _differs(was: float, now: float) -> bool:
    if math.isnan(was) or math.isnan(now):
        return math.isnan(was) != math.isnan(now)
    return was != now and (not math.isfinite(was - now) or abs(now - was) > MOVED * abs(was))


def _moved(name: str, was: float, now: float) -> Fact:
    note = f"× {words.number(now / was)}" if was > 0 and now > 0 and math.isfinite(now / was) else ""
    return Fact(name, words.number(was), words.number(now), note)


# ---- in words ----


def text(c: Comparison, names: tuple[str, str]) -> str:
    """A short table for a terminal; plain where the output is none."""
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    console = rich.console.Console(highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(highlight=False, width=WIDTH)

    def say(line: str) -> None:
        console.print(rich.text.Text(words.printable(line)))

    def rows(title: str, heads: list[str], lines: list[list[str]]) -> None:
        drawn = rich.table.Table(*heads, title=rich.text.Text(title), title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        for line in lines[:SHOWN]:
            drawn.add_row(*(rich.text.Text(words.printable(words.cut(cell, 160))) for cell in line))
        console.print(drawn)
        if len(lines) > SHOWN:
            say(f"  and {len(lines) - SHOWN:,} more")

    with console.capture() as captured:
        for side, name, header, verdict in (("baseline", names[0], c.baseline, c.ended[0]), ("run", names[1], c.newer, c.ended[1])):
            say(f"{side}: {name} ({header.started}, commit {header.commit or 'unknown'}{' with changes' if header.dirty else ''}, verdict {verdict})")
        for _, title, changes in c.groups:
            if changes:
                named = any(change.number for change in changes)
                rows(f"{title}: {len(changes):,}", ["gate", "point", *(["number"] if named else []), "baseline", "run"], [[change.verdict.gate, change.place, *([change.number] if named else []), change.was, change.now] for change in changes])
        for _, title, facts in c.facts:
            if facts:
                rows(f"{title}: {len(facts):,}", ["what", "baseline", "run", ""], [[fact.name, fact.was, fact.now, fact.note] for fact in facts])
        say(f"trend: {c.sentence}")
    return captured.get()


def run_file(given: Path) -> Path:
    """A run may be named by its folder."""
    return given / "run.jsonl" if given.is_dir() else given
