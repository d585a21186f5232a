"""Times as people write them on the command line: `10m`, `1h30m`, `2026-11-21T18:00`."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def seconds_of(text: str, now: float) -> float:
    """Return the seconds since 1970 that `text` means at `now`.

    Either how long ago, as numbers with the units s, m, h, d and w; or a date and time in ISO 8601,
    local if it names no zone.

    Raises:
        ValueError: it is neither.
    """
    parts = _PART.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return max(0.0, now - sum(float(number) * _UNITS_S[unit] for number, unit in parts))
    try:
        return max(0.0, datetime.fromisoformat(text).astimezone().timestamp())
    except (ValueError, OverflowError):
        raise ValueError(
            f"--since is how long ago (10m, 1h30m, 2d) or a time (2026-11-21T18:00), not {text!r}."
        ) from None
