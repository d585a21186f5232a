"""Parses quantities of the command line: `7d`, `1h30m`, `10GiB`.

The commands `invocation`, `log` and `runs` use these functions.
"""

from __future__ import annotations

import re
from typing import Final

_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_NAMES: Final = (("day", 86_400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def duration_s_in(text: str) -> float | None:
    """Return the sum in seconds of numbers with the units s, m, h, d and w; None: another form."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def age_s_of(text: str) -> float:
    """Return the seconds of an age: `7d`.

    Raises:
        ValueError: the text is invalid, or the quantity is 0.
    """
    if not (seconds := duration_s_in(text)):
        raise ValueError(f"--age is how long to keep (90m, 7d, 1d12h), not {text!r}.")
    return seconds


def wait_s_of(text: str) -> float:
    """Return a waiting time in seconds: `30s`, `10m`, or a number of seconds.

    Raises:
        ValueError: the text is invalid.
    """
    if (seconds := duration_s_in(text)) is not None:
        return seconds
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"--wait is how long to wait (30s, 10m, 1h30m), not {text!r}.")
    return float(text)


def duration_text(seconds: float) -> str:
    """Return a duration in words: `30 days`, `1 hour 30 minutes`, `0.5 seconds`."""
    parts, left = [], seconds
    for name, unit_s in _NAMES:
        count = left // unit_s if unit_s > 1 else left
        left -= count * unit_s
        if count:
            parts.append(f"{count:,.10g} {name}{'' if count == 1 else 's'}")
    return " ".join(parts) or "0 seconds"


def size_bytes_of(text: str) -> int:
    """Return the bytes of a size: `10GiB` (of 1024), `10GB` (of 1000), `4096`.

    Raises:
        ValueError: the text is invalid, or the quantity is 0.
    """
    found = _SIZE.fullmatch(text)
    size = 0
    if found is not None and (found[2] or not found[3]):
        base = 1024 if found[3] else 1000
        size = int(float(found[1]) * base ** _POWERS[found[2].lower()])
    if size <= 0:
        raise ValueError(f"--size is how much to keep (500MB, 10GiB, 4096), not {text!r}.")
    return size
