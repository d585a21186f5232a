"""Checkers of a history: they know the promises of the log and nothing of the code that keeps them
(PITFALLS A2, A9, A20).

Each takes the evidence and yields what contradicts it. They share an `Oracle`: the seqnums of every
log and tag, sorted, from the records that are there in the end. 100,000 operations take well under
a second: bisection for each, no scan.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import attrgetter
from typing import Final, TypeAlias

from tests.simulation.history import Evidence, Operation, Seen, Violation

APPENDS = ("append", "append_batch")
_WAIT_SLACK_S = 1e-4

Record: TypeAlias = tuple[str, bytes, tuple[str, ...]]
"""Log, data, tags."""


EVER: Final = 1 << 62
"""After everything."""


class Floors:
    """What was trimmed, as callers know it."""

    def __init__(self, evidence: Evidence) -> None:
        self._trims: dict[tuple[str, str | None], list[Operation]] = {}
        for operation in evidence.operations:
            if operation.kind == "trim" and operation.outcome != "failed":
                self._trims.setdefault((operation.log, operation.tag), []).append(operation)
        self.any = bool(self._trims)

    def highest(self) -> int:
        """Return the highest floor that anything may have."""
        return max((o.bound for trims in self._trims.values() for o in trims), default=0)

    def may_be(self, log: str, tag: str | None, before: int) -> int:
        """Return the highest floor that a read by `tag` may meet before a step."""
        return max(
            (o.bound for o in self._of(log, tag) if o.invoked < before),
            default=0,
        )

    def must_be(self, reader: Operation) -> int:
        """Return the floor that a read must know: its session's own, or anybody's if fresh."""
        return max(
            (
                o.bound
                for o in self._of(reader.log, reader.tag if reader.kind != "read" else None)
                if o.outcome == "ok"
                and o.returned is not None
                and o.returned < reader.invoked
                and (reader.fresh or o.session == reader.session)
            ),
            default=0,
        )

    def may_be_dead(self, seqnum: int, record: Record, before: int) -> bool:
        """Tell whether a record may be gone: below its log's floor, or below all of its tags'."""
        if not self.any:
            return False
        log, _, tags = record
        return seqnum < self.may_be(log, None, before) or (
            bool(tags) and all(seqnum < self.may_be(log, tag, before) for tag in tags)
        )

    def _of(self, log: str, tag: str | None) -> list[Operation]:
        whole = self._trims.get((log, None), [])
        return whole if tag is None else whole + self._trims.get((log, tag), [])


class Oracle:
    """What is in the log, found by log and tag."""

    def __init__(self, evidence: Evidence) -> None:
        self.records = evidence.records
        self.floors = Floors(evidence)
        self.tails = evidence.tails
        self._seqnums: dict[tuple[str, str | None], list[int]] = {}
        for seqnum in sorted(evidence.records):
            log, _, tags = evidence.records[seqnum]
            for tag in (None, *tags):
                self._seqnums.setdefault((log, tag), []).append(seqnum)

    def matching(self, log: str, tag: str | None) -> list[int]:
        """Return the seqnums of a log's records with `tag`, ascending."""
        return self._seqnums.get((log, tag), [])

    def first(self, operation: Operation, below: int) -> int | None:
        """Return the first match from the bound on, below `below`, that a read must show."""
        seqnums = self.matching(operation.log, operation.tag)
        for seqnum in seqnums[bisect_left(seqnums, operation.bound) :]:
            if seqnum >= below:
                return None
            if not self.excused(seqnum, operation):
                return seqnum
        return None

    def last(self, operation: Operation, bound: int, above: int) -> int | None:
        """Return the last match up to `bound`, above `above`, that a read must show."""
        seqnums = self.matching(operation.log, operation.tag)
        for place in range(bisect_right(seqnums, bound) - 1, -1, -1):
            if seqnums[place] <= above:
                return None
            if not self.excused(seqnums[place], operation):
                return seqnums[place]
        return None

    def excused(self, seqnum: int, operation: Operation) -> bool:
        """Tell whether a read need not show a match, because it may be trimmed by then."""
        floors, before = self.floors, operation.returned or EVER
        return floors.any and (
            seqnum < floors.may_be(operation.log, operation.tag, before)
            or floors.may_be_dead(seqnum, self.records[seqnum], before)
        )

    def tail_at(self, position: int) -> int:
        """Return where the log ended after so many metalog entries."""
        return self.tails[min(position, len(self.tails) - 1)]


def appends_are_kept(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """Acknowledged: there, at its seqnum. Failed: not there. Unknown: all of it or nothing."""
    places: dict[bytes, int] = {}
    for seqnum, (_log, data, _tags) in sorted(evidence.records.items()):
        if data in places:
            yield Violation("twice", f"{data!r} is at {places[data]} and at {seqnum}")
        places[data] = seqnum
    known: set[bytes] = set()
    for operation in evidence.operations:
        if operation.kind in APPENDS:
            known.update(data for data, _ in operation.entries)
            yield from _append_kept(operation, evidence, places, oracle.floors)
    for data in places.keys() - known:
        yield Violation("phantom", f"{data!r} at {places[data]} was never appended")


def _append_kept(
    operation: Operation, evidence: Evidence, places: dict[bytes, int], floors: Floors
) -> Iterator[Violation]:
    found = [places.get(data) for data, _ in operation.entries]
    if operation.outcome == "ok":
        for seqnum, (data, tags) in zip(operation.value, operation.entries, strict=True):
            record = (operation.log, data, tags)
            there = evidence.records.get(seqnum) if seqnum in evidence.shown else None
            if there != record and not floors.may_be_dead(seqnum, record, EVER):
                yield Violation("durable", f"{there} is where {operation.told()}")
    elif operation.outcome == "failed" and any(place is not None for place in found):
        yield Violation("failed", f"it is there, though it failed: {operation.told()}")
    present = [place for place in found if place is not None]
    if present and not floors.any and present != list(range(present[0], present[0] + len(found))):
        yield Violation("atomic", f"a batch in pieces at {found}: {operation.told()}")


def seqnums_are_dense(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """Seqnums are 0, 1, 2 ... without a hole, and no acknowledgement gives one twice."""
    floors, records = oracle.floors, evidence.records
    missing = [
        seqnum
        for seqnum in sorted(set(range(evidence.tails[-1])) - evidence.shown)
        if not (
            floors.may_be_dead(seqnum, records[seqnum], EVER)
            if seqnum in records
            else seqnum < floors.highest()
        )
    ]
    if missing:
        yield Violation("dense", f"no record at {missing[:10]}, though ordered")
    given: dict[int, Operation] = {}
    for operation in evidence.operations:
        if operation.kind in APPENDS and operation.outcome == "ok":
            for seqnum in operation.value:
                if seqnum in given:
                    both = f"{given[seqnum].told()} and {operation.told()}"
                    yield Violation("unique", f"{seqnum} was given twice: {both}")
                given[seqnum] = operation


def real_time_is_respected(evidence: Evidence, _: Oracle) -> Iterator[Violation]:
    """What returned before something else began has the smaller seqnum; tails know of it."""
    done = sorted(
        (o for o in evidence.operations if o.outcome == "ok" and _top(o) is not None),
        key=attrgetter("returned"),
    )
    returned, highest, place = [o.returned for o in done], -1, 0
    for operation in sorted(evidence.operations, key=attrgetter("invoked")):
        while place < len(done) and (returned[place] or 0) < operation.invoked:
            highest = max(highest, _top(done[place]) or 0)
            place += 1
        if operation.outcome != "ok":
            continue
        if operation.kind in APPENDS and operation.value[0] <= highest:
            yield Violation("order", f"{highest} was known before {operation.told()}")
        if operation.kind == "tail" and operation.value <= highest:
            yield Violation("tail", f"{highest} was known before {operation.told()}")


def _top(operation: Operation) -> int | None:
    """Return the highest seqnum that the operation proves to exist."""
    match operation.kind:
        case "append" | "append_batch":
            return int(operation.value[-1])
        case "tail":
            return int(operation.value) - 1 if operation.value else None
        case "find_time":
            return None
        case _:
            return operation.value[-1].seqnum if operation.value else None


def times_are_found(evidence: Evidence, _: Oracle) -> Iterator[Violation]:
    """What a session appended before a time lies below what `find_time` tells it; what anybody
    appended after it does not.
    """
    appends = [o for o in evidence.operations if o.kind in APPENDS and o.outcome == "ok"]
    after = sorted((o.invoked_s, o.value[0]) for o in appends)
    lowest = list(accumulate((seqnum for _, seqnum in reversed(after)), min))[::-1]
    for operation in evidence.operations:
        if operation.kind != "find_time" or operation.outcome != "ok":
            continue
        own = [o.value[-1] for o in appends if _before(o, operation)]
        if own and max(own) >= operation.value:
            yield Violation("find_time", f"{max(own)} was before: {operation.told()}")
        place = bisect_right(after, (operation.time_s, 1 << 62))
        if place < len(after) and lowest[place] < operation.value:
            yield Violation("find_time", f"{lowest[place]} came later: {operation.told()}")


def _before(append: Operation, asked: Operation) -> bool:
    """Tell whether the session that asked had appended this before the time asked about."""
    return (
        append.session == asked.session
        and append.returned is not None
        and append.returned < asked.invoked
        and append.returned_s < asked.time_s
    )


def replicas_show_everything(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """In the end a replica shows every record of its shards that is not trimmed."""
    for replica, seqnum in evidence.unknown:
        record = evidence.records.get(seqnum)
        dead = record is not None and oracle.floors.may_be_dead(seqnum, record, EVER)
        if not dead and (record is not None or seqnum >= oracle.floors.highest()):
            yield Violation("replicas", f"{replica} does not show {seqnum}: {record}")


def reads_skip_nothing(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """A read answers what a scan of the log below the session's horizon would: it passes over no
    match, and is not older than what its session has seen (A20), or anybody if it is fresh.
    """
    seen: dict[int, int] = {}
    order: list[tuple[int, bool, Operation]] = []
    for operation in evidence.operations:
        order.append((operation.invoked, True, operation))
        if operation.returned is not None:
            order.append((operation.returned, False, operation))
    horizons: dict[int, int] = {}
    anyone = 0
    for _, begins, operation in sorted(order, key=lambda entry: entry[0]):
        if begins:
            horizon = max(seen.get(operation.session, 0), oracle.tail_at(operation.position_before))
            horizons[operation.number] = max(horizon, anyone if operation.fresh else 0)
        elif operation.outcome == "ok":
            if operation.kind in _EXPECTED:
                yield from _read_is_right(operation, horizons[operation.number], oracle)
            if (top := _top(operation)) is not None:
                anyone = max(anyone, top + 1)
                if operation.kind != "tail":
                    seen[operation.session] = max(seen.get(operation.session, 0), top + 1)


def _read_is_right(operation: Operation, horizon: int, oracle: Oracle) -> Iterator[Violation]:
    for record in operation.value:
        there = oracle.records.get(record.seqnum)
        if there != (operation.log, record.data, record.tags):
            yield Violation("wrong record", f"{there} is what is there: {operation.told()}")
            return
    if (expected := _EXPECTED[operation.kind](operation, horizon, oracle)) is not None:
        yield Violation(operation.kind, f"{expected} (horizon {horizon}): {operation.told()}")


def _expected_next(operation: Operation, horizon: int, oracle: Oracle) -> str | None:
    got = operation.value[0].seqnum if operation.value else None
    if got is not None and got < operation.bound:
        return "it lies below the bound"
    end = got if got is not None else _end_of_view(operation, horizon, oracle)
    first = oracle.first(operation, end)
    return f"{first} is there" if first is not None else None


def _expected_prev(operation: Operation, horizon: int, oracle: Oracle) -> str | None:
    limit = _end_of_view(operation, horizon, oracle) - 1
    got = operation.value[0].seqnum if operation.value else -1
    if got > operation.bound:
        return "it lies beyond the bound"
    last = oracle.last(operation, min(operation.bound, limit), got)
    return f"{last} is the last" if last is not None else None


def _expected_range(operation: Operation, horizon: int, oracle: Oracle) -> str | None:
    got = [record.seqnum for record in operation.value]
    if len(got) > operation.limit:
        return "more than asked for"
    if not got:
        return _expected_next(operation, horizon, oracle)
    seqnums = oracle.matching(operation.log, operation.tag)
    between = seqnums[bisect_left(seqnums, operation.bound) : bisect_right(seqnums, got[-1])]
    shown = set(got)
    due = [s for s in between if s in shown or not oracle.excused(s, operation)]
    return f"{due} are the first" if got != due else None


def _expected_at(operation: Operation, horizon: int, oracle: Oracle) -> str | None:
    there = oracle.records.get(operation.bound)
    if operation.value:
        return None if operation.value[0].seqnum == operation.bound else "it is another one"
    if there is None or there[0] != operation.log:
        return None
    gone = oracle.floors.may_be_dead(operation.bound, there, operation.returned or EVER)
    if not gone and operation.bound < _end_of_view(operation, horizon, oracle):
        return f"{there} is there"
    return None


def trims_hold(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """What a session trimmed it never sees again, and nothing is called trimmed that is not."""
    floors = oracle.floors
    for operation in evidence.operations:
        if operation.kind not in _EXPECTED:
            continue
        if operation.outcome == "trimmed" and not _may_be_trimmed(operation, oracle):
            yield Violation("trim", f"nobody has trimmed it: {operation.told()}")
        if operation.outcome == "ok" and floors.any:
            floor = floors.must_be(operation)
            low = operation.value[0].seqnum if operation.value else -1
            below = low < floor if operation.kind == "read_prev" else operation.bound < floor
            if floor and below:
                yield Violation("trim", f"the floor is {floor}: {operation.told()}")


def _may_be_trimmed(operation: Operation, oracle: Oracle) -> bool:
    floors, before = oracle.floors, operation.returned or EVER
    if operation.kind == "read_prev":
        return floors.may_be(operation.log, operation.tag, before) > 0
    tag = operation.tag if operation.kind != "read" else None
    if floors.may_be(operation.log, tag, before) > operation.bound:
        return True
    if operation.kind != "read":
        return False
    there = oracle.records.get(operation.bound)
    if there is None:
        return operation.bound < floors.highest()
    return floors.may_be_dead(operation.bound, there, before)


def _end_of_view(operation: Operation, horizon: int, oracle: Oracle) -> int:
    """Return below which seqnum the answer must know everything.

    A session whose calls do not overlap says itself how far its last answer reflects the log.
    """
    if operation.overlapping:
        return horizon
    return max(horizon, oracle.tail_at(operation.position_after))


_EXPECTED: dict[str, Callable[[Operation, int, Oracle], str | None]] = {
    "read_next": _expected_next,
    "wait": _expected_next,
    "read_prev": _expected_prev,
    "read_range": _expected_range,
    "read": _expected_at,
}


def sessions_never_go_back(evidence: Evidence, _: Oracle) -> Iterator[Violation]:
    """The position of a session only grows, and a read that waits for nothing waits its time."""
    for operation in evidence.operations:
        if operation.outcome == "lost":
            yield Violation("lost", f"no disk lost it: {operation.told()}")
        if operation.position_after < operation.position_before:
            yield Violation("session", f"the session went back: {operation.told()}")
        if operation.kind == "wait" and operation.outcome == "ok" and not operation.value:
            waited_s = operation.returned_s - operation.invoked_s
            if waited_s < operation.wait_s - _WAIT_SLACK_S:
                yield Violation("wait", f"only {waited_s:.4f} s: {operation.told()}")


def scans_agree(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """Every engine shows in the end what the replicas hold."""
    for (engine, log), scan in evidence.scans.items():
        visible = {record.seqnum for record in scan}
        expected = [
            Seen(seqnum, evidence.records[seqnum][1], evidence.records[seqnum][2])
            for seqnum in oracle.matching(log, None)
            if seqnum in visible
            or not oracle.floors.may_be_dead(seqnum, evidence.records[seqnum], EVER)
        ]
        if scan != expected:
            differing = [(a, b) for a, b in zip(scan, expected, strict=False) if a != b][:3]
            sizes = f"{len(scan)} records, not {len(expected)}"
            yield Violation("scan", f"{engine} shows {log} with {sizes}: {differing}")


CHECKERS: tuple[Callable[[Evidence, Oracle], Iterator[Violation]], ...] = (
    appends_are_kept,
    seqnums_are_dense,
    real_time_is_respected,
    times_are_found,
    reads_skip_nothing,
    trims_hold,
    replicas_show_everything,
    sessions_never_go_back,
    scans_agree,
)


def checked(evidence: Evidence) -> list[Violation]:
    """Return everything that contradicts the promises."""
    oracle = Oracle(evidence)
    return [violation for checker in CHECKERS for violation in checker(evidence, oracle)]
