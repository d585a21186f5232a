"""Measures one shard with more replicas (Scalog 6.3, Figure 6), and with records of 4 KiB.

Each side is a cluster of processes with three sequencers and as many storage nodes as replicas;
this process is its compute node. An append is acknowledged when all replicas have synced the
record, and a majority of the sequencers has synced its metalog entry. Scalog sends a batch to all
replicas at once, so the latency should hardly grow with their number. Here the replicas share two
cores; in the paper they do not.

    python -m bench.cluster.one_shard [--replicas 1 2 3] [--record-bytes 4096]
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from bench.support.harness import (
    Operation,
    Report,
    Round,
    command,
    figures_of,
    interleave,
    median_of,
    ratio_of,
    table_of,
)
from bench.support.platforms import configured, running
from indilog.base.log import Log


async def main(asked: argparse.Namespace) -> None:
    """Append to one shard, for each number of replicas."""
    report = Report("one shard", asked)
    async with AsyncExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="indilog-bench-")))
        sides: dict[str, Operation] = {}
        for count in asked.replicas:
            cluster = {"storage_nodes": count, "replicas": count}
            config = configured(path / str(count), processes=True, cluster=cluster)
            bench = await stack.enter_async_context(running(config, processes=True))
            sides[f"replicas {count}"] = appending(bench.log, asked.record_bytes)
        for callers in asked.callers:
            found = await interleave(
                sides, callers=callers, seconds=asked.seconds, rounds=asked.rounds
            )
            base = next(iter(found.values()))
            title = f"{callers} callers, records of {asked.record_bytes:,} bytes"
            columns = ("appends/s", "p50", "p99", "cpu here", "MiB/s", "p50 ÷ first")
            table = table_of(title, "side", *columns)
            for side, rounds in found.items():
                mib = median_of(rounds, lambda r: r.per_second) * asked.record_bytes / 2**20
                ratio = ratio_of(rounds, base, _median_latency)
                table.add_row(side, *figures_of(rounds), f"{mib:,.1f}", f"{ratio:.2f}")
            report.add(title, found)
            report.show(table)
    report.write()


def appending(log: Log, record_bytes: int) -> Operation:
    """Return an operation that appends a record with one of 20 tags."""
    data = bytes(record_bytes)

    async def operation(caller: int) -> object:
        return await log.append(data, tags=[f"tag-{caller % 20}"])

    return operation


def _median_latency(one: Round) -> float:
    return one.quantile(0.5)


if __name__ == "__main__":
    command(
        main,
        __doc__,
        replicas={"type": int, "nargs": "+", "default": [1, 2, 3]},
        record_bytes={"type": int, "default": 4096, "help": "bytes of a record"},
    )
