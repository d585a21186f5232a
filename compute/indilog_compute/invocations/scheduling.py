"""Decides which due times of schedules become invocations. `InvocationExecutor` calls `Schedules`
with the time, and appends the returned records.

Due times follow the calendar. So in this module, and only here, `now` is the wall clock.

Every compute node with workers watches all schedules. Node 0 appends a record for a due time at
once. Node n appends a record n leases later, if the log has no record of that due time by then. The
log decides which record takes effect. Each record names the previous due time, and takes effect
only if this was the last accepted due time.

If the wall clock is set back by less than `SET_BACK_S` (3 hours), no due time runs a second time
(as in Debian's cron). If the clock is set back further, the schedule continues with the next due
time of the new clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import structlog
from cronsim import CronSimError

from indilog.apps.schedule import due_between, next_due
from indilog.base.deployed import ScheduleSpec, scheduled_invocation
from indilog.config import NodeConfig
from indilog_compute.invocations.admission import OpenLimits
from indilog_compute.invocations.invocation_table import InvocationTable
from indilog_compute.invocations.records import InvocationAccepted, application_of, schedule_tag

_NOT_UNDERSTOOD: Final = (ValueError, CronSimError)
"""The errors for an unknown time zone, or for a schedule that another version recorded."""


SET_BACK_S: Final = 3 * 3600.0
"""Seconds that an accepted due time may be ahead of the wall clock. A due time that is further
ahead was accepted by a wrong clock.
"""


class DeployedSchedule(NamedTuple):
    """A schedule of a deployed application.

    `since` is the time from which on every deployment of the application has had this schedule
    (log's time, seconds since 1970).
    """

    function: str
    spec: ScheduleSpec
    since: float

    @property
    def name(self) -> str:
        """The schedule's name in the log. If the expression or the time zone changes, the name
        changes, so it is a new schedule.
        """
        return f"{self.function} {self.spec.expression} {self.spec.timezone}"


class _Watched:
    """A schedule, and its next due time.

    Attributes:
        application: the application of the schedule's function.
        skipped_to: due times up to this time do not run (wall clock, seconds since 1970).
    """

    def __init__(self, scheduled: DeployedSchedule, since: float) -> None:
        self.scheduled = scheduled
        self.application = application_of(scheduled.function)
        self.skipped_to = 0.0
        self._since = since
        """`DeployedSchedule.since`, converted to the wall clock."""
        self._set_back_to: float | None = None
        """The wall clock's time at which this node first noticed an accepted due time more than
        `SET_BACK_S` ahead; None: no accepted due time is so far ahead.
        """
        self._next_after: tuple[float, float | None] = -1.0, None

    def last_at(self, table: InvocationTable) -> float:
        """Return the last accepted due time; 0 if there is none."""
        last = table.last_due.get(self.scheduled.name)
        return last.at if last is not None else 0.0

    def after(self, table: InvocationTable, now: float) -> float:
        """Return the time after which the next due time is searched.

        If the previous deployment also had the schedule, a new deployment runs the due times that
        the previous one had not run. Due times that passed while no deployment had the schedule do
        not run.
        """
        latest = now + SET_BACK_S
        times = [self.last_at(table), self.skipped_to]
        last = table.last_due.get(self.scheduled.name)
        if last is None or last.ordered_at < self.scheduled.since:
            times.append(self._since)
        if max(times) <= latest:
            self._set_back_to = None
            return max(times)
        if self._set_back_to is None or self._set_back_to > latest:
            self._set_back_to = now
        return max(self._set_back_to, *(time for time in times if time <= latest))

    def next(self, table: InvocationTable, now: float) -> float | None:
        """Return the next due time, which may lie in the past; None: there is none, or this machine
        cannot interpret the schedule.
        """
        after = self.after(table, now)
        if after != self._next_after[0]:
            self._next_after = after, self._due_after(after)
        return self._next_after[1]

    def _due_after(self, after: float) -> float | None:
        try:
            return next_due(self.scheduled.spec, after)
        except _NOT_UNDERSTOOD as error:
            structlog.get_logger().error(
                "schedule not run", schedule=self.scheduled.name, reason=str(error)
            )
            return None


class Schedules:
    """Watches schedules for one compute node.

    Args:
        rank: returns the index of this node among all compute nodes, from 0. The index changes when
            nodes join and leave.
        config: settings with the limits.
    """

    def __init__(self, rank: Callable[[], int], config: NodeConfig) -> None:
        self.rank = rank
        self._lease_s = config.invocations.invocation_lease_s
        self._late_s_max = config.invocations.schedule_late_s_max
        self._catch_up_max = config.invocations.schedule_catch_up_max
        self._limits = OpenLimits.of(config)
        self._watched: dict[str, _Watched] = {}

    def take(self, schedules: Iterable[DeployedSchedule], *, ahead_s: float = 0.0) -> None:
        """Watch exactly these schedules from now on. The wall clock is `ahead_s` seconds ahead of
        the log's time.
        """
        before = self._watched
        self._watched = {}
        for scheduled in schedules:
            there = before.get(scheduled.name)
            same = there is not None and there.scheduled == scheduled
            self._watched[scheduled.name] = (
                there if there and same else _Watched(scheduled, scheduled.since + ahead_s)
            )

    def next_due(self, table: InvocationTable, now: float) -> float | None:
        """Return when to call `due` next (wall clock); None: no schedule will be due.

        Schedules of an application at its limit do not count, because the caller calls `next_due`
        again when an invocation ends.
        """
        times = [
            watched.next(table, now)
            for watched in self._watched.values()
            if not self._limits.is_full(table.open_by_application, watched.application)
        ]
        behind_s = self.rank() * self._lease_s
        return min((t + behind_s for t in times if t is not None), default=None)

    def due(self, table: InvocationTable, executor: str, now: float) -> list[InvocationAccepted]:
        """Return the invocations to accept now, except those of applications at their limit."""
        accepted: list[InvocationAccepted] = []
        open_ = table.open_by_application.copy()
        behind_s = self.rank() * self._lease_s
        for watched in self._watched.values():
            first = watched.next(table, now)
            if first is None or first + behind_s > now:
                continue
            if self._limits.is_full(open_, watched.application):
                continue
            times = self._times(watched, table, now)
            if not times:
                watched.skipped_to = max(watched.skipped_to, first)
            before = [watched.last_at(table), *times]
            for after, at in zip(before, times, strict=False):
                accepted.append(_accepted(watched.scheduled, executor, at, after))
                open_[watched.application] += 1
        return accepted

    def status(self, table: InvocationTable, now: float) -> list[dict[str, Any]]:
        """Return the last and next due time of each schedule, for `/status`."""
        return [
            {
                "schedule": name,
                "last": _shown(watched.last_at(table) or None),
                "next": _shown(watched.next(table, now)),
                "catch_up": watched.scheduled.spec.catch_up,
            }
            for name, watched in sorted(self._watched.items())
        ]

    def _times(self, watched: _Watched, table: InvocationTable, now: float) -> list[float]:
        spec = watched.scheduled.spec
        most = self._catch_up_max if spec.catch_up == "all" else 1
        times = due_between(spec, watched.after(table, now), now, most=most)
        if spec.catch_up == "none":
            missed = [at for at in times if at + self._late_s_max < now]
            watched.skipped_to = max([watched.skipped_to, *missed])
            times = [at for at in times if at not in missed]
        return times


def _accepted(
    scheduled: DeployedSchedule, executor: str, at: float, after: float
) -> InvocationAccepted:
    return InvocationAccepted(
        id=scheduled_invocation(scheduled.name, at),
        executor=executor,
        function=scheduled.function,
        arguments=b"{}",
        position=0,
        stream=schedule_tag(scheduled.name),
        schedule=scheduled.name,
        at=at,
        after=after,
    )


def _shown(time: float | None) -> str | None:
    return datetime.fromtimestamp(time, UTC).isoformat() if time is not None else None
