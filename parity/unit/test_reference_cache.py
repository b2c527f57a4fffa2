"""A run whose reference comes from the cache says what a computed one says, bit for bit; nothing else is ever taken."""

from __future__ import annotations

import os
from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from parity import evaluate, selection
from parity.audit import Audit, Floor, Plan
from parity.cache import Entry, ReferenceCache, digest_of, pack_change, pack_floor, unpack_change, unpack_floors
from parity.unit.worlds import prompt, write_checkpoint

LAYERS, STEPS = range(3), 6
ROWS = [tuple(prompt(21, 128)), tuple(prompt(10, 128, 40))]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("world"), seed=5)


def audit_of(world, cache, rows=ROWS, layers=(0, 1, 2)):
    """An audit whose production is the reference with its sums in a third order."""
    model = reference.load(world, policy="published", layers=LAYERS, max_context=64)
    plan = Plan(rows, [(), ()], ("prefill", "decode"), layers, STEPS, 64, greedy_tokens=4)
    return Audit(model, model.twin(3), [model.twin(order) for order in (1, 2)], plan, say=lambda _: None, cache=cache)


def verdicts_of(audit):
    cases = selection.layer_cases(audit.config, audit.plan.layers, audit.plan.phases, STEPS)
    cases += selection.model_cases(audit.plan.phases, STEPS)
    found = [evaluate.judge_case(audit, case, case.id) for case in cases]
    return [*found, evaluate.judge_greedy(audit)]


def cache_at(path, **changes):
    return ReferenceCache(path, {"checkpoint": "a", "code": "b"}, **changes)


def forbid(monkeypatch, *models):
    def run(*_args, **_kwargs):
        raise AssertionError("the reference was computed")

    for model in models:
        for name in ("prefill", "decode", "run_layer"):
            monkeypatch.setattr(model, name, run)


def same_bits(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert digest_of(a[key]) == digest_of(b[key]), key


@pytest.fixture(scope="module")
def computed(world, tmp_path_factory):
    """An audit that filled a cache, and its verdicts."""
    folder = tmp_path_factory.mktemp("cache")
    audit = audit_of(world, cache_at(folder))
    return folder, audit, verdicts_of(audit)


def test_a_cached_run_gives_identical_verdicts_and_computes_no_reference(world, computed, monkeypatch):
    folder, first, expected = computed
    second = audit_of(world, cache_at(folder))
    forbid(monkeypatch, second.reference, *second.twins)
    assert verdicts_of(second) == expected
    assert len(expected) > 100
    assert (second.cache.found, second.cache.computed) == (STEPS + 2, 0)  # and the greedy text
    assert second.clamped == first.clamped
    same_bits(second.twin_values, first.twin_values)
    for layer in LAYERS:
        same_bits(second._snapshots[layer], first._snapshots[layer])


def test_a_prompt_without_a_score_takes_the_typical_one_from_its_steps_cached_or_not(world, tmp_path):
    rows = [ROWS[0][:3], ROWS[1][:2]]
    audits = [audit_of(world, cache, rows) for cache in (None, cache_at(tmp_path), cache_at(tmp_path))]
    expected, *others = (verdicts_of(audit) for audit in audits)
    assert others == [expected, expected]
    assert (audits[2].cache.found, audits[2].cache.computed) == (STEPS + 2, 0)
    scores = next(point for point in audits[0].free_points if point.endswith("indexer.score"))
    for mode in ("isolated", "free"):
        found = [audit.floor(mode, scores) for audit in audits]
        sizes = [audits[0]._unit(scores, one) for one in audits[0].history]
        assert sizes[0] == 0
        assert found[0].unit == median(filter(None, sizes))
        for floor in found[1:]:
            assert (floor.unit, floor.error, floor.norm, floor.absolute, floor.rows) == (found[0].unit, found[0].error, found[0].norm, found[0].absolute, found[0].rows)
            for twin, by_pass in found[0].errors.items():
                same_bits(floor.errors[twin], by_pass)


def test_without_a_cache_the_verdicts_are_the_same(world, computed):
    assert verdicts_of(audit_of(world, None)) == computed[2]


def test_a_spoiled_file_is_computed_again(world, computed, tmp_path):
    folder, first, expected = computed
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    cache = cache_at(tmp_path)
    victim = cache._path(first.history[4].key)
    data = victim.read_bytes()
    victim.write_bytes(data[: len(data) // 2])
    assert verdicts_of(audit_of(world, cache)) == expected
    assert (cache.found, cache.computed, cache.ignored) == (STEPS + 1, 1, 1)
    assert victim.stat().st_size == len(data)  # written anew


@pytest.mark.parametrize("spoil", ["cut off", "one bit", "empty", "another key", "no such file"])
def test_only_what_was_written_is_loaded(tmp_path, spoil):
    cache = cache_at(tmp_path)
    for key in ("k" * 64, "l" * 64):
        cache.save(key, Entry({"x": torch.rand(300), "y": torch.arange(3)}, {"n": 1}))
    victim = cache._path("k" * 64)
    data = bytearray(victim.read_bytes())
    assert cache.load("k" * 64).facts == {"n": 1}
    if spoil == "no such file":
        victim.unlink()
    else:
        data[-100] ^= 1
        victim.write_bytes({"cut off": data[:-100], "one bit": data, "empty": b"", "another key": cache._path("l" * 64).read_bytes()}[spoil])
    assert cache.load("k" * 64) is None
    assert (cache.ignored, cache.computed) == (int(spoil != "no such file"), 1)
    assert not victim.exists()


def test_another_choice_of_production_misses_from_there_on(world, computed):
    folder, first, _ = computed
    cache = cache_at(folder)
    audit, fresh = replaying_other_experts(audit_of(world, cache)), replaying_other_experts(audit_of(world, None))
    for each in (audit, fresh):
        each.ensure("decode")
    assert (cache.found, cache.computed) == (4, STEPS - 3)  # the prefill and three steps were there
    assert [one.key for one in audit.history[:4]] == [one.key for one in first.history[:4]]
    for point in ("layers.2.hc_ffn.X", "logits"):
        same_bits({0: audit.values("reference", point, "decode", (0, STEPS - 1))}, {0: fresh.values("reference", point, "decode", (0, STEPS - 1))})
        assert audit.floor("free", point).error == fresh.floor("free", point).error
    point = "layers.2.attn.core"
    same_bits({0: audit.values("isolated", point, "decode", (0, STEPS - 1))}, {0: fresh.values("isolated", point, "decode", (0, STEPS - 1))})


def replaying_other_experts(audit, further=1):
    """From step 3 on, layer 1's experts are replayed one further, or more."""
    own, experts = audit._choices, audit.config.n_routed_experts

    def choose(phase, step):
        choices = own(phase, step)
        if step == 3:
            choices["layers.1.ffn.experts"] = ((choices["layers.1.ffn.experts"] + further) % experts).sort(-1).values
        return choices

    audit._choices = choose
    return audit


def profiled(audit, red):
    audit.faulty, audit.red = True, red
    return replaying_other_experts(audit, 2)


def test_the_fault_profile_ends_where_a_layer_alone_is_red_and_pays_for_no_reference(world, computed, monkeypatch):
    folder, first, _ = computed
    asked = []

    def red(_audit, phase, step, alone):
        asked.append((phase, step, alone))
        return alone and step == 3

    audit = profiled(audit_of(world, cache_at(folder)), red)
    forbid(monkeypatch, audit.reference, *audit.twins)
    audit.ensure("decode")
    assert asked == [("prefill", None, False), ("decode", 3, True)]  # the prefill as a whole, then where other experts are taken
    assert audit.stopped.endswith("decode step 3")
    assert audit.cache.computed == 0
    assert audit.done == {"prefill", "decode"}
    shown = {point for point in audit.free_points if audit.fired("production", point, "decode", (3, 3))}
    assert {"layers.1.ffn.experts", "layers.1.ffn.gate"} <= shown
    assert not {"layers.1.ffn.weights", "layers.2.hc_attn.pre", "logits"} & shown
    assert audit.reached("production", "logits", (0, STEPS - 1)) == (0, 2)
    assert audit.reached("isolated", "layers.2.attn.q", (1, STEPS - 1)) == (1, 3)
    case = next(c for c in selection.layer_cases(audit.config, (2,), ("decode",), STEPS) if c.id == f"decode-L2-attn.q-isolated-steps1to{STEPS - 1}")
    assert evaluate.judge_case(audit, case, "").rows == 3 * len(ROWS) * audit.config.num_attention_heads
    late = evaluate.judge_case(audit, selection.Case("decode", "layers.2.attn.q", "free", 2, (4, 5)), "")
    assert (late.state.value, late.reason) == ("not_run", audit.stopped)
    before = first.floor("isolated", "layers.2.attn.q").errors
    assert audit.floor("isolated", "layers.2.attn.q").errors.keys() == before.keys()


def test_the_fault_profile_goes_on_where_no_layer_alone_is_red(world, computed):
    folder, _, _ = computed
    audit = profiled(audit_of(world, cache_at(folder)), lambda *_: False)
    fresh = replaying_other_experts(audit_of(world, None), 2)
    for each in (audit, fresh):
        each.ensure("decode")
    assert audit.stopped == ""
    for mode in ("isolated", "free"):
        point = "layers.2.attn.core"
        got, want = audit.floor(mode, point), fresh.floor(mode, point)
        assert (got.error, got.norm, got.rows) == (want.error, want.norm, want.rows)
    same_bits({0: audit.values("reference", "logits", "decode", (0, STEPS - 1))}, {0: fresh.values("reference", "logits", "decode", (0, STEPS - 1))})
    for layer in LAYERS:
        same_bits(audit._snapshots[layer], fresh._snapshots[layer])


def test_a_planted_fault_leaves_no_usual_choices_behind(world, tmp_path):
    audit = audit_of(world, cache_at(tmp_path))
    audit.faulty = True
    audit.ensure("prefill")
    faulty = len(list(tmp_path.iterdir()))
    audit = audit_of(world, cache_at(tmp_path))
    audit.ensure("prefill")
    assert len(list(tmp_path.iterdir())) == faulty + 1


@pytest.mark.parametrize("change", ["prompt", "layers", "code"])
def test_what_the_values_depend_on_is_in_the_key(world, computed, tmp_path, change):
    folder, first, _ = computed
    cache = cache_at(folder)
    if change == "code":
        cache.facts["code"] = "c"
    rows = [ROWS[0], (*ROWS[1][:-1], 3)] if change == "prompt" else ROWS
    audit = audit_of(world, cache, rows, (0, 1) if change == "layers" else (0, 1, 2))
    cache.directory = tmp_path
    audit.ensure("prefill")
    assert audit.history[0].key != first.history[0].key
    assert cache.found == 0


# ---- parts ----


@given(st.integers(1, 2), st.integers(1, 6), st.integers(-2, 3), st.booleans(), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_change_and_its_undoing_are_inverse(batch, columns, more, shifted, touched, seed):
    rng = torch.Generator().manual_seed(seed)
    old = torch.randn(batch, columns, 3, generator=rng)
    old[:, 0, 0] = torch.nan
    new = torch.randn(batch, max(0, columns + more), 3, generator=rng)
    kept = old[:, 1:] if shifted else old
    width = min(kept.shape[1], new.shape[1])
    new[:, :width] = kept[:, :width]
    for at in touched:
        if new.shape[1]:
            new[0, at % new.shape[1]] += 1
    entry = Entry({}, {})
    pack_change("x", old, new, entry)
    assert digest_of(unpack_change("x", old, entry)) == digest_of(new)


def test_a_window_that_moved_by_one_costs_one_row():
    old = torch.randn(2, 16, 4)
    new = torch.cat((old[:, 1:], torch.randn(2, 1, 4)), 1)
    entry = Entry({}, {})
    pack_change("kv", old, new, entry)
    assert entry.tensors["kv|rows"].shape == (2, 4)


def test_floors_survive(tmp_path):
    floor = Floor(0.1 + 0.2, 1e-300, float("inf"), 7, 0.5, {0: {("prefill", None): torch.rand(3, dtype=torch.float64)}, 2: {("decode", 4): torch.rand(1, dtype=torch.float64)}})
    cache, entry = cache_at(tmp_path), Entry({}, {})
    pack_floor("free layers.1.attn.q", floor, entry)
    cache.save("k" * 64, entry)
    back = unpack_floors(cache.load("k" * 64), Floor)["free layers.1.attn.q"]
    assert (back.error, back.norm, back.absolute, back.rows, back.unit) == (floor.error, floor.norm, floor.absolute, floor.rows, floor.unit)
    assert torch.equal(back.errors[2]["decode", 4], floor.errors[2]["decode", 4])
    assert torch.equal(back.errors[0]["prefill", None], floor.errors[0]["prefill", None])


def test_the_oldest_entries_go_first_and_a_used_one_is_young(tmp_path):
    cache = cache_at(tmp_path, limit_bytes=30_000)
    keys = [c * 64 for c in "abcdef"]
    for age, key in enumerate(keys):
        cache.save(key, Entry({"x": torch.rand(1500)}, {}))  # 6 kB each
        if cache._path(key).exists():
            os.utime(cache._path(key), (1000 + age, 1000 + age))
        if key == keys[1]:
            assert cache.load(keys[0]) is not None
    assert cache._path(keys[0]).exists()
    assert not cache._path(keys[1]).exists()
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 30_000


def test_a_folder_that_cannot_be_written_is_noted(tmp_path):
    (tmp_path / "file").write_text("")
    cache = cache_at(tmp_path / "file" / "below")
    cache.save("k" * 64, Entry({"x": torch.rand(3)}, {}))
    assert "cannot be written" in cache.trouble
    assert cache.load("k" * 64) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [(torch.zeros(2), torch.zeros(3)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), (torch.zeros(2), torch.zeros(1, 2)), ({"a": 1}, {"b": 1}), ("1", 1), (torch.tensor(0.0), torch.tensor(-0.0))],
    ids=["length", "type", "shape", "name", "json type", "sign of zero"],
)
def test_digests_differ(one, other):
    assert digest_of(one) != digest_of(other)


# ---- a further chain on own choices ----


def walked(world, cache, make=None):
    """Prefill and three decode steps of the reference on its own choices: values and states."""
    audit = audit_of(world, cache)
    chain = audit.chain("own", ["logits", "layers.1.attn.selected"], make or (lambda: audit.reference), layers=LAYERS)
    traces = [chain.prefill(audit.tokens, audit.lengths), *(chain.decode(torch.tensor([step, 9]), step) for step in range(3))]
    keys = [("prefill", None), *(("decode", step) for step in range(3))]
    return chain, {(point, key): trace.get(point, *key) for trace, key in zip(traces, keys, strict=True) for point in chain.points}


def test_a_further_chain_is_kept_too_and_goes_on_where_the_cache_ends(world, tmp_path):
    cache = cache_at(tmp_path)
    first, expected = walked(world, cache)
    again, found = walked(world, cache_at(tmp_path), lambda: pytest.fail("the model was made"))
    same_bits(found, expected)
    for layer in LAYERS:
        same_bits(again.after_prefill[layer], first.after_prefill[layer])
    cache._path(again._key).unlink()
    same_bits(walked(world, cache_at(tmp_path))[1], expected)
    same_bits(walked(world, None)[1], expected)
