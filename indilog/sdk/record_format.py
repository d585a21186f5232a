"""How a library frames what it keeps in records: two bytes that no text begins with, one byte for
the version of the format, and a value in MessagePack.

Anybody may append anything under a library's tags. What is not of the library is passed over; what
a later version of it wrote must not be, or two versions would fold one log to two states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from indilog.base.errors import IndilogError

T = TypeVar("T")

_encode: Final = msgspec.msgpack.Encoder().encode


class RecordFormat:
    """The frame of one library's records.

    Args:
        magic: its two bytes; the first is 0xB0, which begins no UTF-8 text.
        version: 1 to 255, the one that it writes and reads.
        of: whose records they are, for the error's message.
        error: what is raised on records of a later version.
    """

    __slots__ = ("_error", "_magic", "_of", "_prefix", "_version")

    def __init__(self, magic: bytes, version: int, *, of: str, error: type[IndilogError]) -> None:
        self._magic = magic
        self._version = version
        self._prefix = magic + bytes((version,))
        self._of = of
        self._error = error

    def encoded(self, content: msgspec.Struct) -> bytes:
        """Return a record's data."""
        return self._prefix + _encode(content)

    def decoded(self, data: bytes, decode: Callable[[memoryview], T]) -> T | None:
        """Return what `decode`, of a MessagePack decoder, reads in a record; None: nothing of this
        format.

        Raises:
            IndilogError: as `error`; a later version wrote it, so it must not be passed over.
        """
        if not data.startswith(self._prefix):
            if data.startswith(self._magic) and data[2:3] > self._prefix[2:]:
                raise self._error(
                    f"A record of {self._of} has format {data[2]}; this program reads up to "
                    f"{self._version}: run a later one."
                )
            return None
        try:
            return decode(memoryview(data)[len(self._prefix) :])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
