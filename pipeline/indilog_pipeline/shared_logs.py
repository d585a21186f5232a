"""Checks that a log whose records are read from a data directory is of kind `shared`.

The records of logs of other kinds are in cells, and a switched log may have some records there, so
reads of journals would silently return too few (decisions 0082, 0088).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from indilog.base.errors import ConfigError
from indilog.base.ids import SeqNum
from indilog.base.log_kinds import SHARED
from indilog_compute.log_kinds.catalog_records import (
    CATALOG_LOG,
    CatalogRecord,
    Creation,
    SegmentsFreed,
    Switched,
)
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import Filter, read_records

_decoder = msgspec.json.Decoder(CatalogRecord)


def check_shared(image: LogImage, log: str, start: SeqNum, end: SeqNum) -> None:
    """Check that no record at seqnums [start, end) gives a log another kind.

    Raises:
        ConfigError: one does.
        DataLossError, DataDirectoryError, NotReadyError: as `read_records`.
    """
    for found in _catalog_records(image, log, start, end):
        if isinstance(found, Switched | SegmentsFreed):
            raise ConfigError(
                f"Log {log} was switched to another kind; only the records of logs that are of "
                "kind shared from the beginning can be read as files."
            )
        if isinstance(found, Creation) and found.kind != SHARED:
            raise ConfigError(
                f"Log {log} is of kind {found.kind}; only logs of kind shared can be read as files."
            )


def _catalog_records(
    image: LogImage, log: str, start: SeqNum, end: SeqNum
) -> Iterator[CatalogRecord]:
    """Yield the records of the catalog about a log. Almost always there are none, so the data of
    records is read only if there are some.
    """
    wanted = Filter(CATALOG_LOG, log)
    for found in read_records(image, start, end, columns=["seqnum"], wanted=wanted, skip_lost=True):
        for value in found.column("seqnum"):
            seqnum = int(value.as_py())
            [batch] = read_records(image, seqnum, seqnum + 1, columns=["data"], wanted=wanted)
            try:
                yield _decoder.decode(batch.column("data")[0].as_py())
            except msgspec.MsgspecError:
                continue  # the catalog ignores such a record, too
