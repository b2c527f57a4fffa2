"""The time left: where a few tests take most of it, and as a run is slower or faster than the table."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity import pace
from parity.pace import OTHER, PASSES, SECONDS, Pace

ROOT = Path(__file__).resolve().parents[2]
HEAVY = "test_graph.py::test_replayed_steps_are_the_launched_ones"
ROWS = [("test_choices.py::test_x", "prefill"), *[("test_choices.py::test_x", "prefill")] * 3, ("test_choices.py::test_x", "decode"), *[("test_layers.py::test_point", "decode")] * 300,
        *[(HEAVY, "")] * 3, *[("test_operations_dense.py::test_experts_tiles", "")] * 12, *[("test_new.py::test_that_no_table_knows", "")] * 50]  # fmt: skip


def items():
    return [SimpleNamespace(nodeid=f"parity/{name}[{n}]", callspec=SimpleNamespace(params={"phase": phase} if phase else {})) for n, (name, phase) in enumerate(ROWS)]


def truth(pace_of, item, slower):
    """What an item takes on a machine of another speed, its passes with it."""
    kind = item.nodeid.partition("[")[0].rpartition("/")[2]
    return slower * (SECONDS.get(kind, OTHER) + pace_of.passes.get(item.nodeid, 0.0))


@pytest.mark.parametrize("slower", [0.5, 1.0, 5.0])
def test_never_less_than_half_of_what_comes(slower):
    """The mean of the tests that came so far says a tenth of it, as most of them are the short ones."""
    tests = items()
    made = Pace(tests, pace.TOKENS, pace.STEPS, pace.LAYERS)
    seconds = [truth(made, item, slower) for item in tests]
    assert min(seconds[0], seconds[4]) > 10 * slower, "the first test of a phase runs the models"
    for n, item in enumerate(tests):
        made.took(item.nodeid, seconds[n])
        rest = sum(seconds[n + 1 :])
        assert made.left() >= rest / 2 - 1e-9, (n, made.left(), rest)
        assert made.left() <= 3 * rest + pace.PRIOR_SECONDS, (n, made.left(), rest)
    assert made.left() == 0


def test_passes_grow_with_layers_tokens_and_steps_and_a_decode_alone_needs_its_prefill():
    def of(phase, *size):
        item = SimpleNamespace(nodeid="parity/test_layers.py::test_point[a]", callspec=SimpleNamespace(params={"layer_case": SimpleNamespace(phase=phase)}))
        return Pace([item], *size).passes[item.nodeid]

    usual = (pace.TOKENS, pace.STEPS, pace.LAYERS)
    assert of("prefill", *usual) == PASSES["prefill"]
    assert of("decode", *usual) == sum(PASSES.values())
    assert of("decode", pace.TOKENS, 2 * pace.STEPS, 2 * pace.LAYERS) == 2 * PASSES["prefill"] + 4 * PASSES["decode"]


def test_a_test_that_is_new_is_learnt():
    tests = [SimpleNamespace(nodeid=f"parity/test_new.py::test_slow[{n}]") for n in range(20)]
    made = Pace(tests, 1, 1, 1)
    for item in tests[:10]:
        made.took(item.nodeid, 4.0)
    assert 20 < made.left() < 80


def test_a_machine_that_becomes_busy_is_noticed():
    tests = [SimpleNamespace(nodeid=f"parity/{HEAVY}[{n}]") for n in range(60)]
    made = Pace(tests, pace.TOKENS, pace.STEPS, pace.LAYERS)
    for n, item in enumerate(tests[:45]):
        made.took(item.nodeid, SECONDS[HEAVY] * (1 if n < 35 else 3))
    assert made.left() > 3 * 15 * SECONDS[HEAVY] / 2


def test_every_line_names_a_test():
    """A test that is renamed takes its time with it."""
    there = {f"{path.name}::{node.name}" for path in (ROOT / "parity").glob("test_*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)}
    assert sorted(SECONDS.keys() - there) == []
