"""Trims at a storage node (PITFALLS A22)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from indilog.base.ids import Epoch, Instant, NodeId, ViewNumber
from indilog.kernel.metalog import NO_FLOORS, Floor, Trim
from indilog.kernel.records import HEADER_BYTES
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind
from indilog.wire.messages import (
    IndexBlock,
    IndexData,
    IndexDataWanted,
    MetalogEntries,
    MetalogWanted,
    ReadRecords,
    RecordsRead,
)
from indilog.wire.tag_messages import Discarded, DiscardedWanted, TagFloors, TagFloorsWanted
from indilog_storage import index_data
from indilog_storage.batch_reads import DamagedBatch
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    INDEX,
    PRIMARY,
    SHARD,
    Frame,
    Machine,
    append,
    data_of,
    entries,
    machine_of,
    messages,
    read,
)

LOG, TAG = 7, 100
"""The log's tag, and the one that each second record of a batch has (`machine.batch`)."""


def trim(position: int, number: int, tag: int, until: int, *, of_log: bool) -> MetalogEntries:
    floors = (Floor(tag, until, of_log),)
    return entries_message((Trim(position, ViewNumber(1), Epoch(1), number, floors),))


def with_records() -> Machine:
    machine = machine_of()
    append(machine, b"a", b"b", first=0)
    append(machine, b"c", b"d", first=2)
    machine.tell(entries({0: 4}), sender=PRIMARY)
    return machine


def test_records_below_the_floor_of_their_log_are_trimmed_never_unknown() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    answer = read(machine, 0, 1, 2, 3)
    assert data_of(answer) == [(3, b"d")]
    assert (answer.trimmed, answer.unknown, answer.position) == ((0, 1, 2), (), 3)


def test_trimmed_records_are_answered_with_the_position_of_the_last_trim() -> None:
    """With the position of the tail, a reader would never catch up with appends."""
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    append(machine, b"e", first=4)
    machine.tell(entries({0: 1}, start=3), sender=PRIMARY)
    assert machine.node.position == 4
    for node in (machine, machine.restarted()):
        answer = read(node, 0, 4)
        assert (data_of(answer), answer.trimmed, answer.position) == ([(4, b"e")], (0,), 3)


def test_a_record_that_is_trimmed_in_all_its_tags_is_trimmed() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, TAG, 3, of_log=False), sender=PRIMARY)
    answer = read(machine, 0, 1, 2, 3)
    assert data_of(answer) == [(0, b"a"), (2, b"c"), (3, b"d")]
    assert answer.trimmed == (1,)


def test_trims_are_found_again_after_a_restart() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    assert read(machine.restarted(), 2, 3).trimmed == (2,)


def test_a_read_waits_for_the_trims_that_its_reader_has_seen() -> None:
    machine = with_records()
    asked = ReadRecords(1, ENGINE, SHARD, (1,), trims=1)
    assert messages(machine.tell(asked, sender=INDEX), ENGINE) == []
    sent = machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    (answer,) = [m for m in messages(sent, ENGINE) if isinstance(m, RecordsRead)]
    assert answer.trimmed == (1,)


def test_two_storage_nodes_announce_entries_that_concern_no_shard() -> None:
    """With only one, each trim would wait for a question while that node is down."""
    view = view_of(storage_nodes=3, replicas=3, index_shards=2)
    floor = Floor(LOG, 0, of_log=True)
    spoken: list[NodeId] = []
    for node in view.storage_nodes:
        machine = machine_of(view, node)
        sent = messages(machine.tell(trim(1, 0, LOG, 0, of_log=True), sender=PRIMARY))
        if sent:
            spoken.append(node)
            assert IndexData((IndexBlock(1, 0, (), (), Epoch(1)),), Epoch(1)) in sent
            assert TagFloors(0, 1, (floor,), position=2, epoch=Epoch(1), copy_of=Epoch(1)) in sent
    assert spoken == list(view.storage_nodes[:2])


def test_a_trim_is_announced_to_every_index_node_and_resent_on_demand() -> None:
    machine = with_records()
    sent = machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    floor = Floor(LOG, 3, of_log=True)
    for node in machine.view.index_nodes:
        reported = TagFloors(0, 1, (floor,), position=3, epoch=Epoch(1), copy_of=Epoch(1))
        assert reported in messages(sent, node)
    machine.tell(trim(3, 1, TAG, 2, of_log=False), sender=PRIMARY)
    (page,) = messages(machine.tell(TagFloorsWanted(), sender=INDEX), NodeId(INDEX))
    both = Floor(TAG, 2, of_log=False), floor
    assert page == TagFloors(None, 2, both, position=4, epoch=Epoch(1), copy_of=Epoch(1))
    (known,) = messages(
        machine.tell(TagFloorsWanted(NO_FLOORS, 2, Epoch(1)), sender=INDEX), NodeId(INDEX)
    )
    assert known == TagFloors(
        2, 2, (), position=4, epoch=Epoch(1), previous=Epoch(1), copy_of=Epoch(1)
    )


def test_a_question_beyond_the_known_trims_makes_the_node_ask_the_primary() -> None:
    """A trim orders no record that would be missed, so no other check notices its lost message."""
    for question in (IndexDataWanted(0, 5, 1), TagFloorsWanted()):
        machine = with_records()
        sent = machine.tell(question, sender=INDEX)
        (asked,) = messages(sent, PRIMARY)
        assert isinstance(asked, MetalogWanted)
        assert asked.start == 2


def waited(machine: Machine) -> Machine:
    """Run a pass of the reclaim to its end."""
    for _ in range(5):
        machine.wait(1.0)
    return machine


def gone(machine: Machine) -> list[Frame]:
    """Return the frames on the disk after the shell has performed the discards."""
    return [
        (FrameKind.GONE, payload[:HEADER_BYTES].ljust(len(payload), b"\0"), location)
        if location in machine.discarded
        else (kind, payload, location)
        for kind, payload, location in machine.frames
    ]


def test_a_batch_of_which_all_records_are_trimmed_is_discarded() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    waited(machine)
    batches = [place for kind, _, place in machine.frames if kind is FrameKind.RECORDS]
    assert machine.discarded == batches[:1]
    answer = read(machine, 0, 1, 2, 3)
    assert (data_of(answer), answer.trimmed, answer.unknown) == ([(3, b"d")], (0, 1, 2), ())
    assert machine.node.status()["discarded_bytes"] == batches[0].length


def test_discarded_records_are_trimmed_after_a_restart_and_have_no_tags() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 2, of_log=True), sender=PRIMARY)
    waited(machine)
    again = Machine(machine.view, machine.config, frames=gone(machine))
    answer = read(again, 0, 1, 2, 3)
    assert (data_of(answer), answer.trimmed) == ([(2, b"c"), (3, b"d")], (0, 1))
    sent = again.tell(IndexDataWanted(1, 2, 1), sender=INDEX)
    (page,) = [m for m in messages(sent, NodeId(INDEX)) if isinstance(m, IndexData)]
    ((part,),) = [block.parts for block in page.blocks]
    assert (part.count, part.tag_counts) == (4, bytes([0, 0, 1, 2]))


def test_an_answer_with_many_trimmed_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no tags, but a count each."""
    monkeypatch.setattr(index_data, "_COLUMNS_BYTES_MAX", 6)
    machine = machine_of()
    for first in range(8):
        append(machine, b"", b"", first=2 * first)
    machine.tell(entries(*[{0: 2}] * 8), sender=PRIMARY)
    machine.tell(trim(9, 0, LOG, 16, of_log=True), sender=PRIMARY)
    waited(waited(machine))
    answered: list[int] = []
    while len(answered) < 8:
        wanted = IndexDataWanted(1 + len(answered), 9, 1)
        sent = machine.tell(wanted, sender=INDEX)
        (page,) = [m for m in messages(sent, INDEX) if isinstance(m, IndexData)]
        assert 1 <= len(page.blocks) <= 3
        answered += [block.position for block in page.blocks]
    assert answered == list(range(1, 9))


def test_a_batch_with_a_live_record_is_not_discarded() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, TAG, 4, of_log=False), sender=PRIMARY)
    waited(machine)
    assert machine.discarded == []
    machine.tell(trim(3, 1, LOG, 1, of_log=True), sender=PRIMARY)
    waited(waited(waited(machine)))
    assert len(machine.discarded) == 1, "the first by its log, the second in its only tag"


def test_reading_for_trimmed_batches_is_slow_and_rests() -> None:
    machine = machine_of(reclaim_bytes_per_s=100)
    append(machine, b"x" * 500, first=0)
    append(machine, b"y" * 500, first=1)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    machine.tell(trim(2, 0, TAG, 2, of_log=False), sender=PRIMARY)
    reads = machine.reads
    for _ in range(20):
        machine.wait(10.0)
    assert machine.reads - reads == 2, "once each: nothing was trimmed since"


@pytest.mark.parametrize(("late_s", "least_s", "most_s"), [(0.0, 0.0, 0.02), (0.01, 0.3, 0.5)])
def test_a_pass_rests_ten_times_as_long_as_it_worked_and_its_own_rests_count(
    late_s: float, least_s: float, most_s: float
) -> None:
    """An iteration is late because there is work. The rests among 100 batches are 0.04 s."""
    machine = machine_of(reclaim_rest_s_min=0.001)
    count = 100
    for first in range(count):
        append(machine, b"x", first=first)
    machine.tell(entries({0: count}), sender=PRIMARY)
    waited(machine)
    machine.tell(trim(2, 0, TAG, count, of_log=False), sender=PRIMARY)
    machine.tell(trim(3, 1, TAG + 1, count, of_log=False), sender=PRIMARY)
    read_at: list[Instant] = []
    while machine.busy:
        due, before = machine.node.deadline(), machine.reads
        assert due is not None
        machine.wait(max(0.0, due - machine.now) + late_s)
        if machine.reads > before:
            read_at.append(machine.now)
    assert len(read_at) == 3 + 4, "two passes, of which one has begun at once"
    assert least_s < max(later - at for at, later in pairwise(read_at)) < most_s


def test_reading_many_small_batches_leaves_most_of_the_time_to_appends() -> None:
    """Their bytes are few; without rests, a trim of thousands of them would stop all other work."""
    machine = machine_of(reclaim_rest_s_min=0.001)
    count = 1000
    for first in range(count):
        append(machine, b"x", first=first)
    machine.tell(entries({0: count}), sender=PRIMARY)
    waited(machine)
    before = machine.reads
    machine.tell(trim(2, 0, LOG, count, of_log=True), sender=PRIMARY)
    in_turns: list[int] = []
    while len(machine.discarded) < count:
        assert len(in_turns) < count, "a thousandth of a second each"
        machine.wait(0.001)
        in_turns.append(machine.reads - before - sum(in_turns))
    assert sum(in_turns) == count
    assert max(in_turns) < 50, "some milliseconds of work in a turn"
    assert len(in_turns) > 0.3 * count, "and more than three times as long between turns"


def told_gone(machine: Machine, *runs: tuple[int, int]) -> tuple[list[list[int]], int]:
    wanted = DiscardedWanted(SHARD, np.array(runs, np.uint64).tobytes())
    (answer,) = messages(machine.tell(wanted, sender=INDEX), INDEX)
    assert isinstance(answer, Discarded)
    assert (answer.trims, answer.copy_of) == (machine.node.status()["trims"], 1)
    return np.frombuffer(answer.runs, np.uint64).reshape(-1, 2).tolist(), answer.end


def test_an_index_node_gets_discarded_records_but_not_lost_or_only_trimmed_ones() -> None:
    machine = machine_of()
    for first in range(0, 10, 2):
        append(machine, b"a", b"b", first=first)
    machine.tell(entries({0: 10}), sender=PRIMARY)
    assert told_gone(machine, (0, 10)) == ([], 10)
    machine.tell(trim(2, 0, LOG, 5, of_log=True), sender=PRIMARY)
    for _ in range(5):
        machine.wait(1.0)
    shard = machine.node._shards[SHARD]
    assert shard.gone_in(0, 10) == [(0, 2), (2, 4)]
    assert told_gone(machine, (0, 10)) == ([[0, 4]], 10), (
        "4 is trimmed, and lies beside one that is not"
    )
    assert told_gone(machine, (1, 3), (3, 4), (6, 8)) == ([[1, 3], [3, 4]], 8)
    assert shard.lose(DamagedBatch(shard.locations(6, 8)[0], readable=True))
    assert told_gone(machine, (0, 10)) == ([[0, 4]], 10)


def test_an_answer_about_discarded_records_is_bounded_and_has_its_end() -> None:
    machine = machine_of()
    for first in range(0, 10, 2):
        append(machine, b"a", b"b", first=first)
    machine.tell(entries({0: 10}), sender=PRIMARY)
    shard = machine.node._shards[SHARD]
    for first in (0, 4, 8):
        assert shard.discard(first, shard.locations(first, first + 1)[0])
    runs, end, rows = shard.gone_runs(1, 10, 3)
    assert (runs.tolist(), end, rows) == ([[1, 2], [4, 6]], 6, 3)
    runs, end, rows = shard.gone_runs(6, 9, 100)
    assert (runs.tolist(), end, rows) == ([[8, 9]], 9, 2)
    assert shard.gone_runs(10, 12, 3)[1:] == (10, 0)


@pytest.mark.parametrize("runs", [b"", b"1234", bytes(16 * 4097)])
def test_a_question_about_an_empty_or_too_long_range_is_refused(runs: bytes) -> None:
    machine = with_records()
    assert machine.tell(DiscardedWanted(SHARD, runs), sender=INDEX) == []
    beyond = np.array([0, 5], np.uint64).tobytes()
    assert machine.tell(DiscardedWanted(SHARD, beyond), sender=INDEX) == []
