"""The base of all kinds of object: a view to read, commands to append, a part in transactions.

`Map`, `List`, `Set`, `Counter` and `Machine` extend `ViewObject` and `Part`, which call
`ViewsReplica`.
"""

from __future__ import annotations

import abc
from typing import Any, Generic, Protocol, TypeVar

from bokiviews.errors import ViewKindError
from bokiviews.machine import AnyMachine, encode_command
from bokiviews.places import Key, check_key, place_of_key, places_of_object
from bokiviews.records import Change, Command, Digest
from bokiviews.replica import ViewsReplica
from bokiviews.state import ChangeOutcome, Committed, Conflicted, WrongKind
from indilog import ConflictError, Log

MachineT = TypeVar("MachineT", bound=AnyMachine)
ViewT = TypeVar("ViewT", covariant=True)  # noqa: PLC0105 - the views' name for it
PartT = TypeVar("PartT", covariant=True)  # noqa: PLC0105


class Joined(Protocol):
    """A transaction, as seen by the parts of its objects (`bokiviews.transaction`)."""

    def note_reads(self, *places: Digest) -> None:
        """Note places that the body is about to read.

        Raises:
            ConflictError: something that the body has read was written meanwhile.
        """

    def note_live_state(self) -> None:
        """Note that the body has got a state that changes with the records that the process
        reads.
        """

    def add(self, command: Command) -> None:
        """Add a command to the change."""


class ViewObject(abc.ABC, Generic[MachineT, ViewT, PartT]):
    """An object of a group, opened by a method of `Views`.

    Attributes:
        name: its name.
        type: type of its state machine.
    """

    def __init__(self, replica: ViewsReplica, log: Log, name: str, type_: type[MachineT]) -> None:
        self.name = name
        self.type = type_
        self._replica = replica
        self._log = log

    @property
    @abc.abstractmethod
    def view(self) -> ViewT:
        """The object as of the records that this process has read, without a read of the log.

        The view stays current: it shows each record as soon as the process has read it.
        """

    @abc.abstractmethod
    def join(self, txn: Joined) -> PartT:
        """Return the object as a transaction reads and writes it."""

    async def sync(self, within_s: float = 0.0) -> ViewT:
        """Return the view after new records were read (`Views.sync`)."""
        await self._replica.sync(self._log, within_s)
        return self.view

    def is_of(self, replica: ViewsReplica) -> bool:
        """Whether the object belongs to the group of a replica."""
        return self._replica is replica

    def current(self) -> MachineT:
        """Return the state of the object. If it does not exist, return the state before the first
        command.

        Raises:
            NotHostedError: this process does not host it.
            ViewKindError: the object has another kind.
        """
        found = self._replica.machine(self.name, self.type)
        if found is None:
            return self.type()
        assert isinstance(found, self.type), "the kind of an object determines its machine"
        return found

    def encode(self, command: object) -> Command:
        """Return a command for this object.

        Raises:
            InvalidValueError: the command cannot be stored.
        """
        content = encode_command(self.type, command)
        keys = self.type.keys_of(command)
        places = b"" if keys is None else b"".join(map(self.place_of, keys))
        return Command(self.name, self.type.kind, content, places)

    def place_of(self, key: Key) -> Digest:
        """Return the place of a key."""
        return place_of_key(self.name, check_key(key))

    async def _submit(self, command: object) -> Any:  # noqa: ANN401 - each kind has its results
        """Append a command and return its result.

        Raises:
            AppendOutcomeUnknownError: the command may or may not take effect.
            IndilogError: as for `Log.append`; the command has no effect.
        """
        self.current()  # not hosted, or another kind: nothing is appended
        change = Change((self.encode(command),))
        (result,) = results_of(await self._replica.submit(self._log, change))
        return result


class Part(Generic[MachineT]):
    """An object within a transaction."""

    def __init__(self, obj: ViewObject[MachineT, Any, Any], txn: Joined) -> None:
        self._object = obj
        self._txn = txn
        self._places = places_of_object(obj.name)

    def _read_key(self, key: Key) -> MachineT:
        """Return the state, from which the body reads one key."""
        self._txn.note_reads(self._object.place_of(key), self._places.whole)
        return self._object.current()

    def _read_all(self) -> MachineT:
        """Return the state, from which the body may read anything."""
        self._txn.note_reads(self._places.any)
        return self._object.current()

    def _write(self, command: object) -> None:
        self._object.current()
        self._txn.add(self._object.encode(command))


def results_of(outcome: ChangeOutcome) -> tuple[object, ...]:
    """Return the results of a change that took effect.

    Raises:
        ConflictError: something that the change read was written meanwhile.
        ViewKindError: an object has another kind.
    """
    match outcome:
        case Committed(results):
            return results
        case Conflicted():
            raise ConflictError(
                "Something that the transaction read was changed meanwhile; it had no effect. "
                "Run it again."
            )
        case WrongKind(name, kind, wanted):
            raise ViewKindError(name, kind, wanted)
