"""Consumers' estimate of the log's time: it decides nothing, and costs little."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from bokiqueue import Queue, waiting
from bokiqueue.records import Claim, decode_commands
from bokiqueue.replica import QueueReplica
from indilog.base.ids import UserTag
from indilog.testing import MemoryLog, MemoryLogs

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

CLAIMS_MAX = 12
"""Far fewer claims than without a pause, which would be thousands a second."""


class Counting(MemoryLog):
    """A log that counts the claims appended to it."""

    claims = 0

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> int:
        self.claims += any(isinstance(command, Claim) for command in decode_commands(data))
        assert self.claims < 1000, "claims without limit"
        return await super().append(data, tags=tags)


def seconds() -> float:
    """Return the time of the event loop, which jumps to the next timer."""
    return 1.7e9 + asyncio.get_running_loop().time()


def log_with(clock: Callable[[], float]) -> Counting:
    return Counting("work", logs=MemoryLogs(clock=clock))


async def test_a_log_time_that_is_a_year_off_causes_no_extra_claim_and_no_lost_message() -> None:
    for off_s in (366 * 86_400.0, -366 * 86_400.0):
        log = log_with(lambda off_s=off_s: seconds() + off_s)  # type: ignore[misc]
        queue = Queue(log, "mail", shards=2)
        await queue.push(b"x", delay=0.3)
        assert await queue.take() is None
        assert log.claims == 0
        delivery = await queue.take(wait=20)
        assert delivery is not None
        assert log.claims <= CLAIMS_MAX
        assert await queue.take() is None


async def test_a_process_started_long_after_the_last_record_finds_due_messages() -> None:
    now = [1000.0]
    log = log_with(lambda: now[0])
    await Queue(log, "mail", shards=1).push(b"x", delay=600)
    now[0] += 601
    later = Counting("work", logs=log.logs)
    queue = Queue(later, "mail", shards=1, replica=QueueReplica("mail", 1))
    assert await queue.take() is not None


async def test_waiting_for_the_next_delay_causes_no_claim() -> None:
    log = log_with(lambda: seconds() - 60)
    queue = Queue(log, "mail", shards=1)
    await queue.push(b"x", delay=0.2)
    await queue.push(b"y", delay=0.4)
    assert await queue.take(wait=20) is not None
    log.claims = 0
    assert await queue.take() is None
    assert log.claims == 0
    assert await queue.take(wait=20) is not None


async def test_the_claim_rate_is_bounded_on_a_log_without_time() -> None:
    log = log_with(lambda: 1000.0)
    queue = Queue(log, "mail", shards=1)
    await queue.push(b"x", delay=0.001)
    assert await queue.take(wait=0.5) is None
    assert log.claims <= CLAIMS_MAX


async def test_the_next_record_corrects_an_estimate_that_is_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, monotonic = [1000.0], [0.0]
    log = log_with(lambda: now[0])
    monkeypatch.setattr(waiting, "seconds_now", lambda: monotonic[0])
    queue = Queue(log, "mail", shards=1)
    await queue.push(b"x", delay=20)
    monotonic[0] += 50  # which the log does not count
    assert await queue.take() is None
    assert log.claims == 1
    now[0] += 1
    await queue.push(b"now")
    assert await queue.take() is not None
    now[0] += 19
    monotonic[0] += 19
    delivery = await queue.take()
    assert delivery is not None
    assert delivery.data == b"x"
