"""What one client sends leaves turns to all others."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from indilog.link.frames import frame_written
from indilog.link.link import Link
from indilog.link.link_messages import Cancel
from indilog_compute.gateway.client_link import take_in

pytestmark = pytest.mark.asyncio


def link() -> Link:
    return Link(lambda *_: None, message_bytes_max=2**20, is_of_client=True)


async def test_many_small_messages_in_one_are_answered_in_parts() -> None:
    """Others have a turn at least once in 2,000 of them."""
    stream = bytearray()
    for call in range(20_000):
        frame_written(stream, call, Cancel())
    received: list[int] = []
    made = link()
    taking = asyncio.ensure_future(take_in(made, bytes(stream)))
    while not taking.done():
        received.append(made.frames_received)
        await asyncio.sleep(0)
    assert made.frames_received == 20_000
    received.append(made.frames_received)
    assert max(b - a for a, b in itertools.pairwise(received)) < 2_000


async def test_what_comes_after_a_malformed_message_is_not_looked_at() -> None:
    made = link()
    stream = bytearray(b"\xff\xff\xff\xff" + bytes(100_000))
    frame_written(stream, 1, Cancel())
    await take_in(made, bytes(stream))
    assert made.is_lost
    assert made.frames_received == 0
