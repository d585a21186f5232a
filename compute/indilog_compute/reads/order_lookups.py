"""Asks storage nodes for the places of records, and for the first seqnum that was ordered at a
given time or later (`Log.find_time`, decision 0012).

Storage nodes have all metalog entries. Each entry has the time of the primary's clock, which never
goes back along the metalog. So a seqnum that a storage node finds is final. Places of records never
change. The answer of a storage node that it finds nothing counts only if the node has applied the
position of the caller's session. `LocalLog` asks by `OrderLookups`; `Engine` drives it.
"""

from __future__ import annotations

from indilog.base.errors import IndilogError, OverloadedError, QuorumUnavailableError
from indilog.base.ids import Instant, MetalogPosition, NodeId, SeqNum
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.kernel.placement import Placement
from indilog.roles.role import Answer, Effect, Ignore, Send
from indilog.wire.order_lookup_messages import PlacesFound, PlacesLookup, TimeFound, TimeLookup
from indilog_compute.reads.operation import Answered


class _Lookup:
    """One question of one caller, with all its attempts."""

    __slots__ = ("attempt", "behind", "expires", "position", "question", "resend", "waiter")

    def __init__(
        self,
        question: TimeLookup | PlacesLookup,
        position: MetalogPosition,
        waiter: object,
        resend: Resend,
    ) -> None:
        self.question = question
        self.position = position
        self.waiter = waiter
        self.attempt = 0
        self.behind: set[NodeId] = set()
        """Nodes that answered since the last pause without having applied `position`."""
        self.expires: Instant | None = None
        """When to fail the question; None: the question was not sent yet."""
        self.resend = resend

    def deadline(self) -> Instant | None:
        """When to ask again, or to fail the question; None: the question was not sent yet."""
        if self.expires is None:
            return None
        return min(self.resend.due or self.expires, self.expires)


class OrderLookups:
    """The questions of one compute node that are in flight; at most `lookups_pending_max`."""

    def __init__(self, placement: Placement, config: NodeConfig) -> None:
        self._placement = placement
        self._lookups_max = config.reads.lookups_pending_max
        self._resend_s = config.messages.resend_s, config.messages.resend_s_max
        self._timeout_s = config.reads.read_timeout_s
        self._starting: list[int] = []
        self._lookups: dict[int, _Lookup] = {}
        self._next_request = 0

    def __len__(self) -> int:
        return len(self._lookups)

    def number_from(self, request: int) -> None:
        """Number questions above `request`, so no answer to an earlier incarnation matches one."""
        self._next_request = request

    def find_time(self, time_us: int, position: MetalogPosition, waiter: object) -> None:
        """Ask for the first seqnum ordered at `time_us` or later (microseconds since 1970).

        The question is sent when the engine's iteration ends. The waiter gets `Answered(seqnum)`.

        Raises:
            OverloadedError: too many questions wait already.
        """
        self._start(TimeLookup(self._next_request + 1, time_us), position, waiter)

    def find_places(
        self, start: SeqNum, end: SeqNum, position: MetalogPosition, waiter: object
    ) -> None:
        """Ask for the places of the records in [start, end).

        The waiter gets `Answered(spans)`: at least one `PlacedSpan`, from `start` on. There is no
        span if no entry below `position` ordered `start`.

        Raises:
            OverloadedError: too many questions wait already.
        """
        self._start(PlacesLookup(self._next_request + 1, start, end), position, waiter)

    def _start(
        self, question: TimeLookup | PlacesLookup, position: MetalogPosition, waiter: object
    ) -> None:
        if len(self._lookups) >= self._lookups_max:
            raise OverloadedError(
                f"{len(self._lookups):,} times and places are looked up; try again later."
            )
        self._next_request = request = question.request
        self._lookups[request] = _Lookup(question, position, waiter, Resend(*self._resend_s))
        self._starting.append(request)

    def on_found(
        self, sender: NodeId, message: TimeFound | PlacesFound, now: Instant
    ) -> list[Effect]:
        """Handle a storage node's answer. If the node found nothing and has not applied the
        position, ask the next node.
        """
        lookup = self._lookups.get(message.request)
        if lookup is None:
            return []
        nodes = self._placement.view.storage_nodes
        if sender not in nodes or message.position < 0 or not _answers(lookup.question, message):
            return [
                Ignore(
                    message, "an answer of a node that is no storage node, or to another question"
                )
            ]
        if message.found or message.position >= lookup.position:
            del self._lookups[message.request]
            value = message.seqnum if isinstance(message, TimeFound) else message.spans
            return [Answer(lookup.waiter, Answered(value, message.position))]
        lookup.behind.add(sender)
        lookup.resend.stop()
        if lookup.behind.issuperset(nodes):
            lookup.resend.sent(now)  # all nodes lag: they are asked again after a pause
            return []
        lookup.attempt += 1
        return [self._ask(message.request, lookup, now)]

    def advance(self, now: Instant) -> list[Effect]:
        """Send new questions, resend unanswered ones, and fail expired ones."""
        effects: list[Effect] = [
            self._ask(request, self._lookups[request], now) for request in self._starting
        ]
        self._starting.clear()
        for request, lookup in list(self._lookups.items()):
            if lookup.expires is not None and now >= lookup.expires:
                del self._lookups[request]
                effects.append(Answer(lookup.waiter, self._unavailable()))
            elif lookup.resend.is_due(now):
                lookup.attempt += 1
                lookup.behind.clear()
                effects.append(self._ask(request, lookup, now))
        return effects

    def _ask(self, request: int, lookup: _Lookup, now: Instant) -> Effect:
        lookup.resend.sent(now)
        if lookup.expires is None:
            lookup.expires = Instant(now + self._timeout_s)
        nodes = self._placement.view.storage_nodes
        node = nodes[(request + lookup.attempt) % len(nodes)]
        return Send(node, lookup.question)

    def _unavailable(self) -> QuorumUnavailableError:
        return QuorumUnavailableError(
            f"No storage node answered within {self._timeout_s:g} s; try again."
        )

    def deadline(self) -> Instant | None:
        """When to ask again, or to fail a question; None: no question was sent."""
        due = (lookup.deadline() for lookup in self._lookups.values())
        return min((at for at in due if at is not None), default=None)

    def check_invariants(self) -> None:
        """Assert the limit, and that no question ended before it was sent."""
        assert len(self._lookups) <= self._lookups_max, "more questions than allowed"
        assert self._lookups.keys() >= set(self._starting), "a question ends after it was sent"

    def abandon(self, error: IndilogError) -> list[Effect]:
        """Fail every question."""
        lookups = list(self._lookups.values())
        self._lookups.clear()
        self._starting.clear()
        return [Answer(lookup.waiter, error) for lookup in lookups]


def _answers(question: TimeLookup | PlacesLookup, message: TimeFound | PlacesFound) -> bool:
    """Whether a message is a possible answer to the question."""
    if isinstance(question, TimeLookup):
        return isinstance(message, TimeFound) and message.seqnum >= 0
    if not isinstance(message, PlacesFound) or bool(message.spans) != message.found:
        return False
    at = question.start
    for span in message.spans:
        if span.first != at or not at < span.end <= question.end or span.localid < 0:
            return False
        at = span.end
    return True
