"""Questions to the primary about the tail of the log (ARCHITECTURE 9.4).

Two operations need the tail: `tail()`, and a `fresh` read, which must see every record that was
acknowledged before the read began. An answer serves an operation only if the question was sent
after the operation began. One question is in flight at a time; operations that begin meanwhile
share the next question. So a loaded node asks no more often than the primary answers, and an idle
node asks at once. `Reads` calls `TailQuestions` and sends its questions.
"""

from __future__ import annotations

from indilog.base.ids import Instant
from indilog.base.resend import Resend
from indilog_compute.reads.operation import Operation


class TailQuestions:
    """The operations that wait for the primary's answer; a lost question is resent."""

    __slots__ = ("_asked", "_request", "_resend", "_waiting")

    def __init__(self, resend: Resend) -> None:
        self._resend = resend
        self._waiting: list[Operation] = []
        """Operations that began after the question in flight was sent."""
        self._asked: list[Operation] = []
        self._request = -1

    def __len__(self) -> int:
        return len(self._waiting) + len(self._asked)

    def add(self, operation: Operation) -> None:
        """Let an operation wait for the answer to the next question."""
        self._waiting.append(operation)

    def is_due(self, now: Instant) -> bool:
        """Whether to send a new question now, or to resend the one in flight."""
        if self._asked:
            return self._resend.is_due(now)
        return bool(self._waiting)

    def asked(self, request: int, now: Instant) -> int:
        """Note that a question is sent; return its number.

        A new question has the number `request`. A question in flight is resent with its own number.
        An answer to a resent question serves only the operations that began before the question was
        first sent, because the answer may be older than later operations.
        """
        assert self._asked or self._waiting, "an operation waits for the answer"
        if not self._asked:
            assert request > self._request, "requests are numbered upwards"
            self._resend.stop()
            self._asked, self._waiting, self._request = self._waiting, [], request
        self._resend.sent(now)
        return self._request

    def make_due(self, now: Instant) -> None:
        """Make the question in flight due again, because another node is the primary."""
        self._resend.make_due(now)

    def take_answered(self, request: int) -> list[Operation]:
        """Remove and return the operations that the answer to `request` serves. The answer to an
        earlier question serves no operation.
        """
        if request != self._request:
            return []
        served, self._asked = self._asked, []
        return served

    def take_expired(self, now: Instant, timeout_s: float) -> list[Operation]:
        """Remove and return the operations that have waited for `timeout_s`."""
        oldest = self._asked or self._waiting
        if not oldest or oldest[0].created + timeout_s > now:
            return []
        expired = [o for o in self._asked + self._waiting if o.created + timeout_s <= now]
        removed = set(expired)
        self._asked = [o for o in self._asked if o not in removed]
        self._waiting = [o for o in self._waiting if o not in removed]
        return expired

    def clear(self) -> list[Operation]:
        """Remove and return all operations."""
        waiting = self._asked + self._waiting
        self._asked, self._waiting = [], []
        return waiting

    def deadline(self, timeout_s: float) -> Instant | None:
        """When to send or resend a question, or when an operation has waited for `timeout_s`; None:
        no operation waits.
        """
        if not self._asked:  # the operations of the question in flight may have just expired
            return self._waiting[0].created if self._waiting else None
        expires = Instant(self._asked[0].created + timeout_s)
        return min(self._resend.due or expires, expires)

    def check_invariants(self) -> None:
        """Assert that each operation waits for one question."""
        assert not set(self._asked) & set(self._waiting), "an operation waits for one question"
        assert not self._asked or self._resend.due is not None, "a question in flight is resent"
