"""Trim floors of many tags, and the records that are dead by them, against plain dictionaries."""

from __future__ import annotations

from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import TagHash
from indilog.kernel.floors import Floors, Trimmed
from indilog.kernel.metalog import NO_FLOORS, Floor

TAGS = st.integers(1, 40)


@given(st.lists(st.tuples(TAGS, st.integers(0, 100)), max_size=60), st.integers(0, 60))
def test_the_highest_floor_of_a_tag_applies(
    raised: list[tuple[int, int]], asked_after: int
) -> None:
    floors, model = Floors(), dict[int, int]()
    for place, (tag, until) in enumerate(raised):
        assert floors.raise_to(tag, until) == (until > model.get(tag, 0))
        model[tag] = max(until, model.get(tag, 0))
        if place == asked_after:
            list(floors.above(0, 1))  # moves the recent floors into the arrays
        assert floors.of(tag) == model[tag]
    tags = array("Q", range(42))
    each = floors.of_each(np.frombuffer(tags, np.uint64)).tolist()
    assert each == [model.get(tag, 0) for tag in range(42)]
    assert floors.highest == max(model.values(), default=0)
    wanted = sorted((t, u, 0) for t, u in model.items() if u)
    assert list(floors.above(0, 100)) == wanted
    assert list(floors.above(10, 3)) == [floor for floor in wanted if floor[0] > 10][:3]


LOGS = st.integers(1, 3)
RECORDS = st.lists(st.tuples(LOGS, st.lists(st.integers(10, 14), max_size=4)), max_size=12)
FLOORS = st.lists(
    st.one_of(
        st.builds(Floor, LOGS, st.integers(0, 30), st.just(True), st.just(0)),
        st.builds(Floor, st.integers(10, 14), st.integers(0, 30), st.just(False), st.just(0)),
    ),
    max_size=10,
)


@given(RECORDS, FLOORS, st.integers(0, 20), st.sets(st.integers(0, 11)))
def test_a_record_is_dead_below_its_logs_floor_or_all_its_tag_floors(
    records: list[tuple[int, list[int]]],
    floors: list[Floor],
    first: int,
    lost_tags: set[int],
) -> None:
    trimmed = Trimmed()
    trimmed.apply(floors)
    of_logs = {f.tag: max(g.until for g in floors if g[::2] == f[::2]) for f in floors if f.of_log}
    of_tags = {
        f.tag: max(g.until for g in floors if g[::2] == f[::2]) for f in floors if not f.of_log
    }
    counts, column, expected = [], array("Q"), []
    for place, (log, tags) in enumerate(records):
        if place in lost_tags:
            counts.append(0)
            expected.append(True)
            continue
        counts.append(1 + len(tags))
        column.extend([log, *tags])
        seqnum = first + place
        by_tags = bool(tags) and all(seqnum < of_tags.get(tag, 0) for tag in tags)
        expected.append(seqnum < of_logs.get(log, 0) or by_tags)
    assert trimmed.dead(first, bytes(counts), column.tobytes()).tolist() == expected


@given(FLOORS, st.integers(1, 4))
def test_pages_contain_every_floor_once(floors: list[Floor], size: int) -> None:
    trimmed = Trimmed()
    trimmed.apply(floors)
    received: list[Floor] = []
    last, after = False, NO_FLOORS
    while not last:
        page, last = trimmed.page(after, size)
        assert len(page) <= size
        received += page
        after = Trimmed.cursor_after(page)
    other = Trimmed()
    other.apply(received)
    assert len(received) == len({(f.tag, f.of_log) for f in received})
    for floor in floors:
        mine = (trimmed.logs if floor.of_log else trimmed.tags).of(floor.tag)
        assert (other.logs if floor.of_log else other.tags).of(floor.tag) == mine


def log_of(tag: int) -> int:
    """Return the log of a tag from 10 to 14."""
    return tag % 3 + 1


FLOORS_WITH_LOGS = st.lists(
    st.one_of(
        st.builds(Floor, LOGS, st.integers(0, 30), st.just(True), st.just(0)),
        st.integers(10, 14).flatmap(
            lambda tag: st.builds(
                Floor, st.just(tag), st.integers(0, 30), st.just(False), st.just(log_of(tag))
            )
        ),
    ),
    max_size=30,
)


@given(FLOORS_WITH_LOGS, st.lists(FLOORS_WITH_LOGS, max_size=20), st.integers(1, 4))
def test_pages_cover_all_floors_of_the_first_page_during_trims(
    floors: list[Floor], between: list[list[Floor]], size: int
) -> None:
    """A trim between two pages may drop floors of tags that no page contained yet."""
    trimmed, other = Trimmed(), Trimmed()
    trimmed.apply(floors)
    promised = dict[tuple[int, bool], int]()
    for tag, until, of_log, _ in floors:
        promised[tag, of_log] = max(until, promised.get((tag, of_log), 0))
    last, after = False, NO_FLOORS
    for raised in [*between, *[[]] * 100]:
        page, last = trimmed.page(after, size)
        other.apply(page)
        if last:
            break
        after = Trimmed.cursor_after(page)
        trimmed.apply(raised)
    assert last
    for (tag, of_log), until in promised.items():
        floor = other.logs.of(tag)
        if not of_log:
            floor = max(other.tags.of(tag), other.logs.of(log_of(tag)))
        assert floor >= until


def test_a_tag_floor_dropped_between_two_pages_is_covered_by_a_later_page() -> None:
    trimmed, other = Trimmed(), Trimmed()
    trimmed.apply([Floor(3, 5, of_log=False), Floor(9, 100, of_log=False, log=TagHash(1))])
    page, last = trimmed.page(NO_FLOORS, 1)
    other.apply(page)
    trimmed.apply([Floor(1, 200, of_log=True)])
    assert not trimmed.tags.of(9)
    rest, last = trimmed.page(Trimmed.cursor_after(page), 9)
    other.apply(rest)
    assert (other.logs.of(1), last) == (200, True)


@given(FLOORS_WITH_LOGS, st.integers(0, 30))
def test_a_tag_floor_below_the_logs_floor_is_dropped_and_revives_no_record(
    floors: list[Floor], merged_after: int
) -> None:
    trimmed = Trimmed()
    highest = dict[tuple[int, bool], int]()
    for place, floor in enumerate(floors):
        trimmed.apply([floor])
        if place == merged_after:
            trimmed.tags.columns()
        tag, until, of_log, _ = floor
        highest[tag, of_log] = max(until, highest.get((tag, of_log), 0))
    for tag in range(10, 15):
        own = trimmed.logs.of(log_of(tag))
        assert own == highest.get((log_of(tag), True), 0)
        kept, said = trimmed.tags.of(tag), highest.get((tag, False), 0)
        assert max(kept, own) == max(said, own)
        assert not kept or kept > own
    page, last = trimmed.page(NO_FLOORS, 100)
    assert last
    again = Trimmed()
    again.apply(page)
    assert again.page(NO_FLOORS, 100) == (page, True)
    again.tags.restore(trimmed.tags.columns())
    assert again.page(NO_FLOORS, 100) == (page, True)


def test_a_floor_without_a_known_log_is_kept() -> None:
    trimmed = Trimmed()
    trimmed.apply([Floor(10, 5, of_log=False), Floor(1, 9, of_log=True)])
    assert trimmed.tags.of(10) == 5
