"""The check behind the benchmark of replicas (`bench.objects.views`)."""

from __future__ import annotations

import pytest

from bench.objects.views import Execute, FixedPlaces, one_round, sides_of
from bokiviews import At
from indilog.testing import MemoryLog

pytestmark = pytest.mark.asyncio


async def test_replicas_execute_all_commands_and_are_equal() -> None:
    found = await one_round([MemoryLog("bench")], "g", 3, callers=6, seconds=0.05)
    assert found.equal
    assert found.commands_per_s > 0
    assert 0 < found.slowest <= found.fastest <= 1
    assert found.records < 1


async def test_replicas_that_lack_a_command_are_not_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = FixedPlaces.apply, iter(range(1 << 30))

    def forgetful(self: FixedPlaces, command: Execute, at: At) -> int:
        return right(self, command, at) if next(calls) % 7 else self.executed

    monkeypatch.setattr(FixedPlaces, "apply", forgetful)
    assert not (await one_round([MemoryLog("bench")], "g", 2, callers=4, seconds=0.05)).equal


async def test_each_side_puts_and_gets_as_many_keys_as_asked() -> None:
    sides = await sides_of(MemoryLog("bench"), 3, 16)
    assert list(sides) == ["put", "get", "get from the view", "BokiStore put", "BokiStore get"]
    for operation in sides.values():
        await operation(0)
