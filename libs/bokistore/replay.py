"""Replay of sub-streams to objects (thesis 2.3.3, Tango), with caches.

The order of the log alone determines an object's value as of a record, so every process gets the
same value. Views are cached in the process (`ViewCache`) and as aux data of records. If neither
cache has a view, replay starts at the last checkpoint. `Store`, `Snapshot`, `Transaction` and
`Collection` call `ObjectReplay`, which calls `Decisions` and `ObjectCheckpoints`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from bokistore.cache import ViewCache
from bokistore.checkpoints import CheckpointedView, ObjectCheckpoints, is_overdue
from bokistore.decisions import Decisions
from bokistore.document import Json, is_whole
from bokistore.log_lines import Line, entered, left
from bokistore.records import (
    UNWRITTEN,
    Aux,
    ConflictCheck,
    ObjectView,
    StoreCommand,
    checkpoint_in,
    decode_aux,
    decode_command,
    encode_aux,
    encode_command,
    id_tag_of,
    object_of,
    tag_of,
    view_in,
)
from bokistore.value import NO_EFFECT, ObjectDocument
from indilog import MAX_SEQNUM, DataLossError, IndilogError, Log, Record, TrimmedError
from indilog.sdk import SeqNum, name_loss

AUX_EVERY: Final = 8
"""After this many records without a view as aux data, the next write stores one. So a process
without a cache replays about that many records, and most operations do not need the extra call that
stores aux data.
"""
_PAGE: Final = 256


def is_followed_by_aux(view: ObjectView) -> bool:
    """Tell whether the next write after `view` stores its outcome as aux data."""
    return view.depth + 1 >= AUX_EVERY


class CommittedTransaction(NamedTuple):
    """The committed transaction with an id, and its recorded result."""

    seqnum: SeqNum
    result: Json


class ObjectReplay:
    """Reads the objects of one log, and decides its transactions."""

    def __init__(self, log: Log, cache: ViewCache) -> None:
        self._log = log
        self._cache = cache
        self._checkpoints = ObjectCheckpoints(log)
        self._decisions = Decisions(log, cache, self._checkpoints)
        self.appends = cache.appends

    async def view(
        self, name: str, bound: SeqNum = MAX_SEQNUM, *, may_append: bool = False
    ) -> ObjectView:
        """Return the object `name` as of the records with seqnum <= `bound` (-1: no records).

        Args:
            name: the object.
            bound: inclusive.
            may_append: whether to append a checkpoint after a long replay.

        Raises:
            TrimmedError: the object's history at `bound` was trimmed.
            DataLossError: a lost record may belong to the object's history. Replacing the whole
                object repairs the object.
        """
        floor = 0
        while True:
            try:
                return await self._view(name, bound, may_append=may_append)
            except TrimmedError as error:
                if not floor < error.first_seqnum <= bound + 1:
                    raise
                floor = error.first_seqnum  # a garbage collection trimmed it meanwhile
            except DataLossError as error:
                raise name_loss(f"Object {name!r} of log {self._log.name!r}", error) from error

    async def _view(self, name: str, bound: SeqNum, *, may_append: bool) -> ObjectView:
        try:
            newest = await self._log.read_prev(tag_of(name), bound) if bound >= 0 else None
        except TrimmedError as error:
            if bound < error.first_seqnum - 1:
                raise
            return await self._checkpoints.at_floor(name, error.first_seqnum)
        if newest is None:
            return UNWRITTEN
        base = self._cache.view(self._log.name, name, newest.seqnum)
        if base is not None and base.seqnum == newest.seqnum:
            return base
        aux = decode_aux(newest.aux)
        view = view_in(aux, name, newest.seqnum)
        if view is None:
            view = await self._replay_from_earlier(name, newest, base)
            if may_append and is_overdue(view):
                await self.checkpoint(name, view)
            assert view.seqnum == newest.seqnum, "a replay ends at the newest record"
            # The last record of the sub-stream took effect iff its seqnum is the object's version.
            committed = view.version == newest.seqnum
            await self.keep({name: view}, newest.seqnum, committed=committed, aux=aux)
        else:
            self._cache.keep_view(self._log.name, name, view)
        return view

    def known_version(self, name: str) -> SeqNum | None:
        """Return the version of the newest cached view of an object; None: the cache has no view,
        or the object had no write.
        """
        view = self._cache.view(self._log.name, name, MAX_SEQNUM)
        return None if view is None else view.version

    def known_line(self, name: str) -> Line:
        """Return the line in the newest view of an object in the cache."""
        view = self._cache.view(self._log.name, name, MAX_SEQNUM)
        return () if view is None else view.line

    def forget_line(self, name: str, seqnum: SeqNum) -> None:
        """Remove all places from the newest cached view of an object, if that view is as of
        `seqnum`. The caller knows that the places have ended.
        """
        view = self._cache.view(self._log.name, name, MAX_SEQNUM)
        if view is not None and view.seqnum == seqnum and view.line:
            self._cache.keep_view(self._log.name, name, view._replace(line=()))

    def tag(self, name: str) -> str:
        """Return the tag of an object's records."""
        return tag_of(name)

    async def line(self, name: str) -> tuple[SeqNum, Line]:
        """Return the last record of an object's sub-stream, and the line as of that record."""
        view = await self.view(name)
        return view.seqnum, view.line

    async def append_line(
        self, token: str, *, enters: Sequence[str] = (), leaves: Sequence[str] = ()
    ) -> None:
        """Append a record by which a token enters and leaves lines."""
        data = encode_command({}, token=token, enters=enters, leaves=leaves)
        await self._log.append(data, tags=list(map(tag_of, (*enters, *leaves))))

    async def checkpoint(self, name: str, view: ObjectView) -> CheckpointedView | None:
        """Append a checkpoint of an object; None: the append failed, so later replays take
        longer.
        """
        stored = await self._checkpoints.append(name, view)
        if stored is not None and stored.seqnum == view.seqnum + 1:
            newest = view._replace(seqnum=stored.seqnum, depth=view.depth + 1, age=0)
            self._cache.keep_view(self._log.name, name, newest)
        return stored

    async def advance(self, name: str, view: ObjectView, record: Record) -> ObjectView:
        """Return the object as of `record`; `view` is as of the previous record of the object's
        sub-stream.
        """
        return await self._replay_records(name, view, [record])

    async def advance_all(
        self, name: str, view: ObjectView, records: Sequence[Record]
    ) -> ObjectView:
        """Return the object as of the last of `records`, which follow `view` in the object's
        sub-stream.
        """
        return await self._replay_records(name, view, records) if records else view

    def apply_command(
        self, view: ObjectView, command: StoreCommand, name: str, seqnum: SeqNum, size: int
    ) -> ObjectView:
        """Return the object after an effective command of `size` bytes at `seqnum`; `view` is the
        object before the command.
        """
        assert seqnum > view.seqnum, "a command follows the view that it changes"
        value = ObjectDocument(name, view.document)
        self._apply_writes(value, command, size)
        return ObjectView(seqnum, seqnum, value.text(), view.depth + 1, view.age + 1, view.line)

    async def keep(
        self,
        views: Mapping[str, ObjectView],
        seqnum: SeqNum,
        *,
        committed: bool,
        costly: bool = False,
        aux: Aux | None = None,
    ) -> None:
        """Cache views as of the record at `seqnum`. Periodically, also store those without a line
        as aux data of this record.

        Args:
            views: views by object name.
            seqnum: the record.
            committed: whether the record's command took effect.
            costly: whether reads were needed for the outcome; storing the outcome saves other
                processes these reads.
            aux: the present aux data of the record.
        """
        data = None
        stored = {name: view for name, view in views.items() if not view.line}
        if costly or any(view.depth >= AUX_EVERY for view in stored.values()):
            data = encode_aux(stored, before=aux, committed=committed)
        if data is not None:
            try:
                await self._log.set_aux(seqnum, data)
            except IndilogError:
                data = None  # aux data is only a cache; the caller's operation has succeeded
        for name, view in views.items():
            kept = view._replace(depth=0) if data is not None and name in stored else view
            self._cache.keep_view(self._log.name, name, kept)

    async def _replay_from_earlier(
        self, name: str, newest: Record, base: ObjectView | None
    ) -> ObjectView:
        """Return the view at `newest`, replayed from the nearest earlier view.

        Without a cache, this takes two calls if the last checkpoint is at most one page before
        `newest`.
        """
        if not (base and base.line) and await self._replaces_whole(newest, name):
            return await self._replay_records(name, UNWRITTEN, [newest])
        view, page = base or UNWRITTEN, list[Record]()
        if base is not None:
            view, page = await self._page(name, base, newest)
        if not page or page[-1].seqnum < newest.seqnum:
            kept = await self._checkpoints.newest(name, newest.seqnum)
            if kept is not None and kept.view.seqnum > view.seqnum:
                view, page = kept.view, []
        while view.seqnum < newest.seqnum:
            if not page:
                view, page = await self._page(name, view, newest)
            if not page:
                raise DataLossError(f"Record {newest.seqnum} of {name!r} has disappeared.")
            view, page = await self._replay_records(name, view, page), []
        return view

    async def _page(
        self, name: str, base: ObjectView, newest: Record
    ) -> tuple[ObjectView, list[Record]]:
        """Return records up to `newest`, and the view before them, which is `base` or the view at
        the floor.

        Raises:
            TrimmedError: `newest` itself was trimmed meanwhile.
        """
        try:
            page = await self._log.read_range(tag_of(name), base.seqnum + 1, limit=_PAGE)
        except TrimmedError as error:
            if error.first_seqnum > newest.seqnum:
                raise
            base = await self._checkpoints.at_floor(name, error.first_seqnum)
            page = await self._log.read_range(tag_of(name), base.seqnum + 1, limit=_PAGE)
        assert base.seqnum < newest.seqnum, "a page follows its view"
        return base, [record for record in page if record.seqnum <= newest.seqnum]

    async def _replaces_whole(self, record: Record, name: str) -> bool:
        """Tell whether `record` replaces or deletes the whole object."""
        command = decode_command(record.data)
        if command is None or not any(map(is_whole, command.writes.get(name, ()))):
            return False
        return await self.is_committed(record, command)

    async def _replay_records(
        self, name: str, base: ObjectView, records: Sequence[Record]
    ) -> ObjectView:
        """Return the view after `records`, which follow `base` in the object's sub-stream."""
        assert records, "a view is after some record"
        assert records[0].seqnum > base.seqnum, "the records follow the view"
        start, view = 0, base
        for place in range(len(records) - 1, -1, -1):
            aux = decode_aux(records[place].aux)
            if kept := view_in(aux, name, records[place].seqnum):
                start, view = place + 1, kept
                break
        value = ObjectDocument(name, view.document)
        version, age, line = view.version, view.age, view.line
        for record in records[start:]:
            command = decode_command(record.data)
            age = 0 if checkpoint_in(command, name) else age + 1
            if command is None:
                continue
            if name in command.writes:
                if not await self._is_effective(record, command, name, version):
                    continue
                self._apply_writes(value, command, len(record.data))
                version = record.seqnum
            if name in command.enters:
                line = entered(line, command.token, record.ordered_at)
            if name in command.leaves:
                line = left(line, command.token, record.ordered_at)
        assert version is None or version <= records[-1].seqnum, "a version is a record"
        return ObjectView(
            seqnum=records[-1].seqnum,
            version=version,
            document=value.text(),
            depth=view.depth + len(records) - start,
            age=age,
            line=line,
        )

    async def _is_effective(
        self, record: Record, command: StoreCommand, name: str, version: SeqNum | None
    ) -> bool:
        """Tell whether `command` takes effect; `version` is the last committed write of `name`
        before it.
        """
        if name in command.reads:
            if version is not None and version >= command.horizon:
                self._decisions.keep(record.seqnum, committed=False)
                return False
            if len(command.checks()) == 1:
                return True
        return await self.is_committed(record, command)

    def _apply_writes(self, value: ObjectDocument, command: StoreCommand, size: int) -> None:
        """Apply the writes of a command to an object; the command has at most `size` bytes."""
        for write in command.writes[value.name]:
            with suppress(*NO_EFFECT):  # its caller got this error
                value.apply(write, size)

    async def find_committed(self, txn_id: str, bound: SeqNum) -> CommittedTransaction | None:
        """Return the committed transaction with an id among the records up to `bound`; None if
        there is none, or if it was collected.
        """
        check = ConflictCheck(id_tag_of(txn_id), txn_id)
        start = self._cache.floor(self._log.name, check.tag)
        while start <= bound:
            try:
                page = await self._log.read_range(check.tag, start, limit=_PAGE)
            except TrimmedError as error:
                start = error.first_seqnum
                self._cache.keep_floor(self._log.name, check.tag, start)
                continue
            for record in page:
                command = decode_command(record.data) if record.seqnum <= bound else None
                if command is None or not command.concerns(check):
                    continue
                if await self.is_committed(record, command):
                    return CommittedTransaction(record.seqnum, command.ids.get(txn_id))
            start = page[-1].seqnum + 1 if page else bound + 1
        return None

    async def is_committed(self, record: Record, command: StoreCommand) -> bool:
        """Tell whether the command in `record` takes effect."""
        return await self._decisions.is_committed(record, command)

    async def decide(self, record: Record, command: StoreCommand) -> tuple[bool, frozenset[str]]:
        """Tell whether the command in `record` takes effect, and which of the objects that it read
        may have further records between its horizon and `record`.
        """
        crowded: set[str] = set()
        committed = await self._decisions.is_committed(record, command, crowded)
        return committed, frozenset(filter(None, map(object_of, crowded)))
