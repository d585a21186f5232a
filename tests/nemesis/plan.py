"""The faults of a run, drawn from its seed: the same seed gives each group the same sequence."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Final

from tests.nemesis.promise import EVERYTHING, Fault, Topology

PAUSE_S: Final = 10.0
"""Mean seconds between the end of one fault of a group and the next."""
PAUSE_OF_ALL_S: Final = 60.0
"""The same for faults that hit all nodes."""


def kinds_of(topology: Topology, group: str, kinds: Collection[str]) -> list[str]:
    """Return those of `kinds` that hit nodes of a group."""
    hit = set(topology.groups[group])
    return sorted(name for name in kinds if not hit.isdisjoint(topology.kinds[name].targets))


def planned(topology: Topology, seed: int, group: str, kinds: Collection[str]) -> Iterator[Fault]:
    """Yield faults of one group without end; `kinds` are those that hit it."""
    rng = random.Random(f"{seed} {group}")
    names = sorted(kinds)
    weights = [topology.kinds[name].weight for name in names]
    pause_s = PAUSE_OF_ALL_S if EVERYTHING in topology.groups[group] else PAUSE_S
    while True:
        [name] = rng.choices(names, weights)
        kind = topology.kinds[name]
        yield Fault(
            kind=name,
            target=rng.choice([node for node in topology.groups[group] if node in kind.targets]),
            pause_s=rng.uniform(0.0, 2 * pause_s),
            length_s=rng.uniform(0.3, kind.longest_s) if kind.longest_s else 0.0,
            variant=rng.getrandbits(32),
        )
