"""Measures BokiStore when all of `--callers` callers change one object at once. It compares an
object for each caller, the same one for all, and the same one from `--processes` processes.

Each caller takes one piece of a stock by a transaction that reads and writes it. Sides: a step of a
workflow (`wf.transact`), a transaction (`Store.transact`), and an operation with a condition
(`Store.decrement_if`). A store with caches of its own stands for a process. All stores are in this
process, on the embedded platform. Each round uses new objects; afterwards each stock must have the
right number.

    python -m bench.objects.contended [--rounds 5] [--callers 50 150] [--processes 4]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from itertools import count
from statistics import median
from typing import Final, TypeAlias

import indilog
from bench.support.harness import Report, command, latency, table_of
from bokiflow import Flow, Workflow
from bokistore import Store, Transaction, ViewCache
from indilog import Log

Take: TypeAlias = Callable[[Store, str], Awaitable[object]]
"""Takes one piece of the stock in an object of a store."""
RETRIES: Final = 2000
_rounds = count()


class BodyRuns:
    """Counts how often bodies of transactions ran."""

    def __init__(self) -> None:
        self.count = 0

    async def take(self, txn: Transaction) -> int:
        """Take one piece in a transaction; return how many are left."""
        self.count += 1
        stock = await txn.get(stock_of.get())
        left: int = stock["left"] - 1
        stock.set("left", left)
        return left


stock_of: Final[ContextVar[str]] = ContextVar("stock")
"""The object that the body of the current caller uses."""


def sides(flow: Flow, attempts: BodyRuns) -> dict[str, Take]:
    """Return the ways to take a piece of a stock."""
    stores: dict[str, Store] = {}

    @flow.workflow
    async def order(wf: Workflow, name: str, key: str) -> int:
        stock_of.set(name)
        return await wf.transact(stores[key], attempts.take)

    async def in_workflow(store: Store, name: str) -> None:
        stores[key := str(id(store))] = store
        await (await order.start(name, key)).result()

    async def in_transaction(store: Store, name: str) -> None:
        stock_of.set(name)
        await store.transact(attempts.take, retries=RETRIES)

    async def with_condition(store: Store, name: str) -> None:
        assert await store.decrement_if(name, "left", 1) is not None, "there is enough"

    return {
        "wf.transact": in_workflow,
        "Store.transact": in_transaction,
        "decrement_if": with_condition,
    }


async def run_once(stores: Sequence[Store], take: Take, callers: int, objects: int) -> float:
    """Let all callers take a piece at once; return how many seconds that took."""
    names = [f"stock:{next(_rounds)}" for _ in range(objects)]
    for name in names:
        await stores[0].set(name, "left", 10 * callers)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for caller in range(callers):
            store, name = stores[caller % len(stores)], names[caller % objects]
            group.create_task(_awaited(take(store, name)))
    took_s = time.perf_counter() - began
    left = [(await stores[0].get(name))["left"] for name in names]
    assert sum(left) == 10 * callers * objects - callers, "each caller took one piece"
    return took_s


async def _awaited(taken: Awaitable[object]) -> None:
    await taken


def processes(log: Log, number: int) -> list[Store]:
    """Return stores that share only the log."""
    return [Store(log, cache=ViewCache()) for _ in range(number)]


async def main(asked: argparse.Namespace) -> None:
    """Start a platform in a temporary directory, measure, print one table."""
    report = Report("contended", asked, platform="embedded, R = 1, fsync")
    table = table_of(
        f"{asked.rounds} rounds; time until all callers are done (median)",
        "side and callers", "own objects", "one object", "ratio", "attempts each",
        f"{asked.processes} processes", "ratio", "attempts each",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="indilog-contended-") as directory:
        async with indilog.open(directory) as client:
            flow, attempts = Flow("contended"), BodyRuns()
            ways = sides(flow, attempts)
            flow.attach(client)
            log = client.log("objects")
            alone, several = processes(log, 1), processes(log, asked.processes)
            for callers in asked.callers:
                for side, take in ways.items():
                    found: dict[str, list[float]] = {"own": [], "one": [], "several": []}
                    bodies = {"own": 0, "one": 0, "several": 0}
                    await run_once(alone, take, callers, callers)  # warm-up
                    for _ in range(asked.rounds):
                        for shape, stores, objects in (
                            ("own", alone, callers), ("one", alone, 1), ("several", several, 1)
                        ):  # fmt: skip
                            attempts.count = 0
                            took_s = await run_once(stores, take, callers, objects)
                            found[shape].append(took_s)
                            bodies[shape] += attempts.count
                    own_s = median(found["own"])
                    row = [f"{side} {callers}", latency(own_s)]
                    for shape in ("one", "several"):
                        took_s = median(found[shape])
                        each = bodies[shape] / (callers * asked.rounds)
                        row += [latency(took_s), f"{took_s / own_s:.1f}", f"{each:.2f}"]
                    table.add_row(*row)
                    report.keep(f"{side} {callers}", {"seconds": found, "bodies": bodies})
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main, __doc__,
        callers={"type": int, "nargs": "+", "default": [50, 150]},
        rounds={"type": int, "default": 5, "help": "rounds of each side"},
        processes={"type": int, "default": 4, "help": "processes that share one object"},
    )  # fmt: skip
