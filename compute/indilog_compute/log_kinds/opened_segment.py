"""A segment of another kind than `shared`, as one compute node has it open (`kinds`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol, TypeAlias

from indilog.base.errors import IndilogError, NotReadyError, SealedError
from indilog.base.ids import SeqNum
from indilog.base.log import Log, LogSource, Session
from indilog.base.recent_failure import RecentFailure
from indilog.base.retention import Retention
from indilog_compute.log_kinds.catalog_records import CreatedLog


class OtherLogs(LogSource, Protocol):
    """The logs of an opened logspace of another kind than `shared`."""

    async def policies(self) -> Mapping[str, Retention]:
        """Return the retention policies of the logs, by name; a log that keeps all its records has
        none.
        """

    async def end(self) -> SeqNum:
        """End the logspace: every later append, by any process, raises `SealedError`. Return the
        tail, which never grows again. Ending an ended logspace is harmless.
        """

    @property
    def ended_at(self) -> SeqNum | None:
        """The tail, if this process has read that the logspace ended; else None."""

    @property
    def failure(self) -> str:
        """Why the log cannot be used now; empty: nothing is known to be wrong."""

    @property
    def position(self) -> int:
        """How many cells this process has applied."""

    async def append_content(self, owner: str, content: bytes) -> bytes:
        """Append a content that another process sent to this one, as the owner of the log; return
        the outcomes. `owner` names the tenure of this process that the sender knows.

        Raises:
            IndilogError: the content is in the log already, or never will be.
        """


class OpenLogs(Protocol):
    """Opens logspaces."""

    def __call__(
        self, created: CreatedLog, /, *, is_new: bool
    ) -> AbstractAsyncContextManager[OtherLogs]:
        """Open the logspace of a log while the block runs. A new one is created in its store."""


ReleaseSegment: TypeAlias = Callable[[CreatedLog], Coroutine[Any, Any, None]]
"""Deletes the cells or objects of a freed segment. Raises `IndilogError` if some may be left."""


class OpenedSegment:
    """A segment of another kind than `shared`. Its first use opens its logspace."""

    def __init__(self, created: CreatedLog, open_logs: OpenLogs) -> None:
        self.created = created
        self._open_logs = open_logs
        self._opening: asyncio.Task[None] | None = None
        """The newest attempt to open the logspace."""
        self._stack = AsyncExitStack()
        self._logs: OtherLogs | None = None
        self._is_closed = False
        self._failure = RecentFailure()
        """Why the newest attempt to open the logspace failed."""

    async def logs(self) -> OtherLogs:
        """Return the logspace, after opening it if necessary. Concurrent callers share one attempt.
        A caller whose call began during a failed attempt waits for the next one, too.

        Raises:
            NotReadyError: the store does not answer, or the segment is closed here.
        """
        if self._logs is None:
            if self._opening is not None and not self._opening.done():
                await asyncio.wait([self._opening])
            if self._logs is None:
                await self._attempt()
        assert self._logs is not None, "the attempt succeeded"
        return self._logs

    async def _attempt(self) -> None:
        """Begin to open the logspace, unless an attempt is in flight; wait for its end."""
        if self._is_closed:
            raise freed_error(self.created.log)
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(_retrieved)
        opening = self._opening
        await asyncio.wait([opening])  # if this caller is cancelled, the attempt goes on
        if opening.cancelled():
            raise freed_error(self.created.log)
        opening.result()

    async def _open(self) -> None:
        opening = self._open_logs(self.created, is_new=False)
        try:
            self._logs = await self._stack.enter_async_context(opening)
        except IndilogError as error:
            self._failure.note(str(error), asyncio.get_running_loop().time())
            raise
        self._failure.clear()

    async def log(self) -> Log:
        """Return the log, with a new session. The session of the caller is not needed: reads of
        such a log see all appends that were acknowledged before. Positions of different kinds
        cannot be compared.
        """
        return (await self.logs()).log(self.created.log, Session())

    @property
    def failure(self) -> str:
        """See `OtherLogs.failure`. If the logspace is not open: why it cannot be opened."""
        if self._logs is not None:
            return self._logs.failure
        return self._failure.text(asyncio.get_running_loop().time())

    @property
    def ended_at(self) -> SeqNum | None:
        """See `OtherLogs.ended_at`; None also if the logspace is not open."""
        return None if self._logs is None else self._logs.ended_at

    @property
    def position(self) -> int | None:
        """See `OtherLogs.position`; None: the logspace is not open."""
        return None if self._logs is None else self._logs.position

    async def append_content(self, owner: str, content: bytes) -> bytes:
        """See `OtherLogs.append_content`.

        Raises:
            SealedError: the logspace is not open.
        """
        if self._logs is None:
            raise SealedError("This process does not own the log.")
        return await self._logs.append_content(owner, content)

    async def close(self) -> None:
        """Close the logspace, if it is open. It is not opened again."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        await self._stack.aclose()


def _retrieved(opening: asyncio.Task[None]) -> None:
    """Mark the error of an attempt as seen, also if all callers were cancelled."""
    if not opening.cancelled():
        opening.exception()


def freed_error(log: str) -> NotReadyError:
    """Return the error of a use of a segment that is freed. A log handle that gets it makes the
    call again, with the segments that are left.
    """
    return NotReadyError(f"A part of log {log} that was trimmed is not kept any more.")
