"""Recovery of a storage node after a restart."""

from __future__ import annotations

import pytest

from indilog.base.errors import DataLossError
from indilog.roles.role import FrameKind
from tests.unit.storage.machine import (
    PRIMARY,
    Machine,
    append,
    batch,
    data_of,
    entries,
    machine_of,
    read,
)


def test_a_restart_finds_records_order_and_writers_again() -> None:
    machine = machine_of()
    append(machine, b"a", b"b", first=0)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    append(machine, b"c", first=2)
    after = machine.restarted()
    assert (after.node.records, after.node.position) == (3, 2)
    assert data_of(read(after, 0, 1)) == [(0, b"a"), (1, b"b")]
    append(after, b"d", first=3)
    after.tell(entries({0: 2}, start=2), sender=PRIMARY)
    assert data_of(read(after, 2, 3)) == [(2, b"c"), (3, b"d")]


def two_ordered() -> Machine:
    machine = machine_of()
    append(machine, b"a", first=0)
    append(machine, b"b", first=1)
    machine.tell(entries({0: 1}), sender=PRIMARY)
    machine.tell(entries({0: 1}, start=2), sender=PRIMARY)
    return machine


def place_of(machine: Machine, kind: FrameKind) -> int:
    return [frame[0] for frame in machine.frames].index(kind)


def test_a_frame_that_does_not_follow_on_is_data_loss() -> None:
    machine = two_ordered()
    del machine.frames[place_of(machine, FrameKind.ORDERING)]
    with pytest.raises(DataLossError, match="continue"):
        machine.restarted()
    again = two_ordered()
    append(again, b"c", first=2)
    _, _, location = again.frames.pop()
    again.frames.append((FrameKind.RECORDS, batch(5, epoch=2), location))
    with pytest.raises(DataLossError, match="continues at localid 5"):
        again.restarted()


def test_a_gap_within_one_epoch_is_lost_and_all_other_records_are_served() -> None:
    machine = two_ordered()
    del machine.frames[place_of(machine, FrameKind.RECORDS)]
    after = machine.restarted()
    assert after.node.status()["missing_records"] == 1
    answer = read(after, 0, 1)
    assert (answer.unknown, data_of(answer)) == ((0,), [(1, b"b")])


@pytest.mark.parametrize("kind", [FrameKind.RECORDS, FrameKind.ORDERING])
def test_a_frame_that_cannot_be_read_is_data_loss(kind: FrameKind) -> None:
    machine = machine_of()
    machine.frames = [(kind, b"\xff", machine.frames[0][2])]
    with pytest.raises(DataLossError, match="cannot be read"):
        machine.restarted()
