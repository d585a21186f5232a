"""Outcomes of calls: one for each caller, whatever becomes of the worker."""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

import pytest

from indilog.base.deployed import FunctionSpec
from indilog.base.errors import InvalidArgumentsError, NotReadyError, OverloadedError
from indilog.config import NodeConfig, node_config
from indilog.link.link import Link
from indilog.link.link_messages import (
    Cancel,
    Done,
    Failed,
    Greeting,
    Question,
    Returned,
    RevokedError,
    failed,
)
from indilog.link.worker_messages import CheckArguments, Invoke, Ping
from indilog_compute.deployments import Deployment
from indilog_compute.workers.call import Call, DeployedApp
from indilog_compute.workers.claims import NodeClaims, WorkerClaims, claims_memory
from indilog_compute.workers.process import Worker as HostWorker
from indilog_compute.workers.router import CallRouter
from tests.support.link_pair import link_pair

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


def deployed() -> DeployedApp:
    spec = FunctionSpec("f", "", {}, {})
    record = Deployment(name="demo", version=1, owner="me", sources={}, functions=(spec,))
    return DeployedApp(1, record, 0)


class Seen:
    """What the router sees of a worker process."""

    def __init__(self, link: Link, claims: NodeClaims) -> None:
        self.link = link
        self.claims = claims
        self.deployments = {1}
        self.index = 0
        self.pid = 1
        self.killed = False

    def abort(self) -> None:
        self.killed = True


class Worker:
    """A worker without a process: keeps what it is asked; begins calls unless it is blocked."""

    def __init__(self, router: CallRouter, *, is_blocked: bool = False) -> None:
        self.is_blocked = is_blocked
        self.asked: list[tuple[int, Question | Greeting]] = []
        self.begun = 0
        self.came = asyncio.Event()
        self._router = router
        ours, self.link = link_pair(self._serve)
        memory = claims_memory()
        self.claims = WorkerClaims(memory)
        self.seen = Seen(ours, NodeClaims(memory))
        self.process = cast("HostWorker", self.seen)
        os.close(memory)
        router.add(self.process)

    async def until_asked(self, count: int) -> list[tuple[int, Question | Greeting]]:
        while len(self.asked) < count:
            await self.came.wait()
            self.came.clear()
        return self.asked

    def die(self) -> None:
        """As the end of its process."""
        self._router.remove(self.process)
        self.link.lost()
        self.process.link.lost()

    def wake(self) -> None:
        """The loop turns again: it answers what came meanwhile, as the runner does."""
        self.is_blocked = False
        asked, self.asked = self.asked, []
        for call, message in asked:
            self._serve(self.link, call, message)

    def _serve(self, link: Link, call: int, message: Question | Greeting) -> None:
        if isinstance(message, Ping) and not self.is_blocked:
            link.answer(call, Done(0))
            return
        if isinstance(message, Invoke) and not self.is_blocked:
            if not self.claims.begin(message.slot):
                link.answer(call, failed(RevokedError("Revoked.")))
                return
            self.begun += 1
        self.asked.append((call, message))
        self.came.set()


def router_of(
    *,
    is_shared: bool = False,
    **changed: Any,  # noqa: ANN401 - any of its limits
) -> CallRouter:
    limits: dict[str, Any] = {"worker_calls_max": 1, "calls_pending_max": 3}
    router = CallRouter(node_config(**(limits | changed)), on_idle=lambda _: None)
    router.set_shared(is_shared=is_shared)
    return router


def submitted(router: CallRouter, app: DeployedApp, depth: int = 0) -> Call:
    call = Call("i-1", app, app.functions["f"], b"{}", position=4, depth=depth)
    router.submit(call)
    return call


async def test_a_call_gets_its_result_and_the_next_one_starts() -> None:
    router, app = router_of(), deployed()
    worker = Worker(router)
    first, second = submitted(router, app), submitted(router, app)
    [(number, invoke)] = await worker.until_asked(1)
    assert invoke == Invoke(1, "f", b"{}", "i-1", 4, 0, 1)
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
    dying.die()
    lost = await calls[0].outcome
    assert isinstance(lost, Failed)
    assert lost.kind == "WorkerCrashedError"
    assert "may have had effects" in lost.message
    other.link.answer(other.asked[0][0], Returned(0, b"1"))
    await other.until_asked(2)
    other.link.answer(other.asked[1][0], Returned(0, b"2"))
    assert [await c.outcome for c in calls[1:]] == [Returned(0, b"1"), Returned(0, b"2")]


async def test_a_call_that_times_out_fails_and_keeps_its_slot_until_it_ends() -> None:
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
    router, app = router_of(call_wait_s_max=0.001), deployed()
    outcome = await submitted(router, app).outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind == "OverloadedError"
    assert (router.waiting, app.running) == (0, 0)


async def test_the_time_of_a_call_counts_from_when_a_worker_has_it() -> None:
    """Before that, the limit on waiting applies."""
    router, app = router_of(call_timeout_s=0.2, call_wait_s_max=30), deployed()
    call = submitted(router, app)
    waited = asyncio.get_running_loop().time()
    assert call.timer is not None
    assert call.timer.when() > waited + 20
    worker = Worker(router)
    ((number, _),) = await worker.until_asked(1)
    assert call.timer.when() < waited + 20
    worker.link.answer(number, Returned(5, b"1"))
    assert (await call.outcome) == Returned(5, b"1")


async def test_a_call_beyond_the_bound_is_refused_and_not_counted() -> None:
    router, app = router_of(calls_pending_max=2), deployed()
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
    idle: list[DeployedApp] = []
    router = CallRouter(node_config(worker_calls_max=2), on_idle=idle.append)
    app = deployed()
    worker = Worker(router)
    calls = [submitted(router, app) for _ in range(2)]
    app.successor = deployed()
    app.successor.functions.clear()
    for number, _ in list(await worker.until_asked(2)):
        assert idle == []
        worker.link.answer(number, Returned(0, b"1"))
        await calls.pop(0).outcome
    assert idle == [app]


async def test_an_undeployed_application_is_idle_after_its_last_call() -> None:
    idle: list[DeployedApp] = []
    router, app = CallRouter(NodeConfig(), on_idle=idle.append), deployed()
    worker = Worker(router)
    call = submitted(router, app)
    [(number, _)] = await worker.until_asked(1)
    app.is_undeployed = True
    assert idle == []
    worker.link.answer(number, Returned(0, b"1"))
    await call.outcome
    assert idle == [app]


async def test_a_call_of_a_deployment_that_a_worker_lacks_names_the_reason() -> None:
    router, app = router_of(), deployed()
    worker = Worker(router)
    worker.process.deployments.clear()
    app.problem = "App demo does not load: x."
    outcome = await submitted(router, app).outcome
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.message) == ("NotReadyError", "App demo does not load: x.")
    assert router.running == 0


async def test_a_call_that_a_dead_worker_had_not_begun_runs_elsewhere() -> None:
    router, app = router_of(worker_calls_max=2), deployed()
    dying = Worker(router, is_blocked=True)
    begun, unbegun = submitted(router, app), submitted(router, app)
    asked = await dying.until_asked(2)
    assert isinstance(asked[0][1], Invoke)
    assert dying.claims.begin(asked[0][1].slot)
    other = Worker(router)
    dying.die()
    lost = await begun.outcome
    assert isinstance(lost, Failed)
    assert lost.kind == "WorkerCrashedError"
    [(number, _)] = await other.until_asked(1)
    other.link.answer(number, Returned(0, b"1"))
    assert await unbegun.outcome == Returned(0, b"1")
    assert (router.running, router.moved, app.running) == (0, 1, 0)


@pytest.mark.parametrize("how", ["dies", "is blocked"])
async def test_a_call_whose_caller_left_does_not_delay_calls_beside_it(how: str) -> None:
    router, app = (
        router_of(worker_silent_s=0.01, worker_calls_max=9, calls_pending_max=99),
        deployed(),
    )
    lost = Worker(router, is_blocked=True)
    calls = [submitted(router, app) for _ in range(3)]
    await lost.until_asked(3)
    for call in (calls[0], calls[2]):
        call.outcome.cancel()
        router.cancel(call)
    other = Worker(router)
    if how == "dies":
        lost.die()
    [(number, _)] = await other.until_asked(1)
    other.link.answer(number, Returned(0, b"1"))
    assert await calls[1].outcome == Returned(0, b"1")
    assert (router.running, app.running) == (0, 0)


async def test_a_nested_call_that_was_not_begun_and_finds_no_worker_did_nothing() -> None:
    router, app = router_of(), deployed()
    dying = Worker(router, is_blocked=True)
    call = submitted(router, app, depth=1)
    await dying.until_asked(1)
    dying.die()
    outcome = await call.outcome
    assert isinstance(outcome, Failed)
    assert outcome.kind == "NotReadyError"
    assert app.running == 0


async def test_a_blocked_worker_gets_no_calls_and_loses_those_it_has_not_begun() -> None:
    router, app = (
        router_of(worker_silent_s=0.01, worker_calls_max=9, calls_pending_max=99),
        deployed(),
    )
    blocked = Worker(router, is_blocked=True)
    calls = [submitted(router, app) for _ in range(4)]
    asked = await blocked.until_asked(4)
    assert isinstance(asked[0][1], Invoke)
    assert blocked.claims.begin(asked[0][1].slot)
    other = Worker(router)
    moved = await other.until_asked(3)
    for number, _ in moved:
        other.link.answer(number, Returned(0, b"1"))
    assert [await call.outcome for call in calls[1:]] == [Returned(0, b"1")] * 3
    late = submitted(router, app)
    number, _ = (await other.until_asked(4))[3]
    other.link.answer(number, Returned(0, b"2"))
    assert await late.outcome == Returned(0, b"2")

    blocked.wake()  # it has begun the first call, and may begin none of the others
    blocked.link.answer(asked[0][0], Returned(0, b"0"))
    assert await calls[0].outcome == Returned(0, b"0")
    assert router.running == 0
    assert router.moved == 3


async def test_a_worker_that_answers_again_takes_what_waits() -> None:
    router, app = router_of(worker_silent_s=0.01), deployed()
    blocked = Worker(router, is_blocked=True)
    call = submitted(router, app)
    await blocked.until_asked(1)
    while router.waiting == 0:  # noqa: ASYNC110 - until its loop was found not to turn
        await asyncio.sleep(0.001)
    assert router.running == 0
    blocked.wake()
    while blocked.begun == 0:
        await blocked.came.wait()
        blocked.came.clear()
    blocked.link.answer(blocked.asked[-1][0], Returned(0, b"1"))
    assert await call.outcome == Returned(0, b"1")


async def test_a_call_that_waited_runs_on_the_version_that_is_the_newest_when_it_begins() -> None:
    idle: list[DeployedApp] = []
    router, app = CallRouter(node_config(worker_calls_max=1), on_idle=idle.append), deployed()
    worker = Worker(router)
    worker.process.deployments.add(2)
    first, second = submitted(router, app), submitted(router, app)
    [(number, _)] = await worker.until_asked(1)
    app.successor = DeployedApp(2, app.record, 1)
    worker.link.answer(number, Returned(0, b"1"))
    await first.outcome
    asked = await worker.until_asked(2)
    assert isinstance(asked[1][1], Invoke)
    assert asked[1][1].deployment == 2
    assert idle == [app]
    assert app.successor.running == 1
    assert not second.outcome.done()


async def test_a_drained_worker_keeps_its_calls_and_gets_no_more() -> None:
    router, app = router_of(worker_calls_max=9, calls_pending_max=99), deployed()
    leaving = Worker(router)
    call = submitted(router, app)
    [(number, _)] = await leaving.until_asked(1)
    draining = asyncio.ensure_future(router.drain(leaving.process))
    await asyncio.sleep(0)
    submitted(router, app)
    assert router.waiting == 1
    other = Worker(router)
    await other.until_asked(1)
    assert not draining.done()
    leaving.link.answer(number, Returned(0, b"1"))
    assert await call.outcome == Returned(0, b"1")
    await draining


async def test_a_waiting_call_starts_when_a_dead_worker_leaves_room_in_the_share() -> None:
    router, app = router_of(is_shared=True, calls_pending_max=99), deployed()
    dying, idle = Worker(router), Worker(router)
    _, waiting = submitted(router, app), submitted(router, app)
    await dying.until_asked(1)
    assert router.waiting == 1
    dying.die()
    router.check_invariants()
    [(number, _)] = await idle.until_asked(1)
    idle.link.answer(number, Returned(0, b"1"))
    assert await waiting.outcome == Returned(0, b"1")


async def test_a_waiting_call_starts_when_the_other_application_is_undeployed() -> None:
    router, app = router_of(is_shared=True, worker_calls_max=2, calls_pending_max=99), deployed()
    worker = Worker(router)
    for _ in range(2):
        submitted(router, app)
    assert (router.running, router.waiting) == (1, 1)
    router.set_shared(is_shared=False)
    router.check_invariants()
    assert len(await worker.until_asked(2)) == 2


async def test_calls_moved_from_a_silent_worker_start_before_those_that_waited() -> None:
    """The application is at its share, and one slot stays free for others."""
    router, app = (
        router_of(is_shared=True, worker_silent_s=0.01, worker_calls_max=2, calls_pending_max=99),
        deployed(),
    )
    silent, other = Worker(router, is_blocked=True), Worker(router)
    calls = [submitted(router, app) for _ in range(4)]
    assert (router.running, router.waiting) == (3, 1)
    await silent.until_asked(2)
    await other.until_asked(1)
    while not router.moved:  # noqa: ASYNC110 - until its loop was found not to turn
        await asyncio.sleep(0.001)
    router.check_invariants()
    assert calls[0].worker is other.process
    assert [call.worker for call in calls[2:]] == [None, None]
    [(_, _), (number, _)] = await other.until_asked(2)
    other.link.answer(number, Returned(0, b"1"))
    assert await calls[0].outcome == Returned(0, b"1")
    await other.until_asked(3)
    assert calls[2].worker is other.process
    assert calls[3].worker is None


CHECK = CheckArguments(1, "f", b"{}")


async def test_arguments_are_checked_by_another_worker_when_the_one_that_was_asked_dies() -> None:
    router = router_of()
    dying, other = Worker(router), Worker(router)
    checks = [asyncio.ensure_future(router.check_arguments("demo.f", CHECK)) for _ in range(2)]
    await dying.until_asked(2)
    dying.die()
    fits, misfits = [number for number, _ in await other.until_asked(2)]
    other.link.answer(fits, Done(0))
    other.link.answer(misfits, failed(InvalidArgumentsError("No.", [])))
    await checks[0]
    with pytest.raises(InvalidArgumentsError):
        await checks[1]


async def test_arguments_are_checked_by_the_next_worker_when_none_is_up() -> None:
    router = router_of()
    dying = Worker(router)
    check = asyncio.ensure_future(router.check_arguments("demo.f", CHECK))
    await dying.until_asked(1)
    dying.die()
    await asyncio.sleep(0)
    assert not check.done()
    other = Worker(router)
    [(number, _)] = await other.until_asked(1)
    other.link.answer(number, Done(0))
    await check


async def test_arguments_are_checked_by_another_worker_when_the_one_that_was_asked_is_blocked() -> (
    None
):
    router = router_of(worker_silent_s=0.01, worker_stop_s=1e6)
    blocked = Worker(router, is_blocked=True)
    check = asyncio.ensure_future(router.check_arguments("demo.f", CHECK))
    await blocked.until_asked(1)
    other = Worker(router)
    [(number, _)] = await other.until_asked(1)
    other.link.answer(number, Done(0))
    await check


async def test_a_check_waits_for_the_only_worker_to_respond_and_asks_it_again() -> None:
    router = router_of(worker_silent_s=0.01, worker_stop_s=1e6)
    blocked = Worker(router, is_blocked=True)
    check = asyncio.ensure_future(router.check_arguments("demo.f", CHECK))
    [(first, _)] = await blocked.until_asked(1)
    while not router.is_suspended(blocked.process):  # noqa: ASYNC110 - until it was found out
        await asyncio.sleep(0.001)
    blocked.wake()

    def asked_anew() -> list[int]:
        return [n for n, asked in blocked.asked if asked == CHECK and n != first]

    while not asked_anew():
        await blocked.came.wait()
        blocked.came.clear()
    blocked.link.answer(asked_anew()[0], Done(0))
    await check


@pytest.mark.parametrize("wakes", [False, True])
async def test_a_worker_that_stays_blocked_is_killed_although_no_call_waits_for_it(
    wakes: bool,
) -> None:
    router, app = router_of(call_timeout_s=60.0), deployed()
    blocked = Worker(router, is_blocked=True)
    call = submitted(router, app)
    await asyncio.sleep(5)
    other = Worker(router)
    [(number, _)] = await other.until_asked(1)
    other.link.answer(number, Returned(0, b"1"))
    assert await call.outcome == Returned(0, b"1")
    await asyncio.sleep(50)
    assert not blocked.seen.killed
    if wakes:
        blocked.wake()
    await asyncio.sleep(10)
    assert blocked.seen.killed is not wakes
    assert not other.seen.killed


@pytest.mark.parametrize("ends", ["stop", "deadline", "no workers"])
async def test_a_check_for_which_there_is_no_worker_ends(ends: str) -> None:
    """Within `worker_stop_s`; at once when none will come."""
    changed: dict[str, dict[str, Any]] = {
        "stop": {"worker_stop_s": 1e6},
        "deadline": {"worker_silent_s": 0.01, "worker_stop_s": 0.01},
        "no workers": {"workers": 0},
    }
    router = router_of(**changed[ends])
    check = asyncio.ensure_future(router.check_arguments("demo.f", CHECK))
    await asyncio.sleep(0)
    if ends == "stop":
        router.stop()
    with pytest.raises(NotReadyError, match="No function worker"):
        await check


async def test_a_call_whose_worker_is_found_dead_when_it_is_sent_runs_elsewhere() -> None:
    """The router may not have noticed the worker's end yet."""
    router, app = router_of(), deployed()
    dead, other = Worker(router), Worker(router)
    dead.process.link.lost()
    calls = [submitted(router, app) for _ in range(2)]
    for count, call in enumerate(calls, 1):
        number, _ = (await other.until_asked(count))[-1]
        other.link.answer(number, Returned(0, b"1"))
        assert await call.outcome == Returned(0, b"1")
    assert dead.asked == []
    assert (router.running, router.waiting, app.running) == (0, 0, 0)
    assert router.calls == {"returned": 2, "failed": 0, "timed_out": 0, "crashed": 0}


async def test_a_worker_that_died_before_it_took_calls_gets_none() -> None:
    router, app = router_of(), deployed()
    worker = Worker(router)
    router.remove(worker.process)
    worker.process.link.lost()
    router.add(worker.process)
    submitted(router, app)
    assert (router.running, router.waiting) == (0, 1)


async def test_a_waiting_call_can_be_withdrawn_and_one_that_began_cannot() -> None:
    router, app = router_of(), deployed()
    worker = Worker(router)
    running, waiting, next_ = (submitted(router, app) for _ in range(3))
    await worker.until_asked(1)
    assert (router.withdraw(running), router.withdraw(waiting)) == (False, True)
    assert not router.withdraw(waiting)
    assert (app.running, router.waiting, waiting.outcome.done()) == (2, 1, False)
    assert waiting.timer is not None
    assert waiting.timer.cancelled()
    worker.link.answer(worker.asked[0][0], Returned(0, b"1"))
    await worker.until_asked(2)
    worker.link.answer(worker.asked[1][0], Returned(0, b"2"))
    assert await next_.outcome == Returned(0, b"2")
    assert (app.running, router.load) == (0, (0, 1))
    router.check_invariants()
    router.stop()
    assert router.free_slots("demo") == 0
