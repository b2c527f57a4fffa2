"""Decode from a captured graph against decode launch by launch, on the same states: batch 1, 3 and 8, rows of unequal lengths.

The graph is captured once, while host code sees an empty state, and replayed at every length that follows; taps copy into
poisoned buffers inside it, so a tap that did not fire is missing here and not run. Red here while a layer's gate is red with
`--decode replay` says that the same step is right launch by launch. Planted: parity/faults/graph_capture.toml, G010 and on.
"""

from __future__ import annotations

import pytest

from parity import self_parity
from parity.session import RUN, run_of
from probes.core.records import Measurement
from probes.core.selfparity import REPLAYED


def pytest_generate_tests(metafunc):
    """Only where decode is asked for."""
    run = metafunc.config.stash.get(RUN, None)
    if "batch" in metafunc.fixturenames:
        metafunc.parametrize("batch", REPLAYED if run is not None and "decode" in run.phases else ())


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
