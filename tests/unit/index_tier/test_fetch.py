"""Claims about fetching index data from storage."""

from __future__ import annotations

import pytest

from indilog.base.ids import NodeId, ShardId
from indilog.kernel.index_schedule import NO_POSITION, IndexPositions, PositionRange
from indilog.kernel.placement import Placement
from indilog.kernel.view import view_of
from indilog.roles.role import Send
from indilog.wire.messages import IndexBlock, IndexDataWanted
from indilog_index.fetch import Fetch, sources_of

A, B = NodeId("storage-0"), NodeId("storage-1")
FAR = 10_000


def blocks(*positions: int) -> tuple[IndexBlock, ...]:
    return tuple(IndexBlock(position, 100, (ShardId(0),), ()) for position in positions)


def fetch(*, end: int = FAR) -> Fetch:
    """Two sources, positions 1, 4, 7, ..."""
    positions = IndexPositions([PositionRange(1, NO_POSITION, 3)])
    return Fetch((A, B), start=1, end=end, positions=positions)


def ask(source: NodeId, start: int, end: int = FAR) -> Send:
    return Send(source, IndexDataWanted(start, end, 3))


@pytest.mark.parametrize(
    ("storage_nodes", "replicas", "engines"), [(1, 1, 1), (3, 2, 4), (4, 1, 4), (5, 3, 2)]
)
def test_sources_keep_every_shard_and_every_replica_is_asked(
    storage_nodes: int, replicas: int, engines: int
) -> None:
    view = view_of(storage_nodes=storage_nodes, replicas=replicas, engines=engines)
    asked: set[tuple[NodeId, ShardId]] = set()
    for attempt in range(storage_nodes):
        sources = sources_of(Placement(view), view.storage_nodes, attempt)
        kept = {(node, s) for node in sources for s in view.shards_of(node)}
        assert {shard for _, shard in kept} == set(view.shards)
        asked |= kept
    assert asked == {(n, s) for n in view.storage_nodes for s in view.shards_of(n)}


def test_no_more_sources_are_asked_than_needed() -> None:
    view = view_of(storage_nodes=2, replicas=2, engines=2)
    sources = (sources_of(Placement(view), view.storage_nodes, n) for n in range(3))
    assert list(sources) == [(A,), (B,), (A,)]


def test_every_source_is_asked_for_the_first_page() -> None:
    assert fetch().first_pages() == [ask(A, 1), ask(B, 1)]


def test_each_source_is_asked_for_the_page_after_its_own_last_one() -> None:
    pages = fetch()
    assert pages.on_answer(A, blocks(1, 4, 7), 1, FAR) == [ask(A, 10)]
    assert pages.on_answer(B, blocks(1), 1, FAR) == [ask(B, 4)]
    assert not pages.over


def test_a_fetch_ends_when_no_source_has_anything_new() -> None:
    pages = fetch()
    assert pages.on_answer(A, (), 1, FAR) == []
    assert not pages.over
    assert pages.on_answer(B, blocks(1, 4), 7, FAR) == []
    assert pages.over


def test_a_fetch_ends_at_its_last_position() -> None:
    pages = fetch(end=8)
    assert pages.on_answer(A, blocks(1, 4), 1, FAR) == [ask(A, 7, 8)]
    assert pages.on_answer(A, blocks(7), 1, FAR) == []
    assert pages.on_answer(B, blocks(1, 4, 7), 1, FAR) == []
    assert pages.over


def test_index_data_that_was_not_requested_is_no_answer() -> None:
    pages = fetch()
    assert not pages.is_answer(A, blocks(40))
    assert not pages.is_answer(NodeId("storage-9"), blocks(1))
    pages.on_answer(A, blocks(1, 4), 1, FAR)
    assert not pages.is_answer(A, blocks(1, 4))


def test_a_source_that_is_too_far_ahead_is_paused_until_there_is_room() -> None:
    pages = fetch()
    assert pages.on_answer(A, blocks(1, 4, 7), 1, 7) == []
    assert not pages.is_answer(A, blocks(7))
    assert pages.resume(4) == [ask(A, 7)]
    assert pages.resume(4) == []


def test_a_paused_source_is_not_asked_for_positions_known_meanwhile() -> None:
    pages = fetch()
    pages.on_answer(A, blocks(1, 4, 7), 1, 7)
    assert pages.resume(13) == [ask(A, 13)]
