"""Every point of every judged layer, in prefill and in each group of decode steps, isolated and free-running.

The printed id runs one of them again. What is compared with what: parity/audit.py; limits: parity/gates.py.
"""

from __future__ import annotations

import pytest

from parity import evaluate, witness
from probes.core.records import State, Verdict


def test_production_runs(phase, audit, record):
    """Production gets through the phase without an error."""
    audit.ensure(phase)
    crash = audit.crash
    if crash is None:
        record(Verdict("run", "run", "model", State.PASS, "production finished", phase=phase, rows=1))
    elif crash.phase in (phase, "load"):
        record(Verdict("run", "run", "model", State.FAIL, "production finished", phase=phase, step_first=crash.step, component=crash.component, reason=crash.words(), details={"because": crash.words()}))
    else:
        record(Verdict("run", "run", "model", State.NOT_RUN, "production finished", phase=phase, reason=f"production stopped in {crash.phase}: {crash.message}"))


def test_point(layer_case, audit, record, request):
    """A point is within its limit of the reference: worst row and norm ratio, sets exactly or up to near-ties."""
    record(witness.explained_core(audit, evaluate.judge_case(audit, layer_case, request.node.nodeid)))


@pytest.mark.parametrize("half", ["hc_attn", "hc_ffn"])
def test_comb_sums_and_ranges(layer, phase, half, audit, record):
    """Columns of comb sum to 1, rows as far from 1 as the reference's; pre in (0, 1 + eps), post in (0, 2)."""
    record(evaluate.judge_mhc(audit, layer, phase, half))


def test_residual_ratio(layer, phase, audit, record):
    """Largest and root-mean-square |X| after the layer stand in the reference's ratio to it, per stream."""
    record(evaluate.judge_residual(audit, layer, phase))
