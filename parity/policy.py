"""Where production really rounds, measured: which formats' grids the values that it shows lie on.

    pytest parity/test_policy.py --production transformers

A rounding point that can be seen at shown points has a gate. Declared: every value lies on the format's grid. Not declared: the
values do not; only formats that other values meet by chance are asked (a random FP32 value is on the bf16 grid with probability
2^-16, a random bf16 value on the e4m3 grid with 1/16). What differs from the published model's roundings is a measurement each,
for the report. Limits: `BOUNDS` in parity/gates.py. Tests: parity/unit/test_policy.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from parity import gates
from parity.audit import Audit
from probes.core.records import Measurement, State, Verdict
from reference import ops
from reference.formats import INDEX_BLOCK, KV_BLOCK, POINTS, PUBLISHED, round_bf16, round_e2m1_blocks, round_e4m3_blocks
from reference.points import layer_of

LEAST_VALUES = 256  # fewer that are not zero say nothing about a grid


@dataclass(frozen=True)
class Seen:
    """Where a rounding point shows.

    points    kinds of points whose values it rounds last
    part      which of the last axis: all, plain (without the rotary dims) or rotary
    rounded   a value put on the grid: what is on it comes back as it is
    what      for people: what is rounded, and to what
    """

    points: tuple[str, ...]
    part: str
    rounded: Callable[[Tensor], Tensor]
    component: str
    what: str


def _e4m3(x: Tensor) -> Tensor:
    return round_e4m3_blocks(x, KV_BLOCK)


def _e2m1(x: Tensor) -> Tensor:
    return round_e2m1_blocks(x, INDEX_BLOCK)


OUTPUTS = ("hc_attn.a", "attn.norm", "attn.q_norm", "attn.q", "attn.core", "attn.o", "attn.wo_a", "attn.out", "hc_attn.X", "hc_ffn.a", "ffn.norm", "ffn.out", "hc_ffn.X", "norm")
SEEN: dict[str, Seen] = {
    "kv.e4m3": Seen(("attn.kv",), "plain", _e4m3, "KV quant", "stored window keys, rotary dims aside, to e4m3 with a power-of-two scale per 64"),
    "compressor.e4m3": Seen(("attn.compressor",), "plain", _e4m3, "KV quant", "stored compressed entries, rotary dims aside, to e4m3 with a power-of-two scale per 64"),
    "indexer.q.e2m1": Seen(("attn.indexer.q",), "all", _e2m1, "indexer", "index queries to e2m1 with a power-of-two scale per 32"),
    "indexer.compressor.e2m1": Seen(("attn.indexer.compressor",), "all", _e2m1, "indexer", "index keys to e2m1 with a power-of-two scale per 32"),
    "bf16": Seen(OUTPUTS, "all", round_bf16, "model", "outputs of linears, norms and blocks to bf16"),
    "gate.bf16": Seen(("ffn.gate", "ffn.weights"), "all", round_bf16, "MoE router", "router scores and weights to bf16"),
    "logits.bf16": Seen(("logits",), "all", round_bf16, "head", "logits to bf16"),
}
# Rounded inside of an operation: no shown point holds the rounded values, so gates of what comes out must tell.
UNSEEN: dict[str, str] = {
    "linear_in.e4m3": "inputs of FP8 and FP4 linears to e4m3 with a scale per 128",
    "p.bf16": "attention weights before they weigh the values to bf16",
    "softmax.bf16": "attention weights, divided by their sum, to bf16",
    "score.bf16": "attention logits to bf16",
    "rope.bf16": "cos and sin of the rotation to bf16",
    "q_factor.bf16": "1 / rms of a query head to bf16",
    "pool.bf16": "a compressor's kv, gate and softmax weights to bf16",
    "post.bf16": "weights of a block's output per stream, and their products, to bf16",
    "comb.bf16": "the stream mixing matrix and the mixed streams to bf16",
    "hidden.bf16": "an expert's hidden values to bf16",
}
assert SEEN.keys() | UNSEEN.keys() == POINTS


@dataclass(frozen=True)
class Share:
    """How much of one kind of point lies on a grid: `on` of `values` that are finite and not zero."""

    point: str
    on: int
    values: int

    @property
    def share(self) -> float:
        return self.on / self.values if self.values else math.nan


def on_grid(value: Tensor, rounded: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """(on, values) over rows of the last axis that are finite as a whole; zeros are on every grid and do not count."""
    rows = value.float().flatten(0, -2)
    rows = rows[rows.isfinite().all(-1)]
    counted = rows != 0
    return int(((rounded(rows) == rows) & counted).sum()), int(counted.sum())


def _passes(audit: Audit, point: str) -> Iterator[Tensor]:
    """What production showed at a point over the run, pads left out: [rows, ..., d]."""
    for phase in audit.plan.phases:
        steps = None if phase == "prefill" else (0, audit.plan.steps - 1)
        if audit.fired("production", point, phase, steps):
            for step in [None] if steps is None else range(audit.plan.steps):
                if audit.fired("production", point, phase, None if step is None else (step, step)):
                    yield audit.get("production", point, phase, step)[audit.valid(phase)]


def measured(audit: Audit, name: str) -> list[Share]:
    """Shares of the values of every kind of point where the rounding shows, over judged layers and phases."""
    seen, r = SEEN[name], audit.config.qk_rope_head_dim
    known: list[Share] | None = audit.memo.get(("policy", name))
    if known is not None:
        return known
    found = []
    for kind in seen.points:
        on = values = 0
        for point in audit.free_points:
            if point.removeprefix(f"layers.{layer_of(point)}.") == kind and audit.exposes(point):
                for value in _passes(audit, point):
                    here = on_grid(value[..., :-r] if seen.part == "plain" else value, seen.rounded)
                    on, values = on + here[0], values + here[1]
        if values:
            found.append(Share(kind, on, values))
    audit.memo["policy", name] = found
    return found


def judge_policy(audit: Audit, name: str) -> Verdict:
    """Production rounds at this point exactly if it declares so. Raises NotExposedError where none of its points is shown."""
    seen, declared = SEEN[name], name in audit.production.policy
    base = Verdict("policy", f"policy.{name}", "model", State.NOT_RUN, "share of values off the grid" if declared else "share of values on the grid", component=seen.component, why=gates.BOUNDS["policy.declared" if declared else "policy.undeclared"].why)
    for phase in audit.plan.phases:
        audit.ensure(phase)
    if audit.crash is not None:
        return replace(base, reason=f"production stopped in {audit.crash.phase}: {audit.crash.message}")
    mine = [point for point in audit.free_points if point.removeprefix(f"layers.{layer_of(point)}.") in seen.points]
    shown = [point for point in mine if audit.exposes(point)]
    if not shown:
        for point in mine:
            audit.fired("production", point, audit.plan.phases[0], None)  # says that it is not shown
        return replace(base, state=State.PASS, metric="no judged layer has such values", value=0.0, limit=0.0, spent=0.0, rows=1)
    shares = [s for s in measured(audit, name) if s.values >= LEAST_VALUES]
    if not declared:
        shares = [s for s in shares if not _explained(audit, name, s)]
    worst = max(shares, key=lambda s: 1 - s.share if declared else s.share, default=Share("", 0, 0))
    value = (1 - worst.share if declared else worst.share) if worst.values else 0.0
    what = f"{seen.what}: {'declared' if declared else 'not declared'}, and {worst.on} of {plural_values(worst.values)} at {worst.point} lie on the grid; share {'off' if declared else 'on'} it"
    judged = gates.judge_bound("policy.declared" if declared else "policy.undeclared", value, worst.values, what)
    because, throughout = "", False
    if judged.state is State.FAIL:
        because = f"{name} is {'declared' if declared else 'not declared'} and {worst.on} of {plural_values(worst.values)} lie on its grid ({worst.point})"
        throughout = all((s.share < 0.5) is declared for s in shares)
    return replace(
        base, state=judged.state, reason=judged.reason, value=value, limit=judged.limit, spent=judged.spent, rows=worst.values,
        details={"declared": declared, "shares": {s.point: [s.on, s.values] for s in shares}, "points": list(seen.points), "because": because, "throughout": throughout},
    )  # fmt: skip


def _explained(audit: Audit, name: str, share: Share) -> bool:
    """Values on a coarser declared grid are on this one without being rounded to it."""
    finer = {"bf16": ("kv.e4m3", "compressor.e4m3", "indexer.q.e2m1", "indexer.compressor.e2m1"), "gate.bf16": ()}
    return any(share.point in SEEN[other].points and other in audit.production.policy for other in finer.get(name, ()))


def plural_values(n: int) -> str:
    return f"{n} value" if n == 1 else f"{n} values"


# ---- what the report lists ----


def measurements(audit: Audit) -> list[Measurement]:
    """One line a rounding point: declared, published, how much was seen; `otherwise` in words where it is not as published."""
    if audit.crash is not None:
        return []
    found = []
    for name in sorted(POINTS):
        declared, published = name in audit.production.policy, name in PUBLISHED
        values: dict[str, Any] = {"rounding": name, "declared": declared, "published": published, "otherwise": ""}
        if name in SEEN:
            shares = measured(audit, name)
            values |= {"on_grid": sum(s.on for s in shares), "values": sum(s.values for s in shares)}
            rounds: bool | None = all(2 * s.on > s.values for s in shares) if shares else None
        else:
            rounds = None
        values["rounds"] = rounds
        values["otherwise"] = _otherwise(name, declared, published, rounds, values)
        found.append(Measurement("policy", values=values))
    own = getattr(audit.production, "measured", None)
    beside = [] if own is None else [Measurement(name, values=values) for name, values in own(audit.tokens).items()]
    return [*found, *hadamard(audit), *beside]


def _otherwise(name: str, declared: bool, published: bool, rounds: bool | None, values: dict[str, Any]) -> str:
    what = SEEN[name].what if name in SEEN else UNSEEN[name]
    if rounds is None:
        if declared == published:
            return ""
        said = "rounds" if declared else "does not round"
        return f"{said} {what}: declared; no shown point holds these values"
    if rounds == published:
        return ""
    share = 100 * values["on_grid"] / values["values"]
    return f"{'rounds' if rounds else 'does not round'} {what}: {share:.3g} % of {values['values']} values lie on that grid"


def hadamard(audit: Audit) -> list[Measurement]:
    """Is what production calls its index query nearer the reference's after or before the Hadamard rotation?

    Where an adapter rotates it for show, what it had in hand is asked: `raw` of probes/outside/protocol.py.
    """
    raw = dict(getattr(audit.production, "raw", {}))
    found = []
    for layer in audit.plan.layers:
        point = f"layers.{layer}.attn.indexer.q"
        if point not in audit.free_points or not audit.exposes(point):
            continue
        last = next(
            ((phase, step) for phase in reversed(audit.plan.phases) for step in ([None] if phase == "prefill" else [audit.plan.steps - 1]) if audit.fired("production", point, phase, None if step is None else (step, step))), None,
        )  # fmt: skip
        if last is None:
            continue
        rotated = audit.get("reference", point, *last).float()
        plain = ops.hadamard(rotated)  # it is its own inverse
        got = raw.get(point, audit.get("production", point, *last)).float()
        if got.shape != rotated.shape:
            continue
        to_rotated, to_plain = (float((got - want).norm() / want.norm()) for want in (rotated, plain))
        said = "" if to_rotated <= to_plain else f"does not rotate index queries and keys by a Hadamard matrix: layer {layer}'s queries are {to_plain:.2g} off the unrotated ones and {to_rotated:.2g} off the rotated ones; scores do not change by it, their rounding would"
        found.append(Measurement("policy", layer=layer, point=point, values={"rounding": "Hadamard", "published": True, "rounds": to_rotated <= to_plain, "off_rotated": to_rotated, "off_unrotated": to_plain, "otherwise": said}))
    return found
