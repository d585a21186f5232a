"""A connection to ZooKeeper for the event loop, on top of kazoo.

kazoo runs three threads per connection. Its callbacks only hand their result over to the event
loop. Calls that may block (start and stop) run in a thread of their own.

kazoo queues requests without a limit while it is not connected. So requests are started only while
it is connected, and at most 32 groups of requests at once. All requests except watches have a
deadline. `indilog.runtime.metadata.zookeeper` uses one connection for its store, and one for each
session.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Self, TypeVar

from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionDropped,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    SASLException,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
)
from kazoo.protocol.states import KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from indilog.base.errors import ConfigError, OverloadedError, QuorumUnavailableError
from indilog.config import NodeConfig
from indilog.config.function_groups import MetadataConfig

PASSWORD_VARIABLE: Final = "INDILOG_ZOOKEEPER_PASSWORD"  # noqa: S105 a name, not a secret
_STARTED_MAX: Final = 32
"""Largest number of groups of requests that kazoo handles at once. For each request kazoo writes a
byte into a pipe to wake its thread, and the pipe is full after about 270 bytes.
"""
_PIPELINED_MAX: Final = 8
_STOP_S: Final = 2.0
"""Seconds to wait for the end of a session if no server answers."""
_CONNECT_S: Final = 1.0
"""Seconds to wait for the answer to the first request of a connection; doubled after each time-out.
"""
_AGAIN_S: Final = 0.02
"""Seconds until an unanswered request is repeated after its connection was lost."""
_ANSWERS: Final = (NoNodeError, NodeExistsError, BadVersionError)
"""Errors that are answers: a znode does not have the expected state."""
_UNANSWERED: Final = (
    ConnectionLoss,
    SessionExpiredError,
    SessionMovedError,
    OperationTimeoutError,
    ThrottledOpError,
)
"""Errors after which the outcome of a request is unknown. The request is then repeated."""
_REFUSED: Final = (
    NoAuthError,
    AuthFailedError,
    SASLException,
    SessionClosedRequireSaslError,
)

_T = TypeVar("_T")

_log = logging.getLogger("indilog.zookeeper")
_log.setLevel(logging.WARNING)  # at lower levels kazoo logs passwords


@dataclasses.dataclass(frozen=True)
class _Watcher:
    name: str
    notify: Callable[[], None] = dataclasses.field(compare=False)

    def __call__(self, _: object) -> None:
        self.notify()


class ZooKeeperConnection:
    """One connection and its ZooKeeper session; created and used on one event loop.

    Args:
        config: the addresses of ZooKeeper, and the credentials of this client.
        session_s: seconds without a connection after which ZooKeeper ends the session.
        on_lost: called on the loop when ZooKeeper has ended the session. The connection then gets a
            new session.

    Attributes:
        granted_s: seconds that ZooKeeper granted for `session_s`; valid after `open`.
    """

    def __init__(
        self, config: NodeConfig, *, session_s: float, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._connected = asyncio.Event()
        self._refused = False
        self._is_open = False
        self._started = asyncio.Semaphore(_STARTED_MAX)
        self._waiting = 0
        self.granted_s = session_s
        self._connect_s = _CONNECT_S
        self.client = _client(config.metadata, session_s)
        self.client.add_listener(self._on_state)
        self._note_granted_time()
        self._limit_connecting()

    async def open(self) -> Self:
        """Connect.

        Raises:
            QuorumUnavailableError: no server of the ensemble answers.
            ConfigError: ZooKeeper refuses this client.
        """
        self._is_open = True
        await self._in_thread(self.client.start_async)
        try:
            await self.decide(self._nothing)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """End the session and stop the threads. May be called again."""
        if self._is_open:
            self._is_open = False
            self._connected.clear()
            await asyncio.wait({self._in_thread(self._stop)}, timeout=_STOP_S)

    async def decide(self, attempt: Callable[[], Awaitable[_T]], *, unlimited: bool = False) -> _T:
        """Call `attempt` and return its result. If a connection is lost before the answer, call
        `attempt` again.

        Args:
            attempt: sends requests. It must recognise the effects of an earlier attempt.
            unlimited: whether to wait without a deadline.

        Raises:
            QuorumUnavailableError: there is no answer within `metadata_timeout_s`.
            OverloadedError: too many requests wait already.
            ConfigError: ZooKeeper refuses this client.
        """
        limit = self._config.metadata.metadata_watchers_max
        if self._waiting >= limit and not unlimited:
            raise OverloadedError(f"{limit} requests to the metadata store wait already.")
        limit_s = None if unlimited else self._config.metadata.metadata_timeout_s
        self._waiting += not unlimited
        try:
            async with asyncio.timeout(limit_s):
                return await self._repeat(attempt)
        except TimeoutError:
            hosts = self._config.metadata.zookeeper_hosts
            raise QuorumUnavailableError(
                f"ZooKeeper at {hosts} did not answer for {limit_s:g} s."
            ) from None
        finally:
            self._waiting -= not unlimited

    async def _repeat(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            await self._connected.wait()
            try:
                if self._refused:
                    raise AuthFailedError
                return await attempt()
            except _UNANSWERED:
                await asyncio.sleep(_AGAIN_S)
            except _REFUSED as error:
                raise ConfigError(
                    f"ZooKeeper at {self._config.metadata.zookeeper_hosts} refuses this client "
                    f"({type(error).__name__}); check zookeeper_auth, zookeeper_user, the password "
                    "and the access list of zookeeper_root."
                ) from error
            except KazooException as error:
                raise QuorumUnavailableError(
                    f"ZooKeeper failed with {type(error).__name__} {error}."
                ) from error

    async def request(self, *starts: Callable[[], Any]) -> list[Any]:
        """Send requests in this order, and return their answers. Errors in `_ANSWERS` count as
        answers.

        Raises:
            KazooException: a request is unanswered, or was refused.
        """
        answers: list[Any] = []
        for first in range(0, len(starts), _PIPELINED_MAX):
            answers += await self._run_pipelined(starts[first : first + _PIPELINED_MAX])
        return answers

    async def _run_pipelined(self, starts: tuple[Callable[[], Any], ...]) -> list[Any]:
        await self._started.acquire()
        answered: asyncio.Future[None] = self._loop.create_future()
        results: list[Any] = []

        def on_result(result: Any) -> None:  # noqa: ANN401 of kazoo
            results.append(result)
            if len(results) == len(starts):
                self._started.release()  # also if the caller has given up
                if not answered.done():
                    answered.set_result(None)

        begun = [start() for start in starts]
        for result in begun:
            result.rawlink(partial(self._hand_over, on_result))
        await answered
        answers = []
        for result in begun:
            error = result.exception
            if error is not None and not isinstance(error, _ANSWERS):
                raise error
            answers.append(result.value if error is None else error)
        return answers

    async def _nothing(self) -> None:
        """Send a request that needs no permission, to check whether the server answers."""
        await self.request(partial(self.client.exists_async, "/"))

    def _hand_over(self, function: Callable[[Any], None], argument: Any) -> None:  # noqa: ANN401 of kazoo
        """Schedule a call of `function` on the event loop. Threads of kazoo call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, argument)

    def watcher(self, notify: Callable[[str], None], name: str) -> Callable[[Any], None]:
        """Return a callback that kazoo calls when a watch fires, or is lost with its connection.

        All callbacks for one `name` are equal. So kazoo keeps only one of them, even if the watch
        is set many times.
        """
        return _Watcher(name, partial(self._hand_over, notify, name))

    def _on_state(self, state: str) -> None:
        """Handle a change of the connection's state. kazoo's thread calls this, so it must not
        block.
        """
        self._hand_over(self._on_state_handed_over, (state, self.client.client_state))

    def _on_state_handed_over(self, states: tuple[str, str]) -> None:
        state, exact = states
        if exact == KeeperState.AUTH_FAILED:
            self._refused = True
            self._connected.set()
        elif state == KazooState.CONNECTED:
            self._connected.set()
        else:
            self._connected.clear()
        if state == KazooState.LOST:
            self._on_lost()

    def _note_granted_time(self) -> None:
        """Note the session time that ZooKeeper granted, and tell refusals from lost connections.
        kazoo hides both.

        Each attempt of kazoo to connect returns two thirds of the granted time, in milliseconds.
        Without this change, kazoo's thread would end in two cases: a server that requires SASL
        refuses it, or the connection is lost during the authentication.
        """
        handler = self.client._connection  # noqa: SLF001 there is no other way; kazoo is pinned
        connect = handler._connect  # noqa: SLF001

        def connect_and_note(*args: Any) -> Any:  # noqa: ANN401 of kazoo
            try:
                read_timeout_ms, connect_timeout_ms = connect(*args)
            except (SessionClosedRequireSaslError, SASLException) as error:
                raise AuthFailedError from error
            except AuthFailedError as error:
                if isinstance(error.__cause__, ConnectionDropped):
                    raise error.__cause__ from None
                raise
            self.granted_s = read_timeout_ms * 1.5 / 1000
            self._connect_s = _CONNECT_S
            return read_timeout_ms, connect_timeout_ms

        handler._connect = connect_and_note  # noqa: SLF001

    def _limit_connecting(self) -> None:
        """Make kazoo connect again if the first request of a connection is not answered soon.

        Without this limit, kazoo waits as long as a session lasts. A server that is starting may
        leave the request unanswered forever (ZooKeeper 3.9). So the session would end after a short
        restart of the server. The limit grows, because a slow server needs more time.
        """
        handler = self.client._connection  # noqa: SLF001 there is no other way; kazoo is pinned
        invoke, timed_out = handler._invoke, handler.handler.timeout_exception  # noqa: SLF001

        def invoke_in_time(timeout_s: float, *args: Any, **options: Any) -> Any:  # noqa: ANN401 of kazoo
            try:
                return invoke(min(timeout_s, self._connect_s), *args, **options)
            except timed_out:
                self._connect_s *= 2
                raise

        handler._invoke = invoke_in_time  # noqa: SLF001

    def _stop(self) -> None:
        with contextlib.suppress(KazooException):  # no server answers: kazoo's thread ends later
            self.client.stop()
            self.client.close()

    def _in_thread(self, function: Callable[[], object]) -> asyncio.Future[None]:
        """Run a blocking call in a daemon thread, which does not keep the process from ending."""
        done = self._loop.create_future()

        def settle(_: object) -> None:
            if not done.done():
                done.set_result(None)

        def run() -> None:
            function()
            self._hand_over(settle, None)

        threading.Thread(target=run, daemon=True).start()
        return done


def _client(config: MetadataConfig, session_s: float) -> Any:  # noqa: ANN401 kazoo has no types
    auth_data, sasl = [], None
    if config.zookeeper_auth == "digest":
        auth_data = [("digest", f"{config.zookeeper_user}:{password_of(config)}")]
    elif config.zookeeper_auth == "sasl":
        sasl = {
            "mechanism": "DIGEST-MD5",
            "username": config.zookeeper_user,
            "password": password_of(config),
        }
    return KazooClient(
        hosts=config.zookeeper_hosts,
        timeout=session_s,
        default_acl=OPEN_ACL_UNSAFE if config.zookeeper_auth == "none" else CREATOR_ALL_ACL,
        auth_data=auth_data,
        sasl_options=sasl,
        logger=_log,
        connection_retry=KazooRetry(max_tries=-1, delay=0.05, max_delay=1.0),
        use_ssl=config.zookeeper_tls,
        check_hostname=config.zookeeper_tls,
        ca=_path(config.zookeeper_tls_ca),
        certfile=_path(config.zookeeper_tls_cert),
        keyfile=_path(config.zookeeper_tls_key),
    )


def _path(file: object) -> str | None:
    return str(file) if file is not None else None


def password_of(config: MetadataConfig) -> str:
    """Return the password for ZooKeeper, from the environment or the configured file.

    Raises:
        ConfigError: there is no password.
    """
    if (password := os.environ.get(PASSWORD_VARIABLE)) is not None:
        return password
    file = config.zookeeper_password_file
    if file is None:
        raise ConfigError(
            f"zookeeper_auth is {config.zookeeper_auth!r}, so a password is needed: set "
            f"zookeeper_password_file or the environment variable {PASSWORD_VARIABLE}."
        )
    try:
        return file.read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The password file {file} cannot be read: {error}.") from error
