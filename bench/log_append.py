"""Append micro-benchmark (WORKLOADS 1): closed-loop callers, 1 KiB records, with and without tags.

The sides run interleaved: no tag, one tag out of 20, a new tag for every record, and a batch of ten
records per call. Every side appends to the same platform: embedded in this process, or with
`--processes` to 3 sequencers and one replica in processes of their own.

    python -m bench.log_append [--seconds 2] [--rounds 5] [--callers 1 64 256] [--processes]

`--link` says how the processes are connected: Unix sockets, TCP, or TCP with TLS (decision 0044).
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final

from bench.support import platforms
from bench.support.harness import (
    Operation,
    Report,
    command,
    figures_of,
    interleave,
    median_of,
    table_of,
)
from indilog.base.log import Entry, Log
from indilog.runtime.cluster.cluster_keys import make_authority, make_node_keys

RECORD_BYTES = 1024
BATCH_RECORDS = 10
_PORT: Final = 27_400


def sides_of(log: Log) -> dict[str, Operation]:
    """Return one operation for each side."""
    data = bytes(range(256)) * (RECORD_BYTES // 256)
    pool = cycle([(f"tag-{number}",) for number in range(20)])
    fresh = count()
    batch = [Entry(data, tags=("batch",)) for _ in range(BATCH_RECORDS)]

    async def untagged(_caller: int) -> object:
        return await log.append(data)

    async def tagged(_caller: int) -> object:
        return await log.append(data, tags=next(pool))

    async def new_tag(_caller: int) -> object:
        return await log.append(data, tags=(next(fresh) + 1,))

    async def batched(_caller: int) -> object:
        return await log.append_batch(batch)

    return {
        "no tag": untagged,
        "one tag of 20": tagged,
        "a new tag each": new_tag,
        f"batch of {BATCH_RECORDS}": batched,
    }


def link_settings(link: str, directory: Path) -> dict[str, Any]:
    """Return the settings of a link between processes; keys are made in `directory`."""
    if link == "unix":
        return {}
    settings: dict[str, Any] = {"node_host": "127.0.0.1", "node_port": _PORT}
    if link == "tls":
        make_authority(directory / "keys")
        settings["node_keys"] = make_node_keys(directory / "keys", "node")
    return settings


async def main(asked: argparse.Namespace) -> None:
    """Measure every side at every number of callers."""
    report = Report("log_append", asked, record_bytes=RECORD_BYTES, durability=asked.durability)
    table = table_of(
        f"append, {RECORD_BYTES} bytes, {asked.durability}",
        "side and callers", "calls/s", "p50", "p99", "CPU/call", "records/s", "MB/s",
    )  # fmt: skip
    used = table_of("processes, all sides together", "process and callers", "CPU/call", "resident")
    for callers in asked.callers:
        with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
            config = platforms.configured(
                path,
                processes=asked.processes,
                cluster={"durability": asked.durability},
                node=link_settings(asked.link, Path(path)),
            )
            async with platforms.running(config, processes=asked.processes) as bench:
                before = bench.usage()
                found = await interleave(
                    sides_of(bench.log),
                    callers=callers, seconds=asked.seconds, rounds=asked.rounds,
                )  # fmt: skip
                after = bench.usage()
        report.add(f"append {callers}", found)
        for name, rounds in found.items():
            records = BATCH_RECORDS if name.startswith("batch") else 1
            rate = records * median_of(rounds, lambda r: r.per_second)
            table.add_row(
                f"{name} {callers}", *figures_of(rounds), f"{rate:,.0f}",
                f"{rate * RECORD_BYTES / 1e6:,.0f}",
            )  # fmt: skip
        table.add_section()
        calls = sum(one.operations for rounds in found.values() for one in rounds)
        for name, usage in after.items():
            cpu_us = (usage.cpu_s - before[name].cpu_s) / calls * 1e6
            used.add_row(
                f"{name} {callers}", f"{cpu_us:.1f} µs", f"{usage.resident_bytes / 1e6:,.0f} MB"
            )
        used.add_section()
    report.show(table)
    report.show(used)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        durability={"choices": ("fsync", "memory"), "default": "fsync"},
        processes={"action": "store_true", "help": "tiers as processes"},
        link={"choices": ("unix", "tcp", "tls"), "default": "unix"},
    )
