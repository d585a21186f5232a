"""The catalog of logs in a backup: it names the logs of other kinds than `shared` (decision 0094).

`create` reads from the catalog which logs to copy. A restored platform keeps these logs at other
places, so `restore` rewrites the catalog's records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from indilog.base.ids import NodeId, SeqNum, log_tag, names_match, pack_tags, tag_hash
from indilog.base.log import Record
from indilog.base.log_kinds import SHARED
from indilog.kernel.cell_layout import CellLayout
from indilog.kernel.floors import Trimmed
from indilog.kernel.records import HEADER_BYTES, RecordBatch, batch_header
from indilog_compute.log_kinds.catalog_records import CATALOG_LOG, LogCatalogState, MovedCatalog
from indilog_compute.log_kinds.segments import LogSegment
from indilog_pipeline.backup.files import StoredBatch

_TAG: Final = pack_tags(log_tag(CATALOG_LOG))


class OtherSegment(NamedTuple):
    """A segment of another kind than `shared`.

    Attributes:
        log: name of its log.
        segment: the segment.
        layout: the newest layout of the segment; None: the segment is in an object store.
        is_begun: whether the log has reached the segment; until then the segment has no records.
    """

    log: str
    segment: LogSegment
    layout: CellLayout | None
    is_begun: bool


class StoredCatalog:
    """The catalog, as of the batches that were taken."""

    def __init__(self) -> None:
        self._state = LogCatalogState(NodeId(""), lambda _: None)
        self._taken = 0

    def take(self, batch: StoredBatch) -> None:
        """Apply the catalog's records in the next batch. A running number replaces their seqnums,
        because only their order matters here.
        """
        if (stored := _catalog_batch(batch)) is None:
            return
        for index in _rows(stored):
            raw = stored.record(index)
            self._state.take(Record(self._taken, raw.names, raw.data, 0.0, 0.0), 0)
            self._taken += 1

    def segments(self) -> Iterator[OtherSegment]:
        """Yield all segments of other kinds, log by log in order."""
        for name, state in sorted(self._state.logs.items()):
            for segment in state.segments:
                if segment.kind != SHARED:
                    yield OtherSegment(name, segment, self._layout(segment), is_begun=True)
            if state.switch is not None and state.switch.kind != SHARED:
                following = state.switch.segment(name, bridge=0)
                yield OtherSegment(name, following, self._layout(following), is_begun=False)

    def freed_since(self, floors: Trimmed, tail: SeqNum) -> str | None:
        """Return a log whose segments were freed after the catalog was taken; None: there is none.

        Args:
            floors: floors that were read later.
            tail: all records of the catalog are below.
        """
        for name in sorted(self._state.logs):
            if floors.tags.of(tag_hash(CATALOG_LOG, name)) >= tail:
                return name
        return None

    def _layout(self, segment: LogSegment) -> CellLayout | None:
        found = self._state.layouts.get(segment.folder)
        return None if found is None else found.layout


def moved_batch(batch: StoredBatch, moved: MovedCatalog) -> StoredBatch:
    """Return the batch with rewritten records of the catalog."""
    if (stored := _catalog_batch(batch)) is None:
        return batch
    changed = {index: moved.rewritten(stored.record(index).data) for index in _rows(stored)}
    return batch._replace(payload=stored.with_data(changed))


def _catalog_batch(batch: StoredBatch) -> RecordBatch | None:
    """Return the decoded batch if it may have records of the catalog; None: it has no such
    record.
    """
    tags = batch_header(batch.payload).tags
    if batch.payload.find(_TAG, HEADER_BYTES, HEADER_BYTES + len(_TAG) * tags) < 0:
        return None
    return RecordBatch(batch.payload)


def _rows(batch: RecordBatch) -> list[int]:
    """Return the indexes of the catalog's records in a batch."""
    return [n for n in range(len(batch)) if names_match(batch.names(n), CATALOG_LOG, None)]
