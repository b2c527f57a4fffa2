"""Compare two saved traces offline, on any machine: no model, no checkpoint, no GPU.

Names and passes are compared both ways first; what only one side has is listed, never skipped silently. Traces of any engine
(probes/capture.py), of several ranks and in parts are read too; names that are no points are compared as plain values, so that
any model can be held against itself.

    python -m probes.diff trace-production trace-reference
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from probes.core.cli import Answer, CannotMeasureError, Table, answer, bare_parser, count
from probes.core.compare import Comparison, compare_keys, compare_point, compare_values, compare_visible
from probes.core.trace import Trace
from probes.core.trace_files import is_point
from probes.outside.trace import open_trace
from reference.config import InputError

DESCRIPTION = "Compare two traces of probes.record or probes/capture.py: got against want."
EXAMPLE = "python -m probes.diff trace-production trace-reference"

FIRST = 1e-4  # a worst row above it is named as the first; it is no limit: those are made by pytest parity/


def main(argv: Sequence[str] | None = None) -> int:
    parser = bare_parser("diff", DESCRIPTION, EXAMPLE)
    parser.add_argument("got", metavar="GOT", help="trace directory")
    parser.add_argument("want", metavar="WANT", help="trace directory to compare with")
    parser.add_argument("--most", metavar="N", type=count, default=40, help="rows of the table, worst first (default: 40)")
    return answer("diff", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    opened = open_trace(args.got), open_trace(args.want)
    got, want = (one.trace for one in opened)
    _same_tokens(got, want)
    keys = compare_keys(*(_names(trace) for trace in (got, want)))
    if not keys.both:
        raise CannotMeasureError(f"{args.got} and {args.want} have no point of the same pass in common")
    found = [_compare(got, want, phase, point) for phase, point in _shared(got, want)]
    notes = [*_one_sided(args.got, keys.got_only), *_one_sided(args.want, keys.want_only)]
    first = next((one for one in found if (one["kind"] == "sets" and one["different"]) or (one["kind"] == "values" and (one["rows"] or one["problem"]) and not one["error"] <= FIRST)), None)
    if first is not None and first["layer"] is not None:
        notes.append(f"first in order of recording above {FIRST:g}: {first['point']}, {first['phase']}")
    for where, one in zip((args.got, args.want), opened, strict=True):
        notes += [f"{where}: {note}" for note in one.notes if "no point" not in note]
        notes += [f"{where}: not usable: {name} in {phase}{'' if step is None else f' step {step}'}: {why}" for (phase, step, name), why in list(one.trace.gaps.items())[:10]]
        notes += [f"{where}: {finding.words}" for finding in one.checked.findings[:10]]
    values = {
        "got": _about(args.got, got),
        "want": _about(args.want, want),
        "keys": {"both": len(keys.both), "got_only": list(keys.got_only), "want_only": list(keys.want_only)},
        "points": found,
        "first": None if first is None else {"point": first["point"], "phase": first["phase"]},
        "copies_that_differ": {side: len(one.checked.findings) for side, one in zip(("got", "want"), opened, strict=True)},
        "not_usable": {side: len(one.trace.gaps) for side, one in zip(("got", "want"), opened, strict=True)},
    }
    return Answer([_table(found, args.most), _sets(found)], values, notes)


def _names(trace: Trace) -> list[str]:
    return [f"{phase}{'' if step is None else f' {step}'} {point}" for phase, step, point in trace.keys()]  # noqa: SIM118


def _one_sided(where: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"only in {where}: {len(names)}, e.g. {', '.join(names[:4])}"]


def _about(where: str, trace: Trace) -> dict[str, Any]:
    return {"trace": where, "model": trace.description.get("model"), "policy": trace.description.get("policy")}


def _same_tokens(got: Trace, want: Trace) -> None:
    """Traces of different inputs are no pair. Raises InputError."""
    for key in got.passes.keys() & want.passes.keys():
        for name in ("tokens", "positions", "valid"):
            a, b = getattr(got.passes[key], name), getattr(want.passes[key], name)
            if a is not None and b is not None and not torch.equal(a, b):
                phase, step = key
                raise InputError(f"the traces were fed different {name} in {phase}" + ("" if step is None else f" step {step}"))


def _shared(got: Trace, want: Trace) -> list[tuple[str, str]]:
    """(phase, point) that at least one pass of both has, in order of recording."""
    both = {(phase, step, point) for phase, step, point in got.keys()} & set(want.keys())  # noqa: SIM118
    return list(dict.fromkeys((phase, point) for phase, step, point in want.keys() if (phase, step, point) in both))  # noqa: SIM118


def _compare(got: Trace, want: Trace, phase: str, point: str) -> dict[str, Any]:
    """One point over a phase: the shared decode steps stand along s."""
    steps = [s for s in want.steps(phase) if got.fired(point, phase, s) and want.fired(point, phase, s)]
    if steps:
        a, b = got.stack(point, phase, steps), want.stack(point, phase, steps)
        valid = want.stacked_valid(steps)
    else:
        a, b = got.get(point, phase), want.get(point, phase)
        valid = want.passes[phase, None].valid
    out: dict[str, Any] = {"point": point, "phase": phase, "layer": _layer(point), "steps": steps}
    if not is_point(point):
        a, b = (x if x.dim() > 2 else x[..., None] for x in (a, b))
        return out | {"kind": "values", **asdict(compare_values(a, b, 1, valid))}
    window = want.description.get("sliding_window")
    if point.endswith("attn.visible") and isinstance(window, int):
        near, far = compare_visible(a, b, window, valid)
        return out | {
            "kind": "sets",
            "different": near.different + far.different,
            "error": max(near.error, far.error),
            "window": asdict(near),
            "entries": asdict(far),
        }
    compared = compare_point(point, a, b, valid)
    return out | {"kind": "values" if isinstance(compared, Comparison) else "sets", "error": compared.error, **asdict(compared)}


def _layer(name: str) -> int | None:
    """The layer in a name, also of one that is no point: layers.N.out."""
    parts = name.split(".")
    return int(parts[1]) if len(parts) > 2 and parts[0] == "layers" and parts[1].isdigit() else None


def _table(found: Sequence[dict[str, Any]], most: int) -> Table:
    values = [one for one in found if one["kind"] == "values" and (one["rows"] or one["problem"])]
    values.sort(key=lambda one: -one["error"])
    table = Table(
        f"{min(most, len(values))} of {len(values)} points with values, largest worst-row error first",
        ["point", "phase", "worst row", "at", "all rows", "norm ratio", "cosine", "element", "got", "want", "rows"],
    )
    for one in values[:most]:
        where, element = (",".join(map(str, one[key])) for key in ("where", "element"))
        table.add(
            one["point"], one["phase"], one["error"], where, one["rel_l2"], one["norm_ratio"], one["cosine"],
            element, one["got"], one["want"], one["rows"],
        )  # fmt: skip
    return table


def _sets(found: Sequence[dict[str, Any]]) -> Table:
    table = Table("points with indices", ["point", "phase", "queries that differ", "missing", "extra", "twice", "first"])
    for one in found:
        if one["kind"] == "sets":
            parts = [one[part] for part in ("window", "entries")] if "window" in one else [one]
            first = next((part["where"] for part in parts if part["where"]), ())
            sums = (sum(part[key] for part in parts) for key in ("missing", "extra", "duplicates"))
            table.add(one["point"], one["phase"], one["different"], *sums, ",".join(map(str, first)) or "-")
    return table


if __name__ == "__main__":
    sys.exit(main())
