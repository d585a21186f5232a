"""Shards that metalog entries move from one storage node to another (decision 0048)."""

from __future__ import annotations

from indilog.base.ids import Epoch, NodeId, ViewNumber
from indilog.kernel.metalog import NewRecords, NewReplicas, Replicas, Trim
from indilog.kernel.tombstones import decode_gone
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Send
from indilog.wire.messages import (
    AppendBatch,
    BatchesWanted,
    IndexDataWanted,
    Message,
    MetalogEntries,
    ReadRecords,
    ShardProgress,
    ShardStored,
)
from indilog.wire.replica_messages import PlacementIs, StorageAlive
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Machine,
    batch,
    config_of,
    entries,
    messages,
    new_writers,
)
from tests.unit.storage.replicas import all_of, expected

VIEW = view_of(sequencers=3, storage_nodes=3, replicas=2)
A, B, C = VIEW.storage_nodes
RECORDS = 6


class Nodes:
    """Three storage nodes whose messages reach each other, unless they are down."""

    def __init__(self, *, records: int = RECORDS, **limits: float) -> None:
        self.config = config_of(record_cache_bytes_max=0, **limits)
        self.nodes = {name: Machine(VIEW, self.config, name) for name in (A, B, C)}
        self.down: set[NodeId] = set()
        self.sent: list[Send] = []
        self.open(1)
        self.append(*range(0, records, 2))

    def open(self, epoch: int) -> None:
        for name in self.nodes:
            position = self.nodes[name].node.position
            self.tell(name, entries_message((new_writers(position, epoch),)), sender=PRIMARY)

    def append(self, *firsts: int) -> None:
        """Append two records at each of these localids to all nodes; order them."""
        for first in firsts:
            stored = AppendBatch(batch(first, [b"%d" % first, b"%d" % (first + 1)]))
            for name in self.nodes:
                self.tell(name, stored)
            for name in self.nodes:
                ordering = entries({SHARD: 2}, start=self.nodes[name].node.position)
                self.tell(name, ordering, sender=PRIMARY)

    def move(self, *replicas: NodeId) -> None:
        """Let the next entry move the shard, at all nodes that are not down."""
        for name in self.nodes:
            position = self.nodes[name].node.position
            entry = NewReplicas(position, ViewNumber(1), Epoch(1), {SHARD: replicas})
            self.tell(name, entries_message((entry,)), sender=PRIMARY)
        self.wait()

    def wait(self) -> None:
        for _ in range(5):
            for name in self.nodes:
                if name not in self.down:
                    self.deliver(name, self.nodes[name].wait(3.0))

    def restart(self, name: NodeId) -> Machine:
        machine = self.nodes[name] = self.nodes[name].restarted()
        self.deliver(name, machine.started)
        return machine

    def tell(self, name: NodeId, message: Message, *, sender: NodeId = ENGINE) -> None:
        if name not in self.down:
            self.deliver(name, self.nodes[name].tell(message, sender=sender))

    def deliver(self, sender: NodeId, sent: list[Send]) -> None:
        self.sent += sent
        for send in sent:
            if send.to in self.nodes:
                self.tell(send.to, send.message, sender=sender)


def heartbeat(machine: Machine) -> StorageAlive:
    sent = messages(machine.wait(10.0), PRIMARY)
    return [message for message in sent if isinstance(message, StorageAlive)][-1]


def confirm(machine: Machine) -> None:
    """Let the primary answer that there are no more entries."""
    machine.node.ordering.reader.mark_unconfirmed()
    machine.wait(10.0)
    machine.nothing_more()


def cover(machine: Machine) -> None:
    """Take two checkpoints, as a node does while its journal grows, and all entries are known."""
    confirm(machine)
    for _ in range(2):
        machine.take_checkpoint()
        machine.node.checkpointed()
    machine.wait(10.0)


def test_a_new_replica_fetches_the_records_and_then_calls_the_shard_complete() -> None:
    nodes = Nodes()
    nodes.down = {A, B}
    nodes.move(B, C, A)
    copying = heartbeat(nodes.nodes[C]).complete
    nodes.down = {A}
    nodes.move(B, C, A)
    assert copying == ()
    assert all_of(nodes.nodes[C], RECORDS) == expected(RECORDS)
    assert heartbeat(nodes.nodes[C]).complete == (SHARD,)


def test_a_new_replica_stores_what_follows_and_reports_it_with_its_position() -> None:
    nodes = Nodes()
    nodes.down = {A}
    nodes.move(B, C, A)
    machine = nodes.nodes[C]
    known = machine.node.position
    stored = AppendBatch(batch(RECORDS, [b"new"]))
    report = messages(machine.tell(stored), PRIMARY)
    assert ShardStored(SHARD, Epoch(1), RECORDS) in messages(nodes.sent, ENGINE)
    assert report == [ShardProgress(Epoch(0), {SHARD: (Epoch(1), RECORDS + 1)}, known)]


def test_a_dropped_shard_is_not_served_and_its_bytes_are_freed_after_two_checkpoints() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    nodes.move(B, C)
    machine = nodes.nodes[A]
    machine.tell(AppendBatch(batch(RECORDS, [b"new"])))
    assert machine.ignored[-1] == "a batch of a shard that is not kept here, or without records"
    before = list(machine.discarded)
    cover(machine)
    places = [place for kind, _, place in machine.frames if kind is FrameKind.RECORDS]
    assert (before, machine.discarded) == ([], places)
    assert not machine.node.shards


def test_a_read_that_waits_for_a_position_is_dropped_with_its_shard() -> None:
    machine = Nodes().nodes[A]
    position = machine.node.position
    machine.tell(ReadRecords(1, ENGINE, SHARD, (0,), trims=1))
    moved = NewReplicas(position, ViewNumber(1), Epoch(1), {SHARD: (B, C)})
    trim = Trim(position + 1, ViewNumber(1), Epoch(1), 0, ())
    machine.tell(entries_message((moved, trim)), sender=PRIMARY)
    assert machine.ignored == ["a read of a shard that was moved while it waited"]


def test_batches_on_cold_storage_are_noted_before_their_object_is_deleted() -> None:
    """A restart before the deletion must not find them in the object."""
    nodes = Nodes()
    machine = nodes.nodes[A]
    shard = machine.node.shards[SHARD]
    shard.move(0, RECORDS, 1)
    nodes.move(B, C, A)
    nodes.move(B, C)
    cover(machine)
    freed = [decode_gone(data) for kind, data, _ in machine.frames if kind is FrameKind.FREED]
    assert [(gone.first, gone.end) for gone in freed] == [(0, 2), (2, 4), (4, 6)]
    assert machine.discarded == []


def test_a_shard_that_comes_back_has_its_batches_and_fetches_only_the_others() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    nodes.move(B, C)
    nodes.append(RECORDS)
    nodes.sent.clear()
    nodes.move(B, A, C)
    wanted = [send.message for send in nodes.sent if isinstance(send.message, BatchesWanted)]
    assert {(message.first, message.end) for message in wanted} == {(RECORDS, RECORDS + 2)}
    assert all_of(nodes.nodes[A], RECORDS + 2) == expected(RECORDS + 2)


def test_batches_survive_a_restart_that_lost_the_entry_that_assigned_the_shard() -> None:
    """Entries from other storage nodes are not journaled."""
    nodes = Nodes()
    nodes.move(B, C, A)
    nodes.append(RECORDS)
    machine = nodes.nodes[C]
    machine.frames = [frame for frame in machine.frames if frame[0] is not FrameKind.ORDERING]
    again = nodes.restart(C)
    kept = set(again.node.shards)
    nodes.down = {A, B}
    again.tell(nodes_history(nodes.nodes[B]), sender=PRIMARY)
    assert (kept, set(again.node.shards)) == (set(), {SHARD})
    assert all_of(again, RECORDS + 2) == expected(RECORDS + 2)


def test_unowned_batches_are_in_a_checkpoint_too() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    machine = nodes.nodes[C]
    machine.frames = [frame for frame in machine.frames if frame[0] is not FrameKind.ORDERING]
    nodes.restart(C).take_checkpoint()
    again = nodes.restart(C)
    nodes.down = {A, B}
    again.tell(nodes_history(nodes.nodes[B]), sender=PRIMARY)
    assert all_of(again, RECORDS) == expected(RECORDS)


def test_unowned_batches_are_freed_if_the_shard_does_not_come_back() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    machine = nodes.nodes[C]
    places = [place for kind, _, place in machine.frames if kind is FrameKind.REPAIRED]
    machine.frames = [frame for frame in machine.frames if frame[0] is not FrameKind.ORDERING]
    nodes.down = {A, B}
    again = nodes.restart(C)
    again.tell(entries_message((new_writers(0),)), sender=PRIMARY)
    cover(again)
    assert sorted(again.discarded) == sorted(places)


def nodes_history(machine: Machine) -> MetalogEntries:
    return entries_message(machine.node.ordering.entries(0, machine.node.position))


def test_freed_records_are_missing_and_not_trimmed_when_the_shard_comes_back() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    nodes.move(B, C)
    cover(nodes.nodes[A])
    nodes.restart(A)
    nodes.nodes[A].tell(nodes_history(nodes.nodes[B]), sender=PRIMARY)
    nodes.down = {B, C}
    nodes.move(B, A, C)
    shard = nodes.nodes[A].node.shards[SHARD]
    assert (shard.missing, shard.gone_in(0, RECORDS)) == (RECORDS, [])
    nodes.down = set()
    nodes.move(B, A, C)
    assert all_of(nodes.nodes[A], RECORDS) == expected(RECORDS)


def test_a_dropped_shard_comes_back_from_a_checkpoint_with_its_batches() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    nodes.move(B, C)
    nodes.nodes[A].take_checkpoint()
    nodes.restart(A)
    nodes.down = {B, C}
    nodes.move(B, A, C)
    assert all_of(nodes.nodes[A], RECORDS) == expected(RECORDS)


def test_a_batch_in_flight_when_its_shard_was_dropped_is_stored_again() -> None:
    nodes = Nodes()
    machine = nodes.nodes[A]
    machine.holding = True
    machine.tell(AppendBatch(batch(RECORDS, [b"new"])))
    for replicas in ((B, C), (B, A, C)):
        entry = NewReplicas(machine.node.position, ViewNumber(1), Epoch(1), {SHARD: replicas})
        machine.tell(entries_message((entry,)), sender=PRIMARY)
    machine.holding = False
    machine.confirm()
    machine.tell(AppendBatch(batch(RECORDS, [b"new"])))
    assert machine.node.shards[SHARD].stored == RECORDS + 1


def test_an_entry_that_was_replaced_drops_no_shard() -> None:
    """It may be proposed again, and records that the node stored under it may be acknowledged."""
    nodes = Nodes()
    nodes.move(B, C, A)
    machine = nodes.nodes[C]
    position = machine.node.position - 1
    other = NewRecords(position, ViewNumber(1), Epoch(2), {})
    machine.node.ordering.reader.mark_unconfirmed()
    machine.wait(10.0)
    assert machine.asked is not None
    corrected = MetalogEntries(position, Epoch(1), (other,), position + 1, machine.asked.request)
    machine.tell(corrected, sender=PRIMARY, incarnation=2)
    assert machine.node.replaced == 1
    assert (set(machine.node.shards), machine.discarded) == ({SHARD}, [])


def test_an_unordered_batch_of_an_earlier_writer_does_not_come_back() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    nodes.nodes[A].tell(AppendBatch(batch(RECORDS, [b"old"])))
    nodes.move(B, C)
    nodes.open(2)
    nodes.move(B, A, C)
    shard = nodes.nodes[A].node.shards[SHARD]
    assert (shard.stored, shard.writer) == (RECORDS, 2)


def test_index_nodes_learn_of_replicas_at_once_and_periodically() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    since = nodes.nodes[B].node.position - 1
    known = PlacementIs(VIEW, {SHARD: Replicas(since, (B, C, A))})
    announced = {send.to for send in nodes.sent if send.message == known}
    nodes.sent.clear()
    nodes.wait()
    again = {send.to for send in nodes.sent if send.message == known}
    assert announced == again == {*VIEW.index_nodes, *VIEW.aggregators}


def test_an_index_node_that_restarts_learns_of_replicas_with_its_first_request() -> None:
    """It knows only a view, so it would send reads to nodes that no longer keep the shard."""
    nodes = Nodes()
    machine = nodes.nodes[B]
    reader, wanted = VIEW.index_nodes[0], IndexDataWanted(0, 1, 1)

    def learns(sender: NodeId, incarnation: int) -> list[NodeId]:
        sent = machine.tell(wanted, sender=sender, incarnation=incarnation)
        return [send.to for send in sent if isinstance(send.message, PlacementIs)]

    assert learns(reader, 1) == [], "no shard was moved"
    nodes.move(B, C, A)
    assert learns(reader, 1) == [reader]
    assert learns(reader, 1) == []
    assert learns(reader, 2) == [reader]
    assert learns(reader, 1) == [], "a late message of the earlier incarnation"
    assert learns(ENGINE, 1) == [], "an engine learns of replicas from the metalog"


def test_a_copy_waits_for_a_silent_replica_only_once() -> None:
    """A34: repair from a node that is permanently gone ends (PITFALLS 17)."""
    nodes = Nodes(records=40, page_bytes_max=1)
    nodes.down = {A}
    nodes.sent.clear()
    nodes.move(B, C, A)
    for _ in range(4):
        nodes.wait()
    asked = [send.to for send in nodes.sent if isinstance(send.message, BatchesWanted)]
    assert (asked.count(A), nodes.nodes[C].node.status()["missing_records"]) == (1, 0)


def test_a_lost_replica_is_asked_again_for_what_the_others_lack() -> None:
    nodes = Nodes(page_bytes_max=1)
    nodes.nodes[B] = Machine(VIEW, nodes.config, B)
    nodes.down = {A}
    nodes.move(B, C, A)
    nodes.down = {B}
    nodes.wait()
    nodes.down = set()
    nodes.wait()
    assert all_of(nodes.nodes[C], RECORDS) == expected(RECORDS)


def test_a_dropped_shard_wants_two_checkpoints_so_that_its_bytes_are_freed() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    nodes.move(B, C)
    machine = nodes.nodes[A]
    confirm(machine)
    wanted = [machine.node.wants_checkpoint]
    for _ in range(2):
        machine.take_checkpoint()
        machine.node.checkpointed()
        wanted.append(machine.node.wants_checkpoint)
    assert wanted == [True, True, False]
    assert not nodes.nodes[B].node.wants_checkpoint
    machine.wait(10.0)
    assert machine.discarded


def test_checkpoints_that_would_not_have_the_entry_are_not_wanted() -> None:
    nodes = Nodes()
    nodes.move(B, C, A)
    nodes.move(B, C)
    machine = nodes.nodes[A]
    machine.node._moved.dropped[-1].position = machine.node.position
    assert not machine.node.wants_checkpoint
