"""Checks a history of `tests.cells.world` by an own, naive replay of the cells."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from indilog_cells.content import Records, TrimBelow, decode
from indilog_cells.state import BelowFloor, Contradicted, Placed
from tests.cells.world import Done, Known, World


class Line(NamedTuple):
    """A record of the log: its data, the `known` of its condition (None: no condition)."""

    data: bytes
    known: int | None


class Replayed(NamedTuple):
    """What the cells say: the records by seqnum, and the tail after each cell."""

    lines: list[Line]
    tails: list[int]


def replay(world: World) -> Replayed:
    """Apply what was first written into each cell, in order, up to the first unwritten one."""
    lines: list[Line] = []
    tails = [0]
    epoch, floor, position = 0, 0, 0
    generation_first = 0
    starts = set(world.store.generations)
    while position in world.store.first:
        if position in starts:
            generation_first = len(lines)
        content = decode(world.store.first[position])
        position += 1
        claimed = epoch + 1 if content is not None and content.is_claim else epoch
        if content is not None and content.epoch >= claimed:
            epoch = content.epoch
            for item in content.items:
                if isinstance(item, TrimBelow):
                    floor = max(floor, min(item.until, len(lines)))
                elif isinstance(item, Records):
                    known = None if item.after is None else item.after.known
                    if item.after is not None and (
                        item.after.checked < generation_first or item.after.known < len(lines) - 1
                    ):
                        continue  # all records have the tag: the last one must be known
                    lines += [Line(data, known) for data in item.data]
        tails.append(len(lines))
    return Replayed(lines, tails)


def check(world: World) -> list[str]:
    """Return what is wrong with a finished run."""
    found = [f"cell {position} was overwritten" for position in world.store.overwritten]
    log = replay(world)
    places = {line.data: seqnum for seqnum, line in enumerate(log.lines)}
    twice = [data for data, count in Counter(line.data for line in log.lines).items() if count > 1]
    found += [f"{data!r} is in the log twice" for data in twice]
    for done in world.history:
        found += _outcome_faults(done, places, log)
    found += _order_faults(world.history)
    return found + _late_faults(log)


def _outcome_faults(done: Done, places: dict[bytes, int], log: Replayed) -> list[str]:
    match done.outcome:
        case Placed(first):
            if places.get(done.data) != first:
                return [f"{done.data!r} was acknowledged at {first}, is at {places.get(done.data)}"]
            if done.kind == "append if" and done.known != first - 1:
                return [f"{done.data!r} follows {done.known}, and is at {first}"]
        case Contradicted(last):
            if done.data in places or not done.known < last < len(log.lines):
                return [f"{done.data!r} was refused because of {last}"]
        case BelowFloor():
            if done.data in places:
                return [f"{done.data!r} was refused, and is in the log"]
        case Known(position, tail):
            if log.tails[position : position + 1] != [tail]:
                return [f"a read at {position} found the tail {tail}: {log.tails[position:]}"]
        case _:
            pass
    return []


def _late_faults(log: Replayed) -> list[str]:
    """Check that nothing of a crashed process appears after its successor's first record."""
    newest: dict[bytes, int] = {}
    faults: list[str] = []
    for line in log.lines:
        process, incarnation, _ = line.data.split(b"/")
        if int(incarnation) < newest.get(process, 0):
            faults.append(f"{line.data!r} is after a record of a later incarnation")
        newest[process] = max(newest.get(process, 0), int(incarnation))
    return faults


def _order_faults(history: list[Done]) -> list[str]:
    """Check that appends and reads see what was acknowledged before they began."""
    faults: list[str] = []
    ends = sorted(
        (done.ended, done.outcome.first)
        for done in history
        if done.ended is not None and isinstance(done.outcome, Placed)
    )
    reads = sorted(
        (done.ended, done.outcome.tail)
        for done in history
        if done.ended is not None and isinstance(done.outcome, Known)
    )
    for done in history:
        last = max((seqnum for ended, seqnum in ends if ended < done.begun), default=-1)
        seen = max((tail for ended, tail in reads if ended < done.begun), default=0)
        if isinstance(done.outcome, Placed) and done.outcome.first < max(last + 1, seen):
            faults.append(f"{done.data!r} is at {done.outcome.first}, before {last} or {seen}")
        if isinstance(done.outcome, Known) and done.outcome.tail < max(last + 1, seen):
            faults.append(f"a read saw the tail {done.outcome.tail}, after {last} and {seen}")
    return faults
