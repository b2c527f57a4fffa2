"""The best tokens beyond the first, and whether greedy text gets stuck where the reference's does not.

Red where production loops and no counted near-tie explains it; shown by parity/unit/test_text.py.
"""

from __future__ import annotations

import pytest

from parity import witness


@pytest.mark.parametrize("k", [5, 10])
def test_best_tokens(phase, k, audit, record):
    """The k most likely tokens differ only where the reference's scores are closer than the noise."""
    record(witness.judge_top(audit, phase, k))


def test_greedy_text_does_not_degenerate(audit, record):
    """A greedy text is stuck only where the reference's is."""
    record(witness.judge_degeneration(audit))
