"""The replica of one shard in one process, and the commands that its callers append together.

While a record of the shard is being appended, the commands of further callers wait. The next record
then holds the commands of up to 64 callers. So under load, one record holds the claims and
acknowledgements of many consumers. A lone caller does not wait for others. `QueueReplica` and
`Delivery` call `ShardReplica`, which applies records to a `ShardState` through
`indilog.replayed.Replica`.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

from bokiqueue import waiting
from bokiqueue.checks import BACKOFF_S
from bokiqueue.errors import QueueTrimmedError
from bokiqueue.message_cache import MessageCache
from bokiqueue.records import (
    FORMAT,
    CancelClaim,
    Claim,
    Command,
    QueueTags,
    Requeue,
    ReviveDeadLetters,
    SetAside,
    decode_snapshot,
    encode,
)
from bokiqueue.shard_state import Message, ShardOutcome, ShardState
from indilog import (
    AppendOutcomeUnknownError,
    IndilogError,
    Log,
    Record,
    TooLargeError,
    TrimmedError,
)
from indilog.replayed import Replica, RetryPolicy, SubStream
from indilog.sdk import Event, LogClock, SeqNum, run_in_background, run_to_end

CHECKPOINT_EVERY: Final = 1024
"""Smallest number of a shard's records between two checkpoints."""
COMMANDS_MAX: Final = 64
"""Largest number of callers whose commands go into one record."""
_ASIDE_MAX: Final = 64
"""Largest number of messages that are set aside before a checkpoint."""
_RETURNS_MAX: Final = 1024
"""Largest number of commands waiting to return messages. Further messages are returned when their
leases end.
"""
_RETURNS: Final = RetryPolicy(tries=10, first_s=0.05)
"""Retries of the record that returns messages which no consumer got."""


class WantedMessages:
    """A consumer's request for up to `count` messages, each under a lease of `lease_s` seconds."""

    def __init__(self, lease_s: float, count: int = 1) -> None:
        self.lease_s = lease_s
        self.count = count


Wanted: TypeAlias = Command | WantedMessages


class Submission:
    """A command of one caller, or one caller's request for messages.

    Attributes:
        wanted: the command or the request.
        seqnum: seqnum of the record with the command; None until its outcome is known.
        touched: the messages that the command changed, or that the caller got.
        error: the error to raise in the caller instead of an outcome; None: no error.
        is_abandoned: whether the caller was cancelled. Messages that it gets must be returned.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.seqnum: SeqNum | None = None
        self.touched: tuple[SeqNum, ...] = ()
        self.error: BaseException | None = None
        self.is_abandoned = False

    @property
    def is_over(self) -> bool:
        """Whether the submission has an outcome or an error."""
        return self.seqnum is not None or self.error is not None


class ShardReplica:
    """The state of one shard in this process, and this process's claims.

    Attributes:
        number: number of the shard.
        records_below: seqnum below which there may be records that are not applied.
        claims: the undecided claims of this process. The key is an event that is set when the claim
            is decided; the value is the number of messages that the claim wants.
        rests_until: end of the rest after a claim that got no message, in seconds of log time
            (`replica._REST_S`).
        is_saving: whether a caller is writing a checkpoint.
        aside_tag: the shard's tag `aside`.
    """

    def __init__(
        self, queue: str, number: int, tags: QueueTags, contents: MessageCache, clock: LogClock
    ) -> None:
        self.number = number
        self.records_below: SeqNum = 0
        self.claims: dict[Event, int] = {}
        self.rests_until = 0.0
        self.is_saving = False
        self.aside_tag = tags.aside[number]
        self._queue = queue
        self._pushed_tag = tags.pushed
        self._waiting: deque[Submission] = deque()
        """Submissions whose commands are in no record yet."""
        self._appending: Event | None = None
        """Set when the current append has ended; None: no record is being appended."""
        self._is_returning = False
        self._commands_max = COMMANDS_MAX
        self._to_return: list[CancelClaim | Requeue] = []
        """Commands that return messages that no caller got: a claim has an unknown outcome, or a
        caller was cancelled.
        """

        def on_record(record: Record) -> None:
            clock.read(record.ordered_at)

        self._replica = Replica[ShardState, ShardOutcome](
            SubStream(
                tags.shards[number], tags.checkpoints[number], FORMAT,
                f"Shard {number} of queue {queue!r}",
            ),
            lambda: ShardState(contents=contents),
            lambda content: ShardState(decode_snapshot(content), contents),
            checkpoint_every=CHECKPOINT_EVERY,
            on_record=on_record,
        )  # fmt: skip

    # --- the state

    @property
    def state(self) -> ShardState:
        """The state after the records applied so far."""
        return self._replica.state

    @property
    def end(self) -> SeqNum:
        """Records below this seqnum are applied."""
        return self._replica.end

    def note_records_below(self, records_below: SeqNum) -> None:
        """Note that there may be new records below `records_below`."""
        self.records_below = max(self.records_below, records_below)

    @property
    def is_stale(self) -> bool:
        """Whether there may be records that are not applied."""
        return self._replica.known < self.records_below

    def has_ready(self, now: float) -> bool:
        """Whether more messages are ready at `now` than the undecided claims want."""
        return self.state.ready(now) > sum(self.claims.values())

    def has_unclaimed(self, now: float) -> bool:
        """Do the same as `has_ready`, and count messages that are about to be returned."""
        return self.state.ready(now) + len(self._to_return) > sum(self.claims.values())

    def may_have_message(self, now: float) -> bool:
        """Whether one more claim may get a message."""
        return self.is_stale or self.has_unclaimed(now)

    async def catch_up(self, log: Log, until: SeqNum, *, is_in_session: bool = False) -> None:
        """Apply the records below `until` (`Replica.catch_up_to`).

        Raises:
            QueueTrimmedError: the whole log of the queue was trimmed.
        """
        try:
            await self._replica.catch_up_to(log, until, is_in_session=is_in_session)
        except TrimmedError as error:
            raise QueueTrimmedError(self._queue, error.first_seqnum) from error

    # --- commands

    async def submit(self, log: Log, wanted: Wanted) -> Submission:
        """Append a command and return its outcome. The record may also hold commands of other
        callers.

        If the caller is cancelled after its command went into a record, the command may still take
        effect. Messages that the caller would have got are returned to the queue; their delivery
        does not count as a try.

        Consumers in one record that want the same lease get messages in the order of their calls.
        The first consumer gets up to its number, then the next consumer.

        Raises:
            AppendOutcomeUnknownError: the command may or may not take effect. If it is a claim,
                this process's next record of the shard cancels it; its delivery is no try.
            IndilogError: as for `Log.append`; the command has no effect.
        """
        own = Submission(wanted)
        self._waiting.append(own)
        try:
            while not own.is_over:
                if self._appending is not None:
                    await self._appending.wait()
                else:
                    await run_to_end(self._append_waiting(log))
        except BaseException:
            if own in self._waiting:
                self._waiting.remove(own)
            own.is_abandoned = True
            if own.is_over and isinstance(wanted, WantedMessages):
                self.return_messages(log, own)
            raise
        if own.error is not None:
            raise own.error
        return own

    def return_messages(self, log: Log, claimed: Submission, lost: SeqNum | None = None) -> None:
        """Return the messages of a decided claim, because no consumer got them. The delivery does
        not count as a try.

        The commands are appended in the background, or with the next record of the shard.

        Args:
            log: log of the queue.
            claimed: the claim.
            lost: a message whose bytes are lost; None: there is none. Its delivery counts as a try,
                so that it does not stay before all other messages for ever.
        """
        if claimed.touched:
            assert claimed.seqnum is not None, "a claim that got a message is decided"
            if lost is not None:
                self._plan_return(Requeue(claimed.seqnum, (lost,), BACKOFF_S))
            others = tuple([seqnum for seqnum in claimed.touched if seqnum != lost])
            if others:
                self._plan_return(Requeue(claimed.seqnum, others, 0.0, is_no_try=True))
            self._start_returning(log)

    def _plan_return(self, command: CancelClaim | Requeue) -> None:
        if len(self._to_return) < _RETURNS_MAX:
            self._to_return.append(command)

    def _start_returning(self, log: Log) -> None:
        if self._to_return and not self._is_returning:
            task = run_in_background(self._append_returns(log))
            self._is_returning = task is not None

    async def _append_returns(self, log: Log) -> None:
        """Append the commands in `_to_return`, unless records of other callers include them. If the
        log is unavailable for long, the messages are returned when their leases end.
        """
        try:
            for attempt in range(_RETURNS.tries):
                await self._append_waiting(log)
                if not self._to_return:
                    return
                await waiting.pause(_RETURNS.pause_s(attempt))
        finally:
            self._is_returning = False

    async def _append_waiting(self, log: Log) -> None:
        """Append one record with the commands of waiting callers, and decide these commands."""
        if self._appending is not None:
            return
        self._appending = appending = Event()
        count = min(self._commands_max, len(self._waiting))
        batch = [self._waiting.popleft() for _ in range(count)]
        try:
            await self._append(log, batch)
        except TooLargeError as error:
            self._retry_in_parts(batch, error)
        except Exception as error:  # noqa: BLE001 - each caller raises it
            _fail(batch, error)
        except BaseException:
            _fail(batch, AppendOutcomeUnknownError("The event loop ended during an append."))
            raise
        finally:
            self._appending = None
            appending.set()
        for one in batch:
            if one.is_abandoned and isinstance(one.wanted, WantedMessages):
                self.return_messages(log, one)
        self._start_returning(log)

    def _retry_in_parts(self, batch: list[Submission], error: TooLargeError) -> None:
        if len(batch) == 1:
            _fail(batch, error)
        self._commands_max = max(1, len(batch) // 2)
        self._waiting.extendleft(one for one in reversed(batch) if not one.is_over)

    async def _append(self, log: Log, batch: list[Submission]) -> None:
        others = [one for one in batch if not isinstance(one.wanted, WantedMessages)]
        consumers: dict[float, list[Submission]] = {}
        for one in batch:
            if isinstance(one.wanted, WantedMessages):
                consumers.setdefault(one.wanted.lease_s, []).append(one)
        returns = self._to_return[: self._commands_max]
        attempt = secrets.randbits(63) or 1
        claims = [
            Claim(sum(count_of(one) for one in ones), lease_s, attempt)
            for lease_s, ones in consumers.items()
        ]
        settled = [one.wanted for one in others if not isinstance(one.wanted, WantedMessages)]
        if not batch and not returns:
            return
        try:
            outcome = await self._append_commands(log, [*settled, *returns, *claims])
        except BaseException as error:
            if claims and not (isinstance(error, IndilogError) and error.retryable):
                self._plan_return(CancelClaim(attempt))
            raise
        del self._to_return[: len(returns)]
        for one, touched in zip(others, outcome.touched, strict=False):
            one.seqnum, one.touched = outcome.seqnum, touched
        of_claims = outcome.touched[len(settled) + len(returns) :]
        for ones, got in zip(consumers.values(), of_claims, strict=True):
            start = 0
            for one in ones:
                end = start + count_of(one)
                one.seqnum, one.touched = outcome.seqnum, got[start:end]
                start = end

    async def _append_commands(
        self, log: Log, commands: Sequence[Command], tags: Sequence[str] = ()
    ) -> ShardOutcome:
        if any(isinstance(one, Requeue | ReviveDeadLetters | CancelClaim) for one in commands):
            tags = [*tags, self._pushed_tag]  # a message may be ready
        try:
            return await self._replica.append(log, encode(*commands), tags=tags)
        except TrimmedError as error:
            raise QueueTrimmedError(self._queue, error.first_seqnum) from error

    # --- setting aside, checkpoints and trims

    async def set_aside(self, log: Log, seqnum: SeqNum, data: bytes) -> None:
        """Append the bytes of a message again (`SetAside`). Then the message no longer keeps the
        shard's other records from being trimmed.
        """
        await self._append_commands(log, [SetAside(seqnum, data)], tags=[self.aside_tag])

    @property
    def is_save_due(self) -> bool:
        """Whether this process should write a checkpoint."""
        return self._replica.is_save_due

    def to_set_aside(self) -> list[Message]:
        """Return the messages to set aside before the next checkpoint, at most 64."""
        return self.state.to_set_aside(self._replica.covered, self.end)[:_ASIDE_MAX]

    async def save(self, log: Log) -> None:
        """Write a checkpoint and trim the records that it replaces."""
        aside_from = self.state.aside_from(self.end)
        if await self._replica.save(log):
            await log.trim(aside_from, tag=self.aside_tag)


def count_of(one: Submission) -> int:
    """Return how many messages a submission wants; 0 for a command."""
    return one.wanted.count if isinstance(one.wanted, WantedMessages) else 0


def _fail(batch: list[Submission], error: BaseException) -> None:
    for one in batch:
        if not one.is_over:
            one.error = error
