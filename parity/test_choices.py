"""Discrete choices, the other way round: production replays the reference's selected entries and experts.

Turned red by B090 (mixing matrix not transposed) at every layer's output; flips and margins go into the report. That sets
differ only by near-ties is judged in test_layers.py. Runs: parity/choices.py.
"""

from __future__ import annotations

import pytest

from parity import choices, ladder
from parity.session import run_of


@pytest.fixture(scope="module")
def exchanged(audit):
    """The reference on its own choices, production on the reference's."""
    return choices.Exchanged(audit)


def test_the_other_way_round(layer, phase, exchanged, record, pytestconfig):
    """With the reference's choices production agrees at the layer's output; how often they differ is measured."""
    verdict = choices.judge_exchanged(exchanged, layer, phase)
    measured = choices.measure(exchanged, layer, phase)
    of_formats = ladder.measure(exchanged, layer) if phase == "prefill" else None
    for one in filter(None, (measured, of_formats)):
        run_of(pytestconfig).record(one)
    record(verdict)
