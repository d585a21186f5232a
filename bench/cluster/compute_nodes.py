"""Measures processor time per append, by role, with 1, 2 and 4 compute nodes (thesis 7.2.4).

Every compute node is a process of its own and appends at the same fixed rate. So more compute nodes
mean more appends, not longer waits. Two cores cannot show growing throughput, but the cost of an
append shows what would limit it. Each record has the tag of the log and `--tags` further
tags: new ones, or ones from a pool of `--pool` tags of its compute node.

    python -m bench.cluster.compute_nodes [--nodes 1 2 4] [--rate 1000] [--tags 4] [--pool 0]
    [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from statistics import median
from typing import Any

import uvloop

from bench.support import platforms
from bench.support.harness import ROOT, Report, arguments, run, table_of
from indilog.base.ids import NodeId
from indilog.base.log import Entry
from indilog.base.telemetry import configure_logging
from indilog.config import Config
from indilog.runtime.cluster.supervisor import supervised

DATA = bytes(range(256))
TICK_S = 0.01
"""Interval of starting appends, in seconds; each tick starts as many as the rate requires."""


def entries_of(node: int, tags: int, pool: int) -> Iterator[Entry]:
    """Yield records whose tags no other compute node uses."""
    numbers = count()
    while True:
        own = [next(numbers) for _ in range(tags)]
        yield Entry(DATA, tags=[f"{node}-{n % pool if pool else n}" for n in own])


async def drive(asked: argparse.Namespace) -> None:
    """Be one compute node. Each line of the standard input is a number of seconds: append for so
    long.
    """
    configure_logging("console", "warning")
    name, metadata = asked.drive
    entries = entries_of(int(name.rpartition("-")[2]), asked.tags, asked.pool)
    loop = asyncio.get_running_loop()
    async with platforms.joined_as(NodeId(name), metadata) as log:
        print("joined", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            appends: set[asyncio.Task[Any]] = set()
            calls, start, cpu = 0, time.perf_counter(), time.process_time()
            while (passed := time.perf_counter() - start) < float(line):
                for _ in range(calls, int(passed * asked.rate)):
                    entry = next(entries)
                    task = loop.create_task(_append(log.append, entry))
                    appends.add(task)
                    task.add_done_callback(appends.discard)
                    calls += 1
                await asyncio.sleep(TICK_S)
            await asyncio.gather(*appends)
            print(json.dumps([calls, time.process_time() - cpu]), flush=True)


async def _append(append: Callable[..., Awaitable[int]], entry: Entry) -> None:
    await append(entry.data, tags=entry.tags)


class AppendingCluster:
    """A cluster of processes, in which each compute node appends."""

    def __init__(self, config: Config, asked: argparse.Namespace) -> None:
        self._config = config
        self._asked = asked

    async def measured(self) -> list[dict[str, float]]:
        """Return microseconds of processor time per append by role, for each round."""
        names = [NodeId(f"engine-{n}") for n in range(self._config.cluster.engines)]
        async with supervised(self._config, left_out=names) as cluster:
            drivers = [await self._started(name, cluster.metadata_address) for name in names]
            rounds = []
            try:
                for number in range(self._asked.rounds + 1):
                    pids = {n: p.pid for n, p in cluster.processes.items() if p.pid}
                    pids |= {n: d.pid for n, d in zip(names, drivers, strict=True)}
                    before = {n: platforms.usage_of(pid).cpu_s for n, pid in pids.items()}
                    for driver in drivers:
                        assert driver.stdin is not None
                        driver.stdin.write(b"%f\n" % self._asked.seconds)
                    answers = [json.loads(await _line(driver)) for driver in drivers]
                    calls = sum(answer[0] for answer in answers)
                    used: defaultdict[str, float] = defaultdict(float)
                    for name, pid in pids.items():
                        spent = platforms.usage_of(pid).cpu_s - before[name]
                        used[re.sub(r"-\d.*", "", name)] += spent / calls * 1e6
                    used["all"] = sum(used.values())
                    if number:  # the first one warms up
                        rounds.append(dict(used))
            finally:
                for driver in drivers:
                    assert driver.stdin is not None
                    driver.stdin.close()
                    await driver.wait()
            return rounds

    async def _started(self, name: NodeId, metadata: str) -> asyncio.subprocess.Process:
        asked = self._asked
        driver = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.cluster.compute_nodes", "--drive", name, metadata,
            "--rate", str(asked.rate), "--tags", str(asked.tags), "--pool", str(asked.pool),
            cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert await _line(driver) == b"joined\n"
        return driver


async def _line(driver: asyncio.subprocess.Process) -> bytes:
    assert driver.stdout is not None
    return await asyncio.wait_for(driver.stdout.readline(), 60)


async def main(asked: argparse.Namespace) -> None:
    """Measure each number of compute nodes; print a row for each."""
    if asked.drive:
        return await drive(asked)
    report = Report("compute_nodes", asked)
    roles = ("engine", "storage", "sequencer", "index", "aggregator", "all")
    table = table_of("processor time per append, µs", "compute nodes", *roles, "of the first")
    first = 0.0
    for nodes in asked.nodes:
        with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
            cluster = {"engines": nodes, "durability": "memory"}
            config = platforms.configured(path, processes=True, cluster=cluster)
            rounds = await AppendingCluster(config, asked).measured()
        report.keep(str(nodes), rounds)
        figures = [median(one[role] for one in rounds) for role in roles]
        first = first or figures[-1]
        table.add_row(str(nodes), *(f"{f:.1f}" for f in figures), f"{figures[-1] / first:.2f}")
    report.show(table)
    report.write()
    return None


if __name__ == "__main__":
    asked = arguments(
        __doc__,
        nodes={"type": int, "nargs": "+", "default": [1, 2, 4]},
        rate={"type": int, "default": 1000, "help": "appends a second of each compute node"},
        tags={"type": int, "default": 4, "help": "tags of a record, beside the log's"},
        pool={"type": int, "default": 0, "help": "tags of a compute node that return; 0: all new"},
        rounds={"type": int, "default": 3},
        drive={"nargs": 2, "default": None, "help": argparse.SUPPRESS},
    )
    if asked.drive:
        uvloop.run(drive(asked))
    else:
        run(main, asked)
