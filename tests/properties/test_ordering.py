"""The ordering tier under loss, repetition, reordering and restarts.

The model is made of evidence that the sequencers do not share: what the replicas physically have,
what is on each disk, and what left the primary. Storage takes over writers as ARCHITECTURE 8 and
the messages `ShardClaim` and `ShardOpen` say, so prefixes may shrink to the smallest of all
replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

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


class OrderingTier:
    """Three sequencers, three shards with two replicas each."""

    def __init__(self) -> None:
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

    def store(self, shard: ShardId, which: int, count: int) -> None:
        nodes = VIEW.shards[shard].replicas
        replica = self.replicas[shard, nodes[which % len(nodes)]]
        if replica.epoch == self.writers[shard][0]:
            replica.stored += count

    def store_everywhere(self, shard: ShardId, count: int) -> None:
        """The common case: a batch reaches all replicas, and they say so."""
        for which in range(len(VIEW.shards[shard].replicas)):
            self.store(shard, which, count)
        self.network += [(node, VIEW.primary, message) for node, message in self.reports()]

    def report(self, which: int) -> None:
        node, message = list(self.reports())[which]
        self.network.append((node, VIEW.primary, message))

    def take_over(self, shard: ShardId) -> None:
        self.writers[shard] = (self.writers[shard][0] + 1, self.common(shard))

    def open_shard(self, shard: ShardId, which: int) -> None:
        nodes = VIEW.shards[shard].replicas
        replica = self.replicas[shard, nodes[which % len(nodes)]]
        epoch, start = self.writers[shard]
        if replica.epoch < epoch:
            replica.epoch, replica.stored = epoch, start

    # --- network, disks, time

    def deliver(self, which: int, *, repeat: bool) -> None:
        if self.network:
            which %= len(self.network)
            sender, receiver, message = self.network[which]
            if not repeat:
                del self.network[which]
            self.give(receiver, Received(sender, message))

    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.network))):
            self.deliver(0, repeat=False)

    def lose(self, which: int) -> None:
        if self.network:
            del self.network[which % len(self.network)]

    def sync(self, name: NodeId, count: int) -> None:
        process = self.processes[name]
        synced, process.unsynced = process.unsynced[:count], process.unsynced[count:]
        process.disk += [persist.payload for persist in synced]
        self.give(name, *(Persisted(persist.token, NOWHERE) for persist in synced))

    def sync_everywhere(self) -> None:
        for name in VIEW.sequencers:
            self.sync(name, 3)

    def crash(self, name: NodeId) -> None:
        self.give(name, self.processes[name].start())

    def wait(self, duration_s: float) -> None:
        self.now += duration_s
        for name, process in self.processes.items():
            due = process.role.deadline()
            if due is not None and due <= self.now:
                self.give(name)

    def ask_tail(self) -> None:
        self.give(VIEW.primary, Received(ENGINE, TailWanted(1)))

    # --- claims

    def check(self) -> None:
        """Published entries have no gap, all that they order is on all replicas, and a backup is a
        prefix of the primary.
        """
        assert sorted(self.published) == list(range(len(self.published)))
        for shard, length in self.ordered().items():
            assert length <= self.common(shard)
        disk = self.processes[VIEW.primary].disk
        for backup in VIEW.backups:
            stored = self.processes[backup].disk
            assert stored == disk[: len(stored)]

    def heal(self) -> None:
        """From now on nothing is lost: everything that all replicas have becomes ordered."""
        for shard in VIEW.shards:
            for which in range(2):
                self.open_shard(shard, which)
        for _ in range(200):
            self.network += [(node, VIEW.primary, message) for node, message in self.reports()]
            self.settle()
            if all(self.ordered()[shard] == self.common(shard) for shard in VIEW.shards):
                break
            self.wait(1.0)
        assert self.ordered() == {shard: self.common(shard) for shard in VIEW.shards}
        self.wait(1.0)
        self.settle()
        assert len({process.role.length for process in self.processes.values()}) == 1
        self.ask_tail()

    def settle(self) -> None:
        """Deliver and sync until nobody has anything to say."""
        self.sync_everywhere()
        for _ in range(10_000):
            if not self.network:
                return
            self.deliver(0, repeat=False)
            self.sync_everywhere()
        raise AssertionError("they talk for ever")


def faults(tier: OrderingTier, chance: Random) -> list[Callable[[], None]]:
    """What may go wrong."""

    def shard() -> ShardId:
        return chance.choice(sorted(VIEW.shards))

    def any_message() -> int:
        return chance.randrange(64)

    return [
        lambda: tier.lose(any_message()),
        lambda: tier.deliver(any_message(), repeat=False),
        lambda: tier.deliver(any_message(), repeat=True),
        lambda: tier.crash(VIEW.primary),
        lambda: tier.crash(chance.choice(VIEW.backups)),
        lambda: tier.take_over(shard()),
        lambda: tier.open_shard(shard(), chance.randrange(2)),
        lambda: tier.store(shard(), chance.randrange(2), chance.randint(1, 4)),
    ]


def work(tier: OrderingTier, chance: Random) -> list[Callable[[], None]]:
    """What goes on all the time."""
    return [
        lambda: tier.store_everywhere(chance.choice(sorted(VIEW.shards)), chance.randint(1, 4)),
        lambda: tier.report(chance.randrange(3)),
        lambda: tier.deliver_in_order(chance.randint(1, 12)),
        lambda: tier.sync(chance.choice(VIEW.sequencers), chance.randint(1, 3)),
        tier.sync_everywhere,
        lambda: tier.wait(chance.choice([0.4, 1.0])),
        tier.ask_tail,
    ]


@given(seed=st.integers(0, 2**32))
def test_whatever_is_lost_repeated_or_restarted_the_order_is_one(seed: int) -> None:
    """Each seed has some of the faults, so that each also occurs without the others."""
    chance = Random(seed)
    tier = OrderingTier()
    goes_wrong = faults(tier, chance)
    goes_wrong = chance.sample(goes_wrong, chance.randint(0, len(goes_wrong)))
    goes_on = work(tier, chance)
    often = chance.choice([0.1, 0.3, 0.6])
    for _ in range(300):
        wrong = goes_wrong and chance.random() < often
        chance.choice(goes_wrong if wrong else goes_on)()
        tier.check()
    tier.heal()
    tier.check()
