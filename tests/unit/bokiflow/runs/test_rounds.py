"""A workflow without an end continues with an empty history, and loses and repeats nothing."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from bokiflow import (
    Cancelled,
    Flow,
    FlowSettingsError,
    RunCancelledError,
    RunFailedError,
    State,
    Workflow,
)
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    CancelAsked,
    RunContinued,
    RunRecord,
    RunStarted,
    Signalled,
    StepDecided,
    UnreadSignal,
    run_tag,
)
from bokiflow.runs.rounds import PAST_MAX, ContinuedAsNew
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog import App, NotFoundError, TrimmedError
from indilog.client import Client
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.flow_executions import FLOW_LOG, begin, execute, take
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


async def one() -> int:
    return 1


async def test_a_run_continues_with_new_arguments_and_the_same_id(flow: Flow) -> None:
    @flow.workflow
    async def count(wf: Workflow, upto: int, total: int = 0) -> int:
        total += await wf.step(one)
        if total < upto:
            wf.continue_as_new(upto, total=total)
        return total

    handle = await count.start(5, id="a")
    assert await handle.result(5) == 5
    status = await handle.status()
    assert (status.round, status.steps, status.state) == (5, 1, State.DONE)
    assert [run.id for run in await flow.runs()] == ["a"]


async def test_a_thousand_rounds_leave_a_short_history(flow: Flow, logs: MemoryLogs) -> None:
    executions = []

    @flow.workflow
    async def count(wf: Workflow, left: int) -> int:
        executions.append(wf.execution)
        await wf.step(one)
        await wf.signal("go", timeout=0)
        if left:
            wf.continue_as_new(left - 1)
        await wf.signal("end")
        return wf.execution.run.past

    handle = await count.start(999, id="a")
    while (await handle.status()).round < 1000:  # noqa: ASYNC110
        await asyncio.sleep(0)
    log = logs.log(FLOW_LOG)
    run = await read_run(log, "a", RunState(), is_reused=True)
    assert run.round == 1000
    assert len(run.steps) < 5
    local = executions[-1].run
    assert (len(local.steps), len(local.signals)) == (len(run.steps), 0)
    history = await log.read_range(run_tag("a"), await first_seqnum(log, "a"), limit=2000)
    assert len(history) < PAST_MAX + 20
    await handle.signal("end")
    assert await handle.result(5) < PAST_MAX


async def first_seqnum(log: MemoryLog, run: str) -> int:
    """Return the seqnum of the first record of a run that is left."""
    return (await read_run(log, run, RunState(), is_reused=True)).floor


async def test_unconsumed_signals_reach_the_next_round(flow: Flow) -> None:
    @flow.workflow
    async def collect(wf: Workflow, got: list[int]) -> list[int]:
        got = [*got, await wf.signal("item")]
        if len(got) < 4:
            wf.continue_as_new(got)
        return got

    handle = await collect.start([])
    for number in range(4):
        await handle.signal("item", number)
    assert await handle.result(5) == [0, 1, 2, 3]


async def test_a_signal_with_a_key_of_an_earlier_round_takes_no_effect_again(flow: Flow) -> None:
    @flow.workflow
    async def collect(wf: Workflow, got: list[int]) -> list[int]:
        got = [*got, await wf.signal("item")]
        if len(got) < 2:
            wf.continue_as_new(got)
        return got

    handle = await collect.start([])
    await handle.signal("item", 1, key="k")
    while (await handle.status()).round < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await handle.signal("item", 1, key="k")
    await handle.signal("item", 2)
    assert await handle.result(5) == [1, 2]


async def test_steps_and_children_of_rounds_have_their_own_keys(flow: Flow) -> None:
    keys: list[str] = []

    @flow.workflow
    async def child(wf: Workflow) -> str:
        return wf.id

    @flow.workflow
    async def parent(wf: Workflow, ids: list[str]) -> list[str]:
        async def note() -> None:
            keys.append(wf.key)

        await wf.step(note)
        ids = [*ids, await wf.run(child)]
        if len(ids) < 3:
            wf.continue_as_new(ids)
        return ids

    ids = await (await parent.start([], id="a")).result(5)
    assert len(set(ids)) == len(set(keys)) == 3


async def test_a_parent_waits_for_the_last_round_of_its_child(flow: Flow) -> None:
    @flow.workflow
    async def child(wf: Workflow, left: int) -> str:
        await wf.step(one)
        if left:
            wf.continue_as_new(left - 1)
        return "done"

    @flow.workflow
    async def parent(wf: Workflow) -> str:
        return await wf.run(child, 2 * PAST_MAX)

    assert await (await parent.start(id="a")).result(20) == "done"


async def test_a_cancellation_reaches_the_current_round(flow: Flow) -> None:
    @flow.workflow
    async def ticks(wf: Workflow, number: int) -> None:
        await wf.step(one)
        await asyncio.sleep(0)
        wf.continue_as_new(number + 1)

    handle = await ticks.start(0)
    while (await handle.status()).round < 5:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await handle.cancel()
    with pytest.raises(RunCancelledError):
        await handle.result(5)


async def test_a_noticed_cancellation_does_not_reach_the_next_round(flow: Flow) -> None:
    @flow.workflow
    async def stubborn(wf: Workflow, round: int) -> str:  # noqa: A002
        if round == 2:
            await wf.step(one)
            return "continued"
        try:
            await wf.signal("never")
        except Cancelled:
            wf.continue_as_new(2)
        return "not cancelled"

    handle = await stubborn.start(1)
    await handle.cancel()
    assert await handle.result(5) == "continued"


async def test_compensations_of_an_ended_round_do_not_run(flow: Flow) -> None:
    undone: list[int] = []

    @flow.workflow
    async def book(wf: Workflow, number: int) -> None:
        async def do() -> int:
            return number

        await wf.step(do, compensate=undone.append)
        if number == 2:
            raise ValueError("no room")
        wf.continue_as_new(number + 1)

    with pytest.raises(RunFailedError, match="no room"):
        await (await book.start(0)).result(5)
    assert undone == [2]


async def test_a_round_must_not_end_inside_of_an_operation(flow: Flow) -> None:
    problems: list[str] = []

    @flow.workflow
    async def wrong(wf: Workflow) -> None:
        async def body() -> None:
            try:
                wf.continue_as_new()
            except FlowSettingsError as error:
                problems.append(str(error))

        await wf.step(body)
        await wf.gather(body(), wf.step(one))
        await asyncio.create_task(body())

    await (await wrong.start()).result(5)
    assert len(problems) == 3
    assert "call it in the workflow's own code" in problems[0]


async def test_arguments_of_the_next_round_are_checked(flow: Flow) -> None:
    @flow.workflow
    async def wrong(wf: Workflow, count: int) -> None:
        wf.continue_as_new("many")

    with pytest.raises(RunFailedError, match="count"):
        await (await wrong.start(1)).result(5)


async def test_an_unfinished_operation_fails_the_run(flow: Flow) -> None:
    @flow.workflow
    async def wrong(wf: Workflow) -> None:
        task = asyncio.create_task(wf.signal("never"))
        await asyncio.sleep(0)
        assert not task.done()
        wf.continue_as_new()

    with pytest.raises(RunFailedError, match="was finished"):
        await (await wrong.start()).result(5)


async def test_arguments_that_fit_no_record_fail_the_run(flow: Flow) -> None:
    @flow.workflow
    async def grows(wf: Workflow, text: str) -> None:
        wf.continue_as_new(2 * text)

    with pytest.raises(RunFailedError, match="arguments of the next round, with the signals"):
        await (await grows.start("x" * 300_000)).result(5)


async def test_another_process_continues_the_current_round() -> None:
    logs = MemoryLogs()
    first, second = ShopProcess(logs, 0.2), ShopProcess(logs, 0.2)
    rounds: list[tuple[str, int]] = []

    def add_workflow(process: ShopProcess, name: str) -> Any:  # noqa: ANN401
        @process.flow.workflow
        async def count(wf: Workflow, number: int) -> str:
            await wf.step(one)
            rounds.append((name, number))
            if number < 5:
                wf.continue_as_new(number + 1)
            await wf.signal("go")
            return f"{name} {number}"

        return count

    started, other = add_workflow(first, "first"), add_workflow(second, "second")
    handle = await started.start(1, id="a")
    while (await handle.status()).round < 5:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    first.kill()
    async with second.driven():
        taken = other.handle("a")
        await taken.signal("go")
        assert await taken.result(10) == "second 5"
    assert [number for name, number in rounds if name == "first"] == [1, 2, 3, 4, 5]
    assert [number for name, number in rounds if name == "second"] == [5]


async def test_a_parent_in_another_process_finds_its_child_without_old_rounds() -> None:
    logs = MemoryLogs()
    first, second = ShopProcess(logs, 0.2), ShopProcess(logs, 0.2)

    def add_workflows(process: ShopProcess) -> Any:  # noqa: ANN401
        @process.flow.workflow
        async def child(wf: Workflow, left: int) -> str:
            await wf.step(one)
            if left:
                wf.continue_as_new(left - 1)
            await wf.signal("go")
            return "done"

        @process.flow.workflow
        async def parent(wf: Workflow) -> str:
            return await wf.run(child, PAST_MAX)

        return parent

    parent, other = add_workflows(first), add_workflows(second)
    handle = await parent.start(id="a")
    log, run = logs.log(FLOW_LOG), RunState()
    child = f"a@{(await handle.status()).place}/1"
    while run.round <= PAST_MAX:
        await read_run(log, child, run)
        await asyncio.sleep(0)
    first.kill()
    with pytest.raises(TrimmedError):
        await read_run(log, child, RunState())
    async with second.driven():
        await second.flow.handle("child", child).signal("go")
        assert await other.handle("a").result(10) == "done"


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_round_ends_once_whatever_its_append_did(is_lost: bool) -> None:
    """The process ends at the append that ends the round: before it, or after it took effect."""
    log = MemoryLog(FLOW_LOG)
    await begin(log, "a")

    async def body(wf: Workflow) -> None:
        await wf.step(one)
        wf.continue_as_new()

    append = log.append_batch

    async def ends(entries: Any, **more: Any) -> Any:  # noqa: ANN401
        if not is_lost:
            await append(entries, **more)
        raise Stopped("The process ends here.")

    log.append_batch = ends  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        await execute(log, "a", body)
    log.append_batch = append  # type: ignore[method-assign]
    await take(log, "a", "second")
    run = await read_run(log, "a", RunState())
    assert (run.round, run.epoch) == ((1, 2) if is_lost else (2, 3))
    with pytest.raises(ContinuedAsNew):
        await execute(log, "a", body)
    run = await read_run(log, "a", RunState())
    assert run.round == (2 if is_lost else 3)
    assert not run.steps


def continued(epoch: int, number: int, end: int, **more: Any) -> RunContinued:  # noqa: ANN401
    return RunContinued(
        epoch=epoch, round=number, end=end, workflow="w", arguments=b"{}", executor="x",
        version="v", started_at=0, began=1.0, cancel_asked=False, **more,
    )  # fmt: skip


def replayed(records: list[tuple[int, RunRecord]]) -> RunState:
    run = RunState()
    for seqnum, record in records:
        run.apply(seqnum, 1.0, record)
    return run


async def test_a_second_copy_of_the_end_of_a_round_has_no_effect() -> None:
    record = continued(1, 2, 1)
    run = replayed([(0, RunStarted("w", b"{}", "x", "v")), (1, record), (2, record)])
    assert (run.round, run.epoch, run.round_at) == (2, 2, 1)


async def test_what_its_author_had_not_read_reaches_the_next_round() -> None:
    signal = Signalled("n", b"1", "k")
    run = replayed([
        (0, RunStarted("w", b"{}", "x", "v")), (1, signal), (2, CancelAsked()),
        (3, continued(1, 2, 1)), (4, signal),
    ])  # fmt: skip
    assert (run.signals, run.cancel_asked) == ([(1, signal)], True)


async def test_a_history_without_its_old_rounds_gives_the_same_state() -> None:
    """Every record from which a run may be trimmed leads to the state of the whole history."""
    fourth, seventh = (UnreadSignal(s, "n", b"1", f"k{s}") for s in (4, 7))
    signals = [(s, Signalled("n", b"1", f"k{s}")) for s in (1, 4, 7)]
    history: list[tuple[int, RunRecord]] = [
        (0, RunStarted("w", b"{}", "x", "v")),
        signals[0],
        (2, StepDecided(1, "1", "n", "signal", b"[1,1]")),
        (3, continued(1, 2, 2, keys=("k1",))),
        signals[1],
        (5, continued(2, 3, 4, keys=("k1",))),  # its author had not read the signal before it
        (6, StepDecided(3, "1", "one", "step", b"1")),
        signals[2],
        (8, continued(3, 4, 8, keys=("k1", "k4", "k7"), signals=(fourth, seventh))),
        (9, continued(4, 5, 9, keys=("k4", "k7"), signals=(seventh,))),
    ]  # fmt: skip
    floors = []
    for end in range(1, len(history) + 1):
        whole = replayed(history[:end])
        floors.append(whole.floor)
        short = replayed([one for one in history[:end] if one[0] >= whole.floor])
        assert seen(short) == seen(whole)
    assert floors == [0, 0, 0, 0, 0, 3, 3, 3, 3, 8]


def seen(run: RunState) -> tuple[object, ...]:
    """Return what an execution sees of a run."""
    return (
        run.round, run.epoch, run.started, run.started_at, run.round_at, run.signals,
        list(run.signal_keys), run.cancel_asked, run.steps,
    )  # fmt: skip


async def test_events_of_all_rounds_reach_a_follower(flow: Flow) -> None:
    @flow.workflow
    async def count(wf: Workflow, number: int) -> None:
        wf.publish(number)
        if number < 50:
            wf.continue_as_new(number + 1)

    handle = await count.start(0)
    assert [event.value async for event in handle.events()] == list(range(51))


async def test_people_see_the_round_and_the_one_before_it(logs: MemoryLogs) -> None:
    app = App("shop")
    flow = Flow(app)
    flow.attach(logs)

    @flow.workflow
    async def count(wf: Workflow, number: int) -> None:
        async def step() -> int:
            return 10 * number

        await wf.step(step)
        if number < 3:
            wf.continue_as_new(number + 1)
        await wf.signal("go")

    handle = await count.start(1, id="a")
    while (await handle.status()).round < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    run = Client(logs).run(app, "a")
    now = await run.show()
    assert (now.run.state, now.round, now.predecessor, now.successor) == ("running", 3, 2, None)
    assert now.arguments == {"number": 3}
    before = await run.show(round=2)
    assert (before.run.state, before.round) == ("continued", 2)
    assert (before.predecessor, before.successor) == (1, 3)
    assert [step.result for step in before.steps] == [20]
    with pytest.raises(NotFoundError, match="has no round 4"):
        await run.show(round=4)
    await handle.signal("go")
    await handle.result(5)
    states = [event.data["state"] async for event in run.events()]
    assert states == ["running", "continued", "continued", "done"]


async def test_a_repeated_start_gets_the_current_round(flow: Flow) -> None:
    @flow.workflow
    async def count(wf: Workflow, number: int) -> int:
        if number < 3:
            wf.continue_as_new(number + 1)
        return number

    await (await count.start(0, id="a")).result(5)
    assert await (await count.start(0, id="a")).result(5) == 3


async def test_ended_runs_with_rounds_are_collected(logs: MemoryLogs) -> None:
    process = ShopProcess(logs, 0.2, retention_s=0)

    @process.flow.workflow
    async def count(wf: Workflow, number: int) -> int:
        if number < 3:
            wf.continue_as_new(number + 1)
        return number

    async with process.driven():
        await (await count.start(0, id="a")).result(5)
        log = logs.log(FLOW_LOG)
        for _ in itertools.count():
            if (await read_run(log, "a", RunState(), is_reused=True)).started is None:
                break
            await asyncio.sleep(0.05)
