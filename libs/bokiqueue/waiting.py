"""Lets consumers wait: one read waits for all consumers of a process, and each message wakes one.

This is the only module of the library that needs an event loop. It awaits only the log and its own
futures, and does not poll. A wake-up decides nothing: a woken consumer must still claim a message.
`QueueReplica` owns the `Notifications` of its queue, and `Queue` waits on them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from indilog import Log, Record, TrimmedError
from indilog.sdk import READ_RANGE_LIMIT_MAX, SeqNum

_WAIT_S_MAX: Final = 30.0
"""Longest wait of one read in seconds. After it, the next read begins."""
_TIMER_S_MIN: Final = 0.001


def seconds_now() -> float:
    """Return the seconds of a clock that cannot be set and that counts while the machine sleeps.
    This clock decides only when to read, not who gets a message.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def pause(seconds: float) -> None:
    """Return after `seconds`."""
    await asyncio.sleep(seconds)


class Notifications:
    """Notifies waiting consumers that a message may be ready.

    Args:
        tag: tag of all records that can make a message ready.
        due_in_s: returns the seconds until a message that no consumer claims is ready, 0 if there
            is one; None if no message will be ready without a further record.
        note: called with the records that were read. The sessions of the consumers that are woken
            may not see these records yet.
        note_trim: called with a seqnum below which records were trimmed before they were read.
    """

    def __init__(
        self,
        tag: str,
        due_in_s: Callable[[], float | None],
        note: Callable[[Sequence[Record]], object],
        note_trim: Callable[[SeqNum], object],
    ) -> None:
        self._tag = tag
        self._due_in_s = due_in_s
        self._note = note
        self._note_trim = note_trim
        self._waiting: deque[asyncio.Future[SeqNum]] = deque()
        self._end: SeqNum = 0
        """Consumers were notified of records below this seqnum."""
        self._watcher: asyncio.Task[None] | None = None
        self._reading: asyncio.Timeout | None = None
        """The timeout of the watcher's current read, by which `due` ends the read early. None: the
        watcher is not reading.
        """
        self._until = 0.0
        """When the watcher's read times out, in the time of `seconds_now`."""
        self._passed_on = False
        """Whether a wake-up was passed on while no consumer waited. The next consumer that waits
        gets this wake-up.
        """

    async def wait(self, log: Log, since: SeqNum, timeout_s: float) -> SeqNum:
        """Wait until a message at or after `since` may be ready, or until the timeout. Return
        `since` for the next call.
        """
        if self._end > since:
            return self._end
        if self._passed_on:
            self._passed_on = False
            return since
        future: asyncio.Future[SeqNum] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if self._watcher is None or self._watcher.done():
            self._end = max(self._end, since)
            self._watcher = asyncio.create_task(self._watch(log))
        try:
            async with asyncio.timeout(timeout_s):
                return max(since, await future)
        except TimeoutError:
            return since
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.pass_on()
            raise
        finally:
            self._stop_waiting(future)

    def pass_on(self) -> None:
        """Wake another consumer, because the woken consumer takes no message or its claim failed.
        An unneeded wake-up is harmless.
        """
        self._passed_on = not self._wake_one()

    def due(self, in_s: float | None) -> None:
        """Note that a message is ready in `in_s` seconds; None: there is none. If the current read
        would end later, replace it with a new read.
        """
        if self._reading is not None and in_s is not None and seconds_now() + in_s < self._until:
            self._reading.reschedule(asyncio.get_running_loop().time())
            self._reading = None

    def _stop_waiting(self, future: asyncio.Future[SeqNum]) -> None:
        """Remove a consumer that no longer waits."""
        if future in self._waiting:
            self._waiting.remove(future)
        if not self._waiting and self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _watch(self, log: Log) -> None:
        """Read while a consumer waits. An error of a read is raised in all waiting consumers."""
        try:
            while self._waiting:
                await self._notify_next(log)
        except Exception as error:  # noqa: BLE001 - otherwise the consumers would wait forever
            while self._waiting:
                future = self._waiting.popleft()
                if not future.done():
                    future.set_exception(error)

    async def _notify_next(self, log: Log) -> None:
        due_in_s = self._due_in_s()
        wait_s = _WAIT_S_MAX if due_in_s is None else due_in_s
        wait_s = min(max(_TIMER_S_MIN, wait_s), _WAIT_S_MAX)
        self._until = seconds_now() + wait_s
        try:
            records = await self._read(log, wait_s)
        except TrimmedError as error:
            self._end = max(self._end, error.first_seqnum)
            self._note_trim(error.first_seqnum)
            while self._wake_one():
                pass  # any number of messages may have been pushed
            return
        if records:
            assert records[0].seqnum >= self._end, "a read begins where the last one ended"
            self._end = records[-1].seqnum + 1
            self._note(records)
            for _ in records:
                self._wake_one()
        elif (left_s := self._due_in_s()) is not None and left_s <= 0:
            self._wake_one()

    async def _read(self, log: Log, wait_s: float) -> list[Record]:
        """Return new records. The result is empty after `wait_s` seconds, or if a message is ready
        earlier.
        """
        limit = min(len(self._waiting), READ_RANGE_LIMIT_MAX)
        ended = asyncio.timeout(None)
        try:
            async with ended:
                self._reading = ended
                return await log.read_range(self._tag, self._end, limit=limit, wait=wait_s)
        except TimeoutError:
            if not ended.expired():
                raise
            return []
        finally:
            self._reading = None

    def _wake_one(self) -> bool:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._end)
                return True
        return False
