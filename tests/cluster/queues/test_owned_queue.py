"""A queue on a log of kind `owned` in a cluster of three processes, each of which is killed once
(docs/libs/bokiqueue.md). Each process has a sequencer, a storage node and a compute node, so the
log loses its owner once. Producers push each message until the push is acknowledged, always with
the same id. Each message is acknowledged once.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest

import indilog
from bokiqueue import Queue
from indilog.base.errors import IndilogError
from tests.cluster.platform_process import PlatformProcess, platform

MESSAGES = 60
PROCESSES = ("node-2", "node-1", "node-0")
PRODUCERS = 4
RETRY_S = 0.2


async def produce(queue: Queue, numbers: list[int]) -> None:
    """Push numbers, each until a push of it is acknowledged."""
    for number in numbers:
        while True:
            try:
                await queue.push(b"%d" % number, id=f"m-{number}")
                break
            except IndilogError:
                await asyncio.sleep(RETRY_S)


class Consumed:
    """What the consumers got: how often each number was delivered and acknowledged."""

    def __init__(self) -> None:
        self.delivered: Counter[int] = Counter()
        self.acknowledged: Counter[int] = Counter()
        self.all_pushed = False

    async def consume(self, queue: Queue) -> None:
        """Acknowledge messages until all are pushed and none is left. If an acknowledgement fails,
        its message may be delivered again.
        """
        while True:
            try:
                if self.all_pushed and not (await queue.stats()).depth:
                    return
                async with queue.pop(wait=0.5, lease=10.0) as message:
                    if message is None:
                        continue
                    number = int(message.data)
                    self.delivered[number] += 1
            except IndilogError:
                await asyncio.sleep(RETRY_S)
            else:
                self.acknowledged[number] += 1


async def moved(running: PlatformProcess) -> Consumed:
    """Move all messages, and kill one process after the other meanwhile."""
    consumed = Consumed()
    async with indilog.connect(running.url) as client:
        await client.create_log("mail", kind="owned")
        queue = Queue(client.log("mail"), "mail", shards=2)
        async with asyncio.timeout(200.0), asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(consumed.consume(queue))
            part = MESSAGES // len(PROCESSES)
            for number, name in enumerate(PROCESSES):
                mine = list(range(number * part, (number + 1) * part))
                producing = [produce(queue, mine[n::PRODUCERS]) for n in range(PRODUCERS)]
                running.signal_node(name, signal.SIGKILL)
                await asyncio.gather(*producing)
            consumed.all_pushed = True
    return consumed


@pytest.mark.repeated("tests/cluster/queues/test_kill_consumers.py")
@pytest.mark.cluster
@pytest.mark.heavy
def test_each_message_of_a_queue_on_an_owned_log_is_acknowledged_once(tmp_path: Path) -> None:
    with platform(tmp_path, "--nodes", "3") as running:
        consumed = asyncio.run(moved(running))
    assert consumed.delivered.keys() == set(range(MESSAGES))
    assert set(consumed.acknowledged.values()) == {1}
