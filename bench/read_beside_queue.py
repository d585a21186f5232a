"""Reads beside a queue (WORKLOADS 1): trims of a queue's sub-streams must not slow the reads of
other records.

A queue writes a checkpoint every thousand commands, then trims its sub-streams up to that
checkpoint. Two platforms hold the same log; on one of them, a queue has written checkpoints after
the records that are read. Both have these records in their record cache, so both should answer
without a message.

    python -m bench.read_beside_queue [--seconds 1] [--rounds 3] [--callers 1 64] [--messages 2000]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from contextlib import AsyncExitStack
from itertools import cycle

from bench.log_read import RECORD_BYTES, SEED, TAGS, fill
from bench.support import platforms
from bench.support.harness import (
    Operation,
    Report,
    command,
    figures_of,
    interleave,
    ratio_of,
    table_of,
)
from bokiqueue import Queue
from indilog.base.log import Log

ALONE, BESIDE = "alone", "beside a queue"


async def work(queue: Queue, messages: int) -> None:
    """Push and acknowledge `messages` messages, one after the other."""
    for _ in range(messages):
        await queue.push(b"x")
        delivery = await queue.take()
        assert delivery is not None, "it was pushed"
        await delivery.acknowledge()


def reads_of(log: Log, places: list[tuple[str, int]]) -> dict[str, Operation]:
    """Return reads at random places."""
    at = cycle(random.Random(SEED).sample(places, len(places)))

    async def seqnum(_caller: int) -> object:
        return await log.read(next(at)[1])

    async def whole(_caller: int) -> object:
        return await log.read_next(None, next(at)[1])

    async def tagged(_caller: int) -> object:
        tag, place = next(at)
        return await log.read_next(tag, place)

    return {"by seqnum": seqnum, "whole log": whole, "by tag": tagged}


async def main(asked: argparse.Namespace) -> None:
    """Measure every read on both platforms, interleaved."""
    report = Report("read_beside_queue", asked, record_bytes=RECORD_BYTES, tags=TAGS)
    async with AsyncExitStack() as stack:
        reads: dict[str, dict[str, Operation]] = {}
        for side in (ALONE, BESIDE):
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="indilog-bench-"))
            bench = await stack.enter_async_context(platforms.running(platforms.configured(path)))
            places = await fill(bench.log, asked.records)
            if side == BESIDE:
                await work(Queue(bench.log, "jobs", shards=1), asked.messages)
            reads[side] = reads_of(bench.log, places)
        for callers in asked.callers:
            table = table_of(
                f"read, {callers} callers", "read and side", "ops/s", "p50", "p99", "CPU/op"
            )
            for read in reads[ALONE]:
                sides = {side: kinds[read] for side, kinds in reads.items()}
                found = await interleave(
                    sides, callers=callers, seconds=asked.seconds, rounds=asked.rounds
                )
                report.add(f"{read} {callers}", found)
                for side, rounds in found.items():
                    table.add_row(f"{read}, {side}", *figures_of(rounds))
                ratio = ratio_of(found[BESIDE], found[ALONE], lambda one: one.per_second)
                table.add_row(f"{read}, ratio", f"{ratio:.2f}")
                table.add_section()
            report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        records={"type": int, "default": 20_000, "help": "records in the log"},
        messages={"type": int, "default": 2000, "help": "messages that the queue has had"},
    )
