"""The public interface of BokiQueue (API.md, "BokiQueue"; thesis 2.3.3).

A delivered message is three records: a push, a claim, an acknowledgement. Each takes effect at its
place in the log. So no two consumers hold a message at the same time, and an acknowledged message
is never delivered again.
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
    encode,
)
from bokiqueue.replica import QueueReplica, ShardReplica, replica_of
from indilog import IndilogError, Log
from indilog.sdk import SeqNum

TRIES: Final = 5
LEASE_S: Final = 30.0
BACKOFF_S: Final = 1.0
_BACKOFF_S_MAX: Final = 60.0
"""Seconds of the longest pause after a failed block, so that messages are soon retried."""
_LEASE_S_MIN: Final = 0.001


class Delivery:
    """A message held by this consumer until its lease ends.

    Attributes:
        data: the bytes that were pushed.
        seqnum: its place in the log, and its identity.
        tries: deliveries of it so far, including this one.
        pushed_at: `Record.ordered_at` of its push, seconds since 1970.
        claim: seqnum of the claim by which this consumer got it.
        shard: number of its shard.
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
        """Whether it was acknowledged or returned to the queue."""
        return self._is_done

    async def acknowledge(self) -> None:
        """Remove the message from the queue; it is never delivered again.

        Raises:
            LeaseLostError: the lease had ended before.
            AppendOutcomeUnknownError: the message may have been acknowledged in time, as after
                `Log.append`.
        """
        await self._append_command(Acknowledge(self.claim, (self.seqnum,)))

    async def give_back(self, *, delay: float = 0.0) -> None:
        """Return the message to the queue: it is delivered again after `delay` seconds. After its
        last try it becomes a dead letter.

        Raises:
            LeaseLostError: as `acknowledge`.
        """
        _check_seconds("A delay", delay)
        await self._append_command(GiveBack(self.claim, (self.seqnum,), delay), wakes=True)

    async def extend(self, lease: float = LEASE_S) -> None:
        """Extend the lease to `lease` seconds from now.

        Raises:
            LeaseLostError: as `acknowledge`.
        """
        _check_lease(lease)
        await self._append_command(ExtendClaim(self.claim, (self.seqnum,), lease))

    async def _append_command(
        self, command: Acknowledge | GiveBack | ExtendClaim, *, wakes: bool = False
    ) -> None:
        queue, shard = self._queue, self._shard
        seqnum = await queue.replica.append_command(queue.log, shard, encode(command), wakes=wakes)
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
    """`async with queue.pop() as msg`: acknowledges the message at the end of the block. If the
    block raises, the message returns to the queue. The block may also call `acknowledge` or
    `give_back` itself.

    After an error, the pause before the next delivery grows with each try. So a dependency that is
    unavailable for a while does not turn messages into dead letters. If the block is cancelled, the
    message is ready again at once. `msg` is None if no message came in time.
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
            return  # the lease returns it; the error of the block has priority

    def _pause(self, tries: int, kind: type[BaseException]) -> float:
        if not issubclass(kind, Exception):
            return 0.0
        doublings = min(tries, TRIES_MAX) - 1
        return min(_BACKOFF_S_MAX, self._backoff * 2.0**doublings)


@dataclass(frozen=True)
class ShardStats:
    """Figures of one shard; ages in seconds."""

    depth: int
    """Messages that are not acknowledged, without dead letters."""
    leased: int
    dead: int
    oldest_age_s: float
    """Seconds since the oldest of the `depth` messages was pushed; 0: there is none."""


@dataclass(frozen=True)
class Stats(ShardStats):
    """Figures of a queue: the sums over its shards, and the age of the oldest message."""

    shards: tuple[ShardStats, ...]


class Queue:
    """A queue on a log. Objects are cheap: all of one queue in a process share their state.

    Guarantees: when a push has returned, the message is durable. It is delivered until it is
    acknowledged, or `tries` times; then it is a dead letter. At each place of the log at most one
    consumer holds it. First deliveries of a shard are in the order of priority, then of pushes.
    Delivery is at least once; an acknowledgement takes effect once.

    Args:
        log: of the messages; it may also hold other records.
        name: of the queue, unique in the log.
        shards: parts that can be consumed concurrently without contention (1 to 1,024); fixed at
            the first use of the queue.
        tries: deliveries before a message becomes a dead letter (1 to 1,000), for messages pushed
            by this object.
        replica: the state of the queue, if it is not to be shared with other objects of the
            process.
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
        """Add a message to the queue and return its seqnum.

        Args:
            data: the message, at most the log's `record_bytes_max` less a few bytes.
            shard_key: messages of one key go to one shard, so their first deliveries are in order.
            priority: 0 to 9; higher ones are delivered first.
            delay: seconds before the first delivery.

        Raises:
            QueueSettingsError: invalid priority or delay. Otherwise as `Log.append`; after
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
        seqnum = await self.log.append(encode(push), tags=[tags.shards[number], tags.pushed])
        self.replica.shards[number].note_records_below(seqnum + 1)
        return seqnum

    # --- consumers

    def pop(
        self, *, wait: float | None = None, lease: float = LEASE_S, backoff: float = BACKOFF_S
    ) -> Popping:
        """Take the next message for an `async with` block.

        Args:
            wait: seconds to wait for a message; None: do not wait.
            lease: seconds after which an unacknowledged message is delivered again.
            backoff: seconds (0 to 60) before the next delivery if the block raises, doubled for
                each delivery so far, up to 60. After a cancelled block there is no pause.

        Raises:
            QueueSettingsError: invalid backoff. On entering the block, as `take`.
        """
        return Popping(self, wait, lease, backoff)

    async def take(self, *, wait: float | None = None, lease: float = LEASE_S) -> Delivery | None:
        """Take the next message; the caller must acknowledge it or give it back.

        None proves that no message was ready, of those whose push had returned before this call.

        Raises:
            AppendOutcomeUnknownError: a message may have been claimed; it is delivered again when
                the lease ends. Call this again.
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
                    # From here on, this session sees all pushes below it, of all producers.
                    since = await log.tail()
                    continue
                left = 0.0 if ends is None else ends - waiting.seconds_now()
                if left <= 0:
                    if await replica.has_failed_claims():
                        continue
                    return None
            except BaseException:
                replica.notifications.pass_on()  # it was woken, or a message was left to it
                raise
            since = await replica.notifications.wait(log, since, left)

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

    # --- operators

    async def stats(self) -> Stats:
        """Return the current figures."""
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
        """Return the oldest dead letters of each shard, shard by shard: seqnum and bytes."""
        await self._refresh()
        dead = [message.seqnum for shard in self.replica.shards for message in shard.fold.dead]
        return [(seqnum, await self.replica.data(self.log, seqnum)) for seqnum in dead[:limit]]

    async def revive(self, seqnum: SeqNum) -> bool:
        """Deliver a dead letter again, with all its tries; False: no such dead letter."""
        return await self._on_dead(seqnum, encode(ReviveDeadLetters((seqnum,))), wakes=True)

    async def discard(self, seqnum: SeqNum) -> bool:
        """Remove a dead letter; False: no such dead letter."""
        return await self._on_dead(seqnum, encode(DiscardDeadLetters((seqnum,))))

    async def _on_dead(self, seqnum: SeqNum, command: bytes, *, wakes: bool = False) -> bool:
        await self._refresh()
        for shard in self.replica.shards:
            if any(message.seqnum == seqnum for message in shard.fold.dead):
                appended = await self.replica.append_command(self.log, shard, command, wakes=wakes)
                return bool(shard.outcome(appended))
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
