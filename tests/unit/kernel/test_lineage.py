"""Epoch lineages, by which copies of the metalog are compared."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import Epoch, ViewNumber
from indilog.kernel.lineage import Fit, Lineage, is_prefix
from indilog.kernel.metalog import NewRecords


def entry(position: int, epoch: int) -> NewRecords:
    return NewRecords(position, ViewNumber(1), Epoch(epoch), {})


def lineage_of(epochs: Sequence[int], base: int = 0) -> Lineage:
    lineage = Lineage(base, Epoch(epochs[base - 1] if base else 0))
    for epoch in epochs[base:]:
        lineage.append(Epoch(epoch))
    return lineage


def logs(chance: Random) -> tuple[list[int], list[int]]:
    """Return two metalogs that are equal up to some position and of different incarnations after
    it.
    """
    common = sorted(chance.choices(range(1, 5), k=chance.randrange(8)))
    ours = sorted(chance.choices([5, 7], k=chance.randrange(5)))
    theirs = sorted(chance.choices([6, 8], k=chance.randrange(5)))
    return common + ours, common + theirs


@given(st.integers(0, 2**32))
def test_a_comparison_returns_the_position_up_to_which_a_copy_equals_a_page(seed: int) -> None:
    """Compared with the lists themselves."""
    chance = Random(seed)
    ours, theirs = logs(chance)
    base = chance.randint(0, len(ours))
    start = chance.randint(0, len(theirs))
    end = chance.randint(start, len(theirs))
    page = [entry(position, theirs[position]) for position in range(start, end)]
    before = Epoch(theirs[start - 1] if start else 0)
    fit, equal = lineage_of(ours, base).compare(start, before, page)
    both = next((p for p in range(len(ours)) if ours[p : p + 1] != theirs[p : p + 1]), len(ours))
    match fit:
        case Fit.GAP:
            assert start > len(ours)
        case Fit.UNRELATED:
            assert both < max(start, base)
        case Fit.DIFFERS:
            assert equal == both < min(end, len(ours))
        case Fit.WITHIN:
            assert end < len(ours)
            assert end <= max(both, base)
        case Fit.FOLLOWS:
            assert both == len(ours) <= end
            assert start <= len(ours)


@given(st.integers(0, 2**32))
def test_a_truncated_lineage_equals_one_that_never_had_the_entries(seed: int) -> None:
    chance = Random(seed)
    ours, theirs = logs(chance)
    base = chance.randint(0, len(ours))
    end = chance.randint(base, len(ours))
    lineage = lineage_of(ours, base)
    lineage.cut_off(end)
    following = [epoch for epoch in theirs if epoch >= max([0, *ours[:end]])]
    for epoch in following:
        lineage.append(Epoch(epoch))
    expected = lineage_of([*ours[:end], *following], base)
    assert lineage.last == expected.last
    assert [lineage.before(p) for p in range(25)] == [expected.before(p) for p in range(25)]


def test_only_a_copy_of_the_first_entries_is_a_prefix() -> None:
    lineage = Lineage()
    for epoch in (1, 1, 2, 4):
        lineage.append(Epoch(epoch))
    for end in range(5):
        assert is_prefix(lineage.copied(end), lineage.copied())
        restored = Lineage.restored(lineage.copied(end))
        restored.check_invariants()
        assert restored.last == restored.before(end) == lineage.before(end)
    other = Lineage()
    for epoch in (1, 1, 3):
        other.append(Epoch(epoch))
    assert not is_prefix(other.copied(), lineage.copied())
    assert is_prefix(other.copied(2), lineage.copied())
    assert not is_prefix(lineage.copied(), lineage.copied(3))
