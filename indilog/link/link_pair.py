"""Connects two links in memory, for workers that run in the process of their compute node."""

from __future__ import annotations

import asyncio  # noqa: TID251 - a link is part of the shell
from collections.abc import Callable
from functools import partial

from indilog.link.link import Link, Serve


def link_pair(
    serve: Serve,
    serve_back: Serve,
    *,
    message_bytes_max: int,
    on_lost: Callable[[Link], None],
    on_lost_back: Callable[[Link], None],
    is_of_client: bool = False,
) -> tuple[Link, Link]:
    """Return two links that are connected in memory.

    Args:
        serve: answers the questions of the second link.
        serve_back: answers the questions of the first link.
        message_bytes_max: largest message in bytes.
        on_lost: called when the first link is lost.
        on_lost_back: called when the second link is lost.
        is_of_client: whether the second link is a client's.
    """
    first = Link(
        serve, message_bytes_max=message_bytes_max, on_lost=on_lost, is_of_client=is_of_client
    )
    second = Link(serve_back, message_bytes_max=message_bytes_max, on_lost=on_lost_back)
    for end, other in ((first, second), (second, first)):
        end.connected(partial(_pass_on, other), partial(_end, other), int)
    return first, second


def _pass_on(receiver: Link, data: bytearray) -> None:
    """Let `receiver` receive the written bytes, in a later iteration of the event loop."""
    asyncio.get_running_loop().call_soon(receiver.received, bytes(data))


def _end(receiver: Link) -> None:
    asyncio.get_running_loop().call_soon(receiver.lost)
