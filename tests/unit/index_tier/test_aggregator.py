"""Claims about the aggregator."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from indilog.base.ids import Epoch, Instant, NodeId, ShardId
from indilog.config import Config, node_config
from indilog.kernel.metalog import Replicas
from indilog.kernel.view import view_of
from indilog.roles.role import (
    Effect,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    Received,
    Role,
    Send,
    Started,
)
from indilog.wire.messages import (
    Direction,
    IndexAnswer,
    IndexData,
    LookupResult,
    ReadRecords,
)
from indilog.wire.replica_messages import PlacementIs
from indilog_index.aggregator import Aggregator

ENGINE = NodeId("engine-0")
T0 = Instant(1000.0)
VIEW = view_of(storage_nodes=2, replicas=2, index_shards=3, index_replicas=2, engines=2)


def aggregator(*, lookups_max: int = 100) -> Aggregator:
    config = Config(node=node_config(lookups_pending_max=lookups_max, read_timeout_s=5.0))
    return Aggregator(NodeId("aggregator-0"), [VIEW], config)


def answer(
    index_shard: int,
    *seqnums: int,
    request: int = 1,
    count: int = 1,
    direction: Direction = Direction.NEXT,
    exact: bool = False,
    replica: int = 0,
) -> Received:
    """The answer of one index shard; even seqnums are in shard 0, odd ones in shard 1."""
    shards = tuple(ShardId(seqnum % 2) for seqnum in seqnums)
    message = IndexAnswer(
        request, ENGINE, direction, index_shard, count, exact, seqnums, shards, index_shards=3
    )
    return Received(NodeId(f"index-{index_shard}-{replica}"), message, Epoch(1))


def read(seqnum: int, *, to: str, request: int = 1) -> list[Effect]:
    message = ReadRecords(request, ENGINE, ShardId(seqnum % 2), (seqnum,))
    return [Send(NodeId(to), message)]


def test_the_smallest_match_of_all_index_shards_is_read_by_next() -> None:
    node = aggregator()
    assert node.handle([answer(0, 9), answer(1, 4)], T0) == []
    assert node.handle([answer(2, 6)], T0) == read(4, to="storage-1")


def test_the_largest_match_of_all_index_shards_is_read_by_prev() -> None:
    node = aggregator()
    answers = [answer(shard, s, direction=Direction.PREV) for shard, s in enumerate((9, 4, 6))]
    assert node.handle(answers, T0) == read(9, to="storage-0")


def test_replicas_of_a_shard_are_read_round_robin() -> None:
    node = aggregator()
    for request, storage_node in ((2, "storage-0"), (3, "storage-1")):
        answers = [answer(shard, 4, request=request) for shard in range(3)]
        assert node.handle(answers, T0) == read(4, to=storage_node, request=request)


def test_without_any_match_the_origin_gets_a_proof_of_absence() -> None:
    effects = aggregator().handle([answer(0), answer(1), answer(2)], T0)
    assert effects == [Send(ENGINE, LookupResult(1, (), ()))]


def test_a_result_is_as_of_the_last_trim_that_any_index_shard_knows() -> None:
    def at(index_shard: int, position: int) -> Received:
        message = answer(index_shard).message
        assert isinstance(message, IndexAnswer)
        return Received(
            NodeId(f"index-{index_shard}-0"),
            msgspec.structs.replace(message, position=position),
            Epoch(1),
        )

    effects = aggregator().handle([at(0, 3), at(1, 7), at(2, 5)], T0)
    assert effects == [Send(ENGINE, LookupResult(1, (), (), position=7))]


def test_an_origin_that_asks_for_names_gets_the_place_of_the_match() -> None:
    node = aggregator()
    effects: list[Effect] = []
    for index_shard, seqnums in enumerate(((9,), (), (5,))):
        event = answer(index_shard, *seqnums)
        assert isinstance(event.message, IndexAnswer)
        named = msgspec.structs.replace(event.message, names_first=True)
        effects += node.handle([Received(event.sender, named, Epoch(1))], T0)
    assert effects == [Send(ENGINE, LookupResult(1, (5,), (ShardId(1),)))]


def test_an_index_shard_without_a_match_does_not_hide_the_others() -> None:
    assert aggregator().handle([answer(0), answer(1, 4), answer(2)], T0) == read(4, to="storage-1")


def test_several_matches_are_merged_best_first() -> None:
    node = aggregator()
    answers = [answer(0, 1, 8, count=3), answer(1, 2, 3, 4, count=3), answer(2, count=3)]
    result = LookupResult(1, (1, 2, 3), (ShardId(1), ShardId(0), ShardId(1)))
    assert node.handle(answers, T0) == [Send(ENGINE, result)]
    answers = [
        answer(0, 8, 1, count=3, direction=Direction.PREV),
        answer(1, 4, 3, 2, count=3, direction=Direction.PREV),
        answer(2, count=3, direction=Direction.PREV),
    ]
    result = LookupResult(1, (8, 4, 3), (ShardId(0), ShardId(0), ShardId(1)))
    assert node.handle(answers, T0) == [Send(ENGINE, result)]


def test_after_an_exact_match_nothing_is_sent_and_nothing_stays() -> None:
    """Algorithm 6: "Mark RID as complete. An index node already contacted the storage tier"."""
    node = aggregator()
    assert node.handle([answer(0, 7), answer(1, 4, exact=True), answer(2, 9)], T0) == []
    assert node.status() == {"pending": 0}


def test_a_repeated_answer_counts_once() -> None:
    node = aggregator()
    events = [answer(0, 9), answer(0, 9), answer(0, 9, replica=1), answer(1, 4)]
    assert node.handle(events, T0) == []
    assert node.handle([answer(2, 6)], T0) == read(4, to="storage-1")


def test_lookups_of_two_engines_with_one_number_are_different() -> None:
    node = aggregator()
    other = NodeId("engine-1")
    theirs = [
        Received(e.sender, msgspec.structs.replace(e.message, origin=other), Epoch(1))
        for e in (answer(0), answer(1))
        if isinstance(e.message, IndexAnswer)
    ]
    assert node.handle([answer(0), *theirs, answer(1)], T0) == []
    assert node.status() == {"pending": 2}
    assert node.handle([answer(2)], T0) == [Send(ENGINE, LookupResult(1, (), ()))]


def test_a_lookup_that_is_not_completed_is_dropped_after_its_timeout() -> None:
    node = aggregator()
    node.handle([answer(0)], T0)
    assert node.deadline() == T0 + 5.0
    assert node.handle([], Instant(T0 + 4.9)) == []
    effects = node.handle([], Instant(T0 + 5.0))
    assert reasons(effects) == ["an index shard did not answer in time"]
    assert node.deadline() is None


def test_the_oldest_lookup_makes_room_when_too_many_are_pending() -> None:
    node = aggregator(lookups_max=2)
    effects = node.handle([answer(0, request=request) for request in (1, 2, 3)], T0)
    assert reasons(effects) == ["too many lookups are pending"]
    assert node.status() == {"pending": 2}
    rest = [answer(shard, request=2) for shard in (1, 2)]
    assert node.handle(rest, T0) == [Send(ENGINE, LookupResult(2, (), ()))]
    node.check_invariants()


def reasons(effects: Sequence[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Ignore)]


def changed(**fields: object) -> Received:
    event = answer(0, 4)
    assert isinstance(event.message, IndexAnswer)
    return Received(event.sender, msgspec.structs.replace(event.message, **fields), Epoch(1))


@pytest.mark.parametrize(
    "event",
    [
        Received(NodeId("index-1-0"), answer(0, 4).message, Epoch(1)),
        Received(NodeId("storage-0"), answer(0, 4).message, Epoch(1)),
        changed(index_shard=3),
        changed(index_shard=-1),
        changed(origin=NodeId("storage-0")),
        changed(shards=()),
        changed(seqnums=(4, 5), shards=(ShardId(0), ShardId(1))),
        Received(NodeId("storage-0"), IndexData(()), Epoch(1)),
    ],
)
def test_an_impossible_message_is_ignored_and_changes_nothing(event: Received) -> None:
    node = aggregator()
    assert [type(effect) for effect in node.handle([event], T0)] == [Ignore]
    assert node.status() == {"pending": 0}


def test_answers_to_two_lookups_of_one_number_are_not_merged() -> None:
    node = aggregator()
    effects = node.handle([answer(0, 4), answer(1, 4, 5, count=2)], T0)
    assert reasons(effects) == ["an answer to another lookup of the same number"]


def test_a_match_in_a_shard_that_no_view_knows_is_ignored() -> None:
    node = aggregator()
    effects = node.handle([changed(shards=(ShardId(9),)), answer(1), answer(2)], T0)
    assert [type(effect) for effect in effects] == [Ignore]


def test_an_aggregator_is_a_role_without_a_disk() -> None:
    role: Role = aggregator()
    assert role.handle([Started(Epoch(1))], T0) == []
    assert role.deadline() is None
    with pytest.raises(AssertionError):
        role.recover(FrameKind.METALOG, b"", Location(0, 0, 0))
    with pytest.raises(AssertionError):
        role.handle([FrameRead(0, None)], T0)


def test_a_record_is_read_from_the_replicas_that_storage_has_announced() -> None:
    node = aggregator()
    moved = PlacementIs(VIEW, {ShardId(0): Replicas(7, (NodeId("storage-1"),))})
    node.handle([Received(NodeId("storage-1"), moved, Epoch(1))], T0)
    for request in (2, 3):
        answers = [answer(shard, 4, request=request) for shard in range(3)]
        assert node.handle(answers, T0) == read(4, to="storage-1", request=request)
    (ignored,) = node.handle([Received(ENGINE, moved, Epoch(1))], T0)
    assert isinstance(ignored, Ignore)


def test_a_record_is_not_read_from_a_replica_that_does_not_count() -> None:
    """It may be lost, and stays in the list until the others have all records."""
    node = aggregator()
    nodes = tuple(NodeId(f"storage-{number}") for number in range(3))
    moved = PlacementIs(VIEW, {ShardId(0): Replicas(7, nodes)})
    node.handle([Received(NodeId("storage-1"), moved, Epoch(1))], T0)
    asked = set()
    for request in range(2, 8):
        sent = node.handle([answer(shard, 4, request=request) for shard in range(3)], T0)
        asked |= {effect.to for effect in sent if isinstance(effect, Send)}
    assert asked == set(nodes[:2])
