"""The catalog of created logs: records of the reserved log `$logs` (docs/FORMATS.md).

A creation is one record, tagged with the name of the log. Its condition lets only one creation of a
name succeed. So does the condition of a layout, for the layout after the one before it. Each
compute node replays the catalog, and records up to where it has: the creator waits for that, so
that no node appends to a created log as if it were `shared`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from indilog.base.errors import ConditionFailedError, DataLossError
from indilog.base.ids import NodeId, SeqNum
from indilog.base.log import After, Entry, LogSource, Record, Session
from indilog.base.log_kinds import LogInfo, LogKind
from indilog.kernel.cell_layout import CellLayout

CATALOG_LOG: Final = "$logs"
_FOLLOWED: Final = "followed"
_LAYOUT: Final = "$layout:"
"""Before the name of a log: the tag of its layouts. No log has such a name."""


class CreatedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A log that was created.

    Attributes:
        log, kind: name and kind.
        place: the object store; empty: the platform's own directory.
        folder: folder of the log in the store; in the names of its spaces on storage nodes.
        creator: the compute node that created it.
        seqnum: of the record of its creation.
        created_at: when, seconds since 1970.
    """

    log: str
    kind: LogKind
    place: str
    folder: str
    creator: NodeId
    seqnum: SeqNum
    created_at: float

    @property
    def info(self) -> LogInfo:
        """What callers see."""
        return LogInfo(self.log, self.kind, self.created_at)


class _Creation(msgspec.Struct, frozen=True, kw_only=True, tag="created"):
    """A record: a log was created. Unknown fields are ignored."""

    version: Literal[1] = 1
    log: str
    kind: LogKind
    place: str = ""
    folder: str = ""
    creator: NodeId
    layout: CellLayout | None = None
    """The first layout of a log of kind order-first."""


class _Laid(msgspec.Struct, frozen=True, kw_only=True, tag="layout"):
    """A record: a later layout of a log of kind order-first."""

    version: Literal[1] = 1
    log: str
    layout: CellLayout


class _Followed(msgspec.Struct, frozen=True, kw_only=True, tag=_FOLLOWED):
    """A record: a node has replayed the catalog up to `seqnum`, inclusive."""

    version: Literal[1] = 1
    node: NodeId
    seqnum: SeqNum


_decoder = msgspec.json.Decoder(_Creation | _Laid | _Followed)


class _Layout(NamedTuple):
    """A layout, and the seqnum of its record; None: it is in the creation."""

    layout: CellLayout
    seqnum: SeqNum | None


class Catalog:
    """The created logs, as of the records that were read.

    Attributes:
        created: by name.
        last: seqnum of the last creation by another node; None: there is none.
    """

    def __init__(self, logs: LogSource, node: NodeId) -> None:
        self.created: dict[str, CreatedLog] = {}
        self.last: SeqNum | None = None
        self._followed: dict[NodeId, SeqNum] = {}
        self._layouts: dict[str, _Layout] = {}
        self._node = node
        self._log = logs.log(CATALOG_LOG, Session())
        self._bound: SeqNum = 0

    async def create(
        self,
        log: str,
        kind: LogKind,
        *,
        place: str = "",
        folder: str = "",
        layout: CellLayout | None = None,
    ) -> None:
        """Record a creation, unless the name was created before; then catch up."""
        creation = _Creation(
            log=log, kind=kind, place=place, folder=folder, creator=self._node, layout=layout
        )
        entry = Entry(msgspec.json.encode(creation), [log])
        with suppress(ConditionFailedError):
            await self._log.append_batch([entry], after=After(log))
        await self.catch_up()

    def layout(self, log: str) -> CellLayout:
        """Return the newest layout of a log of kind order-first that was read."""
        return self._layouts[log].layout

    async def change_layout(self, log: str, before: CellLayout, after: CellLayout) -> bool:
        """Record the layout after `before`; return whether it is recorded. False: another one is.

        Raises:
            AppendOutcomeUnknownError: it may be recorded.
        """
        known = self._layouts[log]
        if known.layout != before:
            return False
        tag = _LAYOUT + log
        entry = Entry(msgspec.json.encode(_Laid(log=log, layout=after)), [tag])
        with suppress(ConditionFailedError):
            await self._log.append_batch([entry], after=After(tag, known.seqnum))
        await self.catch_up()
        return self.layout(log) == after

    async def announce(self, seqnum: SeqNum) -> None:
        """Record that this node has replayed the catalog up to `seqnum`."""
        followed = _Followed(node=self._node, seqnum=seqnum)
        await self._log.append(msgspec.json.encode(followed), tags=[_FOLLOWED])

    def has_followed(self, node: NodeId, seqnum: SeqNum) -> bool:
        """Whether a node has replayed the catalog up to `seqnum`."""
        return self._followed.get(node, -1) >= seqnum

    async def catch_up(self, *, wait_s: float | None = None) -> None:
        """Read all records of the catalog that were appended before this call.

        Args:
            wait_s: wait up to so many seconds for a further record (`math.inf`: without limit).
        """
        fresh = True
        while True:
            try:
                page = await self._log.read_range(bound=self._bound, wait=wait_s, fresh=fresh)
            except DataLossError as error:
                structlog.get_logger().error("creations of logs are lost", reason=str(error))
                self._bound = max(self._bound + 1, error.next_seqnum or 0)
                continue
            if not page:
                return
            for record in page:
                if record.seqnum >= self._bound:  # another task may have read on meanwhile
                    self._take(record)
                    self._bound = record.seqnum + 1
            fresh, wait_s = False, None

    def _take(self, record: Record) -> None:
        try:
            found = _decoder.decode(record.data)
        except msgspec.MsgspecError as error:
            structlog.get_logger().error(
                "a creation of a log is not understood", seqnum=record.seqnum, reason=str(error)
            )
            return
        if isinstance(found, _Followed):
            self._followed[found.node] = max(found.seqnum, self._followed.get(found.node, -1))
            return
        if isinstance(found, _Laid):
            self._layouts[found.log] = _Layout(found.layout, record.seqnum)
            return
        if found.log in self.created:
            return
        if found.layout is not None:
            self._layouts[found.log] = _Layout(found.layout, None)
        self.created[found.log] = CreatedLog(
            log=found.log,
            kind=found.kind,
            place=found.place,
            folder=found.folder,
            creator=found.creator,
            seqnum=record.seqnum,
            created_at=record.ordered_at,
        )
        if found.creator != self._node:
            self.last = record.seqnum
