"""Workflows from their start to their end: steps, retries, replay, ids, cancellation."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from bokiflow import (
    Cancelled,
    Flow,
    FlowSettingsError,
    Handle,
    RunCancelledError,
    RunEndedError,
    RunFailedError,
    RunIdInUseError,
    Startable,
    State,
    StepFailedError,
    UnknownRunError,
    Workflow,
)
from bokiflow.runs import waiting
from bokiflow.runs.errors import ChangedWorkflowError
from bokiflow.runs.execution import Execution
from bokiflow.runs.records import (
    INBOX_TAG,
    CancelAsked,
    RunFinished,
    StepDecided,
    encode,
    run_record,
    run_tag,
)
from bokiflow.runs.run_state import RunState
from indilog.base.errors import InvalidArgumentsError, NotReadyError, OverloadedError
from indilog.base.log import Entry, Log
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLogs

pytestmark = pytest.mark.asyncio


@dataclass
class Order:
    """What is ordered."""

    item: str
    count: int


class Sure:
    """A lease that never ends."""

    def is_sure(self) -> bool:
        return True

    def has_ended(self) -> bool:
        return False


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the workflow paused; no time passes."""
    paused: list[float] = []

    async def pause(seconds: float) -> None:
        if seconds <= 1.0:  # longer ones are between heartbeats
            paused.append(seconds)
        await asyncio.sleep(0 if seconds <= 1.0 else seconds)

    monkeypatch.setattr(waiting, "pause", pause)
    return paused


async def decided(logs: MemoryLogs, run: str) -> list[tuple[str, str, bytes]]:
    records = [run_record(r.data) for r in await logs.log("shop/flow").read_range(run_tag(run))]
    return [(r.number, r.name, r.result) for r in records if isinstance(r, StepDecided)]


async def again(logs: MemoryLogs, workflow: Startable[Any], run_id: str) -> RunFinished:
    """Execute a run once more, as its executor, from what is decided; return its end."""
    log: Log = logs.log("shop/flow")
    run = RunState()
    for record in await log.read_range(run_tag(run_id)):
        known = run_record(record.data)
        if known is not None and not isinstance(known, RunFinished):
            run.apply(record.seqnum, record.ordered_at, known)
    assert run.started is not None
    execution = Execution(log, run_id, run, Sure())
    arguments = workflow.definition.signature.arguments(run.started.arguments)
    body = workflow.definition.result_text(Workflow(execution, logs), arguments)
    return await execution.execute(body)


async def test_the_result_of_a_run_is_what_its_workflow_returned(
    flow: Flow, logs: MemoryLogs
) -> None:
    async def price(item: str) -> int:
        return len(item)

    @flow.workflow
    async def buy(wf: Workflow, order: Order) -> Order:
        each = await wf.step(price, order.item)
        return Order(order.item, order.count * each)

    handle = await buy.start(Order("tea", 2), id="one")
    assert await handle.result(5) == Order("tea", 6)
    assert await decided(logs, "one") == [("1", "price", b"3")]
    status = await handle.status()
    assert (status.state, status.steps, status.epoch) == (State.DONE, 1, 1)


async def test_a_step_costs_an_append_and_the_last_one_comes_with_the_end(
    flow: Flow, logs: MemoryLogs
) -> None:
    async def one() -> int:
        return 1

    @flow.workflow
    async def five(wf: Workflow) -> int:
        return sum([await wf.step(one) for _ in range(5)])

    await (await five.start()).result(5)
    appends: list[int] = []
    append_all = logs.append_all

    def counted(entries: list[tuple[bytes, bytes]]) -> list[int]:
        appends.append(len(entries))
        return append_all(entries)

    logs.append_all = counted  # type: ignore[method-assign, assignment]
    assert await (await five.start()).result(5) == 5
    assert appends == [1, 1, 1, 1, 1, 2]


async def test_a_decided_step_is_not_done_again(flow: Flow, logs: MemoryLogs) -> None:
    numbers = itertools.count()

    async def count() -> int:
        return next(numbers)

    @flow.workflow
    async def twice(wf: Workflow) -> list[float]:
        first = await wf.step(count)
        values = [float(first), wf.now(), wf.random().random(), wf.uuid().int]
        return [*values, float(await wf.step(count))]

    values = await (await twice.start(id="t")).result(5)
    assert values[0] == 0
    assert values[-1] == 1
    repeated = await again(logs, twice, "t")
    assert twice.definition.signature.result(repeated.result) == values
    assert next(numbers) == 2


async def test_a_failing_step_is_tried_again_with_growing_pauses(
    flow: Flow, pauses: list[float]
) -> None:
    attempts = itertools.count(1)
    keys: set[str] = set()

    @flow.workflow
    async def stubborn(wf: Workflow) -> int:
        async def third() -> int:
            keys.add(wf.key)
            if (attempt := next(attempts)) < 3:
                raise NotReadyError("not yet")
            return attempt

        return await wf.step(third, retries=5, backoff=0.25)

    handle = await stubborn.start(id="s")
    assert await handle.result(5) == 3
    assert pauses == [0.25, 0.5]
    assert keys == {f"shop/flow/s@{(await handle.status()).place}/1"}, "one key for all attempts"


async def test_a_step_that_fails_permanently_fails_alike_when_it_is_replayed(
    flow: Flow, logs: MemoryLogs
) -> None:
    calls = itertools.count()

    async def never() -> None:
        next(calls)
        raise ValueError("no room")

    @flow.workflow
    async def careful(wf: Workflow) -> str:
        try:
            await wf.step(never, retries=0)
        except StepFailedError as error:
            return f"{error.step} {error.kind} {error}"
        return "?"

    reported = await (await careful.start(id="c")).result(5)
    assert reported == "never ValueError Step 'never' failed: ValueError: no room"
    assert (await again(logs, careful, "c")).result.decode() == f'"{reported}"'
    assert next(calls) == 1


async def test_a_workflow_that_raises_has_failed(flow: Flow) -> None:
    @flow.workflow
    async def broken(wf: Workflow) -> None:
        raise KeyError("nothing")

    handle = await broken.start()
    with pytest.raises(RunFailedError, match="nothing") as caught:
        await handle.result(5)
    assert caught.value.kind == "KeyError"
    assert (await handle.status()).state is State.FAILED


async def test_the_same_id_is_the_same_run(flow: Flow, logs: MemoryLogs) -> None:
    runs = itertools.count()

    async def count() -> int:
        return next(runs)

    @flow.workflow
    async def once(wf: Workflow) -> int:
        return await wf.step(count)

    @flow.workflow
    async def other(wf: Workflow) -> None: ...

    handles = await asyncio.gather(*(once.start(id="x") for _ in range(5)))
    assert {await handle.result(5) for handle in handles} == {0}
    assert await (await once.start(id="x")).result(5) == 0
    assert next(runs) == 1
    with pytest.raises(RunIdInUseError):
        await other.start(id="x")


async def test_concurrent_starts_of_two_workflows_with_one_id_start_one_of_them() -> None:
    class Slow(HookedLogs):
        async def before_append(self, entries: Sequence[Entry]) -> None:
            await asyncio.sleep(0)

    flow = Flow("shop")
    flow.attach(Slow())

    @flow.workflow
    async def waits(wf: Workflow) -> str:
        return str(await wf.signal("go"))

    @flow.workflow
    async def other(wf: Workflow) -> None: ...

    handle, refused = await asyncio.gather(
        waits.start(id="x"), other.start(id="x"), return_exceptions=True
    )
    assert isinstance(refused, RunIdInUseError)
    assert isinstance(handle, Handle)
    await handle.signal("go", "gone")
    assert await handle.result(5) == "gone"


async def test_a_handle_follows_a_run_that_is_executed_elsewhere(
    flow: Flow, logs: MemoryLogs
) -> None:
    gate = asyncio.Event()

    async def wait() -> str:
        await gate.wait()
        return "open"

    def defined(flow: Flow) -> Startable[str]:
        @flow.workflow
        async def waits(wf: Workflow) -> str:
            return await wf.step(wait)

        return waits

    elsewhere = Flow("shop")
    elsewhere.attach(logs)
    handle = defined(elsewhere).handle("w")
    with pytest.raises(UnknownRunError):
        await handle.status()
    await defined(flow).start(id="w")
    with pytest.raises(TimeoutError):
        await handle.result(0.01)
    gate.set()
    assert await handle.result(5) == "open"


async def test_a_cancelled_run_ends_at_its_next_operation(flow: Flow, logs: MemoryLogs) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()
    cleaned: list[str] = []

    async def long() -> None:
        begun.set()
        await gate.wait()

    async def clean() -> None:
        cleaned.append("up")

    @flow.workflow
    async def tidy(wf: Workflow) -> None:
        await wf.step(long)
        try:
            await wf.step(long)
        except Cancelled:
            await wf.step(clean)
            raise

    handle = await tidy.start(id="t")
    await begun.wait()
    await handle.cancel()
    gate.set()
    with pytest.raises(RunCancelledError):
        await handle.result(5)
    assert cleaned == ["up"]
    assert (await handle.status()).state is State.CANCELLED
    assert (await again(logs, tidy, "t")).was_cancelled, "at the same place in every execution"
    assert cleaned == ["up"]


async def test_a_cancellation_ends_the_pause_before_another_attempt(
    flow: Flow, logs: MemoryLogs
) -> None:
    attempts: list[int] = []
    failed = asyncio.Event()

    async def boom(n: int) -> None:
        attempts.append(n)
        failed.set()
        raise ValueError(n)

    @flow.workflow
    async def trying(wf: Workflow) -> None:
        await wf.step(boom, 1, retries=5, backoff=60)

    handle = await trying.start(id="t")
    await failed.wait()
    await asyncio.sleep(0)  # it pauses
    await handle.cancel()
    with pytest.raises(RunCancelledError, match="cancelled at step 'boom'"):
        await handle.result(5)
    assert attempts == [1]
    assert (await again(logs, trying, "t")).was_cancelled, "alike in every execution"
    assert attempts == [1]


async def test_a_cancellation_between_attempts_reaches_branches_and_no_compensation(
    flow: Flow, pauses: list[float]
) -> None:
    undone: list[str] = []

    async def fails() -> None:
        await handle.cancel()
        raise ValueError("never")

    async def undo(what: str) -> None:
        undone.append(what)
        if len(undone) < 3:
            await handle.cancel()
            raise ValueError("not yet")

    @flow.workflow
    async def trying(wf: Workflow) -> None:
        await wf.step(lambda: "car", name="car", compensate=undo)
        await wf.gather(wf.step(fails, backoff=0.5), wf.step(fails, backoff=0.5))

    handle = await trying.start()
    with pytest.raises(RunCancelledError):
        await handle.result(5)
    assert undone == ["car"] * 3, "what is taken back is tried again all the same"


async def test_a_run_that_is_not_there_or_has_ended_cannot_be_cancelled(
    flow: Flow, logs: MemoryLogs
) -> None:
    @flow.workflow
    async def wait(wf: Workflow) -> object:
        return await wf.signal("go")

    handle = wait.handle("w")
    with pytest.raises(UnknownRunError):
        await handle.cancel()
    # one that was asked for an earlier run of the id, and is read late
    early = encode(CancelAsked())
    await logs.log("shop/flow").append(early, tags=[run_tag("w"), INBOX_TAG])
    await wait.start(id="w")
    await flow.runner.look(logs)
    await handle.signal("go", 7)
    assert await handle.result(5) == 7
    with pytest.raises(RunEndedError):
        await handle.cancel()
    other = await wait.start(id="x")
    await other.cancel()
    with pytest.raises(RunCancelledError):
        await other.result(5)
    await other.cancel()  # harmless to repeat


@pytest.mark.parametrize("change", ["name", "less", "kind"])
async def test_changed_code_is_reported_and_the_run_is_parked(
    flow: Flow, logs: MemoryLogs, change: str
) -> None:
    async def pay() -> int:
        return 1

    async def send() -> int:
        return 2

    @flow.workflow
    async def order(wf: Workflow) -> int:
        return await wf.step(pay) + await wf.step(send)

    await (await order.start(id="o")).result(5)

    async def changed(wf: Workflow) -> int:
        if change == "kind":
            return int(wf.now())
        return await wf.step(send if change == "name" else pay)

    order.definition.body = changed
    with pytest.raises(ChangedWorkflowError) as caught:
        await again(logs, order, "o")
    error = caught.value
    assert error.run == "o"
    assert (error.number, error.decided) == (
        ("2", "step send") if change == "less" else ("1", "step pay")
    )
    assert error.found == {"name": "step send", "less": None, "kind": "now now"}[change]


async def test_mistakes_are_reported_before_anything_is_started(
    flow: Flow, logs: MemoryLogs
) -> None:
    @flow.workflow
    async def buy(wf: Workflow, order: Order) -> None: ...

    for wrong in ({"order": 7}, {}, {"order": Order("a", 1), "more": 1}):
        with pytest.raises(InvalidArgumentsError):
            await buy.start(**wrong)
    with pytest.raises(InvalidArgumentsError, match="it takes 1"):
        await buy.start(Order("a", 1), 2)
    with pytest.raises(FlowSettingsError):
        await buy.start(Order("a", 1), id="")
    with pytest.raises(FlowSettingsError):
        flow.workflow(buy.definition.body)
    assert logs.position == 0
    with pytest.raises(FlowSettingsError, match="attach"):
        Flow("elsewhere").logs()


async def test_a_process_executes_a_bounded_number_of_runs(logs: MemoryLogs) -> None:
    flow, gate = Flow("shop", executions=2), asyncio.Event()
    flow.attach(logs)

    @flow.workflow
    async def waits(wf: Workflow) -> None:
        await wf.step(gate.wait)

    handles = [await waits.start() for _ in range(2)]
    with pytest.raises(OverloadedError):
        await waits.start()
    gate.set()
    for handle in handles:
        await handle.result(5)


async def test_results_of_every_kind_come_back_as_they_were(flow: Flow, logs: MemoryLogs) -> None:
    async def data() -> bytes:
        return b"\x00\xff"

    def sync(order: Order) -> Order:
        return order

    @flow.workflow
    async def kinds(wf: Workflow) -> tuple[bytes, Order, list[object]]:
        async def anything():  # type: ignore[no-untyped-def] # noqa: ANN202
            return [1, {"a": None}]

        return await wf.step(data), await wf.step(sync, Order("x", 1)), await wf.step(anything)

    result = await (await kinds.start(id="k")).result(5)
    assert result == (b"\x00\xff", Order("x", 1), [1, {"a": None}])
    repeated = await again(logs, kinds, "k")
    assert kinds.definition.signature.result(repeated.result) == result


async def test_a_workflow_can_replace_one_of_a_wider_result() -> None:
    """For type checkers: what it gives only comes out of it."""

    async def shown(value: object) -> str:
        return str(value)

    flow = Flow("shop")
    flow.attach(MemoryLogs())

    @flow.workflow
    async def child(wf: Workflow) -> int:
        return 7

    @flow.workflow
    async def parent(wf: Workflow) -> str:
        return await shown(await wf.run(child))

    wider: Startable[object] = child
    assert await (await parent.start()).result(10) == "7"
    assert await (await wider.start()).result(10) == 7


async def test_a_sync_body_runs_in_a_thread_also_as_a_partial(flow: Flow) -> None:
    def where(word: str) -> bool:
        return threading.current_thread() is threading.main_thread()

    async def who(word: str) -> bool:
        return where(word)

    @flow.workflow
    async def bodies(wf: Workflow) -> list[bool]:
        return [
            await wf.step(where, "a"),
            await wf.step(partial(where, "a")),
            await wf.step(partial(partial(where), "a")),
            await wf.step(partial(who, "a")),
        ]

    assert await (await bodies.start()).result(5) == [False, False, False, True]


async def test_a_flow_with_another_platform_knows_nothing_of_the_one_before() -> None:
    flow = Flow("shop")

    @flow.workflow
    async def wait_for_go(wf: Workflow) -> str:
        go: str = await wf.signal("go")
        return go

    for cancelled_first in (True, False):  # the second run begins at a lower seqnum
        logs = MemoryLogs()
        flow.attach(logs)
        if cancelled_first:
            for number in range(50):
                await logs.log("other").append(b"%d" % number)
        handle = await wait_for_go.start(id="a")
        if cancelled_first:
            await handle.cancel()
            with pytest.raises(RunCancelledError):
                await handle.result(20)
        else:
            await handle.signal("go", "went")
            assert await handle.result(20) == "went"
        assert [status.id for status in await flow.runs()] == ["a"]
        await flow.runner.stop()
