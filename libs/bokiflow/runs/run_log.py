"""Reads runs and appends to them, with retries while the platform is unavailable.

A retry may append a record twice; readers ignore the second copy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import structlog

from bokiflow.runs import waiting
from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.public_call import CALL, Stopped
from bokiflow.runs.records import RunRecord, run_record, run_tag
from bokiflow.runs.run_state import RunState
from indilog import (
    DataLossError,
    DiskFullError,
    Entry,
    IndilogError,
    Log,
    OutcomeUnknownError,
    Record,
    TrimmedError,
)
from indilog.sdk import SeqNum, check_own_append, name_loss

_ValueT = TypeVar("_ValueT")
_PAGE: Final = 1000
PATIENCE_TRIES: Final = 13
"""Attempts before an execution stops. The pauses between them grow; together they take 25 s. Each
attempt may also wait until the log reports a timeout (`append_timeout_s`).
"""
_PROBLEM_S: Final = 1.0
"""Seconds until background work that failed is retried."""
_PAUSE_S_MIN: Final = 0.02
_PAUSE_S_MAX: Final = 5.0


class RunUnreadable(Stopped):
    """This execution must not continue: its run, or the run or lock for which it waits, cannot be
    read now.
    """


async def read_run(
    log: Log,
    id: str,  # noqa: A002
    run: RunState,
    own: SeqNum = -1,
    *,
    is_reused: bool = False,
    on_effect: Callable[[SeqNum, RunRecord], None] | None = None,
) -> RunState:
    """Apply the new records of a run; return the run.

    With `own`, the records up to and including that seqnum are applied. Without it, all records
    that the session of `log` sees are applied. If old rounds of the run were trimmed meanwhile, the
    read continues with the first round that is left.

    Args:
        log: log of the run.
        id: id of the run.
        run: the run as of the records read before.
        own: a record of this run that the session of `log` appended.
        is_reused: whether to skip a trimmed run with this id and read a later run with the same id.
            If there is no later run, `run` has not begun.
        on_effect: called with each record that takes effect, and its seqnum.

    Raises:
        TrimmedError: the run was trimmed after its retention.
        NotReadyError: the read did not return the record at `own`.
    """
    tag, clock = run_tag(id), log_clock(log)
    await clock.begin(log)
    while True:
        try:
            page = await log.read_range(tag, run.end, limit=_PAGE)
        except TrimmedError as error:
            if run.started is not None:
                await _read_later_rounds(log, id, run, error, on_effect)
                return run
            if not is_reused:
                raise
            run.end = max(run.end, error.first_seqnum)
            continue
        except DataLossError as error:
            raise name_loss(f"Run {id!r}", error) from error
        for record in page:
            clock.read(record.ordered_at)
            if record.seqnum >= run.end:
                _apply(run, record, on_effect)
        if not page:
            check_own_append(own, run.end)
        if not page or run.end > own >= 0:
            return run


def _apply(
    run: RunState, record: Record, on_effect: Callable[[SeqNum, RunRecord], None] | None
) -> None:
    known = run_record(record.data)
    has_effect = run.apply(record.seqnum, record.ordered_at, known)
    if has_effect and known is not None and on_effect is not None:
        on_effect(record.seqnum, known)


async def _read_later_rounds(
    log: Log,
    id: str,  # noqa: A002
    run: RunState,
    error: TrimmedError,
    on_effect: Callable[[SeqNum, RunRecord], None] | None,
) -> None:
    """Read the remaining rounds of a run whose earlier rounds were trimmed.

    Raises:
        TrimmedError: all of the run was trimmed.
    """
    later = RunState()
    later.end = max(run.end, error.first_seqnum)
    await read_run(log, id, later, is_reused=True, on_effect=on_effect)
    if later.started is None or later.started_at != run.started_at:
        raise error
    run.become(later)


async def append_with_retry(
    log: Log, entries: Sequence[Entry], on_again: Callable[[], None] | None = None
) -> SeqNum:
    """Append idempotent entries, with retries. Return the seqnum of the last entry from the last
    attempt. Errors are those of `append_all`.
    """
    return (await append_all(log, entries, on_again))[-1]


async def append_all(
    log: Log, entries: Sequence[Entry], on_again: Callable[[], None] | None = None
) -> Sequence[SeqNum]:
    """Append idempotent entries, with retries. Return the seqnums from the last attempt.

    Raises:
        Stopped: the log was unavailable for too long.
        TooLargeError: the records are too large; nothing was appended.
    """

    async def append() -> Sequence[SeqNum]:
        if len(entries) == 1:
            return (await log.append(entries[0].data, tags=entries[0].tags),)
        return await log.append_batch(entries)

    seqnums = await retry_while_unavailable(append, on_again)
    if (call := CALL.get()) is not None:
        call.note_append()
    return seqnums


async def retry_while_unavailable(
    ask: Callable[[], Awaitable[_ValueT]], on_again: Callable[[], None] | None = None
) -> _ValueT:
    """Return the result of `ask`; retry `ask` while the platform is unavailable.

    Args:
        ask: an idempotent operation.
        on_again: called before each attempt except the first.

    Raises:
        Stopped: the platform was unavailable for too long. A public call also stops at once if the
            disk is full.
        IndilogError: an error that is not transient.
    """
    pause_s = _PAUSE_S_MIN
    call, last = CALL.get(), None
    for tries in range(PATIENCE_TRIES):
        if tries:
            await waiting.pause(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
            if on_again is not None:
                on_again()
        try:
            return await ask()
        except IndilogError as error:
            last = error
            if call is not None and isinstance(error, OutcomeUnknownError):
                call.unknown = error
            if not is_transient(error):
                raise
            if call is not None and isinstance(error, DiskFullError):
                break
    raise Stopped("The platform is unavailable.", last)


async def read_own_run(ask: Callable[[], Awaitable[_ValueT]]) -> _ValueT:
    """Do the same as `retry_while_unavailable`, for reads of the run that is being executed.

    The run may be unreadable: damaged, written by another version, or ended by another executor and
    trimmed. That is not a failure of the workflow, so it must not trigger compensations.

    Raises:
        RunUnreadable: the run cannot be read now.
        Stopped: the log was unavailable for too long.
    """
    try:
        return await retry_while_unavailable(ask)
    except IndilogError as error:
        raise RunUnreadable(f"The run cannot be read: {error}", error) from error


async def read_dependency(ask: Callable[[], Awaitable[_ValueT]]) -> _ValueT:
    """Do the same as `retry_while_unavailable`, for reads of another run or of a lock.

    A damaged run or lock, or one of another version, is not a failure of the workflow.

    Raises:
        RunUnreadable: the other run or lock cannot be read now.
        Stopped: the log was unavailable for too long.
        IndilogError: another error that is not transient.
    """
    try:
        return await retry_while_unavailable(ask)
    except (DataLossError, FlowVersionError) as error:
        raise RunUnreadable(f"Another run or lock cannot be read: {error}", error) from error


async def until_done(act: Callable[[], Awaitable[object]], who: str) -> None:
    """Run `act` in the background. After an error of the log, log a warning and run `act` again."""
    while True:
        try:
            await act()
        except (IndilogError, Stopped) as error:
            structlog.get_logger().warning(f"{who} waits for the log", reason=str(error))
        else:
            return
        await waiting.pause(_PROBLEM_S)


def seqnum_after_loss(lost: DataLossError, bound: SeqNum) -> SeqNum:
    """Return the seqnum where a read from `bound` continues after a loss.

    Raises:
        DataLossError: the error has no `next_seqnum` after `bound`.
    """
    if lost.next_seqnum is None or lost.next_seqnum <= bound:
        raise lost
    return lost.next_seqnum


def is_transient(error: IndilogError) -> bool:
    """Whether an idempotent operation that failed with `error` may be retried."""
    return error.retryable or isinstance(error, OutcomeUnknownError)
