"""Which frames a storage node keeps when its segments are rewritten (decision 0016)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from indilog.base.ids import Epoch, NodeId, ViewNumber
from indilog.kernel.metalog import Floor, NewRecords, Trim
from indilog.kernel.records import RecordBatch, batch_header
from indilog.kernel.tombstones import decode_gone, encode_gone, gone_of
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Location
from indilog.wire.messages import AppendBatch, Batches, BatchesWanted, IndexData, IndexDataWanted
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    INDEX,
    PRIMARY,
    SHARD,
    Frame,
    Machine,
    append,
    batch,
    data_of,
    entries,
    machine_of,
    messages,
    read,
)
from tests.unit.storage.replicas import A, B, Pair
from tests.unit.storage.test_trims import LOG, trim, waited, with_records


def rewritten(machine: Machine) -> list[Frame]:
    """Return the frames on the disk after the shell has rewritten all of them, batch by batch."""
    return [
        (kind, payload, location) if kind is not FrameKind.RECORDS else _shrunk(machine, *frame)
        for frame in machine.frames
        for kind, payload, location in (frame,)
    ]


def _shrunk(machine: Machine, kind: FrameKind, payload: bytes, location: Location) -> Frame:
    kept = machine.node.needed(kind, payload, location)
    if kept is not None:
        return kind, kept, location._replace(length=len(kept))
    gone = encode_gone(gone_of(batch_header(payload), repaired=False))
    return FrameKind.GONE_RECORDS, gone, location._replace(length=len(gone))


def merged(frames: Iterable[Frame]) -> list[Frame]:
    """Merge consecutive notes, as a rewrite does."""
    found: list[Frame] = []
    notes: list[int] = []
    for kind, payload, location in frames:
        if kind is FrameKind.GONE_RECORDS and notes:
            before = decode_gone(found[notes[-1]][1])
            joined = before.joined(decode_gone(payload))
            assert joined is not None
            found[notes[-1]] = (kind, encode_gone(joined), found[notes[-1]][2])
            continue
        if kind is FrameKind.GONE_RECORDS:
            notes.append(len(found))
        found.append((kind, payload, location))
    return found


def lived(machine: Machine, frames: Iterable[Frame]) -> Machine:
    """Restart: return a new node on these frames."""
    return Machine(machine.view, machine.config, frames=frames)


def batches(machine: Machine) -> list[Frame]:
    return [frame for frame in machine.frames if frame[0] is FrameKind.RECORDS]


def test_a_live_batch_is_kept_unchanged() -> None:
    machine = with_records()
    for kind, payload, location in batches(machine):
        assert machine.node.needed(kind, payload, location) is payload
    machine.tell(trim(2, 0, LOG, 2, of_log=True), sender=PRIMARY)
    kind, payload, location = batches(machine)[1]
    assert machine.node.needed(kind, payload, location) is payload


def test_a_discarded_batch_is_not_kept() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 2, of_log=True), sender=PRIMARY)
    waited(machine)
    assert machine.node.needed(*batches(machine)[0]) is None


def test_dead_records_of_a_live_batch_become_tombstones_and_keep_their_localids() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    kind, payload, location = batches(machine)[1]
    kept = machine.node.needed(kind, payload, location)
    assert kept is not None
    found = RecordBatch(kept)
    assert (found.header.first, len(found), list(found.tag_counts)) == (2, 2, [0, 2])
    assert [found.record(n).data for n in (0, 1)] == [b"", b"d"]
    assert len(kept) < len(payload)
    assert machine.node.needed(kind, kept, location) is kept, "nothing more is reclaimable"


def test_unordered_batches_are_kept_for_any_floors() -> None:
    machine = machine_of()
    append(machine, b"a", b"b", first=0)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    append(machine, b"c", b"d", first=2)
    machine.tell(trim(2, 0, LOG, 4, of_log=True), sender=PRIMARY)
    kind, payload, location = batches(machine)[1]
    assert machine.node.needed(kind, payload, location) is payload


def test_a_batch_at_another_location_than_the_known_one_is_kept() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    kind, payload, location = batches(machine)[1]
    elsewhere = location._replace(offset=location.offset + 8)
    assert machine.node.needed(kind, payload, elsewhere) is payload


def test_a_pass_reports_the_reclaimable_bytes_of_each_segment() -> None:
    machine = with_records()
    began = machine.now
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    waited(machine)
    assert machine.reclaimable_since == began + 1.0, "when the pass began, after a first rest"
    kind, payload, location = batches(machine)[1]
    kept = machine.node.needed(kind, payload, location)
    assert kept is not None
    assert machine.reclaimable == {location.segment: len(payload) - len(kept)}


@pytest.mark.parametrize("together", [False, True])
def test_a_rewrite_and_a_restart_change_no_read(together: bool) -> None:
    machine = with_records()
    append(machine, b"e", b"f", first=4)
    machine.tell(entries({0: 2}, start=2), sender=PRIMARY)
    machine.tell(trim(3, 0, LOG, 5, of_log=True), sender=PRIMARY)
    waited(machine)
    frames = rewritten(machine)
    again = lived(machine, merged(frames) if together else frames)
    answer = read(again, 0, 1, 2, 3, 4, 5)
    assert (data_of(answer), answer.trimmed, answer.unknown) == ([(5, b"f")], (0, 1, 2, 3, 4), ())
    sent = again.tell(IndexDataWanted(1, 4, 1), sender=INDEX)
    (page,) = [m for m in messages(sent, NodeId(INDEX)) if isinstance(m, IndexData)]
    parts = [part for block in page.blocks for part in block.parts]
    assert [(part.count, part.tag_counts) for part in parts] == [
        (4, bytes(4)),
        (2, bytes([0, 2])),
    ]


def test_tombstones_are_answered_as_trimmed_before_the_trim_is_known() -> None:
    """The ordering journal is not synced: a restart may find the batch without the trim."""
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    *frames, last = rewritten(machine)
    assert last[0] is FrameKind.ORDERING
    answer = read(lived(machine, frames), 2, 3)
    assert (data_of(answer), answer.trimmed, answer.unknown) == ([(3, b"d")], (2,), ())


def given_to_another(machine: Machine) -> Batches:
    """Return the answer to another replica that requests all records."""
    sent = machine.tell(BatchesWanted(SHARD, 0, 4), sender=NodeId("storage-1"))
    (page,) = messages(sent, NodeId("storage-1"))
    assert isinstance(page, Batches)
    return page


def test_another_replica_gets_the_discarded_ranges_and_the_tombstones() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 3, of_log=True), sender=PRIMARY)
    waited(machine)
    page = given_to_another(lived(machine, merged(rewritten(machine))))
    assert page.gone == ((0, 2),)
    (payload,) = page.batches
    assert list(RecordBatch(payload).tag_counts) == [0, 2]


def test_another_replica_gets_the_discarded_ranges_of_merged_notes() -> None:
    machine = with_records()
    machine.tell(trim(2, 0, LOG, 4, of_log=True), sender=PRIMARY)
    waited(machine)
    page = given_to_another(lived(machine, merged(rewritten(machine))))
    assert (page.gone, page.batches) == (((0, 4),), ())


# --- new writers between the batches


def test_a_merged_note_of_one_writer_does_not_cross_the_entry_of_the_next_one() -> None:
    """The first writer's unordered records were dropped by that entry."""
    machine = machine_of()
    append(machine, b"a", b"b", first=0)
    append(machine, b"stale", b"stale", first=2)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    machine.open(2)
    machine.tell(AppendBatch(batch(2, [b"c", b"d"], epoch=2)))
    machine.tell(entries({0: 2}, start=3), sender=PRIMARY)
    machine.tell(trim(4, 0, LOG, 3, of_log=True), sender=PRIMARY)
    waited(machine)
    frames = rewritten(machine)
    assert [kind for kind, _, _ in frames].count(FrameKind.GONE_RECORDS) == 1
    for found in (frames, merged(frames)):
        again = lived(machine, found)
        answer = read(again, 0, 1, 2, 3)
        assert (data_of(answer), answer.trimmed) == ([(3, b"d")], (0, 1, 2))
        assert again.node.status()["missing_records"] == 0


def with_a_replaced_writer(name: NodeId) -> Machine:
    """A second writer is named after the first batch; then the shard goes back to the first writer,
    which stores the other batches. All but the last record are trimmed.
    """
    machine = machine_of(view_of(storage_nodes=2, replicas=2), name)
    append(machine, b"a", b"b", first=0)
    machine.tell(entries({0: 2}), sender=PRIMARY)
    machine.open(2)
    replacing = [NewRecords(n, ViewNumber(1), Epoch(2), {}) for n in (2, 3)]
    first = entries({0: 2}).entries
    machine.tell(entries_message([*first, *replacing]), sender=PRIMARY, incarnation=2)
    append(machine, b"c", b"d", first=2)
    append(machine, b"e", first=4)
    ordering = NewRecords(4, ViewNumber(1), Epoch(2), {SHARD: 3})
    floors = Trim(5, ViewNumber(1), Epoch(2), 0, (Floor(LOG, 4, of_log=True),))
    machine.tell(entries_message([ordering, floors]), sender=PRIMARY, incarnation=2)
    return waited(machine)


def test_notes_around_an_entry_that_was_replaced_change_no_read() -> None:
    machine = with_a_replaced_writer(A)
    frames = rewritten(machine)
    assert [kind for kind, _, _ in frames].count(FrameKind.GONE_RECORDS) == 2
    answer = read(Machine(machine.view, machine.config, A, frames), 0, 1, 2, 3, 4)
    assert (data_of(answer), answer.trimmed) == ([(4, b"e")], (0, 1, 2, 3))


def test_a_merged_note_across_an_entry_that_was_replaced_invents_no_record() -> None:
    """The note precedes that entry, which thus drops the second batch of the note; another replica
    reports that batch again.
    """
    machine, other = with_a_replaced_writer(A), with_a_replaced_writer(B)
    again = Machine(machine.view, machine.config, A, merged(rewritten(machine)))
    answer = read(again, 0, 1, 2, 3, 4)
    assert (data_of(answer), answer.trimmed, answer.unknown) == ([(4, b"e")], (0, 1), (2, 3))
    pair = Pair()
    pair.nodes = {A: again, B: other}
    pair.start(again)
    pair.settle()
    answer = read(again, 0, 1, 2, 3, 4)
    assert (data_of(answer), answer.trimmed) == ([(4, b"e")], (0, 1, 2, 3))
    assert again.node.status()["missing_records"] == 0
