"""Queue benchmark (WORKLOADS 6): producers and consumers on one queue, and a check of all
deliveries.

Producers push 1 KiB messages one after the other; consumers pop and acknowledge; there are as many
shards as consumers, or `--shards`. Then the producers stop and the consumers empty the queue. The
check uses the messages that consumers received. Each message must be acknowledged exactly once, and
the first deliveries of each shard must be in the order of its pushes. The records per message
include pushes, claims, acknowledgements and checkpoints. At the beginning, round trips are
measured: 1 and 64 callers push, pop and acknowledge one message after the other.

    python -m bench.queue [--seconds 2] [--rounds 3] [--pairs 64/64] [--shards 4] [--processes]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from bench.support import platforms
from bench.support.harness import Report, command, figures_of, interleave, latency, table_of
from bokiqueue import Queue
from indilog.base.log import Log

MESSAGE_BYTES = 1024
CORRECT = "each once, in order"
PAIRS = ("64/64", "128/128", "64/16", "16/64")
ROUND_TRIP_CALLERS = (1, 64)
_WAIT_S = 0.2
_MESSAGE_S_MAX = 30.0
PAPER = {"128/128": ("  Boki", "20,700", "1.1 ms", "4.3 ms")}
"""The figures of Boki's authors on 8 engines, by column."""


@dataclass
class QueueTally:
    """The messages that producers and consumers of one round pushed and received."""

    pushed: set[int] = field(default_factory=set)
    push_s: list[float] = field(default_factory=list)
    delay_s: list[float] = field(default_factory=list)
    acknowledged: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    firsts: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    took_s: float = 0.0
    records: int = 0
    """Records of the log in this round."""

    def verdict(self) -> str:
        """Return `CORRECT`, or what went wrong."""
        if set(self.acknowledged) != self.pushed:
            return f"{len(self.pushed ^ set(self.acknowledged))} messages lost or invented"
        if twice := sum(count > 1 for count in self.acknowledged.values()):
            return f"{twice} messages acknowledged twice"
        for claims in self.firsts.values():
            messages = [message for _, message in sorted(claims)]
            if messages != sorted(messages):
                return "a shard is not first in, first out"
        return CORRECT


async def one_round(
    log: Log, name: str, producers: int, consumers: int, seconds: float, shards: int | None = None
) -> QueueTally:
    """Run producers for `seconds`, and consumers until the queue is empty. Each producer pushes at
    least one message.
    """
    tally = QueueTally()

    def queue() -> Queue:
        return Queue(log, name, shards=shards or consumers)

    async def produce() -> None:
        mine, filler = queue(), bytes(MESSAGE_BYTES - 8)
        now = time.perf_counter()
        while True:
            begun, stamp = now, time.time_ns().to_bytes(8, "little")
            tally.pushed.add(await mine.push(stamp + filler))
            now = time.perf_counter()
            tally.push_s.append(now - begun)
            if now >= started + seconds:
                return

    async def consume() -> None:
        mine = queue()
        while True:
            all_pushed = producing.done()  # before the take, which may end just before a push
            message = await mine.take(wait=_WAIT_S)
            if message is None:
                if all_pushed:
                    return
                continue
            pushed_ns = int.from_bytes(message.data[:8], "little")
            tally.delay_s.append((time.time_ns() - pushed_ns) / 1e9)
            if message.tries == 1:
                tally.firsts[message.shard].append((message.claim, message.seqnum))
            await message.acknowledge()
            tally.acknowledged[message.seqnum] += 1
            tally.took_s = time.perf_counter() - started

    await queue().stats()
    before = await log.tail()
    started = time.perf_counter()
    producing = asyncio.gather(*(produce() for _ in range(producers)))
    await asyncio.gather(producing, *(consume() for _ in range(consumers)))
    tally.records = await log.tail() - before
    return tally


async def round_trips(asked: argparse.Namespace, report: Report) -> None:
    """Measure round trips of push, pop and acknowledgement, for each number of callers."""
    table = table_of("push, pop, acknowledge", "callers", "round trips/s", "p50", "p99", "CPU")
    for callers in ROUND_TRIP_CALLERS:
        with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
            config = platforms.configured(path, processes=asked.processes)
            async with platforms.running(config, processes=asked.processes) as bench:
                queue = Queue(bench.log, "round-trip")

                async def one(_caller: int, queue: Queue = queue) -> None:
                    await queue.push(bytes(MESSAGE_BYTES))
                    async with queue.pop(wait=_MESSAGE_S_MAX) as message:
                        if message is None:
                            raise SystemExit("A message that was pushed was not delivered.")

                found = await interleave(
                    {"round trip": one}, callers=callers, seconds=asked.seconds,
                    rounds=asked.rounds,
                )  # fmt: skip
        report.add(f"round trip {callers}", found)
        table.add_row(str(callers), *figures_of(found["round trip"]))
    report.show(table)


async def main(asked: argparse.Namespace) -> None:
    """Measure round trips, then every pair of numbers of producers and consumers."""
    report = Report("queue", asked, message_bytes=MESSAGE_BYTES)
    await round_trips(asked, report)
    wrong = []
    table = table_of(
        "queue, 1 KiB messages, synced; the paper's below",
        "producers/consumers", "messages/s", "push p50", "delivery p50", "delivery p99",
        "records/message", "verdict",
    )  # fmt: skip
    for pair in asked.pairs:
        producers, consumers = map(int, pair.split("/"))
        tallies = []
        for turn in range(asked.rounds):
            with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
                config = platforms.configured(path, processes=asked.processes)
                async with platforms.running(config, processes=asked.processes) as bench:
                    tallies.append(
                        await one_round(
                            bench.log, f"q{turn}", producers, consumers, asked.seconds, asked.shards
                        )
                    )
        delays = sorted(delay for tally in tallies for delay in tally.delay_s)
        verdicts = {tally.verdict() for tally in tallies}
        rate = median(len(tally.acknowledged) / tally.took_s for tally in tallies)
        push_s = median(s for tally in tallies for s in tally.push_s)
        records = median(tally.records / len(tally.acknowledged) for tally in tallies)
        report.keep(
            pair,
            {
                "messages_per_s": rate, "push_p50_s": push_s, "records_per_message": records,
                "verdicts": [*verdicts],
            },
        )  # fmt: skip
        table.add_row(
            pair, f"{rate:,.0f}", latency(push_s), latency(median(delays)),
            latency(delays[len(delays) * 99 // 100]), f"{records:.2f}", ", ".join(sorted(verdicts)),
        )  # fmt: skip
        if pair in PAPER:
            table.add_row(*PAPER[pair], style="dim")
        wrong += [f"{pair}: {verdict}" for verdict in sorted(verdicts - {CORRECT})]
    report.show(table)
    report.write()
    if wrong:
        raise SystemExit("The check failed:\n" + "\n".join(wrong))


if __name__ == "__main__":
    command(
        main,
        __doc__,
        pairs={"nargs": "+", "default": list(PAIRS), "metavar": "PRODUCERS/CONSUMERS"},
        shards={"type": int, "help": "shards of the queue; default: as many as consumers"},
        processes={"action": "store_true", "help": "tiers as processes"},
    )
