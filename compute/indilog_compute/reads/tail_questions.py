"""Where the log ends, asked of the primary: for `tail()`, and for reads that must see what anybody
was told is there (`fresh`, ARCHITECTURE 9.4).

An answer serves an operation only if it was asked for after the operation came. So one question is
under way at a time, and who comes meanwhile shares the next one: a loaded node asks no more often
than the primary answers, an idle one at once.
"""

from __future__ import annotations

from indilog.base.ids import Instant
from indilog.base.resend import Resend
from indilog_compute.reads.operation import Operation


class TailQuestions:
    """The operations that wait for the primary's word; a lost question is asked again."""

    __slots__ = ("_asked", "_request", "_resend", "_waiting")

    def __init__(self, resend: Resend) -> None:
        self._resend = resend
        self._waiting: list[Operation] = []
        """Those that came after the question under way was asked."""
        self._asked: list[Operation] = []
        self._request = -1

    def __len__(self) -> int:
        return len(self._waiting) + len(self._asked)

    def add(self, operation: Operation) -> None:
        """Let an operation wait for the answer to a question that is still to be asked."""
        self._waiting.append(operation)

    def is_due(self, now: Instant) -> bool:
        """Tell whether to ask now, for the first time or again."""
        if self._asked:
            return self._resend.is_due(now)
        return bool(self._waiting)

    def asked(self, request: int, now: Instant) -> int:
        """Take note that the question is under way; return its number.

        That is `request`, or that of the question under way, which is sent again as it was: the
        answer to any of its sendings serves those for whom it was asked first, and may be older
        than who came since.
        """
        if not self._asked:
            self._resend.progressed()
            self._asked, self._waiting, self._request = self._waiting, [], request
        self._resend.sent(now)
        return self._request

    def answered(self, request: int) -> list[Operation]:
        """Take out the operations that the answer serves; none: it is late, or repeated."""
        if request != self._request:
            return []
        served, self._asked = self._asked, []
        return served

    def expired(self, now: Instant, timeout_s: float) -> list[Operation]:
        """Take out the operations that have waited for `timeout_s`."""
        oldest = self._asked or self._waiting
        if not oldest or oldest[0].created + timeout_s > now:
            return []
        expired = [o for o in self._asked + self._waiting if o.created + timeout_s <= now]
        gone = set(expired)
        self._asked = [o for o in self._asked if o not in gone]
        self._waiting = [o for o in self._waiting if o not in gone]
        return expired

    def clear(self) -> list[Operation]:
        """Take out all operations."""
        waiting = self._asked + self._waiting
        self._asked, self._waiting = [], []
        return waiting

    def deadline(self, timeout_s: float) -> Instant | None:
        """When to ask, or to ask again, or when an operation has waited for `timeout_s`."""
        if not self._asked:  # those that had the question asked may just have failed
            return self._waiting[0].created if self._waiting else None
        expires = Instant(self._asked[0].created + timeout_s)
        return min(self._resend.due or expires, expires)
