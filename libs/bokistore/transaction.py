"""Transactions: read a snapshot, buffer writes, append one record; the log's order decides the
outcome.

Transactions are serializable in log order. A transaction takes effect at its record, if no object
that it read has changed between its snapshot and that record. A transaction that writes nothing
appends nothing. A snapshot is as of `Log.tail`, so it includes all transactions that committed
before the first read (strictly serializable).

A transaction with an id takes effect at most once, however often it runs. Of all records with the
id, only the first valid one commits, and every replay agrees. `Store` begins a `Transaction`, which
calls `ObjectReplay`, and `Contender` and `Group` if it waits in a line.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Never, Self

import msgspec

from bokistore.cache import Releases
from bokistore.checkpoints import is_due
from bokistore.document import (
    DeleteValue,
    Document,
    Json,
    Path,
    Pop,
    SetValue,
    Write,
    check_value,
    encode,
    steps_of,
)
from bokistore.errors import AlreadyCommittedError
from bokistore.groups import Group
from bokistore.lines import Contender, is_inside_body
from bokistore.log_lines import LogTurn, standing, wait_for_those_before
from bokistore.objects import (
    TxnObject,
    add_to_set_at,
    delete_at,
    increment_at,
    merge_at,
    push_at,
    set_at,
    transaction_ended,
)
from bokistore.records import (
    ObjectView,
    StoreCommand,
    decode_command,
    encode_command,
    id_tag_of,
    tag_of,
)
from bokistore.replay import ObjectReplay
from bokistore.tags import check_own, entry, index_of, with_tags
from bokistore.types import as_document
from indilog import (
    MAX_SEQNUM,
    ConflictError,
    IndilogError,
    Log,
    Record,
    TooLargeError,
    TrimmedError,
)
from indilog.sdk import SeqNum, append_outcome_unknown

_decode_write = msgspec.json.Decoder(Write).decode


class Transaction:
    """One transaction: `async with store.transaction() as txn`.

    Leaving the block commits; if the block raises, nothing is appended. `get` returns an object to
    read and write. A write without `get` (a blind write) never conflicts, and has no effect if it
    does not fit the object's value.

    With an id, the snapshot is taken on entering, and a record is appended even without writes. The
    `result` of the one that commits is then the result of all transactions with this id.

    Attributes:
        id: the id; None: it has none.
        seqnum: seqnum of its record after it has committed; None if it wrote nothing.
        result: with an id, the JSON value to record; set it inside the block.
        refusal: the error raised because a transaction with its id had already committed.

    Raises:
        ConflictError: on leaving: another transaction has changed an object that this one read.
            Nothing was changed; run it again (`Store.transact` does).
        AlreadyCommittedError: with an id, on entering or leaving: a transaction with this id has
            already committed, and this one changed nothing.
        AppendOutcomeUnknownError: on leaving: the transaction may have taken effect. With an id,
            run it again: it takes effect once.
        InvalidObjectError: on leaving: the result is not JSON; nothing was changed.
    """

    def __init__(
        self,
        log: Log,
        replay: ObjectReplay,
        txn_id: str | None = None,
        contender: Contender | None = None,
        *,
        hold: bool = False,
        releases: Releases | None = None,
        group: Group[Transaction] | None = None,
        log_turn: LogTurn | None = None,
        is_whole: bool = False,
    ) -> None:
        if txn_id is not None:
            id_tag_of(txn_id)  # refuses an invalid id
        self._log = log
        self._replay = replay
        self._contender = contender
        self._group = group
        self._log_turn = log_turn
        self._is_whole = is_whole
        """Whether this is the transaction of a group."""
        self._met: list[str] = []
        """Objects that have a line in the log in which this transaction must wait."""
        self._hold = hold
        self._ids: dict[str, Json] = {}
        """Results by id. The transaction of a group has the results of its members."""
        self._held: list[str] = []
        self._releases = Releases() if releases is None else releases
        self._released: list[str] = []
        self.id = txn_id
        self._horizons: list[SeqNum] = []
        """Concurrent first reads each ask for the tail; the first answer is used for all."""
        self._reads: dict[str, None] = {}
        self._objects: dict[str, TxnObject] = {}
        self._writes: dict[str, list[msgspec.Raw]] = {}
        self._is_over = False
        self.seqnum: SeqNum | None = None
        self.result: Json = None
        self.refusal: AlreadyCommittedError | None = None

    async def get(self, name: str) -> TxnObject:
        """Return an object as of the transaction's snapshot, with the transaction's own writes.

        It may be called for several objects concurrently. Repeated calls return the same object.

        Raises:
            MismatchError: an earlier blind write of this transaction does not fit the object.
            ConflictError: the object's history at the snapshot was trimmed.
        """
        self._check_open()
        tag_of(name)
        if name in self._objects:
            return self._objects[name]
        if self._contender is not None and await self._contender.arrive(name):
            await self._renew_horizon()
        horizon = await self.horizon()
        self._reads[name] = None  # from here on, the horizon must not change
        view = await self._view(name, horizon)
        if view.line and self._group is None:
            view = await self._honour(name, view)
        self._check_open()  # the transaction may have ended meanwhile
        if name not in self._objects:
            self._objects[name] = TxnObject(name, view, self._writes.setdefault(name, []))
        return self._objects[name]

    async def _honour(self, name: str, view: ObjectView) -> ObjectView:
        """Return the view to use for an object that has a line in the log.

        Raises:
            ConflictError: others are first in the line, so this transaction must enter it.
        """
        contender = self._contender
        if contender is None and not self._is_whole:
            return await self._wait_alone(name, view)
        if contender is not None and not contender.waits:
            return view
        now = await self._log.now()
        places = standing(view.line, now)
        if not places:
            self._replay.forget_line(name, view.seqnum)
            return view
        if self._log_turn is not None:
            if self._log_turn.token == places[0].token or name not in self._log_turn.names:
                return view
            self._log_turn.names.clear()  # the places have ended
        if contender is not None:
            contender.must_enter = True
        self._met.append(name)
        raise ConflictError(f"Others wait in line for {name!r}; run the transaction again.")

    async def _wait_alone(self, name: str, view: ObjectView) -> ObjectView:
        """Wait for the tokens in the line of the first object that a block reads, and take the
        snapshot again.
        """
        if self.id is not None or len(self._reads) > 1 or is_inside_body():
            return view
        await wait_for_those_before(self._log, self._replay, name)
        horizon = await self._log.tail()
        if len(self._reads) > 1:
            return view
        self._horizons[:] = [horizon]
        return await self._view(name, horizon)

    async def _view(self, name: str, horizon: SeqNum) -> ObjectView:
        """Return an object as of the snapshot, with the writes of the group so far.

        Raises:
            ConflictError: the object's history was trimmed, or the group has ended.
        """
        if self._group is not None:
            try:
                obj = None if self._group.is_over else await self._group.whole.get(name)
            except ConflictError:
                self._note_met(self._group.whole)
                raise
            if obj is None or self._group.is_over:
                raise ConflictError("The transaction took too long in its group; run it again.")
            return obj.view_now()
        try:
            return await self._replay.view(name, horizon - 1)
        except TrimmedError as error:
            if error.first_seqnum <= horizon:
                raise
            raise ConflictError(
                f"The value of {name!r} when the transaction began was trimmed; run it again."
            ) from error

    def _note_met(self, whole: Transaction) -> None:
        self._met = whole._met
        if self._met and self._contender is not None:
            self._contender.must_enter = True

    def can_add(self, member: Transaction, names_max: int) -> bool:
        """Tell whether a transaction that ran on top of this one can be added. It must not have the
        id of another member. It must have no blind writes, because the next member could not see
        their effect.
        """
        names = {name for name, listed in member._writes.items() if listed}
        total = {name for name, listed in self._writes.items() if listed} | names
        return (
            names <= member._reads.keys() and len(total) <= names_max and member.id not in self._ids
        )

    def add(self, member: Transaction) -> None:
        """Add the writes and the id of a transaction that ran on top of this one."""
        for name, listed in member._writes.items():
            for raw in listed:
                self._objects[name].write(_decode_write(raw))
        if member.id is not None:
            self._ids[member.id] = member.result
            if member._hold:
                self._held.append(member.id)

    async def commit(self) -> None:
        """End the block, and commit."""
        await self.__aexit__(None, None, None)

    async def find(self, tag: str) -> dict[str, TxnObject]:
        """Return the objects that have a tag, by name, as of the snapshot, with the transaction's
        own writes. `get` reads each of these objects, and the set of their names counts as read,
        too.

        Raises:
            ConflictError: as `get`.
        """
        index = await self.get(index_of(tag))
        found = {name: await self.get(name) for name in list(index)}
        return {name: obj for name, obj in found.items() if tag in obj.tags}

    async def remove_stale_names(self, tag: str, names: Iterable[str]) -> None:
        """Remove from the index of a tag the names of objects that have lost the tag."""
        index = index_of(tag)
        for name in names:
            if tag not in (await self.get(name)).tags:
                self._buffer(index, DeleteValue((name,)))

    async def horizon(self) -> SeqNum:
        """Return the first seqnum that is not visible; the first call decides it."""
        if not self._horizons:
            group = self._group
            horizon = await (self._log.tail() if group is None else group.whole.horizon())
            self._horizons.append(horizon)
        return self._horizons[0]

    async def _renew_horizon(self) -> None:
        """Take the snapshot again after waiting, unless the transaction has read in it already."""
        if self._reads:
            return
        horizon = await self._log.tail()
        if self.id is not None and await self._replay.find_committed(self.id, horizon - 1):
            return  # the commit is refused, because of the earlier horizon
        if not self._reads:
            self._horizons[:] = [horizon]

    async def changed_objects(self) -> list[str]:
        """Return the objects that this transaction read and others have changed since."""
        if self._met:
            return self._met
        if not self._horizons:
            return []
        if changed := self._known_changes():
            return changed
        for name in self._reads:
            with suppress(IndilogError):  # the next attempt finds out
                version = (await self._replay.view(name)).version
                if version is not None and version >= self._horizons[0]:
                    changed.append(name)
        return changed

    def _known_changes(self) -> list[str]:
        """Return the objects that this process knows to have changed since they were read."""
        return [
            name
            for name in self._reads
            if (version := self._replay.known_version(name)) is not None
            and version >= self._horizons[0]
        ]

    async def _refuse_if_changed(self) -> None:
        """Raise for a transaction that would surely conflict, so that it appends no record."""
        await self._replay.appends.wait(self._log.name, self._reads)
        if self._reads and self._known_changes():
            await self._refuse(MAX_SEQNUM)

    def put(self, name: str, value: object, *, tags: Iterable[str] = ()) -> None:
        """Replace the whole object and its tags; see `Store.put`."""
        document, indexes = with_tags(as_document(value), tags)
        check_value(document)
        self._write(name, SetValue((), document))
        for index in indexes:
            self._buffer(index, entry(name))

    def set(self, name: str, path: Path, value: Json) -> None:
        """Set the value at `path` of the object."""
        self._write(name, set_at(path, value))

    def increment(self, name: str, path: Path, by: float = 1) -> None:
        """Add `by` to the number at `path` of the object."""
        self._write(name, increment_at(path, by))

    def push(self, name: str, path: Path, value: Json, *, limit: int | None = None) -> None:
        """Append `value` to the list at `path`; beyond `limit` elements the oldest is removed."""
        self._write(name, push_at(path, value, limit))

    def add_to_set(self, name: str, path: Path, value: Json) -> None:
        """Add `value` to the list at `path`, unless the list contains it."""
        self._write(name, add_to_set_at(path, value))

    def pop(self, name: str, path: Path) -> None:
        """Remove the last element of the list at `path`; to get that element, `get` the object
        first.
        """
        self._write(name, Pop(steps_of(path)))

    def merge(self, name: str, path: Path, patch: Document) -> None:
        """Merge `patch` into the value at `path` of the object (RFC 7396)."""
        self._write(name, merge_at(path, patch))

    def delete(self, name: str, path: Path | None = None) -> None:
        """Remove the value at `path`; without a path, the object itself."""
        self._write(name, delete_at(path))

    def _write(self, name: str, write: Write) -> None:
        check_own(name)
        self._buffer(name, write)

    def _buffer(self, name: str, write: Write) -> None:
        self._check_open()
        if name in self._objects:
            self._objects[name].write(write)
            return
        tag_of(name)
        self._writes.setdefault(name, []).append(msgspec.Raw(encode(write)))

    def _check_open(self) -> None:
        if self._is_over:
            raise transaction_ended()

    async def __aenter__(self) -> Self:
        self._check_open()
        if self.id is not None:
            horizon = await self.horizon()
            await self._refuse_if_done(self.id, horizon - 1)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        for obj in self._objects.values():
            obj.close()
        if kind is None:
            await self._commit()

    async def _commit(self) -> None:
        """Append the record. It raises the errors named in the docstring of the class."""
        writes = {name: listed for name, listed in self._writes.items() if listed}
        if self.id is not None:
            check_value(self.result)
        if self._group is not None and self._contender is not None:
            await self._join(self._group, self._contender, writes)
            return
        if self.id is not None:
            self._ids[self.id] = self.result
            self._held += [self.id] if self._hold else []
        if not writes and not self._ids:
            return
        await self._refuse_if_changed()
        with self._replay.appends.changing(self._log.name, writes):
            await self._append(writes)

    async def _append(self, writes: dict[str, list[msgspec.Raw]]) -> None:
        if self._ids:
            self._released = self._releases.take(self._log.name)
        try:
            data, seqnum = await self._append_record(writes)
        except BaseException:
            self._releases.add(self._log.name, self._released)
            raise
        with append_outcome_unknown(seqnum):
            await self._decide(seqnum, data)

    async def _append_record(self, writes: dict[str, list[msgspec.Raw]]) -> tuple[bytes, SeqNum]:
        """Append the record, and return its data and seqnum. If it is too large with the released
        ids, append it without them; a later record then names them.
        """
        try:
            return await self._append_encoded(writes)
        except TooLargeError:
            if not self._released:
                raise
        self._releases.add(self._log.name, self._released)
        self._released = []
        return await self._append_encoded(writes)

    async def _append_encoded(self, writes: dict[str, list[msgspec.Raw]]) -> tuple[bytes, SeqNum]:
        data = self._encode(writes)
        tags = [*map(tag_of, writes), *dict.fromkeys(map(id_tag_of, [*self._ids, *self._released]))]
        return data, await self._log.append(data, tags=tags)

    async def _join(
        self, group: Group[Transaction], contender: Contender, writes: dict[str, list[msgspec.Raw]]
    ) -> None:
        """Commit as a part of a group."""
        result = b"" if self.id is None else encode(self.result)
        size = len(result) + sum(len(bytes(raw)) for listed in writes.values() for raw in listed)
        await group.join(self, contender, size)
        await self._see_record_of(group.whole)
        self.seqnum = group.whole.seqnum
        if self.id is not None:
            self.result = msgspec.json.decode(result)

    async def _see_record_of(self, whole: Transaction) -> None:
        """Let this session see the record of a group, which may be of another session."""
        if whole._log is not self._log:
            with suppress(IndilogError):  # it is committed, even if this session does not see it
                await self._log.tail()

    async def _decide(self, seqnum: SeqNum, data: bytes) -> None:
        """Decide the transaction of the record at `seqnum`, and cache the result."""
        command = decode_command(data)
        assert command is not None, "we encoded this command"
        assert self._is_over, "a transaction is decided after its block"
        committed, crowded = await self._replay.decide(Record(seqnum, b"", data, 0.0, 0.0), command)
        views = self._views_after(seqnum, command, len(data), crowded) if committed else {}
        costly = command.is_conditional and seqnum > command.horizon
        await self._replay.keep(views, seqnum, committed=committed, costly=costly)
        if not committed:
            # The process then knows the conflict, so transactions that wait append no record.
            for name in crowded & self._reads.keys():
                with suppress(IndilogError):
                    await self._replay.view(name, seqnum)
            await self._refuse(seqnum)
        if self._log_turn is not None:
            self._log_turn.note_left(command.leaves)
        for name in command.writes.keys() & self._objects.keys() - views.keys():
            with suppress(IndilogError):  # it is committed, whether the cache has the view or not
                await self._replay.view(name, seqnum)
        if self.id is not None:
            self.result = command.ids[self.id]
        self.seqnum = seqnum
        for name, view in filter(lambda kept: is_due(kept[1]), views.items()):
            await self._replay.checkpoint(name, view)

    def _encode(self, writes: dict[str, list[msgspec.Raw]]) -> bytes:
        """Return the record's data."""
        horizon = self._horizons[0] if self._horizons else 0
        turn = self._log_turn
        return encode_command(
            writes,
            tuple(self._reads),
            horizon,
            ids=self._ids,
            held=self._held,
            released=self._released,
            token="" if turn is None else turn.token,
            leaves=() if turn is None else [name for name in turn.names if name in writes],
        )

    async def _refuse(self, seqnum: SeqNum) -> Never:
        """Raise the error for the record at `seqnum`, which had no effect; `MAX_SEQNUM`: it was not
        appended.
        """
        if self.id is not None:
            await self._refuse_if_done(self.id, seqnum - 1)
        raise ConflictError(
            f"Another transaction changed one of {sorted(self._reads)} first; "
            "nothing was changed, run this one again."
        )

    async def _refuse_if_done(self, txn_id: str, bound: SeqNum) -> None:
        if (done := await self._replay.find_committed(txn_id, bound)) is not None:
            self.refusal = AlreadyCommittedError(txn_id, *done)
            raise self.refusal

    def _views_after(
        self, seqnum: SeqNum, command: StoreCommand, size: int, crowded: Container[str]
    ) -> dict[str, ObjectView]:
        """Return the views of the objects that were read and written, after the commit.

        They are computed from the record, as every replay does, unless there are other records
        between the snapshot and the commit, or the line changes.
        """
        return {
            name: self._replay.apply_command(held.view, command, name, seqnum, size)
            for name, held in self._objects.items()
            if name in command.writes and name not in crowded and name not in command.leaves
        }
