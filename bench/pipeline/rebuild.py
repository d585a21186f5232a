"""Time and memory of reading a data directory and of rebuilding its index, without the platform
(decision 0035).

A platform appends the records first, with `durability = "memory"`: its speed does not count here.
Each record has the tag of its log and `--tags-each` tags of `--tags`. Then each side runs in a
process of its own, in turns: the image of the directory; all columns as Arrow batches; seqnum and
data; the rebuild of all snapshots. The medians of the rounds are shown. CPU seconds are those of
that process without its imports; memory is by how much its largest resident size exceeds that
after the imports. Pages of mapped files count.

    python -m bench.pipeline.rebuild [--records 1000000] [--bytes 100] [--tags 100000] [--data DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.support.harness import ROOT, Report, arguments, run, table_of
from indilog.base.log import Entry
from indilog.client import open as open_client
from indilog.config import ClusterConfig, Config, node_config

MIB = 1024 * 1024
BATCH, CALLERS = 250, 8
SIDES = ("image", "all columns", "seqnum, data", "rebuild")


async def filled(directory: Path, asked: argparse.Namespace) -> None:
    """Append the records."""
    config = Config(cluster=ClusterConfig(durability="memory"), node=node_config())
    data, tags, each = b"x" * asked.bytes, asked.tags, asked.tags_each
    async with open_client(directory, config) as client:
        log = client.log("orders")

        async def call(first: int) -> None:
            numbers = range(first, min(first + BATCH, asked.records))
            await log.append_batch(
                [
                    Entry(data, [f"t{(n * each + k * 7919) % tags}" for k in range(each)])
                    for n in numbers
                ]
            )

        for first in range(0, asked.records, BATCH * CALLERS):
            firsts = range(first, min(first + BATCH * CALLERS, asked.records), BATCH)
            await asyncio.gather(*map(call, firsts))


def tell_side(side: str, directory: Path) -> None:
    """Run one side here; print what was measured as JSON."""
    from indilog_pipeline.log_image import LogImage
    from indilog_pipeline.rebuild import rebuild_index
    from indilog_pipeline.record_batches import COLUMNS, read_records

    def read(columns: tuple[str, ...]) -> int:
        image = LogImage.read(directory)
        start()
        return sum(batch.num_rows for batch in read_records(image, columns=columns))

    def rebuilt() -> int:
        shutil.rmtree(directory / "snapshots", ignore_errors=True)
        return sum(one.rows for one in rebuild_index(directory))

    started = [0.0, 0.0]

    def start() -> None:
        started[:] = time.process_time(), time.perf_counter()

    work: dict[str, Callable[[], int]] = {
        "image": lambda: LogImage.read(directory).tail,
        "all columns": lambda: read(COLUMNS),
        "seqnum, data": lambda: read(("seqnum", "data")),
        "rebuild": rebuilt,
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start()
    count = work[side]()
    cpu_s, wall_s = time.process_time() - started[0], time.perf_counter() - started[1]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        json.dumps({"count": count, "cpu_s": cpu_s, "wall_s": wall_s, "grown_bytes": grown * 1024})
    )


def measured(side: str, directory: Path) -> dict[str, Any]:
    """Return what a process of its own measures."""
    module = "bench.pipeline.rebuild"
    command = [sys.executable, "-m", module, "--side", side, "--data", str(directory)]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def main(asked: argparse.Namespace) -> None:
    """Fill a directory, measure every side, print a table."""
    if asked.side is not None:
        tell_side(asked.side, asked.data)
        return
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as temporary:
        directory = asked.data or Path(temporary, "data")
        if not await asyncio.to_thread(directory.exists):
            await filled(directory, asked)
        size = sum(f.stat().st_size for f in (directory / "journal").glob("segment-*.log"))
        report = Report("rebuild", asked, segment_bytes=size)
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for number in range(asked.rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                found[side].append(await asyncio.to_thread(measured, side, directory))
    table = table_of(
        f"{asked.records:,} records of {asked.bytes:,} bytes, {size / MIB:,.0f} MiB of segments",
        "side", "records or rows", "CPU s", "wall s", "MB/s of CPU", "memory, MiB",
    )  # fmt: skip
    for side, rounds in found.items():
        report.keep(side, rounds)
        cpu_s = median(one["cpu_s"] for one in rounds)
        table.add_row(
            side,
            f"{rounds[0]['count']:,}",
            f"{cpu_s:.2f}",
            f"{median(one['wall_s'] for one in rounds):.2f}",
            f"{size / cpu_s / 1e6:,.0f}",
            f"{median(one['grown_bytes'] for one in rounds) / MIB:,.0f}",
        )
    report.show(table)
    report.write()


if __name__ == "__main__":
    run(
        main,
        arguments(
            (__doc__ or "").partition("\n")[0],
            records={"type": int, "default": 1_000_000},
            bytes={"type": int, "default": 100, "help": "data of a record"},
            tags={"type": int, "default": 100_000, "help": "different tags"},
            tags_each={"type": int, "default": 2, "help": "tags of a record"},
            rounds={"type": int, "default": 3},
            data={
                "type": Path,
                "default": None,
                "help": "keep the directory here, and use it again",
            },
            side={"choices": SIDES, "default": None, "help": "measure this one here, print JSON"},
        ),
    )
