"""Decodes values of the metadata store, which are JSON, for the modules of
`indilog.runtime.cluster`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from indilog.base.errors import DataDirectoryError

_ValueT = TypeVar("_ValueT")


def decode_stored(value: bytes, kind: type[_ValueT], what: str) -> _ValueT:
    """Return a value that the metadata store keeps.

    Args:
        value: its JSON.
        kind: the type that this release stores.
        what: the subject of the error's sentence, in the singular.

    Raises:
        DataDirectoryError: another release wrote the value, in a form that this release does not
            know.
    """
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError as error:
        raise DataDirectoryError(
            f"{what} in the metadata store is not understood ({error}); was it written by another "
            "release? Use that one, or choose another directory."
        ) from error
