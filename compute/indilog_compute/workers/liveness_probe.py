"""Detects a worker whose event loop is blocked by a function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from indilog.base.errors import IndilogError
from indilog.link.link_messages import Answer, Failed
from indilog.link.worker_messages import Ping
from indilog_compute.workers.process import WorkerProcess

_BEATS_MISSED: Final = 2
"""More than one, because a busy loop of this node may read one answer late, but not two."""


class LivenessProbe:
    """Pings a worker while calls run there.

    Args:
        silent_s: a worker that has not answered for about this many seconds is blocked.
        on_silent: called once when the worker is blocked.
        on_heard: called once when the worker answers again.
    """

    __slots__ = ("_beat_s", "_missed", "_on_heard", "_on_silent", "_open", "_timer", "_worker")

    def __init__(
        self,
        worker: WorkerProcess,
        *,
        silent_s: float,
        on_silent: Callable[[WorkerProcess], None],
        on_heard: Callable[[WorkerProcess], None],
    ) -> None:
        self._worker = worker
        self._beat_s = silent_s / _BEATS_MISSED
        self._on_silent = on_silent
        self._on_heard = on_heard
        self._timer: asyncio.TimerHandle | None = None
        self._open = False
        self._missed = 0

    def watch(self) -> None:
        """A call was sent there: probe the worker from now on, until it has none."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._probe)

    def stop(self) -> None:
        """Ask no more."""
        if self._timer is not None:
            self._timer.cancel()

    # --- inside

    def _probe(self) -> None:
        self._timer = None
        link = self._worker.link
        if link.is_lost or link.calls_open == 0:
            return
        if self._open:
            self._missed += 1
            if self._missed == _BEATS_MISSED:
                self._on_silent(self._worker)
        else:
            try:
                link.post(Ping(), self._on_answer)
                self._open = True
            except IndilogError:  # so much waits for it that it does not read
                self._missed += 1
        self.watch()

    def _on_answer(self, answer: Answer) -> None:
        if isinstance(answer, Failed):  # the worker is gone
            return
        was_silent = self._missed >= _BEATS_MISSED
        self._open, self._missed = False, 0
        if was_silent:
            self._on_heard(self._worker)
