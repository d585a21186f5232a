"""Arguments and results by type hints: valid values are converted, and errors name the invalid
field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pydantic
import pytest

from indilog.apps.app import Context
from indilog.apps.signature import Signature, arguments_text
from indilog.base.errors import FunctionFailedError, InvalidArgumentsError


@dataclasses.dataclass
class Order:
    """As a dataclass."""

    hotel: str
    nights: int = 1


class Guest(pydantic.BaseModel):
    """As a model of pydantic."""

    names: list[str]


class Place(msgspec.Struct):
    """As a struct of msgspec."""

    row: int


def of(body: Callable[..., Any]) -> Signature:
    return Signature("app.body", body, Context)


def test_dataclasses_models_structs_and_bytes_keep_their_types() -> None:
    async def book(
        ctx: Context, order: Order, guest: Guest, place: Place | None = None, key: bytes = b""
    ) -> Order:
        raise NotImplementedError

    given = of(book).arguments(
        b'{"order":{"hotel":"Ritz"},"guest":{"names":["ann"]},"place":{"row":3},"key":"AP8="}'
    )
    assert given == {
        "order": Order("Ritz", 1),
        "guest": Guest(names=["ann"]),
        "place": Place(3),
        "key": b"\x00\xff",
    }


def test_an_omitted_parameter_has_its_default() -> None:
    def body(n: int, m: int = 5) -> None: ...

    assert of(body).arguments(b'{"n": 1}') == {"n": 1}


def test_an_empty_body_means_no_arguments() -> None:
    def body() -> None: ...

    assert of(body).arguments(b"") == {}


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        (b"{}", "n", "is missing"),
        (b'{"n":1,"x":2}', "x", "is not a parameter"),
        (b'{"n":"many"}', "n", "does not fit: input should be a valid integer"),
        (b"[1]", "body", "does not fit: input should be an object"),
        (b"{", "body", "does not fit: invalid JSON"),
    ],
)
def test_errors_name_the_field_that_does_not_fit(text: bytes, field: str, problem: str) -> None:
    def body(n: int) -> None: ...

    with pytest.raises(InvalidArgumentsError) as caught:
        of(body).arguments(text)
    [fault] = caught.value.errors
    assert fault["field"] == field
    assert fault["problem"].startswith(problem)
    assert f"field '{field}'" in str(caught.value)


def test_a_parameter_may_be_named_like_a_method_of_pydantic() -> None:
    def body(copy: int, json: str, model_config: bool) -> None: ...

    assert of(body).arguments(b'{"copy":1,"json":"x","model_config":true}') == {
        "copy": 1,
        "json": "x",
        "model_config": True,
    }


def test_results_are_sent_as_json_and_decoded_as_the_return_type() -> None:
    def body() -> Order:
        raise NotImplementedError

    signature = of(body)
    assert signature.result_text(Order("Ritz", 2)) == b'{"hotel":"Ritz","nights":2}'
    assert signature.result(b'{"hotel":"Ritz","nights":2}') == Order("Ritz", 2)


def test_bytes_are_sent_as_base64_with_and_without_a_hint() -> None:
    def hinted() -> bytes:
        raise NotImplementedError

    def plain():  # type: ignore[no-untyped-def]  # noqa: ANN202
        raise NotImplementedError

    assert of(hinted).result(of(hinted).result_text(b"\xff\x00")) == b"\xff\x00"
    assert of(plain).result_text({"key": b"\xff\x00"}) == b'{"key":"_wA="}'


def test_a_result_that_does_not_fit_its_type_is_the_functions_failure() -> None:
    def body() -> int:
        raise NotImplementedError

    with pytest.raises(FunctionFailedError, match=r"a value of type str .* a `int` is expected"):
        of(body).result_text("many")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_lacks_is_refused_and_never_null(number: float) -> None:
    def hinted() -> list[float]:
        raise NotImplementedError

    def plain():  # type: ignore[no-untyped-def]  # noqa: ANN202 - as people write it
        raise NotImplementedError

    for body in (hinted, plain):
        with pytest.raises(FunctionFailedError, match=r"^app\.body returned .* NaN and Infinity"):
            of(body).result_text([1.0, number])
    with pytest.raises(InvalidArgumentsError, match="NaN and Infinity"):
        arguments_text({"n": number})


def test_a_text_may_contain_the_names_of_numbers_that_json_lacks() -> None:
    def body() -> str:
        raise NotImplementedError

    assert of(body).result_text("NaN, -Infinity") == b'"NaN, -Infinity"'


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ("n: int, ctx: Context", "put it first"),
        ("*args: int", "a name of its own"),
        ("**kw: int", "a name of its own"),
        ("n: int, /", "a name of its own"),
        ("n: Missing", "cannot be resolved"),
        ("n: object()", "has a"),
    ],
)
def test_unusable_hints_are_reported_in_one_sentence(parameters: str, sentence: str) -> None:
    scope: dict[str, Any] = {"Context": Context}
    exec(f"def body({parameters}) -> None: ...", scope) if "Missing" not in parameters else exec(
        f"from __future__ import annotations\ndef body({parameters}) -> None: ...", scope
    )
    with pytest.raises(TypeError, match=sentence):
        of(scope["body"])


def test_the_context_is_known_by_its_name_or_its_type() -> None:
    def named(ctx, n: int) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001

    def typed(context: Context, n: int) -> None: ...

    def neither(n: int) -> None: ...

    assert of(named).takes_context
    assert of(typed).takes_context
    assert not of(neither).takes_context


def test_arguments_without_a_json_form_are_refused_before_they_are_sent() -> None:
    with pytest.raises(InvalidArgumentsError, match="no JSON form"):
        arguments_text({"n": object()})


def test_a_result_without_a_json_form_is_named_in_plain_words() -> None:
    def plain():  # type: ignore[no-untyped-def]  # noqa: ANN202 - as people write it
        raise NotImplementedError

    reported = r"a value of type list that has no JSON form: `object` is no plain value"
    with pytest.raises(FunctionFailedError, match=reported):
        of(plain).result_text([object()])


def test_the_schemas_name_every_parameter_and_the_result() -> None:
    async def book(ctx: Context, order: Order, place: Place) -> list[Order]:
        raise NotImplementedError

    signature = of(book)
    assert signature.arguments_schema["required"] == ["order", "place"]
    assert signature.arguments_schema["properties"]["place"]["properties"] == {
        "row": {"type": "integer"}
    }
    assert signature.result_schema["type"] == "array"
    assert "Order" in signature.result_schema["$defs"]
