"""Compares queues on logs of each kind, in one run: push, take and acknowledge by one caller after
the other.

The platform runs in this process, with three sequencers, `--replicas` storage nodes and two compute
nodes. A message is taken on the compute node that pushed it, or on the other one; there the
consumer waits for the message.

    python -m bench.kinds.queues [--replicas 3] [--kinds shared owned ...] [--callers 1 64]
                                 [--rounds 3] [--seconds 2]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Final, cast

from bench.support import platforms
from bench.support.harness import Report, command, figures_of, interleave, ratio_of, table_of
from bokiqueue import Queue
from indilog.base.log import Session
from indilog.base.log_kinds import LOG_KINDS, SHARED
from indilog_compute.local_log import LocalLogs

_MESSAGE: Final = bytes(1024)
_WAIT_S_MAX: Final = 30.0
_TAKEN: Final = {"same node": 0, "other node": 1}
"""The compute node that takes what the first one pushes."""


def moving(pushing: Queue, taking: Queue) -> Callable[[int], Awaitable[object]]:
    """Return an operation that moves one message through a queue."""

    async def one(_caller: int) -> None:
        await pushing.push(_MESSAGE)
        async with taking.pop(wait=_WAIT_S_MAX) as message:
            if message is None:
                raise SystemExit("A message that was pushed was not delivered.")

    return one


async def operations(
    nodes: list[LocalLogs], kinds: list[str]
) -> dict[str, Callable[[int], Awaitable[object]]]:
    """Create a log of each kind; return the operations, by kind and place."""
    found = {}
    for kind in kinds:
        assert nodes[0].kinds is not None, "compute nodes know the kinds of logs"
        await nodes[0].kinds.create(kind, kind)
        for place, taking in _TAKEN.items():
            name = place.replace(" ", "-")
            queues = [Queue(node.log(kind, Session()), name, shards=2) for node in nodes]
            found[f"{kind}, {place}"] = moving(queues[0], queues[taking])
    return found


async def main(asked: argparse.Namespace) -> None:
    """Measure each number of callers; print a table."""
    report = Report("queues on logs of each kind", asked, message_bytes=len(_MESSAGE))
    table = table_of("round trips", "callers", "log", "per second", "p50", "p99", "CPU", "÷ shared")
    cluster = {
        "sequencers": 3, "storage_nodes": asked.replicas, "replicas": asked.replicas, "engines": 2,
    }  # fmt: skip
    for callers in asked.callers:
        with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
            config = platforms.configured(path, cluster=cluster)
            async with platforms.running(config) as bench:
                nodes = [cast("LocalLogs", log.scope) for log in bench.logs]
                sides = await operations(nodes, asked.kinds)
                found = await interleave(
                    sides, callers=callers, seconds=asked.seconds, rounds=asked.rounds
                )
        report.add(f"{callers} callers", found)
        for name, rounds in found.items():
            base = found.get(f"{SHARED}, {name.partition(', ')[2]}")
            ratio = ""
            if base is not None:
                ratio = f"{ratio_of(rounds, base, lambda one: median(one.latencies_s)):.2f}"
            table.add_row(f"{callers:,}", name, *figures_of(rounds), ratio)
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        replicas={"type": int, "default": 3, "help": "storage nodes, all with a copy"},
        kinds={"nargs": "+", "choices": LOG_KINDS, "default": LOG_KINDS, "help": "kinds of log"},
        callers={"type": int, "nargs": "+", "default": [1, 64], "help": "callers"},
    )
