"""Outcomes that are held for a run: no time and no limit ends that, only their release."""

from __future__ import annotations

import itertools

import pytest

from indilog.base.errors import OverloadedError
from indilog_compute.invocations.checkpoint import checkpoint_parts, newest_checkpoint
from indilog_compute.invocations.held_invocations import HOLDERS_PAGE, HeldLimits
from indilog_compute.invocations.invocation_table import InvocationTable, TableLimits
from indilog_compute.invocations.records import (
    CallsReleased,
    Event,
    ExecutorHeartbeat,
    InvocationAccepted,
    InvocationEnded,
    held_stream,
)

KEPT_S = 100.0
LIMITS = TableLimits(
    results_kept_s=KEPT_S,
    results_kept_max=2,
    keys_kept_max=2,
    results_kept_bytes_max=100,
    retry_s_min=1.0,
    retry_s_max=4.0,
)
EXECUTOR = "node-a#1"


class Story:
    """Records, one after the other, at times of the test's choosing."""

    def __init__(self) -> None:
        self.table = InvocationTable(LIMITS)
        self._seqnums = itertools.count()
        self.time = 1000.0

    def __call__(self, event: Event, *, after_s: float = 0.0) -> None:
        self.time += after_s
        self.table.apply(next(self._seqnums), self.time, event)
        self.table.check_invariants()

    def accept(self, key: str, *, holder: str = "run", function: str = "app.f") -> None:
        self(InvocationAccepted(
            id=f"i-{key}", executor=EXECUTOR, function=function, arguments=b"{}", position=0,
            stream=held_stream(holder), key=key, holder=holder,
        ))  # fmt: skip

    def end(self, key: str, result: bytes = b"1") -> None:
        self(InvocationEnded(EXECUTOR, f"i-{key}", 0, result))

    def pass_time(self, seconds: float) -> None:
        self(ExecutorHeartbeat(EXECUTOR), after_s=seconds)

    def release(self, *keys: str) -> None:
        self(CallsReleased(tuple(f"i-{key}" for key in keys)))

    def keeps(self, key: str, function: str = "app.f") -> bool:
        return self.table.with_key(function, key) is not None


def test_a_held_outcome_outlives_every_retention_and_limit() -> None:
    story = Story()
    story.accept("held")
    story.end("held", b"x" * 1000)
    for number in range(10):  # more keys and bytes than are kept
        story.accept(f"k{number}", holder="")
        story.end(f"k{number}", b"x" * 40)
    story.pass_time(1000 * KEPT_S)
    assert not story.keeps("k9")
    assert story.keeps("held")


def test_the_retention_of_a_released_outcome_begins_at_its_release() -> None:
    story = Story()
    story.accept("held")
    story.end("held")
    story.pass_time(1000 * KEPT_S)
    story.release("held", "unknown")
    story.pass_time(KEPT_S - 1)
    assert story.keeps("held"), "an execution that is still inside the call may ask for it"
    story.pass_time(2)
    assert not story.keeps("held")
    assert story.table.held.total == story.table.held.size == 0


def test_a_call_released_before_its_end_is_kept_like_others() -> None:
    story = Story()
    story.accept("held")
    story.release("held")
    story.end("held")
    story.release("held")  # a repetition changes nothing
    story.pass_time(KEPT_S + 1)
    assert not story.keeps("held")


def test_a_held_outcome_keeps_its_records_in_the_log() -> None:
    story = Story()
    story.accept("held")
    story.end("held")
    story.pass_time(1000 * KEPT_S)
    assert (held_stream("run"), 0) in story.table.trimmable(story.table.end)
    story.release("held")
    story.pass_time(KEPT_S + 1)
    story.table.not_trimmed([held_stream("run")])
    assert (held_stream("run"), story.table.end) in story.table.trimmable(story.table.end)


def test_a_checkpoint_says_what_is_held_and_since_when_the_others_are_kept() -> None:
    story = Story()
    for key in ("open", "held", "released"):
        story.accept(key)
    story.end("released")
    story.end("held")
    story.pass_time(10 * KEPT_S)
    story.release("released")
    found = newest_checkpoint(enumerate(checkpoint_parts(story.table.checkpoint(), "c"), 50))
    assert found is not None
    story.table = InvocationTable.restored(LIMITS, found)
    story.table.check_invariants()
    assert story.table.held.total == 2
    story.pass_time(KEPT_S - 1)
    assert story.keeps("released")
    story.pass_time(2)
    assert not story.keeps("released")
    assert story.keeps("held")
    assert story.keeps("open")


def test_a_holder_releases_some_of_its_calls_or_all() -> None:
    story = Story()
    for number in range(3):
        story.accept(f"k{number}")
    story.accept("other", holder="run2")
    held = story.table.held
    assert [one.key for one in held.of("run", ["k1", "k7", "other"])] == ["k1"]
    assert [one.key for one in held.of("run", [])] == ["k0", "k1", "k2"]
    assert list(held.of("unknown", [])) == []


def test_holders_are_read_in_pages_by_the_prefix_of_their_names() -> None:
    story = Story()
    names = [f"shop\x1f{number:04}" for number in range(HOLDERS_PAGE + 3)]
    for holder in (*names, "shop/2\x1fa", "sho\x1fz", "shoq"):
        story.accept(f"k-{holder}", holder=holder)
    held, prefix = story.table.held, "shop\x1f"
    assert held.holders(prefix, "") == names[:HOLDERS_PAGE]
    assert held.holders(prefix, names[HOLDERS_PAGE - 1]) == names[HOLDERS_PAGE:]
    assert held.holders(prefix, names[-1]) == []


@pytest.mark.parametrize(
    "limits",
    [
        HeldLimits(total=4, size=10_000, share=0.5),
        HeldLimits(total=100, size=12, share=0.5),
        HeldLimits(total=3, size=10_000, share=1.0),
        HeldLimits(total=100, size=7, share=1.0),
    ],
    ids=["calls of one app", "bytes of one app", "calls", "bytes"],
)
def test_a_call_beyond_a_limit_is_refused_in_one_sentence(limits: HeldLimits) -> None:
    story = Story()
    story.table.held.check_room("app", limits)
    for number, function in enumerate(["app.f", "app.f", "other.f"]):
        story.accept(f"k{number}", function=function)
        story.end(f"k{number}")  # three bytes each
    with pytest.raises(OverloadedError, match=r"2 calls of app app, with 6 bytes, are held"):
        story.table.held.check_room("app", limits)
    story.release("k0", "k1")
    story.table.held.check_room("app", limits)
