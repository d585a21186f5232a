"""Claims partitions of executors that left or crashed (decision 0058).

Each process that has loaded the workflows of a flow runs one driver for its executor. A driver
waits for records of the inbox (`INBOX_TAG`), which announce executors that begin and stop. While
another executor is live or owns partitions, the driver also reads heartbeats, eight times in each
lease duration.

Rendezvous hashing over the live drivers gives the preferred owner of each partition. When the lease
of an owner has ended, each driver claims those partitions of this owner for which the driver is
preferred. If another driver is preferred for a partition of its own process, the driver releases
the partition.

`Flow.drive` runs a `Driver`. `taking` executes the open runs of claimed partitions. `ownership` has
the records and the state of executors and partitions.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from bokiflow.collecting import Collector
from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.public_call import Stopped, public_call
from bokiflow.runs.run_log import until_done
from indilog import Context, IndilogError
from indilog.sdk import Logs

_ITERATIONS_PER_LEASE: Final = 8
"""Iterations of a driver in the duration of one lease, while there are other executors."""
_WAIT_S_MIN: Final = 0.01
"""Shortest time until the next iteration, in seconds, unless a record of the inbox arrives."""
_RELEASE: Final = "release"
"""Name of the task that releases partitions; at most one runs."""


class Driver:
    """Claims partitions for the runner of this process, and releases them."""

    def __init__(self, runner: Runner, *, retention_s: float) -> None:
        self._runner = runner
        self._collector = Collector(runner, retention_s)
        self._released_at = 0.0
        """When the last release began (`waiting.monotonic_now`)."""

    async def drive(self, logs: Logs) -> None:
        """Watch the executors and claim partitions until cancelled. Then leave, so that other
        processes continue the runs at once.
        """
        runner = self._runner
        runner.member.takes = True
        collecting = asyncio.create_task(self._collect(logs))
        try:
            await until_done(lambda: self._first_look(logs), "driver")
            while True:
                await until_done(lambda: self._iterate(logs), "driver")
        finally:
            collecting.cancel()
            runner.member.takes = False
            await self._stop()

    async def _collect(self, logs: Logs) -> None:
        log = logs.log(self._runner.log_name)
        while True:
            await waiting.tick(self._collector.interval_s)
            try:
                await self._collector.collect(log, await log.now())
                if isinstance(logs, Context):
                    await self._collector.release_calls(logs)
            except (IndilogError, Stopped) as error:
                structlog.get_logger().warning("ended runs are not trimmed", reason=str(error))

    async def _stop(self) -> None:
        """Record that this executor leaves. If the log is unavailable, other drivers claim its
        partitions when its lease has ended.
        """
        try:
            with public_call():
                await self._runner.stop()
        except IndilogError as error:
            structlog.get_logger().warning("driver cannot record that it leaves", reason=str(error))

    async def _first_look(self, logs: Logs) -> None:
        """Read the executors, and claim the free partitions for which this process is the preferred
        owner, because they may have open runs.
        """
        runner = self._runner
        await runner.look(logs)
        runner.listen()
        if claims := runner.member.due_claims((), all_free=True):
            await runner.join(logs, claims)

    async def _iterate(self, logs: Logs) -> None:
        runner, member = self._runner, self._runner.member
        runner.woken.clear()
        await runner.look(logs)
        owners = member.owners.owners
        wanted = {p for p, at in runner.wanted.items() if p < len(owners) and at > owners[p].since}
        if claims := member.due_claims(wanted):
            await runner.join(logs, claims)
        elif member.are_others_busy() and not member.lease.is_sure():
            # The heartbeat makes this driver live, so other drivers release some partitions to it.
            await runner.join(logs)
        now = waiting.monotonic_now()
        is_due = now - self._released_at >= member.lease.lease_s and member.lease.is_sure()
        if is_due and (releases := member.due_releases()):
            self._released_at = now
            runner.begin(
                _RELEASE, lambda: until_done(lambda: runner.release(logs, releases), "driver")
            )
        await self._wait()

    async def _wait(self) -> None:
        """Wait until an executor begins or stops, or until it is time to read heartbeats again."""
        runner, member = self._runner, self._runner.member
        now, lease_s = waiting.monotonic_now(), member.lease.lease_s
        next_lapse = member.next_lapse()
        is_claim_due = any(not owner.executor and owner.is_needed for owner in member.owners.owners)
        is_claim_due = is_claim_due or member.unsure_until() is not None
        if next_lapse is None and not is_claim_due and not member.executors_known():
            await runner.woken.wait()
            return
        wait_s = lease_s / _ITERATIONS_PER_LEASE
        if next_lapse is not None and next_lapse > now:
            wait_s = min(wait_s, next_lapse - now)
        try:
            async with asyncio.timeout(max(_WAIT_S_MIN, wait_s)):
                await runner.woken.wait()
        except TimeoutError:
            pass
