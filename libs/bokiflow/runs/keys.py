"""Shortens idempotency keys of operations to the length that the receiver accepts.

`operations.calls` and `operations.transactions` pass such keys to the platform and to stores.
"""

from __future__ import annotations

from xxhash import xxh3_128_hexdigest


def short_key(key: str, bytes_max: int) -> str:
    """Return `key`, or its digest if it is longer than `bytes_max`."""
    text = key.encode()
    return key if len(text) <= bytes_max else xxh3_128_hexdigest(text)
