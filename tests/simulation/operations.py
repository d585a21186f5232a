"""The operations of sessions: one entry of `OPERATIONS` for each kind, drawn and performed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeAlias

from indilog.base.errors import IndilogError, TrimmedError
from indilog.base.ids import MAX_SEQNUM
from indilog.base.log import After, Entry, Log, Record
from indilog.base.retention import AGE_S_MIN
from indilog.testing.simulation import SimulatedCluster
from tests.simulation.history import BATCH_HEADER_BYTES, Operation, Seen, seen, stored_bytes

LOGS: Final = ("orders", "audit", "orders/a", "x")
TAGS: Final = ("a", "b", "c", "d", "rare", "never")
CONTESTED: Final = ("last0", "last1")
"""Tags of conditional appends only."""
_TAG_WEIGHTS: Final = (8, 4, 2, 1, 0.3)
_BATCH_MAX: Final = 4
"""Records of an ordinary atomic batch."""
_LARGE_BATCH_MAX: Final = 100
_AT_THE_LIMIT: Final = 0.03
"""The share of appends of the largest allowed size, or a little more."""

Perform: TypeAlias = Callable[[Log, Operation], Awaitable[Any]]
Draw: TypeAlias = Callable[["Habits", random.Random, Operation], None]


class Kind(NamedTuple):
    """One kind of operation.

    Attributes:
        weight: its frequency relative to the other kinds.
        draw: fills in the arguments.
        perform: makes the call; returns the value that the history gets.
    """

    weight: float
    draw: Draw
    perform: Perform


class Habits:
    """The values that the sessions of one run share.

    Attributes:
        logs: the logs that they use.
        fresh_tags: the latest tags that were made up for a single record.
        bytes_max: the largest size of most records.
        large_batches: whether the limit of waiting appends has room for the largest batches.
    """

    def __init__(
        self, cluster: SimulatedCluster, chance: random.Random, history: list[Operation]
    ) -> None:
        self.world = cluster.world
        self.history = history
        self.limits = cluster.config.cluster
        self.logs = LOGS[: chance.choice((1, 2, 2, 2, 4))]
        self.fresh_tags = ["new0"]
        self._fresh = chance.choice((0.0, 0.0, 0.1, 0.7))
        self.bytes_max = chance.choice((8, 8, 100, 1500))
        self.large_batches = cluster.config.node.appends.append_pending_max > _LARGE_BATCH_MAX

    @property
    def batch_max(self) -> int:
        """Most records of a batch."""
        return _LARGE_BATCH_MAX if self.large_batches else _BATCH_MAX

    def tags(self, chance: random.Random) -> tuple[str, ...]:
        """Draw the tags of a record; some were never used before."""
        count = chance.choice((0, 1, 1, 1, 2, 3))
        tags = chance.choices(TAGS[:5], _TAG_WEIGHTS, k=count)
        if chance.random() < self._fresh:
            if chance.random() < 0.7:
                self.fresh_tags = [*self.fresh_tags[-5:], f"new{chance.randrange(1 << 30)}"]
            tags.append(chance.choice(self.fresh_tags))
        return tuple(dict.fromkeys(tags))

    def tag(self, chance: random.Random) -> str | None:
        """Draw the tag of a read; None: all records of the log."""
        return chance.choice((None, *TAGS, *self.fresh_tags[-2:]))

    def data(self, chance: random.Random, operation: Operation, place: int) -> bytes:
        """Return bytes that no other record has."""
        return _named(operation, place, chance.randint(1, self.bytes_max))


def _named(operation: Operation, place: int, size_bytes: int) -> bytes:
    return f"{operation.number}.{place}".encode().ljust(size_bytes, b".")


def _draw_append(habits: Habits, chance: random.Random, operation: Operation) -> None:
    data, tags = habits.data(chance, operation, 0), habits.tags(chance)
    if chance.random() < _AT_THE_LIMIT:
        beyond = chance.choice((0, 0, 1))
        operation.too_large = beyond > 0
        if chance.random() < 0.5:
            data = _named(operation, 0, habits.limits.record_bytes_max + beyond)
        else:
            tags = tuple(f"t{n}" for n in range(habits.limits.record_tags_max + beyond))
    operation.entries = ((data, tags),)


def _draw_batch(habits: Habits, chance: random.Random, operation: Operation) -> None:
    if habits.large_batches and chance.random() < _AT_THE_LIMIT:
        _draw_large_batch(habits, chance, operation)
        return
    operation.entries = tuple(
        (habits.data(chance, operation, place), habits.tags(chance))
        for place in range(chance.randint(1, _BATCH_MAX))
    )


def _draw_large_batch(habits: Habits, chance: random.Random, operation: Operation) -> None:
    """Draw a batch of exactly the largest size, or of one byte more."""
    operation.too_large = chance.random() < 0.3
    left = habits.limits.batch_bytes_max + operation.too_large - BATCH_HEADER_BYTES
    entries: list[tuple[bytes, tuple[str, ...]]] = []
    while left:
        place, tags = len(entries), habits.tags(chance)
        data = _named(operation, place, chance.randint(1000, 1800))
        size = stored_bytes(operation.log, data, tags)
        if left < size + 1000:  # the last one takes what is left
            data = _named(operation, place, len(data) + left - size)
            size = left
        if len(data) > habits.limits.record_bytes_max:  # half now, half next
            data = data[: len(data) // 2]
            size = stored_bytes(operation.log, data, tags)
        entries.append((data, tags))
        left -= size
    operation.entries = tuple(entries)


def _draw_read(habits: Habits, chance: random.Random, operation: Operation) -> None:
    about = max((_highest(o) for o in habits.history[-20:]), default=0)
    operation.tag = habits.tag(chance)
    near = max(0, about - chance.randint(0, 12))
    operation.bound = chance.choice((0, MAX_SEQNUM, near, near, chance.randint(0, about + 3)))
    operation.fresh = chance.random() < 0.2
    operation.limit = chance.choice((1, 3, 10, 100))
    operation.wait_s = chance.choice((0.001, 0.05, 0.3))


def _highest(operation: Operation) -> int:
    value = operation.value
    if operation.outcome != "ok" or not value or operation.kind == "retention":
        return 0
    if isinstance(value, int):
        return value
    last = value[-1]
    return last if isinstance(last, int) else last.seqnum


def _draw_nothing(_habits: Habits, _chance: random.Random, _operation: Operation) -> None:
    pass


def _seen(*records: Record | None) -> tuple[Seen, ...]:
    found = [record for record in records if record is not None]
    for record in found:
        aux = record.aux
        assert aux in (None, _aux_of(record.seqnum)), f"{aux!r} is no aux data of {record}"
    return tuple(map(seen, found))


def _aux_of(seqnum: int) -> bytes:
    return b"aux of %d" % seqnum


async def _append(log: Log, operation: Operation) -> list[int]:
    ((data, tags),) = operation.entries
    return [await log.append(data, tags=tags)]


async def _append_batch(log: Log, operation: Operation) -> list[int]:
    return await log.append_batch([Entry(data, tags) for data, tags in operation.entries])


def _draw_conditional(habits: Habits, chance: random.Random, operation: Operation) -> None:
    operation.tag = chance.choice(CONTESTED)
    operation.fresh = chance.random() < 0.5
    operation.entries = tuple(
        (habits.data(chance, operation, place), tags)
        for place, tags in enumerate(chance.choice((((operation.tag,),), ((), (operation.tag,)))))
    )


async def _append_if(log: Log, operation: Operation) -> list[int]:
    """Append after the last record that the session sees; another session may be faster."""
    tag = operation.tag
    assert tag is not None, "a condition names a tag"
    try:
        last = await log.read_prev(tag, fresh=operation.fresh)
        operation.after = None if last is None else last.seqnum
    except TrimmedError as error:
        operation.after = error.first_seqnum - 1
    entries = [Entry(data, tags) for data, tags in operation.entries]
    return await log.append_batch(entries, after=After(tag, operation.after))


async def _read_next(log: Log, operation: Operation) -> tuple[Seen, ...]:
    return _seen(await log.read_next(operation.tag, operation.bound, fresh=operation.fresh))


async def _wait(log: Log, operation: Operation) -> tuple[Seen, ...]:
    found = await log.read_next(
        operation.tag, operation.bound, wait=operation.wait_s, fresh=operation.fresh
    )
    return _seen(found)


async def _read_prev(log: Log, operation: Operation) -> tuple[Seen, ...]:
    return _seen(await log.read_prev(operation.tag, operation.bound, fresh=operation.fresh))


async def _read_range(log: Log, operation: Operation) -> tuple[Seen, ...]:
    page = await log.read_range(
        operation.tag, operation.bound, limit=operation.limit, fresh=operation.fresh
    )
    return _seen(*page)


async def _read(log: Log, operation: Operation) -> tuple[Seen, ...]:
    return _seen(await log.read(operation.bound, fresh=operation.fresh))


def subscription(log: Log, tag: str | None, bound: int) -> AsyncGenerator[Record, None]:
    """Return a subscription that can be closed."""
    records = log.subscribe(tag, bound)
    assert isinstance(records, AsyncGenerator), "it is one"
    return records


async def _subscribe(log: Log, operation: Operation) -> tuple[Seen, ...]:
    """Take up to `count` records for a time; records before an error count."""
    found: list[Record] = []
    records = subscription(log, operation.tag, operation.bound)
    try:
        async with asyncio.timeout(operation.wait_s):
            async for record in records:
                found.append(record)
                if len(found) == operation.limit:
                    break
    except TimeoutError:
        pass
    except IndilogError:
        if not found:
            raise
    await records.aclose()  # not if the process ends meanwhile: then nothing is cleaned up
    return _seen(*found)


async def _tail(log: Log, _: Operation) -> int:
    return await log.tail()


def _draw_trim(habits: Habits, chance: random.Random, operation: Operation) -> None:
    _draw_read(habits, chance, operation)
    about = max((_highest(o) for o in habits.history[-20:]), default=0)
    operation.bound = max(0, about - chance.randint(0, 40))


async def _trim(log: Log, operation: Operation) -> None:
    await log.trim(operation.bound, tag=operation.tag)


def _draw_time(habits: Habits, chance: random.Random, operation: Operation) -> None:
    now_s = habits.world.now_s
    operation.time_s = now_s - chance.choice((0.001, 0.1, 1.0)) * chance.random()


async def _find_time(log: Log, operation: Operation) -> int:
    return await log.find_time(operation.time_s)


def _draw_policy(_habits: Habits, chance: random.Random, operation: Operation) -> None:
    bound = chance.choice(("age", "age", "size", "size", "both", "none"))
    if bound in {"age", "both"}:
        operation.age_s = chance.choice((AGE_S_MIN, 1.2, 2.0))
    if bound in {"size", "both"}:
        operation.size_bytes = chance.choice((1, 100, 1000, 10_000))


async def _set_retention(log: Log, operation: Operation) -> None:
    await log.set_retention(age_s=operation.age_s, size_bytes=operation.size_bytes)


async def _retention(log: Log, _: Operation) -> tuple[float | None, int | None]:
    policy = await log.retention()
    return policy.age_s, policy.size_bytes


async def _set_aux(log: Log, operation: Operation) -> None:
    await log.set_aux(operation.bound, _aux_of(operation.bound))


OPERATIONS: dict[str, Kind] = {
    "append": Kind(8, _draw_append, _append),
    "append_batch": Kind(2, _draw_batch, _append_batch),
    "append_if": Kind(2, _draw_conditional, _append_if),
    "read_next": Kind(4, _draw_read, _read_next),
    "read_prev": Kind(3, _draw_read, _read_prev),
    "read_range": Kind(2, _draw_read, _read_range),
    "read": Kind(2, _draw_read, _read),
    "wait": Kind(1, _draw_read, _wait),
    "subscribe": Kind(1, _draw_read, _subscribe),
    "tail": Kind(0.7, _draw_nothing, _tail),
    "find_time": Kind(0.7, _draw_time, _find_time),
    "trim": Kind(0.3, _draw_trim, _trim),
    "set_retention": Kind(0.2, _draw_policy, _set_retention),
    "retention": Kind(0.3, _draw_nothing, _retention),
    "set_aux": Kind(0.5, _draw_read, _set_aux),
}
