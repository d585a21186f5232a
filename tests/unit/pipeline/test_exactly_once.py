"""Each record of a batch is written once, wherever the programs that write it end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indilog import Entry, Log
from indilog.base.errors import ConfigError
from indilog.testing import MemoryLogs
from indilog.testing.stepper import SteppedLog, run_stepped
from indilog_pipeline.spark.exactly_once import (
    CHUNK_BYTES,
    CHUNK_RECORDS,
    BatchCommit,
    StagedChunk,
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


def commit_of(logs: MemoryLogs | Crashing, batch: int) -> BatchCommit:
    return BatchCommit(
        logs.log(staging_log("target", "w")),
        logs.log("target"),
        writer="w",
        batch=batch,
    )


async def write(logs: MemoryLogs | Crashing, batch: int, records: list[Entry]) -> bool:
    staging = logs.log(staging_log("target", "w"))
    chunks = [await stage(staging, chunk) for chunk in chunks_of(records)]
    return await commit_of(logs, batch).run(chunks)


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
        for calls, after in crashes:
            program = Crashing(logs, calls, after=after)
            try:
                for batch in range(3):
                    await write(program, batch, RECORDS)
            except CrashedError:
                continue
        for batch in range(3):
            await write(logs, batch, RECORDS)
        assert await written(logs) == [entry.data for entry in RECORDS] * 3

    asyncio.run(run())


def test_the_first_marker_counts() -> None:
    """A restarted query may stage its records in another order; those marked first are written."""

    async def run() -> None:
        logs = MemoryLogs()
        with pytest.raises(CrashedError):  # after its marker, and before its first chunk
            await write(Crashing(logs, 9, after=False), 0, RECORDS)
        assert await logs.log(staging_log("target", "w")).read_next("marker:0")
        assert not await written(logs)
        await write(logs, 0, RECORDS[::-1])
        assert await written(logs) == [entry.data for entry in RECORDS]

    asyncio.run(run())


def names_staging(call: Call) -> bool:
    log = getattr(call, "__self__", None)
    return isinstance(log, Log) and log.name != "target"


async def crash() -> None:
    raise CrashedError


class Overtaken(Crashing):
    """A program that is paused before its append number `append` to the target.

    It has checked how far the batch is published. Meanwhile other programs run.
    """

    def __init__(
        self, logs: MemoryLogs, append: int, meanwhile: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(logs, 0, after=False)
        self._appends_left = append
        self._meanwhile = meanwhile

    async def call(self, real: Call, *given: object, **named: object) -> object:
        if getattr(real, "__name__", "") == "append_batch" and not names_staging(real):
            if self._appends_left == 0:
                await self._meanwhile()
            self._appends_left -= 1
        return await real(*given, **named)


@pytest.mark.parametrize("append", [0, 1, 2])
def test_a_program_that_pauses_between_check_and_append_publishes_nothing_twice(
    append: int,
) -> None:
    async def run() -> None:
        logs = MemoryLogs()
        chunks = [await stage(logs.log("target.staged.w"), c) for c in chunks_of(RECORDS)]
        paused = Overtaken(logs, append, lambda: commit_of(logs, 0).run(chunks))
        await commit_of(paused, 0).run(chunks)
        assert await written(logs) == [entry.data for entry in RECORDS]

    asyncio.run(run())


def test_a_program_that_pauses_while_further_batches_are_written_publishes_nothing() -> None:
    async def run() -> None:
        logs = MemoryLogs()
        chunks = [await stage(logs.log("target.staged.w"), c) for c in chunks_of(RECORDS)]

        async def others() -> None:
            assert await commit_of(logs, 0).run(chunks)
            assert await write(logs, 1, RECORDS[:7])

        assert not await commit_of(Overtaken(logs, 1, others), 0).run(chunks)
        assert await written(logs) == [entry.data for entry in RECORDS + RECORDS[:7]]

    asyncio.run(run())


def test_a_program_that_pauses_while_the_target_is_trimmed_publishes_nothing() -> None:
    async def run() -> None:
        logs = MemoryLogs()
        chunks = [await stage(logs.log("target.staged.w"), c) for c in chunks_of(RECORDS)]
        target = logs.log("target")

        async def others() -> None:
            assert await commit_of(logs, 0).run(chunks)
            await target.trim(await target.tail())

        assert not await commit_of(Overtaken(logs, 1, others), 0).run(chunks)
        bound = await target.tail()
        assert not await target.read_range(bound=bound)
        assert await write(logs, 1, RECORDS[:7])
        page = await target.read_range(bound=bound)
        assert [record.data for record in page] == [entry.data for entry in RECORDS[:7]]

    asyncio.run(run())


def test_a_late_marker_of_a_finished_batch_does_not_count() -> None:
    """A paused program has staged the batch in another order, in more chunks."""

    async def run() -> None:
        logs = MemoryLogs()
        more = [await stage(logs.log("target.staged.w"), [entry]) for entry in RECORDS[:5]]

        class BeforeItsMarker(Crashing):
            async def call(self, real: Call, *given: object, **named: object) -> object:
                if named.get("tags") == ["marker:0"]:
                    assert await write(logs, 0, RECORDS[:5])
                return await real(*given, **named)

        assert not await commit_of(BeforeItsMarker(logs, 0, after=False), 0).run(more)
        assert await written(logs) == [entry.data for entry in RECORDS[:5]]

    asyncio.run(run())


def test_a_batch_below_one_that_was_never_finished_is_written() -> None:
    async def run() -> None:
        logs = MemoryLogs()
        with pytest.raises(CrashedError):
            await write(Overtaken(logs, 1, crash), 9, RECORDS)
        published = await written(logs)
        assert 0 < len(published) < len(RECORDS)
        assert await write(logs, 2, RECORDS[:3])
        assert await written(logs) == published + [entry.data for entry in RECORDS[:3]]

    asyncio.run(run())


def test_programs_that_write_different_batches_at_once_get_an_error() -> None:
    async def run() -> None:
        logs = MemoryLogs()
        chunks = [await stage(logs.log("target.staged.w"), c) for c in chunks_of(RECORDS)]

        async def later_batch() -> None:
            with pytest.raises(CrashedError):
                await write(Overtaken(logs, 1, crash), 1, RECORDS)

        with pytest.raises(ConfigError, match="a writer_id of its own"):
            await commit_of(Overtaken(logs, 1, later_batch), 0).run(chunks)

    asyncio.run(run())


@given(st.integers(0, 2**32))
@example(33_554_433)  # one program trims twice while another one looks for the end
def test_programs_that_run_side_by_side_write_each_record_once(seed: int) -> None:
    """Three programs commit the same batches; the seed says whose call is next."""
    records, logs, chance = RECORDS[: CHUNK_RECORDS + 3], MemoryLogs(), random.Random(seed)

    async def program() -> None:
        staging = SteppedLog(logs.log("target.staged.w"))
        target = SteppedLog(logs.log("target"))
        for batch in range(2):
            chunks = [await stage(staging, chunk) for chunk in chunks_of(records)]
            await BatchCommit(staging, target, writer="w", batch=batch).run(chunks)

    run_stepped([program() for _ in range(3)], chance.choice)
    assert asyncio.run(written(logs)) == [entry.data for entry in records] * 2


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
        assert isinstance(chunk, StagedChunk)
        await write(logs, 0, [largest])
        assert await written(logs) == [largest.data]

    asyncio.run(run())


def test_a_writers_name_has_no_colon() -> None:
    with pytest.raises(ConfigError, match="writer_id is 1 to 64 bytes of text without a colon"):
        staging_log("log", "a:1")
