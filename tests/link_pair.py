"""Two links wired to each other in one process, for tests: bytes go over by the event loop's turns,
as over a socket, but without one.
"""

from __future__ import annotations

import asyncio

from indilog.calls import Answer, Greeting, Limits, Question
from indilog.link import Link, Serve

LIMITS = Limits(
    record_bytes_max=1024 * 1024,
    record_tags_max=64,
    aux_bytes_max=1024 * 1024,
    result_bytes_max=4 * 1024 * 1024,
    message_bytes_max=16 * 1024 * 1024,
)


def nobody(link: Link, call: int, message: Question | Greeting) -> None:
    """Serves nothing: for an end that only asks."""
    raise AssertionError(f"nobody was to be asked {message}")


def link_pair(
    serve: Serve, asked_back: Serve = nobody, *, message_bytes_max: int = LIMITS.message_bytes_max
) -> tuple[Link, Link]:
    """Return an asking end, and the other end, which answers by `serve`."""
    ours = Link(asked_back, message_bytes_max=message_bytes_max)
    theirs = Link(serve, message_bytes_max=message_bytes_max)
    ours.connected(_to(theirs), theirs.lost, int)
    theirs.connected(_to(ours), ours.lost, int)
    return ours, theirs


def _to(receiver: Link) -> _Wire:
    return _Wire(receiver)


class _Wire:
    def __init__(self, receiver: Link) -> None:
        self._receiver = receiver

    def __call__(self, data: bytearray) -> None:
        asyncio.get_running_loop().call_soon(self._receiver.received, bytes(data))


class LinkAsker:
    """A link with its limits: an `Asker`."""

    def __init__(self, link: Link, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self._link = link

    async def ask(self, question: Question) -> Answer:
        return await self._link.ask(question)
