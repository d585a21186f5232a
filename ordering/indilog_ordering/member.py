"""One sequencer's copy of the metalog, its promise, and its answers to a primary. The rules are in
`indilog_ordering.consensus`.

`Consensus` owns the one `Member` of a sequencer; `Leader` uses it at the primary. The member keeps
the entries in a `StoredMetalog`.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, MetalogPosition, NodeId
from indilog.config import Config
from indilog.kernel.metalog import Base, Entry
from indilog.kernel.view import View
from indilog.roles.role import Effect, Ignore, Received, Send
from indilog.wire.sequencer_messages import MetalogAppend, MetalogStored, Seal, Sealed
from indilog_ordering.stored_metalog import StoredMetalog


class Member:
    """A copy of the metalog that follows the primary of the newest term.

    Args:
        metalog: the copy, recovered.
        view: the newest view that is known to be installed.
        incarnation: the incarnation of this node.

    Guarantees: each answer contains only durable facts. After a promise of a term, neither this
    incarnation nor a later one follows a lower term.

    Attributes:
        metalog: the copy.
        incarnation: the incarnation of this node.
        term: the newest term that is known here; answers wait until its promise is durable.
        committed: number of the entries here that the primary has reported as committed. The report
            may precede the sync of the primary's process.
    """

    def __init__(
        self, metalog: StoredMetalog, view: View, incarnation: Epoch, config: Config
    ) -> None:
        self.metalog = metalog
        self._installed = view
        self.incarnation = incarnation
        self.term = metalog.promised
        self.committed: MetalogPosition = 0
        self._page_entries = config.node.ordering.metalog_entries_in_flight_max
        self._page_bytes = config.node.messages.page_bytes_max
        self._primary: NodeId | None = None
        """The node that leads `term`; None: this node leads it, or the leader is not known since
        the start.
        """
        self._leads = False
        """Whether this node itself leads `term`."""
        self._matched: MetalogPosition = 0
        """Number of entries, durable or not, that equal those of the primary of `term`."""
        self._round = 0
        """The newest round of the primary of `term`."""
        self._folded: MetalogPosition = 0
        self._sealed: Seal | None = None
        """The `Seal` to answer when the promise is durable."""
        self._due = False
        """Whether an answer is due even if it repeats the last one."""
        self._mismatch: tuple[MetalogPosition, Epoch] | None = None
        """Start and previous term of a message whose entries do not follow this copy. The answer
        names the largest extent that both copies can have in common.
        """
        self._answered: MetalogStored | None = None

    def begin(self) -> list[Effect]:
        """Return the frame that marks a learner; it precedes all other frames."""
        return [self.metalog.mark(learner=True)] if self.metalog.written.learner else []

    def lead(self, term: Epoch) -> list[Effect]:
        """Begin a term; return the frame of the promise."""
        self.term, self._primary, self._leads = term, None, True
        self._matched = self._round = 0
        self._sealed = self._mismatch = self._answered = None
        return [self.metalog.promise(term)]

    def announce(self, primary: NodeId) -> list[Effect]:
        """Notify the primary of this incarnation. The primary then voids the acknowledgements of
        earlier incarnations.
        """
        learner = self.metalog.written.learner
        return [Send(primary, MetalogStored(self.metalog.promised, 0, learner=learner))]

    @property
    def leader(self) -> tuple[Epoch, NodeId]:
        """The newest term whose primary is known, and that primary; term 0: none is known."""
        return (Epoch(0), NodeId("")) if self._primary is None else (self.term, self._primary)

    @property
    def view(self) -> View:
        """The newest view of this copy, committed or not; its sequencers are the configuration."""
        view, installed = self.metalog.view, self._installed
        return installed if view is None or view.number < installed.number else view

    # --- messages

    def on_seal(self, event: Received, message: Seal) -> list[Effect]:
        """Promise to follow no lower term; the answer follows when the promise is durable."""
        if message.start is not None and message.start < 0:
            return [Ignore(event, "a position is never negative")]
        effects = self._follow(event, message.term)
        if message.term == self.term and event.sender == self._primary:
            self._sealed = message
        return effects

    def on_append(self, event: Received, message: MetalogAppend) -> list[Effect]:
        """Take the entries that follow this copy, or that replace a part of it."""
        if (reason := _misfit(message)) is not None:
            return [Ignore(event, reason)]
        effects = self._follow(event, message.term)
        if message.term != self.term or event.sender != self._primary:
            return effects
        self._round = max(self._round, message.round)
        if (taken := self.take(message)) is None:
            self._mismatch = message.start, message.previous
            return effects
        if isinstance(taken, str):
            return [*effects, Ignore(event, taken)]
        self._mismatch = None
        self._due = self._due or not taken
        self._matched = max(self._matched, message.start + len(message.entries))
        self.committed = max(self.committed, min(message.committed, self._matched))
        self._folded = max(self._folded, min(message.folded, self.committed))
        if message.voter == self.incarnation and self.metalog.written.learner:
            taken.append(self.metalog.mark(learner=False))
        return effects + taken

    def _follow(self, event: Received, term: Epoch) -> list[Effect]:
        """Follow the sender, unless a newer term is known."""
        if term < self.term:
            return [Ignore(event, "a message of an older term")]
        if term > self.term:
            self.term, self._primary, self._leads = term, event.sender, False
            self._matched = self._round = 0
            self._sealed = self._mismatch = self._answered = None
            return [self.metalog.promise(term)]
        if self._primary is None and not self._leads:
            self._primary = event.sender
        if event.sender != self._primary:
            return [Ignore(event, "a second primary of one term")]
        return []

    def take(self, message: MetalogAppend | Sealed) -> list[Effect] | str | None:
        """Add the entries of a message to this copy.

        Returns:
            The frames to persist. Text: why the message contradicts this copy. None: the entries do
            not follow this copy, because this copy has another entry, or no entry, before them.
        """
        metalog, effects, start = self.metalog, list[Effect](), message.start
        assert start is not None, "it has entries, or a place for some"
        base = message.base
        if base is not None and not metalog.fits(base.position, base.last):
            if base.position < metalog.base.position:
                return None  # a delayed message: this copy has a newer base
            if base.position < self._kept:
                return _CONTRADICTS
            effects.append(metalog.install(base))
            self.committed = max(self.committed, base.position)
        if not metalog.fits(start, message.previous):
            return None
        known = self._equal(start, message.entries)
        fresh = message.entries[known:]
        if fresh and start + known < len(metalog):
            if start + known < self._kept or metalog[start + known].epoch == fresh[0].epoch:
                return _CONTRADICTS
            metalog.cut_off(start + known)
            self.committed = min(self.committed, start + known)
        return effects + [metalog.append(entry) for entry in fresh]

    @property
    def _kept(self) -> MetalogPosition:
        """The entries below this position are durably committed, so no primary replaces them.

        `committed` may be larger, because the primary sends it before its process has synced.
        Another sequencer of that process may be part of the majority. If that process crashes and
        loses both copies, the entry was never published, and the next primary may replace it.
        """
        return self.metalog.committed.position

    def _equal(self, start: MetalogPosition, entries: tuple[Entry, ...]) -> int:
        """Return how many of `entries`, from the first one on, equal those of this copy."""
        overlap = self.metalog.page(start, start + len(entries))
        for known, (ours, theirs) in enumerate(zip(overlap, entries, strict=False)):
            if ours != theirs:
                return known
        return len(overlap)

    # --- answers

    def advance(self) -> list[Effect]:
        """Answer all messages of the iteration together. Answers state only durable facts."""
        metalog, primary = self.metalog, self._primary
        if metalog.installing or metalog.promised < self.term or primary is None:
            return []
        metalog.fold(self._folded)
        effects: list[Effect] = []
        if (sealed := self._sealed) is not None:
            self._sealed = None
            effects.append(Send(primary, self._report(sealed)))
        if not self._round:
            return effects
        common = None if self._mismatch is None else metalog.common(*self._mismatch)
        matched = min(self._matched, metalog.stored)
        answer = MetalogStored(self.term, matched, self._round, metalog.learner, common)
        if answer != self._answered or self._due or common is not None:
            self._answered, self._due, self._mismatch = answer, False, None
            effects.append(Send(primary, answer))
        return effects

    def _report(self, sealed: Seal) -> Sealed:
        """Return the durable extent of this copy, and a page of the requested entries."""
        metalog = self.metalog
        extent, learner, start = metalog.stored_extent, metalog.learner, sealed.start
        base: Base | None = None
        answer = Sealed(sealed.term, sealed.round, extent, learner)
        if start is None:
            return answer
        previous = sealed.previous
        if not metalog.fits(start, previous) or start > extent.length:
            common = metalog.common(min(start, extent.length), previous)
            if start >= metalog.base.position and common.last <= previous:
                return Sealed(sealed.term, sealed.round, extent, learner, common=common)
            base, start, previous = metalog.base, metalog.base.position, metalog.base.last
        end = min(start + self._page_entries, extent.length)
        page = metalog.page(start, end, self._page_bytes) if start < end else ()
        return Sealed(sealed.term, sealed.round, extent, learner, start, previous, page, base)

    def check_invariants(self) -> None:
        """Assert that positions are within the copy, and promises in order."""
        metalog = self.metalog
        metalog.check_invariants()
        assert metalog.stored <= len(metalog)
        assert self.committed <= len(metalog)
        assert metalog.promised <= metalog.written.promised <= self.term


_CONTRADICTS = "the entries contradict committed ones, or others of their term"


def _misfit(message: MetalogAppend) -> str | None:
    """Return the reason why a message is invalid, or None."""
    if message.start < 0:
        return "a position is never negative"
    if (base := message.base) is not None:
        fits = (base.position, base.last) == (message.start, message.previous)
        if not (base.is_possible and fits and base.last <= message.term):
            return "a base that no entries can produce"
    return misordered(message.start, message.previous, message.entries, message.term)


def misordered(
    start: MetalogPosition, previous: Epoch, entries: tuple[Entry, ...], term: Epoch
) -> str | None:
    """Return the reason why no copy of a primary of `term` has these entries, or None."""
    last = previous
    for position, entry in enumerate(entries, start):
        if entry.position != position:
            return "the entries' positions are not consecutive"
        if entry.epoch < last:
            return "the entries' epochs go back"
        last = entry.epoch
    return "an entry of a term after the message's" if last > term else None
