"""The mixing matrix comb at run time: sums, spectral norm, distance to the reference, convergence; ranges of pre and post.

comb's columns were normalised last and sum to 1; its rows do so only as far as the Sinkhorn iterations converged. The
iterations that would reach 1e-6 are counted by going on from the observed matrix (fp64, without eps).

    python -m probes.sinkhorn --prompt short.txt:0:60 --layers 0-1 --steps 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from probes.core.cli import Answer, Table, answer, ask_of, count, number, probe_parser
from probes.core.measure import CONVERGED, matrix_distance, sinkhorn_measurement
from probes.pair import Pair, run_pair

DESCRIPTION = "Column and row sums, spectral norm and convergence of comb, ranges of pre and post, in both models."
EXAMPLE = "python -m probes.sinkhorn --prompt short.txt:0:60 --layers 0-3 --steps 4 --history 20"
HALVES = ("attn", "ffn")


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("sinkhorn", DESCRIPTION, EXAMPLE)
    parser.add_argument(
        "--most", metavar="N", type=count, default=2000, help="give up counting iterations after N (default: 2000)"
    )
    parser.add_argument(
        "--history", metavar="N", type=count, default=0, help="also list the residual after each of N further iterations"
    )
    return answer("sinkhorn", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    sites = [f"layers.{n}.hc_{half}" for n in ask.layers for half in HALVES]
    pair = run_pair(ask, [f"{site}.{part}" for site in sites for part in ("pre", "post", "comb")])
    found = [_site(pair, site, phase, args.most, args.history) for phase in ask.phases for site in sites]
    notes = [
        f"iterations in the model: {ask.config.hc_sinkhorn_iters}; to {CONVERGED:g} = further ones that would bring rows and columns "
        "there; transposed below distance would mean exchanged axes",
    ]
    return Answer(
        [_sums(found), _ranges(found)], {**pair.facts(), "iterations": ask.config.hc_sinkhorn_iters, "sites": found}, notes
    )


def _site(pair: Pair, site: str, phase: str, most: int, history: int) -> dict[str, Any]:
    valid = pair.valid(phase)
    out: dict[str, Any] = {"site": site, "phase": phase}
    values = {}
    for who in ("production", "reference"):
        pre, post, comb = (pair.value(who, f"{site}.{part}", phase) for part in ("pre", "post", "comb"))
        values[who] = comb
        out[who] = sinkhorn_measurement(comb, pre, post, valid, most if who == "reference" else 0, history)
    return out | {"matrix": matrix_distance(values["production"], values["reference"], valid)}


def _sums(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "comb: largest deviation of a sum from 1 (production | reference), spectral norm, distance of the matrices",
        ["site", "phase", "columns", "ref", "rows", "ref", "spectral", "ref", "distance", "relative", "transposed", "to 1e-6"],
    )
    for one in found:
        p, r, m = one["production"], one["reference"], one["matrix"]
        more = r.get("more_iterations")
        table.add(
            one["site"], one["phase"], p["column_deviation"], r["column_deviation"], p["row_deviation"], r["row_deviation"],
            p["spectral_norm"], r["spectral_norm"], m["distance"], m["relative"], m["transposed"],
            f"+{more}" if more is not None else f"not ({number(r.get('residual_after'))})",
        )  # fmt: skip
    return table


def _ranges(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "ranges (production | reference): pre in (0, 1 + eps), post in (0, 2), comb >= 0",
        ["site", "phase", "pre", "ref", "post", "ref", "comb", "ref", "asymmetry"],
    )
    for one in found:
        cells = []
        for part in ("pre", "post", "comb"):
            cells += [
                f"{number(one[who][f'{part}_min'])} .. {number(one[who][f'{part}_max'])}" for who in ("production", "reference")
            ]
        table.add(one["site"], one["phase"], *cells, one["reference"]["asymmetry"])
    return table


if __name__ == "__main__":
    sys.exit(main())
