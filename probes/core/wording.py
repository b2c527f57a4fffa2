"""Words for counts, for every room from the probes on. Standard library only. Tests: parity/unit/test_records.py."""

from __future__ import annotations


def plural(count: int, noun: str, many: str = "") -> str:
    """`1 gate`, `2 gates`; many: where an s does not do."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"
