"""Questions of an engine to the index tier that fill its Tag Cache (thesis 5.7 and 10).

*Is this tag new?* With `local_index = "extended"`, an append with a tag that the Tag Cache does not
know causes a question about the tag's first record. One question contains all such tags of an
iteration of the event loop (up to 4,096). It is sent to all index shards, because any index shard
may have records of a tag. No tag belongs to a single index shard, so tags need not move when index
shards are added or removed (decision 0011).

*What are the newest records of this tag?* After `refill_after_misses` missed lookups, a tag is
popular and not cached. Its newest records are then fetched into its row of the Tag Cache. At most
`refills_per_s_max` fetches begin per second, and at most `refills_pending_max` are in flight.

Both questions are about the log up to `tag_position`. The Tag Cache has applied the index data of
all metalog entries up to there. No caller waits for the answers. A question that is not answered
within `lookup_timeout_s` is dropped; then lookups of its tags miss as before. `Reads` calls
`TagQuestions`; the answers go to `LocalIndex`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final

from cachetools import LRUCache

from indilog.base.ids import EMPTY_TAG, MAX_SEQNUM, Instant, NodeId, SeqNum, ShardId, TagHash
from indilog.config import NodeConfig
from indilog.kernel.metalog import MetalogReplay
from indilog.roles.role import Effect, Ignore, Send
from indilog.wire.messages import (
    Direction,
    IndexLookup,
    LookupResult,
)
from indilog.wire.tag_messages import NO_RECORD, NOT_KNOWN, TagFirsts, TagFirstsWanted
from indilog_compute.local_index import First, LocalIndex
from indilog_compute.reads.lookup_routes import LookupRoute, LookupRoutes

_TAGS_AT_ONCE: Final = 4096


class _Question:
    """A question that at least one index node has not answered."""

    __slots__ = ("asked", "firsts", "limit", "missing", "route", "tags", "unknown")

    def __init__(
        self, tags: tuple[TagHash, ...], limit: SeqNum, route: LookupRoute, asked: Instant
    ) -> None:
        self.tags = tags
        self.limit = limit
        self.route = route
        self.asked = asked
        self.missing = set(route.replicas)
        """Index nodes that have not answered a question about first records."""
        self.firsts: dict[TagHash, First] = {}
        self.unknown: set[TagHash] = set()


class TagQuestions:
    """The questions of one engine about tags.

    Args:
        config: the limits.
        routes: chooses the nodes to ask.
        new_request: returns the number of the next request; `Reads` uses the same numbers.
    """

    def __init__(
        self, config: NodeConfig, routes: LookupRoutes, new_request: Callable[[], int]
    ) -> None:
        self._config = config
        self._routes = routes
        self._new_request = new_request
        self._local: LocalIndex | None = None
        self._replay = MetalogReplay()
        self._unknown: dict[TagHash, None] = {}
        """Tags that the Tag Cache does not know, of records appended in this iteration."""
        self._firsts: OrderedDict[int, _Question] = OrderedDict()
        """Questions about first records, by request, oldest first."""
        self._firsts_tags = 0
        self._misses: LRUCache[TagHash, int] = LRUCache(config.refills.refill_candidates_max)
        self._popular: dict[TagHash, None] = {}
        self._refills: OrderedDict[int, _Question] = OrderedDict()
        self._allowance = float(config.refills.refills_per_s_max)
        self._allowed_at = Instant(0.0)
        self._figures = {"new_tags_asked": 0, "refills": 0, "given_up": 0}

    def joined(self, local: LocalIndex, replay: MetalogReplay) -> None:
        """Use the engine's index and replay from now on."""
        self._local, self._replay = local, replay

    def status(self) -> dict[str, int]:
        """Return the status for operators: numbers of tags asked about, refills, dropped questions,
        and questions in flight.
        """
        return self._figures | {"pending": self._firsts_tags + len(self._refills)}

    # --- what the engine notices

    def appended(self, tags: Iterable[TagHash]) -> None:
        """Note the tags of an appended record; `begin` asks about the tags that the Tag Cache does
        not know.
        """
        local = self._local
        if local is None or not local.has_tag_cache:
            return
        room = self._config.refills.new_tags_pending_max - self._firsts_tags
        for tag in tags:
            if len(self._unknown) < room and not local.knows_tag(tag):
                self._unknown[tag] = None

    def missed(self, tag: TagHash) -> None:
        """Note a lookup of `tag` that missed the local index."""
        if tag == EMPTY_TAG or not self._config.refills.refills_per_s_max:
            return
        misses = self._misses.get(tag, 0) + 1
        self._misses[tag] = misses
        if misses >= self._config.refills.refill_after_misses:
            self._misses.pop(tag, None)
            if len(self._popular) < self._config.refills.refill_candidates_max:
                self._popular[tag] = None

    def begin(self, now: Instant) -> list[Effect]:
        """Send the questions that are due."""
        effects: list[Effect] = []
        if self._unknown:
            effects += self._ask_firsts(now)
        if self._popular:
            effects += self._ask_refills(now)
        return effects

    # --- new tags

    def _ask_firsts(self, now: Instant) -> list[Effect]:
        local = self._local
        assert local is not None, "tags are collected once the index is there"
        effects: list[Effect] = []
        unknown = list(self._unknown)
        self._unknown.clear()
        for start in range(0, len(unknown), _TAGS_AT_ONCE):
            tags = tuple(unknown[start : start + _TAGS_AT_ONCE])
            for tag in tags:
                local.expect(tag)
            request = self._new_request()
            route = self._routes.choose(request, now)
            self._firsts[request] = _Question(tags, local.tag_tail, route, now)
            column = array("Q", tags).tobytes()
            wanted = TagFirstsWanted(
                request, column, local.tag_tail, local.tag_position,
                self._replay.trims, self._replay.last, route.view,
            )  # fmt: skip
            effects += [Send(node, wanted) for node in route.replicas]
            self._firsts_tags += len(tags)
            self._figures["new_tags_asked"] += len(tags)
        return effects

    def on_firsts(self, sender: NodeId, message: TagFirsts) -> list[Effect]:
        """Handle the answer of one index shard; after the last answer, update the local index."""
        question = self._firsts.get(message.request)
        if question is None or sender not in question.missing:
            return []
        if len(message.seqnums) != 8 * len(question.tags) or len(message.shards) * 4 != len(
            message.seqnums
        ):
            return [Ignore(message, "first records of tags that were not asked about")]
        columns = array("Q", message.seqnums), array("H", message.shards)
        if any(question.limit <= seqnum < NOT_KNOWN for seqnum in columns[0]):
            return [Ignore(message, "a first record outside the range of the question")]
        question.missing.discard(sender)
        for tag, seqnum, shard in zip(question.tags, *columns, strict=True):
            if seqnum == NOT_KNOWN:
                question.unknown.add(tag)
            elif seqnum != NO_RECORD:
                first = First(seqnum, ShardId(shard))
                question.firsts[tag] = min(first, question.firsts.get(tag, first))
        if not question.missing:
            self._end_firsts(message.request)
            self._conclude(question)
        return []

    def _conclude(self, question: _Question) -> None:
        assert self._local is not None, "questions are sent once the index is there"
        self._routes.answered(question.route)
        for tag in question.tags:
            if tag in question.unknown:
                self._local.give_up(tag, question.limit)
            else:
                self._local.learn_first(tag, question.limit, question.firsts.get(tag))

    def _end_firsts(self, request: int) -> None:
        self._firsts_tags -= len(self._firsts.pop(request).tags)

    # --- refills

    def _ask_refills(self, now: Instant) -> list[Effect]:
        effects: list[Effect] = []
        rate = self._config.refills.refills_per_s_max
        self._allowance = min(
            float(rate), self._allowance + max(0.0, now - self._allowed_at) * rate
        )  # fmt: skip
        self._allowed_at = now
        while self._popular and len(self._refills) < self._config.refills.refills_pending_max:
            if self._allowance < 1:
                self._popular.clear()  # tags that are still popular miss again
                break
            tag = next(iter(self._popular))
            del self._popular[tag]
            effects += self._ask_refill(tag, now)
        return effects

    def _ask_refill(self, tag: TagHash, now: Instant) -> list[Effect]:
        """Ask for the newest records of a tag, unless these records are cached already."""
        local, count = self._local, self._config.refills.refill_seqnums_max
        if local is None or not local.has_tag_cache or local.has_recent(tag, count):
            return []
        local.expect(tag)
        self._allowance -= 1
        self._figures["refills"] += 1
        request = self._new_request()
        route = self._routes.choose(request, now)
        self._refills[request] = _Question((tag,), local.tag_tail, route, now)
        lookup = IndexLookup(
            request=request,
            direction=Direction.PREV,
            tag=tag,
            bound=MAX_SEQNUM,
            limit=local.tag_tail,
            position=local.tag_position,
            count=count,
            aggregator=route.aggregator,
            trims=self._replay.trims,
            epoch=self._replay.last,
            view=route.view,
            index_shards=len(route.replicas),
        )
        return [Send(node, lookup) for node in route.replicas]

    def on_result(self, message: LookupResult) -> list[Effect] | None:
        """Handle the newest records of a tag; None: the message is not an answer to a refill."""
        question = self._refills.get(message.request)
        if question is None:
            return None
        if not self._possible(message, question):
            return [Ignore(message, "a result of another lookup than was asked for")]
        del self._refills[message.request]
        self._routes.answered(question.route)
        assert self._local is not None, "questions are sent once the index is there"
        incomplete = message.floor or message.lost is not None
        if incomplete and not message.seqnums:
            # Records may have been trimmed or lost, so it is not proven that there never was one.
            self._local.give_up(question.tags[0], question.limit)
            return []
        self._local.refill(
            question.tags[0],
            question.limit,
            message.seqnums[::-1],
            message.shards[::-1],
            complete=not incomplete
            and len(message.seqnums) < self._config.refills.refill_seqnums_max,
        )
        return []

    def _possible(self, message: LookupResult, question: _Question) -> bool:
        seqnums, shards = message.seqnums, message.shards
        return (
            len(seqnums) == len(shards) <= self._config.refills.refill_seqnums_max
            and all(0 <= seqnum < question.limit for seqnum in seqnums)
            and all(0 <= shard < 1 << 16 for shard in shards)
            and all(later > earlier for later, earlier in pairwise(seqnums))
        )

    # --- time

    def deadline(self) -> Instant | None:
        """When the oldest question is dropped; None: no question is in flight."""
        oldest = [
            next(iter(asked.values())).asked for asked in (self._firsts, self._refills) if asked
        ]
        return Instant(min(oldest) + self._config.reads.lookup_timeout_s) if oldest else None

    def on_time(self, now: Instant) -> None:
        """Drop questions that were not answered in time."""
        overdue = now - self._config.reads.lookup_timeout_s
        for questions in (self._firsts, self._refills):
            while questions:
                request, question = next(iter(questions.items()))
                if question.asked > overdue:
                    break
                if questions is self._firsts:
                    self._end_firsts(request)
                else:
                    del questions[request]
                self._give_up(question, now)

    def _give_up(self, question: _Question, now: Instant) -> None:
        assert self._local is not None, "questions are sent once the index is there"
        self._figures["given_up"] += len(question.tags)
        self._routes.timed_out(question.route, now)
        for tag in question.tags:
            self._local.give_up(tag, question.limit)

    def check_invariants(self) -> None:
        """Assert the bounds."""
        assert self._firsts_tags == sum(len(q.tags) for q in self._firsts.values())
        assert self._firsts_tags <= self._config.refills.new_tags_pending_max
        assert len(self._refills) <= self._config.refills.refills_pending_max
        assert not self._unknown or self._local is not None
