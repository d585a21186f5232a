"""What a compute node asks the index tier for its readers, and what it makes of the answers beside
giving them to who asked (thesis 5.4, 5.4.2 and 10).

*The record cache after a miss.* A lookup that misses the local index may be about a record that the
record cache holds. If it is the record at the bound itself, the record tells so: its names say its
tags, and nobody needs an index. If it is another one, only the index tier knows which; then storage
sends what is here already, unless the index tier names the record first. Being told first saves the
record's bytes and a trip when the record is here (3 trips for 4), and costs a trip when it is not
(5 for 4); so it is asked for while more than half of such answers were here lately.

*Answers that stay true* go to the local index: where the record is, and, if nothing can come in
between, that it is the next or the previous one.
"""

from __future__ import annotations

from typing import Final

from indilog.base.ids import EMPTY_TAG, SeqNum, ShardId, names_bear
from indilog.base.log import Record
from indilog.kernel.metalog import MetalogReplay
from indilog.roles.role import Effect, Send
from indilog.wire.messages import IndexLookup
from indilog_compute.local_index import LocalIndex
from indilog_compute.reads.lookup_routes import LookupRoutes
from indilog_compute.reads.operation import Operation, Stage
from indilog_compute.reads.record_cache import RecordCache

_SMOOTHING: Final = 1 / 32
"""How much the newest answer counts in the share of those that were here."""


class TierLookups:
    """Sends lookups; counts and remembers what the index tier answered.

    Attributes:
        routes: chooses whom to ask.
        figures: reads that asked the index tier: answered by the record at the bound, by another
            one, by none, pages; how many asked to be told first, and how many records came from
            the record cache although the local index missed.
    """

    __slots__ = ("_cache", "_here", "figures", "routes")

    def __init__(self, cache: RecordCache, routes: LookupRoutes) -> None:
        self._cache = cache
        self.routes = routes
        self._here = 0.0
        """Share of the answers lately, not at the bound, whose record was in the cache."""
        self.figures = {
            "exact": 0, "closest": 0, "none": 0, "pages": 0, "named_first": 0, "from_cache": 0,
        }  # fmt: skip

    def at_bound(self, operation: Operation, tail: SeqNum) -> Record | None:
        """Return the record at the bound if it is in the record cache and answers the read."""
        if operation.page or operation.bound >= tail or not self._cache.holds(operation.bound):
            return None
        record = self._cache.get(operation.bound)
        assert record is not None, "it is held"
        if operation.tag != EMPTY_TAG and not names_bear(record.names, operation.tag):
            return None
        return record

    def came_from_cache(self) -> None:
        """The record at the bound has answered a read."""
        self.figures["from_cache"] += 1

    def ask(
        self, operation: Operation, request: int, replay: MetalogReplay, local: LocalIndex | None
    ) -> list[Effect]:
        """Ask one replica of every index shard about the log below the metalog's position."""
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
        )
        return [Send(node, lookup) for node in route.replicas]

    def _names_first(self, operation: Operation) -> bool:
        """Whether a lookup asks to be told where the record is rather than be sent it."""
        wanted = not operation.page and self._here > 0.5
        self.figures["named_first"] += wanted
        return wanted

    def none_came(self) -> None:
        """The index tier has proven that there is no match."""
        self.figures["none"] += 1

    def came(
        self, operation: Operation, seqnum: SeqNum, shard: ShardId, local: LocalIndex | None
    ) -> None:
        """The index tier has found the best match, or the first of a page, at `seqnum`.

        Called before the record is put into the cache.
        """
        if operation.page:
            self.figures["pages"] += 1
        elif seqnum == operation.bound:
            self.figures["exact"] += 1
        else:
            here = self._cache.holds(seqnum)
            self._here += (here - self._here) * _SMOOTHING
            self.figures["closest"] += 1
            self.figures["from_cache"] += here
        if local is not None and operation.trims == local.trims:
            local.learn_answer(
                operation.direction, operation.tag, operation.bound, (seqnum, shard),
                operation.limit,
            )  # fmt: skip
