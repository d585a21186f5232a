"""Trim requests in the primary: engines send them, entries contain them, and the primary answers a
request when its entry is committed (ARCHITECTURE 13).

The primary keeps no floors, so a trim that is requested twice makes a second entry, which changes
nothing. The primary caches its last answers, so a resent request normally makes no second entry.
`Primary` owns the one `TrimRequests`.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from cachetools import LRUCache

from indilog.base.ids import MetalogPosition, NodeId, SeqNum
from indilog.kernel.metalog import TRIM_FLOORS_MAX, Floor
from indilog.roles.role import Effect, Send
from indilog.wire.tag_messages import TrimIs, TrimWanted

_Key: TypeAlias = tuple[NodeId, int]


class TrimRequests:
    """At most `requests_max` uncommitted requests, and as many remembered answers."""

    def __init__(self, *, requests_max: int) -> None:
        self._requests_max = requests_max
        self._wanted: dict[_Key, Floor] = {}
        self._proposed: deque[tuple[MetalogPosition, list[_Key]]] = deque()
        self._under_way: set[_Key] = set()
        self._answered: LRUCache[_Key, MetalogPosition] = LRUCache(requests_max)

    @property
    def wanted(self) -> bool:
        """Whether requests wait for an entry."""
        return bool(self._wanted)

    def on_wanted(self, sender: NodeId, message: TrimWanted, tail: SeqNum) -> list[Effect] | None:
        """Queue a request, or answer it; None: too many are in flight."""
        key = sender, message.request
        if (position := self._answered.get(key)) is not None:
            return [Send(sender, TrimIs(message.request, position, tail))]
        if key in self._wanted or key in self._under_way:
            return []
        if message.floor.until > tail:
            return [Send(sender, TrimIs(message.request, None, tail))]
        if len(self._wanted) + len(self._under_way) >= self._requests_max:
            return None
        self._wanted[key] = message.floor
        return []

    def propose(self, position: MetalogPosition) -> tuple[Floor, ...]:
        """Put queued requests into the entry at `position`; return the highest floor of each
        tag.
        """
        keys = list(self._wanted)[:TRIM_FLOORS_MAX]
        floors: dict[tuple[int, bool, int], SeqNum] = {}
        for key in keys:
            tag, until, of_log, log = self._wanted.pop(key)
            floors[tag, of_log, log] = max(until, floors.get((tag, of_log, log), 0))
        self._proposed.append((position, keys))
        self._under_way.update(keys)
        return tuple(Floor(tag, until, of_log, log) for (tag, of_log, log), until in floors.items())

    def commit(self, committed: MetalogPosition, tail: SeqNum) -> list[Effect]:
        """Answer the requests whose entries are committed."""
        effects: list[Effect] = []
        while self._proposed and self._proposed[0][0] < committed:
            position, keys = self._proposed.popleft()
            for key in keys:
                self._under_way.discard(key)
                self._answered[key] = position + 1
                effects.append(Send(key[0], TrimIs(key[1], position + 1, tail)))
        return effects

    def check_invariants(self) -> None:
        """Assert that requests are bounded, and that each is at one stage."""
        assert len(self._wanted) + len(self._under_way) <= self._requests_max
        assert self._under_way.isdisjoint(self._wanted)
        assert len(self._under_way) == sum(len(keys) for _, keys in self._proposed)
