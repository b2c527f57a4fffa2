"""Layers, logits and flips of a model that is no DeepSeek-V4, `--reference MODULE:FACTORY` only: see parity/generic.py."""

from __future__ import annotations

from dataclasses import replace

from parity import generic
from probes.core.records import State, Verdict


def test_production_runs(phase, audit, record):
    """Production takes the prompt and every step."""
    audit.ensure(phase)
    crash = audit.crash
    base = Verdict("run", "run", "model", State.PASS, "production finished", phase=phase, rows=1)
    if crash is None:
        record(base)
    elif crash.phase in (phase, "load"):
        record(replace(base, state=State.FAIL, rows=0, step_first=crash.step, reason=crash.words(), details={"because": crash.words()}))
    else:
        record(replace(base, state=State.NOT_RUN, rows=0, reason=f"production stopped in {crash.phase}: {crash.message}"))


def test_generic_point(generic_case, audit, record):
    """A point that both models show is within its limit."""
    record(generic.judge(audit, generic_case))


def test_most_likely_token(phase, audit, record):
    """The most likely token differs only where the reference's margin is below what noise can turn."""
    record(generic.judge_flips(audit, phase))
