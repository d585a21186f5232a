"""Schedules the next import of applications that did not load, without I/O.

`Applications` asks `Retries` which version to import next.
"""

from __future__ import annotations

from indilog_compute.workers.call import DeployedApp


class Retries:
    """The applications that did not load, each with the time of its next import.

    The pause before an import doubles with each failure, from `pause_s_min` to `pause_s_max`
    seconds.
    """

    def __init__(self, *, pause_s_min: float, pause_s_max: float) -> None:
        self._pause_s_min = pause_s_min
        self._pause_s_max = pause_s_max
        self._pauses: dict[DeployedApp, float] = {}
        self._times: dict[DeployedApp, float] = {}

    @property
    def next_at(self) -> float | None:
        """The time of the next import; None: no import is scheduled."""
        return min(self._times.values(), default=None)

    def schedule(self, deployed: DeployedApp, now: float) -> None:
        """Schedule an import of an application, unless one is already scheduled."""
        if deployed not in self._times:
            before = self._pauses.get(deployed)
            pause_s = self._pause_s_min if before is None else min(2 * before, self._pause_s_max)
            assert self._pause_s_min <= pause_s <= self._pause_s_max, "pauses double up to a limit"
            self._pauses[deployed] = pause_s
            self._times[deployed] = now + pause_s

    def withdraw(self, deployed: DeployedApp) -> None:
        """Remove an application that was loaded, or is no longer deployed."""
        self._pauses.pop(deployed, None)
        self._times.pop(deployed, None)

    def pop_due(self, now: float) -> DeployedApp | None:
        """Remove and return an application whose import is due; None: no import is due at `now`."""
        deployed = min(self._times, key=self._times.__getitem__, default=None)
        if deployed is None or self._times[deployed] > now:
            return None
        assert deployed in self._pauses, "each scheduled try has a pause"
        del self._times[deployed]
        return deployed
