"""The state of a shard: the receiver of each message, expired leases, dead letters."""

from __future__ import annotations

from bokiqueue.records import (
    Acknowledge,
    Claim,
    Command,
    DiscardDeadLetters,
    ExtendClaim,
    PushMessage,
    Requeue,
    ReviveDeadLetters,
    decode_checkpoint,
    encode,
)
from bokiqueue.shard_state import ShardState


def push(
    data: bytes = b"x", *, priority: int = 0, delay: float = 0.0, tries: int = 3
) -> PushMessage:
    return PushMessage(data, priority, delay, tries)


class Story:
    """A state, and records appended at consecutive seqnums and advancing times."""

    def __init__(self) -> None:
        self.state = ShardState()
        self.now = 100.0

    def add(self, command: Command | None) -> tuple[int, ...]:
        touched = self.state.apply(self.state.end, self.now, command)
        self.state.check_invariants()
        return touched

    def all(self, *commands: Command | None) -> list[tuple[int, ...]]:
        return [self.add(command) for command in commands]


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
    story.add(None)
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


def test_a_fold_restored_from_a_checkpoint_continues_at_its_position() -> None:
    story = Story()
    story.all(
        push(tries=1), push(), push(delay=9.0), push(priority=3), push(), Claim(1, 5.0),
        Requeue(5, (3,), 0.0), Claim(2, 1.0),
    )  # fmt: skip
    story.now += 2
    story.add(Claim(1, 5.0))
    checkpoint = decode_checkpoint(encode(story.state.checkpoint()))
    assert checkpoint is not None
    again = ShardState(checkpoint)
    again.check_invariants()
    assert again.checkpoint() == story.state.checkpoint()
    story.now += 10
    end = story.state.end
    claimed = [state.apply(end, story.now, Claim(9, 5.0)) for state in (again, story.state)]
    assert claimed[0] == claimed[1] != ()


def test_a_revived_dead_letter_is_delivered_after_a_checkpoint() -> None:
    story = Story()
    story.all(push(tries=1), Claim(1, 5.0), Requeue(1, (0,), 0.0), ReviveDeadLetters((0,)))
    checkpoint = decode_checkpoint(encode(story.state.checkpoint()))
    assert checkpoint is not None
    again = ShardState(checkpoint)
    assert again.dead == ()
    assert again.apply(again.end, story.now, Claim(1, 5.0)) == (0,)


def test_the_needed_records_begin_at_the_oldest_outstanding_message() -> None:
    story = Story()
    story.all(push(), push(tries=1), push(), Claim(2, 5.0), Acknowledge(3, (0,)))
    assert story.state.needed_from == 1
    story.add(Requeue(3, (1,), 0.0))
    assert story.state.needed_from == 1, "a dead letter is kept"
    story.all(DiscardDeadLetters((1,)), Claim(1, 5.0), Acknowledge(7, (2,)))
    assert story.state.needed_from == story.state.end == 9
