"""How a replica recovers from damage that it finds at its start (A5, decision 0009)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from indilog.base.ids import Epoch, NodeId
from indilog.kernel.metalog import Entry, Span
from indilog.roles.role import FrameKind, Location, Lost, Started
from indilog.wire.messages import (
    AppendBatch,
    ShardProgress,
    ShardStored,
)
from indilog_storage.batch_reads import DamagedBatch
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Frame,
    Machine,
    all_entries,
    append,
    batch,
    config_of,
    entries,
    entry,
    machine_of,
    messages,
    new_writers,
    progress,
)
from tests.unit.storage.replicas import (
    E1,
    E2,
    VIEW,
    A,
    B,
    Pair,
    all_of,
    expected,
    replicated,
    shard_of,
)

LEFT = [(True, True), (True, False), (False, False)]
"""What is left of a lost frame: its kind, and its payload."""


def number_of(machine: Machine, kind: FrameKind, nth: int) -> int:
    """Return the number of the nth frame of a kind."""
    return [n for n, frame in enumerate(machine.frames) if frame[0] is kind][nth]


def reports(machine: Machine) -> list[ShardProgress | ShardStored]:
    """Restart; return the stored prefixes that are reported to the primary and to the writer."""
    sent = messages(machine.turn(Started(Epoch(2))))
    return [message for message in sent if isinstance(message, ShardProgress | ShardStored)]


def reported(machine: Machine) -> tuple[Epoch, int]:
    """Restart; return the report about the shard to the primary."""
    (report,) = [said for said in reports(machine) if isinstance(said, ShardProgress)]
    return report.stored[SHARD]


@pytest.mark.parametrize(("kind", "payload"), LEFT)
def test_a_replica_recovers_all_frames_but_a_lost_one(*, kind: bool, payload: bool) -> None:
    """A5: all other frames are recovered, and the lost records are repaired."""
    pair = replicated()
    before = pair.nodes[A]
    for index in range(len(before.frames)):
        machine = pair.start(before.restarted_without(index, kind=kind, payload=payload))
        pair.tell(A, all_entries({SHARD: 6}), sender=PRIMARY)
        assert all_of(machine, 6) == expected(6), f"frame {index}"


@pytest.mark.parametrize("payload", [True, False])
def test_a_repaired_batch_is_lost_again_where_the_first_one_left_no_trace(*, payload: bool) -> None:
    """The first one was at the end of a segment, and cut as a torn tail."""
    pair = replicated(4)
    before = pair.nodes[A]
    cut = number_of(before, FrameKind.RECORDS, 0)
    _, data, location = before.frames[cut]
    before.frames[cut] = (FrameKind.REPAIRED, data, location)
    machine = pair.start(before.restarted_without(cut, kind=True, payload=payload))
    pair.tell(A, all_entries({SHARD: 4}), sender=PRIMARY)
    assert all_of(machine, 4) == expected(4)


# --- two writers


ORDERED, STALE = 2, 2
METALOG: tuple[Entry, ...] = (new_writers(0), entry(1, {SHARD: ORDERED}), new_writers(2, 2))
"""Entries up to the one that names the second writer."""
SECOND = {2: (b"2",), 3: (b"3", b"4"), 5: (b"5",)}
"""The batches of the second writer."""


def taken_over(*, checkpoint_at: int | None = None) -> Pair:
    """Two replicas with two ordered records of writer 1, and four unordered ones of writer 2.

    A had two batches of writer 1 that no entry has ordered. It took a checkpoint before the given
    step.
    """
    pair = Pair(config_of(ordering_frame_entries=64))
    stale = AppendBatch(batch(2, [b"stale", b"stale"])), AppendBatch(batch(4, [b"stale"]))
    steps: list[Callable[[], object]] = [
        lambda: pair.tell_both(entries_message(METALOG[:1]), sender=PRIMARY),
        lambda: pair.tell_both(AppendBatch(batch(0, [b"0", b"1"]))),
        lambda: pair.tell(A, *stale),
        lambda: pair.tell_both(entries_message(METALOG[1:2]), sender=PRIMARY),
        lambda: pair.tell_both(entries_message(METALOG[2:]), sender=PRIMARY),
        *(partial(pair.tell_both, message) for message in of_second(0)),
    ]
    for number, step in enumerate(steps):
        if number == checkpoint_at:
            pair.nodes[A].take_checkpoint()
        step()
    return pair


def of_second(since: int) -> list[AppendBatch]:
    """Return the batches that writer 2 resends if `since` records are stored."""
    ends = {localid: localid + len(data) for localid, data in SECOND.items()}
    return [
        AppendBatch(batch(localid, list(data), epoch=2))
        for localid, data in SECOND.items()
        if ends[localid] > since
    ]


def told_all(machine: Machine) -> tuple[Epoch, int]:
    """Bring the node up to the entry of the second writer; return what it then reports."""
    machine.tell(entries_message(METALOG), sender=PRIMARY)
    return reported(machine)


def truth_holds(pair: Pair) -> bool:
    """Order all records, and let the replicas repair each other."""
    ordering = entry(3, {SHARD: 4})
    pair.tell_both(entries_message((*METALOG, ordering)), sender=PRIMARY)
    pair.settle()
    return all(all_of(machine, 6) == expected(6) for machine in pair.nodes.values())


@pytest.mark.parametrize("checkpoint_at", [None, *range(8)])
def test_a_restart_keeps_what_each_writer_stored(checkpoint_at: int | None) -> None:
    pair = taken_over(checkpoint_at=checkpoint_at)
    pair.restart(A)
    assert reported(pair.nodes[A]) == (E2, 6)
    assert truth_holds(pair)


@pytest.mark.parametrize("left", LEFT)
@pytest.mark.parametrize("checkpoint_at", [None, 1, 3, 5, 6])
def test_a_restart_after_any_loss_never_counts_records_of_one_writer_as_those_of_another(
    checkpoint_at: int | None, left: tuple[bool, bool]
) -> None:
    """Neither before nor after the missing entries arrive; the writer resends what is missing."""
    kind, payload = left
    frames = len(taken_over().nodes[A].frames)
    for index in range(frames):
        pair = taken_over(checkpoint_at=checkpoint_at)
        machine = pair.nodes[A] = pair.nodes[A].restarted_without(index, kind=kind, payload=payload)
        said = [message for message in reports(machine) if isinstance(message, ShardProgress)]
        for writer, stored in (report.stored[SHARD] for report in said):
            assert stored <= (6 if writer == E2 else ORDERED + STALE + 1)
        writer, stored = told_all(machine)
        assert writer == E2
        assert stored >= ORDERED
        machine.tell(*of_second(stored))
        assert reported(machine) == (E2, 6), f"frame {index}"
        pair.nodes[B] = Machine(VIEW, pair.config, B)  # it cannot help with what A counts as stored
        machine.tell(entries_message((entry(3, {SHARD: 4}),)), sender=PRIMARY)
        shown = all_of(machine, 6)
        assert [found for found in shown if found[0] >= ORDERED] == expected(6)[ORDERED:]
        assert shown == [found for found in expected(6) if found in shown]


def test_batches_of_a_new_writer_replace_older_ones_although_its_entry_is_lost() -> None:
    """Until the entry arrives again, only what was ordered counts as the older writer's."""
    pair = taken_over()
    before = pair.nodes[A]
    entry_of_second = number_of(before, FrameKind.ORDERING, 1)
    machine = pair.start(before.restarted_without(entry_of_second, kind=True, payload=False))
    assert machine.node.position == 1
    assert machine.node.records == 6
    assert reported(machine) == (E1, 2)
    again = machine.restarted_without(entry_of_second, kind=True, payload=False)
    assert told_all(again) == (E2, 6), "nothing has to be resent"
    assert truth_holds(pair)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_missing_before_a_writers_batches_is_resent_when_its_entry_arrives(
    *, checkpointed: bool
) -> None:
    """Of the second writer, the entry and the first batch are lost."""
    pair = taken_over()
    before = pair.nodes[A]
    entry_of_second = number_of(before, FrameKind.ORDERING, 1)
    kind, _, _ = before.frames.pop(entry_of_second + 1)
    assert kind is FrameKind.RECORDS
    machine = pair.start(before.restarted_without(entry_of_second, kind=False, payload=False))
    if checkpointed:
        machine.take_checkpoint()
        machine = pair.nodes[A] = machine.restarted()
    sent = messages(machine.tell(entries_message(METALOG), sender=PRIMARY))
    assert progress({SHARD: (E2, 2)}) in sent
    assert ShardStored(SHARD, E2, 2) in sent, "so it resends"
    assert machine.node.status()["missing_records"] == 1
    again = machine.restarted()
    assert reported(again) == (E2, 2), "the entry is after the batches on disk now"
    for run in (machine, again):
        sent = messages(run.tell(AppendBatch(batch(2, [b"2"], epoch=2))))
        assert progress({SHARD: (E2, 6)}) in sent
    assert truth_holds(pair)
    pair.restart(A)
    assert truth_holds(pair)


def test_records_dropped_by_an_entry_lost_in_a_torn_tail_stay_dropped() -> None:
    """The batches after it are torn, too: nothing shows that there was another writer."""
    pair = taken_over()
    del pair.nodes[A].frames[number_of(pair.nodes[A], FrameKind.ORDERING, 1) :]
    pair.restart(A)
    assert reported(pair.nodes[A]) == (E1, 5)
    assert told_all(pair.nodes[A]) == (E2, 2)
    assert truth_holds(pair)
    pair.restart(A)
    assert truth_holds(pair)


def test_ordered_records_are_not_replaced_by_a_later_writers_batch_at_their_place() -> None:
    """Damage may make recovery meet a batch that an ordered one replaced."""
    shard = shard_of((0, 4))
    shard.order(Span(shard.id, 0, 0, 2))
    assert shard.replaces(2, E2)
    assert not shard.replaces(2, E1), "a repeated batch of the same writer"
    assert not shard.replaces(4, E2), "it follows"
    shard.truncate(2)
    shard.check_invariants()
    assert (shard.stored, shard.written) == (2, 2)
    assert shard.location_of(1) == Location(1, 32, 10)


# --- a shared journal


class Noted(list[Frame]):
    """The frames of one of the replicas that share `journal`."""

    def __init__(self, name: NodeId, journal: list[tuple[NodeId, Frame]]) -> None:
        super().__init__()
        self._name = name
        self._journal = journal

    def append(self, frame: Frame) -> None:
        super().append(frame)
        self._journal.append((self._name, frame))


def test_one_lost_header_in_a_shared_journal_loses_nothing_of_all_replicas() -> None:
    """A5, embedded: each role is notified of damage that may be another role's."""
    journal: list[tuple[NodeId, Frame]] = []
    before = Pair(config_of(ordering_frame_entries=64))
    for name, machine in before.nodes.items():
        machine.frames = Noted(name, journal)
    before.open()
    before.tell_both(AppendBatch(batch(0, [b"0", b"1"])))
    before.tell_both(AppendBatch(batch(2, [b"2", b"3"])))
    before.tell_both(entries({SHARD: 2}, {SHARD: 2}), sender=PRIMARY)
    before.open(2)
    metalog = entries_message((*all_entries({SHARD: 2}, {SHARD: 2}).entries, new_writers(3, 2)))
    for damaged in range(len(journal)):
        pair = Pair(before.config)
        for number, (name, (kind, payload, location)) in enumerate(journal):
            if number == damaged:
                for machine in pair.nodes.values():
                    machine.node.lost(Lost(None, b"", location))
            else:
                pair.nodes[name].node.recover(kind, payload, location)
                pair.nodes[name].frames.append((kind, payload, location))
        pair.tell_both(metalog, sender=PRIMARY)
        pair.open(3)
        pair.settle()
        for machine in pair.nodes.values():
            assert all_of(machine, 4) == expected(4), f"frame {damaged}"


# --- unknown damage


def unknown_at_the_end(before: Machine) -> Machine:
    """Restart; a frame of unknown kind at the end is lost."""
    before.frames.append((FrameKind.ORDERING, b"damaged", Location(9, 32, 6)))
    machine = before.restarted_without(len(before.frames) - 1, kind=False, payload=False)
    machine.frames.pop()
    return machine


def test_records_that_are_ordered_after_unknown_damage_are_kept() -> None:
    """The entries had not reached the journal. A new writer follows."""
    pair = replicated(0, ordering_frame_entries=64)
    for first in (0, 2):
        pair.tell_both(AppendBatch(batch(first, [b"%d" % first, b"%d" % (first + 1)])))
    machine = unknown_at_the_end(pair.nodes[A])
    assert reported(machine) == (E1, 4)
    machine.tell(entries({SHARD: 2}, {SHARD: 2}), sender=PRIMARY)
    machine.open(2)
    assert machine.node.status()["missing_records"] == 0
    assert all_of(machine, 4) == expected(4)


def test_unknown_damage_before_a_new_writer_drops_nothing_that_was_ordered() -> None:
    """Replicas that share a journal are all notified: otherwise all would drop the records."""
    pair = replicated(4)
    pair.open(2)
    before = pair.nodes[A]
    last = number_of(before, FrameKind.ORDERING, -1)
    machine = before.restarted_without(last, kind=False, payload=False)
    assert machine.node.status()["missing_records"] == 0
    assert all_of(machine, 4) == expected(4)


def test_batches_lost_without_a_trace_are_a_hole_that_their_writer_fills() -> None:
    """Otherwise the replica would report a prefix that it does not have."""
    pair = replicated(2)
    machine = pair.nodes[A]
    append(machine, b"2", first=2)
    append(machine, b"3", b"4", first=3)
    append(machine, b"5", first=5)
    lost = [number_of(machine, FrameKind.RECORDS, nth) for nth in (1, 2)]
    frames = [frame for number, frame in enumerate(machine.frames) if number not in lost]
    machine = Machine(VIEW, pair.config, A, frames)
    assert machine.node.status()["missing_records"] == 3
    assert reported(machine) == (E1, 2)
    append(machine, b"2", first=2)
    sent = machine.tell(AppendBatch(batch(3, [b"3", b"4"])))
    assert progress({SHARD: (E1, 6)}) in messages(sent)


def with_a_hole_in_what_is_not_ordered() -> Machine:
    """Batches of two records up to 8, of which 2 are ordered; the one at 4 is damaged."""
    machine = machine_of(VIEW, A)
    for first in range(0, 8, 2):
        append(machine, b"%d" % first, b"%d" % (first + 1), first=first)
    machine.tell(entries({SHARD: 2}), sender=PRIMARY)
    third = number_of(machine, FrameKind.RECORDS, 2)
    return machine.restarted_without(third, kind=True, payload=True)


def test_records_lost_before_they_were_ordered_are_not_reported_and_are_resent() -> None:
    """Otherwise the record is acknowledged with one copy fewer than the ack quorum."""
    machine = with_a_hole_in_what_is_not_ordered()
    assert sorted(reports(machine), key=str) == [
        progress({SHARD: (E1, 4)}), ShardStored(SHARD, E1, 4),
    ]  # fmt: skip
    machine.tell(AppendBatch(batch(2)), AppendBatch(batch(4, [b"4"])))
    assert machine.node._shards[SHARD].sound == 5, "part of it"
    sent = machine.tell(AppendBatch(batch(5, [b"5"])))
    assert progress({SHARD: (E1, 8)}) in messages(sent)
    machine.tell(entries({SHARD: 6}, start=2), sender=PRIMARY)
    assert all_of(machine, 8) == expected(8)
    again = machine.restarted()
    assert all_of(again, 8) == expected(8), "what filled the hole was written as such"


def test_a_new_writer_drops_the_holes_of_the_one_before_too() -> None:
    machine = with_a_hole_in_what_is_not_ordered()
    assert progress({SHARD: (E2, 2)}) in messages(machine.open(2))
    assert machine.node.status()["missing_records"] == 0
    assert messages(machine.tell(AppendBatch(batch(4, [b"4"]))), ENGINE) == [
        ShardStored(SHARD, E2, 2)
    ]
    sent = machine.tell(AppendBatch(batch(2, [b"2"], epoch=2)))
    assert progress({SHARD: (E2, 3)}) in messages(sent)


def test_no_prefix_beyond_a_hole_at_the_end_of_the_ordered_records_is_reported() -> None:
    shard = shard_of((0, 4), (4, 6), (6, 8))
    assert shard.lose(DamagedBatch(Location(1, 32, 10), readable=True))
    assert shard.sound == 0
    shard.order(Span(shard.id, 0, 0, 2))
    assert shard.sound == 2
    shard.order(Span(shard.id, 2, 2, 2))
    assert shard.sound == 8, "the rest is fetched from other replicas"
    assert not shard.misses(0, 4)
