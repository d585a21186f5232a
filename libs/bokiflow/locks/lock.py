"""Fenced locks with leases on a log (PITFALLS 11; API.md, "BokiFlow").

`async with Lock(log, "hotel:7") as held:` queues for the lock, acquires it, and releases it when
the block ends. At every seqnum of the log, at most one holder has the lock. `held.token` is larger
than the tokens of all earlier holders.

A holder whose lease has ended gets an error, but a process that was paused may get the error too
late. So the guarded resource should refuse a token that is smaller than the largest token that it
has seen. Applications use `Lock`, and `operations.run_lock` uses it for runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from types import TracebackType
from typing import Final

from bokiflow.locks.lock_records import (
    OWNER_CHARACTERS_MAX,
    SECONDS_MAX,
    Acquire,
    Command,
    ExtendLease,
    Release,
    Remind,
    encode,
)
from bokiflow.locks.lock_renewal import Renewal
from bokiflow.locks.lock_replica import LockReplica, replica_of
from bokiflow.locks.lock_state import QUEUE_MAX, CommandOutcome
from bokiflow.runs.errors import (
    LockLostError,
    LockQueueFullError,
    LockSettingsError,
    LockTimeoutError,
)
from indilog import IndilogError, Log, TrimmedError
from indilog.sdk import SeqNum, append_outcome_unknown, run_in_background

LEASE_S: Final = 30.0
_LEASE_S_MIN: Final = 0.001
_REMINDER_S_MIN: Final = 0.001
_PLACE_S: Final = 1.0
"""Seconds by which a waiting caller delays its reminder for each place before it in the queue."""


def seconds_now() -> float:
    """Return the seconds of a monotonic clock. It decides only when to read, not who holds the
    lock.
    """
    return time.monotonic()


class HeldLock:
    """A lock that the caller holds until its lease ends.

    Attributes:
        name: name of the lock.
        token: the fencing token, which is the seqnum of the record that queued the caller.
        held_until: when the first lease ends at the earliest, in the time of `seconds_now`; None:
            not known.
    """

    def __init__(
        self,
        log: Log,
        name: str,
        replica: LockReplica,
        token: SeqNum,
        held_until: float | None = None,
    ) -> None:
        self.name = name
        self.token = token
        self.held_until = held_until
        self._log = log
        self._replica = replica

    async def extend(self, lease: float = LEASE_S) -> None:
        """Extend the lease to `lease` seconds from now. This also checks that the lock is held.

        Raises:
            LockLostError: the lease had already ended.
            AppendOutcomeUnknownError: the lease may be extended; the call can be repeated.
        """
        check_lease(lease)
        await self._append_command(ExtendLease(self.token, lease))
        _begin_save_if_due(self._log, self._replica)

    async def release(self) -> None:
        """Release the lock to the next caller in the queue. A recent release may be repeated.

        Raises:
            LockLostError: the lease had already ended, so the lock was released before.
            AppendOutcomeUnknownError: the release may or may not have taken effect. If it did not,
                the end of the lease releases the lock.
        """
        await self._append_command(Release(self.token))
        if self._replica.is_save_due:
            await _save(self._log, self._replica)

    async def _append_command(self, command: ExtendLease | Release) -> None:
        outcome = await self._replica.append(self._log, encode(command))
        if outcome.token is None:
            raise LockLostError(self.name, self.token)

    def __repr__(self) -> str:
        return f"HeldLock(name={self.name!r}, token={self.token})"


class Lock:
    """A named lock on a log. `Lock` objects are cheap.

    An `async with` block acquires the lock on entering and releases it on leaving. If the lease has
    ended before, leaving the block raises `LockLostError`, unless the block raised another error.
    With `renew`, the block ends with `LockLostError` as soon as the loss of the lease is detected.

    Args:
        log: log of the lock. The log may also hold other records.
        name: name of the lock, unique in the log.
        lease: seconds after which the lock is released, unless the lease is extended in time.
        wait: seconds to wait for the lock; None: without limit.
        owner: an id of the caller. If this owner already holds the lock or waits for it, `acquire`
            returns the same token. So the owner may retry after an interruption, and keeps its
            place in the queue. Default: a new id for each call.
        renew: whether the lease is extended in the background while the block runs.
    """

    def __init__(
        self,
        log: Log,
        name: str,
        *,
        lease: float = LEASE_S,
        wait: float | None = None,
        owner: str | None = None,
        renew: bool = True,
    ) -> None:
        check_lease(lease)
        if wait is not None:
            _check_seconds("A wait", wait)
        if owner is not None and not 0 < len(owner) <= OWNER_CHARACTERS_MAX:
            raise LockSettingsError(
                f"owner must be 1 to {OWNER_CHARACTERS_MAX} characters of text."
            )
        self.name = name
        self._log = log
        self._lease_s = lease
        self._wait_s = wait
        self._owner = owner
        self._renew = renew
        self._replica = replica_of(log, name)
        self._held: HeldLock | None = None
        self._renewal: Renewal | None = None

    async def acquire(self) -> HeldLock:
        """Queue for the lock and acquire it; the caller must release it.

        Raises:
            LockTimeoutError: the lock was not acquired within `wait` seconds; the caller left the
                queue.
            LockQueueFullError: too many callers are queued.
            AppendOutcomeUnknownError: the caller may be queued, or hold the lock. With an `owner`,
                the caller may retry and keeps its place. Without an `owner`, the place ends after
                `wait` seconds or one lease.
        """
        owner = self._owner or secrets.token_hex(8)
        ends = math.inf if self._wait_s is None else seconds_now() + self._wait_s
        while True:
            place = _PlaceInQueue(self._log, self.name, self._replica, self._lease_s)
            token = await place.acquire(owner, ends, leaves=self._owner is None)
            if token is not None:
                return HeldLock(self._log, self.name, self._replica, token, place.held_until())
            if seconds_now() >= ends:
                raise LockTimeoutError(
                    f"Lock {self.name!r} was not free within {self._wait_s} s; try again later."
                )

    async def leave(self) -> None:
        """Leave the queue, or release the lock, as the `owner` of this object."""
        if self._owner is not None:
            place = _PlaceInQueue(self._log, self.name, self._replica, self._lease_s)
            await place.leave(self._owner)

    async def __aenter__(self) -> HeldLock:
        if self._held is not None:
            raise RuntimeError(
                "A Lock object serves one block at a time; create another one for a nested block."
            )
        held = self._held = await self.acquire()
        if self._renew:
            assert held.held_until is not None, "`acquire` knows it"
            self._renewal = Renewal(held.extend, self._lease_s, held.held_until - seconds_now())
        return held

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        held, renewal = self._held, self._renewal
        assert held is not None, "a block is entered before it is left"
        self._held = self._renewal = None
        if renewal is not None and await renewal.stop(kind):
            raise LockLostError(held.name, held.token) from error
        try:
            await held.release()
        except IndilogError:
            if kind is None:
                raise
            # the lease ends by itself; the error of the block has priority


class _PlaceInQueue:
    """One caller's place in the queue of a lock.

    The caller waits with one read, which the log answers when the lock has a new record. When the
    holder's lease should have ended, a waiting caller appends a reminder. The reminder's
    `ordered_at` ends the lease.
    """

    def __init__(self, log: Log, name: str, replica: LockReplica, lease_s: float) -> None:
        self._log = log
        self._name = name
        self._replica = replica
        self._lease_s = lease_s
        self._log_time = 0.0
        """Log time of this caller's last record. By `seconds_now`, this moment is between `_asked`
        and `_time`.
        """
        self._asked = 0.0
        self._time = 0.0

    async def acquire(self, owner: str, ends: float, *, leaves: bool) -> SeqNum | None:
        """Wait until `owner` holds the lock, and return the token; None: `owner` left the queue
        first.

        Args:
            owner: owner of the place in the queue.
            ends: when to leave the queue, in the time of `seconds_now`.
            leaves: whether an interrupted wait leaves the queue. If False, the owner keeps its
                place.
        """
        token: SeqNum | None = None
        try:
            token = await self._join(owner, ends)
            return await self._wait_until_held(token, ends)
        except (IndilogError, asyncio.CancelledError):
            has_left = leaves and await self._has_left(owner)
            if token is None or has_left:
                raise
            with append_outcome_unknown(token):  # the caller keeps its place
                raise

    async def _wait_until_held(self, token: SeqNum, ends: float) -> SeqNum | None:
        """Wait until the token holds the lock, and return the token; None: the token is no longer
        queued.
        """
        while not self._replica.state.holds(token):
            if self._replica.state.place(token) is None:
                return None  # this process was paused: its lease, or its wait, has ended
            if seconds_now() >= ends:
                await self._append(Release(token))
                return None
            await self._wait_for_records(token, ends)
        return token

    async def _has_left(self, owner: str) -> bool:
        """Leave the queue, and tell whether the place has certainly ended. If it has not, the place
        ends after the wait or one lease.
        """
        with contextlib.suppress(IndilogError):
            await self.leave(owner)
            return True
        return False

    async def _join(self, owner: str, ends: float) -> SeqNum:
        """Join the queue and return the token."""
        wait_s = None if ends == math.inf else min(max(0.0, ends - seconds_now()), SECONDS_MAX)
        asked = seconds_now()
        outcome = await self._append(Acquire(owner, self._lease_s, wait_s))
        if outcome.token is None:
            raise LockQueueFullError(
                f"{QUEUE_MAX:,} callers wait for lock {self._name!r} already; try again later."
            )
        self._note_log_time(outcome, asked)
        return outcome.token

    async def leave(self, owner: str) -> None:
        """Leave the queue, or release the lock."""
        await self._replica.catch_up(self._log)
        if (token := self._replica.state.token_of(owner)) is not None:
            await self._append(Release(token))

    async def _append(self, command: Command) -> CommandOutcome:
        outcome = await self._replica.append(self._log, encode(command))
        _begin_save_if_due(self._log, self._replica)
        return outcome

    def _note_log_time(self, outcome: CommandOutcome, asked: float) -> None:
        self._log_time = outcome.ordered_at
        self._asked, self._time = asked, seconds_now()

    def held_until(self) -> float:
        """Return when the lease of this caller, who holds the lock, ends at the earliest, in the
        time of `seconds_now`.
        """
        holder = self._replica.state.holder
        assert holder is not None
        assert holder.until is not None
        return self._asked + (holder.until - self._log_time)

    async def _wait_for_records(self, token: SeqNum, ends: float) -> None:
        """Wait for a record of the lock, at most until the lease ends or `ends` is reached."""
        now = seconds_now()
        due_s = self._due_s(token, now)
        wait_s = max(_REMINDER_S_MIN, min(due_s, ends - now))
        commands = self._replica.stream.tag
        try:
            record = await self._log.read_next(commands, self._replica.end, wait=wait_s)
            has_new_records = record is not None
        except TrimmedError:
            has_new_records = True  # a checkpoint covers the new records
        if has_new_records:
            await self._replica.catch_up(self._log)
        elif (asked := seconds_now()) - now >= due_s:
            self._note_log_time(await self._append(Remind()), asked)

    def _due_s(self, token: SeqNum, now: float) -> float:
        """Return the seconds until the holder's lease ends, by the time of the log."""
        state = self._replica.state
        holder, place = state.holder, state.place(token)
        assert holder is not None
        assert holder.until is not None
        assert place is not None
        log_now = self._log_time + (now - self._time)
        return holder.until - log_now + (place - 1) * _PLACE_S


def _begin_save_if_due(log: Log, replica: LockReplica) -> None:
    """Begin to write a checkpoint if it is due. The caller does not wait for it, because its lease
    or its wait may end meanwhile.
    """
    if replica.is_save_due:
        run_in_background(_save(log, replica))


async def _save(log: Log, replica: LockReplica) -> None:
    with contextlib.suppress(IndilogError):  # the caller's command has taken effect
        await replica.save(log)


def check_lease(lease: float) -> None:
    """Raise for an invalid lease.

    Raises:
        LockSettingsError: the lease is not a number, is too short or is too long.
    """
    _check_seconds("A lease", lease)
    if lease < _LEASE_S_MIN:
        raise LockSettingsError(f"lease must be at least {_LEASE_S_MIN} seconds, not {lease}.")


def _check_seconds(what: str, seconds: object) -> None:
    if not isinstance(seconds, int | float) or not 0 <= seconds <= SECONDS_MAX:
        raise LockSettingsError(
            f"{what} must be 0 to {SECONDS_MAX:,.0f} seconds, not {seconds!r:.40}."
        )
