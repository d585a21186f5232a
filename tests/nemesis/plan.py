"""The faults of a run, drawn from its seed: the same seed gives each group the same sequence."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Final

from tests.nemesis.promise import EVERYTHING, GROUPS, KINDS, Fault

PAUSE_S: Final = 10.0
"""Mean seconds between the end of one fault of a group and the next."""
PAUSE_OF_ALL_S: Final = 60.0
"""The same for faults that hit all nodes."""


def kinds_of(group: str, kinds: Collection[str]) -> list[str]:
    """Return those of `kinds` that hit nodes of a group."""
    return sorted(name for name in kinds if not set(GROUPS[group]).isdisjoint(KINDS[name].targets))


def planned(seed: int, group: str, kinds: Collection[str]) -> Iterator[Fault]:
    """Yield faults of one group without end; `kinds` are those that hit it."""
    rng = random.Random(f"{seed} {group}")
    names = sorted(kinds)
    weights = [KINDS[name].weight for name in names]
    pause_s = PAUSE_OF_ALL_S if EVERYTHING in GROUPS[group] else PAUSE_S
    while True:
        [name] = rng.choices(names, weights)
        kind = KINDS[name]
        yield Fault(
            kind=name,
            target=rng.choice([node for node in GROUPS[group] if node in kind.targets]),
            pause_s=rng.uniform(0.0, 2 * pause_s),
            length_s=rng.uniform(0.3, kind.longest_s) if kind.longest_s else 0.0,
            variant=rng.getrandbits(32),
        )
