"""Claims about index nodes that know records without knowing their tags (decision 0024)."""

from __future__ import annotations

import msgspec
import pytest

from indilog.base.ids import EMPTY_TAG, ShardId
from indilog.kernel.index_snapshot import WriteSnapshot
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.metalog import Floor
from indilog.roles.role import Received, Send
from indilog.wire.messages import Direction, IndexBlock, ReadRecords
from indilog.wire.tag_messages import NO_RECORD, NOT_KNOWN
from indilog_index.index_node import IndexNode
from indilog_index.lost_records import before, nearest
from tests.unit.index_tier.test_index_node import (
    LOG,
    T0,
    TAG,
    block,
    data,
    index_node,
    lookup,
    reasons,
    tags,
)
from tests.unit.index_tier.test_index_node_snapshots import asked_of_disk
from tests.unit.index_tier.test_tag_firsts import reported as firsts_reported
from tests.unit.index_tier.test_tag_firsts import wanted
from tests.unit.index_tier.test_trims import answer_of, trims

LOST = LostRange(5, 7)


def with_lost(position: int = 1, lost: tuple[LostRange, ...] = (LOST,)) -> IndexBlock:
    """Records 4 to 7 of shard 0, of which the tags of 5 and 6 are lost."""
    part = tags(4, (LOG, TAG), (), (), (LOG, TAG))
    return block(position, 8, [0], msgspec.structs.replace(part, lost=lost))


def lost_by(node: IndexNode, asked: Received) -> tuple[tuple[int, ...], tuple[LostRange, ...]]:
    answer = answer_of(node.handle([asked], T0))
    assert answer is not None
    return answer.seqnums, answer.lost


def test_an_answer_names_the_lost_records_on_the_way_to_its_matches() -> None:
    node = index_node()
    node.handle([data(with_lost())], T0)
    assert node.status()["lost_ranges"] == 1
    assert lost_by(node, lookup(0, position=3)) == ((4,), ())
    assert lost_by(node, lookup(5, position=3)) == ((7,), (LOST,))
    assert lost_by(node, lookup(6, position=3)) == ((7,), (LostRange(6, 7),))
    assert lost_by(node, lookup(7, position=3)) == ((7,), ())
    assert lost_by(node, lookup(0, position=3, limit=6, count=9)) == ((4,), (LostRange(5, 6),))
    prev = Direction.PREV
    assert lost_by(node, lookup(9, position=3, direction=prev)) == ((7,), ())
    assert lost_by(node, lookup(6, position=3, direction=prev)) == ((4,), (LOST,))
    assert lost_by(node, lookup(9, position=3, direction=prev, tag=77)) == ((), (LOST,))


def test_losses_below_the_floor_are_forgotten() -> None:
    node = index_node()
    node.handle([data(with_lost()), trims(0, Floor(TAG, 6, of_log=False))], T0)
    prev = Direction.PREV
    assert lost_by(node, lookup(6, position=3, direction=prev)) == ((), (LostRange(6, 7),))
    node.handle([trims(1, Floor(TAG, 7, of_log=False))], T0)
    assert lost_by(node, lookup(6, position=3, direction=prev)) == ((), ())


def test_a_lost_record_among_trimmed_ones_is_found_by_its_seqnum() -> None:
    """The reader learns that the record is lost, not that it was trimmed."""
    node = index_node()
    node.handle([trims(0, Floor(LOG, 8, of_log=True)), data(with_lost())], T0)
    for seqnum in (5, 6):
        read, _ = node.handle([lookup(seqnum, position=3, tag=EMPTY_TAG)], T0)
        assert isinstance(read, Send)
        assert isinstance(read.message, ReadRecords)
        assert read.message.seqnums == (seqnum,)


def test_whether_a_tag_is_new_is_unknown_across_lost_records() -> None:
    node = index_node()
    node.handle([data(with_lost())], T0)
    asked = wanted(TAG, 77, position=3)
    assert firsts_reported(node.handle([asked], T0)) == [[4, NOT_KNOWN]]
    assert firsts_reported(node.handle([wanted(77, limit=5, position=3)], T0)) == [[NO_RECORD]]


def test_whether_a_tag_is_new_is_unknown_if_the_first_record_of_all_is_lost() -> None:
    node = index_node()
    part = msgspec.structs.replace(tags(0, (), (LOG, TAG)), lost=(LostRange(0, 1),))
    node.handle([data(block(1, 2, [0], part))], T0)
    asked = wanted(TAG, 77, position=3)
    assert firsts_reported(node.handle([asked], T0)) == [[NOT_KNOWN, NOT_KNOWN]]


def test_snapshots_keep_losses() -> None:
    node = index_node(index_snapshot_entries_min=4)
    (request,) = asked_of_disk(node.handle([data(with_lost())], T0))
    assert isinstance(request, WriteSnapshot)
    assert request.info.lost == (LOST,)


@pytest.mark.parametrize("lost", [(LostRange(3, 5),), (LostRange(7, 9),), (LostRange(5, 5),)])
def test_a_part_that_names_lost_records_of_others_is_refused(
    lost: tuple[LostRange, ...],
) -> None:
    effects = index_node().handle([data(with_lost(lost=lost))], T0)
    assert reasons(effects) == ["index data that contradicts itself"]


@pytest.mark.parametrize(
    ("direction", "found", "floor", "expected"),
    [
        (Direction.NEXT, [], 0, None),
        (Direction.NEXT, [(8, 9), (4, 6), (6, 7)], 0, (4, 7)),
        (Direction.PREV, [(8, 9), (4, 6), (7, 8)], 0, (7, 9)),
        (Direction.PREV, [(1, 4), (4, 6)], 2, (2, 6)),
        (Direction.PREV, [(1, 4)], 4, None),
    ],
)
def test_adjacent_losses_of_several_index_shards_are_one_range(
    direction: Direction,
    found: list[tuple[int, int]],
    floor: int,
    expected: tuple[int, int] | None,
) -> None:
    assert nearest(direction, [LostRange(*one) for one in found], floor) == expected


def test_matches_beyond_the_lost_records_are_left_out() -> None:
    shards = tuple(map(ShardId, range(4)))
    upwards = before(Direction.NEXT, ((1, 4, 7, 9), shards), LOST)
    assert upwards == ((1, 4), shards[:2])
    downwards = before(Direction.PREV, ((9, 7, 4, 1), shards), LOST)
    assert downwards == ((9, 7), shards[:2])
