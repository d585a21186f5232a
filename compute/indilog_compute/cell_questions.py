"""Questions of this compute node to storage nodes about write-once cells (decision 0085).

A question goes to one storage node, and is resent until the node answers or `cell_timeout_s` have
passed. A write that is not answered in this time has an unknown outcome. `indilog_cells` asks these
questions through `LocalLogs.ask_cells`, and begins no append while too many of the nodes have full
disks. `Engine` drives `CellQuestions`.
"""

from __future__ import annotations

import msgspec

from indilog.base.errors import IndilogError, OverloadedError, QuorumUnavailableError
from indilog.base.ids import Instant, NodeId
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.roles.role import Answer, Effect, Ignore, Send
from indilog.wire.cell_messages import CellAnswer, CellQuestion
from indilog_compute.full_disks import FullDisks


class _Asked:
    """One question of one caller."""

    __slots__ = ("expires", "node", "question", "resend", "waiter")

    def __init__(
        self, node: NodeId, question: CellQuestion, waiter: object, resend: Resend
    ) -> None:
        self.node = node
        self.question = question
        self.waiter = waiter
        self.resend = resend
        self.expires: Instant | None = None
        """When to fail the question; None: the question was not sent yet."""

    def deadline(self) -> Instant | None:
        """When to resend or to fail the question; None: the question was not sent yet."""
        if self.expires is None:
            return None
        return min(self.resend.due or self.expires, self.expires)


class CellQuestions:
    """The questions of one compute node that are in flight; at most `lookups_pending_max`.

    Attributes:
        full_disks: the notifications of nodes whose disks are full.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._asked_max = config.reads.lookups_pending_max
        self._resend_s = config.messages.resend_s, config.messages.resend_s_max
        self._timeout_s = config.cells.cell_timeout_s
        self._asked: dict[int, _Asked] = {}
        self._starting: list[int] = []
        self._next_request = 0
        self.full_disks = FullDisks()

    def __len__(self) -> int:
        return len(self._asked)

    def number_from(self, request: int) -> None:
        """Number questions above `request`, so no answer to an earlier incarnation matches one."""
        self._next_request = request

    def ask(self, node: NodeId, question: CellQuestion, waiter: object) -> None:
        """Send a question when the engine's iteration ends.

        The waiter gets the `CellAnswer`, or an error.

        Raises:
            OverloadedError: too many questions wait already.
        """
        if len(self._asked) >= self._asked_max:
            raise OverloadedError(f"{len(self._asked):,} questions about cells wait; try later.")
        self._next_request += 1
        numbered = msgspec.structs.replace(question, request=self._next_request)
        resend = Resend(*self._resend_s)
        self._asked[self._next_request] = _Asked(node, numbered, waiter, resend)
        self._starting.append(self._next_request)

    def on_answer(self, sender: NodeId, message: CellAnswer) -> list[Effect]:
        """Give a caller the answer of a storage node."""
        if (asked := self._asked.get(message.request)) is None:
            return []
        if sender != asked.node:
            return [Ignore(message, "an answer about cells of a node that was not asked")]
        del self._asked[message.request]
        return [Answer(asked.waiter, message)]

    def advance(self, now: Instant) -> list[Effect]:
        """Send new questions, resend unanswered ones, and fail expired ones."""
        self.full_disks.expire(now)
        effects: list[Effect] = []
        for request in self._starting:
            if (asked := self._asked.get(request)) is not None:
                asked.expires = Instant(now + self._timeout_s)
                effects.append(self._send(asked, now))
        self._starting.clear()
        for request, asked in list(self._asked.items()):
            if asked.expires is not None and now >= asked.expires:
                del self._asked[request]
                effects.append(Answer(asked.waiter, self._silent(asked.node)))
            elif asked.resend.is_due(now):
                effects.append(self._send(asked, now))
        return effects

    @staticmethod
    def _send(asked: _Asked, now: Instant) -> Effect:
        asked.resend.sent(now)
        return Send(asked.node, asked.question)

    def _silent(self, node: NodeId) -> QuorumUnavailableError:
        return QuorumUnavailableError(f"{node} did not answer within {self._timeout_s:g} s.")

    def deadline(self) -> Instant | None:
        """When to resend or fail a question, or to drop a disk-full notification; None: never."""
        due = [asked.deadline() for asked in self._asked.values()]
        due.append(self.full_disks.deadline())
        return min((at for at in due if at is not None), default=None)

    def check_invariants(self) -> None:
        """Assert the limit, and that no question ended before it was sent."""
        assert len(self._asked) <= self._asked_max, "more questions than allowed"
        assert self._asked.keys() >= set(self._starting), "a question ends after it was sent"

    def abandon(self, error: IndilogError) -> list[Effect]:
        """Fail every question."""
        asked = list(self._asked.values())
        self._asked.clear()
        self._starting.clear()
        return [Answer(each.waiter, error) for each in asked]
