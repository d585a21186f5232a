"""Lines in the log: a transaction that keeps losing to other processes commits after a bounded
number of other commits.

The model reads the records' JSON with the standard library, and shares no code with the library.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bokistore import ConflictError, Store, Transaction, ViewCache, log_lines
from bokistore.log_lines import LOG_TURN_S, LOSSES_MAX, LinePlace
from bokistore.records import encode_command
from indilog.testing import MemoryLog, MemoryLogs
from indilog.testing.stepper import SteppedLog, run_stepped
from tests.unit.bokistore.processes import Clock

Json: TypeAlias = Any
NAMES = ("a", "b", "c")


class Seen:
    """What the records of a log say about lines, if no place ends by itself.

    Attributes:
        lines: by object, its tokens in their order.
        late: by token and object, the seqnums of commits of others that had no place before it, as
            long as it stood there.
        committed: for each record, whether it took effect.
    """

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {name: [] for name in NAMES}
        self.late: dict[tuple[str, str], list[int]] = {}
        self.committed: list[bool] = []
        self._written: list[set[str]] = []
        self._before: dict[tuple[str, str], set[str]] = {}

    def add(self, record: dict[str, Json]) -> None:
        seqnum = len(self.committed)
        since = range(record.get("horizon", 0), seqnum)
        reads = set(record.get("reads", ()))
        holds = not any(self.committed[s] and self._written[s] & reads for s in since)
        token, leaves = str(record.get("token")), record.get("leaves", ())
        self.committed.append(holds)
        self._written.append(set(record["writes"]))
        for name in record["writes"] if holds else ():
            for other in self.lines[name]:
                if token not in {other, *self._before[other, name]}:
                    self.late[other, name].append(seqnum)
        for name in record.get("enters", ()):
            self._before[token, name] = set(self.lines[name])
            self.late[token, name] = []
            self.lines[name].append(token)
        for name in leaves if holds else ():
            self.lines[name].remove(token)


def seen_in(log: MemoryLog) -> Seen:
    seen = Seen()
    for seqnum in range(log.logs.position):
        record = log.logs.record(seqnum)
        assert record is not None
        seen.add(json.loads(record.data))
    return seen


def still_log() -> MemoryLog:
    """Return a log whose time does not pass, so that no place ends by itself."""
    return MemoryLog("objects", logs=MemoryLogs(clock=lambda: 1000.0))


def adding(names: Sequence[str]) -> Callable[[Transaction], Coroutine[Any, Any, int]]:
    async def body(txn: Transaction) -> int:
        objects = [await txn.get(name) for name in names]
        for obj in objects:
            obj.set("n", obj.get("n", 0) + 1)
        return int(objects[0]["n"])

    return body


programs = st.lists(
    st.lists(
        st.one_of(
            st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
            st.sampled_from(NAMES),
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=2,
    max_size=5,
)
"""For each caller the objects of its transactions; a name alone is a single operation."""


@settings(max_examples=200, deadline=None)
@given(programs=programs, order_seed=st.integers(0, 2**32), losses_max=st.integers(1, 3))
def test_those_in_line_wait_only_for_calls_that_began_before(
    programs: list[list[str | list[str]]], order_seed: int, losses_max: int
) -> None:
    """Two callers share a process. Of the transactions that began before a token was ordered, one
    commits for each object of the token; each other caller may be within one operation.
    """
    log = still_log()
    stores = [Store(SteppedLog(log), cache=ViewCache()) for _ in programs[::2]]
    expected = dict.fromkeys(NAMES, 0)

    async def live(store: Store, program: list[str | list[str]]) -> None:
        for names in program:
            if isinstance(names, str):
                await store.increment(names, "n")
            else:
                await store.transact(adding(names), retries=40)

    for program in programs:
        for names in program:
            for name in names:
                expected[name] += 1
    with (
        mock.patch.object(log_lines, "LOSSES_MAX", losses_max),
        mock.patch("bokistore.lines.LOSSES_MAX", losses_max),
    ):
        run_stepped(
            [live(stores[n // 2], program) for n, program in enumerate(programs)],
            random.Random(order_seed).choice,
        )
    seen = seen_in(log)
    assert not any(seen.lines.values()), "each token has left"
    by_token: dict[str, set[int]] = {}
    for (token, _), late in seen.late.items():
        by_token.setdefault(token, set()).update(late)
    for others in by_token.values():
        assert len(others) <= len(NAMES) + len(programs) - 1
    (final,) = run_stepped([Store(log).multi_get(NAMES)], lambda ready: ready[0])
    assert {name: final[name].get("n", 0) for name in NAMES} == expected


class Adversary:
    """Lets rivals commit between any two steps of the first execution, as long as they can."""

    PATIENCE = 60
    """Steps of rivals without a commit, after which the first execution goes on."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self._tail = 0
        self._steps = 0

    def choose(self, ready: Sequence[int]) -> int:
        tail = self._log.logs.position
        rivals = [number for number in ready if number]
        if not rivals or (0 in ready and (tail > self._tail or self._steps > self.PATIENCE)):
            self._tail, self._steps = tail, 0
            return ready[0]
        self._steps += 1
        return rivals[self._steps % len(rivals)]


def starve(rivals: int, *, with_increments: bool) -> int:
    """Let an adversary hinder a transaction; return how many rivals committed before it."""
    log = still_log()
    is_over: list[int] = []

    async def victim() -> None:
        await Store(SteppedLog(log), cache=ViewCache()).transact(adding("a"), retries=30)
        is_over.append(sum(seen_in(log).committed))

    async def rival(number: int) -> None:
        store = Store(SteppedLog(log), cache=ViewCache())
        while not is_over and log.logs.position < 3000:
            if with_increments and number % 2:
                await store.increment("a", "n")
            else:
                await store.transact(adding("a"), retries=1000)

    run_stepped([victim(), *map(rival, range(rivals))], Adversary(log).choose)
    return is_over[0]


@pytest.mark.parametrize("with_increments", [False, True])
def test_a_transaction_that_an_adversary_hinders_commits_after_a_bounded_number_of_others(
    *, with_increments: bool
) -> None:
    assert starve(3, with_increments=with_increments) <= 60


def test_without_lines_in_the_log_the_adversary_wins() -> None:
    with mock.patch("bokistore.lines.LOSSES_MAX", 10**9), pytest.raises(ConflictError):
        starve(3, with_increments=False)


def test_a_crashed_holder_delays_others_by_its_turn_at_most() -> None:
    clock = Clock()
    log = MemoryLog("objects", logs=MemoryLogs(clock=clock))

    async def cross(store: Store) -> None:
        data = encode_command({}, token="crashed", enters=["a"])
        await log.append(data, tags=["store:a"])
        began = clock.now
        assert await store.transact(adding("a")) == 1
        assert LOG_TURN_S <= clock.now - began <= LOG_TURN_S + 0.1
        began = clock.now
        assert await store.transact(adding("a")) == 2
        assert clock.now - began <= 0.1, "its place is not waited for again"

    run_stepped([cross(Store(SteppedLog(log), cache=ViewCache()))], lambda ready: ready[0])


def test_an_operation_waits_for_a_turn_at_most() -> None:
    clock = Clock()
    log = MemoryLog("objects", logs=MemoryLogs(clock=clock))

    async def cross(store: Store) -> None:
        for token in ("one", "two", "three"):
            data = encode_command({}, token=token, enters=["a"])
            await log.append(data, tags=["store:a"])
        await store.get("a")
        began = clock.now
        await store.increment("a", "n")
        assert LOG_TURN_S <= clock.now - began <= LOG_TURN_S + 0.1

    run_stepped([cross(Store(SteppedLog(log), cache=ViewCache()))], lambda ready: ready[0])


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["enter", "leave"]), st.sampled_from("pqrs"), st.floats(0, 3)),
        max_size=12,
    ),
    asked_s=st.floats(0, 9),
    kept=st.integers(0, 12),
)
def test_a_line_is_the_same_if_ended_places_are_removed_at_any_time(
    events: list[tuple[str, str, float]], asked_s: float, kept: int
) -> None:
    """Replays that start at a checkpoint, or that remove ended places, agree with all others."""
    one: tuple[LinePlace, ...] = ()
    other: tuple[LinePlace, ...] = ()
    now = 1000.0
    for number, (kind, token, pause_s) in enumerate(events):
        now += pause_s
        change = log_lines.entered if kind == "enter" else log_lines.left
        one, other = change(one, token, now), change(other, token, now)
        if number == kept:
            other = log_lines.standing(other, now)
    now += asked_s
    assert log_lines.standing(one, now) == log_lines.standing(other, now)
    first = log_lines.standing(one, now)[:1]
    assert all(place.since + LOG_TURN_S > now for place in first)
    assert all(place.since <= now for place in first)


def test_a_line_is_in_checkpoints() -> None:
    log = MemoryLog("objects", logs=MemoryLogs(clock=lambda: 1000.0))

    async def write() -> None:
        store = Store(log, cache=ViewCache())
        data = encode_command({}, token="one", enters=["a"])
        await store.increment("a", "n")
        await log.append(data, tags=["store:a"])
        replay = store._replay
        assert await replay.checkpoint("a", await replay.view("a")) is not None
        await log.trim(2, tag="store:a")
        log.logs.drop_aux()
        _, line = await Store(log, cache=ViewCache())._replay.line("a")
        assert line == (LinePlace("one", 1000.0),)

    run_stepped([write()], lambda ready: ready[0])


def test_a_place_stays_when_an_operation_replaces_the_object() -> None:
    log = MemoryLog("objects", logs=MemoryLogs(clock=lambda: 1000.0))

    async def write() -> None:
        data = encode_command({}, token="one", enters=["a"])
        await log.append(data, tags=["store:a"])
        await Store(log, cache=ViewCache()).put("a", {"n": 1})
        log.logs.drop_aux()
        _, line = await Store(log, cache=ViewCache())._replay.line("a")
        assert line == (LinePlace("one", 1000.0),)

    run_stepped([write()], lambda ready: ready[0])


def test_losses_max_is_less_than_the_retries_of_a_call() -> None:
    assert LOSSES_MAX < 16


def test_each_place_lasts_a_turn_after_the_one_before() -> None:
    both = log_lines.entered(log_lines.entered((), "one", 1000.0), "two", 1000.0)
    assert log_lines.standing(both, 1000.0 + 1.5 * LOG_TURN_S) == (
        LinePlace("two", 1000.0 + LOG_TURN_S),
    )
    assert log_lines.standing(both, 1000.0 + 2 * LOG_TURN_S) == ()
    rest = log_lines.left(both, "one", 1001.0)
    assert rest == (LinePlace("two", 1001.0),)


def test_a_block_waits_for_those_in_line_before_it_and_reads_afterwards() -> None:
    clock = Clock()
    log = MemoryLog("objects", logs=MemoryLogs(clock=clock))

    async def cross(store: Store) -> None:
        await log.append(encode_command({}, token="one", enters=["a"]), tags=["store:a"])
        began = clock.now
        async with store.transaction() as txn:
            (await txn.get("a")).set("n", 1)
            assert LOG_TURN_S <= clock.now - began <= LOG_TURN_S + 0.1

    run_stepped([cross(Store(SteppedLog(log), cache=ViewCache()))], lambda ready: ready[0])


def test_a_holder_whose_body_fails_leaves_the_line() -> None:
    log = still_log()
    runs: list[int] = []

    async def failing(txn: Transaction) -> None:
        runs.append(1)
        if len(runs) <= LOSSES_MAX:
            (await txn.get("a")).set("m", 1)
            await Store(log, cache=ViewCache()).increment("a", "n")
            return
        assert seen_in(log).lines["a"], "it is in line"
        raise LookupError("the body fails")

    async def fail() -> None:
        with pytest.raises(LookupError):
            await Store(SteppedLog(log), cache=ViewCache()).transact(failing)
        assert not seen_in(log).lines["a"]

    run_stepped([fail()], lambda ready: ready[0])
