"""The checks at published sizes leave out no operation and no variant; what the wrappers know is read from their source."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from parity import test_operations_published as published
from production import ops
from production.launch import KernelError

ROOT = Path(__file__).resolve().parents[2]


def test_every_wrapper_with_variants_has_a_test_that_runs_them_all():
    found = published.known_variants()
    assert found == published.VARIANTS
    assert {"linear_fp8", "experts_up", "sparse_attn", "topk", "indexer_score"} <= set(found)
    assert all(len(names) > 1 for names in found.values())
    with_variants = {name for name in ops.__all__ if {"dev", "variant"} <= set(inspect.signature(getattr(ops, name)).parameters)}
    assert with_variants == set(found), "a wrapper has a variant argument and does not choose by `_choose`"
    assert {test.operation for _, test in inspect.getmembers(published, inspect.isfunction) if hasattr(test, "operation")} == set(found)


def test_known_variants_are_those_that_the_wrapper_names_when_it_refuses():
    device: Any = None
    with pytest.raises(KernelError, match=r"it has " + ", ".join(published.VARIANTS["act_quant"])):
        ops.act_quant(device, torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 128, dtype=torch.bfloat16), variant="?")


def calls_of(path: Path) -> set[str]:
    """Names of what is called, as NAME or MODULE.NAME."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, ast.Attribute | ast.Name)}


def wrappers() -> set[str]:
    """Every public function of production/ops that launches: its first argument is the device."""
    found = set()
    for path in sorted((ROOT / "production" / "ops").glob("*.py")):
        module = importlib.import_module("production.ops" if path.stem == "__init__" else f"production.ops.{path.stem}")
        functions = inspect.getmembers(module, inspect.isfunction)
        found |= {name for name, f in functions if f.__module__.startswith("production.ops") and not name.startswith("_") and "dev" in inspect.signature(f).parameters}
    return found


def test_every_operation_is_run_at_published_sizes_here_or_elsewhere():
    parity = ROOT / "parity"
    called = calls_of(Path(str(published.__file__)))
    called |= calls_of(parity / "test_operations_attention.py") & {"compressor_prefill", "compressor_step"}  # by its class Pooling
    checks = [f for f in ast.parse((parity / "test_operations_at_once.py").read_text()).body if isinstance(f, ast.FunctionDef) and f.name in called]
    at_once = {node.func.attr for f in checks for node in ast.walk(f) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "at_once"}
    assert wrappers() - called - at_once == set(published.ELSEWHERE)
    for name, where in published.ELSEWHERE.items():
        assert f"def test_{name}" in "".join(path.read_text() for path in parity.glob("test_operations_*.py")) or name in ("token_positions", "advance"), where


@pytest.mark.parametrize("tokens", [1, 3, 131])
def test_positions_reach_the_last_one_and_hold_pads_in_large_calls(tokens):
    found = published.positions(tokens)
    assert len(found) == tokens
    assert max(found) == published.LAST
    assert (-1 in found) == (tokens > 4)
    assert all(p >= -1 for p in found)
