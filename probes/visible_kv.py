"""The exact set of keys each query saw, both models, as token ranges: window positions and compressed entries.

Every set is checked against the other model's and against the rule of its own position (pad, wrong ratio, wrong window edge,
future, unfinished, stale, hole, duplicate). `--step` chooses the decode step whose ranges are printed; `--against-prefill` also runs production once over
prompt and decode tokens together and compares the sets of the same positions.

    python -m probes.visible_kv --prompt short.txt:0:140 --layers 0-3 --steps 11 --step 10
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from probes.core.cli import Answer, Table, answer, ask_of, count, probe_parser
from probes.core.compare import compare_visible
from probes.core.drive import run_model
from probes.core.inputs import Prompt
from probes.core.measure import FAULTS, RATIOS, ranges_text, visible_measurement, visible_ranges
from probes.pair import Pair, load_production, run_pair
from reference.config import InputError

DESCRIPTION = "Which keys each query saw, in both models, as token ranges; checked against each other and against the rule."
EXAMPLE = "python -m probes.visible_kv --prompt medium.txt:0:250 --layers 0-3 --steps 11 --step 10"
WHO = ("production", "reference")


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("visible_kv", DESCRIPTION, EXAMPLE, steps=11)
    parser.add_argument("--step", metavar="N", type=count, help="decode step to print as ranges (default: the last one)")
    parser.add_argument("--against-prefill", action="store_true", help="compare decode with production's own one-shot prefill")
    return answer("visible_kv", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    step = ask.steps - 1 if args.step is None else args.step
    if args.step is not None and not 0 <= args.step < ask.steps:
        raise InputError(
            f"--step {args.step}: expected a decode step 0..{ask.steps - 1}" if ask.steps else "--step needs decode steps"
        )
    points = [_point(n) for n in ask.layers]
    pair = run_pair(ask, points, replay=False)
    found = [_layer(pair, n, phase) for phase in ask.phases for n in ask.layers]
    shown = [_ranges(pair, n, phase, step if phase == "decode" else None) for phase in ask.phases for n in ask.layers]
    tables = [_sets(found), _rules(found), _range_table(shown)]
    values: dict[str, Any] = {**pair.facts(), "layers_found": found, "ranges": shown}
    if args.against_prefill:
        same = _against_prefill(pair)
        values["against_prefill"] = same
        tables.append(_same_table(same))
    return Answer(tables, values)


def _point(layer: int) -> str:
    return f"layers.{layer}.attn.visible"


def _layer(pair: Pair, layer: int, phase: str) -> dict[str, Any]:
    """One layer in one phase: sets of both models against each other, and of each against the rule."""
    config, valid = pair.ask.config, pair.valid(phase)
    values = {who: pair.value(who, _point(layer), phase) for who in WHO}
    near, far = compare_visible(values["production"], values["reference"], config.sliding_window, valid)
    topk = config.index_topk if config.kind(layer) == "csa" else None
    lengths = torch.tensor([len(prompt.ids) for prompt in pair.ask.prompts]) if phase == "prefill" else None
    out: dict[str, Any] = {
        "layer": layer,
        "kind": config.kind(layer),
        "phase": phase,
        "window": asdict(near),
        "entries": asdict(far),
    }
    for who in WHO:
        out[who] = visible_measurement(
            values[who], pair.positions(phase), config.sliding_window, config.ratio(layer), valid, topk, lengths, RATIOS
        )
    return out


def _ranges(pair: Pair, layer: int, phase: str, step: int | None) -> dict[str, Any]:
    """What the last query of row 0 (prefill), or row 0's query of a step, saw in both models."""
    config = pair.ask.config
    query = len(pair.ask.prompts[0].ids) - 1 if step is None else step
    out: dict[str, Any] = {"layer": layer, "phase": phase, "step": step, "position": int(pair.positions(phase)[0, query])}
    for who in WHO:
        row: Tensor = pair.value(who, _point(layer), phase)[0, query]
        out[who] = visible_ranges(row, config.sliding_window, config.ratio(layer))
    return out


def _sets(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "production against reference: queries whose sets differ, keys only one side saw",
        ["layer", "kind", "phase", "window", "missing", "extra", "twice", "entries", "missing", "extra", "twice", "first"],
    )
    for one in found:
        cells: list[object] = []
        for part in ("window", "entries"):
            c = one[part]
            cells += [f"{c['different']} of {c['rows']}", c["missing"], c["extra"], c["duplicates"]]
        first = one["window"]["where"] or one["entries"]["where"]
        table.add(one["layer"], one["kind"], one["phase"], *cells, ",".join(map(str, first)) or "-")
    return table


def _rules(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "against the rule of the query's own position: queries with", ["layer", "phase", "model", "queries", "keys", *FAULTS]
    )
    for one in found:
        for who in WHO:
            m = one[who]
            table.add(one["layer"], one["phase"], who, m["queries"], m["keys"], *(m[fault]["queries"] for fault in FAULTS))
    return table


def _range_table(shown: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "keys as token ranges, batch row 0",
        ["layer", "phase", "step", "position", "model", "window", "compressed entries stand for"],
    )
    for one in shown:
        step = "-" if one["step"] is None else one["step"]
        for who in WHO:
            window, entries = ranges_text(one[who]["window"]), ranges_text(one[who]["entries"])
            table.add(one["layer"], one["phase"], step, one["position"], who, window, entries)
    return table


def _against_prefill(pair: Pair) -> list[dict[str, Any]]:
    """Production's decode steps against its own prefill of the same tokens. CSA choices may differ where scores are close."""
    ask = pair.ask
    if not pair.steps():
        raise InputError("--against-prefill needs decode steps")
    fed = torch.cat([pair.production.passes["decode", step].tokens for step in pair.steps()], 1)  # type: ignore[misc]
    prompts = tuple(Prompt(p.label, (*p.ids, *map(int, row)), ()) for p, row in zip(ask.prompts, fed, strict=True))
    model = load_production(replace(ask, prompts=prompts))
    once = run_model(model, prompts, [_point(n) for n in ask.layers], 0, ask.max_context).trace
    positions = pair.positions("decode")
    out = []
    for n in ask.layers:
        whole = once.get(_point(n), "prefill")
        at = positions[..., None].expand(-1, -1, whole.shape[-1])
        near, far = compare_visible(
            pair.value("production", _point(n), "decode"), whole.gather(1, at), ask.config.sliding_window
        )
        out.append({"layer": n, "window": asdict(near), "entries": asdict(far)})
    return out


def _same_table(same: Sequence[dict[str, Any]]) -> Table:
    table = Table("production's decode against its own one-shot prefill", ["layer", "window differs", "entries differ"])
    for one in same:
        table.add(one["layer"], *(f"{one[part]['different']} of {one[part]['rows']}" for part in ("window", "entries")))
    return table


if __name__ == "__main__":
    sys.exit(main())
