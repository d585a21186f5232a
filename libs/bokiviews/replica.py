"""The views of a group of objects in one process, and the changes that its callers append together.

While a record is being appended, the changes of further callers wait. Then they go into one record,
or into a few if they are large (CORFU, TOCS 2013, section 4.4: seven commands share an entry). So
under load a record holds the changes of many callers. A caller that is alone waits for no other.
`Views`, objects and transactions share a `ViewsReplica`, which runs a `ViewsState` by
`indilog.replayed`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from itertools import chain
from typing import Final

from bokiviews.errors import NotHostedError, ViewKindError
from bokiviews.machine import AnyMachine, Hosting
from bokiviews.records import Change, ChangeList, decode_stored, encode_changes, stream_of
from bokiviews.state import ChangeOutcome, ViewsState
from indilog import (
    AppendOutcomeUnknownError,
    DataLossError,
    Entry,
    IndilogError,
    Log,
    TooLargeError,
    TrimmedError,
)
from indilog.replayed import Replica, ReplicaCache
from indilog.sdk import Event, SeqNum, run_to_end

CHECKPOINT_EVERY: Final = 256
"""Smallest number of a group's records between two checkpoints."""
CHANGES_MAX: Final = 1024
"""Largest number of changes that are appended at once."""
BYTES_MAX: Final = 256 * 1024
"""Largest number of bytes of changes in one record. A single change may be larger."""
RECORDS_MAX: Final = 8
"""Largest number of records that are appended at once."""
_OVERHEAD_BYTES: Final = 32
"""Approximate number of bytes of a command besides its content and keys."""
_GROUPS_MAX: Final = 256
"""Largest number of groups in memory for one platform; the least recently used is evicted first."""
TURN_S: Final = 5.0
"""Seconds after which the transactions in conflict no longer wait for the one that has its turn."""
_WAIT_S: Final = 30.0
"""Longest wait of one read for new records, in seconds."""

_HAS_TURN: ContextVar[bool] = ContextVar("bokiviews_turn", default=False)
"""Whether the caller runs inside a transaction that has its turn."""


class _Submission:
    """A change of one caller, until its outcome or an error is known."""

    __slots__ = ("bytes", "change", "error", "outcome")

    def __init__(self, change: Change) -> None:
        self.change = change
        self.bytes = len(change.reads) + sum(
            len(one.content) + len(one.keys) + _OVERHEAD_BYTES for one in change.commands
        )
        self.outcome: ChangeOutcome | None = None
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.outcome is not None or self.error is not None


class ViewsReplica:
    """The views of one group in this process.

    Args:
        log: name of the log.
        group: name of the group.
        hosting: the objects of which the process keeps views.
    """

    def __init__(self, log: str, group: str, hosting: Hosting) -> None:
        self._hosting = hosting
        self._waiting: deque[_Submission] = deque()
        """Changes that are in no record yet."""
        self._appending: Event | None = None
        """Event that is set when the records being appended are decided; None: none is being
        appended.
        """
        self._changes_max = CHANGES_MAX
        self._is_saving = False
        self._turn: Event | None = None
        self._fresh_at = float("-inf")
        """When the last successful fresh read began, in the time of `seconds_now`."""
        self._replica = Replica[ViewsState, tuple[ChangeOutcome, ...]](
            stream_of(log, group),
            lambda: ViewsState(hosting),
            lambda content: ViewsState(hosting, decode_stored(content)),
            checkpoint_every=CHECKPOINT_EVERY,
        )

    # --- reading

    @property
    def state(self) -> ViewsState:
        """The state, as of the records read so far."""
        return self._replica.state

    @property
    def end(self) -> SeqNum:
        """Records below this seqnum are applied."""
        return self._replica.end

    def machine(self, name: str, kind: type[AnyMachine]) -> AnyMachine | None:
        """Return the state of an object; None: it does not exist.

        Raises:
            NotHostedError: this process does not host it.
            ViewKindError: the object has another kind.
        """
        if self._hosting.machine_of(name, kind.kind) is not kind:
            raise NotHostedError(
                f"This process keeps no view of object {name!r} as a {kind.kind}; name it in "
                "Views(hosts=), and its type in Views(machines=)."
            )
        found = self.state.kind_of(name)
        if found not in {None, kind.kind}:
            raise ViewKindError(name, str(found), kind.kind)
        return self.state.machine(name)

    async def sync(self, log: Log, within_s: float = 0.0) -> None:
        """Apply new records, so that the views include every record whose append returned more than
        `within_s` seconds before the call. With 0, reads of the views are then linearizable.

        Raises:
            DataLossError: a record of the group is lost.
            IndilogError: the errors of `Log.read_range`; or those of `ViewsState.apply`.
        """
        began = seconds_now()
        if within_s > 0 and began - self._fresh_at <= within_s:
            return
        await self._replica.catch_up(log, fresh=True)
        self._fresh_at = max(self._fresh_at, began)

    async def follow(self, log: Log) -> None:
        """Wait for new records, at most half a minute, and apply them."""
        with suppress(TrimmedError, DataLossError):  # the next read raises them, if they matter
            await log.read_next(self._replica.stream.tag, self.end, wait=_WAIT_S)
        await self._replica.catch_up(log)

    # --- changes

    async def submit(self, log: Log, change: Change) -> ChangeOutcome:
        """Append a change, possibly in one record with changes of other callers; return its
        outcome.

        If the caller is cancelled, a change that is in a record already may still take effect.

        Raises:
            AppendOutcomeUnknownError: the change may or may not take effect.
            IndilogError: as for `Log.append`; the change has no effect.
        """
        own = _Submission(change)
        self._waiting.append(own)
        try:
            while not own.is_over:
                if self._appending is not None:
                    await self._appending.wait()
                else:
                    await run_to_end(self._append_waiting(log))
        finally:
            if own in self._waiting:
                self._waiting.remove(own)
        if own.error is not None:
            raise own.error
        assert own.outcome is not None, "a submission that is over has an outcome or an error"
        await self._save_if_due(log)
        return own.outcome

    async def _append_waiting(self, log: Log) -> None:
        """Append the changes of callers that wait, in one batch of records, and decide them."""
        if self._appending is not None or not self._waiting:
            return
        self._appending = appending = Event()
        records = self._next_records()
        batch = [one for record in records for one in record]
        try:
            outcomes = await self._replica.append_batch(log, [*map(self._entry, records)])
            for one, outcome in zip(batch, chain(*outcomes), strict=True):
                one.outcome = outcome
            self._changes_max = min(2 * self._changes_max, CHANGES_MAX)
        except TooLargeError as error:
            self._retry_in_parts(batch, error)
        except Exception as error:  # noqa: BLE001 - each caller raises it
            _fail(batch, error)
        except BaseException:
            _fail(batch, AppendOutcomeUnknownError("The event loop ended during an append."))
            raise
        finally:
            self._appending = None
            appending.set()

    def _next_records(self) -> list[list[_Submission]]:
        """Take changes that wait, and return those of each record."""
        records = [[self._waiting.popleft()]]
        size = records[0][0].bytes
        for _ in range(min(len(self._waiting), self._changes_max - 1)):
            one = self._waiting[0]
            size += one.bytes
            if size > BYTES_MAX:
                if len(records) == RECORDS_MAX:
                    break
                records.append([])
                size = one.bytes
            records[-1].append(self._waiting.popleft())
        return records

    def _entry(self, record: list[_Submission]) -> Entry:
        changes = ChangeList(tuple([one.change for one in record]), self.state.is_full)
        return Entry(encode_changes(changes))

    def _retry_in_parts(self, batch: list[_Submission], error: TooLargeError) -> None:
        if len(batch) == 1:
            _fail(batch, error)
            return
        self._changes_max = max(1, len(batch) // 2)
        self._waiting.extendleft(reversed(batch))

    # --- turns of transactions in conflict

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Enter a block that one caller of this process runs at a time. A block inside another one
        does not wait. If a block takes longer than `TURN_S`, the next one begins beside it.
        """
        if _HAS_TURN.get():
            yield
            return
        while (before := self._turn) is not None:
            if not await before.wait_within(TURN_S) and self._turn is before:
                break
        self._turn = turn = Event()
        token = _HAS_TURN.set(True)
        try:
            yield
        finally:
            _HAS_TURN.reset(token)
            if self._turn is turn:
                self._turn = None
            turn.set()

    # --- checkpoints

    async def _save_if_due(self, log: Log) -> None:
        """Write a checkpoint if it is due. Errors of the log are suppressed, because the caller's
        change has taken effect, and a later checkpoint replaces this one.
        """
        if self._replica.is_save_due and not self._is_saving and self.state.is_full:
            self._is_saving = True  # before any await, so that only one of the callers saves
            with suppress(IndilogError):
                await run_to_end(self._save(log))

    async def _save(self, log: Log) -> None:
        try:
            await self._replica.save(log)
        finally:
            self._is_saving = False

    async def save(self, log: Log) -> None:
        """Write a checkpoint now, and trim the records that the previous one covers.

        Raises:
            NotHostedError: this process does not host all objects.
            IndilogError: the errors of `Log.append`, `Log.read_range` and `Log.trim`.
        """
        if not self.state.is_full:
            raise NotHostedError(
                "This process does not host all objects of the group, so it cannot write a "
                "checkpoint; let a process without Views(hosts=) write it."
            )
        await self._replica.save(log)


def _fail(batch: list[_Submission], error: BaseException) -> None:
    for one in batch:
        if not one.is_over:
            one.error = error


def seconds_now() -> float:
    """Return seconds of a clock that cannot be set and counts while the machine sleeps. The clock
    decides only whether to read.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_REPLICAS: Final[ReplicaCache[ViewsReplica]] = ReplicaCache(_GROUPS_MAX)


def replica_of(log: Log, group: str, hosting: Hosting) -> ViewsReplica:
    """Return the replica that all callers of a platform share in this process (`Log.scope`)."""
    key = (group, hosting)
    return _REPLICAS.get(log, key, lambda: ViewsReplica(log.name, group, hosting))
