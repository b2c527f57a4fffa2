"""One audit run: both models side by side over one prompt, everything recorded that the gates will judge.

Four kinds of run, in prefill and at every decode step:
    free        production on its own chain; the reference on its own chain with production's expert ids and selected
                entries replayed, so that what remains is arithmetic
    isolated    each judged layer of production on the reference's own input and state (transplanted before the step)
    twins       the reference with reordered sums, free and isolated: their worst rows are the noise floor
    greedy      a short continuation of both models

Production always runs first. Nothing here says pass or fail: see gates.py and the tests.
Tests: parity/unit/test_audit.py.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from parity.cache import (
    Chain,
    Entry,
    ReferenceCache,
    digest_of,
    pack_floor,
    pack_states,
    trace_of,
    unpack_floors,
    unpack_states,
    values_of,
)
from parity.foreign import print_stack, raised_at, told
from parity.gates import Gate, gate_of
from parity.selection import state_phase
from probes.core.queries import Stored, left_parts
from probes.core.recorder import Recorder
from probes.core.records import Measurement
from probes.core.rows import absent_rows, least_size, replayable, row_errors, rows_of, score_unit
from probes.core.trace import PassKey, Trace, grow_last, join
from reference.points import INDICES, SCORES, VALUES, layer_of, points_of_layer, points_of_model, spec_of, state_parts

TWIN_ORDERS = (1, 2, 3)
KEPT = (".attn.q", ".attn.kv", ".attn.compressor")  # isolated twin values that derived floors need


# ---- noise floors ----


@dataclass
class Floor:
    """Noise of one point and mode over every pass of the run.

    error, norm     worst relative L2 and worst |norm ratio - 1| of a twin's row;  absolute  worst element error
    rows            twin rows seen; 0 means there is no floor
    unit            typical size, of one score (SCORES) or of a free-running row; no row is measured by less. 0: by its own
    errors          relative L2 of every row, by twin, phase and step
    sizes           SCORES: error, norm's error and size of every row of `errors`, [3, rows], per score: the unit may change
    """

    error: float = 0.0
    norm: float = 0.0
    absolute: float = 0.0
    rows: int = 0
    unit: float = 0.0
    errors: dict[int, dict[PassKey, Tensor]] = field(default_factory=dict)
    sizes: dict[int, dict[PassKey, Tensor]] = field(default_factory=dict)

    def typical(self, passes: Sequence[PassKey] | None = None) -> float:
        """The largest median over the twins, of the rows of these passes (None: all)."""
        medians = []
        for by_pass in self.errors.values():
            rows = [by_pass[key] for key in (by_pass if passes is None else passes) if key in by_pass]
            if rows and sum(map(len, rows)):
                medians.append(float(torch.cat(rows).median()))
        return max(medians, default=0.0)

    def add(
        self, got: Tensor, want: Tensor, kind: str, row_dims: int, valid: Tensor, twin: int = 0, key: PassKey = ("prefill", None)
    ) -> None:
        """Take in one pass of one twin. valid [b, s]."""
        if kind == INDICES:
            return
        least = None
        if kind == SCORES:
            width = max(got.shape[-1], want.shape[-1])
            got, want = grow_last(got, width, -torch.inf), grow_last(want, width, -torch.inf)
            seen = want.isfinite() & valid[..., None]
            least = least_size(self.unit, seen)
            got, want = got.masked_fill(~seen, 0.0), want.masked_fill(~seen, 0.0)
        elif self.unit:
            least = torch.full(valid.shape, self.unit, dtype=torch.float64)
        error, norm = row_errors(got, want, row_dims, least)
        use = ~absent_rows(want, row_dims) & _spread(valid, error)
        if use.any():
            difference = (got - want).double().abs().nan_to_num(0.0)
            self.absolute = max(self.absolute, float(difference[_spread(valid, difference)].max()))
            self.error = max(self.error, float(error[use].max()))
            self.norm = max(self.norm, float(norm[use].max()))
            self.rows += int(use.sum())
            self.errors.setdefault(twin, {})[key] = error[use]
            if kind == SCORES:
                size, got_size = (x.double().norm(dim=-1) for x in (want, got))
                parts = torch.stack(((got - want).double().norm(dim=-1), (got_size - size).abs(), size)) / seen.sum(-1).clamp_min(1).sqrt()
                self.sizes.setdefault(twin, {})[key] = parts[:, use]

    def measure_by(self, unit: float) -> None:
        """Measure rows of scores by another typical size than the one that they came with."""
        if unit == self.unit:
            return
        self.unit, self.error, self.norm = unit, 0.0, 0.0
        for twin, by_pass in self.sizes.items():
            for key, (off, off_norm, size) in by_pass.items():
                by = size.clamp_min(unit)
                error, norm = (torch.where(by > 0, x / by.clamp_min(torch.finfo(x.dtype).tiny), torch.where(x > 0, torch.inf, 0.0)) for x in (off, off_norm))
                self.errors[twin][key] = error
                self.error, self.norm = max(self.error, float(error.max())), max(self.norm, float(norm.max()))

    def copy(self) -> Floor:
        """As it is now: what is merged later does not show in it."""
        errors, sizes = ({twin: dict(by_pass) for twin, by_pass in each.items()} for each in (self.errors, self.sizes))
        return replace(self, errors=errors, sizes=sizes)

    def merge(self, other: Floor) -> None:
        """Take in the floor of further passes; of scores, also the typical size that they know."""
        if self.sizes and other.sizes:
            self.measure_by(other.unit)
        self.error, self.norm, self.absolute = max(self.error, other.error), max(self.norm, other.norm), max(self.absolute, other.absolute)
        self.rows += other.rows
        self.unit = self.unit or other.unit
        for twin, by_pass in other.errors.items():
            self.errors.setdefault(twin, {}).update(by_pass)
        for twin, by_pass in other.sizes.items():
            self.sizes.setdefault(twin, {}).update(by_pass)


def _spread(valid: Tensor, like: Tensor) -> Tensor:
    """valid [b, s] over the further axes of `like` [b, s, ...]."""
    return valid.reshape(*valid.shape, *[1] * (like.dim() - 2)).expand(like.shape)


# ---- the run ----


@dataclass
class Plan:
    """What to run.

    rows        token ids of each batch row's prompt; continuation  the text's own tokens after it
    phases      asked phases; steps  decode steps; layers  judged; seed of nothing yet: both models are deterministic
    """

    rows: list[tuple[int, ...]]
    continuation: list[tuple[int, ...]]
    phases: tuple[str, ...]
    layers: tuple[int, ...]
    steps: int
    max_context: int
    checkpoint_dir: str = ""
    greedy_tokens: int = 32


@dataclass
class Crash:
    """Production stopped with an exception: where, the first line of it, the part of the stack that it names or came from, its frame."""

    phase: str
    step: int | None
    where: str
    message: str
    component: str = ""
    raised: str = ""

    def words(self) -> str:
        """In full: `stopped in decode step 3, free: KernelError: no (raised at attention.py:12 in decode)`."""
        at = f"{self.phase}{'' if self.step is None else f' step {self.step}'}"
        return f"stopped in {at}, {self.where}: {self.message}" + (f" (raised at {self.raised})" if self.raised else "")


LOADING = "checkpoint loading"
# Words of a message, a file or a function, and whose they are; the first in this order wins.
CRASHED_IN = (
    ("indexer", "indexer"), ("topk", "indexer"), ("compressor", "compressor"), ("sparse_attn", "attention core"), ("rope", "rope"), ("hyper_connection", "mHC"),
    ("hc_", "mHC"), ("ring", "SWA ring"), ("window", "SWA ring"), ("sink", "sink"), ("expert", "experts quant"), ("swiglu", "experts quant"), ("gate", "MoE router"),
    ("cache.py", "memory"), ("workspace.py", "memory"), ("weights.py", LOADING),
)  # fmt: skip


def component_of_crash(error: BaseException) -> str:
    """What an exception's message names; else what its frames in production are, the innermost first; empty: neither."""
    frames = [f"{Path(f.filename).name} {f.name}" for f in reversed(traceback.extract_tb(error.__traceback__)) if Path(f.filename).parent.name in ("production", "ops")]
    for text in (str(error), *frames):
        for word, component in CRASHED_IN:
            if word in text.lower():
                return component
    return ""


@dataclass
class Greedy:
    """Greedy continuations and, per step up to the first difference, the reference's margin and the logit error."""

    reference: list[list[int]]
    production: list[list[int]]
    first_difference: list[int | None]
    margin: list[float | None]
    logit_error: list[float | None]
    tokens: int


@dataclass(frozen=True)
class ReferencePass:
    """One pass of the reference, as far as its input goes: `key` names it in the cache."""

    phase: str
    step: int | None
    tokens: Tensor
    lengths: Tensor | None
    choices: dict[str, Tensor]
    key: str

    def choices_of(self, layer: int) -> dict[str, Tensor]:
        """Those of one layer: a layer alone is checked against its own state only."""
        return {point: choice for point, choice in self.choices.items() if layer_of(point) == layer}


Say = Callable[[str], None]
Snapshots = dict[int, dict[str, Tensor]]


@dataclass(repr=False)  # a traceback that shows an audit would print every tensor
class Audit:
    """Runs lazily: a phase is run when the first test asks for it. See the module's docstring."""

    reference: Any
    production: Any
    twins: list[Any]
    plan: Plan
    say: Say = print
    cache: ReferenceCache | None = None
    crash: Crash | None = None
    floors: dict[tuple[str, str], Floor] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    decode_tokens: list[list[int]] = field(default_factory=list)
    twin_values: dict[tuple[int, str, str, int | None], Tensor] = field(default_factory=dict)  # (twin, point, phase, step), KEPT
    stored: dict[tuple[int, str, int | None], dict[str, Stored | str]] = field(default_factory=dict)  # (layer, phase, step): state that isolated passes left, or why not
    memo: dict[Any, Any] = field(default_factory=dict)  # what several gates of one run share
    red: Callable[[Audit, str, int | None, bool], bool] | None = None  # the fault profile: is a gate of this pass red? (audit, phase, step, alone)
    beside: Any = None  # the same kernels on another device, which runs what the isolated layers ran (parity/device_witness.py)
    stopped: str = ""  # the fault profile: why later passes were not run
    faulty: bool = False  # a fault is planted: what this production chooses is not what one usually chooses
    redact: bool = False  # messages of exceptions are left out
    broken: Exception | None = None
    broken_at: TracebackType | None = None
    alone_words = "each layer of production on the reference's input"
    shows_store = True  # attn.kv and attn.compressor are what its cache holds, and not what goes into it
    _greedy: Greedy | None = None

    def __post_init__(self) -> None:
        config = self.reference.config
        self.config = config
        self.layers_run = tuple(self.reference.layers)
        judged = [p for layer in self.plan.layers for p in points_of_layer(config, layer)]
        own = ["embed", "hc_head", "norm", "logits"]
        self.free_points = tuple(judged + own)
        self.isolated_points = tuple(judged)
        inputs = ["embed"] + [f"layers.{n}.hc_ffn.X" for n in self.layers_run]
        choices = [p for p in points_of_model(config, self.layers_run) if p.endswith(("attn.selected", "ffn.experts"))]
        self.choice_points = tuple(choices)
        self.reference_points = tuple(dict.fromkeys([*self.free_points, *inputs, *choices]))
        self.production_points = tuple(dict.fromkeys([*self.free_points, *choices]))
        batch = len(self.plan.rows)
        self.batch = batch
        self.lengths = torch.tensor([len(r) for r in self.plan.rows])
        width = int(self.lengths.max())
        self.tokens = torch.zeros(batch, width, dtype=torch.int64)
        for b, row in enumerate(self.plan.rows):
            self.tokens[b, : len(row)] = torch.tensor(row)
        self.prefill_valid = torch.arange(width)[None, :] < self.lengths[:, None]
        self.passes: dict[tuple[str, str, int | None], Trace] = {}
        self.states: dict[str, Any] = {}
        self.history: list[ReferencePass] = []  # passes of the reference so far, computed or from the cache
        self._computed = 0  # how many of them this process has computed: the reference's own state stands there
        self.clamped = self._clamped_here = 0  # gate and up values of the reference beyond swiglu_limit: all passes, the last one
        self._units: dict[tuple[str, str, int | None, str], float] = {}
        self._snapshots: Snapshots = {}  # judged layers' reference state after the last pass
        self._left: dict[int, dict[str, Tensor] | str] = {}  # production's, of the isolated layers, or why there is none

    @contextmanager
    def _record(self, who: str, model: Any, points: tuple[str, ...], phase: str, step: int | None) -> Iterator[None]:
        """Record one pass of a model under a name; taps are borrowed for this pass only."""
        with Recorder(model, points) as trace:
            self.passes[who, phase, step] = trace
            trace.begin(phase, step)
            yield

    def get(self, who: str, point: str, phase: str, step: int | None = None) -> Tensor:
        """A value of one recorded pass."""
        return self.passes[who, phase, step].get(point, phase, step)

    # ---- phases ----

    def ensure(self, phase: str) -> None:
        """Run what a test of this phase needs, once."""
        if phase in self.done or self.crash is not None or self.stopped:
            return
        if "prefill" not in self.done:
            self._run("prefill", self._prefill)
        if phase == "decode" and self.crash is None and not self.stopped:
            self._run("decode", self._decode)

    def _run(self, phase: str, run: Callable[[], None]) -> None:
        if self.broken is not None:
            raise self.broken.with_traceback(self.broken_at)  # each raise adds its own frames, which pytest would print
        started = time.perf_counter()
        try:
            run()
        except Exception as error:  # not production's: every test shall see it, without running again
            self.broken, self.broken_at = error, error.__traceback__
            raise
        self.seconds[phase] = time.perf_counter() - started
        self.done.add(phase)

    def _guard(self, phase: str, step: int | None, where: str, call: Callable[[], Any]) -> bool:
        """Run production code. An exception ends the run as a crash; the tests report it."""
        try:
            call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit and a framework's skip are production's too
            print_stack(error, self.redact)
            component = component_of_crash(error)
            if component == LOADING and phase != "load":
                component = ""
            self.crash = Crash(phase, step, where, told(error, self.redact), component, raised_at(error))
            return False
        return True

    def _prefill(self) -> None:
        plan, lengths = self.plan, self.lengths
        began = time.perf_counter()

        def open_states() -> None:
            self.states = {who: self.production.new_state(self.batch, plan.max_context) for who in ("production", "isolated")}

        if not self._guard("prefill", None, "new_state", open_states):
            return
        with self._record("production", self.production, self.production_points, "prefill", None):
            if not self._guard("prefill", None, "free", lambda: self.production.prefill(self.tokens, self.states["production"], lengths)):
                return
        self.say(f"prefill: production, {int(lengths.sum())} tokens, {len(self.layers_run)} layers: {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        empty = self.reference.new_state(self.batch, plan.max_context)
        self._snapshots = {n: empty.export_layer(n) for n in plan.layers}
        if self._strayed("prefill", None, self.tokens, lengths) or self.crash is not None:
            return
        one = self._open("prefill", None, self.tokens, lengths, self._choices("prefill", None))
        found = self._reference_pass(one)
        self.say(f"prefill: reference {time.perf_counter() - began:.1f} s" + (" from the cache" if found else ""))
        began = time.perf_counter()
        if not self._isolated(one):
            return
        self.say(f"prefill: {self.alone_words}: {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        self._noise(one, found)
        self.say(f"prefill: noise floor from {len(self.twins)} twins {time.perf_counter() - began:.1f} s" + (" from the cache" if found else ""))
        if self.red is not None and self.red(self, "prefill", None, False):
            self.stopped = "the fault profile stops where a gate is red: prefill"

    def _decode(self) -> None:
        began = time.perf_counter()
        cached = 0
        for step in range(self.plan.steps):
            token = self._next_tokens(step)
            self.decode_tokens.append(token.tolist())
            with self._record("production", self.production, self.production_points, "decode", step):
                if not self._guard("decode", step, "free", partial(self.production.decode, token, self.states["production"])):
                    return
            if self._strayed("decode", step, token[:, None], None) or self.crash is not None:
                return
            one = self._open("decode", step, token[:, None], None, self._choices("decode", step))
            found = self._reference_pass(one)
            cached += found is not None
            if not self._isolated(one):
                return
            self._noise(one, found)
            if step in (0, self.plan.steps - 1) or (step + 1) % 10 == 0:
                spent = time.perf_counter() - began
                left = spent / (step + 1) * (self.plan.steps - step - 1)
                self.say(f"decode: step {step + 1} of {self.plan.steps}, {spent:.0f} s" + (f", about {left:.0f} s for the other steps" if left else "") + (f"; reference of {cached} steps from the cache" if cached else ""))

    # ---- the reference's side of a pass: computed, or as an earlier run of the same code on the same tokens and choices left it ----

    def _open(self, phase: str, step: int | None, tokens: Tensor, lengths: Tensor | None, choices: dict[str, Tensor]) -> ReferencePass:
        """The next pass. Its key holds everything since the start."""
        key = ""
        if self.cache is not None:
            key = self._key_of(phase, tokens, lengths, choices)
            usual = self._key_of(phase, tokens, lengths, {}, "usual")
            if not self.faulty and not self.cache.holds(usual):
                self.cache.save(usual, Entry(dict(choices), {}))
        self.history.append(ReferencePass(phase, step, tokens, lengths, choices, key))
        return self.history[-1]

    def _key_of(self, phase: str, tokens: Tensor, lengths: Tensor | None, choices: dict[str, Tensor], *more: str) -> str:
        return digest_of(self.history[-1].key if self.history else self._start_key(), phase, tokens, {} if lengths is None else {"lengths": lengths}, choices, *more)

    def _strayed(self, phase: str, step: int | None, tokens: Tensor, lengths: Tensor | None) -> bool:
        """The fault profile: production chose otherwise than a production without fault, and a layer alone is red. Then the run ends here.

        The layers of this pass are judged on the reference with the usual choices, which the cache holds; its free-running side is
        judged up to the first other choice, as what follows would need the reference on production's choices. Nothing red alone:
        False, and the pass is run as ever.
        """
        if self.red is None or self.cache is None or self.cache.holds(self._key_of(phase, tokens, lengths, self._choices(phase, step))):
            return False
        known = self._key_of(phase, tokens, lengths, {}, "usual")
        usual = self.cache.load(known) if self.cache.holds(known) else None
        if usual is None or not self.cache.holds(key := self._key_of(phase, tokens, lengths, usual.tensors)):
            return False
        before, floors, clamped = self._snapshots, {key: floor.copy() for key, floor in self.floors.items()}, self.clamped
        one = ReferencePass(phase, step, tokens, lengths, usual.tensors, key)
        self.history.append(one)
        found = self._reference_pass(one)
        if not self._isolated(one):
            return False  # it crashed
        self._noise(one, found)
        if self.red(self, phase, step, True):
            self._forget_after_stray(phase, step, usual.tensors)
            self.stopped = f"the fault profile stops where a layer alone is red and other experts or entries are chosen: {phase}" + (f" step {step}" if step is not None else "")
            return True
        self.history.pop()
        self._snapshots, self.floors, self.clamped = before, floors, clamped
        return False

    def _start_key(self) -> str:
        assert self.cache is not None
        points = {"reference": self.reference_points, "free": self.free_points, "isolated": self.isolated_points}
        run = {"policy": sorted(self.reference.policy), "layers": self.layers_run, "twins": len(self.twins), "max_context": self.plan.max_context, "points": points}
        return self.cache.start(run)

    def _forget_after_stray(self, phase: str, step: int | None, usual: Mapping[str, Tensor]) -> None:
        """Drop what production showed in a pass behind its first other choice."""
        order = points_of_model(self.config, self.layers_run)
        own = self._choices(phase, step)
        stray = min((order.index(point) for point, choice in own.items() if point not in usual or not torch.equal(choice, usual[point])), default=-1)
        shown = self.passes["production", phase, step].passes[phase, step].chunks
        for point in order[stray + 1 :]:
            shown.pop(point, None)

    def _reference_pass(self, one: ReferencePass) -> Entry | None:
        """Record the reference's values. Returns the cache's entry if they came from there."""
        entry = self.cache.load(one.key) if self.cache is not None else None
        if entry is not None:
            self.passes["reference", one.phase, one.step] = trace_of(entry, self.reference_points, one.phase, one.step)
            self.clamped += int(entry.facts["clamped"])
            return entry
        self._catch_up()
        before = self._count_clamped()
        with self._record("reference", self.reference, self.reference_points, one.phase, one.step):
            self._advance(self.reference, "reference", one)
        self._clamped_here = self._count_clamped() - before
        self.clamped += self._clamped_here
        return None

    def _advance(self, model: Any, name: str, one: ReferencePass) -> None:
        """A model of the reference's side takes the tokens of a pass, on its own chain."""
        if one.phase == "prefill":
            self.states[name] = model.new_state(self.batch, self.plan.max_context)
            model.prefill(one.tokens, self.states[name], one.lengths, choices=one.choices)
        else:
            model.decode(one.tokens[:, 0], self.states[name], choices=one.choices)

    def _catch_up(self) -> None:
        """Bring reference and twins to where the cache ended, before they compute a pass themselves."""
        for one in self.history[self._computed : -1]:
            self._advance(self.reference, "reference", one)
            for number, twin in enumerate(self.twins):
                self._advance(twin, f"twin{number}", one)
        self._computed = len(self.history)

    def _count_clamped(self) -> int:
        return int(getattr(self.reference, "clamped", 0))

    def _noise(self, one: ReferencePass, found: Entry | None) -> None:
        """What the twins of a pass add to the floors, and the reference's state after it."""
        before = self._snapshots
        floors: dict[tuple[str, str], Floor] = {}
        if found is not None:
            for name, floor in unpack_floors(found, Floor).items():
                mode, point = name.split(" ", 1)
                floors[mode, point] = floor
            for name, value in found.tensors.items():
                if name.startswith("twin|"):
                    _, twin_number, point = name.split("|")
                    self.twin_values[int(twin_number), point, one.phase, one.step] = value
            self._snapshots = unpack_states(before, found)
        else:
            for number, twin in enumerate(self.twins):
                self._twin(number, twin, one, before, floors)
            state = self.states["reference"]
            self._snapshots = {n: state.export_layer(n) for n in self.plan.layers}
            if self.cache is not None:
                self._keep(one, before, floors)
        for (mode, point), floor in floors.items():
            self.floors.setdefault((mode, point), self._new_floor(mode, point)).merge(floor)
        self._compare_left(one, before)

    def _keep(self, one: ReferencePass, before: Snapshots, floors: Mapping[tuple[str, str], Floor]) -> None:
        """Put a computed pass into the cache."""
        assert self.cache is not None
        entry = Entry(values_of(self.passes["reference", one.phase, one.step], one.phase, one.step), {})
        entry.facts["clamped"] = self._clamped_here
        for number, point, phase, step in self.twin_values:
            if (phase, step) == (one.phase, one.step):
                entry.tensors[f"twin|{number}|{point}"] = self.twin_values[number, point, phase, step]
        for (mode, point), floor in floors.items():
            pack_floor(f"{mode} {point}", floor, entry)
        pack_states(before, self._snapshots, entry)
        self.cache.save(one.key, entry)

    def _next_tokens(self, step: int) -> Tensor:
        """Teacher-forced: the text's own next token; past its end the reference's most likely one."""
        tokens = []
        for b, text in enumerate(self.plan.continuation):
            if step < len(text):
                tokens.append(text[step])
            elif step == 0:
                logits = self.get("reference", "logits", "prefill")
                tokens.append(int(logits[b, int(self.lengths[b]) - 1].argmax()))
            else:
                tokens.append(int(self.get("reference", "logits", "decode", step - 1)[b, 0].argmax()))
        return torch.tensor(tokens)

    def _choices(self, phase: str, step: int | None) -> dict[str, Tensor]:
        """Production's own choices, made harmless for replay: what is out of range becomes "none" or expert 0.

        Where a tap did not fire the reference chooses for itself; the point is then not run, and what follows may differ.
        """
        choices = {}
        valid = self.valid(phase)
        start = torch.zeros_like(self.lengths) if phase == "prefill" else self.lengths + (step or 0)
        position = start[:, None] + torch.arange(valid.shape[1])[None, :]
        for point in self.choice_points:
            if not self.fired("production", point, phase, None if step is None else (step, step)):
                continue
            value = self.get("production", point, phase, step).clone()
            if point.endswith("selected"):
                choices[point] = replayable(value, (position[..., None] + 1) // 4, None)
            else:
                choices[point] = replayable(value, torch.tensor(self.config.n_routed_experts), range(self.config.n_routed_experts))
        return choices

    def layer_input(self, layer: int, phase: str, step: int | None) -> Tensor:
        """The reference's own input of a layer, [b, s, n, D]."""
        if layer == 0:
            embed = self.get("reference", "embed", phase, step)
            return embed[:, :, None, :].repeat(1, 1, self.config.hc_mult, 1)
        return self.get("reference", f"layers.{layer - 1}.hc_ffn.X", phase, step)

    def _isolated(self, one: ReferencePass) -> bool:
        """Each judged layer of production on the reference's own input and its state before the pass."""
        ran = launches_of(self.production)
        with self._record("isolated", self.production, self.isolated_points, one.phase, one.step):
            state = self.states["isolated"]
            for layer in self.plan.layers:
                def call(layer: int = layer) -> None:
                    state.import_layer(layer, self._snapshots[layer])
                    X = self.layer_input(layer, one.phase, one.step)
                    self.production.run_layer(layer, X, one.tokens, state, one.lengths, choices=one.choices_of(layer), decode=one.phase == "decode")

                if not self._guard(one.phase, one.step, f"isolated layer {layer}", call):
                    return False
                self._left[layer] = _exported(state, layer)
        if self.beside is not None:
            self.beside.run(self, one, self._snapshots, launches_of(self.production) - ran)
        return True

    def _compare_left(self, one: ReferencePass, before: Snapshots) -> None:
        """What the isolated layers of production left of their state, beside the reference's; the snapshots are not kept."""
        for layer, left in self._left.items():
            want = self._snapshots[layer]
            if isinstance(left, str):
                self.stored[layer, one.phase, one.step] = {part: left for part in want}
            else:
                self.stored[layer, one.phase, one.step] = left_parts(left, want, before[layer]["length"], self.config, layer)
        self._left = {}

    def compared_states(self, point: str, phase: str, steps: tuple[int, int] | None) -> int:
        """How often a part of the state (`layers.N.state.PART`) was compared; step 0 of decode has also what the prefill left."""
        layer, (_, part) = layer_of(point), point.split(".state.")
        assert layer is not None

        def seen(phase: str, step: int | None) -> bool:
            return isinstance(self.stored.get((layer, phase, step), {}).get(part), Stored)

        if phase == "prefill" or steps is None:
            return int(seen("prefill", None))
        return sum(seen("decode", step) and (step > 0 or seen("prefill", None)) for step in range(steps[0], steps[1] + 1))

    def _twin(self, number: int, twin: Any, one: ReferencePass, before: Snapshots, floors: dict[tuple[str, str], Floor]) -> None:
        """One pass of one twin, free and isolated, taken into the floors."""
        with self._record("twin", twin, self.free_points, one.phase, one.step):
            self._advance(twin, f"twin{number}", one)
        self._add_floor("free", number, twin, one, self.free_points, floors)
        alone = self.states.setdefault(f"twin{number} isolated", twin.new_state(self.batch, self.plan.max_context))
        with self._record("twin", twin, self.isolated_points, one.phase, one.step):
            for layer in self.plan.layers:
                alone.import_layer(layer, before[layer])
                X = self.layer_input(layer, one.phase, one.step)
                twin.run_layer(layer, X, one.tokens, alone, one.lengths, choices=one.choices_of(layer), decode=one.phase == "decode")
        self._add_floor("isolated", number, twin, one, self.isolated_points, floors)

    def _add_floor(self, mode: str, number: int, twin: Any, one: ReferencePass, points: tuple[str, ...], floors: dict[tuple[str, str], Floor]) -> None:
        """Take the twin's last pass into the floors, and forget it."""
        phase, step = one.phase, one.step
        trace = self.passes.pop(("twin", phase, step))
        for point in points:
            spec = spec_of(point)
            if spec.kind != INDICES and trace.fired(point, phase, step):
                want, got = self.get("reference", point, phase, step), trace.get(point, phase, step)
                if mode == "isolated" and point.endswith(KEPT):
                    narrow = torch.bfloat16 if "bf16" in twin.policy else torch.float32  # these points are rounded to it
                    self.twin_values[number, point, phase, step] = got.to(narrow)
                floor = floors.setdefault((mode, point), self._new_floor(mode, point))
                floor.add(got, want, spec.kind, rows_of(spec, mode, want.dim()), self.valid(phase), number, (phase, step))

    def _new_floor(self, mode: str, point: str) -> Floor:
        """An empty floor, with the typical size over the prompt: of the reference's scores, and in free runs of its rows.

        What earlier layers hand down is as large in a small row as in a large one. Where the prompt has none, the first step that
        has one counts; of scores the median over the steps so far, as the first ones are few and may all be near zero.
        """
        floor, kind = Floor(), spec_of(point).kind
        if kind == SCORES or (kind == VALUES and mode == "free"):
            there = (unit for one in self.history if (unit := self._unit(point, one)))
            floor.unit = next(there, 0.0)
            if kind == SCORES and floor.unit != self._unit(point, self.history[0]):
                floor.unit = median([floor.unit, *there])
        return floor

    def _unit(self, point: str, one: ReferencePass) -> float:
        """Typical size in one pass of the reference, of a score or of a row; 0: there is none."""
        name = (point, one.phase, one.step, one.key)
        if name not in self._units:
            want, valid = self.get("reference", point, one.phase, one.step), self.valid(one.phase)
            if spec_of(point).kind == SCORES:
                self._units[name] = score_unit(want.masked_fill(~valid[..., None], -torch.inf))
            else:
                size = want[valid].double().flatten(1).norm(dim=-1)
                size = size[size.isfinite() & (size > 0)]
                self._units[name] = float(size.median()) if len(size) else 0.0
        return self._units[name]

    # ---- what the tests read ----

    def reference_of(self, mode: str) -> str:
        """Whose recorded values a mode is held against: here the reference's own chain, whose input isolated layers got too."""
        return "reference"

    def keys_of(self, who: str) -> str:
        """Whose stored keys the attention of `isolated`, a twin or the reference reads in decode: the reference's, as its state was transplanted."""
        return "reference"

    def exposes(self, point: str, phase: str = "", steps: tuple[int, int] | None = None) -> bool:
        """Whether production can show a point at all, or (with a phase) in these passes of it; ours shows every one."""
        return True

    def gate(self, name: str) -> Gate:
        """The row of the tolerance table for where this production rounds."""
        return gate_of(name, self.production.policy)

    def reached(self, who: str, point: str, steps: tuple[int, int]) -> tuple[int, int]:
        """Those of the decode steps at which a run that stopped early has shown a point; all of them where it did not stop."""
        if not self.stopped:
            return steps
        last = max((step for step in range(steps[0], steps[1] + 1) if self.fired(who, point, "decode", (step, step))), default=steps[0])
        return steps[0], last

    def valid(self, phase: str) -> Tensor:
        """[b, s] rows of a pass that are no padding; every row decodes at every step."""
        return self.prefill_valid if phase == "prefill" else torch.ones(self.batch, 1, dtype=torch.bool)

    def valid_over(self, phase: str, steps: tuple[int, int] | None) -> Tensor:
        """[b, s] for the values that `values` returns."""
        if phase == "prefill" or steps is None:
            return self.prefill_valid
        return torch.ones(self.batch, steps[1] - steps[0] + 1, dtype=torch.bool)

    def fired(self, who: str, point: str, phase: str, steps: tuple[int, int] | None) -> int:
        """How often a tap fired in a pass, or over the steps of a group; "state": how often a part of it was compared."""
        if who == "state":
            return self.compared_states(point, phase, steps)
        asked: list[int | None] = [None] if phase == "prefill" or steps is None else list(range(steps[0], steps[1] + 1))
        traces = [(self.passes.get((who, phase, step)), step) for step in asked]
        return sum(trace is not None and bool(trace.fired(point, phase, step)) for trace, step in traces)

    def values(self, who: str, point: str, phase: str, steps: tuple[int, int] | None = None) -> Tensor:
        """A recorded value [b, s, ...]; decode steps of a group stand along s."""
        if phase == "prefill" or steps is None:
            return self.get(who, point, "prefill")
        return join(point, [self.get(who, point, "decode", s) for s in range(steps[0], steps[1] + 1)])

    def floor(self, mode: str, point: str) -> Floor:
        """The noise floor of a point; rows 0 when no twin reached it."""
        return self.floors.get((mode, point), Floor())

    def positions(self, phase: str, steps: tuple[int, int] | None) -> Tensor:
        """[b, s] absolute positions of the values that `values` returns."""
        if phase == "prefill" or steps is None:
            return torch.arange(self.tokens.shape[1])[None, :].expand(self.batch, -1)
        return self.lengths[:, None] + torch.arange(steps[0], steps[1] + 1)[None, :]

    # ---- greedy ----

    def greedy(self) -> Greedy | None:
        """Both models continue the prompt greedily, each on its own tokens and choices. None: production stopped."""
        if self._greedy is None and self.crash is None:
            chains: dict[str, tuple[Tensor, Tensor]] = {}
            began = time.perf_counter()
            if self._guard("decode", None, "greedy", lambda: chains.update(production=self._continue(self.production))):
                chains["reference"] = self._continue_reference()
                self._greedy = self._compare_greedy(chains)
                self.say(f"greedy: {self._greedy.tokens} tokens by both models {time.perf_counter() - began:.1f} s")
        return self._greedy

    @property
    def finished_greedy(self) -> Greedy | None:
        """The continuations if a test asked for them."""
        return self._greedy

    def _continue_reference(self) -> tuple[Tensor, Tensor]:
        """The reference's continuation, from the cache where it holds it."""
        if self.cache is None:
            return self._continue(self.reference)
        key = digest_of(self._start_key(), "greedy", self.tokens, self.lengths, self.plan.greedy_tokens)
        entry = self.cache.load(key)
        if entry is None:
            tokens, rows = self._continue(self.reference)
            self.cache.save(key, Entry({"tokens": tokens, "logits": rows}, {}))
            return tokens, rows
        return entry.tensors["tokens"], entry.tensors["logits"]

    def _continue(self, model: Any) -> tuple[Tensor, Tensor]:
        """Tokens [b, t] and the logits [b, t, vocab] they were taken from."""
        count = min(self.plan.greedy_tokens, self.plan.max_context - int(self.lengths.max()))
        state = model.new_state(self.batch, self.plan.max_context)
        logits = model.prefill(self.tokens, state, self.lengths).float().cpu()
        logits = logits[torch.arange(self.batch), self.lengths - 1]
        tokens, rows = [], []
        for step in range(count):
            rows.append(logits)
            tokens.append(logits.argmax(-1))
            if step + 1 < count:
                logits = model.decode(tokens[-1], state).float().cpu()
        return torch.stack(tokens, 1), torch.stack(rows, 1)

    def _compare_greedy(self, chains: dict[str, tuple[Tensor, Tensor]]) -> Greedy:
        (got, got_logits), (want, want_logits) = chains["production"], chains["reference"]
        result = Greedy(want.tolist(), got.tolist(), [], [], [], got.shape[1])
        for b in range(self.batch):
            different = (got[b] != want[b]).nonzero().flatten().tolist()
            first = different[0] if different else None
            result.first_difference.append(first)
            if first is None:
                result.margin.append(None)
                result.logit_error.append(None)
                continue
            row = want_logits[b, first]
            result.margin.append(float(row[want[b, first]] - row[got[b, first]]))
            result.logit_error.append(float((row - got_logits[b, first]).abs().max()))
        return result

    # ---- what came from the cache ----

    def chain(self, name: str, points: Sequence[str], make: Callable[[], Any] | None = None, layers: Sequence[int] = ()) -> Chain:
        """A further chain of a reference on its own choices (make: None takes the audit's), kept like the audit's own passes.

        name says what differs from the audit's reference, e.g. its policy.
        """
        start = "" if self.cache is None else digest_of(self._start_key(), name)
        return Chain(self.cache, start, make or (lambda: self.reference), points, self.batch, self.plan.max_context, layers)

    def cache_facts(self) -> list[Measurement]:
        """How much of the reference's side was not computed in this run."""
        if self.cache is None:
            return []
        c = self.cache
        values: dict[str, Any] = {
            "from_cache": c.found, "computed": c.computed, "ignored_files": c.ignored, "MB_read": round(c.bytes_read / 1e6, 1), "MB_written": round(c.bytes_written / 1e6, 1),
        }  # fmt: skip
        if c.trouble:
            values["not_kept"] = c.trouble
        return [Measurement("reference_cache", values=values)]

    # ---- what was asked for ----

    def coverage_points(self) -> list[tuple[str, str, int | None, str, str]]:
        """(phase, point, layer, mode, recorder) of everything that was asked for."""
        cells = []
        for phase in self.plan.phases:
            for point in self.free_points:
                cells.append((phase, point, layer_of(point), "free", "production"))
            for point in self.isolated_points:
                cells.append((phase, point, layer_of(point), "isolated", "isolated"))
        read_in = state_phase(self.plan.phases, self.plan.steps)
        if read_in is not None:
            cells += [(read_in, f"layers.{n}.state.{part}", n, "isolated", "state") for n in self.plan.layers for part in state_parts(self.config, n)]
        return cells


def launches_of(model: Any) -> Counter[tuple[str, str]]:
    """(source, kernel) -> launches so far, by the launcher's own count."""
    kernels = getattr(model, "kernels", None)
    return Counter({(source, kernel): n for source, kernel, _, _, n in (kernels() if kernels is not None else [])})


def _exported(state: Any, layer: int) -> dict[str, Tensor] | str:
    """A layer's state of production, or why there is none: the run goes on without."""
    try:
        return dict(state.export_layer(layer))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"production's state cannot be exported: {type(error).__name__}: {lines[0][:200]}"


