"""What an execution releases: outcomes that are durable records of the run, and no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bokiflow.runs.held_calls import _RECORDED_MAX, _TOGETHER, HeldCalls
from indilog import Context
from indilog.base.errors import NotReadyError
from indilog.sdk.runs import holder_of
from indilog.testing import MemoryLogs
from tests.support.flow_executions import NothingHeld

pytestmark = pytest.mark.asyncio


class Caller(NothingHeld):
    """Notes what is released."""

    def __init__(self) -> None:
        self.released: list[tuple[str, tuple[str, ...]]] = []
        self.is_away = False

    async def release(self, holder: str, keys: Sequence[str]) -> None:
        if self.is_away:
            raise NotReadyError("starting")
        self.released.append((holder, tuple(keys)))

    async def call(self, *_: object, **__: object) -> bytes:
        raise AssertionError("nothing is called")

    async def send(self, *_: object, **__: object) -> str:
        raise AssertionError("nothing is sent")


class World:
    """The calls of one execution, and what it has released."""

    def __init__(self) -> None:
        self.caller = Caller()
        self.durable: set[str] = set()
        context = Context(MemoryLogs(), self.caller)
        self.calls = HeldCalls("shop", "r", context, self.durable.__contains__)
        self.holder = holder_of("shop", "r")

    def decide(self, *numbers: str, durable: bool = True) -> None:
        for number in numbers:
            self.calls.note_decided(number, f"key {number}")
            if durable:
                self.durable.add(number)


async def test_an_outcome_that_is_not_durable_stays_held() -> None:
    world = World()
    world.decide("1", "3")
    world.decide("2", durable=False)
    await world.calls.release_recorded()
    await world.calls.release_recorded()
    assert world.caller.released == [(world.holder, ("key 1", "key 3"))]
    world.durable.add("2")
    await world.calls.release_recorded()
    assert world.caller.released[1:] == [(world.holder, ("key 2",))]


async def test_what_could_not_be_released_is_released_later() -> None:
    world = World()
    world.decide("1")
    world.caller.is_away = True
    await world.calls.release_recorded()
    await world.calls.release_all()
    world.caller.is_away = False
    await world.calls.release_recorded()
    assert world.caller.released == [(world.holder, ("key 1",))]


async def test_outcomes_are_released_many_at_a_time() -> None:
    world = World()
    world.decide(*(str(n) for n in range(_TOGETHER - 1)))
    await world.calls.release_if_many()
    assert world.caller.released == []
    world.decide("last")
    await world.calls.release_if_many()
    assert [len(keys) for _, keys in world.caller.released] == [_TOGETHER]


async def test_the_notes_of_recorded_outcomes_are_bounded() -> None:
    """The end of the run releases those that were dropped."""
    world = World()
    world.decide(*(str(n) for n in range(_RECORDED_MAX + 5)))
    await world.calls.release_recorded()
    await world.calls.release_recorded()
    assert [len(keys) for _, keys in world.caller.released] == [_RECORDED_MAX]
    await world.calls.release_all()
    assert world.caller.released[1:] == [(world.holder, ())]


async def test_a_run_without_calls_asks_nothing() -> None:
    world = World()
    await world.calls.release_recorded()
    await world.calls.release_all()
    assert world.caller.released == []


async def test_a_call_that_was_only_begun_is_released_at_the_end() -> None:
    """Its outcome may be held although a cancellation was decided in its place."""
    world = World()
    world.calls.note_begun()
    await world.calls.release_all()
    assert world.caller.released == [(world.holder, ())]
