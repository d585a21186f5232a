"""Reads the value before an operation, with one replay for all operations that wait for the same
object.

An operation on an object appends a record, then reads the records before it. Concurrent operations
of one process on one object share that read: one operation reads the records of all of them, and
stores the value before each record. `Store` calls `PendingOperations`, which calls `ObjectReplay`.
"""

from __future__ import annotations

from typing import Final

from bokistore.cache import ViewCache, WaitingOperations
from bokistore.records import ObjectView, tag_of
from bokistore.replay import ObjectReplay, is_followed_by_aux
from indilog import IndilogError, Log, Record
from indilog.sdk import Event, SeqNum

_PAGE: Final = 256


class PendingOperations:
    """Finds the value before each operation on the objects of one log."""

    def __init__(self, log: Log, cache: ViewCache, replay: ObjectReplay) -> None:
        self._log = log
        self._cache = cache
        self._replay = replay

    async def view_before(self, name: str, seqnum: SeqNum) -> ObjectView:
        """Return the object `name` as of just before the record at `seqnum`, which this session has
        appended. It raises the errors of `ObjectReplay.view`.
        """
        waiting = self._cache.waiting(self._log.name, name)
        waiting.seqnums.add(seqnum)
        try:
            while seqnum not in waiting.views:
                if waiting.reading is None:
                    await self._read_for_all(name, waiting, seqnum)
                else:
                    await waiting.reading.wait()
            return waiting.views[seqnum]
        finally:
            waiting.seqnums.discard(seqnum)
            waiting.views.pop(seqnum, None)
            self._cache.remove_waiting(self._log.name, name, waiting)

    async def _read_for_all(self, name: str, waiting: WaitingOperations, mine: SeqNum) -> None:
        """Store the value before the record `mine`, and before the records of all other waiting
        operations that this session sees.
        """
        assert waiting.reading is None, "only one operation reads at a time"
        assert mine in waiting.seqnums, "an operation that reads waits"
        waiting.reading = reading = Event()
        try:
            first = min(waiting.seqnums)
            try:
                await self._read_views(name, waiting, first)
            except IndilogError:
                if mine == first:
                    raise
            if mine not in waiting.views:  # the read failed at the record of another operation
                waiting.views[mine] = await self._replay.view(name, mine - 1)
        finally:
            waiting.reading = None
            reading.set()

    async def _read_views(self, name: str, waiting: WaitingOperations, start: SeqNum) -> None:
        view = await self._replay.view(name, start - 1)
        waiting.store(start, view)
        last = max(waiting.seqnums, default=start)
        while start < last:
            page = await self._log.read_range(tag_of(name), start, limit=_PAGE)
            page = [record for record in page if record.seqnum <= last]
            if not page:
                return
            run: list[Record] = []
            for record in page:
                if record.seqnum in waiting.seqnums:
                    view = await self._replay.advance_all(name, view, run)
                    waiting.store(record.seqnum, view)
                    if is_followed_by_aux(view):
                        view = view._replace(depth=-1)
                    run = []
                run.append(record)
            view = await self._replay.advance_all(name, view, run)
            start = view.seqnum + 1
        if view.seqnum == last:
            self._cache.keep_view(self._log.name, name, view)
