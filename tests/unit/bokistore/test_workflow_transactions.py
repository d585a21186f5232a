"""A transaction of a workflow takes effect once, however long its run is parked and whatever its
store collects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiflow import Workflow
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    PARTITIONS,
    CancelAsked,
    StepDecided,
    encode,
    partition_of,
    partition_tag,
    run_record,
    run_tag,
)
from bokistore import Store, Transaction
from bokistore.records import decode_command
from indilog import Entry
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG, begin, decided, execute, take
from tests.support.hooked_log import HookedLog
from tests.unit.bokistore.processes import Clock, newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("small_cells")]
DAY = 86_400


class DyingLog(HookedLog):
    """The log of an executor that dies before it records the outcome of an operation."""

    reached: asyncio.Event

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if any(isinstance(run_record(entry.data), StepDecided) for entry in entries):
            self.reached.set()
            await asyncio.sleep(60)


async def charge(txn: Transaction) -> int:
    """Take 5 from an account; return what is left."""
    account = await txn.get("ann")
    account.increment("balance", -5)
    return int(account["balance"])


async def test_a_run_parked_for_months_after_its_commit_is_not_charged_twice(clock: Clock) -> None:
    logs = MemoryLogs(clock=clock)
    log = logs.log(FLOW_LOG)
    store = Store(logs.log("accounts"))
    await store.set("ann", "balance", 100)
    await begin(log, "r")

    async def paying(wf: Workflow) -> int:
        return await wf.transact(store, charge)

    dying = DyingLog(FLOW_LOG, logs=logs)
    dying.reached = asyncio.Event()
    first = asyncio.create_task(execute(dying, "r", paying))
    await dying.reached.wait()
    first.cancel()
    await asyncio.wait([first])
    assert (await store.get("ann"))["balance"] == 95
    for _ in range(90):
        clock.now += DAY
        await store.increment("ann", "visits")
        await store.collect(keep=DAY, keep_ids=DAY)
    logs.drop_aux()
    await take(log, "r", "second")
    finished = await execute(log, "r", paying)
    assert (finished.result, finished.failure) == (b"95", None)
    assert (await newcomer(logs.log("accounts")).get("ann"))["balance"] == 95


async def test_ids_of_workflows_are_forgotten_after_their_outcome_is_recorded(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bokistore.records._ID_TAGS", 1)
    logs = MemoryLogs(clock=clock)
    log, accounts = logs.log(FLOW_LOG), logs.log("accounts")
    store = Store(accounts)
    await store.set("ann", "balance", 100)
    await begin(log, "r")

    async def paying(wf: Workflow) -> list[int]:
        return [await wf.transact(store, charge) for _ in range(10)]

    await execute(log, "r", paying)
    clock.now += 2 * DAY
    await store.collect()
    alive = [logs.record(seqnum) for seqnum in range(await accounts.tail())
             if not logs.is_dead(seqnum)]  # fmt: skip
    commands = [decode_command(record.data) for record in alive if record]
    left = {txn_id for command in commands if command for txn_id in command.ids}
    assert len(left) == 1, "the release of the last one waits for the next transaction"


class SlowLog(HookedLog):
    """The log of a store, whose appends wait."""

    reached: asyncio.Event
    goes_on: asyncio.Event

    async def before_append(self, entries: Sequence[Entry]) -> None:
        self.reached.set()
        await self.goes_on.wait()


async def refund(txn: Transaction) -> None:
    """Give 5 back to the account."""
    (await txn.get("ann")).increment("balance", 5)


async def cancel(logs: MemoryLogs) -> None:
    """Request the cancellation of the run, which a second executor has taken."""
    log = logs.log(FLOW_LOG)
    await take(log, "r", "second")
    tags = [run_tag("r"), partition_tag(partition_of("r", PARTITIONS))]
    await log.append(encode(CancelAsked()), tags=tags)


async def test_what_was_committed_before_a_crash_is_compensated_if_the_run_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = MemoryLogs()
    log = logs.log(FLOW_LOG)
    store = Store(logs.log("accounts"))
    released: list[str] = []
    monkeypatch.setattr(store, "release", lambda *ids: released.extend(ids))
    await store.set("ann", "balance", 100)
    await begin(log, "r")

    async def give_back() -> None:
        await store.transact(refund)

    async def paying(wf: Workflow) -> None:
        await wf.transact(store, charge)
        wf.compensate(give_back)
        await wf.sleep(3600)

    dying = DyingLog(FLOW_LOG, logs=logs)
    dying.reached = asyncio.Event()
    first = asyncio.create_task(execute(dying, "r", paying))
    await dying.reached.wait()
    assert released == [], "the outcome is not recorded yet"
    first.cancel()
    await asyncio.wait([first])
    assert (await store.get("ann"))["balance"] == 95
    await cancel(logs)
    finished = await execute(log, "r", paying)
    assert finished.was_cancelled
    assert (await store.get("ann"))["balance"] == 100
    assert len(released) == 1
    assert (await decided(logs, "r", 1))[0].kind == "transaction"


async def test_no_stalled_execution_commits_after_the_cancellation() -> None:
    logs = MemoryLogs()
    log = logs.log(FLOW_LOG)
    store = Store(logs.log("accounts"))
    await store.set("ann", "balance", 100)
    slow = SlowLog("accounts", logs=logs)
    slow.reached, slow.goes_on = asyncio.Event(), asyncio.Event()
    await begin(log, "r")

    async def paying(wf: Workflow, where: Store) -> None:
        await wf.transact(where, charge)

    first = asyncio.create_task(execute(log, "r", lambda wf: paying(wf, Store(slow))))
    await slow.reached.wait()
    await cancel(logs)
    finished = await execute(log, "r", lambda wf: paying(wf, store))
    assert finished.was_cancelled
    slow.goes_on.set()
    with pytest.raises(Stopped):
        await first
    assert (await newcomer(logs.log("accounts")).get("ann"))["balance"] == 100
    assert [step.kind for step in await decided(logs, "r", 1)] == ["cancel"]
