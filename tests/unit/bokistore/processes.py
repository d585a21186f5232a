"""Processes that share a log of objects and nothing else."""

from __future__ import annotations

from bokistore import Store, ViewCache
from indilog.base.log import Log


class Clock:
    """Seconds, set by hand; each look takes a millisecond."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def newcomer(log: Log) -> Store:
    """Return the store of a process that has nothing cached."""
    return Store(log, cache=ViewCache())
