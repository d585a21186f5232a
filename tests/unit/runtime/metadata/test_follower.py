"""Watches that share one read per change (`indilog.runtime.metadata.follower`)."""

from __future__ import annotations

import asyncio

import pytest

from indilog.base.errors import QuorumUnavailableError
from indilog.runtime.metadata.follower import Followers

pytestmark = pytest.mark.asyncio


async def test_a_close_while_a_read_fails_leaves_the_watches_its_error() -> None:
    """The watches have not run since the read failed, so they are still counted."""
    followers = Followers(10)

    async def fail() -> int:
        raise QuorumUnavailableError("No answer.")

    watch = asyncio.create_task(followers.wait_for("a", fail, lambda _: True))
    await asyncio.sleep(0)  # the watch begins
    closing = asyncio.create_task(followers.close())  # in the same turn as the read
    await closing
    with pytest.raises(QuorumUnavailableError, match="No answer"):
        await watch


async def test_a_watch_that_waits_at_the_close_fails() -> None:
    followers = Followers(10)

    async def read() -> int:
        return 1

    watch = asyncio.create_task(followers.wait_for("a", read, lambda seen: seen > 1))
    for _ in range(5):
        await asyncio.sleep(0)
    await followers.close()
    with pytest.raises(QuorumUnavailableError, match="was closed"):
        await watch
