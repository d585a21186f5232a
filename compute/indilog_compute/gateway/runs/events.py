"""`GET /runs/{app}/{id}/events`: the events of a run as server-sent events.

The application reads the events (operation `runs.events`), and names the sub-stream that contains
the events. The gateway itself waits for the next record of this sub-stream, so a client that
watches an idle run occupies no slot of the application. `RunRoutes` makes an `EventStream` for each
client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from indilog.base.errors import IndilogError, OverloadedError
from indilog.base.log import LogSource, Session
from indilog.link.byte_budget import ByteShare
from indilog.sdk.runs import RUN_EVENTS, RunEvents
from indilog_compute.gateway.runs.operations import OperationAnswer, OperationCalls

_ALIVE_S: Final = 15.0
"""Seconds after which an idle stream sends a keep-alive comment."""
_PAUSE_S: Final = 0.1
"""Shortest time in seconds between two questions to the application."""


class EventStream:
    """The events of one run for one client.

    Args:
        operations: runs the operation.
        logs: the logs of this compute node, to wait for further records.
        app: name of the application.
        run: id of the run.
        after: seqnum of the last event that the client has.
        position: position of the client's session.
    """

    def __init__(
        self,
        operations: OperationCalls,
        logs: LogSource,
        *,
        app: str,
        run: str,
        after: int,
        position: int,
    ) -> None:
        self._operations = operations
        self._logs = logs
        self._app = app
        self._run = run
        self._after = after
        self._session = Session(position)

    async def ask(self) -> OperationAnswer:
        """Ask the application for the next events."""
        arguments = msgspec.json.encode({"id": self._run, "after": self._after})
        answer = await self._operations.run(
            self._app, RUN_EVENTS, arguments, position=self._session.position
        )
        self._session.saw(answer.position)
        return answer

    async def text(self, answer: OperationAnswer, share: ByteShare) -> AsyncIterator[bytes]:
        """Yield the text of the stream.

        The stream ends when the run has ended. It also ends if the application does not answer, or
        if the gateway's byte budget is used up. Then the client reconnects with `Last-Event-ID`.

        Args:
            answer: the first answer of `ask`.
            share: counts the bytes of the current answer in the gateway's byte budget.
        """
        while not answer.is_failure:
            share.free()
            try:
                share.take_up_to(len(answer.body))
            except OverloadedError:
                return
            found = msgspec.json.decode(answer.body, type=RunEvents)
            for event in found.events:
                text = msgspec.json.encode(event)
                yield b"id: %d\nevent: %b\ndata: %b\n\n" % (event.seqnum, event.kind.encode(), text)
            self._after = found.next - 1
            if found.has_ended:
                return
            if not found.has_more:
                async for alive in self._wait(found):
                    yield alive
            answer = await self.ask()

    async def _wait(self, found: RunEvents) -> AsyncIterator[bytes]:
        """Wait for the next record of the run; meanwhile, yield keep-alive comments."""
        await asyncio.sleep(_PAUSE_S)
        log = self._logs.log(found.log, self._session)
        while True:
            try:
                if await log.read_next(found.tag, found.next, wait=_ALIVE_S) is not None:
                    return
            except IndilogError:
                return  # the application reports the problem, for example that the run was trimmed
            yield b": alive\n\n"
