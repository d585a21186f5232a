"""The public interface of BokiQueue (API.md, "BokiQueue"; thesis 2.3.3).

Each delivered message has three records: a push, a claim and an acknowledgement. The order of the
log decides their effects. So no two consumers hold a message at the same time, and an acknowledged
message is never delivered again.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Final

from xxhash import xxh3_64_intdigest

from bokiqueue import waiting
from bokiqueue.errors import LeaseLostError, QueueSettingsError
from bokiqueue.records import (
    PRIORITY_MAX,
    SECONDS_MAX,
    TRIES_MAX,
    Acknowledge,
    DiscardDeadLetters,
    ExtendClaim,
    PushMessage,
    Requeue,
    ReviveDeadLetters,
    encode,
)
from bokiqueue.replica import QueueReplica, ShardReplica, replica_of
from bokiqueue.shard_state import Message
from indilog import IndilogError, Log
from indilog.sdk import SeqNum

TRIES: Final = 5
LEASE_S: Final = 30.0
BACKOFF_S: Final = 1.0
_BACKOFF_S_MAX: Final = 60.0
"""Longest pause in seconds after a failed block."""
_LEASE_S_MIN: Final = 0.001


class Delivery:
    """A message held by this consumer until its lease ends.

    Attributes:
        data: the bytes that were pushed.
        seqnum: seqnum of its push, which identifies the message.
        tries: number of its deliveries so far, including this one.
        pushed_at: when its push was ordered (`Record.ordered_at`), seconds since 1970.
        claim: seqnum of the claim with which this consumer got it.
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
        """Whether the message was acknowledged or returned to the queue."""
        return self._is_done

    async def acknowledge(self) -> None:
        """Remove the message from the queue. It is never delivered again.

        Raises:
            LeaseLostError: the lease had already ended.
            AppendOutcomeUnknownError: the message may or may not have been acknowledged in time.
        """
        await self._append_command(Acknowledge(self.claim, (self.seqnum,)))

    async def requeue(self, *, delay: float = 0.0) -> None:
        """Return the message to the queue. It is delivered again after `delay` seconds, or becomes
        a dead letter after its last try.

        Raises:
            LeaseLostError: as for `acknowledge`.
        """
        _check_seconds("A delay", delay)
        await self._append_command(Requeue(self.claim, (self.seqnum,), delay), wakes=True)

    async def extend(self, lease: float = LEASE_S) -> None:
        """Extend the lease to `lease` seconds from now.

        Raises:
            LeaseLostError: as for `acknowledge`.
        """
        _check_lease(lease)
        await self._append_command(ExtendClaim(self.claim, (self.seqnum,), lease))

    async def _append_command(
        self, command: Acknowledge | Requeue | ExtendClaim, *, wakes: bool = False
    ) -> None:
        queue, shard = self._queue, self._shard
        seqnum = await queue.replica.append_command(queue.log, shard, encode(command), wakes=wakes)
        if not shard.outcome(seqnum):
            raise LeaseLostError(
                f"The lease on the message at seqnum {self.seqnum} has already ended; "
                "the message is delivered again. Use a longer lease, or extend it in time."
            )
        self._is_done = not isinstance(command, ExtendClaim)
        await queue.replica.save(queue.log, shard)

    def __repr__(self) -> str:
        return f"Delivery(seqnum={self.seqnum}, tries={self.tries}, data={self.data[:32]!r})"


class Popping:
    """The result of `async with queue.pop() as msg`: acknowledges the message at the end of the
    block. If the block raises, the message returns to the queue. The block may also call
    `acknowledge` or `requeue` itself.

    After an error, the pause before the next delivery grows with each try. So messages do not
    become dead letters because a dependency is unavailable for a while. If the block is cancelled,
    the message is ready again at once. `msg` is None if no message came in time.
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
            await self._delivery.requeue(delay=self._pause(self._delivery.tries, kind))
        except IndilogError:
            return  # the end of the lease returns it; the block's error has priority

    def _pause(self, tries: int, kind: type[BaseException]) -> float:
        if not issubclass(kind, Exception):
            return 0.0
        doublings = min(tries, TRIES_MAX) - 1
        return min(_BACKOFF_S_MAX, self._backoff * 2.0**doublings)


@dataclass(frozen=True)
class ShardStats:
    """Statistics of one shard."""

    depth: int
    """Number of messages that are not acknowledged, without dead letters."""
    leased: int
    dead: int
    oldest_age_s: float
    """Seconds since the oldest of these messages was pushed; 0 if there is none."""


@dataclass(frozen=True)
class Stats(ShardStats):
    """Statistics of a queue: the sums over its shards, and the age of the oldest message."""

    shards: tuple[ShardStats, ...]


class Queue:
    """A queue on a log. `Queue` objects are cheap: all objects of one queue in a process share
    their state.

    When `push` has returned, the message is durable. It is delivered until it is acknowledged;
    after `tries` deliveries it becomes a dead letter. At every seqnum of the log, at most one
    consumer holds it. The first deliveries of a shard's messages are in the order of priority, then
    of pushes. Delivery is at least once; an acknowledgement takes effect once.

    Args:
        log: log of the messages; it may also hold other records.
        name: name of the queue, unique in the log.
        shards: number of parts that can be consumed concurrently without contention (1 to 1,024);
            fixed at the first use of the queue.
        tries: deliveries after which a message becomes a dead letter (1 to 1,000); applies to
            messages pushed by this object.
        replica: state of the queue; None: the state that all objects of the process share.
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
            raise QueueSettingsError(f"tries must be 1 to {TRIES_MAX}, not {tries!r:.40}.")
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
            shard_key: messages with the same key go to the same shard, so their first deliveries
                are in order.
            priority: 0 to 9; messages with a higher priority are delivered first.
            delay: seconds before the first delivery.

        Raises:
            QueueSettingsError: invalid priority or delay.
            AppendOutcomeUnknownError: the message may be in the queue. Other errors are those of
                `Log.append`.
        """
        if not isinstance(data, bytes):
            raise TypeError(f"A message must be bytes, not {type(data).__name__}; encode it first.")
        if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
            raise QueueSettingsError(f"priority must be 0 to {PRIORITY_MAX}, not {priority!r:.40}.")
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
            backoff: seconds (0 to 60) before the next delivery if the block raises; doubled for
                each earlier delivery, up to 60. After a cancelled block there is no pause.

        Raises:
            QueueSettingsError: invalid backoff. Entering the block raises the errors of `take`.
        """
        return Popping(self, wait, lease, backoff)

    async def take(self, *, wait: float | None = None, lease: float = LEASE_S) -> Delivery | None:
        """Take the next message; the caller must acknowledge or return it.

        If the result is None, no message was ready whose push had returned before this call.

        Raises:
            AppendOutcomeUnknownError: a message may have been claimed, which is delivered again
                when the lease ends. Repeat the call.
        """
        _check_lease(lease)
        replica, log = self.replica, self.log
        await replica.open(log)
        ends = None if wait is None else waiting.seconds_now() + wait
        since: SeqNum | None = None
        while True:
            try:
                if (delivery := await self._try_claim(lease)) is not None:
                    return delivery
                if since is None:
                    # From here on, this session sees all pushes below `since`, of all producers.
                    since = await log.tail()
                    continue
                left = 0.0 if ends is None else ends - waiting.seconds_now()
                if left <= 0:
                    if await replica.has_failed_claims():
                        continue
                    return None
            except BaseException:
                replica.notifications.pass_on()  # it was woken, or was left a message
                raise
            since = await replica.notifications.wait(log, since, left)

    async def _try_claim(self, lease: float) -> Delivery | None:
        replica, log = self.replica, self.log
        while (shard := await replica.next_available(log)) is not None:
            claimed = await replica.claim(log, shard, lease)
            if claimed is None:
                continue
            claim, seqnum = claimed
            if (message := shard.state.message(seqnum)) is not None:
                data = await replica.data(log, seqnum)
                return Delivery(self, shard, claim, message, data)
        return None

    # --- operators

    async def stats(self) -> Stats:
        """Return the current statistics."""
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
        dead = [message.seqnum for shard in self.replica.shards for message in shard.state.dead]
        return [(seqnum, await self.replica.data(self.log, seqnum)) for seqnum in dead[:limit]]

    async def revive(self, seqnum: SeqNum) -> bool:
        """Make a dead letter ready again, with all its tries; False if there is no such dead
        letter.
        """
        return await self._on_dead(seqnum, encode(ReviveDeadLetters((seqnum,))), wakes=True)

    async def discard(self, seqnum: SeqNum) -> bool:
        """Remove a dead letter; False if there is no such dead letter."""
        return await self._on_dead(seqnum, encode(DiscardDeadLetters((seqnum,))))

    async def _on_dead(self, seqnum: SeqNum, command: bytes, *, wakes: bool = False) -> bool:
        await self._refresh()
        for shard in self.replica.shards:
            if any(message.seqnum == seqnum for message in shard.state.dead):
                appended = await self.replica.append_command(self.log, shard, command, wakes=wakes)
                return bool(shard.outcome(appended))
        return False

    async def _refresh(self) -> None:
        await self.replica.open(self.log)
        tail = await self.log.tail()
        for shard in self.replica.shards:
            await self.replica.catch_up(self.log, shard, tail, is_in_session=True)


def _stats_of(shard: ShardReplica, now: float) -> ShardStats:
    state = shard.state
    oldest = state.oldest
    age = 0.0 if oldest is None else max(0.0, now - oldest.pushed_at)
    return ShardStats(len(state), state.leased, len(state.dead), age)


def _check_seconds(what: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not 0 <= seconds <= SECONDS_MAX:
        raise QueueSettingsError(
            f"{what} must be 0 to {SECONDS_MAX:,.0f} seconds, not {seconds!r:.40}."
        )


def _check_backoff(backoff: object) -> None:
    if not isinstance(backoff, int | float) or not 0 <= backoff <= _BACKOFF_S_MAX:
        raise QueueSettingsError(
            f"backoff must be 0 to {_BACKOFF_S_MAX:.0f} seconds, not {backoff!r:.40}; "
            "for longer pauses call requeue(delay=...) in the block."
        )


def _check_lease(lease: float) -> None:
    _check_seconds("A lease", lease)
    if lease < _LEASE_S_MIN:
        raise QueueSettingsError(f"lease must be at least {_LEASE_S_MIN} seconds, not {lease}.")
