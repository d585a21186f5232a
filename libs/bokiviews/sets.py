"""Sets of keys.

`Views.set` returns a `Set`, whose state is a `SetMachine`. Commands are records of the log, and the
machines of all processes apply them in log order (`bokiviews.machine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar, Final, Self, TypeAlias, assert_never

import msgspec

from bokiviews.machine import At, StateMachine
from bokiviews.objects import Joined, Part, ViewObject
from bokiviews.places import Key, check_key
from bokiviews.replica import ViewsReplica
from indilog import Log


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Add members."""

    members: tuple[Key, ...]


class DiscardMembers(msgspec.Struct, frozen=True, array_like=True, tag="discard"):
    """Remove members."""

    members: tuple[Key, ...]


class ClearSet(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Remove all members."""


SetCommand: TypeAlias = Add | DiscardMembers | ClearSet
_decode: Final = msgspec.msgpack.Decoder(tuple[Key, ...]).decode


class SetMachine(StateMachine[SetCommand, int]):
    """The state of a set. The result is the number of members that were added or removed.

    Attributes:
        members: the members, in the order in which they were added.
    """

    kind: ClassVar[str] = "set"
    command_type: ClassVar[object] = SetCommand

    def __init__(self, members: Iterable[Key] = ()) -> None:
        self.members = dict.fromkeys(members)

    def apply(self, command: SetCommand, at: At) -> int:  # noqa: ARG002
        """See `StateMachine.apply`."""
        before = len(self.members)
        match command:
            case Add(members):
                self.members.update(dict.fromkeys(members))
            case DiscardMembers(members):
                for member in members:
                    self.members.pop(member, None)
            case ClearSet():
                self.members.clear()
            case unreachable:
                assert_never(unreachable)
        return abs(len(self.members) - before)

    def snapshot(self) -> object:
        """See `StateMachine.snapshot`."""
        return list(self.members)

    @classmethod
    def restore(cls, content: bytes) -> Self:
        """See `StateMachine.restore`."""
        return cls(_decode(content))

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @classmethod
    def keys_of(cls, command: SetCommand) -> Sequence[Key] | None:
        """See `StateMachine.keys_of`."""
        return None if isinstance(command, ClearSet) else command.members


class SetView(AbstractSet[Key]):
    """A set as of the records that the process has read. To iterate over it while the process reads
    further records, copy it first: `set(view)`.
    """

    def __init__(self, machine: Callable[[], SetMachine]) -> None:
        self._machine = machine

    def __contains__(self, member: object) -> bool:
        return member in self._machine().members

    def __iter__(self) -> Iterator[Key]:
        return iter(self._machine().members)

    def __len__(self) -> int:
        return len(self._machine().members)

    @classmethod
    def _from_iterable(cls, members: Iterable[Key]) -> AbstractSet[Key]:  # type: ignore[override]
        """Return the result of an operation of two sets."""
        return frozenset(members)


class SetPart(Part[SetMachine]):
    """A set within a transaction, which sees its own writes."""

    def __init__(self, obj: ViewObject[SetMachine, object, object], txn: Joined) -> None:
        super().__init__(obj, txn)
        self._own: dict[Key, bool] = {}
        self._is_cleared = False

    def __contains__(self, member: Key) -> bool:
        if check_key(member) in self._own:
            return self._own[member]
        return not self._is_cleared and member in self._read_key(member).members

    def members(self) -> list[Key]:
        """Return all members. The commit then conflicts with concurrent writes of the set."""
        now = {} if self._is_cleared else dict.fromkeys(self._read_all().members, True)
        now.update(self._own)
        return [member for member, is_in in now.items() if is_in]

    def add(self, *members: Key) -> None:
        """Add members."""
        self._write(Add(tuple(map(check_key, members))))
        self._own.update(dict.fromkeys(members, True))

    def discard(self, *members: Key) -> None:
        """Remove members, if they are there."""
        self._write(DiscardMembers(tuple(map(check_key, members))))
        self._own.update(dict.fromkeys(members, False))

    def clear(self) -> None:
        """Remove all members."""
        self._write(ClearSet())
        self._own.clear()
        self._is_cleared = True


class Set(ViewObject[SetMachine, SetView, SetPart]):
    """A set. Members are text or integers of 64 bits."""

    def __init__(self, replica: ViewsReplica, log: Log, name: str) -> None:
        super().__init__(replica, log, name, SetMachine)

    @property
    def view(self) -> SetView:
        """See `ViewObject.view`."""
        return SetView(self.current)

    def join(self, txn: Joined) -> SetPart:
        """See `ViewObject.join`."""
        return SetPart(self, txn)

    async def contains(self, member: Key) -> bool:
        """Return whether the set has a member. Linearizable."""
        return check_key(member) in await self.sync()

    async def members(self) -> frozenset[Key]:
        """Return all members. Linearizable."""
        return frozenset(await self.sync())

    async def add(self, *members: Key) -> int:
        """Add members, atomically; return how many were not in the set."""
        return int(await self._submit(Add(tuple(map(check_key, members)))))

    async def discard(self, *members: Key) -> int:
        """Remove members, atomically; return how many were in the set."""
        return int(await self._submit(DiscardMembers(tuple(map(check_key, members)))))

    async def clear(self) -> int:
        """Remove all members; return their number."""
        return int(await self._submit(ClearSet()))
