"""What happens to sequencers in a simulation: elections, and damage to one disk (decision 0042)."""

from __future__ import annotations

import random
from typing import Final

from indilog.base.ids import Epoch
from indilog.roles.role import METALOG_KINDS
from indilog.runtime.journal.segment_files import segment_files
from indilog.runtime.journal.segment_scan import Damage, SegmentScan
from indilog.runtime.node import NodeShell
from indilog.testing.simulation import SimulatedCluster, SimulatedProcess
from indilog_ordering.sequencer import Sequencer
from tests.simulation.random_events import RandomEvents

_ELECTIONS_SHARE: Final = 0.5
"""The share of runs with elections, of those with several sequencers."""
_ELECTIONS_MEAN_S: Final = (0.05, 0.2, 1.0)
"""Simulated seconds between two elections, on average."""
_LOSSES_SHARE: Final = 0.4
"""The share of runs with damaged disks, of those with three sequencers in own processes."""
_LOSSES_MEAN_S: Final = (0.1, 0.3)
"""Simulated seconds between two losses, on average."""
_WIPES: Final = (0.0, 0.1, 0.5)
"""The share of the losses in which the whole disk is wiped."""


class Elections(RandomEvents):
    """Gives a new term to any sequencer, whether the primary works or not."""

    def __init__(self, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        super().__init__(cluster, injected, "elections")
        has_none = len(cluster.view.sequencers) == 1 or self._chance.random() >= _ELECTIONS_SHARE
        mean_s = self._chance.choice(_ELECTIONS_MEAN_S)
        if not has_none:
            self._begin(mean_s)

    def _happen(self) -> None:
        cluster = self._cluster
        primary = self._chance.choice(cluster.stored_view.sequencers)
        self._count("elections", traced=False)
        cluster.begin_term(primary, Epoch(cluster.next_epoch()))


class SequencerLosses(RandomEvents):
    """Repeatedly wipes the disk of one process, or damages metalog entries on it.

    In most runs it is the process of the first primary.
    """

    def __init__(self, cluster: SimulatedCluster, injected: dict[str, int]) -> None:
        super().__init__(cluster, injected, "disks of sequencers")
        if (process := self._chosen()) is not None:
            self._process = process
            mean_s = self._chance.choice(_LOSSES_MEAN_S)
            self._wipes = self._chance.choice(_WIPES)
            self._begin(mean_s)

    def _chosen(self) -> SimulatedProcess | None:
        """Return a process with a sequencer and no other node; None: this run has no losses."""
        cluster, chance = self._cluster, self._chance
        view = cluster.view
        alone = [p for p in cluster.processes if set(p.nodes) <= set(view.sequencers)]
        if len(view.sequencers) < 3 or len(alone) < 3 or chance.random() >= _LOSSES_SHARE:
            return None
        return (
            cluster.process_of(cluster.term.primary)
            if chance.random() < 0.7
            else chance.choice(alone)
        )

    def _happen(self) -> None:
        process, chance = self._process, self._chance
        process.crash(power=chance.random() < 0.5)
        if chance.random() < self._wipes:
            process.disk.wipe()
            self._count("wiped_sequencer")
        elif _damage(process, chance):
            self._count("damaged_sequencer")
        self._cluster.world.after(chance.choice((0.005, 0.05, 0.2)), process.start)


def _damage(process: SimulatedProcess, chance: random.Random) -> bool:
    """Flip three bits in each of a few consecutive frames; return whether there were any.

    Frames that no later frame declares synced are left intact: damaged, they would count as a torn
    tail (decision 0009).
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


def leading(cluster: SimulatedCluster) -> Sequencer | None:
    """Return the primary of the newest term that any running sequencer knows; None: the primary
    does not run, or has not adopted a copy yet.
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
