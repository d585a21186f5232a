"""Ranges of rows: each row is in one, and they are about equal."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indilog.kernel.index_snapshot import Rows
from indilog_index.rebuild.ranges import bounds_of, split

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=60)


def rows_of(pairs: list[tuple[int, int]]) -> Rows:
    columns = np.array(pairs, np.uint64).reshape(-1, 2)
    return Rows(columns[:, 0], columns[:, 1], np.zeros(len(pairs), np.uint16))


@given(sample=PAIRS, pairs=PAIRS, ranges=st.integers(1, 12))
def test_each_row_is_in_one_range(
    sample: list[tuple[int, int]], pairs: list[tuple[int, int]], ranges: int
) -> None:
    bounds = bounds_of(rows_of(sample), ranges)
    assert 1 <= bounds.ranges <= ranges
    pairs = sorted(set(pairs))
    starts = [(-1, -1), *zip(bounds.tags.tolist(), bounds.seqnums.tolist(), strict=True)]
    assert starts == sorted(set(starts))
    found = []
    for number, rows in split(rows_of(pairs), bounds):
        of_range = list(zip(rows.tags.tolist(), rows.seqnums.tolist(), strict=True))
        assert starts[number] <= of_range[0]
        assert number + 1 == len(starts) or of_range[-1] < starts[number + 1]
        found += of_range
    assert found == pairs


def test_a_tag_of_half_of_the_rows_is_in_several_ranges() -> None:
    pairs = sorted([(0, n) for n in range(500)] + [(n % 100, n) for n in range(500)])
    sizes = [len(rows.tags) for _, rows in split(rows_of(pairs), bounds_of(rows_of(pairs), 10))]
    assert len(sizes) == 10
    assert max(sizes) <= 110
