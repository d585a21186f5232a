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
from tests.unit.runtime.counting import SEGMENT_BYTES, STREAM, Counter, Life, numbered
from tests.unit.runtime.journals import flip, spoil

FILES_KEPT = 2


def checkpoints(directory: Path) -> list[Path]:
    return [checkpoint_path(directory, place) for place in checkpoint_places(directory)]


def test_only_frames_after_the_checkpoint_are_replayed(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.write(5)
    life.checkpoint()
    life.write(3)
    life.end()
    again = Life(tmp_path)
    assert (again.role.restored, again.role.replayed, again.role.count) == (5, 3, 8)
    again.end()


def test_no_frame_is_replayed_after_a_clean_stop(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.write(5)
    life.end(clean=True)
    again = Life(tmp_path)
    assert (again.role.restored, again.role.replayed) == (5, 0)
    again.end(clean=True)
    assert len(checkpoints(tmp_path)) == 1, "nothing was written since"


def test_a_checkpoint_is_due_after_the_configured_number_of_frames_written_or_replayed(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path, frames=4)
    life.write(3)
    life.turn()
    assert life.checkpointing._taken is None
    life.end()
    again = Life(tmp_path, frames=4)
    again.write(1)
    for _ in range(3):
        again.turn()
    assert again.checkpointing.written == 1
    again.end()
    assert Life(tmp_path).role.restored == 4


def test_a_checkpoint_is_due_when_a_segment_is_full(tmp_path: Path) -> None:
    life = Life(tmp_path)
    while life.journal.files.active == 1:
        life.write()
    for _ in range(3):
        life.turn()
    assert life.checkpointing.written == 1
    life.end()


def test_a_checkpoint_that_a_role_wants_is_written_after_the_next_frame(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.write(3)
    assert not life.checkpointing.due
    life.role.wants_checkpoint = True
    written = []
    for _ in range(2):
        for _ in range(3):
            life.turn()
        written.append((life.checkpointing.written, life.checkpointing.due))
        life.write()
    assert written == [(1, False), (2, False)]
    life.end()


def test_no_checkpoint_is_taken_before_the_role_has_handled_its_persisted_frames(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path, frames=2)
    life.write(5)
    life.turn(quiet=False)
    life.checkpointing.stop(quiet=False)
    assert (life.checkpointing.written, checkpoints(tmp_path)) == (0, [])
    life.end()


def test_a_checkpoint_is_written_only_when_all_frames_before_it_are_durable(tmp_path: Path) -> None:
    life = Life(tmp_path, frames=2)
    life.write(5)
    for _ in range(3):
        life.checkpointing.advance(quiet=True)  # nothing was synced
        life.journal.spare.pool.submit(int).result()
    assert checkpoints(tmp_path) == []
    life.journal.sync()
    life.turn()
    life.turn()
    assert len(checkpoints(tmp_path)) == 1
    life.end()


def test_two_checkpoints_are_kept_and_a_damaged_one_falls_back_to_the_older(tmp_path: Path) -> None:
    life = Life(tmp_path)
    for _ in range(4):
        life.write(15)
        life.checkpoint()
    life.write(2)
    life.end()
    older, newest = checkpoints(tmp_path)
    flip(newest, newest.stat().st_size - 3)
    again = Life(tmp_path)
    assert (again.role.restored, again.role.count) == (45, 62)
    assert checkpoints(tmp_path) == [older], "the damaged one is renamed"
    again.write(3)
    again.checkpoint()
    assert len(checkpoints(tmp_path)) == FILES_KEPT
    again.end()
    assert Life(tmp_path).role.restored == 65


@pytest.mark.parametrize("bit", range(0, 8 * 33, 7))
def test_a_flipped_bit_in_a_checkpoint_header_falls_back_to_the_older_one(
    tmp_path: Path, bit: int
) -> None:
    life = Life(tmp_path)
    life.write(3)
    life.checkpoint()
    life.write(3)
    life.checkpoint()
    life.end()
    _, newest = checkpoints(tmp_path)
    content = bytearray(newest.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    newest.write_bytes(content)
    again = Life(tmp_path)
    assert (again.role.restored, again.role.count) == (3, 6)
    again.end()


@pytest.mark.parametrize("length", [0, 1, 20, 32, 45])
def test_a_torn_checkpoint_is_ignored(tmp_path: Path, length: int) -> None:
    life = Life(tmp_path)
    life.write(3)
    life.checkpoint()
    life.end()
    [only] = checkpoints(tmp_path)
    only.write_bytes(only.read_bytes()[:length])
    again = Life(tmp_path)
    assert (again.role.restored, again.role.replayed) == (None, 3), "all frames are still there"
    again.end()


def test_a_checkpoint_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    from struct import pack

    from crc32c import crc32c

    life = Life(tmp_path)
    life.write(3)
    life.end(clean=True)
    [only] = checkpoints(tmp_path)
    content = only.read_bytes()
    header = content[:4] + bytes([VERSION + 1]) + content[5:29]
    only.write_bytes(header + pack("<I", crc32c(header)) + content[33:])
    with pytest.raises(DataDirectoryError, match=f"has version {VERSION + 1}, this release reads"):
        Life(tmp_path)


def test_a_checkpoint_of_other_roles_is_refused(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.write(3)
    life.end(clean=True)
    journal = Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES, durability="fsync")
    with pytest.raises(IndilogError, match="of a role that this process does not run"):
        recover(journal, {STREAM + 1: Counter()})
    journal.close()


def test_a_process_starts_despite_damage_before_the_checkpoint(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.write(5)
    life.checkpoint()
    life.write(2)
    life.end()
    spoil(segment_path(tmp_path, 1), 100)
    again = Life(tmp_path)
    assert (again.role.count, again.role.lost_frames) == (7, [])
    again.end()


def test_damage_after_the_checkpoint_is_reported_to_the_role(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.write(5)
    life.checkpoint()
    at = life.journal._end
    life.write(2)
    life.turn()
    life.write(2)
    life.end()
    spoil(segment_path(tmp_path, 1), at + 40, 8)
    again = Life(tmp_path)
    assert again.role.count == 9
    assert [lost.kind for lost in again.role.lost_frames] == [FrameKind.METALOG]
    again.end()


def test_a_missing_segment_before_the_checkpoint_is_reported_to_the_roles(tmp_path: Path) -> None:
    life = Life(tmp_path)
    while life.journal.files.active < 3:
        life.write()
    life.checkpoint()
    life.end()
    segment_path(tmp_path, 1).unlink()
    again = Life(tmp_path)
    assert (again.role.gone, again.role.lost_frames, again.journal.damaged) == ({1}, [], 1)
    again.end()


def test_all_frames_are_replayed_when_the_only_checkpoint_is_lost(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path)
    while life.journal.files.active < 4:
        life.write()
    life.checkpoint()
    assert life.journal.old.floor == 0
    count = life.role.count
    life.end()
    checkpoints(tmp_path)[0].unlink()
    again = Life(tmp_path)
    assert (again.role.restored, again.role.replayed) == (None, count)
    again.end()


def test_a_stop_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    life = Life(tmp_path, frames=2)
    life.write(3)
    life.turn()
    life.end(clean=True)
    assert Life(tmp_path).role.restored == 3


def test_state_outside_the_frames_stays_unsaved_until_a_checkpoint_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint whose write failed is not retried at once; a stop retries it."""
    life = Life(tmp_path, frames=10)
    life.write(1)
    life.role.unsaved = 9
    taken = list[bool]()
    with monkeypatch.context() as patched:
        patched.setattr(checkpointing, "write_checkpoint", no_permission)
        life.turn()
        for _ in range(9):
            life.turn()
            taken.append(life.checkpointing.busy)
    assert checkpoints(tmp_path) == []
    assert taken[0]
    assert not taken[-1]
    life.role.unsaved = 19
    assert life.checkpointing.due, "enough frames were written since"
    life.end(clean=True)
    assert len(checkpoints(tmp_path)) == 1


def no_permission(*_: object) -> int:
    raise PermissionError(13, "no")


def test_payloads_are_numbered() -> None:
    assert int(numbered(17)[:6]) == 17
