"""A failure that people should know of, until it is over."""

from __future__ import annotations

from typing import Final

_TOLD_S: Final = 60.0
"""Seconds after which a failure that did not happen again counts as over."""


class RecentFailure:
    """Why the newest attempt of something failed."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0.0

    def note(self, text: str, now: float) -> None:
        """Note that an attempt failed. `now`: seconds of a clock that never goes back."""
        self._text, self._at = text, now

    def clear(self) -> None:
        """Note that an attempt succeeded."""
        self._text = ""

    def text(self, now: float) -> str:
        """Return why the newest attempt failed; empty: it did not, or it was long ago."""
        return self._text if now - self._at < _TOLD_S else ""
