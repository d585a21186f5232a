"""Computes the pauses before restarts of processes and services that have ended.

The worker pool, the services in workers, and the supervisor's `SupervisedProcess` use it.
"""

from __future__ import annotations


class RestartPauses:
    """Pauses before restarts. Each pause is twice the previous pause, until a run is stable.

    Args:
        min_s: the first pause, and the pause after a stable run; seconds.
        max_s: the longest pause; seconds.
        stable_s: a run that lasts longer than this is stable; seconds. None: `max_s`.
    """

    def __init__(self, min_s: float, max_s: float, *, stable_s: float | None = None) -> None:
        self._min_s = min_s
        self._max_s = max_s
        self._stable_s = max_s if stable_s is None else stable_s
        self._next_s = min_s

    def after(self, lived_s: float) -> float:
        """Return the pause, in seconds, after a run that lasted `lived_s`."""
        pause_s = self._min_s if lived_s > self._stable_s else self._next_s
        self._next_s = min(2 * pause_s, self._max_s)
        return pause_s
