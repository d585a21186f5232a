"""Derives the state of one shard of a queue from its records alone, so that it is the same in every
process.

The order of the log alone decides which claim gets which message: a claim gets the first messages
that are ready at the claim's seqnum. Time is that of the log (`Record.ordered_at`), not of a writer
or reader, so all processes agree when a lease has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from sortedcontainers import SortedList

from bokiqueue.records import (
    Acknowledge,
    Claim,
    Command,
    DiscardDeadLetters,
    ExtendClaim,
    HeldMessage,
    PushMessage,
    QueueCheckpoint,
    Requeue,
    ReviveDeadLetters,
)
from indilog.sdk import SeqNum


@dataclass(slots=True)
class Message:
    """An outstanding message. `until` is the end of its lease or delay; None if it has neither."""

    seqnum: SeqNum
    pushed_at: float
    priority: int
    tries_max: int
    tries: int = 0
    until: float | None = None
    claim: SeqNum | None = None
    dead: bool = False

    @property
    def place(self) -> tuple[int, SeqNum]:
        """The sort key among the ready messages: by priority, then first in, first out."""
        return -self.priority, self.seqnum


class ShardState:
    """Applies the records of a shard in order.

    Attributes:
        end: records below this seqnum are applied.
        clock: `ordered_at` of the last applied record, seconds since 1970.
    """

    def __init__(self, checkpoint: QueueCheckpoint | None = None) -> None:
        self.end: SeqNum = 0
        self.clock = 0.0
        self._messages: dict[SeqNum, Message] = {}
        self._ready: SortedList[tuple[int, SeqNum]] = SortedList()
        self._timed: SortedList[tuple[float, SeqNum]] = SortedList()
        self._dead: dict[SeqNum, Message] = {}
        self._leased = 0
        if checkpoint is not None:
            self._restore(checkpoint)

    # --- applying records

    def apply(
        self, seqnum: SeqNum, ordered_at: float, command: Command | None
    ) -> tuple[SeqNum, ...]:
        """Apply the record at `seqnum`; return the messages that it changed."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        self.clock = max(self.clock, ordered_at)
        self._on_clock()
        return self._effect(seqnum, command) if command is not None else ()

    def _effect(self, seqnum: SeqNum, command: Command) -> tuple[SeqNum, ...]:
        match command:
            case PushMessage():
                touched = self._push(seqnum, command)
            case Claim(count, lease_s):
                touched = self._claim(seqnum, count, lease_s)
            case Acknowledge(claim, messages):
                touched = self._apply_to_held(claim, messages, self._forget)
            case Requeue(claim, messages, delay_s):
                touched = self._apply_to_held(claim, messages, lambda m: self._requeue(m, delay_s))
            case ExtendClaim(claim, messages, lease_s):
                touched = self._apply_to_held(
                    claim, messages, lambda m: self._lease(m, claim, lease_s)
                )
            case ReviveDeadLetters(messages):
                touched = self._apply_to_dead(messages, self._revive)
            case DiscardDeadLetters(messages):
                touched = self._apply_to_dead(messages, lambda _: None)
            case unreachable:
                assert_never(unreachable)
        return touched

    def _on_clock(self) -> None:
        """End expired leases and delays, by the time of the log."""
        while self._timed and self._timed[0][0] <= self.clock:
            message = self._messages[self._timed[0][1]]
            self._untime(message)
            self._ready_or_dead(message)

    def _push(self, seqnum: SeqNum, push: PushMessage) -> tuple[SeqNum, ...]:
        message = Message(seqnum, self.clock, push.priority, push.tries_max)
        self._messages[seqnum] = message
        if push.delay_s:
            self._time(message, self.clock + push.delay_s)
        else:
            self._ready.add(message.place)
        return (seqnum,)

    def _claim(self, claim: SeqNum, count: int, lease_s: float) -> tuple[SeqNum, ...]:
        places = list(self._ready[:count])
        del self._ready[:count]
        for _, seqnum in places:
            message = self._messages[seqnum]
            message.tries += 1
            self._lease(message, claim, lease_s)
        return tuple(seqnum for _, seqnum in places)

    def _apply_to_held(
        self, claim: SeqNum, messages: Iterable[SeqNum], act: Callable[[Message], None]
    ) -> tuple[SeqNum, ...]:
        held = [
            message
            for seqnum in dict.fromkeys(messages)
            if (message := self._messages.get(seqnum)) is not None and message.claim == claim
        ]
        for message in held:
            self._untime(message)
            act(message)
        return tuple(message.seqnum for message in held)

    def _apply_to_dead(
        self, messages: Iterable[SeqNum], act: Callable[[Message], None]
    ) -> tuple[SeqNum, ...]:
        dead = [self._dead.pop(s) for s in dict.fromkeys(messages) if s in self._dead]
        for message in dead:
            act(message)
        return tuple(message.seqnum for message in dead)

    # --- state changes of a message

    def _forget(self, message: Message) -> None:
        assert message.until is None, "a message that ends has no lease or delay"
        del self._messages[message.seqnum]

    def _requeue(self, message: Message, delay_s: float) -> None:
        if delay_s and message.tries < message.tries_max:
            self._time(message, self.clock + delay_s)
        else:
            self._ready_or_dead(message)

    def _lease(self, message: Message, claim: SeqNum, lease_s: float) -> None:
        assert message.claim is None, "at most one claim holds a message"
        message.claim = claim
        self._leased += 1
        self._time(message, self.clock + lease_s)

    def _revive(self, message: Message) -> None:
        message.dead, message.tries = False, 0
        self._messages[message.seqnum] = message
        self._ready.add(message.place)

    def _ready_or_dead(self, message: Message) -> None:
        assert message.claim is None, "a message under a lease is not ready"
        if message.tries < message.tries_max:
            self._ready.add(message.place)
        else:
            message.dead = True
            self._dead[message.seqnum] = self._messages.pop(message.seqnum)

    def _time(self, message: Message, until: float) -> None:
        assert message.until is None, "a message has one lease or delay"
        message.until = until
        self._timed.add((until, message.seqnum))

    def _untime(self, message: Message) -> None:
        assert message.until is not None, "a message in `_timed` has a lease or delay"
        self._timed.remove((message.until, message.seqnum))
        message.until = None
        if message.claim is not None:
            self._leased -= 1
            assert self._leased >= 0, "each lease was counted"
            message.claim = None

    # --- questions

    def __len__(self) -> int:
        """Number of outstanding messages, without dead letters."""
        return len(self._messages)

    @property
    def kept(self) -> int:
        """Number of messages in a checkpoint of this state: outstanding ones and dead letters."""
        return len(self._messages) + len(self._dead)

    def message(self, seqnum: SeqNum) -> Message | None:
        """Return a message; None if it is not outstanding."""
        return self._messages.get(seqnum)

    def held_by(self, claim: SeqNum) -> tuple[SeqNum, ...]:
        """Return the messages that a claim holds; takes time linear in the number of messages."""
        return tuple(m.seqnum for m in self._messages.values() if m.claim == claim)

    @property
    def leased(self) -> int:
        """Number of messages under a lease."""
        return self._leased

    @property
    def dead(self) -> tuple[Message, ...]:
        """Dead letters, in the order in which they died."""
        return tuple(self._dead.values())

    def ready(self, now: float) -> int:
        """Return the largest number of messages that a claim at time `now` gets.

        The claim gets fewer if an expired message has no tries left.
        """
        count = len(self._ready)
        if self._timed and self._timed[0][0] <= now:
            count += self._timed.bisect_right((now, self.end))
        return count

    def next_due(self) -> float | None:
        """Return when the next lease or delay ends."""
        return self._timed[0][0] if self._timed else None

    @property
    def oldest(self) -> Message | None:
        """The outstanding message that was pushed first; dead letters are excluded."""
        return self._messages[min(self._messages)] if self._messages else None

    @property
    def needed_from(self) -> SeqNum:
        """The seqnum below which records may be trimmed after a checkpoint of this state is
        stored.
        """
        return min((*self._messages, *self._dead), default=self.end)

    def checkpoint(self) -> QueueCheckpoint:
        """Return the whole state, from which another process can continue."""
        held = (*self._messages.values(), *self._dead.values())
        return QueueCheckpoint(self.end, self.clock, tuple(map(_held_message, held)))

    def _restore(self, checkpoint: QueueCheckpoint) -> None:
        self.end, self.clock = checkpoint.end, checkpoint.clock
        for held in checkpoint.messages:
            message = Message(
                held.seqnum, held.pushed_at, held.priority, held.tries_max, held.tries
            )
            if held.dead:
                message.dead = True
                self._dead[held.seqnum] = message
                continue
            self._messages[held.seqnum] = message
            if held.until is None:
                self._ready.add(message.place)
                continue
            message.claim = held.claim
            self._leased += held.claim is not None
            self._time(message, held.until)

    def check_invariants(self) -> None:
        """Assert that every outstanding message is in exactly one collection."""
        ready = {seqnum for _, seqnum in self._ready}
        timed = {seqnum for _, seqnum in self._timed}
        assert not ready & timed
        assert ready | timed == set(self._messages)
        assert not set(self._dead) & set(self._messages)
        assert self._leased == sum(m.claim is not None for m in self._messages.values())
        assert self._leased <= len(timed)
        assert all(self._messages[seqnum].until is not None for seqnum in timed)
        assert all(self._messages[seqnum].claim is None for seqnum in ready)
        assert all(message.dead for message in self._dead.values())
        assert not any(message.dead for message in self._messages.values())


def _held_message(m: Message) -> HeldMessage:
    return HeldMessage(
        m.seqnum, m.pushed_at, m.priority, m.tries, m.tries_max, m.until, m.claim, m.dead
    )
