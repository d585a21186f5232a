"""Trims in an index node (PITFALLS A22): the answer is exact at every index shard, and
noticed when lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from indilog.base.ids import Epoch, Instant, NodeId, TagHash
from indilog.kernel.metalog import Floor, FloorCursor
from indilog.roles.role import Effect, Received, Send
from indilog.wire.messages import (
    IndexAnswer,
)
from indilog.wire.tag_messages import TagFloors, TagFloorsWanted
from tests.unit.index_tier.test_index_node import LOG, T0, TAG, A, B, data, index_node, lookup, one


def trims(number: int, *floors: Floor, sender: NodeId = A) -> Received:
    return Received(sender, TagFloors(number, number + 1, floors), Epoch(1))


def answer_of(effects: Sequence[Effect]) -> IndexAnswer | None:
    sent = [e.message for e in effects if isinstance(e, Send)]
    found = [message for message in sent if isinstance(message, IndexAnswer)]
    return found[0] if found else None


def asks(effects: Sequence[Effect]) -> list[tuple[NodeId, int]]:
    return [
        (e.to, e.message.after.tag)
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, TagFloorsWanted)
    ]


def lookup_after(known: int, bound: int) -> Received:
    asked = lookup(bound, position=3)
    message = msgspec.structs.replace(asked.message, log=LOG, trims=known)
    return Received(asked.sender, message, Epoch(1))


def test_a_lookup_waits_until_all_trims_that_it_knows_of_are_here() -> None:
    node = index_node()
    node.handle([data(one(1, 4))], T0)
    assert answer_of(node.handle([lookup_after(1, 4)], T0)) is None
    answer = answer_of(node.handle([trims(0, Floor(TAG, 5, of_log=False))], T0))
    assert answer is not None
    assert (answer.seqnums, answer.floor, answer.exact) == ((), 5, False)


def test_the_floor_of_the_log_holds_for_its_tags_before_they_are_swept() -> None:
    node = index_node()
    node.handle([data(one(1, 4)), trims(0, Floor(LOG, 5, of_log=True))], T0)
    answer = answer_of(node.handle([lookup_after(1, 4)], T0))
    assert answer is not None
    assert (answer.seqnums, answer.floor, answer.log_floor) == ((), 5, 5)


def test_an_answer_names_the_position_of_its_floors() -> None:
    node = index_node()
    reported = TagFloors(0, 1, (Floor(TAG, 5, of_log=False),), position=9)
    node.handle([data(one(1, 4)), Received(A, reported, Epoch(1))], T0)
    node.handle([Received(B, TagFloors(0, 1, reported.floors, position=7), Epoch(1))], T0)
    answer = answer_of(node.handle([lookup_after(1, 4)], T0))
    assert answer is not None
    assert (answer.floor, answer.position) == (5, 9)


def test_a_lost_trim_is_noticed_by_the_next_and_all_floors_are_fetched() -> None:
    node = index_node()
    node.handle([trims(1, Floor(9, 2, of_log=False))], T0)
    assert node.status()["trims"] == 0
    due = node.deadline()
    assert due is not None
    ((source, after),) = asks(node.handle([], due))
    assert after == 0
    page = TagFloors(None, 2, (Floor(7, 3, of_log=False),), last=False)
    assert asks(node.handle([Received(source, page, Epoch(1))], due)) == [(source, 7)]
    last = TagFloors(None, 5, (Floor(9, 2, of_log=False),), FloorCursor(tag=TagHash(7)))
    node.handle([Received(source, last, Epoch(1))], due)
    assert node.status()["trims"] == 2, "as many as the first page covered"


def test_a_page_of_a_node_that_knows_fewer_trims_than_the_first_promises_no_more() -> None:
    node = index_node()
    node.handle([trims(2, Floor(9, 2, of_log=False))], T0)
    due = node.deadline()
    assert due is not None
    ((source, _),) = asks(node.handle([], due))
    page = TagFloors(None, 3, (Floor(7, 3, of_log=False),), last=False)
    assert asks(node.handle([Received(source, page, Epoch(1))], due)) == [(source, 7)]
    node.handle(
        [Received(source, TagFloors(None, 1, (), FloorCursor(tag=TagHash(7))), Epoch(1))], due
    )
    assert node.status()["trims"] == 1
    again = node.deadline()
    assert again is not None
    assert [after for _, after in asks(node.handle([], again))] == [0]


def test_floors_are_requested_from_another_node_when_one_stays_silent() -> None:
    node = index_node()
    node.handle([data(one(1, 4)), lookup_after(1, 4)], T0)
    sources = []
    now = T0
    for _ in range(3):
        now = Instant(now + 1.0)  # the pause doubles
        sources += [to for to, _ in asks(node.handle([], now))]
    assert set(sources) == {A, B}


def test_index_data_of_trimmed_records_is_not_indexed() -> None:
    node = index_node()
    node.handle([trims(0, Floor(LOG, 100, of_log=True)), data(one(1, 4), one(3, 7))], T0)
    assert (node.position, node.tail) == (5, 8)
    assert (node.status()["entries"], node.status()["spans"]) == (0, 0)
