"""Maps: values by key.

`Views.map` returns a `Map`, whose state is a `MapMachine`. Commands are records of the log, and the
machines of all processes apply them in log order (`bokiviews.machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final, Generic, Self, TypeAlias, TypeVar, assert_never, overload

import msgspec

from bokiviews.machine import At, StateMachine
from bokiviews.objects import Joined, Part, ViewObject
from bokiviews.places import Key, check_key
from bokiviews.replica import ViewsReplica
from bokiviews.values import ValueT, ValueType
from indilog import Log

_DefaultT = TypeVar("_DefaultT")


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Set the values of keys; with `is_new`, only if the first key has no value."""

    pairs: tuple[tuple[Key, bytes], ...]
    is_new: bool = False


class Replace(msgspec.Struct, frozen=True, array_like=True, tag="replace"):
    """Set the value of a key, if its value is the expected one."""

    key: Key
    expected: bytes
    value: bytes


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Remove a key."""

    key: Key


class ClearMap(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Remove all keys."""


MapCommand: TypeAlias = Put | Replace | Remove | ClearMap
_decode: Final = msgspec.msgpack.Decoder(tuple[tuple[Key, bytes], ...]).decode


class MapMachine(StateMachine[MapCommand, bytes | bool | None]):
    """The state of a map. The result of `Put` is the old value of its first key, and that of
    `Remove` the old value of its key; None: there was none. `Replace` returns whether it set the
    value.

    Attributes:
        entries: encoded values by key, in the order in which the keys were added.
    """

    kind: ClassVar[str] = "map"
    command_type: ClassVar[object] = MapCommand

    def __init__(self, entries: Iterable[tuple[Key, bytes]] = ()) -> None:
        self.entries = dict(entries)

    def apply(self, command: MapCommand, at: At) -> bytes | bool | None:  # noqa: ARG002
        """See `StateMachine.apply`."""
        match command:
            case Put(pairs, is_new):
                old = self.entries.get(pairs[0][0]) if pairs else None
                if not is_new or old is None:
                    self.entries.update(pairs)
                return old
            case Replace(key, expected, value):
                if self.entries.get(key) != expected:
                    return False
                self.entries[key] = value
                return True
            case Remove(key):
                return self.entries.pop(key, None)
            case ClearMap():
                self.entries.clear()
                return None
            case unreachable:
                assert_never(unreachable)

    def snapshot(self) -> object:
        """See `StateMachine.snapshot`."""
        return list(self.entries.items())

    @classmethod
    def restore(cls, content: bytes) -> Self:
        """See `StateMachine.restore`."""
        return cls(_decode(content))

    @property
    def size(self) -> int:
        """Number of keys."""
        return len(self.entries)

    @classmethod
    def keys_of(cls, command: MapCommand) -> Sequence[Key] | None:
        """See `StateMachine.keys_of`."""
        match command:
            case Put(pairs):
                return [key for key, _ in pairs]
            case Replace(key=key) | Remove(key=key):
                return [key]
            case ClearMap():
                return None
            case unreachable:
                assert_never(unreachable)


class MapView(Mapping[Key, ValueT]):
    """A map as of the records that the process has read. To iterate over it while the process reads
    further records, copy it first: `dict(view)`.
    """

    def __init__(self, machine: Callable[[], MapMachine], values: ValueType[ValueT]) -> None:
        self._machine = machine
        self._values = values

    def __getitem__(self, key: Key) -> ValueT:
        return self._values.decode(self._machine().entries[key])

    def __iter__(self) -> Iterator[Key]:
        return iter(self._machine().entries)

    def __len__(self) -> int:
        return len(self._machine().entries)

    def __contains__(self, key: object) -> bool:
        return key in self._machine().entries


class MapPart(Part[MapMachine], Generic[ValueT]):
    """A map within a transaction, which sees its own writes."""

    def __init__(
        self, obj: ViewObject[MapMachine, object, object], txn: Joined, values: ValueType[ValueT]
    ) -> None:
        super().__init__(obj, txn)
        self._values = values
        self._own: dict[Key, bytes | None] = {}
        self._is_cleared = False

    @overload
    def get(self, key: Key) -> ValueT | None: ...
    @overload
    def get(self, key: Key, default: _DefaultT) -> ValueT | _DefaultT: ...
    def get(self, key: Key, default: object = None) -> object:
        """Return the value of a key, or `default`."""
        found = self._stored(key)
        return default if found is None else self._values.decode(found)

    def __getitem__(self, key: Key) -> ValueT:
        if (found := self._stored(key)) is None:
            raise KeyError(key)
        return self._values.decode(found)

    def __contains__(self, key: Key) -> bool:
        return self._stored(key) is not None

    def items(self) -> list[tuple[Key, ValueT]]:
        """Return all keys and values. The commit then conflicts with any write of the map."""
        entries: dict[Key, bytes | None] = {}
        if not self._is_cleared:
            entries.update(self._read_all().entries)
        entries.update(self._own)
        return [
            (key, self._values.decode(data)) for key, data in entries.items() if data is not None
        ]

    def put(self, key: Key, value: ValueT) -> None:
        """Set the value of a key."""
        self.update({key: value})

    __setitem__ = put

    def update(self, values: Mapping[Key, ValueT]) -> None:
        """Set the values of several keys."""
        pairs = tuple((check_key(key), self._values.encode(v)) for key, v in values.items())
        if pairs:
            self._write(Put(pairs))
            self._own.update(pairs)

    def remove(self, key: Key) -> None:
        """Remove a key, if it is there."""
        self._write(Remove(check_key(key)))
        self._own[key] = None

    __delitem__ = remove

    def clear(self) -> None:
        """Remove all keys."""
        self._write(ClearMap())
        self._own.clear()
        self._is_cleared = True

    def _stored(self, key: Key) -> bytes | None:
        if check_key(key) in self._own:
            return self._own[key]
        return None if self._is_cleared else self._read_key(key).entries.get(key)


class Map(ViewObject[MapMachine, MapView[ValueT], MapPart[ValueT]], Generic[ValueT]):
    """Values by key. Keys are text or integers of 64 bits."""

    def __init__(
        self, replica: ViewsReplica, log: Log, name: str, values: ValueType[ValueT]
    ) -> None:
        super().__init__(replica, log, name, MapMachine)
        self._values = values

    @property
    def view(self) -> MapView[ValueT]:
        """See `ViewObject.view`."""
        return MapView(self.current, self._values)

    def join(self, txn: Joined) -> MapPart[ValueT]:
        """See `ViewObject.join`."""
        return MapPart(self, txn, self._values)

    async def get(self, key: Key) -> ValueT | None:
        """Return the value of a key; None: there is none. Linearizable."""
        return (await self.sync()).get(check_key(key))

    async def get_many(self, keys: Iterable[Key]) -> dict[Key, ValueT]:
        """Return the values of those keys that have a value, as of one seqnum. Linearizable."""
        view = await self.sync()
        return {key: view[key] for key in map(check_key, keys) if key in view}

    async def put(self, key: Key, value: ValueT) -> ValueT | None:
        """Set the value of a key; return the old one, or None."""
        return self._old(await self._submit(Put(((check_key(key), self._values.encode(value)),))))

    async def put_if_absent(self, key: Key, value: ValueT) -> bool:
        """Set the value of a key, if the key has no value; return whether it was set."""
        pair = check_key(key), self._values.encode(value)
        return await self._submit(Put((pair,), is_new=True)) is None

    async def replace(self, key: Key, expected: ValueT, value: ValueT) -> bool:
        """Set the value of a key, if its value is `expected`; return whether it was set."""
        old, new = self._values.encode(expected), self._values.encode(value)
        return bool(await self._submit(Replace(check_key(key), old, new)))

    async def update(self, values: Mapping[Key, ValueT]) -> None:
        """Set the values of several keys, atomically."""
        pairs = [(check_key(key), self._values.encode(value)) for key, value in values.items()]
        if pairs:
            await self._submit(Put(tuple(pairs)))

    async def remove(self, key: Key) -> ValueT | None:
        """Remove a key; return its value, or None."""
        return self._old(await self._submit(Remove(check_key(key))))

    async def clear(self) -> None:
        """Remove all keys."""
        await self._submit(ClearMap())

    def _old(self, data: bytes | None) -> ValueT | None:
        return None if data is None else self._values.decode(data)
