"""Run one model over prompts and save what its taps showed as a trace directory, for `python -m probes.diff`.

    python -m probes.record --model reference --policy published --points 'layers.*.attn.visible' logits --out trace-reference

A trace is safetensors and a manifest; tapping does not change a run. The directory must not exist yet.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probes.core.cli import Answer, Ask, Table, answer, ask_of, probe_parser, say
from probes.core.drive import run_model
from probes.core.trace import Trace
from probes.pair import load_production, load_reference
from reference.checkpoint import Checkpoint
from reference.config import InputError
from reference.points import layer_of, points_of_model, spec_of

DESCRIPTION = "Run one model and save a trace of its points."
EXAMPLE = "python -m probes.record --model production --prompt short.txt:0:60 --layers 0-1 --steps 2 --out trace-production"


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("record", DESCRIPTION, EXAMPLE)
    parser.add_argument("--model", choices=("reference", "production"), required=True, help="which model to run")
    parser.add_argument(
        "--policy",
        metavar="NAMES",
        help="of the reference: exact, storage, published, or rounding points with commas (default: exact)",
    )
    parser.add_argument(
        "--points", metavar="NAME", nargs="+", default=["*"], help="full names or patterns (default: every point of the layers)"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="new directory for the trace")
    return answer("record", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    out = Path(args.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: exists and is not empty; give a new directory for the trace")
    points = choose_points(ask, args.points)
    if args.model == "production":
        if args.policy is not None:
            raise InputError("--policy: production declares its own; the option is for --model reference")
        model = load_production(ask)
    else:
        given = args.policy or "exact"
        model = load_reference(ask, given.split(",") if "," in given or "." in given else given)
    ran = run_model(
        model,
        ask.prompts,
        points,
        ask.steps,
        ask.max_context,
        phases=ask.phases,
        description=_description(args.model, model, ask),
    )
    path = ran.trace.save(out)
    say(f"saved {path}")
    values = {
        **ask.facts(),
        "model": args.model,
        "policy": sorted(model.policy),
        "trace": str(path),
        "decode_tokens": ran.tokens.tolist(),
    }
    values["fired"] = {phase: sum(p == phase for p, _, _ in ran.trace.keys()) for phase in ask.phases}  # noqa: SIM118
    return Answer([_table(ran.trace)], values)


def choose_points(ask: Ask, patterns: Sequence[str]) -> tuple[str, ...]:
    """Full names of the asked layers (and the model's own) that match. Raises InputError for a pattern without a match."""
    every = points_of_model(ask.config, ask.layers)
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(every, pattern)
        if not found:
            spec_of(pattern)  # unknown names get their nearest match
            raise InputError(f"--points {pattern}: no such point among the layers {', '.join(map(str, ask.layers))}")
        chosen.update(found)
    return tuple(point for point in every if point in chosen)


def _description(who: str, model: Any, ask: Ask) -> dict[str, Any]:
    c = ask.config
    return {
        "model": who,
        "describe": str(model.describe()),
        "policy": sorted(model.policy),
        "layers": list(model.layers),
        "checkpoint": ask.checkpoint,
        "checkpoint_hash": Checkpoint(ask.checkpoint, ask.layers_run).hash(),
        "device": ask.device if who == "production" else "cpu",
        "prompts": [prompt.label for prompt in ask.prompts],
        "sliding_window": c.sliding_window,
        "compress_ratios": list(c.compress_ratios),
        "index_topk": c.index_topk,
    }


def _table(trace: Trace) -> Table:
    table = Table("recorded", ["phase", "step", "layers", "points", "MB"])
    for one in trace.passes.values():
        layers = sorted({layer for point in one.chunks if (layer := layer_of(point)) is not None})
        size = sum(part.nbytes for parts in one.chunks.values() for part in parts) / 1e6
        table.add(one.phase, "-" if one.step is None else one.step, len(layers), len(one.chunks), size)
    return table


if __name__ == "__main__":
    sys.exit(main())
