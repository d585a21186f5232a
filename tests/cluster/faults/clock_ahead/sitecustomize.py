"""Puts the wall clock of a process, and of those that it starts, ahead by `TESTS_CLOCK_AHEAD_S`.

Python imports it at the start of every process that has this folder in `PYTHONPATH`.
"""

from __future__ import annotations

import os
import time

_AHEAD_S = float(os.environ.get("TESTS_CLOCK_AHEAD_S", "0"))
_wall = time.time


def _ahead() -> float:
    return _wall() + _AHEAD_S


time.time = _ahead
