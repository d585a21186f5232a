"""What a trim gives back (PITFALLS 7): disk, and memory of the index tier.

A log is filled with tagged records, a part of it is trimmed, and the platform is left alone until
it has given back what it can. Sizes are those that the file system says the journal takes, and
those that the index nodes say of themselves. Times are not measured.

    python -m bench.trim [--mib 1024] [--share 0.9] [--batch 256] [--tags 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench.harness import Report, arguments, run, table_of
from index_tier.index_node import IndexNode
from indilog.config import Config, NodeConfig
from indilog.log import Entry, Log
from indilog.runtime.assembly import Platform, embedded
from indilog.runtime.segment_scan import SegmentScan
from storage.node import StorageNode

RECORD_BYTES = 1024
SEED = 1
_QUIET_S = 3.0
_WAIT_S = 600.0


class Sizes(NamedTuple):
    """What the platform takes."""

    disk_bytes: int
    used_bytes: int
    """Without the zeros that wait for appends: in the segment that is written, and the next one."""
    index_bytes: int
    entries: int
    discarded_bytes: int


def sizes_of(platform: Platform, directory: Path) -> Sizes:
    """Return them as they are now."""
    disk = sum(p.stat().st_blocks * 512 for p in (directory / "journal").glob("segment-*.log"))
    index = [r.status() for r in platform.shell.roles.values() if isinstance(r, IndexNode)]
    storage = [r.status() for r in platform.shell.roles.values() if isinstance(r, StorageNode)]
    return Sizes(
        disk,
        disk - prepared_in(directory),
        sum(figures["bytes"] for figures in index),
        sum(figures["entries"] for figures in index),
        sum(figures["discarded_bytes"] for figures in storage),
    )


def prepared_in(directory: Path) -> int:
    """Return the bytes behind the last frame, and those of segments without any."""
    prepared = 0
    for path in sorted((directory / "journal").glob("segment-*.log"))[-2:]:
        number = int(path.stem.removeprefix("segment-"))
        scan = SegmentScan(path, number, newest=True)
        for _ in scan:
            pass
        prepared += 0 if scan.sealed else path.stat().st_size - scan.end
    return prepared


async def filled(log: Log, mib: int, batch: int, tags: int) -> list[int]:
    """Append so many MiB of records, each with one of the tags and with one that all have."""
    chance = random.Random(SEED)
    seqnums: list[int] = []
    while len(seqnums) < mib * 1024:
        entries = [
            Entry(chance.randbytes(RECORD_BYTES), tags=(f"tag-{chance.randrange(tags)}", "all"))
            for _ in range(batch)
        ]
        seqnums += await log.append_batch(entries)
    return seqnums


async def settled(platform: Platform, directory: Path) -> Sizes:
    """Return the sizes when they have not changed for a while."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _WAIT_S
    before, since = sizes_of(platform, directory), loop.time()
    while loop.time() < min(end, since + _QUIET_S):
        await asyncio.sleep(0.25)
        now = sizes_of(platform, directory)
        if now != before:
            before, since = now, loop.time()
    return before


async def measured(mib: int, share: float, batch: int, tags: int) -> tuple[Sizes, Sizes]:
    """Return the sizes before and after a trim."""
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as temporary:
        directory = Path(temporary)
        config = Config(node=NodeConfig(data_dir=directory))
        async with embedded(config) as platform:
            log = platform.logs.log("trimmed")
            seqnums = await filled(log, mib, batch, tags)
            before = await settled(platform, directory)
            until = seqnums[int(len(seqnums) * share)]
            await log.trim(until)
            after = await settled(platform, directory)
            left = await log.read_range(None, until, limit=10)
            assert [record.seqnum for record in left] == seqnums[seqnums.index(until) :][:10]
    return before, after


async def main(asked: argparse.Namespace) -> None:
    """Fill, trim, print what is left of disk and memory."""
    report = Report("trim", asked, record_bytes=RECORD_BYTES)
    before, after = await measured(asked.mib, asked.share, asked.batch, asked.tags)
    table = table_of(
        f"{asked.share:.0%} of {asked.mib} MiB trimmed", "", "before", "after", "given back"
    )
    for name, was, now in zip(before._fields, before, after, strict=True):
        back = f"{100 * (1 - now / was):.1f} %" if was else ""
        table.add_row(name, f"{was:,}", f"{now:,}", back)
        report.keep(name, [was, now])
    report.show(table)
    report.write()


if __name__ == "__main__":
    run(
        main,
        arguments(
            (__doc__ or "").partition("\n")[0],
            mib={"type": int, "default": 1024, "help": "MiB of records"},
            share={"type": float, "default": 0.9, "help": "how much of them is trimmed"},
            tags={"type": int, "default": 1000, "help": "different tags"},
            batch={"type": int, "default": 256, "help": "records appended together"},
        ),
    )
