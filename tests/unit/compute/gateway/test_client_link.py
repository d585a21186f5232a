"""What one client sends leaves turns to all others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import pytest

from indilog.base.log import Entry
from indilog.link.byte_budget import ByteBudget
from indilog.link.frames import write_frame
from indilog.link.link import Link
from indilog.link.link_messages import Cancel, LogAppend, LogRead
from indilog_compute.gateway.client_link import ClientLink, take_in
from indilog_compute.positions import Positions
from indilog_compute.workers.host import FunctionHost
from indilog_compute.workers.serving import LinkServer
from tests.support.hooked_log import HookedLogs

pytestmark = pytest.mark.asyncio


def link() -> Link:
    return Link(lambda *_: None, message_bytes_max=2**20, is_of_client=True)


async def test_many_small_frames_of_one_message_are_handled_in_parts() -> None:
    """Others have a turn at least once in 2,000 of them."""
    stream = bytearray()
    for call in range(20_000):
        write_frame(stream, call, Cancel())
    received: list[int] = []
    made = link()
    taking = asyncio.ensure_future(take_in(made, bytes(stream)))
    while not taking.done():
        received.append(made.frames_received)
        await asyncio.sleep(0)
    assert made.frames_received == 20_000
    received.append(made.frames_received)
    assert max(b - a for a, b in itertools.pairwise(received)) < 2_000


async def test_frames_after_a_malformed_one_are_ignored() -> None:
    made = link()
    stream = bytearray(b"\xff\xff\xff\xff" + bytes(100_000))
    write_frame(stream, 1, Cancel())
    await take_in(made, bytes(stream))
    assert made.is_lost
    assert made.frames_received == 0


class StuckLogs(HookedLogs):
    """Appends do not end."""

    async def before_append(self, entries: Sequence[Entry]) -> None:
        await asyncio.get_running_loop().create_future()


class Client:
    """A client of a gateway whose log takes nothing, and that has 10 MB for what waits."""

    def __init__(self) -> None:
        logs = StuckLogs()
        self.budget = ByteBudget(10_000_000)
        self.positions = Positions(logs)
        self.server = LinkServer(
            cast("FunctionHost", self), logs, questions_max=1000, is_client=True
        )
        self.ours = Link(lambda *_: None, message_bytes_max=2**20)
        self.theirs = ClientLink(
            self.server.serve,
            self.budget,
            message_bytes_max=2**20,
            on_lost=lambda _: self.server.close(),
        )
        self.ours.connected(self.wire(self.theirs), self.ours.lost, int)
        self.theirs.connected(self.wire(self.ours), self.theirs.lost, int)

    def wire(self, end: Link) -> Callable[[bytearray], None]:
        loop = asyncio.get_running_loop()
        return lambda data: cast("None", loop.call_soon(end.received, bytes(data)))


LARGE = LogAppend("orders", 0, bytes(900_000), ())


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_checked", [False, True])
async def test_a_cancelled_large_question_returns_its_bytes_to_the_budget(
    monkeypatch: pytest.MonkeyPatch, *, is_checked: bool
) -> None:
    """The question may be cancelled while its session position is being checked."""
    client = Client()
    question = LARGE
    if is_checked:
        question = msgspec.structs.replace(LARGE, position=9)
        monkeypatch.setattr(client.positions, "fault", StuckLogs().before_append)
    for _ in range(3):
        asked = [client.ours.post(question, lambda _: None) for _ in range(10)]
        await turns()
        assert client.budget.used == 9_000_000
        for call in asked:
            client.ours.abandon(call)
        await turns()
        assert client.budget.used == 0
    assert client.server._asking == {}
    assert client.server._log_service.questions == 0


async def test_a_question_number_reused_before_its_answer_closes_the_link() -> None:
    """Otherwise the answer to a small second question would free what the first one holds."""
    client = Client()
    client.ours.post(LARGE, lambda _: None)
    await turns()
    client.ours._next_call = 1
    client.ours.post(LogRead("orders", 0, 0), lambda _: None)
    await turns()
    assert client.theirs.is_lost
    assert client.budget.used == 0
