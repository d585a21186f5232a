"""Measures for how long appends pause when a storage node is lost (Scalog 4.4, Table 2).

Three sequencers, three storage nodes and the compute node are processes of their own; this one is
the compute node. Some callers append without pauses. In each round the first replica of the shard
hangs (SIGSTOP). A policy decides what happens then (decision 0070). The pause is the longest time
without an acknowledgement.

    python -m bench.cluster.lost_storage [--lost-s 0.5] [--rounds 5] [--appenders 4]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from bench.cluster.failover import Appenders, engine_of, longest_pause_s
from bench.support.harness import Report, command, latency, table_of
from bench.support.platforms import configured
from indilog.base.log import Log
from indilog.base.telemetry import configure_logging
from indilog.runtime.cluster.supervisor import Supervisor
from indilog_compute.engine import Engine

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "finalize_add (2 replicas)": {"replicas": 2},
    "remove_replace (2 replicas)": {"replicas": 2, "lost_storage_policy": "remove_replace"},
    "mask (ack quorum 2 of 3)": {"replicas": 3, "ack_quorum": 2, "lost_storage_policy": "mask"},
}
_BEFORE_S, _AFTER_S = 1.0, 3.0
_BACK_S = 60.0
"""Seconds within which all replicas have all records again."""


async def one_round(cluster: Supervisor, engine: Engine, log: Log, callers: int) -> float:
    """Lose the first replica under load; return the seconds for which appends paused."""
    placement, shard = engine.placement, engine.shard
    assert shard is not None, "it writes one"
    appenders = Appenders(log, callers)
    await asyncio.sleep(_BEFORE_S)
    pid = cluster.processes[placement.replicas(shard)[0]].pid
    assert pid is not None, "the storage node runs"
    lost_at = time.perf_counter()
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(_AFTER_S)
    ended = time.perf_counter()
    await appenders.stop()
    os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(_BACK_S):
        while placement.replicas(shard) != placement.counting(shard):
            await log.append(b"", tags=["copied"])  # the metalog advances
            await asyncio.sleep(0.05)
    return longest_pause_s(appenders.acknowledged_at, lost_at, ended)


async def with_policy(policy: Mapping[str, Any], asked: argparse.Namespace) -> list[float]:
    """Return the pauses of all rounds."""
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        config = configured(
            path,
            processes=True,
            cluster={"storage_nodes": 3, **policy},
            node={"storage_lost_s": asked.lost_s, "hang_s": 600.0},
        )
        async with engine_of(config) as (cluster, logs):
            log, engine = logs.log("bench"), logs.engine
            return [
                await one_round(cluster, engine, log, asked.appenders) for _ in range(asked.rounds)
            ]


async def main(asked: argparse.Namespace) -> None:
    """Lose storage nodes under each policy."""
    configure_logging("console", "error")
    report = Report("lost_storage", asked)
    title = f"appends pause, storage_lost_s = {asked.lost_s:g}, {asked.appenders} callers"
    table = table_of(title, "the storage node is", "median", "largest")
    for name, policy in POLICIES.items():
        pauses = await with_policy(policy, asked)
        table.add_row(name, latency(statistics.median(pauses)), latency(max(pauses)))
        report.keep(name, pauses)
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        lost_s={"type": float, "default": 0.5, "help": "storage_lost_s"},
        appenders={"type": int, "default": 4, "help": "callers that append"},
    )
