"""A decode step launched kernel by kernel beside the same step replayed from a captured graph: bits, time, launches.

    python -m bench.graph --device cuda --out DIR        # on the CPU it only checks

Per plan and batch: 3 steps of both on equal states, at lengths other than the captured one, every tap compared bit for bit; then
the whole call (`model.decode` with its checks, logits into a given tensor) and the bare replay, and what 20 steps allocate.
Writes DIR/graph.json; exit code 1 when bits differ, a tap is missing or a step allocates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import production
from probes.core.drive import decoding
from probes.core.recorder import Recorder
from production.engine import count_allocations
from production.launch import KernelError

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = {1: [255], 3: [3, 126, 255], 8: [0, 3, 7, 60, 126, 127, 200, 255]}
CONTEXT, SEED = 1024, 0


def milliseconds(run: Callable[[], object], synchronise: Callable[[], None], times: int) -> float:
    """Median of a call's wall time, the device's work included."""
    taken = []
    for _ in range(times):
        synchronise()
        began = time.perf_counter()
        run()
        synchronise()
        taken.append(1e3 * (time.perf_counter() - began))
    return sorted(taken)[len(taken) // 2]


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def measure(model: Any, batch: int, timed: bool) -> dict[str, Any]:
    """One batch: what differs, and what a step costs."""
    lengths, points = LENGTHS[batch], model.taps.points
    text = torch.randint(0, model.config.vocab_size, (batch, CONTEXT), generator=torch.Generator().manual_seed(SEED))
    states = {how: model.new_state(batch, CONTEXT) for how in ("eager", "replay")}
    for state in states.values():
        model.prefill(text[:, : max(lengths)], state, lengths)
    different: list[str] = []
    for step in range(3):
        shown = {}
        for how, state in states.items():
            with decoding(model, how), Recorder(model, points) as trace:
                trace.begin("decode", step)
                model.decode(text[:, 300 + step].clone(), state)
            shown[how] = trace
        for point in points:
            got, want = shown["replay"], shown["eager"]
            if not got.fired(point, "decode", step) or not same(got.get(point, "decode", step), want.get(point, "decode", step)):
                different.append(f"{point} step {step}")
    (audited,) = states["replay"].graphs.values()
    out = torch.empty(batch, model.config.vocab_size, device=model.device.torch_device)
    tokens, result = text[:, 0].clone(), {"batch": batch, "different": different, "graph": audited.facts()}
    bare = model.capture(states["replay"])
    result["launches"] = bare.graph.launches
    for how, state in states.items():
        with decoding(model, how):
            model.decode(tokens, state, out=out)
            with count_allocations():
                model.decode(tokens, state, out=out)
            with count_allocations() as counted:
                for _ in range(20):
                    model.decode(tokens, state, out=out)
            result[f"{how}_allocations"] = max(counted.count, counted.device_count)
            if timed:
                result[f"{how}_ms"] = milliseconds(partial(model.decode, tokens, state, out=out), model.device.synchronize, 100)
    if timed:
        result["graph_ms"] = milliseconds(bare.graph.replay, model.device.synchronize, 100)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.graph", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, help="the first N layers (default: all; on the CPU 4)")
    parser.add_argument("--variants", action="append", help="a plan; may repeat (default: portable and fast)")
    args = parser.parse_args()
    timed, results = args.device == "cuda", []
    count = args.layers or (None if timed else 4)
    for plan in args.variants or ["portable", "fast"]:
        model = production.load(ROOT / "checkpoints" / "tiny-dsv4", device=args.device, max_context=CONTEXT, layers=count and range(count), variants=plan)
        if timed:
            with suppress(KernelError):  # side by side; a kernel that is needed and does not build raises where it is launched
                model.device.prebuild()
        for batch in LENGTHS:
            one = {"plan": plan, **measure(model, batch, timed)}
            results.append(one)
            times = ", ".join(f"{name} {one[f'{name}_ms']:.3f} ms" for name in ("eager", "replay", "graph") if f"{name}_ms" in one)
            bits = f"{len(one['different'])} of {3 * len(model.taps.points)} differ, first {one['different'][0]}" if one["different"] else "equal bits"
            print(f"{plan:9} batch {batch}: {bits}; {one['launches']} launches; allocations {one['eager_allocations']} eager, {one['replay_allocations']} replayed; {times}", flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "graph.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(one["different"] or one["replay_allocations"] for one in results))


if __name__ == "__main__":
    sys.exit(main())
