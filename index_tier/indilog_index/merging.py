"""Merges the answers of all index shards to one lookup (thesis 5.4, algorithm 6).

`Aggregator` uses `Merging`. `IndexNode` uses it, too, as the master of a lookup (thesis 5.2,
"master-slave-mode"). `Merging` keeps no index data. It keeps only lookups that some index shard has
not answered yet.
"""

from __future__ import annotations

from collections import OrderedDict

from indilog.base.ids import Instant, MetalogPosition, NodeId, SeqNum, ShardId
from indilog.config import NodeConfig
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.placement import Placement
from indilog.roles.role import Effect, Ignore, Send
from indilog.wire.messages import Direction, IndexAnswer, LookupResult, ReadRecords
from indilog_index.lost_records import before, nearest
from indilog_index.tag_index import Matches


class _Lookup:
    """The answers to one lookup so far."""

    __slots__ = (
        "answered", "bound", "count", "direction", "done", "expires", "floor", "index_shards",
        "log_floor",
        "lost", "matches", "position", "trims",
    )  # fmt: skip

    def __init__(self, answer: IndexAnswer, expires: Instant) -> None:
        self.direction = answer.direction
        self.count = answer.count
        self.bound = answer.bound
        self.trims = answer.trims
        self.index_shards = answer.index_shards
        """Number of index shards that were asked."""
        self.floor: SeqNum = 0
        """The highest floor of all answers. An index shard that has applied more trims has dropped
        the records below its floor.
        """
        self.log_floor: SeqNum = 0
        self.position: MetalogPosition = 0
        self.expires = expires
        self.answered: set[int] = set()
        """The index shards that have answered."""
        self.matches: list[tuple[SeqNum, ShardId]] = []
        self.lost: list[LostRange] = []
        self.done = False
        """Whether an exact match was found; further answers then only change `answered`."""

    def fits(self, answer: IndexAnswer) -> bool:
        return (self.direction, self.count, self.bound, self.index_shards) == (
            answer.direction, answer.count, answer.bound, answer.index_shards,
        )  # fmt: skip

    def add(self, answer: IndexAnswer) -> None:
        assert answer.index_shard not in self.answered, "each index shard counts once"
        self.answered.add(answer.index_shard)
        self.done = self.done or answer.exact
        self.matches += zip(answer.seqnums, answer.shards, strict=True)
        self.lost += answer.lost
        self.floor = max(self.floor, answer.floor)
        self.log_floor = max(self.log_floor, answer.log_floor)
        self.position = max(self.position, answer.position)

    def merged(self) -> tuple[Matches, LostRange | None]:
        """Return the best matches of all index shards, and the lost records that limit them.

        A seqnum is in one index shard only. There are no matches below the floor, and none at all
        if the bound is below the floor. If the lookup crosses lost records, only the matches before
        them are returned, with the range of the lost records.
        """
        if self.bound < self.floor:
            return ((), ()), None
        best = sorted(
            (match for match in self.matches if match[0] >= self.floor),
            reverse=self.direction is Direction.PREV,
        )[: self.count]
        matches = tuple(seqnum for seqnum, _ in best), tuple(shard for _, shard in best)
        if (lost := nearest(self.direction, self.lost, self.floor)) is None:
            return matches, None
        left = before(self.direction, matches, lost)
        return (matches, None) if len(left[0]) == self.count else (left, lost)


class Merging:
    """The lookups that one node merges.

    Guarantees: a result is sent only when every index shard has answered, or one index shard has
    reported an exact match. At most `lookups_pending_max` lookups are pending, and the oldest is
    dropped first. A lookup is dropped after `read_timeout_s`, and its engine starts it again. A
    repeated answer counts once. An answer that arrives after the result begins a new pending
    lookup, which expires.
    """

    def __init__(self, placement: Placement, config: NodeConfig) -> None:
        self._placement = placement
        self._lookups_max = config.reads.lookups_pending_max
        self._timeout_s = config.reads.read_timeout_s
        self._pending: OrderedDict[tuple[NodeId, int], _Lookup] = OrderedDict()
        """Lookups by origin and request, in the order of their first answers. So the first lookup
        expires first.
        """

    def __len__(self) -> int:
        return len(self._pending)

    def deadline(self) -> Instant | None:
        """When the oldest lookup is dropped."""
        return next(iter(self._pending.values())).expires if self._pending else None

    def check_invariants(self) -> None:
        """Assert that complete lookups are not kept, and that the limit holds."""
        assert len(self._pending) <= self._lookups_max
        assert all(0 < len(p.answered) < p.index_shards for p in self._pending.values())

    def add(self, sender: NodeId, answer: IndexAnswer, now: Instant) -> list[Effect]:
        """Add the answer of `sender`; send the result if no answer is missing any more."""
        if (reason := self._refusal(sender, answer)) is not None:
            return [Ignore(answer, reason)]
        key = answer.origin, answer.request
        pending = self._pending.get(key)
        effects: list[Effect] = []
        if pending is None:
            effects = self._make_room()
            pending = self._pending[key] = _Lookup(answer, Instant(now + self._timeout_s))
        elif not pending.fits(answer):
            return [Ignore(answer, "an answer to another lookup of the same number")]
        if answer.index_shard in pending.answered:
            return effects
        pending.add(answer)
        if len(pending.answered) == pending.index_shards:
            del self._pending[key]
            if not pending.done:
                effects += self._result(answer, pending)
        return effects

    def _refusal(self, sender: NodeId, answer: IndexAnswer) -> str | None:
        """Return why an answer is ignored, or None."""
        view = self._placement.view
        if not 0 <= answer.index_shard < answer.index_shards <= len(view.index_shards):
            return "an answer of an index shard that no view here has"
        if sender not in view.index_shards[answer.index_shard]:
            return "an answer of a node that is not of that index shard"
        if answer.origin not in view.engines:
            return "an answer for a node that is no engine"
        if not len(answer.seqnums) == len(answer.shards) <= answer.count:
            return "an answer that contradicts itself"
        return None

    def _result(self, answer: IndexAnswer, lookup: _Lookup) -> list[Effect]:
        """Send the result to the origin; for a single match, have storage send the record."""
        (seqnums, shards), lost = lookup.merged()
        if lookup.count > 1 or not seqnums or answer.names_first:
            result = LookupResult(
                answer.request, seqnums, shards,
                lookup.floor, lookup.log_floor, lookup.position, lost,
            )  # fmt: skip
            return [Send(answer.origin, result)]
        replicas = self._placement.counting(shards[0])
        if not replicas:
            return [Ignore(answer, "a match in a shard that no view knows")]
        replica = replicas[answer.request % len(replicas)]
        read = ReadRecords(
            answer.request, answer.origin, shards[0], seqnums, lookup.trims, answer.epoch
        )
        return [Send(replica, read)]

    def _make_room(self) -> list[Effect]:
        if len(self._pending) < self._lookups_max:
            return []
        return [self._drop_oldest("too many lookups are pending")]

    def expire(self, now: Instant) -> list[Effect]:
        """Drop the lookups that were not completed in time."""
        effects: list[Effect] = []
        while (first := self.deadline()) is not None and first <= now:
            effects.append(self._drop_oldest("an index shard did not answer in time"))
        return effects

    def _drop_oldest(self, reason: str) -> Ignore:
        key, lookup = self._pending.popitem(last=False)
        return Ignore((key, sorted(lookup.answered)), reason)
