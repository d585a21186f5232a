"""`indilog.open` runs the platform inside a program, and returns a `Client`.

`indilog.connect` returns the same interface to a running platform, over a socket. Both kinds of
clients have the methods of `Runs` (`indilog.runs`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from indilog.apps.app import App, Context
from indilog.base.errors import NotFoundError, NotReadyError
from indilog.base.log import Log, LogSource, Session, check_log_name
from indilog.base.log_kinds import SHARED, LogInfo, LogKind
from indilog.base.telemetry import quiet_unless_configured
from indilog.config import Config
from indilog.runs import Run, RunList, Runs
from indilog.sdk.runs import LIST_RUNS, RunPage, cursor_of, place_of


class LogCatalog(Protocol):
    """Creates logs, switches their kinds, and lists them."""

    async def create(self, name: str, kind: str, *, stripes: int | None = None) -> LogInfo:
        """Create a log."""

    async def switch(self, name: str, kind: str, *, stripes: int | None = None) -> LogInfo:
        """Switch a log to another kind, or to another number of stripes."""

    async def created(self) -> list[LogInfo]:
        """Return the created logs, by name."""


class Client(Runs[App]):
    """A program's session with the platform. It gives access to logs, and to the runs of workflows
    that this program defines.
    """

    def __init__(self, logs: LogSource, kinds: LogCatalog | None = None) -> None:
        self._logs = logs
        self._kinds = kinds
        self.session = Session()

    def log(self, name: str) -> Log:
        """Return the log `name`, which need not exist before. All logs of a client share its
        session.

        Raises:
            InvalidTagError: no log can have that name.
        """
        return self._logs.log(check_log_name(name), self.session)

    async def create_log(
        self, name: str, kind: LogKind = SHARED, *, stripes: int | None = None
    ) -> LogInfo:
        """Create a log of a kind ([kinds](../KINDS.md)). Creating it again is harmless.

        Args:
            name: the name of the log.
            kind: the kind of the log.
            stripes: over how many chains of storage nodes (`order-first`) or folders of the store
                (`object-store`) its records are spread; None: the platform chooses it.

        Raises:
            InvalidTagError: no log can have that name.
            ValueError: there is no such kind, or it cannot have so many stripes.
            WrongStateError: the log has another kind or another number of stripes, or has records
                already, or the platform has no place for logs of this kind; nothing was created.
            NotReadyError, AppendOutcomeUnknownError: the log may be created; create it again.
        """
        return await self._catalog().create(name, kind, stripes=stripes)

    async def switch_log(self, name: str, kind: LogKind, *, stripes: int | None = None) -> LogInfo:
        """Switch a log to another kind or another number of stripes ([kinds](../KINDS.md)) while
        the log is used. Appends, reads and subscriptions continue, and seqnums continue in order. A
        log that already is like that does not change.

        Args:
            name: the name of the log.
            kind: the kind of the log from now on.
            stripes: as in `create_log`; None: they stay if the log has this kind already.

        Raises:
            InvalidTagError: no log can have that name.
            ValueError: there is no such kind, or it cannot have so many stripes.
            WrongStateError: the platform has no place for logs of this kind, or a limit is reached;
                nothing was changed.
            NotReadyError: a compute node or the store does not answer; the kind stays, unless other
                nodes complete the switch later.
            AppendOutcomeUnknownError: the log may be switched; repeat the call.
        """
        return await self._catalog().switch(name, kind, stripes=stripes)

    async def logs(self) -> list[LogInfo]:
        """Return the logs that were created or switched, by name. All other logs are of kind
        `shared`, and are not listed.

        Raises:
            NotReadyError, QuorumUnavailableError: the logs cannot be determined now.
        """
        return await self._catalog().created()

    def _catalog(self) -> LogCatalog:
        if self._kinds is None:
            raise NotReadyError("Logs cannot be created here: this is no platform.")
        return self._kinds

    # --- workflow runs

    def run(self, app: App, id: str) -> Run:  # noqa: A002
        """Return a handle on a run of an application of this program. The run need not exist."""
        return Run(partial(self._operate, app), self.log, app.name, id)

    async def _list(self, app: App | None, filters: dict[str, object], page: str | None) -> RunList:
        if app is None:
            raise ValueError("Give the app: this program's platform has no deployed ones.")
        more = {"before": place_of(page)} if page is not None else {}
        text = await self._operate(app, LIST_RUNS, filters | more)
        found = msgspec.json.decode(text, type=RunPage)
        operate = partial(self._operate, app)
        runs = [Run(operate, self.log, app.name, info.id, info) for info in found.runs]
        return RunList(runs, None if found.next is None else cursor_of(found.next), {})

    async def _operate(self, app: App, operation: str, arguments: Mapping[str, object]) -> bytes:
        """Run an operation of an application in this process."""
        found = app.operations.get(operation)
        if found is None:
            raise NotFoundError(f"App {app.name} has no workflows with {operation}.")
        given = found.signature.arguments(msgspec.json.encode(arguments))
        context = Context(self._logs, _NoCaller(), session=self.session, function=operation)

        async def called() -> bytes:
            context.begin()
            try:
                return found.signature.result_text(await found.body(context, **given))
            finally:
                context.end()

        return await asyncio.create_task(called())  # so that the context is the task's own


class _NoCaller:
    """Refuses calls of functions, because a program without workers runs no function."""

    async def call(
        self,
        function: str,
        _arguments: bytes,
        _session: Session,
        *,
        key: str = "",  # noqa: ARG002
        holder: str = "",  # noqa: ARG002
    ) -> bytes:
        """Refuse."""
        raise NotReadyError(f"{function} was not called: this program runs no functions.")

    async def send(
        self,
        function: str,
        _arguments: bytes,
        _session: Session,
        *,
        delay_s: float,  # noqa: ARG002
        key: str = "",  # noqa: ARG002
    ) -> str:
        """Refuse."""
        raise NotReadyError(f"{function} was not sent: this program runs no functions.")

    async def release(self, _holder: str, _keys: Sequence[str]) -> None:
        """Do nothing: no outcome is held."""

    async def holders(self, _prefix: str, _after: str, _session: Session) -> Sequence[str]:
        """Return no holder: no outcome is held."""
        return ()


@asynccontextmanager
async def open(  # noqa: A001 indilog.open reads as it is meant
    path: str | Path, config: Config | None = None
) -> AsyncIterator[Client]:
    """Run the platform inside this process, with its data in the directory `path`.

    The directory is created if it is missing; a later call with the same path continues with its
    data. Only one process at a time may open it. All acknowledged records survive a crash of this
    process.

    Raises:
        DataDirectoryError: the directory is in use, of a newer format, or damaged.
        ConfigError: the directory was created with a layout that differs from `config`.
    """
    from indilog.runtime.cluster.assembly import embedded

    quiet_unless_configured()
    config = config or Config()
    config = dataclasses.replace(config, node=dataclasses.replace(config.node, data_dir=Path(path)))
    async with embedded(config) as platform:
        yield Client(platform.logs, platform.logs.kinds)
