"""When the owner of a session stops relying on it, by a clock that the tests move."""

from __future__ import annotations

import asyncio

import pytest

from indilog.base.errors import QuorumUnavailableError
from indilog.runtime.metadata import session as session_module
from indilog.runtime.metadata.session import HeartbeatSession
from indilog.runtime.metadata.store import Conflict, Deleted, SessionExpiredError, Write, Written

pytestmark = pytest.mark.asyncio


class Session(HeartbeatSession):
    """A session of a store that answers what the test says."""

    def __init__(self, ttl_s: float) -> None:
        super().__init__(ttl_s)
        self.answer: bool | None = True
        self.heartbeat_sent = asyncio.Event()
        self.ended = asyncio.Event()
        self.written: asyncio.Future[Written] = asyncio.get_running_loop().create_future()

    async def _heartbeat(self) -> bool:
        self.heartbeat_sent.set()
        if self.answer is None:
            raise QuorumUnavailableError("away")
        return self.answer

    async def _write(self, write: Write) -> Written | Conflict:
        return await self.written

    async def _delete(self, key: str, expected_version: int) -> Deleted | Conflict:
        return Deleted()

    async def _end(self) -> None:
        assert not self.ended.is_set(), "it ends once"
        self.ended.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the session's clock, which only the test moves."""
    now = [1000.0]
    monkeypatch.setattr(session_module, "boot_time_s", lambda: now[0])
    return now


async def test_the_first_use_after_a_pause_raises_before_any_timer_or_heartbeat_has_run(
    clock: list[float],
) -> None:
    session = Session(9.0)
    session.begin(clock[0])
    clock[0] += 5.9
    session.check()
    clock[0] += 0.1  # two thirds of 9 s
    with pytest.raises(SessionExpiredError, match="is over"):
        session.check()
    assert not session.heartbeat_sent.is_set()
    clock[0] -= 6.0
    with pytest.raises(SessionExpiredError, match="is over"):
        session.check()  # the end is permanent
    await session.wait_until_expired()
    await session.close()
    assert session.ended.is_set()


async def test_a_heartbeat_counts_from_when_it_was_sent(clock: list[float]) -> None:
    session = Session(9.0)

    answered = asyncio.Event()

    async def slow() -> bool:
        if answered.is_set():
            await asyncio.Event().wait()
        clock[0] += 2.0
        answered.set()
        return True

    session._heartbeat = slow  # type: ignore[method-assign]
    session.begin(clock[0] - 3.0)
    await answered.wait()
    await asyncio.sleep(0)
    clock[0] = 1005.9
    session.check()
    clock[0] = 1006.0
    with pytest.raises(SessionExpiredError):
        session.check()
    await session.close()


async def test_a_session_that_the_store_does_not_know_is_over(clock: list[float]) -> None:
    session = Session(9.0)
    session.answer = False
    session.begin(clock[0])
    await session.wait_until_expired()
    with pytest.raises(SessionExpiredError):
        session.check()
    await session.close()


async def test_a_session_that_expires_is_ended_in_the_store_too(clock: list[float]) -> None:
    """Otherwise heartbeats of a library below would keep its keys."""
    session = Session(9.0)
    session.answer = None
    session.begin(clock[0])
    await session.heartbeat_sent.wait()
    session.expire("a test")
    await session.ended.wait()
    await session.close()


async def test_a_write_that_waits_raises_at_the_moment_at_which_its_session_ends(
    clock: list[float],
) -> None:
    session = Session(9.0)
    session.begin(clock[0])
    writing = asyncio.create_task(session.create("leader", b""))
    await session.heartbeat_sent.wait()
    assert not writing.done()
    session.expire("a test")
    with pytest.raises(SessionExpiredError):
        await writing
    assert session.written.cancelled()
    await session.close()


async def test_a_write_that_is_answered_after_the_end_does_not_pass_for_a_success(
    clock: list[float],
) -> None:
    session = Session(9.0)
    session.answer = None
    session.begin(clock[0])
    writing = asyncio.create_task(session.create("leader", b""))
    await session.heartbeat_sent.wait()
    clock[0] += 6.0
    session.written.set_result(Written(1))
    with pytest.raises(SessionExpiredError):
        await writing
    await session.close()
