"""Decode from a captured graph against decode launch by launch, on the same states: batch 1, 3 and 8, rows of unequal lengths.

The graph is captured once, while host code sees an empty state, and replayed at every length that follows; taps copy into
poisoned buffers inside it, so a tap that did not fire is missing here and not run. Red here while a layer's gate is red with
`--decode replay` says that the same step is right launch by launch. Planted: parity/faults/graph_capture.toml, G010 and on.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity import capacity, self_parity
from parity.session import RUN, run_of
from probes.core import memory
from probes.core.drive import decoding
from probes.core.records import Measurement, State
from probes.core.selfparity import REPLAYED


def pytest_generate_tests(metafunc):
    """Only where decode is asked for."""
    run = metafunc.config.stash.get(RUN, None)
    if "batch" in metafunc.fixturenames:
        metafunc.parametrize("batch", REPLAYED if run is not None and "decode" in run.phases else ())
    if "phase_of_graphs" in metafunc.fixturenames:
        metafunc.parametrize("phase_of_graphs", ["decode"] if run is not None and "decode" in run.phases else ())


@pytest.fixture(scope="session")
def runs(audit):
    """Runs of production alone, shared by this file's tests."""
    return self_parity.runs_of(audit)


def test_replayed_steps_are_the_launched_ones(batch, audit, runs, record, pytestconfig):
    """Every point, the logits and what is stored: the same bits."""
    verdict, way = self_parity.judge_replayed(audit, runs, batch)
    if way is not None:
        run_of(pytestconfig).record(Measurement("graph", phase="decode", values={**way.graph, "of": f"gate {verdict.gate}"}))
    record(verdict)


def test_replayed_steps_allocate_nothing(phase_of_graphs, audit, record, request):
    """No tensor, on a GPU nothing of the allocator either, and nothing that grows; one layer on the CPU, all of them on a GPU."""
    from production.engine import count_allocations

    run, model = run_of(request.config), audit.production
    layer = next((n for n in run.layers if model.config.kind(n) == "csa"), run.layers[0])
    alone = model.device.torch_device.type == "cpu"
    small = memory.one_layer(model, layer, 512) if alone else memory.resized(model, 512)
    with decoding(small, "replay"):
        verdicts, measurements = capacity.slope(small, 40, count_allocations, f"replayed, layer {layer}" if alone else "replayed", layer if alone else None)
    for measurement in measurements:
        run.record(measurement)
    last = next((v for v in verdicts if v.state is not State.PASS), verdicts[-1])
    for verdict in verdicts:
        if verdict is not last:
            run.record(replace(verdict, test_id=request.node.nodeid))
    record(last)
