"""Claims about what an index node forgets because storage has discarded it (ARCHITECTURE 13)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from indilog.base.ids import Epoch, Instant, ShardId
from indilog.kernel.metalog import Floor
from indilog.roles.role import Effect, Received, Send
from indilog.wire.messages import IndexData
from indilog.wire.tag_messages import Discarded, DiscardedWanted, TagFloors
from indilog_index.index_node import IndexNode
from tests.unit.index_tier.test_index_node import (
    LOG,
    T0,
    A,
    B,
    answers,
    block,
    data,
    index_node,
    lookup,
    reasons,
    tags,
)


def questions(effects: Sequence[Effect]) -> list[tuple[str, DiscardedWanted]]:
    return [
        (e.to, e.message)
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, DiscardedWanted)
    ]


def runs_of(message: DiscardedWanted) -> list[list[int]]:
    return np.frombuffer(message.runs, np.uint64).reshape(-1, 2).tolist()


def said(*runs: tuple[int, int], end: int, trims: int = 1, copy_of: int = 0) -> Discarded:
    columns = np.array(runs, np.uint64).tobytes()
    return Discarded(ShardId(0), columns, end, trims, Epoch(copy_of))


def grown() -> tuple[IndexNode, list[Effect]]:
    """Four records of shard 0 at 0 to 3 and two at 6 and 7; each has a tag of its own, one is
    trimmed.
    """
    node = index_node(index_forget_entries_min=4)
    first = block(1, 4, [0], tags(0, *((LOG, 10 + n) for n in range(4))))
    second = block(3, 8, [0], tags(6, (LOG, 16), (LOG, 17)))
    floor = TagFloors(0, 1, (Floor(11, 2, of_log=False), Floor(12, 3, of_log=False)))
    effects = node.handle([data(first, second), Received(A, floor, Epoch(1))], T0)
    return node, effects


def swept(node: IndexNode, now: float = T0) -> None:
    for _ in range(20):
        now += 0.01
        node.handle([], Instant(now))


def find(node: IndexNode, tag: int) -> list[tuple[int, ...]]:
    return answers(node.handle([lookup(0, position=5, tag=tag, count=9)], T0))


def test_an_index_that_has_grown_asks_what_was_discarded_and_forgets_it() -> None:
    node, effects = grown()
    ((replica, question),) = questions(effects)
    assert (replica, question.shard, runs_of(question)) == (A, 0, [[0, 4], [6, 8]])
    entries = node.status()["entries"]
    assert node.handle([Received(A, said((1, 3), end=8), Epoch(1))], T0) == []
    swept(node)
    assert find(node, LOG) == [(0, 3, 6, 7)]
    assert node.status()["entries"] == entries - 2, "those of the trimmed tags were gone before"
    assert node.status()["discarded"] == 2
    assert questions(node.handle([], Instant(T0 + 1))) == [], "not before it has grown further"


def test_runs_without_records_are_dropped() -> None:
    node, _ = grown()
    third = block(5, 9, [0], tags(8, (LOG, 18)))
    node.handle([data(third), Received(A, said((0, 4), end=8), Epoch(1))], T0)
    swept(node)
    assert node.status()["spans"] == 1
    assert answers(node.handle([lookup(0, position=7, tag=0, count=9)], T0)) == [(6, 7, 8)]


def test_an_index_without_trims_asks_nothing() -> None:
    node = index_node(index_forget_entries_min=4)
    first = block(1, 9, [0], tags(0, *((LOG, 10 + n) for n in range(9))))
    assert questions(node.handle([data(first)], T0)) == []


def test_the_next_question_begins_where_an_incomplete_answer_ended() -> None:
    node, _ = grown()
    ((_, further),) = questions(node.handle([Received(A, said((1, 2), end=2), Epoch(1))], T0))
    assert runs_of(further) == [[2, 4], [6, 8]]
    node.handle([Received(A, said((6, 7), end=8), Epoch(1))], T0)
    swept(node)
    assert find(node, LOG) == [(0, 2, 3, 7)]


def test_nothing_is_forgotten_for_trims_that_are_not_known_here() -> None:
    """A lookup that does not know of the trim would answer that there never was a record."""
    node, _ = grown()
    node.handle([Received(A, said((1, 3), end=8, trims=2), Epoch(1))], T0)
    swept(node)
    assert find(node, LOG) == [(0, 1, 2, 3, 6, 7)]


def test_nothing_is_forgotten_for_another_copy_of_the_metalog() -> None:
    """In another copy the same seqnums may be other records."""
    node, _ = grown()
    node.handle([Received(A, said((1, 3), end=8, copy_of=2), Epoch(1))], T0)
    swept(node)
    assert find(node, LOG) == [(0, 1, 2, 3, 6, 7)]


def test_only_what_was_asked_about_is_forgotten() -> None:
    node, _ = grown()
    node.handle([Received(B, said((1, 3), end=8), Epoch(1))], T0)
    swept(node)
    assert find(node, LOG) == [(0, 1, 2, 3, 6, 7)], "of a node that was not asked"
    node, _ = grown()
    node.handle([Received(A, said((3, 7), end=8), Epoch(1))], T0)
    swept(node)
    assert find(node, LOG) == [(0, 1, 2, 3, 6, 7)], "across a gap"
    node, _ = grown()
    wrong = node.handle([Received(A, said((3, 1), end=8), Epoch(1))], T0)
    assert reasons(wrong) == ["an answer about other records than were asked about"]


def test_a_silent_storage_node_does_not_keep_the_index_from_asking_later() -> None:
    node, _ = grown()
    later = Instant(T0 + 1.0)
    assert questions(node.handle([], later)) == [], "the shard has no other replica"
    third = block(5, 20, [0], tags(8, *((LOG, 20 + n) for n in range(12))))
    floor = TagFloors(1, 2, (Floor(20, 9, of_log=False),))
    effects = node.handle([data(third), Received(A, floor, Epoch(1))], later)
    ((_, question),) = questions(effects)
    assert runs_of(question) == [[0, 4], [6, 20]]


def test_nothing_is_forgotten_for_trims_of_a_copy_whose_trims_are_not_known_here() -> None:
    """Three trims of incarnation 1 are known; incarnation 2 lost two of them and has another one.

    Two is less than three, but the node does not know the second trim of incarnation 2.
    """
    node = index_node(index_forget_entries_min=4)
    first = block(1, 4, [0], tags(0, *((LOG, 10 + n) for n in range(4))))
    proposed = msgspec.structs.replace(first, epoch=Epoch(1))
    floors = TagFloors(0, 3, (Floor(99, 2, of_log=False),), epoch=Epoch(1), copy_of=Epoch(1))
    arrived = Received(A, IndexData((proposed,), Epoch(1)), Epoch(1))
    ((_, question),) = questions(node.handle([arrived, Received(A, floors, Epoch(1))], T0))
    assert runs_of(question) == [[0, 4]]
    confirmed = IndexData((msgspec.structs.replace(proposed, parts=()),), Epoch(2))
    node.handle([Received(A, confirmed, Epoch(1))], T0)
    answer = Received(A, said((1, 2), end=4, trims=2, copy_of=2), Epoch(1))
    node.handle([answer], T0)
    swept(node)
    assert node.status()["discarded"] == 0
    same = TagFloors(
        3, 3, (), epoch=Epoch(1), previous=Epoch(1), copy_of=Epoch(2)
    )  # incarnation 2 has the three trims
    node.handle([Received(A, same, Epoch(1)), answer], T0)
    assert node.status()["discarded"] == 1


def test_a_repeated_answer_to_an_earlier_page_ends_nothing() -> None:
    node, _ = grown()
    early = Received(A, said((1, 2), end=2), Epoch(1))
    ((_, further),) = questions(node.handle([early], T0))
    assert runs_of(further) == [[2, 4], [6, 8]]
    assert node.handle([early], T0) == []
    node.handle([Received(A, said((6, 7), end=8), Epoch(1))], T0)
    assert node.status()["discarded"] == 2, "the second page was awaited still"
