"""Replicas in any interleaving of their calls, with checkpoints and trims, agree with the log.

Each process appends words and saves when it is elected; the stepper decides which one makes the
next call of the log. Every outcome must equal that of a plain replay of all records ever appended,
which the test keeps itself.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from indilog.base.errors import AppendOutcomeUnknownError, IndilogError
from indilog.base.ids import SeqNum
from indilog.base.log import Log, Record
from indilog.replayed import Replica, State, SubStream
from indilog.sdk import RecordFormat
from indilog.testing import MemoryLogs
from indilog.testing.stepper import SteppedLog, run_stepped

STREAM = SubStream(
    "sum", "sum:checkpoint", RecordFormat(b"\xb0W", 1, of="a test", error=IndilogError), "Sum"
)
PROCESSES = 3
APPENDS = 12


class Sum(State[int]):
    """The sum of all records; the outcome is the sum after the record."""

    def __init__(self, total: int = 0) -> None:
        self.total = total

    def apply(self, record: Record) -> int:
        self.total += int(record.data)
        return self.total

    def snapshot(self) -> object:
        return self.total

    @property
    def size(self) -> int:
        return 1


def replica() -> Replica[Sum, int]:
    return Replica(
        STREAM, Sum, lambda content: Sum(msgspec.msgpack.decode(content)), checkpoint_every=2
    )


class Kept(SteppedLog):
    """A log of which the test keeps every appended command."""

    def __init__(self, log: Log, kept: dict[SeqNum, int]) -> None:
        super().__init__(log)
        self.kept = kept

    async def append(self, data: bytes, *, tags: object = ()) -> SeqNum:
        seqnum = await super().append(data, tags=tags)  # type: ignore[arg-type]
        if STREAM.tag in tags:  # type: ignore[operator]
            self.kept[seqnum] = int(data)
        return seqnum


async def process(log: Kept, rng: random.Random, told: list[tuple[SeqNum, int]]) -> None:
    mine = replica()
    for _ in range(APPENDS):
        try:
            outcome = await mine.append(log, b"%d" % rng.randrange(1, 100))
            own = next(s for s in reversed(log.appended) if s in log.kept)
            told.append((own, outcome))
        except AppendOutcomeUnknownError:
            mine = replica()
        if mine.is_save_due:
            await mine.save(log)


@pytest.mark.parametrize("seed", range(150))
def test_all_outcomes_equal_a_plain_replay(seed: int) -> None:
    rng = random.Random(seed)
    logs, kept = MemoryLogs(), dict[SeqNum, int]()
    told: list[tuple[SeqNum, int]] = []
    stepped = [Kept(logs.log("work"), kept) for _ in range(PROCESSES)]
    run_stepped([process(log, rng, told) for log in stepped], rng.choice)
    assert len(told) > PROCESSES * APPENDS // 2
    for seqnum, outcome in told:
        assert outcome == sum(value for place, value in kept.items() if place <= seqnum)
    late = replica()
    run_stepped([late.catch_up(SteppedLog(logs.log("work")))], rng.choice)
    assert late.state.total == sum(kept.values())
