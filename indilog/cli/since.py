"""Parses times of the command line: `10m`, `1h30m`, `2026-11-21T18:00`.

`indilog log read --since` calls `seconds_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from indilog.cli.quantities import duration_s_in


def seconds_of(text: str, now: Callable[[], float]) -> float:
    """Return the time in `text` as seconds since 1970.

    `text` is a duration before `now` (numbers with the units s, m, h, d and w), or a date and time
    in ISO 8601. A time without a zone is local time.

    Raises:
        ValueError: the text is neither.
    """
    if (ago_s := duration_s_in(text)) is not None:
        return max(0.0, now() - ago_s)
    try:
        return max(0.0, datetime.fromisoformat(text).astimezone().timestamp())
    except (ValueError, OverflowError):
        raise ValueError(
            f"--since is how long ago (10m, 1h30m, 2d) or a time (2026-11-21T18:00), not {text!r}."
        ) from None
