"""Calls by workflow runs, over the invocation service: one outcome as long as the run lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import indilog
from bokiflow import Flow, Workflow
from bokiflow.collecting import Collector
from bokiflow.runs.held_calls import _TOGETHER
from bokiflow.runs.records import PARTITIONS
from indilog import Context, OverloadedError
from indilog.base.errors import NotReadyError
from indilog.base.log import Session
from indilog.link.link_messages import Returned
from indilog.sdk.runs import holder_of
from indilog.testing import MemoryLogs
from indilog_compute.invocations import held_invocations
from indilog_compute.invocations.records import INVOCATIONS_LOG, CallsReleased, decode
from indilog_compute.invocations.service import InvocationService
from tests.contract.test_invocations import Node, running
from tests.support.flow_executions import FLOW_LOG, begin, execute, take

pytestmark = pytest.mark.asyncio
DAYS = 3  # more than `results_kept_s`


class Crash(BaseException):
    """The process ends here."""


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - of the code under test, which has no event for it
            await asyncio.sleep(0.01)


@dataclass
class Platform:
    """Calls functions by an invocation service, as a compute node does.

    Attributes:
        crashes_after: number of calls whose caller crashes before it gets the outcome.
        is_away: whether releases fail.
        released: holder and number of keys of each release.
    """

    service: InvocationService
    crashes_after: int = 0
    is_away: bool = False
    released: list[tuple[str, int]] = field(default_factory=list)

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = "", holder: str = ""
    ) -> bytes:
        id_ = await self.service.accept(function, arguments, key=key, holder=holder)
        outcome = await self.service.outcome(id_)
        if self.crashes_after:
            self.crashes_after -= 1
            raise Crash
        assert isinstance(outcome, Returned)
        return outcome.result

    async def send(self, *_: object, **__: object) -> str:
        raise AssertionError("nothing is sent")

    async def release(self, holder: str, keys: Sequence[str]) -> None:
        if self.is_away:
            raise NotReadyError("away")
        self.released.append((holder, len(keys)))
        self.service.release(holder, keys)

    async def holders(self, prefix: str, after: str, session: Session) -> Sequence[str]:
        return (await self.service.holders(prefix, after))[0]


class Counting(Node):
    """Each execution of the function returns its own number."""

    ran = 0

    def start(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        self.ran += 1
        self.outcomes = [Returned(0, b"%d" % self.ran)]
        return super().start(*given, **named)


@dataclass
class World:
    """A platform whose time a test moves."""

    logs: MemoryLogs
    node: Counting
    platform: Platform

    @property
    def context(self) -> Context:
        return Context(self.logs, self.platform)

    @property
    def held(self) -> int:
        return int(self.platform.service.status()["held"])

    async def let_pass(self, days: float = DAYS) -> None:
        """Let time pass; the platform reads a record of the later time."""
        await self.logs.skip(days=days)
        await self.platform.service.outcome(await self.platform.service.accept("app.tick", b"{}"))
        self.node.ran -= 1

    async def until_held(self, number: int) -> None:
        await until(lambda: self.held == number)


@asynccontextmanager
async def a_world(held_calls_max: int = 100_000) -> AsyncIterator[World]:
    logs, node = MemoryLogs(), Counting()
    async with running(logs, node, held_calls_max=held_calls_max) as service:
        yield World(logs, node, Platform(service))


async def charging(wf: Workflow) -> list[int]:
    return [await wf.call("app.charge", amount=1), await wf.call("app.charge", amount=2)]


async def test_a_run_that_stops_for_days_inside_a_call_gets_its_outcome() -> None:
    """Its executor crashes after the call has ended, and before the run has recorded the outcome.
    The next executor comes when outcomes of that age are no longer kept.
    """
    async with a_world() as world:
        log = world.logs.log(FLOW_LOG)
        await begin(log, "r")
        world.platform.crashes_after = 1
        with pytest.raises(Crash):
            await execute(log, "r", charging, context=world.context)
        for executor in ("second", "third"):
            await world.let_pass()
            await take(log, "r", executor)
            world.platform.crashes_after = executor == "second"
            if executor == "second":
                with pytest.raises(Crash):
                    await execute(log, "r", charging, context=world.context)
        finished = await execute(log, "r", charging, context=world.context)
        assert (finished.result, world.node.ran) == (b"[1,2]", 2)


async def test_an_outcome_is_held_on_each_node_and_after_a_restart() -> None:
    logs, node = MemoryLogs(), Counting()
    async with running(logs, node, "a") as service:
        platform = Platform(service)
        await platform.call("app.f", b"{}", Session(), key="k", holder="h")
        await World(logs, node, platform).let_pass()
    again = Counting()
    async with running(logs, again, "a") as one, running(logs, again, "b") as other:
        for service in (one, other):
            text = await Platform(service).call("app.f", b"{}", Session(), key="k", holder="h")
            assert text == b"1"
        assert again.ran == 0
        other.release("h", [])
        await until(lambda: not one.status()["held"])


async def test_a_released_outcome_is_kept_for_the_retention_and_then_dropped() -> None:
    async with a_world() as world:
        call = world.platform.call
        for _ in range(2):
            assert await call("app.f", b"{}", Session(), key="k", holder="h") == b"1"
        world.platform.service.release("h", ["k"])
        await world.until_held(0)
        await world.let_pass(0.9)
        assert await call("app.f", b"{}", Session(), key="k", holder="h") == b"1"
        await world.let_pass(0.2)
        assert await call("app.f", b"{}", Session(), key="k", holder="h") == b"2"


async def test_many_releases_are_one_record() -> None:
    async with a_world() as world:
        begun = time.monotonic()
        for number in range(20):
            await world.platform.call("app.f", b"{}", Session(), key=f"k{number}", holder="h")
            world.platform.service.release("h", [f"k{number}"])
        await world.until_held(0)
        log = world.logs.log(INVOCATIONS_LOG)
        records = [decode(record.data) for record in await log.read_range(limit=1000)]
        seconds = time.monotonic() - begun
        assert sum(isinstance(record, CallsReleased) for record in records) <= 3 + seconds


async def test_new_calls_are_refused_when_the_limit_is_reached_and_held_ones_are_not() -> None:
    async with a_world(held_calls_max=2) as world:
        call = world.platform.call
        for key in ("a", "b"):
            await call("app.f", b"{}", Session(), key=key, holder="h")
        with pytest.raises(OverloadedError, match="Let stuck runs end"):
            await call("app.f", b"{}", Session(), key="c", holder="h")
        assert await call("app.f", b"{}", Session(), key="a", holder="h") == b"1"
        assert await call("app.f", b"{}", Session(), key="not held") == b"3"
        world.platform.service.release("h", ["a"])
        await world.until_held(1)
        assert await call("app.f", b"{}", Session(), key="c", holder="h") == b"4"


async def test_a_long_run_releases_what_it_has_recorded() -> None:
    """So it never holds many outcomes, and after its end none."""
    most = 0

    async def many(wf: Workflow) -> None:
        nonlocal most
        for number in range(3 * _TOGETHER):
            await wf.call("app.f", number=number)
            most = max(most, world.held)

    async with a_world() as world:
        flow, done = Flow("shop"), asyncio.Event()

        @flow.workflow
        async def long(wf: Workflow) -> None:
            await many(wf)
            await world.until_held(_TOGETHER)
            done.set()

        flow.attach(world.context)
        handle = await long.start()
        await handle.result(60)
        assert done.is_set()
        assert [keys for _, keys in world.platform.released] == [_TOGETHER, _TOGETHER, 0]
        await world.until_held(0)
        assert most <= 3 * _TOGETHER


async def test_a_run_that_waits_for_long_holds_no_recorded_outcome() -> None:
    async with a_world() as world:
        flow = Flow("shop")

        @flow.workflow
        async def waits(wf: Workflow) -> int:
            paid: int = await wf.call("app.charge")
            await wf.signal("go")
            return paid

        flow.attach(world.context)
        flow.runner.settings = replace(flow.runner.settings, passive_after_s=0.0)
        handle = await waits.start()
        async with asyncio.timeout(60):
            while not world.platform.released:
                flow.runner._tidy()
                await asyncio.sleep(0.01)
        await world.until_held(0)
        await world.let_pass()
        await handle.signal("go", None)
        assert await handle.result(60) == 1
        assert world.node.ran == 1


async def test_a_round_of_an_endless_run_leaves_nothing_held() -> None:
    async with a_world() as world:
        flow = Flow("shop")

        @flow.workflow
        async def rounds(wf: Workflow, left: int = 2) -> int:
            paid: int = await wf.call("app.charge")
            if left:
                wf.continue_as_new(left - 1)
            return paid

        flow.attach(world.context)
        assert await (await rounds.start(id="r")).result(60) == 3
        assert world.platform.released == [(holder_of(flow.runner.log_name, "r"), 0)] * 3
        await world.until_held(0)


async def test_a_release_that_fails_is_repeated_by_the_next_execution() -> None:
    """A crash between the record of an outcome and its release leaves the outcome held."""

    async def both(wf: Workflow) -> int:
        paid: int = await wf.call("app.charge")
        await wf.held_calls.release_recorded()
        return paid

    async with a_world() as world:
        log = world.logs.log(FLOW_LOG)
        await begin(log, "r")
        world.platform.is_away = True

        async def crashing(wf: Workflow) -> None:
            await wf.call("app.charge")
            await wf.execution.flush()
            await wf.held_calls.release_recorded()
            raise Crash

        with pytest.raises(Crash):
            await execute(log, "r", crashing, context=world.context)
        assert world.held == 1
        world.platform.is_away = False
        await take(log, "r", "second")
        await execute(log, "r", both, context=world.context)
        assert world.platform.released == [(holder_of(FLOW_LOG, "r"), 1)]
        await world.until_held(0)


async def test_outcomes_of_ended_and_unknown_runs_are_collected_and_those_of_open_runs_not() -> (
    None
):
    async with a_world() as world:
        flow, gate = Flow("shop"), asyncio.Event()

        @flow.workflow
        async def waits(wf: Workflow) -> None:
            await wf.step(gate.wait)

        flow.attach(world.context)
        runner = flow.runner
        await runner.join(world.context, range(PARTITIONS))
        for run in ("open", "ended"):
            await waits.start(id=run)
        gate.set()
        await flow.handle("waits", "ended").result(60)
        gate.clear()
        still = await waits.start(id="still")
        holders = [holder_of(runner.log_name, run) for run in ("ended", "still", "gone", "still/3")]
        other = holder_of(f"{runner.log_name}/2", "gone")
        for number, holder in enumerate((*holders, other)):
            await world.platform.call("app.f", b"{}", Session(), key=f"k{number}", holder=holder)
        world.platform.released.clear()
        assert await Collector(runner, 10.0).release_calls(world.context) == 3
        assert {holder for holder, _ in world.platform.released} == {
            holders[0],
            holders[2],
            holders[3],
        }
        await world.until_held(2)
        gate.set()
        await still.result(60)


@pytest.mark.parametrize("page", [1, 1000])
async def test_what_is_held_for_a_flow_that_is_gone_is_listed_and_released(
    monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(held_invocations, "HOLDERS_PAGE", page)
    runs = [("shop/flow", "a"), ("shop/flow", "a/1"), ("shop/flow", "a"), ("shop/flow2", "a")]
    async with a_world() as world:
        service = world.platform.service
        for number, (log, run) in enumerate(runs):
            holder = holder_of(log, run)
            await world.platform.call("app.f", b"{}", Session(), key=f"k{number}", holder=holder)
        found = await service.held(holder_of("shop/flow", ""))
        assert [(one.run, one.calls) for one in found] == [
            (("shop/flow", "a"), 2),
            (("shop/flow", "a/1"), 1),
        ][:page]
        assert all(one.size for one in found)
        assert await service.release_held(holder_of("shop/flow", "")) == 3
        await world.until_held(1)
        assert [one.run for one in await service.held("")] == [("shop/flow2", "a")]
        text = await world.platform.call("app.f", b"{}", Session(), key="k0")
        assert (text, world.node.ran) == (b"1", 4), "it is kept as other outcomes are"


async def test_a_context_of_the_platform_holds_and_releases_by_its_link() -> None:
    """The whole way: context, link, compute node, log."""
    app = indilog.App("shop")
    ran: list[int] = []

    @app.function
    async def charge(amount: int) -> int:
        ran.append(amount)
        return len(ran)

    from indilog.testing import cluster

    async with cluster() as c:
        await c.deploy(app)
        for _ in range(2):
            paid = await c.ctx.call_held(charge, {"amount": 5}, key="k", holder="shop\x1fr")
            assert paid == 1
            await c.skip(days=DAYS)
            await c.call(charge, idempotency_key=f"tick {len(ran)}", amount=1)
        assert await c.ctx.call_held(charge, {"amount": 5}, key="k", holder="shop\x1fr") == 1
        assert [holder async for holder in c.ctx.holders("shop\x1f")] == ["shop\x1fr"]
        await c.ctx.release_calls("shop\x1fr")
        while [holder async for holder in c.ctx.holders("")]:  # noqa: ASYNC110 - as in `until`
            await asyncio.sleep(0.05)
