"""Logs over cells under races, losses and crashes, by seeds (PITFALLS A6 to A9).

`--seeds N` runs more seeds.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cells.checkers import check
from tests.cells.planted import BUGS, Planted
from tests.cells.world import World

SEEDS = 100
CAUGHT_WITHIN = 300


@pytest.mark.heavy
def test_histories_are_those_of_a_log(seeds_wanted: int | None) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(seeds_wanted or SEEDS):
        world = World(seed)
        world.run()
        assert not check(world), f"seed {seed}: {check(world)}"
        outcomes.update(f"{done.kind} {type(done.outcome).__name__}" for done in world.history)
        outcomes["junk"] += sum(len(content) < 10 for content in world.store.first.values())
        outcomes["trimmed"] += sum(not content for content in world.store.cells.values())
    for wanted in (
        "append Placed",
        "append NoneType",
        "append if Placed",
        "append if Contradicted",
        "append if CheckedTooEarly",
        "read Known",
        "trim Applied",
        "junk",
        "trimmed",
    ):
        assert outcomes[wanted], f"{wanted} never happened: {outcomes}"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    for seed in bug.seeds(CAUGHT_WITHIN):
        world = World(seed)
        try:
            world.run()
        except Exception:  # noqa: BLE001 - an assertion of the core, or no end
            return
        if check(world):
            return
    pytest.fail(f"no seed below {CAUGHT_WITHIN} shows that {bug.name}")
