"""How a report writes numbers, shares, steps and commands. Text only; every value comes from a record.

Non-finite numbers are words ("NaN", "inf", "-inf") and a missing number is a dash, so that neither reads as zero.
Tests: parity/unit/test_reports.py.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import shlex
from typing import Any

from probes.core import wording
from probes.core.wording import at_step as at_step
from probes.core.wording import closest as closest
from probes.core.wording import coverage_words as coverage_words
from probes.core.wording import first_step as first_step
from probes.core.wording import gate_of as gate_of
from probes.core.wording import named as named
from probes.core.wording import over as over
from probes.core.wording import plural as plural
from probes.core.wording import times as times
from probes.core.wording import when as when

DASH = "–"
# Control characters that neither HTML nor XML 1.0 may carry; a model's text or a file's name can hold any of them.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def printable(text: str) -> str:
    """The text with every character that a document may not hold replaced by U+FFFD."""
    return _UNPRINTABLE.sub("\ufffd", text)


def as_number(value: Any) -> float | None:
    """A number of a record's free-form values: floats, and the wire's words for the non-finite ones. None: no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def number(value: Any) -> str:
    """Three significant digits, six near 1 (ratios, cosines); whole numbers in full."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    x = as_number(value)
    if x is None:
        return str(value)
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    if x.is_integer() and abs(x) < 1e6:
        return str(int(x))
    return f"{x:.6g}" if 0.9 < abs(x) < 1.1 else f"{x:.3g}"


def share(spent: float | None) -> str:
    """Share of a limit: 0.37 is `37 %`, 41.8 is `42×`. A value beside its limit never rounds onto it."""
    if spent is None:
        return DASH
    if not math.isfinite(spent):
        return number(spent)
    return wording.share(spent)


def finite(value: Any) -> bool:
    """A number that has a place on an axis."""
    x = as_number(value)
    return x is not None and math.isfinite(x)


def bar(spent: float | None) -> str:
    """A share as the length of a bar, 1 is the limit; what is not finite is longer than any other. Empty: no share."""
    if spent is None:
        return ""
    return f"{max(0.0, min(spent, 9e9)):.4g}" if not math.isnan(spent) else "1e10"


def number_of(one: dict[str, Any]) -> str:
    """One further number of a gate: `norm ratio off 1 by 0.0031 of 0.1 (3 %)`."""
    return f"{one.get('number')} {number(one.get('smallest_limit'))} of {number(one.get('limit'))} ({share(as_number(one.get('spent')))})"


def anything(value: Any) -> str:
    """A free-form value of a record on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {anything(v)}" for key, v in value.items()) or DASH
    if isinstance(value, list | tuple):
        return runs(value) if _is_set_of_integers(value) else "[" + ", ".join(anything(v) for v in value) + "]"
    return number(value)


def _is_set_of_integers(values: list[Any] | tuple[Any, ...]) -> bool:
    """Ascending integers, long enough that ranges read better than a list."""
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    return len(values) > 4 and whole and all(a < b for a, b in itertools.pairwise(values))


def runs(values: list[int] | tuple[int, ...]) -> str:
    """Ascending integers as ranges: 0-3, 7."""
    parts: list[str] = []
    first = last = None
    for value in values:
        if last is not None and value == last + 1:
            last = value
            continue
        if last is not None:
            parts.append(f"{first}-{last}" if last != first else str(first))
        first = last = value
    if last is not None:
        parts.append(f"{first}-{last}" if last != first else str(first))
    return ", ".join(parts) or DASH


def steps(first: int | None, last: int | None) -> str:
    """Decode steps covered, 0-based."""
    if first is None:
        return ""
    return f"step {first}" if last is None or last == first else f"steps {first}-{last}"


def is_command(test_id: str) -> bool:
    """A record may hold a whole command where others hold a test's id."""
    return test_id.startswith(("pytest ", "python ", "make "))


@functools.lru_cache(maxsize=8)
def options(typed: str) -> str:
    """What stands behind a test's id to run it as the run `typed` did, with a space in front; paths, the selection and the report's directory (which would be overwritten) are left out."""
    try:
        given = shlex.split(typed)
    except ValueError:
        given = []
    given = given[given.index("pytest") + 1 :] if "pytest" in given else []
    kept: list[str] = []
    skip = False
    for token in given:
        if skip:
            skip = False
        elif token in ("-k", "-m", "--report"):
            skip = True
        elif not token.startswith("--report=") and not token.startswith("parity/") and token != "parity" and "::" not in token:
            kept.append(token)
    return "".join(f" {shlex.quote(token)}" for token in kept)


def command(test_id: str, typed: str = "") -> str:
    """The command that runs one gate again: its test id, with the options of the run it belongs to."""
    if not test_id or is_command(test_id):
        return test_id
    return f"pytest {shlex.quote(test_id)}{options(typed)}"


def listed(parts: list[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def cut(text: str, limit: int = 2000) -> str:
    """The text, or its beginning and how much of it is left out."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters in the run file)"
