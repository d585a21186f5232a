"""How long to wait before something that ended is started again."""

from __future__ import annotations


class RestartPauses:
    """Pauses before restarts: each is twice the one before, until a run was stable.

    Args:
        min_s: the first pause, and the one after a stable run; seconds.
        max_s: the longest pause; seconds.
        stable_s: seconds above which a run was stable; None: `max_s`.
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
