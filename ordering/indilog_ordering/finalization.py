"""Decides which shards are finalized, and when (Scalog 4.4.1, decision 0055).

A finalized shard gets no further records. A scheduled finalization takes effect after a number of
committed cuts, its *grace*; an emergency finalization takes effect at once. The primary counts the
cuts of its own term, so after a failover the grace begins again. `Primary` owns the one
`Finalizations` and proposes the entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from indilog.base.ids import Instant, MetalogPosition, ShardId
from indilog.kernel.placement import Placement

GRACE_S_MAX: Final = 5.0
"""Longest grace in seconds. It limits the wait for cuts, because there are no cuts without
appends.
"""


class _Grace:
    """The grace of one shard."""

    __slots__ = ("cuts_left", "end", "until")

    def __init__(self, cuts: int, until: Instant) -> None:
        self.cuts_left = cuts
        self.end: MetalogPosition = 0
        """The last cut of the grace is committed when this many entries are committed."""
        self.until = until


class Finalizations:
    """The shards that are to be finalized, and are not finalized yet."""

    __slots__ = ("_graces", "_placement")

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._graces: dict[ShardId, _Grace] = {}

    def __bool__(self) -> bool:
        return bool(self._graces)

    def want(self, wanted: Mapping[ShardId, int], now: Instant) -> None:
        """Set the shards that are to be finalized, with the cuts of their grace.

        The grace of a shard that was wanted before continues, unless the shard now has 0 cuts.
        """
        graces: dict[ShardId, _Grace] = {}
        for shard, cuts in wanted.items():
            if shard not in self._placement.shards or self._placement.is_finalized(shard):
                continue
            until = Instant(now + GRACE_S_MAX)
            known = self._graces.get(shard) if cuts else None
            graces[shard] = known or _Grace(cuts, until)
        self._graces = graces

    def note_cut(self, position: MetalogPosition) -> None:
        """Count a cut that was proposed at a position."""
        for grace in self._graces.values():
            if grace.cuts_left:
                grace.cuts_left -= 1
                grace.end = position + 1

    def due(self, committed: MetalogPosition, now: Instant) -> list[ShardId]:
        """Return the shards whose grace is over, ascending.

        Args:
            committed: number of committed entries.
            now: the time.
        """
        return sorted(
            shard
            for shard, grace in self._graces.items()
            if now >= grace.until or (not grace.cuts_left and committed >= grace.end)
        )

    def deadline(self) -> Instant | None:
        """When the next grace ends even without cuts; None: no shard has a grace."""
        return min((grace.until for grace in self._graces.values()), default=None)
