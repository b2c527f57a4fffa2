"""The plan of kernel variants is the device's own unless one is named. Production: production/variants.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from production.variants import FAST, PLANS, PORTABLE, fitted, plan_of
from reference.config import InputError


def on(arch: str) -> Any:
    return SimpleNamespace(arch=arch)


@pytest.mark.parametrize(("arch", "plan"), [("sm_90a", FAST), ("sm_100a", PORTABLE), ("cpu-x86_64", PORTABLE)])
def test_each_device_has_its_own_plan(arch, plan):
    assert plan_of(None, on(arch)) is plan


@pytest.mark.parametrize("name", PLANS)
def test_a_named_plan_is_taken_on_any_device(name):
    assert plan_of(name, on("cpu-x86_64")).name == name


def test_an_unknown_plan_is_bad_input():
    with pytest.raises(InputError, match="portable, fast"):
        plan_of("quick", on("sm_90a"))


@pytest.mark.parametrize(("heads", "width", "takes"), [(64, 128, True), (8, 128, True), (65, 128, False), (64, 64, False), (64, 256, False)])
def test_index_scores_by_integers_are_for_keys_of_128_and_64_heads_at_most(heads, width, takes):
    config: Any = SimpleNamespace(index_n_heads=heads, index_head_dim=width)
    plan = fitted(FAST, config)
    assert (plan.decode.indexer_score, plan.prefill.indexer_score) == (("int8", "int8_tiles") if takes else ("entries", "entries"))
    assert fitted(PORTABLE, config) == PORTABLE
