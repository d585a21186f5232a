"""A process starts from its newest intact checkpoint and replays the rest (decision 0028)."""

from __future__ import annotations

from pathlib import Path

import pytest

from indilog.base.errors import DataDirectoryError, IndilogError
from indilog.roles.role import FrameKind
from indilog.runtime.journal import checkpointing
from indilog.runtime.journal.checkpoint_files import (
    VERSION,
    checkpoint_path,
    checkpoint_places,
)
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.recovery import recover
from indilog.runtime.journal.segment import segment_path
from tests.unit.runtime.counting import SEGMENT_BYTES, STREAM, Counter, ProcessRun, numbered
from tests.unit.runtime.journals import flip, spoil

FILES_KEPT = 2


def checkpoints(directory: Path) -> list[Path]:
    return [checkpoint_path(directory, place) for place in checkpoint_places(directory)]


def test_only_frames_after_the_checkpoint_are_replayed(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    run.write(5)
    run.checkpoint()
    run.write(3)
    run.end()
    again = ProcessRun(tmp_path)
    assert (again.role.restored, again.role.replayed, again.role.count) == (5, 3, 8)
    again.end()


def test_no_frame_is_replayed_after_a_clean_stop(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    run.write(5)
    run.end(clean=True)
    again = ProcessRun(tmp_path)
    assert (again.role.restored, again.role.replayed) == (5, 0)
    again.end(clean=True)
    assert len(checkpoints(tmp_path)) == 1, "nothing was written since"


def test_a_checkpoint_is_due_after_the_configured_number_of_frames_written_or_replayed(
    tmp_path: Path,
) -> None:
    run = ProcessRun(tmp_path, frames=4)
    run.write(3)
    run.turn()
    assert run.checkpointing._taken is None
    run.end()
    again = ProcessRun(tmp_path, frames=4)
    again.write(1)
    for _ in range(3):
        again.turn()
    assert again.checkpointing.written == 1
    again.end()
    assert ProcessRun(tmp_path).role.restored == 4


def test_a_checkpoint_is_due_when_a_segment_is_full(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    while run.journal.files.active == 1:
        run.write()
    for _ in range(3):
        run.turn()
    assert run.checkpointing.written == 1
    run.end()


def test_a_checkpoint_that_a_role_wants_is_written_after_the_next_frame(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    run.write(3)
    assert not run.checkpointing.due
    run.role.wants_checkpoint = True
    written = []
    for _ in range(2):
        for _ in range(3):
            run.turn()
        written.append((run.checkpointing.written, run.checkpointing.due))
        run.write()
    assert written == [(1, False), (2, False)]
    run.end()


def test_no_checkpoint_is_taken_before_the_role_has_handled_its_persisted_frames(
    tmp_path: Path,
) -> None:
    run = ProcessRun(tmp_path, frames=2)
    run.write(5)
    run.turn(quiet=False)
    run.checkpointing.stop(quiet=False)
    assert (run.checkpointing.written, checkpoints(tmp_path)) == (0, [])
    run.end()


def test_a_checkpoint_is_written_only_when_all_frames_before_it_are_durable(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path, frames=2)
    run.write(5)
    for _ in range(3):
        run.checkpointing.advance(quiet=True)  # nothing was synced
        run.journal.spare.pool.submit(int).result()
    assert checkpoints(tmp_path) == []
    run.journal.sync()
    run.turn()
    run.turn()
    assert len(checkpoints(tmp_path)) == 1
    run.end()


def test_two_checkpoints_are_kept_and_a_damaged_one_falls_back_to_the_older(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    for _ in range(4):
        run.write(15)
        run.checkpoint()
    run.write(2)
    run.end()
    older, newest = checkpoints(tmp_path)
    flip(newest, newest.stat().st_size - 3)
    again = ProcessRun(tmp_path)
    assert (again.role.restored, again.role.count) == (45, 62)
    assert checkpoints(tmp_path) == [older], "the damaged one is renamed"
    again.write(3)
    again.checkpoint()
    assert len(checkpoints(tmp_path)) == FILES_KEPT
    again.end()
    assert ProcessRun(tmp_path).role.restored == 65


@pytest.mark.parametrize("bit", range(0, 8 * 33, 7))
def test_a_flipped_bit_in_a_checkpoint_header_falls_back_to_the_older_one(
    tmp_path: Path, bit: int
) -> None:
    run = ProcessRun(tmp_path)
    run.write(3)
    run.checkpoint()
    run.write(3)
    run.checkpoint()
    run.end()
    _, newest = checkpoints(tmp_path)
    content = bytearray(newest.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    newest.write_bytes(content)
    again = ProcessRun(tmp_path)
    assert (again.role.restored, again.role.count) == (3, 6)
    again.end()


@pytest.mark.parametrize("length", [0, 1, 20, 32, 45])
def test_a_torn_checkpoint_is_ignored(tmp_path: Path, length: int) -> None:
    run = ProcessRun(tmp_path)
    run.write(3)
    run.checkpoint()
    run.end()
    [only] = checkpoints(tmp_path)
    only.write_bytes(only.read_bytes()[:length])
    again = ProcessRun(tmp_path)
    assert (again.role.restored, again.role.replayed) == (None, 3), "all frames are still there"
    again.end()


def test_a_checkpoint_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    from struct import pack

    from crc32c import crc32c

    run = ProcessRun(tmp_path)
    run.write(3)
    run.end(clean=True)
    [only] = checkpoints(tmp_path)
    content = only.read_bytes()
    header = content[:4] + bytes([VERSION + 1]) + content[5:29]
    only.write_bytes(header + pack("<I", crc32c(header)) + content[33:])
    with pytest.raises(DataDirectoryError, match=f"has version {VERSION + 1}, this release reads"):
        ProcessRun(tmp_path)


def test_a_checkpoint_of_other_roles_is_refused(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    run.write(3)
    run.end(clean=True)
    journal = Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES, durability="fsync")
    with pytest.raises(IndilogError, match="of a role that this process does not run"):
        recover(journal, {STREAM + 1: Counter()})
    journal.close()


def test_a_process_starts_despite_damage_before_the_checkpoint(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    run.write(5)
    run.checkpoint()
    run.write(2)
    run.end()
    spoil(segment_path(tmp_path, 1), 100)
    again = ProcessRun(tmp_path)
    assert (again.role.count, again.role.lost_frames) == (7, [])
    again.end()


def test_damage_after_the_checkpoint_is_reported_to_the_role(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    run.write(5)
    run.checkpoint()
    at = run.journal._end
    run.write(2)
    run.turn()
    run.write(2)
    run.end()
    spoil(segment_path(tmp_path, 1), at + 40, 8)
    again = ProcessRun(tmp_path)
    assert again.role.count == 9
    assert [lost.kind for lost in again.role.lost_frames] == [FrameKind.METALOG]
    again.end()


def test_a_missing_segment_before_the_checkpoint_is_reported_to_the_roles(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path)
    while run.journal.files.active < 3:
        run.write()
    run.checkpoint()
    run.end()
    segment_path(tmp_path, 1).unlink()
    again = ProcessRun(tmp_path)
    assert (again.role.gone, again.role.lost_frames, again.journal.damaged) == ({1}, [], 1)
    again.end()


def test_all_frames_are_replayed_when_the_only_checkpoint_is_lost(
    tmp_path: Path,
) -> None:
    run = ProcessRun(tmp_path)
    while run.journal.files.active < 4:
        run.write()
    run.checkpoint()
    assert run.journal.old.floor == 0
    count = run.role.count
    run.end()
    checkpoints(tmp_path)[0].unlink()
    again = ProcessRun(tmp_path)
    assert (again.role.restored, again.role.replayed) == (None, count)
    again.end()


def test_a_stop_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    run = ProcessRun(tmp_path, frames=2)
    run.write(3)
    run.turn()
    run.end(clean=True)
    assert ProcessRun(tmp_path).role.restored == 3


def test_state_outside_the_frames_stays_unsaved_until_a_checkpoint_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint whose write failed is not retried at once; a stop retries it."""
    run = ProcessRun(tmp_path, frames=10)
    run.write(1)
    run.role.unsaved = 9
    taken = list[bool]()
    with monkeypatch.context() as patched:
        patched.setattr(checkpointing, "write_checkpoint", no_permission)
        run.turn()
        for _ in range(9):
            run.turn()
            taken.append(run.checkpointing.busy)
    assert checkpoints(tmp_path) == []
    assert taken[0]
    assert not taken[-1]
    run.role.unsaved = 19
    assert run.checkpointing.due, "enough frames were written since"
    run.end(clean=True)
    assert len(checkpoints(tmp_path)) == 1


def no_permission(*_: object) -> int:
    raise PermissionError(13, "no")


def test_payloads_are_numbered() -> None:
    assert int(numbered(17)[:6]) == 17
