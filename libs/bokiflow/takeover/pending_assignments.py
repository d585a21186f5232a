"""Pending assignments: runs that an executor may own, or owns and does not execute.

A record that assigns a run can become durable although its append fails, or its caller is
cancelled. So each run is registered before the append, until the outcome is known. Runs whose
outcome stays unknown are looked up after heartbeats.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from bokiflow.runs import waiting
from indilog.sdk import SeqNum

RUNS_MAX: Final = 1024
"""Largest number of pending runs that are kept.

For further runs only the smallest seqnum is kept, from which the new owner of this executor's runs
reads.
"""
_LOOKS: Final = 64
_BEATS_MAX: Final = 64


@dataclass(slots=True)
class _Pending:
    since: SeqNum
    looks: int = _LOOKS
    epoch: int = 0
    failures: int = 0
    waits: int = 0


@dataclass(slots=True)
class _Exclusive:
    mutex: waiting.Mutex
    users: int = 0


class PendingAssignments:
    """The pending assignments of one executor."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self._alone: dict[str, _Exclusive] = {}

    def __bool__(self) -> bool:
        """Tell whether there are pending assignments."""
        return bool(self._pending)

    def __contains__(self, run: str) -> bool:
        """Tell whether a run is pending."""
        return run in self._pending

    @property
    def has_room(self) -> bool:
        """Whether at most `RUNS_MAX` runs are pending."""
        return len(self._pending) <= RUNS_MAX

    @property
    def since(self) -> Iterator[SeqNum]:
        """A seqnum for each pending run; no record below it assigns this run."""
        return (pending.since for pending in self._pending.values())

    @asynccontextmanager
    async def exclusive(self, run: str) -> AsyncIterator[None]:
        """Enter a block with exclusive access to a run, in which to assign or execute it."""
        alone = self._alone.setdefault(run, _Exclusive(waiting.Mutex()))
        alone.users += 1
        try:
            async with alone.mutex:
                yield
        finally:
            alone.users -= 1
            assert alone.users >= 0, "each user leaves once"
            if not alone.users:
                del self._alone[run]

    def is_in_use(self, run: str) -> bool:
        """Tell whether a task has exclusive access to the run, or waits for it."""
        return run in self._alone

    def note(self, run: str, since: SeqNum) -> object:
        """Register that a record at `since` or later may assign the run; return the previous
        entry.
        """
        before = self._pending.get(run)
        self._pending[run] = _Pending(since) if before is None else replace(before, looks=_LOOKS)
        return before

    def restore(self, run: str, before: object) -> None:
        """Undo `note`: restore the previous entry."""
        if isinstance(before, _Pending):
            self._pending[run] = before
        else:
            self.clear(run)

    def note_interrupted(self, run: str, since: SeqNum, epoch: int, failures: int) -> None:
        """Register that an execution in `epoch` was interrupted, after `failures` earlier
        interruptions.
        """
        assert epoch >= 1, "only a run of an executor is executed"
        assert failures >= 0, "failures are counted"
        waits = min(2**failures, _BEATS_MAX) - 1
        self._pending[run] = _Pending(since, epoch=epoch, failures=failures + 1, waits=waits)

    def clear(self, run: str) -> SeqNum | None:
        """Remove a run that is executing, parked or owned by another executor; return its
        `since`.
        """
        pending = self._pending.pop(run, None)
        return None if pending is None else pending.since

    def reset(self) -> None:
        """Remove all runs, because this executor no longer owns any."""
        self._pending.clear()

    def epoch(self, run: str) -> int:
        """Return the epoch in which this process last executed a run; 0 if it did not."""
        return self._pending[run].epoch

    def failures(self, run: str) -> int:
        """Return how many executions of a run were interrupted."""
        return self._pending[run].failures

    def due(self) -> list[str]:
        """Return the runs to look up after this heartbeat, and decrement the counters of the
        others.
        """
        due = [run for run, pending in self._pending.items() if pending.waits <= 0]
        for pending in self._pending.values():
            pending.waits -= 1
        return due

    def look_again(self, run: str) -> SeqNum | None:
        """Schedule another lookup of a run that was not found, up to `_LOOKS` times.

        After the last lookup, remove the run and return its `since`.
        """
        if (pending := self._pending.get(run)) is not None:
            pending.looks -= 1
            assert pending.looks >= 0, "a run is cleared at its last lookup"
            if not pending.looks:
                return self.clear(run)
        return None
