"""What disks of sequencers lose in a simulation: one process a run, the primary's mostly, is wiped
or has metalog entries damaged, repeatedly (decision 0042).

This module is apart from `tests.simulation.faults`, because it has its own random source: without
these losses a seed gives the same run as before.
"""

from __future__ import annotations

import random
from typing import Final

from indilog.roles.role import METALOG_KINDS
from indilog.runtime.journal.segment_files import segment_files
from indilog.runtime.journal.segment_scan import Damage, SegmentScan
from indilog.testing.simulation import SimulatedCluster, SimulatedProcess

_SHARE: Final = 0.4
"""The share of runs with these losses, of those that have backups."""
_MEAN_S: Final = (0.1, 0.3)
"""Simulated seconds between two losses, on average."""
_WIPES: Final = (0.0, 0.1, 0.5)
"""The share of the losses that are whole disks."""


class SequencerLosses:
    """Damages one process from the beginning until `end`; counts in `injected`."""

    def __init__(self, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        self._cluster = cluster
        self._injected = injected
        self._chance = cluster.world.chance("disks of sequencers")
        self._over = False
        if (process := self._chosen()) is not None:
            self._process = process
            self._mean_s = self._chance.choice(_MEAN_S)
            self._wipes = self._chance.choice(_WIPES)
            self._next()

    def end(self) -> None:
        """Damage nothing more."""
        self._over = True

    def _chosen(self) -> SimulatedProcess | None:
        """Return a process that has a sequencer and nothing else."""
        cluster, chance = self._cluster, self._chance
        view = cluster.view
        alone = [p for p in cluster.processes if set(p.nodes) <= set(view.sequencers)]
        if len(view.sequencers) < 3 or len(alone) < 3 or chance.random() >= _SHARE:
            return None
        return (
            cluster.process_of(cluster.term.primary)
            if chance.random() < 0.7
            else chance.choice(alone)
        )

    def _next(self) -> None:
        self._cluster.world.after(self._chance.expovariate(1 / self._mean_s), self._strike)

    def _strike(self) -> None:
        if self._over:
            return
        process, chance = self._process, self._chance
        process.crash(power=chance.random() < 0.5)
        if chance.random() < self._wipes:
            process.disk.wipe()
            self._tell("wiped_sequencer")
        elif _damage(process, chance):
            self._tell("damaged_sequencer")
        self._cluster.world.after(chance.choice((0.005, 0.05, 0.2)), process.start)
        self._next()

    def _tell(self, kind: str) -> None:
        self._injected[kind] = self._injected.get(kind, 0) + 1
        self._cluster.world.tell(f"fault: {kind}")


def _damage(process: SimulatedProcess, chance: random.Random) -> bool:
    """Flip three bits in each of some consecutive frames; return whether there are some.

    Frames that no later frame calls synced are left: unreadable, they would be a torn tail
    (decision 0009).
    """
    directory = process.disk.directory / "journal"
    if not (files := segment_files(directory)):
        return False
    file = chance.choice(files)
    frames = [
        frame
        for frame in SegmentScan(file.path, file.first, newest=True)
        if not isinstance(frame, Damage)
    ]
    synced = max((header.synced for header, _, _ in frames), default=0)
    places = [
        place
        for header, _, place in frames
        if header.kind in METALOG_KINDS and place.offset + place.length < synced
    ]
    if not places:
        return False
    start = chance.randrange(len(places))
    for place in places[start : start + chance.choice((1, 1, 3, 10))]:
        for bit in chance.sample(range(8 * place.length), 3):
            process.disk.flip_bit(f"journal/{file.path.name}", place.offset + bit // 8, bit % 8)
    return True
