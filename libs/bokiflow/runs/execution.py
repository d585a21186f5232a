"""One execution of a run: decided outcomes are replayed; other operations run, and the log decides
their outcomes.

All operations (steps, timers, signals, locks, children) get their outcome from `Execution.decide`.
That method awaits only the log, so tests can interleave executions call by call.

An outcome is durable before the next operation begins. The last outcome of the workflow's own
coroutine is appended late: only when that coroutine continues. If the coroutine then ends, one
append contains the outcome and the end. If it begins an operation or awaits, the outcome is
appended first. `runner` executes runs with `Execution`. `replay_check` uses a subclass that writes
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from bokiflow.runs import waiting
from bokiflow.runs.cancelling import CancelGrace
from bokiflow.runs.decision_numbers import DecisionNumbers
from bokiflow.runs.errors import (
    Cancelled,
    ChangedWorkflowError,
    FlowSettingsError,
    StepFailedError,
    UnfinishedOperationError,
)
from bokiflow.runs.flush_before_await import FlushBeforeAwait
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.operation_notes import NOTED_AFTER_S, OperationInProgress
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    INBOX_TAG,
    LATE_TAG,
    PARTITIONS,
    ChildEnded,
    OperationNoted,
    Origin,
    RecordedFailure,
    RunContinued,
    RunFinished,
    RunParked,
    RunWaits,
    StepDecided,
    encode,
    ended_tag,
    ends_tag,
    limit_tags,
    partition_of,
    partition_tag,
    run_tag,
)
from bokiflow.runs.rounds import ContinuedAsNew, next_round
from bokiflow.runs.run_log import append_all, append_with_retry, read_own_run, read_run
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import end_state
from bokiflow.runs.unawaited_operations import AskedOperations
from indilog import Entry, Log, TooLargeError
from indilog.sdk import SeqNum, note_error

_DEFERRED_BYTES_MAX: Final = 16 * 1024
"""Results with more bytes are appended at once. So a result that is too large for a record becomes
the failure of its own step.
"""
_DEFERRED_TOGETHER: Final = 500
"""Largest number of decisions in one batch."""
_MESSAGE_CHARACTERS_MAX: Final = 2000
UNDO: Final = ".undo"
"""Suffix of a compensation's number; before it comes the number of the undone operation."""
CANCEL: Final = "cancel"
"""The kind of a decision by which a cancellation replaces an operation."""
RETURN: Final = "return"
"""Number, name and kind of the decision that the workflow returned too early."""
PATCH: Final = "patch"
"""The kind of a decision that a run takes the changed path of its code."""


class LeaseCheck(Protocol):
    """Tells whether this executor is certainly the only executor of the run."""

    def is_sure(self) -> bool:
        """Whether no other executor can have taken over the run yet. If False, read the log."""

    def has_ended(self) -> bool:
        """Whether this executor must not begin any further body of the run."""


ExecutionRecord: TypeAlias = StepDecided | RunWaits | RunContinued | RunParked | RunFinished


class OperationOutcome(NamedTuple):
    """The outcome of an operation: JSON text, or a failure. `is_cancelled`: the operation had no
    effect, because the run was cancelled.
    """

    result: bytes
    failure: RecordedFailure | None = None
    is_cancelled: bool = False


class Branch:
    """Numbers operations by their place in the code, independently of the timing of concurrent
    branches.

    Attributes:
        execution: the execution of the operations.
        parent: the branch that contains this one; None: this is the main branch.
        was_notified: whether the cancellation was raised in this branch, or in one inside it.
    """

    __slots__ = ("_next", "_prefix", "execution", "parent", "was_notified")

    def __init__(
        self, execution: Execution, prefix: str = "", parent: Branch | None = None
    ) -> None:
        self.execution = execution
        self.parent = parent
        self.was_notified = False
        self._prefix = prefix
        self._next = 1

    def number(self) -> str:
        """Return the number of the next operation. For example, `3.1.2` is the second operation of
        the first branch of operation `3`.
        """
        number = self.next_number
        self._next += 1
        return number

    @property
    def next_number(self) -> str:
        """The number that `number` returns next."""
        return f"{self._prefix}{self._next}"

    def patch_number(self, name: str) -> str:
        """Return the number of the decision about patch `name`. No operation has this number."""
        return f"{self._prefix}{PATCH}:{name}"


BRANCH: Final[ContextVar[Branch | None]] = ContextVar("branch", default=None)
"""The branch whose code is running; each concurrent branch of a workflow sets its own."""
KEY: Final[ContextVar[str | None]] = ContextVar("key", default=None)
"""The idempotency key of the step whose body is running."""


def failure_from(error: BaseException) -> RecordedFailure:
    """Return the recorded form of an error."""
    kind = error.kind if isinstance(error, StepFailedError) else type(error).__name__
    return RecordedFailure(kind, " ".join(str(error).split())[:_MESSAGE_CHARACTERS_MAX])


def _too_large(error: TooLargeError) -> RecordedFailure:
    """Return the failure of an operation that ran, but whose result no record can hold."""
    return RecordedFailure(
        TooLargeError.__name__,
        f"It ran, and its effects remain, but its result is too large: the record has "
        f"{error.size:,} bytes, the limit is {error.limit:,}. Store large results in a log and "
        "return their seqnums.",
    )


def _do_nothing() -> None:
    """Do nothing: the default of a callback that the caller did not give."""


def raise_failure(decided: StepDecided, cause: BaseException | None = None) -> None:
    """Raise the failure of an operation, if it failed. Every replay raises the same error.

    Raises:
        Cancelled: the run was cancelled at this operation.
        StepFailedError: the operation failed for another reason.
    """
    failure = decided.failure
    if failure is None:
        return
    if failure.kind == Cancelled.__name__:
        raise Cancelled(failure.message) from cause
    raise StepFailedError(decided.name, failure.kind, failure.message) from cause


class Execution:
    """One execution of one run, in the epoch of `run`.

    Args:
        lease: tells whether this executor still owns the run.
        relisted_after_s: age of the run in seconds from which its end gets the tag `LATE_TAG`.
        cancel_grace_s: seconds from a cancellation until bodies are ended (`CancelGrace`).

    Attributes:
        id: id of the run.
        run: the run as of the records read so far; this execution's own decisions may be missing.
        log: log of the run.
        asked: the operations that the workflow requested.
        in_progress: the operations that this execution performs, by number.
        grace: ends bodies some time after the cancellation of the run.
        ended_bodies: by operation number, a text that says how a cancellation ended its body.
        is_ending: whether this execution ends although the run continues. No body may begin, and
            what the code returns or raises decides nothing.
        waits: the waits in progress. Each has the log time at which it ends, its task, and whether
            it is in the main branch.
        pins: number of reasons to keep this execution although it only waits, such as a lock.
        lock_waits: number of operations in progress that wait for a lock.
        is_check: whether nothing may be written or begun (`bokiflow.replay_check`).
    """

    is_check: ClassVar[bool] = False

    def __init__(
        self,
        log: Log,
        id: str,  # noqa: A002
        run: RunState,
        lease: LeaseCheck,
        partitions: int = PARTITIONS,
        relisted_after_s: float = math.inf,
        cancel_grace_s: float = math.inf,
    ) -> None:
        assert run.started is not None, "only a run that has begun is executed"
        self.id = id
        self.run = run
        self.log = log
        self.asked = AskedOperations()
        self.epoch = run.epoch
        self._tag = run_tag(id)
        self.partitions = partitions
        self.partition = partition_of(id, partitions)
        self.in_progress: dict[str, OperationInProgress] = {}
        self.is_ending = False
        self.waits: dict[object, tuple[float, object, bool]] = {}
        self.pins = 0
        self.lock_waits = 0
        self.grace = CancelGrace(self, cancel_grace_s)
        self.ended_bodies: dict[str, str] = {}
        self._relisted_after_s = relisted_after_s
        self._lease = lease
        self._parent = run.started.parent
        self._limit_tags = limit_tags(run.started.limit)
        self._round_at = run.round_at
        self._is_first_round = run.round == 1
        self._decided = dict(run.steps)
        self._reached: set[str] = set()
        self._unflushed: list[StepDecided] = []
        self._numbering = DecisionNumbers(run)
        self._when_durable: dict[str, Callable[[], None]] = {}
        self._flushing = waiting.Mutex()
        self._changed: ChangedWorkflowError | None = None
        self._main = Branch(self)
        self._is_driving = False
        self._cancel_asked = run.cancel_asked
        self._is_cancellation_suppressed = False
        self.on_cancel: list[Callable[[], None]] = []
        """Called when a cancellation is requested, to wake waiting operations."""

    # --- numbers

    @property
    def branch(self) -> Branch:
        """The branch whose code is running."""
        branch = BRANCH.get()
        return branch if branch is not None and branch.execution is self else self._main

    @property
    def is_in_main_branch(self) -> bool:
        """Whether the code of the main branch is running."""
        return self.branch is self._main

    def number(self) -> str:
        """Return the number of the next operation of this branch. The caller must not await before
        this call, so that the order of the code decides the number.
        """
        return self.branch.number()

    def key(self, number: str) -> str:
        """Return the idempotency key of an operation: the same in every execution, and unique.

        Other rounds, and later runs with this id, have other keys: a key has the round's seqnum.
        """
        return f"{self.log.name}/{self.id}@{self._round_at}/{number}"

    def child_id(self, number: str) -> str:
        """Return the unique id of the run that operation `number` starts.

        For a root run, and in rounds after the first, the id contains the seqnum at which the
        current round began. So a root run whose id is reused starts children with other ids.
        """
        is_unique = self._parent is not None and self._is_first_round
        began = "" if is_unique else f"@{self._round_at}"
        return f"{self.id}{began}/{number}"

    def origin(self, number: str, *, is_awaited: bool) -> Origin:
        """Return the origin of a run that operation `number` starts, and may await."""
        above = () if self._parent is None else self._parent.awaited_by
        return Origin(self.id, number, (self.id, *above) if is_awaited else ())

    # --- deciding

    def find_decided(self, number: str, name: str, kind: str) -> StepDecided | None:
        """Return the decided outcome of an operation; None if it is not decided.

        Raises:
            ChangedWorkflowError: another operation was decided there.
        """
        if self._changed is not None:
            raise self._changed
        known = self._decided.get(number)
        if known is None:
            return None
        if known.kind == CANCEL:
            self.mark_notified()
        elif (known.name, known.kind) != (name, kind):
            was, does = (f"{k} {n}" for k, n in ((known.kind, known.name), (kind, name)))
            self._changed = ChangedWorkflowError(self.id, number, was, does)
            raise self._changed
        if number not in self._reached:
            self._reached.add(number)
            self.asked.replayed += 1
        return known

    async def decide(
        self,
        number: str,
        name: str,
        kind: str,
        produce: Callable[[], Awaitable[OperationOutcome]],
        *,
        may_wait: bool = False,
        is_cancellable: bool = True,
        noted_after_s: float = NOTED_AFTER_S,
    ) -> StepDecided:
        """Return the decided outcome of an operation. If none is decided yet, run `produce` and let
        the log decide.

        All earlier outcomes are durable when `produce` begins. Until an outcome is decided,
        `produce` may run again in another execution. When this returns, the outcome is durable,
        unless `may_wait` defers its append until the workflow continues. If a cancellation is
        requested, the cancellation is decided instead, once in each branch. If `is_cancellable` is
        False, only `produce` may decide the cancellation (`OperationOutcome.is_cancelled`).
        `noted_after_s`: seconds after which the operation is noted for the first time
        (`operation_notes`).

        Raises:
            ChangedWorkflowError: another operation was decided there.
            Stopped: this execution must not continue.
        """
        known = self.find_decided(number, name, kind)
        if known is not None:
            if self._is_driving:
                await self.asked.catch_up(self._decided)
            return known
        if self._unflushed or self._flushing.locked():
            await self.flush()
        if is_cancellable and self.is_cancel_asked:
            self.mark_notified()
            failure = self.cancelled_at(number, name, kind)
            return await self._record(StepDecided(self.epoch, number, name, CANCEL, b"", failure))
        self.check_lease()
        begun = self._begin_operation(number, name, kind, noted_after_s)
        try:
            outcome = await produce()
        finally:
            del self.in_progress[number]
            begun.end()
        assert number not in self._decided, "one coroutine performs an operation"
        took = (begun.attempt, begun.duration_ms)
        if outcome.is_cancelled:
            self.mark_notified()
            kind = CANCEL
        record = StepDecided(self.epoch, number, name, kind, outcome.result, outcome.failure, *took)
        if may_wait and self._is_driving and len(outcome.result) <= _DEFERRED_BYTES_MAX:
            self._keep(record)
            self._unflushed.append(record)
            return record
        return await self._record(record)

    def cancelled_at(self, number: str, name: str, kind: str) -> RecordedFailure:
        """Return the failure of an operation that a cancellation replaces."""
        words = (f"The run was cancelled at {kind} {name!r}.", self.ended_bodies.pop(number, ""))
        return RecordedFailure(Cancelled.__name__, " ".join(filter(None, words)))

    def call_when_durable(self, number: str, then: Callable[[], None]) -> None:
        """Call `then` when the outcome of an operation is a durable record of the run. If the
        outcome is already durable, call `then` at once.
        """
        if self.is_durable(number):
            then()
        else:
            self._when_durable[number] = then

    def _begin_operation(
        self, number: str, name: str, kind: str, noted_after_s: float
    ) -> OperationInProgress:
        assert number not in self.in_progress, "one coroutine performs an operation"
        begun = self.in_progress[number] = OperationInProgress(
            self.epoch,
            number,
            name,
            kind,
            self._append_note,
            log_clock(self.log).now,
            noted_after_s=noted_after_s,
        )
        return begun

    async def _append_note(self, note: OperationNoted) -> None:
        await self.log.append(encode(note), tags=(self._tag,))

    def decide_now(self, name: str, kind: str, produce: Callable[[], bytes]) -> StepDecided:
        """Decide a value that is available at once and has no effect. The decision is durable
        before the next operation begins.
        """
        number = self.number()
        known = self.find_decided(number, name, kind)
        if known is None:
            known = StepDecided(self.epoch, number, name, kind, produce())
            self._keep(known)
            self._unflushed.append(known)
        return known

    def decide_patch(self, name: str) -> bool:
        """Decide whether this run takes the changed path of its code, once in each branch.

        The run takes that path, unless an earlier execution without the change has decided an
        operation at this place. A decision to take the path is durable before the next operation
        begins.
        """
        branch = self.branch
        number = branch.patch_number(name)
        if self.find_decided(number, name, PATCH) is not None:
            return True
        if branch.next_number in self._decided:
            return False
        self._keep(record := StepDecided(self.epoch, number, name, PATCH, b"true"))
        self._unflushed.append(record)
        return True

    def check_finished(self) -> None:
        """Check that a returning workflow has finished all its operations.

        If an operation has not finished, the log decides this failure. A later execution may find
        that more operations have finished, but must still end with the same failure.

        Raises:
            UnfinishedOperationError: an operation has not finished, in this or an earlier
                execution.
        """
        known = self.find_decided(RETURN, RETURN, RETURN)
        if known is not None:
            assert known.failure is not None, "a return is decided only if it fails"
            raise UnfinishedOperationError(known.failure.message)
        try:
            self.asked.check(self._decided)
        except UnfinishedOperationError as error:
            record = StepDecided(self.epoch, RETURN, RETURN, RETURN, b"", failure_from(error))
            self._keep(record)
            self._unflushed.append(record)
            raise

    async def flush(self) -> None:
        """Append all decisions that are not durable yet.

        Raises:
            Stopped: this execution must not continue.
        """
        async with self._flushing:
            await self._append_unflushed(0)

    async def _append_unflushed(self, left_max: int) -> None:
        """Append decisions that are not durable, oldest first, until at most `left_max` are left.
        If an append fails or is interrupted, its decisions stay in the list.
        """
        assert self._flushing.locked(), "one task appends at a time"
        while len(self._unflushed) > left_max:
            some = self._unflushed[:_DEFERRED_TOGETHER]
            await self._append(some)
            del self._unflushed[: len(some)]

    async def _record(self, record: StepDecided) -> StepDecided:
        try:
            await self._append([record])
        except TooLargeError as error:
            record = replace(record, result=b"", failure=_too_large(error))
            await self._append([record])
        self._keep(record)
        return record

    def _keep(self, record: StepDecided) -> None:
        assert record.epoch == self.epoch, "an execution decides in its own epoch"
        assert record.number not in self._decided, "an operation is decided once"
        self._decided[record.number] = record
        self._reached.add(record.number)

    # --- cancelling

    @property
    def is_cancel_asked(self) -> bool:
        """Whether a cancellation is requested that was not raised in this branch yet."""
        return self.is_cancel_asked_in(self.branch)

    def is_cancel_asked_in(self, branch: Branch) -> bool:
        """Do the same as `is_cancel_asked`, for a branch whose code need not be running."""
        return self._cancel_asked and not (self._is_cancellation_suppressed or branch.was_notified)

    def mark_notified(self) -> None:
        """Note that the cancellation is raised in this branch, and so in each of its parents."""
        branch: Branch | None = self.branch
        while branch is not None:
            branch.was_notified = True
            branch = branch.parent

    def suppress_cancellation(self) -> None:
        """Raise no further cancellation, because compensations run."""
        self._is_cancellation_suppressed = True

    def ask_cancel(self) -> None:
        """Make the next operation decide that the run is cancelled, and wake waiting operations."""
        self._cancel_asked = True
        self.grace.begin()
        for notify in list(self.on_cancel):
            notify()

    @property
    def is_in_operation(self) -> bool:
        """Whether an operation of the workflow is in progress."""
        return bool(self.in_progress) or any(one.is_begun for one in self.asked.left())

    # --- from the beginning to the end

    async def execute(self, body: Coroutine[Any, Any, bytes]) -> RunFinished:
        """Run the workflow from its first line; return its decided end.

        Args:
            body: the workflow's coroutine; it returns the result as JSON text.

        Raises:
            ChangedWorkflowError: the code does not match the decided steps; the run is parked.
            ContinuedAsNew: the round has ended, and the next one has begun in the next epoch.
            Stopped: this execution must not continue.
        """
        if self._cancel_asked:
            self.grace.begin()
        try:
            return await self._execute(body)
        finally:
            self.grace.stop()

    async def _execute(self, body: Coroutine[Any, Any, bytes]) -> RunFinished:
        raised: Exception | None = None
        continued: ContinuedAsNew | None = None
        finished = RunFinished(self.epoch, b"")
        context = copy_context()
        context.run(BRANCH.set, self.branch)
        try:
            result = await FlushBeforeAwait(self, body, context)
            finished = RunFinished(self.epoch, result)
        except ContinuedAsNew as asked:
            continued = asked
        except Exception as error:  # noqa: BLE001 - each error is an outcome
            note_error(error)
            raised, was_cancelled = error, isinstance(error, Cancelled)
            finished = RunFinished(self.epoch, b"", failure_from(error), was_cancelled)
        if self.has_left_out(raised):
            assert self._changed is not None
            if (given_up := await self.park(str(self._changed))) is not None:
                return given_up
            raise self._changed
        if continued is not None:
            return await self._continue(continued)
        return await self._finish(finished)

    async def _continue(self, continued: ContinuedAsNew) -> RunFinished:
        """End the round, and begin the next one, with one append.

        Returns:
            The end of the run, if the arguments of the next round are too large.

        Raises:
            ContinuedAsNew: the next round has begun.
            Stopped: another executor has taken the run, or this execution must not continue.
        """
        async with self._flushing:
            await self._append_unflushed(_DEFERRED_TOGETHER)
            await self.catch_up()
            self.check_lease()
            record = next_round(
                self.run,
                self._decided.values(),
                continued,
                cancel_asked=self._cancel_asked and not self._main.was_notified,
            )
            records: list[ExecutionRecord] = [*self._unflushed, record]
            entries = [Entry(encode(one), self._tags(one)) for one in records]
            try:
                last = await append_with_retry(self.log, entries)
            except TooLargeError as error:
                words = (
                    "The arguments of the next round, with the signals that no operation has "
                    f"consumed, have {error.size:,} bytes; the limit is {error.limit:,}."
                )
                failure = RecordedFailure(TooLargeError.__name__, words)
                finished = RunFinished(self.epoch, b"", failure)
                await self._append([*self._unflushed, finished])
                return finished
        run = self.run
        await read_own_run(partial(read_run, self.log, self.id, run, last))
        if (run.round, run.epoch) != (record.round, record.epoch + 1) or run.finished:
            raise Stopped(f"Run {self.id!r} is executed by {run.executor} now.")
        self._note_durable(records)
        raise continued

    def check_may_continue(self) -> None:
        """Check that the round may end here: in the workflow's own code, outside of operations.

        Raises:
            FlowSettingsError: the caller is a step, a branch or a task.
            Cancelled: a cancellation is requested.
        """
        if KEY.get() is not None or not (self._is_driving and self.is_in_main_branch):
            raise FlowSettingsError(
                "continue_as_new ends the workflow; call it in the workflow's own code, not in a "
                "step, a branch or a task."
            )
        if self.is_cancel_asked:
            self.mark_notified()
            raise Cancelled("The run was cancelled at the end of a round.")

    async def _finish(self, finished: RunFinished) -> RunFinished:
        run = self.run
        assert run.started is not None, "only a run that has begun ends"
        finished = replace(
            finished,
            workflow=run.started.workflow,
            started_at=run.started_at,
            began=run.began,
            steps=len(self._decided),
            version=0 if run.code is None else run.code.version,
            executor=run.executor,
            round=run.round,
        )
        async with self._flushing:
            await self._append_unflushed(_DEFERRED_TOGETHER)
            try:
                await self._append([*self._unflushed, finished])
            except TooLargeError as error:
                finished = replace(
                    finished, result=b"", failure=_too_large(error), was_cancelled=False
                )
                await self._append([*self._unflushed, finished])
        return finished

    def has_left_out(self, raised: Exception | None, undone: Collection[str] = ()) -> bool:
        """Tell whether the workflow has ended before a decided operation of its main branch, or
        before a decided compensation. Then the code does not match the decided steps.

        This also applies to a workflow that raised an error. If an earlier execution had raised at
        the same place, it would have decided nothing after it.

        Args:
            raised: the error with which the workflow ended, if any.
            undone: numbers of the operations about to be compensated.
        """
        if self._changed is None:
            with suppress(ChangedWorkflowError):  # `find_decided` stores the mismatch
                for (
                    operation
                ) in self.asked.left():  # a task of the workflow has not finished it yet
                    self.find_decided(*operation[:3])
        if self._changed is None:
            reached = self._reached.union(number + UNDO for number in undone)
            for number, record in self._decided.items():
                is_due = "." not in number or number.endswith(UNDO)
                if is_due and number not in reached and record.kind != PATCH:
                    was = f"{record.kind} {record.name}"
                    self._changed = ChangedWorkflowError(self.id, number, was, None, raised)
                    break
        return self._changed is not None

    async def park(self, reason: str, *, is_cancelled: bool = False) -> RunFinished | None:
        """Park the run until other code is deployed. If `is_cancelled`, or if the run was cancelled
        while it was parked before, end the run instead and return its end.

        An ended run is not compensated, because its compensations are part of the code that does
        not match. The failure of the run says so.
        """
        started = self.run.started
        assert started is not None, "only a run that has begun is executed"
        await self.catch_up()  # the run may have been cancelled meanwhile
        has_decided = any(record.epoch == self.epoch for record in self._decided.values())
        if is_cancelled or (self.run.is_cancelled_while_parked and not has_decided):
            words = (
                "The run was cancelled while it waited for other code; its steps were not "
                f"compensated. It waited because: {reason}"
            )
            failure = RecordedFailure(Cancelled.__name__, words[:_MESSAGE_CHARACTERS_MAX])
            return await self._finish(RunFinished(self.epoch, b"", failure, was_cancelled=True))
        await self._append([RunParked(self.epoch, started.version, reason)])
        return None

    async def end_unbegun(self, failure: RecordedFailure) -> None:
        """End a run whose code has not begun. The failure `Cancelled` ends the run as cancelled."""
        was_cancelled = failure.kind == Cancelled.__name__
        await self._finish(RunFinished(self.epoch, b"", failure, was_cancelled=was_cancelled))

    # --- the log

    def check_lease(self) -> None:
        """Check that a body may begin here.

        Raises:
            Stopped: the lease or this execution has ended, or the partition is being released.
        """
        if self.is_ending or self._lease.has_ended():
            raise Stopped(f"Run {self.id!r} may have another executor.")

    async def note_waits(self, until: float | None, what: str, end: SeqNum) -> None:
        """Record that the run only waits, and that this execution has ended (`RunWaits`)."""
        await self._append([RunWaits(self.epoch, until, what, end)])

    async def catch_up(self, own: SeqNum = -1) -> None:
        """Apply new records of the run. `own`: seqnum of a record that the session of `log` has
        appended; all records up to and including it are applied.

        Raises:
            Stopped: another executor has taken over the run, or the run cannot be read.
        """
        run = self.run
        await read_own_run(partial(read_run, self.log, self.id, run, own))
        if run.cancel_asked and not self._cancel_asked:
            self.ask_cancel()
        if run.epoch != self.epoch or (run.finished and run.finished.epoch != self.epoch):
            raise Stopped(f"Run {self.id!r} is executed by {run.executor} now.")

    async def _append(self, records: Sequence[ExecutionRecord]) -> None:
        """Append records of this epoch, and check that they take effect.

        A second copy of a record has no effect, so an append of unknown outcome is repeated.
        """
        assert all(record.epoch == self.epoch for record in records), "records of this epoch"
        numbered = self._numbering.begin(records)
        entries = [Entry(encode(record), self._tags(record)) for record in numbered]
        if isinstance(records[-1], RunFinished) and (parent := self._parent) is not None:
            there = partition_tag(partition_of(parent.run, self.partitions))
            tags = (run_tag(parent.run), there, INBOX_TAG)
            entries.append(Entry(encode(ChildEnded(self.id)), tags))
        try:
            seqnums = await append_all(self.log, entries)
        except TooLargeError:
            self._numbering.end((), ())
            raise
        except BaseException:
            self._numbering.fail()
            raise
        self._numbering.end(records, seqnums)
        if not self._lease.is_sure():
            await self.catch_up(seqnums[-1] - (len(entries) - len(records)))
        self._note_durable(records)

    def _note_durable(self, records: Sequence[ExecutionRecord]) -> None:
        for record in records:
            if isinstance(record, StepDecided):
                self._when_durable.pop(record.number, _do_nothing)()

    def _tags(self, record: ExecutionRecord) -> tuple[str, ...]:
        if isinstance(record, StepDecided):
            return (self._tag,)
        tags = (self._tag, partition_tag(self.partition))
        if self._limit_tags and not isinstance(record, RunWaits):
            # An end or a parking frees a place, so it is an item of the inbox.
            frees = isinstance(record, RunFinished | RunParked)
            tags = (*tags, *self._limit_tags, *((INBOX_TAG,) if frees else ()))
        if not isinstance(record, RunFinished):
            return tags
        # The start of a run this old may be trimmed from the list of starts.
        age_s = log_clock(self.log).now() - self.run.began
        late = (LATE_TAG,) if age_s >= self._relisted_after_s else ()
        state = end_state(record)
        lists = (ends_tag(state, None), ends_tag(state, record.workflow))
        return (*tags, ended_tag(self.partition), *lists, *late)

    def drive(self, *, on: bool) -> None:
        """Note that the workflow's own coroutine begins or stops running (for
        `FlushBeforeAwait`).
        """
        self._is_driving = on

    def is_durable(self, number: str) -> bool:
        """Tell whether the outcome of an operation is a durable record of the run."""
        return number in self._decided and all(one.number != number for one in self._unflushed)

    @property
    def has_unflushed(self) -> bool:
        """Tell whether a decision is not durable yet, and no task is appending it."""
        return bool(self._unflushed) and not self._flushing.locked()
