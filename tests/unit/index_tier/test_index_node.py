"""Claims about the index node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest

from indilog.base.ids import EMPTY_TAG, MAX_SEQNUM, Epoch, Instant, NodeId, ShardId
from indilog.config import Config, node_config
from indilog.kernel.index_snapshot import SnapshotOpened
from indilog.kernel.metalog import NO_INCARNATION, Replicas
from indilog.kernel.placement import Placement
from indilog.kernel.view import View, view_of, view_with
from indilog.roles.role import (
    Effect,
    FrameKind,
    Ignore,
    Location,
    Persisted,
    Received,
    Role,
    Send,
    SnapshotsAnswered,
    Started,
)
from indilog.wire.messages import (
    Direction,
    IndexAnswer,
    IndexBlock,
    IndexData,
    IndexDataWanted,
    IndexLookup,
    LookupResult,
    ReadRecords,
    ShardTags,
)
from indilog.wire.replica_messages import PlacementIs
from indilog.wire.tag_messages import TagFloors
from indilog_index.index_node import IndexNode

A, B = NodeId("storage-0"), NodeId("storage-1")
ENGINE, AGGREGATOR = NodeId("engine-0"), NodeId("aggregator-0")
T0 = Instant(1000.0)
LOG, TAG = 1000, 5
EVERYTHING = 2**62
NO_SNAPSHOT = SnapshotsAnswered(SnapshotOpened(None))
VIEW = view_of(storage_nodes=2, replicas=1, index_shards=2, engines=2)
"""Shard 0 is on storage-0, shard 1 on storage-1; index-1-0 has the positions 1, 3, 5, ..."""


def index_node(*, started: bool = True, **settings: float) -> IndexNode:
    """A node of index shard 1; when started, storage has answered that there is nothing yet."""
    config = Config(node=node_config(**{"resend_s": 1.0, "read_timeout_s": 5.0, **settings}))
    node = IndexNode(NodeId("index-1-0"), [VIEW], config)
    if started:
        nothing, untrimmed = IndexData(()), TagFloors(None, 0, ())
        node.handle([Started(Epoch(1)), NO_SNAPSHOT, Received(A, untrimmed, Epoch(1))], T0)
        node.handle([Received(A, nothing, Epoch(1)), Received(B, nothing, Epoch(1))], T0)
        assert node.deadline() is None
    return node


def tags(first: int, *records: tuple[int, ...], shard: int = 0) -> ShardTags:
    flat = array("Q", [tag for record in records for tag in record])
    return ShardTags(ShardId(shard), first, len(records), bytes(map(len, records)), flat.tobytes())


def block(position: int, tail: int, productive: Sequence[int], *parts: ShardTags) -> IndexBlock:
    return IndexBlock(position, tail, tuple(ShardId(s) for s in productive), parts)


def data(*blocks: IndexBlock, sender: NodeId = A) -> Received:
    return Received(sender, IndexData(blocks), Epoch(1))


def one(position: int, seqnum: int) -> IndexBlock:
    """A position that ordered one record of shard 0, with `TAG`."""
    return block(position, seqnum + 1, [0], tags(seqnum, (LOG, TAG)))


def lookup(
    bound: int,
    *,
    position: int,
    request: int = 1,
    tag: int = TAG,
    limit: int = 100,
    count: int = 1,
    direction: Direction = Direction.NEXT,
    aggregator: NodeId = AGGREGATOR,
) -> Received:
    message = IndexLookup(
        request, direction, tag, bound, limit, position, count, aggregator, index_shards=2
    )
    return Received(ENGINE, message, Epoch(1))


def answers(effects: Sequence[Effect]) -> list[tuple[int, ...]]:
    return [
        e.message.seqnums
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, IndexAnswer)
    ]


def asked(effects: Sequence[Effect]) -> list[tuple[NodeId, int, int]]:
    return [
        (e.to, e.message.start, e.message.end)
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, IndexDataWanted)
    ]


def reasons(effects: Sequence[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, Ignore)]


# --- applying


def test_only_the_positions_of_its_own_index_shard_are_applied() -> None:
    """Algorithm 5: "if metalog update round % nr_index_nodes == IN_IDX"."""
    node = index_node()
    assert node.position == 1
    assert node.handle([data(one(1, 4))], T0) == []
    assert (node.position, node.tail) == (3, 5)
    assert reasons(node.handle([data(one(2, 5))], T0)) == ["index data that contradicts itself"]
    assert node.position == 3


def test_a_position_is_applied_when_all_its_productive_shards_are_there() -> None:
    node = index_node()
    node.handle([data(block(1, 6, [0, 1], tags(5, (LOG,), shard=1)), sender=B)], T0)
    assert node.position == 1
    node.handle([data(block(1, 6, [0, 1], tags(4, (LOG, TAG))))], T0)
    assert (node.position, node.tail) == (3, 6)


def test_a_position_that_ordered_nothing_is_applied_at_once() -> None:
    node = index_node()
    node.handle([data(block(1, 0, []))], T0)
    assert node.position == 3


def test_positions_are_applied_in_order_for_any_order_of_arrival() -> None:
    node = index_node()
    node.handle([data(one(5, 9)), data(one(3, 7))], T0)
    assert node.position == 1
    node.handle([data(one(1, 4))], T0)
    assert (node.position, node.tail) == (7, 10)


def test_index_data_that_is_applied_already_is_skipped() -> None:
    node = index_node()
    for _ in range(2):
        assert node.handle([data(one(1, 4))], T0) == []
    assert node.status()["entries"] == 2
    assert node.deadline() is None


def test_positions_that_are_too_far_ahead_are_dropped_and_asked_for_later() -> None:
    node = index_node(index_positions_ahead_max=2)
    node.handle([data(one(3, 7), one(5, 9))], T0)
    node.handle([data(one(1, 4))], T0)
    assert node.position == 5
    assert node.handle([lookup(0, position=7)], T0) == []
    assert asked(node.handle([], Instant(T0 + 1.0))) == [(B, 3, 4), (B, 5, 7), (A, 5, 7)]


# --- answering


def test_a_lookup_is_answered_to_the_aggregator_it_names() -> None:
    node = index_node()
    node.handle([data(one(1, 4))], T0)
    effects = node.handle([lookup(2, position=3)], T0)
    answer = IndexAnswer(
        1, ENGINE, Direction.NEXT, 1, 1, False, (4,), (ShardId(0),), bound=2, index_shards=2
    )
    assert effects == [Send(AGGREGATOR, answer)]


def test_an_exact_match_goes_straight_to_storage_and_to_the_aggregator() -> None:
    """Thesis 5.4.1, read type 2: "IN2 immediately forwards the read request to the responsible
    storage node".
    """
    node = index_node()
    node.handle([data(one(1, 4))], T0)
    effects = node.handle([lookup(4, position=3)], T0)
    answer = IndexAnswer(
        1, ENGINE, Direction.NEXT, 1, 1, True, (4,), (ShardId(0),), bound=4, index_shards=2
    )
    read = ReadRecords(1, ENGINE, ShardId(0), (4,))
    assert effects == [Send(A, read), Send(AGGREGATOR, answer)]


def test_a_lookup_for_several_records_is_never_exact() -> None:
    node = index_node()
    node.handle([data(one(1, 4), one(3, 7))], T0)
    effects = node.handle([lookup(4, position=5, count=2)], T0)
    assert answers(effects) == [(4, 7)]
    assert len(effects) == 1


def test_the_empty_tag_finds_any_record_of_this_index_shard() -> None:
    node = index_node()
    node.handle([data(one(1, 4), one(3, 7))], T0)
    back = lookup(6, position=5, tag=EMPTY_TAG, direction=Direction.PREV)
    assert answers(node.handle([back], T0)) == [(4,)]


def test_a_lookup_without_a_match_is_answered_too() -> None:
    node = index_node()
    assert answers(node.handle([lookup(0, position=1)], T0)) == [()]


def test_a_lookup_waits_until_its_prefix_is_applied() -> None:
    """Thesis 5.6.1: the index node will "temporarily block the lookup and place it in a special
    queue that is processed with the next metalog update".
    """
    node = index_node()
    assert node.handle([lookup(0, position=4)], T0) == []
    assert node.handle([data(one(1, 4))], T0) == []
    assert answers(node.handle([data(one(3, 7))], T0)) == [(4,)]


def test_positions_of_other_index_shards_are_not_waited_for() -> None:
    """Thesis 5.6.1: "That index node is not meant to receive anything during the rounds when other
    index nodes are selected".
    """
    node = index_node()
    node.handle([data(one(1, 4))], T0)
    assert answers(node.handle([lookup(0, position=3)], T0)) == [(4,)]
    assert node.handle([lookup(0, position=4)], T0) == []


def test_records_ordered_after_the_lookups_prefix_are_not_found() -> None:
    node = index_node()
    node.handle([data(one(1, 4), one(3, 7))], T0)
    assert answers(node.handle([lookup(5, position=2, limit=5)], T0)) == [()]


def test_a_lookup_that_waits_too_long_is_dropped() -> None:
    node = index_node()
    node.handle([lookup(0, position=4)], T0)
    for seconds in (1, 2, 3, 4):
        assert reasons(node.handle([], Instant(T0 + seconds))) == []
    effects = node.handle([], Instant(T0 + 5))
    assert reasons(effects) == ["a lookup waited too long for index data"]
    node.handle([data(one(1, 4), one(3, 7))], T0)
    assert node.status()["waiting"] == 0


def test_no_more_lookups_wait_than_configured() -> None:
    node = index_node(lookups_pending_max=1)
    first, second = lookup(0, position=4), lookup(0, position=4, request=2)
    effects = node.handle([first, second], T0)
    assert reasons(effects) == ["too many lookups wait for index data"]
    assert len(answers(node.handle([data(one(1, 4), one(3, 7))], T0))) == 1


# --- as the master of a lookup


def others(*seqnums: int, request: int = 1) -> Received:
    """What the other index shard answers to a lookup whose master index-1-0 is."""
    shards = (ShardId(0),) * len(seqnums)
    answer = IndexAnswer(
        request, ENGINE, Direction.NEXT, 0, 1, False, seqnums, shards, bound=2, index_shards=2
    )
    return Received(NodeId("index-0-0"), answer, Epoch(1))


@pytest.mark.parametrize("first", ["the master's own", "the other's"])
def test_a_master_merges_its_own_match_with_those_of_the_others(first: str) -> None:
    """Thesis 5.2: the other nodes "forward their best matches to the master. The master aggregates
    the matches".
    """
    node = index_node()
    node.handle([data(one(1, 4))], T0)
    events = [lookup(2, position=3, aggregator=NodeId("index-1-0")), others(7)]
    if first == "the other's":
        events.reverse()
    assert node.handle(events[:1], T0) == []
    assert node.handle(events[1:], T0) == [Send(A, ReadRecords(1, ENGINE, ShardId(0), (4,)))]
    assert node.status()["merging"] == 0


def test_a_master_whose_others_stay_silent_drops_the_lookup() -> None:
    node = index_node()
    node.handle([lookup(2, position=1, aggregator=NodeId("index-1-0"))], T0)
    assert node.deadline() == T0 + 5.0
    assert reasons(node.handle([], Instant(T0 + 5))) == ["an index shard did not answer in time"]
    assert node.deadline() is None


def test_a_slave_answers_to_the_master() -> None:
    node = index_node()
    effects = node.handle([lookup(2, position=1, aggregator=NodeId("index-0-0"))], T0)
    assert [e.to for e in effects if isinstance(e, Send)] == ["index-0-0"]


# --- what is missed


def test_a_started_node_fetches_everything_from_storage_nodes_that_keep_every_shard() -> None:
    node = index_node(started=False)
    effects = node.handle([Started(Epoch(1)), NO_SNAPSHOT], T0)
    assert asked(effects) == [(A, 1, EVERYTHING), (B, 1, EVERYTHING)]
    assert node.deadline() == T0 + 1.0


def test_a_started_node_asks_again_until_storage_answers() -> None:
    node = index_node(started=False)
    node.handle([Started(Epoch(1)), NO_SNAPSHOT], T0)
    assert asked(node.handle([], Instant(T0 + 0.9))) == []
    again = asked(node.handle([], Instant(T0 + 1.0)))
    assert again == [(B, 1, EVERYTHING), (A, 1, EVERYTHING)]
    reported = (IndexData(()), TagFloors(None, 0, ()))
    events = [Received(sender, message, Epoch(1)) for sender in (A, B) for message in reported]
    node.handle(events, Instant(T0 + 1.5))
    assert node.deadline() is None


def test_page_after_page_is_fetched_until_an_answer_brings_nothing_new() -> None:
    node = index_node(started=False)
    reported = (
        NO_SNAPSHOT,
        Received(A, TagFloors(None, 0, ()), Epoch(1)),
        Received(B, IndexData(()), Epoch(1)),
    )
    node.handle([Started(Epoch(1)), *reported], T0)
    assert asked(node.handle([data(one(1, 4), one(3, 7))], T0)) == [(A, 5, EVERYTHING)]
    assert asked(node.handle([data(one(5, 8))], T0)) == [(A, 7, EVERYTHING)]
    assert asked(node.handle([data()], T0)) == []
    assert node.deadline() is None


def test_live_index_data_does_not_delay_the_fetch_of_missing_data() -> None:
    node = index_node()
    node.handle([data(one(3, 7))], T0)
    node.handle([data(one(5, 8))], Instant(T0 + 0.9))
    effects = node.handle([data(one(7, 9))], Instant(T0 + 1.0))
    assert asked(effects) == [(B, 1, 8), (A, 1, 8)]


def test_index_data_that_is_applied_delays_the_fetch_of_what_is_still_missing() -> None:
    """It shows that storage nodes are sending."""
    node = index_node()
    node.handle([data(one(5, 8))], T0)
    assert asked(node.handle([data(one(1, 4))], Instant(T0 + 0.9))) == []
    assert node.deadline() == T0 + 1.9
    assert asked(node.handle([], Instant(T0 + 1.0))) == []
    assert asked(node.handle([], Instant(T0 + 1.9)))[-2:] == [(B, 3, 6), (A, 3, 6)]


def test_no_fetch_is_due_when_live_index_data_has_filled_the_gap() -> None:
    node = index_node()
    node.handle([data(one(3, 7))], T0)
    assert node.deadline() == T0 + 1.0
    assert node.handle([data(one(1, 4))], Instant(T0 + 0.9)) == []
    assert (node.position, node.deadline()) == (5, None)
    node.check_invariants()


def test_an_incomplete_position_is_asked_for_again() -> None:
    node = index_node()
    node.handle([data(block(1, 6, [0, 1], tags(4, (LOG, TAG))))], T0)
    assert node.deadline() == T0 + 1.0
    assert asked(node.handle([], Instant(T0 + 1.0))) == [(B, 1, 2), (A, 1, 2)]


def test_a_waiting_lookup_sets_how_far_to_fetch() -> None:
    node = index_node()
    node.handle([lookup(0, position=9)], T0)
    assert asked(node.handle([], Instant(T0 + 1.0))) == [(B, 1, 9), (A, 1, 9)]


def test_a_source_paused_at_the_horizon_is_asked_when_there_is_room() -> None:
    node = index_node(started=False, index_positions_ahead_max=2)
    node.handle([Started(Epoch(1)), NO_SNAPSHOT], T0)
    ahead = [block(p, p + 1, [0, 1], tags(p - 1, (LOG,))) for p in (1, 3, 5)]
    assert asked(node.handle([data(*ahead)], T0)) == []
    rest = data(block(1, 2, [0, 1], tags(1, (LOG,), shard=1)), sender=B)
    assert asked(node.handle([rest], T0)) == [(B, 3, EVERYTHING), (A, 5, EVERYTHING)]


# --- what has no place here


def bad(**fields: object) -> Received:
    return data(block(1, 5, [0], msgspec.structs.replace(tags(4, (LOG, TAG)), **fields)))


@pytest.mark.parametrize(
    "event",
    [
        data(one(1, 4), sender=ENGINE),
        data(one(1, 4), sender=NodeId("storage-9")),
        bad(count=2),
        bad(count=0, tag_counts=b"", tags=b""),
        bad(tags=b"1234567"),
        bad(shard=ShardId(1)),
        bad(first_seqnum=-1),
        bad(first_seqnum=3),
        data(block(1, 6, [7], tags(5, (LOG,), shard=7))),
        data(block(1, MAX_SEQNUM + 2, [0], tags(MAX_SEQNUM + 1, (LOG,)))),
        data(block(1, 7, [0, 1], tags(4, (LOG,)), tags(6, (LOG,), shard=1))),
        Received(A, lookup(0, position=1).message, Epoch(1)),
        lookup(0, position=1, aggregator=A),
        lookup(0, position=1, count=0),
        lookup(0, position=1, count=10_001),
        Received(AGGREGATOR, LookupResult(1, (), ()), Epoch(1)),
    ],
)
def test_an_impossible_message_is_ignored_and_changes_nothing(event: Received) -> None:
    node = index_node()
    assert [type(effect) for effect in node.handle([event], T0)] == [Ignore]
    assert (node.position, node.status()["entries"]) == (1, 0)
    node.handle([data(one(1, 4))], T0)
    assert node.position == 3


def test_the_greatest_tail_is_possible() -> None:
    node = index_node()
    node.handle([data(one(1, MAX_SEQNUM - 1))], T0)
    assert (node.position, node.tail) == (3, MAX_SEQNUM)


def test_index_data_that_goes_back_in_the_log_is_ignored_and_asked_for_again() -> None:
    node = index_node()
    node.handle([data(one(1, 4))], T0)
    effects = node.handle([data(one(3, 4))], T0)
    assert reasons(effects) == ["index data that contradicts the log before its position"]
    assert node.position == 3
    node.handle([data(one(3, 5))], T0)
    assert node.position == 5


def test_no_part_of_a_rejected_block_is_kept() -> None:
    node = index_node()
    node.handle(
        [
            data(block(1, 6, [0, 1], tags(3, (LOG,)))),
            data(block(1, 6, [0, 1], tags(5, (LOG,), shard=1)), sender=B),
        ],
        T0,
    )
    assert node.position == 1
    node.handle([data(block(1, 6, [0, 1], tags(5, (LOG,), shard=1)), sender=B)], T0)
    node.handle([data(block(1, 6, [0, 1], tags(4, (LOG,))))], T0)
    assert node.position == 3


def test_an_index_node_is_a_role_without_a_disk() -> None:
    role: Role = index_node(started=False)
    role.check_invariants()
    with pytest.raises(AssertionError):
        role.recover(FrameKind.METALOG, b"", Location(0, 0, 0))
    with pytest.raises(AssertionError):
        role.handle([Persisted(0, Location(0, 0, 0))], T0)


def test_a_node_that_is_no_index_node_is_refused() -> None:
    with pytest.raises(AssertionError):
        IndexNode(ENGINE, [VIEW], Config())


def test_moved_shards_are_read_from_their_new_replicas() -> None:
    """Records for an exact match, and index data."""
    node = index_node()
    node.handle([data(one(1, 0), one(3, 1))], T0)
    moved = PlacementIs(VIEW, {ShardId(0): Replicas(7, (B, A))})
    node.handle([Received(B, moved, Epoch(1))], T0)
    (read, _) = node.handle([lookup(1, position=4)], T0)
    assert isinstance(read, Send)
    assert (type(read.message), read.to) == (ReadRecords, B)
    node.handle([lookup(9, position=8)], T0)
    wanted = asked(node.handle([], Instant(T0 + 1.0)))
    assert {to for to, start, _ in wanted if start == 5} == {B}
    (ignored,) = node.handle([Received(ENGINE, moved, Epoch(1))], T0)
    assert isinstance(ignored, Ignore)


def newer_view(position: int) -> View:
    """The view that the entry at `position` installs: a third index shard."""
    members = msgspec.structs.replace(
        VIEW.members, index_shards=view_of(index_shards=3).index_shards, version=1
    )
    return view_with(VIEW, members, position, Placement(VIEW).replicas, lambda _: NO_INCARNATION)


def lookup_under(view: View, bound: int, *, position: int) -> Received:
    event = lookup(bound, position=position)
    assert isinstance(event.message, IndexLookup)
    message = msgspec.structs.replace(
        event.message, view=view.number, index_shards=len(view.index_shards)
    )
    return event._replace(message=message)


def test_a_lookup_waits_until_its_view_is_known() -> None:
    node = index_node()
    node.handle([data(one(1, 0), one(3, 1))], T0)
    view = newer_view(3)
    waiting = node.handle([lookup_under(view, 1, position=4)], T0)
    known = Received(A, PlacementIs(view, {}), Epoch(1))
    assert (answers(waiting), len(answers(node.handle([known], T0)))) == ([], 1)


def test_positions_after_the_entry_go_round_robin_over_the_new_index_shards() -> None:
    node = index_node()
    node.handle([data(one(1, 0), one(3, 1))], T0)
    before = node.position
    node.handle([Received(A, PlacementIs(newer_view(3), {}), Epoch(1))], T0)
    assert (before, node.position) == (5, 4), "4 % 3 == 1"


def test_an_index_with_positions_of_another_index_shard_is_rebuilt() -> None:
    """They were fetched under the older view."""
    node = index_node()
    node.handle([data(one(1, 0), one(3, 1), one(5, 2))], T0)
    effects = node.handle([Received(A, PlacementIs(newer_view(3), {}), Epoch(1))], T0)
    assert [e.reason for e in effects if isinstance(e, Ignore)] == [
        "index data that another index shard gets; the index is rebuilt"
    ]
    assert node.tail == 0


def test_a_node_that_no_view_has_yet_serves_its_index_shard_when_one_has() -> None:
    node = IndexNode(NodeId("index-2-0"), [VIEW], Config())
    node.handle([Started(Epoch(1)), SnapshotsAnswered(SnapshotOpened(None))], T0)
    wanted = asked(node.handle([Received(A, PlacementIs(newer_view(3), {}), Epoch(1))], T0))
    assert {start for _, start, _ in wanted} == {5}, "5 % 3 == 2"


def test_a_lookup_under_a_newer_view_is_checked_when_it_is_answered() -> None:
    node = index_node()
    view = newer_view(3)
    stranger = lookup_under(view, 1, position=0)._replace(sender=NodeId("stranger"))
    node.handle([stranger], T0)
    effects = node.handle([Received(A, PlacementIs(view, {}), Epoch(1))], T0)
    assert answers(effects) == []
    reasons = [effect.reason for effect in effects if isinstance(effect, Ignore)]
    assert reasons == ["a lookup from a node that is no engine"]
