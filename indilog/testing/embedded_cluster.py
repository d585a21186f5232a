"""A whole platform inside a test: `async with cluster() as c` (docs/guides/testing.md).

All roles of all tiers run in this process, and so do deployed functions: on the test's event loop,
with the test's modules. The data is in a temporary directory that is removed at the end. Segments
are small, so that a start takes milliseconds. All other code is the same as in production.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx

from indilog.apps.app import App
from indilog.apps.context import Context, current_of
from indilog.base.deployed import AppInfo
from indilog.base.log import Log, LogSource, check_log_name
from indilog.base.telemetry import quiet_unless_configured
from indilog.config import MIB, ClusterConfig, Config, node_config
from indilog.link.access import Endpoint
from indilog.link.caller import LinkCaller
from indilog.link.link import Link
from indilog.link.link_messages import (
    Greeting,
    LinkLostError,
    Question,
    Welcome,
)
from indilog.remote_client import Connection, RemoteClient
from indilog.runtime.cluster.assembly import FunctionsInProcess, embedded, functions_in_process
from indilog.testing.durations import seconds_of

_CALL_TIMEOUT_S: Final = 3600.0
"""Time limit of a call, so that a test may stay at a breakpoint."""


class Cluster(RemoteClient):
    """A platform in the test's process, and a client of it, with the interface of
    `indilog.connect`.

    Attributes:
        ctx: a context of the test itself, with `log`, `call` and `send`. While the block runs, it
            is the current context of the test's task, so libraries such as BokiFlow find it.
    """

    def __init__(self, logs: LogSource, functions: FunctionsInProcess) -> None:
        super().__init__("http://in-this-process")
        self._logs = logs
        self._functions = functions
        self.ctx = Context(
            logs, LinkCaller(self, 0), session=self.session, invocation_id="test", function="test"
        )

    def log(self, name: str) -> Log:
        """Return the log `name`, which need not exist before. All logs and calls of a cluster share
        one session.

        Raises:
            InvalidTagError: no log can have that name.
        """
        return self._logs.log(check_log_name(name), self.session)

    async def deploy(
        self,
        what: App | str | Path | Mapping[str, str],
        *,
        name: str | None = None,
        owner: str = "local",
    ) -> AppInfo:
        """Deploy an application of this process, or a file, package or folder as
        `indilog.connect` does.

        The functions and services of an `App` run as they are in this process, so a test can
        replace what they use. Functions and services of a file are imported from a copy of its
        text.

        Raises:
            DeployError: the code does not import, or the application has no functions.
            ValueError: `name` was given for an `App`, which has a name.
        """
        if not isinstance(what, App):
            return await super().deploy(what, name=name, owner=owner)
        if name is not None:
            raise ValueError("An App is deployed under its own name; leave name out.")
        return await super().deploy(self._functions.sources_of(what), owner=owner)

    async def skip(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Let time pass at once, by the time of the log.

        Delays of `send`, leases and retention end, and later records have a later `ordered_at`.
        Schedules follow the wall clock, which does not move. For timers of workflows use
        `bokiflow.testing.skip`.

        Raises:
            ValueError: the duration is negative or no number.
        """
        await self._functions.skip(seconds_of(days, hours, minutes, seconds))

    def _endpoint(self) -> Endpoint:
        return Endpoint(self.url, transport=httpx.ASGITransport(self._functions.gateway()))

    async def _connect(self) -> Connection:
        connection = _InMemory(self._functions)
        await connection.welcome
        return connection


class _InMemory:
    """A connection in memory: a `Connection`."""

    def __init__(self, functions: FunctionsInProcess) -> None:
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.link = functions.connect(self._serve, self._lost)

    async def close(self) -> None:
        """Close it; calls in flight fail."""
        self.link.close()

    def _serve(self, _link: Link, _call: int, message: Question | Greeting) -> None:
        if isinstance(message, Welcome) and not self.welcome.done():
            self.welcome.set_result(message)

    def _lost(self, _link: Link) -> None:
        if not self.welcome.done():
            self.welcome.set_exception(LinkLostError("The platform stopped."))


@asynccontextmanager
async def cluster(config: Config | None = None) -> AsyncIterator[Cluster]:
    """Run a platform for one test, with the functions that the test deploys.

    Functions, services and schedules run on the event loop of the test. A function that blocks the
    loop stops the whole platform. So does a breakpoint; neither does harm. `config` may change
    every setting except the number of workers, which is one. By default records are kept in memory
    only (`durability`), and a call may take an hour.

    Raises:
        ConfigError: `config` is not valid.
    """
    quiet_unless_configured()
    config = config or Config(
        cluster=ClusterConfig(durability="memory"),
        node=node_config(segment_bytes=8 * MIB, call_timeout_s=_CALL_TIMEOUT_S),
    )
    with tempfile.TemporaryDirectory(prefix="indilog-test-") as directory:
        node = dataclasses.replace(config.node, data_dir=Path(directory))
        async with (
            embedded(dataclasses.replace(config, node=node)) as platform,
            functions_in_process(platform) as functions,
        ):
            made = Cluster(platform.logs, functions)
            with current_of(made.ctx):
                try:
                    await made.open()
                    yield made
                finally:
                    made.ctx.end()
                    await made.close()
