"""The times at which runs are to be executed again, for `bokiflow.taking`."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

_STALE_MIN: Final = 64
"""Smallest number of entries at which stale ones are removed from the heap."""


class RunTimers:
    """One time for each run, at most: the earliest that was set since the run was last dropped."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """Contains all entries of `_at`. Its other entries are stale."""

    def __len__(self) -> int:
        """Return the number of runs with a time."""
        return len(self._at)

    def set(self, run: str, at: float) -> None:
        """Execute a run again at `at` (monotonic time), or at an earlier time that is set."""
        known = self._at.get(run)
        if known is not None and known <= at:
            return
        self._at[run] = at
        heapq.heappush(self._heap, (at, run))
        if len(self._heap) > _STALE_MIN + 2 * len(self._at):
            self._heap = [(at, run) for run, at in self._at.items()]
            heapq.heapify(self._heap)

    def drop(self, run: str) -> None:
        """Forget the time of a run, because the run is being executed or has ended."""
        self._at.pop(run, None)

    def drop_unless(self, is_kept: Callable[[str], bool]) -> None:
        """Forget the times of all runs for which `is_kept` is false."""
        self._at = {run: at for run, at in self._at.items() if is_kept(run)}

    def clear(self) -> None:
        """Forget all times."""
        self._at.clear()
        self._heap.clear()

    def next_at(self) -> float | None:
        """Return the earliest time; None: no run has a time."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> str | None:
        """Remove the run with the earliest time, and return it; None: no time has come."""
        at = self.next_at()
        if at is None or at > now:
            return None
        _, run = heapq.heappop(self._heap)
        del self._at[run]
        return run
