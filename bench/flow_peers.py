"""Compares durable functions and workflows with Restate and DBOS in one run (WORKLOADS 8).

Closed-loop callers in this process call every side over kept-alive HTTP connections. They call a
durable function that does nothing, a counter object for each caller, one counter for all, and a
workflow of five empty steps. Or they send a message through a queue and wait for its result. The
durability of answers is printed beside the figures. Missing peers are installed (`--peers-dir`);
the table names the sides that cannot be installed.

    python -m bench.flow_peers [--seconds 2] [--rounds 3] [--callers 1 64]
                               [--sides "IndiLog" ...] [--operations "counter" ...]
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, TypeAlias

from bench.sides.flow_install import MissingError, default_directory
from bench.sides.flows import OPERATIONS, SIDES, Ask, FlowSide, Served
from bench.support import servers
from bench.support.harness import (
    Report,
    Round,
    Rounds,
    arguments,
    closed_loop,
    latency,
    median_of,
    ratio_of,
    run,
    table_of,
)
from bench.support.http_caller import connect

BASE: Final = "Restate, as shipped"
CALLERS: Final = (1, 64)
_WARM_UP_S: Final = 1.0
_PATIENCE_S: Final = 20.0
"""Answers that come more than this many seconds after the end of a round do not count."""
_SAID_CHARS: Final = 160
Cell: TypeAlias = tuple[str, int]
"""An operation, and the number of callers."""
Found: TypeAlias = dict[Cell, Rounds]


async def measure(served: Served, ask: Ask, callers: int, seconds: float) -> Round:
    """Measure one operation, over connections of its own, after a warm-up that does not count."""
    connections = await connect(servers.HOST, served.port, callers)

    async def one(caller: int) -> object:
        return await ask(connections[caller], caller)

    async def loop(length: float) -> Round:
        gc.collect()
        return await closed_loop(one, callers=callers, seconds=length, patience_s=_PATIENCE_S)

    try:
        await loop(min(_WARM_UP_S, seconds))
        return await loop(seconds)
    finally:
        for connection in connections:
            connection.close()


async def one_round(side: FlowSide, asked: argparse.Namespace) -> tuple[dict[Cell, Round], str]:
    """Start a side, run the requested measurements, stop it; return its description, too."""
    cells = [(operation, callers) for operation in asked.operations for callers in asked.callers]
    groups = [[cell] for cell in cells] if side.starts_anew else [cells]
    found: dict[Cell, Round] = {}
    version = ""
    for group in groups:
        async with AsyncExitStack() as stack:
            served = await stack.enter_async_context(side.serving(asked.peers_dir))
            version = served.version
            for operation, callers in group:
                if (ask := served.operations.get(operation)) is not None:
                    one = await measure(served, ask, callers, asked.seconds)
                    found[operation, callers] = one
    return found, version


async def compare(asked: argparse.Namespace) -> tuple[Found, dict[str, str]]:
    """Measure all sides interleaved, round after round; return the description of each, or why it
    is missing.
    """
    found: Found = {}
    versions: dict[str, str] = {}
    order = list(asked.sides)
    for _ in range(asked.rounds):
        for name in order:
            try:
                rounds, versions[name] = await one_round(SIDES[name], asked)
            except (MissingError, SystemExit) as error:  # SystemExit: a server cannot run
                versions[name] = f"not measured: {error}"[:_SAID_CHARS]
                continue
            for cell, one in rounds.items():
                found.setdefault(cell, {}).setdefault(name, []).append(one)
        order.reverse()
    return found, versions


def row_of(
    side: str, operation: str, found: Mapping[Cell, Rounds], callers: Sequence[int]
) -> list[str]:
    """Return a side's medians for an operation, and their ratios to the base in the same rounds.
    For one caller, the figure is the latency; for several, it is the throughput.
    """
    row = []
    for count in callers:
        rounds = found.get((operation, count), {})
        mine, base = rounds.get(side), rounds.get(BASE)
        if mine is None:
            row += ["", ""]
            continue
        figure = _waits if count == 1 else _gets_done
        value = median_of(mine, figure)
        row += [
            _latency(value) if count == 1 else f"{value:,.0f}" if value >= 1 else "< 1",
            "" if base is None else f"{ratio_of(mine, base, figure):.2f}x",
        ]
    return row


def _waits(one: Round) -> float:
    return one.quantile(0.5)


def _gets_done(one: Round) -> float:
    return one.per_second


def _latency(value_s: float) -> str:
    return "no answer" if math.isinf(value_s) else latency(value_s)


async def main(asked: argparse.Namespace) -> None:
    """Measure, and print one table."""
    report = Report("durable functions beside others", asked)
    found, versions = await compare(asked)
    columns = [
        column
        for count in asked.callers
        for column in ("p50 at 1" if count == 1 else f"calls/s at {count}", "ratio")
    ]
    table = table_of(
        f"medians of {asked.rounds} interleaved rounds; ratios to {BASE}",
        "side", *columns, "answered when",
    )  # fmt: skip
    for operation in asked.operations:
        table.add_row(f"[bold]{operation}[/bold]")
        for side in asked.sides:
            said = versions[side] if versions[side].startswith("not ") else SIDES[side].promise
            table.add_row(side, *row_of(side, operation, found, asked.callers), said)
        table.add_section()
    for (operation, callers), rounds in found.items():
        report.add(f"{operation} {callers}", rounds)
    report.keep("versions", versions)
    report.show(table)
    report.say(", ".join(f"{side} {what}" for side, what in versions.items()))
    report.write()


if __name__ == "__main__":
    given = arguments(
        __doc__,
        operations={"nargs": "+", "choices": OPERATIONS, "default": list(OPERATIONS)},
        sides={"nargs": "+", "choices": tuple(SIDES), "default": list(SIDES)},
        callers={"type": int, "nargs": "+", "default": list(CALLERS)},
        peers_dir={"type": Path, "default": default_directory(), "help": "peers are kept there"},
    )
    run(main, given)
