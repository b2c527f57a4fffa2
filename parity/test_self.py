"""Production against itself: one shot, in chunks, token by token, in batches, again, watched and unwatched.

Which planted fault turns what red (parity/unit/test_selfparity.py plants one of each kind in a copy):
    chunked, continued   the ring takes a chunk too early (B062, B063), several tokens commit before they pool (B015), one
                         visibility count for all tokens of a step (B051)
    batched              one offset or position for all rows (B081, B194), hash ids transposed (B116), sums that depend on the
                         batch (B006), a row stride of the wrong width (B029)
    reused               rows that a kernel leaves as they were (B185)
    decode, stored       the previous group is lost (B001), steps that finish nothing write entry 0 (B003), another layout of open
                         groups in prefill and decode (B011)
Not to be seen here: what is wrong in the same way in every run, and a switch beyond the text's 264 tokens (B091). The layers'
own gates and the single operations see those.
"""

from __future__ import annotations

import pytest

from parity import self_parity
from parity.session import RUN, run_of


def pytest_generate_tests(metafunc):
    """Ways of the asked phases; decode beside prefill only where decode is asked for."""
    run = metafunc.config.stash.get(RUN, None)
    if run is not None and "self_case" in metafunc.fixturenames:
        cases = self_parity.cases(run.phases, run.layers)
        metafunc.parametrize("self_case", cases, ids=[case.id for case in cases])


@pytest.fixture(scope="session")
def runs(audit):
    """Runs of production alone, shared by this file's tests."""
    return self_parity.runs_of(audit)


def test_way(self_case, audit, runs, record, pytestconfig):
    """The text run in another way: the same bits where the same kernels run, else within the noise of another order of sums."""
    verdict = self_parity.judge(audit, runs, self_case)
    for measurement in self_parity.measurements_of(runs, self_case, verdict):
        run_of(pytestconfig).record(measurement)
    record(verdict)
