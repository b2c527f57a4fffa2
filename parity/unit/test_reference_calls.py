"""How the reference is called: state handed over layer by layer, choices replayed, and errors that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from parity.unit import worlds
from reference.config import InputError
from reference.linear import Decoded
from reference.model import State, Transformer
from reference.points import STATE_LEGEND


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.write_checkpoint(tmp_path_factory.mktemp("calls"), seed=2, index_n_heads=8)


@pytest.fixture(scope="module")
def model(directory: Path) -> Transformer:
    loaded: Transformer = reference.load(directory, policy="published", max_context=300)
    return loaded


def text(*starts: int, length: int) -> Tensor:
    return torch.tensor([worlds.prompt(length, 128, start=start) for start in starts])


def snapshot_of(state: State) -> dict[int, dict[str, Tensor]]:
    return {layer: state.export_layer(layer) for layer in state.layers}


def assert_same(a: dict[int, dict[str, Tensor]], b: dict[int, dict[str, Tensor]]) -> None:
    for layer in a:
        assert set(a[layer]) == set(b[layer])
        for name in a[layer]:
            assert torch.equal(a[layer][name].nan_to_num(7e7), b[layer][name].nan_to_num(7e7)), (layer, name)


def record(model: Transformer, points: list[str], call: Callable[[], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    seen: dict[str, Tensor] = {}
    with model.taps.observe(points, lambda point, value: seen.update({point: value.clone()})):
        return seen, call()


# ---- one layer alone ----


# Grid rationale: 3/4/5 around a CSA group, 127/128/129 around an HCA group, rows at different places of their groups.
@pytest.mark.parametrize("warm", [(0, 0), (3, 4), (5, 16), (127, 128), (129, 131)])
def test_layers_run_alone_from_exported_state_are_the_free_run(model: Transformer, warm: tuple[int, int]) -> None:
    tokens = text(0, 777, length=140)
    state = model.new_state(batch=2)
    if max(warm):
        model.prefill(tokens[:, : max(warm)], state, lengths=warm)
    before = snapshot_of(state)
    lengths = (9, 4)
    step = torch.stack([tokens[row, n : n + 9] for row, n in enumerate(warm)])
    points = [f"layers.{n}.hc_ffn.X" for n in model.layers]
    seen, logits = record(model, points, lambda: model.prefill(step, state, lengths=lengths))

    alone = model.new_state(batch=2)
    X = model.embed[step].float()[:, :, None].expand(-1, -1, model.config.hc_mult, -1)
    for layer in model.layers:
        alone.import_layer(layer, before[layer])
        X = model.run_layer(layer, X, step, alone, lengths=lengths)
        valid = torch.arange(9) < torch.tensor(lengths)[:, None]
        assert torch.equal(X[valid], seen[f"layers.{layer}.hc_ffn.X"][valid])
        X = X.masked_fill(~valid[..., None, None], torch.nan)  # whatever pads hold, it goes nowhere
    assert_same(snapshot_of(alone), snapshot_of(state))
    following = torch.tensor([1, 2])
    assert torch.equal(model.decode(following, alone), model.decode(following, state))
    assert logits.shape == (2, 9, 128)


def test_exported_state_follows_the_legend(model: Transformer) -> None:
    state = model.new_state(batch=2)
    model.prefill(text(3, 50, length=135), state, lengths=(135, 6))
    c = model.config
    for layer in model.layers:
        snapshot, ratio = state.export_layer(layer), c.ratio(layer)
        assert set(snapshot) <= set(STATE_LEGEND)
        assert snapshot["length"].tolist() == [135, 6]
        assert snapshot["kv"].shape == (2, c.sliding_window, c.head_dim)
        assert bool(snapshot["kv"][0].isfinite().all())
        assert snapshot["kv"][1].isnan().all(-1).tolist() == [True] * 10 + [False] * 6
        if not ratio:
            assert set(snapshot) == {"length", "kv"}
            continue
        names = ["compressor", "indexer.compressor"] if ratio == 4 else ["compressor"]
        assert set(snapshot) == {"length", "kv"} | {f"{n}.{part}" for n in names for part in ("entries", "kv", "gate")}
        for name in names:
            entries = snapshot[f"{name}.entries"]
            assert entries.shape[1] == 135 // ratio
            assert entries.isfinite().all(-1).sum(1).tolist() == [135 // ratio, 6 // ratio]
            # Row p % R: the unfinished group, and for CSA the group before it.
            for row, length in enumerate((135, 6)):
                first = length // ratio * ratio - (4 if ratio == 4 else 0)
                slots = 8 if ratio == 4 else 128
                needed = {p % slots for p in range(max(first, 0), length)}
                live = snapshot[f"{name}.gate"][row].isfinite().all(-1)
                assert set(live.nonzero()[:, 0].tolist()) == needed
                assert torch.equal(live, snapshot[f"{name}.kv"][row].isfinite().all(-1))


def test_run_layer_advances_only_its_own_layer(model: Transformer) -> None:
    state = model.new_state()
    X = torch.randn(1, 3, 2, 96, generator=torch.Generator().manual_seed(4))
    model.run_layer(2, X, text(0, length=3), state)
    assert [int(state.layers[n].length) for n in model.layers] == [0, 0, 3, 0]
    with pytest.raises(InputError, match="different positions"):
        model.prefill(text(0, length=2), state)


# ---- choices ----


def test_replaying_own_choices_changes_nothing(model: Transformer) -> None:
    tokens = text(10, 20, length=70)
    points = [p for p in model.taps.points if p.endswith((".selected", ".experts"))]
    state, replayed = model.new_state(batch=2), model.new_state(batch=2)
    own, logits = record(model, points, lambda: model.prefill(tokens[:, :60], state))
    assert torch.equal(model.prefill(tokens[:, :60], replayed, choices=own), logits)
    for i in range(60, 70):
        own, logits = record(model, points, partial(model.decode, tokens[:, i], state))
        assert torch.equal(model.decode(tokens[:, i], replayed, choices=own), logits)
    assert_same(snapshot_of(replayed), snapshot_of(state))


def test_choices_may_be_replayed_before_the_first_entry_is_complete(model: Transformer) -> None:
    """A prompt of three tokens has no entry yet; production lists its index_topk columns of "none" all the same."""
    tokens, none = text(0, length=3), torch.full((1, 3, 4), -1)
    given = {f"layers.{n}.attn.selected": none for n in model.layers if model.config.kind(n) == "csa"}
    own = model.prefill(tokens, model.new_state())
    assert torch.equal(model.prefill(tokens, model.new_state(), choices=given), own)


def test_given_choices_are_used_and_own_choices_shown(model: Transformer) -> None:
    tokens = text(10, length=60)
    points = [f"layers.1.{p}" for p in ("attn.selected", "attn.visible", "ffn.experts", "ffn.weights", "ffn.gate", "hc_ffn.X")]
    own, _ = record(model, points, lambda: model.prefill(tokens, model.new_state()))
    selected = torch.full((1, 60, 2), -1)
    selected[0, 20:] = torch.tensor([4, 0])  # in any order
    experts = torch.tensor([5, 0]).expand(1, 60, 2)
    choices = {"layers.1.attn.selected": selected, "layers.1.ffn.experts": experts}
    seen, _ = record(model, points, lambda: model.prefill(tokens, model.new_state(), choices=choices))
    assert torch.equal(seen["layers.1.attn.selected"], own["layers.1.attn.selected"])
    assert seen["layers.1.attn.visible"][0, 59, -2:].tolist() == [0, 4]
    assert bool((seen["layers.1.attn.visible"][0, :20, 16:] == -1).all())
    gate = seen["layers.1.ffn.gate"][..., [0, 5]]
    torch.testing.assert_close(seen["layers.1.ffn.weights"], 1.5 * gate / gate.sum(-1, keepdim=True))
    assert not torch.equal(seen["layers.1.hc_ffn.X"], own["layers.1.hc_ffn.X"])


# ---- errors ----

NO_TENSOR: Any = "ab"
BAD_CALLS: dict[str, tuple[Callable[[Transformer, State], object], str]] = {
    "id too large": (lambda m, s: m.prefill(torch.tensor([[1, 128], [1, 1]]), s), r"tokens\[0, 1\]: id 128 out of range"),
    "negative id": (lambda m, s: m.decode(torch.tensor([0, -1]), s), "id -1 out of range"),
    "too long": (lambda m, s: m.prefill(torch.zeros(2, 281, dtype=torch.int64), s), "row 0: 20 tokens held and 281 more.*--max-context"),
    "one too many": (lambda m, s: m.prefill(torch.zeros(2, 281, dtype=torch.int64), s, lengths=(0, 291)), "lengths: expected 0 .. 281"),
    "batch": (lambda m, s: m.prefill(torch.zeros(3, 2, dtype=torch.int64), s), "3 rows, the state has 2"),
    "dtype": (lambda m, s: m.prefill(torch.zeros(2, 2, dtype=torch.int32), s), "expected int64"),
    "empty": (lambda m, s: m.prefill(torch.zeros(2, 0, dtype=torch.int64), s), "s >= 1"),
    "decode shape": (lambda m, s: m.decode(torch.zeros(2, 1, dtype=torch.int64), s), r"expected shape \[b\]"),
    "lengths shape": (lambda m, s: m.prefill(torch.zeros(2, 2, dtype=torch.int64), s, lengths=[1]), "expected 2 integers"),
    "lengths float": (lambda m, s: m.prefill(torch.zeros(2, 2, dtype=torch.int64), s, lengths=torch.ones(2)), "expected 2 integers"),
    "lengths of text": (lambda m, s: m.prefill(torch.zeros(2, 2, dtype=torch.int64), s, lengths=NO_TENSOR), "expected 2 integers"),
    "expert twice": (lambda m, s: m.decode(torch.zeros(2, dtype=torch.int64), s, choices={"layers.1.ffn.experts": torch.ones(2, 1, 2).long()}), "given twice"),
    "experts as bools": (lambda m, s: m.decode(torch.zeros(2, dtype=torch.int64), s, choices={"layers.1.ffn.experts": torch.ones(2, 1, 2).bool()}), "expected integers"),
    "no choice": (lambda m, s: m.decode(torch.zeros(2, dtype=torch.int64), s, choices={"layers.1.ffn.experts": NO_TENSOR}), "expected integers"),
    "unknown choice": (lambda m, s: m.decode(torch.zeros(2, dtype=torch.int64), s, choices={"layers.0.attn.selected": torch.zeros(2, 1, 1).long()}), "not a choice"),
    "future entry": (lambda m, s: m.decode(torch.zeros(2, dtype=torch.int64), s, choices={"layers.1.attn.selected": torch.full((2, 1, 1), 5)}), "5 is out of 0 .. 4"),
    "entry twice": (lambda m, s: m.decode(torch.zeros(2, dtype=torch.int64), s, choices={"layers.1.attn.selected": torch.zeros(2, 1, 2).long()}), "given twice"),
    "expert": (lambda m, s: m.decode(torch.zeros(2, dtype=torch.int64), s, choices={"layers.1.ffn.experts": torch.full((2, 1, 2), 6)}), "6 is out of 0 .. 5"),
    "layer": (lambda m, s: m.run_layer(4, torch.zeros(2, 1, 2, 96), torch.zeros(2, 1).long(), s), "layers 0-3"),
    "X shape": (lambda m, s: m.run_layer(0, torch.zeros(2, 1, 96), torch.zeros(2, 1).long(), s), "X: expected"),
    "decode of two": (lambda m, s: m.run_layer(0, torch.zeros(2, 2, 2, 96), torch.zeros(2, 2).long(), s, decode=True), "one token per row"),
    "import names": (lambda m, s: s.import_layer(1, {"length": torch.zeros(2).long()}), "expected .*compressor.kv"),
    "import shape": (lambda m, s: s.import_layer(0, {"length": torch.zeros(2).long(), "kv": torch.zeros(2, 15, 96)}), "shape"),
    "import length": (lambda m, s: s.import_layer(0, {"length": torch.tensor([0, 301]), "kv": torch.zeros(2, 16, 96)}), "--max-context"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_refused_call_leaves_the_state_as_it_was(model: Transformer, name: str) -> None:
    call, message = BAD_CALLS[name]
    state = model.new_state(batch=2)
    model.prefill(text(0, 9, length=20), state)
    before = snapshot_of(state)
    with pytest.raises(InputError, match=message) as caught:
        call(model, state)
    assert "\n" not in str(caught.value)
    assert_same(snapshot_of(state), before)


def test_a_call_that_breaks_half_way_leaves_the_state_as_it_was(model: Transformer) -> None:
    state = model.new_state(batch=1)
    model.prefill(text(0, length=20), state)
    before = snapshot_of(state)

    def break_here(point: str, value: Tensor) -> None:
        raise RuntimeError("broken observer")

    with pytest.raises(RuntimeError, match="broken observer"), model.taps.observe(["layers.3.ffn.out"], break_here):
        model.prefill(text(40, length=7), state)
    assert_same(snapshot_of(state), before)
    assert model.taps.observers == 0


def test_the_last_token_fits_and_one_more_does_not(model: Transformer) -> None:
    state = model.new_state(batch=1, max_context=5)
    model.prefill(text(0, length=5), state)
    with pytest.raises(InputError, match="max_context 5; raise --max-context"):
        model.decode(torch.tensor([1]), state)
    logits = model.prefill(text(0, length=3), state, lengths=[0])  # nothing taken is allowed
    assert bool(logits.isnan().all())
    assert state.length.tolist() == [5]


def test_state_arguments(model: Transformer, directory: Path) -> None:
    for batch, context, message in [(0, None, "batch"), (True, None, "batch"), (1, True, "max_context"), (1, 301, "--max-context"), (1, 0, "max_context")]:
        with pytest.raises(InputError, match=message):
            model.new_state(batch=batch, max_context=context)
    assert model.new_state().max_context == 300
    other = reference.load(directory, layers=range(1))
    with pytest.raises(InputError, match="another model"):
        other.decode(torch.tensor([1]), model.new_state())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "fast"}, "unknown rounding point"),
        ({"policy": None}, "policy: expected"),
        ({"policy": 5}, "policy: expected"),
        ({"layers": "0-1"}, "expected a prefix"),
        ({"layers": 2}, "expected a prefix"),
        ({"layers": range(5)}, "expected a prefix"),
        ({"layers": [1]}, "expected a prefix"),
        ({"max_context": 65537}, "max_position_embeddings"),
        ({"max_context": 0}, "max_context"),
        ({"sum_order": 4}, "sum_order"),
    ],
)
def test_load_refuses(directory: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        reference.load(directory, **arguments)


def test_load_prints_its_estimate_and_describes_itself(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = reference.load(directory, policy="storage")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "GiB of weights" in err
    assert model.max_context == 8192
    assert "kv.e4m3" in model.describe()
    assert "\n" not in model.describe()


# ---- weights stay packed ----


def test_only_experts_that_are_hit_are_decoded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def keep(self: Decoded, name: str, weight: Tensor) -> None:
        decoded.append(name)

    monkeypatch.setattr(Decoded, "keep", keep)
    model = reference.load(directory)
    assert decoded == []
    points = [f"layers.{n}.ffn.experts" for n in model.layers]
    seen, _ = record(model, points, lambda: model.prefill(text(0, length=1), model.new_state()))
    hit = {f"layers.{n}.ffn.experts.{e}.w{i}" for n in model.layers for e in seen[points[n]].unique().tolist() for i in (1, 2, 3)}
    assert {name for name in decoded if ".experts." in name and "shared" not in name} == hit


def test_decoded_weights_are_bounded_in_bytes() -> None:
    decoded = Decoded(limit_bytes=1000)
    for i in range(20):
        decoded.keep(str(i), torch.zeros(60))  # 240 bytes
        assert decoded.held_bytes <= 1000
    assert [decoded.get(str(i)) is not None for i in range(14, 20)] == [False, False, True, True, True, True]
    decoded.keep("large", torch.zeros(251))
    assert decoded.get("large") is None
    assert decoded.held_bytes == 960
