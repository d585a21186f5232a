"""Decides, without I/O, how many worker processes a compute node runs (docs/decisions/0051).

The average number of calls in flight is the rate of calls times their duration (Little's law).
Nightcore sizes its workers by a moving average of this number (thesis 2.1.2). Here workers are
added while calls wait, because waiting calls show at once that the slots do not suffice. The moving
average decides when a worker is removed: for `workers_idle_s`, the average must fit into half of
the slots that would remain. So the number of workers does not alternate at a constant load.
`FunctionHost` asks `WorkerScale` periodically, and resizes the `WorkerPool`.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

ADD_S: Final = 0.2
"""Seconds for which calls must wait before workers are added."""
AVERAGE_S: Final = 2.0
"""Time constant of the moving average of calls in flight, in seconds."""

_TOLERANCE: Final = 0.1
"""Tolerance of the average, which only approaches a constant number of calls."""


class Demand(NamedTuple):
    """The observed load of a compute node.

    Attributes:
        calls: number of calls in flight, which hold a slot or wait for a slot.
        waiting: number of calls that wait for a slot.
        workers: number of worker processes, including those that start.
        starting: number of worker processes that do not take calls yet.
    """

    calls: int
    waiting: int
    workers: int
    starting: int


class WorkerScale:
    """The number of worker processes that the load needs.

    Args:
        workers_min: smallest number of workers, at least 1.
        workers_max: largest number of workers.
        slots: number of calls that one worker runs concurrently.
        idle_s: seconds for which half of the slots of the remaining workers must have sufficed
            before a worker is removed.

    Attributes:
        average: moving average of the calls in flight.
    """

    def __init__(self, *, workers_min: int, workers_max: int, slots: int, idle_s: float) -> None:
        assert 1 <= workers_min <= workers_max
        self._workers_min = workers_min
        self._workers_max = workers_max
        self._slots = slots
        self._idle_s = idle_s
        self._observed_at: float | None = None
        self._waiting_since: float | None = None
        self._idle_since: float | None = None
        self.average = 0.0

    def wanted(self, demand: Demand, now: float) -> int:
        """Return how many workers the load at `now` (seconds) needs. One call removes at most one
        worker: the result is at least `demand.workers - 1`.
        """
        self._take_average(demand.calls, now)
        if (added := self._added(demand, now)) > 0:
            self._idle_since = None
            return min(self._workers_max, demand.workers + added)
        if self._is_one_too_many(demand, now):
            self._idle_since = now
            return demand.workers - 1
        return demand.workers

    # --- internal

    def _take_average(self, calls: int, now: float) -> None:
        if self._observed_at is not None:
            weight = 1 - math.exp((self._observed_at - now) / AVERAGE_S)
            self.average += weight * (calls - self.average)
        self._observed_at = now

    def _added(self, demand: Demand, now: float) -> int:
        """Return how many workers the waiting calls need in addition to the workers that start."""
        if demand.waiting == 0:
            self._waiting_since = None
            return 0
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < ADD_S or demand.workers >= self._workers_max:
            return 0
        missing = demand.waiting - demand.starting * self._slots
        return max(0, math.ceil(missing / self._slots))

    def _is_one_too_many(self, demand: Demand, now: float) -> bool:
        left = (demand.workers - 1) * self._slots
        is_idle = (
            demand.workers > self._workers_min
            and demand.waiting == demand.starting == 0
            and 2 * self.average <= left + _TOLERANCE
        )
        if not is_idle:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        return now - self._idle_since >= self._idle_s
