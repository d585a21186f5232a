"""Runs that an executor may have got without being told, or has and does not execute.

A record that gives a run to an executor can become durable although whoever appended it fails, or
is cancelled, before the run is executed. So each such run is noted before the append and until it
is clear what became of it; what stays is looked for with the signs of life.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from bokiflow.runs import waiting
from indilog.sdk import SeqNum

RUNS_MAX: Final = 1024
"""Of further ones only the first place is kept, for whoever inherits the executor's name."""
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
    """The runs of one executor of which it does not know whether it has them and executes them."""

    def __init__(self) -> None:
        self._doubts: dict[str, _Pending] = {}
        self._alone: dict[str, _Exclusive] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._doubts)

    def __contains__(self, run: str) -> bool:
        """Whether a run is one."""
        return run in self._doubts

    @property
    def has_room(self) -> bool:
        """Whether they are not too many."""
        return len(self._doubts) <= RUNS_MAX

    @property
    def since(self) -> Iterator[SeqNum]:
        """Below the least of these nothing stands that gave one to this executor."""
        return (doubt.since for doubt in self._doubts.values())

    @asynccontextmanager
    async def alone(self, run: str) -> AsyncIterator[None]:
        """Nothing else in this process gives that run to this executor, or begins to execute it."""
        alone = self._alone.setdefault(run, _Exclusive(waiting.Mutex()))
        alone.users += 1
        try:
            async with alone.mutex:
                yield
        finally:
            alone.users -= 1
            if not alone.users:
                del self._alone[run]

    def is_under_way(self, run: str) -> bool:
        """Whether something is alone with it."""
        return run in self._alone

    def note(self, run: str, since: SeqNum) -> object:
        """A record from `since` on may give a run to this executor; return what was noted."""
        before = self._doubts.get(run)
        self._doubts[run] = _Pending(since) if before is None else replace(before, looks=_LOOKS)
        return before

    def restore(self, run: str, before: object) -> None:
        """Nothing gives it to this executor beside what was noted `before`."""
        if isinstance(before, _Pending):
            self._doubts[run] = before
        else:
            self.clear(run)

    def broke_off(self, run: str, since: SeqNum, epoch: int, failures: int) -> None:
        """An execution in `epoch` ended without an end, after `failures` others."""
        waits = min(2**failures, _BEATS_MAX) - 1
        self._doubts[run] = _Pending(since, epoch=epoch, failures=failures + 1, waits=waits)

    def clear(self, run: str) -> SeqNum | None:
        """It is executed, or waits, or is another's. Return since when it was noted, if it was."""
        doubt = self._doubts.pop(run, None)
        return None if doubt is None else doubt.since

    def reset(self) -> None:
        """This executor has no runs any more."""
        self._doubts.clear()

    def epoch(self, run: str) -> int:
        """Return the epoch in which a run was executed here before, 0 if it was not."""
        return self._doubts[run].epoch

    def failures(self, run: str) -> int:
        """Return how many executions of a run broke off."""
        return self._doubts[run].failures

    def due(self) -> list[str]:
        """Return those to look for with this sign of life."""
        due = [run for run, doubt in self._doubts.items() if doubt.waits <= 0]
        for doubt in self._doubts.values():
            doubt.waits -= 1
        return due

    def look_again(self, run: str) -> SeqNum | None:
        """It is not there: look again, but not for ever.

        Return since when it was noted, once that is over.
        """
        if (doubt := self._doubts.get(run)) is not None:
            doubt.looks -= 1
            if not doubt.looks:
                return self.clear(run)
        return None
