"""The primary's record of the progress of a backup."""

from __future__ import annotations

from indilog.base.ids import Instant
from indilog.base.resend import Resend
from indilog_ordering.member_progress import MemberProgress


def streaming(stored: int, sent: int) -> MemberProgress:
    backup = MemberProgress(Resend(1.0, 4.0))
    backup.on_stored(0)
    backup.sent = sent
    backup.on_stored(stored)
    return backup


def test_a_backup_is_probed_until_it_reports_its_length() -> None:
    backup = MemberProgress(Resend(1.0, 4.0))
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


def test_a_late_shorter_length_changes_nothing() -> None:
    """Within one incarnation a copy loses nothing that it acknowledged."""
    backup = streaming(stored=9, sent=9)
    backup.on_stored(0)
    assert (backup.stored, backup.sent) == (9, 9)


def test_a_probe_that_does_not_fit_goes_back_and_never_forward() -> None:
    backup = MemberProgress(Resend(1.0, 4.0))
    places: list[int | None] = []
    for position in (8, 3, 5):
        backup.on_mismatch(position)
        places.append(backup.probe_at)
    assert places == [8, 3, 3]
    assert backup.needs_base(4)
    assert not backup.needs_base(3)


def test_a_gap_between_messages_is_no_reason_to_probe() -> None:
    backup = streaming(stored=3, sent=9)
    backup.on_mismatch(5)
    assert (backup.probed, backup.sent) == (False, 3)
    backup.sent = 9
    backup.on_mismatch(5)
    assert backup.sent == 9, "once"


def test_a_learner_counts_when_it_has_the_entries_and_the_round_is_confirmed() -> None:
    backup = streaming(stored=3, sent=9)
    backup.learner_until = 4, 7
    assert not backup.is_restored(7)
    backup.on_stored(4)
    assert not backup.is_restored(6)
    assert backup.is_restored(7)


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
