"""Measures appends while nodes join and leave a running cluster (decision 0049; thesis 7.1, in
which compute nodes join at 30 s).

A cluster of processes; its compute node is in this process, with callers that append all the time.
A step changes the members. For each step, the table has the duration of the change and the longest
time without an acknowledged append. It also has the fewest acknowledged appends within 100 ms, as a
share of the mean before the step.

    python -m bench.cluster.joins
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from typing import Any, Final

from bench.cluster.failover import Appenders, engine_of, longest_pause_s
from bench.support.harness import Report, command, latency, table_of
from bench.support.platforms import configured
from indilog.base.telemetry import configure_logging
from indilog.runtime.cluster.cluster_members import ClusterMembers
from indilog.runtime.cluster.metadata_address import metadata_at

STEPS: Final[tuple[tuple[str, dict[str, int]], ...]] = (
    ("three compute nodes join", {"compute_nodes": 4}),
    ("a storage node joins", {"storage_nodes": 3}),
    ("two index shards join", {"index_shards": 4}),
    ("two index shards retire", {"index_shards": 2}),
    ("a storage node leaves", {"storage_nodes": 2}),
    ("three compute nodes leave", {"compute_nodes": 1}),
)
_BEFORE_S: Final = 2.0
_AFTER_S: Final = 0.5
_CHANGED_S: Final = 60.0
_LOOK_S: Final = 0.01
_WINDOW_S: Final = 0.1


async def one_step(
    members: ClusterMembers, appenders: Appenders, counts: dict[str, int]
) -> tuple[float, float, float]:
    """Change the members; return the seconds that it took, the longest pause of appends in seconds,
    and the share of appends in the worst window.
    """
    await asyncio.sleep(_BEFORE_S)
    began = time.perf_counter()
    state: dict[str, Any] = await members.scale(counts)
    async with asyncio.timeout(_CHANGED_S):
        while not state["reached"]:
            await asyncio.sleep(_LOOK_S)
            state = await members.state()
    took_s = time.perf_counter() - began
    await asyncio.sleep(_AFTER_S)
    ended = time.perf_counter()
    times = [at for at in appenders.acknowledged_at if began - _BEFORE_S <= at <= ended]
    before = sum(at < began for at in times) / _BEFORE_S
    windows = [0] * int((ended - began) / _WINDOW_S)
    for at in (at for at in times if at >= began):
        place = int((at - began) / _WINDOW_S)
        if place < len(windows):
            windows[place] += 1
    pause_s = longest_pause_s(times, began, ended)
    return took_s, pause_s, min(windows) / _WINDOW_S / before


async def main(asked: argparse.Namespace) -> None:
    """Let nodes join and leave, one step after another."""
    configure_logging("console", "error")
    report = Report("joins", asked)
    title = f"nodes join and leave under {asked.appenders} callers"
    table = table_of(title, "step", "took", "longest pause", "worst 100 ms")
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        config = configured(path, processes=True)
        async with (
            engine_of(config) as (cluster, logs),
            metadata_at(cluster.metadata_address) as store,
        ):
            members = ClusterMembers(store, config, logs.node)
            appenders = Appenders(logs.log("bench"), asked.appenders)
            for name, counts in STEPS:
                took_s, pause_s, worst = await one_step(members, appenders, counts)
                table.add_row(name, f"{took_s:.2f} s", latency(pause_s), f"{worst:.2f}")
                report.keep(name, [took_s, pause_s, worst])
            await appenders.stop()
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        appenders={"type": int, "default": 4, "help": "callers that append"},
    )
