"""The sequencer role: one replica of the metalog, a primary or a backup (ARCHITECTURE 8.3, 11).

The newest view says which of the two this node is. Both keep their entries in memory, and on disk
as METALOG frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from indilog.config import Config
from indilog.errors import DataLossError
from indilog.ids import Instant, MetalogPosition, NodeId, SeqNum
from indilog.metalog import entries_decoded
from indilog.roles import (
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Location,
    Lost,
    Persisted,
    Received,
    SnapshotsAnswered,
    SpaceChanged,
    Started,
)
from indilog.view import Views
from ordering.backup import Backup
from ordering.primary import Primary
from ordering.stored_metalog import StoredMetalog


class Sequencer:
    """One sequencer.

    Guarantees: those of `Primary` or `Backup`; after a restart it goes on from its disk.
    """

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        self._view = views[-1]
        assert node in self._view.sequencers, f"{node} is a sequencer of the newest view"
        self._node = node
        self._config = config
        self._metalog = StoredMetalog(grows=node == self._view.primary)
        self._part: Primary | Backup | None = None
        """Set by `Started`, when the whole metalog has been recovered."""

    @property
    def length(self) -> MetalogPosition:
        """How many entries it holds."""
        return len(self._metalog)

    @property
    def committed(self) -> MetalogPosition:
        """How many of them are committed, as far as it knows."""
        return self._part.committed if self._part is not None else 0

    @property
    def tail(self) -> SeqNum | None:
        """The tail of what is committed; None: it is no primary, or not started."""
        return self._part.tail if isinstance(self._part, Primary) else None

    def status(self) -> dict[str, int]:
        """Return figures for people; the tail is known to the primary only."""
        figures = {"length": self.length, "committed": self.committed}
        return figures if self.tail is None else figures | {"tail": self.tail}

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Take in the next metalog entry from disk."""
        assert self._part is None, f"recovery is over before {location} is"
        assert kind is FrameKind.METALOG, f"a sequencer never persisted a {kind.name} frame"
        self._metalog.recover(payload)

    def lost(self, frame: Lost, /) -> None:
        """Take note that a frame cannot be read."""
        if frame.kind in (FrameKind.METALOG, None):
            self._metalog.doubt()

    def copied(self, payload: bytes, /) -> None:
        """Take entries that are missing here from an ordering journal."""
        if self._metalog.wants_copies:
            self._metalog.copied(entries_decoded(payload))

    def recovered(self) -> None:
        """Judge what was lost: a backup is sent its entries again.

        Raises:
            DataLossError: this is the primary, and entries are lost.
        """
        self._metalog.recovered()
        if self._metalog.incomplete and self._node == self._view.primary:
            raise DataLossError(
                f"The order of the log is damaged on the disk of {self._node}, which alone may "
                "have all of it; restore its directory from a copy."
            )

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Apply a batch of events; propose at most one entry, or answer once, for all of them."""
        effects: list[Effect] = []
        for event in events:
            effects += self._on_event(event, now)
        match self._part:
            case Primary() as primary:
                effects += primary.advance(now)
            case Backup() as backup:
                effects += backup.advance()
            case None:
                assert not events, "Started is the first event"
            case unreachable:
                assert_never(unreachable)
        return effects

    def deadline(self) -> Instant | None:
        """When the primary has something to say again."""
        return self._part.deadline() if isinstance(self._part, Primary) else None

    def check_invariants(self) -> None:
        """Assert what the part asserts."""
        if self._part is not None:
            self._part.check_invariants()

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received():
                assert self._part is not None, "Started is the first event"
                return self._part.on_received(event)
            case Persisted(token=token):
                self._metalog.on_persisted(token)
                return []
            case Started():
                self._start(event)
                return []
            case SpaceChanged(room=room):
                if isinstance(self._part, Primary):
                    self._part.on_space_changed(full=room is not None, now=now)
                return []
            case FrameRead() | SnapshotsAnswered():
                raise AssertionError("a sequencer reads nothing back")
            case unreachable:
                assert_never(unreachable)

    def _start(self, event: Started) -> None:
        assert self._part is None, "a role starts once"
        view = self._view
        if self._node == view.primary:
            self._part = Primary(view, self._config, self._metalog, event.epoch)
        else:
            self._part = Backup(view.primary, self._metalog)
