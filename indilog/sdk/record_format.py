"""The frame of a library's records: two magic bytes, a version byte, and a MessagePack value.

Any program may append records with a library's tags, so a library ignores records without its magic
bytes. It refuses records of other versions, because two versions could otherwise derive different
states from one log. Most libraries, `LogMirror` and the invocation service frame their records with
a `RecordFormat`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, TypeVar

import msgspec

from indilog.base.errors import IndilogError

T = TypeVar("T")

_encode: Final = msgspec.msgpack.Encoder().encode


class RecordFormat:
    """The frame of one library's records.

    Args:
        magic: two bytes; the first is 0xB0, because no UTF-8 text begins with it.
        version: the version to write and read (1 to 255); other versions are refused.
        of: name of the library, for error messages.
        error: type of the error raised for records of another version.
        versions_read: earlier versions that are read, too. Fields that a later version added must
            have defaults.
    """

    __slots__ = ("_error", "_magic", "_of", "_prefix", "_prefixes", "_version")

    def __init__(
        self,
        magic: bytes,
        version: int,
        *,
        of: str,
        error: type[IndilogError],
        versions_read: Collection[int] = (),
    ) -> None:
        self._magic = magic
        self._version = version
        self._prefix = magic + bytes((version,))
        self._prefixes = (self._prefix, *(magic + bytes((v,)) for v in versions_read))
        self._of = of
        self._error = error

    def encoded(self, content: msgspec.Struct) -> bytes:
        """Return a record's data."""
        return self._prefix + _encode(content)

    def decoded(self, data: bytes, decode: Callable[[memoryview], T]) -> T | None:
        """Return a record's content; None: the record does not have this format.

        Args:
            data: data of the record.
            decode: the `decode` method of a MessagePack decoder.

        Raises:
            IndilogError: (of type `error`) another version wrote the record.
        """
        if not data.startswith(self._prefixes):
            if data.startswith(self._magic) and len(data) > 2:
                raise self._error(
                    f"A record of {self._of} has format {data[2]}; this program reads format "
                    f"{self._version} only; {self._advice(data[2])}."
                )
            return None
        try:
            return decode(memoryview(data)[len(self._prefix) :])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _advice(self, version: int) -> str:
        return "upgrade it" if version > self._version else "use the older program, or a new log"
