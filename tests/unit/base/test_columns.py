"""Columns of integers as bytes."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base import columns
from indilog.base.columns import Packs, packed, unpacked
from indilog.base.errors import MalformedFrameError

U64 = st.integers(0, 2**64 - 1)


@given(st.lists(st.one_of(U64, st.integers(0, 300))))
def test_a_column_of_any_integers_survives_a_round_trip(values: list[int]) -> None:
    column = np.array(values, np.uint64)
    assert unpacked(packed(column)).tolist() == values


def test_an_evenly_growing_column_takes_a_few_bytes_in_total() -> None:
    assert len(packed(np.arange(0, 190_000_000, 190, dtype=np.uint64))) < 10_000


@given(st.binary(max_size=60))
def test_bytes_that_are_no_column_are_refused(other: bytes) -> None:
    whole = packed(np.arange(5, dtype=np.uint64))
    for payload in (other, whole[:-1], bytes([2]) + whole[1:]):
        with pytest.raises(MalformedFrameError):
            unpacked(payload)


KINDS = ("Q", "H")


def columns_of(values: Sequence[int]) -> list[array[int]]:
    return [array("Q", values), array("H", [value % 7 for value in values])]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grow", "cut", "change", "copy", "copy", "forget"]),
            st.integers(0, 40),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_a_packed_copy_equals_the_columns_at_its_time(steps: list[tuple[str, int, bool]]) -> None:
    """The columns may change later, and the copy may be packed at any time or never."""
    values: list[int] = []
    packs = Packs()
    with patch.object(columns, "PACK_ROWS", 4):
        for step, number, late in steps:
            if step == "grow":
                values += range(100 * number, 100 * number + number)
            elif step == "forget":
                packs.copied(columns_of(values))  # the write of this copy failed
            elif step == "copy":
                said, before = packs.copied(columns_of(values)), columns_of(values)
                if late and values:
                    packs.changed(number % len(values))
                    values[number % len(values)] += 1
                encoded = said()
                assert Packs().restore(encoded, KINDS) == before
                if number % 5 == 0:
                    packs = Packs()
                    packs.restore(encoded, KINDS)
                    values = before[0].tolist()
            elif values:
                place = number % len(values)
                packs.changed(place)
                if step == "cut":
                    del values[place:]
                else:
                    values[place] += 1


def test_a_memory_profiler_does_not_disturb_a_thread_that_packs() -> None:
    seen: list[object] = []

    def profiled(column: np.ndarray) -> bytes:
        seen.append(gc.get_objects())
        return packed(column)

    with patch.object(columns, "packed", profiled):
        assert len(Packs().copied([array("Q", range(9))] * 20)()[0]) == 20
    assert seen


def test_only_new_values_are_copied() -> None:
    packs = Packs()
    with patch.object(columns, "PACK_ROWS", 4):
        first = packs.copied(columns_of(range(11)))()
        second = packs.copied(columns_of(range(13)))()
        assert [a is b for a, b in zip(first, second, strict=False)] == [True, True, False]
        packs.changed(5)
        third = packs.copied(columns_of(range(13)))()
        assert [a is b for a, b in zip(second, third, strict=True)] == [True, False, False, False]
