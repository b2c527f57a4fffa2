"""Logits and greedy text of both models: KL, best tokens with margins, worst position; does a text get stuck?

Decode is fed the text's own tokens for the logits; the greedy part lets each model continue on its own. A text counts as
degenerate by the rule that `probes.core.text.degeneration` states, the reference's as well as production's.

    python -m probes.text --prompt short.txt:0:60 --steps 8 --greedy 32
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probes.core.cli import Answer, Table, answer, ask_of, number, positive, probe_parser
from probes.core.inputs import batch_of, check_context
from probes.core.text import TOP, degeneration, logits_measurement
from probes.pair import Pair, load_production, load_reference, run_pair

DESCRIPTION = "KL and agreement of the next-token logits, and whether greedy text of either model repeats itself."
EXAMPLE = "python -m probes.text --prompt medium.txt:0:250 --steps 16 --greedy 64"
WHO = ("reference", "production")


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("text", DESCRIPTION, EXAMPLE)
    parser.add_argument("--greedy", metavar="N", type=positive, default=32, help="tokens that each model continues greedily (default: 32)")
    return answer("text", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    ask = ask_of(args)
    check_context(ask.prompts, max(ask.steps, args.greedy), ask.max_context)
    pair = run_pair(ask, ["logits"])
    found = [{"phase": phase, **_logits(pair, phase)} for phase in ask.phases]
    made = load_production(ask)
    texts = {"production": _continue(made, pair, args.greedy)}
    texts["reference"] = _continue(load_reference(ask, made.policy), pair, args.greedy)
    decode = _decoder(ask.checkpoint)
    rows = [_row(b, texts, decode) for b in range(len(ask.prompts))]
    notes = [f"row {row['row']}, {who}: {row[who]['text']!r}" for row in rows for who in WHO]
    return Answer([_logits_table(found), _text_table(rows)], {**pair.facts(), "logits": found, "texts": rows}, notes)


def _logits(pair: Pair, phase: str) -> dict[str, Any]:
    valid = pair.valid(phase)
    got, want = (pair.value(who, "logits", phase) for who in ("production", "reference"))
    where = torch.ones(got.shape[:2], dtype=torch.bool) if valid is None else valid
    out = logits_measurement(got[where], want[where])
    b, s = (int(i) for i in where.nonzero()[out["kl_worst_row"]])
    return out | {"kl_worst_at": [b, s], "kl_worst_position": int(pair.positions(phase)[b, s])}


def _continue(model: Any, pair: Pair, count: int) -> list[list[int]]:
    """Greedy tokens of one model, each row on its own."""
    tokens, lengths = batch_of(pair.ask.prompts)
    state = model.new_state(len(tokens), pair.ask.max_context)
    logits: Tensor = model.prefill(tokens, state, lengths).float().cpu()[torch.arange(len(tokens)), lengths - 1]
    chosen = [logits.argmax(-1)]
    while len(chosen) < count:
        chosen.append(model.decode(chosen[-1], state).float().cpu().argmax(-1))
    return [[int(t) for t in row] for row in torch.stack(chosen, 1)]


def _row(b: int, texts: dict[str, list[list[int]]], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """One batch row: both texts, how stuck they are, where they part."""
    got, want = texts["production"][b], texts["reference"][b]
    first = next((i for i, (g, w) in enumerate(zip(got, want, strict=True)) if g != w), None)
    out: dict[str, Any] = {"row": b, "first_difference": first}
    return out | {who: {**degeneration(texts[who][b]), "text": decode(texts[who][b])} for who in WHO}


def _decoder(checkpoint: str) -> Callable[[list[int]], str]:
    path = Path(checkpoint) / "tokenizer.json"
    if not path.is_file():
        return json.dumps
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _logits_table(found: Sequence[dict[str, Any]]) -> Table:
    tops = [f"top-{k}" for k in TOP]
    table = Table(
        "next-token logits, production against the reference (largest flip and gap in the reference's own logits)",
        ["phase", "rows", "KL mean", "KL p99", "KL max", "at position", "top-1", "flips", "largest flip", *tops, "largest gap", "least margin"],
    )
    for one in found:
        shared = [number(one.get(f"top{k}_agreement")) for k in TOP]
        gap = max((one[f"top{k}_gap"] for k in TOP if f"top{k}_gap" in one), default=0.0)
        table.add(
            one["phase"], one["rows"], one["kl_mean"], one["kl_p99"], one["kl_max"], one["kl_worst_position"], one["top1_agreement"], one["flips"],
            one["largest_flip_margin"], *shared, gap, one["margin_min"],
        )  # fmt: skip
    return table


def _text_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "greedy text", ["row", "model", "tokens", "repeated 4-grams", "entropy", "distinct", "loop of", "degenerate", "first difference"]
    )
    for row in rows:
        for who in WHO:
            one, first = row[who], row["first_difference"]
            flag = {True: "YES", False: "no", None: "too short to tell"}[one["degenerate"]]
            cells = [number(one.get(key)) for key in ("repeated_ngrams", "entropy", "distinct")]
            table.add(row["row"], who, one["tokens"], *cells, one.get("loop") or "-", flag, "-" if first is None else first)
    return table


if __name__ == "__main__":
    sys.exit(main())
