"""Draws appends over time while a cluster changes and loses nodes (Scalog 6.1 and 6.2, Figures 3
and 4; thesis 7.1).

A cluster of processes: three sequencers, three storage nodes with two replicas of each shard, and
two aggregators. Its compute node is in this process, whose callers append at a fixed rate. One
event after the other happens: three compute nodes join and leave; the shard is finalized; the
primary, a backup, an aggregator and a storage node are killed. A storage node counts as lost after
one second, as in the paper. For each event, the table has the longest time without an acknowledged
append, the fewest appends within 100 ms relative to the rate, and the 99th percentile of latency.

    python -m bench.cluster.timeline [--rate 1000] [--seconds 6] [--picture FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from bench.cluster.failover import engine_of, longest_pause_s
from bench.support.harness import Report, command, latency, table_of
from bench.support.platforms import configured
from indilog.base.ids import NodeId
from indilog.base.log import Log
from indilog.base.telemetry import configure_logging
from indilog.runtime.cluster.cluster_members import ClusterMembers
from indilog.runtime.cluster.metadata_address import metadata_at
from indilog.runtime.cluster.supervisor import Supervisor
from indilog_compute.engine import Engine

_WINDOW_S: Final = 0.1
_CALLERS: Final = 64
_CUTS: Final = 10
"""Cuts until a finalized shard gets no further records, as in the paper."""


class AcknowledgedAppend(NamedTuple):
    """When an append was acknowledged, and how long it took, in seconds."""

    at: float
    took_s: float


class EventSpan(NamedTuple):
    """An event, and the seconds in which its effects are counted."""

    name: str
    began: float
    ended: float


class RatedAppenders:
    """Callers that together begin `rate` appends a second, as long as no caller waits too long."""

    def __init__(self, log: Log, rate: float) -> None:
        self.appends: list[AcknowledgedAppend] = []
        self._tasks = [
            asyncio.create_task(self._append(log, _CALLERS / rate, number / rate))
            for number in range(_CALLERS)
        ]

    async def _append(self, log: Log, every_s: float, first_s: float) -> None:
        due = time.perf_counter() + first_s
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            await log.append(bytes(1024), tags=["timeline"])
            now = time.perf_counter()
            self.appends.append(AcknowledgedAppend(now, now - began))
            due += every_s * max(1, math.ceil((now - due) / every_s))  # callers stay apart

    async def stop(self) -> None:
        """Stop the callers; raise the error of an append that failed."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, asyncio.CancelledError):
                raise error


def events_of(
    cluster: Supervisor, members: ClusterMembers, engine: Engine
) -> Mapping[str, Callable[[], Awaitable[object]]]:
    """Return the events in order: for each name, the function that causes the event."""

    def killed(node: Callable[[], NodeId]) -> Callable[[], Awaitable[object]]:
        async def kill() -> None:
            pid = cluster.processes[node()].pid
            assert pid is not None, "it runs"
            os.kill(pid, signal.SIGKILL)

        return kill

    def backup() -> NodeId:
        return next(n for n in engine.placement.view.sequencers if n != engine.primary)

    def storage_node() -> NodeId:
        assert engine.shard is not None, "it writes one"
        return engine.placement.replicas(engine.shard)[0]

    def finalize() -> Awaitable[object]:
        assert engine.shard is not None, "it writes one"
        return members.finalize(engine.shard, _CUTS)

    return {
        "nothing": lambda: asyncio.sleep(0),
        "three compute nodes join": lambda: members.scale({"compute_nodes": 4}),
        "three compute nodes leave": lambda: members.scale({"compute_nodes": 1}),
        "the shard is finalized": finalize,
        "the primary is killed": killed(lambda: engine.primary),
        "a backup is killed": killed(backup),
        "an aggregator is killed": killed(lambda: engine.placement.view.aggregators[0]),
        "a storage node is killed": killed(storage_node),
    }


def row_of(
    span: EventSpan, appends: list[AcknowledgedAppend], rate: float
) -> tuple[float, float, float]:
    """Return the longest pause in seconds, the share of the rate in the worst window, and the 99th
    percentile of latency in seconds.
    """
    during = [append for append in appends if span.began <= append.at < span.ended]
    pause_s = longest_pause_s((append.at for append in during), span.began, span.ended)
    edges = np.arange(span.began, span.ended, _WINDOW_S)
    windows, _ = np.histogram([append.at for append in during], edges)
    p99 = float(np.quantile([append.took_s for append in during], 0.99))
    return pause_s, float(windows.min()) / _WINDOW_S / rate, p99


def picture(spans: list[EventSpan], appends: list[AcknowledgedAppend], path: Path) -> None:
    """Draw acknowledged appends a second, and the events."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    began = spans[0].began
    edges = np.arange(0.0, spans[-1].ended - began, _WINDOW_S)
    counts, _ = np.histogram([append.at - began for append in appends], edges)
    figure, axes = pyplot.subplots(figsize=(11, 4))
    axes.plot(edges[:-1], counts / _WINDOW_S, linewidth=0.9)
    axes.set_ylim(bottom=0)
    for span in spans[1:]:
        axes.axvline(span.began - began, color="black", linestyle="--", linewidth=0.7)
        axes.text(
            span.began - began,
            axes.get_ylim()[1],
            f" {span.name}",
            rotation=90,
            va="top",
            fontsize=8,
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("acknowledged appends a second, each 100 ms")
    axes.set_title("Appends while the cluster changes and loses nodes")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


async def main(asked: argparse.Namespace) -> None:
    """Let the events happen, one after the other."""
    configure_logging("console", "error")
    report = Report("timeline", asked)
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        config = configured(
            path,
            processes=True,
            cluster={"storage_nodes": 3, "replicas": 2, "aggregators": 2},
            node={"storage_lost_s": 1.0},
        )
        spans = []
        async with (
            engine_of(config) as (cluster, logs),
            metadata_at(cluster.metadata_address) as store,
        ):
            members = ClusterMembers(store, config, logs.node)
            appenders = RatedAppenders(logs.log("bench"), asked.rate)
            await asyncio.sleep(1.0)
            for name, happen in events_of(cluster, members, logs.engine).items():
                began = time.perf_counter()
                await happen()
                await asyncio.sleep(max(0.0, began + asked.seconds - time.perf_counter()))
                spans.append(EventSpan(name, began, time.perf_counter()))
            await appenders.stop()
    table = table_of(
        f"{asked.rate:g} appends/s", "event", "longest pause", "worst 100 ms", "p99 latency"
    )
    for span in spans:
        pause_s, worst, p99 = row_of(span, appenders.appends, asked.rate)
        table.add_row(span.name, latency(pause_s), f"{worst:.2f}", latency(p99))
        report.keep(span.name, [pause_s, worst, p99])
    report.show(table)
    report.write()
    if asked.picture is not None:
        picture(spans, appenders.appends, asked.picture)


if __name__ == "__main__":
    command(
        main,
        __doc__,
        seconds={"type": float, "default": 6.0, "help": "seconds for each event"},
        rate={"type": float, "default": 1000.0, "help": "appends a second"},
        picture={"type": Path, "default": None, "help": "draw it into this file (PNG)"},
    )
