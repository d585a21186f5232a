"""Batches read from memory or disk: a cache, and shared, bounded reads (ARCHITECTURE 8 and 9).

A task names the batches that it needs, in order, and receives them one by one. It keeps only what
it takes out of them. Tasks are served in the order of their arrival. Bytes being read are bounded
over all tasks, so neither many readers nor a long page can exhaust memory.
"""

from __future__ import annotations

import abc
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import LocalId, NodeId
from indilog.kernel.records import RecordBatch
from indilog.roles.role import Effect, Ignore, Location, ReadFrame, Send
from indilog.wire.messages import Message


class DamagedBatch(NamedTuple):
    """A batch that is not intact.

    Attributes:
        location: where it was written.
        readable: whether there was anything to read.
        records: the damaged records, if only the data of some is damaged.
    """

    location: Location
    readable: bool
    records: Sequence[LocalId] = ()


def parse_batch(
    location: Location, payload: bytes | None
) -> tuple[RecordBatch | None, DamagedBatch | None]:
    """Return the readable part of a batch that was read, and its damage."""
    if payload is None:
        return None, DamagedBatch(location, readable=False)
    try:
        batch = RecordBatch(payload, partly=True)
    except MalformedFrameError:
        return None, DamagedBatch(location, readable=True)
    if not batch.damaged:
        return batch, None
    return batch, DamagedBatch(location, readable=True, records=batch.damaged_localids)


class BatchTask(abc.ABC):
    """Work that visits batches and ends with one message.

    Attributes:
        to: the receiver of the message.
        todo: batches still to be requested.
        awaited: how many batches are being read for the task.
        queued: whether the task may request more.
    """

    def __init__(self, to: NodeId, todo: Iterable[Location]) -> None:
        self.to = to
        self.todo = deque(todo)
        self.awaited = 0
        self.queued = False

    @property
    @abc.abstractmethod
    def full(self) -> bool:
        """Whether the message is full; remaining batches are then left out."""

    @abc.abstractmethod
    def take(self, location: Location, batch: RecordBatch | None) -> None:
        """Take the needed part of a requested batch; None: it is damaged.

        The data of some of its records may be damaged (`RecordBatch.damaged`).
        """

    @abc.abstractmethod
    def answer(self) -> Message:
        """Return the message when all requested batches were taken."""


class BatchReads:
    """Serves batches to tasks.

    `bytes_max` bounds the cache, `reading_bytes_max` the bytes being read, `tasks_max` the queue.
    """

    def __init__(self, *, bytes_max: int, reading_bytes_max: int, tasks_max: int) -> None:
        self._cache: OrderedDict[Location, RecordBatch] = OrderedDict()
        """Least recently used batches come first."""
        self._cached_bytes = 0
        self._bytes_max = bytes_max
        self._reading_bytes_max = reading_bytes_max
        self._tasks_max = tasks_max
        self._reading_bytes = 0
        self._reading: dict[Location, list[BatchTask]] = {}
        self._tokens: dict[int, Location] = {}
        self._next_token = 0
        self._queue: deque[BatchTask] = deque()
        self.damaged: list[DamagedBatch] = []
        """Damage found since `DiskCare` last emptied the list."""

    @property
    def cached_bytes(self) -> int:
        """Bytes of batches in the cache."""
        return self._cached_bytes

    def remember(self, location: Location, batch: RecordBatch) -> None:
        """Cache a batch, unless it is larger than the cache."""
        size = len(batch.buffer)
        if size > self._bytes_max:
            return
        cache = self._cache
        if (before := cache.pop(location, None)) is not None:
            self._cached_bytes -= len(before.buffer)
        cache[location] = batch
        self._cached_bytes += size
        while self._cached_bytes > self._bytes_max:
            _, dropped = cache.popitem(last=False)
            self._cached_bytes -= len(dropped.buffer)

    def start(self, task: BatchTask) -> bool:
        """Queue a task, which `advance` serves; False: the queue is full."""
        if len(self._queue) >= self._tasks_max:
            return False
        task.queued = True
        self._queue.append(task)
        return True

    def drop_tasks(self) -> None:
        """Drop all tasks without an answer: their seqnums are wrong now."""
        self._queue.clear()
        for tasks in self._reading.values():
            tasks.clear()

    def advance(self) -> list[Effect]:
        """Serve tasks from memory, and start reads for them within the bound."""
        effects: list[Effect] = []
        queue = self._queue
        while queue and self._reading_bytes < self._reading_bytes_max:
            task = queue[0]
            if task.full or not task.todo:
                queue.popleft()
                task.queued = False
                effects += _finished(task)
                continue
            location = task.todo.popleft()
            if (batch := self._cache.get(location)) is not None:
                self._cache.move_to_end(location)
                task.take(location, batch)
            else:
                effects += self._read(location, task)
        return effects

    def _read(self, location: Location, task: BatchTask) -> list[Effect]:
        task.awaited += 1
        if (tasks := self._reading.get(location)) is not None:
            tasks.append(task)
            return []
        self._reading[location] = [task]
        self._reading_bytes += location.length
        self._next_token += 1
        self._tokens[self._next_token] = location
        return [ReadFrame(location, self._next_token)]

    def on_read(self, token: int, payload: bytes | None) -> list[Effect]:
        """Give a batch that was read to the tasks that wait for it; call `advance` afterwards."""
        location = self._tokens.pop(token)
        self._reading_bytes -= location.length
        effects: list[Effect] = []
        batch, damage = parse_batch(location, payload)
        if damage is not None:
            self.damaged.append(damage)
            effects.append(Ignore(location, "a record batch on disk is damaged"))
        elif batch is not None:
            self.remember(location, batch)
        for task in self._reading.pop(location):
            task.awaited -= 1
            task.take(location, batch)
            effects += _finished(task)
        return effects

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        assert self._reading_bytes == sum(location.length for location in self._reading)
        assert set(self._tokens.values()) == set(self._reading)
        assert all(task.queued for task in self._queue)


def _finished(task: BatchTask) -> list[Effect]:
    return [] if task.queued or task.awaited else [Send(task.to, task.answer())]
