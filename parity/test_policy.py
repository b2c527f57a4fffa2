"""Somebody else's production rounds where it says: the values it shows lie on the grids that it declares, and on no other.

Red where a policy is declared too wide or too narrow; shown by parity/unit/test_policy.py.
"""

from __future__ import annotations

import pytest

from parity import policy


@pytest.mark.parametrize("rounding", policy.SEEN)
def test_rounds_where_it_declares(rounding, audit, record):
    """Declared: every value is on the format's grid. Not declared: they are not."""
    record(policy.judge_policy(audit, rounding))
