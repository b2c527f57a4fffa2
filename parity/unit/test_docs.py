"""What docs/kernels.md says of the plans is what the plans say."""

from __future__ import annotations

from pathlib import Path

import pytest

from production.variants import PLANS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
# What a wrapper takes where the plan names nothing.
OWN = {"indexer_score": "entries", "topk": "radix", "sparse_attn": "mma or tile", "hyper_connection": "block"}


def table() -> dict[str, list[str]]:
    """Cells behind the operation of the first table: portable prefill and decode, fast prefill and decode."""
    lines = PAGE.read_text(encoding="utf-8").split("| operation | portable, prefill |", 1)[1].splitlines()[2:]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("operation", ["linear", "experts", "indexer_score", "topk", "sparse_attn", "hyper_connection", "at_once"])
def test_the_page_names_what_the_plans_run(operation: str) -> None:
    phases = [getattr(plan, phase) for plan in (PLANS["portable"], PLANS["fast"]) for phase in ("prefill", "decode")]
    named = [getattr(variants, operation) for variants in phases]
    assert table()[operation] == [("yes" if name else "no") if isinstance(name, bool) else name or OWN[operation] for name in named]
