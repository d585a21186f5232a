"""The checkers' index of the evidence: records by log and tag, trims, and what callers knew when.

Everything is sorted once, and each question is a bisection. It shares no code with the platform.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, TypeAlias

from tests.simulation.history import APPENDS, EVER, Evidence, Moment, Operation
from tests.simulation.policies import Policies

_PROVES_NOTHING: Final = frozenset({"find_time", "trim", "set_aux", "set_retention", "retention"})
Record: TypeAlias = tuple[str, bytes, tuple[str, ...]]
"""Log, data, tags."""


class Rising:
    """The largest of the values before a step.

    Args:
        values: pairs of a step and a value that is there from then on.
    """

    __slots__ = ("_highest", "_steps")

    def __init__(self, values: Iterable[tuple[float, int]] = ()) -> None:
        ordered = sorted(values)
        self._steps = [step for step, _ in ordered]
        self._highest = list(accumulate((value for _, value in ordered), max))

    def before(self, step: float) -> int:
        """Return the largest value of the steps before this one; 0 without one."""
        place = bisect_left(self._steps, step)
        return self._highest[place - 1] if place else 0


_NEVER: Final = Rising()


class Floors:
    """What was trimmed, according to the calls of callers and their answers."""

    def __init__(self, evidence: Evidence) -> None:
        may: dict[tuple[str, str | None], list[tuple[float, int]]] = defaultdict(list)
        must: dict[tuple[str, str | None, int | None], list[tuple[float, int]]] = defaultdict(list)
        for trim in evidence.operations:
            if trim.kind != "trim" or trim.outcome == "failed":
                continue
            may[trim.log, trim.tag].append((trim.invoked, trim.bound))
            if trim.outcome == "ok" and trim.returned is not None:
                for who in (trim.session, None):
                    must[trim.log, trim.tag, who].append((trim.returned, trim.bound))
        self._policies = Policies(evidence)
        self.any = bool(may) or self._policies.any
        self._end = evidence.tails[-1]
        self._may = {key: Rising(floors) for key, floors in may.items()}
        self._must = {key: Rising(floors) for key, floors in must.items()}

    def highest(self) -> int:
        """Return the highest floor of any log or tag: the platform trims records of its own too."""
        if self._policies.any:
            return self._end
        return max((floors.before(EVER) for floors in self._may.values()), default=0)

    def may_be(self, log: str, tag: str | None, before: Moment) -> int:
        """Return the highest floor that a read by `tag` may meet before a moment."""
        tags = (tag,) if tag is None else (None, tag)
        trimmed = max(self._may.get((log, of), _NEVER).before(before.step) for of in tags)
        return max(trimmed, self._policies.floor(log, before)) if self._policies.any else trimmed

    def must_be(self, reader: Operation) -> int:
        """Return the floor that a read must reflect: its session's; if fresh, any session's."""
        who = None if reader.fresh else reader.session
        tags = {None, reader.tag if reader.kind != "read" else None}
        return max(
            self._must.get((reader.log, tag, who), _NEVER).before(reader.invoked) for tag in tags
        )

    def may_be_dead(self, seqnum: int, record: Record, before: Moment) -> bool:
        """Return whether a record may be gone: below its log's floor, or below all of its tags'."""
        if not self.any:
            return False
        log, _, tags = record
        return seqnum < self.may_be(log, None, before) or (
            bool(tags) and all(seqnum < self.may_be(log, tag, before) for tag in tags)
        )


class Oracle:
    """The records of the logs by log and tag, and what callers knew of them.

    Attributes:
        reported: one more than the highest seqnum that any session has seen.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.records = evidence.records
        self.floors = Floors(evidence)
        self.tails = evidence.tails
        self._seqnums: dict[tuple[str, str | None], list[int]] = defaultdict(list)
        for seqnum in sorted(evidence.records):
            log, _, tags = evidence.records[seqnum]
            for tag in (None, *tags):
                self._seqnums[log, tag].append(seqnum)
        reported: list[tuple[float, int]] = []
        seen: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for operation in evidence.operations:
            if (top := top_of(operation)) is not None:
                known = (operation.returned or EVER, top + 1)
                reported.append(known)
                if operation.kind != "tail":  # a tail shows the end of the log, but no record
                    seen[operation.session].append(known)
        self.reported = Rising(reported)
        self._seen = {session: Rising(known) for session, known in seen.items()}

    def horizon(self, operation: Operation) -> int:
        """Return the seqnum below which a read must reflect all records.

        Below it is everything that the session had seen when the read began; for a fresh read,
        everything that any session had seen.
        """
        seen = self._seen.get(operation.session, _NEVER).before(operation.invoked)
        horizon = max(seen, self.tail_at(operation.position_before))
        return max(horizon, self.reported.before(operation.invoked)) if operation.fresh else horizon

    def matching(self, log: str, tag: str | None) -> list[int]:
        """Return the seqnums of a log's records with `tag`, ascending."""
        return self._seqnums.get((log, tag), [])

    def first(self, operation: Operation, below: int) -> int | None:
        """Return the first match in [bound, `below`) that a read must show."""
        seqnums = self.matching(operation.log, operation.tag)
        for place in range(bisect_left(seqnums, operation.bound), len(seqnums)):
            if seqnums[place] >= below:
                return None
            if not self.excused(seqnums[place], operation):
                return seqnums[place]
        return None

    def last(self, operation: Operation, bound: int, above: int) -> int | None:
        """Return the last match above `above` and up to `bound` that a read must show."""
        seqnums = self.matching(operation.log, operation.tag)
        for place in range(bisect_right(seqnums, bound) - 1, -1, -1):
            if seqnums[place] <= above:
                return None
            if not self.excused(seqnums[place], operation):
                return seqnums[place]
        return None

    def between(self, operation: Operation, last: int) -> list[int]:
        """Return the matches from the bound up to `last`."""
        seqnums = self.matching(operation.log, operation.tag)
        return seqnums[bisect_left(seqnums, operation.bound) : bisect_right(seqnums, last)]

    def excused(self, seqnum: int, operation: Operation) -> bool:
        """Return whether a read may omit a match, because it may be trimmed by then."""
        floors, before = self.floors, operation.end
        return floors.any and (
            seqnum < floors.may_be(operation.log, operation.tag, before)
            or floors.may_be_dead(seqnum, self.records[seqnum], before)
        )

    def tail_at(self, position: int) -> int:
        """Return the tail of the log after `position` metalog entries."""
        return self.tails[min(position, len(self.tails) - 1)]


def top_of(operation: Operation) -> int | None:
    """Return the highest seqnum that the operation proves to exist."""
    value, kind = operation.value, operation.kind
    if operation.outcome != "ok" or not value or kind in _PROVES_NOTHING:
        return None
    if kind in APPENDS:
        return int(value[-1])
    return int(value) - 1 if kind == "tail" else int(value[-1].seqnum)
