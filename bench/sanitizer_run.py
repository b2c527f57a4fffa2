"""What bench/sanitizer.py runs under a tool: this project's kernels, and nothing that compares.

    python -m bench.sanitizer_run model --variants fast        # prefill of 17 tokens, over 128, three decode steps
    python -m bench.sanitizer_run operations                   # every operation and variant at Flash's sizes, 3 tokens
    python -m bench.sanitizer_run planted --kernel write_past_tensor

Naive variants run in `model` only where a plan names them. --device cpu runs the same on the CPU device's checked build.
The last line is "ran {...}": launches by kernel, without which nothing counts as clean.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import production
from production.launch import Device, KernelError, open_device

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "checkpoints" / "tiny-dsv4"
PLANTED = ROOT / "parity" / "unit" / "cpu_device" / "kernels"
LAYERS = 4  # ratios 0, 0, 4, 128


def model(args: argparse.Namespace) -> list[Device]:
    """Two unequal rows: 17 and 5 tokens, then 120 more, so that one crosses 128; in three steps each ends a group."""
    made = production.load(
        CHECKPOINT, device=args.device, layers=range(LAYERS), max_context=256, prefill_chunk=128, variants=args.variants, checked=args.device == "cpu"
    )
    state = made.new_state(2)
    ids = torch.randint(made.config.vocab_size, (2, 160), generator=torch.Generator().manual_seed(1))
    made.prefill(ids[:, :17], state, [17, 5])
    logits = made.prefill(ids[:, 17:137], state, [120, 120])
    for step in range(3):
        logits = made.decode(ids[:, 137 + step], state)
        assert logits.isfinite().all(), f"step {step}: logits are not finite"
    made.device.synchronize()
    return [made.device]


def cases(test: Any) -> Iterator[dict[str, Any]]:
    """Arguments of a test: what it is parametrised over, 3 tokens, and each variant but the naive one."""
    from parity import test_operations_published as published

    marks = [mark.args for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    axes = [[{name: value} for value in (values[-1:] if name == "few" else values)] for name, values in marks]
    names = inspect.signature(test).parameters
    if "T" in names:
        axes.append([{"T": 3}])
    if "variant" in names:
        axes.append([{"variant": v} for v in published.VARIANTS[test.operation] if v != "naive"])
    for parts in itertools.product(*axes):
        yield {k: v for part in parts for k, v in part.items()}


def operations(args: argparse.Namespace) -> list[Device]:
    """The published sizes' own tests with nothing to compare with: hostile inputs, real widths, fewer experts and words."""
    from parity import test_operations_published as published
    from probes.core.inputs import Hostile

    device = open_device(args.device, checked=args.device == "cpu")
    world = published.World("flash", device, n_routed_experts=32, vocab_size=2048)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    for name, test in inspect.getmembers(published, inspect.isfunction):
        if not name.startswith("test_") or (args.only and not any(text in name for text in args.only)) or any(text in name for text in args.but):
            continue
        for case in cases(test):
            hostile = Hostile(device=device.torch_device)
            given = {"world": world, "device": device, "hostile": hostile, "judge": nothing, "compare": nothing, "equal": nothing} | case
            print(name, {k: v for k, v in case.items() if k != "T"}, flush=True)
            try:
                test(**{k: v for k, v in given.items() if k in inspect.signature(test).parameters})
            except KernelError as error:
                if args.device == "cuda" or "sm_" not in str(error):
                    raise
            device.synchronize()
            hostile.check_guards()
    return [device]


def planted(args: argparse.Namespace) -> list[Device]:
    """One mistake on purpose."""
    device = open_device(args.device, checked=args.device == "cpu", kernels_dir=PLANTED)
    y = torch.zeros(64, device=device.torch_device)
    extra: dict[str, tuple[Any, ...]] = {"write_past_tensor": (y, 64), "read_before_tensor": (torch.zeros(64, device=device.torch_device), y)}
    handoff = args.kernel.startswith("handoff")
    device.launch("planted_handoffs" if handoff else "planted_bugs", args.kernel, (1,), (64,), extra.get(args.kernel, (y,)), 1024 if handoff else 256 if "dynamic" in args.kernel else 0)
    device.synchronize()
    return [device]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sanitizer_run")
    parser.add_argument("what", choices=("model", "operations", "planted"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--variants", choices=("portable", "fast"), default="portable")
    parser.add_argument("--kernel", default="correct", help="of planted_bugs.cu or planted_handoffs.cu")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="operations: tests whose name holds this text")
    parser.add_argument("--but", action="append", default=[], metavar="TEXT", help="operations: no tests whose name holds this text")
    args = parser.parse_args()
    with torch.inference_mode():
        devices = {"model": model, "operations": operations, "planted": planted}[args.what](args)
    launches = {f"{source}.{kernel}": n for device in devices for source, kernel, _, _, n in device.ran}
    print("ran " + json.dumps(launches), flush=True)
    sys.exit(0 if launches else 1)


if __name__ == "__main__":
    main()
