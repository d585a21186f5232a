"""The log inside a compute node: `Log` over an engine in this process.

Functions, workers and the gateway append and read through `LocalLogs`, so its methods are the hot
paths of the platform. An append costs a future and a few list operations. A read that the local
index and the record cache answer completes without suspending. Every `_READS_PER_ITERATION`-th of
these reads yields to the event loop, so that a busy reader does not starve other tasks. Logs of
other kinds come from `LogKinds`.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import structlog

from indilog.base.errors import (
    IndilogError,
    NotReadyError,
    TooLargeError,
    TrimmedError,
    WrongStateError,
)
from indilog.base.ids import (
    EMPTY_TAG,
    MAX_SEQNUM,
    MetalogPosition,
    NodeId,
    SeqNum,
    ShardId,
    UserTag,
    log_tag,
    names_match,
    tag_columns,
    tag_hash,
)
from indilog.base.log import (
    After,
    Entry,
    Log,
    PlacedSpan,
    Record,
    Session,
    check_after,
    check_batch,
    check_bound,
    check_limit,
    check_record,
    check_tags,
    check_time,
    check_wait,
)
from indilog.base.retention import Retention, checked_retention
from indilog.config import ClusterConfig
from indilog.kernel.metalog import Floor
from indilog.kernel.records import HEADER_BYTES, record_bytes
from indilog.roles.role import Ordered
from indilog.runtime.node import NodeShell
from indilog.runtime.waiters import resolve_each
from indilog.sdk.retention_log import RETENTION_LOG, record_policy, recorded_policy
from indilog.wire.cell_messages import CellAnswer, CellQuestion
from indilog.wire.messages import Direction
from indilog_compute.conditional.home import Conditional
from indilog_compute.engine import Engine
from indilog_compute.log_kinds import LogKinds
from indilog_compute.owner_appends import ReceivedAppend
from indilog_compute.reads.operation import PENDING, Answered, Tail
from indilog_compute.retention_service import RetentionService

_READS_PER_ITERATION: Final = 128

_FoundT = TypeVar("_FoundT", Record, list[Record])


class LocalLogs:
    """Opens logs over one engine (`LogSource`), and sends requests of its node to other nodes
    (`NodeRequests`).
    """

    def __init__(
        self, shell: NodeShell, node: NodeId, engine: Engine, limits: ClusterConfig
    ) -> None:
        self._shell = shell
        self.node = node
        self.engine = engine
        self.limits = limits
        self.future: Callable[[], asyncio.Future[Any]] = asyncio.get_running_loop().create_future
        """Makes a waiter for the engine."""
        self.wake: Callable[[], None] = functools.partial(shell.wake, node)
        """Schedules the engine's next iteration, for an append; raises `NotReadyError` if the
        platform has stopped.
        """
        self.hasten: Callable[[], None] = functools.partial(shell.hasten, node)
        """As `wake`, for all operations but appends."""
        self._reads = 0
        self.retention: RetentionService | None = None
        """Enforces retention policies; only one compute node of a platform has it."""
        self.kinds: LogKinds | None = None
        """Opens logs of other kinds than `shared`; None: there are no such logs."""
        self.routes: Mapping[str, object] = {}
        """`LogKinds.routes`: by name, the logs of other kinds, and the logs with a switch that is
        under way or done.
        """
        self.opened: Callable[[LocalLogs, str, Session], LocalLog] = LocalLog
        """Opens a `shared` log that may be switched to another kind."""

    @property
    def position(self) -> MetalogPosition:
        """The metalog position that this node has applied; other nodes may be ahead."""
        return self.engine.position

    def request_snapshots(self) -> MetalogPosition:
        """Ask all index nodes for snapshots of all positions below the returned position.

        Raises:
            NotReadyError: the platform has stopped.
        """
        position = self.engine.request_snapshots()
        self.hasten()
        return position

    async def ask_cells(self, node: NodeId, question: CellQuestion) -> CellAnswer:
        """See `NodeRequests.ask_cells`."""
        waiter = self.future()
        self.engine.cells.ask(node, question, waiter)
        self.hasten()
        answer: CellAnswer = await waiter
        return answer

    def full_disks(self) -> Collection[NodeId]:
        """See `NodeRequests.full_disks`."""
        return self.engine.cells.full_disks.until.keys()

    async def append_through(self, node: NodeId, folder: str, owner: str, content: bytes) -> bytes:
        """See `NodeRequests.append_through`."""
        waiter = self.future()
        self.engine.owner_appends.send(node, folder, owner, content, waiter)
        self.hasten()
        outcomes: bytes = await waiter
        return outcomes

    async def growth_of(self, nodes: Sequence[NodeId], folder: str, position: int) -> bool:
        """See `NodeRequests.growth_of`."""
        waiter = self.future()
        self.engine.growth.wait(nodes, folder, position, waiter)
        self.hasten()
        has_grown: bool = await waiter
        return has_grown

    def grew(self, folder: str, position: int) -> None:
        """See `NodeRequests.grew`."""
        if self.engine.growth.grew(folder, position):
            self.hasten()

    @asynccontextmanager
    async def requests_served(
        self,
        append: Callable[[str, str, bytes], Awaitable[bytes]],
        position_of: Callable[[str], int | None],
    ) -> AsyncIterator[None]:
        """While the block runs, serve the requests of other compute nodes about the logs of this
        node.

        Args:
            append: gets a folder, a tenure and a content; appends the content to the log in the
                folder, and returns the outcomes as `append_through` does.
            position_of: see `LogGrowth`.
        """
        serving = asyncio.create_task(self._serve_appends(append))
        self.engine.growth.position_of = position_of
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve_appends(self, append: Callable[[str, str, bytes], Awaitable[bytes]]) -> None:
        appends = self.engine.owner_appends

        async def serve(received: ReceivedAppend) -> None:
            message = received.message
            outcomes: bytes | None = None
            try:
                outcomes = await append(message.folder, message.owner, message.content)
            except IndilogError:
                pass
            except Exception:  # noqa: BLE001 - outermost: other requests are served
                structlog.get_logger().exception("an append for another node failed")
            appends.answer(received, outcomes)
            self.hasten()

        async with asyncio.TaskGroup() as group:
            while True:
                waiter = self.future()
                for received in appends.take(waiter) or await waiter:
                    group.create_task(serve(received))

    def log(self, name: str, session: Session | None = None) -> Log:
        """Return the log `name`, of whichever kind it is.

        Raises:
            InvalidTagError: no log can have that name.
        """
        session = session or Session()
        if self.kinds is not None and (other := self.kinds.log(name, session)) is not None:
            return other
        return self.opened(self, name, session)

    def shared(self, name: str, session: Session | None = None) -> LocalLog:
        """Return the log `name` as one of kind `shared`.

        Raises:
            InvalidTagError: no log can have that name.
        """
        return LocalLog(self, name, session or Session())

    def wake_readers(self) -> None:
        """Let all waiting reads check again whether there is a record or a switch of their log."""
        resolve_each(self.engine.watches.clear(), None)

    async def wait_until_synced(self, session: Session, position: MetalogPosition) -> None:
        """Wait until this process has synced the entries below `position`; then raise `session` to
        `position`.

        Every `_READS_PER_ITERATION`-th call lets the event loop run.

        Raises:
            NotReadyError: the platform has stopped. The entries may never have been synced, and
                after a restart other entries may have their positions.
        """
        self._reads += 1
        if self._reads >= _READS_PER_ITERATION:
            self._reads = 0
            await asyncio.sleep(0)
        if self._shell.holding:
            await self._shell.wait_until_synced()
        if self._shell.ended:
            raise NotReadyError("The platform has stopped; open it again.")
        session.saw(position)


class LocalLog(Log):
    """One log, through an engine in this process.

    Args:
        logs: the logs of the engine.
        name: name of the log.
        session: session of its calls.
        routes: names of the logs whose switch to another kind has begun. Appends to these logs go
            to `_followed`.
    """

    __slots__ = (
        "_bytes_max", "_engine", "_future", "_limits", "_logs", "_names", "_routes", "_session",
        "_tag", "_tags_max", "_wake", "name",
    )  # fmt: skip

    def __init__(
        self, logs: LocalLogs, name: str, session: Session, routes: Container[str] = ()
    ) -> None:
        self.name = name
        self._routes = routes
        self._logs = logs
        self._engine = logs.engine
        self._limits = logs.limits
        self._bytes_max = logs.limits.record_bytes_max
        self._tags_max = logs.limits.record_tags_max
        self._session = session
        self._future = logs.future
        self._wake = logs.wake
        self._tag = log_tag(name)
        self._names = name.encode()

    @property
    def scope(self) -> object:
        """The `LocalLogs` that opened this log; there is one for each engine (`Log.scope`)."""
        return self._logs

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """Append a record; see `Log.append`."""
        if type(tags) is not tuple:
            tags = _as_tuple(tags)
        if type(data) is not bytes or len(data) > self._bytes_max or len(tags) > self._tags_max:
            check_record(data, tags, bytes_max=self._bytes_max, tags_max=self._tags_max)
        if self.name in self._routes:
            return await self._followed().append(data, tags=tags)
        columns = tag_columns(self.name, tags)
        waiter = self._future()
        if self._engine.append(data, columns, waiter):
            self._wake()
        ordered: Ordered = await waiter
        seqnum, position = ordered
        session = self._session
        if position > session.position:  # noqa: PLR1730 - as `Session.saw`, without two calls
            session.position = position
        if self.name in self._routes:
            return await self._append_overtaken(seqnum, data, tags)
        return seqnum

    def _followed(self) -> Log:
        """Return the log that continues this one after a switch began; see `FollowingLog`."""
        raise AssertionError(f"log {self.name} follows no switch")

    async def _append_overtaken(
        self,
        seqnum: SeqNum,  # noqa: ARG002
        data: bytes,  # noqa: ARG002
        tags: tuple[UserTag, ...],  # noqa: ARG002
    ) -> SeqNum:
        """Return the seqnum of an append during which a switch began; see `FollowingLog`."""
        raise AssertionError(f"log {self.name} follows no switch")

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """Append records, all or none; see `Log.append_batch`."""
        if not entries and after is None:
            return []
        limits = self._limits
        check_batch(entries, records_max=limits.batch_records_max)
        records, size = [], HEADER_BYTES
        for entry in entries:
            tags = _as_tuple(entry.tags)
            check_record(entry.data, tags, bytes_max=self._bytes_max, tags_max=self._tags_max)
            columns = tag_columns(self.name, tags)
            records.append((entry.data, columns))
            size += record_bytes(entry.data, columns)
        if size > limits.batch_bytes_max:
            raise TooLargeError(
                "The batch's size in bytes", size=size, limit=limits.batch_bytes_max
            )
        if after is not None:
            first = await self._append_if(after, entries)
            return list(range(first, first + len(records)))
        waiter = self._logs.future()
        self._wake()
        self._engine.append_batch(records, waiter)
        ordered: Ordered = await waiter
        first, position = ordered
        self._session.saw(position)
        return list(range(first, first + len(records)))

    async def _append_if(self, after: After, entries: Sequence[Entry]) -> SeqNum:
        """Append checked entries if the condition holds; return the first seqnum."""
        checked = check_after(self.name, after, entries)
        records = [(entry.data, tuple(entry.tags)) for entry in entries]
        waiter = self._logs.future()
        self._engine.append_if(Conditional(self.name, checked, records), waiter)
        self._logs.hasten()
        answer: Ordered | Answered = await waiter
        if isinstance(answer, Answered):
            self._session.saw(answer.position)
            assert isinstance(answer.value, Exception), "an append without effect has an error"
            raise answer.value
        first, position = answer
        self._session.saw(position)
        return first

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """Return the record at `seqnum`; see `Log.read`."""
        record = await self._read(Direction.NEXT, EMPTY_TAG, check_bound(seqnum), fresh=fresh)
        if record is None or record.seqnum != seqnum:
            return None
        return record if names_match(record.names, self.name, None) else None

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        """Return the first record with `tag` from `bound` on; see `Log.read_next`."""
        bound = check_bound(bound)
        if wait is None or not (wait_s := check_wait(wait)):
            return await self._read_matching(Direction.NEXT, tag, bound, fresh=fresh)
        read = functools.partial(self._read_matching, Direction.NEXT, tag, bound)
        return await self._read_until_found(read, tag, bound, wait_s, fresh=fresh)

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """Return the last record with `tag` up to `bound`; see `Log.read_prev`."""
        return await self._read_matching(Direction.PREV, tag, check_bound(bound), fresh=fresh)

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        """Return a page of records; see `Log.read_range`."""
        bound, limit = check_bound(bound), check_limit(limit)
        read = functools.partial(self._read_page, tag, bound, limit)
        if wait is None or not (wait_s := check_wait(wait)):
            return await read(fresh=fresh)
        return await self._read_until_found(read, tag, bound, wait_s, fresh=fresh) or []

    async def _read_page(
        self, tag: UserTag | None, bound: SeqNum, limit: int, *, fresh: bool
    ) -> list[Record]:
        tag_wanted = self._hash(tag)
        while True:
            waiter = self._logs.future()
            position = self._session.position
            self._engine.read_page(
                tag_wanted, bound, position, limit, waiter, log=self._tag, fresh=fresh
            )
            self._logs.hasten()
            page = self._seen(await waiter)
            assert isinstance(page, list)
            fresh = False
            matching = [r for r in page if names_match(r.names, self.name, tag)]
            if matching or not page:
                return matching
            bound = page[-1].seqnum + 1

    async def tail(self) -> SeqNum:
        """Return the first seqnum not yet written; see `Log.tail`."""
        return (await self._ask_tail()).seqnum

    async def now(self) -> float:
        """Return the time of the log; see `Log.now`."""
        return (await self._ask_tail()).time_us / 1e6

    async def _ask_tail(self) -> Tail:
        waiter = self._logs.future()
        self._engine.read_tail(waiter)
        self._logs.hasten()
        tail = self._seen(await waiter)
        assert isinstance(tail, Tail)
        return tail

    async def find_time(self, time: float) -> SeqNum:
        """Return the first seqnum ordered at `time` or later; see `Log.find_time`."""
        waiter = self._logs.future()
        # If `time` is in the future, the answer must lie above every record that this node knows
        # to be ordered.
        position = max(self._session.position, self._engine.position)
        self._engine.order_lookups.find_time(check_time(time), position, waiter)
        self._logs.hasten()
        seqnum = self._seen(await waiter)
        assert isinstance(seqnum, int)
        return seqnum

    async def places(self, start: SeqNum, end: SeqNum) -> Sequence[PlacedSpan]:
        """Return the places of the records in [start, end) of all logs, as spans from `start` on.

        The spans may end before `end`. No span: `start` is not ordered yet.

        Raises:
            ValueError: the seqnums are not 0 <= start < end.
        """
        if not check_bound(start) < check_bound(end):
            raise ValueError(f"places are of seqnums [start, end), not [{start}, {end})")
        waiter = self._logs.future()
        position = max(self._session.position, self._engine.position)
        self._engine.order_lookups.find_places(start, end, position, waiter)
        self._logs.hasten()
        spans = self._seen(await waiter)
        assert isinstance(spans, tuple)
        return spans

    async def shard(self) -> ShardId | None:
        """Return the shard that this compute node writes; None: the node has no shard now."""
        return self._engine.shard

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """Trim the records below `until`; see `Log.trim`."""
        floor = Floor(self._hash(tag), check_bound(until), tag is None, self._hash(None))
        waiter = self._logs.future()
        self._engine.trims.start(floor, waiter)
        self._logs.hasten()
        self._seen(await waiter)

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """Set this log's policy; see `Log.set_retention`."""
        retention = checked_retention(self.name, age_s, size_bytes)
        policies = self._logs.log(RETENTION_LOG, self._session)
        await record_policy(policies, self.name, retention)

    async def retention(self) -> Retention:
        """Return this log's policy; see `Log.retention`."""
        return await recorded_policy(self._logs.log(RETENTION_LOG, self._session), self.name)

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Keep aux data beside a record; see `Log.set_aux`."""
        if type(aux) is not bytes:
            raise TypeError(f"Aux data must be bytes, not {type(aux).__name__}; encode it first.")
        if len(aux) > self._limits.aux_bytes_max:
            raise TooLargeError(
                "The aux data's size in bytes", size=len(aux), limit=self._limits.aux_bytes_max
            )
        if await self.read(seqnum) is not None:
            self._engine.set_aux(seqnum, aux)
            self._logs.hasten()

    # --- inside

    def _hash(self, tag: UserTag | None) -> int:
        return self._tag if tag is None else tag_hash(self.name, tag)

    def _seen(self, answer: object) -> object:
        assert isinstance(answer, Answered)
        self._session.saw(answer.position)
        if isinstance(answer.value, TrimmedError):
            raise answer.value
        return answer.value

    async def _read(
        self,
        direction: Direction,
        tag: int,
        bound: SeqNum,
        log_names: bytes | None = None,
        *,
        fresh: bool = False,
    ) -> Record | None:
        """Read by the hash of a tag. The result may be a record of another tag with the same hash,
        so the caller compares names.
        """
        engine, session = self._engine, self._session
        waiter = self._logs.future()
        try:
            answer = engine.read(
                direction, tag, bound, session.position, waiter, log_names,
                log=self._tag, fresh=fresh,
            )  # fmt: skip
        except TrimmedError:
            await self._logs.wait_until_synced(session, engine.position)
            raise
        if answer is PENDING:
            self._logs.hasten()
            value = self._seen(await waiter)
            assert value is None or isinstance(value, Record)
            return value
        position = engine.position if tag == EMPTY_TAG else engine.tag_position
        await self._logs.wait_until_synced(session, position)
        return answer  # type: ignore[return-value]

    async def _read_matching(
        self, direction: Direction, tag: UserTag | None, bound: SeqNum, *, fresh: bool = False
    ) -> Record | None:
        hashed = self._hash(tag)
        log_names = self._names if tag is None else None
        while True:
            record = await self._read(direction, hashed, bound, log_names, fresh=fresh)
            fresh = False
            if record is None or names_match(record.names, self.name, tag):
                return record
            bound = record.seqnum + (1 if direction is Direction.NEXT else -1)
            if bound < 0:
                return None

    async def _read_until_found(
        self,
        read: Callable[..., Awaitable[_FoundT | None]],
        tag: UserTag | None,
        bound: SeqNum,
        wait_s: float,
        *,
        fresh: bool,
    ) -> _FoundT | None:
        """Read until a record is found or `wait_s` seconds have passed; an infinite wait has no
        timer.

        The watch is added before each read, so that a record that arrives after the read resolves
        the watch.
        """
        hashed = self._hash(tag)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            watch = self._logs.future()
            self._engine.watches.add(hashed, bound, watch)
            timer: asyncio.TimerHandle | None = None
            try:
                found = await read(fresh=fresh)
                fresh = False
                if found or loop.time() >= end or self.name in self._routes:
                    return found
                if end < math.inf:
                    timer = loop.call_at(end, _resolve_none(watch))
                if self._engine.deadline() is None:
                    self._logs.hasten()  # so that an idle engine also detects a lost entry
                await watch
            finally:
                self._engine.watches.remove(hashed, watch)
                if timer is not None:
                    timer.cancel()


def sharded(log: Log) -> LocalLog:
    """Return `log`, whose records must be in shards.

    Raises:
        WrongStateError: the log is of another kind.
    """
    if not isinstance(log, LocalLog):
        raise WrongStateError(f"Log {log.name} is not of kind shared, so it has no shards.")
    return log


def _as_tuple(tags: Iterable[UserTag]) -> tuple[UserTag, ...]:
    """Return tags as a tuple.

    Raises:
        InvalidTagError: `tags` is a single text; its letters would become tags.
    """
    check_tags(tags)
    return tuple(tags)


def _resolve_none(waiter: asyncio.Future[object]) -> Callable[[], None]:
    def resolve() -> None:
        if not waiter.done():
            waiter.set_result(None)

    return resolve
