"""How high retention policies may raise the floor of a log until an instant.

By age: a record may be trimmed if its stamp is older than the limit. The log's time is never ahead
of the simulated time, so the checker compares stamps with the simulated time. A stamp may lag
(decision 0025). A primary that starts with a wrong clock counts no time, and a later one with a
right clock counts all of it. By size: the newest records up to the limit (bytes of data and names)
stay, and the last record always.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate

from tests.simulation.history import APPENDS, EVER, Evidence, Moment, Operation, retained_bytes


class Policies:
    """The policies that callers have set. Each may take effect from the beginning of its call."""

    def __init__(self, evidence: Evidence) -> None:
        self._set: dict[str, list[Operation]] = defaultdict(list)
        for operation in evidence.operations:
            if operation.kind == "set_retention" and operation.outcome != "failed":
                self._set[operation.log].append(operation)
        self.any = bool(self._set)
        if not self.any:
            return
        appends = [o for o in evidence.operations if o.kind in APPENDS]
        self._ordered_at = evidence.ordered_at
        self._sizes = {log: _Sizes(log, evidence, appends) for log in self._set}

    def floor(self, log: str, before: Moment) -> int:
        """Return the highest floor that the policies of a log may have made."""
        floor = 0
        for policy in self._set.get(log, ()):
            if policy.invoked < before.step:
                if policy.age_s is not None:
                    floor = max(floor, self._old(before.time_s - policy.age_s))
                if policy.size_bytes is not None:
                    floor = max(floor, self._sizes[log].beyond(policy.size_bytes, before))
        return floor

    def _old(self, time_s: float) -> int:
        """Return the seqnum of the first record that was ordered at `time_s` or later."""
        place = bisect_left(self._ordered_at, time_s)
        return place if place < len(self._ordered_at) else EVER


class _Sizes:
    """The bytes of one log."""

    def __init__(self, log: str, evidence: Evidence, appends: list[Operation]) -> None:
        mine = [(seqnum, record) for seqnum, record in evidence.records.items() if record[0] == log]
        mine.sort()
        self._seqnums = [seqnum for seqnum, _ in mine]
        sizes = [retained_bytes(log, data, tags) for _, (_, data, tags) in mine]
        self._before = [0, *accumulate(sizes)]
        places = {record[1]: place for place, (_, record) in enumerate(mine)}
        here = [(o, data, tags) for o in appends if o.log == log for data, tags in o.entries]
        began = sorted((o.invoked, places[data] + 1) for o, data, _ in here if data in places)
        self._steps = [step for step, _ in began]
        self._ends = list(accumulate((end for _, end in began), max))
        self._unseen_bytes = sum(
            retained_bytes(log, data, tags)
            for o, data, tags in here
            if o.outcome == "unknown" and data not in places
        )
        """The bytes of appends that may have been appended and trimmed before any read."""

    def beyond(self, size_bytes: int, before: Moment) -> int:
        """Return the highest floor that leaves the newest `size_bytes` of the log."""
        place = bisect_left(self._steps, before.step)
        end = self._ends[place - 1] if place else 0
        total = self._before[end] + self._unseen_bytes
        if not end or total <= size_bytes:
            return 0
        kept = bisect_left(self._before, total - size_bytes, 0, end)
        if kept == end and self._unseen_bytes:
            return EVER  # the last record may be one that was appended and trimmed unread
        return self._seqnums[min(kept, end - 1)]
