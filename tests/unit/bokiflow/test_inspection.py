"""What people see of runs, and do with them, in a program that runs the workflows itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from bokiflow import Flow, RunFailedError, Workflow, found_run, run_lists
from bokiflow.runs.records import RUNS_TAG, run_tag
from indilog import (
    App,
    Context,
    InvalidArgumentsError,
    NotFoundError,
    WrongStateError,
)
from indilog.client import Client
from indilog.sdk import runs
from indilog.sdk.runs import RunResult
from indilog.testing import MemoryLogs
from tests.support.damaged_log import DamagedView

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class Shop:
    """An application with two workflows on logs in memory, and a client of it."""

    def __init__(self, logs: Any = None) -> None:  # noqa: ANN401
        self.now = 1_700_000_000.0
        self.logs = MemoryLogs(clock=lambda: self.now)
        self.app = App("shop")
        self.flow = Flow(self.app)
        self.view = logs(self.logs) if logs else self.logs
        self.flow.attach(self.view)
        self.client = Client(self.view)
        self.broken = True
        self.order = self.flow.workflow(self._order)
        self.other = self.flow.workflow(self._other)

    async def _order(self, wf: Workflow, count: int) -> list[object]:
        async def pay() -> int:
            return count

        async def send() -> str:
            if self.broken:
                raise ValueError("no stamps")
            return "sent"

        return [await wf.step(pay), await wf.signal("paid"), await wf.step(send, retries=0)]

    _order.__name__ = "order"

    async def _other(self, wf: Workflow) -> None: ...

    _other.__name__ = "other"

    async def ended(self, id: str) -> None:  # noqa: A002
        with pytest.raises(RunFailedError, match="no stamps"):
            await self.order.handle(id).result(5)


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def test_a_run_shows_its_steps_and_what_it_waits_for(shop: Shop) -> None:
    await shop.order.start(7, id="a/1")
    run = shop.client.run(shop.app, "a/1")
    while not (found := await run.show()).waits or not found.steps:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (found.run.app, found.run.workflow, found.run.state) == ("shop", "order", "running")
    assert found.arguments == {"count": 7}
    assert [(s.number, s.name, s.kind, s.result) for s in found.steps] == [("1", "pay", "step", 7)]
    assert [wait.what for wait in found.waits] == ["signal 'paid' (operation 2)"]
    await run.signal("paid", {"by": "card"})
    await shop.ended("a/1")
    found = await run.show()
    assert (found.run.state, found.waits) == ("failed", ())
    assert found.run.problem == "ValueError: Step 'send' failed: ValueError: no stamps"
    assert [step.result for step in found.steps] == [7, {"by": "card"}, None]
    assert found.steps[-1].error == "ValueError: no stamps"
    assert found.advice == (
        "It has ended. To do a step again in a new run: `indilog runs fork a/1 STEP`."
    )
    assert found.run.began == found.steps[0].decided == found.changed == shop.now


async def test_signals_that_no_operation_has_consumed_are_shown(shop: Shop) -> None:
    await shop.order.start(7, id="a")
    run = shop.client.run(shop.app, "a")
    for name, key in (("payed", None), ("sent", "k"), ("payed", None), ("sent", "k")):
        await run.signal(name, True, key=key)
    found = await run.show()
    assert [(one.name, one.count) for one in found.unconsumed] == [("payed", 2), ("sent", 1)]
    assert found.unconsumed_others == 0
    await run.signal("paid")
    await shop.ended("a")
    found = await run.show()
    assert [(one.name, one.count) for one in found.unconsumed] == [("payed", 2), ("sent", 1)]


async def test_a_limited_number_of_signals_is_shown(shop: Shop) -> None:
    await shop.order.start(7, id="a")
    run = shop.client.run(shop.app, "a")
    names = [f"{number:02} {'x' * 300}" for number in range(runs.SIGNALS_SHOWN + 2)]
    for name in (*names, names[0], names[-1]):
        await run.signal(name)
    found = await run.show()
    shown = [(one.name, one.count) for one in found.unconsumed]
    assert shown == [(n[:200], 1 + (n == names[0])) for n in names[: runs.SIGNALS_SHOWN]]
    assert found.unconsumed_others == 3


async def test_unconsumed_signals_are_those_of_the_current_round(shop: Shop) -> None:
    @shop.flow.workflow
    async def cart(wf: Workflow, rounds: int) -> None:
        await wf.signal("add")
        if rounds > 1:
            wf.continue_as_new(rounds - 1)

    await cart.start(3, id="a")
    run = shop.client.run(shop.app, "a")
    for name in ("ad", "add"):
        await run.signal(name)
    while (found := await run.show()).round == 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert [(one.name, one.count) for one in found.unconsumed] == [("ad", 1)]
    assert (await run.show(round=1)).unconsumed == ()


async def test_a_timer_shows_until_when_in_every_process(shop: Shop) -> None:
    @shop.flow.workflow
    async def naps(wf: Workflow) -> None:
        await wf.gather(wf.sleep(60), wf.signal("go", timeout=120))

    await naps.start(id="a")
    elsewhere = App("shop")
    Flow(elsewhere).workflow(naps.definition.body)
    for app in (shop.app, elsewhere):
        run = Client(shop.logs).run(app, "a")
        while len(waits := (await run.show()).waits) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        untils = sorted(wait.until or 0.0 for wait in waits)
        assert untils == pytest.approx([shop.now + 60, shop.now + 120], abs=10, rel=0)


async def test_only_the_last_steps_are_shown(shop: Shop) -> None:
    await shop.order.start(7, id="a")
    run = shop.client.run(shop.app, "a")
    await run.signal("paid")
    await shop.ended("a")
    found = await run.show(steps=1)
    assert ([step.name for step in found.steps], found.steps_before) == (["send"], 2)
    assert not (await run.show(steps=0)).steps
    assert len((await run.show(steps=10**9)).steps) == 3


async def test_a_fork_continues_and_says_from_where(shop: Shop) -> None:
    await shop.order.start(7, id="a")
    run = shop.client.run(shop.app, "a")
    await run.signal("paid", 1)
    await shop.ended("a")
    shop.broken = False
    new = await run.fork("send")
    assert await shop.order.handle(new.id).result(5) == [7, 1, "sent"]
    found = await new.show()
    assert (found.forked, found.result) == ("a, step 3", [7, 1, "sent"])
    assert await new.query("pay") == 7
    assert await new.query("3") == "sent"
    with pytest.raises(NotFoundError, match="Run 'a' has no query 'send', and has decided no such"):
        await run.query("send")
    with pytest.raises(InvalidArgumentsError, match=r"no decided step 'mail'\. It has"):
        await run.fork("mail")


async def test_a_cancelled_run_is_cancelled_and_an_ended_one_refuses(shop: Shop) -> None:
    await shop.order.start(7, id="a")
    run = shop.client.run(shop.app, "a")
    await run.cancel()
    with pytest.raises(RunFailedError, match="Cancelled"):
        await shop.order.handle("a").result(5)
    await run.cancel()
    with pytest.raises(WrongStateError, match="Run 'a' has ended; it would not receive"):
        await run.signal("paid")
    await shop.other.start(id="b")
    await shop.other.handle("b").result(5)
    with pytest.raises(WrongStateError, match="Run 'b' has ended; it can no longer be cancelled"):
        await shop.client.run(shop.app, "b").cancel()


async def test_an_unknown_run_or_an_invalid_id_is_one_sentence(shop: Shop) -> None:
    with pytest.raises(NotFoundError, match=r"^App shop has no run 'x', or it was trimmed"):
        await shop.client.run(shop.app, "x").show()
    unknown = shop.client.run(shop.app, "x")
    for action in (unknown.cancel, partial(unknown.signal, "n"), partial(unknown.fork, "1")):
        with pytest.raises(NotFoundError):
            await action()
    for id_ in ("", "a\x1fb", "x" * 5000):
        with pytest.raises(InvalidArgumentsError, match="A run's id must be 1 to"):
            await shop.client.run(shop.app, id_).show()
    with pytest.raises(InvalidArgumentsError, match="name"):
        await (await started(shop, "a")).signal("")


async def started(shop: Shop, id: str) -> Any:  # noqa: A002, ANN401
    await shop.order.start(1, id=id)
    return shop.client.run(shop.app, id)


async def test_runs_are_listed_newest_first_filtered_and_in_pages(shop: Shop) -> None:
    for number in range(7):
        shop.now += 10
        await (shop.other if number % 2 else shop.order).start(
            *([] if number % 2 else [number]), id=f"r{number}"
        )
    await shop.other.handle("r5").result(5)

    async def ids(**filters: Any) -> list[str]:  # noqa: ANN401
        return [run.id for run in await shop.client.runs(shop.app, **filters)]

    assert await ids() == [f"r{number}" for number in range(6, -1, -1)]
    assert await ids(workflow="other") == ["r5", "r3", "r1"]
    assert await ids(state="done") == ["r5", "r3", "r1"]
    assert await ids(state="running", limit=2) == ["r6", "r4"]
    assert await ids(id_prefix="r1") == ["r1"]
    assert await ids(newer_s=20) == ["r6", "r5", "r4"]
    assert await ids(older_s=20) == ["r4", "r3", "r2", "r1", "r0"]
    assert await ids(older_s=20, newer_s=30) == ["r4", "r3"]
    assert await ids(older_s=1e308) == []
    pages: list[list[str]] = []
    page = None
    while True:
        found = await shop.client.runs(shop.app, limit=3, page=page)
        pages.append([run.id for run in found])
        if (page := found.next) is None:
            break
    assert pages == [["r6", "r5", "r4"], ["r3", "r2", "r1"], ["r0"]]
    with pytest.raises(InvalidArgumentsError, match="'state' does not fit"):
        await ids(state="asleep")
    with pytest.raises(ValueError, match="limit must be 1 to 1,000, not 0"):
        await ids(limit=0)


async def test_runs_that_began_at_the_same_time_are_all_on_some_page(shop: Shop) -> None:
    for number in range(5):
        await shop.other.start(id=f"r{number}")
    listed: list[str] = []
    page = None
    while True:
        found = await shop.client.runs(shop.app, limit=2, page=page)
        listed += [run.id for run in found]
        if (page := found.next) is None:
            break
    assert listed == ["r4", "r3", "r2", "r1", "r0"]


async def test_a_page_ends_early_when_it_takes_long(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await shop.other.start(id=f"r{number}")
    monkeypatch.setattr(run_lists, "SCAN_S_MAX", -1.0)
    monkeypatch.setattr(run_lists, "_page_size", lambda *_: 1)
    listed, pages, page = [], 0, None
    while not pages or page is not None:
        found = await shop.client.runs(shop.app, id_prefix="r1", page=page)
        listed += [run.id for run in found]
        pages, page = pages + 1, found.next
    assert (listed, pages >= 2) == (["r1"], True)


async def test_two_flows_of_an_application_are_one_list(shop: Shop) -> None:
    second = Flow(shop.app, log="second")
    second.attach(shop.logs)

    @second.workflow
    async def audit(wf: Workflow) -> str:
        return "audited"

    await shop.other.start(id="a")
    shop.now += 1
    await audit.start(id="b")
    await audit.handle("b").result(5)
    shop.now += 1
    await shop.other.start(id="c")
    await shop.other.handle("c").result(5)
    assert [run.id for run in await shop.client.runs(shop.app)] == ["c", "b", "a"]
    assert (await shop.client.run(shop.app, "b").show()).result == "audited"
    await audit.start(id="c")
    with pytest.raises(InvalidArgumentsError, match="shop/flow and second have a run 'c'"):
        await shop.client.run(shop.app, "c").show()


@pytest.mark.parametrize("lost", ["the start", "a step", "a record of a later version"])
async def test_a_run_that_cannot_be_read_hides_no_other_run(lost: str) -> None:
    view: list[DamagedView] = []

    def damaged(logs: MemoryLogs) -> DamagedView:
        view.append(DamagedView(logs))
        return view[0]

    shop = Shop(damaged)
    for number in range(3):
        await shop.order.start(number, id=f"r{number}")
        await asyncio.sleep(0.01)
    log = shop.logs.log("shop/flow")
    of_one = await log.read_range(run_tag("r1"))
    if lost == "a record of a later version":
        await log.append(b"\xb0F\x7fwhatever", tags=[run_tag("r1"), RUNS_TAG])
    else:
        view[0].lost.add(of_one[lost == "a step"].seqnum)
    listed = [(run.id, run.info.state) for run in await shop.client.runs(shop.app) if run.info]
    others = [("r2", "running"), ("r0", "running")]
    if lost == "the start":
        assert listed == others
    else:  # a list reads no history
        assert listed == [others[0], ("r1", "running"), others[1]]


async def test_large_values_are_shown_in_part(shop: Shop) -> None:
    run = await started(shop, "a")
    await run.signal("paid", "x" * 100_000)
    await shop.ended("a")
    value = (await run.show()).steps[1].result
    assert isinstance(value, str)
    assert value.endswith("bytes)")
    assert len(value) < 3_000


async def test_a_client_without_the_workflows_is_refused(shop: Shop) -> None:
    with pytest.raises(NotFoundError, match="App empty has no workflows"):
        await shop.client.runs(App("empty"))
    with pytest.raises(ValueError, match="Give the app"):
        await shop.client.runs()


@pytest.mark.parametrize(
    "change",
    [lambda name: name + "_", lambda _: "other"],
    ids=["no code of the workflow", "a workflow of another name"],
)
async def test_a_run_without_code_can_be_cancelled(
    shop: Shop, change: Callable[[str], str]
) -> None:
    """The next execution ends it; another workflow's code serves for the request."""
    await shop.order.start(1, id="a")
    app = App("shop")
    flow = Flow(app)

    async def body(wf: Workflow) -> None: ...

    body.__name__ = change("order")
    flow.workflow(body)
    client = Client(shop.logs)
    await client.run(app, "a").cancel()
    assert (await client.run(app, "a").show()).cancel_asked


async def test_published_events_and_states_are_read_once_each_and_in_order(shop: Shop) -> None:
    @shop.flow.workflow
    async def works(wf: Workflow) -> str:
        wf.publish({"percent": 10})
        await wf.signal("go")
        wf.publish("half")
        raise ValueError("planted")

    await works.start(id="a")
    run = shop.client.run(shop.app, "a")
    seen: list[tuple[str, object]] = []
    seqnums: list[int] = []
    async for event in run.events():
        seen.append((event.kind, event.data))
        seqnums.append(event.seqnum)
        if event.data == {"percent": 10}:
            await run.signal("go")
    problem = "ValueError: planted"
    assert seen == [
        ("state", {"state": "running", "problem": None}),
        ("published", {"percent": 10}),
        ("published", "half"),
        ("state", {"state": "failed", "problem": problem}),
    ]
    for number, seqnum in enumerate(seqnums):
        rest = [event.seqnum async for event in run.events(after=seqnum)]
        assert rest == seqnums[number + 1 :]
    with pytest.raises(NotFoundError):
        await anext(shop.client.run(shop.app, "x").events())


async def test_an_event_is_published_once_although_the_run_is_executed_again(shop: Shop) -> None:
    @shop.flow.workflow
    async def works(wf: Workflow) -> None:
        for number in range(3):
            wf.publish(number)

    await works.start(id="a")
    await works.handle("a").result(5)
    again = await shop.client.run(shop.app, "a").fork("3")
    await works.handle(again.id).result(5)
    published = [e.data async for e in again.events() if e.kind == "published"]
    assert published == [0, 1, 2]


async def test_events_come_in_pages_of_limited_size(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    @shop.flow.workflow
    async def works(wf: Workflow) -> None:
        for number in range(20):
            wf.publish(str(number) * 100)

    await works.start(id="a")
    await works.handle("a").result(5)
    run = shop.client.run(shop.app, "a")
    whole = [event.seqnum async for event in run.events()]
    for bytes_max in (1, 300, 2_000):
        monkeypatch.setattr(found_run, "_EVENTS_BYTES_MAX", bytes_max)
        assert [event.seqnum async for event in run.events()] == whole


async def test_a_query_without_a_name_is_the_status_that_the_run_set(shop: Shop) -> None:
    @shop.flow.workflow
    async def works(wf: Workflow) -> None:
        wf.set_status({"packed": 1})
        await wf.signal("go")

    await works.start(id="a")
    run = shop.client.run(shop.app, "a")
    while (found := await run.show()).run.value is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert found.run.value == await run.query() == {"packed": 1}
    await shop.order.start(1, id="b")
    assert await shop.client.run(shop.app, "b").query() is None


async def test_the_check_names_the_runs_that_changed_code_does_not_continue(shop: Shop) -> None:
    for number in range(3):
        await shop.order.start(number, id=f"a{number}")
        run = shop.client.run(shop.app, f"a{number}")
        while not (await run.show()).steps:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await shop.other.start(id="ended")
    await shop.other.handle("ended").result(5)
    changed = App("shop")
    flow = Flow(changed)

    async def order(wf: Workflow, count: int) -> None:
        await wf.sleep(count)

    flow.workflow(order)
    ctx = Context(shop.logs, SimpleNamespace())
    found = await shop.app.operations["runs.check"].body(ctx)
    assert (found.checked, found.is_whole, found.mismatches) == (3, True, ())
    found = await changed.operations["runs.check"].body(ctx, limit=2)
    assert (found.checked, found.is_whole) == (2, False)
    found = await changed.operations["runs.check"].body(ctx)
    assert (found.checked, found.is_whole) == (3, True)
    assert [mismatch.id for mismatch in found.mismatches] == ["a2", "a1", "a0"]
    assert "step 1 was decided as 'step pay'" in found.mismatches[0].reason


async def test_a_parked_run_is_retried_at_once(shop: Shop) -> None:
    """Crash loops are retried after pauses, and changed code at the next deployment."""
    app = App("shop")
    flow = Flow(app, lease=0.5)
    flow.attach(shop.logs)
    healed = False

    async def order(wf: Workflow, count: int) -> int:
        async def mail() -> int:
            return count

        async def pay() -> int:
            return -count

        return await (wf.step(pay) if healed else wf.step(mail))

    flow.workflow(order)
    await shop.order.start(7, id="a")
    run = shop.client.run(shop.app, "a")
    while not (await run.show()).steps:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(WrongStateError, match="Run 'a' is running, so it is not retried"):
        await run.retry()
    await shop.flow.runner.stop()
    driving = asyncio.create_task(flow.drive(shop.logs))
    async with asyncio.timeout(20):
        while (await run.show()).run.state != "parked":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        healed = True
        await Client(shop.logs).run(app, "a").retry()
        assert await flow.handle("order", "a").result() == 7, "what was decided"
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)


async def test_a_run_that_is_not_in_memory_shows_for_what_it_waits(shop: Shop) -> None:
    await shop.order.start(7, id="a")
    run = shop.client.run(shop.app, "a")
    while not (steps := (await run.show()).steps):  # noqa: ASYNC110
        await asyncio.sleep(0)
    shop.now += 30
    execution = shop.flow.runner.running["a"].execution
    await execution.note_waits(shop.now + 60, "signal 'paid'", execution.run.end)
    elsewhere = App("shop")
    Flow(elsewhere)
    (wait,) = (await Client(shop.logs).run(elsewhere, "a").show()).waits
    assert (wait.what, wait.since, wait.until) == (
        "signal 'paid'",
        steps[0].decided,  # the run waits since then, and not since it left memory
        shop.now + 60,
    )


async def test_a_run_is_started_by_the_name_of_its_workflow(shop: Shop) -> None:
    run = await shop.client.start_run(shop.app, "order", {"count": 7}, id="a/1")
    again = await shop.client.start_run(shop.app, "order", {"count": 7}, id="a/1")
    assert (run.app, run.id, again.id) == ("shop", "a/1", "a/1")
    new = await shop.client.start_run(shop.app, "other")
    assert (await new.result(wait=5)).state == "done"
    assert len(await shop.client.runs(shop.app)) == 2
    with pytest.raises(NotFoundError, match="no workflow 'odrer'; there are: order, other"):
        await shop.client.start_run(shop.app, "odrer")
    with pytest.raises(InvalidArgumentsError, match="count"):
        await shop.client.start_run(shop.app, "order", {"count": "many"})
    with pytest.raises(WrongStateError, match="one of workflow 'order'"):
        await shop.client.start_run(shop.app, "other", id="a/1")
    with pytest.raises(InvalidArgumentsError):
        await shop.client.start_run(shop.app, "other", id="")
    assert len(await shop.client.runs(shop.app)) == 2


async def test_a_workflow_of_two_flows_is_started_in_the_log_that_is_named(shop: Shop) -> None:
    second = Flow(shop.app, log="second")
    second.attach(shop.view)
    second.workflow(shop._other)
    arguments = {"workflow": "other", "id": "x"}
    with pytest.raises(InvalidArgumentsError, match="field 'log' is needed"):
        await shop.client._operate(shop.app, "runs.start", arguments)
    await shop.client._operate(shop.app, "runs.start", arguments | {"log": "second"})
    assert (await second.handle("other", "x").status()).id == "x"


async def test_the_result_of_a_run_is_how_it_ended(shop: Shop) -> None:
    run = await shop.client.start_run(shop.app, "order", {"count": 7})
    assert await run.result(wait=0) == RunResult("running")
    waiting = asyncio.create_task(run.result(wait=30))
    await run.signal("paid", "by card")
    assert await waiting == RunResult(
        "failed", problem="ValueError: Step 'send' failed: ValueError: no stamps"
    )
    shop.broken = False
    forked = await run.fork("send")
    assert await forked.result(wait=30) == RunResult("done", [7, "by card", "sent"])
    cancelled = await shop.client.start_run(shop.app, "order", {"count": 7})
    await cancelled.cancel()
    assert (await cancelled.result(wait=30)).state == "cancelled"
    with pytest.raises(NotFoundError):
        await shop.client.run(shop.app, "unknown").result(wait=30)
