"""What of a request does not fit, as sentences: fields that are not known, values that are no such
thing.

The framework's own words are for programmers of pydantic; a caller gets the field as they wrote
it, and what it may be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import pydantic
from fastapi import Request
from fastapi.routing import APIRoute

from indilog.base.errors import InvalidArgumentsError
from indilog_compute.gateway.clients import body_from

_Model = TypeVar("_Model", bound=pydantic.BaseModel)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
SMALL_BYTES_MAX: Final = 16 * 1024
"""Of a JSON body that holds a few settings; larger ones are decoded by `decoded_in` only."""
_FAULTS_MAX: Final = 20
_TOLD_MAX: Final = 3
_VALUE_CHARACTERS_MAX: Final = 40
_PROBLEMS: Final = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "int_parsing": "is an integer",
    "int_type": "is an integer",
    "int_from_float": "is an integer",
    "int_parsing_size": "is an integer of at most 64 bits",
    "float_parsing": "is a number",
    "float_type": "is a number",
    "finite_number": "is a finite number",
    "bool_parsing": "is 1 or 0",
    "bool_type": "is true or false",
    "string_type": "is text",
    "string_too_long": "is at most {max_length} characters",
    "list_type": "is a list",
    "dict_type": "is an object",
    "model_type": "is an object",
    "model_attributes_type": "is an object",
    "greater_than_equal": "is {ge} or greater",
    "less_than_equal": "is at most {le}",
    "literal_error": "is {expected}",
    "json_invalid": "is not JSON ({error})",
}
_NO_VALUE: Final = ("missing", "extra_forbidden", "json_invalid", "string_too_long")
"""Problems that say enough without the value."""


def known_query(request: Request) -> None:
    """Refuse a query with a field that the route does not have: it would be left out silently.

    Raises:
        InvalidArgumentsError: there is one; it names the field.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute), "it is a dependency of such routes only"
    known = [field.alias for field in route.dependant.query_params]
    for field in request.query_params:
        if field not in known:
            there_are = f"there are {', '.join(known)}" if known else "this request takes none"
            problem = f"is not known; {there_are}"
            sentence = f"Nothing was done: the query's field '{field}' {problem}."
            raise InvalidArgumentsError(sentence, [{"field": field, "problem": problem}])


async def body_of(request: Request, bytes_max: int) -> bytes:
    """Return a request's body, which has arrived whole.

    Raises:
        ClientLeftError: the connection ended before the body did.
        TooLargeError: the body has more than `bytes_max` bytes.
    """
    what = "The request's size in bytes"
    return await body_from(request.scope, request.receive, bytes_max, what=what)


def json_in(model: type[_Model], body: bytes, *, not_done: str) -> _Model:
    """Return what a JSON body says; its Content-Type was looked at before (`guard`).

    The sentence that refuses it begins with `not_done`: `Nothing was trimmed`.

    Raises:
        InvalidArgumentsError: it is not JSON, or no such thing; names the fields.
    """
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        faults = faults_in(error.errors(include_url=False))
        raise InvalidArgumentsError(f"{not_done}: {sentence_of(faults)}.", faults) from None


def decoded_in(shape: type[_Struct], model: type[_Model], body: bytes, *, not_done: str) -> _Struct:
    """Return what a JSON body of any size says, decoded in a time in proportion to its size.

    Decoding stops at the first fault. `model`, which says the same as `shape`, finds the words for
    it, in small bodies: collecting all faults of a large one takes seconds.

    Raises:
        InvalidArgumentsError: it is not JSON, or no such thing; names the field.
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if len(body) <= SMALL_BYTES_MAX:
            json_in(model, body, not_done=not_done)
        message, _, place = str(error).rstrip("`").partition(" - at `$.")
        fault = {"field": place or "body", "problem": f"does not fit: {message}"}
        raise InvalidArgumentsError(f"{not_done}: {sentence_of([fault])}.", [fault]) from None


def faults_in(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return what does not fit, one `{"field", "problem"}` each, of pydantic's errors."""
    return [{"field": _field(error["loc"]), "problem": _problem(error)} for error in errors][
        :_FAULTS_MAX
    ]


def sentence_of(faults: Sequence[Mapping[str, str]]) -> str:
    """Return the first faults as the end of a sentence, without its full stop."""
    return "; ".join(f"field '{f['field']}' {f['problem']}" for f in faults[:_TOLD_MAX])


def _field(place: Sequence[str | int]) -> str:
    """Return a place as a caller writes it: `records[1].tags[0]`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).removeprefix(".") or "body"


def _problem(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind == "tag":
        told = str(error["msg"])
    elif kind.startswith(("datetime_", "date_", "timezone_")):
        told = "is a time: ISO 8601 (2026-11-21T18:00Z), or seconds since 1970"
    elif kind in _PROBLEMS:
        told = _PROBLEMS[kind].format(**error.get("ctx", {}))
    else:
        message = str(error["msg"]).rstrip(".")
        told = "does not fit: " + message[:1].lower() + message[1:]
    return told if kind in _NO_VALUE else f"{told}, not {_shown(error.get('input'))}"


def _shown(value: object) -> str:
    """Return a value as JSON says it, cut short."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[:_VALUE_CHARACTERS_MAX] + "..."
