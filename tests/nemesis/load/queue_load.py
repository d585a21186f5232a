"""Producers and consumers of a BokiQueue: each message is acknowledged once, and none is lost."""

from __future__ import annotations

import asyncio
import math
import time
from itertools import count
from typing import Final

from bokiqueue import LeaseLostError, Queue
from bokiqueue.replica import QueueReplica
from indilog.base.errors import IndilogError
from indilog.remote_client import RemoteClient
from tests.cluster.queues.queue_consumer import keep_records
from tests.cluster.queues.queue_evidence import Replayed, Reported, faults
from tests.cluster.queues.test_kill_consumers import records_of
from tests.nemesis.recording import Recorder

LOG: Final = "work"
NAME: Final = "mail"
SHARDS: Final = 2
LEASE_S: Final = 3.0
TRIES: Final = 1000
PAUSE_S: Final = 0.1
STUCK_S_MAX: Final = 120.0
"""Longest time without progress while the queue is emptied."""


class Mail:
    """What producers and consumers saw."""

    def __init__(self, recorder: Recorder) -> None:
        self.pushed: dict[int, int] = {}
        self.maybe: set[int] = set()
        """Numbers of messages whose push has an unknown outcome."""
        self.reported: list[Reported] = []
        self._recorder = recorder
        self._numbers = count()

    async def produce(self, client: RemoteClient) -> None:
        """Push numbers without end."""
        queue = _queue(client)
        while True:
            number = next(self._numbers)
            self.maybe.add(number)  # also if the run ends meanwhile
            try:
                self.pushed[await queue.push(b"%d" % number)] = number
            except IndilogError as error:
                outcome = "failed" if error.retryable else "unknown"
            else:
                outcome = "ok"
                self._recorder.acknowledged_at.append(time.monotonic())
            if outcome != "unknown":
                self.maybe.discard(number)
            self._recorder.count("push", outcome)
            await asyncio.sleep(PAUSE_S)

    async def consume(self, client: RemoteClient) -> None:
        """Take and acknowledge messages without end."""
        queue, reported = _queue(client), Reported()
        self.reported.append(reported)
        while True:
            try:
                delivery = await queue.take(wait=5.0, lease=LEASE_S)
            except IndilogError:
                self._recorder.count("take", "failed")
                await asyncio.sleep(0.2)
                continue
            if delivery is None:
                continue
            held = (delivery.claim, delivery.seqnum)
            reported.got[held] = int(delivery.data)
            try:
                await delivery.acknowledge()
            except LeaseLostError:
                reported.late.add(held)
                self._recorder.count("acknowledge", "late")
            except IndilogError:
                self._recorder.count("acknowledge", "unknown")
            else:
                reported.done.add(held)
                self._recorder.count("acknowledge", "ok")

    async def emptied(self, client: RemoteClient) -> None:
        """Wait until no message is left, or none was acknowledged for a long time. Consumers were
        impaired as often as producers, so a long run leaves more messages than a short one.
        """
        queue = _queue(client)
        least, deadline = math.inf, time.monotonic() + STUCK_S_MAX
        while (depth := (await queue.stats()).depth) and time.monotonic() < deadline:
            if depth < least:
                least, deadline = depth, time.monotonic() + STUCK_S_MAX
            await asyncio.sleep(0.2)

    async def judged(self, client: RemoteClient) -> list[str]:
        """Return all contradictions, after the load has ended."""
        log = client.log(LOG)
        shards = [Replayed(await records_of(log, number)) for number in range(SHARDS)]
        return self.contradictions(shards)

    def contradictions(self, shards: list[Replayed]) -> list[str]:
        """Return all contradictions to the records of the shards."""
        pushed = dict(self.pushed)
        for shard in shards:
            for seqnum, number in shard.pushed.items():
                if number in self.maybe and number not in pushed.values():
                    pushed[seqnum] = number
        return faults(pushed, self.reported, shards)


def _queue(client: RemoteClient) -> Queue:
    replica, log = QueueReplica(NAME, SHARDS), client.log(LOG)
    keep_records(log)
    return Queue(log, NAME, shards=SHARDS, tries=TRIES, replica=replica)
