"""Discrete choices of two models: which queries chose otherwise, by what score margin, and what that did to a later value.

    choice_difference(got, want, scores, noise, valid)      sets [b, s, k], scores [b, s, e] of the model that is right
    error_shares(X, own, replayed, valid)                   X against two runs of the other model

A difference within twice the score noise is a near-tie. No opinion, and no model is named here. Tests: parity/unit/test_choices.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from probes.core.compare import compare_sets, differing, selection_margin


def choice_difference(got: Tensor, want: Tensor, scores: Tensor | None, noise: float, valid: Tensor | None = None) -> dict[str, Any]:
    """Queries that chose otherwise.

    scores      what `want` was chosen by, -inf where a query may not look; None: a table decides, and no difference is near
    queries     valid ones that had something to choose; differing  of them; exchanged  indices that only `want` has
    near_ties, beyond   differing queries whose score gap is within 2 * noise, and the others
    largest_margin      score gap of the worst one (inf: no exchange explains it); first_beyond  [b, s] of the first such query
    """
    sets = compare_sets(got, want, valid)
    differ = differing(got, want, valid)
    margin = torch.where(differ, math.inf, 0.0) if scores is None else selection_margin(got, want, scores, valid)
    near = differ & (margin <= 2 * noise)
    beyond = differ & ~near
    return {
        "queries": sets.rows, "differing": int(differ.sum()), "exchanged": sets.missing, "near_ties": int(near.sum()),
        "beyond": int(beyond.sum()), "largest_margin": float(margin[differ].max()) if bool(differ.any()) else 0.0,
        "first_beyond": beyond.nonzero()[0].tolist() if bool(beyond.any()) else None, "noise": noise,
    }  # fmt: skip


def relative_error(got: Tensor, want: Tensor, valid: Tensor | None = None) -> float:
    """|got - want| / |want| over all valid queries together; NaN where nothing was compared."""
    if valid is not None:
        got, want = got[valid], want[valid]
    size = float(want.double().norm())
    return float((got.double() - want.double()).norm()) / size if size > 0 else math.nan


def error_shares(got: Tensor, own: Tensor, replayed: Tensor, valid: Tensor | None = None) -> dict[str, float]:
    """What a different choice did to a value [b, s, ...].

    own, replayed   the same value of the right model on its own choices, and on the choices that `got` was made with
    choice_share    part of the squared error that goes away with the choices replayed: 1 - (replayed / own)^2, not below 0
    """
    error_own, error_replayed = relative_error(got, own, valid), relative_error(got, replayed, valid)
    share = max(0.0, 1 - (error_replayed / error_own) ** 2) if error_own > 0 else 0.0
    return {"error_own": error_own, "error_replayed": error_replayed, "choice_share": share}
