"""Reading runs and appending to them, with patience while the platform is away.

Nothing here decides anything: what is appended may be appended twice, and readers pass over the
second copy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

from bokiflow.runs import waiting
from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.fold import Run
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.public_call import CALL, Stopped
from bokiflow.runs.records import run_record, run_tag
from indilog import (
    DataLossError,
    DiskFullError,
    Entry,
    IndilogError,
    Log,
    OutcomeUnknownError,
    TrimmedError,
)
from indilog.sdk import SeqNum, check_own_append, name_loss

_ValueT = TypeVar("_ValueT")
_PAGE: Final = 1000
PATIENCE_TRIES: Final = 13
"""Tries to append before an execution gives up. The pauses between grow, to 25 s together; each try
may itself wait until the log says that it has no answer (`append_timeout_s`)."""
_PAUSE_S_MIN: Final = 0.02
_PAUSE_S_MAX: Final = 5.0


class Logs(Protocol):
    """Whatever gives access to logs by name: a function's `Context`, a client, `MemoryLogs`."""

    def log(self, name: str, /) -> Log:
        """Return the log `name`."""


class RunUnreadable(Stopped):
    """This execution must not go on: its run, or one that it waits for, cannot be read now."""


async def read_run(
    log: Log,
    id: str,  # noqa: A002
    run: Run,
    own: SeqNum = -1,
    *,
    is_reused: bool = False,
) -> Run:
    """Apply what is new of a run; return it.

    With `own`, that is at least what the run has up to and with that place; else everything that
    `log` shows.

    Args:
        log: where the run is.
        id: the run's.
        run: as far as it was read.
        own: a record of this run that the session of `log` appended.
        is_reused: pass over a run of this id that was forgotten, to a new one; without a new one,
            it has not begun.

    Raises:
        TrimmedError: it was forgotten.
        NotReadyError: the record at `own` is not shown, so nothing is known of what it came to.
    """
    tag, clock = run_tag(id), log_clock(log)
    await clock.begin(log)
    while True:
        try:
            page = await log.read_range(tag, run.end, limit=_PAGE)
        except TrimmedError as error:
            if not is_reused or run.started is not None:
                raise
            run.end = max(run.end, error.first_seqnum)
            continue
        except DataLossError as error:
            raise name_loss(f"Run {id!r}", error) from error
        for record in page:
            clock.read(record.ordered_at)
            if record.seqnum >= run.end:
                run.apply(record.seqnum, record.ordered_at, run_record(record.data))
        if not page:
            check_own_append(own, run.end)
        if not page or run.end > own >= 0:
            return run


async def append_with_retry(
    log: Log, entries: Sequence[Entry], on_again: Callable[[], None] | None = None
) -> SeqNum:
    """Append entries of which a second copy is harmless; return the last one's place, of the last
    copy if there are several.

    Raises:
        Stopped: the log was away for too long.
        TooLargeError: they are too large; nothing was appended.
    """

    async def append() -> SeqNum:
        if len(entries) == 1:
            return await log.append(entries[0].data, tags=entries[0].tags)
        return (await log.append_batch(entries))[-1]

    last = await retry_while_unavailable(append, on_again)
    if (call := CALL.get()) is not None:
        call.appended()
    return last


async def retry_while_unavailable(
    ask: Callable[[], Awaitable[_ValueT]], on_again: Callable[[], None] | None = None
) -> _ValueT:
    """Return what `ask` gives, however often it takes while the platform is away.

    For what is harmless to repeat.

    Args:
        ask: what is done.
        on_again: told before each try but the first.

    Raises:
        Stopped: it was away for too long; in a public call also at once if its disk is full.
        IndilogError: what repeating does not help.
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
    raise Stopped("The platform is away.", last)


async def read_own_run(ask: Callable[[], Awaitable[_ValueT]]) -> _ValueT:
    """As `retry_while_unavailable`, for reading the run that is executed: what keeps it from being
    read (damage, records of a later version, an end elsewhere that is forgotten by now) says
    nothing of the workflow, so it must not look like a failure of it, after which its steps are
    taken back.

    Raises:
        Unreadable: the run cannot be read now.
        Stopped: the log was away for too long.
    """
    try:
        return await retry_while_unavailable(ask)
    except IndilogError as error:
        raise RunUnreadable(f"The run cannot be read: {error}", error) from error


async def read_dependency(ask: Callable[[], Awaitable[_ValueT]]) -> _ValueT:
    """As `retry_while_unavailable`, for what a run needs beside itself (another run, a lock):
    damage of it, or records of a later version in it, are no failure of the workflow.

    Raises:
        Unreadable: it cannot be read now.
        Stopped: the log was away for too long.
        IndilogError: what else repeating does not help.
    """
    try:
        return await retry_while_unavailable(ask)
    except (DataLossError, FlowVersionError) as error:
        raise RunUnreadable(f"What the run needs cannot be read: {error}", error) from error


def seqnum_after_loss(lost: DataLossError, bound: SeqNum) -> SeqNum:
    """Return where to read on that was asked for from `bound` on, behind what is lost.

    Raises:
        DataLossError: it does not say where.
    """
    if lost.next_seqnum is None or lost.next_seqnum <= bound:
        raise lost
    return lost.next_seqnum


def is_transient(error: IndilogError) -> bool:
    """Whether what failed with `error` may be repeated, if repeating it is harmless."""
    return error.retryable or isinstance(error, OutcomeUnknownError)
