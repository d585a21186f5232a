"""Measures appends of a stream's writer beside plain appends to the log, with as many callers.

Sides: `Log.append` with a tag, `Writer.append` of one writer, and `Streams.append` under the token
of the writer. All sides append to the same platform: embedded in this process, or with
`--processes` to processes of their own. Then one reader reads the stream, beside `Log.subscribe`.
After each round the stream must have exactly the acknowledged records, in order.

    python -m bench.streams.appends [--seconds 2] [--rounds 5] [--callers 1 64] [--processes]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import count

from bench.support import platforms
from bench.support.harness import (
    Report,
    command,
    figures_of,
    interleave,
    ratio_of,
    table_of,
)
from bokistream import Streams, Writer
from indilog import Log

RECORD_BYTES = 1024
PLAIN = "plain append"


async def read_rates(streams: Streams, log: Log, seqnums: list[int]) -> tuple[float, float]:
    """Return records/s of `Log.subscribe` and of `Streams.read`, and check the stream."""
    last = await log.read_prev("plain")
    if last is None:
        raise SystemExit("No record was appended.")
    started, plain = time.perf_counter(), 0
    async for record in log.subscribe("plain"):
        plain += 1
        if record.seqnum >= last.seqnum:
            break
    plain_s = time.perf_counter() - started
    started = time.perf_counter()
    read = [record.seqnum async for record in streams.read("bench")]
    if read != sorted(seqnums):
        raise SystemExit("The stream does not have exactly the acknowledged records.")
    return plain / plain_s, len(read) / (time.perf_counter() - started)


async def measure(
    log: Log, callers: int, asked: argparse.Namespace, report: Report
) -> list[tuple[str, ...]]:
    """Measure all sides with `callers` callers, and return rows of the table."""
    streams = Streams(log)
    await streams.create("bench")
    acknowledged: list[int] = []
    data, numbers = bytes(RECORD_BYTES), count()
    async with streams.writer("bench") as writer:
        owner: Writer = writer

        async def plain(_caller: int) -> object:
            return await log.append(data, tags=("plain",))

        async def through_writer(_caller: int) -> object:
            acknowledged.append(await owner.append(data, txid=next(numbers)))
            return None

        async def from_anywhere(_caller: int) -> object:
            acknowledged.append(await streams.append("bench", data, fencing_token=owner.token))
            return None

        found = await interleave(
            {PLAIN: plain, "writer": through_writer, "append with token": from_anywhere},
            callers=callers, seconds=asked.seconds, rounds=asked.rounds,
        )  # fmt: skip
    report.add(f"stream {callers}", found)
    rows: list[tuple[str, ...]] = []
    for name, rounds in found.items():
        ratio = ratio_of(rounds, found[PLAIN], lambda one: one.per_second)
        rows.append((f"{name} {callers}", *figures_of(rounds), f"{ratio:.2f}x"))
    plain_rate, stream_rate = await read_rates(streams, log, acknowledged)
    rows.append((f"subscribe {callers}", f"{plain_rate:,.0f}", "", "", "", "1.00x"))
    rows.append(
        (f"read {callers}", f"{stream_rate:,.0f}", "", "", "", f"{stream_rate / plain_rate:.2f}x")
    )
    return rows


async def main(asked: argparse.Namespace) -> None:
    """Measure every side at every number of callers."""
    report = Report("stream_appends", asked, record_bytes=RECORD_BYTES)
    table = table_of(
        f"streams, {RECORD_BYTES} bytes",
        "side and callers", "records/s", "p50", "p99", "CPU/call", "ratio",
    )  # fmt: skip
    for callers in asked.callers:
        with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
            config = platforms.configured(path, processes=asked.processes)
            async with platforms.running(config, processes=asked.processes) as bench:
                for row in await measure(bench.log, callers, asked, report):
                    table.add_row(*row)
        table.add_section()
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(main, __doc__, processes={"action": "store_true", "help": "tiers as processes"})
