"""Residual streams: production's own parts must add up, stay within comb's norm, and grow as the reference's do.

Red with B090 (comb not transposed), B095 (pre weights ignored), B096 (one Sinkhorn iteration fewer); shown by
parity/unit/test_witness.py.
"""

from __future__ import annotations

import pytest

from parity import witness
from parity.session import run_of
from probes.core.records import State

HALVES = pytest.mark.parametrize("half", ["hc_attn", "hc_ffn"])


@HALVES
def test_streams_are_the_sum_of_their_parts(layer, phase, half, audit, record, pytestconfig):
    """a = sum pre X and X' = post y + comb^T X of production's own values; the comb part is within comb's spectral norm."""
    into, after = witness.judge_mixing(audit, layer, phase, half)
    if into.state is State.PASS:
        run_of(pytestconfig).record(into)
        record(after)
    else:
        run_of(pytestconfig).record(after)
        record(into)


@HALVES
@pytest.mark.parametrize("name", ["pre", "post"])
def test_weights_follow_from_their_own_streams(layer, phase, half, name, audit, record):
    """pre and post are the reference's of production's own X; what a flip did to X moves both alike."""
    record(witness.judge_weights(audit, layer, phase, half, name))


@HALVES
def test_sinkhorn_runs_as_many_iterations_as_configured(layer, phase, half, audit, record):
    """comb is Sinkhorn of production's own X after hc_sinkhorn_iters iterations, columns last."""
    record(witness.judge_sinkhorn(audit, layer, phase, half))


def test_growth_over_steps_is_the_reference(layer, phase, audit, record):
    """At fixed depth |X| over the reference's has no slope over the decode steps, in any stream."""
    record(witness.judge_slopes(audit, layer, phase))
