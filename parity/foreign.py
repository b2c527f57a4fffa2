"""Somebody else's code raised: what is told of it. Anything but Ctrl-C is theirs: sys.exit and a test framework's skip too.

    except BaseException as error:
        crash = Crash(phase, step, where, told(error, redact), raised=raised_at(error))    # KeyboardInterrupt goes on

With redact the message is left out, however short: nobody knows whether it quotes the prompt. The type and where it was raised stay.
Tests: parity/unit/test_foreign.py.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

LEFT_OUT = "(message left out: --redact)"
MOST = 300  # characters of a message


def told(error: BaseException, redact: bool = False) -> str:
    """Type and first line of the message; the type alone where there is none."""
    said = LEFT_OUT if redact else (str(error).strip().splitlines() or [""])[0][:MOST]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def raised_at(error: BaseException) -> str:
    """`engine.py:12 in decode`: the innermost frame that is no library's; empty where the error was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    last = (own or list(frames))[-1:]
    return "".join(f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in last)


def print_stack(error: BaseException, redact: bool = False) -> None:
    """The stack on stderr, which pytest shows with the first test that fails; with redact without messages."""
    if not redact:
        traceback.print_exception(error)
        return
    frames = "".join(f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}\n" for frame in traceback.extract_tb(error.__traceback__))
    sys.stderr.write(f"{frames}{told(error, redact)}\n")
