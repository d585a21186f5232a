"""Chooses the reads of records that are also sent to a second replica (decision 0012).

A replica that is slow for a moment (a sync, a long page, a pause) would delay its readers. So a
read that takes longer than 99 of 100 recent reads is also sent to another replica; the first answer
wins. These second requests are *hedges*. Their share of all reads is bounded: if all replicas are
slow, more requests make them slower still (Dean and Barroso 2013, "The tail at scale").
`StorageQuestions` calls `Hedges`, and counts each attempt of a read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Final

from indilog.base.ids import Instant

_SAMPLES: Final = 512
"""The number of recent reads from which the delay is estimated."""
_SAMPLES_MIN: Final = 100
"""Smallest number of samples from which the 99th percentile is estimated."""
_SAMPLES_PER_ESTIMATE: Final = 32
_TOKENS_MAX: Final = 16.0
"""Largest number of hedges that may be sent at once after a time without hedges."""


class Hedges:
    """Keeps the attempts that may be hedged, in the order of sending, and the durations of recent
    attempts.

    Guarantee: at most the share `share_max` of all noted attempts were hedged.

    Attributes:
        delay_s: seconds after which an attempt is hedged: at first `delay_s_max`, then the 99th
            percentile of the last 512 attempts, but at least `delay_s_min`.
        hedged: number of attempts that were hedged.
    """

    __slots__ = (
        "_delay_s_min", "_estimated", "_share_max", "_tokens", "_tried", "_waiting", "delay_s",
        "hedged",
    )  # fmt: skip

    def __init__(self, *, share_max: float, delay_s_min: float, delay_s_max: float) -> None:
        self._share_max = share_max
        self._delay_s_min = delay_s_min
        self._waiting: deque[tuple[Instant, int]] = deque()
        self._tokens = 0.0
        self._tried: deque[float] = deque(maxlen=_SAMPLES)
        self._estimated = 0
        self.delay_s = delay_s_max
        self.hedged = 0

    def note_sent(self, request: int, now: Instant) -> None:
        """Note that an attempt was sent that a second replica could also answer."""
        if self._share_max > 0:
            self._tokens = min(self._tokens + self._share_max, _TOKENS_MAX)
            assert not self._waiting or self._waiting[-1][0] <= now, "attempts are noted in order"
            self._waiting.append((now, request))

    def note_duration(self, seconds: float) -> None:
        """Note how many seconds an attempt took."""
        self._tried.append(seconds)
        self._estimated += 1
        if self._estimated >= _SAMPLES_PER_ESTIMATE and len(self._tried) >= _SAMPLES_MIN:
            self._estimated = 0
            ordered = sorted(self._tried)
            assert ordered[0] >= 0, "no attempt takes negative time"
            self.delay_s = max(ordered[len(ordered) * 99 // 100], self._delay_s_min)

    def due(self, now: Instant, under_way: Container[int]) -> list[int]:
        """Remove and return the attempts to hedge now; `under_way` are the unanswered attempts."""
        found: list[int] = []
        self._drop_answered(under_way)
        while self._waiting and self._waiting[0][0] + self.delay_s <= now:
            _, request = self._waiting.popleft()
            if request in under_way and self._tokens >= 1:
                self._tokens -= 1
                assert self._tokens >= 0, "a hedge costs a whole token"
                self.hedged += 1
                found.append(request)
        return found

    def deadline(self, under_way: Container[int]) -> Instant | None:
        """When to hedge the oldest unanswered attempt; None: no attempt can be hedged."""
        self._drop_answered(under_way)
        if not self._waiting or self._tokens < 1:
            return None
        return Instant(self._waiting[0][0] + self.delay_s)

    def clear(self) -> None:
        """Forget all attempts."""
        self._waiting.clear()

    def _drop_answered(self, under_way: Container[int]) -> None:
        while self._waiting and self._waiting[0][1] not in under_way:
            self._waiting.popleft()
