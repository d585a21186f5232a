"""The data behind the queue benchmark's verdict (`bench.queue`)."""

from __future__ import annotations

import pytest

from bench.queue import CORRECT, QueueTally, one_round
from indilog.testing import MemoryLog


def tally(**changed: object) -> QueueTally:
    """Return the tally of a correct round with two shards, except for the fields in `changed`."""
    seen = QueueTally(
        pushed={1, 2, 3, 4},
        acknowledged={1: 1, 2: 1, 3: 1, 4: 1},
        firsts={0: [(10, 1), (12, 3)], 1: [(13, 4), (11, 2)]},
    )
    for name, value in changed.items():
        setattr(seen, name, value)
    return seen


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, CORRECT),
        ({"acknowledged": {1: 1, 2: 1, 3: 1}}, "1 messages lost or invented"),
        ({"pushed": {1, 2, 3}}, "1 messages lost or invented"),
        ({"acknowledged": {1: 1, 2: 2, 3: 1, 4: 3}}, "2 messages acknowledged twice"),
        ({"firsts": {0: [(10, 3), (12, 1)]}}, "a shard is not first in, first out"),
    ],
)
def test_the_verdict_names_the_fault(changed: dict[str, object], verdict: str) -> None:
    assert tally(**changed).verdict() == verdict


@pytest.mark.asyncio
async def test_a_round_empties_the_queue_and_is_correct() -> None:
    seen = await one_round(MemoryLog("bench"), "q", producers=3, consumers=2, seconds=0.05)
    assert seen.pushed
    assert len(seen.push_s) == len(seen.delay_s) == len(seen.pushed)
    assert seen.verdict() == CORRECT
