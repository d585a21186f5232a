"""A connection to a platform for code that is not asynchronous: the tasks and the planner of Spark.

`platform_reads`, `writing` and `analytics.objects` use `connected`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from indilog.base.errors import IndilogError, OutcomeUnknownError
from indilog.base.ids import MetalogPosition
from indilog.base.log import Log
from indilog.base.telemetry import quiet_unless_configured
from indilog.link.access import reach
from indilog.remote_client import RemoteClient
from indilog_pipeline.spark.options import Access

_ValueT = TypeVar("_ValueT")
_PATIENCE_S: Final = 60.0
"""Seconds for which calls are retried after transient errors, such as during a restart."""
_PAUSE_S: Final = 0.2


class BlockingConnection:
    """A session with a platform, whose calls block.

    The event loop of the session runs in a separate thread, so that the connection stays up while
    Spark consumes records.
    """

    def __init__(self, access: Access, position: MetalogPosition) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = RemoteClient(access.url, token=access.token or None, ca=access.ca or None)
        self._client.session.saw(position)

    def open(self, *, waits: bool) -> None:
        """Connect; raise the errors of `indilog.connect`.

        Args:
            waits: whether to try again for a minute while no platform answers.
        """
        if waits:
            self.ask(self._client.open)
        else:
            self._run(self._client.open())

    @property
    def position(self) -> MetalogPosition:
        """The metalog position that this session has seen."""
        return self._client.session.position

    def log(self, name: str) -> Log:
        """Return a log of the platform; call its methods through `ask`."""
        return self._client.log(name)

    def ask(
        self, call: Callable[[], Coroutine[Any, Any, _ValueT]], *, may_repeat: bool = False
    ) -> _ValueT:
        """Return the result of a call, repeated for a minute after errors that changed nothing.

        Args:
            call: function that starts the call.
            may_repeat: whether to repeat the call also after an unknown outcome, because a second
                call is harmless.
        """
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._run(call())
            except IndilogError as error:
                can_repeat = error.retryable or (
                    may_repeat and isinstance(error, OutcomeUnknownError)
                )
                if not can_repeat or time.monotonic() > until:
                    raise
            time.sleep(_PAUSE_S)

    def _run(self, call: Coroutine[Any, Any, _ValueT]) -> _ValueT:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        """Close the connection and end its thread."""
        try:
            self._run(self._client.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@contextmanager
def connected(
    access: Access, position: MetalogPosition = 0, *, waits: bool = True
) -> Iterator[BlockingConnection]:
    """Connect to a platform for this block; reads reflect at least `position`.

    Args:
        access: address and credentials of the platform.
        position: a metalog position that the caller has seen.
        waits: whether to try again for a minute while no platform answers, because the platform may
            be restarting. If not, a wrong URL is an error at once.

    Raises:
        NotReadyError, UnauthorizedError, ConfigError, ValueError: as `indilog.connect`.
    """
    quiet_unless_configured()
    connection = BlockingConnection(access, position)
    try:
        connection.open(waits=waits)
        yield connection
    finally:
        connection.close()


def with_token(access: Access) -> Access:
    """Return `access` with the platform's token, which tasks on other machines need.

    The token comes from this machine: from the option, from INDILOG_TOKEN, or from the token file
    of a platform of this user (`indilog.link.access`).

    Raises:
        ConfigError, ValueError: as `indilog.connect`.
    """
    endpoint = reach(access.url, token=access.token or None, ca=access.ca or None)
    return Access(endpoint.url, endpoint.token, access.ca)
