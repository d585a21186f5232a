"""Measures functions over HTTP: a no-op, one append and one durable increment, with keep-alive
connections.

The platform runs as a process of its own (`bench.support.deployment`); this process holds the
closed-loop callers, one connection each.

    python -m bench.invoke [--seconds 2] [--rounds 5] [--callers 1 64]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import uvloop

from bench.profile import profiled
from bench.support.deployment import deployed
from bench.support.harness import (
    Operation,
    Report,
    arguments,
    ended_in_order,
    figures_of,
    interleave,
    table_of,
)
from bench.support.http_caller import HttpCaller, connect
from bench.support.servers import HOST

APP = Path(__file__).with_name("invoke_app.py")


def sides_of(callers: list[HttpCaller]) -> dict[str, Operation]:
    """Return one operation for each function."""
    named = [json.dumps({"name": f"caller-{number}"}).encode() for number in range(len(callers))]

    async def noop(caller: int) -> object:
        return await callers[caller].post("/functions/bench/noop", b"{}")

    async def append(caller: int) -> object:
        return await callers[caller].post("/functions/bench/append", named[caller])

    async def counter(caller: int) -> object:
        return await callers[caller].post("/functions/bench/counter", named[caller])

    return {"no-op": noop, "append": append, "counter": counter}


async def measure(asked: argparse.Namespace, port: int) -> None:
    """Measure every function at every number of callers."""
    report = Report("invoke", asked, platform="embedded, R = 1, fsync")
    table = table_of(
        "functions over HTTP, kept-alive connections",
        "function and callers", "calls/s", "p50", "p99", "CPU/call (client)",
    )  # fmt: skip
    for count in asked.callers:
        callers = await connect(HOST, port, count)
        found = await interleave(
            sides_of(callers), callers=count, seconds=asked.seconds, rounds=asked.rounds
        )
        for caller in callers:
            caller.close()
        report.add(f"invoke {count}", found)
        for name, rounds in found.items():
            table.add_row(f"{name} {count}", *figures_of(rounds))
        table.add_section()
    report.show(table)
    report.write()


def main(asked: argparse.Namespace) -> None:
    """Start a platform in a temporary directory, deploy, measure."""
    with (
        ended_in_order(),
        deployed(APP, "bench") as there,
        profiled(wanted=asked.profile, pid=there.pid),
    ):
        uvloop.run(measure(asked, there.port))


if __name__ == "__main__":
    main(arguments(__doc__))
