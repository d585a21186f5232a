"""Concurrent consumers of a process share records; a claim that no consumer got is no try."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiqueue import LeaseLostError, Queue, QueueReplica
from bokiqueue.records import CancelClaim, Claim, decode_commands, encode
from bokiqueue.shard import COMMANDS_MAX
from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.base.log import Entry
from indilog.config import ClusterConfig
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
CONSUMERS = 48


class Gated(HookedLog):
    """A log whose records of consumers wait until the test permits them, and then may fail.

    Attributes:
        fails_before: error to raise instead of an append.
        fails_after: error to raise after an append.
    """

    def __init__(self, logs: MemoryLogs | None = None) -> None:
        super().__init__("work", logs=logs)
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.reached = asyncio.Event()
        self.fails_before: Exception | None = None
        self.fails_after: Exception | None = None

    async def before_append(self, entries: Sequence[Entry]) -> None:
        self.reached.set()
        await self.go_on.wait()
        if self.fails_before is not None:
            raise self.fails_before

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if self.fails_after is not None:
            raise self.fails_after


def queue_of(log: Gated, *, tries: int = 5) -> Queue:
    return Queue(log, "mail", shards=1, tries=tries, replica=QueueReplica("mail", 1))


async def some_turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_consumers_of_a_process_share_claims_and_acknowledgements() -> None:
    log = Gated()
    queue = queue_of(log)
    for number in range(CONSUMERS):
        await queue.push(b"%d" % number)
    pushes = log.logs.position
    got: list[int] = []

    async def consume() -> None:
        delivery = await queue.take()
        assert delivery is not None
        await delivery.acknowledge()
        got.append(int(delivery.data))

    await asyncio.gather(*(consume() for _ in range(CONSUMERS)))
    assert sorted(got) == list(range(CONSUMERS))
    assert log.logs.position - pushes <= 6
    assert (await queue.stats()).depth == 0


async def test_a_record_holds_the_commands_of_a_limited_number_of_callers() -> None:
    log = Gated()
    queue = queue_of(log)
    count = COMMANDS_MAX + 10
    for _ in range(count + 1):
        await queue.push(b"x")
    log.reached.clear()
    log.go_on.clear()
    taking = [asyncio.create_task(queue.take())]
    await log.reached.wait()
    taking += [asyncio.create_task(queue.take()) for _ in range(count)]
    await some_turns()
    log.go_on.set()
    assert None not in await asyncio.gather(*taking)
    records = await log.read_range(queue.replica.tags.shards[0])
    claims = [c for r in records for c in decode_commands(r.data) if isinstance(c, Claim)]
    assert [claim.count for claim in claims] == [1, COMMANDS_MAX, 10]


async def test_a_lease_in_a_shared_record_is_the_callers_own() -> None:
    log = Gated()
    queue = queue_of(log)
    for _ in range(3):
        await queue.push(b"x")
    log.reached.clear()
    log.go_on.clear()
    taking = [asyncio.create_task(queue.take())]
    await log.reached.wait()
    taking += [asyncio.create_task(queue.take(lease=lease)) for lease in (10.0, 20.0)]
    await some_turns()
    log.go_on.set()
    held = [delivery for one in taking if (delivery := await one) is not None]
    state = queue.replica.shards[0].state
    found = [state.message(delivery.seqnum) for delivery in held]
    lengths = [round(m.until - state.clock) for m in found if m is not None and m.until is not None]
    assert lengths == [30, 10, 20]


async def test_a_record_that_is_too_large_is_split() -> None:
    log = Gated(MemoryLogs(ClusterConfig(record_bytes_max=200)))
    queue = queue_of(log)
    for _ in range(CONSUMERS):
        await queue.push(b"x")
    held = await asyncio.gather(*(queue.take() for _ in range(CONSUMERS)))
    await asyncio.gather(*(one.acknowledge() for one in held if one is not None))
    assert (await queue.stats()).depth == 0


async def test_one_late_acknowledgement_fails_no_other_of_its_record() -> None:
    log = Gated()
    queue = queue_of(log)
    for _ in range(3):
        await queue.push(b"x")
    late = await queue.take(lease=0.001)
    held = [await queue.take() for _ in range(2)]
    await asyncio.sleep(0.01)
    results = await asyncio.gather(
        *(one.acknowledge() for one in (late, *held) if one is not None), return_exceptions=True
    )
    assert [type(result) for result in results] == [LeaseLostError, type(None), type(None)]


@pytest.mark.parametrize("lands", [True, False])
async def test_a_claim_with_an_unknown_outcome_is_no_try(*, lands: bool) -> None:
    log = Gated()
    queue = queue_of(log, tries=1)
    await queue.push(b"x")
    error = AppendOutcomeUnknownError("perhaps")
    log.fails_after, log.fails_before = (error, None) if lands else (None, error)
    with pytest.raises(AppendOutcomeUnknownError):
        await queue.take(lease=3600)
    log.fails_after = log.fails_before = None
    delivery = await queue.take()
    assert delivery is not None
    assert delivery.tries == 1
    await delivery.acknowledge()


async def test_a_claim_whose_effect_cannot_be_read_is_no_try() -> None:
    class Unreadable(Gated):
        reads_to_fail = 1
        has_claim = False

        async def after_append(self, entries: Sequence[Entry]) -> None:
            commands = [c for entry in entries for c in decode_commands(entry.data)]
            self.has_claim = any(isinstance(command, Claim) for command in commands)

        async def before_read(self, read: Read) -> None:
            if self.has_claim and self.reads_to_fail:
                self.reads_to_fail -= 1
                raise NotReadyError("not now")

    queue = queue_of(Unreadable(), tries=1)
    await queue.push(b"x")
    with pytest.raises(AppendOutcomeUnknownError):
        await queue.take(lease=3600)
    other = Queue(queue.log, "mail", shards=1, replica=QueueReplica("mail", 1))
    delivery = await other.take(wait=5)
    assert delivery is not None, "the first process returns it in the background"
    assert delivery.tries == 1


async def test_a_late_claim_that_was_cancelled_gets_nothing() -> None:
    """Its append had an unknown outcome, and the record appears later."""
    log = Gated()
    queue = queue_of(log, tries=1)
    await queue.push(b"x")
    log.fails_before = AppendOutcomeUnknownError("perhaps")
    with pytest.raises(AppendOutcomeUnknownError):
        await queue.take(lease=3600)
    log.fails_before = None
    while queue.replica.shards[0]._is_returning:  # noqa: ASYNC110 - not announced
        await asyncio.sleep(0.01)
    records = await log.read_range(queue.replica.tags.shards[0])
    commands = [command for record in records for command in decode_commands(record.data)]
    (cancel,) = [command for command in commands if isinstance(command, CancelClaim)]
    await log.append(encode(Claim(1, 3600.0, cancel.attempt)), tags=[queue.replica.tags.shards[0]])
    assert await queue.take() is not None


@pytest.mark.parametrize("is_leader", [True, False])
async def test_the_message_of_a_consumer_cancelled_during_its_claim_is_delivered_as_a_first_try(
    *, is_leader: bool
) -> None:
    log = Gated()
    queue = queue_of(log, tries=1)
    for _ in range(3):
        await queue.push(b"x")
    log.reached.clear()
    log.go_on.clear()
    taking = [asyncio.create_task(queue.take(lease=3600))]
    await log.reached.wait()
    taking += [asyncio.create_task(queue.take(lease=3600)) for _ in range(2)]
    await some_turns()
    taking[0 if is_leader else 1].cancel()
    await some_turns()
    log.go_on.set()
    results = await asyncio.gather(*taking, return_exceptions=True)
    got = [one for one in results if not isinstance(one, BaseException)]
    assert len(got) == 2
    last = await queue.take(wait=5)
    assert last is not None
    assert last.tries == 1


async def test_an_acknowledgement_takes_effect_although_the_caller_of_its_record_is_cancelled() -> (
    None
):
    log = Gated()
    queue = queue_of(log)
    for _ in range(3):
        await queue.push(b"x")
    held = [one for _ in range(3) if (one := await queue.take()) is not None]
    log.reached.clear()
    log.go_on.clear()
    telling = [asyncio.create_task(held[0].acknowledge())]
    await log.reached.wait()
    telling += [asyncio.create_task(one.acknowledge()) for one in held[1:]]
    await some_turns()
    telling[0].cancel()
    await some_turns()
    log.go_on.set()
    await asyncio.gather(*telling[1:])
    assert (await queue.stats()).depth == 0


async def test_an_error_reaches_all_callers_of_the_record_and_nothing_was_done() -> None:
    log = Gated()
    queue = queue_of(log)
    for _ in range(3):
        await queue.push(b"x")
    await queue.stats()
    log.fails_before = NotReadyError("not now")
    results = await asyncio.gather(*(queue.take() for _ in range(3)), return_exceptions=True)
    assert {type(result) for result in results} == {NotReadyError}
    log.fails_before = None
    held = [await queue.take() for _ in range(3)]
    assert [one.tries for one in held if one is not None] == [1, 1, 1]
