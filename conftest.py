"""Wiring of `pytest parity/`: options, the run ledger, planted faults, the report at the end. No logic of its own.

    pytest parity/ --phase decode --layers 0-3
    pytest parity/unit                            # the project's own tests: no ledger, no report
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from parity import session as parity_session


def pytest_addoption(parser: pytest.Parser) -> None:
    parity_session.add_options(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return parity_session.ignore_collect(collection_path, config)


def pytest_configure(config: pytest.Config) -> None:
    parity_session.configure(config)


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        parity_session.deselected(items)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    parity_session.start(session)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.failed:
        parity_session.uncollected(collector, report)
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parity_session.collected(config, items)  # not called where a named test does not exist


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    parity_session.finish(session, exitstatus, render=render_report)


def render_report(records: list, out_dir: Path) -> Path:  # type: ignore[type-arg]
    """The one place that knows both the judge and the report."""
    from reports.render import render_run

    return render_run(records, out_dir)


def pytest_unconfigure(config: pytest.Config) -> None:
    parity_session.unconfigure(config)
