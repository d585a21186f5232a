"""Limits of workflows: how many runs execute at a time, and how many begin in an interval."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bokiflow import (
    Flow,
    FlowSettingsError,
    Handle,
    RunCancelledError,
    RunFailedError,
    RunIdInUseError,
    Startable,
    State,
    Workflow,
)
from bokiflow.limits import limit_state
from bokiflow.limits.limit import rate_text
from bokiflow.runs.records import (
    LimitReminded,
    RunContinued,
    RunParked,
    RunStarted,
    RunTaken,
    encode,
    limit_record,
    limit_tag,
    partition_of,
    partition_tag,
    run_record,
    run_tag,
)
from bokiflow.runs.run_log import PATIENCE_TRIES
from indilog import App, InvalidArgumentsError, NotReadyError, OverloadedError
from indilog.base.log import Entry
from indilog.client import Client
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLogs
from tests.unit.bokiflow.processes import kill

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

LEASE_S = 0.4


class Shop:
    """A process of an application with workflows that have limits and wait for a signal."""

    def __init__(self, logs: MemoryLogs, **limits: Any) -> None:  # noqa: ANN401
        self.logs = logs
        self.app = App("shop")
        self.flow = Flow(self.app, lease=LEASE_S, partitions=8)
        self.flow.attach(logs)
        self.begun: list[str] = []
        self.client = Client(logs)
        self.send: Startable[str] = self.flow.workflow(**limits)(self._send)

    async def _send(self, wf: Workflow, to: str = "bob", rank: int = 0) -> str:
        self.begun.append(wf.id)
        await wf.signal("go")
        return f"{to} {rank}"

    _send.__name__ = "send"

    async def start(self, run: str, *arguments: object) -> Handle[str]:
        return await self.send.start(*arguments, id=run)

    async def end(self, run: str) -> str:
        handle = self.send.handle(run)
        await handle.signal("go")
        return await handle.result(10)

    async def until_begun(self, *runs: str) -> None:
        async with asyncio.timeout(10):
            while set(self.begun) != set(runs):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_count(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.begun) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def waits(self, run: str) -> list[str]:
        return [wait.what for wait in (await self.client.run(self.app, run).show()).waits]

    @asynccontextmanager
    async def driven(self) -> AsyncIterator[None]:
        driver = asyncio.create_task(self.flow.drive(self.logs))
        yield
        driver.cancel()
        await asyncio.wait([driver])


async def test_at_most_so_many_runs_execute_and_the_others_follow_in_order(
    logs: MemoryLogs,
) -> None:
    shop = Shop(logs, concurrency=2)
    for number in range(5):
        await shop.start(f"run-{number}")
    await shop.until_begun("run-0", "run-1")
    await asyncio.sleep(0.2)
    assert sorted(shop.begun) == ["run-0", "run-1"]
    for number in range(5):
        assert await shop.end(f"run-{number}") == "bob 0"
    assert shop.begun[2:] == ["run-2", "run-3", "run-4"]


async def test_a_limit_with_a_key_holds_for_each_key(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1, key="to")
    for run, to in (("a1", "ann"), ("a2", "ann"), ("b1", "bob")):
        await shop.start(run, to)
    await shop.until_begun("a1", "b1")
    await shop.end("a1")
    await shop.until_begun("a1", "b1", "a2")


async def test_a_key_may_be_a_function_of_the_arguments_also_of_their_defaults(
    logs: MemoryLogs,
) -> None:
    shop = Shop(logs, concurrency=1, key=lambda to: to[0])
    await shop.start("b1")
    await shop.start("b2", "berta")
    await shop.start("a1", "ann")
    await shop.until_begun("b1", "a1")
    assert await shop.waits("b2") == ["concurrency 'send:b' (1 of 1 running: b1)"]


async def test_runs_with_a_larger_priority_begin_first(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1, priority="rank")
    for run, rank in (("first", 0), ("low", -1), ("high", 5), ("next", 0)):
        await shop.start(run, "bob", rank)
    for run in ("first", "high", "next", "low"):
        await shop.end(run)
    assert shop.begun == ["first", "high", "next", "low"]


async def test_keys_are_served_round_robin_under_a_total(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=5, total=1, key="to")
    runs = ("a1", "a2", "a3", "b1", "c1")
    for run in runs:
        await shop.start(run, run[0])
    order = ["a1", "a2", "b1", "c1", "a3"]  # a2 asked before the others, a3 after them
    for place, run in enumerate(order):
        await shop.until_begun(*order[: place + 1])
        await shop.end(run)
    assert shop.begun == order


async def test_a_rate_lets_so_many_runs_begin_in_an_interval(logs: MemoryLogs) -> None:
    shop = Shop(logs, rate="2/s")
    for number in range(5):
        await shop.start(f"run-{number}")
    async with asyncio.timeout(20):
        while len(shop.begun) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    records = await logs.log("shop/flow").read_range("flow-limit:send")
    taken = [r.ordered_at for r in records if isinstance(limit_record(r.data), RunTaken)]
    assert len(taken) == 5
    assert taken[2] - taken[0] > 0.9
    assert taken[4] - taken[2] > 0.9


async def test_a_run_that_waits_for_its_turn_is_shown_and_listed(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1, key="to")
    for number in range(3):
        await shop.start(f"run-{number}", "bob")
    await shop.until_begun("run-0")
    place = "concurrency 'send:bob' (1 of 1 running: run-0)"
    assert await shop.waits("run-1") == [place]
    assert await shop.waits("run-2") == [f"{place}, after 1 other run"]
    other = Shop(logs, concurrency=1, key="to")  # another process reads the same
    listed = {run.id: run.waits for run in await other.flow.runs()}
    assert listed == {"run-0": None, "run-1": place, "run-2": place}
    listed = {run.id: run.waits for run in await other.flow.runs(state=State.RUNNING)}
    assert listed["run-2"] == place


async def test_a_rate_shows_when_the_next_run_is_due(logs: MemoryLogs) -> None:
    shop = Shop(logs, rate="1/2h")
    await shop.start("run-0")
    await shop.start("run-1")
    await shop.until_begun("run-0")
    [wait] = (await shop.client.run(shop.app, "run-1").show()).waits
    assert wait.what == "rate 1/2h of 'send'"
    assert wait.until is not None
    assert wait.since is not None
    assert 7100 < wait.until - wait.since <= 7200


async def test_a_waiting_run_can_be_cancelled(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1)
    for run in ("one", "two", "three"):
        await shop.start(run)
    await shop.send.handle("two").cancel()
    with pytest.raises(RunCancelledError, match="cancelled before it began"):
        await shop.send.handle("two").result(10)
    await shop.end("one")
    await shop.end("three")
    assert shop.begun == ["one", "three"]


async def test_a_waiting_run_is_neither_read_nor_executed(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1)
    for number in range(20):
        await shop.start(f"run-{number}")
    await shop.until_begun("run-0")
    assert list(shop.flow.runner.running) == ["run-0"]
    records = await logs.log("shop/flow").read_range("flow:run-7")
    assert [type(run_record(record.data)) for record in records] == [RunStarted]


async def test_another_process_continues_the_runs_and_their_line(logs: MemoryLogs) -> None:
    one, two = Shop(logs, concurrency=1), Shop(logs, concurrency=1)
    for run in ("one", "two", "three"):
        await one.start(run)
    await one.until_begun("one")
    await one.send.handle("three").cancel()
    kill(one.flow)
    async with two.driven():
        await two.until_begun("one")
        await asyncio.sleep(LEASE_S)
        with pytest.raises(RunCancelledError, match="cancelled before it began"):
            await two.send.handle("three").result(10)
        assert two.begun == ["one"]
        await two.end("one")
        assert await two.end("two") == "bob 0"


async def test_processes_share_a_limit(logs: MemoryLogs) -> None:
    one, two = Shop(logs, concurrency=1), Shop(logs, concurrency=1)
    async with one.driven(), two.driven():
        for number in range(6):
            await (one, two)[number % 2].start(f"run-{number}")
        for number in range(6):
            await one.end(f"run-{number}")
            assert len(one.begun) + len(two.begun) <= number + 2
    assert sorted(one.begun + two.begun) == [f"run-{number}" for number in range(6)]


async def test_a_parked_run_frees_its_place_and_asks_for_one_when_it_is_retried(
    logs: MemoryLogs,
) -> None:
    old = Shop(logs, concurrency=1)
    await old.start("one")
    await old.until_begun("one")
    await old.send.handle("one").signal("go")  # consumed by a step of another name below
    await old.send.handle("one").result(10)
    await old.start("two")
    await old.until_begun("one", "two")
    await old.start("three")
    kill(old.flow)

    flow = Flow("shop", lease=LEASE_S, partitions=8)
    flow.attach(logs)
    begun: list[str] = []

    async def send(wf: Workflow, to: str) -> str:  # does not accept the arguments of the runs
        begun.append(wf.id)
        return to

    changed = flow.workflow(concurrency=1)(send)
    driver = asyncio.create_task(flow.drive(logs))
    for run in ("two", "three"):
        async with asyncio.timeout(10):
            while (await changed.handle(run).status()).state is not State.PARKED:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    await changed.start("ann", id="four")
    assert await changed.handle("four").result(10) == "ann"
    driver.cancel()
    await asyncio.wait([driver])

    last = Shop(logs, concurrency=1)
    async with last.driven():
        await last.until_begun("two")
        await asyncio.sleep(LEASE_S)
        assert last.begun == ["two"]
        await last.end("two")
        await last.end("three")


async def test_a_run_that_its_limit_counts_as_parked_asks_for_a_place(logs: MemoryLogs) -> None:
    """The end of a round was in flight when the executor parked the run."""
    one = Shop(logs, concurrency=1)
    await one.start("one")
    await one.until_begun("one")
    run = one.flow.runner.running["one"].execution.run
    assert run.started is not None
    kill(one.flow)
    parked = RunParked(run.epoch, "v", "other code")
    continued = RunContinued(
        epoch=run.epoch,
        round=2,
        end=run.end + 2,
        workflow="send",
        arguments=b"{}",
        executor=run.executor,
        version="v",
        started_at=run.started_at,
        began=run.began,
        cancel_asked=False,
        limit=run.started.limit,
    )
    log = logs.log("shop/flow")
    tags = (run_tag("one"), partition_tag(partition_of("one", 8)), limit_tag("send"))
    for record in (parked, continued):
        await log.append(encode(record), tags=tags)
    two = Shop(logs, concurrency=1)
    async with two.driven():
        assert await two.end("one") == "bob 0"


async def test_a_repeated_start_keeps_one_place(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1)
    await shop.start("one")
    await shop.end("one")
    again = await shop.start("one")  # it has ended: the start asks for a place
    assert await again.result(10) == "bob 0"
    await shop.start("two")
    assert await shop.end("two") == "bob 0"
    assert shop.begun == ["one", "two"]


async def test_a_run_of_another_workflow_with_the_id_takes_no_place(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1)

    @shop.flow.workflow
    async def other(wf: Workflow) -> None:
        await wf.signal("never")

    await other.start(id="one")
    elsewhere = Shop(logs, concurrency=1)  # does not know the run, so it appends a start
    with pytest.raises(RunIdInUseError, match="one of workflow 'other'"):
        await elsewhere.start("one")
    await shop.start("two")
    await shop.until_begun("two")


async def test_changed_settings_hold_for_runs_that_wait(logs: MemoryLogs) -> None:
    one = Shop(logs, concurrency=1)
    for number in range(3):
        await one.start(f"run-{number}")
    await one.until_begun("run-0")
    kill(one.flow)
    two = Shop(logs, concurrency=3)
    async with two.driven():
        await two.until_begun("run-0", "run-1", "run-2")


class Unreminded(HookedLogs):
    """Logs that take no reminder of a limit for a while."""

    left = PATIENCE_TRIES

    async def before_append(self, entries: Sequence[Entry]) -> None:
        of_limit = [one for one in entries if limit_tag("send") in one.tags]
        if self.left and any(isinstance(limit_record(e.data), LimitReminded) for e in of_limit):
            self.left -= 1
            raise NotReadyError("away")


async def test_changed_settings_are_recorded_although_the_log_has_refused_them_before() -> None:
    logs = Unreminded()
    one = Shop(logs, concurrency=1)
    for number in range(3):
        await one.start(f"run-{number}")
    await one.until_begun("run-0")
    kill(one.flow)
    two = Shop(logs, concurrency=3)
    async with two.driven():
        while logs.left:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(1)
        await two.until_begun("run-0", "run-1", "run-2")


async def test_a_limit_that_is_gone_keeps_no_run(logs: MemoryLogs) -> None:
    one = Shop(logs, concurrency=1)
    for number in range(3):
        await one.start(f"run-{number}")
    await one.until_begun("run-0")
    kill(one.flow)
    two = Shop(logs)
    async with two.driven():
        await two.until_begun("run-0", "run-1", "run-2")


async def test_children_and_forks_wait_for_their_turn(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1)

    @shop.flow.workflow
    async def parent(wf: Workflow) -> list[str]:
        return await wf.gather(wf.run(shop.send, "ann"), wf.run(shop.send, "bob"))

    started = await parent.start(id="p")
    await shop.until_count(1)
    await shop.end(shop.begun[0])
    await shop.until_count(2)
    fork = await shop.flow.fork(shop.begun[0], "1")
    await asyncio.sleep(0.2)
    assert len(shop.begun) == 2, "the other child has the place"
    await shop.end(shop.begun[1])
    assert sorted(await started.result(10)) == ["ann 0", "bob 0"]
    await shop.until_count(3)
    assert shop.begun[2] == fork.id
    await shop.end(fork.id)


class Tree:
    """Workflows that run each other as children, in a limit of `concurrency` runs for each key."""

    def __init__(self, logs: MemoryLogs, **limits: Any) -> None:  # noqa: ANN401
        self.flow = Flow("shop", lease=LEASE_S)
        self.flow.attach(logs)
        self.meet = asyncio.Barrier(2)

        @self.flow.workflow(**limits)
        async def walk(wf: Workflow, depth: int, key: str = "a", kind: str = "run") -> int:
            if not depth:
                return 0
            if kind == "meet":  # two such runs have the places when they start their children
                await wf.step(self.meet.wait, name="meet")
                return 1 + await wf.run(walk, depth - 1, key)
            if kind == "by another workflow":
                return 1 + await wf.run(step, depth - 1, key)
            if kind == "start":
                await wf.start_child(walk, depth - 1, key, kind)
                return 1
            if kind == "other key":
                return 1 + await wf.run(walk, depth - 1, key + "a", kind)
            return 1 + await wf.run(walk, depth - 1, key, kind)

        @self.flow.workflow
        async def step(wf: Workflow, depth: int, key: str) -> int:
            return 1 + await wf.run(walk, depth, key)

        self.walk = walk


@pytest.mark.parametrize(
    ("limits", "depth", "kind"),
    [
        ({"concurrency": 1}, 1, "run"),
        ({"concurrency": 2}, 2, "run"),
        ({"concurrency": 1}, 1, "by another workflow"),
        ({"concurrency": 3, "total": 2, "key": "key"}, 2, "other key"),
    ],
)
async def test_a_child_that_needs_a_place_of_a_run_that_waits_for_it_fails(
    logs: MemoryLogs, limits: dict[str, Any], depth: int, kind: str
) -> None:
    tree = Tree(logs, **limits)
    handle = await tree.walk.start(depth, "a", kind, id="root")
    with pytest.raises(RunFailedError, match=r"would wait forever: all runs that have a place"):
        await handle.result(10)
    assert await (await tree.walk.start(0)).result(10) == 0, "the places are free again"


@pytest.mark.parametrize(
    ("limits", "depth", "kind"),
    [
        ({"concurrency": 2}, 1, "run"),
        ({"concurrency": 1, "key": "key"}, 2, "other key"),
        ({"concurrency": 1}, 2, "start"),
    ],
)
async def test_a_child_that_gets_a_place_begins(
    logs: MemoryLogs, limits: dict[str, Any], depth: int, kind: str
) -> None:
    tree = Tree(logs, **limits)
    handle = await tree.walk.start(depth, "a", kind, id="root")
    assert await handle.result(10) == (1 if kind == "start" else depth)
    async with asyncio.timeout(10):
        while tree.flow.runner.running:  # noqa: ASYNC110 - the children that it started
            await asyncio.sleep(0.01)


async def test_of_two_runs_that_wait_for_each_others_places_one_fails(logs: MemoryLogs) -> None:
    tree = Tree(logs, concurrency=2)
    handles = [await tree.walk.start(1, "a", "meet", id=name) for name in ("one", "two")]
    results = await asyncio.gather(*(one.result(10) for one in handles), return_exceptions=True)
    failed = [one for one in results if isinstance(one, RunFailedError)]
    assert len(failed) == 1
    assert "would wait forever" in str(failed[0])
    assert 1 in results


async def test_rounds_keep_the_place(logs: MemoryLogs) -> None:
    flow = Flow("shop", lease=LEASE_S)
    flow.attach(logs)
    begun: list[tuple[str, int]] = []

    @flow.workflow(concurrency=1)
    async def poll(wf: Workflow, left: int) -> str:
        begun.append((wf.id, left))
        await wf.sleep(0.01)
        if left:
            wf.continue_as_new(left - 1)
        return "done"

    one, two = await poll.start(2, id="one"), await poll.start(1, id="two")
    assert [await one.result(10), await two.result(10)] == ["done", "done"]
    assert begun == [("one", 2), ("one", 1), ("one", 0), ("two", 1), ("two", 0)]


async def test_a_full_limit_refuses_starts(
    logs: MemoryLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_state, "WAITING_MAX", 2)
    shop = Shop(logs, concurrency=1)
    for number in range(3):
        await shop.start(f"run-{number}")
    await shop.until_begun("run-0")
    with pytest.raises(OverloadedError, match="wait for their turn in 'send' already"):
        await shop.start("run-3")
    other = Shop(logs, concurrency=1)  # has not read the limit, so it starts the run
    await other.start("run-4")
    with pytest.raises(RunCancelledError, match="Refused, because"):
        await other.send.handle("run-4").result(10)
    for number in range(3):
        await shop.end(f"run-{number}")


async def test_a_run_that_its_limit_has_lost_executes(
    logs: MemoryLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop(logs, concurrency=1)
    monkeypatch.setattr(limit_state.LimitState, "_start", lambda *_: None)
    await shop.start("one")
    monkeypatch.undo()
    shop.flow.runner.taking.want("one")
    assert await shop.end("one") == "bob 0"


async def test_invalid_keys_and_priorities_start_nothing(logs: MemoryLogs) -> None:
    shop = Shop(logs, concurrency=1, key=lambda to: to, priority=lambda rank: rank / 2)
    with pytest.raises(InvalidArgumentsError, match="its key must be 1 to 256 characters"):
        await shop.start("one", "")
    with pytest.raises(InvalidArgumentsError, match=r"must be a whole number, not 0\.5"):
        await shop.start("one", "bob", 1)
    broken = Shop(logs, concurrency=1, key=lambda to: to[9])
    with pytest.raises(InvalidArgumentsError, match="its key raised IndexError"):
        await broken.start("one")
    assert (await shop.flow.runs()).runs == ()


async def send(wf: Workflow, to: str) -> None: ...


@pytest.mark.parametrize(("limits", "sentence"), [
    ({"concurrency": 0}, "concurrency must be 1 to 10,000 runs, not 0"),
    ({"concurrency": True}, "not True"),
    ({"rate": "often"}, "such as 10/s, 100/min or 5/2h, not 'often'"),
    ({"rate": "0/s"}, "not '0/s'"),
    ({"key": "to"}, "so it needs concurrency= or rate="),
    ({"concurrency": 1, "total": 2}, "without key=, write concurrency="),
    ({"concurrency": 1, "key": "who"}, "not 'who'; the arguments are: to"),
    ({"concurrency": 1, "key": lambda who: who}, "whose parameters are arguments"),
])  # fmt: skip
async def test_a_wrong_limit_is_refused_at_its_decorator(
    flow: Flow, limits: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(FlowSettingsError, match=sentence):
        flow.workflow(**limits)(send)
    assert not flow.definitions


@pytest.mark.parametrize(
    ("rate", "shown"),
    [("10/s", "10/s"), ("5 / 2 h", "5/2h"), ("7/60s", "7/min"), ("1/90s", "1/90s")],
)
async def test_a_rate_is_shown_as_it_is_written(flow: Flow, rate: str, shown: str) -> None:
    flow.workflow(rate=rate)(send)
    limit = flow.definitions["send"].limit
    assert limit is not None
    assert rate_text(limit.settings) == shown
