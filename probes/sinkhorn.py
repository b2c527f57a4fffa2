"""The mixing matrix comb at run time: sums, spectral norm, distance to the reference, convergence; ranges of pre and post.

comb's columns were normalised last and sum to 1; its rows do so only as far as the Sinkhorn iterations converged. The
iterations that would reach 1e-6 are counted by going on from the observed matrix (fp64, without eps). The same normalisation
is also followed from its start, from each model's own X by the reference's formulas: the residual after every iteration, and
the step that the observed matrices are nearest to.

    python -m probes.sinkhorn --prompt short.txt:0:60 --layers 0-1 --steps 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from probes.core.cli import Answer, Table, answer, ask_of, count, number, probe_parser
from probes.core.measure import (
    CONVERGED,
    matrix_distance,
    nearest_step,
    sinkhorn_measurement,
    sinkhorn_residuals,
    sinkhorn_trail,
)
from probes.pair import Pair, run_pair
from reference import ops
from reference.checkpoint import Checkpoint

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
    points = [f"{site}.{part}" for site in sites for part in ("pre", "post", "comb")] + [_before(site) for site in sites]
    pair = run_pair(ask, list(dict.fromkeys(points)))
    found = [_site(pair, site, phase, args.most, args.history) for phase in ask.phases for site in sites]
    weights = Checkpoint(ask.checkpoint, ask.layers_run)
    for one in found:
        one |= _trail(pair, weights, one["site"], one["phase"])
    notes = [
        f"iterations in the model: {ask.config.hc_sinkhorn_iters}; to {CONVERGED:g} = further ones that would bring rows and columns "
        "there; transposed below distance would mean exchanged axes",
    ]
    return Answer(
        [_sums(found), _ranges(found), _trails(found)], {**pair.facts(), "iterations": ask.config.hc_sinkhorn_iters, "sites": found}, notes
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


def _before(site: str) -> str:
    """The point that shows the streams a site starts from."""
    layer, half = int(site.split(".")[1]), site.split(".")[2]
    if half == "hc_ffn":
        return f"layers.{layer}.hc_attn.X"
    return f"layers.{layer - 1}.hc_ffn.X" if layer else "embed"


def _trail(pair: Pair, weights: Checkpoint, site: str, phase: str) -> dict[str, Any]:
    """Residual after every iteration of each model's own X, and the step its comb is nearest to."""
    c, valid = pair.ask.config, pair.valid(phase)
    fn, base, scale = (weights.raw(f"{site}_{part}") for part in ("fn", "base", "scale"))
    n, out = c.hc_mult, {}
    for who in ("production", "reference"):
        X = pair.value(who, _before(site), phase)
        X = X[:, :, None].expand(-1, -1, n, -1) if X.dim() == 3 else X
        comb = pair.value(who, f"{site}.comb", phase)
        X, comb = (x.flatten(0, 1) if valid is None else x[valid] for x in (X, comb))
        m = ops.hc_mix(X.float(), fn, c.rms_norm_eps)
        start = ops.PLAIN.softmax((m[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), -1) + c.hc_eps
        trail = sinkhorn_trail(start, c.hc_sinkhorn_iters, c.hc_eps)
        step, distance = nearest_step(comb, trail, f"{c.hc_sinkhorn_iters} columns")
        out[f"{who}_trail"] = {"residuals": sinkhorn_residuals(trail), "nearest": step, "distance": distance}
    return out


def _trails(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "largest deviation of a sum from 1 after iterations of the model's own X (reference), and the step each comb is nearest to",
        ["site", "phase", "after 1", "2", "4", "8", "half", "last", "production nearest", "distance", "ref nearest", "distance"],
    )
    for one in found:
        residuals = one["reference_trail"]["residuals"]
        at = [min(n, len(residuals)) - 1 for n in (1, 2, 4, 8, max(1, len(residuals) // 2), len(residuals))]
        cells: list[object] = []
        for who in ("production", "reference"):
            cells += [one[f"{who}_trail"]["nearest"], one[f"{who}_trail"]["distance"]]
        table.add(one["site"], one["phase"], *(residuals[i] for i in at), *cells)
    return table


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
