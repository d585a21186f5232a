"""The index of a log over cells, against a plain dictionary."""

from __future__ import annotations

import random

import pytest

from indilog.base.errors import MalformedFrameError
from indilog_cells.index import (
    CellPlace,
    CellTable,
    Generation,
    GenerationInfo,
    GenerationLimits,
    OpenGeneration,
    closed,
    filter_of,
)


def filled(seed: int, records: int = 200) -> tuple[OpenGeneration, dict[int, list[int]]]:
    choose = random.Random(seed)
    generation, model = OpenGeneration(40, 1000), dict[int, list[int]]()
    generation.cells = 20
    tags = [choose.getrandbits(64) for _ in range(30)]
    for seqnum in range(1000, 1000 + records):
        of = choose.sample(tags, choose.randrange(4))
        generation.add(seqnum, of)
        for tag in of:
            model.setdefault(tag, []).append(seqnum)
        if seqnum % 10 == 0:
            generation.table.add(40 + seqnum // 10 - 100, 0, seqnum, seqnum * 5)
    return generation, model


@pytest.mark.parametrize("seed", range(5))
def test_a_closed_generation_has_what_the_open_one_had(seed: int) -> None:
    generation, model = filled(seed)
    info, stored = closed(generation, end=60, tail=1200)
    loaded = Generation(stored)
    for tag, seqnums in model.items():
        assert list(loaded.seqnums(tag)) == list(generation.seqnums(tag)) == seqnums
        assert info.may_have(tag)
    assert list(loaded.seqnums(17)) == []
    for seqnum in range(1000, 1200):
        assert loaded.table.place(seqnum) == generation.table.place(seqnum)
    assert (info.first, info.tail, info.start, info.end) == (1000, 1200, 40, 60)
    assert (info.first_us, info.last_us) == (5000, 5950)


def test_a_filter_is_wrong_for_few_tags() -> None:
    choose = random.Random(3)
    tags = {choose.getrandbits(64) for _ in range(2000)}
    info = GenerationInfo(0, 1, 0, 1, 0, 0, filter_of(tags, len(tags)))
    assert all(info.may_have(tag) for tag in tags)
    wrong = sum(info.may_have(choose.getrandbits(64)) for _ in range(10_000))
    assert wrong < 300


def test_a_generation_without_records_has_no_tags() -> None:
    generation = OpenGeneration(0, 0)
    generation.cells = 5
    info, stored = closed(generation, end=5, tail=0)
    assert not info.may_have(17)
    assert list(Generation(stored).seqnums(17)) == []


def test_a_damaged_generation_is_refused() -> None:
    _, stored = closed(filled(1)[0], end=60, tail=1200)
    with pytest.raises(MalformedFrameError):
        Generation(stored[:-1] + b"?")


def test_a_record_is_found_by_the_row_before_it() -> None:
    table = CellTable()
    table.add(7, 0, 100, 50)
    table.add(7, 2, 103, 50)
    table.add(9, 0, 110, 60)
    assert table.place(102) == (CellPlace(7, 0, 2), 50)
    assert table.place(103) == (CellPlace(7, 2, 0), 50)
    assert table.place(115) == (CellPlace(9, 0, 5), 60)
    assert [table.find_time(at) for at in (49, 50, 51, 60, 61)] == [100, 100, 110, 110, None]


@pytest.mark.parametrize(("records", "cells"), [(3, 99), (99, 2)])
def test_a_generation_is_complete_at_its_limit(records: int, cells: int) -> None:
    generation = OpenGeneration(0, 0)
    limits = GenerationLimits(records, cells)
    for seqnum in range(2):
        generation.add(seqnum, [])
    generation.cells = 1
    assert not generation.is_complete(limits)
    generation.add(2, [])
    generation.cells = 2
    assert generation.is_complete(limits)
