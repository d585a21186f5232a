"""What every kind of log guarantees about trim (PITFALLS A22). A trim is whole or per tag, never a
silent no-op, and a trimmed record is never reported as absent.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from indilog.base.errors import TrimmedError
from indilog.base.ids import MAX_SEQNUM, UserTag
from indilog.base.log import Entry, Log, LogSource, Session
from tests.contract.kinds import KINDS
from tests.contract.reading import data_of
from tests.support.repeated import first_of

pytestmark = pytest.mark.asyncio


async def floor_of_error(read: object) -> int:
    with pytest.raises(TrimmedError) as raised:
        await read  # type: ignore[misc]
    return raised.value.first_seqnum


async def fill(log: Log, count: int = 10) -> list[int]:
    """Append records with the tags `all` and, every other one, `odd`."""
    entries = [Entry(b"%d" % n, ["all", "odd"] if n % 2 else ["all"]) for n in range(count)]
    return await log.append_batch(entries)


async def test_below_a_logs_floor_every_read_raises_a_trimmed_error(log: Log) -> None:
    seqnums = await fill(log)
    until = seqnums[6]
    await log.trim(until)
    for tag in (None, "all", "odd", "never"):
        for bound in (0, until - 1):
            assert await floor_of_error(log.read_next(tag, bound)) == until
            assert await floor_of_error(log.read_range(tag, bound)) == until
            assert await floor_of_error(log.read_prev(tag, bound)) == until
    assert await floor_of_error(log.read(seqnums[0])) == until
    assert await floor_of_error(log.read(until - 1)) == until
    assert data_of(await log.read_range(None, until)) == [b"6", b"7", b"8", b"9"]
    assert data_of(await log.read_range("odd", until)) == [b"7", b"9"]
    last = await log.read_prev("odd")
    assert last is not None
    assert last.data == b"9"


async def test_a_trimmed_tag_leaves_other_tags_and_the_log_readable(log: Log) -> None:
    seqnums = await fill(log)
    until = seqnums[6]
    await log.trim(until, tag="odd")
    assert await floor_of_error(log.read_next("odd", 0)) == until
    assert await floor_of_error(log.read_prev("odd", until - 1)) == until
    assert data_of(await log.read_range("odd", until)) == [b"7", b"9"]
    assert data_of(await log.read_range("all", seqnums[0])) == [b"%d" % n for n in range(10)]
    assert data_of(await log.read_range(None, seqnums[0])) == [b"%d" % n for n in range(10)]
    record = await log.read(seqnums[1])
    assert record is not None
    assert record.data == b"1"


async def test_reads_skip_a_record_trimmed_in_all_its_tags(log: Log) -> None:
    seqnums = [await log.append(b"%d" % n, tags=["x"] if n < 4 else []) for n in range(6)]
    await log.trim(seqnums[2], tag="x")
    assert data_of(await log.read_range(None, seqnums[0])) == [b"2", b"3", b"4", b"5"]
    found = await log.read_next(None, seqnums[0])
    assert found is not None
    assert found.data == b"2"
    with pytest.raises(TrimmedError):
        await log.read(seqnums[1])
    await log.trim(seqnums[4], tag="x")
    back = await log.read_prev(None, seqnums[4])
    assert back is not None
    assert back.data == b"4"
    below = await log.read_prev(None, seqnums[3])
    assert below is None or below.seqnum < seqnums[0]


async def test_a_record_is_readable_while_one_of_its_tags_is_untrimmed(log: Log) -> None:
    first = await log.append(b"both", tags=["a", "b"])
    await log.trim(first + 1, tag="a")
    assert data_of(await log.read_range("b", first)) == [b"both"]
    assert await log.read(first) is not None
    await log.trim(first + 1, tag="b")
    with pytest.raises(TrimmedError):
        await log.read(first)
    assert await log.read_range(None, first) == []


async def test_read_prev_without_a_match_above_a_floor_raises_a_trimmed_error(log: Log) -> None:
    first = await log.append(b"old", tags=["t"])
    after = await log.append(b"other")
    await log.trim(first + 1, tag="t")
    assert await floor_of_error(log.read_prev("t", after)) == first + 1
    assert await floor_of_error(log.read_prev("t")) == first + 1
    new = await log.append(b"new", tags=["t"])
    record = await log.read_prev("t")
    assert record is not None
    assert record.seqnum == new


async def test_a_completely_trimmed_log_accepts_further_appends(log: Log) -> None:
    await fill(log)
    tail = await log.tail()
    await log.trim(tail)
    assert await log.read_range(None, tail) == []
    assert await floor_of_error(log.read_prev()) == tail
    seqnum = await log.append(b"next", tags=["all"])
    assert seqnum >= tail
    assert data_of(await log.read_range("all", tail)) == [b"next"]


async def test_a_floor_never_decreases(log: Log) -> None:
    seqnums = await fill(log)
    await log.trim(seqnums[5])
    await log.trim(seqnums[2])
    await log.trim(0)
    assert await floor_of_error(log.read_next()) == seqnums[5]
    await log.trim(seqnums[7], tag="all")
    await log.trim(seqnums[6], tag="all")
    assert await floor_of_error(log.read_next("all", seqnums[5])) == seqnums[7]


async def test_trimming_beyond_the_tail_is_refused_in_a_sentence(log: Log) -> None:
    await fill(log)
    for until in (await log.tail() + 1_000_000, MAX_SEQNUM):
        for tag in (None, "all"):
            with pytest.raises(ValueError, match="the log ends at"):
                await log.trim(until, tag=tag)
    with pytest.raises(ValueError, match="0 or greater"):
        await log.trim(-1)
    first = await log.read_next("all")
    assert first is not None
    assert first.data == b"0"


async def test_a_trim_does_not_touch_another_log(log: Log, logs: LogSource) -> None:
    other = logs.log(log.name + "-other", Session())
    theirs = await other.append(b"theirs", tags=["all"])
    await fill(log)
    await log.trim(await log.tail())
    await log.trim(await log.tail(), tag="all")
    assert data_of(await other.read_range("all", 0)) == [b"theirs"]
    assert data_of(await other.read_range(None, 0)) == [b"theirs"]
    record = await other.read(theirs)
    assert record is not None
    assert record.data == b"theirs"


async def test_other_sessions_see_a_trim(log: Log, session_of: Callable[[], Log]) -> None:
    seqnums = await fill(log)
    other = session_of()
    await other.read_next("all")
    await log.trim(seqnums[3], tag="all")
    await log.trim(seqnums[2])
    # A tail request goes to the primary, and makes the other session at least as new.
    await other.tail()
    assert await floor_of_error(other.read_next("all", 0)) == seqnums[3]
    assert await floor_of_error(other.read_next("odd", 0)) == seqnums[2]


async def test_a_subscription_below_the_floor_raises_a_trimmed_error(log: Log) -> None:
    seqnums = await fill(log)
    await log.trim(seqnums[5])
    with pytest.raises(TrimmedError):
        await anext(log.subscribe("all", 0))
    record = await anext(log.subscribe("all", seqnums[5]))
    assert record.data == b"5"


@pytest.mark.parametrize("seed", first_of(range(3), 1))
async def test_reads_agree_with_a_naive_list_between_trims(log: Log, seed: int) -> None:
    choose = random.Random(seed)
    tags = ("a", "b", "c")
    kept: list[tuple[int, list[UserTag]]] = []
    floors: dict[str | None, int] = dict.fromkeys((None, *tags), 0)
    for _ in range(12):
        for _ in range(choose.randrange(5)):
            of: list[UserTag] = [t for t in tags if choose.random() < 0.5]
            kept.append((await log.append(b"x", tags=of), of))
        tag = choose.choice((None, *tags))
        bound = choose.choice([s for s, _ in kept] or [0])
        if choose.random() < 0.5:
            await log.trim(bound, tag=tag)
            floors[tag] = max(floors[tag], bound)
        for tag in (None, *tags):
            await agree(log, kept, floors, tag, choose.choice([s for s, _ in kept] or [0]))


async def agree(
    log: Log,
    kept: list[tuple[int, list[UserTag]]],
    floors: dict[str | None, int],
    tag: str | None,
    bound: int,
) -> None:
    floor = max(floors[None], floors[tag])
    alive = [
        s
        for s, of in kept
        if s >= floor and (tag is None or tag in of) and not (of and all(s < floors[t] for t in of))  # type: ignore[index]
    ]
    if bound < floor:
        assert await floor_of_error(log.read_next(tag, bound)) == floor
    else:
        after = [s for s in alive if s >= bound]
        found = await log.read_next(tag, bound)
        assert (found and found.seqnum) == (after[0] if after else None)
        assert [r.seqnum for r in await log.read_range(tag, bound)] == after
    before = [s for s in alive if s <= bound]
    if not before and floor:
        assert await floor_of_error(log.read_prev(tag, bound)) == floor
    else:
        last = await log.read_prev(tag, bound)
        assert (last and last.seqnum) == (before[-1] if before else None)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=kind.marks) for n, kind in KINDS.items() if kind.durable]
)
async def test_a_trim_survives_a_restart(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    async with kind.open(tmp_path) as logs:
        log = logs.log("orders", Session())
        seqnums = await fill(log)
        await log.trim(seqnums[4])
        await log.trim(seqnums[6], tag="odd")
    async with kind.open(tmp_path) as logs:
        log = logs.log("orders", Session())
        assert await floor_of_error(log.read_next("all", 0)) == seqnums[4]
        assert await floor_of_error(log.read_next("odd", seqnums[4])) == seqnums[6]
        assert await floor_of_error(log.read(seqnums[3])) == seqnums[4]
        assert data_of(await log.read_range("all", seqnums[4])) == [
            b"4",
            b"5",
            b"6",
            b"7",
            b"8",
            b"9",
        ]
        assert await floor_of_error(log.read_prev("odd", seqnums[5])) == seqnums[6]
