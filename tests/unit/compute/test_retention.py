"""Rounds of retention on logs in memory, with the clock of the test."""

from __future__ import annotations

import asyncio
import math

import pytest

from indilog.base.errors import QuorumUnavailableError, TrimmedError
from indilog.base.log import Log, Record
from indilog.base.retention import Retention
from indilog.config import MIB, NodeConfig, node_config
from indilog.sdk.retention_log import RETENTION_LOG, PolicyLog
from indilog.testing import MemoryLog, MemoryLogs
from indilog_compute.retention import RetentionRounds, SizeMarks
from indilog_compute.retention_service import RetentionService
from tests.support.damaged_log import DamagedLogs

pytestmark = pytest.mark.asyncio


class World:
    """Logs whose stamps are `now`, with rounds of retention over them."""

    def __init__(self, page_bytes_max: int = 4 * MIB, **settings: float) -> None:
        self.now = 1_000_000.0
        self.writers_ahead_s = 0.0
        self.logs = MemoryLogs(
            clock=lambda: self.now,
            writer_clock=lambda: self.now + self.writers_ahead_s,
            page_bytes_max=page_bytes_max,
        )
        self.config = node_config(**settings)
        self.paused_s: list[float] = []
        self.rounds = self.restarted()

    def restarted(self) -> RetentionRounds:
        return RetentionRounds(self.logs, self.config, self._pause)

    async def _pause(self, seconds: float) -> None:
        self.paused_s.append(seconds)

    async def fill(self, log: Log, count: int, size: int = 100, every_s: float = 1.0) -> list[int]:
        seqnums = []
        for _ in range(count):
            seqnums.append(await log.append(b"x" * size))
            self.now += every_s
        return seqnums


async def floor_of(log: Log) -> int:
    try:
        await log.read_next()
    except TrimmedError as error:
        return error.first_seqnum
    return 0


async def test_records_older_than_the_age_are_trimmed() -> None:
    world = World()
    log, other = world.logs.log("orders"), world.logs.log("other")
    await other.append(b"other")
    seqnums = await world.fill(log, 10)
    world.rounds.take({"orders": Retention(age_s=5.0)})
    await world.rounds.run()
    assert await floor_of(log) == seqnums[5]
    assert await floor_of(other) == 0
    world.now += 100.0
    await world.rounds.run()
    with pytest.raises(TrimmedError):
        await log.read(seqnums[-1])


async def test_a_round_with_nothing_to_trim_writes_nothing() -> None:
    world = World()
    log, empty = world.logs.log("orders"), world.logs.log("empty")
    await world.fill(log, 10)
    world.rounds.take({"orders": Retention(age_s=100.0), "empty": Retention(age_s=1.0)})
    for _ in range(3):
        await world.rounds.run()
    assert (await log.tail(), await floor_of(log), await floor_of(empty)) == (10, 0, 0)


@pytest.mark.parametrize("ahead_s", [366 * 86_400.0, -366 * 86_400.0])
async def test_writers_whose_clocks_are_wrong_change_nothing(ahead_s: float) -> None:
    world = World()
    log = world.logs.log("orders")
    world.writers_ahead_s = ahead_s
    seqnums = await world.fill(log, 10)
    world.rounds.take({"orders": Retention(age_s=5.0)})
    await world.rounds.run()
    assert await floor_of(log) == seqnums[5]


async def test_no_record_ages_while_the_clock_of_the_primary_does_not_advance() -> None:
    world = World()
    log = world.logs.log("orders")
    seqnums = await world.fill(log, 10, every_s=0.0)
    world.rounds.take({"orders": Retention(age_s=5.0)})
    await world.rounds.run()
    assert await floor_of(log) == 0
    assert await log.read(seqnums[0]) is not None


def bytes_kept(records: list[Record]) -> int:
    return sum(len(r.data) + len(r.names) for r in records)


@pytest.mark.parametrize(("count", "size"), [(500, 100), (50, 5_000), (300, 0)])
async def test_the_newest_bytes_are_kept_and_little_more(count: int, size: int) -> None:
    world = World(page_bytes_max=1_000)
    log = world.logs.log("orders")
    await world.fill(log, count, size)
    limit = 3 * bytes_kept(await log.read_range(limit=10_000)) // 10 if size else 300
    limit = max(limit, 10_000) if size else limit
    world.rounds.take({"orders": Retention(size_bytes=limit)})
    assert not await world.rounds.run()
    kept = bytes_kept(await page_from(log, await floor_of(log)))
    record = size + len(b"orders")
    assert limit - record - limit // 1000 <= kept <= limit


async def page_from(log: Log, bound: int) -> list[Record]:
    found: list[Record] = []
    while page := await log.read_range(bound=bound):
        found += page
        bound = page[-1].seqnum + 1
    return found


async def test_each_record_is_read_once_and_again_after_a_restart() -> None:
    world = World(page_bytes_max=1_000)
    log = world.logs.log("orders")
    await world.fill(log, 100)
    world.rounds.take({"orders": Retention(size_bytes=5_000)})
    await world.rounds.run()
    first = len(world.paused_s)
    await world.rounds.run()
    assert len(world.paused_s) == first
    floor = await floor_of(log)
    await world.fill(log, 1)
    await world.rounds.run()
    assert len(world.paused_s) == first + 1
    assert await floor_of(log) > floor
    floor = await floor_of(log)
    again = world.restarted()
    again.take({"orders": Retention(size_bytes=5_000)})
    await again.run()
    assert await floor_of(log) == floor


async def test_the_last_record_is_kept_although_it_is_larger_than_the_size() -> None:
    world = World()
    log = world.logs.log("orders")
    seqnums = await world.fill(log, 3, 10_000)
    world.rounds.take({"orders": Retention(size_bytes=100)})
    await world.rounds.run()
    assert await floor_of(log) == seqnums[-1]


async def test_a_round_reads_no_more_than_its_bytes_and_alternates_between_logs() -> None:
    world = World(100_000, retention_bytes_per_s=200_000, retention_interval_s=1.0)
    logs = [world.logs.log(name) for name in ("a", "b", "c")]
    for log in logs:
        await world.fill(log, 3, 100_000)
    world.rounds.take({log.name: Retention(size_bytes=150_000) for log in logs})
    assert await world.rounds.run()
    assert await world.rounds.run()
    assert world.rounds.status()["size_marks"] == 3, "each log had a page read"
    rounds = 3
    while await world.rounds.run():
        rounds += 1
    assert rounds == 5
    assert sum(world.paused_s) >= 900_000 / 200_000
    for log in logs:
        assert len(await page_from(log, await floor_of(log))) == 1


async def test_marks_are_bounded_for_any_log() -> None:
    marks = SizeMarks(10_000_000)
    for start in range(0, 100_000, 1_000):
        page = [Record(s, b"orders", b"x" * 1_000, 0.0, 0.0) for s in range(start, start + 1_000)]
        marks.take(page)
        assert marks.marks <= 1_001
    assert 100_000 - marks.until == 10_000_000 // 1_006


async def test_a_trim_by_a_user_between_rounds_is_noticed() -> None:
    world = World()
    log = world.logs.log("orders")
    await world.fill(log, 100)
    world.rounds.take({"orders": Retention(age_s=1e6, size_bytes=5_000)})
    await world.rounds.run()
    await world.fill(log, 10)
    await log.trim(await log.tail())
    last = await world.fill(log, 20)
    await world.rounds.run()
    assert await floor_of(log) == last[0]
    await world.fill(log, 100)
    await world.rounds.run()
    assert bytes_kept(await page_from(log, await floor_of(log))) <= 5_000


async def test_a_log_that_fails_does_not_stop_the_others_and_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    bad, good = world.logs.log("bad"), world.logs.log("good")
    for log in (bad, good):
        await world.fill(log, 10)
    real = MemoryLog.trim

    async def trim(self: MemoryLog, until: int, *, tag: str | int | None = None) -> None:
        if self.name == "bad":
            raise QuorumUnavailableError("Not now.")
        await real(self, until, tag=tag)

    policy = Retention(age_s=5.0, size_bytes=300)
    world.rounds.take({"bad": policy, "good": policy})
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "trim", trim)
        await world.rounds.run()
    assert (await floor_of(bad), await floor_of(good)) == (0, 18)
    await world.rounds.run()
    assert await floor_of(bad) == 15


async def test_figures_show_the_last_trim() -> None:
    world = World()
    await world.fill(world.logs.log("orders"), 10)
    world.rounds.take({"orders": Retention(age_s=5.0)})
    assert world.rounds.status() == {"logs": 1, "size_marks": 0, "trims": 0}
    await world.rounds.run()
    assert world.rounds.status() == {
        "logs": 1,
        "size_marks": 0,
        "trims": 1,
        "last_trim_log": "orders",
        "last_trim_until": 5,
        "last_trim_time": world.now,
    }


async def test_policies_over_the_limit_are_counted_and_unknown_ones_skipped() -> None:
    logs = MemoryLogs()
    policies = PolicyLog(logs, logs_max=2)
    for name in ("a", "b", "c"):
        await logs.log(name).set_retention(age_s=1.0)
    for wrong in (
        b"not JSON",
        b'{"version":2,"log":"b","age_s":9.0}',
        b'{"version":1,"log":"b","age_s":-9.0}',
        b'{"version":1,"log":"$apps","age_s":9.0}',
    ):
        await logs.log(RETENTION_LOG).append(wrong, tags=["b"])
    await logs.log("a").set_retention()
    await logs.log("d").set_retention(size_bytes=5)
    await policies.catch_up()
    assert policies.newest == {"b": Retention(age_s=1.0), "d": Retention(size_bytes=5)}
    assert policies.beyond == 1


async def test_the_service_waits_without_a_timer_until_a_log_has_a_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(retention_interval_s=0.01)
    waits: asyncio.Queue[object] = asyncio.Queue()
    real = MemoryLog.read_next

    async def read_next(self: MemoryLog, *args: object, **given: object) -> Record | None:
        if self.name == RETENTION_LOG:
            waits.put_nowait(given["wait"])
        return await real(self, *args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryLog, "read_next", read_next)
    service = RetentionService(world.logs, world.config, serves=lambda: True)
    log = world.logs.log("orders")
    await world.fill(log, 10)
    service.start()
    try:
        assert await waits.get() == math.inf
        await log.set_retention(age_s=5.0)
        assert await waits.get() == 0.01
        assert service.status()["trims"] == 1
        assert await floor_of(log) == 5
        await log.set_retention()
        while await waits.get() != math.inf:
            assert service.status()["logs"] == 1
        assert service.status()["logs"] == 0
    finally:
        await service.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "stopping waits for its end"


@pytest.mark.parametrize("error", [QuorumUnavailableError("Not now."), KeyError("a fault")])
async def test_the_service_continues_after_an_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    world = World(retention_interval_s=0.01)
    errors = [error] * 3
    again: asyncio.Event = asyncio.Event()
    real = PolicyLog.catch_up

    async def catch_up(self: PolicyLog) -> None:
        if errors:
            raise errors.pop()
        await real(self)
        again.set()

    monkeypatch.setattr(PolicyLog, "catch_up", catch_up)
    service = RetentionService(world.logs, world.config, serves=lambda: True)
    service.start()
    try:
        await again.wait()
    finally:
        await service.stop()
    assert not errors


@pytest.mark.parametrize("tags", [("orders",), ()])
async def test_a_policy_that_may_have_been_replaced_by_a_lost_one_is_not_enforced(
    tags: tuple[str, ...],
) -> None:
    """The lost policy may keep more. Its log is known if only the data of its record is damaged."""
    logs = DamagedLogs()
    for name in ("orders", "other"):
        await logs.log(name).set_retention(age_s=5.0)
    await logs.log("orders").set_retention(age_s=500.0)
    logs.lost, logs.tags = {2}, tags
    policies = PolicyLog(logs, logs_max=10)
    await policies.catch_up()
    assert set(policies.newest) == ({"other"} if tags else set())
    await logs.log("orders").set_retention(age_s=50.0)
    await policies.wait_for_more(math.inf)
    await policies.catch_up()
    assert policies.newest["orders"] == Retention(age_s=50.0)


async def test_lost_records_do_not_keep_a_log_from_being_trimmed() -> None:
    logs = DamagedLogs()
    log = logs.log("orders")
    for _ in range(10):
        await log.append(b"x" * 100)
    logs.lost = {0, 1, 4}

    async def pause(_: float) -> None:
        pass

    rounds = RetentionRounds(logs, NodeConfig(), pause)
    rounds.take({"orders": Retention(size_bytes=350)})
    assert not await rounds.run()
    with pytest.raises(TrimmedError) as trimmed:
        await log.read_next()
    assert trimmed.value.first_seqnum == 7
