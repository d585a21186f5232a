"""Measures changes of the chains of an order-first log while it is used (CORFU 4.3, Figure 8).

Each storage node runs in a process of its own; this process is the compute node. Some callers
append, others read random older records, without pauses. In each round one replica is given up as
if its node were lost: the others are sealed, and the next layout, in which another node has its
place, is recorded. That is the time of the reconfiguration; the time until a loss is noticed
(`cell_replace_after_s`) is not part of it. The next round begins when all contents are copied.

    python -m bench.kinds.reconfiguration [--storage-nodes 4] [--replicas 2] [--rounds 20]
                                          [--appenders 4] [--readers 4] [--record-bytes 256]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final, NamedTuple

from bench.cluster.failover import longest_pause_s
from bench.support.harness import Report, command, latency, table_of
from bench.support.platforms import compute_node
from indilog.base.log import Log, Session
from indilog.config import ClusterConfig, Config, node_config
from indilog_cells.layout_changes import LayoutChanges
from indilog_cells.opening import PlatformCells
from indilog_compute.log_kinds import LogKinds

NAME: Final = "events"
_AROUND_S: Final = 0.5
"""Seconds before the begin and after the end of a change in which pauses are looked for."""
_FILLED_S: Final = 60.0
"""Seconds within which all contents must be copied to a new replica."""
PAPER_S: Final = 0.030
"""The time of a reconfiguration in CORFU 4.3."""


class Reconfiguration(NamedTuple):
    """One change of the layout; seconds.

    Attributes:
        took_s: from the first seal until the next layout was recorded.
        append_pause_s, read_pause_s: the longest time around the change without an append, a read.
        reads: reads during the change.
    """

    took_s: float
    append_pause_s: float
    read_pause_s: float
    reads: int


@contextlib.asynccontextmanager
async def repeated(
    operation: Callable[[], Awaitable[object]], callers: int
) -> AsyncIterator[list[float]]:
    """Let callers repeat an operation while the block runs; yield the times at which one ended."""
    times: list[float] = []

    async def caller() -> None:
        while True:
            await operation()
            times.append(time.perf_counter())

    calling = [asyncio.create_task(caller()) for _ in range(callers)]
    try:
        yield times
        for each in calling:
            if each.done():
                each.result()  # raises what ended it
    finally:
        for each in calling:
            each.cancel()
        await asyncio.gather(*calling, return_exceptions=True)


async def changes_of(kinds: LogKinds, log: Log, asked: argparse.Namespace) -> list[Reconfiguration]:
    """Reconfiguration the layout of a log in each round, while callers use the log."""
    folder = kinds._catalog.logs[NAME].created.folder  # noqa: SLF001 - its layout is changed
    cells = PlatformCells(kinds, folder)
    changes = LayoutChanges(
        cells, cells, folder=folder, copies=asked.replicas, available=kinds.storage_nodes
    )
    data, chance, found = bytes(asked.record_bytes), random.Random(1), []
    last = await log.append(data)

    async def append() -> None:
        nonlocal last
        last = max(last, await log.append(data))

    async def read() -> None:
        await log.read(chance.randint(0, last))

    async with (
        repeated(append, asked.appenders) as appended,
        repeated(read, asked.readers) as reads,
    ):
        await asyncio.sleep(1.0)
        for number in range(asked.rounds):
            layout = kinds.layout(folder)
            replicas = sorted(layout.replicas)
            began = time.perf_counter()
            lost = {replicas[number % len(replicas)]}
            after = await changes.change(layout, layout, lost=lost, adds=True)
            ended = time.perf_counter()
            assert after is not None, "no other process changes the layout"
            await asyncio.sleep(_AROUND_S)
            until = began - _AROUND_S, ended + _AROUND_S
            found.append(
                Reconfiguration(
                    ended - began,
                    longest_pause_s(appended, *until),
                    longest_pause_s(reads, *until),
                    sum(began < at < ended for at in reads),
                )
            )
            async with asyncio.timeout(_FILLED_S):
                while kinds.layout(folder).is_filling:  # noqa: ASYNC110 - the platform copies
                    await asyncio.sleep(0.05)
            appended.clear()
            reads.clear()
            await asyncio.sleep(_AROUND_S)
    return found


async def main(asked: argparse.Namespace) -> None:
    """Measure the changes; print a table."""
    report = Report("reconfigurations of an order-first log", asked)
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as temporary:
        config = Config(
            cluster=ClusterConfig(storage_nodes=asked.storage_nodes, replicas=asked.replicas),
            node=node_config(data_dir=Path(temporary) / "data", cell_cache_bytes_max=1),
        )
        async with compute_node(config, processes=True) as logs:
            assert logs.kinds is not None
            await logs.kinds.create(NAME, "order-first")
            found = await changes_of(logs.kinds, logs.log(NAME, Session()), asked)
    table = table_of(f"{len(found)} changes; CORFU: {latency(PAPER_S)}", "what", "median", "most")
    rows = {
        "seal and next layout": [each.took_s for each in found],
        "longest time without an append": [each.append_pause_s for each in found],
        "longest time without a read": [each.read_pause_s for each in found],
    }
    for name, values in rows.items():
        table.add_row(name, latency(statistics.median(values)), latency(max(values)))
        report.keep(name, values)
    report.show(table)
    report.say(f"reads during the changes: {sum(each.reads for each in found):,}")
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        storage_nodes={"type": int, "default": 4, "help": "storage nodes"},
        replicas={"type": int, "default": 2, "help": "replicas of a chain"},
        rounds={"type": int, "default": 20, "help": "changes of the layout"},
        appenders={"type": int, "default": 4, "help": "callers that append"},
        readers={"type": int, "default": 4, "help": "callers that read"},
        record_bytes={"type": int, "default": 256, "help": "bytes of a record"},
    )
