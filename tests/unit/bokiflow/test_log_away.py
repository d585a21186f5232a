"""A call of the library while the log is full or unavailable raises that, never `Stopped`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from bokiflow import Flow, Handle, Startable, State, Workflow
from bokiflow.runs import waiting
from bokiflow.runs.records import PARTITIONS
from bokiflow.runs.run_log import PATIENCE_TRIES
from indilog.base.errors import (
    AppendOutcomeUnknownError,
    DiskFullError,
    IndilogError,
    NotReadyError,
    OutcomeUnknownError,
    QuorumUnavailableError,
)
from indilog.base.log import Entry
from tests.support.hooked_log import HookedLogs, Read

pytestmark = pytest.mark.asyncio


class FailingLogs(HookedLogs):
    """Logs that fail as a test says.

    Attributes:
        of_appends: what the next appends say.
        is_for_ever: whether the last of these is what all further ones say.
        of_reads: what each read of several records says.
        tries: how many appends failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_appends: list[IndilogError] = []
        self.of_reads: IndilogError | None = None
        self.tries = 0
        self.is_for_ever = True

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if self.of_appends:
            self.tries += 1
            is_last = len(self.of_appends) == 1 and self.is_for_ever
            raise self.of_appends[0] if is_last else self.of_appends.pop(0)

    async def before_read(self, read: Read) -> None:
        if self.of_reads is not None and read.is_page:
            raise self.of_reads


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "pause", lambda s: asyncio.sleep(s / 1000))


@pytest.fixture
def logs() -> FailingLogs:
    return FailingLogs()


class Shop:
    """A flow with a run `done` and one that `waits`, of which another process executes nothing."""

    def __init__(self, logs: FailingLogs) -> None:
        self.flow, self.logs = Flow("shop"), logs
        self.flow.attach(logs)
        self.wait: Startable[str] = self.flow.workflow(wait)

    async def begin(self) -> None:
        await self.flow.runner.join(self.logs, range(PARTITIONS))
        await self.wait.start("no", id="done")
        await self.wait.start("yes", id="waits")
        await self.handle("done").result(10)

    def handle(self, run: str = "waits") -> Handle[str]:
        return self.wait.handle(run)

    async def drive(self) -> None:
        """Begin to drive, and leave."""
        driving = asyncio.create_task(self.flow.drive(self.logs))
        await asyncio.sleep(0.01)
        driving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driving


async def wait(wf: Workflow, how: str) -> str:
    def step() -> str:
        return how

    how = await wf.step(step)
    return how if how == "no" else str(await wf.signal("go"))


Call = Callable[[Shop], Awaitable[object]]
APPENDING: dict[str, Call] = {
    "start": lambda shop: shop.wait.start("no"),
    "start with an id": lambda shop: shop.wait.start("no", id="new"),
    "fork": lambda shop: shop.flow.fork("done", "step"),
    "signal": lambda shop: shop.handle().signal("go"),
    "cancel": lambda shop: shop.handle().cancel(),
}
READING: dict[str, Call] = {
    "status": lambda shop: shop.handle().status(),
    "result": lambda shop: shop.handle("done").result(1),
    "runs": lambda shop: shop.flow.runs(),
}


@pytest.mark.parametrize("name", APPENDING)
async def test_a_full_disk_is_reported_at_once(logs: FailingLogs, name: str) -> None:
    shop = Shop(logs)
    await shop.begin()
    logs.of_appends = [DiskFullError("There is no room.")]
    with pytest.raises(DiskFullError, match="There is no room") as reported:
        await APPENDING[name](shop)
    assert reported.value.retryable
    assert logs.tries == 1
    logs.of_appends = []
    await APPENDING[name](shop)


async def test_a_start_refused_for_a_full_disk_keeps_no_executor_busy(logs: FailingLogs) -> None:
    shop = Shop(logs)
    logs.of_appends = [DiskFullError("There is no room.")]
    for _ in range(3):
        with pytest.raises(DiskFullError):
            await shop.wait.start("no")
    assert not shop.flow.runner._has_work()


@pytest.mark.parametrize("name", APPENDING)
async def test_an_unavailable_log_is_waited_for_then_reported(logs: FailingLogs, name: str) -> None:
    shop = Shop(logs)
    await shop.begin()
    logs.of_appends = [QuorumUnavailableError("no node answers"), NotReadyError("it begins")]
    with pytest.raises(NotReadyError, match="it begins"):
        await APPENDING[name](shop)
    assert logs.tries >= PATIENCE_TRIES


@pytest.mark.parametrize("last", [NotReadyError("it begins"), DiskFullError("There is no room.")])
@pytest.mark.parametrize("name", APPENDING)
async def test_one_attempt_of_unknown_outcome_is_reported_for_any_other_errors(
    logs: FailingLogs, name: str, last: IndilogError
) -> None:
    shop = Shop(logs)
    await shop.begin()
    logs.of_appends = [AppendOutcomeUnknownError("no answer"), last]
    with pytest.raises(AppendOutcomeUnknownError, match="no answer"):
        await APPENDING[name](shop)


@pytest.mark.parametrize("name", ["start with an id", "fork"])
async def test_a_durable_start_that_could_not_be_read_is_not_reported_as_undone(
    logs: FailingLogs, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shop = Shop(logs)
    await shop.begin()
    before = len(await shop.flow.runs())

    async def away(_: object) -> None:
        logs.of_reads = NotReadyError("it begins")

    with monkeypatch.context() as patch:
        patch.setattr(logs, "after_append", away)
        with pytest.raises(OutcomeUnknownError, match=r"at least in part\. Then: it begins"):
            await APPENDING[name](shop)
    logs.of_reads = None
    assert len(await shop.flow.runs()) == before + 1


@pytest.mark.parametrize("name", APPENDING | READING)
async def test_failed_reads_are_reported_unchanged(logs: FailingLogs, name: str) -> None:
    shop = Shop(logs)
    await shop.begin()
    logs.of_appends, logs.of_reads = [NotReadyError("away")], NotReadyError("away")
    with pytest.raises(NotReadyError, match="away"):
        await (APPENDING | READING)[name](shop)


async def test_reads_work_while_the_disk_is_full(logs: FailingLogs) -> None:
    shop = Shop(logs)
    await shop.begin()
    logs.of_appends = [DiskFullError("There is no room.")]
    assert (await shop.handle().status()).state is State.RUNNING
    assert await shop.handle("done").result(1) == "no"
    assert len(await shop.flow.runs()) == 2


@pytest.mark.parametrize("error", [NotReadyError("away"), DiskFullError("There is no room.")])
async def test_a_driver_leaves_while_the_log_is_away(
    logs: FailingLogs, error: IndilogError
) -> None:
    shop = Shop(logs)
    logs.of_appends = [error]
    await shop.drive()


async def test_an_execution_that_a_call_began_waits_as_long_as_any_other(logs: FailingLogs) -> None:
    shop = Shop(logs)
    handle = await shop.wait.start("no")
    full: IndilogError = DiskFullError("There is no room.")
    logs.of_appends = [full] * 3
    logs.is_for_ever = False
    assert await handle.result(10) == "no"
    assert logs.tries == 3
    assert (await handle.status()).epoch == 1, "it was not broken off"
