"""Finds and writes checkpoints of objects, from which a replay can start.

A checkpoint is a record that holds an object's value as of an earlier record. With checkpoints, a
process without a cache reads a bounded number of records, however long the history is. A checkpoint
is derived from the log alone, like aux data; unlike aux data, it is never evicted.

A value that does not fit into a record is appended in parts. The checkpoint that names the parts
follows. So a checkpoint is complete or does not exist: no checkpoint names the parts of a writer
that crashed. The parts have the tag of checkpoints only, so they are not in the object's
sub-stream.

If an object's history was trimmed (`bokistore.collection`), its floor is `p` + 1 for some record
`p`. The object as of `p` is known: a checkpoint after the floor holds it. Without such a
checkpoint, `p` deleted the object. `ObjectReplay`, `Decisions` and `Collection` call
`ObjectCheckpoints`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from bokistore.records import (
    ObjectCheckpoint,
    ObjectCheckpointPart,
    ObjectView,
    checkpoint_in,
    checkpoint_tag_of,
    decode_command,
    encode_checkpoint,
    encode_part,
    part_in,
    tag_of,
    view_of,
)
from indilog import (
    IndilogError,
    Log,
    OutcomeUnknownError,
    Record,
    TooLargeError,
    TrimmedError,
)
from indilog.sdk import SeqNum

CHECKPOINT_EVERY: Final = 64
"""Records between two checkpoints of an object with more than `SMALL_BYTES`, and at most
`LARGE_BYTES`, of JSON.
"""
CHECKPOINT_EVERY_SMALL: Final = 16
"""Records between two checkpoints of an object with at most `SMALL_BYTES` of JSON; these
checkpoints are cheap.
"""
SMALL_BYTES: Final = 512
LARGE_BYTES: Final = 1024 * 1024
"""An object of n times as many bytes has a checkpoint after n times as many records. So the bytes
of checkpoints per record are bounded.
"""
_OVERDUE: Final = 4
"""A read appends a checkpoint if the records since the last one exceed this many intervals."""
_OVERDUE_MIN: Final = 256
_PART_OVERHEAD_BYTES: Final = 1024
"""Bytes of a part besides its text: names, numbers and braces."""
_PAGE: Final = 256

_logger = logging.getLogger(__name__)


class CheckpointedView(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        seqnum: its own seqnum.
        first: seqnum of its first part; its own seqnum if it has no parts.
        view: the view that it holds.
    """

    seqnum: SeqNum
    first: SeqNum
    view: ObjectView


class ObjectCheckpoints:
    """Finds and writes the checkpoints of the objects of one log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def newest(self, name: str, bound: SeqNum) -> CheckpointedView | None:
        """Return the last checkpoint at or below `bound`; None: there is none.

        If the last record is a part, its checkpoint is not complete yet, or never will be. Then the
        search continues before the first part. So it may miss the checkpoint of another writer,
        which costs a longer replay.
        """
        tag = checkpoint_tag_of(name)
        try:
            while bound >= 0 and (record := await self._log.read_prev(tag, bound)) is not None:
                command = decode_command(record.data)
                if (found := checkpoint_in(command, name)) is not None:
                    return await self._assemble(record.seqnum, found)
                part = part_in(command, name)
                first = None if part is None else part.first
                bound = min(record.seqnum if first is None else first, record.seqnum) - 1
        except TrimmedError:
            pass
        return None

    async def _assemble(self, seqnum: SeqNum, found: ObjectCheckpoint) -> CheckpointedView | None:
        """Return the checkpoint at `seqnum`; None: its parts were trimmed, because there is a later
        checkpoint.
        """
        if not found.parts:
            return CheckpointedView(seqnum, seqnum, view_of(found))
        texts: list[bytes] = []
        start = found.first
        while start < seqnum and len(texts) < found.parts:
            try:
                page = await self._log.read_range(checkpoint_tag_of(found.name), start, limit=_PAGE)
            except TrimmedError:
                return None
            for record in page:
                part = part_in(decode_command(record.data), found.name)
                if (
                    part is not None
                    and part.part == len(texts)
                    and (found.first == (record.seqnum if part.first is None else part.first))
                ):
                    texts.append(part.text)
            start = page[-1].seqnum + 1 if page else seqnum
        if len(texts) < found.parts:
            return None
        return CheckpointedView(seqnum, found.first, view_of(found, b"".join(texts)))

    async def at_floor(self, name: str, floor: SeqNum) -> ObjectView:
        """Return the object as of the record just below the floor of its sub-stream.

        Usually the checkpoint follows soon after that record. A checkpoint that a collection wrote
        may follow much later.

        The checkpoint was appended before the trim, but a session may see the trim first. Floors
        reach the index early, and reads are answered as of the session's position. So this method
        advances the session to the tail and reads again, before it returns that the object was
        deleted.

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
        kept = await self._as_of_in(page, name, floor) or await self._as_of_alone(name, floor)
        while page and kept is None:
            page = await self._log.read_range(tag_of(name), page[-1].seqnum + 1, limit=_PAGE)
            kept = await self._as_of_in(page, name, floor)
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
            kept = await self._as_of_in(page, name, floor)
            if not page or kept is not None:
                return kept
            start = page[-1].seqnum + 1

    async def _as_of_in(
        self, page: Sequence[Record], name: str, floor: SeqNum
    ) -> ObjectView | None:
        """Return the view of the checkpoint in `page` as of the record below `floor`."""
        for record in page:
            found = checkpoint_in(decode_command(record.data), name)
            if found is not None and found.seqnum == floor - 1:
                kept = await self._assemble(record.seqnum, found)
                if kept is not None:
                    return kept.view
        return None

    async def check_log_not_trimmed(self, floor: SeqNum) -> None:
        """Raise if `floor` is the floor of the whole log.

        Raises:
            TrimmedError: `floor` is the floor of the whole log, not only of one sub-stream.
        """
        await self._log.read_next(None, floor - 1)

    async def append(self, name: str, view: ObjectView) -> CheckpointedView | None:
        """Append a checkpoint of a view; None: the append failed, so later replays take longer.

        The caller's operation has succeeded, so no error is raised. An error that may persist is
        logged as a warning: until it is repaired, reads of the object become slower.
        """
        try:
            return await self._append(name, view)
        except IndilogError as error:
            if not (error.retryable or isinstance(error, OutcomeUnknownError)):
                _logger.warning(
                    "Object %r of log %r gets no checkpoint, so reads of it become slower: %s",
                    name, self._log.name, error,
                )  # fmt: skip
            return None

    async def _append(self, name: str, view: ObjectView) -> CheckpointedView:
        try:
            seqnum = await self._append_head(name, encode_checkpoint(name, view))
        except TooLargeError as error:
            return await self._append_parts(name, view, error.limit)
        return CheckpointedView(seqnum, seqnum, view)

    async def _append_head(self, name: str, data: bytes) -> SeqNum:
        return await self._log.append(data, tags=[tag_of(name), checkpoint_tag_of(name)])

    async def _append_parts(
        self, name: str, view: ObjectView, record_bytes: int
    ) -> CheckpointedView:
        """Append a checkpoint in records of at most `record_bytes` bytes.

        Raises:
            TooLargeError: not even small parts fit into a record.
        """
        assert view.document is not None, "a missing object fits into a record"
        part_bytes = max(1, (record_bytes - _PART_OVERHEAD_BYTES) * 3 // 4)  # base64
        texts = [
            view.document[start : start + part_bytes]
            for start in range(0, len(view.document), part_bytes)
        ]
        first: SeqNum | None = None
        for number, text in enumerate(texts):
            data = encode_part(ObjectCheckpointPart(name, first, number, text))
            seqnum = await self._log.append(data, tags=[checkpoint_tag_of(name)])
            first = seqnum if first is None else first
        assert first is not None, "an object has at least one part"
        head = encode_checkpoint(name, view, parts=len(texts), first=first)
        return CheckpointedView(await self._append_head(name, head), first, view)


def is_due(view: ObjectView) -> bool:
    """Tell whether the writer that produced this view appends a checkpoint.

    A checkpoint is due after the record whose number is a multiple of the object's interval.
    Exactly one writer appends that record. If this writer crashes before it appends the checkpoint,
    the next one is due at the next multiple.
    """
    return view.document is not None and view.age > 0 and view.age % _interval(view) == 0


def is_overdue(view: ObjectView) -> bool:
    """Tell whether a read that replayed the records of this view appends a checkpoint."""
    return view.age > max(_OVERDUE_MIN, _OVERDUE * _interval(view))


def _interval(view: ObjectView) -> int:
    """Return the number of records between two checkpoints of an object."""
    size = len(view.document or b"")
    if size <= SMALL_BYTES:
        return CHECKPOINT_EVERY_SMALL
    return CHECKPOINT_EVERY * -(-size // LARGE_BYTES)
