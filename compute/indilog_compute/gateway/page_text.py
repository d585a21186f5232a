"""A page of records as JSON text, bounded in records and in bytes of text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from indilog.base.log import Record
from indilog.config import Config
from indilog.link.byte_budget import ByteShare
from indilog_compute.gateway.values import record_out

_encode = msgspec.json.Encoder().encode


class RecordLimits(NamedTuple):
    """Limits of what is read and appended.

    Attributes:
        page_bytes_max: bytes of text in a page here, and of data in one that the log gives.
        record_bytes_max: bytes of one record and its aux data.
        batch_records_max: records appended together.
    """

    page_bytes_max: int
    record_bytes_max: int
    batch_records_max: int

    @classmethod
    def of(cls, config: Config) -> RecordLimits:
        """Return the limits of a platform."""
        cluster = config.cluster
        record = cluster.record_bytes_max + cluster.aux_bytes_max
        return cls(config.node.messages.page_bytes_max, record, cluster.batch_records_max)


class PageText:
    """Collects records as JSON.

    Args:
        share: holds the text's bytes.
        limit: records at most.
        limits: of bytes.

    Attributes:
        last: seqnum of the last record that was added; None: there is none.
        may_go_on: whether there may be further records: the page ended at a limit.
    """

    def __init__(self, share: ByteShare, limit: int, limits: RecordLimits) -> None:
        self.limit = limit
        self.last: int | None = None
        self.may_go_on = False
        self._share = share
        self._limits = limits
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def is_full(self) -> bool:
        """Whether no further record is added."""
        return self.may_go_on

    def add(self, record: Record) -> None:
        """Add a record; it may fill the page.

        Raises:
            OverloadedError: the gateway has no room for it.
        """
        part = _encode(record_out(record))
        self._parts.append(part)
        self._size += len(part) + 1
        self._share.take_up_to(self._size)
        self.last = record.seqnum
        is_long = len(self._parts) >= self.limit
        self.may_go_on = is_long or self._size >= self._limits.page_bytes_max

    def add_range(self, records: Iterable[Record]) -> None:
        """Add the records of one page of the log, until this one is full.

        Raises:
            OverloadedError: the gateway has no room for them.
        """
        size = 0
        for record in records:
            self.add(record)
            size += len(record.data) + len(record.names) + len(record.aux or b"")
            if self.is_full:
                return
        # A page of the log ends before the record that would make it too large.
        self.may_go_on = size + self._limits.record_bytes_max > self._limits.page_bytes_max

    def text(self, next_bound: int | None) -> bytes:
        """Return the page; `next_bound` is where to go on."""
        more = b"true" if self.may_go_on and next_bound is not None else b"false"
        bound = b"null" if next_bound is None else b"%d" % next_bound
        return b'{"records":[%b],"next_bound":%b,"more":%b}' % (b",".join(self._parts), bound, more)
