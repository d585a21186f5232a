"""A storage node on a full disk: it refuses appends, notifies writers, repairs nothing (A35)."""

from __future__ import annotations

from indilog.base.ids import Epoch
from indilog.roles.role import FrameKind, SpaceChanged
from indilog.wire.messages import AppendBatch, DiskFull
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    append,
    batch,
    entries,
    machine_of,
    messages,
    progress,
    read,
)


def test_a_full_disk_accepts_batches_in_flight_and_no_more() -> None:
    machine = machine_of()
    append(machine, b"0", first=0)
    machine.tell(entries({SHARD: 1}), sender=PRIMARY)
    room = len(batch(1, [b"1"])) + 40
    assert messages(machine.turn(SpaceChanged(room)), ENGINE) == [DiskFull(full=True)]
    assert messages(machine.tell(AppendBatch(batch(1, [b"1"]))))[0] == progress(
        {SHARD: (Epoch(1), 2)}
    )
    assert machine.tell(AppendBatch(batch(2, [b"2"]))) == []
    assert machine.ignored == ["a batch for which the disk has no room"]
    assert read(machine, 0).records
    assert machine.node.status()["read_only"] == 1
    assert messages(machine.turn(SpaceChanged(None)), ENGINE) == [DiskFull(full=False)]
    append(machine, b"2", first=2)
    assert machine.node.records == 3
    assert machine.node.status()["read_only"] == 0


def test_writers_are_notified_again_while_the_disk_is_full() -> None:
    machine = machine_of()
    machine.turn(SpaceChanged(0))
    assert messages(machine.wait(2.0), ENGINE) == [DiskFull(full=True)]
    assert messages(machine.wait(2.0), ENGINE) == [DiskFull(full=True)]


def test_nothing_is_repaired_on_a_full_disk() -> None:
    machine = machine_of()
    machine.turn(SpaceChanged(0))
    machine.tell(entries({SHARD: 5}), sender=PRIMARY)
    machine.wait(60)
    assert FrameKind.REPAIRED not in [kind for kind, _, _ in machine.frames]
