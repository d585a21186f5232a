"""Converts objects to values of Python types and back: dataclasses, pydantic models, TypedDicts,
msgspec Structs (API.md, "BokiStore"). `Store`, `Transaction` and `Obj` call it.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
import pydantic

from bokistore.document import Document, Json, check_whole
from bokistore.errors import InvalidObjectError, ObjectTypeError

_TypedT = TypeVar("_TypedT")
_ADAPTERS_MAX: Final = 256


@lru_cache(maxsize=_ADAPTERS_MAX)
def _adapter_of(kind: Hashable) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)  # type: ignore[arg-type]


def as_type(name: str, document: Document | None, kind: type[_TypedT]) -> _TypedT:
    """Return a document as a value of type `kind`.

    Raises:
        ObjectTypeError: there is no document, or it does not fit the type.
    """
    label = getattr(kind, "__name__", str(kind))
    if document is None:
        raise ObjectTypeError(name, label, "it does not exist")
    try:
        if issubclass(kind, msgspec.Struct):
            return msgspec.convert(document, kind)
        validated: _TypedT = _adapter_of(kind).validate_python(document)  # type: ignore[arg-type]
    except msgspec.ValidationError as error:
        raise ObjectTypeError(name, label, str(error)) from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ObjectTypeError(name, label, f"{where}: {first['msg']}") from error
    return validated


def as_document(value: object) -> Document:
    """Return a dict, dataclass, pydantic model or msgspec Struct as a JSON object.

    Raises:
        InvalidObjectError: the value has another type, or has no form in JSON.
    """
    if isinstance(value, pydantic.BaseModel):
        document: Json = value.model_dump(mode="json")
    else:
        try:
            document = msgspec.to_builtins(value)
        except TypeError as error:
            raise InvalidObjectError(f"This value cannot be an object: {error}.") from error
    if not isinstance(document, dict):
        raise InvalidObjectError(
            f"An object must be a JSON object, a dataclass or a model, not {type(value).__name__}."
        )
    check_whole(document)
    return document
