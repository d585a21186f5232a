"""Clocks of consumers that are not the log's: they decide nothing, and cost little."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest

from bokiqueue import Queue, waiting
from bokiqueue import queue as queue_module
from bokiqueue.records import Claim, command_decoded
from indilog.ids import UserTag
from indilog.testing import MemoryLog, MemoryLogs

pytestmark = pytest.mark.asyncio

CLAIMS_MAX = 12
"""Far fewer than without a pause, which are thousands a second."""


class Counting(MemoryLog):
    """A log that counts the claims appended to it."""

    claims = 0

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> int:
        self.claims += isinstance(command_decoded(data), Claim)
        assert self.claims < 1000, "claims without end"
        return await super().append(data, tags=tags)


def log_with(clock: Callable[[], float]) -> Counting:
    return Counting("work", logs=MemoryLogs(clock=clock))


def set_local(clock: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "seconds_now", clock)
    monkeypatch.setattr(waiting, "seconds_now", clock)


async def test_a_local_clock_that_is_ahead_costs_a_claim_and_no_message() -> None:
    log = log_with(lambda: time.time() - 60)
    queue = Queue(log, "mail", shards=2)
    await queue.push(b"x", delay=0.3)
    assert await queue.take() is None
    assert log.claims == 1
    delivery = await queue.take(wait=20)
    assert delivery is not None
    assert log.claims <= CLAIMS_MAX
    assert await queue.take() is None


async def test_the_next_delay_costs_no_claim_when_the_clocks_are_known() -> None:
    log = log_with(lambda: time.time() - 60)
    queue = Queue(log, "mail", shards=1)
    await queue.push(b"x", delay=0.2)
    await queue.push(b"y", delay=0.4)
    assert await queue.take(wait=20) is not None
    log.claims = 0
    assert await queue.take() is None
    assert log.claims == 0
    assert await queue.take(wait=20) is not None


async def test_claims_are_bounded_in_rate_though_the_log_has_no_time() -> None:
    log = log_with(lambda: 1000.0)
    queue = Queue(log, "mail", shards=1)
    await queue.push(b"x", delay=0.001)
    assert await queue.take(wait=0.5) is None
    assert log.claims <= CLAIMS_MAX


async def test_a_local_clock_that_is_put_right_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    log = log_with(lambda: now[0])
    queue = Queue(log, "mail", shards=1)
    set_local(lambda: now[0] + 50, monkeypatch)
    await queue.push(b"x", delay=20)
    assert await queue.take() is None
    set_local(lambda: now[0], monkeypatch)
    await queue.push(b"now")
    now[0] += 1
    assert await queue.take() is not None
    now[0] += 19
    delivery = await queue.take()
    assert delivery is not None
    assert delivery.data == b"x"
