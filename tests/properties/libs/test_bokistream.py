"""Streams under crashes, slow appends and lost answers, against evidence that the test collects.

Each writer and reader is a process of its own; the stepper decides which one makes the next call of
the log. A call may crash its process, lose its answer, or take effect long after the answer was
given up. The checks use only the answers that writers and readers got.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest

from bokistream import (
    Catalog,
    FencedError,
    MatchFailedError,
    StreamRecord,
    Streams,
    StreamTrimmedError,
    streams,
)
from bokistream.appender import Appender
from bokistream.appending import _Batch
from bokistream.catalog import catalog_replica
from bokistream.chain import EffectCheck
from bokistream.records import StreamEntry, decode_entry
from bokistream.truncation import TruncationPoint, truncation_point
from indilog.base.errors import AppendOutcomeUnknownError, IndilogError, NotReadyError
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import After, Entry, Log, Record, Session
from indilog.testing import MemoryLogs
from indilog.testing.stepper import SteppedLog, run_stepped

SEEDS = 250
WRITERS = 3
BATCHES = 4


class Crashed(BaseException):
    """The process ended during a call."""


class Faults:
    """What may go wrong, in the order of a seed.

    Attributes:
        late: appends whose answer was given up and that have not taken effect yet.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.late: list[Callable[[], object]] = []
        self.are_on = True

    def deliver(self) -> None:
        """Let late appends take effect, perhaps."""
        while self.late and self.chance.random() < 0.3:
            self.late.pop(self.chance.randrange(len(self.late)))()


class FaultyLog(SteppedLog):
    """A log whose appends crash, get no answer, or take effect late."""

    def __init__(self, logs: MemoryLogs, faults: Faults, *, may_crash: bool) -> None:
        self.real = logs.log("work", Session())
        super().__init__(self.real)
        self.faults = faults
        self.may_crash = may_crash

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        return (await self.append_batch([Entry(data, tuple(tags))]))[0]

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        self.faults.deliver()
        draw = self.faults.chance.random() if self.faults.are_on else 1.0
        if draw < 0.08:
            raise NotReadyError("The platform is starting.")
        if draw < 0.16:
            self._append_late(entries)
            raise AppendOutcomeUnknownError("No answer came.")
        if draw < 0.22:
            await super().append_batch(entries, after=after)
            raise AppendOutcomeUnknownError("The answer was lost.")
        if draw < 0.26 and self.may_crash:
            if self.faults.chance.random() < 0.5:
                self._append_late(entries)
            raise Crashed
        return await super().append_batch(entries, after=after)

    def _append_late(self, entries: Sequence[Entry]) -> None:
        checked = [self.real._checked(entry.data, entry.tags)[:2] for entry in entries]
        self.faults.late.append(lambda: self.real.logs.append_all(checked))


@dataclass
class Evidence:
    """The answers that writers and readers got."""

    acknowledged: dict[SeqNum, tuple[bytes, SeqNum]] = field(default_factory=dict)
    """By seqnum: data and fencing token."""
    refused: list[bytes] = field(default_factory=list)
    tokens: list[SeqNum] = field(default_factory=list)
    conditions: list[tuple[SeqNum, SeqNum]] = field(default_factory=list)
    """Seqnums of records appended with a condition, and of the record that it named."""
    reads: list[list[StreamRecord]] = field(default_factory=list)


def streams_of(log: FaultyLog) -> Streams:
    return Streams(log, catalog=Catalog(log, catalog_replica()))


async def write(log: FaultyLog, mark: str, evidence: Evidence) -> None:
    """Take the stream over, and append until fenced or crashed."""
    chance = log.faults.chance
    try:
        async with streams_of(log).writer("s", heartbeat_s=None) as writer:
            evidence.tokens.append(writer.token)
            for number in range(BATCHES):
                datas = [f"{mark}.{number}.{n}".encode() for n in range(chance.randint(1, 3))]
                named = (await streams_of(log).last("s")).seqnum if chance.random() < 0.3 else None
                try:
                    places = await writer.append_many(
                        datas, txid=writer.last_txid + number, match_seqnum=named
                    )
                except AppendOutcomeUnknownError:
                    return  # the program cannot know what became of the records
                except FencedError:
                    evidence.refused += datas
                    return
                except IndilogError as error:
                    evidence.refused += datas
                    assert_refused(error)
                    continue
                if named is not None:
                    evidence.conditions.append((places[0], named))
                for place, data in zip(places, datas, strict=True):
                    evidence.acknowledged[place] = data, writer.token
    except (Crashed, IndilogError):
        return


def assert_refused(error: IndilogError) -> None:
    assert isinstance(error, MatchFailedError) or error.retryable, error


async def follow(log: FaultyLog, evidence: Evidence) -> None:
    """Read the stream repeatedly from its start."""
    for _ in range(3):
        records: list[StreamRecord] = []
        evidence.reads.append(records)
        try:
            async for record in streams_of(log).read("s"):
                records.append(record)  # noqa: PERF401 - a prefix is evidence, too
        except IndilogError:
            continue


async def truncate(log: FaultyLog) -> None:
    """Truncate the stream at random places, and trim it at once."""
    for _ in range(3):
        try:
            stream = streams_of(log)
            last = await stream.last("s")
            await stream.truncate("s", before_seqnum=log.faults.chance.randint(0, last.record + 2))
        except IndilogError:
            continue


def run(seed: int) -> None:
    """Run the processes of a seed, and check the evidence; those of every third seed truncate."""
    chance = random.Random(seed)
    logs, faults, evidence = MemoryLogs(), Faults(chance), Evidence()
    faults.are_on = False
    setup = FaultyLog(logs, faults, may_crash=False)
    run_stepped([streams_of(setup).create("s")], lambda ready: ready[0])
    faults.are_on = True
    running = [
        write(FaultyLog(logs, faults, may_crash=True), f"w{n}", evidence) for n in range(WRITERS)
    ]
    running += [follow(FaultyLog(logs, faults, may_crash=False), evidence) for _ in range(2)]
    if seed % 3 == 0:
        running.append(truncate(FaultyLog(logs, faults, may_crash=False)))
    run_stepped(running, chance.choice)
    faults.are_on = False
    for late in faults.late:
        late()
    check(logs, faults, evidence)


def read_all(logs: MemoryLogs, faults: Faults, **at: int) -> list[StreamRecord]:
    async def read() -> list[StreamRecord]:
        log = FaultyLog(logs, faults, may_crash=False)
        return [record async for record in streams_of(log).read("s", **at)]  # type: ignore[arg-type]

    return run_stepped([read()], lambda ready: ready[0])[0]


def start_of(logs: MemoryLogs, faults: Faults) -> SeqNum:
    """Return the seqnum below which the stream is truncated."""
    info = streams_of(FaultyLog(logs, faults, may_crash=False)).info("s")
    return run_stepped([info], lambda ready: ready[0])[0].start


def check(logs: MemoryLogs, faults: Faults, evidence: Evidence) -> None:
    final = read_all(logs, faults)
    start = start_of(logs, faults)
    read = {record.seqnum: record.data for record in final}
    for seqnum, (data, token) in evidence.acknowledged.items():
        assert read.get(seqnum) == (data if seqnum >= start else None), "acknowledged is read"
        later = [other for other in evidence.tokens if token < other < seqnum]
        assert not later, f"the writer {token} was fenced by {later} before {seqnum}"
    datas = [record.data for record in final]
    assert len(set(datas)) == len(datas), "no record is read twice"
    assert not set(datas) & set(evidence.refused), "a refused record is never read"
    first = final[0].offset if final else 0
    assert first == 0 or start > 0
    assert [record.offset for record in final] == list(range(first, first + len(final)))
    txids = [record.txid for record in final]
    assert txids == sorted(txids), "transaction ids never decrease"
    seqnums = [record.seqnum for record in final]
    for seqnum, named in evidence.conditions:
        if named >= start or start == 0:
            place = seqnums.index(seqnum)
            assert (seqnums[place - 1] if place else -1) == named, "the condition held"
    ever = {record.seqnum: record for records in evidence.reads for record in records}
    for records in [*evidence.reads, final]:
        assert all(ever.get(record.seqnum, record) == record for record in records)
        offsets = [record.offset for record in records]
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets)) if offsets else [])
    missing = [record for record in ever.values() if record.seqnum >= start]
    assert set(missing) <= set(final), "a reader got what no later reader gets"
    assert not {record.data for record in ever.values()} & set(evidence.refused)
    for record in final:  # a reader may begin anywhere
        assert read_all(logs, faults, from_seqnum=record.seqnum)[:1] == [record]
        assert read_all(logs, faults, from_offset=record.offset)[:1] == [record]


@pytest.mark.parametrize("part", range(5))
def test_acknowledged_is_what_all_readers_get(part: int) -> None:
    for seed in range(part * SEEDS // 5, (part + 1) * SEEDS // 5):
        try:
            run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def caught() -> bool:
    """Return whether a seed detects the planted bug."""
    for seed in range(SEEDS):
        try:
            run(seed)
        except (AssertionError, StreamTrimmedError):
            return True
    return False


def test_a_writer_that_is_not_fenced_is_caught() -> None:
    with mock.patch.object(Appender, "check"):
        assert caught()


def test_a_reader_of_records_without_effect_is_caught() -> None:
    def entry_of(_: EffectCheck, record: Record) -> StreamEntry | None:
        return decode_entry(record.data)

    with mock.patch.object(EffectCheck, "entry_of", entry_of):
        assert caught()


def test_an_append_that_is_not_checked_is_caught() -> None:
    async def has_effect(self: _Batch) -> bool | None:
        return None if self.place is None else True

    with mock.patch.object(_Batch, "has_effect", has_effect):
        assert caught()


def test_a_trim_inside_a_batch_is_caught() -> None:
    async def inside(log: Log, tag: str, name: str, bound: SeqNum) -> TruncationPoint:
        point = await truncation_point(log, tag, name, bound)
        return point._replace(anchor=point.start)

    with mock.patch.object(streams, "truncation_point", inside):
        assert caught()
