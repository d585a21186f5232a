"""The ordering tier under loss, repetition, reordering and restarts.

The model is made of evidence that the sequencers do not share: what the replicas physically have,
what is on each disk, and what left the primary. Storage takes over writers as ARCHITECTURE 8 and
the messages `ShardClaim` and `ShardOpen` say, so prefixes may shrink to the smallest of all
replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from indilog.config import Config, NodeConfig
from indilog.ids import Epoch, Instant, NodeId, ShardId
from indilog.messages import Message, MetalogEntries, ShardProgress, TailIs, TailWanted
from indilog.metalog import NewRecords, entry_decoded
from indilog.roles import (
    Effect,
    Event,
    FrameKind,
    Ignore,
    Location,
    Persist,
    Persisted,
    Received,
    Send,
    Started,
)
from indilog.view import View, view_of
from ordering.sequencer import Sequencer

VIEW: Final[View] = view_of(sequencers=3, storage_nodes=3, replicas=2, engines=3)
CONFIG: Final = Config(node=NodeConfig(resend_s=1.0, metalog_entries_in_flight_max=3))
ENGINE: Final = NodeId("engine-0")
NOWHERE: Final = Location(0, 0, 0)
SHARDS: Final = st.sampled_from(sorted(VIEW.shards))
SEQUENCERS: Final = st.sampled_from(VIEW.sequencers)
WHICH: Final = st.integers(0, 2)


class Replica:
    """One storage node's copy of one shard."""

    def __init__(self) -> None:
        self.epoch = 1
        self.stored = 0


class Process:
    """One sequencer: a role, its disk, and what is written but not synced."""

    def __init__(self, name: NodeId) -> None:
        self.name = name
        self.starts = 0
        self.disk: list[bytes] = []
        self.unsynced: list[Persist] = []

    def start(self) -> Event:
        """Begin anew from what is on disk."""
        self.starts += 1
        self.unsynced.clear()
        self.role = Sequencer(self.name, [VIEW], CONFIG)
        for payload in self.disk:
            self.role.recover(FrameKind.METALOG, payload, NOWHERE)
        return Started(Epoch(self.starts))


class OrderingTier(RuleBasedStateMachine):
    """Three sequencers, three shards with two replicas each."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.replicas = {
            (shard, node): Replica() for shard, p in VIEW.shards.items() for node in p.replicas
        }
        self.writers = dict.fromkeys(VIEW.shards, (1, 0))
        """The newest writer of each shard and where it began."""
        self.network: list[tuple[NodeId, NodeId, Message]] = []
        self.published: dict[int, NewRecords] = {}
        self.processes = {name: Process(name) for name in VIEW.sequencers}
        for name, process in self.processes.items():
            self.give(name, process.start())

    # --- the world

    def give(self, name: NodeId, *events: Event) -> None:
        process = self.processes[name]
        for effect in process.role.handle(events, Instant(self.now)):
            self.perform(name, effect)
        process.role.check_invariants()

    def perform(self, name: NodeId, effect: Effect) -> None:
        match effect:
            case Persist():
                self.processes[name].unsynced.append(effect)
            case Send(to=to, message=MetalogEntries(entries=entries)):
                assert to in VIEW.engines + VIEW.storage_nodes
                for entry in entries:
                    self.check_published(entry)
            case Send(to=to, message=TailIs() as told):
                ordered = self.ordered()
                assert told.tail >= sum(ordered.values()), "a published record is below the tail"
                assert all(told.cut.get(s, 0) >= length for s, length in ordered.items())
                assert told.tail == sum(told.cut.values())
            case Send(to=to, message=message):
                self.network.append((name, to, message))
            case Ignore(reason=reason):
                assert reason.startswith("it is not known yet"), reason
            case other:
                raise AssertionError(f"a sequencer has no reason for {other}")

    def check_published(self, entry: NewRecords) -> None:
        """A published entry is on two disks, follows on, and never changes."""
        assert self.published.setdefault(entry.position, entry) == entry
        holding = [
            process
            for process in self.processes.values()
            if len(process.disk) > entry.position
            and entry_decoded(process.disk[entry.position]) == entry
        ]
        assert len(holding) >= 2, "a published entry survives the loss of any one disk"

    def ordered(self) -> dict[ShardId, int]:
        """How far each shard is ordered by what was published."""
        lengths = dict.fromkeys(VIEW.shards, 0)
        for entry in self.published.values():
            for shard, count in entry.counts.items():
                lengths[shard] += count
        return lengths

    def common(self, shard: ShardId) -> int:
        """What all replicas of a shard have."""
        return min(replica.stored for (s, _), replica in self.replicas.items() if s == shard)

    def reports(self) -> Iterator[tuple[NodeId, Message]]:
        for node in VIEW.storage_nodes:
            stored = {
                shard: (Epoch(replica.epoch), replica.stored)
                for (shard, owner), replica in self.replicas.items()
                if owner == node
            }
            yield node, ShardProgress(stored)

    # --- storage

    @rule(shard=SHARDS, which=WHICH, count=st.integers(1, 4))
    def store(self, shard: ShardId, which: int, count: int) -> None:
        nodes = VIEW.shards[shard].replicas
        replica = self.replicas[shard, nodes[which % len(nodes)]]
        if replica.epoch == self.writers[shard][0]:
            replica.stored += count

    @rule(shard=SHARDS, count=st.integers(1, 4))
    def store_everywhere(self, shard: ShardId, count: int) -> None:
        """The common case: a batch reaches all replicas, and they say so."""
        for which in range(len(VIEW.shards[shard].replicas)):
            self.store(shard, which, count)
        self.network += [(node, VIEW.primary, message) for node, message in self.reports()]

    @rule(which=WHICH)
    def report(self, which: int) -> None:
        node, message = list(self.reports())[which]
        self.network.append((node, VIEW.primary, message))

    @rule(shard=SHARDS)
    def take_over(self, shard: ShardId) -> None:
        self.writers[shard] = (self.writers[shard][0] + 1, self.common(shard))

    @rule(shard=SHARDS, which=WHICH)
    def open_shard(self, shard: ShardId, which: int) -> None:
        nodes = VIEW.shards[shard].replicas
        replica = self.replicas[shard, nodes[which % len(nodes)]]
        epoch, start = self.writers[shard]
        if replica.epoch < epoch:
            replica.epoch, replica.stored = epoch, start

    # --- network, disks, time

    @rule(which=st.integers(0, 30), repeat=st.booleans())
    def deliver(self, which: int, *, repeat: bool) -> None:
        if self.network:
            which %= len(self.network)
            sender, receiver, message = self.network[which]
            if not repeat:
                del self.network[which]
            self.give(receiver, Received(sender, message))

    @rule(count=st.integers(1, 12))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.network))):
            self.deliver(0, repeat=False)

    @rule(which=st.integers(0, 30))
    def lose(self, which: int) -> None:
        if self.network:
            del self.network[which % len(self.network)]

    @rule(name=SEQUENCERS, count=st.integers(1, 3))
    def sync(self, name: NodeId, count: int) -> None:
        process = self.processes[name]
        synced, process.unsynced = process.unsynced[:count], process.unsynced[count:]
        process.disk += [persist.payload for persist in synced]
        self.give(name, *(Persisted(persist.token, NOWHERE) for persist in synced))

    @rule()
    def sync_everywhere(self) -> None:
        for name in VIEW.sequencers:
            self.sync(name, 3)

    @rule(name=SEQUENCERS)
    def crash(self, name: NodeId) -> None:
        self.give(name, self.processes[name].start())

    @rule(duration_s=st.sampled_from([0.4, 1.0]))
    def wait(self, duration_s: float) -> None:
        self.now += duration_s
        for name, process in self.processes.items():
            due = process.role.deadline()
            if due is not None and due <= self.now:
                self.give(name)

    @rule()
    def ask_tail(self) -> None:
        self.give(VIEW.primary, Received(ENGINE, TailWanted(1)))

    # --- claims

    @invariant()
    def seqnums_are_dense_and_every_ordered_record_is_on_all_replicas(self) -> None:
        """Entries that were published say the same to everyone, without gaps in what all have."""
        assert sorted(self.published) == list(range(len(self.published)))
        for shard, length in self.ordered().items():
            assert length <= self.common(shard)

    @invariant()
    def a_backup_is_a_prefix_of_the_primary(self) -> None:
        disk = self.processes[VIEW.primary].disk
        for backup in VIEW.backups:
            stored = self.processes[backup].disk
            assert stored == disk[: len(stored)]

    def teardown(self) -> None:
        """When nothing is lost any more, everything that all replicas have becomes ordered."""
        for shard in VIEW.shards:
            for which in range(2):
                self.open_shard(shard, which)
        for _ in range(200):
            self.network += [(node, VIEW.primary, message) for node, message in self.reports()]
            while self.network:
                self.deliver(0, repeat=False)
                self.sync_everywhere()
            if all(self.ordered()[shard] == self.common(shard) for shard in VIEW.shards):
                break
            self.wait(1.0)
        assert self.ordered() == {shard: self.common(shard) for shard in VIEW.shards}
        self.wait(1.0)
        while self.network:
            self.deliver(0, repeat=False)
            self.sync_everywhere()
        assert len({process.role.length for process in self.processes.values()}) == 1
        self.ask_tail()


TestOrderingTier = OrderingTier.TestCase
TestOrderingTier.settings = settings(stateful_step_count=80)
