"""A storage node and the views that entries install (decision 0049)."""

from __future__ import annotations

import msgspec

from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.kernel.metalog import NO_INCARNATION, Base, NewView
from indilog.kernel.placement import Placement
from indilog.kernel.view import NO_WRITER, Members, View, view_of, view_with
from indilog.roles.role import Send
from indilog.wire.messages import AppendBatch, IndexData, ShardProgress, ShardStored
from indilog.wire.replica_messages import PlacementIs
from indilog_storage.history import HistoryFetch
from indilog_storage.ordering import Ordering
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Machine,
    batch,
    config_of,
    entries,
    new_writers,
)

VIEW = view_of(sequencers=3, storage_nodes=3, replicas=2)
A, B, C = VIEW.storage_nodes
JOINING, NEW_SHARD = NodeId("engine-1"), ShardId(1)


def installed(position: int) -> View:
    """The view that an entry at `position` installs: one more compute node and index shard."""
    more = view_of(index_shards=3).index_shards
    members = Members((ENGINE, JOINING), VIEW.storage_nodes, more, VIEW.aggregators, 1)
    return view_with(VIEW, members, position, Placement(VIEW).replicas, lambda _: NO_INCARNATION)


def machine_with_view(node: NodeId = C) -> tuple[Machine, list[Send]]:
    """A storage node that has applied three entries, the last of which installs a view."""
    machine = Machine(VIEW, config_of(), node)
    machine.tell(entries_message((new_writers(0, 1),)), sender=PRIMARY)
    machine.tell(AppendBatch(batch(0, [b"old"])))
    machine.tell(entries({SHARD: 1}, start=1), sender=PRIMARY)
    entry = NewView(2, ViewNumber(1), Epoch(1), installed(2))
    return machine, machine.tell(entries_message((entry,)), sender=PRIMARY)


def test_a_new_shard_is_kept_by_its_replicas_only() -> None:
    replicas = installed(2).shards[NEW_SHARD].replicas
    kept = {node: NEW_SHARD in machine_with_view(node)[0].node.shards for node in (A, B, C)}
    assert kept == {node: node in replicas for node in (A, B, C)}


def test_index_nodes_of_the_new_view_learn_it_before_they_get_index_data() -> None:
    for node in (A, B, C):
        _, sent = machine_with_view(node)
        announced = {send.to for send in sent if send.message == PlacementIs(installed(2), {})}
        assert announced == {*installed(2).index_nodes, *installed(2).aggregators}
        first = next(send.message for send in sent if send.to == "index-2-0")
        assert isinstance(first, PlacementIs)


def test_index_data_goes_to_the_nodes_of_the_new_view() -> None:
    machine, _ = machine_with_view(A)
    machine.tell(AppendBatch(batch(1, [b"new"])))
    sent = machine.tell(entries({SHARD: 1}, start=3), sender=PRIMARY)
    receivers = {send.to for send in sent if isinstance(send.message, IndexData)}
    assert receivers == {"index-0-0", ENGINE, JOINING}, "position 3 of an era of three shards"


def test_the_view_survives_a_restart_with_and_without_a_checkpoint() -> None:
    for checkpointed in (False, True):
        machine, _ = machine_with_view()
        if checkpointed:
            machine.take_checkpoint()
        again = machine.restarted()
        assert again.node.ordering.view == installed(2)
        assert NEW_SHARD in again.node.shards


def test_a_view_that_was_replaced_is_forgotten() -> None:
    machine, _ = machine_with_view()
    machine.node._cut_off(2)
    assert machine.node.ordering.view is None
    assert machine.node._moved.placement.view == VIEW


def test_other_storage_nodes_get_the_entry_with_the_history() -> None:
    machine, _ = machine_with_view()
    (entry,) = machine.node.ordering.entries(2, 3)
    assert isinstance(entry, NewView)
    assert entry.following == installed(2)


def test_the_last_storage_node_still_sends_the_view_periodically() -> None:
    """The message that it sent with the entry may be lost."""
    machine, _ = machine_with_view(A)
    placement = machine.node._moved.placement
    placement.view = msgspec.structs.replace(placement.view, left=(B, C))
    assert not placement.view.moves_shards
    again = [send.to for send in machine.wait(10.0) if isinstance(send.message, PlacementIs)]
    assert set(again) == {*placement.view.index_nodes, *placement.view.aggregators}


def test_a_shard_without_writer_is_answered_to_no_node_at_a_start() -> None:
    machine, _ = machine_with_view(A)
    view = machine.node._moved.placement.view
    position = machine.node.position
    members = msgspec.structs.replace(view.members, engines=(ENGINE,), version=2)
    left = view_with(
        view, members, position, machine.node._moved.placement.replicas, lambda _: NO_INCARNATION
    )
    entry = NewView(position, ViewNumber(1), Epoch(1), left)
    machine.tell(entries_message((entry,)), sender=PRIMARY)
    assert left.shards[NEW_SHARD].writer == NO_WRITER
    again = machine.restarted()
    answered = {send.to for send in again.started if isinstance(send.message, ShardStored)}
    assert answered == {ENGINE}


def test_batches_of_a_writer_that_a_view_has_ended_are_neither_stored_nor_reported() -> None:
    """They would never be ordered, and their writer may not know it yet."""
    machine = Machine(VIEW, config_of(), A)
    machine.tell(entries_message((new_writers(0, 1),)), sender=PRIMARY)
    machine.tell(AppendBatch(batch(0, [b"stored"])))
    assert any(isinstance(send.message, ShardProgress) for send in machine.wait(0.6))
    members = msgspec.structs.replace(VIEW.members, engines=(JOINING,), version=1)
    view = view_with(VIEW, members, 1, Placement(VIEW).replicas, lambda _: Epoch(1))
    entry = NewView(1, ViewNumber(1), Epoch(1), view)
    machine.tell(entries_message((entry,)), sender=PRIMARY)
    machine.tell(AppendBatch(batch(1, [b"late"])))
    assert machine.node.shards[SHARD].stored == 1
    machine.wait(0.6)
    assert not any(isinstance(send.message, ShardProgress) for send in machine.wait(5.0))


def test_old_entries_are_fetched_from_nodes_of_the_newest_view() -> None:
    """A node that lost its disk may start with a view in which it is alone."""
    first = view_of(sequencers=3)
    members = msgspec.structs.replace(first.members, storage_nodes=(A, B), version=1)
    view = view_with(first, members, 3, Placement(first).replicas, lambda _: NO_INCARNATION)
    history = HistoryFetch(A, Placement(first), Ordering(), config_of().node)
    history.begin(Base(10, Epoch(1), view=view))
    assert [effect.to for effect in history.conclude(Instant(0.0))] == [B]  # type: ignore[union-attr]
