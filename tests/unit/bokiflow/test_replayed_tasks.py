"""Operations that a workflow's tasks had finished before a crash are finished in the next
execution, too, although a replay does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import msgspec
import pytest

from bokiflow import Workflow
from bokiflow.flow import Startable
from bokiflow.operations import children
from bokiflow.operations.operations import RunningChild
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import Origin, RunFinished, RunStarted, encode, run_record, run_tag
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.apps.app import Context
from indilog.base.log import Log
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG, begin, execute, take

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class Children:
    """A workflow whose runs end as they begin; it takes a while to begin one, and to read one."""

    name = "child"
    log_name = FLOW_LOG

    def __init__(self, log: Log) -> None:
        self._log = log

    def arguments_text(self, _: tuple[object, ...], __: dict[str, object]) -> bytes:
        return b"{}"

    def result_of(self, text: bytes) -> Any:  # noqa: ANN401 - of any type
        return msgspec.json.decode(text)

    async def start_child(self, arguments: bytes, id: str, parent: Origin) -> None:  # noqa: A002
        await asyncio.sleep(0.02)
        started = RunStarted(self.name, arguments, "first", "version", parent)
        await self._log.append(encode(started), tags=[run_tag(id)])
        await self._log.append(encode(RunFinished(1, b"7")), tags=[run_tag(id)])


class Calls(Context):
    """Of a function whose calls all give the same."""

    def __init__(self, logs: MemoryLogs) -> None:
        self._given = logs

    def log(self, name: str, /) -> Log:
        return self._given.log(name)

    async def call_held(self, *_: object, **__: object) -> Any:  # noqa: ANN401 - of any type
        return 7

    async def release_calls(self, *_: object, **__: object) -> None:
        pass


class Crash:
    """Executes a workflow, which may crash once, where it says `crash()`."""

    def __init__(self, *, happens: bool) -> None:
        self.logs = MemoryLogs()
        self.log = self.logs.log(FLOW_LOG)
        self.child: Startable[Any] = cast("Startable[Any]", Children(self.log))
        self._is_due = self.happens = happens
        self.tasks: list[asyncio.Task[Any]] = []

    def task(self, asked: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Let it run beside the workflow."""
        self.tasks.append(asyncio.create_task(asked))
        return self.tasks[-1]

    @property
    def is_replay(self) -> bool:
        return self.happens and not self._is_due

    async def crash(self) -> None:
        if self._is_due:
            await asyncio.sleep(0)  # all that is decided is durable
            raise Stopped("its process is gone")

    async def end_of(self, body: Callable[[Workflow], Awaitable[object]]) -> RunFinished:
        await begin(self.log, "r")
        if self.happens:
            with pytest.raises(Stopped):
                await execute(self.log, "r", body, context=Calls(self.logs))
            await take(self.log, "r", "second")
            self._is_due = False
        end = await execute(self.log, "r", body, context=Calls(self.logs))
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return end


@pytest.fixture(params=[False, True], ids=["well", "crash"])
def crash(request: pytest.FixtureRequest) -> Crash:
    return Crash(happens=request.param)


@pytest.fixture(autouse=True)
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the run of a child takes a while."""

    async def slowly(log: Log, id: str, run: RunState, *, is_reused: bool) -> RunState:  # noqa: A002
        await asyncio.sleep(0.02)
        return await read_run(log, id, run, is_reused=is_reused)

    monkeypatch.setattr(children, "read_run", slowly)


def one(wf: Workflow) -> Coroutine[Any, Any, int]:
    return wf.step(lambda: 1, name="one")


async def two_after(wf: Workflow, first: Coroutine[Any, Any, object]) -> int:
    await first
    return await wf.step(lambda: 2, name="two")


async def many(wf: Workflow) -> None:
    for _ in range(40):
        await asyncio.sleep(0)
        await one(wf)


def nested(wf: Workflow, depth: int) -> Coroutine[Any, Any, object]:
    return wf.gather(nested(wf, depth - 1)) if depth else wf.signal("never")


ASKED: dict[str, Callable[[Workflow, Startable[Any]], Coroutine[Any, Any, object]]] = {
    "step": lambda wf, _: one(wf),
    "gather": lambda wf, _: wf.gather(one(wf), one(wf)),
    "nested": lambda wf, _: wf.gather(wf.gather(wf.gather(one(wf))), wf.gather(one(wf))),
    "one at a time": lambda wf, _: wf.gather(
        *(two_after(wf, one(wf)) for _ in range(40)), at_once=1
    ),
    "one after the other": lambda wf, _: wf.gather(many(wf)),
    "call": lambda wf, _: wf.gather(wf.call("shop.mail"), wf.call("shop.mail")),
    "run": lambda wf, child: wf.gather(two_after(wf, wf.run(child))),
    "start child": lambda wf, child: wf.gather(two_after(wf, wf.start_child(child))),
}


@pytest.mark.parametrize("asked", ASKED)
async def test_operations_finished_in_a_task_are_finished_again(crash: Crash, asked: str) -> None:
    async def races(wf: Workflow) -> str:
        task = crash.task(ASKED[asked](wf, crash.child))

        async def slow() -> None:
            await task

        await wf.step(slow, name="slow")
        await crash.crash()
        assert task.done(), "else the workflow goes on otherwise than before"
        return "done"

    end = await crash.end_of(races)
    assert (end.failure, end.result) == (None, b'"done"')


@pytest.mark.parametrize("asked", ASKED)
async def test_an_operation_is_finished_again_though_nothing_is_awaited(
    crash: Crash, asked: str
) -> None:
    async def races(wf: Workflow) -> str:
        task = crash.task(ASKED[asked](wf, crash.child))
        if not crash.is_replay:
            await task
        await crash.crash()
        return "done"

    end = await crash.end_of(races)
    assert (end.failure, end.result) == (None, b'"done"')


async def test_operations_of_a_gather_in_a_task_are_compensated(crash: Crash) -> None:
    undone: list[int] = []

    async def fails(wf: Workflow) -> None:
        def booked(first: Coroutine[Any, Any, object]) -> Coroutine[Any, Any, int]:
            async def book() -> int:
                await first
                return await wf.step(lambda: 3, name="book", compensate=undone.append)

            return wf.gather(book())  # type: ignore[return-value]

        task = crash.task(wf.gather(booked(wf.run(crash.child))))
        if not crash.is_replay:
            await task
        await crash.crash()
        raise ValueError("no room")

    end = await crash.end_of(fails)
    assert end.failure is not None
    assert end.failure.kind == "ValueError"
    assert undone == [3]


async def test_a_task_cancelled_after_its_end_stays_ended(crash: Crash) -> None:
    undone: list[int] = []

    async def cancels(wf: Workflow) -> None:
        task = crash.task(wf.step(lambda: 3, name="book", compensate=undone.append))

        async def slow() -> None:
            await task

        await wf.step(slow, name="slow")
        await crash.crash()
        task.cancel()
        raise ValueError("no room")

    end = await crash.end_of(cancels)
    assert end.failure is not None
    assert end.failure.kind == "ValueError"
    assert undone == [3]


async def test_a_gather_that_was_cancelled_in_a_task_is_not_reported(crash: Crash) -> None:
    async def cancels(wf: Workflow) -> str:
        task = crash.task(wf.gather(one(wf), nested(wf, 20)))
        await wf.step(lambda: asyncio.sleep(0.01), name="slow")
        await crash.crash()
        task.cancel()
        return "done"

    end = await crash.end_of(cancels)
    assert (end.failure, end.result) == (None, b'"done"')


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 10])
async def test_a_gather_cancelled_before_its_parts_began_is_not_reported(
    crash: Crash, turns: int
) -> None:
    """A gather that is nested in it has not begun when its task is cancelled."""

    async def cancels(wf: Workflow) -> str:
        task = crash.task(wf.gather(one(wf), nested(wf, 20)))
        for _ in range(turns):
            await asyncio.sleep(0)
        await crash.crash()
        task.cancel()
        return "done"

    end = await crash.end_of(cancels)
    assert (end.failure, end.result) == (None, b'"done"')


async def test_a_gather_that_still_waits_is_reported(crash: Crash) -> None:
    """The gather has replayed its decided operations, and waits for another one."""

    async def forgets(wf: Workflow) -> str:
        crash.task(wf.gather(two_after(wf, one(wf)), two_after(wf, wf.signal("never"))))
        await wf.step(lambda: asyncio.sleep(0.01), name="slow")
        await crash.crash()
        return "done"

    end = await crash.end_of(forgets)
    assert end.failure is not None
    assert end.failure.kind == "UnfinishedOperationError"
    assert "signal 'never'" in end.failure.message


async def test_a_workflow_ends_after_the_start_of_its_child() -> None:
    """The start of the child was decided, so no error may claim that the child did not start."""
    crash = Crash(happens=False)
    started: list[RunningChild[Any]] = []

    async def start(wf: Workflow) -> None:
        started.append(await wf.start_child(crash.child))

    async def forgets(wf: Workflow) -> str:
        crash.task(start(wf))
        await wf.step(lambda: asyncio.sleep(0.01), name="slow")
        return "done"

    assert (await crash.end_of(forgets)).result == b'"done"'
    first = await crash.log.read_next(run_tag(started[0].id), 0)
    last = await crash.log.read_prev(run_tag("r"), 2**62)
    assert first is not None
    assert last is not None
    assert isinstance(run_record(last.data), RunFinished)
    assert first.seqnum < last.seqnum
