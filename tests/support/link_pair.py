"""Two links connected to each other in one process, for tests. Bytes travel by iterations of the
event loop, like over a socket, but without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from indilog.base.log import LogSource
from indilog.link.link import Link, Serve
from indilog.link.link_messages import Answer, Greeting, Limits, LogQuestion, Question
from indilog.link.remote import RemoteLogs
from indilog_compute.log_service import LinkLogService

LIMITS = Limits(
    record_bytes_max=1024 * 1024,
    record_tags_max=64,
    aux_bytes_max=1024 * 1024,
    result_bytes_max=4 * 1024 * 1024,
    message_bytes_max=16 * 1024 * 1024,
)


def refuse_questions(link: Link, call: int, message: Question | Greeting) -> None:
    """Refuse every question; for the asking end."""
    raise AssertionError(f"this end serves no questions, not {message}")


def link_pair(
    serve: Serve,
    asked_back: Serve = refuse_questions,
    *,
    message_bytes_max: int = LIMITS.message_bytes_max,
    delay_s: Callable[[], float] = float,
) -> tuple[Link, Link]:
    """Return an asking end, and the other end, which answers by `serve`.

    Written bytes arrive `delay_s()` later, and in the order in which they were written.
    """
    ours = Link(asked_back, message_bytes_max=message_bytes_max)
    theirs = Link(serve, message_bytes_max=message_bytes_max)
    ours.connected(_Wire(theirs, delay_s), theirs.lost, int)
    theirs.connected(_Wire(ours, delay_s), ours.lost, int)
    return ours, theirs


class _Wire:
    def __init__(self, receiver: Link, delay_s: Callable[[], float]) -> None:
        self._receiver = receiver
        self._delay_s = delay_s
        self._last_s = 0.0

    def __call__(self, data: bytearray) -> None:
        loop = asyncio.get_running_loop()
        if not (delay_s := self._delay_s()):
            loop.call_soon(self._receiver.received, bytes(data))
            return
        self._last_s = max(self._last_s, loop.time() + delay_s)
        loop.call_at(self._last_s, self._receiver.received, bytes(data))


class LinkAsker:
    """A link with its limits: an `Asker`."""

    def __init__(self, link: Link, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._link = link

    async def ask(self, question: Question) -> Answer:
        return await self._link.ask(question)


def linked_logs(logs: LogSource, *, delay_s: Callable[[], float] = float) -> RemoteLogs:
    """Return `logs` as a worker sees them: at the other end of a link."""
    service = LinkLogService(logs, questions_max=1000)

    def serve(link: Link, call: int, message: Question | Greeting) -> None:
        if isinstance(message, LogQuestion):
            service.serve(link, call, message)
        else:
            service.cancel(call)

    ours, _ = link_pair(serve, delay_s=delay_s)
    return RemoteLogs(LinkAsker(ours))
