"""A query with `url` retries while the platform restarts; a wrong URL is an error at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

import indilog
from bench.support.servers import free_port
from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.link.remote import RemoteLog
from indilog_pipeline.spark.options import read_options
from tests.cluster.platform_process import platform

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]
_ValueT = TypeVar("_ValueT")
RECORDS = 30


@pytest.mark.repeated("tests/spark/test_platform_restart.py")
def test_a_stream_waits_for_a_platform_that_restarts(tmp_path: Path) -> None:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from indilog_pipeline.spark.streaming import LogStreamReader

    port = free_port()
    url, data = f"http://127.0.0.1:{port}", tmp_path / "data"
    options = read_options({"url": url, "log": "a", "token": "t"})
    with pytest.raises(NotReadyError, match="No platform answers at"):
        LogStreamReader(options, ["data"]).initialOffset()

    async def append() -> None:
        async with indilog.connect(url) as client:
            await client.log("a").append_batch([indilog.Entry(b"%d" % n) for n in range(RECORDS)])

    with platform(data, "--port", str(port)):
        reader = LogStreamReader(read_options({"url": url, "log": "a"}), ["data"])
        start = reader.initialOffset()
        asyncio.run(append())

    def while_it_restarts(call: Callable[[], _ValueT]) -> _ValueT:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(call)
            with pytest.raises(TimeoutError):
                pending.result(timeout=1)
            with platform(data, "--port", str(port)):
                return pending.result(timeout=200)

    end = while_it_restarts(lambda: reader.latestOffset(start, ReadAllAvailable()))
    parts = while_it_restarts(lambda: reader.partitions(start, end))
    found = while_it_restarts(lambda: [row for part in parts for row in reader.read(part)])
    values = [value for batch in found for value in batch.column("data").to_pylist()]
    assert values == [b"%d" % n for n in range(RECORDS)]


def test_a_task_that_writes_waits_and_the_driver_of_a_batch_does_not(tmp_path: Path) -> None:
    import pyarrow as pa

    from indilog_pipeline.spark.writing import LogStreamWriter, LogWriter, write_options

    port = free_port()
    url, data = f"http://127.0.0.1:{port}", tmp_path / "data"
    given = {"url": url, "log": "a", "writer_id": "w"}
    with platform(data, "--port", str(port)):
        batch = write_options(
            given | {"batch": "1"}, [("data", "string")], overwrite=False, streams=False
        )
        stream = write_options(given, [("data", "string")], overwrite=False, streams=True)
    with pytest.raises(NotReadyError, match="No platform answers at"):
        LogWriter(batch)
    writer = LogStreamWriter(stream)
    rows = pa.RecordBatch.from_pydict({"data": ["x"]})
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(writer.write, iter([rows]))
        with pytest.raises(TimeoutError):
            pending.result(timeout=1)
        with platform(data, "--port", str(port)):
            writer.commit([pending.result(timeout=200)], 0)


def test_a_write_whose_outcome_is_unknown_continues_and_writes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart in the middle of an append leaves its outcome unknown."""
    import pyarrow as pa

    from indilog_pipeline.spark.writing import LogStreamWriter, write_options

    real = RemoteLog.append_batch
    batches: list[str] = []

    async def append_batch(
        log: RemoteLog, entries: Sequence[indilog.Entry], *, after: indilog.After | None = None
    ) -> list[int]:
        seqnums = await real(log, entries, after=after)
        batches.append(log.name)
        if batches.count(log.name) == 1:
            raise AppendOutcomeUnknownError("The connection was lost.")
        return seqnums

    async def all_in(url: str) -> list[bytes]:
        async with indilog.connect(url) as client:
            return [record.data for record in await client.log("a").read_range(fresh=True)]

    rows = pa.RecordBatch.from_pydict({"data": ["x", "y"]})
    with platform(tmp_path / "data") as running:
        options = {"url": running.url, "log": "a", "writer_id": "w"}
        writer = LogStreamWriter(
            write_options(options, [("data", "string")], overwrite=False, streams=True)
        )
        monkeypatch.setattr(RemoteLog, "append_batch", append_batch)
        writer.commit([writer.write(iter([rows]))], 0)
        assert asyncio.run(all_in(running.url)) == [b"x", b"y"]
    assert batches == ["a.staged.w", "a.staged.w", "a"]
