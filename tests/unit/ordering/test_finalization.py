"""Which shards are to be finalized, and when (Scalog 4.4.1)."""

from __future__ import annotations

import msgspec
import pytest

from indilog.base.ids import Epoch, Instant, ShardId
from indilog.kernel.metalog import NewView, NewWriters
from indilog.kernel.placement import Placement
from indilog.kernel.view import NO_WRITER, view_of
from indilog.roles.role import MembersWanted
from indilog.wire.sequencer_messages import MetalogAppend
from indilog_ordering.finalization import GRACE_S_MAX, Finalizations
from indilog_ordering.sequencer import Sequencer
from tests.unit.ordering.test_primary import ENGINE, T0, persisted, progress, sent, stored
from tests.unit.ordering.test_views import VIEW, primary

SHARD, NEW = ShardId(0), ShardId(1)


@pytest.fixture
def finalizations() -> Finalizations:
    return Finalizations(Placement(view_of(engines=2)))


def test_a_shard_without_grace_is_due_at_once(finalizations: Finalizations) -> None:
    finalizations.want({SHARD: 0}, T0)
    assert finalizations.due(0, T0) == [SHARD]


def test_a_shard_is_due_when_the_last_cut_of_its_grace_is_committed(
    finalizations: Finalizations,
) -> None:
    """4.4.1: it stops accepting reports after a configurable number of committed cuts."""
    finalizations.want({SHARD: 2}, T0)
    finalizations.note_cut(10)
    assert finalizations.due(11, T0) == []
    finalizations.note_cut(12)
    finalizations.note_cut(13)
    assert finalizations.due(12, T0) == []
    assert finalizations.due(13, T0) == [SHARD]


def test_without_cuts_the_grace_ends_after_some_seconds(finalizations: Finalizations) -> None:
    finalizations.want({SHARD: 2}, T0)
    end = Instant(T0 + GRACE_S_MAX)
    assert finalizations.deadline() == end
    assert finalizations.due(0, Instant(end - 0.1)) == []
    assert finalizations.due(0, end) == [SHARD]


def test_a_grace_continues_if_it_is_wanted_again_and_ends_with_0_cuts(
    finalizations: Finalizations,
) -> None:
    finalizations.want({SHARD: 1}, T0)
    finalizations.note_cut(5)
    finalizations.want({SHARD: 1, NEW: 3}, T0)
    assert finalizations.due(6, T0) == [SHARD]
    finalizations.want({SHARD: 1, NEW: 0}, T0)
    assert finalizations.due(6, T0) == [SHARD, NEW]


def test_unknown_and_finalized_shards_are_not_wanted() -> None:
    view = view_of()
    ended = msgspec.structs.replace(view.shards[SHARD], finalized=True)
    placement = Placement(msgspec.structs.replace(view, shards={SHARD: ended}))
    finalizations = Finalizations(placement)
    finalizations.want({SHARD: 0, ShardId(7): 0}, T0)
    assert not finalizations
    assert finalizations.deadline() is None


def entries_of(node: Sequencer, *events: object, now: Instant = T0) -> list[object]:
    found: list[object] = []
    for _, message in sent(node.handle(events, now), MetalogAppend):  # type: ignore[arg-type]
        found += [entry for entry in message.entries if entry not in found]
    return found


def finalize(cuts: int, version: int = 1) -> MembersWanted:
    members = msgspec.structs.replace(VIEW.members, version=version, finalized={SHARD: cuts})
    return MembersWanted(members)


def commit(node: Sequencer, first: int, end: int) -> list[object]:
    """Let entries [first, end) become durable, here and at another sequencer; return the entries
    that are proposed then.
    """
    return entries_of(node, *map(persisted, range(first, end)), stored(end - 1))


def test_the_writer_of_a_finalized_shard_gets_a_new_one_in_the_next_entry() -> None:
    node = primary()
    ended, begun = entries_of(node, finalize(0))
    assert isinstance(ended, NewView)
    placed = ended.following.shards[SHARD]
    assert (placed.writer, placed.ended, placed.finalized) == (NO_WRITER, Epoch(1), True)
    assert ended.following.shard_written_by(ENGINE) == NEW
    assert isinstance(begun, NewWriters)
    assert begun.writers == {NEW: Epoch(1)}


def test_a_finalized_shard_orders_nothing_and_the_new_one_does() -> None:
    node = primary()
    entries_of(node, finalize(0))
    commit(node, 2, 4)
    replicas = VIEW.shards[SHARD].replicas
    late = [progress(3, sender=replica) for replica in replicas]
    assert entries_of(node, *late) == []
    assert node.tail == 0


def test_records_that_were_reported_before_are_ordered_before_the_shard_ends() -> None:
    node = primary()
    reports = [progress(3, sender=replica) for replica in VIEW.shards[SHARD].replicas]
    first, second, *_ = entries_of(node, *reports, finalize(0))
    assert getattr(first, "counts", None) == {SHARD: 3}
    assert isinstance(second, NewView)


def test_a_scheduled_finalization_waits_for_its_cuts() -> None:
    node = primary()
    [view] = entries_of(node, finalize(1))
    assert isinstance(view, NewView)
    assert not view.following.shards[SHARD].finalized
    replicas = VIEW.shards[SHARD].replicas
    [cut] = entries_of(node, *(progress(3, sender=n) for n in replicas))
    assert getattr(cut, "counts", None) == {SHARD: 3}
    assert [type(entry) for entry in commit(node, 2, 4)] == [NewView, NewWriters]


def test_a_grace_without_cuts_has_a_deadline() -> None:
    node = primary()
    entries_of(node, finalize(5))
    deadline = node.deadline()
    assert deadline is not None
    assert deadline <= T0 + GRACE_S_MAX
    later = Instant(T0 + GRACE_S_MAX)
    found = [type(entry) for entry in entries_of(node, now=later)]
    assert found[-2:] == [NewView, NewWriters]


def test_a_shard_is_finalized_once() -> None:
    node = primary()
    entries_of(node, finalize(0))
    commit(node, 2, 4)
    assert entries_of(node, finalize(0, version=2)) != [], "the view has the newest version"
    commit(node, 4, 5)
    assert entries_of(node, finalize(0, version=2)) == []
