"""Finds and writes checkpoints of objects, from which a replay can start.

A checkpoint is a record that holds an object's value as of an earlier record. With checkpoints, a
process without a cache reads a bounded number of records, however long the history is. A checkpoint
is derived from the log alone, like aux data; unlike aux data, it is never evicted.

If an object's history was trimmed (`bokistore.collection`), its floor is `p` + 1 for some record
`p`. The object as of `p` is known: a checkpoint after the floor holds it. Without such a
checkpoint, `p` deleted the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bokistore.records import (
    ObjectView,
    checkpoint_in,
    checkpoint_tag_of,
    decode_command,
    encode_checkpoint,
    tag_of,
)
from indilog import IndilogError, Log, Record, TrimmedError
from indilog.sdk import SeqNum

CHECKPOINT_EVERY: Final = 64
"""Largest number of an object's records between two checkpoints."""
CHECKPOINT_EVERY_SMALL: Final = 16
"""The same for objects of at most `SMALL_BYTES` of JSON; their checkpoints are cheap."""
SMALL_BYTES: Final = 512
_PAGE: Final = 256


class ObjectCheckpoints:
    """Finds and writes the checkpoints of the objects of one log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def newest(self, name: str, bound: SeqNum) -> ObjectView | None:
        """Return the view in the last checkpoint at or below `bound`; None: there is none."""
        found = await self.newest_record(name, bound)
        return None if found is None else found[1]

    async def newest_record(self, name: str, bound: SeqNum) -> tuple[SeqNum, ObjectView] | None:
        """Return the seqnum and view of the last checkpoint at or below `bound`; None: there is
        none.
        """
        try:
            record = await self._log.read_prev(checkpoint_tag_of(name), bound)
        except TrimmedError:
            return None
        kept = None if record is None else checkpoint_in(decode_command(record.data), name)
        return None if record is None or kept is None else (record.seqnum, kept)

    async def at_floor(self, name: str, floor: SeqNum) -> ObjectView:
        """Return the object as of the record just below the floor of its sub-stream.

        Usually the checkpoint follows soon after that record. If a collection wrote it, it may be
        much later.

        The checkpoint was appended before the trim, but a session may see the trim first: floors
        reach the index early, and reads are answered as of the session's position. So this advances
        the session to the tail and reads again before it returns that the object was deleted.

        Raises:
            TrimmedError: the floor rose meanwhile, or the whole log was trimmed up to there, with
                the object's checkpoint.
        """
        assert floor > 0, "a floor is above a record"
        kept = await self._as_of(name, floor)
        if kept is None:
            await self._log.tail()
            kept = await self._as_of(name, floor)
        if kept is not None:
            return kept
        await self.check_log_not_trimmed(floor)
        return ObjectView(seqnum=floor - 1, version=floor - 1, document=None, depth=0)

    async def _as_of(self, name: str, floor: SeqNum) -> ObjectView | None:
        """Return the view of the checkpoint as of the record below `floor`; None: no such
        checkpoint is visible.
        """
        page = await self._log.read_range(tag_of(name), floor, limit=_PAGE)
        if not page:
            return None
        kept = _as_of_in(page, name, floor) or await self._as_of_alone(name, floor)
        while page and kept is None:
            page = await self._log.read_range(tag_of(name), page[-1].seqnum + 1, limit=_PAGE)
            kept = _as_of_in(page, name, floor)
        return kept

    async def _as_of_alone(self, name: str, floor: SeqNum) -> ObjectView | None:
        """Search as `_as_of` does, in the sub-stream of the object's checkpoints, which may be
        trimmed.
        """
        start = floor
        while True:
            try:
                page = await self._log.read_range(checkpoint_tag_of(name), start, limit=_PAGE)
            except TrimmedError as error:
                start = error.first_seqnum
                continue
            kept = _as_of_in(page, name, floor)
            if not page or kept is not None:
                return kept
            start = page[-1].seqnum + 1

    async def check_log_not_trimmed(self, floor: SeqNum) -> None:
        """Raise if `floor` is the floor of the whole log.

        Raises:
            TrimmedError: `floor` is the floor of the whole log, not only of one sub-stream.
        """
        await self._log.read_next(None, floor - 1)

    async def append(self, name: str, view: ObjectView) -> SeqNum | None:
        """Append a checkpoint of a view; None: the append failed, so later replays take longer."""
        tags = [tag_of(name), checkpoint_tag_of(name)]
        try:
            return await self._log.append(encode_checkpoint(name, view), tags=tags)
        except IndilogError:
            return None


def _as_of_in(page: Sequence[Record], name: str, floor: SeqNum) -> ObjectView | None:
    """Return the view of the checkpoint in `page` as of the record below `floor`."""
    views = (checkpoint_in(decode_command(record.data), name) for record in page)
    return next((view for view in views if view and view.seqnum == floor - 1), None)


def is_due(view: ObjectView) -> bool:
    """Tell whether the writer that produced this view appends a checkpoint.

    A checkpoint is due after the record whose number is a multiple of `CHECKPOINT_EVERY`. Exactly
    one writer appends that record. If this writer crashes before it appends the checkpoint, the
    next one is due at the next multiple.
    """
    if view.document is None or view.age == 0:
        return False
    is_small = len(view.document) <= SMALL_BYTES
    return view.age % (CHECKPOINT_EVERY_SMALL if is_small else CHECKPOINT_EVERY) == 0
