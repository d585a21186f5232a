"""Measures the disk space and index memory that a trim frees (PITFALLS 7).

It fills a log with tagged records, trims a part of it, and waits until the platform has freed all
that it can. Sizes are the journal's disk usage in the file system, and the index nodes' own
figures. Times are not measured.

    python -m bench.trim [--mib 1024] [--share 0.9] [--batch 256] [--record-bytes 1024]
                         [--tags 1000] [--by-tags]

Small batches are the hard case: punching holes frees none of them, only rewriting does. With
`--batch 1` many single appends are under way at once, and the platform batches them. With
`--by-tags` a share of the tags is trimmed instead of the log, so that most batches are partly
alive. `disk_bytes` includes the prepared segments, `used_bytes` does not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench.support.harness import Report, command, table_of
from indilog.base.log import Entry, Log
from indilog.config import Config, NodeConfig
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog.runtime.journal.segment_files import segment_files
from indilog.runtime.journal.segment_scan import SegmentScan
from indilog_index.index_node import IndexNode
from indilog_storage.node import StorageNode

SEED = 1
_QUIET_S = 3.0
_LONE_APPENDS = 4
"""Callers that append single records concurrently."""
_WAIT_S = 600.0


class Sizes(NamedTuple):
    """The disk space and memory of the platform."""

    disk_bytes: int
    used_bytes: int
    """Disk space without prepared zeros, in the segment being written and the next one."""
    files: int
    index_bytes: int
    entries: int
    discarded_bytes: int
    rewritten_bytes: int
    """Bytes written by rewrites of segments."""


def sizes_of(platform: Platform, directory: Path) -> Sizes:
    """Return the present sizes."""
    files = segment_files(directory / "journal")
    disk = sum(file.path.stat().st_blocks * 512 for file in files)
    index = [r.status() for r in platform.shell.roles.values() if isinstance(r, IndexNode)]
    storage = [r.status() for r in platform.shell.roles.values() if isinstance(r, StorageNode)]
    return Sizes(
        disk,
        disk - prepared_in(directory),
        len(files),
        sum(figures["bytes"] for figures in index),
        sum(figures["entries"] for figures in index),
        sum(figures["discarded_bytes"] for figures in storage),
        platform.shell.metrics.rewritten_bytes,
    )


def prepared_in(directory: Path) -> int:
    """Return the bytes after the last frame, and those of segments without frames."""
    prepared = 0
    for file in segment_files(directory / "journal")[-2:]:
        scan = SegmentScan(file.path, file.first, newest=True)
        for _ in scan:
            pass
        prepared += 0 if scan.sealed else file.path.stat().st_size - scan.end
    return prepared


class Fill(NamedTuple):
    """The records of a log."""

    mib: int
    batch: int
    record_bytes: int
    tags: int
    by_tags: bool


async def filled(log: Log, fill: Fill) -> list[int]:
    """Append records, each with one of the tags and, unless tags are trimmed, a common tag."""
    chance = random.Random(SEED)
    common = () if fill.by_tags else ("all",)
    seqnums: list[int] = []
    while len(seqnums) * fill.record_bytes < fill.mib << 20:
        entries = [
            Entry(
                chance.randbytes(fill.record_bytes),
                tags=(f"tag-{chance.randrange(fill.tags)}", *common),
            )
            for _ in range(max(fill.batch, _LONE_APPENDS))
        ]
        if fill.batch == 1:
            seqnums += await asyncio.gather(*(log.append(e.data, tags=e.tags) for e in entries))
        else:
            seqnums += await log.append_batch(entries[: fill.batch])
    return sorted(seqnums)


async def trim(log: Log, fill: Fill, share: float, seqnums: list[int]) -> None:
    """Trim a share of a log: its oldest records, or all records of some tags. Check that the other
    records can be read.
    """
    if fill.by_tags:
        dead = int(fill.tags * share)
        for tag in range(dead):
            await log.trim(seqnums[-1] + 1, tag=f"tag-{tag}")
        assert await log.read_prev(f"tag-{dead}") is not None
        return
    until = seqnums[int(len(seqnums) * share)]
    await log.trim(until)
    left = await log.read_range(None, until, limit=10)
    assert [record.seqnum for record in left] == seqnums[seqnums.index(until) :][:10]


def at_work(platform: Platform) -> bool:
    """Return whether storage searches for dead records, or rewrites segments without them."""
    storage = [r.status() for r in platform.shell.roles.values() if isinstance(r, StorageNode)]
    return platform.shell.rewriting.busy or any(figures["reclaiming"] for figures in storage)


async def settle(platform: Platform, directory: Path) -> Sizes:
    """Return the sizes once they have not changed for some seconds."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_S
    before, since = sizes_of(platform, directory), loop.time()
    while loop.time() < min(end, since + _QUIET_S):
        await asyncio.sleep(0.25)
        now = sizes_of(platform, directory)
        if now != before or at_work(platform):
            before, since = now, loop.time()
    return before


async def measure(fill: Fill, share: float) -> tuple[Sizes, Sizes]:
    """Return the sizes before and after a trim."""
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as temporary:
        directory = Path(temporary)
        config = Config(node=NodeConfig(data_dir=directory))
        async with embedded(config) as platform:
            log = platform.logs.log("trimmed")
            seqnums = await filled(log, fill)
            before = await settle(platform, directory)
            await trim(log, fill, share, seqnums)
            after = await settle(platform, directory)
    return before, after


async def main(asked: argparse.Namespace) -> None:
    """Fill, trim, print what is left of disk and memory."""
    report = Report("trim", asked)
    fill = Fill(asked.mib, asked.batch, asked.record_bytes, asked.tags, asked.by_tags)
    before, after = await measure(fill, asked.share)
    table = table_of(
        f"{asked.share:.0%} of {asked.mib} MiB trimmed", "", "before", "after", "freed"
    )
    for name, was, now in zip(before._fields, before, after, strict=True):
        back = f"{100 * (1 - now / was):.1f} %" if was else ""
        table.add_row(name, f"{was:,}", f"{now:,}", back)
        report.keep(name, [was, now])
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        mib={"type": int, "default": 1024, "help": "MiB of records"},
        share={"type": float, "default": 0.9, "help": "how much of them is trimmed"},
        tags={"type": int, "default": 1000, "help": "different tags"},
        batch={"type": int, "default": 256, "help": "records appended together; 1: each alone"},
        record_bytes={"type": int, "default": 1024, "help": "bytes of a record"},
        by_tags={"action": "store_true", "help": "trim so many of the tags, not the log"},
    )
