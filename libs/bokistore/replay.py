"""From the log to objects and decisions (thesis 2.3.3, Tango): replay of sub-streams, with caches.

Two questions are answered, both by the log's order alone, so that every process answers alike:
what is an object as of a record (`view`), and did the transaction at a seqnum commit
(`committed`)? A transaction commits iff no object that it read has a committed write in
[its horizon, its seqnum). That is optimistic concurrency control with backward validation of the
whole read set, so transactions are serializable in log order, write skew included (PITFALLS 11:
Boki checks the write set only).

A transaction's id is validated like an object that it read and wrote: before it began, its author
looked below its horizon for a committed record with that id, so of all records with one id the
first that commits is the only one.

Views are cached in the process (`ViewCache`) and beside records (aux data); either may be empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from bokistore.cache import ViewCache
from bokistore.document import Document, Json, applied, encoded, is_whole
from bokistore.errors import MismatchError
from bokistore.records import (
    UNWRITTEN,
    Aux,
    Command,
    View,
    aux_decoded,
    aux_encoded,
    command_decoded,
    id_tag_of,
    tag_of,
    view_in,
)
from indilog.errors import DataLossError, IndilogError
from indilog.ids import MAX_SEQNUM, SeqNum
from indilog.log import Log, Record

AUX_EVERY: Final = 8
"""A view is kept as aux data after this many records without one: a process that knows nothing
of an object walks back about that far, and most operations are spared the extra call."""
_WALK_MAX: Final = 2 * AUX_EVERY
"""Steps back, one call each, before whole pages are read from the beginning."""
_PAGE: Final = 256

_decode = msgspec.json.decode


class Done(NamedTuple):
    """The one transaction with some id that committed, and the result that it recorded."""

    seqnum: SeqNum
    result: Json


@dataclasses.dataclass(slots=True)
class _Trial:
    """A transaction that is being decided.

    Attributes:
        tags: sub-streams still to be looked at; the last one is under way.
        bound: that one is clear above this seqnum.
        write: the latest record found there that may have committed.
    """

    seqnum: SeqNum
    horizon: SeqNum
    tags: list[str]
    bound: SeqNum
    write: Record | None = None


class Replay:
    """Answers questions about one log."""

    def __init__(self, log: Log, cache: ViewCache) -> None:
        self._log = log
        self._cache = cache

    async def view(self, name: str, bound: SeqNum = MAX_SEQNUM) -> View:
        """Return the object `name` as of the records with seqnum <= `bound` (-1: none)."""
        tag = tag_of(name)
        newest = await self._log.read_prev(tag, bound) if bound >= 0 else None
        if newest is None:
            return UNWRITTEN
        base = self._cache.view(self._log.name, name, newest.seqnum)
        if base is not None and base.seqnum == newest.seqnum:
            return base
        aux = aux_decoded(newest.aux)
        view = view_in(aux, name, newest.seqnum)
        if view is None:
            view = await self._replayed(name, newest, base)
            # The last record of the sub-stream took effect iff it is the object's version.
            committed = view.version == newest.seqnum
            await self.keep({name: view}, newest.seqnum, committed=committed, aux=aux)
        else:
            self._cache.keep_view(self._log.name, name, view)
        return view

    async def after(self, name: str, view: View, record: Record) -> View:
        """Return the object as of `record`, given it as of the record before in its sub-stream."""
        return await self._folded(name, view, [record])

    async def keep(
        self,
        views: Mapping[str, View],
        seqnum: SeqNum,
        *,
        committed: bool,
        costly: bool = False,
        aux: Aux | None = None,
    ) -> None:
        """Remember views as of the record at `seqnum`; now and then beside the record too.

        Args:
            views: by object; each is a fresh one, with its depth.
            seqnum: the record.
            committed: whether its command took effect.
            costly: this took reading to find out, so spare others the same.
            aux: what is beside the record already.
        """
        data = None
        if costly or any(view.depth >= AUX_EVERY for view in views.values()):
            data = aux_encoded(views, before=aux, committed=committed)
        if data is not None:
            try:
                await self._log.set_aux(seqnum, data)
            except IndilogError:
                data = None  # it is only a cache: what the caller asked for is done
        for name, view in views.items():
            kept = view._replace(depth=0) if data is not None else view
            self._cache.keep_view(self._log.name, name, kept)

    async def _replayed(self, name: str, newest: Record, base: View | None) -> View:
        """Return the view at `newest`, from the nearest view before it that can be found."""
        view = base or UNWRITTEN
        page = await self._page(name, view, newest) if base else []
        if not page or page[-1].seqnum < newest.seqnum:
            nearest, records = await self._walked_back(name, newest)
            if nearest is not None:
                return await self._folded(name, nearest, records)
        while view.seqnum < newest.seqnum:
            page = page or await self._page(name, view, newest)
            if not page:
                raise DataLossError(f"Record {newest.seqnum} of {name!r} was there and is gone.")
            view, page = await self._folded(name, view, page), []
        return view

    async def _page(self, name: str, base: View, newest: Record) -> list[Record]:
        page = await self._log.read_range(tag_of(name), base.seqnum + 1, limit=_PAGE)
        return [record for record in page if record.seqnum <= newest.seqnum]

    async def _walked_back(self, name: str, newest: Record) -> tuple[View | None, list[Record]]:
        """Return a view from before `newest` and the records after it; None: too far back."""
        records = [newest]
        for _ in range(_WALK_MAX):
            if await self._begins_anew(records[-1], name):
                return UNWRITTEN, records[::-1]
            last = records[-1].seqnum
            earlier = await self._log.read_prev(tag_of(name), last - 1) if last else None
            if earlier is None:
                return UNWRITTEN, records[::-1]
            if view := view_in(aux_decoded(earlier.aux), name, earlier.seqnum):
                return view, records[::-1]
            records.append(earlier)
        return None, records

    async def _begins_anew(self, record: Record, name: str) -> bool:
        """Tell whether `record` replaces or deletes the whole object, whatever it was before."""
        command = command_decoded(record.data)
        if command is None or not any(map(is_whole, command.writes.get(name, ()))):
            return False
        return await self.committed(record, command)

    async def _folded(self, name: str, base: View, records: Sequence[Record]) -> View:
        """Return the view after `records`, which follow `base` in the object's sub-stream."""
        start, view = 0, base
        for place in range(len(records) - 1, -1, -1):
            aux = aux_decoded(records[place].aux)
            if kept := view_in(aux, name, records[place].seqnum):
                start, view = place + 1, kept
                break
        document: Document | None = _decode(view.document) if view.document else None
        version = view.version
        for record in records[start:]:
            command = command_decoded(record.data)
            if command is None or name not in command.writes:
                continue
            if await self._is_effective(record, command, name, version):
                document = self._written(document, command, name)
                version = record.seqnum
        return View(
            seqnum=records[-1].seqnum,
            version=version,
            document=None if document is None else encoded(document),
            depth=view.depth + len(records) - start,
        )

    async def _is_effective(
        self, record: Record, command: Command, name: str, version: SeqNum | None
    ) -> bool:
        """Decide `command`, knowing the last committed write of one of its objects before it."""
        if name in command.reads:
            if version is not None and version >= command.horizon:
                self._cache.keep_decision(self._log.name, record.seqnum, committed=False)
                return False
            if len(command.reads) == 1 and command.id is None:
                return True
        return await self.committed(record, command)

    def _written(self, document: Document | None, command: Command, name: str) -> Document | None:
        for write in command.writes[name]:
            try:
                document = applied(document, write, name=name)
            except MismatchError:
                continue  # it has no effect; its caller was told
        return document

    async def done(self, txn_id: str, bound: SeqNum) -> Done | None:
        """Return the transaction with an id that committed, of the records up to `bound`; None:
        there is none.
        """
        tag = id_tag_of(txn_id)
        while bound >= 0 and (record := await self._log.read_prev(tag, bound)) is not None:
            command = command_decoded(record.data)
            if (
                command is not None
                and command.concerns(tag)
                and await self.committed(record, command)
            ):
                return Done(record.seqnum, command.result)
            bound = record.seqnum - 1
        return None

    async def committed(self, record: Record, command: Command) -> bool:
        """Tell whether the command in `record` takes effect.

        Works on a stack of its own instead of recursion: a history may be long, and each
        transaction may hang on an earlier one.
        """
        outcome = self._outcome(record, command)
        if outcome is not None:
            return outcome
        decided: dict[SeqNum, bool] = {}
        trials = [_trial_of(record.seqnum, command)]
        while trials:
            trial = trials[-1]
            verdict = await self._step(trial, decided)
            if verdict is not None:
                decided[trial.seqnum] = verdict
                self._cache.keep_decision(self._log.name, trial.seqnum, committed=verdict)
                trials.pop()
            elif trial.write is not None:
                earlier = command_decoded(trial.write.data)
                assert earlier is not None, "only a transaction is left undecided"
                trials.append(_trial_of(trial.write.seqnum, earlier))
        return decided[record.seqnum]

    async def _step(self, trial: _Trial, decided: Mapping[SeqNum, bool]) -> bool | None:
        """Bring a trial on: its verdict, or None with `write` set to what must be decided first."""
        while trial.tags:
            tag = trial.tags[-1]
            if trial.write is None and trial.bound >= trial.horizon:
                trial.write = await self._log.read_prev(tag, trial.bound)
            if trial.write is None or trial.write.seqnum < trial.horizon:
                trial.tags.pop()
                trial.bound, trial.write = trial.seqnum - 1, None
                continue
            outcome = self._write_outcome(trial.write, tag, decided)
            if outcome is None:
                return None
            if outcome:
                return False
            trial.bound, trial.write = trial.write.seqnum - 1, None
        return True

    def _write_outcome(
        self, record: Record, tag: str, decided: Mapping[SeqNum, bool]
    ) -> bool | None:
        """Tell whether `record` committed in the sub-stream `tag`; None: it must be decided."""
        command = command_decoded(record.data)
        if command is None or not command.concerns(tag):
            return False
        outcome = decided.get(record.seqnum)
        return self._outcome(record, command) if outcome is None else outcome

    def _outcome(self, record: Record, command: Command) -> bool | None:
        """Tell what is known about a command without reading the log."""
        if not command.is_conditional or command.horizon >= record.seqnum:
            return True
        outcome = self._cache.decision(self._log.name, record.seqnum)
        if outcome is None and (aux := aux_decoded(record.aux)):
            outcome = aux.committed
        return outcome


def _trial_of(seqnum: SeqNum, command: Command) -> _Trial:
    return _Trial(seqnum, command.horizon, command.validated_tags(), bound=seqnum - 1)
