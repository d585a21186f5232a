"""The index tier against a brute-force oracle (PITFALLS A19): all bounds and 1 to 6 index shards.

Index data arrives late, split, repeated or not at all, and index nodes restart empty. Storage has
lost the tags of some records: no answer skips such a record.

The oracle is a list of records. Storage is a stub that knows the same list and speaks the protocol.
It pushes index data, sends pages on request, and receives the exact matches.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from random import Random
from typing import Final, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import EMPTY_TAG, Epoch, Instant, NodeId, ShardId
from indilog.config import Config, node_config
from indilog.kernel.index_snapshot import SnapshotRequest
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.view import View, view_of, with_index_tier_of
from indilog.roles.role import (
    AskSnapshots,
    Effect,
    Event,
    Ignore,
    Received,
    Send,
    SnapshotsAnswered,
    Started,
)
from indilog.wire.messages import (
    Direction,
    IndexBlock,
    IndexData,
    IndexDataWanted,
    IndexLookup,
    LookupResult,
    Message,
    ReadRecords,
    ShardTags,
)
from indilog.wire.replica_messages import PlacementIs
from indilog.wire.tag_messages import TagFloors, TagFloorsWanted
from indilog_index.aggregator import Aggregator
from indilog_index.index_node import IndexNode
from tests.support.repeated import repeated
from tests.support.snapshot_disk import SnapshotDisk

ENGINE: Final = NodeId("engine-0")
LOG_TAGS: Final = (100, 200)
TAGS: Final = (1, 2, 3)
PAGE_BLOCKS: Final = 3


NEWER_VIEW: Final = {
    "index data that contradicts itself",
    "an answer of an index shard that no view here has",
    "an answer of a node that is not of that index shard",
    "a lookup that names no merging node",
}
"""Reasons why a node ignores a message whose sender knows a newer view."""


class Ordered(NamedTuple):
    """A record of the oracle."""

    seqnum: int
    shard: int
    tags: tuple[int, ...]
    lost: bool = False
    """Whether only the existence of the record is known."""


class Expected(NamedTuple):
    """The result of a scan: matches, and the lost record at which it stopped, if any."""

    matches: Sequence[tuple[int, int]]
    stopped_at: int | None


class History:
    """A log: the records of each position by shard, as the metalog would have ordered them."""

    def __init__(self, chance: Random, view: View, positions: int, *, lossy: bool = False) -> None:
        self.view = view
        self.lossy = lossy
        self.positions: list[dict[int, list[Ordered]]] = []
        self.records: list[Ordered] = []
        self.tails = [0]
        uniform = chance.random() < 0.5
        for _ in range(positions):
            productive = [s for s in sorted(view.shards) if chance.random() < 0.6]
            entry = {int(s): self._ordered(chance, s, uniform=uniform) for s in productive}
            self.positions.append(entry)
            self.tails.append(len(self.records))

    def _ordered(self, chance: Random, shard: int, *, uniform: bool) -> list[Ordered]:
        """Records of one shard, in the same log or not, with equal numbers of tags or not."""
        first = len(self.records)
        log = chance.choice(LOG_TAGS)
        for _ in range(chance.randint(1, 4)):
            log = log if uniform else chance.choice(LOG_TAGS)
            tags = chance.sample(TAGS, 1 if uniform else chance.randint(0, len(TAGS)))
            lost = self.lossy and chance.random() < 0.1
            self.records.append(Ordered(len(self.records), shard, (log, *tags), lost))
        return self.records[first:]

    def block(self, position: int, shards: set[int]) -> IndexBlock:
        """Return the index data of a storage node that keeps `shards` for a position."""
        entry = self.positions[position]
        parts = tuple(part_of(shard, entry[shard]) for shard in sorted(entry) if shard in shards)
        productive = tuple(ShardId(shard) for shard in sorted(entry))
        return IndexBlock(position, self.tails[position + 1], productive, parts)

    def expected(self, lookup: IndexLookup) -> Expected:
        """The result of a scan of all records: a lost record ends it, unless it is the target."""
        scanned = [record for record in self.records if record.seqnum < lookup.limit]
        if lookup.direction is Direction.NEXT:
            scanned = [record for record in scanned if record.seqnum >= lookup.bound]
        else:
            scanned = [record for record in scanned[::-1] if record.seqnum <= lookup.bound]
        matches: list[tuple[int, int]] = []
        for seqnum, shard, tags, lost in scanned:
            if len(matches) == lookup.count:
                break
            place = lookup.count == 1 and lookup.tag == EMPTY_TAG and seqnum == lookup.bound
            if lost and not place:
                return Expected(matches, seqnum)
            if lookup.tag == EMPTY_TAG or lookup.tag in tags:
                matches.append((seqnum, shard))
        return Expected(matches, None)

    def are_lost(self, lost: LostRange) -> bool:
        """Whether all of these records are lost."""
        return all(record.lost for record in self.records[lost.start : lost.end])


def part_of(shard: int, records: list[Ordered]) -> ShardTags:
    kept = [() if record.lost else record.tags for record in records]
    return ShardTags(
        ShardId(shard),
        records[0].seqnum,
        len(records),
        bytes(map(len, kept)),
        array("Q", [tag for tags in kept for tag in tags]).tobytes(),
        tuple(LostRange(r.seqnum, r.seqnum + 1) for r in records if r.lost),
    )


class IndexTier:
    """Index nodes, aggregators, storage stubs, and a network with any faults."""

    def __init__(
        self, history: History, config: Config, views: Sequence[View] = (), seed: int = 0
    ) -> None:
        """`views`: those that entries install one after another; all nodes exist from the start."""
        self.history = history
        self.view = history.view
        self.views = views or (history.view,)
        self.chance = Random(seed)
        self.config = config
        self.now = 0.0
        self.known = 0
        """Number of positions that storage has applied."""
        self.network: list[tuple[NodeId, NodeId, Message]] = []
        self.lookups: dict[int, IndexLookup] = {}
        self.answered: set[int] = set()
        self.ignored: list[str] = []
        self.disks: dict[NodeId, SnapshotDisk] = {n: SnapshotDisk() for n in self.view.index_nodes}
        self.checkpoints: dict[NodeId, bytes] = {}
        self.asked: list[tuple[NodeId, SnapshotRequest]] = []
        """Requests of index nodes to their disks, which never lose one."""
        self.roles: dict[NodeId, IndexNode | Aggregator] = {}
        for node in (*self.view.index_nodes, *self.view.aggregators):
            self.restart(node)

    @property
    def installed(self) -> View:
        """The view that storage knows."""
        return self.view_at(self.known)

    def view_at(self, position: int) -> View:
        """The view that the entries below a position have installed."""
        first, *later = self.views
        return next((v for v in later[::-1] if v.eras[-1].start <= position), first)

    def announce(self, share: float = 1.0) -> None:
        """Storage sends the newest view to the index tier; a share of the messages arrives."""
        if len(self.views) > 1:
            message = PlacementIs(self.installed, {})
            for node in (*self.installed.index_nodes, *self.installed.aggregators):
                if self.chance.random() < share:
                    self.network.append((self.view.storage_nodes[0], node, message))

    @property
    def merging(self) -> tuple[NodeId, ...]:
        """Nodes that merge the answers to lookups, now or later."""
        return merging_of(self.view)

    def restart(self, node: NodeId) -> None:
        kind = Aggregator if node in self.view.aggregators else IndexNode
        self.asked = [(asker, request) for asker, request in self.asked if asker != node]
        stored = self.chance.choice(self.views[: self.views.index(self.installed) + 1])
        role = self.roles[node] = kind(node, [stored], self.config)
        if isinstance(role, IndexNode) and node in self.checkpoints:
            role.restore(self.checkpoints[node], ())
        self.give(node, Started(Epoch(1)))

    def take_checkpoint(self, node: NodeId) -> None:
        """Take a checkpoint, from which the node starts after its next restarts."""
        role = self.roles[node]
        assert isinstance(role, IndexNode)
        self.checkpoints[node] = role.checkpoint()()

    def give(self, node: NodeId, *events: Event) -> None:
        for effect in self.roles[node].handle(events, Instant(self.now)):
            self.perform(node, effect)
        self.roles[node].check_invariants()

    def perform(self, node: NodeId, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                self.network.append((node, to, message))
            case AskSnapshots(request=request):
                self.asked.append((node, request))
            case Ignore(reason=reason):
                self.ignored.append(reason)
            case other:
                raise AssertionError(f"an index tier has no reason for {other}")

    # --- storage and engine

    def order(self) -> None:
        """Storage applies one more position and pushes its index data."""
        if self.known == len(self.history.positions):
            return
        position, self.known = self.known, self.known + 1
        if self.installed != self.view_at(position):
            self.announce(0.3)
        receivers = self.view.index_shards[self.view.index_shard_at(position)]
        for node in self.view.storage_nodes:
            first_of = {int(s) for s, p in self.view.shards.items() if p.replicas[0] == node}
            block = self.history.block(position, first_of)
            if block.parts or (not block.productive and node in self.view.storage_nodes[:2]):
                for receiver in receivers:
                    self.network.append((node, receiver, IndexData((block,))))

    def storage_page(self, node: NodeId, wanted: IndexDataWanted) -> IndexData:
        keeps = {int(shard) for shard in self.view.shards_of(node)}
        positions = range(wanted.start, min(wanted.end, self.known), wanted.step)[:PAGE_BLOCKS]
        return IndexData(tuple(self.history.block(p, keeps) for p in positions))

    def ask(self, lookup: IndexLookup) -> None:
        """Send a lookup as an engine does that has applied the positions before the lookup's."""
        view = self.view_at(lookup.position)
        asked = msgspec.structs.replace(
            lookup, view=view.number, index_shards=len(view.index_shards)
        )
        self.lookups[lookup.request] = asked
        for replicas in view.index_shards:
            node = replicas[lookup.request % len(replicas)]
            self.network.append((ENGINE, node, asked))

    def ask_anything(self, chance: Random) -> None:
        position = chance.randint(0, self.known)
        tail = self.history.tails[position]
        self.ask(
            IndexLookup(
                len(self.lookups),
                chance.choice(list(Direction)),
                chance.choice((EMPTY_TAG, *LOG_TAGS, *TAGS, 4)),
                chance.randint(0, tail + 2),
                tail,
                position,
                chance.choice([1, 1, 3, 1000]),
                chance.choice(merging_of(self.view_at(position))),
            )
        )

    def check_read(self, to: NodeId, read: ReadRecords) -> None:
        """A single match: the index tier forwards the read to storage, which answers the engine."""
        lookup = self.lookups[read.request]
        assert to in self.view.shards[read.shard].replicas
        assert (lookup.count, read.origin) == (1, ENGINE)
        matches = [(s, read.shard) for s in read.seqnums]
        assert Expected(matches, None) == self.history.expected(lookup)
        self.answered.add(read.request)

    def check_result(self, result: LookupResult) -> None:
        lookup = self.lookups[result.request]
        matches, lost = list(zip(result.seqnums, result.shards, strict=True)), result.lost
        stopped_at = None
        if lost is not None:
            assert self.history.are_lost(lost)
            stopped_at = lost.start if lookup.direction is Direction.NEXT else lost.end - 1
        assert Expected(matches, stopped_at) == self.history.expected(lookup)
        assert lookup.count > 1 or not matches
        self.answered.add(result.request)

    # --- network and time

    def deliver(self, which: int, *, repeat: bool = False) -> None:
        if not self.network:
            return
        which %= len(self.network)
        sender, to, message = self.network[which]
        if not repeat:
            del self.network[which]
        match message:
            case TagFloorsWanted():
                self.network.append((to, sender, TagFloors(None, 0, ())))
            case IndexDataWanted():
                self.network.append((to, sender, self.storage_page(to, message)))
            case ReadRecords():
                self.check_read(to, message)
            case LookupResult():
                self.check_result(message)
            case _:
                self.give(to, Received(sender, message, Epoch(1)))

    def answer_disk(self, which: int) -> None:
        if self.asked:
            node, request = self.asked.pop(which % len(self.asked))
            self.give(node, SnapshotsAnswered(self.disks[node].answer(request)))

    def lose(self, which: int) -> None:
        if self.network:
            del self.network[which % len(self.network)]

    def wait(self, duration_s: float) -> None:
        self.now += duration_s
        self.announce(0.1)
        for node, role in self.roles.items():
            due = role.deadline()
            if due is not None and due <= self.now:
                self.give(node)

    def settle(self) -> None:
        """Deliver everything in order, until no node has a message to send."""
        for _ in range(100_000):
            if not self.network and not self.asked:
                return
            self.deliver(0)
            self.answer_disk(0)
        raise AssertionError("the nodes exchange messages without end")

    def heal(self) -> None:
        """Stop all losses: from now on every request is answered, if necessary after a retry."""
        for disk in self.disks.values():
            disk.heal()
        for _ in self.history.positions:
            self.order()
        self.announce()
        self.settle()
        again = [
            msgspec.structs.replace(lookup, request=request)
            for request, lookup in enumerate(self.lookups.values(), len(self.lookups))
        ]
        for lookup in again:
            self.ask(lookup)
        for _ in range(50):
            self.settle()
            if self.answered.issuperset(lookup.request for lookup in again):
                break
            self.wait(1.0)
        assert self.answered.issuperset(lookup.request for lookup in again)


def views_from(chance: Random) -> list[View]:
    """A view, and sometimes those that follow it: index shards are added or retired."""
    views = [first_view_from(chance)]
    for start in sorted(chance.sample(range(1, 20), chance.choice([0, 0, 1, 2]))):
        wanted = view_of(
            index_shards=chance.randint(1, 6),
            index_replicas=len(views[0].index_shards[0]),
            aggregators=len(views[0].aggregators),
        )
        view = with_index_tier_of(views[-1], wanted, start)
        if view.eras != views[-1].eras:
            views.append(view)
    return views


def merging_of(view: View) -> tuple[NodeId, ...]:
    return (*view.aggregators, *view.index_nodes)


def first_view_from(chance: Random) -> View:
    replicas = chance.randint(1, 2)
    return view_of(
        storage_nodes=chance.randint(replicas, 3),
        replicas=replicas,
        index_shards=chance.randint(1, 6),
        index_replicas=chance.randint(1, 2),
        aggregators=chance.randint(0, 2),
        engines=chance.randint(1, 4),
    )


def faults(tier: IndexTier, chance: Random) -> list[Callable[[], None]]:
    """Faults that may occur."""
    return [
        lambda: tier.lose(chance.randrange(64)),
        lambda: tier.deliver(chance.randrange(64)),
        lambda: tier.deliver(chance.randrange(64), repeat=True),
        lambda: tier.restart(chance.choice(tier.merging)),
        lambda: tier.take_checkpoint(chance.choice(tier.view.index_nodes)),
        lambda: tier.disks[chance.choice(tier.view.index_nodes)].damage(chance),
    ]


def work(tier: IndexTier, chance: Random) -> list[Callable[[], None]]:
    """Operations that may run at any time."""
    return [
        tier.order,
        lambda: tier.ask_anything(chance),
        lambda: tier.ask_anything(chance),
        *[lambda: tier.deliver(0)] * 6,
        *[lambda: tier.answer_disk(chance.randrange(64))] * 3,
        lambda: tier.wait(chance.choice([0.4, 1.0])),
    ]


@given(seed=st.integers(0, 2**32))
def test_every_answer_equals_a_scan_despite_lost_late_and_repeated_messages(seed: int) -> None:
    """Index data may arrive after the lookup, in parts, or again at a node that lost everything."""
    chance = Random(seed)
    ahead_max = chance.choice([1, 3, 65_536])
    node = node_config(
        resend_s=1.0,
        read_timeout_s=20.0,
        index_positions_ahead_max=ahead_max,
        index_memory_bytes_max=chance.choice([500, 3_000, 10**9]),
        index_snapshot_entries_min=chance.choice([1, 10, 10**6]),
        index_snapshot_retry_s=2.0,
    )
    lossy = chance.random() < 0.5
    views = views_from(chance)
    history = History(chance, views[-1], positions=chance.randint(1, 25), lossy=lossy)
    is_live = chance.random() < 0.6
    tier = IndexTier(history, Config(node=node), views if is_live else (), seed)
    goes_wrong = faults(tier, chance)
    goes_wrong = chance.sample(goes_wrong, chance.randint(0, len(goes_wrong)))
    goes_on = work(tier, chance)
    often = chance.choice([0.1, 0.4])
    for _ in range(200):
        wrong = goes_wrong and chance.random() < often
        chance.choice(goes_wrong if wrong else goes_on)()
    tier.heal()
    assert set(tier.ignored) <= {
        "a lookup waited too long for index data",
        "an index shard did not answer in time",
        "a damaged snapshot; the index is rebuilt",
        "index data that another index shard gets; the index is rebuilt",
        *(NEWER_VIEW if len(tier.views) > 1 else ()),
    }


def every_lookup(history: History) -> Iterator[IndexLookup]:
    """All tags, bounds, directions and prefixes of a log; all merging nodes in rotation."""
    merging = cycle((*history.view.aggregators, *history.view.index_nodes))
    tags = (EMPTY_TAG, LOG_TAGS[0], *TAGS, 4)
    request = 0
    for position in range(0, len(history.tails), 3):
        tail = history.tails[position]
        for direction, tag, count in product(Direction, tags, (1, 3)):
            for bound in (*range(tail + 2), 2**63 - 1):
                yield IndexLookup(
                    request, direction, tag, bound, tail, position, count, next(merging)
                )
                request += 1


@pytest.mark.parametrize("index_shards", [1, 3, *map(repeated, (2, 4, 5, 6))])
def test_every_bound_of_every_tag_at_every_prefix_is_answered_like_a_scan(
    index_shards: int,
) -> None:
    view = view_of(engines=3, index_shards=index_shards)
    history = History(Random(index_shards), view, positions=13, lossy=index_shards % 2 == 0)
    tier = IndexTier(history, Config())
    for _ in history.positions:
        tier.order()
    tier.settle()
    for lookup in every_lookup(history):
        tier.ask(lookup)
        tier.settle()
    assert tier.answered == set(tier.lookups)
    assert len(tier.answered) > 1000
    assert not tier.ignored
