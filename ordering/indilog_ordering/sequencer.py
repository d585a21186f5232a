"""The sequencer role: one replica of the metalog, a primary or a backup (ARCHITECTURE 8.3, 11).

`TermBegun` names the primary. Every sequencer takes part in the consensus core
(`indilog_ordering.consensus`). The primary also has a `Primary`, from the adoption of a copy in its
term until a message of a newer term arrives.

A shell of `indilog.runtime` passes events to `Sequencer.handle` and executes the returned effects.
Other sequencers, engines and storage nodes send the messages. `indilog_pipeline` replays the
journal of a sequencer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, assert_never

from indilog.base.errors import DataLossError
from indilog.base.ids import Instant, MetalogPosition, NodeId, SeqNum
from indilog.config import Config
from indilog.kernel.metalog import decode_entries
from indilog.kernel.view import NODES_MAX, Members, View, Views
from indilog.roles.incarnations import IncarnationOrder, Incarnations
from indilog.roles.leadership import Leadership
from indilog.roles.role import (
    METALOG_KINDS,
    CellsAnswered,
    ColdAnswered,
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    Lost,
    MembersWanted,
    Persisted,
    Received,
    Send,
    SnapshotsAnswered,
    SpaceChanged,
    Started,
    TermBegun,
)
from indilog.wire.messages import ForSequencer, Message, TermIs
from indilog.wire.sequencer_messages import MetalogAppend, MetalogStored, Seal, Sealed
from indilog_ordering.consensus import Consensus
from indilog_ordering.primary import Primary, check_new
from indilog_ordering.stored_metalog import StoredMetalog


class Sequencer:
    """One sequencer. The view need not contain this node yet, because the node may be about to
    join.

    Guarantees: those of `Consensus`, and at the primary also those of `Primary`. After a restart, a
    sequencer continues from its disk. The first message of a new incarnation of a node voids the
    reports of its earlier incarnations.
    """

    def __init__(self, node: NodeId, views: Views, config: Config) -> None:
        self._view = views[-1]
        self._other_roles = frozenset(self._view.nodes) - frozenset(self._view.sequencers)
        assert node not in self._other_roles, f"{node} is no sequencer"
        self._node = node
        self._config = config
        self._metalog = StoredMetalog(
            sole=len(self._view.sequencers) == 1, kept=config.node.ordering.metalog_entries_kept
        )
        self._incarnations = Incarnations()
        self._members: Members | None = None
        """The nodes that the cluster should have; None: no change is wanted."""
        self._core: Consensus | None = None
        """Set by `Started`, after recovery."""
        self._leadership = Leadership(self._view)
        self._primary: Primary | None = None
        """Set at the primary when its term has adopted a copy."""
        self._parked: dict[tuple[NodeId, type], Received] = {}
        """The newest message of each kind from each reader and storage node. They wait here until
        all recovered entries are known to be committed.
        """
        self._full = False
        """Whether the disk is full."""

    @property
    def metalog(self) -> StoredMetalog:
        """This copy of the metalog, for programs that read a data directory. The caller must not
        change it.
        """
        return self._metalog

    @property
    def length(self) -> MetalogPosition:
        """Number of entries."""
        return len(self._metalog)

    @property
    def committed(self) -> MetalogPosition:
        """Number of committed entries, as far as this sequencer knows."""
        if self._primary is not None:
            return self._primary.committed
        return self._core.member.committed if self._core is not None else 0

    @property
    def tail(self) -> SeqNum | None:
        """The tail of the committed entries; None: this node is no primary, or has not started."""
        return self._primary.tail if self._primary is not None else None

    @property
    def installed(self) -> View | None:
        """The newest view that a committed entry installs; None: there is none, or this node is no
        primary.
        """
        return self._metalog.committed.view if self._primary is not None else None

    @property
    def sequencers(self) -> tuple[NodeId, ...]:
        """The sequencers of the newest view here, committed or not. This node need not be one of
        them.
        """
        return self._view.sequencers if self._core is None else self._core.member.view.sequencers

    @property
    def is_outside(self) -> bool:
        """Whether the newest committed view lacks this node: the node has left, or has not joined
        yet. A primary that has left leads until another primary begins a term.
        """
        return self._core is not None and self._core.is_outside

    @property
    def learner(self) -> bool:
        """Whether this node may lack entries or promises that it once had. It then counts in no
        majority.
        """
        return self._metalog.learner

    @property
    def ready(self) -> bool:
        """Whether this node serves requests; a primary that may lack entries does not serve
        them.
        """
        return not self._metalog.learner or self._node != self._leadership.primary

    @property
    def silent(self) -> tuple[NodeId, ...]:
        """The other sequencers from which a primary that lacks entries has received no message."""
        leader = self._core.leader if self._core is not None else None
        return leader.silent if leader is not None else ()

    def status(self) -> dict[str, Any]:
        """Return figures for operators. The figures of the primary include the tail and the names
        of lost storage nodes.
        """
        figures: dict[str, Any] = {
            "length": self.length,
            "committed": self.committed,
            "learner": int(self.learner),
            "base": self._metalog.base.position,
        }
        if self._core is not None:
            figures["term"] = self._core.member.term
        if self._primary is not None:
            figures |= {
                "tail": self._primary.tail,
                "time_behind_s": self._primary.time_behind_s,
                "lost_storage_nodes": self._primary.lost_storage_nodes,
            }
        return figures

    def recover(self, kind: FrameKind, payload: bytes, location: Location) -> None:
        """Replay the next frame."""
        assert self._core is None, f"recovery is over before {location} is"
        assert kind in METALOG_KINDS, f"a sequencer never persisted a {kind.name} frame"
        self._metalog.recover(payload, kind)

    def lost(self, frame: Lost, /) -> None:
        """Note that a frame cannot be read."""
        if frame.kind is None or frame.kind in METALOG_KINDS:
            self._metalog.doubt(frame.kind)

    def copied(self, payload: bytes, /) -> None:
        """Fill a hole with entries from the journal of a storage node in the same process."""
        if self._metalog.wants_copies:
            self._metalog.copied(decode_entries(payload))

    @property
    def derived(self) -> bool:
        """False: the journal of a sequencer cannot be rebuilt from other roles."""
        return False

    @property
    def unsaved(self) -> int:
        """0: all state is in frames."""
        return 0

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy the state; the returned function encodes the copy and may run in any thread."""
        return self._metalog.checkpoint()

    def restore(self, payload: bytes, gone: Collection[int], /) -> None:
        """Start from a checkpoint. Missing segments (`gone`) do no harm, because a sequencer reads
        no frame back.

        Raises:
            MalformedFrameError: the checkpoint is of a version that this release does not know.
        """
        assert self._core is None, f"before it is started, also if {len(gone)} segments are gone"
        self._metalog.restore(payload)

    def recovered(self) -> None:
        """Check after replay that other sequencers can restore lost entries.

        Raises:
            DataLossError: entries may be lost, and there are no other sequencers.
        """
        self._metalog.recovered()
        if self._metalog.learner and len(self._view.sequencers) == 1:
            raise DataLossError(
                f"The order of the log is damaged on the disk of {self._node}, which alone "
                "had all of it; restore its directory from a copy."
            )

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """Apply a batch of events. A primary then proposes at most one entry of each kind; another
        sequencer answers once.
        """
        effects: list[Effect] = []
        if self._primary is not None:
            self._primary.begin_iteration(now)
        for event in events:
            effects += self._on_event(event, now)
        if (core := self._core) is None:
            assert not events, "Started is the first event"
            return effects
        if core.retire():
            self._retire_primary()
        effects += core.advance(now)
        if (leader := core.leader) is not None and leader.adopted:
            if self._primary is None:
                effects += self._begin(core, now)
            if leader.settled:
                effects += self._work(now)
            effects += leader.replicate(now)
        return effects

    def deadline(self) -> Instant | None:
        """When the primary must resend a message."""
        parts = self._core, self._primary
        dues = [due for part in parts if part is not None and (due := part.deadline()) is not None]
        return min(dues, default=None)

    def check_invariants(self) -> None:
        """Assert the invariants of the metalog and of the parts."""
        if self._core is not None:
            self._core.check_invariants()
        if self._primary is not None:
            self._primary.check_invariants()
        assert len(self._parked) <= NODES_MAX * 6, "six kinds of messages"

    def _on_event(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case Received():
                return self._on_received(event)
            case Persisted(token=token):
                self._metalog.on_persisted(token)
                return []
            case Started():
                return self._start(event)
            case TermBegun():
                return self._on_term(event)
            case MembersWanted(members):
                self._want_members(members)
                return []
            case SpaceChanged(room=room):
                self._full = room is not None
                if self._primary is not None:
                    self._primary.on_space_changed(full=self._full, now=now)
                return []
            case FrameRead() | SnapshotsAnswered() | ColdAnswered() | CellsAnswered():
                raise AssertionError("a sequencer reads nothing back")
            case unreachable:
                assert_never(unreachable)

    def _on_received(self, event: Received) -> list[Effect]:
        assert self._core is not None, "Started is the first event"
        order = self._incarnations.note(event.sender, event.incarnation)
        if order is IncarnationOrder.OLDER:
            return [Ignore(event, "a message of an earlier incarnation of its sender")]
        if order is IncarnationOrder.NEWER:
            self._forget(event.sender)
        return self._on_message(event, event.message)

    def _on_message(self, event: Received, message: Message) -> list[Effect]:
        core = self._core
        assert core is not None, "Started is the first event"
        if not isinstance(message, ForSequencer):
            return [Ignore(event, f"a sequencer does not handle {type(message).__name__}")]
        if isinstance(message, Seal | MetalogAppend) and event.sender in self._other_roles:
            return [Ignore(event, "of a node that is no sequencer")]
        if isinstance(message, Seal | Sealed | MetalogAppend | MetalogStored):
            return core.on_received(event, message)
        leader = core.leader
        if leader is None:
            return self._direct(event, core)
        if self._primary is None or not leader.settled:
            self._parked[event.sender, type(message)] = event
            return []
        return self._primary.on_received(event, message)

    def _direct(self, event: Received, core: Consensus) -> list[Effect]:
        """Refer a reader or a storage node to the primary, if it is known."""
        known = max(core.member.leader, (self._leadership.term, self._leadership.primary))
        if known[0] == 0 or known[1] == self._node:
            return [Ignore(event, f"a backup does not handle {type(event.message).__name__}")]
        return [Send(event.sender, TermIs(*known))]

    def _forget(self, node: NodeId) -> None:
        """Forget the reports of an earlier incarnation of a node."""
        for key in [key for key in self._parked if key[0] == node]:
            del self._parked[key]
        if self._primary is not None:
            self._primary.forget(node)

    def _start(self, event: Started) -> list[Effect]:
        assert self._core is None, "a role starts once"
        view, metalog = self._view, self._metalog
        core = Consensus(self._node, view, metalog, event.epoch, self._config)
        self._core = core
        return core.begin()

    def _on_term(self, event: TermBegun) -> list[Effect]:
        """Lead the term, or notify its primary of this incarnation (`Member.announce`).

        Raises:
            DataDirectoryError: see `check_new`.
        """
        core, metalog = self._core, self._metalog
        assert core is not None, "Started is the first event"
        if not self._leadership.begin(event):
            return []
        if event.primary != self._node:
            return core.member.announce(event.primary)
        if event.term == core.member.incarnation:
            check_new(event.term, max(metalog.promised, metalog.extent.last))
        if event.term <= core.member.term:
            return [Ignore(event, "a newer term has begun")]
        effects = core.lead(event.term)
        self._retire_primary()
        return effects

    def _want_members(self, members: Members) -> None:
        """Note the nodes that the cluster should have; a primary installs views with them."""
        if self._members is None or members.version >= self._members.version:
            self._members = members
            if self._primary is not None:
                self._primary.want_members(members)

    def _retire_primary(self) -> None:
        """Stop working as a primary; readers then ask the next one."""
        self._primary = None
        self._parked.clear()

    def _begin(self, core: Consensus, now: Instant) -> list[Effect]:
        """Start working as a primary."""
        leader, view = core.leader, self._view
        assert leader is not None, "this node leads"
        term = core.member.term
        primary = Primary(self._node, view, self._config, self._metalog, term, leader, now)
        if self._full:
            primary.on_space_changed(full=True, now=now)
        if self._members is not None:
            primary.want_members(self._members)
        self._primary = primary
        return primary.begin()

    def _work(self, now: Instant) -> list[Effect]:
        """Handle parked messages, publish, answer and propose."""
        assert self._primary is not None, "the term has adopted a copy"
        effects: list[Effect] = []
        if self._parked:
            parked, self._parked = self._parked, {}
            for event in parked.values():
                effects += self._on_received(event)
        return effects + self._primary.advance(now)
