"""Benchmark of many runs, messages and objects (WORKLOADS 5): what must not grow with their number.

- **Lists**: latency of the newest 100 runs of each filter, of one status, and of one signal, among
  `--runs` ended and `--runs` waiting runs.
- **Waiting runs**: bytes of memory of each in the states of the partitions. Also the seconds until
  two executors own the partitions of a third one that leaves, and have loaded their runs.
- **Ended runs**: disk space and index memory of each, before and after their collection.
- **Queue**: latency of a pop with 1,000 and with `--runs` messages in the queue, while one delayed
  message waits. Also the number of records that the delayed message keeps.
- **Objects**: seconds to collect the history of `--runs` objects, and the disk space.

Runs are written as the records of runs that an executor has executed, because executing all of them
would take longer than the measurement.

    python -m bench.runs [--runs 1000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench.runs import measures
from bench.support.harness import Report, command, latency, table_of
from indilog.client import Client
from indilog.config import Config, NodeConfig
from indilog.runtime.cluster.assembly import embedded


async def main(asked: argparse.Namespace) -> None:
    """Measure each part on a new platform."""
    report = Report("runs", asked)
    parts = (measures.lists, measures.takeover, measures.ended, measures.queue, measures.objects)
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
            config = Config(node=NodeConfig(data_dir=Path(path)))
            async with embedded(config) as platform:
                scene = measures.Scene(platform, Client(platform.logs), Path(path), asked.rounds)
                found = await part(scene, asked.runs)
        table = table_of(f"{part.__name__}, {asked.runs:,}", "", "figure")
        for name, value in found.items():
            report.keep(f"{part.__name__}: {name}", value)
            is_time = name.endswith("_s")
            table.add_row(name, latency(value) if is_time else f"{value:,.0f}")
        report.show(table)
    report.write()


if __name__ == "__main__":
    command(main, __doc__, runs={"type": int, "default": 1000, "help": "number of each"})
