"""Enforces retention policies by trimming (ARCHITECTURE 13, decision 0015).

`RetentionService` runs a *round* every `retention_interval_s`; `RetentionRounds` does the work of
the rounds. For a limit of age, a round asks the log for its time, and then for the first seqnum
that is young enough. For a limit of size, the rounds read each record once and keep *marks*:
seqnums, each with the number of bytes that were read before it. Memory is bounded, because a log
has at most about `_MARKS` (1,000) marks. After a restart, the retained records are read again.
A repeated trim is harmless, so two nodes may enforce policies at once. `LogKinds` also uses
`RetentionRounds`, for logs of other kinds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import structlog

from indilog.base.errors import DataLossError, IndilogError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Log, LogSource, Record, Session
from indilog.base.retention import Retention
from indilog.config import KIB, NodeConfig
from indilog.sdk.retention_log import RETENTION_LOG

_MARKS: Final = 1000
"""Marks of a log with a limit of size; they divide the limit into equal steps."""
_PAGE_COST_BYTES_MIN: Final = 64 * KIB
"""A page that is smaller counts as this many bytes of what a round may read, because even a small
page costs a request.
"""
_FAILURES_MAX: Final = 10
"""A round ends after this many failed logs."""


class SizeMarks:
    """Finds the seqnum at which the newest `size_bytes` of a log begin, exact to 1/`_MARKS` of
    `size_bytes`.

    Attributes:
        bound: the first seqnum that was not read.
    """

    def __init__(self, size_bytes: int) -> None:
        self.bound: SeqNum = 0
        self._size_bytes = size_bytes
        self._step_bytes = max(1, size_bytes // _MARKS)
        self._read_bytes = 0
        self._marks: list[tuple[SeqNum, int]] = []
        """Seqnums, and the bytes that were read before each."""
        self._trimmed: SeqNum = 0
        """No record is below this seqnum."""

    @property
    def until(self) -> SeqNum:
        """The seqnum below which to trim; 0: there is nothing to trim."""
        return self._marks[0][0] if self._marks and self._marks[0][0] > self._trimmed else 0

    @property
    def marks(self) -> int:
        """How many marks are kept."""
        return len(self._marks)

    def take(self, page: Sequence[Record]) -> int:
        """Count the bytes of a page of records; return their sum."""
        before = self._read_bytes
        for record in page:
            if not self._marks:
                self._trimmed = max(self._trimmed, record.seqnum)  # no record is below it
            if not self._marks or self._read_bytes - self._marks[-1][1] >= self._step_bytes:
                self._marks.append((record.seqnum, self._read_bytes))
            self._read_bytes += len(record.data) + len(record.names)
            self.bound = record.seqnum + 1
        excess = self._read_bytes - self._size_bytes
        first_kept = bisect_left(self._marks, excess, key=lambda mark: mark[1])
        del self._marks[: min(first_kept, len(self._marks) - 1)]
        assert not page or self._marks, "the last mark is kept"
        return self._read_bytes - before

    def note_trim(self, until: SeqNum) -> None:
        """Note that the log is trimmed below `until`."""
        self._trimmed = max(self._trimmed, until)

    def restart_at(self, floor: SeqNum) -> None:
        """Continue at `floor`: all records that were read are trimmed."""
        self._marks.clear()
        self.bound, self._trimmed = floor, max(self._trimmed, floor)


class _RetainedLog:
    """A log with a policy, and the state that the rounds keep about the log.

    Attributes:
        floor: no readable record of the log is below this seqnum.
    """

    def __init__(self, log: Log, policy: Retention) -> None:
        self.log = log
        self.policy = policy
        self.floor: SeqNum = 0
        self.sizes = SizeMarks(policy.size_bytes) if policy.size_bytes is not None else None

    async def old_until(self, now: float) -> SeqNum:
        """Return the seqnum below which records are too old for the policy at `now`, the time of
        the log; 0: no record is too old.
        """
        age_s = self.policy.age_s
        if age_s is None:
            return 0
        until = await self.log.find_time(max(0.0, now - age_s))
        if until <= self.floor:
            return 0
        first = await self._first()
        # No record below the new floor is left to look at, so later rounds read from there on.
        self.floor = until if first is None else min(first, until)
        return until if first is not None and first < until else 0

    async def _first(self) -> SeqNum | None:
        while True:
            try:
                record = await self.log.read_next(bound=self.floor)
            except TrimmedError as error:
                self.floor = max(error.first_seqnum, self.floor + 1)
            except DataLossError as error:  # a lost record, which may be trimmed like the others
                return self.floor if error.seqnum is None else error.seqnum
            else:
                return record.seqnum if record is not None else None

    async def read_page(self, tail: SeqNum) -> int | None:
        """Read the next page for the limit of size, and return its size in bytes; None: all records
        below `tail` were read.
        """
        sizes = self.sizes
        assert sizes is not None, "only logs with a bound in bytes are read"
        if sizes.bound >= tail:
            return None
        try:
            page = await self.log.read_range(bound=sizes.bound)
        except TrimmedError as error:
            sizes.restart_at(error.first_seqnum)
            return 0
        except DataLossError as error:
            if error.next_seqnum is None or error.next_seqnum <= sizes.bound:
                raise
            sizes.bound = error.next_seqnum  # a lost record counts 0 bytes, so it trims no others
            return 0
        if not page:
            sizes.bound = tail
            return None
        return sizes.take(page)

    async def trim(self, until: SeqNum) -> None:
        await self.log.trim(until)
        self.floor = max(self.floor, until)
        if self.sizes is not None:
            self.sizes.note_trim(until)


class RetentionRounds:
    """Trims logs by their policies.

    Args:
        logs: the logs to trim.
        pause: sleeps for a number of seconds. It is awaited after each page, so that a round reads
            at most `retention_bytes_per_s`.
    """

    def __init__(
        self, logs: LogSource, config: NodeConfig, pause: Callable[[float], Awaitable[None]]
    ) -> None:
        self._logs = logs
        self._session = Session()
        self._bytes_per_s = config.trims.retention_bytes_per_s
        self._round_bytes_max = (
            config.trims.retention_bytes_per_s * config.trims.retention_interval_s
        )
        self._pause = pause
        self._policies = logs.log(RETENTION_LOG, self._session)
        self._kept: dict[str, _RetainedLog] = {}
        self._trims = 0
        self._last_trim: dict[str, object] = {}
        self._failed: list[tuple[str, IndilogError]] = []

    def status(self) -> dict[str, object]:
        """Return the status for operators and metrics."""
        return {
            "logs": len(self._kept),
            "size_marks": sum(k.sizes.marks for k in self._kept.values() if k.sizes is not None),
            "trims": self._trims,
            **self._last_trim,
        }

    def take(self, policies: Mapping[str, Retention]) -> None:
        """Enforce these policies from now on."""
        for name in [n for n in self._kept if n not in policies]:
            del self._kept[name]
        for name, policy in policies.items():
            kept = self._kept.get(name)
            if kept is None or kept.policy != policy:
                self._kept[name] = _RetainedLog(self._logs.log(name, self._session), policy)

    async def run(self) -> bool:
        """Trim the records that the policies do not keep now. Return whether the round stopped
        early, so that unread records are left.

        If a call of a log fails, the next round tries that log again, after the other logs.

        Raises:
            IndilogError: the time of the log is not available; nothing was trimmed.
        """
        self._failed.clear()
        now = await self._policies.now()
        await self._trim_by_age(now)
        is_more = await self._trim_by_size(now)
        if self._failed:
            name, error = self._failed[0]
            structlog.get_logger().warning(
                "retention not enforced", logs=len(self._failed), log=name, reason=str(error)
            )
        return is_more

    # --- by age

    async def _trim_by_age(self, now: float) -> None:
        for name, kept in list(self._kept.items()):
            if len(self._failed) >= _FAILURES_MAX:
                return
            try:
                if until := await kept.old_until(now):
                    await self._trim(name, kept, until, now)
            except IndilogError as error:
                self._note_failure(name, kept, error)

    # --- by size

    async def _trim_by_size(self, now: float) -> bool:
        reading = [name for name, kept in self._kept.items() if kept.sizes is not None]
        if not reading:
            return False
        try:
            is_more = await self._read_up_to(await self._policies.tail(), reading)
        except IndilogError as error:
            self._failed.append((reading[0], error))
            return False
        for name, kept in list(self._kept.items()):
            if kept.sizes is not None and (until := kept.sizes.until):
                try:
                    await self._trim(name, kept, until, now)
                except IndilogError as error:
                    self._note_failure(name, kept, error)
        return is_more

    async def _read_up_to(self, tail: SeqNum, reading: list[str]) -> bool:
        """Read pages of the logs round robin, until all logs are read up to `tail` or the round has
        read its maximum of bytes. Return whether the maximum ended the round.
        """
        left = self._round_bytes_max
        while reading:
            for name in list(reading):
                if left <= 0 or len(self._failed) >= _FAILURES_MAX:
                    return left <= 0
                cost = await self._read_page(name, self._kept[name], tail)
                if cost is None:
                    reading.remove(name)
                    continue
                cost = max(cost, _PAGE_COST_BYTES_MIN)
                left -= cost
                await self._pause(cost / self._bytes_per_s)
        return False

    async def _read_page(self, name: str, kept: _RetainedLog, tail: SeqNum) -> int | None:
        self._kept[name] = self._kept.pop(name)  # moved to the end: unread logs come first
        try:
            return await kept.read_page(tail)
        except IndilogError as error:
            self._note_failure(name, kept, error)
            return None

    # --- both

    async def _trim(self, name: str, kept: _RetainedLog, until: SeqNum, now: float) -> None:
        await kept.trim(until)
        self._trims += 1
        self._last_trim = {
            "last_trim_log": name, "last_trim_until": until, "last_trim_time": now,
        }  # fmt: skip
        structlog.get_logger().info("log trimmed by its retention", log=name, until=until)

    def _note_failure(self, name: str, kept: _RetainedLog, error: IndilogError) -> None:
        self._failed.append((name, error))
        self._kept.pop(name, None)
        self._kept[name] = kept
