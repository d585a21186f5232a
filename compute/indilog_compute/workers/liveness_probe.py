"""Detects a worker whose event loop is blocked by a function. `CallRouter` has a `LivenessProbe`
for each worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from indilog.base.errors import IndilogError
from indilog.link.link_messages import Answer, Failed
from indilog.link.worker_messages import Ping
from indilog_compute.workers.process import Worker

_BEATS_MISSED: Final = 2
"""Number of probe intervals without an answer after which a worker counts as blocked. A single
interval does not suffice, because this node's own event loop may be late.
"""


class LivenessProbe:
    """Pings a worker while it has open calls; at most one ping is unanswered at a time.

    Args:
        silent_s: seconds without an answer after which a worker counts as blocked.
        on_silent: called once when the worker becomes blocked.
        on_recovered: called once when the worker answers again.
    """

    __slots__ = ("_beat_s", "_missed", "_on_recovered", "_on_silent", "_open", "_timer", "_worker")

    def __init__(
        self,
        worker: Worker,
        *,
        silent_s: float,
        on_silent: Callable[[Worker], None],
        on_recovered: Callable[[Worker], None],
    ) -> None:
        self._worker = worker
        self._beat_s = silent_s / _BEATS_MISSED
        self._on_silent = on_silent
        self._on_recovered = on_recovered
        self._timer: asyncio.TimerHandle | None = None
        self._open = False
        self._missed = 0

    def watch(self) -> None:
        """Probe the worker until it has no open calls. The caller calls `watch` after it has sent a
        call to the worker.
        """
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._probe)

    def stop(self) -> None:
        """Stop probing permanently."""
        if self._timer is not None:
            self._timer.cancel()

    # --- internal

    def _probe(self) -> None:
        self._timer = None
        link = self._worker.link
        if link.is_lost or link.calls_open == 0:
            return
        self.watch()  # before the callback, which may stop the probe
        if self._open or not self._ping():
            self._missed += 1
            if self._missed == _BEATS_MISSED:
                self._on_silent(self._worker)

    def _ping(self) -> bool:
        """Send a ping; False: the send buffer is full, so the worker does not read."""
        try:
            self._worker.link.post(Ping(), self._on_answer)
        except IndilogError:
            return False
        self._open = True
        return True

    def _on_answer(self, answer: Answer) -> None:
        if isinstance(answer, Failed):  # the worker is lost
            return
        was_silent = self._missed >= _BEATS_MISSED
        self._open, self._missed = False, 0
        if was_silent:
            self._on_recovered(self._worker)
