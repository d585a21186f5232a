"""The base of replicated state machines: deterministic, driven by the commands in the log.

Each kind of object has a `StateMachine`; `ViewsState` calls it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar

import msgspec

from bokiviews.errors import InvalidValueError
from bokiviews.places import Key
from indilog.sdk import SeqNum

CommandT = TypeVar("CommandT")
ResultT = TypeVar("ResultT")
_TYPES_MAX: Final = 1024

_encode: Final = msgspec.msgpack.Encoder().encode


class At(NamedTuple):
    """The place of a command in the log.

    Attributes:
        seqnum: seqnum of its record; several commands may share a record.
        time: when the log ordered the record, seconds since 1970 (`Record.ordered_at`).
    """

    seqnum: SeqNum
    time: float


class StateMachine(abc.ABC, Generic[CommandT, ResultT]):
    """A state that commands change equally in every process (CORFU, TOCS 2013, section 4.4).

    An instance made without arguments is the state before the first command. `apply` may depend on
    nothing but the state and its arguments: no clock (use `at.time`), no randomness, no setting of
    the process. `apply` must not raise an error, because the error would occur in every process, at
    each start. If a command has no effect, its result says so.

    Attributes:
        kind: name of the kind, in records (1 to 255 bytes).
        command_type: type of its commands, or a union of types, which `msgspec` decodes.
    """

    kind: ClassVar[str]
    command_type: ClassVar[object]

    @abc.abstractmethod
    def apply(self, command: CommandT, at: At) -> ResultT:
        """Apply a command; return its result for the author."""

    @abc.abstractmethod
    def snapshot(self) -> object:
        """Return the whole state, as a value that `msgspec` encodes and that no later `apply`
        changes.
        """

    @classmethod
    @abc.abstractmethod
    def restore(cls, content: bytes) -> Self:
        """Return the state of an encoded snapshot (MessagePack)."""

    @property
    def size(self) -> int:
        """Number of items in a snapshot. A larger state has fewer checkpoints."""
        return 1

    @classmethod
    def keys_of(cls, command: CommandT) -> Sequence[Key] | None:  # noqa: ARG003 - for subclasses
        """Return the keys that a command writes; None: it may change the whole state.

        Transactions that read other keys do not conflict with the command.
        """
        return None


AnyMachine = StateMachine[Any, Any]


@lru_cache(maxsize=_TYPES_MAX)
def decoder_of(machine: type[AnyMachine]) -> Callable[[bytes], Any]:
    """Return the function that decodes a command of a machine."""
    return msgspec.msgpack.Decoder(machine.command_type).decode


def encode_command(machine: type[AnyMachine], command: object) -> bytes:
    """Return an encoded command.

    Raises:
        InvalidValueError: other processes could not decode the command.
    """
    try:
        content = _encode(command)
        decoder_of(machine)(content)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidValueError(
            f"{command!r:.64} is no command of a {machine.kind}: {error}."
        ) from error
    return content


class Hosting(NamedTuple):
    """Which objects a process keeps views of.

    Attributes:
        machines: the known kinds.
        names: names of the objects; None: all.
    """

    machines: tuple[type[AnyMachine], ...]
    names: frozenset[str] | None

    def machine_of(self, name: str, kind: str) -> type[AnyMachine] | None:
        """Return the type of an object's machine; None: the object is not hosted."""
        if self.names is not None and name not in self.names:
            return None
        return next((machine for machine in self.machines if machine.kind == kind), None)
