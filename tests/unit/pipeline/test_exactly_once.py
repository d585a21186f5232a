"""Each record of a batch is written once, wherever the programs that write it end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog import Entry, Log
from indilog.base.errors import ConfigError
from indilog.testing import MemoryLogs
from indilog_pipeline.spark.exactly_once import (
    CHUNK_BYTES,
    CHUNK_RECORDS,
    BatchCommit,
    Chunk,
    WriterFencedError,
    chunks_of,
    stage,
    staging_log,
)

Call: TypeAlias = Callable[..., Awaitable[object]]
RECORDS = [Entry(b"%d" % n, ["even"] if n % 2 == 0 else []) for n in range(CHUNK_RECORDS * 2 + 5)]


class CrashedError(Exception):
    """The program ended here."""


class Crashing:
    """Logs of a program that ends at its call number `calls`: before it, or after its effect."""

    def __init__(self, logs: MemoryLogs, calls: int, *, after: bool) -> None:
        self._logs = logs
        self._left = calls
        self._after = after

    def log(self, name: str) -> Log:
        return cast("Log", _CrashingLog(self, self._logs.log(name)))

    async def call(self, real: Call, *given: object, **named: object) -> object:
        if self._left == 0:
            if self._after:
                await real(*given, **named)
            raise CrashedError
        self._left -= 1
        return await real(*given, **named)


class _CrashingLog:
    def __init__(self, program: Crashing, log: Log) -> None:
        self._program = program
        self._log = log

    def __getattr__(self, name: str) -> Call:
        real = getattr(self._log, name)
        return lambda *given, **named: self._program.call(real, *given, **named)


def commit_of(logs: MemoryLogs | Crashing, batch: int, owner: bytes = b"x") -> BatchCommit:
    return BatchCommit(
        logs.log(staging_log("target", "w")),
        logs.log("target"),
        writer="w",
        batch=batch,
        owner=owner,
    )


async def write(
    logs: MemoryLogs | Crashing, batch: int, records: list[Entry], owner: bytes = b"x"
) -> bool:
    staging = logs.log(staging_log("target", "w"))
    chunks = [await stage(staging, chunk) for chunk in chunks_of(records)]
    return await commit_of(logs, batch, owner).run(chunks)


async def written(logs: MemoryLogs) -> list[bytes]:
    log, found = logs.log("target"), list[bytes]()
    bound = 0
    while page := await log.read_range(bound=bound):
        found += [record.data for record in page]
        bound = page[-1].seqnum + 1
    return found


def test_batches_are_ordinary_records_with_their_tags() -> None:
    async def run() -> None:
        logs = MemoryLogs()
        assert await write(logs, 0, RECORDS)
        assert await write(logs, 1, [Entry(b"last", ["odd"])])
        assert await written(logs) == [*(entry.data for entry in RECORDS), b"last"]
        even = await logs.log("target").read_range("even", limit=10_000)
        assert [record.data for record in even] == [e.data for e in RECORDS if e.tags]
        assert even[0].tags == ("even",)

    asyncio.run(run())


def test_a_batch_that_was_finished_is_not_written_again() -> None:
    async def run() -> None:
        logs = MemoryLogs()
        assert await write(logs, 4, RECORDS)
        assert not await write(logs, 4, RECORDS)
        assert not await write(logs, 3, RECORDS)
        assert await write(logs, 5, [])
        assert len(await written(logs)) == len(RECORDS)

    asyncio.run(run())


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=4))
def test_programs_that_crash_anywhere_write_each_record_once(
    crashes: list[tuple[int, bool]],
) -> None:
    """Each program repeats the unfinished batch, as a restarted query does."""

    async def run() -> None:
        logs = MemoryLogs()
        for number, (calls, after) in enumerate(crashes):
            program = Crashing(logs, calls, after=after)
            try:
                for batch in range(3):
                    await write(program, batch, RECORDS, owner=b"%d" % number)
            except CrashedError:
                continue
        for batch in range(3):
            await write(logs, batch, RECORDS, owner=b"end")
        assert await written(logs) == [entry.data for entry in RECORDS] * 3

    asyncio.run(run())


def test_the_first_marker_counts() -> None:
    """A restarted query may stage its records in another order; those marked first are written."""

    async def run() -> None:
        logs = MemoryLogs()
        with pytest.raises(CrashedError):  # after its marker, and before its first chunk
            await write(Crashing(logs, 8, after=False), 0, RECORDS)
        assert await logs.log(staging_log("target", "w")).read_next("marker:0")
        assert not await written(logs)
        await write(logs, 0, RECORDS[::-1])
        assert await written(logs) == [entry.data for entry in RECORDS]

    asyncio.run(run())


def test_a_program_that_another_one_has_overtaken_stops() -> None:
    async def run() -> None:
        logs = MemoryLogs()
        staging = logs.log(staging_log("target", "w"))
        chunks = [await stage(staging, chunk) for chunk in chunks_of(RECORDS)]

        class Overtaken(Crashing):
            """It is paused before it looks whether it may publish its second chunk."""

            async def call(self, real: Call, *given: object, **named: object) -> object:
                if given[:1] == ("claim",) and (await written(logs)):
                    await commit_of(logs, 0, b"new").run(chunks)
                return await real(*given, **named)

        with pytest.raises(WriterFencedError):
            await commit_of(Overtaken(logs, 0, after=False), 0, b"old").run(chunks)
        assert await written(logs) == [entry.data for entry in RECORDS]

    asyncio.run(run())


def test_chunks_are_bounded_in_records_and_bytes() -> None:
    sizes = [len(chunk) for chunk in chunks_of(RECORDS)]
    assert sizes == [CHUNK_RECORDS, CHUNK_RECORDS, 5]
    large = [Entry(bytes(CHUNK_BYTES // 2))] * 5
    assert [len(chunk) for chunk in chunks_of(large)] == [2, 2, 1]


def test_a_record_of_the_largest_size_is_staged() -> None:
    async def run() -> None:
        logs = MemoryLogs()
        largest = Entry(b"x" * 1024 * 1024, ["t"] * 10)
        chunk = await stage(logs.log("s"), [largest])
        assert chunk.pieces > 1
        assert isinstance(chunk, Chunk)
        await write(logs, 0, [largest])
        assert await written(logs) == [largest.data]

    asyncio.run(run())


def test_a_writers_name_has_no_colon() -> None:
    with pytest.raises(ConfigError, match="writer_id is 1 to 64 bytes of text without a colon"):
        staging_log("log", "a:1")
