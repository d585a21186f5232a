"""The queue: results for producers and consumers, alone and concurrent, and expired leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest

from bokiqueue import (
    LeaseLostError,
    Queue,
    QueueReplica,
    QueueSettingsError,
    QueueTrimmedError,
    QueueVersionError,
    waiting,
)
from bokiqueue import shard as shard_module
from indilog.base.errors import (
    AppendOutcomeUnknownError,
    NotReadyError,
    QuorumUnavailableError,
    TrimmedError,
)
from indilog.base.ids import UserTag
from indilog.base.log import Entry, Log, Record
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class Clock:
    """Time that advances when the test says so, for the log and for its readers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(waiting, "seconds_now", lambda: self.now)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def log(clock: Clock) -> MemoryLog:
    return MemoryLog("work", logs=MemoryLogs(clock=clock))


def elsewhere(log: Log, name: str = "mail", *, shards: int = 2, tries: int = 5) -> Queue:
    """Return the same queue in a process that has read nothing of it."""
    assert isinstance(log, MemoryLog)
    mine = MemoryLog(log.name, logs=log.logs)
    return Queue(mine, name, shards=shards, tries=tries, replica=QueueReplica(name, shards))


async def taken(queue: Queue, **options: float) -> bytes | None:
    """Take a message and acknowledge it."""
    delivery = await queue.take(**options)
    if delivery is None:
        return None
    await delivery.acknowledge()
    return delivery.data


async def test_a_pushed_message_is_delivered_once(log: MemoryLog) -> None:
    queue = Queue(log, "mail")
    for number in range(10):
        await queue.push(b"%d" % number)
    got = [await taken(queue) for _ in range(11)]
    assert got.pop() is None
    assert sorted(got, key=str) == [b"%d" % number for number in range(10)]


async def test_messages_of_one_key_are_delivered_in_order(log: MemoryLog) -> None:
    queue = Queue(log, "mail", shards=8)
    for number in range(20):
        await queue.push(b"%d" % number, shard_key="ann")
    assert [await taken(elsewhere(log, shards=8)) for _ in range(20)] == [
        b"%d" % number for number in range(20)
    ]


async def test_two_queues_of_a_log_and_other_records_are_separate(log: MemoryLog) -> None:
    await Queue(log, "a").push(b"for a")
    await log.append(b"not a message", tags=["queue:a:shard:0", "queue:a:pushed"])
    assert await taken(Queue(log, "b")) is None
    assert await taken(Queue(log, "a")) == b"for a"
    assert await taken(Queue(log, "a")) is None


async def test_leaving_the_block_acknowledges(log: MemoryLog, clock: Clock) -> None:
    queue = Queue(log, "mail")
    await queue.push(b"x")
    async with queue.pop() as message:
        assert message is not None
        assert (message.data, message.tries) == (b"x", 1)
    clock.now += 1000
    async with elsewhere(log, shards=4).pop() as message:
        assert message is None


async def test_a_block_may_acknowledge_or_release_its_message_itself(log: MemoryLog) -> None:
    queue = Queue(log, "mail")
    await queue.push(b"x")
    async with queue.pop() as message:
        assert message is not None
        await message.extend(60)
        await message.requeue()
    async with queue.pop() as message:
        assert message is not None
        assert message.tries == 2
        await message.extend(60)
        await message.acknowledge()
        assert message.is_done
    assert (await queue.stats()).depth == 0


async def test_an_extended_message_is_still_acknowledged_on_leaving(log: MemoryLog) -> None:
    queue = Queue(log, "mail")
    await queue.push(b"x")
    async with queue.pop() as message:
        assert message is not None
        await message.extend(60)
    assert (await queue.stats()).depth == 0


async def tries_of_a_block_that_raises(
    queue: Queue, clock: Clock, what: BaseException, **options: float
) -> list[float]:
    """Let blocks raise until no message is ready for a year; return the pauses before
    deliveries.
    """
    waited, pauses = 0.0, list[float]()
    while waited < 366 * 86_400:
        delivery = None
        with contextlib.suppress(type(what)):
            async with queue.pop(**options) as delivery:
                if delivery is not None:
                    raise what
        if delivery is not None:
            pauses.append(waited)
            waited = 0.0
            continue
        step = 0.25 if waited < 100 else 1e7
        clock.now += step
        waited += step
    return pauses


async def test_a_block_that_raises_releases_the_message_with_exponential_backoff(
    log: MemoryLog, clock: Clock
) -> None:
    """A consumer that fails for some seconds creates no dead letter; five failed tries do."""
    queue = Queue(log, "mail")
    await queue.push(b"x")
    pauses = await tries_of_a_block_that_raises(queue, clock, ZeroDivisionError())
    assert pauses == [0, 1, 2, 4, 8]
    assert [data for _, data in await queue.dead_letters()] == [b"x"]


async def test_the_backoff_after_a_block_that_raised_is_a_minute_at_most(
    log: MemoryLog, clock: Clock
) -> None:
    queue = Queue(log, "mail", tries=20)
    await queue.push(b"x")
    pauses = await tries_of_a_block_that_raises(queue, clock, ZeroDivisionError(), backoff=20)
    assert (pauses[:4], set(pauses[4:]), len(pauses)) == ([0, 20, 40, 60], {60}, 20)


async def test_without_a_backoff_or_when_cancelled_a_block_releases_the_message_at_once(
    log: MemoryLog, clock: Clock
) -> None:
    """The cancellation of a consumer is no failure of its message."""
    queue = Queue(log, "mail")
    await queue.push(b"x")
    pauses = await tries_of_a_block_that_raises(queue, clock, ZeroDivisionError(), backoff=0)
    assert pauses == [0] * 5
    await queue.push(b"y")
    assert await tries_of_a_block_that_raises(queue, clock, asyncio.CancelledError()) == [0] * 5


@pytest.mark.parametrize("backoff", [-1, 60.5, float("nan"), "1"])
async def test_an_invalid_backoff_is_refused_with_its_range(log: MemoryLog, backoff: float) -> None:
    with pytest.raises(QueueSettingsError, match="backoff must be 0 to 60 seconds"):
        Queue(log, "mail").pop(backoff=backoff)


async def test_a_message_of_a_crashed_consumer_is_delivered_again(
    log: MemoryLog, clock: Clock
) -> None:
    await Queue(log, "mail", shards=2).push(b"x")
    gone = await elsewhere(log).take(lease=10)
    assert gone is not None
    assert await elsewhere(log).take() is None
    clock.now += 10
    second = await elsewhere(log).take()
    assert second is not None
    assert (second.data, second.tries) == (b"x", 2)
    with pytest.raises(LeaseLostError, match="has already ended"):
        await gone.acknowledge()
    await second.acknowledge()
    assert await elsewhere(log).take() is None


async def test_an_extended_lease_holds(log: MemoryLog, clock: Clock) -> None:
    queue = Queue(log, "mail", shards=2)
    await queue.push(b"x")
    held = await queue.take(lease=10)
    assert held is not None
    clock.now += 9
    await held.extend(10)
    clock.now += 9
    assert await elsewhere(log).take() is None
    await held.acknowledge()


async def test_dead_letters_are_kept_revived_and_discarded(log: MemoryLog) -> None:
    queue = Queue(log, "mail", shards=2, tries=2)
    await queue.push(b"poison")
    for _ in range(2):
        message = await queue.take()
        assert message is not None
        await message.requeue()
    assert await queue.take() is None
    ((seqnum, data),) = await elsewhere(log).dead_letters()
    assert data == b"poison"
    assert await elsewhere(log).revive(seqnum)
    assert not await queue.revive(seqnum)
    assert (await queue.stats()).dead == 0
    for _ in range(2):
        message = await queue.take()
        assert message is not None
        await message.requeue()
    assert await queue.discard(seqnum)
    assert await queue.dead_letters() == []


async def test_a_delay_and_a_priority_are_kept(log: MemoryLog, clock: Clock) -> None:
    queue = Queue(log, "mail", shards=1)
    await queue.push(b"later", delay=5)
    await queue.push(b"usual")
    await queue.push(b"urgent", priority=9)
    assert [await taken(queue) for _ in range(3)] == [b"urgent", b"usual", None]
    clock.now += 5
    assert await taken(queue) == b"later"


async def test_statistics_show_depth_leases_and_age(log: MemoryLog, clock: Clock) -> None:
    queue = Queue(log, "mail", shards=2)
    await queue.push(b"a")
    clock.now += 3
    await queue.push(b"b")
    assert await queue.take() is not None
    stats = await elsewhere(log).stats()
    assert (stats.depth, stats.leased, stats.dead, stats.oldest_age_s) == (2, 1, 0, 3.0)
    assert [part.depth for part in stats.shards] == [1, 1]


async def test_a_wrong_number_of_shards_is_refused_with_the_right_one(log: MemoryLog) -> None:
    await Queue(log, "mail", shards=3).push(b"x")
    with pytest.raises(QueueSettingsError, match="open it with shards=3"):
        await Queue(log, "mail", shards=4).take()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": 10}, "priority must be 0 to 9"),
        ({"delay": -1}, "delay must be 0 to"),
        ({"delay": float("nan")}, "delay must be 0 to"),
    ],
)
async def test_an_invalid_push_is_refused_with_the_reason(
    log: MemoryLog, options: dict[str, float], said: str
) -> None:
    with pytest.raises(QueueSettingsError, match=said):
        await Queue(log, "mail").push(b"x", **options)  # type: ignore[arg-type]
    assert log.logs.position == 0


@pytest.mark.parametrize("name", ["", "x" * 300, "a\x1fb"])
async def test_an_invalid_queue_name_is_refused(log: MemoryLog, name: str) -> None:
    with pytest.raises(QueueSettingsError, match="name must be 1 to"):
        Queue(log, name)


async def test_a_record_of_a_later_version_raises_an_error(log: MemoryLog) -> None:
    queue = Queue(log, "mail", shards=1)
    await queue.push(b"x")
    await log.append(b"\xb0Q\x7fsomething", tags=["queue:mail:shard:0"])
    with pytest.raises(QueueVersionError, match="format 127"):
        await queue.take()


async def test_superseded_records_are_trimmed_and_a_newcomer_begins_at_a_checkpoint(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 8)
    queue = Queue(log, "mail", shards=1)
    for number in range(20):
        await queue.push(b"%d" % number)
    assert [await taken(queue) for _ in range(19)] == [b"%d" % number for number in range(19)]
    with pytest.raises(TrimmedError):
        await log.read_range("queue:mail:shard:0")
    newcomer = elsewhere(log, shards=1)
    assert await taken(newcomer) == b"19"
    assert newcomer.replica.shards[0]._replica.unsaved < 20, "it has not replayed everything"
    assert await taken(newcomer) is None


async def test_a_process_that_lags_behind_a_trim_resumes_from_a_checkpoint(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 8)
    sleeper, queue = elsewhere(log, shards=1), Queue(log, "mail", shards=1)
    await queue.push(b"first")
    assert await taken(sleeper) == b"first"
    for number in range(20):
        await queue.push(b"%d" % number)
        if number < 19:
            assert await taken(queue) is not None
    assert await taken(sleeper) == b"19"


async def test_a_queue_of_a_log_trimmed_as_a_whole_raises_a_trimmed_error(log: MemoryLog) -> None:
    queue = Queue(log, "mail", shards=2)
    running = elsewhere(log)
    for _ in range(2):
        await queue.push(b"x")
        assert await running.take() is not None
    await queue.push(b"y")
    await log.trim(await log.tail())
    with pytest.raises(QueueTrimmedError, match="'mail' was trimmed as a whole below seqnum 6"):
        await elsewhere(log).take()
    with pytest.raises(QueueTrimmedError, match="in a log that is not trimmed"):
        await running.stats()
    await queue.push(b"z")


async def test_a_waiting_consumer_is_woken_by_a_push() -> None:
    log = MemoryLog("work")
    queue = Queue(log, "mail")
    takers = [asyncio.create_task(taken(queue, wait=20)) for _ in range(3)]
    for _ in range(20):  # all wait
        await asyncio.sleep(0)
    for number in range(3):
        await queue.push(b"%d" % number)
    assert sorted(map(str, await asyncio.gather(*takers))) == ["b'0'", "b'1'", "b'2'"]


async def test_a_waiting_consumer_is_woken_by_an_expired_lease() -> None:
    log = MemoryLog("work")
    queue = Queue(log, "mail")
    await queue.push(b"x")
    assert await queue.take(lease=0.05) is not None
    async with queue.pop(wait=20) as message:
        assert message is not None
        assert message.tries == 2


async def test_a_wait_times_out_without_a_message() -> None:
    async with Queue(MemoryLog("work"), "mail").pop(wait=0.01) as message:
        assert message is None


async def test_a_cancelled_consumer_passes_its_wake_up_to_another_one() -> None:
    log = MemoryLog("work")
    news = Queue(log, "mail").replica.notifications
    first, second = (asyncio.create_task(news.wait(log, 0, 20)) for _ in range(2))
    await asyncio.sleep(0)
    news._wake_one()
    first.cancel()
    assert await asyncio.wait_for(second, 5) == 0
    assert first.cancelled()


async def test_the_log_is_not_watched_while_no_consumer_waits() -> None:
    log = MemoryLog("work")
    queue = Queue(log, "mail")
    assert await queue.take(wait=0.01) is None
    await asyncio.sleep(0)
    assert queue.replica.notifications._watcher is None
    assert not any(log.logs._waiting.values())


async def test_a_page_cut_at_its_byte_limit_does_not_count_as_the_end(clock: Clock) -> None:
    logs = MemoryLogs(page_bytes_max=1, clock=clock)
    queue = Queue(MemoryLog("work", logs=logs), "mail", shards=1)
    for number in range(5):
        await queue.push(b"later", delay=10 + number)
    await queue.push(b"now")
    assert await taken(elsewhere(queue.log, shards=1)) == b"now"


async def test_a_page_of_pushes_that_is_cut_is_not_taken_for_the_end(clock: Clock) -> None:
    logs = MemoryLogs(page_bytes_max=1, clock=clock)
    queue = Queue(MemoryLog("work", logs=logs), "mail", shards=2)
    newcomer = elsewhere(queue.log)
    assert await newcomer.take() is None
    for _ in range(5):
        await queue.push(b"later", delay=10, shard_key="a")
    await queue.push(b"now", shard_key="d")
    pushed_to = [part.depth for part in (await queue.stats()).shards]
    assert sorted(pushed_to) == [1, 5]
    assert await taken(newcomer) == b"now"


async def test_pushes_of_another_session_are_not_taken_for_absent(log: MemoryLog) -> None:
    """A page that is empty because the reader's session is behind proves nothing."""
    queue = Queue(log, "mail", shards=1)
    assert await queue.take() is None
    await queue.push(b"x")

    class Behind(HookedLog):
        async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
            return records if read.fresh or "shard" not in str(read.tag) else []

    behind = Queue(Behind("work", logs=log.logs), "mail", shards=1, replica=queue.replica)
    shard = queue.replica.shards[0]
    await queue.replica.catch_up(behind.log, shard, shard.records_below)
    assert len(shard.state) == 1


class Failing(HookedLog):
    """A log whose calls of one kind fail when the test says so."""

    what = ""

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if self.what == "checkpoint" and any("checkpoint" in str(entry.tags) for entry in entries):
            raise AppendOutcomeUnknownError("perhaps")

    async def before_read(self, read: Read) -> None:
        if self.what == "read":
            raise NotReadyError("not now")

    async def trim(self, until: int, *, tag: UserTag | None = None) -> None:
        if self.what == "trim":
            raise QuorumUnavailableError("not now")
        await super().trim(until, tag=tag)


@pytest.mark.parametrize("what", ["checkpoint", "trim"])
async def test_an_acknowledgement_with_effect_succeeds_although_a_later_step_fails(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 2)
    log = Failing("work")
    queue = Queue(log, "mail")
    await queue.push(b"x")
    log.what = what
    assert await taken(queue) == b"x"
    log.what = ""
    assert (await queue.stats()).depth == 0


async def test_a_failed_read_after_an_append_raises_an_unknown_outcome() -> None:
    log = Failing("work")
    queue = Queue(log, "mail")
    await queue.push(b"x")
    held = await queue.take()
    assert held is not None
    log.what = "read"
    with pytest.raises(AppendOutcomeUnknownError, match="appended at 3, but its effect") as caught:
        await held.acknowledge()
    assert isinstance(caught.value.__cause__, NotReadyError)
    log.what = ""
    assert (await queue.stats()).depth == 0
