"""The index node role: the index of one index shard, and lookups in it (thesis 5.3.1, 5.4, 5.6.1).

An index shard has the metalog positions that the schedule gives it (`indilog.index_schedule`). The
node applies them strictly in order, each when the parts of all productive shards are there. It
answers a lookup when it has applied all its positions below the lookup's, and looks only below the
lookup's `limit`: so all index shards answer about the same prefix of the log (ARCHITECTURE 9.2).

As the master of a lookup (thesis 5.2, "master-slave-mode") it merges the answers of all index
shards, like an aggregator.

It has no disk. What it misses, after a restart everything, it fetches from storage.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import assert_never

from index_tier.fetch import Fetch, sources_of
from index_tier.merging import Merging
from index_tier.tag_index import TagIndex
from index_tier.waiting import WaitingLookups
from indilog.config import Config
from indilog.ids import MAX_SEQNUM, Instant, MetalogPosition, NodeId, SeqNum
from indilog.index_feed import IndexFeed, ReadyBlock
from indilog.index_schedule import NO_POSITION, IndexPositions
from indilog.log import READ_RANGE_LIMIT_MAX
from indilog.messages import (
    NO_RECORD,
    Direction,
    IndexAnswer,
    IndexBlock,
    IndexData,
    IndexLookup,
    ReadRecords,
    TagFirsts,
    TagFirstsWanted,
)
from indilog.roles import (
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    Persisted,
    Received,
    Send,
    SpaceChanged,
    Started,
)
from indilog.view import Views, placement_of


class IndexNode:
    """One replica of one index shard.

    Guarantees: an answer is complete for this index shard's part of the prefix that the lookup asks
    about, whenever it is given; a lookup that cannot be answered in time is dropped, never answered
    from less. A position whose index data no replica has holds up all lookups beyond it: absent is
    never guessed.
    """

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        view = views[-1]
        mine = [i for i, replicas in enumerate(view.index_shards) if node in replicas]
        assert len(mine) == 1, f"{node} is an index node of the newest view"
        self._node = node
        self._views = views
        self._view = view
        self._resend_s = config.node.resend_s
        self._storage_nodes = frozenset(n for v in views for n in v.storage_nodes)
        self._engines = frozenset(n for v in views for n in v.engines)
        self._merging_nodes = frozenset((*view.aggregators, *view.index_nodes))
        self._known_shards = frozenset(shard for v in views for shard in v.shards)
        self.index_shard = mine[0]
        self._positions = IndexPositions.of(view.eras, self.index_shard)
        self._feed = IndexFeed(
            0,
            positions=self._positions,
            positions_max=config.node.index_positions_ahead_max,
            bytes_max=config.node.index_ahead_bytes_max,
        )
        self._index = TagIndex()
        self._waiting = WaitingLookups(
            lookups_max=config.node.lookups_pending_max, timeout_s=config.node.read_timeout_s
        )
        self._merging = Merging(views, config.node)
        """The lookups whose master this node is."""
        self._fetch: Fetch | None = None
        self._attempts = 0
        self._stalled_at: Instant | None = None
        """When a new fetch begins unless something arrives before; None: nothing is missed."""

    @property
    def position(self) -> MetalogPosition:
        """Of the positions of this index shard, all below are applied; its end if it is retired."""
        return min(self._feed.position, self._positions.end)

    @property
    def tail(self) -> SeqNum:
        """The seqnum after the last record in the index."""
        return self._index.end

    def status(self) -> dict[str, int]:
        """Return figures for people: what is indexed, its bytes, and the lookups that wait."""
        index = self._index
        return {
            "position": self.position,
            "tail": self.tail,
            "entries": index.entries,
            "tags": index.tags,
            "spans": index.spans,
            "bytes": index.memory_bytes,
            "waiting": len(self._waiting),
            "merging": len(self._merging),
        }

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Never called: an index node persists nothing."""
        raise AssertionError(f"no {kind.name} frame of {len(payload)} bytes at {location} is ours")

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Apply index data, answer the lookups that may be answered, ask for what is missed."""
        position = self._feed.position
        effects = self._merging.expire(now)
        for event in events:
            effects += self._on_event(event, now)
        advanced = self._feed.position > position
        if advanced:
            for origin, lookup, _ in self._waiting.take_ready(self._feed.position):
                effects += self._answer_any(origin, lookup, now)
            if self._fetch is not None:
                effects += self._fetch.go_on(self._feed.position)
        for waiting in self._waiting.take_expired(now):
            effects.append(Ignore(waiting, "a lookup waited too long for index data"))
        return effects + self._catch_up(now, advanced=advanced)

    def deadline(self) -> Instant | None:
        """When the first lookup expires, or what is missed is asked for again."""
        instants = (self._stalled_at, self._waiting.deadline, self._merging.deadline())
        return min((instant for instant in instants if instant is not None), default=None)

    def check_invariants(self) -> None:
        """Assert that positions are this shard's and that nobody waits for what is here."""
        assert self._feed.position in self._positions or self._feed.position == NO_POSITION
        first = self._waiting.first_position
        assert first is None or first > self._feed.position, "what can be answered is answered"
        assert (self._stalled_at is None) == (not self._missing)
        self._merging.check_invariants()

    # --- events

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received():
                return self._on_received(event, now)
            case Started():
                return self._begin_fetch(NO_POSITION)
            case Persisted() | FrameRead() | SpaceChanged():
                raise AssertionError("an index node has no journal")
            case unreachable:
                assert_never(unreachable)

    def _on_received(self, event: Received, now: Instant) -> list[Effect]:
        match event.message:
            case IndexLookup() as lookup:
                return self._on_lookup(event, lookup, now)
            case TagFirstsWanted() as wanted:
                return self._on_firsts_wanted(event, wanted, now)
            case IndexAnswer() as answer:
                return self._merging.add(event.sender, answer, now)
            case IndexData(blocks=blocks):
                return self._on_index_data(event, blocks)
            case message:
                return [
                    Ignore(event, f"an index node has no use for {type(message).__name__}"),
                ]

    # --- index data

    def _on_index_data(self, event: Received, blocks: Sequence[IndexBlock]) -> list[Effect]:
        if event.sender not in self._storage_nodes:
            return [Ignore(event, "index data from a node that is no storage node")]
        if not all(map(self._plausible, blocks)):
            return [Ignore(event, "index data that contradicts itself")]
        position, horizon = self._feed.position, self._feed.horizon
        self._feed.put(blocks)
        effects: list[Effect] = []
        for block in self._feed.take():
            if not self._consistent(block):
                self._feed.reject(block)
                effects.append(Ignore(event, "index data that contradicts the log before it"))
                break
            for part in block.parts:
                self._index.add(part)
        if self._fetch is not None and self._fetch.is_answer(event.sender, blocks):
            effects += self._fetch.on_answer(event.sender, blocks, position, horizon)
            self._stalled_at = None
        return effects

    def _plausible(self, block: IndexBlock) -> bool:
        """Tell whether a block is this index shard's and its columns fit each other."""
        if block.position not in self._positions or block.tail > MAX_SEQNUM:
            return False
        return all(
            part.shard in block.productive
            and part.shard in self._known_shards
            and 0 < part.count == len(part.tag_counts)
            and 8 * sum(part.tag_counts) == len(part.tags)
            and part.first_seqnum >= 0
            for part in block.parts
        )

    def _consistent(self, block: ReadyBlock) -> bool:
        """Tell whether the parts are consecutive up to the block's tail, beyond what is indexed."""
        if not block.parts:
            return True
        end = block.parts[0].first_seqnum
        if end < self._index.end:
            return False
        for part in block.parts:
            if part.first_seqnum != end:
                return False
            end += part.count
        return end == block.tail

    # --- lookups

    def _on_lookup(self, event: Received, lookup: IndexLookup, now: Instant) -> list[Effect]:
        if event.sender not in self._engines:
            return [Ignore(event, "a lookup from a node that is no engine")]
        if lookup.aggregator not in self._merging_nodes:
            return [Ignore(event, "a lookup that names nobody who merges")]
        if not 1 <= lookup.count <= READ_RANGE_LIMIT_MAX:
            return [Ignore(event, "a lookup for too many records, or for none")]
        return self._answer_in_time(event, lookup, now)

    def _on_firsts_wanted(
        self, event: Received, wanted: TagFirstsWanted, now: Instant
    ) -> list[Effect]:
        if event.sender not in self._engines:
            return [Ignore(event, "a question from a node that is no engine")]
        if len(wanted.tags) % 8 or not 0 < len(wanted.tags) <= 8 * READ_RANGE_LIMIT_MAX:
            return [Ignore(event, "a question about too many tags, or about none")]
        return self._answer_in_time(event, wanted, now)

    def _answer_in_time(
        self, event: Received, lookup: IndexLookup | TagFirstsWanted, now: Instant
    ) -> list[Effect]:
        """Answer what is asked about positions that are applied; let the rest wait for them."""
        if lookup.position <= self._feed.position:
            return self._answer_any(event.sender, lookup, now)
        if not self._waiting.put(event.sender, lookup, now):
            return [Ignore(event, "too many lookups wait for index data")]
        return []

    def _answer_any(
        self, origin: NodeId, lookup: IndexLookup | TagFirstsWanted, now: Instant
    ) -> list[Effect]:
        if isinstance(lookup, IndexLookup):
            return self._answer(origin, lookup, now)
        seqnums, shards = array("Q"), array("H")
        for tag in array("Q", lookup.tags):
            first, its_shard = self._index.next(tag, 0, lookup.limit, 1)
            seqnums.append(first[0] if first else NO_RECORD)
            shards.append(its_shard[0] if first else 0)
        columns = seqnums.tobytes(), shards.tobytes()
        return [Send(origin, TagFirsts(lookup.request, self.index_shard, *columns))]

    def _answer(self, origin: NodeId, lookup: IndexLookup, now: Instant) -> list[Effect]:
        find = self._index.next if lookup.direction is Direction.NEXT else self._index.prev
        seqnums, shards = find(lookup.tag, lookup.bound, lookup.limit, lookup.count)
        exact = lookup.count == 1 and bool(seqnums) and seqnums[0] == lookup.bound
        answer = IndexAnswer(
            lookup.request, origin, lookup.direction, self.index_shard,
            lookup.count, exact, seqnums, shards, lookup.names_first,
        )  # fmt: skip
        if lookup.aggregator == self._node:
            effects = self._merging.add(self._node, answer, now)
        else:
            effects = [Send(lookup.aggregator, answer)]
        if exact:
            placement = placement_of(self._views, shards[0])
            assert placement is not None, "only records of known shards are indexed"
            replica = placement.replicas[lookup.request % len(placement.replicas)]
            read = ReadRecords(lookup.request, origin, shards[0], seqnums)
            effects.insert(0, Send(replica, read))
        return effects

    # --- what is missed

    @property
    def _missing(self) -> bool:
        return self._fetch is not None or self._feed.behind or bool(self._waiting)

    def _catch_up(self, now: Instant, *, advanced: bool) -> list[Effect]:
        """Begin a new fetch when nothing has arrived for a while although something is missed."""
        if self._fetch is not None and self._fetch.over:
            self._fetch = None
        if not self._missing:
            self._stalled_at = None
            return []
        effects: list[Effect] = []
        if not advanced and self._stalled_at is not None:
            if now < self._stalled_at:
                return []
            end = max(self._feed.end, self._waiting.end, self._fetch.end if self._fetch else 0)
            effects = self._begin_fetch(end)
        self._stalled_at = Instant(now + self._resend_s)
        return effects

    def _begin_fetch(self, end: MetalogPosition) -> list[Effect]:
        """Ask other storage nodes than the last time, from the first position missed."""
        self._fetch = Fetch(
            sources_of(self._view, self._attempts),
            start=self._feed.position,
            end=end,
            positions=self._positions,
        )
        self._attempts += 1
        return list(self._fetch.first_pages())
