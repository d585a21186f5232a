"""Workflows that the platform starts at due times: each due time once, and as `overlap` says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from bokiflow import Flow, FlowSettingsError, RunCancelledError, Startable, State, Workflow
from bokiflow.runs.records import RunStarted, run_record
from bokiflow.runs.run_log import PATIENCE_TRIES
from indilog import (
    App,
    AppendOutcomeUnknownError,
    Context,
    InvalidArgumentsError,
    NotFoundError,
    NotReadyError,
    TrimmedError,
)
from indilog.apps.schedule import next_due
from indilog.base.deployed import due_time_in, scheduled_invocation
from indilog.base.log import Entry
from indilog.client import Client
from indilog.testing import MemoryLog, MemoryLogs, context
from tests.support.hooked_log import HookedLogs
from tests.unit.bokiflow.processes import kill

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

FIRST = datetime(2023, 11, 14, 22, 0, tzinfo=UTC)
"""Before the time of the logs, 2023-11-14 22:13:20."""
SECOND, THIRD = FIRST + timedelta(minutes=5), FIRST + timedelta(minutes=10)


class Reports:
    """One process of an application with a scheduled workflow whose runs wait for a signal."""

    def __init__(self, logs: MemoryLogs, overlap: Any = "skip") -> None:  # noqa: ANN401
        self.logs = logs
        self.app = App("shop")
        self.flow = Flow(self.app, lease=0.2)
        self.flow.attach(logs)
        self.begun: list[datetime] = []
        self.report: Startable[str] = self.flow.workflow(schedule="*/5 * * * *", overlap=overlap)(
            self._report
        )
        self.client = Client(logs)

    async def _report(self, wf: Workflow, due: datetime, kind: str = "daily") -> str:
        self.begun.append(due)
        await wf.signal("go")
        return f"{kind} {due:%H:%M}"

    _report.__name__ = "report"

    async def call(self, due: datetime) -> str | None:
        """Do what the platform does at a due time."""
        ctx = context(logs=self.logs)
        ctx.invocation_id = scheduled_invocation("any", due.timestamp())
        started: str | None = await self.app.functions["start-report"].body(ctx)
        return started

    async def end(self, run: str) -> str:
        handle = self.report.handle(run)
        await handle.signal("go")
        return await handle.result(30)

    async def until_begun(self, *dues: datetime) -> None:
        async with asyncio.timeout(30):
            while self.begun != list(dues):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def operate(self, name: str, **arguments: object) -> Any:  # noqa: ANN401
        ctx = context(logs=self.logs)
        return await self.app.operations[f"schedules.{name}"].body(ctx, **arguments)


@pytest.fixture
def logs() -> MemoryLogs:
    return MemoryLogs(clock=lambda: 1_700_000_000.0)


async def test_the_platform_calls_a_function_of_the_application(logs: MemoryLogs) -> None:
    [spec] = Reports(logs).app.schedules
    assert (spec.function, spec.expression) == ("start-report", "*/5 * * * *")
    assert next_due(spec, FIRST.timestamp()) == SECOND.timestamp()


async def test_an_invocation_names_its_due_time() -> None:
    assert due_time_in(scheduled_invocation("any", FIRST.timestamp())) == FIRST.timestamp()
    assert due_time_in("0123456789abcdef01234567") is None


async def test_a_due_time_starts_one_run_however_often_it_is_called(logs: MemoryLogs) -> None:
    one, two = Reports(logs), Reports(logs)
    ids = await asyncio.gather(one.call(FIRST), two.call(FIRST), one.call(FIRST))
    assert set(ids) == {"report@2023-11-14T22:00:00Z"}
    assert await one.end("report@2023-11-14T22:00:00Z") == "daily 22:00"
    assert await two.call(FIRST) == ids[0]
    assert len(one.begun + two.begun) == 1


class Unanswered(HookedLogs):
    """Logs that do not say whether starts are recorded, as often as a start repeats its append."""

    left = PATIENCE_TRIES

    async def before_append(self, entries: Sequence[Entry]) -> None:
        is_start = any(isinstance(run_record(one.data), RunStarted) for one in entries)
        if is_start and self.left:
            self.left -= 1
            raise AppendOutcomeUnknownError("no answer")


async def test_a_start_with_an_unknown_outcome_is_repeated() -> None:
    reports = Reports(Unanswered())
    run = await reports.call(FIRST)
    assert run is not None
    assert await reports.end(run) == "daily 22:00"


async def test_a_due_time_is_skipped_while_an_earlier_run_is_open(logs: MemoryLogs) -> None:
    reports = Reports(logs)
    first, second = await reports.call(FIRST), await reports.call(SECOND)
    with pytest.raises(RunCancelledError, match=r"Skipped, because run 'report@.*22:00:00Z' of"):
        await reports.report.handle(cast("str", second)).result(30)
    await reports.end(cast("str", first))
    third = await reports.call(THIRD)
    assert await reports.end(cast("str", third)) == "daily 22:10"
    assert reports.begun == [FIRST, THIRD]


async def test_queued_runs_begin_one_after_the_other(logs: MemoryLogs) -> None:
    reports = Reports(logs, "queue")
    ids = [cast("str", await reports.call(due)) for due in (FIRST, SECOND, THIRD)]
    await reports.until_begun(FIRST)
    shown = await reports.client.run(reports.app, ids[1]).show()
    [wait] = shown.waits
    assert wait.what == f"concurrency 'report' (1 of 1 running: {ids[0]})"
    await asyncio.sleep(0.3)
    assert reports.begun == [FIRST]
    assert await reports.end(ids[0]) == "daily 22:00"
    await reports.until_begun(FIRST, SECOND)
    assert await reports.end(ids[1]) == "daily 22:05"
    assert await reports.end(ids[2]) == "daily 22:10"


async def test_concurrent_runs_do_not_wait(logs: MemoryLogs) -> None:
    reports = Reports(logs, "concurrent")
    ids = [cast("str", await reports.call(due)) for due in (FIRST, SECOND)]
    await reports.until_begun(FIRST, SECOND)
    assert [await reports.end(run) for run in reversed(ids)] == ["daily 22:05", "daily 22:00"]


async def test_a_queued_run_can_be_cancelled_before_it_begins(logs: MemoryLogs) -> None:
    reports = Reports(logs, "queue")
    first, second = [cast("str", await reports.call(due)) for due in (FIRST, SECOND)]
    handle = reports.report.handle(second)
    await handle.cancel()
    with pytest.raises(RunCancelledError, match="cancelled before it began"):
        await handle.result(30)
    assert await reports.end(first) == "daily 22:00"
    assert reports.begun == [FIRST]


async def test_another_process_continues_the_queue(logs: MemoryLogs) -> None:
    one, two = Reports(logs, "queue"), Reports(logs, "queue")
    first, second = [cast("str", await one.call(due)) for due in (FIRST, SECOND)]
    await one.until_begun(FIRST)
    kill(one.flow)
    driving = asyncio.create_task(two.flow.drive(logs))
    try:
        await two.until_begun(FIRST)
        await two.report.handle(first).signal("go")
        await two.until_begun(FIRST, SECOND)
        await two.report.handle(second).signal("go")
        assert await two.report.handle(second).result(30) == "daily 22:05"
    finally:
        driving.cancel()
        await asyncio.wait([driving])


async def test_a_paused_schedule_starts_nothing_in_any_process(logs: MemoryLogs) -> None:
    one, two = Reports(logs), Reports(logs)
    await one.report.schedule.pause()
    assert await two.call(FIRST) is None
    assert (await two.report.schedule.status()).is_paused
    await two.report.schedule.resume()
    assert await one.call(SECOND) == "report@2023-11-14T22:05:00Z"
    assert [run.id for run in await one.flow.runs()] == ["report@2023-11-14T22:05:00Z"]
    with pytest.raises(TrimmedError) as trimmed:  # only the newest record is kept
        await logs.log("shop/flow").read_range("flow-schedule:report")
    newest = await logs.log("shop/flow").read_prev("flow-schedule:report")
    assert newest is not None
    assert trimmed.value.first_seqnum == newest.seqnum


async def test_a_pause_is_done_although_its_old_records_cannot_be_trimmed(
    logs: MemoryLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller got an error that said that nothing was done."""
    reports = Reports(logs)

    async def refuse(*_: object, **__: object) -> None:
        raise NotReadyError("away")

    monkeypatch.setattr(MemoryLog, "trim", refuse)
    await reports.report.schedule.pause()
    assert await reports.call(FIRST) is None


async def test_a_backfill_runs_what_has_not_run_in_order(logs: MemoryLogs) -> None:
    reports = Reports(logs)
    await reports.end(cast("str", await reports.call(SECOND)))
    ids = await reports.report.schedule.backfill(FIRST, THIRD + timedelta(seconds=1))
    assert ids == [reports.report.schedule.run_id(due) for due in (FIRST, SECOND, THIRD)]
    for run in (ids[0], ids[2]):
        assert (await reports.end(run)).startswith("daily")
    assert reports.begun == [SECOND, FIRST, THIRD]
    assert await reports.report.schedule.backfill(FIRST, THIRD) == ids[:2]
    assert len(await reports.flow.runs(state=State.DONE)) == 3


async def test_mistakes_of_a_backfill_start_nothing(logs: MemoryLogs) -> None:
    reports = Reports(logs)
    schedule = reports.report.schedule
    with pytest.raises(FlowSettingsError, match="with a time zone"):
        await schedule.backfill(FIRST.replace(tzinfo=None), THIRD)
    with pytest.raises(FlowSettingsError, match="that have passed"):
        await schedule.backfill(FIRST, FIRST + timedelta(days=1))
    with pytest.raises(FlowSettingsError, match="more than 1,000 due times"):
        await schedule.backfill(FIRST - timedelta(days=30), FIRST)
    assert (await reports.flow.runs()).runs == ()


async def test_people_see_and_steer_schedules(logs: MemoryLogs) -> None:
    reports = Reports(logs, "queue")
    first = cast("str", await reports.call(FIRST))
    [found] = await reports.operate("list")
    assert (found.workflow, found.expression, found.overlap) == ("report", "*/5 * * * *", "queue")
    assert found.open_runs == (first,)
    assert found.next_due == datetime(2023, 11, 14, 22, 15, tzinfo=UTC).timestamp()
    await reports.operate("pause", workflow="report")
    assert (await reports.operate("list"))[0].is_paused
    await reports.operate("resume", workflow="report")
    assert not (await reports.operate("list"))[0].is_paused
    started = await reports.operate("backfill", workflow="report", start=FIRST, end=THIRD)
    assert started.ids == (first, "report@2023-11-14T22:05:00Z")
    with pytest.raises(NotFoundError, match="no schedule of a workflow 'other'; it has report"):
        await reports.operate("pause", workflow="other")
    end = FIRST + timedelta(days=1)
    with pytest.raises(InvalidArgumentsError, match="that have passed"):
        await reports.operate("backfill", workflow="report", start=FIRST, end=end)


async def test_only_the_schedule_calls_the_function(logs: MemoryLogs) -> None:
    reports = Reports(logs)
    with pytest.raises(InvalidArgumentsError, match=r"start a run with report\.start"):
        await reports.app.functions["start-report"].body(context(logs=logs))


def wrong_overlap(flow: Flow) -> None:
    flow.workflow(schedule="* * * * *", overlap=cast("Any", "sometimes"))(fine)


def wrong_expression(flow: Flow) -> None:
    flow.workflow(schedule="soon")(fine)


def wrong_parameter(flow: Flow) -> None:
    @flow.workflow(schedule="* * * * *")
    async def needs(wf: Workflow, item: str) -> None: ...


def wrong_limit(flow: Flow) -> None:
    flow.workflow(schedule="* * * * *", concurrency=2)(fine)


async def fine(wf: Workflow) -> None: ...


@pytest.mark.parametrize(("mistake", "sentence"), [
    (wrong_limit, "decides whether its runs overlap; write overlap='concurrent'"),
    (wrong_overlap, "overlap is skip, queue or concurrent, not 'sometimes'"),
    (wrong_expression, "Workflow 'fine' has no schedule: A schedule has five fields"),
    (wrong_parameter, "give 'item' a default"),
])  # fmt: skip
async def test_a_wrong_schedule_is_refused_at_its_decorator(
    mistake: Callable[[Flow], None], sentence: str
) -> None:
    flow = Flow(App("shop"))
    with pytest.raises(FlowSettingsError, match=sentence):
        mistake(flow)
    assert not flow.definitions


async def test_a_schedule_needs_an_application(flow: Flow) -> None:
    with pytest.raises(FlowSettingsError, match="its flow needs an application"):
        flow.workflow(schedule="* * * * *")(fine)
    with pytest.raises(FlowSettingsError, match="Workflow 'fine' has no schedule; write"):
        _ = flow.workflow(fine).schedule


async def test_the_decorator_with_empty_parentheses_is_that_without(flow: Flow) -> None:
    assert flow.workflow()(fine).name == "fine"


async def test_a_context_without_a_due_time_says_none(logs: MemoryLogs) -> None:
    ctx: Context = context(logs=logs)
    assert ctx.due is None
