"""Sends conditional appends of this node's callers to the home of their tag, which executes them
(docs/decisions/0043).

The sender first asks for the home's incarnation, and addresses the request to this incarnation. If
a copy of the request arrives after a restart of the home, the home does not execute it. The home
remembers the newest requests of each sender (`ServedRequests`), so that it executes only one copy.

A home may leave the cluster. Appends that were not sent to this home, or that it refused, are then
sent to the next home of their tags. All other appends can be answered only by the old home. If it
does not answer, their outcome is unknown.

`ConditionalAppends` calls `HomeRequests`, and restarts the appends that `follow` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    IndilogError,
    NotReadyError,
    OverloadedError,
    SealedError,
)
from indilog.base.ids import Epoch, Instant, NodeId, TagHash
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.link.link_messages import Failed, error_from
from indilog.roles.role import Answer, AnswerAppends, Effect, Ignore, Send
from indilog.wire.conditional_messages import (
    ConditionalAnswer,
    ConditionalAppend,
    HomeIs,
    HomeWanted,
)
from indilog_compute.conditional.home import Conditional
from indilog_compute.reads.operation import Answered


def home_of(homes: Sequence[NodeId], tag: TagHash) -> NodeId:
    """Return the home of a tag: the compute node of the tag's slot.

    `homes` are the compute nodes of all slots (`View.conditional_homes`). The tag's slot is the
    slot with the greatest hash of slot and tag (rendezvous hashing).
    """
    slots = range(len(homes))
    return homes[max(slots, key=lambda slot: xxh3_64_intdigest(b"engine-%d" % slot, tag))]


class Moved(NamedTuple):
    """An append that the old home cannot have executed, so the next home may get it."""

    append: Conditional
    waiter: object


class _AppendRequest:
    """One append that another node executes.

    Attributes:
        asked_until: the time from which on a refusal of the home is final. After an earlier
            refusal, the request begins anew.
        incarnation: the home's incarnation that may execute the append; None: the home has not
            answered `HomeWanted` yet.
    """

    __slots__ = (
        "append", "asked_until", "expires", "home", "incarnation", "number", "resend", "waiter",
    )  # fmt: skip

    def __init__(self, append: Conditional, home: NodeId, waiter: object, resend: Resend) -> None:
        self.append = append
        self.home = home
        self.waiter = waiter
        self.resend = resend
        self.number = 0
        self.asked_until = self.expires = Instant(0.0)
        self.incarnation: Epoch | None = None

    def message(self) -> HomeWanted | ConditionalAppend:
        """Return the message that waits for an answer."""
        if self.incarnation is None:
            return HomeWanted(self.number)
        log, after, records = self.append
        return ConditionalAppend(self.number, self.incarnation, log, after, tuple(records))


class HomeRequests:
    """The conditional appends of this node's callers that other nodes execute."""

    def __init__(self, config: NodeConfig) -> None:
        self._timeout_s = config.appends.append_timeout_s
        self._pending_max = config.appends.append_pending_max
        self._pending_bytes_max = config.appends.append_pending_bytes_max
        self._resend_s = config.messages.resend_s, config.messages.resend_s_max
        self._starting: list[_AppendRequest] = []
        self._requests: dict[int, _AppendRequest] = {}
        self._last_number = 0
        self._pending_bytes = 0

    def __len__(self) -> int:
        return len(self._starting) + len(self._requests)

    def number_from(self, request: int) -> None:
        """Number requests above `request`, so no answer to an earlier incarnation matches one."""
        self._last_number = request

    def start(self, append: Conditional, home: NodeId, waiter: object) -> None:
        """Accept an append.

        Raises:
            OverloadedError: too many appends, or too many bytes of them, are in flight.
        """
        if len(self) >= self._pending_max or self._pending_bytes >= self._pending_bytes_max:
            raise OverloadedError(
                f"{len(self):,} conditional appends ({self._pending_bytes:,} bytes) are in flight "
                "at other nodes; try again when some are done."
            )
        self._pending_bytes += append.size_bytes
        self._starting.append(_AppendRequest(append, home, waiter, Resend(*self._resend_s)))

    def begin(self, now: Instant) -> list[Effect]:
        """Ask the homes of new appends for their incarnations, resend requests, and fail appends
        that wait too long.
        """
        effects: list[Effect] = []
        for request in self._starting:
            self._number(request)
            request.asked_until = request.expires = Instant(now + self._timeout_s)
            effects.append(self._send(request, now))
        self._starting.clear()
        for request in list(self._requests.values()):
            if now >= request.expires:
                self._forget(request)
                effects.append(Answer(request.waiter, self._silent(request)))
            elif request.resend.is_due(now):
                effects.append(self._send(request, now))
        return effects

    def _number(self, request: _AppendRequest) -> None:
        """Give a request a new number, which no other message has."""
        self._last_number += 1
        request.number = self._last_number
        self._requests[request.number] = request

    def _send(self, request: _AppendRequest, now: Instant) -> Send:
        request.resend.sent(now)
        return Send(request.home, request.message())

    def _forget(self, request: _AppendRequest) -> None:
        del self._requests[request.number]
        self._pending_bytes -= request.append.size_bytes

    def _silent(self, request: _AppendRequest) -> IndilogError:
        which = f"Compute node {request.home}, which checks conditions on this tag,"
        if request.incarnation is None:
            return NotReadyError(f"{which} does not answer; nothing was appended.")
        return AppendOutcomeUnknownError(
            f"{which} did not answer in time; the records may or may not be in the log."
        )

    def on_home(
        self, sender: NodeId, message: HomeIs, incarnation: Epoch, now: Instant
    ) -> list[Effect]:
        """Send an append to `incarnation`, the incarnation of its home that has answered."""
        request = self._requests.get(message.request)
        if request is None or request.home != sender or request.incarnation is not None:
            return []
        request.incarnation = incarnation
        # The home may take up to the timeout to check, and again up to the timeout to append.
        request.expires = Instant(now + 2 * self._timeout_s)
        request.resend.stop()
        return [self._send(request, now)]

    def follow(self, homes: Sequence[NodeId], now: Instant) -> list[Moved]:
        """Remove and return the appends whose tag has a new home, and that the old home cannot have
        executed.

        Appends that were sent to the old home wait for `resend_s_max` longer at most, because the
        answer of the old home may be in flight.

        Args:
            homes: the compute node of each slot (`View.conditional_homes`).
            now: the time.
        """
        moved = [r for r in self._starting if r.home != home_of(homes, r.append.tag)]
        self._starting = [request for request in self._starting if request not in moved]
        self._pending_bytes -= sum(request.append.size_bytes for request in moved)
        for request in list(self._requests.values()):
            if request.home == home_of(homes, request.append.tag):
                continue
            if request.incarnation is None:
                self._forget(request)
                moved.append(request)
            else:
                soon = Instant(now + self._resend_s[1])
                request.expires = min(request.expires, soon)
        return [Moved(request.append, request.waiter) for request in moved]

    def on_answer(self, sender: NodeId, message: ConditionalAnswer, now: Instant) -> list[Effect]:
        """Answer the caller.

        If the home refused the append before `asked_until`, because it lost its shard, begin the
        request anew instead: `HomeWanted` is sent after a pause, unless `follow` removes the append
        first.
        """
        request = self._requests.get(message.request)
        if request is None:
            return []
        if request.home != sender or request.incarnation is None:
            return [Ignore(message, "an answer to an append that was not sent there")]
        if message.kind == SealedError.__name__ and now < request.asked_until:
            del self._requests[request.number]
            self._number(request)
            request.incarnation, request.expires = None, request.asked_until
            request.resend.stop()
            request.resend.sent(now)
            return []
        self._forget(request)
        if not message.kind:
            return [AnswerAppends([request.waiter], message.first, message.position)]
        error = error_from(Failed(message.kind, message.message, message.attributes))
        if message.position:
            return [Answer(request.waiter, Answered(error, message.position))]
        return [Answer(request.waiter, error)]

    def deadline(self) -> Instant | None:
        """When to resend a request or to fail an append; None: no request is in flight."""
        times = [min(r.resend.due or r.expires, r.expires) for r in self._requests.values()]
        return min(times, default=None)

    def abandon(self, error: IndilogError) -> list[Effect]:
        """Fail all appends: a sent append with an unknown outcome, an unsent one with `error`."""
        unknown = AppendOutcomeUnknownError(
            "The platform was closed before the append was acknowledged; the records may or may "
            "not be in the log."
        )
        waiting = [*self._starting, *self._requests.values()]
        self._starting.clear()
        self._requests.clear()
        self._pending_bytes = 0
        return [Answer(r.waiter, error if r.incarnation is None else unknown) for r in waiting]

    def check_invariants(self) -> None:
        """Assert that the sum of bytes is right."""
        waiting = [*self._starting, *self._requests.values()]
        assert sum(request.append.size_bytes for request in waiting) == self._pending_bytes
