"""Where the replay of an object may begin: its checkpoints, and what is left below a floor.

A checkpoint is a record that keeps an object's value as of a record before it, so that a process
that knows nothing reads the same number of records however long the history is. It follows from the
log alone, like everything that is cached, but it does not vanish.

Where the history of an object was trimmed (`bokistore.collection`), its floor is one above a record
`p` such that the object as of `p` is still known: a checkpoint says so that lies beyond the floor;
or there is none, and then `p` deleted the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bokistore.records import (
    ObjectView,
    checkpoint_encoded,
    checkpoint_in,
    checkpoint_tag_of,
    command_decoded,
    tag_of,
)
from indilog import IndilogError, Log, Record, TrimmedError
from indilog.sdk import SeqNum

CHECKPOINT_EVERY: Final = 64
"""Records of an object between two checkpoints, at most."""
CHECKPOINT_EVERY_SMALL: Final = 16
"""The same, of an object of at most `SMALL_BYTES` of JSON: its checkpoints cost little."""
SMALL_BYTES: Final = 512
_PAGE: Final = 256


class ObjectCheckpoints:
    """Finds and writes the checkpoints of the objects of one log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def newest(self, name: str, bound: SeqNum) -> ObjectView | None:
        """Return what the last checkpoint at or below `bound` keeps; None: there is none."""
        found = await self.newest_record(name, bound)
        return None if found is None else found[1]

    async def newest_record(self, name: str, bound: SeqNum) -> tuple[SeqNum, ObjectView] | None:
        """Return the last checkpoint at or below `bound`, and what it keeps; None: there is
        none.
        """
        try:
            record = await self._log.read_prev(checkpoint_tag_of(name), bound)
        except TrimmedError:
            return None
        kept = None if record is None else checkpoint_in(command_decoded(record.data), name)
        return None if record is None or kept is None else (record.seqnum, kept)

    async def at_floor(self, name: str, floor: SeqNum) -> ObjectView:
        """Return the object as of the record just below the floor of its sub-stream.

        A checkpoint mostly follows soon on the record that it is as of; one that a collection wrote
        may stand far behind it.

        A floor may be seen earlier than the checkpoint that was appended ahead of it: floors reach
        the index early, and reads are answered as of where the session is. So before the object is
        said to be deleted, the session goes up to the tail, and everything is looked at once more.

        Raises:
            TrimmedError: the floor rose meanwhile; or the whole log was trimmed there, and with it
                what the object was.
        """
        kept = await self._as_of(name, floor)
        if kept is None:
            await self._log.tail()
            kept = await self._as_of(name, floor)
        if kept is not None:
            return kept
        await self.refuse_whole(floor)
        return ObjectView(seqnum=floor - 1, version=floor - 1, document=None, depth=0)

    async def _as_of(self, name: str, floor: SeqNum) -> ObjectView | None:
        """Return what the checkpoint keeps that is as of the record below `floor`; None: it is not
        seen.
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
        """Look for the same where the checkpoints stand alone; there it may be trimmed."""
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

    async def refuse_whole(self, floor: SeqNum) -> None:
        """Go on only if `floor` is that of one sub-stream.

        Raises:
            TrimmedError: it is the floor of the whole log.
        """
        await self._log.read_next(None, floor - 1)

    async def append(self, name: str, view: ObjectView) -> SeqNum | None:
        """Keep a view in the log; None: that failed, which costs only speed."""
        tags = [tag_of(name), checkpoint_tag_of(name)]
        try:
            return await self._log.append(checkpoint_encoded(name, view), tags=tags)
        except IndilogError:
            return None


def _as_of_in(page: Sequence[Record], name: str, floor: SeqNum) -> ObjectView | None:
    """Return what the checkpoint among `page` keeps that is as of the record below `floor`."""
    views = (checkpoint_in(command_decoded(record.data), name) for record in page)
    return next((view for view in views if view and view.seqnum == floor - 1), None)


def is_due(view: ObjectView) -> bool:
    """Tell whether the replica that brought an object to this view appends a checkpoint.

    One writer meets each multiple of the distance, so one checkpoint is appended; where that writer
    died, the next multiple makes up for it.
    """
    if view.document is None or view.age == 0:
        return False
    is_small = len(view.document) <= SMALL_BYTES
    return view.age % (CHECKPOINT_EVERY_SMALL if is_small else CHECKPOINT_EVERY) == 0
