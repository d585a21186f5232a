"""Keys of operations, where others limit their length."""

from __future__ import annotations

from xxhash import xxh3_128_hexdigest


def short_key(key: str, bytes_max: int) -> str:
    """Return a key where only short ones fit: a long one is replaced by a digest of it."""
    text = key.encode()
    return key if len(text) <= bytes_max else xxh3_128_hexdigest(text)
