"""Batches read from memory or disk: a cache, and shared, bounded reads (ARCHITECTURE 8 and 9).

A task names the batches that it needs, in order, and receives them one by one. The task keeps only
the parts of each batch that it needs. Tasks are served in the order of their arrival, but a task
that waits for cold storage does not delay the tasks after it. The bytes being read are bounded over
all tasks, so many readers or long pages cannot exhaust memory.

`StorageNode` owns the one `BatchReads`. The tasks are `RecordPage`, `IndexPage` and `BatchPage`.
"""

from __future__ import annotations

import abc
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import LocalId, NodeId
from indilog.kernel.cold import ColdBatchRead, ColdObject, ReadColdBatch
from indilog.kernel.records import RecordBatch
from indilog.roles.role import AskCold, Effect, Ignore, Location, ReadFrame, Send
from indilog.wire.messages import Message

FIRST_COLD_SEGMENT: Final = 1 << 31
"""The least segment number of a `Location` on cold storage. The segment of such a location is this
number plus the number of the object. Its offset is the first localid of the batch.
"""


def cold_number(location: Location) -> int | None:
    """Return the number of the cold object with a batch; None: it is in the journal."""
    return location.segment - FIRST_COLD_SEGMENT if location.segment >= FIRST_COLD_SEGMENT else None


class DamagedBatch(NamedTuple):
    """A batch that is not intact.

    Attributes:
        location: where it was written.
        readable: whether any bytes could be read.
        records: the damaged records, if only the data of some records is damaged.
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
        awaited: number of batches that are being read for the task.
        queued: whether the task is in a queue of `BatchReads`, and so may request more batches.
        dropped: whether the task ends without a message; the receiver then asks again.
        cold_left_bytes: bytes of batches on cold storage that the task may still request; None: any
            number. The last requested batch may exceed this limit. Without the limit, a page could
            take longer than its receiver waits.
    """

    cold_left_bytes: int | None = None

    def __init__(self, to: NodeId, todo: Iterable[Location]) -> None:
        self.to = to
        self.todo = deque(todo)
        self.awaited = 0
        self.queued = False
        self.dropped = False

    def miss(self, location: Location) -> None:
        """Leave out a batch that cold storage did not return in time."""
        del location
        self.dropped = True

    @property
    @abc.abstractmethod
    def full(self) -> bool:
        """Whether the message is full; remaining batches are then left out."""

    @abc.abstractmethod
    def take(self, location: Location, batch: RecordBatch | None) -> None:
        """Take the needed part of a requested batch; None: the batch is damaged or was deleted.

        The data of some records of the batch may be damaged (`RecordBatch.damaged`).
        """

    @abc.abstractmethod
    def answer(self) -> Message:
        """Return the message when all requested batches were taken."""


class BatchReads:
    """Serves batches to tasks.

    While `cold_max` reads of cold storage are in progress, further tasks that need such a read wait
    in a queue of their own. So they do not delay other tasks.

    Args:
        bytes_max: largest number of bytes in the cache.
        reading_bytes_max: largest number of bytes being read from the journal.
        tasks_max: largest number of tasks in both queues together.
        cold_max: largest number of reads of cold storage in progress.
        objects: the objects on cold storage, by number.

    Attributes:
        cold_reads: number of batches requested from cold storage in this incarnation.
        cold_misses: number of these batches that cold storage did not return in time.
    """

    def __init__(
        self,
        *,
        bytes_max: int,
        reading_bytes_max: int,
        tasks_max: int,
        cold_max: int = 1,
        objects: Mapping[int, ColdObject] | None = None,
    ) -> None:
        self._cache: OrderedDict[Location, RecordBatch] = OrderedDict()
        """Least recently used batches come first."""
        self._cached_bytes = 0
        self._bytes_max = bytes_max
        self._reading_bytes_max = reading_bytes_max
        self._tasks_max = tasks_max
        self._reading_bytes = 0
        self._reading: dict[Location, list[tuple[BatchTask, Location]]] = {}
        """By place being read: the waiting tasks, and the place by which each named the batch."""
        self._moved: dict[Location, Location] = {}
        """By old place, the new place of each batch that moved before a queued task
        requested it.
        """
        self._tokens: dict[int, Location] = {}
        self._next_token = 0
        self._queue: deque[BatchTask] = deque()
        self._cold_queue: deque[BatchTask] = deque()
        """Tasks whose next batch is on cold storage."""
        self._cold_max = cold_max
        self._objects: Mapping[int, ColdObject] = {} if objects is None else objects
        self._cold_tokens: set[int] = set()
        self.cold_reads = 0
        self.cold_misses = 0
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
        if len(self._queue) + len(self._cold_queue) >= self._tasks_max:
            return False
        task.queued = True
        self._queue.append(task)
        return True

    def drop_tasks(self) -> None:
        """Drop all tasks without an answer, because the seqnums in them are outdated."""
        self._queue.clear()
        self._cold_queue.clear()
        self._moved.clear()
        for tasks in self._reading.values():
            tasks.clear()

    def note_moved(self, places: Sequence[tuple[Location, Location]]) -> None:
        """Note that batches have moved, as pairs of old and new place.

        A queued task may still name a batch by its old place after a rewrite of the segment has
        removed the batch from that place.
        """
        if not places:
            return
        awaited = {place for task in (*self._queue, *self._cold_queue) for place in task.todo}
        known = (*self._moved.items(), *places)
        self._moved = {before: place for before, place in known if before in awaited}

    def advance(self) -> list[Effect]:
        """Serve cached batches to tasks, and start reads for other batches within the bounds."""
        effects: list[Effect] = []
        queue = self._queue
        while queue and self._reading_bytes < self._reading_bytes_max:
            task = queue[0]
            if task.full or not task.todo or self._has_enough(task):
                queue.popleft()
                task.queued = False
                effects += _finished(task)
                continue
            named = task.todo[0]
            location = self._place_of(named)
            if (batch := self._cache.get(location)) is not None:
                task.todo.popleft()
                self._cache.move_to_end(location)
                task.take(named, batch)
            elif self._must_wait(location):
                self._cold_queue.append(queue.popleft())
            else:
                task.todo.popleft()
                effects += self._read(location, task, named)
        return effects

    def _place_of(self, named: Location) -> Location:
        return self._moved.get(named, named)

    def _has_enough(self, task: BatchTask) -> bool:
        location = self._place_of(task.todo[0])
        if task.cold_left_bytes is None or task.cold_left_bytes > 0:
            return False
        return cold_number(location) is not None and location not in self._cache

    def _must_wait(self, location: Location) -> bool:
        is_cold = cold_number(location) is not None and location not in self._reading
        return is_cold and len(self._cold_tokens) >= self._cold_max

    def _read(self, location: Location, task: BatchTask, named: Location) -> list[Effect]:
        task.awaited += 1
        if task.cold_left_bytes is not None and cold_number(location) is not None:
            task.cold_left_bytes -= location.length
        if (tasks := self._reading.get(location)) is not None:
            tasks.append((task, named))
            return []
        if (number := cold_number(location)) is not None:
            return self._read_cold(location, number, task, named)
        self._reading[location] = [(task, named)]
        self._reading_bytes += location.length
        self._next_token += 1
        self._tokens[self._next_token] = location
        return [ReadFrame(location, self._next_token)]

    def _read_cold(
        self, location: Location, number: int, task: BatchTask, named: Location
    ) -> list[Effect]:
        if (source := self._objects.get(number)) is None:
            # The object was deleted after the task began, because all records in it are trimmed.
            task.awaited -= 1
            task.take(named, None)
            return []
        self._reading[location] = [(task, named)]
        self._next_token += 1
        self._tokens[self._next_token] = location
        self._cold_tokens.add(self._next_token)
        self.cold_reads += 1
        return [AskCold(ReadColdBatch(self._next_token, source, location.offset))]

    def on_cold_read(self, answer: ColdBatchRead) -> list[Effect]:
        """Pass a batch from cold storage to its tasks; call `advance` afterwards."""
        self._cold_tokens.remove(answer.token)
        self._queue.extendleft(reversed(self._cold_queue))
        self._cold_queue.clear()
        if not answer.away:
            return self.on_read(answer.token, answer.payload)
        self.cold_misses += 1
        location = self._tokens.pop(answer.token)
        effects: list[Effect] = [Ignore(location, "cold storage does not answer")]
        for task, named in self._reading.pop(location):
            task.awaited -= 1
            task.miss(named)
            effects += _finished(task)
        return effects

    def on_read(self, token: int, payload: bytes | None) -> list[Effect]:
        """Pass a batch that was read to the tasks that wait for it; call `advance` afterwards."""
        location = self._tokens.pop(token)
        is_cold = cold_number(location) is not None
        if not is_cold:
            self._reading_bytes -= location.length
        effects: list[Effect] = []
        batch, damage = parse_batch(location, payload)
        if is_cold and batch is not None and batch.header.first != location.offset:
            batch, damage = None, DamagedBatch(location, readable=True)
        if damage is not None:
            self.damaged.append(damage)
            effects.append(Ignore(location, "a record batch on disk is damaged"))
        elif batch is not None:
            self.remember(location, batch)
        for task, named in self._reading.pop(location):
            task.awaited -= 1
            task.take(named, batch)
            effects += _finished(task)
        return effects

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        local = [place for place in self._reading if cold_number(place) is None]
        assert self._reading_bytes == sum(location.length for location in local)
        assert len(self._reading) - len(local) == len(self._cold_tokens) <= self._cold_max
        assert not self._cold_queue or self._cold_tokens, "a read that ends lets tasks continue"
        assert set(self._tokens.values()) == set(self._reading)
        assert all(task.queued for task in (*self._queue, *self._cold_queue))


def _finished(task: BatchTask) -> list[Effect]:
    if task.queued or task.awaited or task.dropped:
        return []
    return [Send(task.to, task.answer())]
