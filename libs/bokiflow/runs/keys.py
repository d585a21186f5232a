"""Idempotency keys of operations, and the names for whom outcomes of calls are held."""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_128_hexdigest

_SEPARATOR: Final = "\x1f"
"""Neither the name of a log nor the id of a run contains it."""


def short_key(key: str, bytes_max: int) -> str:
    """Return `key`, or its digest if it is longer than `bytes_max`."""
    text = key.encode()
    return key if len(text) <= bytes_max else xxh3_128_hexdigest(text)


def holder_of(log_name: str, run: str) -> str:
    """Return the name for which the outcomes of a run's calls are held. With an empty id, it is the
    prefix of these names.
    """
    return f"{log_name}{_SEPARATOR}{run}"
