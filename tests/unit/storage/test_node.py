"""Claims of a storage node about order, reads, index data and restarts, one each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest

from indilog.base.ids import Epoch, NodeId, ShardId
from indilog.kernel.index_schedule import NO_POSITION
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Received, Send, TermBegun
from indilog.wire.messages import (
    AppendBatch,
    AuxSet,
    IndexBlock,
    IndexData,
    IndexDataWanted,
    LookupResult,
    MetalogEntries,
    MetalogWanted,
    ReadRecords,
    RecordsRead,
    ShardTags,
    StoredRecord,
    TermIs,
)
from tests.support.metalog_messages import entries_message, nothing_more
from tests.unit.storage.machine import (
    ENGINE,
    INDEX,
    PRIMARY,
    SHARD,
    Machine,
    append,
    batch,
    config_of,
    data_of,
    entries,
    entry,
    machine_of,
    messages,
    new_writers,
    progress,
    read,
)


def starts_asked(sent: Iterable[Send]) -> list[int]:
    """Return from where on the primary is asked for entries, each time."""
    return [m.start for m in messages(sent, PRIMARY) if isinstance(m, MetalogWanted)]


# --- order


def test_equal_localids_of_two_shards_get_different_seqnums() -> None:
    """A17: seqnums ascend by shard id inside an entry (Scalog 4.1)."""
    machine = machine_of(view_of(engines=2))
    append(machine, b"a0", b"a1", first=0, shard=0)
    append(machine, b"b0", b"b1", b"b2", first=0, shard=1)
    machine.tell(entries({1: 3, 0: 2}), sender=PRIMARY)
    assert data_of(read(machine, 0, 1, shard=0)) == [(0, b"a0"), (1, b"a1")]
    assert data_of(read(machine, 2, 3, 4, shard=1)) == [(2, b"b0"), (3, b"b1"), (4, b"b2")]


def test_one_cut_over_a_rolled_segment_numbers_all_records() -> None:
    """A18: a cut may cover two segments."""
    machine = machine_of()
    for first in range(8):
        append(machine, b"%d" % first * 1000, first=first)
    assert len({location.segment for _, _, location in machine.frames}) > 2
    machine.tell(entries({0: 8}), sender=PRIMARY)
    for run in (machine, machine.restarted()):
        answer = read(run, *range(8))
        assert data_of(answer) == [(n, b"%d" % n * 1000) for n in range(8)]


def test_entries_are_applied_once_and_in_order() -> None:
    machine = machine_of()
    append(machine, b"a", first=0)
    append(machine, b"b", first=1)
    first, second = entries({0: 1}), entries({0: 1}, start=2)
    machine.tell(second, sender=PRIMARY)
    assert machine.node.position == 1
    machine.tell(first, first, second, sender=PRIMARY)
    assert machine.node.position == 3
    assert machine.restarted().node.position == 3
    assert data_of(read(machine, 0, 1)) == [(0, b"a"), (1, b"b")]


def test_the_ordering_journal_takes_several_entries_a_frame_and_a_restart_asks_for_the_rest() -> (
    None
):
    machine = machine_of(ordering_frame_entries=2)
    for n in range(3):
        append(machine, b"%d" % n, first=n)
        machine.tell(entries({0: 1}, start=n + 1), sender=PRIMARY)
    assert [kind for kind, _, _ in machine.frames].count(FrameKind.ORDERING) == 2
    after = machine.restarted()
    assert after.node.position == 3
    after.tell(entries({0: 1}, start=3), sender=PRIMARY)
    assert data_of(read(after, 0, 1, 2)) == [(n, b"%d" % n) for n in range(3)]


def test_entries_of_a_gap_are_requested_at_once_and_again() -> None:
    machine = machine_of(resend_s=0.5)
    late = entries({0: 1}, start=4)
    assert starts_asked(machine.tell(late, sender=PRIMARY)) == [1]
    assert machine.tell(late, sender=PRIMARY) == []
    assert starts_asked(machine.wait(0.6)) == [1]
    assert machine.asked is not None
    page = entries_message([entry(1, {0: 1})], committed=5, request=machine.asked.request)
    assert starts_asked(machine.tell(page, sender=PRIMARY)) == [2]


def test_after_a_start_entries_are_asked_for_until_an_answer_brings_nothing_new() -> None:
    machine = Machine(config=config_of(resend_s=0.5))
    assert starts_asked(machine.started) == [0]
    assert starts_asked(machine.wait(0.6)) == [0]
    machine.tell(entries({0: 1}, {0: 1}, start=0), sender=PRIMARY)
    assert machine.node._ordering.reader.behind, "those entries were not the answer"
    assert machine.nothing_more() == []
    assert not machine.busy


def test_an_answer_to_an_earlier_question_ends_no_catch_up() -> None:
    """The answer may be delayed, and newer entries may exist."""
    machine = Machine(config=config_of(resend_s=0.5))
    first = machine.asked
    machine.wait(0.6)
    assert first is not None
    assert machine.tell(nothing_more(first), sender=PRIMARY) == []
    assert machine.node._ordering.reader.behind
    machine.nothing_more()
    assert not machine.node._ordering.reader.behind


def test_a_repeated_answer_asks_for_nothing_and_ends_nothing() -> None:
    machine = Machine(config=config_of(resend_s=0.5))
    assert machine.asked is not None
    page = entries_message([entry(0, {0: 1})], committed=3, request=machine.asked.request)
    assert starts_asked(machine.tell(page, sender=PRIMARY)) == [1]
    assert machine.tell(page, sender=PRIMARY) == []
    assert machine.node._ordering.reader.behind


def test_a_catch_up_of_many_pages_has_no_pauses() -> None:
    machine = Machine()
    for position in range(20):
        assert machine.asked is not None
        assert machine.asked.start == position
        page = [entry(position, {0: 1})]
        machine.tell(
            entries_message(page, committed=20, request=machine.asked.request), sender=PRIMARY
        )
    assert not machine.node._ordering.reader.behind


def test_unanswered_questions_are_resent_with_growing_pauses() -> None:
    machine = Machine(config=config_of(resend_s=0.25, resend_s_max=2.0))
    asked = 0
    for _ in range(400):
        asked += len(starts_asked(machine.wait(0.1)))
    assert asked <= 4 + 40 / 2


def test_entries_of_another_node_than_the_primary_are_ignored() -> None:
    machine = machine_of()
    machine.tell(entries({0: 1}), sender=NodeId("sequencer-9"))
    assert machine.node.position == 1


def test_entries_of_an_earlier_incarnation_of_the_primary_are_ignored() -> None:
    machine = machine_of()
    machine.tell(entries({0: 1}), sender=PRIMARY, incarnation=2)
    machine.tell(entries({0: 1}, start=2), sender=PRIMARY, incarnation=1)
    assert machine.node.position == 2


# --- reads


def test_a_read_waits_until_its_record_is_ordered() -> None:
    machine = machine_of()
    append(machine, b"a", b"b", first=0)
    assert machine.tell(ReadRecords(1, ENGINE, SHARD, (1,)), sender=INDEX) == []
    sent = machine.tell(entries({0: 2}), sender=PRIMARY)
    (answer,) = [m for m in messages(sent, ENGINE) if isinstance(m, RecordsRead)]
    assert answer == RecordsRead(1, SHARD, (StoredRecord(1, 5, 0, b"log", b"b", None),), ())


def test_a_waiting_read_requests_entries_and_times_out() -> None:
    machine = machine_of(resend_s=0.5, read_timeout_s=2.0)
    machine.tell(ReadRecords(1, ENGINE, SHARD, (1,)))
    assert starts_asked(machine.wait(0.5)) == [1]
    assert starts_asked(machine.wait(1.0)) == [1]
    machine.wait(1.0)
    assert machine.ignored == ["waited too long for its metalog position"]
    assert machine.node.status()["reads_waiting"] == 0
    machine.wait(1.0)
    assert not machine.busy


def test_a_read_that_is_repeated_while_it_waits_is_answered_once() -> None:
    machine = machine_of()
    append(machine, b"a", first=0)
    wanted = ReadRecords(1, ENGINE, SHARD, (0,))
    machine.tell(wanted, wanted)
    sent = machine.tell(entries({0: 1}), sender=PRIMARY)
    assert len([m for m in messages(sent) if isinstance(m, RecordsRead)]) == 1


def test_the_number_of_waiting_reads_is_bounded() -> None:
    machine = machine_of(lookups_pending_max=2)
    machine.tell(*[ReadRecords(n, ENGINE, SHARD, (9,)) for n in range(3)])
    assert machine.ignored == ["too many reads wait for their metalog position"]


def test_records_of_another_shard_and_lost_records_are_unknown() -> None:
    machine = machine_of(view_of(engines=2))
    append(machine, b"a", first=0, shard=0)
    machine.tell(entries({0: 1, 1: 1}), sender=PRIMARY)
    assert read(machine, 0, 1, shard=0).unknown == (1,)
    assert read(machine, 0, 1, shard=1) == RecordsRead(1, ShardId(1), (), (0, 1))


def test_a_wiped_replica_answers_unknown_and_continues() -> None:
    """PITFALLS 14: it must never answer that there is no record."""
    machine = machine_of()
    machine.tell(entries({0: 3}), sender=PRIMARY)
    assert read(machine, 0, 1, 2) == RecordsRead(1, SHARD, (), (0, 1, 2))
    assert read(machine.restarted(), 2).unknown == (2,)


@pytest.mark.parametrize("tags", [True, False])
def test_damaged_records_of_a_batch_are_unknown_and_counted(*, tags: bool) -> None:
    machine = machine_of(record_cache_bytes_max=0)
    append(machine, b"a", b"b", first=0)
    append(machine, b"c", first=2)
    machine.tell(entries({0: 3}), sender=PRIMARY)
    machine.damage([kind for kind, _, _ in machine.frames].index(FrameKind.RECORDS), tags=tags)
    for run in (machine, machine.restarted()):
        answer = read(run, 0, 1, 2)
        assert data_of(answer) == ([(2, b"c")] if tags else [(0, b"a"), (2, b"c")])
        assert answer.unknown == ((0, 1) if tags else (1,))
        assert "a record batch on disk is damaged" in run.ignored or run is not machine
        status = run.node.status()
        assert (status["lost_records"], status["first_lost_seqnum"]) == ((2, 0) if tags else (1, 1))


def test_an_intact_batch_from_another_place_is_not_returned() -> None:
    """A disk may return an intact block of another place."""
    machine = machine_of(record_cache_bytes_max=0)
    append(machine, b"a", first=0)
    append(machine, b"b", first=1)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    one, two = (i for i, frame in enumerate(machine.frames) if frame[0] is FrameKind.RECORDS)
    frames = machine.frames
    frames[one] = (FrameKind.RECORDS, frames[two][1], frames[one][2])
    assert read(machine, 0, 1).unknown == (0,)


def test_recent_batches_are_read_from_memory_and_old_ones_from_disk() -> None:
    machine = machine_of(record_cache_bytes_max=1000)
    append(machine, b"old" * 200, first=0)
    append(machine, b"new" * 200, first=1)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    assert data_of(read(machine, 1)) == [(1, b"new" * 200)]
    assert machine.reads == 0
    assert data_of(read(machine, 0)) == [(0, b"old" * 200)]
    assert machine.reads == 1


def test_an_answer_is_bounded_and_omits_the_rest() -> None:
    machine = machine_of(page_bytes_max=1000, record_cache_bytes_max=0)
    for first in range(6):
        append(machine, b"x" * 400, first=first)
    machine.tell(entries({0: 6}), sender=PRIMARY)
    answer = read(machine, *range(6))
    assert [record.seqnum for record in answer.records] == [0, 1, 2]
    assert answer.unknown == ()
    append(machine, b"y" * 5000, b"y" * 5000, first=6)
    machine.tell(entries({0: 2}, start=2), sender=PRIMARY)
    assert [record.seqnum for record in read(machine, 6, 7).records] == [6]


def test_a_page_reads_each_batch_once_in_disk_order() -> None:
    machine = machine_of(record_cache_bytes_max=0)
    for first in range(0, 30, 3):
        append(machine, b"a", b"b", b"c", first=first)
    machine.tell(entries({0: 30}), sender=PRIMARY)
    assert len(read(machine, *range(30)).records) == 30
    assert len(machine.read_places) == 10
    assert machine.read_places == sorted(machine.read_places)


def test_concurrent_reads_share_disk_reads() -> None:
    machine = machine_of(record_cache_bytes_max=0)
    append(machine, b"a", b"b", first=0)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    sent = machine.tell(*[ReadRecords(n, ENGINE, SHARD, (n % 2,)) for n in range(4)])
    assert [m.records[0].data for m in messages(sent) if isinstance(m, RecordsRead)] == [
        b"a", b"b", b"a", b"b",
    ]  # fmt: skip
    assert machine.reads == 1


def test_reads_in_flight_are_bounded_in_bytes() -> None:
    machine = machine_of(record_cache_bytes_max=0, page_bytes_max=500)
    for first in range(10):
        append(machine, b"x" * 400, first=first)
    machine.tell(entries({0: 10}), sender=PRIMARY)
    under_way: list[int] = []
    whole = machine.node._reads.advance

    def watched() -> list[object]:
        effects = whole()
        under_way.append(machine.node._reads._reading_bytes)
        return list(effects)

    machine.node._reads.advance = watched  # type: ignore[method-assign, assignment]
    sent = machine.tell(*[ReadRecords(n, ENGINE, SHARD, (n,)) for n in range(10)])
    assert len(messages(sent)) == 10
    assert 0 < max(under_way) <= 2 * 500


def test_impossible_reads_are_ignored() -> None:
    machine = machine_of()
    machine.tell(
        ReadRecords(1, ENGINE, SHARD, ()),
        ReadRecords(1, ENGINE, SHARD, (-1,)),
        ReadRecords(1, ENGINE, ShardId(7), (1,)),
        IndexDataWanted(-1, 5, 1),
        IndexDataWanted(0, 5, 0),
        AuxSet(ShardId(7), 0, b""),
        LookupResult(1, (), ()),
    )
    assert len(machine.ignored) == 7


def test_aux_data_comes_with_the_record_while_there_is_room() -> None:
    machine = machine_of(aux_cache_bytes_max=300)
    append(machine, b"a", b"b", first=0)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    machine.tell(AuxSet(SHARD, 0, b"x" * 200))
    assert read(machine, 0).records[0].aux == b"x" * 200
    machine.tell(AuxSet(SHARD, 1, b"y" * 200), AuxSet(SHARD, 0, b"z" * 900))
    assert [record.aux for record in read(machine, 0, 1).records] == [None, b"y" * 200]


def test_empty_aux_data_is_bounded_too() -> None:
    machine = machine_of(aux_cache_bytes_max=640)
    machine.tell(*[AuxSet(SHARD, n, b"") for n in range(100)])
    assert len(machine.node._aux) == 10


# --- index data


def tags_of(part: ShardTags) -> list[list[int]]:
    """Return the tags of each record."""
    tags = array("Q", part.tags).tolist()
    return [[tags.pop(0) for _ in range(count)] for count in part.tag_counts]


def blocks_to(machine: Machine, node: NodeId, cuts: MetalogEntries) -> list[IndexBlock]:
    data = messages(machine.tell(cuts, sender=PRIMARY), node)
    return [b for message in data if isinstance(message, IndexData) for b in message.blocks]


def test_index_data_goes_to_one_index_shard_by_position_and_to_every_engine() -> None:
    """Thesis 5.3.1: round robin by metalog position."""
    view = view_of(index_shards=2, index_replicas=2, engines=2)
    machine = machine_of(view)
    append(machine, b"a", b"b", first=0)
    append(machine, b"c", first=2)
    append(machine, b"d", first=3)
    sent = machine.tell(entries({0: 2}, {0: 1}, {0: 1}), sender=PRIMARY)
    positions = {
        send.to: [block.position for block in send.message.blocks]
        for send in sent
        if isinstance(send.message, IndexData)
    }
    assert positions == {
        "index-0-0": [2], "index-0-1": [2], "index-1-0": [1, 3], "index-1-1": [1, 3],
        "engine-0": [1, 2, 3], "engine-1": [1, 2, 3],
    }  # fmt: skip


def test_a_block_has_the_tags_of_its_records_in_order() -> None:
    machine = machine_of()
    append(machine, b"a", b"b", first=0)
    append(machine, b"c", first=2)
    (block,) = blocks_to(machine, ENGINE, entries({0: 3}))
    assert (block.position, block.tail, block.productive) == (1, 3, (SHARD,))
    (part,) = block.parts
    assert (part.shard, part.first_seqnum, part.count) == (SHARD, 0, 3)
    assert tags_of(part) == [[7], [7, 100], [7]]


def test_the_first_replica_of_a_shard_sends_its_index_data() -> None:
    view = view_of(storage_nodes=2, replicas=2, engines=2)
    cuts = entries({0: 1, 1: 1}, {1: 1})
    blocks = []
    for node in view.storage_nodes:
        machine = machine_of(view, node)
        for shard in (0, 1):
            append(machine, b"a", first=0, shard=shard)
            append(machine, b"b", first=1, shard=shard)
        blocks.append(blocks_to(machine, ENGINE, cuts))
    assert [[(b.position, b.productive, [p.shard for p in b.parts]) for b in of_node]
            for of_node in blocks] == [
        [(1, (0, 1), [0])],
        [(1, (0, 1), [1]), (2, (1,), [1])],
    ]  # fmt: skip


def test_an_entry_that_ordered_nothing_is_announced_by_two_nodes() -> None:
    view = view_of(storage_nodes=3, replicas=3)
    for ordering_nothing in (entry(1, {}), new_writers(1, 2)):
        reported = [
            blocks_to(machine_of(view, node), ENGINE, entries_message((ordering_nothing,)))
            for node in view.storage_nodes
        ]
        block = IndexBlock(1, 0, (), (), Epoch(1))
        assert reported == [[block], [block], []]


def test_index_data_is_resent_on_demand_also_after_a_restart() -> None:
    machine = machine_of(view_of(storage_nodes=2, replicas=2, engines=2), NodeId("storage-1"))
    for shard in (0, 1):
        append(machine, b"a", b"b", first=0, shard=shard)
        append(machine, b"c", first=2, shard=shard)
    machine.tell(entries({0: 2}, {0: 1, 1: 3}, {}), sender=PRIMARY)
    wanted = IndexDataWanted(1, 99, 1)
    (answer,) = messages(machine.tell(wanted, sender=INDEX), INDEX)
    assert isinstance(answer, IndexData)
    assert [(b.position, b.tail, b.productive) for b in answer.blocks] == [
        (1, 2, (0,)), (2, 6, (0, 1)), (3, 6, ()),
    ]  # fmt: skip
    assert [[(p.shard, p.first_seqnum, tags_of(p)) for p in b.parts] for b in answer.blocks] == [
        [(0, 0, [[7], [7, 100]])],
        [(0, 2, [[7]]), (1, 3, [[7], [7, 100], [7]])],
        [],
    ]
    assert messages(machine.restarted().tell(wanted, sender=INDEX), INDEX) == [answer]


def test_index_data_is_sent_in_steps_and_empty_beyond_the_applied_metalog() -> None:
    machine = machine_of()
    machine.tell(entries(*[{}] * 10), sender=PRIMARY)
    (answer,) = messages(machine.tell(IndexDataWanted(1, 8, 3), sender=INDEX), INDEX)
    assert isinstance(answer, IndexData)
    assert [block.position for block in answer.blocks] == [1, 4, 7]
    beyond = machine.tell(IndexDataWanted(11, 2**62, 3), sender=INDEX)
    assert messages(beyond, INDEX) == [IndexData((), Epoch(1))]


@pytest.mark.parametrize(("end", "asked"), [(12, [11]), (NO_POSITION, [])])
def test_only_a_request_up_to_an_unknown_position_makes_the_node_ask_for_entries(
    end: int, asked: list[int]
) -> None:
    """An index node that starts asks for all that there is, and knows of nothing further."""
    machine = machine_of()
    machine.tell(entries(*[{}] * 10), sender=PRIMARY)
    assert starts_asked(machine.tell(IndexDataWanted(0, end, 1), sender=INDEX)) == asked


@pytest.mark.parametrize("page_bytes_max", [1, 1 << 22])
def test_an_answer_of_index_data_is_bounded_and_makes_progress(page_bytes_max: int) -> None:
    machine = machine_of(record_cache_bytes_max=0, page_bytes_max=page_bytes_max)
    many = range(1000, 1100)
    for first in range(0, 2000, 100):
        machine.tell(AppendBatch(batch(first, [b""] * 100, tags=many)))
    machine.tell(entries({0: 1900}, *[{0: 100}], *[{}] * 2000), sender=PRIMARY)
    (answer,) = messages(machine.tell(IndexDataWanted(1, 2**62, 1), sender=INDEX), INDEX)
    assert isinstance(answer, IndexData)
    assert [block.position for block in answer.blocks] == [1]
    (rest,) = messages(machine.tell(IndexDataWanted(2, 2**62, 1), sender=INDEX), INDEX)
    assert isinstance(rest, IndexData)
    assert len(rest.blocks) == 1024


def test_a_partly_read_position_is_left_for_the_next_answer() -> None:
    machine = machine_of(record_cache_bytes_max=0, page_bytes_max=1)
    for first in range(0, 2000, 100):
        machine.tell(AppendBatch(batch(first, [b""] * 100, tags=range(1000, 1100))))
    machine.tell(entries({0: 600}, {0: 1400}), sender=PRIMARY)
    for position in (1, 2):
        wanted = IndexDataWanted(position, 2**62, 1)
        (answer,) = messages(machine.tell(wanted, sender=INDEX), INDEX)
        assert isinstance(answer, IndexData)
        assert [(b.position, len(b.parts)) for b in answer.blocks] == [(position, 1)]


def test_index_data_after_a_takeover_covers_the_new_writers_records() -> None:
    machine = machine_of()
    machine.tell(AppendBatch(batch(0, tags=(1,))), AppendBatch(batch(1, tags=(2,))))
    blocks = blocks_to(machine, ENGINE, entries({0: 1}))
    machine.open(2)
    machine.tell(AppendBatch(batch(1, epoch=2, tags=(3,))))
    blocks += blocks_to(machine, ENGINE, entries({0: 1}, start=3))
    assert [tags_of(block.parts[0]) for block in blocks] == [[[1]], [[3]]]


def test_a_lost_batch_is_left_out_of_pushed_index_data_and_has_no_tags_on_demand() -> None:
    machine = machine_of(view_of(engines=2))
    append(machine, b"a", first=0, shard=1)
    (block,) = blocks_to(machine, ENGINE, entries({0: 1, 1: 1}))
    assert block.productive == (0, 1)
    assert [part.shard for part in block.parts] == [1]
    (answer,) = messages(machine.tell(IndexDataWanted(1, 2, 1), sender=INDEX), INDEX)
    assert isinstance(answer, IndexData)
    assert [(part.shard, part.tags) for part in answer.blocks[0].parts] == [
        (0, b""),
        (1, block.parts[0].tags),
    ], "no other replica has the batch: it has no tags any more"


def test_a_cut_inside_a_batch_is_sliced() -> None:
    machine = machine_of()
    append(machine, b"a", b"b", b"c", first=0)
    machine.tell(entries({0: 1}, {0: 2}), sender=PRIMARY)
    (answer,) = messages(machine.tell(IndexDataWanted(1, 3, 1), sender=INDEX), INDEX)
    assert isinstance(answer, IndexData)
    assert [tags_of(block.parts[0]) for block in answer.blocks] == [
        [[7]], [[7, 100], [7, 100, 101]],
    ]  # fmt: skip


def test_a_lost_report_is_resent_although_another_entry_was_ordered_meanwhile() -> None:
    machine = machine_of(resend_s=0.5)
    append(machine, b"a", first=0)
    append(machine, b"b", first=1)
    machine.tell(entries({0: 1}), sender=PRIMARY)
    sent = machine.wait(0.6)
    assert progress({SHARD: (Epoch(1), 2)}) in messages(sent, PRIMARY)


def test_a_storage_node_reports_to_a_new_primary_and_again_when_it_announces_itself() -> None:
    machine, other = machine_of(), NodeId("sequencer-1")
    append(machine, b"a", b"b", first=0)
    begun, leads = TermBegun(Epoch(9), other), TermIs(Epoch(9), other)
    reported = progress({SHARD: (Epoch(1), 2)}, term=9)
    assert reported in messages(machine.turn(begun), other)
    assert reported in messages(machine.turn(Received(other, leads, Epoch(2))), other)
    assert reported not in messages(machine.turn(begun), other)
