"""Old segments are rewritten without their dead frames (PITFALLS 7, decision 0016)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from indilog.base.ids import Epoch, Instant, ShardId, TagColumns, pack_tags
from indilog.base.metrics import Metrics
from indilog.config import node_config
from indilog.kernel.records import BatchBuilder, RecordBatch
from indilog.kernel.tombstones import decode_gone
from indilog.roles.role import FrameKind, Location
from indilog.runtime.journal import segment_rewrite
from indilog.runtime.journal.checkpoint_files import checkpoint_path, checkpoint_places
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.recovery import recover
from indilog.runtime.journal.rewriting import Rewriting
from indilog.runtime.journal.segment import segment_path
from indilog.runtime.journal.segment_scan import Damage
from indilog.runtime.journal.spare_segment import SpareSegment
from tests.unit.runtime import counting
from tests.unit.runtime.counting import ProcessRun
from tests.unit.runtime.journals import Taker, spoil
from tests.unit.runtime.rewriters import SEGMENT_BYTES, STREAM, Rewriter, batch, localids

RECORDS, GONE_RECORDS = FrameKind.RECORDS, FrameKind.GONE_RECORDS
A_SEGMENT = 11
"""Batches of the usual size that fill one segment."""


@pytest.fixture
def rewriter(tmp_path: Path) -> Iterator[Rewriter]:
    one = Rewriter(tmp_path)
    yield one
    one.close()


def filled(rewriter: Rewriter, segments: int = 1) -> list[Location]:
    """Fill the given number of segments; the next segment is the active one."""
    places = rewriter.written(A_SEGMENT * segments + 1)
    assert places[-1].segment == rewriter.journal.files.active == segments + 1
    assert len({place.segment for place in places}) == segments + 1
    return places


def test_a_mostly_dead_segment_shrinks_to_its_live_frames(rewriter: Rewriter) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:5], *places[6:11])
    assert rewriter.rest() == 1
    assert rewriter.sizes()["00000001"] < 600
    assert rewriter.journal.read(places[5]) == batch(10)
    assert rewriter.journal.read(places[11]) == batch(22)
    assert all(rewriter.journal.read(place) is None for place in places[:5])


def test_recovery_finds_the_same_order_with_one_note_for_consecutive_batches(
    rewriter: Rewriter,
) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:5], *places[6:11])
    rewriter.rest()
    again = rewriter.again()
    assert localids(again.found) == [
        (GONE_RECORDS, 0, 10), (RECORDS, 10, 12), (GONE_RECORDS, 12, 22), (RECORDS, 22, 24),
    ]  # fmt: skip
    assert [again.journal.read(p) for p in again.places[1::2]] == [batch(10), batch(22)]
    again.close()


def batch_of(epoch: int, first: int) -> bytes:
    """Return a batch of two records that the writer `epoch` wrote."""
    builder = BatchBuilder()
    for _ in range(2):
        builder.add(b"x" * 100, TagColumns(pack_tags(1), b"log"))
    return builder.build(shard=ShardId(0), epoch=Epoch(epoch), first=first, time_us=1)


def test_a_new_writer_stays_between_the_batches_before_and_after_it(rewriter: Rewriter) -> None:
    """What its entry dropped must be found before it, and its own batches behind it."""
    places = [rewriter.write(batch_of(1, first)) for first in range(0, 10, 2)]
    rewriter.write(b"an entry that names writer 2", FrameKind.ORDERING)
    places += [rewriter.write(batch_of(2, first)) for first in range(10, 26, 2)]
    rewriter.journal.sync()
    rewriter.discard(*places[:10])
    assert rewriter.rest() == 1
    again = rewriter.again()
    found = [frame for frame in again.found if frame is not None]
    assert [kind for kind, _ in found[:3]] == [GONE_RECORDS, FrameKind.ORDERING, GONE_RECORDS]
    notes = [decode_gone(found[number][1]) for number in (0, 2)]
    assert [(gone.epoch, gone.first, gone.end) for gone in notes] == [(1, 0, 10), (2, 10, 20)]
    again.close()


def test_batches_of_one_writer_share_a_note_across_other_frames(rewriter: Rewriter) -> None:
    """Ordering frames lie among the batches everywhere."""
    places = []
    for first in range(0, 20, 2):
        places.append(rewriter.write(batch_of(1, first)))
        rewriter.write(b"entries", FrameKind.ORDERING)
    rewriter.written(A_SEGMENT, first=20)
    rewriter.discard(*places)
    assert rewriter.rest() == 1
    again = rewriter.again()
    kinds = [frame[0] for frame in again.found if frame is not None]
    assert kinds[:11] == [GONE_RECORDS, *[FrameKind.ORDERING] * 10]
    again.close()


def test_a_mostly_live_segment_is_not_rewritten(rewriter: Rewriter) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:4])
    assert rewriter.rest() == 0
    rewriter.discard(*places[4:8])
    assert rewriter.rest() == 1


def test_the_active_segment_is_never_rewritten(rewriter: Rewriter) -> None:
    places = rewriter.written(A_SEGMENT)
    rewriter.discard(*places)
    assert rewriter.rest() == 0
    rewriter.written(1, first=2 * A_SEGMENT)
    assert rewriter.rest() == 1


def test_neighbouring_sparse_segments_are_joined_into_few_files(rewriter: Rewriter) -> None:
    places = filled(rewriter, segments=9)
    kept = places[::A_SEGMENT]
    rewriter.discard(*(place for place in places if place not in kept))
    rewriter.rest()
    assert len(rewriter.sizes()) <= 2
    assert sum(rewriter.sizes().values()) < 2 * SEGMENT_BYTES
    expected = [batch(2 * A_SEGMENT * number) for number in range(len(kept))]
    assert [rewriter.journal.read(place) for place in kept] == expected
    again = rewriter.again()
    living = [frame[1] for frame in again.found if frame is not None and frame[0] is RECORDS]
    assert living == expected
    again.close()


def test_a_batch_that_was_moved_twice_is_found(rewriter: Rewriter) -> None:
    places = filled(rewriter, segments=4)
    for count in (7, 9, 10):
        rewriter.discard(*(p for n, p in enumerate(places[:44]) if n % A_SEGMENT < count))
        rewriter.rest()
        for number, place in enumerate(places):
            if number % A_SEGMENT >= count or number == 44:
                assert rewriter.journal.read(place) == batch(2 * number)


def test_a_moved_batch_can_be_discarded_by_its_old_location(rewriter: Rewriter) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:8])
    rewriter.rest()
    rewriter.discard(places[9])
    again = rewriter.again()
    kinds = [frame[0] for frame in again.found if frame is not None]
    assert kinds == [GONE_RECORDS, RECORDS, FrameKind.GONE, RECORDS, RECORDS]
    again.close()


def test_a_batch_discarded_while_its_segment_is_copied_is_removed_afterwards(
    rewriter: Rewriter,
) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:8])
    rewriter.turn()
    assert rewriter.metrics.rewrites == 0
    rewriter.discard(places[10])
    rewriter.rest()
    again = rewriter.again()
    assert (FrameKind.GONE, 20, 22) in localids(again.found)
    again.close()


def test_a_segment_being_copied_is_not_examined_again_in_each_iteration(rewriter: Rewriter) -> None:
    """Batches of the segment that die during the copy are removed after it."""
    places = filled(rewriter)
    rewriter.discard(*places[:8])
    rewriter.turn()
    discards, died = rewriter.journal.discards, rewriter.journal.old._files[0]
    before = died.dead_bytes
    rewriter.discard(*places[8:11])
    assert not discards.due(1 << 60)
    assert died.dead_bytes == before
    discards.release()
    assert discards.due(1 << 60)
    rewriter.journal.free_discarded()
    assert died.dead_bytes > before
    assert not discards.due(1 << 60)


def test_batches_with_tombstones_replace_partly_live_batches(rewriter: Rewriter) -> None:
    places = filled(rewriter)
    for number, place in enumerate(places[:11]):
        rewriter.role.smaller[place] = RecordBatch(batch(2 * number)).with_tombstones([True, False])
    rewriter.journal.old.set_reclaimable("storage-0", {1: 2500}, began=rewriter.now)
    assert rewriter.rest() == 1
    assert rewriter.sizes()["00000001"] < 0.75 * SEGMENT_BYTES
    for number, place in enumerate(places[:11]):
        payload = rewriter.journal.read(place)
        assert payload is not None
        found, whole = RecordBatch(payload), RecordBatch(batch(2 * number))
        assert found.record(1) == whole.record(1)
        assert found.record(0).data == b""
        assert found.header.first == whole.header.first
    rewriter.discard(places[3])
    again = rewriter.again()
    assert [(first, end) for _, first, end in localids(again.found)] == [
        (2 * n, 2 * n + 2) for n in range(12)
    ]
    again.close()


def test_discarding_a_batch_with_tombstones_frees_only_its_own_bytes(tmp_path: Path) -> None:
    rewriter = Rewriter(tmp_path, segment_bytes=200_000)
    whole = [batch(2 * number, size=20_000) for number in range(6)]
    places = [rewriter.write(payload) for payload in whole]
    rewriter.journal.sync()
    rewriter.role.smaller[places[0]] = RecordBatch(whole[0]).with_tombstones([True, False])
    rewriter.journal.old.set_reclaimable("storage-0", {1: 190_000}, began=rewriter.now)
    assert rewriter.rest() == 1
    rewriter.discard(places[0])
    payload = rewriter.journal.read(places[0])
    assert payload is not None
    assert not any(payload[4096 + 54 : -4096])
    assert [rewriter.journal.read(place) for place in places[1:]] == whole[1:]
    rewriter.close()


def test_a_segment_with_wrongly_reported_reclaimable_bytes_is_not_rewritten_repeatedly(
    rewriter: Rewriter,
) -> None:
    filled(rewriter)
    rewriter.journal.old.set_reclaimable("storage-0", {1: 3000}, began=rewriter.now)
    assert rewriter.rest() == 1
    for _ in range(3):
        rewriter.journal.old.set_reclaimable("storage-0", {1: 3000}, began=rewriter.now)
        assert rewriter.rest() == 0


def test_reclaimable_bytes_counted_before_a_rewrite_are_not_applied_after_it(
    rewriter: Rewriter,
) -> None:
    """A scan that ran during the rewrite reports the frames before it; the next scan does not."""
    places = filled(rewriter)
    began = rewriter.now
    rewriter.discard(*places[:8])
    assert rewriter.rest() == 1
    old = rewriter.journal.old
    [left] = old._files[:1]
    old.set_reclaimable("storage-0", {1: 3000}, began=began)
    assert old._waste()[0] == left.dead_bytes
    assert rewriter.rest() == 0
    old.set_reclaimable("storage-0", {1: 3000}, began=rewriter.now)
    assert old._waste()[0] > left.dead_bytes
    assert rewriter.rest() == 1


def test_damage_is_reported_for_the_file_that_exists(rewriter: Rewriter) -> None:
    """One file may hold several segments."""
    places = filled(rewriter, segments=3)
    rewriter.discard(*places[:33])
    rewriter.rest()
    [joined] = rewriter.directory.glob("segment-*-*.log")
    rewriter.close()
    data = bytearray(joined.read_bytes())
    for place in range(len(data)):
        data[place] ^= 0xFF
    joined.write_bytes(data)
    journal = Journal.open(rewriter.directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
    with structlog.testing.capture_logs() as logs:
        recover(journal, {STREAM: Taker()})
    journal.close()
    assert [entry["file"] for entry in logs if entry["event"] == "the journal is damaged"] == [
        str(joined)
    ]


def test_a_copy_replaces_its_segment_only_after_earlier_frames_are_synced(
    rewriter: Rewriter,
) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:8])
    rewriter.write(b"the trim", FrameKind.METALOG)
    assert rewriter.rest() == 0
    rewriter.journal.sync()
    assert rewriter.rest() == 1


def test_the_next_start_removes_the_files_of_a_crashed_rewrite(
    rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = filled(rewriter, segments=3)
    rewriter.discard(*places[:33])
    monkeypatch.setattr(segment_rewrite.SegmentRewrite, "clean", lambda _: None)
    rewriter.rest()
    (rewriter.directory / "rewritten.new").write_bytes(b"half")
    assert len(rewriter.sizes()) > 1
    monkeypatch.undo()
    again = rewriter.again()
    assert localids(again.found) == [(GONE_RECORDS, 0, 66), (RECORDS, 66, 68)]
    assert list(again.sizes()) == ["00000001-00000003"]
    assert not (rewriter.directory / "rewritten.new").exists()
    again.close()


def test_a_damaged_segment_is_not_rewritten(rewriter: Rewriter) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:8])
    path = segment_path(rewriter.directory, 1)
    spoil(path, places[9].offset - 20)
    before = path.read_bytes()
    assert rewriter.rest() == 0
    assert path.read_bytes() == before
    assert not (rewriter.directory / "rewritten.new").exists()


def test_neighbours_of_a_damaged_segment_are_rewritten(
    rewriter: Rewriter,
) -> None:
    places = filled(rewriter, segments=4)
    rewriter.discard(*places[: A_SEGMENT * 4])
    spoilt = segment_path(rewriter.directory, 3)
    spoil(spoilt, places[A_SEGMENT * 2].offset - 20)
    before = spoilt.read_bytes()
    assert rewriter.rest() == 2
    assert spoilt.read_bytes() == before
    assert sorted(rewriter.sizes()) == ["00000001-00000002", "00000003", "00000004"]


def test_no_rewrite_is_attempted_of_a_segment_that_was_damaged_at_the_start(
    rewriter: Rewriter,
) -> None:
    places = filled(rewriter, segments=3)
    spoil(segment_path(rewriter.directory, 2), places[A_SEGMENT].offset - 20)
    again = rewriter.again()
    again.discard(*(place for place in again.places if place.segment < 4))
    with structlog.testing.capture_logs() as logs:
        assert again.rest() == 2
    assert not [entry for entry in logs if entry["event"] == "a segment is not rewritten"]
    again.close()


def test_the_rewrite_share_counts_only_appends_of_this_process(
    rewriter: Rewriter,
) -> None:
    rewriter.written(3)
    again = rewriter.again()
    assert again.journal.written_bytes == 0
    again.written(A_SEGMENT, first=6)
    assert again.journal.written_bytes > SEGMENT_BYTES // 2
    again.close()


def test_no_copy_is_begun_without_space_for_it(
    rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:8])
    real = os.statvfs(rewriter.directory)
    none_free = os.statvfs_result([*real[:3], 0, 0, *real[5:10]])
    monkeypatch.setattr(os, "statvfs", lambda _: none_free)
    assert rewriter.rest() == 0
    assert not (rewriter.directory / "rewritten.new").exists()
    monkeypatch.undo()
    assert rewriter.rest() == 1


def test_on_a_full_disk_a_copy_is_begun_when_two_would_fit(
    rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy frees more than it takes, and the next segment has no space anyway."""
    places = filled(rewriter)
    rewriter.discard(*places[:8])
    monkeypatch.setattr(SpareSegment, "starved", True)
    real = os.statvfs(rewriter.directory)
    for free, rewrites in ((2000, 0), (3500, 1)):
        left = os.statvfs_result([1, 1, real[2], free, free, *real[5:10]])
        monkeypatch.setattr(os, "statvfs", lambda _, left=left: left)
        assert rewriter.rest() == rewrites


def test_a_copy_that_fills_the_disk_is_abandoned_and_retried(
    rewriter: Rewriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:8])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(segment_rewrite, "write_all", full)
    assert rewriter.rest(3) == 0
    assert not (rewriter.directory / "rewritten.new").exists()
    assert rewriter.journal.read(places[9]) == batch(18)
    monkeypatch.undo()
    assert rewriter.rest() == 1


def test_rewriting_stays_within_its_share_of_appends_and_its_rate(tmp_path: Path) -> None:
    rewriter = Rewriter(tmp_path, rewrite_bytes_per_s=10, rewrite_share_max=0.0)
    places = filled(rewriter)
    rewriter.discard(*places[:7])
    assert rewriter.rest(100) == 0, "the rate does not allow more than a step ahead"
    assert rewriter.rest(100) == 1
    assert rewriter.metrics.rewritten_bytes <= 10 * 200
    rewriter.close()


def test_a_dead_repaired_batch_leaves_a_note_of_its_own(rewriter: Rewriter) -> None:
    places = [rewriter.write(batch(2 * n), FrameKind.REPAIRED) for n in range(A_SEGMENT + 1)]
    rewriter.journal.sync()
    rewriter.discard(*places[:11])
    assert rewriter.rest() == 1
    again = rewriter.again()
    reported = localids(again.found)
    assert reported == [*((GONE_RECORDS, 2 * n, 2 * n + 2) for n in range(11)), (
        FrameKind.REPAIRED, 22, 24,
    )]  # fmt: skip
    again.close()


def test_damage_of_a_moved_batch_is_reported_by_its_original_location(rewriter: Rewriter) -> None:
    """The current location of the batch may be the original location of another one, which is
    intact.
    """
    places = filled(rewriter)
    rewriter.discard(places[0], *places[2:5], *places[6:11])
    assert rewriter.rest() == 1
    [(_, offset)] = [p for p in [rewriter.journal.moved.place(places[5])] if p is not None]
    rewriter.close()
    spoil(segment_path(rewriter.directory, 1), offset + places[5].length - 40, 20)
    journal = Journal.open(rewriter.directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
    reported = [found.location for found in journal.recover() if isinstance(found, Damage)]
    journal.close()
    assert reported == [places[5]]


def test_batches_keep_their_original_locations_over_restarts_and_further_rewrites(
    rewriter: Rewriter,
) -> None:
    places = filled(rewriter)
    rewriter.discard(*places[:5], *places[6:10])
    rewriter.rest()
    again = rewriter.again()
    assert places[5] in again.places
    again.discard(places[10])
    again.rest()
    last = again.again()
    assert [last.journal.read(place) for place in (places[5], places[11])] == [batch(10), batch(22)]
    assert places[5] in last.places
    last.close()


def test_a_segment_prepared_before_a_restart_is_counted_once(tmp_path: Path) -> None:
    """A segment counted twice would be rewritten repeatedly, since its second count never
    shrinks.
    """
    first = Rewriter(tmp_path)
    first.written(1)
    first.journal.spare.make(2, 0)
    rewriter = first.again()
    assert segment_path(tmp_path, 2).exists(), "made before the restart"
    places = filled(rewriter, segments=2)
    assert [old.file.first for old in rewriter.journal.old] == [1, 2, 3]
    rewriter.discard(*(place for place in places if place.segment < 3))
    assert 0 < rewriter.rest() <= 3
    rewriter.close()


def test_before_the_older_of_two_checkpoints_only_batches_are_kept(tmp_path: Path) -> None:
    """The checkpoints hold all other frames of the segment, so no start replays those."""
    run = ProcessRun(tmp_path)
    live = run.journal.write(counting.STREAM, FrameKind.RECORDS, batch(0))
    while run.journal.files.active < 3:
        run.write()
    node = node_config(rewrite_bytes_per_s=1 << 30)
    rewriting = Rewriting(run.journal, {}, node, lambda _: None, Metrics("storage-0"))

    def rest() -> int:
        for turn in range(100):
            rewriting.advance(Instant(1000.0 + turn))
            run.journal.sync()
            run.journal.spare.pool.submit(int).result()
        return sum(p.stat().st_size for p in tmp_path.glob("segment-0000000[12]*.log"))

    run.write()
    run.checkpoint()
    assert rest() == 2 * SEGMENT_BYTES, "a start without the only checkpoint must be possible"
    run.write()
    run.checkpoint()
    assert rest() < 600
    assert run.journal.read(live) == batch(0)
    count = run.role.count
    rewriting.close()
    run.end()
    for place in checkpoint_places(tmp_path):
        checkpoint_path(tmp_path, place).unlink()
    bare = ProcessRun(tmp_path)
    assert [lost.kind for lost in bare.role.lost_frames] == [None], (
        "reported before the first frame"
    )
    assert bare.role.count == count
    bare.end()
