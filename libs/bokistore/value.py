"""The value of an object while writes are applied to it, and the limit of its size.

A write that would make an object larger than `OBJECT_BYTES_MAX` has no effect. The limit is part of
the format: every process must decide alike, so it is no setting. The index of a tag has no limit,
because a lookup must find all objects with the tag. `ObjectReplay`, `Store` and `Obj` use
`ObjectDocument`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bokistore.document import Document, Write, apply_write, encode
from bokistore.errors import (
    ConditionUnmetError,
    MismatchError,
    ObjectTooLargeError,
    StoreError,
)
from bokistore.tags import is_own

OBJECT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest object, in bytes of JSON."""
_GROWTH: Final = 4
"""A write of n bytes of JSON adds at most this multiple of n to an object: `1e15` becomes
`1000000000000000.0`.
"""
_GROWTH_BYTES: Final = 64
"""Bytes that a write may add beyond that: a sum has at most one digit more, or is a float."""

NO_EFFECT: Final[tuple[type[StoreError], ...]] = (
    MismatchError,
    ObjectTooLargeError,
    ConditionUnmetError,
)
"""The errors of a write that has no effect. Its caller gets the error; a replay continues."""

_decode = msgspec.json.decode


def may_be_too_large(text: bytes, size: int) -> bool:
    """Tell whether a write of `size` bytes may make an object of the JSON `text` too large."""
    return len(text) + _GROWTH * size + _GROWTH_BYTES > OBJECT_BYTES_MAX


class ObjectDocument:
    """An object's document, to which writes are applied in place.

    Attributes:
        document: the document; None if the object does not exist.
    """

    __slots__ = ("_bytes_most", "document", "name")

    def __init__(self, name: str, text: bytes | None) -> None:
        self.name = name
        self.document: Document | None = None if text is None else _decode(text)
        self._bytes_most = 0 if text is None else len(text)
        """Upper bound of the bytes of the document's JSON. So most writes need not encode it."""

    def text(self) -> bytes | None:
        """Return the document as JSON; None if the object does not exist."""
        return None if self.document is None else encode(self.document)

    def apply(self, write: Write, size: int) -> None:
        """Apply a write, whose JSON has at most `size` bytes.

        Raises:
            MismatchError: the write does not fit.
            ConditionUnmetError: the write's condition does not hold.
            ObjectTooLargeError: the object would be larger than the limit, and larger than before.
                After any error the document is as before.
        """
        most = self._bytes_most + _GROWTH * size + _GROWTH_BYTES
        if most <= OBJECT_BYTES_MAX or is_own(self.name):
            self.document = apply_write(self.document, write, name=self.name)
            self._bytes_most = most
            return
        before = self.text() or b""
        self.document = apply_write(self.document, write, name=self.name)
        after = len(self.text() or b"")
        if OBJECT_BYTES_MAX < after > len(before):
            self.document = _decode(before) if before else None
            self._bytes_most = len(before)
            raise ObjectTooLargeError(self.name, after, OBJECT_BYTES_MAX)
        self._bytes_most = after
