"""What every kind of log guarantees (PITFALLS A1, A33): appends, reads at all bounds, tags, limits.

Each claim is a sentence of `indilog.base.log.Log`. The suite uses the interface only, and does not
presume that a logspace is empty.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable

import pytest

from indilog.base.errors import InvalidTagError, TooLargeError
from indilog.base.ids import MAX_SEQNUM, UserTag
from indilog.base.log import READ_RANGE_LIMIT_MAX, Entry, Log, LogSource, Session
from indilog.config import ClusterConfig
from tests.contract.reading import all_of, data_of

pytestmark = pytest.mark.asyncio

LIMITS = ClusterConfig()


async def test_an_appended_record_is_read_unchanged(log: Log) -> None:
    seqnum = await log.append(b"hello", tags=["greeting", 7])
    record = await log.read(seqnum)
    assert record is not None
    assert (record.seqnum, record.data, record.aux) == (seqnum, b"hello", None)
    assert set(record.tags) == {"greeting", 7}
    assert record.time > 1e9
    assert record.ordered_at > 1e9


@pytest.mark.exact_seqnums
async def test_seqnums_are_dense_and_increasing(log: Log) -> None:
    start = await log.tail()
    seqnums = [await log.append(b"%d" % n) for n in range(20)]
    assert seqnums == list(range(start, start + 20))


@pytest.mark.exact_seqnums
async def test_logs_of_one_logspace_share_one_order(logs: LogSource, name: str) -> None:
    session = Session()
    one, two = logs.log(name + "/1", session), logs.log(name + "/2", session)
    start = await one.tail()
    seqnums = [await (one, two)[n % 2].append(b"x") for n in range(6)]
    assert seqnums == list(range(start, start + 6))


async def test_append_takes_any_iterable_of_tags(log: Log) -> None:
    seqnum = await log.append(b"x", tags=(tag for tag in ("a", "b")))
    record = await log.read(seqnum)
    assert record is not None
    assert set(record.tags) == {"a", "b"}


@pytest.mark.parametrize(
    "data", [b"", b"\x00\xff" * 300, bytes(range(256)), "grüße 世界 🎈".encode()]
)
async def test_data_is_any_bytes(log: Log, data: bytes) -> None:
    seqnum = await log.append(data, tags=["d"])
    for record in (await log.read(seqnum), await log.read_next("d"), await log.read_prev("d")):
        assert record is not None
        assert record.data == data


async def test_a_record_of_the_largest_size_is_accepted(log: Log) -> None:
    data = random.Random(1).randbytes(LIMITS.record_bytes_max)
    seqnum = await log.append(data, tags=["big"])
    record = await log.read_next("big", seqnum)
    assert record is not None
    assert record.data == data


@pytest.mark.exact_seqnums
async def test_an_oversize_record_is_refused_with_the_limit_and_nothing_is_appended(
    log: Log,
) -> None:
    tail = await log.tail()
    with pytest.raises(TooLargeError, match=re.escape(f"{LIMITS.record_bytes_max:,}")) as refused:
        await log.append(bytes(LIMITS.record_bytes_max + 1))
    assert (refused.value.size, refused.value.limit) == (
        LIMITS.record_bytes_max + 1,
        LIMITS.record_bytes_max,
    )
    assert await log.tail() == tail
    assert await log.append(b"fits") == tail


@pytest.mark.exact_seqnums
async def test_too_many_tags_are_refused_with_the_limit_and_nothing_is_appended(log: Log) -> None:
    tail = await log.tail()
    tags = list(range(1, LIMITS.record_tags_max + 2))
    with pytest.raises(TooLargeError, match=str(LIMITS.record_tags_max)):
        await log.append(b"x", tags=tags)
    assert await log.tail() == tail
    assert await log.append(b"x", tags=tags[:-1]) == tail


@pytest.mark.parametrize("tag", ["", 0, -1, 2**64, True, 1.5, None, b"t", "a\x1fb", "x" * 257])
async def test_a_bad_tag_is_refused_and_nothing_is_appended(log: Log, tag: object) -> None:
    tail = await log.tail()
    with pytest.raises(InvalidTagError):
        await log.append(b"x", tags=["good", tag])  # type: ignore[list-item]
    assert await log.tail() == tail


@pytest.mark.parametrize("tag", ["", 0, -1, 2**64])
async def test_a_read_of_a_bad_tag_is_refused(log: Log, tag: UserTag) -> None:
    for read in (log.read_next, log.read_prev, log.read_range):
        with pytest.raises(InvalidTagError):
            await read(tag)


async def test_text_in_place_of_a_list_of_tags_is_refused(log: Log) -> None:
    with pytest.raises(InvalidTagError, match=r"tags=\['ab'\]"):
        await log.append(b"x", tags="ab")


async def test_data_that_is_not_bytes_is_refused(log: Log) -> None:
    with pytest.raises(TypeError, match="bytes"):
        await log.append("text")  # type: ignore[arg-type]


async def test_a_log_without_a_name_is_refused(logs: LogSource) -> None:
    with pytest.raises(InvalidTagError):
        await logs.log("", Session()).append(b"x")


async def test_a_batch_is_consecutive_and_keeps_its_order(log: Log) -> None:
    start = await log.tail()
    entries = [Entry(b"%d" % n, tags=["b", n + 1]) for n in range(100)]
    assert await log.append_batch(entries) == list(range(start, start + 100))
    assert data_of(await all_of(log, "b")) == [entry.data for entry in entries]
    record = await log.read_next(42)
    assert record is not None
    assert record.data == b"41"


async def test_batches_stay_consecutive_among_concurrent_appends(
    session_of: Callable[[], Log],
) -> None:
    log = session_of()
    batches, singles = await asyncio.gather(
        asyncio.gather(*[session_of().append_batch([Entry(b"b")] * 7) for _ in range(20)]),
        asyncio.gather(*[session_of().append(b"s") for _ in range(100)]),
    )
    for seqnums in batches:
        assert seqnums == list(range(seqnums[0], seqnums[0] + 7))
    every = sorted([seqnum for seqnums in batches for seqnum in seqnums] + singles)
    assert len(set(every)) == 240
    assert await log.tail() > every[-1]


async def test_an_empty_batch_appends_nothing(log: Log) -> None:
    tail = await log.tail()
    assert await log.append_batch([]) == []
    assert await log.tail() == tail


async def test_a_batch_with_one_bad_entry_appends_nothing(log: Log) -> None:
    tail = await log.tail()
    with pytest.raises(InvalidTagError):
        await log.append_batch([Entry(b"good"), Entry(b"bad", tags=[0])])
    with pytest.raises(TooLargeError):
        await log.append_batch([Entry(b"good"), Entry(bytes(LIMITS.record_bytes_max + 1))])
    assert await log.tail() == tail


async def test_a_batch_over_the_limit_is_refused_as_a_whole(log: Log) -> None:
    tail = await log.tail()
    count = LIMITS.batch_bytes_max // LIMITS.record_bytes_max + 1
    with pytest.raises(TooLargeError, match=re.escape(f"{LIMITS.batch_bytes_max:,}")):
        await log.append_batch([Entry(bytes(LIMITS.record_bytes_max))] * count)
    assert await log.tail() == tail


async def test_bounds_are_inclusive(log: Log) -> None:
    low = await log.append(b"low", tags=["t"])
    await log.append(b"other", tags=["u"])
    high = await log.append(b"high", tags=["t"])

    async def ahead(bound: int) -> bytes | None:
        record = await log.read_next("t", bound)
        return None if record is None else record.data

    async def back(bound: int) -> bytes | None:
        record = await log.read_prev("t", bound)
        return None if record is None else record.data

    assert [await ahead(b) for b in (low, low + 1, high, high + 1)] == [
        b"low", b"high", b"high", None,
    ]  # fmt: skip
    assert [await back(b) for b in (low, low + 1, high, high + 1)] == [
        b"low", b"low", b"high", b"high",
    ]  # fmt: skip
    assert await ahead(0) == b"low"
    assert await back(MAX_SEQNUM) == b"high"
    if low:
        assert await back(low - 1) is None


async def test_a_range_starts_at_its_bound_and_stops_at_its_limit(log: Log) -> None:
    seqnums = [await log.append(b"%d" % n, tags=["t"]) for n in range(6)]
    assert data_of(await log.read_range("t", seqnums[2], limit=3)) == [b"2", b"3", b"4"]
    assert data_of(await log.read_range("t", seqnums[4], limit=3)) == [b"4", b"5"]
    assert await log.read_range("t", seqnums[5] + 1) == []
    assert data_of(await log.read_range(bound=seqnums[3])) == [b"3", b"4", b"5"]


async def test_bounds_up_to_the_greatest_seqnum_are_accepted(log: Log) -> None:
    await log.append(b"x", tags=["t"])
    for bound in (MAX_SEQNUM - 1, MAX_SEQNUM, MAX_SEQNUM + 1, 2**80):
        assert await log.read(bound) is None
        assert await log.read_next("t", bound) is None
        assert await log.read_range("t", bound) == []
        record = await log.read_prev("t", bound)
        assert record is not None
        assert record.data == b"x"


async def test_a_negative_bound_is_refused(log: Log) -> None:
    with pytest.raises(ValueError, match="0 or greater"):
        await log.read(-1)
    with pytest.raises(ValueError, match="0 or greater"):
        await log.read_next("t", -1)
    with pytest.raises(ValueError, match="0 or greater"):
        await log.read_prev("t", -1)
    with pytest.raises(ValueError, match="0 or greater"):
        await log.read_range("t", -1)


@pytest.mark.parametrize("limit", [0, -1, READ_RANGE_LIMIT_MAX + 1])
async def test_a_page_has_a_limit(log: Log, limit: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{READ_RANGE_LIMIT_MAX:,}")):
        await log.read_range(limit=limit)


@pytest.mark.parametrize("tag", ["t", None])
async def test_pages_of_one_record_walk_through_a_log(log: Log, tag: str | None) -> None:
    appended = [await log.append(b"%d" % n, tags=["t"]) for n in range(4)]
    found, bound = list[int](), 0
    while page := await log.read_range(tag, bound, limit=1):
        found += [record.seqnum for record in page]
        bound = found[-1] + 1
    assert found == appended


async def test_every_read_of_an_empty_log_finds_nothing(log: Log) -> None:
    assert await log.read_next() is None
    assert await log.read_next("t") is None
    assert await log.read_prev() is None
    assert await log.read_prev("t") is None
    assert await log.read_range() == []
    assert await log.read(await log.tail()) is None


async def test_logs_never_see_each_other(logs: LogSource, name: str) -> None:
    session = Session()
    mine, theirs = logs.log(name + "/mine", session), logs.log(name + "/theirs", session)
    foreign = await theirs.append(b"theirs", tags=["t"])
    own = await mine.append(b"mine", tags=["t"])
    await theirs.append(b"theirs", tags=["t"])
    assert await mine.read(foreign) is None
    assert data_of(await all_of(mine)) == data_of(await all_of(mine, "t")) == [b"mine"]
    assert await mine.read_next("t", own + 1) is None
    if own:
        assert await mine.read_prev("t", own - 1) is None
        assert await mine.read_prev(bound=own - 1) is None


async def test_logs_with_a_common_name_prefix_are_separate(logs: LogSource, name: str) -> None:
    session = Session()
    short, long = logs.log(name, session), logs.log(name + "t", session)
    await long.append(b"long", tags=["x"])
    await short.append(b"short", tags=["tx"])
    assert data_of(await all_of(short)) == [b"short"]
    assert await short.read_next("x") is None


async def test_the_text_7_and_the_integer_7_are_different_tags(log: Log) -> None:
    await log.append(b"text", tags=["7"])
    await log.append(b"integer", tags=[7])
    assert data_of(await all_of(log, "7")) == [b"text"]
    assert data_of(await all_of(log, 7)) == [b"integer"]


@pytest.mark.parametrize("tag", ["grüße 世界 🎈", "a b/c?d=e&f", "x" * 256, 1, 2**64 - 1])
async def test_tags_are_any_text_or_integer(log: Log, tag: UserTag) -> None:
    await log.append(b"x", tags=[tag])
    record = await log.read_next(tag)
    assert record is not None
    assert record.tags == (tag,)


async def test_a_repeated_tag_counts_once(log: Log) -> None:
    await log.append(b"x", tags=["t", "t", "u", "t"])
    (record,) = await all_of(log, "t")
    assert record.tags == ("t", "u")


async def test_a_record_is_found_by_each_of_its_tags(log: Log) -> None:
    tags = [f"t{n}" for n in range(LIMITS.record_tags_max)]
    seqnum = await log.append(b"x", tags=tags)
    for tag in tags:
        record = await log.read_prev(tag)
        assert record is not None
        assert record.seqnum == seqnum


async def test_reads_agree_with_a_naive_list_at_every_bound(log: Log) -> None:
    choose = random.Random(42)
    start = await log.tail()
    kept: list[tuple[int, bytes, list[UserTag]]] = []
    for n in range(60):
        tags: list[UserTag] = [t for t in ("a", "b", 3, "rare") if choose.random() < 0.4]
        seqnum = await log.append(b"%d" % n, tags=tags)
        kept.append((seqnum, b"%d" % n, tags))
    for tag in (None, "a", "b", 3, "rare", "never"):
        matching = [(s, data) for s, data, tags in kept if tag is None or tag in tags]
        for bound in range(start, start + 62):
            after = [data for s, data in matching if s >= bound]
            before = [data for s, data in matching if s <= bound]
            ahead, back = await log.read_next(tag, bound), await log.read_prev(tag, bound)
            assert (ahead and ahead.data) == (after[0] if after else None)
            assert (back and back.data) == (before[-1] if before else None)
            if bound % 7 == 0:
                assert data_of(await log.read_range(tag, bound, limit=5)) == after[:5]


async def test_pages_bounded_in_bytes_reach_the_end(log: Log) -> None:
    seqnums = [await log.append(bytes([n]) * 900_000, tags=["big"]) for n in range(7)]
    assert [record.seqnum for record in await all_of(log, "big")] == seqnums
