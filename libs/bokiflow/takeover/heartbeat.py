"""How a process that executes runs shows that it lives, and sees who else does.

A process has a name and a lease on all its runs together: one record each quarter of the lease,
on a schedule that nothing else it does holds up, and none while it executes nothing. While less
than half of the lease is over, nobody else can have taken a run (unless its clock goes twice as
fast), so steps cost an append and no read; otherwise each append is followed by a look whether it
counts.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from bokiflow.runs import waiting
from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.public_call import CALL, Stopped
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    URGENT_TAG,
    CancelAsked,
    ExecutorLeft,
    Heartbeat,
    encoded,
    executor_record,
    executor_tag,
    run_in,
    run_record,
)
from bokiflow.runs.run_log import (
    Logs,
    append_with_retry,
    retry_while_unavailable,
    seqnum_after_loss,
)
from bokiflow.takeover.dead_executors import read_remains
from bokiflow.takeover.executors import Executors
from bokiflow.takeover.lease import Lease
from indilog import DataLossError, Entry, IndilogError, Log, Record, TrimmedError
from indilog.sdk import SeqNum, check_own_append

BEATS: Final = 4
_RESTS: Final = 0.75
"""After this much of its lease who executes nothing is gone, in time before others look."""
_PAGE: Final = 1000
_TRIM_EVERY: Final = 512
_TRIM_BEATS: Final = 64
_LOST: Final = (
    "Signs of life of executors are lost by damage; takeovers go on, those under way up to a lease "
    "later. A cancellation that was asked for there is lost with them: ask again."
)
_LATER: Final = (
    "A later version of BokiFlow writes to this log; this program leaves to it whatever it has "
    "touched, and goes on with the rest. Run that version everywhere."
)


def _tell(what: str, log: Log, error: IndilogError) -> None:
    structlog.get_logger().error(what, log=log.name, reason=str(error))


class HeartbeatSender(ABC):
    """A process among those that execute the runs of a log.

    Args:
        log_name: of the log of the runs.
        lease_s: how long after its last sign of life somebody else takes its runs.

    Attributes:
        executors: who lives, as far as it was read.
        lease: its hold on its runs.
    """

    def __init__(self, log_name: str, lease_s: float) -> None:
        self.log_name = log_name
        self.lease_s = lease_s
        self.lease = Lease(lease_s)
        self.executors = Executors()
        self._heartbeat_name = ""
        self._beating: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._ended_since_trim = 0
        self._beats_since_trim = 0
        self._needed_before: SeqNum = 0

    # --- what it executes

    @property
    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether it executes anything, or may have to."""

    @property
    @abstractmethod
    def _is_owed(self) -> bool:
        """Whether anything that is on its way may give this executor a run."""

    @property
    @abstractmethod
    def _needed_from(self) -> SeqNum:
        """Below this seqnum nothing gave this executor a run that it still has or may get."""

    @abstractmethod
    async def _on_beat(self, log: Log, logs: Logs) -> None:
        """It has shown that it lives."""

    @abstractmethod
    def _on_lost(self) -> None:
        """Others may have its runs: stop them."""

    @abstractmethod
    def _on_cancel(self, run: str, seqnum: SeqNum) -> None:
        """Somebody wants a run cancelled, by the record at `seqnum`."""

    @abstractmethod
    def _tasks(self) -> list[asyncio.Task[None]]:
        """Return what executes runs."""

    # --- signs of life

    def current_lease(self) -> Lease:
        """Return the lease under which this process executes what it begins now."""
        if self.lease.has_ended():
            self._lose()
        return self.lease

    async def append_with_heartbeat(
        self,
        log: Log,
        lease: Lease,
        entries: list[Entry],
        on_again: Callable[[], None] | None = None,
    ) -> SeqNum:
        """Append records of this executor, and before them that it lives, if need be.

        A sign of life that is not the first one of its name may come after the name got an heir,
        who does not mind it: so it makes the lease sure only after a look.
        """
        if lease.is_sure():
            return await append_with_retry(log, entries, on_again)
        asked_at, is_first = waiting.passed_now(), self._heartbeat_name != lease.name
        self._heartbeat_name = lease.name
        last = await append_with_retry(log, [self._heartbeat_entry(lease), *entries], on_again)
        if is_first:
            lease.renewed(asked_at)
        else:
            with suppress(IndilogError):  # then it is not sure, no more
                await self._renew_at(log, lease, last - len(entries), asked_at)
        return last

    async def _renew_at(self, log: Log, lease: Lease, seqnum: SeqNum, asked_at: float) -> bool:
        """Rely on a sign of life at `seqnum` unless it came too late; return whether it does."""
        await self.look(log, seqnum)
        if lease.has_ended() or lease is not self.lease:
            return False
        lease.renewed(asked_at)
        return True

    def _heartbeat_entry(self, lease: Lease) -> Entry:
        alive = Heartbeat(lease.name, self.lease_s)
        return Entry(encoded(alive), (EXECUTORS_TAG,))

    def _keep_beating(self, logs: Logs) -> None:
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat(logs))

    async def _beat(self, logs: Logs) -> None:
        """Say that it lives as long as it executes anything: each quarter of the lease, however
        long it takes to say so.
        """
        CALL.set(None)  # it outlives the call that began it
        log = logs.log(self.log_name)
        said_at = waiting.steady_now()
        while self._is_busy:
            await waiting.pause(max(0.0, said_at + self.lease_s / BEATS - waiting.steady_now()))
            said_at = waiting.steady_now()
            try:
                await self._renew(log)
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("executor cannot renew its lease", reason=str(error))
            else:
                if self._tidying is None or self._tidying.done():
                    self._tidying = asyncio.create_task(self._tidy(log, logs))

    async def _tidy(self, log: Log, logs: Logs) -> None:
        """Do what is due with a sign of life, which the next one does not wait for."""
        try:
            await self._trim(log)
            await self._on_beat(log, logs)
        except (IndilogError, Stopped) as error:
            structlog.get_logger().warning("executor waits for the log", reason=str(error))

    async def _renew(self, log: Log) -> None:
        lease, asked_at = self.lease, waiting.passed_now()
        if not lease.has_ended():
            self._heartbeat_name = lease.name
            seqnum = await append_with_retry(log, [self._heartbeat_entry(lease)])
            if await self._renew_at(log, lease, seqnum, asked_at):
                return
        if lease is self.lease:
            self._lose()

    def _lose(self) -> None:
        """Others may have its runs: stop them, and go on under another name."""
        self.lease = Lease(self.lease_s)
        self._on_lost()

    async def look(self, log: Log, own: SeqNum = -1, *, is_one_page: bool = False) -> None:
        """Read what is new of executors and cancellations.

        Args:
            log: where it is.
            own: such a record, which the session of `log` appended: read at least up to it, instead
                of all.
            is_one_page: read one page at most.

        Raises:
            NotReadyError: the record at `own` is not shown.
        """
        executors = self.executors
        while True:
            try:
                page = await log.read_range(EXECUTORS_TAG, executors.end, limit=_PAGE)
            except TrimmedError as error:
                executors.end = max(executors.end, error.first_seqnum)
                continue
            except DataLossError as error:
                if error.next_seqnum is not None and error.next_seqnum <= executors.end:
                    continue  # another look has met it meanwhile
                executors.lost(seqnum_after_loss(error, executors.end), waiting.steady_now())
                _tell(_LOST, log, error)
                continue
            now = waiting.steady_now()  # not earlier: a lease is counted from when it was read
            for record in page:
                if record.seqnum >= executors.end:
                    self._on_readable(log, record, now)
            if not page:
                check_own_append(own, executors.end)
            if not page or is_one_page or executors.end > own >= 0:
                return

    def _on_readable(self, log: Log, record: Record, now: float) -> None:
        try:
            self._on_record(record, now)
        except FlowVersionError as error:
            if not self.executors.has_later:
                _tell(_LATER, log, error)
            self.executors.skip_later_version(record.seqnum)

    def _on_record(self, record: Record, now: float) -> None:
        said, name = executor_record(record.data), self.lease.name
        self.executors.apply(record.seqnum, now, said)
        is_over = isinstance(said, ExecutorLeft) and said.executor == name
        if is_over or self.executors.has_new_owner(name):
            self._lose()  # at once: it will not be known that it had an heir when that one is done
        run = run_in(record.tags)
        if run is not None and isinstance(run_record(record.data), CancelAsked):
            self._on_cancel(run, record.seqnum)

    async def _trim(self, log: Log) -> None:
        """Now and then, forget the starts and ends of what is over."""
        self._beats_since_trim += 1
        is_due = self._ended_since_trim >= _TRIM_EVERY and self._beats_since_trim >= BEATS
        if not is_due and self._beats_since_trim < _TRIM_BEATS:
            return
        self._ended_since_trim = self._beats_since_trim = 0
        await log.trim(self._needed_from, tag=executor_tag(self.lease.name))
        # Others may not have read yet what this process has just read: cancellations stand there.
        if self._needed_before:
            await log.trim(self._needed_before, tag=EXECUTORS_TAG)
            await log.trim(self._needed_before, tag=URGENT_TAG)
        self._needed_before = self.executors.needed_from

    # --- the end

    def rests_at(self) -> float | None:
        """Return when to `rest`, as `waiting.steady_now` counts; None: it need not."""
        renewed_at, beating = self.lease.renewed_at, self._beating
        if renewed_at is None or self._is_busy or not (beating is None or beating.done()):
            return None
        if self.executors.left_to(self.lease.name):
            return None
        in_s = renewed_at + self.lease_s * _RESTS - waiting.passed_now()
        return waiting.steady_now() + in_s

    async def rest(self, log: Log) -> None:
        """Its lease ends soon and it executes nothing: say so before others look what it left."""
        name, is_owed = self.lease.name, self._is_owed
        self._lose()
        await self._leave(log, name, is_owed=is_owed)

    async def retire(self, log: Log) -> None:
        """Its lease has ended: if it has nothing to execute, say so, that nobody needs to look.

        So it has if all that is known of its first sign of life is that it came.
        """
        name = self.lease.name
        if self.lease.has_ended() or self.lease.renewed_at is None:
            idle = not (self._is_busy or self.executors.left_to(name))
            is_owed = self._is_owed
            self._lose()
            if idle:
                await self._leave(log, name, is_owed=is_owed)

    async def _leave(self, log: Log, name: str, *, is_owed: bool) -> None:
        """Say that an executor is gone, and whether it has left anything, or may get it still."""
        left = await retry_while_unavailable(partial(read_remains, log, name))
        is_idle = not (is_owed or left.runs or self.executors.left_to(name))
        tags = (EXECUTORS_TAG,) if is_idle else (EXECUTORS_TAG, URGENT_TAG)
        await append_with_retry(log, [Entry(encoded(ExecutorLeft(name, is_idle=is_idle)), tags)])
        if is_idle:
            with suppress(IndilogError):  # it saves others reading, no more
                await log.trim(left.end, tag=executor_tag(name))

    async def stop(self, log: Log) -> None:
        """Stop everything and say so; others go on with it at once."""
        name, tasks = self.lease.name, self._tasks()
        is_owed = self._is_busy or self._is_owed
        for task in (self._beating, self._tidying):
            if task is not None:
                tasks.append(task)
        self._beating = self._tidying = None
        self._lose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave(log, name, is_owed=is_owed)
