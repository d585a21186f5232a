"""One flipped bit in a segment of an embedded platform, in many trials. Every read by tag or of a
whole log returns each record or raises `DataLossError`, also after two restarts.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

import indilog.client
from indilog.base.errors import DataLossError
from indilog.base.ids import MAX_SEQNUM
from indilog.base.log import Log
from indilog.config import MIB, Config, node_config
from indilog.runtime.journal.segment import segment_path

CONFIG: Final = Config(node=node_config(segment_bytes=8 * MIB, record_cache_bytes_max=0))
TAGS: Final = (None, "a", "b", "c")
FLIPS: Final = 4
"""Trials by default."""


class Kept:
    """The acknowledged appends: the data of each record, and the seqnums of each tag."""

    def __init__(self) -> None:
        self.data: dict[int, bytes] = {}
        self.of: dict[str | None, list[int]] = {tag: [] for tag in TAGS}

    def add(self, seqnum: int, data: bytes, tags: Sequence[str]) -> None:
        assert seqnum not in self.data, "no seqnum is assigned twice"
        self.data[seqnum] = data
        for tag in (None, *tags):
            self.of[tag].append(seqnum)


async def fill(directory: Path, chance: random.Random) -> Kept:
    """Append alone and many at once, so that batches have one record or several."""
    kept = Kept()
    async with indilog.client.open(directory, CONFIG) as client:
        log = client.log("orders")

        async def append(number: int) -> None:
            data = b"%d " % number * chance.choice((1, 10, 200))
            tags = chance.sample(("a", "b", "c"), chance.randint(0, 2))
            kept.add(await log.append(data, tags=tags), data, tags)

        for start in range(0, 200, 20):
            for number in range(start, start + 5):
                await append(number)
            await asyncio.gather(*map(append, range(start + 5, start + 20)))
    for seqnums in kept.of.values():
        seqnums.sort()
    return kept


def flip(directory: Path, chance: random.Random) -> tuple[int, int]:
    """Flip one bit of the bytes written into the first segment; return its place."""
    path = segment_path(directory / "journal", 1)
    written = bytearray(path.read_bytes())
    offset, bit = chance.randrange(len(written.rstrip(b"\0"))), chance.randrange(8)
    written[offset] ^= 1 << bit
    path.write_bytes(bytes(written))
    return offset, bit


async def check(log: Log, kept: Kept) -> None:
    """Check that pages, forwards and backwards, show each record or name it as lost."""
    for tag, seqnums in kept.of.items():
        unseen, bound = list(seqnums), 0
        while True:
            try:
                page = await log.read_range(tag, bound, limit=50)
            except DataLossError as error:
                lost, bound = (error.seqnum or 0), max(bound + 1, error.next_seqnum or 0)
                assert not [s for s in unseen if s < lost], "no record is skipped"
                unseen = [s for s in unseen if s >= bound]
                continue
            if not page:
                break
            for record in page:
                assert record.data == kept.data[record.seqnum]
                assert unseen.pop(0) == record.seqnum, "no record is skipped"
            bound = page[-1].seqnum + 1
        assert not unseen
        for bound in (*seqnums[:: max(1, len(seqnums) // 20)], MAX_SEQNUM):
            try:
                found = await log.read_prev(tag, bound)
            except DataLossError:
                continue
            assert found is not None
            assert found.seqnum == max(s for s in seqnums if s <= bound)


@pytest.mark.repeated("tests/properties/storage/test_damage.py")
@pytest.mark.heavy
@pytest.mark.cluster
@pytest.mark.asyncio
async def test_one_flipped_bit_never_makes_a_gap(tmp_path: Path, seeds_wanted: int | None) -> None:
    chance = random.Random(5)
    kept = await fill(tmp_path / "whole", chance)
    for number in range(seeds_wanted or FLIPS):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", directory)
        place = flip(directory, random.Random(number))
        more = Kept()
        for seqnum, data in kept.data.items():
            more.add(seqnum, data, [tag for tag in TAGS[1:] if tag and seqnum in kept.of[tag]])
        for again in range(3):
            async with indilog.client.open(directory, CONFIG) as client:
                log = client.log("orders")
                try:
                    await check(log, more)
                except AssertionError as error:
                    raise AssertionError(f"flip {number} at {place}, restart {again}") from error
                more.add(await log.append(b"more", tags=["a"]), b"more", ["a"])
        shutil.rmtree(directory)
