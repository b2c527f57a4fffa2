"""The generic part of the audit, for a model that is no DeepSeek-V4: layers, logits, flips, the first divergence.

    pytest parity/ --production mine:factory --reference mine:other_factory --prompt tokens.json --steps 16

Two models behind the protocol of probes/outside/protocol.py take the same tokens, in prefill and step by step; another model stands
for the reference. Point names are free: a table's order is the order of the dataflow, and the points that both tables name are
compared. No checkpoint is read. The floor is the reference itself in FP64, so it holds what its own arithmetic is worth and no more;
where it cannot run in FP64 there is none, and the report says so. mHC, indexer and compressor are not applicable.
Judged by parity/test_generic.py. Tests: parity/unit/test_generic.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from parity import evaluate
from parity.attribution import first_divergence
from parity.audit import Crash, Floor
from parity.evaluate import judge_values, with_step
from parity.foreign import print_stack, raised_at, told
from parity.gates import GATES
from parity.selection import Case, step_groups
from probes.core.records import Divergence, Measurement, Record, State, Verdict
from probes.outside.protocol import Outside, accepts, load_factory, wrap
from probes.outside.settings import Settings
from reference.config import InputError
from reference.points import VALUES, PointSpec, Taps, layer_of

NOT_APPLICABLE = ("mHC", "indexer", "compressor")
MOST_LAYERS = 1024
NARROW = (torch.bfloat16, torch.float16)


# ---- opening ----


def layers_of(model: Any) -> tuple[int, ...]:
    """Layer numbers that the table's `{layer}` stands for: as long as there is such a submodule; else `model.layers`."""
    root = getattr(model, "root", model)
    modules = {name for name, _ in root.named_modules()} if isinstance(root, nn.Module) else set()
    names = [where[0] if isinstance(where, tuple) else where for where in getattr(model, "points", {}).values()]
    found = [n for n in range(MOST_LAYERS) if any("{layer}" in name and name.replace("{layer}", str(n)) in modules for name in names)]
    return tuple(found or range(int(getattr(model, "layers", 0))))


def open_model(name: str, option: str, given: Mapping[str, Any], layers: Sequence[int] | None) -> Outside:
    """The model behind `module:factory`, for free point names. Raises InputError where it is no such model."""
    settings = Settings()
    with settings.theirs():
        factory = load_factory(name, option)
        model = factory(**accepts(factory, given))
    return wrap(model, layers if layers is not None else layers_of(model), any_name=True, settings=settings)


def in_fp64(model: Outside) -> Outside | None:
    """The same model with FP64 parameters; None where it has none that a copy could hold."""
    root = model.root
    if not isinstance(root, nn.Module) or not any(p.is_floating_point() for p in root.parameters()):
        return None
    with model.settings.theirs():
        inner = copy.deepcopy(model.model)  # a cache that lives in the object is the copy's own
    wide = getattr(inner, "root", inner)
    if wide is root:
        raise TypeError("its copy shares the model")
    wide.double()
    return wrap(inner, model.layers, any_name=True, settings=model.settings)


def dtype_of(model: Outside) -> torch.dtype:
    """The narrowest floating type of its parameters."""
    kinds = [p.dtype for p in model.root.parameters() if p.is_floating_point()] if isinstance(model.root, nn.Module) else []
    return min(kinds, key=lambda kind: torch.finfo(kind).bits, default=torch.float32)


def dataflow(points: Sequence[str]) -> list[str]:
    """A table's order, but layer by layer where it names a point of every layer; logits last."""
    first = next((i for i, point in enumerate(points) if layer_of(point) is not None), 0)

    def key(i: int) -> tuple[int, int, int]:
        layer = layer_of(points[i])
        return (3 if points[i] == "logits" else 0 if i < first else 2 if layer is None else 1, layer or 0, i)

    return [points[i] for i in sorted(range(len(points)), key=key)]


# ---- the run ----


@dataclass
class GenericPlan:
    """Prompts, what follows them, phases and steps; one batch."""

    rows: list[tuple[int, ...]]
    continuation: list[tuple[int, ...]]
    phases: tuple[str, ...]
    steps: int
    max_context: int


class ReferenceStoppedError(RuntimeError):
    """The model behind --reference raised."""


@dataclass
class GenericAudit:
    """Both models side by side, a phase when the first test asks for it."""

    reference: Outside
    production: Outside
    plan: GenericPlan
    say: Callable[[str], None] = print
    crash: Crash | None = None
    stopped: str = ""
    no_floor: str = ""
    broken: str = ""  # the reference stopped: nothing can be judged
    named: str = ""  # as --reference names it
    beside: None = None  # no other device
    floors: dict[str, Floor] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    decode_tokens: list[list[int]] = field(default_factory=list)
    values_of: dict[tuple[str, str, int | None, str], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shown = set(self.production.taps.points)
        self.points = tuple(point for point in dataflow(self.reference.taps.points) if point in shown)
        self.layers = tuple(dict.fromkeys(n for point in self.points if (n := layer_of(point)) is not None))
        if not self.layers and len(self.points) < 2:
            raise InputError("--production and --reference: their tables name no common point but logits")
        self.hidden = tuple(point for point in self.reference.taps.points if point not in shown)
        self.batch = len(self.plan.rows)
        if len({len(row) for row in self.plan.rows}) > 1 and not (self.reference.ragged and self.production.ragged):
            raise InputError("--prompt: rows of one length, as the two models take no lengths")
        self.lengths = torch.tensor([len(row) for row in self.plan.rows])
        self.tokens = torch.zeros(self.batch, int(self.lengths.max()), dtype=torch.int64)
        for b, row in enumerate(self.plan.rows):
            self.tokens[b, : len(row)] = torch.tensor(row)
        self.states: dict[str, Any] = {}
        narrow = dtype_of(self.production) in NARROW or dtype_of(self.reference) in NARROW
        self.gate = GATES["generic.narrow" if narrow else "generic"]
        self.wide: Outside | None = None
        try:
            self.wide = in_fp64(self.reference)
            self.no_floor = "" if self.wide is not None else "the reference has no parameters of its own to run in FP64"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever a copy of a foreign model raises
            self.no_floor = f"the reference cannot be copied to FP64: {type(error).__name__}"

    # ---- running ----

    @contextmanager
    def _record(self, who: str, model: Outside, phase: str, step: int | None) -> Iterator[None]:
        def keep(point: str, value: Tensor) -> None:
            self.values_of[who, phase, step, point] = value.detach().to("cpu", torch.float64 if value.dtype == torch.float64 else torch.float32, copy=True)

        with model.taps.observe(list(self.points), keep):
            yield

    def _pass(self, who: str, model: Outside, phase: str, step: int | None, tokens: Tensor) -> None:
        with self._record(who, model, phase, step):
            if phase == "prefill":
                self.states[who] = model.new_state(self.batch, self.plan.max_context)
                model.prefill(tokens, self.states[who], self.lengths)
            else:
                model.decode(tokens, self.states[who])

    def ensure(self, phase: str) -> None:
        """Run what a test of this phase needs, once."""
        if self.broken:
            raise ReferenceStoppedError(self.broken)
        for due in ("prefill", "decode")[: 1 + (phase == "decode")]:
            if due not in self.done and self.crash is None:
                self.done.add(due)
                for step in [None] if due == "prefill" else range(self.plan.steps):
                    self._one(due, step)

    def _one(self, phase: str, step: int | None) -> None:
        if self.crash is not None:
            return
        tokens = self.tokens if step is None else self._next_tokens(step)
        try:
            self._pass("production", self.production, phase, step, tokens)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # production's own, told as such
            print_stack(error)
            self.crash = Crash(phase, step, "free", told(error), raised=raised_at(error))
            return
        try:
            self._pass("reference", self.reference, phase, step, tokens)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            print_stack(error)
            self.broken = f"the reference {Crash(phase, step, 'free', told(error), raised=raised_at(error)).words()}"
            raise ReferenceStoppedError(self.broken) from None
        if self.wide is not None:
            try:
                self._pass("wide", self.wide, phase, step, tokens)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.wide, self.no_floor = None, f"the reference does not run in FP64: {told(error)[:200]}"
                self.floors.clear()
        if self.wide is not None and step is None and not any(value.dtype == torch.float64 for (who, _, _, _), value in self.values_of.items() if who == "wide"):
            self.wide, self.no_floor = None, "the reference cannot be copied to FP64: its calls still run the model that was copied"
            self._pass("reference", self.reference, phase, step, tokens)  # they may have written into its cache
        if self.wide is not None:
            self._add_floor(phase, step)
        if step is None or step + 1 == self.plan.steps:
            self.say(f"{phase}: both models, {len(self.points)} points" + (f", {self.plan.steps} steps" if step is not None else ""))

    def _add_floor(self, phase: str, step: int | None) -> None:
        for point in self.points:
            got, want = (self.values_of.get((who, phase, step, point)) for who in ("wide", "reference"))
            if got is not None and want is not None and got.shape == want.shape:
                floor = self.floors.setdefault(point, Floor())
                if not floor.unit:
                    size = want[self.valid(phase)].double().flatten(1).norm(dim=-1)
                    floor.unit = float(size.median())
                floor.add(got.double(), want.double(), VALUES, want.dim() - 2, self.valid(phase), 0, (phase, step))

    def _next_tokens(self, step: int) -> Tensor:
        """The text's own; past its end the reference's most likely one."""
        before = self.values_of["reference", "prefill" if step == 0 else "decode", None if step == 0 else step - 1, "logits"]
        last = self.lengths - 1 if step == 0 else torch.zeros_like(self.lengths)
        best = before[torch.arange(self.batch), last].argmax(-1)
        tokens = torch.tensor([text[step] if step < len(text) else int(best[b]) for b, text in enumerate(self.plan.continuation)])
        self.decode_tokens.append(tokens.tolist())
        return tokens

    # ---- what the tests read, as of parity/audit.py ----

    def valid(self, phase: str) -> Tensor:
        return torch.arange(self.tokens.shape[1])[None] < self.lengths[:, None] if phase == "prefill" else torch.ones(self.batch, 1, dtype=torch.bool)

    def valid_over(self, phase: str, steps: tuple[int, int] | None) -> Tensor:
        return self.valid(phase) if phase == "prefill" or steps is None else torch.ones(self.batch, steps[1] - steps[0] + 1, dtype=torch.bool)

    def _keys(self, phase: str, steps: tuple[int, int] | None) -> list[int | None]:
        return [None] if phase == "prefill" or steps is None else list(range(steps[0], steps[1] + 1))

    def fired(self, who: str, point: str, phase: str, steps: tuple[int, int] | None) -> int:
        return sum((who, phase, step, point) in self.values_of for step in self._keys(phase, steps))

    def values(self, who: str, point: str, phase: str, steps: tuple[int, int] | None = None) -> Tensor:
        return torch.cat([self.values_of[who, phase, step, point] for step in self._keys(phase, steps)], 1)

    def floor(self, mode: str, point: str) -> Floor:
        """Without an FP64 run an empty one with rows, so that the limit is the table's absolute part alone.

        An element may be off by what the limit allows of a row: FP64 says nothing of a production that is narrower than its reference.
        """
        floor = self.floors.get(point, Floor(rows=1) if self.no_floor else Floor())
        wants = [value for (who, _, _, at), value in self.values_of.items() if (who, at) == ("reference", point)] if point == "logits" else []
        element = self.gate.free * max((float(value.square().mean().sqrt()) for value in wants), default=0.0)
        return replace(floor, absolute=max(floor.absolute, element))

    def coverage_points(self) -> list[tuple[str, str, int | None, str, str]]:
        return [(phase, point, layer_of(point), "free", "production") for phase in self.plan.phases for point in self.points]

    def coverage(self) -> str:
        """What the verdict says of it."""
        return f"generic: {len(self.points)} points of {len(self.layers)} layers and logits; not applicable: {', '.join(NOT_APPLICABLE)}" + (f"; not shown: {len(self.hidden)}" if self.hidden else "")

    def measurements(self) -> list[Measurement]:
        floor = self.no_floor or "the reference in FP64"
        return [Measurement("not applicable", values={"parts": list(NOT_APPLICABLE), "why": "another model stands for the reference", "reference": self.named or self.reference.name, "floor": floor})]


@dataclass(frozen=True)
class GenericCase:
    """One cell: phase, point, step group."""

    phase: str
    point: str
    steps: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        return f"{self.phase}-{self.point}" + (f"-steps{self.steps[0]}to{self.steps[1]}" if self.steps is not None else "")


def cases(audit: GenericAudit) -> list[GenericCase]:
    """Every common point in the order of the reference's table."""
    return [
        GenericCase(phase, point, group) for phase in audit.plan.phases for point in audit.points for group in ((None,) if phase == "prefill" else step_groups(audit.plan.steps))
    ]  # fmt: skip


def judge(audit: GenericAudit, case: GenericCase) -> Verdict:
    """Worst row, norm ratio and typical row, as of a point in the free-running chain."""
    audit.ensure(case.phase)
    first, last = case.steps or (None, None)
    name = re.sub(r"^layers\.\d+\.", "", case.point)
    base = Verdict(
        "generic", case.point, "free", State.NOT_RUN, "worst row rel-L2", layer=layer_of(case.point), phase=case.phase, step_first=first, step_last=last,
        component="head" if case.point == "logits" else name, why=audit.gate.why,
    )  # fmt: skip
    if audit.crash is not None:
        return replace(base, reason=f"production stopped in {audit.crash.phase}: {audit.crash.message}")
    for who in ("production", "reference"):
        expected = 1 if case.steps is None else case.steps[1] - case.steps[0] + 1
        if audit.fired(who, case.point, case.phase, case.steps) < expected:
            return replace(base, reason=f"{case.point} fired {audit.fired(who, case.point, case.phase, case.steps)} of {expected} times in {who}")
    got, want = (audit.values(who, case.point, case.phase, case.steps) for who in ("production", "reference"))
    passes: list[tuple[str, int | None]] = [("prefill", None)] if case.steps is None else [("decode", step) for step in range(case.steps[0], case.steps[1] + 1)]
    spec = PointSpec(name, "", VALUES, max(1, want.dim() - 2), base.component, "")
    valid = audit.valid_over(case.phase, case.steps)
    if said := nothing_said(case.point, got, want, valid):
        return replace(base, reason=said)
    verdict = judge_values(base, spec, audit.gate, "free", got, want, valid, audit.floor("free", case.point), passes)
    return with_step(verdict, Case(case.phase, case.point, "free", base.layer, case.steps))


def nothing_said(point: str, got: Tensor, want: Tensor, valid: Tensor) -> str:
    """Why equal values would say nothing: both models are zero at every element, or no token is likelier than another. Empty: they say something."""
    got, want = got[valid], want[valid]
    if got.shape != want.shape or not want.numel():
        return ""
    if not bool(got.any()) and not bool(want.any()):
        return f"{point} is zero everywhere in both models: nothing was compared"
    if point == "logits" and bool((got == got[..., :1]).all()) and bool((want == want[..., :1]).all()):
        return "logits are the same for every token, in both models: nothing was compared"
    return ""


def judge_flips(audit: GenericAudit, phase: str) -> Verdict:
    """As of any model, but where no token is likelier than another."""
    audit.ensure(phase)
    steps = None if phase == "prefill" else (0, audit.plan.steps - 1)
    seen: Any = audit  # it has what this gate reads
    verdict = evaluate.judge_flips(seen, phase)
    if verdict.state is not State.PASS:
        return verdict
    got, want = (audit.values(who, "logits", phase, steps) for who in ("production", "reference"))
    if said := nothing_said("logits", got, want, audit.valid_over(phase, steps)):
        return replace(verdict, state=State.NOT_RUN, rows=0, value=None, spent=None, reason=said)
    return verdict


def divergence_of(audit: GenericAudit, records: Sequence[Record]) -> Divergence | None:
    """The first point over its limit, in the order of the table; whether it started there is as sure as the table is dense."""
    found = first_divergence(records, audit.points, loaded=audit.crash is None or audit.crash.phase != "load")
    if found is None:
        return None
    at = audit.points.index(found.point) if found.point in audit.points else 0
    because = f"everything up to {audit.points[at - 1]} is within its limit in this pass" if at else ""
    return replace(found, local=None, because="; ".join(filter(None, [found.because, because])), no_repro="a model behind --reference has no operation that runs alone")


def open_audit(production: str, reference: str, given: Mapping[str, Any], plan: GenericPlan, layers: Sequence[int] | None, say: Callable[[str], None]) -> GenericAudit:
    """Both models opened. Raises InputError, also where the reference's factory fails: nothing can be judged. Production's failing is a crash."""
    try:
        wanted = open_model(reference, "--reference", given, layers)
    except (KeyboardInterrupt, InputError):
        raise
    except BaseException as error:
        raise InputError(f"--reference {reference}: its factory raised {told(error)} ({raised_at(error)}); without a reference nothing can be judged") from None
    try:
        judged = open_model(production, "--production", given, layers)
    except (KeyboardInterrupt, InputError):
        raise
    except BaseException as error:
        print_stack(error)
        audit = GenericAudit(wanted, _stopped(production, wanted), plan, say, named=reference)
        audit.crash = Crash("load", None, f"--production {production}", told(error), raised=raised_at(error))
        return audit
    _check_two(production, judged, reference, wanted)
    return GenericAudit(wanted, judged, plan, say, named=reference)


def _check_two(production: str, judged: Outside, reference: str, wanted: Outside) -> None:
    """Two models, not one twice. Two implementations may share their weights. Raises InputError."""

    def storages(model: Outside) -> set[int]:
        return {p.untyped_storage()._cdata for p in model.root.parameters()} if isinstance(model.root, nn.Module) else set()

    one = "object" if judged.model is wanted.model else "module" if judged.root is wanted.root else ""
    alike = type(judged.model) is type(wanted.model) and type(judged.root) is type(wanted.root)
    if not one and alike and storages(judged) and storages(judged) == storages(wanted):
        one = "set of parameters"
    if one:
        raise InputError(f"--production {production} and --reference {reference}: both factories return the same {one}, so anything would pass; next: factories that each build a model of their own")


def _stopped(name: str, like: Outside) -> Any:
    """Stands for a production that could not be opened: every point was asked of it, and none fires."""
    return SimpleNamespace(name=name, model=None, root=None, taps=Taps(like.taps.points), notes=(), ragged=True)

