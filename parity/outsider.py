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
from parity.outside import OutsideAudit
from parity.traced import TraceAudit, Traced
from probes.core.records import Measurement
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
    group.addoption("--least-coverage", default=None, metavar="PERCENT", help="with one of these doors: where production shows fewer of the asked points, the verdict is incomplete and the exit code 1")
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
    """Points that production does not show, with the tests that would have judged them."""

    tests: dict[str, list[str]] = field(default_factory=dict)

    def add(self, point: str, test: str) -> None:
        self.tests.setdefault(point, []).append(test)

    def measurements(self) -> list[Measurement]:
        """One line a point: how many tests could not judge it."""
        return [Measurement("not covered", layer=layer_of(point), point=point, values={"tests": len(tests), "first": tests[0] if tests else ""}) for point, tests in self.tests.items()]


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
        """How much was covered: full, partial with the count, logits only; and phases of which nothing is shown. absent  those asked that were not run."""
        phases = {phase: shown_in(audit, phase) for phase in audit.plan.phases}
        there = [phase for phase in phases if phases[phase] or begun(audit, phase)]
        missing = "".join(f"; {phase} not shown" for phase in [*(phase for phase in phases if phase not in there), *absent])
        if self.coverage:
            return self.coverage + missing
        asked = audit.free_points
        shown = [point for point in asked if there and all(point in phases[phase] for phase in there)]
        few = f"; only {shown[0]}" if len(shown) == 1 else ""
        return f"partial: {len(shown)} of {plural(len(asked), 'point')} shown{few}{missing}" if len(shown) < len(asked) or missing or self.not_covered.tests else "full"

    def percent(self, audit: OutsideAudit, absent: Sequence[str] = ()) -> float:
        """Of the asked points in the asked phases, how many are shown throughout; a phase that is not shown counts as nothing."""
        asked = len(audit.asked_points if isinstance(audit, LogitsAudit) else audit.free_points) * (len(audit.plan.phases) + len(absent))
        return 100 * sum(len(shown_in(audit, phase)) for phase in audit.plan.phases) / max(asked, 1)


def shown_in(audit: OutsideAudit, phase: str) -> frozenset[str]:
    """Points that production shows in every pass of a phase."""
    if isinstance(audit, TraceAudit):
        keys = [key for key in audit.order if key[0] == phase]
        return frozenset(point for point in audit.free_points if keys and all(audit.production.holds(point, *key) for key in keys))
    return frozenset(point for point in audit.free_points if audit.exposes(point))


def begun(audit: OutsideAudit, phase: str) -> bool:
    """Whether production shows anything in any pass of a phase."""
    return isinstance(audit, TraceAudit) and any(audit.production.holds(point, *key) for key in audit.order if key[0] == phase for point in audit.free_points)


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
