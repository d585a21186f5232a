"""Validates requests, and describes unknown fields and wrong values in sentences.

pydantic's messages address the programmer of the model. Instead, a caller of the gateway gets the
name of the field as in the request, and the allowed values. The routes call these functions.
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
from indilog_compute.gateway.clients import read_body

_Model = TypeVar("_Model", bound=pydantic.BaseModel)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
SMALL_BYTES_MAX: Final = 16 * 1024
"""Bytes of the largest JSON body that pydantic may parse; only `decode_json` decodes a larger one.
"""
_FAULTS_MAX: Final = 20
_SENTENCE_FAULTS_MAX: Final = 3
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
"""Types of pydantic's errors; the sentence for these errors does not quote the value."""


def check_query(request: Request) -> None:
    """Refuse a query with an unknown field, which the framework would ignore.

    Raises:
        InvalidArgumentsError: a field is unknown; the message names it.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute), "only an APIRoute has this dependency"
    known = [field.alias for field in route.dependant.query_params]
    for field in request.query_params:
        if field not in known:
            there_are = f"the fields are {', '.join(known)}" if known else "this request takes none"
            problem = f"is not known; {there_are}"
            sentence = f"Nothing was done: the query's field '{field}' {problem}."
            raise InvalidArgumentsError(sentence, [{"field": field, "problem": problem}])


async def body_of(request: Request, bytes_max: int) -> bytes:
    """Read and return a request's complete body.

    Raises:
        ClientLeftError: the connection ended before the body was complete.
        TooLargeError: the body has more than `bytes_max` bytes.
    """
    what = "The request's size in bytes"
    return await read_body(request.scope, request.receive, bytes_max, what=what)


def parse_json(model: type[_Model], body: bytes, *, not_done: str) -> _Model:
    """Parse a small JSON body, whose Content-Type `guard` has checked. The error's sentence begins
    with `not_done`, such as `Nothing was trimmed`.

    Raises:
        InvalidArgumentsError: the body is not JSON, or does not fit the model; the message names
            the fields.
    """
    try:
        return model.model_validate_json(body)
    except pydantic.ValidationError as error:
        faults = faults_in(error.errors(include_url=False))
        raise InvalidArgumentsError(f"{not_done}: {sentence_of(faults)}.", faults) from None


def decode_json(
    shape: type[_Struct], model: type[_Model], body: bytes, *, not_done: str
) -> _Struct:
    """Decode a JSON body of any size, in a time proportional to its size.

    Decoding stops at the first fault. To describe all faults, a small body is then parsed again
    with `model`, which must be equivalent to `shape`. A large body is not parsed again, because
    that would take seconds.

    Raises:
        InvalidArgumentsError: the body is not JSON, or does not fit `shape`; the message names the
            field.
    """
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if len(body) <= SMALL_BYTES_MAX:
            parse_json(model, body, not_done=not_done)
        message, _, place = str(error).rstrip("`").partition(" - at `$.")
        fault = {"field": place or "body", "problem": f"does not fit: {message}"}
        raise InvalidArgumentsError(f"{not_done}: {sentence_of([fault])}.", [fault]) from None


def faults_in(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the first 20 of pydantic's errors as a list of `{"field", "problem"}`."""
    return [{"field": _field(error["loc"]), "problem": _problem(error)} for error in errors][
        :_FAULTS_MAX
    ]


def sentence_of(faults: Sequence[Mapping[str, str]]) -> str:
    """Return the first three faults as the end of a sentence, without its full stop."""
    return "; ".join(f"field '{f['field']}' {f['problem']}" for f in faults[:_SENTENCE_FAULTS_MAX])


def _field(place: Sequence[str | int]) -> str:
    """Return the path of a field as text, such as `records[1].tags[0]`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).removeprefix(".") or "body"


def _problem(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind == "tag":
        text = str(error["msg"])
    elif kind.startswith(("datetime_", "date_", "timezone_")):
        text = "is a time: ISO 8601 (2026-11-21T18:00Z), or seconds since 1970"
    elif kind in _PROBLEMS:
        text = _PROBLEMS[kind].format(**error.get("ctx", {}))
    else:
        message = str(error["msg"]).rstrip(".")
        text = "does not fit: " + message[:1].lower() + message[1:]
    return text if kind in _NO_VALUE else f"{text}, not {_shown(error.get('input'))}"


def _shown(value: object) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[:_VALUE_CHARACTERS_MAX] + "..."
