"""Sends heartbeats: a process that executes runs renews its lease, and reads other executors'
heartbeats.

A process has a name and one lease on all its runs. While it executes runs, it writes a heartbeat
each quarter of the lease, and its other work does not delay the heartbeats. During the first half
of the lease no other process can have taken over a run (unless that process's clock runs twice as
fast). So in this half a step costs an append and no read. In the second half, each append is
followed by a read that checks whether the record takes effect.
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
    encode,
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
from bokiflow.takeover.dead_executors import read_orphaned_runs
from bokiflow.takeover.executors import Executors
from bokiflow.takeover.lease import Lease
from indilog import DataLossError, Entry, IndilogError, Log, Record, TrimmedError
from indilog.sdk import SeqNum, check_own_append

BEATS: Final = 4
_LEAVES_AFTER: Final = 0.75
"""Fraction of the lease after which an idle executor records that it leaves; below 1, so that the
lease has not ended yet.
"""
_PAGE: Final = 1000
_TRIM_EVERY: Final = 512
_TRIM_BEATS: Final = 64
_LOST: Final = (
    "Heartbeats of executors are lost by damage; takeovers continue, some up to a lease later. "
    "If a cancellation has no effect, its record may be lost: request it again."
)
_LATER: Final = (
    "A later version of BokiFlow writes to this log; this program leaves the runs that the later "
    "version has "
    "executed, and executes the others. Run the later version everywhere."
)


def _log_unreadable(what: str, log: Log, error: IndilogError) -> None:
    structlog.get_logger().error(what, log=log.name, reason=str(error))


class HeartbeatSender(ABC):
    """A process that executes runs of a log: it sends heartbeats, and reads those of other
    processes.

    Args:
        log_name: name of the log of the runs.
        lease_s: seconds after this process's last heartbeat until other processes take over its
            runs.

    Attributes:
        executors: the executors of the log, as of the records read so far.
        lease: this process's lease on its runs.
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

    # --- implemented by the runner

    @property
    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether this executor executes a run, or may own a run whose assignment has an unknown
        outcome.
        """

    @property
    @abstractmethod
    def _may_be_assigned(self) -> bool:
        """Whether a record in flight may assign a run to this executor."""

    @property
    @abstractmethod
    def _needed_from(self) -> SeqNum:
        """A seqnum below which no record assigns a run that this executor still has or may get."""

    @abstractmethod
    async def _on_beat(self, log: Log, logs: Logs) -> None:
        """Do periodic work, after a heartbeat."""

    @abstractmethod
    def _on_lost(self) -> None:
        """Stop the runs of this process, because other processes may have taken them over."""

    @abstractmethod
    def _on_cancel(self, run: str, seqnum: SeqNum) -> None:
        """Handle a requested cancellation, recorded at `seqnum`."""

    @abstractmethod
    def _tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that execute runs."""

    # --- heartbeats

    def current_lease(self) -> Lease:
        """Return the lease for runs that begin now; if the last lease has ended, a new one."""
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
        """Append records of this executor. If the lease is not sure (`Lease.is_sure`), append a
        heartbeat before them.

        Except for the first heartbeat under a name, a heartbeat may be ordered after the choice of
        a new owner, and then has no effect. So the lease is renewed only after a read.
        """
        if lease.is_sure():
            return await append_with_retry(log, entries, on_again)
        asked_at, is_first = waiting.passed_now(), self._heartbeat_name != lease.name
        self._heartbeat_name = lease.name
        last = await append_with_retry(log, [self._heartbeat_entry(lease), *entries], on_again)
        if is_first:
            lease.renew(asked_at)
        else:
            with suppress(IndilogError):  # after an error the lease is not renewed
                await self._renew_at(log, lease, last - len(entries), asked_at)
        return last

    async def _renew_at(self, log: Log, lease: Lease, seqnum: SeqNum, asked_at: float) -> bool:
        """If the heartbeat at `seqnum` came in time, renew the lease. Return whether it was
        renewed.
        """
        await self.look(log, seqnum)
        if lease.has_ended() or lease is not self.lease:
            return False
        lease.renew(asked_at)
        return True

    def _heartbeat_entry(self, lease: Lease) -> Entry:
        alive = Heartbeat(lease.name, self.lease_s)
        return Entry(encode(alive), (EXECUTORS_TAG,))

    def _keep_beating(self, logs: Logs) -> None:
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat(logs))

    async def _beat(self, logs: Logs) -> None:
        """Send heartbeats while this process executes runs: one each quarter of the lease, even if
        appends are slow.
        """
        CALL.set(None)  # the task outlives the call that started it
        log = logs.log(self.log_name)
        said_at = waiting.monotonic_now()
        while self._is_busy:
            await waiting.pause(max(0.0, said_at + self.lease_s / BEATS - waiting.monotonic_now()))
            said_at = waiting.monotonic_now()
            try:
                await self._renew(log)
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("executor cannot renew its lease", reason=str(error))
            else:
                if self._tidying is None or self._tidying.done():
                    self._tidying = asyncio.create_task(self._tidy(log, logs))

    async def _tidy(self, log: Log, logs: Logs) -> None:
        """Do periodic work after a heartbeat. The next heartbeat does not wait for it."""
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
        """Stop all runs, because other processes may have taken them over, and continue under
        another name.
        """
        self.lease = Lease(self.lease_s)
        self._on_lost()

    async def look(self, log: Log, own: SeqNum = -1, *, is_one_page: bool = False) -> None:
        """Apply new records of executors and cancellations.

        Args:
            log: log of the runs.
            own: seqnum of a record that the session of `log` appended; the read may end when it is
                applied. -1: read all.
            is_one_page: read at most one page.

        Raises:
            NotReadyError: the read did not return the record at `own`.
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
                    continue  # a concurrent read has skipped it
                executors.lost(seqnum_after_loss(error, executors.end), waiting.monotonic_now())
                _log_unreadable(_LOST, log, error)
                continue
            now = (
                waiting.monotonic_now()
            )  # after the read, because a lease counts from when it was read
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
                _log_unreadable(_LATER, log, error)
            self.executors.skip_later_version(record.seqnum)

    def _on_record(self, record: Record, now: float) -> None:
        said, name = executor_record(record.data), self.lease.name
        self.executors.apply(record.seqnum, now, said)
        is_over = isinstance(said, ExecutorLeft) and said.executor == name
        if is_over or self.executors.has_new_owner(name):
            self._lose()  # now: `executors` forgets the name when the new owner has finished
        run = run_in(record.tags)
        if run is not None and isinstance(run_record(record.data), CancelAsked):
            self._on_cancel(run, record.seqnum)

    async def _trim(self, log: Log) -> None:
        """Periodically trim records of ended runs and superseded heartbeats."""
        self._beats_since_trim += 1
        is_due = self._ended_since_trim >= _TRIM_EVERY and self._beats_since_trim >= BEATS
        if not is_due and self._beats_since_trim < _TRIM_BEATS:
            return
        self._ended_since_trim = self._beats_since_trim = 0
        await log.trim(self._needed_from, tag=executor_tag(self.lease.name))
        # Keep newer records, such as cancellations, unread by some process.
        if self._needed_before:
            await log.trim(self._needed_before, tag=EXECUTORS_TAG)
            await log.trim(self._needed_before, tag=URGENT_TAG)
        self._needed_before = self.executors.needed_from

    # --- leaving

    def leaves_at(self) -> float | None:
        """Return when to call `leave_if_idle` (time of `waiting.monotonic_now`); None: never."""
        renewed_at, beating = self.lease.renewed_at, self._beating
        if renewed_at is None or self._is_busy or not (beating is None or beating.done()):
            return None
        if self.executors.left_to(self.lease.name):
            return None
        in_s = renewed_at + self.lease_s * _LEAVES_AFTER - waiting.passed_now()
        return waiting.monotonic_now() + in_s

    async def leave_if_idle(self, log: Log) -> None:
        """While idle, record that this process leaves, before its lease ends. So no process looks
        for its runs.
        """
        name, may_be_assigned = self.lease.name, self._may_be_assigned
        self._lose()
        await self._leave(log, name, may_be_assigned=may_be_assigned)

    async def retire(self, log: Log) -> None:
        """End an expired lease of this process. If the process is idle, record that, so that no
        process looks for its runs.

        This includes a lease whose first heartbeat was read although its append did not return.
        """
        name = self.lease.name
        if self.lease.has_ended() or self.lease.renewed_at is None:
            idle = not (self._is_busy or self.executors.left_to(name))
            may_be_assigned = self._may_be_assigned
            self._lose()
            if idle:
                await self._leave(log, name, may_be_assigned=may_be_assigned)

    async def _leave(self, log: Log, name: str, *, may_be_assigned: bool) -> None:
        """Record that an executor has left, and whether it owns runs or may still get runs."""
        left = await retry_while_unavailable(partial(read_orphaned_runs, log, name))
        is_idle = not (may_be_assigned or left.runs or self.executors.left_to(name))
        tags = (EXECUTORS_TAG,) if is_idle else (EXECUTORS_TAG, URGENT_TAG)
        await append_with_retry(log, [Entry(encode(ExecutorLeft(name, is_idle=is_idle)), tags)])
        if is_idle:
            with suppress(IndilogError):  # the record only saves other processes a read
                await log.trim(left.end, tag=executor_tag(name))

    async def stop(self, log: Log) -> None:
        """Stop all runs and record that, so that other processes take them over at once."""
        name, tasks = self.lease.name, self._tasks()
        may_be_assigned = self._is_busy or self._may_be_assigned
        for task in (self._beating, self._tidying):
            if task is not None:
                tasks.append(task)
        self._beating = self._tidying = None
        self._lose()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leave(log, name, may_be_assigned=may_be_assigned)
