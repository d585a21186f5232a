"""How the contract suite reads: plain calls of the interface."""

from __future__ import annotations

from collections.abc import Sequence

from indilog.base.ids import UserTag
from indilog.base.log import Log, Record


def data_of(records: Sequence[Record]) -> list[bytes]:
    return [record.data for record in records]


async def all_of(log: Log, tag: UserTag | None = None) -> list[Record]:
    """Page to the end, which is an empty page according to the interface."""
    found: list[Record] = []
    while page := await log.read_range(tag, found[-1].seqnum + 1 if found else 0):
        found += page
    return found
