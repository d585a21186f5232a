"""Claims about index nodes that are asked for the first records of tags (thesis 5.7)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.roles.role import Effect, Received, Send
from indilog.wire.tag_messages import NO_RECORD, NOT_KNOWN, TagFirsts, TagFirstsWanted
from tests.unit.index_tier.test_index_node import (
    ENGINE,
    T0,
    TAG,
    block,
    data,
    index_node,
    one,
    reasons,
    tags,
)
from tests.unit.index_tier.test_index_node_snapshots import with_snapshot


def wanted(*about: int, limit: int = 100, position: int = 0) -> Received:
    column = array("Q", about).tobytes()
    return Received(ENGINE, TagFirstsWanted(7, column, limit, position), Epoch(1))


def reported(effects: Sequence[Effect]) -> list[list[int]]:
    found = []
    for effect in effects:
        if isinstance(effect, Send) and isinstance(effect.message, TagFirsts):
            assert effect.to == ENGINE
            assert (effect.message.request, effect.message.index_shard) == (7, 1)
            found.append(array("Q", effect.message.seqnums).tolist())
    return found


def test_the_first_record_of_each_tag_is_answered_with_its_shard() -> None:
    node = index_node()
    node.handle([data(one(1, 4)), data(block(3, 9, [0], tags(7, (TAG, 8), (8,))))], T0)
    (effect,) = node.handle([wanted(TAG, 8, 99)], T0)
    assert reported([effect]) == [[4, 7, NO_RECORD]]
    assert isinstance(effect, Send)
    assert isinstance(effect.message, TagFirsts)
    assert array("H", effect.message.shards).tolist() == [0, 0, 0]


def test_a_tag_is_new_also_when_the_index_is_on_the_disk() -> None:
    """The filter of the snapshot shows it; for a tag that the filter may have, nothing is read."""
    node = with_snapshot()
    assert reported(node.handle([wanted(TAG, 99, position=5)], T0)) == [[NOT_KNOWN, NO_RECORD]]


def test_records_beyond_the_limit_do_not_count() -> None:
    """The record that is being appended may be indexed before the question arrives: the race of
    thesis 5.7.
    """
    node = index_node()
    node.handle([data(one(1, 4))], T0)
    assert reported(node.handle([wanted(TAG, limit=4, position=1)], T0)) == [[NO_RECORD]]
    assert reported(node.handle([wanted(TAG, limit=5, position=2)], T0)) == [[4]]


def test_the_answer_waits_for_all_positions_below_its_own() -> None:
    node = index_node()
    assert reported(node.handle([wanted(TAG, position=2)], T0)) == []
    assert reported(node.handle([data(one(1, 4))], T0)) == [[4]]


def test_a_question_that_waits_too_long_is_dropped() -> None:
    node = index_node()
    node.handle([wanted(TAG, position=2)], T0)
    effects = node.handle([], Instant(T0 + 5.0))
    assert "a lookup waited too long for index data" in reasons(effects)
    assert reported(node.handle([data(one(1, 4))], Instant(T0 + 6.0))) == []


@pytest.mark.parametrize(
    "event",
    [
        Received(NodeId("storage-0"), TagFirstsWanted(7, bytes(8), 100, 0), Epoch(1)),
        Received(ENGINE, TagFirstsWanted(7, b"", 100, 0), Epoch(1)),
        Received(ENGINE, TagFirstsWanted(7, bytes(9), 100, 0), Epoch(1)),
        Received(ENGINE, TagFirstsWanted(7, bytes(8 * 10_001), 100, 0), Epoch(1)),
    ],
)
def test_an_impossible_question_is_ignored(event: Received) -> None:
    assert len(reasons(index_node().handle([event], T0))) == 1
