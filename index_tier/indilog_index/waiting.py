"""Lookups about metalog positions that the index node has not applied yet (thesis 5.6.1).

The thesis puts such a lookup into "a special queue that is processed with the next metalog update".
Here the queue is ordered by position and bounded, and every lookup in it expires. `IndexNode` owns
the one `WaitingLookups`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from sortedcontainers import SortedList

from indilog.base.ids import Instant, MetalogPosition, NodeId
from indilog.wire.messages import (
    IndexLookup,
)
from indilog.wire.tag_messages import TagFirstsWanted


class WaitingLookup(NamedTuple):
    """One lookup, the node that sent it, and when it expires."""

    origin: NodeId
    lookup: IndexLookup | TagFirstsWanted
    expires: Instant


class WaitingLookups:
    """At most `lookups_max` lookups, each for at most `timeout_s`."""

    __slots__ = ("_applied", "_by_position", "_lookups", "_lookups_max", "_timeout_s")

    def __init__(self, *, lookups_max: int, timeout_s: float) -> None:
        self._lookups_max = lookups_max
        self._timeout_s = timeout_s
        self._lookups: OrderedDict[tuple[NodeId, int], WaitingLookup] = OrderedDict()
        """Lookups by origin and request, in the order of arrival. So the first lookup expires
        first.
        """
        self._by_position: SortedList[tuple[MetalogPosition, NodeId, int]] = SortedList()
        self._applied: dict[tuple[NodeId, int], None] = {}
        """Lookups whose positions are applied. They wait for trims, or until storage confirms that
        the applied entries were not replaced.
        """

    def __len__(self) -> int:
        return len(self._lookups)

    def put(self, origin: NodeId, lookup: IndexLookup | TagFirstsWanted, now: Instant) -> bool:
        """Let a lookup wait; False: there is no room. A repeated lookup keeps its place."""
        key = origin, lookup.request
        if key in self._lookups:
            return True
        if len(self._lookups) >= self._lookups_max:
            return False
        self._lookups[key] = WaitingLookup(origin, lookup, Instant(now + self._timeout_s))
        self._by_position.add((lookup.position, *key))
        return True

    def take_ready(
        self, position: MetalogPosition, known: Callable[[IndexLookup | TagFirstsWanted], bool]
    ) -> list[WaitingLookup]:
        """Remove and return the lookups that can be answered.

        A lookup can be answered if it asks only about positions below `position`, and `known`
        returns True for it: this node knows the entries and trims that the lookup names.
        """
        while self._by_position and self._by_position[0][0] <= position:
            _, origin, request = self._by_position.pop(0)
            self._applied[origin, request] = None
        if not self._applied:
            return []
        ready = [key for key in self._applied if known(self._lookups[key].lookup)]
        for key in ready:
            del self._applied[key]
        return [self._lookups.pop(key) for key in ready]

    @property
    def has_unconfirmed(self) -> bool:
        """Whether any lookup waits although its positions are applied."""
        return bool(self._applied)

    def unconfirmed(self) -> Iterator[IndexLookup | TagFirstsWanted]:
        """Yield the lookups that wait although their positions are applied."""
        return (self._lookups[key].lookup for key in self._applied)

    def wait_for_positions(self) -> None:
        """Let all lookups wait for their positions again, because the index is rebuilt."""
        self._by_position.update(
            (self._lookups[key].lookup.position, *key) for key in self._applied
        )
        self._applied.clear()

    def take_expired(self, now: Instant) -> list[WaitingLookup]:
        """Remove and return the lookups that have waited too long."""
        expired = []
        while (first := self.deadline) is not None and first <= now:
            key, waiting = self._lookups.popitem(last=False)
            if key in self._applied:
                del self._applied[key]
            else:
                self._by_position.remove((waiting.lookup.position, *key))
            expired.append(waiting)
        return expired

    def check_invariants(self) -> None:
        """Assert that each lookup waits for one thing: positions, or the entries and trims that it
        names.
        """
        assert len(self._lookups) == len(self._by_position) + len(self._applied)
        assert len(self._lookups) <= self._lookups_max

    @property
    def deadline(self) -> Instant | None:
        """When the first lookup expires."""
        return next(iter(self._lookups.values())).expires if self._lookups else None

    @property
    def first_position(self) -> MetalogPosition | None:
        """The smallest position that a lookup waits for."""
        return self._by_position[0][0] if self._by_position else None

    @property
    def end(self) -> MetalogPosition:
        """The largest position that any lookup asks for. All positions below this position exist,
        because a compute node has applied them.
        """
        return self._by_position[-1][0] if self._by_position else 0
