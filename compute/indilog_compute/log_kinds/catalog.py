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

A record `freed` has the whole state of a log, without segments that are trimmed. So it supersedes
all earlier records of the log, which are trimmed then (`freeing`).

`kinds` appends these records, and routes calls by the states that follow from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

import msgspec
import structlog

from indilog.base.errors import ConditionFailedError, DataLossError, TrimmedError
from indilog.base.ids import NodeId, SeqNum
from indilog.base.log import After, Entry, LogSource, Session
from indilog.kernel.cell_layout import CellLayout
from indilog_compute.log_kinds.catalog_records import (
    CATALOG_LOG,
    CATALOG_VERSION,
    FOLLOWED_TAG,
    FREED_VERSION,
    Change,
    Closing,
    CreatedLogState,
    Creation,
    Followed,
    Laid,
    LogCatalogState,
    NewSegment,
    Reopened,
    Sealing,
    SegmentsFreed,
    Switched,
    layout_tag,
)
from indilog_compute.log_kinds.segments import LogSegment


class ReplayedCatalog:
    """The created logs, as of the records that were read.

    Args:
        logs: the `shared` logs.
        node: this node.
        on_change: called with the state of a log right after a record changed it, before any other
            task runs.
    """

    def __init__(
        self, logs: LogSource, node: NodeId, on_change: Callable[[CreatedLogState], None]
    ) -> None:
        self._state = LogCatalogState(node, on_change)
        self._node = node
        self._session = Session()
        self._log = logs.log(CATALOG_LOG, self._session)
        self._bound: SeqNum = 0

    @property
    def logs(self) -> dict[str, CreatedLogState]:
        """The states of logs, by name."""
        return self._state.logs

    @property
    def last(self) -> SeqNum | None:
        """See `LogCatalogState.last`."""
        return self._state.last

    async def create(self, log: str, segment: NewSegment) -> None:
        """Record a creation, unless the name was created before; then catch up."""
        creation = Creation(log=log, creator=self._node, **msgspec.structs.asdict(segment))
        await self._append_after(None, creation)

    async def close(self, log: str, last: SeqNum, segment: NewSegment, *, tail: SeqNum) -> None:
        """Record that a switch begins, unless the log has changed; then catch up.

        Args:
            log: the log.
            last: seqnum of the log's last record in the catalog when the caller decided to switch.
            segment: the new segment.
            tail: tail of the log, read before this call.
        """
        closing = Closing(
            log=log, switcher=self._node, tail=tail, **msgspec.structs.asdict(segment)
        )
        await self._append_after(last, closing)

    async def seal(self, log: str, last: SeqNum) -> None:
        """Record that all compute nodes have followed, unless the log has changed; catch up."""
        await self._append_after(last, Sealing(log=log))

    async def reopen(self, log: str, last: SeqNum) -> None:
        """Record that a switch is abandoned, unless the log has changed; then catch up."""
        await self._append_after(last, Reopened(log=log))

    async def bridge(self, log: str, last: SeqNum, *, end: SeqNum, time: float) -> None:
        """Record the bridge, unless the log has changed; then catch up. `end` and `time` are the
        fields of the record.
        """
        await self._append_after(last, Switched(log=log, end=end, time=time))

    async def free(
        self, log: str, *, segments: Sequence[LogSegment], unreleased: Sequence[LogSegment]
    ) -> bool:
        """Record the whole state of a log, with other segments than before, unless the log has
        changed; then catch up. Return whether it is recorded.

        Args:
            log: the log; no switch of it is under way.
            segments: the segments of the log.
            unreleased: see `CreatedLogState`.
        """
        state = self.logs[log]
        layouts = {
            each.folder: self._state.layouts[each.folder]
            for each in (*segments, *unreleased)
            if each.folder in self._state.layouts
        }
        freed = SegmentsFreed(
            log=log,
            created=msgspec.structs.replace(state.created, place="", folder=""),
            segments=tuple(segments),
            unreleased=tuple(unreleased),
            switches=state.switches,
            layouts=layouts,
        )
        await self._append_after(state.last, freed)
        return (state.segments, state.unreleased) == (freed.segments, freed.unreleased)

    async def shorten(self, log: str, nodes: Collection[NodeId]) -> None:
        """Trim what the last record `freed` of a log supersedes, and announcements of nodes that
        have announced since.

        Args:
            log: the log.
            nodes: the compute nodes whose announcements are needed.
        """
        if (freed_at := self.logs[log].freed_at) is not None:
            await self._log.trim(freed_at, tag=log)
        needed = [at for node, at in self._state.followed_at.items() if node in nodes]
        if needed:
            await self._log.trim(min(needed), tag=FOLLOWED_TAG)

    async def forget_layouts(self, folder: str) -> None:
        """Trim all layouts of a segment whose storage is released."""
        known = self._state.layouts.get(folder)
        if known is not None and known.seqnum is not None:
            await self._log.trim(self._bound, tag=layout_tag(folder))

    async def _append_after(
        self, last: SeqNum | None, change: Creation | SegmentsFreed | Change
    ) -> None:
        entry = Entry(msgspec.json.encode(change), [change.log])
        with suppress(ConditionFailedError, TrimmedError):
            await self._log.append_batch([entry], after=After(change.log, last))
        await self.catch_up()

    def layout(self, folder: str) -> CellLayout:
        """Return the newest known layout of the segment in `folder`."""
        return self._state.layouts[folder].layout

    def layouts(self) -> Iterator[tuple[str, CellLayout]]:
        """Yield each log with the newest known layouts of its segments."""
        for log, layout, _ in self._state.layouts.values():
            yield log, layout

    async def change_layout(self, folder: str, before: CellLayout, after: CellLayout) -> bool:
        """Record `after` as the layout that follows `before`. Return whether it is the newest
        layout; False: another layout was recorded, or the segment is freed.

        Raises:
            AppendOutcomeUnknownError: the layout may be recorded.
        """
        known = self._state.layouts.get(folder)
        if known is None or known.layout != before:
            return False
        tag = layout_tag(folder)
        laid = Laid(log=known.log, folder=folder, layout=after)
        entry = Entry(msgspec.json.encode(laid), [tag])
        with suppress(ConditionFailedError, TrimmedError):
            await self._log.append_batch([entry], after=After(tag, known.seqnum))
        await self.catch_up()
        found = self._state.layouts.get(folder)
        return found is not None and found.layout == after

    async def announce(self, seqnum: SeqNum) -> None:
        """Record that this node has replayed the catalog up to `seqnum`."""
        followed = Followed(node=self._node, seqnum=seqnum, reads=CATALOG_VERSION)
        await self._log.append(msgspec.json.encode(followed), tags=[FOLLOWED_TAG])

    def has_followed(self, node: NodeId, seqnum: SeqNum) -> bool:
        """Whether a node has replayed the catalog up to `seqnum`."""
        found = self._state.followed.get(node)
        return found is not None and found.seqnum >= seqnum

    def reads_freed(self, nodes: Collection[NodeId]) -> bool:
        """Whether all nodes but this one have announced that their release reads `freed`."""
        found = [self._state.followed.get(node) for node in nodes if node != self._node]
        return all(each is not None and each.reads >= FREED_VERSION for each in found)

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
                    self._state.take(record, self._session.position)
                    self._bound = record.seqnum + 1
            fresh, wait_s = False, None
