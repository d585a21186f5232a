"""Converts a function's arguments from JSON and its result to JSON, by its type hints.

No pickle: arguments and results are JSON (bytes as base64). pydantic checks them; types are plain
Python types, dataclasses, pydantic models and msgspec structs. A `Function` has a `Signature`.
Libraries use `ResultType` for the results of steps.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NotRequired

import msgspec
import pydantic
import pydantic_core
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from indilog.base.errors import FunctionFailedError, InvalidArgumentsError

_CONFIG: Final = pydantic.ConfigDict(
    extra="forbid", ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants"
)
_RESULT_START: Final = b'{"r":'
_RESULT_END: Final = b"}"
_ERRORS_SHOWN_MAX: Final = 20
_EXPECTED: Final = re.compile(r"Expected `([^`]+)`")
_NO_JSON: Final = re.compile(
    r"Encoding objects of type ([\w.]+) is unsupported|unknown type: <class '([^']+)'>"
)
_SENTENCES: Final = {"missing": "is missing", "extra_forbidden": "is not a parameter"}


class _NoNumberError(ValueError):
    """A value to be written as JSON contains NaN or Infinity."""


class Signature:
    """The parameters and the result of one function.

    Attributes:
        takes_context: whether the first parameter is the platform's `Context`.
        arguments_schema: JSON schema of the object with the arguments.
        result_schema: JSON schema of the result.

    Raises:
        TypeError: the hints cannot be used; one sentence that names the parameter.
    """

    def __init__(self, name: str, body: Callable[..., Any], context: type) -> None:
        self._name = name
        hints = _hints(name, body)
        parameters = list(inspect.signature(body).parameters.values())
        self.takes_context = _takes_context(name, parameters, hints, context)
        fields = {
            p.name: _field(name, p, hints) for p in parameters[1 if self.takes_context else 0 :]
        }
        self._arguments = _arguments_adapter(name, fields)
        self._result = ResultType(name, hints.get("return", Any))
        try:
            self.arguments_schema = self._arguments.json_schema()
            self.result_schema = self._result.schema()
        except pydantic.PydanticUserError as error:
            raise TypeError(f"{name} has a type without a JSON schema: {_line(error)}") from error
        self.arguments_schema["title"] = name

    def arguments(self, text: bytes) -> dict[str, Any]:
        """Return the keyword arguments in a JSON object, checked and converted.

        Raises:
            InvalidArgumentsError: the arguments do not fit; `errors` names each field.
        """
        try:
            checked: dict[str, Any] = self._arguments.validate_json(text or b"{}")
        except pydantic.ValidationError as error:
            raise _invalid(self._name, error) from None
        return checked

    def result_text(self, value: object) -> bytes:
        """Return a result as JSON text.

        Raises:
            FunctionFailedError: it does not fit the function's return type, or has no JSON form.
        """
        return self._result.text(value)

    def result(self, text: bytes) -> object:
        """Return the value that a result's JSON text encodes."""
        return self._result.value(text)


class ResultType:
    """A return type: converts values to JSON text and back.

    Args:
        name: name of the function or step that returns the value, for error messages.
        hint: the type; `Any` takes any JSON value.

    Raises:
        TypeError: the hint cannot be used.
    """

    def __init__(self, name: str, hint: Any) -> None:  # noqa: ANN401 - a type hint is anything
        self._name = name
        self._is_any = hint is Any
        self._model = _result_model(name, hint)

    def schema(self) -> dict[str, Any]:
        """Return its JSON schema."""
        return _result_schema(self._model)

    def text(self, value: object) -> bytes:
        """Return a value as JSON text.

        Raises:
            FunctionFailedError: the value does not fit the type, or has no JSON form.
        """
        try:
            if self._is_any:
                return _json(value)
            wrapped = self._model.model_construct(r=value)
            text = self._model.__pydantic_serializer__.to_json(wrapped, warnings="error")
            _check_numbers(text)
        except _NoNumberError as error:
            raise FunctionFailedError(
                f"{self._name} returned a value without a JSON form: {error}.", kind="ValueError"
            ) from error
        except (pydantic_core.PydanticSerializationError, ValueError, TypeError) as error:
            does_not_fit = "has no JSON form" if self._is_any else "does not fit its return type"
            raise FunctionFailedError(
                f"{self._name} returned a value of type {type(value).__name__} that "
                f"{does_not_fit}: {_why(error)}",
                kind="TypeError",
            ) from error
        return text[len(_RESULT_START) : -len(_RESULT_END)]

    def value(self, text: bytes) -> object:
        """Return the value that JSON text encodes."""
        wrapped = self._model.model_validate_json(_RESULT_START + text + _RESULT_END)
        value: object = getattr(wrapped, "r")  # noqa: B009 - made at run time
        return value


def arguments_text(arguments: Mapping[str, Any]) -> bytes:
    """Return keyword arguments as the JSON object that a function is called with.

    Raises:
        InvalidArgumentsError: one of them has no JSON form.
    """
    try:
        return _json(arguments)
    except (pydantic_core.PydanticSerializationError, TypeError, ValueError) as error:
        raise InvalidArgumentsError(f"An argument has no JSON form: {_why(error)}") from error


def _json(value: object) -> bytes:
    text = pydantic_core.to_json(
        value, bytes_mode="base64", inf_nan_mode="constants", fallback=msgspec.to_builtins
    )
    _check_numbers(text)
    return text


def _check_numbers(text: bytes) -> None:
    """Refuse NaN and infinite numbers, which would otherwise silently become null.

    Raises:
        ValueError: there is one.
    """
    if b"NaN" not in text and b"Infinity" not in text:
        return  # these words may be inside strings, so a parser decides
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise _NoNumberError("NaN and Infinity have no JSON form; give None or a text") from None


def plain_value(text: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return JSON text as plain Python values."""
    return pydantic_core.from_json(text)


def _hints(name: str, body: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(body, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise TypeError(f"{name} has a type hint that cannot be resolved: {error}.") from error


def _takes_context(
    name: str, parameters: list[inspect.Parameter], hints: dict[str, Any], context: type
) -> bool:
    for index, parameter in enumerate(parameters):
        if parameter.name == "ctx" or hints.get(parameter.name) is context:
            if index > 0:
                raise TypeError(f"{name} takes the context as {parameter.name!r}; put it first.")
            return True
    return False


def _field(name: str, parameter: inspect.Parameter, hints: dict[str, Any]) -> Any:  # noqa: ANN401
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if parameter.kind not in named:
        raise TypeError(f"{name} takes {str(parameter)!r}; give every parameter a name of its own.")
    hint = _pydantic_type(hints.get(parameter.name, Any))
    if parameter.default is inspect.Parameter.empty:
        return hint
    return NotRequired[hint]


def _arguments_adapter(name: str, fields: dict[str, Any]) -> TypeAdapter[Any]:
    make: Any = TypedDict  # a type checker cannot know fields made at run time
    typed = make("Arguments", fields)
    typed.__pydantic_config__ = _CONFIG
    try:
        return TypeAdapter(typed)
    except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation) as error:
        raise TypeError(f"{name} has a parameter of an unknown kind: {_line(error)}") from error


def _result_model(name: str, hint: Any) -> type[pydantic.BaseModel]:  # noqa: ANN401
    """Return a model with the result as its only field `r`.

    pydantic takes no configuration for a dataclass alone, but uses the configuration of the model
    around it.
    """
    kind = _pydantic_type(type(None) if hint is None else hint)
    config = pydantic.ConfigDict(**{**_CONFIG, "extra": "ignore"})
    try:
        return pydantic.create_model("Result", r=(kind, ...), __config__=config)
    except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation) as error:
        raise TypeError(f"{name} returns an unknown kind: {_line(error)}") from error


def _result_schema(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(mode="serialization")
    result: dict[str, Any] = schema["properties"]["r"]
    return result | ({"$defs": schema["$defs"]} if "$defs" in schema else {})


def _pydantic_type(hint: Any) -> Any:  # noqa: ANN401
    """Return `hint` with each msgspec struct replaced by a type that pydantic accepts."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct_type(hint)
    inner = typing.get_args(hint)
    changed = tuple(_pydantic_type(kind) for kind in inner)
    if changed == inner:
        return hint
    if isinstance(hint, types.UnionType):
        return typing.Union[changed]  # noqa: UP007 - of kinds known only now
    return hint.copy_with(changed) if hasattr(hint, "copy_with") else hint.__origin__[changed]


def _struct_type(struct: type[msgspec.Struct]) -> Any:  # noqa: ANN401
    _, components = msgspec.json.schema_components([struct])
    schema = components.get(struct.__name__, {})
    if "$ref" in str(schema):  # a schema of several parts; pydantic cannot be given the others
        schema = {"type": "object", "title": struct.__name__}
    return Annotated[
        struct,
        pydantic.PlainValidator(lambda value: msgspec.convert(value, struct)),
        pydantic.PlainSerializer(msgspec.to_builtins),
        pydantic.WithJsonSchema(schema),
    ]


def _invalid(name: str, error: pydantic.ValidationError) -> InvalidArgumentsError:
    faults = [
        {"field": ".".join(map(str, fault["loc"])) or "body", "problem": _problem(fault)}
        for fault in error.errors(include_url=False, include_context=False, include_input=False)
    ][:_ERRORS_SHOWN_MAX]
    said = "; ".join(f"field '{fault['field']}' {fault['problem']}" for fault in faults[:3])
    return InvalidArgumentsError(f"{name} was not run: {said}.", faults)


def _problem(fault: Mapping[str, Any]) -> str:
    if (sentence := _SENTENCES.get(fault["type"])) is not None:
        return sentence
    message = str(fault["msg"]).rstrip(".")
    return "does not fit: " + message[:1].lower() + message[1:]


def _why(error: Exception) -> str:
    """Return why a value has no JSON form, as the end of a sentence."""
    if expected := _EXPECTED.search(str(error)):
        return f"a `{expected[1]}` is expected."
    if kind := _NO_JSON.search(str(error)):
        return (
            f"`{kind[1] or kind[2]}` is no plain value, dataclass, pydantic model or msgspec "
            "struct."
        )
    return _line(error)


def _line(error: Exception) -> str:
    """Return the first line of an error's message, as the end of a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:") + "."
