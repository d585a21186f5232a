"""Each checker finds its violation in histories made by hand."""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import msgspec
import pytest

from indilog.base.ids import Epoch, ShardId, ViewNumber
from indilog.kernel.metalog import Entry, NewRecords, NewView, NewWriters
from indilog.kernel.view import NO_WRITER, view_of
from tests.simulation.checkers import find_violations
from tests.simulation.history import APPENDS, Evidence, Operation, Seen, Violation
from tests.simulation.metalog_notes import MetalogNotes

Records: TypeAlias = dict[int, tuple[str, bytes, tuple[str, ...]]]

RECORDS: Records = {
    0: ("orders", b"0", ("a",)),
    1: ("orders", b"1", ()),
    2: ("audit", b"2", ("a",)),
    3: ("orders", b"3", ("a",)),
}


def did(number: int, kind: str, value: object, **more: object) -> Operation:
    """Return an operation that took one step of its own."""
    given: dict[str, Any] = {
        "session": 0, "engine": "engine-0", "log": "orders", "outcome": "ok", "limit": 10,
        "invoked": 10 * number, "returned": 10 * number + 5, "value": value,
    }  # fmt: skip
    if kind in APPENDS:
        given["position_after"] = 1  # an append moves its session on
    return Operation(number, kind=kind, **(given | more))


def appended(number: int, seqnum: int, **more: object) -> Operation:
    log, data, tags = RECORDS[seqnum]
    more.setdefault("position_after", 1)
    return did(number, "append", [seqnum], entries=((data, tags),), log=log, **more)


def seen(*seqnums: int) -> tuple[Seen, ...]:
    return tuple(Seen(s, RECORDS[s][1], RECORDS[s][2]) for s in seqnums)


def found(*operations: Operation, **changed: object) -> list[str]:
    """Return which checks found something, with all records appended before anything else."""
    first = [appended(n, n, session=9, invoked=2 * n - 20, returned=2 * n - 19) for n in range(4)]
    given: dict[str, Any] = {"records": RECORDS, "tails": [0, 4], "scans": {}}
    given |= {"ordered_at": [0.0] * 4} | changed
    evidence = Evidence([*first, *operations], **({"shown": frozenset(given["records"])} | given))
    return [violation.check for violation in find_violations(evidence)]


def test_a_history_without_violations_is_clean() -> None:
    assert not found(
        did(5, "read_next", seen(0), tag="a", bound=0),
        did(6, "read_next", seen(3), tag="a", bound=1),
        did(7, "read_next", (), tag="b", bound=0, position_before=1, position_after=1),
        did(8, "read_prev", seen(0), tag="a", bound=2),
        did(9, "read_range", seen(0, 1, 3), bound=0),
        did(9, "subscribe", seen(0, 1), limit=2),
        did(9, "subscribe", (), tag="a"),
        did(10, "read", seen(1), bound=1),
        did(11, "read", (), bound=2, position_before=1, position_after=1),
        did(12, "tail", 4),
        did(13, "find_time", 4, time_s=1.0),
        scans={("engine-0", "orders"): list(seen(0, 1, 3))},
    )


@pytest.mark.parametrize(
    ("check", "operation"),
    [
        ("durable", did(5, "append", [1], entries=((b"x", ()),))),
        ("unique", did(5, "append", [1], entries=((b"1", ()),))),
        ("order", did(5, "append", [1], entries=((b"1", ()),))),
        ("failed", did(5, "append", None, entries=((b"3", ("a",)),), outcome="failed")),
        ("atomic", did(5, "append", None, entries=((b"0", ()), (b"9", ())), outcome="unknown")),
        ("tail", did(5, "tail", 3)),
        ("read_next", did(5, "read_next", seen(3), tag="a", bound=0)),
        ("read_next", did(5, "read_next", (), tag="a", position_before=1, position_after=1)),
        ("read_next", did(5, "read_next", (), tag="a", position_after=1)),
        ("read_next", did(5, "read_next", (), tag="a", fresh=True)),
        ("find_time", did(5, "find_time", 3, time_s=1.0, session=9)),
        ("find_time", did(5, "find_time", 4, time_s=-1.0)),
        ("trim", did(5, "read_next", 3, bound=1, outcome="trimmed")),
        ("trim", did(5, "read_prev", 3, bound=1, outcome="trimmed")),
        ("lost", did(5, "read", None, bound=1, outcome="lost")),
        ("read_prev", did(5, "read_prev", seen(0), tag="a", bound=9, position_before=1)),
        ("read_prev", did(5, "read_prev", seen(3), tag="a", bound=2)),
        ("read_range", did(5, "read_range", seen(0, 3), bound=0)),
        ("read_range", did(5, "read_range", seen(0, 1, 3), bound=0, limit=2)),
        ("subscribe", did(5, "subscribe", seen(0, 3))),
        ("subscribe", did(5, "subscribe", seen(3, 0), tag="a")),
        ("retention", did(5, "retention", (1.0, None))),
        ("limit", did(5, "append", None, entries=((b"x", ()),), outcome="failed", too_large=True)),
        ("limit", did(5, "append", None, outcome="failed", note="TooLargeError: no")),
        ("read", did(5, "read", (), bound=1, position_before=1)),
        ("wrong record", did(5, "read", (Seen(1, b"other", ()),), bound=1)),
        ("wrong record", did(5, "read", seen(2), bound=2)),
        ("session", did(5, "tail", 4, position_before=1)),
        ("wait", did(5, "wait", (), tag="b", wait_s=1.0, returned_s=0.5)),
    ],
)  # fmt: skip
def test_a_broken_guarantee_is_found(check: str, operation: Operation) -> None:
    assert check in found(operation)


def test_a_too_large_append_of_a_process_that_ended_is_a_violation_only_if_it_was_stored() -> None:
    gone = {"outcome": "unknown", "too_large": True, "returned": None}
    assert found(did(5, "append", None, entries=((b"x", ()),), **gone)) == []
    assert "failed" in found(did(5, "append", None, entries=((b"3", ("a",)),), **gone))


def test_stamps_that_go_back_or_lie_ahead_are_found() -> None:
    def checks(operation: Operation, **stamps: float) -> list[str]:
        return found(operation, stamps={int(name[1:]): stamp for name, stamp in stamps.items()})

    tail, asked = did(12, "tail", 4), did(13, "find_time", 2, time_s=-29.5)
    assert checks(tail, s0=-30.0, s1=-30.0, s2=-29.0, s3=-28.0) == []
    assert checks(tail, s0=-30.0, s1=-30.5) == ["time"]
    assert checks(tail, s0=-30.0, s3=1e6) == ["time"]
    assert "find_time" in checks(asked, s1=-29.4, s2=-29.0)


def test_trimmed_records_may_be_gone_and_must_be_reported_as_trimmed() -> None:
    trim = did(5, "trim", None, bound=2)
    assert not found(trim, did(6, "read_next", 2, bound=1, outcome="trimmed"))
    assert not found(trim, did(6, "read_next", seen(3), bound=2), shown=frozenset({2, 3}))
    assert found(trim, did(6, "read_next", seen(1), bound=1)) == ["trim"]
    assert found(trim, did(6, "read_prev", seen(1), bound=1)) == ["trim"]
    assert "dense" in found(trim, shown=frozenset({0, 1, 3}))
    assert "durable" in found(trim, shown=frozenset({0, 1, 2}))


def test_only_records_beyond_a_policy_may_be_gone() -> None:
    def policy(number: int, **bounds: object) -> Operation:
        return did(number, "set_retention", None, **bounds)

    def gone(seconds: float) -> Operation:
        return did(7, "read_next", seen(3), bound=1, returned_s=seconds)

    for allowed in (policy(5, age_s=2.0), policy(5, size_bytes=12)):
        assert not found(allowed, gone(9.0)), allowed
    assert found(policy(5, age_s=2.0), gone(1.5)) == ["read_next"]
    assert found(policy(5, size_bytes=18), gone(9.0)) == ["read_next"], "orders has 18 bytes there"
    assert found(policy(5, age_s=2.0, log="audit"), gone(9.0)) == ["read_next"]
    assert not found(policy(5, age_s=2.0), did(6, "retention", (2.0, None)))
    replaced = policy(5, age_s=2.0), policy(6, size_bytes=1)
    assert found(*replaced, did(7, "retention", (2.0, None))) == ["retention"]
    assert found(*replaced, did(7, "retention", (None, None))) == ["retention"]


def test_a_session_that_has_seen_a_record_must_see_what_is_before_it() -> None:
    assert found(did(5, "read", seen(3), bound=3), did(6, "read_next", (), tag="a")) == [
        "read_next"
    ]


def test_a_hole_an_invented_record_and_a_wrong_scan_are_found() -> None:
    assert "dense" in found(tails=[0, 5])
    assert "phantom" in found(records=RECORDS | {4: ("orders", b"ghost", ())}, tails=[0, 5])
    assert "twice" in found(records=RECORDS | {4: ("orders", b"3", ("a",))}, tails=[0, 5])
    assert "replicas" in found(unknown=(("storage-0", 1),))
    assert "scan" in found(scans={("engine-0", "orders"): list(seen(0, 3))})
    assert "subscribe" in found(subscribed={("engine-0", "orders"): list(seen(0, 1, 1, 3))})


def test_a_reported_loss_must_be_real_and_every_scan_over_a_loss_reports_it() -> None:
    def reported(number: int, *lost: int) -> Operation:
        return did(number, "read_next", lost, bound=0, outcome="lost")

    there = {"lost": frozenset({1}), "shown": frozenset({0, 2, 3})}
    scans: dict[str, Any] = {"scans": {("engine-0", "orders"): seen(0, 3)}}
    named = {"reported_losses": {("engine-0", "orders"): [(1, 2)]}}
    assert not found(reported(5, 1, 2), **there, **scans, **named)
    assert found(reported(5, 1, 3), **there) == ["lost"]
    assert found(did(5, "read_range", seen(0, 3), bound=0), **there) == ["read_range"]
    unseen = did(5, "read", (), bound=1, position_before=1, position_after=1)
    assert found(unseen, **there) == ["read"]
    assert found(**there, **scans) == ["gap"]


def test_100_000_operations_are_checked_without_a_scan_of_the_log_for_each() -> None:
    chance = random.Random(1)
    records: Records = {n: ("orders", b"%d" % n, ("a",) if n % 3 else ()) for n in range(50_000)}
    history = [
        did(
            n,
            "append",
            [n],
            entries=((records[n][1], records[n][2]),),
            session=n % 8,
            position_before=n,
            position_after=n + 1,
        )
        for n in range(50_000)
    ]
    for n in range(50_000, 100_000):
        seqnum = chance.randrange(50_000)
        record = Seen(seqnum, *records[seqnum][1:])
        history.append(did(n, "read_next", (record,), bound=seqnum, session=n % 8))
    assert find_violations(Evidence(history, records, [0, 50_000], {}, frozenset(records))) == []


def sealed_by(*entries: Entry) -> list[str]:
    """Return the checks that committed entries break."""
    violations: list[Violation] = []
    notes = MetalogNotes(violations)
    for entry in entries:
        notes._append(entry)
    return [violation.check for violation in violations]


def finalized_at(position: int) -> NewView:
    view = view_of(engines=2)
    ended = msgspec.structs.replace(
        view.shards[ShardId(0)], writer=NO_WRITER, ended=Epoch(1), finalized=True
    )
    shards = view.shards | {ShardId(0): ended}
    following = msgspec.structs.replace(view, number=ViewNumber(2), shards=shards)
    return NewView(position, ViewNumber(2), Epoch(1), following)


def test_records_beyond_the_entry_that_ended_their_shard_are_found() -> None:
    """A9: after a seal nothing is ordered beyond the sealed tail, so nothing is acknowledged."""
    first = NewRecords(0, ViewNumber(1), Epoch(1), {ShardId(0): 2, ShardId(1): 1})
    other = NewRecords(2, ViewNumber(2), Epoch(1), {ShardId(1): 1})
    beyond = NewRecords(3, ViewNumber(2), Epoch(1), {ShardId(0): 1})
    assert sealed_by(first, finalized_at(1), other) == []
    assert sealed_by(first, finalized_at(1), other, beyond) == ["sealed"]


def test_a_finalized_shard_that_gets_a_writer_is_found() -> None:
    given = NewWriters(1, ViewNumber(2), Epoch(1), {ShardId(0): Epoch(9)})
    assert sealed_by(finalized_at(0), given) == ["sealed"]
