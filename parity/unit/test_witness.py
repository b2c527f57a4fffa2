"""The gates with a third witness, on a small audit of the real production: green as it is, red with each fault planted.

Faults are planted in production's own calls (ops.*), so that kernels, caches and taps are the real ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

import production
import reference
from parity import evaluate, gates, measure, selection, witness
from parity.audit import TWIN_ORDERS, Audit, Plan
from parity.outside import OutsideAudit
from parity.unit.worlds import prompt, write_checkpoint
from probes.core.records import State
from production import ops
from production.model import POLICY

STEPS, LENGTHS = 5, (31, 22)
CSA = 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Window, CSA, HCA and CSA layer; a window of 16 that wraps, an indexer that discards from entry 8 on."""
    return write_checkpoint(tmp_path_factory.mktemp("witness") / "world", seed=7, hc_mult=3, hc_sinkhorn_iters=6)


@pytest.fixture(scope="module")
def models(checkpoint):
    model = reference.load(checkpoint, policy=POLICY, max_context=64)
    return model, [model.twin(order) for order in TWIN_ORDERS]


def run(checkpoint, models, plant=None, layers=(0, 1, 2, 3)):
    """An audit of two rows of unequal length; `plant(production)` changes production before it runs."""
    model, twins = models
    if layers != (0, 1, 2, 3):
        twins = twins[:1]  # a fault needs no careful floor
    made = production.load(checkpoint, max_context=64)
    if plant is not None:
        plant(made)
    rows = [tuple(prompt(n, 128, 17 * i)) for i, n in enumerate(LENGTHS)]
    more = [tuple(prompt(STEPS, 128, 17 * i + n)) for i, n in enumerate(LENGTHS)]
    plan = Plan(rows, more, ("prefill", "decode"), layers, STEPS, 64, str(checkpoint), greedy_tokens=20)
    audit = Audit(model, made, twins, plan, say=lambda line: None)
    audit.ensure("decode")
    return audit


@pytest.fixture(scope="module")
def clean(checkpoint, models):
    return run(checkpoint, models)


def every(audit, layer, phase):
    """All verdicts of one layer and phase by gate and point."""
    found = [judge(audit, layer, phase) for judge in (witness.judge_core, witness.judge_sink, witness.judge_masses, witness.judge_visible_rule, witness.judge_slopes)]
    for half in ("hc_attn", "hc_ffn"):
        found += [*witness.judge_mixing(audit, layer, phase, half), witness.judge_sinkhorn(audit, layer, phase, half)]
        found += [witness.judge_weights(audit, layer, phase, half, name) for name in ("pre", "post")]
    return {(v.gate, v.point.split(".", 2)[2]): v for v in found}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_right_production_is_green_and_rows_were_compared(clean, phase):
    for layer in clean.plan.layers:
        for v in every(clean, layer, phase).values():
            assert v.state is State.PASS, f"{v.gate} {v.point} {v.reason}"
            assert v.rows > 0
    for k in (5, 10):
        assert witness.judge_top(clean, phase, k).state is State.PASS


def test_greedy_text_is_judged(clean):
    verdict = witness.judge_degeneration(clean)
    assert verdict.state is State.PASS, verdict.reason
    assert verdict.rows == 2


def test_everything_is_measured(clean):
    clean.greedy()
    names = {m.name for m in measure.measurements(clean)}
    assert {"residual", "residual growth", "sinkhorn", "visible", "attention mass", "logits", "drift", "greedy"} <= names
    growth = next(m for m in measure.measurements(clean) if m.name == "residual growth")
    assert 0 < growth.values["comb_bound_production"] <= 1.001
    sinkhorn = next(m for m in measure.measurements(clean) if m.name == "sinkhorn")
    assert len(sinkhorn.values["residual_per_iteration"]) == 6


def test_a_tap_that_never_fired_is_not_run(checkpoint, models):
    audit = run(checkpoint, models, layers=(0,))
    del audit.passes["production", "decode", 3].passes["decode", 3].chunks["layers.0.attn.q"]
    assert witness.judge_core(audit, 0, "decode").state is State.NOT_RUN
    assert witness.judge_core(audit, 0, "prefill").state is State.PASS


# ---- what a wrong attn.core points to ----


def explained(audit, layer, phase, spoil):
    """The verdict on an isolated attn.core that `spoil(core)` gave, in what was recorded only."""
    point = f"layers.{layer}.attn.core"
    steps = None if phase == "prefill" else (0, 0)
    key = (phase, None if phase == "prefill" else 0)
    chunks = audit.passes["isolated", *key].passes[key].chunks
    kept = chunks[point]
    chunks[point] = [spoil(torch.cat(kept, 1).clone())]
    try:
        verdict = evaluate.judge_case(audit, selection.Case(phase, point, "isolated", layer, steps), "")
        assert verdict.state is State.FAIL
        return witness.explained_core(audit, verdict)
    finally:
        chunks[point] = kept


def test_a_core_whose_keys_are_red_already_is_not_put_down_to_the_cache(clean):
    point, key = f"layers.{CSA}.attn.compressor", ("prefill", None)
    chunks = clean.passes["isolated", *key].passes[key].chunks
    kept = chunks[point]
    torch.manual_seed(0)
    noise = lambda core: core + 0.2 * core.norm(dim=-1, keepdim=True) * torch.randn(core.shape) / core.shape[-1] ** 0.5  # noqa: E731
    chunks[point] = [noise(torch.cat(kept, 1).clone())]
    try:
        found = explained(clean, CSA, "prefill", noise)
    finally:
        chunks[point] = kept
    assert (found.component, found.details["because"]) == ("attention core", f"what attention reads is wrong already: {point}")
    assert "by_exclusion" not in found.details


def test_rows_off_by_a_factor_point_to_the_sink(clean):
    for phase in ("prefill", "decode"):
        found = explained(clean, CSA, phase, lambda core: core * (1 + 0.2 * torch.arange(core.shape[2])[:, None] / core.shape[2] + 0.1))
        assert found.component == "sink", phase
        assert "times 1.1 to" in found.details["because"]


@pytest.mark.parametrize("heads", [slice(None), slice(1, 2)], ids=["all heads", "one head"])
def test_one_factor_for_all_rows_points_to_the_values_and_not_to_the_sink(clean, heads):
    def scaled(core):
        core[:, :, heads] *= 1.06
        return core

    assert witness.attended(clean, "production", CSA, "prefill").mass["sink"].numel()  # so that its share is known
    found = explained(clean, CSA, "prefill", scaled)
    assert found.component == "attention core"
    assert "times 1.06, whatever the sink's share of it is" in found.details["because"]


def test_values_that_are_scaled_inside_attention_are_not_named_as_the_sink(checkpoint, models, monkeypatch):
    def wrap(original):
        def sparse_attn(dev, q, ring, ring_position, entries, selected, position, row, sink, out, *args, **kwargs):
            original(dev, q, ring, ring_position, entries, selected, position, row, sink, out, *args, **kwargs)
            out.mul_(1.02)

        return sparse_attn

    patched(monkeypatch, "sparse_attn", wrap)
    audit = run(checkpoint, models, layers=(0,))
    for phase in ("prefill", "decode"):
        for gate in ("core.witness", "sink.sum"):
            found = every(audit, 0, phase)[gate, "attn.core"]
            assert (found.state, found.component) == (State.FAIL, "attention core"), (phase, gate)


def test_another_softmax_scale_points_to_yarn(clean):
    def sharper(core):
        found: Any = witness._wrong_rows(clean, CSA, torch.ones(core.shape[:3], dtype=torch.bool))
        b = 0
        q, visible = (clean.values("isolated", f"layers.{CSA}.attn.{name}", "prefill")[b : b + 1] for name in ("q", "visible"))
        whole = dataclasses.replace(found, q=q, visible=visible, position=witness._positions(clean, "prefill")[b : b + 1])
        core[b] = witness._plain(clean, CSA, whole, 1.63)
        return core

    found = explained(clean, CSA, "prefill", sharper)
    assert found.component == "rope"
    assert "right at 1.63 times the softmax scale" in found.details["because"]


@pytest.mark.parametrize("share", [0.3, -0.2], ids=["one key more", "one key less"])
def test_one_key_more_or_less_points_to_the_mask(clean, share):
    kv = clean.values("isolated", f"layers.{CSA}.attn.kv", "prefill")

    def mixed(core):
        core[0, 5:] = (1 - share) * core[0, 5:] + share * kv[0, 2:-3, None]
        return core

    found = explained(clean, CSA, "prefill", mixed)
    assert found.component == "visibility mask"


def test_anything_else_points_to_what_is_read_of_the_cache(clean):
    torch.manual_seed(0)
    for phase in ("prefill", "decode"):
        found = explained(clean, CSA, phase, lambda core: core + 0.2 * core.norm(dim=-1, keepdim=True) * torch.randn(core.shape) / core.shape[-1] ** 0.5)
        assert found.component == "KV quant", phase
    assert "q and the stored rows are right" in found.details["because"]
    clean.shows_store = False  # somebody else's production: what it shows at attn.kv goes into a store that nobody has seen
    try:
        found = explained(clean, CSA, "prefill", lambda core: core + 0.2 * core.norm(dim=-1, keepdim=True) * torch.randn(core.shape) / core.shape[-1] ** 0.5)
    finally:
        clean.shows_store = True
    assert "stored rows" not in found.details["because"]
    assert found.details["because"].startswith("the keys seen, q and the rows shown at attn.kv and attn.compressor are right; ")
    # What is small is not explained by being small.
    found = explained(clean, CSA, "prefill", lambda core: core + 8e-3 * core.norm(dim=-1, keepdim=True) * torch.randn(core.shape) / core.shape[-1] ** 0.5)
    assert found.component == "KV quant"
    found = explained(clean, CSA, "prefill", lambda core: core.masked_fill(torch.rand(core.shape[:3])[..., None] < 0.1, math.nan))
    assert (found.component, found.details["because"]) == ("attention core", "values that are not finite")


def test_rows_are_right_up_to_a_factor_only_where_the_factor_is_why(clean):
    plain = witness.attended(clean, "production", CSA, "prefill")
    valid = clean.valid_over("prefill", None)
    got = plain.out.float()
    assert witness._only_scaled(got * 1.1, plain, valid, 8e-3)
    assert not witness._only_scaled(got, plain, valid, 8e-3), "right as it is: rounding that was declared and not done has no factor"


def test_only_this_projects_own_production_shows_its_store():
    assert Audit.shows_store
    assert not OutsideAudit.shows_store


# ---- faults ----


def patched(monkeypatch, name, wrap):
    """Replace ops.name by wrap(original)."""
    monkeypatch.setattr(ops, name, functools.wraps(getattr(ops, name))(wrap(getattr(ops, name))))


def test_sinks_read_as_bf16_are_named_as_the_sink(checkpoint, models):
    """B083."""

    def plant(made):
        for layer in made.weights.layers:
            sink = layer.attn.attn_sink
            sink.copy_(sink.clone().view(torch.bfloat16)[: len(sink)].float().clamp(-1e30, 1e30))

    audit = run(checkpoint, models, plant, layers=(0,))
    found = every(audit, 0, "prefill")
    for gate in ("core.witness", "sink.sum"):
        assert found[gate, "attn.core"].state is State.FAIL
        assert found[gate, "attn.core"].component == "sink"


def test_a_sink_counted_twice_in_decode_is_named_as_the_sink(checkpoint, models, monkeypatch):
    """B086: prefill stays green."""

    def wrap(original):
        def sparse_attn(dev, q, ring, ring_position, entries, selected, position, row, sink, out, *args, **kwargs):
            again = sink + math.log(2) if "splits" in kwargs else sink
            original(dev, q, ring, ring_position, entries, selected, position, row, again, out, *args, **kwargs)

        return sparse_attn

    patched(monkeypatch, "sparse_attn", wrap)
    audit = run(checkpoint, models, layers=(0, 1))
    for layer in (0, 1):
        assert every(audit, layer, "prefill")["sink.sum", "attn.core"].state is State.PASS
        found = every(audit, layer, "decode")
        assert found["sink.sum", "attn.core"].state is State.FAIL
        assert found["core.witness", "attn.core"].component == "sink"
        assert found["core.witness", "attn.core"].details["first_step"] == 0


def test_a_list_padded_with_entry_0_is_named_as_a_pad(checkpoint, models, monkeypatch):
    """B057."""

    def wrap(original):
        def topk(dev, score, position, selected, ratio, **kwargs):
            original(dev, score, position, selected, ratio, **kwargs)
            selected.clamp_(min=0)

        return topk

    patched(monkeypatch, "topk", wrap)
    audit = run(checkpoint, models, layers=(0, CSA))
    assert every(audit, 0, "prefill")["visible.rule", "attn.visible"].state is State.PASS
    verdict = every(audit, CSA, "prefill")["visible.rule", "attn.visible"]
    assert verdict.state is State.FAIL
    assert "pad" in verdict.details
    assert verdict.component == "visibility mask"
    # Attention over what was read is right all the same: the list is at fault, not the softmax.
    assert every(audit, CSA, "prefill")["core.witness", "attn.core"].state is State.PASS


def test_a_stored_key_that_changes_later_is_seen_by_attention_on_its_own_keys(checkpoint, models, monkeypatch):
    """B003: a step that completes no group writes to entry 0."""

    def wrap(original):
        def store_entries(dev, rows, entry, cache):
            original(dev, rows, entry, cache)
            if rows.shape[1] == 1 and cache.shape[1] > 1 and bool((entry < 0).all()):
                cache[:, 0] = cache[:, 1]

        return store_entries

    patched(monkeypatch, "store_entries", wrap)
    audit = run(checkpoint, models, layers=(0, CSA))
    found = every(audit, CSA, "decode")
    assert found["visible.rule", "attn.visible"].state is State.PASS
    assert found["core.witness", "attn.core"].state is State.FAIL
    assert found["core.witness", "attn.core"].component == "attention core"


@pytest.mark.parametrize(
    ("name", "gate", "point"),
    [("hc_post", "hc.sums", "hc_ffn.X"), ("hc_pre", "hc.sums", "hc_attn.a"), ("iterations", "sinkhorn.iterations", "hc_ffn.comb")],
    ids=["B090 comb not transposed", "B095 pre weights ignored", "B096 an iteration fewer"],
)
def test_mixing_faults_are_named(name, gate, point, checkpoint, models, monkeypatch):
    def post(original):
        def hc_post(dev, y, X, weights, comb, out, **rest):
            original(dev, y, X, weights, comb.mT.contiguous(), out, **rest)

        return hc_post

    def pre(original):
        def hc_pre(dev, X, fn, base, scale, pre, weights, comb, a, iters, hc_eps, norm_eps, **rest):
            original(dev, X, fn, base, scale, pre, weights, comb, a, iters - (name == "iterations"), hc_eps, norm_eps, **rest)
            if name == "hc_pre":
                a.copy_(X.float().mean(1))

        return hc_pre

    patched(monkeypatch, "hc_post" if name == "hc_post" else "hc_pre", post if name == "hc_post" else pre)
    audit = run(checkpoint, models, layers=(0,))
    for phase in ("prefill", "decode"):
        verdict = every(audit, 0, phase)[gate, point]
        assert verdict.state is State.FAIL
        assert verdict.component == "mHC"
        assert verdict.local is True
    if name == "iterations":
        assert "nearest to the result after 5 columns" in verdict.reason


@pytest.mark.parametrize("name", ["pre", "post"])
def test_weights_off_by_less_than_a_flip_may_cost_are_seen_on_their_own_streams(name, checkpoint, models, monkeypatch):
    """0.2 % on one weight of the second half: within what a bf16 step of X may do to it, so the chain cannot say it."""

    def wrap(original):
        def hc_pre(dev, X, fn, base, scale, pre, post, comb, a, iters, hc_eps, norm_eps, **rest):
            original(dev, X, fn, base, scale, pre, post, comb, a, iters, hc_eps, norm_eps, **rest)
            {"pre": pre, "post": post}[name][..., 1].mul_(1.002)

        return hc_pre

    patched(monkeypatch, "hc_pre", wrap)
    audit = run(checkpoint, models, layers=(0,))
    for phase in ("prefill", "decode"):
        verdict = every(audit, 0, phase)["hc.weights", f"hc_ffn.{name}"]
        assert verdict.state is State.FAIL
        assert verdict.spent > 20
        assert len(verdict.where) == 2


def test_a_flip_beyond_the_noise_fails_whatever_productions_own_error_is(clean):
    from parity.evaluate import flip_margin, judge_flips

    floor = clean.floor("free", "logits")
    trace = clean.passes["production", "decode", 2].passes["decode", 2]
    kept = trace.chunks["logits"]
    assert judge_flips(clean, "decode").state is State.PASS
    want = clean.get("reference", "logits", "decode", 2)
    wrong = want.clone()
    wrong[0, 0, want[0, 0].argmin()] = want.max() + 1
    try:
        trace.chunks["logits"] = [wrong]
        assert flip_margin(floor) < float(want[0, 0].max() - want[0, 0].min())
        assert judge_flips(clean, "decode").state is State.FAIL
        assert witness.judge_top(clean, "decode", 5).state is State.FAIL
    finally:
        trace.chunks["logits"] = kept


def test_a_text_that_loops_where_the_references_does_not_fails(clean, monkeypatch):
    result = clean.greedy()
    stuck = [[5] * len(text) for text in result.production]
    varied = [list(range(len(text))) for text in result.reference]
    monkeypatch.setattr(result, "reference", varied)
    monkeypatch.setattr(result, "production", stuck)
    monkeypatch.setattr(result, "first_difference", [0, 0])
    monkeypatch.setattr(result, "margin", [99.0, 99.0])
    wrong = witness.judge_degeneration(clean)
    assert (wrong.state, wrong.value, wrong.limit, wrong.near_ties) == (State.FAIL, 2.0, 0.0, 0)
    assert wrong.details["excused"] == []
    monkeypatch.setattr(result, "margin", [0.0, 0.0])  # parted at a near-tie: counted and told, not failed
    verdict = witness.judge_degeneration(clean)
    assert (verdict.state, verdict.value, verdict.limit, verdict.near_ties) == (State.PASS, 0.0, 0.0, 2), "a pass is value <= limit"
    assert verdict.reason.startswith("2 texts stuck in one model only, excused: the models parted at a near-tie (row 0 at token 0, margin 0 of ")
    assert [one["row"] for one in verdict.details["excused"]] == [0, 1]
    assert verdict.details["0"] == {"reference": False, "production": True}
    assert verdict.details["unexplained"] == 0


def test_limits_of_the_witnesses_come_from_the_table():
    for name in ("core.witness", "sink.sum", "attn.mass", "hc.sums", "hc.weights", "sinkhorn.iterations", "residual.slope"):
        assert gates.GATES[name].why
