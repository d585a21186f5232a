"""The primary's record of the progress of a backup."""

from __future__ import annotations

from indilog.base.ids import Instant
from indilog.base.resend import Resend
from indilog_ordering.backup_progress import BackupProgress


def streaming(stored: int, sent: int) -> BackupProgress:
    backup = BackupProgress(Resend(1.0, 4.0))
    backup.on_stored(0)
    backup.sent = sent
    backup.on_stored(stored)
    return backup


def test_a_backup_is_probed_until_it_reports_its_length() -> None:
    backup = BackupProgress(Resend(1.0, 4.0))
    before = backup.probed
    backup.sent = 10
    backup.on_stored(7)
    assert (before, backup.probed) == (True, False)
    assert (backup.stored, backup.sent) == (7, 7)


def test_an_answer_about_a_part_of_what_was_sent_does_not_send_the_rest_again() -> None:
    backup = streaming(stored=3, sent=9)
    assert (backup.stored, backup.sent) == (3, 9)


def test_an_answer_that_shows_a_gap_goes_back_once() -> None:
    backup = streaming(stored=3, sent=9)
    backup.on_stored(3)
    assert backup.sent == 3
    backup.sent = 9
    backup.on_stored(3)
    assert backup.sent == 9


def test_progress_after_a_gap_allows_going_back_again() -> None:
    backup = streaming(stored=3, sent=9)
    backup.on_stored(3)
    backup.sent = 9
    backup.on_stored(5)
    backup.on_stored(5)
    assert backup.sent == 5


def test_a_shorter_length_of_a_backup_is_accepted() -> None:
    backup = streaming(stored=9, sent=9)
    backup.on_stored(0)
    assert (backup.stored, backup.sent) == (0, 0)


def test_without_answers_entries_are_resent_from_the_backups_length() -> None:
    backup = streaming(stored=3, sent=9)
    backup.resend.sent(Instant(1.0))
    backup.go_back()
    assert (backup.stored, backup.sent) == (3, 3)
    assert not backup.resend.due


def test_a_backup_that_answers_without_progress_is_resent_entries_with_growing_pauses() -> None:
    """Its syncs are slow: resending unsynced entries would make them slower."""
    backup = streaming(stored=3, sent=9)
    pauses: list[float] = []
    for _ in range(4):
        backup.resend.sent(Instant(0.0))
        pauses.append(backup.resend.due or 0.0)
        backup.on_stored(3)
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    backup.on_stored(4)
    backup.resend.sent(Instant(0.0))
    assert backup.resend.due == 1.0
