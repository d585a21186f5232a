"""The home of tags: checks the conditions of appends, and appends (decision 0043).

The home appends to its own shard. It executes the conditional appends with one tag one after
another: it checks a condition only after the outcome of the preceding append is final. A check
reads the last record with the tag, linearizably. `ConditionalAppends` calls `Home`, which reads by
`Reads` and appends by `ShardWriter`.

A check must see every record with the tag that may be ordered before the records of its own append.
Such records come from three sources:

- Appends of this incarnation that timed out. Their localids lie below the barrier of the shard's
  writer, so no condition is checked until the shard is ordered up to this barrier.
- Records that an earlier incarnation stored. They are ordered before this incarnation gets the
  shard, or never (`NewWriters`).
- Records of the previous home, which has left. They are ordered before the entry that makes this
  node the home (`NewView`), or never. So a condition is checked only after that entry is applied
  here. The read of the last record then reflects at least this entry.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from indilog.base.errors import (
    ConditionFailedError,
    IndilogError,
    NotReadyError,
    OverloadedError,
    SealedError,
    TrimmedError,
)
from indilog.base.ids import (
    MAX_SEQNUM,
    Instant,
    MetalogPosition,
    NodeId,
    SeqNum,
    TagHash,
    UserTag,
    log_tag,
    names_match,
    tag_columns,
    tag_hash,
)
from indilog.base.log import After, Record
from indilog.config import NodeConfig
from indilog.roles.role import Answer, AnswerAppends, Effect
from indilog.wire.messages import Direction
from indilog_compute.reads.operation import Answered, Operation
from indilog_compute.reads.reads import Reads
from indilog_compute.shard_writer import ShardWriter


class Conditional(NamedTuple):
    """Records to append together to `log`, the tags of each, and the condition."""

    log: str
    after: After
    records: Sequence[tuple[bytes, tuple[UserTag, ...]]]

    @property
    def tag(self) -> TagHash:
        """The hash of the tag in the condition."""
        return tag_hash(self.log, self.after.tag)

    @property
    def size_bytes(self) -> int:
        """Bytes of data."""
        return sum(len(data) for data, _ in self.records)


class Requested(NamedTuple):
    """The origin of an append that another compute node sent: that node, and the number of its
    request.
    """

    sender: NodeId
    request: int


class Result(NamedTuple):
    """The outcome of an append that came from another compute node."""

    to: Requested
    outcome: AnswerAppends | Answered | Exception


class AppendStage(enum.Enum):
    """The stages of a conditional append; each stage but the last waits for something."""

    QUEUED = enum.auto()
    """The append waits for the earlier appends with its tag, and for the barrier."""
    CHECKING = enum.auto()
    """The append waits for the read of the last record with its tag."""
    APPENDING = enum.auto()
    """The append waits until its records are ordered."""
    ENDED = enum.auto()
    """The append was answered."""


class Check:
    """A conditional append at its home. The check is the waiter of its own read and append.

    Attributes:
        origin: the waiter of a caller on this node, or a `Requested`.
        expires: when the append fails, unless its records were given to the shard's writer by then;
            None: `begin` was not called since `add`.
    """

    __slots__ = ("append", "expires", "origin", "stage")

    def __init__(self, append: Conditional, origin: object) -> None:
        self.append = append
        self.origin = origin
        self.stage = AppendStage.QUEUED
        self.expires: Instant | None = None


Outcome: TypeAlias = Effect | Result


class Home:
    """The conditional appends of the tags whose home this compute node is."""

    def __init__(self, config: NodeConfig) -> None:
        appends = config.appends
        self._timeout_s = appends.append_timeout_s
        self._pending_max = appends.append_pending_max
        self._pending_bytes_max = appends.append_pending_bytes_max
        self._queues: dict[TagHash, deque[Check]] = {}
        self._idle: dict[TagHash, None] = {}
        """Tags whose first append in the queue has not begun."""
        self._waiting: dict[Check, None] = {}
        """Checks whose records were not given to the shard's writer, in the order in which they
        expire.
        """
        self._pending = self._pending_bytes = 0
        self._reading = 0
        """Number of reads in flight, including the reads of checks that have expired."""
        self._now = Instant(0.0)

    def __len__(self) -> int:
        return self._pending

    @property
    def awaits_answers(self) -> bool:
        """Whether an append or a read is unanswered; `take` handles the answers."""
        return bool(self._pending or self._reading)

    def add(self, append: Conditional, origin: object) -> None:
        """Accept an append.

        Raises:
            OverloadedError: too many conditional appends, or too many bytes of them, wait already.
        """
        if self._pending >= self._pending_max or self._pending_bytes >= self._pending_bytes_max:
            raise OverloadedError(
                f"{self._pending:,} conditional appends ({self._pending_bytes:,} bytes) wait; try "
                "again when some are done."
            )
        self._pending += 1
        self._pending_bytes += append.size_bytes
        check = Check(append, origin)
        self._waiting[check] = None
        self._idle.setdefault(append.tag)
        self._queues.setdefault(append.tag, deque()).append(check)

    def begin(
        self,
        now: Instant,
        reads: Reads,
        *,
        is_home: Callable[[TagHash], bool],
        barrier_reached: bool,
        refusal: IndilogError | None,
    ) -> list[Outcome]:
        """Begin the checks that can begin, and fail the checks that wait too long.

        Args:
            now: the time.
            reads: reads the last records.
            is_home: returns whether this node is the home of a tag according to its applied
                entries. The sender of an append may have applied more entries.
            barrier_reached: whether the shard is ordered up to its barrier.
            refusal: the error of all appends, if this node no longer appends; None: this node may
                append.
        """
        self._now = now
        outcomes: list[Outcome] = []
        for check in reversed(list(self._waiting)):
            if check.expires is not None:
                break
            check.expires = Instant(now + self._timeout_s)
        for check in list(self._waiting):
            if refusal is None and now < (check.expires or now):
                break
            outcomes.append(self._end(check, refusal or self._expired()))
        if barrier_reached:
            for tag in [tag for tag in self._idle if is_home(tag)]:
                del self._idle[tag]
                queue = self._queues[tag]
                if queue[0].stage is AppendStage.QUEUED:
                    outcomes += self._read(queue[0], reads, MAX_SEQNUM)
        return outcomes

    def _expired(self) -> NotReadyError:
        return NotReadyError(
            f"The condition was not checked within {self._timeout_s:g} s; nothing was appended."
        )

    def _read(
        self, check: Check, reads: Reads, bound: SeqNum, position: MetalogPosition = 0
    ) -> list[Outcome]:
        """Read the last record with the tag of the condition up to `bound`. The first read of a
        check is fresh.
        """
        append = check.append
        operation = Operation(
            Direction.PREV, append.tag, bound, position, check,
            log=log_tag(append.log), fresh=check.stage is AppendStage.QUEUED,
        )  # fmt: skip
        check.stage = AppendStage.CHECKING
        try:
            reads.start(operation)
        except OverloadedError as error:
            return [self._end(check, error)]
        self._reading += 1
        return []

    def take(
        self, effects: Sequence[Effect], reads: Reads, writer: ShardWriter | None
    ) -> list[Outcome]:
        """Handle the answers to checks that `effects` contain. Return the other effects, and the
        outcomes that follow from the answers.
        """
        outcomes: list[Outcome] = []
        for effect in effects:
            if type(effect) is Answer and type(effect.waiter) is Check:
                outcomes += self._on_answer(effect.waiter, effect.outcome, reads, writer)
            elif type(effect) is AnswerAppends and len(self._waiting) < self._pending:
                outcomes += self._on_appended(effect)
            else:
                outcomes.append(effect)
        return outcomes

    def _on_answer(
        self, check: Check, outcome: object, reads: Reads, writer: ShardWriter | None
    ) -> list[Outcome]:
        if check.stage is not AppendStage.APPENDING:
            self._reading -= 1
        if check.stage is AppendStage.ENDED:
            return []
        if isinstance(outcome, Exception):  # the read or the append failed
            return [self._end(check, outcome)]
        assert check.stage is AppendStage.CHECKING, (
            "an append is answered by `AnswerAppends`, or an error"
        )
        assert isinstance(outcome, Answered)
        return self._on_last(check, outcome, reads, writer)

    def _on_last(
        self, check: Check, last: Answered, reads: Reads, writer: ShardWriter | None
    ) -> list[Outcome]:
        """Compare the last record with the condition; append if the condition holds."""
        append, record = check.append, last.value
        known = -1 if append.after.seqnum is None else append.after.seqnum
        if isinstance(record, TrimmedError):
            if known < record.first_seqnum - 1:
                return [self._end(check, last)]
        elif isinstance(record, Record):
            if not names_match(record.names, append.log, append.after.tag):
                if record.seqnum > 0:  # another tag with the same hash
                    return self._read(check, reads, record.seqnum - 1, last.position)
            elif record.seqnum > known:
                failed = ConditionFailedError(append.after.tag, record.seqnum)
                return [self._end(check, Answered(failed, last.position))]
        return self._append(check, writer)

    def _append(self, check: Check, writer: ShardWriter | None) -> list[Outcome]:
        append = check.append
        try:
            if writer is None:
                raise SealedError("This compute node has no shard any more; append elsewhere.")
            columns = [(data, tag_columns(append.log, tags)) for data, tags in append.records]
            writer.add_batch(columns, check)
        except IndilogError as error:
            return [self._end(check, error)]
        check.stage = AppendStage.APPENDING
        del self._waiting[check]
        return []

    def _on_appended(self, effect: AnswerAppends) -> list[Outcome]:
        """Return the acknowledgements of callers on this node, and the results for other nodes."""
        waiters, results = list(effect.waiters), list[Outcome]()
        for place, waiter in enumerate(waiters):
            if type(waiter) is not Check:
                continue
            done = AnswerAppends([None], effect.first + place, effect.position)
            if isinstance(waiter.origin, Requested):
                waiters[place] = None
                results.append(self._end(waiter, done))
            else:
                waiters[place] = waiter.origin
                self._forget(waiter)
        return [effect._replace(waiters=waiters), *results]

    def _forget(self, check: Check) -> None:
        check.stage = AppendStage.ENDED
        self._waiting.pop(check, None)
        tag = check.append.tag
        queue = self._queues[tag]
        queue.remove(check)
        if queue:
            self._idle.setdefault(tag)
        else:
            del self._queues[tag]
            self._idle.pop(tag, None)
        self._pending -= 1
        self._pending_bytes -= check.append.size_bytes

    def _end(self, check: Check, outcome: AnswerAppends | Answered | Exception) -> Outcome:
        self._forget(check)
        if isinstance(check.origin, Requested):
            return Result(check.origin, outcome)
        return Answer(check.origin, outcome)

    def deadline(self) -> Instant | None:
        """When the first check expires; None: no check waits."""
        for check in self._waiting:
            return check.expires or self._now
        return None

    def abandon(self, error: IndilogError) -> list[Outcome]:
        """Fail the appends that were not given to the shard's writer. The writer itself fails the
        other appends.
        """
        return [self._end(check, error) for check in list(self._waiting)]

    def check_invariants(self) -> None:
        """Assert that one append of a tag is in flight at a time, and that the sums are right."""
        checks = [check for queue in self._queues.values() for check in queue]
        assert len(checks) == self._pending
        assert sum(check.append.size_bytes for check in checks) == self._pending_bytes
        assert all((c in self._waiting) == (c.stage is not AppendStage.APPENDING) for c in checks)
        assert self._idle.keys() <= self._queues.keys()
        for tag, queue in self._queues.items():
            assert queue, "a tag without appends has no queue"
            assert all(check.stage is AppendStage.QUEUED for check in list(queue)[1:])
            assert queue[0].stage is not AppendStage.QUEUED or tag in self._idle
