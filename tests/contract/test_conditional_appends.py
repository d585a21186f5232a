"""Appends with a condition (`After`), for every kind of log: of two with the same condition, one is
done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from indilog.base.errors import ConditionFailedError, InvalidTagError, TooLargeError, TrimmedError
from indilog.base.log import After, Entry, Log, LogSource, Session
from tests.contract.reading import all_of, data_of

pytestmark = pytest.mark.asyncio

MINE = [Entry(b"mine", ["t", "other"])]


async def test_the_first_append_with_a_tag_names_no_record(log: Log) -> None:
    (first,) = await log.append_batch(MINE, after=After("t"))
    with pytest.raises(ConditionFailedError, match="nothing was appended") as refused:
        await log.append_batch(MINE, after=After("t"))
    assert refused.value.last_seqnum == first
    assert not refused.value.retryable
    assert data_of(await all_of(log, "t")) == [b"mine"]


async def test_an_append_follows_the_last_record_that_it_names(log: Log) -> None:
    await log.append_batch([Entry(b"0", [7])], after=After(7))
    await log.append(b"of another tag", tags=["7", 8])
    last = await log.read_prev(7)
    assert last is not None
    seqnums = await log.append_batch([Entry(b"1"), Entry(b"2", [7])], after=After(7, last.seqnum))
    assert seqnums == [seqnums[0], seqnums[0] + 1]
    with pytest.raises(ConditionFailedError) as refused:
        await log.append_batch([Entry(b"3", [7])], after=After(7, last.seqnum))
    assert refused.value.last_seqnum == seqnums[1]
    assert data_of(await all_of(log, 7)) == [b"0", b"2"]


async def test_a_tag_of_another_log_does_not_count(logs: LogSource, name: str) -> None:
    mine, other = (logs.log(f"{name}.{n}"[-100:], Session()) for n in range(2))
    await other.append(b"x", tags=["t"])
    await mine.append_batch(MINE, after=After("t"))


async def test_an_acknowledged_append_without_a_condition_is_seen(
    session_of: Callable[[], Log],
) -> None:
    seqnum = await session_of().append(b"x", tags=["t"])
    with pytest.raises(ConditionFailedError) as refused:
        await session_of().append_batch(MINE, after=After("t"))
    assert refused.value.last_seqnum == seqnum


async def test_a_refused_append_shows_its_session_the_record_that_contradicts(
    session_of: Callable[[], Log],
) -> None:
    await session_of().append(b"x", tags=["t"])
    log = session_of()
    with pytest.raises(ConditionFailedError) as refused:
        await log.append_batch(MINE, after=After("t"))
    last = await log.read_prev("t")
    assert last is not None
    assert last.seqnum == refused.value.last_seqnum


async def test_an_append_is_visible_to_its_session(log: Log) -> None:
    for number in range(20):
        last = await log.read_prev("t")
        known = None if last is None else last.seqnum
        await log.append_batch([Entry(b"%d" % number, ["t"])], after=After("t", known))
    assert data_of(await all_of(log, "t")) == [b"%d" % number for number in range(20)]


async def test_of_many_at_once_one_is_done_each_time(session_of: Callable[[], Log]) -> None:
    """Each session appends the number after the greatest one: none is left out, none is twice."""

    async def count(log: Log, until: int) -> None:
        while True:
            last = await log.read_prev("t")
            number = 0 if last is None else int(last.data) + 1
            if number == until:
                return
            after = After("t", None if last is None else last.seqnum)
            try:
                await log.append_batch([Entry(b"%d" % number, ["t"])], after=after)
            except ConditionFailedError:
                continue

    await asyncio.gather(*(count(session_of(), 30) for _ in range(8)))
    assert data_of(await all_of(session_of(), "t")) == [b"%d" % number for number in range(30)]


async def test_many_tags_do_not_wait_for_each_other(log: Log) -> None:
    tags = [f"t{number}" for number in range(100)]
    appends = (log.append_batch([Entry(b"x", [tag])], after=After(tag)) for tag in tags)
    seqnums = await asyncio.gather(*appends)
    assert len({seqnum for (seqnum,) in seqnums}) == 100


async def test_trimmed_records_may_contradict_a_condition(log: Log) -> None:
    first = await log.append(b"x", tags=["t"])
    second = await log.append(b"y", tags=["t"])
    await log.trim(second + 1)
    with pytest.raises(TrimmedError) as refused:
        await log.append_batch(MINE, after=After("t", first))
    assert refused.value.first_seqnum == second + 1
    with pytest.raises(TrimmedError):
        await log.append_batch(MINE, after=After("t"))
    await log.append_batch(MINE, after=After("t", second))


async def test_a_tag_that_was_trimmed_alone_counts_as_well(log: Log) -> None:
    first = await log.append(b"x", tags=["t"])
    await log.trim(first + 1, tag="t")
    with pytest.raises(TrimmedError):
        await log.append_batch(MINE, after=After("t"))
    (second,) = await log.append_batch(MINE, after=After("t", first))
    with pytest.raises(ConditionFailedError) as refused:
        await log.append_batch(MINE, after=After("t", first))
    assert refused.value.last_seqnum == second


async def test_a_batch_that_cannot_contradict_the_next_one_is_refused(log: Log) -> None:
    for entries in ([], [Entry(b"x", ["u"])], [Entry(b"x", [7])]):
        with pytest.raises(ValueError, match="the condition's tag 't'"):
            await log.append_batch(entries, after=After("t"))
    with pytest.raises(ValueError, match="condition's tag '7'"):
        await log.append_batch([Entry(b"x", [7])], after=After("7"))


async def test_a_bad_condition_is_refused(log: Log) -> None:
    with pytest.raises(InvalidTagError):
        await log.append_batch(MINE, after=After(""))
    with pytest.raises(ValueError, match="seqnum"):
        await log.append_batch(MINE, after=After("t", -1))


async def test_the_limits_of_a_batch_hold(log: Log) -> None:
    with pytest.raises(TooLargeError):
        await log.append_batch([Entry(bytes(2**24), ["t"])], after=After("t"))
    await log.append_batch(MINE, after=After("t"))
