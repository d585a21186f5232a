"""How often Python looks for garbage in cycles.

A node or worker has some 100,000 long-lived objects: modules, and the state of its roles. Requests
make objects that end without cycles. With Python's defaults, 7 to 16 % of the CPU of calls of
workflows went into looking through all of them repeatedly.
"""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 10_000
"""Python looks through the youngest generation when it has this many containers (Python's default:
700). So the youngest generation has at most this many containers of garbage.
"""


def collect_rarely() -> None:
    """Let Python look through fewer objects, and less often. What exists now is never looked
    through again, so call it when the process has imported what it needs and is ready.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
