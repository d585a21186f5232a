"""The queue as its users see it (API.md, "BokiQueue"; thesis 2.3.3).

A push is one record; a delivery is three: the push, a claim, an acknowledgement. Each takes effect
at its place in the log, so no two consumers ever get the same message at once, and what was
acknowledged is never delivered again.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Final

from xxhash import xxh3_64_intdigest

from bokiqueue import waiting
from bokiqueue.errors import LeaseLostError, QueueSettingsError
from bokiqueue.fold import Message
from bokiqueue.records import (
    PRIORITY_MAX,
    SECONDS_MAX,
    TRIES_MAX,
    Acknowledge,
    DiscardDeadLetters,
    ExtendClaim,
    GiveBack,
    PushMessage,
    ReviveDeadLetters,
    encoded,
)
from bokiqueue.replica import QueueReplica, ShardReplica, replica_of
from indilog import IndilogError, Log
from indilog.sdk import SeqNum

TRIES: Final = 5
LEASE_S: Final = 30.0
BACKOFF_S: Final = 1.0
_BACKOFF_S_MAX: Final = 60.0
"""The longest pause that a block leaves by itself: what failed for a while is soon tried again."""
_LEASE_S_MIN: Final = 0.001


class Delivery:
    """A message that this consumer holds until its lease ends.

    Attributes:
        data: the bytes that were pushed.
        seqnum: its place in the log, by which it is known.
        tries: how often it was delivered, this time included.
        pushed_at: when the log ordered its push, seconds since 1970 (`Record.ordered_at`).
        claim: the place in the log at which this consumer got it.
        shard: the number of its shard.
    """

    def __init__(
        self, queue: Queue, shard: ShardReplica, claim: SeqNum, message: Message, data: bytes
    ) -> None:
        self.data = data
        self.seqnum = message.seqnum
        self.tries = message.tries
        self.pushed_at = message.pushed_at
        self.priority = message.priority
        self._queue = queue
        self.claim = claim
        self.shard = shard.number
        self._shard = shard
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether it was acknowledged or given back."""
        return self._is_done

    async def acknowledge(self) -> None:
        """Say that it is done; it is never delivered again.

        Raises:
            LeaseLostError: the lease has ended before.
            AppendOutcomeUnknownError: it may have been in time or not, as after `Log.append`.
        """
        await self._tell(Acknowledge(self.claim, (self.seqnum,)))

    async def give_back(self, *, delay: float = 0.0) -> None:
        """Say that it is not done: it is delivered again, after `delay` seconds, or is dead.

        Raises:
            LeaseLostError: as `acknowledge`.
        """
        _check_seconds("A delay", delay)
        await self._tell(GiveBack(self.claim, (self.seqnum,), delay), wakes=True)

    async def extend(self, lease: float = LEASE_S) -> None:
        """Hold it for `lease` seconds from now.

        Raises:
            LeaseLostError: as `acknowledge`.
        """
        _check_lease(lease)
        await self._tell(ExtendClaim(self.claim, (self.seqnum,), lease))

    async def _tell(
        self, command: Acknowledge | GiveBack | ExtendClaim, *, wakes: bool = False
    ) -> None:
        queue, shard = self._queue, self._shard
        seqnum = await queue.replica.tell(queue.log, shard, encoded(command), wakes=wakes)
        if not shard.outcome(seqnum):
            raise LeaseLostError(
                f"The lease on the message at seqnum {self.seqnum} ended before; "
                "it is delivered again. Take a longer lease, or extend it in time."
            )
        self._is_done = not isinstance(command, ExtendClaim)
        await queue.replica.save(queue.log, shard)

    def __repr__(self) -> str:
        return f"Delivery(seqnum={self.seqnum}, tries={self.tries}, data={self.data[:32]!r})"


class Popping:
    """`async with queue.pop() as msg`: acknowledged on leaving the block, given back if it raises,
    unless the block has done either itself.

    A message whose block raises is given back with a growing pause, so that a short outage of a
    dependency does not make dead letters of all messages meanwhile. A message whose block is
    cancelled is ready for others at once. `msg` is None if nothing came in time.
    """

    def __init__(self, queue: Queue, wait: float | None, lease: float, backoff: float) -> None:
        _check_backoff(backoff)
        self._queue = queue
        self._wait = wait
        self._lease = lease
        self._backoff = backoff
        self._delivery: Delivery | None = None

    async def __aenter__(self) -> Delivery | None:
        self._delivery = await self._queue.take(wait=self._wait, lease=self._lease)
        return self._delivery

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._delivery is None or self._delivery.is_done:
            return
        if kind is None:
            await self._delivery.acknowledge()
            return
        try:
            await self._delivery.give_back(delay=self._pause(self._delivery.tries, kind))
        except IndilogError:
            return  # the lease gives it back; what the block raised matters more

    def _pause(self, tries: int, kind: type[BaseException]) -> float:
        if not issubclass(kind, Exception):
            return 0.0
        doublings = min(tries, TRIES_MAX) - 1
        return min(_BACKOFF_S_MAX, self._backoff * 2.0**doublings)


@dataclass(frozen=True)
class ShardStats:
    """Figures of one shard; ages in seconds."""

    depth: int
    """Messages that are not acknowledged; dead letters not counted."""
    leased: int
    dead: int
    oldest_age_s: float
    """Since the oldest of them was pushed; 0: there is none."""


@dataclass(frozen=True)
class Stats(ShardStats):
    """Figures of a queue: the sum of its shards, the oldest age of all."""

    shards: tuple[ShardStats, ...]


class Queue:
    """A queue on a log. Cheap to make; what is kept in memory is shared by a process's queues.

    Guarantees: a message whose push returned is durable and is delivered until it is acknowledged
    or has been tried `tries` times, then it is a dead letter. At any place of the log at most one
    consumer holds it. The first deliveries of a shard are in the order of pushes, by priority
    first. Delivery is at least once; an acknowledgement counts once.

    Args:
        log: where the messages live; it may also hold other records.
        name: of the queue, within the log.
        shards: how many can be worked on at once without standing in each other's way, fixed when
            the queue is first used.
        tries: deliveries of a message before it is a dead letter, of those that this queue pushes.
        replica: instead of the shared one.
    """

    def __init__(
        self,
        log: Log,
        name: str,
        *,
        shards: int = 4,
        tries: int = TRIES,
        replica: QueueReplica | None = None,
    ) -> None:
        if type(tries) is not int or not 1 <= tries <= TRIES_MAX:
            raise QueueSettingsError(f"tries is 1 to {TRIES_MAX}, not {tries!r:.40}.")
        self.log = log
        self.name = name
        self.tries = tries
        self.replica = replica_of(log, name, shards) if replica is None else replica

    # --- producers

    async def push(
        self,
        data: bytes,
        *,
        shard_key: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
    ) -> SeqNum:
        """Put a message into the queue and return its place in the log.

        Args:
            data: the message, up to the log's `record_bytes_max` less a few bytes.
            shard_key: messages of one key go to one shard, so they are first delivered in order.
            priority: 0 to 9; higher ones are delivered first.
            delay: seconds before it is delivered.

        Raises:
            QueueSettingsError: a priority or delay that cannot be. Otherwise as `Log.append`; after
            `AppendOutcomeUnknownError` the message may be in the queue.
        """
        if not isinstance(data, bytes):
            raise TypeError(f"A message is bytes, not {type(data).__name__}; encode it first.")
        if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
            raise QueueSettingsError(f"A priority is 0 to {PRIORITY_MAX}, not {priority!r:.40}.")
        _check_seconds("A delay", delay)
        await self.replica.open(self.log)
        tags = self.replica.tags
        if shard_key is None:
            place = next(self.replica.rotation)
        else:
            place = xxh3_64_intdigest(shard_key.encode())
        number = place % len(tags.shards)
        push = PushMessage(data, priority, delay, self.tries)
        seqnum = await self.log.append(encoded(push), tags=[tags.shards[number], tags.pushed])
        self.replica.shards[number].note_news(seqnum + 1)
        return seqnum

    # --- consumers

    def pop(
        self, *, wait: float | None = None, lease: float = LEASE_S, backoff: float = BACKOFF_S
    ) -> Popping:
        """Take the next message for the time of an `async with` block.

        Args:
            wait: seconds to wait for one; without, None comes at once if there is none.
            lease: seconds after which it is delivered again if it is not acknowledged.
            backoff: seconds, 0 to 60, before it is delivered again if the block raises, doubled
                with each delivery so far, up to 60. A block that is cancelled gives it back at
                once.

        Raises:
            QueueSettingsError: a backoff that cannot be. On entering the block as `take`.
        """
        return Popping(self, wait, lease, backoff)

    async def take(self, *, wait: float | None = None, lease: float = LEASE_S) -> Delivery | None:
        """Take the next message; the caller acknowledges it or gives it back.

        None is proven: no message whose push had returned before the call was ready.

        Raises:
            AppendOutcomeUnknownError: a message may have been claimed; it comes again when the
                lease ends. Take again.
        """
        _check_lease(lease)
        replica, log = self.replica, self.log
        await replica.open(log)
        ends = None if wait is None else waiting.seconds_now() + wait
        since: SeqNum | None = None
        while True:
            try:
                if (delivery := await self._claimed(lease)) is not None:
                    return delivery
                if since is None:
                    # Everything below it is seen from here on, by whomever it was pushed.
                    since = await log.tail()
                    continue
                left = 0.0 if ends is None else ends - waiting.seconds_now()
                if left <= 0:
                    if await replica.has_failed_claims():
                        continue
                    return None
            except BaseException:
                replica.news.pass_on()  # this one was woken, or others left a message to it
                raise
            since = await replica.news.wait(log, since, left)

    async def _claimed(self, lease: float) -> Delivery | None:
        replica, log = self.replica, self.log
        while (shard := await replica.next_available(log)) is not None:
            claimed = await replica.claim(log, shard, lease)
            if claimed is None:
                continue
            claim, seqnum = claimed
            if (message := shard.fold.message(seqnum)) is not None:
                data = await replica.data(log, seqnum)
                return Delivery(self, shard, claim, message, data)
        return None

    # --- people who look after it

    async def stats(self) -> Stats:
        """Return figures as of now."""
        await self._refresh()
        now = await self.log.now()
        parts = tuple(_stats_of(shard, now) for shard in self.replica.shards)
        return Stats(
            depth=sum(part.depth for part in parts),
            leased=sum(part.leased for part in parts),
            dead=sum(part.dead for part in parts),
            oldest_age_s=max(part.oldest_age_s for part in parts),
            shards=parts,
        )

    async def dead_letters(self, limit: int = 100) -> list[tuple[SeqNum, bytes]]:
        """Return the dead letters that died first, of every shard in turn: seqnum and bytes."""
        await self._refresh()
        dead = [message.seqnum for shard in self.replica.shards for message in shard.fold.dead]
        return [(seqnum, await self.replica.data(self.log, seqnum)) for seqnum in dead[:limit]]

    async def revive(self, seqnum: SeqNum) -> bool:
        """Deliver a dead letter again, with all its tries; False: it is none (any more)."""
        return await self._on_dead(seqnum, encoded(ReviveDeadLetters((seqnum,))), wakes=True)

    async def discard(self, seqnum: SeqNum) -> bool:
        """Forget a dead letter; False: it is none (any more)."""
        return await self._on_dead(seqnum, encoded(DiscardDeadLetters((seqnum,))))

    async def _on_dead(self, seqnum: SeqNum, command: bytes, *, wakes: bool = False) -> bool:
        await self._refresh()
        for shard in self.replica.shards:
            if any(message.seqnum == seqnum for message in shard.fold.dead):
                told = await self.replica.tell(self.log, shard, command, wakes=wakes)
                return bool(shard.outcome(told))
        return False

    async def _refresh(self) -> None:
        await self.replica.open(self.log)
        tail = await self.log.tail()
        for shard in self.replica.shards:
            await self.replica.catch_up(self.log, shard, tail, is_in_session=True)


def _stats_of(shard: ShardReplica, now: float) -> ShardStats:
    fold = shard.fold
    oldest = fold.oldest
    age = 0.0 if oldest is None else max(0.0, now - oldest.pushed_at)
    return ShardStats(len(fold), fold.leased, len(fold.dead), age)


def _check_seconds(what: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not 0 <= seconds <= SECONDS_MAX:
        raise QueueSettingsError(f"{what} is 0 to {SECONDS_MAX:,.0f} seconds, not {seconds!r:.40}.")


def _check_backoff(backoff: object) -> None:
    if not isinstance(backoff, int | float) or not 0 <= backoff <= _BACKOFF_S_MAX:
        raise QueueSettingsError(
            f"A backoff is 0 to {_BACKOFF_S_MAX:.0f} seconds, not {backoff!r:.40}; "
            "give_back(delay=...) in the block takes longer ones."
        )


def _check_lease(lease: float) -> None:
    _check_seconds("A lease", lease)
    if lease < _LEASE_S_MIN:
        raise QueueSettingsError(f"A lease is at least {_LEASE_S_MIN} seconds, not {lease}.")
