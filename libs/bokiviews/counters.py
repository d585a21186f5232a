"""Counters: integers without a limit.

`Views.counter` returns a `Counter`, whose state is a `CounterMachine`. Commands are records of the
log, and the machines of all processes apply them in log order (`bokiviews.machine`).
"""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec

from bokiviews.machine import At, StateMachine
from bokiviews.objects import Joined, Part, ViewObject
from bokiviews.replica import ViewsReplica
from indilog import Log


class AddTo(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Add a number, if the sum is within the bounds."""

    by: int
    at_least: int | None = None
    at_most: int | None = None


class CounterMachine(StateMachine[AddTo, int | None]):
    """The state of a counter. The result is the new value; None: nothing was added.

    Attributes:
        value: the value.
    """

    kind: ClassVar[str] = "counter"
    command_type: ClassVar[object] = AddTo

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def apply(self, command: AddTo, at: At) -> int | None:  # noqa: ARG002
        """See `StateMachine.apply`."""
        new = self.value + command.by
        if command.at_least is not None and new < command.at_least:
            return None
        if command.at_most is not None and new > command.at_most:
            return None
        self.value = new
        return new

    def snapshot(self) -> object:
        """See `StateMachine.snapshot`; as text, because MessagePack limits integers."""
        return str(self.value)

    @classmethod
    def restore(cls, content: bytes) -> Self:
        """See `StateMachine.restore`."""
        return cls(int(msgspec.msgpack.decode(content, type=str)))


class CounterPart(Part[CounterMachine]):
    """A counter within a transaction, which sees its own writes. `add` reads nothing."""

    def __init__(self, obj: ViewObject[CounterMachine, object, object], txn: Joined) -> None:
        super().__init__(obj, txn)
        self._added = 0

    @property
    def value(self) -> int:
        """The value. The commit then conflicts with concurrent writes of the counter."""
        return self._read_all().value + self._added

    def add(self, by: int = 1) -> None:
        """Add a number."""
        self._write(AddTo(by))
        self._added += by


class Counter(ViewObject[CounterMachine, int, CounterPart]):
    """An integer that many callers change without conflicts."""

    def __init__(self, replica: ViewsReplica, log: Log, name: str) -> None:
        super().__init__(replica, log, name, CounterMachine)

    @property
    def view(self) -> int:
        """The value as of the records that this process has read."""
        return self.current().value

    def join(self, txn: Joined) -> CounterPart:
        """See `ViewObject.join`."""
        return CounterPart(self, txn)

    async def value(self) -> int:
        """Return the value. Linearizable."""
        return await self.sync()

    async def add(self, by: int = 1) -> int:
        """Add an integer of 64 bits; return the new value."""
        return int(await self._submit(AddTo(by)))

    async def add_within(
        self, by: int, *, at_least: int | None = None, at_most: int | None = None
    ) -> int | None:
        """Add a number, if the sum is within the bounds; return the sum, or None.

        The order of the log decides. So concurrent callers need no transaction.
        """
        result: int | None = await self._submit(AddTo(by, at_least, at_most))
        return result
