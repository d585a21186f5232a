"""Garbage-collects the superseded history of objects.

History older than the retention span is superseded by the last checkpoint before that span. Records
before that checkpoint are trimmed from the object's sub-stream. So `at`, `history` and transactions
can read as far back as the span, and raise `TrimmedError` for anything older. If an object was
deleted before the span, its whole sub-stream is trimmed. When the record of a transaction is
trimmed, its id is no longer known.

Three rules make this safe while operations run concurrently:

- Before a part of the log is trimmed, the decisions about its transactions are recorded. So if a
  transaction's record is kept for one object, its decision does not depend on the trimmed history
  of another object (`bokistore.decisions`).
- An object's floor is always one above a record as of which the object's value is known
  (`bokistore.checkpoints`).
- The seqnum where a collection ended is recorded. The next collection continues there, so each
  record is read once. Two concurrent collections do the same work twice, which is harmless.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final, TypeAlias

from bokistore import checkpoints
from bokistore.checkpoints import ObjectCheckpoints
from bokistore.decisions import CELL, cell_tag_of
from bokistore.records import (
    Collected,
    Command,
    ObjectView,
    checkpoint_tag_of,
    decode_command,
    encode_collected,
    id_tag_of,
    object_of,
    tag_of,
)
from bokistore.replay import ObjectReplay
from indilog import Log, Record, TrimmedError
from indilog.sdk import SeqNum, UserTag

_COLLECTED_TAG: Final = "store-collected"
_CELLS_MAX: Final = 32
"""Cells that one record of a collection covers; the record has a tag for each of them."""
_PAGE: Final = 1000
_HOT_MAX: Final = 10_000
"""Largest number of objects deferred to the last part of a run; beyond it they are handled at
once.
"""

_Kept: TypeAlias = tuple[SeqNum, ObjectView]
"""A checkpoint's seqnum, and its view."""


async def find_collected_end(log: Log) -> SeqNum:
    """Return the seqnum below which a collection has begun to trim; 0: nothing is collected."""
    last = await log.read_prev(_COLLECTED_TAG)
    return 0 if last is None else _collected_in(last).end


class Collection:
    """One run over the records that have left the retention span since the previous run.

    Attributes:
        end: all records below this seqnum are processed.
    """

    def __init__(self, log: Log, replay: ObjectReplay) -> None:
        self._log = log
        self._replay = replay
        self._checkpoints = ObjectCheckpoints(log)
        self.end: SeqNum = 0
        self._hot: dict[str, None] = {}
        """Objects that were written after the part being processed. The last part of a run handles
        them, so that each gets one checkpoint instead of one per part.
        """

    async def run(self, keep_s: float) -> SeqNum:
        """Collect all records older than `keep_s` seconds; return the seqnum below which all
        records are processed.

        The work is done in parts. A run may be interrupted anywhere; the next run continues.
        """
        self.end = await find_collected_end(self._log)
        before = max(0.0, await self._log.now() - keep_s)
        seqnum = await self._append_end()
        old = min(await self._log.find_time(before), seqnum)
        until = old - old % CELL
        while self.end < until:
            end = min(until, self.end + _CELLS_MAX * CELL)
            await self._collect_part(self.end, end)
            self.end = end
            seqnum = await self._append_end()
        await self._collect_hot(self.end)
        await self._log.trim(seqnum, tag=_COLLECTED_TAG)
        assert not self._hot, "the last part handled all deferred objects"
        return self.end

    async def _append_end(self) -> SeqNum:
        """Record the seqnum where the next run begins."""
        data = encode_collected(Collected(self.end, self.end))
        return await self._log.append(data, tags=[_COLLECTED_TAG])

    async def _collect_part(self, start: SeqNum, end: SeqNum) -> None:
        """Collect the records in [start, end)."""
        assert start < end, "a part has records"
        assert start % CELL == end % CELL == 0, "a part has whole cells"
        names: dict[
            str, None
        ] = {}  # objects of checkpoints, too, because checkpoints supersede earlier records
        ids: dict[str, SeqNum] = {}
        aborted: list[SeqNum] = []
        async for record, command in self._commands(start, end):
            names |= dict.fromkeys(filter(None, map(_object_in, record.tags)))
            if not command.is_conditional:
                continue
            if not await self._replay.is_committed(record, command):
                aborted.append(record.seqnum)
            if command.id is not None:
                ids[command.id] = record.seqnum
        data = encode_collected(Collected(start, end, tuple(aborted)))
        await self._log.append(data, tags=list(map(cell_tag_of, range(start, end, CELL))))
        for name in names:
            await self._collect_object(name, end)
            if len(self._hot) >= _HOT_MAX:
                await self._collect_hot(end)
        for txn_id, last in ids.items():
            if await self._is_done(txn_id, last):
                await self._log.trim(last + 1, tag=id_tag_of(txn_id))

    async def _is_done(self, txn_id: str, last: SeqNum) -> bool:
        try:
            return await self._replay.find_committed(txn_id, last) is not None
        except TrimmedError:
            return True  # the record that committed the id is already trimmed

    async def _commands(self, start: SeqNum, end: SeqNum) -> AsyncIterator[tuple[Record, Command]]:
        """Yield the surviving commands in a part of the log."""
        while start < end:
            try:
                page = await self._log.read_range(None, start, limit=_PAGE)
            except TrimmedError as error:
                start = error.first_seqnum
                continue
            for record in page:
                command = decode_command(record.data) if record.seqnum < end else None
                if command is not None:
                    yield record, command
            start = page[-1].seqnum + 1 if page else end

    async def _collect_hot(self, end: SeqNum) -> None:
        """Collect the deferred objects, which were also written after `end`."""
        while self._hot:
            name, _ = self._hot.popitem()
            await self._collect_object(name, end, is_last=True)

    async def _collect_object(self, name: str, end: SeqNum, *, is_last: bool = False) -> None:
        """Trim the superseded records of an object below `end`."""
        try:
            newest = await self._log.read_prev(tag_of(name))
            view = await self._replay.view(name, end - 1)
        except TrimmedError:
            return  # nothing is left there
        assert newest is not None, "a collected object has a record"
        if view.document is None and view.version == view.seqnum:
            await self._trim(name, view.seqnum + 1, view.seqnum + 1)
            return
        kept = await self._checkpoints.newest_record(name, end - 1)
        is_idle = newest.seqnum == view.seqnum
        if not is_idle and not is_last:
            self._hot[name] = None
        elif not (kept and kept[0] == newest.seqnum):
            kept = await self._checkpoint(name, view, end, kept, is_idle=is_idle) or kept
        if kept is not None:
            seqnum, base = kept
            assert base.seqnum < end, "only records below the end of the part are trimmed"
            await self._trim(name, base.seqnum + 1, min(seqnum, end))

    async def _checkpoint(
        self, name: str, view: ObjectView, end: SeqNum, kept: _Kept | None, *, is_idle: bool
    ) -> _Kept | None:
        """If it frees enough records, append a checkpoint of an object as of `end`, and return
        it.
        """
        if not await self._frees_enough(name, end, kept, is_idle=is_idle):
            return None
        appended = await self._checkpoints.append(name, view)
        if appended is None:
            return None
        if not is_idle:  # reads start at the last record
            await self._replay.checkpoint(name, await self._replay.view(name))
        return appended, view

    async def _frees_enough(
        self, name: str, end: SeqNum, kept: _Kept | None, *, is_idle: bool
    ) -> bool:
        """Tell whether a checkpoint frees enough records below `end`.

        For an object that is no longer written, two records are enough. For other objects, it must
        free more records than their writers leave between two checkpoints.

        Writers append no checkpoints in two cases: they do not know the value of the object
        (`multi_put`, blind writes of transactions, indexes of tags), or each write replaces the
        object.
        """
        most = 2 if is_idle else checkpoints.CHECKPOINT_EVERY + 1
        spared, start = 0, 0 if kept is None else kept[1].seqnum + 1
        while spared < most:
            try:
                page = await self._log.read_range(tag_of(name), start, limit=most + 1)
            except TrimmedError as error:
                start = error.first_seqnum
                continue
            below = [record.seqnum for record in page if record.seqnum < end]
            spared += sum(kept is None or seqnum != kept[0] for seqnum in below)
            if not below or len(below) < len(page):
                break
            start = below[-1] + 1
        return spared >= most

    async def _trim(self, name: str, until: SeqNum, checkpoints_until: SeqNum) -> None:
        await self._log.trim(until, tag=tag_of(name))
        await self._log.trim(checkpoints_until, tag=checkpoint_tag_of(name))


def _object_in(tag: UserTag) -> str | None:
    return object_of(tag) if isinstance(tag, str) else None


def _collected_in(record: Record) -> Collected:
    command = decode_command(record.data)
    collected = None if command is None else command.collected
    return Collected(0, 0) if collected is None else collected
