"""Cold storage in a share of the runs, and times at which it does not answer.

It is a real directory outside the simulated disks. Like a store over a network, it keeps its
objects through every crash. The random sources are its own: other runs stay as they were.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Final

from indilog.config import MIB, Config
from indilog.config.log_groups import ColdConfig
from indilog.testing.simulation import SimulatedCluster
from indilog.testing.simulation.world import World

_SHARE: Final = 0.3
"""The share of runs with cold storage."""
LOOK_S: Final = 0.02
"""How often a node looks for old records: a run takes a few simulated seconds."""
_AWAY_SHARE: Final = 0.5
"""The share of runs with cold storage in which it sometimes does not answer."""
_AWAY_MEAN_S: Final = 0.6
"""Simulated seconds from one outage to the next, on average."""


def with_cold_storage(seed: int, config: Config, place: Path) -> Config:
    """Return the configuration of a seed, which in a share of the runs moves records to `place`."""
    chance = World(seed).chance("cold storage")
    if chance.random() >= _SHARE:
        return config
    cold = ColdConfig(
        cold_place=str(place),
        cold_after_s=chance.choice((0.0, 0.001, 0.2)),
        cold_local_bytes_max=chance.choice((1, 2000)),
        cold_object_bytes=chance.choice((3000, 8000)),
        cold_bytes_per_s=1024 * MIB,
        cold_requests_max=chance.choice((1, 4)),
        cold_cache_bytes_max=chance.choice((40_000, 64 * MIB)),
        cold_timeout_s=0.5,
        cold_retry_s=0.05,
    )
    return dataclasses.replace(config, node=dataclasses.replace(config.node, cold=cold))


class ColdAway:
    """Makes the store unavailable at random instants, for a while.

    Attributes:
        objects_max: the largest number of objects that were stored at once.
    """

    def __init__(self, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        self._cluster = cluster
        self._injected = injected
        self._chance: random.Random = cluster.world.chance("cold storage away")
        place = cluster.config.node.cold.cold_place
        self._place = Path(place) if place else None
        self._over = False
        self.objects_max = 0
        if self._place is not None and self._chance.random() < _AWAY_SHARE:
            self._next()

    @property
    def _away(self) -> Path:
        assert self._place is not None, "only a store that is used can be away"
        return self._place.with_name("away")

    def _next(self) -> None:
        self._cluster.world.after(self._chance.expovariate(1 / _AWAY_MEAN_S), self._take)

    def _take(self) -> None:
        if self._over or self._place is None:
            return
        if self._place.exists():
            self._place.rename(self._away)
            self._injected["cold_away"] = self._injected.get("cold_away", 0) + 1
            self._cluster.world.tell("fault: cold_away")
        self._cluster.world.after(self._chance.choice((0.01, 0.1, 0.6)), self._bring)

    def _bring(self) -> None:
        self._restore()
        if not self._over:
            self._next()

    def _restore(self) -> None:
        if self._place is None or not self._away.exists():
            return
        self._place.mkdir(exist_ok=True)  # a process may have made a folder in it meanwhile
        for folder in self._away.iterdir():
            folder.rename(self._place / folder.name)
        self._away.rmdir()

    def note(self) -> None:
        """Count the objects."""
        if self._place is not None:
            count = sum(1 for _ in self._place.glob("*/*/*.parquet"))
            self.objects_max = max(self.objects_max, count)

    def end(self) -> None:
        """Make the store available until the end of the run."""
        self._over = True
        self._restore()
