"""Columns of integers as bytes."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.columns import copied, packed, restored, unpacked
from indilog.errors import MalformedFrameError

U64 = st.integers(0, 2**64 - 1)


@given(st.lists(st.one_of(U64, st.integers(0, 300))))
def test_a_column_of_any_integers_comes_back(values: list[int]) -> None:
    column = np.array(values, np.uint64)
    assert unpacked(packed(column)).tolist() == values


@pytest.mark.parametrize("typecode", ["Q", "I", "H"])
def test_an_array_comes_back_as_its_type_and_its_copy_does_not_change(typecode: str) -> None:
    values = array(typecode, [3, 1, 65535, 0])
    column = copied(values)
    values[0] = 7
    assert restored(typecode, unpacked(packed(column))) == array(typecode, [3, 1, 65535, 0])


def test_what_grows_evenly_takes_a_few_bytes_in_all() -> None:
    assert len(packed(np.arange(0, 190_000_000, 190, dtype=np.uint64))) < 10_000


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(other: bytes) -> None:
    whole = packed(np.arange(5, dtype=np.uint64))
    for payload in (other, whole[:-1], bytes([2]) + whole[1:]):
        with pytest.raises(MalformedFrameError):
            unpacked(payload)
