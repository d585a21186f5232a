"""Sizes of records, by docs/FORMATS.md."""

from __future__ import annotations

from typing import Final

BATCH_HEADER_BYTES: Final = 58


def retained_bytes(log: str, data: bytes, tags: tuple[str, ...]) -> int:
    """Return the bytes of a record that a retention policy counts: its data and its names."""
    return len(data) + len(log.encode()) + sum(2 + len(tag.encode()) for tag in tags)


def stored_bytes(log: str, data: bytes, tags: tuple[str, ...]) -> int:
    """Return the bytes of a record in its batch."""
    return retained_bytes(log, data, tags) + 8 * (1 + len(tags)) + 13
