"""Transactions across the objects of a group, decided by the order of the log.

The body reads views and collects commands. The commit appends one change with the commands, the
places that the body read, and the horizon of these reads. The change takes effect iff none of these
places was written since the horizon (`bokiviews.state`). All processes decide this alike from the
records, so a crash after the append changes nothing. `Views` makes a `Transaction`, which calls
`ViewsReplica`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TypeVar, cast

from bokiviews.errors import ViewsError
from bokiviews.objects import Part, ViewObject, results_of
from bokiviews.records import Change, Command, Digest
from bokiviews.replica import ViewsReplica
from indilog import ConflictError, Log

_PartT = TypeVar("_PartT", bound=Part[Any])


class Transaction:
    """A transaction: `async with views.transaction() as txn`.

    The body sees one state of all objects, with its own writes. Only a `MachinePart` does not show
    the body's own writes. Leaving the block commits; an error in the block discards the writes. A
    body without writes needs no commit. Transactions are strictly serializable.

    Args:
        replica: the views of the group.
        log: log of the group.
        is_current: whether the views are fresh enough already.
    """

    def __init__(self, replica: ViewsReplica, log: Log, *, is_current: bool = False) -> None:
        self._replica = replica
        self._log = log
        self._is_current = is_current
        self._is_open = False
        self._has_live_state = False
        """Whether the body has got a state that changes with the records that the process reads."""
        self._horizon = 0
        self._reads: dict[Digest, None] = {}
        self._commands: list[Command] = []
        self._parts: dict[str, Part[Any]] = {}

    async def __aenter__(self) -> Self:
        if not self._is_current:
            await self._replica.sync(self._log)
        self._horizon = self._replica.end
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit, unless the body raised an error.

        Raises:
            ConflictError: something that the body read was changed meanwhile; nothing was done.
            ViewKindError: an object was created with another kind; nothing was done.
            AppendOutcomeUnknownError: the transaction may or may not take effect.
        """
        self._is_open = False
        if error is not None:
            return
        if not self._commands and self._has_live_state:
            self._check_reads()
        if self._commands:
            change = Change(tuple(self._commands), self._horizon, b"".join(self._reads))
            results_of(await self._replica.submit(self._log, change))

    def __getitem__(self, obj: ViewObject[Any, Any, _PartT]) -> _PartT:
        """Return an object as this transaction reads and writes it.

        Raises:
            ViewsError: the object is of another group, or the transaction is not open.
        """
        self._check_open()
        if not obj.is_of(self._replica):
            raise ViewsError(
                f"Object {obj.name!r} is of another group than the transaction; a transaction "
                "spans the objects of one group."
            )
        part = self._parts.get(obj.name)
        if part is None:
            part = self._parts[obj.name] = obj.join(self)
        return cast("_PartT", part)

    def note_reads(self, *places: Digest) -> None:
        """Note places that the body is about to read, and move the horizon to the present state.

        So all reads of the body, also the earlier ones, are of the present state.

        Raises:
            ConflictError: something that the body has read was written meanwhile.
        """
        self._check_open()
        self._check_reads()
        self._horizon = max(self._horizon, self._replica.end)
        self._reads.update(dict.fromkeys(places))

    def note_live_state(self) -> None:
        """Note that the body has got a state that changes with the records that the process reads.
        So even without commands, the end of the block checks what the body has read.
        """
        self._has_live_state = True

    def _check_reads(self) -> None:
        """Raise if something that the body has read was written since the horizon.

        Raises:
            ConflictError: see above.
        """
        if self._replica.end <= self._horizon:
            return
        if self._replica.state.recent.is_written(self._reads, self._horizon):
            raise ConflictError(
                "Something that the transaction has read was changed meanwhile; run it again."
            )

    def add(self, command: Command) -> None:
        """Add a command to the change."""
        self._check_open()
        self._commands.append(command)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ViewsError("The transaction is not open; use its objects inside its block.")
