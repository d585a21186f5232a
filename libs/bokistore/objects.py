"""Objects as callers see them: snapshots to read, and objects to write inside a transaction.

`Store` and `Snapshot` return `Obj`; `Transaction` returns `TxnObject`. The functions at the end
check their arguments and return writes (`bokistore.document`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self, TypeVar

import msgspec

from bokistore.document import (
    TAGS_KEY,
    Absent,
    AddToSet,
    AppendIf,
    Conditional,
    DecrementIf,
    DeleteValue,
    Document,
    Increment,
    Json,
    Merge,
    Path,
    Pop,
    Push,
    SetIf,
    SetValue,
    Write,
    check_value,
    check_whole,
    copy_value,
    encode,
    result_of,
    steps_of,
    value_at,
    without_tags,
)
from bokistore.errors import ConditionUnmetError, InvalidObjectError
from bokistore.records import ObjectView
from bokistore.types import as_type
from bokistore.value import ObjectDocument
from indilog.sdk import SeqNum

_TypedT = TypeVar("_TypedT")
_decode_write = msgspec.json.Decoder(Write).decode


class Obj(Mapping[str, Json]):
    """A snapshot of an object: a mapping whose keys may be paths, such as `obj["profile.name"]`.

    Changes to returned values do not change the store. `bool(obj)` tells whether the object exists.

    Attributes:
        name: the object's name.
        seqnum: seqnum of its last committed write; None if there was none.
    """

    def __init__(self, name: str, view: ObjectView) -> None:
        self.name = name
        self.seqnum: SeqNum | None = view.version
        self._view = view
        self._current = ObjectDocument(name, view.document)

    @property
    def _document(self) -> Document | None:
        return self._current.document

    @property
    def exists(self) -> bool:
        """Whether the object was written, and not deleted since."""
        return self._document is not None

    def to(self, kind: type[_TypedT]) -> _TypedT:
        """Return the object as a value of a type: a dataclass, a pydantic model, a TypedDict, a
        msgspec Struct.

        Raises:
            ObjectTypeError: the object does not exist, or does not fit the type.
        """
        return as_type(self.name, self.value if self.exists else None, kind)

    def convert(self, kind: type[_TypedT] | None) -> Self | _TypedT | None:
        """Return the snapshot itself. With `kind`, return the object as a value of that type, or
        None if it does not exist.

        Raises:
            ObjectTypeError: the object does not fit the type.
        """
        if kind is None:
            return self
        return self.to(kind) if self.exists else None

    @property
    def tags(self) -> tuple[str, ...]:
        """The object's tags, as its last `put` gave them."""
        return () if self._document is None else tuple(self._document.get(TAGS_KEY, ()))

    @property
    def view(self) -> ObjectView:
        """The view on which the snapshot is based."""
        return self._view

    @property
    def value(self) -> Document:
        """The whole object as plain JSON types; empty if it does not exist."""
        return self._shown

    @property
    def _shown(self) -> Document:
        return {} if self._document is None else without_tags(self._document)

    def at(self, path: Path) -> Json:
        """Return the value at a path.

        Raises:
            KeyError: there is no value.
        """
        value = self._value_at(path)
        if value is Absent.ABSENT:
            raise KeyError(path)
        return value

    def get(self, path: Path, default: Json = None) -> Json:
        """Return the value at a path, or `default`."""
        value = self._value_at(path)
        return default if value is Absent.ABSENT else value

    def _value_at(self, path: Path) -> Json | Absent:
        return value_at(self._shown if self.exists else None, steps_of(path))

    def __getitem__(self, path: Path) -> Json:
        return self.at(path)

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        return self._value_at(path) is not Absent.ABSENT

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown)

    def __len__(self) -> int:
        return len(self._shown)

    def __bool__(self) -> bool:
        return self.exists

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._shown if self.exists else None!r})"


class TxnObject(Obj):
    """An object inside a transaction. Reads of this transaction see its writes at once; all other
    readers see them when the transaction has committed.

    Each write returns the previous value at the path, None if there was none. Reads return copies,
    so changing them does not change the object. The object can still be read after the transaction.
    """

    def __init__(self, name: str, view: ObjectView, writes: list[msgspec.Raw]) -> None:
        super().__init__(name, view)
        self._writes = writes
        self._is_over = False
        for raw in writes:  # blind writes before the read
            self._apply(raw)

    @property
    def value(self) -> Document:
        """A copy of the whole object as plain JSON types; empty if it does not exist."""
        shown: Document = copy_value(self._shown)
        return shown

    def at(self, path: Path) -> Json:
        """Return a copy of the value at a path.

        Raises:
            KeyError: there is no value.
        """
        return copy_value(super().at(path))

    def get(self, path: Path, default: Json = None) -> Json:
        """Return a copy of the value at a path, or `default`."""
        value = self._value_at(path)
        return default if value is Absent.ABSENT else copy_value(value)

    def set(self, path: Path, value: Json) -> Json:
        """Set the value at `path`; missing objects along the path are created."""
        return self.write(set_at(path, value))

    def increment(self, path: Path, by: float = 1) -> int | float | None:
        """Add `by` to the number at `path`; a missing value counts as 0."""
        return self.write(increment_at(path, by))  # type: ignore[no-any-return]

    def push(self, path: Path, value: Json, *, limit: int | None = None) -> list[Json] | None:
        """Append `value` to the list at `path`; beyond `limit` elements the oldest is removed."""
        return self.write(push_at(path, value, limit))  # type: ignore[no-any-return]

    def add_to_set(self, path: Path, value: Json) -> list[Json] | None:
        """Add `value` to the list at `path`, unless the list contains it."""
        return self.write(add_to_set_at(path, value))  # type: ignore[no-any-return]

    def pop(self, path: Path) -> Json:
        """Remove the last element of the list at `path`, and return it."""
        return self.write(Pop(steps_of(path)))

    def merge(self, path: Path, patch: Document) -> Json:
        """Merge `patch` into the value at `path` (RFC 7396: null removes a key)."""
        return self.write(merge_at(path, patch))

    def delete(self, path: Path | None = None) -> Json:
        """Remove the value at `path`; without a path, the object itself."""
        return self.write(delete_at(path))

    def decrement_if(self, path: Path, by: float, at_least: float = 0) -> int | float | None:
        """Subtract `by` from the number at `path`, and return the new number; None: it would be
        less than `at_least`, so nothing was changed.
        """
        write = decrement_if_at(path, by, at_least)
        old = self._write_if(write, self.get(path))
        return None if old is Absent.ABSENT else (old or 0) - by

    def test_and_set(self, path: Path, expected: Json, value: Json) -> bool:
        """Set the value at `path` if it is `expected`; return whether it was set."""
        return self._write_if(set_if_at(path, expected, value), None) is not Absent.ABSENT

    def append_if(
        self, path: Path, value: Json, *, absent: bool = False, limit: int | None = None
    ) -> bool:
        """Append `value` to the list at `path` if the conditions hold (`Store.append_if`); return
        whether it was appended.
        """
        write = append_if_at(path, value, absent=absent, limit=limit)
        return self._write_if(write, None) is not Absent.ABSENT

    def _write_if(self, write: Conditional, old: Json) -> Json:
        """Apply a write, and return `old`; `ABSENT`: the write's condition does not hold."""
        try:
            self.write(write)
        except ConditionUnmetError:
            return Absent.ABSENT
        return old

    def view_now(self) -> ObjectView:
        """Return the view with the transaction's writes so far."""
        return self._view._replace(document=self._current.text())

    def close(self) -> None:
        """Refuse further writes, because the transaction's record is complete."""
        self._is_over = True

    def write(self, write: Write) -> Json:
        """Apply one write to this object, and buffer it for the transaction's record.

        Raises:
            RuntimeError: the transaction has ended.
        """
        if self._is_over:
            raise transaction_ended()
        old = result_of(self._document, write)
        raw = msgspec.Raw(encode(write))
        self._apply(raw)
        self._writes.append(raw)
        return old

    def _apply(self, raw: msgspec.Raw) -> None:
        # Decoded again, so that the document shares nothing with the caller's value.
        self._current.apply(_decode_write(raw), len(bytes(raw)))


def transaction_ended() -> RuntimeError:
    """Return the error for a use of a transaction after its end."""
    return RuntimeError("The transaction is over; start another with store.transaction().")


def set_at(path: Path, value: Json) -> SetValue:
    """Return the write that sets the value at `path`.

    Raises:
        InvalidObjectError: the path or value is invalid. The functions below raise it, too.
    """
    check_value(value)
    steps = steps_of(path)
    if not steps:
        check_whole(value)
    return SetValue(steps, value)


def increment_at(path: Path, by: float) -> Increment:
    """Return the write that adds `by` to the number at `path`."""
    if isinstance(by, bool) or not isinstance(by, int | float):
        raise InvalidObjectError(f"An increment must be a number, not {by!r:.40}.")
    check_value(by)
    return Increment(steps_of(path), by)


def push_at(path: Path, value: Json, limit: int | None) -> Push:
    """Return the write that adds `value` at the end of the list at `path`."""
    check_value(value)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidObjectError(f"A list's limit must be at least 1, not {limit!r:.40}.")
    return Push(steps_of(path), value, limit)


def add_to_set_at(path: Path, value: Json) -> AddToSet:
    """Return the write that adds `value` to the list at `path`, unless the list contains it."""
    check_value(value)
    return AddToSet(steps_of(path), value)


def merge_at(path: Path, patch: Document) -> Merge:
    """Return the write that merges `patch` into the value at `path`."""
    check_value(patch)
    if not isinstance(patch, dict):
        raise InvalidObjectError("A merge patch must be a JSON object; use set for other values.")
    steps = steps_of(path)
    if not steps:
        check_whole(patch)
    return Merge(steps, patch)


def delete_at(path: Path | None) -> DeleteValue:
    """Return the write that removes the value at `path`, or the whole object."""
    return DeleteValue(() if path is None else steps_of(path))


def decrement_if_at(path: Path, by: float, at_least: float) -> DecrementIf:
    """Return the write that subtracts `by` if at least `at_least` is left."""
    for number in (by, at_least):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise InvalidObjectError(f"A decrement must be a number, not {number!r:.40}.")
        check_value(number)
    return DecrementIf(steps_of(path), by, at_least)


def set_if_at(path: Path, expected: Json, value: Json) -> SetIf:
    """Return the write that sets the value at `path` if it is `expected`."""
    check_value(expected)
    check_value(value)
    steps = steps_of(path)
    if not steps:
        check_whole(value)
    return SetIf(steps, expected, value)


def append_if_at(path: Path, value: Json, *, absent: bool, limit: int | None) -> AppendIf:
    """Return the write that appends `value` to the list at `path` if the conditions hold."""
    if not absent and limit is None:
        raise InvalidObjectError("append_if needs a condition: absent=True or a limit.")
    push = push_at(path, value, limit)
    return AppendIf(push.path, value, bool(absent), limit)
