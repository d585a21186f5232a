"""The catalog of created logs: records of the reserved log `$logs` (docs/FORMATS.md).

A creation is one record, tagged with the name of the log. The condition of its append lets only one
creation of a name succeed. Each compute node replays the catalog, and records up to which seqnum it
has *followed* the catalog. The creator waits for these records. So no node appends to a created log
as if it were `shared`.

Each segment on storage nodes has a sequence of layouts, named by the segment's folder. The
condition of each layout lets only one layout follow the previous one.

A switch to another kind is a sequence of records. The condition of each record names the previous
record. So a switch has one outcome, even if several nodes continue it:

- `closing` begins the switch. From then on, a compute node that has replayed this record
  acknowledges no append, and answers no read of new records, until it knows the outcome.
- `sealing`: all compute nodes have followed, so the switch can only be completed.
- `switched`, the bridge: names the place where the old segment ends and the new one begins.
- `reopened`, in place of `sealing`: a compute node did not answer, so the kind stays.

`kinds` appends these records, and routes calls by the states that follow from them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import structlog

from indilog.base.errors import ConditionFailedError, DataLossError
from indilog.base.ids import MetalogPosition, NodeId, SeqNum
from indilog.base.log import After, Entry, LogSource, Record, Session
from indilog.base.log_kinds import SHARED, LogInfo, LogKind
from indilog.kernel.cell_layout import CellLayout
from indilog_compute.log_kinds.segments import FIRST, LogSegment, bridged

CATALOG_LOG: Final = "$logs"
_FOLLOWED: Final = "$followed"
"""The tag of records about how far nodes have followed. No log has such a name."""
_LAYOUT: Final = "$layout:"
"""The tag of the layouts of a segment is this and its folder. No log has such a name."""


class NewSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment that a creation or a switch begins.

    Attributes:
        kind: its kind.
        place: the object store; empty: the platform's own directory.
        folder: a name that no other segment has; empty: the segment is `shared`.
        layout: the first layout of a segment on storage nodes; None: the segment is not there.
    """

    kind: LogKind
    place: str = ""
    folder: str = ""
    layout: CellLayout | None = None


class CreatedLog(msgspec.Struct, frozen=True, kw_only=True):
    """A log that was created.

    Attributes:
        log, kind: the name, and the present kind.
        place: the object store; empty: the platform's own directory.
        folder: folder of the log in the store; part of the names of its spaces on storage nodes. Of
            a switched log, the catalog has that of the first segment here (also `place`).
        creator: the compute node that created it.
        seqnum: seqnum of the record of its creation.
        created_at: time of the creation, seconds since 1970.
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
        """The description for callers."""
        return LogInfo(self.log, self.kind, self.created_at)


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """A switch that has begun.

    Attributes:
        number: seqnum of the record `closing`.
        kind, place, folder: those of the new segment.
        switcher: the compute node that began the switch.
        tail: the tail of the log before the switch began; the old segment ends there or later.
        is_sealing: whether the switch can only be completed.
    """

    number: SeqNum
    kind: LogKind
    place: str
    folder: str
    switcher: NodeId
    tail: SeqNum
    is_sealing: bool = False

    def segment(self, log: str, bridge: SeqNum) -> LogSegment:
        """Return the new segment. Its `start` and `time_floor` are not known yet (`bridged`).

        Args:
            log: name of the log.
            bridge: seqnum of the record `switched`.
        """
        is_shared = self.kind == SHARED
        return LogSegment(
            number=self.number,
            kind=self.kind,
            place=self.place,
            folder=self.folder,
            # A name of its own: late records of an earlier segment are never in this one.
            local_log=f"{CATALOG_LOG}/{self.number}" if is_shared else log,
            start=0,
            # Records of a `shared` segment are in the logspace of the catalog, after the bridge.
            local_first=bridge + 1 if is_shared else 0,
        )


class CreatedLogState(msgspec.Struct, kw_only=True):
    """The state of one log in the catalog.

    Attributes:
        created: its creation, and its present kind.
        segments: its segments, in order.
        last: seqnum of its last record in the catalog.
        switch: the switch that is under way; None: there is none.
        switches: number of completed switches.
        position: the metalog position at which `last` was read. A session at this position sees
            all records of the closed `shared` segments.
    """

    created: CreatedLog
    segments: tuple[LogSegment, ...]
    last: SeqNum
    switch: Switch | None = None
    switches: int = 0
    position: MetalogPosition = 0

    @property
    def is_plain(self) -> bool:
        """Whether calls of this log go directly to the `shared` log of its name."""
        return self.created.kind == SHARED and not self.switches and self.switch is None


class _Creation(msgspec.Struct, frozen=True, kw_only=True, tag="created"):
    """A record: a log was created. Unknown fields are ignored."""

    version: Literal[1] = 1
    log: str
    kind: LogKind
    place: str = ""
    folder: str = ""
    creator: NodeId
    layout: CellLayout | None = None
    """The first layout of a log on storage nodes."""


class _Laid(msgspec.Struct, frozen=True, kw_only=True, tag="layout"):
    """A record: a later layout of a segment on storage nodes.

    Attributes:
        log: the log of the segment.
        folder: the folder of the segment; empty (version 1): the first segment of the log.
        layout: the layout.
    """

    version: Literal[1, 2] = 2
    log: str
    folder: str = ""
    layout: CellLayout


class _Followed(msgspec.Struct, frozen=True, kw_only=True, tag="followed"):
    """A record: a node has replayed the catalog up to and including `seqnum`."""

    version: Literal[1] = 1
    node: NodeId
    seqnum: SeqNum


class _Closing(msgspec.Struct, frozen=True, kw_only=True, tag="closing"):
    """A record: a switch begins; the fields are those of `NewSegment` and `Switch`. Version 1
    has no `layout`.
    """

    version: Literal[1, 2] = 2
    log: str
    kind: LogKind
    place: str = ""
    folder: str = ""
    switcher: NodeId
    tail: SeqNum
    layout: CellLayout | None = None


class _Sealing(msgspec.Struct, frozen=True, kw_only=True, tag="sealing"):
    """A record: all compute nodes have followed the record `closing` before it."""

    version: Literal[1] = 1
    log: str


class _Reopened(msgspec.Struct, frozen=True, kw_only=True, tag="reopened"):
    """A record: the switch is abandoned."""

    version: Literal[1] = 1
    log: str


class _Switched(msgspec.Struct, frozen=True, kw_only=True, tag="switched"):
    """A record, the bridge: the log continues in the new segment.

    Attributes:
        end: local end of the old segment.
        time: the log's time at `end`, seconds since 1970.
    """

    version: Literal[1] = 1
    log: str
    end: SeqNum
    time: float


_Change: TypeAlias = _Closing | _Sealing | _Reopened | _Switched

_decoder = msgspec.json.Decoder(_Creation | _Laid | _Followed | _Change)


class _Layout(NamedTuple):
    """A layout, its log, and the seqnum of its record; None: the first layout of a segment, which
    is in the record that creates the segment.
    """

    log: str
    layout: CellLayout
    seqnum: SeqNum | None


class ReplayedCatalog:
    """The created logs, as of the records that were read.

    Args:
        logs: the `shared` logs.
        node: this node.
        on_change: called with the state of a log right after a record changed it, before any other
            task runs.

    Attributes:
        logs: the states of logs, by name.
        last: seqnum of the last record by which another node created a log or began a switch; None:
            there is none.
    """

    def __init__(
        self, logs: LogSource, node: NodeId, on_change: Callable[[CreatedLogState], None]
    ) -> None:
        self.logs: dict[str, CreatedLogState] = {}
        self.last: SeqNum | None = None
        self._followed: dict[NodeId, SeqNum] = {}
        self._layouts: dict[str, _Layout] = {}
        """The newest layout of each segment on storage nodes, by the segment's folder."""
        self._node = node
        self._on_change = on_change
        self._session = Session()
        self._log = logs.log(CATALOG_LOG, self._session)
        self._bound: SeqNum = 0

    async def create(self, log: str, segment: NewSegment) -> None:
        """Record a creation, unless the name was created before; then catch up."""
        creation = _Creation(log=log, creator=self._node, **msgspec.structs.asdict(segment))
        await self._append_after(None, creation)

    async def close(self, log: str, last: SeqNum, segment: NewSegment, *, tail: SeqNum) -> None:
        """Record that a switch begins, unless the log has changed; then catch up.

        Args:
            log: the log.
            last: seqnum of the log's last record in the catalog when the caller decided to switch.
            segment: the new segment.
            tail: tail of the log, read before this call.
        """
        closing = _Closing(
            log=log, switcher=self._node, tail=tail, **msgspec.structs.asdict(segment)
        )
        await self._append_after(last, closing)

    async def seal(self, log: str, last: SeqNum) -> None:
        """Record that all compute nodes have followed, unless the log has changed; catch up."""
        await self._append_after(last, _Sealing(log=log))

    async def reopen(self, log: str, last: SeqNum) -> None:
        """Record that a switch is abandoned, unless the log has changed; then catch up."""
        await self._append_after(last, _Reopened(log=log))

    async def bridge(self, log: str, last: SeqNum, *, end: SeqNum, time: float) -> None:
        """Record the bridge, unless the log has changed; then catch up. `end` and `time` are the
        fields of the record.
        """
        await self._append_after(last, _Switched(log=log, end=end, time=time))

    async def _append_after(self, last: SeqNum | None, change: _Creation | _Change) -> None:
        entry = Entry(msgspec.json.encode(change), [change.log])
        with suppress(ConditionFailedError):
            await self._log.append_batch([entry], after=After(change.log, last))
        await self.catch_up()

    def layout(self, folder: str) -> CellLayout:
        """Return the newest known layout of the segment in `folder`."""
        return self._layouts[folder].layout

    async def change_layout(self, folder: str, before: CellLayout, after: CellLayout) -> bool:
        """Record `after` as the layout that follows `before`. Return whether it is the newest
        layout; False: another layout was recorded.

        Raises:
            AppendOutcomeUnknownError: the layout may be recorded.
        """
        known = self._layouts[folder]
        if known.layout != before:
            return False
        tag = _LAYOUT + folder
        laid = _Laid(log=known.log, folder=folder, layout=after)
        entry = Entry(msgspec.json.encode(laid), [tag])
        with suppress(ConditionFailedError):
            await self._log.append_batch([entry], after=After(tag, known.seqnum))
        await self.catch_up()
        return self.layout(folder) == after

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
            wait_s: seconds to wait for a record if there is no new one (`math.inf`: without limit).
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
        state = self.logs.get(found.log)
        if isinstance(found, _Laid):
            folder = found.folder or (state.segments[0].folder if state is not None else "")
            self._layouts[folder] = _Layout(found.log, found.layout, record.seqnum)
            return
        if isinstance(found, _Creation):
            if state is None:
                self._create(found, record)
        elif state is None or not self._change(state, found, record.seqnum):
            structlog.get_logger().error("a switch of a log has no effect", seqnum=record.seqnum)

    def _create(self, found: _Creation, record: Record) -> None:
        self._lay_out(found)
        created = CreatedLog(
            log=found.log,
            kind=found.kind,
            place=found.place,
            folder=found.folder,
            creator=found.creator,
            seqnum=record.seqnum,
            created_at=record.ordered_at,
        )
        segment = LogSegment(
            number=FIRST,
            kind=found.kind,
            place=found.place,
            folder=found.folder,
            local_log=found.log,
            start=0,
        )
        state = CreatedLogState(created=created, segments=(segment,), last=record.seqnum)
        self.logs[found.log] = state
        if found.creator != self._node:
            self.last = record.seqnum
        self._on_change(state)

    def _lay_out(self, found: _Creation | _Closing) -> None:
        if found.layout is not None:
            self._layouts[found.folder] = _Layout(found.log, found.layout, None)

    def _change(self, state: CreatedLogState, found: _Change, seqnum: SeqNum) -> bool:
        """Apply a record of a switch; return False if such a record cannot follow in this state."""
        switch = state.switch
        match found:
            case _Closing() if switch is None:
                state.switch = Switch(
                    number=seqnum,
                    kind=found.kind,
                    place=found.place,
                    folder=found.folder,
                    switcher=found.switcher,
                    tail=found.tail,
                )
                self._lay_out(found)
                if found.switcher != self._node:
                    self.last = seqnum
            case _Sealing() if switch is not None and not switch.is_sealing:
                state.switch = msgspec.structs.replace(switch, is_sealing=True)
            case _Reopened() if switch is not None and not switch.is_sealing:
                self._layouts.pop(switch.folder, None)
                state.switch = None
            case _Switched() if switch is not None and switch.is_sealing:
                new = switch.segment(found.log, seqnum)
                last, new = bridged(
                    state.segments[-1], local_end=found.end, time=found.time, to=new
                )
                state.segments = (*state.segments[:-1], last, new)
                state.created = msgspec.structs.replace(state.created, kind=switch.kind)
                state.switch = None
                state.switches += 1
            case _:
                return False
        state.last = seqnum
        state.position = self._session.position
        self._on_change(state)
        return True
