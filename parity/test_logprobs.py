"""What a server said of its next tokens, `--logits FILE` only: see parity/logits.py."""

from __future__ import annotations

import pytest

from parity import logits


def test_log_probability(model_case, audit, record):
    """Given log-probabilities are within their limits of the reference's, at every row."""
    record(logits.judge_rows(audit, model_case))


@pytest.mark.parametrize("what", logits.JUDGES)
def test_distribution(what, phase, audit, record):
    """scale: no temperature. offset: the same normaliser. sum: probabilities sum to 1. likeliest, top: the same tokens, but for near-ties."""
    record(logits.JUDGES[what](audit, phase))
