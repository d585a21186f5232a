"""When a process continues under another name, and how it reads the heartbeats of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import Startable, Workflow
from bokiflow.runs import waiting
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    RUNS_TAG,
    CancelAsked,
    ExecutorDead,
    ExecutorLeft,
    Heartbeat,
    RunFinished,
    RunStarted,
    encode,
    executor_record,
    executor_tag,
    run_tag,
)
from bokiflow.runs.run_log import PATIENCE_TRIES
from indilog.base.errors import AppendOutcomeUnknownError, DataLossError, TrimmedError
from indilog.base.log import Entry
from indilog.testing import MemoryLogs
from tests.support.damaged_log import DamagedView
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = pytest.mark.asyncio

LEASE_S = 60.0


class Process(ShopProcess):
    """A process with a workflow that waits for a signal."""

    def __init__(self, logs: MemoryLogs | DamagedView, lease_s: float = LEASE_S) -> None:
        super().__init__(logs, lease_s)
        self.waits: Startable[str] = self.flow.workflow(self._waits)

    async def _waits(self, wf: Workflow) -> str:
        return str(await wf.signal("go"))

    _waits.__name__ = "waits"


def of_executors(*records: Heartbeat | ExecutorDead | ExecutorLeft) -> list[Entry]:
    return [Entry(encode(record), (EXECUTORS_TAG,)) for record in records]


@pytest.mark.parametrize(
    ("is_done", "is_lost"),
    [(False, False), (True, False), (True, True)],
    ids=["at work", "done", "not known, and done"],
)
async def test_a_name_that_had_a_new_owner_is_not_used_again(is_done: bool, is_lost: bool) -> None:
    """Else its bearer would be sure of runs that are others'."""
    logs = MemoryLogs()
    view = DamagedView(logs)
    log, process = logs.log(FLOW_LOG), Process(view)
    await process.waits.start(id="r")
    name = process.name
    said = of_executors(
        ExecutorDead(name, "new_owner", await log.tail()), ExecutorLeft(name, is_idle=True)
    )
    dead = (await log.append_batch(said if is_done else said[:1]))[0]
    if is_lost:
        view.lost.add(dead)
    await process.flow.runner._renew(view.log(FLOW_LOG))
    assert process.name != name
    assert not process.flow.runner.lease.is_sure()
    process.kill()


async def test_records_about_other_executors_cost_no_name() -> None:
    logs = MemoryLogs()
    log, process = logs.log(FLOW_LOG), Process(logs)
    await process.waits.start(id="r")
    name, tail = process.name, await log.tail()
    await log.append_batch(
        of_executors(Heartbeat("other", LEASE_S), ExecutorLeft("other", is_idle=False))
    )
    await log.append_batch(
        of_executors(ExecutorDead("other", name, tail + 2), ExecutorDead(name, "late", 0))
    )
    await process.flow.runner._renew(log)
    assert process.name == name
    assert process.flow.runner.lease.is_sure()
    process.kill()


class TwoMeet(DamagedView):
    """Logs whose reads wait until both looks have begun."""

    async def before_read(self, read: Read) -> None:
        await asyncio.sleep(0)


async def test_two_looks_that_meet_one_loss_both_read_on() -> None:
    logs = MemoryLogs()
    view = TwoMeet(logs)
    process = Process(view)
    lost, _ = await logs.log(FLOW_LOG).append_batch(
        of_executors(Heartbeat("a", LEASE_S), Heartbeat("b", LEASE_S))
    )
    view.lost.add(lost)
    log = view.log(FLOW_LOG)
    await asyncio.gather(*(process.flow.runner.look(log) for _ in range(2)))
    assert list(process.flow.runner.executors.known) == ["b"]


async def test_a_loss_without_a_known_end_is_raised() -> None:
    class Endless(HookedLogs):
        async def before_read(self, read: Read) -> None:
            raise DataLossError("Lost.")

    logs = Endless()
    with pytest.raises(DataLossError):
        await Process(logs).flow.runner.look(logs.log(FLOW_LOG))


class NoAnswer(HookedLogs):
    """Logs that do not answer the first `dead` of one process, as often as it tries.

    Attributes:
        reads: by tag or not, but not those that wait.
        has_given_up: set when it has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.tries = 0
        self.has_given_up = asyncio.Event()

    async def before_read(self, read: Read) -> None:
        self.reads += 1

    async def after_append(self, entries: Sequence[Entry]) -> None:
        is_dead = any(isinstance(executor_record(entry.data), ExecutorDead) for entry in entries)
        if is_dead and self.tries < PATIENCE_TRIES:
            self.tries += 1
            if self.tries == PATIENCE_TRIES:
                self.has_given_up.set()
            raise AppendOutcomeUnknownError("It has no answer.")


async def test_a_name_announced_without_an_answer_is_dropped_when_its_lease_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its driver would look forever whether it has left anything, without a pause."""
    monkeypatch.setattr("bokiflow.runs.run_log._PAUSE_S_MAX", 0.01)
    logs = NoAnswer()
    log, process = MemoryLogs.log(logs, FLOW_LOG), Process(logs, 0.2)
    start = RunStarted("waits", b"{}", "dead", "version")
    tags = (run_tag("r"), RUNS_TAG, executor_tag("dead"))
    await log.append_batch([*of_executors(Heartbeat("dead", 0.2)), Entry(encode(start), tags)])
    runner = process.flow.runner
    async with process.driven():
        await logs.has_given_up.wait()
        name, tail = process.name, await log.tail()
        await log.append_batch(
            [
                *of_executors(Heartbeat("new_owner", 0.2), ExecutorDead("dead", "new_owner", tail)),
                Entry(encode(RunFinished(1, b'"x"')), tags),
                *of_executors(
                    ExecutorLeft("dead", is_idle=True), ExecutorLeft("new_owner", is_idle=True)
                ),
            ]
        )
        async with asyncio.timeout(10):
            while name in runner.executors.known or not runner.executors.end > tail:
                await waiting.pause(0.01)
        assert process.name != name


async def test_a_process_that_starts_after_trims_knows_the_dead_and_their_new_owners() -> None:
    """No other executor may be left that knows."""
    logs = MemoryLogs()
    log, lives, late = logs.log(FLOW_LOG), Process(logs), Process(logs)
    await log.append_batch(of_executors(ExecutorLeft("forgotten", is_idle=True)))
    await log.append_batch(of_executors(Heartbeat("dead", LEASE_S), Heartbeat("silent", LEASE_S)))
    await log.append_batch(of_executors(ExecutorDead("dead", "new_owner", 3)))
    await lives.waits.start(id="r")
    await trims(lives)
    assert (await log.read_range(EXECUTORS_TAG, 1))[0].seqnum == 1
    with pytest.raises(TrimmedError):
        await log.read_range(EXECUTORS_TAG)
    await late.flow.runner.look(log)
    executors = late.flow.runner.executors
    assert executors.known.keys() == {"dead", "silent", lives.name}
    assert executors.left_to("new_owner") == ["dead"]
    lives.kill()


async def test_records_that_others_may_not_have_read_are_not_trimmed() -> None:
    logs = MemoryLogs()
    log, lives = logs.log(FLOW_LOG), Process(logs)
    await lives.waits.start(id="r")
    await trims(lives, once=True)
    assert (await log.read_range(EXECUTORS_TAG))[0].seqnum == 0, "other processes begin there"
    await trims(lives)
    unread = await log.append(encode(CancelAsked()), tags=[EXECUTORS_TAG])
    await trims(lives, once=True)
    await lives.flow.runner._renew(log)
    assert (await log.read_range(EXECUTORS_TAG, unread))[0].seqnum == unread
    await trims(lives)
    with pytest.raises(TrimmedError):
        await log.read_range(EXECUTORS_TAG, unread)
    lives.kill()


async def trims(process: Process, *, once: bool = False) -> None:
    """It reads what is new, shows that it lives and trims what it may: the second time, all that it
    had read before the first.
    """
    runner, log = process.flow.runner, process.logs.log(FLOW_LOG)
    for _ in range(1 if once else 2):
        await runner._renew(log)
        runner._beats_since_trim = 1000
        await runner._trim(log)
