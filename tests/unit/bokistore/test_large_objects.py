"""Objects larger than a record have checkpoints too, and a limit that is stated."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from bokistore import MismatchError, ObjectTooLargeError, Store, checkpoints, value
from bokistore.checkpoints import CHECKPOINT_EVERY
from bokistore.document import Push
from bokistore.records import checkpoint_in, decode_command, part_in
from indilog import DiskFullError, InvalidTagError, TooLargeError
from indilog.base.errors import NotReadyError, TrimmedError
from indilog.base.ids import SeqNum, UserTag
from indilog.config import ClusterConfig
from indilog.testing import MemoryLog, MemoryLogs
from tests.unit.bokistore.counted_log import CountedLog
from tests.unit.bokistore.processes import Clock, newcomer

pytestmark = pytest.mark.asyncio

RECORD_BYTES = 4096
BIG = 20_000


@pytest.fixture
def log(clock: Clock) -> MemoryLog:
    """A log with small records, so that an object of some kilobytes does not fit into one."""
    config = ClusterConfig(record_bytes_max=RECORD_BYTES)
    return MemoryLog("objects", logs=MemoryLogs(config, clock=clock))


async def grown(store: Store, name: str = "a") -> dict[str, object]:
    """Write an object of about `BIG` bytes, larger than a record; return its value."""
    for number in range(BIG // 2000):
        await store.set(name, f"part{number}", 'x"é' * 500)
    return dict((await store.get(name)).value)


async def complete(log: MemoryLog, name: str = "a") -> list[int]:
    """Return the number of parts of each complete checkpoint."""
    commands = [decode_command(record.data) for record in await log.read_range(f"ckpt:{name}")]
    found = [checkpoint_in(command, name) for command in commands]
    return [checkpoint.parts for checkpoint in found if checkpoint]


class FailingLog(MemoryLog):
    """Raises an error instead of appending records of checkpoints, from the n-th on."""

    error: Exception | None = None
    after = 0

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        tags = tuple(tags)
        if self.error is not None and any(str(tag).startswith("ckpt:") for tag in tags):
            if self.after == 0:
                raise self.error
            self.after -= 1
        return await super().append(data, tags=tags)


@pytest.mark.parametrize("count", [300, 330])
async def test_a_cold_read_of_a_large_object_is_bounded(log: MemoryLog, count: int) -> None:
    store = Store(log)
    await grown(store)
    for _ in range(count):
        await store.increment("a", "n")
    log.logs.drop_aux()
    counted = CountedLog(log)
    assert (await newcomer(counted).get("a"))["n"] == count
    parts = BIG * 2 // RECORD_BYTES
    assert counted.records <= CHECKPOINT_EVERY + parts + 4
    assert counted.calls <= 5


async def test_a_large_object_reads_the_same_with_and_without_its_checkpoint(
    log: MemoryLog,
) -> None:
    store = Store(log)
    whole = await grown(store)
    for number in range(CHECKPOINT_EVERY):
        await store.set("a", "n", number)
    assert await complete(log) == [11]
    assert (await newcomer(log).get("a")).value == {**whole, "n": CHECKPOINT_EVERY - 1}


@pytest.mark.parametrize("appended", [0, 1, 3])
async def test_a_crash_between_parts_leaves_the_previous_checkpoint_in_force(
    log: MemoryLog, appended: int
) -> None:
    store = Store(log)
    await grown(store)
    for _ in range(4 * CHECKPOINT_EVERY):
        await store.increment("a", "n")
    assert len(await complete(log)) == 4
    crashing = FailingLog("objects", logs=log.logs)
    crashing.error, crashing.after = NotReadyError(), appended
    replay = Store(crashing)._replay
    assert await replay.checkpoint("a", await replay.view("a")) is None
    assert len(await complete(log)) == 4
    await store.increment("a", "n")
    log.logs.drop_aux()
    counted = CountedLog(log)
    assert (await newcomer(counted).get("a"))["n"] == 4 * CHECKPOINT_EVERY + 1
    assert counted.records < 2 * CHECKPOINT_EVERY


async def test_parts_of_two_writers_are_not_mixed_up(log: MemoryLog) -> None:
    """A second writer appends its checkpoint between the parts of the first one."""

    class InterruptedLog(MemoryLog):
        interrupts = True

        async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
            seqnum = await super().append(data, tags=tags)
            command = decode_command(data)
            if self.interrupts and part_in(command, "a"):
                self.interrupts = False
                await other.set("a", "part0", "new")
                await other._replay.checkpoint("a", await other._replay.view("a"))
            return seqnum

    other = newcomer(log)
    whole = await grown(newcomer(log))
    slow = newcomer(InterruptedLog("objects", logs=log.logs))
    await slow._replay.checkpoint("a", await slow._replay.view("a"))
    assert len(await complete(log)) == 2
    log.logs.drop_aux()
    assert (await newcomer(log).get("a")).value == {**whole, "part0": "new"}
    last = (await log.read_range("ckpt:a"))[-1].seqnum
    found = await newcomer(log)._replay._checkpoints.newest("a", last)
    assert found is not None
    assert (found.seqnum, b'"new"' in (found.view.document or b"")) == (last, False)
    then = await newcomer(log).at(last - 1).get("a")
    assert then.value == {**whole, "part0": "new"}


@pytest.mark.usefixtures("small_cells")
async def test_the_history_and_the_parts_of_a_large_object_are_collected(
    log: MemoryLog, clock: Clock
) -> None:
    store = Store(log)
    whole = await grown(store)
    for number in range(300):
        await store.set("a", "n", number)
    clock.now += 100
    await store.collect(keep=10)
    alive = [seqnum for seqnum in range(await log.tail()) if not log.logs.is_dead(seqnum)]
    assert len(await complete_alive(log)) == 1
    assert len(alive) < 40, "one checkpoint, and the records after it"
    log.logs.drop_aux()
    assert (await newcomer(log).get("a")).value == {**whole, "n": 299}
    with pytest.raises(TrimmedError):
        await newcomer(log).at(20).get("a")
    await store.delete("a")
    clock.now += 100
    await store.collect(keep=10)
    alive = [seqnum for seqnum in range(await log.tail()) if not log.logs.is_dead(seqnum)]
    left = [record.tags for record in map(log.logs.record, alive) if record]
    assert not any("ckpt:a" in tags or "store:a" in tags for tags in left)


@pytest.mark.usefixtures("small_cells")
async def test_the_parts_of_the_checkpoint_in_force_are_kept(log: MemoryLog, clock: Clock) -> None:
    store = Store(log)
    whole = await grown(store)
    for number in range(2 * CHECKPOINT_EVERY):
        await store.set("a", "n", number)
    clock.now += 100
    for number in range(5):
        await store.set("a", "n", number)
    await store.collect(keep=50)
    assert len(await complete_alive(log)) == 1
    log.logs.drop_aux()
    assert (await newcomer(log).get("a")).value == {**whole, "n": 4}


async def complete_alive(log: MemoryLog) -> list[int]:
    """Return the seqnums of the untrimmed complete checkpoints."""
    records = [log.logs.record(s) for s in range(await log.tail()) if not log.logs.is_dead(s)]
    return [r.seqnum for r in records if r and checkpoint_in(decode_command(r.data), "a")]


@pytest.mark.parametrize(
    "error", [TooLargeError("A record", size=2, limit=1), InvalidTagError("bad"), DiskFullError()]
)
async def test_an_error_that_may_persist_is_logged_and_fails_no_operation(
    log: MemoryLog, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    failing = FailingLog("objects", logs=log.logs)
    failing.error = error
    store = Store(failing)
    with caplog.at_level(logging.WARNING, logger="bokistore.checkpoints"):
        for _ in range(checkpoints.CHECKPOINT_EVERY_SMALL):
            await store.increment("a", "n")
    assert (await store.get("a"))["n"] == checkpoints.CHECKPOINT_EVERY_SMALL
    is_transient = isinstance(error, NotReadyError)
    assert bool(caplog.records) is not is_transient
    assert is_transient or "Object 'a' of log 'objects' gets no checkpoint" in caplog.text


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(value, "OBJECT_BYTES_MAX", 2000)
    return 2000


@pytest.mark.usefixtures("small_limit")
async def test_an_operation_beyond_the_limit_is_refused_before_anything_is_appended(
    log: MemoryLog,
) -> None:
    store = Store(log)
    for number in range(9):
        await store.set("a", f"p{number}", "x" * 200)
    tail = await log.tail()
    with pytest.raises(ObjectTooLargeError, match="the limit is 2,000") as refused:
        await store.set("a", "more", "x" * 200)
    assert (refused.value.name, refused.value.limit) == ("a", 2000)
    assert await log.tail() == tail
    async with store.transaction() as txn:
        obj = await txn.get("a")
        with pytest.raises(ObjectTooLargeError):
            obj.set("more", "x" * 200)
    assert await log.tail() == tail
    await store.set("a", "p0", "y" * 200)
    await store.delete("a", "p1")
    await store.set("a", "more", "x" * 190)


@pytest.mark.usefixtures("small_limit")
async def test_the_log_decides_which_of_two_writers_exceeds_the_limit(log: MemoryLog) -> None:
    """Neither knows of the other's write; every replay agrees with the writers."""
    one, other = newcomer(log), newcomer(log)
    await one.set("a", "p0", "x" * 1500)
    assert await other.set("a", "p1", "x" * 300) is None
    with pytest.raises(ObjectTooLargeError):
        await one._operate("a", Push(("list",), "x" * 300))
    async with other.transaction() as blind:
        blind.set("a", "p2", "x" * 300)
    log.logs.drop_aux()
    for reader in (one, other, newcomer(log)):
        assert set((await reader.get("a")).value) == {"p0", "p1"}


@pytest.mark.usefixtures("small_limit")
async def test_numbers_may_grow_by_their_text_only(log: MemoryLog) -> None:
    """`1e15` is stored as 18 characters; the limit counts these."""
    data = '{"store":1,"writes":{"a":[["set",["n"],[%s]]]}}'
    await log.append((data % ",".join(["1e15"] * 120)).encode(), tags=["store:a"])
    assert not await newcomer(log).get("a")
    await log.append((data % ",".join(["1e15"] * 90)).encode(), tags=["store:a"])
    assert len((await newcomer(log).get("a"))["n"]) == 90


@pytest.mark.usefixtures("small_limit")
async def test_an_object_above_the_limit_may_shrink(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = newcomer(log)
    await store.set("a", "n", list(range(400)))
    monkeypatch.setattr(value, "OBJECT_BYTES_MAX", 1000)
    assert await store.pop("a", "n") == 399
    with pytest.raises(ObjectTooLargeError):
        await store.push("a", "n", 399)
    with pytest.raises(MismatchError):
        await store.increment("a", "n")
    await store.delete("a")
    assert not await newcomer(log).get("a")


@pytest.mark.usefixtures("small_limit")
async def test_the_index_of_a_tag_has_no_limit(log: MemoryLog) -> None:
    store = Store(log)
    for number in range(200):
        await store.put(f"object-{number}", {"n": number}, tags=["all"])
    assert len(await newcomer(log).find("all")) == 200
