"""Counts the requests of a log of kind object-store, beside its throughput and latency.

Callers append one record after the other, for some seconds. The store is a directory whose puts and
gets take `--put-ms` and `--get-ms` longer, as those of S3 do. The number of requests follows the
time: all appends that arrive during a put share the next one.

    python -m bench.kinds.requests [--put-ms 20] [--get-ms 15] [--record-bytes 256] [--writers 1]
                                   [--callers 1 64 1024] [--seconds 3]

With `--writers 2`, half of the callers append through another driver, as on another compute node:
the two compete for each object.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from bench.support.harness import Report, Round, closed_loop, command, latency, table_of
from indilog_cells.driver import driver_running
from indilog_cells.log import CellLogs
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import DirectoryStore


class SlowStore(DirectoryStore):
    """A directory whose requests take longer.

    Args:
        directory: the directory.
        put_s, get_s: seconds added to each put and get.
    """

    def __init__(self, directory: Path, put_s: float, get_s: float) -> None:
        super().__init__(directory)
        self._put_s, self._get_s = put_s, get_s

    async def create(self, name: str, content: bytes) -> bool:
        """See `DirectoryStore`."""
        await asyncio.sleep(self._put_s)
        return await super().create(name, content)

    async def get(self, name: str) -> bytes | None:
        """See `DirectoryStore`."""
        await asyncio.sleep(self._get_s)
        return await super().get(name)


class MeasuredRequests(NamedTuple):
    """A round, and the requests in it."""

    round: Round
    requests: Counter[str]

    def per_million(self, kind: str) -> float:
        """Requests of a kind for a million records."""
        return 1e6 * self.requests[kind] / max(self.round.operations, 1)


async def measure(asked: argparse.Namespace, callers: int) -> MeasuredRequests:
    """Append through `asked.writers` drivers of a new log."""
    data = bytes(asked.record_bytes)
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as temporary:
        store = SlowStore(Path(temporary), asked.put_ms / 1e3, asked.get_ms / 1e3)
        async with AsyncExitStack() as stack:
            cells = [await ObjectCells.created(store, "log") for _ in range(asked.writers)]
            logs = [
                CellLogs(
                    await stack.enter_async_context(
                        driver_running(each, is_shared=asked.writers > 1)
                    )
                ).log("events")
                for each in cells
            ]
            for log in logs:
                await log.append(data)

            async def append(caller: int) -> None:
                await logs[caller % len(logs)].append(data, tags=["t"])

            before = sum((each.requests for each in cells), Counter())
            measured = await closed_loop(append, callers=callers, seconds=asked.seconds)
            after = sum((each.requests for each in cells), Counter())
    return MeasuredRequests(measured, after - before)


async def main(asked: argparse.Namespace) -> None:
    """Measure each number of callers; print a table."""
    report = Report("requests of an object-store log", asked)
    table = table_of(
        f"{asked.writers} writer(s), a put takes {asked.put_ms:g} ms longer",
        "callers", "appends/s", "p50", "p99", "puts/s", "puts per million", "gets per million",
    )  # fmt: skip
    for callers in asked.callers:
        found = await measure(asked, callers)
        puts, gets = found.per_million("create"), found.per_million("get")
        table.add_row(
            f"{callers:,}",
            f"{found.round.per_second:,.0f}",
            latency(found.round.quantile(0.5)),
            latency(found.round.quantile(0.99)),
            f"{found.requests['create'] / found.round.seconds:,.0f}",
            f"{puts:,.0f}",
            f"{gets:,.0f}",
        )
        report.keep(f"{callers} callers", {"puts_per_million": puts, "gets_per_million": gets})
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        put_ms={"type": float, "default": 20.0, "help": "milliseconds added to each put"},
        get_ms={"type": float, "default": 15.0, "help": "milliseconds added to each get"},
        record_bytes={"type": int, "default": 256, "help": "bytes of a record"},
        writers={"type": int, "default": 1, "help": "drivers that append at once"},
        callers={"type": int, "nargs": "+", "default": [1, 64, 1024], "help": "callers"},
        seconds={"type": float, "default": 3.0, "help": "length of a round"},
    )
