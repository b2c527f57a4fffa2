"""Gates whose witness is neither model: production's values must follow from production's own values.

    attention   attn.core against plain FP64 softmax attention over the keys that production stored and says it read
    sink        what the weights behind attn.core sum to, against 1 - the sink's share
    masses      share of attention on raw, pooled and sink, production against the reference, both on the reference's input
    visible     the keys against the rule of the query's own position
    mixing      hc_post and hc_pre sums of production's own pre, post, comb, y and X, in FP64
    Sinkhorn    comb against the reference's operations on production's own X, after every half step

The first of these needs no agreement between the models, so it holds in the free-running chain at any step.
Limits: gates.py. Tests: parity/unit/test_witness.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parity import gates
from parity.audit import Audit, Floor
from parity.evaluate import flip_margin, judge_case, judge_greedy, judge_values, whole_phase
from parity.selection import Case
from probes.core.attention import PARTS, Attended, Keys, attend, stored_keys, weight_sum
from probes.core.drift import slope
from probes.core.measure import FAULTS, RATIOS, nearest_step, sinkhorn_trail, visible_measurement
from probes.core.records import State, Verdict
from probes.core.rows import row_errors
from probes.core.text import degeneration, top_agreement
from probes.core.trace import join
from probes.core.wording import plural
from reference import ops
from reference.ops import Sums
from reference.points import VALUES, spec_of

# Which part of the stack each class of a wrong key points at.
BLAMED = {
    "pad": "visibility mask", "ratio": "visibility mask", "edge": "SWA ring", "future": "visibility mask",
    "unfinished": "visibility mask", "stale": "SWA ring", "hole": "visibility mask", "duplicate": "visibility mask",
}  # fmt: skip


def _missing(audit: Audit, base: Verdict, points: list[tuple[str, str]], phase: str) -> Verdict | None:
    """Not run, when a tap did not fire in every pass of the phase."""
    audit.ensure(phase)
    expected = 1 if phase == "prefill" else audit.plan.steps
    for who, point in points:
        fired = audit.fired(who, point, phase, _steps(audit, phase))
        if fired < max(expected, 1):
            reason = audit.stopped or f"tap {point} fired {fired} of {expected} times in {who}"
            if audit.crash is not None:
                reason = f"production stopped in {audit.crash.phase}: {audit.crash.message}"
            return replace(base, reason=reason)
    return None


def _steps(audit: Audit, phase: str) -> tuple[int, int] | None:
    return None if phase == "prefill" else (0, audit.plan.steps - 1)


def _remember(audit: Audit, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    if key not in audit.memo:
        audit.memo[key] = make()
    return audit.memo[key]


# ---- keys that were stored, and plain attention over them ----


def _positions(audit: Audit, phase: str) -> Tensor:
    """[b, s] positions of a phase, -1 at pads."""
    position = audit.positions(phase, _steps(audit, phase))
    return torch.where(audit.valid_over(phase, _steps(audit, phase)), position, -1)


def _shown(audit: Audit, who: str, name: str, layer: int, phases: tuple[str, ...]) -> Tensor:
    point = f"layers.{layer}.{name}"
    return torch.cat([audit.values(who, point, phase, _steps(audit, phase)) for phase in phases], 1)


def _tables(audit: Audit, who: str, layer: int, phases: tuple[str, ...]) -> Keys:
    """What a run showed as stored, over phases."""
    ratio = audit.config.ratio(layer)
    position = torch.cat([_positions(audit, phase) for phase in phases], 1)
    entries = _shown(audit, who, "attn.compressor", layer, phases) if ratio else None
    return stored_keys(_shown(audit, who, "attn.kv", layer, phases), position, entries, ratio, int(position.max()) + 1)


def _through(phase: str) -> tuple[str, ...]:
    return ("prefill",) if phase == "prefill" else ("prefill", "decode")


def attended(audit: Audit, who: str, layer: int, phase: str) -> Attended:
    """FP64 attention of a whole run (`production` or `reference`, each on its own chain) over its own stored keys."""

    def make() -> Attended:
        c = audit.config
        name = f"layers.{layer}.attn"
        q, visible = (audit.values(who, f"{name}.{point}", phase, _steps(audit, phase)) for point in ("q", "visible"))
        keys = _tables(audit, who, layer, _through(phase))
        sink = audit.reference.blocks[layer].attn.attn_sink
        return attend(q, visible, _positions(audit, phase), keys, sink, c.sliding_window, c.ratio(layer), round_score=_rounding(audit, "score.bf16"), round_weight=_rounding(audit, "softmax.bf16"))

    return _remember(audit, ("attended", who, layer, phase), make)  # type: ignore[no-any-return]


def _rounding(audit: Audit, name: str) -> Callable[[Tensor], Tensor] | None:
    """As production rounds there; None: it does not."""
    return (lambda x: x.bfloat16().to(x.dtype)) if name in audit.production.policy else None


def sink_share(audit: Audit, layer: int, phase: str) -> Tensor | None:
    """[b, s, h] share of production's attention on the sink, where a gate of this run looked at it."""
    found: Attended | None = audit.memo.get(("attended", "production", layer, phase))
    return None if found is None else found.mass["sink"]


ATTENTION = ("attn.q", "attn.kv", "attn.visible", "attn.core")


def _attention_points(audit: Audit, who: str, layer: int) -> list[tuple[str, str]]:
    names = [*ATTENTION, *(["attn.compressor"] if audit.config.ratio(layer) else [])]
    return [(who, f"layers.{layer}.{name}") for name in names]


def judge_core(audit: Audit, layer: int, phase: str) -> Verdict:
    """production's attn.core against plain softmax attention on its own q and its own stored keys, free-running (P1)."""
    point, gate = f"layers.{layer}.attn.core", audit.gate("core.witness")
    base = Verdict("core.witness", point, "free", State.NOT_RUN, "worst row rel-L2 to plain attention", layer=layer, phase=phase, component="attention core", why=gate.why)
    for part in ("prefill", phase):
        missing = _missing(audit, base, _attention_points(audit, "production", layer), part)
        if missing is not None:
            return missing
    plain = attended(audit, "production", layer, phase)
    got = audit.values("production", point, phase, _steps(audit, phase))
    valid = audit.valid_over(phase, _steps(audit, phase))
    unstored = int(plain.unstored[valid].sum())
    verdict = judge_values(base, spec_of(point), gate, "isolated", got, _rounded(audit, plain.out), valid, _exact(valid))
    if unstored:
        where = ((plain.unstored > 0) & valid).nonzero()[0].tolist()
        return replace(verdict, state=State.FAIL, spent=math.inf, where=where, reason=f"{plural(unstored, 'key was', 'keys were')} read that were never stored, first by query {where}")
    if verdict.state is State.FAIL and _only_scaled(got, plain, valid, verdict.limit or 0.0):
        scale = _one_factor(got, plain.out, valid[..., None].expand(got.shape[:-1]), plain.mass["sink"][valid])
        if scale is None:
            verdict = replace(verdict, component="sink", reason=verdict.reason + "; rows are right up to a factor: the sum of the weights is wrong")
        else:
            verdict = replace(verdict, reason=verdict.reason + f"; {_scaled_words(scale)}")
    return _at_step(audit, verdict, phase)


def _rounded(audit: Audit, out: Tensor) -> Tensor:
    """As production stores it: what rounding alone costs."""
    return out.bfloat16().double() if "bf16" in audit.production.policy else out.float().double()


def _exact(valid: Tensor) -> Floor:
    """The floor of a witness that rounds as production does: none; what a flipped rounding costs is the gate's epsilon."""
    return Floor(rows=int(valid.sum()))


def _only_scaled(got: Tensor, plain: Attended, valid: Tensor, limit: float) -> bool:
    """True when every row agrees after a factor of its own, and the factor is why: without it the typical row is off twice as far."""
    after, before = _direction_error(got, plain.out)[valid], row_errors(got, plain.out, 1)[0][valid]
    return bool((after <= limit).all()) and bool(after.double().median() <= 0.5 * before.double().median())


def _one_factor(got: Tensor, want: Tensor, rows: Tensor, share: Tensor | None) -> float | None:
    """The factor that all of these rows [b, s, h] have in common, where a wrong sink could not give one; None: several, or it could.

    A sink that is counted wrong takes from a row in proportion to its share there, which differs by row and head.
    share [...] of the sink, wherever it is known
    """
    g, w = got[rows].double(), want[rows].double()
    if len(g) < FEW or (share is not None and not _spread(share.double().flatten()) > 2 * ALIKE):
        return None
    factor = (g * w).sum(-1) / w.square().sum(-1)
    return float(factor.median()) if bool(factor.isfinite().all()) and _spread(factor - 1) <= ALIKE else None


def _spread(x: Tensor) -> float:
    """Between the tenth and the ninetieth percentile, over the median."""
    low, middle, high = (float(x.sort().values[round(at * (len(x) - 1))]) for at in (0.1, 0.5, 0.9))
    return (high - low) / abs(middle) if middle else math.inf


def _scaled_words(scale: float) -> str:
    return f"every row is the right one times {scale:.4g}, whatever the sink's share of it is: the values are scaled, or what comes out"


def _direction_error(got: Tensor, want: Tensor) -> Tensor:
    """Relative error of rows [..., d] after the best factor of each; 0 where got is 0 (a sink that takes everything)."""
    g, w = got.double(), want.double()
    factor = (g * w).sum(-1, keepdim=True) / g.square().sum(-1, keepdim=True)
    factor = torch.where(factor.isfinite(), factor, 1.0)
    error: Tensor = (g * factor - w).norm(dim=-1) / w.norm(dim=-1)
    return error.masked_fill(g.square().sum(-1) == 0, 0.0)


# ---- what a wrong attn.core points to ----

SCALES = 33  # softmax scales tried between a quarter and four times the right one, then refined
SAMPLE = 16  # queries they are tried on
MOST = 0.9  # of the wrong rows must be explained
FEW = 8  # rows below which one factor for all of them says nothing
ALIKE = 0.15  # spread of factors, as a share of what they differ from 1, that is one factor rounded


def explained_core(audit: Audit, verdict: Verdict) -> Verdict:
    """A red attn.core of the isolated run, with what kind of difference it is. Its q, its keys and what it saw were judged before.

    Rows right up to one factor: what is weighed, or what comes out; to a factor of their own: the sum of the weights, so the sink. Rows right at another softmax scale: the YaRN amplitude that
    this model does not have. Neither: what attention reads of the cache - unless what it is made of is red no later than it is,
    which explains it; then the part stays the point's own.
    """
    if verdict.gate != "attn.core" or verdict.state is not State.FAIL or verdict.mode != "isolated" or verdict.layer is None or verdict.phase is None:
        return verdict
    steps = None if verdict.phase == "prefill" else (verdict.step_first or 0, verdict.step_last or 0)
    got, want = (audit.values(who, verdict.point, verdict.phase, steps) for who in ("isolated", audit.reference_of("isolated")))
    if got.shape != want.shape:
        return verdict
    error, _ = row_errors(got, want, 1)
    limit = verdict.limit or 0.0
    valid = audit.valid_over(verdict.phase, steps)[..., None].expand(error.shape)
    if bool((error[valid] <= limit).all()):  # no row alone is over it: what is typical of the rows is
        limit = verdict.details.get("median_limit") or limit
    off = ~(error <= limit) & valid
    if not off.any() or not got[off].isfinite().all():
        return replace(verdict, details={**verdict.details, "because": "values that are not finite"} if off.any() else verdict.details)
    factor = (got[off].double().norm(dim=-1) / want[off].double().norm(dim=-1)).tolist()
    # An explanation leaves at most half of what it explains, and no more than the formats cost.
    left = min(1e-2, float(error[off].median()) / 2)
    if bool((_direction_error(got, want)[off] <= left).double().mean() >= MOST):
        scale = _one_factor(got, want, off, sink_share(audit, verdict.layer, verdict.phase))
        if scale is not None:
            return replace(verdict, component="attention core", details={**verdict.details, "because": _scaled_words(scale)})
        said = f"rows are the right ones times {min(factor):.3g} to {max(factor):.3g}: the weights do not sum to 1 - the sink's share"
        return replace(verdict, component="sink", details={**verdict.details, "because": said})
    fed = _red_inputs(audit, verdict)
    scale = _softmax_scale(audit, verdict.layer, off, left) if verdict.phase == "prefill" else None
    if scale is not None and abs(scale - 1) < 5e-3 and not fed:
        said = f"rows follow from production's own q and {'stored keys' if audit.shows_store else 'the keys it shows'}: those are off, each within its own limit"
        return replace(verdict, component="KV quant", details={**verdict.details, "because": said, "by_exclusion": True})
    if scale is not None and abs(scale - 1) >= 5e-3:
        said = f"rows are right at {scale:.4g} times the softmax scale of head_dim^-0.5"
        return replace(verdict, component="rope", details={**verdict.details, "because": said + " (YaRN's amplitude would do that)"})
    if verdict.phase == "prefill" and _another_key(audit, verdict.layer, off, left):
        said = "each wrong row is the right one with one more or one less key than attention says it reads"
        return replace(verdict, component="visibility mask", details={**verdict.details, "because": said})
    if fed:
        return replace(verdict, details={**verdict.details, "because": f"what attention reads is wrong already: {', '.join(fed)}"})
    right = "the stored rows" if audit.shows_store else f"the rows shown at attn.kv{' and attn.compressor' if audit.config.ratio(verdict.layer) else ''}"
    said = f"the keys seen, q and {right} are right; no factor of a row, no softmax scale and no single key explains it: " + ("what attention reads of the cache" if audit.shows_store else "what is stored of them, or what attention reads of the cache")
    return replace(verdict, component="KV quant", details={**verdict.details, "because": said, "by_exclusion": True})


def _red_inputs(audit: Audit, verdict: Verdict) -> list[str]:
    """Points of the same layer and run that attn.core is made of and that are over their limits no later than it is."""
    assert verdict.layer is not None
    began = verdict.details.get("first_step", verdict.step_first or 0)
    names = [name for name in ("attn.q", "attn.kv", "attn.compressor", "attn.visible") if name != "attn.compressor" or audit.config.ratio(verdict.layer)]
    found = []
    for name in names:
        point = f"layers.{verdict.layer}.{name}"
        cases = [Case("prefill", point, "isolated", verdict.layer)]
        if verdict.phase == "decode":
            groups = [(0, began)] if began == 0 else [(0, 0), (1, began)]
            cases = [Case("decode", point, "isolated", verdict.layer, group) for group in groups]
        if any(judge_case(audit, case, "").state is State.FAIL for case in cases):
            found.append(point)
    return found


@dataclass(frozen=True)
class _Sample:
    """Wrong rows of one batch row of an isolated prefill, and what attention had there: b = 1, a few queries.

    q, core [1, s, h, d]; visible [1, s, k]; position [1, s]; keys of the whole row; rows [s, h] which of them are wrong
    """

    q: Tensor
    core: Tensor
    visible: Tensor
    position: Tensor
    keys: Keys
    rows: Tensor


def _wrong_rows(audit: Audit, layer: int, off: Tensor) -> _Sample | None:
    """off [b, s, h] rows that are wrong; None where a tap did not fire."""
    c, name = audit.config, f"layers.{layer}.attn"
    b = int(off.any(-1).sum(-1).argmax())
    queries = off[b].any(-1).nonzero().flatten()
    queries = queries[torch.linspace(0, len(queries) - 1, min(SAMPLE, len(queries))).round().long()]
    points = ("attn.q", "attn.visible", "attn.core", "attn.kv", *(["attn.compressor"] if c.ratio(layer) else []))
    if any(audit.fired("isolated", f"layers.{layer}.{point}", "prefill", None) == 0 for point in points):
        return None
    q, visible, core = (audit.values("isolated", f"{name}.{point}", "prefill")[b : b + 1, queries] for point in ("q", "visible", "core"))
    keys = _tables(audit, "isolated", layer, ("prefill",))
    return _Sample(q, core, visible, _positions(audit, "prefill")[b : b + 1, queries], Keys(keys.window[b : b + 1], keys.entries[b : b + 1]), off[b, queries])


def _plain(audit: Audit, layer: int, sample: _Sample, scale: float = 1.0) -> Tensor:
    """Plain attention [s, h, d] over what production stored and says it reads."""
    c, sink = audit.config, audit.reference.blocks[layer].attn.attn_sink
    return attend(sample.q.double() * scale, sample.visible, sample.position, sample.keys, sink, c.sliding_window, c.ratio(layer)).out[0]


def _another_key(audit: Audit, layer: int, off: Tensor, most: float) -> bool:
    """Nearly every wrong row is (1 - p) times the right one plus p times one stored key, for some p and key of its own.

    A key read beyond those shown gives p > 0, one left out p < 0.
    """
    sample = _wrong_rows(audit, layer, off)
    if sample is None:
        return False
    plain, got = _plain(audit, layer, sample)[sample.rows], sample.core[0][sample.rows].double()  # [rows, d]
    table = torch.cat((sample.keys.window, sample.keys.entries), 1)[0]
    table = table[~table.isnan().any(-1)].double()  # [n, d]
    toward = table[None] - plain[:, None]  # [rows, n, d]
    p = ((got - plain)[:, None] * toward).sum(-1) / toward.square().sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    left = (plain[:, None] + p[..., None] * toward - got[:, None]).norm(dim=-1) / got.norm(dim=-1)[:, None]
    return bool((left.amin(-1) <= most).double().mean() >= MOST)


def _softmax_scale(audit: Audit, layer: int, off: Tensor, most: float) -> float | None:
    """The one factor of the softmax scale that makes plain attention over production's own keys what production wrote; None: there is none.

    off [b, s, h] rows that are wrong
    """
    sample = _wrong_rows(audit, layer, off)
    if sample is None:
        return None

    def worst(scale: float) -> float:
        error, _ = row_errors(sample.core, _plain(audit, layer, sample, scale)[None], 1)
        return float(error[0][sample.rows].nan_to_num(math.inf).max())

    exponents = torch.linspace(-2, 2, SCALES).tolist()
    best = min(exponents, key=lambda e: worst(2.0**e))
    width = 4 / (SCALES - 1)
    for _ in range(10):
        width /= 2
        best = min((best - width, best, best + width), key=lambda e: worst(2.0**e))
    return 2.0**best if worst(2.0**best) <= most else None


def _at_step(audit: Audit, verdict: Verdict, phase: str) -> Verdict:
    """Name the decode step of the worst and of the first bad row: decode steps stand along s."""
    if phase == "prefill":
        return verdict
    details = dict(verdict.details)
    if "first" in details:
        details["first_step"] = details["first"][1]
    worst = verdict.where[1] if len(verdict.where) > 1 else None
    return replace(verdict, worst_step=worst, step_first=0, step_last=audit.plan.steps - 1, details=details)


# ---- sink ----


def judge_sink(audit: Audit, layer: int, phase: str) -> Verdict:
    """The weights behind production's attn.core sum to 1 - the sink's share, per head and query, free-running (D6)."""
    point, gate = f"layers.{layer}.attn.core", audit.gate("sink.sum")
    base = Verdict("sink.sum", point, "free", State.NOT_RUN, "sum of the weights off 1 - sink share by", layer=layer, phase=phase, component="sink", why=gate.why)
    for part in ("prefill", phase):
        missing = _missing(audit, base, _attention_points(audit, "production", layer), part)
        if missing is not None:
            return missing
    plain = attended(audit, "production", layer, phase)
    valid = audit.valid_over(phase, _steps(audit, phase))
    share = plain.mass["sink"]
    # Both sums are read off outputs that are rounded alike, so what the rounding does to the estimate cancels.
    got, due = (weight_sum(out, plain.out, share) for out in (audit.values("production", point, phase, _steps(audit, phase)), _rounded(audit, plain.out)))
    usable = valid[..., None] & (share < 1)
    off = (got - due).abs().masked_fill(~usable, -1.0)
    off = torch.where(off.isnan(), torch.inf, off)
    at = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)]
    count, floor = int(usable.sum()), 0.0
    judged = gates.judge(float(off.max()), floor, gate.isolated, gate.k("isolated"), count, "sum of the weights off 1 - sink share by")
    b, s, h = at
    per_head = share.flatten(0, 1)[valid.flatten()].mean(0)
    details: dict[str, Any] = {"head": h, "sink_share": float(share[b, s, h]), "weights_sum_to": float(got[b, s, h]), "mean_sink_share_per_head": [round(float(x), 6) for x in per_head]}
    component = base.component
    if judged.state is State.FAIL:
        over = (~(off <= judged.limit) & usable).any(-1).nonzero()
        details["first"] = over[over[:, 1].argmin()].tolist()
        if not _only_scaled(audit.values("production", point, phase, _steps(audit, phase)), plain, valid, audit.gate("core.witness").isolated):
            component = "attention core"  # the rows differ by more than a factor
        elif (scale := _one_factor(audit.values("production", point, phase, _steps(audit, phase)), plain.out, usable, share[usable])) is not None:
            component, details["because"] = "attention core", _scaled_words(scale)
    verdict = replace(
        base, state=judged.state, reason=judged.reason, value=float(off.max()), limit=judged.limit, spent=judged.spent, floor=floor, k=gate.k("isolated"),
        component=component, eps=gate.isolated, where=at, rows=count, got=float(got[b, s, h]), want=float(due[b, s, h]), element=at, details=details,
    )  # fmt: skip
    return _at_step(audit, verdict, phase)


# ---- where the attention goes ----


def masses(audit: Audit, who: str, layer: int, phase: str, twin: int | None = None) -> dict[str, Tensor]:
    """Shares of attention [b, s, h] by part on the reference's input: `reference`, `isolated`, or a twin's q and keys.

    In decode the earlier keys are the reference's (the state was transplanted); only the query's own key is the model's.
    """

    def make() -> dict[str, Tensor]:
        c, steps = audit.config, _steps(audit, phase)
        ratio, name = c.ratio(layer), f"layers.{layer}.attn"
        position = _positions(audit, phase)

        def value(point: str) -> Tensor:
            if twin is None:
                return audit.values(who, f"{name}.{point}", phase, steps)
            asked: list[int | None] = [None] if phase == "prefill" else list(range(audit.plan.steps))
            return join(f"{name}.{point}", [audit.twin_values[twin, f"{name}.{point}", phase, step].float() for step in asked])

        visible = audit.values(audit.reference_of("isolated") if twin is not None else who, f"{name}.visible", phase, steps)
        size = int(audit.positions(phase, steps).max()) + 1
        own = stored_keys(value("kv"), position, value("compressor") if ratio else None, ratio, size)
        keys = own if phase == "prefill" else _tables(audit, audit.keys_of(who), layer, ("prefill", "decode"))
        sink = audit.reference.blocks[layer].attn.attn_sink
        found = attend(value("q"), visible, position, keys, sink, c.sliding_window, ratio, None if phase == "prefill" else own, torch.float32)
        return found.mass

    return _remember(audit, ("mass", who, twin, layer, phase), make)  # type: ignore[no-any-return]


def judge_masses(audit: Audit, layer: int, phase: str) -> Verdict:
    """Attention on raw and pooled copies of the same tokens, on all window and all compressed keys, and on the sink (P5)."""
    point, gate = f"layers.{layer}.attn.core", audit.gate("attn.mass")
    base = Verdict("attn.mass", point, "isolated", State.NOT_RUN, "share of attention, largest difference", layer=layer, phase=phase, component="attention core", local=True, why=gate.why)
    other = audit.reference_of("isolated")
    points = [p for who in ("isolated", other) for p in _attention_points(audit, who, layer)]
    for part in ("prefill", phase):
        missing = _missing(audit, base, points, part)
        if missing is not None:
            return missing
    valid = audit.valid_over(phase, _steps(audit, phase))
    got, want = masses(audit, "isolated", layer, phase), masses(audit, other, layer, phase)
    twins = [masses(audit, "twin", layer, phase, i) for i in range(len(audit.twins)) if _twin_kept(audit, i, layer, phase)]
    worst, parts, decisive = None, {}, None
    for part in PARTS:
        off = (got[part] - want[part]).abs().double().masked_fill(~valid[..., None], -1.0)
        off = torch.where(off.isnan(), torch.inf, off)
        floor = max((float((t[part] - want[part]).abs()[valid].max()) for t in twins), default=math.nan)
        judged = gates.judge(float(off.max()), floor, gate.isolated, gate.k("isolated"), int(valid.sum()), f"share of attention on {part}: differs by")
        parts[part] = {"difference": float(off.max()), "floor": floor, "limit": judged.limit}
        if worst is None or (judged.state is not State.PASS, judged.spent) > (worst[0].state is not State.PASS, worst[0].spent):
            worst, decisive = (judged, floor), off
    assert worst is not None
    assert decisive is not None
    judged, floor = worst
    at = [int(i) for i in torch.unravel_index(decisive.argmax(), decisive.shape)]
    details: dict[str, Any] = {"parts": parts}
    over = (~(decisive <= judged.limit) & valid[..., None]).any(-1).nonzero()
    if judged.state is State.FAIL and len(over):
        details["first"] = over[over[:, 1].argmin()].tolist()
    verdict = replace(
        base, state=judged.state, reason=judged.reason, value=float(decisive.max()), limit=judged.limit, spent=judged.spent, floor=floor, k=gate.k("isolated"),
        eps=gate.isolated, where=at, rows=int(valid.sum()) * len(PARTS), details=details,
    )  # fmt: skip
    return _at_step(audit, verdict, phase)


def _twin_kept(audit: Audit, twin: int, layer: int, phase: str) -> bool:
    last = None if phase == "prefill" else audit.plan.steps - 1
    return (twin, f"layers.{layer}.attn.q", phase, last) in audit.twin_values


# ---- visible keys against their rule ----


def visible_rule(audit: Audit, who: str, layer: int, phase: str) -> dict[str, Any]:
    """visible_measurement of one run over a phase."""
    c, steps = audit.config, _steps(audit, phase)
    return visible_measurement(
        audit.values(who, f"layers.{layer}.attn.visible", phase, steps), audit.positions(phase, steps), c.sliding_window, c.ratio(layer),
        audit.valid_over(phase, steps), c.index_topk if c.kind(layer) == "csa" else None, audit.lengths if phase == "prefill" else None, RATIOS,
    )  # fmt: skip


def judge_visible_rule(audit: Audit, layer: int, phase: str) -> Verdict:
    """Every key that production read is due at its query's position, and none is missing: by rule, free-running (P4, D5).

    The rule knows no phase, so prefill and decode of one position see the same window and the same complete entries.
    """
    point = f"layers.{layer}.attn.visible"
    base = Verdict("visible.rule", point, "free", State.NOT_RUN, "queries with a wrong key", layer=layer, phase=phase, component="visibility mask", why="which keys a position sees is a rule of its own")
    missing = _missing(audit, base, [("production", point)], phase)
    if missing is not None:
        return missing
    found = visible_rule(audit, "production", layer, phase)
    judged = gates.judge_exact(found["wrong"], found["queries"], "queries read wrong keys")
    classes = {name: found[name] for name in FAULTS if found[name]["queries"]}
    verdict = replace(base, state=judged.state, reason=judged.reason, value=float(found["wrong"]), limit=0.0, spent=judged.spent, rows=found["queries"], details=classes)
    if classes:
        name, one = min(classes.items(), key=lambda item: item[1]["first"][1])
        said = ", ".join(f"{kind} at {c['queries']}" for kind, c in classes.items())
        shown = f": tokens {one['tokens']}" if one.get("tokens") else ""
        verdict = replace(
            verdict, component=BLAMED[name], where=one["first"], reason=f"{judged.reason}: {said}; first {name} at position {one['position']}{shown}",
            details={**classes, "first": one["first"]},
        )  # fmt: skip
    return _at_step(audit, verdict, phase)


# ---- residual streams: production's own parts must add up ----


def streams_before(audit: Audit, who: str, layer: int, half: str, phase: str) -> Tensor:
    """X that a half started from in an isolated run (`isolated`; `reference`): [b, s, n, D]."""
    if half == "hc_ffn":
        return audit.values(who, f"layers.{layer}.hc_attn.X", phase, _steps(audit, phase))
    if phase == "prefill":
        return audit.layer_input(layer, phase, None)
    return torch.cat([audit.layer_input(layer, phase, step) for step in range(audit.plan.steps)], 1)


def mixing_parts(audit: Audit, who: str, layer: int, half: str, phase: str) -> dict[str, Tensor]:
    """X, before, pre, post, comb, a and y of one half over a phase."""
    steps, at = _steps(audit, phase), f"layers.{layer}.{half}"
    out = {name: audit.values(who, f"{at}.{name}", phase, steps) for name in ("X", "pre", "post", "comb", "a")}
    out["y"] = audit.values(who, f"layers.{layer}.{half.removeprefix('hc_')}.out", phase, steps)
    return out | {"before": streams_before(audit, who, layer, half, phase)}


def _mixing_points(layer: int, half: str, who: str) -> list[tuple[str, str]]:
    at = f"layers.{layer}"
    names = [*(f"{at}.{half}.{n}" for n in ("X", "pre", "post", "comb", "a")), f"{at}.{half.removeprefix('hc_')}.out", f"{at}.hc_attn.X"]
    return [(who, name) for name in names]


WEIGHTS = ("pre", "post", "comb")  # of a half's streams, in the order of ops.hc_pre behind the block's input


def judge_mixing(audit: Audit, layer: int, phase: str, half: str) -> list[Verdict]:
    """a = sum_i pre[i] X[i] and X' = post y + comb^T X of production's own values, FP64; |comb part| within comb's norm (P3).

    Two verdicts: the block's input and the streams after the half. A transposed comb, lost pre weights or a post applied
    to another stream show here whatever the other model says.
    """
    verdicts = []
    for name in ("a", "X"):
        point, gate = f"layers.{layer}.{half}.{name}", audit.gate("hc.sums")
        base = Verdict("hc.sums", point, "isolated", State.NOT_RUN, "worst row rel-L2 to the sum of its own parts", layer=layer, phase=phase, component="mHC", local=True, why=gate.why)
        missing = _missing(audit, base, _mixing_points(layer, half, "isolated"), phase)
        if missing is not None:
            verdicts.append(missing)
            continue
        v = {key: value.double() for key, value in mixing_parts(audit, "isolated", layer, half, phase).items()}
        asked = ("pre", "before") if name == "a" else ("post", "comb", "y", "before")
        whole = torch.stack([v[part].flatten(2).isfinite().all(-1) for part in asked]).all(0)  # nothing follows from NaN
        valid = audit.valid_over(phase, _steps(audit, phase)) & whole
        if not valid.any():
            verdicts.append(replace(base, reason=f"no query has finite {', '.join(asked)}"))
            continue
        mixed = torch.einsum("bsij,bsid->bsjd", v["comb"], v["before"])
        want = torch.einsum("bsi,bsid->bsd", v["pre"], v["before"]) if name == "a" else v["post"][..., None] * v["y"][:, :, None] + mixed
        verdict = judge_values(base, spec_of(point), gate, "isolated", v[name], _rounded(audit, want), valid, _exact(valid))
        if name == "X":
            verdict = _with_bound(verdict, v, valid)
        verdicts.append(_at_step(audit, verdict, phase))
    return verdicts


def _with_bound(verdict: Verdict, v: dict[str, Tensor], valid: Tensor) -> Verdict:
    """What is left of X after post * y may not exceed comb's spectral norm times |before|, bf16 steps of X aside."""
    left = (v["X"] - v["post"][..., None] * v["y"][:, :, None]).flatten(2).norm(dim=-1)[valid]
    comb = v["comb"][valid]
    norm = torch.linalg.matrix_norm(comb, 2) if comb.isfinite().all() else torch.full((len(comb),), math.nan)
    before, after = (v[name].flatten(2).norm(dim=-1)[valid] for name in ("before", "X"))
    over = float(((left - 2**-8 * after) / (norm * before)).nan_to_num(math.inf).max())
    details = {**verdict.details, "comb_norm": float(norm.max()), "comb_part_over_bound": over}
    if verdict.state is State.PASS and not over <= 1.0:
        return replace(verdict, state=State.FAIL, reason=f"the comb part is {over:.3g} times what its spectral norm allows", details=details)
    return replace(verdict, details=details)


def judge_slopes(audit: Audit, layer: int, phase: str) -> Verdict:
    """Growth over steps at fixed depth is the reference's: slope of log(rms production / rms reference), worst stream (P3).

    In prefill the queries take the place of the steps.
    """
    point, gate = f"layers.{layer}.hc_ffn.X", audit.gate("residual.slope")
    base = Verdict("residual.slope", point, "free", State.NOT_RUN, "|X| over the reference's, growth over the phase", layer=layer, phase=phase, component="mHC", why=gate.why)
    missing = _missing(audit, base, [("production", point), ("reference", point)], phase)
    if missing is not None:
        return missing
    ratio = step_ratios(audit, point, phase)  # [steps, n]
    steps, floor = len(ratio), audit.floor("free", point)
    # Many steps average their scatter away; few show the worst of it, and one has only its own ratio.
    noise = floor.typical() if steps >= gates.TYPICAL_ROWS else floor.norm
    growth = [abs(slope(ratio[:, j].log())) * (steps - 1) if steps > 1 else abs(float(ratio[0, j].log())) for j in range(ratio.shape[1])]
    stream = max(range(len(growth)), key=lambda j: math.inf if math.isnan(growth[j]) else growth[j])
    value = growth[stream]
    judged = gates.judge(math.inf if math.isnan(value) else value, noise if floor.rows else math.nan, gate.eps("free"), gate.k("free"), steps, "|X| over the reference's grows by")
    verdict = replace(
        base, state=judged.state, reason=judged.reason, value=value, limit=judged.limit, spent=judged.spent, floor=noise, k=gate.k("free"), eps=gate.eps("free"),
        rows=steps, details={"stream": stream, "growth": growth, "ratio_first": ratio[0].tolist(), "ratio_last": ratio[-1].tolist()},
    )  # fmt: skip
    return _at_step(audit, verdict, phase)


def step_ratios(audit: Audit, point: str, phase: str) -> Tensor:
    """[steps or queries, n] rms of X over the reference's, batch rows that have the query together."""
    steps = _steps(audit, phase)
    valid = audit.valid_over(phase, steps)[..., None, None]
    got, want = (audit.values(who, point, phase, steps).double().masked_fill(~valid, 0.0).square().sum((0, 3)) for who in ("production", "reference"))
    return (got / want).sqrt()


# ---- Sinkhorn ----


def sinkhorn_start(audit: Audit, X: Tensor, layer: int, half: str, sums: Sums = ops.PLAIN) -> Tensor:
    """softmax + eps of the mixing logits that X asks for, by the reference's operations: before any normalisation."""
    c, w = audit.config, getattr(audit.reference.blocks[layer], half)
    n = c.hc_mult
    m = ops.hc_mix(X.float(), w.fn, c.rms_norm_eps, sums)
    logits = (m[..., 2 * n :] * w.scale[2] + w.base[2 * n :]).unflatten(-1, (n, n))
    start: Tensor = sums.softmax(logits, -1) + c.hc_eps
    return start


def _own_weights(audit: Audit, layer: int, half: str, name: str, phase: str) -> tuple[Tensor, Tensor, Tensor, Floor, Tensor]:
    """pre, post or comb of production, and the reference's of production's own X: got, want, valid rows, floor, X [1, rows, n, D]."""
    c, valid = audit.config, audit.valid_over(phase, _steps(audit, phase))
    X = streams_before(audit, "isolated", layer, half, phase)[valid][None]
    got = audit.values("isolated", f"layers.{layer}.{half}.{name}", phase, _steps(audit, phase))[valid][None]
    every = torch.ones(got.shape[:2], dtype=torch.bool)

    def weights(sums: Sums) -> Tensor:
        w = getattr(audit.reference.blocks[layer], half)
        return ops.hc_pre(X.float(), w.fn, w.base, w.scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, sums)[WEIGHTS.index(name) + 1]

    want, floor = weights(Sums(0)), Floor()
    for order in (1, 2, 3):
        floor.add(weights(Sums(order)), want, VALUES, want.dim() - 2, every)
    return got, want, every, floor, X


def _at_queries(audit: Audit, verdict: Verdict, phase: str) -> Verdict:
    """A verdict over the valid rows in one line, placed at their row and query."""
    at = audit.valid_over(phase, _steps(audit, phase)).nonzero()
    where = [int(i) for i in at[verdict.where[1]]] if len(verdict.where) > 1 else []
    details = {**verdict.details, **({"first": [int(i) for i in at[verdict.details["first"][1]]]} if "first" in verdict.details else {})}
    return _at_step(audit, replace(verdict, details=details, where=where), phase)


def judge_weights(audit: Audit, layer: int, phase: str, half: str, name: str) -> Verdict:
    """pre or post is what the reference makes of production's own X: no step of what came before is left to excuse it."""
    point, gate = f"layers.{layer}.{half}.{name}", audit.gate("hc.weights")
    base = Verdict("hc.weights", point, "isolated", State.NOT_RUN, "worst row rel-L2 to the weights of its own X", layer=layer, phase=phase, component="mHC", local=True, why=gate.why)
    missing = _missing(audit, base, _mixing_points(layer, half, "isolated"), phase)
    if missing is not None:
        return missing
    got, want, every, floor, _ = _own_weights(audit, layer, half, name, phase)
    return _at_queries(audit, judge_values(base, spec_of(point), gate, "isolated", got, want, every, floor), phase)


def judge_sinkhorn(audit: Audit, layer: int, phase: str, half: str) -> Verdict:
    """comb is the reference's Sinkhorn of production's own X after exactly hc_sinkhorn_iters iterations (D7)."""
    point, gate = f"layers.{layer}.{half}.comb", audit.gate("sinkhorn.iterations")
    base = Verdict("sinkhorn.iterations", point, "isolated", State.NOT_RUN, "worst row rel-L2 to Sinkhorn of its own X", layer=layer, phase=phase, component="mHC", local=True, why=gate.why)
    missing = _missing(audit, base, _mixing_points(layer, half, "isolated"), phase)
    if missing is not None:
        return missing
    c = audit.config
    got, want, every, floor, X = _own_weights(audit, layer, half, "comb", phase)
    verdict = judge_values(base, spec_of(point), gate, "isolated", got, want, every, floor)
    trail = sinkhorn_trail(sinkhorn_start(audit, X, layer, half), c.hc_sinkhorn_iters + 3, c.hc_eps)
    due = f"{c.hc_sinkhorn_iters} columns"
    step, distance = nearest_step(got, trail, due)
    turned, turned_distance = nearest_step(got.mT, trail, due)
    details = {**verdict.details, "nearest": step, "distance": distance, "expected": due}
    reason = verdict.reason
    if verdict.state is State.FAIL:
        if turned_distance < distance:
            reason += f"; nearest to the transpose after {turned}"
        elif step != due:
            reason += f"; nearest to the result after {step}, expected {due}"
    return _at_queries(audit, replace(verdict, reason=reason, details=details), phase)


# ---- text ----


def judge_top(audit: Audit, phase: str, k: int) -> Verdict:
    """The k most likely tokens: another set is allowed where the reference's scores are closer than the noise (P6)."""
    base = Verdict(f"logits.top{k}", "logits", "free", State.NOT_RUN, "score gap of differing tokens", phase=phase, component="head", why="a token may be swapped only across a gap of twice k x the twins' worst logit error")
    missing = _missing(audit, base, [("production", "logits"), ("reference", "logits")], phase)
    if missing is not None:
        return missing
    got, want = (whole_phase(audit, who, "logits", phase) for who in ("production", "reference"))
    assert got is not None
    assert want is not None
    shared, gap = top_agreement(got, want, k)
    floor = audit.floor("free", "logits")
    limit = flip_margin(floor)
    gap = torch.where(got.isnan().any(-1), torch.inf, gap)
    judged = gates.judge_exact(int((gap > limit).sum()), len(want) if floor.rows else 0, f"rows swap tokens of the {k} best beyond the margin")
    return replace(
        base, state=judged.state, reason=judged.reason, value=float(gap.max()), limit=limit, spent=float(gap.max()) / limit if limit > 0 else None, floor=floor.absolute,
        k=2 * gates.K_FREE, eps=0.0, rows=len(want), near_ties=int(((shared < k) & ~(gap > limit)).sum()), details={"agreement": float(shared.double().mean() / k)},
    )  # fmt: skip


def judge_degeneration(audit: Audit) -> Verdict:
    """production's greedy text is stuck only where the reference's is, or where the texts parted at a counted near-tie (P6)."""
    base = Verdict("greedy.degeneration", "logits", "free", State.NOT_RUN, "texts stuck in one model only, beyond a near-tie", phase="decode", component="head", why="a text may degenerate only as the reference's does")
    parted = judge_greedy(audit)
    result = audit.finished_greedy
    if parted.state is State.NOT_RUN or result is None:
        return replace(base, reason=parted.reason or "no greedy text")
    found = [tuple(degeneration(text) for text in texts) for texts in zip(result.reference, result.production, strict=True)]
    judged_rows = [b for b, (want, _) in enumerate(found) if want["degenerate"] is not None]
    differ = [b for b in judged_rows if found[b][0]["degenerate"] != found[b][1]["degenerate"]]
    explained = [b for b in differ if result.first_difference[b] is not None and parted.state is State.PASS]
    unexplained = len(differ) - len(explained)
    judged = gates.judge_exact(unexplained, len(judged_rows), "texts degenerate where the reference's does not, or the reverse")
    excused = [{"row": b, "first_difference": result.first_difference[b], "margin": result.margin[b], "allowed_margin": parted.details["allowed_margin"]} for b in explained]
    details: dict[str, Any] = {str(b): {"reference": want["degenerate"], "production": got["degenerate"]} for b, (want, got) in enumerate(found)}
    details |= {"unexplained": unexplained, "excused": excused}
    reason = judged.reason or ("" if judged_rows else "the texts are too short to tell")
    if excused:
        ties = [f"row {one['row']} at token {one['first_difference']}, margin {one['margin']:.3g} of {one['allowed_margin']:.3g} allowed" for one in excused]
        reason = "; ".join(filter(None, [reason, f"{plural(len(excused), 'text')} stuck in one model only, excused: the models parted at a near-tie ({'; '.join(ties)})"]))
    return replace(base, state=judged.state, reason=reason, value=float(unexplained), limit=0.0, spent=judged.spent, rows=len(judged_rows), near_ties=len(explained), details=details)
