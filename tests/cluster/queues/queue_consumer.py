"""A process that consumes a queue without end and prints what happens to it, for
tests that kill it.

`python -m tests.cluster.queues.queue_consumer URL LOG QUEUE SHARDS`: each line is a word, the
seqnum of the claim, the seqnum of the message, and the message. `got`: the message was delivered.
`done`: its acknowledgement returned. `late`: its acknowledgement failed because the lease had
ended. A delivery without a second line was not acknowledged when the process was killed, or only a
moment before.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count

import uvloop

import indilog
from bokiqueue import Delivery, LeaseLostError, Queue
from indilog.base.ids import UserTag
from indilog.base.log import Log

TASKS = 8
LEASE_S = 1.0
LATE_S = 1.5
LATE_EVERY = 50
"""One of this many deliveries is acknowledged only after its lease has ended."""
TRIES = 1000


def keep_records(log: Log) -> None:
    """Let this log trim nothing, so that its records can be checked."""

    async def trim(until: int, *, tag: UserTag | None = None) -> None:
        pass

    log.trim = trim  # type: ignore[method-assign]


def _tell(word: str, delivery: Delivery) -> None:
    line = f"{word} {delivery.claim} {delivery.seqnum} {delivery.data.decode()}\n"
    os.write(1, line.encode())


async def _consume_for_ever(url: str, log: str, name: str, shards: int) -> None:
    async with indilog.connect(url) as client:
        deliveries = count(1)

        async def consume() -> None:
            mine = client.log(log)
            keep_records(mine)
            queue = Queue(mine, name, shards=shards, tries=TRIES)
            while True:
                delivery = await queue.take(wait=30, lease=LEASE_S)
                if delivery is None:
                    continue
                _tell("got", delivery)
                if next(deliveries) % LATE_EVERY == 0:
                    await asyncio.sleep(LATE_S)
                try:
                    await delivery.acknowledge()
                except LeaseLostError:
                    _tell("late", delivery)
                else:
                    _tell("done", delivery)

        await asyncio.gather(*(consume() for _ in range(TASKS)))


if __name__ == "__main__":
    uvloop.run(_consume_for_ever(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
