"""Writes a page of records as JSON text, up to a number of records and a number of bytes.

The routes of `records` use `PageText`.
"""

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
    """Limits on read pages and on appends.

    Attributes:
        page_bytes_max: largest page in bytes. The limit applies to the JSON text, and to the page
            that is read from the log.
        record_bytes_max: largest number of bytes of one record with its aux data.
        batch_records_max: largest number of records in one atomic append.
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
        share: the request's share of the gateway's byte budget.
        limit: largest number of records.
        limits: limits in bytes.

    Attributes:
        last: seqnum of the record that was added last; None: the page is empty.
        may_have_more: whether the page ended at a limit, so that there may be further records.
    """

    def __init__(self, share: ByteShare, limit: int, limits: RecordLimits) -> None:
        self.limit = limit
        self.last: int | None = None
        self.may_have_more = False
        self._share = share
        self._limits = limits
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def is_full(self) -> bool:
        """Whether the page takes no further record."""
        return self.may_have_more

    def add(self, record: Record) -> None:
        """Add a record.

        Raises:
            OverloadedError: the gateway's byte budget has no room for the record.
        """
        part = _encode(record_out(record))
        self._parts.append(part)
        self._size += len(part) + 1
        self._share.take_up_to(self._size)
        self.last = record.seqnum
        is_long = len(self._parts) >= self.limit
        self.may_have_more = is_long or self._size >= self._limits.page_bytes_max

    def add_range(self, records: Iterable[Record]) -> None:
        """Add the records of one page of the log, until this page is full.

        Raises:
            OverloadedError: the gateway's byte budget has no room for the records.
        """
        size = 0
        for record in records:
            self.add(record)
            size += len(record.data) + len(record.names) + len(record.aux or b"")
            if self.is_full:
                return
        # The page of the log may have ended before `limit`, because a further record could have
        # made that page too large.
        self.may_have_more = size + self._limits.record_bytes_max > self._limits.page_bytes_max

    def text(self, next_bound: int | None) -> bytes:
        """Return the page's JSON text; `next_bound` is the bound of the next page (None: there is
        no next page).
        """
        more = b"true" if self.may_have_more and next_bound is not None else b"false"
        bound = b"null" if next_bound is None else b"%d" % next_bound
        return b'{"records":[%b],"next_bound":%b,"more":%b}' % (b",".join(self._parts), bound, more)
