"""Widths, bytes per token, the footprint of a million tokens, what steps allocate, what a full state says.

Planted faults that turn these red: B166, B178 (growth), B170 (capacity), B172, B175 (reported), B173 (rate), B177
(allocations), and a key buffer of heads * dim (widths, rate, footprint). Gates: gates.BOUNDS; how: parity/capacity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parity import capacity
from parity.session import RUN, run_of
from probes.core import memory
from probes.core.records import State, Verdict
from reference.config import ModelConfig

PRESETS = Path(__file__).resolve().parents[1] / "checkpoints" / "presets"
PREFILL_CHUNK = 512  # production's default
SOURCES = ("checkpoint", "flash", "pro")
FULL_STEPS, FEW_STEPS = 1000, 200


def pytest_generate_tests(metafunc):
    """The first judged layer of each kind."""
    run = metafunc.config.stash.get(RUN, None)
    if run is not None and "sample_layer" in metafunc.fixturenames:
        config = ModelConfig.from_dir(run.checkpoint_dir)
        first = {config.kind(layer): layer for layer in reversed(run.layers)}
        metafunc.parametrize("sample_layer", sorted(first.values()), ids=lambda layer: f"L{layer}")


@pytest.fixture
def model(audit, record):
    """Production, or the end of the test: nothing is measured of a model that could not be loaded."""
    if audit.crash is not None and audit.crash.phase == "load":
        record(Verdict("memory", "memory", "operation", State.NOT_RUN, "none", reason=f"production was not loaded: {audit.crash.message}", component="memory"))
    return audit.production


@pytest.fixture
def settle(request, record) -> Callable[[capacity.Result], None]:
    """Write every verdict and measurement of a result; the first verdict that is no pass ends the test."""
    run = run_of(request.config)

    def settled(result: capacity.Result) -> None:
        verdicts, measurements = result
        for measurement in measurements:
            run.record(measurement)
        last = next((v for v in verdicts if v.state is not State.PASS), verdicts[-1])
        for verdict in verdicts:
            if verdict is not last:
                run.record(replace(verdict, test_id=request.node.nodeid))
        record(last)

    return settled


def config_of(source: str, run) -> ModelConfig:
    return ModelConfig.from_dir(run.checkpoint_dir if source == "checkpoint" else PRESETS / source)


@pytest.fixture
def device_of(pytestconfig, model):
    return model.device.torch_device


def test_buffers_are_as_wide_as_what_is_stored(layer, model, settle):
    """Width of rows handed to the store, bytes written, bytes kept: all seen in the layer's first calls."""
    settle(capacity.widths(model, layer))


@pytest.mark.parametrize("kind", memory.KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_bytes_per_token_follow_the_closed_formula(source, kind, model, settle, pytestconfig, device_of):
    """Constant and slope per layer kind, through three lengths or more."""
    from production.model import State as Held

    settle(capacity.rate(Held, config_of(source, run_of(pytestconfig)), kind, source, PREFILL_CHUNK, device_of))


@pytest.mark.parametrize("preset", SOURCES[1:])
def test_a_million_tokens_fit(preset, model, settle, pytestconfig, device_of):
    """KV bytes at 1,048,576 tokens of the published configurations: formula within 1 %, at most 15 GB."""
    from production.model import State as Held

    settle(capacity.footprint(Held, config_of(preset, run_of(pytestconfig)), preset, PREFILL_CHUNK, device_of))


@pytest.mark.parametrize("source", SOURCES)
def test_reported_bytes_are_held(source, model, settle, pytestconfig):
    """Production's own formula, constant and rate against tensors of that size."""
    from production import cache
    from production.model import State as Held

    settle(capacity.reported(cache, Held, config_of(source, run_of(pytestconfig)), source, PREFILL_CHUNK))


def test_calls_allocate_nothing_that_stays(phase, model, settle, pytestconfig):
    """Decode: no allocation, no growth over 1000 steps (200 in a short run). Prefill: its logits alone, at any capacity."""
    from production.engine import count_allocations

    run = run_of(pytestconfig)
    config = model.config
    by_kind = {config.kind(layer): layer for layer in reversed(run.layers)}
    layer = next(by_kind[kind] for kind in ("csa", "hca", "window") if kind in by_kind)
    if phase == "prefill":
        settle(capacity.transients(model, layer, (8192, min(memory.MILLION, config.max_position_embeddings)), count_allocations))
        return
    everything = len(run.layers) == config.num_hidden_layers and run.steps >= 128
    steps = FULL_STEPS if everything else FEW_STEPS
    if model.device.torch_device.type == "cuda":
        settle(capacity.slope(memory.resized(model, 2048), steps, count_allocations, f"{len(model.layers)} layers"))
    else:
        settle(capacity.slope(memory.one_layer(model, layer, 2048), steps, count_allocations, f"layer {layer}", layer))


def test_a_full_state_refuses_one_token_more_and_keeps_the_rest(sample_layer, model, settle):
    """By decode, prefill and run_layer; the refusal names --max-context, the exported state is what it was."""
    settle(capacity.capacity(model, sample_layer))
