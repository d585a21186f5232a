"""Segments of a switched log that are trimmed are freed: what stays, what reads answer, crashes."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    IndilogError,
    NotReadyError,
    TrimmedError,
)
from indilog.base.log import After, Entry, Log, Record, Session
from indilog.base.log_kinds import LOG_KINDS, SHARED, LogKind
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog_cells import releasing
from indilog_cells.log import CellLog
from indilog_cells.object_store import DirectoryStore
from indilog_compute.local_log import LocalLogs
from indilog_compute.log_kinds import kinds as log_kinds
from indilog_compute.log_kinds.catalog import ReplayedCatalog
from indilog_compute.log_kinds.catalog_records import CATALOG_LOG, CreatedLogState
from indilog_compute.log_kinds.kinds import LogKinds
from tests.cells.switching import kinds_of, platform_with
from tests.cells.test_log_kinds import configured, trimmed
from tests.contract.reading import all_of, data_of
from tests.support.repeated import repeated

pytestmark = pytest.mark.asyncio

OTHERS: list[LogKind] = [kind for kind in LOG_KINDS if kind != SHARED]


def serving(platform: Platform) -> LogKinds:
    """Return the kinds of the node that frees."""
    (found,) = [kinds_of(logs) for logs in platform.engines.values() if kinds_of(logs).serves()]
    return found


def state_of(kinds: LogKinds) -> CreatedLogState:
    return kinds._catalog.logs["events"]


async def filled(logs: LocalLogs, kinds: list[LogKind], *, each: int = 3) -> Log:
    """Switch a log to each of the kinds, and append to each segment."""
    log = logs.log("events")
    for kind in kinds:
        await kinds_of(logs).switch("events", kind)
        for n in range(each):
            await log.append(b"%s %d" % (kind.encode(), n), tags=["t", f"n{n}"])
    return log


def rows_in(directory: Path) -> dict[str, int]:
    """Return how many rows the files of storage nodes have, by table."""
    found: dict[str, int] = {}
    for path in directory.glob("**/cells/*.sqlite3"):
        with closing(sqlite3.connect(path)) as file:
            for table in ("spaces", "floors", "cells"):
                (count,) = file.execute(f"SELECT count(*) FROM {table}").fetchone()
                found[table] = found.get(table, 0) + count
    return found


@pytest.mark.parametrize("engines", [1, 2])
async def test_what_is_kept_of_a_log_that_is_switched_repeatedly_is_bounded(
    tmp_path: Path, engines: int
) -> None:
    kept = []
    async with platform_with(tmp_path, engines=engines) as platform:
        for _ in range(3):
            log = await filled(platform.logs, [*OTHERS, SHARED, *OTHERS, SHARED])
            await log.trim(await log.tail())
            await serving(platform)._free_once()
            catalog = platform.logs.shared(CATALOG_LOG, Session())
            objects = [path for path in (tmp_path / "objects").glob("[!.]*/**/*") if path.is_file()]
            kept.append(
                {
                    "records": len(await all_of(catalog)),
                    "segments": len(state_of(serving(platform)).segments),
                    "open": len(serving(platform)._opened),
                    "layouts": len(serving(platform)._catalog._state.layouts),
                    "bytes of cells": sum(p.stat().st_size for p in objects if p.name != "LOG"),
                    "objects": len(objects) if engines == 1 else 0,
                    **rows_in(tmp_path),
                }
            )
        assert kept[1] == kept[2]
        assert kept[2] == {
            "records": kept[2]["records"], "segments": 1, "open": 0, "layouts": 0,
            "bytes of cells": 0, "objects": 0, "spaces": 0, "floors": 0, "cells": 0,
        }  # fmt: skip
        assert kept[2]["records"] <= 2 * (1 + engines)


async def told(call: Callable[[], Awaitable[object]]) -> object:
    """Return the answer of a call, or its error."""
    try:
        return await call()
    except IndilogError as error:
        return type(error), str(error), vars(error)


async def answers(log: Log, tail: int) -> list[object]:
    """Return what calls about all seqnums answer."""
    last = await log.read_prev("t")
    assert last is not None
    found: list[object] = [await log.tail(), await told(partial(log.read_prev, "none"))]
    for seqnum in range(tail + 1):
        found += [
            await told(partial(log.read, seqnum)),
            await told(partial(log.set_aux, seqnum, b"a")),
        ]
        for tag in (None, "t", "n1", "none"):
            found.append(await told(partial(log.read_next, tag, seqnum)))
            found.append(await told(partial(log.read_prev, tag, seqnum)))
            found.append(await told(partial(log.read_range, tag, seqnum)))
        if seqnum < last.seqnum:
            refused = partial(log.append_batch, [Entry(b"x", ["t"])], after=After("t", seqnum))
            found.append(await told(refused))
    return found


@pytest.mark.parametrize("kind", LOG_KINDS)
@pytest.mark.parametrize("trims", [repeated("to the end"), repeated("into the next one"), "a tag"])
async def test_calls_are_answered_as_before_a_segment_was_freed(
    tmp_path: Path, kind: LogKind, trims: str
) -> None:
    """The same answers and errors below the floor, in each session and on each node."""
    async with platform_with(tmp_path, engines=2) as platform:
        await kinds_of(platform.logs).create("events", kind)
        log = platform.logs.log("events")
        await log.append(b"first", tags=["t"])
        others = [each for each in ("object-store", "owned") if each != kind]
        log = await filled(platform.logs, others)  # type: ignore[arg-type]
        end = state_of(serving(platform)).segments[0].end
        await log.trim(end + 2 if trims == "into the next one" else end)
        if trims == "a tag":
            await log.trim(end + 1, tag="t")
        tail = await log.tail()
        logs = [each.log("events") for each in platform.engines.values()]
        before = [await answers(each, tail) for each in logs]
        await serving(platform)._free_once()
        assert len(state_of(serving(platform)).segments) == len(others)
        logs += [each.log("events") for each in platform.engines.values()]
        for each, expected in zip(logs, before * 2, strict=True):
            assert await answers(each, tail) == expected
    async with platform_with(tmp_path, engines=2) as platform:  # aux data is not kept
        for engine, expected in zip(platform.engines.values(), before, strict=True):
            assert repr(await answers(engine.log("events"), tail)) == repr(expected)


def closed(kinds: LogKinds) -> bool:
    """Whether nothing is kept of the closed segments."""
    state = state_of(kinds)
    return len(state.segments) == 1 and not state.unreleased


STEPS: list[tuple[type | ModuleType, str]] = [
    (ReplayedCatalog, "free"),
    (ReplayedCatalog, "shorten"),
    (LogKinds, "_wait_for_nodes"),
    (releasing, "_drop_spaces"),
    (DirectoryStore, "delete_folder"),
    (ReplayedCatalog, "forget_layouts"),
]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1])
@pytest.mark.parametrize("repeats", [1, repeated(2)])
async def test_a_crash_between_two_steps_is_continued(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[type | ModuleType, str],
    is_done: bool,
    repeats: int,
) -> None:
    """The process ends before or after a step, the first time or the second time."""
    owner, name = step
    work, left = getattr(owner, name), repeats

    async def crashing(*given: object, **named: object) -> object:
        nonlocal left
        left -= 1
        found = await work(*given, **named) if left or is_done else None
        if not left:
            raise CrashedError
        return found

    async with platform_with(tmp_path, engines=1) as platform:
        log = await filled(platform.logs, [*OTHERS, *OTHERS, SHARED])
        layout = serving(platform)._catalog.layout
        folder = next(s.folder for s in state_of(serving(platform)).segments if s.kind == "owned")
        await serving(platform)._catalog.change_layout(folder, layout(folder), layout(folder))
        tail = await log.tail()
        await log.trim(tail)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, crashing)
            with suppress(CrashedError):
                await serving(platform)._free_once()
            assert left <= 0 or (owner, name) == STEPS[2], "the step was not reached"
    async with platform_with(tmp_path, engines=1) as platform:
        await serving(platform)._free_once()
        assert closed(serving(platform))
        assert not any(rows_in(tmp_path).values())
        assert not [path for path in (tmp_path / "objects").glob("[!.]*/**/*") if path.is_file()]
        log = platform.logs.log("events")
        with pytest.raises(TrimmedError) as error:
            await log.read(0)
        assert error.value.first_seqnum == tail
        assert await log.append(b"next", tags=["t"]) >= tail
        assert data_of(await log.read_range("t", tail)) == [b"next"]


class CrashedError(Exception):
    """The process ends here."""


async def test_waiting_reads_and_subscriptions_follow(tmp_path: Path) -> None:
    """Those at the end continue; those below the floor get an error."""
    async with platform_with(tmp_path, engines=2) as platform:
        log = await filled(platform.logs, ["object-store", "owned"])
        tail = await log.tail()
        logs = [each.log("events") for each in platform.engines.values()]
        below = [asyncio.create_task(each.read_next("none", wait=60)) for each in logs]
        at_end = [asyncio.create_task(each.read_next("t", tail, wait=60)) for each in logs]
        following = [asyncio.create_task(first_record(each, tail)) for each in logs]
        await asyncio.sleep(0.05)
        await log.trim(tail)
        await serving(platform)._free_once()
        async with asyncio.timeout(60):
            for waiting in below:
                with pytest.raises(TrimmedError) as error:
                    await waiting
                assert error.value.first_seqnum == tail
            for each in logs:
                with pytest.raises(TrimmedError):
                    await anext(each.subscribe("t", tail - 1))
            assert await log.append(b"x", tags=["t"]) == tail
            found = await asyncio.gather(*at_end, *following)
        assert [record.seqnum for record in found if record is not None] == [tail] * 4


async def first_record(log: Log, bound: int) -> Record:
    """Return the first record of a subscription."""
    return await anext(aiter(log.subscribe("t", bound)))


async def test_nothing_is_deleted_before_all_nodes_have_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_kinds, "_FOLLOW_S", 0.2)
    async with platform_with(tmp_path, engines=2) as platform:
        log = await filled(platform.logs, ["owned", "object-store", "shared"])
        before = rows_in(tmp_path)
        late = next(k for k in map(kinds_of, platform.engines.values()) if not k.serves())
        announce = late._catalog.announce
        may_announce = asyncio.Event()

        async def waiting(seqnum: int) -> None:
            await may_announce.wait()
            await announce(seqnum)

        monkeypatch.setattr(late._catalog, "announce", waiting)
        await log.trim(await log.tail())
        with pytest.raises(NotReadyError, match=f"{late.node} did not answer about log events"):
            await serving(platform)._free_once()
        state = state_of(serving(platform))
        assert [each.kind for each in state.unreleased] == ["owned", "object-store"]
        assert rows_in(tmp_path)["spaces"] == before["spaces"]
        may_announce.set()
        monkeypatch.setattr(log_kinds, "_FOLLOW_S", 60.0)
        await serving(platform)._free_once()
        assert closed(serving(platform))
        assert not any(rows_in(tmp_path).values())


async def test_nothing_is_freed_while_a_node_has_an_earlier_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier release announces no version, because it knows none."""
    async with platform_with(tmp_path, engines=2) as platform:
        log = await filled(platform.logs, ["owned", "shared"])
        await log.trim(await log.tail())
        earlier = next(k for k in map(kinds_of, platform.engines.values()) if not k.serves())
        catalog = platform.logs.shared(CATALOG_LOG, Session())
        last = await catalog.read_prev()
        assert last is not None
        known = b'{"type":"followed","version":1,"node":"%s","seqnum":%d}'
        await catalog.append(known % (earlier.node.encode(), last.seqnum), tags=["$followed"])
        await serving(platform)._catalog.catch_up()
        count = len(await all_of(catalog))
        await serving(platform)._free_once()
        assert len(state_of(serving(platform)).segments) == 3
        assert len(await all_of(catalog)) == count
        await earlier._catalog.announce(last.seqnum)
        await serving(platform)._catalog.catch_up()
        await serving(platform)._free_once()
        assert closed(serving(platform))


async def test_an_append_to_a_segment_that_is_freed_meanwhile_has_an_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with platform_with(tmp_path, engines=1) as platform:
        await kinds_of(platform.logs).create("events", "object-store")
        log = platform.logs.log("events")
        append = CellLog.append
        done, may_return = asyncio.Event(), asyncio.Event()

        async def slow(self: CellLog, data: bytes, *, tags: Iterable[str] = ()) -> int:
            seqnum = await append(self, data, tags=tags)
            done.set()
            await may_return.wait()
            return seqnum

        with monkeypatch.context() as patch:
            patch.setattr(CellLog, "append", slow)
            appending = asyncio.create_task(log.append(b"x"))
            await done.wait()
        await kinds_of(platform.logs).switch("events", "shared")
        await log.trim(await log.tail())
        await serving(platform)._free_once()
        assert closed(serving(platform))
        may_return.set()
        with pytest.raises(AppendOutcomeUnknownError, match="switched to another kind and trimmed"):
            await appending


async def test_segments_are_freed_by_policies_in_the_background_and_after_restarts(
    tmp_path: Path,
) -> None:
    """The last segment is `shared`, so no log of another kind is left."""
    config = configured(tmp_path, retention_interval_s=0.05)
    for _ in range(2):
        async with embedded(config) as platform:
            log = await filled(platform.logs, ["object-store", "owned", "shared"], each=10)
            await log.set_retention(size_bytes=100)
            async with asyncio.timeout(60):
                while not closed(serving(platform)):  # noqa: ASYNC110 - the platform frees
                    await asyncio.sleep(0.01)
    async with embedded(config) as platform:
        log = platform.logs.log("events")
        last = await log.read_prev()
        assert last is not None
        for n in range(10):
            await log.append(b"%d" % n * 50)
        async with asyncio.timeout(60):
            while await trimmed(log) <= last.seqnum:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
