"""The sequencer role: one replica of the metalog, a primary or a backup (ARCHITECTURE 8.3, 11).

The newest view says which node is the primary. A primary that lacks entries runs a `Rebuild` until
it has them again. `Primary`, `Rebuild` and `Backup` all keep their entries in a `StoredMetalog`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import assert_never

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, SeqNum
from indilog.config import Config
from indilog.kernel.metalog import entries_decoded
from indilog.kernel.view import Views
from indilog.roles.incarnations import Heard, Incarnations
from indilog.roles.role import (
    METALOG_KINDS,
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    Lost,
    Persisted,
    Received,
    SnapshotsAnswered,
    SpaceChanged,
    Started,
)
from indilog.wire.messages import ForSequencer
from indilog_ordering.backup import Backup
from indilog_ordering.primary import Primary
from indilog_ordering.rebuild import Rebuild
from indilog_ordering.stored_metalog import StoredMetalog


class Sequencer:
    """One sequencer.

    Guarantees: those of `Primary` or `Backup`. After a restart it continues from its disk. The
    first message of a new incarnation of a node voids what its earlier incarnation reported.
    """

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        self._view = views[-1]
        assert node in self._view.sequencers, f"{node} is a sequencer of the newest view"
        self._node = node
        self._config = config
        self._metalog = StoredMetalog(
            grows=node == self._view.primary, kept=config.node.ordering.metalog_entries_kept
        )
        self._incarnations = Incarnations(self._view.nodes)
        self._epoch = Epoch(0)
        self._part: Primary | Rebuild | Backup | None = None
        """Set by `Started`, after recovery; a `Primary` replaces a completed `Rebuild`."""

    @property
    def metalog(self) -> StoredMetalog:
        """This copy of the metalog, for programs that read a data directory; not to be changed."""
        return self._metalog

    @property
    def length(self) -> MetalogPosition:
        """How many entries it holds."""
        return len(self._metalog)

    @property
    def committed(self) -> MetalogPosition:
        """How many entries are committed, as far as this sequencer knows."""
        return self._part.committed if isinstance(self._part, Primary | Backup) else 0

    @property
    def tail(self) -> SeqNum | None:
        """The tail of the committed entries; None: this is no primary, or not started."""
        return self._part.tail if isinstance(self._part, Primary) else None

    @property
    def whole(self) -> bool:
        """Whether it has all entries that it once had."""
        return self._metalog.whole

    @property
    def ready(self) -> bool:
        """Whether it serves requests; a primary that lacks entries does not."""
        return self._metalog.whole or self._node != self._view.primary

    @property
    def silent(self) -> tuple[NodeId, ...]:
        """The backups that have not answered a primary which lacks entries."""
        return self._part.silent if isinstance(self._part, Rebuild) else ()

    def status(self) -> dict[str, int]:
        """Return figures for operators; the primary also gives the tail."""
        figures = {"length": self.length, "committed": self.committed, "whole": int(self.whole)}
        figures["base"] = self._metalog.base.position
        if isinstance(self._part, Primary):
            figures |= {"tail": self._part.tail, "time_behind_s": self._part.time_behind_s}
        return figures

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Replay the next frame."""
        assert self._part is None, f"recovery is over before {location} is"
        assert kind in METALOG_KINDS, f"a sequencer never persisted a {kind.name} frame"
        self._metalog.recover(payload, kind)

    def lost(self, frame: Lost, /) -> None:
        """Note that a frame cannot be read."""
        if frame.kind is None or frame.kind in METALOG_KINDS:
            self._metalog.doubt(frame.kind)

    def copied(self, payload: bytes, /) -> None:
        """Fill a hole with entries from the journal of a storage node in the same process."""
        if self._metalog.wants_copies:
            self._metalog.copied(entries_decoded(payload))

    @property
    def derived(self) -> bool:
        """False: the journal of a sequencer cannot be rebuilt from other roles."""
        return False

    @property
    def unsaved(self) -> int:
        """0: frames hold everything."""
        return 0

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy the state; the returned function encodes the copy and may run in any thread."""
        return self._metalog.checkpoint()

    def restore(self, payload: bytes, gone: Collection[int], /) -> None:
        """Start from a checkpoint. Missing segments (`gone`) do not matter: a sequencer reads no
        frame back.

        Raises:
            MalformedFrameError: the checkpoint is of a version that this release does not know.
        """
        assert self._part is None, f"before it is started, also if {len(gone)} segments are gone"
        self._metalog.restore(payload)

    def recovered(self) -> None:
        """Check after replay whether lost entries can be fetched from the other sequencers.

        Raises:
            DataLossError: there are no other sequencers.
        """
        self._metalog.recovered()
        if not self._metalog.whole and len(self._view.sequencers) == 1:
            raise DataLossError(
                f"The order of the log is damaged on the disk of {self._node}, which alone "
                "had all of it; restore its directory from a copy."
            )

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Apply a batch of events. A primary then proposes at most one entry of each kind; a backup
        answers once.
        """
        effects: list[Effect] = []
        if isinstance(self._part, Primary):
            self._part.begin_iteration(now)
        for event in events:
            effects += self._on_event(event, now)
        match self._part:
            case Primary() as primary:
                effects += primary.advance(now)
            case Rebuild() as rebuild:
                effects += self._rebuilt(rebuild, now)
            case Backup() as backup:
                effects += backup.advance()
            case None:
                assert not events, "Started is the first event"
            case unreachable:
                assert_never(unreachable)
        return effects

    def deadline(self) -> Instant | None:
        """When the primary must resend a message."""
        return self._part.deadline() if isinstance(self._part, Primary | Rebuild) else None

    def check_invariants(self) -> None:
        """Assert the invariants of the metalog and of the current part."""
        if self._part is not None:
            self._metalog.check_invariants()
            self._part.check_invariants()

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received():
                return self._on_received(event)
            case Persisted(token=token):
                self._metalog.on_persisted(token)
                return []
            case Started():
                self._start(event, now)
                return []
            case SpaceChanged(room=room):
                if isinstance(self._part, Primary):
                    self._part.on_space_changed(full=room is not None, now=now)
                return []
            case FrameRead() | SnapshotsAnswered():
                raise AssertionError("a sequencer reads nothing back")
            case unreachable:
                assert_never(unreachable)

    def _on_received(self, event: Received) -> list[Effect]:
        assert self._part is not None, "Started is the first event"
        heard = self._incarnations.note(event.sender, event.incarnation)
        if heard is Heard.OLDER:
            return [Ignore(event, "a message of an earlier incarnation of its sender")]
        if heard is Heard.NEWER and isinstance(self._part, Primary):
            self._part.forget(event.sender)
        message = event.message
        if not isinstance(message, ForSequencer):
            return [Ignore(event, f"a sequencer has no use for {type(message).__name__}")]
        return self._part.on_received(event, message)

    def _start(self, event: Started, now: Instant) -> None:
        assert self._part is None, "a role starts once"
        view, metalog = self._view, self._metalog
        self._epoch = event.epoch
        if self._node != view.primary:
            self._part = Backup(view.primary, self._config, metalog, event.epoch)
        elif metalog.whole:
            self._part = Primary(view, self._config, metalog, event.epoch, now)
        else:
            self._part = Rebuild(view, self._config, metalog, event.epoch)

    def _rebuilt(self, rebuild: Rebuild, now: Instant) -> list[Effect]:
        """Continue the rebuild, or begin to work as a primary when it is complete."""
        if not self._metalog.whole:
            return rebuild.advance(now)
        self._part = Primary(self._view, self._config, self._metalog, self._epoch, now)
        return self._part.advance(now)
