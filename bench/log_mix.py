"""The mixed log workloads of the thesis (WORKLOADS 1): appends and reads of several kinds at once.

Each caller draws its next operation at random, from one seed, by the percentages of a named
workload. For each workload and append:read ratio, the benchmark prints operations/s, and p50 and
p99 of appends and of reads. It also prints which share of the lookups each part of the local index
answered.

    python -m bench.log_mix [--seconds 2] [--rounds 3] [--callers 64] [--workloads mix new-tags]
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from statistics import median
from typing import NamedTuple

from bench.support import platforms
from bench.support.harness import (
    Report,
    Round,
    closed_loop,
    command,
    latency,
    median_of,
    table_of,
)
from indilog.base.ids import MAX_SEQNUM
from indilog.base.log import Log

RECORD_BYTES = 1024
POOL_TAGS = 20
POPULAR = 30
SUFFIX = 100
OWN_KEPT = 1000
"""Records of its own that a caller remembers, to read them again."""
SEED = 1
PARTS = ("suffix", "popularity_cache", "tag_cache", "answer_cache", "record_cache")


class Workload(NamedTuple):
    """The percentages of a workload; the order of each tuple is that of WORKLOADS 1."""

    tagged: int
    seq_read: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """own, popular, suffix, head, tail."""
    tag_append: tuple[int, int, int] = (0, 0, 0)
    """a new tag, one of the caller's 20, one of 20 shared by all."""
    tag_read: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """direct, left, right, head, tail."""


WORKLOADS = {
    "mix": Workload(50, (25, 25, 25, 0, 25), (33, 34, 33), (20, 20, 20, 20, 20)),
    "new-tags-read-min": Workload(100, tag_append=(100, 0, 0), tag_read=(0, 0, 0, 100, 0)),
    "new-tags": Workload(100, tag_append=(100, 0, 0), tag_read=(100, 0, 0, 0, 0)),
    "index-heavy": Workload(100, tag_append=(100, 0, 0), tag_read=(80, 0, 0, 20, 0)),
    "against-us": Workload(100, tag_append=(100, 0, 0), tag_read=(20, 0, 0, 80, 0)),
    "empty-tag": Workload(0, (25, 25, 25, 0, 25)),
    "one-tag": Workload(100, tag_append=(0, 0, 100), tag_read=(100, 0, 0, 0, 0)),
}
RATIOS = {"1:1": 1 / 2, "19:1": 19 / 20, "1:19": 1 / 20}
"""The share of appends, by append:read ratio."""
SEQ_READS = ("own", "popular", "suffix", "head", "tail")
TAG_READS = ("direct", "left", "right", "head", "tail")


class ClosedLoopCaller:
    """One closed-loop caller: what it has appended, and what it does next."""

    def __init__(self, number: int, mixing: Mixing) -> None:
        self._mixing = mixing
        self._log = mixing.logs[number % len(mixing.logs)]
        self._chance = random.Random(SEED * 1_000_003 + number)
        self._pool = [f"own-{number}-{i}" for i in range(POOL_TAGS)]
        self._fresh = number << 40
        self._own: deque[int] = deque(maxlen=OWN_KEPT)
        self._tagged: deque[tuple[str | int, int]] = deque(maxlen=OWN_KEPT)

    async def step(self) -> None:
        """Do one operation, and record its duration by its kind."""
        chance, mixing = self._chance.random, self._mixing
        tagged = chance() < mixing.workload.tagged / 100
        known = self._tagged if tagged else self._own
        start = time.perf_counter()
        if not known or chance() < mixing.appends:
            kind = "append"
            await (self._append_tagged() if tagged else self._append())
        elif tagged:
            kind = await self._read_tagged()
        else:
            kind = await self._read_untagged()
        mixing.latencies_s[kind].append(time.perf_counter() - start)

    async def _append(self) -> None:
        seqnum = await self._log.append(self._mixing.data)
        self._own.append(seqnum)
        self._mixing.appended(seqnum)

    async def _append_tagged(self) -> None:
        (kind,) = self._chance.choices(range(3), self._mixing.workload.tag_append)
        place = self._chance.randrange(POOL_TAGS)
        tag: str | int = (f"shared-{place}", self._pool[place])[kind != 2]
        if kind == 0:
            self._fresh += 1
            tag = self._fresh
        seqnum = await self._log.append(self._mixing.data, tags=(tag,))
        self._tagged.append((tag, seqnum))
        self._mixing.appended(seqnum)

    async def _read_untagged(self) -> str:
        log, mixing = self._log, self._mixing
        (kind,) = self._chance.choices(SEQ_READS, mixing.workload.seq_read)
        if kind == "head":
            await log.read_next()
        elif kind == "tail":
            await log.read_prev()
        elif kind == "suffix":
            await log.read(max(mixing.newest - self._chance.randrange(SUFFIX), 0))
        else:
            chosen = mixing.popular if kind == "popular" and mixing.popular else self._own
            await log.read(self._chance.choice(chosen))
        return f"seq {kind}"

    async def _read_tagged(self) -> str:
        (kind,) = self._chance.choices(TAG_READS, self._mixing.workload.tag_read)
        tag, seqnum = self._chance.choice(self._tagged)
        log = self._log
        reads: dict[str, Callable[[], Awaitable[object]]] = {
            "direct": lambda: log.read_next(tag, seqnum),
            "left": lambda: log.read_next(tag, max(seqnum - 5, 0)),
            "right": lambda: log.read_prev(tag, seqnum + 5),
            "head": lambda: log.read_next(tag, 0),
            "tail": lambda: log.read_prev(tag, MAX_SEQNUM),
        }
        if await reads[kind]() is None:
            raise RuntimeError(f"read {kind} of {tag!r} at {seqnum} found nothing")
        return f"tag {kind}"


class Mixing:
    """The state that all callers of one run of one workload share."""

    def __init__(
        self, logs: tuple[Log, ...], workload: Workload, appends: float, callers: int
    ) -> None:
        self.logs = logs
        self.workload = workload
        self.appends = appends
        self.data = random.Random(SEED).randbytes(RECORD_BYTES)
        self.newest = 0
        self.popular: list[int] = []
        self.latencies_s: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self._callers = [ClosedLoopCaller(number, self) for number in range(callers)]

    def appended(self, seqnum: int) -> None:
        """Note a new record."""
        self.newest = max(self.newest, seqnum)
        if len(self.popular) < POPULAR:
            self.popular.append(seqnum)

    async def operation(self, caller: int) -> None:
        """Have one caller do its next operation."""
        await self._callers[caller].step()

    def quantiles(self, begins: str) -> tuple[str, str]:
        """Return p50 and p99 of the kinds whose name begins with `begins`."""
        ordered = sorted(
            value
            for kind, values in self.latencies_s.items()
            if kind.startswith(begins)
            for value in values
        )
        if not ordered:
            return ("-", "-")
        return latency(median(ordered)), latency(ordered[int(0.99 * len(ordered))])


async def measure(
    asked: argparse.Namespace, name: str, ratio: str, callers: int, report: Report
) -> list[str]:
    """Run one workload at one ratio on a fresh platform; return its row."""
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        config = platforms.configured(path, processes=asked.processes)
        async with platforms.running(config, processes=asked.processes) as bench:
            mixing = Mixing(bench.logs, WORKLOADS[name], RATIOS[ratio], callers)
            await closed_loop(mixing.operation, callers=callers, seconds=asked.seconds / 4)
            mixing.latencies_s.clear()
            before = bench.status()
            rounds: list[Round] = [
                await closed_loop(mixing.operation, callers=callers, seconds=asked.seconds)
                for _ in range(asked.rounds)
            ]
            hits = [bench.hit_ratio(before, part) for part in PARTS]
            tiers = sum(part.get("bytes", 0) for part in bench.status().values())
    title = f"{name} {ratio} {callers}"
    report.add(title, {"indilog": rounds})
    for kind in sorted(mixing.latencies_s):
        report.keep(f"{title} {kind}", list(mixing.quantiles(kind)))
    return [
        title,
        f"{median_of(rounds, lambda r: r.per_second):,.0f}",
        *mixing.quantiles("append"),
        *mixing.quantiles("seq"),
        *mixing.quantiles("tag"),
        *("-" if hit is None else f"{hit:.0%}" for hit in hits),
        f"{median_of(rounds, lambda r: r.cpu_s / r.operations) * 1e6:.0f} µs",
        f"{tiers / 1e6:.1f}",
    ]


async def main(asked: argparse.Namespace) -> None:
    """Measure every named workload at every ratio."""
    report = Report("log_mix", asked, record_bytes=RECORD_BYTES, workloads=list(WORKLOADS))
    table = table_of(
        "mixed workloads: p50 and p99 per kind, hits of each part of the compute node",
        "workload, append:read, callers", "ops/s", "append p50", "p99", "seq p50", "p99",
        "tag p50", "p99", "suffix", "popular", "tags", "answers", "records", "CPU/op",
        "index+cache MB",
    )  # fmt: skip
    for name in asked.workloads:
        for ratio in asked.ratios:
            for callers in asked.callers:
                table.add_row(*await measure(asked, name, ratio, callers, report))
        table.add_section()
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        workloads={"nargs": "+", "choices": list(WORKLOADS), "default": list(WORKLOADS)},
        processes={"action": "store_true", "help": "tiers as processes"},
        ratios={"nargs": "+", "choices": list(RATIOS), "default": list(RATIOS)},
    )
