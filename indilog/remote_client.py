"""`indilog.connect`: a client of a running platform, over a WebSocket that carries a link (API.md,
"The log"; docs/decisions/0003).

    async with indilog.connect("http://127.0.0.1:8080") as client:
        seqnum = await client.log("orders").append(b"...", tags=["new"])
        followers = await client.call("social.follow", user="ann", other="bob")

If the connection breaks, calls in flight fail; the outcome of an append is then unknown. The next
call reconnects.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - a client is part of the shell
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as websocket
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from indilog.apps.app import Context
from indilog.apps.sources import sources_of, with_missing_file
from indilog.base.deployed import AppInfo
from indilog.base.errors import (
    CallOutcomeUnknownError,
    ClientClosedError,
    DeployError,
    IndilogError,
    NotReadyError,
    UnauthorizedError,
)
from indilog.base.log import Log, Session, check_log_name
from indilog.base.log_kinds import SHARED, LogInfo, LogKind, kind_and_stripes
from indilog.base.telemetry import quiet_unless_configured
from indilog.config import ClusterConfig
from indilog.link.access import (
    DEFAULT_URL,
    Endpoint,
    check_url,
    reach,
    segment,
    unauthorized_at,
)
from indilog.link.caller import LinkCaller
from indilog.link.invocation import (
    HeldOutcomes,
    Invocation,
    ReleasedOutcomes,
    invocation_of,
)
from indilog.link.link import Link, socket_messages
from indilog.link.link_messages import (
    LINK_VERSION,
    Answer,
    AskInvocation,
    CancelInvocation,
    DeployApp,
    Deployed,
    Failed,
    Greeting,
    InvocationFound,
    Limits,
    LinkLostError,
    Question,
    UndeployApp,
    Undeployed,
    Welcome,
    error_from,
)
from indilog.link.remote import RemoteLogs
from indilog.link.requests import GatewayRequests
from indilog.runs import Run, RunList, Runs
from indilog.sdk.runs import RunInfo

_CONNECT_S: Final = 30.0
_MESSAGE_BYTES_MAX: Final = ClusterConfig().message_bytes_max
"""Largest message until the platform has announced its own limit."""


@asynccontextmanager
async def connect(
    url: str = DEFAULT_URL, *, token: str | None = None, ca: str | Path | None = None
) -> AsyncIterator[RemoteClient]:
    """Connect to a running platform, at the URL of its gateway.

    Args:
        url: `http://HOST:PORT` or `https://HOST:PORT`.
        token: token of that platform; None: `INDILOG_TOKEN` if `INDILOG_URL` is this URL, else the
            token of this user's platform on this machine (`indilog.link.access`).
        ca: file with the certificates that `https://` trusts; None: `INDILOG_CA`, else the
            certificate of the platform if it runs on this machine, else the system's.

    Raises:
        ValueError: `url` is not a URL.
        NotReadyError: no platform answers there.
        UnauthorizedError: the platform requires a token, or refuses this one.
        ConfigError: the token would be sent to another machine over plain HTTP, or a file cannot be
            read.
    """
    quiet_unless_configured()
    client = RemoteClient(url, token=token, ca=ca)
    await client.open()
    try:
        yield client
    finally:
        await client.close()


class Connection(Protocol):
    """A connection with a platform.

    Attributes:
        link: the link to the platform.
        welcome: what the platform said when the connection began.
    """

    link: Link
    welcome: asyncio.Future[Welcome]

    async def close(self) -> None:
        """Close it; calls in flight fail."""


class _RunsAnswer(msgspec.Struct):
    """The answer to `GET /runs`."""

    runs: tuple[RunInfo, ...]
    next: str | None
    not_answered: dict[str, str]


class _Connection:
    """One WebSocket, and the link on it."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._queue = bytearray()
        self._written = asyncio.Event()
        self.welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.link = Link(self._serve, message_bytes_max=_MESSAGE_BYTES_MAX, on_lost=self._lost)
        self.link.connected(self._write, self._written.set, lambda: len(self._queue))
        self._tasks = [asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._send())]

    async def close(self) -> None:
        """Close the link and the socket."""
        self.link.close()
        await self._socket.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def abort(self) -> None:
        """Close the link and the socket at once, without waiting for the other end."""
        self.welcome.cancel()
        self.link.close()
        self._socket.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, link: Link, _call: int, message: Question | Greeting) -> None:
        if isinstance(message, Welcome) and not self.welcome.done():
            link.set_limit(message.limits.message_bytes_max)
            self.welcome.set_result(message)

    def _lost(self, _link: Link) -> None:
        self._written.set()
        if not self.welcome.done():
            self.welcome.set_exception(LinkLostError("The connection was closed at once."))

    def _write(self, data: bytearray) -> None:
        self._queue += data
        self._written.set()

    async def _receive(self) -> None:
        try:
            async for data in self._socket:
                if isinstance(data, bytes):
                    self.link.received(data)
        except ConnectionClosed:
            pass
        finally:
            self.link.lost()

    async def _send(self) -> None:
        try:
            while self._queue or not self.link.is_lost:
                await self._written.wait()
                self._written.clear()
                while self._queue:
                    data, self._queue = self._queue, bytearray()
                    for part in socket_messages(data):
                        await self._socket.send(part)
        except ConnectionClosed:
            self.link.lost()


class RemoteClient(Runs[str]):
    """A session with a running platform.

    Attributes:
        url: URL of its gateway.
        session: the session that all logs and calls of this client share.
        limits: the platform's limits; valid after the client has connected.
    """

    def __init__(self, url: str, *, token: str | None = None, ca: str | Path | None = None) -> None:
        self.url = check_url(url)
        self._token = token
        self._ca = ca
        self.session = Session()
        self.limits: Limits
        self._requests = GatewayRequests(self._endpoint, self.session)
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def open(self) -> None:
        """Connect, unless already connected.

        Raises:
            NotReadyError: no platform answers, or the platform has another version.
            ClientClosedError: the client was closed.
        """
        async with self._connecting:
            self._check_open()
            if self._connection is not None and not self._connection.link.is_lost:
                return
            if self._connection is not None:
                await self._connection.close()
            connection = await self._connect()
            try:
                self._check_open()  # the client may have been closed meanwhile
            except ClientClosedError:
                await connection.close()
                raise
            self._connection = connection
            self.limits = connection.welcome.result().limits

    async def _connect(self) -> Connection:
        """Return a new connection. Endpoint and token are looked up each time, because a restarted
        platform may have another token.
        """
        return await _connected(self._endpoint())

    def _endpoint(self) -> Endpoint:
        self._check_open()
        return reach(self.url, token=self._token, ca=self._ca)

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosedError("The client is closed; connect again.")

    async def close(self) -> None:
        """Close the connection; calls in flight fail."""
        self._closed = True
        if self._connection is not None:
            await self._connection.close()

    def drop(self) -> None:
        """Break the connection, as a network failure does. The next call reconnects."""
        if self._connection is not None:
            self._connection.link.close()

    async def ask(self, question: Question) -> Answer:
        """Ask the platform; connect first if necessary."""
        connection = self._connection
        if connection is None or connection.link.is_lost:
            await self.open()
            connection = self._connection
        assert connection is not None, "open connects or raises"
        return await connection.link.ask(question)

    def log(self, name: str) -> Log:
        """Return the log `name`, which need not exist before.

        Raises:
            InvalidTagError: `name` cannot be a log's name.
        """
        return RemoteLogs(self).log(check_log_name(name), self.session)

    async def create_log(
        self, name: str, kind: LogKind = SHARED, *, stripes: int | None = None
    ) -> LogInfo:
        """Create a log of a kind; see `indilog.Client.create_log`."""
        body = {"log": check_log_name(name), **kind_and_stripes(kind, stripes)}
        text = await self._requests.send("POST", "/logs", body=body)
        return msgspec.json.decode(text, type=LogInfo)

    async def switch_log(self, name: str, kind: LogKind, *, stripes: int | None = None) -> LogInfo:
        """Switch a log to another kind or number of stripes; see `indilog.Client.switch_log`."""
        path = f"/logs/{quote(check_log_name(name), safe='').replace('.', '%2E')}/switch"
        text = await self._requests.send("POST", path, body=kind_and_stripes(kind, stripes))
        return msgspec.json.decode(text, type=LogInfo)

    async def logs(self) -> list[LogInfo]:
        """Return the logs that were created or switched; see `indilog.Client.logs`."""
        text = await self._requests.send("GET", "/logs")
        return msgspec.json.decode(text, type=_LogsAnswer).logs

    async def call(
        self,
        function: str | Callable[..., Any],
        /,
        *,
        idempotency_key: str = "",
        **arguments: object,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Run a function and return its result, like `Context.call`."""
        return await self._context().call(function, idempotency_key=idempotency_key, **arguments)

    async def send(
        self,
        function: str | Callable[..., Any],
        /,
        *,
        delay: float = 0.0,
        idempotency_key: str = "",
        **arguments: object,
    ) -> str:
        """Start a function without waiting, like `Context.send`."""
        return await self._context().send(
            function, delay=delay, idempotency_key=idempotency_key, **arguments
        )

    async def invocation(self, id: str, *, wait: float = 0.0) -> Invocation | None:  # noqa: A002
        """Return the state of a recorded invocation, after waiting up to `wait` seconds (at most
        300) for its outcome. None: the id is unknown, or its outcome is no longer kept.

        Raises:
            NotReadyError, QuorumUnavailableError: the state cannot be determined now.
        """
        return await self._invocation(AskInvocation(id, float(wait)))

    async def cancel(self, id: str) -> Invocation | None:  # noqa: A002 - the field's name
        """Durably cancel a recorded invocation. Return its state afterwards; None if the id is
        unknown.

        A waiting invocation never begins. A running one is asked to stop, and may have had effects.
        An invocation that has ended is not changed.

        Raises:
            OverloadedError, NotReadyError, QuorumUnavailableError: nothing was done.
            AppendOutcomeUnknownError, CallOutcomeUnknownError: the invocation may be
                cancelled; repeating this is harmless.
        """
        return await self._invocation(CancelInvocation(id))

    async def _invocation(self, question: AskInvocation | CancelInvocation) -> Invocation | None:
        answer = await self.ask(question)
        if isinstance(answer, InvocationFound):
            if answer.outcome is not None:
                self.session.saw(answer.outcome.position)
            return invocation_of(answer)
        if not isinstance(answer, Failed):
            raise NotReadyError(f"The compute node answered with {type(answer).__name__}.")
        if isinstance(question, CancelInvocation) and answer.kind == LinkLostError.__name__:
            raise CallOutcomeUnknownError(
                "The connection was lost while cancelling; cancel again, which is harmless."
            )
        raise error_from(answer)

    async def held_invocations(self, log: str | None = None) -> HeldOutcomes:
        """Return the workflow runs that have not recorded the outcomes of their calls.

        Args:
            log: only runs of the flow with this log, such as `shop/flow`; None: of all flows.

        Raises:
            NotReadyError: they cannot be determined now.
        """
        query = {} if log is None else {"log": log}
        text = await self._requests.send("GET", "/invocations/held", query=query)
        return msgspec.json.decode(text, type=HeldOutcomes)

    async def release_invocations(self, log: str, *, run: str = "") -> int:
        """Release outcomes that are held for runs of an application that is not deployed again.
        Return the number of calls.

        Released outcomes are kept for a day (`results_kept_s`). A run that continues later makes
        its call again.

        Args:
            log: the log of the flow, such as `shop/flow`.
            run: only what is held for this run; empty: for all runs of the flow.

        Raises:
            CallOutcomeUnknownError: the outcomes may be released; repeating this is harmless.
        """
        query = {"log": log} | ({"run": run} if run else {})
        text = await self._requests.send("DELETE", "/invocations/held", query=query)
        return msgspec.json.decode(text, type=ReleasedOutcomes).released

    # --- workflow runs

    def run(self, app: str, id: str) -> Run:  # noqa: A002
        """Return a handle on a run of an application. The run need not exist."""
        return Run(partial(self._operate, app), self.log, app, id)

    async def _operate(self, app: str, operation: str, arguments: Mapping[str, object]) -> bytes:
        """Run an operation of an application; return the JSON text of its result."""
        path = f"/operations/{segment(app)}/{operation}"
        return await self._requests.send("POST", path, body=arguments)

    async def _list(self, app: str | None, filters: dict[str, object], page: str | None) -> RunList:
        more = {"app": app, "page": page}
        query = filters | {name: value for name, value in more.items() if value is not None}
        text = await self._requests.send("GET", "/runs", query=query)
        found = msgspec.json.decode(text, type=_RunsAnswer)
        runs = [
            Run(partial(self._operate, info.app), self.log, info.app, info.id, info)
            for info in found.runs
        ]
        return RunList(runs, found.next, found.not_answered)

    async def deploy(
        self,
        what: str | Path | Mapping[str, str],
        *,
        name: str | None = None,
        owner: str = "local",
    ) -> AppInfo:
        """Deploy a file, a package or a folder (or sources: relative path → text).

        If `name` is None, the application keeps the name in its code.

        Raises:
            DeployError: the code does not import, or defines no application; the previous version
            continues.
            AppNameTakenError: another owner has deployed an application of that name.
            NotReadyError: the code cannot be imported or recorded now; the previous version
                continues.
            AppendOutcomeUnknownError, CallOutcomeUnknownError: the code may be deployed; repeating
                this is harmless.
        """
        if isinstance(what, Mapping):
            return await self._app(DeployApp(name, owner, dict(what)), "deploy")
        try:
            return await self._app(DeployApp(name, owner, sources_of(Path(what))), "deploy")
        except DeployError as error:
            raise DeployError(with_missing_file(Path(what), str(error))) from error

    async def undeploy(self, name: str, *, owner: str = "local") -> AppInfo:
        """Remove an application; return what was deployed.

        When this returns, the compute node that answers sends no new call to it, and its services
        and schedules have ended there. The other nodes follow. Running calls finish. A recorded
        invocation that has not begun fails when it is due, unless the application is deployed again
        by then. The logs stay, and another deployment continues with them.

        Raises:
            UnknownFunctionError: the application is not deployed; the message names the time of its
                undeployment, if there was one.
            AppNameTakenError: another owner has deployed it.
            NotReadyError: the log cannot be written now; the application stays deployed.
            AppendOutcomeUnknownError, CallOutcomeUnknownError: the application may be
                undeployed; repeating this is harmless.
        """
        return await self._app(UndeployApp(name, owner), "undeploy")

    async def _app(self, question: DeployApp | UndeployApp, what: str) -> AppInfo:
        answer = await self.ask(question)
        if isinstance(answer, Deployed | Undeployed):
            return answer.app
        if isinstance(answer, Failed) and answer.kind != LinkLostError.__name__:
            raise error_from(answer)
        raise CallOutcomeUnknownError(
            f"The connection was lost while {what}ing; {what} again, which is harmless."
        )

    def _context(self) -> Context:
        return Context(RemoteLogs(self), LinkCaller(self, 0), session=self.session)


class _LogsAnswer(msgspec.Struct):
    """The answer to `GET /logs`."""

    logs: list[LogInfo]


class _Socket(websocket):
    """A WebSocket that follows no redirect: its headers carry the token."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        """Refuse the redirect."""
        return exc


async def _connected(endpoint: Endpoint) -> _Connection:
    """Return a connection after the platform's `Welcome`. After an error, no connection stays
    open.
    """
    url = endpoint.url
    try:
        socket = await _Socket(
            url.replace("http", "ws", 1) + "/client",
            additional_headers=endpoint.headers,
            ssl=endpoint.tls,
            proxy=None,  # as the command line: a proxy would see the token
            max_size=_MESSAGE_BYTES_MAX,
            compression=None,
            open_timeout=_CONNECT_S,
            user_agent_header=None,
        )
        connection = _Connection(socket)
        try:
            async with asyncio.timeout(_CONNECT_S):
                welcome = await connection.welcome
            _check_version(url, welcome)
        except BaseException:
            await connection.abort()
            raise
    except ssl.SSLError as error:
        raise NotReadyError(
            f"The certificate of {url} is not trusted here ({error.reason or error}); give the "
            "file with its issuer's certificate as ca, or in INDILOG_CA."
        ) from error
    except InvalidStatus as error:
        raise _refused(url, error.response.status_code) from error
    except (OSError, TimeoutError, WebSocketException, ValueError, LinkLostError) as error:
        raise NotReadyError(
            f"No platform answers at {url}; start one with `indilog up`, or give its URL."
        ) from error
    return connection


def _check_version(url: str, welcome: Welcome) -> None:
    if welcome.version != LINK_VERSION:
        raise NotReadyError(
            f"The platform at {url} speaks version {welcome.version} of the client protocol, this "
            f"program version {LINK_VERSION}; update the older one."
        )


def _refused(url: str, status: int) -> IndilogError:
    if status == HTTPStatus.UNAUTHORIZED:
        return UnauthorizedError(unauthorized_at(url))
    if status == HTTPStatus.MISDIRECTED_REQUEST:
        return UnauthorizedError(
            f"The platform is not known under the name in {url}; use a loopback address, or "
            "add the name to its setting host_names."
        )
    return NotReadyError(
        f"No platform takes clients at {url} (it answered {status}); start one with `indilog up`, "
        "or give its URL."
    )
