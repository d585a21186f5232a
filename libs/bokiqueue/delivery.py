"""Messages that a consumer holds: `Delivery`, and the blocks `Popping` and `PoppingMany`.

A message is held under a lease, and commands about it have an effect only during the lease. After
it, methods raise `LeaseLostError`; only `requeue_all` skips such messages. `Queue` creates these
objects. They use the process's `QueueReplica` and the `ShardReplica` of the message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final

from bokiqueue.checks import BACKOFF_S_MAX, LEASE_S, check_backoff, check_lease, check_seconds
from bokiqueue.errors import LeaseLostError
from bokiqueue.records import TRIES_MAX, Acknowledge, ExtendClaim, Requeue
from bokiqueue.replica import QueueReplica
from bokiqueue.shard import ShardReplica
from bokiqueue.shard_state import Message
from indilog import IndilogError, Log, TooLargeError
from indilog.sdk import SeqNum

_ASIDE_DELAY_S: Final = 60.0
"""Shortest delay in seconds for which a requeued message is set aside at once (`SetAside`). Other
messages are set aside before a checkpoint, if necessary.
"""


class Delivery:
    """A message held by this consumer until its lease ends.

    Attributes:
        data: the bytes that were pushed.
        seqnum: seqnum of its push, which identifies the message.
        tries: number of its deliveries so far, including this one.
        priority: its priority, 0 to 9.
        pushed_at: when its push was ordered (`Record.ordered_at`), seconds since 1970.
        claim: seqnum of the claim by which this consumer holds the message.
        shard: number of its shard.
    """

    def __init__(
        self,
        log: Log,
        replica: QueueReplica,
        shard: ShardReplica,
        claim: SeqNum,
        message: Message,
        data: bytes,
    ) -> None:
        self.data = data
        self.seqnum = message.seqnum
        self.tries = message.tries
        self.pushed_at = message.pushed_at
        self.priority = message.priority
        self._log = log
        self._replica = replica
        self.claim = claim
        self.shard = shard.number
        self._shard = shard
        self._is_aside = message.aside_at is not None
        self._is_last_try = message.tries >= message.tries_max
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether the message was acknowledged or returned to the queue."""
        return self._is_done

    async def acknowledge(self) -> None:
        """Remove the message from the queue. The message is never delivered again.

        Raises:
            LeaseLostError: the lease had already ended.
            AppendOutcomeUnknownError: the command may or may not have taken effect. If it did not,
                the message is delivered again when its lease ends.
        """
        await self._append_command(Acknowledge(self.claim, (self.seqnum,)))

    async def requeue(self, *, delay: float = 0.0) -> None:
        """Return the message to the queue. It is delivered again after `delay` seconds. After its
        last try it becomes a dead letter instead.

        Raises:
            LeaseLostError: as for `acknowledge`.
        """
        check_seconds("A delay", delay)
        if not self._is_aside and (self._is_last_try or delay >= _ASIDE_DELAY_S):
            with suppress(TooLargeError):  # its push was just small enough
                await self._shard.set_aside(self._log, self.seqnum, self.data)
                self._is_aside = True
        await self._append_command(Requeue(self.claim, (self.seqnum,), delay))

    async def extend(self, lease: float = LEASE_S) -> None:
        """Extend the lease to `lease` seconds from now.

        Raises:
            LeaseLostError: as for `acknowledge`.
        """
        check_lease(lease)
        await self._append_command(ExtendClaim(self.claim, (self.seqnum,), lease))

    async def acknowledge_all(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge messages of the same claim with one record.

        Raises:
            LeaseLostError: the leases on some messages had already ended. The other messages are
                acknowledged.
        """
        seqnums = tuple([delivery.seqnum for delivery in deliveries])
        ended = await self._submit(Acknowledge(self.claim, seqnums))
        for delivery in deliveries:
            delivery._is_done = delivery.seqnum in ended  # noqa: SLF001
        await self._replica.save(self._log, self._shard)
        if len(ended) < len(seqnums):
            raise LeaseLostError(
                f"The leases on {len(seqnums) - len(ended)} of {len(seqnums)} messages have "
                "already ended; they are delivered again. Use a longer lease, or fewer messages."
            )

    async def requeue_all(self, deliveries: Sequence[Delivery], delay: float) -> None:
        """Return messages of the same claim to the queue with one record. A message gets a record
        of its own if `delay` is 60 seconds or more, or if it has no try left and is not set aside.

        Messages whose leases have ended are skipped.
        """
        together = []
        for delivery in deliveries:
            if delay >= _ASIDE_DELAY_S or (delivery._is_last_try and not delivery._is_aside):  # noqa: SLF001
                with suppress(LeaseLostError):
                    await delivery.requeue(delay=delay)
            else:
                together.append(delivery)
        if together:
            seqnums = tuple([delivery.seqnum for delivery in together])
            await self._submit(Requeue(self.claim, seqnums, delay))
            for delivery in together:
                delivery._is_done = True  # noqa: SLF001
            await self._replica.save(self._log, self._shard)

    async def _append_command(self, command: Acknowledge | Requeue | ExtendClaim) -> None:
        if not await self._submit(command):
            raise LeaseLostError(
                f"The lease on the message at seqnum {self.seqnum} has already ended; "
                "the message is delivered again. Use a longer lease, or extend it in time."
            )
        self._is_done = not isinstance(command, ExtendClaim)
        await self._replica.save(self._log, self._shard)

    async def _submit(self, command: Acknowledge | Requeue | ExtendClaim) -> tuple[SeqNum, ...]:
        return (await self._replica.submit(self._log, self._shard, command)).touched

    def __repr__(self) -> str:
        return f"Delivery(seqnum={self.seqnum}, tries={self.tries}, data={self.data[:32]!r})"


class Popping:
    """The result of `queue.pop()`: `async with queue.pop() as msg` acknowledges the message at the
    end of the block. If the block raises, the message returns to the queue. The block may also call
    `acknowledge` or `requeue` itself.

    After an error, the pause before the next delivery grows with each try. So messages do not
    become dead letters because a dependency is unavailable for a while. If the block is cancelled,
    the message is ready again at once. If no message came in time, `msg` is None.
    """

    def __init__(self, take: Callable[[], Awaitable[Delivery | None]], backoff: float) -> None:
        check_backoff(backoff)
        self._take = take
        self._backoff = backoff
        self._delivery: Delivery | None = None

    async def __aenter__(self) -> Delivery | None:
        self._delivery = await self._take()
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
            return  # the message returns when its lease ends; the block's error has priority

    def _pause(self, tries: int, kind: type[BaseException]) -> float:
        return _pause_s(self._backoff, tries, kind)


def _pause_s(backoff: float, tries: int, kind: type[BaseException]) -> float:
    """Return the seconds until the next delivery after an error of the type `kind`."""
    if not issubclass(kind, Exception):
        return 0.0
    doublings = min(tries, TRIES_MAX) - 1
    return min(BACKOFF_S_MAX, backoff * 2.0**doublings)


class PoppingMany:
    """The result of `queue.pop_many()`: `async with queue.pop_many(16) as messages` acknowledges
    all messages at the end of the block with one record. If the block raises, the messages return
    to the queue, with the pauses of `Popping`. The block may also acknowledge or requeue single
    messages itself.

    If no message came in time, the list is empty.

    Raises:
        LeaseLostError: raised at the end of the block if the leases on some messages had already
            ended. The other messages are acknowledged.
    """

    def __init__(self, take: Callable[[], Awaitable[list[Delivery]]], backoff: float) -> None:
        check_backoff(backoff)
        self._take = take
        self._backoff = backoff
        self._deliveries: list[Delivery] = []

    async def __aenter__(self) -> list[Delivery]:
        self._deliveries = await self._take()
        return list(self._deliveries)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        held = [delivery for delivery in self._deliveries if not delivery.is_done]
        if not held:
            return
        if kind is None:
            await held[0].acknowledge_all(held)
            return
        pauses: dict[float, list[Delivery]] = {}
        for delivery in held:
            pauses.setdefault(_pause_s(self._backoff, delivery.tries, kind), []).append(delivery)
        try:
            for pause_s, ones in pauses.items():
                await ones[0].requeue_all(ones, pause_s)
        except IndilogError:
            return  # the messages return when their lease ends; the block's error has priority
