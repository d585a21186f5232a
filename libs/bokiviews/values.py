"""Values of maps and lists, which are stored as MessagePack and read as a Python type.

`Map` and `List` encode and decode values by a `ValueType`.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec

from bokiviews.errors import InvalidValueError, ValueTypeError

ValueT = TypeVar("ValueT")

_encode: Final = msgspec.msgpack.Encoder(order="deterministic").encode


class ValueType(Generic[ValueT]):
    """The type of an object's values.

    Each read decodes the value again. So a caller may change a value that it has read, without
    changing a view.

    Args:
        type_: a type that `msgspec` knows: builtins, dataclasses, TypedDicts, Structs; `Any`.
    """

    def __init__(self, type_: Any) -> None:  # noqa: ANN401 - also unions, which are no `type`
        self._name = getattr(type_, "__name__", str(type_))
        self._decoder = msgspec.msgpack.Decoder(type_)

    def encode(self, value: ValueT) -> bytes:
        """Return the stored form of a value; equal forms mean equal values.

        Raises:
            InvalidValueError: the value has another type.
        """
        try:
            data = _encode(value)
            self._decoder.decode(data)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidValueError(
                f"{value!r:.64} cannot be stored as {self._name}: {error}."
            ) from error
        return data

    def decode(self, data: bytes) -> ValueT:
        """Return a stored value.

        Raises:
            ValueTypeError: it was stored with another type.
        """
        try:
            value: ValueT = self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueTypeError(f"A stored value is no {self._name}: {error}.") from error
        return value
