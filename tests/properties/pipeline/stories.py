"""Random runs of a real platform in one data directory, for programs that read it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import Entry, Log
from indilog.config import KIB, MIB, ClusterConfig, Config, node_config
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog.runtime.journal.segment import FRAME_HEADER_BYTES, segment_path
from indilog.runtime.journal.segment_files import segment_files
from indilog.runtime.journal.segment_scan import Damage, SegmentScan, newest_used
from tests.unit.runtime.journals import spoil

LOGS = ("orders", "käufe/2")
TAGS: Final[tuple[UserTag, ...]] = ("a", "b", "ü", 7, 1 << 60)


def small(directory: Path, chance: random.Random, *, replicas: int = 1) -> Config:
    """Return a platform with short segments and frequent checkpoints."""
    return Config(
        cluster=ClusterConfig(
            sequencers=chance.choice((1, 3)),
            storage_nodes=replicas,
            replicas=replicas,
            engines=chance.choice((1, 2)),
            index_shards=chance.choice((1, 2, 3)),
            record_bytes_max=8 * KIB,
            batch_bytes_max=100 * KIB,
            durability=chance.choice(("memory", "memory", "fsync")),
        ),
        node=node_config(
            data_dir=directory,
            segment_bytes=104 * KIB,
            checkpoint_frames=chance.choice((20, 200, 100_000)),
            rewrite_bytes_per_s=1024 * MIB,
            reclaim_bytes_per_s=1024 * MIB,
            index_snapshot_entries_min=chance.choice((16, 1 << 20)),
        ),
    )


def copied_at_rest(directory: Path, copy: Path) -> bool:
    """Copy a directory in which no thread of a platform works now; False: one does."""
    before = _listed(directory)
    try:
        shutil.copytree(directory, copy)
    except (shutil.Error, FileNotFoundError):
        before = []
    if before and before == _listed(directory):
        return True
    shutil.rmtree(copy)
    return False


def _listed(directory: Path) -> list[tuple[Path, int, int]]:
    """Return name, file and time of change of all files; none: some vanished meanwhile."""
    try:
        stats = [(path, path.stat()) for path in sorted(directory.rglob("*"))]
    except FileNotFoundError:
        return []
    return [(path, stat.st_ino, stat.st_mtime_ns) for path, stat in stats]


class Story:
    """A data directory, and what was appended there."""

    def __init__(self, directory: Path, chance: random.Random, *, replicas: int = 1) -> None:
        self.directory = directory
        self.chance = chance
        self.config = small(directory, chance, replicas=replicas)
        self.appended: dict[SeqNum, tuple[str, Entry]] = {}
        """The log and content of each acknowledged record."""

    async def live(self, platform: Platform, steps: int) -> None:
        """Append and trim at random."""
        for _ in range(steps):
            engine = self.chance.choice(list(platform.engines.values()))
            name = self.chance.choice(LOGS)
            await self._step(engine.log(name), name)

    async def _step(self, log: Log, name: str) -> None:
        chance = self.chance
        match chance.randrange(12):
            case 0 if self.appended:
                until = chance.randrange(max(self.appended) + 1)
                await log.trim(until, tag=chance.choice((None, *TAGS)))
            case 1 | 2:
                entries = [self._entry() for _ in range(chance.randrange(1, 40))]
                seqnums = await log.append_batch(entries)
                self.appended |= {s: (name, e) for s, e in zip(seqnums, entries, strict=True)}
            case 3:
                appends = [self._append(log, name) for _ in range(chance.randrange(1, 20))]
                await asyncio.gather(*appends)
            case _:
                await self._append(log, name)

    def _entry(self) -> Entry:
        tags: list[UserTag] = self.chance.sample(TAGS, self.chance.randrange(len(TAGS)))
        return Entry(self.chance.randbytes(self.chance.choice((0, 1, 10, 300, 3000))), tags)

    async def _append(self, log: Log, name: str) -> None:
        entry = self._entry()
        self.appended[await log.append(entry.data, tags=entry.tags)] = name, entry

    async def run(self, steps: int, *, killed: bool) -> None:
        """Run the platform once; `killed`: its directory is left as kill -9 leaves it."""
        copy = self.directory.with_name("killed")
        async with embedded(self.config) as platform:
            await self.live(platform, steps)
            if killed:
                while not copied_at_rest(self.directory, copy):  # noqa: ASYNC110 threads set no event
                    await asyncio.sleep(0.05)
        if killed:
            shutil.rmtree(self.directory)
            copy.rename(self.directory)

    def batches(self) -> Iterator[tuple[Path, int, int]]:
        """Yield file, offset and length of all batches in segment files."""
        for file in segment_files(self.directory / "journal"):
            for found in SegmentScan(file.path, file.first, newest=True):
                if not isinstance(found, Damage) and found[0].kind == FrameKind.RECORDS:
                    yield file.path, found[2].offset, found[2].length

    def damage(self, places: int) -> None:
        """Overwrite the headers, the columns or the data of some batches."""
        batches = list(self.batches())
        for path, offset, length in self.chance.sample(batches, min(places, len(batches))):
            at = self.chance.choice((-20, 60, max(60, length - 20)))
            spoil(path, offset + at, 64 if at < 0 else 16)

    def tear(self) -> None:
        """Leave a part of a frame at the end of the journal, as a crash of the machine may."""
        *_, (path, offset, length) = self.batches()
        with path.open("rb") as segment:
            segment.seek(offset - FRAME_HEADER_BYTES)
            frame = segment.read(FRAME_HEADER_BYTES + length)
        number = newest_used(path.parent)  # the last file may be a spare
        newest = segment_path(path.parent, number)
        scan = SegmentScan(newest, number, newest=True)
        list(scan)
        if scan.sealed:
            return  # and the next one is not begun
        with newest.open("r+b") as segment:
            segment.seek(scan.end)
            segment.write(frame[: self.chance.randrange(len(frame))])

    def configured_for(self, directory: Path, *, snapshots: bool = True) -> Config:
        """Return the configuration of a copy of the directory; perhaps with the index in memory."""
        node = dataclasses.replace(self.config.node, data_dir=directory)
        if not snapshots:
            tier = dataclasses.replace(node.index_tier, index_snapshot_entries_min=1 << 30)
            node = dataclasses.replace(node, index_tier=tier)
        return dataclasses.replace(self.config, node=node)

    def change_index_shards(self) -> None:
        """Let the next run begin a new era of the index schedule, perhaps."""
        cluster = dataclasses.replace(
            self.config.cluster, index_shards=self.chance.choice((1, 2, 3))
        )
        self.config = dataclasses.replace(self.config, cluster=cluster)

    async def read(self, log: Log, seqnum: SeqNum) -> tuple[object, ...]:
        """Return the platform's answer to a read of a record."""
        try:
            record = await log.read(seqnum)
        except TrimmedError:
            return ("trimmed",)
        except DataLossError:
            return ("lost",)
        assert record is not None
        return (record.data, record.tags, round(record.time * 1e6), round(record.ordered_at * 1e6))
