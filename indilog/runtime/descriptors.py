"""Raises the limit of file descriptors of this process, and counts those left for connections.

The journal needs a descriptor for each new segment, so connections must leave a reserve. Processes
raise the limit when they start; the gateway asks `room_for_connections`.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

_CONNECTIONS_MIN: Final = 16


_given: list[int] = []
"""The soft limit that this process was started with; empty until `raise_limit` is called."""


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit; call this at the start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _given[:] = _given or [soft]
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def given_limit() -> int:
    """Return the soft limit of open files with which this process was started. Child processes
    other than nodes, such as workers, get this limit.
    """
    return _given[0] if _given else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def room_for_connections(reserve: int) -> int:
    """Return how many further connections may be opened.

    Args:
        reserve: descriptors kept for other uses: segments of the journal, workers, links. At most
            half of the free descriptors are kept.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = soft - sum(1 for _ in Path("/proc/self/fd").iterdir())
    return max(_CONNECTIONS_MIN, left - min(reserve, left // 2))
