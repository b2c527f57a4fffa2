"""`| head` ends a program quietly: exit code 141, as a program that SIGPIPE ended, and nothing on stderr.

    sys.exit(piped(main))

What is left in stdout's buffer is written inside, so that the interpreter's own end finds nothing to complain about.
Imports nothing of the project. Tests: parity/unit/test_probes.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

READER_LEFT = 141  # 128 + SIGPIPE


def piped(program: Callable[[], int]) -> int:
    """The exit code of `program`; READER_LEFT where nobody reads its stdout any more."""
    try:
        try:
            return program()
        finally:  # --help leaves by SystemExit
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
