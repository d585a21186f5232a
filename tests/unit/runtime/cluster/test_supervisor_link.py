"""A node's link to its supervisor: one line out for each fact; the end of the supervisor is
noticed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from indilog.runtime.cluster.supervisor_link import SupervisorLink

pytestmark = pytest.mark.asyncio


class Ends:
    """Both ends of the link: the supervisor's socket, and the node's `SupervisorLink`."""

    def __init__(self) -> None:
        self.supervisor, node = socket.socketpair()
        self.supervisor.settimeout(10)
        self.gone = asyncio.Event()
        self.descriptor = node.detach()
        self.line = SupervisorLink(self.descriptor, None, self.gone.set)


@asynccontextmanager
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    with made.supervisor:
        yield made
        made.line.close()


async def test_ready_is_one_line_with_its_detail() -> None:
    async with ends() as both:
        assert not both.line.was_ready
        both.line.ready("http://127.0.0.1:8080")
        assert both.supervisor.recv(100) == b"ready http://127.0.0.1:8080\n"
        assert both.line.was_ready


async def test_a_failure_is_one_line_also_for_a_message_with_line_breaks() -> None:
    async with ends() as both:
        both.line.failed("The directory\nis in\r\n use.")
        assert both.supervisor.recv(100) == b"failed The directory is in use.\n"
        assert not both.line.was_ready


async def test_the_end_of_the_supervisor_is_noticed() -> None:
    async with ends() as both:
        both.supervisor.close()
        async with asyncio.timeout(60):
            await both.gone.wait()


async def test_bytes_from_the_supervisor_are_ignored() -> None:
    async with ends() as both:
        both.supervisor.send(b"hello")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not both.gone.is_set()
        both.supervisor.close()
        async with asyncio.timeout(60):
            await both.gone.wait()


async def test_writing_to_a_dead_supervisor_raises_no_error() -> None:
    async with ends() as both:
        both.supervisor.close()
        both.line.ready("")
        both.line.failed("too late")


async def test_closing_the_link_closes_it_at_the_supervisor_too() -> None:
    async with ends() as both:
        both.line.close()
        both.line.close()
        assert both.supervisor.recv(100) == b""
        both.line.ready("")


async def test_children_of_the_node_do_not_inherit_the_link() -> None:
    async with ends() as both:
        assert both.line._supervisor is not None
        assert not both.line._supervisor.get_inheritable()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(both.descriptor)


async def test_heartbeats_follow_once_it_is_ready() -> None:
    async with ends() as both:
        both.supervisor.settimeout(0)
        reader, writer = await asyncio.open_unix_connection(sock=both.supervisor)
        both.line.ready("here", hang_s=0.05)
        async with asyncio.timeout(60):
            assert [await reader.readline() for _ in range(4)] == [
                b"ready here\n", *[b"heartbeat\n"] * 3
            ]  # fmt: skip
        writer.close()


async def test_a_ready_node_outlives_its_supervisor_and_is_adopted_by_the_next(
    tmp_path: Path,
) -> None:
    ours, theirs = socket.socketpair()
    gone = asyncio.Event()
    link = SupervisorLink(theirs.detach(), tmp_path / "n.control", gone.set)
    link.ready("here", hang_s=1000)
    ours.close()
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "n.control")
        assert await reader.readline() == b"ready here\n"
        newer, newer_writer = await asyncio.open_unix_connection(tmp_path / "n.control")
        assert await newer.readline() == b"ready here\n"
        assert await reader.read() == b"", "the connection of the old supervisor is closed"
    assert not gone.is_set()
    for each in (writer, newer_writer):
        each.close()
    link.close()


async def test_a_node_that_is_not_ready_ends_with_its_supervisor(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    gone = asyncio.Event()
    link = SupervisorLink(theirs.detach(), tmp_path / "n.control", gone.set)
    ours.close()
    async with asyncio.timeout(60):
        await gone.wait()
    link.close()


async def test_without_a_supervisor_the_link_does_nothing() -> None:
    line = SupervisorLink(None, None, lambda: pytest.fail("there is none that could be gone"))
    line.ready("")
    line.failed("x")
    line.close()
