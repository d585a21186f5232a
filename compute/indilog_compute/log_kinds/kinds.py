"""Logs of other kinds than `shared` on one compute node: creation, routing, retention."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import quote

import structlog

from indilog.base.errors import IndilogError, NotReadyError, TrimmedError, WrongStateError
from indilog.base.ids import NodeId
from indilog.base.log import Log, LogSource, Session, check_log_name
from indilog.base.log_kinds import OBJECT_STORE, ORDER_FIRST, SHARED, LogInfo, LogKind, check_kind
from indilog.base.retention import Retention
from indilog.config import Config
from indilog.kernel.cell_layout import CellLayout, new_layout
from indilog.kernel.view import View
from indilog.wire.cell_messages import CellAnswer, CellOutcome, CellQuestion, CellsSeal
from indilog_compute.log_kinds.catalog import Catalog, CreatedLog
from indilog_compute.log_kinds.late_log import LateLog
from indilog_compute.retention import RetentionRounds

_PAUSE_S: Final = 1.0
_FOLLOW_S: Final = 10.0
"""Seconds that a creation waits for the other compute nodes to follow."""


class OtherLogs(LogSource, Protocol):
    """The logs of an opened logspace of another kind."""

    async def policies(self) -> Mapping[str, Retention]:
        """Return the retention policies of all logs that do not keep everything."""


OpenLogs: TypeAlias = Callable[[CreatedLog], AbstractAsyncContextManager[OtherLogs]]
"""Opens the logspace of a created log while its block runs."""


AskCells: TypeAlias = Callable[[NodeId, CellQuestion], Coroutine[Any, Any, CellAnswer]]
"""Asks a storage node about write-once cells; raises `IndilogError` if it does not answer."""


class _Opened:
    """A created log of another kind; opened by its first use."""

    def __init__(self, created: CreatedLog, open_logs: OpenLogs) -> None:
        self.created = created
        self._open_logs = open_logs
        self._opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._logs: OtherLogs | None = None
        self.rounds: RetentionRounds | None = None

    async def logs(self) -> OtherLogs:
        """Return the logspace.

        Raises:
            NotReadyError: its store does not answer.
        """
        if self._logs is None:
            async with self._opening:
                if self._logs is None:
                    opening = self._open_logs(self.created)
                    self._logs = await self._stack.enter_async_context(opening)
        return self._logs

    async def log(self) -> Log:
        """Return the log. Its session is its own: positions of different kinds do not compare,
        and its reads see everything that was acknowledged before.
        """
        return (await self.logs()).log(self.created.log, Session())

    async def close(self) -> None:
        """Close the logspace, if it is open."""
        await self._stack.aclose()


class LogKinds:
    """The created logs, as one compute node knows them.

    Args:
        logs: the `shared` logs, through the same node.
        node: the node.
        view: returns the newest view.
        open_logs: opens a logspace.
        ask_cells: asks a storage node about cells.
        config: settings.
        has_directory: whether logs may be kept in a directory of the platform, which all compute
            nodes reach.
        serves: tells whether this node enforces retention policies, and keeps layouts up to date.
    """

    def __init__(
        self,
        logs: LogSource,
        node: NodeId,
        *,
        view: Callable[[], View],
        open_logs: OpenLogs,
        ask_cells: AskCells,
        config: Config,
        has_directory: bool,
        serves: Callable[[], bool],
    ) -> None:
        self._logs = logs
        self._node = node
        self._view = view
        self._open_logs = open_logs
        self.ask_cells = ask_cells
        self._copies = config.cluster.replicas
        self._config = config.node
        self._has_directory = has_directory
        self.serves = serves
        self._catalog = Catalog(logs, node)
        self._opened: dict[str, _Opened] = {}
        self._announced = -1
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Replay the catalog; follow it from now on.

        Raises:
            NotReadyError: the catalog cannot be read.
        """
        await self._catalog.catch_up()
        await self._note()
        loop = asyncio.get_running_loop()
        works = self._follow(), self._enforce(), self._keep_open()
        self._tasks = [loop.create_task(work) for work in works]

    async def stop(self) -> None:
        """Close all logs."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        for opened in self._opened.values():
            await opened.close()

    def log(self, name: str) -> Log | None:
        """Return the log `name` if its kind is not `shared`."""
        opened = self._opened.get(name)
        return None if opened is None else LateLog(name, opened, opened.log)

    async def created(self) -> list[LogInfo]:
        """Return all created logs, by name.

        Raises:
            NotReadyError, QuorumUnavailableError: the catalog cannot be read now.
        """
        await self._catch_up()
        return [self._catalog.created[name].info for name in sorted(self._catalog.created)]

    async def create(self, name: str, kind: str = SHARED) -> LogInfo:
        """Create a log. Creating it again is harmless, and returns the same.

        When this returns, every compute node routes the log to its kind.

        Raises:
            InvalidTagError: no log can have that name.
            ValueError: there is no such kind.
            WrongStateError: the log has another kind, or has records already; or there is no object
                store, or there are too many logs of the kind. Nothing was created.
            NotReadyError: a node does not answer; the log may be created. Repeat the call.
            AppendOutcomeUnknownError: the log may be created; repeat the call.
        """
        check_log_name(name)
        wanted = check_kind(kind)
        await self._catch_up()
        if name not in self._catalog.created:
            await self._create(name, wanted)
            await self._note()
        found = self._catalog.created[name]
        if found.kind != wanted:
            raise WrongStateError(
                f"Log {name} is of kind {found.kind}, and cannot become {wanted}; choose another "
                "name."
            )
        await self._wait_for_nodes(found)
        return found.info

    async def _create(self, name: str, kind: LogKind) -> None:
        """Record the creation of a log, after what it needs is there."""
        if kind == SHARED:
            await self._catalog.create(name, kind)
            return
        self._check_limits(kind)
        await self._check_new(name)
        folder = f"{quote(name, safe='')[:64]}-{secrets.token_hex(4)}"
        if kind == OBJECT_STORE:
            place = self._config.object_logs.object_place
            await self._catalog.create(name, kind, place=place, folder=folder)
            return
        layout = new_layout(folder, self.storage_nodes(), self._copies)
        await self._open_spaces(layout)
        await self._catalog.create(name, kind, folder=folder, layout=layout)

    async def _open_spaces(self, layout: CellLayout) -> None:
        asked = sorted(layout.replicas)
        answers = await asyncio.gather(
            *(
                self.ask_cells(node, CellsSeal(0, space, layout.epoch, opens=True))
                for node, space in asked
            )
        )
        for (node, _), answer in zip(asked, answers, strict=True):
            if answer.outcome is not CellOutcome.DONE:
                raise NotReadyError(f"{node} takes no new log for now; nothing was created.")

    def _check_limits(self, kind: LogKind) -> None:
        objects, cells = self._config.object_logs, self._config.cells
        if kind == OBJECT_STORE and not objects.object_place and not self._has_directory:
            raise WrongStateError(
                "Logs of kind object-store need a place that all machines reach; set object_place."
            )
        limits = {
            OBJECT_STORE: (objects.object_logs_max, "object_logs_max"),
            ORDER_FIRST: (cells.order_first_logs_max, "order_first_logs_max"),
        }
        limit, setting = limits[kind]
        count = sum(each.created.kind == kind for each in self._opened.values())
        if count >= limit:
            raise WrongStateError(
                f"There are {count:,} logs of kind {kind}, which is the limit; raise {setting}."
            )

    async def _check_new(self, name: str) -> None:
        try:
            first = await self._logs.log(name, Session()).read_next(fresh=True)
        except TrimmedError:
            first = None
        else:
            if first is None:
                return
        raise WrongStateError(
            f"Log {name} has records already, so its kind is shared; choose another name."
        )

    async def _wait_for_nodes(self, found: CreatedLog) -> None:
        """Wait until all other compute nodes have replayed the creation."""
        if found.kind == SHARED:
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + _FOLLOW_S
        while missing := [
            node
            for node in self._view().engines
            if node not in (self._node, found.creator)
            and not self._catalog.has_followed(node, found.seqnum)
        ]:
            if loop.time() >= until:
                raise NotReadyError(
                    f"Log {found.log} is created, but {', '.join(missing)} did not answer within "
                    f"{_FOLLOW_S:g} s; create it again."
                )
            await self._catalog.catch_up(wait_s=_PAUSE_S)

    # --- the layouts of logs of kind order-first

    def storage_nodes(self) -> Sequence[NodeId]:
        """Return the storage nodes of the newest view."""
        return self._view().storage_nodes

    def layout(self, name: str) -> CellLayout:
        """Return the newest layout of a log that this node knows."""
        return self._catalog.layout(name)

    async def renew_layouts(self) -> None:
        """Read the layouts that were recorded before this call.

        Raises:
            NotReadyError, QuorumUnavailableError: the catalog cannot be read now.
        """
        await self._catch_up()

    async def change_layout(self, name: str, before: CellLayout, after: CellLayout) -> bool:
        """Record a layout; see `Catalog.change_layout`."""
        return await self._catalog.change_layout(name, before, after)

    # --- inside

    async def _catch_up(self) -> None:
        await self._catalog.catch_up()
        await self._note()

    async def _note(self) -> None:
        """Route what the catalog has; tell other nodes about it."""
        for name, created in self._catalog.created.items():
            if created.kind != SHARED and name not in self._opened:
                self._opened[name] = _Opened(created, self._open_logs)
                self._changed.set()
        last = self._catalog.last
        if last is not None and last > self._announced:
            self._announced = last
            try:
                await self._catalog.announce(last)
            except BaseException:
                self._announced = -1
                raise

    async def _follow(self) -> None:
        """Replay the catalog as it grows."""
        await self._repeat(self._follow_once, 0.0)

    async def _follow_once(self) -> None:
        await self._catalog.catch_up(wait_s=math.inf)
        await self._note()

    async def _enforce(self) -> None:
        """Enforce the retention policies of the logs of other kinds."""
        await self._changed.wait()
        await self._repeat(self._enforce_once, self._config.trims.retention_interval_s)

    async def _enforce_once(self) -> None:
        if not self.serves():
            return
        for opened in list(self._opened.values()):
            logs = await opened.logs()
            policies = await logs.policies()
            if opened.rounds is None:
                opened.rounds = RetentionRounds(logs, self._config, asyncio.sleep)
            opened.rounds.take(policies)
            while policies and await opened.rounds.run():
                continue

    async def _keep_open(self) -> None:
        """Open the logs of kind order-first on the node that keeps their layouts up to date."""
        await self._changed.wait()
        await self._repeat(self._open_once, _PAUSE_S)

    async def _open_once(self) -> None:
        if not self.serves():
            return
        errors: list[IndilogError] = []
        for opened in list(self._opened.values()):
            if opened.created.kind == ORDER_FIRST:
                try:
                    await opened.logs()
                except IndilogError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

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
