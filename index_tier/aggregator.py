"""The aggregator role: merges what all index shards answer to one lookup (thesis 5.4, algorithm 6).

It keeps no index data, only lookups that are not answered by all index shards yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import assert_never

from index_tier.tag_index import Matches
from indilog.config import Config
from indilog.ids import Instant, NodeId, SeqNum, ShardId
from indilog.messages import Direction, IndexAnswer, LookupResult, ReadRecords
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
    Started,
)
from indilog.view import Views, placement_of


class _Lookup:
    """The answers to one lookup so far."""

    __slots__ = ("answered", "count", "direction", "done", "expires", "matches")

    def __init__(self, answer: IndexAnswer, expires: Instant) -> None:
        self.direction = answer.direction
        self.count = answer.count
        self.expires = expires
        self.answered: set[int] = set()
        """The index shards that have answered."""
        self.matches: list[tuple[SeqNum, ShardId]] = []
        self.done = False
        """An exact match was found; what else comes only completes `answered`."""

    def add(self, answer: IndexAnswer) -> None:
        self.answered.add(answer.index_shard)
        self.done = self.done or answer.exact
        self.matches += zip(answer.seqnums, answer.shards, strict=True)

    def merged(self) -> Matches:
        """The best matches of all index shards; a seqnum is in one index shard only."""
        best = sorted(self.matches, reverse=self.direction is Direction.PREV)[: self.count]
        return tuple(seqnum for seqnum, _ in best), tuple(shard for _, shard in best)


class Aggregator:
    """One aggregator.

    Guarantees: a result is sent only when every index shard has answered, or one had an exact
    match. At most `lookups_pending_max` lookups are pending, the oldest is dropped first, and each
    is dropped after `read_timeout_s`; whoever asked starts again.
    """

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        view = views[-1]
        assert node in view.aggregators, f"{node} is an aggregator of the newest view"
        self._views = views
        self._index_shards = view.index_shards
        self._engines = frozenset(n for v in views for n in v.engines)
        self._lookups_max = config.node.lookups_pending_max
        self._timeout_s = config.node.read_timeout_s
        self._pending: OrderedDict[tuple[NodeId, int], _Lookup] = OrderedDict()
        """By origin and request, in the order of their first answers, which is that of expiry."""

    def status(self) -> dict[str, int]:
        """Return figures for people: how many lookups are pending."""
        return {"pending": len(self._pending)}

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Never called: an aggregator persists nothing."""
        raise AssertionError(f"no {kind.name} frame of {len(payload)} bytes at {location} is ours")

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Merge answers; send the results that are complete."""
        effects = self._expire(now)
        for event in events:
            effects += self._on_event(event, now)
        return effects

    def deadline(self) -> Instant | None:
        """When the oldest lookup is dropped."""
        return next(iter(self._pending.values())).expires if self._pending else None

    def check_invariants(self) -> None:
        """Assert that what is complete is not kept, and not too much is."""
        assert len(self._pending) <= self._lookups_max
        everyone = len(self._index_shards)
        assert all(0 < len(p.answered) < everyone for p in self._pending.values())

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received(message=IndexAnswer() as answer):
                return self._on_answer(event, answer, now)
            case Received(message=message):
                return [Ignore(event, f"an aggregator has no use for {type(message).__name__}")]
            case Started():
                return []
            case Persisted() | FrameRead():
                raise AssertionError("an aggregator has no journal")
            case unreachable:
                assert_never(unreachable)

    def _on_answer(self, event: Received, answer: IndexAnswer, now: Instant) -> list[Effect]:
        if (reason := self._refusal(event.sender, answer)) is not None:
            return [Ignore(event, reason)]
        key = answer.origin, answer.request
        pending = self._pending.get(key)
        effects: list[Effect] = []
        if pending is None:
            effects = self._make_room()
            pending = self._pending[key] = _Lookup(answer, Instant(now + self._timeout_s))
        elif (pending.direction, pending.count) != (answer.direction, answer.count):
            return [Ignore(event, "an answer to another lookup of the same number")]
        if answer.index_shard in pending.answered:
            return effects
        pending.add(answer)
        if len(pending.answered) == len(self._index_shards):
            del self._pending[key]
            if not pending.done:
                effects += self._result(answer, pending)
        return effects

    def _refusal(self, sender: NodeId, answer: IndexAnswer) -> str | None:
        """Return why an answer is not believed, or None."""
        if not 0 <= answer.index_shard < len(self._index_shards):
            return "an answer of an index shard that is not in this view"
        if sender not in self._index_shards[answer.index_shard]:
            return "an answer of a node that is not of that index shard"
        if answer.origin not in self._engines:
            return "an answer for a node that is no engine"
        if not len(answer.seqnums) == len(answer.shards) <= answer.count:
            return "an answer that contradicts itself"
        return None

    def _result(self, answer: IndexAnswer, lookup: _Lookup) -> list[Effect]:
        """Tell the origin, or for a single match have storage tell it."""
        seqnums, shards = lookup.merged()
        if lookup.count > 1 or not seqnums:
            return [Send(answer.origin, LookupResult(answer.request, seqnums, shards))]
        placement = placement_of(self._views, shards[0])
        if placement is None:
            return [Ignore(answer, "a match in a shard that no view knows")]
        replica = placement.replicas[answer.request % len(placement.replicas)]
        return [Send(replica, ReadRecords(answer.request, answer.origin, shards[0], seqnums))]

    def _make_room(self) -> list[Effect]:
        if len(self._pending) < self._lookups_max:
            return []
        return [self._drop_oldest("too many lookups are pending")]

    def _expire(self, now: Instant) -> list[Effect]:
        effects: list[Effect] = []
        while (first := self.deadline()) is not None and first <= now:
            effects.append(self._drop_oldest("an index shard did not answer in time"))
        return effects

    def _drop_oldest(self, reason: str) -> Ignore:
        key, lookup = self._pending.popitem(last=False)
        return Ignore((key, sorted(lookup.answered)), reason)
