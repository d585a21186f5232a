"""Consumers of a queue are killed (-9) at random (docs/libs/bokiqueue.md). Each message is
acknowledged exactly once, first in, first out in its shard, and none is lost.

`--messages 100000` moves more messages than the default of a few thousand.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from asyncio.subprocess import PIPE, Process
from itertools import count
from pathlib import Path

import pytest

import indilog
from bokiqueue import Queue
from bokiqueue.records import Acknowledge, CancelClaim, Claim, Command, PushMessage, encode
from indilog.base.log import Log, Record
from tests.cluster.platform_process import ROOT, platform
from tests.cluster.queues.queue_evidence import Replayed, Reported, faults

SHARDS = 4
CONSUMERS = 3
PRODUCERS = 16
MESSAGES = 800
DELIVERIES_BETWEEN_KILLS = 160
EMPTY_S_MAX = 600.0
MESSAGES_PER_S_MIN = 100


class Consumers:
    """Consumer processes; one is killed and replaced after each number of deliveries.

    The lines of a killed process are still read, so kills may follow each other faster than the
    replacements start, or come after `kill_all`.
    """

    def __init__(self, url: str, chance: random.Random, group: asyncio.TaskGroup) -> None:
        self.reported: list[Reported] = []
        self.kills = 0
        self._command = [sys.executable, "-m", "tests.cluster.queues.queue_consumer"]
        self._command += [url, "work", "mail", str(SHARDS)]
        self._chance = chance
        self._group = group
        self._running: list[Process] = []
        self._is_over = False
        self._deliveries = 0
        self._kill_at = chance.randint(1, DELIVERIES_BETWEEN_KILLS)

    def begin(self) -> None:
        self._group.create_task(self._live())

    async def _live(self) -> None:
        process = await asyncio.create_subprocess_exec(*self._command, cwd=ROOT, stdout=PIPE)
        assert process.stdout is not None
        if self._is_over:
            process.kill()
        else:
            self._running.append(process)
        reported = Reported()
        self.reported.append(reported)
        while line := await process.stdout.readline():
            reported.hear(line)
            self._deliveries += line.startswith(b"got")
            if self._deliveries >= self._kill_at and self._running:
                self._kill_one()
        await process.wait()
        assert process not in self._running, "a consumer ended by itself"

    def _kill_one(self) -> None:
        self._kill_at = self._deliveries + self._chance.randint(1, 2 * DELIVERIES_BETWEEN_KILLS)
        self._running.pop(self._chance.randrange(len(self._running))).kill()
        self.kills += 1
        self.begin()

    def kill_all(self) -> None:
        self._is_over = True
        while self._running:
            self._running.pop().kill()


async def push_all(log: Log, messages: int) -> dict[int, int]:
    """Push the numbers up to `messages`; return the seqnum of each."""
    queue, numbers = Queue(log, "mail", shards=SHARDS), count()
    pushed: dict[int, int] = {}

    async def produce() -> None:
        while (number := next(numbers)) < messages:
            pushed[await queue.push(b"%d" % number)] = number

    await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
    return pushed


async def emptied(queue: Queue, messages: int) -> None:
    """Wait until no message is left, or a long timeout has passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EMPTY_S_MAX + messages / MESSAGES_PER_S_MIN):
            while (await queue.stats()).depth:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0.1)


async def records_of(log: Log, shard: int) -> list[Record]:
    """Return all records of a shard; its consumers trimmed none (`keep_records`)."""
    tag, records, start = f"queue:mail:shard:{shard}", list[Record](), 0
    while page := await log.read_range(tag, start, limit=1000):
        records += page
        start = page[-1].seqnum + 1
    return records


async def moved(url: str, messages: int, chance: random.Random) -> tuple[int, list[str]]:
    """Move messages through consumers that are killed; return the kills and the contradictions."""
    async with indilog.connect(url) as client:
        log = client.log("work")
        queue = Queue(log, "mail", shards=SHARDS)
        async with asyncio.TaskGroup() as group:
            running = Consumers(url, chance, group)
            try:
                for _ in range(CONSUMERS):
                    running.begin()
                pushed = await push_all(log, messages)
                await emptied(queue, messages)
            finally:
                running.kill_all()
        shards = [Replayed(await records_of(log, number)) for number in range(SHARDS)]
        return running.kills, faults(pushed, running.reported, shards)


@pytest.mark.cluster
@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_messages_are_acknowledged_exactly_once_though_consumers_are_killed(
    tmp_path: Path, messages_wanted: int | None
) -> None:
    messages = messages_wanted or MESSAGES
    with platform(tmp_path) as running:
        kills, wrong = asyncio.run(moved(running.url, messages, random.Random(messages)))
    assert wrong == []
    assert kills >= messages // (4 * DELIVERIES_BETWEEN_KILLS)


# --- the checker itself


def record(seqnum: int, command: Command, time: float = 0.0) -> Record:
    return Record(seqnum, b"", encode(command), time, time)


STORY = [
    record(0, PushMessage(b"7", 0, 0.0, 9)),
    record(1, PushMessage(b"8", 0, 0.0, 9)),
    record(2, Claim(1, 5.0)),
    record(3, Claim(1, 5.0)),
    record(4, Acknowledge(2, (0,))),
    record(5, Acknowledge(3, (1,))),
]
SAID = b"got 2 0 7\ngot 3 1 8\ndone 2 0 7\ndone 3 1 8\n"
PUSHED = {0: 7, 1: 8}


def found(said: bytes, story: list[Record] = STORY) -> str:
    reported = Reported()
    for line in said.splitlines(keepends=True):
        reported.hear(line)
    return "; ".join(faults(PUSHED, [reported], [Replayed(story)]))


def test_the_checker_accepts_records_of_several_consumers() -> None:
    claimed = Record(2, b"", encode(Claim(2, 5.0, 9)), 0.0, 0.0)
    acknowledged = Record(3, b"", encode(Acknowledge(2, (0,)), Acknowledge(2, (1,))), 0.0, 0.0)
    story = [*STORY[:2], claimed, acknowledged]
    assert found(b"got 2 0 7\ngot 2 1 8\ndone 2 0 7\ndone 2 1 8\n", story) == ""
    cancelled = record(3, CancelClaim(9))
    again = [record(4, Claim(2, 5.0)), record(5, Acknowledge(4, (0,)))]
    story = [*STORY[:2], claimed, cancelled, *again, record(6, Acknowledge(4, (1,)))]
    assert found(b"got 4 0 7\ngot 4 1 8\ndone 4 0 7\ndone 4 1 8\n", story) == ""


def test_a_delivery_to_two_consumers_is_found() -> None:
    consumers = [Reported(), Reported()]
    for consumer in consumers:
        consumer.hear(b"got 2 0 7\n")
    assert "1 deliveries went to two consumers" in faults(PUSHED, consumers, [Replayed(STORY)])


def test_the_checker_accepts_a_consistent_history() -> None:
    assert found(SAID) == ""
    assert found(SAID.removesuffix(b"done 3 1 8\n")) == "", "killed before it printed the line"
    assert found(SAID.removesuffix(b" 8\n")) == "", "killed within a line"


@pytest.mark.parametrize(
    ("said", "story", "fault"),
    [
        (SAID, STORY[:5], "never acknowledged"),
        (SAID, [*STORY, record(6, Acknowledge(3, (1,)))], ""),
        (SAID, [*STORY[:5], record(9, Acknowledge(3, (1,)), 6.0)], "came too late"),
        (SAID.replace(b"done 3", b"late 3"), STORY, "refused that came in time"),
        (SAID.replace(b"3 1 8", b"3 0 7"), STORY, "confirmed twice"),
        (SAID.replace(b"3 1 8", b"2 0 7"), STORY, "no consumer had in its hands"),
        (SAID.replace(b"got 3 1", b"got 3 0"), STORY, "got another message than they held"),
        (b"got 2 0 7\ndone 2 0 7\n", STORY, "no consumer had in its hands"),
        (SAID.replace(b" 8", b" 9"), STORY, "that were never pushed"),
        (SAID, STORY[1:], "not what was pushed"),
        (
            b"got 2 1 8\ngot 3 0 7\ndone 2 1 8\ndone 3 0 7\n",
            STORY,
            "got another message than they held",
        ),
    ],
)
def test_the_checker_finds(said: bytes, story: list[Record], fault: str) -> None:
    assert fault in found(said, story)
    assert (found(said, story) == "") is (fault == "")
