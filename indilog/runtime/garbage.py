"""Sets how often Python's garbage collector looks for reference cycles.

A node or worker has about 100,000 long-lived objects: modules, and the state of its roles. Requests
create objects that are freed without the collector. With Python's defaults, 7 to 16 % of the CPU
time of workflow calls was spent in repeated scans of the long-lived objects.
"""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 10_000
"""Number of containers in the youngest generation at which Python scans it (Python's default: 700).
It also limits the garbage in this generation.
"""


def collect_rarely() -> None:
    """Let Python scan fewer objects, and less often. Objects that exist now are never scanned
    again. So call this when the process has imported its modules and is ready.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
