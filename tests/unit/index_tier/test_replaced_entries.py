"""Claims about an index node that has index data of metalog entries that were replaced (decision
0031). It detects this, rebuilds its index, and answers nothing from replaced entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from indilog.base.ids import Epoch, Instant
from indilog.config import Config
from indilog.kernel.index_snapshot import (
    OpenSnapshot,
    SnapshotOpened,
    WriteSnapshot,
)
from indilog.kernel.metalog import NO_FLOORS, Floor
from indilog.kernel.view import view_of
from indilog.roles.role import AskSnapshots, Effect, Received, Send, SnapshotsAnswered, Started
from indilog.wire.messages import IndexBlock, IndexData, IndexLookup
from indilog.wire.tag_messages import TagFloors, TagFloorsWanted
from indilog_index.index_node import IndexNode
from tests.support.snapshot_disk import SnapshotDisk
from tests.unit.index_tier.test_index_node import (
    LOG,
    NO_SNAPSHOT,
    T0,
    TAG,
    A,
    B,
    answers,
    asked,
    block,
    index_node,
    lookup,
    reasons,
    tags,
)

REPLACED = "index data of metalog entries that were replaced; the index is rebuilt"


def of(epoch: int, previous: int, position: int, seqnum: int, tag: int = TAG) -> IndexBlock:
    """A position that ordered one record with `tag`, proposed by incarnation `epoch`."""
    made = block(position, seqnum + 1, [0], tags(seqnum, (LOG, tag)))
    return msgspec.structs.replace(made, epoch=Epoch(epoch), previous=Epoch(previous))


def data(*blocks: IndexBlock, copy_of: int, sender: str = A) -> Received:
    return Received(A if sender == A else B, IndexData(blocks, Epoch(copy_of)), Epoch(1))


def asks_of(epoch: int, bound: int, position: int, *, tag: int = TAG, trims: int = 0) -> Received:
    message = lookup(bound, position=position, tag=tag, count=2).message
    assert isinstance(message, IndexLookup)
    wanted = msgspec.structs.replace(message, epoch=Epoch(epoch), trims=trims)
    return Received(lookup(bound, position=position).sender, wanted, Epoch(1))


def opens(effects: Sequence[Effect]) -> list[int]:
    return [
        effect.request.below
        for effect in effects
        if isinstance(effect, AskSnapshots) and isinstance(effect.request, OpenSnapshot)
    ]


def with_two() -> IndexNode:
    """The positions 1 and 3 are applied, as incarnation 1 proposed them."""
    node = index_node()
    node.handle([data(of(1, 0, 1, 4), of(1, 1, 3, 7), copy_of=1)], T0)
    assert node.position == 5
    return node


def again(node: IndexNode, *blocks: IndexBlock, copy_of: int) -> None:
    """Let the node begin without a snapshot, and storage send its index data."""
    node.handle([NO_SNAPSHOT], T0)
    node.handle([data(*blocks, copy_of=copy_of)], T0)


def test_another_entry_at_a_position_that_is_applied_makes_the_node_rebuild() -> None:
    node = with_two()
    effects = node.handle([data(of(2, 1, 3, 7, tag=9), copy_of=2)], T0)
    assert reasons(effects) == [REPLACED]
    assert opens(effects) == [4], "no snapshot that has the position"
    again(node, of(1, 0, 1, 4), of(2, 1, 3, 7, tag=9), copy_of=2)
    assert answers(node.handle([asks_of(2, 0, 5)], T0)) == [(4,)]
    assert answers(node.handle([asks_of(2, 0, 5, tag=9)], T0)) == [(7,)]


def test_the_next_entry_of_a_newer_primary_replaces_nothing() -> None:
    """The only index shard has every position, so the entry follows directly on its last one."""
    view = view_of(storage_nodes=2, replicas=2, index_shards=1)
    node = IndexNode(view.index_shards[0][0], [view], Config())
    untrimmed = TagFloors(None, 0, ())
    node.handle([Started(Epoch(1)), NO_SNAPSHOT, Received(A, untrimmed, Epoch(1))], T0)
    node.handle([data(of(1, 0, 0, 0), of(1, 1, 1, 1), copy_of=1)], T0)
    effects = node.handle([data(of(2, 1, 2, 2), copy_of=2)], T0)
    assert (reasons(effects), node.position) == ([], 3)


def test_an_entry_that_follows_on_another_one_makes_the_node_rebuild() -> None:
    """The node's last entry was replaced, and the message that showed this was lost."""
    node = with_two()
    effects = node.handle([data(of(3, 2, 5, 9), copy_of=3)], T0)
    assert (reasons(effects), opens(effects)) == ([REPLACED], [4])


def test_index_data_of_a_storage_node_with_replaced_entries_is_ignored() -> None:
    node = with_two()
    node.handle([data(of(2, 1, 3, 7, tag=9), copy_of=2)], T0)
    node.handle([NO_SNAPSHOT], T0)
    late = node.handle([data(of(1, 0, 1, 4), of(1, 1, 3, 7), copy_of=1, sender=B)], T0)
    assert reasons(late) == ["index data of entries that may have been replaced"]
    assert node.position == 1
    node = with_two()
    node.handle([data(of(2, 1, 5, 9), copy_of=2)], T0)
    late = node.handle([data(of(1, 1, 3, 8), copy_of=1)], T0)
    assert reasons(late) == ["index data of entries that may have been replaced"]
    assert node.position == 7, "an older copy says nothing about a newer one"


def test_a_lookup_of_a_new_incarnation_waits_until_the_index_is_confirmed() -> None:
    """The node cannot know whether incarnation 2 has the entries that 1 had."""
    node = with_two()
    assert answers(node.handle([asks_of(1, 0, 5)], T0)) == [(4, 7)]
    assert node.handle([asks_of(2, 0, 5)], T0) == []
    wanted = asked(node.handle([], Instant(T0 + 1.0)))
    assert (wanted[0][1:]) == (3, 4), "its last position"
    confirmed = msgspec.structs.replace(of(1, 1, 3, 7), parts=())
    assert answers(node.handle([data(confirmed, copy_of=2)], T0)) == [(4, 7)]
    assert answers(node.handle([asks_of(2, 5, 5)], T0)) == [(7,)], "once is enough"


def test_a_waiting_lookup_is_answered_from_the_replacing_entries() -> None:
    node = with_two()
    assert node.handle([asks_of(2, 0, 5)], T0) == []
    node.handle([data(of(2, 1, 3, 7, tag=9), copy_of=2)], T0)
    node.handle([NO_SNAPSHOT], T0)
    reported = node.handle([data(of(1, 0, 1, 4), of(2, 1, 3, 7, tag=9), copy_of=2)], T0)
    assert answers(reported) == [(4,)]


def test_a_lookup_of_an_engine_with_replaced_entries_is_dropped() -> None:
    node = index_node()
    node.handle([data(of(1, 0, 1, 4), of(2, 1, 3, 7), copy_of=2)], T0)
    effects = node.handle([asks_of(1, 0, 5)], T0)
    assert reasons(effects) == ["a lookup that depends on entries that were replaced"]
    assert answers(node.handle([asks_of(1, 0, 3)], T0)) == [(4, 7)], "up to there they are equal"


def test_a_snapshot_of_replaced_entries_is_dropped_and_never_answered_from() -> None:
    disk = SnapshotDisk()
    node = index_node(index_snapshot_entries_min=1)
    (written,) = [
        disk.write(effect.request)
        for effect in node.handle([data(of(1, 0, 1, 4), of(1, 1, 3, 7), copy_of=1)], T0)
        if isinstance(effect, AskSnapshots) and isinstance(effect.request, WriteSnapshot)
    ]
    fresh = index_node(started=False)
    fresh.handle([Started(Epoch(1))], T0)
    wanted = asked(fresh.handle([SnapshotsAnswered(SnapshotOpened(written))], T0))
    assert fresh.position == 5
    assert wanted[0][1:] == (3, 4), "storage tells whether it is right"
    assert fresh.handle([asks_of(2, 0, 5)], T0) == []
    effects = fresh.handle([data(of(2, 1, 3, 7, tag=9), copy_of=2)], T0)
    assert opens(effects) == [4], "below what the snapshot has"


def test_a_checkpoint_that_does_not_follow_on_the_snapshot_is_not_used() -> None:
    node = with_two()
    payload = node.checkpoint()()
    other = index_node()
    other.handle([data(of(2, 0, 1, 4), copy_of=2)], T0)
    info = other._snapshots.info(other._store, 3, other._lineage)
    restored = index_node(started=False)
    restored.restore(payload, ())
    assert restored._kept is not None
    assert restored._kept.follows(None)
    kept = restored._kept._replace(base=0)
    assert not kept.follows(info), "of another metalog"
    own = node._snapshots.info(node._store, 3, node._lineage)
    assert kept.follows(msgspec.structs.replace(own, lineage=node._lineage.copied(3)))


def test_entries_beyond_the_end_of_an_idle_newer_metalog_are_dropped() -> None:
    """Positions 1, 3 and 5 are applied; incarnation 2 lost 4 and 5, ordered one entry at 4, and is
    idle. Storage has no index data of position 5, so only the lookup shows that our entry there was
    replaced.
    """
    node = index_node()
    node.handle([data(of(1, 0, 1, 4), of(1, 1, 3, 7), of(1, 1, 5, 9), copy_of=1)], T0)
    announced = msgspec.structs.replace(of(1, 1, 3, 7), parts=())
    assert node.handle([data(announced, copy_of=2)], T0) == []
    effects = node.handle([asks_of(2, 0, 5)], T0)
    assert (reasons(effects), opens(effects)) == ([REPLACED], [6])
    node.handle([NO_SNAPSHOT], T0)
    reported = node.handle([data(of(1, 0, 1, 4), of(1, 1, 3, 7), copy_of=2)], T0)
    assert answers(reported) == [(4, 7)], "the lookup waited for the index that is rebuilt"


def test_the_entry_at_the_end_of_a_newer_metalog_is_compared_too() -> None:
    """The lookup depends on an entry of incarnation 2 at position 3; our entry there is of
    incarnation 1.
    """
    node = with_two()
    effects = node.handle([asks_of(2, 0, 4)], T0)
    assert (reasons(effects), opens(effects)) == ([REPLACED], [4])
    node = with_two()
    assert reasons(node.handle([asks_of(2, 0, 5)], T0)) == [], "position 4 is another index shard's"


def test_a_lookup_of_entries_that_a_newer_metalog_never_had_is_dropped() -> None:
    """Incarnation 3 continued where 1 ended; the entry that 2 proposed at position 2 is in no other
    copy.
    """
    node = index_node()
    node.handle([data(of(1, 0, 1, 4), of(1, 1, 3, 7), of(3, 1, 5, 9), copy_of=3)], T0)
    effects = node.handle([asks_of(2, 0, 3)], T0)
    assert reasons(effects) == ["a lookup that depends on entries that were replaced"]


def test_index_data_of_an_older_copy_does_not_follow_on_what_a_newer_one_confirmed() -> None:
    """Position 5 of incarnation 1 was replaced in the metalog of 2; one storage node lags."""
    node = with_two()
    node.handle([data(msgspec.structs.replace(of(1, 1, 3, 7), parts=()), copy_of=2)], T0)
    late = node.handle([data(of(1, 1, 5, 9), copy_of=1, sender=B)], T0)
    assert reasons(late) == ["index data of entries that may have been replaced"]
    assert node.handle([asks_of(2, 0, 7)], T0) == [], "the lookup waits for position 5"
    assert answers(node.handle([data(of(2, 1, 5, 9, tag=9), copy_of=2)], T0)) == [(4, 7)]


def test_index_data_buffered_since_before_a_newer_copy_is_requested_again() -> None:
    node = index_node()
    node.handle([data(of(1, 0, 1, 4), of(1, 1, 5, 9), copy_of=1)], T0)
    node.handle([data(msgspec.structs.replace(of(1, 0, 1, 4), parts=()), copy_of=2)], T0)
    late = node.handle([data(of(1, 1, 3, 7), copy_of=2)], T0)
    assert reasons(late) == ["index data of entries that may have been replaced"]
    assert node.position == 5
    node.handle([data(of(2, 1, 5, 9, tag=9), copy_of=2)], T0)
    assert answers(node.handle([asks_of(2, 0, 7)], T0)) == [(4, 7)]


# --- trims


def reported(start: int, floor: Floor, *, epoch: int, previous: int, copy_of: int) -> Received:
    message = TagFloors(
        start, start + 1, (floor,), epoch=Epoch(epoch), previous=Epoch(previous),
        copy_of=Epoch(copy_of),
    )  # fmt: skip
    return Received(A, message, Epoch(1))


def announced(trims: int, *, epoch: int, copy_of: int) -> Received:
    message = TagFloors(
        trims, trims, (), epoch=Epoch(epoch), previous=Epoch(epoch), copy_of=Epoch(copy_of)
    )
    return Received(A, message, Epoch(1))


def questions(effects: Sequence[Effect]) -> list[TagFloorsWanted]:
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
    return [message for message in sent if isinstance(message, TagFloorsWanted)]


FIRST, SECOND = Floor(TAG, 5, of_log=False), Floor(9, 7, of_log=False)


def test_a_trim_that_replaced_another_makes_the_node_fetch_all_floors() -> None:
    node = with_two()
    node.handle([reported(0, FIRST, epoch=1, previous=0, copy_of=1)], T0)
    (question,) = questions(node.handle([reported(1, SECOND, epoch=2, previous=2, copy_of=2)], T0))
    assert (question.after, question.trims) == (NO_FLOORS, 0)
    assert node.status()["trims"] == 0
    page = TagFloors(None, 2, (SECOND,), epoch=Epoch(2), copy_of=Epoch(2))
    node.handle([Received(A, page, Epoch(1)), Received(B, page, Epoch(1))], T0)
    assert node.status()["trims"] == 2


def test_a_lookup_waits_until_the_trims_are_known_to_be_of_its_incarnation() -> None:
    node = with_two()
    node.handle([reported(0, FIRST, epoch=1, previous=0, copy_of=1)], T0)
    node.handle([data(of(2, 1, 5, 9), copy_of=2)], T0)
    assert node.handle([asks_of(2, 5, 7, trims=1)], T0) == []
    due = node.deadline()
    assert due is not None
    (question,) = questions(node.handle([], due))
    assert (question.trims, question.epoch) == (1, 1), "it asks whether those it has are right"
    assert answers(node.handle([announced(1, epoch=1, copy_of=2)], due)) == [(7, 9)]


def test_a_trim_that_a_newer_metalog_lacks_is_not_counted() -> None:
    node = with_two()
    node.handle([reported(0, FIRST, epoch=1, previous=0, copy_of=1)], T0)
    node.handle([reported(1, SECOND, epoch=1, previous=1, copy_of=1)], T0)
    (question,) = questions(node.handle([announced(1, epoch=1, copy_of=2)], T0))
    assert question.trims == 0
    page = TagFloors(None, 1, (FIRST,), epoch=Epoch(1), copy_of=Epoch(2))
    old = TagFloors(None, 2, (FIRST, SECOND), epoch=Epoch(1), copy_of=Epoch(1))
    node.handle([Received(A, old, Epoch(1))], T0)
    assert node.status()["trims"] == 0, "what an older copy has counts no more"
    due = node.deadline()
    assert due is not None
    ((source, _),) = [(e.to, e) for e in node.handle([], due) if isinstance(e, Send)]
    node.handle([Received(source, page, Epoch(1))], due)
    assert node.status()["trims"] == 1
