"""Logs of other kinds than `shared` on one compute node: creation, routing, retention."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Final, Protocol, TypeAlias
from urllib.parse import quote

import structlog

from indilog.base.errors import IndilogError, NotReadyError, TrimmedError, WrongStateError
from indilog.base.ids import NodeId
from indilog.base.log import Log, LogSource, Session, check_log_name
from indilog.base.log_kinds import OBJECT_STORE, SHARED, LogInfo, check_kind
from indilog.base.retention import Retention
from indilog.config import NodeConfig
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
        nodes: returns the compute nodes of the newest view.
        open_logs: opens a logspace.
        config: settings.
        has_directory: whether logs may be kept in a directory of the platform, which all compute
            nodes reach.
        serves: tells whether this node enforces retention policies.
    """

    def __init__(
        self,
        logs: LogSource,
        node: NodeId,
        *,
        nodes: Callable[[], Sequence[NodeId]],
        open_logs: OpenLogs,
        config: NodeConfig,
        has_directory: bool,
        serves: Callable[[], bool],
    ) -> None:
        self._logs = logs
        self._node = node
        self._nodes = nodes
        self._open_logs = open_logs
        self._config = config
        self._has_directory = has_directory
        self._serves = serves
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
        self._tasks = [loop.create_task(self._follow()), loop.create_task(self._enforce())]

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
                store, or there are `object_logs_max` logs in it. Nothing was created.
            NotReadyError: the log may be created, but a compute node does not answer; repeat the
                call.
            AppendOutcomeUnknownError: the log may be created; repeat the call.
        """
        check_log_name(name)
        wanted = check_kind(kind)
        await self._catch_up()
        if name not in self._catalog.created:
            place, folder = "", ""
            if wanted == OBJECT_STORE:
                await self._check_new(name)
                place = self._config.object_logs.object_place
                folder = f"{quote(name, safe='')[:64]}-{secrets.token_hex(4)}"
            await self._catalog.create(name, wanted, place=place, folder=folder)
            await self._note()
        found = self._catalog.created[name]
        if found.kind != wanted:
            raise WrongStateError(
                f"Log {name} is of kind {found.kind}, and cannot become {wanted}; choose another "
                "name."
            )
        await self._wait_for_nodes(found)
        return found.info

    async def _check_new(self, name: str) -> None:
        settings = self._config.object_logs
        if not settings.object_place and not self._has_directory:
            raise WrongStateError(
                "Logs of kind object-store need a place that all machines reach; set object_place."
            )
        if len(self._opened) >= settings.object_logs_max:
            raise WrongStateError(
                f"There are {len(self._opened):,} logs of kind object-store, which is the limit; "
                "raise object_logs_max."
            )
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
            for node in self._nodes()
            if node not in (self._node, found.creator)
            and not self._catalog.has_followed(node, found.seqnum)
        ]:
            if loop.time() >= until:
                raise NotReadyError(
                    f"Log {found.log} is created, but {', '.join(missing)} did not answer within "
                    f"{_FOLLOW_S:g} s; create it again."
                )
            await self._catalog.catch_up(wait_s=_PAUSE_S)

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
        if not self._serves():
            return
        for opened in list(self._opened.values()):
            logs = await opened.logs()
            policies = await logs.policies()
            if opened.rounds is None:
                opened.rounds = RetentionRounds(logs, self._config, asyncio.sleep)
            opened.rounds.take(policies)
            while policies and await opened.rounds.run():
                continue

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
