"""Outcomes of calls: one for each caller, whatever becomes of the worker."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from compute.deployments import Deployment
from compute.workers.call import Call, Deployed
from compute.workers.process import WorkerProcess
from compute.workers.router import CallRouter
from indilog.calls import Cancel, Failed, FunctionSpec, Greeting, Invoke, Question, Returned
from indilog.errors import OverloadedError
from indilog.link import Link
from tests.link_pair import link_pair

pytestmark = pytest.mark.asyncio


def deployed() -> Deployed:
    spec = FunctionSpec("f", "", {}, {})
    record = Deployment(name="demo", version=1, owner="me", sources={}, functions=(spec,))
    return Deployed(1, record)


class Seen:
    """What the router sees of a worker process."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.deployments = {1}
        self.index = 0
        self.pid = 1
        self.killed = False

    def kill(self) -> None:
        self.killed = True


class Worker:
    """A worker without a process: keeps what it is asked."""

    def __init__(self, router: CallRouter) -> None:
        self.asked: list[tuple[int, Question | Greeting]] = []
        self.came = asyncio.Event()
        ours, self.link = link_pair(self._serve)
        self.process = cast("WorkerProcess", Seen(ours))
        router.add(self.process)

    async def until_asked(self, count: int) -> list[tuple[int, Question | Greeting]]:
        while len(self.asked) < count:
            await self.came.wait()
            self.came.clear()
        return self.asked

    def _serve(self, link: Link, call: int, message: Question | Greeting) -> None:
        self.asked.append((call, message))
        self.came.set()


def router_of(**changed: Any) -> CallRouter:  # noqa: ANN401 - any of its limits
    limits: dict[str, Any] = {"worker_calls_max": 1, "calls_max": 3, "call_timeout_s": 60.0}
    return CallRouter(on_idle=lambda _: None, **(limits | changed))


def submitted(router: CallRouter, app: Deployed, depth: int = 0) -> Call:
    call = Call("i-1", app, app.functions["f"], b"{}", position=4, depth=depth)
    router.submit(call)
    return call


async def test_a_call_gets_its_result_and_the_next_one_its_turn() -> None:
    router, app = router_of(), deployed()
    worker = Worker(router)
    first, second = submitted(router, app), submitted(router, app)
    [(number, invoke)] = await worker.until_asked(1)
    assert invoke == Invoke(1, "f", b"{}", "i-1", 4, 0)
    assert (router.running, router.waiting) == (1, 1)
    worker.link.answer(number, Returned(5, b"1"))
    assert await first.outcome == Returned(5, b"1")
    await worker.until_asked(2)
    worker.link.answer(worker.asked[1][0], Returned(6, b"2"))
    assert await second.outcome == Returned(6, b"2")
    assert (router.running, router.waiting, app.running) == (0, 0, 0)


async def test_calls_of_a_worker_that_died_fail_and_waiting_ones_go_elsewhere() -> None:
    router, app = router_of(), deployed()
    dying, other = Worker(router), Worker(router)
    calls = [submitted(router, app) for _ in range(3)]
    await dying.until_asked(1)
    router.remove(dying.process)
    dying.link.lost()
    dying.process.link.lost()
    lost = await calls[0].outcome
    assert isinstance(lost, Failed)
    assert lost.kind == "WorkerCrashedError"
    assert "may have had effects" in lost.message
    other.link.answer(other.asked[0][0], Returned(0, b"1"))
    await other.until_asked(2)
    other.link.answer(other.asked[1][0], Returned(0, b"2"))
    assert [await c.outcome for c in calls[1:]] == [Returned(0, b"1"), Returned(0, b"2")]


async def test_a_call_whose_time_is_over_is_told_so_and_keeps_its_slot_until_it_ends() -> None:
    router, app = router_of(call_timeout_s=0.001), deployed()
    worker = Worker(router)
    call = submitted(router, app)
    outcome = await call.outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind == "CallOutcomeUnknownError"
    assert "did not end within 0.001 s" in outcome.message
    assert router.running == 1
    asked = await worker.until_asked(2)
    assert asked[1] == (asked[0][0], Cancel())
    worker.link.answer(asked[0][0], Returned(0, b"late"))
    while router.running:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
    assert await call.outcome == outcome


async def test_a_call_that_finds_no_worker_in_time_did_nothing() -> None:
    router, app = router_of(call_timeout_s=0.001), deployed()
    outcome = await submitted(router, app).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind == "OverloadedError"
    assert (router.waiting, app.running) == (0, 0)


async def test_a_call_beyond_the_bound_is_refused_and_not_counted() -> None:
    router, app = router_of(calls_max=2), deployed()
    for _ in range(2):
        submitted(router, app)
    with pytest.raises(OverloadedError):
        submitted(router, app)
    assert app.running == 2


async def test_cancelling_stops_a_running_call_in_its_worker() -> None:
    router, app = router_of(), deployed()
    worker = Worker(router)
    call = submitted(router, app)
    await worker.until_asked(1)
    router.cancel(call)
    assert isinstance(await call.outcome, Failed)
    assert (await worker.until_asked(2))[1][1] == Cancel()


async def test_a_retired_deployment_is_idle_after_its_last_call() -> None:
    idle: list[Deployed] = []
    router = CallRouter(worker_calls_max=2, calls_max=9, call_timeout_s=60.0, on_idle=idle.append)
    app = deployed()
    worker = Worker(router)
    calls = [submitted(router, app) for _ in range(2)]
    app.retired = True
    for number, _ in list(await worker.until_asked(2)):
        assert idle == []
        worker.link.answer(number, Returned(0, b"1"))
        await calls.pop(0).outcome
    assert idle == [app]


async def test_a_deployment_that_a_worker_lacks_says_why() -> None:
    router, app = router_of(), deployed()
    worker = Worker(router)
    worker.process.deployments.clear()
    app.problem = "App demo does not load: x."
    outcome = await submitted(router, app).outcome
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.message) == ("NotReadyError", "App demo does not load: x.")
    assert router.running == 0
