"""Pages of a log, and the gaps between them, without a platform."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import pytest

from indilog import Entry, Log
from indilog.base.errors import DataLossError
from indilog_pipeline.spark import platform_reads
from indilog_pipeline.spark.connection import BlockingConnection
from indilog_pipeline.spark.options import read_options
from indilog_pipeline.spark.reading import Found, Gap, LogReads, ReadPart
from indilog_pipeline.spark.tasks import GapError, read_part
from tests.support.damaged_log import DamagedLogs

_ValueT = TypeVar("_ValueT")
RECORDS = 30
OPTIONS = {"url": "http://127.0.0.1:1", "log": "log"}


class Local:
    """Asks logs of this process, as a connection asks a platform."""

    def ask(self, call: Callable[[], Coroutine[Any, Any, _ValueT]]) -> _ValueT:
        return asyncio.run(call())


def pages(log: Log, start: int, end: int, limit: int = 4) -> list[list[int] | tuple[str, int, int]]:
    found = platform_reads._pages(
        cast("BlockingConnection", Local()), log, None, start, end, limit=limit
    )
    return [
        (page.kind, page.start, page.end)
        if isinstance(page, Gap)
        else [record.seqnum for record in page]
        for page in found
    ]


def damaged(*lost: int, floor: int = 0) -> Log:
    logs = DamagedLogs()
    log = logs.log("log")

    async def fill() -> None:
        await log.append_batch([Entry(b"%d" % n) for n in range(RECORDS)])
        await log.trim(floor)

    asyncio.run(fill())
    logs.lost = set(lost)
    return log


def test_pages_end_where_the_range_ends() -> None:
    assert pages(damaged(), 3, 10) == [[3, 4, 5, 6], [7, 8, 9]]
    assert pages(damaged(), 28, 40) == [[28, 29]]


def test_lost_and_trimmed_records_are_gaps() -> None:
    assert pages(damaged(9, 10, floor=7), 2, 14) == [
        ("trimmed", 2, 7),
        [7, 8],
        ("lost", 9, 11),
        [11, 12, 13],
    ]


def test_a_gap_is_cut_to_the_range() -> None:
    assert pages(damaged(9, 10, 11), 4, 10) == [[4, 5, 6, 7], [8], ("lost", 9, 10)]
    assert pages(damaged(floor=20), 4, 10) == [("trimmed", 4, 10)]


def test_a_batch_has_at_least_one_record_and_not_too_many() -> None:
    log = damaged(3)
    for records_max, bytes_max, end in (
        (2, None, 2), (1, None, 1), (None, 3, 4), (None, 1, 1), (3, 100, 4), (100, 100, 30),
    ):  # fmt: skip
        found = platform_reads._pages(cast("BlockingConnection", Local()), log, None, 0, RECORDS)
        assert platform_reads._end_within(found, RECORDS, records_max, bytes_max) == end


class Gaps:
    """Reads that find one gap."""

    def batches(self, *_given: object) -> list[Found]:
        return [Gap("lost", 4, 6, DataLossError("Two records have no copy.", next_seqnum=6))]


def test_a_gap_is_an_error_or_counted_or_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    reads, part = cast("LogReads", Gaps()), ReadPart(0, 10)
    with pytest.raises(GapError, match=r"\[4, 6\) are lost: Two records have no copy\. Option on_"):
        list(read_part(reads, part, read_options(OPTIONS), ["seqnum"]))
    skipping = read_options(OPTIONS | {"on_loss": "skip"})
    assert list(read_part(reads, part, skipping, ["seqnum"])) == []
    assert "indilog: skipped 2 lost seqnums in [4, 6)" in capsys.readouterr().err
    (rows,) = read_part(reads, part, read_options(OPTIONS | {"rows": "gaps"}), ["kind", "end"])
    assert rows.to_pylist() == [{"kind": "lost", "end": 6}]
