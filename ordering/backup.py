"""A backup sequencer: keeps a durable copy of the primary's metalog (Scalog 3, "Ordering Layer").

It takes entries only where they follow on, so it is always a prefix of what the primary has on
disk, and it answers with how many it has, durably.
"""

from __future__ import annotations

from indilog.ids import MetalogPosition, NodeId
from indilog.messages import MetalogAppend, MetalogStored
from indilog.roles import Effect, Ignore, Received, Send
from ordering.stored_metalog import StoredMetalog


class Backup:
    """Stores what the primary sends.

    Guarantees: an entry it answered for is on its disk and never changes; a gap and a repetition
    are answered too, so the primary learns where to go on.
    """

    def __init__(self, primary: NodeId, metalog: StoredMetalog) -> None:
        self._primary = primary
        self._metalog = metalog
        self._answered = -1
        self._answer_owed = True
        """At first: a restart may have lost what was on its way, and the primary should know."""
        self._committed: MetalogPosition = 0

    @property
    def committed(self) -> MetalogPosition:
        """How many entries the primary has said are committed."""
        return self._committed

    def on_received(self, event: Received) -> list[Effect]:
        """Take in one message; the answer to all of them is given in `advance`."""
        message = event.message
        if not isinstance(message, MetalogAppend):
            return [Ignore(event, f"a backup has no use for {type(message).__name__}")]
        if event.sender != self._primary:
            return [Ignore(event, "metalog entries of a node that is not the primary of this view")]
        return self._on_metalog_append(event, message)

    def advance(self) -> list[Effect]:
        """Answer once for all that came, with what is durable."""
        stored = self._metalog.stored
        if not self._answer_owed and stored == self._answered:
            return []
        self._answer_owed, self._answered = False, stored
        return [Send(self._primary, MetalogStored(stored))]

    def check_invariants(self) -> None:
        """Assert that no more is stored or committed than there is."""
        assert self._committed <= len(self._metalog)
        assert self._metalog.stored <= len(self._metalog)

    def _on_metalog_append(self, event: Received, message: MetalogAppend) -> list[Effect]:
        start, entries, length = message.start, message.entries, len(self._metalog)
        if any(entry.position != start + i for i, entry in enumerate(entries)) or start < 0:
            return [Ignore(event, "the entries' positions do not follow on")]
        known = self._metalog.page(start, min(length, start + len(entries)))
        if known != entries[: len(known)]:
            # Only a primary that lost its disk sends this. It gets no answer, so these entries are
            # not committed with our help.
            return [Ignore(event, "the entries contradict those stored here")]
        fresh = entries[len(known) :] if start <= length else ()
        if not fresh:
            self._answer_owed = True
        effects: list[Effect] = [self._metalog.append(entry) for entry in fresh]
        self._committed = max(self._committed, min(message.committed, len(self._metalog)))
        return effects
