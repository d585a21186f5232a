"""The aggregator role: for each lookup, merges the answers of all index shards (thesis 5.4,
algorithm 6).

An aggregator keeps only incomplete lookups, and persists nothing. Index nodes send it answers. Its
`Merging` sends the results to the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from indilog.base.ids import Instant, NodeId
from indilog.config import Config
from indilog.kernel.placement import Placement
from indilog.kernel.view import Views
from indilog.roles.role import (
    CellsAnswered,
    ColdAnswered,
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    MembersWanted,
    Persisted,
    Received,
    SnapshotsAnswered,
    SpaceChanged,
    Started,
    TermBegun,
)
from indilog.wire.messages import IndexAnswer
from indilog.wire.replica_messages import PlacementIs
from indilog_index.merging import Merging


class Aggregator:
    """One aggregator; its guarantees are those of `Merging`."""

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        assert node.startswith("aggregator"), f"{node} is named after its role"
        self._placement = Placement(views[-1])
        self._merging = Merging(self._placement, config.node)

    def status(self) -> dict[str, int]:
        """Return the status for operators: the number of pending lookups."""
        return {"pending": len(self._merging)}

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Never called: an aggregator persists nothing."""
        raise AssertionError(f"no {kind.name} frame of {len(payload)} bytes at {location} is ours")

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Merge answers; send the results that are complete."""
        effects = self._merging.expire(now)
        for event in events:
            effects += self._on_event(event, now)
        return effects

    def deadline(self) -> Instant | None:
        """When the oldest lookup is dropped."""
        return self._merging.deadline()

    def check_invariants(self) -> None:
        """Assert that no complete lookup is kept, and that at most `lookups_pending_max` lookups
        are pending.
        """
        self._merging.check_invariants()

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received(sender=sender, message=IndexAnswer() as answer):
                return self._merging.add(sender, answer, now)
            case Received(sender=sender, message=PlacementIs(view, replicas)):
                if sender not in {*view.storage_nodes, *self._placement.view.storage_nodes}:
                    return [Ignore(event, "the placement, sent by a node that is no storage node")]
                self._placement.install(view)
                self._placement.move(replicas)
                return []
            case Received(message=message):
                return [Ignore(event, f"an aggregator does not handle {type(message).__name__}")]
            case Started() | TermBegun() | MembersWanted():
                return []
            case (
                Persisted()
                | FrameRead()
                | SnapshotsAnswered()
                | SpaceChanged()
                | ColdAnswered()
                | CellsAnswered()
            ):
                raise AssertionError("an aggregator has no journal")
            case unreachable:
                assert_never(unreachable)
