"""Sets how often Python's garbage collector looks for reference cycles.

A node or worker has about 100,000 long-lived objects: modules, and the state of its roles. Requests
create objects that are freed without the collector. With Python's defaults, repeated scans of the
long-lived objects took 7 to 16 % of the CPU time of workflow calls. Nodes and workers call
`collect_rarely` at their start.
"""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 10_000
"""Python scans the youngest generation when it has this many containers (Python's default: 700).
This also limits the garbage in the generation.
"""


def collect_rarely() -> None:
    """Let Python scan fewer objects, and less often. The objects that exist at this call are never
    scanned again. So call this when the process has imported its modules and is ready.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
