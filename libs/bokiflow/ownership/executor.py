"""Keeps this process an executor while it has work: heartbeats, watchdog, and the flow's inbox.

Four tasks run while the process has work:

- One writes heartbeats. If no run is open in the process's partitions, it lets the executor leave.
  So an idle process writes nothing.
- One is the watchdog. When the lease is nearly over, it cancels all executions, because another
  process may execute the runs soon.
- One waits for records of the inbox (`INBOX_TAG`), such as signals to runs, and hands each record
  to its partition.
- One looks for late starts. An executor that starts a run in a partition of its own executes the
  run itself, so such a start is not in the inbox. The executor may lose the partition while its
  append is in flight. Then the new owner may have read the partition before the start is ordered.
  So each executor also reads pages of the list of starts, several times per lease.

`bokiflow.runner.Runner` is an executor, and `bokiflow.driver` claims partitions for it. `member`
has the heartbeats, the lease and the owners.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import structlog

from bokiflow.ownership.member import ExecutorMember
from bokiflow.ownership.partition import OwnedPartition, PartitionLease
from bokiflow.runs import waiting
from bokiflow.runs.public_call import CALL, Stopped
from bokiflow.runs.records import (
    INBOX_TAG,
    RUNS_TAG,
    RunRecord,
    RunStarted,
    limit_in,
    partition_of,
    run_in,
    run_record,
    starts_tag,
)
from indilog import DataLossError, IndilogError, Log, Record, TrimmedError
from indilog.sdk import Logs, SeqNum

BEATS: Final = 4
"""Heartbeats per lease."""
_LEAVES_AFTER: Final = 0.7
"""Fraction of the lease after which an idle executor leaves. It is below `lease._SURE` (0.8)."""
_WATCHES: Final = 8
"""Smallest number of checks of the lease in the duration of one lease."""
_INBOX_WAIT_S: Final = 300.0
_INBOX_PAGE: Final = 1000
_STARTS_PAGE: Final = 100
"""Starts in one read: few enough that a page does not delay other work of the process."""
_STARTS_PER_LEASE: Final = 8
"""How often the list of starts is read per lease."""
_INBOX_TRIM_BEATS: Final = 64
_PROBLEM_S: Final = 1.0
_TICK_S_MIN: Final = 0.001
_SAVE_EVERY: Final = 256


@dataclass(slots=True)
class _Followed:
    """A list of records that an executor follows.

    Attributes:
        tag: tag of the list.
        end: records below this seqnum were read; None: the list is not followed.
    """

    tag: str
    end: SeqNum | None = None


class Executor(ABC):
    """A process that executes runs of a flow.

    Args:
        log_name: name of the log of the runs.
        lease_s: seconds after this process's last heartbeat until other executors claim its
            partitions.
        partitions: number of partitions, if this process is the first user of the flow.

    Attributes:
        member: its heartbeats, its lease, and the owners of all partitions.
        owned: the partitions that it owns, by number.
        woken: set when a driver should read the owners again.
        wanted: partitions that this process does not own, but for which the inbox has records. Each
            has the seqnum of its last such record.
    """

    def __init__(self, log_name: str, lease_s: float, partitions: int) -> None:
        self.log_name = log_name
        self.member = ExecutorMember(lease_s, partitions)
        self.owned: dict[int, OwnedPartition] = {}
        self.wanted: dict[int, SeqNum] = {}
        self.woken = asyncio.Event()
        self.logs: Logs | None = None
        self._log: Log | None = None
        self._inbox = _Followed(INBOX_TAG)
        self._starts = _Followed(starts_tag(None))
        self._beats = 0
        self._inbox_seen: SeqNum = 0
        self._hops: dict[int, float] = {}
        self._background: dict[str, asyncio.Task[None]] = {}

    # --- implemented by the runner

    @abstractmethod
    def _has_work(self) -> bool:
        """Tell whether this executor is executing runs or is about to do so."""

    @abstractmethod
    def _stop_runs(self, partition: OwnedPartition | None = None) -> list[asyncio.Task[None]]:
        """Cancel the executions of a partition, or of all partitions. Return their tasks."""

    @abstractmethod
    def _load(self, partition: OwnedPartition) -> None:
        """Begin to execute the open runs of a partition."""

    @abstractmethod
    def _on_news(self, partition: OwnedPartition, run: str, record: RunRecord | None) -> None:
        """Handle a record of the inbox for a run of an owned partition."""

    @abstractmethod
    def _on_limit(self, limit: str) -> None:
        """Handle a record of the inbox for a limit."""

    @abstractmethod
    async def _stop_taking(self) -> None:
        """Stop beginning executions of open runs."""

    @abstractmethod
    def _uncertain(self) -> set[int]:
        """Return the partitions that may have open runs that this process does not know."""

    @abstractmethod
    def _tidy(self) -> None:
        """Do periodic work, after a heartbeat."""

    # --- tasks

    def own_log(self, logs: Logs) -> Log:
        """Return the log of the runs. All reads and takeovers of this executor use one session. So
        each of them sees the records that the others have seen.
        """
        if self._log is None or self.logs is None:
            self.logs, self._log = logs, logs.log(self.log_name)
        return self._log

    def begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work in the background, unless work with this name is running."""
        task = self._background.get(name)
        if task is None or task.done():
            task = self._background[name] = asyncio.create_task(_outlive_call(work))
            task.add_done_callback(lambda ended: self._on_ended(name, ended))

    def _on_ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._background.get(name) is task:
            del self._background[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            structlog.get_logger().error("background work failed", work=name, exc_info=error)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return all tasks of this executor."""
        return list(self._background.values())

    # --- joining

    async def look(self, logs: Logs, own: SeqNum = -1) -> None:
        """Read the records of executors. Then begin to own the partitions that these records assign
        to this executor, and stop owning others.
        """
        await self.member.look(self.own_log(logs), own)
        self._adopt()

    async def join(self, logs: Logs, claims: Collection[int] = ()) -> None:
        """Become an executor whose lease is sure, and claim partitions that have no live owner.

        Raises:
            Stopped: the log is unavailable, or slower than the lease.
        """
        log = self.own_log(logs)
        if self._inbox.end is None:
            await self.member.look_once(log)
            # The inbox is followed from here. For each claimed partition, the records before its
            # claim are read when it is loaded.
            self._inbox.end = self._starts.end = self.member.replica.end
        try:
            await self.member.join(log, claims)
        finally:  # a claim may have taken effect although this call fails
            self.begin("beat", self._beat)
            self.begin("watch", self._watch)
            self.listen()
        self._adopt()

    def listen(self) -> None:
        """Begin to read the inbox and the list of starts."""
        self.begin("listen", self._listen)
        self.begin("starts", self._look_for_late_starts)

    def _adopt(self) -> None:
        """Begin and stop owning partitions, according to the records read so far."""
        now_owned = self.member.owned()
        for number, partition in list(self.owned.items()):
            if now_owned.get(number) != partition.since:
                partition.is_owned = False
                del self.owned[number]
                self._stop_runs(partition)
        for number, since in now_owned.items():
            if number not in self.owned:
                self.owned[number] = OwnedPartition(number, since)
        if self.member.lease.is_sure():
            for partition in self.owned.values():
                if not partition.is_loaded and partition.is_usable:
                    self._load(partition)

    def owns(self, partition: int) -> OwnedPartition | None:
        """Return the partition if this executor owns it and runs may begin there; else None."""
        owned = self.owned.get(partition)
        return owned if owned is not None and not self.lease_of(owned).has_ended() else None

    def lease_of(self, partition: OwnedPartition) -> PartitionLease:
        """Return the lease on the runs of a partition."""
        return PartitionLease(self.member.lease, partition)

    def hop(self, partition: int) -> None:
        """Note that a run was started in a partition of another executor. If that executor leaves
        or dies within two leases, this executor claims the partition.
        """
        self._hops[partition] = waiting.monotonic_now() + 2 * self.member.lease.lease_s

    # --- heartbeats

    async def _beat(self) -> None:
        member, lease = self.member, self.member.lease
        log = self._log
        assert log is not None, "a member has a log"
        said_at = waiting.monotonic_now()
        while True:
            pause_s = said_at + lease.lease_s / BEATS - waiting.monotonic_now()
            await waiting.tick(max(0.0, pause_s))
            said_at = waiting.monotonic_now()
            try:
                if await self._must_stay(log):
                    await member.renew(log)
                    self._adopt()  # at once: the lease is sure, and partitions may be lost
                    await self._claim_hops()
                    self._adopt()
                elif lease.age_s >= _LEAVES_AFTER * lease.lease_s:
                    while await self._read_starts(log, wait=None) == _STARTS_PAGE:
                        pass  # a late start may be on any page
                    if not self._has_work():
                        await self._leave(log)
                        return
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("executor cannot renew its lease", reason=str(error))
            else:
                self.begin("tidy", self._tidy_all)

    async def _must_stay(self, log: Log) -> bool:
        """Tell whether this executor must remain one: it has open runs; or it is a driver, and
        another executor has open runs.
        """
        self.member.is_busy = await self._is_busy(log)
        return self.member.is_busy or (self.member.takes and self.member.are_others_busy())

    async def _is_busy(self, log: Log) -> bool:
        now = waiting.monotonic_now()
        self._hops = {p: until for p, until in self._hops.items() if until > now}
        if self._has_work() or self._hops:
            return True
        for partition in list(self.owned.values()):
            if partition.unread:
                await partition.catch_up(log)
            if partition.state.active or not partition.is_loaded:
                return True
        return self._has_work()

    async def _claim_hops(self) -> None:
        claims = [p for p in self._hops if self.member.is_claimable(p)]
        if claims and self._log is not None:
            await self.member.join(self._log, claims)

    async def _tidy_all(self) -> None:
        """Do periodic work after a heartbeat. The next heartbeat does not wait for it."""
        log = self._log
        assert log is not None, "a member has a log"
        try:
            self._beats += 1
            for partition in list(self.owned.values()):
                if partition.unread >= _SAVE_EVERY:
                    await partition.catch_up(log)
                await partition.save_if_due(log)
            if 0 in self.owned:
                if self.member.replica.unsaved >= _SAVE_EVERY:
                    await self.member.replica.save(log)
                if self._beats % _INBOX_TRIM_BEATS == 0:
                    await log.trim(self._inbox_seen, tag=INBOX_TAG)
                    self._inbox_seen = self._inbox.end or 0
            self._tidy()
        except (IndilogError, Stopped) as error:
            structlog.get_logger().warning("executor waits for the log", reason=str(error))

    async def _watch(self) -> None:
        """Stop all executions before the lease has ended for other processes."""
        lease = self.member.lease
        while True:
            left_s, longest_s = lease.left_s, lease.lease_s / _WATCHES
            if left_s <= 0:
                for partition in self.owned.values():
                    partition.is_loaded = False  # loaded again when the lease is renewed
                if self._stop_runs():
                    structlog.get_logger().warning(
                        "executor stops its runs: no heartbeat was acknowledged in time"
                    )
            wait_s = min(left_s, longest_s) if left_s > 0 else longest_s
            await waiting.tick(max(_TICK_S_MIN, wait_s))

    # --- leaving

    async def _leave(self, log: Log) -> None:
        """Leave, because no run is open in the partitions of this process."""
        idle = self.owned.keys() - self._uncertain()
        for partition in self.owned.values():
            partition.is_owned = False
        self.owned.clear()
        if not self.member.takes:
            self._end_task("listen")
            self._end_task("starts")
            self._inbox.end = self._starts.end = None
        self._end_task("watch")
        await self.member.leave(log, idle)
        self.woken.set()

    def _end_task(self, name: str) -> None:
        if (task := self._background.pop(name, None)) is not None:
            task.cancel()

    async def stop(self) -> None:
        """Stop all runs and leave, so that other processes continue the runs at once."""
        idle, running = self.owned.keys() - self._uncertain(), list[asyncio.Task[None]]()
        for partition in self.owned.values():
            partition.is_owned = False
            tasks = self._stop_runs(partition)
            if tasks or partition.unread or partition.state.active or not partition.is_loaded:
                idle.discard(partition.number)
            running += tasks
        self.owned.clear()
        await self._stop_taking()
        tasks = self.tasks()
        for task in tasks:
            task.cancel()
        await _ended([*running, *tasks])
        self._inbox.end = self._starts.end = None
        if self._log is not None:
            await self.member.leave(self._log, idle)

    async def release(self, logs: Logs, numbers: Collection[int]) -> None:
        """Release partitions to other executors, each when the bodies of its runs have ended."""
        left = {self.owned[number] for number in numbers if number in self.owned}
        for partition in left:
            partition.is_releasing = True
        while left:
            ended = await self._wait_for_bodies(left)
            gone = sorted(partition.number for partition in ended if partition.is_owned)
            if gone:
                await self.member.release(self.own_log(logs), gone)
                self._adopt()
            left.difference_update(ended)

    @abstractmethod
    async def _wait_for_bodies(
        self, partitions: Collection[OwnedPartition]
    ) -> Collection[OwnedPartition]:
        """Return those of these partitions in which no run executes, as soon as there is one. Runs
        that only wait are stopped.
        """

    # --- the inbox

    async def _listen(self) -> None:
        log = self._log
        assert log is not None, "a member has a log"
        while True:
            for record in await self._read(log, self._inbox, _INBOX_PAGE, wait=_INBOX_WAIT_S):
                self._inbox.end = record.seqnum + 1
                self._on_inbox(record)

    async def _look_for_late_starts(self) -> None:
        log = self._log
        assert log is not None, "a member has a log"
        while True:
            if await self._read_starts(log, wait=_INBOX_WAIT_S) < _STARTS_PAGE:
                await waiting.tick(self.member.lease.lease_s / _STARTS_PER_LEASE)

    async def _read_starts(self, log: Log, wait: float | None) -> int:
        """Handle new starts, up to one page; return their number."""
        page = await self._read(log, self._starts, _STARTS_PAGE, wait=wait)
        for record in page:
            # `_leave` may have read further meanwhile.
            self._starts.end = max(self._starts.end or 0, record.seqnum + 1)
            self._on_start(record)
        return len(page)

    async def _read(
        self, log: Log, followed: _Followed, limit: int, *, wait: float | None
    ) -> list[Record]:
        """Return the next records of a list. Return none if the log is unavailable or records are
        lost.
        """
        if followed.end is None:
            followed.end = await _tail(log)
        try:
            return await log.read_range(followed.tag, followed.end, limit=limit, wait=wait)
        except TrimmedError as error:
            followed.end = max(followed.end, error.first_seqnum)
            self._reload()
        except IndilogError as error:
            lost_to = error.next_seqnum if isinstance(error, DataLossError) else None
            if lost_to is not None and lost_to > followed.end:
                followed.end = lost_to
                self._reload()
            else:
                structlog.get_logger().warning("executor cannot read its inbox", reason=str(error))
                await waiting.pause(_PROBLEM_S)
        return []

    def _reload(self) -> None:
        """Read all partitions again, because records of the inbox were missed."""
        for partition in self.owned.values():
            partition.is_loaded = False
        self._adopt()
        self.woken.set()

    def _on_inbox(self, record: Record) -> None:
        run, limit = run_in(record.tags), limit_in(record.tags)
        if limit is not None:
            self._on_limit(limit)
            if RUNS_TAG not in record.tags:
                return  # the record wakes no run of its partition
        if run is None:
            self.woken.set()  # a record of an executor
            return
        number = partition_of(run, self.member.count)
        partition = self.owned.get(number)
        if partition is None:
            self.wanted[number] = record.seqnum
            self.woken.set()
            return
        try:
            self._on_news(partition, run, run_record(record.data))
        except IndilogError as error:
            structlog.get_logger().error("record cannot be read", run=run, reason=str(error))

    def _on_start(self, record: Record) -> None:
        """Handle a start that an executor appended for itself.

        If the executor may not execute the run, the start is handled like a record of the inbox.
        This is so for a start of another executor, and for a start with an unknown outcome.
        """
        run = run_in(record.tags)
        if run is None:
            return
        number = partition_of(run, self.member.count)
        partition = self.owned.get(number)
        if partition is not None and record.seqnum < partition.since:
            return  # loading the partition has read the start
        try:
            started = run_record(record.data)
        except IndilogError as error:
            structlog.get_logger().error("record cannot be read", run=run, reason=str(error))
            return
        if not isinstance(started, RunStarted) or not started.executor:
            return  # the start is in the inbox
        is_own = started.executor == self.member.name
        if not is_own or number in self._uncertain():
            self._on_inbox(record)


async def _outlive_call(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    CALL.set(None)  # the task outlives the call that began it
    await work()


async def _ended(tasks: Collection[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _tail(log: Log) -> SeqNum:
    while True:
        try:
            return await log.tail()
        except IndilogError as error:
            structlog.get_logger().warning("executor cannot read its inbox", reason=str(error))
            await waiting.pause(_PROBLEM_S)
