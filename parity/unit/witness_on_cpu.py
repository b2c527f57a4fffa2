"""A pytest plugin for tests: an audit on the CPU is asked for the third witness too, another CPU device than production's.

    pytest parity/ -p parity.unit.witness_on_cpu
"""

from __future__ import annotations

import pytest

from parity import session


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    session.asks_for_witness = lambda run: True
    session.GPU_FILES = ()  # type: ignore[assignment]
