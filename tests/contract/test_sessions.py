"""The guarantees of every kind of log to concurrent sessions (PITFALLS A1). After each operation a
session sees its effect or result, despite concurrent writes of other sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from indilog.base.errors import TrimmedError
from indilog.base.log import Entry, Log, LogSource, Session
from indilog.base.retention import Retention
from tests.contract.reading import all_of

pytestmark = pytest.mark.asyncio

PEOPLE = 5
ROUNDS = 4
NOISE_MAX = 500
"""Maximum number of batches that an unrelated session appends concurrently."""

_WrittenT = TypeVar("_WrittenT")
Act = Callable[[Log, int], Awaitable[None]]


@pytest.fixture
def among_others(session_of: Callable[[], Log]) -> Callable[[Act], Awaitable[None]]:
    """Run the same act in several sessions at once, round by round, while other sessions append."""

    async def run(act: Act) -> None:
        async def person(number: int) -> None:
            log = session_of()
            for _ in range(ROUNDS):
                await act(log, number)

        async def noise(number: int) -> None:
            log = session_of()
            for _ in range(NOISE_MAX):
                await log.append_batch([Entry(b"noise", tags=[f"noise{number}"])] * 3)
                await asyncio.sleep(0)
                if over.is_set():  # a cancelled append may appear in the next test
                    return

        over = asyncio.Event()
        others = [asyncio.create_task(noise(number)) for number in range(2)]
        try:
            async with asyncio.timeout(240):
                await asyncio.gather(*[person(number) for number in range(PEOPLE)])
        finally:
            over.set()
            await asyncio.gather(*others, return_exceptions=True)

    return run


async def test_a_write_of_a_session_advances_its_position(logs: LogSource, name: str) -> None:
    """Another session that takes this position, on any node, then sees the write."""

    async def act(mine: Session) -> None:
        log = logs.log(name, mine)
        await _moves(mine, log.append(b"x", tags=["t"]))
        _, last = await _moves(mine, log.append_batch([Entry(b"x", tags=["t"])] * 2))
        child = logs.log(name, Session(mine.position))
        assert await child.read_next("t", last) is not None
        await _moves(mine, logs.log(name, mine).set_retention(age_s=86_400.0))

    await asyncio.gather(*[act(Session()) for _ in range(PEOPLE)])


async def _moves(session: Session, written: Awaitable[_WrittenT]) -> _WrittenT:
    before = session.position
    value = await written
    assert session.position > before
    return value


async def _sees(log: Log, tag: str, seqnum: int) -> None:
    """Check that every read shows the record at `seqnum`, the last one with `tag`."""
    found = [
        await log.read_next(tag, seqnum),
        await log.read_prev(tag),
        await log.read(seqnum),
        await log.read_next(bound=seqnum),
        *(await log.read_range(tag, seqnum)),
    ]
    assert [record and record.seqnum for record in found] == [seqnum] * 5


async def test_a_session_sees_its_own_appends(
    among_others: Callable[[Act], Awaitable[None]],
) -> None:
    async def act(log: Log, number: int) -> None:
        tag = f"own{number}"
        await _sees(log, tag, await log.append(b"x", tags=[tag]))

    await among_others(act)


async def test_a_session_sees_the_batch_that_it_appended(
    among_others: Callable[[Act], Awaitable[None]],
) -> None:
    async def act(log: Log, number: int) -> None:
        tag = f"own{number}"
        before = len(await all_of(log, tag))
        seqnums = await log.append_batch([Entry(b"x", tags=[tag])] * 4)
        page = await log.read_range(tag, seqnums[0])
        assert [record.seqnum for record in page] == seqnums
        await _sees(log, tag, seqnums[-1])
        assert len(await all_of(log, tag)) == before + 4

    await among_others(act)


async def test_a_session_never_returns_to_a_state_before_its_last_read(
    among_others: Callable[[Act], Awaitable[None]], session_of: Callable[[], Log]
) -> None:
    readers = [session_of() for _ in range(PEOPLE)]

    async def act(log: Log, number: int) -> None:
        await log.append(b"x", tags=["shared"])
        reader = readers[number]
        for read in (reader.read_prev("shared"), reader.read_next(), reader.read_prev(fresh=True)):
            if (seen := await read) is None:
                continue
            assert await reader.read(seen.seqnum) is not None
            for tag in (None, *seen.tags):
                again = await reader.read_prev(tag)
                assert again is not None
                assert again.seqnum >= seen.seqnum
                page = await reader.read_range(tag, seen.seqnum, limit=1)
                assert [record.seqnum for record in page] == [seen.seqnum]

    await among_others(act)


async def test_after_a_tail_a_session_sees_all_records_below_it(
    among_others: Callable[[Act], Awaitable[None]], session_of: Callable[[], Log]
) -> None:
    async def act(log: Log, number: int) -> None:
        tag = f"tail{number}"
        seqnum = await log.append(b"x", tags=[tag])
        other = session_of()
        assert await other.tail() > seqnum
        await _sees(other, tag, seqnum)

    await among_others(act)


async def test_find_time_in_a_session_returns_no_seqnum_below_its_own_earlier_append(
    among_others: Callable[[Act], Awaitable[None]],
) -> None:
    async def act(log: Log, number: int) -> None:
        seqnums = await log.append_batch([Entry(b"x", tags=[f"own{number}"])] * 2)
        found = await log.find_time(time.time() + 3600)
        assert found > seqnums[-1]
        below = await log.read_prev(bound=found - 1)
        assert below is not None
        assert below.seqnum >= seqnums[-1]

    await among_others(act)


async def test_a_session_gets_a_trimmed_error_after_its_own_trim(
    among_others: Callable[[Act], Awaitable[None]],
) -> None:
    async def act(log: Log, number: int) -> None:
        tag = f"own{number}"
        seqnums = await log.append_batch([Entry(b"x", tags=[tag])] * 2)
        await log.trim(seqnums[1], tag=tag)
        for read in (log.read_next(tag, seqnums[0]), log.read_range(tag, seqnums[0])):
            with pytest.raises(TrimmedError) as raised:
                await read
            assert raised.value.first_seqnum == seqnums[1]
        await _sees(log, tag, seqnums[1])

    await among_others(act)


async def test_a_session_sees_the_aux_data_that_it_set(
    among_others: Callable[[Act], Awaitable[None]],
) -> None:
    async def act(log: Log, number: int) -> None:
        tag = f"own{number}"
        seqnum = await log.append(b"x", tags=[tag])
        aux = b"aux of %d" % seqnum
        await log.set_aux(seqnum, aux)
        for record in (await log.read(seqnum), await log.read_prev(tag)):
            assert record is not None
            assert record.aux == aux

    await among_others(act)


async def test_a_session_sees_the_policy_that_it_set(
    among_others: Callable[[Act], Awaitable[None]], logs: LogSource, name: str
) -> None:
    rounds = iter(range(1, PEOPLE * ROUNDS + 1))

    async def act(_: Log, number: int) -> None:
        mine = logs.log(f"{name}/{number}", Session())
        age_s = 86_400.0 + next(rounds)
        await mine.set_retention(age_s=age_s)
        assert await mine.retention() == Retention(age_s=age_s)

    await among_others(act)
