"""A storage node whose primary lost published entries and proposed others.

The primary's journal ended in damage that looked like a torn end. A new incarnation proposes other
entries in those places; the node must not keep the old ones beside them.
"""

from __future__ import annotations

import pytest

from indilog.base.ids import Epoch, ShardId, ViewNumber
from indilog.kernel.metalog import Entry, Floor, NewRecords, NewWriters, Trim
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Location, Send, Started
from indilog.wire.messages import (
    AppendBatch,
    IndexData,
    MetalogEntries,
    MetalogWanted,
    ReadRecords,
    RecordsRead,
    ShardProgress,
    ShardStored,
)
from indilog.wire.tag_messages import TagFloors
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Machine,
    append,
    batch,
    config_of,
    data_of,
    machine_of,
    messages,
    new_writers,
    read,
)

TWO_SHARDS = view_of(engines=2)


def of(epoch: int, position: int, counts: dict[int, int]) -> NewRecords:
    by_shard = {ShardId(shard): count for shard, count in counts.items()}
    return NewRecords(position, ViewNumber(1), Epoch(epoch), by_shard)


def with_two_shards(ordering_frame_entries: int = 1) -> Machine:
    """A node that has two records of shard 0 and of shard 1, of which two are ordered."""
    machine = machine_of(TWO_SHARDS, ordering_frame_entries=ordering_frame_entries)
    for shard in (0, 1):
        append(machine, b"%d/0" % shard, first=0, shard=shard)
        append(machine, b"%d/1" % shard, first=1, shard=shard)
    published = entries_message([of(1, 1, {0: 1}), of(1, 2, {0: 1})])
    machine.tell(published, sender=PRIMARY)
    assert data_of(read(machine, 0, 1, shard=0)) == [(0, b"0/0"), (1, b"0/1")]
    return machine


def replace(machine: Machine) -> None:
    """Incarnation 2 lost the entry at 2; let it order another shard there."""
    hello = MetalogEntries(2, Epoch(1), (), committed=2)
    machine.tell(hello, sender=PRIMARY, incarnation=2)
    answer_with(machine, of(2, 2, {1: 2}))


def answer_with(machine: Machine, *replacing: Entry) -> None:
    assert machine.asked is not None
    assert (machine.asked.start, machine.asked.last) == (3, 1)
    answer = entries_message(replacing, previous=1, request=machine.asked.request)
    machine.tell(answer, sender=PRIMARY, incarnation=2)


def truth_holds(machine: Machine) -> bool:
    shown = data_of(read(machine, 0, shard=0)) + data_of(read(machine, 1, 2, shard=1))
    return shown == [(0, b"0/0"), (1, b"1/0"), (2, b"1/1")]


def test_replaced_entries_are_dropped_and_no_seqnum_has_two_records() -> None:
    machine = with_two_shards()
    replace(machine)
    assert truth_holds(machine)
    assert read(machine, 1, shard=0).unknown == (1,)
    assert machine.node.status()["replaced_entries"] == 1
    machine.tell(entries_message([of(2, 3, {0: 1})]), sender=PRIMARY, incarnation=2)
    assert data_of(read(machine, 3, shard=0)) == [(3, b"0/1")], "it is ordered again"


def test_after_a_restart_the_newer_entries_on_disk_win() -> None:
    machine = with_two_shards()
    replace(machine)
    again = machine.restarted()
    assert again.node.position == 3
    assert truth_holds(again)


def test_entries_after_a_damaged_replacement_do_not_follow_the_replaced_ones() -> None:
    """Position and count fit; only the epochs show that another entry was there."""
    machine = with_two_shards()
    replace(machine)
    replacing = len(machine.frames) - 1
    machine.tell(entries_message([of(2, 3, {0: 1})]), sender=PRIMARY, incarnation=2)
    machine.damage(replacing)
    again = machine.restarted()
    assert again.asked is not None
    assert (again.asked.start, again.asked.last) == (3, 1), "the primary cuts it off from here"
    machine.tell(entries_message([of(3, 4, {0: 1})], previous=2), sender=PRIMARY, incarnation=3)
    assert machine.restarted().node.position == 3


def test_entries_after_a_damaged_frame_are_kept_if_one_incarnation_proposed_them() -> None:
    machine = with_two_shards()
    replaced = len(machine.frames)
    machine.tell(entries_message([of(1, 3, {0: 1})]), sender=PRIMARY)
    machine.frames.insert(replaced, (FrameKind.ORDERING, b"lost", Location(9, 32, 4)))
    machine.spoilt.add(Location(9, 32, 4))
    assert machine.restarted().node.position == 4


def test_a_read_keeps_waiting_when_the_entries_that_ordered_its_record_are_replaced() -> None:
    """One of its two conditions no longer holds when the other is met."""
    machine = with_two_shards()
    wanted = ReadRecords(1, ENGINE, ShardId(1), (2,), epoch=Epoch(2))
    assert machine.tell(wanted) == []
    machine.tell(entries_message([of(1, 3, {0: 1})]), sender=PRIMARY)
    page = entries_message([of(1, 1, {0: 1}), of(2, 2, {1: 1})], committed=4)
    first = machine.tell(page, sender=PRIMARY, incarnation=2)
    second = machine.tell(entries_message([of(2, 3, {1: 1})]), sender=PRIMARY, incarnation=2)
    answers = [[m for m in messages(s) if isinstance(m, RecordsRead)] for s in (first, second)]
    assert [[data_of(answer) for answer in part] for part in answers] == [[], [[(2, b"1/1")]]]


def test_a_checkpoint_has_the_proposer_of_each_entry() -> None:
    machine = with_two_shards()
    machine.take_checkpoint()
    again = machine.restarted()
    replace(again)
    assert truth_holds(again)
    again.take_checkpoint()
    assert truth_holds(again.restarted())


def test_replacements_of_checkpointed_entries_are_recovered_from_the_journal() -> None:
    machine = with_two_shards()
    machine.take_checkpoint()
    replace(machine)
    assert truth_holds(machine.restarted())


def test_entries_that_only_a_damaged_checkpoint_had_are_journaled_again() -> None:
    """The checkpoint's entries were in no frame at the power loss."""
    machine = with_two_shards(ordering_frame_entries=2)
    machine.take_checkpoint()
    older, frames = machine.checkpoint, len(machine.frames)
    machine.tell(entries_message([of(1, 3, {1: 2})]), sender=PRIMARY)
    machine.take_checkpoint()
    assert len(machine.frames) == frames, "the entry is in memory and in the checkpoint alone"
    again = machine.restarted()
    again.tell(entries_message([of(1, 4, {}), of(1, 5, {})]), sender=PRIMARY)
    assert again.frames[-1][0] is FrameKind.ORDERING
    for checkpoint in (again.checkpoint, older, None):
        again.checkpoint = checkpoint
        last = again.restarted()
        assert last.node.position == 6
        assert data_of(read(last, 2, 3, shard=1)) == [(2, b"1/0"), (3, b"1/1")]


def test_a_page_that_shows_the_difference_itself_needs_no_question() -> None:
    machine = with_two_shards()
    page = entries_message([of(1, 1, {0: 1}), of(2, 2, {1: 2})])
    machine.tell(page, sender=PRIMARY, incarnation=2)
    assert truth_holds(machine)


def test_a_node_that_detects_the_replacement_late_asks_and_corrects_itself() -> None:
    """The first message follows entries that differ here, or begins beyond its end."""
    for start in (3, 4):
        machine = with_two_shards()
        late = [of(2, position, {0: 1}) for position in (3, 4)][start - 3 :]
        machine.tell(entries_message(late), sender=PRIMARY, incarnation=2)
        assert machine.node.position == 3, "no entry is applied after one that differs"
        answer_with(machine, of(2, 2, {1: 2}), of(2, 3, {0: 1}), of(2, 4, {}))
        assert truth_holds(machine)


def test_lost_entries_are_dropped_before_they_are_replaced() -> None:
    machine = with_two_shards()
    machine.tell(MetalogEntries(2, Epoch(1), (), committed=2), sender=PRIMARY, incarnation=2)
    assert machine.asked is not None
    nothing = MetalogEntries(2, Epoch(1), (), 2, machine.asked.request)
    machine.tell(nothing, sender=PRIMARY, incarnation=2)
    assert machine.node.position == 2
    assert machine.node.status()["tail"] == 1


def test_each_new_incarnation_of_the_primary_is_asked_whether_the_copy_is_right() -> None:
    machine = with_two_shards()
    hello = MetalogEntries(3, Epoch(1), (), committed=3)
    sent = machine.tell(hello, sender=PRIMARY, incarnation=2)
    (asked,) = [m for m in messages(sent, PRIMARY) if isinstance(m, MetalogWanted)]
    assert (asked.start, asked.last) == (3, 1)
    machine.tell(MetalogEntries(3, Epoch(1), (), 3, asked.request), sender=PRIMARY, incarnation=2)
    assert machine.node.position == 3
    assert machine.node.status()["replaced_entries"] == 0


def test_a_new_incarnation_of_the_primary_gets_a_report_at_once() -> None:
    machine = with_two_shards()
    hello = MetalogEntries(3, Epoch(1), (), committed=3)
    sent = machine.tell(hello, sender=PRIMARY, incarnation=2)
    (report,) = [m for m in messages(sent, PRIMARY) if isinstance(m, ShardProgress)]
    assert report.stored == {ShardId(0): (1, 2), ShardId(1): (1, 2)}


def test_a_trim_that_was_replaced_is_not_counted() -> None:
    machine = with_two_shards()
    floor = Floor(7, 1, of_log=False)
    trim = Trim(3, ViewNumber(1), Epoch(1), 0, (floor,))
    machine.tell(entries_message([trim]), sender=PRIMARY)
    assert machine.node.status()["trims"] == 1
    hello = MetalogEntries(3, Epoch(1), (), committed=3)
    machine.tell(hello, sender=PRIMARY, incarnation=2)
    assert machine.asked is not None
    answer = entries_message([of(2, 3, {1: 1})], previous=1, request=machine.asked.request)
    machine.tell(answer, sender=PRIMARY, incarnation=2)
    assert machine.node.status()["trims"] == 0
    assert machine.node._ordering.trimmed_at == 0


@pytest.mark.parametrize(
    "message",
    [
        MetalogEntries(-1, Epoch(0), (), 0),
        MetalogEntries(3, Epoch(1), (of(1, 3, {0: 1}),), committed=3),
        MetalogEntries(3, Epoch(1), (of(1, 4, {0: 1}),), committed=5),
        MetalogEntries(3, Epoch(1), (of(1, 3, {0: -1}),), committed=4),
        MetalogEntries(3, Epoch(4), (of(3, 3, {0: 1}),), committed=4),
        MetalogEntries(3, Epoch(1), (new_writers(3, 0),), committed=4),
    ],
)
def test_entries_that_no_primary_sends_are_ignored(message: MetalogEntries) -> None:
    machine = with_two_shards()
    machine.tell(message, sender=PRIMARY, incarnation=2)
    assert machine.node.position == 3


def test_a_new_incarnation_makes_the_node_announce_last_positions_to_index_nodes() -> None:
    """Index nodes see at once whether their entries were replaced, and otherwise continue to
    answer.
    """
    machine = with_two_shards()
    hello = MetalogEntries(2, Epoch(1), (), committed=2)
    machine.tell(hello, sender=PRIMARY, incarnation=2)
    assert machine.asked is not None
    replacing = of(2, 2, {1: 2})
    answer = entries_message([replacing], previous=1, request=machine.asked.request)
    sent = messages(machine.tell(answer, sender=PRIMARY, incarnation=2))
    data = [message for message in sent if isinstance(message, IndexData)]
    assert {message.copy_of for message in data} == {2}
    assert [(b.position, b.epoch, b.previous) for d in data for b in d.blocks if not b.parts] == [
        (2, 2, 1),
        (1, 1, 0),
    ]
    trims = next(message for message in sent if isinstance(message, TagFloors))
    assert (trims.start, trims.trims, trims.epoch, trims.copy_of) == (0, 0, 0, 2)


def test_a_read_of_a_new_incarnation_waits_for_its_first_entry() -> None:
    """Until then the replica may show replaced entries."""
    machine = with_two_shards()
    wanted = ReadRecords(7, ENGINE, ShardId(0), (0,), epoch=Epoch(2))
    assert messages(machine.tell(wanted)) == []
    replace(machine)
    assert truth_holds(machine)
    machine.tell(ReadRecords(8, ENGINE, ShardId(0), (0,), epoch=Epoch(2)))


# --- replaced writers

E1, E2, E3 = Epoch(1), Epoch(2), Epoch(3)


def taken_over() -> Machine:
    """Two records of writer 1 are ordered; the entry after them names writer 2, which stored two
    further ones, of which one is ordered.
    """
    machine = machine_of()
    append(machine, b"0", b"1", first=0)
    machine.tell(entries_message([of(1, 1, {0: 2})]), sender=PRIMARY)
    machine.open(2)
    machine.tell(AppendBatch(batch(2, [b"2"], epoch=2)), AppendBatch(batch(3, [b"3"], epoch=2)))
    machine.tell(entries_message([of(1, 3, {0: 1})]), sender=PRIMARY)
    return machine


def replace_writer(machine: Machine, *replacing: Entry) -> list[Send]:
    """Incarnation 2 lost the entries from the one at 2 on; let it announce this, and propose
    others.
    """
    return machine.tell(
        entries_message([of(1, 1, {0: 2}), *replacing]), sender=PRIMARY, incarnation=2
    )


def names_again(position: int, epoch: int) -> NewWriters:
    return NewWriters(position, ViewNumber(1), E2, {SHARD: Epoch(epoch)})


def reports(machine: Machine) -> tuple[Epoch, int]:
    sent = messages(machine.turn(Started(Epoch(2))), PRIMARY)
    (report,) = [message for message in sent if isinstance(message, ShardProgress)]
    return report.stored[SHARD]


def runs(machine: Machine) -> list[Machine]:
    """Return the node, and the node after a restart without and with a checkpoint."""
    bare = machine.restarted()
    machine.take_checkpoint()
    return [machine, bare, machine.restarted()]


def test_replacing_an_entry_restores_the_previous_writer_and_keeps_the_records() -> None:
    machine = taken_over()
    replace_writer(machine, of(2, 2, {}))
    for run in runs(machine):
        assert run.node.position == 3
        assert run.node.records == 4
        assert reports(run) == (E1, 2), "those of the other writer do not count"


def test_a_writer_that_is_named_again_finds_its_records() -> None:
    machine = taken_over()
    replace_writer(machine, of(2, 2, {}))
    sent = machine.tell(entries_message([names_again(3, 2)]), sender=PRIMARY, incarnation=2)
    assert ShardStored(SHARD, E2, 4) in messages(sent, ENGINE)
    machine.tell(entries_message([of(2, 4, {0: 2})]), sender=PRIMARY, incarnation=2)
    for run in runs(machine):
        assert data_of(read(run, 0, 1, 2, 3)) == [(n, b"%d" % n) for n in range(4)]


def test_a_later_writer_that_is_named_instead_drops_the_records_of_the_replaced_one() -> None:
    machine = taken_over()
    replace_writer(machine, names_again(2, 3))
    for run in runs(machine):
        assert reports(run) == (E3, 2)
        assert run.node.records == 2
    machine.tell(AppendBatch(batch(2, [b"new"], epoch=3)))
    machine.tell(entries_message([of(2, 3, {0: 1})]), sender=PRIMARY, incarnation=2)
    assert data_of(read(machine, 2)) == [(2, b"new")]


def test_records_that_are_ordered_as_the_earlier_writers_are_not_served_from_the_replaced_one() -> (
    None
):
    """Other replicas have not applied the replaced entry, and have them."""
    machine = Machine(view_of(storage_nodes=2, replicas=2), config_of())
    machine.open()
    append(machine, b"0", b"1", first=0)
    append(machine, b"right", first=2)
    machine.tell(entries_message([of(1, 1, {0: 2})]), sender=PRIMARY)
    machine.open(2)
    machine.tell(AppendBatch(batch(2, [b"wrong"], epoch=2)))
    machine.tell(entries_message([of(1, 3, {0: 1})]), sender=PRIMARY)
    machine.tell(AppendBatch(batch(3, [b"wrong, too"], epoch=2)))
    replace_writer(machine, of(2, 2, {0: 1}))
    for run in runs(machine):
        answer = read(run, 1, 2)
        assert (data_of(answer), answer.unknown) == ([(1, b"1")], (2,))
        assert run.node.records == 3


def test_records_of_two_replaced_writers_do_not_count_as_the_earlier_ones() -> None:
    machine = taken_over()
    machine.tell(entries_message([of(1, 4, {0: 1})]), sender=PRIMARY)
    machine.open(3)
    machine.tell(AppendBatch(batch(4, [b"4"], epoch=3)))
    machine.tell(entries_message([of(1, 6, {0: 1})]), sender=PRIMARY)
    replace_writer(machine, of(2, 2, {}))
    for run in runs(machine):
        assert reports(run) == (E1, 2)


def test_a_batch_of_the_replaced_writer_that_is_sent_again_while_it_is_written_counts_once() -> (
    None
):
    machine = taken_over()
    machine.holding = True
    again = AppendBatch(batch(4, [b"4"], epoch=2))
    machine.tell(again)
    replace_writer(machine, names_again(2, 2))
    machine.tell(again)
    machine.confirm()
    machine.holding = False
    sent = machine.tell(entries_message([of(2, 3, {0: 3})]), sender=PRIMARY, incarnation=2)
    for run in runs(machine):
        assert run.node.records == 5
        assert data_of(read(run, 2, 3, 4)) == [(n, b"%d" % n) for n in (2, 3, 4)]
    assert machine.node._appends._unordered_bytes == 0
    parts = [
        part
        for message in messages(sent, ENGINE)
        if isinstance(message, IndexData)
        for block in message.blocks
        for part in block.parts
    ]
    assert all((part.count, len(part.tag_counts)) == (3, 3) for part in parts)
