"""A replica derives one state in every process, from any start."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Sequence
from typing import Final

import msgspec
import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    DataLossError,
    IndilogError,
    NotReadyError,
    TrimmedError,
)
from indilog.base.ids import SeqNum
from indilog.base.log import Entry, Record
from indilog.config import ClusterConfig
from indilog.replayed import Replica, ReplicaCache, State, SubStream
from indilog.replayed import checkpoints as checkpoints_module
from indilog.replayed.checkpoints import Checkpoint, append_checkpoint
from indilog.sdk import MAX_SEQNUM, RecordFormat
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.damaged_log import DamagedLogs
from tests.support.hooked_log import HookedLog, Read
from tests.support.lagging_log import Behind

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
EVERY: Final = 4
STREAM: Final = SubStream(
    "words", "words:checkpoint", RecordFormat(b"\xb0W", 1, of="a test", error=IndilogError), "Words"
)


class Words(State[int]):
    """How often each word was appended; the outcome is the count after the record."""

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self.counts = counts or {}

    def apply(self, record: Record) -> int:
        word = record.data.decode()
        self.counts[word] = self.counts.get(word, 0) + 1
        return self.counts[word]

    def snapshot(self) -> object:
        return dict(self.counts)

    @property
    def size(self) -> int:
        return len(self.counts)


def words(every: int = EVERY) -> Replica[Words, int]:
    def restore(content: bytes) -> Words:
        return Words(msgspec.msgpack.decode(content, type=dict[str, int]))

    return Replica(STREAM, Words, restore, checkpoint_every=every)


async def write(log: MemoryLog, replica: Replica[Words, int], text: str) -> list[int]:
    """Append each letter as a word, with checkpoints when they are due."""
    outcomes = []
    for letter in text:
        outcomes.append(await replica.append(log, letter.encode()))
        if replica.is_save_due:
            await replica.save(log)
    return outcomes


async def counts_at(log: MemoryLog) -> dict[str, int]:
    """Return the state of a process that knows nothing."""
    replica = words()
    await replica.catch_up(log)
    return replica.state.counts


async def test_an_append_returns_what_its_record_did() -> None:
    log, replica, other = MemoryLog("work"), words(), words()
    assert await write(log, replica, "aab") == [1, 2, 1]
    assert await other.append(log, b"a") == 3
    assert await replica.append_batch(log, [Entry(b"a"), Entry(b"b")]) == [4, 2]


async def test_a_new_process_starts_from_a_checkpoint_after_a_trim() -> None:
    log, replica = MemoryLog("work"), words()
    await write(log, replica, "abcabcabcabcabc")
    with pytest.raises(TrimmedError):
        await log.read_range("words", 0)
    assert await counts_at(log) == dict.fromkeys("abc", 5)


async def test_one_process_writes_each_checkpoint() -> None:
    log, replicas = MemoryLog("work"), [words(), words()]
    due = []
    for turn in range(4 * EVERY):
        replica = replicas[turn % 2]
        await replica.append(log, b"x")
        due.append(sum(r.is_save_due for r in replicas))
        if replica.is_save_due:
            await replica.save(log)
    assert sum(due) == 4
    assert max(due) == 1


async def test_a_large_checkpoint_is_several_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_module, "PART_BYTES", 1024)
    log, replica = MemoryLog("work"), words()
    for number in range(600):
        await replica.append(log, b"word %d" % number)
    await replica.save(log)
    await replica.append(log, b"word 0")
    await replica.save(log)
    with pytest.raises(TrimmedError):
        await log.read_range("words", 0)
    assert len(await counts_at(log)) == 600


async def test_a_part_that_no_record_of_the_log_holds_is_made_smaller() -> None:
    logs = MemoryLogs(ClusterConfig(record_bytes_max=4096))
    log, replica = logs.log("work"), words()
    for number in range(600):
        await replica.append(log, b"word %d" % number)
    await replica.save(log)
    await replica.append(log, b"word 0")
    await replica.save(log)
    with pytest.raises(TrimmedError):
        await log.read_range("words", 0)
    assert (await counts_at(log))["word 0"] == 2


async def test_an_incomplete_checkpoint_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its author crashed between two parts."""
    monkeypatch.setattr(checkpoints_module, "PART_BYTES", 512)

    class Failing(HookedLog):
        appends_left = 10**9

        async def before_append(self, entries: Sequence[Entry]) -> None:
            self.appends_left -= 1
            if self.appends_left < 0:
                raise NotReadyError("Away.")

    log, replica = Failing("work"), words()
    for number in range(200):
        await replica.append(log, b"word %d" % number)
    await replica.save(log)
    await replica.append(log, b"word 0")
    log.appends_left = 1
    with pytest.raises(NotReadyError):
        await replica.save(log)
    log.appends_left = 10**9
    assert (await counts_at(log))["word 0"] == 2
    await replica.save(log)
    assert (await counts_at(log))["word 0"] == 2


class Saving(HookedLog):
    """A log whose checkpoints wait until they may be appended.

    Attributes:
        may_append: lets checkpoints be appended.
        checkpoints: number of records with checkpoints.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.may_append = asyncio.Event()
        self.checkpoints = 0

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if STREAM.checkpoints_tag in entries[0].tags:
            self.checkpoints += 1
            await self.may_append.wait()


async def test_callers_that_save_at_once_share_one_checkpoint() -> None:
    log, replica = Saving("work"), words(1000)
    await write(log, replica, "ab")
    saving = [asyncio.create_task(replica.save(log)) for _ in range(20)]
    await asyncio.sleep(0)
    log.may_append.set()
    assert all(await asyncio.gather(*saving))
    assert log.checkpoints == 1


async def test_a_save_is_not_satisfied_by_one_that_began_before_its_records() -> None:
    log, replica = Saving("work"), words(1000)
    await write(log, replica, "ab")
    first = asyncio.create_task(replica.save(log))
    for _ in range(8):
        await asyncio.sleep(0)
    await write(log, replica, "c")
    second = asyncio.create_task(replica.save(log))
    await asyncio.sleep(0)
    assert log.checkpoints == 1
    log.may_append.set()
    assert await first
    assert await second
    found = (await checkpoints_module.find_furthest(log, STREAM)).furthest
    assert found is not None
    assert found.end == replica.end


async def test_a_save_needs_no_memory_for_incomplete_checkpoints() -> None:
    """Their authors crashed; each has left the first of two parts."""
    log, replica = MemoryLog("work"), words(1000)
    await write(log, replica, "ab")
    part_bytes = checkpoints_module.PART_BYTES
    for end in range(2, 50):
        part = checkpoints_module.CheckpointPart(end, 2, 0, 2, 0, None, bytes(part_bytes))
        await log.append(STREAM.format.encoded(part), tags=[STREAM.checkpoints_tag])
    tracemalloc.start()
    try:
        await replica.save(log)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * part_bytes


async def test_a_floor_seen_before_its_checkpoint_is_not_taken_for_a_trimmed_log() -> None:
    logs = MemoryLogs()
    behind = Behind("work", logs)
    await write(logs.log("work"), words(), "abcabcabcabc")
    assert await counts_at(behind) == dict.fromkeys("abc", 4)


async def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_no_trimmed_log() -> None:
    writer, logs = words(), MemoryLogs()

    class Replaced(Behind):
        times = 3

        async def before_read(self, read: Read) -> None:
            if read.tag == STREAM.checkpoints_tag and self.times:
                self.times -= 1
                await write(logs.log("work"), writer, "abcd")

    log = Replaced("work", logs)
    await write(logs.log("work"), writer, "abcdabcdabcd")
    log.end = 0
    late = words()
    await late.catch_up(log)
    assert late.state.counts == dict.fromkeys("abcd", 6)


async def test_a_log_that_was_trimmed_as_a_whole_is_an_error() -> None:
    log = MemoryLog("work")
    await write(log, words(), "abcabcabcabc")
    await log.trim(await log.tail())
    with pytest.raises(TrimmedError):
        await counts_at(log)


async def test_a_lost_record_names_the_state_and_changes_nothing() -> None:
    logs = DamagedLogs()
    log, replica = logs.log("work"), words()
    await write(log, replica, "ab")
    logs.lost = {1}
    with pytest.raises(DataLossError, match=r"^Words cannot be read"):
        await counts_at(log)
    assert replica.state.counts == {"a": 1, "b": 1}


async def test_a_new_process_starts_from_a_checkpoint_that_covers_a_lost_record() -> None:
    """One checkpoint trims nothing, so the lost record is above the floor."""
    logs = DamagedLogs()
    log, replica = logs.log("work"), words(1000)
    await write(log, replica, "abcd")
    await replica.save(log)
    await write(log, replica, "a")
    logs.lost = {2}
    assert await counts_at(log) == {"a": 2, "b": 1, "c": 1, "d": 1}
    late = words()
    assert await late.append(log, b"b") == 2


async def test_a_process_that_lags_continues_from_a_checkpoint_that_covers_a_lost_record() -> None:
    logs = DamagedLogs()
    log, replica, late = logs.log("work"), words(1000), words()
    await write(log, replica, "ab")
    await late.catch_up(log)
    await write(log, replica, "cd")
    await replica.save(log)
    logs.lost = {2, 3}
    await late.catch_up(log)
    assert late.state.counts == dict.fromkeys("abcd", 1)


async def test_a_record_lost_after_the_last_checkpoint_is_an_error() -> None:
    logs = DamagedLogs()
    log, replica = logs.log("work"), words(1000)
    await write(log, replica, "ab")
    await replica.save(log)
    await write(log, replica, "cd")
    logs.lost = {1, 4}
    with pytest.raises(DataLossError, match=r"^Words cannot be read") as lost:
        await counts_at(log)
    assert lost.value.seqnum == 4


async def test_nothing_is_trimmed_while_a_lost_checkpoint_may_cover_more() -> None:
    logs = DamagedLogs()
    log, replica, stale = logs.log("work"), words(), words()
    await write(log, replica, "abcd")
    await stale.catch_up(log)
    await write(log, replica, "efgh")
    newest = await log.read_prev(STREAM.checkpoints_tag)
    assert newest is not None
    logs.lost = {newest.seqnum}
    await stale.save(log)
    logs.lost.clear()
    assert await counts_at(log) == dict.fromkeys("abcdefgh", 1)
    assert await log.read(newest.seqnum) is not None


async def test_a_checkpoint_of_a_stale_process_does_not_replace_a_newer_one() -> None:
    log, replica, stale = MemoryLog("work"), words(), words()
    await write(log, replica, "ab")
    await stale.catch_up(log)
    await write(log, replica, "cdefgh")
    await stale.save(log)
    assert await counts_at(log) == dict.fromkeys("abcdefgh", 1)


async def test_a_late_checkpoint_of_an_older_state_is_not_started_from() -> None:
    """Its author had paused between building and appending it."""
    log, replica, stale = MemoryLog("work"), words(), words()
    await write(log, replica, "ab")
    await stale.catch_up(log)
    content = msgspec.msgpack.encode(stale.state.snapshot())
    await write(log, replica, "cdefghijklmn")
    await append_checkpoint(log, STREAM, Checkpoint(stale.end, 2, 0, content))
    assert await counts_at(log) == dict.fromkeys("abcdefghijklmn", 1)


async def test_an_outcome_trimmed_before_it_was_read_is_unknown() -> None:
    logs = MemoryLogs()
    other = logs.log("work")

    class Overtaken(HookedLog):
        async def after_append(self, entries: Sequence[Entry]) -> None:
            await write(other, words(), "abcdefghijkl")

    with pytest.raises(AppendOutcomeUnknownError, match="trimmed"):
        await words().append(Overtaken("work", logs=logs), b"x")


async def test_a_read_without_the_own_record_is_no_answer() -> None:
    class Blind(HookedLog):
        async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
            return []

    log = Blind("work")
    with pytest.raises(AppendOutcomeUnknownError, match="effect could not be read"):
        await words().append(log, b"x")
    with pytest.raises(NotReadyError):
        await words().catch_up(log, own=0)


async def test_a_long_history_is_not_read_if_a_checkpoint_covers_it() -> None:
    """Nothing is trimmed yet, because there is one checkpoint only."""

    class Counting(HookedLog):
        pages = 0

        async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
            self.pages += read.tag == "words" and bool(records)
            return records

    logs = MemoryLogs()
    log, replica = logs.log("work"), words(10_000)
    for _ in range(5):
        await replica.append_batch(log, [Entry(b"x")] * 1000)
    await replica.save(log)
    await replica.append(log, b"x")
    counting = Counting("work", logs=logs)
    assert await counts_at(counting) == {"x": 5001}
    assert counting.pages == 2


async def test_callers_share_one_read() -> None:
    class Counting(HookedLog):
        reads = 0

        async def before_read(self, read: Read) -> None:
            self.reads += 1
            await asyncio.sleep(0)

    log, replica = Counting("work"), words(1000)
    outcomes = await asyncio.gather(*(replica.append(log, b"x") for _ in range(50)))
    assert sorted(outcomes) == list(range(1, 51))
    assert log.reads < 10


class Slow(HookedLog):
    """A log whose fresh reads take their answer at once and return it when they may.

    Attributes:
        may_return: lets reads return.
        fresh: number of fresh reads.
        failing: number of fresh reads that fail.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.may_return = asyncio.Event()
        self.fresh = 0
        self.failing = 0

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        if read.fresh:
            self.fresh += 1
            await self.may_return.wait()
            if self.failing:
                self.failing -= 1
                raise NotReadyError("Not now.")
        return records


async def test_callers_share_one_fresh_read_that_begins_after_their_calls() -> None:
    log, replica = Slow("work"), words()
    first = asyncio.create_task(replica.catch_up(log, fresh=True))
    await asyncio.sleep(0)
    await log.append(b"b", tags=["words"])  # the first read does not see it
    later = [asyncio.create_task(replica.catch_up(log, fresh=True)) for _ in range(20)]
    await asyncio.sleep(0)
    log.may_return.set()
    await later[0]
    assert replica.state.counts == {"b": 1}
    await asyncio.gather(first, *later)
    assert log.fresh == 2


async def test_a_later_read_serves_the_callers_of_a_failed_one() -> None:
    log, replica = Slow("work"), words()
    log.failing = 2
    first = asyncio.create_task(replica.catch_up(log, fresh=True))
    await asyncio.sleep(0)
    later = [asyncio.create_task(replica.catch_up(log, fresh=True)) for _ in range(5)]
    await asyncio.sleep(0)
    log.may_return.set()
    outcomes = await asyncio.gather(first, *later, return_exceptions=True)
    assert [isinstance(each, NotReadyError) for each in outcomes] == [True, True, *[False] * 4]
    assert log.fresh == 3


async def test_a_record_whose_author_keeps_no_replica_elects_no_process() -> None:
    """The checkpoint that it makes due waits for the next record of another author."""

    class Foreign(Words):
        last = ""

        def apply(self, record: Record) -> int:
            self.last = record.data.decode()
            return super().apply(record)

        def may_elect(self) -> bool:
            return self.last != "foreign"

    log = MemoryLog("work")
    replica = Replica[Foreign, int](STREAM, Foreign, lambda _: Foreign(), checkpoint_every=EVERY)
    for _ in range(3 * EVERY):
        await log.append(b"foreign", tags=["words"])
    await replica.append(log, b"own")
    assert replica.is_save_due
    await replica.save(log)
    for _ in range(EVERY - 2):
        await log.append(b"foreign", tags=["words"])
    await replica.append(log, b"own")
    assert not replica.is_save_due


async def test_a_replica_catches_up_to_a_place() -> None:
    log, replica, other = MemoryLog("work"), words(1000), words(1000)
    await write(log, other, "abc")
    await replica.catch_up_to(log, 2)
    assert replica.known >= 2
    tail = await log.append(b"", tags=["else"]) + 1
    assert replica.known < tail
    await replica.catch_up_to(log, tail, is_in_session=True)
    assert (replica.end, replica.known) == (3, tail)


async def test_an_empty_read_of_another_session_proves_nothing() -> None:
    class Stale(HookedLog):
        async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
            return records if read.fresh else []

    log, replica = Stale("work"), words(1000)
    await log.append(b"a", tags=["words"])
    await replica.catch_up_to(log, 1)
    assert replica.state.counts == {"a": 1}


async def test_save_says_whether_its_state_is_stored() -> None:
    logs = DamagedLogs()
    log, replica, stale = logs.log("work"), words(1000), words(1000)
    await write(log, replica, "ab")
    await stale.catch_up(log)
    await write(log, replica, "cd")
    assert await replica.save(log)
    assert await stale.save(log), "a checkpoint that covers more is stored"
    newest = await log.read_prev(STREAM.checkpoints_tag)
    assert newest is not None
    await replica.append(log, b"e")
    logs.lost = {newest.seqnum}
    assert await replica.save(log), "this checkpoint covers more than the lost one"

    class Unwritten(HookedLog):
        async def append(self, data: bytes, *, tags: object = ()) -> SeqNum:
            return 0

    fresh, replica = MemoryLogs(), words(1000)
    for is_first in (True, False):
        await write(fresh.log("work"), replica, "ab")
        assert not await replica.save(Unwritten("work", logs=fresh))
        assert not is_first or await replica.save(fresh.log("work"))


async def test_records_that_the_library_needs_are_not_trimmed() -> None:
    class Needing(Words):
        def needed_from(self, end: SeqNum) -> SeqNum:
            return min(end, 2)

    log = MemoryLog("work")
    replica = Replica[Needing, int](STREAM, Needing, lambda _: Needing(), checkpoint_every=2)
    await write(log, replica, "abcdefgh")  # type: ignore[arg-type]
    assert [r.seqnum for r in await log.read_range("words", 2, limit=1)] == [3]
    with pytest.raises(TrimmedError):
        await log.read_range("words", 1)


async def test_the_cache_drops_the_replica_used_least_recently() -> None:
    cache, log = ReplicaCache[Replica[Words, int]](2), MemoryLog("work")
    first, second = (cache.get(log, key, words) for key in "ab")
    assert cache.get(log, "a", words) is first
    cache.get(log, "c", words)
    assert cache.get(log, "a", words) is first
    assert cache.get(log, "b", words) is not second
    assert cache.get(MemoryLog("work"), "a", words) is not first


async def test_records_that_a_checkpoint_could_not_trim_are_trimmed_when_nothing_needs_them() -> (
    None
):
    """No record comes after the one that frees them, so no further checkpoint would be due."""

    class Needing(Words):
        needed = 0

        def apply(self, record: Record) -> int:
            if record.data == b"!":
                self.needed = MAX_SEQNUM
            return super().apply(record)

        def needed_from(self, end: SeqNum) -> SeqNum:
            return min(end, self.needed)

    log = MemoryLog("work")
    replica = Replica[Needing, int](STREAM, Needing, lambda _: Needing(), checkpoint_every=8)
    await write(log, replica, "a" * 39)  # type: ignore[arg-type]
    assert len(await log.read_range("words")) == 39
    await write(log, replica, "!")  # type: ignore[arg-type]
    with pytest.raises(TrimmedError) as trimmed:
        await log.read_range("words")
    assert len(await log.read_range("words", trimmed.value.first_seqnum)) <= 2 * 8
