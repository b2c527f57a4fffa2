"""The state that each judged layer leaves after the prefill and after every decode step, part by part.

A fault that writes a wrong row is named here, where it is written. Red with B003 (entry 0 is written over), B004 (rows of an
open group are missing) and B011 (they stand in other slots); shown by parity/unit/test_stored.py in copies.
"""

from __future__ import annotations

from parity import stored


def test_state(state_case, audit, record, request):
    """Rows that the pass wrote are near the reference's, every other row keeps its bits."""
    record(stored.judge_state(audit, state_case, request.node.nodeid))
