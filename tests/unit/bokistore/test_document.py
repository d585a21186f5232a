"""Writes on JSON documents: their effects, and mismatching writes, which change nothing."""

from __future__ import annotations

import msgspec
import pytest

from bokistore.document import (
    Absent,
    AddToSet,
    DeleteValue,
    Increment,
    Json,
    Push,
    SetValue,
    Write,
    apply_write,
    check_value,
    steps_of,
    value_at,
)
from bokistore.errors import InvalidObjectError, MismatchError


def after(document: Json, *writes: Write) -> Json:
    document = msgspec.json.decode(msgspec.json.encode(document))
    for write in writes:
        document = apply_write(document, write, name="o")
    return document


@pytest.mark.parametrize(
    ("document", "write", "expected"),
    [
        (None, SetValue(("a", "b"), 1), {"a": {"b": 1}}),
        ({"a": 1}, SetValue(("a",), [2]), {"a": [2]}),
        ({"a": [1, {"b": 2}]}, SetValue(("a", "1", "b"), 3), {"a": [1, {"b": 3}]}),
        ({"a": 1}, SetValue((), {"b": 2}), {"b": 2}),
        (None, Increment(("n",), 5), {"n": 5}),
        ({"n": 1}, Increment(("n",), -2.5), {"n": -1.5}),
        (None, Push(("l",), 1), {"l": [1]}),
        ({"l": [1, 2]}, Push(("l",), 3, 2), {"l": [2, 3]}),
        ({"l": [1, 2, 3, 4]}, Push(("l",), 5, 2), {"l": [4, 5]}),
        ({"l": [1]}, AddToSet(("l",), 1), {"l": [1]}),
        ({"l": [1]}, AddToSet(("l",), True), {"l": [1, True]}),
        ({"l": [1]}, AddToSet(("l",), 1.0), {"l": [1, 1.0]}),
        ({"l": [{"a": 1, "b": 2}]}, AddToSet(("l",), {"b": 2, "a": 1}), {"l": [{"a": 1, "b": 2}]}),
        ({"a": {"b": 1, "c": 2}}, DeleteValue(("a", "b")), {"a": {"c": 2}}),
        ({"a": {"b": {"c": 1}}}, DeleteValue(("a", "b")), {"a": {}}),
        ({"l": [1, 2, 3]}, DeleteValue(("l", "1")), {"l": [1, 3]}),
        ({"a": 1}, DeleteValue(("x", "y")), {"a": 1}),
        ({"a": 1}, DeleteValue(("a", "y")), {"a": 1}),
        (None, DeleteValue(("a",)), None),
        ({"a": 1}, DeleteValue(()), None),
    ],
)
def test_a_matching_write_takes_effect(document: Json, write: Write, expected: Json) -> None:
    changed = after(document, write)
    assert msgspec.json.encode(changed) == msgspec.json.encode(expected)


@pytest.mark.parametrize(
    ("document", "write", "sentence"),
    [
        ({"n": "x"}, Increment(("n",), 1), "a number at 'n' of 'o', not text"),
        ({"n": True}, Increment(("n",), 1), "not true or false"),
        ({"n": None}, Increment(("n",), 1), "not null"),
        ({"n": 1e308}, Increment(("n",), 1e308), "room for more"),
        ({"n": 2**1023}, Increment(("n",), 1), "room for more"),
        ({"a": 5}, Push(("a",), 1), "a list at 'a' of 'o', not a number"),
        ({"a": {}}, AddToSet(("a",), 1), "not an object"),
        ({"a": 5}, SetValue(("a", "b"), 1), "an object or a list at 'a' of 'o', not a number"),
        (
            {"a": [1]},
            SetValue(("a", "1"), 1),
            "an element of the list at 'a.1' of 'o', not nothing",
        ),
        ({"a": [1]}, SetValue(("a", "x", "y"), 1), "an element of the list at 'a.x'"),
        ({"a": [1]}, Push(("a", "-1"), 1), "an element of the list"),
        ({"a": 1}, SetValue((), [1]), "a JSON object as the whole of 'o', not a list"),
        ({"a": 1}, Push((), 1), "not an object"),
        ({"a": 1}, Increment((), 1), "not an object"),
    ],
)
def test_a_mismatching_write_names_the_reason_and_changes_nothing(
    document: Json, write: Write, sentence: str
) -> None:
    before = msgspec.json.encode(document)
    with pytest.raises(MismatchError, match=sentence):
        apply_write(document, write, name="o")
    assert msgspec.json.encode(document) == before


def test_found_distinguishes_null_from_an_absent_value() -> None:
    document = {"a": {"b": None}, "l": [10, [20]]}
    assert value_at(document, ("a", "b")) is None
    assert value_at(document, ("a", "c")) is Absent.ABSENT
    assert value_at(document, ("a", "b", "c")) is Absent.ABSENT
    assert value_at(None, ()) is Absent.ABSENT
    assert value_at(document, ("l", "1", "0")) == 20
    assert value_at(document, ("l", "2")) is Absent.ABSENT
    assert value_at(document, ("l", "²")) is Absent.ABSENT


def test_a_path_is_dotted_or_a_list() -> None:
    assert steps_of("a.b") == ("a", "b")
    assert steps_of(["a.b", "c"]) == ("a.b", "c")
    assert steps_of("") == steps_of([]) == ()


@pytest.mark.parametrize("path", [".", "a.", "a..b", ["a", ""], ["a", 1], "a" + ".a" * 64])
def test_a_bad_path_is_refused(path: Json) -> None:
    with pytest.raises(InvalidObjectError):
        steps_of(path)


@pytest.mark.parametrize(
    "value", [None, True, 0, -1.5, "ü", [], {}, [{"a": [None, ()]}], 2**1023, -(2**1000)]
)
def test_json_is_a_value(value: Json) -> None:
    check_value(value)


@pytest.mark.parametrize(
    "value",
    [b"x", {1}, object(), {1: 2}, [{"a": {None: 1}}], float("nan"), float("inf"), [2**1024],
     "\ud800", {"\ud800": 1}],
)  # fmt: skip
def test_values_without_a_json_form_are_refused(value: Json) -> None:
    with pytest.raises(InvalidObjectError):
        check_value(value)


def test_the_nesting_depth_of_a_value_is_limited() -> None:
    value: Json = []
    for _ in range(63):
        value = [value]
    check_value(value)
    with pytest.raises(InvalidObjectError, match="64 levels deep"):
        check_value([value])
