"""Libraries do not act on a read that lacks their own append.

The log guarantees that a session sees its own appends. If that guarantee is broken, an empty page
would mean "another executor has it", and the appended record would be lost silently.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bokiflow import Lock, Workflow
from bokiflow.runs.records import RunStarted, RunTaken, run_record
from bokiqueue import Queue
from bokiqueue.records import Claim, decode_commands
from bokistore import Replica, Store
from bokistore.decisions import CELL
from indilog.base.errors import AppendOutcomeUnknownError, OutcomeUnknownError
from indilog.base.log import Entry, Record
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = pytest.mark.asyncio

LEASE_S = 2.0
MANY = 10**6


class StaleLogs(HookedLogs):
    """Logs whose next read after an append shows the state before it, unless it is `fresh`.

    Attributes:
        stale_after: after a record of such a kind is appended, the next read that would show it
            does not.
        reads_stale: how many reads still are.
        hidden_from: such a read shows no record from here on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stale_after: tuple[type, ...] = ()
        self.reads_stale = 0
        self.hidden_from: int | None = None

    async def after_append(self, entries: Sequence[Entry]) -> None:
        decoded = [_no_record(entry.data) for entry in entries]
        decoded += [command for entry in entries for command in decode_commands(entry.data)]
        if any(isinstance(record, self.stale_after) for record in decoded):
            self.stale_after = ()
            self.hide_from_last(len(entries))

    def hide_from_last(self, count: int) -> None:
        """Hide the last records from the next read."""
        self.hidden_from, self.reads_stale = self.position - count, 1

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        hidden_from = self.hidden_from
        if hidden_from is None or not self.reads_stale or read.fresh:
            return records
        shown = [record for record in records if record.seqnum < hidden_from]
        self.reads_stale -= len(shown) < len(records)
        return shown


def _no_record(data: bytes) -> object:
    try:
        return run_record(data)
    except Exception:  # noqa: BLE001 - it is of another library
        return None


class Process(ShopProcess):
    """A process with a workflow of one step."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.one = self.flow.workflow(_one)

        @self.flow.workflow
        async def waits(wf: Workflow) -> None:
            await wf.signal("never")

        self.waits = waits


async def _one(wf: Workflow) -> str:
    async def step() -> str:
        return "done"

    return await wf.step(step)


async def test_a_run_is_executed_although_its_new_owner_did_not_see_the_takeover() -> None:
    """Otherwise each process would assume that another one executes the run."""
    logs = StaleLogs()
    dead, other = Process(logs), Process(logs)
    await dead.one.start(id="r")
    await dead.stop()
    await other.waits.start()  # so this process has a heartbeat, and no other takes its runs
    logs.stale_after = (RunTaken,)
    async with other.driven():
        assert await other.one.handle("r").result(60) == "done"
    assert not logs.reads_stale
    assert not logs.stale_after


async def test_a_run_is_executed_although_its_starter_did_not_see_the_start() -> None:
    logs = StaleLogs()
    process = Process(logs)
    await process.waits.start()
    logs.stale_after = (RunStarted,)
    with pytest.raises(OutcomeUnknownError, match="the same session had appended"):
        await process.one.start(id="r")
    assert await process.one.handle("r").result(60) == "done"
    await process.stop()


async def test_a_lock_that_does_not_see_its_own_command_raises() -> None:
    logs = StaleLogs()
    log = logs.log("work")
    async with Lock(log, "x"):
        pass
    lock = Lock(log, "x")
    original = logs.after_append

    async def hide(entries: Sequence[Entry]) -> None:
        await original(entries)
        logs.hide_from_last(len(entries))
        logs.after_append = original  # type: ignore[method-assign]

    logs.after_append = hide  # type: ignore[method-assign]
    with pytest.raises(AppendOutcomeUnknownError, match="same session"):
        await lock.acquire()


async def test_a_claim_that_a_stale_read_hides_is_cancelled() -> None:
    logs = StaleLogs()
    queue = Queue(logs.log("work"), "mail", shards=1)
    await queue.push(b"x")
    logs.stale_after = (Claim,)
    with pytest.raises(AppendOutcomeUnknownError, match="same session"):
        await queue.take(lease=600)
    delivery = await queue.take(lease=600)
    assert delivery is not None
    assert delivery.tries == 1
    await delivery.acknowledge()
    assert (await queue.stats()).depth == 0
    assert not logs.reads_stale


async def test_a_claim_that_no_read_shows_is_an_error() -> None:
    class Blind(StaleLogs):
        async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
            hidden_from = self.hidden_from
            return [r for r in records if hidden_from is None or r.seqnum < hidden_from]

    logs = Blind()
    queue = Queue(logs.log("work"), "mail", shards=1)
    await queue.push(b"x")
    logs.stale_after = (Claim,)
    with pytest.raises(AppendOutcomeUnknownError, match="same session"):
        await queue.take()


async def test_a_replica_applies_its_own_command_or_stays_before_it() -> None:
    logs = StaleLogs()
    log, applied = logs.log("work"), list[bytes]()
    replica = Replica(log, applied.append, snapshot=bytes, restore=lambda _: None)
    await replica.propose(b"one")
    original = logs.after_append

    async def hide(entries: Sequence[Entry]) -> None:
        logs.hide_from_last(len(entries))
        logs.after_append = original  # type: ignore[method-assign]

    logs.after_append = hide  # type: ignore[method-assign]
    with pytest.raises(AppendOutcomeUnknownError, match="same session"):
        await replica.propose(b"two")
    await replica.propose(b"three")
    assert applied == [b"one", b"two", b"three"]


async def test_a_collection_that_sees_none_of_its_own_records_frees_no_more() -> None:
    """The collection takes the time from `Log.now()`, not from a record of its own."""
    logs = StaleLogs()
    store = Store(logs.log("work"))
    for _ in range(CELL + 20):
        await store.increment("a", "n")
    own_from, ends = logs.position, []
    for _ in range(2):
        logs.hidden_from, logs.reads_stale = own_from, MANY
        ends.append(await store.collect(keep=0.0))
        assert logs.reads_stale < MANY, "one of its reads would have shown what it appended"
        logs.hidden_from = None
        assert (await Store(logs.log("work")).get("a"))["n"] == CELL + 20
    assert ends == [CELL, CELL]
