"""Logs over chains of storage nodes under races, losses, crashes and changes of the layout, by
seeds (PITFALLS A6 to A9, A13).

`--seeds N` runs more seeds.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cells.chain_planted import CHAIN_BUGS
from tests.cells.chain_world import ChainWorld
from tests.cells.checkers import check
from tests.cells.planted import Planted

SEEDS = 30
CAUGHT_WITHIN = 300


def run(seed: int) -> tuple[ChainWorld, list[str]]:
    """Run a seed; return its world, and what is wrong with it."""
    world = ChainWorld(seed)
    world.run()
    return world, world.faults_at_end() + check(world)


@pytest.mark.heavy
def test_histories_are_those_of_a_log(seeds_wanted: int | None) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(seeds_wanted or SEEDS):
        world, found = run(seed)
        assert not found, f"seed {seed}: {found}"
        outcomes.update(f"{done.kind} {type(done.outcome).__name__}" for done in world.history)
        outcomes["junk"] += sum(len(content) < 10 for content in world.store.first.values())
        outcomes["layouts"] += world.layout.epoch - 1
        outcomes["disks lost"] += world.disks_lost
        outcomes["copies"] += world.copies_made
    for wanted in (
        "append Placed",
        "append NoneType",
        "append if Placed",
        "append if Contradicted",
        "read Known",
        "trim Applied",
        "junk",
        "layouts",
        "disks lost",
        "copies",
    ):
        assert outcomes[wanted], f"{wanted} never happened: {outcomes}"


@pytest.mark.parametrize("bug", CHAIN_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant(monkeypatch)
    for seed in bug.seeds(CAUGHT_WITHIN):
        try:
            _, found = run(seed)
        except Exception:  # noqa: BLE001 - an assertion of the core, or no end
            return
        if found:
            return
    pytest.fail(f"no seed below {CAUGHT_WITHIN} shows that {bug.name}")
