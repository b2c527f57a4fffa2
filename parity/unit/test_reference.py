"""The reference against golden values that are not ours, and against itself however the tokens are cut.

Golden values: parity/golden/open.safetensors, for the bundled checkpoint. The other tests use small random worlds.
Calls, errors and state: test_reference_calls.py. Single operations: test_ops.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import reference
from parity.unit import worlds
from reference.model import State, Transformer
from reference.points import INDICES, SCORES, spec_of

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "checkpoints" / "tiny-dsv4"
EXACT_LOGITS, EXACT_NLL, EARLY_ROWS, MEDIAN_ROW, STORAGE_NLL = 1e-4, 1e-5, 1e-4, 5e-3, 1.2e-3
CSA_LAYERS = (2, 4, 6)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The matrices are small: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    values: dict[str, Tensor] = load_file(ROOT / "parity" / "golden" / "open.safetensors")
    return values


@pytest.fixture(scope="module")
def models() -> dict[str, Transformer]:
    return {policy: reference.load(TINY, policy=policy) for policy in ("exact", "storage")}


def nll(logits: Tensor, tokens: Tensor) -> Tensor:
    """-log p(next token), [b, s - 1]."""
    return -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def copy_of(state: State) -> State:
    """Another state at the same place: layer states are values."""
    copy = State(state.config, tuple(state.layers), state.batch, state.max_context)
    copy.layers = dict(state.layers)
    return copy


def teacher_forced(model: Transformer, tokens: Tensor, state: State) -> Tensor:
    """Logits of single decode steps over tokens [b, s]."""
    return torch.stack([model.decode(tokens[:, i], state) for i in range(tokens.shape[1])], 1)


# ---- golden ----


@pytest.mark.parametrize("policy", ["exact", "storage"])
def test_golden_one_shot(policy: str, models: dict[str, Transformer], golden: dict[str, Tensor]) -> None:
    tokens, positions = golden["tokens"].long(), golden["positions"].long()
    model = models[policy]
    logits = model.prefill(tokens, model.new_state(batch=2))
    row = (logits[:, positions] - golden[f"{policy}.logits"]).abs().amax(-1)  # [b, positions]
    loss = (nll(logits, tokens) - golden[f"{policy}.nll"]).abs().mean()
    where = (row == row.max()).nonzero()[0].tolist()
    print(f"{policy}: worst row {float(row.max()):.2e} at row {where[0]}, position {int(positions[where[1]])}", end="")
    print(f", median row {float(row.median()):.2e}, mean |nll difference| {float(loss):.2e}")
    if policy == "exact":
        assert float(row.max()) <= EXACT_LOGITS
        assert float(loss) <= EXACT_NLL
    else:
        assert float(row[:, positions <= 8].max()) <= EARLY_ROWS
        assert float(row.median()) <= MEDIAN_ROW
        assert float(loss) <= STORAGE_NLL


@pytest.mark.parametrize("policy", ["exact", "storage"])
def test_golden_prefill_then_decode(policy: str, models: dict[str, Transformer], golden: dict[str, Tensor]) -> None:
    tokens, model = golden["tokens"].long(), models[policy]
    selected = tuple(f"layers.{n}.attn.selected" for n in CSA_LAYERS)
    last: dict[str, Tensor] = {}
    state = model.new_state(batch=2)
    with model.taps.observe(selected, lambda point, value: last.update({point: value[:, -1].clone()})):
        model.prefill(tokens[:, :261], state)
        for n in CSA_LAYERS:
            assert torch.equal(last[f"layers.{n}.attn.selected"].int(), golden[f"{policy}.selected.layer{n}.last_prefill"])
        logits = teacher_forced(model, tokens[:, 261:], state)[:, ::16]
        for n in CSA_LAYERS:
            assert torch.equal(last[f"layers.{n}.attn.selected"].int(), golden[f"{policy}.selected.layer{n}.last_decode"])
    row = (logits - golden[f"{policy}.decode_logits"]).abs().amax(-1)
    print(f"{policy}: worst decoded row {float(row.max()):.2e}, median {float(row.median()):.2e}")
    assert float(row.max() if policy == "exact" else row.median()) <= (EXACT_LOGITS if policy == "exact" else MEDIAN_ROW)


def test_golden_residual_sizes(models: dict[str, Transformer], golden: dict[str, Tensor]) -> None:
    model, positions = models["exact"], golden["positions"].long()
    seen: list[Tensor] = []
    points = tuple(f"layers.{n}.hc_ffn.X" for n in model.layers)
    with model.taps.observe(points, lambda _point, value: seen.append(value[:, positions])):
        model.prefill(golden["tokens"].long(), model.new_state(batch=2))
    X = torch.stack(seen)  # [layer, b, position, n, D]
    torch.testing.assert_close(X.square().mean(-1).sqrt(), golden["exact.residual_rms"], rtol=1e-5, atol=0)
    torch.testing.assert_close(X.abs().amax(-1), golden["exact.residual_absmax"], rtol=2e-5, atol=0)


# ---- however the tokens are cut ----


@pytest.mark.parametrize("policy", ["exact", "storage"])
def test_every_split_across_the_window_and_a_group_of_128(
    policy: str, models: dict[str, Transformer], golden: dict[str, Tensor]
) -> None:
    model, tokens = models[policy], golden["tokens"].long()[:, :150]
    one_shot = model.prefill(tokens, model.new_state(batch=2))
    start = model.new_state(batch=2)
    head = model.prefill(tokens[:, :118], start)
    cuts = {}
    for split in range(119, 139):
        state = copy_of(start)
        parts = [head, model.prefill(tokens[:, 118:split], state), model.prefill(tokens[:, split:], state)]
        cuts[f"split at {split}"] = torch.cat(parts, 1)
    cuts["token by token"] = teacher_forced(model, tokens, model.new_state(batch=2))
    for name, logits in cuts.items():
        worst = float((logits - one_shot).abs().max())
        loss = float((nll(logits, tokens) - nll(one_shot, tokens)).abs().mean())
        if policy == "exact":
            assert worst <= EXACT_LOGITS, (name, worst)
        else:
            assert loss <= STORAGE_NLL, (name, loss)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """A small random model: hidden 96, 2 streams, ratios 0, 4, 128, 4, window 16, 7 of the entries chosen."""
    model: Transformer = reference.load(worlds.write_checkpoint(tmp_path_factory.mktemp("world"), seed=5, index_n_heads=8))
    return model


@given(cuts=st.lists(st.integers(1, 139), max_size=6, unique=True).map(sorted))
@settings(max_examples=12, deadline=None)
def test_any_cuts_of_a_small_world(world: Transformer, cuts: list[int]) -> None:
    tokens = torch.tensor([worlds.prompt(140, 128, start=700)])
    one_shot = world.prefill(tokens, world.new_state())
    state = world.new_state()
    bounds = [0, *cuts, 140]
    parts = [world.prefill(tokens[:, a:b], state) for a, b in pairwise(bounds)]
    torch.testing.assert_close(torch.cat(parts, 1), one_shot, rtol=0, atol=1e-4)


@given(lengths=st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_ragged_rows_go_on_at_their_own_position(world: Transformer, lengths: list[tuple[int, int, int]]) -> None:
    text = torch.tensor([worlds.prompt(130, 128, start=1000 * row) for row in range(3)])
    warm = 50  # past the window and past index_topk entries
    state = world.new_state(batch=3)
    world.prefill(text[:, :warm], state)
    taken = [warm] * 3
    got: list[list[Tensor]] = [[], [], []]
    for step in lengths:
        width = max(*step, 1)
        tokens = torch.full((3, width), -77)  # pads hold no token at all
        for row, n in enumerate(step):
            tokens[row, :n] = text[row, taken[row] : taken[row] + n]
        logits = world.prefill(tokens, state, lengths=torch.tensor(step))
        for row, n in enumerate(step):
            assert bool(logits[row, n:].isnan().all())
            got[row].append(logits[row, :n])
            taken[row] += n
    assert state.length.tolist() == taken
    for row in range(3):
        alone = world.prefill(text[row : row + 1, : max(taken[row], 1)], world.new_state())
        torch.testing.assert_close(torch.cat(got[row]), alone[0, warm : taken[row]], rtol=0, atol=1e-4)


def test_rows_of_a_batch_do_not_see_each_other(world: Transformer) -> None:
    tokens = torch.tensor([worlds.prompt(90, 128, start=500 * row) for row in range(3)])
    together = world.prefill(tokens, world.new_state(batch=3))
    order = [2, 0, 1]  # FP32 matrix products depend on a row's place in the matrix in the last bits
    permuted = world.prefill(tokens[order], world.new_state(batch=3))
    torch.testing.assert_close(permuted, together[order], rtol=0, atol=1e-5)
    changed = tokens.clone()
    changed[1] = 5
    others = world.prefill(changed, world.new_state(batch=3))[[0, 2]]
    torch.testing.assert_close(others, together[[0, 2]], rtol=0, atol=1e-5)
    alone = world.prefill(tokens[1:2], world.new_state())
    torch.testing.assert_close(alone[0], together[1], rtol=0, atol=1e-5)


# ---- what a query sees ----


@given(
    ratios=st.permutations([0, 4, 128, 4]),
    window=st.sampled_from([1, 5, 16, 128]),
    topk=st.sampled_from([1, 7, 64]),
    chunk=st.integers(1, 140),
)
@settings(max_examples=8, deadline=None)
def test_visible_keys_against_brute_force(
    tmp_path_factory: pytest.TempPathFactory, ratios: list[int], window: int, topk: int, chunk: int
) -> None:
    directory = worlds.write_checkpoint(
        tmp_path_factory.mktemp("visible"), compress_ratios=ratios, sliding_window=window, index_topk=topk, hidden_size=32
    )
    model = reference.load(directory, policy="storage")
    seen: dict[str, list[Tensor]] = {}
    points = [p for p in model.taps.points if p.endswith((".visible", ".selected", ".score"))]
    tokens, state = torch.tensor([worlds.prompt(140, 128)]), model.new_state()
    with model.taps.observe(points, lambda point, value: seen.setdefault(point, []).extend(value[0].clone())):
        for start in range(0, 140, chunk):
            model.prefill(tokens[:, start : start + chunk], state)
    for layer, ratio in enumerate(ratios):
        at = f"layers.{layer}.attn"
        for p in range(140):
            row = seen[f"{at}.visible"][p]
            assert [t for t in row[:window].tolist() if t >= 0] == [t for t in range(140) if p - window < t <= p]
            complete = [e for e in range(35) if ratio and (e + 1) * ratio <= p + 1]
            chosen = [e for e in row[window:].tolist() if e >= 0]
            if ratio != 4:
                assert chosen == complete
                continue
            score = seen[f"{at}.indexer.score"][p].tolist()
            assert [e for e, value in enumerate(score) if value > -torch.inf] == complete
            assert chosen == sorted(sorted(complete, key=lambda e: (-score[e], e))[:topk])
            assert [e for e in seen[f"{at}.selected"][p].tolist() if e >= 0] == chosen


# ---- taps, twins, configs ----


def test_every_point_is_shown_once_with_its_shape(world: Transformer) -> None:
    tokens = torch.tensor([worlds.prompt(131, 128), worlds.prompt(131, 128, start=99)])
    quiet = world.prefill(tokens, world.new_state(batch=2))
    seen: dict[str, Tensor] = {}

    def observe(point: str, value: Tensor) -> None:
        assert point not in seen
        seen[point] = value.clone()

    with world.taps.observe(world.taps.points, observe):
        watched = world.prefill(tokens, world.new_state(batch=2))
    assert world.taps.observers == 0
    assert torch.equal(quiet, watched)
    assert set(seen) == set(world.taps.points)
    for point, value in seen.items():
        spec = spec_of(point)
        assert value.shape[:2] == (2, 131), point
        if spec.kind == INDICES:
            assert value.dtype == torch.int64, point
        elif spec.sparse:
            ratio = 4 if "indexer" in point else world.config.ratio(int(point.split(".")[1]))
            finite = value.isfinite().all(-1)
            assert finite.tolist() == [[(p + 1) % ratio == 0 for p in range(131)]] * 2, point
        else:
            assert bool(value.isfinite().all()) or spec.kind == SCORES, point


@pytest.mark.parametrize("policy", ["exact", "published"])
def test_reordered_twins_differ_by_fp32_noise_only(policy: str, models: dict[str, Transformer], golden: dict[str, Tensor]) -> None:
    tokens = golden["tokens"].long()[:1, :9]  # before roundings cascade
    twins = [reference.load(TINY, policy=policy, layers=range(3), sum_order=order) for order in range(4)]
    logits = [twin.prefill(tokens, twin.new_state()) for twin in twins]
    for a in range(4):
        for b in range(a):
            error = float((logits[a] - logits[b]).norm() / logits[b].norm())
            assert 0 < error < (1e-5 if policy == "exact" else 3e-2), (a, b, error)


# Grid rationale: widths that are no multiple of 128, one stream and three, each scoring function, ratio orders that
# start compressed, one Sinkhorn iteration, one output group, all experts chosen, a window of one key.
CONFIGS: dict[str, dict[str, Any]] = {
    "sigmoid": {"scoring_func": "sigmoid", "hidden_size": 160, "hc_mult": 3, "compress_ratios": [4, 0, 128, 4], "o_groups": 1},
    "softmax": {"scoring_func": "softmax", "hc_mult": 1, "hc_sinkhorn_iters": 1, "moe_intermediate_size": 32, "num_hash_layers": 0},
    "all-hash": {"num_hash_layers": 4, "num_experts_per_tok": 6, "sliding_window": 1, "num_hidden_layers": 2, "q_lora_rank": 200},
    "wide-heads": {"head_dim": 576, "qk_rope_head_dim": 64, "index_head_dim": 64, "num_attention_heads": 2, "o_lora_rank": 130},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("policy", ["exact", "published"])
def test_other_configs_run_and_decode_as_they_prefill(name: str, policy: str, tmp_path: Path) -> None:
    model = reference.load(worlds.write_checkpoint(tmp_path, seed=7, index_n_heads=8, **CONFIGS[name]), policy=policy)
    tokens = torch.tensor([worlds.prompt(134, 128), worlds.prompt(134, 128, start=321)])
    one_shot = model.prefill(tokens, model.new_state(batch=2))
    assert bool(one_shot.isfinite().all())
    state = model.new_state(batch=2)
    model.prefill(tokens[:, :125], state)
    decoded = teacher_forced(model, tokens[:, 125:], state)
    if policy == "exact":
        torch.testing.assert_close(decoded, one_shot[:, 125:], rtol=0, atol=1e-4)
    else:
        assert bool(decoded.isfinite().all())


def test_prefix_of_layers_is_the_same_model_cut_short(tmp_path: Path) -> None:
    directory = worlds.write_checkpoint(tmp_path, prefix="model.", shards=1)
    whole, cut = reference.load(directory), reference.load(directory, layers=range(2))
    tokens = torch.tensor([worlds.prompt(20, 128)])
    seen: list[Tensor] = []
    for model in (whole, cut):
        with model.taps.observe(["layers.1.hc_ffn.X"], lambda _point, value: seen.append(value.clone())):
            logits = model.prefill(tokens, model.new_state())
    assert torch.equal(seen[0], seen[1])
    assert cut.layers == (0, 1)
    assert bool(logits.isfinite().all())
