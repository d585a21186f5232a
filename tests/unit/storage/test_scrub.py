"""Periodic verification of all frames on disk (A5, decision 0009)."""

from __future__ import annotations

from indilog.base.ids import Epoch, ShardId
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind
from indilog.wire.messages import AppendBatch, BatchesWanted
from tests.unit.storage.machine import (
    PRIMARY,
    SHARD,
    STORAGE,
    Machine,
    all_entries,
    append,
    batch,
    entries,
    machine_of,
    messages,
)

DAY_S = 86_400.0
SIZE = len(batch(0, [b"x" * 1000]))


def scrubbing(records: int = 6, scrub_bytes_per_s: int = 4_000_000) -> Machine:
    machine = machine_of(record_cache_bytes_max=0, scrub_bytes_per_s=scrub_bytes_per_s)
    for first in range(records):
        append(machine, b"x" * 1000, first=first)
    machine.tell(entries({SHARD: records}), sender=PRIMARY)
    return machine


def test_a_pass_reads_all_frames_once_an_interval() -> None:
    machine = scrubbing()
    machine.wait(DAY_S - 1)
    assert machine.reads == 0
    machine.wait(2)
    machine.wait(1)
    assert machine.reads == 6
    status = machine.node.status()
    assert (status["scrub_passes"], status["scrubbed_bytes"]) == (1, 6 * SIZE)
    for _ in range(100):
        machine.wait(60)
    assert machine.reads == 6, "the next pass is tomorrow"
    machine.wait(DAY_S)
    machine.wait(1)
    assert machine.node.status()["scrub_passes"] == 2


def test_a_pass_is_limited_in_bytes_per_second() -> None:
    machine = scrubbing(600, scrub_bytes_per_s=256 * 1024)
    machine.wait(DAY_S + 1)
    machine.turn()
    machine.turn()
    assert machine.reads == 256 * 1024 // SIZE + 1
    machine.wait(1.5)
    assert machine.reads == 2 * (256 * 1024 // SIZE + 1)


def test_damage_is_found_counted_and_its_records_are_requested() -> None:
    twin = scrubbing()
    machine = Machine(view_of(storage_nodes=2, replicas=2), twin.config, STORAGE, twin.frames)
    machine.tell(all_entries({SHARD: 6}), sender=PRIMARY)
    records = [i for i, (kind, _, _) in enumerate(machine.frames) if kind is FrameKind.RECORDS]
    machine.damage(records[2])
    sent = machine.wait(DAY_S + 1)
    assert BatchesWanted(SHARD, 2, 3) in messages(sent)
    assert machine.node.status()["damaged_batches"] == 1
    assert machine.ignored == ["a record batch on disk is damaged"]


def test_all_shards_are_read_also_batches_stored_during_the_pass() -> None:
    machine = machine_of(view_of(engines=2), record_cache_bytes_max=0)
    for shard in (0, 1):
        machine.tell(AppendBatch(batch(0, [b"a"], shard=shard, epoch=Epoch(1))))
    machine.wait(DAY_S + 1)
    assert machine.reads == 2
    machine.tell(AppendBatch(batch(1, [b"a"], shard=ShardId(0))))
    machine.wait(1)
    assert machine.node.status()["scrub_passes"] == 1


def test_a_node_without_records_ends_its_pass_at_once_and_waits() -> None:
    machine = machine_of()
    machine.wait(DAY_S + 1)
    machine.turn()
    assert machine.node.status()["scrub_passes"] == 1
    due = machine.node.deadline()
    assert due is not None
    assert due >= machine.now + DAY_S - 10
