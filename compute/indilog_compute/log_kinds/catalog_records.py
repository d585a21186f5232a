"""The records of the catalog of created logs, and the state that follows from them.

`indilog_compute.log_kinds.catalog` says what the records mean for nodes, and docs/FORMATS.md what
they contain. This module has no I/O, so a backup reads the catalog by it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import structlog

from indilog.base.ids import MetalogPosition, NodeId, SeqNum
from indilog.base.log import Record
from indilog.base.log_kinds import ORDER_FIRST, OWNED, SHARED, LogInfo, LogKind
from indilog.kernel.cell_layout import CellLayout, new_layout, owned_layout
from indilog_compute.log_kinds.segments import FIRST, LogSegment, bridged

CATALOG_LOG: Final = "$logs"
FOLLOWED_TAG: Final = "$followed"
"""The tag of records about how far nodes have followed. No log has such a name."""
FREED_VERSION: Final = 3
"""The first version of the catalog that has records `freed`."""
CATALOG_VERSION: Final = FREED_VERSION
"""The version that this process reads."""


def layout_tag(folder: str) -> str:
    """Return the tag of the layouts of the segment in `folder`. No log has such a name."""
    return f"$layout:{folder}"


class NewSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment that a creation or a switch begins.

    Attributes:
        kind: its kind.
        place: the object store; empty: the platform's own directory.
        folder: a name that no other segment has; empty: the segment is `shared`.
        layout: the first layout of a segment on storage nodes; None: the segment is not there.
        stripes: see `LogInfo.stripes`.
    """

    kind: LogKind
    place: str = ""
    folder: str = ""
    layout: CellLayout | None = None
    stripes: int = 0


def segment_on_nodes(
    kind: LogKind,
    folder: str,
    nodes: Sequence[NodeId],
    copies: int,
    stripes: int | None = None,
) -> NewSegment:
    """Return a new segment on storage nodes.

    Args:
        kind: `order-first` or `owned`.
        folder: folder of the segment.
        nodes: the storage nodes.
        copies: replicas of each cell; fewer if there are fewer nodes.
        stripes: chains of a segment of kind `order-first`; None: see `new_layout`.
    """
    if kind == OWNED:
        return NewSegment(kind=kind, folder=folder, layout=owned_layout(folder, nodes, copies))
    assert kind == ORDER_FIRST, "segments of other kinds are not on storage nodes"
    layout = new_layout(folder, nodes, copies, stripes)
    return NewSegment(kind=kind, folder=folder, layout=layout, stripes=len(layout.chains))


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
        stripes: the present number of stripes; see `LogInfo`.
    """

    log: str
    kind: LogKind
    place: str
    folder: str
    creator: NodeId
    seqnum: SeqNum
    created_at: float
    stripes: int = 0

    @property
    def info(self) -> LogInfo:
        """The description for callers."""
        return LogInfo(self.log, self.kind, self.created_at, self.stripes)

    def is_like(self, kind: LogKind, stripes: int | None) -> bool:
        """Whether the log has this kind, and so many stripes (None: any number)."""
        return self.kind == kind and stripes in (None, self.stripes)


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """A switch that has begun.

    Attributes:
        number: seqnum of the record `closing`.
        kind, place, folder, stripes: those of the new segment.
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
    stripes: int = 0
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
        unreleased: the freed segments whose cells or objects may still exist.
        freed_at: seqnum of its last record `freed`; None: there is none.
        position: the metalog position at which `last` was read. A session at this position sees
            all records of the closed `shared` segments.
    """

    created: CreatedLog
    segments: tuple[LogSegment, ...]
    last: SeqNum
    switch: Switch | None = None
    switches: int = 0
    unreleased: tuple[LogSegment, ...] = ()
    freed_at: SeqNum | None = None
    position: MetalogPosition = 0

    @property
    def is_plain(self) -> bool:
        """Whether calls of this log go directly to the `shared` log of its name."""
        return self.created.kind == SHARED and not self.switches and self.switch is None


class Creation(msgspec.Struct, frozen=True, kw_only=True, tag="created"):
    """A record: a log was created. Unknown fields are ignored."""

    version: Literal[1] = 1
    log: str
    kind: LogKind
    place: str = ""
    folder: str = ""
    creator: NodeId
    layout: CellLayout | None = None
    """The first layout of a log on storage nodes."""
    stripes: int = 0


class Laid(msgspec.Struct, frozen=True, kw_only=True, tag="layout"):
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


class Followed(msgspec.Struct, frozen=True, kw_only=True, tag="followed"):
    """A record: a node has replayed the catalog up to and including `seqnum`.

    Attributes:
        node, seqnum: the node, and the seqnum.
        reads: the newest version of the catalog that the node's release reads. Releases before
            version 3 do not write it.
    """

    version: Literal[1] = 1
    node: NodeId
    seqnum: SeqNum
    reads: int = 2


class Closing(msgspec.Struct, frozen=True, kw_only=True, tag="closing"):
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
    stripes: int = 0


class Sealing(msgspec.Struct, frozen=True, kw_only=True, tag="sealing"):
    """A record: all compute nodes have followed the record `closing` before it."""

    version: Literal[1] = 1
    log: str


class Reopened(msgspec.Struct, frozen=True, kw_only=True, tag="reopened"):
    """A record: the switch is abandoned."""

    version: Literal[1] = 1
    log: str


class Switched(msgspec.Struct, frozen=True, kw_only=True, tag="switched"):
    """A record, the bridge: the log continues in the new segment.

    Attributes:
        end: local end of the old segment.
        time: the log's time at `end`, seconds since 1970.
    """

    version: Literal[1] = 1
    log: str
    end: SeqNum
    time: float


class RecordedLayout(NamedTuple):
    """A layout, its log, and the seqnum of its record; None: the first layout of a segment, which
    is in the record that creates the segment.
    """

    log: str
    layout: CellLayout
    seqnum: SeqNum | None


class SegmentsFreed(msgspec.Struct, frozen=True, kw_only=True, tag="freed"):
    """A record: the whole state of a log, after its oldest segments were freed, or their storage
    was released. All earlier records of the log are superseded.

    Attributes:
        log: the log.
        created: its creation. The place and the folder are empty, because the first segment is
            freed.
        segments: the segments that are left.
        unreleased: see `CreatedLogState`.
        switches: number of completed switches.
        layouts: the newest layouts of all these segments that are on storage nodes, by folder.
    """

    version: Literal[3] = 3
    log: str
    created: CreatedLog
    segments: tuple[LogSegment, ...]
    unreleased: tuple[LogSegment, ...] = ()
    switches: int
    layouts: dict[str, RecordedLayout]


Change: TypeAlias = Closing | Sealing | Reopened | Switched

CatalogRecord: TypeAlias = Creation | Laid | Followed | SegmentsFreed | Change

_decoder = msgspec.json.Decoder(CatalogRecord)


class LogCatalogState:
    """The created logs, as of the records that were taken.

    Attributes:
        logs: the states of logs, by name.
        layouts: the newest layouts of segments on storage nodes, by folder.
        last: seqnum of the last record that this node has to follow: another node created a log or
            began a switch, or any node freed segments. None: there is none.
        followed: the announcement of each node with the greatest seqnum, and the version that the
            node reads by its newest announcement.
        followed_at: seqnums of the records of these announcements.

    Args:
        node: this node; empty: the reader is no node.
        on_change: called with the state of a log whenever it has changed.
    """

    def __init__(self, node: NodeId, on_change: Callable[[CreatedLogState], None]) -> None:
        self.logs: dict[str, CreatedLogState] = {}
        self.layouts: dict[str, RecordedLayout] = {}
        self.last: SeqNum | None = None
        self.followed: dict[NodeId, Followed] = {}
        self.followed_at: dict[NodeId, SeqNum] = {}
        self._node = node
        self._on_change = on_change

    def take(self, record: Record, position: MetalogPosition) -> None:
        """Apply the next record.

        Args:
            record: the record.
            position: the metalog position at which it was read.
        """
        try:
            found = _decoder.decode(record.data)
        except msgspec.MsgspecError as error:
            structlog.get_logger().error(
                "a creation of a log is not understood", seqnum=record.seqnum, reason=str(error)
            )
            return
        if isinstance(found, Followed):
            self._note_followed(found, record.seqnum)
            return
        state = self.logs.get(found.log)
        if isinstance(found, Laid):
            folder = found.folder or (state.segments[0].folder if state is not None else "")
            if state is None or folder in _folders(state):
                self.layouts[folder] = RecordedLayout(found.log, found.layout, record.seqnum)
            return
        if isinstance(found, SegmentsFreed):
            self._free(found, record.seqnum, position)
            return
        if isinstance(found, Creation):
            if state is None:
                self._create(found, record)
        elif state is None or not self._change(state, found, record.seqnum, position):
            structlog.get_logger().error("a switch of a log has no effect", seqnum=record.seqnum)

    def _note_followed(self, found: Followed, seqnum: SeqNum) -> None:
        before = self.followed.get(found.node)
        if before is not None and before.seqnum > found.seqnum:
            self.followed[found.node] = msgspec.structs.replace(before, reads=found.reads)
        else:
            self.followed[found.node] = found
            self.followed_at[found.node] = seqnum

    def _create(self, found: Creation, record: Record) -> None:
        self._lay_out(found)
        created = CreatedLog(
            log=found.log,
            kind=found.kind,
            place=found.place,
            folder=found.folder,
            creator=found.creator,
            seqnum=record.seqnum,
            created_at=record.ordered_at,
            stripes=found.stripes,
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

    def _free(self, found: SegmentsFreed, seqnum: SeqNum, position: MetalogPosition) -> None:
        """Replace the state of a log. The state may be unknown, or incomplete, because earlier
        records of the log are trimmed.
        """
        state = self.logs.get(found.log)
        if state is None:
            state = CreatedLogState(created=found.created, segments=found.segments, last=seqnum)
            self.logs[found.log] = state
        state.created = found.created
        if state.segments != found.segments:
            state.segments = found.segments
        state.switch = None
        state.switches = found.switches
        state.unreleased = found.unreleased
        state.last = state.freed_at = seqnum
        state.position = position
        for folder, layout in found.layouts.items():
            known = self.layouts.get(folder)
            if known is None or known.layout.epoch < layout.layout.epoch:
                self.layouts[folder] = layout
        kept = _folders(state)
        for folder in [f for f, each in self.layouts.items() if each.log == found.log]:
            if folder not in kept:
                del self.layouts[folder]
        self.last = seqnum
        self._on_change(state)

    def _lay_out(self, found: Creation | Closing) -> None:
        if found.layout is not None:
            self.layouts[found.folder] = RecordedLayout(found.log, found.layout, None)

    def _change(
        self, state: CreatedLogState, found: Change, seqnum: SeqNum, position: MetalogPosition
    ) -> bool:
        """Apply a record of a switch; return False if such a record cannot follow in this state."""
        switch = state.switch
        match found:
            case Closing() if switch is None:
                state.switch = Switch(
                    number=seqnum,
                    kind=found.kind,
                    place=found.place,
                    folder=found.folder,
                    switcher=found.switcher,
                    tail=found.tail,
                    stripes=found.stripes,
                )
                self._lay_out(found)
                if found.switcher != self._node:
                    self.last = seqnum
            case Sealing() if switch is not None and not switch.is_sealing:
                state.switch = msgspec.structs.replace(switch, is_sealing=True)
            case Reopened() if switch is not None and not switch.is_sealing:
                self.layouts.pop(switch.folder, None)
                state.switch = None
            case Switched() if switch is not None and switch.is_sealing:
                new = switch.segment(found.log, seqnum)
                last, new = bridged(
                    state.segments[-1], local_end=found.end, time=found.time, to=new
                )
                state.segments = (*state.segments[:-1], last, new)
                state.created = msgspec.structs.replace(
                    state.created, kind=switch.kind, stripes=switch.stripes
                )
                state.switch = None
                state.switches += 1
            case _:
                return False
        state.last = seqnum
        state.position = position
        self._on_change(state)
        return True


def _folders(state: CreatedLogState) -> set[str]:
    """Return the folders of all segments of a log whose storage may exist."""
    found = {segment.folder for segment in (*state.segments, *state.unreleased)}
    return found if state.switch is None else {*found, state.switch.folder}


class MovedCatalog:
    """Rewrites the records of a catalog for a platform that keeps the segments elsewhere.

    Each record that names a segment gets the segment's new kind, place, folder and layout. So a
    reader of the records never learns where the segments were before.

    Args:
        segments: the new segments, by the folders of before.
    """

    def __init__(self, segments: Mapping[str, NewSegment]) -> None:
        self._segments = segments
        self._first: dict[str, str] = {}
        """The folder of the first segment, by log."""

    def rewritten(self, data: bytes) -> bytes:
        """Return the data of the next record."""
        try:
            found = _decoder.decode(data)
        except msgspec.MsgspecError:
            return data
        if isinstance(found, SegmentsFreed):
            return msgspec.json.encode(self._moved(found))
        if not isinstance(found, Creation | Closing | Laid):
            return data
        folder = found.folder
        if isinstance(found, Creation):
            self._first[found.log] = folder
        elif isinstance(found, Laid) and not folder:
            folder = self._first.get(found.log, "")
        new = self._segments.get(folder)
        if new is None or (isinstance(found, Laid) and new.layout is None):
            return data  # in the second case the segment is not on storage nodes any more
        if isinstance(found, Laid):
            moved = msgspec.structs.replace(found, folder=new.folder, layout=new.layout)
            return msgspec.json.encode(moved)
        return msgspec.json.encode(msgspec.structs.replace(found, **msgspec.structs.asdict(new)))

    def _moved(self, found: SegmentsFreed) -> SegmentsFreed:
        """Return a record `freed` whose segments are elsewhere. What was not released stays in the
        old platform.
        """
        segments, layouts = [], {}
        for segment in found.segments:
            new = self._segments.get(segment.folder, segment)
            segments.append(
                msgspec.structs.replace(segment, kind=new.kind, place=new.place, folder=new.folder)
            )
            if isinstance(new, NewSegment) and new.layout is not None:
                seqnum = found.layouts[segment.folder].seqnum
                layouts[new.folder] = RecordedLayout(found.log, new.layout, seqnum)
        created, last = found.created, self._segments.get(found.segments[-1].folder)
        if last is not None:
            created = msgspec.structs.replace(created, stripes=last.stripes)
        return msgspec.structs.replace(
            found, created=created, segments=tuple(segments), unreleased=(), layouts=layouts
        )
