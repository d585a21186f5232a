"""Lists of values.

`Views.list` returns a `List`, whose state is a `ListMachine`. Commands are records of the log, and
the machines of all processes apply them in log order (`bokiviews.machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Final, Generic, Self, TypeAlias, assert_never, overload

import msgspec

from bokiviews.machine import At, StateMachine
from bokiviews.objects import Joined, Part, ViewObject
from bokiviews.replica import ViewsReplica
from bokiviews.values import ValueT, ValueType
from indilog import Log


class Extend(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """Append values."""

    values: tuple[bytes, ...]


class SetItem(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    """Replace the value at an index; a negative index counts from the end."""

    index: int
    value: bytes


class PopItem(msgspec.Struct, frozen=True, array_like=True, tag="pop"):
    """Remove the value at an index; a negative index counts from the end."""

    index: int


class ClearList(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Remove all values."""


ListCommand: TypeAlias = Extend | SetItem | PopItem | ClearList
_decode: Final = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


class ListMachine(StateMachine[ListCommand, int | bytes | None]):
    """The state of a list. The result of `Extend` is the new length. The result of `SetItem` and
    `PopItem` is the old value; None: the index was out of range, and nothing was changed.

    Attributes:
        items: encoded values.
    """

    kind: ClassVar[str] = "list"
    command_type: ClassVar[object] = ListCommand

    def __init__(self, items: Iterable[bytes] = ()) -> None:
        self.items = list(items)

    def apply(self, command: ListCommand, at: At) -> int | bytes | None:  # noqa: ARG002
        """See `StateMachine.apply`."""
        match command:
            case Extend(values):
                self.items.extend(values)
                return len(self.items)
            case SetItem(index, value):
                if not self.has(index):
                    return None
                old, self.items[index] = self.items[index], value
                return old
            case PopItem(index):
                return self.items.pop(index) if self.has(index) else None
            case ClearList():
                self.items.clear()
                return None
            case unreachable:
                assert_never(unreachable)

    def has(self, index: int) -> bool:
        """Whether an index is in range."""
        return -len(self.items) <= index < len(self.items)

    def snapshot(self) -> object:
        """See `StateMachine.snapshot`."""
        return list(self.items)

    @classmethod
    def restore(cls, content: bytes) -> Self:
        """See `StateMachine.restore`."""
        return cls(_decode(content))

    @property
    def size(self) -> int:
        """Number of values."""
        return len(self.items)


class ListView(Sequence[ValueT]):
    """A list as of the records that the process has read. To iterate over it while the process
    reads further records, copy it first: `list(view)`.
    """

    def __init__(self, machine: Callable[[], ListMachine], values: ValueType[ValueT]) -> None:
        self._machine = machine
        self._values = values

    @overload
    def __getitem__(self, index: int) -> ValueT: ...
    @overload
    def __getitem__(self, index: slice) -> list[ValueT]: ...
    def __getitem__(self, index: int | slice) -> ValueT | list[ValueT]:
        if isinstance(index, slice):
            return [self._values.decode(data) for data in self._machine().items[index]]
        return self._values.decode(self._machine().items[index])

    def __iter__(self) -> Iterator[ValueT]:
        return map(self._values.decode, self._machine().items)

    def __len__(self) -> int:
        return len(self._machine().items)


class ListPart(Part[ListMachine], Generic[ValueT]):
    """A list within a transaction, which sees its own writes.

    After a read of the list, the commit conflicts with concurrent writes of the list. `append` and
    `extend` read nothing.
    """

    def __init__(
        self, obj: ViewObject[ListMachine, object, object], txn: Joined, values: ValueType[ValueT]
    ) -> None:
        super().__init__(obj, txn)
        self._values = values
        self._own: list[ListCommand] = []

    def items(self) -> list[ValueT]:
        """Return all values."""
        return [self._values.decode(data) for data in self._now().items]

    def __getitem__(self, index: int) -> ValueT:
        return self._values.decode(self._now().items[index])

    def __len__(self) -> int:
        return len(self._now().items)

    def append(self, value: ValueT) -> None:
        """Append a value."""
        self.extend([value])

    def extend(self, values: Iterable[ValueT]) -> None:
        """Append values."""
        self._do(Extend(tuple(map(self._values.encode, values))))

    def __setitem__(self, index: int, value: ValueT) -> None:
        self._check(self._now(), index)
        self._do(SetItem(index, self._values.encode(value)))

    def pop(self, index: int = -1) -> ValueT:
        """Remove the value at an index and return it."""
        now = self._now()
        self._check(now, index)
        self._do(PopItem(index))
        return self._values.decode(now.items[index])

    def clear(self) -> None:
        """Remove all values."""
        self._do(ClearList())

    def _do(self, command: ListCommand) -> None:
        self._write(command)
        self._own.append(command)

    def _now(self) -> ListMachine:
        """Return a copy of the list, with the transaction's own writes."""
        copy = ListMachine(self._read_all().items)
        for command in self._own:
            copy.apply(command, At(0, 0.0))
        return copy

    @staticmethod
    def _check(now: ListMachine, index: int) -> None:
        if not now.has(index):
            raise IndexError(f"The list has {len(now.items)} values, and none at index {index}.")


class List(ViewObject[ListMachine, ListView[ValueT], ListPart[ValueT]], Generic[ValueT]):
    """A list of values."""

    def __init__(
        self, replica: ViewsReplica, log: Log, name: str, values: ValueType[ValueT]
    ) -> None:
        super().__init__(replica, log, name, ListMachine)
        self._values = values

    @property
    def view(self) -> ListView[ValueT]:
        """See `ViewObject.view`."""
        return ListView(self.current, self._values)

    def join(self, txn: Joined) -> ListPart[ValueT]:
        """See `ViewObject.join`."""
        return ListPart(self, txn, self._values)

    async def items(self) -> list[ValueT]:
        """Return all values. Linearizable."""
        return list(await self.sync())

    async def append(self, value: ValueT) -> int:
        """Append a value; return the new length."""
        return await self.extend([value])

    async def extend(self, values: Iterable[ValueT]) -> int:
        """Append values next to each other; return the new length."""
        return int(await self._submit(Extend(tuple(map(self._values.encode, values)))))

    async def set(self, index: int, value: ValueT) -> ValueT:
        """Replace the value at an index; return the old one. A negative index counts from the end.

        Raises:
            IndexError: the list has no value at the index; nothing was changed.
        """
        return self._old(await self._submit(SetItem(index, self._values.encode(value))), index)

    async def pop(self, index: int = -1) -> ValueT:
        """Remove the value at an index and return it. A negative index counts from the end.

        Raises:
            IndexError: the list has no value at the index; nothing was changed.
        """
        return self._old(await self._submit(PopItem(index)), index)

    async def clear(self) -> None:
        """Remove all values."""
        await self._submit(ClearList())

    def _old(self, data: bytes | None, index: int) -> ValueT:
        if data is None:
            raise IndexError(f"List {self.name!r} has no value at index {index}.")
        return self._values.decode(data)
