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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from probes.core.recorder import Recorder
from probes.core.records import Mechanism
from probes.core.trace import PassKey, Trace, grow_last, join
from reference.points import INDICES, SCORES, PointSpec, layer_of, points_of_layer, points_of_model, spec_of

TWIN_ORDERS = (1, 2, 3)


# ---- rows: the unit of every judgement ----


def row_errors(got: Tensor, want: Tensor, row_dims: int) -> tuple[Tensor, Tensor]:
    """Relative L2 error and |norm ratio - 1| of every row; both [b, s, ...] fp64.

    A row that is all NaN in `want` is absent: NaN in both results if it is absent in `got` too, else inf.
    A zero row must be zero. NaN in `got` gives NaN, which passes no limit.
    """
    got, want = got.double().flatten(got.dim() - row_dims), want.double().flatten(want.dim() - row_dims)
    difference, size = (got - want).norm(dim=-1), want.norm(dim=-1)
    got_size = got.norm(dim=-1)
    zero = size == 0
    safe = torch.where(zero, torch.ones_like(size), size)
    error = torch.where(zero, torch.where(got_size == 0, 0.0, torch.inf), difference / safe)
    ratio = torch.where(zero, torch.where(got_size == 0, 0.0, torch.inf), (got_size / safe - 1).abs())
    absent = want.isnan().all(-1)
    one_sided = absent & ~got.isnan().all(-1)
    error = torch.where(one_sided, torch.inf, error)
    return error, torch.where(one_sided, torch.inf, ratio)


def absent_rows(want: Tensor, row_dims: int) -> Tensor:
    """True where `want` has no row (a sparse point at a query that completes no group)."""
    return want.flatten(want.dim() - row_dims).isnan().all(-1)


def replayable(choice: Tensor, limit: Tensor, fill: range | None) -> Tensor:
    """A choice [b, s, k] that the reference can replay, ascending: what is out of range or there twice is dropped.

    limit  first index out of range, broadcast to [b, s, k]; fill  None: dropped ones become -1 (none); else the smallest
    unused index, since an expert slot cannot be empty. The fault itself is judged on the untouched choice.
    """
    choice = choice.sort(-1).values
    twice = torch.zeros_like(choice, dtype=torch.bool)
    twice[..., 1:] = choice[..., 1:] == choice[..., :-1]
    bad = (choice < 0) | (choice >= limit) | twice
    if fill is None:
        return choice.masked_fill(bad, torch.iinfo(torch.int64).max).sort(-1).values.masked_fill_(_sorted_last(bad), -1)
    for b, s in bad.any(-1).nonzero().tolist():
        kept = choice[b, s][~bad[b, s]].tolist()
        free = [i for i in fill if i not in kept]
        choice[b, s] = torch.tensor(sorted(kept + free[: choice.shape[-1] - len(kept)]))
    return choice


def _sorted_last(bad: Tensor) -> Tensor:
    """Where the `bad` ones stand after sorting them to the end."""
    kept = (~bad).sum(-1, keepdim=True)
    return torch.arange(bad.shape[-1]).expand(bad.shape) >= kept


# ---- noise floors ----


def rows_of(spec: PointSpec, mode: str, dims: int) -> int:
    """Trailing axes that make one judged row of a tensor with `dims` axes: the point's own in isolated runs (a head, say);
    everything of a token in free runs, where single heads are at the mercy of what earlier layers hand down."""
    return dims - 2 if mode == "free" else spec.row_dims


@dataclass
class Floor:
    """Noise of one point and mode over every pass of the run.

    error, norm     worst relative L2 and worst |norm ratio - 1| of a twin's row;  absolute  worst element error
    rows            twin rows seen; 0 means there is no floor
    errors          relative L2 of every row, by twin, phase and step
    """

    error: float = 0.0
    norm: float = 0.0
    absolute: float = 0.0
    rows: int = 0
    errors: dict[int, dict[PassKey, Tensor]] = field(default_factory=dict)

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
        if kind == SCORES:
            width = max(got.shape[-1], want.shape[-1])
            got, want = grow_last(got, width, -torch.inf), grow_last(want, width, -torch.inf)
            seen = want.isfinite() & valid[..., None]
            got, want = got.masked_fill(~seen, 0.0), want.masked_fill(~seen, 0.0)
        error, norm = row_errors(got, want, row_dims)
        use = ~absent_rows(want, row_dims) & _spread(valid, error)
        if use.any():
            difference = (got - want).double().abs().nan_to_num(0.0)
            self.absolute = max(self.absolute, float(difference[_spread(valid, difference)].max()))
            self.error = max(self.error, float(error[use].max()))
            self.norm = max(self.norm, float(norm[use].max()))
            self.rows += int(use.sum())
            self.errors.setdefault(twin, {})[key] = error[use]


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
    """Production stopped with an exception: where, and the last line of it."""

    phase: str
    step: int | None
    where: str
    message: str


@dataclass
class Greedy:
    """Greedy continuations and, per step up to the first difference, the reference's margin and the logit error."""

    reference: list[list[int]]
    production: list[list[int]]
    first_difference: list[int | None]
    margin: list[float | None]
    logit_error: list[float | None]
    tokens: int


Say = Callable[[str], None]


@dataclass
class Audit:
    """Runs lazily: a phase is run when the first test asks for it. See the module's docstring."""

    reference: Any
    production: Any
    twins: list[Any]
    plan: Plan
    say: Say = print
    crash: Crash | None = None
    floors: dict[tuple[str, str], Floor] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    decode_tokens: list[list[int]] = field(default_factory=list)
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
        if phase in self.done or (self.crash is not None):
            return
        if "prefill" not in self.done:
            self._run("prefill", self._prefill)
        if phase == "decode" and self.crash is None:
            self._run("decode", self._decode)

    def _run(self, phase: str, run: Callable[[], None]) -> None:
        started = time.perf_counter()
        run()
        self.seconds[phase] = time.perf_counter() - started
        self.done.add(phase)

    def _guard(self, phase: str, step: int | None, where: str, call: Callable[[], Any]) -> bool:
        """Run production code. An exception ends the run as a crash; the tests report it."""
        try:
            call()
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            self.crash = Crash(phase, step, where, f"{type(error).__name__}: {lines[0][:300]}")
            return False
        return True

    def _prefill(self) -> None:
        plan, lengths = self.plan, self.lengths
        self.states = {
            "production": self.production.new_state(self.batch, plan.max_context),
            "isolated": self.production.new_state(self.batch, plan.max_context),
        }
        began = time.perf_counter()
        with self._record("production", self.production, self.production_points, "prefill", None):
            if not self._guard("prefill", None, "free", lambda: self.production.prefill(self.tokens, self.states["production"], lengths)):
                return
        self.say(f"prefill: production, {int(lengths.sum())} tokens, {len(self.layers_run)} layers: {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        choices = self._choices("prefill", None)
        self.states["reference"] = self.reference.new_state(self.batch, plan.max_context)
        with self._record("reference", self.reference, self.reference_points, "prefill", None):
            self.reference.prefill(self.tokens, self.states["reference"], lengths, choices=choices)
        self.say(f"prefill: reference {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        empty = {n: self.reference.new_state(self.batch, plan.max_context).export_layer(n) for n in self.plan.layers}
        if not self._isolated("prefill", None, self.tokens, lengths, empty, choices):
            return
        self.say(f"prefill: each layer of production on the reference's input: {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        for twin in self.twins:
            self._twin(twin, "prefill", None, self.tokens, lengths, empty, choices)
        self.say(f"prefill: noise floor from {len(self.twins)} twins {time.perf_counter() - began:.1f} s")

    def _decode(self) -> None:
        began = time.perf_counter()
        for step in range(self.plan.steps):
            token = self._next_tokens(step)
            self.decode_tokens.append(token.tolist())
            with self._record("production", self.production, self.production_points, "decode", step):
                if not self._guard("decode", step, "free", partial(self.production.decode, token, self.states["production"])):
                    return
            choices = self._choices("decode", step)
            before = {n: self.states["reference"].export_layer(n) for n in self.plan.layers}
            with self._record("reference", self.reference, self.reference_points, "decode", step):
                self.reference.decode(token, self.states["reference"], choices=choices)
            if not self._isolated("decode", step, token[:, None], None, before, choices):
                return
            for twin in self.twins:
                self._twin(twin, "decode", step, token[:, None], None, before, choices)
            if step in (0, self.plan.steps - 1) or (step + 1) % 10 == 0:
                spent = time.perf_counter() - began
                left = spent / (step + 1) * (self.plan.steps - step - 1)
                self.say(f"decode: step {step + 1} of {self.plan.steps}, {spent:.0f} s, about {left:.0f} s left")

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
        """Production's own choices, made harmless for replay: what is out of range becomes "none" or expert 0."""
        choices = {}
        valid = self.valid(phase)
        start = torch.zeros_like(self.lengths) if phase == "prefill" else self.lengths + (step or 0)
        position = start[:, None] + torch.arange(valid.shape[1])[None, :]
        for point in self.choice_points:
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

    def _isolated(
        self, phase: str, step: int | None, tokens: Tensor, lengths: Tensor | None,
        before: Mapping[int, dict[str, Tensor]], choices: dict[str, Tensor],
    ) -> bool:  # fmt: skip
        with self._record("isolated", self.production, self.isolated_points, phase, step):
            state = self.states["isolated"]
            for layer in self.plan.layers:
                def call(layer: int = layer) -> None:
                    state.import_layer(layer, before[layer])
                    X = self.layer_input(layer, phase, step)
                    self.production.run_layer(layer, X, tokens, state, lengths, choices=choices, decode=phase == "decode")

                if not self._guard(phase, step, f"isolated layer {layer}", call):
                    return False
        return True

    def _twin(
        self, twin: Any, phase: str, step: int | None, tokens: Tensor, lengths: Tensor | None,
        before: Mapping[int, dict[str, Tensor]], choices: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """One pass of one twin, free and isolated, taken into the floors."""
        name = f"twin{id(twin)}"
        if phase == "prefill":
            self.states[name] = twin.new_state(self.batch, self.plan.max_context)
            self.states[name + "isolated"] = twin.new_state(self.batch, self.plan.max_context)
        with self._record("twin", twin, self.free_points, phase, step):
            if phase == "prefill":
                twin.prefill(tokens, self.states[name], lengths, choices=choices)
            else:
                twin.decode(tokens[:, 0], self.states[name], choices=choices)
        self._add_floor("free", phase, step, self.free_points, twin)
        with self._record("twin", twin, self.isolated_points, phase, step):
            for layer in self.plan.layers:
                self.states[name + "isolated"].import_layer(layer, before[layer])
                X = self.layer_input(layer, phase, step)
                twin.run_layer(layer, X, tokens, self.states[name + "isolated"], lengths, choices=choices, decode=phase == "decode")
        self._add_floor("isolated", phase, step, self.isolated_points, twin)

    def _add_floor(self, mode: str, phase: str, step: int | None, points: tuple[str, ...], model: Any) -> None:
        """Take the twin's last pass into the floors, and forget it."""
        twin = self.passes.pop(("twin", phase, step))
        for point in points:
            spec = spec_of(point)
            if spec.kind != INDICES and twin.fired(point, phase, step):
                floor = self.floors.setdefault((mode, point), Floor())
                want = self.get("reference", point, phase, step)
                floor.add(twin.get(point, phase, step), want, spec.kind, rows_of(spec, mode, want.dim()), self.valid(phase), self.twins.index(model), (phase, step))

    # ---- what the tests read ----

    def valid(self, phase: str) -> Tensor:
        """[b, s] rows of a pass that are no padding; every row decodes at every step."""
        return self.prefill_valid if phase == "prefill" else torch.ones(self.batch, 1, dtype=torch.bool)

    def valid_over(self, phase: str, steps: tuple[int, int] | None) -> Tensor:
        """[b, s] for the values that `values` returns."""
        if phase == "prefill" or steps is None:
            return self.prefill_valid
        return torch.ones(self.batch, steps[1] - steps[0] + 1, dtype=torch.bool)

    def fired(self, who: str, point: str, phase: str, steps: tuple[int, int] | None) -> int:
        """How often a tap fired in a pass, or over the steps of a group."""
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
                chains["reference"] = self._continue(self.reference)
                self._greedy = self._compare_greedy(chains)
                self.say(f"greedy: {self._greedy.tokens} tokens by both models {time.perf_counter() - began:.1f} s")
        return self._greedy

    @property
    def finished_greedy(self) -> Greedy | None:
        """The continuations if a test asked for them."""
        return self._greedy

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

    # ---- what was exercised ----

    def mechanisms(self) -> list[Mechanism]:
        """Counts of what this prompt made the model do; 0 is listed as not exercised."""
        config, W = self.config, self.config.sliding_window
        decoded = len(self.decode_tokens) if "decode" in self.done else 0
        passes = [("prefill", p) for row in self.plan.rows for p in range(len(row))]
        passes += [("decode", int(n) + t) for n in self.lengths for t in range(decoded)]
        kinds = [config.kind(n) for n in self.layers_run]

        def count(phase: str, rule: Callable[[int], bool]) -> int:
            return sum(ph == phase and rule(p) for ph, p in passes)

        prompt_ends = [int(n) for n in self.lengths]
        table = [
            ("window wraps, prefill", count("prefill", lambda p: p >= W), "queries past sliding_window"),
            ("window wraps, decode", count("decode", lambda p: p >= W), "decode steps past sliding_window"),
            ("CSA entry finished in prefill", count("prefill", lambda p: (p + 1) % 4 == 0) * kinds.count("csa"), "groups of 4 completed by the prompt"),
            ("CSA entry finished in decode", count("decode", lambda p: (p + 1) % 4 == 0) * kinds.count("csa"), "groups of 4 completed while decoding"),
            ("HCA entry finished in prefill", count("prefill", lambda p: (p + 1) % 128 == 0) * kinds.count("hca"), "groups of 128 completed by the prompt"),
            ("HCA entry finished in decode", count("decode", lambda p: (p + 1) % 128 == 0) * kinds.count("hca"), "groups of 128 completed while decoding"),
            ("open CSA group carried into decode", sum(n % 4 != 0 for n in prompt_ends) * kinds.count("csa") * (decoded > 0), "prompts that end inside a group of 4"),
            ("open HCA group carried into decode", sum(n % 128 != 0 for n in prompt_ends) * kinds.count("hca") * (decoded > 0), "prompts that end inside a group of 128"),
            ("indexer discards entries", sum((p + 1) // 4 > config.index_topk for _, p in passes) * kinds.count("csa"), "queries with more complete entries than index_topk"),
            ("hash-routed layers", sum(config.is_hash(n) for n in self.layers_run), "layers whose experts come from tid2eid"),
            ("score-routed layers", sum(not config.is_hash(n) for n in self.layers_run), "layers whose experts come from the gate"),
            ("keys split in decode", count("decode", lambda p: min(p + 1, W) > 64), "decode steps with more than 64 keys"),
            ("batch rows of unequal length", len(set(prompt_ends)) - 1, "prompts in one batch"),
        ]
        found = [Mechanism(name, int(n), meaning) for name, n, meaning in table]
        found.append(Mechanism("SwiGLU clamp", self.reference.clamped, "gate or up values beyond swiglu_limit", "single-operation checks swiglu, shared_experts and moe"))
        return found

    def coverage_points(self) -> list[tuple[str, str, int | None, str, str]]:
        """(phase, point, layer, mode, recorder) of everything that was asked for."""
        cells = []
        for phase in self.plan.phases:
            for point in self.free_points:
                cells.append((phase, point, layer_of(point), "free", "production"))
            for point in self.isolated_points:
                cells.append((phase, point, layer_of(point), "isolated", "isolated"))
        return cells


