"""Locks in any interleaving of their callers, against a plain replay of the log.

Each caller is a process of its own; the stepper decides which one makes the next call of the log. A
read that waits lets time pass. Their results (the lock was acquired, or lost) must equal those of a
simple model that replays the log afterwards.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bokiflow import HeldLock, Lock, LockLostError, LockTimeoutError
from bokiflow.locks import lock as lock_module
from bokiflow.locks import lock_replica
from bokiflow.locks.lock_records import (
    SECONDS_MAX,
    Acquire,
    Command,
    ExtendLease,
    LockSnapshot,
    QueuePlace,
    Release,
    Remind,
    decode_command,
    decode_snapshot,
    encode,
)
from bokiflow.locks.lock_replica import new_replica, replica_of
from bokiflow.locks.lock_state import LockState
from indilog.base.errors import AppendOutcomeUnknownError
from indilog.base.ids import SeqNum
from indilog.base.log import Record, Session
from indilog.testing.stepper import Choose, interleavings, run_stepped
from tests.support.elapsing_log import ElapsingLog, Kept, Time

NAME = "hotel:7"


class OwnLog(ElapsingLog):
    """A log that shares nothing with others in the process."""

    @property
    def scope(self) -> object:
        return self


class Model:
    """A simple replay of the lock.

    Attributes:
        holders: per record, who holds the lock after it: a token, or None.
        done: per release or extension, whether its sender held the lock.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.line: list[dict[str, Any]] = []
        self.holders: dict[SeqNum, SeqNum | None] = {}
        self.done: dict[SeqNum, bool] = {}
        self.released: set[SeqNum] = set()
        self.clock = 0.0
        for record in records:
            if f"lock:{NAME}" in record.tags:
                self.add(record)

    def add(self, record: Record) -> None:
        self.clock = max(self.clock, record.ordered_at)
        self.line = self.line[:1] + [w for w in self.line[1:] if w["leaves"] > self.clock]
        if self.line and self.line[0]["ends"] <= self.clock:
            self.line.pop(0)
            self.promote()
        first = self.line[0]["token"] if self.line else None
        match decode_command(record.data):
            case Acquire(owner, lease, wait):
                self.acquire(record.seqnum, owner, lease, wait)
            case Release(token):
                self.done[record.seqnum] = token == first or token in self.released
                self.released |= {token} & {first}
                self.line = [one for one in self.line if one["token"] != token]
                if token == first:
                    self.promote()
            case ExtendLease(token, lease):
                self.done[record.seqnum] = token == first
                if token == first:
                    self.line[0]["ends"] = self.clock + lease
            case Remind():
                pass
            case other:
                raise AssertionError(f"no command is {other}")
        self.holders[record.seqnum] = self.line[0]["token"] if self.line else None

    def acquire(self, seqnum: SeqNum, owner: str, lease: float, wait: float | None) -> None:
        for place, one in enumerate(self.line):
            if one["owner"] == owner:
                if place == 0:
                    one["ends"] = self.clock + lease
                return
        leaves = float("inf") if wait is None else self.clock + wait
        self.line.append({"token": seqnum, "owner": owner, "lease": lease, "leaves": leaves})
        if len(self.line) == 1:
            self.promote()

    def promote(self) -> None:
        for one in self.line[:1]:
            one["ends"] = self.clock + one["lease"]


class Person:
    """One process: executes its actions, and notes their results."""

    def __init__(self, logs: Kept, time: Time, name: str) -> None:
        self.logs = logs
        self.log = OwnLog(logs.log("work", Session()), time)
        self.time = time
        self.name = name
        self.held: list[HeldLock] = []
        self.released: list[HeldLock] = []
        self.got: list[tuple[SeqNum, SeqNum]] = []
        """Tokens, each with the last record that there was when it was got."""
        self.reported: dict[SeqNum, bool] = {}

    async def live(self, program: Sequence[tuple[Any, ...]]) -> None:
        for action in program:
            match action:
                case ("acquire", owner, lease, wait):
                    await self.acquire(owner and self.name + owner, lease, wait)
                case ("pass", seconds):
                    self.time.now += seconds
                case ("release" | "release again" as what,):
                    await self.release(is_repeated=what == "release again")
                case ("extend", seconds):
                    if self.held:
                        await self.append(self.held[0].extend(seconds))
                case ("restart",):
                    self.restart()
                case _:
                    raise AssertionError(f"no action is {action}")

    def restart(self) -> None:
        """Drop all state, so that it is a new process from now on."""
        self.log = OwnLog(self.logs.log("work", Session()), self.time)
        self.held = []

    async def acquire(self, owner: str | None, lease: float, wait: float) -> None:
        with contextlib.suppress(LockTimeoutError, AppendOutcomeUnknownError):
            lock = Lock(self.log, NAME, lease=lease, wait=wait, owner=owner)
            held = await lock.acquire()
            self.held.append(held)
            self.got.append((held.token, held._replica.end - 1))

    async def release(self, *, is_repeated: bool) -> None:
        """Release the lock held longest; or repeat the first release, with what is known now."""
        if is_repeated and self.released:
            token, replica = self.released[0].token, replica_of(self.log, NAME)
            await self.append(HeldLock(self.log, NAME, replica, token).release())
        elif self.held and not is_repeated:
            self.released.append(self.held.pop(0))
            await self.append(self.released[-1].release())

    async def append(self, reported: Coroutine[Any, Any, None]) -> None:
        try:
            await reported
        except LockLostError:
            self.reported[self.last_command()] = False
        except AppendOutcomeUnknownError:
            pass  # others trimmed the record before it was read here
        else:
            self.reported[self.last_command()] = True

    def last_command(self) -> SeqNum:
        """The record that showed it; a checkpoint may have followed."""
        kept = self.logs.kept
        return next(s for s in reversed(self.log.appended) if decode_command(kept[s].data))


def check(logs: Kept, people: Sequence[Person]) -> Model:
    model = Model(logs.kept)
    granted = [token for token in model.holders.values() if token is not None]
    assert granted == sorted(granted), "tokens grow with every holder"
    for person in people:
        for token, seen in person.got:
            assert model.holders[seen] == token, "a caller that learned that it has the lock had it"
        for seqnum, held in person.reported.items():
            assert model.done[seqnum] == held
    newcomer = new_replica(NAME)
    run_stepped([newcomer.catch_up(logs.log("work", Session()))], lambda ready: ready[0])
    line = [place.token for place in newcomer.state.snapshot().queue]
    assert line == [one["token"] for one in model.line], "who begins now finds the lock as it is"
    return model


seconds = st.sampled_from([1.0, 2.0, 5.0])
actions = st.one_of(
    st.tuples(
        st.just("acquire"), st.sampled_from([None, None, "a"]), seconds,
        st.sampled_from([0.0, 1.0, 20.0]),
    ),
    st.tuples(st.just("release")),
    st.tuples(st.just("release")),
    st.tuples(st.just("extend"), seconds),
    st.tuples(st.just("pass"), seconds),
    st.tuples(st.just("release again")),
    st.tuples(st.just("restart")),
)  # fmt: skip


def in_turns(seed: int, calls_max: int) -> Choose:
    """Draw the process that continues, and for how many calls; all others are paused meanwhile."""
    chance = random.Random(seed)
    who, calls = -1, 0

    def choose(ready: Sequence[int]) -> int:
        nonlocal who, calls
        if calls <= 0 or who not in ready:
            who, calls = chance.choice(ready), chance.randint(1, calls_max)
        calls -= 1
        return who

    return choose


@settings(max_examples=150, deadline=None)
@given(
    programs=st.lists(st.lists(actions, min_size=1, max_size=10), min_size=1, max_size=3),
    order_seed=st.integers(0, 2**32),
    calls_max=st.sampled_from([1, 12, 40]),
    checkpoint_every=st.sampled_from([2, 3, 1024]),
)
def test_every_caller_gets_the_result_of_a_plain_replay_of_the_log(
    programs: list[list[tuple[Any, ...]]], order_seed: int, calls_max: int, checkpoint_every: int
) -> None:
    time = Time()
    logs = Kept(time)
    people = [Person(logs, time, f"person {n}") for n in range(len(programs))]
    with (
        mock.patch.object(lock_module, "seconds_now", time),
        mock.patch.object(lock_replica, "CHECKPOINT_EVERY", checkpoint_every),
    ):
        run_stepped(
            [person.live(program) for person, program in zip(people, programs, strict=True)],
            in_turns(order_seed, calls_max),
        )
    check(logs, people)
    for person in people:
        replica_of(person.log, NAME).state.check_invariants()


def one_who_stands_still(seed: int) -> None:
    """Three callers that use the lock repeatedly, with a checkpoint whenever they can."""
    time = Time()
    logs = Kept(time)
    people = [Person(logs, time, f"person {n}") for n in range(3)]
    program = [("acquire", None, 5.0, 100.0), ("release",), ("restart",), ("release again",)] * 4
    with (
        mock.patch.object(lock_module, "seconds_now", time),
        mock.patch.object(lock_replica, "CHECKPOINT_EVERY", 2),
    ):
        run_stepped([person.live(program) for person in people], in_turns(seed, 30))
    check(logs, people)


def test_a_newcomer_finds_the_current_lock_after_a_stalled_checkpoint() -> None:
    for seed in range(150):
        one_who_stands_still(seed)


places = st.integers(0, 2**63 - 1)
durations = st.floats(0, SECONDS_MAX)
owners = st.text(max_size=20)


@given(
    st.one_of(
        st.builds(Acquire, owners, durations, st.none() | durations),
        st.builds(Release, places),
        st.builds(ExtendLease, places, durations),
        st.builds(Remind),
    )
)
def test_a_command_comes_back_as_it_was_written(command: Command) -> None:
    assert decode_command(encode(command)) == command


@given(
    st.builds(
        LockSnapshot,
        durations,
        st.lists(st.builds(QueuePlace, places, owners, durations, st.none() | durations)).map(
            tuple
        ),
        st.lists(places).map(tuple),
    )
)
def test_a_snapshot_comes_back_as_it_was_written(snapshot: LockSnapshot) -> None:
    assert decode_snapshot(msgspec.msgpack.encode(snapshot)) == snapshot


@given(st.binary(max_size=40))
def test_any_bytes_are_a_command_or_nothing(data: bytes) -> None:
    assume(data[:2] != b"\xb0L")
    for text in (data, b"\xb0L\x02" + data):
        command = decode_command(text)
        assert command is None or decode_command(encode(command)) == command


def two_holders(choose: Choose) -> tuple[Model, list[list[str]]]:
    """Two executions that each take the lock and release it, one with a short lease."""
    time = Time()
    logs = Kept(time)
    people = [Person(logs, time, f"person {n}") for n in range(2)]
    programs = [
        [("acquire", None, lease, 100.0), ("pass", 1.0), ("release",)] for lease in (1.5, 30.0)
    ]
    with mock.patch.object(lock_module, "seconds_now", time):
        run_stepped([p.live(program) for p, program in zip(people, programs, strict=True)], choose)
    model = check(logs, people)
    assert not model.line
    return model, [[str(held) for held in person.reported.values()] for person in people]


def test_two_executions_never_hold_a_lock_at_once_in_every_interleaving() -> None:
    outcomes = list(interleavings(two_holders))
    assert len(outcomes) > 100
    reported = {str(reported) for _, reported in outcomes}
    kept, lost = "['True']", "['False']"
    assert reported >= {f"[{kept}, {kept}]", f"[{lost}, {kept}]", f"[{kept}, {lost}]"}


def holder_never_leaves(state: LockState) -> None:
    """A planted bug: leases do not end."""


def release_without_holding(state: LockState, token: SeqNum) -> SeqNum | None:
    """A planted bug: a release is not compared with the token of the holder."""
    if (holder := state.holder) is not None:
        state._leave(holder)
        state._grant()
    return token


@pytest.mark.parametrize(
    ("what", "planted"),
    [("_on_clock", holder_never_leaves), ("_release", release_without_holding)],
)
def test_a_planted_bug_is_caught(what: str, planted: Callable[..., Any]) -> None:
    with (
        mock.patch.object(LockState, what, planted),
        pytest.raises((AssertionError, KeyError)),
    ):
        test_two_executions_never_hold_a_lock_at_once_in_every_interleaving()
