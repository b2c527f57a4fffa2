"""Is a text stuck? And how far apart are two models' next-token distributions? Numbers; one flag with its rule beside it.

    degeneration(tokens)                 n-gram repetition, entropy, distinct-token ratio of a greedy continuation
    logits_measurement(got, want)        KL, most likely tokens and their margins, worst position

Tests: parity/unit/test_text.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NGRAM = 4
MIN_TOKENS = 16  # a shorter text shows nothing
TOP = (5, 10)


def degeneration(tokens: Sequence[int]) -> dict[str, Any]:
    """How much a text repeats itself.

    repeated_ngrams   share of 4-grams that stood there before
    entropy           of the token frequencies in bits, over the most that so many tokens can have: 1 all different, 0 one token
    distinct          different tokens over all tokens
    loop              length of the shortest block that the text ends on at least three times in a row; None
    degenerate        a loop fills the last third of the text, or half of all 4-grams repeat, or entropy is below one half;
                      None: too short to tell
    """
    text = [int(t) for t in tokens]
    n = len(text)
    if n < MIN_TOKENS:
        return {"tokens": n, "degenerate": None}
    grams = [tuple(text[i : i + NGRAM]) for i in range(n - NGRAM + 1)]
    repeated = 1 - len(set(grams)) / len(grams)
    counts = Counter(text)
    entropy = -sum(c / n * math.log2(c / n) for c in counts.values()) / math.log2(n)
    loop = trailing_loop(text)
    stuck = loop is not None and loop[0] * loop[1] >= n / 3
    return {
        "tokens": n,
        "repeated_ngrams": repeated,
        "entropy": abs(entropy),
        "distinct": len(counts) / n,
        "loop": None if loop is None else loop[0],
        "loop_repeats": None if loop is None else loop[1],
        "degenerate": bool(stuck or repeated >= 0.5 or entropy < 0.5),
    }


def trailing_loop(text: Sequence[int]) -> tuple[int, int] | None:
    """(length, repetitions) of the shortest block that the text ends on at least three times in a row."""
    for length in range(1, len(text) // 3 + 1):
        block, repeats = text[-length:], 1
        while text[len(text) - (repeats + 1) * length : len(text) - repeats * length] == block:
            repeats += 1
        if repeats >= 3:
            return length, repeats
    return None


def logits_measurement(got: Tensor, want: Tensor) -> dict[str, Any]:
    """Two [rows, vocab] logits: distances of the distributions, agreement of the best tokens, margins, worst position.

    kl                 of got from want: mean, largest and its row, median and 99th percentile of the rows
    top1_agreement     share of rows with the same most likely token; flips, and the largest margin of a flip in `want`
    top5_, top10_agreement  share of the k best that both have; _rows  share of rows with the same k best; _gap  largest score
                       gap in `want` between a token left out and one taken instead
    margin             smallest and median margin between want's two best
    """
    p, q = torch.log_softmax(want.double(), -1), torch.log_softmax(got.double(), -1)
    kl = (p.exp() * (p - q)).sum(-1)
    best, other = want.argmax(-1), got.argmax(-1)
    flipped = best != other
    row = torch.arange(len(want))
    lost = (want[row, best] - want[row, other]).double()
    two = want.double().topk(min(2, want.shape[-1]), -1).values
    margin = two[:, 0] - two[:, -1]
    ranked = torch.where(kl.isnan(), torch.inf, kl)
    out: dict[str, Any] = {
        "rows": len(want), "kl_mean": float(kl.mean()), "kl_median": float(kl.median()), "kl_p99": float(ranked.quantile(0.99)),
        "kl_max": float(kl[ranked.argmax()]), "kl_worst_row": int(ranked.argmax()), "top1_agreement": float((~flipped).double().mean()),
        "flips": int(flipped.sum()), "largest_flip_margin": float(lost[flipped].max()) if flipped.any() else 0.0,
        "margin_min": float(margin.min()), "margin_median": float(margin.median()), "largest_error": float((got - want).abs().max()),
    }  # fmt: skip
    for k in TOP:
        if k < want.shape[-1]:
            shared, gap = top_agreement(got, want, k)
            out[f"top{k}_agreement"] = float(shared.double().mean() / k)
            out[f"top{k}_rows"] = float((shared == k).double().mean())
            out[f"top{k}_gap"] = float(gap.max())
    return out


def top_agreement(got: Tensor, want: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Per row: how many of the k best both have [rows], and want's score gap between the best left out and the worst taken."""
    g, w = (torch.zeros(x.shape, dtype=torch.bool).scatter(-1, x.nan_to_num(-math.inf).topk(k, -1).indices, True) for x in (got, want))
    left, taken = w & ~g, g & ~w
    gap = want.masked_fill(~left, -math.inf).amax(-1) - want.masked_fill(~taken, math.inf).amin(-1)
    return (g & w).sum(-1), torch.where(left.any(-1), gap.double(), 0.0)
