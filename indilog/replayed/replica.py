"""One process's copy of a state that is derived from the records of one sub-stream.

A library subclasses `State`, appends commands through a `Replica`, and calls its `save` when a
checkpoint is due. `indilog.replayed.checkpoints` stores the checkpoints.
"""

from __future__ import annotations

import abc
import asyncio  # noqa: TID251 - large states are encoded in a thread
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import msgspec

from indilog.base.errors import AppendOutcomeUnknownError, DataLossError, TrimmedError
from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.base.log import Entry, Log, Record
from indilog.replayed.checkpoints import (
    Checkpoint,
    SubStream,
    append_checkpoint,
    find_furthest,
    read_content,
)
from indilog.sdk.event import Event
from indilog.sdk.losses import name_loss
from indilog.sdk.outcomes import append_outcome_unknown, check_own_append

CHECKPOINT_EVERY: Final = 256
"""Default for the smallest number of records between two checkpoints."""
_ITEMS_PER_RECORD: Final = 4
"""Checkpoints of a large state are due after one new record for each 4 items in the state. So
checkpoints and records cost about the same.
"""
_UNREAD_MAX: Final = 64
"""Newest records that are never trimmed, because the processes that appended them may not have read
their outcomes yet.
"""
_REST_MIN: Final = 2
"""A checkpoint trims only records that the previous one covers. If a checkpoint covers more new
records than this number times `checkpoint_every`, another one may follow early and trim these
records.
"""
_OUTCOMES_MAX: Final = 65_536
"""Largest number of outcomes kept while appends are in flight."""
_PAGE: Final = 1000
_LOADS_MAX: Final = 8
"""Largest number of searches for a checkpoint. A search is repeated if a later checkpoint has
replaced the one that was found.
"""
_ITEMS_IN_THREAD: Final = 10_000
"""Number of items from which a state is encoded in a thread."""

_OutcomeT = TypeVar("_OutcomeT")
_StateT = TypeVar("_StateT", bound="State[Any]")


class State(abc.ABC, Generic[_OutcomeT]):
    """A state that is derived from the records of one sub-stream, in log order.

    All processes derive the same state, so `apply` may depend on nothing but the records. It uses
    no clock (time is `record.ordered_at`), no randomness, and no configuration of the process.
    """

    @abc.abstractmethod
    def apply(self, record: Record) -> _OutcomeT:
        """Apply the next record of the sub-stream; return its outcome.

        The process that appended the record gets the outcome. `apply` is also called with records
        that another program wrote, and with commands that have no effect.

        Raises:
            IndilogError: a later version wrote the record; the state is unchanged.
        """

    @abc.abstractmethod
    def snapshot(self) -> object:
        """Return the whole state, as a value that `msgspec` encodes and that no later `apply`
        changes. The event loop waits for it, so it should take microseconds an item.
        """

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of items in a snapshot. A checkpoint is due after `size` / 4 records at the
        earliest. It may be due sooner if the last one left records untrimmed.
        """

    def may_elect(self) -> bool:
        """Whether the author of the last applied record may be the one that writes a checkpoint.

        The author is the process that appended the record. False if that process keeps no replica.
        A checkpoint that is due then waits for the next record for which this is true.
        """
        return True

    def needed_from(self, end: SeqNum) -> SeqNum:
        """Return the seqnum of the first record below `end` that the library may still read. A
        checkpoint does not trim the records from there on, although it covers those below `end`. If
        there is no such record, return `end`.

        The replica may call this method after each record, so it takes constant time.
        """
        return end


class Replica(Generic[_StateT, _OutcomeT]):
    """The state of a sub-stream in this process, as of the records that it has read.

    Coroutines share a replica. If several of them wait for records, one of them reads for all. A
    replica awaits only the log, so it also runs without an event loop (`indilog.testing.stepper`).

    Args:
        stream: the tags, the format of checkpoints, and the name in error messages.
        empty: returns the state before the first record.
        restore: returns the state of an encoded snapshot (MessagePack).
        checkpoint_every: smallest number of records between two checkpoints (2 or more).
        on_record: called with each record that is applied.

    Attributes:
        stream: as given.
        state: the state.
        end: records below this seqnum are applied.
        unsaved: number of records applied since the last known checkpoint.
        covered: the value of `end` when the last checkpoint but one became due; 0: not known. The
            records from this seqnum on may be kept for processes with appends in flight.
    """

    def __init__(
        self,
        stream: SubStream,
        empty: Callable[[], _StateT],
        restore: Callable[[bytes], _StateT],
        *,
        checkpoint_every: int = CHECKPOINT_EVERY,
        on_record: Callable[[Record], object] | None = None,
    ) -> None:
        assert checkpoint_every >= 2, "a checkpoint covers more than the record that made it due"
        self.stream = stream
        self.state = empty()
        self.end: SeqNum = 0
        self.unsaved = 0
        self.covered: SeqNum = 0
        self._last_due: SeqNum = 0
        """The value of `end` when a checkpoint became due last; or `end` of the checkpoint that was
        loaded. Early checkpoints do not count.
        """
        self._due_count = 0
        """The value of `_count` when `end` was `_last_due`."""
        self._has_rest = False
        """Whether the last checkpoint left many records untrimmed, so that the next one may be due
        early (`_note_due`).
        """
        self._restore = restore
        self._every = checkpoint_every
        self._on_record = on_record
        self._count = 0
        """Number of records applied since the sub-stream began."""
        self._marked = 0
        """The value of `_count` when a checkpoint became due last, as in `CheckpointPart`. After a
        load it may be less than `_due_count`, because a checkpoint may be written late.
        """
        self._elected = False
        self._seen: SeqNum = 0
        """Records below this seqnum are applied, or belong to other tags."""
        self._reading: Event | None = None
        self._fresh_begun = 0
        """Number of fresh reads that have begun."""
        self._fresh_ended = 0
        """The last fresh read that has succeeded, by number."""
        self._appending: dict[object, SeqNum] = {}
        """For each append in flight, a seqnum at or below that of its record; ascending."""
        self._outcomes: OrderedDict[SeqNum, _OutcomeT] = OrderedDict()
        """Outcomes of records that may belong to appends in flight."""
        self._due: set[SeqNum] = set()
        """Records that made a checkpoint due and may belong to appends in flight."""
        self._saving: Event | None = None
        self._saved: SeqNum = 0
        """The last checkpoint that was stored here covers the records below this seqnum."""

    # --- reading

    async def catch_up(self, log: Log, own: SeqNum = -1, *, fresh: bool = False) -> None:
        """Apply new records: those up to `own`, or all that the session of `log` sees.

        Args:
            log: log of the sub-stream.
            own: a record of the sub-stream that the session of `log` appended; -1: there is none.
            fresh: whether to see all records whose append has returned in any session. Callers that
                wait at the same time share one such read.

        Raises:
            DataLossError: a record that the state needs is lost, and no checkpoint covers it; the
                message names the state.
            NotReadyError: the read did not return the record at `own`.
            TrimmedError: the whole log was trimmed, and with it the history of the state.
        """
        needed = self._fresh_begun + 1  # a read that has begun may miss records appended since
        while not (self._fresh_ended >= needed if fresh else self.end > own >= 0):
            if self._reading is not None:
                await self._reading.wait()
                continue
            self._reading = reading = Event()
            self._fresh_begun += fresh
            try:
                await self._read(log, own, fresh=fresh)
                self._fresh_ended = self._fresh_begun if fresh else self._fresh_ended
            finally:
                self._reading = None
                reading.set()
            return

    @property
    def known(self) -> SeqNum:
        """The seqnum below which all records of the sub-stream are applied."""
        return max(self.end, self._seen)

    async def catch_up_to(self, log: Log, until: SeqNum, *, is_in_session: bool = False) -> None:
        """Apply the records below `until`; later records of the same page are applied, too.

        Args:
            log: log of the sub-stream.
            until: seqnum where to stop.
            is_in_session: whether the session of `log` sees all records below `until`. Otherwise
                `until` may come from another session, so an empty read is repeated with `fresh`.

        Raises:
            IndilogError: as for `catch_up`.
        """
        while self.known < until:
            if self._reading is not None:
                await self._reading.wait()
                continue
            self._reading = reading = Event()
            try:
                await self._read_to(log, until, is_in_session=is_in_session)
            finally:
                self._reading = None
                reading.set()

    async def _read_to(self, log: Log, until: SeqNum, *, is_in_session: bool) -> None:
        is_fresh = False
        while self.known < until:
            page = await self._read_page(log, fresh=is_fresh)
            if page == [] and (is_in_session or is_fresh):
                self._seen = until
            is_fresh = page == []

    async def _read(self, log: Log, own: SeqNum, *, fresh: bool) -> None:
        """Read page by page. A short page need not be the last, because pages are also limited in
        bytes. Only the first read needs to be fresh: the session then sees the same records.
        """
        is_fresh = fresh
        while True:
            page = await self._read_page(log, fresh=is_fresh)
            is_fresh = False
            if page == []:
                check_own_append(own, self.end)
                return
            if page is not None and self.end > own >= 0:
                return

    async def _read_page(self, log: Log, *, fresh: bool) -> list[Record] | None:
        """Read and apply the next records; None: the state continues from a checkpoint."""
        try:
            page = await log.read_range(self.stream.tag, self.end, limit=_PAGE, fresh=fresh)
        except TrimmedError as error:
            await self._continue_from_checkpoint(log, error)
            return None
        except DataLossError as error:
            await self._pass_loss(log, error)
            return None
        if len(page) == _PAGE and not self._count:  # a checkpoint may save most of the reading
            await self._load(log)
        for record in page:
            self._apply(record)
        return page

    async def _continue_from_checkpoint(self, log: Log, error: TrimmedError) -> None:
        """Load a checkpoint, because records that are not applied were trimmed."""
        # A checkpoint is appended before records are trimmed, but a session may see the trim first.
        # When the session sees the checkpoint, a later one may have replaced it. So this method
        # searches again as long as the tail grows.
        lost: DataLossError | None = None
        tail: SeqNum = -1
        for _ in range(_LOADS_MAX):
            before, tail = tail, await log.tail()
            if tail == before:
                break
            lost = await self._load(log)
            if self.end >= error.first_seqnum:
                return
        if lost is None:
            raise error
        raise name_loss(self.stream.what, lost) from error

    async def _pass_loss(self, log: Log, error: DataLossError) -> None:
        """Load a checkpoint that covers more than is applied here, because a record is lost.

        If the checkpoint does not cover the lost record, the next read meets the loss again.

        Raises:
            DataLossError: no checkpoint covers more than is applied here.
        """
        before = self.end
        await log.tail()  # the session then sees every checkpoint that was acknowledged
        await self._load(log)
        if self.end == before:
            raise name_loss(self.stream.what, error) from error

    async def _load(self, log: Log) -> DataLossError | None:
        """Continue from the checkpoint that covers the most, if it covers more than is applied
        here. If a lost checkpoint may cover even more, return that loss.
        """
        lost: DataLossError | None = None
        for _ in range(_LOADS_MAX):
            kept, lost = await find_furthest(log, self.stream)
            if kept is None or kept.end <= self.end:
                break
            content = await read_content(log, self.stream, kept)
            if content is not None:
                self.state = self._restore(content)
                self.end, self._count, self._marked = kept.end, kept.count, kept.marked
                self._last_due, self._due_count, self._has_rest = kept.end, kept.count, True
                self.unsaved = self.covered = 0
                break
        return lost

    def _apply(self, record: Record) -> None:
        if record.seqnum < self.end:
            return
        outcome: _OutcomeT = self.state.apply(record)
        self.end = record.seqnum + 1
        self._count += 1
        self.unsaved += 1
        if self.state.may_elect() and self._note_due() and self._appending:
            self._due.add(record.seqnum)
        if self._appending:
            self._outcomes[record.seqnum] = outcome
            if len(self._outcomes) > _OUTCOMES_MAX:
                self._outcomes.popitem(last=False)
        if self._on_record is not None:
            self._on_record(record)

    def _note_due(self) -> bool:
        """Tell whether the last applied record makes a checkpoint due.

        A checkpoint is due after `_records_between_checkpoints()` records. If it leaves many
        records untrimmed, an early checkpoint is due as soon as these records are not needed any
        more. Without the early one, the records of a state that has become empty would stay until
        the state is used again.
        """
        if self._count - self._marked >= self._records_between_checkpoints():
            rest = self._count - self._due_count
            self._marked = self._due_count = self._count
            self.covered, self._last_due = self._last_due, self.end
            is_pinned = self.state.needed_from(self.end) < self.covered
            self._has_rest = is_pinned or rest > _REST_MIN * self._every
            return True
        if not self._has_rest:
            return False
        kept_from = self._kept_from()
        if not kept_from or self.state.needed_from(self.end) < kept_from:
            return False
        self._has_rest = False
        return True

    def _kept_from(self) -> SeqNum:
        """Return the seqnum from which records are kept for processes with appends in flight."""
        is_old = self._count - self._due_count >= min(_UNREAD_MAX, self._every)
        return self._last_due if is_old else self.covered

    def _records_between_checkpoints(self) -> int:
        return max(self._every, self.state.size // _ITEMS_PER_RECORD)

    # --- appending

    async def append(self, log: Log, data: bytes, *, tags: Sequence[UserTag] = ()) -> _OutcomeT:
        """Append a command, apply the records up to it, and return the outcome of `State.apply`.

        Args:
            log: log of the sub-stream.
            data: the command as the library encodes it.
            tags: further tags of the record.

        Raises:
            AppendOutcomeUnknownError: as for `Log.append`; or the command was appended, and its
                outcome cannot be read now.
            IndilogError: as for `Log.append`; nothing was appended.
        """
        return (await self.append_batch(log, [Entry(data, tuple(tags))]))[0]

    async def append_batch(self, log: Log, commands: Sequence[Entry]) -> list[_OutcomeT]:
        """Do the same as `append` for several commands, which are appended atomically.

        Args:
            log: log of the sub-stream.
            commands: encoded commands, each with its further tags.
        """
        entries = [Entry(entry.data, (self.stream.tag, *entry.tags)) for entry in commands]
        with self._awaiting_outcomes():
            if len(entries) == 1:
                places = [await log.append(entries[0].data, tags=entries[0].tags)]
            else:
                places = await log.append_batch(entries)
            with append_outcome_unknown(places[-1]):
                await self.catch_up(log, own=places[-1])
            self._elected = self._elected or not self._due.isdisjoint(places)
            try:
                return [self._outcomes[place] for place in places]
            except KeyError as error:
                raise AppendOutcomeUnknownError(
                    f"{self.stream.what}: the command at {places[0]} was trimmed before its "
                    "outcome could be read; read the state again."
                ) from error

    @contextmanager
    def _awaiting_outcomes(self) -> Iterator[None]:
        """Enter a block with an append in flight, during which outcomes are kept."""
        append = object()
        self._appending[append] = self.end
        try:
            yield
        finally:
            del self._appending[append]
            needed_from = next(iter(self._appending.values()), MAX_SEQNUM)
            while self._outcomes and next(iter(self._outcomes)) < needed_from:
                self._outcomes.popitem(last=False)
            if not self._appending:
                self._due.clear()

    # --- checkpoints

    @property
    def is_save_due(self) -> bool:
        """Whether this process should write a checkpoint, because its own record made one due.

        So each due checkpoint is written by one process. If that process crashes first, the next
        checkpoint is due as usual.
        """
        return self._elected

    async def save(self, log: Log) -> bool:
        """Append a checkpoint, and trim records that the previous checkpoint covers.

        Returns whether a checkpoint in the log covers all records applied before this call. If so,
        no process starts from an earlier state, and the library may trim records of its other
        sub-streams that only earlier states need.

        The newest records are not trimmed, so processes with appends in flight can still read their
        outcomes. Several processes may write checkpoints at once. Each checkpoint is correct, and
        the one that covers the most records stays, so it covers all trimmed records. If a lost
        checkpoint may cover more records, nothing is trimmed, because that checkpoint may become
        readable again.

        A replica writes one checkpoint at a time. If one is being written, a further caller waits
        for it, and writes its own only if that one lacks records applied before this call.

        If `save` fails, the state is unharmed, and the next checkpoint is due as usual.

        Raises:
            IndilogError: the errors of `Log.append`, `Log.read_range` and `Log.trim`.
        """
        self._elected = False
        wanted, has_waited = self.end, False
        while self._saving is not None:
            await self._saving.wait()
            has_waited = True
        if has_waited and self._saved >= wanted:
            return True
        self._saving = saving = Event()
        try:
            return await self._save(log)
        finally:
            self._saving = None
            saving.set()

    async def _save(self, log: Log) -> bool:
        self.unsaved = 0
        size, snapshot = self.state.size, self.state.snapshot()
        end, count, marked = self.end, self._count, self._marked
        needed_from = self.state.needed_from(end)
        assert needed_from <= end, "records that are not applied are needed"
        trimmed_to = min(needed_from, self._kept_from())
        content = await _encode(snapshot, size)
        before = (await find_furthest(log, self.stream)).furthest
        if before is None or before.end < end:
            await append_checkpoint(log, self.stream, Checkpoint(end, count, marked, content))
        found = await find_furthest(log, self.stream)
        if found.lost is not None or found.furthest is None:
            return False
        await log.trim(found.furthest.place, tag=self.stream.checkpoints_tag)
        if before is not None and before.end < found.furthest.end:
            await log.trim(min(before.end, trimmed_to), tag=self.stream.tag)
        if found.furthest.end < end:
            return False
        self._saved = end
        return True


async def _encode(snapshot: object, size: int) -> bytes:
    """Encode a snapshot; in a thread if it is large and an event loop is running."""
    if size < _ITEMS_IN_THREAD:
        return msgspec.msgpack.encode(snapshot)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return msgspec.msgpack.encode(snapshot)
    return await asyncio.to_thread(msgspec.msgpack.encode, snapshot)
