"""Elections in a simulation: sequencers get new terms at random instants, whether the primary works
or not.

This module has its own random source: without elections a seed gives the same run as before.
"""

from __future__ import annotations

from typing import Final

from indilog.base.ids import Epoch
from indilog.runtime.node import NodeShell
from indilog.testing.simulation import SimulatedCluster
from indilog_ordering.sequencer import Sequencer

_SHARE: Final = 0.5
"""The share of runs with elections, of those with several sequencers."""
_MEAN_S: Final = (0.05, 0.2, 1.0)
"""Simulated seconds between two elections, on average."""


class Elections:
    """Begins terms from the beginning until `end`; counts them in `injected`."""

    def __init__(self, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        self._cluster = cluster
        self._injected = injected
        self._chance = cluster.world.chance("elections")
        self._over = len(cluster.view.sequencers) == 1 or self._chance.random() >= _SHARE
        self._mean_s = self._chance.choice(_MEAN_S)
        self._next()

    def end(self) -> None:
        """Begin no more terms."""
        self._over = True

    def _next(self) -> None:
        if not self._over:
            self._cluster.world.after(self._chance.expovariate(1 / self._mean_s), self._elect)

    def _elect(self) -> None:
        if self._over:
            return
        cluster = self._cluster
        primary = self._chance.choice(cluster.stored_view.sequencers)
        self._injected["elections"] = self._injected.get("elections", 0) + 1
        cluster.begin_term(primary, Epoch(cluster.next_epoch()))
        self._next()


def leading(cluster: SimulatedCluster) -> Sequencer | None:
    """Return the primary of the newest term that a running sequencer knows; None: it does not run,
    or has not adopted a copy yet.
    """
    roles = [
        role
        for process in cluster.processes
        if process.shell is not None and not process.failing
        for role in process.shell.roles.values()
        if isinstance(role, Sequencer) and role._core is not None
    ]
    newest = max((role.status()["term"] for role in roles), default=0)
    leads = (r for r in roles if r._primary is not None and r.status()["term"] == newest)
    return next(leads, None)


def home_of(cluster: SimulatedCluster, role: Sequencer) -> NodeShell:
    """Return the shell that runs a sequencer."""
    shell = cluster.process_of(role._node).shell
    assert shell is not None, "it runs"
    return shell
