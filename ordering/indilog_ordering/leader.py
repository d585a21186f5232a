"""One term of a primary: the leader seals the sequencers, adopts the greatest copy, replicates and
commits entries, and confirms rounds. The rules are in `indilog_ordering.consensus`.

`Consensus` owns the `Leader`. A leader appends to the copy of its own `Member`, and keeps a
`MemberProgress` for each other sequencer. `Primary` proposes entries by `Leader.append`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, majority
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import NO_INCARNATION, Entry
from indilog.roles.role import Effect, Ignore, Received, Send
from indilog.wire.sequencer_messages import (
    MetalogAppend,
    MetalogStored,
    Seal,
    Sealed,
)
from indilog_ordering.member import Member, misordered
from indilog_ordering.member_progress import MemberProgress


class Leader:
    """The primary of one term.

    Guarantees: an entry is committed only if it is durable at a majority of the configuration, not
    counting learners. The configuration consists of the sequencers of the newest view in the copy
    here. No committed entry is ever replaced.

    Attributes:
        nodes: the configuration.
        alone: whether there is no other sequencer.
        adopted: whether the metalog here has all entries that earlier terms committed, so that
            entries may be proposed.
        recovered: number of adopted entries.
    """

    def __init__(self, node: NodeId, member: Member, term: Epoch, config: Config) -> None:
        self._node = node
        self._member = member
        self._metalog = member.metalog
        self._term = term
        self._view = member.view
        self.nodes = nodes = self._view.sequencers
        self._majority = majority(nodes)
        self._page_entries = config.node.ordering.metalog_entries_in_flight_max
        self._page_bytes = config.node.messages.page_bytes_max
        self._resend_s = config.node.messages.resend_s, config.node.messages.resend_s_max
        self._members = {
            other: MemberProgress(Resend(*self._resend_s)) for other in nodes if other != node
        }
        self._joining: frozenset[NodeId] = frozenset()
        """Nodes outside the configuration that are to join it."""
        self._left: dict[NodeId, int | None] = {}
        """Nodes that the newest configuration lacks, with the round from which each of them learns
        that it has left. A node gets entries until it has answered in this round. None: the entry
        that removes the node is not committed yet.
        """
        self._seals = Resend(*self._resend_s)
        """When to resend `Seal` messages until a copy is adopted."""
        self._round = 1
        """The newest round; a round is confirmed when a majority has answered in it."""
        self._round_wanted = False
        self._owner: tuple[NodeId, Extent] | None = None
        """The owner: the node whose copy is adopted, and the extent of that copy."""
        self._chosen_by: frozenset[NodeId] = frozenset()
        """The configuration of which a majority was sealed when the owner was chosen."""
        self._asked: MetalogPosition | None = None
        """The first position of the last request to the owner."""
        self._paged = False
        """Whether the owner was sent a request in this iteration."""
        self.alone = self._majority == 1
        self.adopted = self.alone
        self.recovered: MetalogPosition = len(self._metalog)

    # --- questions

    @property
    def deposed(self) -> bool:
        """Whether this node follows a newer term."""
        return self._member.term != self._term

    @property
    def committed(self) -> MetalogPosition:
        """Number of committed entries, as far as it is known here."""
        return self._metalog.committed.position

    @property
    def settled(self) -> bool:
        """Whether all entries that earlier terms committed are known to be committed."""
        if self.alone:
            return self.committed >= self.recovered
        return self.committed > self.recovered

    @property
    def has_room(self) -> bool:
        """Whether an entry may be proposed: fewer than `metalog_entries_in_flight_max` entries are
        in flight.
        """
        in_flight = len(self._metalog) - self.committed
        return not self.deposed and in_flight < self._page_entries

    @property
    def silent(self) -> tuple[NodeId, ...]:
        """The sequencers of the configuration from which no message has arrived."""
        return tuple(
            n for n, member in self._members.items() if member.elects and not member.incarnation
        )

    def confirm(self) -> int:
        """Begin a round; return its number. A confirmed round proves that no newer primary had
        committed an entry at the time of this call.
        """
        self._round_wanted = True
        return self._round + 1

    @property
    def confirmed(self) -> int:
        """The newest round in which a majority has answered."""
        rounds = [member.echoed for member in self._members.values() if member.counts]
        return self._of_majority([*rounds, *[self._round] * self._counts], 0)

    @property
    def _counts(self) -> bool:
        """Whether this node counts towards a majority."""
        if self.alone:
            return True
        promised = self._metalog.promised == self._term == self._member.term
        return promised and not self._metalog.learner and self._node in self.nodes

    def _of_majority(self, values: list[int], otherwise: int) -> int:
        """Return the largest value that a majority of the configuration has reached; `otherwise` if
        fewer than a majority have a value.
        """
        if len(values) < self._majority:
            return otherwise
        return sorted(values, reverse=True)[self._majority - 1]

    # --- the configuration

    def invite(self, nodes: Collection[NodeId]) -> None:
        """Also send entries to `nodes`, which are to join the configuration."""
        assert self.adopted, "the configuration is known"
        self._joining = frozenset(nodes) - frozenset(self.nodes)
        self._follow_nodes()

    def can_install(self, nodes: Sequence[NodeId]) -> bool:
        """Whether a view with these sequencers may be proposed now (rule 7 of the consensus core).
        A majority of them must have nearly all entries, so that the new entry is soon committed.
        """
        if frozenset(nodes) == frozenset(self.nodes):
            return True
        changed = frozenset(nodes) ^ frozenset(self.nodes)
        if len(changed) != 1 or len(nodes) < 2 or self.alone:
            return False
        if not (self.settled and self._metalog.view_end <= self.committed):
            return False
        current = [node for node in nodes if self._is_current(node)]
        added = frozenset(nodes) - frozenset(self.nodes)
        return len(current) >= majority(nodes) and added <= frozenset(current)

    def _is_current(self, node: NodeId) -> bool:
        """Whether a node is no learner, and lacks at most as many entries as may be in flight."""
        if node == self._node:
            return not self._metalog.learner
        member = self._members.get(node)
        if member is None or not member.voter or member.probed:
            return False
        return member.stored + self._page_entries >= self.committed

    def _follow_view(self) -> None:
        """Note the configuration after the copy here has changed."""
        if (view := self._member.view) is self._view:
            return
        self._view, before = view, self.nodes
        if frozenset(view.sequencers) != frozenset(before):
            self.nodes = view.sequencers
            self._majority = majority(self.nodes)
            self._joining -= frozenset(self.nodes)
            left = frozenset(before) - frozenset(self.nodes) if self.adopted else frozenset()
            self._left = {node: None for node in sorted(left) if node != self._node}
            self._follow_nodes()

    def _follow_nodes(self) -> None:
        """Keep the progress of the nodes that get entries; drop the progress of all other nodes."""
        owner = () if self._owner is None else (self._owner[0],)
        kept = dict.fromkeys((*self.nodes, *sorted(self._joining), *self._left, *owner))
        known = self._members
        self._members = {
            node: known.get(node) or MemberProgress(Resend(*self._resend_s))
            for node in kept
            if node != self._node
        }
        for node, member in self._members.items():
            member.elects = node in self.nodes

    # --- messages

    def on_sealed(self, event: Received, message: Sealed) -> list[Effect]:
        """Handle the answer to a `Seal`."""
        member = self._progress_of(event)
        if member is None or message.term != self._term:
            return [Ignore(event, "an answer to another term, or of a node that is no sequencer")]
        if message.round > self._round or message.extent.length < 0:
            return [Ignore(event, "an answer to a round that was not begun")]
        self._note_learner(member, learner=message.learner)
        member.echoed = max(member.echoed, message.round)
        if self.adopted:
            return []
        member.extent = message.extent
        if member.sealed_in is None:
            member.sealed_in = self._round
        if self._owner is None or event.sender != self._owner[0]:
            return []
        return self._on_page(event, message)

    def on_stored(self, event: Received, message: MetalogStored) -> list[Effect]:
        """Handle an acknowledgement, or the first message of an incarnation."""
        member = self._progress_of(event)
        if member is None:
            return [Ignore(event, "metalog stored by a node that is no sequencer")]
        if message.term > self._term:
            return [Ignore(event, "the sequencer follows a newer primary")]
        self._note_learner(member, learner=message.learner)
        if message.term < self._term or not self.adopted:
            return []
        if not 0 <= message.matched <= len(self._metalog) or message.round > self._round:
            return [Ignore(event, "the sequencer has entries that were never sent to it")]
        member.echoed = max(member.echoed, message.round)
        if message.common is None:
            member.on_stored(message.matched)
            return []
        member.stored = max(member.stored, message.matched)
        member.sent = max(member.sent, member.stored)
        member.on_mismatch(self._metalog.agreement(*message.common))
        return []

    def _progress_of(self, event: Received) -> MemberProgress | None:
        """Return the progress of the sender; a new incarnation begins with an empty progress."""
        member = self._members.get(event.sender)
        if member is None or event.incarnation < member.incarnation:
            return None
        if event.incarnation > member.incarnation:
            fresh = Resend(*self._resend_s)
            member = MemberProgress(fresh, event.incarnation, elects=member.elects)
            self._members[event.sender] = member
        return member

    def _note_learner(self, member: MemberProgress, *, learner: bool) -> None:
        """Note whether a node is a voter. A learner becomes a voter when two conditions hold: it
        has all entries that are here now, and a round that begins now is confirmed without it.
        """
        if not learner:
            member.voter, member.learner_until = True, None
        elif member.learner_until is None and not member.voter and self.adopted:
            member.learner_until = len(self._metalog), self.confirm()

    # --- the beginning of the term

    def advance(self, now: Instant) -> list[Effect]:
        """Adopt a copy, or commit entries that a majority has. Call `replicate` after proposals.

        Raises:
            DataLossError: so many sequencers lost entries that the missing entries cannot be
                determined.
        """
        if not self.adopted:
            return self._adopt(now)
        self._commit()
        return self._restore_own() if self._metalog.written.learner else []

    def _adopt(self, now: Instant) -> list[Effect]:
        """Seal all sequencers in two rounds, then adopt a copy. The second round begins when a
        majority has answered. Unanswered messages are resent after a pause. If the adopted copy has
        another configuration, a majority of that configuration is sealed, too.
        """
        self._check_voters()
        confirms = self._sealed_by(self._round + 1) and not self._sealed_by(self._round)
        if self._paged:
            self._paged = False
            self._seals.stop()
            self._seals.sent(now)
        if self._seals.due is not None:
            if not (confirms or self._seals.is_due(now)):
                return self._choose(now) if self._owner is None and self._is_sealed() else []
            self._round += 1
            self._owner = None
        if confirms:
            self._seals.stop()
        self._seals.sent(now)
        return [Send(node, Seal(self._term, self._round)) for node in self._members]

    def _check_voters(self) -> None:
        """Stop if fewer than a majority are voters, because only a primary restores learners. While
        another copy is greater than the copy here, the configuration may still change; so wait
        until all sequencers have answered.

        Raises:
            DataLossError: fewer than a majority count.
        """
        lost = [
            node
            for node, member in self._members.items()
            if member.elects and member.sealed_in is not None and not member.voter
        ]
        if self._metalog.learner and self._node in self.nodes:
            lost.append(self._node)
        newest = max(
            (member.extent for member in self._members.values()), default=self._metalog.extent
        )
        electing = (member for member in self._members.values() if member.elects)
        is_known = all(member.sealed_in is not None for member in electing)
        is_known |= newest <= self._metalog.extent
        if is_known and len(self.nodes) - len(lost) < self._majority:
            first, *others = sorted(lost)
            raise DataLossError(
                f"The order of the log is damaged on the disk of {first}, and on that of "
                f"{' and '.join(others)} too. So no node knows whether an acknowledged record "
                "would be missing. Restore the whole data directory from a copy."
            )

    def _sealed_by(self, end: int) -> bool:
        """Whether a majority of voters had answered before round `end` began."""
        answers = [m for m in self._members.values() if _sealed_before(m, end)]
        return len(answers) + self._counts >= self._majority

    def _is_sealed(self) -> bool:
        """Whether a majority of voters had answered before this round began and has also answered
        in it (rule 3 of the consensus core).
        """
        return len(self._electors()) + self._counts >= self._majority

    def _electors(self) -> dict[NodeId, MemberProgress]:
        return {
            node: member
            for node, member in self._members.items()
            if _sealed_before(member, self._round) and member.echoed == self._round
        }

    def _choose(self, now: Instant) -> list[Effect]:
        """Adopt the greatest copy of the electors, if it is not here already."""
        self._seals.stop()
        extents = {node: member.extent for node, member in self._electors().items()}
        owner = max(extents, key=lambda node: extents[node])
        if extents[owner] <= self._metalog.extent:
            self._begin()
            return []
        self._owner, self._chosen_by = (owner, extents[owner]), frozenset(self.nodes)
        start = self._metalog.agreement(*extents[owner])
        self._seals.sent(now)
        return self._ask(max(start, self._metalog.base.position))

    def _ask(self, start: MetalogPosition) -> list[Effect]:
        """Ask the owner for the entries from `start` on."""
        assert self._owner is not None, "a copy was chosen"
        self._asked, self._paged = start, True
        previous = self._metalog.epoch_before(start)
        return [Send(self._owner[0], Seal(self._term, self._round, start, previous))]

    def _on_page(self, event: Received, message: Sealed) -> list[Effect]:
        """Take entries of the adopted copy, and request those that follow."""
        assert self._owner is not None, "a copy was chosen"
        metalog = self._metalog
        if message.common is not None:
            start = max(metalog.agreement(*message.common), metalog.base.position)
            return self._ask(start) if start != self._asked else []
        if message.start is None:
            return []
        start, previous = message.start, message.previous
        base = message.base
        impossible = base is not None and not (
            base.is_possible and (base.position, base.last) == (start, previous)
        )
        if impossible or misordered(start, previous, message.entries, self._term):
            return [Ignore(event, "an impossible copy of the metalog")]
        taken = self._member.take(message)
        if not isinstance(taken, list):
            return [Ignore(event, taken or "entries that do not follow this copy")]
        self._follow_view()
        if metalog.extent >= self._owner[1]:
            if frozenset(self.nodes) == self._chosen_by:
                self._begin()
            else:  # seal a majority of this configuration, too
                self._owner = None
                self._seals.stop()
        elif taken:
            taken += self._ask(len(metalog))
        return taken

    def _begin(self) -> None:
        """End the adoption. All entries that earlier terms committed are here now, so proposals may
        begin.
        """
        self._seals.stop()
        self._owner = None
        self._follow_nodes()
        self.adopted, self.recovered = True, len(self._metalog)
        for member in self._members.values():
            if member.sealed_in is not None:
                member.probe_at = self._metalog.agreement(*member.extent)
            if member.incarnation and not member.voter:
                self._note_learner(member, learner=True)

    def _restore_own(self) -> list[Effect]:
        """Make this node a voter again when its disk has all adopted entries."""
        metalog = self._metalog
        if metalog.stored < self.recovered:
            return []
        return [metalog.mark(learner=False)]

    # --- entries

    def append(self, entry: Entry) -> Effect:
        """Propose an entry."""
        assert self.adopted, "earlier entries come first"
        assert not self.deposed, "a newer primary may have proposed at this position"
        effect = self._metalog.append(entry)
        self._follow_view()
        return effect

    def _commit(self) -> None:
        """Commit the entries that a majority has, if the last of them is of this term (Raft
        5.4.2).
        """
        if self.alone:
            if self._metalog.stored > self.committed:
                self._metalog.commit(self._metalog.stored)
            return
        stored = [member.stored for member in self._members.values() if member.counts]
        end = self._of_majority([*stored, *[self._metalog.stored] * self._counts], 0)
        if end > max(self.committed, self.recovered):
            self._metalog.commit(end)
            if self._left:
                self._dismiss()

    def _dismiss(self) -> None:
        """Begin a round for each node that has left. The message of the round tells the node that
        the entry of its removal is committed.
        """
        if self._metalog.view_end <= self.committed:
            for node, until in self._left.items():
                if until is None:
                    self._left[node] = self.confirm()

    def replicate(self, now: Instant) -> list[Effect]:
        """Send the other sequencers the entries that they lack."""
        if self.alone or not self.adopted or self.deposed:
            return []
        confirmed = self.confirmed
        if self._round_wanted and confirmed >= self._round:
            self._round_wanted = False
            self._round += 1
        if self._left:
            known = self._members
            gone = [n for n, until in self._left.items() if until and known[n].echoed >= until]
            for node in gone:
                del self._left[node]
                if node not in self._joining:
                    del self._members[node]
        return [
            effect
            for node, member in self._members.items()
            for effect in self._replicate(node, member, confirmed, now)
        ]

    def _replicate(
        self, node: NodeId, member: MemberProgress, confirmed: int, now: Instant
    ) -> Iterator[Effect]:
        """Send a sequencer its next page, a probe or a round, within the window."""
        if member.resend.is_due(now):
            member.go_back()
        metalog, length = self._metalog, len(self._metalog)
        start = end = length
        needs_base = member.needs_base(metalog.base.position)
        base = metalog.base if needs_base and not member.base_sent else None
        if base is not None:
            start, end = base.position, min(length, base.position + self._page_entries)
        elif member.probed and not needs_base and member.probe_at is not None:
            start, end = member.probe_at, min(length, member.probe_at + self._page_entries)
        elif not (member.probed or needs_base):
            start, end = member.sent, min(length, member.stored + self._page_entries)
        idle = member.resend.due is None
        if member.probed and not idle and base is None:
            return
        entries = metalog.page(start, end, self._page_bytes) if start < end else ()
        end = min(end, start + len(entries))
        is_restored = member.is_restored(confirmed)
        says = idle and (member.probed or is_restored)
        if start < end or base is not None or says or member.round_sent < self._round:
            yield Send(
                node,
                MetalogAppend(
                    self._term,
                    start,
                    metalog.epoch_before(start),
                    entries,
                    self.committed,
                    self._round,
                    metalog.base.position,
                    base,
                    member.incarnation if is_restored else NO_INCARNATION,
                ),
            )
            member.sent = max(member.stored, end) if not member.probed else member.sent
            member.base_sent = base is not None
            member.round_sent = self._round
        awaited = (
            member.probed
            or needs_base
            or member.stored < length
            or is_restored
            or member.echoed < self._round
        )
        if idle and awaited:
            member.resend.sent(now)

    def deadline(self) -> Instant | None:
        """When to resend to a silent sequencer."""
        if self.deposed:
            return None
        if not self.adopted:
            return self._seals.due
        dues = [m.resend.due for m in self._members.values() if m.resend.due is not None]
        return min(dues, default=None)

    def check_invariants(self) -> None:
        """Assert that entries pass through their stages in order."""
        if self.deposed:
            return
        assert self.committed <= len(self._metalog)
        assert self.adopted or self._seals.due is not None
        for member in self._members.values():
            assert member.stored <= len(self._metalog), "only what equals this metalog counts"
            assert member.stored <= member.sent or member.probed


def _sealed_before(member: MemberProgress, end: int) -> bool:
    return member.counts and member.sealed_in is not None and member.sealed_in < end
