"""State machine replication: replicas that applied the same commands are equal."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from bokistore import InvalidObjectError, Replica, StoreVersionError
from indilog.base.errors import DataLossError, TooLargeError, TrimmedError
from indilog.base.log import Entry, Log
from indilog.testing import MemoryLog, MemoryLogs, cluster
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.support.damaged_log import DamagedLogs
from tests.support.hooked_log import HookedLog, Read


class Counters:
    """A state machine of this test: numbers by name."""

    def __init__(self, log: Log, *, every: int = 1000) -> None:
        self.numbers: dict[str, int] = {}
        self.changed = asyncio.Event()
        self.applied: list[bytes] = []
        self.restored = 0
        self.replica = Replica(
            log, self.apply, snapshot=self.dump, restore=self.load, snapshot_every=every
        )

    def apply(self, command: bytes) -> int:
        name = command.decode()
        if name == "refused":
            raise ValueError(name)
        self.applied.append(command)
        self.numbers[name] = self.numbers.get(name, 0) + 1
        self.changed.set()
        return self.numbers[name]

    def dump(self) -> bytes:
        return json.dumps(self.numbers, sort_keys=True).encode()

    def load(self, state: bytes) -> None:
        self.numbers = json.loads(state)
        self.restored += 1


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog("machines")


@pytest.mark.asyncio
async def test_a_command_returns_the_result_at_its_position_in_the_order(log: MemoryLog) -> None:
    one, two = Counters(log), Counters(log)
    assert await one.replica.propose(b"a") == 1
    assert await two.replica.propose(b"a") == 2
    assert await one.replica.propose(b"a") == 3
    assert two.numbers == {"a": 2}, "it has not synchronized since"
    await two.replica.sync()
    assert (one.numbers, two.numbers) == ({"a": 3}, {"a": 3})
    assert one.replica.end == two.replica.end == 3
    assert one.replica.state_hash() == two.replica.state_hash()


@pytest.mark.asyncio
async def test_an_error_of_apply_is_the_result_and_all_replicas_continue(log: MemoryLog) -> None:
    one, two = Counters(log), Counters(log)
    with pytest.raises(ValueError, match="refused"):
        await one.replica.propose(b"refused")
    assert await two.replica.propose(b"a") == 1
    await one.replica.sync()
    assert one.replica.commands == two.replica.commands == 2
    assert one.replica.state_hash() == two.replica.state_hash()


@pytest.mark.asyncio
async def test_a_replica_resumes_from_the_last_snapshot(log: MemoryLog) -> None:
    one = Counters(log, every=10)
    for _ in range(95):
        await one.replica.propose(b"a")
    late = Counters(log, every=10)
    await late.replica.sync()
    assert (late.restored, len(late.applied)) == (1, 5)
    assert (late.numbers, late.replica.commands) == ({"a": 95}, 95)
    assert len(await log.read_range("smr-snapshot:state")) == 9, "one replica saves, not each"


@pytest.mark.asyncio
async def test_commands_in_a_snapshot_are_trimmed_and_a_lagging_replica_continues(
    log: MemoryLog,
) -> None:
    one, behind = Counters(log), Counters(log)
    await behind.replica.propose(b"b")
    for _ in range(50):
        await one.replica.propose(b"a")
    assert await one.replica.trim() == 0, "there is no snapshot yet"
    await one.replica.save()
    await one.replica.propose(b"a")
    end = await one.replica.trim()
    assert end == 51
    with pytest.raises(TrimmedError):
        await log.read_range("smr:state", end - 1)
    assert await behind.replica.propose(b"a") == 52
    assert (behind.restored, len(behind.applied)) == (1, 3)
    assert behind.numbers == {"b": 1, "a": 52}


@pytest.mark.asyncio
async def test_a_follower_whose_commands_are_trimmed_loads_the_snapshot(log: MemoryLog) -> None:
    one, behind = Counters(log, every=10), Counters(log)
    await behind.replica.sync()
    for _ in range(20):
        await one.replica.propose(b"a")
    await one.replica.trim()
    following = asyncio.create_task(behind.replica.follow())
    await one.replica.propose(b"b")
    await asyncio.wait_for(behind.changed.wait(), 10)
    assert (behind.restored, behind.numbers) == (1, {"a": 20, "b": 1})
    following.cancel()


@pytest.mark.asyncio
async def test_a_follower_fails_if_commands_are_trimmed_without_a_snapshot(log: MemoryLog) -> None:
    behind = Counters(log)
    await behind.replica.sync()
    await Counters(log).replica.propose(b"a")
    await log.trim(1)
    with pytest.raises(TrimmedError):
        await asyncio.wait_for(behind.replica.follow(), 10)


@pytest.mark.asyncio
async def test_a_snapshot_of_a_lagging_replica_does_not_replace_a_better_one(
    log: MemoryLog,
) -> None:
    lagging, ahead = Counters(log), Counters(log)
    await lagging.replica.propose(b"a")
    for _ in range(9):
        await ahead.replica.propose(b"a")
    await ahead.replica.save()
    await ahead.replica.trim()
    await lagging.replica.save()
    await lagging.replica.trim()
    newcomer = Counters(log)
    await newcomer.replica.sync()
    assert newcomer.numbers == {"a": 10}


@pytest.mark.asyncio
async def test_commands_trimmed_without_a_snapshot_are_an_error(log: MemoryLog) -> None:
    await Counters(log).replica.propose(b"a")
    await log.trim(1)
    with pytest.raises(TrimmedError):
        await Counters(log).replica.sync()


@pytest.mark.asyncio
async def test_a_lost_snapshot_is_skipped_if_another_one_or_the_commands_are_left() -> None:
    logs = DamagedLogs()
    one = Counters(logs.log("machines"))
    for _ in range(2):
        await one.replica.propose(b"a")
        await one.replica.save()
    for is_lost, restored in (({1, 3}, 0), ({3}, 1)):
        logs.lost = is_lost
        other = Counters(logs.log("machines"))
        await other.replica.sync()
        assert (other.numbers, other.restored) == ({"a": 2}, restored)


@pytest.mark.asyncio
async def test_a_lost_only_snapshot_is_reported_as_lost_and_kept_until_a_later_one() -> None:
    logs = DamagedLogs()
    one, lagging = Counters(logs.log("machines")), Counters(logs.log("machines"))
    await lagging.replica.propose(b"a")
    await one.replica.propose(b"a")
    lost = await one.replica.save()
    await one.replica.trim()
    logs.lost = {lost}
    with pytest.raises(DataLossError):
        await Counters(logs.log("machines")).replica.sync()
    await lagging.replica.save()
    with pytest.raises(DataLossError):
        await lagging.replica.trim()
    logs.lost = set()
    newcomer = Counters(logs.log("machines"))
    await newcomer.replica.sync()
    assert newcomer.numbers == {"a": 2}, "it is repaired"
    logs.lost = {lost}
    await one.replica.propose(b"a")
    await one.replica.save()
    assert await one.replica.trim() == one.replica.end
    late = Counters(logs.log("machines"))
    await late.replica.sync()
    assert late.numbers == {"a": 3}


@pytest.mark.asyncio
async def test_a_replica_can_stop_at_a_seqnum(log: MemoryLog) -> None:
    one = Counters(log)
    for name in (b"a", b"b", b"a"):
        await one.replica.propose(name)
    other = Counters(log)
    assert await other.replica.sync(2) == 2
    assert other.numbers == {"a": 1, "b": 1}
    assert await other.replica.sync(1) == 2, "its position never decreases"
    assert await other.replica.sync(99) == 3


@pytest.mark.asyncio
async def test_state_machines_of_one_log_are_separate(log: MemoryLog) -> None:
    await log.append(b"of another application", tags=["x"])
    one = Counters(log)
    await one.replica.propose(b"a")
    other: list[bytes] = []
    replica = Replica(log, other.append, snapshot=lambda: b"", restore=lambda _: None, name="other")
    await replica.sync()
    assert other == []


@pytest.mark.asyncio
async def test_only_save_fails_on_a_state_larger_than_a_record(log: MemoryLog) -> None:
    size = log.logs.config.record_bytes_max
    replica = Replica(
        log, len, snapshot=lambda: bytes(size), restore=lambda _: None, snapshot_every=1
    )
    assert await replica.propose(b"abc") == 3
    with pytest.raises(TooLargeError):
        await replica.save()


@pytest.mark.asyncio
async def test_a_snapshot_of_another_format_is_refused(log: MemoryLog) -> None:
    for data in (b"\x02" + bytes(16), b""):
        await log.append(data, tags=["smr-snapshot:state"])
        with pytest.raises(StoreVersionError):
            await Counters(log).replica.sync()


@pytest.mark.asyncio
async def test_a_bad_name_is_refused(log: MemoryLog) -> None:
    with pytest.raises(InvalidObjectError, match="name"):
        Replica(log, len, snapshot=bytes, restore=lambda _: None, name="")


class SlowStart(HookedLog):
    """A log whose second look for a snapshot waits, and whose appends return when they may."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__("machines", logs=logs)
        self.looks = 0
        self.appended, self.may_look, self.may_return = (asyncio.Event() for _ in range(3))

    async def before_read(self, read: Read) -> None:
        if str(read.tag).startswith("smr-snapshot:"):
            self.looks += 1
            await (self.may_look.wait() if self.looks == 2 else asyncio.sleep(0))

    async def after_append(self, entries: Sequence[Entry]) -> None:
        self.appended.set()
        await self.may_return.wait()


@pytest.mark.asyncio
async def test_the_first_proposals_of_a_replica_are_concurrent_and_get_their_results() -> None:
    """One is appended, and is in a snapshot of another replica, before the other one has begun."""
    logs = MemoryLogs()
    log = SlowStart(logs)
    one, other = Counters(log), Counters(logs.log("machines"))
    proposals = [asyncio.create_task(one.replica.propose(b"a")) for _ in range(2)]
    await log.appended.wait()
    assert await other.replica.propose(b"a") == 2
    await other.replica.save()
    log.may_look.set()
    for _ in range(10):
        await asyncio.sleep(0)
    log.may_return.set()
    assert await asyncio.gather(*proposals) == [1, 3]


@pytest.mark.asyncio
async def test_replicas_on_the_platform_are_equal_and_follow() -> None:
    async with cluster() as client:
        machines = [Counters(client.log("machines"), every=7) for _ in range(3)]
        follower = Counters(client.log("machines"))
        async with asyncio.TaskGroup() as group:
            following = group.create_task(follower.replica.follow())
            results = await asyncio.gather(
                *[machines[n % 3].replica.propose(b"a") for n in range(60)]
            )
            while follower.replica.commands < 60:  # noqa: ASYNC110 - it may load a snapshot, too
                await asyncio.sleep(0.01)
            following.cancel()
        assert sorted(results) == list(range(1, 61))
        ends = {await machine.replica.sync() for machine in machines}
        assert len(ends) == 1
        hashes = {machine.replica.state_hash() for machine in (*machines, follower)}
        assert len(hashes) == 1


def history(seed: int) -> None:
    """Replicas propose, sync, save and trim in a random order; the expected state follows from the
    log.
    """
    chance = random.Random(seed)
    log = MemoryLog("machines", logs=MemoryLogs(page_bytes_max=chance.choice((2, 1000))))
    machines = [Counters(SteppedLog(log), every=chance.randint(1, 5)) for _ in range(3)]
    hashes: dict[int, set[str]] = {}
    results: list[tuple[str, int]] = []
    unknown: list[str] = []

    async def live(machine: Counters) -> None:
        for _ in range(12):
            match chance.choice(("propose", "propose", "propose", "sync", "save", "trim")):
                case "propose":
                    name = chance.choice("ab")
                    try:
                        results.append((name, await machine.replica.propose(name.encode())))
                    except TrimmedError:
                        unknown.append(name)
                case "sync":
                    await machine.replica.sync()
                case "save":
                    await machine.replica.save()
                case _:
                    await machine.replica.trim()
            hashes.setdefault(machine.replica.end, set()).add(machine.replica.state_hash())

    executions: list[Coroutine[Any, Any, None]] = [live(m) for m in machines for _ in range(2)]
    run_stepped(executions, chance.choice)
    assert all(len(found) == 1 for found in hashes.values()), "equal at equal seqnums"
    expected: dict[str, int] = {}
    for seqnum in range(log.logs.position):
        record = log.logs.record(seqnum)
        assert record is not None
        if record.tags == ("smr:state",):
            expected[record.data.decode()] = expected.get(record.data.decode(), 0) + 1
    every = {(name, number) for name, count in expected.items() for number in range(1, count + 1)}
    assert every.issuperset(results)
    assert len(set(results)) == len(results) == len(every) - len(unknown)
    for machine in (*machines, Counters(SteppedLog(log))):
        run_stepped([machine.replica.sync()], lambda ready: ready[0])
        assert machine.numbers == expected


def test_replicas_are_equal_at_equal_seqnums_after_any_operations() -> None:
    for seed in range(300):
        history(seed)


def two(choose: Choose) -> tuple[int, ...]:
    log = MemoryLog("machines", logs=MemoryLogs())
    machine = Counters(SteppedLog(log), every=1)
    other = Counters(SteppedLog(log))
    run_stepped([machine.replica.sync(), other.replica.sync()], lambda ready: ready[0])
    return tuple(
        run_stepped(
            [
                machine.replica.propose(b"a"),
                machine.replica.propose(b"a"),
                other.replica.propose(b"a"),
            ],
            choose,
        )
    )


def test_concurrent_proposals_each_get_their_own_result_in_every_interleaving() -> None:
    for results in interleavings(two):
        assert sorted(results) == [1, 2, 3]
