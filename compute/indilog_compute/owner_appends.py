"""Requests between compute nodes to append through the owner of a log (decision 0096). This node
sends requests to owners, and serves the requests for logs that it owns.

A request is resent until it is answered. While the owner appends the content, it answers copies of
the request with `PENDING`. A request fails if the owner is silent for `cell_timeout_s`. It also
fails if the content is not appended within half of `append_timeout_s`: the other half is left to
claim the log.

A receiver executes a request at most once. After a request of a newer incarnation of a sender, it
ignores the requests of earlier incarnations. `LocalLogs` calls `OwnerAppends`; `Engine` drives it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from indilog.base.errors import (
    IndilogError,
    OverloadedError,
    QuorumUnavailableError,
    SealedError,
)
from indilog.base.ids import Epoch, Instant, NodeId
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.roles.role import Answer, Effect, Ignore, Received, Send
from indilog.wire.owner_messages import OwnerAnswer, OwnerAppend, OwnerOutcome
from indilog_compute.served_requests import ServedRequests


class ReceivedAppend(NamedTuple):
    """A request of another compute node to append a content to a log that this node owns."""

    sender: NodeId
    message: OwnerAppend


class _OwnerRequest:
    """A request of this node to the owner of a log."""

    __slots__ = ("ends", "expires", "message", "node", "resend", "waiter")

    def __init__(self, node: NodeId, message: OwnerAppend, waiter: object, resend: Resend) -> None:
        self.node = node
        self.message = message
        self.waiter = waiter
        self.resend = resend
        self.ends: Instant | None = None
        """When the request fails even if the owner answers `PENDING`; None: the request was not
        sent yet.
        """
        self.expires = Instant(0.0)
        """When the request fails if the owner stays silent."""

    def deadline(self) -> Instant:
        """When to resend or to fail the request."""
        return min(self.resend.due or self.expires, self.expires)


class OwnerAppends:
    """Sends up to `lookups_pending_max` requests of one compute node, and serves up to
    `cell_requests_max` requests of other nodes at once.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._asked_max = config.reads.lookups_pending_max
        self._served_max = config.cells.cell_requests_max
        self._resend_s = config.messages.resend_s, config.messages.resend_s_max
        self._silent_s = config.cells.cell_timeout_s
        self._slow_s = config.appends.append_timeout_s / 2
        self._asked: dict[int, _OwnerRequest] = {}
        self._starting: list[int] = []
        self._next_request = 0
        self._incarnations: dict[NodeId, Epoch] = {}
        self._served: dict[NodeId, ServedRequests[OwnerAnswer]] = defaultdict(ServedRequests)
        self._serving = 0
        self._taker: object | None = None
        self._received: list[ReceivedAppend] = []
        self._answers: list[Effect] = []

    def __len__(self) -> int:
        return len(self._asked) + len(self._answers)

    def number_from(self, request: int) -> None:
        """Number requests above `request`, so no answer to an earlier incarnation matches one."""
        self._next_request = request

    # --- appends through other nodes

    def send(self, node: NodeId, folder: str, owner: str, content: bytes, waiter: object) -> None:
        """Let `node`, which owns the log in `folder` in the tenure `owner`, append a content.

        The request is sent when the engine's iteration ends. The waiter gets the outcomes as bytes,
        or an error.

        Raises:
            OverloadedError: too many requests wait already.
        """
        if len(self._asked) >= self._asked_max:
            raise OverloadedError(f"{len(self._asked):,} appends of owners wait; try later.")
        self._next_request += 1
        message = OwnerAppend(self._next_request, folder, owner, content)
        self._asked[self._next_request] = _OwnerRequest(
            node, message, waiter, Resend(*self._resend_s)
        )
        self._starting.append(self._next_request)

    def _on_answer(self, sender: NodeId, message: OwnerAnswer, now: Instant) -> list[Effect]:
        if (asked := self._asked.get(message.request)) is None:
            return []
        if sender != asked.node:
            return [Ignore(message, "an answer of a node that was not asked to append")]
        if message.outcome is OwnerOutcome.PENDING:
            asked.expires = Instant(now + self._silent_s)
            return []
        del self._asked[message.request]
        if message.outcome is OwnerOutcome.DONE:
            return [Answer(asked.waiter, message.outcomes)]
        return [Answer(asked.waiter, SealedError(f"{sender} does not own the log."))]

    def advance(self, now: Instant) -> list[Effect]:
        """Send new requests and answers, resend unanswered requests, and fail expired ones."""
        effects, self._answers = self._answers, []
        for request in self._starting:
            if (asked := self._asked.get(request)) is not None:
                asked.ends = Instant(now + self._slow_s)
                asked.expires = Instant(now + self._silent_s)
                effects.append(self._send(asked, now))
        self._starting.clear()
        for request, asked in list(self._asked.items()):
            if asked.ends is not None and now >= min(asked.expires, asked.ends):
                del self._asked[request]
                error = QuorumUnavailableError(f"{asked.node}, which owns the log, is silent.")
                effects.append(Answer(asked.waiter, error))
            elif asked.resend.is_due(now):
                effects.append(self._send(asked, now))
        return effects

    @staticmethod
    def _send(asked: _OwnerRequest, now: Instant) -> Effect:
        asked.resend.sent(now)
        return Send(asked.node, asked.message)

    def deadline(self) -> Instant | None:
        """When to resend or to fail a request; None: no request was sent."""
        sent = (asked for asked in self._asked.values() if asked.ends is not None)
        return min((asked.deadline() for asked in sent), default=None)

    # --- appends for other nodes

    def take(self, waiter: object) -> list[ReceivedAppend]:
        """Return the requests that arrived. If there are none, the waiter gets a list with the next
        request. The caller answers each request by `answer`.
        """
        received, self._received = self._received, []
        self._taker = None if received else waiter
        return received

    def answer(self, received: ReceivedAppend, outcomes: bytes | None) -> None:
        """Answer a request when the engine's iteration ends.

        `outcomes` is None if the content was not appended, and is not appended later.
        """
        self._serving -= 1
        request = received.message.request
        if outcomes is None:
            answer = OwnerAnswer(request, OwnerOutcome.REFUSED)
        else:
            answer = OwnerAnswer(request, OwnerOutcome.DONE, outcomes)
        self._served[received.sender].end(answer)
        self._answers.append(Send(received.sender, answer))

    def on_message(self, event: Received, now: Instant) -> list[Effect]:
        """Handle a request or an answer of another compute node."""
        message, sender = event.message, event.sender
        if isinstance(message, OwnerAnswer):
            return self._on_answer(sender, message, now)
        assert isinstance(message, OwnerAppend), "there are two messages"
        if event.incarnation < self._incarnations.setdefault(sender, event.incarnation):
            return [Ignore(event, "an append of an earlier incarnation")]
        self._incarnations[sender] = event.incarnation
        return self._on_append(ReceivedAppend(sender, message))

    def _on_append(self, received: ReceivedAppend) -> list[Effect]:
        sender, request = received.sender, received.message.request
        served = self._served[sender]
        pending = OwnerAnswer(request, OwnerOutcome.PENDING)
        if self._serving >= self._served_max and not served.knows(request):
            return [Send(sender, pending)]  # not noted: a later copy may be accepted
        if not served.begin(request):
            return [Send(sender, served.answer(request) or pending)]
        self._serving += 1
        taker, self._taker = self._taker, None
        if taker is not None:
            return [Answer(taker, [received])]
        self._received.append(received)
        return []

    def abandon(self, error: IndilogError) -> list[Effect]:
        """Fail every request of this node, and the caller of `take` that waits for requests."""
        waiters = [asked.waiter for asked in self._asked.values()]
        waiters += [] if self._taker is None else [self._taker]
        self._asked.clear()
        self._starting.clear()
        self._taker = None
        return [Answer(waiter, error) for waiter in waiters]

    def check_invariants(self) -> None:
        """Assert the limits, and that no request ended before it was sent."""
        assert len(self._asked) <= self._asked_max, "more requests than allowed"
        assert self._asked.keys() >= set(self._starting), "a request ends after it was sent"
        assert len(self._received) <= self._serving <= self._served_max
