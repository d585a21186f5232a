"""Creates, switches and routes logs of other kinds than `shared` on one compute node, and enforces
their retention.

All nodes agree by the records of the catalog (`catalog`), which this module appends and follows. A
log that is not `shared`, or that was switched, has a `Route`. Calls of all remaining logs do not
pass through this module. `OpenLogs` opens logspaces of other kinds (`indilog_cells.opening`).

A switch has these steps, and any node may do the next one: record that it begins, wait until all
compute nodes hold the log's calls, record that it can no longer be abandoned, end the old segment,
and record the bridge, which is the place where the old segment ends and the new one begins.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec
import structlog

from indilog.base.errors import (
    ConditionFailedError,
    IndilogError,
    NotReadyError,
    SealedError,
    TrimmedError,
    WrongStateError,
)
from indilog.base.ids import NodeId, SeqNum
from indilog.base.log import After, Log, LogSource, Session, check_log_name
from indilog.base.log_kinds import (
    OBJECT_STORE,
    ORDER_FIRST,
    OWNED,
    SHARED,
    STRIPES,
    LogInfo,
    LogKind,
    check_kind,
    check_stripes,
)
from indilog.base.retention import Retention
from indilog.config import Config
from indilog.kernel.cell_layout import CellLayout
from indilog.kernel.view import View
from indilog.roles.node_requests import NodeRequests
from indilog.sdk.retention_log import RETENTION_LOG, record_policy
from indilog.wire.cell_messages import CellOutcome, CellsSeal
from indilog_compute.log_kinds.catalog import ReplayedCatalog
from indilog_compute.log_kinds.catalog_records import (
    CreatedLog,
    CreatedLogState,
    NewSegment,
    segment_on_nodes,
)
from indilog_compute.log_kinds.freeing import Freeing
from indilog_compute.log_kinds.opened_segment import (
    OpenedSegment,
    OpenLogs,
    ReleaseSegment,
    freed_error,
)
from indilog_compute.log_kinds.route import Route
from indilog_compute.log_kinds.segmented_log import SegmentedLog
from indilog_compute.log_kinds.segments import FIRST, LogSegment
from indilog_compute.retention import RetentionRounds

_PAUSE_S: Final = 1.0
_FOLLOW_S: Final = 10.0
"""Seconds that a creation or a switch waits for the other compute nodes to follow the catalog."""
_FINISH_S: Final = 15.0
"""If a switch gets no record for this many seconds, any compute node ends it. More than
`_FOLLOW_S`.
"""
_SEGMENTS_MAX: Final = 64
"""Largest number of segments of one log."""
_ON_NODES: Final = (ORDER_FIRST, OWNED)
"""Kinds whose cells are on storage nodes. Their logs have layouts."""
_ATTEMPTS_MAX: Final = 3
"""Attempts to begin a switch while other callers switch the same log."""


class SharedLogs(LogSource, Protocol):
    """The logs of one compute node."""

    def shared(self, name: str, session: Session) -> Log:
        """Return the log `name` as one of kind `shared`."""

    def wake_readers(self) -> None:
        """Let all waiting reads of `shared` logs check again whether a switch has begun."""


class _OneLog:
    """A source that has one log under all names. `RetentionRounds` asks it for the tail and the
    time of that log, whatever name it uses.
    """

    def __init__(self, route: Route) -> None:
        self._route = route

    def log(self, _name: str, session: Session) -> Log:
        """Return the log."""
        return SegmentedLog(self._route, session)


class LogKinds:
    """The created logs, as one compute node knows them.

    Args:
        logs: the logs, through the same node.
        node: the node.
        view: returns the newest view.
        open_logs: opens a logspace.
        requests: the requests to other nodes.
        release: deletes the cells or objects of a freed segment.
        config: settings.
        has_directory: whether logs may be kept in a directory of the platform, which all compute
            nodes reach.
        serves: tells whether this compute node is the one that enforces retention policies, and
            checks layouts.

    Attributes:
        node: the node.
        requests: see the argument.
        serves: see the argument.
        routes: by name, the routes of logs whose calls do not go directly to the `shared` log of
            that name.
    """

    def __init__(
        self,
        logs: SharedLogs,
        node: NodeId,
        *,
        view: Callable[[], View],
        open_logs: OpenLogs,
        requests: NodeRequests,
        release: ReleaseSegment,
        config: Config,
        has_directory: bool,
        serves: Callable[[], bool],
    ) -> None:
        self._logs = logs
        self.node = node
        self._view = view
        self._open_logs = open_logs
        self.requests = requests
        self._copies = config.cluster.replicas
        self._config = config.node
        self._has_directory = has_directory
        self.serves = serves
        self._catalog = ReplayedCatalog(logs, node, self._on_change)
        self.routes: dict[str, Route] = {}
        self._made: dict[str, Route] = {}
        """By name, all routes that were made. A route stays after its switch was abandoned, because
        callers keep it.
        """
        self._opened: dict[tuple[str, SeqNum], OpenedSegment] = {}
        self._rounds: dict[tuple[str, bool], RetentionRounds] = {}
        """The retention rounds, by the name of the log and whether it was switched."""
        self._closing: set[asyncio.Task[None]] = set()
        """Tasks that close freed segments."""
        self._freeing = Freeing(
            self._catalog,
            view=view,
            wait_until_unused=self._wait_until_unused,
            release=lambda name, segment: release(self._created_segment(name, segment)),
        )
        self._announced = -1
        self._tasks: list[asyncio.Task[None]] = []
        self._finishing: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Replay the catalog; follow it from now on.

        Raises:
            NotReadyError: the catalog cannot be read.
        """
        await self._catalog.catch_up()
        await self._announce()
        loop = asyncio.get_running_loop()
        works = self._follow(), self._enforce(), self._free(), self._keep_open()
        self._tasks = [loop.create_task(work) for work in works]

    async def stop(self) -> None:
        """Close all logs."""
        tasks = [*self._tasks, *self._finishing.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        for opened in self._opened.values():
            await opened.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def log(self, name: str, session: Session) -> Log | None:
        """Return the log `name`; None: it is `shared`, and no switch of it ever began."""
        route = self.routes.get(name)
        return None if route is None else SegmentedLog(route, session)

    async def created(self) -> list[LogInfo]:
        """Return all created logs, by name.

        Raises:
            NotReadyError, QuorumUnavailableError: the catalog cannot be read now.
        """
        await self._catch_up()
        return [self._catalog.logs[name].created.info for name in sorted(self._catalog.logs)]

    async def create(self, name: str, kind: str = SHARED, *, stripes: int | None = None) -> LogInfo:
        """Create a log. Creating it again is harmless, and returns the same description.

        When this returns, every compute node routes the log to its kind.

        Args:
            name: the name of the log.
            kind: the kind of the log.
            stripes: see `LogInfo`; None: the platform chooses it.

        Raises:
            InvalidTagError: no log can have that name.
            ValueError: there is no such kind, or it cannot have so many stripes.
            WrongStateError: the log has another kind or another number of stripes, or has records
                already; or there is no place for objects, or the limit of logs of this kind is
                reached. Nothing was created.
            NotReadyError: a storage node or the object store does not answer, and nothing was
                created; or a compute node does not answer, and the log may be created. Repeat the
                call.
            AppendOutcomeUnknownError: the log may be created; repeat the call.
        """
        check_log_name(name)
        wanted = check_kind(kind)
        check_stripes(wanted, stripes)
        await self._catch_up()
        if name not in self._catalog.logs:
            await self._create(name, wanted, stripes)
            await self._announce()
        found = self._catalog.logs[name].created
        if found.kind != wanted:
            raise WrongStateError(
                f"Log {name} is of kind {found.kind}; switch it to {wanted}, or choose another "
                "name."
            )
        if not found.is_like(wanted, stripes):
            raise WrongStateError(
                f"Log {name} has {found.stripes:,} stripes; switch it to {stripes:,} stripes, or "
                "choose another name."
            )
        if wanted != SHARED:
            await self._wait_for_nodes(name, found.seqnum, found.creator)
        return found.info

    async def switch(self, name: str, kind: str, *, stripes: int | None = None) -> LogInfo:
        """Continue a log as one of another kind, or with another number of stripes. A log that
        already is like that stays as it is.

        Appends, reads and subscriptions continue; see docs/KINDS.md. If this call fails or its node
        crashes, any other node completes or abandons the switch.

        Args:
            name: the name of the log.
            kind: its new kind.
            stripes: see `LogInfo`; None: as many as the log has if it has this kind already, else
                the platform chooses.

        Raises:
            InvalidTagError: no log can have that name.
            ValueError: there is no such kind, or it cannot have so many stripes.
            WrongStateError: there is no place for objects, or a limit is reached; nothing was
                changed.
            NotReadyError: a compute node, a storage node or the object store does not answer, or
                other callers switch the log at the same time. The kind stays, unless another node
                completes the switch later.
            AppendOutcomeUnknownError: the log may be switched; repeat the call.
        """
        check_log_name(name)
        wanted = check_kind(kind)
        check_stripes(wanted, stripes)
        await self._catch_up()
        if name not in self._catalog.logs:
            await self._catalog.create(name, NewSegment(kind=SHARED))
        state = self._catalog.logs[name]
        for _ in range(_ATTEMPTS_MAX):
            if state.switch is not None:
                route = self.routes[name]
                await route.wait_until_open(route.deadline(_FINISH_S))
            if state.created.is_like(wanted, stripes):
                return state.created.info
            if await self._switch_once(state, wanted, stripes):
                return state.created.info
        raise NotReadyError(f"Log {name} is being switched by other callers; repeat the call.")

    async def _switch_once(
        self, state: CreatedLogState, kind: LogKind, stripes: int | None
    ) -> bool:
        """Try to switch a log. Return whether the log is like that now; False: another switch began
        before, or was made instead.
        """
        name, last = state.created.log, state.last
        if len(state.segments) >= _SEGMENTS_MAX:
            raise WrongStateError(
                f"Log {name} has {len(state.segments):,} segments, which is the limit; trim it "
                "past its oldest ones. Nothing was changed."
            )
        segment = await self._new_segment(name, kind, stripes)
        tail = await self._logs.log(name, Session()).tail()
        await self._catalog.close(name, last, segment, tail=tail)
        await self._announce()
        switch = state.switch
        if switch is None or switch.folder != segment.folder or switch.switcher != self.node:
            return False
        try:
            await self._wait_for_nodes(name, switch.number, self.node)
        except NotReadyError:
            await self._catalog.reopen(name, switch.number)
            if state.switch is None or state.switch.number != switch.number:
                raise
        else:
            await self._catalog.seal(name, switch.number)
        await self._complete(state)
        return state.created.is_like(kind, stripes)

    async def _complete(self, state: CreatedLogState) -> None:
        """If a switch can no longer be abandoned, end the old segment and record the bridge."""
        name, last, switch = state.created.log, state.last, state.switch
        if switch is None or not switch.is_sealing:
            return
        old = state.segments[-1]
        log = await self._local(name, old)
        if old.kind == SHARED:
            end = await log.tail()
        else:
            end = await (await self._opened_segment(name, old).logs()).end()
        time = await log.now()
        if not state.switches and old.kind != SHARED:
            await self._move_policy(name, log)
        await self._catalog.bridge(name, last, end=end, time=time)

    async def _move_policy(self, name: str, log: Log) -> None:
        """At the first switch of a log, copy its retention policy to `$retention`, which has the
        policies of switched logs. A policy that is there already is not replaced: it is newer.
        """
        policy = await log.retention()
        if not policy.keeps_all:
            policies = self._logs.log(RETENTION_LOG, Session())
            with suppress(ConditionFailedError):
                await record_policy(policies, name, policy, after=After(name))

    async def _create(self, name: str, kind: LogKind, stripes: int | None) -> None:
        """Prepare the storage of a log, then record its creation."""
        if kind != SHARED:
            await self._check_unused(name)
        await self._catalog.create(name, await self._new_segment(name, kind, stripes))

    async def _new_segment(self, name: str, kind: LogKind, stripes: int | None) -> NewSegment:
        """Return a new segment for a log, after preparing its storage.

        Raises:
            WrongStateError: there is no place for objects, or a limit is reached.
            NotReadyError: a storage node or the object store does not answer.
        """
        if kind == SHARED:
            return NewSegment(kind=kind)
        self._check_limits(kind)
        folder = new_folder(name)
        if kind == OBJECT_STORE:
            place = self._config.object_logs.object_place
            new = NewSegment(kind=kind, place=place, folder=folder, stripes=stripes or STRIPES)
            await self._create_objects(name, new)
        else:
            new = segment_on_nodes(kind, folder, self.storage_nodes(), self._copies, stripes)
            assert new.layout is not None, "it is on storage nodes"
            await self._open_spaces(new.layout)
        return new

    async def _create_objects(self, name: str, segment: NewSegment) -> None:
        """Create the log of a new segment in an object store."""
        new = CreatedLog(
            log=name,
            kind=segment.kind,
            place=segment.place,
            folder=segment.folder,
            creator=self.node,
            seqnum=0,
            created_at=0.0,
            stripes=segment.stripes,
        )
        async with self._open_logs(new, is_new=True):
            pass

    async def _open_spaces(self, layout: CellLayout) -> None:
        asked = sorted(layout.replicas)
        answers = await asyncio.gather(
            *(
                self.requests.ask_cells(node, CellsSeal(0, space, layout.epoch, opens=True))
                for node, space in asked
            )
        )
        for (node, _), answer in zip(asked, answers, strict=True):
            if answer.outcome is not CellOutcome.DONE:
                raise NotReadyError(f"{node} takes no new log for now; nothing was changed.")

    def _check_limits(self, kind: LogKind) -> None:
        """Check that there may be a further segment of a kind.

        Raises:
            WrongStateError: there is no place for objects, or a limit is reached.
        """
        objects, cells = self._config.object_logs, self._config.cells
        if kind == OBJECT_STORE and not objects.object_place and not self._has_directory:
            raise WrongStateError(
                "Logs of kind object-store need a place that all machines reach; set object_place."
            )
        limits = {
            OBJECT_STORE: (objects.object_logs_max, "object_logs_max"),
            ORDER_FIRST: (cells.order_first_logs_max, "order_first_logs_max"),
            OWNED: (cells.owned_logs_max, "owned_logs_max"),
        }
        limit, setting = limits[kind]
        count = sum(each.created.kind == kind for each in self._opened.values())
        if count >= limit:
            raise WrongStateError(
                f"There are {count:,} logs of kind {kind}, which is the limit; raise {setting}."
            )

    async def _check_unused(self, name: str) -> None:
        """Check that a log has no records.

        Raises:
            WrongStateError: the log has records.
        """
        try:
            first = await self._logs.log(name, Session()).read_next(fresh=True)
        except TrimmedError:
            first = None
        else:
            if first is None:
                return
        raise WrongStateError(
            f"Log {name} has records already, so its kind is shared; switch it, or choose another "
            "name."
        )

    async def _wait_for_nodes(self, name: str, seqnum: SeqNum, author: NodeId | None) -> None:
        """Wait until all other compute nodes, except the `author` of the record at `seqnum`, have
        replayed that record.

        Raises:
            NotReadyError: a node did not replay it in time; the message names such nodes.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _FOLLOW_S
        while missing := [
            node
            for node in self._view().engines
            if node not in (self.node, author) and not self._catalog.has_followed(node, seqnum)
        ]:
            if loop.time() >= until:
                raise NotReadyError(
                    f"{', '.join(missing)} did not answer about log {name} within {_FOLLOW_S:g} s; "
                    "repeat the call."
                )
            await self._catalog.catch_up(wait_s=min(_PAUSE_S, _FOLLOW_S))

    async def _wait_until_unused(self, name: str, seqnum: SeqNum) -> None:
        """Wait until no compute node uses what the record `freed` at `seqnum` leaves out; errors
        are those of `_wait_for_nodes`.
        """
        await self._announce()
        await self._wait_for_nodes(name, seqnum, None)

    # --- the layouts of segments whose cells are on storage nodes

    def compute_nodes(self) -> Sequence[NodeId]:
        """Return the compute nodes of the newest view."""
        return self._view().engines

    def storage_nodes(self) -> Sequence[NodeId]:
        """Return the storage nodes of the newest view."""
        return self._view().storage_nodes

    def layout(self, folder: str) -> CellLayout:
        """Return the newest layout that this node knows of the segment in `folder`."""
        return self._catalog.layout(folder)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return what is wrong with logs, by log: `filling` has the storage nodes to which its
        contents are being copied, `failing` why this compute node cannot use it.
        """
        opened = self._opened.values()
        failures = {each.created.log: each.failure for each in opened if each.failure}
        return {"filling": self._filling(), "failing": failures}

    def _filling(self) -> dict[str, list[NodeId]]:
        found: dict[str, set[NodeId]] = {}
        for log, layout in self._catalog.layouts():
            if layout.is_filling:
                nodes = {each.node for chain in layout.chains for each in chain if each.is_filling}
                found.setdefault(log, set()).update(nodes)
        return {log: sorted(found[log]) for log in sorted(found)}

    async def append_content(self, folder: str, owner: str, content: bytes) -> bytes:
        """Append a content of another compute node to the log in `folder`, as its owner; see
        `OtherLogs.append_content`.
        """
        for opened in self._opened.values():
            if opened.created.folder == folder:
                return await opened.append_content(owner, content)
        raise SealedError("This process does not own the log.")

    def position_of(self, folder: str) -> int | None:
        """Return how many cells of the log in `folder` this node has applied; None: the log is not
        open here.
        """
        for opened in self._opened.values():
            if opened.created.folder == folder:
                return opened.position
        return None

    async def renew_layouts(self) -> None:
        """Read the layouts that were recorded before this call.

        Raises:
            NotReadyError, QuorumUnavailableError: the catalog cannot be read now.
        """
        await self._catch_up()

    async def change_layout(self, folder: str, before: CellLayout, after: CellLayout) -> bool:
        """Record a layout; see `ReplayedCatalog.change_layout`."""
        return await self._catalog.change_layout(folder, before, after)

    # --- inside

    def _on_change(self, state: CreatedLogState) -> None:
        """Route a log by its state in the catalog, which has changed."""
        name = state.created.log
        self._close_freed(state)
        for segment in state.segments:
            if segment.kind != SHARED and (name, segment.number) not in self._opened:
                self._opened_segment(name, segment)
        if not state.is_plain:
            self._changed.set()
        route = self._made.get(name)
        if route is None and not state.is_plain:
            is_first_shared = state.segments[0].kind == SHARED and not state.switches
            route = self._new_route(state, self._logs if is_first_shared else None)
            self._made[name] = route
        if state.is_plain:
            self.routes.pop(name, None)
        elif route is not None and name not in self.routes:
            self.routes[name] = route
            self._logs.wake_readers()
        if route is not None:
            route.changed()
        if state.switch is not None and name not in self._finishing:
            self._start_finishing(state)

    def _close_freed(self, state: CreatedLogState) -> None:
        """Close the segments of a log that are freed."""
        name, kept = state.created.log, {segment.number for segment in state.segments}
        for key in [k for k in self._opened if k[0] == name and k[1] not in kept]:
            task = asyncio.get_running_loop().create_task(self._opened.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _new_route(self, state: CreatedLogState, scope: object | None) -> Route:
        name = state.created.log

        async def other(segment: LogSegment) -> Log:
            return await self._opened_segment(name, segment).log()

        def ended_at(segment: LogSegment) -> SeqNum | None:
            is_shared = segment.kind == SHARED
            return None if is_shared else self._opened_segment(name, segment).ended_at

        return Route(
            state,
            scope,
            shared=self._logs.shared,
            other=other,
            ended_at=ended_at,
            follow=self._catch_up,
            append_timeout_s=self._config.appends.append_timeout_s,
            read_timeout_s=self._config.reads.read_timeout_s,
        )

    def _opened_segment(self, name: str, segment: LogSegment) -> OpenedSegment:
        key = (name, segment.number)
        if (found := self._opened.get(key)) is None:
            if all(segment.number != each.number for each in self._catalog.logs[name].segments):
                raise freed_error(name)
            created = self._created_segment(name, segment)
            found = self._opened[key] = OpenedSegment(created, self._open_logs)
        return found

    def _created_segment(self, name: str, segment: LogSegment) -> CreatedLog:
        return msgspec.structs.replace(
            self._catalog.logs[name].created,
            kind=segment.kind,
            place=segment.place,
            folder=segment.folder,
        )

    async def _local(self, name: str, segment: LogSegment) -> Log:
        if segment.kind == SHARED:
            return self._logs.shared(segment.local_log, Session())
        return await self._opened_segment(name, segment).log()

    async def _catch_up(self) -> None:
        await self._catalog.catch_up()
        await self._announce()

    async def _announce(self) -> None:
        """Record that this node has followed the catalog up to the last record that it has to
        follow. From then on it routes new logs, holds the calls of logs that are being switched,
        and uses no freed segment.
        The first announcement tells other nodes which records this one reads, so it is also made
        if there is no record to follow.
        """
        if self._closing:
            await asyncio.wait(self._closing)
        last = self._catalog.last
        if last is None and self._catalog.logs and len(self._view().engines) > 1:
            last = 0
        if last is not None and last > self._announced:
            self._announced = last
            try:
                await self._catalog.announce(last)
            except BaseException:
                self._announced = -1
                raise

    def _start_finishing(self, state: CreatedLogState) -> None:
        name = state.created.log
        task = asyncio.get_running_loop().create_task(self._finish(state))
        self._finishing[name] = task
        task.add_done_callback(lambda _: self._finishing.pop(name, None))

    async def _finish(self, state: CreatedLogState) -> None:
        """Complete or abandon a switch that no node has continued for `_FINISH_S` seconds; return
        when no switch of the log is under way.
        """
        while (switch := state.switch) is not None:
            last = state.last
            await asyncio.sleep(_FINISH_S)
            if state.last != last:
                continue
            try:
                if switch.is_sealing:
                    await self._complete(state)
                else:
                    await self._catalog.reopen(state.created.log, last)
            except IndilogError as error:
                structlog.get_logger().warning(
                    "a switch of a log is not ended", log=state.created.log, reason=str(error)
                )
            except Exception:  # noqa: BLE001 - outermost: the next attempt may succeed
                structlog.get_logger().exception("ending a switch failed", log=state.created.log)

    async def _follow(self) -> None:
        """Replay the catalog as it grows."""
        await self._repeat(self._follow_once, 0.0)

    async def _follow_once(self) -> None:
        await self._announce()  # also if the announcement before failed
        await self._catalog.catch_up(wait_s=math.inf)

    async def _enforce(self) -> None:
        """Enforce the retention policies of the logs of other kinds."""
        await self._changed.wait()
        await self._repeat(self._enforce_once, self._config.trims.retention_interval_s)

    async def _enforce_once(self) -> None:
        if not self.serves():
            return
        await _each(self._enforce_log(*each) for each in list(self.routes.items()))

    async def _enforce_log(self, name: str, route: Route) -> None:
        if route.state.switches:
            await self._enforce_switched(name, route)
        elif (opened := self._opened.get((name, FIRST))) is not None:
            await self._enforce_other(name, opened)

    async def _enforce_other(self, name: str, opened: OpenedSegment) -> None:
        """Enforce the policies of a log of another kind that was never switched."""
        logs = await opened.logs()
        await self._run_rounds((name, False), logs, await logs.policies())

    async def _enforce_switched(self, name: str, route: Route) -> None:
        policy = await SegmentedLog(route, Session()).retention()
        policies = {} if policy.keeps_all else {name: policy}
        await self._run_rounds((name, True), _OneLog(route), policies)

    async def _run_rounds(
        self, key: tuple[str, bool], logs: LogSource, policies: Mapping[str, Retention]
    ) -> None:
        if key not in self._rounds:
            self._rounds[key] = RetentionRounds(logs, self._config, asyncio.sleep)
        rounds = self._rounds[key]
        rounds.take(policies)
        while policies and await rounds.run():
            continue

    async def _free(self) -> None:
        """Free closed segments whose records are all trimmed."""
        await self._changed.wait()
        await self._repeat(self._free_once, self._config.trims.retention_interval_s)

    async def _free_once(self) -> None:
        if self.serves():
            await _each(self._freeing.run(route) for route in list(self.routes.values()))

    async def _keep_open(self) -> None:
        """On the compute node that checks layouts, keep the logs on storage nodes open: an open log
        checks its layout.
        """
        await self._changed.wait()
        await self._repeat(self._open_once, _PAUSE_S)

    async def _open_once(self) -> None:
        if not self.serves():
            return
        on_nodes = [each for each in self._opened.values() if each.created.kind in _ON_NODES]
        await _each(opened.logs() for opened in on_nodes)

    @staticmethod
    async def _repeat(work: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            wait_s = pause_s
            try:
                await work()
            except IndilogError as error:
                structlog.get_logger().warning("logs of other kinds", reason=str(error))
                wait_s = max(_PAUSE_S, pause_s)
            except Exception:  # noqa: BLE001 - outermost: the next attempt may succeed
                structlog.get_logger().exception("logs of other kinds failed")
                wait_s = max(_PAUSE_S, pause_s)
            await asyncio.sleep(wait_s)


async def _each(works: Iterable[Awaitable[object]]) -> None:
    """Await all works, one after another. After an error, the further works are awaited too.

    Raises:
        IndilogError: the first error of a work.
    """
    errors: list[IndilogError] = []
    for work in works:
        try:
            await work
        except IndilogError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def new_folder(log: str) -> str:
    """Return a folder for a new segment of a log. No other segment has it."""
    return f"{quote(log, safe='')[:64]}-{secrets.token_hex(4)}"
