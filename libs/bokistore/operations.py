"""Reads the value before an operation, with one replay for all operations that wait for the same
object.

An operation on an object appends a record, then reads the records before it. Concurrent operations
of one process on one object share that read: one operation reads the records of all of them, and
stores the value before each.
"""

from __future__ import annotations

from typing import Final

from bokistore.cache import Line, ViewCache
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

    async def before(self, name: str, seqnum: SeqNum) -> ObjectView:
        """Return the object `name` as of just before the record at `seqnum`, which this session has
        appended. It raises the errors of `ObjectReplay.view`.
        """
        line = self._cache.line(self._log.name, name)
        line.waiting.add(seqnum)
        try:
            while seqnum not in line.noted:
                if line.looking is None:
                    await self._look(name, line, seqnum)
                else:
                    await line.looking.wait()
            return line.noted[seqnum]
        finally:
            line.waiting.discard(seqnum)
            line.noted.pop(seqnum, None)
            self._cache.leave(self._log.name, name, line)

    async def _look(self, name: str, line: Line, mine: SeqNum) -> None:
        """Store the value before the record `mine`, and before the records of all other waiting
        operations that this session sees.
        """
        assert line.looking is None, "only one operation reads at a time"
        assert mine in line.waiting, "an operation that reads waits"
        line.looking = looking = Event()
        try:
            first = min(line.waiting)
            try:
                await self._note(name, line, first)
            except IndilogError:
                if mine == first:
                    raise
            if mine not in line.noted:  # the read failed at the record of another operation
                line.noted[mine] = await self._replay.view(name, mine - 1)
        finally:
            line.looking = None
            looking.set()

    async def _note(self, name: str, line: Line, start: SeqNum) -> None:
        view = await self._replay.view(name, start - 1)
        line.note(start, view)
        last = max(line.waiting, default=start)
        while start < last:
            page = await self._log.read_range(tag_of(name), start, limit=_PAGE)
            page = [record for record in page if record.seqnum <= last]
            if not page:
                return
            run: list[Record] = []
            for record in page:
                if record.seqnum in line.waiting:
                    view = await self._replay.after_all(name, view, run)
                    line.note(record.seqnum, view)
                    if is_followed_by_aux(view):
                        view = view._replace(depth=-1)
                    run = []
                run.append(record)
            view = await self._replay.after_all(name, view, run)
            start = view.seqnum + 1
        if view.seqnum == last:
            self._cache.keep_view(self._log.name, name, view)
