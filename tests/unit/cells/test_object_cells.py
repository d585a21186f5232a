"""Cells as objects: which requests to the store they make, and what they keep there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from indilog_cells.index import GenerationLimits
from indilog_cells.object_cells import ObjectCells

pytestmark = pytest.mark.asyncio


class CountingStore:
    """An object store in memory that counts its requests by kind."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()

    async def create(self, name: str, content: bytes) -> bool:
        self.requests["create"] += 1
        return self.objects.setdefault(name, content) is content

    async def replace(self, name: str, content: bytes) -> None:
        self.requests["replace"] += 1
        self.objects[name] = content

    async def get(self, name: str) -> bytes | None:
        self.requests["get"] += 1
        return self.objects.get(name)

    async def names(self, folder: str) -> list[str]:
        self.requests["list"] += 1
        found = (name.removeprefix(f"{folder}/") for name in self.objects)
        return sorted(name for name in found if "/" not in name)

    async def full_disks(self) -> Sequence[str]:
        return ()

    async def delete_folder(self, folder: str) -> None:
        for name in await self.names(folder):
            await self.delete(f"{folder}/{name}")

    async def delete(self, name: str) -> None:
        self.requests["delete"] += 1
        self.objects.pop(name, None)


async def test_each_request_to_the_store_is_counted_once() -> None:
    store = CountingStore()
    cells = ObjectCells(store, "log", 3, GenerationLimits(cells=5))
    for position in range(4):
        assert await cells.write(position, b"%d" % position)
    assert not await cells.write(3, b"taken")
    assert await cells.read(3) == b"3"
    await cells.trim(0, 1)
    assert await cells.read(0) == b""
    for start in (0, 5, 10):
        await cells.write_generation(start, b"index %d" % start)
    await cells.drop_generation(0)
    assert await cells.generations() == [5, 10]
    assert await cells.read_generation(5) == b"index 5"
    assert await cells.newest_checkpoint() is None
    for position in range(5):
        await cells.write_checkpoint(position, b"state %d" % position)
    assert await cells.newest_checkpoint() == b"state 4"
    assert cells.requests == store.requests
    assert cells.requests["delete"] == 1 + 3


async def test_the_two_newest_checkpoints_are_kept() -> None:
    store = CountingStore()
    cells = ObjectCells(store, "log", 3, GenerationLimits(cells=5))
    for position in range(5):
        await cells.write_checkpoint(position, b"state %d" % position)
    assert sorted(store.objects.values()) == [b"state 3", b"state 4"]
