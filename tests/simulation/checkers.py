"""Checkers of a history: they know the guarantees of the log and none of its code (A2, A9, A20).

Each checker takes the evidence and yields violations. They share an `Oracle`, which answers each
question by bisection, so 100,000 operations take well under a second.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from tests.simulation.history import (
    APPENDS,
    AT_LAST,
    CONDITIONAL,
    EVER,
    Evidence,
    Operation,
    Seen,
    Violation,
)
from tests.simulation.oracle import Floors, Oracle, Rising

_WAIT_SLACK_S = 1e-4
_STAMP_SLACK_S = 1e-5


def appends_are_kept(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """Acknowledged appends are at their seqnums, failed ones absent, unknown ones all or none."""
    places: dict[bytes, int] = {}
    for seqnum, (log, data, _tags) in sorted(evidence.records.items()):
        if log.startswith("$"):
            continue  # the platform's own
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
            excused = seqnum in evidence.lost or floors.may_be_dead(seqnum, record, AT_LAST)
            if there != record and not excused:
                yield Violation("durable", f"{there} is where {operation.describe()}")
    elif (operation.outcome == "failed" or operation.too_large) and any(
        place is not None for place in found
    ):
        yield Violation("failed", f"it is there, though it failed: {operation.describe()}")
    present = [place for place in found if place is not None]
    if (
        present
        and not (floors.any or evidence.lost)
        and present != list(range(present[0], present[0] + len(found)))
    ):
        yield Violation("atomic", f"a batch in pieces at {found}: {operation.describe()}")


def conditions_hold(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """No record lies between a conditional append and the record that its condition names.

    Only conditional appends use the tags of conditions here. A refused append names a record that
    contradicts its condition.
    """
    places = {data: seqnum for seqnum, (_, data, _) in evidence.records.items()}
    for operation in evidence.operations:
        if operation.kind != CONDITIONAL:
            continue
        known = -1 if operation.after is None else operation.after
        tagged = oracle.matching(operation.log, operation.tag)
        found = [s for data, _ in operation.entries if (s := places.get(data)) is not None]
        if found:
            between = tagged[bisect_right(tagged, known) : bisect_left(tagged, min(found))]
            if between:
                what = f"{between} lie after {operation.after}: {operation.describe()}"
                yield Violation("condition", what)
        if operation.note.startswith("ConditionFailedError"):
            last = operation.value
            excused = oracle.floors.any or last in evidence.lost
            if last <= known or not (last in tagged or excused):
                yield Violation("condition", f"{last} is no reason: {operation.describe()}")


def seqnums_are_dense(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """Seqnums are 0, 1, 2 ... without a hole, and no two acknowledgements have the same one."""
    floors, records = oracle.floors, evidence.records
    missing = [
        seqnum
        for seqnum in sorted(set(range(evidence.tails[-1])) - evidence.shown - evidence.lost)
        if not (
            floors.may_be_dead(seqnum, records[seqnum], AT_LAST)
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
                    both = f"{given[seqnum].describe()} and {operation.describe()}"
                    yield Violation("unique", f"{seqnum} was given twice: {both}")
                given[seqnum] = operation


def real_time_is_respected(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """An append that returned before another began has the smaller seqnum; later tails cover it."""
    for operation in evidence.operations:
        if operation.outcome != "ok" or operation.kind not in _ORDERED:
            continue
        reported = oracle.reported.before(operation.invoked)
        is_tail = operation.kind == "tail"
        if (operation.value if is_tail else operation.value[0]) < reported:
            check = "tail" if is_tail else "order"
            yield Violation(check, f"{reported - 1} was known before {operation.describe()}")


_ORDERED = APPENDS | {"tail"}


def times_are_found(evidence: Evidence, _: Oracle) -> Iterator[Violation]:
    """`find_time` returns a seqnum that divides the records of a log at a time.

    Records that the session appended before the time lie below the answer. Records that any session
    appended after the time do not. No record below the answer was ordered at the time or later. If
    wall clocks were wrong, the log's time may lag the simulated time: then stamps decide.
    """
    stamps = sorted(evidence.stamps.items())
    appends = [o for o in evidence.operations if o.kind in APPENDS and o.outcome == "ok"]
    after = sorted((o.invoked_s, o.value[0]) for o in appends)
    lowest = list(accumulate((seqnum for _, seqnum in reversed(after)), min))[::-1]
    by_step, by_time = _own(appends, "returned"), _own(appends, "returned_s")
    for operation in evidence.operations:
        if operation.kind != "find_time" or operation.outcome != "ok":
            continue
        # Steps and times grow together, so the earlier of both says which appends had returned.
        session = operation.session
        asked, then = by_step[session].before(operation.invoked), by_time[session]
        if (older := min(asked, then.before(operation.time_s))) > operation.value:
            yield Violation("find_time", f"{older - 1} was before: {operation.describe()}")
        place = bisect_right(after, (operation.time_s, EVER))
        if place < len(after) and lowest[place] < operation.value:
            unknown = operation.time_s if not stamps else -math.inf  # it was trimmed
            if evidence.stamps.get(lowest[place], unknown) >= operation.time_s:
                yield Violation("find_time", f"{lowest[place]} came later: {operation.describe()}")
        below = bisect_left(stamps, (operation.value, 0.0))
        if below and stamps[below - 1][1] >= operation.time_s:
            yield Violation("find_time", f"{stamps[below - 1]} is below: {operation.describe()}")


def the_log_keeps_time(evidence: Evidence, _: Oracle) -> Iterator[Violation]:
    """The stamps of records never decrease along the log, and never lie after the append's return.

    This holds for every wall clock that a process has at its start.
    """
    for (seqnum, stamp), (after, later) in pairwise(sorted(evidence.stamps.items())):
        if later < stamp:
            yield Violation("time", f"{after} was ordered at {later}, {seqnum} at {stamp}")
    for append in evidence.operations:
        if append.kind in APPENDS and append.outcome == "ok":
            stamp = evidence.stamps.get(append.value[0], 0.0)
            if stamp > append.returned_s + _STAMP_SLACK_S:
                yield Violation("time", f"ordered at {stamp}, in the future: {append.describe()}")


def _own(appends: list[Operation], when: str) -> defaultdict[int, Rising]:
    """Return for each session one more than the highest seqnum that it had appended."""
    own: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for operation in appends:
        own[operation.session].append((getattr(operation, when), operation.value[-1] + 1))
    return defaultdict(Rising, {session: Rising(done) for session, done in own.items()})


def replicas_show_everything(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """After healing, a replica shows every record of its shards that is not trimmed."""
    for replica, seqnum in evidence.unknown:
        record = evidence.records.get(seqnum)
        dead = record is not None and oracle.floors.may_be_dead(seqnum, record, AT_LAST)
        if seqnum in evidence.lost:
            continue
        if not dead and (record is not None or seqnum >= oracle.floors.highest()):
            yield Violation("replicas", f"{replica} does not show {seqnum}: {record}")


def reads_skip_nothing(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """A read returns what a scan of the log below the session's horizon would return.

    It skips no match. It reflects everything that its session has seen (A20). A fresh read reflects
    everything that any session has seen.
    """
    for operation in evidence.operations:
        if operation.outcome == "ok" and operation.kind in _EXPECTED:
            yield from _read_is_right(operation, oracle.horizon(operation), oracle)


def _read_is_right(operation: Operation, horizon: int, oracle: Oracle) -> Iterator[Violation]:
    for record in operation.value:
        there = oracle.records.get(record.seqnum)
        if there != (operation.log, record.data, record.tags):
            yield Violation("wrong record", f"{there} is what is there: {operation.describe()}")
            return
    if (expected := _EXPECTED[operation.kind](operation, horizon, oracle)) is not None:
        yield Violation(operation.kind, f"{expected} (horizon {horizon}): {operation.describe()}")


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
    between = oracle.between(operation, got[-1])
    if got == between:
        return None
    shown = set(got)
    due = [s for s in between if s in shown or not oracle.excused(s, operation)]
    return f"{due} are the first" if got != due else None


def _expected_subscription(operation: Operation, horizon: int, oracle: Oracle) -> str | None:
    """A subscription skips no record. `scans_agree` checks that it shows all of them."""
    return _expected_range(operation, horizon, oracle) if operation.value else None


def _expected_at(operation: Operation, horizon: int, oracle: Oracle) -> str | None:
    there = oracle.records.get(operation.bound)
    if operation.value:
        return None if operation.value[0].seqnum == operation.bound else "it is another one"
    if there is None or there[0] != operation.log:
        return None
    gone = oracle.floors.may_be_dead(operation.bound, there, operation.end)
    if not gone and operation.bound < _end_of_view(operation, horizon, oracle):
        return f"{there} is there"
    return None


def trims_hold(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """A session never sees a record that it trimmed. No read reports other records as trimmed."""
    floors = oracle.floors
    for operation in evidence.operations:
        if operation.kind not in _EXPECTED:
            continue
        if operation.outcome == "trimmed" and not _may_be_trimmed(operation, oracle):
            yield Violation("trim", f"no session has trimmed it: {operation.describe()}")
        if operation.outcome == "ok" and floors.any:
            if operation.kind == "subscribe" and not operation.value:
                continue  # the wait ended before an answer
            floor = floors.must_be(operation)
            low = operation.value[0].seqnum if operation.value else -1
            below = low < floor if operation.kind == "read_prev" else operation.bound < floor
            if floor and below:
                yield Violation("trim", f"the floor is {floor}: {operation.describe()}")


def _may_be_trimmed(operation: Operation, oracle: Oracle) -> bool:
    floors, before = oracle.floors, operation.end
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
    """Return the seqnum below which an answer must reflect all records.

    If the calls of a session do not overlap, its position after the answer gives that seqnum.
    """
    if operation.overlapping:
        return horizon
    return max(horizon, oracle.tail_at(operation.position_after))


_EXPECTED: dict[str, Callable[[Operation, int, Oracle], str | None]] = {
    "read_next": _expected_next,
    "wait": _expected_next,
    "read_prev": _expected_prev,
    "read_range": _expected_range,
    "subscribe": _expected_subscription,
    "read": _expected_at,
}


def losses_are_true(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """A read reports a loss only where all replicas lost something.

    A scan reports all records that it does not show.
    """
    for operation in evidence.operations:
        if operation.outcome == "lost":
            first, end = operation.value or (-1, 0)
            if not {first, end - 1} <= evidence.lost:
                yield Violation("lost", f"no disk lost it: {operation.describe()}")
    for (engine, log), scan in evidence.scans.items():
        visible = {record.seqnum for record in scan}
        reported = {
            s for range_ in evidence.reported_losses.get((engine, log), ()) for s in range(*range_)
        }
        for seqnum in evidence.lost - visible - reported:
            record = evidence.records.get(seqnum)
            if record is None or record[0] != log:
                continue
            if not oracle.floors.may_be_dead(seqnum, record, AT_LAST):
                yield Violation("gap", f"{engine} says nothing of {seqnum}: {record}")


def sessions_never_go_back(evidence: Evidence, _: Oracle) -> Iterator[Violation]:
    """The position of a session never decreases. A read without a match waits its whole time."""
    for operation in evidence.operations:
        if operation.position_after < operation.position_before:
            yield Violation("session", f"the session went back: {operation.describe()}")
        is_done = operation.outcome == "ok"
        if operation.kind in APPENDS and is_done and not _moved(operation):
            yield Violation("session", f"it knows nothing of its append: {operation.describe()}")
        if operation.kind == "wait" and is_done and not operation.value:
            waited_s = operation.returned_s - operation.invoked_s
            if waited_s < operation.wait_s - _WAIT_SLACK_S:
                yield Violation("wait", f"only {waited_s:.4f} s: {operation.describe()}")


def _moved(operation: Operation) -> bool:
    """Return whether an operation advanced the position of its session.

    An append must: the entry that orders it comes after all that its session has seen.
    """
    return operation.position_after > operation.position_before


def limits_hold(evidence: Evidence, _: Oracle) -> Iterator[Violation]:
    """Appends of the largest size are accepted, larger ones are refused (A33).

    Over a link the process may end before its refusal: `appends_are_kept` checks the records then.
    """
    for operation in evidence.operations:
        if operation.too_large and operation.returned is None:
            continue
        if operation.too_large != operation.note.startswith("TooLargeError"):
            yield Violation("limit", f"beyond the limit: {operation.describe()}")


def policies_are_reported(evidence: Evidence, _: Oracle) -> Iterator[Violation]:
    """A policy that a session reads was set, and the session has seen no newer one."""
    sets = [o for o in evidence.operations if o.kind == "set_retention" and o.outcome != "failed"]
    for operation in evidence.operations:
        if operation.kind != "retention" or operation.outcome != "ok":
            continue
        begun = [o for o in sets if o.log == operation.log and o.invoked < operation.end.step]
        own = [o for o in begun if o.session == operation.session and o.outcome == "ok"]
        known = max((o.invoked for o in own if o.end.step < operation.invoked), default=-1)
        possible = {(o.age_s, o.size_bytes) for o in begun if o.end.step > known}
        if known < 0:
            possible.add((None, None))
        if operation.value not in possible:
            yield Violation("retention", f"no session has set it: {operation.describe()}")


def scans_agree(evidence: Evidence, oracle: Oracle) -> Iterator[Violation]:
    """After healing, scans and subscriptions at every engine show what the replicas hold."""
    yield from _all_shown("scan", evidence.scans, evidence, oracle)
    yield from _all_shown("subscribe", evidence.subscribed, evidence, oracle)


def _all_shown(
    check: str,
    scans: Mapping[tuple[str, str], Sequence[Seen]],
    evidence: Evidence,
    oracle: Oracle,
) -> Iterator[Violation]:
    for (engine, log), scan in scans.items():
        visible = {record.seqnum for record in scan}
        expected = [
            Seen(seqnum, evidence.records[seqnum][1], evidence.records[seqnum][2])
            for seqnum in oracle.matching(log, None)
            if seqnum in visible
            or not (
                seqnum in evidence.lost
                or oracle.floors.may_be_dead(seqnum, evidence.records[seqnum], AT_LAST)
            )
        ]
        if list(scan) != expected:
            differing = [(a, b) for a, b in zip(scan, expected, strict=False) if a != b][:3]
            sizes = f"{len(scan)} records, not {len(expected)}"
            yield Violation(check, f"{engine} shows {log} with {sizes}: {differing}")


CHECKERS: tuple[Callable[[Evidence, Oracle], Iterator[Violation]], ...] = (
    appends_are_kept,
    conditions_hold,
    seqnums_are_dense,
    real_time_is_respected,
    times_are_found,
    the_log_keeps_time,
    reads_skip_nothing,
    trims_hold,
    replicas_show_everything,
    losses_are_true,
    sessions_never_go_back,
    limits_hold,
    policies_are_reported,
    scans_agree,
)


def find_violations(evidence: Evidence) -> list[Violation]:
    """Return all violations of the guarantees."""
    oracle = Oracle(evidence)
    return [violation for checker in CHECKERS for violation in checker(evidence, oracle)]
