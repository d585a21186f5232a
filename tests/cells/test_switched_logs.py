"""What a switched log keeps: restarts, trims, conditions, policies, waiting reads; and failures."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path

import pytest

import indilog
from indilog.base.errors import (
    ConditionFailedError,
    InvalidTagError,
    NotReadyError,
    TrimmedError,
    WrongStateError,
)
from indilog.base.ids import SeqNum
from indilog.base.log import After, Entry, Log, Record, Session
from indilog.base.log_kinds import LOG_KINDS, SHARED, LogKind
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog_compute.log_kinds import kinds as log_kinds
from indilog_compute.log_kinds.catalog import ReplayedCatalog
from tests.cells.switching import kinds_of, platform_with
from tests.cells.test_log_kinds import configured, trimmed
from tests.cells.test_order_first import configured as on_nodes
from tests.contract.reading import all_of, data_of
from tests.support.link_pair import linked_logs
from tests.support.repeated import repeated

pytestmark = pytest.mark.asyncio


async def filled(platform: Platform, kinds: list[str], *, each: int = 3) -> Log:
    """Return a log that was switched to each of the kinds, with records of each segment."""
    log = platform.logs.log("events")
    number = 0
    for kind in ["", *kinds]:
        if kind:
            await kinds_of(platform.logs).switch("events", kind)
        for _ in range(each):
            await log.append(b"%d" % number, tags=["t", f"n{number}"])
            number += 1
    return log


async def test_a_switched_log_is_whole_after_a_restart(tmp_path: Path) -> None:
    async with indilog.open(tmp_path) as client:
        log = client.log("events")
        seqnums = [await log.append(b"0", tags=["t"])]
        for number, kind in enumerate(["object-store", "shared", "object-store"]):
            assert (await client.switch_log("events", kind)).kind == kind  # type: ignore[arg-type]
            seqnums.append(await log.append(b"%d" % (number + 1), tags=["t"]))
        again = await client.switch_log("events", "object-store")
        assert again == (await client.logs())[0], "it has the kind already"
        assert seqnums == sorted(set(seqnums))
        assert [(each.log, each.kind) for each in await client.logs()] == [
            ("events", "object-store")
        ]
        tail = await log.tail()
    async with indilog.open(tmp_path) as client:
        log = client.log("events")
        assert await log.tail() == tail
        found = await all_of(log, "t")
        assert [record.seqnum for record in found] == seqnums
        assert data_of(found) == [b"0", b"1", b"2", b"3"]
        assert {record.tags for record in found} == {("t",)}
        assert [await log.read(seqnum) for seqnum in seqnums] == found
        assert [await log.find_time(record.ordered_at) for record in found[:1]] == seqnums[:1]
        assert await log.append(b"4", tags=["t"]) == tail


async def test_a_log_that_was_created_in_a_store_becomes_shared(tmp_path: Path) -> None:
    async with indilog.open(tmp_path) as client:
        await client.create_log("events", kind="object-store")
        log = client.log("events")
        assert [await log.append(b"%d" % n) for n in range(3)] == [0, 1, 2]
        await client.switch_log("events", "shared")
        assert 3 <= await log.append(b"3") < 10, "seqnums continue, as those of shared logs do"
        assert await client.create_log("events", "shared") == (await client.logs())[0]
        with pytest.raises(WrongStateError, match="switch it to object-store"):
            await client.create_log("events", "object-store")
        assert data_of(await all_of(log)) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("pair", [*itertools.combinations(LOG_KINDS, 2)], ids="-".join)
async def test_a_log_becomes_any_other_kind_and_back(
    tmp_path: Path, pair: tuple[LogKind, LogKind]
) -> None:
    """Three segments; the last one has the kind of the first, and layouts of its own."""
    before, after = pair
    async with indilog.open(tmp_path) as client:
        await client.create_log("events", before)
        log = client.log("events")
        following = asyncio.create_task(first_records(log, 9))
        for kind in (before, after, before):
            assert (await client.switch_log("events", kind)).kind == kind
            for n in range(3):
                await log.append(b"%s %d" % (kind.encode(), n), tags=["t"])
        found = await all_of(log, "t")
        assert data_of(found) == [
            b"%s %d" % (kind.encode(), n) for kind in (before, after, before) for n in range(3)
        ]
        seqnums = [each.seqnum for each in found]
        if SHARED not in (before, after):
            assert seqnums == list(range(9)), "dense"
        assert await following == found
        with pytest.raises(ConditionFailedError):
            await log.append_batch([Entry(b"x", ["t"])], after=After("t", seqnums[4]))
        tail = await log.tail()
    async with indilog.open(tmp_path) as client:
        log = client.log("events")
        assert await all_of(log, "t") == found
        assert await log.append(b"last", tags=["t"]) >= tail


async def first_records(log: Log, count: int) -> list[Record]:
    """Return the first records of a subscription."""
    found: list[Record] = []
    async for record in log.subscribe("t"):
        found.append(record)
        if len(found) == count:
            break
    return found


async def test_conditions_hold_across_segments(tmp_path: Path) -> None:
    async with platform_with(tmp_path, engines=1) as platform:
        log = platform.logs.log("events")
        first = await log.append(b"a", tags=["c"])
        await kinds_of(platform.logs).switch("events", "object-store")
        entry = [Entry(b"b", ["c"])]
        with pytest.raises(ConditionFailedError) as refused:
            await log.append_batch(entry, after=After("c"))
        assert refused.value.last_seqnum == first
        (second,) = await log.append_batch(entry, after=After("c", first))
        with pytest.raises(ConditionFailedError) as refused:
            await log.append_batch(entry, after=After("c", first))
        assert refused.value.last_seqnum == second
        await kinds_of(platform.logs).switch("events", "shared")
        with pytest.raises(ConditionFailedError) as refused:
            await log.append_batch(entry, after=After("c", first))
        assert refused.value.last_seqnum == second
        (third,) = await log.append_batch(entry, after=After("c", second))
        with pytest.raises(ConditionFailedError) as refused:
            await log.append_batch(entry, after=After("c"))
        assert refused.value.last_seqnum == third
        await log.append_batch([Entry(b"d", ["new"])], after=After("new"))
        await log.trim(second + 1)
        with pytest.raises(TrimmedError):
            await log.append_batch(entry, after=After("c", first))
        (fourth,) = await log.append_batch(entry, after=After("c", third))
        assert fourth > third


@pytest.mark.parametrize("tag", [None, "t"])
async def test_trims_reach_all_segments(tmp_path: Path, tag: str | None) -> None:
    async with platform_with(tmp_path, engines=1) as platform:
        log = await filled(platform, ["object-store", "shared"])
        records = await all_of(log, "t")
        assert len(records) == 9
        tail = await log.tail()
        with pytest.raises(ValueError, match=f"the log ends at {tail}"):
            await log.trim(tail + 1, tag=tag)
        for record in records:
            await log.trim(record.seqnum, tag=tag)
            if not record.seqnum:
                continue
            with pytest.raises(TrimmedError) as error:
                await log.read_next(tag, record.seqnum - 1)
            assert error.value.first_seqnum == record.seqnum
            assert await log.read_next(tag, record.seqnum) == record
            with pytest.raises(TrimmedError) as error:
                await log.read_prev(tag, record.seqnum - 1)
            assert error.value.first_seqnum == record.seqnum
        await log.trim(tail, tag=tag)
        with pytest.raises(TrimmedError) as error:
            await log.read_range(tag)
        assert error.value.first_seqnum == tail


async def test_a_floor_is_found_after_a_segment_without_records(tmp_path: Path) -> None:
    async with platform_with(tmp_path, engines=1) as platform:
        log = await filled(platform, ["object-store"])
        for kind in ("order-first", "object-store"):
            await kinds_of(platform.logs).switch("events", kind)
        await log.trim(await log.tail())
        await log.append(b"x", tags=["t"])
        last = await log.append(b"y", tags=["t"])
        await log.trim(last, tag="t")
        with pytest.raises(TrimmedError) as error:
            await log.read_next("t")
        assert error.value.first_seqnum == last


async def test_aux_data_stays_with_its_record(tmp_path: Path) -> None:
    async with platform_with(tmp_path, engines=1) as platform:
        log = await filled(platform, ["object-store", "shared"])
        for record in await all_of(log, "t"):
            await log.set_aux(record.seqnum, record.data * 2)
        for record in await all_of(log, "t"):
            assert record.aux == record.data * 2


async def test_waiting_reads_and_handles_of_before_follow(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path, engines=2)) as platform:
        first, second = platform.engines.values()
        remote = linked_logs(first).log("events", Session())
        handles = [first.log("events"), second.log("events"), remote]
        for number, kind in enumerate(["object-store", "shared"]):
            waiting = [asyncio.create_task(log.read_next(f"n{number}", wait=60)) for log in handles]
            await asyncio.sleep(0.05)
            await kinds_of(second).switch("events", kind)
            seqnum = await remote.append(b"x", tags=[f"n{number}"])
            async with asyncio.timeout(60):
                found = await asyncio.gather(*waiting)
            assert [each.seqnum for each in found if each is not None] == [seqnum] * 3
        assert await first.log("events").read_next("none", wait=0.05) is None


@pytest.mark.parametrize("created", ["shared", "object-store"])
async def test_policies_move_along_and_are_enforced(tmp_path: Path, created: str) -> None:
    async with indilog.open(tmp_path, configured(tmp_path, retention_interval_s=0.05)) as client:
        await client.create_log("events", kind=created)  # type: ignore[arg-type]
        log = client.log("events")
        await log.set_retention(age_s=1e6)
        for kind in ["object-store", "shared", "object-store"]:
            await client.switch_log("events", kind)  # type: ignore[arg-type]
            assert (await log.retention()).age_s == 1e6
            for n in range(10):
                await log.append(b"%d" % n * 50)
        await log.set_retention(size_bytes=300)
        last = await log.read_prev()
        assert last is not None
        async with asyncio.timeout(60):
            while await trimmed(log) < last.seqnum - 9:  # noqa: ASYNC110 - the platform trims
                await asyncio.sleep(0.01)
        assert await log.read_prev() == last


async def test_a_switch_that_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_kinds, "_SEGMENTS_MAX", 3)
    async with indilog.open(tmp_path, configured(tmp_path, object_logs_max=1)) as client:
        with pytest.raises(ValueError, match="one of shared, object-store"):
            await client.switch_log("a", "tape")  # type: ignore[arg-type]
        with pytest.raises(InvalidTagError):
            await client.switch_log("$logs", "object-store")
        await client.switch_log("a", "object-store")
        with pytest.raises(WrongStateError, match="raise object_logs_max"):
            await client.switch_log("b", "object-store")
        await client.log("b").append(b"x")
        await client.switch_log("a", "shared")
        with pytest.raises(WrongStateError, match="which is the limit"):
            await client.switch_log("a", "object-store")
        assert data_of(await all_of(client.log("b"))) == [b"x"]


@pytest.mark.parametrize(("kind", "default"), [("order-first", 3), ("object-store", 16)])
async def test_a_log_gets_another_number_of_stripes_under_load(
    tmp_path: Path, kind: LogKind, default: int
) -> None:
    config = on_nodes(tmp_path, engines=2, nodes=3)
    async with embedded(config) as platform:
        first, second = platform.engines.values()
        info = await kinds_of(first).create("events", kind)
        assert info.stripes == default
        over = asyncio.Event()

        async def write(log: Log) -> list[SeqNum]:
            placed: list[SeqNum] = []
            while not over.is_set() or len(placed) < 20:
                placed.append(await log.append(b"x"))
            return placed

        writing = [asyncio.create_task(write(each.log("events"))) for each in (first, second)]
        for stripes in (1, 5):
            await asyncio.sleep(0.02)
            info = await kinds_of(second).switch("events", kind, stripes=stripes)
            assert (info.kind, info.stripes) == (kind, stripes)
            assert await kinds_of(first).switch("events", kind) == info, "nothing to change"
            assert await kinds_of(first).switch("events", kind, stripes=stripes) == info
        over.set()
        placed = sorted(itertools.chain.from_iterable(await asyncio.gather(*writing)))
        assert [record.seqnum for record in await all_of(first.log("events"))] == placed
        folders = [each.folder for each in kinds_of(first)._catalog.logs["events"].segments]
        assert len(folders) == 3
        if kind == "order-first":
            chains = [len(kinds_of(first).layout(folder).chains) for folder in folders]
            assert chains == [3, 1, 5]
        else:
            places = [tmp_path / "objects" / folder / "cells" for folder in folders]
            assert [len([*place.iterdir()]) for place in places[1:]] == [1, 5]
    async with embedded(config) as platform:
        [node, _] = platform.engines.values()
        assert await kinds_of(node).created() == [info]
        assert [record.seqnum for record in await all_of(node.log("events"))] == placed
        with pytest.raises(WrongStateError, match="has 5 stripes; switch it to 2 stripes"):
            await kinds_of(node).create("events", kind, stripes=2)


async def test_a_number_of_stripes_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async with indilog.open(tmp_path) as client:
        for kind in ("shared", "owned"):
            with pytest.raises(ValueError, match=f"of kind {kind} has no stripes; logs of kind"):
                await client.create_log("a", kind, stripes=2)
        with pytest.raises(ValueError, match="has 1 to 16 stripes, not 17"):
            await client.switch_log("a", "order-first", stripes=17)
        with pytest.raises(ValueError, match="has 1 to 1,000 stripes, not 0"):
            await client.create_log("a", "object-store", stripes=0)
        assert await client.logs() == []


async def test_a_node_that_does_not_answer_lets_the_log_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_kinds, "_FOLLOW_S", 0.2)
    async with embedded(configured(tmp_path, engines=2)) as platform:
        first, second = platform.engines.values()
        await first.log("events").append(b"0", tags=["t"])
        for task in kinds_of(second)._tasks:
            task.cancel()
        appending = asyncio.create_task(_appended(first.log("events"), 20))
        with pytest.raises(NotReadyError, match=f"{second.node} did not answer"):
            await kinds_of(first).switch("events", "object-store")
        assert [info.kind for info in await kinds_of(first).created()] == ["shared"]
        async with asyncio.timeout(60):
            await appending
        await second.log("events").append(b"last", tags=["t"])
        assert len(await all_of(first.log("events"), "t")) == 22
        assert "events" not in first.routes, "calls cost as before"


async def _appended(log: Log, count: int) -> None:
    for number in range(count):
        await log.append(b"%d" % number, tags=["t"])


class _CrashedError(Exception):
    """The switcher ended here."""


@pytest.mark.parametrize(
    "case",
    [
        *[("seal", "shared", "object-store"), ("bridge", "shared", "object-store")],
        *map(repeated, [("seal", "object-store", "owned"), ("bridge", "owned", "shared")]),
        *map(repeated, [("bridge", "shared", "order-first"), ("seal", "object-store", "shared")]),
        *map(repeated, [("bridge", "object-store", "owned"), ("bridge", "order-first", "owned")]),
    ],
    ids="-".join,
)
async def test_other_nodes_end_the_switch_of_a_crashed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str]
) -> None:
    """Up to the seal it is abandoned; after that it is completed."""
    step, before, after = case
    async with embedded(configured(tmp_path, engines=3)) as platform:
        switcher, second, third = platform.engines.values()
        await kinds_of(second).switch("events", before)
        monkeypatch.setattr(log_kinds, "_FINISH_S", 5.0)  # more than a step of a switch takes
        going_on = getattr(ReplayedCatalog, step)

        async def crash(self: ReplayedCatalog, *given: object, **named: object) -> None:
            if self._node == switcher.node:
                raise _CrashedError
            await going_on(self, *given, **named)

        monkeypatch.setattr(ReplayedCatalog, step, crash)
        appending = [
            asyncio.create_task(_appended(node.log("events"), 10)) for node in (second, third)
        ]
        with pytest.raises(_CrashedError):
            await kinds_of(switcher).switch("events", after)
        async with asyncio.timeout(60):
            await asyncio.gather(*appending)
            await second.log("events").append(b"last", tags=["t"])
        ended_as = after if step == "bridge" else before
        assert (await kinds_of(third).created())[0].kind == ended_as
        assert len(await all_of(switcher.log("events"), "t")) == 21


async def test_held_calls_fail_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(tmp_path, engines=2, append_timeout_s=2.0, read_timeout_s=1.0)
    async with embedded(config) as platform:
        first, second = platform.engines.values()
        log = first.log("events")
        seqnum = await log.append(b"0", tags=["t"])

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(ReplayedCatalog, "seal", never)
        switching = asyncio.create_task(kinds_of(second).switch("events", "object-store"))
        async with asyncio.timeout(60):
            while "events" not in first.routes:  # noqa: ASYNC110 - the catalog is replayed
                await asyncio.sleep(0.005)
        found = await log.read_next("t")
        assert found is not None, "records of before are read"
        assert found.seqnum == seqnum
        assert await log.read_prev("t", found.seqnum) == found
        assert await log.read(seqnum) == found
        with pytest.raises(NotReadyError, match="is being switched"):
            await log.read_next("t", seqnum + 1)
        with pytest.raises(NotReadyError, match="is being switched"):
            await log.tail()
        with pytest.raises(NotReadyError, match="is being switched"):
            await log.append(b"1")
        switching.cancel()
        await asyncio.gather(switching, return_exceptions=True)


async def test_no_read_shows_a_record_that_the_bridge_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append that was under way is ordered after the end was read, before the bridge."""
    config = configured(tmp_path, engines=2, read_timeout_s=3.0)
    async with embedded(config) as platform:
        first, second = platform.engines.values()
        log = second.log("events")
        seqnum = await log.append(b"0", tags=["t"])
        going_on = ReplayedCatalog.bridge
        seen: list[object] = []

        async def late(self: ReplayedCatalog, *given: object, **named: object) -> None:
            await first.shared("events", Session()).append(b"late", tags=["t"])
            reads = [log.read_next("t", seqnum + 1, fresh=True), log.read_range("t", seqnum + 1)]
            reads += [log.read_prev("t", fresh=True)]
            seen.extend(await asyncio.gather(*reads, return_exceptions=True))
            await going_on(self, *given, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(ReplayedCatalog, "bridge", late)
        await kinds_of(first).switch("events", "object-store")
        assert [type(each) for each in seen] == [NotReadyError] * 3
        assert await log.read_next("t", seqnum + 1) is None
        assert (await log.append(b"1", tags=["t"]), data_of(await all_of(log))) == (
            (await all_of(log))[1].seqnum,
            [b"0", b"1"],
        )


async def test_the_time_of_a_log_does_not_go_back_to_a_slower_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with indilog.open(tmp_path) as client:
        await client.create_log("events", kind="object-store")
        log = client.log("events")
        await log.append(b"0")
        logs = await client._logs.kinds._opened["events", -1].logs()  # type: ignore[attr-defined]
        monkeypatch.setattr(logs.driver, "_clock", lambda: 4e9)
        await log.append(b"1")
        assert await log.now() >= 4e9
        await client.switch_log("events", "shared")
        await log.append(b"2")
        times = [record.ordered_at for record in await all_of(log)]
        assert times == sorted(times)
        assert times[-1] >= 4e9
        assert await log.now() >= 4e9
        assert await log.find_time(times[-1]) == 1, "the first one at this time"
        assert await log.find_time(times[-1] + 1) == await log.tail()
        assert await log.find_time(times[0]) == 0


async def test_the_last_record_of_a_trimmed_log_is_read_after_a_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the log is held, it is unknown whether a record follows the trimmed ones."""
    async with platform_with(tmp_path, engines=1) as platform:
        log = await filled(platform, ["object-store"])
        await log.trim(await log.tail())
        bridge = ReplayedCatalog.bridge
        is_sealing, may_end = asyncio.Event(), asyncio.Event()

        async def late(self: ReplayedCatalog, *given: object, **named: object) -> None:
            is_sealing.set()
            await may_end.wait()
            await bridge(self, *given, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(ReplayedCatalog, "bridge", late)
        switching = asyncio.create_task(kinds_of(platform.logs).switch("events", "owned"))
        await is_sealing.wait()
        appending = asyncio.create_task(log.append(b"x"))
        reading = asyncio.create_task(log.read_prev())
        with pytest.raises(TrimmedError):
            await log.read_prev(bound=0)  # the switch cannot change this answer
        assert not reading.done()
        may_end.set()
        await switching
        seqnum = await appending
        with suppress(TrimmedError):  # it may have been read before the append
            found = await reading
            assert found is not None
            assert found.seqnum == seqnum
