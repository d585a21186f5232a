"""Read micro-benchmark (WORKLOADS 1): latency of reads by the part of the platform that answers
them.

Three platforms have the same log of tagged 1 KiB records and are measured interleaved:

1. `local`: the local index has the tag, and the record cache has the record;
2. `cold records`: the local index has the tag, and the record comes from storage's disk;
3. `tier`: there is no local index, so the index tier finds every record. If it is exactly at the
   bound, an index node asks storage directly (thesis 5.4), otherwise the aggregator does.

    python -m bench.log_read [--seconds 1] [--rounds 3] [--callers 1 64 256] [--records 20000]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from contextlib import AsyncExitStack
from itertools import cycle
from typing import Any

from bench.support import platforms
from bench.support.harness import (
    Operation,
    Report,
    command,
    figures_of,
    interleave,
    table_of,
)
from indilog.base.ids import MAX_SEQNUM
from indilog.base.log import Entry, Log

RECORD_BYTES = 1024
TAGS = 100
SEED = 1
SETTINGS: dict[str, dict[str, Any]] = {
    "local": {},
    "cold records": {"record_cache_bytes_max": 0},
    "tier": {
        "suffix_cuts_max": 0,
        "popularity_entries_max": 0,
        "tag_cache_seqnums_max": 0,
        "tag_cache_seqnums_per_tag_max": 0,
        "record_cache_bytes_max": 0,
    },
}


async def fill(log: Log, records: int) -> list[tuple[str, int]]:
    """Append tagged records; return the tag and the seqnum of each."""
    chance = random.Random(SEED)
    data = chance.randbytes(RECORD_BYTES)
    places: list[tuple[str, int]] = []
    while len(places) < records:
        tags = [f"tag-{chance.randrange(TAGS)}" for _ in range(min(64, records - len(places)))]
        seqnums = await log.append_batch([Entry(data, tags=(tag,)) for tag in tags])
        places += zip(tags, seqnums, strict=True)
    return places


def reads_of(log: Log, places: list[tuple[str, int]]) -> dict[str, Operation]:
    """Return the reads of WORKLOADS 1, each at random places."""
    chance = random.Random(SEED)
    at = cycle(chance.sample(places, len(places)))

    async def seqnum(_caller: int) -> object:
        return await log.read(next(at)[1])

    async def direct(_caller: int) -> object:
        tag, place = next(at)
        return await log.read_next(tag, place)

    async def left(_caller: int) -> object:
        tag, place = next(at)
        return await log.read_next(tag, max(place - 5, 0))

    async def right(_caller: int) -> object:
        tag, place = next(at)
        return await log.read_prev(tag, place + 5)

    async def head(_caller: int) -> object:
        return await log.read_next(next(at)[0], 0)

    async def tail(_caller: int) -> object:
        return await log.read_prev(next(at)[0], MAX_SEQNUM)

    return {
        "by seqnum": seqnum, "direct": direct, "left": left, "right": right, "head": head,
        "tail": tail,
    }  # fmt: skip


async def main(asked: argparse.Namespace) -> None:
    """Measure every read at every number of callers, on the three platforms, interleaved."""
    report = Report("log_read", asked, record_bytes=RECORD_BYTES, tags=TAGS, settings=SETTINGS)
    async with AsyncExitStack() as stack:
        reads: dict[str, dict[str, Operation]] = {}
        for name, node in SETTINGS.items():
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="indilog-bench-"))
            config = platforms.configured(path, node=node)
            bench = await stack.enter_async_context(platforms.running(config))
            seqnums = await fill(bench.log, asked.records)
            reads[name] = reads_of(bench.log, seqnums)
        for callers in asked.callers:
            table = table_of(
                f"read, {callers} callers", "read and who answers", "ops/s", "p50", "p99", "CPU/op"
            )
            for read in reads["local"]:
                sides = {name: reads[name][read] for name in SETTINGS}
                found = await interleave(
                    sides, callers=callers, seconds=asked.seconds, rounds=asked.rounds
                )
                report.add(f"{read} {callers}", found)
                for name, rounds in found.items():
                    table.add_row(f"{read}, {name}", *figures_of(rounds))
                table.add_section()
            report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        records={"type": int, "default": 20_000, "help": "records in the log"},
    )
