"""JSON documents, paths into them, and the writes that change them. A document is the state of an
object (thesis 2.3.3: "the state of an object is reconstructed by replaying the object's
sub-stream").

All functions are deterministic: the same writes in the same order give the same document, byte for
byte, in every process. A write that does not fit the document changes nothing. `ObjectDocument`
(`bokistore.value`) applies writes by this module.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, TypeAlias, TypeGuard, assert_never

import msgspec

from bokistore.errors import ConditionUnmetError, InvalidObjectError, MismatchError

Json: TypeAlias = Any
"""A JSON value: None, bool, int, float, str, list or dict with text keys."""

Path: TypeAlias = str | Sequence[str]
"""Names joined by dots, such as `profile.name`, or a list of names, which may contain dots. A
number names an element of a list. An empty path is the whole object.
"""

Steps: TypeAlias = tuple[str, ...]

TAGS_KEY: Final = "$tags"
"""The key of an object's tags (`bokistore.tags`); users' paths cannot contain it."""
STEPS_MAX: Final = 64
VALUE_DEPTH_MAX: Final = 64
_NUMBER_MAX: Final = 2**1023
"""Largest absolute value of a number, so that JSON readers of any language can read it as a
double.
"""


class Absent(enum.Enum):
    """No value; distinct from JSON's null."""

    ABSENT = enum.auto()


class SetValue(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    """Set the value at a path; missing objects along the path are created."""

    path: Steps
    value: Json


class Increment(msgspec.Struct, frozen=True, array_like=True, tag="increment"):
    """Add to the number at a path; a missing value counts as 0."""

    path: Steps
    by: int | float


class Push(msgspec.Struct, frozen=True, array_like=True, tag="push"):
    """Append a value to the list at a path; beyond `limit` the oldest elements are removed."""

    path: Steps
    value: Json
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None


class AddToSet(msgspec.Struct, frozen=True, array_like=True, tag="add_to_set"):
    """Append a value to the list at a path, unless the list contains the value."""

    path: Steps
    value: Json


class Pop(msgspec.Struct, frozen=True, array_like=True, tag="pop"):
    """Remove the last element of the list at a path, if there is one."""

    path: Steps


class Merge(msgspec.Struct, frozen=True, array_like=True, tag="merge"):
    """Merge a patch into the object at a path (RFC 7396): null removes a key. If the old value is
    not an object, the patch is merged into an empty object, which replaces the value.
    """

    path: Steps
    value: dict[str, Json]


class DeleteValue(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Remove the value at a path; with an empty path, the object itself."""

    path: Steps


class DecrementIf(msgspec.Struct, frozen=True, array_like=True, tag="decrement_if"):
    """Subtract from the number at a path, if the difference is at least `at_least`; a missing value
    counts as 0.
    """

    path: Steps
    by: int | float
    at_least: int | float


class SetIf(msgspec.Struct, frozen=True, array_like=True, tag="set_if"):
    """Set the value at a path, if the old value is the same JSON as `expected`; a missing value
    counts as null.
    """

    path: Steps
    expected: Json
    value: Json


class AppendIf(msgspec.Struct, frozen=True, array_like=True, tag="append_if"):
    """Append a value to the list at a path, if the list is shorter than `limit` (None: no limit).
    If `absent` is true, the list must not contain the value either.
    """

    path: Steps
    value: Json
    absent: bool
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None


Conditional: TypeAlias = DecrementIf | SetIf | AppendIf
"""Writes with a condition on the document as of the write's place in the log. If the condition does
not hold, the write has no effect.
"""
Write: TypeAlias = SetValue | Increment | Push | AddToSet | Pop | Merge | DeleteValue | Conditional
Document: TypeAlias = dict[str, Json]

_encoder = msgspec.json.Encoder()
_sorted_encoder = msgspec.json.Encoder(order="deterministic")


def encode(value: Json) -> bytes:
    """Return a valid JSON value as text."""
    return _encoder.encode(value)


def copy_value(value: Json) -> Json:
    """Return an equal JSON value that shares nothing with `value`."""
    return msgspec.json.decode(_encoder.encode(value)) if isinstance(value, dict | list) else value


def steps_of(path: Path) -> Steps:
    """Return the names on a path.

    Raises:
        InvalidObjectError: a name is empty or not text, or there are too many.
    """
    if isinstance(path, str):
        steps: Steps = tuple(path.split(".")) if path else ()
    else:
        steps = tuple(path)
    if not all(map(_is_step, steps)):
        raise InvalidObjectError(
            f"A path consists of names joined by dots, such as 'profile.name', not {path!r}."
        )
    if steps and steps[0] == TAGS_KEY:
        raise InvalidObjectError(f"{TAGS_KEY} is reserved; give tags with put(tags=[...]).")
    if len(steps) > STEPS_MAX:
        raise InvalidObjectError(
            f"A path has at most {STEPS_MAX} names; this one has {len(steps)}."
        )
    return steps


def check_whole(value: Json) -> None:
    """Refuse a whole object with a key that is reserved for the store.

    Raises:
        InvalidObjectError: the object has such a key.
    """
    if isinstance(value, dict) and TAGS_KEY in value:
        raise InvalidObjectError(f"{TAGS_KEY} is reserved; give tags with put(tags=[...]).")


def without_tags(document: Document) -> Document:
    """Return a document without the tags, as users see it."""
    if TAGS_KEY not in document:
        return document
    return {key: value for key, value in document.items() if key != TAGS_KEY}


def _is_step(step: object) -> bool:
    return isinstance(step, str) and bool(step)


def check_value(value: Json) -> None:
    """Raise for a value that JSON does not preserve.

    Raises:
        InvalidObjectError: the value is no JSON value, or has a key that is not text, an infinite
            or too large number, or too deep nesting.
    """
    level: list[Json] = [value]
    for _ in range(VALUE_DEPTH_MAX):
        if not level:
            return
        level = [child for item in level for child in _check_children(item)]
    if level:
        raise InvalidObjectError(f"A value may be nested at most {VALUE_DEPTH_MAX} levels deep.")


def _check_children(value: Json) -> Iterable[Json]:
    if value is None or isinstance(value, bool):
        return ()
    if isinstance(value, str):
        return () if value.isascii() else _check_text(value)
    if isinstance(value, int | float):
        return _check_number(value)
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise InvalidObjectError("The keys of an object must be text; write them as strings.")
        for key in value:
            _check_children(key)
        return value.values()
    raise InvalidObjectError(
        f"A value must be JSON: text, a number, true, false, null, a list or an object; "
        f"{type(value).__name__} is none of these."
    )


def _check_text(value: str) -> tuple[()]:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidObjectError("Text must be writable as UTF-8.") from error
    return ()


def _check_number(value: float) -> tuple[()]:
    if not _in_range(value):
        raise InvalidObjectError(
            f"A number must be finite and within ±2**1023; {value!r:.40} is not."
        )
    return ()


def _in_range(value: float) -> bool:
    return (isinstance(value, int) or math.isfinite(value)) and -_NUMBER_MAX <= value <= _NUMBER_MAX


def value_at(document: Document | None, steps: Steps) -> Json | Absent:
    """Return the value at a path, or `ABSENT`."""
    at: Json = Absent.ABSENT if document is None else document
    for step in steps:
        at = _child(at, step)
        if at is Absent.ABSENT:
            break
    return at


def result_of(document: Document | None, write: Write) -> Json:
    """Return the result of a write for its caller: the previous value at its path, or for a `Pop`
    the removed element. None: there was none. The result shares nothing with the document.
    """
    there = value_at(document, write.path)
    if isinstance(write, Pop):
        return copy_value(there[-1]) if isinstance(there, list) and there else None
    if isinstance(there, dict) and not write.path:
        there = without_tags(there)
    return None if there is Absent.ABSENT else copy_value(there)


def apply_write(document: Document | None, write: Write, *, name: str) -> Document | None:
    """Return the document after `write`. None stands for an object that does not exist.

    The write may change the given document in place, or return another one.

    Raises:
        MismatchError: the write does not fit; the document is as before.
        ConditionUnmetError: the write's condition does not hold; the document is as before.
    """
    if isinstance(write, DecrementIf | SetIf | AppendIf):
        _check_condition(document, write, name)
    if not write.path:
        return _replace_whole(document, write, name)
    if isinstance(write, DeleteValue):
        _delete(document, write.path)
        return document
    if isinstance(write, Pop):
        _pop(document, write, name)
        return document
    document = {} if document is None else document
    holder = _holder(document, write, name)
    _store(holder, write.path[-1], _value_after(_child(holder, write.path[-1]), write, name))
    return document


def _check_condition(document: Document | None, write: Conditional, name: str) -> None:
    """Raise for a condition that does not hold. A value of the wrong type for the write is no error
    here; applying the write then raises `MismatchError`.

    Raises:
        ConditionUnmetError: the condition does not hold.
    """
    there = value_at(document, write.path)
    match write:
        case SetIf(expected=expected):
            if isinstance(there, dict) and not write.path:
                there = without_tags(there)
            holds = is_same(None if there is Absent.ABSENT else there, expected)
        case DecrementIf(by=by, at_least=at_least):
            old = 0 if there is Absent.ABSENT else there
            fits = bool(write.path) and _is_number(old)  # a whole object is no number
            holds = not fits or old - by >= at_least
        case AppendIf(value=value, absent=absent, limit=limit):
            items = there if isinstance(there, list) else []
            holds = not (absent and _contains(items, value))
            holds = holds and (limit is None or len(items) < limit)
        case unreachable:
            assert_never(unreachable)
    if not holds:
        raise ConditionUnmetError(f"The condition of {write!r} of {name!r} does not hold.")


def is_same(one: Json, other: Json) -> bool:
    """Tell whether two values are the same JSON; unlike in Python, 1, 1.0 and true differ."""
    return _sorted_encoder.encode(one) == _sorted_encoder.encode(other)


def is_whole(write: Write) -> bool:
    """Tell whether `write` replaces or deletes the whole document."""
    if write.path:
        return False
    return isinstance(write, DeleteValue) or (
        isinstance(write, SetValue) and isinstance(write.value, dict)
    )


def _replace_whole(document: Document | None, write: Write, name: str) -> Document | None:
    """Apply a write to the whole object, which can be set, merged into, or deleted."""
    match write:
        case Merge(value=value):
            merged: Document = _merge_patch(document, value)
            return merged
        case SetValue(value=dict() as value) | SetIf(value=dict() as value):
            return value
        case DeleteValue():
            return None
        case SetValue(value=value) | SetIf(value=value):
            raise MismatchError(name, "", wanted="a JSON object", found=_kind(value))
        case Push() | AddToSet() | Pop() | AppendIf():
            raise MismatchError(name, "", wanted="a list", found="an object")
        case Increment() | DecrementIf():
            raise MismatchError(name, "", wanted="a number", found="an object")
        case unreachable:
            assert_never(unreachable)


def _value_after(
    old: Json, write: SetValue | Increment | Push | AddToSet | Merge | Conditional, name: str
) -> Json:
    """Return the value at the write's path after the write, whose condition holds."""
    match write:
        case SetValue(value=value) | SetIf(value=value):
            return value
        case Increment(by=by):
            return _sum(old, by, write, name)
        case DecrementIf(by=by):
            return _sum(old, -by, write, name)
        case Push(value=value) | AppendIf(value=value):
            items = _list(old, write, name)
            items.append(value)
            if isinstance(write, Push) and write.limit is not None:
                del items[: -write.limit]
            return items
        case AddToSet(value=value):
            items = _list(old, write, name)
            if not _contains(items, value):
                items.append(value)
            return items
        case Merge(value=value):
            return _merge_patch(old, value)
        case unreachable:
            assert_never(unreachable)


def _is_number(value: Json) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sum(old: Json, by: float, write: Write, name: str) -> int | float:
    if old is Absent.ABSENT:
        old = 0
    if not _is_number(old):
        raise _mismatch(name, write, wanted="a number", value=old)
    total = old + by
    if not _in_range(total):
        raise _mismatch(name, write, wanted="a number with room for more", value=old)
    return total


def _list(old: Json, write: Write, name: str) -> list[Json]:
    if old is Absent.ABSENT:
        return []
    if not isinstance(old, list):
        raise _mismatch(name, write, wanted="a list", value=old)
    return old


def _contains(items: list[Json], value: Json) -> bool:
    """Tell whether the same JSON is in the list; unlike in Python, 1, 1.0 and true differ."""
    if isinstance(value, str) or value is None:
        return value in items
    wanted = _sorted_encoder.encode(value)
    return any(item == value and _sorted_encoder.encode(item) == wanted for item in items)


def _holder(document: Document, write: Write, name: str) -> Document | list[Json]:
    """Return the object or list that contains the last step of the path; create missing objects.

    A path that reaches a missing object can always be completed: each further step creates an
    object. So a write that does not fit fails before the first object is created, and changes
    nothing.
    """
    at: Document | list[Json] = document
    for depth, step in enumerate(write.path):
        child = _child(at, step)
        if isinstance(at, list) and child is Absent.ABSENT:
            where = ".".join(write.path[: depth + 1])
            raise MismatchError(name, where, wanted="an element of the list", found="nothing")
        if depth == len(write.path) - 1:
            break
        if child is Absent.ABSENT:
            child = {}
            _store(at, step, child)
        if not isinstance(child, dict | list):
            where = ".".join(write.path[: depth + 1])
            raise MismatchError(name, where, wanted="an object or a list", found=_kind(child))
        at = child
    return at


def _merge_patch(old: Json, patch: Json) -> Json:
    """Return the value after a merge patch (RFC 7396, section 2)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_patch(merged.get(key), value)
    return merged


def _pop(document: Document | None, write: Pop, name: str) -> None:
    there = value_at(document, write.path)
    if there is not Absent.ABSENT and not isinstance(there, list):
        raise _mismatch(name, write, wanted="a list", value=there)
    if isinstance(there, list) and there:
        there.pop()


def _delete(document: Document | None, steps: Steps) -> None:
    holder, last = value_at(document, steps[:-1]), steps[-1]
    if _child(holder, last) is not Absent.ABSENT:
        del holder[int(last) if isinstance(holder, list) else last]  # type: ignore[union-attr]


def _child(at: Json, step: str) -> Json | Absent:
    if isinstance(at, dict):
        return at.get(step, Absent.ABSENT)
    if isinstance(at, list) and step.isascii() and step.isdecimal() and len(step) < 10:
        place = int(step)
        return at[place] if place < len(at) else Absent.ABSENT
    return Absent.ABSENT


def _store(holder: Document | list[Json], step: str, value: Json) -> None:
    if isinstance(holder, list):
        holder[int(step)] = value
    else:
        holder[step] = value


def _mismatch(name: str, write: Write, *, wanted: str, value: Json) -> MismatchError:
    return MismatchError(name, ".".join(write.path), wanted=wanted, found=_kind(value))


_KINDS: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (Absent, "nothing"),
    (type(None), "null"),
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "text"),
    (list, "a list"),
    (dict, "an object"),
)


def _kind(value: Json) -> str:
    """Return the JSON name of a value's type."""
    return next(name for kind, name in _KINDS if isinstance(value, kind))
