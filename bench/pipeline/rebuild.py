"""Time and memory of reading a data directory and of rebuilding its index, without the platform
(decisions 0035 and 0041).

A platform first appends the records, with `durability = "memory"`, because this part is not
measured. Each record has the tag of its log and `--tags-each` tags of `--tags`. Then each side runs
in a process of its own, interleaved. Some sides read: the image of the directory, all columns as
Arrow batches, or seqnum and data. The others rebuild all snapshots, in one process or in a Spark
session. One side is a Spark session that runs an empty task. The medians of the rounds are shown.

CPU seconds are those of the work, without imports. For Spark, they are those of the process and its
descendants (the JVM and Python workers) until all have ended. Memory is the largest sum of the
proportional set sizes of these processes, sampled every 50 ms; pages of mapped files count. The
difference between Spark's rebuild and its session is the cost that grows with the log.

    python -m bench.pipeline.rebuild [--records 1000000] [--bytes 100] [--tags 100000] [--data DIR]
                                     [--master local[2]] [--sides ...]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Self

from bench.support.harness import ROOT, Report, command, table_of
from indilog.base.log import Entry
from indilog.client import open as open_client
from indilog.config import ClusterConfig, Config, node_config

MIB = 1024 * 1024
SAMPLE_S = 0.05
PR_SET_CHILD_SUBREAPER = 36
BATCH, CALLERS = 250, 8
SIDES = (
    "image", "all columns", "seqnum, data", "rebuild, one process", "Spark session",
    "rebuild, Spark",
)  # fmt: skip


async def fill(directory: Path, asked: argparse.Namespace) -> None:
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


def print_side(side: str, directory: Path, master: str) -> None:
    """Run one side here; print what was measured as JSON."""
    from indilog_pipeline.log_image import LogImage
    from indilog_pipeline.rebuild.plan import Engine
    from indilog_pipeline.rebuild.run import rebuild_index
    from indilog_pipeline.record_batches import COLUMNS, read_records

    imports_s = time.process_time()

    def read(columns: tuple[str, ...]) -> int:
        image = LogImage.read(directory)
        return sum(batch.num_rows for batch in read_records(image, columns=columns))

    def rebuilt(engine: Engine | None = None) -> int:
        for folder in directory.rglob("snapshots"):
            shutil.rmtree(folder)
        return sum(one.rows for one in rebuild_index(directory, engine))

    def with_spark(*, rebuilds: bool) -> int:
        from indilog_pipeline.rebuild.spark_engine import SparkEngine
        from indilog_pipeline.session import start

        spark = start("bench", master=master, settings={"spark.ui.showConsoleProgress": "false"})
        try:
            if rebuilds:
                return rebuilt(SparkEngine(spark))
            return len(spark.sparkContext.parallelize(range(2), 2).map(abs).collect())
        finally:
            spark.stop()

    work: dict[str, Callable[[], int]] = {
        "image": lambda: LogImage.read(directory).tail,
        "all columns": lambda: read(COLUMNS),
        "seqnum, data": lambda: read(("seqnum", "data")),
        "rebuild, one process": rebuilt,
        "Spark session": lambda: with_spark(rebuilds=False),
        "rebuild, Spark": lambda: with_spark(rebuilds=True),
    }
    begun = time.perf_counter()
    count = work[side]()
    wall_s, own_s = time.perf_counter() - begun, time.process_time() - imports_s
    times = {"wall_s": wall_s, "imports_s": imports_s, "own_s": own_s}
    print(json.dumps({"count": count, **times}))


def measure(side: str, directory: Path, master: str) -> dict[str, Any]:
    """Return what a process of its own and its descendants use."""
    module = "bench.pipeline.rebuild"
    command = [
        sys.executable, "-m", module, "--side", side, "--data", str(directory), "--master", master,
    ]  # fmt: skip
    with Descendants() as descendants, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said)
        while process.poll() is None:
            descendants.sample()
            time.sleep(SAMPLE_S)
        assert process.returncode == 0, f"{side} failed"
        said.seek(0)
        found: dict[str, Any] = json.loads(said.read().splitlines()[-1])
    own_s, imports_s = found.pop("own_s"), found.pop("imports_s")
    used_s = descendants.cpu_s - imports_s if "Spark" in side else own_s
    return found | {"cpu_s": used_s, "memory_bytes": descendants.memory_bytes}


class Descendants:
    """The resources of all processes that this process and its descendants start in the block.

    Attributes:
        cpu_s: their processor seconds; valid after the block, which waits until they have ended.
        memory_bytes: the largest sum of their proportional set sizes among the samples.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.memory_bytes = 0

    def __enter__(self) -> Self:
        """Adopt orphans: processes whose parent has ended become children of this one."""
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = resource.getrusage(resource.RUSAGE_CHILDREN)
        return self

    def sample(self) -> None:
        """Measure the memory of all descendants now."""
        self.memory_bytes = max(self.memory_bytes, sum(map(_memory_of, _below(os.getpid()))))

    def __exit__(self, *_: object) -> None:
        """Wait for the ends of all descendants."""
        with suppress(ChildProcessError):
            while True:
                os.wait()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = after.ru_utime + after.ru_stime - self._before.ru_utime - self._before.ru_stime


def _below(pid: int) -> list[int]:
    """Return the descendants of a process."""
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
        children = [c for t in threads for c in (t / "children").read_text().split()]
    except OSError:
        return []
    return [found for child in map(int, children) for found in (child, *_below(child))]


def _memory_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


async def main(asked: argparse.Namespace) -> None:
    """Fill a directory, measure every side, print a table."""
    if asked.side is not None:
        print_side(asked.side, asked.data, asked.master)
        return
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as temporary:
        directory = asked.data or Path(temporary, "data")
        if not await asyncio.to_thread(directory.exists):
            await fill(directory, asked)
        size = sum(f.stat().st_size for f in (directory / "journal").glob("segment-*.log"))
        report = Report("rebuild", asked, segment_bytes=size)
        sides = asked.sides or SIDES
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for number in range(asked.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                found[side].append(await asyncio.to_thread(measure, side, directory, asked.master))
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
            f"{median(one['memory_bytes'] for one in rounds) / MIB:,.0f}",
        )
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
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
        master={"default": "local[2]", "help": "where Spark runs"},
        sides={"choices": SIDES, "nargs": "+", "default": None, "help": "only these"},
        side={"choices": SIDES, "default": None, "help": "measure this one here, print JSON"},
    )
