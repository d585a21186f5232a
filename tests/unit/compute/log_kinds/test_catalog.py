"""The catalog's layouts: each segment on storage nodes has its own."""

from __future__ import annotations

import msgspec
import pytest

from indilog.base.ids import NodeId
from indilog.base.log import Record, Session
from indilog.base.log_kinds import LogKind
from indilog.kernel.cell_layout import CellLayout, new_layout
from indilog.testing import MemoryLogs
from indilog_compute.log_kinds.catalog import ReplayedCatalog
from indilog_compute.log_kinds.catalog_records import (
    CATALOG_LOG,
    Laid,
    LogCatalogState,
    MovedCatalog,
    NewSegment,
)

pytestmark = pytest.mark.asyncio

NODES = [NodeId("storage-0"), NodeId("storage-1")]


def new_segment(folder: str, kind: LogKind = "order-first") -> NewSegment:
    return NewSegment(kind=kind, folder=folder, layout=new_layout(folder, NODES, 2))


def layout_of(of: NewSegment) -> CellLayout:
    assert of.layout is not None
    return of.layout


def catalog_of(logs: MemoryLogs, node: str = "engine-0") -> ReplayedCatalog:
    return ReplayedCatalog(logs, NodeId(node), lambda _: None)


async def switched(catalog: ReplayedCatalog, log: str, to: NewSegment) -> None:
    state = catalog.logs[log]
    await catalog.close(log, state.last, to, tail=0)
    await catalog.seal(log, state.last)
    await catalog.bridge(log, state.last, end=0, time=0.0)


async def test_layouts_of_two_segments_of_a_log_change_independently() -> None:
    logs = MemoryLogs()
    catalog = catalog_of(logs)
    one, two = new_segment("one"), new_segment("two", "owned")
    await catalog.create("events", one)
    await switched(catalog, "events", two)
    assert [each.folder for each in catalog.logs["events"].segments] == ["one", "two"]
    assert (catalog.layout("one"), catalog.layout("two")) == (one.layout, two.layout)
    second, third = layout_of(two).filled(2), layout_of(two).filled(3)
    assert await catalog.change_layout("two", layout_of(two), second)
    assert await catalog.change_layout("one", layout_of(one), layout_of(one).filled(2))
    assert await catalog.change_layout("two", second, third)
    other = catalog_of(logs, "engine-1")
    await other.catch_up()
    for each in (catalog, other):
        assert each.layout("one") == layout_of(one).filled(2)
        assert each.layout("two") == third
    assert not await other.change_layout("two", second, layout_of(two).filled(4))


async def test_of_two_layouts_after_one_the_first_is_recorded() -> None:
    logs = MemoryLogs()
    catalogs = [catalog_of(logs, node) for node in ("engine-0", "engine-1")]
    await catalogs[0].create("events", NewSegment(kind="shared"))
    await switched(catalogs[0], "events", first := new_segment("one"))
    await catalogs[1].catch_up()
    before = layout_of(first)
    assert await catalogs[1].change_layout("one", before, before.filled(2))
    assert not await catalogs[0].change_layout("one", before, before.filled(3))
    assert catalogs[0].layout("one") == before.filled(2)


async def test_an_abandoned_switch_leaves_no_layout() -> None:
    catalog = catalog_of(MemoryLogs())
    await catalog.create("events", NewSegment(kind="shared"))
    state = catalog.logs["events"]
    await catalog.close("events", state.last, new_segment("one"), tail=0)
    assert catalog.layout("one") == new_segment("one").layout
    await catalog.reopen("events", state.last)
    with pytest.raises(KeyError):
        catalog.layout("one")
    assert state.created.kind == "shared"


async def test_layouts_of_version_1_are_those_of_the_first_segment() -> None:
    logs = MemoryLogs()
    records = logs.log(CATALOG_LOG, Session())
    layout = new_layout("one", NODES, 2)
    created = {
        "type": "created", "version": 1, "log": "events", "kind": "order-first",
        "folder": "one", "creator": "engine-0", "layout": layout,
    }  # fmt: skip
    laid = {"type": "layout", "version": 1, "log": "events", "layout": layout.filled(2)}
    await records.append(msgspec.json.encode(created), tags=["events"])
    await records.append(msgspec.json.encode(laid), tags=["$layout:events"])
    catalog = catalog_of(logs)
    await catalog.catch_up()
    assert catalog.layout("one") == layout.filled(2)
    assert await catalog.change_layout("one", layout.filled(2), layout.filled(3))
    again = catalog_of(logs)
    await again.catch_up()
    assert again.layout("one") == layout.filled(3)


async def freed(catalog: ReplayedCatalog, log: str, count: int) -> bool:
    """Free the oldest segments of a log, and trim what the record supersedes."""
    state = catalog.logs[log]
    left, gone = state.segments[count:], state.segments[:count]
    done = await catalog.free(log, segments=left, unreleased=(*state.unreleased, *gone))
    await catalog.shorten(log, [])
    return done


async def test_a_freed_log_is_the_same_for_nodes_that_read_earlier_records_and_for_others() -> None:
    logs = MemoryLogs()
    one, other = catalog_of(logs), catalog_of(logs, "engine-1")
    await one.create("events", new_segment("one"))
    await switched(one, "events", second := new_segment("two", "owned"))
    await other.catch_up()
    first_layout = layout_of(second)
    assert await one.change_layout("two", first_layout, first_layout.filled(2))
    await switched(one, "events", new_segment("three"))
    assert await freed(one, "events", 1)
    late = catalog_of(logs, "engine-2")
    assert await one.change_layout("two", first_layout.filled(2), first_layout.filled(3))
    for each in (other, late):
        await each.catch_up()
        expected = msgspec.structs.replace(
            one.logs["events"], position=each.logs["events"].position
        )
        assert each.logs["events"] == expected
        assert each.layout("one") == new_segment("one").layout, "its storage is not released"
        assert each.layout("two") == first_layout.filled(3)
        assert each.layout("three") == new_segment("three").layout
        assert each.last == one.last, "each node has to follow, also that which freed"
    assert [each.folder for each in late.logs["events"].segments] == ["two", "three"]
    assert await late.change_layout("two", first_layout.filled(3), first_layout.filled(4))
    await switched(late, "events", new_segment("four"))
    await one.catch_up()
    assert [each.folder for each in one.logs["events"].segments] == ["two", "three", "four"]
    assert one.logs["events"].switches == 3


async def test_layouts_of_released_segments_are_forgotten() -> None:
    logs = MemoryLogs()
    catalog, other = catalog_of(logs), catalog_of(logs, "engine-1")
    await catalog.create("events", first := new_segment("one"))
    await other.catch_up()
    layout = layout_of(first)
    assert await catalog.change_layout("one", layout, layout.filled(2))
    await switched(catalog, "events", NewSegment(kind="shared"))
    assert await freed(catalog, "events", 1)
    await catalog.forget_layouts("one")
    state = catalog.logs["events"]
    assert await catalog.free("events", segments=state.segments, unreleased=())
    await catalog.shorten("events", [])
    assert not await other.change_layout("one", layout, layout.filled(3))
    late = catalog_of(logs, "engine-2")
    for each in (catalog, late):
        await each.catch_up()
        assert each._state.layouts == {}
    assert len(await logs.log(CATALOG_LOG, Session()).read_range()) == 1


async def test_of_a_switch_and_a_record_that_frees_the_first_is_recorded() -> None:
    logs = MemoryLogs()
    catalog, other = catalog_of(logs), catalog_of(logs, "engine-1")
    await catalog.create("events", new_segment("one"))
    await switched(catalog, "events", NewSegment(kind="shared"))
    await other.catch_up()
    last = other.logs["events"].last
    assert await freed(catalog, "events", 1)
    await other.close("events", last, new_segment("two"), tail=0)
    assert other.logs["events"].switch is None
    await other.close("events", other.logs["events"].last, new_segment("two"), tail=0)
    assert not await freed(catalog, "events", 0) or catalog.logs["events"].switch is not None
    assert catalog.logs["events"].switch is not None


async def test_announcements_that_are_needed_are_kept() -> None:
    logs = MemoryLogs()
    catalogs = [catalog_of(logs, f"engine-{n}") for n in range(3)]
    await catalogs[0].create("events", new_segment("one"))
    for _ in range(2):
        for each in (2, 1, 1):
            await catalogs[each].announce(0)
    await switched(catalogs[0], "events", NewSegment(kind="shared"))
    await catalogs[0].free("events", segments=catalogs[0].logs["events"].segments, unreleased=())
    nodes = [NodeId("engine-1"), NodeId("engine-2")]
    await catalogs[0].shorten("events", nodes)
    late = catalog_of(logs, "engine-3")
    await late.catch_up()
    assert all(late.has_followed(node, 0) for node in nodes)
    assert late.reads_freed(nodes)
    assert not late.reads_freed([*nodes, NodeId("engine-4")])
    announcements = await logs.log(CATALOG_LOG, Session()).read_range("$followed", bound=4)
    assert len(announcements) == 3, "the last one of engine-2, and those after it"


async def test_the_record_of_a_freed_log_is_rewritten_for_other_places() -> None:
    logs = MemoryLogs()
    catalog = catalog_of(logs)
    await catalog.create("events", new_segment("one"))
    await switched(catalog, "events", second := new_segment("two"))
    assert await catalog.change_layout("two", layout_of(second), layout_of(second).filled(5))
    third = NewSegment(kind="object-store", place="/a", folder="three", stripes=9)
    await switched(catalog, "events", third)
    assert await freed(catalog, "events", 1)
    moved = MovedCatalog(
        {
            "two": new_segment("new two"),
            "three": NewSegment(kind="object-store", place="/b", folder="new three", stripes=16),
        }
    )
    rewritten = LogCatalogState(NodeId(""), lambda _: None)
    for record in await logs.log(CATALOG_LOG, Session()).read_range():
        data = moved.rewritten(record.data)
        assert b"one" not in data.replace(b"none", b"")
        rewritten.take(Record(record.seqnum, record.names, data, 0.0, 0.0), 0)
    state = rewritten.logs["events"]
    assert [(each.place, each.folder) for each in state.segments] == [
        ("", "new two"), ("/b", "new three"),
    ]  # fmt: skip
    assert state.unreleased == ()
    assert state.created.info.stripes == 16
    assert {folder: each.layout for folder, each in rewritten.layouts.items()} == {
        "new two": layout_of(new_segment("new two"))
    }


async def test_the_records_of_a_catalog_are_rewritten_for_other_places() -> None:
    logs = MemoryLogs()
    catalog = catalog_of(logs)
    await catalog.create("events", old := new_segment("one"))
    assert await catalog.change_layout("one", layout_of(old), layout_of(old).filled(2))
    await catalog.close("events", catalog.logs["events"].last, NewSegment(kind="shared"), tail=0)
    await catalog.reopen("events", catalog.logs["events"].last)
    await switched(catalog, "events", NewSegment(kind="object-store", place="/a", folder="two"))
    await catalog.close("events", catalog.logs["events"].last, new_segment("three"), tail=0)
    first = Laid(version=1, log="events", layout=layout_of(old).filled(3))
    log = logs.log(CATALOG_LOG, Session())
    await log.append(msgspec.json.encode(first))
    await log.append(b"not understood")
    moved = MovedCatalog(
        {
            "one": new_segment("new one"),
            "two": NewSegment(kind="object-store", place="/b", folder="new two"),
            "three": new_segment("new three"),
        }
    )
    rewritten = LogCatalogState(NodeId(""), lambda _: None)
    changed: list[tuple[list[bytes], bool]] = []
    for record in await log.read_range():
        data = moved.rewritten(record.data)
        changed.append((record.data.split(b'"')[3:4], data != record.data))
        rewritten.take(Record(record.seqnum, record.names, data, 0.0, 0.0), 0)
    assert changed == [
        ([b"created"], True),
        ([b"layout"], True),
        ([b"closing"], False),  # to `shared`, which has no place
        ([b"reopened"], False),
        ([b"closing"], True),
        ([b"sealing"], False),
        ([b"switched"], False),
        ([b"closing"], True),
        ([b"layout"], True),
        ([], False),
    ]
    state = rewritten.logs["events"]
    assert [(each.place, each.folder) for each in state.segments] == [
        ("", "new one"), ("/b", "new two"),
    ]  # fmt: skip
    assert state.switch is not None
    assert state.switch.folder == "new three"
    assert {folder: each.layout for folder, each in rewritten.layouts.items()} == {
        name: layout_of(new_segment(name)) for name in ("new one", "new three")
    }
