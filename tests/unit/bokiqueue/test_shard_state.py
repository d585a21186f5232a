"""The state of a shard: the receiver of each message, expired leases, dead letters."""

from __future__ import annotations

import msgspec
import pytest

from bokiqueue import shard_state
from bokiqueue.records import (
    Acknowledge,
    CancelClaim,
    Claim,
    Command,
    DiscardDeadLetters,
    ExtendClaim,
    Purge,
    PushMessage,
    Requeue,
    ReviveDeadLetters,
    SetAside,
    decode_snapshot,
    encode,
    id_digest,
)
from bokiqueue.shard_state import ID_S, ShardState
from indilog.base.log import Record


def push(
    *, priority: int = 0, delay: float = 0.0, tries: int = 3, push_id: str | None = None
) -> PushMessage:
    digest = None if push_id is None else id_digest(push_id)
    return PushMessage(b"x", priority, delay, tries, digest)


class Story:
    """A state, and records appended at consecutive seqnums and advancing times."""

    def __init__(self, state: ShardState | None = None, end: int = 0) -> None:
        self.state = ShardState() if state is None else state
        self.end = end
        self.now = 100.0

    def add(self, *commands: Command) -> tuple[int, ...]:
        """Append one record; return what its last command changed."""
        record = Record(self.end, b"", encode(*commands), 0.0, self.now)
        outcome = self.state.apply(record)
        assert outcome.seqnum == self.end
        self.end += 1
        self.state.check_invariants()
        return outcome.touched[-1] if commands else ()

    def all(self, *commands: Command) -> list[tuple[int, ...]]:
        """Append a record for each command."""
        return [self.add(command) for command in commands]

    def restored(self) -> Story:
        """Return the story as a process continues it from a checkpoint."""
        content = msgspec.msgpack.encode(self.state.snapshot())
        again = Story(ShardState(decode_snapshot(content)), self.end)
        again.now = self.now
        again.state.check_invariants()
        assert again.state.snapshot() == self.state.snapshot()
        return again


def test_messages_are_claimed_in_the_order_of_their_pushes() -> None:
    story = Story()
    results = story.all(push(), push(), push(), Claim(1, 5.0), Claim(9, 5.0), Claim(1, 5.0))
    assert results[3:] == [(0,), (1, 2), ()]


def test_a_higher_priority_goes_first() -> None:
    story = Story()
    results = story.all(push(), push(priority=2), push(priority=2), *[Claim(1, 5.0)] * 3)
    assert results[3:] == [(1,), (2,), (0,)]


def test_an_acknowledged_message_is_never_claimed_again() -> None:
    story = Story()
    assert story.all(push(), Claim(1, 5.0), Acknowledge(1, (0,))) == [(0,), (0,), (0,)]
    story.now += 1000
    assert story.add(Claim(1, 5.0)) == ()
    assert len(story.state) == 0


def test_an_acknowledgement_counts_once() -> None:
    story = Story()
    results = story.all(push(), Claim(1, 5.0), Acknowledge(1, (0, 0)), Acknowledge(1, (0,)))
    assert results[2:] == [(0,), ()]


def test_a_lease_expires_by_the_time_of_records_not_before() -> None:
    story = Story()
    story.all(push(), Claim(1, 5.0))
    story.now += 4.9
    assert story.add(Claim(1, 5.0)) == ()
    story.now += 0.1
    assert story.add(Claim(1, 5.0)) == (0,)
    assert story.add(Acknowledge(1, (0,))) == (), "the first claim has lost it"
    assert story.add(Acknowledge(3, (0,))) == (0,)


def test_a_clock_that_jumps_back_does_not_prolong_a_lease() -> None:
    story = Story()
    story.all(push(), push(), Claim(1, 5.0))
    story.now += 5
    story.add()
    story.now -= 50
    assert story.add(Claim(1, 5.0)) == (0,)
    assert story.state.clock == 105.0


def test_a_released_message_keeps_its_position() -> None:
    story = Story()
    story.all(push(), push(), Claim(1, 5.0), Requeue(2, (0,), 0.0))
    assert story.all(Claim(1, 5.0), Claim(1, 5.0)) == [(0,), (1,)]


def test_a_message_released_with_a_delay_waits() -> None:
    story = Story()
    story.all(push(), Claim(1, 5.0), Requeue(1, (0,), 3.0))
    assert story.add(Claim(1, 5.0)) == ()
    story.now += 3
    assert story.add(Claim(1, 5.0)) == (0,)


def test_a_delayed_push_waits() -> None:
    story = Story()
    story.all(push(delay=3.0), push())
    assert story.all(Claim(2, 5.0)) == [(1,)]
    assert story.state.next_due() == 103.0
    story.now += 3
    assert story.add(Claim(2, 5.0)) == (0,)


def test_an_extended_lease_ends_later() -> None:
    story = Story()
    story.all(push(), Claim(1, 5.0))
    story.now += 4
    assert story.add(ExtendClaim(1, (0,), 5.0)) == (0,)
    story.now += 4
    assert story.add(Claim(1, 5.0)) == ()
    assert story.add(Acknowledge(1, (0,))) == (0,)


def test_a_message_becomes_a_dead_letter_after_its_tries() -> None:
    story = Story()
    story.all(push(tries=2), Claim(1, 5.0), Requeue(1, (0,), 0.0))
    assert story.add(Claim(1, 5.0)) == (0,)
    story.now += 5
    assert story.add(Claim(1, 5.0)) == ()
    assert [m.seqnum for m in story.state.dead] == [0]
    assert len(story.state) == 0


def test_a_dead_letter_can_be_revived_or_discarded_once() -> None:
    story = Story()
    story.all(push(tries=1), push(tries=1), Claim(2, 5.0), Requeue(2, (0, 1), 0.0))
    revive, discard = ReviveDeadLetters((0,)), DiscardDeadLetters((1, 0))
    assert story.all(revive, revive, discard, Claim(2, 5.0)) == [(0,), (), (1,), (0,)]
    assert story.state.dead == ()


def test_the_ready_estimate_counts_expired_leases_and_delays() -> None:
    story = Story()
    story.all(push(), push(delay=2.0), push(delay=4.0), Claim(1, 3.0))
    ready = [story.state.ready(now) for now in (100.0, 102.0, 103.0, 104.0)]
    assert ready == [0, 1, 2, 3]


def test_a_state_restored_from_a_checkpoint_continues_at_its_position() -> None:
    story = Story()
    story.all(
        push(tries=1), push(push_id="a"), push(delay=9.0), push(priority=3), push(),
        Claim(1, 5.0, 7), Requeue(5, (3,), 0.0), Claim(2, 1.0, 8), CancelClaim(9),
    )  # fmt: skip
    story.now += 2
    story.add(Claim(1, 5.0))
    again = story.restored()
    story.now += 10
    again.now += 10
    later: list[Command] = [push(push_id="a"), Claim(1, 5.0, 9), Claim(9, 5.0)]
    assert again.all(*later) == story.all(*later)


def test_a_revived_dead_letter_is_delivered_after_a_checkpoint() -> None:
    story = Story()
    story.all(push(tries=1), Claim(1, 5.0), Requeue(1, (0,), 0.0), ReviveDeadLetters((0,)))
    again = story.restored()
    assert again.state.dead == ()
    assert again.add(Claim(1, 5.0)) == (0,)


def test_the_needed_records_begin_at_the_oldest_outstanding_message() -> None:
    story = Story()
    story.all(push(), push(tries=1), push(), Claim(2, 5.0), Acknowledge(3, (0,)))
    assert story.state.needed_from(story.end) == 1
    story.add(Requeue(3, (1,), 0.0))
    assert story.state.needed_from(story.end) == 1, "a dead letter is kept"
    story.all(DiscardDeadLetters((1,)), Claim(1, 5.0), Acknowledge(7, (2,)))
    assert story.state.needed_from(story.end) == story.end == 9


def test_the_commands_of_a_record_take_effect_in_their_order() -> None:
    story = Story()
    story.all(push(), push(), Claim(1, 5.0))
    assert story.add(Requeue(2, (0,), 0.0), Claim(1, 5.0), Claim(1, 6.0)) == (1,)
    assert story.add(Acknowledge(3, (0,)), Acknowledge(3, (1,))) == (1,)
    assert len(story.state) == 0


def test_a_push_with_a_remembered_id_has_no_effect() -> None:
    story = Story()
    pushes = [push(push_id="a"), push(push_id="b"), push(push_id="a"), push()]
    assert story.all(*pushes) == [(0,), (1,), (), (3,)]
    story.all(Claim(9, 5.0), Acknowledge(4, (0, 1, 3)))
    assert story.add(push(push_id="a")) == (), "also after the message was acknowledged"
    story.now += ID_S - 1
    assert story.restored().add(push(push_id="a")) == (), "and after a checkpoint"
    story.now += 1
    assert story.add(push(push_id="a")) == (story.end - 1,), "a week later it is forgotten"


def test_a_shard_remembers_the_newest_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_state, "IDS_MAX", 2)
    story = Story()
    story.all(*[push(push_id=name) for name in "abc"])
    assert [bool(story.add(push(push_id=name))) for name in "cba"] == [False, False, True]


def test_a_cancelled_claim_returns_its_messages_and_is_no_try() -> None:
    story = Story()
    story.all(push(tries=1), push(tries=1), Claim(1, 5.0, 7))
    assert story.add(CancelClaim(7)) == (0,)
    assert story.add(Acknowledge(2, (0,))) == ()
    assert story.all(Claim(1, 5.0, 8), Claim(1, 5.0)) == [(0,), (1,)]
    message = story.state.message(0)
    assert message is not None
    assert message.tries == 1


def test_a_claim_that_was_cancelled_before_it_appeared_gets_nothing() -> None:
    story = Story()
    story.all(push(), push(), CancelClaim(7))
    again = story.restored()
    assert again.add(Claim(1, 5.0, 7)) == ()
    assert again.add(Claim(1, 6.0, 7), Claim(1, 7.0, 7)) == (), "of consumers with other leases"
    assert again.add(Claim(1, 5.0, 8)) == (0,)


def test_cancelled_claims_that_never_appear_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_state, "CANCELLED_MAX", 2)
    story = Story()
    story.all(push(), CancelClaim(1), CancelClaim(2), CancelClaim(3))
    assert story.all(Claim(1, 5.0, 2), Claim(1, 5.0, 1)) == [(), (0,)]


def test_a_claim_without_an_identity_cannot_be_cancelled() -> None:
    story = Story()
    story.all(push(), Claim(1, 5.0))
    assert story.add(CancelClaim(0)) == ()
    assert story.add(Acknowledge(1, (0,))) == (0,)


def test_a_delivery_that_no_consumer_got_is_no_try() -> None:
    story = Story()
    story.all(push(tries=1), Claim(1, 5.0))
    assert story.add(Requeue(1, (0,), 0.0, is_no_try=True)) == (0,)
    assert story.add(Claim(1, 5.0)) == (0,)


def test_a_message_set_aside_does_not_need_its_push() -> None:
    story = Story()
    story.all(push(), push(tries=1), push(delay=9.0), Claim(9, 5.0))
    story.all(Acknowledge(3, (0,)), Requeue(3, (1,), 0.0))
    assert story.state.needed_from(story.end) == 1
    assert story.state.aside_from(story.end) == 2, "pushed with a delay"
    assert story.add(SetAside(1, b"x")) == (1,)
    assert story.state.needed_from(story.end) == story.end
    message = story.restored().state.message(1)
    assert message is not None
    assert message.content == 6
    story.now += 9
    story.all(Claim(1, 5.0), Acknowledge(7, (2,)))
    assert story.state.aside_from(story.end) == 6
    assert story.add(SetAside(2, b"x")) == (), "it is gone"


def test_messages_that_pin_their_shard_are_to_be_set_aside() -> None:
    story = Story()
    story.all(push(tries=1), push(), Claim(1, 5.0), Claim(1, 500.0), Requeue(2, (0,), 0.0))
    for _ in range(20):
        story.add()
    assert [m.seqnum for m in story.state.to_set_aside(15, story.end)] == [0, 1]
    assert story.state.to_set_aside(5, story.end) == [], "the other records are kept anyway"
    story.add(SetAside(0, b"x"))
    assert [m.seqnum for m in story.state.to_set_aside(15, story.end)] == [1]


def test_a_message_just_before_a_backlog_is_not_set_aside() -> None:
    story = Story()
    story.all(*[push() for _ in range(30)], Claim(1, 500.0))
    assert story.state.to_set_aside(25, story.end) == []


def test_a_purge_removes_all_messages_but_dead_letters() -> None:
    story = Story()
    story.all(push(tries=1), push(), push(delay=9.0), push(), Claim(2, 5.0))
    story.add(Requeue(4, (0,), 0.0))
    assert sorted(story.add(Purge(is_dead=False))) == [1, 2, 3]
    assert (len(story.state), story.state.leased, len(story.state.dead)) == (0, 0, 1)
    assert story.add(Acknowledge(4, (1,))) == ()
    assert story.add(Purge(is_dead=True)) == (0,)
    assert story.add(push()) == (story.end - 1,)


def test_a_consumers_record_may_elect_the_writer_of_a_checkpoint() -> None:
    story = Story()
    elected = []
    for commands in ([push()], [Claim(1, 5.0)], [Acknowledge(1, (0,))], []):
        story.add(*commands)
        elected.append(story.state.may_elect())
    assert elected == [False, True, True, False], "the last is a record of others"
