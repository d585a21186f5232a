"""Checks that memory, index entries and disk usage do not grow under retention and trims (T7).

A platform embedded in this process serves a mixed load at a fixed rate. One log is under retention;
each record has a new tag and the tag of one of 1,000 users. Another log is trimmed as a whole, and
some tags of a third one are trimmed one by one. The load also has a queue whose messages are
acknowledged, and objects that are changed and collected. Every figure of every part is sampled each
second. After a warm-up, in which caches fill, a straight line is fitted through the samples of each
figure. A figure counts as growing if its slopes in both halves of the run are positive, and if it
grows during the run by more than `--noise` of its mean.

    python -m bench.soak [--seconds 600] [--warm-up 150] [--rate 400] [--noise 0.05] [--all]
                         [--tracemalloc]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import os
import random
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.support.harness import Report, command, table_of
from bench.support.platforms import configured
from bokiqueue import Queue
from bokistore import Store
from indilog.base.errors import TrimmedError
from indilog.base.log import Log
from indilog.base.telemetry import configure_logging
from indilog.runtime.cluster.assembly import (
    Platform,
    embedded,
    retention_enforced,
    status_of_nodes,
)

SEED: Final = 1
KEEP_S: Final = 20.0
"""Seconds for which the log under retention, and the objects' history, are kept."""
TRIM_EVERY: Final = 100
"""Appends between two trims of a log."""
_SAMPLE_S: Final = 1.0
_SAMPLES_MIN: Final = 4
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
SETTINGS: Final = {
    "record_cache_bytes_max": 2 << 20,
    "aux_cache_bytes_max": 1 << 17,
    "suffix_bytes_max": 1 << 18,
    "tag_cache_bytes_max": 1 << 20,
    "popularity_bytes_max": 1 << 17,
    "answer_cache_bytes_max": 1 << 17,
    "index_memory_bytes_max": 32 << 20,
    "segment_bytes": 16 << 20,
    "retention_interval_s": 5.0,
}
"""Small caches, so that they are full after the warm-up."""

Step = Callable[[int], Awaitable[object]]
"""One operation, by its number."""


def steps(log: Callable[[str], Log]) -> dict[str, Step]:
    """Return the operations of the load, by name; all logs are those of one platform."""
    dice = random.Random(SEED)
    events, feed, audit = log("events"), log("feed"), log("audit")
    queue, store = Queue(log("mails"), "mails"), Store(log("objects"))

    async def retained(number: int) -> None:
        tags = [f"user:{dice.randrange(1000)}", f"order:{number}"]
        await events.append(dice.randbytes(200), tags=tags)

    async def trimmed(number: int) -> None:
        seqnum = await feed.append(dice.randbytes(200), tags=[f"item:{number}"])
        if number % TRIM_EVERY == 0:
            await feed.trim(seqnum)

    async def trimmed_by_tag(number: int) -> None:
        tag = f"case:{number}"
        seqnum = await audit.append(dice.randbytes(200), tags=[tag])
        await audit.trim(seqnum + 1, tag=tag)

    async def queued(_: int) -> None:
        await queue.push(dice.randbytes(200))
        if (delivery := await queue.take()) is not None:
            await delivery.acknowledge()

    async def changed(_: int) -> None:
        await store.increment(f"account:{dice.randrange(100)}", "balance", 1)

    async def read(number: int) -> None:
        for tag in (f"user:{dice.randrange(1000)}", f"order:{number - 1}"):
            with contextlib.suppress(TrimmedError):
                await events.read_prev(tag=tag)

    return {
        "retained": retained,
        "trimmed": trimmed,
        "trimmed by tag": trimmed_by_tag,
        "queued": queued,
        "changed": changed,
        "read": read,
    }


async def load(make: Callable[[str], Log], rate: float) -> None:
    """Call the operations round robin, `rate` a second in all, until cancelled."""
    calls = steps(make)
    started = asyncio.get_running_loop().time()
    for number, call in zip(itertools.count(), itertools.cycle(calls.values()), strict=False):
        await call(number // len(calls))
        behind_s = started + number / rate - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, behind_s))


async def collect(make: Callable[[str], Log]) -> None:
    """Collect the objects' history periodically, until cancelled."""
    store = Store(make("objects"))
    while True:
        await asyncio.sleep(KEEP_S)
        await store.collect(keep=KEEP_S)


def figures(platform: Platform, directory: Path) -> Iterator[tuple[str, float]]:
    """Yield the used memory and disk, and every figure of every part."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    yield "resident memory", resident
    # `gc.get_objects` breaks a `tuple()` that a thread is building (CPython issue 59313).
    yield "blocks of Python", sys.getallocatedblocks()
    files = [path for path in directory.rglob("*") if path.is_file()]
    yield "disk", sum(path.stat().st_blocks * 512 for path in files)
    yield "files", len(files)
    yield from _flat("", status_of_nodes(platform.shell))
    yield from _flat("engine ", platform.logs.engine.status())


def _flat(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name} ", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


class Trend:
    """A straight line through samples of one figure, taken at `times` (in seconds)."""

    def __init__(self, times: Sequence[float], values: Sequence[float]) -> None:
        self.first, self.last = values[0], values[-1]
        self.slope = _slope(times, values)
        middle = len(values) // 2
        self._halves = (
            _slope(times[:middle], values[:middle]),
            _slope(times[middle:], values[middle:]),
        )
        self._seconds = times[-1] - times[0]
        self._mean = float(np.mean(values))

    def grows(self, noise: float) -> bool:
        """Whether the figure grows by more than `noise` of the mean over the run, in both
        halves.
        """
        added = self.slope * self._seconds
        return added > noise * abs(self._mean) and min(self._halves) > 0


def _slope(times: Sequence[float], values: Sequence[float]) -> float:
    return float(np.polyfit(times, values, 1)[0])


COUNTED: Final = ("resident memory", "blocks of Python", "disk", "files")
"""Figures that must be flat; other figures count operations, so they grow."""


async def main(asked: argparse.Namespace) -> None:
    """Run the load and print the slopes."""
    configure_logging("console", "warning")
    report = Report("soak", asked, **SETTINGS)
    with tempfile.TemporaryDirectory() as path:
        config = configured(path, node=SETTINGS)
        async with (
            embedded(config) as platform,
            retention_enforced(platform.logs, config),
        ):
            samples = await _sample(platform, Path(path), asked)
    trends = {
        name: Trend(times, values)
        for name, (times, values) in samples.items()
        if len(values) >= _SAMPLES_MIN
    }
    table = table_of("Slopes after the warm-up", "figure", "first", "last", "a second", "flat")
    for name, trend in trends.items():
        grows = trend.grows(asked.noise)
        if asked.all or grows or name in COUNTED:
            flat = "grows" if grows else "flat"
            row = f"{trend.first:,.0f}", f"{trend.last:,.0f}", f"{trend.slope:,.1f}"
            table.add_row(name, *row, flat)
            report.keep(name, {"first": trend.first, "last": trend.last, "slope": trend.slope})
    report.show(table)
    report.write()


async def _sample(
    platform: Platform, directory: Path, asked: argparse.Namespace
) -> dict[str, tuple[array[float], array[float]]]:
    """Run the load; return the times and values after the warm-up, by figure.

    They are in arrays, because memory of this process is one of the figures.
    """

    def make(name: str) -> Log:
        return platform.logs.log(name)

    await make("events").set_retention(age_s=KEEP_S)
    tasks = [asyncio.create_task(load(make, asked.rate)), asyncio.create_task(collect(make))]
    samples: dict[str, tuple[array[float], array[float]]] = {}
    before = None
    started = time.monotonic()
    while (passed := time.monotonic() - started) < asked.seconds:
        done, _ = await asyncio.wait(tasks, timeout=_SAMPLE_S)
        for task in done:
            task.result()
        if passed < asked.warm_up:
            continue
        if asked.tracemalloc and before is None:
            tracemalloc.start()
            before = tracemalloc.take_snapshot()
        for name, value in figures(platform, directory):
            times, values = samples.setdefault(name, (array("d"), array("d")))
            times.append(passed)
            values.append(value)
    if before is not None:
        gc.collect()
        for line in tracemalloc.take_snapshot().compare_to(before, "lineno")[:25]:
            print(line)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return samples


if __name__ == "__main__":
    command(
        main,
        __doc__,
        seconds={"type": float, "default": 600.0, "help": "length of the run"},
        warm_up={"type": float, "default": 150.0, "help": "seconds that do not count"},
        rate={"type": float, "default": 400.0, "help": "operations a second"},
        noise={"type": float, "default": 0.05, "help": "share of the mean that is no trend"},
        all={"action": "store_true", "help": "every figure, not only those that grow"},
        tracemalloc={"action": "store_true", "help": "show which lines allocated what grows"},
    )
