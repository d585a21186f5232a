"""Appends batches, and finds out whether they have effect.

A batch has effect only if the record that it names directly precedes it (docs/decisions/0079).
`Appender`, `claim` and `Streams.seal` call this module.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Final

from bokistream import waiting
from bokistream.chain import Last, NewRecord, encoded, entries_of, read_last, state_after
from bokistream.errors import AppendContendedError
from bokistream.records import decode_entry
from indilog import (
    AppendOutcomeUnknownError,
    DiskFullError,
    Entry,
    IndilogError,
    Log,
    OutcomeUnknownError,
    Record,
    TrimmedError,
)
from indilog.replayed import RetryPolicy
from indilog.sdk import SeqNum

ATTEMPTS: Final = 100
"""Largest number of attempts of an append, if records of other programs come first each time."""
RETRIES: Final = RetryPolicy(tries=8, first_s=0.05, pause_s_max=2.0)
"""How long transient errors and unknown outcomes of a batch are retried (about 8 seconds)."""


class _Batch:
    """A batch that is to be appended after `last`, and what is known about it.

    Attributes:
        place: seqnum of its first record, as soon as a copy is known to be in the log.
        may_be_in_log: whether a copy may be in the log.
    """

    def __init__(self, log: Log, tag: str, last: Last, records: Sequence[NewRecord]) -> None:
        self.place: SeqNum | None = None
        self.may_be_in_log = False
        self._log = log
        self._tag = tag
        self._after = last.record
        self._number = secrets.randbits(63)
        self._entries = entries_of(last, records, self._number)
        self._content = encoded(self._entries, tag)

    async def append(self) -> None:
        """Append a copy, unless one is known to be in the log."""
        if self.place is not None:
            return
        was_in_log, self.may_be_in_log = self.may_be_in_log, True
        try:
            self.place = await _append(self._log, self._content)
        except OutcomeUnknownError:
            pass
        except IndilogError:
            self.may_be_in_log = was_in_log
            raise

    async def has_effect(self) -> bool | None:
        """Return whether the batch has effect; None: this is not decided yet."""
        try:
            first = await self._read_next(self._after + 1)
        except TrimmedError as error:
            floor = error.first_seqnum
            if self.place is not None and self.place > floor:
                return False  # the record at the floor has effect, and lies before the batch
            if not self._is_own(await self._read_next(floor)):
                raise AppendOutcomeUnknownError(
                    "The stream was truncated before the outcome of an append could be read; read "
                    "the stream to see whether the record is in it."
                ) from error
            return True
        return None if first is None else self._is_own(first)

    def state(self) -> Last:
        """Return the state after the batch, which has effect."""
        assert self.place is not None, "the batch was read"
        return state_after(self.place + len(self._entries) - 1, self._entries[-1])

    async def _read_next(self, bound: SeqNum) -> Record | None:
        return await self._log.read_next(self._tag, bound, fresh=self.place is None)

    def _is_own(self, record: Record | None) -> bool:
        entry = None if record is None else decode_entry(record.data)
        if record is None or entry is None or entry.batch != self._number or entry.index != 0:
            return False
        self.place = record.seqnum
        return True


async def append_after(log: Log, tag: str, last: Last, records: Sequence[NewRecord]) -> Last | None:
    """Append a batch that has effect only directly after `last`. Return the state after the batch;
    None: the batch has no effect, and never will.

    Transient errors are retried. After an unknown outcome the batch is appended again: at most one
    of the copies has effect, because all name the same record.

    Raises:
        AppendOutcomeUnknownError: the batch may have effect.
        IndilogError: as for `Log.append_batch`; nothing was appended.
    """
    batch = _Batch(log, tag, last, records)
    failed: IndilogError | None = None
    for attempt in range(RETRIES.tries):
        if attempt > 0:
            await waiting.pause(RETRIES.pause_s(attempt - 1))
        try:
            await batch.append()
            has_effect = await batch.has_effect()
        except AppendOutcomeUnknownError:
            raise
        except IndilogError as error:
            if not batch.may_be_in_log and (
                not error.retryable or isinstance(error, DiskFullError)
            ):
                raise
            failed = error
            if not error.retryable:
                break
        else:
            if has_effect is not None:
                return batch.state() if has_effect else None
    if failed is not None and not batch.may_be_in_log:
        raise failed
    raise AppendOutcomeUnknownError(
        f"Whether an append to log {log.name!r} has effect could not be read"
        f"{'' if failed is None else f': {failed}'}; read the stream to see it."
    ) from failed


async def _append(log: Log, content: Sequence[Entry]) -> SeqNum:
    if len(content) == 1:
        return await log.append(content[0].data, tags=content[0].tags)
    return (await log.append_batch(content))[0]


async def append_in_any_case(
    log: Log,
    tag: str,
    name: str,
    record_after: Callable[[Last], tuple[Last, NewRecord] | None],
) -> Last:
    """Append one record after the last record of the stream, and return the state after it. If
    other records come first, try again after them.

    Args:
        log: log of the stream.
        tag: tag of its records.
        name: name of the stream, for error messages.
        record_after: returns the state to continue from and the record to append, or None to
            append nothing and return the state; it raises if nothing may be appended.

    Raises:
        AppendContendedError: other programs' records came first each time.
        IndilogError: as for `append_after` and `read_last`.
    """
    for attempt in range(ATTEMPTS):
        last = await read_last(log, tag, name, fresh=True)
        wanted = record_after(last)
        if wanted is None:
            return last
        last, record = wanted
        state = await append_after(log, tag, last, [record])
        if state is not None:
            return state
        if attempt > 2:
            await waiting.pause(min(0.001 * attempt, 0.05) * secrets.randbelow(100) / 100)
    raise AppendContendedError(name)
