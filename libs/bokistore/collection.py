"""Garbage-collects the superseded history of objects.

History older than the retention span is superseded by the last checkpoint before that span. Records
before that checkpoint are trimmed from the object's sub-stream. So `at`, `history` and transactions
can read as far back as the span, and raise `TrimmedError` for anything older. If an object was
deleted before the span, its whole sub-stream is trimmed.

Ids of transactions share 65,536 sub-streams (`bokistore.records`). When a part of the log is
processed, its records are old, and some of them release earlier ids. So each sub-stream of ids with
a record in the part is trimmed below its first record that is still needed. A sub-stream without a
record in the part keeps its last records; their number is bounded.

Three rules make this safe while operations run concurrently:

- Before a part of the log is trimmed, the decisions about its transactions are recorded. So if a
  transaction's record is kept for one object, its decision does not depend on the trimmed history
  of another object (`bokistore.decisions`).
- An object's floor is always one above some record, and the object's value as of that record is
  known (`bokistore.checkpoints`).
- The seqnum where a collection ended is recorded. The next collection continues there, so each
  record is read once. Two concurrent collections do the same work twice, which is harmless.

`Store.collect` runs a `Collection`, which uses `ObjectReplay` and `ObjectCheckpoints`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from bokistore import checkpoints
from bokistore.checkpoints import CheckpointedView, ObjectCheckpoints
from bokistore.decisions import CELL, cell_tag_of
from bokistore.records import (
    Collected,
    ObjectView,
    StoreCommand,
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
"""Largest number of cells, of `CELL` seqnums each, that one record of a collection covers. The
record has a tag for each cell.
"""
_PAGE: Final = 1000
_HOT_MAX: Final = 10_000
"""Largest number of objects deferred to the last part of a run; beyond it they are handled at
once.
"""


KEEP_S: Final = 86_400.0
"""Seconds of history that a garbage collection keeps by default."""
KEEP_IDS_S: Final = 7 * 86_400.0
"""Seconds for which a garbage collection keeps ids of transactions by default."""
HELD_S_MAX: Final = 366 * 86_400.0
"""Seconds after which a held id is forgotten, even if no caller has released it."""


def check_spans(keep_s: float, keep_ids_s: float) -> None:
    """Raise for a span that is not a number of seconds.

    Raises:
        ValueError: a span is negative or not a number.
    """
    for name, span_s in (("keep", keep_s), ("keep_ids", keep_ids_s)):
        if not span_s >= 0:
            raise ValueError(f"{name} must be a number of seconds, 0 or greater, not {span_s!r}.")


@dataclass(frozen=True, slots=True)
class CollectionStatus:
    """How far the collection of a log is.

    Attributes:
        end: all records below this seqnum are processed.
        due_end: records below this seqnum are old enough to be processed.
        idle_s: seconds since a collection last recorded its progress; infinite: there was none.
    """

    end: SeqNum
    due_end: SeqNum
    idle_s: float

    @property
    def is_behind(self) -> bool:
        """Whether a collection would process any records."""
        return self.end < self.due_end


async def find_status(log: Log, keep_s: float) -> CollectionStatus:
    """Return how far the collection of a log is, if history of `keep_s` seconds is kept."""
    last = await log.read_prev(_COLLECTED_TAG)
    now = await log.now()
    old = await log.find_time(max(0.0, now - keep_s))
    end = 0 if last is None else _collected_in(last).end
    idle_s = math.inf if last is None else max(0.0, now - last.ordered_at)
    return CollectionStatus(end, old - old % CELL, idle_s)


async def find_collected_end(log: Log) -> SeqNum:
    """Return the seqnum below which a collection has begun to trim; 0: nothing is collected."""
    last = await log.read_prev(_COLLECTED_TAG)
    return 0 if last is None else _collected_in(last).end


class Collection:
    """One run over the records that have left the retention span since the previous run.

    Attributes:
        end: all records below this seqnum are processed.
    """

    def __init__(
        self, log: Log, replay: ObjectReplay, pace: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._log = log
        self._replay = replay
        self._pace = pace
        self._checkpoints = ObjectCheckpoints(log)
        self.end: SeqNum = 0
        self._hot: dict[str, None] = {}
        """Objects that were written after the part being processed. The last part of a run handles
        them, so that each gets one checkpoint instead of one per part.
        """
        self._ids_end: SeqNum = 0
        self._held_end: SeqNum = 0

    async def run(self, keep_s: float, keep_ids_s: float) -> SeqNum:
        """Collect all records older than `keep_s` seconds, and ids older than `keep_ids_s` seconds;
        return the seqnum below which all records are processed.

        The work is done in parts. A run may be interrupted anywhere; the next run continues.
        """
        self.end = await find_collected_end(self._log)
        now = await self._log.now()
        seqnum = await self._append_end()
        old, self._ids_end, self._held_end = [
            min(await self._log.find_time(max(0.0, now - span_s)), seqnum)
            for span_s in (keep_s, max(keep_s, keep_ids_s), max(keep_s, HELD_S_MAX))
        ]
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
        id_tags: dict[str, None] = {}
        aborted: list[SeqNum] = []
        async for record, command in self._commands(start, end):
            names |= dict.fromkeys(filter(None, map(_object_in, record.tags)))
            id_tags |= dict.fromkeys(map(id_tag_of, (*command.ids, *command.released)))
            if not command.is_conditional:
                continue
            if not await self._replay.is_committed(record, command):
                aborted.append(record.seqnum)
        data = encode_collected(Collected(start, end, tuple(aborted)))
        await self._log.append(data, tags=list(map(cell_tag_of, range(start, end, CELL))))
        for name in names:
            await self._collect_object(name, end)
            await self._pause()
            if len(self._hot) >= _HOT_MAX:
                await self._collect_hot(end)
        for tag in id_tags:
            await self._collect_ids(tag, end)
            await self._pause()

    async def _pause(self) -> None:
        if self._pace is not None:
            await self._pace()

    async def _collect_ids(self, tag: str, end: SeqNum) -> None:
        """Trim the records of a tag of ids before the first one that is needed."""
        released: set[str] = set()
        commands: list[tuple[SeqNum, StoreCommand]] = []
        start = 0
        while True:
            try:
                page = await self._log.read_range(tag, start, limit=_PAGE)
            except TrimmedError as error:
                start = error.first_seqnum
                continue
            if not page:
                break
            start = page[-1].seqnum + 1
            for record in page:
                command = decode_command(record.data)
                if command is not None:
                    if record.seqnum < end:  # a paused caller may still use an id released later
                        released.update(command.released)
                    commands.append((record.seqnum, command))
        floor = end
        for seqnum, command in commands:
            if seqnum >= end or self._is_needed(tag, seqnum, command, released):
                floor = min(floor, seqnum)
                break
        if commands and commands[0][0] < floor:
            await self._log.trim(floor, tag=tag)

    def _is_needed(
        self, tag: str, seqnum: SeqNum, command: StoreCommand, released: AbstractSet[str]
    ) -> bool:
        """Tell whether an id of the tag in a command below the end of the part must stay known."""
        for txn_id in command.ids:
            if id_tag_of(txn_id) != tag:
                continue
            if txn_id not in command.held:
                is_kept = seqnum >= self._ids_end
            else:
                is_kept = txn_id not in released and seqnum >= self._held_end
            if is_kept:
                return True
        return False

    async def _commands(
        self, start: SeqNum, end: SeqNum
    ) -> AsyncIterator[tuple[Record, StoreCommand]]:
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
            await self._pause()
            start = page[-1].seqnum + 1 if page else end

    async def _collect_hot(self, end: SeqNum) -> None:
        """Collect the deferred objects, which were also written after `end`."""
        while self._hot:
            await self._pause()
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
        kept = await self._checkpoints.newest(name, end - 1)
        is_idle = newest.seqnum == view.seqnum
        if not is_idle and not is_last:
            self._hot[name] = None
        elif not (kept and kept.seqnum == newest.seqnum):
            kept = await self._checkpoint(name, view, end, kept, is_idle=is_idle) or kept
        if kept is not None:
            assert kept.view.seqnum < end, "only records below the end of the part are trimmed"
            await self._trim(name, kept.view.seqnum + 1, min(kept.first, end))

    async def _checkpoint(
        self,
        name: str,
        view: ObjectView,
        end: SeqNum,
        kept: CheckpointedView | None,
        *,
        is_idle: bool,
    ) -> CheckpointedView | None:
        """Append a checkpoint of an object as of `end`, and return it; None: it would not free
        enough records, or the append failed.
        """
        if not await self._frees_enough(name, end, kept, is_idle=is_idle):
            return None
        appended = await self._checkpoints.append(name, view)
        if appended is None:
            return None
        if not is_idle:  # reads start at the last record
            await self._replay.checkpoint(name, await self._replay.view(name))
        return appended

    async def _frees_enough(
        self, name: str, end: SeqNum, kept: CheckpointedView | None, *, is_idle: bool
    ) -> bool:
        """Tell whether a checkpoint frees enough records below `end`.

        For an object that is no longer written, two records are enough. For other objects, it must
        free more records than their writers leave between two checkpoints.

        Writers append no checkpoints in two cases: if they do not know the value of the object
        (`multi_put`, blind writes of transactions, indexes of tags), and if each write replaces the
        object.
        """
        most = 2 if is_idle else checkpoints.CHECKPOINT_EVERY + 1
        spared, start = 0, 0 if kept is None else kept.view.seqnum + 1
        while spared < most:
            try:
                page = await self._log.read_range(tag_of(name), start, limit=most + 1)
            except TrimmedError as error:
                start = error.first_seqnum
                continue
            below = [record.seqnum for record in page if record.seqnum < end]
            spared += sum(kept is None or seqnum != kept.seqnum for seqnum in below)
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
