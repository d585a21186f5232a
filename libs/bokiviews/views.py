"""Groups of objects with views in memory (Tango, SOSP 2013, section 3; CORFU, TOCS 2013, 4.4).

Applications open objects by `Views`. Objects and transactions of a group share a `ViewsReplica`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NoReturn, TypeVar, overload

from bokiviews.counters import Counter, CounterMachine
from bokiviews.errors import InvalidValueError
from bokiviews.lists import List, ListMachine
from bokiviews.machine import AnyMachine, Hosting
from bokiviews.maps import Map, MapMachine
from bokiviews.objects import MachineT, ViewObject, results_of
from bokiviews.own_machine import Machine
from bokiviews.records import DROP, Change, Command, check_name
from bokiviews.replica import replica_of
from bokiviews.sets import Set, SetMachine
from bokiviews.transaction import Transaction
from bokiviews.values import ValueT, ValueType
from indilog import ConflictError, Log
from indilog.replayed import retry_transient

RETRIES: Final = 64
"""Further attempts of a transaction that conflicted."""
_BUILT_IN: Final[tuple[type[AnyMachine], ...]] = (
    MapMachine, ListMachine, CounterMachine, SetMachine,
)  # fmt: skip

_ResultT = TypeVar("_ResultT")
_ObjectT = TypeVar("_ObjectT", bound=ViewObject[Any, Any, Any])


class Views:
    """A group of objects on a log. Each process keeps them in memory, by replaying their commands.

    `Views` instances are cheap: in one process, instances of one platform with the same arguments
    share their views. The commands of concurrent callers share records. Checkpoints, and trims of
    the records that they replace, are automatic.

    Args:
        log: the log with the records; it may also hold other records.
        group: name of the group. Transactions span the objects of one group, and each process reads
            all records of the groups that it opens.
        machines: types of the program's own state machines.
        hosts: names of the objects of which this process keeps views; None: all. Transactions are
            decided alike with any `hosts`. Only processes that host all objects write checkpoints.

    Raises:
        InvalidValueError: invalid name, or two machines of one kind.
    """

    def __init__(
        self,
        log: Log,
        group: str = "views",
        *,
        machines: Iterable[type[AnyMachine]] = (),
        hosts: Iterable[str] | None = None,
    ) -> None:
        self.log = log
        types = (*_BUILT_IN, *machines)
        kinds = [check_name(machine.kind) for machine in types]
        if len(set(kinds)) < len(kinds):
            raise InvalidValueError(f"Each machine must have a kind of its own, not {kinds}.")
        names = None if hosts is None else frozenset(map(check_name, hosts))
        self._replica = replica_of(log, group, Hosting(types, names))

    # --- objects

    @overload
    async def map(self, name: str) -> Map[Any]: ...
    @overload
    async def map(self, name: str, values: type[ValueT]) -> Map[ValueT]: ...
    async def map(self, name: str, values: Any = Any) -> Map[Any]:
        """Open a map. The map exists from its first command on.

        Args:
            name: its name (1 to 255 bytes).
            values: type of its values, which `msgspec` knows: builtins, dataclasses, Structs.

        Raises:
            ViewKindError: the object exists and has another kind.
            NotHostedError: this process does not host it.
            IndilogError: those of `sync`.
        """
        return await self._open(Map(self._replica, self.log, name, ValueType(values)))

    @overload
    async def list(self, name: str) -> List[Any]: ...
    @overload
    async def list(self, name: str, values: type[ValueT]) -> List[ValueT]: ...
    async def list(self, name: str, values: Any = Any) -> List[Any]:
        """Open a list. Arguments and errors are those of `map`."""
        return await self._open(List(self._replica, self.log, name, ValueType(values)))

    async def set(self, name: str) -> Set:
        """Open a set. Arguments and errors are those of `map`."""
        return await self._open(Set(self._replica, self.log, name))

    async def counter(self, name: str) -> Counter:
        """Open a counter. Arguments and errors are those of `map`."""
        return await self._open(Counter(self._replica, self.log, name))

    async def machine(self, name: str, type_: type[MachineT]) -> Machine[MachineT]:
        """Open an object of one of the program's own machines. Errors are those of `map`."""
        return await self._open(Machine(self._replica, self.log, name, type_))

    async def _open(self, obj: _ObjectT) -> _ObjectT:
        check_name(obj.name)
        await self.sync()
        obj.current()
        return obj

    def names(self) -> tuple[str, ...]:
        """Return the names of all objects, as of the records that this process has read."""
        return self._replica.state.names()

    async def drop(self, name: str) -> bool:
        """Remove an object; return whether it existed. The name is then free for any kind."""
        change = Change((Command(check_name(name), DROP, b""),))
        (existed,) = results_of(await self._replica.submit(self.log, change))
        return bool(existed)

    # --- reading

    async def sync(self, within_s: float = 0.0) -> None:
        """Read new records, so that the views include every command that was acknowledged in any
        process more than `within_s` seconds before the call.

        With 0 (the default), later reads of the views are linearizable. That costs a round trip to
        the primary sequencer; concurrent callers of a process share it. With a larger bound, most
        calls read nothing.

        Raises:
            DataLossError: a record of the group is lost. It is never skipped.
            TrimmedError: the whole log was trimmed.
            ViewsVersionError: another version wrote a record.
            MachineFailedError: a state machine raised an error.
            IndilogError: the errors of `Log.read_range`.
        """
        await self._replica.sync(self.log, within_s)

    async def follow(self) -> NoReturn:
        """Read new records as they arrive, until the caller is cancelled. So the views lag behind
        the log by about the time of one read, for any number of readers.

        Raises:
            IndilogError: those of `sync`; transient ones after some attempts.
        """
        while True:
            await retry_transient(self._follow_once)

    async def _follow_once(self) -> None:
        await self._replica.follow(self.log)

    # --- transactions

    def transaction(self) -> Transaction:
        """Return a transaction, which commits at the end of its block, or raises `ConflictError`.
        `transact` also runs it again.
        """
        return Transaction(self._replica, self.log)

    async def transact(
        self, body: Callable[[Transaction], Awaitable[_ResultT]], *, retries: int = RETRIES
    ) -> _ResultT:
        """Run `body` in a transaction and return its result; run it again after a conflict.

        Transactions of one process that have conflicted run one after the other, so they do not
        conflict with each other again. If one of them takes longer than five seconds, the next one
        begins beside it. One of the conflicting transactions always commits.

        Args:
            body: reads and writes objects by `txn[obj]`; it may run several times.
            retries: largest number of further attempts.

        Raises:
            ConflictError: all attempts conflicted; nothing was done.
            AppendOutcomeUnknownError: the transaction may or may not have taken effect.
        """
        try:
            return await self._attempt(body, is_current=False)
        except ConflictError:
            if retries <= 0:
                raise
        async with self._replica.turn():
            for _ in range(retries - 1):
                try:
                    return await self._attempt(body, is_current=True)
                except ConflictError:
                    continue
            return await self._attempt(body, is_current=True)

    async def _attempt(
        self, body: Callable[[Transaction], Awaitable[_ResultT]], *, is_current: bool
    ) -> _ResultT:
        async with Transaction(self._replica, self.log, is_current=is_current) as txn:
            return await body(txn)

    # --- checkpoints

    async def save(self) -> None:
        """Write a checkpoint now, and trim the records that the previous checkpoint covers.
        Checkpoints are also written automatically.

        Raises:
            NotHostedError: this process does not host all objects.
        """
        await self._replica.save(self.log)
