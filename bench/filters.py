"""The latency of reads by tag as the number of tags grows (WORKLOADS 7). It compares `read_next`
with JetStream's direct get by subject, with 10^3 and 10^5 tags.

Both logs have the same number of small records, spread evenly over the tags. Each read asks for the
next record with a tag from a place between two records with that tag. So the answer does not follow
from the place alone. No read begins before the first record with its tag. Such reads always go to
the index tier, because the local index cannot know that no earlier record exists.

Three sides: IndiLog (its local index knows the tags), IndiLog without a local index (the index tier
finds every record), and NATS JetStream. The figure is the ratio of the latency with many tags to
the latency with few tags, taken within a round. IndiLog claims that this ratio is at most 1.3.

    python -m bench.filters [--seconds 1] [--rounds 3] [--callers 1 64] [--records 200000]
                            [--tags 1000 100000] [--sides indilog jetstream ...]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import cycle
from typing import Any, Final, NamedTuple, TypeAlias

import nats
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from bench.sides.nats import STREAM
from bench.sides.side import found
from bench.support import platforms, servers
from bench.support.harness import (
    Report,
    Round,
    command,
    interleave,
    latency,
    median_of,
    ratio_of,
    table_of,
)
from indilog.base.log import Entry, Log

RECORD_BYTES: Final = 64
READS: Final = 10_000
"""Different reads; they are used cyclically."""
SEED: Final = 1
_BATCH: Final = 500
_NO_LOCAL_INDEX: Final[dict[str, int]] = {
    "suffix_cuts_max": 0,
    "popularity_entries_max": 0,
    "tag_cache_seqnums_max": 0,
    "tag_cache_seqnums_per_tag_max": 0,
    "record_cache_bytes_max": 0,
}


class Question(NamedTuple):
    """A read: the first record with `tag` from `place` on is `answer`."""

    tag: str
    place: int
    answer: int


class Filtered(NamedTuple):
    """A log with records, and its reads."""

    read: Callable[[str, int], Awaitable[int]]
    """Returns the place of the first record with a tag, at or after a place."""
    places: list[int]
    """The places of records 0, 1, ...; record n has tag n modulo the number of tags."""


def questions_of(places: list[int], tags: int) -> list[Question]:
    """Return reads with known answers; each begins between two records with its tag.

    Raises:
        SystemExit: there are fewer than two records for each tag.
    """
    if len(places) < 2 * tags:
        raise SystemExit(f"{tags:,} tags need at least {2 * tags:,} --records.")
    chance = random.Random(SEED)
    asked = []
    for _ in range(READS):
        number = chance.randrange(tags, len(places))
        place = chance.randint(places[number - tags] + 1, places[number])
        asked.append(Question(tag_of(number, tags), place, places[number]))
    return asked


def tag_of(number: int, tags: int) -> str:
    """Return the tag of a record."""
    return f"tag-{number % tags}"


# --- sides


@asynccontextmanager
async def jetstream(records: int, tags: int) -> AsyncIterator[Filtered]:
    """Run NATS with a stream, one subject a tag."""
    with servers.nats_server() as server:
        connection = await nats.connect(f"nats://{servers.HOST}:{server.address['port']}")
        try:
            context = connection.jetstream(timeout=60.0)
            await context.add_stream(
                StreamConfig(name=STREAM, subjects=["bench.>"], allow_direct=True)
            )
            places = await _publish(context, records, tags)

            async def read(tag: str, place: int) -> int:
                message = await context.get_msg(
                    STREAM, place, f"bench.{tag}", direct=True, next=True
                )
                assert message.seq is not None, "a direct get says where"
                return message.seq

            yield Filtered(read, places)
        finally:
            await connection.close()


async def _publish(context: JetStreamContext, records: int, tags: int) -> list[int]:
    data = bytes(RECORD_BYTES)
    places: list[int] = []
    for start in range(0, records, _BATCH):
        acks = await asyncio.gather(
            *(
                context.publish(f"bench.{tag_of(number, tags)}", data, timeout=60.0)
                for number in range(start, min(start + _BATCH, records))
            )
        )
        places += [ack.seq for ack in acks]
    return places


@asynccontextmanager
async def indilog(records: int, tags: int, **node: int) -> AsyncIterator[Filtered]:
    """Run a platform, embedded."""
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        async with platforms.running(platforms.configured(path, node=node)) as running:
            log = running.log
            places = await _append(log, records, tags)

            async def read(tag: str, place: int) -> int:
                record = await log.read_next(tag, place)
                assert record is not None, "it was appended"
                return record.seqnum

            yield Filtered(read, places)


async def _append(log: Log, records: int, tags: int) -> list[int]:
    data = bytes(RECORD_BYTES)
    places: list[int] = []
    for start in range(0, records, _BATCH):
        numbers = range(start, min(start + _BATCH, records))
        places += await log.append_batch([Entry(data, (tag_of(n, tags),)) for n in numbers])
    return places


@asynccontextmanager
async def index_tier(records: int, tags: int) -> AsyncIterator[Filtered]:
    """Run a platform whose compute node has no local index."""
    async with indilog(records, tags, **_NO_LOCAL_INDEX) as filtered:
        yield filtered


Side: TypeAlias = Callable[[int, int], AbstractAsyncContextManager[Filtered]]
SIDES: Final[Mapping[str, Side]] = {
    "indilog": indilog,
    "indilog, index tier alone": index_tier,
    "NATS JetStream": jetstream,
}


# --- measuring


async def compare(asked: argparse.Namespace, side: str) -> dict[str, dict[str, list[Round]]]:
    """Fill one log for each number of tags, then read all of them, interleaved."""
    async with AsyncExitStack() as stack:
        reads = {}
        for tags in asked.tags:
            filtered = await stack.enter_async_context(SIDES[side](asked.records, tags))
            reads[f"{tags:,}"] = _operation_of(filtered, tags)
        return {
            str(callers): await interleave(
                reads, callers=callers, seconds=asked.seconds, rounds=asked.rounds
            )
            for callers in asked.callers
        }


def _operation_of(filtered: Filtered, tags: int) -> Callable[[int], Awaitable[object]]:
    questions = cycle(questions_of(filtered.places, tags))

    async def operation(_caller: int) -> object:
        question = next(questions)
        there = await filtered.read(question.tag, question.place)
        return found(there == question.answer)

    return operation


async def main(asked: argparse.Namespace) -> None:
    """Compare every side with itself."""
    report = Report("Filters", asked, record=f"{RECORD_BYTES} bytes, one tag")
    table = table_of(
        f"read_next by tag, {asked.records:,} records; ratios to {asked.tags[0]:,} tags",
        "side", "callers", "tags", "reads/s", "p50", "p99", "reads/s ratio", "p50 ratio",
    )  # fmt: skip
    for side in asked.sides:
        for callers, rounds in (await compare(asked, side)).items():
            report.add(f"{side} {callers}", rounds)
            base = next(iter(rounds.values()))
            for tags, some in rounds.items():
                table.add_row(side, callers, tags, *_figures(some, base))
            table.add_section()
    report.show(table)
    report.write()


def _figures(rounds: list[Round], base: list[Round]) -> tuple[str, ...]:
    return (
        f"{median_of(rounds, lambda r: r.per_second):,.0f}",
        latency(median_of(rounds, lambda r: r.quantile(0.5))),
        latency(median_of(rounds, lambda r: r.quantile(0.99))),
        f"{ratio_of(rounds, base, lambda r: r.per_second):.2f}x",
        f"{ratio_of(rounds, base, lambda r: r.quantile(0.5)):.2f}x",
    )


_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "records": {"type": int, "default": 200_000, "help": "records of each log"},
    "tags": {"type": int, "nargs": "+", "default": [1_000, 100_000]},
    "sides": {"nargs": "+", "choices": tuple(SIDES), "default": list(SIDES)},
}

if __name__ == "__main__":
    command(main, __doc__, **_OPTIONS)
