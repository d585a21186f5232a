"""Reads that wait for a position."""

from __future__ import annotations

from typing import Any

from indilog.base.ids import Instant
from indilog_compute.reads.parked_reads import ParkedReads


class _Read:
    """The part of an operation that `ParkedReads` uses; counts how often its position is read."""

    looked = 0

    def __init__(self, at: int, created: float) -> None:
        self.at = at
        self.created = created
        self.stage: object = None

    @property
    def position(self) -> int:
        _Read.looked += 1
        return self.at


def _read(at: int, created: float = 0.0) -> Any:  # noqa: ANN401 - stands in for an operation
    return _Read(at, created)


def test_reads_are_released_in_the_order_of_their_positions() -> None:
    """The work depends on the released reads: the positions of 5,000 others are not read again."""
    parked = ParkedReads(timeout_s=10.0)
    later = [_read(100 + n) for n in range(5_000)]
    first, second = _read(2), _read(1)
    for read in (*later, first, second):
        parked.add(read)
    _Read.looked = 0
    assert parked.take_reached(0) == []
    assert parked.take_reached(2) == [second, first]
    assert parked.take_reached(99) == []
    assert _Read.looked == 0
    assert len(parked) == len(later)


def test_a_read_that_expired_is_not_released_again() -> None:
    parked = ParkedReads(timeout_s=10.0)
    old, young = _read(5, created=0.0), _read(5, created=8.0)
    for read in (old, young):
        parked.add(read)
    assert parked.take_expired(Instant(11.0)) == [old]
    assert parked.take_reached(5) == [young]
    assert len(parked) == 0
    parked.add(old)
    assert parked.clear() == [old]
    assert parked.take_reached(9) == []
