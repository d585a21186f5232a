"""One simulated run: a seed draws a cluster, a workload and faults; what happened is checked."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest.mock import patch

from indilog.base.errors import IndilogError
from indilog.runtime.journal import checkpointing
from indilog.testing.simulation import SimulatedCluster, Stuck, World
from indilog_storage import cold_tier
from tests.simulation import arrangement, checkers, cold_runs, faults
from tests.simulation.aftermath import Aftermath
from tests.simulation.copies import CopiesNotes
from tests.simulation.false_damage import FalseDamage, pages_of_a_byte
from tests.simulation.history import Operation, Violation
from tests.simulation.joins import Joins
from tests.simulation.lost_batches import LostBatches
from tests.simulation.lost_storage import LostStorage
from tests.simulation.metalog_notes import MetalogNotes
from tests.simulation.replaced_entries import ReplacedEntries
from tests.simulation.sequencer_faults import Elections, SequencerLosses
from tests.simulation.workload import Workload

OPERATIONS: Final = 250
"""Approximate operations of a run."""
_DURATION_S_MAX: Final = 20.0
_TICK_S: Final = 0.02
_CHECKPOINT_SHARES: Final = (2, 2, 0.2, 0.05)
"""Checkpoint bytes that may be written for each appended byte.

With few, segments fill between two checkpoints.
"""


@dataclasses.dataclass
class Report:
    """The result of one seed.

    Attributes:
        digest: a hash of all that happened; equal for two runs of one seed.
        violations: the broken guarantees; empty for a clean run.
    """

    seed: int
    digest: str = ""
    violations: list[Violation] = dataclasses.field(default_factory=list)
    operations: int = 0
    acknowledged: int = 0
    unknown: int = 0
    records: int = 0
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    frames_lost: int = 0
    simulated_s: float = 0.0
    steps: int = 0
    arrangement: str = ""
    history: list[Operation] = dataclasses.field(default_factory=list)
    cold_objects: int = 0

    def describe(self) -> str:
        """Return the command that replays a failed run."""
        lines = [f"seed {self.seed}: {v.check}: {v.what}" for v in self.violations[:5]]
        return "\n".join(
            [*lines, self.arrangement, f"replay: python -m tests.simulation --seed {self.seed}"]
        )


class Run:
    """One seed's run."""

    def __init__(self, seed: int, *, lines: list[str] | None = None, quiet: bool = False) -> None:
        self.report = Report(seed)
        self._quiet = quiet
        self._metalog = MetalogNotes(self.report.violations)
        self._lines = lines

    def run(self) -> Report:
        """Run the seed and check its evidence."""
        report = self.report
        source = World(report.seed)
        chance = source.chance("arrangement")
        drawn = arrangement.draw(
            chance, *map(source.chance, ("ack quorum", "spares", "shared processes"))
        )
        report.arrangement = drawn.describe()
        with (
            self._metalog.watching(),
            pages_of_a_byte(),
            patch.object(
                checkpointing,
                "_SHARE",
                World(report.seed).chance("checkpoints").choice(_CHECKPOINT_SHARES),
            ),
            TemporaryDirectory(prefix="indilog-cold-") as folder,
            patch.object(cold_tier, "_LOOK_S", cold_runs.LOOK_S),
            SimulatedCluster(
                report.seed,
                cold_runs.with_cold_storage(report.seed, drawn.config, Path(folder, "cold")),
                arrangement=drawn.processes,
                lines=self._lines,
                segment_bytes=drawn.segment_bytes,
            ) as cluster,
        ):
            workload = Workload(
                cluster, chance, operations=OPERATIONS, sessions=chance.randint(1, 5)
            )
            kinds, mean_s = ((), 1.0) if self._quiet else faults.draw(chance)
            try:
                self._play(cluster, workload, kinds, mean_s)
            except (AssertionError, IndilogError) as error:
                check = "liveness" if isinstance(error, Stuck | IndilogError) else "invariant"
                report.violations.append(Violation(check, f"{type(error).__name__}: {error}"))
            self._sum_up(cluster, workload)
        return report

    def _play(
        self, cluster: SimulatedCluster, workload: Workload, kinds: tuple[str, ...], mean_s: float
    ) -> None:
        world = cluster.world
        for process in list(cluster.processes):
            workload.attach(process)
        chaos = faults.Chaos(cluster, kinds, mean_s)
        self.report.faults = chaos.injected
        losses = None if self._quiet else SequencerLosses(cluster, chaos.injected)
        batches = None if self._quiet else LostBatches(cluster, chaos.injected)
        elections = None if self._quiet else Elections(cluster, chaos.injected)
        storage = None if self._quiet else LostStorage(cluster, chaos.injected)
        joins = None if self._quiet else Joins(cluster, workload, chaos.injected)
        cold = cold_runs.ColdAway(cluster, chaos.injected)
        end_s = world.now_s + _DURATION_S_MAX
        moving = world.chance("moving")
        copies = CopiesNotes(self.report.violations, {} if batches is None else batches.lost)
        false_damage = FalseDamage(self.report.violations)
        while workload.wants_more() and world.now_s < end_s:
            world.run_for(_TICK_S)
            cluster.check_invariants()
            self._check_limits(cluster, workload.habits.batch_max)
            self._metalog.note(cluster)
            copies.note(cluster)
            false_damage.note(cluster, chaos.injected)
            cold.note()
            if joins is not None:
                joins.note()
            workload.move_detached(moving)
        workload.stopped = True
        for one in (losses, batches, elections, storage, joins):
            if one is not None:
                one.end()
        chaos.end()
        cold.end()
        self.report.cold_objects = cold.objects_max
        aftermath = Aftermath(
            cluster, workload, self._metalog, self.report.violations, batches, joins
        )
        evidence = aftermath.gather()
        self.report.violations += checkers.find_violations(evidence)
        aftermath.enforce_retention()
        if not self._quiet:
            ReplacedEntries(cluster, self.report.violations).happen(chaos.injected)
        self.report.records = len(evidence.records)

    def _check_limits(self, cluster: SimulatedCluster, batch_max: int) -> None:
        """Check that no more bytes wait than the configuration allows (a batch is taken whole)."""
        limit = cluster.config.node.appends.append_pending_max + batch_max
        for process in cluster.processes:
            for node, logs in process.logs.items():
                pending = logs.engine.status()["progress"]["appends_pending"]
                if pending > limit:
                    what = f"{pending} appends wait at {node}, {limit} are allowed"
                    raise AssertionError(what)

    def _sum_up(self, cluster: SimulatedCluster, workload: Workload) -> None:
        report, world = self.report, cluster.world
        report.digest = cluster.digest
        report.operations = len(workload.history)
        report.acknowledged = sum(o.outcome == "ok" for o in workload.history)
        report.unknown = sum(o.outcome == "unknown" for o in workload.history)
        report.frames_lost = cluster.network.frames_lost
        report.simulated_s = world.now_s - 1_700_000_000.0
        report.steps = world.steps
        report.history = workload.history
        report.violations += [
            Violation("error", f"{type(error).__name__}: {error}") for error in workload.errors
        ]
        report.violations += [
            Violation("crash", f"{process.name}: {type(error).__name__}: {error}")
            for process in cluster.processes
            for error in process.failures
            if not isinstance(error, OSError)
        ]


def run_seed(seed: int) -> Report:
    """Run one seed; a fault of the simulator itself is a violation as well."""
    try:
        report = Run(seed).run()
    except Exception:  # noqa: BLE001 it is reported, with its seed
        report = Report(seed)
        report.violations.append(Violation("simulator", traceback.format_exc()))
    report.history = []
    return report
