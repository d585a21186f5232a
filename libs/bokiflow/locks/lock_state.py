"""Derives the state of one lock from its records alone, so that it is the same in every process.

The requests queue in the order of the log, and the first request in the queue holds the lock. The
seqnum of a request's record identifies the request and is its fencing token. Requests get the lock
in their order, so each holder's token is larger than the tokens of all earlier holders.

Time is log time (`Record.ordered_at`), not the time of a writer or reader. So all processes agree
on when a lease has ended. `lock_replica` keeps replicas of `LockState`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple, assert_never

from bokiflow.locks.lock_records import (
    Acquire,
    Command,
    ExtendLease,
    LockSnapshot,
    QueuePlace,
    Release,
    Remind,
    decode_command,
)
from indilog import Record
from indilog.replayed import State
from indilog.sdk import SeqNum

_RELEASED_MAX: Final = 256
"""Number of released tokens that are kept, so that a release can be repeated."""
QUEUE_MAX: Final = 4096
"""Largest number of requests in the queue of one lock, including the holder's."""


class CommandOutcome(NamedTuple):
    """The token that a command affected, and the time of its record (seconds since 1970)."""

    token: SeqNum | None
    ordered_at: float


@dataclass(slots=True)
class LockRequest:
    """A place in the queue. `until`: for the holder the end of its lease, for other requests the
    end of their wait; seconds since 1970. None: no limit.
    """

    token: SeqNum
    owner: str
    lease_s: float
    until: float | None


class LockState(State[CommandOutcome]):
    """Applies the records of a lock in order.

    Attributes:
        clock: latest `ordered_at` of the applied records, seconds since 1970.
    """

    def __init__(self, snapshot: LockSnapshot | None = None) -> None:
        self.clock = 0.0
        self._queue: dict[SeqNum, LockRequest] = {}
        self._tokens: dict[str, SeqNum] = {}
        """The token of each owner in the queue."""
        self._released: OrderedDict[SeqNum, None] = OrderedDict()
        """Released tokens, to answer repeated releases."""
        if snapshot is not None:
            self.clock = snapshot.clock
            self._released.update(dict.fromkeys(snapshot.released))
            for place in snapshot.queue:
                self._join(LockRequest(place.token, place.owner, place.lease_s, place.until))

    # --- applying records

    def apply(self, record: Record) -> CommandOutcome:
        """Apply the next record; return the token that it affected.

        For an `Acquire`, this is the token of the place in the queue, or None if the queue is full.
        For an `ExtendLease` or `Release`, it is the command's token, or None if that token does not
        hold the lock. A repeated `Release` also returns the token.
        """
        command = decode_command(record.data)
        self.clock = max(self.clock, record.ordered_at)
        self._on_clock()
        return CommandOutcome(self._effect(record.seqnum, command), record.ordered_at)

    def _effect(self, seqnum: SeqNum, command: Command | None) -> SeqNum | None:
        match command:
            case Acquire():
                token = self._acquire(seqnum, command)
            case Release(token):
                token = self._release(token)
            case ExtendLease(token, lease_s):
                token = self._extend(token, lease_s)
            case Remind() | None:
                token = None
            case unreachable:
                assert_never(unreachable)
        return token

    def _on_clock(self) -> None:
        """End waits and leases by the log's time. Waits end first, so that a request whose wait has
        ended does not get the lock.
        """
        holder = self.holder
        for request in list(self._queue.values()):
            is_over = request.until is not None and request.until <= self.clock
            if is_over and request is not holder:
                self._leave(request)
        if holder is not None and holder.until is not None and holder.until <= self.clock:
            self._leave(holder)
            self._grant()

    def _acquire(self, seqnum: SeqNum, acquire: Acquire) -> SeqNum | None:
        token = self._tokens.get(acquire.owner)
        if token is not None:
            if self.holds(token):
                self._extend(token, acquire.lease_s)
            return token
        if len(self._queue) >= QUEUE_MAX:
            return None
        until = None if acquire.wait_s is None else self.clock + acquire.wait_s
        self._join(LockRequest(seqnum, acquire.owner, acquire.lease_s, until))
        if len(self._queue) == 1:
            self._grant()
        return seqnum

    def _release(self, token: SeqNum) -> SeqNum | None:
        request = self._queue.get(token)
        if request is None:
            return token if token in self._released else None
        held = self.holds(token)
        self._leave(request)
        if not held:
            return None
        assert token not in self._queue, "a released token has left the queue"
        self._released[token] = None
        if len(self._released) > _RELEASED_MAX:
            self._released.popitem(last=False)
        self._grant()
        return token

    def _extend(self, token: SeqNum, lease_s: float) -> SeqNum | None:
        if not self.holds(token):
            return None
        self._queue[token].until = self.clock + lease_s
        return token

    def _join(self, request: LockRequest) -> None:
        self._queue[request.token] = request
        self._tokens[request.owner] = request.token

    def _leave(self, request: LockRequest) -> None:
        del self._queue[request.token]
        del self._tokens[request.owner]
        assert len(self._tokens) == len(self._queue), "an owner has one place"

    def _grant(self) -> None:
        if (holder := self.holder) is not None:
            holder.until = self.clock + holder.lease_s

    # --- questions

    @property
    def holder(self) -> LockRequest | None:
        """The request that holds the lock, by the time of the log."""
        return next(iter(self._queue.values()), None)

    def holds(self, token: SeqNum) -> bool:
        """Whether `token` is the token of the holder."""
        return (holder := self.holder) is not None and holder.token == token

    def token_of(self, owner: str) -> SeqNum | None:
        """Return the token of an owner in the queue; None if the owner is not queued."""
        return self._tokens.get(owner)

    def place(self, token: SeqNum) -> int | None:
        """Return how many requests are queued before `token`; None if `token` is not queued."""
        return next((place for place, held in enumerate(self._queue) if held == token), None)

    def __len__(self) -> int:
        """Number of requests in the queue, including the holder's."""
        return len(self._queue)

    @property
    def size(self) -> int:
        """Number of places and released tokens in a snapshot."""
        return len(self._queue) + len(self._released)

    def snapshot(self) -> LockSnapshot:
        """Return the whole state, from which another process can continue."""
        queue = (QueuePlace(r.token, r.owner, r.lease_s, r.until) for r in self._queue.values())
        return LockSnapshot(self.clock, tuple(queue), tuple(self._released))

    def check_invariants(self) -> None:
        """Assert that the queue is sorted and has each owner once."""
        assert list(self._queue) == sorted(self._queue)
        assert self._tokens == {request.owner: token for token, request in self._queue.items()}
        assert self.holder is None or self.holder.until is not None
        assert len(self._queue) <= QUEUE_MAX
        assert len(self._released) <= _RELEASED_MAX
        assert not self._released.keys() & self._queue.keys(), "a token is released once"
