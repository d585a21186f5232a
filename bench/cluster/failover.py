"""Measures for how long appends pause when the primary is lost (decision 0046; Scalog 4.4).

Three sequencers and one storage node run in processes of their own; this process is the compute
node. Some callers append without pauses. In each round the primary is killed, hangs (SIGSTOP), or
stops in order (SIGTERM). The pause is the longest time without an acknowledgement.

    python -m bench.cluster.failover [--lost-s 0.5] [--rounds 5] [--appenders 4]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterable

from bench.support.harness import Report, command, latency, table_of
from bench.support.platforms import configured
from indilog.base.ids import NodeId
from indilog.base.log import Log
from indilog.base.telemetry import configure_logging
from indilog.config import Config
from indilog.runtime.cluster.assembly import joined, logs_of
from indilog.runtime.cluster.node_process import node_running
from indilog.runtime.cluster.supervisor import Supervisor, supervised
from indilog_compute.engine import Engine
from indilog_compute.local_log import LocalLogs

ENGINE = NodeId("engine-0")
WAYS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP, "stopped": signal.SIGTERM}
_BEFORE_S, _AFTER_S = 1.0, 3.0
_BACK_S = 60.0
"""Seconds within which a lost sequencer must run again."""


@contextlib.asynccontextmanager
async def engine_of(config: Config) -> AsyncIterator[tuple[Supervisor, LocalLogs]]:
    """Run a platform, with its compute node in this process; yield both."""
    async with (
        supervised(config, left_out=[ENGINE]) as cluster,
        node_running(ENGINE, cluster.metadata_address, _raise) as node,
    ):
        logs = logs_of(node.shell, ENGINE, node.start.config)
        assert logs is not None, "the node is an engine"
        await joined(logs)
        yield cluster, logs


def longest_pause_s(times: Iterable[float], began: float, ended: float) -> float:
    """Return the longest time without an acknowledgement between two instants, in seconds."""
    during = [began, *(at for at in times if began < at < ended), ended]
    return max(after - at for at, after in itertools.pairwise(during))


class Appenders:
    """Callers that append until they are stopped; `acknowledged_at` has an instant per append."""

    def __init__(self, log: Log, callers: int) -> None:
        self.acknowledged_at: list[float] = []
        self._tasks = [asyncio.create_task(self._append(log)) for _ in range(callers)]

    async def _append(self, log: Log) -> None:
        while True:
            await log.append(bytes(1024), tags=["failover"])
            self.acknowledged_at.append(time.perf_counter())

    async def stop(self) -> None:
        """Stop the callers; raise the error of an append that failed."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)


async def one_round(cluster: Supervisor, engine: Engine, log: Log, how: str, callers: int) -> float:
    """Lose the primary under load; return the seconds for which appends paused."""
    appenders = Appenders(log, callers)
    await asyncio.sleep(_BEFORE_S)
    process = cluster.processes[engine.primary]
    pid, restarts = process.pid, process.restarts
    assert pid is not None, "the primary runs"
    lost_at = time.perf_counter()
    os.kill(pid, WAYS[how])
    await asyncio.sleep(_AFTER_S)
    ended = time.perf_counter()
    await appenders.stop()
    if how == "hung":
        os.kill(pid, signal.SIGCONT)
    else:
        async with asyncio.timeout(_BACK_S):
            await process.ready(restarts=restarts + 1)
    return longest_pause_s(appenders.acknowledged_at, lost_at, ended)


async def main(asked: argparse.Namespace) -> None:
    """Lose primaries, alternately in each way, and print the pauses."""
    configure_logging("console", "error")
    report = Report("failover", asked)
    pauses: dict[str, list[float]] = {how: [] for how in WAYS}
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        config = configured(
            path, processes=True, node={"primary_lost_s": asked.lost_s, "hang_s": 600.0}
        )
        async with engine_of(config) as (cluster, logs):
            for _ in range(asked.rounds):
                for how, found in pauses.items():
                    log, engine = logs.log("bench"), logs.engine
                    found.append(await one_round(cluster, engine, log, how, asked.appenders))
    title = f"appends pause, primary_lost_s = {asked.lost_s:g}, {asked.appenders} callers"
    table = table_of(title, "the primary is", "median", "largest")
    for how, found in pauses.items():
        table.add_row(how, latency(statistics.median(found)), latency(max(found)))
        report.keep(how, found)
    report.show(table)
    report.write()


def _raise(error: BaseException) -> None:
    raise error


if __name__ == "__main__":
    command(
        main,
        __doc__,
        lost_s={"type": float, "default": 0.5, "help": "primary_lost_s"},
        appenders={"type": int, "default": 4, "help": "callers that append"},
    )
