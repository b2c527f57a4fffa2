"""The doors for somebody else's production: what `--production`, `--trace` and `--logits` name, opened and described.

    outsider = open_outsider(config, checkpoint_dir, layers, max_context, device)      # None: this project's own production

Which tests of the audit apply is decided here: those that read recorded points. What production does not show is collected
as `NotCovered` and told in the verdict, never passed. Tests: parity/unit/test_examples.py, test_trace_door.py, test_logits_door.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from parity.logits import Answers, LogitsAudit
from parity.outside import NotExposedError, OutsideAudit, where_of
from parity.traced import TraceAudit, Traced
from probes.core.records import Measurement, Record, State, Verdict
from probes.core.trace import PassKey
from probes.core.wording import plural
from probes.outside import deepseek_v4_transformers
from probes.outside.logits import Given
from probes.outside.protocol import accepts, load_factory, wrap
from probes.outside.settings import Settings
from reference.config import InputError, ModelConfig
from reference.formats import NAMED, Policy
from reference.points import layer_of

DOORS = {"production": "--production", "trace_dir": "--trace", "logits": "--logits"}
# Tests that read recorded points only; the others run layers, operations or states of this project's production.
FILES = frozenset({"test_layers.py", "test_logits.py", "test_text.py", "test_visible.py", "test_mixing.py", "test_policy.py"})
RANKS = "test_ranks.py"  # of a trace of several ranks
GENERIC_FILES = frozenset({"test_generic.py"})  # with --reference, and only there
LOGITS_FILES = frozenset({"test_logprobs.py"})  # with --logits, and only there
OPTIONS_OF_OURS = ("decode", "variants", "inject", "faults")


def add_options(group: Any) -> None:
    """The doors on the command line."""
    group.addoption("--production", default=None, metavar="transformers|MODULE:FACTORY", help="audit this model instead of the project's own production (probes/outside/protocol.py)")
    _give_way(group.parser, "--trace", "--pdb-trace")
    group.addoption("--trace", "--trace-dir", dest="trace_dir", default=None, metavar="DIR", help="audit what a trace holds: of probes/capture.py in any engine, or of probes.record; pytest's own --trace is --pdb-trace here")
    group.addoption("--reference", default=None, metavar="MODULE:FACTORY", help="another model stands for the reference: --production may be no DeepSeek-V4, and the generic part judges it (parity/generic.py)")
    group.addoption("--dtype", default=None, metavar="fp32|bf16", help="of --production, where it can choose (default: fp32)")
    group.addoption("--logits", default=None, metavar="FILE.jsonl", help="audit what a server said: token ids and log-probabilities, a sequence a line (docs/your-stack.md)")
    group.addoption("--least-coverage", default=None, metavar="PERCENT", help="with one of these doors: where production shows less of the asked points times passes, the verdict is incomplete and the exit code 1")
    group.addoption("--policy", default=None, metavar="NAME", help=f"where the reference rounds, with one of these doors: {', '.join(NAMED)}, or rounding points with commas (default: what the model or trace declares; --logits: published)")


def _give_way(parser: Any, taken: str, instead: str) -> None:
    """An option of pytest's own gets another name on the command line; its destination stays."""
    for option in (option for group in parser._groups for option in group.options if taken in option.names()):
        action = getattr(option, "_action", None)
        if action is None:  # pytest 8: argparse is filled from these when it parses
            option._long_opts[option._long_opts.index(taken)] = instead
            continue
        table = parser.optparser._option_string_actions
        action.option_strings[action.option_strings.index(taken)] = instead
        table[instead] = table.pop(taken)



@dataclass
class NotCovered:
    """Points that production does not show, with the tests that would have judged them; `why` of those that it shows and nobody can use.

    where   passes that lack a point which others have
    """

    tests: dict[str, list[str]] = field(default_factory=dict)
    where: dict[str, set[PassKey]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def add(self, error: NotExposedError, test: str) -> None:
        self.tests.setdefault(error.point, []).append(test)
        self.where.setdefault(error.point, set()).update(error.keys)
        if error.why:
            self.why.setdefault(error.point, error.why)

    def measurements(self) -> list[Measurement]:
        """One line a point: how many tests could not judge it, in which passes, and why where it is there."""
        found = []
        for point, tests in self.tests.items():
            values: dict[str, Any] = {"tests": len(tests), "first": tests[0] if tests else ""}
            values |= {"where": where_of(sorted(self.where[point], key=str))} if self.where.get(point) else {}
            values |= {"why": self.why[point]} if point in self.why else {}
            found.append(Measurement("not covered", layer=layer_of(point), point=point, values=values))
        return found


@dataclass
class Outsider:
    """One opened door.

    name        for the header; production  the object that stands in the audit for production (probes/outside/protocol.py)
    coverage    "" until points are known to be missing; "logits only" where nothing else can be shown
    """

    name: str
    production: Any
    coverage: str = ""
    kind: type[OutsideAudit] = OutsideAudit
    not_covered: NotCovered = field(default_factory=NotCovered)

    def words(self, audit: OutsideAudit, absent: Sequence[str] = ()) -> str:
        """Of the points of judged layers and the model, what production showed, in which passes; absent: further phases it holds nothing of."""
        if isinstance(audit, LogitsAudit):
            return self.coverage + audit.rows_missing(absent)
        asked = len(audit.free_points)
        shown = {phase: audit.shown_in(phase) for phase in audit.plan.phases}
        missing = "".join(f"; {phase} not shown" for phase in [*(phase for phase in shown if not any(shown[phase])), *absent])
        if self.coverage:
            return self.coverage + missing
        sets = {points for phase in shown.values() for points in phase}
        if len(sets) == 1 and not missing:
            (points,) = sets
            few = f"; only {next(iter(points))}" if len(points) == 1 else ""
            return f"partial: {len(points)} of {plural(asked, 'point')} shown{few}" if len(points) < asked or self.not_covered.tests else "full"
        if not any(any(phase) for phase in shown.values()):
            return f"partial: 0 of {plural(asked, 'point')} shown{missing}"
        said = [_in_phase(phase, passes, f"{asked} points" if number == 0 else str(asked)) for number, (phase, passes) in enumerate((p, s) for p, s in shown.items() if any(s))]
        return f"partial: {'; '.join(said)}{missing}"

    def percent(self, audit: OutsideAudit, absent: Sequence[str] = ()) -> float:
        """Of the asked points times the passes of a phase, how many were shown: the mean over the asked phases, one that is not shown counts as nothing."""
        if isinstance(audit, LogitsAudit):
            shares = [audit.share_shown(phase) for phase in audit.plan.phases]
        else:
            asked = len(audit.free_points)
            shares = [sum(map(len, passes)) / max(asked * len(passes), 1) for passes in (audit.shown_in(phase) for phase in audit.plan.phases)]
        return 100 * sum(shares) / max(len(shares) + len(absent), 1)


def _in_phase(phase: str, passes: Sequence[frozenset[str]], asked: str) -> str:
    """`14 of 56 points in prefill`, `12 to 14 of 56 in 2 of 4 decode steps`."""
    counts = sorted(len(points) for points in passes if points)
    count = f"{counts[0]} of {asked}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]} of {asked}"
    return f"{count} in " + (phase if phase == "prefill" else plural(len(passes), "decode step") if len(counts) == len(passes) else f"{len(counts)} of {plural(len(passes), 'decode step')}")


def unusable(audit: OutsideAudit) -> str:
    """Points that production showed and nobody can use, in one line: the first with its reason, and how many more. Empty: none."""
    order = {point: n for n, point in enumerate(audit.free_points)}
    found: dict[str, str] = {}
    for (_, _, point), why in sorted(audit.refused.items(), key=lambda item: (order.get(item[0][2], -1), audit.order.index(item[0][:2]))):
        found.setdefault(point, why)
    if not found:
        return ""
    first = next(iter(found))
    return f"{first}: {found[first]}: not judged" + (f"; nor {plural(len(found) - 1, 'more point')} that cannot be used" if len(found) > 1 else "")


def over_and_not_judged(records: Sequence[Record]) -> list[str]:
    """What a measurement of every decode step found over a gate's limit, where no gate says so: a pass cannot stand beside it."""
    red = [v for v in records if isinstance(v, Verdict) and v.state is State.FAIL and v.phase == "decode"]
    found = []
    for m in records:
        if not isinstance(m, Measurement) or m.name not in ("drift layer", "drift steps") or (m.name == "drift steps" and m.point != "logits"):
            continue
        over = m.values.get("first_over")
        step = over.get("step") if isinstance(over, dict) else over
        if step is not None and not any(v.point == m.point and (v.step_first or 0) <= step <= (step if v.step_last is None else v.step_last) for v in red):
            found.append(f"{m.point} is over its limit of {m.values.get('limit')} in decode step {step}, and no gate judged it there")
    return found


def asked(config: pytest.Config) -> str:
    """Which door the command line names; empty: none. Raises InputError on two, or on options that only this project's production has."""
    named = [door for door in DOORS if config.getoption(door, None) is not None]
    if not named:
        for option in ("dtype", "reference", "policy", "least_coverage"):
            if config.getoption(option, None) is not None:
                raise InputError(f"--{option.replace('_', '-')}: it needs {'one of ' + ', '.join(DOORS.values()) if option in ('policy', 'least_coverage') else '--production'}")
        return ""
    if len(named) > 1:
        raise InputError(f"{DOORS[named[0]]} and {DOORS[named[1]]}: one of them")
    if config.getoption("reference", None) is not None:
        _check_generic(config, named[0])
    if named[0] == "logits" and config.getoption("prompt", None):
        raise InputError("--prompt with --logits: the file holds its own tokens")
    for option in OPTIONS_OF_OURS:
        if config.getoption(option, None) is not None:
            raise InputError(f"--{option} with {DOORS[named[0]]}: it is for this project's own production")
    return named[0]


def open_trace(traced: Traced, config: ModelConfig, layers: range) -> Outsider:
    """The trace behind `--trace` in the place of production. Raises InputError."""
    player = traced.player(config, layers)
    return Outsider(player.name, player, kind=TraceAudit)


def open_production(name: str, dtype: str | None, checkpoint_dir: Path, layers: Sequence[int], max_context: int, device: str) -> Outsider:
    """The model behind `--production`. Raises InputError where it is no such model; errors of its own code pass."""
    settings = Settings()
    if name == "transformers":
        model = deepseek_v4_transformers.load(checkpoint_dir, layers=layers, max_context=max_context, device=device, dtype=dtype or "fp32")
    else:
        with settings.theirs():
            factory = load_factory(name)
        given = {"layers": layers, "max_context": max_context, "device": device} | ({} if dtype is None else {"dtype": dtype})
        taken = accepts(factory, given)
        if dtype is not None and "dtype" not in taken:
            raise InputError(f"--dtype {dtype}: {name} takes none")
        with settings.theirs():
            made = factory(checkpoint_dir, **taken)
        model = wrap(made, layers, settings=settings)
    model.config = ModelConfig.from_dir(checkpoint_dir)
    return Outsider(model.name, model)


def _check_generic(config: pytest.Config, door: str) -> None:
    """What `--reference` goes with. Raises InputError."""
    if door != "production":
        raise InputError(f"--reference with {DOORS[door]}: it stands beside --production")
    if config.getoption("production") == "transformers":
        raise InputError("--production transformers with --reference: that name is transformers' DeepSeek-V4, whose reference is the project's own; next: leave --reference out, or --production package.module:factory")
    if config.getoption("policy", None) is not None:
        raise InputError("--policy with --reference: the other model rounds as it does")
    if not config.getoption("prompt", None):
        raise InputError("--reference needs --prompt FILE.json, a list of token ids")


def policy_of(given: str | None) -> frozenset[str] | None:
    """The rounding points that `--policy` names; None: not given. Raises InputError."""
    if given is None:
        return None
    return Policy.parse(given if given in NAMED else given.split(",")).points


def open_logits(file: str, given: Sequence[Given]) -> Outsider:
    """What a file says, in the place of production; where the server rounds nobody knows."""
    answers = Answers(given, f"logits of {Path(file).name}", NAMED["published"])
    return Outsider(answers.name, answers, coverage="logits only", kind=LogitsAudit)
