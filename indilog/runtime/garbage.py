"""How often Python looks for garbage in cycles.

A node or worker has some 100,000 long-lived objects: modules, and the state of its roles. Requests
make objects that end without cycles. With Python's defaults, 7 to 16 % of the CPU of calls of
workflows went into looking through all of them repeatedly.
"""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 10_000
"""Containers allocated and not freed until the youngest generation is looked through (Python's
default: 700). They are the garbage in cycles that a process has at most, beside what is older.
"""


def collect_rarely() -> None:
    """Let Python look through fewer objects, and less often. What exists now is never looked
    through again, so call it when the process has imported what it needs and is ready.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
