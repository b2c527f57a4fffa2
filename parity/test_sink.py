"""The sink is a logit in the denominator, once, whatever splits the keys are cut into: the operation alone (in the model: test_visible.py).

Red with B083 (sinks read as bf16) and B086 (counted once per split).
"""

from __future__ import annotations

import math

import pytest
import torch

from parity import gates
from parity.gates import OPERATIONS
from parity.session import run_of
from probes.core.attention import combine_segments, merge_distances
from probes.core.records import Measurement, State, Verdict
from probes.sink import EXTREMES, SPLITS, SinkWorld


def test_global_and_per_segment_merge(device, record, pytestconfig):
    """Decode's split attention is the merge that counts the sink once; a sink per segment is far from it."""
    world = SinkWorld()
    out = {splits: world.run(device, splits) for splits in SPLITS}
    row = OPERATIONS["sparse_attn"]
    base = Verdict("sink.merge", "sparse_attn[1, 2 and 7 key splits]", "operation", State.NOT_RUN, "worst row rel-L2 to one softmax over all keys", component="sink", local=True, why=row.gate.why)
    off, rows = 0.0, 0
    for splits in SPLITS:
        distance = merge_distances(out[splits], world.q, world.keys, world.sink, splits)
        kernels = sorted({kernel for source, kernel, *_ in device.ran if source == "sparse_attn"})
        run_of(pytestconfig).record(Measurement("sink merge", values={"splits": splits, **distance, "kernels": ", ".join(kernels)}))
        off, rows = max(off, distance["production_to_global"]), rows + out[splits].shape[0] * out[splits].shape[1]
        if splits > 1 and not distance["production_to_global"] < distance["production_to_sink_per_segment"] / 4:
            off = math.inf
    judged = gates.judge(off, 0.0, row.gate.isolated, 1.0, rows, "split attention to one softmax over all keys")
    record(Verdict(**{**vars(base), "state": judged.state, "reason": judged.reason, "value": off, "limit": judged.limit, "spent": judged.spent, "floor": 0.0, "k": 1.0, "eps": row.gate.isolated, "rows": rows}))


@pytest.mark.parametrize(("splits", "variant"), [*((n, v) for n in SPLITS for v in ("tile", "mma")), (1, "naive")])
def test_extreme_sinks_stay_finite(splits, variant, device, record):
    """+-1e4 and +-inf: nothing but numbers comes out, zero where the sink takes everything, no change where it takes nothing."""
    world = SinkWorld(sinks=EXTREMES)
    got = world.run(device, splits, variant)
    plain = combine_segments(world.q, world.keys, torch.full_like(world.sink, -math.inf), 1)
    all_taken = [h for h, sink in enumerate(EXTREMES) if sink > 0]
    wrong = int((~got.isfinite()).sum()) + int((got[:, all_taken] != 0).sum())
    none_taken = [h for h, sink in enumerate(EXTREMES) if sink < 0]
    error = (got - plain).norm(dim=-1)[:, none_taken] / plain.norm(dim=-1)[:, none_taken]
    limit = OPERATIONS["sparse_attn"].gate.isolated
    wrong += int((~(error <= limit)).sum())
    judged = gates.judge_exact(wrong, got.numel(), "elements or rows are not what a sink without measure leaves")
    record(
        Verdict(
            "sink.extreme", f"sparse_attn[sinks of 1e4 and inf, {variant}, {splits} splits]", "operation", judged.state, "wrong elements", value=float(wrong), limit=0.0,
            spent=judged.spent, rows=got.shape[0] * got.shape[1], reason=judged.reason, component="sink", local=True, why="limits of exp: 0, 1 and nothing between",
        )
    )
