"""Who owns a partition follows from the records alone, and every process agrees."""

from __future__ import annotations

import msgspec
import pytest

from bokiflow.ownership.owners import Owners, mask, preferred
from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import (
    Claimed,
    ExecutorLeft,
    ExecutorRecord,
    Heartbeat,
    Released,
    encode,
)
from indilog.base.log import Record

COUNT = 4


def beat(name: str, end: int = 0, owns: tuple[int, ...] = ()) -> Heartbeat:
    return Heartbeat(name, 5.0, True, True, COUNT, mask(owns, COUNT), end)


def owners(*said: ExecutorRecord | None, after: Owners | None = None, start: int = 0) -> Owners:
    """Apply records at consecutive seqnums; None: a lost record, which no process reads."""
    state = Owners() if after is None else after
    for seqnum, record in enumerate(said, start):
        if record is not None:
            state.apply(Record(seqnum, b"", encode(record), 0.0, float(seqnum)))
    return state


def named(state: Owners) -> list[str]:
    return [owner.executor for owner in state.owners]


def test_a_claim_of_a_free_partition_takes_effect() -> None:
    state = owners(beat("a"), Claimed("a", (0, 2, 99), 0))
    assert named(state) == ["a", "", "a", ""]
    assert state.owned_by("a") == {0: 1, 2: 1}


def test_of_two_claims_of_a_free_partition_the_first_takes_effect() -> None:
    state = owners(beat("a"), Claimed("b", (0,), 1), Claimed("a", (0,), 1))
    assert named(state)[0] == "b"


def test_a_claim_has_no_effect_if_the_owner_wrote_a_record_since() -> None:
    state = owners(beat("a"), Claimed("a", (0,), 0), beat("a", 2, (0,)), Claimed("b", (0,), 2))
    assert named(state)[0] == "a"
    owners(Claimed("b", (0,), 3), after=state, start=4)
    assert named(state)[0] == "b", "its author had read the last heartbeat"
    assert state.dead == {"a": 2}


def test_of_two_claims_of_a_dead_owners_partition_the_first_takes_effect() -> None:
    state = owners(
        beat("a"), Claimed("a", (0, 1), 0), Claimed("b", (0,), 2), Claimed("c", (0, 1), 2)
    )
    assert named(state)[:2] == ["b", "c"]


def test_a_late_heartbeat_returns_nothing_that_was_claimed() -> None:
    state = owners(beat("a"), Claimed("a", (0,), 0), Claimed("b", (0,), 2), beat("a", 2, (0,)))
    assert named(state)[0] == "b"
    assert state.dead == {}, "but it was not dead"


def test_only_an_owner_releases() -> None:
    state = owners(beat("a"), Claimed("a", (0, 1), 0), Released("b", (0,)), Released("a", (1,)))
    assert named(state)[:2] == ["a", ""]
    assert state.owners[1].is_needed


def test_an_executor_that_leaves_owns_nothing_and_names_what_is_open() -> None:
    state = owners(beat("a"), Claimed("a", (0, 1), 0), ExecutorLeft("a", (1,)))
    assert named(state) == [""] * COUNT
    assert [owner.is_needed for owner in state.owners] == [False, True, False, False]
    assert state.executors == {}


def test_the_first_record_fixes_the_number_of_partitions() -> None:
    state = owners(beat("a"), msgspec.structs.replace(beat("b"), count=9))
    assert len(state.owners) == COUNT


def test_a_lost_claim_is_learned_from_the_next_heartbeat_of_the_owner() -> None:
    state = owners(beat("a"), Claimed("a", (0,), 0), None, beat("b", 3, (0,)))
    assert named(state)[0] == "b"


def test_a_lost_release_is_learned_from_the_next_heartbeat_of_the_owner() -> None:
    state = owners(beat("a"), Claimed("a", (0, 1), 0), None, beat("a", 3, (1,)))
    assert named(state)[:2] == ["", "a"]
    assert state.owners[0].is_needed


def test_a_heartbeat_in_flight_during_a_release_takes_nothing_back() -> None:
    state = owners(beat("a"), Claimed("a", (0,), 0), Released("a", (0,)), beat("a", 2, (0,)))
    assert named(state)[0] == ""


def test_a_silent_executor_without_partitions_is_forgotten_by_the_time_of_the_log() -> None:
    state = owners(beat("a"), beat("b"), Claimed("b", (0,), 0))
    owners(beat("c"), after=state, start=30)
    assert set(state.executors) == {"b", "c"}, "an owner is kept until its partitions are claimed"


def test_a_snapshot_restores_the_state() -> None:
    state = owners(beat("a"), Claimed("a", (0, 1), 0), Claimed("b", (0,), 2), Released("a", (1,)))
    again = Owners.restore(msgspec.msgpack.encode(state.snapshot()))
    assert again.snapshot() == state.snapshot()
    assert named(owners(Claimed("c", (1,), 0), after=again, start=4)) == ["b", "c", "", ""]


def test_other_versions_are_refused() -> None:
    for version in (b"\x01", b"\x04"):
        with pytest.raises(FlowVersionError):
            Owners().apply(Record(0, b"", b"\xb0F" + version + b"\x90", 0.0, 0.0))


def test_the_preferred_owner_changes_little_when_an_executor_joins() -> None:
    before = [preferred(p, ["a", "b"]) for p in range(64)]
    after = [preferred(p, ["a", "b", "c"]) for p in range(64)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"c"}
    assert 8 < len(moved) < 36
