"""Claims of the append side of a storage node, one each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from indilog.base.ids import Epoch, NodeId, ShardId
from indilog.kernel.metalog import NewWriters, decode_entries
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Send
from indilog.wire.messages import (
    AppendBatch,
    MetalogWanted,
    ShardProgress,
    ShardStored,
    ShardStoredWanted,
)
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Machine,
    all_entries,
    append,
    batch,
    config_of,
    data_of,
    entries,
    machine_of,
    messages,
    new_writers,
    progress,
    read,
    small_batches,
)

E1, E2, E3 = Epoch(1), Epoch(2), Epoch(3)


def opened(machine: Machine, epoch: int = 1) -> Machine:
    """Let the first entry name the writer."""
    machine.open(epoch)
    machine.nothing_more()
    return machine


def told_writers(sent: Iterable[Send]) -> list[ShardStored]:
    return [message for message in messages(sent, ENGINE) if isinstance(message, ShardStored)]


def reported(sent: Iterable[Send]) -> list[ShardProgress]:
    return [message for message in messages(sent, PRIMARY) if isinstance(message, ShardProgress)]


def asked_within(machine: Machine, seconds: int) -> set[int]:
    """Return from where on the primary is asked for entries in this time."""
    sent = [send for _ in range(10 * seconds) for send in machine.wait(0.1)]
    return {m.start for m in messages(sent, PRIMARY) if isinstance(m, MetalogWanted)}


def test_a_batch_is_reported_when_it_is_durable_and_not_before() -> None:
    machine = machine_of()
    machine.holding = True
    assert machine.tell(AppendBatch(batch(0, [b"a", b"b"]))) == []
    assert messages(machine.confirm()) == [progress({SHARD: (E1, 2)})]


def test_all_batches_of_an_iteration_are_one_report_to_the_primary() -> None:
    machine = machine_of(view_of(engines=2))
    one = ShardId(1)
    machine.open(3, one)
    sent = machine.tell(
        AppendBatch(batch(0)),
        AppendBatch(batch(0, shard=1, epoch=3)),
        AppendBatch(batch(1, [b"x"] * 5)),
    )
    assert messages(sent, PRIMARY) == [progress({SHARD: (E1, 6), one: (E3, 1)})]


def test_a_repeated_batch_is_not_stored_again() -> None:
    machine = machine_of()
    machine.tell(AppendBatch(batch(0)), AppendBatch(batch(1)))
    frames = len(machine.frames)
    sent = machine.tell(AppendBatch(batch(0)), AppendBatch(batch(1)))
    assert messages(sent) == [ShardStored(SHARD, E1, 2)]
    assert len(machine.frames) == frames
    assert machine.node.records == 2


def test_a_batch_after_a_gap_is_answered_with_the_prefix() -> None:
    machine = machine_of()
    machine.tell(AppendBatch(batch(0)))
    sent = machine.tell(AppendBatch(batch(2)), AppendBatch(batch(3)))
    assert messages(sent, ENGINE) == [ShardStored(SHARD, E1, 1)]
    assert machine.node.records == 1


def test_progress_is_resent_while_records_are_not_ordered() -> None:
    machine = machine_of(resend_s=0.5)
    report = progress({SHARD: (E1, 1)})
    assert messages(machine.tell(AppendBatch(batch(0)))) == [report]
    assert machine.wait(0.4) == []
    assert report in messages(machine.wait(0.2), PRIMARY)
    machine.tell(entries({0: 1}), sender=PRIMARY)
    assert report not in messages(machine.wait(0.6))
    assert machine.node.deadline() is None or report not in messages(machine.wait(9))


def test_after_a_restart_all_shards_with_a_writer_are_reported() -> None:
    machine = machine_of()
    machine.tell(AppendBatch(batch(0)), AppendBatch(batch(1)))
    assert progress({SHARD: (E1, 2)}) in messages(machine.restarted().started)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not an intact record batch"),
        (batch(0)[:-1] + b"?", "not an intact record batch"),
        (batch(0, [b"x" * 900] * 80), "a batch larger than batch_bytes_max"),
        (batch(0, shard=9), "a batch of a shard that is not kept here, or without records"),
    ],
)
def test_a_malformed_or_foreign_batch_is_ignored(payload: bytes, reason: str) -> None:
    machine = opened(Machine(config=small_batches(67_000)))
    assert machine.tell(AppendBatch(payload)) == []
    assert machine.ignored == [reason]


def test_a_batch_of_the_largest_size_is_stored() -> None:
    machine = Machine(config=small_batches(67_000))
    opened(machine)
    payload = batch(0, [b"x" * (67_000 - len(batch(0, [b""])))])
    assert len(payload) == 67_000
    assert messages(machine.tell(AppendBatch(payload))) == [progress({SHARD: (E1, 1)})]


# --- writers


def test_a_batch_of_a_writer_that_no_entry_names_is_not_stored_and_entries_are_asked_for() -> None:
    """A4: a replica that lost its disk has forgotten its writer, and learns it from the metalog."""
    machine = Machine(config=config_of(resend_s=0.5))
    machine.nothing_more()
    sent = machine.tell(AppendBatch(batch(0)))
    assert (messages(sent, ENGINE), machine.frames) == ([], [])
    for _ in range(3):
        assert asked_within(machine, 4) == {0}
    sent = machine.open()
    assert told_writers(sent) == [ShardStored(SHARD, E1, 0)]
    assert reported(sent) == [progress({SHARD: (E1, 0)})]
    machine.tell(AppendBatch(batch(0)))
    machine.tell(entries({SHARD: 1}), sender=PRIMARY)
    assert machine.node.records == 1
    machine.nothing_more()
    assert asked_within(machine, 10) == set()


def test_entries_are_asked_for_until_one_names_that_writer_or_a_later_one() -> None:
    machine = machine_of(resend_s=0.5)
    machine.tell(ShardStoredWanted(SHARD, E3))
    machine.open(2)
    assert asked_within(machine, 4) == {2}
    machine.open(4)
    machine.nothing_more()
    assert asked_within(machine, 10) == set()


def test_an_older_writer_is_refused_with_the_newer_epoch() -> None:
    """Thesis 5.5.1: the storage nodes refuse a writer with an older epoch."""
    machine = machine_of()
    append(machine, b"a", first=0)
    machine.tell(entries({SHARD: 1}), sender=PRIMARY)
    machine.open(2)
    for stale in (AppendBatch(batch(1)), ShardStoredWanted(SHARD, E1)):
        assert messages(machine.tell(stale)) == [ShardStored(SHARD, E2, 1)]
    assert machine.node.records == 1


def test_a_new_writer_drops_the_unordered_records_of_the_one_before() -> None:
    machine = machine_of()
    for first in range(3):
        append(machine, b"%d" % first, first=first)
    machine.tell(entries({SHARD: 1}), sender=PRIMARY)
    held = machine.node.status()["bytes"]
    sent = machine.open(2)
    assert reported(sent) == [progress({SHARD: (E2, 1)})]
    assert told_writers(sent) == [ShardStored(SHARD, E2, 1)]
    assert (machine.node.records, machine.node.status()["bytes"]) == (1, held // 3)
    machine.tell(AppendBatch(batch(1, [b"new"], epoch=2)))
    machine.tell(entries({SHARD: 1}, start=3), sender=PRIMARY)
    assert data_of(read(machine, 0, 1)) == [(0, b"0"), (1, b"new")]


def test_a_new_writer_begins_inside_a_batch_of_which_only_a_part_is_ordered() -> None:
    machine = machine_of()
    append(machine, b"a", b"b", b"c", first=0)
    machine.tell(entries({SHARD: 2}), sender=PRIMARY)
    assert told_writers(machine.open(2)) == [ShardStored(SHARD, E2, 2)]
    machine.tell(AppendBatch(batch(2, [b"new"], epoch=2)))
    machine.tell(entries({SHARD: 1}, start=3), sender=PRIMARY)
    for run in (machine, machine.restarted()):
        assert data_of(read(run, 0, 1, 2)) == [(0, b"a"), (1, b"b"), (2, b"new")]


def test_records_that_were_ordered_before_a_new_writer_in_one_message_are_kept() -> None:
    machine = machine_of()
    append(machine, b"a", first=0)
    append(machine, b"b", first=1)
    ordering = entries({SHARD: 1}).entries
    machine.tell(entries_message((*ordering, new_writers(2, 2))), sender=PRIMARY)
    assert machine.node.records == 1
    assert data_of(read(machine, 0)) == [(0, b"a")]


def test_the_entry_of_a_new_writer_is_on_disk_before_the_writers_batches() -> None:
    machine = machine_of(ordering_frame_entries=64)
    append(machine, b"a", first=0)
    machine.tell(entries({SHARD: 1}), sender=PRIMARY)
    machine.open(2)
    machine.tell(AppendBatch(batch(1, epoch=2)))
    kinds = [kind for kind, _, _ in machine.frames]
    assert kinds == [FrameKind.ORDERING, FrameKind.RECORDS] * 2
    *_, named = decode_entries(machine.frames[2][1])
    assert isinstance(named, NewWriters)
    assert named.writers == {SHARD: E2}


def test_one_entry_gives_several_shards_to_new_writers_and_others_keep_theirs() -> None:
    machine = machine_of(view_of(engines=3))
    for shard in range(3):
        append(machine, b"a", first=0, shard=shard)
    sent = machine.open(2, 0, 2)
    one, two = ShardId(1), ShardId(2)
    assert reported(sent) == [progress({SHARD: (E2, 0), two: (E2, 0)})]
    assert messages(sent, NodeId("engine-2"))[0] == ShardStored(two, E2, 0)
    assert machine.node.records == 1
    sent = machine.tell(AppendBatch(batch(1, shard=1)))
    assert reported(sent) == [progress({one: (E1, 2)})]


@pytest.mark.parametrize("confirmed_first", [False, True])
def test_a_batch_on_its_way_to_the_disk_is_dropped_by_a_new_writer(
    *, confirmed_first: bool
) -> None:
    machine = machine_of()
    machine.holding = True
    append(machine, b"old", first=0)
    late = machine.held
    machine.held = []
    machine.open(2)
    if confirmed_first:
        machine.turn(*late)
    machine.tell(AppendBatch(batch(0, [b"new", b"new"], epoch=2)))
    sent = machine.confirm()
    if not confirmed_first:
        sent += machine.turn(*late)
    assert reported(sent) == [progress({SHARD: (E2, 2)})]
    machine.tell(entries({SHARD: 2}, start=2), sender=PRIMARY)
    for run in (machine, machine.restarted()):
        assert run.node.records == 2
        assert data_of(read(run, 0, 1)) == [(0, b"new"), (1, b"new")]


@pytest.mark.parametrize("stored", [False, True])
def test_the_tags_of_dropped_records_are_dropped_too(*, stored: bool) -> None:
    """In memory they wait for the entry that orders them."""
    machine = machine_of()
    machine.holding = not stored
    append(machine, b"x" * 500, first=0)
    append(machine, b"y" * 500, first=1)
    assert machine.node._appends._unordered_bytes > 1000
    machine.open(2)
    assert machine.node._appends._unordered_bytes == 0


def test_messages_about_shards_of_others_are_ignored() -> None:
    machine = Machine()
    assert machine.tell(ShardStoredWanted(ShardId(5), E1)) == []
    assert machine.ignored == ["a question about a shard that is not kept here"]
    machine.tell(entries_message((new_writers(0, 1, 5),)), sender=PRIMARY)
    assert machine.node.position == 1


def test_a_repeated_entry_of_a_new_writer_drops_nothing() -> None:
    machine = machine_of()
    append(machine, b"a", first=0)
    assert machine.tell(all_entries(), sender=PRIMARY) == []
    assert machine.node.records == 1


def test_unordered_batches_are_bounded_in_memory_but_kept_on_disk() -> None:
    machine = machine_of(append_pending_bytes_max=1000)
    for first in range(20):
        machine.tell(AppendBatch(batch(first, [b"x" * 200])))
    appends = machine.node._appends
    assert appends._unordered_bytes <= 1000
    assert machine.node.records == 20
