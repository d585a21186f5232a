"""The catalog of logs in a backup: which logs of other kinds there are, and its records for a
platform that keeps these logs elsewhere (decision 0094).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from indilog.base.ids import NodeId, log_tag, names_match, pack_tags
from indilog.base.log import Record
from indilog.base.log_kinds import SHARED
from indilog.kernel.cell_layout import CellLayout
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
        layout: its newest layout; None: it is in an object store.
        is_begun: whether the log has reached it. Before, it has no records of the log.
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
        """Apply the catalog's records in the next batch. Their number stands for their seqnum,
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

    def _layout(self, segment: LogSegment) -> CellLayout | None:
        found = self._state.layouts.get(segment.folder)
        return None if found is None else found.layout


def moved_batch(batch: StoredBatch, moved: MovedCatalog) -> StoredBatch:
    """Return a batch, in which the catalog's records are rewritten."""
    if (stored := _catalog_batch(batch)) is None:
        return batch
    changed = {index: moved.rewritten(stored.record(index).data) for index in _rows(stored)}
    return batch._replace(payload=stored.with_data(changed))


def _catalog_batch(batch: StoredBatch) -> RecordBatch | None:
    """Return a batch that may have records of the catalog; None: it has none."""
    tags = batch_header(batch.payload).tags
    if batch.payload.find(_TAG, HEADER_BYTES, HEADER_BYTES + len(_TAG) * tags) < 0:
        return None
    return RecordBatch(batch.payload)


def _rows(batch: RecordBatch) -> list[int]:
    """Return the indexes of the catalog's records in a batch."""
    return [n for n in range(len(batch)) if names_match(batch.names(n), CATALOG_LOG, None)]
