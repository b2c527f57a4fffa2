"""The pytest11 entry point: `pytest --parity` in another repository runs the audit that is installed here.

    pip install -e path/to/dsv4-parity && cd my-repository && pytest --parity --layers 0-3

Without --parity it adds that one option, imports nothing, and leaves a session as it is. With it, this repository's
conftest.py files, addopts and testpaths are left out, so that none of them changes what is judged; parity/plugin.py does the rest.
Tests: parity/unit/test_plugin.py.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shlex
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TAKEN = ("reference", "production", "parity", "probes", "reports")  # top-level names of this distribution that are imported


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one option that every repository gets."""
    parser.getgroup("parity", "DeepSeek-V4 parity audit").addoption(
        "--parity", action="store_true", help="run the DeepSeek-V4 parity audit instead of this repository's tests; `pytest --parity --help` lists its options"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """With --parity: the audit's options and hooks, and nothing of the repository's own."""
    if not early_config.known_args_namespace.parity or early_config.rootpath == HERE:  # in the source tree conftest.py registers the hooks
        return
    foreign = clash()
    if foreign:
        raise pytest.UsageError(foreign)
    args[:] = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *map(str, early_config.invocation_params.args)]
    from parity import plugin

    plugin.register(early_config.pluginmanager)
    early_config.known_args_namespace = parser.parse_known_args(args, namespace=copy.copy(early_config.option))
    early_config.known_args_namespace.noconftest = True


def clash() -> str:
    """What is imported instead of a package of this distribution, in one line; empty where nothing is."""
    for name in TAKEN:
        spec = importlib.util.find_spec(name)
        found, bare = [], ""
        if spec is not None and spec.origin is not None:
            found = [Path(spec.origin).resolve().parent]
        elif spec is not None:  # folders without __init__.py: one that is on sys.path comes before an editable install
            found, bare = [Path(folder).resolve() for folder in spec.submodule_search_locations or ()], " (no __init__.py)"
        if found != [HERE / name] or bare:
            return (
                f"--parity: `import {name}` finds {', '.join(map(str, found)) + bare if found else 'nothing'}, expected {HERE / name}; "
                f"the names {', '.join(TAKEN)} are taken by dsv4-parity; next: rename yours, or run from another directory"
            )
    return ""
