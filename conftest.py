"""The source tree's own door: `pytest parity/` here needs no installed plugin. Hooks go into parity/plugin.py, not here.

    pytest parity/ --phase decode --layers 0-3
    pytest parity/unit                            # the project's own tests: no ledger, no report
"""

from __future__ import annotations

import pytest

from parity import plugin


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """An installed copy's entry point leaves this tree alone, so these hooks are registered once."""
    plugin.register(pluginmanager)
