"""Measures BokiStore: a transaction over two objects, and reads of an object with a long history.

It uses the embedded platform, over HTTP (a deployed function) and in this process. Transfers read
and write two of `--accounts` accounts, chosen at random. Committed transfers are counted, and the
number of attempts is printed. Reads are compared for an object with 10 past operations and one with
10,000. Hot: the process has read the object before. Cold: the first read after a restart, without
cached state in the process and without aux data.

    python -m bench.store [--seconds 2] [--rounds 5] [--callers 1 64] [--accounts 1000]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import uvloop
from rich.table import Table

from bench.profile import profiled
from bench.store_app import aged, transferred
from bench.support.deployment import deployed
from bench.support.harness import (
    Operation,
    Report,
    Round,
    arguments,
    ended_in_order,
    figures_of,
    interleave,
    ratio_of,
    table_of,
)
from bench.support.http_caller import HttpCaller, connect
from bench.support.platforms import configured, running
from bench.support.servers import HOST, temporary
from bokistore import Store, ViewCache, replay
from indilog.base.log import Log

APP = Path(__file__).with_name("store_app.py")
PAST = {"10": 10, "10,000": 10_000}
"""Numbers of past operations of the objects that are read."""
NEVER = 1 << 60


class Transfers:
    """Pairs of accounts, and how many attempts the transfers took."""

    def __init__(self, accounts: int) -> None:
        self._random = random.Random(1)
        self._accounts = range(accounts)
        self.attempts = self.done = 0

    def pair(self) -> tuple[str, str]:
        """Return two accounts."""
        one, other = self._random.sample(self._accounts, 2)
        return f"account:{one}", f"account:{other}"

    def note(self, attempts: int) -> None:
        """Record a committed transfer."""
        self.attempts += attempts
        self.done += 1

    @property
    def per_commit(self) -> float:
        """Attempts for each transfer that committed."""
        return self.attempts / max(self.done, 1)


def sides_in_process(log: Log, transfers: Transfers) -> dict[str, Operation]:
    """Return the operations without HTTP: hot reads by one store, as in a function."""
    store = Store(log)

    async def transfer(_: int) -> None:
        transfers.note(await transferred(store, *transfers.pair()))

    def reading(past: str) -> Operation:
        return lambda _: store.get(f"aged:{past}")

    return {"transfer": transfer} | {f"get hot, {past} past": reading(past) for past in PAST}


def sides_cold(log: Log) -> dict[str, Operation]:
    """Return reads by a process with empty caches."""

    def reading(past: str) -> Operation:
        return lambda _: Store(log, cache=ViewCache()).get(f"aged:{past}")

    return {f"get cold, {past} past": reading(past) for past in PAST}


def sides_over_http(callers: list[HttpCaller], transfers: Transfers) -> dict[str, Operation]:
    """Return the operations through the gateway."""

    async def transfer(caller: int) -> None:
        one, other = transfers.pair()
        body = json.dumps({"one": one, "other": other}).encode()
        transfers.note(int(await callers[caller].post("/functions/bench/transfer", body)))

    def reading(past: str) -> Operation:
        body = json.dumps({"name": f"aged:{past}"}).encode()
        return lambda caller: callers[caller].post("/functions/bench/read", body)

    return {"transfer": transfer} | {f"get hot, {past} past": reading(past) for past in PAST}


class Measuring:
    """One run of the benchmark: its arguments and its table."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.report = Report("store", asked, platform="embedded, R = 1, fsync")
        self.table: Table = table_of(
            "BokiStore on the embedded platform",
            "side, operation and callers", "ops/s", "p50", "p99", "CPU/op (client)", "ratio of p50",
        )  # fmt: skip

    async def measure(self, side: str, sides: Mapping[str, Operation], callers: int) -> None:
        """Measure some operations, interleaved."""
        found = await interleave(
            sides, callers=callers, seconds=self.asked.seconds, rounds=self.asked.rounds
        )
        self.report.add(f"{side} {callers}", found)
        for name, rounds in found.items():
            young = found.get(name.replace("10,000", "10"))
            is_old = young is not None and young is not rounds
            ratio = f"{ratio_of(rounds, young, _p50):.2f}" if is_old and young else ""
            self.table.add_row(f"{side}: {name} {callers}", *figures_of(rounds), ratio)
        self.table.add_section()

    def conflicts(self, side: str, callers: int, transfers: Transfers) -> None:
        """Print how many attempts the transfers took."""
        self.report.keep(f"attempts {side} {callers}", transfers.per_commit)
        self.report.say(
            f"{side}, {callers} callers: {transfers.per_commit:.3f} attempts a transfer, "
            f"{self.asked.accounts} accounts"
        )


def _p50(one: Round) -> float:
    return one.quantile(0.5)


async def in_process(run: Measuring, path: Path) -> None:
    """Measure without HTTP, then restart the platform and measure reads that are not cached."""
    config = configured(path)
    async with running(config) as bench:
        for past, operations in PAST.items():
            await aged(Store(bench.log), f"aged:{past}", operations)
        for callers in run.asked.callers:
            transfers = Transfers(run.asked.accounts)
            sides = sides_in_process(bench.log, transfers)
            await run.measure("in process", sides, callers)
            run.conflicts("in process", callers, transfers)
    async with running(config) as bench:
        with mock.patch.object(replay, "AUX_EVERY", NEVER):
            await run.measure("restarted", sides_cold(bench.log), callers=1)


async def over_http(run: Measuring, port: int) -> None:
    """Measure deployed functions."""
    (first,) = await connect(HOST, port, 1)
    for past, operations in PAST.items():
        body = json.dumps({"name": f"aged:{past}", "operations": operations}).encode()
        await first.post("/functions/bench/age", body)
    first.close()
    for count in run.asked.callers:
        callers = await connect(HOST, port, count)
        transfers = Transfers(run.asked.accounts)
        await run.measure("over HTTP", sides_over_http(callers, transfers), count)
        run.conflicts("over HTTP", count, transfers)
        for caller in callers:
            caller.close()


def main(asked: argparse.Namespace) -> None:
    """Start platforms in temporary directories, measure, print one table."""
    run = Measuring(asked)
    with ended_in_order():
        with temporary("in-process") as directory, profiled(wanted=asked.profile):
            uvloop.run(in_process(run, directory / "data"))
        with deployed(APP, "bench") as there:
            uvloop.run(over_http(run, there.port))
    run.report.show(run.table)
    run.report.write()


if __name__ == "__main__":
    main(
        arguments(
            __doc__,
            callers={"type": int, "nargs": "+", "default": [1, 64]},
            accounts={"type": int, "default": 1000, "help": "objects that transfers choose from"},
        )
    )
