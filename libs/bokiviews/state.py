"""Derives the state of a group of objects from its records alone, so that every process decides
every transaction alike.

A change takes effect iff no place that it read was written in [its horizon, its seqnum). This is
Tango's optimistic commit (SOSP 2013, section 3.2) with one sub-stream for the whole group. So the
records before a change decide it, without a decision record and without reads of other sub-streams.
`ViewsReplica` applies records to a `ViewsState`, which calls state machines and `RecentWrites`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import msgspec

from bokiviews.errors import MachineFailedError, ViewsVersionError
from bokiviews.machine import AnyMachine, At, Hosting, decoder_of
from bokiviews.places import ObjectPlaces, RecentWrites, places_of_object
from bokiviews.records import (
    DIGEST_BYTES,
    DROP,
    Change,
    Command,
    StoredViews,
    decode_changes,
    digests_in,
)
from indilog import Record
from indilog.replayed import State
from indilog.sdk import SeqNum


class Committed(NamedTuple):
    """The change took effect. `results` has the result of each of its commands, in order."""

    results: tuple[object, ...]


class Conflicted(NamedTuple):
    """A place that the change read was written meanwhile, so the change had no effect."""


class WrongKind(NamedTuple):
    """The object `name` has the kind `kind`, not `wanted`, so the change had no effect."""

    name: str
    kind: str
    wanted: str


ChangeOutcome: TypeAlias = Committed | Conflicted | WrongKind
_CONFLICTED: Final = Conflicted()


class _Object:
    """An object of the group.

    Attributes:
        kind: its kind.
        machine: its state; None: this process does not host it.
        places: its places as a whole.
    """

    __slots__ = ("kind", "machine", "places")

    def __init__(self, kind: str, machine: AnyMachine | None, places: ObjectPlaces) -> None:
        self.kind = kind
        self.machine = machine
        self.places = places

    @property
    def size(self) -> int:
        """Number of the object's items in a checkpoint."""
        return 1 if self.machine is None else 1 + self.machine.size


class ViewsState(State[tuple[ChangeOutcome, ...]]):
    """Applies the records of a group of objects in order.

    Args:
        hosting: the objects of which this process keeps views. It does not affect decisions.
        stored: state to continue from; None: before the first record.

    Attributes:
        recent: the recent writes of the group.
    """

    def __init__(self, hosting: Hosting, stored: StoredViews | None = None) -> None:
        self.recent = RecentWrites()
        self._hosting = hosting
        self._objects: dict[str, _Object] = {}
        self._items = 0
        self._unhosted = 0
        self._may_elect = False
        self._failure: MachineFailedError | None = None
        if stored is not None:
            self._restore(stored)

    # --- questions

    def kind_of(self, name: str) -> str | None:
        """Return the kind of an object; None: it has no commands, or was dropped."""
        held = self._objects.get(name)
        return None if held is None else held.kind

    def machine(self, name: str) -> AnyMachine | None:
        """Return the state of an object; None: there is none, or it is not hosted."""
        held = self._objects.get(name)
        return None if held is None else held.machine

    def names(self) -> tuple[str, ...]:
        """Return the names of all objects."""
        return tuple(self._objects)

    @property
    def is_full(self) -> bool:
        """Whether this process hosts all objects."""
        return not self._unhosted

    # --- applying records

    def apply(self, record: Record) -> tuple[ChangeOutcome, ...]:
        """Apply the next record; return the outcome of each of its changes.

        Raises:
            ViewsVersionError: the record, or a command in it, cannot be decoded; the state is
                unchanged.
            MachineFailedError: a machine raised an error for this or an earlier record.
        """
        if self._failure is not None:
            raise self._failure
        listed = decode_changes(record.data)
        if listed is None:
            self._may_elect = False
            return ()
        commands = [[self._decoded(one) for one in change.commands] for change in listed.changes]
        at = At(record.seqnum, record.ordered_at)
        outcomes = tuple(
            [
                self._decided(change, decoded, at)
                for change, decoded in zip(listed.changes, commands, strict=True)
            ]
        )
        self._may_elect = listed.is_by_full_host
        return outcomes

    def _decoded(self, command: Command) -> object:
        """Return the command of a hosted object, decoded; otherwise None."""
        machine = self._hosting.machine_of(command.name, command.kind)
        if machine is None:
            return None
        try:
            return decoder_of(machine)(command.content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ViewsVersionError(
                f"A command of object {command.name!r} cannot be decoded as a {command.kind}: "
                f"{error}; use the version of the machine that wrote it, or a later one."
            ) from error

    def _decided(self, change: Change, decoded: list[object], at: At) -> ChangeOutcome:
        reads = change.reads
        if reads and self.recent.is_written(digests_in(reads), change.horizon):
            return _CONFLICTED
        kinds: dict[str, str] = {}
        for command in change.commands:
            kind = kinds.setdefault(command.name, self.kind_of(command.name) or command.kind)
            if command.kind not in {kind, DROP}:
                return WrongKind(command.name, kind, command.kind)
        pairs = zip(change.commands, decoded, strict=True)
        return Committed(tuple([self._effect(command, content, at) for command, content in pairs]))

    def _effect(self, command: Command, decoded: object, at: At) -> object:
        if command.kind == DROP:
            return self._dropped(command.name, at.seqnum)
        held = self._objects.get(command.name)
        if held is None:
            held = self._created(command.name, command.kind)
        self._note_writes(held.places, command.keys, at.seqnum)
        if held.machine is None:
            return None
        before = held.size
        try:
            result = held.machine.apply(decoded, at)
            self._items += held.size - before
        except Exception as error:
            self._failure = MachineFailedError(
                f"The {command.kind} {command.name!r} cannot apply the command at seqnum "
                f"{at.seqnum}: {error!r}; correct the machine, and start the process again."
            )
            raise self._failure from error
        return result

    def _note_writes(self, places: ObjectPlaces, keys: bytes, seqnum: SeqNum) -> None:
        for key in digests_in(keys):
            self.recent.note(key, seqnum)
        if not keys:
            self.recent.note(places.whole, seqnum)
        self.recent.note(places.any, seqnum)

    def _created(self, name: str, kind: str, content: bytes | None = None) -> _Object:
        machine = self._hosting.machine_of(name, kind)
        if machine is None:
            state = None
        else:
            state = machine() if content is None else machine.restore(content)
        held = self._objects[name] = _Object(kind, state, places_of_object(name))
        self._items += held.size
        self._unhosted += held.machine is None
        return held

    def _dropped(self, name: str, seqnum: SeqNum) -> bool:
        held = self._objects.pop(name, None)
        if held is None:
            return False
        self._note_writes(held.places, b"", seqnum)
        self._items -= held.size
        self._unhosted -= held.machine is None
        return True

    # --- checkpoints

    def may_elect(self) -> bool:
        """Whether the author of the last record hosts all objects, so that it can write a
        checkpoint.
        """
        return self._may_elect

    @property
    def size(self) -> int:
        """Number of items of all objects, and of recent writes."""
        return self._items + len(self.recent)

    def snapshot(self) -> object:
        """Return the whole state, from which another process can continue."""
        assert self.is_full, "a checkpoint has all objects"
        objects = [
            (name, held.kind, held.machine.snapshot())
            for name, held in self._objects.items()
            if held.machine is not None
        ]
        return objects, self.recent.snapshot(), self.recent.floor

    def _restore(self, stored: StoredViews) -> None:
        places, seqnums = stored.recent
        assert len(places) == DIGEST_BYTES * len(seqnums), "each place has a seqnum"
        writes = zip(digests_in(places), seqnums, strict=True)
        self.recent = RecentWrites(writes, stored.floor)
        for one in stored.objects:
            self._created(one.name, one.kind, bytes(one.content))

    def check_invariants(self) -> None:
        """Assert that the counts equal the objects."""
        assert self._items == sum(held.size for held in self._objects.values())
        assert self._unhosted == sum(held.machine is None for held in self._objects.values())
