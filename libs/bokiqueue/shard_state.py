"""Derives the state of one shard of a queue from its records alone, so that it is the same in every
process.

The order of the log alone decides which claim gets which message: a claim gets the first messages
that are ready at the claim's seqnum. Time is log time (`Record.ordered_at`), not the time of a
writer or reader. So all processes agree on when a lease has ended. `ShardReplica` feeds the records
to `ShardState` through `indilog.replayed.Replica`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, NamedTuple, assert_never

from sortedcontainers import SortedList

from bokiqueue.message_cache import MessageCache
from bokiqueue.records import (
    Acknowledge,
    CancelClaim,
    Claim,
    Command,
    DiscardDeadLetters,
    ExtendClaim,
    HeldMessage,
    Purge,
    PushMessage,
    RememberedId,
    Requeue,
    ReviveDeadLetters,
    SetAside,
    ShardSnapshot,
    decode_commands,
)
from indilog import MAX_SEQNUM, Record
from indilog.replayed import State
from indilog.sdk import SeqNum

IDS_MAX: Final = 100_000
"""Largest number of ids of pushes that a shard remembers; the oldest are forgotten first."""
ID_S: Final = 7 * 86_400.0
"""Seconds for which a shard remembers the id of a push, by the time of the log (a week)."""
READY_ASIDE_MAX: Final = 16
"""Largest number of ready messages that are set aside before a checkpoint."""
_RECORDS_PER_ASIDE: Final = 8
"""Ready messages are set aside only if this many seqnums become trimmable per message set aside."""
CANCELLED_MAX: Final = 1024
"""Largest number of cancelled attempts that a shard remembers. An attempt is remembered if it held
no message, because its claim may appear in the log later.
"""


@dataclass(slots=True)
class Message:
    """An outstanding message or dead letter.

    Attributes:
        until: end of the lease or delay, seconds since 1970; None: the message has neither.
        claim: seqnum of the claim that holds the message; None: no claim holds it.
        attempt: `Claim.attempt` of that claim; 0: there is no claim, or it cannot be cancelled any
            more, because its consumer has extended the lease.
        aside_at: seqnum of the record with the message's bytes and the shard's tag `aside`; None:
            the bytes are only in the push, which lacks this tag.
    """

    seqnum: SeqNum
    pushed_at: float
    priority: int
    tries_max: int
    tries: int = 0
    until: float | None = None
    claim: SeqNum | None = None
    attempt: int = 0
    is_dead: bool = False
    aside_at: SeqNum | None = None

    @property
    def rank(self) -> tuple[int, SeqNum]:
        """The sort key among the ready messages: by priority, then first in, first out."""
        return -self.priority, self.seqnum

    @property
    def content(self) -> SeqNum:
        """Seqnum of the record from which the message's bytes are read."""
        return self.seqnum if self.aside_at is None else self.aside_at


class ShardOutcome(NamedTuple):
    """The effect of a record.

    Attributes:
        seqnum: seqnum of the record.
        touched: for each command of the record, the messages that it changed.
    """

    seqnum: SeqNum
    touched: tuple[tuple[SeqNum, ...], ...]


class ShardState(State[ShardOutcome]):
    """Applies the records of a shard in order.

    Args:
        snapshot: state to continue from; None: before the first record.
        contents: a cache of this process, to which the bytes of pushed messages are added. The
            cache does not affect the state.

    Attributes:
        clock: latest `ordered_at` of the applied records, seconds since 1970.
    """

    def __init__(
        self, snapshot: ShardSnapshot | None = None, contents: MessageCache | None = None
    ) -> None:
        self.clock = 0.0
        self._contents = contents
        self._messages: dict[SeqNum, Message] = {}
        """Outstanding messages, without dead letters."""
        self._ready: SortedList[tuple[int, SeqNum]] = SortedList()
        self._timed: SortedList[tuple[float, SeqNum]] = SortedList()
        self._dead: dict[SeqNum, Message] = {}
        self._in_place: SortedList[SeqNum] = SortedList()
        """Messages and dead letters that are not set aside."""
        self._leased = 0
        self._ids: OrderedDict[bytes, float] = OrderedDict()
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        self._is_of_consumer = False
        if snapshot is not None:
            self._restore(snapshot)

    # --- applying records

    def apply(self, record: Record) -> ShardOutcome:
        """Apply the next record; return the messages that each of its commands changed."""
        commands = decode_commands(record.data)
        self.clock = max(self.clock, record.ordered_at)
        self._on_clock()
        is_push = any(isinstance(command, PushMessage) for command in commands)
        self._is_of_consumer = bool(commands) and not is_push
        touched = tuple([self._effect(record.seqnum, command) for command in commands])
        return ShardOutcome(record.seqnum, touched)

    def may_elect(self) -> bool:
        """Whether a consumer wrote the last record. Producers keep no replica of a shard, so they
        write no checkpoint.
        """
        return self._is_of_consumer

    def _effect(self, seqnum: SeqNum, command: Command) -> tuple[SeqNum, ...]:
        match command:
            case PushMessage():
                touched = self._push(seqnum, command)
            case Claim():
                touched = self._claim(seqnum, command)
            case CancelClaim(attempt):
                touched = self._cancel(attempt)
            case SetAside(message):
                touched = self._set_aside(seqnum, message)
            case Requeue(claim, messages):
                touched = self._apply_to_held(claim, messages, lambda m: self._requeue(m, command))
            case ExtendClaim(claim, messages, lease_s):
                touched = self._apply_to_held(
                    claim, messages, lambda m: self._lease(m, claim, 0, lease_s)
                )
            case ReviveDeadLetters(messages):
                touched = self._apply_to_dead(messages, self._revive)
            case Acknowledge() | DiscardDeadLetters() | Purge():
                touched = self._remove(command)
            case unreachable:
                assert_never(unreachable)
        return touched

    def _remove(self, command: Acknowledge | DiscardDeadLetters | Purge) -> tuple[SeqNum, ...]:
        match command:
            case Acknowledge(claim, messages):
                removed = self._apply_to_held(claim, messages, self._forget)
            case DiscardDeadLetters(messages):
                removed = self._apply_to_dead(messages, lambda _: None)
            case Purge(is_dead):
                removed = self._purge(is_dead=is_dead)
            case unreachable:
                assert_never(unreachable)
        for seqnum in removed:
            self._in_place.discard(seqnum)
        if self._contents is not None:
            self._contents.forget(removed)
        return removed

    def _on_clock(self) -> None:
        """End expired leases and delays, and forget old ids, by the time of the log."""
        while self._timed and self._timed[0][0] <= self.clock:
            message = self._messages[self._timed[0][1]]
            self._untime(message)
            self._ready_or_dead(message)
        while self._ids and next(iter(self._ids.values())) <= self.clock - ID_S:
            self._ids.popitem(last=False)

    def _push(self, seqnum: SeqNum, push: PushMessage) -> tuple[SeqNum, ...]:
        if push.id is not None and not self._remember(push.id):
            return ()
        message = Message(seqnum, self.clock, push.priority, push.tries_max)
        self._messages[seqnum] = message
        if push.delay_s:
            message.aside_at = seqnum
            self._time(message, self.clock + push.delay_s)
        else:
            self._in_place.add(seqnum)
            self._ready.add(message.rank)
        if self._contents is not None:
            self._contents.keep(seqnum, push.data)
        return (seqnum,)

    def _remember(self, digest: bytes) -> bool:
        """Remember the id of a push; False: it was remembered already."""
        if digest in self._ids:
            return False
        self._ids[digest] = self.clock
        if len(self._ids) > IDS_MAX:
            self._ids.popitem(last=False)
        return True

    def _claim(self, seqnum: SeqNum, claim: Claim) -> tuple[SeqNum, ...]:
        if claim.attempt in self._cancelled:
            return ()
        ranks = list(self._ready[: claim.count])
        del self._ready[: claim.count]
        for _, place in ranks:
            message = self._messages[place]
            message.tries += 1
            self._lease(message, seqnum, claim.attempt, claim.lease_s)
        return tuple([place for _, place in ranks])

    def _cancel(self, attempt: int) -> tuple[SeqNum, ...]:
        held = [m for _, s in self._timed if (m := self._messages[s]).attempt == attempt != 0]
        for message in held:
            self._untime(message)
            message.tries -= 1
            self._ready_or_dead(message)
        if not held and attempt:
            self._cancelled[attempt] = None
            if len(self._cancelled) > CANCELLED_MAX:
                self._cancelled.popitem(last=False)
        return tuple([message.seqnum for message in held])

    def _set_aside(self, seqnum: SeqNum, message: SeqNum) -> tuple[SeqNum, ...]:
        found = self._messages.get(message) or self._dead.get(message)
        if found is None:
            return ()
        found.aside_at = seqnum
        self._in_place.discard(message)
        return (message,)

    def _purge(self, *, is_dead: bool) -> tuple[SeqNum, ...]:
        if is_dead:
            touched = tuple(self._dead)
            self._dead.clear()
            return touched
        touched = tuple(self._messages)
        self._messages.clear()
        self._ready.clear()
        self._timed.clear()
        self._leased = 0
        return touched

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
        return tuple([message.seqnum for message in held])

    def _apply_to_dead(
        self, messages: Iterable[SeqNum], act: Callable[[Message], None]
    ) -> tuple[SeqNum, ...]:
        dead = [self._dead.pop(s) for s in dict.fromkeys(messages) if s in self._dead]
        for message in dead:
            act(message)
        return tuple([message.seqnum for message in dead])

    # --- state changes of a message

    def _forget(self, message: Message) -> None:
        assert message.until is None, "a message that ends has no lease or delay"
        del self._messages[message.seqnum]

    def _requeue(self, message: Message, requeue: Requeue) -> None:
        if requeue.is_no_try:
            message.tries -= 1
        if requeue.delay_s and message.tries < message.tries_max:
            self._time(message, self.clock + requeue.delay_s)
        else:
            self._ready_or_dead(message)

    def _lease(self, message: Message, claim: SeqNum, attempt: int, lease_s: float) -> None:
        assert message.claim is None, "at most one claim holds a message"
        message.claim, message.attempt = claim, attempt
        self._leased += 1
        self._time(message, self.clock + lease_s)

    def _revive(self, message: Message) -> None:
        message.is_dead, message.tries = False, 0
        self._messages[message.seqnum] = message
        self._ready.add(message.rank)

    def _ready_or_dead(self, message: Message) -> None:
        assert message.claim is None, "a message under a lease is not ready"
        if message.tries < message.tries_max:
            self._ready.add(message.rank)
        else:
            message.is_dead = True
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
            message.claim, message.attempt = None, 0

    # --- questions

    def __len__(self) -> int:
        """Number of outstanding messages, without dead letters."""
        return len(self._messages)

    def message(self, seqnum: SeqNum) -> Message | None:
        """Return a message or dead letter; None if it is neither."""
        return self._messages.get(seqnum) or self._dead.get(seqnum)

    @property
    def leased(self) -> int:
        """Number of messages under a lease."""
        return self._leased

    @property
    def dead(self) -> tuple[Message, ...]:
        """Dead letters, in the order in which they died."""
        return tuple(self._dead.values())

    def in_order(self) -> Iterator[Message]:
        """Return the ready messages in the order of their delivery. Then return the other messages
        in the order in which their leases and delays end.
        """
        places = chain(self._ready, self._timed)
        return (self._messages[seqnum] for _, seqnum in places)

    def ready(self, now: float) -> int:
        """Return the largest number of messages that a claim at log time `now` may get.

        The claim gets fewer messages if the lease on a message's last try has ended.
        """
        count = len(self._ready)
        if self._timed and self._timed[0][0] <= now:
            count += self._timed.bisect_right((now, MAX_SEQNUM))
        return count

    def ended(self, now: float) -> list[Message]:
        """Return the messages whose lease or delay has ended at log time `now`, although no record
        has shown it yet, in the order of these ends.
        """
        count = self._timed.bisect_right((now, MAX_SEQNUM))
        return [self._messages[seqnum] for _, seqnum in self._timed[:count]]

    def next_due(self) -> float | None:
        """Return the log time at which the next lease or delay ends; None: there is none."""
        return self._timed[0][0] if self._timed else None

    @property
    def oldest(self) -> Message | None:
        """The outstanding message that was pushed first; dead letters are excluded."""
        return self._messages[min(self._messages)] if self._messages else None

    # --- trims and checkpoints

    def needed_from(self, end: SeqNum) -> SeqNum:
        """Return the lowest seqnum of a message or dead letter that is not set aside; `end` if
        there is none. The record at that seqnum holds its bytes, so it must not be trimmed.
        """
        return self._in_place[0] if self._in_place else end

    def aside_from(self, end: SeqNum) -> SeqNum:
        """Return the lowest seqnum of a record with the tag `aside` that is needed; `end` if there
        is none.
        """
        held = chain(self._messages.values(), self._dead.values())
        return min((m.aside_at for m in held if m.aside_at is not None), default=end)

    def to_set_aside(self, kept_from: SeqNum, end: SeqNum) -> list[Message]:
        """Return the messages that should be set aside, the oldest first.

        A message that is not set aside keeps all later records of the shard from being trimmed. If
        few messages keep many records, all of them are set aside, including up to 16 ready ones.
        Otherwise no ready message is set aside. Then messages before the oldest ready one are set
        aside if they keep more records than must be kept without them.

        Args:
            kept_from: records from this seqnum on are kept in any case, so messages from there on
                are not returned.
            end: seqnum after the last applied record.
        """
        oldest = islice((s for s in self._in_place if self._is_ready(s)), READY_ASIDE_MAX + 1)
        ready = list(oldest)
        bound = min(kept_from, ready[-1] if len(ready) > READY_ASIDE_MAX else end)
        count = self._in_place.bisect_left(bound)
        if not count or bound - self._in_place[0] < _RECORDS_PER_ASIDE * count:
            bound = min(kept_from, next(iter(ready), end))
            count = self._in_place.bisect_left(min(bound, 2 * bound - end))
        return [self._messages.get(s) or self._dead[s] for s in self._in_place[:count]]

    def _is_ready(self, seqnum: SeqNum) -> bool:
        message = self._messages.get(seqnum)
        return message is not None and message.until is None

    @property
    def size(self) -> int:
        """Number of messages, dead letters and remembered ids."""
        return len(self._messages) + len(self._dead) + len(self._ids)

    def snapshot(self) -> ShardSnapshot:
        """Return the whole state, from which another process can continue."""
        held = chain(self._messages.values(), self._dead.values())
        return ShardSnapshot(
            self.clock,
            tuple([_held_message(message) for message in held]),
            tuple([RememberedId(*one) for one in self._ids.items()]),
            tuple(self._cancelled),
        )

    def _restore(self, snapshot: ShardSnapshot) -> None:
        self.clock = snapshot.clock
        self._ids.update(snapshot.ids)
        self._cancelled.update(dict.fromkeys(snapshot.cancelled))
        self._in_place.update(m.seqnum for m in snapshot.messages if m.aside_at is None)
        for held in snapshot.messages:
            message = Message(
                held.seqnum, held.pushed_at, held.priority, held.tries_max, held.tries,
                aside_at=held.aside_at,
            )  # fmt: skip
            if held.is_dead:
                message.is_dead = True
                self._dead[held.seqnum] = message
                continue
            self._messages[held.seqnum] = message
            if held.until is None:
                self._ready.add(message.rank)
                continue
            message.claim, message.attempt = held.claim, held.attempt
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
        assert all(message.is_dead for message in self._dead.values())
        assert not any(message.is_dead for message in self._messages.values())
        assert all(m.attempt == 0 for m in self._messages.values() if m.claim is None)
        assert all(m.tries >= 0 for m in self._messages.values())
        held = chain(self._messages.values(), self._dead.values())
        assert list(self._in_place) == sorted(m.seqnum for m in held if m.aside_at is None)
        assert len(self._ids) <= IDS_MAX
        assert len(self._cancelled) <= CANCELLED_MAX


def _held_message(m: Message) -> HeldMessage:
    return HeldMessage(
        m.seqnum, m.pushed_at, m.priority, m.tries, m.tries_max, m.until, m.claim, m.attempt,
        m.is_dead, m.aside_at,
    )  # fmt: skip
