"""What the records of `$invocations` mean: the log's order decides everything."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from indilog_compute.invocations.checkpoint import (
    RecordedInvocation,
    checkpoint_parts,
    newest_checkpoint,
)
from indilog_compute.invocations.invocation_table import InvocationTable, TableLimits
from indilog_compute.invocations.records import (
    EXECUTORS_TAG,
    STREAMS,
    Checkpointed,
    DeclaredDead,
    Event,
    ExecutorHeartbeat,
    Failure,
    Freed,
    InvocationAccepted,
    InvocationEnded,
    InvocationsClaimed,
    InvocationsVersionError,
    decode,
    digest_of,
    encode,
    stream_of,
)

LIMITS = TableLimits(
    results_kept_s=100.0,
    results_kept_max=3,
    keys_kept_max=3,
    results_kept_bytes_max=1000,
    retry_s_min=1.0,
    retry_s_max=4.0,
)
A, B = "node-a#1", "node-b#1"


class Story:
    """Records, one after the other, at times of the test's choosing."""

    def __init__(self, limits: TableLimits = LIMITS) -> None:
        self.table = InvocationTable(limits)
        self.time = 1000.0
        self._seqnums = itertools.count(step=3)

    def __call__(self, event: Event | None, *, after_s: float = 0.0) -> int:
        self.time += after_s
        seqnum = next(self._seqnums)
        self.table.apply(seqnum, self.time, event)
        self.table.check_invariants()
        return seqnum

    def accept(
        self,
        id_: str,
        executor: str = A,
        *,
        key: str = "",
        arguments: bytes = b"{}",
        due: float = 0,
    ) -> int:
        stream = stream_of(due - self.time if due else 0.0)
        return self(InvocationAccepted(
            id=id_, executor=executor, function="app.f", arguments=arguments, position=0,
            stream=stream, key=key, delay_s=due - self.time if due else 0.0,
        ))  # fmt: skip

    def end(self, id_: str, executor: str = A, result: bytes | None = b"1") -> int:
        return self(InvocationEnded(executor, id_, 0, result))

    def __getitem__(self, id_: str) -> RecordedInvocation:
        found = self.table.get(id_)
        assert found is not None
        return found


def claimable(table: InvocationTable, now: float, node: str) -> list[RecordedInvocation]:
    return list(table.claimable(now, node, 5.0, lambda _: False))


def test_an_invocation_due_at_once_is_run_by_the_node_that_accepted_it() -> None:
    story = Story()
    story.accept("i")
    assert (story["i"].executor, story["i"].tries) == (A, 1)
    assert claimable(story.table, story.time, "node-a") == []


def test_an_invocation_due_later_is_run_by_its_first_claimant() -> None:
    story = Story()
    story.accept("i", due=1010.0)
    assert story["i"].executor is None
    assert claimable(story.table, 1009.9, "node-a") == []
    assert claimable(story.table, 1010.0, "node-a") == [story["i"]]
    assert claimable(story.table, 1014.9, "node-b") == []
    assert claimable(story.table, 1015.0, "node-b") == [story["i"]]
    story(InvocationsClaimed(B, ("i",)), after_s=9.0)
    assert story["i"].executor is None, "a claim that the log ordered before it was due"
    story(InvocationsClaimed(B, ("i", "other")), after_s=2.0)
    story(InvocationsClaimed(A, ("i",)))
    run = story["i"]
    assert (run.executor, run.tries) == (B, 1)


def test_the_first_outcome_counts() -> None:
    story = Story()
    story.accept("i")
    first = story.end("i", B, b"1")
    story.end("i", A, b"2")
    assert (story["i"].ended, story["i"].failed) == (first, False)


def test_an_outcome_of_an_unknown_invocation_is_skipped() -> None:
    story = Story()
    story.end("i")
    assert story.table.get("i") is None


def test_invocations_of_an_executor_that_was_declared_dead_are_due_again_after_a_pause() -> None:
    story = Story()
    last = story.accept("i")
    story(DeclaredDead(A, last, B))
    assert story["i"].executor is None
    assert (story["i"].due, story["i"].node) == (story.time + 1.0, "node-b")
    story(InvocationsClaimed(B, ("i",)), after_s=1.0)
    last = story(ExecutorHeartbeat(B))
    story(DeclaredDead(B, last, A))
    assert (story["i"].due, story["i"].tries) == (story.time + 2.0, 2)


def test_an_executor_with_a_later_heartbeat_is_not_dead() -> None:
    story = Story()
    seen = story.accept("i")
    story(ExecutorHeartbeat(A))
    story(DeclaredDead(A, seen, B))
    assert story["i"].executor == A


def test_an_executor_that_was_declared_dead_runs_nothing_any_more() -> None:
    story = Story()
    story(DeclaredDead(A, story.accept("i"), B))
    story.accept("late", A)
    assert story["late"].executor is None
    story(InvocationsClaimed(A, ("i", "late")))
    assert story["i"].executor is None
    assert story.table.is_declared_dead(A)
    assert not story.table.is_declared_dead(B)


def test_a_freed_invocation_may_be_claimed_and_only_lost_tries_count() -> None:
    story = Story()
    story.accept("i")
    story(Freed(B, "i", is_lost=True))
    assert story["i"].executor == A, "only who runs it frees it"
    story(Freed(A, "i", is_lost=False))
    assert (story["i"].tries, story["i"].due) == (0, story.time)
    story(InvocationsClaimed(B, ("i",)))
    story(Freed(B, "i", is_lost=True))
    assert (story["i"].tries, story["i"].due) == (1, story.time + 1.0)


def test_the_first_invocation_with_a_key_counts() -> None:
    story = Story()
    story.accept("first", key="k")
    story.accept("second", B, key="k", arguments=b'{"n":1}')
    assert story.table.get("second") is None
    assert story.table.with_key("app.f", "k") is story["first"]
    assert story.table.with_key("app.g", "k") is None
    story.end("first")
    story.accept("third", key="k")
    assert story.table.get("third") is None


def test_a_key_is_forgotten_with_its_result() -> None:
    story = Story()
    story.accept("first", key="k")
    story.end("first")
    story(None, after_s=99.9)
    assert story.table.with_key("app.f", "k") is not None
    story(None, after_s=0.1)
    assert story.table.with_key("app.f", "k") is None
    story.accept("again", key="k")
    assert story["again"].executor == A


def test_results_are_bounded_in_number_and_in_bytes() -> None:
    story = Story()
    for n in range(5):
        story.accept(f"i{n}")
        story.end(f"i{n}")
    story(None)
    assert [story.table.get(f"i{n}") is not None for n in range(5)] == [False, False, *[True] * 3]
    story.accept("large")
    story.end("large", result=b"x" * 999)
    story(None)
    assert story.table.kept == 0


def test_results_without_a_key_push_out_none_with_one() -> None:
    story = Story()
    story.accept("keyed", key="k")
    story.end("keyed")
    for n in range(9):
        story.accept(f"i{n}")
        story.end(f"i{n}")
    assert story.table.get("keyed") is not None


def test_records_are_needed_from_the_oldest_kept_invocation_on() -> None:
    story = Story(LIMITS._replace(results_kept_max=1))
    long = story.accept("in a year", due=story.time + 366 * 86_400)
    for n in range(3):
        story.accept(f"i{n}")
        story.end(f"i{n}")
    story(ExecutorHeartbeat(A))
    end = story.table.end
    needed = dict(story.table.trimmable(end))
    assert needed == {STREAMS[-1]: long, STREAMS[0]: story["i2"].seqnum, EXECUTORS_TAG: end}
    assert story.table.trimmable(end) == []


def test_nothing_is_trimmed_that_a_checkpoint_does_not_cover() -> None:
    story = Story()
    for n in range(9):
        story.accept(f"i{n}")
        story.end(f"i{n}")
    story(None, after_s=1000.0)
    assert story.table.trimmable(5) == [(STREAMS[0], 5)]


def states(table: InvocationTable) -> object:
    return msgspec.to_builtins(table.checkpoint())


def test_a_fold_that_begins_with_a_checkpoint_agrees_with_one_that_read_everything() -> None:
    story = Story()
    story.accept("over", key="k")
    story.end("over")
    story.accept("runs")
    story.accept("later", due=2000.0)
    story(DeclaredDead(A, story(ExecutorHeartbeat(A)), B))
    story(InvocationsClaimed(B, ("runs",)), after_s=5.0)
    data = checkpoint_parts(story.table.checkpoint(), "c")
    found = newest_checkpoint(enumerate(data, story.table.end))
    assert found is not None
    late = InvocationTable.restored(LIMITS, found)
    late.check_invariants()
    assert states(late) == states(story.table)
    assert late.agrees(data[0])
    more: list[Event] = [
        data[0],
        InvocationAccepted(id="dup", executor=B, function="app.f", arguments=b"{}", position=0,
                 stream=STREAMS[0], key="k"),
        InvocationsClaimed(A, ("later",)),
        InvocationEnded(B, "runs", 0, b"2"),
    ]  # fmt: skip
    for event in more:
        late.apply(story(event), story.time, event)
        late.check_invariants()
    assert states(late) == states(story.table)
    assert late.get("dup") is None
    assert late.checkpointed == found.checkpoint.count


def test_a_fold_that_missed_a_record_does_not_agree_with_a_checkpoint() -> None:
    story, late = Story(), InvocationTable(LIMITS)
    for n in range(3):
        seqnum = story.accept(f"i{n}")
        if n != 1:
            late.apply(seqnum, story.time, None)
    [part] = checkpoint_parts(story.table.checkpoint(), "c")
    assert story.table.agrees(part)
    assert not late.agrees(part)
    story.accept("more")
    assert story.table.agrees(part)


def test_a_checkpoint_that_was_not_finished_is_not_used() -> None:
    story = Story()
    story.accept("i")
    [whole] = checkpoint_parts(story.table.checkpoint(), "whole")
    story.accept("j")
    [last] = checkpoint_parts(story.table.checkpoint(), "half")
    half = msgspec.structs.replace(last, parts=2)
    found = newest_checkpoint([(7, half), (8, whole)])
    assert found is not None
    assert (found.checkpoint.count, found.place) == (1, 9)
    assert newest_checkpoint([]) is None


def test_a_checkpoint_counts_only_if_it_follows_the_newest_one() -> None:
    """A node that was cut off while others covered and trimmed more records something wrong."""
    story = Story()
    story.accept("i")

    def covered(id_: str, follows: int) -> Checkpointed:
        [part] = checkpoint_parts(story.table.checkpoint(), id_, follows)
        return part

    def record(part: Checkpointed) -> int:
        records.append((story(part), part))
        return story.table.checkpoint_place

    records: list[tuple[int, Checkpointed]] = []
    first = record(covered("first", 0))
    story.accept("j")
    second = record(covered("second", first))
    assert second > first
    gapped = msgspec.structs.replace(covered("gapped", first), count=1)
    assert story.table.agrees(gapped), "it does not count"
    assert record(gapped) == second
    assert not story.table.agrees(covered("later", second + 3)), "one was missed"
    for left in (records, records[1:]):
        found = newest_checkpoint(left)
        assert found is not None
        assert (found.place, found.checkpoint.count) == (second, story.table.checkpointed)


def test_a_stale_checkpoint_inside_of_the_one_that_counts_is_skipped() -> None:
    """Trims may have left only the parts of these two checkpoints."""
    story = Story()
    story.accept("i")
    whole = checkpoint_parts(story.table.checkpoint(), "counts", 50, 8)
    [stale] = checkpoint_parts(story.table.checkpoint(), "stale", 20)
    mixed = list(enumerate([whole[0], stale, *whole[1:]], 60))
    found = newest_checkpoint(mixed)
    assert found is not None
    assert found.place == mixed[-1][0] + 1


def test_a_checkpoint_that_lost_a_part_is_skipped() -> None:
    story = Story()
    story.accept("i")
    first = checkpoint_parts(story.table.checkpoint(), "first", 0)
    second = checkpoint_parts(story.table.checkpoint(), "second", 61, 8)
    for lost in (0, 3, len(second) - 1):
        kept = list(enumerate(second, 70))
        del kept[lost]
        found = newest_checkpoint([(60, first[0]), *kept])
        assert found is not None
        assert found.place == 61


def test_a_checkpoint_that_follows_a_lost_one_counts() -> None:
    story = Story()
    story.accept("i")
    [first] = checkpoint_parts(story.table.checkpoint(), "first", 0)
    story.accept("j")
    [third] = checkpoint_parts(story.table.checkpoint(), "third", 71)
    found = newest_checkpoint([(60, first), (80, third)])  # the second was at 70
    assert found is not None
    assert found.place == 81


def test_a_trim_that_failed_is_repeated_with_the_next_checkpoint() -> None:
    story = Story()
    story.accept("i")
    assert story.table.trimmable(9) == [(STREAMS[0], 0)]
    story.table.not_trimmed([STREAMS[0]])
    assert story.table.trimmable(9) == [(STREAMS[0], 0)]


def test_a_large_checkpoint_is_cut_and_put_together() -> None:
    story = Story()
    for n in range(20):
        story.accept(f"i{n}", key="k" * 30_000 + str(n))
    parts = checkpoint_parts(story.table.checkpoint(), "c")
    assert len(parts) > 1
    found = newest_checkpoint(enumerate(parts))
    assert found is not None
    assert states(InvocationTable.restored(LIMITS, found)) == states(story.table)


@pytest.mark.parametrize(
    "event",
    [
        InvocationAccepted(id="i", executor=A, function="a.f", arguments=b"{}", position=3,
                           stream="s", delay_s=5.5, depth=2, key="k", schedule="s", at=60.0,
                           after=5.0),
        InvocationsClaimed(A, ("i", "j")),
        Freed(A, "i", is_lost=True),
        InvocationEnded(A, "i", 7, None, Failure("ValueError", "No.", {"size": 3})),
        InvocationEnded(A, "i", 7, b"[1]"),
        ExecutorHeartbeat(A),
        DeclaredDead(A, 9, B),
        Checkpointed("c", 0, 2, 7, 99, b"..."),
    ],
)  # fmt: skip
def test_a_record_is_read_back(event: Event) -> None:
    assert decode(encode(event)) == event


def test_a_later_format_is_not_skipped() -> None:
    data = bytearray(encode(ExecutorHeartbeat(A)))
    data[2] += 1
    with pytest.raises(InvocationsVersionError, match="invocations has format 4"):
        decode(bytes(data))
    assert decode(b"something else") is None
    assert decode(encode(ExecutorHeartbeat(A))[:-1]) is None


def test_a_record_of_the_format_before_is_read() -> None:
    """It has no holder; a record of an earlier format is refused."""
    event = InvocationAccepted(
        id="i",
        executor=A,
        function="app.f",
        arguments=b"{}",
        position=0,
        stream=STREAMS[0],
        key="k",
    )
    whole = msgspec.msgpack.decode(encode(event)[3:])
    assert whole.pop() == ""
    assert decode(b"\xb0V\x02" + msgspec.msgpack.encode(whole)) == event
    with pytest.raises(InvocationsVersionError, match="invocations has format 1"):
        decode(b"\xb0V\x01" + msgspec.msgpack.encode(whole))


def test_arguments_are_equal_in_any_spelling_of_their_json() -> None:
    assert digest_of(b'{"a": 1, "b": 2}') == digest_of(b'{"b":2,"a":1}')
    assert digest_of(b"") == digest_of(b"{}")
    assert digest_of(b'{"a": 1}') != digest_of(b'{"a": 2}')


def test_one_application_uses_at_most_its_share_of_kept_outcomes() -> None:
    """The keys of another one stay, however many outcomes the first one has."""
    limits = TableLimits(1e9, 4, 4, 1000, 1.0, 4.0, app_kept_share_max=0.5)
    table = InvocationTable(limits)
    seqnum = 0
    for n, function in enumerate(["quiet.f", *["loud.f"] * 8]):
        accepted = InvocationAccepted(
            id=f"i{n}", executor="x#1", function=function, arguments=b"{}", position=0,
            stream=stream_of(0, "k"), key=f"k{n}",
        )  # fmt: skip
        for event in (accepted, InvocationEnded("x#1", f"i{n}", 0, b"r" * 100)):
            table.apply(seqnum, 1.0, event)
            seqnum += 1
        table.check_invariants()
    assert table.with_key("quiet.f", "k0") is not None
    kept = [n for n in range(1, 9) if table.with_key("loud.f", f"k{n}") is not None]
    assert kept == [7, 8]


def test_open_invocations_are_counted_by_application() -> None:
    table = InvocationTable(LIMITS)
    for n, function in enumerate(["a.f", "a.g", "b.f"]):
        accepted = InvocationAccepted(
            id=f"i{n}", executor="x#1", function=function, arguments=b"{}", position=0,
            stream=stream_of(0),
        )  # fmt: skip
        table.apply(n, 1.0, accepted)
    assert (table.open_by_application["a"], table.open_by_application["b"]) == (2, 1)
    table.apply(
        3, 1.0, InvocationEnded("x#1", "i0", 0, None, Failure("InvocationCancelledError", "", {}))
    )
    assert table.open_by_application["a"] == 1
    table.check_invariants()
