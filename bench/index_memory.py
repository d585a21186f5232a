"""Memory of a compute node's local index over many new tags, compared with a complete index (A21,
thesis 3.2.1 and 7.4).

Every append has the tag of its log and a new tag. Every position orders 256 appends, and 16 of
their tags are read from the head of the log, as in the thesis. The index is called directly,
without disk or sockets, because only its memory is measured. Each side runs in its own process. The
growth of that process's resident memory is compared with the index's own figure and with the sum of
its limits. *Complete* is an index shard with all positions, as on Boki's compute nodes.

    python -m bench.index_memory [--appends 10000000] [--complete-appends 3000000] [--picture FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from bench.support.harness import ROOT, Report, command, table_of
from indilog.base.ids import ShardId
from indilog.config import NodeConfig, node_config
from indilog.kernel.metalog import Span
from indilog.wire.messages import Direction, ShardTags
from indilog_compute.local_index import Empty, First, Found, LocalIndex, Miss
from indilog_index.tag_index import TagIndex

Side: TypeAlias = Literal["default", "extended", "complete"]
SIDES: tuple[Side, ...] = get_args(Side)
RECORDS = 256
"""Records of one position."""
READS = 16
"""Tags of each position that are read from the head of the log."""
SAMPLES = 80
SEED = 1
LOG = 2**63 + 5
SHARD = ShardId(0)
MIB = 1024 * 1024


class Sample(NamedTuple):
    """The memory of a side after a number of appends."""

    appends: int
    reported_bytes: int
    """The index's own figure, in bytes."""
    grown_bytes: int
    """Growth of the resident memory of its process, in bytes."""


def limit_bytes(config: NodeConfig) -> int:
    """Return the sum of the limits of all parts of a local index."""
    return (
        config.caches.suffix_bytes_max
        + config.caches.popularity_bytes_max
        + config.caches.tag_cache_bytes_max
        + config.caches.answer_cache_bytes_max
    )


def parts_of(appends: int) -> Iterator[ShardTags]:
    """Yield the index data of one position after the other; all tags but the log's are new."""
    chance = np.random.default_rng(SEED)
    counts = bytes([2]) * RECORDS
    for first in range(0, appends, RECORDS):
        tags = np.full(2 * RECORDS, LOG, dtype=np.uint64)
        tags[1::2] = chance.integers(1, 2**64 - 1, RECORDS, dtype=np.uint64)
        yield ShardTags(SHARD, first, RECORDS, counts, tags.tobytes())


class Local:
    """A local index whose engine appends all records and reads some."""

    def __init__(self, config: NodeConfig) -> None:
        self._extended = config.caches.local_index == "extended"
        self.index = LocalIndex(config)
        self.hits = self.reads = 0

    def add(self, part: ShardTags) -> None:
        """Append the records of one position, then read some."""
        index, first = self.index, part.first_seqnum
        tags: list[int] = np.frombuffer(part.tags, dtype=np.uint64)[1::2].tolist()
        if self._extended:
            for tag in tags:
                index.expect(tag)
        index.apply_spans([Span(SHARD, first, first, part.count)])
        index.apply_block(index.tag_position, [part])
        if self._extended:
            for tag in tags:
                index.learn_first(tag, first, None)
        for place in range(0, RECORDS, RECORDS // READS):
            self._read_head(tags[place], first + place)

    def _read_head(self, tag: int, seqnum: int) -> None:
        """Read the first record with a tag; on a miss, supply the answer of the index tier."""
        self.reads += 1
        match self.index.find_next(tag, 0):
            case Found(seqnum=found):
                assert found == seqnum
                self.hits += 1
            case Miss():
                self.index.learn_answer(Direction.NEXT, tag, 0, First(seqnum, SHARD), seqnum + 1)
                self.index.learn(seqnum, SHARD)
            case Empty():
                raise AssertionError("the record is there")

    @property
    def size_bytes(self) -> int:
        """The index's own figure, in bytes."""
        return self.index.size_bytes


class Complete:
    """An index of everything."""

    def __init__(self) -> None:
        self._index = TagIndex()

    def add(self, part: ShardTags) -> None:
        """Append the records of one position."""
        self._index.add(part)

    @property
    def size_bytes(self) -> int:
        """The index's own figure, in bytes."""
        return self._index.memory_bytes


def indexed(side: Side, config: NodeConfig | None = None) -> Local | Complete:
    """Return an empty index."""
    if side == "complete":
        return Complete()
    return Local(config or node_config(local_index=side))


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def samples_of(index: Local | Complete, appends: int) -> Iterator[Sample]:
    """Append, and measure periodically."""
    for _ in parts_of(RECORDS * 8):
        pass
    gc.collect()
    before = resident_bytes()
    every = max(appends // RECORDS // SAMPLES, 1)
    for number, part in enumerate(parts_of(appends), 1):
        index.add(part)
        if number % every == 0:
            yield Sample(number * RECORDS, index.size_bytes, resident_bytes() - before)


def measure(side: Side, appends: int) -> dict[str, object]:
    """Measure one side in a process of its own."""
    command = [sys.executable, "-m", "bench.index_memory", "--side", side]
    done = subprocess.run(
        [*command, "--appends", str(appends)],
        cwd=ROOT, check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    found: dict[str, object] = json.loads(done.stdout)
    return found


def print_side(side: Side, appends: int) -> None:
    """Measure one side in this process; print the result as JSON."""
    index = indexed(side)
    start = time.perf_counter()
    samples = list(samples_of(index, appends))
    hits = None
    if isinstance(index, Local):
        index.index.check_invariants()
        hits = index.hits / index.reads
    seconds = time.perf_counter() - start
    print(json.dumps({"samples": samples, "hits": hits, "seconds": seconds}))


def picture(found: dict[str, list[Sample]], limit: int, path: Path) -> None:
    """Draw resident memory over appends."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for side, samples in found.items():
        x = [sample.appends / 1e6 for sample in samples]
        axes.plot(x, [sample.grown_bytes / MIB for sample in samples], label=side)
    axes.axhline(limit / MIB, color="black", linestyle="--", linewidth=0.8, label="sum of limits")
    axes.set_xlabel("appends with a new tag, millions")
    axes.set_ylabel("memory of the index, MiB")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.set_title("Local index and complete index over new tags")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


async def main(asked: argparse.Namespace) -> None:
    """Measure every side; print a table, draw a picture."""
    if asked.side is not None:
        print_side(asked.side, asked.appends)
        return
    limit = limit_bytes(NodeConfig())
    report = Report("index_memory", asked, limit_bytes=limit, records_a_position=RECORDS)
    table = table_of(
        "memory of an index over new tags",
        "index", "appends", "grown, largest MiB", "after half", "at the end", "of limits",
        "reported MiB", "hits of head reads",
    )  # fmt: skip
    found: dict[str, list[Sample]] = {}
    for side in SIDES:
        appends = asked.complete_appends if side == "complete" else asked.appends
        measurement = await asyncio.to_thread(measure, side, appends)
        raw = measurement["samples"]
        assert isinstance(raw, list)
        samples = found[side] = [Sample(*sample) for sample in raw]
        report.keep(side, measurement)
        largest = max(sample.grown_bytes for sample in samples)
        hits = measurement["hits"]
        table.add_row(
            side,
            f"{appends:,}",
            f"{largest / MIB:.1f}",
            f"{samples[len(samples) // 2].grown_bytes / MIB:.1f}",
            f"{samples[-1].grown_bytes / MIB:.1f}",
            "-" if side == "complete" else f"{largest / limit:.2f}",
            f"{samples[-1].reported_bytes / MIB:.1f}",
            f"{hits:.0%}" if isinstance(hits, float) else "-",
        )
    report.show(table)
    report.write()
    if asked.picture is not None:
        picture(found, limit, asked.picture)


if __name__ == "__main__":
    command(
        main,
        __doc__,
        appends={"type": int, "default": 10_000_000},
        complete_appends={"type": int, "default": 3_000_000},
        side={"choices": SIDES, "default": None, "help": "measure this one here, print JSON"},
        picture={"type": Path, "default": None, "help": "draw it into this file (PNG)"},
    )
