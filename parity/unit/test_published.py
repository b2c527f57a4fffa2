"""The checks at published sizes leave out no operation and no variant: what the wrappers know is read from their source."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from parity import test_operations_published as published
from production import ops

ROOT = Path(__file__).resolve().parents[2]
WRAPPERS = sorted((ROOT / "production" / "ops").glob("*.py"))
# Wrappers that choose in a function they share.
SHARED = {"_experts": ("experts_up", "experts_down")}


def known_variants() -> dict[str, tuple[str, ...]]:
    """operation -> the variants that its wrapper accepts: the last argument of its call of `_choose`."""
    found: dict[str, tuple[str, ...]] = {}
    for path in WRAPPERS:
        module = importlib.import_module(f"production.ops.{path.stem}" if path.stem != "__init__" else "production.ops")
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "_choose":
                    known = call.args[3]
                    names = getattr(module, known.id) if isinstance(known, ast.Name) else ast.literal_eval(known)
                    for operation in SHARED.get(function.name, (function.name,)):
                        found[operation] = tuple(names)
    return found


def test_every_variant_of_every_wrapper_is_run_at_published_sizes():
    assert known_variants() == published.VARIANTS, "a variant was added or removed: parity/test_operations_published.py, VARIANTS"


def calls_of(source: str) -> set[str]:
    """Names called as ops.NAME."""
    return {
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "ops"
    }


def test_every_operation_is_run_at_published_sizes_here_or_elsewhere():
    source = Path(str(published.__file__)).read_text()
    pooled = calls_of((ROOT / "parity" / "test_operations_attention.py").read_text()) & {"compressor_prefill", "compressor_step"}  # by its class Pooling
    wrappers = {name for name in ops.__all__ if name not in ("entry_bytes", "experts_scratch", "splits_for")}
    assert wrappers - calls_of(source) - pooled == set(published.ELSEWHERE)
    for name, where in published.ELSEWHERE.items():
        assert f"def test_{name}" in "".join(path.read_text() for path in (ROOT / "parity").glob("test_operations_*.py")) or name in ("token_positions", "advance"), where


@pytest.mark.parametrize("tokens", [1, 3, 131])
def test_positions_reach_the_last_one_and_hold_pads_in_large_calls(tokens):
    found = published.positions(tokens)
    assert len(found) == tokens
    assert max(found) == published.LAST
    assert (-1 in found) == (tokens > 4)
    assert all(p >= -1 for p in found)
