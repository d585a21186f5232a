"""Segments of a log, against a plain list of records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import DataLossError
from indilog.base.ids import MAX_SEQNUM, tag_columns
from indilog.base.log import After, Record
from indilog_compute.log_kinds.segments import (
    FIRST,
    LogSegment,
    bridged,
    down_from,
    from_bound,
)


def segment(number: int, local_first: int = 0, local_log: str = "events") -> LogSegment:
    return LogSegment(
        number=number,
        kind="shared",
        place="",
        folder="",
        local_log=local_log,
        start=0,
        local_first=local_first,
    )


@dataclass
class Space:
    """A logspace: its records by local seqnum, None for those of other logs."""

    records: list[Record | None] = field(default_factory=list)

    def append(self, log: str, data: bytes, ordered_at: float) -> Record:
        names = tag_columns(log, ("t",)).names
        found = Record(len(self.records), names, data, 0.0, ordered_at)
        self.records.append(found)
        return found

    def next(self, log: str, local: int) -> Record | None:
        return next((r for r in self.records[local:] if _is_of(r, log)), None)

    def prev(self, log: str, local: int) -> Record | None:
        return next((r for r in reversed(self.records[: local + 1]) if _is_of(r, log)), None)


def _is_of(record: Record | None, log: str) -> bool:
    return record is not None and record.names.split(b"\x1f")[0] == log.encode()


@dataclass
class Model:
    """A log of segments, and what callers got: (seqnum, data, ordered_at) in order."""

    segments: list[LogSegment] = field(default_factory=lambda: [segment(FIRST)])
    spaces: dict[int, Space] = field(default_factory=lambda: {FIRST: Space()})
    told: list[tuple[int, bytes, float]] = field(default_factory=list)
    tail: int = 0

    def append(self, clock: float) -> None:
        last = self.segments[-1]
        data = b"%d" % len(self.told)
        found = self.spaces[last.number].append(last.local_log, data, clock)
        self.told.append((last.seqnum(found.seqnum), data, last.ordered_at(clock)))
        self.tail = self.told[-1][0] + 1

    def append_other(self) -> None:
        last = self.segments[-1]
        self.spaces[last.number].records.append(None)
        self.tail = last.seqnum(len(self.spaces[last.number].records))

    def switch(self, *, late: int, before: int, clock: float) -> None:
        """Continue in a logspace with `before` records; `late` appends reach the old one."""
        old = self.segments[-1]
        space = self.spaces[old.number]
        end = len(space.records)
        number = len(self.segments)
        to = segment(number, before, f"$logs/{number}")
        self.segments[-1:] = bridged(old, local_end=end, time=old.ordered_at(clock), to=to)
        for _ in range(late):
            space.append(old.local_log, b"late", clock)
        self.spaces[number] = Space([None] * before)

    def next(self, bound: int) -> Record | None:
        for each in from_bound(self.segments, bound):
            found = self.spaces[each.number].next(each.local_log, each.local(bound))
            if found is not None and each.has(found.seqnum):
                return each.record(found, "events")
        return None

    def prev(self, bound: int) -> Record | None:
        for each in down_from(self.segments, bound):
            local = each.local(bound)
            if each.local_end is not None:
                local = min(local, each.local_end - 1)
            found = self.spaces[each.number].prev(each.local_log, local)
            if found is not None:
                return each.record(found, "events")
        return None


Step: TypeAlias = tuple[str, int, int, float]
steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "other", "switch"]),
        st.integers(0, 2),
        st.integers(0, 5),
        st.integers(-3, 3).map(float),
    ),
    max_size=20,
)


def run(script: list[Step]) -> Model:
    model, clock = Model(), 100.0
    for what, late, before, drift in script:
        if what == "append":
            clock += abs(drift)
            model.append(clock)
        elif what == "other":
            model.append_other()
        else:
            model.switch(late=late, before=before, clock=clock)
            clock += drift  # that of the new logspace may be behind
    return model


@given(steps)
def test_reads_at_every_bound_find_what_was_acknowledged(script: list[Step]) -> None:
    model = run(script)
    for bound in [*range(model.tail + 2), MAX_SEQNUM]:
        after = [line for line in model.told if line[0] >= bound]
        before = [line for line in model.told if line[0] <= bound]
        for found, lines in ((model.next(bound), after[:1]), (model.prev(bound), before[-1:])):
            assert [_line(found)] == lines if found is not None else not lines


def _line(record: Record) -> tuple[int, bytes, float]:
    assert record.tags == ("t",)
    assert record.names == tag_columns("events", ("t",)).names
    return record.seqnum, record.data, record.ordered_at


@given(steps)
def test_seqnums_and_times_only_grow_along_the_log(script: list[Step]) -> None:
    model = run(script)
    for one, two in zip(model.told, model.told[1:], strict=False):
        assert one[0] < two[0]
        assert one[2] <= two[2]


@given(steps)
def test_segments_cover_all_seqnums_once(script: list[Step]) -> None:
    model = run(script)
    for one, two in zip(model.segments, model.segments[1:], strict=False):
        assert one.end == two.start
        assert one.start <= one.end
    assert model.segments[0].start == 0
    for seqnum in range(model.tail):
        (holder,) = [each for each in model.segments if each.start <= seqnum < each.end]
        assert holder.seqnum(holder.local(seqnum)) == seqnum


def test_a_condition_is_about_the_records_of_the_segment() -> None:
    first = segment(FIRST)
    closed, opened = bridged(first, local_end=10, time=5.0, to=segment(1, 100))
    assert opened.after(After("t", None)) == After("t", None)
    assert opened.after(After("t", 9)) == After("t", None)
    assert opened.after(After("t", 12)) == After("t", 102)
    assert closed.after(After("t", 4)) == After("t", 4)


def test_a_loss_is_raised_with_seqnums_of_the_log() -> None:
    _, second = bridged(segment(FIRST), local_end=10, time=5.0, to=segment(1, 100))
    second, third = bridged(second, local_end=120, time=6.0, to=segment(2, 7))
    told = second.loss(DataLossError("lost", seqnum=118, next_seqnum=125, tags=["t"]))
    assert (told.seqnum, told.next_seqnum, told.tags) == (28, 30, ["t"])
    assert third.start == 30


def test_a_log_that_was_never_switched_costs_nothing() -> None:
    record = Record(3, b"events", b"x", 0.0, 1.0)
    assert segment(FIRST).record(record, "events") is record
