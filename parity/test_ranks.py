"""A trace of several ranks: tensors that more than one rank holds are the same bits on each.

Red where one rank's copy differs in one element; shown by parity/unit/test_shards.py.
"""

from __future__ import annotations

from parity import ranks
from parity.session import run_of


def test_copies_on_ranks_are_equal(phase, pytestconfig, record):
    """Replicated tensors, and parts that several ranks hold, agree bit by bit."""
    traced = run_of(pytestconfig).traced
    assert traced is not None
    record(ranks.judge_copies(traced.opened, phase))
