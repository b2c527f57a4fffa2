"""The same kernels on the CPU device: with --device cuda every judged layer runs there too, on the same input and state.

Collected with --device cuda only: without a GPU there is nothing to compare, and nothing was asked for. A fault in the kernels
themselves is in both and stays green here; red says that the card does something else than the code (compiler, memory order, a
race, a branch for one of the two). Runs and limits: parity/device_witness.py; what a red one means: parity/attribution.py.
"""

from __future__ import annotations

import pytest

from parity import device_witness
from parity.session import RUN, asks_for_witness
from reference.config import ModelConfig


def pytest_generate_tests(metafunc):
    """One test per point and step group."""
    run = metafunc.config.stash.get(RUN, None)
    if run is None or "device_case" not in metafunc.fixturenames:
        return
    cases = device_witness.cases(ModelConfig.from_dir(run.checkpoint_dir), run.layers, run.phases, run.steps)
    if not asks_for_witness(run):
        here = pytest.mark.skip(reason="production runs on the CPU device itself: there is no other to compare with")
        metafunc.parametrize("device_case", [pytest.param(cases[0], marks=here)], ids=["no-gpu"])
        return
    metafunc.parametrize("device_case", cases, ids=[case.id for case in cases])


def test_point_on_the_cpu_device(device_case, audit, record, request):
    """The GPU's value of a point is the CPU device's, but for roundings that an ulp tips; sets up to near-ties."""
    record(device_witness.judge(audit, device_case, request.node.nodeid))
