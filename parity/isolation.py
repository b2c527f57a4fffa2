"""How strong the claim "it starts here" is, and the repro that goes with it.

    divergence = strengthened(divergence, records, audit)    # how many gates before it passed, how many saw nothing
    divergence = with_repro(divergence, records, audit, report_dir)

A gate is counted before the divergence when its phase, its first decode step, its place in the dataflow and its mode come
before. Every such place that no gate passed counts as unobserved: layers and phases that were not asked for, taps that did not
fire. Tests: parity/unit/test_isolation.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parity import selection
from parity.attribution import step_of
from parity.audit import Audit
from parity.repro import NoReproError, capture
from probes.core.records import Divergence, Record, State, Verdict
from reference.points import layer_of, places_of_model, state_order

REPRO = "repro.safetensors"
Key = tuple[int, int, int, int]


def failed_verdict(divergence: Divergence, records: Sequence[Record]) -> Verdict | None:
    """The gate that the divergence stands for: isolated before free."""
    place = (divergence.point, divergence.phase, divergence.layer)
    found = [
        v for v in records
        if isinstance(v, Verdict) and v.state is State.FAIL and (v.point, v.phase, v.layer) == place
        and divergence.step in (step_of(v), v.details.get("first_step", v.step_first))
    ]  # fmt: skip
    modes = selection.CHAIN_MODES
    return min(found, key=lambda v: modes.index(v.mode) if v.mode in modes else len(modes), default=None)


def strengthened(divergence: Divergence | None, records: Sequence[Record], audit: Audit) -> Divergence | None:
    """The divergence with `checked` and `unobserved`; one of an operation alone has no place in the dataflow and keeps zeros."""
    if divergence is None or divergence.phase is None:
        return divergence
    failed = failed_verdict(divergence, records)
    points = places_of_model(audit.config, audit.layers_run)
    if failed is None or failed.mode not in selection.CHAIN_MODES or divergence.point not in points:
        return divergence
    order = {point: i for i, point in enumerate(points)}

    def key(phase: str, first: int | None, point: str, mode: str) -> Key:
        return (selection.PHASES.index(phase), -1 if first is None else first, order[point], selection.MODES.index(mode))

    handed_over = failed.details.get("left_by") == "prefill"  # stands before the first step
    # Gates of another device are counted as the isolated run that they judge.
    here = key(divergence.phase, None if handed_over else failed.step_first, divergence.point, "isolated" if failed.mode == selection.DEVICE_MODE else failed.mode)
    passed = {
        key(v.phase, v.step_first, v.point, v.mode)
        for v in records
        if isinstance(v, Verdict) and v.state is State.PASS and v.mode in selection.MODES and v.phase is not None and v.point in order
    }
    expected = set()
    for phase in selection.PHASES:
        groups = [None] if phase == "prefill" else [first for first, _ in selection.step_groups(audit.plan.steps)]
        for point in points:
            modes: tuple[str, ...] = selection.MODES if layer_of(point) is not None else ("free",)
            if state_order(point) is not None:  # what a layer alone leaves behind; what a prefill leaves is judged with decode
                modes = ("isolated",) if phase == "decode" or not audit.plan.steps else ()
            expected |= {key(phase, first, point, mode) for first in groups for mode in modes}
    before = {k for k in expected if k < here}
    return replace(divergence, checked=len(before & passed) + 1, unobserved=len(before - passed))


def with_repro(divergence: Divergence | None, records: Sequence[Record], audit: Audit, report_dir: Path, shown: str = "", command: str = "") -> Divergence | None:
    """The divergence with its repro file and the command that replays it, or why there is none."""
    if divergence is None or divergence.layer is None:
        return divergence
    failed = failed_verdict(divergence, records)
    try:
        if failed is None:
            raise NoReproError("the gate that failed is no point's")
        if failed.mode == selection.DEVICE_MODE:
            failed = replace(failed, mode="isolated")  # whose run it judges
        capture(audit, divergence, failed, report_dir / REPRO, command)
    except NoReproError as error:
        return replace(divergence, no_repro=str(error))
    except Exception as error:  # production is what failed: it may also fail here, and the verdict stands
        lines = str(error).strip().splitlines() or [""]
        return replace(divergence, no_repro=f"running the layer again stopped: {type(error).__name__}: {lines[0][:200]}")
    file = shown or str(report_dir / REPRO)
    return replace(divergence, repro=REPRO, replay=shlex.join(["python", "-m", "probes.replay", file]))


def strength(divergence: Divergence) -> str:
    """The claim in words; empty where nothing was counted."""
    if not divergence.checked and not divergence.unobserved:
        return ""
    return f"first of {divergence.checked} checked, {divergence.unobserved} unobserved before it"
