"""The public interface of BokiQueue: `Queue` (API.md, "BokiQueue"; thesis 2.3.3).

Each delivered message has three commands in the log: a push, a claim and an acknowledgement. The
order of the log decides the effect of each command. So no two consumers hold a message at the same
time, and an acknowledged message is never delivered again. Concurrent consumers share the records
of their claims and acknowledgements. `Queue` appends pushes itself, and everything else through the
process's `QueueReplica`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from xxhash import xxh3_64_intdigest

from bokiqueue import waiting
from bokiqueue.checks import (
    BACKOFF_S,
    LEASE_S,
    check_id,
    check_lease,
    check_limit,
    check_seconds,
    checked_shards,
)
from bokiqueue.delivery import Delivery, Popping, PoppingMany
from bokiqueue.errors import QueueSettingsError
from bokiqueue.records import (
    PRIORITY_MAX,
    TRIES_MAX,
    Command,
    DiscardDeadLetters,
    Purge,
    PushMessage,
    ReviveDeadLetters,
    encode,
    id_digest,
)
from bokiqueue.replica import QueueReplica, read_settings, replica_of
from bokiqueue.shard import ShardReplica, Submission
from bokiqueue.shard_view import MessageState, ShardView
from indilog import AppendOutcomeUnknownError, DataLossError, IndilogError, Log
from indilog.replayed import RetryPolicy, retry_transient
from indilog.sdk import SeqNum, name_loss

TRIES: Final = 5
_REDRIVEN_MAX: Final = 256
"""Largest number of dead letters that `Queue.redrive` revives with one record."""
_PUSHES: Final = RetryPolicy(tries=3, first_s=0.05)
"""Retries of a push with an id. Such a push may be repeated without harm."""


@dataclass(frozen=True)
class PeekedMessage:
    """A message that was read, but not taken.

    Attributes:
        seqnum: seqnum of its push.
        data: the bytes that were pushed.
        state: "ready", "leased", "delayed" or "dead" (a dead letter).
        tries: number of its deliveries so far.
        priority: its priority.
        pushed_at: when its push was ordered, seconds since 1970.
        shard: number of its shard.
    """

    seqnum: SeqNum
    data: bytes
    state: MessageState
    tries: int
    priority: int
    pushed_at: float
    shard: int


@dataclass(frozen=True)
class ShardStats:
    """Statistics of one shard; its messages do not include its dead letters."""

    depth: int
    """Number of messages that are not acknowledged."""
    leased: int
    """Number of messages under a lease."""
    dead: int
    """Number of dead letters."""
    oldest_age_s: float
    """Seconds since the oldest unacknowledged message was pushed; 0 if there is no message."""


@dataclass(frozen=True)
class Stats(ShardStats):
    """Statistics of a queue: sums over its shards, and the age of its oldest message."""

    shards: tuple[ShardStats, ...]


class Queue:
    """A queue on a log. `Queue` objects are cheap: all objects of one queue in a process share
    their state.

    When `push` has returned, the message is durable. The message is delivered until it is
    acknowledged; after `tries` deliveries it becomes a dead letter. At every seqnum of the log, at
    most one consumer holds the message. The first deliveries of a shard's messages are in the order
    of priority, then of pushes. Delivery is at least once; an acknowledgement takes effect once.

    Args:
        log: log of the messages. The log may also hold other records.
        name: name of the queue, unique in the log.
        shards: number of parts that can be consumed concurrently without contention (1 to 1,024);
            fixed at the first use of the queue.
        tries: deliveries after which a message becomes a dead letter (1 to 1,000); applies to
            messages pushed by this object.
        consumes: numbers of the shards whose messages `take` and `pop` deliver; None: all. These
            methods read no other shard, so the other shards need consumers of their own.
        replica: state of the queue; None: the state that the process's objects of this queue share.
    """

    def __init__(
        self,
        log: Log,
        name: str,
        *,
        shards: int = 4,
        tries: int = TRIES,
        consumes: Sequence[int] | None = None,
        replica: QueueReplica | None = None,
    ) -> None:
        if type(tries) is not int or not 1 <= tries <= TRIES_MAX:
            raise QueueSettingsError(f"tries must be 1 to {TRIES_MAX}, not {tries!r:.40}.")
        self.log = log
        self.name = name
        self.tries = tries
        if replica is None:
            replica = replica_of(log, name, shards, checked_shards(consumes, shards))
        self.replica = replica

    @classmethod
    async def existing(cls, log: Log, name: str) -> Queue:
        """Return a queue that was used before, with its number of shards.

        Raises:
            QueueSettingsError: there is no such queue in `log`.
            QueueTrimmedError: the whole log of the queue was trimmed.
        """
        settings = await read_settings(log, name)
        if settings is None:
            raise QueueSettingsError(f"Log {log.name!r} has no queue {name!r}.")
        return cls(log, name, shards=settings.shards)

    # --- producers

    async def push(
        self,
        data: bytes,
        *,
        shard_key: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        id: str | None = None,  # noqa: A002 - as in `Store.transact`
    ) -> SeqNum:
        """Add a message to the queue and return the seqnum of the push.

        Args:
            data: the message, at most the log's `record_bytes_max` less a few bytes.
            shard_key: messages with the same key go to the same shard, so their first deliveries
                are in order.
            priority: 0 to 9; messages with a higher priority are delivered first.
            delay: seconds before the first delivery.
            id: a text of 1 to 1,024 characters. Of all pushes with the same id and the same
                `shard_key`, only the first takes effect. A shard remembers an id for a week of log
                time, but only its last 100,000 ids. The returned seqnum identifies the message only
                if this push was the first.

        Raises:
            QueueSettingsError: invalid priority, delay or id.
            AppendOutcomeUnknownError: the message may be in the queue. A push with an `id` can be
                repeated.
            IndilogError: as for `Log.append`.
        """
        if not isinstance(data, bytes):
            raise TypeError(f"A message must be bytes, not {type(data).__name__}; encode it first.")
        if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
            raise QueueSettingsError(f"priority must be 0 to {PRIORITY_MAX}, not {priority!r:.40}.")
        check_seconds("A delay", delay)
        check_id(id)
        await self.replica.open(self.log)
        number = self._shard_for(id if shard_key is None else shard_key)
        digest = None if id is None else id_digest(id)
        record = encode(PushMessage(data, priority, delay, self.tries, digest))
        tags = self._tags_of_push(number, delay)
        if id is None:
            seqnum = await self.log.append(record, tags=tags)
        else:
            seqnum = await retry_transient(
                lambda: self.log.append(record, tags=tags), _PUSHES, is_idempotent=True
            )
        self.replica.shards[number].note_records_below(seqnum + 1)
        return seqnum

    def _shard_for(self, key: str | None) -> int:
        place = next(self.replica.rotation) if key is None else xxh3_64_intdigest(key.encode())
        return place % len(self.replica.shards)

    def _tags_of_push(self, number: int, delay: float) -> list[str]:
        tags = self.replica.tags
        aside = [tags.aside[number]] if delay else []
        return [tags.shards[number], tags.pushed, *aside]

    # --- consumers

    def pop(
        self, *, wait: float | None = None, lease: float = LEASE_S, backoff: float = BACKOFF_S
    ) -> Popping:
        """Take the next message for an `async with` block.

        Args:
            wait: seconds to wait for a message; None: do not wait.
            lease: seconds after which an unacknowledged message is delivered again.
            backoff: seconds (0 to 60) before the next delivery if the block raises. Each earlier
                delivery doubles the pause, up to 60. After a cancelled block there is no pause.

        Raises:
            QueueSettingsError: invalid backoff. Other errors are raised on entering the block, as
                by `take`.
        """
        return Popping(lambda: self.take(wait=wait, lease=lease), backoff)

    def pop_many(
        self,
        limit: int,
        *,
        wait: float | None = None,
        lease: float = LEASE_S,
        backoff: float = BACKOFF_S,
    ) -> PoppingMany:
        """Take up to `limit` messages of one shard for an `async with` block.

        One record claims the messages. One further record acknowledges those messages that the
        block has not acknowledged or returned itself. So n messages cost n + 2 records instead of
        3 n. All leases begin at the claim, so `lease` must cover the whole block. If the process
        crashes, all unacknowledged messages of the block are delivered again.

        Args:
            limit: largest number of messages, 1 to 256. The call does not wait for more messages
                than are ready.
            wait: seconds to wait for the first message; None: do not wait.
            lease: as in `pop`.
            backoff: as in `pop`.

        Raises:
            QueueSettingsError: invalid limit or backoff. Other errors are raised on entering the
                block, as by `take`.
        """
        check_limit(limit)
        return PoppingMany(lambda: self._take(limit, wait=wait, lease=lease), backoff)

    async def take(self, *, wait: float | None = None, lease: float = LEASE_S) -> Delivery | None:
        """Take the next message; the caller must acknowledge or return it.

        None means that no message was ready among those whose push had returned before this call.

        Raises:
            AppendOutcomeUnknownError: a message may have been claimed. The message is delivered
                again, at the latest when the lease ends. Repeat the call.
            DataLossError: the bytes of a message are lost. After as many tries as for any other
                message, it becomes a dead letter. Repeat the call for the messages after it.
        """
        taken = await self._take(1, wait=wait, lease=lease)
        return taken[0] if taken else None

    async def _take(self, limit: int, *, wait: float | None, lease: float) -> list[Delivery]:
        """Take up to `limit` messages with one claim; return none where `take` returns None."""
        check_lease(lease)
        replica, log = self.replica, self.log
        await replica.open(log)
        ends = None if wait is None else waiting.seconds_now() + wait
        since: SeqNum | None = None
        while True:
            try:
                if deliveries := await self._try_claim(lease, limit):
                    return deliveries
                if since is None:
                    # From here on, this session sees the pushes of all producers below `since`.
                    since = await log.tail()
                    continue
                left = 0.0 if ends is None else ends - waiting.seconds_now()
                if left <= 0:
                    if await replica.has_failed_claims():
                        continue
                    return []
            except BaseException:
                # This consumer may have been woken for a message that it does not take.
                replica.notifications.pass_on()
                raise
            since = await replica.notifications.wait(log, since, left)

    async def _try_claim(self, lease: float, limit: int) -> list[Delivery]:
        replica, log = self.replica, self.log
        while (shard := await replica.next_available(log)) is not None:
            claimed = await replica.claim(log, shard, lease, limit)
            if claimed is not None and (got := await self._deliveries(shard, claimed)):
                return got
        return []

    async def _deliveries(self, shard: ShardReplica, claimed: Submission) -> list[Delivery]:
        """Return the claimed messages with their bytes, except messages whose lease has ended
        meanwhile.

        Raises:
            DataLossError: the bytes of a message are lost. The message returns to the queue after a
                pause, and this delivery counts as a try; the other messages return at once.
        """
        assert claimed.seqnum is not None, "the claim is decided"
        deliveries: list[Delivery] = []
        lost: SeqNum | None = None
        try:
            for seqnum in claimed.touched:
                message = shard.state.message(seqnum)
                if message is None or message.claim != claimed.seqnum:
                    continue
                lost = seqnum
                data = await self.replica.data(self.log, shard, message, is_delivered=True)
                if data is not None:
                    deliveries.append(
                        Delivery(self.log, self.replica, shard, claimed.seqnum, message, data)
                    )
        except DataLossError as error:
            assert lost is not None, "the bytes of a message were read"
            shard.return_messages(self.log, claimed, lost)
            raise name_loss(
                f"The message at seqnum {lost} of queue {self.name!r}", error
            ) from error
        except BaseException:
            shard.return_messages(self.log, claimed)
            raise
        return deliveries

    # --- operators

    async def stats(self) -> Stats:
        """Return the statistics as of the time of the log."""
        views = [view for _, view in await self._views()]
        parts = tuple([ShardStats(v.depth, v.leased, len(v.dead), v.oldest_age_s) for v in views])
        return Stats(
            depth=sum(part.depth for part in parts),
            leased=sum(part.leased for part in parts),
            dead=sum(part.dead for part in parts),
            oldest_age_s=max(part.oldest_age_s for part in parts),
            shards=parts,
        )

    async def peek(self, limit: int = 10, *, dead: bool = False) -> list[PeekedMessage]:
        """Return messages without taking them. Other callers may remove them at any time.

        The shards are listed one after the other. In each shard, the ready messages come first, in
        the order of their delivery. Messages under a lease or delay follow, in the order in which
        their leases and delays end.

        Args:
            limit: largest number of messages.
            dead: whether to return dead letters instead, in the order in which they died.
        """
        peeked: list[PeekedMessage] = []
        for shard, view in await self._views():
            messages = view.dead if dead else view.in_order()
            found = [
                (replace(message), view.state_of(message))
                for message in islice(messages, limit - len(peeked))
            ]
            for message, state in found:
                data = await self.replica.data(self.log, shard, message, is_delivered=False)
                if data is not None:
                    peeked.append(
                        PeekedMessage(
                            message.seqnum, data, state, message.tries, message.priority,
                            message.pushed_at, shard.number,
                        )
                    )  # fmt: skip
        return peeked

    async def dead_letters(self, limit: int = 100) -> list[tuple[SeqNum, bytes]]:
        """Return the oldest dead letters of each shard, shard by shard: seqnum and bytes."""
        letters = await self.peek(limit, dead=True)
        return [(letter.seqnum, letter.data) for letter in letters]

    async def revive(self, seqnum: SeqNum) -> bool:
        """Make a dead letter ready again, with all its tries; False if there is no such dead
        letter.
        """
        return await self._on_dead(seqnum, ReviveDeadLetters((seqnum,)))

    async def discard(self, seqnum: SeqNum) -> bool:
        """Remove a dead letter; False if there is no such dead letter."""
        return await self._on_dead(seqnum, DiscardDeadLetters((seqnum,)))

    async def redrive(self) -> int:
        """Make all dead letters ready again, with all their tries; return their number.

        Raises:
            AppendOutcomeUnknownError: some messages may still be dead letters; repeat the call.
        """
        count = 0
        for shard, view in await self._views():
            dead = [message.seqnum for message in view.dead]
            for start in range(0, len(dead), _REDRIVEN_MAX):
                part = ReviveDeadLetters(tuple(dead[start : start + _REDRIVEN_MAX]))
                count += await self._submit(shard, part, count)
        return count

    async def purge(self, *, dead: bool = False) -> int:
        """Remove all messages except dead letters, and return the number of removed messages.

        Messages under a lease are removed, too. If a consumer acknowledges a removed message, it
        gets `LeaseLostError`.

        Args:
            dead: whether to remove the dead letters instead.

        Raises:
            AppendOutcomeUnknownError: some messages may be left; repeat the call.
        """
        await self._refresh()
        count = 0
        for shard in self.replica.shards:
            count += await self._submit(shard, Purge(dead), count)
        return count

    async def _on_dead(self, seqnum: SeqNum, command: Command) -> bool:
        for shard, view in await self._views():
            if view.is_dead(seqnum):
                return bool(await self._submit(shard, command))
        return False

    async def _submit(self, shard: ShardReplica, command: Command, done: int = 0) -> int:
        """Append a command, and return the number of messages that it changed.

        Args:
            shard: the shard.
            command: the command.
            done: number of messages that earlier commands of the same call have changed.
        """
        try:
            changed = len((await self.replica.submit(self.log, shard, command)).touched)
        except IndilogError as error:
            if not done or not error.retryable:
                raise
            raise AppendOutcomeUnknownError(
                f"{done} messages were changed, and the others were not: {error}; repeat the call."
            ) from error
        await self.replica.save(self.log, shard)
        return changed

    async def _refresh(self) -> None:
        await self.replica.open(self.log)
        tail = await self.log.tail()
        for shard in self.replica.shards:
            await self.replica.catch_up(self.log, shard, tail, is_in_session=True)

    async def _views(self) -> list[tuple[ShardReplica, ShardView]]:
        """Return the shards as of the time of the log."""
        await self._refresh()
        now = await self.log.now()
        return [(shard, ShardView(shard.state, now)) for shard in self.replica.shards]
