"""Words for counts, for every room from the probes on. Standard library only. Tests: parity/unit/test_records.py."""

from __future__ import annotations


def plural(count: int, noun: str, many: str = "") -> str:
    """`1 gate`, `2 gates`; many: where an s does not do."""
    return f"{count} {noun if count == 1 else many or noun + 's'}"


def coverage_words(coverage: str) -> str:
    """`partial coverage: 37 of 41 points shown`, `logits only`; empty: all of it, or this project's own production."""
    head, colon, rest = coverage.partition(": ")
    return "" if coverage in ("", "full") else f"{head} coverage{colon}{rest}" if colon else coverage
