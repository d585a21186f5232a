"""Reads that a compute node answers at once (ARCHITECTURE 9.1).

A read is answered at once if the local index proves the answer, the record cache has the record,
and the record is not trimmed. `Engine.read` calls `LocalReads` first, and passes all other reads to
`Reads`.
"""

from __future__ import annotations

from indilog.base.ids import EMPTY_TAG, SeqNum, TagHash
from indilog.base.log import Record
from indilog.wire.messages import Direction
from indilog_compute.local_index import Empty, Found, LocalIndex
from indilog_compute.reads.log_floors import LogFloors
from indilog_compute.reads.operation import PENDING, Pending
from indilog_compute.reads.record_cache import RecordCache


class LocalReads:
    """Answers reads from the local index, the record cache and the floors together."""

    __slots__ = ("_cache", "_floors")

    def __init__(self, cache: RecordCache, floors: LogFloors) -> None:
        self._cache = cache
        self._floors = floors

    def answer(
        self, local: LocalIndex, direction: Direction, tag: TagHash, log: TagHash, bound: SeqNum
    ) -> Record | Pending | None:
        """Return the record, or None if it is proven that there is none. Return `PENDING` if other
        nodes must be asked.

        Raises:
            TrimmedError: the bound is trimmed, or every record that the read could find is trimmed.
        """
        if direction is Direction.NEXT:
            answer = local.find_next(tag, bound)
        else:
            answer = local.find_prev(tag, bound)
        if isinstance(answer, Found):
            seqnum = answer.seqnum
            if tag == EMPTY_TAG and log and seqnum != bound:
                return PENDING  # the record at the bound was trimmed
            if self._floors.permit(direction, tag, log, bound, seqnum):
                return self.cached(tag, log, seqnum) or PENDING
        elif isinstance(answer, Empty) and self._floors.permit(direction, tag, log, bound, None):
            return None
        return PENDING

    def cached(self, tag: TagHash, log: TagHash, seqnum: SeqNum) -> Record | None:
        """Return a record from the cache; None: it is not cached, or may be dead.

        All tags of a record may have been trimmed since the record was cached. Lookups by these
        tags do not find the record. Reads of the whole log would find it, so they check its tags.
        """
        record = self._cache.get(seqnum)
        if record is None or tag not in (EMPTY_TAG, log):
            return record
        return None if self._floors.may_be_dead(seqnum, record.names) else record
