"""Repair of records that the disk of a replica lost (A4, A5, decision 0009)."""

from __future__ import annotations

import pytest

from indilog.base.ids import Epoch, Instant, LocalId, NodeId, ViewNumber
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.metalog import Floor, Span, Trim
from indilog.kernel.placement import Placement
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Location, Send
from indilog.wire.messages import (
    AppendBatch,
    Batches,
    BatchesWanted,
    IndexData,
    IndexDataWanted,
    ReadRecords,
    RecordsRead,
    ShardStored,
    ShardTags,
)
from indilog_storage.batch_reads import DamagedBatch
from indilog_storage.moved_shards import MovedShards
from indilog_storage.repair import Repair
from indilog_storage.shard import Shard
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    INDEX,
    PRIMARY,
    SHARD,
    Machine,
    all_entries,
    batch,
    config_of,
    data_of,
    entries,
    messages,
    read,
)
from tests.unit.storage.replicas import (
    E1,
    E2,
    A,
    B,
    Pair,
    all_of,
    expected,
    replicated,
    shard_of,
)


def test_a_damaged_batch_is_served_by_the_other_replica_repaired_and_counted() -> None:
    """A5."""
    pair = replicated(record_cache_bytes_max=0)
    machine = pair.nodes[A]
    machine.damage([kind for kind, _, _ in machine.frames].index(FrameKind.RECORDS) + 1)
    found = pair.tell(A, ReadRecords(1, ENGINE, SHARD, (1, 2, 3, 4)))
    (answer,) = messages(found, ENGINE)
    assert isinstance(answer, RecordsRead)
    assert answer.unknown == (3,), "the data of record 2 is intact"
    assert all_of(machine, 6) == expected(6)
    status = machine.node.status()
    assert (status["damaged_batches"], status["repaired_records"]) == (1, 2)
    assert status["missing_records"] == 0
    again = machine.restarted()
    assert all_of(again, 6) == expected(6), "the repaired records are on disk"


def test_a_wiped_replica_answers_unknown_until_it_is_repaired() -> None:
    """A4."""
    pair = replicated()
    pair.wipe(A)
    machine = pair.nodes[A]
    machine.tell(all_entries({SHARD: 6}), sender=PRIMARY)
    assert read(machine, 0, 5).unknown == (0, 5)
    assert machine.node.status()["missing_records"] == 6
    assert machine.node.status()["missing_by_shard"] == {str(SHARD): 6}
    pair.settle()
    assert all_of(machine, 6) == expected(6)
    assert machine.node.status()["missing_by_shard"] == {}
    pair.restart(A)
    assert all_of(pair.nodes[A], 6) == expected(6)


def test_a_wiped_replica_gets_the_discards_of_the_other() -> None:
    """PITFALLS 17, endless repair: trimmed records cannot be fetched, and are not waited for."""
    pair = replicated()
    floor = Floor(7, 4, of_log=True)
    trim = entries_message((Trim(2, ViewNumber(1), E1, 0, (floor,)),))
    pair.tell_both(trim, sender=PRIMARY)
    pair.settle()
    assert len(pair.nodes[B].discarded) == 2
    pair.wipe(A)
    machine = pair.nodes[A]
    machine.tell(all_entries({SHARD: 6}), sender=PRIMARY)
    machine.tell(trim, sender=PRIMARY)
    pair.settle()
    assert machine.node.status()["missing_records"] == 0
    answer = read(machine, 0, 3, 4, 5)
    assert (answer.trimmed, answer.unknown, data_of(answer)) == ((0, 3), (), expected(6)[4:])


def test_a_replica_that_lacks_a_trim_does_not_apply_its_discards() -> None:
    """Index nodes get the number of trims by which the discarded records are trimmed."""
    pair = Pair(config_of(ordering_frame_entries=64))
    pair.open()
    pair.tell_both(AppendBatch(batch(0, [b"0", b"1"])))
    pair.tell_both(entries({SHARD: 2}), sender=PRIMARY)
    trim = entries_message((Trim(2, ViewNumber(1), E1, 0, (Floor(9, 2, of_log=False),)),))
    pair.tell(B, AppendBatch(batch(2, [b"2"])))
    pair.nodes[B].node._shards[SHARD].discard_all(0, 2)
    pair.tell(B, trim, sender=PRIMARY)
    pair.wipe(A)
    pair.tell(A, all_entries({SHARD: 2}), sender=PRIMARY)
    pair.settle()
    behind = pair.nodes[A]
    assert not behind.node._shards[SHARD].is_gone(0)
    assert behind.asked is not None, "it asks the primary for the trim"
    pair.tell(A, trim, sender=PRIMARY)
    for _ in range(3):
        pair.settle()
    assert behind.node._shards[SHARD].is_gone(0)


def test_a_repair_continues_after_a_restart() -> None:
    pair = replicated(20, page_bytes_max=1)
    pair.wipe(A)
    pair.tell(A, all_entries({SHARD: 20}), sender=PRIMARY)
    assert 0 < pair.nodes[A].node.status()["missing_records"] < 20
    pair.restart(A)
    pair.settle()
    assert all_of(pair.nodes[A], 20) == expected(20)
    frames = [kind for kind, _, _ in pair.nodes[A].frames]
    assert frames.count(FrameKind.REPAIRED) == 10, "nothing is fetched twice"


def test_a_repair_is_limited_in_bytes_per_second() -> None:
    """The limit is `repair_bytes_per_s`."""
    pair = replicated(20, page_bytes_max=1, repair_bytes_per_s=len(batch(0, [b"0", b"1"])))
    pair.wipe(A)
    machine = pair.nodes[A]
    pair.tell(A, all_entries({SHARD: 20}), sender=PRIMARY)
    repaired = []
    for _ in range(5):
        pair.wait(0.5)
        repaired.append(machine.node.status()["repaired_records"])
    assert repaired == [2, 4, 4, 6, 6]


def test_a_new_writer_continues_at_a_wiped_replica_after_what_is_ordered() -> None:
    """PITFALLS 14: the metalog decides where the shard continues, not an empty prefix."""
    pair = replicated()
    pair.wipe(A)
    machine = pair.nodes[A]
    machine.tell(all_entries({SHARD: 6}), sender=PRIMARY)
    pair.open(2)
    pair.tell_both(AppendBatch(batch(6, [b"6"], epoch=2)))
    pair.tell_both(entries({SHARD: 1}, start=3), sender=PRIMARY)
    assert read(machine, 6).records
    pair.settle()
    assert all_of(machine, 7) == expected(7)
    pair.restart(A)
    assert all_of(pair.nodes[A], 7) == expected(7)


def test_a_replica_whose_newest_batch_seemed_torn_continues_and_restarts() -> None:
    """A5: the metalog shows that the replica lacks a batch; it continues after that batch."""
    pair = replicated(ordering_frame_entries=64)
    machine = pair.nodes[A]
    newest = max(n for n, (kind, _, _) in enumerate(machine.frames) if kind is FrameKind.RECORDS)
    del machine.frames[newest:]
    pair.restart(A)
    machine = pair.nodes[A]
    machine.tell(entries({SHARD: 6}), sender=PRIMARY)
    assert machine.node.status()["missing_records"] == 2
    pair.tell_both(AppendBatch(batch(6, [b"6"])))
    machine.frames[:] = [
        f for f in machine.frames if f[0] is not FrameKind.ORDERING
    ]  # written late
    pair.restart(A)
    pair.tell_both(all_entries({SHARD: 6}, {SHARD: 1}), sender=PRIMARY)
    pair.settle()
    assert all_of(pair.nodes[A], 7) == expected(7)


def test_a_wiped_replica_learns_its_writer_from_the_metalog_and_notifies_it() -> None:
    pair = replicated()
    pair.wipe(A)
    machine = pair.nodes[A]
    assert messages(pair.tell(A, AppendBatch(batch(6))), ENGINE) == [], "it may not be the newest"
    assert machine.node.records == 0
    sent = machine.tell(all_entries({SHARD: 6}), sender=PRIMARY)
    assert ShardStored(SHARD, E1, 6) in messages(sent, ENGINE)
    pair.tell(A, AppendBatch(batch(6, [b"6"])))
    assert machine.node.records == 7


def test_records_that_no_replica_has_are_requested_with_growing_pauses() -> None:
    """PITFALLS 17: no endless repair."""
    pair = replicated()
    pair.wipe(A)
    machine = pair.nodes[A]
    machine.tell(all_entries({SHARD: 6}), sender=PRIMARY)
    asked = 0
    for _ in range(3600):
        sent = machine.wait(1.0)
        for message in messages(sent, B):
            assert isinstance(message, BatchesWanted)
            asked += 1
            machine.tell(Batches(SHARD, message.first, ()), sender=B)
    assert 3600 / 60 <= asked < 80


def test_a_request_without_an_answer_goes_to_another_replica() -> None:
    view = view_of(storage_nodes=3, replicas=3)
    machine = Machine(view, config_of())
    sent = machine.tell(all_entries({SHARD: 2}), sender=PRIMARY) + machine.wait(2.0)
    asked = [send.to for send in sent if isinstance(send.message, BatchesWanted)]
    assert sorted(asked) == [NodeId("storage-1"), NodeId("storage-2")]


def test_only_ordered_records_are_requested_and_sent() -> None:
    pair = replicated()
    pair.tell(B, AppendBatch(batch(6, [b"6"])))
    (given,) = messages(pair.nodes[B].tell(BatchesWanted(SHARD, 4, 9), sender=A))
    assert given == Batches(SHARD, 4, (batch(4, [b"4", b"5"]),), lacking_to=4, copy_of=E1)


def test_records_declared_lost_are_requested_although_newer_ones_are_not_ordered_yet() -> None:
    shard = shard_of()
    shard.holes.update({0: 2, 4: 6})
    shard.given_up.add(0)
    shard.ordered = 4
    view = view_of(storage_nodes=2, replicas=2)
    moved = MovedShards(A, Placement(view))
    moved.shards[SHARD] = shard
    repair = Repair(moved, config_of().node)
    (request,) = repair.conclude(Instant(1.0))
    assert isinstance(request, Send)
    assert request.message == BatchesWanted(SHARD, 0, 2)


def test_an_answer_reads_no_more_batches_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wiped replica asks for all of a shard, repeatedly."""
    pair = replicated(40, page_bytes_max=1)
    looked = 0
    whole = Shard.batch_from

    def counted(shard: Shard, localid: LocalId) -> tuple[LocalId, LocalId, Location] | None:
        nonlocal looked
        looked += 1
        return whole(shard, localid)

    monkeypatch.setattr(Shard, "batch_from", counted)
    (given,) = messages(pair.nodes[B].tell(BatchesWanted(SHARD, 0, 40), sender=A))
    assert isinstance(given, Batches)
    assert (len(given.batches), looked) == (1, 1)


@pytest.mark.parametrize(
    "stray",
    [
        b"no batch",
        batch(0, shard=1),
        batch(0, [b"x"] * 7),
        batch(40),
    ],
)
def test_an_impossible_answer_is_ignored(stray: bytes) -> None:
    pair = replicated()
    pair.wipe(A)
    machine = pair.nodes[A]
    machine.tell(all_entries({SHARD: 6}), sender=PRIMARY)
    machine.tell(Batches(SHARD, 0, (stray,)), sender=B)
    machine.wait(2.0)
    machine.tell(Batches(SHARD, 4, (batch(4),)), sender=B)
    machine.tell(Batches(SHARD, 0, (batch(0, [b"0", b"1"]),)), sender=ENGINE)
    assert machine.node.status()["missing_records"] == 6
    assert machine.node.status()["lost_records"] == 0, "the other one has them"
    assert len(machine.ignored) == 3


def test_a_batch_that_would_not_fit_into_one_hole_is_not_written() -> None:
    """Otherwise it would be fetched and written without end."""
    pair = replicated(record_cache_bytes_max=0)
    machine = pair.nodes[A]
    batches = [n for n, (kind, _, _) in enumerate(machine.frames) if kind is FrameKind.RECORDS]
    for lost in (batches[0], batches[2]):
        machine.damage(lost)
    machine.tell(ReadRecords(1, ENGINE, SHARD, (0, 1, 4, 5)))
    machine.tell(Batches(SHARD, 0, ()), sender=B)
    for wide in (batch(0, [b"x"] * 4), batch(0, [b"x"] * 6)):
        machine.tell(Batches(SHARD, 4, (wide,)), sender=B)
        machine.wait(30.0)
        machine.tell(Batches(SHARD, 0, (wide,)), sender=B)
    assert FrameKind.REPAIRED not in [kind for kind, _, _ in machine.frames]
    assert machine.node.status()["missing_records"] == 4


def damaged_single(*, tags: bool = True) -> Machine:
    """Return the only replica of three records, of which it lost the middle one, or its data."""
    machine = Machine(config=config_of(record_cache_bytes_max=0))
    machine.open()
    for first in range(3):
        machine.tell(AppendBatch(batch(first)))
    machine.tell(entries({SHARD: 3}), sender=PRIMARY)
    machine.damage(2, tags=tags)
    return machine


@pytest.mark.parametrize("tags", [True, False])
def test_a_single_replica_serves_all_records_except_lost_ones(*, tags: bool) -> None:
    machine = damaged_single(tags=tags)
    assert read(machine, 0, 1, 2).unknown == (1,)
    assert read(machine, 0, 1, 2).unknown == (1,)
    assert machine.node.status()["damaged_batches"] == 1
    assert machine.node.status()["lost_records"] == 1
    assert machine.node.status()["first_lost_seqnum"] == 1
    assert machine.node.status()["missing_by_shard"] == {}, "there is nothing to copy it from"
    machine.tell(AppendBatch(batch(3)))
    assert machine.node.records == 4


def test_permanently_lost_records_are_announced_so_that_indexes_continue_after_them() -> None:
    machine = damaged_single()
    machine.tell(IndexDataWanted(1, 2, 1), sender=INDEX)
    (answer,) = messages(machine.tell(IndexDataWanted(1, 2, 1), sender=INDEX), INDEX)
    assert isinstance(answer, IndexData)
    ((part,),) = [block.parts for block in answer.blocks]
    assert (part.count, list(part.tag_counts)) == (3, [1, 0, 1])
    assert part.lost == (LostRange(1, 2),)


def test_a_record_of_which_only_the_data_is_damaged_keeps_its_tags() -> None:
    machine = damaged_single(tags=False)
    for run in (machine, machine.restarted()):
        (answer,) = messages(run.tell(IndexDataWanted(1, 2, 1), sender=INDEX), INDEX)
        assert isinstance(answer, IndexData)
        ((part,),) = [block.parts for block in answer.blocks]
        assert (part.count, list(part.tag_counts)) == (3, [1, 1, 1])


def test_records_that_another_replica_may_have_are_left_out_of_index_data() -> None:
    pair = replicated(record_cache_bytes_max=0)
    pair.wipe(A)
    machine = pair.nodes[A]
    machine.tell(all_entries({SHARD: 6}), sender=PRIMARY)
    (answer,) = messages(machine.tell(IndexDataWanted(1, 2, 1), sender=INDEX), INDEX)
    assert isinstance(answer, IndexData)
    assert [block.parts for block in answer.blocks] == [()]


def index_part(machine: Machine) -> ShardTags | None:
    (answer,) = messages(machine.tell(IndexDataWanted(1, 2, 1), sender=INDEX), INDEX)
    assert isinstance(answer, IndexData)
    (block,) = answer.blocks
    return block.parts[0] if block.parts else None


def both_damaged() -> Pair:
    """Return two replicas that have lost the records 2 and 3, before either has asked the other."""
    pair = replicated(record_cache_bytes_max=0)
    for name in (A, B):
        machine = pair.nodes[name]
        machine.damage([kind for kind, _, _ in machine.frames].index(FrameKind.RECORDS) + 1)
        pair.nodes[name] = machine.restarted()
        pair.nodes[name].tell(entries({SHARD: 6}), sender=PRIMARY)
    return pair


def test_records_that_all_replicas_report_as_missing_are_lost() -> None:
    pair = both_damaged()
    assert index_part(pair.nodes[A]) is None, "the other one was not asked yet"
    for _ in range(2):
        pair.settle()
        for name in (A, B):
            part = index_part(pair.nodes[name])
            assert part is not None
            assert (part.count, list(part.tag_counts)) == (6, [1, 2, 0, 0, 1, 2])
            assert part.lost == (LostRange(2, 4),)
            status = pair.nodes[name].node.status()
            assert (status["lost_records"], status["first_lost_seqnum"]) == (2, 2)
            pair.restart(name)


def test_records_are_not_declared_lost_while_a_replica_is_down() -> None:
    pair = both_damaged()
    for _ in range(50):
        pair.nodes[A].wait(2.0)
    assert index_part(pair.nodes[A]) is None
    assert pair.nodes[A].node.status()["lost_records"] == 0


def test_a_replica_with_a_transient_read_error_does_not_report_records_as_missing() -> None:
    pair = both_damaged()
    machine = pair.nodes[B] = replicated(record_cache_bytes_max=0).nodes[B]
    place = [location for kind, _, location in machine.frames if kind is FrameKind.RECORDS][1]
    machine.unreadable.add(place)
    assert read(machine, 2).unknown == (2,)
    pair.settle()
    assert index_part(pair.nodes[A]) is None
    machine.unreadable.clear()
    pair.restart(B)
    pair.settle()
    assert index_part(pair.nodes[A]) == index_part(pair.nodes[B]) is not None
    assert all_of(pair.nodes[A], 6) == expected(6)


def test_records_declared_lost_are_repaired_from_a_replica_that_has_them() -> None:
    """The directory of that replica was restored."""
    pair = both_damaged()
    pair.settle()
    pair.nodes[B] = replicated(record_cache_bytes_max=0).nodes[B]
    for _ in range(30):
        pair.wait(60.0)
    part = index_part(pair.nodes[A])
    assert part is not None
    assert part.lost == ()
    assert all_of(pair.nodes[A], 6) == expected(6)
    assert pair.nodes[A].node.status()["lost_records"] == 0


def test_unreadable_records_without_another_copy_are_not_declared_lost() -> None:
    shard = Shard(SHARD, leading=True, alone=True)
    shard.store(0, 2, Location(1, 32, 10))
    assert not shard.lose(DamagedBatch(Location(1, 32, 10), readable=False))
    assert shard.location_of(0) == Location(1, 32, 10)


# --- holes


def test_holes_are_filled_in_any_order() -> None:
    shard = shard_of()
    shard.skip_to(10)
    assert shard.fill(4, 6, Location(2, 32, 10))
    assert dict(shard.holes) == {0: 4, 6: 10}
    assert shard.fill(0, 4, Location(2, 132, 10))
    assert shard.fill(8, 10, Location(2, 232, 10))
    assert not shard.fill(5, 7, Location(2, 332, 10)), "it would overlap records that are here"
    assert shard.fill(6, 8, Location(2, 432, 10))
    assert not shard.holes
    assert [shard.location_of(n) for n in (0, 5, 7, 9)] == [
        Location(2, offset, 10) for offset in (132, 32, 432, 232)
    ]
    assert shard.bytes == 40
    shard.check_invariants()


def test_a_hole_has_no_place() -> None:
    shard = shard_of((0, 2), (2, 5), (5, 6))
    assert shard.lose(DamagedBatch(Location(1, 232, 10), readable=True))
    assert not shard.lose(DamagedBatch(Location(1, 232, 10), readable=True)), "it is lost once"
    assert shard.location_of(3) is None
    assert shard.locations(0, 6) == [Location(1, 32, 10), Location(1, 532, 10)]
    assert (shard.missing, shard.bytes) == (3, 20)
    assert shard.lacks(4)
    assert not shard.lacks(5)


def test_a_new_writer_cuts_holes_too() -> None:
    shard = shard_of((0, 2))
    shard.skip_to(10)
    shard.order(Span(shard.id, 0, 0, 6))
    shard.begin(E2)
    assert (dict(shard.holes), shard.stored) == ({2: 6}, 6)
    shard.begin(Epoch(3))
    assert (dict(shard.holes), shard.stored) == ({2: 6}, 6), "these are ordered"
    shard.check_invariants()


def test_records_missed_one_after_another_are_one_hole() -> None:
    """A replica that was down requests all of them at once, not those of one entry after
    another.
    """
    shard = Shard(SHARD)
    shard.store(0, 2, Location(1, 0, 10), Epoch(1))
    for end in (4, 5, 9):
        shard.skip_to(end)
    assert dict(shard.holes) == {2: 9}
    shard.give_up(2, 5)
    shard.skip_to(12)
    assert dict(shard.holes) == {2: 5, 5: 12}
    shard.give_up(5, 12)
    shard.skip_to(13)
    assert dict(shard.holes) == {2: 5, 5: 12, 12: 13}
