"""No derived state depends on the wall clocks of writers (decision 0025). A history from writers
with clocks up to a year off leads to the same state as the same history with correct clocks.

Each kind of history is applied by the code that reads it in a running platform. The last test
replaces `ordered_at` by the writer's time, as code that uses `Record.time` would: each kind fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bokiflow import Flow
from bokiflow.collecting import Collector
from bokiflow.locks.lock_records import Acquire, Release, Remind, lock_tags
from bokiflow.locks.lock_records import ExtendLease as Renew
from bokiflow.locks.lock_records import encode as lock_encoded
from bokiflow.locks.lock_replica import new_replica
from bokiflow.ownership.member import ExecutorMember
from bokiflow.runner import Runner, RunnerSettings
from bokiflow.runs import records as flow
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.versions import Versions
from bokiqueue.records import Acknowledge, Claim, ExtendClaim, PushMessage, Requeue
from bokiqueue.records import encode as queue_encoded
from bokiqueue.replica import QueueReplica
from bokistore import Store, decisions
from bokistore import collection as cells
from indilog.base.deployed import ScheduleSpec
from indilog.base.errors import TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Entry, Log, Record
from indilog.base.retention import Retention
from indilog.config import NodeConfig, node_config
from indilog.testing import MemoryLogs
from indilog_compute.deployments import APPS_LOG, Deployment, DeploymentLog
from indilog_compute.invocations.records import (
    INVOCATIONS_LOG,
    DeclaredDead,
    ExecutorHeartbeat,
    InvocationAccepted,
    InvocationEnded,
    InvocationsClaimed,
)
from indilog_compute.invocations.records import encode as invocation_encoded
from indilog_compute.invocations.service import InvocationService
from indilog_compute.retention import RetentionRounds

YEAR_S = 366 * 86_400.0
DAY_S = 86_400.0
OFFS = st.one_of(st.sampled_from([0.0, YEAR_S, -YEAR_S]), st.floats(-YEAR_S, YEAR_S))
GAPS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 40.0, DAY_S])


class World:
    """Logs with the same passage of time, and writers whose wall clocks are off or not."""

    def __init__(self, *, are_off: bool) -> None:
        self._are_off = are_off
        self._now = 1.7e9
        self._off_s = 0.0
        self.logs = MemoryLogs(
            clock=lambda: self._now, writer_clock=lambda: self._now + self._off_s
        )

    def go_on(self, gap_s: float, off_s: float) -> None:
        """Advance the time; the clock of the next writer is `off_s` ahead, if clocks are off."""
        self._now += gap_s
        self._off_s = off_s if self._are_off else 0.0


Play: TypeAlias = Callable[[World, Sequence[tuple[float, float, Any]]], Awaitable[object]]
"""Appends a history (gap, clock error of the writer, content); returns the resulting state."""


async def queue(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    replica, log = QueueReplica("mail", 1), world.logs.log("work")
    await replica.open(log)
    shard, outcomes = replica.shards[0], []
    for gap_s, off_s, command in history:
        world.go_on(gap_s, off_s)
        if isinstance(command, PushMessage):
            await log.append(queue_encoded(command), tags=[replica.tags.shards[0]])
        else:
            outcomes.append((await shard.submit(log, command)).touched)
    return outcomes, shard.state.snapshot(), shard.state.next_due()


async def lock(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    replica, log = new_replica("hotel"), world.logs.log("work")
    holders = []
    for gap_s, off_s, command in history:
        world.go_on(gap_s, off_s)
        await log.append(lock_encoded(command), tags=[lock_tags("hotel").commands])
        await replica.catch_up(log)
        holder = replica.state.holder
        holders.append(None if holder is None else (holder.token, holder.until))
    return holders, replica.state.snapshot()


async def invocations(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    config = node_config(results_kept_s=100.0)
    never: Any = None
    service = InvocationService(
        world.logs, config, node="n", record_bytes_max=1 << 20, start=never, stop=never
    )
    log, seen = world.logs.log(INVOCATIONS_LOG), []
    for gap_s, off_s, event in history:
        world.go_on(gap_s, off_s)
        seqnum = await log.append(invocation_encoded(event), tags=["any"])
        assert service._apply_page(await log.read_range(bound=seqnum))
        seen.append({i: (o.executor, o.due) for i, o in service._table.open.items()})
    return seen, msgspec.to_builtins(service._table.checkpoint())


async def run(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    log = world.logs.log("flow")
    for gap_s, off_s, said in history:
        world.go_on(gap_s, off_s)
        await log.append(flow.encode(said), tags=[flow.run_tag("r")])
    read = await read_run(log, "r", RunState())
    return read.clock, read.began, read.parked_at, read.state, read.epoch, read.executor


async def collecting(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    runner = Runner(
        "flow", Versions(Flow("flow"), None), world.logs, RunnerSettings(lease_s=5.0, partitions=1)
    )
    log, collector, forgotten = world.logs.log("flow"), Collector(runner, 50.0), []
    idle = flow.Heartbeat("a", 3.0, False, False, 1, b"", 0)
    await log.append(flow.encode(idle), tags=[flow.EXECUTORS_TAG])
    runner.member.takes = True
    for number, (gap_s, off_s, _) in enumerate(history):
        world.go_on(gap_s, off_s)
        tags = [flow.run_tag(f"r{number}"), flow.partition_tag(0)]
        started, ended = flow.RunStarted("w", b"{}", "e", "v"), flow.RunFinished(1, b"1")
        await log.append_batch(
            [
                Entry(flow.encode(started), [*tags, flow.RUNS_TAG]),
                Entry(flow.encode(ended), [*tags, flow.ended_tag(0)]),
            ]
        )
        forgotten.append(await collector.collect(log, await log.now()))
    return forgotten, await floor_of(log, flow.RUNS_TAG)


BEAT = flow.Heartbeat("a", 3.0, True, True, 2, b"", 0)


async def owners(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    log, member = world.logs.log("flow"), ExecutorMember(5.0, 2)
    for gap_s, off_s, said in history:
        world.go_on(gap_s, off_s)
        await log.append(flow.encode(said), tags=[flow.EXECUTORS_TAG])
    await member.look(log)
    return member.owners.snapshot()


async def collection(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    log = world.logs.log("objects")
    store, collected = Store(log), []
    for number, (gap_s, off_s, name) in enumerate(history):
        world.go_on(gap_s, off_s)
        for _ in range(3):
            await store.put(str(name), {"n": number})
        with mock.patch.object(cells, "CELL", 4), mock.patch.object(decisions, "CELL", 4):
            collected.append(await store.collect(keep=50.0))
    return collected


async def retention(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    async def no_pause(_: float) -> None:
        return None

    log = world.logs.log("orders")
    rounds, floors = RetentionRounds(world.logs, NodeConfig(), no_pause), []
    rounds.take({"orders": Retention(age_s=50.0)})
    for gap_s, off_s, _ in history:
        world.go_on(gap_s, off_s)
        await log.append(b"x")
        await rounds.run()
        floors.append(await floor_of(log))
    return floors


async def deployments(world: World, history: Sequence[tuple[float, float, Any]]) -> object:
    apps = DeploymentLog(world.logs)
    for gap_s, off_s, expression in history:
        world.go_on(gap_s, off_s)
        spec = ScheduleSpec("f", str(expression), "UTC", "all")
        deployment = Deployment(
            name="app", version=1, owner="o", sources={}, functions=(), schedules=(spec,)
        )
        await world.logs.log(APPS_LOG).append(msgspec.json.encode(deployment), tags=["app"])
        await apps.catch_up()
    return {name: dict(placed.since) for name, placed in apps.newest.items()}


async def floor_of(log: Log, tag: str | None = None) -> SeqNum:
    try:
        await log.read_next(tag)
    except TrimmedError as error:
        return error.first_seqnum
    return 0


SEQNUMS = st.integers(1, 12)
SECONDS = st.sampled_from([0.5, 2.0, 30.0, 600.0])
MESSAGES = SEQNUMS.map(lambda seqnum: (seqnum,))
OWNERS = st.sampled_from(["a", "b", "c"])
EXECUTORS = st.sampled_from(["a#1", "b#1"])
IDS = st.sampled_from([f"i{n}" for n in range(5)])
STREAM = "delay:0"

QUEUE = st.one_of(
    st.builds(
        PushMessage, st.just(b"x"), st.just(0), st.sampled_from([0.0, 0.0, 2.0, 600.0]), st.just(3)
    ),
    st.builds(Claim, st.integers(1, 2), SECONDS),
    st.builds(Acknowledge, SEQNUMS, MESSAGES),
    st.builds(Requeue, SEQNUMS, MESSAGES, SECONDS),
    st.builds(ExtendClaim, SEQNUMS, MESSAGES, SECONDS),
)
LOCK = st.one_of(
    st.builds(Acquire, OWNERS, SECONDS, st.one_of(st.none(), SECONDS)),
    st.builds(Release, SEQNUMS),
    st.builds(Renew, SEQNUMS, SECONDS),
    st.just(Remind()),
)
INVOCATIONS = st.one_of(
    st.builds(
        InvocationAccepted,
        id=IDS,
        executor=EXECUTORS,
        function=st.just("app.f"),
        arguments=st.just(b"{}"),
        position=st.just(0),
        stream=st.just(STREAM),
        delay_s=st.sampled_from([0.0, 0.0, 2.0, 600.0]),
        key=st.sampled_from(["", "k1", "k2"]),
    ),
    st.builds(InvocationsClaimed, EXECUTORS, st.lists(IDS, max_size=3).map(tuple)),
    st.builds(InvocationEnded, EXECUTORS, IDS, st.just(0), st.just(b"1")),
    st.builds(ExecutorHeartbeat, EXECUTORS),
    st.builds(DeclaredDead, EXECUTORS, st.integers(0, 40), EXECUTORS),
)
RUN = st.one_of(
    st.just(flow.RunStarted("w", b"{}", "e", "v")),
    st.builds(flow.RunTaken, st.integers(1, 3), EXECUTORS),
    st.builds(flow.RunParked, st.integers(1, 3), st.just("v"), st.just("why")),
    st.builds(flow.RunFinished, st.integers(1, 3), st.just(b"1")),
)
OWNING = st.one_of(
    st.builds(
        flow.Heartbeat, EXECUTORS, SECONDS, st.booleans(), st.booleans(), st.just(2),
        st.sampled_from([b"\0", b"\1", b"\3"]), st.integers(0, 9),
    ),
    st.builds(
        flow.Claimed, EXECUTORS, st.sampled_from([(0,), (1,), (0, 1)]), st.integers(0, 12)
    ),
    st.builds(flow.Released, EXECUTORS, st.sampled_from([(0,), (1,)])),
    st.builds(flow.ExecutorLeft, EXECUTORS, st.sampled_from([(), (1,)])),
)  # fmt: skip
KINDS: dict[str, tuple[Play, st.SearchStrategy[Any], Sequence[Any]]] = {
    "queue": (queue, QUEUE, [PushMessage(b"x", 0, 0.0, 3), Claim(1, 600.0), Claim(1, 600.0)]),
    "lock": (
        lock, LOCK, [Acquire("a", 600.0, None), Acquire("b", 600.0, None), Remind()],
    ),
    "invocations": (
        invocations,
        INVOCATIONS,
        [
            InvocationAccepted(
                id="i", executor="a#1", function="app.f", arguments=b"{}", position=0,
                stream=STREAM, delay_s=600.0,
            ),
            InvocationsClaimed("a#1", ("i",)),
            ExecutorHeartbeat("a#1"),
        ],
    ),
    "run": (run, RUN, [flow.RunStarted("w", b"{}", "e", "v"), flow.RunParked(1, "v", "why")]),
    "owners": (owners, OWNING, [BEAT, flow.Heartbeat("b", 9.0, True, True, 2, b"", 0)] * 2),
    "collecting": (collecting, st.just(None), [None] * 6),
    "collection": (collection, st.sampled_from(["x", "y"]), ["x", "y", "x"] * 2),
    "retention": (retention, st.just(None), [None] * 6),
    "deployments": (deployments, st.sampled_from(["* * * * *", "1 * * * *"]), ["* * * * *"]),
}  # fmt: skip
"""For each kind: how it is run, its events, and a history that reveals a wrong time."""


def played(kind: str, history: Sequence[tuple[float, float, Any]], *, are_off: bool) -> object:
    return asyncio.run(KINDS[kind][0](World(are_off=are_off), history))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_writers_whose_clocks_are_off_by_a_year_change_no_outcome(
    kind: str, data: st.DataObject
) -> None:
    history = data.draw(st.lists(st.tuples(GAPS, OFFS, KINDS[kind][1]), min_size=1, max_size=25))
    assert played(kind, history, are_off=True) == played(kind, history, are_off=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_by_the_writers_time_is_caught(kind: str) -> None:
    """Planted fault: `record.time` instead of `record.ordered_at`, and `time.time()` instead of
    `now`.
    """
    real = MemoryLogs.record

    def of_its_writer(logs: MemoryLogs, seqnum: SeqNum) -> Record | None:
        record = real(logs, seqnum)
        if record is not None:
            record.ordered_at = record.time
        return record

    def of_the_wall(logs: MemoryLogs) -> int:
        return int(logs._writer_clock() * 1e6)

    history = [(40.0, YEAR_S * (n % 2 == 0), said) for n, said in enumerate(KINDS[kind][2])]
    right = played(kind, history, are_off=True)
    assert right == played(kind, history, are_off=False)
    with (
        mock.patch.object(MemoryLogs, "record", of_its_writer),
        mock.patch.object(MemoryLogs, "now_us", of_the_wall),
    ):
        assert played(kind, history, are_off=True) != right
