"""Production alone: one shot, in chunks, token by token, in batches, again, with and without taps. No reference decides here.

Ways with the same kernels are compared bit by bit. Decode sums in another order than prefill: its worst rows stand beside the
noise floor, the worst row of reference twins with reordered sums on the same text and the same choices.

    python -m probes.determinism --layers 0-3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from probes.core.cli import Answer, Ask, Table, answer, ask_of, count, number, positive, probe_parser
from probes.core.compare import compare_scores, compare_values, differing
from probes.core.queries import Log, Rows, observer_costs
from probes.core.selfparity import REPLAYED, SPLITS, STEPS, TEXT, WAYS, SelfParity, Way, table_of, text_of
from probes.pair import load_production, load_reference
from reference.config import InputError
from reference.points import INDICES, SCORES, spec_of

DESCRIPTION = "Is production equal to itself, however the same text is run? Bits where kernels are the same, else beside the noise floor."
EXAMPLE = "python -m probes.determinism --layers 0-3 --each-split"
SHOWN = ("attn.kv", "attn.compressor", "attn.indexer.compressor", "attn.core", "attn.out", "ffn.out", "hc_ffn.X")
SETS = ("attn.visible", "attn.selected", "ffn.experts")


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("determinism", DESCRIPTION, EXAMPLE, steps=STEPS)
    parser.add_argument("--tokens", metavar="N", type=positive, default=TEXT, help=f"tokens of the text, a short one goes round (default: {TEXT})")
    parser.add_argument("--each-split", action="store_true", help="also cut the text in two at each split, one run each")
    parser.add_argument("--twins", metavar="N", type=count, default=2, help="reference twins for the noise floor, 0 for none (default: 2)")
    return answer("determinism", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    if not 2 <= args.tokens <= ask.max_context:
        raise InputError(f"--tokens {args.tokens}: expected 2 to --max-context = {ask.max_context}")
    model = load_production(ask)
    text = text_of([[*prompt.ids, *prompt.continuation] for prompt in ask.prompts], args.tokens)
    runs = SelfParity(model, text, min(ask.max_context, max(1024, args.tokens)), max(1, ask.steps))
    ways = [runs.way(phase, name) for phase in ask.phases for name in WAYS[phase]]
    if "decode" in ask.phases:
        ways += [runs.replayed(batch) for batch in REPLAYED]
    if args.each_split and "prefill" in ask.phases:
        ways += [runs.split(at) for at in SPLITS if at < args.tokens]
    tables, values = [_equal(ways)], {**ask.facts(), "text": args.tokens, "ways": [dict(line) for line in table_of(ways)]}
    if "decode" in ask.phases:
        floors = _floors(ask, runs, args.twins)
        near = [line for layer in ask.layers for line in _near(runs, layer, floors)] + _chain(runs, "logits", None, floors)
        stored = [line for layer in ask.layers for line in _stored(runs, layer)]
        tables += [_near_table(near), _stored_table(stored)]
        values |= {"decode": near, "stored": stored}
    costs = observer_costs(runs.whole_log)
    tables.append(_cost_table(costs))
    values["observer"] = {"points": costs, "seconds": {f"{way.phase} {name}": s for way in ways for name, s in way.seconds.items()}}
    seconds = [f"{way.phase}: {way.seconds['with taps']:.3g} s with every tap, {way.seconds['without taps']:.3g} s without" for way in ways if way.seconds]
    left = [f"{line['phase']} {line['way']}: did not fit: {line['skipped']}" for line in table_of(ways) if line["skipped"]]
    graphs = [
        f"{way.name}: {way.graph['launches']} launches captured at {way.graph['captured_at']} tokens, replayed at {way.graph['replayed_at'][0]} to {way.graph['replayed_at'][1]}"
        for way in ways
        if way.graph.get("replayed_at")
    ]
    return Answer(tables, values, [*seconds, *left, *graphs])


def _equal(ways: Sequence[Way]) -> Table:
    table = Table("the same bits, however the text is run", ["way", "phase", "comparison", "queries", "points", "stored rows", "bits", "first difference", "position", "worst row"])
    for line in table_of(ways):
        bits = "equal" if line["bit_equal"] else "differ"
        table.add(line["way"], line["phase"], line["comparison"], line["queries"], line["points"], line["state_rows"], bits, line["first_difference"] or "-", "-" if line["position"] is None else line["position"], line["worst_row"])
    return table


# ---- decode beside prefill ----


def _worst(got: Rows, want: Rows, point: str, whole_token: bool) -> float | None:
    """Worst row's relative L2 of a point; None where it is not shown or has no row."""
    if point not in got.values or point not in want.values:
        return None
    spec, g, w = spec_of(point), got.values[point], want.values[point]
    dims = w.dim() - 2 if whole_token and spec.kind != SCORES else spec.row_dims
    compared = compare_scores(g, w) if spec.kind == SCORES else compare_values(g, w, dims, sparse=spec.sparse)
    return compared.error if compared.rows else None


def _different_sets(got: Rows, want: Rows, point: str, window: int) -> int:
    """Queries whose sets differ; window positions and entries are sets of their own."""
    parts = (slice(0, window), slice(window, None)) if point.endswith("visible") else (slice(None),)
    masks = [differing(got.values[point][..., part], want.values[point][..., part]) for part in parts]
    return int(torch.stack(masks).any(0).sum())


def _floors(ask: Ask, runs: SelfParity, twins: int) -> dict[tuple[str, str], float]:
    """(chain, point) -> worst row of twins against the reference over the whole text, on production's choices."""
    if twins == 0:
        return {}
    model = load_reference(ask, runs.model.policy)
    want = _reference_rows(model, runs)
    floors: dict[tuple[str, str], float] = {}
    for order in range(1, twins + 1):
        for (chain, _), rows in (got := _reference_rows(model.twin(order), runs)).items():
            for point in rows.values:
                if spec_of(point).kind != INDICES:
                    worst = _worst(rows, want[chain, _], point, chain == "free")
                    floors[chain, point] = max(floors.get((chain, point), 0.0), worst or 0.0)
        del got
    return floors


def _reference_rows(model: Any, runs: SelfParity) -> dict[tuple[str, int], Rows]:
    """The whole text through a reference: its own chain (layer -1), and each layer on production's streams."""
    T = runs.T
    position, valid, tokens = torch.arange(T)[None], torch.ones(1, T, dtype=torch.bool), runs.text[None]
    choices = {point: value for point, value in runs.whole.values.items() if point.endswith(SETS[1:])}
    log, found = Log(runs.points), {}
    with log.call(model, position, valid):
        model.prefill(tokens, model.new_state(1, runs.max_context), None, choices=choices)
    found["free", -1] = log.rows()
    for layer in runs.layers:
        log, before = Log([point for point in runs.points if point.startswith(f"layers.{layer}.")]), f"layers.{layer - 1}.hc_ffn.X"
        X = runs.whole.values[before] if layer else runs.whole.values["embed"][:, :, None].repeat(1, 1, runs.config.hc_mult, 1)
        with log.call(model, position, valid):
            model.run_layer(layer, X, tokens, model.new_state(1, runs.max_context), None, choices=choices)
        found["isolated", layer] = log.rows()
    return found


def _near(runs: SelfParity, layer: int, floors: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    lines = []
    got, want = runs.decoded_alone(layer)
    for name in SETS:
        point = f"layers.{layer}.{name}"
        if point in got.values:
            lines.append({"layer": layer, "point": name, "chain": "isolated", "queries": len(got.position), "different_sets": _different_sets(got, want, point, runs.config.sliding_window)})
    for name in SHOWN:
        worst = _worst(got, want, f"layers.{layer}.{name}", False)
        if worst is not None:
            lines.append({"layer": layer, "point": name, "chain": "isolated", "queries": len(got.position), "worst_row": worst, "floor": floors.get(("isolated", f"layers.{layer}.{name}"))})
    return lines + _chain(runs, "hc_ffn.X", layer, floors)


def _chain(runs: SelfParity, name: str, layer: int | None, floors: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    point = name if layer is None else f"layers.{layer}.{name}"
    got, want = runs.decoded()
    return [{"layer": layer, "point": name, "chain": "free", "queries": len(got.position), "worst_row": _worst(got, want, point, True), "floor": floors.get(("free", point))}]


def _near_table(lines: Sequence[dict[str, Any]]) -> Table:
    table = Table("token by token against one shot, prefill's choices replayed (isolated: this layer alone on prefill's streams)", ["point", "layer", "chain", "queries", "sets that differ", "worst row", "floor"])
    for line in lines:
        table.add(line["point"], "-" if line["layer"] is None else line["layer"], line["chain"], line["queries"], line.get("different_sets", "-"), number(line.get("worst_row")), number(line.get("floor")))
    return table


def _stored(runs: SelfParity, layer: int) -> list[dict[str, Any]]:
    lines = []
    for part in runs.stored(layer, alone=True):
        compared = compare_values(part.got, part.want, 1)
        worst = compared.error if compared.rows else None
        lines.append({"layer": layer, "part": part.part, "untouched": part.old, "changed": part.changed, "written": part.got.shape[1], "worst_row": worst})
    return lines


def _stored_table(lines: Sequence[dict[str, Any]]) -> Table:
    table = Table("state after prefill and steps against state after a prefill", ["part", "layer", "rows no step wrote", "of them changed", "rows written", "worst of them"])
    for line in lines:
        table.add(line["part"], line["layer"], line["untouched"], line["changed"], line["written"], number(line["worst_row"]))
    return table


def _cost_table(costs: Sequence[dict[str, Any]]) -> Table:
    table = Table("what recording the whole text copied", ["point", "taps", "bytes", "seconds of copies"])
    for line in costs:
        table.add(line["point"], line["taps"], line["bytes"], line["seconds"])
    return table


if __name__ == "__main__":
    sys.exit(main())
