"""Which due times of the schedules become invocations now. `now` in, records out.

Due times follow the calendar, so `now` is the wall clock here, and here only.

Every compute node that has workers watches all schedules; the first one accepts what is due at
once, the others a lease later each, if it is not in the log by then. The log decides: a due time
counts if the one that it says it follows is the last that counted.

A wall clock that is set back by less than `SET_BACK_S` has no due time run again, as with Debian's
cron; one that is set back further, or was ahead by mistake, goes on with the next due time from
there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import structlog
from cronsim import CronSimError

from indilog.apps.schedule import due_between, next_due
from indilog.base.deployed import ScheduleSpec
from indilog.config import NodeConfig
from indilog_compute.invocations.admission import OpenLimits
from indilog_compute.invocations.fold import Fold
from indilog_compute.invocations.records import Accepted, application_of, schedule_tag

_NOT_UNDERSTOOD: Final = (ValueError, CronSimError)
"""Its time zone is not known on this machine, or it was recorded by another version."""


SET_BACK_S: Final = 3 * 3600.0
"""A due time that lies further ahead of the wall clock was noted by a wrong one."""


class Scheduled(NamedTuple):
    """A schedule of a deployed application.

    `since`: when the first of the deployments was ordered that have had it up to now, one after the
    other; seconds since 1970 by the log's time.
    """

    function: str
    spec: ScheduleSpec
    since: float

    @property
    def name(self) -> str:
        """Names the schedule in the log; another expression or time zone is another schedule."""
        return f"{self.function} {self.spec.expression} {self.spec.timezone}"


class _Watched:
    """A schedule, and its next due time.

    Attributes:
        application: whose function it starts.
        skipped_to: due times up to this are not run.
    """

    def __init__(self, scheduled: Scheduled, since: float) -> None:
        self.scheduled = scheduled
        self.application = application_of(scheduled.function)
        self.skipped_to = 0.0
        self._since = since
        """`Scheduled.since` by the wall clock."""
        self._set_back_to: float | None = None
        """Where the wall clock was when one of the times was first seen to lie too far ahead."""
        self._next_after: tuple[float, float | None] = -1.0, None

    def last_at(self, fold: Fold) -> float:
        """Return the due time that was accepted last; 0: none."""
        last = fold.last_due.get(self.scheduled.name)
        return last.at if last is not None else 0.0

    def after(self, fold: Fold, now: float) -> float:
        """Return the time after which it is due next: a deployment skips nothing that the one
        before had yet to run, and runs nothing from when none had it.
        """
        latest = now + SET_BACK_S
        times = [self.last_at(fold), self.skipped_to]
        last = fold.last_due.get(self.scheduled.name)
        if last is None or last.ordered_at < self.scheduled.since:
            times.append(self._since)
        if max(times) <= latest:
            self._set_back_to = None
            return max(times)
        if self._set_back_to is None or self._set_back_to > latest:
            self._set_back_to = now
        return max(self._set_back_to, *(time for time in times if time <= latest))

    def next(self, fold: Fold, now: float) -> float | None:
        """Return when it is due next, or was without having been accepted; never, if this machine
        does not understand it.
        """
        after = self.after(fold, now)
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
    """Watches schedules for one compute node, the `rank`th of all, from 0."""

    def __init__(self, rank: int, config: NodeConfig) -> None:
        self.rank = rank
        self._behind_s = rank * config.invocations.invocation_lease_s
        self._late_s_max = config.invocations.schedule_late_s_max
        self._catch_up_max = config.invocations.schedule_catch_up_max
        self._limits = OpenLimits.of(config)
        self._watched: dict[str, _Watched] = {}

    def take(self, schedules: Iterable[Scheduled], *, ahead_s: float = 0.0) -> None:
        """Watch these from now on, and no others; `ahead_s`: by how much the wall clock is ahead of
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

    def next_due(self, fold: Fold, now: float) -> float | None:
        """Return when to ask for what is due; None: never.

        Schedules of an application without room do not count: it is asked again when an invocation
        has ended.
        """
        times = [
            watched.next(fold, now)
            for watched in self._watched.values()
            if not self._limits.is_full(fold.open_by_application, watched.application)
        ]
        return min((t + self._behind_s for t in times if t is not None), default=None)

    def due(self, fold: Fold, executor: str, now: float) -> list[Accepted]:
        """Return what is to be accepted now: nothing of an application that has no room."""
        accepted: list[Accepted] = []
        open_ = fold.open_by_application.copy()
        for watched in self._watched.values():
            first = watched.next(fold, now)
            if first is None or first + self._behind_s > now:
                continue
            if self._limits.is_full(open_, watched.application):
                continue
            times = self._times(watched, fold, now)
            if not times:
                watched.skipped_to = max(watched.skipped_to, first)
            before = [watched.last_at(fold), *times]
            for after, at in zip(before, times, strict=False):
                accepted.append(_accepted(watched.scheduled, executor, at, after))
                open_[watched.application] += 1
        return accepted

    def status(self, fold: Fold, now: float) -> list[dict[str, Any]]:
        """Return when each was last due and is next, for people."""
        return [
            {
                "schedule": name,
                "last": _shown(watched.last_at(fold) or None),
                "next": _shown(watched.next(fold, now)),
                "catch_up": watched.scheduled.spec.catch_up,
            }
            for name, watched in sorted(self._watched.items())
        ]

    def _times(self, watched: _Watched, fold: Fold, now: float) -> list[float]:
        spec = watched.scheduled.spec
        most = self._catch_up_max if spec.catch_up == "all" else 1
        times = due_between(spec, watched.after(fold, now), now, most=most)
        if spec.catch_up == "none":
            missed = [at for at in times if at + self._late_s_max < now]
            watched.skipped_to = max([watched.skipped_to, *missed])
            times = [at for at in times if at not in missed]
        return times


def _accepted(scheduled: Scheduled, executor: str, at: float, after: float) -> Accepted:
    digest = hashlib.blake2b(scheduled.name.encode(), digest_size=8).hexdigest()
    return Accepted(
        id=f"{digest}-{int(at):x}",
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
