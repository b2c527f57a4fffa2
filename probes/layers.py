"""Every point of every layer, production against the reference: error, norm ratio, cosine, in prefill and in decode.

Both models run freely; the reference uses production's selected entries and experts (`--own-choices`: its own). Numbers
only: whether they are good enough is said by `pytest parity/`.

    python -m probes.layers --phase decode --layers 0-3 --steps 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from probes.core.cli import Answer, Table, answer, ask_of, number, probe_parser
from probes.core.compare import SetComparison, compare_point, compare_visible
from probes.pair import Pair, run_pair
from reference.points import LAYER_POINTS, layer_of, points_of_layer

DESCRIPTION = "Error, norm ratio and cosine of every point of every layer, production against the reference."
EXAMPLE = "python -m probes.layers --prompt short.txt:0:60 --phase both --layers 0-3 --steps 4"
MODEL_POINTS = ("embed", "hc_head", "norm", "logits")


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("layers", DESCRIPTION, EXAMPLE)
    parser.add_argument("--own-choices", action="store_true", help="let the reference select entries and experts itself")
    return answer("layers", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    points = ("embed", *(p for layer in ask.layers for p in points_of_layer(ask.config, layer)), *MODEL_POINTS[1:])
    pair = run_pair(ask, points, replay=not args.own_choices)
    found = [_compare(pair, point, phase) for phase in ask.phases for point in points]
    tables = [_grid(ask.layers, found, phase) for phase in ask.phases] + [_details(found)]
    return Answer(tables, {**pair.facts(), "own_choices": args.own_choices, "points": found})


def _compare(pair: Pair, point: str, phase: str) -> dict[str, Any]:
    """One point in one phase, as the JSON line carries it. In decode the second coordinate is the step."""
    got, want = pair.value("production", point, phase), pair.value("reference", point, phase)
    out: dict[str, Any] = {"point": point, "phase": phase, "layer": layer_of(point)}
    if point.endswith("attn.visible"):
        near, far = compare_visible(got, want, pair.ask.config.sliding_window, pair.valid(phase))
        return out | {
            "kind": "sets",
            "window": asdict(near),
            "entries": asdict(far),
            "different": near.different + far.different,
        }
    compared = compare_point(point, got, want, pair.valid(phase))
    if isinstance(compared, SetComparison):
        return out | {"kind": "sets", **asdict(compared)}
    return out | {"kind": "values", **asdict(compared)}


def _name(point: str) -> str:
    return point.split(".", 2)[2] if point.startswith("layers.") else point


def _cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    if one["kind"] == "values":
        return number(one["error"]) if one["rows"] or one["problem"] else "none"
    return "=" if not one["different"] else f"{one['different']} differ"


def _grid(layers: Sequence[int], found: Sequence[dict[str, Any]], phase: str) -> Table:
    """Points down, layers across, worst row's relative L2 in the cells."""
    columns: list[int | None] = [*layers, None]
    table = Table(f"{phase}: worst row, |production - reference| / |reference|", ["point", *(f"L{n}" for n in layers), "model"])
    cells = {(one["layer"], _name(one["point"])): one for one in found if one["phase"] == phase}
    names = {name for _, name in cells}
    for name in (n for n in ("embed", *(spec.name for spec in LAYER_POINTS), *MODEL_POINTS[1:]) if n in names):
        table.add(name, *(_cell(cells.get((column, name))) for column in columns))
    return table


def _details(found: Sequence[dict[str, Any]], most: int = 12) -> Table:
    """The worst points with everything that was measured about them."""
    table = Table(
        "the largest errors; at = batch row, query or step, ...",
        ["point", "phase", "worst row", "at", "all rows", "norm ratio", "cosine", "element", "production", "reference", "rows"],
    )
    values = [one for one in found if one["kind"] == "values" and (one["rows"] or one["problem"])]
    for one in sorted(values, key=lambda v: -v["error"])[:most]:
        where, element = (",".join(map(str, one[key])) for key in ("where", "element"))
        table.add(
            one["point"], one["phase"], one["error"], where, one["rel_l2"], one["norm_ratio"], one["cosine"],
            element, one["got"], one["want"], one["rows"],
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
