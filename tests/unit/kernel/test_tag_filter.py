"""A tag filter never misses an added tag, and about one in a hundred of the other tags passes
it.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.kernel.tag_filter import BITS_PER_TAG, TagFilter, TagFilterBuilder

TAGS = st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=300)


@given(tags=TAGS, tags_max=st.integers(0, 5000), bytes_max=st.integers(8, 4096))
def test_every_added_tag_passes_the_filter(tags: list[int], tags_max: int, bytes_max: int) -> None:
    """For filters of any size, folded any number of times."""
    builder = TagFilterBuilder(tags_max, bytes_max=bytes_max)
    for start in range(0, len(tags), 100):
        builder.add(np.array(tags[start : start + 100], np.uint64))
    found = TagFilter(builder.built().bits)
    assert all(map(found.may_hold, tags))
    assert len(found.bits) <= bytes_max


@pytest.mark.parametrize("tags_max", [20_000, 2_000_000])
@pytest.mark.parametrize("kind", ["hashes", "small numbers"])
def test_few_other_tags_pass_the_filter(tags_max: int, kind: str) -> None:
    chance = random.Random(1)
    numbers = (
        range(1, 40_001) if kind == "small numbers" else map(chance.getrandbits, [64] * 40_000)
    )
    added, others = np.split(np.array(list(numbers), np.uint64), 2)
    builder = TagFilterBuilder(tags_max, bytes_max=1 << 22)
    builder.add(added)
    found = builder.built()
    assert 8 * len(found.bits) <= 2 * BITS_PER_TAG * len(added), "it is folded"
    assert sum(map(found.may_hold, others.tolist())) < 0.02 * len(others)


def test_an_overfull_filter_has_more_false_positives_and_no_misses() -> None:
    tags = np.arange(1, 5001, dtype=np.uint64)
    builder = TagFilterBuilder(10, bytes_max=1024)
    builder.add(tags)
    assert all(map(builder.built().may_hold, tags.tolist()))


def test_an_empty_filter_holds_nothing() -> None:
    found = TagFilter.of(np.empty(0, np.uint64))
    assert not any(map(found.may_hold, range(1000)))


@pytest.mark.parametrize("bits", [b"", bytes(7), bytes(24)])
def test_bytes_that_are_no_filter_are_refused(bits: bytes) -> None:
    with pytest.raises(ValueError, match="power of two"):
        TagFilter(bits)
