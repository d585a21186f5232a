"""Lookups that a compute node sends to the index tier for its readers (thesis 5.4, 5.4.2 and 10).
`Reads` calls `TierLookups`, which keeps answers in the local index for later reads.

*The record cache after a miss.* A lookup may miss the local index although the record cache has the
record. If the cached record is at the bound, its names show whether it has the tag; then the index
tier is not asked. Otherwise only the index tier can find the record. It can let storage send the
record, which takes 4 message delays. It can also send the record's seqnum to this node first. This
takes 3 message delays if the record is cached here, and 5 otherwise. So this node asks for the
seqnum first while more than half of the recent matches were cached.

*Answers that stay true* are kept by the local index: the shard of the record, and the fact that the
record is the next or previous one, if no append can change this fact.
"""

from __future__ import annotations

from typing import Final

from indilog.base.ids import EMPTY_TAG, SeqNum, ShardId, names_have
from indilog.base.log import Record
from indilog.kernel.metalog import MetalogReplay
from indilog.roles.role import Effect, Send
from indilog.wire.messages import IndexLookup
from indilog_compute.local_index import LocalIndex
from indilog_compute.reads.lookup_routes import LookupRoutes
from indilog_compute.reads.operation import Operation, Stage
from indilog_compute.reads.record_cache import RecordCache

_SMOOTHING: Final = 1 / 32
"""The weight of the newest answer in the share of matches that were cached."""


class TierLookups:
    """Sends lookups; counts and keeps the answers of the index tier.

    Attributes:
        routes: chooses the nodes to ask.
        counters: numbers of answers of the index tier by outcome: the record at the bound
            (`exact`), another record (`closest`), no record (`none`), a page (`pages`). Also the
            number of lookups that asked for the seqnum first (`named_first`), and of records that
            came from the record cache after the local index missed (`from_cache`).
    """

    __slots__ = ("_cache", "_here", "counters", "routes")

    def __init__(self, cache: RecordCache, routes: LookupRoutes) -> None:
        self._cache = cache
        self.routes = routes
        self._here = 0.0
        """The share of recent matches whose record was cached; matches at the bound do not count.
        """
        self.counters = {
            "exact": 0, "closest": 0, "none": 0, "pages": 0, "named_first": 0, "from_cache": 0,
        }  # fmt: skip

    def at_bound(self, operation: Operation, tail: SeqNum) -> Record | None:
        """Return the record at the bound, if it is cached and answers the read; else None."""
        if operation.page or operation.bound >= tail or not self._cache.holds(operation.bound):
            return None
        record = self._cache.get(operation.bound)
        assert record is not None, "the record is cached"
        if operation.tag != EMPTY_TAG and not names_have(record.names, operation.tag):
            return None
        return record

    def note_cached(self) -> None:
        """Count a read that the cached record at the bound answered."""
        self.counters["from_cache"] += 1

    def ask(
        self, operation: Operation, request: int, replay: MetalogReplay, local: LocalIndex | None
    ) -> list[Effect]:
        """Ask one replica of every index shard about the records that the applied entries order."""
        operation.stage = Stage.LOOKUP
        operation.reflects = replay.position
        operation.limit = replay.tail
        operation.asked = {}
        operation.trims = local.trims if local is not None else 0
        route = operation.route = self.routes.choose(request, operation.started)
        lookup = IndexLookup(
            request=request,
            direction=operation.direction,
            tag=operation.tag,
            bound=operation.bound,
            limit=operation.limit,
            position=replay.position,
            count=operation.count,
            aggregator=route.aggregator,
            names_first=self._names_first(operation),
            log=operation.log,
            trims=replay.trims,
            epoch=replay.last,
            view=route.view,
            index_shards=len(route.replicas),
        )
        return [Send(node, lookup) for node in route.replicas]

    def _names_first(self, operation: Operation) -> bool:
        """Whether a lookup asks for the record's seqnum first, instead of the record."""
        wanted = not operation.page and self._here > 0.5
        self.counters["named_first"] += wanted
        return wanted

    def note_no_match(self) -> None:
        """Count a lookup for which the index tier proved that there is no match."""
        self.counters["none"] += 1

    def note_match(
        self, operation: Operation, seqnum: SeqNum, shard: ShardId, local: LocalIndex | None
    ) -> None:
        """Note that the index tier found the match, or the first match of a page, at `seqnum`.

        The caller calls this before it puts the record into the cache.
        """
        if operation.page:
            self.counters["pages"] += 1
        elif seqnum == operation.bound:
            self.counters["exact"] += 1
        else:
            here = self._cache.holds(seqnum)
            self._here += (here - self._here) * _SMOOTHING
            self.counters["closest"] += 1
            self.counters["from_cache"] += here
        if local is not None and operation.trims == local.trims:
            local.learn_answer(
                operation.direction, operation.tag, operation.bound, (seqnum, shard),
                operation.limit,
            )  # fmt: skip
