"""The comparison with other systems: reads find existing records, and results of clients are
merged.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Awaitable

import pytest

from bench.peers import merged
from bench.sides.side import READ_BACK, Peer


class Kept(Peer):
    """A side in memory."""

    def __init__(self, client: int = 0) -> None:
        super().__init__(client)
        self.records: list[str] = []
        self.reads = 0

    async def put(self, caller: int, tag: str) -> int:
        self.records.append(tag)
        return len(self.records) - 1

    async def first(self, caller: int, tag: str, place: int) -> object:
        self.reads += 1
        return self.records[place] == tag

    def last(self, caller: int, tag: str, place: int) -> Awaitable[object]:
        return self.first(caller, tag, place)


@pytest.mark.asyncio
@pytest.mark.parametrize("callers", [1, 7])
async def test_every_read_requests_an_appended_record(callers: int) -> None:
    side = Kept()
    await side.prepare(callers)
    assert len(side.records) == READ_BACK
    for _ in range(50):
        await side.read_next(0)
        await side.read_prev(0)
    assert side.reads == 100


@pytest.mark.asyncio
async def test_a_read_that_finds_nothing_ends_the_comparison() -> None:
    side = Kept()
    await side.prepare(1)
    side.records = ["another"] * READ_BACK
    with pytest.raises(RuntimeError, match="not found"):
        await side.read_next(0)


@pytest.mark.asyncio
async def test_the_mixed_workload_alternates_appends_and_reads() -> None:
    side = Kept()
    await side.prepare(1)
    for _ in range(10):
        await side.mixed(0)
    assert (len(side.records) - READ_BACK, side.reads) == (5, 5)


def test_clients_have_their_own_tags_and_repeatable_choices() -> None:
    assert next(Kept(0)._tags) == next(Kept(0)._tags) != next(Kept(1)._tags)
    assert Kept(1).data == Kept(1).data != Kept(0).data


def test_concurrent_measurements_of_clients_are_one_round() -> None:
    answers = [
        {"seconds": s, "cpu_s": 0.5, "latencies": b64encode(array("d", some).tobytes()).decode()}
        for s, some in ((1.0, [0.1, 0.2]), (1.5, [0.3]))
    ]
    found = merged(answers)
    assert (found.operations, found.seconds, found.cpu_s) == (3, 1.5, 1.0)
    assert found.per_second == 2.0
    assert list(found.latencies_s) == [0.1, 0.2, 0.3]
