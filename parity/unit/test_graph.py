"""Captured decode steps: the same bits at every length, taps that fire or do not, and a state that a capture leaves alone.

Everything runs on the CPU device; the same tests run on a GPU where there is one (`-m gpu`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import production
from probes.core.recorder import Recorder
from production import launch
from production.engine import count_allocations
from production.graph import poison, poisoned
from production.launch import KernelError, open_device
from production.model import State, Transformer
from reference.config import InputError

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(launch.cuda_missing() is not None, reason=f"not run: {launch.cuda_missing()}")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
LAYERS = range(4)  # window, CSA and HCA, with and without a hash
CONTEXT = 320


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[pytest.param((device, plan), id=f"{device}-{plan}", marks=on_gpu if device == "cuda" else ()) for device in ("cpu", "cuda") for plan in ("portable", "fast")])
def model(request) -> Transformer:
    device, plan = request.param
    made: Transformer = production.load(TINY, device=device, max_context=CONTEXT, layers=LAYERS, prefill_chunk=64, variants=plan)
    return made


TEXT = torch.randint(0, 512, (8, CONTEXT), generator=torch.Generator().manual_seed(1))


def state_at(model: Transformer, lengths: list[int]) -> State:
    state = model.new_state(len(lengths))
    if max(lengths):
        model.prefill(TEXT[: len(lengths), : max(lengths)], state, lengths)
    return state


def bits(state: State) -> list[torch.Tensor]:
    """All memory of a state's cache, byte by byte."""
    cache = state.cache
    held = [t for layer in cache.layers for tensors in cache.parts(layer).values() for t in tensors]
    return [t.contiguous().view(torch.uint8).cpu().clone() for t in [*held, cache.lengths, state.ones]]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().cpu().view(torch.uint8), b.contiguous().cpu().view(torch.uint8))


# ---- the same bits ----


@pytest.mark.parametrize("lengths", [[3], [126], [255], [3, 126, 255], [0, 1, 3, 7, 60, 126, 127, 255]], ids=str)
def test_a_replay_is_the_launched_step_bit_for_bit(model, lengths):
    """Across groups of 4 and 128 and the window's end; the graph was captured at 0 tokens. Every tap, the logits and the state."""
    eager, replayed = state_at(model, lengths), state_at(model, lengths)
    graph = model.capture(replayed, model.taps.points)
    for step in range(4):
        tokens = TEXT[: len(lengths), 300 + step].clone()
        shown = []
        for decode in (lambda t: model.decode(t, eager), graph.decode):
            with Recorder(model, model.taps.points) as trace:
                trace.begin("decode", step)
                logits = decode(tokens)
            shown.append((trace, logits))
        (want, want_logits), (got, got_logits) = shown
        assert torch.isfinite(got_logits).all()
        assert same(got_logits, want_logits)
        for point in model.taps.points:
            assert same(got.get(point, "decode", step), want.get(point, "decode", step)), (point, step)
    assert all(map(torch.equal, bits(replayed), bits(eager)))
    facts = graph.facts()
    assert (facts["captured_at"], facts["replays"]) == (0, 4)
    assert facts["replayed_at"] == (min(lengths), max(lengths) + 3)
    assert facts["elsewhere"] == (4 if min(lengths) else 3)


def test_a_graph_that_was_captured_at_another_length_is_the_same(model):
    states = [state_at(model, [126, 9]) for _ in range(2)]
    graphs = [model.capture(state, at=at) for state, at in zip(states, (0, 200), strict=True)]
    tokens = TEXT[:2, 0].clone()
    assert same(*(graph.decode(tokens) for graph in graphs))
    assert [graph.facts()["captured_at"] for graph in graphs] == [0, 200]


def test_replayed_choices_are_those_of_each_step(model):
    """Given experts and entries are copied into the graph's buffers at every replay."""
    points = [p for p in model.taps.points if p.endswith(("attn.selected", "ffn.experts"))]
    states = [state_at(model, [126, 60]) for _ in range(2)]
    graph = model.capture(states[1], choices=points)
    for step in range(3):
        given = {}
        for point in points:
            if point.endswith("experts"):
                given[point] = torch.arange(model.config.num_experts_per_tok).expand(2, 1, -1) + step
            else:
                given[point] = torch.tensor([[[0, 3, 5 + step]], [[1, 2, -1]]])
        tokens = TEXT[:2, 200 + step].clone()
        assert same(graph.decode(tokens, given), model.decode(tokens, states[0], given)), step
    with pytest.raises(InputError, match=r"is given or captured, not both"):
        graph.decode(tokens)
    with pytest.raises(InputError, match=r"is given or captured, not both"):
        model.capture(states[1]).decode(tokens, given)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_layer_alone_is_replayed_too(model, layer):
    """On given streams; a row without a token (length 0) stays as it is."""
    states = [state_at(model, [126, 3, 60]) for _ in range(2)]
    c = model.config
    graph = model.capture(states[1], layer=layer)
    for step, lengths in enumerate((None, [1, 0, 1], None)):
        X = torch.randn(3, 1, c.hc_mult, c.hidden_size, generator=torch.Generator().manual_seed(step))
        tokens = TEXT[:3, 100 + step : 101 + step]
        want = model.run_layer(layer, X, tokens, states[0], lengths, decode=True)
        got = graph.run_layer(X, tokens, lengths)
        valid = [row for row in range(3) if lengths is None or lengths[row]]
        assert same(got[valid], want[valid])
    assert all(map(torch.equal, bits(states[1]), bits(states[0])))
    with pytest.raises(InputError, match="holds layer"):
        graph.decode(tokens[:, 0])


def test_a_model_that_replays_decodes_from_graphs_alone(model):
    """`decoding` is all that changes for who calls: the graphs are kept in the state, one per taps, choices and layer."""
    states = [state_at(model, [126]) for _ in range(2)]
    tokens = [TEXT[:1, 200 + step].clone() for step in range(3)]
    want = [model.decode(token, states[0]) for token in tokens]
    model.decoding = "replay"
    try:
        got = [model.decode(token, states[1]) for token in tokens]
    finally:
        model.decoding = "eager"
    assert all(map(same, got, want))
    (graph,) = states[1].graphs.values()
    assert graph.facts()["replays"] == 3
    assert states[0].graphs == {}


# ---- taps ----


def test_only_taps_that_were_captured_are_shown(model):
    state = state_at(model, [126])
    graph = model.capture(state, ["layers.0.attn.q"])
    with Recorder(model, ["layers.0.attn.q", "layers.1.attn.q", "logits"]) as trace:
        trace.begin("decode", 0)
        graph.decode(TEXT[:1, 0].clone())
    assert [point for point in ("layers.0.attn.q", "layers.1.attn.q", "logits") if trace.fired(point, "decode", 0)] == ["layers.0.attn.q"]


def test_a_tap_that_does_not_fire_in_the_graph_is_not_shown(model, monkeypatch):
    """It fired in the step before the capture, so a buffer is there, and all poison after the replay."""
    state = state_at(model, [126])
    emit = type(model.taps).emit

    def but_not_captured(taps, point, value):
        if not (point == "layers.1.attn.q_norm" and len(fired) > 0):
            emit(taps, point, value)
        if point == "layers.1.attn.q_norm":
            fired.append(point)

    fired: list[str] = []
    points = ["layers.1.attn.q_norm", "layers.1.attn.q"]
    with monkeypatch.context() as patched:
        patched.setattr(type(model.taps), "emit", but_not_captured)
        graph = model.capture(state, points)
        with Recorder(model, points) as trace:
            trace.begin("decode", 0)
            graph.decode(TEXT[:1, 0].clone())
    assert not trace.fired("layers.1.attn.q_norm", "decode", 0)
    assert trace.fired("layers.1.attn.q", "decode", 0)


def test_what_a_tap_showed_before_is_no_value_of_this_replay(model, monkeypatch):
    """A replay that runs nothing leaves poison in every buffer and NaN in the logits, never the step before."""
    state = state_at(model, [126])
    graph = model.capture(state, ["layers.0.attn.q", "logits"])
    graph.decode(TEXT[:1, 0].clone())
    monkeypatch.setattr(graph.graph, "_replay", lambda: None)
    with Recorder(model, ["layers.0.attn.q", "logits"]) as trace:
        trace.begin("decode", 0)
        logits = graph.decode(TEXT[:1, 1].clone())
    assert logits.isnan().all()
    assert not trace.fired("layers.0.attn.q", "decode", 0)
    assert not trace.fired("logits", "decode", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_poison_is_no_value_and_one_element_of_it_is_seen(dtype):
    values = torch.zeros(3, 5, dtype=dtype)
    assert not poisoned(values)
    values.fill_(torch.nan if dtype.is_floating_point else -1)
    assert not poisoned(values)  # a NaN or a -1 that a kernel may write
    poison(values)
    assert values.isnan().all() if dtype.is_floating_point else (values > 2**30).all()
    values[:, 1:] = 0
    values[1:] = 0
    assert poisoned(values)


# ---- what a capture leaves alone ----


def test_a_capture_leaves_the_state_as_it_was(model):
    """Every byte of the cache and every length, on the device and on the host; also in a state that is full."""
    for lengths in ([0], [126, 3], [CONTEXT]):
        state = state_at(model, lengths)
        before, mirror = bits(state), [list(row) for row in state.cache.mirror]
        model.capture(state, model.taps.points)
        for layer in LAYERS:
            model.capture(state, layer=layer)
        assert all(map(torch.equal, bits(state), before)), lengths
        assert state.cache.mirror == mirror


def test_a_refused_step_leaves_the_state_as_it_was(model):
    state = state_at(model, [126, 3])
    graph = model.capture(state)
    before = bits(state)
    wrong = torch.empty(2, model.config.vocab_size + 1, device=model.device.torch_device)
    for tokens, more, said in (
        (torch.tensor([1]), {}, "1 rows, the state has 2"), (torch.tensor([1, model.config.vocab_size]), {}, "token ids run from"),
        (torch.tensor([[1], [2]]), {}, "expected shape"), (torch.tensor([1, 2]), {"out": wrong}, "out: expected"),
        (torch.tensor([1, 2]), {"choices": {"layers.0.nothing": torch.zeros(2, 1, 1, dtype=torch.int64)}}, "no choice of this model"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            graph.decode(tokens, **more)
    assert all(map(torch.equal, bits(state), before))
    assert graph.facts()["replays"] == 0
    full = state_at(model, [CONTEXT])
    with pytest.raises(InputError, match="--max-context"):
        model.capture(full).decode(torch.tensor([1]))
    with pytest.raises(InputError, match=r"unknown point|is not in this model"):
        model.capture(state, ["layers.0.attn.nothing"])
    with pytest.raises(InputError, match="this model runs layers"):
        model.capture(state, layer=99)
    for at in (10**9, CONTEXT, -1, True, 2.0):
        with pytest.raises(InputError, match=rf"at={at!r}: expected 0 to {CONTEXT - 1}"):
            model.capture(state, at=at)
    assert model.capture(state, at=CONTEXT - 1).facts()["captured_at"] == CONTEXT - 1


def test_a_replayed_step_allocates_nothing(model):
    state = state_at(model, [126])
    graph = model.capture(state)
    tokens, out = TEXT[:1, 0].clone(), torch.empty(1, model.config.vocab_size, device=model.device.torch_device)
    with count_allocations():
        graph.decode(tokens, out=out)
    with count_allocations() as counted:
        for _ in range(5):
            graph.decode(tokens, out=out)
    assert (counted.count, counted.device_count) == (0, 0), counted.operations


# ---- the device ----


@pytest.mark.parametrize("name", DEVICES)
def test_an_empty_graph_is_an_error(name):
    device = open_device(name)
    with pytest.raises(KernelError, match="graph is empty"), device.capture():
        pass
    with pytest.raises(RuntimeError, match="a capture is open"), device.capture(), device.capture():
        pass


@pytest.mark.parametrize("name", DEVICES)
def test_replays_are_counted_and_numbers_are_those_of_the_capture(name):
    """Nothing runs during the capture; pointers are read anew, numbers and host steps in their order."""
    device = open_device(name)
    start = torch.tensor([5, 6], dtype=torch.int32, device=device.torch_device)
    count = torch.ones_like(start)

    def advance():
        device.launch("positions", "advance_length", (1,), (128,), (start, count, 2))

    advance()  # builds it
    with device.capture() as graph:
        advance()
        device.host_step(lambda: count.mul_(10))
        advance()
    assert start.tolist() == [6, 7]
    assert (graph.launches, graph.host_steps) == (2, 1)
    graph.replay()
    assert start.tolist() == [17, 18]
    graph.replay()
    assert start.tolist() == [127, 128]
    ((_, _, _, _, launches),) = device.ran
    assert launches == 1 + 2 * 2


def test_a_watched_device_neither_captures_nor_replays():
    device = open_device("cpu")
    start = torch.zeros(1, dtype=torch.int32)

    class Observer:
        def before(self, launch):
            pass

        after = before

    with device.capture() as graph:
        device.launch("positions", "advance_length", (1,), (128,), (start, start, 1))
    with device.watched(Observer()):
        with pytest.raises(RuntimeError, match="watched"):
            graph.replay()
        with pytest.raises(RuntimeError, match="watched"), device.capture():
            pass
