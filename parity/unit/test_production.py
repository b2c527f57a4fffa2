"""The production model on the CPU device: against the reference under the published policy, and against itself.

Worlds are small random checkpoints (parity/unit/worlds.py); the bundled checkpoint is read once. Limits of agreement are
wide (the audit derives tight ones from twins): a median row catches what is systematic, a worst row may be one flipped
rounding that reached an FP4 key or an expert.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import production
import reference.model
from parity.unit.worlds import PROMPTS, prompt, write_checkpoint
from production import workspace
from production.door import checked_tokens
from production.engine import count_allocations, greedy, logits_hash
from production.model import POLICY, State, Transformer
from production.weights import load_weights
from reference.checkpoint import Checkpoint
from reference.config import InputError, ModelConfig
from reference.formats import PUBLISHED
from reference.points import INDICES, SCORES, points_of_layer, points_of_model, spec_of

TINY = PROMPTS.parent
MEDIAN_LIMIT, WORST_LIMIT = 1e-2, 0.3  # relative L2 of a row
# Grid rationale: the small world; widths past one 128 block with 3 streams, sigmoid and CSA first; 4 streams, softmax, no hash
# layers, HCA first and a top-k of 3 that discards nearly everything.
WORLDS: dict[str, dict[str, Any]] = {
    "small": {},
    "wide": {"hidden_size": 160, "hc_mult": 3, "scoring_func": "sigmoid", "compress_ratios": [4, 0, 128, 4], "q_lora_rank": 96},
    "deep": {
        "hc_mult": 4, "scoring_func": "softmax", "num_hash_layers": 0, "compress_ratios": [128, 4, 4, 0], "index_topk": 3,
        "moe_intermediate_size": 160, "head_dim": 160, "num_experts_per_tok": 3, "sliding_window": 5,
    },
}  # fmt: skip
TOKENS = 140  # past the first HCA entry and several windows


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The worlds are too small for torch's threads, and the kernels have their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name == "tiny":
            return TINY
        if name not in made:
            made[name] = write_checkpoint(tmp_path_factory.mktemp(name), seed=5, **WORLDS[name])
        return made[name]

    return get


@pytest.fixture(scope="module")
def loaded(checkpoint) -> Callable[..., Transformer]:
    made: dict[tuple[object, ...], Transformer] = {}

    def get(name: str = "small", **options) -> Transformer:
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = production.load(checkpoint(name), **({"max_context": 400} | options))
        return made[key]

    return get


def ids(model: Transformer, length: int = TOKENS, start: int = 0) -> Tensor:
    return torch.tensor([prompt(length, model.config.vocab_size, start)])


def ragged(model: Transformer, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """One row per length, right-padded with an id that no vocabulary has."""
    tokens = torch.full((len(lengths), max(lengths)), -7)
    for row, n in enumerate(lengths):
        tokens[row, :n] = torch.tensor(prompt(n, model.config.vocab_size, 50 * row))
    return tokens, torch.tensor(lengths)


def recorded(model, points, run: Callable[[], Tensor]) -> tuple[dict[str, list[Tensor]], Tensor]:
    """What the taps showed during a run, by point in order of s, and what it returned."""
    seen: dict[str, list[Tensor]] = {}
    with model.taps.observe(list(points), lambda point, value: seen.setdefault(point, []).append(value.clone())):
        result = run()
    return seen, result


def rows_off(point: str, got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 of each row; finite masks must agree."""
    got, want = got.float(), want.float()
    if spec_of(point).kind == SCORES:
        wide = max(got.shape[-1], want.shape[-1])
        got, want = (torch.nn.functional.pad(v, (0, wide - v.shape[-1]), value=-torch.inf) for v in (got, want))
    assert got.shape == want.shape, point
    assert torch.equal(torch.isfinite(got), torch.isfinite(want)), f"{point}: finite masks differ"
    got, want = (v.nan_to_num(0, 0, 0).flatten(-spec_of(point).row_dims).double() for v in (got, want))
    off: Tensor = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-9)
    return off


def sets(value: Tensor) -> list[set[int]]:
    return [set(row[row >= 0].tolist()) for row in value.reshape(-1, value.shape[-1])]


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(nan=1e9), b[k].nan_to_num(nan=1e9)) for k in a)


def snapshots(model: Transformer, state: State) -> list[dict[str, Tensor]]:
    return [{k: v.clone() for k, v in state.export_layer(layer).items()} for layer in model.layers]


# ---- against the reference ----


def layer_agrees(layer: int, ref, pro, ref_seen, X: Tensor, tokens: Tensor, state: State, decode: bool) -> None:
    """One production layer on the reference's input, choices replayed; every point compared."""
    at = f"layers.{layer}"
    choices = {p: ref_seen[p][0] for p in (f"{at}.attn.selected", f"{at}.ffn.experts") if p in ref_seen}
    seen, out = recorded(pro, points_of_layer(pro.config, layer), lambda: pro.run_layer(layer, X, tokens, state, None, choices, decode))
    assert set(seen) == set(points_of_layer(pro.config, layer))
    assert torch.equal(out, seen[f"{at}.hc_ffn.X"][0].float())
    for point, (value,) in seen.items():
        want = ref_seen[point][0]
        if spec_of(point).kind == INDICES:
            differ = sum(a != b for a, b in zip(sets(value), sets(want), strict=True))
            near_ties = 0 if point.endswith("visible") else 1 + value.shape[1] // 20  # what is seen was replayed: equal
            assert differ <= near_ties, f"{point}: {differ} sets differ"
        else:
            off = rows_off(point, value, want).flatten()
            assert decode or float(off.median()) <= MEDIAN_LIMIT, f"{point}: median row off by {float(off.median()):.1e}"
            assert float(off.max()) <= WORST_LIMIT, f"{point}: worst row off by {float(off.max()):.1e}"


@pytest.mark.parametrize("world", ["tiny", *WORLDS])
def test_every_point_of_every_layer_agrees_with_the_reference(world: str, checkpoint, loaded) -> None:
    """Isolated: each layer on the reference's streams and, in decode, on the reference's state."""
    pro, ref = loaded(world), reference.model.load(checkpoint(world), policy="published", max_context=400)
    assert pro.policy == POLICY == frozenset(PUBLISHED)
    tokens = ids(pro)
    ref_state, state = ref.new_state(batch=1), pro.new_state(batch=1)
    phases = [(tokens, False)] + [(tokens[:, i : i + 1], True) for i in range(2)]
    for step, (part, decode) in enumerate(phases):
        before = [ref_state.export_layer(layer) for layer in ref.layers]
        seen, _ = recorded(ref, ref.taps.points, partial(ref.prefill, part, ref_state))
        X = seen["embed"][0][:, :, None].expand(-1, -1, pro.config.hc_mult, -1)
        for layer in pro.layers:
            if step:
                state.import_layer(layer, before[layer])
            layer_agrees(layer, ref, pro, seen, X, part, state, decode)
            X = seen[f"layers.{layer}.hc_ffn.X"][0]


def test_free_running_logits_are_as_near_as_a_twin_of_the_reference(loaded) -> None:
    """Roundings cascade, so single rows may be far off in both; the median row is what a fault moves."""
    pro = loaded("tiny")
    ref, twin = (reference.model.load(TINY, policy="published", max_context=400, sum_order=order) for order in (0, 1))
    tokens = torch.tensor([prompt(60, 2048)])
    want, reordered, got = (model.prefill(tokens, model.new_state(1)) for model in (ref, twin, pro))
    floor = float(rows_off("logits", reordered, want).median())
    assert 0 < floor < 0.05
    assert float(rows_off("logits", got, want).median()) < 2 * floor


# ---- against itself ----


@pytest.mark.parametrize("chunk", [3, 7, 16, 64])
def test_chunked_prefill_is_one_shot_prefill_bit_for_bit(chunk: int, loaded) -> None:
    one = loaded("small")
    want = one.prefill(ids(one), one.new_state(1))
    cut = loaded("small", prefill_chunk=chunk)
    state = cut.new_state(1)
    assert torch.equal(cut.prefill(ids(one), state), want)
    follow = ids(one)[:, :5]
    again = one.new_state(1)
    one.prefill(ids(one), again)
    assert torch.equal(cut.prefill(follow, state), one.prefill(follow, again))


@pytest.mark.parametrize("cut", [126, 127, 128, 129, 130, 131])
def test_calls_go_on_where_the_last_one_stopped(cut: int, loaded) -> None:
    model = loaded("small")
    tokens = ids(model, 134)
    want = model.prefill(tokens, model.new_state(1))
    state = model.new_state(1)
    got = torch.cat((model.prefill(tokens[:, :cut], state), model.prefill(tokens[:, cut:], state)), 1)
    assert torch.equal(got, want)
    assert state.length.tolist() == [134]


def test_decode_sees_what_prefill_sees(loaded) -> None:
    """Token by token from 0 on: the same keys, the same numbers up to the order of sums."""
    model = loaded("small")
    tokens = ids(model, 40)
    points = [p for p in model.taps.points if p.endswith((".visible", ".selected"))]
    once, want = recorded(model, points, lambda: model.prefill(tokens, model.new_state(1)))
    state = model.new_state(1)
    steps, got = recorded(model, points, lambda: torch.stack([model.decode(tokens[:, i], state) for i in range(40)], 1))
    for point in points:
        if point.startswith("layers.0.") or point.endswith("visible"):
            one, many = sets(once[point][0]), [s for value in steps[point] for s in sets(value)]
            assert sum(a != b for a, b in zip(one, many, strict=True)) <= 4, point
    assert float(rows_off("logits", got, want).median()) < 10 * MEDIAN_LIMIT


def test_visible_keys_are_the_rule_in_prefill_and_decode(loaded) -> None:
    model = loaded("small")
    W, K = model.config.sliding_window, model.config.index_topk
    tokens, lengths = ragged(model, [140, 37])
    points = [p for p in model.taps.points if p.endswith(".visible")]
    state = model.new_state(2)
    seen, _ = recorded(model, points, lambda: model.prefill(tokens, state, lengths))
    stepped, _ = recorded(model, points, lambda: model.decode(torch.tensor([3, 4]), state))
    for point in points:
        ratio = model.config.ratio(int(point.split(".")[1]))
        for value, start, count in ((seen[point][0], [0, 0], [140, 37]), (stepped[point][0], [140, 37], [1, 1])):
            for row in range(2):
                for i in range(count[row]):
                    p = start[row] + i
                    window, entries = value[row, i, :W], value[row, i, W:]
                    assert window[window >= 0].tolist() == list(range(max(0, p - W + 1), p + 1))
                    chosen, complete = entries[entries >= 0].tolist(), (p + 1) // ratio if ratio else 0
                    assert len(set(chosen)) == len(chosen) == (min(K, complete) if ratio == 4 else complete)
                    assert chosen == sorted(chosen)
                    assert not chosen or chosen[-1] < complete


def test_rows_of_a_batch_do_not_know_of_each_other(loaded) -> None:
    model = loaded("small")
    lengths = [33, 0, 131, 6]
    tokens, counts = ragged(model, lengths)
    together = model.new_state(4)
    logits = model.prefill(tokens, together, counts)
    stepped = model.decode(torch.tensor([1, 2, 3, 4]), together)
    assert together.length.tolist() == [34, 1, 132, 7]
    for row, n in enumerate(lengths):
        assert bool(torch.isnan(logits[row, n:]).all())
        assert bool(torch.isfinite(logits[row, :n]).all())
        alone = model.new_state(1)
        if n:
            assert torch.equal(model.prefill(tokens[row : row + 1, :n], alone), logits[row : row + 1, :n])
        assert torch.equal(model.decode(torch.tensor([row + 1]), alone)[0], stepped[row])


def test_rows_go_on_at_their_own_positions(loaded) -> None:
    model = loaded("small", prefill_chunk=8)
    first, second = ragged(model, [5, 30]), ragged(model, [21, 2])
    state = model.new_state(2)
    model.prefill(*(first[0], state, first[1]))
    logits = model.prefill(second[0], state, second[1])
    for row in range(2):
        alone = model.new_state(1)
        whole = torch.cat((first[0][row, : first[1][row]], second[0][row, : second[1][row]]))[None]
        assert torch.equal(model.prefill(whole, alone)[0, int(first[1][row]) :], logits[row, : int(second[1][row])])


def test_a_run_repeats_bit_for_bit_and_taps_change_nothing(loaded) -> None:
    model = loaded("small")
    runs = [lambda: model.prefill(ids(model, 70), model.new_state(1))] * 2
    hashes = {logits_hash(run()) for run in runs}
    seen, watched = recorded(model, model.taps.points, runs[0])
    assert hashes == {logits_hash(watched)}
    assert set(seen) == set(points_of_model(model.config))
    for point, (value,) in seen.items():
        assert value.shape[:2] == (1, 70), point
        assert spec_of(point).sparse or bool((~torch.isnan(value.float())).all()), point
    assert model.taps.observers == 0


@pytest.mark.parametrize(("name", "variants"), [("small", "portable"), ("tiny", "fast")])
def test_index_scores_of_a_part_of_the_queries_at_a_time_change_no_bit(checkpoint, monkeypatch, name, variants) -> None:
    lengths = [TOKENS, 91]
    runs, slices = [], []
    for size in (workspace.SCORE_BYTES, 4 * 100 * 70):  # all 280 queries; 70 of 100 entries: tiles of 64
        monkeypatch.setattr(workspace, "SCORE_BYTES", size)
        model = production.load(checkpoint(name), max_context=400, prefill_chunk=TOKENS, variants=variants, layers=range(4))
        tokens, _ = ragged(model, lengths)
        states = [model.new_state(2) for _ in range(2)]
        slices.append(len(states[0].workspace.at(TOKENS).score_slices(100)))
        seen, logits = recorded(model, model.taps.points, partial(model.prefill, tokens, states[0], lengths))
        runs.append((seen, logits, snapshots(model, states[0])))
        assert same_bits({"": logits}, {"": model.prefill(tokens, states[1], lengths)}), "with nobody to look at the scores"
        assert states[0].workspace.score.numel() <= max(size // 4, 100)
    assert slices == [1, 5]
    (seen, logits, kept), (other, others, left) = runs
    assert same_bits({"": logits}, {"": others})
    assert all(same_bits(a, b) for a, b in zip(kept, left, strict=True))
    for point, (value,) in seen.items():
        for row, n in enumerate(lengths):
            assert same_bits({point: value[row, :n]}, {point: other[point][0][row, :n]}), point


def test_one_token_through_every_layer_matches_its_shape_legend(loaded) -> None:
    model = loaded("small")
    c, state = model.config, model.new_state(2)
    seen, _ = recorded(model, model.taps.points, lambda: model.decode(torch.tensor([3, 4]), state))
    shapes = {
        "hc_attn.comb": (c.hc_mult, c.hc_mult), "hc_ffn.X": (c.hc_mult, c.hidden_size), "attn.q": (c.num_attention_heads, c.head_dim),
        "attn.kv": (c.head_dim,), "attn.indexer.q": (c.index_n_heads, c.index_head_dim), "attn.indexer.compressor": (c.index_head_dim,),
        "attn.wo_a": (c.o_groups * c.o_lora_rank,), "ffn.gate": (c.n_routed_experts,), "ffn.weights": (c.num_experts_per_tok,),
        "attn.indexer.score": (0,),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert seen[f"layers.1.{name}"][0].shape == (2, 1, *shape), name
    assert seen["embed"][0].shape == (2, 1, c.hidden_size)
    assert seen["logits"][0].shape == (2, 1, c.vocab_size)
    assert bool(torch.isnan(seen["layers.1.attn.compressor"][0]).all()), "no group ends at the first token"


# ---- state ----


def test_an_exported_state_goes_on_bit_for_bit(loaded) -> None:
    model = loaded("small")
    tokens, lengths = ragged(model, [133, 18])
    state, other = model.new_state(2), model.new_state(2)
    model.prefill(tokens, state, lengths)
    model.prefill(tokens[:, :9], other)  # what was there before must not show
    for layer in model.layers:
        other.import_layer(layer, state.export_layer(layer))
    assert other.length.tolist() == [133, 18]
    assert all(same_bits(a, b) for a, b in zip(snapshots(model, state), snapshots(model, other), strict=True))
    for step in range(5):
        token = torch.tensor([step, 9 - step])
        assert torch.equal(model.decode(token, state), model.decode(token, other))


def test_one_layer_alone_moves_only_its_own_state(loaded) -> None:
    model = loaded("small", prefill_chunk=8)
    c, state = model.config, model.new_state(1)
    X = torch.randn(1, 20, c.hc_mult, c.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    first = model.run_layer(1, X, ids(model, 20), state)
    assert state.export_layer(1)["length"].tolist() == [20]
    assert state.export_layer(2)["length"].tolist() == [0]
    with pytest.raises(InputError, match="import or run every layer"):
        model.prefill(ids(model, 3), state)
    whole = loaded("small")
    assert torch.equal(whole.run_layer(1, X, ids(model, 20), whole.new_state(1)), first)


def refused(model: Transformer, state: State, call: Callable[[], object], match: str) -> None:
    before = snapshots(model, state)
    with pytest.raises(InputError, match=match):
        call()
    assert all(same_bits(a, b) for a, b in zip(before, snapshots(model, state), strict=True)), "a refused call wrote something"


def test_a_refused_call_leaves_the_state_as_it_was(loaded) -> None:
    model = loaded("small", max_context=40)
    state, other = model.new_state(2), loaded("wide").new_state(2)
    tokens, lengths = ragged(model, [39, 12])
    model.prefill(tokens, state, lengths)
    good, V = torch.zeros(2, 3, dtype=torch.int64), model.config.vocab_size
    bad_id = good.clone()
    bad_id[1, 2] = V
    calls: list[tuple[str, Callable[[], object]]] = [
        ("--max-context to at least 42", lambda: model.prefill(good, state)),
        ("--max-context", lambda: model.prefill(good, state, torch.tensor([2, 0]))),
        (rf"tokens\[1, 2\] = {V}", lambda: model.prefill(bad_id, state, torch.tensor([1, 3]))),
        ("-1", lambda: model.decode(torch.tensor([3, -1]), state)),
        ("expected 0 .. 3", lambda: model.prefill(good, state, torch.tensor([1, 4]))),
        ("expected 2 integers", lambda: model.prefill(good, state, torch.tensor([1]))),
        ("int64", lambda: model.prefill(good.int(), state)),
        ("s >= 1", lambda: model.prefill(good[:, :0], state)),
        ("lengths: expected 2 integers", lambda: model.prefill(good, state, "ab")),
        ("another model", lambda: model.prefill(good, None)),
        ("another model", lambda: model.run_layer(0, torch.zeros(2, 1, 2, 96), good[:, :1], loaded("small").new_state(2))),
        ("X: expected floating", lambda: model.run_layer(0, torch.zeros(2, 1, 2, 96).long(), good[:, :1], state)),
        ("expected integers", lambda: model.prefill(good, state, [0, 1], choices={"layers.1.attn.selected": None})),
        ("expected integers", lambda: model.prefill(good, state, [0, 1], choices={"layers.3.ffn.experts": torch.ones(2, 3, 2).bool()})),
        ("3 rows", lambda: model.decode(torch.zeros(3, dtype=torch.int64), state)),
        ("shape", lambda: model.decode(good, state)),
        ("another model", lambda: model.decode(good[:, 0], other)),
        ("out:", lambda: model.decode(good[:, 0], state, out=torch.zeros(2, V + 1))),
        ("no choice", lambda: model.prefill(good, state, [0, 1], choices={"layers.0.attn.selected": good[..., None]})),
        ("out of range", lambda: model.prefill(good, state, [0, 1], choices={"layers.1.attn.selected": good[..., None] + 3})),
        ("twice", lambda: model.prefill(good, state, [0, 1], choices={"layers.3.ffn.experts": good[..., None].expand(-1, -1, 2)})),
    ]
    for match, call in calls:
        refused(model, state, call, match)
    assert state.length.tolist() == [39, 12]
    assert bool(torch.isfinite(model.decode(torch.tensor([1, 2]), state)).all()), "the last token that fits, fits"
    refused(model, state, lambda: model.decode(torch.tensor([1, 2]), state), "raise --max-context")


class BrokenObserverError(Exception):
    pass


# Grid rationale: the first point, one between the stores of a layer, the last one; calls of one chunk and of three; in
# the second, the first chunk is through all layers when the observer breaks.
@pytest.mark.parametrize("point", ["embed", "layers.1.attn.selected", "layers.3.ffn.out", "logits"])
@pytest.mark.parametrize(("chunk", "breaks_at"), [(64, 1), (8, 2)])
def test_a_call_that_breaks_half_way_leaves_the_state_as_it_was(point: str, chunk: int, breaks_at: int, loaded) -> None:
    model = loaded("small", prefill_chunk=chunk)
    V, state, check = model.config.vocab_size, model.new_state(2), model.new_state(2)
    for each in (state, check):
        model.prefill(*(ragged(model, [29, 13])[0], each, [29, 13]))
    before, calls = snapshots(model, state), 0

    def broken(point: str, value: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == breaks_at:
            raise BrokenObserverError

    with pytest.raises(BrokenObserverError), model.taps.observe([point], broken):
        model.prefill(torch.arange(40).view(2, 20), state, [20, 18])
    assert all(same_bits(a, b) for a, b in zip(before, snapshots(model, state), strict=True))
    calls = breaks_at - 1
    with pytest.raises(BrokenObserverError), model.taps.observe([point], broken):
        model.decode(torch.tensor([1, 2]), state)
    assert all(same_bits(a, b) for a, b in zip(before, snapshots(model, state), strict=True))
    assert state.length.tolist() == [29, 13]
    again = torch.arange(44).view(2, 22) % V
    assert torch.equal(model.prefill(again, state), model.prefill(again, check)), "and goes on as if nothing had been"


def test_a_layer_that_breaks_half_way_leaves_its_state_as_it_was(loaded) -> None:
    model = loaded("small", prefill_chunk=8)
    c, state = model.config, model.new_state(1)
    X = torch.randn(1, 20, c.hc_mult, c.hidden_size, generator=torch.Generator().manual_seed(0))
    model.run_layer(1, X[:, :6], ids(model, 6), state)
    before, calls = snapshots(model, state), 0

    def broken(point: str, value: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise BrokenObserverError

    with pytest.raises(BrokenObserverError), model.taps.observe(["layers.1.ffn.out"], broken):
        model.run_layer(1, X, ids(model, 20), state)
    assert all(same_bits(a, b) for a, b in zip(before, snapshots(model, state), strict=True))


def test_an_expert_may_come_twice_from_a_table_only(tmp_path: Path) -> None:
    """Layer 0 takes experts from `tid2eid`, which may name one twice for a token; what was taken can be replayed."""
    directory = write_checkpoint(tmp_path, seed=5, shards=1)
    stored = load_file(directory / "model.safetensors")
    stored["layers.0.ffn.gate.tid2eid"][:, 1] = stored["layers.0.ffn.gate.tid2eid"][:, 0]
    save_file(stored, directory / "model.safetensors")
    pro, ref = production.load(directory, max_context=40), reference.model.load(directory, policy="published")
    tokens = ids(pro, 12)
    for model in (pro, ref):
        seen, want = recorded(model, ["layers.0.ffn.experts"], partial(model.prefill, tokens, model.new_state(1)))
        assert bool((seen["layers.0.ffn.experts"][0][..., 0] == seen["layers.0.ffn.experts"][0][..., 1]).all())
        choices = {"layers.0.ffn.experts": seen["layers.0.ffn.experts"][0]}
        assert torch.equal(model.prefill(tokens, model.new_state(1), choices=choices), want)
        with pytest.raises(InputError, match="twice"):
            model.prefill(tokens, model.new_state(1), choices={"layers.1.ffn.experts": choices["layers.0.ffn.experts"]})


def test_capacity_is_checked_when_it_is_asked_for(loaded, checkpoint) -> None:
    model = loaded("small", max_context=40)
    assert model.new_state().max_context == 40
    for asked in (41, 0, True):
        with pytest.raises(InputError, match="--max-context"):
            model.new_state(1, max_context=asked)
    for options in ({"max_context": 65537}, {"max_context": 0}, {"prefill_chunk": 0}):
        with pytest.raises(InputError):
            production.load(checkpoint("small"), **options)
    with pytest.raises(InputError, match="batch"):
        model.new_state(0)


# ---- what a step costs ----


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_allocates_nothing(batch: int, loaded) -> None:
    model = loaded("small")
    state = model.new_state(batch)
    out = torch.empty(batch, model.config.vocab_size)
    tokens = torch.arange(batch)
    with count_allocations() as counted:
        for _ in range(9):  # completes groups of four on the way
            model.decode(tokens, state, out=out)
    assert (counted.count, counted.bytes, counted.operations) == (0, 0, [])
    with count_allocations() as counted:
        returned = model.decode(tokens, state)
    assert counted.count == 1, "without `out` the result itself is fresh, and nothing else"
    assert counted.bytes == returned.nbytes


def test_what_keeps_a_failed_call_harmless_is_allocated_with_the_state(loaded) -> None:
    model = loaded("small")
    state = model.new_state(2)
    with count_allocations() as counted, state.backup.kept_on_error(range(4)):
        pass
    assert counted.count == 0


def test_the_counter_sees_what_it_must(loaded) -> None:
    x = torch.zeros(4)
    with count_allocations() as counted:
        x.view(2, 2).add_(1)[0].copy_(x[:2])
        assert counted.count == 0
        torch.cat((x, x))
        x.clone()
        torch.empty(3)
    assert (counted.count, counted.bytes) == (3, 32 + 16 + 12)


def test_greedy_continues_with_the_best_token(loaded) -> None:
    model = loaded("small")
    state, check = model.new_state(1), model.new_state(1)
    logits = model.prefill(ids(model, 20), state)[:, -1]
    want = model.prefill(ids(model, 20), check)[:, -1]
    for tokens, following in greedy(model, state, logits, 4):
        assert torch.equal(tokens, want.argmax(-1))
        want = model.decode(tokens.clone(), check)
        assert torch.equal(following, want)


# ---- replayed choices ----


def test_given_choices_are_used_and_own_choices_are_shown(loaded) -> None:
    model = loaded("small")
    tokens = ids(model, 60)
    csa, ffn = "layers.1.attn.selected", "layers.2.ffn.experts"
    points = [csa, ffn, "layers.1.attn.visible", "layers.2.ffn.weights", "logits"]
    own, want = recorded(model, points, lambda: model.prefill(tokens, model.new_state(1)))
    same = {csa: own[csa][0].flip(-1), ffn: own[ffn][0].flip(-1)}
    assert torch.equal(model.prefill(tokens, model.new_state(1), choices=same), want), "order does not matter"

    k, E, W = model.config.num_experts_per_tok, model.config.n_routed_experts, model.config.sliding_window
    oldest = torch.where(torch.arange(2) < (torch.arange(60)[None, :, None] + 1) // 4, torch.arange(2), -1)
    experts = ((own[ffn][0][..., :1] + 1 + torch.arange(k)) % E).sort(-1).values
    seen, other = recorded(model, points, lambda: model.prefill(tokens, model.new_state(1), choices={csa: oldest, ffn: experts}))
    assert torch.equal(seen[csa][0], own[csa][0]), "the model shows what it would have chosen"
    assert sets(seen["layers.1.attn.visible"][0][..., W:]) == sets(oldest)
    assert not torch.equal(other, want)
    assert seen["layers.2.ffn.weights"][0].shape == (1, 60, k)


@pytest.mark.parametrize("tokens", [1, 3])
def test_choices_of_width_zero_are_replayed_where_no_entry_exists(tokens: int, loaded) -> None:
    model = loaded("small")
    text, csa = ids(model, tokens), "layers.1.attn.selected"
    none = torch.zeros(1, tokens, 0, dtype=torch.int64)
    state = model.new_state(1)
    want = model.prefill(text, model.new_state(1))
    assert torch.equal(model.prefill(text, state, choices={csa: none}), want)
    if tokens == 1:
        plain = model.new_state(1)
        model.prefill(text, plain)
        assert torch.equal(model.decode(text[:, 0], state, choices={csa: none}), model.decode(text[:, 0], plain))


# ---- loading ----


@pytest.mark.parametrize("layers", [None, range(2)])
def test_every_tensor_is_consumed_once(layers: range | None, checkpoint) -> None:
    opened = Checkpoint(checkpoint("small"), layers)
    weights, audit = load_weights(opened)
    assert [r.name for r in audit.records] == list(dict.fromkeys(r.name for r in audit.records))
    assert {r.name for r in audit.records} == set(opened.specs)
    assert opened.unread() == ()
    assert len(weights.layers) == (4 if layers is None else 2)
    assert all(name in audit.table() for name in ("hc_head_fn", "embed.weight", "layers.1.attn.attn_sink"))
    packed = weights.layers[0].experts
    assert packed.w1.shape == (6, 64, 48), "two codes a byte: nothing is unpacked"
    for expert in range(6):
        assert torch.equal(packed.w2[expert], opened.raw(f"layers.0.ffn.experts.{expert}.w2.weight"))


def test_a_prefix_of_layers_is_a_model(loaded) -> None:
    whole, part = loaded("small"), loaded("small", layers=range(2))
    assert part.layers == (0, 1)
    point = ["layers.1.hc_ffn.X"]
    a, _ = recorded(whole, point, lambda: whole.prefill(ids(whole, 20), whole.new_state(1)))
    b, logits = recorded(part, point, lambda: part.prefill(ids(part, 20), part.new_state(1)))
    assert torch.equal(a[point[0]][0], b[point[0]][0])
    assert bool(torch.isfinite(logits).all())
    with pytest.raises(InputError, match="layer 2"):
        part.run_layer(2, a[point[0]][0], ids(part, 20), part.new_state(1))


def test_the_model_says_what_ran(loaded) -> None:
    model = loaded("small")
    model.prefill(ids(model, 12), model.new_state(1))
    model.decode(torch.tensor([1]), state := model.new_state(1))
    assert state.length.tolist() == [1]
    sources = {source for source, _, arch, build, launches in model.kernels() if arch.startswith("cpu") and build and launches}
    assert {"rms_norm", "rope", "sparse_attn", "compressor", "topk", "experts", "hyper_connection"} <= sources
    assert "kv.e4m3" in model.describe()


@pytest.mark.parametrize("variants", ["portable", "fast"])
@pytest.mark.parametrize("lengths", [None, [300, 1], [0, 170], [129, 300]])
def test_last_logits_of_a_prefill_are_those_of_all_bit_for_bit(checkpoint, lengths, variants) -> None:
    model = production.load(checkpoint("small"), max_context=400, prefill_chunk=64, variants=variants)
    tokens = torch.tensor([prompt(300, model.config.vocab_size), prompt(300, model.config.vocab_size, 700)])
    one, two = model.new_state(2), model.new_state(2)
    every, last = model.prefill(tokens, one, lengths), model.prefill(tokens, two, lengths, logits="last")
    assert last.shape == (2, model.config.vocab_size)
    for row, n in enumerate(lengths or [300, 300]):
        if n:
            assert torch.equal(last[row], every[row, n - 1])
        else:
            assert bool(last[row].isnan().all())
    following = tokens[:, 0]
    assert torch.equal(model.decode(following, one), model.decode(following, two))  # the state went on alike


def test_last_logits_take_no_memory_for_the_others_and_refuse_an_observer_of_all(checkpoint) -> None:
    model = production.load(checkpoint("small"), max_context=400, prefill_chunk=64)
    tokens = torch.tensor([prompt(300, model.config.vocab_size)])
    with count_allocations() as counted:
        model.prefill(tokens, model.new_state(), logits="last")
    largest = 300 * model.config.vocab_size * 4
    with count_allocations() as all_counted:
        model.prefill(tokens, model.new_state())
    assert all_counted.bytes - counted.bytes >= largest - model.config.vocab_size * 4
    state = model.new_state()
    with pytest.raises(InputError, match="expected 'all' or 'last'"):
        model.prefill(tokens, state, logits="some")
    with model.taps.observe(("logits",), lambda name, value: None), pytest.raises(InputError, match="use logits='all'"):
        model.prefill(tokens, state, logits="last")
    assert state.length.tolist() == [0]


@pytest.mark.parametrize(("at", "token"), [((0, 0), -1), ((1, 17), 10**6), ((1, 29), -5)])
def test_the_first_bad_token_is_named_and_pads_may_be_anything(at, token) -> None:
    config = ModelConfig.from_dir(TINY)
    tokens = torch.zeros(2, 40, dtype=torch.int64)
    tokens[:, 30:] = 10**9
    assert checked_tokens(config, tokens, 2, [30, 30]) == [30, 30]
    assert checked_tokens(config, tokens, 2, [0, 30]) == [0, 30]
    tokens[at] = token
    tokens[1, 29] = -5
    with pytest.raises(InputError, match=rf"tokens\[{at[0]}, {at[1]}\] = {token}: token ids run from 0 to {config.vocab_size - 1}"):
        checked_tokens(config, tokens, 2, [30, 30])


def test_a_million_tokens_are_checked_in_a_moment() -> None:
    config = ModelConfig.from_dir(TINY)
    tokens = torch.zeros(1, 1 << 20, dtype=torch.int64)
    began = time.process_time()
    checked_tokens(config, tokens, 1, None)
    assert time.process_time() - began < 2.0


def test_softmax_weights_can_be_rounded_to_bf16() -> None:
    """One more rounding point, in both phases, by a kernel of its own; the portable variants have none."""
    tokens = torch.tensor([prompt(150, 256)])
    seen: dict[bool, Tensor] = {}
    wanted: dict[bool, Tensor] = {}
    for p_bf16 in (False, True):
        model = production.load(TINY, layers=range(4), max_context=400, variants="fast", p_bf16=p_bf16)
        assert model.policy == POLICY | ({"p.bf16"} if p_bf16 else set())
        ref = reference.model.load(TINY, policy=model.policy, layers=range(4), max_context=400)
        for run, values in ((model, seen), (ref, wanted)):
            state = run.new_state(1)
            run.prefill(tokens, state)
            values[p_bf16] = run.decode(tokens[:, 0], state)
        ran = {kernel for source, kernel, *_ in model.kernels() if source == "sparse_attn_decode"}
        assert ran == {f"flash_128_h16_p{1 if p_bf16 else 2}", "sparse_attn_combine"}
        assert (seen[p_bf16] - wanted[p_bf16]).norm() < WORST_LIMIT * wanted[p_bf16].norm()
    assert not torch.equal(seen[False], seen[True])
    with pytest.raises(InputError, match="keeps p exact"):
        production.load(TINY, layers=range(1), variants="portable", p_bf16=True)
