"""Recall@k of production's indexer: rotation, Hadamard, FP4 keys, score and top-k kernels against two oracles.

First over the prompt itself, layer by layer and phase by phase; then on long key sets: keys and queries of the checkpoint's
CSA layers resampled with jitter, and sets made to hurt (clustered scores, ties, one giant key, ...). The same-format oracle
rounds as production does and sums in fp64: what is lost against it is arithmetic. The exact oracle rounds nothing: what is lost
against it is the price of the format.

    python -m probes.recall --prompt long.txt:0:600 --keys 262144 --k 1024 --queries 2 --kinds real

Where decode and prefill take other kernels, every set goes through both.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from probes.core.cli import Answer, Ask, CannotMeasureError, Table, answer, ask_of, positive, probe_parser, say
from probes.core.drive import run_model
from probes.core.recall import (
    KINDS,
    Case,
    Material,
    Recall,
    Selection,
    make_case,
    material_of,
    measure_case,
    random_material,
    recall,
)
from probes.core.trace import Trace, grow_last
from probes.pair import Pair, load_reference, run_pair
from production import ops
from production.launch import Device, open_device
from production.variants import Variants, plan_of, scoring
from production.weights import inv_freq
from reference.config import InputError, ModelConfig
from reference.formats import INDEX_BLOCK, decode_e2m1, decode_e8m0

DESCRIPTION = "Recall@k of production's indexer selection, on the prompt and on long and adversarial key sets."
EXAMPLE = "python -m probes.recall --layers 2 --keys 16384 --k 512 --queries 4"
PAST_END = 64  # entries of memory beyond the keys, full of NaN scales
SIDES = ("indexer.q", "indexer.weights", "indexer.compressor")


def select(dev: Device, case: Case, frequencies: Tensor, variants: Variants | None = None) -> Selection:
    """What production's kernels choose: the indexer's steps after its projections, on the given device.

    variants   of a phase; None: those that decode takes on this device
    """
    where, (T, hi, di), E = dev.torch_device, case.q.shape, len(case.keys)
    chosen = scoring(plan_of(None, dev).decode if variants is None else variants, hi, di)
    q, rows = case.q.bfloat16().to(where), case.keys.bfloat16().to(where)
    freq = frequencies.to(where)
    ops.rope(dev, q, case.q_angle.to(where, torch.int32), freq)
    ops.rope(dev, rows[:, None], case.key_angle.to(where, torch.int32), freq)
    rounded = torch.empty_like(q)
    ops.hadamard_e2m1(dev, q.flatten(0, 1), rounded.flatten(0, 1))
    keys = torch.full((1, E + PAST_END, di // 2), 0xFF, dtype=torch.uint8, device=where)
    scales = torch.full((1, E + PAST_END, di // 32), 0xFF, dtype=torch.uint8, device=where)
    ops.store_index_keys(dev, rows[None], torch.arange(E, dtype=torch.int32, device=where)[None], keys, scales)
    position, row = case.position.to(where, torch.int32), torch.zeros(T, dtype=torch.int32, device=where)
    score = torch.full((T, E), torch.nan, device=where)
    selected = torch.full((T, case.k), -1, dtype=torch.int32, device=where)
    prepared = torch.full((ops.indexer_scratch(T, case.q.shape[1]),), 0xFF, dtype=torch.uint8, device=where)
    lists, counters = torch.full((ops.topk_scratch(case.k, E),), -1, dtype=torch.int32, device=where), torch.zeros(max(T, 1), dtype=torch.int32, device=where)
    ops.indexer_score(dev, rounded, case.weights.to(where), keys, scales, position, row, score, ratio=4, variant=chosen.indexer_score, scratch=prepared)
    ops.topk(dev, score, position, selected, ratio=4, variant=chosen.topk, counters=counters, scratch=lists)
    scored = (decode_e2m1(keys[0, :E].cpu()).view(E, -1, INDEX_BLOCK) * decode_e8m0(scales[0, :E].cpu())[..., None]).view(E, di)
    return Selection(selected.cpu(), score.cpu(), rounded.cpu().float(), scored)


def _indexer(variants: Variants) -> list[str | None]:
    return [variants.indexer_score, variants.topk]


def csa_layers(config: ModelConfig, layers: Sequence[int]) -> tuple[int, ...]:
    """Those of the layers that have an indexer."""
    return tuple(layer for layer in layers if config.kind(layer) == "csa")


def queries(selected: Tensor, scores: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """A run's selected [b, s, k] and scores [b, s, e] as rows of its valid queries; at least one column."""
    use = torch.ones(selected.shape[:2], dtype=torch.bool) if valid is None else valid
    return selected[use], grow_last(scores, max(1, scores.shape[-1]), -torch.inf)[use].double()


# ---- the probe ----


def main(argv: Sequence[str] | None = None) -> int:
    parser = probe_parser("recall", DESCRIPTION, EXAMPLE)
    parser.add_argument("--keys", metavar="E", type=positive, default=262_144, help="entries of a key set (default: 262144, a context of 1048576)")
    parser.add_argument("--k", metavar="K", type=positive, default=1024, help="entries to select (default: 1024)")
    parser.add_argument("--queries", metavar="T", type=positive, default=2, help="queries of a key set (default: 2)")
    parser.add_argument("--kinds", metavar="LIST", default=",".join(KINDS), help=f"key sets (default: {','.join(KINDS)})")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the resampling (default: 0)")
    return answer("recall", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    kinds = [kind.strip() for kind in args.kinds.split(",")]
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(f"--kinds: unknown key set {kind!r}; known: {', '.join(KINDS)}")
    if args.keys > 262_144:
        raise InputError(f"--keys {args.keys}: expected at most 262144, the entries of 1048576 tokens")
    ask = ask_of(args)
    layers = csa_layers(ask.config, ask.layers)
    points = [f"layers.{layer}.attn.{name}" for layer in layers for name in ("selected", "indexer.score")]
    run: list[dict[str, Any]] = []
    material: list[tuple[Material, Tensor]] = []
    if layers:
        pair, exact = _run(ask, layers, points)
        run = [_of_run(pair, exact, layer, phase) for phase in ask.phases for layer in layers]
        for layer in layers:
            q, weights, keys = (exact.get(f"layers.{layer}.attn.{name}", "prefill") for name in SIDES)
            if not keys.isnan().all():
                freq = inv_freq(ask.config, layer)
                material.append((material_of(q, weights, keys, pair.positions("prefill"), pair.valid("prefill"), freq, f"layer {layer}"), freq))
    if not material:
        say("no layer with an indexer and a complete entry was asked for: key sets are random")
        csa = csa_layers(ask.config, range(ask.config.num_hidden_layers))
        if not csa:
            raise CannotMeasureError("the checkpoint has no layer with an indexer")
        material = [(random_material(ask.config.index_n_heads, ask.config.index_head_dim, args.seed), inv_freq(ask.config, csa[0]))]
    dev = open_device(args.device)
    plan = plan_of(args.variants, dev)
    phases = {"decode": plan.decode, "prefill": plan.prefill}
    if _indexer(plan.decode) == _indexer(plan.prefill):
        phases = {"both": plan.decode}
    sets = []
    for kind in kinds:
        for one, freq in material if kind == "real" else material[:1]:
            case = make_case(kind, one, args.keys, args.k, args.queries, args.seed)
            for phase, variants in phases.items():
                began = time.perf_counter()
                made = select(dev, case, freq, variants)
                same, free, facts = measure_case(case, freq, made)
                say(f"{case.name}, kernels of {phase}: {time.perf_counter() - began:.1f} s")
                used = {"phase": phase, "variants": _indexer(scoring(variants, *case.q.shape[1:]))}
                sets.append({"kind": kind, "source": one.source, **used, "keys": args.keys, "k": args.k, "same_format": same.values(), "exact": free.values(), **facts})
    notes = [
        "shares are over queries that discard entries; judged: an entry exchanged within the score noise counts as chosen",
        "mass lost: softmax(score) mass of the oracle's choice less that of production's; score error: worst difference from the oracle's score, 0 where every product is exact",
        "run, same format: the reference on production's replayed choices; exact: the reference without rounding on its own choices",
    ]
    return Answer([_run_table(run), _set_table(sets)] if run else [_set_table(sets)], {**ask.facts(), "run": run, "sets": sets}, notes)


def _run(ask: Ask, layers: Sequence[int], points: Sequence[str]) -> tuple[Pair, Trace]:
    """Both models on production's choices, and the reference without rounding on its own choices."""
    pair = run_pair(ask, points)
    fed = [t for step in pair.steps() if (t := pair.production.passes["decode", step].tokens) is not None]
    tokens = torch.cat(fed, 1) if fed else torch.zeros(len(ask.prompts), 0, dtype=torch.int64)
    more = [f"layers.{layer}.attn.{name}" for layer in layers for name in SIDES]
    exact = load_reference(ask, "exact")
    return pair, run_model(exact, ask.prompts, (*points, *more), ask.steps, ask.max_context, tokens).trace


def _of_run(pair: Pair, exact: Trace, layer: int, phase: str) -> dict[str, Any]:
    """Recall of one layer over the prompt or the decode steps, production on its own chain. Only exact ties are near-ties here:
    the noise of a whole chain is measured by the audit."""
    k = pair.ask.config.index_topk
    got, score = pair.value("production", f"layers.{layer}.attn.selected", phase), f"layers.{layer}.attn.indexer.score"
    valid = pair.valid(phase)
    free = exact.get(score, phase) if phase == "prefill" else exact.stack(score)
    same = recall(*queries(got, pair.value("reference", score, phase), valid), k, 0.0)
    return {"layer": layer, "phase": phase, "k": k, "same_format": same.values(), "exact": recall(*queries(got, free, valid), k, 0.0).values()}


def _cells(one: dict[str, Any]) -> list[object]:
    found = Recall(**one)
    return [found.mean, found.p1, found.worst, found.mass_lost]


def _run_table(run: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "recall over the prompt: same format | exact oracle",
        ["layer", "phase", "k", "queries", "discarding", "mean", "p1", "worst", "mass lost", "mean", "p1", "worst", "mass lost", "not allowed"],
    )
    for one in run:
        same = one["same_format"]
        table.add(one["layer"], one["phase"], one["k"], same["queries"], same["discarding"], *_cells(same), *_cells(one["exact"]), same["not_allowed"])
    return table


def _set_table(sets: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "recall on key sets: same format | exact oracle",
        ["set", "source", "kernels", "keys", "k", "mean", "judged", "worst", "near-ties", "beyond", "mass lost", "mean", "worst", "mass lost", "score error", "not allowed"],
    )
    for one in sets:
        same, free = one["same_format"], one["exact"]
        table.add(
            one["kind"], one["source"], one["phase"], one["keys"], one["k"], same["mean"], same["judged_worst"], same["worst"], same["near_ties"], same["beyond"],
            same["mass_lost"], free["mean"], free["worst"], free["mass_lost"], one["score_error"], same["not_allowed"],
        )  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(main())
