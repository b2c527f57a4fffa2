"""Wiring of an audit under pytest: options, the run ledger, planted faults, the report at the end. No logic of its own.

    pytest parity/ --phase decode --layers 0-3    # the source tree: conftest.py registers this module
    pytest --parity --phase decode --layers 0-3   # another repository: dsv4_parity.py, the pytest11 entry point, does

In another repository the tests are those of the installed package, test ids start with parity/ as here, and the report goes
into that repository. Not a conftest.py, so that an installed copy has the same hooks. Tests: parity/unit/test_plugin.py.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from parity import session as parity_session
from probes.core.records import Record

NAME = "parity.plugin"
MARKERS = ("gpu: needs a CUDA device; without one the case is recorded as not run", "slow: takes more than ten seconds on two cores")


def register(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register these hooks, once however many ask."""
    if not pluginmanager.has_plugin(NAME):
        pluginmanager.register(sys.modules[__name__], NAME)


def pytest_addoption(parser: pytest.Parser) -> None:
    parity_session.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    ignored = parity_session.ignore_collect(collection_path, config)
    if ignored is None and parity_session.is_elsewhere(config):
        return False  # nor for norecursedirs, nor because it is in a virtual environment
    return ignored


def pytest_configure(config: pytest.Config) -> None:
    if parity_session.is_elsewhere(config) and hasattr(config.option, "file_or_dir"):  # --help ends before that is read
        _take_over(config)
    if config.getoption("numprocesses", None) and parity_session.is_audit(config):
        raise pytest.UsageError(f"-n {config.getoption('numprocesses')}: an audit is one process with one run file; next: leave -n out")
    parity_session.configure(config)


def _take_over(config: pytest.Config) -> None:
    """The audit's tests and the ini values that they are written for, in a session of another repository: none of its own ones holds."""
    for option in ("ignore", "ignore_glob"):
        if config.getoption(option, None):
            raise pytest.UsageError(f"--{option.replace('_', '-')} {config.getoption(option)[0]}: not with --parity, whose tests are not in this repository; next: name the files to run, parity/test_layers.py, or leave it out")
    config.args = [_installed(argument) for argument in config.option.file_or_dir] or [str(parity_session.PARITY)]
    config.args_source = pytest.Config.ArgsSource.ARGS
    _without_ini(config)
    for name, lines in (("markers", MARKERS), ("python_files", ("test_*.py",)), ("python_functions", ("test",)), ("filterwarnings", ("default",))):
        for line in lines:
            config.addinivalue_line(name, line)
    if not config.pluginmanager.has_plugin("parity.conftest"):
        from parity import conftest

        config.pluginmanager.register(conftest, "parity.conftest")


def _without_ini(config: pytest.Config) -> None:
    """pytest's and its plugins' defaults for every ini value: usefixtures, norecursedirs, strictness, xfail_strict and whatever comes.

    There is no public way to take a value back. `markers` stay: plugins have added theirs, and a marker changes nothing by itself.
    """
    given = config._inicfg if hasattr(config, "_inicfg") else config.inicfg
    given.clear()
    for name in [name for name in config._inicache if name != "markers"]:
        del config._inicache[name]


def _installed(argument: str) -> str:
    """parity/test_layers.py::test_x[y] in the installed package."""
    path, separator, test = argument.partition("::")
    found = (parity_session.ROOT / path).resolve()
    if found != parity_session.PARITY and parity_session.PARITY not in found.parents:
        raise pytest.UsageError(f"{argument}: with --parity only the audit's own tests run, parity/test_*.py; next: leave it out, or leave --parity out")
    return f"{found}{separator}{test}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Test ids that do not say where the package is installed, so that they run again anywhere."""
    if not parity_session.is_elsewhere(parent.config) or parity_session.PARITY not in module_path.parents:
        return None
    module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=module_path.relative_to(parity_session.ROOT).as_posix())
    return module


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items:
        parity_session.deselected(items)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    parity_session.start(session)


@pytest.hookimpl(wrapper=True, trylast=True)  # next to pytest's own: before other plugins leave some out
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    parity_session.offered(collector, report)
    if report.failed:
        parity_session.uncollected(collector, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    parity_session.without_messages(item, call, report)
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parity_session.collected(config, items)  # not called where a named test does not exist


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    parity_session.finish(session, exitstatus, render=render_report, trend=trend_of)


def render_report(records: list[Record], out_dir: Path, baseline: list[Record] | None = None) -> Path:
    """The one place that knows both the judge and the report."""
    from reports.render import render_run

    return render_run(records, out_dir, baseline)


def trend_of(baseline: list[Record], records: list[Record]) -> str:
    """What differs from the baseline, in one line."""
    from reports.compare import compare

    return compare(baseline, records).sentence


def pytest_unconfigure(config: pytest.Config) -> None:
    parity_session.unconfigure(config)
